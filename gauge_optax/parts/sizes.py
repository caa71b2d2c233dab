"""Sizes: `Factor`, a number per channel, and `Stretch`, a symmetric positive matrix per head.

Each multiplies one side of a product and divides the other. `head_linear` moves a head by an invertible S = Q·P: P is a
stretch, and Q, a rotation, is a turn.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block
from gauge_optax.linalg import (
    full_rank,
    matmul,
    near_power_of_two,
    real_dtype,
    root_and_inverse,
    safe_divide,
    svd,
    transpose,
    triangular_factor,
)
from gauge_optax.parts.heads import BASIS, PLANE, Heads
from gauge_optax.parts.order import last_anchors
from gauge_optax.parts.part import Anchor, Arrays, Size

# For a `Stretch`, `fix` reaches the slice exactly if the smallest eigenvalue of the anchor's Gram matrix H, after the
# step, is at least this times ‖H‖_F. Otherwise it only comes near the slice, without a change of the function, and the
# next steps come nearer.
_LEAST = 1e-4


CHANNEL, HEAD = "channel", "head"
COUNTING = ("layer", "expert")  # names of the axes that count matrices
MULTIPLIED, DIVIDED = ("up", "left"), ("down", "right")
"""Names of the constructors' arguments whose blocks an element α multiplies, and of those whose blocks it divides."""


@dataclasses.dataclass(frozen=True)
class Factor(Size[jax.Array]):
    """Multiplies one side by α and the other by α⁻ᵖ, per channel: up·α and down·α⁻ᵖ.

    An element is α itself, not its logarithm, and may be negative. A channel to which n columns of the anchor belong
    (`columns`) reads as their joint norm divided by √n; for an anchor on the down side, as this number to the power
    −1/p. On the slice a kernel's columns have norm 1, a norm's scale is +1 and multipliers have root mean square 1:
    about their usual initial values.

    A kernel and the biases beside it are one anchor, so that a column has norm 1 together with its bias. If the kernel
    were read alone and lost its norm to decay, every fix would multiply the biases, without bound.

    Attributes:
      degree: p, the degree of the function between both sides: 1 for ReLU, 2 for squared ReLU.
      by_entry: True for multipliers, which start at 1: a channel then reads as the root mean square of its entries.
      signed: whether a channel reads as α < 0 if its anchor, a single entry, is negative. If all readers are linear, a
        negative α keeps the function.
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
        # A norm's scale or a multiplier is read without the bias beside it: turns rely on a scale of 1.
        whole = not self.signed and not self.by_entry and any(b.entries(self.named) > 1 for b in self.up)
        sides = (*([self.up] if whole else []), self.up[:1], self.up[1:], self.down)
        return tuple(side for side in dict.fromkeys(sides) if side)

    @functools.cached_property
    def natural(self) -> Mapping[Anchor, int]:
        """The squared norm of a channel on the slice, by the anchor that it is read from."""
        return {anchor: sum(b.entries(self.named) for b in anchor) if self.by_entry else columns(anchor, self.named)
                for anchor in (*self.anchors, *last_anchors(self))}

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
        """α⁻ᵖ, for an element `e` = α."""
        return 1.0 / (e if self.degree == 1.0 else e**self.degree)

    def push(self, e: jax.Array, u: Arrays, at: Arrays) -> Arrays:
        return self.act(e, u)

    def pull(self, e: jax.Array, g: Arrays, at: Arrays) -> Arrays:
        return self.act(e, g)  # diagonal: its own transpose

    def read(self, anchor: Anchor, x: Arrays, within: jax.Array, near: bool) -> tuple[jax.Array, jax.Array]:
        inside, unit = [x[b.path] for b in anchor], None
        if not near:  # far from the slice, squares may be too large or too small for the dtype
            sizes = [b.total(self.named, jnp.abs(x[b.path])) for b in anchor]
            unit = near_power_of_two(sum(sizes[1:], sizes[0]))
            inside = [x[b.path] * b.spread(self.named, 1.0 / unit) for b in anchor]
        totals = [b.total(self.named, jnp.square(values)) for b, values in zip(anchor, inside, strict=True)]
        square = sum(totals[1:], totals[0])
        read = within & (square > 0)
        size = jnp.sqrt(jax.lax.select(read, square / self.natural[anchor], jnp.ones_like(square)))
        size = size if unit is None else jnp.where(read, unit, 1.0) * size
        size = size if anchor[0].argument in MULTIPLIED else size ** (-1.0 / self.degree)
        if self.signed and anchor == self.up[:1]:
            size = jnp.where(read & (anchor[0].total(self.named, x[anchor[0].path]) < 0), -size, size)
        return size, read

    def is_one_at(self, anchor: Anchor) -> bool:
        return self.signed and anchor == self.up[:1]

    def completed(self, x: Arrays, g: Arrays) -> Arrays:
        """A gradient whose entries at the anchor, a norm's scale, are computed from those of all other blocks.

        The action of a stream's rotation depends on the scale, and `Stream.pull` leaves out the term that this adds to
        the scale's gradient. By invariance ⟨g_up, up⟩ = p·⟨g_down, down⟩ per channel. The scale's gradient follows from
        this equation.
        """
        anchor, zero = self.up[0], jnp.zeros(self.shape, real_dtype())

        def pairing(blocks: Anchor) -> jax.Array:
            return sum((b.total(self.named, x[b.path] * g[b.path]) for b in blocks), zero)

        paired = self.degree * pairing(self.down) - pairing(self.up[1:])
        order, entries = [self.named.index(name) for name in anchor.labels], anchor.view(x[anchor.path])
        found = jnp.where(entries == 0.0, anchor.view(g[anchor.path]), safe_divide(paired.transpose(order), entries))
        return g | {anchor.path: anchor.write(g[anchor.path], found)}

    def follows(self, bits: Mapping[str, int]) -> bool:
        """Whether what the anchor gains in a step stays in the anchor, because another leaf is of a less precise dtype.

        Args:
          bits: leaf path → bits of the mantissa of the leaf's dtype.
        """
        most = max(bits.values(), default=0)  # a Python number has no dtype, and rounds nothing away
        precise = max(bits.get(b.path, most) for b in self.anchors[0])
        return min(bits.get(b.path, most) for b in self.blocks) < precise


@last_anchors.register
def _single_blocks(part: Factor) -> tuple[Anchor, ...]:
    """Every block of the part that is no anchor by itself.

    Other gauges may move some blocks of a side and not all (a multiplier in each layer, for example). The part is then
    read from a block that they do not move.
    """
    return tuple((b,) for b in part.blocks if (b,) not in part.anchors)


def columns(anchor: Anchor, named: tuple[str, ...]) -> int:
    """How many columns of kernels belong to one channel of an anchor: its squared norm at the usual start.

    A column of a kernel has one entry per input, each of variance 1/inputs, and so norm 1. A channel has several
    columns if it is a head, a rotary plane, or a whole kernel. The following free axes (`_`) count columns:

    * axes in parentheses with a named axis, `(head _) _`, and the two coordinates of a plane;
    * if channels are outputs or heads: axes behind all named axes, provided that free axes are in front: `_ head _`;
    * else, if several free axes are behind all named axes and no named axis is called `channel`: the last of them, as
      in `head _ _` and `layer _ _`. On the side that α divides, a head has its columns on all of them but the last.

    All other free axes are inputs, the axes of a convolution's window included. A bias has no inputs. It adds nothing
    to the number, because it starts at zero.

    >>> from gauge_optax.binding import BlockSpec, bind_leaf
    >>> def count(axes, shape, name):
    ...     return columns((bind_leaf("rescale", BlockSpec("up", "w", axes), "w", shape, {}),), (name,))
    >>> count("_ _ _ channel", (3, 3, 5, 8), "channel"), count("_ head _", (6, 2, 4), "head")
    (1, 4)
    """
    sides = [_free_axes(block, named) for block in anchor if not _is_bias(block, anchor)]
    # A block with fewer free axes than `least` is a bias. If a free axis of a kernel counts columns, the one free axis
    # of its bias (head, _) does so too, and is not an input.
    least = min(2 if any(parted for _, _, parted in sides) else 1, max(rest for rest, _, _ in sides))
    return sum(count for rest, count, _ in sides if rest >= least)


def _is_bias(block: Block, anchor: Anchor) -> bool:
    """Whether another block has the same axes behind further free axes: `head _ _` is the bias of `_ head _ _`."""
    whole = [[*zip(b.labels, b.view_shape, strict=True)] for b in (block, *anchor)]
    return any(axes[0][0] == "_" and whole[0] == [*itertools.dropwhile(lambda x: x[0] == "_", axes)]
               for axes in whole[1:] if axes)


def _free_axes(block: Block, named: tuple[str, ...]) -> tuple[int, int, bool]:
    """The number of free axes, the number of columns, and whether any of these free axes counts columns.

    Free axes in parentheses with a named axis do not count for the first and the last result.
    """
    labels, held = block.split_labels, {*named, BASIS} if PLANE in named else {*named}
    last = max((k for k, label in enumerate(labels) if label in held), default=-1)
    beside = {k for group in block.groups if any(labels[j] in held for j in group) for k in group}
    lengths = dict(zip((k for k, label in enumerate(labels) if label), block.view_shape, strict=True))
    free = {k: n for k, n in lengths.items() if labels[k] not in held}
    front = [n for k, n in free.items() if k not in beside and k < last]
    behind = [n for k, n in free.items() if k not in beside and k > last]
    outputs, parted = block.argument in MULTIPLIED, list[int]()
    if front and (outputs or HEAD in named):
        parted = behind
    elif len(behind) > 1 and CHANNEL not in named:
        parted = behind[:-1] if HEAD in named and not outputs else behind[-1:]
    own = [n for k, n in free.items() if k in beside] + [2] * (PLANE in named)
    return len(front) + len(behind), math.prod(own + parted), bool(parted)


@dataclasses.dataclass(frozen=True)
class Stretch(Size[jax.Array]):
    """Multiplies the two factors of a product by S and S⁻ᵀ per head: left·S and right·S⁻ᵀ.

    Elements are pairs (S, S⁻¹), (*shape, 2, d, d), so that no step inverts a matrix. A head reads as the symmetric S of
    left = Q·S, where Q has orthonormal columns. Far from the slice it is read by QR and the SVD of the triangular
    factor (a Gram matrix would square the condition number), near it by matrix products with the Gram matrix.

    Attributes:
      left: the rows that S multiplies.
      right: the rows that S⁻ᵀ multiplies.
    """

    left: Any = None
    right: Any = None

    @property
    def along(self) -> tuple[str, ...]:
        return ("basis",)

    @property
    def size(self) -> int:
        """d, the length of the basis axis."""
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
            pair = root_and_inverse(gram, _LEAST)
        else:
            root = triangular_factor(side.stacked(x))
            read = within & full_rank(root)
            _, sizes, vectors = svd(jnp.where(read[..., None, None], root, eye))
            pair = _conjugated(vectors, sizes), _conjugated(vectors, 1.0 / sizes)
        # The right side is multiplied by S⁻ᵀ = S⁻¹, so that the same formula gives S⁻¹ when it is read from that side.
        return jnp.stack(pair if from_left else pair[::-1], -3), read


def _conjugated(vectors: jax.Array, sizes: jax.Array) -> jax.Array:
    return matmul(transpose(vectors) * sizes[..., None, :], vectors)
