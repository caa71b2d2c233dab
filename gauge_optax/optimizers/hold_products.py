"""How large both sides of a scale are together: what its gauge leaves open, and what weight decay used to hold.

The gauge of `rescale` and `multiplier_balance` trades a factor between two sides; it does not see the product of their
root mean squares. This wrapper holds, caps or decays that product by one factor on both sides, so that their ratio,
which is the gauge's, stays. That changes the function, on purpose.
Reference: GaugeFix-LRM §4.4 and §5, whose future direction this is.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import Axes, binding_error
from gauge_optax.gauges.gauge import BlockGauge, Element, Gauge, Gauges, product
from gauge_optax.gauges.scale import keeps_product, scale_invariant
from gauge_optax.optimizers.fix import chords
from gauge_optax.states.moves import Move, MovingPart
from gauge_optax.states.transport import ON_UNKNOWN, carried
from gauge_optax.transformation import checked_inner, in_dtype_of, placeholder, require_choice, stepped, transformation

_NAME = "hold_products"
KINDS = ("init", "cap", "decay")


class HeldProducts(NamedTuple):
    """What products are held at.

    Attributes:
      logs: of s_up·s_down at `init`, per gauge under the paths of its leaves, joined by " + ".
    """

    logs: Any


class HoldProductsState(NamedTuple):
    """State of `hold_products`.

    Attributes:
      inner_state: of the optimizer inside.
      sizes: a `HeldProducts`; () unless `kind` is "init".
    """

    inner_state: Any
    sizes: Any


def hold_products(
    inner: optax.GradientTransformation,
    gauges: Gauges,
    kind: str = "init",
    *,
    cap: float | jax.Array | None = None,
    decay: float | jax.Array | None = None,
    transport: bool = True,
    on_unknown: str = "error",
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer: after its step both sides of every scale are multiplied by one factor.

    Args:
      inner: an optimizer, whole: its learning rate included.
      gauges: `rescale` of degree 1, `norm_scale` or `multiplier_balance`, one or a sequence; they must share no leaf.
      kind: what becomes of the product s_up·s_down of both sides' root mean squares, per channel: "init", kept as at
        `init`; "cap", kept below `cap` by a smooth bound; "decay", shrunk by the share `decay` in every step.
      cap: the bound; what is above it at the start is below it after one step. With `max_logits=` given to `update`,
        shaped like the gauge's element and seen at `params`, the bound is of these: QK-clip, smoothly.
      decay: the share that the product loses in a step.
      transport: whether the optimizer's state moves along, as if the function stayed; see `gauge_fix`.
      on_unknown: what becomes of moments that cannot move along; see `transport`.

    Returns:
      The optimizer; `update` needs `params`, and its updates are differences of parameters.

    Raises:
      ValueError: another `kind` or `on_unknown`, a kind without its number, a gauge without two sides of one degree,
        two gauges on one leaf; bindings that do not fit; `update` without params.

    >>> gauge = go.multiplier_balance({"query": "head _"}, {"key": "head _"})
    >>> params = {"query": jnp.full((1, 3), 4.0), "key": jnp.full((1, 3), 1.0)}
    >>> tx = go.gauge_fix(go.hold_products(optax.sgd(0.0), gauge, "decay", decay=0.75), gauge)
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> jax.tree.map(lambda x: round(float(x[0, 0]), 3), optax.apply_updates(params, updates))  # 4·1 → 1, balanced
    {'key': 1.0, 'query': 1.0}

    Reference: GaugeFix-LRM §5. Deviation: the paper leaves the product to the optimizer.
    """
    require_choice(_NAME, "kind", kind, KINDS)
    require_choice(_NAME, "on_unknown", on_unknown, ON_UNKNOWN)
    group, inner = product(gauges), checked_inner(_NAME, inner)
    _check(kind, cap, decay, group.parts)

    def init(params: optax.Params) -> HoldProductsState:
        _check_apart(group.parts, params)
        logs = {" + ".join(g._slice(params).added): log_products(g, params) for g in group.parts}
        return HoldProductsState(inner.init(params), HeldProducts(logs) if kind == "init" else ())

    def update(updates: Any, state: HoldProductsState, params: Any, **extra: Any) -> tuple[Any, HoldProductsState]:
        logits = extra.pop("max_logits", None) if kind == "cap" else None
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra)
        starts = list(state.sizes.logs.values()) if state.sizes else [None] * len(group.parts)
        largest = [logits] if len(group.parts) == 1 else [None] * len(group.parts) if logits is None else logits
        for part, at_init, seen in zip(group.parts, starts, largest, strict=True):
            after, both = stepped(part, params, updates), _both_sides(part)
            before, now = log_products(part, params), log_products(part, after)
            if seen is not None:
                # In units of the largest logits seen before the step: these grow as the product does.
                logs = jax.tree.map(_finite_log, seen, before)
                before, now = logs, jax.tree.map(lambda log, x, y: log + (y - x), logs, before, now)
            factors = jax.tree.map(
                functools.partial(_factor, kind, cap, decay), before, now, now if at_init is None else at_init
            )
            moved = chords(both, factors, params, after)
            if transport:
                move = Move((MovingPart(both, factors, both.effect),), params, on_unknown)
                inner_state = carried(move, inner_state)
            updates = in_dtype_of(updates, moved)
        return updates, HoldProductsState(inner_state, state.sizes)

    def empty(params: Any) -> HoldProductsState:
        return HoldProductsState(inner.init(params), HeldProducts(placeholder()) if kind == "init" else ())

    return transformation(_NAME, init, update, HoldProductsState, empty)


def log_products(gauge: Gauge, params: Any) -> Element:
    """log s_up + log s_down per channel, s root mean squares; minus infinity where a side is zero."""
    s = gauge._slice(params)
    return {instance.key: sum(instance.log_sizes(s.values(params))) for instance in s.instances}


def _factor(kind: str, cap: Any, decay: Any, before: jax.Array, after: jax.Array, start: jax.Array) -> jax.Array:
    """log of the factor on either side, from log-products before the step, after it, and at `init`."""
    whole = jnp.isfinite(before) & jnp.isfinite(after) & jnp.isfinite(start)
    before, after, start = (jnp.where(whole, x, 0.0) for x in (before, after, start))
    wanted = start
    if kind == "decay":
        wanted = after + jnp.log1p(-jnp.asarray(decay, after.dtype))
    if kind == "cap":
        # s = cap·σ(z): far below the bound z moves as log s does, and no step leads past the bound.
        bound = jnp.log(jnp.asarray(cap, after.dtype))
        below = jnp.minimum(before - bound, -1e-3)
        place = below - jnp.log(-jnp.expm1(below)) + (after - before)
        wanted = bound - jnp.logaddexp(0.0, -place)
    return jnp.where(whole, 0.5 * (wanted - after), 0.0)


def _finite_log(x: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), -jnp.inf).astype(like.dtype)


def _both_sides(gauge: Any) -> BlockGauge:
    """The gauge that scales both sides of another alike, with elements of the same keys and shapes."""
    blocks: dict[str, list[str]] = {}
    for spec in gauge.specs:
        blocks.setdefault(spec.pattern, []).append(spec.axes)
    axes: dict[str, Axes] = {pattern: x[0] if len(x) == 1 else tuple(x) for pattern, x in blocks.items()}
    return scale_invariant(axes, sizes=dict(gauge.sizes))


def _check(kind: str, cap: Any, decay: Any, gauges: Sequence[Gauge]) -> None:
    """Raises ValueError for numbers that are missing or out of range, and for gauges without two sides."""
    no_cap, no_decay = kind == "cap" and not _positive(cap), kind == "decay" and not _positive(decay)
    if no_cap or no_decay or (kind == "decay" and not _positive(1.0 - decay)):
        found = f"cap={cap!r}" if kind == "cap" else f"decay={decay!r}"
        raise binding_error(
            _NAME, f"no number for kind='{kind}'", found,
            "a positive number, the bound" if kind == "cap" else "a number between 0 and 1, the share lost in a step",
            "write cap=10.0" if kind == "cap" else "write decay=1e-3",
        )  # fmt: skip
    if (kind != "cap" and cap is not None) or (kind != "decay" and decay is not None):
        raise binding_error(
            _NAME, f"a number that kind='{kind}' does not take", f"cap={cap!r}, decay={decay!r}",
            "cap for 'cap' alone, decay for 'decay' alone", "leave it out",
        )  # fmt: skip
    for gauge in gauges:
        if not keeps_product(gauge):
            raise binding_error(
                _NAME, "a gauge without two sides of one degree", gauge.name,
                "rescale of degree 1, norm_scale or multiplier_balance, whose balance leaves the product alone",
                "give hold_products these alone",
            )  # fmt: skip


def _positive(x: Any) -> bool:
    """Whether it is one positive number, as far as can be told: under `inject_hyperparams` it is traced."""
    if isinstance(x, jax.core.Tracer):
        return True
    real = isinstance(x, int | float | jax.Array | np.ndarray | np.floating) and not jnp.ndim(x)
    return real and bool(0 < x < math.inf)


def _check_apart(gauges: Sequence[Gauge], params: Any) -> None:
    """Raises ValueError for gauges that share a leaf: a factor for one would change the product of the other."""
    first: dict[str, str] = {}
    for gauge in gauges:
        for path in gauge._slice(params).added:
            if path in first:
                raise binding_error(
                    _NAME, f"sizes of two gauges with '{path}'", f"{first[path]} and {gauge.name}",
                    "one gauge per leaf", "give hold_products the gauge whose product is meant alone",
                )  # fmt: skip
            first[path] = gauge.name
