"""Decoupled weight decay that respects gauges: each leaf decays once, by wd·θ less its part along shifts.

A scale gauge multiplies `up` by α and `down` by α⁻ᵖ, and does not change the *joint scale* s = ‖up‖ᵖ·‖down‖. The decay
wd·θ moves with θ under scales and rotations: it is a tangent. Weights that are balanced (those of least norm on their
orbit) stay balanced. Every log s falls by (p+1)·lr·wd a step, exactly as under AdamW. A logit shift adds a mean that
changes no output, and this mean does not decay. If the user gives `up` and `down` two different decays, each side
shrinks at its own rate, and a part of this motion is along orbits.
References: DDC B.7 and C.14; docs/design.md §4; "When Equivalent Weights Train Differently" ("the post") §4.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import leaves_by_path, mask_by_path
from gauge_optax.errors import binding_error
from gauge_optax.gauges.bound import bound
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.parts.part import Part, changed, name_of
from gauge_optax.parts.sizes import Factor
from gauge_optax.slice import Slice
from gauge_optax.transformation import (
    GaugeTransformation,
    in_computing_dtype,
    in_dtype_of,
    require_choice,
    require_rates,
    transformation,
    updates_at,
)

Decay: TypeAlias = optax.ScalarOrSchedule | Mapping[str, float]
"""A decoupled decay: a number or a schedule for all leaves, or a number per role, see `add_gauge_decay`."""

_NAME = "add_gauge_decay"
_OTHER = "other"
# (constructor, `Block.argument` in the part that it makes) → the constructor's own name of that argument, if different.
_ARGUMENTS = {
    ("norm_scale", "up"): "scale", ("norm_scale", "down"): "into", ("scale_invariant", "up"): "blocks",
    ("multiplier_balance", "up"): "query", ("multiplier_balance", "down"): "key",
}


class AddGaugeDecayState(NamedTuple):
    """State of `add_gauge_decay`.

    Attributes:
      count: steps so far, int32; the argument of a schedule.
    """

    count: jax.Array  # type: ignore[assignment]


def add_gauge_decay(
    weight_decay: Decay, gauges: Gauges, match: str = "adamw", mask: Any = None
) -> GaugeTransformation:
    """Adds weight_decay·θ to the updates, before the learning rate.

    Args:
      weight_decay: a number, or a schedule of the step; or a mapping, role → number, which shrinks each side of a gauge
        at a rate of its own. The role of a leaf is the name of the argument that lists it in the gauge's constructor:
        "up" and "down" of `rescale`, "scale" and "into" of `norm_scale`, "blocks" of rotations and shifts. For every
        scale gauge, the keys "up" and "down" also stand for its first and second argument; if the mapping has the
        argument's own name too, that number counts. The key "other" is for leaves that no gauge binds, 0 by default.
      gauges: a gauge or a sequence of gauges.
      match: "adamw" shrinks every joint scale ‖up‖ᵖ·‖down‖ at AdamW's rate, where p is the degree of the scale gauge.
        "horizontal" is the rate of DDC B.7: on leaves that a scale gauge binds, (p²+1)/(p+1) times the decay of
        "adamw".
      mask: None, a tree or prefix of booleans, or a callable from parameters to one; leaves with False do not decay.
        Two weight sets of one function still compute one function after the decay, even if only one side decays.

    Returns:
      A transformation of updates (tangents).

    Raises:
      ValueError: another `match`; `"horizontal"` on a leaf with two scale gauges; a role without a number, a key that
        is no role, a leaf with two roles of different numbers; bindings that do not fit; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((1, 1), 2.0), "down": jnp.full((1, 1), 3.0)}
    >>> tx = go.add_gauge_decay(0.1, gauge)
    >>> updates, _ = tx.update(
    ...     {"up": jnp.zeros((1, 1)), "down": jnp.zeros((1, 1))}, tx.init(params), params
    ... )
    >>> [round(float(x[0, 0]), 3) for x in (updates["up"], updates["down"])]
    [0.2, 0.3]
    >>> # The decay of one side moves along the orbit.
    >>> tx = go.add_gauge_decay({"up": 0.1, "down": 0.0}, gauge)
    >>> updates, _ = tx.update(
    ...     {"up": jnp.zeros((1, 1)), "down": jnp.zeros((1, 1))}, tx.init(params), params
    ... )
    >>> [round(float(x[0, 0]), 3) for x in (updates["up"], updates["down"])]
    [0.2, 0.0]

    Reference: DDC B.7; the post's §4 for numbers per side. Deviation: every leaf decays once. If every gauge had its
      own decay, a shared leaf would decay twice. If `gauge_retract` follows, it removes the part of the decay along the
      orbit. With the decay `up` on one side and `down` on the other, the joint scale then changes, to first order, as
      if both sides had decayed by (p·up + down)/(p + 1).
    """
    return decay(weight_decay, product(gauges), match, mask)


def decay(
    weight_decay: Decay,
    group: Product,
    match: str = "adamw",
    mask: Any = None,
    only: Callable[[Slice, Any], Collection[str]] | None = None,
    on_slice: bool = False,
) -> GaugeTransformation:
    """`add_gauge_decay` with two more arguments, for an optimizer inside `quotient`.

    Args:
      weight_decay: see `add_gauge_decay`.
      group: the gauges.
      match: see `add_gauge_decay`.
      mask: see `add_gauge_decay`.
      only: a function of the slice and params that returns the paths that decay; by default all do.
      on_slice: if True, params are slice points: for a leaf that is bound as `1+`, they contain the stored number plus
        1. If False, params are stored weights, and this function adds the 1.
    """
    require_choice(_NAME, "match", match, ("adamw", "horizontal"))
    by_role = weight_decay if isinstance(weight_decay, Mapping) else None
    if by_role is None:
        require_rates(_NAME, weight_decay=weight_decay)
    for role, number in (by_role or {}).items():
        real = isinstance(number, int | float | np.integer | np.floating) and not isinstance(number, bool)
        if not real or not math.isfinite(number):
            raise binding_error(
                _NAME, f"bad decay of role '{role}'", repr(number), "a number for every role",
                "write weight_decay={'up': 0.1, 'down': 0.0}; a schedule is for all leaves: weight_decay=schedule",
            )

    def factors_of(s: Slice, params: Any) -> dict[str, float]:
        """Returns path → factor: the leaf's decay is factor·rate·θ. Leaves that do not decay are left out."""
        matched = _horizontal(s) if match == "horizontal" else {}
        decays = mask_by_path(True if mask is None else mask, params)
        numbers, other = ({}, 1.0) if by_role is None else _numbers(s, by_role)
        chosen = decays if only is None else only(s, params)
        factors = {p: matched.get(p, 1.0) * numbers.get(p, other) for p in decays if p in chosen and decays[p]}
        return {path: factor for path, factor in factors.items() if factor}

    def init(params: optax.Params) -> AddGaugeDecayState:
        factors_of(bound(group.gauges, params).slice, params)  # raises where arguments or bindings do not fit
        return empty(params)

    def update(updates: Any, state: AddGaugeDecayState, params: Any, **extra: Any) -> tuple[Any, AddGaugeDecayState]:
        rate: Any = 1.0 if by_role is not None else weight_decay
        rate = rate(state.count) if callable(rate) else rate
        s = bound(group.gauges, params).slice
        # The mean along a shift changes no output, so that it does not decay.
        centred = s.centred(s.vectors(params) if on_slice else s.values(params))
        factors, values = factors_of(s, params), leaves_by_path(params) | centred
        vectors = updates_at(_NAME, [path for path in factors if path in s.added], updates, params)
        decayed = {
            p: in_computing_dtype(vectors[p]) + rate * factor * in_computing_dtype(values[p])
            for p, factor in factors.items() if p in vectors  # the update of an unbound leaf may be None, as in Optax
        }
        return in_dtype_of(updates, decayed, params), AddGaugeDecayState(optax.safe_increment(state.count))

    def empty(params: Any) -> AddGaugeDecayState:
        return AddGaugeDecayState(jnp.zeros((), jnp.int32))

    return transformation(_NAME, init, update, AddGaugeDecayState, empty, gauges=group.gauges)


@functools.singledispatch
def degree(part: Part[Any]) -> float | None:
    """The degree p of a scale, which match="horizontal" needs; None for other parts, which do not change the decay."""
    return None


@degree.register
def _degree_of_factor(part: Factor) -> float | None:
    return part.degree


def _horizontal(s: Slice) -> dict[str, float]:
    """Returns path → (p²+1)/(p+1), for leaves that a scale moves. Raises ValueError if two scales move one leaf."""
    factors: dict[str, float] = {}
    first: dict[str, str] = {}
    for part in s.parts:
        p = degree(part)
        if p is None:
            continue
        for path in changed(part):
            if path in factors:
                raise binding_error(
                    _NAME, f"two scale gauges on '{path}'", f"{first[path]} and {name_of(part)}",
                    "one scale gauge per leaf for match='horizontal'", "write match='adamw'",
                )
            factors[path], first[path] = (p**2 + 1) / (p + 1), name_of(part)
    return factors


def _numbers(s: Slice, by_role: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """Returns path → decay for every bound leaf, and the one decay of all other leaves.

    Raises ValueError for a role without a number, a key that is no role, and a leaf with two different numbers.
    """
    roles = []  # per block: its leaf, the constructor's argument that lists it, and its key in `by_role`
    for part in (*s.parts, *s.free):
        for block in part.blocks:
            argument = _ARGUMENTS.get((name_of(part), block.argument), block.argument)
            roles.append((block.path, argument, argument if argument in by_role else block.argument))

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"'{name}'" for name in dict.fromkeys(names))

    keys, arguments = f"keys {listed(by_role) or 'none'}", listed(argument for _, argument, _ in roles)
    chosen: dict[str, str] = {}
    for path, argument, key in roles:
        if key not in by_role:
            raise binding_error(
                _NAME, f"no decay for the role '{argument}' of '{path}'", keys, f"a number for each of {arguments}",
                f"add '{argument}': 0.0, or another number",
            )
        earlier = chosen.setdefault(path, key)
        if by_role[earlier] != by_role[key]:
            raise binding_error(
                _NAME, f"two decays on '{path}'", f"'{earlier}': {by_role[earlier]} and '{key}': {by_role[key]}",
                "one number per leaf, which decays once whatever its gauges", "give these two roles the same number",
            )
    unknown = [key for key in by_role if key not in {_OTHER, *(key for _, _, key in roles)}]
    if unknown:
        raise binding_error(
            _NAME, f"no block has the role '{unknown[0]}'", keys,
            f"roles {arguments}, and '{_OTHER}' for leaves without a gauge", f"drop '{unknown[0]}' or correct it",
        )
    return {path: float(by_role[key]) for path, key in chosen.items()}, float(by_role.get(_OTHER, 0.0))
