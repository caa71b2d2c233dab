"""Embedding shift: a vector that every token embedding gains and every position embedding loses.

Let a model add a row of the token table E to a row of the position table P. It depends on the sum alone, so that
E + 1·tᵀ and P − 1·tᵀ compute the same function. The group is Rᵈ under addition. What `read` returns for a point is
minus the mean row of P: on the slice this mean is zero, and E contains it. If another gauge moves the mean row of P,
`read` returns the mean row of E. Reference: docs/design.md §3, "What else is dead".
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
    """A vector that moves from the rows of one table of embeddings to the rows of another; the model adds their rows.

    Args:
      token: path → axes of the tables whose rows gain the vector: `{"embed/embedding": "_ channel"}`.
      position: path → axes of the tables whose rows lose it. For every input, the model must add one row of the token
        tables and one row of the position tables.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are t, an array with the named axes.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> gauge = go.embedding_shift({"token": "_ channel"}, {"position": "_ channel"})
    >>> params = {"token": jnp.zeros((5, 2)), "position": jnp.ones((3, 2))}
    >>> fixed = gauge.act(gauge.inverse(gauge.read(params)), params)
    >>> fixed["token"][0].tolist(), fixed["position"][0].tolist()
    ([1.0, 1.0], [0.0, 0.0])

    Reference: docs/design.md §3. If the head is tied to the token table, all logits of a position gain one number: then
    the loss is invariant, but the logits are not.
    """
    return block_gauge("embedding_shift", EmbeddingShift, {"up": token, "down": position}, sizes)


@dataclasses.dataclass(frozen=True)
class EmbeddingShift(Copy):
    """One copy. An element is the vector t, (*shape)."""

    effect: ClassVar[Effect] = "shift"
    composes: ClassVar[bool] = False
    breaks: ClassVar[str] = "inputs that read no row of a table, or several, a scale on one table, or a tied head"

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "EmbeddingShift":
        return cls(found.key, (Trade(part_label(found), found.named, found.shape, found.blocks),))
