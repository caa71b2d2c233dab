"""Eigenbases: bases of heads, rotary planes and the residual stream that depend on the function alone.

The rows W of a head's blocks (one column per basis vector) are rotated so that their Gram matrix WᵀW is diagonal. While
weights change, this basis jumps wherever two eigenvalues cross. That does no harm in `canonicalize`. The basis of an
optimizer must not jump: there a rotation is computed by comparison with an arbitrary constant matrix instead.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block
from gauge_optax.linalg import eigenbasis, equal_eigenvalues, near_power_of_two, transpose
from gauge_optax.parts.heads import BASIS, Heads, Planes, Rotation, by_size, stack_heads, unstack_heads
from gauge_optax.parts.part import Arrays, Part, Turn
from gauge_optax.parts.permutation import Permutation
from gauge_optax.parts.stream import Stream, reflected
from gauge_optax.xla import hashed_positions

Weights = Callable[[str], jax.Array]
"""The path of a leaf → one weight per entry. Sums with these weights stay the same when units are renumbered."""


def weights_without_order(free: Sequence[Part[Any]], leaves: Mapping[str, jax.Array]) -> Weights:
    """Returns arbitrary constant weights of entries, equal for all entries that a part of `free` may exchange.

    Args:
      free: the parts that make no difference to optimizers, such as permutations.
      leaves: path → leaf; only shapes are used.
    """
    numbers = {path: number for number, path in enumerate(sorted(leaves))}

    @functools.cache
    def weights(path: str) -> jax.Array:
        noise = hashed_positions(leaves[path].shape, numbers[path], _DRAW).astype(jnp.float32) / 2.0**31 - 1.0
        for part in free:
            noise = averaged(part, path, noise)
        return noise

    return weights


_DRAW = 1  # makes these random numbers differ from the constant matrices that heads are read from


@functools.singledispatch
def averaged(part: Part[Any], path: str, weights: jax.Array) -> jax.Array:
    """The weights of a leaf, averaged over all exchanges of entries by a part. By default, a part exchanges none."""
    return weights


@averaged.register
def _over_units(part: Permutation, path: str, weights: jax.Array) -> jax.Array:
    for block in part.blocks:
        if block.path == path:
            view = block.view(weights)
            mean = jnp.mean(view, block.labels.index(part.axis), keepdims=True)
            weights = block.write(weights, jnp.broadcast_to(mean, view.shape))
    return weights


@functools.singledispatch
def eigenbases(first: Turn[Any], turns: Sequence[Any], point: Arrays, weights: Weights) -> list[Any]:
    """Computes one element per turn (rotation), whose inverse rotates the turn's rows to their eigenbasis.

    The eigenbasis is that of the rows' Gram matrix. In this basis, eigenvalues descend, and the entry of largest
    magnitude in every column of the rows is positive. If an entry of the other sign is as large, up to roundoff, a
    weighted sum of the column is positive instead. See `linalg.eigenbasis` for equal eigenvalues. The default, for
    turns without such a basis, is `Turn.read_all`.

    Args:
      first: the first of `turns`; its class is the class of all of them.
      turns: turns of one class.
      point: leaves from which all sizes and constants have been removed.
      weights: the weights of the sums that decide signs.

    Returns:
      One element per turn, in the order of `turns`.
    """
    return type(first).read_all(turns, point)


@eigenbases.register
def _eigenbases_of_heads(
    first: Rotation, turns: Sequence[Rotation], point: Arrays, weights: Weights
) -> list[jax.Array]:
    read: dict[Rotation, jax.Array] = {}
    for same in by_size(turns):
        points = [_in_range(turn, point) for turn in same]
        seen = [turn.rows_seen for turn in same]
        grams = stack_heads([rows.gram(x, x) for rows, x in zip(seen, points, strict=True)])
        mixed = stack_heads([rows.mixed_rows(x) for rows, x in zip(seen, points, strict=True)])
        bases = unstack_heads(eigenbasis(grams, mixed), same)
        for turn, rows, x, basis in zip(same, seen, points, bases, strict=True):
            signs = _signs(rows, rows.turned(x, basis), weights)
            read[turn] = transpose(basis * signs[..., None, :])
    return [read[turn] for turn in turns]


@eigenbases.register
def _eigenbases_of_planes(first: Planes, turns: Sequence[Planes], point: Arrays, weights: Weights) -> list[jax.Array]:
    read = []
    for turn, phase in zip(turns, first.read_all(turns, point), strict=True):
        x = _in_range(turn, point)
        gram = turn.gram(x, x)
        gap, crossed = gram[..., 0, 0] - gram[..., 1, 1], 2.0 * gram[..., 0, 1]
        equal = jnp.hypot(gap, crossed) <= equal_eigenvalues(gram.dtype) * jnp.trace(gram, axis1=-2, axis2=-1)
        angle = jnp.where(equal, phase, 0.5 * jnp.arctan2(crossed, gap))
        first_coordinate = _signs(turn, turn.act(-angle, x), weights)[..., 0]
        read.append(angle + jnp.where(first_coordinate < 0, math.pi, 0.0).astype(angle.dtype))
    return read


@eigenbases.register
def _eigenbases_of_stream(
    first: Stream, turns: Sequence[Stream], point: Arrays, weights: Weights
) -> list[jax.Array]:
    return [_eigenbasis_of_stream(turn, point, weights) for turn in turns]


def _eigenbasis_of_stream(turn: Stream, point: Arrays, weights: Weights) -> jax.Array:
    """The rotation from the eigenbasis of EᵀE, where E are the rows that the stream's rotation is read from.

    If the rotation keeps the vector of ones (LayerNorm), only the directions orthogonal to that vector get new axes.
    """
    seen = turn.rows_seen
    values = _in_range(seen, turn.divided(point, point))
    gram, mixed = seen.gram(values, values), seen.mixed_rows(values)
    basis = eigenbasis(turn.restricted(gram), turn.restricted(mixed))
    # Write the rows in this basis, to choose the sign of each basis vector. The vector of ones is skipped, because the
    # rotation has to keep it.
    whole = turn.embedded(basis)
    columns = seen.turned(values, reflected(whole, -1) if turn.keeps_ones else whole)
    signs = _signs(seen, columns, weights)[..., turn.size - basis.shape[-1] :]
    return transpose(turn.embedded(basis * signs[..., None, :]))


def _in_range(turn: Heads, point: Arrays) -> Arrays:
    """The point with the rows of every head divided by one number: the square of 1e-20 or 1e20 is no float32."""
    sums = sum((b.total(turn.named, jnp.abs(point[b.path])) for b in turn.blocks), jnp.zeros(()))
    divisor = near_power_of_two(sums)
    scaled = dict(point)
    for b in turn.blocks:
        scaled[b.path] = scaled[b.path] / b.spread(turn.named, divisor, elsewhere=1.0)
    return scaled


def _signs(rows: Heads, point: Mapping[str, jax.Array], weights: Weights) -> jax.Array:
    """The sign of the entry of largest magnitude in every column, over the rows of all blocks: (*shape, size).

    If the largest and the least entry have the same magnitude up to roundoff, as in rows that come in pairs w and −w,
    it is the sign of the weighted sum of the column's entries.
    """
    kept = (*rows.named, BASIS)

    def extremes(block: Block) -> tuple[jax.Array, jax.Array, jax.Array]:
        view, labels = block.rows(point[block.path]), block.row_labels
        free = tuple(k for k, label in enumerate(labels) if label not in kept)
        order = [[label for label in labels if label in kept].index(label) for label in kept]
        weighted = view * block.rows(weights(block.path))
        of_block = (jnp.min(view, free), jnp.max(view, free), jnp.sum(weighted, free))
        return tuple(jnp.transpose(x, order) for x in of_block)  # type: ignore[return-value]

    blocks = sorted(rows.blocks, key=lambda b: (b.path, b.axes))  # the order of a user's list must not change roundoff
    least, most, total = zip(*map(extremes, blocks), strict=True)
    lowest, highest = functools.reduce(jnp.minimum, least), functools.reduce(jnp.maximum, most)
    tied = jnp.abs(highest + lowest) <= equal_eigenvalues(highest.dtype) * jnp.maximum(highest, -lowest)
    return jnp.where(jnp.where(tied, sum(total[1:], total[0]), highest + lowest) < 0, -1.0, 1.0)
