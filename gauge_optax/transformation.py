"""From plain maths to an Optax transformation: checks of arguments and states, explicit meshes, leaves by dtype.

Every transformation of this library is an `init` and an `update` of arrays; `transformation` puts around them what has
nothing to do with the maths.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import is_empty, leaves_by_path, with_leaves
from gauge_optax.checks import require_gradients, require_own, require_params, require_transformation, with_own_state
from gauge_optax.linalg import real_dtype
from gauge_optax.meshes import layout


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
        require_own(name, state, state_type)
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
        with with_own_state(name, inner, state, params):
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
