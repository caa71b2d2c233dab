"""Leakage along a trajectory: a measure at every point, and the drift that its rates predict.

Here: stacking and summing. Not here: what is measured at a point (`leakage`, `second_order`), the drift itself
(`motion`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import binding_error
from gauge_optax.gauges.base import Element


def leakage_along(measure: Callable[..., Any], trajectory: Iterable[Sequence[Any]]) -> Any:
    """A measure at every point of a trajectory, stacked along a first axis.

    Args:
      measure: what to take, called as `measure(*point)`; worth a `jax.jit`.
      trajectory: points, for `rescale_leakage` with its gauge filled in (params, gradient, preconditioner).

    Returns:
      What `measure` returns, every array with a first axis over points.

    Raises:
      ValueError: a trajectory without points.

    >>> gauge = go.rescale({"up": "_ _"}, {"down": "_ _"})
    >>> points = [({"up": jnp.full((1, 1), x), "down": jnp.ones((1, 1))},) * 2 for x in (1.0, 2.0)]
    >>> measure = jax.jit(lambda params, step: go.measure.step_leakage(gauge, params, step))
    >>> go.measure.leakage_along(measure, points).measured[""].tolist()
    [0.0, 3.0]

    Reference: DDC Remarks 8 and 12.
    """
    found = [measure(*point) for point in trajectory]
    if not found:
        raise binding_error(
            "leakage_along",
            "an empty trajectory",
            "no points",
            "at least one tuple of what the measure takes",
            "collect points while training; an iterator can be read once only",
        )
    return jax.tree.map(lambda *x: jnp.stack(x), *found)


def predicted_drift(rates: Element, learning_rate: float | jax.Array) -> Element:
    """The motion along the orbits that leakage predicts: −Σ lr·rate, after every step.

    Args:
      rates: the field `rate`, with a first axis over steps, as from `leakage_along`.
      learning_rate: one number, or one per step.

    Returns:
      The structure of `rates`: running sums; of rotations, to set beside those of `vertical_motion`.

    >>> go.measure.predicted_drift({"": jnp.array([1.0, 2.0, -1.0])}, 0.5)[""].tolist()
    [-0.5, -1.5, -1.0]

    Reference: DDC Remark 8, whose error is of second order in lr per step (`second_order_leakage`).
    """

    def accumulated(rate: jax.Array) -> jax.Array:
        sizes = jnp.broadcast_to(jnp.asarray(learning_rate, rate.dtype), rate.shape[:1])
        return -jnp.cumsum(sizes.reshape(-1, *[1] * (rate.ndim - 1)) * rate, axis=0)

    return jax.tree.map(accumulated, rates)
