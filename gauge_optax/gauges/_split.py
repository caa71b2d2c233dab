"""The joint split T = V ⊕ H of a product of gauges, in the frame metric, and the point at which it is taken.

Here: the instances of a product on one tree, θ̂, vertical coordinates and their lift. Not here: the frame itself
(`_frame`), anything an optimizer keeps between steps.

In the frame, shifts centred, the vertical spaces of shifts, rotations and scales are orthogonal to each other: a
rotation's θ̂·A is orthogonal to a scale's D·θ̂ because θ̂ᵀDθ̂ is symmetric, and both have zero mean along vocab. Two
scale gauges on one leaf couple through θ̂∘θ̂ and are solved jointly. DESIGN §5.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax._sequence import in_turn
from gauge_optax.binding import Block, binding_error, leaves_by_path, overlap
from gauge_optax.gauges import _frame, _joint, _linear
from gauge_optax.gauges._head import BASIS, HeadInstance
from gauge_optax.gauges._linear import Frames, LinearInstance
from gauge_optax.gauges._scale import ScaleInstance, Values
from gauge_optax.gauges._shift import VOCAB, ShiftInstance, add_slice, centre_block, mean_slice, slice_block
from gauge_optax.gauges._system import Channels, ScaleSystem, Sides
from gauge_optax.gauges._tally import Overlap, overlap_of
from gauge_optax.linalg import lyapunov, real_dtype, safe_divide, skew

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Bound:
    """All instances of a product of gauges on one tree.

    Attributes:
      scales: scale instances, gauge after gauge.
      shifts: shift instances.
      heads: rotation instances, one tuple per rotation gauge.
      linear: GL(d) instances.
    """

    scales: tuple[ScaleInstance, ...] = ()
    shifts: tuple[ShiftInstance, ...] = ()
    heads: tuple[tuple[HeadInstance, ...], ...] = ()
    linear: tuple[LinearInstance, ...] = ()

    @functools.cached_property
    def system(self) -> ScaleSystem:
        """The scale instances, with their overlaps."""
        return ScaleSystem(self.scales)

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
    def blocks(self) -> tuple[Block, ...]:
        """Every block of every instance."""
        return (
            tuple(b for i in self.scales for b in i.up + i.down)
            + tuple(b for i in self.shifts for b in i.blocks)
            + tuple(b.block for i in self.turning for b in i.blocks)
        )

    @functools.cached_property
    def offset(self) -> Mapping[str, float]:
        """Bound leaf path → what the leaf's value exceeds its stored number by: 1 for `1+`, else 0."""
        return {b.path: float(b.one_plus) for b in self.blocks}

    def values(self, params: object) -> Arrays:
        """Bound leaves as values in the computing dtype: γ where the leaf stores γ − 1."""
        leaves, dtype = leaves_by_path(params), real_dtype()
        return {
            p: jnp.asarray(leaves[p], dtype) + off if off else jnp.asarray(leaves[p], dtype)
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
        return {p: jnp.asarray(leaves[p], dtype) for p in self.offset}

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

    def _rigid(self) -> list[tuple[str, Block, str]]:
        return [(i.gauge, b, VOCAB) for i in self.shifts for b in i.blocks] + [
            (i.gauge, b.block, BASIS) for i in self.turning for b in i.blocks
        ]


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


class Point(NamedTuple):
    """A point in its frame.

    Attributes:
      channels: the frame f, per scale instance.
      outward: per scaled leaf e^(w·f), broadcastable to the leaf.
      inward: per scaled leaf e^(−w·f).
      hat: θ̂ per bound leaf: centred, divided by e^(w·f), balanced by linear gauges.
      linear: frames of the linear instances.
    """

    channels: Channels
    outward: Arrays
    inward: Arrays
    hat: Arrays
    linear: Frames = ()

    def tangent_in(self, tangent: Values) -> Arrays:
        """X̂ = e^(−w·f)·X, in the bases of linear frames."""
        return _linear.enter(self.linear, times(tangent, self.inward))

    def tangent_out(self, framed: Values) -> Arrays:
        """The inverse of `tangent_in`."""
        return _linear.leave(self.linear, times(framed, self.outward))

    def cotangent_in(self, cotangent: Values) -> Arrays:
        """ĝ = e^(w·f)·g, in the bases of linear frames."""
        return _linear.enter_dual(self.linear, times(cotangent, self.outward))

    def cotangent_out(self, framed: Values) -> Arrays:
        """The inverse of `cotangent_in`."""
        return _linear.leave_dual(self.linear, times(framed, self.inward))


def times(values: Values, factors: Values) -> Arrays:
    """Leaves times factors, those without one as they are."""
    return {p: x * factors[p] if p in factors else x for p, x in values.items()}


def at(bound: Bound, values: Values, channels: Channels | None = None) -> Point:
    """The point in the frame `channels`, by default its own minimum-norm frame; always that with linear gauges."""
    centred = bound.centre(values)
    linear: Frames = ()
    if bound.linear:
        joint = _joint.solve(bound.system, bound.linear, {p: centred[p] for p in bound.offset})
        channels, linear = joint.channels, _joint.paired(bound.linear, joint.linear)
    if channels is None:
        channels = _frame.solve(bound.system, centred)
    inward = bound.system.factors(tuple(-x for x in channels))
    hat = _linear.enter(linear, times(centred, inward))
    return Point(channels, bound.system.factors(channels), inward, hat, linear)


class Coordinates(NamedTuple):
    """Coordinates of a vertical vector: rates of log α, of the shift, of the skew generator.

    Attributes:
      scales: per scale instance.
      shifts: per shifted leaf, in the frame.
      heads: per rotation instance, (*shape, size, size) antisymmetric.
      linear: per linear instance, Z of (A·Z, −B·Zᵀ), (*shape, size, size).
    """

    scales: Channels
    shifts: Arrays
    heads: tuple[jax.Array, ...]
    linear: tuple[jax.Array, ...] = ()


def vertical_coordinates(bound: Bound, point: Point, framed: Values) -> Coordinates:
    """Coordinates of the vertical part of an in-frame vector, exact (joint solve, eigendecompositions).

    Args:
      bound: the product.
      point: where.
      framed: in-frame vector per bound leaf.

    Returns:
      The coordinates.
    """
    grams = [h.gram(point.hat, point.hat) for h in bound.rotations]
    heads = in_turn(lyapunov, grams, [skew(h.gram(point.hat, framed)) for h in bound.rotations])
    if bound.linear and _joint.shares_leaves(bound.system, bound.linear):
        scales, linear = _joint.coupled_rates(bound.system, bound.linear, point.hat, framed)
    else:
        scales = scale_coordinates(bound.system, point.hat, framed)
        paired = [_linear.pairing(i, point.hat, framed) for i in bound.linear]
        linear = _linear.generators(bound.linear, point.hat, paired)
    return Coordinates(scales, bound.shift_means(framed), heads, linear)


@functools.partial(jax.jit, static_argnums=0)
def scale_coordinates(system: ScaleSystem, hat: Values, framed: Values) -> Channels:
    """Rates of log α of the joint vertical part, to rounding.

    Args:
      system: the scale instances.
      hat: θ̂.
      framed: X̂.

    Returns:
      a per instance; 0 on channels of norm 0.
    """
    overlap = overlap_of(system, hat, system.squares(hat))
    return vertical_rates(overlap, system.dots(hat, framed))


def vertical_rates(overlap: Overlap, dots: Sides, negligible: float = 0.0) -> Channels:
    """Rates of log α of the joint vertical part: G·a = ⟨v, X̂⟩ with G the Gram matrix of all channels' orbits.

    Conjugate gradients where instances share leaves, closed form where none do.

    Args:
      overlap: the channels at θ̂.
      dots: ⟨θ̂, X̂⟩ per side of every channel.
      negligible: a vertical part below this share of the dot products counts as rounding, and is left.

    Returns:
      a per instance; 0 on channels of norm 0.
    """
    system, diagonal = overlap.system, overlap.vertical_squares()
    target = system.along_orbits(dots)
    if not system.coupled:
        return tuple(safe_divide(t, d) for t, d in zip(target, diagonal, strict=True))

    def precondition(x: Channels) -> Channels:
        return tuple(safe_divide(a, d) for a, d in zip(x, diagonal, strict=True))

    def gram(a: Channels) -> Channels:
        none = [(jnp.zeros_like(x), jnp.zeros_like(x)) for x in a]
        changes = [(x, -i.degree * x) for i, x in zip(system.instances, a, strict=True)]
        return system.along_orbits(overlap.after_all(none, changes))

    size = sum(jnp.sum(jnp.square(up) + jnp.square(down)) for up, down in dots)
    tolerance = float(jnp.finfo(real_dtype()).eps)
    return jax.scipy.sparse.linalg.cg(
        gram, target, tol=tolerance, atol=negligible * jnp.sqrt(size), maxiter=60, M=precondition
    )[0]


def lift(bound: Bound, point: Point, coordinates: Coordinates) -> Arrays:
    """The in-frame vertical vector with these coordinates.

    Args:
      bound: the product.
      point: where.
      coordinates: rates of log α, shifts, generators.

    Returns:
      A vector per bound leaf.
    """
    logs = bound.system.exponents(coordinates.scales)
    vertical = {p: x * logs[p] if p in logs else jnp.zeros_like(x) for p, x in point.hat.items()}
    vertical = bound.add_shifts(vertical, coordinates.shifts)
    for head, turning in zip(bound.rotations, coordinates.heads, strict=True):
        vertical |= head.added(vertical, point.hat, turning)
    for instance, z in zip(bound.linear, coordinates.linear, strict=True):
        vertical |= _linear.add_orbit(instance, vertical, point.hat, z)
    return vertical
