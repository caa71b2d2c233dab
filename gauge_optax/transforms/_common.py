"""Plumbing that every transformation shares: gauges in, parameters required, updates out in their own dtype.

Here: nothing about what a transformation does.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import binding_error, leaves_by_path, with_leaves
from gauge_optax.gauges._split import Bound
from gauge_optax.gauges.product import Product


def bound_without_linear(transformation: str, group: Product, params: Any) -> Bound:
    """The product on a tree. Raises ValueError where GL(d) is among its gauges: their frame is another."""
    bound = group.bound(params)
    if bound.linear:
        first = bound.linear[0]
        raise binding_error(
            transformation, f"{first.gauge} on '{first.paths[0]}'", f"a linear gauge in the list of {transformation}",
            "shifts, scales, rotations, tori and rope_linear",
            "write go.quotient(tx, gauges) or an alias of it, which take the whole list, or put go.head_rotation in "
            "its place",
        )  # fmt: skip
    return bound


def float_leaves(tree: Any, dtype: Any, without: Collection[str] = ()) -> dict[str, jax.Array]:
    """Leaves by path in the computing dtype, all or `without` some."""
    return {path: jnp.asarray(leaf, dtype) for path, leaf in leaves_by_path(tree).items() if path not in without}


def in_dtype_of(tree: Any, leaves: Mapping[str, jax.Array]) -> Any:
    """`tree` with these leaves in place of its own, each cast to the dtype of the one it replaces."""
    own = leaves_by_path(tree)
    return with_leaves(tree, {path: leaf.astype(own[path].dtype) for path, leaf in leaves.items()})


def placeholder() -> jax.Array:
    """What stands for a gauges' part of a state where `optax.tree.map_params` initialises without leaves."""
    return jnp.zeros(())


def zeros_sharded_like(leaf: Any, dtype: Any) -> jax.Array:
    """Zeros of a leaf's shape and, under `jax.jit` too, its sharding: what is made from nothing is whole everywhere."""
    if isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(leaf.dtype, jnp.floating):
        # Nothing exceeds infinity, NaN neither. The compiler does not know that, and lays the result out like the leaf.
        return jnp.greater(leaf, jnp.inf).astype(dtype)
    return jnp.zeros_like(leaf, dtype)
