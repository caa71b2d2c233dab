"""Eigenbases: bases of heads, rotary planes and the residual stream that depend on the function alone.

The rows W of a head's blocks (one column per basis vector) are turned so that their Gram matrix WᵀW is diagonal. Where
eigenvalues cross, this basis jumps. `canonicalize` may jump there. An optimizer must not: it reads a rotation from an
arbitrary constant matrix instead.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block
from gauge_optax.linalg import eigenbasis, equal_eigenvalues, transpose
from gauge_optax.parts.heads import BASIS, Heads, Planes, Rotation, by_size, stack_heads, unstack_heads
from gauge_optax.parts.part import Arrays, Turn
from gauge_optax.parts.stream import Stream, reflected


@functools.singledispatch
def eigenbases(first: Turn[Any], turns: Sequence[Any], point: Arrays) -> list[Any]:
    """Reads one element per turn: its inverse brings the turn's rows to the eigenbasis of their Gram matrix.

    In this basis, eigenvalues descend, and the entry of largest magnitude in every column of the rows is positive. See
    `linalg.eigenbasis` for equal eigenvalues. The default, for turns without such a basis, is `Turn.read_all`.

    Args:
      first: the first of `turns`; its class is the class of all of them.
      turns: turns of one class.
      point: leaves from which all sizes and constants have been removed.

    Returns:
      One element per turn, in the order of `turns`.
    """
    return type(first).read_all(turns, point)


@eigenbases.register
def _eigenbases_of_heads(first: Rotation, turns: Sequence[Rotation], point: Arrays) -> list[jax.Array]:
    read: dict[Rotation, jax.Array] = {}
    for same in by_size(turns):
        grams = stack_heads([turn.gram(point, point) for turn in same])
        mixed = stack_heads([turn.mixed_rows(point) for turn in same])
        for turn, basis in zip(same, unstack_heads(eigenbasis(grams, mixed), same), strict=True):
            largest = _largest_entries(turn, turn.turned(point, basis))
            read[turn] = transpose(basis * jnp.where(largest < 0, -1.0, 1.0)[..., None, :])
    return [read[turn] for turn in turns]


@eigenbases.register
def _eigenbases_of_planes(first: Planes, turns: Sequence[Planes], point: Arrays) -> list[jax.Array]:
    read = []
    for turn, phase in zip(turns, first.read_all(turns, point), strict=True):
        gram = turn.gram(point, point)
        gap, crossed = gram[..., 0, 0] - gram[..., 1, 1], 2.0 * gram[..., 0, 1]
        equal = jnp.hypot(gap, crossed) <= equal_eigenvalues(gram.dtype) * jnp.trace(gram, axis1=-2, axis2=-1)
        angle = jnp.where(equal, phase, 0.5 * jnp.arctan2(crossed, gap))
        largest = _largest_entries(turn, turn.act(-angle, point))[..., 0]
        read.append(angle + jnp.where(largest < 0, math.pi, 0.0).astype(angle.dtype))
    return read


@eigenbases.register
def _eigenbases_of_stream(first: Stream, turns: Sequence[Stream], point: Arrays) -> list[jax.Array]:
    return [_eigenbasis_of_stream(turn, point) for turn in turns]


def _eigenbasis_of_stream(turn: Stream, point: Arrays) -> jax.Array:
    """The rotation from the eigenbasis of EᵀE, where E are the rows that the stream's rotation is read from.

    If the rotation keeps the vector of ones (LayerNorm), only the directions orthogonal to that vector get new axes.
    """
    values, seen = turn.divided(point, point), turn.rows_seen
    gram, mixed = seen.gram(values, values), seen.mixed_rows(values)
    basis = eigenbasis(turn.restricted(gram), turn.restricted(mixed))
    # Write the rows in this basis. Each basis vector gets the sign that makes the largest entry of its column positive.
    # The ones vector is skipped, because its sign is not free.
    whole = turn.embedded(basis)
    columns = seen.turned(values, reflected(whole, -1) if turn.keeps_ones else whole)
    largest = _largest_entries(seen, columns)[turn.size - basis.shape[-1] :]
    return transpose(turn.embedded(basis * jnp.where(largest < 0, -1.0, 1.0)))


def _largest_entries(rows: Heads, point: Mapping[str, jax.Array]) -> jax.Array:
    """The entry of largest magnitude in every column, over the rows of all blocks, with its sign: (*shape, size)."""
    kept = (*rows.named, BASIS)

    def largest(block: Block) -> jax.Array:
        view, labels = block.rows(point[block.path]), block.row_labels
        free = [k for k, label in enumerate(labels) if label not in kept]
        ordered = view.transpose([*(labels.index(label) for label in kept), *free])
        entries = ordered.reshape(*ordered.shape[: len(kept)], -1)
        least, most = jnp.min(entries, -1), jnp.max(entries, -1)
        return jnp.where(-least > most, least, most)

    blocks = sorted(rows.blocks, key=lambda b: (b.path, b.axes))  # the order of a user's list must not matter
    return functools.reduce(lambda x, y: jnp.where(jnp.abs(y) > jnp.abs(x), y, x), map(largest, blocks))
