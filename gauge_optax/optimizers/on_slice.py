"""What transformations on the slice share: how they start, what line searches see, links that enter and leave."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from gauge_optax.binding import with_leaves
from gauge_optax.checks import require_values
from gauge_optax.gauges.product import Product
from gauge_optax.meshes import layout, lying_like
from gauge_optax.slice import Frame, Slice, SlicePoint, SliceTangent
from gauge_optax.transformation import cast_like, checked_inner, placeholder, transformation


class QuotientState(NamedTuple):
    """State of `quotient`.

    Attributes:
      frame: the frame that was read at `init`; constant from then on but for the offset of an inner optimizer that is
        not pinned to the slice. Every step enters and leaves the slice by it.
      inner_state: of the inner transformation, in slice coordinates.
    """

    frame: Any
    inner_state: optax.OptState


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
    s, mesh = group._slice(params), layout(params)
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


def link(
    name: str, inner: optax.GradientTransformation, group: Product, still: bool = True
) -> optax.GradientTransformationExtraArgs:
    """A link of a chain: enters the slice, applies `inner` there, and leaves. `gauge_retract` brings the step back.

    Args:
      name: of the public function, for messages.
      inner: a transformation of slice gradients.
      group: the gauges.
      still: whether `inner` stays on the slice; otherwise it sees the gradient along shifts and may move along orbits.
    """
    inner = checked_inner(name, inner)

    def update(updates: Any, state: QuotientState, params: Any, **extra: Any) -> tuple[Any, QuotientState]:
        s = group._slice(params)
        f = s.elements(state.frame)
        point = s.enter(f, params)
        gradient = with_leaves(updates, s.enter_dual(f, s.vectors(updates), still=still))
        u, inner_state = inner.update(
            s.without_roundoff(point, gradient), state.inner_state, with_leaves(params, point), **extra
        )
        step = s.leave(f, SliceTangent(s.vectors(u)))
        return with_leaves(u, cast_like(step, updates)), QuotientState(state.frame, inner_state)

    def init(params: Any) -> QuotientState:
        frame, point = start(name, group, params)
        return QuotientState(frame, inner.init(point))

    return transformation(name, init, update, QuotientState, lambda p: QuotientState(placeholder(), inner.init(p)))
