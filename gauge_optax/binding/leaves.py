"""Leaves by their paths, and `Block`s, which are the parts of leaves that gauges read and write.

The *normalised path* of a leaf is its key path joined by `/`. Many frameworks keep each array in a box, a node that
holds nothing else. The box's own key is left out of the path: the attribute `value` (`nnx.Variable`, Linen's
`Partitioned`, penzai's parameters), or the number that JAX gives where a node names no keys (haliax's `NamedArray`).
An optimizer's `init` often sees a tree with boxes and its `update` the same tree without, and leaves have the same
paths in both. A block is one axes string applied to one leaf.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import FlattenedIndexKey, GetAttrKey

from gauge_optax.binding.axes import Ranges, Site, parse_axes, solve_lengths
from gauge_optax.binding.specs import BlockSpec
from gauge_optax.errors import binding_error

# Leaves by path ---------------------------------------------------------------------------------------


def _only_children(treedef: Any, only: bool = False) -> Iterator[bool]:
    """For each leaf in order: whether it is its parent's only child. `only` is the answer for a tree of one leaf."""
    # Key paths do not show this: a field that is None has no key path, but with it the parent has two children.
    if treedef.num_leaves == treedef.num_nodes == 1:
        yield only
        return
    children = treedef.children()
    for child in children:
        yield from _only_children(child, len(children) == 1)


def _flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    """The normalised paths and the leaves of a tree, where a `MaskedNode` counts as a leaf, and the treedef."""
    treedef: Any
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    paths = []
    for (keys, _), only in zip(pairs, _only_children(treedef), strict=True):
        # No other key is left out, because a dict's key "value" and a list's index are names that the user gave.
        if only and (keys[-1] == GetAttrKey("value") or isinstance(keys[-1], FlattenedIndexKey)):
            keys = keys[:-1]
        paths.append(jax.tree_util.keystr(keys, simple=True, separator="/"))
    if len(set(paths)) < len(paths):
        twice = next(path for k, path in enumerate(paths) if path in paths[:k])
        raise binding_error(
            "binding", f"two leaves share the path '{twice}'", "keys that contain '/' or print alike",
            "one leaf per normalised path", "rename one of the keys")
    return paths, [leaf for _, leaf in pairs], treedef


def shown_and_hidden(tree: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Leaves by normalised path, and the paths at which a `MaskedNode` stands in place of a leaf or a subtree.

    Args:
      tree: any pytree; `optax.masked` and `optax.partition` make such nodes.

    Returns:
      `leaves_by_path(tree)`, and the other paths, in tree order.

    Raises:
      ValueError: two leaves have one normalised path.

    >>> import optax
    >>> from gauge_optax.binding import shown_and_hidden
    >>> shown_and_hidden({"a": {"kernel": 1.0, "bias": optax.MaskedNode()}})
    ({'a/kernel': 1.0}, ('a/bias',))
    """
    paths, leaves, _ = _flatten(tree)
    shown = {path: leaf for path, leaf in zip(paths, leaves, strict=True) if not isinstance(leaf, optax.MaskedNode)}
    return shown, tuple(path for path in paths if path not in shown)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Leaves by normalised path, in tree order. `None` and `optax.MaskedNode` are left out.

    Args:
      tree: any pytree.

    Returns:
      A dict from path to leaf.

    Raises:
      ValueError: two leaves have one normalised path.

    >>> from gauge_optax.binding import leaves_by_path
    >>> leaves_by_path({"mlp": [{"kernel": 1.0}, None, {"kernel": 2.0}]})
    {'mlp/0/kernel': 1.0, 'mlp/2/kernel': 2.0}
    """
    return shown_and_hidden(tree)[0]


def structures_apart(found: Any, expected: Any, path: str = "") -> tuple[str, str] | None:
    """What two trees hold at the first place where their structures differ; None if they differ nowhere.

    Args:
      found: any pytree, such as a state.
      expected: another one.
      path: the path of both in larger trees.

    Returns:
      Two phrases, for the lines `found` and `expected` of an error.

    >>> from gauge_optax.binding import structures_apart
    >>> structures_apart({"a": (1.0, {"b": 2.0})}, {"a": (1.0, {"c": 2.0})})
    ("'a/1' with b", "'a/1' with c")
    """
    if str(jax.tree.structure(found)) == str(jax.tree.structure(expected)):
        return None
    sides: list[dict[str, Any]] = []
    for tree in (found, expected):
        # One level: the node itself is flattened, and its children are leaves.
        children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x, tree=tree: x is not tree)[0]
        sides.append({jax.tree_util.keystr(keys, simple=True, separator="/"): child for keys, child in children})
    one, other = sides
    where, at = (f"'{path}'", f" at '{path}'") if path else ("the tree", "")
    kinds = type(found).__name__, type(expected).__name__
    if kinds[0] != kinds[1]:
        return f"{kinds[0]}{at}", f"{kinds[1]}{at}"
    # A node with a method `keys` is compared by these names. `measure.live.Figures`, for example, is a NamedTuple with
    # two fields, but stands for a dict.
    names = [[*map(str, x.keys())] if hasattr(x, "keys") else [*y] for x, y in ((found, one), (expected, other))]
    first, second = ([name for name in a if name not in b][:6] for a, b in (names, names[::-1]))
    if first or second:
        return tuple(f"{where} with {', '.join(own)}" if own else f"{where} without {', '.join(more)}"
                     for own, more in ((first, second), (second, first)))  # type: ignore[return-value]
    deeper = (structures_apart(one[x], other[x], "/".join(filter(None, (path, x)))) for x in one if x in other)
    return next(filter(None, deeper), (f"another {kinds[0]}{at}", f"the {kinds[1]} that was expected"))


def real_leaves(name: str, tree: Any) -> dict[str, Any]:
    """Leaves of floating-point numbers by path, for functions that count or move every parameter.

    Args:
      name: name of the function, for errors.
      tree: any pytree.

    Returns:
      A dict from path to leaf, without the leaves of integers, bools and keys, which nothing trains.

    Raises:
      ValueError: a complex leaf, which is two real parameters per entry.

    >>> from gauge_optax.binding.leaves import real_leaves
    >>> list(real_leaves("llc", {"w": jnp.ones(2), "count": 3}))
    ['w']
    """
    numbers = {path: leaf for path, leaf in leaves_by_path(tree).items() if has_dtype(leaf)}
    for path, leaf in numbers.items():
        if jnp.iscomplexobj(leaf):
            raise binding_error(
                name, f"a complex leaf '{path}'", str(jnp.result_type(leaf)),
                "real parameters: a complex one is two of them",
                "store the real and the imaginary part as two leaves, and join them in the function: "
                "p['re'] + 1j * p['im']; if it is no parameter, pass a tree without it, and let the function close "
                "over it",
            )
    return {path: leaf for path, leaf in numbers.items() if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)}


def inexact_leaves(tree: Any) -> dict[str, Any]:
    """Leaves of real or complex numbers by path, without integers, bools, keys, and objects such as functions.

    >>> from gauge_optax.binding.leaves import inexact_leaves
    >>> list(inexact_leaves({"w": jnp.ones(2), "count": 3, "activation": jax.nn.relu}))
    ['w']
    """
    numbers = {path: leaf for path, leaf in leaves_by_path(tree).items() if has_dtype(leaf)}
    return {path: leaf for path, leaf in numbers.items() if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)}


def has_dtype(leaf: Any) -> bool:
    """Whether a leaf is an array, a shape or a Python number. Modules may have functions and strings as leaves.

    >>> from gauge_optax.binding.leaves import has_dtype
    >>> has_dtype(jnp.ones(2)), has_dtype(0.5), has_dtype(jax.nn.relu)
    (True, True, False)
    """
    return hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)


def in_single_or_better(leaf: Any) -> jax.Array:
    """A leaf of real numbers in float64 if it is of float64, and otherwise in float32.

    `jnp.promote_types` does the same, except that it raises for the 8-bit dtypes, which JAX promotes to no other.

    >>> from gauge_optax.binding.leaves import in_single_or_better
    >>> in_single_or_better(jnp.ones(2, jnp.float8_e4m3fn)).dtype
    dtype('float32')
    """
    dtype = jnp.result_type(leaf)
    return jnp.asarray(leaf, dtype if dtype == jnp.float64 else jnp.float32)


def shared_leaves(leaves: Mapping[str, Any]) -> set[str]:
    """The paths of leaves that are one array with another leaf: deleting or donating one would delete the other.

    >>> from gauge_optax.binding.leaves import shared_leaves
    >>> one = jnp.ones(2)
    >>> sorted(shared_leaves({"a": one, "b": one, "c": jnp.ones(2)}))
    ['a', 'b']
    """
    uses = collections.Counter(map(id, leaves.values()))
    return {path for path, leaf in leaves.items() if uses[id(leaf)] > 1}


def with_leaves(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The same tree with some leaves replaced.

    Args:
      tree: any pytree.
      leaves: new leaves by normalised path; all other leaves stay, and so do `MaskedNode`s.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: a path that the tree does not have.

    >>> from gauge_optax.binding import with_leaves
    >>> with_leaves({"a": [1.0, 2.0]}, {"a/1": 5.0})
    {'a': [1.0, 5.0]}
    """
    paths, old, treedef = _flatten(tree)
    for path in set(leaves).difference(paths):
        raise binding_error(
            "binding", f"no leaf to replace at '{path}'", f"leaves {', '.join(paths[:6])}",
            "paths of the same tree", "take the paths from leaves_by_path(tree)")
    return treedef.unflatten([leaves.get(path, leaf) for path, leaf in zip(paths, old, strict=True)])


def is_empty(tree: Any) -> bool:
    """Whether a tree has neither leaves nor `MaskedNode`s.

    `optax.tree.map_params` calls `init` with such a tree, and a gauge must not complain about missing leaves then.

    Args:
      tree: any pytree.

    Returns:
      True for a tree with nothing to bind to.

    >>> import optax
    >>> from gauge_optax.binding import is_empty
    >>> is_empty({"a": None}), is_empty({"a": optax.MaskedNode()})
    (True, False)
    """
    return not jax.tree_util.tree_leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))


def leaf_shape(leaf: Any) -> tuple[int, ...]:
    """Shape of a leaf.

    Args:
      leaf: an array, tracer, ShapeDtypeStruct, number, or anything else that a tree may hold.

    Returns:
      The shape, () for a leaf that has none.

    >>> from gauge_optax.binding import leaf_shape
    >>> leaf_shape(jnp.ones((2, 3))), leaf_shape(1.0)
    ((2, 3), ())
    """
    shape = getattr(leaf, "shape", None)
    return shape if isinstance(shape, tuple) else ()


def mask_by_path(mask: Any, params: Any) -> dict[str, bool]:
    """Leaf path → the boolean that a mask, in the form that Optax takes, has for the leaf.

    Args:
      mask: a tree of booleans like `params` or a prefix of it, or a function from parameters to such a tree.
      params: the tree.

    >>> from gauge_optax.binding import mask_by_path
    >>> mask_by_path({"up": True, "down": False}, {"up": {"kernel": 1.0}, "down": 2.0})
    {'down': False, 'up/kernel': True}
    """
    whole = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: bool(flag), part), values_at(mask, params), params)
    return dict(zip(leaves_by_path(params), jax.tree.leaves(whole), strict=True))


def values_at(mask: Any, params: Any) -> Any:
    """Returns a mask or a tree of labels. If it is given as a function of the parameters, it calls the function.

    `callable` alone does not tell functions from trees: in some frameworks a module is a tree that can be called
    (`eqx.Module`), and so is a mask of its structure. A function is a leaf, such a mask is not.

    Args:
      mask: a tree, or a function from a tree to a tree.
      params: the argument of the function.

    >>> from gauge_optax.binding import values_at
    >>> values_at({"w": True}, {"w": 1.0}), values_at(lambda p: {"w": p["w"] > 2}, {"w": 1.0})
    ({'w': True}, {'w': False})
    """
    return mask(params) if callable(mask) and jax.tree.leaves(mask) == [mask] else mask


# Blocks -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Block:
    """Some or all entries of one leaf, with named axes. A block is hashable and holds no array.

    A block is read in two steps. First, every axis of the leaf, or a range of it (a *window*), is split row-major into
    one or more axes. Then each of these is restricted to the indices that the axes string selects; an axis of which an
    integer selects one index is dropped. The result, with one axis per label, is the block's *view*.

    Attributes:
      path: normalised path of the leaf.
      argument: the constructor's argument that the block comes from, "up" say.
      axes: the axes string.
      shape: the leaf's shape.
      split: the shape after groups are split.
      picks: per axis of `split`, the index that an integer selects, or the selected ranges (start, stop) in order.
      labels: per axis of the view, its name or "_".
      one_plus: whether the leaf stores the value less one.
      window: per axis of the leaf, the window (start, stop) that is split; None for the whole axis.

    >>> from gauge_optax.binding import BlockSpec, bind_leaf
    >>> spec = BlockSpec("blocks", "qkv", "(qkv=1 head basis) _")
    >>> block = bind_leaf("head_rotation", spec, "qkv", (24, 5), {"head": 2, "basis": 4})
    >>> block.split, block.labels, block.view_shape
    ((3, 2, 4, 5), ('head', 'basis', '_'), (2, 4, 5))
    >>> block.total(("head",), jnp.ones((24, 5)))
    Array([20., 20.], dtype=float32)
    >>> block.spread(("head",), jnp.array([1.0, 2.0])).shape
    (24, 1)
    """

    path: str
    argument: str
    axes: str
    shape: tuple[int, ...]
    split: tuple[int, ...]
    picks: tuple[int | Ranges, ...]
    labels: tuple[str, ...]
    one_plus: bool
    window: tuple[tuple[int, int] | None, ...]

    # Tracing asks for these properties many times per block. `cached_property` works on a frozen dataclass because it
    # writes to `__dict__` directly; equality and hash look at the fields alone.

    @functools.cached_property
    def selected(self) -> tuple[Ranges, ...]:
        """Per axis of `split`, the selected ranges (start, stop) in order; an index i is the range (i, i + 1)."""
        return tuple(((i, i + 1),) if isinstance(i, int) else i for i in self.picks)

    @functools.cached_property
    def windows(self) -> tuple[Ranges, ...]:
        """Per axis of the leaf, the range (start, stop) that is split, in the form of `selected`."""
        return tuple(((0, n) if span is None else span,) for span, n in zip(self.window, self.shape, strict=True))

    @functools.cached_property
    def whole(self) -> bool:
        """Whether the block selects every entry of the leaf."""
        return _covers(self.windows, self.shape) and _covers(self.selected, self.split)

    @functools.cached_property
    def view_shape(self) -> tuple[int, ...]:
        """Shape of `view(leaf)`; its axes are `labels`."""
        return tuple(_length(i) for i in self.picks if not isinstance(i, int))

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Per axis of the leaf, the axes of `split` into which it splits."""
        numbers = itertools.count()
        # The string was parsed without an error when the block was bound. So the names that an error would need are "".
        return tuple(tuple(next(numbers) for _ in group) for group in parse_axes("", "", self.axes).groups)

    @functools.cached_property
    def split_labels(self) -> tuple[str, ...]:
        """A label per axis of `split`; "" for an axis of which an integer selects one index."""
        labels = iter(self.labels)
        return tuple("" if isinstance(i, int) else next(labels) for i in self.picks)

    @property
    def row_labels(self) -> tuple[str, ...]:
        """A label per axis of `rows`."""
        return self.labels

    def rows(self, leaf: Any) -> Any:
        """The view, in the form in which gauges of heads read it: a subclass may split the basis axis further."""
        return self.view(leaf)

    def view(self, leaf: Any) -> Any:
        """The selected entries, with the axes `labels`. The leaf may be a JAX or a NumPy array."""
        if self.whole:
            return leaf.reshape(self.view_shape)
        window = _taken(leaf, self.windows)
        return _taken(window.reshape(self.split), self.selected).reshape(self.view_shape)

    def write(self, leaf: Any, view: Any) -> Any:
        """The leaf with its selected entries replaced by `view`, in the leaf's dtype."""
        view = view.astype(leaf.dtype)
        if self.whole:
            return view.reshape(self.shape)
        window = _taken(leaf, self.windows)
        part = view.reshape([_length(ranges) for ranges in self.selected])
        written = _replaced(window.reshape(self.split), part, self.selected).reshape(window.shape)
        return _replaced(leaf, written, self.windows)

    def spread(self, named: tuple[str, ...], value: Any, elsewhere: float = 0.0) -> jax.Array:
        """Broadcasts one value per index of the named axes to the selected entries of the leaf: the adjoint of `total`.

        Args:
          named: names of the value's axes, each one of `labels`.
          value: array with exactly these axes.
          elsewhere: the value of entries that are not selected.

        Returns:
          Array of the leaf's rank that broadcasts to its shape; it has length 1 along axes along which it is constant.
        """
        labels, selected, lengths = self.split_labels, self.selected, [_length(ranges) for ranges in self.selected]
        # The caller's order of names need not be the leaf's.
        order = sorted(range(len(named)), key=lambda k: labels.index(named[k]))
        out = jnp.transpose(value, order).reshape(
            [n if label in named else 1 for n, label in zip(lengths, labels, strict=True)])
        # Length 1 along axes along which the result is constant spares XLA an array of repeated values.
        varies = [
            window != ((0, n),) or any(labels[k] in named or selected[k] != ((0, self.split[k]),) for k in group)
            for group, window, n in zip(self.groups, self.windows, self.shape, strict=True)]
        split_varies = [flag for flag, group in zip(varies, self.groups, strict=True) for _ in group]
        out = jnp.broadcast_to(out, [n if flag else 1 for n, flag in zip(lengths, split_varies, strict=True)])
        out = _padded(out, selected, self.split, split_varies, elsewhere)
        out = out.reshape([_length(window) if flag else 1 for window, flag in zip(self.windows, varies, strict=True)])
        return _padded(out, self.windows, self.shape, varies, elsewhere)

    def total(self, named: tuple[str, ...], leaf: Any) -> jax.Array:
        """Sum of the selected entries over every axis that is not named.

        Args:
          named: names of the result's axes, each one of `labels`.
          leaf: array of shape `shape`.

        Returns:
          Array with the named axes in that order.
        """
        kept = [label for label in self.labels if label in named]
        sums = jnp.sum(self.view(leaf), axis=tuple(k for k, label in enumerate(self.labels) if label not in named))
        return jnp.transpose(sums, [kept.index(name) for name in named])

    def row_sums(self, named: tuple[str, ...], rows: jax.Array) -> jax.Array:
        """Does what `total` does for an array like `rows(leaf)`, whose axes are `row_labels`."""
        kept = [label for label in self.row_labels if label in named]
        sums = jnp.sum(rows, axis=tuple(k for k, label in enumerate(self.row_labels) if label not in named))
        return jnp.transpose(sums, [kept.index(name) for name in named])

    def entries(self, named: tuple[str, ...]) -> int:
        """How many entries of the block have one and the same index along the named axes."""
        return math.prod(n for n, label in zip(self.view_shape, self.labels, strict=True) if label not in named)

    def axis_ids(self, axis: int, names: Collection[str]) -> np.ndarray:
        """Numbers the indices of one axis of the leaf by the named axes that it is split into.

        Args:
          axis: an axis of the leaf.
          names: the named axes; those that are parts of other axes of the leaf are ignored.

        Returns:
          One integer per index of the axis: -1 if the block does not select it, else its row-major index over the parts
          of this axis that are in `names`. Indices that differ only in other parts have the same number.
        """
        group = self.groups[axis]
        places = [np.concatenate([np.arange(*pair) for pair in self.selected[k]]) for k in group]
        ids = np.zeros((), np.int64)
        for k, place in zip(group, places, strict=True):
            along = self.ids_along(self.split_labels[k], len(place), names)
            ids = np.repeat(ids[..., None], len(place), -1)
            if along is not None:
                ids = ids * len(place) + along
        split = np.full([self.split[k] for k in group], -1)
        split[np.ix_(*places)] = ids
        out = np.full(self.shape[axis], -1)
        ((start, stop),) = self.windows[axis]
        out[start:stop] = split.reshape(-1)
        return out

    def ids_along(self, label: str, length: int, names: Collection[str]) -> np.ndarray | None:
        """Numbers the selected indices of one axis of `split` for `axis_ids`.

        Args:
          label: the label of the axis.
          length: how many indices are selected.
          names: as in `axis_ids`.

        Returns:
          One integer per selected index; None if the axis is not among the names.
        """
        return np.arange(length) if label in names else None

    @property
    def names(self) -> tuple[str, ...]:
        """The names that may be passed to `axis_ids`."""
        return self.labels


def laid_out(values: jax.Array, names: Sequence[str], labels: Sequence[str]) -> jax.Array:
    """Transposes and reshapes an array with named axes, so that it broadcasts with an array that has other axes too.

    Args:
      values: the array.
      names: a name per axis of `values`, each one of the labels.
      labels: a label per axis of the other array. The result has these axes, with length 1 where `values` has none.

    >>> from gauge_optax.binding import laid_out
    >>> laid_out(jnp.ones((2, 5)), ("head", "layer"), ("layer", "_", "head")).shape
    (5, 1, 2)
    """
    lengths = dict(zip(names, values.shape, strict=True))
    ordered = jnp.transpose(values, [names.index(label) for label in labels if label in lengths])
    return ordered.reshape([lengths.get(label, 1) for label in labels])


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _covers(selected: Sequence[Ranges], shape: Sequence[int]) -> bool:
    return all(ranges == ((0, n),) for ranges, n in zip(selected, shape, strict=True))


def _taken(array: Any, selected: Sequence[Ranges]) -> Any:
    """The selected entries of an array; several ranges of one axis are concatenated."""
    if _covers(selected, array.shape):
        return array
    out = array[tuple(slice(ranges[0][0], ranges[-1][1]) for ranges in selected)]
    for axis, ranges in enumerate(selected):
        if len(ranges) > 1:
            # Slices copy contiguous memory. Indexing with an integer array would compile to a gather of single rows.
            before, first = (slice(None),) * axis, ranges[0][0]
            pieces = [out[(*before, slice(start - first, stop - first))] for start, stop in ranges]
            out = (np if isinstance(out, np.ndarray) else jnp).concatenate(pieces, axis)
    return out


def _replaced(array: Any, part: Any, selected: Sequence[Ranges]) -> Any:
    """The array with its selected entries replaced by those of `part`."""
    if part.shape == array.shape:
        return part
    plain = isinstance(array, np.ndarray) and isinstance(part, np.ndarray)
    out = array.copy() if plain else jnp.asarray(array)
    ends = [np.cumsum([0, *(stop - start for start, stop in ranges)]).tolist() for ranges in selected]
    for box in itertools.product(*(range(len(ranges)) for ranges in selected)):
        corner = [ranges[k] for ranges, k in zip(selected, box, strict=True)]
        piece = part[tuple(slice(end[k], end[k + 1]) for end, k in zip(ends, box, strict=True))]
        if plain:
            out[tuple(slice(*pair) for pair in corner)] = piece
        else:
            out = _joined(out, piece, corner)
    return out


def _joined(array: jax.Array, part: jax.Array, corner: Sequence[tuple[int, int]]) -> jax.Array:
    """The array with one rectangle of entries replaced by `part`, by concatenation with the entries around it.

    `dynamic_update_slice` would be simpler. But `part` may be computed from entries of the array in another order, as
    the planes of query and key in one fused leaf are. On CPU, jaxlib 0.10.2 then computes `part` while writing it in
    place, and reads entries that are overwritten already. *Measured*: errors of `act` and of steps under `jit` were as
    large as the entries.

    Args:
      array: the array.
      part: the new entries.
      corner: per axis, the (start, stop) of the rectangle.
    """
    for axis, (start, stop) in enumerate(corner):
        if stop - start < array.shape[axis]:
            before, inside, after = jnp.split(array, (start, stop), axis)
            inside = _joined(inside, part, [*corner[:axis], (0, stop - start), *corner[axis + 1 :]])
            return jnp.concatenate([x for x in (before, inside, after) if x.shape[axis]], axis)
    return part


def _padded(
    array: jax.Array, selected: Sequence[Ranges], shape: Sequence[int], varies: Sequence[bool], elsewhere: float
) -> jax.Array:
    """Puts an array at the selected indices of a larger one.

    Args:
      array: the array; along axes that vary it has one entry per selected index, along others length 1.
      selected: per axis, the selected ranges.
      shape: the shape of the larger array.
      varies: per axis, whether it varies; other axes keep length 1.
      elsewhere: the value at indices that are not selected.
    """
    pads = []
    for axis, (ranges, n, flag) in enumerate(zip(selected, shape, varies, strict=True)):
        first, last = ranges[0][0], ranges[-1][1]
        if flag and len(ranges) > 1:
            # `pad` cannot open gaps of unequal lengths. `take` can: it fills in `elsewhere` at indices out of bounds.
            source = np.full(n, array.shape[axis])
            source[np.concatenate([np.arange(*pair) for pair in ranges])] = np.arange(array.shape[axis])
            array = jnp.take(array, source, axis, mode="fill", fill_value=elsewhere)
            first, last = 0, n
        pads.append((first, n - last, 0) if flag else (0, 0, 0))
    if not any(before or after for before, after, _ in pads):
        return array
    return jax.lax.pad(array, jnp.asarray(elsewhere, array.dtype), pads)


def resolve_block(gauge: str, site: Site, split: tuple[int, ...]) -> Block:
    """The block of an axes string on a leaf.

    Args:
      gauge: name for errors.
      site: the axes string with its leaf.
      split: the leaf's shape after its groups are split, as `solve_lengths` returns it.

    Returns:
      The block.

    Raises:
      ValueError: the axes string selects an index that the axis does not have.

    >>> from gauge_optax.binding.axes import Site, parse_axes
    >>> from gauge_optax.binding.leaves import resolve_block
    >>> site = Site("up", "q", "(head basis)", (12,), parse_axes("heads", "q", "(head basis)"))
    >>> resolve_block("heads", site, (3, 4)).labels
    ('head', 'basis')
    """
    plan = site.plan
    picks: list[int | Ranges] = []
    for part, length in zip(plan.items, split, strict=True):
        if part.shortest > length:
            raise binding_error(
                gauge, f"index out of range, '{part.text}' at '{site.path}'", f"length {length} in shape {site.shape}",
                f"at least {part.shortest}, axes \"{site.axes}\"", "correct the index, or the sizes of its group")
        picks.append(part.pick if part.pick is not None else part.ranges or ((0, length),))
    labels = tuple(part.name for part in plan.items if part.pick is None)
    return Block(
        site.path, site.argument, site.axes, site.shape, split, tuple(picks), labels, plan.one_plus, plan.windows)


def overlap(a: Block, b: Block) -> bool:
    """Whether two blocks select a common entry of one leaf.

    Args:
      a: a block.
      b: another block, which may be on another leaf.

    Returns:
      True if they share an entry.

    >>> from gauge_optax.binding import BlockSpec, bind_leaf, overlap
    >>> specs = [BlockSpec("up", "w", axes) for axes in ("gate=0 _", "gate=1 _")]
    >>> a, b = (bind_leaf("rescale", spec, "w", (3, 4), {}) for spec in specs)
    >>> overlap(a, a), overlap(a, b)
    (True, False)
    """
    if a.path != b.path:
        return False
    # A block selects all combinations of its indices along the axes of the leaf. Two blocks therefore share an entry if
    # and only if they share an index along every axis.
    return all(((a.axis_ids(k, ()) >= 0) & (b.axis_ids(k, ()) >= 0)).any() for k in range(len(a.shape)))


def bind_leaf(
    gauge: str, spec: BlockSpec, path: str, shape: tuple[int, ...], sizes: Mapping[str, int],
    source: str = "the other blocks",
) -> Block:
    """Makes the block of one spec on one leaf, without the rest of the tree.

    Args:
      gauge: name for errors.
      spec: pattern and axes; the pattern matches `path`.
      path: normalised path of the leaf.
      shape: shape of the leaf.
      sizes: axis name → length, as far as lengths are known; the others must follow from the shape.
      source: where `sizes` come from, for errors.

    Returns:
      The block.

    Raises:
      ValueError: wrong rank, lengths that disagree or stay unknown, an index out of range.

    >>> from gauge_optax.binding import BlockSpec, bind_leaf
    >>> bind_leaf("rescale", BlockSpec("up", "mlp/{i}", "_ channel"), "mlp/0", (4, 6), {}).labels
    ('_', 'channel')
    """
    site = Site(spec.argument, path, spec.axes, tuple(shape), parse_axes(gauge, spec.pattern, spec.axes))
    _, (split,) = solve_lengths(gauge, [site], sizes, source)
    return resolve_block(gauge, site, split)
