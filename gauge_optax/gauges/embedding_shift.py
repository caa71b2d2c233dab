"""Embedding shift: a vector that every token embedding gains and every position embedding loses.

A model that adds a token's row of E to a position's row of P depends on their sum, so that E + 1·tᵀ and P − 1·tᵀ
compute the same function. The group is Rᵈ under addition. A point reads as minus the mean row of P: on the slice the
positions have the mean zero, and the token table carries it. Where LayerNorms hide the mean over channels of P's rows
but not that of E's, which a tied head reads, the mean over channels of t is read from E.
Reference: docs/design.md §5, "More dead directions".
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, overlap
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.instance import Additive, Anchor, Arrays, Effect, Instance
from gauge_optax.gauges.write_shift import WriteShift
from gauge_optax.linalg import real_dtype


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

    Reference: docs/design.md §5. A tied head reads the shift too: all logits gain one number, so that the loss, and not
    the logits, is invariant, and only without a bias of the final norm's kind between them.
    """
    return block_gauge("embedding_shift", Translation, {"up": token, "down": position}, sizes)


@dataclasses.dataclass(frozen=True)
class Translation(Additive):
    """One instance: a vector, (*shape).

    Attributes:
      hidden: whether another gauge moves the mean over channels of the rows of P alone.
    """

    hidden: bool = False

    effect: ClassVar[Effect] = "shift"
    balancing: ClassVar[Effect] = "still"
    keeps_place: ClassVar[bool] = True
    composes: ClassVar[bool] = False
    breaks: ClassVar[str] = "inputs that read no row of a table, or several, a scale on one table, or a tied head"

    @classmethod
    def of(cls, gauge: str, key: str, named: tuple[str, ...], sizes: Mapping[str, int], blocks: Any) -> "Translation":
        """The instance of a binding's blocks."""
        return cls(gauge, key, named, tuple(sizes[name] for name in named), tuple(blocks))

    def beside(self, others: Sequence[Instance]) -> "Translation":
        shifted = [block for i in others if isinstance(i, WriteShift) for block in i.shifted]

        def hides(role: str) -> bool:
            of_role = [block for block in self.blocks if block.role == role]
            return all(any(block.path == s.path and overlap(block, s) for s in shifted) for block in of_role)

        return dataclasses.replace(self, hidden=len(self.named) == 1 and hides("down") and not hides("up"))

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        return scale * jax.random.normal(key, self.shape, real_dtype())

    def act(self, e: jax.Array, point: Arrays) -> Arrays:
        out = dict(point)
        for block in self.blocks:
            moved = block.spread(self.named, e if block.role == "up" else -e)
            out[block.path] = out[block.path] + moved
        return out

    def push(self, e: jax.Array, tangent: Arrays) -> Arrays:
        return tangent

    def pull(self, e: jax.Array, cotangent: Arrays) -> Arrays:
        return cotangent

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return (tuple(block for block in self.blocks if self.hidden or block.role == "down"),)

    def read(self, anchor: Anchor, point: Arrays, within: jax.Array, near: bool) -> tuple[jax.Array, jax.Array]:
        def mean(role: str) -> jax.Array:
            blocks = [block for block in anchor if block.role == role]
            sums = [block.total(self.named, point[block.path]) / block.entries(self.named) for block in blocks]
            return sum(sums[1:], sums[0]) / len(sums)

        vector = -mean("down")
        if self.hidden:
            vector = vector - jnp.mean(vector) + jnp.mean(mean("up"))
        return jnp.where(within, vector, 0.0), within

    def read_mean(self, point: Arrays) -> jax.Array:
        return self.read(self.anchors[0], point, jnp.ones(self.shape, bool), near=False)[0]

    def coordinate(self, e: jax.Array, point: Arrays) -> jax.Array:
        return self.read_mean(point)
