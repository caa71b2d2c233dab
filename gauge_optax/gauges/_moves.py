"""How vectors move under a group element: tangents as S, cotangents as S⁻ᵀ, squares of cotangents entry by entry.

Here: vectors of a whole tree or of some of its leaves (an optimizer's state may hold part of them). Not here: how
points move (`Gauge.act`), which vectors an optimizer's state holds (`transport`).
"""

from typing import Any, TypeVar

import jax.numpy as jnp

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.gauges.base import Element
from gauge_optax.gauges.product import Product
from gauge_optax.linalg import real_dtype

Tree = TypeVar("Tree")


def move_tangent(group: Product, element: Element, params: Any, tangent: Tree) -> Tree:
    """A tangent at θ carried to g·θ.

    Args:
      group: the gauges.
      element: g.
      params: a tree with the leaves of θ; shapes only.
      tangent: a tree with the same paths, or some of them.

    Returns:
      The tangent, every leaf in its own dtype.
    """
    own = leaves_by_path(tangent)
    whole = group.bound(params).offset
    shapes = {path: leaf.shape for path, leaf in leaves_by_path(params).items() if path in whole}
    vectors = {
        path: jnp.asarray(own[path], real_dtype()) if path in own else jnp.zeros(shape, real_dtype())
        for path, shape in shapes.items()
    }
    for part, part_element in zip(group.parts, element, strict=True):
        bound = part.bound(params)
        vectors |= part.moved_linearly(bound, part_element, {path: vectors[path] for path in bound.offset})
    moved = {path: x.astype(own[path].dtype) for path, x in vectors.items() if path in own}
    return with_leaves(tangent, moved)


def move_cotangent(group: Product, element: Element, params: Any, cotangent: Tree) -> Tree:
    """A cotangent at θ carried to g·θ: as `move_tangent`, by the inverse transpose."""
    return move_tangent(group, group.dual(element), params, cotangent)
