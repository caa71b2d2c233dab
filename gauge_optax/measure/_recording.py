"""Metrics in the state of an optimizer, taken at some steps and at no cost in the others."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from gauge_optax.transformation import layout
from gauge_optax.xla import recomputed_after

Metrics = TypeVar("Metrics")

# Below this many parameters the update comes first and the record waits for it. From there on a record makes the update
# once more, before the step: then XLA neither materializes updates in steps without a record nor copies parameters that
# are donated. For small models that second update costs more (benchmarks/results/metrics.json).
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
      gradient: the argument of `update`.
      taken: number of steps before this one.
      every: number of steps between records.

    Returns:
      Updates, state and metrics.
    """
    always = isinstance(every, int) and every == 1
    if always or sum(map(jnp.size, jax.tree.leaves(gradient))) < _LARGE:
        updates, state = update(gradient)
        return updates, state, either(taken, every, lambda: record(updates), last, gradient)
    metrics = either(taken, every, lambda: record(update(gradient)[0]), last, gradient)
    # The step depends on the metrics: donated parameters are then read before they are overwritten, and not copied.
    updates, state = update(recomputed_after(metrics, gradient))
    return updates, state, metrics


def either(
    taken: jax.Array, every: int | jax.Array, record: Callable[[], Metrics], last: Metrics, measured: Any
) -> Metrics:
    """A new record at every `every`-th step, else the last one; replicated over the mesh of `measured`."""
    sharding = layout(measured)
    if isinstance(every, int) and every == 1:
        return sharding.replicated(record())
    # Both branches must return arrays of one sharding.
    return jax.lax.cond(taken % every == 0, lambda: sharding.replicated(record()), lambda: sharding.replicated(last))
