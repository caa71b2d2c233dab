"""How much an optimizer notices the representative: what its steps do to the function, from θ and from g·θ.

Two weight sets that are one function are trained apart, each on its own gradients. An optimizer that sees functions
moves what they represent alike; one that sees coordinates does not.

Here: the measure, the optimizer and the model black boxes. Not here: its table for a list of optimizers
(`sensitivity`, a program: a module that runs may not be imported by its package).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import binding_error
from gauge_optax.gauges.base import Element, Gauges
from gauge_optax.gauges.product import Product, product
from gauge_optax.linalg import real_dtype
from gauge_optax.testing import describe, tolerance

LossFn = Callable[[Any], jax.Array]
Represent = Callable[[Any], Any]

_LOOSEST = 0.05


class Sensitivity(NamedTuple):
    """How much the represented motion of an optimizer depends on the representative.

    Attributes:
      relative_change: ‖Δ' − Δ‖/‖Δ‖ for every sampled g, (num_samples,); Δ from θ, Δ' from g·θ.
      mean: over samples.
      max: over samples.
      per_gauge: the same under each gauge's part of every g, the other gauges still: one entry per gauge, whose own
        `per_gauge` is empty. One gauge has one entry, with the numbers of the whole.
    """

    relative_change: jax.Array
    mean: jax.Array
    max: jax.Array
    per_gauge: tuple["Sensitivity", ...]


class _Run(NamedTuple):
    """What is trained, how, and what is seen of it."""

    tx: optax.GradientTransformation
    loss_fn: LossFn
    represent: Represent
    steps: int


class _Sizes(NamedTuple):
    """Norms over the pytree that `represent` returns.

    Attributes:
      value: of represent(θ).
      motion: of Δ.
      value_change: of represent(g·θ) − represent(θ), (rows, num_samples).
      motion_change: of Δ' − Δ, (rows, num_samples).
    """

    value: jax.Array
    motion: jax.Array
    value_change: jax.Array
    motion_change: jax.Array


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
    """Compares the represented motion of an optimizer's steps between equivalent weights.

    From θ, and from g·θ for random elements g of the gauges' product, the optimizer is initialised and trained on the
    gradients it meets. Δ = represent(θ_t) − represent(θ) is what the steps did to the function, and ‖Δ' − Δ‖/‖Δ‖ how
    much of that was the representative's doing: 0 for an optimizer on the quotient, of order 1 for one that sees
    coordinates.

    Args:
      tx: an optimizer, a black box; those that ask for `value`, `grad` or `value_fn` get them.
      loss_fn: params → scalar.
      params: the point θ.
      gauges: a gauge or a sequence of them, meaning their product.
      represent: params → pytree of arrays that the gauges leave alone and that tells functions apart: W_Q·W_Kᵀ and
        W_V·W_O per head, or a network's outputs on fixed inputs.
      key: a PRNG key for the elements.
      num_samples: how many elements.
      scale: size of the elements, as the gauges' `sample` takes it; a linear gauge has condition up to e^(2·scale).
      steps: how many steps are taken before Δ is read.

    Returns:
      The relative changes, their mean and maximum, and the same per gauge, products in the list taken apart. Not a
      number where a twin's training diverges. Rounding alone gives ε·e^(2·scale)·‖represent(θ)‖/‖Δ‖.

    Raises:
      ValueError: a `represent` that a gauge changes; steps that do not move it; no gauges, samples or steps; bindings
        that do not fit the tree.

    >>> gauge = go.head_rotation({"query": "_ basis", "key": "_ basis"})
    >>> params = {"query": jnp.array([[1.0, 0.2], [0.5, 2.0]]), "key": jnp.array([[0.3, 1.0], [1.0, 0.1]])}
    >>> scores = lambda p: p["query"] @ p["key"].T
    >>> loss = lambda p: jnp.sum((scores(p) - 1.0) ** 2)
    >>> def sensitivity(tx):
    ...     found = go.gauge_sensitivity(tx, loss, params, gauge, represent=scores, key=jax.random.key(0))
    ...     return float(found.max)
    >>> sensitivity(optax.sgd(1e-2)) < 1e-3, sensitivity(optax.adamw(1e-2)) > 0.1
    (True, True)

    Reference: the diagnostic of "When Equivalent Weights Train Differently", §9, and §7 on random gauges, which asks
      for the variance of the represented step; the change relative to the step at θ has no unit.
    """
    group = product(gauges)
    _check_request(group, num_samples, steps)
    twins = jax.jit(lambda params, key: _twins(group, params, _elements(group, params, key, num_samples, scale)))
    sizes = _sizes(_Run(tx, loss_fn, represent, steps), params, twins(params, key))
    _check_invariant(group, sizes, min(_LOOSEST, tolerance("invariant", params) * math.exp(2 * scale)))
    _check_motion(sizes)
    rows = sizes.motion_change / sizes.motion
    alone = tuple(_summary(row, ()) for row in rows[-len(group.parts) :])
    return _summary(rows[0], alone)


def _summary(changes: jax.Array, per_gauge: tuple[Sensitivity, ...]) -> Sensitivity:
    return Sensitivity(changes, jnp.mean(changes), jnp.max(changes), per_gauge)


def _elements(group: Product, params: Any, key: jax.Array, num_samples: int, scale: float) -> Element:
    """The samples, (rows, num_samples, ...): whole, then by one gauge at a time where there are several."""
    keys = jax.random.split(key, num_samples)
    whole = jax.vmap(lambda k: group.sample(k, params, scale))(keys)
    still = jax.tree.map(lambda e, x: jnp.broadcast_to(e, x.shape), group.identity(params), whole)
    count = len(group.parts)
    alone = [tuple(whole[j] if j == k else still[j] for j in range(count)) for k in range(count) if count > 1]
    return jax.tree.map(lambda *rows: jnp.stack(rows), whole, *alone)


def _twins(group: Product, params: Any, elements: Element) -> Any:
    """g·θ for every element, (rows, num_samples, ...)."""
    return jax.vmap(jax.vmap(lambda element: group.act(element, params)))(elements)


@functools.partial(jax.jit, static_argnums=0)
def _sizes(run: _Run, params: Any, twins: Any) -> _Sizes:
    """The norms for every row; one row at a time, one program for all of them and for other gauges."""

    def row(own: Any) -> _Sizes:
        points = jax.tree.map(lambda p, twin: jnp.concatenate([jnp.asarray(p)[None], twin]), params, own)
        value, motion = jax.vmap(lambda point: _represented(run, point))(points)
        return _Sizes(_norms(value)[0], _norms(motion)[0], _norms(_beside_first(value)), _norms(_beside_first(motion)))

    sizes = jax.lax.map(row, twins)
    return sizes._replace(value=sizes.value[0], motion=sizes.motion[0])


def _represented(run: _Run, params: Any) -> tuple[Any, Any]:
    """represent(θ), and Δ after the steps."""
    before = _read(run.represent, params)
    # The first step alone: a state may leave `init` in another dtype than the one in which it then stays.
    trained = _step(run, (params, run.tx.init(params)))
    if run.steps > 1:
        trained = jax.lax.fori_loop(1, run.steps, lambda _, carry: _step(run, carry), trained)
    return before, jax.tree.map(jnp.subtract, _read(run.represent, trained[0]), before)


def _step(run: _Run, carry: tuple[Any, Any]) -> tuple[Any, Any]:
    params, state = carry
    value, grads = jax.value_and_grad(run.loss_fn)(params)
    tx = optax.with_extra_args_support(run.tx)
    updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=run.loss_fn)
    return optax.apply_updates(params, updates), state


def _read(represent: Represent, params: Any) -> Any:
    """What is represented, with all its digits: a difference is about to be taken."""
    with jax.default_matmul_precision("highest"):
        found = represent(params)
    if not jax.tree.leaves(found):
        raise binding_error(
            "gauge_sensitivity", "represent returns no arrays", f"a {type(found).__name__} without leaves",
            "a pytree with an array in it", "return the products or the outputs that the optimizer is to move",
        )  # fmt: skip
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.promote_types(jnp.asarray(x).dtype, real_dtype())), found)


def _beside_first(batch: Any) -> Any:
    """Every point's difference from the first, which is θ."""
    return jax.tree.map(lambda x: x[1:] - x[0], batch)


def _norms(batch: Any) -> jax.Array:
    """Norm over the pytree per entry of the leading axis."""
    squares = [jnp.sum(jnp.square(jnp.abs(x)).reshape(x.shape[0], -1), -1) for x in jax.tree.leaves(batch)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), real_dtype())))


def _check_request(group: Product, num_samples: int, steps: int) -> None:
    if not group.parts:
        raise binding_error(
            "gauge_sensitivity", "no gauges", "an empty list", "at least one gauge",
            "pass the gauges under which the optimizer is to be tested",
        )  # fmt: skip
    for name, value in (("num_samples", num_samples), ("steps", steps)):
        if value < 1:
            raise binding_error(
                "gauge_sensitivity", f"bad {name}", repr(value), "a positive integer", f"write {name}=1 or more"
            )


def _check_invariant(group: Product, sizes: _Sizes, most: float) -> None:
    """Raises for the first gauge alone that changes the representation, or else for their product."""
    size = float(sizes.value)
    errors = np.max(np.asarray(sizes.value_change, np.float64), 1)
    names = [" with ".join(map(describe, group.parts)), *map(describe, group.parts)]
    rows = [*zip(names, errors, strict=False)]
    for name, error in [*rows[1:], rows[0]]:
        if not error <= most * size:
            raise binding_error(
                "gauge_sensitivity", f"{name} changes what represent returns",
                f"‖represent(g·θ) − represent(θ)‖ = {error:.2e}, ‖represent(θ)‖ = {size:.2e}",
                f"a relative change of at most {most:.1e}",
                "represent what the gauge leaves alone (products of factors, outputs of the network); if it does, list "
                "every leaf that the gauge moves, or measure in float64",
            )  # fmt: skip


def _check_motion(sizes: _Sizes) -> None:
    size, motion = float(sizes.value), float(sizes.motion)
    if not float(jnp.finfo(real_dtype()).eps) * size < motion < math.inf:
        raise binding_error(
            "gauge_sensitivity", "the steps do not move what represent returns",
            f"‖Δ‖ = {motion:.2e}, ‖represent(θ)‖ = {size:.2e}", "a finite motion beyond rounding",
            "measure where the gradient is finite and not zero, with a learning rate that the parameters' dtype can "
            "resolve, and represent what the loss depends on",
        )  # fmt: skip
