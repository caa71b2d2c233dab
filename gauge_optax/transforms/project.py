"""Projection onto the horizontal space of a product of gauges, of gradients or of updates.

The gradient of an invariant loss is horizontal already; what the projection removes there is rounding, which an
adaptive step would blow up. In the frame, the vertical part of a cotangent is taken with the same formulas as a
tangent's; the two differ in how they enter and leave it (DESIGN §1). Reference: DDC B.1–B.9; the joint projection is
ours.
"""

from typing import Any, NamedTuple

import optax

from gauge_optax.binding import is_empty
from gauge_optax.gauges import _frame, _split
from gauge_optax.gauges._basis import HeadBasis, grouped, stacked_gram
from gauge_optax.gauges._frame import FrameState
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.transforms._common import in_dtype_of, placeholder, require_choice, require_params
from gauge_optax.transforms._heads import LIVE, horizontal, init_bases, refreshed

_DRIFT = 0.1


class ProjectFrame(NamedTuple):
    """What a projection remembers of the gauges.

    Attributes:
      frame: the last rescale frame, the start of the next one's rounds.
      bases: eigenbases of the heads' Gram matrices, in which the Lyapunov equations are solved.
    """

    frame: FrameState
    bases: tuple[HeadBasis, ...]


class GaugeProjectState(NamedTuple):
    """State of `gauge_project`.

    Attributes:
      gauges: a `ProjectFrame`, size of the gauge coordinates and not of the parameters.
    """

    gauges: Any


def gauge_project(gauges: Gauges, kind: str = "gradient") -> optax.GradientTransformationExtraArgs:
    """Keeps the horizontal part of what comes in.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.
      kind: "gradient" for cotangents (gradients, averages of gradients), "update" for tangents.

    Returns:
      A transformation; leaves that no gauge binds pass unchanged.

    Raises:
      ValueError: another `kind`; bindings that do not fit; `update` without params.

    >>> shift = go.logit_shift({"w": "_ vocab"})
    >>> params, grads = {"w": jnp.ones((1, 2))}, {"w": jnp.array([[1.0, 3.0]])}
    >>> tx = go.gauge_project(shift)
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> updates["w"].tolist()
    [[-1.0, 1.0]]

    Reference: DDC Eq. (1), the projectors. Deviation: all gauges of the list are projected jointly, in the frame
      metric.
    """
    require_choice("gauge_project", "kind", kind, ("gradient", "update"))
    group = product(gauges)

    def init_fn(params: optax.Params) -> GaugeProjectState:
        if is_empty(params):
            return GaugeProjectState(placeholder())
        bound = group.bound(params)
        centred = bound.centre(bound.values(params))
        frame = _frame.init_frame(bound.system, centred)
        return GaugeProjectState(ProjectFrame(frame, init_bases(bound, _split.at(bound, centred, frame.f).hat)))

    def update_fn(
        updates: optax.Updates,
        state: GaugeProjectState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, GaugeProjectState]:
        del extra
        require_params("gauge_project", params)
        bound = group.bound(params)
        values = bound.centre(bound.values(params))
        frame = _frame.track(bound.system, values, state.gauges.frame)
        point = _split.at(bound, values, frame.f)
        grams = [stacked_gram(g, point.hat, point.hat) for g in grouped(bound.heads)]
        bases = tuple(refreshed(b, m, LIVE, _DRIFT, None)[0] for b, m in zip(state.gauges.bases, grams, strict=True))
        enter, leave = (
            (point.cotangent_in, point.cotangent_out) if kind == "gradient" else (point.tangent_in, point.tangent_out)
        )
        framed = bound.centre(enter(bound.vectors(updates)))
        framed, _ = horizontal(bound, point.hat, framed, bases, grams)
        along = bound.system.exponents(_split.scale_coordinates(bound.system, point.hat, framed))
        framed = {p: x - point.hat[p] * along[p] if p in along else x for p, x in framed.items()}
        return in_dtype_of(updates, leave(framed)), GaugeProjectState(ProjectFrame(frame, bases))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
