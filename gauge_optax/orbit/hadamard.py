"""Orthogonal matrices whose entries all have nearly the same magnitude: they spread a large channel over all channels.

A Hadamard matrix H of order n has entries ±1 and orthogonal rows, so that H/√n is orthogonal. Sylvester's construction
gives the orders 2ᵏ. Paley's gives the orders q + 1 and 2(q + 1) for some primes q. A Kronecker product of Hadamard
matrices is a Hadamard matrix too. For any other even size m·2ᵏ, a Hadamard matrix of size 2ᵏ is combined with a random
orthogonal matrix of size m by a Kronecker product. The result is multiplied by random signs, or its rows and columns
are permuted, so that every PRNG key gives another matrix.
References: QuaRot (Ashkboos et al. 2024), §4; Paley 1933.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Block
from gauge_optax.errors import binding_error, counted
from gauge_optax.linalg import haar, matmul, real_dtype


def known_hadamard(size: int) -> np.ndarray | None:
    """Returns a Hadamard matrix of this order with entries ±1, or None if the constructions have no such order.

    >>> h = known_hadamard(12)
    >>> bool((h @ h.T == 12 * np.eye(12)).all()), known_hadamard(6)
    (True, None)
    """
    power = size & -size
    for doublings in range(power.bit_length()):  # try the smallest Paley factor first; a power of two needs none
        rest = size // power * 2**doublings
        factor = np.ones((1, 1)) if rest == 1 else _paley(rest)
        if factor is not None:
            return np.kron(_sylvester(size // rest), factor)
    return None


def randomized_hadamard(key: jax.Array, heads: tuple[int, ...], size: int) -> jax.Array:
    """Returns random orthogonal matrices (*heads, size, size): random signs times a Hadamard matrix.

    Args:
      key: a PRNG key.
      heads: the leading shape: there is one matrix per head.
      size: an even number m·2ᵏ, m odd. If no construction has this order, a factor of size m is random orthogonal.
    """
    of_signs, of_factor = jax.random.split(key)
    signs = jax.random.rademacher(of_signs, (*heads, size), real_dtype())
    matrix = known_hadamard(size)
    if matrix is not None:
        return signs[..., :, None] * jnp.asarray(matrix / math.sqrt(size), real_dtype())
    power = size & -size
    factor = haar(of_factor, (*heads, size // power, size // power))
    return signs[..., :, None] * _kronecker(_sylvester(power) / math.sqrt(power), factor)


def hadamard_with_ones(key: jax.Array, size: int) -> jax.Array:
    """Returns a random orthogonal (size, size) matrix that keeps the vector of ones, as LayerNorm needs.

    Args:
      key: a PRNG key.
      size: a multiple of 4, m·4ᵏ. The factor of size 4ᵏ is a regular Hadamard matrix: all its rows have the same sum.
        The factor of size m is a random orthogonal matrix that keeps the vector of ones. Rows and columns of the
        Kronecker product are permuted at random.
    """
    of_factor, of_rows, of_columns = jax.random.split(key, 3)
    rest = size
    while rest % 4 == 0 and rest != 8:  # 8 is not split into 2·4: the 2 × 2 matrices that keep the ones spread nothing
        rest //= 4
    regular: np.ndarray = np.ones((1, 1))
    while len(regular) * rest < size:
        regular = np.kron(regular, np.ones((4, 4)) - 2.0 * np.eye(4))
    factor = _haar_with_ones(of_factor, rest)
    whole = _kronecker(regular / math.sqrt(len(regular)), factor)
    whole = jax.random.permutation(of_rows, whole, 0, independent=False)
    return jax.random.permutation(of_columns, whole, 1, independent=False)


def require_even(gauge: str, blocks: Sequence[Block], size: int, multiple: int = 2) -> None:
    """Raises ValueError if `size` is no multiple of `multiple`, which the rotations of this module need.

    Args:
      gauge: the gauge's name, for the message.
      blocks: the blocks that the gauge rotates, for the message.
      size: the number of dimensions that are rotated.
      multiple: 2, or 4 if the rotation has to keep the vector of ones.
    """
    if size % multiple:
        place, wanted = f"no Hadamard rotation at '{blocks[0].path}'", f"a multiple of {multiple}"
        raise binding_error(gauge, place, counted(size, "dimension"), wanted, "write by='random'")


def _haar_with_ones(key: jax.Array, size: int) -> jax.Array:
    if size == 1:
        return jnp.ones((1, 1), real_dtype())
    # The rows of this Householder reflection are an orthonormal basis whose first vector is ones/√size.
    normal = np.full(size, -1.0 / math.sqrt(size))
    normal[0] += 1.0
    basis = jnp.asarray(np.eye(size) - 2.0 * np.outer(normal, normal) / (normal @ normal), real_dtype())
    inner = jnp.eye(size, dtype=real_dtype()).at[1:, 1:].set(haar(key, (size - 1, size - 1)))
    return matmul(matmul(basis, inner), basis)


def _kronecker(left: np.ndarray, right: jax.Array) -> jax.Array:
    product = jnp.einsum("ab,...cd->...acbd", jnp.asarray(left, right.dtype), right)
    size = len(left) * right.shape[-1]
    return product.reshape(*right.shape[:-2], size, size)


def _sylvester(size: int) -> np.ndarray:
    return functools.reduce(np.kron, [np.array([[1.0, 1.0], [1.0, -1.0]])] * (size.bit_length() - 1), np.ones((1, 1)))


def _paley(size: int) -> np.ndarray | None:
    """Paley's matrix of this order, or None: q + 1 for a prime q ≡ 3, or 2(q + 1) for a prime q ≡ 1 (modulo 4)."""
    if size % 4:
        return None
    first, second = size - 1, size // 2 - 1
    if first % 4 == 3 and _prime(first):
        return np.eye(size) + _bordered(first, -1.0)
    if second % 4 == 1 and _prime(second):
        conference = _bordered(second, 1.0)
        one, other = np.array([[1.0, 1.0], [1.0, -1.0]]), np.array([[1.0, -1.0], [-1.0, -1.0]])
        return np.kron(conference, one) + np.kron(np.eye(second + 1), other)
    return None


def _bordered(prime: int, sign: float) -> np.ndarray:
    """Paley's core matrix with a first row of ones and a first column of `sign`; the corner is 0.

    The core has +1 at (i, j) if i − j is a square modulo `prime`, −1 if it is none, and 0 on the diagonal.
    """
    squares = {x * x % prime for x in range(1, prime)}
    residue = np.array([0.0] + [1.0 if x in squares else -1.0 for x in range(1, prime)])
    matrix = np.zeros((prime + 1, prime + 1))
    matrix[0, 1:], matrix[1:, 0] = 1.0, sign
    matrix[1:, 1:] = residue[(np.arange(prime)[:, None] - np.arange(prime)[None, :]) % prime]
    return matrix


def _prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
