"""Packs heads: moves weights to a point of their orbit at which some rows are constant, and leaves these rows out.

A head's scores q·kᵀ stay the same when its query kernel A becomes A·S and its key kernel B becomes B·S⁻ᵀ. Let d_h be
the head's size, and S the inverse of the matrix of d_h rows of A. Then these rows of A·S are the identity. They need
not be stored, multiplied or trained: a packed tree has d_h² entries less per head and gauge. Nothing is lost: for every
network whose heads have full rank, there is a packed one that computes the same function.

A *packed leaf* is a pytree node in place of a leaf. Its array (or arrays, if the leaf has several blocks) holds the
rows that are still stored, so that Optax and `jax.grad` see ordinary smaller leaves under their old paths. The numbers
of the rows that are left out, and the number on the diagonal of these rows (the *size*), are static: they belong to the
tree's structure. `orbit/packing.py` says which rows a gauge can make constant.
Reference: van Nierop, Transformer models are gauge invariant, §3, §4.4 and §6.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Block, leaves_by_path, with_leaves
from gauge_optax.errors import binding_error
from gauge_optax.gauges.copies import Copy
from gauge_optax.gauges.gauge import Gauges, bind
from gauge_optax.linalg import rank_cutoff
from gauge_optax.orbit.packing import choose_rows, constant_rows, packable, to_constant
from gauge_optax.parts.part import Arrays, changed
from gauge_optax.transformation import in_interval, on_any_mesh, overflow_check, own_settings
from gauge_optax.xla import unseen

Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""The rows that a packed tree leaves out: leaf path → axes string of the block → {"size": the number on the diagonal of
these rows, "rows": one list of row numbers per head, or a single list for all heads}."""

_NAME = "pack"
_BASIS, _FREE = "basis", "_"


@dataclasses.dataclass(frozen=True)
class PackedBlock:
    """A block of a leaf, and which of its rows are left out. It is hashable and holds no array.

    The block's *view* is the block with one axis per word of its axes string (`Block.view`).

    Attributes:
      block: the block; one of its axes is free (`_`), the *row* axis.
      named: the axes that count heads, in the order of the gauge; the leaf may have another order.
      rows: the numbers of the rows that are left out, one tuple per head, or one tuple for all heads.
      pattern: what the rows that are left out contain, divided by `size`: (rows left out, basis). For `head_linear` it
        is the identity.
      size: the number by which `pattern` is multiplied.
    """

    block: Block
    named: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]
    pattern: tuple[tuple[float, ...], ...]
    size: float

    def __hash__(self) -> int:
        return self._hash  # `jit` asks for it at every call

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.block, self.named, self.rows, self.pattern, self.size))

    @functools.cached_property
    def axis(self) -> int:
        """The index of the row axis in the block's view."""
        return self.block.labels.index(_FREE)

    @functools.cached_property
    def leaf_axis(self) -> int:
        """The index of the leaf's axis that contains the row axis."""
        at = [k for k, label in enumerate(self.block.split_labels) if label == _FREE]
        return next(axis for axis, group in enumerate(self.block.groups) if at[0] in group)

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """The numbers of the rows that are stored, (heads or 1, rows)."""
        everything = np.arange(self.block.view_shape[self.axis])
        return np.stack([np.setdiff1d(everything, rows) for rows in self.rows])

    @functools.cached_property
    def view_shape(self) -> tuple[int, ...]:
        """Shape of the stored rows with the axes of the block's view."""
        shape = list(self.block.view_shape)
        shape[self.axis] = self.kept.shape[1]
        return tuple(shape)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored rows, with as many axes as the leaf has."""
        lengths = iter(self.view_shape)
        sizes = [1 if isinstance(pick, int) else next(lengths) for pick in self.block.picks]
        return tuple(math.prod(sizes[k] for k in group) for group in self.block.groups)

    @classmethod
    def of(
        cls, copy: Copy, block: Block, rows: Sequence[Sequence[int]] = ((),), size: float = 1.0
    ) -> "PackedBlock":
        """Makes the `PackedBlock` that leaves `rows` out of a block.

        Its other fields come from `copy`, the gauge in one layer or in another capture of its paths.
        """
        named = tuple(name for name in copy.named if name in block.labels)
        pattern = tuple(map(tuple, constant_rows(copy).tolist()))
        return cls(block, named, tuple(map(tuple, rows)), pattern, size)

    @functools.cached_property
    def _order(self) -> tuple[int, ...]:
        """The order of the view's axes that puts heads first, then rows, then the basis."""
        return tuple(self.block.labels.index(name) for name in (*self.named, _FREE, _BASIS))

    @functools.cached_property
    def heads(self) -> tuple[int, ...]:
        """Lengths of the axes that count heads."""
        return tuple(self.block.view_shape[k] for k in self._order[:-2])

    def by_head(self, view: Any) -> Any:
        """Reshapes the block to (heads, rows, basis). Axes that count heads are flattened, in the gauge's order."""
        ordered = view.transpose(self._order)
        return ordered.reshape(-1, *ordered.shape[-2:])

    def as_view(self, heads: Any) -> Any:
        """The inverse of `by_head`, for any number of rows."""
        back = [self._order.index(k) for k in range(len(self._order))]
        return heads.reshape(*self.heads, *heads.shape[-2:]).transpose(back)

    def _picked(self, view: Any, numbers: np.ndarray) -> Any:
        """Selects rows of a view. `numbers` has the numbers of the rows, (heads, rows), or (1, rows) for all heads."""
        if len(numbers) == 1:
            return jnp.take(view, numbers[0], self.axis, unique_indices=True)
        return self.as_view(jnp.take_along_axis(self.by_head(view), numbers[..., None], -2))

    def taken(self, view: Any) -> Any:
        """Selects the rows of a view that are stored, as an array of the shape `shape`."""
        return self._picked(view, self.kept).reshape(self.shape)

    def whole(self, stored: jax.Array) -> jax.Array:
        """The whole view: the stored rows, with the constant rows put back between them."""
        constant = jnp.asarray(self.size * np.asarray(self.pattern), stored.dtype)
        fixed = self.as_view(jnp.broadcast_to(constant, (math.prod(self.heads), *constant.shape)))
        both = jnp.concatenate([stored.reshape(self.view_shape), fixed], self.axis)
        return self._picked(both, np.argsort(np.concatenate([self.kept, np.asarray(self.rows)], 1), 1))

    def dot(self, x: jax.Array | np.ndarray, stored: jax.Array) -> jax.Array:
        """The product of x, (…, rows), with the whole block: (…, the leaf's axes without the row axis)."""
        constant, rows = np.asarray(self.pattern), jnp.take(x, np.asarray(self.rows), -1)
        identity = len(constant) == constant.shape[1] and bool(np.all(constant == np.eye(len(constant))))
        fixed = self.size * (rows if identity else rows @ jnp.asarray(constant, x.dtype))  # (…, heads or 1, basis)
        if len(self.rows) == 1:
            moved = jnp.tensordot(jnp.take(x, self.kept[0], -1), stored, ([-1], [self.leaf_axis]))
            shape = (*x.shape[:-1], math.prod(self.heads), fixed.shape[-1])
            return moved + self._laid(jnp.broadcast_to(fixed, shape))
        by_head = self.by_head(stored.reshape(self.view_shape))
        return self._laid(fixed + jnp.einsum("...hr,hrb->...hb", jnp.take(x, self.kept, -1), by_head))

    def _laid(self, heads: jax.Array) -> jax.Array:
        """Splits and orders the axes (heads, basis) of an array (…, heads, basis) as the leaf has them."""
        lead, axes = heads.shape[:-2], (*self._order[:-2], self._order[-1])
        split = heads.reshape(*lead, *self.heads, heads.shape[-1])
        view = split.transpose(*range(len(lead)), *(len(lead) + axes.index(k) for k in sorted(axes)))
        return view.reshape(*lead, *(n for axis, n in enumerate(self.shape) if axis != self.leaf_axis))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a leaf is put together from the arrays of its packed leaf. It holds no arrays, and is static under `jit`.

    Attributes:
      blocks: the blocks from which rows are left out. The packed leaf has one array per block, and one more for the
        entries that are in no block, if there are any.
    """

    blocks: tuple[PackedBlock, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole leaf."""
        return self.blocks[0].block.shape

    @functools.cached_property
    def joint(self) -> int | None:
        """The axis of the leaf that is divided among blocks. None if each block is the whole leaf.

        Also None if blocks are parts of the leaf along several axes.
        """
        divided = {k for masks in self._masks for k, mask in enumerate(masks) if not mask.all()}
        return divided.pop() if len(divided) == 1 else None

    @functools.cached_property
    def _masks(self) -> tuple[tuple[np.ndarray, ...], ...]:
        """Per block and axis of the leaf: a mask over the axis that is True where the block has entries."""
        return tuple(tuple(b.block.axis_ids(k, ()) >= 0 for k in range(len(self.shape))) for b in self.blocks)

    @functools.cached_property
    def rest(self) -> np.ndarray | None:
        """Indices of the entries in no block, along `joint` or in the flattened leaf; None if blocks fill the leaf."""
        if self.joint is not None:
            outside = ~np.any([masks[self.joint] for masks in self._masks], 0)
        else:
            outside = ~np.any([functools.reduce(np.multiply.outer, masks) for masks in self._masks], 0).reshape(-1)
        return np.flatnonzero(outside) if outside.any() else None

    def arrays(self, leaf: Any) -> tuple[Any, ...]:
        """Splits a leaf into its stored arrays: one per block, without its constant rows; one for the rest, if any."""
        stored = [b.taken(b.block.view(leaf)) for b in self.blocks]
        if self.rest is None:
            return tuple(stored)
        flat = leaf.reshape(-1) if self.joint is None else leaf
        return *stored, jnp.take(flat, self.rest, self.joint or 0)

    def leaf(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The inverse of `arrays`."""
        for b, stored in zip(self.blocks, arrays, strict=False):
            if jnp.shape(stored) != b.shape:  # in `scan` and `vmap`: arrays of one layer, but the layout of all layers
                raise binding_error(
                    "unpack", f"'{b.block.path}' has not the shape that was packed", f"{jnp.shape(stored)}",
                    f"{b.shape}, of a leaf of shape {self.shape}",
                    "call go.orbit.unpack on the whole tree, outside of scan and vmap over its layers")
        whole = jnp.zeros(self.shape, arrays[0].dtype)
        if self.rest is not None and self.joint is None:
            whole = whole.reshape(-1).at[self.rest].set(arrays[-1]).reshape(self.shape)
        elif self.rest is not None:
            whole = whole.at[(*[slice(None)] * (self.joint or 0), self.rest)].set(arrays[-1])
        for b, stored in zip(self.blocks, arrays, strict=False):
            whole = b.block.write(whole, b.whole(stored))
        return whole

    def dot(self, x: jax.Array | np.ndarray, arrays: Sequence[jax.Array], axis: int) -> jax.Array:
        """The product of x, (…, rows), with the leaf along one of its axes."""
        products = [b.dot(x, stored) for b, stored in zip(self.blocks, arrays, strict=False)]
        if self.joint is None:
            return products[0]
        places = [np.flatnonzero(masks[self.joint]) for masks in self._masks]
        if self.rest is not None:
            products.append(jnp.tensordot(x, arrays[-1], ([-1], [axis])))
            places.append(self.rest)
        along = x.ndim - 1 + self.joint - (self.joint > axis)
        order = sorted(range(len(places)), key=lambda k: int(places[k][0]))
        out, place = jnp.concatenate([products[k] for k in order], along), np.concatenate([places[k] for k in order])
        return out if np.all(np.diff(place) == 1) else jnp.take(out, np.argsort(place), along)


@jax.tree_util.register_pytree_with_keys_class
class PackedLeaf:
    """A leaf without its constant rows: a node of a packed tree. Its children are the arrays that are left."""

    def __init__(self, arrays: Sequence[Any], layout: Layout) -> None:
        """Checks nothing: in optimizer states and masks, JAX makes such nodes with anything in place of arrays."""
        self.arrays, self.layout = tuple(arrays), layout

    def __repr__(self) -> str:
        """Shows the shape of every child (the child itself if it has none) and the shape of the whole leaf."""
        shapes = ", ".join(str(getattr(x, "shape", x)) for x in self.arrays)
        return f"PackedLeaf({shapes} of {self.layout.shape})"

    @property
    def packed_path(self) -> str:
        """The path of the leaf in the whole tree. Gauges that bind it are refused (`gauges.bound`)."""
        return self.layout.blocks[0].block.path

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Layout]:
        """Names the arrays. A single array is called `value`, which paths omit, so that it has the leaf's old path."""
        count = len(self.layout.blocks)
        names = ["value"] if len(self.arrays) == 1 else [f"part{k}" for k in range(count)] + ["rest"]
        keys = [jax.tree_util.GetAttrKey(name) for name in names]
        return tuple(zip(keys, self.arrays, strict=False)), self.layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, arrays: Sequence[Any]) -> "PackedLeaf":
        """The inverse of `tree_flatten_with_keys`."""
        return cls(arrays, layout)


def _is_packed(node: Any) -> bool:
    return isinstance(node, PackedLeaf)


@on_any_mesh
def pack(
    params: Any, gauges: Gauges, *, rows: Rows | None = None, shared: bool = False, size: float | None = None
) -> Any:
    r"""Moves heads to a point of their orbit with constant rows, and leaves these rows out of the tree.

    In every `head_linear` gauge, one block is moved. If A are its rows for one head, (rows, d_h), they become

    .. math::
      A \mapsto size \cdot A\,A_R^{-1},

    where A_R are d_h of these rows, chosen by pivoted Gram–Schmidt. The rows R are then size times the identity, and
    the packed leaf stores the other rows. All other blocks of the gauge move by the same element, so that the function
    stays the same. In every `rope_linear` gauge, one row per rotary plane becomes the complex number size + 0i. The
    block that is packed is the first of the gauge, left before right, that has one free axis (`_`) and heads of full
    rank. Biases and grouped queries are never packed. Other gauges of the list are ignored.

    Args:
      params: the parameters, as arrays.
      gauges: a gauge or a sequence of them.
      rows: which rows to leave out, as `packed_rows` returned them for an earlier tree. Then `params` may be traced,
        also by `jax.eval_shape`, and it is not checked that heads have full rank. By default, rows are chosen anew; a
        block that already has constant rows keeps them, and none of its numbers changes.
      shared: whether all heads of a block leave out the same rows, so that `packed_dot` is one smaller matrix product.
        By default, rows are chosen for each head. Such rows are better conditioned, and train better.
      size: the number on the diagonal of the constant rows; 1.0 for the identity. By default, the power of two with
        which the block is about as large as before: optimizers such as Adam, whose steps have one size for all
        entries, then train it at about the same speed as before.

    Returns:
      The packed tree: `params`, with a node in place of every leaf that has constant rows. The leaves of the packed
      tree are the stored rows, under their old paths. Take it as the parameters of an optimizer, and call the loss with
      `unpack(packed)`. Gauges that bind packed leaves raise an error on the packed tree.

    Raises:
      ValueError: no gauge of the list can be packed; both factors have heads of less than full rank, or, with `shared`,
        no choice of rows has full rank in all heads; traced parameters without `rows`; `rows` of other gauges or
        leaves; a size that is not positive; gauges that do not fit `params`; outside `jit`, a leaf of float16 that
        overflows.

    >>> keys = jax.random.split(jax.random.key(0))
    >>> params = {
    ...     "query": jax.random.normal(keys[0], (6, 2, 3)),
    ...     "key": jax.random.normal(keys[1], (6, 2, 3)),
    ... }
    >>> gauge = go.head_linear({"query": "_ head basis"}, {"key": "_ head basis"})
    >>> packed = go.orbit.pack(params, gauge)
    >>> sum(x.size for x in jax.tree.leaves(packed))  # 72 - 2 heads * 3 * 3
    54

    Reference: van Nierop, Transformer models are gauge invariant, §3 and §6. Deviations: rows are chosen for a good
    condition number, the size is free, and rotary heads are packed too, one row per plane.
    """
    params = unseen(params)
    on_tree = bind(gauges, params)
    every = list(itertools.chain(*on_tree.copies))
    copies = [copy for copy in every if packable(copy)]
    if not copies:
        raise binding_error(
            _NAME, "nothing to pack", f"gauges {', '.join(dict.fromkeys(copy.gauge for copy in every)) or 'none'}",
            "a head_linear or rope_linear gauge with a kernel that has at least as many inputs or outputs ('_') as a "
            "head has channels",
            "write go.head_linear(left, right) in place of go.head_rotation; under rotary, go.rope_linear",
        )
    if size is not None and not in_interval(size, "(0, inf)"):
        raise binding_error(
            _NAME, "bad size", repr(size), "a positive number, or None", "write size=1.0 for the identity"
        )
    if not isinstance(rows, Mapping | None):
        raise binding_error(
            _NAME, "bad rows", repr(rows)[:60], "what packed_rows returned, or None",
            "write rows=go.orbit.packed_rows(packed), or leave rows out")
    s, leaves = on_tree.whole, leaves_by_path(params)
    paths = list(dict.fromkeys(path for copy in copies for part in copy.parts for path in changed(part)))
    for path in paths if rows is None else ():
        if isinstance(leaves[path], jax.core.Tracer | jax.ShapeDtypeStruct):
            raise binding_error(
                _NAME, f"no numbers in '{path}'", "a traced array or a shape", "an array to choose rows from",
                "call pack outside of jit; or pass rows=go.orbit.packed_rows(packed) of an earlier packed tree",
            )
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves.values())
    dtypes = {path: jnp.result_type(leaves[path]) for path in paths}  # before x64 is switched on below
    # Float64 keeps more of float32 weights: logits of GPT-2 change by 4e-6 in place of 1.1e-5 (shared rows).
    with own_settings(wide=None if traced else True):
        values, packed = s.values(params), dict[str, list[PackedBlock]]()
        for copy in copies:
            b = _chosen(copy, values, leaves, shared, size) if rows is None else _given(copy, rows)
            elements, _ = to_constant(copy, b.block, values, jnp.asarray(b.rows), b.size)
            moved, constant = _moved(copy, elements, values), _is_constant(b, leaves)
            values |= {path: jnp.where(constant, values[path], x) for path, x in moved.items()}
            packed.setdefault(b.block.path, []).append(b)
        stored = {path: (values[path] - s.added[path]).astype(dtypes[path]) for path in paths}
    overflow_check(_NAME, {path: leaves[path] for path in paths})(stored)
    layouts = {path: Layout(tuple(blocks)) for path, blocks in packed.items()}
    nodes = {path: PackedLeaf(layout.arrays(stored[path]), layout) for path, layout in layouts.items()}
    return with_leaves(params, stored | nodes)


@on_any_mesh
def unpack(packed: Any) -> Any:
    """Returns the parameters that a packed tree stands for: puts the constant rows back.

    Args:
      packed: a packed tree, before or after training. It may be traced, and gradients pass through.

    Returns:
      A tree with the structure that `pack` was given. Packing it again changes no number.

    Raises:
      ValueError: a packed leaf of another shape than `pack` made, such as one layer of a stack inside `jax.lax.scan`.

    >>> gauge = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
    >>> factor = jnp.array([[1.0, 1.0], [0.0, 2.0], [3.0, 0.0]])
    >>> params = {"a": factor, "b": jnp.ones((2, 1))}
    >>> whole = go.orbit.unpack(go.orbit.pack(params, gauge, size=1.0))
    >>> # Two rows are the identity, and the product is as before.
    >>> whole["a"][1:].tolist(), (whole["a"] @ whole["b"]).round(4).tolist()
    ([[0.0, 1.0], [1.0, 0.0]], [[2.0], [2.0], [3.0]])

    Reference: van Nierop, Transformer models are gauge invariant, §6.
    """
    return jax.tree.map(lambda x: x.layout.leaf(x.arrays) if _is_packed(x) else x, packed, is_leaf=_is_packed)


def packed_rows(packed: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns which rows a packed tree leaves out, as numbers and lists that JSON can hold.

    Args:
      packed: a packed tree, or its tree of shapes (`jax.eval_shape`).

    Returns:
      Leaf path → axes of the block → `{"size": the number on the diagonal, "rows": row numbers}`. The row numbers are
      one list per head, or one list for all. It is the argument `rows` of `pack`: save it beside a checkpoint.

    >>> gauge = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
    >>> factor = jnp.array([[1.0, 1.0], [0.0, 2.0], [3.0, 0.0]])
    >>> params = {"a": factor, "b": jnp.ones((2, 1))}
    >>> rows = go.orbit.packed_rows(go.orbit.pack(params, gauge, size=1.0))
    >>> rows
    {'a': {'_ basis': {'size': 1.0, 'rows': [[2, 1]]}}}
    >>> # What a checkpoint is restored into.
    >>> jax.eval_shape(lambda p: go.orbit.pack(p, gauge, rows=rows), params)["a"]
    PackedLeaf((1, 2) of (3, 2))

    Reference: van Nierop, Transformer models are gauge invariant, chooses such rows by a permutation.
    """
    nodes = [node for node in jax.tree.leaves(packed, is_leaf=_is_packed) if _is_packed(node)]
    by_leaf: dict[str, dict[str, dict[str, Any]]] = {}
    for b in (b for node in nodes for b in node.layout.blocks):
        numbers = {"size": b.size, "rows": [list(rows) for rows in b.rows]}
        by_leaf.setdefault(b.block.path, {})[b.block.axes] = numbers
    return by_leaf


def packed_dot(x: jax.Array | np.ndarray, kernel: Any, axis: int = 0) -> jax.Array:
    """Multiplies activations with a kernel. If the kernel is packed, products with its constant rows are left out.

    Args:
      x: activations, (…, rows).
      kernel: an array, or a leaf of a packed tree.
      axis: the kernel's axis of rows, over which the product sums.

    Returns:
      `jnp.tensordot(x, kernel, ([-1], [axis]))`: (…, the other axes of the kernel).

    Raises:
      ValueError: the rows that the kernel leaves out are not along `axis`, or `axis` holds rows and heads together;
        another number of rows in `x`.

    >>> gauge = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
    >>> factor = jnp.array([[1.0, 1.0], [0.0, 2.0], [3.0, 0.0]])
    >>> params = {"a": factor, "b": jnp.ones((2, 1))}
    >>> packed = go.orbit.pack(params, gauge)
    >>> x = jnp.ones((4, 3))
    >>> out = go.orbit.packed_dot(go.orbit.packed_dot(x, packed["a"]), packed["b"])
    >>> bool(jnp.allclose(out, x @ params["a"] @ params["b"]))
    True

    With rows that all heads share (`shared=True` in `pack`), this is one matrix product with the rows that are stored.
    With rows chosen per head, every head gathers its own activations. Then `unpack` and an ordinary matrix product are
    faster.

    Reference: van Nierop, Transformer models are gauge invariant, §6.
    """
    shape = kernel.layout.shape if _is_packed(kernel) else jnp.shape(kernel)
    if not -len(shape) <= axis < len(shape) or jnp.shape(x)[-1:] != shape[axis : axis + 1 or None]:
        of = f" of '{kernel.packed_path}'" if _is_packed(kernel) else ""
        raise binding_error(
            "packed_dot", f"x does not fit axis {axis}{of}", f"x of shape {jnp.shape(x)}",
            f"(…, rows), with the rows of a kernel of shape {shape}", "pass axis=, the kernel's axis of rows",
        )
    if not _is_packed(kernel):
        return jnp.tensordot(x, kernel, ([-1], [axis]))
    layout, axis = kernel.layout, axis % len(shape)
    for b in layout.blocks:
        alone = len(b.block.groups[b.leaf_axis]) == 1 and b.block.window[b.leaf_axis] is None
        if b.leaf_axis != axis or not alone or (layout.joint is None and layout.rest is not None):
            raise binding_error(
                "packed_dot", f"no product with '{b.block.path}' along axis {axis}",
                f"axes \"{b.block.axes}\"", f"rows that are the whole of axis {axis}",
                "multiply with the leaf of go.orbit.unpack(packed)",
            )
    return layout.dot(x, kernel.arrays, axis)


# How rows are chosen --------------------------------------------------------------------------------


def _moved(copy: Copy, elements: Sequence[Any], values: Arrays) -> Arrays:
    """The leaves that one copy of a gauge (the gauge in one layer, for example) moves, after the move."""
    for part, e in reversed(list(zip(copy.parts, elements, strict=True))):
        values = part.act(e, values)
    return {path: values[path] for part in copy.parts for path in changed(part)}


def _chosen(
    copy: Copy, values: Arrays, leaves: Mapping[str, Any], shared: bool, size: float | None
) -> PackedBlock:
    """Chooses the block to pack, its rows and its size. Raises ValueError if no block has heads of full rank."""
    tried: list[tuple[float, int, PackedBlock]] = []
    for block in packable(copy):
        whole = PackedBlock.of(copy, block)
        heads = whole.by_head(np.asarray(block.view(leaves[block.path])))
        held = _held(heads, constant_rows(copy).astype(heads.dtype), shared)
        numbers = np.asarray(choose_rows(copy, block, values, not shared)) if held is None else held[0]
        if np.all(numbers == numbers[:1]):
            numbers = numbers[:1]
        elements, conditions = to_constant(copy, block, values, jnp.asarray(numbers), 1.0)
        tried.append((float(jnp.max(conditions)), int(jnp.argmax(conditions)), whole))
        if not tried[-1][0] < 1.0 / rank_cutoff(heads.dtype):
            continue
        multiple = size if size is not None or held is None else held[1]
        if multiple is None:
            points = values, _moved(copy, elements, values)
            before, after = (float(jnp.linalg.norm(block.view(point[block.path]))) for point in points)
            multiple = 2.0 ** round(math.log2(before / after))
        multiple = float(np.asarray(multiple, heads.dtype))  # rounded to a number that the leaf's dtype has
        return PackedBlock.of(copy, block, numbers.tolist(), multiple)
    raise _singular(copy, *min(tried, key=lambda worst: worst[0]), leaves, shared)


def _is_constant(b: PackedBlock, leaves: Mapping[str, Any]) -> jax.Array:
    """Whether the rows to leave out have their constant values in these leaves already, so that nothing has to move."""
    heads = b.by_head(b.block.view(leaves[b.block.path]))
    rows = jnp.take_along_axis(heads, jnp.asarray(b.rows)[..., None], -2)
    return jnp.all(rows == jnp.asarray(b.size * np.asarray(b.pattern), rows.dtype))


def _held(heads: np.ndarray, pattern: np.ndarray, shared: bool) -> tuple[np.ndarray, float] | None:
    """Finds rows of a block that are constant already, as in a tree that was packed before and then unpacked.

    The rows must be those of the pattern, all multiplied by one positive number, which is the same in all heads.

    Args:
      heads: the block, (heads, rows, basis).
      pattern: the constant rows divided by their size, (constant rows, basis).
      shared: whether the rows must have the same numbers in all heads.

    Returns:
      The row numbers, (heads or 1, constant rows), and the multiple; None if a head lacks a row of the pattern.
    """
    nearest = np.argmax(heads.astype(np.float32) @ pattern.astype(np.float32).T, -1)
    sizes = np.max(heads, -1)
    fits = np.all(heads == sizes[..., None] * pattern[nearest], -1) & (sizes > 0)
    if shared:  # a row number counts if its row is the same in all heads
        same = (nearest == nearest[:1]) & (sizes == sizes[:1]) & fits
        fits, nearest, sizes = np.all(same, 0, keepdims=True), nearest[:1], sizes[:1]
    if not fits.any():
        return None
    size = sizes[fits][0]
    place = fits & (sizes == size)
    candidates = [place & (nearest == k) for k in range(len(pattern))]
    if not all(x.any(-1).all() for x in candidates):
        return None
    return np.stack([np.argmax(x, -1) for x in candidates], -1), float(size)


def _given(copy: Copy, rows: Rows) -> PackedBlock:
    """The block that `rows` names for this copy. Raises ValueError if it names no block or does not fit the block."""
    blocks = [block for block in packable(copy) if block.axes in rows.get(block.path, {})]
    entry: Mapping[str, Any] = rows[blocks[0].path][blocks[0].axes] if blocks else {}
    numbers, size, count = np.asarray(entry.get("rows", ())), entry.get("size"), len(constant_rows(copy))
    fits = numbers.ndim == 2 and np.issubdtype(numbers.dtype, np.integer) and in_interval(size, "(0, inf)")
    if fits:
        plain = PackedBlock.of(copy, blocks[0])
        fits = numbers.shape in ((1, count), (math.prod(plain.heads), count))
        fits = fits and 0 <= numbers.min() and numbers.max() < blocks[0].view_shape[plain.axis]
        fits = fits and all(len(set(of_head)) == count for of_head in numbers.tolist())
    if not fits:
        wanted = ", ".join(f"'{block.path}' \"{block.axes}\"" for block in packable(copy))
        raise binding_error(
            copy.gauge, f"no rows for {_place(copy)}", f"rows of {', '.join(rows) or 'no leaf'}",
            f"a size and {count} row numbers, once or per head, for one of {wanted}",
            "pass go.orbit.packed_rows(packed) of a tree that was packed with these gauges",
        )
    return PackedBlock.of(copy, blocks[0], numbers.tolist(), float(entry["size"]))


def _place(copy: Copy) -> str:
    return f"copy '{copy.key}'" if copy.key else f"'{copy.blocks[0].path}'"


def _singular(
    copy: Copy, condition: float, head: int, b: PackedBlock, leaves: Mapping[str, Any], shared: bool
) -> ValueError:
    index = zip(b.named, np.unravel_index(head, b.heads), strict=True)
    where = ", ".join([_place(copy), *(f"{label}={k}" for label, k in index)])
    dtype = leaves[b.block.path].dtype
    return binding_error(
        copy.gauge, f"singular heads in '{b.block.path}'", f"a condition number of {condition:.2g} at {where}",
        f"below {1.0 / rank_cutoff(dtype):.0e} in {dtype}",
        "leave out shared=True, so that every head has rows of its own" if shared else
        "leave this layer out of the gauges that you pass to pack, or pack it after some training",
    )
