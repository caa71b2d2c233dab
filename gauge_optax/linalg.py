"""Batched small-matrix kernels: everything a gauge needs of linear algebra, on stacks of d×d matrices.

Here: symmetric eigenbases (closed form at d = 2), the Lyapunov equation M·A + A·M = 2K by an eigenbasis or by
conjugate gradients in a stale one, the pseudo-inverse square root, the inverse square root by products alone, the
orthogonal logarithm. Not here: anything that knows what a head, a leaf or a gauge is.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def real_dtype() -> jnp.dtype:
    """The dtype in which gauges compute: float32, or float64 under x64.

    Returns:
      The canonical floating dtype of this process, whatever the parameters are stored in.

    >>> real_dtype()
    dtype('float32')
    """
    return jnp.asarray(0.0).dtype


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Batched product at full precision: on accelerators a default-precision product costs 1e-3 of equivariance."""
    return jnp.matmul(a, b, precision=HIGHEST)


def transpose(a: jax.Array) -> jax.Array:
    """Swaps the last two axes."""
    return jnp.swapaxes(a, -1, -2)


def skew(a: jax.Array) -> jax.Array:
    """The antisymmetric part (a − aᵀ)/2 of every matrix in the stack."""
    return 0.5 * (a - transpose(a))


def symmetric(a: jax.Array) -> jax.Array:
    """The symmetric part (a + aᵀ)/2 of every matrix in the stack."""
    return 0.5 * (a + transpose(a))


def safe_divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """a/b, and 0 where b is 0: a direction of length zero has no coordinate along it."""
    zero = b == 0
    return jnp.where(zero, 0.0, a / jnp.where(zero, 1.0, b))


def eigenvalue_cutoff(dtype: jnp.dtype) -> float:
    """Relative size below which an eigenvalue counts as zero: 1e-6 in float32, 1e-12 in float64 (DESIGN §5)."""
    return 1e-12 if dtype == jnp.float64 else 1e-6


def symmetric_eigen(m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues (descending) and eigenvectors (columns) of symmetric matrices.

    Args:
      m: (…, d, d), symmetric.

    Returns:
      Values (…, d) in descending order and vectors (…, d, d).

    >>> values, vectors = symmetric_eigen(jnp.array([[2.0, 1.0], [1.0, 2.0]]))
    >>> [round(float(v), 5) for v in values]
    [3.0, 1.0]
    """
    if m.shape[-1] == 2:
        return _symmetric_eigen_2x2(m)
    values, vectors = jnp.linalg.eigh(m)
    return values[..., ::-1], vectors[..., ::-1]


def _symmetric_eigen_2x2(m: jax.Array) -> tuple[jax.Array, jax.Array]:
    half_gap = 0.5 * (m[..., 0, 0] - m[..., 1, 1])
    mean = 0.5 * (m[..., 0, 0] + m[..., 1, 1])
    off = m[..., 0, 1]
    radius = jnp.sqrt(half_gap**2 + off**2)
    angle = 0.5 * jnp.arctan2(off, half_gap)
    return jnp.stack([mean + radius, mean - radius], -1), rotation_2x2(angle)


def rotation_2x2(angle: jax.Array) -> jax.Array:
    """Stack of [[cos, −sin], [sin, cos]], one per angle (radians)."""
    c, s = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([jnp.stack([c, -s], -1), jnp.stack([s, c], -1)], -2)


def lyapunov(m: jax.Array, k: jax.Array) -> jax.Array:
    """The skew solution A of M·A + A·M = 2K, by one eigendecomposition of M.

    Args:
      m: (…, d, d), symmetric positive semi-definite.
      k: (…, d, d), antisymmetric.

    Returns:
      A (…, d, d), antisymmetric, zero on pairs of eigendirections whose eigenvalues are both cut off.

    Reference: DDC B.8. An eigenvalue pair is dropped where λ_i + λ_j, not each λ alone, is below the cutoff: a pair
    with one live direction is a well-posed equation.

    >>> m, k = jnp.diag(jnp.array([3.0, 1.0, 1.0])), skew(jnp.arange(9.0).reshape(3, 3))
    >>> a = lyapunov(m, k)
    >>> bool(jnp.allclose(m @ a + a @ m, 2 * k, atol=1e-5))
    True
    """
    if m.shape[-1] == 2:
        return safe_divide(2.0 * k, jnp.trace(m, axis1=-2, axis2=-1)[..., None, None])
    values, vectors = symmetric_eigen(m)
    # Rounding leaves symmetric parts, which small pairs of eigenvalues would amplify.
    rotated = skew(matmul(matmul(transpose(vectors), k), vectors))
    return skew(matmul(matmul(vectors, 2.0 * rotated * inverse_pair_sums(values)), transpose(vectors)))


def inverse_pair_sums(values: jax.Array) -> jax.Array:
    """1/(λ_i + λ_j), and 0 where the pair is below the eigenvalue cutoff.

    Args:
      values: (…, d) eigenvalues of a positive semi-definite matrix.

    Returns:
      (…, d, d).
    """
    values = jnp.maximum(values, 0.0)
    sums = values[..., :, None] + values[..., None, :]
    floor = eigenvalue_cutoff(values.dtype) * jnp.max(values, -1)[..., None, None]
    return jnp.where(sums > floor, 1.0 / jnp.where(sums > floor, sums, 1.0), 0.0)


def lyapunov_stale(
    m: jax.Array,
    k: jax.Array,
    values: jax.Array,
    vectors: jax.Array,
    steps: int,
    negligible: float | jax.Array = 0.0,
) -> jax.Array:
    """The skew solution of M·A + A·M = 2K by conjugate gradients in an old eigenbasis of M; products only.

    Args:
      m: (…, d, d), symmetric positive semi-definite, near vectors·diag(values)·vectorsᵀ.
      k: (…, d, d), antisymmetric.
      values: (…, d) eigenvalues of M when the basis was fresh.
      vectors: (…, d, d) that basis.
      steps: number of iterations at most; 6 give 1e-6 while the whitened drift of M is below 0.1.
      negligible: stop where ⟨A, M·A + A·M⟩ of what is left is below this.

    Returns:
      A (…, d, d), antisymmetric.
    """
    if m.shape[-1] == 2:
        return lyapunov(m, k)
    weight = inverse_pair_sums(values)
    m = matmul(matmul(transpose(vectors), m), vectors)
    # Rounding leaves a symmetric part, which the operator never reaches and the iteration would amplify.
    residual = 2.0 * skew(matmul(matmul(transpose(vectors), k), vectors)) * (weight > 0)

    def inner(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(a * b, (-2, -1), keepdims=True)

    def apply(a: jax.Array) -> jax.Array:
        product = matmul(m, a)
        return (product - transpose(product)) * (weight > 0)  # (M A)ᵀ = −A M for skew A

    scaled = weight * residual
    energy = inner(residual, scaled)
    # A head that has converged must stop: conjugate gradients on rounding noise diverge.
    done = jnp.maximum(energy * jnp.finfo(m.dtype).eps ** 2, negligible)

    def iteration(_: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        solution, residual, direction, energy = carry
        image = apply(direction)
        step = jnp.where(energy > done, safe_divide(energy, inner(direction, image)), 0.0)
        residual = residual - step * image
        scaled = weight * residual
        fresh = inner(residual, scaled)
        return solution + step * direction, residual, scaled + safe_divide(fresh, energy) * direction, fresh

    start = jnp.zeros_like(residual), residual, scaled, energy
    solution = jax.lax.fori_loop(0, steps, iteration, start)[0]
    return matmul(matmul(vectors, solution), transpose(vectors))


def inverse_sqrt(m: jax.Array) -> jax.Array:
    """Pseudo-inverse square root M^{−1/2} of positive semi-definite matrices.

    Args:
      m: (…, d, d), symmetric positive semi-definite.

    Returns:
      (…, d, d); eigenvalues below the cutoff are dropped, so that a rank-deficient M gives a covariant result.

    >>> inverse_sqrt(jnp.diag(jnp.array([4.0, 1.0, 0.0]))).round(5).tolist()
    [[0.5, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    values, vectors = symmetric_eigen(m)
    kept = values > eigenvalue_cutoff(m.dtype) * jnp.maximum(values[..., :1], 0.0)
    roots = jnp.where(kept, jax.lax.rsqrt(jnp.where(kept, values, 1.0)), 0.0)
    return matmul(vectors * roots[..., None, :], transpose(vectors))


def inverse_sqrt_by_products(m: jax.Array, least: float) -> jax.Array:
    """Inverse square root M^{−1/2} of positive definite matrices by matrix products alone (closed form at d = 2).

    Args:
      m: (…, d, d), symmetric positive semi-definite.
      least: λ_min/‖M‖_F down to which the result is exact; it sets the number of iterations (7 at 1e-3, float32).

    Returns:
      (…, d, d), finite on every spectrum: directions below `least` get less than λ^{−1/2}, M = 0 gives 0.

    Every iterate is a polynomial in M over an invariant of M, so that RᵀMR gives RᵀM^{−1/2}R after any number of
    iterations, up to rounding: ε·‖M‖/λ_min, as rounding M itself would cost.

    Reference: Higham, Functions of Matrices (2008), Eq. (6.35), the coupled Newton–Schulz iteration. Deviation: the
    scaling of Chen & Chow (2014) for the known interval, which halves the number of iterations.

    >>> m = jnp.diag(jnp.array([4.0, 1.0, 0.25]))
    >>> inverse_sqrt_by_products(m, 1e-2).round(4).tolist()
    [[0.5, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]
    """
    if m.shape[-1] == 2:
        return _inverse_sqrt_2x2(m, least)
    size = jnp.linalg.norm(m, axis=(-2, -1), keepdims=True)
    eye = jnp.broadcast_to(jnp.eye(m.shape[-1], dtype=m.dtype), m.shape)
    root, inverse = safe_divide(m, size), eye
    for scale in _newton_scales(least, float(jnp.finfo(m.dtype).eps)):
        step = scale * (1.5 * eye - 0.5 * scale**2 * matmul(inverse, root))
        root, inverse = matmul(root, step), matmul(step, inverse)
    return safe_divide(inverse, jnp.sqrt(size))


def _newton_scales(least: float, eps: float) -> list[float]:
    """Factors c with which x ↦ cx(3 − c²x²)/2 takes the interval from √least to 1, round after round, nearest to 1."""
    low, scales = math.sqrt(least), []
    while 1.0 - low > eps:
        scales.append(math.sqrt(3.0 / (1.0 + low + low * low)))
        low = 0.5 * scales[-1] * low * (3.0 - (scales[-1] * low) ** 2)
    return scales


def _inverse_sqrt_2x2(m: jax.Array, least: float) -> jax.Array:
    """(adj M + √det)/(√det·√(tr + 2√det)), by Cayley–Hamilton on M^{1/2}."""
    trace, det = (x[..., None, None] for x in (jnp.trace(m, axis1=-2, axis2=-1), jnp.linalg.det(m)))
    eye, root = jnp.eye(2, dtype=m.dtype), jnp.sqrt(jnp.maximum(det, 0.0))
    divisor = jnp.maximum(root, 0.5 * math.sqrt(least) * trace)
    return safe_divide((trace + divisor) * eye - m, divisor * jnp.sqrt(trace + 2.0 * root))


def skew_exponential(a: jax.Array) -> jax.Array:
    """exp(A) of antisymmetric matrices (…, d, d): rotations."""
    flat = a.reshape((-1, *a.shape[-2:]))
    return jax.vmap(jax.scipy.linalg.expm)(flat).reshape(a.shape)


def orthogonal_logarithm(r: jax.Array) -> jax.Array:
    """The skew logarithm of rotations without an eigenvalue −1.

    Args:
      r: (…, d, d), orthogonal with determinant 1.

    Returns:
      (…, d, d) antisymmetric A with exp(A) = r and |angles| < π: three polar square roots, then the series of
      2·artanh of the Cayley transform.
    """
    eye = jnp.eye(r.shape[-1], dtype=r.dtype)
    for _ in range(3):
        u, _, vt = jnp.linalg.svd(eye + r, full_matrices=False)
        r = matmul(u, vt)
    cayley = skew(jnp.linalg.solve(eye + r, r - eye))
    square, power, total = matmul(cayley, cayley), cayley, cayley
    for order in range(3, 22, 2):
        power = matmul(power, square)
        total = total + power / order
    return 16.0 * total


def polar(m: jax.Array, ns_coeffs: Any = "standard", ns_steps: int = 5, eps: float | jax.Array = 1e-8) -> jax.Array:
    """Temporary."""
    dtype = m.dtype
    x = m / (jnp.linalg.norm(m, axis=(-2, -1), keepdims=True) + eps)
    wide = m.shape[-1] > m.shape[-2]
    x = transpose(x) if wide else x
    a, b, c = (3.4445, -4.7750, 2.0315)
    for _ in range(ns_steps):
        g = matmul(transpose(x), x)
        x = a * x + matmul(x, b * g + c * matmul(g, g))
    return (transpose(x) if wide else x).astype(dtype)
