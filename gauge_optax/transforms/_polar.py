"""The step of a matrix in Muon: the polar factor of its first moment, times one invariant number per matrix.

Here: scales of a polar factor. Not here: the iteration (`linalg.polar`), which leaves it is done to (`polar`).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.gauges._matrices import Matrices
from gauge_optax.linalg import Schedule, polar

Arrays = dict[str, jax.Array]
Scalar = float | jax.Array
SCALES = ("width", "rms", "none")


class PolarOptions(NamedTuple):
    """How matrices are stepped.

    Attributes:
      beta: decay of first moments.
      eps: added to ‖M‖_F in the normalisation.
      schedule: the polynomials of the Newton–Schulz iteration, one per step.
      scale: "width", "rms", "none", or the RMS of a step.
    """

    beta: Scalar
    eps: Scalar
    schedule: Schedule
    scale: str | Scalar


def polar_steps(options: PolarOptions, matrices: Mapping[str, Matrices], mean: Mapping[str, jax.Array]) -> Arrays:
    """C·P per leaf, P the polar factor of every matrix of a first moment.

    Args:
      options: the settings.
      matrices: how each leaf is read.
      mean: bias-corrected first moments.

    Returns:
      The leaves; zero where the moment is zero.
    """
    return {
        path: own.leaf(scaled_polar(options, (own.fan_in, own.fan_out), own.view(mean[path])))
        for path, own in matrices.items()
    }


def scaled_polar(options: PolarOptions, fans: tuple[int, int], m: jax.Array) -> jax.Array:
    """C·P of matrices (…, rows, columns) with these numbers of inputs and outputs."""
    factor = polar(m, options.schedule, eps=options.eps)
    fan_in, fan_out = fans
    if not isinstance(options.scale, str):
        return options.scale * math.sqrt(max(fan_in, fan_out)) * factor
    if options.scale == "width":
        return math.sqrt(max(1.0, fan_out / fan_in)) * factor
    if options.scale == "rms":
        return jnp.linalg.norm(m, axis=(-2, -1), keepdims=True) / math.sqrt(min(fan_in, fan_out)) * factor
    return factor
