"""`quotient`: any Optax transformation on the slice, where weights of one function are the same numbers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from gauge_optax.binding import with_leaves
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.slice import Frame, Slice, SliceCotangent, SlicePoint, SliceTangent
from gauge_optax.transformation import (
    cast_like,
    checked_inner,
    layout,
    lying_like,
    placeholder,
    require_values,
    transformation,
)


class QuotientState(NamedTuple):
    """State of `quotient`.

    Attributes:
      frame: the frame that was read at `init`; constant from then on but for the offset of an inner optimizer that is
        not pinned to the slice. Every step enters and leaves the slice by it.
      inner_state: of the inner transformation, in slice coordinates.
    """

    frame: Any
    inner_state: optax.OptState


def quotient(
    inner: optax.GradientTransformation, gauges: Gauges, *, hold: bool = True, pin: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Runs any Optax transformation on the slice that a list of gauges leaves.

    Args:
      inner: a whole optimizer, with its learning rate, decay, clipping and masks, or a link of a chain.
      gauges: a gauge or a sequence of them, meaning their product. Leaves that no gauge binds pass unchanged.
      hold: whether the part of every step that turns heads is taken out; otherwise heads turn as `inner` turns them.
      pin: whether `inner` too sees anchors of constant size, as the weights have them. Otherwise it sees them grow and
        shrink as they do when it runs alone. From small starts Adam trains better pinned; Muon, all of whose steps have
        one size, trains worse (examples/results/starts.json).

    Returns:
      The transformation. Its `update` needs `params`. The extra arguments `grad` and `value_fn`, which line searches
      take, are passed for θ and reach `inner` for θ̂; all others reach it unchanged.

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
    return quotient_for("quotient", inner, gauges, hold=hold, pin=pin)


def quotient_for(
    name: str, inner: optax.GradientTransformation, gauges: Gauges, *, hold: bool = True, pin: bool = True
) -> optax.GradientTransformationExtraArgs:
    """`quotient`, on behalf of an alias of this name."""
    group, inner = product(gauges), checked_inner(name, inner)

    def update(updates: Any, state: QuotientState, params: Any, **extra: Any) -> tuple[Any, QuotientState]:
        s, frame = Slice.of(group.parts, params), state.frame
        f = s.elements(frame)
        point = s.enter(f, params)  # θ̂ = F⁻¹·θ
        gradient = s.without_roundoff(point, with_leaves(updates, s.enter_dual(f, s.vectors(updates))))  # ĝ = Fᵀ·g
        u, inner_state = inner.update(  # u = inner(ĝ, θ̂)
            with_leaves(gradient, s.to_inner_dual(frame, SliceCotangent(s.vectors(gradient)))),
            state.inner_state,
            with_leaves(params, s.to_inner(frame, point)),
            **(line_search(s, frame, params, extra) if extra else {}),
        )
        tangent = s.from_inner(frame, s.vectors(u))
        after, frame = s.fix(frame, {path: point[path] + x for path, x in tangent.items()})  # θ̂′ = fix(θ̂ + u)
        tangent = SliceTangent({path: x - point[path] for path, x in after.items()})
        step = s.leave(f, s.hold(point, tangent) if hold else tangent)  # step = F·(θ̂′ − θ̂)
        return with_leaves(u, cast_like(step, updates)), QuotientState(frame, inner_state)

    def init(params: optax.Params) -> QuotientState:
        frame, point = start(name, group, params)
        frame = frame if pin else Slice.of(group.parts, params).freed(frame)
        return QuotientState(frame, inner.init(point))

    return transformation(name, init, update, QuotientState, lambda p: QuotientState(placeholder(), inner.init(p)))


def start(name: str, group: Product, params: Any) -> tuple[Frame, Any]:
    """The frame of the starting point, and its slice point as a tree laid out like `params`.

    Args:
      name: of the transformation, for messages.
      group: the gauges.
      params: the starting point.

    Raises:
      ValueError: leaves that have no values, as in a tree of shapes.
    """
    require_values(name, params)
    s, mesh = Slice.of(group.parts, params), layout(params)
    with mesh.left_open():
        stored = mesh.enter(params)
        elements, masks = s.read(stored)
        frame = s.frame(elements, masks[: len(s.order[0])])
        point = with_leaves(stored, s.enter(elements, stored))
    return mesh.leave(frame), lying_like(params, mesh.leave(point, like=params))


def line_search(s: Slice, frame: Frame, params: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Extra arguments with those of line searches, given for θ, as the inner optimizer needs them: for θ̂."""
    if extra.get("grad") is not None:
        gradient = s.enter_dual(s.elements(frame), s.vectors(extra["grad"]))
        extra = extra | {"grad": with_leaves(extra["grad"], s.to_inner_dual(frame, gradient))}
    if "value_fn" in extra:
        extra = extra | {"value_fn": _of_slice_point(s, frame, params, extra["value_fn"])}
    return extra


def _of_slice_point(s: Slice, frame: Frame, params: Any, value_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of θ as one of θ̂."""

    def of_point(point: Any, *args: Any, **kwargs: Any) -> Any:
        values = s.place(s.elements(frame), SlicePoint(dict(s.from_inner(frame, s.vectors(point)))))
        stored = {path: x - s.added[path] for path, x in values.items()}
        return value_fn(with_leaves(point, cast_like(stored, params)), *args, **kwargs)

    return of_point
