"""`quotient`: any Optax transformation in slice coordinates, where weights of one function are the same numbers.

`slice.py` defines the words: the *frame* F is a group element, computed once from the weights at `init`; the *slice
point* θ̂ = F⁻¹·θ is the same for all weights of one function; to *fix* a point near the slice is to move it onto the
slice without changing the function.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import is_empty, leaves_by_path, with_leaves
from gauge_optax.errors import binding_error
from gauge_optax.gauges.absorption import Absorption
from gauge_optax.gauges.by_action import ActionInstance
from gauge_optax.gauges.embedding_shift import Translation
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.gauges.heads import Heads
from gauge_optax.gauges.instance import Instance
from gauge_optax.gauges.read_shift import ReadShift
from gauge_optax.optimizers.decay import decayed_leaves, require_whole_gauges
from gauge_optax.slice import Frame, Slice, SlicePoint, SliceTangent
from gauge_optax.transformation import (
    at_once,
    cast_like,
    checked_inner,
    layout,
    placeholder,
    require_choice,
    require_values,
    transformation,
    with_sharding_of,
)

RESTS = ("anchor", "balanced")


class QuotientState(NamedTuple):
    """State of `quotient`.

    Attributes:
      frame: the frame F that was read at `init`, a `slice.Frame`. Steps do not change it, except with
        `rest="balanced"`; `go.transport` does.
      inner_state: state of the inner transformation, in slice coordinates; with `pin=False` an `UnpinnedState`.
    """

    frame: Any
    inner_state: optax.OptState


def quotient(
    inner: optax.GradientTransformation, gauges: Gauges, *, hold: bool = True, pin: bool = True, rest: str = "anchor"
) -> optax.GradientTransformationExtraArgs:
    """Runs any Optax transformation so that all weights of one function give one training run.

    Args:
      inner: a whole optimizer, with its learning rate, decay, clipping and masks, or a link of a chain.
      gauges: a gauge or a sequence of them, meaning their product. Leaves that no gauge binds pass unchanged.
      hold: whether to remove from every step the part that only rotates the basis of an attention head. If False,
        heads rotate as `inner` rotates them.
      pin: whether `inner` sees the weights on the slice, where anchors (the blocks from which scales are read) have a
        constant size. If False, it sees anchors grow and shrink as they would if it ran alone. From small starts Adam
        trains better with True; Muon, whose steps all have one size, trains better with False
        (examples/results/starts.json).
      rest: which weights of the function a step ends at; no function and no inner optimizer sees it. "anchor": the
        anchor of a scale keeps its size, and its partner takes all growth. "balanced": both sides share it, so that
        log ‖up‖ − p·log ‖down‖ stays (p is the degree of the scale): the coordinate that DDC's figures hold. An update
        takes 16 % longer then, and 21 % under `ddc_adamw` (4 layers of width 768, 2 CPU cores).

    Returns:
      The transformation. Its `update` needs `params`. Line searches take the extra arguments `grad` and `value_fn`:
      pass those of the weights θ, and `inner` gets those of θ̂. All other extra arguments reach it unchanged.

    Raises:
      ValueError: bindings that do not fit the tree, gauges that do not commute; a decay mask in `inner` that splits a
        gauge, unless `inner` needs extra arguments; `update` without params.

    >>> gauge = go.rescale(up={"up": "_ channel"}, down={"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.full((3, 1), 0.5)}
    >>> twin = gauge.act({"": jnp.array([2.0, 0.0, -2.0])}, params)
    >>> loss = lambda p: jnp.sum(
    ...     (jax.nn.relu(jnp.array([1.0, 2.0]) @ p["up"]) @ p["down"] - 1.0) ** 2
    ... )
    >>> def train(params, tx):
    ...     state = tx.init(params)
    ...     for _ in range(20):
    ...         updates, state = tx.update(jax.grad(loss)(params), state, params)
    ...         params = optax.apply_updates(params, updates)
    ...     return f"{loss(params):.3f}"
    >>> train(params, optax.adamw(0.03)), train(twin, optax.adamw(0.03))
    ('0.252', '0.693')
    >>> (
    ...     train(params, go.quotient(optax.adamw(0.03), gauge)),
    ...     train(twin, go.quotient(optax.adamw(0.03), gauge)),
    ... )
    ('0.280', '0.280')

    Reference: docs/design.md §3.
    """
    return quotient_for("quotient", inner, gauges, hold=hold, pin=pin, rest=rest)


def quotient_for(
    name: str,
    inner: optax.GradientTransformation,
    gauges: Gauges,
    *,
    hold: bool = True,
    pin: bool = True,
    rest: str = "anchor",
) -> optax.GradientTransformationExtraArgs:
    """Returns `quotient`, with messages that name the public function `name`."""
    require_choice(name, "rest", rest, RESTS)
    given, group = checked_inner(name, inner), product(gauges)
    inner = given if pin else unpinned(given, group)

    def update(updates: Any, state: QuotientState, params: Any, **extra: Any) -> tuple[Any, QuotientState]:
        s = Slice.of(group.parts, params)
        f = s.elements(state.frame)
        point = s.enter(f, s.values(params))  # θ̂ = F⁻¹·θ
        gradient = s.enter_dual(f, s.vectors(updates), point)  # ĝ = Fᵀ·g
        gradient_tree = s.without_roundoff(point, with_leaves(updates, gradient))
        extra = extra_in_slice_coordinates(s, f, params, extra) if extra else extra
        u, inner_state = inner.update(gradient_tree, state.inner_state, with_leaves(params, point), **extra)
        after = s.fix(jax.tree.map(jnp.add, dict(point), s.vectors(u)), state.frame.live)  # θ̂′ = fix(θ̂ + u)
        tangent = SliceTangent(jax.tree.map(jnp.subtract, dict(after), dict(point)))
        tangent = s.hold(point, tangent) if hold else tangent  # without rotations of heads
        if rest == "anchor":
            step, frame = s.leave(f, tangent, point), state.frame  # F·(θ̂′ − θ̂)
        else:
            if not state.frame.start:
                raise binding_error(
                    name, "a state made with rest='anchor'", "no lengths of the start", "a state of rest='balanced'",
                    "write rest='anchor', or start anew by tx.init(params)",
                )  # fmt: skip
            end = SlicePoint(jax.tree.map(jnp.add, dict(point), dict(tangent)))
            # F takes from the ratio of both sides what has been added to it on the slice since `init`: no roundoff of
            # earlier steps adds up.
            first = s.elements(Frame(state.frame.start, ()))
            rested = s.with_log_ratios(first, jax.tree.map(jnp.subtract, state.frame.ratios, s.log_ratios(end)))
            ends = (s.leave_point(elements, x) for elements, x in ((rested, end), (f, point)))
            step = jax.tree.map(jnp.subtract, *ends)  # F′·θ̂′ − F·θ̂
            frame = state.frame._replace(elements=s.frame(rested, ()).elements)
        return with_leaves(u, cast_like(step, updates)), QuotientState(frame, inner_state)

    def init(params: optax.Params) -> QuotientState:
        frame, point = frame_and_slice_point(name, group, params)
        state = inner.init(point)
        at_point = state if pin else state.inner_state
        for flags in decayed_leaves(given, at_point, point):
            require_whole_gauges(name, Slice.of(group.parts, params), flags)
        if rest != "anchor" and not is_empty(params):
            s = Slice.of(group.parts, params)
            start = jax.tree.map(jnp.copy, frame.elements)  # one buffer in two fields could not be donated
            frame = frame._replace(ratios=s.log_ratios(SlicePoint(s.vectors(point))), start=start)
        return QuotientState(frame, state)

    return transformation(name, init, update, QuotientState, lambda p: QuotientState(placeholder(), inner.init(p)))


def frame_and_slice_point(name: str, group: Product, params: Any) -> tuple[Frame, Any]:
    """Returns the frame of the starting point, and its slice point as a tree with the sharding of `params`.

    Args:
      name: name of the transformation, for messages.
      group: the product of the gauges.
      params: the starting point.

    Raises:
      ValueError: leaves that have no values, as in a tree of shapes; gauges that pass a norm's scale without its
        `norm_scale`.
    """
    require_values(name, params)
    s, mesh = Slice.of(group.parts, params), layout(params)
    s.check_norms()
    with mesh.left_open():
        stored = mesh.enter(params)
        leaves = leaves_by_path(stored)
        elements, masks, entered = at_once(_read_and_entered, (s,), {path: leaves[path] for path in s.added})
        point = with_leaves(stored, entered)
    return mesh.leave(s.frame(elements, masks)), with_sharding_of(params, mesh.leave(point, like=params))


def _read_and_entered(s: Slice, bound: Any) -> tuple[Any, ...]:
    values = s.values(bound)
    frame = s.read(values)
    return frame.elements, frame.masks, s.enter(frame.elements, values)


def extra_in_slice_coordinates(s: Slice, f: Sequence[Any], params: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Returns the extra arguments, with `grad` and `value_fn` of the weights θ replaced by those of θ̂."""
    if extra.get("grad") is not None:
        gradient = s.enter_dual(f, s.vectors(extra["grad"]), s.enter(f, s.values(params)))
        extra = extra | {"grad": with_leaves(extra["grad"], gradient)}
    if "value_fn" in extra:
        value_fn = extra["value_fn"]

        def of_slice_point(point: Any, *args: Any, **kwargs: Any) -> Any:
            values = s.leave_point(f, SlicePoint(s.vectors(point)))
            stored = {path: x - s.added[path] for path, x in values.items()}
            return value_fn(with_leaves(point, cast_like(stored, params)), *args, **kwargs)

        extra = extra | {"value_fn": of_slice_point}
    return extra


class UnpinnedState(NamedTuple):
    """State of `unpinned`.

    Attributes:
      offset: A, one element per instance with anchors, in the order of `Slice.order`. The inner optimizer sees the
        point θ̃ = A·θ̂, which is off the slice.
      live: which channels are fixed at every step, as in `Frame`.
      inner_state: state of the inner transformation, which runs at θ̃.
    """

    offset: tuple[Any, ...]
    live: tuple[jax.Array, ...]
    inner_state: optax.OptState


def unpinned(inner: optax.GradientTransformationExtraArgs, group: Product) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer for slice points whose `inner` sees anchors grow and shrink as its own steps make them.

    `quotient` fixes the point after every step, which undoes that growth. This transformation accumulates the undone
    growth in an element A, the offset, and passes the point θ̃ = A·θ̂ and the gradient A⁻ᵀ·ĝ to `inner`.
    """

    def instances_with_offset(s: Slice, state: UnpinnedState) -> list[tuple[Any, Any]]:
        pairs = [(s.instances[place.number], a) for place, a in zip(s.order.first, state.offset, strict=True)]
        return [(instance, a) for instance, a in pairs if not stays_pinned(instance)]

    def update(updates: Any, state: UnpinnedState, params: Any, **extra: Any) -> tuple[Any, UnpinnedState]:
        if not isinstance(state, UnpinnedState):
            raise binding_error(
                "quotient", "a state made with pin=True", type(state).__name__, "UnpinnedState, of pin=False",
                "write quotient(..., pin=True), or convert a plain state by go.from_state(..., pin=False)",
            )  # fmt: skip
        s = Slice.of(group.parts, params)
        offset = instances_with_offset(s, state)

        def inward(tree: Any) -> Any:  # A⁻¹ times a step u, and θ̂ = A⁻¹·θ̃
            vectors = s.vectors(tree)
            for instance, a in offset:
                vectors = instance.enter(a, vectors)
            return with_leaves(tree, vectors)

        def outward_dual(tree: Any) -> Any:  # A⁻ᵀ·ĝ
            vectors = s.vectors(tree)
            for instance, a in offset:
                vectors = instance.act(instance.inverse(instance.dual(a)), vectors)
            return with_leaves(tree, vectors)

        point = outside = s.vectors(params)
        for instance, a in offset:
            outside = instance.act(a, outside)
        if extra.get("grad") is not None:
            extra["grad"] = outward_dual(extra["grad"])
        if "value_fn" in extra:
            value_fn = extra["value_fn"]
            extra["value_fn"] = lambda tree, *args, **kwargs: value_fn(inward(tree), *args, **kwargs)
        u, inner_state = inner.update(outward_dual(updates), state.inner_state, with_leaves(params, outside), **extra)
        step = inward(u)
        moved, new_offset = jax.tree.map(jnp.add, point, s.vectors(step)), []
        for place, live, a in zip(s.order.first, state.live, state.offset, strict=True):
            instance = s.instances[place.number]
            e, _ = instance.read(place.anchor, moved, live, near=True)
            moved = instance.enter(e, moved)
            new_offset.append(a if stays_pinned(instance) else instance.compose(a, e))
        return step, UnpinnedState(tuple(new_offset), state.live, inner_state)

    def init(params: optax.Params) -> UnpinnedState:
        if is_empty(params):
            return UnpinnedState(placeholder(), placeholder(), inner.init(params))  # type: ignore[arg-type]
        s = Slice.of(group.parts, params)

        def masks(params: Any) -> tuple[jax.Array, ...]:
            leaves = leaves_by_path(params)
            return at_once(_masks, (s,), {path: leaves[path] for path in s.added})

        live = layout(params).run(masks, params)
        return unpinned_state(s, live, inner.init(params))

    return optax.GradientTransformationExtraArgs(init, update)


@functools.singledispatch
def stays_pinned(instance: Instance) -> bool:
    """Whether no offset is kept of an instance, because it has no element whose action is the transpose of a move."""
    return False


@stays_pinned.register(ActionInstance)
@stays_pinned.register(Absorption)
@stays_pinned.register(Translation)
@stays_pinned.register(ReadShift)
def _(instance: Instance) -> bool:
    return True


@functools.singledispatch
def only_rotates(instance: Instance) -> bool:
    """Whether all that it does is to rotate a basis, which is read at `init` and by nothing else."""
    return False


@only_rotates.register
def _(instance: Heads) -> bool:
    return True


def _masks(s: Slice, bound: Any) -> tuple[jax.Array, ...]:
    return s.read(s.vectors(bound), turning=False).masks


def unpinned_state(s: Slice, live: Sequence[jax.Array], inner_state: optax.OptState) -> UnpinnedState:
    """Returns the state of `unpinned` before its first step: the offset is the identity.

    Args:
      s: the slice.
      live: which channels are fixed at every step, one mask per place of `Slice.order`.
      inner_state: state of the inner transformation.
    """
    identity = tuple(s.instances[place.number].identity() for place in s.order.first)
    return UnpinnedState(identity, tuple(live[: len(identity)]), inner_state)
