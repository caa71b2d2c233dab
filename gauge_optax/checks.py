"""Checks of arguments that every transformation shares. Not here: what a binding must fit (`binding`)."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding.paths import binding_error


def require_params(transformation: str, params: Any) -> None:
    """Raises ValueError where `update` was called without the parameters."""
    if params is None:
        raise binding_error(
            transformation, "update was called without params", "params=None",
            "the parameters that the updates belong to", "write tx.update(grads, state, params)",
        )  # fmt: skip


def require_transformation(transformation: str, inner: Any) -> None:
    """Raises ValueError unless `inner` is an Optax transformation."""
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        name = getattr(inner, "__name__", None)
        raise binding_error(
            transformation, "inner is no transformation", f"{name or type(inner).__name__}", "what has init and update",
            f"call it: {name}(learning_rate)" if callable(inner) and name else "pass an optimizer, optax.adamw(1e-3)",
        )  # fmt: skip


def require_key(function: str, key: Any) -> None:
    """Raises ValueError where a seed was given for a key."""
    if not isinstance(key, jax.Array | np.ndarray):
        seed = key if isinstance(key, int) else 0
        raise binding_error(function, "no PRNG key", repr(key), "a key", f"write jax.random.key({seed})")


def require_gradients(transformation: str, updates: Any) -> None:
    """Raises ValueError where a gradient is one of integers, float0."""
    for path, leaf in jax.tree.leaves_with_path(updates):
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:
            raise binding_error(
                transformation, f"no gradient for '{jax.tree_util.keystr(path, simple=True, separator='/')}'",
                "float0, what jax.grad(allow_int=True) gives for integers", "gradients of floating-point leaves",
                "differentiate these alone, or leave integers out by optax.masked",
            )  # fmt: skip


def require_own(transformation: str, state: Any, kind: type) -> None:
    """Raises ValueError where a state is not even of the class that `init` makes."""
    if not all(hasattr(state, field) for field in getattr(kind, "_fields", ())):
        raise _of_another(transformation, type(state).__name__, kind.__name__)


@contextlib.contextmanager
def with_own_state(transformation: str, inner: Any, state: Any, params: Any) -> Iterator[None]:
    """Where an update fails, raises ValueError if the reason is a state that another optimizer made."""
    try:
        yield
    except Exception as error:
        expected, found = (str(jax.tree.structure(x)) for x in (jax.eval_shape(inner.init, params), state))
        if expected == found:
            raise
        raise _of_another(transformation, found, expected) from error


def _of_another(transformation: str, found: str, expected: str) -> ValueError:
    found, expected = (text if len(text) <= 200 else f"{text[:200]}…" for text in (found, expected))
    return binding_error(
        transformation, "a state of another optimizer", found, expected,
        "state = tx.init(params) with this very optimizer; from a plain run's state, go.from_state",
    )  # fmt: skip


def require_choice(transformation: str, argument: str, value: object, choices: Sequence[str]) -> None:
    """Raises ValueError where a string argument is not one of its choices."""
    if value not in choices:
        raise binding_error(
            transformation, f"bad {argument}", repr(value), f"one of {', '.join(map(repr, choices))}",
            f"write {argument}={choices[0]!r}",
        )  # fmt: skip


def require_values(transformation: str, params: Any) -> None:
    """Raises ValueError where `init` was called with shapes in place of parameters."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise binding_error(
                transformation,
                f"a leaf that is no array, '{jax.tree_util.keystr(path, simple=True, separator='/')}'",
                type(leaf).__name__, "a tree of arrays",
                "filter the module first: nnx.state(model, nnx.Param), eqx.filter(model, eqx.is_array)",
            )  # fmt: skip
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise binding_error(
            transformation, "init was called with shapes alone", "jax.ShapeDtypeStruct leaves",
            "arrays: the frame is read off their values",
            "write jax.eval_shape(tx.init, params) for the shapes of the state",
        )  # fmt: skip


def require_every(transformation: str, every: Any) -> None:
    """Raises ValueError where a number of steps is none, as far as can be told: `inject_hyperparams` traces it."""
    number = isinstance(every, int | np.integer | jax.Array) and jnp.issubdtype(jnp.result_type(every), jnp.integer)
    if not number or (not isinstance(every, jax.core.Tracer) and (jnp.ndim(every) or every < 1)):
        raise binding_error(
            transformation, "bad every", repr(every), "a positive int, the number of steps from one time to the next",
            "write every=1 for every step",
        )  # fmt: skip
