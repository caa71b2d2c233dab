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
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Axes, Block
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.heads import BASIS, Heads, packable_blocks
from gauge_optax.gauges.instance import Anchor, Arrays, Effect, Instance
from gauge_optax.gauges.matrices import Matrices, head_matrices
from gauge_optax.gauges.rotation import Rotation
from gauge_optax.linalg import (
    balance,
    full_rank,
    haar,
    independent_rows,
    inverse,
    inverse_sqrt_by_products,
    matmul,
    matrix_exponential,
    real_dtype,
    safe_divide,
    solve,
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

    def rotation(self, key: jax.Array, by: str) -> jax.Array:
        return self.turn.rotation(key, by)

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

    def nearest(self, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> jax.Array:
        """See `Instance`: from the best of four starts, Gauss–Newton steps with a line search.

        The starts are the identity, the least-squares solutions of either side alone, and the rotation of both.
        """
        left, right = self.left, self.right
        turn = self.turn.nearest(target, point, others)
        return _nearest_matrix(
            left.gram(point, point), left.gram(point, target), right.gram(point, point), right.gram(point, target), turn
        )

    # Packing --------------------------------------------------------------------------------------------

    @property
    def packable(self) -> tuple[Block, ...]:
        return packable_blocks((*self.left.blocks, *self.right.blocks), self.size)

    @property
    def constant_rows(self) -> np.ndarray:
        return np.eye(self.size)

    def choose_rows(self, block: Block, point: Arrays, per_head: bool) -> jax.Array:
        matrices = self.turn.rows_of(block, point)
        heads = matrices.reshape(-1, *matrices.shape[-2:])
        return independent_rows(heads[:, None] if per_head else heads[None])

    def to_constant(self, block: Block, point: Arrays, rows: jax.Array, size: float) -> tuple[jax.Array, jax.Array]:
        matrices = self.turn.rows_of(block, point)
        heads = matrices.reshape(-1, *matrices.shape[-2:])
        back, to, condition = _to_identity(jnp.take_along_axis(heads, rows[..., None], -2), size)
        # From the right side, which moves as S⁻ᵀ, the same matrices are S⁻ᵀ and Sᵀ.
        pair = (to, back) if block in self.left.blocks else (transpose(back), transpose(to))
        return jnp.stack(pair, -3).reshape(*self.shape, 2, self.size, self.size), condition

    # What optimizers ask ------------------------------------------------------------------------------

    @property
    def sides(self) -> tuple[Heads, Heads]:
        return self.left, self.right

    def matrices(self, block: Block) -> tuple[int, Matrices | None]:
        return 0, head_matrices(block)


@jax.jit  # compiled once for all layers
def _to_identity(square: jax.Array, size: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns matrices M = A/size, their inverses, for which A·M⁻¹ = size·1, and their condition numbers."""
    _, sizes, _ = svd(square)
    condition = jnp.where(sizes[..., -1] > 0, sizes[..., 0] / sizes[..., -1], jnp.inf)
    return square / size, size * inverse(square), condition


def _conjugated(vectors: jax.Array, sizes: jax.Array) -> jax.Array:
    return matmul(transpose(vectors) * sizes[..., None, :], vectors)


@jax.jit  # compiled once for all layers
def _nearest_matrix(
    left: jax.Array, left_target: jax.Array, right: jax.Array, right_target: jax.Array, turn: jax.Array
) -> jax.Array:
    """S and S⁻¹ that make |T_A − A·S|² + |T_B − B·S⁻ᵀ|² least, (…, 2, d_h, d_h); no start is lower.

    Args:
      left: AᵀA.
      left_target: AᵀT_A.
      right: BᵀB.
      right_target: BᵀT_B.
      turn: the rotation that serves as a start.
    """
    eye = jnp.broadcast_to(jnp.eye(left.shape[-1], dtype=left.dtype), left.shape)

    def loss(s: jax.Array, back: jax.Array) -> jax.Array:
        a = s * (matmul(left, s) - 2.0 * left_target)
        b = transpose(back) * (matmul(right, transpose(back)) - 2.0 * right_target)
        total = jnp.sum(a + b, (-2, -1))
        return jnp.where(jnp.isfinite(total), total, jnp.inf)

    def better(one: tuple[jax.Array, jax.Array], two: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lower = (loss(*two) < loss(*one))[..., None, None]
        return jnp.where(lower, two[0], one[0]), jnp.where(lower, two[1], one[1])

    def step(_: int, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        s, back = pair
        # With A′ = A·S and B′ = B·S⁻ᵀ, and S·(1 + Z) in place of S: H_A′·Z + Z·H_B′ = K to first order.
        gram_a, gram_b = matmul(transpose(s), matmul(left, s)), matmul(matmul(back, right), transpose(back))
        k = matmul(transpose(s), left_target) - gram_a - transpose(matmul(back, right_target) - gram_b)
        (a, u), (b, v) = symmetric_eigen(gram_a), symmetric_eigen(gram_b)
        inside = safe_divide(matmul(matmul(transpose(u), k), v), a[..., :, None] + b[..., None, :])
        z, best = matmul(matmul(u, inside), transpose(v)), pair
        for length in _LENGTHS:
            more = eye + length * z
            best = better(best, (matmul(s, more), matmul(inverse(more), back)))
        return best

    pair = eye, eye
    starts = solve(left, left_target), transpose(inverse(solve(right, right_target))), turn
    for start in starts:
        pair = better(pair, (start, inverse(start)))
    return jnp.stack(jax.lax.fori_loop(0, _STEPS, step, pair), -3)


_LENGTHS = (1.0, 0.5, 0.2, 0.05, 0.01)
_STEPS = 20
