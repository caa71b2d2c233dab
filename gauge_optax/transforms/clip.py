"""Global-norm clipping by a norm that does not depend on the representative.

The raw ‖g‖ of two weight sets that are one function differs (4.9 and 5.6 where the in-frame norm is 5.19 for both), so
ordinary clipping sends twins apart. Here the norm is taken of ĝ = e^(w·f)·g, which rotations and shifts keep too.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from gauge_optax.binding import is_empty
from gauge_optax.gauges import _frame, _split
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.linalg import real_dtype
from gauge_optax.transforms._common import float_leaves, in_dtype_of, placeholder, require_params


class ClipByInvariantNormState(NamedTuple):
    """State of `clip_by_invariant_norm`.

    Attributes:
      gauges: the last rescale frame, a `FrameState`.
    """

    gauges: Any


def clip_by_invariant_norm(max_norm: float, gauges: Gauges) -> optax.GradientTransformationExtraArgs:
    """Scales gradients down where their in-frame global norm exceeds `max_norm`.

    Args:
      max_norm: the largest norm that passes.
      gauges: a gauge or a sequence of them, meaning their product.

    Returns:
      A transformation of gradients (cotangents); first in a chain.

    Raises:
      ValueError: bindings that do not fit; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((1, 1), 10.0), "down": jnp.full((1, 1), 0.1)}
    >>> tx = go.clip_by_invariant_norm(1.0, gauge)
    >>> grads = {"up": jnp.full((1, 1), 0.3), "down": jnp.full((1, 1), 30.0)}  # in the frame: 3 and 3
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> round(float(grads["up"][0, 0] / updates["up"][0, 0]), 4)  # 3√2, not 30
    4.2426

    Reference: DESIGN §4.
    """
    group = product(gauges)

    def init_fn(params: optax.Params) -> ClipByInvariantNormState:
        if is_empty(params):
            return ClipByInvariantNormState(placeholder())
        bound = group.bound(params)
        return ClipByInvariantNormState(_frame.init_frame(bound.system, bound.centre(bound.values(params))))

    def update_fn(
        updates: optax.Updates, state: ClipByInvariantNormState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, ClipByInvariantNormState]:
        del extra
        require_params("clip_by_invariant_norm", params)
        bound = group.bound(params)
        values = bound.centre(bound.values(params))
        frame = _frame.track(bound.system, values, state.gauges)
        point = _split.at(bound, values, frame.f)
        grads = float_leaves(updates, real_dtype())
        framed = grads | point.cotangent_in({p: grads[p] for p in bound.offset})
        norm = jnp.sqrt(sum((jnp.sum(jnp.square(x)) for x in framed.values()), start=jnp.zeros((), real_dtype())))
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        clipped = {p: factor * x for p, x in grads.items()}
        return in_dtype_of(updates, clipped), ClipByInvariantNormState(frame)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
