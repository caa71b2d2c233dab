"""The chain behind an alias as one transformation: every component's leaves are read while they are at hand.

Project, precondition, decay, learning rate and retraction, as in their own files, but for one thing: of a gradient that
is not horizontal, a vertical part below 1e-3 of a channel's derivatives or 1e-5 of a head's gradient is left to the
projection of the step. The state is the chain's without `gauge_project`'s. A chain's elements cannot share a frame, and
each makes all leaves before the next begins: 14.5 times `optax.adamw`'s time beside 9.7 (`benchmarks/results`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import is_empty
from gauge_optax.gauges._components import Component
from gauge_optax.gauges._matrices import Matrices
from gauge_optax.gauges._system import Sides
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.linalg import real_dtype
from gauge_optax.transforms._common import float_leaves, in_dtype_of, placeholder, require_params
from gauge_optax.transforms._here import Here
from gauge_optax.transforms._pass import take_step
from gauge_optax.transforms._state import FramedState, Method, init_state
from gauge_optax.transforms.decay import AddGaugeDecayState, Decay, Mask, add_gauge_decay, decay_factors, decay_rate
from gauge_optax.transforms.polar import Routing
from gauge_optax.transforms.retract import (
    GaugeRetractState,
    Reference,
    Sight,
    collected,
    init_reference,
    part_of,
    retracted,
)

Arrays = dict[str, jax.Array]


class Rates(NamedTuple):
    """A learning rate and a decoupled decay.

    Attributes:
      learning_rate: a number or a schedule.
      weight_decay: a number, a schedule, or a number per role.
    """

    learning_rate: optax.ScalarOrSchedule
    weight_decay: Decay


class FusedState(NamedTuple):
    """State of an alias: its chain's, less what only a chain needs.

    Attributes:
      framed: of the preconditioner.
      decay: of the decay.
      rates: of the learning rate's schedule.
      retract: of the retraction.
    """

    framed: FramedState
    decay: AddGaugeDecayState
    rates: Any
    retract: GaugeRetractState


def fused(
    name: str,
    gauges: Gauges,
    method: Method,
    routing: Routing | None,
    rates: Rates,
    adam_rates: Rates,
    match: str,
    mask: Mask,
) -> optax.GradientTransformationExtraArgs:
    """`gauge_project`, a preconditioner, `add_gauge_decay`, `scale_by_learning_rate` and `gauge_retract` in one pass.

    Args:
      name: the alias, for messages.
      gauges: a gauge or a sequence of them.
      method: of the preconditioner.
      routing: which leaves are stepped by their polar factor; None for none.
      rates: of leaves connected through gauges to one that is, and of these.
      adam_rates: of all other leaves; the same object where there is but one pair.
      match: of `add_gauge_decay`.
      mask: of `add_gauge_decay`; not of `adam_rates`, if these are others.

    Returns:
      The optimizer; its state is the chain's without `gauge_project`'s.
    """
    group = product(gauges)
    decay = add_gauge_decay(rates.weight_decay, gauges, match, mask)
    schedule = optax.scale_by_learning_rate(rates.learning_rate)
    chosen = (method.options.radial, method.options.vertical)

    def routed(params: optax.Params) -> dict[str, Matrices]:
        return {} if routing is None or is_empty(params) else routing.matrices(group.bound(params), params)

    def init_fn(params: optax.Params) -> FusedState:
        first = init_state(name, group, params, method.options, routed(params))
        anchor = (
            placeholder()
            if is_empty(params)
            else init_reference(group.bound(params), params, first.gauges.frame)
        )
        return FusedState(first, decay.init(params), schedule.init(params), GaugeRetractState(anchor))

    def update_fn(
        updates: optax.Updates, state: FusedState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, FusedState]:
        del extra
        require_params(name, params)
        bound, matrices, count = group.bound(params), routed(params), state.decay.count
        factors = {True: decay_factors(rates.weight_decay, bound, params, match, mask)}
        factors[False] = factors[True]
        minus_rate, after_rates = schedule.update(jnp.ones((), real_dtype()), state.rates)
        by_polar = {True: (minus_rate, decay_rate(rates.weight_decay, count))}
        by_polar[False] = by_polar[True]
        if adam_rates is not rates:
            factors[False] = decay_factors(adam_rates.weight_decay, bound, params, match, None)
            by_polar[False] = (-_at(adam_rates.learning_rate, count), decay_rate(adam_rates.weight_decay, count))

        def finish_of(part: Component) -> tuple[_Retraction, Any]:
            polar = not matrices.keys().isdisjoint(part.bound.offset)
            own, numbers = tuple(part.numbered(factors[polar]).items()), by_polar[polar]
            return _Retraction(chosen, own), (numbers, part_of(part, state.retract.gauges))

        step = take_step(bound, params, updates, state.framed, method, matrices, finish_of)
        leaves = float_leaves(params, real_dtype(), without=bound.offset)
        out = {
            p: _scaled(x, leaves[p], factors[p in matrices][p], *by_polar[p in matrices])
            for p, x in step.plain.items()
        }
        for part, (chord, _) in zip(step.parts, step.finished, strict=True):
            out |= part.by_path(chord)
        reference = collected(step.parts, [new for _, new in step.finished])
        decayed = AddGaugeDecayState(optax.safe_increment(count))
        return in_dtype_of(updates, out), FusedState(step.state, decayed, after_rates, GaugeRetractState(reference))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _at(rate: optax.ScalarOrSchedule, count: jax.Array) -> Any:
    return rate(count) if callable(rate) else rate


def _scaled(tangent: jax.Array, value: jax.Array, factor: float, minus_rate: Any, decay: Any) -> jax.Array:
    return minus_rate * (tangent + decay * factor * value)


@dataclasses.dataclass(frozen=True)
class _Retraction:
    """Decay, learning rate and retraction of a component: a `Finish`.

    Attributes:
      chosen: `radial` and `vertical`.
      factors: per leaf, what multiplies weight_decay·θ; the same for all leaves of a scale's side.
    """

    chosen: tuple[str, str]
    factors: tuple[tuple[str, float], ...]

    def __call__(self, here: Here, tangent: Arrays, dots: Sides, extra: Any) -> tuple[tuple[Arrays, Reference], Any]:
        (minus_rate, decay), reference = extra
        factors: Mapping[str, float] = dict(self.factors)
        delta = {p: _scaled(x, here.raw[p], factors[p], minus_rate, decay) for p, x in tangent.items()}
        scaled_dots = [
            tuple(
                minus_rate * (x + decay * (factors[side[0].path] if side else 0.0) * q)
                for side, x, q in zip((i.up, i.down), *pair, strict=True)
            )
            for i, *pair in zip(here.bound.scales, dots, here.known.squares, strict=True)
        ]
        sight = Sight(here.values, here.point, here.known.squares, scaled_dots)
        chord, new = retracted(here.bound, sight, delta, reference, self.chosen)
        # Not of the chord: old parameters would be read once more after the new ones were written over them.
        return (chord, new), new
