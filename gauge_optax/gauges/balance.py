"""The least-norm representative of an orbit, by the one iteration of this library.

A scale is balanced where ‖up‖² = p·‖down‖², a linear gauge where both factors have one Gram matrix (Kempf–Ness). Each
has a closed form with all others divided out; those that share leaves take turns until none moves.

Here: taking turns. Not here: one reading's balance (`_scale`, `_linear`). Reference: docs/design.md §6.
"""

import functools
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import overlap
from gauge_optax.gauges.chart import Chart, elements_of
from gauge_optax.gauges.reading import Anchored, Arrays
from gauge_optax.linalg import real_dtype
from gauge_optax.xla import after

_MOST_ROUNDS = 200
_Carry = tuple[tuple[jax.Array, ...], Arrays, jax.Array, jax.Array]


def least_norm(on: Chart, params: Any) -> tuple[Any, ...]:
    """The element of every gauge that takes the least-norm representative to a point.

    Args:
      on: the product on its tree.
      params: the point.

    Returns:
      The elements; the identity for rotations, and for channels and heads of which no representative is the smallest:
      a side is zero, or has not full rank.
    """
    values = on.joint.values(params)
    found = dict(zip(on.anchored, _rounds(on.anchored, on.joint.centre(values)), strict=True))
    return elements_of(on, found | {r: r.identity() for r in on.turning}, values)


@functools.partial(jax.jit, static_argnums=0)  # outside jit, a loop would be compiled anew at every call
def _rounds(readings: tuple[Anchored, ...], values: Arrays) -> tuple[jax.Array, ...]:
    """Elements with which every reading is balanced."""
    start = tuple(r.identity() for r in readings), values, jnp.asarray(jnp.inf, real_dtype()), jnp.zeros((), jnp.int32)
    if not _coupled(readings):
        return _one_round(readings, start)[0]
    tolerance = 32.0 * float(jnp.finfo(real_dtype()).eps)

    def unfinished(carry: _Carry) -> jax.Array:
        return (carry[2] > tolerance) & (carry[3] < _MOST_ROUNDS)

    return jax.lax.while_loop(unfinished, functools.partial(_one_round, readings), start)[0]


def _one_round(readings: Sequence[Anchored], carry: _Carry) -> _Carry:
    """Every reading balanced once, the others held; and by how much any log-scale moved."""
    elements, values, _, count = carry
    found, one, moved = list(elements), jnp.ones((), real_dtype()), jnp.zeros((), real_dtype())
    for k, reading in enumerate(readings):
        alone = values | reading.divide(reading.inverse(found[k]), values)
        if reading.sequential:
            alone |= {b.path: alone[b.path] * one for b in reading.moved}
        new = reading.balanced(alone)
        if reading.sequential:
            one = after(new)
        else:
            steps = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y), initial=0.0), new, found[k])
            moved = jnp.maximum(moved, jnp.max(jnp.stack(jax.tree.leaves(steps))))
        found[k], values = new, values | reading.divide(new, alone)
    return tuple(found), values, moved, count + 1


def _coupled(readings: Sequence[Anchored]) -> bool:
    """Whether two readings move an entry."""
    return any(overlap(a, b) for one, other in combinations(readings, 2) for a in one.moved for b in other.moved)
