"""Steps relative to the size of a kernel: its RMS times the root of its fan-in.

A kernel of unit variance per input has RMS·√fan-in = 1, so that its steps stay as they are. A kernel that starts at
0.02 with 64 inputs has 0.16, and its steps are multiplied by 0.16. A kernel of zeros would never move, so that the
factor has a lower bound. The factor needs no slice.
References: `optax.scale_by_param_block_rms` (Adafactor's parameter scale, without the fan-in); Yang et al. 2023, A
Spectral Condition for Feature Learning.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.gauges.bound import bound
from gauge_optax.gauges.gauge import Gauges, product
from gauge_optax.parts.matrices import matrices_of
from gauge_optax.transformation import GaugeTransformation, transformation


def scale_by_relative_rms(gauges: Gauges, min_scale: float | jax.Array = 0.1) -> GaugeTransformation:
    """Multiplies the update of every kernel that a gauge binds by max(RMS(kernel)·√fan-in, min_scale).

    In a fused kernel whose ranges gauges bind, each range has a factor of its own; entries outside them keep their
    updates.

    Args:
      gauges: a gauge or a sequence of them; they say which leaves are kernels, and which of their axes are inputs (the
        axis of heads goes with their basis). Vectors and leaves in no gauge keep their updates.
      min_scale: the smallest factor, which a kernel of zeros starts with.

    Returns:
      A transformation without state, between a preconditioner and the decay. Its `update` needs `params`.

    Raises:
      ValueError: bindings that do not fit the tree; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((4, 2), 0.25), "down": jnp.zeros((2, 3))}
    >>> tx = go.links.scale_by_relative_rms(gauge)
    >>> updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    >>> float(updates["up"][0, 0]), round(float(updates["down"][0, 0]), 3)
    (0.5, 0.1)

    Reference: ours. Relative steps train better from small starts, on the slice and off it
      (examples/results/starts.json).
    """
    group = product(gauges)

    def init(params: optax.Params) -> optax.EmptyState:
        bound(group.gauges, params)  # raises where a binding does not fit
        return optax.EmptyState()

    def update(updates: Any, state: optax.EmptyState, params: Any, **extra: Any) -> tuple[Any, optax.EmptyState]:
        leaves, steps = leaves_by_path(params), leaves_by_path(updates)
        scaled: dict[str, jax.Array] = {}
        read = matrices_of(bound(group.gauges, params).slice.parts)
        for path, stack in ((path, piece) for path, reading in read.items() for piece in reading.pieces):
            kernel, inputs = stack.view(leaves[path]), stack.fan_in
            if stack.heads is not None and stack.heads[1] == stack.rows:
                # The basis of heads is on the rows' side: their outputs are summed, so that all of them are inputs.
                inputs *= stack.split[stack.heads[0]]
            rms = jnp.sqrt(jnp.mean(jnp.square(kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32)))))
            factor = jnp.maximum(rms * math.sqrt(inputs), min_scale)
            step = scaled.get(path, steps[path])
            scaled[path] = stack.write(step, factor * stack.view(step))
        return with_leaves(updates, scaled), state

    def empty(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    return transformation("scale_by_relative_rms", init, update, optax.EmptyState, empty, gauges=group.gauges)
