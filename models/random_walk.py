"""A layer whose gradient is noise: what weight decay does to it is all there is (Rotational Equilibrium, App. F).

f(X) = γ_out ⊙ N(W·(γ_in ⊙ X)), N batch normalisation without parameters, X and the derivative of f drawn anew at every
step. Every row of W is scale-invariant and its gradient is orthogonal to it; γ_in and γ_out give coordinates and
neurons gradients of different sizes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

EPS = 1e-12


class Walk(NamedTuple):
    """What does not change: γ_in (inputs) and γ_out (neurons)."""

    gain_in: jax.Array
    gain_out: jax.Array


def start(key: jax.Array, neurons: int = 128, inputs: int = 128, even: bool = False) -> tuple[Walk, jax.Array]:
    """The gains, normal (γ_in ≡ 1 if `even`), and W (neurons, inputs), uniform in ±1/√inputs as PyTorch has it."""
    first, second, third = jax.random.split(key, 3)
    gain_in = jnp.ones(inputs) if even else jax.random.normal(first, (inputs,))
    weights = jax.random.uniform(third, (neurons, inputs), minval=-1.0, maxval=1.0) / inputs**0.5
    return Walk(gain_in, jax.random.normal(second, (neurons,))), weights


def layer(walk: Walk, weights: jax.Array, inputs: jax.Array) -> jax.Array:
    """f of inputs (inputs, batch): (neurons, batch)."""
    y = weights @ (walk.gain_in[:, None] * inputs)
    y = (y - y.mean(1, keepdims=True)) * jax.lax.rsqrt(y.var(1, keepdims=True) + EPS)
    return walk.gain_out[:, None] * y


def noise(walk: Walk, weights: jax.Array, key: jax.Array, batch: int = 32) -> jax.Array:
    """A gradient: f's derivative normal with deviation 1/(neurons·batch), pulled back."""
    first, second = jax.random.split(key)
    inputs = jax.random.normal(first, (weights.shape[1], batch))
    gradient = jax.random.normal(second, (weights.shape[0], batch)) / (weights.shape[0] * batch)
    _, back = jax.vjp(lambda w: layer(walk, w, inputs), weights)
    return back(gradient)[0]
