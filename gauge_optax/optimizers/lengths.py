"""What DDC asks of each kind of part: which blocks of a channel have a length to step, and how far log α moves them.

An anchor has a constant length on the slice; the blocks opposite to it have the lengths that DDC steps.
"""

import functools
import math
from typing import Any

from gauge_optax.binding import Block
from gauge_optax.parts.heads import PLANE
from gauge_optax.parts.part import Anchor, Part
from gauge_optax.parts.sizes import Factor


@functools.singledispatch
def has_lengths(part: Part[Any]) -> bool:
    """Whether its blocks have a length per channel, which its elements change; only those of scales have."""
    return False


@has_lengths.register
def _factor_has_lengths(part: Factor) -> bool:
    return True


@functools.singledispatch
def partner(part: Part[Any], anchor: Anchor) -> tuple[Block, ...]:
    """The blocks whose size is the length of a channel while its anchor's size is fixed; () where there are none."""
    return ()


@partner.register
def _partner_of_factor(part: Factor, anchor: Anchor) -> tuple[Block, ...]:
    return part.down if anchor[0] in part.up else ()


@functools.singledispatch
def log_step(part: Part[Any]) -> float:
    """√(1 + p²), the norm of the changes (1, −p) that log α = 1 makes to both sides' logs; 0 if it is no scale."""
    return 0.0


@log_step.register
def _log_step_of_factor(part: Factor) -> float:
    return math.hypot(1.0, part.degree)


@functools.singledispatch
def joined_sides(part: Part[Any]) -> tuple[tuple[Block, ...], ...]:
    """The tensors that appendix B joins by a product of their norms; () where it has no rule for norms.

    That product of both sides is what a scale does not change. A scale of one side leaves no product, and its one
    tensor has no length to step. The planes of rotary heads have no lengths in the paper.
    """
    return ()


@joined_sides.register
def _joined_by_factor(part: Factor) -> tuple[tuple[Block, ...], ...]:
    if PLANE in part.named:
        return ()
    return (part.up, part.down) if part.down else (part.blocks,)
