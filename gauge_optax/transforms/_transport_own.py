"""How the states of this package move: most of what they hold are invariants of the represented point.

In the rescale frame nothing sees a scale but the frame itself, f ↦ f + log α. A rotation W ↦ W·R turns world bases
(first moments, generators) and, by Rᵀ from the left, what is stored in them (eigenvectors, body frames); what is kept
in body coordinates stays. A shift moves the mean that a retraction restores, and nothing else.

Here: one rule per state, and that a state and a list of gauges belong together. Not here: Optax's states (`transport`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import binding_error, leaves_by_path, with_leaves
from gauge_optax.gauges._basis import HeadBasis, grouped
from gauge_optax.gauges._frame import FrameState
from gauge_optax.gauges.linear import HeadLinear
from gauge_optax.linalg import matmul, transpose
from gauge_optax.quotient import QuotientState
from gauge_optax.slice import Frame, chart
from gauge_optax.slice import framed as framed_at
from gauge_optax.transforms._moments import BodyFrame
from gauge_optax.transforms._state import FramedState, GaugeMoments
from gauge_optax.transforms._transport_move import DIAGONAL, LINEAR, SHIFT, Move
from gauge_optax.transforms.decay import AddGaugeDecayState
from gauge_optax.transforms.fused import FusedState
from gauge_optax.transforms.hyperball import HyperballState
from gauge_optax.transforms.opposite_gram import OppositeInverses, ScaleByOppositeGramState
from gauge_optax.transforms.project import GaugeProjectState, ProjectFrame
from gauge_optax.transforms.retract import GaugeRetractState, Reference

Outgoing = frozenset[str]
"""Leaves that a preconditioner earlier in the chain has made updates of; on all others gradients come in."""

Rule = Callable[[Move, Any, Outgoing], tuple[Any, Outgoing]]
"""(move, state, outgoing before it) → (the state at g·θ, outgoing after it)."""


def framed(move: Move, state: FramedState, outgoing: Outgoing) -> tuple[FramedState, Outgoing]:
    """`scale_by_ddc`, `scale_by_scaled_polar`."""
    after = outgoing | set(leaves_by_path(state.mu))
    if not isinstance(state.gauges, GaugeMoments):  # of a tree without leaves
        return state, after
    own: GaugeMoments = state.gauges
    _check(move, state, own.frame, [head.basis for head in own.heads])
    heads = tuple(_head(head, turn) for head, turn in zip(own.heads, move.matrices, strict=True))
    vertical = own.vertical_mu
    if not isinstance(vertical, tuple) or vertical:
        conjugated = tuple(_conjugated(a, turn) for a, turn in zip(vertical.heads, move.matrices, strict=True))
        vertical = vertical._replace(shifts=move.turned_slices(vertical.shifts), heads=conjugated)
    gauges = own._replace(frame=_frame(move, own.frame), heads=heads, vertical_mu=vertical)
    mu = with_leaves(state.mu, move.turned(leaves_by_path(state.mu)))
    return state._replace(mu=mu, gauges=gauges), after


def fused(move: Move, state: FusedState, outgoing: Outgoing) -> tuple[FusedState, Outgoing]:
    """`ddc_adamw`, `ddc_muon`."""
    first, after = framed(move, state.framed, outgoing)
    return state._replace(framed=first, retract=_retract(move, state.retract, after)[0]), after


def _retract(move: Move, state: GaugeRetractState, outgoing: Outgoing) -> tuple[GaugeRetractState, Outgoing]:
    own = state.gauges
    if isinstance(own, Reference):
        _check(move, state, own.frame, None, own.shifts)
        own = Reference(_frame(move, own.frame), move.moved_means(own.shifts, own.frame.f))
    return GaugeRetractState(own), outgoing


def _project(move: Move, state: GaugeProjectState, outgoing: Outgoing) -> tuple[GaugeProjectState, Outgoing]:
    own = state.gauges
    if isinstance(own, ProjectFrame):  # not with linear gauges: their frame is solved for anew
        _check(move, state, own.frame, own.bases)
        bases = tuple(_basis(basis, turn) for basis, turn in zip(own.bases, move.matrices, strict=True))
        own = ProjectFrame(_frame(move, own.frame), bases)
    return GaugeProjectState(own), outgoing


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
    matrices = [x for part in move.parts if isinstance(part.gauge, HeadLinear) for x in part.element.values()]
    if matrices and kept.linear[0][0].ndim != matrices[0].ndim:  # diagonals, which no change of basis keeps
        return state._replace(age=jnp.zeros_like(state.age)), after
    linear = [
        (_conjugated(left, s), _conjugated(right, transpose(jnp.linalg.inv(s))))
        for (left, right), s in zip(kept.linear, matrices, strict=True)
    ]
    return state._replace(gauges=OppositeInverses(tuple(scales), tuple(linear))), after


def _quotient(move: Move, state: QuotientState, outgoing: Outgoing) -> tuple[QuotientState, Outgoing]:
    """What runs inside sees invariants; the frame alone moves. What comes out is a tangent."""
    after, frame = outgoing | set(move.shapes), state.gauges
    if not isinstance(frame, Frame):  # of a tree without leaves
        return state, after
    found, expected = (jax.tree.map(jnp.shape, element) for element in (frame.element, move.element))
    if found != expected:
        raise _mismatch(state, f"a frame of {found}", f"of {expected}, as the gauges given have")
    moved = move.group.compose(move.element, frame.element)
    framed = framed_at(chart(move.group, move.params), moved, frame.live)
    return state._replace(gauges=framed._replace(grown=frame.grown)), after


def _decay(move: Move, state: AddGaugeDecayState, outgoing: Outgoing) -> tuple[AddGaugeDecayState, Outgoing]:
    del move
    return state, outgoing


def _hyperball(move: Move, state: HyperballState, outgoing: Outgoing) -> tuple[HyperballState, Outgoing]:
    """Radii are norms of coordinates. They cannot be reset: a radius of zero would let go of the weights."""
    radii = state.radius if isinstance(state.radius, dict) else {}
    moved = {path: name for path, name in move.binders(DIAGONAL, LINEAR, SHIFT).items() if path in radii}
    if moved and move.on_unknown != "keep":
        path, name = next(iter(moved.items()))
        raise move.refuse(
            f"HyperballState.radius of '{path}'", name, "radii of spheres, which the move changes",
            "write on_unknown='keep' to have the next step draw the weights back to their old spheres, or give "
            "go.hyperball numbers as radii, or leave these leaves to one of the two",
        )  # fmt: skip
    return state, outgoing | set(radii)


# Every state of this package that holds more than numbers and other states has a row.
OWN_RULES: dict[type, Rule] = {
    FramedState: framed,
    FusedState: fused,
    GaugeRetractState: _retract,
    GaugeProjectState: _project,
    QuotientState: _quotient,
    ScaleByOppositeGramState: _opposite_gram,
    AddGaugeDecayState: _decay,
    HyperballState: _hyperball,
}


# Parts ---------------------------------------------------------------------------------------------


def _frame(move: Move, frame: FrameState) -> FrameState:
    return frame._replace(f=tuple(a + b for a, b in zip(frame.f, move.logs, strict=True)))


def _basis(basis: HeadBasis, turn: jax.Array | None) -> HeadBasis:
    return basis if turn is None else basis._replace(vectors=matmul(transpose(turn), basis.vectors))


def _head(head: BodyFrame, turn: jax.Array | None) -> BodyFrame:
    if turn is None:
        return head
    frame = () if isinstance(head.frame, tuple) else matmul(transpose(turn), head.frame)
    # One second moment per block: (instances, blocks, *shape, d, d).
    outer = () if isinstance(head.outer, tuple) else _conjugated(head.outer, turn[:, None])
    return BodyFrame(_basis(head.basis, turn), frame, outer)


def _conjugated(matrix: jax.Array, turn: jax.Array | None) -> jax.Array:
    return matrix if turn is None else matmul(matmul(transpose(turn), matrix), turn)


def _check(
    move: Move,
    state: Any,
    frame: FrameState,
    bases: Sequence[HeadBasis] | None = None,
    shifts: dict[str, jax.Array] | None = None,
) -> None:
    """Raises ValueError where a state was made with other gauges than those given."""
    bound = move.bound
    found = [f"scales {[f.shape for f in frame.f]}"]
    expected = [f"scales {[i.shape for i in bound.scales]}"]
    if bases is not None:
        found.append(f"heads {[basis.vectors.shape for basis in bases]}")
        expected.append(f"heads {[(len(g), *g[0].shape, g[0].size, g[0].size) for g in grouped(bound.heads)]}")
        if move.of_kind(LINEAR).bound.linear:
            expected.append(f"and {move.of_kind(LINEAR).bound.linear[0].gauge}")
    if shifts is not None:
        found.append(f"shifts {sorted(shifts)}")
        expected.append(f"shifts {sorted(bound.zero_slices())}")
    if found != expected:
        raise _mismatch(state, "; ".join(found), f"{'; '.join(expected)}, as the gauges given have")


def _mismatch(state: Any, found: str, expected: str) -> ValueError:
    return binding_error(
        "transport", f"a {type(state).__name__} of another list of gauges", found, expected,
        "give transport the optimizer's own list of gauges, identity elements for what does not move, and give "
        "go.gauge_fix the same list as the optimizer inside it",
    )  # fmt: skip
