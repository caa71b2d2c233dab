"""Gram matrices of two factors A and B under decoupled weight decay, which shrinks both before updates are added.

If both factors are multiplied by the same ρ < 1, the imbalance D = AᵀA − BᵀB becomes ρ²·D. It fades, but relative to
the Gram matrices it stays the same. New imbalance comes from the updates, and from different ρ for A and B, which
change D even if it is 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.errors import binding_error
from gauge_optax.linalg import matmul, real_dtype, transpose
from gauge_optax.transformation import require_real

_NAME = "gram_evolution"


class GramEvolution(NamedTuple):
    """Gram matrices after a step, (…, r, r).

    Attributes:
      left: the Gram matrix of the left factor.
      right: the Gram matrix of the right factor.
      imbalance: left − right; zero if the factors are balanced.
    """

    left: jax.Array
    right: jax.Array
    imbalance: jax.Array


def gram_evolution(
    left: jax.Array | np.ndarray,
    right: jax.Array | np.ndarray,
    left_update: jax.Array | np.ndarray,
    right_update: jax.Array | np.ndarray,
    left_shrink: float | jax.Array | np.ndarray = 1.0,
    right_shrink: float | jax.Array | np.ndarray = 1.0,
) -> GramEvolution:
    r"""Returns the Gram matrices of both factors of A·Bᵀ after the step A ← ρ_A·A + U_A, B ← ρ_B·B + U_B.

    For A, and for B in the same way, this is

    .. math::
      H_A' = \rho_A^2 A^\top A + \rho_A (A^\top U_A + U_A^\top A) + U_A^\top U_A.

    Args:
      left: A, (…, m, r), such as W_V of values and outputs, or W_Q of queries and keys.
      right: B, (…, n, r), such as the transpose of W_O, or W_K.
      left_update: U_A, of A's shape: the optimizer's step without decay, already multiplied by the learning rate.
      right_update: U_B, of B's shape.
      left_shrink: ρ_A = 1 − learning rate · weight decay; a number, or one per pair, (…).
      right_shrink: ρ_B.

    Returns:
      Both Gram matrices and their difference, in float32, or float64 under x64.

    Raises:
      ValueError: factors that are no pair, updates or shrinks of another shape.

    >>> a, b = jnp.array([[2.0]]), jnp.array([[1.0]])
    >>> # D = 3 becomes 3·ρ².
    >>> after = go.measure.gram_evolution(a, b, 0.0 * a, 0.0 * b, 0.5, 0.5)
    >>> float(after.left[0, 0]), float(after.right[0, 0]), float(after.imbalance[0, 0])
    (1.0, 0.25, 0.75)

    Reference: "When Equivalent Weights Train Differently" §4, Full Gram Evolution.
    """
    given = dict(left=left, right=right, left_update=left_update, right_update=right_update,
                 left_shrink=left_shrink, right_shrink=right_shrink)
    for name, array in given.items():
        require_real(_NAME, name, array)
    left, right, left_update, right_update = (jnp.asarray(x) for x in (left, right, left_update, right_update))
    if left.ndim < 2 or right.ndim < 2 or (left.shape[:-2], left.shape[-1]) != (right.shape[:-2], right.shape[-1]):
        raise binding_error(
            _NAME, "factors that are no pair", f"shapes {left.shape} and {right.shape}",
            "(…, m, r) and (…, n, r), so that left·rightᵀ is the product",
            "put heads first and the shared axis last; W_O enters as its transpose",
        )

    def evolved(name: str, factor: Any, update: Any, shrink: Any) -> jax.Array:
        if factor.shape != update.shape:
            raise binding_error(
                _NAME, f"{name}_update of another shape", f"{update.shape}", f"{factor.shape}, as {name}",
                "pass the update of this very factor, transposed as it is",
            )
        if jnp.ndim(shrink) and jnp.shape(shrink) != factor.shape[:-2]:
            raise binding_error(
                _NAME, f"{name}_shrink of another shape", f"{jnp.shape(shrink)}",
                f"one number, or one per pair, {factor.shape[:-2]}", f"pass {name}_shrink=1.0, without decay",
            )
        a, u, rho = (jnp.asarray(x, real_dtype()) for x in (factor, update, shrink))
        after = rho[..., None, None] * a + u  # not by the formula: its three terms may cancel, which loses digits
        return matmul(transpose(after), after)

    one = evolved("left", left, left_update, left_shrink)
    other = evolved("right", right, right_update, right_shrink)
    return GramEvolution(one, other, one - other)
