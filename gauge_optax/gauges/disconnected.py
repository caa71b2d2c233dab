"""Elements that no continuous path connects with the identity: negative factors and reflections.

Gradients test only the elements that such a path connects with the identity. A proof that a gauge is a symmetry, or an
assertion of it, therefore also moves weights by the elements of this module. They have the usual form, and the gauge's
`act` takes them like any other.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.gauges.gauge import Gauge
from gauge_optax.linalg import determinant


def disconnected(gauge: Gauge, element: Any) -> Any:
    """An element with negative factors (`norm_scale`) or with reflections (`head_rotation`).

    Every second factor of the result is negative, or every second matrix a reflection, beginning with the first. They
    show bindings that are no symmetry although gradients do not show it: behind a ReLU a negative factor changes the
    outputs, and a cross product changes under reflections.

    Args:
      gauge: the gauge. The elements of gauges other than these two kinds are returned as they are.
      element: an element of this gauge, as its `sample` returns it.

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
