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
    """

    b1: Scalar
    b2: Scalar
    eps: Scalar
    eps_root: Scalar
    nesterov: bool
    count: jax.Array  # type: ignore[assignment]

    @classmethod
    def at(cls, options: Any, count: jax.Array) -> "Adam":
        """Of options that have these fields."""
        return cls(options.b1, options.b2, options.eps, options.eps_root, options.nesterov, count)

    def first(self, gradient: jax.Array, past: jax.Array) -> jax.Array:
        """The new first moment."""
        return self.b1 * past + (1 - self.b1) * gradient

    def second(self, square: jax.Array, past: jax.Array) -> jax.Array:
        """The new second moment."""
        return self.b2 * past + (1 - self.b2) * square

    def mean(self, moment: jax.Array, gradient: jax.Array) -> jax.Array:
        """The first moment without its bias."""
        if not self.nesterov:
            return moment / (1 - self.b1**self.count)
        ahead = self.b1 * moment / (1 - self.b1 ** (self.count + 1))
        return ahead + (1 - self.b1) * gradient / (1 - self.b1**self.count)

    def variance(self, moment: jax.Array) -> jax.Array:
        """The second moment without its bias."""
        return moment / (1 - self.b2**self.count)

    def root(self, moment: jax.Array) -> jax.Array:
        """What a mean is divided by."""
        return jnp.sqrt(self.variance(moment) + self.eps_root) + self.eps
