"""Renumbering: what alignment asks of gauges that permute units, heads or experts, and of all others beside them.

A permutation renumbers the entries that elements of other gauges have per unit. Alignment needs to know whose elements
it renumbers, and what becomes of them; and it can match units by what they do, which no other gauge changes. Each
question is one rule: a default that holds for every instance, and what `Permutation` answers.
Reference: Ainsworth, Hayase and Srinivasa, Git Re-Basin, Eq. (1) and (2).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

from gauge_optax.binding import Block, overlap
from gauge_optax.gauges.instance import Arrays, Instance
from gauge_optax.gauges.permutation import Indices, Permutation
from gauge_optax.linalg import matmul, safe_divide, transpose
from gauge_optax.slice import varies_along


@functools.singledispatch
def renumbers(instance: Instance, other: Instance) -> bool:
    """Whether elements of another instance have an entry per unit that this instance renumbers."""
    return False


@renumbers.register
def _permutation_renumbers(instance: Permutation, other: Instance) -> bool:
    return any(
        overlap(permuted, block) and varies_along(block, other.named, permuted, instance.axis)
        for permuted in instance.blocks
        for block in other.blocks
    )


@functools.singledispatch
def carried(instance: Instance, e: Any, other: Instance, value: Any) -> Any:
    """g·h·g⁻¹ for elements g and h of two instances: h itself, but for what renumbers its units.

    Args:
      instance: the one instance.
      e: an element of it, g.
      other: the other instance.
      value: h; the leading axes of its arrays are `other.shape`.
    """
    return value


@carried.register
def _carried_by_permutation(instance: Permutation, e: Indices, other: Instance, value: Any) -> Any:
    """The element h with its units or heads renumbered."""
    if e is None or value is None or not other.shape:
        return value
    count = math.prod(other.shape)
    numbers = jnp.arange(count, dtype=jnp.int32)
    for block in other.blocks:
        if not any(overlap(block, permuted) for permuted in instance.blocks):
            continue
        # A leaf of channel numbers, moved like the weights, shows where each channel comes from.
        field = jnp.broadcast_to(block.spread(other.named, numbers.reshape(other.shape)), block.shape)
        same_leaf = tuple(permuted for permuted in instance.blocks if permuted.path == block.path)
        moved = dataclasses.replace(instance, blocks=same_leaf).act(e, {block.path: field})[block.path]
        kept = [label for label in block.row_labels if label in other.named]
        first = block.rows(moved)[tuple(slice(None) if x in kept else 0 for x in block.row_labels)]
        source = jnp.transpose(first, [kept.index(name) for name in other.named]).ravel()
        if not bool(jnp.all(source == numbers)):
            return jax.tree.map(functools.partial(_gathered, source), value)
    return value


@functools.singledispatch
def responses(instance: Instance, point: Arrays, gradient: Arrays) -> jax.Array | None:
    """Derivatives of a function by the logs of the sizes of units, (*shape, units, blocks).

    Args:
      instance: the instance.
      point: leaves.
      gradient: the function's gradient there.

    Returns:
      None for instances that are not matched by such numbers. They depend on the function and on the order of units
      alone: all other gauges leave them as they are.
    """
    return None


@responses.register
def _responses_of_units(instance: Permutation, point: Arrays, gradient: Arrays) -> jax.Array:
    products = [unit_totals(instance, block, point[block.path] * gradient[block.path]) for block in instance.blocks]
    return jnp.stack(products, -1)


@functools.singledispatch
def matched(instance: Instance, target: jax.Array, point: jax.Array) -> Any:
    """The element that takes the responses of one point's units nearest to those of another, (*shape, units, …)."""
    raise NotImplementedError


@matched.register
def _matched_units(instance: Permutation, target: jax.Array, point: jax.Array) -> jax.Array:
    rows = [safe_divide(x, jnp.sqrt(jnp.sum(jnp.square(x), -1, keepdims=True))) for x in (target, point)]
    return assigned(instance, matmul(rows[0], transpose(rows[1])))


def assigned(instance: Permutation, gains: jax.Array) -> jax.Array:
    """The permutation with the largest sum of gains, (*shape, unit of the target, unit of the point)."""
    tables = np.asarray(gains, np.float64).reshape(-1, instance.size, instance.size)
    chosen = [linear_sum_assignment(table, maximize=True)[1] for table in tables]
    return jnp.asarray(np.stack(chosen), jnp.int32).reshape(*instance.shape, instance.size)


def unit_totals(instance: Permutation, block: Block, leaf: jax.Array) -> jax.Array:
    """Sums over the entries of each unit in one block: (*shape, size)."""
    return block.total((*instance.named, instance.axis), leaf)


def _gathered(source: jax.Array, array: jax.Array) -> jax.Array:
    """An array whose leading axes count channels, with channel source[i] in place of channel i."""
    shape, leading = array.shape, 0
    while math.prod(shape[:leading]) < len(source):
        leading += 1
    return array.reshape(len(source), *shape[leading:])[source].reshape(shape)
