"""The kernel of additive gauges: a constant along `vocab`, one for every other coordinate of the leaf.

Here: means, centring and adding a shift. Not here: how a shift is moved by other gauges on the leaf (`product`).
"""

import dataclasses

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


def shift_shape(block: Block) -> tuple[int, ...]:
    """Shape of a shift of this block: the block's without vocab."""
    axis = axis_of(block)
    return block.view_shape[:axis] + block.view_shape[axis + 1 :]


def mean_over_vocab(block: Block, leaf: jax.Array) -> jax.Array:
    """Mean of the block along vocab: its shift coordinate."""
    return jnp.mean(block.view(leaf), axis_of(block))


def add_shift(block: Block, leaf: jax.Array, shift: jax.Array) -> jax.Array:
    """The leaf with `shift` added along vocab."""
    return block.write(leaf, block.view(leaf) + jnp.expand_dims(shift, axis_of(block)))


def centre_block(block: Block, leaf: jax.Array) -> jax.Array:
    """The leaf without the block's mean along vocab; exactly zero where it was constant.

    A zero head that was shifted is constant. The rounding of its mean would count as weights, with a norm and a frame.
    """
    view, axis = block.view(leaf), axis_of(block)
    constant = jnp.all(view == jax.lax.slice_in_dim(view, 0, 1, axis=axis), axis, keepdims=True)
    return block.write(leaf, jnp.where(constant, 0.0, view - jnp.mean(view, axis, keepdims=True)))
