"""Steps of a set length inside a max-norm ball, beside the same in plain NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.refusals import refused
from tests.tolerances import tolerance
from tests.twins import walk

RATE = 0.05


def _noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def _run(tx: optax.GradientTransformation, params: Any, gradients: Any) -> Any:
    return walk(tx, params, gradients)[0]


def _by_hand(weights: np.ndarray, gradients: np.ndarray, rates: np.ndarray, bound: float, beta: float) -> np.ndarray:
    """SGD's updates through the formula, for one vector."""
    nu, tracked, points = 0.0, 0, [weights]
    for gradient, rate in zip(gradients, rates, strict=True):
        if rate != 0.0:
            tracked += 1
            nu = beta * nu + (1.0 - beta) * float(gradient @ gradient)
            length = np.sqrt(nu / (1.0 - beta**tracked))
            step = rate * bound * gradient / length if length > 0.0 else np.zeros_like(weights)
            most = max(bound, float(np.linalg.norm(weights)) - float(np.linalg.norm(step)))
            weights = weights - step
            weights = weights * min(1.0, most / max(float(np.linalg.norm(weights)), 1e-300))
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
    tx = go.norms.max_norm(optax.sgd(schedule), {"w": "_ neuron"}, learning_rate=schedule, bound=bound, beta=beta)
    found = _run(tx, {"w": jnp.asarray(weights)}, {"w": jnp.asarray(gradients)})["w"]
    for n in range(5):
        expected = _by_hand(weights[:, n], gradients[:, :, n], rates, bound, beta)
        np.testing.assert_allclose(found[:, :, n], expected, rtol=1e-12, atol=1e-14)
    norms = np.linalg.norm(found, axis=1)
    above = norms[0] > bound
    assert above.any() and not above.all()
    assert norms[:, ~above].max() <= bound * (1.0 + 1e-14)
    assert (norms[1:, above] <= np.maximum(bound, norms[:-1, above]) + 1e-14).all()
    np.testing.assert_allclose(norms[1, 0], RATE * bound, rtol=1e-12)  # from zero, by the rate


def test_the_scale_of_the_loss_and_other_leaves() -> None:
    """Gradients 1e12 times as large make the same run; what is not listed gets inner's update."""
    params = {"w": jnp.asarray(_noise(0, 6, 4), jnp.float32), "b": jnp.zeros(4)}
    gradients = {"w": jnp.asarray(_noise(1, 5, 6, 4), jnp.float32), "b": jnp.ones((5, 4))}
    tx = go.norms.max_norm(optax.sgd(RATE), {"w": "_ neuron"}, learning_rate=RATE)
    one, other = (_run(tx, params, jax.tree.map(lambda g, c=c: c * g, gradients)) for c in (1.0, 2.0**40))
    np.testing.assert_allclose(one["w"], other["w"], atol=tolerance("twins", "float32"))
    np.testing.assert_allclose(one["b"][-1], -5 * RATE, rtol=1e-6)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_is_positive(bound: float) -> None:
    with refused("bad bound", "max_norm", "write bound=1.0"):
        go.norms.max_norm(optax.sgd(0.1), {"w": "_ neuron"}, learning_rate=0.1, bound=bound)


# The first steps of weights that start above the bound ------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("schedule", [False, True])
def test_a_small_rate_moves_large_weights_little(schedule: bool, dtype: str) -> None:
    """He-normal weights, and trained ones of norm 5: the step is as small as the rate."""
    with jax.enable_x64(dtype == "float64"):
        weights = {"he": _noise(0, 32, 8) * (2 / 32) ** 0.5, "trained": _noise(1, 32, 8) * (25 / 32) ** 0.5}
        params = {name: jnp.asarray(x, dtype) for name, x in weights.items()}
        gradients = {name: jnp.asarray(_noise(2, 1, 32, 8), dtype) for name in weights}
        rate: Any = (lambda count: 1e-8 * (1 + count)) if schedule else 1e-8
        tx = go.norms.max_norm(optax.sgd(rate), {"**": "_ neuron"}, learning_rate=rate)
        points = _run(tx, params, gradients)
        for name in weights:
            before, after = np.asarray(points[name], float)
            assert np.linalg.norm(after - before) <= 3e-7 * np.linalg.norm(before)


@pytest.mark.parametrize("rate", [0.01, 0.1])
def test_weights_above_the_bound_come_back_to_it_at_the_pace_of_the_rate(rate: float, x64: None) -> None:
    """None grows on the way, even outwards; each is within after (norm − 1)/rate steps. Without gradient none moves."""
    steps = int(np.ceil(2.0 / rate)) + 1
    directions = _noise(0, 16, 6)
    weights = 3.0 * directions / np.linalg.norm(directions, axis=0)
    outwards = np.broadcast_to(-weights * np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]), (steps + 5, 16, 6))
    tx = go.norms.max_norm(optax.sgd(rate), {"w": "_ neuron"}, learning_rate=rate)
    norms = np.linalg.norm(_run(tx, {"w": jnp.asarray(weights)}, {"w": jnp.asarray(outwards)})["w"], axis=1)
    assert (np.diff(norms, axis=0) <= 1e-12).all()
    np.testing.assert_allclose(norms[1, :3], 3.0 - rate, rtol=1e-12)
    np.testing.assert_allclose(norms[-5:, :3], 1.0, rtol=1e-12)
    np.testing.assert_allclose(norms[steps // 2, :3], 2.0, rtol=0.06)
    np.testing.assert_array_equal(norms[:, 3:], norms[:1, 3:].repeat(len(norms), 0))


# The size of gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("size", [1e-12, 1e-30, 1e12])
def test_the_size_of_gradients_does_not_matter(size: float, dtype: str) -> None:
    """Over steps, in which a vector has no gradient at all; squares of 1e-30 are no float32."""
    with jax.enable_x64(dtype == "float64"):
        params = {"w": jnp.asarray(_noise(0, 6, 4) / 3, dtype)}
        gradients = _noise(1, 5, 6, 4) * np.array([1.0, 1e-3, 0.0, 1.0])
        tx = go.norms.max_norm(optax.sgd(RATE), {"w": "_ neuron"}, learning_rate=RATE)
        one, other = (_run(tx, params, {"w": jnp.asarray(c * gradients, dtype)})["w"] for c in (1.0, size))
        assert np.isfinite(np.asarray(other, float)).all()
        np.testing.assert_array_equal(other[:, :, 2], other[0, :, 2][None].repeat(6, 0))
        moved = np.linalg.norm(np.asarray(one - one[0], float))
        close = {"bfloat16": 2e-2, "float32": tolerance("twins", "float32"), "float64": 1e-12}[dtype]
        assert moved > 0.05 and np.linalg.norm(np.asarray(one - other, float)) <= close * moved


# States of other vectors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [{"w": "neuron _"}, {"w": "_ neuron", "v": "_ neuron"}, {"v": "_ neuron"}, {"w": ("_ neuron=0:2", "_ neuron=2:4")}],
    ids=str,
)
def test_a_state_of_other_vectors_is_refused(other: Any) -> None:
    """Whatever their number: rows and columns of a square kernel have states of one shape."""
    params = {"w": jnp.ones((4, 4)), "v": jnp.ones((4, 4))}
    make = lambda blocks: go.norms.max_norm(optax.sgd(RATE), blocks, learning_rate=RATE)  # noqa: E731
    state = make(other).init(params)
    tx = make({"w": "_ neuron"})
    with refused("max_norm: a state that was made for other vectors", "state = tx.init(params)"):
        jax.eval_shape(tx.update, params, state, params)
    tx.update(params, tx.init(params), params)


# Link by link ------------------------------------------------------------------------------------------------

NEURONS = {"up": "_ neuron", "down": "_ neuron"}


@pytest.mark.parametrize("bound", [1.0, 0.3])
def test_two_links_around_a_rate_are_max_norm(bound: float, x64: None) -> None:

    def rate(count: Any) -> Any:  # in float64, which schedules of Optax are not
        return 0.01 * (2.0 + count)

    params = {"up": jnp.asarray(_noise(0, 4, 6)), "down": jnp.asarray(_noise(1, 6, 3)), "bias": jnp.zeros(3)}
    gradients = {path: jnp.asarray(_noise(number, 10, *x.shape)) for number, (path, x) in enumerate(params.items())}
    momentum = optax.trace(0.9, nesterov=True)
    whole = go.norms.max_norm(
        optax.chain(momentum, optax.scale_by_learning_rate(rate)), NEURONS, learning_rate=rate, bound=bound)
    links = optax.chain(
        momentum, go.links.scale_by_vector_norm(NEURONS),
        optax.masked(optax.scale(bound), {"up": True, "down": True, "bias": False}),
        optax.scale_by_learning_rate(rate), go.links.keep_norms_below(NEURONS, bound),
    )
    a, b = (_run(tx, params, gradients) for tx in (whole, links))
    for path in params:
        np.testing.assert_allclose(a[path], b[path], rtol=1e-12, atol=1e-13)


def test_a_polar_factor_is_muons(x64: None) -> None:
    params = {"up": jnp.asarray(_noise(0, 4, 6)), "bias": jnp.zeros(6)}
    updates = {"up": jnp.asarray(_noise(1, 4, 6)), "bias": jnp.ones(6)}
    tx = go.links.scale_by_polar({"up": "_ neuron"}, "sharp", 12)
    found, _ = tx.update(updates, tx.init(params), params)
    u, _, v = np.linalg.svd(updates["up"], full_matrices=False)
    np.testing.assert_allclose(found["up"], (6 / 4) ** 0.5 * u @ v, atol=1e-2)
    assert found["bias"] is updates["bias"] or bool(jnp.all(found["bias"] == updates["bias"]))
    stacked = go.links.scale_by_polar({"up": "layer _ neuron"}, "sharp", 12)
    three = {"up": jnp.stack([updates["up"]] * 3)}
    layers, _ = stacked.update(three, stacked.init(three), three)
    np.testing.assert_allclose(layers["up"][1], found["up"], atol=1e-12)


@pytest.mark.parametrize("link", ["scale_by_polar", "scale_by_vector_norm", "keep_norms_below"])
def test_links_name_a_wrong_path(link: str) -> None:
    with pytest.raises(ValueError, match=f"{link}[\\s\\S]*remedy:"):
        getattr(go.links, link)({"upp": "_ neuron"}).init({"up": jnp.ones((2, 3))})


def test_neurons_without_inputs_are_no_matrix() -> None:
    with pytest.raises(ValueError, match="the neurons of 'up' describe no matrix"):
        go.links.scale_by_polar({"up": "neuron other"}).init({"up": jnp.ones((2, 3))})
