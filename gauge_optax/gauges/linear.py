"""Head linear: invertible matrices, the group GL(d_h), that change the basis which two factors share.

A product M = A·Bᵀ is unchanged by (A, B) ↦ (A·S, B·S⁻ᵀ) for every invertible S. Queries and keys without rotary
embeddings, values and outputs (rows of W_O), and LoRA factors have this form. The gauge has two parts, the factors of
S = Q·P:

* P, symmetric positive, is a size. At every step it is computed from A = Â·P, where Â has orthonormal columns, and
  divided out (`parts.sizes`);
* Q, a rotation of both factors, is a turn. It is computed once, at `init`. Later, rotations are removed from steps
  (`parts.heads`).

Let H_A = AᵀA and H_B = BᵀB. At the point of least norm on an orbit, H_A = H_B. The element that leads there is
S = (H_A⁻¹ # H_B)^{1/2}, where # is the geometric mean of positive matrices. Tangents of the orbit are (A·Z, −B·Zᵀ) for
any matrix Z: d_h² dimensions per head. There is no coordinate that could drift.
References: When Equivalent Weights Train Differently, §1, §3; docs/design.md §5.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Matched
from gauge_optax.gauges.copies import Effect, drawn, part_label
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.rotation import HeadRotation, random_rotation
from gauge_optax.linalg import haar, inverse, matmul, matrix_exponential, symmetric_eigen, transpose
from gauge_optax.parts.heads import BASIS, Heads, Rotation
from gauge_optax.parts.sizes import Stretch


def head_linear(
    left: Mapping[str, Axes], right: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """An invertible matrix S per head, which changes the basis of two factors: left·S and right·S⁻ᵀ along `basis`.

    Args:
      left: path → axes of one factor (queries; values and their bias; LoRA's A), "_ head basis". Every leaf has one
        `basis` axis, on which S acts; every index of `head` has an S of its own; `_` is any other axis.
      right: path → axes of the other factor (keys; the output kernel, "head basis _"; LoRA's B).
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are S, `(*named, d_h, d_h)`.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> gauge = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
    >>> params = {
    ...     "a": jnp.array([[4.0, 0.0], [0.0, 1.0]]),
    ...     "b": jnp.array([[1.0, 0.0], [0.0, 9.0]]),
    ... }
    >>> balanced = gauge.act(gauge.balance(params), params)
    >>> jax.tree.map(lambda x: x.round(4).tolist(), balanced)  # the product is diag(4, 9)
    {'a': [[2.0, 0.0], [0.0, 3.0]], 'b': [[2.0, 0.0], [0.0, 3.0]]}

    Reference: When Equivalent Weights Train Differently, §1. It is no symmetry under RoPE (`rope_linear`) or QK-norm;
    if values are normalised, only `head_rotation` is one. In float32, S may have condition numbers up to about 1e2.
    """
    return block_gauge("head_linear", Linear, {"left": left, "right": right}, sizes)


@dataclasses.dataclass(frozen=True)
class Linear(HeadRotation):
    """One copy. An element is S = Q·P per head, (*shape, d_h, d_h). The parts are the stretch P and the rotation Q."""

    effect: ClassVar[Effect] = "linear"
    balancing: ClassVar[Effect] = "linear"
    breaks: ClassVar[str] = HeadRotation.breaks.replace("rope_torus", "rope_linear")

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "Linear":
        named, shape, size, name = found.named, found.shape, found.sizes[BASIS], part_label(found)
        left, right = (Heads(named, shape, side, size) for side in found.of_argument("left", "right"))
        stretch = Stretch(f"{name} stretch", named, shape, found.blocks, left, right)
        turn = Rotation(f"{name} rotation", named, shape, (*left.blocks, *right.blocks), size, of_linear=True)
        return cls(found.key, (stretch, turn))

    @property
    def dim(self) -> int:
        return math.prod(self.shape) * self.size**2

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        first, second, sizes = jax.random.split(key, 3)
        shape = (*self.shape, self.size, self.size)
        logs, left = drawn(sizes, shape[:-1], scale), haar(first, shape)
        # S = U·exp(logs)·Vᵀ. At a small scale V is U turned a little, so that S is near the identity.
        start = jnp.where(scale < 1, left, self.parts[1].identity())
        right = matmul(random_rotation(second, shape, scale), start)
        return matmul(left * jnp.exp(logs)[..., None, :], transpose(right))

    def split(self, element: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.stack([element, inverse(element)], -3), self.parts[1].identity()

    def join(self, elements: Sequence[jax.Array]) -> jax.Array:
        stretch, turn = elements
        return matmul(turn, stretch[..., 0, :, :])  # A ↦ (A·Q)·P

    def exponential(self, coordinates: jax.Array, near: bool = False) -> jax.Array:
        return self.identity() + coordinates if near else matrix_exponential(coordinates)

    @staticmethod
    def inverse(element: jax.Array) -> jax.Array:
        return inverse(element)

    def normalized(self, element: jax.Array) -> jax.Array:
        return element

    @staticmethod
    def power(element: jax.Array, exponent: float | jax.Array) -> jax.Array:
        values, vectors = symmetric_eigen(element)  # balances are symmetric and positive
        return matmul(vectors * (values**exponent)[..., None, :], transpose(vectors))
