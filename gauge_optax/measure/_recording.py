"""Records metrics in the state of an optimizer at every n-th step, at no cost in the other steps."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import structures_apart
from gauge_optax.errors import binding_error
from gauge_optax.transformation import in_dtypes_of_state, layout
from gauge_optax.xla import cond, recomputed_after

Metrics = TypeVar("Metrics")

# With fewer parameters than this, a record reads the update that the step has computed. With more, a record computes
# the update a second time, before the step. XLA then stores no array of updates in steps without a record, and does not
# copy donated parameters. For small models the second update costs more than this saves
# (benchmarks/results/metrics.json).
_LARGE = 4_000_000


def recorded(
    update: Callable[[Any], tuple[Any, Any]],
    record: Callable[[Any], Metrics],
    last: Metrics,
    gradient: Any,
    taken: jax.Array,
    every: int | np.integer[Any] | jax.Array,
) -> tuple[Any, Any, Metrics]:
    """Makes a step of an optimizer, and records its metrics if a record is due.

    Args:
      update: a function of the gradient that returns (updates, state).
      record: a function of the updates that returns the metrics.
      last: metrics of the last record.
      gradient: the argument of `update`.
      taken: number of steps before this one.
      every: number of steps between records.

    Returns:
      Updates, state, and the new metrics, or `last` if no record is due.
    """
    always = isinstance(every, int) and every == 1
    if always or sum(map(jnp.size, jax.tree.leaves(gradient))) < _LARGE:
        updates, state = update(gradient)
        return updates, state, either(taken, every, lambda: record(updates), last, gradient)
    metrics = either(taken, every, lambda: record(update(gradient)[0]), last, gradient)
    # The step is made to depend on the metrics. XLA then reads donated parameters for the metrics before the step
    # overwrites them, and need not copy the parameters.
    updates, state = update(recomputed_after(metrics, gradient))
    return updates, state, metrics


def either(
    taken: jax.Array, every: int | np.integer[Any] | jax.Array, record: Callable[[], Metrics], last: Metrics,
    measured: Any,
) -> Metrics:
    """Returns `record()` if a record is due, else `last`, replicated over the mesh of the tree `measured`."""
    sharding = layout(measured)

    def made() -> Metrics:
        metrics = record()
        if apart := structures_apart(last, metrics):
            raise binding_error(
                "measure", "a state of other gauges, axes or leaves", *apart,
                "start anew, state = tx.init(params), or give what the state was made with")
        return metrics

    if isinstance(every, int) and every == 1:
        return sharding.replicated(made())
    # Both branches must return arrays of one sharding and of one dtype.
    kept = in_dtypes_of_state(last, last)

    def due() -> Metrics:
        return in_dtypes_of_state(kept, made())

    return cond(taken % every == 0, lambda: sharding.replicated(due()), lambda: sharding.replicated(kept))
