"""Stored bases of a product's rotation gauges: one `lax.cond` per gauge refreshes all its heads, never one per head.

Here: refresh by drift or age, and the horizontal projection in the stored bases. Not here: second moments (`ddc`).
"""

from collections.abc import Sequence

import jax

from gauge_optax.gauges._basis import Group, HeadBasis, drift, fresh_basis, generators, grouped, stacked_gram
from gauge_optax.gauges._scale import Values
from gauge_optax.gauges._split import Bound
from gauge_optax.linalg import skew

Arrays = dict[str, jax.Array]

LIVE = 1e-3  # directions whose drift counts: relative eigenvalue, as in body_frame_topk's default


def init_bases(bound: Bound, hat: Values) -> tuple[HeadBasis, ...]:
    """A fresh basis per group of equally shaped instances."""
    return tuple(fresh_basis(stacked_gram(g, hat, hat)) for g in grouped(bound.heads))


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
        generator = generators(basis, gram, skew(stacked_gram(group, hat, framed)))
        out |= add_turn(group, out, hat, -generator)
        removed.append(generator)
    return out, tuple(removed)


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
