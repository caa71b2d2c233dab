"""The two sides of a gauge: the blocks of the two factors whose product the gauge does not change."""

import functools
from typing import Any

from gauge_optax.binding import Block
from gauge_optax.parts.heads import Heads
from gauge_optax.parts.part import Part
from gauge_optax.parts.sizes import Factor, Stretch

Blocks = tuple[Block, ...]
"""The blocks of one factor."""


@functools.singledispatch
def channel_sides(part: Part[Any]) -> tuple[Blocks, Blocks] | None:
    """The blocks that a scale multiplies by α, and those that it divides by α^p; None for parts without two such sides.
    """
    return None


@channel_sides.register
def _sides_of_factor(part: Factor) -> tuple[Blocks, Blocks] | None:
    return (part.up, part.down) if part.down else None


@functools.singledispatch
def matrix_sides(part: Part[Any]) -> tuple[Heads, Heads] | None:
    """The rows that a linear part multiplies by a matrix S, and those that it multiplies by S⁻ᵀ; None for other parts.
    """
    return None


@matrix_sides.register
def _sides_of_stretch(part: Stretch) -> tuple[Heads, Heads]:
    return part.left, part.right
