"""`quotient`: any Optax transformation on the slice, where weights of one function are the same numbers.

Here: the wrapper and its state. Not here: the slice (`gauge_optax.slice`), what runs inside.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import gauge_optax.slice as slices
from gauge_optax.binding import is_empty, leaves_by_path, with_leaves
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.gauges.reading import Turning


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

    Reference: DESIGN §1, §5.
    """
    return wrapped("quotient", inner, gauges, hold=hold, pin=pin)


def wrapped(
    name: str,
    inner: optax.GradientTransformation,
    gauges: Gauges,
    *,
    hold: bool = True,
    pin: bool = True,
    turned: Callable[[Any, Turning], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`quotient` on behalf of an alias whose inner is blind to some rotations, which then need not be `turned`."""
    group, inner = product(gauges), optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> QuotientState:
        if is_empty(params):
            return QuotientState(jnp.zeros(()), inner.init(params))
        on = slices.chart(group, params)
        chosen = None if turned is None else functools.partial(turned, params)
        frame = slices.read(on, params, chosen)
        point = slices.enter(slices.motions(on, frame), on.joint.values(params))
        frame = frame if pin else slices.unpinned(on, frame)
        return QuotientState(frame, inner.init(with_leaves(params, point)))

    def update_fn(
        updates: optax.Updates, state: QuotientState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, QuotientState]:
        _require_params(name, params)
        on, frame = slices.chart(group, params), state.gauges
        motions = slices.motions(on, frame)
        point = slices.enter(motions, on.joint.values(params))
        gradient = slices.enter_dual(on, motions, on.joint.vectors(updates))
        seen = slices.without_faint(on, with_leaves(updates, slices.outward_dual(on, frame, gradient)))
        if "grad" in extra:
            gradient = slices.enter_dual(on, motions, on.joint.vectors(extra["grad"]))
            extra["grad"] = with_leaves(extra["grad"], slices.outward_dual(on, frame, gradient))
        if "value_fn" in extra:
            extra["value_fn"] = _on_slice(on, frame, params, extra["value_fn"])
        outside = with_leaves(params, slices.outward(on, frame, point))
        tree, inner_state = inner.update(seen, state.inner_state, outside, **extra)
        tangent = slices.inward(on, frame, on.joint.vectors(tree))
        fixed, frame = slices.fix(on, frame, slices.added(point, tangent))
        tangent = slices.between(point, fixed)
        step = slices.leave(motions, slices.hold(on, point, tangent) if hold else tangent)
        own = leaves_by_path(updates)
        out = with_leaves(tree, {path: x.astype(own[path].dtype) for path, x in step.items()})
        return out, QuotientState(frame, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _on_slice(
    on: slices.Chart, frame: slices.Frame, params: optax.Params, value_fn: Callable[..., Any]
) -> Callable[..., Any]:
    """A function of θ as one of θ̂: what a line search evaluates."""
    own = leaves_by_path(params)

    def of_point(point: Any, *args: Any, **kwargs: Any) -> Any:
        values = slices.place(on, frame, slices.SlicePoint(dict(slices.inward(on, frame, on.joint.vectors(point)))))
        stored = {path: (x - on.joint.offset[path]).astype(own[path].dtype) for path, x in values.items()}
        return value_fn(with_leaves(point, stored), *args, **kwargs)

    return of_point


def _require_params(name: str, params: Any) -> None:
    if params is None:
        raise ValueError(
            f"{name}: update was called without params\n"
            f"  found:    params=None\n"
            f"  expected: the parameters that the updates belong to\n"
            f"  remedy:   write tx.update(grads, state, params)"
        )
