"""Head linear: GL(d_h) acting on the basis that two factors share.

A product M = A·Bᵀ is unchanged by (A, B) ↦ (A·S, B·S⁻ᵀ) for every invertible S: queries and keys without rotary, values
and outputs (rows of W_O), LoRA factors all have this form. S = Q·P has two parts:

* P, symmetric positive, is read at every step: A = Â·P, where Â has orthonormal columns. Far from the slice it is read
  by QR and the SVD of the triangular factor (a Gram matrix would square the condition number), near it by products.
* Q, a rotation of both factors, is read once and held (`rotation`).

With Gram matrices H_A = AᵀA and H_B = BᵀB, the least-norm point of an orbit is balanced, H_A = H_B, and reached by
S = (H_A⁻¹ # H_B)^{1/2}, where # is the geometric mean. Tangents of the orbit are (A·Z, −B·Zᵀ), with d_h² dimensions
per head. There is no coordinate that could drift.
References: When Equivalent Weights Train Differently, §1, §3; docs/design.md §5.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Block
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.heads import BASIS, Heads
from gauge_optax.gauges.instance import Anchor, Arrays, Effect, Instance
from gauge_optax.gauges.matrices import Matrices, head_matrices
from gauge_optax.gauges.rotation import Rotation
from gauge_optax.linalg import (
    balance,
    full_rank,
    haar,
    inverse,
    inverse_sqrt_by_products,
    matmul,
    matrix_exponential,
    real_dtype,
    svd,
    symmetric_eigen,
    transpose,
    triangular_factor,
)

_LEAST = 1e-4  # least λ_min/‖H‖_F of a Gram matrix H after one step from which the way back to the slice is exact


def head_linear(
    left: Mapping[str, Axes], right: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """GL(d_h) acting on every head: left·S and right·S⁻ᵀ along the `basis` axis.

    Args:
      left: path → axes of one factor (queries; values and their bias; LoRA's A). One `basis` axis; `head` indexes the
        group; `_` is summed.
      right: path → axes of the other (keys; the output kernel, "head basis _"; LoRA's B).
      sizes: lengths of axes inside `(a b)` that no other block fixes.

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
class Linear(Instance):
    """One instance. Elements carry S with its inverse, (*shape, 2, d_h, d_h), so that no step inverts a matrix.

    Attributes:
      size: d_h.
    """

    size: int

    effect: ClassVar[Effect] = "linear"
    balancing: ClassVar[Effect] = "linear"
    rigid: ClassVar[str | None] = BASIS
    breaks: ClassVar[str] = Rotation.breaks.replace("rope_torus", "rope_linear")

    @classmethod
    def of(cls, gauge: str, key: str, named: tuple[str, ...], sizes: Mapping[str, int], blocks: Any) -> "Linear":
        """The instance of a binding's blocks."""
        return cls(gauge, key, named, tuple(sizes[name] for name in named), tuple(blocks), sizes[BASIS])

    axis_sizes = staticmethod(Rotation.axis_sizes)

    def _side(self, *roles: str) -> Rotation:
        blocks = tuple(block for block in self.blocks if block.role in roles)
        return Rotation(self.gauge, self.key, self.named, self.shape, blocks, self.size)

    @property
    def left(self) -> Rotation:
        """The rows that are multiplied by S."""
        return self._side("left")

    @property
    def right(self) -> Rotation:
        """The rows that are multiplied by S⁻ᵀ."""
        return self._side("right")

    @property
    def dim(self) -> int:
        return self.turn.heads * self.size**2

    # The group ----------------------------------------------------------------------------------------

    def identity(self) -> jax.Array:
        return jnp.broadcast_to(jnp.eye(self.size, dtype=real_dtype()), (*self.shape, 2, self.size, self.size))

    @staticmethod
    def inverse(e: jax.Array) -> jax.Array:
        return e[..., ::-1, :, :]

    @staticmethod
    def compose(a: jax.Array, b: jax.Array) -> jax.Array:
        (s, s_inverse), (t, t_inverse) = (jnp.unstack(x, axis=-3) for x in (a, b))
        return jnp.stack([matmul(t, s), matmul(s_inverse, t_inverse)], -3)  # A ↦ (A·t)·s

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        first, second, sizes = jax.random.split(key, 3)
        shape = (*self.shape, self.size, self.size)
        logs = jax.random.uniform(sizes, shape[:-1], real_dtype(), -scale, scale)
        return matmul(haar(first, shape) * jnp.exp(logs)[..., None, :], transpose(haar(second, shape)))

    def algebra(self) -> jax.Array:
        return jnp.zeros((*self.shape, self.size, self.size), real_dtype())

    def exponential(self, coordinates: jax.Array, near: bool = False) -> jax.Array:
        eye = jnp.eye(self.size, dtype=coordinates.dtype)
        return eye + coordinates if near else matrix_exponential(coordinates)

    @staticmethod
    def inverse_element(element: jax.Array) -> jax.Array:
        return inverse(element)

    @staticmethod
    def compose_elements(a: jax.Array, b: jax.Array) -> jax.Array:
        return matmul(b, a)

    def to_element(self, e: jax.Array) -> jax.Array:
        return e[..., 0, :, :]

    def from_element(self, element: jax.Array) -> jax.Array:
        return jnp.stack([element, inverse(element)], -3)

    @staticmethod
    def power(element: jax.Array, exponent: float | jax.Array) -> jax.Array:
        """A power of a public element that is symmetric positive, as balances are."""
        values, vectors = symmetric_eigen(element)
        return matmul(vectors * (values**exponent)[..., None, :], transpose(vectors))

    def motion(self, e: jax.Array, change: Any, end: Arrays, turn: jax.Array | None) -> Any:
        stretch, _ = self.read(self.anchors[0], end, jnp.ones(self.shape, bool), near=True)
        generator = stretch[..., 0, :, :] - jnp.eye(self.size, dtype=e.dtype) + (0.0 if turn is None else turn)
        # With A = Â·S and the slice point Â, Â·Z·S is A·(S⁻¹·Z·S).
        return matmul(matmul(e[..., 1, :, :], generator), e[..., 0, :, :])

    # The action ---------------------------------------------------------------------------------------

    def act(self, e: jax.Array, point: Arrays) -> Arrays:
        return self._moved(point, e[..., 0, :, :], transpose(e[..., 1, :, :]))

    def pull(self, e: jax.Array, cotangent: Arrays) -> Arrays:
        return self.act(self.dual(e), cotangent)

    def dual(self, e: jax.Array) -> jax.Array:
        return transpose(e)

    def _moved(self, point: Arrays, left: jax.Array, right: jax.Array) -> Arrays:
        once = point | self.left.turned(point, left)  # one fused leaf may hold both sides
        return once | self.right.turned(once, right)

    # Reading, holding, balance --------------------------------------------------------------------------

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return self.left.blocks, self.right.blocks

    def read(self, anchor: Anchor, point: Arrays, within: jax.Array, near: bool) -> tuple[jax.Array, jax.Array]:
        from_left = anchor == self.left.blocks
        side = self.left if from_left else self.right
        eye = jnp.broadcast_to(jnp.eye(self.size, dtype=real_dtype()), (*self.shape, self.size, self.size))
        if near:
            gram = side.gram(point, point)
            read = within & (jnp.trace(gram, axis1=-2, axis2=-1) > 0)
            gram = jnp.where(read[..., None, None], gram, eye)
            root_inverse = inverse_sqrt_by_products(gram, _LEAST)
            pair = matmul(gram, root_inverse), root_inverse
        else:
            root = triangular_factor(side.stacked(point))
            read = within & full_rank(root)
            _, sizes, vectors = svd(jnp.where(read[..., None, None], root, eye))
            pair = _conjugated(vectors, sizes), _conjugated(vectors, 1.0 / sizes)
        # From the right side, which moves as P⁻ᵀ = P⁻¹, the same formula gives the inverse.
        return jnp.stack(pair if from_left else pair[::-1], -3), read

    def balanced(self, point: Arrays) -> jax.Array:
        root = balance(triangular_factor(self.left.stacked(point)), triangular_factor(self.right.stacked(point)))
        return jnp.stack([root.power(-1.0), root.power(1.0)], -3)

    @property
    def turn(self) -> Rotation:
        return self._side("left", "right")

    def from_turn(self, turn: jax.Array) -> jax.Array:
        # A head of less than full rank reads as a partial isometry, which has no inverse, and keeps its basis.
        whole = jnp.sum(jnp.square(turn), (-2, -1)) > self.size - 0.5
        turn = jnp.where(whole[..., None, None], turn, jnp.eye(self.size, dtype=turn.dtype))
        return jnp.stack([turn, transpose(turn)], -3)

    # What optimizers ask ------------------------------------------------------------------------------

    @property
    def sides(self) -> tuple[Heads, Heads]:
        return self.left, self.right

    def matrices(self, block: Block) -> tuple[int, Matrices | None]:
        return 0, head_matrices(block)


def _conjugated(vectors: jax.Array, sizes: jax.Array) -> jax.Array:
    return matmul(transpose(vectors) * sizes[..., None, :], vectors)
