"""Decoupled weight decay that respects gauges: wd·θ once per leaf, whatever its gauges, without its part along shifts.

The decay direction θ is equivariant under scales and rotations, and from balanced weights it leads to balanced weights:
every log s shrinks by (p+1)·lr·wd, exactly as under AdamW. A logit shift is affine, so that the mean along it does not
decay. A number per role shrinks the sides of a gauge independently; a part of that field lies along the orbits.
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
    transformation,
)

Decay: TypeAlias = optax.ScalarOrSchedule | Mapping[str, float]
"""A decoupled decay: a number or a schedule for all leaves, or a number per role."""

_NAME = "add_gauge_decay"
_OTHER = "other"
# The constructors that give the blocks of this role another name.
_ARGUMENTS = {
    ("norm_scale", "up"): "scale", ("norm_scale", "down"): "into", ("scale_invariant", "up"): "blocks",
    ("multiplier_balance", "up"): "query", ("multiplier_balance", "down"): "key",
}


class AddGaugeDecayState(NamedTuple):
    """State of `add_gauge_decay`.

    Attributes:
      count: steps so far, int32; a schedule is read at it.
    """

    count: jax.Array  # type: ignore[assignment]


def add_gauge_decay(
    weight_decay: Decay, gauges: Gauges, match: str = "adamw", mask: Any = None
) -> GaugeTransformation:
    """Adds weight_decay·θ to the updates, before the learning rate.

    Args:
      weight_decay: a number, or a schedule of the step; or role → number, which shrinks the sides of a gauge
        independently. A role is the argument of the gauge's constructor that lists the block ("up", "down"; "scale" and
        "into" of a norm; "blocks" of rotations and shifts). For scale gauges "up" and "down" also mean the first and
        the second argument, whatever their names; the constructor's name comes first. "other" is for leaves that no
        gauge binds, 0 by default.
      gauges: a gauge or a sequence of them, meaning their product.
      match: "adamw" shrinks every joint scale as AdamW would; "horizontal" is the rate of DDC B.7, (p²+1)/(p+1) times
        that on leaves with one rescale gauge.
      mask: None, a tree or prefix of booleans, or a callable from parameters to one; leaves with False do not decay. It
        may split a gauge: twins then still decay alike.

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

    Reference: DDC B.7; the post's §4 for shrinks of both sides. Deviation: every leaf decays once. If every gauge had
      its own decay, a shared leaf would decay twice. `gauge_retract` keeps only the part of an independent shrink that
      changes the joint scale: to first order, the shared shrink with (p·up + down)/(p + 1).
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
    """`add_gauge_decay`, also for an optimizer inside `quotient`.

    Args:
      weight_decay: see `add_gauge_decay`.
      group: the gauges.
      match: see `add_gauge_decay`.
      mask: see `add_gauge_decay`.
      only: (slice, params) → the paths that decay; all by default.
      on_slice: whether params are slice points, which are values: γ where a leaf of θ stores γ − 1.
    """
    require_choice(_NAME, "match", match, ("adamw", "horizontal"))
    by_role = weight_decay if isinstance(weight_decay, Mapping) else None
    for role, number in (by_role or {}).items():
        real = isinstance(number, int | float | np.integer | np.floating) and not isinstance(number, bool)
        if not real or not math.isfinite(number):
            raise binding_error(
                _NAME, f"bad decay of role '{role}'", repr(number), "a number for every role",
                "write role → number; a schedule, or a traced number, stands alone and is for all roles",
            )

    def factors_of(s: Slice, params: Any) -> dict[str, float]:
        """Returns what multiplies rate·θ on every leaf that decays."""
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
        # The function does not see the mean along a shift: it is no weight, and does not decay.
        centred = s.centred(s.vectors(params) if on_slice else s.values(params))
        values, vectors = leaves_by_path(params) | centred, leaves_by_path(updates)
        decayed = {
            p: in_computing_dtype(vectors[p]) + rate * factor * in_computing_dtype(values[p])
            for p, factor in factors_of(s, params).items()
        }
        return in_dtype_of(updates, decayed), AddGaugeDecayState(optax.safe_increment(state.count))

    def empty(params: Any) -> AddGaugeDecayState:
        return AddGaugeDecayState(jnp.zeros((), jnp.int32))

    return transformation(_NAME, init, update, AddGaugeDecayState, empty, gauges=group.gauges)


@functools.singledispatch
def degree(part: Part[Any]) -> float | None:
    """The degree p of a scale, which match="horizontal" needs; None for all others, whose decay does not change."""
    return None


@degree.register
def _degree_of_factor(part: Factor) -> float | None:
    return part.degree


def _horizontal(s: Slice) -> dict[str, float]:
    """Returns the factors of leaves with a scale gauge under match="horizontal". Raises ValueError for two gauges."""
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
    """Returns the number of every bound leaf, and the number of all other leaves.

    Raises ValueError for a role without a number, a key that is no role, and a leaf with two different numbers.
    """
    roles = []  # of every block: its leaf, the constructor's argument, and the key under which its number is looked up
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
