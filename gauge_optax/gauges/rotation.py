"""Head rotation: orthogonal matrices, the group O(d_h), that rotate the basis of attention heads.

Scores q·kᵀ depend on W_Q·W_Kᵀ alone and outputs on W_V·W_O alone. An orthogonal R that rotates the basis of both
factors therefore does not change the function. Stack the rows of all blocks to a matrix W (rows × d_h): a bias is one
more row, W_O enters as its transpose. R takes W to W·R. The vertical tangents are W·A for antisymmetric A, which have
d_h(d_h−1)/2 dimensions per head. `parts.heads` says how R is computed from the weights at `init`, and how rotations are
removed from later steps. Not a symmetry under rotary embeddings or QK-norm. Reference: the paper DDC (docs/design.md
§4), §3.2 and B.8; Lemma 25 for grouped queries.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Matched
from gauge_optax.gauges.copies import Compact, Effect, normal, part_label
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.linalg import haar, matrix_exponential, nearly_orthogonal, skew, transpose
from gauge_optax.parts.heads import BASIS, Rotation
from gauge_optax.parts.part import Orthogonal


def head_rotation(blocks: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None) -> BlockGauge:
    """An orthogonal matrix per head, by which the `basis` axis of all blocks is multiplied.

    Args:
      blocks: path → axes of all leaves sharing the basis (queries with keys, or values with outputs, and biases). One
        `basis` axis of length d_h; `head` counts the heads; `_` is any other axis.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are R, `(*named, d_h, d_h)`, which moves rows by W ↦ W·R.
      For a head of full rank, `read` returns an orthogonal R. Directions of W whose singular value is below about 64
      epsilons of the head's largest count as zero: R is zero there, and no step of `quotient` moves along them.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> params = {"q": jnp.ones((6, 2, 3)), "k": jnp.ones((6, 2, 3))}
    >>> # 2 heads × 3 planes.
    >>> go.head_rotation({"q": "_ head basis", "k": "_ head basis"}).dim(params)
    6

    Reference: DDC §3.2. Not a symmetry under RoPE (`rope_torus`) or QK-norm (`scale_invariant`).
    """
    return block_gauge("head_rotation", HeadRotation, {"blocks": blocks}, sizes)


@dataclasses.dataclass(frozen=True)
class HeadRotation(Orthogonal, Compact):
    """One copy. An element is an orthogonal matrix per head, (*shape, d_h, d_h)."""

    effect: ClassVar[Effect] = "orthogonal"
    reserved: ClassVar[tuple[str, ...]] = (BASIS,)
    breaks: ClassVar[str] = (
        "rotary embeddings (rope_torus) or QK-norm (scale_invariant), a bias that is not listed, or the index or order "
        "of a fused kernel, qkv=1 for qkv=0, (basis head) for (head basis)"
    )

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "HeadRotation":
        part = Rotation(part_label(found), found.named, found.shape, found.blocks, found.sizes[BASIS])
        return cls(found.key, (part,))

    @property
    def size(self) -> int:
        """d_h, the length of the basis axis."""
        return int(jax.eval_shape(self.parts[-1].identity).shape[-1])

    @property
    def dim(self) -> int:
        return math.prod(self.shape) * self.size * (self.size - 1) // 2

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        return random_rotation(key, (*self.shape, self.size, self.size), scale)

    def algebra(self) -> jax.Array:
        return 0.0 * self.identity()

    def exponential(self, coordinates: jax.Array, near: bool = False) -> jax.Array:
        return rotation_of(coordinates, near)

    def normalized(self, element: jax.Array) -> jax.Array:
        return nearly_orthogonal(element)


def rotation_of(coordinates: jax.Array, near: bool) -> jax.Array:
    """The rotations exp(A), (…, d, d), where A is the antisymmetric part of the coordinates; 1 + A if `near`."""
    generator = skew(coordinates)
    if not near:
        return matrix_exponential(generator)
    return jnp.broadcast_to(jnp.eye(generator.shape[-1], dtype=generator.dtype), generator.shape) + generator


def random_rotation(key: jax.Array, shape: tuple[int, ...], scale: float | jax.Array) -> jax.Array:
    """Random orthogonal matrices of shape (…, d, d).

    For a scale of 1 or more they are from the Haar measure; the smaller the scale, the nearer they are to the identity.
    """
    traced = isinstance(scale, jax.core.Tracer)
    if not traced and scale >= 1:
        return haar(key, shape)
    drawn = normal(key, shape, 1.0)
    near = matrix_exponential(scale * (drawn - transpose(drawn)) / math.sqrt(2 * shape[-1]))
    return jnp.where(scale >= 1, haar(key, shape), near) if traced else near
