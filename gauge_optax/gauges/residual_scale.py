"""Residual scale: one factor on everything that is written to a residual stream that only norms read.

Norms divide by the size of their input, so that a stream that is α times as large gives the same outputs. It is exact
where the norms have no eps, and nearly so where their eps is small beside the stream's variance. This is
`scale_invariant` with one factor for all layers: the skip connections tie them together.
Reference: docs/design.md §5, "More dead directions".
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from gauge_optax.binding import Axes
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.scale import Scale


def residual_scale(
    write: Mapping[str, Axes], tied: Mapping[str, Axes] | None = None, *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """One positive factor on every leaf that writes to the residual stream.

    Args:
      write: path → axes of every leaf that writes to the stream, all `_`; an embedding first, because the factor is
        read from it. All layers share the factor, whatever the captures are.
      tied: path → axes of the final norm's scale and bias, if the output kernel is the embedding. They are divided by
        the factor, so that logits do not grow.
      sizes: lengths of axes inside `(a b)`.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are {"": log α}, a number.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> gauge = go.residual_scale({"embedding": "_ _", "blocks/{i}/out": "_ _"})
    >>> blocks = [{"out": jnp.ones((3, 4))}, {"out": jnp.ones((3, 4))}]
    >>> gauge.dim({"embedding": jnp.ones((7, 4)), "blocks": blocks})
    1

    Reference: docs/design.md §5. Not a symmetry where anything but a norm reads the stream.
    """
    roles = {"up": write} | ({} if tied is None else {"down": tied})
    return block_gauge("residual_scale", StreamScale, roles, sizes)


@dataclasses.dataclass(frozen=True)
class StreamScale(Scale):
    """The one instance: log α."""

    joined: ClassVar[bool] = True
    breaks: ClassVar[str] = "the eps of a norm, a writer that is not listed, or a reader that is no norm"
