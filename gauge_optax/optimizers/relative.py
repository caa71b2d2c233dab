"""Steps in units of what they step: a kernel's RMS times the root of its fan-in.

A kernel of unit variance per input has RMS·√fan-in = 1, and its steps stay as they are; one that starts at 0.02 with 64
inputs has 0.16, and gets steps of 0.16 of theirs. A kernel of zeros would never move: the unit has a floor.

Here: the units. Not here: the slice; it works without. References: `optax.scale_by_param_block_rms` (Adafactor's
parameter scale, without the fan-in); Yang et al. 2023, A Spectral Condition for Feature Learning.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import is_empty, leaves_by_path, with_leaves
from gauge_optax.gauges.gauge import Gauges, product
from gauge_optax.gauges.matrices import Matrices, matrices_of
from gauge_optax.slice import Slice
from gauge_optax.transformation import require_params


def scale_by_relative_rms(gauges: Gauges, min_scale: float | jax.Array = 0.1) -> optax.GradientTransformation:
    """Multiplies the update of every kernel that a gauge binds by max(RMS(kernel)·√fan-in, min_scale).

    Args:
      gauges: a gauge or a sequence of them; they say which leaves are kernels, and which of their axes are inputs (a
        head's axis goes with its basis). Vectors and leaves in no gauge keep their updates.
      min_scale: the least unit, what a kernel of zeros starts with.

    Returns:
      A transformation without state, between a preconditioner and the decay. Its `update` needs `params`.

    Raises:
      ValueError: bindings that do not fit the tree; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((4, 2), 0.25), "down": jnp.zeros((2, 3))}
    >>> tx = go.scale_by_relative_rms(gauge)
    >>> updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    >>> float(updates["up"][0, 0]), round(float(updates["down"][0, 0]), 3)
    (0.5, 0.1)

    Reference: ours. They gain from small starts, on the slice and off it (examples/results/starts.json).
    """
    group = product(gauges)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        if not is_empty(params):
            Slice.of(group.parts, params)  # raises where a binding does not fit
        return optax.EmptyState()

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        require_params("scale_by_relative_rms", params)
        leaves, steps = leaves_by_path(params), leaves_by_path(updates)
        matrices = matrices_of(Slice.of(group.parts, params).instances)
        units = {path: _unit(matrix, leaves[path], min_scale) for path, matrix in matrices.items()}
        return with_leaves(updates, {p: (x * steps[p]).astype(steps[p].dtype) for p, x in units.items()}), state

    return optax.GradientTransformation(init_fn, update_fn)


def _unit(own: Matrices, kernel: jax.Array, min_scale: float | jax.Array) -> jax.Array:
    rms = jnp.sqrt(jnp.mean(jnp.square(kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32)))))
    return jnp.maximum(rms * math.sqrt(_inputs(own)), min_scale)


def _inputs(own: Matrices) -> int:
    """Rows of a matrix, times the heads that are summed over: those whose basis is on the rows' side."""
    heads = own.split[own.heads[0]] if own.heads is not None and own.heads[1] == own.rows else 1
    return own.fan_in * heads
