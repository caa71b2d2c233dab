"""Retraction: a scaled tangent Δ becomes a step θ_new − θ that keeps the gauge coordinate.

Along the joint scale s = ρ_up^p·ρ_down of a channel the step is multiplicative: s becomes s·(1 + a) exactly, a the
relative radial part of Δ ("linear", in which no step more than halves s or takes it below its floor; s·e^a for "log").
Then the group acts with exp(f_ref − f(θ + Δ)), which undoes what curvature and rounding moved along the orbit, and
shifts get their mean back. Rotations need nothing. Rounding does not accumulate, because f_ref is stored and never
recomputed. References: DDC B.4, B.7; DESIGN §5.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax._sequence import after
from gauge_optax.binding import is_empty
from gauge_optax.gauges import _frame, _split
from gauge_optax.gauges._components import Component, collect_frame, components
from gauge_optax.gauges._frame import FrameState
from gauge_optax.gauges._scale import Values
from gauge_optax.gauges._shift import mean_slice, own_slice
from gauge_optax.gauges._split import Bound, Point
from gauge_optax.gauges._system import Channels, ScaleSystem, Sides, Squares
from gauge_optax.gauges._tally import Tally, tally
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.linalg import real_dtype
from gauge_optax.transforms._common import (
    bound_without_linear,
    in_dtype_of,
    placeholder,
    require_choice,
    require_params,
)

Arrays = dict[str, jax.Array]

_MAX_LOG_STEP = math.log(2.0)
VERTICAL = ("frozen", "sgd", "adam")
RADIAL = ("linear", "log")


class Reference(NamedTuple):
    """The gauge coordinate that the retraction restores.

    Attributes:
      frame: log-scales per channel, and which channels have one.
      shifts: leaf path → mean along vocab, in the frame.
    """

    frame: FrameState
    shifts: dict[str, jax.Array]


class Sight(NamedTuple):
    """What the retraction of a component needs to know of θ and Δ.

    Attributes:
      values: θ per leaf.
      point: θ in a frame, which need not be the reference.
      squares: sums of squares of every channel's sides in it.
      dots: ⟨θ̂, Δ̂⟩ per side.
    """

    values: Values
    point: Point
    squares: Squares
    dots: Sides


class GaugeRetractState(NamedTuple):
    """State of `gauge_retract`.

    Attributes:
      gauges: a `Reference`.
    """

    gauges: Any


def gauge_retract(
    gauges: Gauges,
    radial: str = "linear",
    vertical: str = "frozen",
) -> optax.GradientTransformationExtraArgs:
    """Turns the scaled tangent into θ_new − θ, multiplicatively along scales, and restores the gauge coordinate.

    Last in a chain, after the learning rate.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.
      radial: "linear" moves s to s·(1 + a), "log" to s·e^a.
      vertical: "frozen" keeps the coordinate; with "sgd" or "adam" it moves by the vertical part that comes in.

    Returns:
      A transformation of updates (tangents) into differences of parameters (chords); leaves that no gauge binds pass
      unchanged.

    Raises:
      ValueError: another `radial` or `vertical`; bindings that do not fit; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((1, 1)), "down": jnp.ones((1, 1))}
    >>> tx = go.gauge_retract(gauge)
    >>> step, _ = tx.update({"up": jnp.full((1, 1), 0.21), "down": jnp.zeros((1, 1))}, tx.init(params), params)
    >>> [round(float(x[0, 0]), 4) for x in (step["up"], step["down"])]  # s: 1 → 1.21, split evenly
    [0.1, 0.1]

    Reference: DDC B.7. Deviation: the reference moves each gauge on its own and lets rounding walk.
    """
    require_choice("gauge_retract", "radial", radial, RADIAL)
    require_choice("gauge_retract", "vertical", vertical, VERTICAL)
    group, chosen = product(gauges), (radial, vertical)

    def init_fn(params: optax.Params) -> GaugeRetractState:
        if is_empty(params):
            return GaugeRetractState(placeholder())
        return GaugeRetractState(init_reference(bound_without_linear("gauge_retract", group, params), params))

    def update_fn(
        updates: optax.Updates,
        state: GaugeRetractState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, GaugeRetractState]:
        del extra
        require_params("gauge_retract", params)
        bound = group.bound(params)
        values, tangent, reference = bound.values(params), bound.vectors(updates), state.gauges
        parts, one, found = components(bound), jnp.ones(()), []
        out: Arrays = {}
        for part in parts:
            own = part.numbered(values), part.numbered(tangent)
            step, new, one = _component(part.form, chosen, one, *own, part_of(part, reference))
            out |= part.by_path(step)
            found.append(new)
        return in_dtype_of(updates, out), GaugeRetractState(collected(parts, found))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _component(
    form: Bound, chosen: tuple[str, str], one: jax.Array, values: Arrays, tangent: Arrays, reference: Reference
) -> tuple[Arrays, Reference, jax.Array]:
    # Gated by what comes in: θ + Δ of all components would be made at once otherwise.
    delta = {p: one * x for p, x in tangent.items()}
    reference = _when(reference, one)
    step, new = retracted(form, _seen(form, values, delta, reference.frame), delta, reference, chosen)
    return step, new, after(step)


def retracted(
    bound: Bound, sight: Sight, tangent: Arrays, reference: Reference, chosen: tuple[str, str]
) -> tuple[Arrays, Reference]:
    """The step of one component, and its reference after it.

    Args:
      bound: the component.
      sight: what is known of θ and Δ.
      tangent: Δ per leaf of the component.
      reference: of the component.
      chosen: `radial` and `vertical`.

    Returns:
      θ_new − θ per leaf, and the component's part of the new reference.
    """
    radial, vertical = chosen
    if vertical != "frozen":
        reference = _moved(bound, sight.point, sight.point.tangent_in(tangent), reference)
    moved, frame = _step(bound, sight, tangent, reference.frame, radial)
    moved = bound.add_shifts(moved, _scaled_shifts(bound, reference.shifts, reference.frame.f))
    # Anchoring changes the frame, not the weights: a mean keeps its value there, and so not in the frame.
    anchored = tuple(old - new for old, new in zip(reference.frame.f, frame.f, strict=True))
    shifts = _scaled_shifts(bound, reference.shifts, anchored)
    still = bound.turned - set(bound.system.terms) - set(shifts)
    step = {p: tangent[p] if p in still else moved[p] - sight.values[p] for p in bound.offset}
    return step, Reference(frame, shifts)


def part_of(part: Component, whole: Reference) -> Reference:
    """A component's part of the reference, leaves by their names in its form."""
    return Reference(part.of_frame(whole.frame), part.numbered(whole.shifts))


def _when(reference: Reference, one: jax.Array) -> Reference:
    """The reference once `one` is known."""
    frame = reference.frame
    return reference._replace(frame=frame._replace(f=tuple(one * f for f in frame.f)))


def _seen(bound: Bound, values: Arrays, tangent: Arrays, frame: FrameState) -> Sight:
    point = _split.at(bound, values, frame.f)
    dots = bound.system.dots(point.hat, point.tangent_in(tangent))
    return Sight(values, point, bound.system.squares(point.hat), dots)


def collected(parts: Sequence[Component], found: Sequence[Reference]) -> Reference:
    """The reference of the product from its components'."""
    shifts = {p: x for part, new in zip(parts, found, strict=True) for p, x in part.by_path(new.shifts).items()}
    return Reference(collect_frame(parts, [new.frame for new in found]), shifts)


def init_reference(bound: Bound, params: optax.Params, frame: FrameState | None = None) -> Reference:
    """The gauge coordinate of a starting point, in its own frame or in one that was found already."""
    values = bound.values(params)
    if frame is None:
        frame = _frame.init_frame(bound.system, bound.centre(values))
    frame = jax.tree.map(jnp.copy, frame)  # one buffer in two state fields cannot be donated
    return Reference(frame, bound.shift_means(_split.at(bound, values, frame.f).tangent_in(values)))


def _scaled_shifts(bound: Bound, shifts: Arrays, channels: Channels) -> Arrays:
    """Slices of shifted leaves multiplied by e^(w·channels)."""
    factors, scaled = bound.system.factors(channels), dict(shifts)
    for block in bound.shift_blocks:
        if block.path in factors:
            factor = mean_slice(block, jnp.broadcast_to(factors[block.path], block.shape))
            own = own_slice(block, shifts[block.path])
            scaled[block.path] = scaled[block.path] + own * (factor - 1.0)
    return scaled


def _moved(bound: Bound, point: Point, framed: Arrays, reference: Reference) -> Reference:
    """The reference carried along by the vertical part of the incoming tangent."""
    rates = _split.scale_coordinates(bound.system, point.hat, bound.centre(framed))
    means = bound.shift_means(framed)
    f = tuple(a + b for a, b in zip(reference.frame.f, rates, strict=True))
    return Reference(reference.frame._replace(f=f), {p: m + means[p] for p, m in reference.shifts.items()})


def _step(
    bound: Bound, sight: Sight, tangent: Arrays, target: FrameState, radial: str
) -> tuple[Arrays, FrameState]:
    """θ + Δ, centred, with its scales set and its frame brought to `target`; and the frame after it."""
    system, point = bound.system, sight.point
    wanted, spared = _radial_parts(system, sight.squares, sight.dots, target, radial)
    # In the sum, not after it: θ + Δ of a channel that is asked to vanish has no direction left to be scaled.
    spread = system.spread(spared)
    kept = {p: x + x * spread[p] if p in spread else x for p, x in sight.values.items()}
    after = bound.centre({p: x + tangent[p] for p, x in kept.items()})
    # Everything below is a factor close to 1 on θ + Δ, so that no rounding of e^(±w·f) enters the weights.
    start = tally(system, point.tangent_in(after))
    now, stretch = _stretched(start, sight.squares, wanted, target)
    rho = _frame.norms(system, now.all())
    alive, held = _frame.alive_channels(system, target, rho), _frame.held_channels(system, target, rho)
    away = _frame.follow(now, held)
    anchor = _anchor_if_fresh(now, away, alive, target)
    # Only channels whose f is known and kept: others have none to be brought back to, or stand in another frame.
    back = tuple(
        jnp.where(s & h, t - f - a, 0.0)
        for t, f, s, h, a in zip(target.f, point.channels, target.settled, held, away, strict=True)
    )
    grown = system.side_factors(
        [(b + x, -i.degree * b + x) for i, b, x in zip(system.instances, back, stretch, strict=True)]
    )
    f = tuple(
        jnp.where(a & ~s, here + c, t)
        for a, s, t, here, c in zip(alive, target.settled, target.f, point.channels, anchor, strict=True)
    )
    settled = tuple(s | a for s, a in zip(target.settled, alive, strict=True))
    return _split.times(after, grown), target._replace(f=f, settled=settled)


def _anchor_if_fresh(now: Tally, away: Channels, alive: tuple[jax.Array, ...], target: FrameState) -> Channels:
    """Displacements from the old frame, of channels that came alive for the first time balanced to the end."""
    fresh = tuple(a & ~s for a, s in zip(alive, target.settled, strict=True))
    if not fresh:
        return away
    anybody = jnp.any(jnp.stack([jnp.any(x) for x in fresh]))

    def anchored() -> Channels:
        there = now
        for index, x in enumerate(away):
            there = there.framed(index, x)
        return tuple(a + b for a, b in zip(away, _frame.anchor(there, fresh), strict=True))

    return jax.lax.cond(anybody, anchored, lambda: away)


def _radial_parts(
    system: ScaleSystem, before: Squares, dots: Sides, target: FrameState, radial: str
) -> tuple[Channels, Sides]:
    """What the joint scales of all channels are to become.

    A linear step can ask for more than all of s. It at most halves s, and takes it no lower than its floor: below, the
    slope of the loss in s is nothing beside its own past, and a channel stays for good. On the demo model at learning
    rate 1e-2, one seed, 47 of 704 channels did; 7 when a hundredth a step was let through below the floor, 1 when only
    requests that small were; none now. So decay stops at the floor too.

    Args:
      system: the scale instances.
      before: sums of squares of θ̂.
      dots: ⟨θ̂, Δ̂⟩.
      target: the reference frame, with its floors.
      radial: "linear" or "log".

    Returns:
      log of new over old scale; and the multiples of both sides to be added to Δ where it asks for less than that.
    """
    rho = _frame.norms(system, before)
    alive = _frame.alive_channels(system, target, rho)
    wanted: list[jax.Array] = []
    spared: list[tuple[jax.Array, jax.Array]] = []
    for k, instance in enumerate(system.instances):
        if not instance.down:
            none = jnp.zeros(instance.shape, real_dtype())
            wanted, spared = [*wanted, none], [*spared, (none, none)]
            continue
        p = instance.degree
        up, down = (d / jnp.where(alive[k], q, 1.0) for d, q in zip(dots[k], before[k], strict=True))
        asked, scale = p * up + down, jnp.where(alive[k], rho[k][0] ** p * rho[k][1], 1.0)
        allowed = asked
        if radial == "linear":
            allowed = jnp.maximum(asked, jnp.clip(target.floor_scale[k] / scale, 0.5, 1.0) - 1.0)
        each, short = allowed / (p + 1.0), alive[k] & (asked < allowed)
        spared.append((jnp.where(short, each - up, 0.0), jnp.where(short, each - down, 0.0)))
        wanted.append(allowed if radial == "log" else jnp.log1p(allowed))
    return tuple(wanted), spared


def _stretched(start: Tally, before: Squares, wanted: Channels, target: FrameState) -> tuple[Tally, Channels]:
    """Both sides of every channel multiplied so that its joint scale becomes what is wanted.

    Args:
      start: sums of squares of θ + Δ in the frame of θ.
      before: sums of squares of θ̂.
      wanted: log of new over old scale.
      target: the reference frame, with its floors.

    Returns:
      The sums after that, and the log factors.
    """
    system, stretches = start.system, []
    alive = _frame.alive_channels(system, target, _frame.norms(system, before))
    for k, instance in enumerate(system.instances):
        if not instance.down:
            stretches.append(jnp.zeros(instance.shape, real_dtype()))
            continue
        p, now = instance.degree, start.of(k)
        grown = sum(
            0.5 * w * jnp.log(jnp.where(alive[k], a, 1.0) / jnp.where(alive[k], b, 1.0))
            for w, a, b in zip((p, 1.0), now, before[k], strict=True)
        )
        step = jnp.clip(wanted[k] - grown, -_MAX_LOG_STEP, _MAX_LOG_STEP) / (p + 1.0)
        stretches.append(jnp.where(alive[k], step, 0.0))
        start = start.grown(k, stretches[k], stretches[k])
    return start, tuple(stretches)
