"""Checks of the arguments of transformations. `binding` checks the gauges and whether they fit the tree."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding.paths import binding_error


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
require_own = require_state
with_own_state = explain_state_mismatch
