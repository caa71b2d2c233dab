"""Adam's arithmetic for one array, the same as that of `optax.scale_by_adam`: moments, bias correction, divisor."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Scalar = float | jax.Array


class Adam(NamedTuple):
    """The hyperparameters at one step.

    Attributes:
      b1: decay of first moments.
      b2: decay of second moments.
      eps: added to the root.
      eps_root: added inside the root.
      nesterov: whether the mean uses Nesterov momentum.
      count: the number of this step, from 1.
      first_weight: the sum of the weights of a first moment, 1 − b1^count.
      next_weight: the same sum at the next step; unused without `nesterov`.
      second_weight: the sum of the weights of a second moment.
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
        """Returns the hyperparameters at step `count`, from options with the first five fields."""
        b1, b2 = options.b1, options.b2
        weights = 1 - b1**count, 1 - b1 ** (count + 1), 1 - b2**count
        return cls(b1, b2, options.eps, options.eps_root, options.nesterov, count, *weights)

    def first(self, gradient: jax.Array, past: jax.Array) -> jax.Array:
        """Returns the new first moment."""
        return self.b1 * past + (1 - self.b1) * gradient

    def second(self, square: jax.Array, past: jax.Array) -> jax.Array:
        """Returns the new second moment."""
        return self.b2 * past + (1 - self.b2) * square

    def mean(self, moment: jax.Array, gradient: jax.Array) -> jax.Array:
        """Returns the first moment with its bias corrected."""
        if not self.nesterov:
            return moment / self.first_weight
        return self.b1 * moment / self.next_weight + (1 - self.b1) * gradient / self.first_weight

    def variance(self, moment: jax.Array) -> jax.Array:
        """Returns the second moment with its bias corrected."""
        return moment / self.second_weight

    def without_bias(self, root: jax.Array) -> jax.Array:
        """Returns the root of a second moment with its bias corrected."""
        root = root / jnp.sqrt(self.second_weight)
        zero = isinstance(self.eps_root, int | float) and self.eps_root == 0
        return root if zero else jnp.sqrt(jnp.square(root) + self.eps_root)

    def root(self, moment: jax.Array) -> jax.Array:
        """Returns what a mean is divided by."""
        variance = self.variance(moment)
        # `eps_root` is traced under `inject_hyperparams`; where it is a plain zero, no leaf needs the addition.
        zero = isinstance(self.eps_root, int | float) and self.eps_root == 0
        return jnp.sqrt(variance if zero else variance + self.eps_root) + self.eps
