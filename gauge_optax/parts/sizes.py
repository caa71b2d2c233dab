"""Sizes: `Factor`, one number per channel on two sides, and `Stretch`, the symmetric part of GL(d) per head."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.linalg import (
    full_rank,
    inverse_sqrt_by_products,
    matmul,
    real_dtype,
    safe_divide,
    svd,
    transpose,
    triangular_factor,
)
from gauge_optax.parts.heads import Heads
from gauge_optax.parts.part import Anchor, Arrays, Size

# A step may take λ_min/‖H‖_F of an anchor's Gram matrix H down to this; below it the way back to the slice is inexact.
_LEAST = 1e-4


MULTIPLIED, DIVIDED = ("up", "left"), ("down", "right")
"""Arguments of constructors whose blocks an element α multiplies, and those whose blocks it divides."""


@dataclasses.dataclass(frozen=True)
class Factor(Size[jax.Array]):
    """up·α and down·α⁻ᵖ per channel. An element is α itself, not its logarithm, and may be negative.

    A channel reads as the norm of its first anchor divided by √(number of columns), to the power −1/p for an anchor on
    the down side. On the slice every column of a kernel has norm 1, a norm's scale is +1 and multipliers have root mean
    square 1, which is close to the usual initial values.

    Attributes:
      degree: p.
      by_entry: whether the root mean square of an anchor's entries is its size: multipliers start at 1.
      signed: whether α takes the sign of the anchor's one entry, because all readers are linear.
    """

    degree: float = 1.0
    by_entry: bool = False
    signed: bool = False

    @functools.cached_property
    def up(self) -> Anchor:
        """The blocks that are multiplied by α."""
        return tuple(b for b in self.blocks if b.argument in MULTIPLIED)

    @functools.cached_property
    def down(self) -> Anchor:
        """The blocks that are multiplied by α⁻ᵖ."""
        return tuple(b for b in self.blocks if b.argument in DIVIDED)

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return tuple(side for side in (self.up[:1], self.up[1:], self.down) if side)

    def identity(self) -> jax.Array:
        return jnp.ones(self.shape, real_dtype())

    def inverse(self, e: jax.Array) -> jax.Array:
        return 1.0 / e

    def compose(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return a * b

    def act(self, e: jax.Array, x: Arrays) -> Arrays:
        out = dict(x)
        for blocks, factor in ((self.up, e), (self.down, self.down_factor(e))):
            for b in blocks:
                out[b.path] = out[b.path] * b.spread(self.named, factor, elsewhere=1.0)
        return out

    def down_factor(self, e: jax.Array) -> jax.Array:
        """α⁻ᵖ."""
        return 1.0 / (e if self.degree == 1.0 else e**self.degree)

    def push(self, e: jax.Array, u: Arrays, at: Arrays) -> Arrays:
        return self.act(e, u)

    def pull(self, e: jax.Array, g: Arrays, at: Arrays) -> Arrays:
        return self.act(e, g)  # diagonal: its own transpose

    def read(self, anchor: Anchor, x: Arrays, within: jax.Array, near: bool) -> tuple[jax.Array, jax.Array]:
        totals = [b.total(self.named, jnp.square(x[b.path])) for b in anchor]
        square = sum(totals[1:], totals[0])
        # On the slice a channel's squared norm is `natural`, its entries over its inputs, which are its free axes but
        # the last, or the only one: 1 for a column of an (inputs, channels) kernel.
        free = [[n for n, label in zip(b.view_shape, b.labels, strict=True) if label not in self.named] for b in anchor]
        inputs = max(math.prod(lengths[:-1] or lengths) for lengths in free)
        natural = sum(map(math.prod, free)) / (1 if self.by_entry else max(1, inputs))
        read = within & (square > 0)
        size = jnp.sqrt(jax.lax.select(read, square / natural, jnp.ones_like(square)))
        size = size if anchor[0].argument in MULTIPLIED else size ** (-1.0 / self.degree)
        if self.signed and anchor == self.up[:1]:
            size = jnp.where(read & (anchor[0].total(self.named, x[anchor[0].path]) < 0), -size, size)
        return size, read

    def completed(self, x: Arrays, g: Arrays) -> Arrays:
        """A gradient whose entries of the anchor follow from all others: ⟨g, (up, −p·down)⟩ is zero by invariance.

        A turn that passes a norm's scale is a symmetry only where that scale is 1. Away from there the turn is
        conjugated by the scale, so that the turned gradient lacks a term at the scale itself. This is that term.
        """
        anchor, zero = self.up[0], jnp.zeros(self.shape, real_dtype())

        def pairing(blocks: Anchor) -> jax.Array:
            return sum((b.total(self.named, x[b.path] * g[b.path]) for b in blocks), zero)

        paired = self.degree * pairing(self.down) - pairing(self.up[1:])
        order, entries = [self.named.index(name) for name in anchor.labels], anchor.view(x[anchor.path])
        found = jnp.where(entries == 0.0, anchor.view(g[anchor.path]), safe_divide(paired.transpose(order), entries))
        return g | {anchor.path: anchor.write(g[anchor.path], found)}

    def follows(self, bits: Mapping[str, int]) -> bool:
        """Whether growth rests on the anchor, because another leaf is less precise and would round it away.

        Args:
          bits: leaf path → bits of the mantissa of its dtype.
        """
        anchor = self.anchors[0]
        most = max(bits.values(), default=0)  # a Python number has no dtype, and rounds nothing away
        others = [bits.get(b.path, most) for b in self.blocks if b not in anchor]
        return min(others, default=most) < bits.get(anchor[0].path, most)


@dataclasses.dataclass(frozen=True)
class Stretch(Size[jax.Array]):
    """left·S and right·S⁻ᵀ per head. Elements are pairs (S, S⁻¹), (*shape, 2, d, d), so that no step inverts a matrix.

    A head reads as the symmetric S of left = Q·S, where Q has orthonormal columns. Far from the slice it is read by QR
    and the SVD of the triangular factor (a Gram matrix would square the condition number), near it by products.

    Attributes:
      left: the rows that are multiplied by S.
      right: the rows that are multiplied by S⁻ᵀ.
    """

    left: Any = None
    right: Any = None

    @property
    def along(self) -> tuple[str, ...]:
        return ("basis",)

    @property
    def size(self) -> int:
        """d."""
        return int(self.left.size)

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return self.left.blocks, self.right.blocks

    def identity(self) -> jax.Array:
        return jnp.broadcast_to(jnp.eye(self.size, dtype=real_dtype()), (*self.shape, 2, self.size, self.size))

    def inverse(self, e: jax.Array) -> jax.Array:
        return e[..., ::-1, :, :]

    def compose(self, a: jax.Array, b: jax.Array) -> jax.Array:
        (s, s_inverse), (t, t_inverse) = (jnp.unstack(x, axis=-3) for x in (a, b))
        return jnp.stack([matmul(t, s), matmul(s_inverse, t_inverse)], -3)  # A ↦ (A·t)·s

    def act(self, e: jax.Array, x: Arrays) -> Arrays:
        once = x | self.left.turned(x, e[..., 0, :, :])  # one fused leaf may hold both sides
        return once | self.right.turned(once, transpose(e[..., 1, :, :]))

    def push(self, e: jax.Array, u: Arrays, at: Arrays) -> Arrays:
        return self.act(e, u)

    def pull(self, e: jax.Array, g: Arrays, at: Arrays) -> Arrays:
        return self.act(transpose(e), g)

    def read(self, anchor: Anchor, x: Arrays, within: jax.Array, near: bool) -> tuple[jax.Array, jax.Array]:
        from_left = anchor == self.left.blocks
        side: Heads = self.left if from_left else self.right
        eye = jnp.broadcast_to(jnp.eye(self.size, dtype=real_dtype()), (*self.shape, self.size, self.size))
        if near:
            gram = side.gram(x, x)
            read = within & (jnp.trace(gram, axis1=-2, axis2=-1) > 0)
            gram = jnp.where(read[..., None, None], gram, eye)
            root_inverse = inverse_sqrt_by_products(gram, _LEAST)
            pair = matmul(gram, root_inverse), root_inverse
        else:
            root = triangular_factor(side.stacked(x))
            read = within & full_rank(root)
            _, sizes, vectors = svd(jnp.where(read[..., None, None], root, eye))
            pair = _conjugated(vectors, sizes), _conjugated(vectors, 1.0 / sizes)
        # From the right side, which moves as S⁻ᵀ = S⁻¹, the same formula gives the inverse.
        return jnp.stack(pair if from_left else pair[::-1], -3), read


def _conjugated(vectors: jax.Array, sizes: jax.Array) -> jax.Array:
    return matmul(transpose(vectors) * sizes[..., None, :], vectors)
