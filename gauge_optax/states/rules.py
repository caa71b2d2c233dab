"""How states of this library move when weights move from θ to g·θ: in slice coordinates, only the frame F changes.

A state of `quotient` holds moments of the slice point, which is the same for θ and g·θ, and the frame F that maps the
slice point to the stored weights. The moments stay, and F becomes g·F. Other states have rules of their own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.errors import binding_error
from gauge_optax.gauges.bound import bound
from gauge_optax.linalg import matmul, transpose
from gauge_optax.optimizers.opposite_gram import two_sides
from gauge_optax.optimizers.rest import share
from gauge_optax.parts.part import Part
from gauge_optax.parts.sizes import Factor
from gauge_optax.slice import Elements, Frame
from gauge_optax.states.moves import Move

Outgoing = frozenset[str]
"""Paths of the leaves for which a transformation gets an update, because an earlier link of the chain has made one of
the gradient. For all other leaves it gets a gradient."""

Rule = Callable[[Move, Any, Outgoing], tuple[Any, Outgoing]]
"""(move, state, `Outgoing` for what enters the transformation) → (the state at g·θ, `Outgoing` for what leaves it)."""


def _opposite_gram(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Moves a state of inverse Gram matrices X, which map cotangents to tangents.

    If a head's left factor is multiplied by S and its right factor by S⁻ᵀ, X becomes Sᵀ·X·S for the left factor and
    S⁻¹·X·S⁻ᵀ for the right one. For the two sides of a scale, X is a number, and is multiplied by the square of the
    factor that multiplies the side.
    """
    after, inverses = outgoing | set(move.shapes), state.gauges
    if not hasattr(inverses, "linear"):  # with every=1 the state has no inverses
        return state, after
    b = move.group._bound(move.params)
    elements, (scales, matrices) = b.elements(move.element), two_sides(b.slice)
    if matrices and inverses.linear[matrices[0].label][0].ndim == len(matrices[0].shape) + 1:
        # X is diagonal here: the inverse of a Gram matrix's diagonal. After a change of basis it cannot be computed
        # from the old one. Age 0 makes the next update compute it from the weights.
        return state._replace(age=jnp.zeros_like(state.age)), after
    channels, linear = {}, {}
    for part in scales:
        alpha, (up, down) = elements[part.label], inverses.scales[part.label]
        channels[part.label] = up * jnp.square(alpha), down * jnp.square(part.down_factor(alpha))
    for part in matrices:
        matrix, inverse = jnp.unstack(elements[part.label], axis=-3)
        left, right = inverses.linear[part.label]
        moved_left = matmul(matmul(transpose(matrix), left), matrix)
        linear[part.label] = moved_left, matmul(matmul(inverse, right), transpose(inverse))
    return state._replace(gauges=type(inverses)(channels, linear)), after


def _framed(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Moves a state in slice coordinates: the element is composed with the frame, and nothing else changes."""
    # A retraction (its state has no `inner_state`) is a link of a chain that turns updates into updates, so that
    # `outgoing` stays. A wrapper of an optimizer, such as `quotient`, returns updates for all leaves.
    after = outgoing if not hasattr(state, "inner_state") else outgoing | set(move.shapes)
    if not isinstance(state.frame, Frame):  # the tree has no leaves
        return state, after
    elements = _moved_frame(move, type(state).__name__, state.frame)
    return state._replace(frame=state.frame._replace(elements=elements)), after


def _moved_frame(move: Move, name: str, frame: Frame) -> Elements:
    """Returns g·F. `name` is the class of the state that holds the frame F, for messages."""
    order = move.binders("permutation")
    if order:
        raise move.refuse(f"a {name}", next(iter(order.values())), "weights on the slice, which it renumbers",
                          "act on the weights alone, and call tx.init(params) there")
    # `Product.compose` does not take permutations. The frame has no element for them, so that they are left out.
    framed = tuple(part for part in move.parts if part.gauge._bound(move.params).slice.parts)
    move = dataclasses.replace(move, parts=framed)
    elements, b = frame.elements, bound(move.group.gauges, move.params, frozenset(frame.frozen))
    labels = [part.label for part in b.slice.parts]
    if set(elements) != set(labels):
        raise binding_error(
            "transport", f"a {name} of another list of gauges", f"a frame of {jax.tree.map(jnp.shape, elements)}",
            f"of {', '.join(labels)}, as the gauges given have",
            move.same_list,
        )
    moved = b.elements(move.group.compose(move.element, b.public(elements)))
    return {label: moved[label] for label in labels}


def _rested(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Moves a `RestedState`: the state of its `quotient` by `_framed`, and its log ratios by the change of log F."""
    inside, after = _framed(move, state.quotient, outgoing)
    if not isinstance(inside.frame, Frame):
        return state, after
    held = dict(state.held)
    for part, _, _ in bound(move.group.gauges, move.params, frozenset(inside.frame.frozen)).slice.sizes:
        if part.label in held:
            sizes = [jnp.log(jnp.abs(x.frame.elements[part.label])) for x in (inside, state.quotient)]
            held[part.label] += share(part) * (sizes[0] - sizes[1])
    return state._replace(quotient=inside, held=held), after


def _hyperball(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Keeps the radii, which are norms of stored weights. Raises ValueError if the move may change them.

    They cannot be reset, because radius 0 means that the weights are not held on a sphere.
    """
    radii = state.radius if isinstance(state.radius, dict) else {}
    binders = move.binders("diagonal", "permutation", "linear", "shift")
    moved = {path: name for path, name in binders.items() if path in radii}
    if moved and move.on_unknown != "keep":
        path, name = next(iter(moved.items()))
        raise move.refuse(
            f"HyperballState.radius of '{path}'", name, "radii of spheres, which the move changes",
            "write on_unknown='keep' to have the next step draw the weights back to their old spheres, or give "
            "go.norms.hyperball numbers as radii, or leave these leaves to one of the two",
        )
    return state, outgoing | set(radii)


@functools.singledispatch
def keeps_product(part: Part[Any]) -> bool:
    """Whether a part multiplies one side and divides the other by one number: the product of their sizes then stays."""
    return False


@keeps_product.register
def _keeps_product_of_sides(part: Factor) -> bool:
    return bool(part.down) and part.degree == 1


def _held_products(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Keeps products of `hold_products`. Raises ValueError if the move may change them, unless on_unknown="keep"."""
    for key, logs in state.logs.items() if isinstance(state.logs, dict) else ():
        leaves, shapes = set(key.split(" + ")), jax.tree.map(jnp.shape, logs)
        for part in move.with_effect("diagonal", "permutation", "orthogonal", "linear").parts:
            s = part.gauge._bound(move.params).slice
            trades = all(keeps_product(p) for p in (*s.parts, *s.free))
            keeps = set(s.added) == leaves and trades and jax.tree.map(jnp.shape, part.element) == shapes
            if set(s.added) & leaves and not keeps and move.on_unknown != "keep":
                raise move.refuse(
                    f"HoldProductsState.sizes of '{key}'", part.gauge.name, "products held, which the move changes",
                    "write on_unknown='keep' to have the next step bring them back to what they were at init, or leave "
                    "these leaves to one of the two",
                )
    return state, outgoing


# Every state of this library has a row, except those that only contain other states. The key is the name of its class:
# importing the class itself would be circular.
RULES: dict[str, Rule] = {
    "QuotientState": _framed,
    "RestedState": _rested,
    "GaugeRetractState": _framed,
    "ScaleByOppositeGramState": _opposite_gram,
    "AddGaugeDecayState": lambda move, state, outgoing: (state, outgoing),  # a count
    "HyperballState": _hyperball,
    "HeldProducts": _held_products,
}
