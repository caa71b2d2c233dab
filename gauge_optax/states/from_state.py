"""`from_state`: training continues under `quotient` from a plain optimizer state."""

from typing import Any

import jax
import optax

from gauge_optax.binding import leaves_by_path, structures_apart, with_leaves
from gauge_optax.errors import binding_error
from gauge_optax.frozen import frozen_leaves, said_to_be_frozen
from gauge_optax.gauges.bound import bound, require_nonzero_norms
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.optimizers._quotient import QuotientState, no_offset
from gauge_optax.slice import Frame
from gauge_optax.states.transport import transport
from gauge_optax.transformation import layout, require_traceable


def from_state(
    state: Any,
    inner: optax.GradientTransformation,
    gauges: Gauges,
    params: Any,
    on_unknown: str = "error",
    *,
    pin: bool = True,
    frozen: Any = None,
) -> QuotientState:
    """Converts a plain optimizer state, so that training continues under `quotient(inner, gauges)`.

    The frame's scales and shifts are computed from the parameters, as `init` does. The state's moments move to slice
    coordinates: first moments move as cotangents, and second moments are multiplied by the squares of the same
    factors. Rotations get the identity as their frame, so that heads stay in the basis to which their moments belong.

    Args:
      state: state of `inner`, after any number of steps.
      inner: the optimizer that made the state.
      gauges: a gauge or a sequence of them.
      params: the parameters that the state belongs to.
      on_unknown: what to do with moments without a rule, as in `transport`: second moments of entries that
        `head_linear` or `rope_linear` mixes, and arrays in states that `transport` has no rule for.
      pin: the argument `pin` of the `quotient` that continues.
      frozen: the argument `frozen` of that `quotient`.

    Returns:
      A state of `quotient(inner, gauges, pin=pin, frozen=frozen)`, with any `hold` and `rest`.

    Raises:
      ValueError: a leaf that is no array; a state that is not `inner`'s; moments without a rule; bindings or `frozen`
        that do not fit.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((4, 1), 2.0), "down": jnp.ones((1, 2))}
    >>> plain = optax.adamw(1e-3)
    >>> _, state = plain.update(params, plain.init(params), params)
    >>> tx = go.quotient(plain, gauge)
    >>> state = go.orbit.from_state(state, plain, gauge, params)
    >>> # A tenth of the gradient 2, times the column's norm 4.
    >>> round(float(state.inner_state[0].mu["up"][0, 0]), 4)
    0.8
    >>> updates, state = tx.update(params, state, params)

    Reference: docs/design.md §1 for how moments move.
    """
    group = product(gauges)
    require_traceable("from_state", params)
    said = said_to_be_frozen("from_state", frozen, params)
    unchanged = said | frozen_leaves("from_state", inner, params, said=frozen is not None)
    b, sharding = bound(group.gauges, params, unchanged), layout(params)
    s = b.slice
    require_nonzero_norms("from_state", s, leaves_by_path(params))
    with sharding.left_open():
        stored, plain = sharding.drop((params, state))
        (elements, live, _), entered = s.unturned_slice_point(stored)
        expected = jax.eval_shape(inner.init, with_leaves(stored, entered.point))
        _check_structure(plain, expected)
        # The moments make the same moves as the weights do on their way to the slice: first constants (which add) are
        # removed, then sizes (which multiply). Gauges that only rotate take no part: their frame is the identity.
        back = b.public({part.label: part.inverse(e) for part, e, _, _ in entered.parts})
        for undone in (s.constants, s.sizes):
            labels = {part.label for part, _, _ in undone}
            moves = [
                (gauge, x)
                for gauge, copies, x in zip(b.gauges, b.copies, back, strict=True)
                if any(part.label in labels for copy in copies for part in copy.parts)
            ]
            moving, element = Product(tuple(gauge for gauge, _ in moves)), tuple(x for _, x in moves)
            plain = transport(plain, stored, moving, element, on_unknown)
        # Arrays that have the right dtype are not cast, because `astype` refuses PRNG keys.
        cast = lambda x, like: x if x.dtype == like.dtype else x.astype(like.dtype)  # noqa: E731
        inner_state = jax.tree.map(cast, plain, expected)
        frame = Frame(elements | {turn.label: turn.identity() for _, turns in s.turns for turn in turns}, live)
    frame = sharding.restore(frame)._replace(frozen=dict.fromkeys(sorted(unchanged), ()))
    inner_state = sharding.restore(inner_state, like=state)
    return QuotientState(frame, inner_state, {} if pin else no_offset(s))


def _check_structure(state: Any, expected: Any) -> None:
    if apart := structures_apart(state, expected):
        raise binding_error(
            "from_state", "not a state of this optimizer", *apart,
            "pass what inner.init or inner.update returned, and the same optimizer as inner",
        )
