"""The lift of any optimizer: it runs in one frame, chosen at the start, in which twins are the same weights.

At `init` one element F₀ takes a representative that does not depend on where θ₀ stands on its orbit to θ₀ itself: the
balanced one, its bases turned by a polar factor. The inner optimizer sees F₀⁻¹·θ and gradients carried along, for
ever; its update is carried back. Elementwise, factored, clipped: the inner optimizer may do what it likes, since twins
hand it the same numbers. DESIGN §1, §5.

Here: a frame fixed at `init`. Not here: optimizers in the frame of the current point (`quotient`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import binding_error, is_empty
from gauge_optax.gauges._anchor import Fixed, compact_frame
from gauge_optax.gauges._moves import move_cotangent, move_tangent
from gauge_optax.gauges.base import Element, Gauges
from gauge_optax.gauges.product import Product, product
from gauge_optax.transforms._common import placeholder, require_choice, require_params


class EquivariantState(NamedTuple):
    """State of `equivariant`.

    Attributes:
      gauges: F₀, an element of the product.
      inner_state: of the inner transformation, in the frame.
    """

    gauges: Any
    inner_state: Any


def equivariant(
    inner: optax.GradientTransformation, gauges: Gauges, *, on_degenerate: str = "raise"
) -> optax.GradientTransformationExtraArgs:
    """Runs any transformation in a frame fixed at `init`: its trajectory no longer depends on the representative.

    The difference to `quotient_adamw` in one sentence: here the *trajectory* does not depend on which of many equal
    weights it started from, there every represented *step* depends on the represented point alone.

    Args:
      inner: an optimizer, or part of one.
      gauges: a gauge or a sequence of them, meaning their product.
      on_degenerate: "raise", or "identity" for heads that have no frame: less than full rank on all sides. Those are
        left in their own basis.

    Returns:
      A transformation; `update` needs `params`, and hands other arguments (`value`, `value_fn`) on as they are. Nothing
      is frozen: the inner optimizer moves along orbits as it would.

    Raises:
      ValueError: a head without a frame (when `init` is traced, which cannot raise, that head's frame is NaN);
        bindings that do not fit; `update` without params.

    >>> gauge = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
    >>> params = {"a": jnp.array([[2.0], [1.0]]), "b": jnp.array([[1.0, 3.0]])}
    >>> twin = gauge.act({"": jnp.array([[10.0]])}, params)
    >>> def step(tx, p):
    ...     grads = jax.grad(lambda p: jnp.sum(jnp.square(p["a"] @ p["b"])))(p)
    ...     p = optax.apply_updates(p, tx.update(grads, tx.init(p), p)[0])
    ...     return (p["a"] @ p["b"]).round(2).tolist()
    >>> step(optax.adam(0.1), params) == step(optax.adam(0.1), twin)
    False
    >>> tx = go.equivariant(optax.adam(0.1), gauge)
    >>> step(tx, params) == step(tx, twin)
    True

    Reference: DESIGN §5. A side that is zero (LoRA's B) leaves the frame to the other side.
    """
    require_choice("equivariant", "on_degenerate", on_degenerate, ("raise", "identity"))
    group, inner = product(gauges), optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> EquivariantState:
        if is_empty(params):
            return EquivariantState(placeholder(), inner.init(params))
        frame = starting_frame(group, params, on_degenerate)
        return EquivariantState(frame, inner.init(group.act(group.inverse(frame), params)))

    def update_fn(
        updates: optax.Updates, state: EquivariantState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, EquivariantState]:
        require_params("equivariant", params)
        frame = state.gauges
        undo = group.inverse(frame)
        framed = group.act(undo, params)
        step, inner_state = inner.update(
            move_cotangent(group, undo, params, updates), state.inner_state, framed, **extra
        )
        return move_tangent(group, frame, params, step), EquivariantState(frame, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def starting_frame(group: Product, params: optax.Params, on_degenerate: str) -> Element:
    """F₀ with F(g·θ) = g·F(θ): the balanced frame, then a rotation per head that fixes its basis.

    Args:
      group: the gauges.
      params: the point.
      on_degenerate: "raise" or "identity".

    Returns:
      The element that takes the canonical representative to `params`.
    """
    balanced = group.frame(params)
    compact, fixed = compact_frame(group, group.act(group.inverse(balanced), params))
    for path, heads in (own for part in fixed for own in part.values()):
        if on_degenerate == "raise" and not isinstance(heads, jax.core.Tracer) and not jnp.all(heads):
            raise _degenerate(path, int(jnp.sum(~heads)), heads.size)
    settled = (
        _settled(own, still if on_degenerate == "identity" else None, heads)
        for own, still, heads in zip(compact, group.identity(params), fixed, strict=True)
    )
    return group.compose(balanced, tuple(settled))


def _settled(compact: Element, still: Element | None, fixed: Mapping[str, Fixed]) -> Element:
    """A gauge's compact element with heads that have none replaced by `still`, or by NaN."""
    out = dict(compact)
    for key, (_, heads) in fixed.items():
        whole = heads.reshape(heads.shape + (1,) * (out[key].ndim - heads.ndim))
        out[key] = jnp.where(whole, out[key], jnp.nan if still is None else still[key])
    return out


def _degenerate(path: str, without: int, heads: int) -> ValueError:
    return binding_error(
        "equivariant",
        f"no frame at '{path}'",
        f"{without} of {heads} heads (or planes) have less than full rank on every side",
        "a starting point that fixes a basis of every head",
        "start from another initialisation, or write on_degenerate='identity'",
    )
