"""Adam's arithmetic on one array, as `optax.scale_by_adam` has it.

Here: moments and bias correction. Not here: whose moments they are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Scalar = float | jax.Array


class Adam(NamedTuple):
    """Hyperparameters at one step.

    Attributes:
      b1: decay of first moments.
      b2: decay of second moments.
      eps: added to the root.
      eps_root: added inside it.
      nesterov: whether the mean looks ahead.
      count: the number of this step, from 1.
      first_weight: the sum of a first moment's weights, 1 − b1^count.
      next_weight: the same a step later; unused without `nesterov`.
      second_weight: that of a second moment.
    """

    b1: Scalar
    b2: Scalar
    eps: Scalar
    eps_root: Scalar
    nesterov: bool
    count: jax.Array  # type: ignore[assignment]
    first_weight: jax.Array
    next_weight: jax.Array
    second_weight: jax.Array

    @classmethod
    def at(cls, options: Any, count: jax.Array) -> "Adam":
        """Of options that have these fields."""
        b1, b2 = options.b1, options.b2
        weights = 1 - b1**count, 1 - b1 ** (count + 1), 1 - b2**count
        return cls(b1, b2, options.eps, options.eps_root, options.nesterov, count, *weights)

    def first(self, gradient: jax.Array, past: jax.Array) -> jax.Array:
        """The new first moment."""
        return self.b1 * past + (1 - self.b1) * gradient

    def second(self, square: jax.Array, past: jax.Array) -> jax.Array:
        """The new second moment."""
        return self.b2 * past + (1 - self.b2) * square

    def mean(self, moment: jax.Array, gradient: jax.Array) -> jax.Array:
        """The first moment without its bias."""
        if not self.nesterov:
            return moment / self.first_weight
        return self.b1 * moment / self.next_weight + (1 - self.b1) * gradient / self.first_weight

    def variance(self, moment: jax.Array) -> jax.Array:
        """The second moment without its bias."""
        return moment / self.second_weight

    def root(self, moment: jax.Array) -> jax.Array:
        """What a mean is divided by."""
        inside = self.variance(moment)
        whole = isinstance(self.eps_root, int | float) and self.eps_root == 0
        return jnp.sqrt(inside if whole else inside + self.eps_root) + self.eps
