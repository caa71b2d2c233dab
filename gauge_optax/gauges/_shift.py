"""The kernel of additive gauges: a constant along `vocab`, one for every other coordinate of the leaf.

Here: means, centring and adding a shift. Not here: how a shift is moved by other gauges on the leaf (`product`).

Inside the library a shift is a *slice*: the leaf at one vocab entry, of the leaf's rank, zero where no block selects.
Several blocks on a leaf share one slice. Elements hold it without the vocab axis.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block

VOCAB = "vocab"


@dataclasses.dataclass(frozen=True)
class ShiftInstance:
    """One instance of a logit shift on a concrete tree: its key and the blocks that share nothing but the symmetry."""

    gauge: str
    key: str
    blocks: tuple[Block, ...]


def axis_of(block: Block) -> int:
    """Position of the vocab axis among the block's axes."""
    return block.labels.index(VOCAB)


def slice_block(block: Block) -> Block:
    """The same selection on the leaf's slice, where vocab has length 1."""
    at = [k for k, i in enumerate(block.index) if not isinstance(i, int)][axis_of(block)]
    split = tuple(1 if k == at else n for k, n in enumerate(block.split))
    index = tuple(((0, 1),) if k == at else i for k, i in enumerate(block.index))
    ranges = tuple(None if at in group else span for group, span in zip(block.groups, block.ranges, strict=True))
    shape = tuple(
        math.prod(split[k] for k in group) if span is None else n
        for group, span, n in zip(block.groups, ranges, block.shape, strict=True)
    )
    return dataclasses.replace(block, shape=shape, split=split, index=index, ranges=ranges)


def vocab_axis(block: Block) -> int | None:
    """The leaf axis that is vocab alone; None where vocab shares its axis with others."""
    lonely = [k for k, group in enumerate(block.groups) if len(group) == 1 and block.split_labels[group[0]] == VOCAB]
    return lonely[0] if lonely else None


def element_shape(block: Block) -> tuple[int, ...]:
    """Shape of a shift in an element: the leaf's without vocab."""
    shape, axis = slice_block(block).shape, vocab_axis(block)
    return shape if axis is None else shape[:axis] + shape[axis + 1 :]


def as_slice(block: Block, shift: jax.Array) -> jax.Array:
    """An element's shift as a slice of the leaf."""
    return shift.reshape(slice_block(block).shape)


def shift_dimensions(block: Block) -> int:
    """How many entries of a slice the block selects."""
    return math.prod(slice_block(block).view_shape)


def mean_slice(block: Block, leaf: jax.Array) -> jax.Array:
    """Mean of the block along vocab, as a slice of the leaf."""
    inner = slice_block(block)
    mean = jnp.mean(block.view(leaf), axis_of(block), keepdims=True)
    return inner.write(jnp.zeros(inner.shape, leaf.dtype), mean)


def add_slice(block: Block, leaf: jax.Array, shift: jax.Array) -> jax.Array:
    """The leaf with the block's part of a slice added along vocab."""
    return block.write(leaf, block.view(leaf) + slice_block(block).view(shift))


def own_slice(block: Block, shift: jax.Array) -> jax.Array:
    """A slice without what other blocks selected."""
    inner = slice_block(block)
    return inner.write(jnp.zeros_like(shift), inner.view(shift))


def centre_block(block: Block, leaf: jax.Array) -> jax.Array:
    """The leaf without the block's mean along vocab; exactly zero where it was constant, to rounding.

    A zero head that was shifted is constant. The rounding of its mean would count as weights, with a norm and a frame.
    """
    view, mean = block.view(leaf), jnp.mean(block.view(leaf), axis_of(block), keepdims=True)
    return block.write(leaf, _less(block, view, mean, mean))


def without_slice(block: Block, leaf: jax.Array, shift: jax.Array) -> jax.Array:
    """The leaf less the block's part of a slice; exactly zero where that leaves a constant that is rounding."""
    view, mean = block.view(leaf), jnp.mean(block.view(leaf), axis_of(block), keepdims=True)
    return block.write(leaf, _less(block, view, mean, slice_block(block).view(shift)))


def _less(block: Block, view: jax.Array, mean: jax.Array, shift: jax.Array) -> jax.Array:
    small = 8.0 * jnp.finfo(view.dtype).eps * jnp.abs(mean)
    constant = jnp.max(jnp.abs(view - mean), axis_of(block), keepdims=True) <= small
    return jnp.where(constant, 0.0, view - shift)
