"""Both factors of a product that a gauge does not change: which blocks they are, and how far an element moves them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block
from gauge_optax.gauges.heads import Heads
from gauge_optax.gauges.instance import Instance
from gauge_optax.gauges.linear import Linear
from gauge_optax.gauges.rope_linear import ComplexScale
from gauge_optax.gauges.scale import Scale

Side = tuple[Block, ...]
"""The blocks of one factor."""


@functools.singledispatch
def channel_sides(instance: Instance) -> tuple[Side, Side] | None:
    """The blocks that a scale multiplies by α, and those that it divides by α^p; None for other kinds and one side."""
    return None


@channel_sides.register
def _(instance: Scale) -> tuple[Side, Side] | None:
    return (instance.up, instance.down) if instance.down else None


@functools.singledispatch
def matrix_sides(instance: Instance) -> tuple[Heads, Heads] | None:
    """The rows that are multiplied by a matrix S, and those that are multiplied by S⁻ᵀ; None for other kinds."""
    return None


@matrix_sides.register
def _(instance: Linear) -> tuple[Heads, Heads] | None:
    return instance.left, instance.right


@functools.singledispatch
def factors(instance: Instance, e: Any, block: Block) -> jax.Array:
    """The factors by which an element multiplies the channels of a block; 1 for what is no scale."""
    return jnp.ones(instance.shape)


@factors.register
def _(instance: Scale, e: jax.Array, block: Block) -> jax.Array:
    # A negated power, not a power of a negated degree: XLA then computes 1/α and the inverse of α once.
    if block.role in ("up", "left"):
        return jnp.exp(e)
    return jnp.exp(-(e if instance.degree == 1.0 else instance.degree * e))


@factors.register
def _(instance: ComplexScale, e: jax.Array, block: Block) -> jax.Array:
    return jnp.exp(e[..., 0] if block.role in ("up", "left") else -e[..., 0])
