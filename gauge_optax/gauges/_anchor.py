"""The compact part of a frame: an orthogonal matrix per head, an angle per plane, that moves with the group.

With fixed pseudo-random rows C, the polar factor of CᵀW is Y(W·R) = Y(W)·R for every rotation R, and W·Yᵀ does not
depend on the representative. Of a plane read as complex numbers the phase of Σ c̄·w serves. DESIGN §5, `equivariant`.

Here: that frame at a balanced point. Not here: the noncompact part (`Gauge.frame`), body frames of DDC (`_basis`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax._sequence import in_turn
from gauge_optax.factors import full_rank, triangulars
from gauge_optax.gauges._basis import anchor
from gauge_optax.gauges._split import Bound
from gauge_optax.gauges.base import Element
from gauge_optax.gauges.linear import HeadLinear, RopeLinear
from gauge_optax.gauges.product import Product
from gauge_optax.gauges.rotation import HeadRotation
from gauge_optax.gauges.torus import RopeTorus
from gauge_optax.linalg import eigenvalue_cutoff, matmul


class Fixed(NamedTuple):
    """What a point fixes of one instance's bases.

    Attributes:
      path: a leaf of the instance.
      heads: per head or plane, whether it has a frame: the rank of CᵀW is that of the basis.
    """

    path: str
    heads: jax.Array


def compact_frame(group: Product, params: Any) -> tuple[Element, tuple[dict[str, Fixed], ...]]:
    """Y with act(Y⁻¹, θ) the same for all rotations of θ.

    Args:
      group: the gauges.
      params: a balanced point.

    Returns:
      An element of the product, the identity on shifts and scales; and per gauge, instance → what is fixed.
    """
    element, fixed = [], []
    for part, still in zip(group.parts, group.identity(params), strict=True):
        own, bound = dict(still), part.bound(params)
        values, found_here = bound.values(params), {}
        if isinstance(part, HeadLinear):
            anchors = [anchor(i.left, values) + anchor(i.right, values, i.left.blocks) for i in bound.linear]
            sides = in_turn(_has_whole_side, [i.factors(values) for i in bound.linear])
            for i, (found, heads), whole in zip(bound.linear, in_turn(_polar, anchors), sides, strict=True):
                own[i.key], found_here[i.key] = found, Fixed(i.paths[0], heads & whole)
        turns = in_turn(_phase if _planes(bound) else _polar, [anchor(head, values) for head in bound.rotations])
        for head, (found, heads) in zip(bound.rotations, turns, strict=True):
            found_here[head.key] = Fixed(head.paths[0], heads)
            if isinstance(part, HeadRotation | RopeTorus):
                own[head.key] = found
            elif isinstance(part, RopeLinear):
                own[head.key] = jnp.stack([jnp.zeros_like(found), found], -1)
        element.append(own)
        fixed.append(found_here)
    return tuple(element), tuple(fixed)


def _has_whole_side(factors: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Whether one of two factors has full rank: without, their balanced frame is not that of the orbit."""
    left, right = triangulars(*factors)
    return full_rank(left) | full_rank(right)


def _planes(bound: Bound) -> bool:
    """Whether a gauge's rotations are those of planes."""
    return any(head.blocks[0].pairing is not None for head in bound.rotations)


def _polar(m: jax.Array) -> tuple[jax.Array, jax.Array]:
    u, sizes, v = jnp.linalg.svd(m)
    return matmul(u, v), sizes[..., -1] > eigenvalue_cutoff(m.dtype) * sizes[..., 0]


def _phase(m: jax.Array) -> tuple[jax.Array, jax.Array]:
    real, imaginary = m[..., 0, 0] + m[..., 1, 1], m[..., 0, 1] - m[..., 1, 0]
    size = jnp.linalg.norm(m, axis=(-2, -1))
    return jnp.arctan2(imaginary, real), jnp.hypot(real, imaginary) > eigenvalue_cutoff(m.dtype) * size
