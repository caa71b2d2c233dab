"""`from_state`: a quotient run that goes on where a plain run of the same optimizer stands.

Here: reading the frame and carrying the moments into it. Not here: how each kind of moment moves (`transport`).
"""


from typing import Any

import jax
import optax

from gauge_optax.binding import binding_error, with_leaves
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.bound import Bound
from gauge_optax.gauges.chart import Part
from gauge_optax.gauges.product import Product, product
from gauge_optax.gauges.reading import Turning
from gauge_optax.meshes import layout
from gauge_optax.optimizers._quotient import QuotientState
from gauge_optax.slice import chart, enter, motions, read
from gauge_optax.states.transport import transport


def from_state(
    state: Any,
    inner: optax.GradientTransformation,
    gauges: Gauges,
    params: Any,
    on_unknown: str = "error",
) -> QuotientState:
    """The state with which `quotient(inner, gauges)` goes on from a plain run of `inner`.

    Scales and shifts are read off the parameters, and the state's moments move into that frame: first moments as
    cotangents, second moments by their squares. Rotations are not read: heads keep the basis that their moments were
    gathered in, and are held there.

    Args:
      state: of `inner`, after any number of steps.
      inner: the optimizer.
      gauges: a gauge or a sequence of them, meaning their product.
      params: the parameters that the state belongs to.
      on_unknown: what to do with moments for which there is no rule, as in `transport`: second moments of entries that
        `head_linear` or `rope_linear` mixes, arrays of optimizers that it does not know.

    Returns:
      A state of `quotient(inner, gauges)`.

    Raises:
      ValueError: a state that is not `inner`'s; moments without a rule; bindings that do not fit.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((4, 1), 2.0), "down": jnp.ones((1, 2))}
    >>> plain = optax.adamw(1e-3)
    >>> _, state = plain.update(params, plain.init(params), params)
    >>> tx = go.quotient(plain, gauge)
    >>> state = go.from_state(state, plain, gauge, params)
    >>> round(float(state.inner_state[0].mu["up"][0, 0]), 4)  # a tenth of the gradient 2, times the column's norm 4
    0.8
    >>> updates, state = tx.update(params, state, params)

    Reference: docs/design.md §1 for how moments move.
    """
    group = product(gauges)
    on, laid = chart(group, params), layout(params)
    with laid.left_open():
        here, plain = laid.enter((params, state))
        frame = read(on, here, turning=False)
        point = with_leaves(here, enter(motions(on, frame), on.joint.values(here)))
        expected = jax.eval_shape(inner.init, point)
        found, wanted = (str(jax.tree.structure(x)) for x in (plain, expected))
        if found != wanted:
            raise binding_error(
                "from_state", "not a state of this optimizer", found, wanted,
                "pass what inner.init or inner.update returned, and the same optimizer as inner",
            )  # fmt: skip
        still = [_turns_alone(part, bound) for part, bound in on.parts]
        parts = Product(tuple(part for part, off in zip(group.parts, still, strict=True) if not off))
        element = tuple(x for x, off in zip(frame.inverse, still, strict=True) if not off)
        moved = transport(plain, here, parts, element, on_unknown)
        moved = jax.tree.map(lambda x, like: x.astype(like.dtype), moved, expected)
    return QuotientState(laid.leave(frame), laid.leave(moved, like=state))


def _turns_alone(part: Part, bound: Bound) -> bool:
    """Whether all that a gauge reads is rotations."""
    readings = part.readings(bound)
    return bool(readings) and all(isinstance(reading, Turning) for reading in readings)
