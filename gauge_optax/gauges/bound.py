"""The instances of a product of gauges on one tree, and what they have in common: leaves, values, commuting.

Here: static tables, and leaves as values. Not here: how one kind acts (`_scale`, `_head`, `_linear`, `_shift`), the
slice (`chart`).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import Block, binding_error, leaves_by_path, overlap, with_leaves
from gauge_optax.gauges._head import BASIS, HeadInstance
from gauge_optax.gauges._linear import LinearInstance
from gauge_optax.gauges._scale import ScaleInstance, Values
from gauge_optax.gauges._shift import VOCAB, ShiftInstance, add_slice, centre_block, mean_slice, slice_block
from gauge_optax.linalg import real_dtype

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Bound:
    """All instances of a product of gauges on one tree.

    Attributes:
      scales: scale instances, gauge after gauge.
      shifts: shift instances.
      heads: rotation instances, one tuple per rotation gauge.
      linear: GL(d) instances.
      more: readings of gauges that are known by their action alone.
    """

    scales: tuple[ScaleInstance, ...] = ()
    shifts: tuple[ShiftInstance, ...] = ()
    heads: tuple[tuple[HeadInstance, ...], ...] = ()
    linear: tuple[LinearInstance, ...] = ()
    more: tuple[Any, ...] = ()

    @functools.cached_property
    def rotations(self) -> tuple[HeadInstance, ...]:
        """Every rotation instance."""
        return tuple(h for gauge in self.heads for h in gauge)

    @functools.cached_property
    def turning(self) -> tuple[HeadInstance, ...]:
        """Every instance that acts on a basis: rotations, and the two sides of linear ones."""
        return self.rotations + tuple(side for i in self.linear for side in (i.left, i.right))

    @functools.cached_property
    def turned(self) -> frozenset[str]:
        """Paths of the leaves that some rotation binds."""
        return frozenset(path for head in self.rotations for path in head.paths)

    @functools.cached_property
    def turns_last(self) -> bool:
        """Whether rotations can be undone when all else is: on leaves of shifts they may have to be undone before."""
        return self.turned.isdisjoint(block.path for block in self.shift_blocks)

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Every block of every instance."""
        return (
            tuple(b for i in self.scales for b in i.up + i.down)
            + tuple(b for i in self.shifts for b in i.blocks)
            + tuple(b.block for i in self.turning for b in i.blocks)
            + tuple(b for r in self.more for b in r.moved)
        )

    @functools.cached_property
    def offset(self) -> Mapping[str, float | np.ndarray]:
        """Bound leaf path → what the leaf's value exceeds its stored number by: 1 for `1+`, else 0.

        An array where only some blocks of a leaf are `1+`.
        """
        found: dict[str, list[Block]] = {}
        for block in self.blocks:
            found.setdefault(block.path, []).append(block)
        return {path: _offset(blocks) for path, blocks in found.items()}

    def values(self, params: object) -> Arrays:
        """Bound leaves as values in the computing dtype: γ where the leaf stores γ − 1."""
        leaves, dtype = leaves_by_path(params), real_dtype()
        return {
            p: jnp.asarray(leaves[p], dtype) + off if np.any(off) else jnp.asarray(leaves[p], dtype)
            for p, off in self.offset.items()
        }

    def vectors(self, tree: object) -> Arrays:
        """Bound leaves of a tangent or cotangent in the computing dtype."""
        leaves, dtype = leaves_by_path(tree), real_dtype()
        missing = [p for p in self.offset if p not in leaves]
        if missing:
            raise binding_error(
                "gauges",
                f"no update for '{missing[0]}'",
                f"a tree with {', '.join(list(leaves)[:3])}",
                "gradients or updates of the same structure as params",
                "pass the gradients of the very parameters that are passed as params",
            )
        for block in self.blocks:
            if not _broadcasts(jnp.shape(leaves[block.path]), block.shape):
                raise binding_error(
                    "gauges", f"an update of another shape for '{block.path}'", f"{jnp.shape(leaves[block.path])}",
                    f"{block.shape}, the parameter's",
                    "pass gradients of the very parameters that are passed as params",
                )  # fmt: skip
        return {p: jnp.asarray(leaves[p], dtype) for p in self.offset}

    def stepped(self, params: Any, updates: Any) -> Any:
        """Parameters after a step; leaves that are not bound are left as they were."""
        leaves, steps = leaves_by_path(params), self.vectors(updates)
        return with_leaves(params, {path: optax.apply_updates(leaves[path], step) for path, step in steps.items()})

    @functools.cached_property
    def shift_blocks(self) -> tuple[Block, ...]:
        """Every block of every shift instance."""
        return tuple(b for i in self.shifts for b in i.blocks)

    def zero_slices(self) -> Arrays:
        """Leaf path → no shift, as a slice of the leaf."""
        return {b.path: jnp.zeros(slice_block(b).shape, real_dtype()) for b in self.shift_blocks}

    def shift_means(self, values: Values) -> Arrays:
        """Leaf path → mean along vocab of every shifted leaf, as a slice of it."""
        means = self.zero_slices()
        for block in self.shift_blocks:
            means[block.path] = means[block.path] + mean_slice(block, values[block.path])
        return means

    def add_shifts(self, values: Values, shifts: Values) -> Arrays:
        """`values` with slices added along vocab."""
        moved = dict(values)
        for block in self.shift_blocks:
            moved[block.path] = add_slice(block, moved[block.path], shifts[block.path])
        return moved

    def centre(self, values: Values) -> Arrays:
        """`values` without their constant along vocab."""
        moved = dict(values)
        for block in self.shift_blocks:
            moved[block.path] = centre_block(block, moved[block.path])
        return moved

    def check(self) -> None:
        """Raises ValueError where two gauges of the product do not commute."""
        acting = [(i.gauge, b, i.named) for i in self.scales for b, _ in i.weighted_blocks]
        for gauge, still, reserved in self._rigid():
            for other, block, named in acting:
                if overlap(still, block) and _varies_along(block, named, still, reserved):
                    raise _clash(
                        gauge,
                        other,
                        still.path,
                        f"the axis that {gauge} needs constant is scaled entry by entry",
                        f"scales of {other} constant along `{reserved}`",
                    )
        turning = [(i.gauge, b.block) for i in self.turning for b in i.blocks]
        for at, (gauge, block) in enumerate(turning):
            for other, second in turning[:at]:
                if overlap(block, second):
                    raise _clash(
                        gauge,
                        other,
                        block.path,
                        "the same entries turned by two gauges",
                        "at most one rotation or linear gauge per entry",
                    )

        known = acting + [(i.gauge, b, ()) for i in self.shifts for b in i.blocks] + [(g, b, ()) for g, b in turning]
        for at, reading in enumerate(self.more):
            others = [(g, b) for g, b, _ in known] + [(r.gauge, b) for r in self.more[:at] for b in r.moved]
            for other, block in others:
                if any(overlap(block, own) for own in reading.moved):
                    raise _clash(
                        reading.gauge, other, block.path,
                        "a gauge known by its action alone, which cannot be told to commute",
                        "leaves that no other gauge of the list binds",
                    )  # fmt: skip

    def _rigid(self) -> list[tuple[str, Block, str]]:
        return [(i.gauge, b, VOCAB) for i in self.shifts for b in i.blocks] + [
            (i.gauge, b.block, BASIS) for i in self.turning for b in i.blocks
        ]


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether an array of this shape stands for one of the other: a number for a whole leaf, say."""
    ends = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(n in (1, m) for n, m in ends)


def _clash(gauge: str, other: str, path: str, found: str, expected: str) -> ValueError:
    return binding_error(
        gauge, f"does not commute with {other} on '{path}'", found, expected, "drop one of the two from this list"
    )


def _varies_along(scaled: Block, named: tuple[str, ...], still: Block, reserved: str) -> bool:
    """Whether the scale's channel changes between entries that differ along `reserved` alone."""
    fixed = {*still.names, "_"} - {reserved}
    for axis in range(len(still.shape)):
        groups, channels = still.axis_ids(axis, fixed), scaled.axis_ids(axis, set(named))
        used = groups >= 0
        pairs = np.unique(np.stack([groups[used], channels[used]]), axis=1)
        if pairs.shape[1] > len(np.unique(groups[used])):
            return True
    return False


def _offset(blocks: list[Block]) -> float | np.ndarray:
    if len({block.one_plus for block in blocks}) == 1:
        return float(blocks[0].one_plus)
    out = np.zeros(blocks[0].shape)
    for block in blocks:
        out = block.write(out, np.full(block.view_shape, float(block.one_plus)))
    return out
