"""Stored bases of a product's rotation gauges: one `lax.cond` per gauge refreshes all its heads, never one per head.

Here: refresh by drift or age, and the horizontal projection in the stored bases. Not here: second moments (`_moments`).
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gauge_optax._sequence import in_turn
from gauge_optax.gauges._basis import (
    Group,
    HeadBasis,
    drift,
    fresh_basis,
    generators,
    grouped,
    stacked_gram,
    vertical_square,
)
from gauge_optax.gauges._scale import Values
from gauge_optax.gauges._split import Bound
from gauge_optax.linalg import skew

Arrays = dict[str, jax.Array]

_ROUNDING = (1e-5, 1e-12)  # of a gradient, in float32 and in float64
LIVE = 1e-3  # directions whose drift counts: relative eigenvalue, as in body_frame_topk's default


def init_bases(bound: Bound, hat: Values) -> tuple[HeadBasis, ...]:
    """A fresh basis per group of equally shaped instances."""
    return in_turn(fresh_basis, [stacked_gram(g, hat, hat) for g in grouped(bound.heads)])


def refreshed(
    basis: HeadBasis,
    gram: jax.Array,
    live_threshold: float | jax.Array,
    refresh_drift: float | jax.Array,
    refresh_every: int | jax.Array | None,
) -> tuple[HeadBasis, jax.Array]:
    """The stored basis, or a fresh one where it has drifted or aged; and whether it was renewed."""
    stale = drift(basis, gram, live_threshold) > refresh_drift
    if refresh_every is not None:
        stale = stale | (basis.age + 1 >= refresh_every)
    kept = basis._replace(age=basis.age + 1)
    return jax.lax.cond(stale, lambda: fresh_basis(gram), lambda: kept), stale


def horizontal(
    bound: Bound,
    hat: Values,
    framed: Values,
    bases: Sequence[HeadBasis],
    grams: Sequence[jax.Array],
) -> tuple[Arrays, tuple[jax.Array, ...]]:
    """An in-frame vector without its rotation part, and that part's generators per group."""
    out, removed = dict(framed), []
    for group, basis, gram in zip(grouped(bound.heads), bases, grams, strict=True):
        own = {path: out[path] for head in group for path in head.paths}
        # WᵀU is rounded relative to its largest direction: 7e-6 of a step stays vertical at condition 100 after one.
        exact = group[0].size == 2 or gram.dtype == jnp.float64
        times = 1 if exact else jnp.where(_ill_conditioned(basis), 2, 1)
        start = own, jnp.zeros_like(gram)
        own, generator = jax.lax.fori_loop(0, times, functools.partial(_projected, group, hat, basis, gram), start)
        out |= own
        removed.append(generator)
    return out, tuple(removed)


def without_vertical(
    bound: Bound, hat: Values, framed: Values, bases: Sequence[HeadBasis], grams: Sequence[jax.Array]
) -> Arrays:
    """A cotangent without its rotation part, left alone where that is rounding, as it is for an invariant loss."""
    out = dict(framed)
    for group, basis, gram in zip(grouped(bound.heads), bases, grams, strict=True):
        own = {path: out[path] for head in group for path in head.paths}
        whole = sum(jnp.sum(jnp.square(x)) for x in own.values())
        negligible = _ROUNDING[gram.dtype == jnp.float64] ** 2 * whole
        skewed = skew(stacked_gram(group, hat, own))
        turn = functools.partial(_turned_back, group, hat, basis, gram, skewed, negligible)
        out |= jax.lax.cond(vertical_square(basis, gram, skewed) > negligible, turn, lambda own: own, own)
    return out


def _turned_back(
    group: Group,
    hat: Values,
    basis: HeadBasis,
    gram: jax.Array,
    skewed: jax.Array,
    negligible: float | jax.Array,
    own: Arrays,
) -> Arrays:
    return add_turn(group, own, hat, -generators(basis, gram, skewed, negligible))


def _projected(
    group: Group, hat: Values, basis: HeadBasis, gram: jax.Array, _: jax.Array, so_far: tuple[Arrays, jax.Array]
) -> tuple[Arrays, jax.Array]:
    own, removed = so_far
    generator = generators(basis, gram, skew(stacked_gram(group, hat, own)))
    return add_turn(group, own, hat, -generator), removed + generator


def _ill_conditioned(basis: HeadBasis) -> jax.Array:
    """Whether some head's rows have condition above 10."""
    return jnp.any(basis.values[..., -1] < 1e-2 * basis.values[..., 0])


def add_turn(group: Group, vector: Values, hat: Values, generator: jax.Array) -> Arrays:
    """vector + θ̂·A on the leaves of a group."""
    sums: Arrays = {}
    for head, own in zip(group, generator, strict=True):
        for block in head.blocks:
            path = block.block.path
            base = sums.get(path, vector[path])
            sums[path] = block.write(base, block.view(base) + head.turn_view(block, block.view(hat[path]), own))
    return sums


def turned(group: Group, values: Values, matrix: jax.Array) -> Arrays:
    """values·matrix on the leaves of a group."""
    out = dict(values)
    for head, own in zip(group, matrix, strict=True):
        out |= head.turn(out, own)
    return {path: out[path] for head in group for path in head.paths}
