"""Key bias: a bias that softmax ignores, because it adds one number to all scores of a query.

The score of query q and key k + b is q·k + q·b. The second term is the same for all keys, so that softmax drops it. The
group is Rⁿ under addition, n being the number of entries of b: every value of the bias gives one function. A point
reads as b itself, and on the slice b is zero. Reference: docs/design.md §5, "More dead directions".
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.instance import Additive, Arrays, Effect
from gauge_optax.linalg import real_dtype


def key_bias(blocks: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None) -> BlockGauge:
    """Any constant added to a bias that the function does not depend on, such as a key bias before softmax.

    Args:
      blocks: path → axes of such biases; name the axes that are to index an element: `{"key/bias": "head entry"}`.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are {leaf path: what is added, the leaf's shape}; entries
      outside the block do nothing.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> gauge = go.key_bias({"key/bias": "_ _"})
    >>> gauge.dim({"key": {"bias": jnp.ones((2, 3)), "kernel": jnp.ones((6, 2, 3))}})
    6

    Reference: docs/design.md §5. Not a symmetry under rotary embeddings or QK-norm.
    """
    return block_gauge("key_bias", Constant, {"blocks": blocks}, sizes)


@dataclasses.dataclass(frozen=True)
class Constant(Additive):
    """One instance: an array of the leaf's shape per block."""

    effect: ClassVar[Effect] = "shift"
    balancing: ClassVar[Effect] = "shift"
    breaks: ClassVar[str] = "rotary embeddings or QK-norm between the bias and the scores, or no softmax"

    @classmethod
    def of(cls, gauge: str, key: str, named: tuple[str, ...], sizes: Mapping[str, int], blocks: Any) -> "Constant":
        """The instance of a binding's blocks."""
        return cls(gauge, key, named, tuple(sizes[name] for name in named), tuple(blocks))

    @staticmethod
    def axis_sizes(named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        """Lengths of axes, read off an element: none, because the leaf alone determines all of them."""
        return {}

    @property
    def dim(self) -> int:
        return sum(math.prod(block.view_shape) for block in self.blocks)

    def identity(self) -> Arrays:
        return {block.path: jnp.zeros(block.shape, real_dtype()) for block in self.blocks}

    @staticmethod
    def power(element: Arrays, exponent: float | jax.Array) -> Arrays:
        """The power of a public element."""
        return jax.tree.map(lambda x: exponent * x, element)

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> Arrays:
        added = self.identity()
        for block, key_of_block in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            drawn = scale * jax.random.normal(key_of_block, block.view_shape, real_dtype())
            added[block.path] = block.write(added[block.path], drawn)
        return added

    @staticmethod
    def conjugated(specs: Any, element: Arrays, moved: Any) -> Arrays:
        return {path: moved(path, x) for path, x in element.items()}

    def act(self, e: Arrays, point: Arrays) -> Arrays:
        out = dict(point)
        for block in self.blocks:  # an element has the leaf's shape; what a fused leaf holds beside the block stays
            out[block.path] = block.write(out[block.path], block.view(out[block.path]) + block.view(e[block.path]))
        return out

    def push(self, e: Arrays, tangent: Arrays) -> Arrays:
        return tangent

    def pull(self, e: Arrays, cotangent: Arrays) -> Arrays:
        return cotangent

    def centred(self, vector: Arrays) -> Arrays:
        out = dict(vector)
        for block in self.blocks:
            out[block.path] = block.write(out[block.path], jnp.zeros(block.view_shape, out[block.path].dtype))
        return out

    def coordinate(self, e: Arrays, point: Arrays) -> Arrays:
        return e

    def read_mean(self, point: Arrays) -> Arrays:
        read = self.identity()
        for block in self.blocks:
            read[block.path] = block.write(read[block.path], block.view(point[block.path]))
        return read
