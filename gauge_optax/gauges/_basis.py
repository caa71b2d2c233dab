"""The eigenbasis of every head's Gram matrix that a transformation keeps between steps, and the body frame made of it.

Here: when a stored basis has drifted too far, the Lyapunov equation in a stale basis, the frame in which second moments
live. Not here: the moments.

An eigenbasis follows the head, U(W·R) = Rᵀ·U, up to signs, which squares do not see. Where two kept eigenvalues nearly
agree it follows nothing; there the frame is Fᵀ with F = Z(ZᵀZ)^(−1/2), Z = CᵀW, C a constant pseudo-random matrix:
F(W·R) = F(W)·R with no signs and no gaps. DESIGN §5.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.gauges._head import HeadInstance
from gauge_optax.gauges._scale import Values
from gauge_optax.linalg import (
    eigenvalue_cutoff,
    inverse_pair_sums,
    inverse_sqrt,
    lyapunov,
    lyapunov_stale,
    matmul,
    symmetric_eigen,
    transpose,
)

_SMALLEST_GAP = 1e-3  # relative; below it an eigenbasis is not equivariant
_KEY = 20260

Group = tuple[HeadInstance, ...]
"""Rotation instances of one gauge with equal shapes, batched along a new leading axis."""


class HeadBasis(NamedTuple):
    """A stored eigenbasis.

    Attributes:
      vectors: (instances, *shape, d, d), columns.
      values: (instances, *shape, d), descending.
      age: steps since it was fresh, int32.
    """

    vectors: jax.Array
    values: jax.Array
    age: jax.Array


def grouped(heads: Sequence[Sequence[HeadInstance]]) -> tuple[Group, ...]:
    """Rotation instances, gauge by gauge, grouped by equal shapes."""
    groups: dict[Hashable, list[HeadInstance]] = {}
    for gauge, instances in enumerate(heads):
        for head in instances:
            rows = tuple(head.rows(block) for block in head.blocks)
            groups.setdefault((gauge, head.shape, head.size, rows), []).append(head)
    return tuple(tuple(g) for g in groups.values())


def stacked_gram(group: Group, a: Values, b: Values) -> jax.Array:
    """Σ over rows of aᵀb for every instance: (instances, *shape, d, d)."""
    return jnp.stack([head.gram(a, b) for head in group])


def fresh_basis(gram: jax.Array) -> HeadBasis:
    """The eigenbasis of these Gram matrices."""
    values, vectors = symmetric_eigen(gram)
    return HeadBasis(vectors, values, jnp.zeros((), jnp.int32))


def live_directions(values: jax.Array, threshold: float | jax.Array) -> jax.Array:
    """Mask of eigenvalues above threshold·λ_max."""
    return values > threshold * jnp.maximum(values[..., :1], 0.0)


def drift(basis: HeadBasis, gram: jax.Array, live_threshold: float | jax.Array) -> jax.Array:
    """The largest whitened drift ‖Λ^(−1/2)(UᵀMU − Λ)Λ^(−1/2)‖_F over live directions, over all heads."""
    live = live_directions(basis.values, live_threshold)
    root = jnp.where(live, jax.lax.rsqrt(jnp.where(live, basis.values, 1.0)), 0.0)
    now = matmul(matmul(transpose(basis.vectors), gram), basis.vectors)
    off = (now - _diagonal(basis.values)) * root[..., :, None] * root[..., None, :]
    return jnp.sqrt(jnp.max(jnp.sum(jnp.square(off), (-1, -2))))


def _diagonal(values: jax.Array) -> jax.Array:
    return values[..., None] * jnp.eye(values.shape[-1], dtype=values.dtype)


def generators(
    basis: HeadBasis, gram: jax.Array, skewed: jax.Array, negligible: float | jax.Array = 0.0
) -> jax.Array:
    """A with M·A + A·M = 2·skewed, by conjugate gradients in the stored basis.

    Args:
      basis: the stored basis.
      gram: M, (instances, *shape, d, d), at the current point.
      skewed: skew(WᵀU), same shape.
      negligible: ‖W·A‖² below which A counts as zero.

    Returns:
      A, same shape.
    """
    steps = 12 if gram.dtype == jnp.float64 else 6
    return lyapunov_stale(gram, skewed, basis.values, basis.vectors, steps, negligible)


def vertical_square(basis: HeadBasis, gram: jax.Array, skewed: jax.Array) -> jax.Array:
    """Σ‖W·A‖² over all heads, A as `generators` gives it, read off the stored basis without solving.

    As exact as the basis is fresh: a tenth before it is renewed.
    """
    if gram.shape[-1] == 2:
        generator = lyapunov(gram, skewed)
        return jnp.sum(generator * matmul(gram, generator))
    turned = matmul(matmul(transpose(basis.vectors), skewed), basis.vectors)
    return 2.0 * jnp.sum(inverse_pair_sums(basis.values) * jnp.square(turned))


def body_frame(group: Group, hat: Values, basis: HeadBasis, live_threshold: float | jax.Array) -> jax.Array:
    """The frame of the second moments: eigenvectors, or the anchored frame of degenerate heads.

    Args:
      group: the instances.
      hat: framed values.
      basis: a fresh basis at `hat`.
      live_threshold: directions below it times λ_max are not kept.

    Returns:
      U, (instances, *shape, d, d); for a degenerate head a partial isometry onto its kept directions.
    """
    anchors = jnp.stack([anchor(head, hat) for head in group])
    kept = _kept(basis.values, live_threshold)
    projector = matmul(basis.vectors * kept[..., None, :].astype(anchors.dtype), transpose(basis.vectors))
    z = matmul(anchors, projector)
    polar = matmul(z, inverse_sqrt(matmul(transpose(z), z)))
    # `+ 0` keeps the frame a buffer of its own: one buffer in two state fields cannot be donated.
    return jnp.where(degenerate(basis.values, live_threshold)[..., None, None], transpose(polar), basis.vectors + 0)


def _kept(values: jax.Array, live_threshold: float | jax.Array) -> jax.Array:
    return live_directions(values, jnp.maximum(live_threshold, eigenvalue_cutoff(values.dtype)))


def degenerate(values: jax.Array, live_threshold: float | jax.Array) -> jax.Array:
    """Heads two of whose kept eigenvalues differ by less than 1e-3·λ_max."""
    kept = _kept(values, live_threshold)
    close = values[..., :-1] - values[..., 1:] < _SMALLEST_GAP * values[..., :1]
    return jnp.any(kept[..., 1:] & close, -1)


def anchor(head: HeadInstance, hat: Values) -> jax.Array:
    """CᵀW of every head, (*shape, d, d), C the same whatever the point."""
    total = jnp.zeros((*head.shape, head.size, head.size), next(iter(hat.values())).dtype)
    for number, block in enumerate(head.blocks):
        constant = _noise(number, head.rows(block), head.size).astype(total.dtype)
        total = total + head.combined(block, hat[block.block.path], constant)
    return total


def _noise(number: int, rows: int, columns: int) -> jax.Array:
    """Fixed pseudo-random numbers in (−1, 1), (rows, columns) for every block number.

    A hash of the position rather than `jax.random`, whose loop can block for ever beside another one on a CPU.
    """
    x = jnp.arange(rows * columns, dtype=jnp.uint32) + jnp.uint32((_KEY + number * 0x9E3779B9) % 2**32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    x = x ^ (x >> 16)
    return (x.astype(jnp.float32) / 2.0**31 - 1.0).reshape(rows, columns)
