"""Retraction: the last link of a chain, after which the weights are on their slice again.

Here: the link. Not here: the way back (`slice.fix`). References: DDC B.7; docs/design.md §3.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import gauge_optax.slice as slices
from gauge_optax.binding import is_empty
from gauge_optax.checks import require_params, require_values
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.meshes import layout, opened
from gauge_optax.transforms._common import in_dtype_of


class GaugeRetractState(NamedTuple):
    """State of `gauge_retract`.

    Attributes:
      gauges: the frame that was read at `init`.
    """

    gauges: Any


def gauge_retract(gauges: Gauges) -> optax.GradientTransformationExtraArgs:
    """Turns a scaled tangent into the step that ends on the slice of the starting point, where coordinates stand still.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.

    Returns:
      A transformation of updates (tangents) into differences of parameters, last in a chain; leaves that no gauge
      binds pass unchanged.

    Raises:
      ValueError: bindings that do not fit; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((1, 1)), "down": jnp.ones((1, 1))}
    >>> tx = go.gauge_retract(gauge)
    >>> step, _ = tx.update({"up": jnp.full((1, 1), 0.21), "down": jnp.zeros((1, 1))}, tx.init(params), params)
    >>> [round(float(x[0, 0]), 4) for x in (step["up"], step["down"])]  # the anchor keeps its size
    [0.0, 0.21]

    Reference: DDC B.7. Deviation: the reference moves each gauge on its own and lets rounding walk.
    """
    group = product(gauges)

    def init_fn(params: optax.Params) -> GaugeRetractState:
        if is_empty(params):
            return GaugeRetractState(jnp.zeros(()))
        require_values("gauge_retract", params)
        return GaugeRetractState(layout(params).run(lambda p: slices.read(slices.chart(group, p), p), params))

    def update_fn(
        updates: optax.Updates, state: GaugeRetractState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, GaugeRetractState]:
        del extra
        require_params("gauge_retract", params)
        on = slices.chart(group, params)
        out = slices.motions(on, state.gauges)
        point = slices.enter(out, on.joint.values(params))
        tangent = slices.enter_tangent(on, state.gauges, on.joint.vectors(updates))
        fixed, _ = slices.fix(on, state.gauges, slices.added(point, tangent))
        return in_dtype_of(updates, slices.leave(out, slices.between(point, fixed))), state

    return opened(optax.GradientTransformationExtraArgs(init_fn, update_fn))
