"""A record in some steps of an optimizer, at no cost in the others.

Here: when the record is taken, so that nothing is copied. Not here: what is recorded (`live`, `rotation`).
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from gauge_optax.meshes import layout

Metrics = TypeVar("Metrics")

# From so many parameters on a record makes the update once more, before the step: then no other step writes down an
# update that it would only add, or copies parameters that are donated. Below, waiting for each other costs more
# (benchmarks/results/metrics.json).
_LARGE = 4_000_000


def recorded(
    update: Callable[[Any], tuple[Any, Any]],
    record: Callable[[Any], Metrics],
    last: Metrics,
    gradient: Any,
    taken: jax.Array,
    every: int | jax.Array,
) -> tuple[Any, Any, Metrics]:
    """A step of an optimizer, and its metrics or those of the last record.

    Args:
      update: gradient → (updates, state).
      record: updates → metrics.
      last: metrics of the last record.
      gradient: what `update` takes.
      taken: steps before this one.
      every: steps between records.

    Returns:
      Updates, state and metrics.
    """
    due = taken % every == 0
    always = isinstance(every, int) and every == 1
    if always or sum(map(jnp.size, jax.tree.leaves(gradient))) < _LARGE:
        steps, state = update(gradient)
        return steps, state, either(due, lambda: record(steps), last, gradient)
    metrics = either(due, lambda: record(update(gradient)[0]), last, gradient)
    steps, state = update(_afterwards(gradient, metrics))
    return steps, state, metrics


def either(due: jax.Array, record: Callable[[], Metrics], last: Metrics, measured: Any) -> Metrics:
    """A new record where one is due, else the last; laid out alike, whole, on the mesh of what is measured."""
    laid = layout(measured)
    return jax.lax.cond(due, lambda: laid.whole(record()), lambda: laid.whole(last))


def _afterwards(gradient: Any, metrics: Any) -> Any:
    """A gradient that is not known before the metrics are: what is donated is then read in its place, not copied."""
    known = next(x for x in jax.tree.leaves(metrics) if jnp.issubdtype(x.dtype, jnp.inexact))
    # Nothing exceeds infinity; the compiler does not know that.
    one = jnp.where(jnp.max(known, initial=-jnp.inf) > jnp.inf, 2.0, 1.0)
    return jax.tree.map(lambda x: x * one.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x, gradient)
