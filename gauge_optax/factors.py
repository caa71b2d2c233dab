"""Batched kernels of a factor pair A·Bᵀ: ranks, balance, and the inverse of one factor's Gram matrix.

A factor is (…, rows, d) with d small. Ranks and singular values are read off its triangular factor R, never off the
Gram matrix Rᵀ·R, which squares the condition. Not here: anything that knows what a head, a leaf or a gauge is.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.linalg import eigenvalue_cutoff, inverse_sqrt_by_products, matmul, safe_divide, transpose
from gauge_optax.xla import in_turn


def triangular(rows: jax.Array) -> jax.Array:
    """The triangular factor R of A = Q·R.

    Args:
      rows: A, (…, m, d).

    Returns:
      (…, d, d), upper triangular; where m < d its last rows are zero.

    >>> jnp.abs(triangular(jnp.array([[3.0, 0.0], [4.0, 5.0]]))).round(4).tolist()
    [[5.0, 4.0], [0.0, 3.0]]
    """
    short = max(0, rows.shape[-1] - rows.shape[-2])
    return jnp.linalg.qr(jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, short), (0, 0)]), mode="r")


def triangulars(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`triangular` of two factors, one after the other."""
    first, second = in_turn(triangular, (left, right))
    return first, second


def rank_cutoff(dtype: jnp.dtype) -> float:
    """Relative size below which a direction of a factor counts as missing: 1e-4 in float32, 1e-12 in float64.

    Steps amplify the rounding of a gradient that lacks ranks. Divided by a size that is rounding, the other factor's
    step would be of any length: with 1e-6, twins of float32 LoRA factors under a rank-one target were 0.9 apart.
    """
    return 1e-12 if dtype == jnp.float64 else 1e-4


def full_rank(r: jax.Array) -> jax.Array:
    """Whether a factor has linearly independent columns, told from its triangular factor.

    Args:
      r: (…, d, d), upper triangular.

    Returns:
      (…,) bool: no column is zero or, to rounding, a combination of those before it. Sizes of columns do not matter.
    """
    size = jnp.linalg.norm(r, axis=-2)
    apart = jnp.abs(jnp.diagonal(r, axis1=-2, axis2=-1))
    return jnp.all(apart > rank_cutoff(r.dtype) * size, -1)


class Balance(NamedTuple):
    """The symmetric positive S that frames a pair, as S = W·e^logs·Wᵀ.

    Attributes:
      vectors: W, (…, d, d).
      logs: (…, d).
    """

    vectors: jax.Array
    logs: jax.Array

    def power(self, exponent: float | jax.Array) -> jax.Array:
        """S^exponent, (…, d, d)."""
        return matmul(self.vectors * jnp.exp(exponent * self.logs)[..., None, :], transpose(self.vectors))


def balance(left: jax.Array, right: jax.Array) -> Balance:
    """S = (H_A⁻¹ # H_B)^{1/2}: A·S and B·S⁻ᵀ have one Gram matrix, and the least norm of all pairs with this product.

    Args:
      left: triangular factor of A, (…, d, d).
      right: triangular factor of B, (…, d, d).

    Returns:
      S, by two singular value decompositions; the identity for pairs that have not full rank, which no S balances.

    With the core R_A·R_Bᵀ = U·Σ·Vᵀ, every balanced pair is (Q_A·U·Σ^{1/2}·O, Q_B·V·Σ^{1/2}·O), O orthogonal. So
    S·Oᵀ = R_A⁻¹·U·Σ^{1/2}, and S is the symmetric part of that matrix's polar decomposition.

    Reference: docs/design.md §6; # is the geometric mean of positive matrices (Ando).

    >>> s = balance(jnp.diag(jnp.array([4.0, 1.0])), jnp.diag(jnp.array([1.0, 9.0]))).power(1.0)
    >>> s.round(4).tolist()  # sizes 4·½ = 1/½ and 1·3 = 9/3
    [[0.5, 0.0], [0.0, 3.0]]
    """
    whole = (full_rank(left) & full_rank(right))[..., None, None]
    left, right = (jnp.where(whole, x, jnp.eye(x.shape[-1], dtype=x.dtype)) for x in (left, right))
    u, sizes, _ = jnp.linalg.svd(matmul(left, transpose(right)))
    _, values, vectors = jnp.linalg.svd(matmul(transpose(u), left) / jnp.sqrt(sizes)[..., :, None])
    return Balance(transpose(vectors), -jnp.log(values))


def _by_products(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """J such that A·J has orthonormal columns, but for zero ones, and whether it was exact enough everywhere.

    By the Gram matrix, twice. The first pass leaves what it rounds, ε·condition²; of its result the Gram matrix is near
    the identity.
    """
    size = jnp.linalg.norm(rows, axis=-2, keepdims=True)
    inverse = safe_divide(jnp.ones_like(size), size)
    unit = rows * inverse
    first = inverse_sqrt_by_products(matmul(transpose(unit), unit), _least(rows.dtype))
    into = transpose(inverse) * first
    columns = matmul(rows, into)
    gram = matmul(transpose(columns), columns)
    turn = inverse_sqrt_by_products(gram, 0.1 / math.sqrt(gram.shape[-1]))
    off = matmul(matmul(turn, gram), turn) - jnp.eye(gram.shape[-1], dtype=gram.dtype)
    return matmul(into, turn), jnp.all(jnp.abs(off) < 1e-3)


def _least(dtype: jnp.dtype) -> float:
    """λ_min/‖G‖_F down to which Gram matrices of unit columns are worked with."""
    return 1e-12 if dtype == jnp.float64 else 1e-5


def inverse_gram(rows: jax.Array, damping: float | jax.Array = 0.0) -> jax.Array:
    """(AᵀA + λ)⁻¹, or the pseudo-inverse of AᵀA where λ = 0 and A has less than full rank.

    Args:
      rows: A, (…, m, d).
      damping: λ, absolute: a number or (…,).

    Returns:
      (…, d, d), symmetric. Rank is told after columns are made unit vectors, so that no column is dropped for being
      small beside the others. Undamped, zero columns give zero, and so do those under 1e-13 in float32 (1e-142 in
      float64), whose inverse squares would overflow.

    Where the columns are well enough conditioned for matrix products alone (scaled to one length, up to about 1e2 in
    float32 and 1e6 in float64) it is J·Jᵀ, the columns of A·J orthonormal. Else, with [A; √λ·I] = Q·R·D and D the norms
    of its columns, (R·D)⁻¹·(R·D)⁻ᵀ, by singular values where R may be singular.

    >>> inverse = inverse_gram(jnp.array([[1e3, 0.0], [0.0, 1e-3], [0.0, 0.0]]))
    >>> (inverse * jnp.array([[1e6, 1.0], [1.0, 1e-6]])).round(4).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    squares = jnp.sum(jnp.square(rows), -2)
    added = jnp.broadcast_to(jnp.asarray(damping, rows.dtype)[..., None], squares.shape)
    norms = jnp.sqrt(squares + added)
    live = norms > float(jnp.finfo(rows.dtype).tiny) ** 0.5 / eigenvalue_cutoff(rows.dtype)
    below = jnp.sqrt(added)[..., None] * jnp.eye(rows.shape[-1], dtype=rows.dtype)
    found, good = _by_products(jnp.concatenate([rows, below], -2))
    root = jax.lax.cond(
        good & jnp.all(live),
        lambda: found,
        lambda: _triangular_root(rows, added, jnp.where(live, norms, 1.0), live),
    )
    return matmul(root, transpose(root))


def _triangular_root(rows: jax.Array, added: jax.Array, norms: jax.Array, live: jax.Array) -> jax.Array:
    """Y with Y·Yᵀ = (AᵀA + λ)⁻¹, by QR."""
    size, cutoff = rows.shape[-1], eigenvalue_cutoff(rows.dtype)
    # A row of its own keeps a zero column apart from the others, and R invertible.
    below = jnp.where(live, jnp.sqrt(added) / norms, 1.0)[..., None] * jnp.eye(size, dtype=rows.dtype)
    r = triangular(jnp.concatenate([jnp.where(live, 1.0 / norms, 0.0)[..., None, :] * rows, below], -2))
    eye = jnp.broadcast_to(jnp.eye(size, dtype=r.dtype), r.shape)
    whole = full_rank(r)
    root = jax.scipy.linalg.solve_triangular(jnp.where(whole[..., None, None], r, eye), eye)
    # ‖R‖·‖R⁻¹‖ is no less than R's condition: no singular value is cut off.
    whole &= jnp.linalg.norm(root, axis=(-2, -1)) * size**0.5 < 1.0 / cutoff
    root = root / norms[..., :, None]

    def pseudo() -> jax.Array:
        return jnp.where(whole[..., None, None], root, _pseudo_root(r, norms))

    root = jax.lax.cond(jnp.all(whole), lambda: root, pseudo)
    return jnp.where(live[..., :, None], root, 0.0)


def _pseudo_root(r: jax.Array, norms: jax.Array) -> jax.Array:
    """Y with Y·Yᵀ the pseudo-inverse of D·RᵀR·D."""
    _, sizes, vectors = jnp.linalg.svd(r)
    kept = (sizes > eigenvalue_cutoff(r.dtype) * sizes[..., :1])[..., None, :]
    vectors = transpose(vectors) / norms[..., :, None]
    root = jnp.where(kept, vectors / jnp.where(kept, sizes[..., None, :], 1.0), 0.0)
    # D⁻¹ takes it out of the row space; what is left over spans the null space. Dropped vectors come first in Q.
    null = jnp.linalg.qr(jnp.where(kept, 0.0, vectors)[..., ::-1])[0] * ~kept[..., ::-1]
    return root - matmul(null, matmul(transpose(null), root))
