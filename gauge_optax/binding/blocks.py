"""`Block`, one axes string resolved on one leaf: what a gauge reads from the leaf and writes to it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding.axes import Ranges, Site, full_lengths, parse_axes, solve_sizes, unresolved
from gauge_optax.binding.paths import binding_error, match
from gauge_optax.binding.specs import BlockSpec


@dataclasses.dataclass(frozen=True)
class Block:
    """One axes string resolved on one leaf: pure data, hashable.

    Attributes:
      path: normalised path of the leaf.
      role: which argument of the gauge it came from.
      axes: the axes string.
      shape: the leaf's shape.
      split: the shape after groups are split.
      index: per axis of `split`, the selected index, or the selected (start, stop), one or more in order.
      labels: per axis that is left after selection, its name or "_".
      one_plus: the leaf stores the value less one.
      ranges: per leaf axis, the (start, stop) that `split` splits; None for the whole axis.

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
    role: str
    axes: str
    shape: tuple[int, ...]
    split: tuple[int, ...]
    index: tuple[int | Ranges, ...]
    labels: tuple[str, ...]
    one_plus: bool
    ranges: tuple[tuple[int, int] | None, ...]

    @property
    def selected(self) -> tuple[Ranges, ...]:
        """Per axis of `split`, the selected (start, stop) in order."""
        return tuple(((i, i + 1),) if isinstance(i, int) else i for i in self.index)

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Shape of `view(leaf)`; its axes are `labels`."""
        return tuple(_length(i) for i in self.index if not isinstance(i, int))

    @property
    def whole(self) -> bool:
        """Whether every entry of the leaf is selected."""
        full = all(own == ((0, n),) for own, n in zip(self.selected, self.split, strict=True))
        return full and all(span is None or span == (0, n) for span, n in zip(self.ranges, self.shape, strict=True))

    @property
    def windows(self) -> tuple[tuple[int, int], ...] | None:
        """Per leaf axis the (start, stop) that is split; None where every axis is split whole."""
        if all(span is None for span in self.ranges):
            return None
        return tuple((0, n) if span is None else span for span, n in zip(self.ranges, self.shape, strict=True))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Per leaf axis, the axes of `split` it was split into."""
        lengths = [len(group) for group in parse_axes("binding", self.path, self.axes).groups]
        ends = np.cumsum([0, *lengths]).tolist()
        return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))

    @property
    def split_labels(self) -> tuple[str, ...]:
        """A label per axis of `split`, "" where an integer selects."""
        left = iter(self.labels)
        return tuple("" if isinstance(i, int) else next(left) for i in self.index)

    def view(self, leaf: Any) -> Any:
        """The selected entries, axes as `labels`; the leaf may be a jax or a numpy array."""
        if self.whole:
            return leaf.reshape(self.view_shape)
        cut = leaf if self.windows is None else leaf[tuple(slice(*w) for w in self.windows)]
        return _taken(cut.reshape(self.split), self.selected).reshape(self.view_shape)

    def write(self, leaf: Any, view: Any) -> Any:
        """The leaf with its selected entries replaced, in the leaf's dtype; no copy for a whole leaf."""
        view = view.astype(leaf.dtype)
        if self.whole:
            return view.reshape(self.shape)
        part = view.reshape([_length(own) for own in self.selected])
        if self.windows is None:
            return _replaced(leaf.reshape(self.split), part, self.selected).reshape(self.shape)
        cut = leaf[tuple(slice(*w) for w in self.windows)]
        inner = _replaced(cut.reshape(self.split), part, self.selected).reshape(cut.shape)
        return _replaced(leaf, inner, [(w,) for w in self.windows])

    def spread(self, named: tuple[str, ...], value: Any, elsewhere: float = 0.0) -> jax.Array:
        """A value per index of the named axes, laid out on the leaf; the adjoint of `total`.

        Args:
          named: names of the value's axes, each one of `labels`.
          value: array with exactly these axes.
          elsewhere: what entries that are not selected get.

        Returns:
          Array of the leaf's rank that broadcasts to its shape: size 1 where it is constant.
        """
        labels, selected, groups = self.split_labels, self.selected, self.groups
        order = sorted(range(len(named)), key=lambda k: labels.index(named[k]))
        length = [_length(own) for own in selected]
        ordered = value if order == sorted(order) else jnp.transpose(value, order)
        out = ordered.reshape([n if label in named else 1 for n, label in zip(length, labels, strict=True)])
        full = [
            span is not None or any(labels[k] in named or selected[k] != ((0, self.split[k]),) for k in group)
            for group, span in zip(groups, self.ranges, strict=True)
        ]
        live = [flag for flag, group in zip(full, groups, strict=True) for _ in group]
        out = jnp.broadcast_to(out, [n if on else 1 for n, on in zip(length, live, strict=True)])
        out = _laid(out, [own if on else None for own, on in zip(selected, live, strict=True)], self.split, elsewhere)
        windows = self.windows or tuple((0, n) for n in self.shape)
        out = out.reshape([b - a if flag else 1 for (a, b), flag in zip(windows, full, strict=True)])
        spans = [(window,) if flag else None for window, flag in zip(windows, full, strict=True)]
        return _laid(out, spans, self.shape, elsewhere)

    def total(self, named: tuple[str, ...], leaf: Any) -> jax.Array:
        """Sum of the selected entries over every axis that is not named.

        Args:
          named: names of the result's axes, each one of `labels`.
          leaf: array of shape `shape`.

        Returns:
          Array with the named axes in that order.
        """
        kept = [label for label in self.labels if label in named]
        summed = tuple(k for k, label in enumerate(self.labels) if label not in named)
        out = jnp.sum(self.view(leaf), axis=summed)
        order = [kept.index(name) for name in named]
        return out if order == sorted(order) else jnp.transpose(out, order)

    def entries(self, named: tuple[str, ...]) -> int:
        """How many entries one index of the named axes selects."""
        return math.prod(n for n, label in zip(self.view_shape, self.labels, strict=True) if label not in named)

    def axis_ids(self, axis: int, names: Collection[str]) -> np.ndarray:
        """Which index of the named axes each index of a leaf axis belongs to.

        Args:
          axis: an axis of the leaf.
          names: names to tell apart; those that live in other leaf axes do not matter.

        Returns:
          Integers, one per index: -1 where not selected, else the row-major index over the named parts here.
        """
        labels, group = self.split_labels, self.groups[axis]
        ids, chosen = np.zeros((1,), np.int64), np.ones((1,), bool)
        for k in group:
            places, inside = np.concatenate([np.arange(*r) for r in self.selected[k]]), np.zeros(self.split[k], bool)
            inside[places] = True
            own = self.ids_along(labels[k], len(places), names)
            along = np.zeros(self.split[k], np.int64)
            along[places] = 0 if own is None else own
            ids = (ids[:, None] * (1 if own is None else len(places)) + along).reshape(-1)
            chosen = (chosen[:, None] & inside).reshape(-1)
        own = np.where(chosen, ids, -1)
        span = self.ranges[axis]
        if span is None:
            return own
        return np.pad(own, (span[0], self.shape[axis] - span[1]), constant_values=-1)

    def ids_along(self, label: str, length: int, names: Collection[str]) -> np.ndarray | None:
        """Which index of the named axes each selected index of one axis belongs to; None where it is not named."""
        return np.arange(length) if label in names else None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name by which entries of the block can be told apart."""
        return self.labels


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _taken(array: Any, selected: Sequence[Ranges]) -> Any:
    """The selected entries, ranges of one axis behind each other."""
    out = array[tuple(slice(own[0][0], own[-1][1]) for own in selected)]
    for axis, own in enumerate(selected):
        if len(own) > 1:
            pieces = [(slice(None),) * axis + (slice(a - own[0][0], b - own[0][0]),) for a, b in own]
            join = np.concatenate if isinstance(out, np.ndarray) else jnp.concatenate
            out = join([out[piece] for piece in pieces], axis)
    return out


def _replaced(leaf: Any, part: Any, selected: Sequence[Ranges]) -> Any:
    """An array with its selected entries replaced."""
    plain = isinstance(leaf, np.ndarray) and isinstance(part, np.ndarray)
    out = leaf.copy() if plain else jnp.asarray(leaf)
    ends = [np.cumsum([0, *(b - a for a, b in own)]).tolist() for own in selected]
    for box in itertools.product(*(range(len(own)) for own in selected)):
        into = [own[k] for own, k in zip(selected, box, strict=True)]
        piece = part[tuple(slice(end[k], end[k + 1]) for end, k in zip(ends, box, strict=True))]
        if plain:
            out[tuple(slice(*r) for r in into)] = piece
        else:
            out = jax.lax.dynamic_update_slice(out, piece, [start for start, _ in into])
    return out


def _laid(array: jax.Array, selected: Sequence[Ranges | None], lengths: Sequence[int], around: float) -> jax.Array:
    """An array's axes on axes of given lengths, `around` where they leave room; an axis with None stays as it is."""
    for axis, (own, n) in enumerate(zip(selected, lengths, strict=True)):
        if own is not None and len(own) > 1:
            places = np.full(n, array.shape[axis])
            places[np.concatenate([np.arange(*r) for r in own])] = np.arange(array.shape[axis])
            array = jnp.take(array, places, axis, mode="fill", fill_value=around)
    pads = [
        (0, 0, 0) if own is None or len(own) > 1 else (own[0][0], n - own[0][1], 0)
        for own, n in zip(selected, lengths, strict=True)
    ]
    return jax.lax.pad(array, jnp.asarray(around, array.dtype), pads) if any(a or b for a, b, _ in pads) else array


def resolve_block(gauge: str, role: str, site: Site, known: Mapping[str, int]) -> Block:
    """The block of a site whose names all have known lengths, checked for selections that do not fit."""
    known, origin = dict(known), dict.fromkeys(known, "the other blocks")
    split: list[int] = []
    for axis in range(len(site.shape)):
        lengths = full_lengths(gauge, site, axis, known, origin)
        if lengths is None:
            raise unresolved(gauge, site, axis, known)
        split += lengths
    index: list[int | Ranges] = []
    for part, length in zip(site.plan.parts, split, strict=True):
        if part.last > length:
            raise binding_error(
                gauge, f"index out of range, '{part}' at '{site.path}'",
                f"length {length} in shape {site.shape}",
                f"at least {part.last}, axes \"{site.axes}\"", "correct the index, or the sizes of its group")
        index.append(part.pick if part.pick is not None else part.ranges or ((0, length),))
    labels = tuple(part.name for part in site.plan.parts if not part.picked)
    return Block(
        site.path, role, site.axes, site.shape, tuple(split), tuple(index), labels, site.plan.one_plus,
        site.plan.ranges,
    )  # fmt: skip


def overlap(a: Block, b: Block) -> bool:
    """Whether two blocks select a common entry of one leaf.

    Args:
      a: a block.
      b: another.

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
    # A selection is a product over leaf axes, so it is empty as soon as it is empty along one.
    return all(((a.axis_ids(k, ()) >= 0) & (b.axis_ids(k, ()) >= 0)).any() for k in range(len(a.shape)))


def bind_leaf(
    gauge: str, spec: BlockSpec, path: str, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> Block | None:
    """Resolves one spec on one bare leaf.

    Args:
      gauge: name for errors.
      spec: pattern and axes.
      path: normalised path.
      shape: shape of the leaf.
      sizes: known lengths, e.g. an instance's; others follow where they can.

    Returns:
      The block, None if the pattern does not match.

    Raises:
      ValueError: wrong rank, lengths that disagree or stay unknown, an index out of range.

    >>> from gauge_optax.binding import BlockSpec, bind_leaf
    >>> bind_leaf("rescale", BlockSpec("up", "mlp/{i}", "_ channel"), "mlp/0", (4, 6), {}).labels
    ('_', 'channel')
    """
    if match(gauge, spec.pattern, path) is None:
        return None
    site = Site(path, spec.axes, tuple(shape), parse_axes(gauge, spec.pattern, spec.axes))
    return resolve_block(gauge, spec.role, site, solve_sizes(gauge, [site], sizes, "the other blocks"))
