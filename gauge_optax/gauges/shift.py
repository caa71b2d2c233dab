"""Logit shift: adding the same vector to every output class leaves a softmax alone.

For logits z = x·W + b and any vector t and number τ, W ↦ W + t·1ᵀ and b ↦ b + τ·1 change z by a constant over classes.
The group is Rᵈ (+1 with a bias), additive; its coordinate is the mean along `vocab`, its split is that mean and the
rest. Not a symmetry of a tied head or of soft-capped logits. Reference: DDC §3.2 and B.2–B.3.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, BlockSpec, Instance, block_specs, frozen_sizes, instance_key, leaves_by_path
from gauge_optax.binding.axes import parse_axes
from gauge_optax.gauges._shift import (
    VOCAB,
    ShiftInstance,
    as_slice,
    element_shape,
    own_slice,
    shift_dimensions,
    slice_block,
    without_slice,
)
from gauge_optax.gauges.base import BoundGauge, Effect, Element, Gauge
from gauge_optax.gauges.bound import Arrays, Bound
from gauge_optax.gauges.reading import Motion, Reading
from gauge_optax.linalg import real_dtype


def logit_shift(blocks: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None) -> "LogitShift":
    """A constant added along `vocab`: an unembedding kernel, its bias, or either alone.

    Args:
      blocks: path → axes with one `vocab` axis, e.g. `{"lm_head/kernel": "_ vocab", "lm_head/bias": "vocab"}`.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array.

    Raises:
      ValueError: malformed axes, here; any mismatch with the tree, when it is first seen.

    >>> params = {"kernel": jnp.ones((3, 5)), "bias": jnp.zeros(5)}
    >>> go.logit_shift({"kernel": "_ vocab", "bias": "vocab"}).dim(params)
    4

    Reference: DDC §3.2. Not a symmetry of a tied embedding.
    """
    return LogitShift(block_specs("logit_shift", "blocks", blocks, (VOCAB,)), frozen_sizes("logit_shift", sizes))


@dataclasses.dataclass(frozen=True)
class LogitShift(BoundGauge):
    """See `logit_shift`. Elements: instance → {concrete leaf path: shift, the leaf's shape without vocab}."""

    name: ClassVar[str] = "logit_shift"
    breaks: ClassVar[str] = (
        "logits themselves move: return the loss, or log-probabilities; else a tied head, soft-capping, or a loss that "
        "is no softmax"
    )
    effect: ClassVar[Effect] = "shift"
    balancing: ClassVar[Effect] = "shift"
    reserved: ClassVar[tuple[str, ...]] = (VOCAB,)

    def assemble(self, named: tuple[str, ...], instances: Sequence[Instance]) -> Bound:
        return Bound(shifts=tuple(ShiftInstance(self.name, i.key, i.blocks) for i in instances))

    def element_sizes(self, named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        return {}

    def move(self, bound: Bound, element: Element, values: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        slices = {b.path: as_slice(b, element[i.key][b.path]) for i in bound.shifts for b in i.blocks}
        return bound.add_shifts(values, slices)

    def element_of(self, bound: Bound, found: Mapping[Reading, jax.Array], values: Mapping[str, jax.Array]) -> Element:
        return self._packed(bound, bound.shift_means(values))

    def centred(self, bound: Bound, values: Arrays) -> Arrays:
        return bound.centre(values)

    def sole_gradient(self, bound: Bound, point: Arrays, gradient: Arrays) -> jax.Array | None:
        # Nothing before a head that is constant over classes, on the slice a zero one, has a gradient.
        sizes = []
        for instance in bound.shifts:
            kernels = [b for b in instance.blocks if shift_dimensions(b) > 1]
            if kernels:
                largest = jnp.stack([jnp.max(jnp.abs(b.view(gradient[b.path]))) for b in instance.blocks]).max()
                constant = jnp.stack([jnp.all(b.view(point[b.path]) == 0.0) for b in kernels]).any()
                sizes.append(jnp.where(constant, largest, 0.0).astype(real_dtype()))
        return jnp.stack(sizes).max() if sizes else None

    def coordinates_of(self, bound: Bound, element: Element, values: Arrays) -> Element:
        return self._packed(bound, bound.shift_means(values))

    def motion(self, bound: Bound, element: Element, inverse: Element) -> Motion:
        slices = {b.path: as_slice(b, element[i.key][b.path]) for i in bound.shifts for b in i.blocks}

        def undo(values: Arrays) -> Arrays:
            moved = dict(values)
            for block in bound.shift_blocks:
                moved[block.path] = without_slice(block, moved[block.path], slices[block.path])
            return moved

        return Motion(undo, dict, dict)  # a shift moves points alone

    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        bound, leaves = self.bound(params), leaves_by_path(params)
        slices = bound.zero_slices()
        for block, own in zip(bound.shift_blocks, jax.random.split(key, len(bound.shift_blocks)), strict=True):
            rms = jnp.sqrt(jnp.mean(jnp.square(jnp.asarray(leaves[block.path], real_dtype()))))
            inner = slice_block(block)
            draw = scale * rms * jax.random.normal(own, inner.view_shape, real_dtype())
            slices[block.path] = inner.write(slices[block.path], draw)
        return self._packed(bound, slices)

    def identity(self, params: Any) -> Element:
        bound = self.bound(params)
        return self._packed(bound, bound.zero_slices())

    def inverse(self, element: Element) -> Element:
        return jax.tree.map(jnp.negative, element)

    def compose(self, a: Element, b: Element) -> Element:
        return jax.tree.map(jnp.add, a, b)

    def fraction(self, element: Element, strength: float | jax.Array) -> Element:
        return jax.tree.map(lambda x: strength * x, element)

    def carried(self, element: Element, by: Sequence[tuple[Gauge, Element]]) -> Element:
        def after(path: str, shift: jax.Array) -> jax.Array:
            leaf = shift.reshape(_slice_shape(self.specs, path, shift.shape))
            for gauge, own in by:
                leaf = gauge.moved_leaf(path, leaf, own)
            return leaf.reshape(shift.shape)

        return {key: {path: after(path, x) for path, x in own.items()} for key, own in element.items()}

    def moved_leaf(self, path: str, leaf: jax.Array, element: Element) -> jax.Array:
        return leaf  # shifts commute

    def dim(self, params: Any) -> int:
        return sum(shift_dimensions(b) for b in self.bound(params).shift_blocks)

    def _packed(self, bound: Bound, shifts: Mapping[str, jax.Array]) -> Element:
        packed: Element = {}
        for instance in bound.shifts:
            own = packed.setdefault(instance.key, {})
            for block in instance.blocks:
                part = own_slice(block, shifts[block.path]).reshape(element_shape(block))
                own[block.path] = own[block.path] + part if block.path in own else part
        return packed


def _slice_shape(specs: Sequence[BlockSpec], path: str, shift: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a leaf's slice at one vocab entry, from the shape of a shift in an element."""
    spec = next(s for s in specs if instance_key(specs, s, path) is not None)
    lengths = iter(shift)
    return tuple(
        1 if [part.name for part in group] == [VOCAB] else next(lengths)
        for group in parse_axes("logit_shift", spec.pattern, spec.axes).groups
    )
