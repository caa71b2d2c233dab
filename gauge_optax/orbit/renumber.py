"""Rules of `align`: how a move of one part changes elements of other parts, and how units are matched by derivatives.

A permutation renumbers units, and with them the entries that elements of other parts have per unit. A rotation of heads
conjugates the stretch (the `Stretch` part, a matrix per head) of the same heads. Each rule is a `singledispatch`
function, whose default is for parts without such an effect.
Reference: Ainsworth, Hayase and Srinivasa, Git Re-Basin, Eq. (1) and (2).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import overlap
from gauge_optax.linalg import matmul, safe_divide, transpose, unit_and_size
from gauge_optax.parts.heads import Rotation
from gauge_optax.parts.order import varies_along
from gauge_optax.parts.part import Arrays, Part
from gauge_optax.parts.permutation import Indices, Permutation
from gauge_optax.parts.sizes import Stretch


@functools.singledispatch
def renumbers(part: Part[Any], other: Part[Any]) -> bool:
    """Whether elements of `other` have one entry per unit, for units that `part` renumbers."""
    return False


@renumbers.register
def _permutation_renumbers(part: Permutation, other: Part[Any]) -> bool:
    return any(
        overlap(permuted, block) and varies_along(block, other.named, permuted, part.axis)
        for permuted in part.blocks
        for block in other.blocks
    )


@functools.singledispatch
def carried(part: Part[Any], e: Any, other: Part[Any], value: Any) -> Any:
    """Returns g·h·g⁻¹ for elements g and h of two parts. The default is h itself, for parts that commute.

    Args:
      part: the part of g.
      e: g.
      other: the part of h.
      value: h; the leading axes of its arrays are `other.shape`.
    """
    return value


@carried.register
def _carried_by_rotation(part: Rotation, e: jax.Array, other: Part[Any], value: Any) -> Any:
    return rotated(other, value, part, e)


@functools.singledispatch
def rotated(part: Part[Any], value: Any, rotation: Rotation, e: jax.Array) -> Any:
    """`carried` for a rotation of heads as g; this second function dispatches on the part of h. The default returns h.

    Args:
      part: the part of h.
      value: h, the element that the rotation may change.
      rotation: the part of g, a rotation of heads.
      e: g.
    """
    return value


@rotated.register
def _rotated_stretch(part: Stretch, value: jax.Array, rotation: Rotation, e: jax.Array) -> jax.Array:
    """Returns R⁻¹·S·R for a rotation R and a stretch S if they act on the same heads, else S.

    This is g·h·g⁻¹, because elements multiply weights from the right: g acts as W ↦ W·R.
    """
    if set(part.blocks) != set(rotation.blocks):
        return value
    r = e[..., None, :, :]
    return matmul(transpose(r), matmul(value, r))


@carried.register
def _carried_by_permutation(part: Permutation, e: Indices, other: Part[Any], value: Any) -> Any:
    """Returns the element h with its units or heads renumbered."""
    if e is None or value is None or not other.shape:
        return value
    count = math.prod(other.shape)
    numbers = jnp.arange(count, dtype=jnp.int32)
    for block in other.blocks:
        if not any(overlap(block, permuted) for permuted in part.blocks):
            continue
        # A leaf of channel numbers, moved like the weights, shows where each channel comes from.
        field = jnp.broadcast_to(block.spread(other.named, numbers.reshape(other.shape)), block.shape)
        same_leaf = tuple(permuted for permuted in part.blocks if permuted.path == block.path)
        moved = dataclasses.replace(part, blocks=same_leaf).act(e, {block.path: field})[block.path]
        kept = [label for label in block.row_labels if label in other.named]
        first = block.rows(moved)[tuple(slice(None) if x in kept else 0 for x in block.row_labels)]
        source = jnp.transpose(first, [kept.index(name) for name in other.named]).ravel()
        if not bool(jnp.all(source == numbers)):
            return jax.tree.map(functools.partial(_gathered, source), value)
    return value


@functools.singledispatch
def responses(part: Part[Any], point: Arrays, gradient: Arrays) -> jax.Array | None:
    """How a function responds to sizes of units: its derivatives by log c, where c multiplies a unit in one block.

    Args:
      part: the part.
      point: leaf path → array.
      gradient: the function's gradient at that point.

    Returns:
      The derivatives, (*shape, units, blocks). They depend on the function and on the order of units alone: no other
      gauge changes them. None (the default) for parts that do not permute units.
    """
    return None


@responses.register
def _responses_of_units(part: Permutation, point: Arrays, gradient: Arrays) -> jax.Array:
    products = [part.total(block, point[block.path] * gradient[block.path]) for block in part.blocks]
    return jnp.stack(products, -1)


@functools.singledispatch
def matched(part: Part[Any], target: jax.Array, point: jax.Array) -> Any:
    """The permutation of the point's units after which their `responses` are most like those of the target's units.

    Args:
      part: the permutation.
      target: the responses of the target's units, (*shape, units, responses).
      point: those of the point's units, of the same shape.
    """
    raise NotImplementedError


@matched.register
def _matched_units(part: Permutation, target: jax.Array, point: jax.Array) -> jax.Array:
    units = [unit_and_size(x, -1)[0] for x in (target, point)]  # responses may be too small or too large to square
    rows = [safe_divide(x, jnp.sqrt(jnp.sum(jnp.square(x), -1, keepdims=True))) for x in units]
    return assigned(part, matmul(rows[0], transpose(rows[1])))


def assigned(part: Permutation, gains: jax.Array) -> jax.Array:
    """The permutation with the largest sum of gains. A gain says how well two units match.

    Args:
      part: the permutation.
      gains: (*shape, unit of the target, unit of the point).
    """
    from scipy.optimize import linear_sum_assignment  # not at the top: this import takes a quarter of a second

    tables = np.asarray(gains, np.float64).reshape(-1, part.size, part.size)
    chosen = [linear_sum_assignment(table, maximize=True)[1] for table in tables]
    return jnp.asarray(np.stack(chosen), jnp.int32).reshape(*part.shape, part.size)


def _gathered(source: jax.Array, array: jax.Array) -> jax.Array:
    """Puts channel source[i] in the place of channel i, in an array whose leading axes count channels."""
    shape, leading = array.shape, 0
    while math.prod(shape[:leading]) < len(source):
        leading += 1
    return array.reshape(len(source), *shape[leading:])[source].reshape(shape)
