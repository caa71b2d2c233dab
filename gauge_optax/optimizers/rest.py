"""`rest="balanced"`: the stored weights of a `quotient` end where both sides of a scale share its growth.

No function and no inner optimizer sees where on its orbit a point rests. With the anchor's rest, the anchor of a scale
keeps its size, and its partner takes all growth. Here log ‖up‖ − p·log ‖down‖ stays (p is the degree of the scale): the
coordinate that the figures of *Dead-Direction Conditioners* hold. The wrapper moves the weights after each step, and
the frame with them, so that the slice point stays.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import with_leaves
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
    """State of a `quotient` whose weights rest at balance.

    Attributes:
      quotient: its own state, whose frame changes with every step.
      held: label of a scale with two sides → log ‖up‖ − p·log ‖down‖ of the stored weights, which stays.
    """

    quotient: Any
    held: Any


@functools.singledispatch
def log_ratio(part: Part[Any], x: Arrays) -> jax.Array | None:
    """log ‖up‖ − p·log ‖down‖ per channel, of a scale with two sides; None for other kinds."""
    return None


@log_ratio.register
def _of_factor(part: Factor, x: Arrays) -> jax.Array | None:
    if not part.down:
        return None
    zero = jnp.zeros(part.shape)
    up, down = (sum((b.total(part.named, jnp.square(x[b.path])) for b in side), zero) for side in (part.up, part.down))
    alive = (up > 0) & (down > 0)  # a dead channel has no ratio: 0 stands for it
    logs = [jnp.log(jnp.where(alive, y, 1.0)) for y in (up, down)]
    return 0.5 * (logs[0] - part.degree * logs[1])


def held_ratios(s: Slice, f: Elements, x: Arrays) -> dict[str, jax.Array]:
    """The coordinates of stored weights with the frame f and the slice point x."""
    ratios = ((part, log_ratio(part, x)) for part, _, _ in s.sizes)
    return {p.label: r + share(p) * jnp.log(jnp.abs(f[p.label])) for p, r in ratios if r is not None}


def share(part: Any) -> float:
    """By how much log α = 1 changes log ‖up‖ − p·log ‖down‖."""
    return 1.0 + float(part.degree) ** 2


def resting(
    name: str, tx: GaugeTransformation, group: Product, rest: str
) -> GaugeTransformation:
    """Returns a `quotient` whose stored weights rest at "anchor", as it is, or at "balanced".

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
            s = bound(group.parts, params).slice
            return held_ratios(s, elements, s.enter(elements, s.values(params)).point)

        state = tx.init(params)
        return RestedState(state, layout(params).run(coordinates, state.frame.elements, params))

    def update(updates: Any, state: RestedState, params: Any, **extra: Any) -> tuple[Any, RestedState]:
        step, after = tx.update(updates, state.quotient, params, **extra)
        s, f = bound(group.parts, params).slice, dict(after.frame.elements)
        before = s.values(params)
        x = s.enter(f, jax.tree.map(jnp.add, before, s.vectors(step))).point
        for part, _, _ in s.sizes:
            ratio = log_ratio(part, x)
            if ratio is not None:  # F follows from the coordinate alone, so that no roundoff of earlier steps adds up
                size = jnp.exp((state.held[part.label] - ratio) / share(part))
                f[part.label] = jnp.where(f[part.label] < 0, -size, size)
        out = cast_like(jax.tree.map(jnp.subtract, s.act(f, x), before), updates)
        frame = after.frame._replace(elements=f)
        return with_leaves(step, out), RestedState(after._replace(frame=frame), state.held)

    def empty(params: Any) -> RestedState:
        return RestedState(tx.init(params), placeholder())

    rested = transformation(name, init, update, RestedState, empty, gauges=tx.gauges)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, RestedState]:
        if hasattr(state, "frame"):
            raise binding_error(
                name, "a state made with rest='anchor'", "no coordinates that are held", "a state of rest='balanced'",
                "write rest='anchor', or start anew by tx.init(params)")
        return rested.update(updates, state, params, **extra)

    return GaugeTransformation(rested.init, update_fn, rested.gauges)
