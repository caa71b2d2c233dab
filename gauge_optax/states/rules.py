"""How the states of this package move: what runs in slice coordinates holds invariants, and a frame F goes to g·F."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import binding_error
from gauge_optax.linalg import matmul, transpose
from gauge_optax.slice import Frame
from gauge_optax.states.moves import Move

Outgoing = frozenset[str]
"""Leaves that a preconditioner earlier in the chain has made updates of; on all others gradients come in."""

Rule = Callable[[Move, Any, Outgoing], tuple[Any, Outgoing]]
"""(move, state, outgoing before it) → (the state at g·θ, outgoing after it)."""


def _opposite_gram(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Kept inverses carry cotangents to tangents: S⁻¹·X·S⁻ᵀ, or Sᵀ·X·S of the left factor's."""
    after, kept = outgoing | set(move.shapes), state.gauges
    if not hasattr(kept, "linear"):  # nothing is kept between updates
        return state, after
    s = move.group._slice(move.params)
    elements = dict(zip(s.instances, s.from_elements(move.element), strict=True))
    sided = [i for i in s.instances if i.sides is not None]
    scales, matrices = [i for i in sided if i.log_step], [i for i in sided if not i.log_step]
    if matrices and kept.linear[0][0].ndim == len(matrices[0].shape) + 1:
        return state._replace(age=jnp.zeros_like(state.age)), after  # diagonals, which no change of basis keeps
    channels = tuple(
        tuple(x * jnp.square(i.factors(elements[i], side[0])) for side, x in zip(i.sides, pair, strict=True))
        for i, pair in zip(scales, kept.scales, strict=True)
    )
    linear = []
    for i, (left, right) in zip(matrices, kept.linear, strict=True):
        s_matrix, s_inverse = jnp.unstack(elements[i], axis=-3)
        linear.append((_conjugated(left, s_matrix), _conjugated(right, transpose(s_inverse))))
    return state._replace(gauges=type(kept)(channels, tuple(linear))), after


def _framed(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """What runs in slice coordinates: all that is inside sees invariants, the frame alone moves."""
    frame = state.frame
    # A retraction is given tangents and returns them; everything else makes updates of gradients.
    after = outgoing if not hasattr(state, "inner_state") else outgoing | set(move.shapes)
    if not isinstance(frame, Frame):  # of a tree without leaves
        return state, after
    s = move.group._slice(move.params)
    if set(frame.elements) != set(s.labels):
        shapes = jax.tree.map(jnp.shape, frame.elements)
        raise binding_error(
            "transport", f"a {type(state).__name__} of another list of gauges", f"a frame of {shapes}",
            f"of {', '.join(s.labels)}, as the gauges given have",
            "give transport the optimizer's own list of gauges, identity elements for what does not move, and give "
            "go.gauge_fix the same list as the optimizer inside it",
        )  # fmt: skip
    moved = move.group.compose(move.element, s.to_elements(s.elements(frame)))
    return state._replace(frame=s.frame(s.from_elements(moved), frame.live)), after


def _unmoved(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """A state of numbers."""
    return state, outgoing


def _hyperball(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Radii are norms of coordinates. They cannot be reset: a radius of zero would let go of the weights."""
    radii = state.radius if isinstance(state.radius, dict) else {}
    moved = {path: name for path, name in move.binders("diagonal", "linear", "shift").items() if path in radii}
    if moved and move.on_unknown != "keep":
        path, name = next(iter(moved.items()))
        raise move.refuse(
            f"HyperballState.radius of '{path}'", name, "radii of spheres, which the move changes",
            "write on_unknown='keep' to have the next step draw the weights back to their old spheres, or give "
            "go.hyperball numbers as radii, or leave these leaves to one of the two",
        )  # fmt: skip
    return state, outgoing | set(radii)


def _held_products(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """What trades a scale between the very sides whose product is held keeps it; what else moves them may not."""
    for key, logs in state.logs.items() if isinstance(state.logs, dict) else ():
        leaves, shapes = set(key.split(" + ")), jax.tree.map(jnp.shape, logs)
        for part in move.with_effect("diagonal", "orthogonal", "linear").parts:
            s = part.gauge._slice(move.params)
            trades = all(i.log_step and i.sides is not None and i.degree_of_decay == 1 for i in s.instances)
            keeps = set(s.added) == leaves and trades and jax.tree.map(jnp.shape, part.element) == shapes
            if set(s.added) & leaves and not keeps and move.on_unknown != "keep":
                raise move.refuse(
                    f"HoldProductsState.sizes of '{key}'", part.gauge.name, "products held, which the move changes",
                    "write on_unknown='keep' to have the next step bring them back to what they were at init, or leave "
                    "these leaves to one of the two",
                )  # fmt: skip
    return state, outgoing


# Every state of this package that holds more than numbers and other states has a row, by name: the optimizers that make
# them import this module.
RULES: dict[str, Rule] = {
    "QuotientState": _framed,
    "GaugeRetractState": _framed,
    "ScaleByOppositeGramState": _opposite_gram,
    "AddGaugeDecayState": _unmoved,
    "HyperballState": _hyperball,
    "HeldProducts": _held_products,
}


def _conjugated(matrix: jax.Array, turn: jax.Array) -> jax.Array:
    return matmul(matmul(transpose(turn), matrix), turn)
