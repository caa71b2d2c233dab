"""Embedding shift: a vector that every token embedding gains and every position embedding loses.

A model that adds a token's row of E to a position's row of P depends on their sum, so that E + 1·tᵀ and P − 1·tᵀ
compute the same function. The group is Rᵈ under addition. A point reads as minus the mean row of P: on the slice the
positions have the mean zero, and the token table carries it. Where another gauge moves the mean row of P, it is read
from E. Reference: docs/design.md §3, "What else is dead".
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from gauge_optax.binding import Axes, Matched
from gauge_optax.gauges.copies import Copy, Effect, part_label
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.parts.constants import Trade


def embedding_shift(
    token: Mapping[str, Axes], position: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """A vector moved from the rows of one table of embeddings to those of another that is added to it.

    Args:
      token: path → axes of the tables whose rows gain the vector: `{"embed/embedding": "_ channel"}`.
      position: path → axes of the tables whose rows lose it. Every input must read one row of either side.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are t, shaped like the named axes.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> gauge = go.embedding_shift({"token": "_ channel"}, {"position": "_ channel"})
    >>> params = {"token": jnp.zeros((5, 2)), "position": jnp.ones((3, 2))}
    >>> fixed = gauge.act(gauge.inverse(gauge.read(params)), params)
    >>> fixed["token"][0].tolist(), fixed["position"][0].tolist()
    ([1.0, 1.0], [0.0, 0.0])

    Reference: docs/design.md §3. A tied head reads the shift too: all logits gain one number, so that the loss, and not
    the logits, is invariant, and only without a bias of the final norm's kind between them.
    """
    return block_gauge("embedding_shift", EmbeddingShift, {"up": token, "down": position}, sizes)


@dataclasses.dataclass(frozen=True)
class EmbeddingShift(Copy):
    """One copy: a vector, (*shape)."""

    effect: ClassVar[Effect] = "shift"
    composes: ClassVar[bool] = False
    breaks: ClassVar[str] = "inputs that read no row of a table, or several, a scale on one table, or a tied head"

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "EmbeddingShift":
        return cls(found.key, (Trade(part_label(found), found.named, found.shape, found.blocks),))
