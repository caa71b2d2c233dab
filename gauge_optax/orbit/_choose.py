"""Chooses the point of an orbit that minimizes an objective, such as the error of quantized weights.

The search is over elements g, not over weights: for every g, `act(g, params)` computes the same function as `params`.
Elements near the current one, g, have coordinates x: they are exp(x)·g. The gradient of the objective with respect to x
at x = 0 is given to an Optax optimizer, and the next element is exp(u)·g for its update u. Every element on the way is
therefore in the group: rotations stay orthogonal, scales positive.
Reference: SpinQuant (Liu et al. 2024), §3.2, which learns rotations by Cayley maps in place of exp.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from gauge_optax.binding import leaves_by_path
from gauge_optax.errors import binding_error
from gauge_optax.gauges.bound import require_nonzero_norms
from gauge_optax.gauges.gauge import Element, Gauge, Gauges, product
from gauge_optax.linalg import real_dtype
from gauge_optax.orbit.rotations import checked_element
from gauge_optax.states.statistics import require_no_statistics_behind
from gauge_optax.transformation import (
    listed,
    require_arrays,
    require_count,
    require_key,
    require_number,
    require_scalar,
    require_traceable,
    require_transformation,
)

_NAME = "choose"
_SMOOTHING = 0.9  # the weight of the old value in the running average by which a stochastic objective is judged


class ChooseState(NamedTuple):
    """The state of a search: a pytree of arrays, which any checkpointer saves.

    Attributes:
      step: the number of steps taken.
      element: the current element.
      coordinates: the sum of all updates. The optimizer gets it as its parameters.
      optimizer: the optimizer's state.
      average: the last value of the objective; if the objective is stochastic, a running average of its values.
      least: the least objective seen.
      best: the element with that objective.
      progress: the value of `average` at the last step at which it had fallen enough to count as progress.
      progress_step: the number of that step.
    """

    step: jax.Array
    element: Element
    coordinates: Any
    optimizer: Any
    average: jax.Array
    least: jax.Array
    best: Element
    progress: jax.Array
    progress_step: jax.Array


def choose(
    objective: Callable[..., jax.Array],
    params: Any,
    gauges: Gauges,
    optimizer: optax.GradientTransformation | None = None,
    *,
    steps: int = 100,
    batches: Iterable[Any] | None = None,
    key: jax.Array | None = None,
    start: Element | None = None,
    patience: int | None = None,
    tolerance: float = 1e-3,
    state: ChooseState | None = None,
    return_state: bool = False,
    progress: bool = True,
) -> Any:
    """The element g that minimizes objective(act(g, params)) over the orbit of the parameters.

    Args:
      objective: a differentiable function of parameters, and of a batch and a key if these are given, in that order:
        `objective(params)`, `objective(params, batch)`, `objective(params, batch, key)`. It returns a scalar.
      params: the parameters. They are not changed.
      gauges: a gauge or a sequence of them. A gauge that a user defines needs `algebra` and `exponential`.
      optimizer: any Optax optimizer, `optax.adam(0.02)` if None. Its parameters are coordinates: radians for rotations,
        logarithms for scales. Optimizers with a line search, such as `optax.lbfgs`, get `value`, `grad` and `value_fn`.
      steps: the number of steps in all. Steps that `state` has already taken count.
      batches: a sequence of batches, which is repeated when it ends; or an iterator, which has to yield a batch for
        each step of this call. To go on from `state`, pass an iterator that goes on too.
      key: a PRNG key. Every step gets its own, which depends on the step's number alone.
      start: the element to start from, such as a Hadamard rotation; the identity if None.
      patience: how many steps may pass without progress before the search ends; None for no end before `steps`.
      tolerance: the relative fall of the objective that counts as progress. If the objective is stochastic, its running
        average over about ten steps has to fall by this share.
      state: a state that an earlier call returned, to go on from there. Give the other arguments as they were.
      return_state: whether to return the state too.
      progress: whether to show a progress bar.

    Returns:
      The element with the least objective of all that were visited. If batches or a key are given, the objective is
      stochastic, and the last element is returned. `go.product(gauges).act(element, params)` are the chosen weights; if
      `gauges` is one gauge, write `gauge.act(element, params)`. With `return_state`, the pair (element, state).

    Raises:
      ValueError: a `start` that is no element of these gauges; an objective that does not take these arguments, or
        returns no scalar or no finite number; a step without a batch; a leaf that is no array; gauges that do not fit
        `params`, or have no `algebra`; a zero in a norm's scale that a gauge divides by; running statistics of
        BatchNorm in `params` that would not fit the moved weights.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((1, 2), 4.0), "down": jnp.ones((2, 1))}
    >>> def size(p):
    ...     return jnp.sum(p["up"] ** 2) + jnp.sum(p["down"] ** 2)
    >>> element = go.orbit.choose(size, params, gauge, progress=False)
    >>> gauge.act(element, params)["up"].round(2).tolist()  # balanced: 4·½ = 1/½
    [[2.0, 2.0]]

    Reference: docs/guides/spend.md. Deviation from SpinQuant: any gauge and any optimizer, in place of Cayley SGD on
    rotations.
    """
    group = product(gauges)
    require_arrays(_NAME, params, state)
    require_traceable(_NAME, params)
    if key is not None:
        require_key(_NAME, key)
    require_nonzero_norms(_NAME, group._bound(params).whole, leaves_by_path(params))
    require_no_statistics_behind(_NAME, group._bound(params).whole, params)
    optimizer = optax.adam(0.02) if optimizer is None else optimizer
    require_transformation(_NAME, optimizer, "optimizer")
    require_count(_NAME, "steps", steps, 0)
    if patience is not None:
        require_count(_NAME, "patience", patience, 0)
    if not callable(objective):
        raise binding_error(_NAME, "an objective that is no function", f"{objective!r:.60}", "a function of params",
                            "write choose(lambda params: ..., params, gauges)")
    require_number(_NAME, "tolerance", tolerance, "[0, inf)", "write tolerance=1e-3")
    tx = optax.with_extra_args_support(optimizer)
    stochastic = batches is not None or key is not None
    given = _arguments(batches, key)
    _check_objective(objective, params, (batches is not None) + (key is not None))
    zeros = group.algebra(params)
    if state is None:
        first = group.identity(params)
        if start is not None:
            first = group.normalized(checked_element(_NAME, group._bound(params), first, start), params)
        inf, zero = jnp.asarray(math.inf, real_dtype()), jnp.int32(0)
        state = ChooseState(zero, first, zeros, tx.init(zeros), inf, inf, first, inf, zero)
    step = _step(objective, group, tx, tolerance, stochastic)
    with tqdm(total=steps, initial=int(state.step), desc=_NAME, disable=not progress) as bar:
        for number in range(int(state.step), steps):
            state, value = step(state, params, *given(number))
            objective_now = float(value)
            if not math.isfinite(objective_now):
                raise binding_error(
                    _NAME, f"an objective that is not finite, at step {number}", f"{objective_now}", "a finite number",
                    "lower the learning rate, or start from an element where the objective is finite",
                )
            bar.set_postfix(objective=f"{float(state.average):.4g}", least=f"{float(state.least):.4g}", refresh=False)
            bar.update()
            if patience is not None and int(state.step) - int(state.progress_step) > patience:
                break
    element = state.element
    if not stochastic:
        last = jax.jit(lambda e, p: objective(group.act(e, p)))(state.element, params)
        element = state.element if float(last) <= float(state.least) else state.best
    chosen = element[0] if _alone(gauges) else element
    return (chosen, state) if return_state else chosen


def _alone(gauges: Gauges) -> bool:
    """Whether `gauges` is one gauge, so that its elements are not tuples."""
    return isinstance(gauges, Gauge) and gauges._gauges == (gauges,)


def _arguments(batches: Iterable[Any] | None, key: jax.Array | None) -> Callable[[int], tuple[Any, ...]]:
    """Returns a function: number of a step → the arguments that the objective gets after the parameters, a tuple."""
    sequence = isinstance(batches, Sequence | np.ndarray | jax.Array)
    given = listed(_NAME, batches) if isinstance(batches, Mapping) else batches  # refuses a dict
    iterator = None if given is None or sequence else iter(given)

    def batch(number: int) -> Any:
        try:
            return next(iterator) if iterator is not None else batches[number % len(batches)]  # type: ignore
        except (StopIteration, ZeroDivisionError) as error:
            raise binding_error(
                _NAME, f"no batch for step {number}", "batches that have ended" if iterator else "an empty sequence",
                "a sequence, which is repeated, or an iterator with a batch for each step",
                "pass batches=list(batches), with at least one",
            ) from error

    def arguments(number: int) -> tuple[Any, ...]:
        own = () if batches is None else (batch(number),)
        return (*own, *(() if key is None else (jax.random.fold_in(key, number),)))

    return arguments


def _check_objective(objective: Callable[..., Any], params: Any, count: int) -> None:
    """Raises ValueError unless the objective can be called with `params` and `count` more arguments."""
    try:
        inspect.signature(objective).bind(params, *range(count))
    except ValueError:  # some functions of C have no signature
        return
    except TypeError as error:
        raise binding_error(
            _NAME, "an objective that does not take these arguments", f"{inspect.signature(objective)}: {error}",
            f"the parameters{', and a batch or a key' if count == 1 else ', a batch and a key' if count else ''}",
            "pass batches= for a second argument, key= for the last one, or change the objective",
        ) from error


def _step(
    objective: Callable[..., jax.Array], group: Any, tx: Any, tolerance: float, stochastic: bool
) -> Callable[..., Any]:
    """Returns a compiled step: (state, params, *batch and key) → (the next state, the objective before the step)."""

    @jax.jit
    def step(state: ChooseState, params: Any, *given: Any) -> tuple[ChooseState, jax.Array]:
        def moved(coordinates: Any, near: bool) -> Element:
            by = group.exponential(coordinates, params, near)
            return tuple(part.compose(x, e) for part, x, e in zip(group.gauges, by, state.element, strict=True))

        def value_at(coordinates: Any, near: bool = True) -> jax.Array:
            value = objective(group.act(moved(coordinates, near), params), *given)
            require_scalar(_NAME, value)
            return jnp.asarray(value)

        def value_fn(coordinates: Any) -> jax.Array:  # near=False: a line search evaluates it far from zero
            return value_at(jax.tree.map(jnp.subtract, coordinates, state.coordinates), near=False)

        zeros = jax.tree.map(jnp.zeros_like, state.coordinates)
        value, gradient = jax.value_and_grad(value_at)(zeros)
        updates, optimizer = tx.update(
            gradient, state.optimizer, state.coordinates, value=value, grad=gradient, value_fn=value_fn
        )
        element = group.normalized(moved(updates, near=False), params)
        value = jnp.asarray(value, state.average.dtype)
        started_before = jnp.isfinite(state.progress)
        average = jnp.where(started_before & stochastic, _SMOOTHING * state.average + (1.0 - _SMOOTHING) * value, value)
        fell = average < state.progress - tolerance * jnp.where(
            jnp.isfinite(state.progress), jnp.abs(state.progress), 0.0
        )
        best = jax.tree.map(lambda new, old: jnp.where(value < state.least, new, old), state.element, state.best)
        after = ChooseState(
            step=state.step + 1,
            element=element,
            coordinates=jax.tree.map(jnp.add, state.coordinates, updates),
            optimizer=optimizer,
            average=average,
            least=jnp.minimum(value, state.least),
            best=best,
            progress=jnp.where(fell, average, state.progress),
            progress_step=jnp.where(fell, state.step, state.progress_step),
        )
        return after, value

    return step
