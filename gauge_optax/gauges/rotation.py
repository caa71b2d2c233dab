"""Head rotation: O(d_h) acting on the basis of an attention head.

Scores q·kᵀ see W_Q·W_Kᵀ and outputs see W_V·W_O only, so turning both factors' head basis by one orthogonal R
(biases are one more row, W_O enters as its transpose) changes nothing. With all blocks' rows stacked to W ∈
R^{rows×d_h}, the orbit tangents are W·A with A skew; the horizontal part of U is U − W·A where M·A + A·M =
2·skew(WᵀU), M = WᵀW. Horizontal motion has holonomy, so there is no coordinate: drift is the accumulated vertical
part. d_h(d_h−1)/2 dimensions a head.
Reference: DDC §3.2, B.8; grouped queries: Lemma 25. Not a symmetry under rotary embeddings or QK-norm.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Instance, block_specs, frozen_sizes
from gauge_optax.gauges._head import BASIS, HeadBlock, HeadInstance
from gauge_optax.gauges.base import BoundGauge, Effect, Element
from gauge_optax.gauges.bound import Arrays, Bound
from gauge_optax.gauges.reading import Motion, Reading
from gauge_optax.gauges.turning import TurnReading, turn_motion
from gauge_optax.linalg import matmul, real_dtype, skew_exponential, transpose


def head_rotation(blocks: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None) -> "HeadRotation":
    """O(d_h) acting on every head: the `basis` axis of each block turns by that head's rotation.

    Args:
      blocks: path → axes of all leaves sharing the basis (queries with keys, or values with outputs, and biases). One
        `basis` axis of length d_h; `head` indexes the group; `_` is summed.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are R, `(*named, d_h, d_h)`, W ↦ W·R.

    Raises:
      ValueError: malformed axes, here; any mismatch with the tree, when it is first seen.

    >>> params = {"q": jnp.ones((6, 2, 3)), "k": jnp.ones((6, 2, 3))}
    >>> go.head_rotation({"q": "_ head basis", "k": "_ head basis"}).dim(params)  # 2 heads × 3 planes
    6

    Reference: DDC §3.2. Not a symmetry under RoPE (`rope_torus`) or QK-norm (`scale_invariant`).
    """
    return HeadRotation(block_specs("head_rotation", "blocks", blocks, (BASIS,)), frozen_sizes("head_rotation", sizes))


@dataclasses.dataclass(frozen=True)
class TurningGauge(BoundGauge):
    """What full rotations and tori share: an orthogonal matrix per head, or per head and plane, acting on rows."""

    effect: ClassVar[Effect] = "orthogonal"
    balancing: ClassVar[Effect] = "still"
    reserved: ClassVar[tuple[str, ...]] = (BASIS,)

    @abc.abstractmethod
    def matrix(self, element: jax.Array) -> jax.Array:
        """The orthogonal matrices (*shape, size, size) of one instance's element."""

    def readings(self, bound: Bound) -> tuple[Reading, ...]:
        return tuple(map(TurnReading, bound.rotations))

    def element_of(self, bound: Bound, found: Mapping[Reading, jax.Array], values: Mapping[str, jax.Array]) -> Element:
        return {r.key: found[r] for r in self.readings(bound)}

    def by_reading(self, bound: Bound, element: Element) -> Mapping[Reading, jax.Array]:
        return {r: self.matrix(element[r.key]) for r in self.readings(bound)}

    def motion(self, bound: Bound, element: Element, inverse: Element) -> Motion:
        return turn_motion(bound.rotations, {key: self.matrix(x) for key, x in element.items()})

    def move(self, bound: Bound, element: Element, values: Mapping[str, jax.Array]) -> Arrays:
        moved = dict(values)
        for head in bound.rotations:
            moved |= head.turn(moved, self.matrix(element[head.key]))
        return moved

    def fraction(self, element: Element, strength: float | jax.Array) -> Element:
        return element  # the balance of a compact gauge is the identity

    def dim(self, params: Any) -> int:
        return sum(math.prod(h.shape) * h.size * (h.size - 1) // 2 for h in self.bound(params).rotations)



@dataclasses.dataclass(frozen=True)
class HeadRotation(TurningGauge):
    """See `head_rotation`."""

    name: ClassVar[str] = "head_rotation"
    breaks: ClassVar[str] = (
        "rotary embeddings (rope_torus) or QK-norm (scale_invariant), a bias that is not listed, or the index or order "
        "of a fused kernel, qkv=1 for qkv=0, (basis head) for (head basis)"
    )

    def assemble(self, named: tuple[str, ...], instances: Sequence[Instance]) -> Bound:
        return Bound(
            heads=(
                tuple(
                    HeadInstance(
                        self.name,
                        i.key,
                        named,
                        i.shape(named),
                        dict(i.sizes)[BASIS],
                        tuple(HeadBlock(b, None) for b in i.blocks),
                    )
                    for i in instances
                ),
            )
        )

    def element_sizes(self, named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        return dict(zip((*named, BASIS), element.shape, strict=False))

    def matrix(self, element: jax.Array) -> jax.Array:
        return element

    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        heads = self.bound(params).rotations
        keys = jax.random.split(key, max(1, len(heads)))
        return {h.key: _random_rotation(k, h, scale) for k, h in zip(keys, heads, strict=False)}

    def identity(self, params: Any) -> Element:
        return {
            h.key: jnp.broadcast_to(jnp.eye(h.size, dtype=real_dtype()), (*h.shape, h.size, h.size))
            for h in self.bound(params).rotations
        }

    def inverse(self, element: Element) -> Element:
        return jax.tree.map(transpose, element)

    def compose(self, a: Element, b: Element) -> Element:
        return jax.tree.map(lambda last, first: matmul(first, last), a, b)


def _random_rotation(key: jax.Array, head: HeadInstance, scale: float) -> jax.Array:
    shape = (*head.shape, head.size, head.size)
    if scale < 1:
        normal = jax.random.normal(key, shape, real_dtype())
        return skew_exponential(scale * (normal - transpose(normal)) / math.sqrt(2 * head.size))
    return haar(key, shape)


def haar(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Orthogonal matrices of this shape, (…, d, d), from the Haar measure on O(d)."""
    q, r = jnp.linalg.qr(jax.random.normal(key, shape, real_dtype()))
    signs = jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))
    return q * signs[..., None, :]  # without the signs QR is not Haar
