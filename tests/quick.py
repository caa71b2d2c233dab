"""`jit` for functions that a test calls a few times: the compiler, where most of a test's time goes, need not try."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

# Four times faster to compile on CPU; two times without the last.
_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


@functools.cache
def _accepted_options() -> dict[str, Any]:
    """XLA's names are no promise: where one is unknown, compile as usual."""
    try:
        jax.jit(lambda x: x, compiler_options=_OPTIONS)(0.0)
    except (RuntimeError, ValueError):
        return {}
    return _OPTIONS


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit`, without the passes that only long runs repay."""
    return jax.jit(function, compiler_options=_accepted_options(), **options)


def environment() -> dict[str, str]:
    """Of a child process on CPU devices of its own, whose compiler need not try either."""
    quick = " ".join(f"--{name}={str(value).lower()}" for name, value in _accepted_options().items())
    return os.environ | {
        "XLA_FLAGS": f"{quick} {os.environ.get('XLA_FLAGS', '')}",
        "JAX_PLATFORMS": "cpu",
        # An eigendecomposition keeps one of XLA's threads, by default one per core, and waits for another: as many at
        # once as there are threads wait for ever. Beside each other, LAPACK's own threads take many times as long.
        "PJRT_NPROC": "16",
        "OPENBLAS_NUM_THREADS": "1",
    }
