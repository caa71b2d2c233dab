"""`rest="balanced"`: `quotient` stores the weights in which both sides of a scale share its growth.

A scale multiplies `up` by α and `down` by α⁻ᵖ, with p its degree, and `up` is its anchor. Many weights compute the
function that a step leads to, and any of them may be stored: outputs and inner optimizer are the same for all. With
`rest="anchor"` ‖up‖ keeps its size: where a step would double it, `up` stays and `down` is doubled (p = 1). With
`rest="balanced"` log ‖up‖ − p·log ‖down‖ stays, so that both grow by √2. The figures of *Dead-Direction Conditioners*
measure drift in this coordinate. The wrapper moves the weights after each step, and the frame with them, so that the
slice point stays.
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
      quotient: its own state, whose frame changes with every step.
      held: label of a scale with two sides → log ‖up‖ − p·log ‖down‖ of the stored weights, which stays; infinite for
        channels that have had a side of zeros at every step, and have no such coordinate yet.
    """

    quotient: Any
    held: Any


@functools.singledispatch
def log_ratio(part: Part[Any], x: Arrays) -> jax.Array | None:
    """log ‖up‖ − p·log ‖down‖ per channel, of a scale with two sides, infinite where one is zero; None for others."""
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
    """The coordinates of stored weights with the frame f and the slice point x."""
    ratios = ((part, log_ratio(part, x)) for part, _, _ in s.sizes)
    return {p.label: r + share(p) * jnp.log(jnp.abs(f[p.label])) for p, r in ratios if r is not None}


def _rounds_growth(part: Any, params: Any) -> bool:
    """Whether the anchor is less precise than its partners, and would round its share of their growth away."""
    leaves = leaves_by_path(params)
    bits = [jnp.finfo(jnp.result_type(leaves[b.path])).nmant for b in (*part.anchors[0], *part.down)]
    return min(bits[len(part.anchors[0]) :]) > min(bits[: len(part.anchors[0])])


def share(part: Any) -> float:
    """By how much log ‖up‖ − p·log ‖down‖ grows where log α grows by 1."""
    return 1.0 + float(part.degree) ** 2


def resting(name: str, tx: GaugeTransformation, group: Product, rest: str) -> GaugeTransformation:
    """Returns a `quotient` as it is for `rest="anchor"`, or one that stores balanced weights for "balanced".

    Args:
      name: of the public function, for messages.
      tx: the quotient.
      group: its gauges.
      rest: where.

    Raises:
      ValueError: another rest; `update` with a state of the other one.
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
            # F follows from the coordinate alone, so that no roundoff of earlier steps adds up.
            known = jnp.isfinite(held[label]) & jnp.isfinite(ratio)
            size = jnp.exp((jnp.where(known, held[label], 0.0) - jnp.where(known, ratio, 0.0)) / share(part))
            f[label] = jnp.where(known, jnp.where(f[label] < 0, -size, size), f[label])
            # A channel that had a side of zeros until this step keeps from now on the ratio that it has after this
            # step.
            held[label] = jnp.where(jnp.isfinite(held[label]), held[label], after_step)
        moved = optax.tree.sub(s.act(f, x), before)
        out = cast_like({path: u for path, u in moved.items() if path not in after.frame.frozen}, updates)
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
