"""How large both sides of a scale are: what `hold_products` holds and `track_balance` records."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from gauge_optax.gauges.instance import Instance
from gauge_optax.gauges.scale import Scale

Sizes = tuple[jax.Array, jax.Array]


@functools.singledispatch
def log_sizes(instance: Instance, point: Mapping[str, jax.Array]) -> Sizes:
    """Logs of both sides' root mean squares, per channel.

    Args:
      instance: a copy of a gauge.
      point: bound leaves, as values.

    Returns:
      Minus infinity on both sides, for a channel with a side that is zero or for what has no two sides. Where balance
      compares the first blocks of both sides, the sizes are theirs.
    """
    nothing = jnp.full(instance.shape, -jnp.inf)
    return nothing, nothing


@log_sizes.register
def _(instance: Scale, point: Mapping[str, jax.Array]) -> Sizes:
    sides = (instance.up[:1], instance.down[:1]) if instance.by_entry else (instance.up, instance.down)
    if not all(sides):
        nothing = jnp.full(instance.shape, -jnp.inf)
        return nothing, nothing
    named = instance.named
    sums = [sum((b.total(named, jnp.square(point[b.path])) for b in x), jnp.zeros(instance.shape)) for x in sides]
    means = [total / sum(b.entries(named) for b in side) for total, side in zip(sums, sides, strict=True)]
    whole = (means[0] != 0) & (means[1] != 0)
    logs = [jnp.where(whole, 0.5 * jnp.log(jnp.where(whole, x, 1.0)), -jnp.inf) for x in means]
    return logs[0], logs[1]
