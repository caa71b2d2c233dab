"""Decoupled weight decay that respects gauges: wd·θ once per leaf, whatever its gauges, less the shifts' vertical part.

θ itself is the Euler field: equivariant under scales and rotations, and at the minimum-norm frame it keeps the
balance, so every log s shrinks by (p+1)·lr·wd, exactly as under AdamW. A logit shift is affine, so its mean is left
out. That is the shared shrink; a number per role instead shrinks the sides of a gauge independently, and of that
field a part lies along the orbits.
References: DDC B.7 and C.14; docs/design.md §4; "When Equivalent Weights Train Differently" §4.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import Block, binding_error, leaves_by_path
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.slice import Slice
from gauge_optax.transformation import float_leaves, in_dtype_of, require_choice, transformation

Mask = Any
Decay: TypeAlias = optax.ScalarOrSchedule | Mapping[str, float]
"""A decoupled decay: a number or a schedule for all leaves, or a number per role."""

OTHER = "other"
_NAME = "add_gauge_decay"
# What a gauge calls the argument whose blocks have this role.
_ARGUMENTS = {
    ("norm_scale", "up"): "scale", ("norm_scale", "down"): "into", ("scale_invariant", "up"): "blocks",
    ("multiplier_balance", "up"): "query", ("multiplier_balance", "down"): "key",
}  # fmt: skip


class AddGaugeDecayState(NamedTuple):
    """State of `add_gauge_decay`.

    Attributes:
      count: steps so far, int32; a scheduled decay is read at it.
    """

    count: jax.Array  # type: ignore[assignment]


def add_gauge_decay(
    weight_decay: Decay,
    gauges: Gauges,
    match: str = "adamw",
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """Adds weight_decay·θ to the updates, before the learning rate.

    Args:
      weight_decay: a number, or a schedule of the step; or role → number, which shrinks the sides of a gauge
        independently. A role is the argument that a leaf's blocks were given in ("up", "down"; "scale", "into" of a
        norm; "blocks" of rotations and shifts), or what a scale's side is called for every scale gauge alike ("up",
        "down"); the gauge's own name comes first. "other" is for leaves that no gauge binds, 0 by default.
      gauges: a gauge or a sequence of them, meaning their product.
      match: "adamw" shrinks every joint scale as AdamW would; "horizontal" is DDC B.7's rate, (p²+1)/(p+1) times
        that on leaves with one rescale gauge.
      mask: None, a tree or prefix of booleans, or a callable from parameters to one; False leaves do not decay. It
        must be constant over the leaves of every instance of a gauge.

    Returns:
      A transformation of updates (tangents).

    Raises:
      ValueError: another `match`; a mask that splits a gauge; `"horizontal"` on a leaf with two scale gauges; a role
        without a number, a key that is no role, a leaf with two roles of different numbers; bindings that do not fit;
        `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((1, 1), 2.0), "down": jnp.full((1, 1), 3.0)}
    >>> tx = go.add_gauge_decay(0.1, gauge)
    >>> updates, _ = tx.update({"up": jnp.zeros((1, 1)), "down": jnp.zeros((1, 1))}, tx.init(params), params)
    >>> [round(float(x[0, 0]), 3) for x in (updates["up"], updates["down"])]
    [0.2, 0.3]
    >>> tx = go.add_gauge_decay({"up": 0.1, "down": 0.0}, gauge)  # one side alone: this moves along the orbit
    >>> updates, _ = tx.update({"up": jnp.zeros((1, 1)), "down": jnp.zeros((1, 1))}, tx.init(params), params)
    >>> [round(float(x[0, 0]), 3) for x in (updates["up"], updates["down"])]
    [0.2, 0.0]

    Reference: DDC B.7; the post's §4 for shrinks of both sides. Deviations: decayed once per leaf; gauge by gauge a
      shared leaf would decay twice. Of an independent shrink `gauge_retract` keeps the joint scale's part alone, to
      first order that of the shared shrink with (p·up + down)/(p + 1), unless its `vertical` lets the coordinate move.
    """
    return decay(weight_decay, product(gauges), match, mask)


def decay(
    weight_decay: Decay,
    group: Product,
    match: str = "adamw",
    mask: Mask = None,
    only: Callable[[Slice, Any], Collection[str]] | None = None,
    on_slice: bool = False,
) -> optax.GradientTransformationExtraArgs:
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
    if isinstance(weight_decay, Mapping):
        _check_numbers(weight_decay)

    def factors_of(s: Slice, params: Any) -> dict[str, float]:
        factors = decay_factors(weight_decay, s, params, match, mask)
        chosen = factors if only is None else only(s, params)
        return {path: factor for path, factor in factors.items() if factor and path in chosen}

    def init(params: optax.Params) -> AddGaugeDecayState:
        factors_of(Slice.of(group.parts, params), params)
        return AddGaugeDecayState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: AddGaugeDecayState, params: Any, **extra: Any) -> tuple[Any, AddGaugeDecayState]:
        rate, s = decay_rate(weight_decay, state.count), Slice.of(group.parts, params)
        # The mean of a shifted leaf is no weight: it does not decay.
        values = float_leaves(params) | s.centred(s.vectors(params) if on_slice else s.values(params))
        vectors = float_leaves(updates)
        decayed = {p: vectors[p] + rate * factor * values[p] for p, factor in factors_of(s, params).items()}
        return in_dtype_of(updates, decayed), AddGaugeDecayState(optax.safe_increment(state.count))

    def empty(params: Any) -> AddGaugeDecayState:
        return AddGaugeDecayState(jnp.zeros((), jnp.int32))

    return transformation(_NAME, init, update, AddGaugeDecayState, empty)


def decay_rate(weight_decay: Decay, count: jax.Array) -> Any:
    """What every leaf's factor is multiplied by at this step: 1 where roles have numbers, which are in the factors."""
    if isinstance(weight_decay, Mapping):
        return 1.0
    return weight_decay(count) if callable(weight_decay) else weight_decay


def decay_factors(weight_decay: Decay, s: Slice, params: optax.Params, match: str, mask: Mask) -> dict[str, float]:
    """Per leaf, what multiplies `decay_rate`·θ; the same for all leaves of a scale's side, 0 where nothing decays."""
    factors, decays = _factors(s, match), _mask_by_path(s, mask, params)
    numbers, other = _by_leaf(s, weight_decay) if isinstance(weight_decay, Mapping) else ({}, 1.0)
    return {p: factors.get(p, 1.0) * numbers.get(p, other) if masked else 0.0 for p, masked in decays.items()}


def _check_numbers(by_role: Mapping[str, float]) -> None:
    for role, number in by_role.items():
        real = isinstance(number, int | float | np.integer | np.floating) and not isinstance(number, bool)
        if not real or not math.isfinite(number):
            raise binding_error(
                _NAME, f"bad decay of role '{role}'", repr(number), "a number for every role",
                "write role → number; a schedule, or a traced number, stands alone and is for all roles",
            )  # fmt: skip


def _by_leaf(s: Slice, by_role: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """Number of every bound leaf, and that of the others."""
    chosen: dict[str, str] = {}
    roles, used = _roles(s), {OTHER}
    for block, names in roles:
        key = next((name for name in names if name in by_role), None)
        if key is None:
            raise _no_number(block, names, roles, by_role)
        used.add(key)
        earlier = chosen.setdefault(block.path, key)
        if by_role[earlier] != by_role[key]:
            raise binding_error(
                _NAME, f"two decays on '{block.path}'", f"'{earlier}': {by_role[earlier]} and '{key}': {by_role[key]}",
                "one number per leaf, which decays once whatever its gauges", "give these two roles the same number",
            )  # fmt: skip
    unknown = [key for key in by_role if key not in used]
    if unknown:
        raise binding_error(
            _NAME, f"no block has the role '{unknown[0]}'", f"keys {_listed(by_role)}",
            f"roles {_listed(dict.fromkeys(names[0] for _, names in roles))}, and '{OTHER}' for leaves without a gauge",
            f"drop '{unknown[0]}' or correct it",
        )  # fmt: skip
    return {path: float(by_role[key]) for path, key in chosen.items()}, float(by_role.get(OTHER, 0.0))


def _roles(s: Slice) -> list[tuple[Block, tuple[str, ...]]]:
    """Every block with the names that its role may be given by, the gauge's argument first."""
    roles = []
    for instance in s.instances:
        for block in instance.blocks:
            argument = _ARGUMENTS.get((instance.gauge, block.role), block.role)
            roles.append((block, tuple(dict.fromkeys((argument, block.role)))))
    return roles


def _no_number(
    block: Block, names: tuple[str, ...], roles: list[tuple[Block, tuple[str, ...]]], by_role: Mapping[str, float]
) -> ValueError:
    return binding_error(
        _NAME, f"no decay for the role '{names[0]}' of '{block.path}'", f"keys {_listed(by_role) or 'none'}",
        f"a number for each of {_listed(dict.fromkeys(names[0] for _, names in roles))}",
        f"add '{names[0]}': 0.0, or another number",
    )  # fmt: skip


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _factors(s: Slice, match: str) -> dict[str, float]:
    """Per leaf, what multiplies wd·θ."""
    factors: dict[str, float] = {}
    first: dict[str, str] = {}
    for instance in s.instances if match == "horizontal" else ():
        degree = instance.degree_of_decay
        for path in instance.paths if degree is not None else ():
            if path in factors:
                raise binding_error(
                    _NAME, f"two scale gauges on '{path}'", f"{first[path]} and {instance.gauge}",
                    "one scale gauge per leaf for match='horizontal'", "write match='adamw'",
                )  # fmt: skip
            factors[path] = (degree**2 + 1) / (degree + 1)
            first[path] = instance.gauge
    return factors


def _mask_by_path(s: Slice, mask: Mask, params: optax.Params) -> dict[str, bool]:
    leaves = leaves_by_path(params)
    if mask is None:
        return dict.fromkeys(leaves, True)
    tree = mask(params) if callable(mask) else mask
    whole = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: bool(flag), part), tree, params)
    flags = dict(zip(leaves, jax.tree.leaves(whole), strict=True))
    for instance in s.instances:
        if not instance.log_step and instance.turn is None:  # shifts are left out of the decay whatever the mask says
            continue
        decayed, masked = [p for p in instance.paths if flags[p]], [p for p in instance.paths if not flags[p]]
        if decayed and masked:
            raise binding_error(
                _NAME, f"the mask splits {instance.gauge} at '{masked[0]}'",
                f"decay on {decayed[0]}, none on {masked[0]}", "one value for all leaves of a gauge",
                "mask all leaves of the gauge, or none: decaying one side alone moves along the orbit",
            )  # fmt: skip
    return flags
