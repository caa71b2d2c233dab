"""Projection onto the horizontal space of a product of gauges, of gradients or of updates.

The gradient of an invariant loss is horizontal already; what the projection removes there is rounding, which an
adaptive step would blow up. In the frame, the vertical part of a cotangent is taken with the same formulas as a
tangent's; the two differ in how they enter and leave it (DESIGN §1). Reference: DDC B.1–B.9; the joint projection is
ours.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax._sequence import after, in_turn
from gauge_optax.binding import is_empty, leaves_by_path
from gauge_optax.gauges import _frame, _split
from gauge_optax.gauges._basis import HeadBasis, grouped, stacked_gram
from gauge_optax.gauges._components import Component, collect_frame, collect_heads, components
from gauge_optax.gauges._frame import FrameState
from gauge_optax.gauges._scale import Values
from gauge_optax.gauges._split import Bound, Point
from gauge_optax.gauges._system import Squares
from gauge_optax.gauges._tally import overlap_of
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.transforms._common import in_dtype_of, placeholder, require_choice, require_params
from gauge_optax.transforms._heads import LIVE, horizontal, init_bases, refreshed
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
      gauges: a `ProjectFrame`, size of the gauge coordinates and not of the parameters; () with linear gauges, whose
        frame is solved for at every step.
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
        if bound.linear:
            return GaugeProjectState(())
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
        if bound.linear:
            return in_dtype_of(updates, _exactly_horizontal(bound, params, updates, kind)), state
        parts, vectors = components(bound), bound.vectors(updates)
        leaves = leaves_by_path(params)
        points = _points(parts, leaves, old.frame)
        grams = collect_heads(parts, [grams for _, _, grams in points])
        bases = in_turn(lambda gram, old: refreshed(old, gram, LIVE, _DRIFT, None)[0], grams, old.bases)
        one = jnp.ones(())
        out: Arrays = {}
        for part, (frame, squares, own) in zip(parts, points, strict=True):
            own_vector = part.numbered(vectors)
            own_params = part.numbered(leaves)
            kept, one = _horizontal(
                part.form, kind, one, own_params, frame, squares, own, part.of_heads(bases), own_vector
            )
            out |= part.by_path(kept)
        frame = collect_frame(parts, [frame for frame, _, _ in points])
        return in_dtype_of(updates, out), GaugeProjectState(ProjectFrame(frame, bases))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _exactly_horizontal(bound: Bound, params: optax.Params, vector: optax.Updates, kind: str) -> Arrays:
    """With linear gauges among the rest: by a frame solved for anew, and eigendecompositions at every step."""
    point = _split.at(bound, bound.values(params))
    enter, leave = _ways(point, kind)
    framed = enter(bound.vectors(vector))
    along = _split.lift(bound, point, _split.vertical_coordinates(bound, point, framed))
    return leave({path: x - along[path] for path, x in framed.items()})


def _ways(point: Point, kind: str) -> tuple[Callable[[Values], Arrays], Callable[[Values], Arrays]]:
    """Into the frame and out of it."""
    if kind == "gradient":
        return point.cotangent_in, point.cotangent_out
    return point.tangent_in, point.tangent_out


def _points(
    parts: Sequence[Component], leaves: Mapping[str, jax.Array], frame: FrameState
) -> list[tuple[FrameState, Squares, tuple[jax.Array, ...]]]:
    """Per component the frame at the parameters, sums of squares in it, and Gram matrices of its heads."""
    one, found = jnp.ones(()), []
    for part in parts:
        *own, one = _point(part.form, one, part.numbered(leaves), part.of_frame(frame))
        found.append(tuple(own))
    return found


@functools.partial(jax.jit, static_argnums=0)
def _point(
    form: Bound, one: jax.Array, params: Arrays, frame: FrameState
) -> tuple[FrameState, Squares, tuple[jax.Array, ...], jax.Array]:
    frame, values = gated(one, form, frame, form.values(params))
    values = form.centre(values)
    frame = _frame.track(form.system, values, frame)
    hat = _split.at(form, values, frame.f).hat
    found = frame, form.system.squares(hat), tuple(stacked_gram(g, hat, hat) for g in grouped(form.heads))
    return *found, after(found)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _horizontal(
    form: Bound,
    kind: str,
    one: jax.Array,
    params: Arrays,
    frame: FrameState,
    squares: Squares,
    grams: tuple[jax.Array, ...],
    bases: tuple[HeadBasis, ...],
    vector: Arrays,
) -> tuple[Arrays, jax.Array]:
    """The horizontal part of one component's vector, and `one` for the next."""
    frame, values = gated(one, form, frame, form.values(params))
    point = _split.at(form, form.centre(values), frame.f)
    enter, leave = _ways(point, kind)
    framed = form.centre(enter(vector))
    framed, _ = horizontal(form, point.hat, framed, bases, grams)
    rates = _split.vertical_rates(overlap_of(form.system, point.hat, squares), form.system.dots(point.hat, framed))
    along = form.system.exponents(rates)
    kept = leave({p: x - point.hat[p] * along[p] if p in along else x for p, x in framed.items()})
    return kept, after(kept)
