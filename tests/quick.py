"""`jit` for functions that a test calls a few times: the compiler, where most of a test's time goes, need not try."""

import os
from collections.abc import Callable, Container, Iterable
from typing import Any

import jax
import pytest

from gauge_optax.xla import quick_options


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit`, without the passes that only long runs repay."""
    return jax.jit(function, compiler_options=quick_options(), **options)


def rows(cases: Iterable[Any], quick: Container[str]) -> pytest.MarkDecorator:
    """A test's `case`, with the case's name as its id; those without one of these names are slow, and no others."""
    marks = {True: (pytest.mark.quick_row,), False: (pytest.mark.slow,)}
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.name, marks=marks[c.name in quick]) for c in cases])


def environment() -> dict[str, str]:
    """Of a child process on CPU devices of its own, whose compiler need not try either."""
    quick = " ".join(f"--{name}={str(value).lower()}" for name, value in quick_options().items())
    return os.environ | {
        "XLA_FLAGS": f"{quick} {os.environ.get('XLA_FLAGS', '')}",
        "JAX_PLATFORMS": "cpu",
        "OPENBLAS_NUM_THREADS": "1",  # several processes' LAPACK threads compete for the cores
    }
