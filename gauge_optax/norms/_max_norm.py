"""`max_norm`: steps of a set length on average, and no weight vector becomes longer than a bound.

A neuron whose weights have variance 1/inputs, the usual start, has a norm of about 1. In units of this norm, the
learning rate alone decides the length of a neuron's steps, whatever the neuron's own norm is. A neuron that starts too
small, or at zero, therefore steps as far as any other. A vector that a step would make longer than the bound is scaled
back to the bound. A vector that starts above the bound shrinks by at most the length of its steps. `rotational` differs
in both: there a step is relative to the norm, and the norm never changes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import Axes
from gauge_optax.frozen import frozen_leaves
from gauge_optax.norms import vectors
from gauge_optax.norms.links import above, kept_below, no_lengths, of_length_one, require_beta, require_bound
from gauge_optax.norms.vectors import Clock, Selection
from gauge_optax.transformation import checked_inner, placeholder, require_rates, transformation
from gauge_optax.wrapped import preflight_of

Scalar = float | jax.Array


class MaxNormState(NamedTuple):
    """State of `max_norm`.

    Attributes:
      inner_state: the state of the optimizer inside.
      count: the number of steps so far.
      tracked: the number of steps whose learning rate was not zero.
      length: leaf path → axes string → ν, an average over steps (root mean square) of the inner update's length divided
        by the learning rate, shaped like the named axes. `update` raises an error for other paths or strings.
    """

    inner_state: optax.OptState
    count: Any
    tracked: jax.Array
    length: Any


def max_norm(
    inner: optax.GradientTransformation,
    blocks: Mapping[str, Axes],
    *,
    learning_rate: optax.ScalarOrSchedule,
    bound: Scalar = 1.0,
    beta: Scalar = 0.9,
    sizes: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Gives every weight vector steps of one length on average, and keeps its norm below a bound.

    Let η be the learning rate, R the bound, t the number of steps, and Δ the update that `inner` makes for a vector p,
    divided by η. Then

    .. math::
      \nu^2 \leftarrow \beta\nu^2 + (1 - \beta)\lVert\Delta\rVert^2, \qquad
      q = p + \eta R\,\frac{\Delta}{\nu/\sqrt{1 - \beta^t}}, \qquad
      p \leftarrow q\,\min\!\left(1, \frac{\max(R, \lVert p\rVert - \lVert q - p\rVert)}{\lVert q\rVert}\right)

    The length of a step is ηR on average over steps. `inner` decides its direction, and how its length varies from
    step to step. A vector of zeros moves like any other. A vector within the bound stays within it. A vector that
    starts above the bound never grows: its norm falls by the length of its step, ηR on average, until it is within the
    bound. With a small rate, a step therefore changes even such weights little. A vector whose update is zero stays.

    Args:
      inner: a whole optimizer, its learning rate included; Muon gains most. Its decay counts as part of Δ, and is
        rarely needed, because the bound already limits norms. Leaves that `blocks` do not list get `inner`'s update.
      blocks: path → axes string. Named axes count vectors, and a vector spans the axes `_`: in a kernel (inputs,
        outputs), `"_ channel"` makes one vector per output.
      learning_rate: the learning rate of `inner`, a number or a schedule.
      bound: R, the largest norm of a vector. 1 is the norm of a neuron whose weights have variance 1/inputs. Trained
        weights whose norms shall stay need a larger bound.
      beta: decay of the average of squared lengths; with 0, every step has exactly the length ηR.
      sizes: axis name → length, for axes in parentheses, `(a b)`, whose lengths do not follow from a leaf's shape.

    Returns:
      A whole optimizer. Beside the state of `inner`, its state has one number per vector.

    Raises:
      ValueError: when called, malformed axes, a bound that is not positive, or `beta` outside [0, 1); at `init`, a
        pattern that matches no leaf, entries in two vectors, or a leaf that `optax.MaskedNode` hides; `update` without
        params, or with a state that was made for other `blocks`.

    A step whose learning rate is zero moves nothing, not even a vector above the bound.

    >>> params = {"kernel": jnp.array([[0.0, 0.1], [0.0, 0.0]]), "bias": jnp.zeros(2)}
    >>> tx = go.norms.max_norm(optax.sgd(0.5), {"kernel": "_ neuron"}, learning_rate=0.5)
    >>> state = tx.init(params)
    >>> for _ in range(3):
    ...     grads = {"kernel": -jnp.ones((2, 2)), "bias": jnp.ones(2)}
    ...     updates, state = tx.update(grads, state, params)
    ...     params = optax.apply_updates(params, updates)
    ...     print(jnp.linalg.norm(params["kernel"], axis=0).round(2))
    [0.5  0.58]
    [1. 1.]
    [1. 1.]

    Reference: Srebro and Shraibman 2005 for max-norm; Kosson et al. 2024, Algorithm 1, for steps of one length on
      average, there relative to a norm that never changes.
    """
    name = "max_norm"
    specs, optimizer = vectors.parse(name, "blocks", blocks, sizes), checked_inner(name, inner)
    require_rates(name, learning_rate=learning_rate)
    require_bound(name, bound)
    require_beta(name, beta)

    def empty(params: Any) -> MaxNormState:
        return MaxNormState(optimizer.init(params), jnp.int32(0), jnp.int32(0), placeholder())

    def init(params: optax.Params) -> MaxNormState:
        length = no_lengths(vectors.resolve(name, specs, params), params)
        return MaxNormState(optimizer.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), length)

    def update(updates: Any, state: MaxNormState, params: Any, **extra: Any) -> tuple[Any, MaxNormState]:
        selections, now = vectors.resolve(name, specs, params, state.length), Clock.read(state, learning_rate, beta)
        moves, inner_state = optimizer.update(updates, state.inner_state, params, **extra)

        def stepped(x: Selection, point: jax.Array, tangent: jax.Array, usual: jax.Array) -> tuple[Any, Any]:
            direction, after = of_length_one(x, tangent * now.inverse, usual, now.memory, now.correction)
            return kept_below(x, point, now.rate * bound * direction, bound), after

        moves, length = vectors.moved(name, selections, stepped, moves, params, state.length)
        return moves, MaxNormState(inner_state, optax.safe_increment(state.count), now.tracked, length)

    def preflight(params: Any) -> list[str | ValueError]:
        frozen = frozen_leaves(name, optimizer, params)
        moving = [x for x in vectors.resolve(name, specs, params) if x.block.path not in frozen]
        return [*preflight_of(inner)(params), *above(name, moving, params, bound, lambda selection: 1.0)]

    return transformation(name, init, update, MaxNormState, empty, rules=optimizer.rules, preflight=preflight)
