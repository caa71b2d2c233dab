"""Checks of arguments that every transformation shares. Not here: what a binding must fit (`binding`)."""

from collections.abc import Sequence
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
