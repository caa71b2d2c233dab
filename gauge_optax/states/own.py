"""How the states of this package move: what runs in slice coordinates holds invariants, and a frame F ↦ g·F.

Here: one rule per state, and that a state and a list of gauges belong together. Not here: Optax's states (`transport`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import binding_error
from gauge_optax.gauges.rescale import keeps_product
from gauge_optax.linalg import matmul, transpose
from gauge_optax.optimizers._quotient import QuotientState
from gauge_optax.optimizers.decay import AddGaugeDecayState
from gauge_optax.optimizers.opposite_gram import OppositeInverses, ScaleByOppositeGramState
from gauge_optax.optimizers.products import HeldProducts
from gauge_optax.rotation.hyperball import HyperballState
from gauge_optax.slice import Frame, chart, framed
from gauge_optax.states.moves import Move
from gauge_optax.transforms.retract import GaugeRetractState

Outgoing = frozenset[str]
"""Leaves that a preconditioner earlier in the chain has made updates of; on all others gradients come in."""

Rule = Callable[[Move, Any, Outgoing], tuple[Any, Outgoing]]
"""(move, state, outgoing before it) → (the state at g·θ, outgoing after it)."""


def _opposite_gram(
    move: Move, state: ScaleByOppositeGramState, outgoing: Outgoing
) -> tuple[ScaleByOppositeGramState, Outgoing]:
    """Kept inverses carry cotangents to tangents: S⁻¹·X·S⁻ᵀ, or Sᵀ·X·S of the left factor's."""
    after, kept = outgoing | set(move.shapes), state.gauges
    if not isinstance(kept, OppositeInverses):
        return state, after
    logs = [(x, i.degree) for i, x in zip(move.bound.scales, move.logs, strict=True) if i.down]
    scales = [
        (up * jnp.exp(2.0 * x), down * jnp.exp(-2.0 * p * x))
        for (up, down), (x, p) in zip(kept.scales, logs, strict=True)
    ]
    if move.matrices and kept.linear[0][0].ndim != move.matrices[0].ndim:  # diagonals, which no change of basis keeps
        return state._replace(age=jnp.zeros_like(state.age)), after
    linear = [
        (_conjugated(left, s), _conjugated(right, transpose(jnp.linalg.inv(s))))
        for (left, right), s in zip(kept.linear, move.matrices, strict=True)
    ]
    return state._replace(gauges=OppositeInverses(tuple(scales), tuple(linear))), after


def _framed(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Of what runs in slice coordinates: all that is inside sees invariants, the frame alone moves."""
    frame = state.gauges
    after = outgoing if isinstance(state, GaugeRetractState) else outgoing | set(move.shapes)
    if not isinstance(frame, Frame):  # of a tree without leaves
        return state, after
    found, expected = (jax.tree.map(jnp.shape, element) for element in (frame.element, move.element))
    if found != expected:
        raise _mismatch(state, f"a frame of {found}", f"of {expected}, as the gauges given have")
    moved = framed(chart(move.group, move.params), move.group.compose(move.element, frame.element), frame.live)
    return state._replace(gauges=moved._replace(grown=frame.grown)), after


def _decay(move: Move, state: AddGaugeDecayState, outgoing: Outgoing) -> tuple[AddGaugeDecayState, Outgoing]:
    del move
    return state, outgoing


def _hyperball(move: Move, state: HyperballState, outgoing: Outgoing) -> tuple[HyperballState, Outgoing]:
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


def _held(move: Move, state: HeldProducts, outgoing: Outgoing) -> tuple[HeldProducts, Outgoing]:
    """What trades a scale between the very sides whose product is held leaves it; what else moves them may not."""
    for key, logs in state.logs.items() if isinstance(state.logs, dict) else ():
        leaves, shapes = set(key.split(" + ")), jax.tree.map(jnp.shape, logs)
        for part in move.with_effect("diagonal", "orthogonal", "linear").parts:
            paths = set(part.gauge.bound(move.params).offset)
            own = paths == leaves and keeps_product(part.gauge) and jax.tree.map(jnp.shape, part.element) == shapes
            if paths & leaves and not own and move.on_unknown != "keep":
                raise move.refuse(
                    f"GaugeFixState.sizes of '{key}'", part.gauge.name, "products held, which the move changes",
                    "write on_unknown='keep' to have the next step bring them back to what they were at init, or leave "
                    "these leaves to one of the two",
                )  # fmt: skip
    return state, outgoing


# Every state of this package that holds more than numbers and other states has a row.
OWN_RULES: dict[type, Rule] = {
    QuotientState: _framed,
    GaugeRetractState: _framed,
    ScaleByOppositeGramState: _opposite_gram,
    AddGaugeDecayState: _decay,
    HyperballState: _hyperball,
    HeldProducts: _held,
}


def _conjugated(matrix: jax.Array, turn: jax.Array) -> jax.Array:
    return matmul(matmul(transpose(turn), matrix), turn)


def _mismatch(state: Any, found: str, expected: str) -> ValueError:
    return binding_error(
        "transport", f"a {type(state).__name__} of another list of gauges", found, expected,
        "give transport the optimizer's own list of gauges, identity elements for what does not move, and give "
        "go.gauge_fix the same list as the optimizer inside it",
    )  # fmt: skip
