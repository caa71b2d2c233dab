"""Controls the product of the sizes of both sides of a scale gauge, which the gauge itself does not change.

A gauge such as `rescale` or `multiplier_balance` multiplies one side by a factor and divides the other by it, so that
the product of their root mean squares stays. Usually weight decay limits that product. The wrapper here multiplies both
sides by one factor instead. Their ratio, which is the gauge's coordinate, stays, and their product changes. This
changes the function, on purpose.
Reference: GaugeFix-LRM §4.4 and §5, which names it as future work.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import Axes, overlap
from gauge_optax.errors import binding_error, counted, kind_of
from gauge_optax.frozen import beside_others, frozen_leaves, require_still_frozen
from gauge_optax.gauges.balance import log_sizes
from gauge_optax.gauges.gauge import BlockGauge, Element, Gauge, Gauges, product
from gauge_optax.gauges.scale import keeps_product, scale_invariant
from gauge_optax.states.fix import chords
from gauge_optax.states.moves import Move, MovingPart
from gauge_optax.states.transport import ON_UNKNOWN, transported_state
from gauge_optax.transformation import (
    GaugeTransformation,
    checked_inner,
    in_dtype_of,
    once_per_tree,
    placeholder,
    require_choice,
    require_gauges_of_state,
    stepped,
    transformation,
    with_gauges_of,
)
from gauge_optax.wrapped import preflight_of, walk

_NAME = "hold_products"
KINDS = ("init", "cap", "decay")


class HeldProducts(NamedTuple):
    """The products that `kind="init"` keeps.

    Attributes:
      logs: one entry per gauge. The key has the paths of the gauge's leaves, joined by " + ". The value is
        log(s_up·s_down) at `init`, with the root mean squares s of both sides, shaped like the gauge's element.
    """

    logs: Any


class HoldProductsState(NamedTuple):
    """State of `hold_products`.

    Attributes:
      inner_state: the state of the optimizer inside.
      sizes: a `HeldProducts`; () unless `kind` is "init".
      frozen: path → (), for every leaf that the optimizer inside never changes. A copy of a gauge (the gauge in one
        layer, for example) with such a leaf is not changed by this wrapper.
    """

    inner_state: Any
    sizes: Any
    frozen: dict[str, tuple[()]] = {}  # noqa: RUF012  a NamedTuple's default; nobody writes to it


@dataclasses.dataclass(frozen=True, eq=False)
class _OneFactor(Move):
    """The move that multiplies both sides by one factor, in the form that `transport` needs to move a state.

    Frames and moments need different elements. The frame of a `quotient` inside holds sizes of the first side alone. So
    it moves as if the gauge itself had multiplied the first side by the factor (and divided the second side): this is
    the move of the inherited `parts`. Moments belong to both sides, and move by `actual`.

    Attributes:
      actual: gauges that multiply both sides by the factor, and the blocks of `alone` by its square.
    """

    same_list: ClassVar[str] = (
        "put hold_products inside: go.quotient(go.orbit.hold_products(optimizer, scales, ...), gauges), where the "
        "optimizer has no gauges of its own"
    )

    actual: tuple[MovingPart, ...]

    @property
    def on_vectors(self) -> tuple[MovingPart, ...]:
        return self.actual


@dataclasses.dataclass(frozen=True, eq=False)
class _Capped:
    """The gauges of one `hold_products` with kind="cap", whose factors the argument `max_logits` may decide.

    `hold_products` may be nested. The object is a variable of `update`, so that an outer wrapper can find it there by
    `walk` and knows how many entries of `max_logits` belong to the wrapper inside.

    Attributes:
      gauges: the gauges of that wrapper. Wrappers of other kinds use no `max_logits` and pass all of them on.
    """

    gauges: tuple[Any, ...]

    def split(self, max_logits: Any, inner: Any, params: Any) -> tuple[Sequence[Any], tuple[Any, ...]]:
        """Splits `max_logits`: one entry per gauge of this wrapper, and the entries for wrappers inside `inner`.

        An entry is None if the gauge's product is bounded and not its logits. Raises ValueError unless every gauge,
        here and in `inner`, has one entry, and the entry has the gauge's channels.
        """
        inside: list[_Capped] = []

        def keep(thing: Any) -> bool:
            inside.extend([thing] if isinstance(thing, _Capped) else ())
            return isinstance(thing, _Capped)

        walk(inner, keep)
        every = [*self.gauges, *(gauge for held in inside for gauge in held.gauges)]
        entries = (max_logits,) if len(every) == 1 and isinstance(max_logits, Mapping) else max_logits
        if not isinstance(entries, tuple | list) or len(entries) != len(every):
            names = ", ".join(f"{gauge.name} of '{gauge.specs[0].pattern}'" for gauge in every)
            found = counted(len(entries), "entry", "entries") if isinstance(entries, tuple | list) else kind_of(entries)
            typed = ", ".join([_typed(every[0], params), *["None"] * (len(every) - 1)])
            raise binding_error(
                _NAME, "max_logits that do not tell their gauges", found, f"one entry for each of {names}",
                f"write max_logits=({typed}), in this order, with None where the product is bounded"
                if len(every) > 1 else f"write max_logits={typed}",
            )
        for gauge, entry in zip(self.gauges, entries, strict=False):
            (copies,) = gauge._bound(params).copies
            expected = {copy.key: copy.shape for copy in copies}
            actual = {key: jnp.shape(x) for key, x in entry.items()} if isinstance(entry, Mapping) else {}
            if entry is not None and actual != expected:
                raise binding_error(
                    _NAME, f"max_logits of other channels than {gauge.name} of '{gauge.specs[0].pattern}'",
                    f"shapes {actual}" if actual else kind_of(entry),
                    f"shapes {expected}, the largest logit of every channel",
                    f"write max_logits={_typed(gauge, params)}, where largest is jnp.max(logits, axes) over all axes "
                    "but the channels; with several gauges, one entry each, the outermost wrapper's first",
                )
        own = [None if entry is None else dict(entry) for entry in entries[: len(self.gauges)]]
        return own, tuple(entries[len(self.gauges) :])


def hold_products(
    inner: optax.GradientTransformation,
    gauges: Gauges,
    kind: str = "init",
    *,
    cap: float | jax.Array | None = None,
    decay: float | jax.Array | None = None,
    alone: Mapping[str, Axes] | None = None,
    transport: bool = True,
    on_unknown: str = "error",
) -> GaugeTransformation:
    r"""Wraps an optimizer: after its step both sides of every scale are multiplied by one factor.

    .. math::
      \theta' = \theta + u(\theta), \qquad (up, down)_{new} = \sqrt{p / (s_{up} s_{down})} \cdot (up, down)',

    per channel. Here s are the root mean squares of both sides of θ', and p is the product that `kind` asks for. If a
    side of a channel is zero before the step, after it or at `init`, the factor is 1. The products are set at every
    step, also if the wrapper is inside `gauge_fix(every=n)`.

    Args:
      inner: a whole optimizer, with its learning rate. If it never changes some leaf, each copy of a gauge (for example
        the gauge in one layer) with that leaf has the factor 1.
      gauges: `rescale` of degree 1, `norm_scale` or `multiplier_balance`, one or a sequence; no two may share a leaf.
      kind: what the product of a channel becomes. "init": what it was at `init`. "cap": a number below `cap`, by a
        smooth bound that changes nothing far below it. "decay": (1 − `decay`) times the product after the step.
      cap: the bound, a positive number. A product above it at the start is below it after one step. If `update` is
        called with `max_logits=`, the bound is on attention logits in place of products: a smooth QK-clip. `max_logits`
        is the largest logit of each channel at `params`, shaped like the gauge's element. A channel whose largest logit
        is infinite or NaN is left as it is. With several gauges, in one wrapper or in nested wrappers of kind "cap",
        `max_logits` is a tuple with an entry per gauge, the outermost wrapper's gauges first. The entry of a gauge is
        None if its product is to be bounded and not its logits.
      decay: the share that the product loses in a step, a number between 0 and 1.
      alone: path → axes of further blocks, with the gauge's named axes and `sizes`. These blocks are multiplied by the
        square of the factor, because they have no second side that could take half of it. An example is latent
        attention: all heads share the rotary key, so that only the rotary queries of a head can shrink. `alone` needs
        one gauge, kind="cap" and `max_logits`.
      transport: whether the moments of `inner` are moved by the same factors, as `gauge_fix` moves them (although here
        the function changes). In a `quotient` inside, only the frame moves, and the frame has no element for the blocks
        of `alone`. With `alone`, therefore put `hold_products` inside the `quotient`.
      on_unknown: what to do with moments that cannot move along; see `transport`.

    Returns:
      The optimizer; `update` needs `params`, and its updates are differences of parameters.

    Raises:
      ValueError: an `inner` that is no transformation; an unknown `kind` or `on_unknown`; "cap" without `cap`, "decay"
        without `decay`; a gauge without two sides of degree 1; `alone` with several gauges or a kind other than "cap";
        at `init`, two gauges on one leaf, gauges that do not fit the parameters, `alone` with other channels than its
        gauge or with entries that its gauge binds; `update` without params, with `max_logits` that do not fit the
        gauges, or with `alone` and without `max_logits`.

    >>> gauge = go.multiplier_balance({"query": "head _"}, {"key": "head _"})
    >>> params = {"query": jnp.full((1, 3), 4.0), "key": jnp.full((1, 3), 1.0)}
    >>> tx = go.orbit.gauge_fix(
    ...     go.orbit.hold_products(optax.sgd(0.0), gauge, "decay", decay=0.75), gauge
    ... )
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> # The product falls from 4 to 1, and `gauge_fix` balances the rest.
    >>> moved = optax.apply_updates(params, updates)
    >>> moved["query"].round(3).tolist(), moved["key"].round(3).tolist()
    ([[1.0, 1.0, 1.0]], [[1.0, 1.0, 1.0]])

    Reference: GaugeFix-LRM §5; for QK-clip and `alone`, Kimi K2 (arXiv:2507.20534), §2.1. Deviation: GaugeFix-LRM
      leaves the product to the optimizer; Kimi K2 clips, where the bound here is smooth.
    """
    require_choice(_NAME, "kind", kind, KINDS)
    require_choice(_NAME, "on_unknown", on_unknown, ON_UNKNOWN)
    group, given, inner = product(gauges), inner, checked_inner(_NAME, inner)
    _check(kind, cap, decay, group.gauges)
    squared = None if alone is None else _squared(kind, group.gauges, alone)
    capped = _Capped(group.gauges) if kind == "cap" else None

    @once_per_tree
    def never_changing(params: Any) -> frozenset[str]:
        return frozen_leaves(_NAME, inner, params)

    def init(params: optax.Params) -> HoldProductsState:
        gauge_of: dict[str, str] = {}
        for part in group.gauges:
            for path in part._bound(params).slice.added:
                # On a common leaf, the factor for one gauge would change the product of the other gauge.
                if path in gauge_of:
                    raise binding_error(
                        _NAME, f"two gauges on one leaf, '{path}'", f"{gauge_of[path]} and {part.name}",
                        "one gauge per leaf", "give hold_products only the gauge whose product is meant",
                    )
                gauge_of[path] = part.name
        if squared is not None:
            _require_channels(group.gauges[0], squared, params)
        logs = _logs(group.gauges, params)
        frozen = dict.fromkeys(sorted(beside_others(never_changing(params, anew=True), params)), ())
        return HoldProductsState(inner.init(params), HeldProducts(logs) if kind == "init" else (), frozen)

    def update(updates: Any, state: HoldProductsState, params: Any, **extra: Any) -> tuple[Any, HoldProductsState]:
        max_logits: Sequence[Any] = [None] * len(group.gauges)
        if kind == "init":
            stored = state.sizes.logs if isinstance(state.sizes, HeldProducts) else {}  # {}: a state of another `kind`
            require_gauges_of_state(_NAME, stored, jax.eval_shape(lambda: _logs(group.gauges, params)))
        if capped is not None and extra.get("max_logits") is not None:
            max_logits, further = capped.split(extra.pop("max_logits"), inner, params)
            extra |= {"max_logits": further} if further else {}
        if squared is not None and max_logits[0] is None:
            typed = _typed(group.gauges[0], params)
            raise binding_error(
                _NAME, "alone= without logits", "update without max_logits", "the largest logit of every channel",
                f"write tx.update(grads, state, params, max_logits={typed}); with a cap around this one, "
                f"max_logits=(None, {typed})",
            )
        keeping = "; tx.init(params)._replace(inner_state=state.inner_state) keeps the moments"
        require_still_frozen(_NAME, inner, state.frozen, (), never_changing(params), params, extra, keeping)
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra)
        for number, part in enumerate(group.gauges):
            after = stepped(part, params, updates)
            before_logs, after_logs = log_products(part, params), log_products(part, after)
            # By key and not by position: a dict that passes through `jit` comes back sorted by its keys.
            init_logs = state.sizes.logs[_label(part, params)] if kind == "init" else after_logs
            if max_logits[number] is not None:
                # Logits of the new parameters are not known before the next forward pass. Here they are taken to grow
                # by the factor by which the product grew.
                growth = jax.tree.map(jnp.subtract, after_logs, before_logs)
                # They may be in bfloat16, whose logs would be too coarse to keep the bound.
                largest = {key: jnp.asarray(x, growth[key].dtype) for key, x in max_logits[number].items()}
                before_logs = {key: jnp.log(jnp.maximum(x, 0.0)) for key, x in largest.items()}
                after_logs = jax.tree.map(jnp.add, before_logs, growth)
                init_logs = after_logs
            factors = jax.tree.map(functools.partial(_factor, kind, cap, decay), before_logs, after_logs, init_logs)
            for key in _with_leaf_of(state.frozen, [part, *([] if squared is None else [squared])], params):
                factors[key] = jnp.zeros_like(factors[key])
            moves: list[tuple[Gauge, Element]] = [(_both_sides(part), factors)]
            if squared is not None:
                moves.append((squared, jax.tree.map(lambda x: 2.0 * x, factors)))
            moving, element = product([gauge for gauge, _ in moves]), tuple(x for _, x in moves)
            moved = chords(moving, element, params, stepped(moving, params, updates))
            kept = {path: u for path, u in moved.items() if path not in state.frozen}
            updates = in_dtype_of(updates, kept, params)
            if transport:
                elements = [factors if gauge is part else gauge.identity(params) for gauge in group.gauges]
                # The effect is "diagonal", because all gauges that are admitted here are scales.
                parts = tuple(MovingPart(*pair, "diagonal") for pair in zip(group.gauges, elements, strict=True))
                actual = tuple(MovingPart(gauge, x, "diagonal") for gauge, x in moves)
                move = _OneFactor(parts, params, on_unknown, actual)
                inner_state = transported_state(move, inner_state)
        return updates, HoldProductsState(inner_state, state.sizes, state.frozen)

    def empty(params: Any) -> HoldProductsState:
        return HoldProductsState(inner.init(params), HeldProducts(placeholder()) if kind == "init" else ())

    held = with_gauges_of(inner, group.gauges)
    return transformation(
        _NAME, init, update, HoldProductsState, empty, gauges=held, preflight=preflight_of(given)
    )


def _typed(gauge: Gauge, params: Any) -> str:
    """How to write `max_logits` for a gauge: one entry per copy, of which the first four are shown."""
    (copies,) = gauge._bound(params).copies
    entries = [f"{copy.key!r}: largest" for copy in copies]
    return "{" + ", ".join([*entries[:4], *["..."] * (len(entries) > 4)]) + "}"


def log_products(gauge: Gauge, params: Any) -> Element:
    """log s_up + log s_down per channel, for the root mean squares s of both sides; −∞ where a side is zero."""
    b = gauge._bound(params)
    values, (copies,) = b.slice.values(params), b.copies
    return {copy.key: sum(log_sizes(copy.parts[0], values)) for copy in copies}


def _with_leaf_of(frozen: Collection[str], gauges: Sequence[Gauge], params: Any) -> set[str]:
    """The keys of copies that move a leaf of `frozen`."""
    copies = (copy for gauge in gauges if frozen for of_gauge in gauge._bound(params).copies for copy in of_gauge)
    return {copy.key for copy in copies if any(b.path in frozen for b in copy.blocks)}


def _logs(gauges: Sequence[Gauge], params: Any) -> dict[str, Element]:
    """What `HeldProducts` keeps."""
    return {_label(gauge, params): log_products(gauge, params) for gauge in gauges}


def _label(gauge: Gauge, params: Any) -> str:
    """The key of a gauge in `HeldProducts`. From it `transport` reads to which leaves a product belongs."""
    return " + ".join(gauge._bound(params).slice.added)


def _factor(
    kind: str, cap: Any, decay: Any, before_log: jax.Array, after_log: jax.Array, init_log: jax.Array
) -> jax.Array:
    """The log of the factor for each side, from the logs of products before the step, after it and at `init`."""
    # The log of a zero side is −∞. It is replaced by 0 before the arithmetic, because −∞ − (−∞) would be NaN.
    finite = jnp.isfinite(before_log) & jnp.isfinite(after_log) & jnp.isfinite(init_log)
    before_log, after_log, init_log = (jnp.where(finite, x, 0.0) for x in (before_log, after_log, init_log))
    if kind == "init":
        target_log = init_log
    elif kind == "decay":
        target_log = after_log + jnp.log1p(-jnp.asarray(decay, after_log.dtype))
    else:
        # Write the product as cap·σ(z), where σ is the logistic function. What the step adds to the log of the product
        # is added to z instead. Far below the bound, log(cap·σ(z)) ≈ z + log(cap), so that the product changes as
        # without a bound. No z makes cap·σ(z) larger than the cap. log σ and its inverse are computed by logaddexp and
        # expm1, which lose no digits near the bound.
        cap_log = jnp.log(jnp.asarray(cap, after_log.dtype))
        # A product at the bound or above it has no finite z. It is treated as if it were just below.
        excess = jnp.minimum(before_log - cap_log, -1e-3)
        z = excess - jnp.log(-jnp.expm1(excess)) + (after_log - before_log)
        target_log = cap_log - jnp.logaddexp(0.0, -z)
    # Both sides are multiplied by the factor, so that each takes half of the log of the product's change.
    return jnp.where(finite, 0.5 * (target_log - after_log), 0.0)


def _both_sides(gauge: Any) -> BlockGauge:
    """A gauge that multiplies both sides of `gauge` by one factor; its elements have the same keys and shapes."""
    blocks: dict[str, tuple[str, ...]] = {}
    for spec in gauge.specs:
        blocks[spec.pattern] = (*blocks.get(spec.pattern, ()), spec.axes)
    axes: dict[str, Axes] = {pattern: x[0] if len(x) == 1 else x for pattern, x in blocks.items()}
    return scale_invariant(axes, sizes=dict(gauge.sizes))


def _squared(kind: str, gauges: Sequence[Any], alone: Mapping[str, Axes]) -> BlockGauge:
    """A gauge that multiplies the blocks of `alone`. Raises ValueError if `kind` or the gauges do not allow `alone`."""
    if len(gauges) != 1:
        raise binding_error(
            _NAME, "alone= with several gauges", f"{len(gauges)} gauges", "one gauge, whose factor the blocks take",
            "nest two hold_products, each with its own gauge; if both are caps, write max_logits=(None, {'': largest})",
        )
    if kind != "cap":
        # The products do not contain the blocks of `alone`, but the logits depend on them. Without logits nothing would
        # bound these blocks, and they would drift.
        raise binding_error(
            _NAME, f"alone= with kind='{kind}'", repr(alone), "kind='cap', with max_logits at every update",
            "write kind='cap', or leave alone= out",
        )
    try:
        return scale_invariant(alone, sizes=dict(gauges[0].sizes))
    except (ValueError, TypeError, AttributeError) as error:
        raise _bad_alone(error, dict(gauges[0].sizes)) from error


def _bad_alone(error: Exception, lengths: Mapping[str, int]) -> ValueError:
    """The error for an `alone` that makes no gauge, with the lines of the error that says why.

    Args:
      error: what the gauge of the blocks raised.
      lengths: named axis → length, of the gauge whose factor the blocks take.
    """
    title, *lines = str(error).replace("scale_invariant", "alone=").splitlines()
    title = title.removeprefix("alone=: ")
    if len(lines) != 3 or title == "no blocks in 'up'":  # the error is not about a single block
        return binding_error(
            _NAME, "alone= that cannot be bound", title.removesuffix(" in 'up'"),
            "path → axes, as a gauge takes them",
            "write alone={'attn/q_b/kernel': '_ head _=128:192'}, with your path and range",
        )
    found, expected, remedy = (line.partition(":")[2].strip() for line in lines)
    if "sizes=" in remedy or "in sizes" in title:  # `alone` takes the sizes of the gauge
        remedy = f"write sizes={lengths} in the gauge of hold_products, and in alone= its named axes and no others"
    return binding_error(_NAME, f"alone= that cannot be bound: {title}", found, expected, remedy)


def _require_channels(gauge: Gauge, squared: Gauge, params: Any) -> None:
    """Raises ValueError unless both gauges have the same channels and share no entry of a leaf."""
    (copies,) = gauge._bound(params).copies
    try:
        (others,) = squared._bound(params).copies
    except ValueError as error:
        raise _bad_alone(error, dict(zip(copies[0].named, copies[0].shape, strict=True))) from error
    expected, actual = ({copy.key: (copy.named, copy.shape) for copy in x} for x in (copies, others))
    if expected != actual:
        raise binding_error(
            _NAME, "channels of alone= that are not those of its gauge", f"{actual}", f"{expected}",
            f"name the same axes, and write the same {{i}}, in alone= as in {gauge.name}",
        )
    blocks = [(a, b) for i in copies for a in i.blocks for k in others for b in k.blocks if a.path == b.path]
    if any(overlap(a, b) for a, b in blocks):
        raise binding_error(
            _NAME, f"entries of '{blocks[0][0].path}' in alone= and in {gauge.name}", "one entry with both factors",
            "every entry in one of the two", "give alone= a range of entries that the gauge leaves out",
        )


def _check(kind: str, cap: Any, decay: Any, gauges: Sequence[Gauge]) -> None:
    """Raises ValueError if `cap` or `decay` does not fit `kind`, or if a gauge has no two sides of one degree."""
    if kind == "cap" and not _between(cap, math.inf):
        raise binding_error(
            _NAME, "kind='cap' without a number", f"cap={cap!r}",
            "a positive number, the largest product of the root mean squares of a gauge's two sides", "write cap=10.0",
        )
    if kind == "decay" and not _between(decay, 1.0):
        raise binding_error(
            _NAME, "kind='decay' without a number", f"decay={decay!r}",
            "a number between 0 and 1, the share of that product of root mean squares that a step takes off",
            "write decay=1e-3",
        )
    if (kind != "cap" and cap is not None) or (kind != "decay" and decay is not None):
        raise binding_error(
            _NAME, f"a number that kind='{kind}' does not take", f"cap={cap!r}, decay={decay!r}",
            "cap= for 'cap' alone, decay= for 'decay' alone", "leave it out",
        )
    for gauge in gauges:
        if not keeps_product(gauge):
            raise binding_error(
                _NAME, "a gauge that has no product to hold", gauge.name,
                "rescale of degree 1, norm_scale or multiplier_balance",
                "give hold_products only gauges of these three kinds",
            )


def _between(number: Any, upper: float) -> bool:
    """Whether `number` is a scalar between 0 and `upper`. A tracer passes: `inject_hyperparams` traces numbers."""
    if isinstance(number, jax.core.Tracer):
        return True
    real = isinstance(number, int | float | jax.Array | np.ndarray | np.floating) and not jnp.ndim(number)
    return real and bool(0 < number < upper)
