"""Steps of a set length inside a max-norm ball, beside the same in plain NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.quick import jit
from tests.tolerances import tolerance

RATE = 0.05


def _noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def _run(tx: optax.GradientTransformation, params: Any, gradients: Any) -> Any:
    """The parameters before every step and after the last; gradients are stacked by step."""

    def step(carry: Any, grads: Any) -> Any:
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), params

    def run(params: Any, gradients: Any) -> Any:
        (last, _), before = jax.lax.scan(step, (params, tx.init(params)), gradients)
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), before, last)

    return jit(run)(params, gradients)


def _by_hand(weights: np.ndarray, gradients: np.ndarray, rates: np.ndarray, bound: float, beta: float) -> np.ndarray:
    """SGD's updates through the formula, for one vector."""
    nu, tracked, points = 0.0, 0, [weights]
    for gradient, rate in zip(gradients, rates, strict=True):
        if rate != 0.0:
            tracked += 1
            nu = beta * nu + (1.0 - beta) * float(gradient @ gradient)
            length = np.sqrt(nu / (1.0 - beta**tracked))
            weights = weights - (rate * bound * gradient / length if length > 0.0 else 0.0)
            weights = weights * min(1.0, bound / max(float(np.linalg.norm(weights)), 1e-300))
        points.append(weights)
    return np.stack(points)


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("bound", [1.0, 2.5])
def test_every_vector_steps_by_the_formula(bound: float, beta: float, x64: None) -> None:
    """From norms below, at and above the bound, one of them zero and one without gradient, with a rate of zero once."""
    steps, inputs = 12, 5
    weights = _noise(0, inputs, 5) * np.array([0.0, 0.1, 0.5, 3.0, 0.3])
    gradients = _noise(1, steps, inputs, 5) * np.array([1e-6, 1.0, 1e6, 1.0, 0.0])
    rates = np.where(np.arange(steps) == 3, 0.0, RATE * (1.0 + np.arange(steps)))
    schedule = lambda n: jnp.asarray(rates)[n]  # noqa: E731
    tx = go.max_norm(optax.sgd(schedule), {"w": "_ neuron"}, learning_rate=schedule, bound=bound, beta=beta)
    found = _run(tx, {"w": jnp.asarray(weights)}, {"w": jnp.asarray(gradients)})["w"]
    for n in range(5):
        expected = _by_hand(weights[:, n], gradients[:, :, n], rates, bound, beta)
        np.testing.assert_allclose(found[:, :, n], expected, rtol=1e-12, atol=1e-14)
    norms = np.linalg.norm(found, axis=1)
    assert norms[0].max() > bound
    assert norms[1:].max() <= bound * (1.0 + 1e-14)
    np.testing.assert_allclose(norms[1, 0], RATE * bound, rtol=1e-12)  # from zero, by the rate


def test_the_scale_of_the_loss_and_other_leaves() -> None:
    """Gradients 1e12 times as large make the same run; what is not listed gets inner's update."""
    params = {"w": jnp.asarray(_noise(0, 6, 4), jnp.float32), "b": jnp.zeros(4)}
    gradients = {"w": jnp.asarray(_noise(1, 5, 6, 4), jnp.float32), "b": jnp.ones((5, 4))}
    tx = go.max_norm(optax.sgd(RATE), {"w": "_ neuron"}, learning_rate=RATE)
    one, other = (_run(tx, params, jax.tree.map(lambda g, c=c: c * g, gradients)) for c in (1.0, 2.0**40))
    np.testing.assert_allclose(one["w"], other["w"], atol=tolerance("twins", "float32"))
    np.testing.assert_allclose(one["b"][-1], -5 * RATE, rtol=1e-6)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_is_positive(bound: float) -> None:
    with pytest.raises(ValueError, match="bad bound") as error:
        go.max_norm(optax.sgd(0.1), {"w": "_ neuron"}, learning_rate=0.1, bound=bound)
    for part in ("max_norm", "found:", "expected:", "remedy:", "write bound=1.0"):
        assert part in str(error.value)
