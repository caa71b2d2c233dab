"""Every tolerance of the suite, by what is checked and in which dtype (docs/design.md §7); literals nowhere else."""

from typing import Any

import jax.numpy as jnp

# check: float64, float32, bfloat16; relative to the norm of what is compared.
_TABLE: dict[str, tuple[float, float, float]] = {
    "invariant": (1e-12, 1e-5, 5e-2),  # the loss under act, balance, gauge_fix
    "group": (1e-12, 1e-5, 5e-2),  # inverse, compose, identity
    "split": (1e-12, 1e-5, 5e-2),  # vertical + horizontal, idempotent, equivariant
    "oracle": (1e-10, 1e-4, 5e-2),  # against the dense projector
    "coordinates": (1e-12, 1e-5, 5e-2),  # absolute: they are logarithms
    "horizontal": (1e-12, 1e-6, 5e-2),  # a tangent's vertical part, in the frame
    "twins": (1e-8, 1e-4, 5e-2),  # 20 steps from θ and from g·θ, per leaf
    "drift": (1e-5, 1e-5, 5e-2),  # absolute: frozen coordinates after 1,000 steps
    "twin_loss": (1e-8, 1e-5, 5e-2),
    "coupled": (1e-2, 1e-2, 5e-2),  # the same where two rescales share a leaf, before the retraction
    "optax": (1e-12, 1e-6, 5e-2),  # two ways to write one optimizer, Optax's own among them
    "logarithm": (1e-12, 1e-5, 5e-2),  # angles of rotations: three square roots amplify rounding eightfold
    "sharded": (1e-12, 1e-5, 5e-2),  # a few steps on many devices and on one, per leaf and in the loss
    "quotient_twins": (1e-10, 1e-4, 5e-2),  # 20 steps on the slice, any inner, per leaf, key biases in
    "quotient_loss": (1e-10, 1e-5, 5e-2),
    "quotient_drift": (1e-12, 1e-6, 5e-2),  # absolute: what anchors read, after 1,000 steps
    "turned": (1e-11, 1e-5, 5e-2),  # radians that a head turns in all, over as many
    "kernel": (1e-12, 1e-6, 5e-2),  # residuals of the small-matrix kernels
}

_COLUMNS = ("float64", "float32", "bfloat16")


def tolerance(check: str, dtype: Any = jnp.float64) -> float:
    """The largest relative error allowed of a check in a dtype."""
    return _TABLE[check][_COLUMNS.index(jnp.dtype(dtype).name)]


# `bound.asymmetry`: the largest of a symmetry over every net of the register, and the least of the wrong bindings of
# tests/test_check.py, with penalties of 1e-4 to 1e-2 among them (bfloat16: bindings alone). `go.check` raises above
# 1e-8, 3e-5 and 5e-2.
_ASYMMETRY = {"float64": (1e-13, 1e-4), "float32": (4e-6, 1e-4), "bfloat16": (1e-2, 1e-1)}


def roundoff_of_asymmetry(dtype: str) -> float:
    """The largest asymmetry of a symmetry in a dtype."""
    return _ASYMMETRY[dtype][0]
