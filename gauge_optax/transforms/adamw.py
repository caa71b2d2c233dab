"""The chain behind `ddc_adamw` as one transformation: every component's leaves are read while they are at hand.

Project, precondition, decay, learning rate and retraction, as in their own files, but for one thing: of a gradient that
is not horizontal, a vertical part below 1e-3 of a channel's derivatives or 1e-5 of a head's gradient is left to the
projection of the step. The state is the chain's without `gauge_project`'s. A chain's elements cannot share a frame, and
each makes all leaves before the next begins: 14.5 times `optax.adamw`'s time beside 9.7 (`benchmarks/results`).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import is_empty
from gauge_optax.gauges._components import after
from gauge_optax.gauges._system import Sides
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.linalg import real_dtype
from gauge_optax.transforms._common import float_leaves, in_dtype_of, placeholder, require_params
from gauge_optax.transforms._here import Here
from gauge_optax.transforms._pass import Options, Pass
from gauge_optax.transforms.ddc import check_modes, init_ddc
from gauge_optax.transforms.decay import Mask, add_gauge_decay, decay_factors
from gauge_optax.transforms.retract import GaugeRetractState, Sight, collected, init_reference, part_of, retracted

Arrays = dict[str, jax.Array]


def fused_ddc_adamw(
    gauges: Gauges,
    options: Options,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule,
    match: str,
    mask: Mask,
) -> optax.GradientTransformationExtraArgs:
    """`gauge_project`, `scale_by_ddc`, `add_gauge_decay`, `scale_by_learning_rate` and `gauge_retract` in one pass.

    Args:
      gauges: a gauge or a sequence of them.
      options: of `scale_by_ddc`.
      learning_rate: a number or a schedule.
      weight_decay: a number or a schedule.
      match: of `add_gauge_decay`.
      mask: of `add_gauge_decay`.

    Returns:
      The optimizer; its state is the chain's without `gauge_project`'s.
    """
    check_modes(options)
    group = product(gauges)
    decay = add_gauge_decay(weight_decay, gauges, match, mask)
    rate = optax.scale_by_learning_rate(learning_rate)

    def init_fn(params: optax.Params) -> tuple[Any, ...]:
        first = init_ddc(group, params, options)
        anchor = (
            placeholder()
            if is_empty(params)
            else init_reference(group.bound(params), params, first.gauges.frame)
        )
        return first, decay.init(params), rate.init(params), GaugeRetractState(anchor)

    def update_fn(
        updates: optax.Updates, state: tuple[Any, ...], params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, tuple[Any, ...]]:
        del extra
        require_params("ddc_adamw", params)
        first, decayed, rated, old = state
        bound = group.bound(params)
        factors = decay_factors(bound, params, match, mask)
        lam = weight_decay(decayed.count) if callable(weight_decay) else weight_decay
        minus_rate, rated = rate.update(jnp.ones((), real_dtype()), rated)

        def scaled(tangent: Arrays, values: Mapping[str, jax.Array]) -> Arrays:
            return {p: minus_rate * (x + lam * factors[p] * values[p]) for p, x in tangent.items()}

        def scaled_dots(here: Here, dots: Sides) -> Sides:
            return [
                tuple(minus_rate * (x + lam * factors[i.paths[0]] * square) for x, square in zip(*pair, strict=True))
                for i, *pair in zip(here.bound.scales, dots, here.overlap.squares, strict=True)
            ]

        step = Pass(bound, params, updates, first, options, project=options.vertical == "frozen")
        chosen, one, found = (options.radial, options.vertical), jnp.ones(()), []
        out: Arrays = {}
        for part in step.parts:
            tangent, dots, here = step.take(part, one)
            sight = Sight(here.values, here.point, here.overlap.squares, scaled_dots(here, dots))
            reference = part_of(part, old.gauges, one)
            chord, new = retracted(part, sight, scaled(tangent, here.raw), reference, chosen)
            # Not of the chord: old parameters would be read once more after the new ones were written over them.
            one, out = after((new, step.taken())), out | chord
            found.append(new)
        plain, first = step.finish()
        out |= scaled(plain, float_leaves(params, real_dtype()))
        decayed = decayed._replace(count=optax.safe_increment(decayed.count))
        return in_dtype_of(updates, out), (first, decayed, rated, GaugeRetractState(collected(step.parts, found)))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
