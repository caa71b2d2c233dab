"""Measures how much an optimizer's steps depend on which of several equivalent weight sets it trains.

Several weight sets of one function are trained separately, each with its own gradients. If the steps of the optimizer
depend on the function alone, they change the function in the same way, whichever set the training starts from.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.errors import binding_error, kind_of
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.linalg import real_dtype
from gauge_optax.testing import describe, tolerance
from gauge_optax.transformation import (
    require_arrays,
    require_count,
    require_differentiable,
    require_function,
    require_key,
    require_number,
    require_scalar,
    require_transformation,
    with_hash,
)

LossFn = Callable[[Any], jax.Array]
Represent = Callable[[Any], Any]

_NAME = "gauge_sensitivity"
_LOOSEST = 0.05  # a larger relative change of what `represent` returns never counts as roundoff


class Sensitivity(NamedTuple):
    """How much the change of the function depends on which of its weight sets an optimizer was given.

    Attributes:
      relative_change: ‖Δ' − Δ‖/‖Δ‖ for every sampled element g, (num_samples,). Δ is the change of the function by
        steps from θ, and Δ' that by steps from g·θ.
      mean: the mean over samples.
      max: the maximum over samples.
      per_gauge: one `Sensitivity` per gauge. Its twins are moved by this gauge alone, by the gauge's part of each g.
        Its own `per_gauge` is empty. For a single gauge there is one entry, with the numbers of the whole.
    """

    relative_change: jax.Array
    mean: jax.Array
    max: jax.Array
    per_gauge: tuple["Sensitivity", ...]


def gauge_sensitivity(
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    params: Any,
    gauges: Gauges,
    *,
    represent: Represent,
    key: jax.Array,
    num_samples: int = 8,
    scale: float = 1.0,
    steps: int = 1,
) -> Sensitivity:
    """Compares how an optimizer's steps change the function from equivalent weights.

    The optimizer is initialised and trained from θ, and from g·θ for random elements g of the gauges, each with its own
    gradients. Δ = represent(θ_t) − represent(θ) is the change of the function by the steps from θ, and Δ' that from
    g·θ. ‖Δ' − Δ‖/‖Δ‖ is the share of the change that depends on which weights were given. It is 0 for an optimizer
    inside `quotient`, and about 1 for an optimizer whose steps depend on coordinates.

    Args:
      tx: any optimizer. If its `update` takes `value`, `grad` or `value_fn`, it gets them.
      loss_fn: params → scalar. It and `represent` are compiled as by `jax.jit`: a later change of a global or an
        attribute that they read is not seen.
      params: the point θ.
      gauges: a gauge or a sequence of them.
      represent: params → pytree of arrays that the gauges do not change, and that differ for different functions:
        W_Q·W_Kᵀ and W_V·W_O per head, or a network's outputs on fixed inputs.
      key: a PRNG key for the elements.
      num_samples: the number of elements that are drawn.
      scale: the size of the elements, an argument of the gauges' `sample`; elements of a linear gauge have condition
        numbers up to e^(2·scale).
      steps: the number of steps before Δ is read.

    Returns:
      The relative changes, their mean and maximum, and the same numbers for each gauge; a product in the list counts as
      the gauges in it. If the training from g·θ diverges, the change for this g is NaN. Roundoff alone gives
      ε·e^(2·scale)·‖represent(θ)‖/‖Δ‖, with the machine epsilon ε.

    Raises:
      ValueError: a `represent` whose result a gauge changes, or the steps do not; a loss that is no scalar; no gauges,
        samples or steps; bindings that do not fit the tree.

    >>> gauge = go.head_rotation({"query": "_ basis", "key": "_ basis"})
    >>> params = {
    ...     "query": jnp.array([[1.0, 0.2], [0.5, 2.0]]),
    ...     "key": jnp.array([[0.3, 1.0], [1.0, 0.1]]),
    ... }
    >>> scores = lambda p: p["query"] @ p["key"].T
    >>> loss = lambda p: jnp.sum((scores(p) - 1.0) ** 2)
    >>> def sensitivity(tx):
    ...     options = dict(represent=scores, key=jax.random.key(0))
    ...     return float(
    ...         go.measure.gauge_sensitivity(tx, loss, params, gauge, **options).max
    ...     )
    >>> sensitivity(optax.sgd(1e-2)) < 1e-3, sensitivity(optax.adamw(1e-2)) > 0.1
    (True, True)

    Reference: the diagnostic of "When Equivalent Weights Train Differently", §9, and §7 on random gauges. Deviation:
      the post asks for the variance of the represented step; a change relative to the step at θ has no unit.
    """
    if not gauges or not (group := product(gauges)).gauges:
        raise binding_error(
            _NAME, "no gauges", "an empty list", "at least one gauge",
            "pass the gauges under which the optimizer is to be tested",
        )
    require_transformation(_NAME, tx, "tx")
    require_function(_NAME, "loss_fn", loss_fn, "params")
    require_function(_NAME, "represent", represent, "params")
    require_count(_NAME, "num_samples", num_samples, 1)
    require_count(_NAME, "steps", steps, 1)
    require_number(_NAME, "scale", scale, "(0, inf)", "write scale=1.0")
    require_key(_NAME, key)
    require_arrays(_NAME, params, key)
    require_differentiable(_NAME, params)
    twins = jax.jit(functools.partial(_twins, group, num_samples=num_samples, scale=scale))(params, key)
    value, motion, value_changes, motion_changes = _compare(
        tx, with_hash(loss_fn), with_hash(represent), steps, params, twins)
    # An element of a linear gauge multiplies roundoff by its condition number, which is at most e^(2·scale).
    most = min(_LOOSEST, tolerance("invariant", params) * math.exp(2 * scale))
    _check_invariant(group, float(value), np.asarray(value_changes, np.float64), most)
    if not float(jnp.finfo(real_dtype()).eps) * float(value) < float(motion) < math.inf:
        raise binding_error(
            _NAME, "the steps do not move what represent returns",
            f"‖Δ‖ = {float(motion):.2e}, ‖represent(θ)‖ = {float(value):.2e}", "a finite motion beyond rounding",
            "measure where the gradient is finite and not zero, with a learning rate that the parameters' dtype can "
            "resolve, and represent what the loss depends on",
        )
    rows = [Sensitivity(row, jnp.mean(row), jnp.max(row), ()) for row in motion_changes / motion]
    return rows[0]._replace(per_gauge=tuple(rows[-len(group.gauges) :]))


def _twins(group: Product, params: Any, key: jax.Array, *, num_samples: int, scale: float) -> Any:
    """The twins g·θ, every leaf (rows, num_samples, ...).

    In the first row, all gauges act. Then there is one row per gauge, in which it acts alone. If there is only one
    gauge, the first row is the only one.
    """
    keys, count = jax.random.split(key, num_samples), len(group.gauges)
    whole = jax.vmap(lambda k: group.sample(k, params, scale))(keys)
    still = jax.tree.map(lambda e, x: jnp.broadcast_to(e, x.shape), group.identity(params), whole)
    alone = [tuple(whole[j] if j == k else still[j] for j in range(count)) for k in range(count) if count > 1]
    elements = jax.tree.map(lambda *rows: jnp.stack(rows), whole, *alone)
    return jax.vmap(jax.vmap(lambda element: group.act(element, params)))(elements)


# All arguments but arrays are static, so that one compiled program serves an optimizer with several lists of gauges.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _compare(
    tx: optax.GradientTransformation, loss_fn: LossFn, represent: Represent, steps: int, params: Any, twins: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Trains from θ and from all twins, and returns norms of trees that `represent` returns, and of their changes.

    Returns:
      ‖represent(θ)‖ and ‖Δ‖; ‖represent(g·θ) − represent(θ)‖ and ‖Δ' − Δ‖, (rows, num_samples).
    """
    extended = optax.with_extra_args_support(tx)

    def read(params: Any) -> Any:
        with jax.default_matmul_precision("highest"):  # two of these values will be subtracted, which loses digits
            out = represent(params)
        if not jax.tree.leaves(out):
            raise binding_error(
                _NAME, "represent returns no arrays", f"{kind_of(out)} without leaves",
                "a pytree with an array in it", "return the products or the outputs that the optimizer is to move",
            )
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.promote_types(jnp.asarray(x).dtype, real_dtype())), out)

    def scalar(params: Any) -> jax.Array:
        value = loss_fn(params)
        require_scalar(_NAME, value)
        return value

    def step(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        params, state = carry
        value, grads = jax.value_and_grad(scalar)(params)
        updates, state = extended.update(grads, state, params, value=value, grad=grads, value_fn=loss_fn)
        return optax.apply_updates(params, updates), state

    def trained(params: Any) -> tuple[Any, Any]:
        before = read(params)
        # The first step is outside the loop, because `init` may return a state of another dtype than `update`.
        carry = step((params, tx.init(params)))
        if steps > 1:
            carry = jax.lax.fori_loop(1, steps, lambda _, carry: step(carry), carry)
        return before, jax.tree.map(jnp.subtract, read(carry[0]), before)

    def norms(batch: Any) -> jax.Array:
        squares = [jnp.sum(jnp.square(jnp.abs(x)).reshape(x.shape[0], -1), -1) for x in jax.tree.leaves(batch)]
        return jnp.sqrt(sum(squares, start=jnp.zeros((), real_dtype())))

    def row(row_twins: Any) -> tuple[jax.Array, ...]:
        points = jax.tree.map(lambda p, twin: jnp.concatenate([jnp.asarray(p)[None], twin]), params, row_twins)
        both = jax.vmap(trained)(points)
        changes = (jax.tree.map(lambda x: x[1:] - x[0], batch) for batch in both)
        return *(norms(batch)[0] for batch in both), *map(norms, changes)

    # `map` rather than `vmap`: one row at a time is in memory.
    value, motion, value_changes, motion_changes = jax.lax.map(row, twins)
    return value[0], motion[0], value_changes, motion_changes


def _check_invariant(group: Product, size: float, changes: np.ndarray, most: float) -> None:
    """Raises ValueError if a gauge alone changes what `represent` returns, or else if all gauges together do."""
    parts = [describe(part) for part in group.gauges]
    errors = np.max(changes, 1)
    # The message for all gauges together comes last, because the name of a single gauge says more.
    for name, error in [*zip(parts, errors[-len(parts) :], strict=True), (" with ".join(parts), errors[0])]:
        if not error <= most * size:
            raise binding_error(
                _NAME, f"{name} changes what represent returns",
                f"‖represent(g·θ) − represent(θ)‖ = {error:.2e}, ‖represent(θ)‖ = {size:.2e}",
                f"a relative change of at most {most:.1e}",
                "represent what the gauge leaves alone (products of factors, outputs of the network); if it does, list "
                "every leaf that the gauge moves, or measure in float64",
            )
