"""Elements that are not connected with the identity, which a proof needs: gradients show the other ones alone.

Which weights such an element moves is not here: a gauge's `act` takes it like any other.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.gauges.gauge import Gauge
from gauge_optax.linalg import determinant


def disconnected(gauge: Gauge, element: Any) -> Any:
    """An element with negative factors (`norm_scale`) or with reflections (`head_rotation`).

    Of an element's factors or matrices, every other one changes, the first included. Behind a ReLU a negative factor
    changes the outputs; a cross product changes under reflections.

    Args:
      gauge: the gauge. The elements of all others are returned as they are.
      element: what its `sample` returns.

    >>> gauge = go.norm_scale({"scale": "channel"}, {"kernel": "channel _"})
    >>> jnp.exp(disconnected(gauge, {"": jnp.zeros(2)})[""]).real.round(3).tolist()
    [-1.0, 1.0]
    """
    if gauge.name == "norm_scale":
        return jax.tree.map(_with_negative_factors, element)
    return jax.tree.map(_with_reflections, element) if gauge.name == "head_rotation" else element


def _every_other(shape: tuple[int, ...]) -> jax.Array:
    return jnp.arange(math.prod(shape)).reshape(shape) % 2 == 0


def _with_negative_factors(log: jax.Array) -> jax.Array:
    return jax.lax.complex(log, jnp.where(_every_other(log.shape), math.pi, 0.0).astype(log.dtype))


def _with_reflections(matrices: jax.Array) -> jax.Array:
    turned = (determinant(matrices) > 0) == _every_other(matrices.shape[:-2])
    columns = turned[..., None, None] & (jnp.arange(matrices.shape[-1]) == 0)
    return jnp.where(columns, -matrices, matrices)
