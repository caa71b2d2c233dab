"""The barrier between two sets of weights: how far the loss on the line between them exceeds a linear interpolation."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gauge_optax.orbit.merge import interpolate
from gauge_optax.transformation import require_arrays, require_function, require_scalar


def barrier(loss: Callable[[Any], Any], a: Any, b: Any) -> float:
    """Returns the largest rise, on the line from a to b, of the loss above the linear interpolation of its end values.

    Args:
      loss: a function of the parameters, such as the loss of a whole test set.
      a: parameters.
      b: parameters with the same structure and shapes. Usually they are aligned to `a` first, by `go.orbit.align`.

    Returns:
      The maximum of loss(λ) − ((1 − λ)·loss(0) + λ·loss(1)) over λ = 0, 0.1, …, 1, where loss(λ) is the loss at
      (1 − λ)·a + λ·b. It is zero if the loss nowhere exceeds the interpolation, and NaN if a loss is NaN.

    Raises:
      ValueError: trees that differ in structure or shapes; a loss that is no real number.

    >>> loss = lambda params: 1.0 - jnp.abs(params["w"])
    >>> round(go.measure.barrier(loss, {"w": jnp.array(-1.0)}, {"w": jnp.array(1.0)}), 4)
    1.0

    Reference: Frankle et al. 2020, linear mode connectivity; Git Re-Basin, Definition 2.1.
    """
    require_arrays("barrier", a, b)
    require_function("barrier", "loss", loss, "params")
    values = [loss(interpolate(a, b, step / 10)) for step in range(11)]
    for value in values:
        require_scalar("barrier", value, differentiable=False)
    losses = [float(value) for value in values]
    # In this form the chord has no roundoff if both ends have the same loss.
    chord = [losses[0] + step / 10 * (losses[-1] - losses[0]) for step in range(11)]
    # NumPy's maximum of NaN and a number is NaN, Python's may be the number.
    return float(np.max([0.0, *(between - straight for between, straight in zip(losses, chord, strict=True))]))
