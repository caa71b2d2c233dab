"""The compact part of a frame: an orthogonal matrix per head, an angle per plane, that moves with the group.

With fixed pseudo-random rows C, the polar factor of CᵀW is Y(W·R) = Y(W)·R for every rotation R, and W·Yᵀ does not
depend on the representative. Of a plane read as complex numbers the phase of Σ c̄·w serves. DESIGN §5, `equivariant`.

Here: that frame at a balanced point. Not here: the noncompact part (`Gauge.frame`), body frames of DDC (`_basis`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.gauges._basis import anchor
from gauge_optax.gauges._head import HeadInstance
from gauge_optax.gauges._scale import Values
from gauge_optax.gauges.base import Element
from gauge_optax.gauges.linear import HeadLinear, RopeLinear
from gauge_optax.gauges.product import Product
from gauge_optax.gauges.rotation import HeadRotation
from gauge_optax.gauges.torus import RopeTorus
from gauge_optax.linalg import eigenvalue_cutoff, matmul

Frames = dict[str, tuple[jax.Array, jax.Array]]
"""Instance → the compact element and, per head or plane, whether the point fixes it."""


def compact_frame(group: Product, params: Any) -> tuple[Element, dict[str, jax.Array]]:
    """Y with act(Y⁻¹, θ) the same for all rotations of θ.

    Args:
      group: the gauges.
      params: a balanced point.

    Returns:
      An element of the product, the identity on shifts and scales; and, by a leaf of every instance, which heads have a
      frame (the rank of CᵀW is that of the basis).
    """
    element, framed = [], {}
    for part, still in zip(group.parts, group.identity(params), strict=True):
        own, bound = dict(still), part.bound(params)
        values = bound.values(params)
        if isinstance(part, HeadLinear):
            for i in bound.linear:
                own[i.key], framed[i.paths[0]] = _polar(anchor(i.left, values) + anchor(i.right, values, i.left.blocks))
        for head in bound.rotations:
            found, framed[head.paths[0]] = _turn(head, values)
            if isinstance(part, HeadRotation | RopeTorus):
                own[head.key] = found
            elif isinstance(part, RopeLinear):
                own[head.key] = jnp.stack([jnp.zeros_like(found), found], -1)
        element.append(own)
    return tuple(element), framed


def _turn(head: HeadInstance, values: Values) -> tuple[jax.Array, jax.Array]:
    if head.blocks[0].pairing is None:
        return _polar(anchor(head, values))
    return _phase(anchor(head, values))


def _polar(m: jax.Array) -> tuple[jax.Array, jax.Array]:
    u, sizes, v = jnp.linalg.svd(m)
    return matmul(u, v), sizes[..., -1] > eigenvalue_cutoff(m.dtype) * sizes[..., 0]


def _phase(m: jax.Array) -> tuple[jax.Array, jax.Array]:
    real, imaginary = m[..., 0, 0] + m[..., 1, 1], m[..., 0, 1] - m[..., 1, 0]
    size = jnp.linalg.norm(m, axis=(-2, -1))
    return jnp.arctan2(imaginary, real), jnp.hypot(real, imaginary) > eigenvalue_cutoff(m.dtype) * size
