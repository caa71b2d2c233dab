"""Checks of arguments that every transformation shares. Not here: what a binding must fit (`binding`)."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def require_params(transformation: str, params: Any) -> None:
    """Raises ValueError where `update` was called without the parameters."""
    if params is None:
        raise ValueError(
            f"{transformation}: update was called without params\n"
            f"  found:    params=None\n"
            f"  expected: the parameters that the updates belong to\n"
            f"  remedy:   write tx.update(grads, state, params)"
        )


def require_key(function: str, key: Any) -> None:
    """Raises ValueError where a seed was given for a key."""
    if not isinstance(key, jax.Array | np.ndarray):
        raise ValueError(
            f"{function}: no PRNG key\n"
            f"  found:    {key!r}\n"
            f"  expected: a key\n"
            f"  remedy:   write jax.random.key({key if isinstance(key, int) else 0})"
        )


def require_gradients(transformation: str, updates: Any) -> None:
    """Raises ValueError where a gradient is one of integers, float0."""
    for path, leaf in jax.tree.leaves_with_path(updates):
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:
            raise ValueError(
                f"{transformation}: no gradient for '{jax.tree_util.keystr(path, simple=True, separator='/')}'\n"
                f"  found:    float0, what jax.grad(allow_int=True) gives for integers\n"
                f"  expected: gradients of floating-point leaves\n"
                f"  remedy:   differentiate these alone, or leave integers out by optax.masked"
            )


def require_own(transformation: str, state: Any, kind: type) -> None:
    """Raises ValueError where a state is not even of the class that `init` makes."""
    if not all(hasattr(state, field) for field in getattr(kind, "_fields", ())):
        raise ValueError(
            f"{transformation}: a state of another optimizer\n"
            f"  found:    {type(state).__name__}\n"
            f"  expected: {kind.__name__}\n"
            f"  remedy:   state = tx.init(params) with this very optimizer; from a plain run's state, go.from_state"
        )


@contextlib.contextmanager
def with_own_state(transformation: str, inner: Any, state: Any, params: Any) -> Iterator[None]:
    """Where an update fails, raises ValueError if the reason is a state that another optimizer made."""
    try:
        yield
    except Exception as error:
        expected, found = (str(jax.tree.structure(x)) for x in (jax.eval_shape(inner.init, params), state))
        if expected == found:
            raise
        raise ValueError(
            f"{transformation}: a state of another optimizer\n"
            f"  found:    {_short(found)}\n"
            f"  expected: {_short(expected)}\n"
            f"  remedy:   state = tx.init(params) with this very optimizer; from a plain run's state, go.from_state"
        ) from error


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def require_choice(transformation: str, argument: str, value: object, choices: Sequence[str]) -> None:
    """Raises ValueError where a string argument is not one of its choices."""
    if value not in choices:
        raise ValueError(
            f"{transformation}: bad {argument}\n"
            f"  found:    {value!r}\n"
            f"  expected: one of {', '.join(map(repr, choices))}\n"
            f"  remedy:   write {argument}={choices[0]!r}"
        )


def require_values(transformation: str, params: Any) -> None:
    """Raises ValueError where `init` was called with shapes in place of parameters."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise ValueError(
                f"{transformation}: a leaf that is no array, "
                f"'{jax.tree_util.keystr(path, simple=True, separator='/')}'\n"
                f"  found:    {type(leaf).__name__}\n"
                f"  expected: a tree of arrays\n"
                f"  remedy:   filter the module first: nnx.state(model, nnx.Param), eqx.filter(model, eqx.is_array)"
            )
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            f"{transformation}: init was called with shapes alone\n"
            f"  found:    jax.ShapeDtypeStruct leaves\n"
            f"  expected: arrays: the frame is read off their values\n"
            f"  remedy:   write jax.eval_shape(tx.init, params) for the shapes of the state"
        )


def require_every(transformation: str, every: Any) -> None:
    """Raises ValueError where a number of steps is none, as far as can be told: `inject_hyperparams` traces it."""
    number = isinstance(every, int | np.integer | jax.Array) and jnp.issubdtype(jnp.result_type(every), jnp.integer)
    if not number or (not isinstance(every, jax.core.Tracer) and (jnp.ndim(every) or every < 1)):
        raise ValueError(
            f"{transformation}: bad every\n"
            f"  found:    {every!r}\n"
            f"  expected: a positive int, the number of steps from one time to the next\n"
            f"  remedy:   write every=1 for every step"
        )
