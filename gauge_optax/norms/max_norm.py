"""Steps of a set length inside a max-norm ball: every weight vector steps alike, and none outgrows a bound.

A neuron whose weights have variance 1/inputs, the usual start, has a norm of about 1. In that unit the wrapper sets the
length of a neuron's steps by the learning rate alone, whatever the neuron weighs now, so that a neuron that starts too
small, or at zero, steps as far as any other. What would outgrow the bound is scaled back to it. `rotational` differs in
both: there a step is relative to the norm, and the norm never changes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import Axes, leaves_by_path
from gauge_optax.errors import binding_error
from gauge_optax.linalg import real_dtype, safe_divide
from gauge_optax.norms import vectors
from gauge_optax.norms.vectors import Selection
from gauge_optax.transformation import checked_inner, placeholder, transformation

Scalar = float | jax.Array


class MaxNormState(NamedTuple):
    """State of `max_norm`.

    Attributes:
      inner_state: the state of the optimizer inside.
      count: the number of steps so far.
      tracked: the number of steps whose learning rate was not zero.
      square: leaf path → the average squared length of the inner update over its learning rate, shaped like the named
        axes; a tuple of them where a leaf has several axes strings.
    """

    inner_state: optax.OptState
    count: Any
    tracked: jax.Array
    square: Any


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

    For each vector p, with Δ the update of `inner` over its learning rate η, and R the bound,

    .. math::
      \nu \leftarrow \beta\nu + (1 - \beta)\lVert\Delta\rVert^2, \qquad
      q = p + \eta R\,\frac{\Delta}{\sqrt{\nu/(1 - \beta^t)}}, \qquad
      p \leftarrow q\,\min\!\left(1, \frac{R}{\lVert q\rVert}\right)

    A step has the length ηR on average over steps. Its direction is that of `inner`, and so is how its length varies
    from step to step. A vector of zeros moves like any other.

    Args:
      inner: a whole optimizer, its learning rate included; Muon gains most. Its decay counts as part of Δ, and is
        rarely needed: the bound does what decay is for. Leaves that `blocks` do not list get `inner`'s update.
      blocks: path → axes, as in `rotational`. Named axes count vectors, and a vector spans the axes `_`: `"_ channel"`
        for a neuron per output of a kernel (inputs, outputs).
      learning_rate: inner's, a number or a schedule.
      bound: R, the largest norm of a vector. 1 is the norm of a neuron of variance 1/inputs. A vector that starts above
        it is scaled back to it in the first step, so that weights which are already trained need a larger bound.
      beta: the memory of the average squared length; 0 steps by exactly ηR each time.
      sizes: lengths of axes inside `(a b)` that shapes do not fix.

    Returns:
      A whole optimizer. Its state has one scalar per vector beside inner's.

    Raises:
      ValueError: when called, malformed axes or a bound that is not positive; at `init`, no match, entries in two
        vectors or a hidden leaf; `update` without params.

    A step whose learning rate is zero moves nothing, and does not scale back.

    >>> params = {"kernel": jnp.array([[0.0, 0.1], [0.0, 0.0]]), "bias": jnp.zeros(2)}
    >>> tx = go.max_norm(optax.sgd(0.5), {"kernel": "_ neuron"}, learning_rate=0.5)
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
    specs = vectors.parse("max_norm", blocks, sizes)
    return named_max_norm("max_norm", inner, specs, lambda selection: Measure(), learning_rate, bound, beta)


class Measure(NamedTuple):
    """In what the vectors of one axes string and leaf are measured.

    Attributes:
      unit: the norm in which steps and the bound count.
      bounded: whether there is a bound.
    """

    unit: float = 1.0
    bounded: bool = True


def named_max_norm(
    name: str, inner: optax.GradientTransformation, specs: vectors.Specs, measure: Callable[[Selection], Measure],
    learning_rate: optax.ScalarOrSchedule, bound: Scalar, beta: Scalar,
) -> optax.GradientTransformationExtraArgs:
    """`max_norm` with the name of the function that the user called, for errors, and a measure per leaf.

    Args:
      name: of the public function.
      inner: a whole optimizer.
      specs: which vectors there are.
      measure: in what vectors are measured.
      learning_rate: inner's.
      bound: see `max_norm`.
      beta: see `max_norm`.

    Returns:
      A whole optimizer.
    """
    optimizer = checked_inner(name, inner)
    if isinstance(bound, int | float) and not 0 < bound < float("inf"):
        raise binding_error(
            name, "bad bound", repr(bound), "a positive number", "write bound=1.0: the norm of a neuron at the start"
        )

    def empty(params: Any) -> MaxNormState:
        return MaxNormState(optimizer.init(params), jnp.int32(0), jnp.int32(0), placeholder())

    def init(params: optax.Params) -> MaxNormState:
        selections, leaves = vectors.resolve(name, specs, params), leaves_by_path(params)
        square = vectors.to_state(selections, [jnp.zeros_like(selection.norm(leaves)) for selection in selections])
        count, tracked = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return MaxNormState(optimizer.init(params), count, tracked, square)

    def update(updates: Any, state: MaxNormState, params: Any, **extra: Any) -> tuple[Any, MaxNormState]:
        moves, inner_state = optimizer.update(updates, state.inner_state, params, **extra)
        selections, leaves = vectors.resolve(name, specs, params), leaves_by_path(params)
        tangents = vectors.updates_by_path(name, selections, moves)

        eta = learning_rate(state.count) if callable(learning_rate) else learning_rate
        eta = jnp.asarray(eta, real_dtype())
        # Without a learning rate there is no Δ: nothing moves, and ν and its correction wait.
        moving = eta != 0
        tracked = state.tracked + moving.astype(jnp.int32)
        correction = 1.0 - jnp.asarray(beta, real_dtype()) ** jnp.maximum(tracked, 1)
        memory, inverse_eta = jnp.where(moving, beta, 1.0), jnp.where(moving, 1.0 / jnp.where(moving, eta, 1.0), 0.0)

        def stepped(selection: Selection, square: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Returns the chord from p to its new value, and the new ν."""
            point, delta = selection.value(leaves), selection.view(tangents) * inverse_eta
            unit, bounded = measure(selection)
            largest = bound * unit

            def total(x: jax.Array) -> jax.Array:
                return jnp.sum(x, selection.axes, keepdims=True)

            average = memory * selection.spread(square) + (1.0 - memory) * total(delta * delta)
            pace = eta * largest * safe_divide(jnp.ones_like(average), jnp.sqrt(average / correction))
            if not bounded:
                return pace * delta, average.reshape(jnp.shape(square))
            moved = point + pace * delta
            size = jnp.sqrt(total(moved * moved))
            # 1 less the factor that scales back, so that a vector within the bound moves by its step without roundoff.
            excess = jnp.where(moving & (size > largest), 1.0 - safe_divide(largest * jnp.ones_like(size), size), 0.0)
            return pace * delta - excess * moved, average.reshape(jnp.shape(square))

        squares = vectors.from_state(selections, state.square)
        pairs = [stepped(*arguments) for arguments in zip(selections, squares, strict=True)]
        moves = vectors.replace(moves, selections, [chord for chord, _ in pairs])
        square = vectors.to_state(selections, [average for _, average in pairs])
        return moves, MaxNormState(inner_state, optax.safe_increment(state.count), tracked, square)

    return transformation(name, init, update, MaxNormState, empty)
