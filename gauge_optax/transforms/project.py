"""Projection across the orbits of a product of gauges, of gradients or of updates.

The gradient of an invariant loss has no part along an orbit; what the projection removes there is rounding, or the
gradient of a penalty that sees coordinates.

Here: the link of a chain. Not here: the projector (`gauges.chart.split`). Reference: DDC B.1.
"""

from typing import Any

import optax

from gauge_optax.binding import is_empty
from gauge_optax.checks import require_choice, require_params
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.chart import split
from gauge_optax.gauges.product import product
from gauge_optax.meshes import opened
from gauge_optax.transforms._common import in_dtype_of


def gauge_project(gauges: Gauges, kind: str = "gradient") -> optax.GradientTransformationExtraArgs:
    """Keeps the horizontal part of what comes in.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.
      kind: "gradient" for cotangents (gradients, averages of gradients), "update" for tangents.

    Returns:
      A transformation without state; leaves that no gauge binds pass unchanged.

    Raises:
      ValueError: another `kind`; bindings that do not fit; `update` without params.

    >>> shift = go.logit_shift({"w": "_ vocab"})
    >>> params, grads = {"w": jnp.ones((1, 2))}, {"w": jnp.array([[1.0, 3.0]])}
    >>> tx = go.gauge_project(shift)
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> updates["w"].tolist()
    [[-1.0, 1.0]]

    Reference: DDC Eq. (1), the projectors. Deviation: all gauges of the list at once; along scales and shifts the
      projection is that of the anchors (docs/design.md §2), for gradients its adjoint.
    """
    require_choice("gauge_project", "kind", kind, ("gradient", "update"))
    group = product(gauges)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        if not is_empty(params):
            group.chart(params)
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del extra
        require_params("gauge_project", params)
        found = split(group.chart(params), params, updates, dual=kind == "gradient")
        return in_dtype_of(updates, found), state

    return opened(optax.GradientTransformationExtraArgs(init_fn, update_fn))
