"""Gauge fixing: after an optimizer's step, weights move to the balanced point of their orbit, and the state with them.

The function stays the same; the move changes from which of many equivalent weights the next step starts. With
`strength=1` this is a hard constraint: after every move the weights are balanced. For example, both factors A and B of
a head have equal Gram matrices AᵀA = BᵀB. With a smaller strength it is a soft constraint: every move removes that
fraction of the logarithm of the imbalance.
References: "When Equivalent Weights Train Differently" ("the post") §4, §8; docs/design.md §6.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import leaves_by_path
from gauge_optax.frozen import beside_others, frozen_leaves, require_still_frozen
from gauge_optax.gauges.balance import balance_beside
from gauge_optax.gauges.bound import bound
from gauge_optax.gauges.gauge import Gauge, Gauges, Product, product
from gauge_optax.optimizers._quotient import require_first_outside
from gauge_optax.states.moves import Move, MovingPart
from gauge_optax.states.statistics import require_no_statistics_behind
from gauge_optax.states.transport import ON_UNKNOWN, transported_state
from gauge_optax.transformation import (
    GaugeTransformation,
    checked_inner,
    in_dtype_of,
    once_per_tree,
    require_choice,
    require_every,
    require_number,
    stepped,
    transformation,
    with_gauges_of,
)
from gauge_optax.wrapped import preflight_of
from gauge_optax.xla import cond

_NAME = "gauge_fix"


class GaugeFixState(NamedTuple):
    """State of `gauge_fix`.

    Attributes:
      count: steps so far, int32.
      inner_state: state of the optimizer inside.
      frozen: path → (), for every leaf that the optimizer never changes: a set of paths as a pytree without arrays.
    """

    count: jax.Array  # type: ignore[assignment]
    inner_state: Any
    frozen: dict[str, tuple[()]] = {}  # noqa: RUF012  a NamedTuple's default; nobody writes to it


def gauge_fix(
    inner: optax.GradientTransformation | None,
    gauges: Gauges,
    every: int | np.integer[Any] | jax.Array = 1,
    strength: float | jax.Array = 1.0,
    transport: bool = True,
    *,
    on_unknown: str = "error",
) -> GaugeTransformation:
    r"""Wraps an optimizer: after its step the weights move to the balanced point of their orbit.

    .. math::
      \theta' = \theta + u(\theta), \qquad \theta_{new} = b(\theta')^{strength} \cdot \theta',

    where u(θ) is the step of `inner` and b(θ′) the element that balances θ′. *Balanced* means: both sides of a scale
    have equal norms, both factors of a head have equal Gram matrices, shifts have mean zero, and blocks that a norm
    follows have RMS 1. Rotations have no balance, and do not move.

    The function stays the same, except that the update θ_new − θ is rounded at the size of θ. If one side of a scale
    has k times the norm of the other, this changes the function by about √k roundoffs of the dtype in that step. Call
    `gauge.act(gauge.balance(params), params)` first where k is large.

    A channel or a head has no balanced point, and stays where it is, if one of its sides is zero (LoRA's B at the
    start) or has less than full rank. A copy of a gauge (the gauge in one layer, for example) also stays if `inner`
    never changes one of its leaves (see the argument `frozen` of `quotient`).

    Put nothing around it that mixes weights of different steps, such as `optax.lookahead` or an average of weights: the
    weights move along the orbit between steps, and a mean of two points of one orbit computes another function. An
    average inside a `quotient` does not see these moves (`go.orbit.evaluate`).

    Args:
      inner: a whole optimizer, with its learning rate. With None the result only moves parameters, as the last link of
        a chain. The states of the chain's other links then do not move along, so that they must hold no moments.
      gauges: a gauge or a sequence of them. If `inner` was made with gauges, give the same list here.
      every: the number of steps from one move to the next; an int.
      strength: how far to move, in (0, 1]: 1 moves all the way; s moves by the element whose logarithm is s times that
        of b.
      transport: whether the optimizer's state moves along, as in `transport`. If False, it still belongs to the weights
        before the move: its moments average gradients there, and an optimizer whose state has a frame (`ddc_adamw`)
        undoes the move in its next step. Only an optimizer without a state is unaffected.
      on_unknown: what to do with moments that cannot move along; see `transport`.

    Returns:
      The optimizer; `update` needs `params`, and its updates are differences of parameters.

    Raises:
      ValueError: `every` that is no positive int, `strength` outside (0, 1], an unknown `on_unknown`; at `init`, gauges
        that do not fit the parameters, a `quotient` around this wrapper with gauges of the same leaves, which would
        undo the move, or running statistics of BatchNorm among the parameters, which would not fit the moved
        weights; at the first update, a state that cannot move along, as Adam's under `head_linear` (use
        `go.quotient_adamw`, or choose another `on_unknown`); `update` without params.

    >>> gauge = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
    >>> params = {"a": jnp.array([[8.0], [0.0]]), "b": jnp.array([[0.5, 0.0]])}
    >>> tx = go.orbit.gauge_fix(optax.sgd(0.0), gauge)
    >>> updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    >>> balanced = optax.apply_updates(params, updates)
    >>> # Their product stays.
    >>> balanced["a"].round(4).tolist(), balanced["b"].round(4).tolist()
    ([[2.0], [0.0]], [[2.0, 0.0]])

    Reference: the post's §8, hard and soft gauge fixing; its §7 for the state. GaugeFix-LRM, Eq. (4) to (6), for
      multipliers; that paper does not move the state (`transport=False`). The balance does not change the product of
      the sizes of both sides; `hold_products` controls that product.
    """
    require_choice(_NAME, "on_unknown", on_unknown, ON_UNKNOWN)
    require_every(_NAME, every)
    remedy = "write strength=1.0 for all the way; leave gauge_fix out for none of it"
    require_number(_NAME, "strength", strength, "(0, 1]", remedy)
    group = product(gauges)
    moving = Product(tuple(part for part in group.gauges if part.balancing != "still"))
    within = checked_inner(_NAME, optax.identity() if inner is None else inner)

    @once_per_tree
    def never_changing(params: Any) -> frozenset[str]:
        return frozen_leaves(_NAME, within, params)

    def init(params: optax.Params) -> GaugeFixState:
        b = bound(group.gauges, params)  # raises where a binding does not fit
        require_no_statistics_behind(_NAME, b.slice, params)
        around = "put it around: go.orbit.gauge_fix(go.quotient(optimizer, gauges), gauges), with both lists in one"
        require_first_outside(_NAME, b.slice, again=False, remedy=around)
        frozen = beside_others(never_changing(params, anew=True), params)
        return empty(params)._replace(frozen=dict.fromkeys(sorted(frozen), ()))

    def update(updates: Any, state: GaugeFixState, params: Any, **extra: Any) -> tuple[Any, GaugeFixState]:
        keeping = "; tx.init(params)._replace(inner_state=state.inner_state) keeps the moments"
        require_still_frozen(_NAME, within, state.frozen, (), never_changing(params), params, extra, keeping)
        updates, inner_state = within.update(updates, state.inner_state, params, **extra)
        count, steps = optax.safe_increment(state.count), leaves_by_path(updates)
        kept = {path: x for path, x in steps.items() if path in moving._bound(params).slice.added.keys() - state.frozen}
        updates = in_dtype_of(updates, kept, params)  # the dtype must be the same in steps with and without a move
        move = functools.partial(balanced, frozenset(state.frozen))
        if isinstance(every, int) and every == 1:
            updates, inner_state = move(params, updates, inner_state)
        else:
            updates, inner_state = cond(
                count % every == 0, move, lambda _, *unmoved: unmoved, params, updates, inner_state
            )
        return updates, GaugeFixState(count, inner_state, state.frozen)

    def balanced(frozen: frozenset[str], params: Any, updates: Any, inner_state: Any) -> tuple[Any, Any]:
        after = stepped(moving, params, updates)
        element = balance_beside(moving, after, frozen)
        if not (isinstance(strength, float | int) and strength == 1):
            element = moving.power(element, strength)
        if transport:
            # A frame in a state has an element for every gauge of the list, so that the move needs one for each.
            # Rotations have no balance: their element is the identity.
            elements = iter(element)
            parts = tuple(
                MovingPart(part, part.identity(params) if part.balancing == "still" else next(elements), part.balancing)
                for part in group.gauges
            )
            inner_state = transported_state(Move(parts, params, on_unknown), inner_state)
        moved = chords(moving, element, params, after)
        return in_dtype_of(updates, {path: u for path, u in moved.items() if path not in frozen}), inner_state

    def empty(params: Any) -> GaugeFixState:
        return GaugeFixState(jnp.zeros((), jnp.int32), within.init(params))

    def preflight(params: Any) -> list[str | ValueError]:
        return [*preflight_of(inner)(params), _AVERAGES]

    held = with_gauges_of(inner, group.gauges)
    return transformation(_NAME, init, update, GaugeFixState, empty, gauges=held, preflight=preflight)


_AVERAGES = (
    "gauge_fix moves weights between steps, so that an average of weights over steps (EMA) computes another function; "
    "put the average inside a quotient (go.orbit.evaluate), or average copies by go.orbit.average"
)


def chords(gauge: Gauge, element: Any, params: Any, after: Any) -> dict[str, jax.Array]:
    """Returns g·θ′ − θ as path → array, for θ = `params`, θ′ = `after` and g = `element`."""
    s = gauge._bound(params).slice
    moved, before = (s.vectors(tree) for tree in (gauge.act(element, after), params))
    return {path: x - before[path] for path, x in moved.items()}
