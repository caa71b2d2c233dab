"""From plain maths to an Optax transformation: checks of arguments and states, explicit meshes, leaves by dtype.

Every transformation of this library is an `init` and an `update` of arrays. `transformation` puts around them what has
nothing to do with the maths, so that it is written once.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from gauge_optax.binding import binding_error, is_empty, leaves_by_path, with_leaves
from gauge_optax.linalg import real_dtype

Tree = TypeVar("Tree")


def transformation(
    name: str,
    init: Callable[[Any], Any],
    update: Callable[..., tuple[Any, Any]],
    state_type: type,
    empty: Callable[[Any], Any],
    needs_params: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation from plain maths.

    Args:
      name: of the public function, for messages.
      init: params → state.
      update: (updates, state, params, **extra) → (updates, state), written as on one device: on a mesh with explicit
        axes it runs with layouts left to the compiler, and its results are laid out as its arguments are.
      state_type: the NamedTuple that `init` returns.
      empty: params → state, for trees without leaves: `optax.tree.map_params` initialises with one.
      needs_params: whether `update` is refused without params.

    Returns:
      The transformation.
    """

    def init_fn(params: optax.Params) -> Any:
        return empty(params) if is_empty(params) else init(params)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if needs_params:
            require_params(name, params)
        require_gradients(name, updates)
        require_state(name, state, state_type)
        mesh = layout((updates, params))

        def plain(updates: Any, state: Any, params: Any, extra: Any) -> tuple[Any, Any]:
            return update(updates, state, params, **extra)

        return mesh.run(plain, updates, state, params, extra, like=(updates, state))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def checked_inner(name: str, inner: Any) -> optax.GradientTransformationExtraArgs:
    """An inner transformation that takes extra arguments, and says so when a state is another optimizer's.

    Raises ValueError unless `inner` has `init` and `update`.
    """
    require_transformation(name, inner)
    inner = optax.with_extra_args_support(inner)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        with explain_state_mismatch(name, inner, state, params):
            return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def float_leaves(tree: Any) -> dict[str, jax.Array]:
    """Leaves by path in the computing dtype; complex ones as they are."""
    leaves = leaves_by_path(tree)
    return {path: x if jnp.iscomplexobj(x) else jnp.asarray(x, real_dtype()) for path, x in leaves.items()}


def cast_like(leaves: Mapping[str, jax.Array], tree: Any) -> dict[str, jax.Array]:
    """Leaves by path, each cast to the dtype that it has in `tree`."""
    targets = leaves_by_path(tree)
    return {path: leaf.astype(targets[path].dtype) for path, leaf in leaves.items()}


def in_dtype_of(tree: Any, leaves: Mapping[str, jax.Array]) -> Any:
    """`tree` with these leaves, each cast to the dtype of the one that it replaces."""
    return with_leaves(tree, cast_like(leaves, tree))


def stepped(gauge: Any, params: Any, updates: Any) -> Any:
    """Parameters after a step of the leaves that a gauge binds; the others stay."""
    leaves, steps = leaves_by_path(params), gauge._slice(params).vectors(updates)
    return with_leaves(params, {path: optax.apply_updates(leaves[path], step) for path, step in steps.items()})


def placeholder() -> jax.Array:
    """What stands for the gauges' part of a state where a tree has no leaves."""
    return jnp.zeros(())


# Meshes ---------------------------------------------------------------------------------------------------
#
# On a mesh with explicit axes a type says how its array is laid out, and JAX wants the layout of every result that its
# operands leave open: of a reshape that merges a sharded axis, of a sum of products over one, of heads of several
# leaves in one batch. The maths leaves that to the compiler, as on any other mesh.


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
        """Arrays with types that leave their layout open; called inside."""
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
        if self.mesh is None:
            return function(*arrays)
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


# Checks of arguments; `binding` checks the gauges and whether they fit the tree -----------------------------


def require_params(transformation: str, params: Any) -> None:
    """Raises ValueError if `update` was called without the parameters."""
    if params is None:
        raise binding_error(
            transformation, "update was called without params", "params=None",
            "the parameters that the updates belong to", "write tx.update(grads, state, params)")


def require_transformation(transformation: str, inner: Any) -> None:
    """Raises ValueError unless `inner` is an Optax transformation."""
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        name = getattr(inner, "__name__", None)
        # The usual mistake is `optax.adamw` in place of `optax.adamw(1e-3)`.
        uncalled = callable(inner) and name
        remedy = f"call it: {name}(learning_rate)" if uncalled else "pass an optimizer, optax.adamw(1e-3)"
        raise binding_error(
            transformation, "inner is no transformation", name or type(inner).__name__,
            "an object with init and update", remedy)


def require_key(function: str, key: Any) -> None:
    """Raises ValueError if `key` is no array, usually because it is a seed."""
    if not isinstance(key, jax.Array | np.ndarray):
        seed = key if isinstance(key, int) else 0
        raise binding_error(function, "no PRNG key", repr(key), "a key", f"write jax.random.key({seed})")


def require_gradients(transformation: str, updates: Any) -> None:
    """Raises ValueError if an update is float0, the type of a gradient of integers."""
    for path, leaf in jax.tree.leaves_with_path(updates):
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:
            raise binding_error(
                transformation, f"no gradient for '{jax.tree_util.keystr(path, simple=True, separator='/')}'",
                "float0, what jax.grad(allow_int=True) gives for integers", "gradients of floating-point leaves",
                "differentiate floating-point leaves alone, or leave integers out by optax.masked")


def require_values(transformation: str, params: Any) -> None:
    """Raises ValueError if `init` was called with leaves that are not arrays, or with shapes in place of arrays."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise binding_error(
                transformation, f"a leaf that is no array, '{jax.tree_util.keystr(path, simple=True, separator='/')}'",
                type(leaf).__name__, "a tree of arrays",
                "filter the module first: nnx.state(model, nnx.Param), eqx.filter(model, eqx.is_array)")
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise binding_error(
            transformation, "init was called with shapes alone", "jax.ShapeDtypeStruct leaves",
            "arrays: the frame is computed from their values",
            "write jax.eval_shape(tx.init, params) for the shapes of the state")


def require_choice(transformation: str, argument: str, value: object, choices: Sequence[str]) -> None:
    """Raises ValueError if a string argument is not one of its choices."""
    if value not in choices:
        raise binding_error(
            transformation, f"bad {argument}", repr(value), f"one of {', '.join(map(repr, choices))}",
            f"write {argument}={choices[0]!r}")


def require_every(transformation: str, every: Any) -> None:
    """Raises ValueError unless `every` is a positive number of steps."""
    integer = isinstance(every, int | np.integer | jax.Array) and jnp.issubdtype(jnp.result_type(every), jnp.integer)
    # `optax.inject_hyperparams` traces the number, and then only its type can be checked.
    if not integer or (not isinstance(every, jax.core.Tracer) and (jnp.ndim(every) or every < 1)):
        raise binding_error(
            transformation, "bad every", repr(every), "a positive int, the number of steps from one time to the next",
            "write every=1 for every step")


def require_state(transformation: str, state: Any, kind: type) -> None:
    """Raises ValueError unless a state has the fields of the class that `init` returns."""
    if not all(hasattr(state, field) for field in getattr(kind, "_fields", ())):
        raise _wrong_state(transformation, type(state).__name__, kind.__name__)


@contextlib.contextmanager
def explain_state_mismatch(transformation: str, inner: Any, state: Any, params: Any) -> Iterator[None]:
    """Turns an error of `inner.update` into a ValueError about its state, if another optimizer made the state.

    The states are compared only after an error, because a state of another structure can work, and because the
    comparison traces `inner.init`.
    """
    try:
        yield
    except Exception as error:
        expected, found = (str(jax.tree.structure(tree)) for tree in (jax.eval_shape(inner.init, params), state))
        if expected == found:
            raise
        raise _wrong_state(transformation, found, expected) from error


def _wrong_state(transformation: str, found: str, expected: str) -> ValueError:
    found, expected = (text if len(text) <= 200 else f"{text[:200]}…" for text in (found, expected))
    return binding_error(
        transformation, "a state of another optimizer", found, expected,
        "call tx.init(params) of this optimizer: state = tx.init(params); go.from_state converts a plain run's state")


# The names by which the transformations still call these two.
