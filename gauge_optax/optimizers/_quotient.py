"""`quotient`: any Optax transformation on the slice, where weights of one function are the same numbers.

Here: the wrapper and its state. Not here: the slice (`gauge_optax.slice`), what runs inside.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import gauge_optax.slice as slices
from gauge_optax.binding import is_empty, leaves_by_path, with_leaves
from gauge_optax.checks import (
    require_gradients,
    require_own,
    require_params,
    require_transformation,
    require_values,
    with_own_state,
)
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.meshes import layout, lying_like


class QuotientState(NamedTuple):
    """State of `quotient`.

    Attributes:
      gauges: the frame that was read at `init`, constant from then on but for `grown`, of what is not pinned.
      inner_state: of the transformation inside, in slice coordinates.
    """

    gauges: Any
    inner_state: optax.OptState


def quotient(
    inner: optax.GradientTransformation, gauges: Gauges, *, hold: bool = True, pin: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Runs any Optax transformation on the slice that a list of gauges leaves.

    Args:
      inner: a whole optimizer, with its learning rate, decay, clipping and masks, or a link of a chain.
      gauges: a gauge or a sequence of them, meaning their product. Leaves that none binds pass as they are.
      hold: whether the turning of heads is taken out of every step; without, heads turn as `inner` turns them.
      pin: whether `inner` too sees anchors of constant size, as the weights have them. Without, it sees them grow and
        shrink as they do when it runs alone. From small starts Adam trains better pinned; Muon, all of whose steps have
        one size, trains worse (examples/results/starts.json).

    Returns:
      The transformation. Its `update` needs `params`; the extra arguments `grad` and `value_fn`, which line searches
      take, are given for θ and reach `inner` for θ̂, all others as they are.

    Raises:
      ValueError: bindings that do not fit the tree, gauges that do not commute; `update` without params.

    >>> gauge = go.rescale(up={"up": "_ channel"}, down={"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.full((3, 1), 0.5)}
    >>> twin = gauge.act({"": jnp.array([2.0, 0.0, -2.0])}, params)
    >>> loss = lambda p: jnp.sum((jax.nn.relu(jnp.array([1.0, 2.0]) @ p["up"]) @ p["down"] - 1.0) ** 2)
    >>> def train(params, tx):
    ...     state = tx.init(params)
    ...     for _ in range(20):
    ...         updates, state = tx.update(jax.grad(loss)(params), state, params)
    ...         params = optax.apply_updates(params, updates)
    ...     return f"{loss(params):.3f}"
    >>> train(params, optax.adamw(0.03)), train(twin, optax.adamw(0.03))
    ('0.252', '0.693')
    >>> train(params, go.quotient(optax.adamw(0.03), gauge)), train(twin, go.quotient(optax.adamw(0.03), gauge))
    ('0.280', '0.280')

    Reference: docs/design.md §3.
    """
    return wrapped("quotient", inner, gauges, hold=hold, pin=pin)


def wrapped(
    name: str,
    inner: optax.GradientTransformation,
    gauges: Gauges,
    *,
    hold: bool = True,
    pin: bool = True,
    still: bool = True,
    ends: bool = True,
    origin: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`quotient` on behalf of an alias.

    Args:
      name: of the alias, for messages.
      inner: see `quotient`.
      gauges: see `quotient`.
      hold: see `quotient`.
      pin: see `quotient`.
      still: whether `inner` stays on the slice; without, it moves along orbits too, and sees the gradient there.
      ends: whether steps end on the slice; a link of a chain leaves that to `gauge_retract`.
      origin: whether `inner` goes the rest of the way to the slice: an `Origin` is given to it under this name, and
        rotations and what is faint are left to it. What is the same in any basis need not be turned.
    """
    require_transformation(name, inner)
    group, inner = product(gauges), optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> QuotientState:
        if is_empty(params):
            return QuotientState(jnp.zeros(()), inner.init(params))
        require_values(name, params)
        on, laid = slices.chart(group, params), layout(params)
        with laid.left_open():
            here = laid.enter(params)
            frame = slices.read(on, here)
            point = with_leaves(here, slices.enter(slices.motions(on, frame), on.joint.values(here)))
            frame = frame if pin else slices.unpinned(on, frame)
        return QuotientState(laid.leave(frame), inner.init(lying_like(params, laid.leave(point, like=params))))

    def update_fn(
        updates: optax.Updates, state: QuotientState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, QuotientState]:
        require_params(name, params)
        require_gradients(name, updates)
        require_own(name, state, QuotientState)
        on, laid = slices.chart(group, params), layout(params)
        with laid.left_open():
            frame, here, slope, grad = laid.enter((state.gauges, params, updates, extra.get("grad")))
            given = origin and on.joint.turns_last
            motions = slices.motions(on, frame, turning=not given)
            point = slices.enter(motions, on.joint.values(here))

            def dual(tree: Any) -> Any:
                gradient = slices.enter_dual(on, motions, on.joint.vectors(tree), still)
                return with_leaves(tree, slices.outward_dual(on, frame, gradient))

            seen, grad = dual(slope), None if grad is None else dual(grad)
            left = slices.origin(on, frame, point, seen) if given else None
            seen = seen if given else slices.without_faint(on, point, seen)
            outside = with_leaves(here, slices.outward(on, frame, point))
        if grad is not None:
            extra["grad"] = laid.leave(grad, like=extra["grad"])
        if "value_fn" in extra:
            extra["value_fn"] = _on_slice(on, frame, params, extra["value_fn"])
        if origin:
            extra["origin"] = left and laid.leave(left)._replace(params=params, updates=updates)
        seen, outside = laid.leave(seen, like=updates), laid.leave(outside, like=params)
        with with_own_state(name, inner, state.inner_state, params):
            tree, inner_state = inner.update(seen, state.inner_state, outside, **extra)
        with laid.left_open():
            tree = laid.enter(tree)
            tangent = slices.inward(on, frame, on.joint.vectors(tree))
            if still and ends:
                fixed, frame = slices.fix(on, frame, slices.added(point, tangent))
                tangent = slices.between(point, fixed)
            step = slices.leave(motions, slices.hold(on, point, tangent) if hold else tangent)
            out = _stored(tree, step, like=updates)
        return laid.leave(out, like=updates), QuotientState(laid.leave(frame), inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _stored(tree: Any, step: slices.Arrays, like: Any) -> Any:
    own = leaves_by_path(like)
    return with_leaves(tree, {path: x.astype(own[path].dtype) for path, x in step.items()})


def _on_slice(
    on: slices.Chart, frame: slices.Frame, params: optax.Params, value_fn: Callable[..., Any]
) -> Callable[..., Any]:
    """A function of θ as one of θ̂: what a line search evaluates."""
    own, laid = leaves_by_path(params), layout(params)

    def of_point(point: Any, *args: Any, **kwargs: Any) -> Any:
        with laid.left_open():
            here = laid.enter(point)
            tangent = slices.inward(on, frame, on.joint.vectors(here))
            values = slices.place(on, frame, slices.SlicePoint(dict(tangent)))
            stored = {path: (x - on.joint.offset[path]).astype(own[path].dtype) for path, x in values.items()}
            here = with_leaves(here, stored)
        return value_fn(laid.leave(here, like=point), *args, **kwargs)

    return of_point
