"""Readings of rotations: an orthogonal matrix per head, an angle per rotary plane.

With fixed pseudo-random rows C, the polar factor Q of CᵀW has Q(W·R) = Q(W)·R, and W·Qᵀ does not see R. No reading of
the kind is continuous everywhere, so it is taken at `init` and kept. From then on the turning part of a step is taken
out: U − W·A with M·A + A·M = 2·skew(WᵀU), M = WᵀW, is the nearest step that turns nothing.

Here: the readings, and that equation for all heads of one size at once. Not here: names and bindings (`rotation`,
`torus`). References: docs/design.md §3, hold; DDC B.8, B.9.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Block
from gauge_optax.gauges._head import BASIS, PLANE, HeadBlock, HeadInstance
from gauge_optax.gauges.reading import Arrays, InstanceReading, Motion, Reading, Turning
from gauge_optax.linalg import HIGHEST, matmul, noise, real_dtype, safe_divide, transpose
from gauge_optax.xla import in_turn, singly


@dataclasses.dataclass(frozen=True)
class TurnReading(InstanceReading, Turning):
    """The orthogonal matrix of every head, a partial isometry where its rows do not have full rank.

    Attributes:
      instance: the rotation instance.
    """

    instance: HeadInstance

    @property
    def moved(self) -> tuple[Block, ...]:
        return tuple(b.block for b in self.instance.blocks)

    @classmethod
    def read_all(cls, readings: "Sequence[TurnReading]", values: Arrays) -> list[jax.Array]:
        found: dict[TurnReading, jax.Array] = {}
        sizes = sorted({r.instance.size for r in readings})
        groups = [[r for r in readings if r.instance.size == size] for size in sizes]
        anchors = [_stacked([_mixed_rows(r.instance, values) for r in group]) for group in groups]
        for group, polar in zip(groups, in_turn(cls.polar, anchors), strict=True):
            found |= dict(zip(group, _unstacked(polar, [r.instance for r in group]), strict=True))
        return [found[r] for r in readings]

    def identity(self) -> jax.Array:
        size = self.instance.size
        return jnp.broadcast_to(jnp.eye(size, dtype=real_dtype()), (*self.shape, size, size))

    @staticmethod
    def polar(m: jax.Array) -> jax.Array:
        """The polar factor, without the directions that are rounding."""
        u, sizes, vt = singly(jnp.linalg.svd, m)
        kept = sizes > noise(sizes.dtype) * sizes[..., :1]
        return matmul(u * kept[..., None, :].astype(u.dtype), vt)

    @classmethod
    def without_rounding(cls, readings: "Sequence[TurnReading]", cotangents: Arrays) -> Arrays:
        """A key's bias shifts all scores of a query alike: its gradient is what softmax rounds."""
        out = dict(cotangents)
        for head in (r.instance for r in readings):
            single = [b for b in head.blocks if head.rows(b) == 1]
            if not single or len(single) == len(head.blocks):
                continue
            order = [name for name in head.named if name != PLANE]
            sizes = [_row(head, b, out[b.block.path], order) for b in head.blocks]
            whole = functools.reduce(jnp.maximum, sizes)
            for block, size in zip(head.blocks, sizes, strict=True):
                if block in single:
                    view = block.view(out[block.block.path])
                    faint = size < noise(view.dtype) * whole
                    shape = [n if label in order else 1 for n, label in zip(view.shape, block.labels, strict=True)]
                    kept = [label for label in block.labels if label in order]
                    faint = jnp.transpose(faint, [order.index(label) for label in kept]).reshape(shape)
                    out[block.block.path] = block.write(out[block.block.path], jnp.where(faint, 0.0, view))
        return out

    @classmethod
    def held(cls, readings: "Sequence[TurnReading]", before: Arrays, change: Arrays) -> Arrays:
        return _without_turning(readings, before, change, {})

    @classmethod
    def across(
        cls, readings: "Sequence[TurnReading]", point: Arrays, vector: Arrays, back: Mapping[Reading, jax.Array]
    ) -> Arrays:
        return _without_turning(readings, point, vector, back)


def _row(head: HeadInstance, block: HeadBlock, leaf: jax.Array, order: Sequence[str]) -> jax.Array:
    """The norm that rows of every head have, root mean square; its axes are those of heads, in this order."""
    if block.pairing is None:  # as products leave them: no copy with heads where the leaf has them
        view, labels = head.matrices(block, block.view(leaf))[0], (*head.named, "", "")
    else:
        view, labels = block.view(leaf), block.labels
    spare = tuple(k for k, label in enumerate(labels) if label not in order)
    largest = jnp.max(jnp.abs(view), spare, keepdims=True)
    # Squares of numbers that have them, whatever the loss's scale.
    squares = jnp.sum(jnp.square(view * safe_divide(jnp.ones(()), largest)), spare, keepdims=True)
    norms = jnp.squeeze(largest * jnp.sqrt(squares / head.rows(block)), spare)
    kept = [label for label in labels if label in order]
    return jnp.transpose(norms, [kept.index(name) for name in order])


def _mixed_rows(head: HeadInstance, values: Arrays) -> jax.Array:
    """CᵀW of every head, whatever the order in which its blocks were listed."""
    total = jnp.zeros((*head.shape, head.size, head.size), next(iter(values.values())).dtype)
    for number, block in enumerate(sorted(head.blocks, key=lambda b: (b.block.path, b.block.axes))):
        constant = _noise(number, head.rows(block), head.size).astype(total.dtype)
        total = total + head.combined(block, values[block.block.path], constant)
    return total


def _without_turning(
    readings: Sequence[TurnReading], point: Arrays, vector: Arrays, back: Mapping[Reading, jax.Array]
) -> Arrays:
    """A vector less W·A, heads of one size in one batch; `back`, where they do not lie on the slice, takes them there.

    The equation is solved there: what is left when it is not solved to the end knows the basis.
    """
    out = dict(vector)
    for size in sorted({r.instance.size for r in readings}):
        alike = [r for r in readings if r.instance.size == size]
        heads = [r.instance for r in alike]
        found = [(head.gram(point, point), head.gram(point, vector)) for head in heads]
        gram, turning = (_stacked([pair[k] for pair in found]) for k in range(2))
        if back:
            turns = _stacked([back[r] for r in alike])
            gram, turning = (matmul(matmul(transpose(turns), x), turns) for x in (gram, turning))
            solved = matmul(matmul(turns, lyapunov(gram, turning)), transpose(turns))
        else:
            solved = lyapunov(gram, turning)
        for head, generator in zip(heads, _unstacked(solved, heads), strict=True):
            out |= head.added(out, point, -generator)
    return out


def _stacked(matrices: Sequence[jax.Array]) -> jax.Array:
    """Matrices of all heads of several instances, (heads, d, d)."""
    return jnp.concatenate([m.reshape(-1, *m.shape[-2:]) for m in matrices])


def _unstacked(stacked: jax.Array, heads: Sequence[HeadInstance]) -> list[jax.Array]:
    ends = np.cumsum([math.prod(h.shape) for h in heads])[:-1].tolist()
    parts = jnp.split(stacked, ends)
    return [x.reshape(*h.shape, *x.shape[-2:]) for h, x in zip(heads, parts, strict=True)]


_Solving = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def lyapunov(m: jax.Array, k: jax.Array, steps: int = 24) -> jax.Array:
    """The skew solution A of M·A + A·M = K − Kᵀ by conjugate gradients from the diagonal; products only.

    Args:
      m: (…, d, d), symmetric positive semi-definite.
      k: (…, d, d), any.
      steps: how many at most; d(d − 1)/2 are enough whatever M is.

    Returns:
      A (…, d, d), antisymmetric. A head that has converged stops.
    """
    size = m.shape[-1]
    diagonal = jnp.diagonal(m, axis1=-2, axis2=-1)
    weight = safe_divide(jnp.ones(()), diagonal[..., :, None] + diagonal[..., None, :])

    def inner(a: jax.Array, b: jax.Array) -> jax.Array:
        # As a product: on a CPU a sum over the last two axes takes longer than the products of a step.
        return jnp.einsum("...ij,...ij->...", a, b, precision=HIGHEST)[..., None, None]

    def step(carry: _Solving, _: None) -> tuple[_Solving, None]:
        solution, residual, direction, energy = carry
        product = matmul(m, direction)  # D is antisymmetric: D·M is minus its transpose, ⟨D, M·D + D·M⟩ twice ⟨D, M·D⟩
        rate = jnp.where(energy > done, safe_divide(energy, 2.0 * inner(direction, product)), 0.0)
        residual = residual - rate * (product - transpose(product))
        scaled = weight * residual
        fresh = inner(residual, scaled)
        return (solution + rate * direction, residual, scaled + safe_divide(fresh, energy) * direction, fresh), None

    # Mirrored, for what is fused and contracted need not be antisymmetric to the last bit, least of all on a mesh, and
    # a symmetric part, out of the iteration's reach, would be amplified without end.
    above = jnp.triu(k - transpose(k), 1)
    residual = above - transpose(above)
    scaled = weight * residual
    energy = inner(residual, scaled)
    done = energy * jnp.square(0.1 * jnp.finfo(m.dtype).eps)
    start = (jnp.zeros_like(k), residual, scaled, energy)
    (solution, *_), _ = jax.lax.scan(step, start, length=min(steps, 2 + size * (size - 1) // 2))
    return solution


@dataclasses.dataclass(frozen=True)
class WholeTurnReading(TurnReading):
    """The same as part of a larger group, whose elements are inverted: the identity where ranks are missing."""

    @staticmethod
    def polar(m: jax.Array) -> jax.Array:
        u, sizes, vt = singly(jnp.linalg.svd, m)
        whole = sizes[..., -1] > noise(sizes.dtype) * sizes[..., 0]
        return jnp.where(whole[..., None, None], matmul(u, vt), jnp.eye(m.shape[-1], dtype=m.dtype))


@dataclasses.dataclass(frozen=True)
class PlaneReading(TurnReading):
    """The angle of every rotary plane: the phase of its first row, all rows being mixed to two."""

    entrywise: ClassVar[bool] = True

    @classmethod
    def read_all(cls, readings: "Sequence[TurnReading]", values: Arrays) -> list[jax.Array]:
        first = [_mixed_rows(r.instance, values)[..., 0, :] for r in readings]
        return [jnp.arctan2(x[..., 1], x[..., 0]) for x in first]

    def identity(self) -> jax.Array:
        return jnp.zeros(self.shape, real_dtype())

    @classmethod
    def held(cls, readings: "Sequence[TurnReading]", before: Arrays, change: Arrays) -> Arrays:
        out = dict(change)
        for head in (r.instance for r in readings):
            after = {p: before[p] + out[p] for p in head.paths}
            gram = head.gram(before, after)
            along, across = gram[..., 0, 0] + gram[..., 1, 1], gram[..., 0, 1] - gram[..., 1, 0]
            size = jnp.sqrt(along * along + across * across)
            cosine = jnp.where(size > 0, safe_divide(along, size), 1.0)
            back = turned_planes(head, cosine, -safe_divide(across, size), after)
            out |= {p: back[p] - before[p] for p in head.paths}
        return out

    @classmethod
    def across(
        cls, readings: "Sequence[TurnReading]", point: Arrays, vector: Arrays, back: Mapping[Reading, jax.Array]
    ) -> Arrays:
        out = dict(vector)
        for head in (r.instance for r in readings):
            swapped = head.swapped(point)
            size = head.total({p: jnp.square(x) for p, x in swapped.items()})
            sums = head.over_rows({p: x * out[p] for p, x in swapped.items()})
            rate = safe_divide(sums[..., 1] - sums[..., 0], size)
            signed = jnp.stack([-rate, rate], -1)  # a quarter turn takes (l, r) to (−r, l)
            for block in head.blocks:
                path = block.block.path
                moved = block.view(swapped[path]) * head.along_basis(block, signed)
                out[path] = block.write(out[path], block.view(out[path]) - moved)
        return out


def turn_motion(heads: Sequence[HeadInstance], matrices: Mapping[str, jax.Array]) -> Motion:
    """A frame of orthogonal matrices, by instance."""

    def turned(back: bool, values: Arrays) -> Arrays:
        out = dict(values)
        for head in heads:
            matrix = matrices[head.key]
            out |= head.turn(out, transpose(matrix) if back else matrix)
        return out

    forth, undone = functools.partial(turned, False), functools.partial(turned, True)
    return Motion(undone, forth, undone)


def plane_motion(heads: Sequence[HeadInstance], angles: Mapping[str, jax.Array]) -> Motion:
    """A frame of angles, by instance."""
    both = {head.key: (jnp.cos(angles[head.key]), jnp.sin(angles[head.key])) for head in heads}

    def turned(sign: float, values: Arrays) -> Arrays:
        out = dict(values)
        for head in heads:
            cosine, sine = both[head.key]
            out |= turned_planes(head, cosine, sign * sine, out)
        return out

    forth, back = functools.partial(turned, 1.0), functools.partial(turned, -1.0)
    return Motion(back, forth, back)


def turned_planes(head: HeadInstance, cosine: jax.Array, sine: jax.Array, values: Arrays) -> Arrays:
    """The leaves of planes with every row (l, r) at (l·cos − r·sin, l·sin + r·cos), entry by entry."""
    out = {path: values[path] for path in head.paths}
    signed = jnp.stack([-sine, sine], -1)
    same = jnp.stack([cosine, cosine], -1)
    for block in head.blocks:
        view = block.view(out[block.block.path])
        swapped = jax.lax.rev(view, (block.labels.index(BASIS),))
        moved = view * head.along_basis(block, same) + swapped * head.along_basis(block, signed)
        out[block.block.path] = block.write(out[block.block.path], moved)
    return out


_KEY = 20260


def _noise(number: int, rows: int, columns: int) -> jax.Array:
    """Fixed pseudo-random numbers in (−1, 1), (rows, columns) for every block number.

    A hash of the position rather than `jax.random`, whose loop can block for ever beside another one on a CPU.
    """
    x = jnp.arange(rows * columns, dtype=jnp.uint32) + jnp.uint32((_KEY + number * 0x9E3779B9) % 2**32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    x = x ^ (x >> 16)
    return (x.astype(jnp.float32) / 2.0**31 - 1.0).reshape(rows, columns)
