"""Gauge fixing: after its step an optimizer's weights move to the balanced representative, and its state with them.

The function is left alone; what changes is which of many equal weights the next step starts from. Full strength is a
hard constraint, H_A = H_B after every fix; a fraction of it is a soft one, which takes that fraction of the imbalance's
logarithm away each time.

Here: when to move, how far, and the balance with what has none held in place. Not here: how a state moves
(`transport`), optimizers that do not see the representative at all (`quotient`, `ddc`).
References: "When Equivalent Weights Train Differently" §4, §8; docs/design.md §6.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import binding_error, is_empty
from gauge_optax.checks import require_choice, require_every, require_own, require_params
from gauge_optax.gauges.base import Gauge, Gauges
from gauge_optax.gauges.product import Product, product
from gauge_optax.meshes import layout
from gauge_optax.optimizers.products import (
    KINDS,
    HeldProducts,
    Magnitude,
    both_sides,
    check_apart,
    checked,
    held_products,
    in_logits,
    log_products,
)
from gauge_optax.states.moves import Move, Part
from gauge_optax.states.transport import ON_UNKNOWN, carried
from gauge_optax.transforms._common import in_dtype_of, placeholder

_NAME = "gauge_fix"
_MOST_TURNS = 50


class GaugeFixState(NamedTuple):
    """State of `gauge_fix`.

    Attributes:
      count: steps so far, int32.
      inner_state: of the optimizer inside.
      sizes: products of both sides' root mean squares at `init`; () unless `magnitude` is "fix".
    """

    count: jax.Array  # type: ignore[assignment]
    inner_state: Any
    sizes: Any = ()


def gauge_fix(
    inner: optax.GradientTransformation | None,
    gauges: Gauges,
    every: int | jax.Array = 1,
    strength: float | jax.Array = 1.0,
    transport: bool = True,
    *,
    on_unknown: str = "error",
    magnitude: str = "free",
    cap: float | jax.Array | None = None,
    decay: float | jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Wraps an optimizer: after its step the weights move to the balanced representative, the function unchanged.

    .. math::
      \theta' = \theta + u(\theta), \qquad \theta_{new} = b(\theta')^{strength} \cdot \theta',

    b the balance: both sides of a scale with one norm, both factors of a head with one Gram matrix, shifts with mean
    zero, blocks that a norm follows with RMS 1; rotations have none. Channels and heads without a balanced
    representative (a side that is zero, as LoRA's B at the start; less than full rank) stay where they are.

    Args:
      inner: an optimizer, whole: its learning rate included. None for what moves parameters only, last in a chain; the
        states of the chain's other elements are then not carried along, which suits those that have none.
      gauges: a gauge or a sequence of them, meaning their product; the optimizer's own list where it has one.
      every: every how many steps to move; an int.
      strength: how far, in (0, 1]: 1 for all the way, less for that fraction of it in the group's logarithm.
      transport: whether the optimizer's state moves along, as in `transport`. Otherwise it stays what it was at other
        weights: moments of gradients that are no longer these weights' gradients, and a retraction (`ddc_adamw`) that
        takes the next step back to where it came from. Only an optimizer without a state does not mind.
      on_unknown: what becomes of moments that cannot move along; see `transport`.
      magnitude: what becomes, at every step, of the product of both sides' root mean squares, which the balance leaves
        alone: "free"; "cap", kept below `cap` by a smooth bound; "decay", shrunk by the share `decay`; "fix", kept as
        at `init`. Both sides get one factor. That changes the function; moments move along as if it did not. Gauges
        must then share no leaf.
      cap: the bound, of "cap"; what is above it at the start is below it after one step. With `max_logits=` given to
        `update`, shaped like the gauge's element and seen at `params`, the bound is of these: QK-clip, smoothly.
      decay: the share that the product loses in a step, of "decay".

    Returns:
      The optimizer; `update` needs `params`, and its updates are differences of parameters.

    Raises:
      ValueError: `every` that is no positive int, `strength` outside (0, 1], another `on_unknown` or `magnitude`, one
        without its number, of a gauge without two sides, or of two gauges on one leaf; bindings that do not fit; at the
        first update, a state that cannot move along (Adam's under `head_linear`): take `go.quotient_adamw`, or decide
        with `on_unknown`; `update` without params.

    >>> gauge = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
    >>> params = {"a": jnp.array([[8.0], [0.0]]), "b": jnp.array([[0.5, 0.0]])}
    >>> tx = go.gauge_fix(optax.sgd(0.0), gauge)
    >>> updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    >>> balanced = optax.apply_updates(params, updates)
    >>> balanced["a"].round(4).tolist(), balanced["b"].round(4).tolist()  # the product is what it was
    ([[2.0], [0.0]], [[2.0, 0.0]])

    Reference: the post's §8, hard and soft gauge fixing; its §7 for the state. GaugeFix-LRM, Eq. (4) to (6), for
      multipliers, where `transport=False` is the paper's own; its §5 for `magnitude`.
    """
    require_choice(_NAME, "on_unknown", on_unknown, ON_UNKNOWN)
    require_choice(_NAME, "magnitude", magnitude, KINDS)
    held = Magnitude(magnitude, cap, decay)
    _check_numbers(every, strength)
    group = product(gauges)
    checked(_NAME, group.parts, held)
    moving = Product(tuple(part for part in group.parts if part.balancing != "still"))
    within = optax.with_extra_args_support(optax.identity() if inner is None else inner)

    def init_fn(params: optax.Params) -> GaugeFixState:
        count, inner_state = jnp.zeros((), jnp.int32), within.init(params)
        if is_empty(params):
            return GaugeFixState(count, inner_state, HeldProducts(placeholder()) if magnitude == "fix" else ())
        group.bound(params)  # raises where it does not fit
        if magnitude != "free":
            check_apart(_NAME, group.parts, params)
        return GaugeFixState(count, inner_state, held_products(group.parts, params) if magnitude == "fix" else ())

    def sized(
        params: optax.Params, updates: optax.Updates, state: Any, start: Any, logits: Any
    ) -> tuple[optax.Updates, Any]:
        """The step with both sides of every gauge multiplied by one factor."""
        starts = list(start.logs.values()) if start else [None] * len(group.parts)
        largest = [None] * len(group.parts) if logits is None else logits if len(group.parts) > 1 else [logits]
        for part, at_first, seen in zip(group.parts, starts, largest, strict=True):
            after, alike = part.bound(params).stepped(params, updates), both_sides(part)
            before, now = (log_products(part, tree) for tree in (params, after))
            if seen is not None:
                before, now = in_logits(seen, before, now)
            factors = held.factors(before, now, now if at_first is None else at_first)
            chords = _chords(alike, factors, params, after)
            if transport:
                state = carried(Move((Part(alike, factors, alike.effect),), params, on_unknown), state)
            updates = in_dtype_of(updates, chords)
        return updates, state

    def moved(share: Any, params: optax.Params, updates: optax.Updates, state: Any) -> tuple[optax.Updates, Any]:
        after = moving.bound(params).stepped(params, updates)
        frame = moving.frame(after)
        whole = isinstance(strength, float | int) and strength == 1
        element = moving.inverse(frame if whole else moving.fraction(frame, share))
        chords = _chords(moving, element, params, after)
        if transport:
            # Rotations have no balance, but a state of ours knows its gauges by the whole list.
            own = iter(element)
            parts = tuple(
                Part(part, part.identity(params) if part.balancing == "still" else next(own), part.balancing)
                for part in group.parts
            )
            state = carried(Move(parts, params, on_unknown), state)
        return in_dtype_of(updates, chords), state

    def update_fn(
        updates: optax.Updates, state: GaugeFixState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, GaugeFixState]:
        require_params(_NAME, params)
        require_own(_NAME, state, GaugeFixState)
        logits = extra.pop("max_logits", None) if magnitude == "cap" else None
        updates, inner_state = within.update(updates, state.inner_state, params, **extra)
        count = optax.safe_increment(state.count)

        def fixed(updates: Any, moments: Any, params: Any, sizes: Any, logits: Any, share: Any, due: Any) -> Any:
            if magnitude != "free":
                updates, moments = sized(params, updates, moments, sizes, logits)
            if isinstance(every, int) and every == 1:
                return moved(share, params, updates, moments)
            return jax.lax.cond(due, moved, lambda _, __, *unmoved: unmoved, share, params, updates, moments)

        step, due = (updates, inner_state), count % every == 0
        laid = layout(params)
        updates, inner_state = laid.run(fixed, *step, params, state.sizes, logits, strength, due, like=step)
        return updates, GaugeFixState(count, inner_state, state.sizes)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _chords(gauge: Gauge, element: Any, params: optax.Params, after: optax.Params) -> dict[str, jax.Array]:
    """From θ to g·θ′, leaf by leaf."""
    bound = gauge.bound(params)
    there, before = (bound.vectors(tree) for tree in (gauge.act(element, after), params))
    return {path: x - before[path] for path, x in there.items()}


def _check_numbers(every: Any, strength: Any) -> None:
    """Raises ValueError, as far as can be told: under `inject_hyperparams` both are traced."""
    require_every(_NAME, every)
    if isinstance(strength, jax.core.Tracer):
        return
    real = isinstance(strength, int | float | jax.Array | np.floating) and not isinstance(strength, bool)
    if not real or jnp.ndim(strength) or not 0.0 < float(strength) <= 1.0:
        raise binding_error(
            _NAME, "bad strength", repr(strength), "a number in (0, 1], the fraction of the way",
            "write strength=1.0 for all the way; leave gauge_fix out for none of it",
        )  # fmt: skip
