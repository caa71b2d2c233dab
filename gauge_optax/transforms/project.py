"""Projection onto the horizontal space of a product of gauges, of gradients or of updates.

The gradient of an invariant loss is horizontal already; what the projection removes there is rounding, which an
adaptive step would blow up. In the frame, the vertical part of a cotangent is taken with the same formulas as a
tangent's; the two differ in how they enter and leave it (DESIGN §1). Reference: DDC B.1–B.9; the joint projection is
ours.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import is_empty
from gauge_optax.gauges import _frame, _split
from gauge_optax.gauges._basis import HeadBasis, grouped, stacked_gram
from gauge_optax.gauges._components import Component, after, collect_frame, collect_heads, components
from gauge_optax.gauges._frame import FrameState
from gauge_optax.gauges._system import Squares
from gauge_optax.gauges._tally import overlap_of
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.transforms._common import in_dtype_of, placeholder, require_choice, require_params
from gauge_optax.transforms._heads import LIVE, horizontal, in_turn, init_bases, refreshed
from gauge_optax.transforms._here import gated

Arrays = dict[str, jax.Array]

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
        bound, old = group.bound(params), state.gauges
        parts, vectors = components(bound), bound.vectors(updates)
        points = _points(parts, params, old.frame)
        grams = collect_heads(parts, [grams for _, _, grams in points])
        bases = in_turn(lambda gram, old: refreshed(old, gram, LIVE, _DRIFT, None)[0], grams, old.bases)
        one = jnp.ones(())
        out: Arrays = {}
        for part, (frame, squares, own) in zip(parts, points, strict=True):
            vector = {p: vectors[p] for p in part.bound.offset}
            out |= _horizontal(part, params, frame, squares, own, part.of_heads(bases), vector, kind, one)
            one = after({p: out[p] for p in part.bound.offset})
        frame = collect_frame(parts, [frame for frame, _, _ in points])
        return in_dtype_of(updates, out), GaugeProjectState(ProjectFrame(frame, bases))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _points(
    parts: Sequence[Component], params: optax.Params, frame: FrameState
) -> list[tuple[FrameState, Squares, tuple[jax.Array, ...]]]:
    """Per component the frame at `params`, sums of squares in it, and Gram matrices of its heads."""
    one, found = jnp.ones(()), []
    for part in parts:
        system = part.bound.system
        own, values = gated(one, part.bound, part.of_frame(frame), part.bound.values(params))
        values = part.bound.centre(values)
        own = _frame.track(system, values, own)
        hat = _split.at(part.bound, values, own.f).hat
        grams = tuple(stacked_gram(g, hat, hat) for g in grouped(part.bound.heads))
        found.append((own, system.squares(hat), grams))
        one = after(found[-1])
    return found


def _horizontal(
    part: Component,
    params: optax.Params,
    frame: FrameState,
    squares: Squares,
    grams: tuple[jax.Array, ...],
    bases: tuple[HeadBasis, ...],
    vector: Arrays,
    kind: str,
    one: jax.Array,
) -> Arrays:
    """The horizontal part of one component's vector."""
    bound = part.bound
    frame, values = gated(one, bound, frame, bound.values(params))
    point = _split.at(bound, bound.centre(values), frame.f)
    enter, leave = (
        (point.cotangent_in, point.cotangent_out) if kind == "gradient" else (point.tangent_in, point.tangent_out)
    )
    framed = bound.centre(enter(vector))
    framed, _ = horizontal(bound, point.hat, framed, bases, grams)
    rates = _split.vertical_rates(overlap_of(bound.system, point.hat, squares), bound.system.dots(point.hat, framed))
    along = bound.system.exponents(rates)
    return leave({p: x - point.hat[p] * along[p] if p in along else x for p, x in framed.items()})
