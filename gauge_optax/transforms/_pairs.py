"""One step of a factor pair in the frame of the current point, and of rows that a rotation alone moves.

A pair's gradients are read in the other factor's column space, where GL(d) has become O(d): G·B as G·Q_B. There
an O(d)-equivariant base makes a step D, and D·Jᵀ is the factor's, whose represented motion D·Q_Bᵀ depends on the
product alone. Moments follow the basis by Q_oldᵀ·Q_new.

Here: arrays, one instance at a time. Not here: which leaves they are (`quotient`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.factors import Opposite, opposites
from gauge_optax.linalg import inverse_sqrt_by_products, matmul, transpose
from gauge_optax.transforms._here import Adam
from gauge_optax.transforms._polar import PolarOptions, scaled_polar
from gauge_optax.transforms._state import without_arrays

Pair = tuple[jax.Array, jax.Array]
Fans = tuple[int, int]

_FLOOR = 3e-2  # of √‖V‖_F: directions with less variance than its square are stepped no further


class Base(NamedTuple):
    """The O(d)-equivariant base.

    Attributes:
      adam: hyperparameters of matrix Adam; of Muon its step and Nesterov momentum.
      polar: of Muon; None for matrix Adam.
    """

    adam: Adam
    polar: PolarOptions | None


class RowMoments(NamedTuple):
    """Moments of rows with a common basis.

    Attributes:
      mu: first moment, (…, rows, d).
      outer: second moment gᵀg/rows, (…, d, d); () under Muon.
    """

    mu: jax.Array
    outer: Any


class PairMoments(NamedTuple):
    """Moments of a pair, and the bases they are in.

    Attributes:
      left: of the left factor's in-frame gradient.
      right: of the right factor's.
      bases: orthonormal columns of both factors at the last step.
    """

    left: RowMoments
    right: RowMoments
    bases: Pair


@functools.partial(jax.jit, static_argnums=(0, 1))
def pair_step(
    static: Base, fans: tuple[Fans, Fans], traced: Any, factors: Pair, gradients: Pair, old: PairMoments
) -> tuple[Pair, PairMoments]:
    """The tangents of both factors.

    Args:
      static: the base, without hyperparameters that are arrays.
      fans: numbers of inputs and outputs of the left and of the right factor, which scale a polar factor.
      traced: the hyperparameters that are arrays.
      factors: A and B, (…, m, d) and (…, n, d).
      gradients: cotangents of these shapes.
      old: moments of the last step.

    Returns:
      Tangents of these shapes, and the new moments.
    """
    base = rejoined(static, traced)
    for_left, for_right = opposites(*factors)
    left, left_moments = _side(base, fans[0], gradients[0], old.left, old.bases[1], for_left)
    right, right_moments = _side(base, fans[1], gradients[1], old.right, old.bases[0], for_right)
    return (left, right), PairMoments(left_moments, right_moments, (for_right.basis, for_left.basis))


def _side(
    base: Base, fans: Fans, gradient: jax.Array, old: RowMoments, before: jax.Array, here: Opposite
) -> tuple[jax.Array, RowMoments]:
    carry = matmul(transpose(before), here.basis)
    outer = matmul(matmul(transpose(carry), old.outer), carry) if base.polar is None else ()
    step, moments = row_step(base, fans, matmul(gradient, here.into), RowMoments(matmul(old.mu, carry), outer))
    return matmul(step, transpose(here.into)), moments


def row_step(base: Base, fans: Fans, gradient: jax.Array, old: RowMoments) -> tuple[jax.Array, RowMoments]:
    """The step of rows whose basis only turns: matrix Adam, or the polar factor.

    Args:
      base: the base.
      fans: numbers of inputs and outputs.
      gradient: (…, rows, d).
      old: moments, carried to this basis.

    Returns:
      The step, (…, rows, d), and the new moments.
    """
    adam = base.adam
    mu = adam.b1 * old.mu + (1 - adam.b1) * gradient
    mean = _without_rounding(adam.debias(mu, gradient, adam.b1))
    if base.polar is not None:
        return scaled_polar(base.polar, fans, mean), RowMoments(mu, ())
    outer = adam.b2 * old.outer + (1 - adam.b2) * matmul(transpose(gradient), gradient) / gradient.shape[-2]
    return matmul(mean, _inverse_root(adam, adam.unbiased_variance(outer))), RowMoments(mu, outer)


def _without_rounding(mean: jax.Array) -> jax.Array:
    """A moment less what its directions hold of rounding: of one of relative size σ, σ²/(σ² + δ) stays, δ below.

    A loss of fewer ranks than the factors has no gradient in some directions. Either base would make a step of their
    rounding (a polar factor multiplies it by 485), and such steps give the factors directions that mean nothing.
    """
    # Far above ε: the inverse root rounds by ε/δ.
    share = 1e-9 if mean.dtype == jnp.float64 else 4e-6
    unit = jnp.max(jnp.abs(mean), (-2, -1), keepdims=True)
    scaled = mean / jnp.where(unit > 0, unit, 1.0)
    gram = matmul(transpose(scaled), scaled)
    size = jnp.linalg.norm(gram, axis=(-2, -1), keepdims=True)
    eye = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    root = inverse_sqrt_by_products(gram / jnp.where(size > 0, size, 1.0) + share * eye, share / (1.0 + share))
    return mean - share * matmul(mean, matmul(root, root))


def _inverse_root(adam: Adam, outer: jax.Array) -> jax.Array:
    """(V̂ + floor)^(−1/2): the floor keeps rounding in directions without a gradient from becoming a step."""
    # In units of the largest entry: the norm squares squares of gradients.
    unit = jnp.max(jnp.abs(outer), (-2, -1), keepdims=True)
    unit = jnp.where(unit > 0, unit, 1.0)
    outer, scale = outer / unit, jnp.sqrt(unit)
    size = jnp.linalg.norm(outer, axis=(-2, -1), keepdims=True)
    floor = jnp.square(adam.eps / scale + _FLOOR * jnp.sqrt(size)) + adam.eps_root / unit
    damped = outer + floor * jnp.eye(outer.shape[-1], dtype=outer.dtype)
    return inverse_sqrt_by_products(damped, _FLOOR**2) / scale


def parted(base: Base) -> tuple[Base, Any]:
    """The base without hyperparameters that are arrays, and these."""
    adam, arrays = without_arrays(base.adam)
    polar, more = (None, {}) if base.polar is None else without_arrays(base.polar)
    return Base(adam, polar), (arrays, more)


def rejoined(static: Base, traced: Any) -> Base:
    """The inverse of `parted`."""
    polar = None if static.polar is None else static.polar._replace(**traced[1])
    return Base(static.adam._replace(**traced[0]), polar)
