"""Former home of the kernels of factor pairs, which are in `linalg` now; kept until the core imports them there."""

import jax

from gauge_optax.linalg import balance, full_rank, inverse_gram, rank_cutoff
from gauge_optax.linalg import triangular_factor as triangular

__all__ = ["balance", "full_rank", "inverse_gram", "rank_cutoff", "triangular", "triangulars"]


def triangulars(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the triangular factors of both sides of a pair."""
    return triangular(left), triangular(right)
