"""`rest="balanced"`: `quotient` stores the weights in which both sides of a scale share the growth of a step.

A scale gauge multiplies `up` by α and `down` by α⁻ᵖ, where p is its degree, and `up` is its anchor. Many weights
compute the function that a step leads to. Any of them may be stored, because neither the outputs nor the steps of the
inner optimizer depend on the choice. With `rest="anchor"`, ‖up‖ stays constant: if a step would double `up`, `down` is
doubled in its place (p = 1). With `rest="balanced"`, log ‖up‖ − p·log ‖down‖ stays constant, so that such a step
multiplies both sides by √2. The figures of *Dead-Direction Conditioners* measure drift in this coordinate. After each
step the wrapper here moves the stored weights along the orbit and changes the frame by the same element. The slice
point stays the same, and with it what the inner optimizer sees.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.errors import binding_error
from gauge_optax.gauges.bound import bound
from gauge_optax.gauges.gauge import Product
from gauge_optax.parts.part import Arrays, Part
from gauge_optax.parts.sizes import Factor
from gauge_optax.slice import Elements, Slice
from gauge_optax.transformation import (
    GaugeTransformation,
    cast_like,
    layout,
    placeholder,
    require_choice,
    transformation,
)

RESTS = ("anchor", "balanced")


class RestedState(NamedTuple):
    """State of `quotient` with `rest="balanced"`.

    Attributes:
      quotient: the state of `quotient`; here its frame changes with every step.
      held: label of a scale with two sides → log ‖up‖ − p·log ‖down‖ of the stored weights per channel, which stays
        constant. It is infinite for a channel one of whose sides has been zero at every step so far.
    """

    quotient: Any
    held: Any


@functools.singledispatch
def log_ratio(part: Part[Any], x: Arrays) -> jax.Array | None:
    """log ‖up‖ − p·log ‖down‖ per channel of a scale with two sides, infinite if a side is zero; None for other parts.
    """
    return None


@log_ratio.register
def _of_factor(part: Factor, x: Arrays) -> jax.Array | None:
    if not part.down:
        return None
    zero = jnp.zeros(part.shape)
    up, down = (sum((b.total(part.named, jnp.square(x[b.path])) for b in side), zero) for side in (part.up, part.down))
    alive = (up > 0) & (down > 0)
    logs = [jnp.log(jnp.where(alive, y, 1.0)) for y in (up, down)]
    return jnp.where(alive, 0.5 * (logs[0] - part.degree * logs[1]), jnp.inf)


def held_ratios(s: Slice, f: Elements, x: Arrays) -> dict[str, jax.Array]:
    """Returns label → log ‖up‖ − p·log ‖down‖ per channel of the stored weights f·x, for scales with two sides.

    Args:
      s: the slice.
      f: elements of the frame.
      x: the slice point.
    """
    ratios = ((part, log_ratio(part, x)) for part, _, _ in s.sizes)
    return {p.label: r + share(p) * jnp.log(jnp.abs(f[p.label])) for p, r in ratios if r is not None}


def _rounds_growth(part: Any, params: Any) -> bool:
    """Whether the anchor is stored less precisely than `down`. Rounding would then remove the anchor's share of growth.
    """
    leaves = leaves_by_path(params)
    bits = [jnp.finfo(jnp.result_type(leaves[b.path])).nmant for b in (*part.anchors[0], *part.down)]
    return min(bits[len(part.anchors[0]) :]) > min(bits[: len(part.anchors[0])])


def share(part: Any) -> float:
    """The amount by which log ‖up‖ − p·log ‖down‖ grows if log α grows by 1."""
    return 1.0 + float(part.degree) ** 2


def resting(name: str, tx: GaugeTransformation, group: Product, rest: str) -> GaugeTransformation:
    """Returns a `quotient` unchanged for `rest="anchor"`; for "balanced", wrapped so that both sides share growth.

    Args:
      name: name of the public function, for messages.
      tx: the quotient.
      group: its gauges.
      rest: "anchor" or "balanced".

    Raises:
      ValueError: an unknown `rest`; with "balanced", `update` with a state that "anchor" made.
    """
    require_choice(name, "rest", rest, RESTS)
    if rest == "anchor":
        return tx

    def init(params: optax.Params) -> RestedState:
        def coordinates(elements: Elements, params: Any) -> dict[str, jax.Array]:
            s = bound(group.gauges, params, frozen).slice
            return held_ratios(s, elements, s.enter(elements, s.values(params)).point)

        state = tx.init(params)
        frozen = frozenset(state.frame.frozen)
        return RestedState(state, layout(params).run(coordinates, state.frame.elements, params))

    def update(updates: Any, state: RestedState, params: Any, **extra: Any) -> tuple[Any, RestedState]:
        step, after = tx.update(updates, state.quotient, params, **extra)
        s, f = bound(group.gauges, params, frozenset(after.frame.frozen)).slice, dict(after.frame.elements)
        before = s.values(params)
        x = s.enter(f, optax.tree.add(before, s.vectors(step))).point
        held = dict(state.held)
        for part, _, _ in s.sizes:
            ratio, label = log_ratio(part, x), part.label
            if ratio is None or label in s.not_fixed | s.following or _rounds_growth(part, params):
                continue
            after_step = ratio + share(part) * jnp.log(jnp.abs(f[label]))
            # The new element is computed from the coordinate that is held constant, and not from the last element, so
            # that roundoff does not accumulate.
            known = jnp.isfinite(held[label]) & jnp.isfinite(ratio)
            size = jnp.exp((jnp.where(known, held[label], 0.0) - jnp.where(known, ratio, 0.0)) / share(part))
            f[label] = jnp.where(known, jnp.where(f[label] < 0, -size, size), f[label])
            # If a side of a channel was zero until this step, the channel now gets the ratio that it will keep.
            held[label] = jnp.where(jnp.isfinite(held[label]), held[label], after_step)
        moved = optax.tree.sub(s.act(f, x), before)
        out = cast_like({path: u for path, u in moved.items() if path not in after.frame.frozen}, updates, params)
        frame = after.frame._replace(elements=f)
        return with_leaves(step, out), RestedState(after._replace(frame=frame), held)

    def empty(params: Any) -> RestedState:
        return RestedState(tx.init(params), placeholder())

    said: dict[str, Any] = {"gauges": tx.gauges, "rules": tx.rules, "preflight": tx.preflight}
    rested = transformation(name, init, update, RestedState, empty, **said)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, RestedState]:
        if hasattr(state, "frame"):
            raise binding_error(
                name,
                "a state made with rest='anchor'",
                "no coordinates that are held",
                "a state of rest='balanced'",
                "write rest='anchor', or start anew by tx.init(params)",
            )
        return rested.update(updates, state, params, **extra)

    return GaugeTransformation(rested.init, update_fn, **said)
