"""Write shift: the mean of what is written to a residual stream that only centred norms read.

A LayerNorm subtracts the mean of its input. Where LayerNorms alone read a residual stream, the mean over its channels
never reaches the output: any number may be added to a row of an embedding, of an output kernel or of an output bias,
the same for all channels. The group is one number per row, under addition; a point reads as its means over channels,
and on the slice all of them are zero. This is `shift` along another axis.
Reference: docs/design.md §5, "More dead directions"; van Nierop, §4 (the plane that layer normalisation restricts to).
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from gauge_optax.binding import Axes
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.shift import Shift

CHANNEL = "channel"


def norm_write_shift(write: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None) -> BlockGauge:
    """A number added to all channels of what is written to a residual stream that only LayerNorms read.

    Args:
      write: path → axes of every leaf that writes to the stream; `channel` is the stream's axis:
        `{"embed/embedding": "_ channel", "blocks/{i}/mlp/down/kernel": "_ channel"}`. Leaves of different patterns may
        stand in one gauge each.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are {leaf path: shift, the leaf's shape without `channel`}.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> gauge = go.norm_write_shift({"embedding": "_ channel"})
    >>> gauge.dim({"embedding": jnp.ones((5, 4))})
    5

    Reference: docs/design.md §5. Not a symmetry where an RMSNorm, or no norm, reads the stream, nor for an embedding
    that is also the output kernel.
    """
    return block_gauge("norm_write_shift", WriteShift, {"write": write}, sizes)


@dataclasses.dataclass(frozen=True)
class WriteShift(Shift):
    """One instance: a number per row of each leaf."""

    rigid: ClassVar[str] = CHANNEL
    breaks: ClassVar[str] = "a reader of the stream that does not subtract its mean, such as an RMSNorm, or a tied head"

    def signal(self, point: object, gradient: object) -> None:
        """There is no output layer, whose gradient would tell the size of roundoff."""
        return
