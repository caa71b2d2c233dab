"""Checks of arguments that every transformation shares. Not here: what a binding must fit (`binding`)."""

from collections.abc import Sequence
from typing import Any


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
