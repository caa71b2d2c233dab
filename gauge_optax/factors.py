"""Batched kernels of a factor pair A·Bᵀ: ranks, balance, and the inverse of one factor's part of the product.

A factor is (…, rows, d) with d small. Everything is read off its triangular factor R (rowsᵀ·rows = Rᵀ·R), never off
the Gram matrix, which squares the condition. Not here: anything that knows what a head, a leaf or a gauge is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.linalg import eigenvalue_cutoff, matmul, safe_divide, transpose


def orthonormal(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A = Q·R with orthonormal columns in Q and an upper triangular R.

    Args:
      rows: (…, m, d).

    Returns:
      Q (…, m, d) and R (…, d, d); where m < d the last columns of Q are zero.

    >>> q, r = orthonormal(jnp.array([[3.0, 0.0], [4.0, 5.0]]))
    >>> bool(jnp.allclose(q @ r, jnp.array([[3.0, 0.0], [4.0, 5.0]]), atol=1e-5))
    True
    """
    short = max(0, rows.shape[-1] - rows.shape[-2])
    q, r = jnp.linalg.qr(jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, short), (0, 0)]))
    return q[..., : rows.shape[-2], :], r


def triangular(rows: jax.Array) -> jax.Array:
    """R of `orthonormal`, (…, d, d)."""
    short = max(0, rows.shape[-1] - rows.shape[-2])
    return jnp.linalg.qr(jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, short), (0, 0)]), mode="r")


def full_rank(r: jax.Array) -> jax.Array:
    """Whether a factor has linearly independent columns, told from its triangular factor.

    Args:
      r: (…, d, d), upper triangular.

    Returns:
      (…,) bool: no column is zero or, to rounding, a combination of those before it. Sizes of columns do not matter.
    """
    size = jnp.linalg.norm(r, axis=-2)
    apart = jnp.abs(jnp.diagonal(r, axis1=-2, axis2=-1))
    return jnp.all(apart > eigenvalue_cutoff(r.dtype) * size, -1)


class Balance(NamedTuple):
    """The symmetric positive S that frames a pair, as S = W·e^logs·Wᵀ.

    Attributes:
      vectors: W, (…, d, d).
      logs: (…, d).
      whole: (…,) whether both sides have full rank, so that S balances them.
    """

    vectors: jax.Array
    logs: jax.Array
    whole: jax.Array

    def power(self, exponent: float | jax.Array) -> jax.Array:
        """S^exponent, (…, d, d)."""
        return matmul(self.vectors * jnp.exp(exponent * self.logs)[..., None, :], transpose(self.vectors))


def balance(left: jax.Array, right: jax.Array) -> Balance:
    """S = (H_A⁻¹ # H_B)^{1/2}: A·S and B·S⁻ᵀ have one Gram matrix, and the least norm of all pairs with this product.

    Args:
      left: triangular factor of A, (…, d, d).
      right: triangular factor of B, (…, d, d).

    Returns:
      S, by two singular value decompositions. Of a pair with one side of full rank, which no S balances, the S that
      makes that side orthonormal; of a pair with none, the identity.

    With the core R_A·R_Bᵀ = U·Σ·Vᵀ, every balanced pair is (Q_A·U·Σ^{1/2}·O, Q_B·V·Σ^{1/2}·O), O orthogonal. So
    S·Oᵀ = R_A⁻¹·U·Σ^{1/2}, and S is the symmetric part of that matrix's polar decomposition.

    Reference: DESIGN §5, GL(d_h); # is the geometric mean of positive matrices (Ando).

    >>> s = balance(jnp.diag(jnp.array([4.0, 1.0])), jnp.diag(jnp.array([1.0, 9.0]))).power(1.0)
    >>> s.round(4).tolist()  # sizes 4·½ = 1/½ and 1·3 = 9/3
    [[0.5, 0.0], [0.0, 3.0]]
    """
    on_left, on_right = full_rank(left), full_rank(right)
    whole = on_left & on_right

    def where(condition: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition[..., None, None], a, b)

    eye = jnp.broadcast_to(jnp.eye(left.shape[-1], dtype=left.dtype), left.shape)
    u, sizes, _ = jnp.linalg.svd(where(whole, matmul(left, transpose(right)), eye))
    inverse = matmul(transpose(u), left) * safe_divide(jnp.ones_like(sizes), jnp.sqrt(sizes))[..., :, None]
    alone = where(on_left, left, where(on_right, right, eye))
    _, values, vectors = jnp.linalg.svd(where(whole, inverse, alone))
    # The right side moves by S⁻ᵀ.
    logs = jnp.log(values) * jnp.where(on_right & ~on_left, 1.0, -1.0)[..., None]
    return Balance(transpose(vectors), logs, whole)


class Opposite(NamedTuple):
    """What one factor's gradient is read in: the column space of the other.

    Attributes:
      basis: orthonormal columns Q that span the other factor's, (…, m, d); zero columns for missing ranks.
      into: J, (…, d, d): a cotangent G·B becomes G·Q = G·B·J, and a step D is the tangent D·Jᵀ, of product motion D·Qᵀ.
    """

    basis: jax.Array
    into: jax.Array


def opposites(left: jax.Array, right: jax.Array) -> tuple[Opposite, Opposite]:
    """How the steps of both factors of A·Bᵀ are framed.

    Args:
      left: A, (…, m, d).
      right: B, (…, n, d).

    Returns:
      For the left factor's step, what `right` gives, and for the right factor's, what `left` gives. Under
      (A·S, B·S⁻ᵀ) both bases turn, Q ↦ Q·R, and J ↦ Sᵀ·J·R or S⁻¹·J·R: nothing else of S is left. Exact on factors that
      lack ranks too while the other has full rank; where both do, J depends on S in what A·Bᵀ does not show.

    Reference: When Equivalent Weights Train Differently, §3; LoRA-RITE (Yen et al. 2024) for the basis. Deviations: by
    QR alone on full ranks; on others by singular values of the core R_A·R_Bᵀ, which are those of the product.

    >>> a, b = jnp.array([[2.0], [0.0]]), jnp.array([[3.0], [4.0]])
    >>> for_left, for_right = opposites(a, b)
    >>> abs(for_left.basis @ for_left.into.T @ a.T).round(4).tolist()  # B·J = Q, so J = 1/5
    [[0.24, 0.0], [0.32, 0.0]]
    """
    (q_left, r_left), (q_right, r_right) = orthonormal(left), orthonormal(right)
    whole = full_rank(r_left), full_rank(r_right)

    def by_inverse() -> tuple[Opposite, Opposite]:
        eye = jnp.broadcast_to(jnp.eye(left.shape[-1], dtype=left.dtype), r_left.shape)
        inverse = [jax.scipy.linalg.solve_triangular(r, eye) for r in (r_right, r_left)]
        return Opposite(q_right, inverse[0]), Opposite(q_left, inverse[1])

    def by_singular_values() -> tuple[Opposite, Opposite]:
        return _framed(q_right, r_right, r_left, whole[0]), _framed(q_left, r_left, r_right, whole[1])

    return jax.lax.cond(jnp.all(whole[0] & whole[1]), by_inverse, by_singular_values)


def _framed(q: jax.Array, r: jax.Array, other: jax.Array, usable: jax.Array) -> Opposite:
    """The basis of Q·R that a factor of full rank on the other side fixes; R's own where there is none."""
    eye = jnp.broadcast_to(jnp.eye(r.shape[-1], dtype=r.dtype), r.shape)
    weight = jnp.where(usable[..., None, None], other, eye)
    u, sizes, v = jnp.linalg.svd(matmul(r, transpose(weight)))
    live = sizes > eigenvalue_cutoff(r.dtype) * sizes[..., :1]
    inverse = jnp.where(live, 1.0 / jnp.where(live, sizes, 1.0), 0.0)
    into = matmul(transpose(weight), transpose(v) * inverse[..., None, :])
    return Opposite(matmul(q, u * live[..., None, :]), into)
