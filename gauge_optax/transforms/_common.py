"""Plumbing that transformations share: leaves into the computing dtype, and back into their own.

Here: nothing about what a transformation does.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.linalg import real_dtype


def float_leaves(tree: Any) -> dict[str, jax.Array]:
    """Leaves by path in the computing dtype; complex ones as they are."""
    leaves = leaves_by_path(tree)
    return {path: x if jnp.iscomplexobj(x) else jnp.asarray(x, real_dtype()) for path, x in leaves.items()}


def in_dtype_of(tree: Any, leaves: Mapping[str, jax.Array]) -> Any:
    """`tree` with these leaves in place of its own, each cast to the dtype of the one it replaces."""
    own = leaves_by_path(tree)
    return with_leaves(tree, {path: leaf.astype(own[path].dtype) for path, leaf in leaves.items()})


def placeholder() -> jax.Array:
    """What stands for a gauges' part of a state where `optax.tree.map_params` initialises without leaves."""
    return jnp.zeros(())
