"""Meshes with explicit axes, where a type says how its array is laid out.

There JAX wants the layout of every result that its operands leave open: of a reshape that merges an axis which is dealt
out, of a sum of products over one, of heads of several leaves in one batch. The slice's arithmetic leaves that to the
compiler, as on any other mesh.

Here: leaving layouts to the compiler, naming them again, zeros laid out like something. Not here: any arithmetic.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh some of whose axes are explicit.

    Attributes:
      mesh: the mesh, None where there is no such: then everything here leaves arrays alone.
    """

    mesh: Mesh | AbstractMesh | None

    def left_open(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, every axis is the compiler's. Arrays from outside enter by `enter`."""
        if self.mesh is None:
            return contextlib.nullcontext()
        explicit = dict.fromkeys(self.mesh.explicit_axes, AxisType.Auto)
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh.update_axis_types(explicit))

    def enter(self, tree: Tree) -> Tree:
        """Arrays as they lie, their types silent about it; inside."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: x if _place(x) is None else jax.sharding.reshard(x, PartitionSpec()), tree)

    def leave(self, tree: Tree, like: Any = None) -> Tree:
        """Arrays laid out as those of `like`, of one structure with `tree`, or whole; outside."""
        if self.mesh is None:
            return tree
        everywhere = NamedSharding(self.mesh, PartitionSpec())

        def placed(x: Any, own: Any) -> Any:
            return jax.sharding.reshard(x, _place(own) or everywhere) if isinstance(x, jax.Array) else x

        return jax.tree.map(placed, tree, tree if like is None else like)

    def whole(self, tree: Tree) -> Tree:
        """Arrays whole on every device; outside."""
        if self.mesh is None:
            return tree
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.sharding.reshard(x, everywhere), tree)

    def run(self, function: Callable[..., Tree], *arrays: Any, like: Any = None) -> Tree:
        """What a function makes of arrays with layouts left open, laid out as `like`, or whole; outside."""
        with self.left_open():
            made = function(*self.enter(arrays))
        return self.leave(made, like=like)


def layout(tree: Any) -> Layout:
    """Of the first array that lies on a mesh with explicit axes."""
    places = (place for leaf in jax.tree.leaves(tree) if (place := _place(leaf)) is not None)
    return Layout(next((place.mesh for place in places), None))


def zeros_like(tree: Tree, dtype: Any = None) -> Tree:
    """Zeros that under `jit` lie where their leaves lie: what is made from nothing is whole everywhere."""

    def zeros(leaf: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(leaf.dtype, jnp.floating):
            # Nothing exceeds infinity, NaN neither. The compiler does not know that, and lays the result out like it.
            return jnp.greater(leaf, jnp.inf).astype(dtype or leaf.dtype)
        return jnp.zeros_like(leaf, dtype)

    return jax.tree.map(zeros, tree)


def lying_like(like: Tree, tree: Tree) -> Tree:
    """A tree that under `jit` lies, leaf by leaf, where another of the same shapes lies."""

    def tied(own: Any, x: Any) -> Any:
        if isinstance(own, jax.core.Tracer) and jnp.issubdtype(own.dtype, jnp.floating):
            return jnp.where(jnp.greater(own, jnp.inf), own, x)  # never; the compiler does not know that
        return x

    return jax.tree.map(tied, like, tree)


def _place(leaf: Any) -> NamedSharding | None:
    """An array's sharding, as far as that is explicit."""
    if not isinstance(leaf, jax.Array) or not (found := jax.typeof(leaf).sharding).mesh.explicit_axes:
        return None
    # A type names the mesh without its devices, which arrays outside `jit` need.
    own = None if isinstance(leaf, jax.core.Tracer) else leaf.sharding
    return NamedSharding(own.mesh, found.spec) if isinstance(own, NamedSharding) else found


def opened(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """A transformation whose updates are computed with layouts left open; what it gives and keeps lies as it came."""
    inner = optax.with_extra_args_support(inner)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        def update(updates: Any, state: Any, params: Any, extra: Any) -> tuple[Any, Any]:
            return inner.update(updates, state, params, **extra)

        return layout(updates).run(update, updates, state, params, extra, like=(updates, state))

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)
