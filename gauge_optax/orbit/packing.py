"""Rules of `pack` for each kind of gauge: which blocks can have constant rows, and which element makes them constant.

A block can be packed if the gauge has enough freedom to bring some of its rows to fixed numbers. Under GL(d_h), d_h
rows per head become the identity; under complex numbers, one row per rotary plane becomes 1 + 0i. All other gauges have
no such block. Each rule is a `singledispatch` function with a default and with versions for `Linear` (GL) and
`ComplexScale`, which are copies: a *copy* is a gauge in one layer, and has one or two parts. The rules take a copy and
not a part, because a complex number needs both parts of a copy: moduli and angles.
Reference: van Nierop, Transformer models are gauge invariant, §3 and §6.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Block
from gauge_optax.gauges.copies import Copy
from gauge_optax.gauges.linear import Linear
from gauge_optax.gauges.rope_linear import ComplexScale
from gauge_optax.linalg import independent_rows, inverse, safe_divide, svd, transpose
from gauge_optax.parts.heads import BASIS, PLANE
from gauge_optax.parts.part import Arrays


@functools.singledispatch
def packable(copy: Copy) -> tuple[Block, ...]:
    """Blocks in which an element can make rows constant, in the order of preference; () if there are none.

    Such a block has the named axes, one free axis of rows, and the axis `basis`.
    """
    return ()


@packable.register
def _packable_linear(copy: Linear) -> tuple[Block, ...]:
    _, turn = copy.parts  # the turn's blocks are the left ones, then the right ones
    return _with_rows(turn.blocks, copy.size)


@packable.register
def _packable_planes(copy: ComplexScale) -> tuple[Block, ...]:
    return _with_rows(copy.blocks, 1)


def _with_rows(blocks: Sequence[Block], rows: int) -> tuple[Block, ...]:
    """The blocks that have one free axis (`_`) with at least `rows` rows. Two kinds of blocks are excluded.

    One kind stores its values less one (`1+`). The other is the bias of grouped queries, `(head _) basis`: its free
    axis counts query heads and not rows. Such a bias is recognized by its kernel, `_ (head _) basis`, which has all
    axes of the bias, with the same lengths, and one more free axis.
    """

    def axes(block: Block) -> Counter[tuple[str, int]]:
        return Counter(zip(block.labels, block.view_shape, strict=True))

    def is_bias(block: Block) -> bool:
        more = (axes(b) - axes(block) for b in blocks if b.argument == block.argument and axes(block) < axes(b))
        return any([label for label, _ in own.elements()] == ["_"] for own in more)

    single = [b for b in blocks if b.labels.count("_") == 1 and not b.one_plus and not is_bias(b)]
    return tuple(block for block in single if block.view_shape[block.labels.index("_")] >= rows)


@functools.singledispatch
def constant_rows(copy: Copy) -> np.ndarray:
    """The constant rows that an element can make in a packable block of every head, (rows, basis)."""
    raise NotImplementedError


@constant_rows.register
def _identity_rows(copy: Linear) -> np.ndarray:
    return np.eye(copy.size)


@constant_rows.register
def _real_row(copy: ComplexScale) -> np.ndarray:
    """One row that is the complex number 1 + 0i in every plane, (1, basis)."""
    coordinates = {BASIS: np.array([1.0, 0.0]), PLANE: np.ones(copy.shape[-1])}
    first, second = (coordinates[label] for label in copy.blocks[0].row_labels if label in coordinates)
    return np.outer(first, second).reshape(1, -1)


@functools.singledispatch
def choose_rows(copy: Copy, block: Block, point: Arrays, per_head: bool) -> jax.Array:
    """Chooses the rows of a packable block that are best made constant.

    Args:
      copy: the copy of the gauge that has the block.
      block: a block that `packable` returned.
      point: leaf path → array.
      per_head: whether rows are chosen for each head. If False, all heads share them.

    Returns:
      Row numbers, (heads, rows), or (1, rows) if all heads share them. `heads` counts all named axes, flattened.
    """
    raise NotImplementedError


@choose_rows.register
def _choose_independent_rows(copy: Linear, block: Block, point: Arrays, per_head: bool) -> jax.Array:
    heads = _rows_of_heads(copy, block, point)
    return independent_rows(heads[:, None] if per_head else heads[None])


@choose_rows.register
def _choose_long_row(copy: ComplexScale, block: Block, point: Arrays, per_head: bool) -> jax.Array:
    moduli = jnp.linalg.norm(_rows_of_heads(copy, block, point), axis=-1)  # (heads, planes, rows)
    moduli = moduli.reshape(-1, copy.shape[-1], moduli.shape[-1])
    least = jnp.min(safe_divide(moduli, jnp.mean(moduli, -1, keepdims=True)), 1)  # over the planes of a head
    return jnp.argmax(least if per_head else jnp.min(least, 0, keepdims=True), -1)[:, None]


@functools.singledispatch
def to_constant(
    copy: Copy, block: Block, point: Arrays, rows: jax.Array, size: float
) -> tuple[tuple[Any, ...], jax.Array]:
    """The element whose move makes these rows `size` times `constant_rows`, and its condition numbers.

    Args:
      copy: the copy of the gauge that has the block.
      block: a block that `packable` returned.
      point: leaf path → array.
      rows: row numbers, as `choose_rows` returns them.
      size: a positive number.

    Returns:
      The elements of the copy's parts, and a condition number per head, (heads,), flattened as in `choose_rows`. It is
      infinite if no element makes the rows constant.
    """
    raise NotImplementedError


@to_constant.register
def _to_identity_rows(
    copy: Linear, block: Block, point: Arrays, rows: jax.Array, size: float
) -> tuple[tuple[Any, ...], jax.Array]:
    heads = _rows_of_heads(copy, block, point)
    back, to, condition = _to_identity(jnp.take_along_axis(heads, rows[..., None], -2), size)
    # The element is the pair (S, S⁻¹). A left block is multiplied by S, which is `to`. A right block is multiplied by
    # S⁻ᵀ, so that there `to` is S⁻ᵀ and `back` is Sᵀ.
    pair = (to, back) if block.argument == "left" else (transpose(back), transpose(to))
    _, turn = copy.parts
    return (jnp.stack(pair, -3).reshape(*copy.shape, 2, copy.size, copy.size), turn.identity()), condition


@to_constant.register
def _to_real_row(
    copy: ComplexScale, block: Block, point: Arrays, rows: jax.Array, size: float
) -> tuple[tuple[Any, ...], jax.Array]:
    planes = _rows_of_heads(copy, block, point)
    heads = planes.reshape(-1, copy.shape[-1], *planes.shape[-2:])
    row = jnp.take_along_axis(heads, rows[:, None, :, None], -2)[..., 0, :]
    modulus, angle = jnp.linalg.norm(row, axis=-1), jnp.arctan2(row[..., 1], row[..., 0])
    typical = jnp.mean(jnp.linalg.norm(heads, axis=-1), -1)
    condition = jnp.where(modulus > 0, typical / modulus, jnp.inf)
    factor = size / modulus if block.argument == "left" else modulus / size  # left·z, and right/z̄
    return (factor.reshape(copy.shape), -angle.reshape(copy.shape)), jnp.max(condition, -1)


def _rows_of_heads(copy: Copy, block: Block, point: Arrays) -> jax.Array:
    """The rows of one block, (heads, rows, basis).

    `heads` counts all named axes, flattened. For `ComplexScale` it also counts the rotary planes of each head.
    """
    turn: Any = copy.parts[-1]
    matrices: jax.Array = turn.rows_of(block, point)
    return matrices.reshape(-1, *matrices.shape[-2:])


@jax.jit  # compiled once for all layers
def _to_identity(square: jax.Array, size: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns M, M⁻¹ and the condition numbers for square matrices A: M = A/size, so that A·M⁻¹ is size times 1."""
    _, sizes, _ = svd(square)
    condition = jnp.where(sizes[..., -1] > 0, sizes[..., 0] / sizes[..., -1], jnp.inf)
    return square / size, size * inverse(square), condition
