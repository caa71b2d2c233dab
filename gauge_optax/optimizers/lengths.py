"""What DDC asks of each kind of gauge: which blocks of a channel have a length to step, and how far log α moves them.

An anchor has a constant length on the slice; the blocks opposite to it have the lengths that DDC steps.
"""

import functools
import math

from gauge_optax.binding import Block
from gauge_optax.gauges.instance import Anchor, Instance
from gauge_optax.gauges.rope_linear import ComplexScale
from gauge_optax.gauges.scale import Scale


@functools.singledispatch
def has_lengths(instance: Instance) -> bool:
    """Whether its blocks have a length per channel, which its elements change; only those of scales have."""
    return False


@has_lengths.register
def _(instance: Scale) -> bool:
    return True


@functools.singledispatch
def partner(instance: Instance, anchor: Anchor) -> tuple[Block, ...]:
    """The blocks whose size is the length of a channel while its anchor's size is fixed; () where there are none."""
    return ()


@partner.register
def _(instance: Scale, anchor: Anchor) -> tuple[Block, ...]:
    return instance.down if anchor[0] in instance.up else ()


@functools.singledispatch
def log_step(instance: Instance) -> float:
    """√(1 + p²), the norm of the changes (1, −p) that log α = 1 makes to both sides' logs; 0 if it is no scale."""
    return 0.0


@log_step.register
def _(instance: Scale) -> float:
    return math.hypot(1.0, instance.degree)


@functools.singledispatch
def joined_sides(instance: Instance) -> tuple[tuple[Block, ...], ...]:
    """The tensors that appendix B joins by a product of their norms; () where it has no rule for norms.

    That product of both sides is what a scale does not change. A scale of one side leaves no product, and its one
    tensor has no length to step. The planes of rotary heads have no lengths in the paper.
    """
    return ()


@joined_sides.register
def _(instance: Scale) -> tuple[tuple[Block, ...], ...]:
    return (instance.up, instance.down) if instance.down else (instance.blocks,)


@joined_sides.register
def _(instance: ComplexScale) -> tuple[tuple[Block, ...], ...]:
    return ()
