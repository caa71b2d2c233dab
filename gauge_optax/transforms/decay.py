"""Decoupled weight decay that respects gauges: wd·θ once per leaf, whatever its gauges, less the shifts' vertical part.

θ itself is the Euler field: equivariant under scales and rotations, and at the minimum-norm frame it keeps the
balance, so every log s shrinks by (p+1)·lr·wd, exactly as under AdamW. A logit shift is affine, so its mean is left
out.
References: DDC B.7 and C.14; DESIGN §5.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import binding_error, is_empty, leaves_by_path
from gauge_optax.gauges._split import Bound
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.linalg import real_dtype
from gauge_optax.transforms._common import float_leaves, in_dtype_of, require_choice, require_params

Mask = Any


class AddGaugeDecayState(NamedTuple):
    """State of `add_gauge_decay`.

    Attributes:
      count: steps so far, int32; a scheduled decay is read at it.
    """

    count: jax.Array  # type: ignore[assignment]


def add_gauge_decay(
    weight_decay: optax.ScalarOrSchedule,
    gauges: Gauges,
    match: str = "adamw",
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """Adds weight_decay·θ to the updates, before the learning rate.

    Args:
      weight_decay: a number, or a schedule of the step.
      gauges: a gauge or a sequence of them, meaning their product.
      match: "adamw" shrinks every joint scale as AdamW would; "horizontal" is DDC B.7's rate, (p²+1)/(p+1) times
        that on leaves with one rescale gauge.
      mask: None, a tree or prefix of booleans, or a callable from parameters to one; False leaves do not decay. It
        must be constant over the leaves of every instance of a gauge.

    Returns:
      A transformation of updates (tangents).

    Raises:
      ValueError: another `match`; a mask that splits a gauge; `"horizontal"` on a leaf with two scale gauges;
        bindings that do not fit; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((1, 1), 2.0), "down": jnp.full((1, 1), 3.0)}
    >>> tx = go.add_gauge_decay(0.1, gauge)
    >>> updates, _ = tx.update({"up": jnp.zeros((1, 1)), "down": jnp.zeros((1, 1))}, tx.init(params), params)
    >>> [round(float(x[0, 0]), 3) for x in (updates["up"], updates["down"])]
    [0.2, 0.3]

    Reference: DDC B.7. Deviation: decayed once per leaf; gauge by gauge a shared leaf would decay twice.
    """
    require_choice("add_gauge_decay", "match", match, ("adamw", "horizontal"))
    group = product(gauges)

    def init_fn(params: optax.Params) -> AddGaugeDecayState:
        if not is_empty(params):
            bound = group.bound(params)
            _factors(bound, match)
            _mask_by_path(bound, mask, params)
        return AddGaugeDecayState(jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: AddGaugeDecayState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, AddGaugeDecayState]:
        del extra
        require_params("add_gauge_decay", params)
        rate = weight_decay(state.count) if callable(weight_decay) else weight_decay
        bound = group.bound(params)
        values = float_leaves(params, real_dtype()) | bound.centre(bound.values(params))
        vectors, factors = float_leaves(updates, real_dtype()), decay_factors(bound, params, match, mask)
        added = {p: vectors[p] + rate * factor * values[p] for p, factor in factors.items() if factor}
        return in_dtype_of(updates, added), AddGaugeDecayState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def decay_factors(bound: Bound, params: optax.Params, match: str, mask: Mask) -> dict[str, float]:
    """Per leaf, what multiplies weight_decay·θ; the same for all leaves of an instance, 0 where nothing decays."""
    factors, decays = _factors(bound, match), _mask_by_path(bound, mask, params)
    return {p: factors.get(p, 1.0) if on else 0.0 for p, on in decays.items()}


def _factors(bound: Bound, match: str) -> dict[str, float]:
    """Per leaf, what multiplies wd·θ."""
    if match == "adamw":
        return {}
    factors = {}
    for path, terms in bound.system.terms.items():
        instances = {index for index, _, _ in terms}
        if len(instances) > 1:
            names = " and ".join(bound.scales[i].gauge for i in sorted(instances))
            raise binding_error(
                "add_gauge_decay",
                f"two scale gauges on '{path}'",
                names,
                "one scale gauge per leaf for match='horizontal'",
                "write match='adamw'",
            )
        degree = bound.scales[terms[0][0]].degree
        factors[path] = (degree**2 + 1) / (degree + 1)
    return factors


def _mask_by_path(bound: Bound, mask: Mask, params: optax.Params) -> dict[str, bool]:
    leaves = leaves_by_path(params)
    if mask is None:
        return dict.fromkeys(leaves, True)
    tree = mask(params) if callable(mask) else mask
    whole = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: bool(flag), part), tree, params)
    flags = dict(zip(leaves, jax.tree.leaves(whole), strict=True))
    groups = [(i.gauge, i.paths) for i in bound.scales] + [(i.gauge, i.paths) for i in bound.rotations]
    for gauge, paths in groups:
        on, off = [p for p in paths if flags[p]], [p for p in paths if not flags[p]]
        if on and off:
            raise binding_error(
                "add_gauge_decay",
                f"the mask splits {gauge} at '{off[0]}'",
                f"decay on {on[0]}, none on {off[0]}",
                "one value for all leaves of a gauge",
                "mask all leaves of the gauge, or none: decaying one side alone moves along the orbit",
            )
    return flags
