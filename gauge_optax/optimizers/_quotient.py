"""`quotient`: runs any Optax transformation in slice coordinates, where the weights of one function are one point.

`slice.py` defines the words. The *frame* F is a group element, computed once from the weights at `init`. The *slice
point* θ̂ = F⁻¹·θ is the same for all weights of one function. To *fix* a point near the slice is to move it onto the
slice without changing the function. The parts of gauges have three kinds: *constants* add to leaves, *sizes* multiply
them, and *turns* rotate them.
"""

import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import Block, leaves_by_path, with_leaves
from gauge_optax.errors import binding_error, warn
from gauge_optax.frozen import frozen_leaves, require_still_frozen, said_to_be_frozen, zero_frozen
from gauge_optax.gauges.bound import bound, require_nonzero_norms
from gauge_optax.gauges.gauge import Gauge, Gauges, Product, product
from gauge_optax.gauges.unread import heads_without_frame
from gauge_optax.linalg import matmul, transpose
from gauge_optax.optimizers.rest import resting
from gauge_optax.parts.constants import ReadShift
from gauge_optax.parts.order import anchor_key
from gauge_optax.parts.part import Arrays, Part, changed
from gauge_optax.parts.sizes import Factor, Stretch
from gauge_optax.parts.stream import Stream
from gauge_optax.slice import Elements, Frame, Slice, Undone
from gauge_optax.transformation import (
    GaugeTransformation,
    at_once,
    cast_like,
    checked_inner,
    layout,
    once_per_tree,
    placeholder,
    require_rates,
    require_values,
    transformation,
    with_gauges_of,
    with_sharding_of,
)
from gauge_optax.wrapped import preflight_of
from gauge_optax.xla import varying_like


class QuotientState(NamedTuple):
    """State of `quotient`.

    Attributes:
      frame: the frame F that was read at `init`, a `slice.Frame`. Steps change it only for sizes in `Slice.following`.
        The anchor of such a size is stored more precisely (float32) than another of its leaves (bfloat16). If `fix`
        moved the anchor's growth to that leaf, it would be rounded away there, so that F takes it up instead.
      inner_state: state of the inner transformation, in slice coordinates.
      offset: with `pin=False`, the element B that maps the point θ̃ which `inner` sees to the slice point, θ̂ = B·θ̃: a
        dict, label of a size → element. With `pin=True`, `inner` sees the slice point itself, and the dict is empty.
    """

    frame: Frame | Any  # a placeholder if the tree has no leaves
    inner_state: optax.OptState
    offset: Elements | Any


def quotient(
    inner: optax.GradientTransformation,
    gauges: Gauges,
    *,
    hold: bool = True,
    pin: bool = True,
    rest: str = "anchor",
    frozen: Any = None,
) -> GaugeTransformation:
    """Runs any Optax transformation so that all weights that compute one function give the same training run.

    Args:
      inner: a whole optimizer, with its learning rate, decay, clipping and masks. The learning rate belongs inside:
        `quotient` moves the end of every step back to the slice, which is not linear in the step, so that a rate that
        multiplies its result does not have the effect of a rate in `inner`. `inner` sees bound leaves in float32
        (float64 with x64). If a gauge binds a leaf as `1+` (the network multiplies by 1 + the stored number), `inner`
        sees this sum, so that its decay pulls the sum towards zero.
      gauges: a gauge, or a sequence of gauges in any order. Steps of leaves that no gauge binds pass unchanged.
      hold: if True, every step loses the part that only rotates the basis of an attention head, and the part that
        only rotates the residual stream if the gauge of the stream has `hold=True`. If False, steps keep these parts.
      pin: if True, `inner` sees the weights on the slice, where anchors (the blocks from which sizes are read) have a
        constant size. If False, it sees anchors grow and shrink as they would if it ran alone. From small starts Adam
        trains better with True; Muon, whose steps all have one size, trains better with False
        (examples/results/starts.json), as does Adam in long runs at a constant rate without decay
        (docs/guides/muon.md).
      rest: which of the weights that compute one function are stored after a step. The choice changes no output of the
        network and no later step of `inner`. A scale gauge multiplies one side of a product and divides the other; its
        anchor is on one side. With "anchor", the anchor keeps its size: if a step of `inner` would double it, the other
        side is doubled in its place (for ReLU units, a scale of degree 1). The anchor grows only if another leaf of
        the scale is stored less precisely. With "balanced", both sides share the growth, see `optimizers/rest.py`.
      frozen: leaves that never change: a tree or prefix of booleans, or a callable from parameters to one. Leaves that
        `inner` never changes (`set_to_zero` in a partition, `freeze`, a learning rate of zero, a mask in `jnp.where`)
        need no mention. If the updates of a leaf are zero only because a scalar JAX array is zero, a warning names the
        leaf: the array may be a rate that later steps change. Name every leaf that must not move although `inner`
        would move it, as weight decay moves a leaf behind `stop_gradient`. A gauge that acts on a frozen leaf is read
        only at `init`, or left out, so that it never passes the change of one leaf on to another.

    Returns:
      The transformation. Its `update` needs `params`. Line searches take the extra arguments `grad` and `value_fn`,
      Sophia `obj_fn`, and SAM with `opaque_mode=True` `grad_fn`: pass the gradient at the weights θ and functions of θ,
      and `inner` gets the gradient at the point that it sees and functions of that point. All other extra arguments
      reach `inner` unchanged. A line search stores a value and a gradient, here those of the point that `inner` sees.
      The stored value is therefore set to infinity, at which `optax.value_and_grad_from_state` computes both anew at θ.

    Raises:
      ValueError: bindings that do not fit the tree, gauges that do not commute; `frozen` that does not fit the tree;
        an `inner` with gauges of its own that move the same entries as `gauges` (allowed are gauges that are in both
        lists; gauges here that only add, with gauges of `inner` that multiply or rotate; and gauges here that add or
        multiply, with gauges of `inner` that rotate); `update` without params, or with a state of other frozen leaves.

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
    return quotient_for("quotient", inner, gauges, hold=hold, pin=pin, rest=rest, frozen=frozen)


def quotient_for(
    name: str,
    inner: optax.GradientTransformation,
    gauges: Gauges,
    *,
    hold: bool = True,
    pin: bool = True,
    rest: str = "anchor",
    frozen: Any = None,
    never_changing: Callable[..., frozenset[str]] | None = None,
) -> GaugeTransformation:
    """Returns `quotient`, with messages that name the public function `name`.

    A caller that has called `leaves_that_never_change(name, inner, frozen)` passes the result as `never_changing`, so
    that `inner` is traced only once.
    """
    given, inner = inner, checked_inner(name, inner)
    group = product(gauges)
    never_changing = never_changing or leaves_that_never_change(name, inner, frozen)

    def update(updates: Any, state: QuotientState, params: Any, **extra: Any) -> tuple[Any, QuotientState]:
        s = bound(group.gauges, params, frozenset(state.frame.frozen)).slice
        f = s.checked(state.frame)
        if set(state.offset) != set({} if pin else no_offset(s)):
            raise _another_offset(name, s, state, pin)
        if extra or never_changing(params) != set(state.frame.frozen):
            said, usual = said_to_be_frozen(name, frozen, params), never_changing(params)
            require_still_frozen(name, inner, state.frame.frozen, said, usual, params, extra)
        entered = s.enter(f, s.values(params))  # θ̂ = F⁻¹·θ, and the way back
        seen = s.enter(state.offset, entered.point)  # what `inner` sees: θ̃ = B⁻¹·θ̂; with pin=True B is empty, θ̃ = θ̂
        gradient = slice_gradient(s, entered, updates)  # ĝ = Fᵀ·g
        seen_gradient = with_leaves(gradient, seen.pull(s.vectors(gradient)))
        extra = _extra_at(s, f, state.offset, entered, seen, params, extra) if extra else extra
        u, inner_state = inner.update(seen_gradient, state.inner_state, with_leaves(params, seen.point), **extra)
        u = zero_frozen(u, state.frame.frozen) if state.frame.frozen else u
        end = optax.tree.add(entered.point, seen.push(s.vectors(u)))
        read_elsewhere = [p for p, anchor, _ in s.constants if {b.path for b in anchor} - {*changed(p)}]
        left = [p.label for p in read_elsewhere if stays_where_inner_leads(p, s, pin)]
        growth, after = s.fix(end, state.frame.live, left)  # fix(θ̂ + B·u)
        step = optax.tree.sub(after, entered.point)
        step, backs = s.hold(entered.point, step) if hold else (step, {})  # removes the part that only rotates heads
        step, frame, offset = _with_growth(s, state, growth, backs, entered.point, step)
        out = with_leaves(u, cast_like(entered.push(step), updates, params))  # F·(θ̂′ − θ̂)
        out = zero_frozen(out, state.frame.frozen) if state.frame.frozen else out
        return out, QuotientState(frame, inner_state, offset)

    def init(params: optax.Params) -> QuotientState:
        require_values(name, params)
        bound(group.gauges, params)  # a binding that does not fit raises here, before `inner` is run
        unchanged = never_changing(params, anew=True)  # not from the cache: a user's mask may depend on values
        frame, point = frame_and_slice_point(name, group, params, unchanged)
        s = bound(group.gauges, params, unchanged).slice
        token = _OUTSIDE.set((*_OUTSIDE.get(), s))
        try:
            inner_state = inner.init(point)
        finally:
            _OUTSIDE.reset(token)
        offset = {} if pin else no_offset(s)
        offset = varying_like(offset, {label: frame.elements[label] for label in offset})
        return QuotientState(frame, inner_state, offset)

    def empty(params: Any) -> QuotientState:
        return QuotientState(placeholder(), inner.init(params), {} if pin else placeholder())

    def preflight(params: Any) -> Sequence[str | ValueError]:
        _, point = frame_and_slice_point(name, group, params, never_changing(params))
        return preflight_of(given)(point)

    def conversion(state: Any, params: Any) -> str:
        structure, wanted = (str(jax.tree.structure(x)) for x in (state, jax.eval_shape(inner.init, params)))
        if structure != wanted:
            return ""
        option = ("" if pin else ", pin=False") + ("" if frozen is None else ", frozen=frozen")
        return f"go.orbit.from_state(state, inner, gauges, params{option}) converts the state of the optimizer inside"

    of_both = with_gauges_of(inner, group.gauges)
    tx = transformation(name, init, update, QuotientState, empty, of_both, inner.rules, preflight, conversion)
    tx.inner = given
    return resting(name, tx, group, rest)


def leaves_that_never_change(
    name: str, inner: optax.GradientTransformation, frozen: Any = None
) -> Callable[..., frozenset[str]]:
    """Returns a function with a cache: params → paths of the leaves that `frozen` names or that `inner` never changes.
    """

    @once_per_tree
    def never_changing(params: Any) -> frozenset[str]:
        said = said_to_be_frozen(name, frozen, params)
        return said | frozen_leaves(name, inner, params, said=frozen is not None, masks=name == "quotient")

    return never_changing


# The slices of the `quotient`s whose `inner` is being initialized, in this thread alone.
_OUTSIDE: contextvars.ContextVar[tuple[Slice, ...]] = contextvars.ContextVar("outside", default=())


def require_first_outside(name: str, inside: Slice, *, again: bool = True, remedy: str = "") -> None:
    """Raises ValueError if a `quotient` around a transformation has gauges that cannot be undone before those inside.

    The `init` of the transformation inside calls it; `Slice.require_first` states the rule.

    Args:
      name: the public function that made the transformation inside, for messages.
      inside: the slice of the transformation inside.
      again: whether a gauge may be both in the quotient's list and in that of the transformation inside.
      remedy: what to write instead, for the message; by default one quotient with both lists.
    """
    for outside in _OUTSIDE.get():
        outside.require_first(name, inside, again, remedy or "write one go.quotient(optimizer, gauges) with both lists")


def group_of(name: str, learning_rate: Any, gauges: Any) -> Product:
    """The product of the gauges. Raises ValueError where the first two arguments are swapped."""
    require_rate_first(name, learning_rate, gauges)
    return product(gauges)


def require_rate_first(name: str, learning_rate: Any, gauges: Any) -> None:
    """Raises ValueError if `learning_rate` is no rate, or is the second argument, gauges or a report."""
    if isinstance(learning_rate, Gauge | list | tuple) or hasattr(learning_rate, "gauges"):
        rate = repr(gauges) if isinstance(gauges, int | float) else "learning_rate"
        report = hasattr(learning_rate, "gauges")
        what = "report" if report and name == "max_norm_muon" else "report.gauges" if report else "gauges"
        raise binding_error(
            name, "learning_rate and gauges are swapped", f"{name}({'report' if report else 'gauges'}, {rate})",
            f"{name}(learning_rate, {what})", f"write go.{name}({rate}, {what})")
    require_rates(name, learning_rate=learning_rate)


def slice_gradient(s: Slice, entered: Undone, updates: Any, without_constants: bool = True) -> Any:
    """The slice gradient ĝ = Fᵀ·g as a tree, without roundoff in entries that are zero by invariance.

    Entries that are zero for every invariant loss, up to roundoff, are set to zero. If a gauge rotates the residual
    stream, the gradients of the norms' scales are computed from other entries of ĝ: docs/design.md §3 explains why.

    Args:
      s: the slice.
      entered: the slice point, with the maps `pull` and `push` at it.
      updates: the gradient g at the stored weights, a tree.
      without_constants: if True, removes the part of ĝ along constants. An invariant loss has none up to roundoff, but
        a loss with a penalty on weights does.
    """
    gradient = s.quiet(entered.point, entered.pull(s.vectors(updates)), without_constants)
    return s.without_roundoff(entered.point, with_leaves(updates, gradient))


def no_offset(s: Slice) -> Elements:
    """The offset before the first step with `pin=False`: label → identity, for every size that `fix` undoes.

    Sizes whose anchor must stay 1 for `inner` even with `pin=False` (`pinned_by`) are left out.
    """
    pinned = {anchor_key((scale,)) for part in s.parts for scale in pinned_by(part)}
    kept = (x for x in s.sizes if x.part.label not in s.not_fixed and anchor_key(x.anchor) not in pinned)
    return {part.label: part.identity() for part, _, _ in kept}


@functools.singledispatch
def pinned_by(part: Part[Any]) -> tuple[Block, ...]:
    """The anchors that must stay 1 for `inner`, even with `pin=False`, because of this part; by default there are none.
    """
    return ()


@pinned_by.register
def _scales_on_a_held_stream(part: Stream) -> tuple[Block, ...]:
    """The norms' scales through which the gauge of the residual stream acts, if that gauge has `hold=True`.

    `hold` turns the stream back by a rotation R. With `pin=False`, `inner` must see the end of its own step turned by
    R. A norm's scale with entries other than 1 does not commute with R, so that `inner` would see other weights.
    """
    return part.passes if part.held else ()


def _another_offset(name: str, s: Slice, state: QuotientState, pin: bool) -> ValueError:
    """The error for a state made with another `pin`, or with another `hold` of a gauge."""
    wanted = ", ".join(sorted({} if pin else no_offset(s))) or "nothing"
    if not pin and state.offset:
        return binding_error(
            name,
            "a state made with another `hold` of residual_rotation",
            f"an offset of {', '.join(sorted(state.offset))}",
            f"an offset of {wanted}",
            "write hold=True or hold=False in residual_rotation as it was when the state was made",
        )
    made, wanted = ("False", "True") if pin else ("True", "False")
    return binding_error(
        name,
        f"a state made with pin={made}",
        f"an offset of {', '.join(sorted(state.offset)) or 'nothing'}",
        f"a state of pin={wanted}",
        f"write {name}(..., pin={made}), or convert a plain state by go.orbit.from_state(..., pin={wanted})",
    )


def _with_growth(
    s: Slice, state: QuotientState, growth: Elements, backs: Mapping[Any, Any], point: Arrays, step: Arrays
) -> tuple[Arrays, Frame, Elements]:
    """Returns the step on the slice, the new frame and the new offset, given the growth that `fix` has removed.

    The step of `inner` led to e·θ̂′. Then `fix` removed the element e (`growth`), which left θ̂′. For a size in
    `Slice.following`, the stored anchor keeps this growth: the stored step is F·(e·θ̂′ − θ̂), and F becomes F·e. This
    changes neither the function nor what `inner` sees. If F's element leaves the range from 2⁻⁸ to 2⁸, the anchor
    passes powers of two on to the other leaves, without roundoff.

    With `pin=False`, `inner` must see its own result θ̃ + u at the next step. Since θ̂ + B·u = e·θ̂′, this result is
    B⁻¹·e·θ̂′ = (e⁻¹·B)⁻¹·θ̂′, so that the offset becomes e⁻¹·B. If `hold` has turned θ̂′ back by a rotation R, e and B
    are turned in the same way, and `inner` sees its own result turned by R.
    """
    elements, offset = dict(state.frame.elements), dict(state.offset)
    for part, _, _ in s.sizes:
        name = part.label
        if name not in s.following and name not in offset:
            continue
        grown = turned_with(part, growth[name], backs)
        if name in s.following:
            total = part.compose(elements[name], grown)
            back = carried_back(part, total)
            elements[name] = part.compose(total, back)
            step = optax.tree.sub(part.act(part.compose(grown, back), optax.tree.add(point, step)), point)
        if name in offset:
            before = turned_with(part, offset[name], backs)
            offset[name] = kept_in_range(part, part.compose(part.inverse(grown), before))
    return step, state.frame._replace(elements=elements), offset


@functools.singledispatch
def stays_where_inner_leads(part: Part[Any], s: Slice, pin: bool) -> bool:
    """Whether steps of `inner` may change what a constant reads: it is then undone at `init`, but not after each step.

    By default they may not. The function is called only for constants that are read from a leaf they do not change.
    """
    return False


@stays_where_inner_leads.register
def _divided_by_a_scale(part: ReadShift, s: Slice, pin: bool) -> bool:
    """True if γ, the norm's scale that divides the constant, is not 1 where `inner` sees it.

    γ may then be near 0, and undoing the constant would move the kernel behind the norm by much more than a step. That
    move changes no output at the present γ, but it does as soon as the next step changes γ.
    """
    at_one = {anchor_key(anchor) for _, anchor, _ in s.sizes} if pin else set()
    return bool(part.scale) and anchor_key(part.scale) not in at_one


@functools.singledispatch
def turned_with(part: Part[Any], e: Any, backs: Mapping[Any, Any]) -> Any:
    """The element of a size after `hold` has turned the point back; by default unchanged: it commutes with rotations.

    Args:
      part: a size.
      e: its element before.
      backs: turn → what turned the end point back, as `Slice.hold` returns it.
    """
    return e


@turned_with.register
def _in_the_turned_basis(part: Stretch, e: jax.Array, backs: Mapping[Any, Any]) -> jax.Array:
    """R⁻¹·S·R and its inverse, for the rotation R of the same rows; `backs` contains R − 1."""
    for turn, back in backs.items():
        if {*turn.blocks} == {*part.blocks}:
            r = back[..., None, :, :] + jnp.eye(part.size, dtype=back.dtype)
            return matmul(matmul(transpose(r), e), r)
    return e


@functools.singledispatch
def kept_in_range(part: Part[Any], e: Any) -> Any:
    """An element of the offset, kept where float32 can invert and compose it for ever; by default unchanged."""
    return e


@kept_in_range.register
def _within_powers_of_two(part: Factor, e: jax.Array) -> jax.Array:
    """α, with |α| between 2⁻³⁰ and 2³⁰.

    If a channel decays and has no gradients, α would grow for ever. A kernel's entry between two such channels is
    multiplied by the numbers of both, which would overflow. With the bound, `inner` sees such a channel shrink to 1e-9
    of its size and not to zero. The difference is far below a step.
    """
    size = jnp.clip(jnp.abs(e), 2.0**-30, 2.0**30)
    return jnp.where(e < 0, -size, size)


@kept_in_range.register
def _with_an_exact_inverse(part: Stretch, e: jax.Array) -> jax.Array:
    """The pair (S, S⁻¹) after one step of Newton's method for S⁻¹: without it, roundoff would accumulate."""
    s, s_inverse = jnp.unstack(e, axis=-3)
    error = jnp.eye(part.size, dtype=e.dtype) - matmul(s, s_inverse)
    return jnp.stack([s, s_inverse + matmul(s_inverse, error)], -3)


@functools.singledispatch
def carried_back(part: Part[Any], e: Any) -> Any:
    """The element that brings a stored anchor nearer to its size on the slice if its element e is far from 1.

    By default it is the identity. The stored anchor of a size in `Slice.following` keeps the growth of its channel, and
    the optimizer, which sees the anchor on the slice, never undoes it. Without this element, the anchor would shrink
    for ever under decay, and the other leaves would grow.
    """
    return part.identity()


@carried_back.register
def _by_a_power_of_two(part: Factor, e: jax.Array) -> jax.Array:
    """2 or ½ for channels with |e| outside the range from 2⁻⁸ to 2⁸, else 1. Powers of two make no roundoff."""
    size = jnp.abs(e)
    return jnp.where(size < 2.0**-8, 2.0, jnp.where(size > 2.0**8, 0.5, 1.0)).astype(e.dtype)


def frame_and_slice_point(
    name: str, group: Product, params: Any, frozen: frozenset[str] = frozenset()
) -> tuple[Frame, Any]:
    """Returns the frame of the starting point, and its slice point as a tree with the sharding of `params`.

    Args:
      name: name of the transformation, for messages.
      group: the product of the gauges.
      params: the starting point.
      frozen: paths of leaves that never change.

    Warns:
      UserWarning: heads from which no frame can be read, such as padded heads of `head_linear`.

    Raises:
      ValueError: leaves that have no values, as in a tree of shapes; a gauge whose moves depend on a norm's scale
        (`residual_rotation`), if the list has no `norm_scale` of that norm or if the norm's scale is zero.
    """
    require_values(name, params)
    s, sharding = bound(group.gauges, params, frozen).slice, layout(params)
    s.check_norms()
    require_first_outside(name, s)
    require_nonzero_norms(name, s, leaves_by_path(params))
    with sharding.left_open():
        stored = sharding.drop(params)
        leaves = leaves_by_path(stored)
        frame, entered = at_once(_read_and_entered, (s,), {path: leaves[path] for path in s.added})
        point = with_leaves(stored, entered)
        but = "these heads train as if no gauge bound them"
        for sentence in heads_without_frame(name, s, frame.elements, leaves, but):
            warn(sentence)
    frame = sharding.restore(frame)._replace(frozen=dict.fromkeys(sorted(frozen), ()))
    return frame, with_sharding_of(params, sharding.restore(point, like=params))


def _read_and_entered(s: Slice, leaves: Any) -> tuple[Frame, Arrays]:
    values = s.values(leaves)
    frame = s.read(values)
    return frame, s.enter(frame.elements, values).point


def _seen_gradient(s: Slice, entered: Undone, seen: Undone, updates: Any) -> Any:
    """The gradient at the point that `inner` sees, a tree, from the gradient `updates` at the stored weights."""
    gradient = slice_gradient(s, entered, updates)  # ĝ = Fᵀ·g
    return with_leaves(gradient, seen.pull(s.vectors(gradient)))


def _extra_at(
    s: Slice, f: Elements, offset: Elements, entered: Undone, seen: Undone, params: Any, extra: dict[str, Any]
) -> dict[str, Any]:
    """The extra arguments, with those that belong to the weights θ replaced by those of the point that `inner` sees.

    They are `grad` and `value_fn` of line searches, `obj_fn` of Sophia, and `grad_fn` of SAM.
    """
    if extra.get("grad") is not None:
        extra = extra | {"grad": _seen_gradient(s, entered, seen, extra["grad"])}

    def left(point: Any) -> Arrays:
        return entered.leave(seen.leave(s.vectors(point)))

    def at_stored(function: Any, point: Any, values: Arrays, *args: Any, **kwargs: Any) -> Any:
        stored = {path: x - s.added[path] for path, x in values.items()}
        return function(with_leaves(point, cast_like(stored, params)), *args, **kwargs)

    def of_seen_point(function: Any, point: Any, /, *args: Any, **kwargs: Any) -> Any:
        return at_stored(function, point, left(point), *args, **kwargs)

    def gradient_of_seen_point(function: Any, point: Any, /, *args: Any, **kwargs: Any) -> Any:
        values = left(point)
        there = s.enter(f, values)
        gradient = at_stored(function, point, values, *args, **kwargs)
        return _seen_gradient(s, there, s.enter(offset, there.point), gradient)

    ways = {"value_fn": of_seen_point, "obj_fn": of_seen_point, "grad_fn": gradient_of_seen_point}
    given = {key: way for key, way in ways.items() if extra.get(key) is not None}
    return extra | {key: functools.partial(way, extra[key]) for key, way in given.items()}
