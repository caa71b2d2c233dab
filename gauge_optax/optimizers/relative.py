"""Steps relative to the size of a kernel, which is its RMS times the square root of its fan-in (number of inputs).

A kernel whose entries have variance 1/inputs has the size 1, so that its steps stay as they are. A kernel with 64
inputs that starts at an RMS of 0.02 has the size 0.16, and its steps are multiplied by 0.16. Without a lower bound of
this factor, a kernel of zeros would never move. The factor is computed from stored weights, not on the slice.
References: `optax.scale_by_param_block_rms` (Adafactor's parameter scale, without the fan-in); Yang et al. 2023, A
Spectral Condition for Feature Learning.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import in_single_or_better, leaves_by_path, with_leaves
from gauge_optax.gauges.bound import bound
from gauge_optax.gauges.gauge import Gauges, product
from gauge_optax.parts.matrices import matrices_of
from gauge_optax.transformation import GaugeTransformation, require_number, transformation, updates_at


def scale_by_relative_rms(gauges: Gauges, min_scale: float | jax.Array = 0.1) -> GaugeTransformation:
    """Multiplies the update of every kernel that a gauge binds by max(RMS(kernel)·√fan-in, min_scale).

    If gauges bind ranges of a fused kernel, each range has a factor of its own, and entries outside all ranges keep
    their updates. Each layer of a stack has a factor of its own.

    Args:
      gauges: a gauge or a sequence of gauges. They determine which leaves are kernels, and which of their axes are
        inputs. For a kernel that reads heads, the axis of heads and that of their entries both are. Vectors and unbound
        leaves keep their updates.
      min_scale: the smallest factor; a kernel of zeros starts with it.

    Returns:
      A transformation without state. Put it between a preconditioner and the decay. Its `update` needs `params`.

    Raises:
      ValueError: bindings that do not fit the tree; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((4, 2), 0.25), "down": jnp.zeros((2, 3))}
    >>> tx = go.links.scale_by_relative_rms(gauge)
    >>> updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    >>> float(updates["up"][0, 0]), round(float(updates["down"][0, 0]), 3)
    (0.5, 0.1)

    Reference: none; the rule is ours. Relative steps train better from small starts, inside `quotient` and without it
      (examples/results/starts.json).
    """
    require_number("scale_by_relative_rms", "min_scale", min_scale, "[0, inf)", "write min_scale=0.1")
    group = product(gauges)

    def init(params: optax.Params) -> optax.EmptyState:
        bound(group.gauges, params)  # raises where a binding does not fit
        return optax.EmptyState()

    def update(updates: Any, state: optax.EmptyState, params: Any, **extra: Any) -> tuple[Any, optax.EmptyState]:
        read = matrices_of(bound(group.gauges, params).slice.parts)
        leaves, steps = leaves_by_path(params), updates_at("scale_by_relative_rms", read, updates, params)
        scaled: dict[str, jax.Array] = {}
        for path, stack in ((path, piece) for path, reading in read.items() for piece in reading.pieces):
            kernel, inputs = stack.view(leaves[path]), stack.fan_in
            counting, of_head = stack.heads or ((), ())
            if of_head == stack.rows:
                # This kernel reads heads and sums over all of them: its inputs are heads times entries per head.
                inputs *= math.prod(stack.split[k] for k in counting)
            # Each layer of a stack has a factor of its own, but all heads of a kernel share one.
            heads = [k for k, axis in enumerate(stack.batch) if axis in counting]
            rms = jnp.sqrt(jnp.mean(jnp.square(in_single_or_better(kernel)), (-2, -1, *heads), keepdims=True))
            factor = jnp.maximum(rms * math.sqrt(inputs), min_scale)
            step = scaled.get(path, steps[path])
            scaled[path] = stack.write(step, factor * stack.view(in_single_or_better(step)))
        return with_leaves(updates, scaled), state

    def empty(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    return transformation("scale_by_relative_rms", init, update, optax.EmptyState, empty, gauges=group.gauges)
