"""Records the ratio and the product of the sizes of both sides of a scale, in an optimizer's state.

A scale is a gauge that multiplies one side (`up`) and divides the other (`down`), such as `rescale`. The size of a side
is its root mean square. Under `multiplier_balance`, `gauge_fix` makes the two sizes equal.
Reference: GaugeFix-LRM §3.2, §4.4.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.gauges.balance import log_sizes
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.gauges.scale import two_sided
from gauge_optax.measure._recording import either
from gauge_optax.measure.live import Figures, labelled, labels
from gauge_optax.transformation import GaugeTransformation, require_every, stepped, transformation
from gauge_optax.xla import zeros_of

_NAME = "track_balance"


class Balance(NamedTuple):
    """Numbers that describe the weights after one step; s_up and s_down are the root mean squares of the two sides.

    Attributes:
      recorded_at: the number of that step, from 0.
      drift: the largest |log(s_up/s_down)| over all channels, layers and gauges.
      log_ratio: "gauge/layer" → log(s_up/s_down) per channel; for `multiplier_balance` per head.
      product: "gauge/layer" → s_up·s_down per channel, or per head.
    """

    recorded_at: jax.Array
    drift: jax.Array
    log_ratio: Figures
    product: Figures


class TrackBalanceState(NamedTuple):
    """State of `track_balance`.

    Attributes:
      taken: number of steps so far.
      metrics: the last record.
    """

    taken: jax.Array
    metrics: Balance


def track_balance(gauges: Gauges, *, every: int | np.integer[Any] | jax.Array = 1) -> GaugeTransformation:
    """Records the ratio and the product of the sizes of both sides of every scale; updates pass unchanged.

    Put it last in a chain, after the optimizer. Read the record by name: `optax.tree.get(state, "drift")`. A channel
    with a side of zeros has no ratio: `drift` and `log_ratio` count its logarithm as 0, and its product is 0. The ratio
    after `gauge_fix` need not be 1: except for `multiplier_balance`, `gauge_fix` balances the two sums of squares and
    not the means of squares, so that the ratio depends on how many entries each side has.

    Args:
      gauges: a gauge or a sequence of them; those with two sides are recorded.
      every: number of steps between records; the first step is recorded.

    Returns:
      The transformation. Its `update` needs `params`.

    Raises:
      ValueError: `every` that is no positive int; at `init`, bindings that do not fit; `update` without params.

    >>> gauge = go.multiplier_balance({"query": "head _"}, {"key": "head _"})
    >>> params = {"query": jnp.full((2, 3), 4.0), "key": jnp.full((2, 3), -1.0)}
    >>> tx = optax.chain(optax.sgd(0.1), go.measure.track_balance(gauge))
    >>> state = tx.update(params, tx.init(params), params)[1]
    >>> (
    ...     round(float(optax.tree.get(state, "drift")), 3),
    ...     optax.tree.get(state, "product")["multiplier_balance"].round(2),
    ... )
    (1.386, Array([3.24, 3.24], dtype=float32))

    Reference: GaugeFix-LRM, Eq. (3). Deviation: ratios are recorded per head and layer; `drift` is the largest absolute
    value of their logarithms.
    """
    require_every(_NAME, every)
    group = product(gauges)

    def init(params: Any) -> TrackBalanceState:
        shapes = jax.eval_shape(lambda p: _balance(group, p, jnp.int32(0)), params)
        return TrackBalanceState(jnp.int32(0), zeros_of(shapes))

    def update(updates: Any, state: TrackBalanceState, params: Any, **extra: Any) -> tuple[Any, TrackBalanceState]:
        def record() -> Balance:
            return _balance(group, stepped(group, params, updates), state.taken)

        metrics = either(state.taken, every, record, state.metrics, params)
        return updates, TrackBalanceState(optax.safe_increment(state.taken), metrics)

    def empty(params: Any) -> TrackBalanceState:
        return TrackBalanceState(jnp.int32(0), jnp.zeros(()))  # type: ignore[arg-type]

    return transformation(_NAME, init, update, TrackBalanceState, empty, gauges=group.gauges)


def _balance(group: Product, params: Any, step: jax.Array) -> Balance:
    ratios, products = {}, {}
    b = group._bound(params)
    point = b.slice.values(params)
    for label, gauge, copies in zip(labels(group), b.gauges, b.copies, strict=True):
        for copy in copies if two_sided(gauge) else ():
            key, (up, down) = copy.key, log_sizes(copy.parts[0], point)
            # `log_sizes` gives −∞ for both sides of a channel that has no ratio.
            ratios[labelled(label, key)] = jnp.where(jnp.isneginf(up), 0.0, up - down)
            products[labelled(label, key)] = jnp.exp(up + down)
    drift = jnp.max(jnp.abs(Figures.of(ratios).packed), initial=0.0)
    return Balance(step, drift, Figures.of(ratios), Figures.of(products))
