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
NO_GAUGE = go.logit_shift({"shift": "vocab"})


def _noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def _max_norm(rate: Any = RATE, **options: Any) -> optax.GradientTransformation:
    return go.norms.max_norm(optax.sgd(rate), {"w": "_ neuron"}, learning_rate=rate, **options)


def _run(tx: optax.GradientTransformation, weights: Any, gradients: Any, dtype: str = "float64") -> jax.Array:
    """The weights at every step."""
    return walk(tx, {"w": jnp.asarray(weights, dtype)}, {"w": jnp.asarray(gradients, dtype)})[0]["w"]


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
    """From norms below and above the bound, one zero, one far outside that is driven outwards, two without gradient."""
    steps, inputs, vectors = 12, 5, 7
    weights = _noise(0, inputs, vectors) * np.array([0.0, 0.1, 0.5, 3.0, 0.3, 9.0, 9.0])
    gradients = _noise(1, steps, inputs, vectors) * np.array([1e-6, 1.0, 1e6, 1.0, 0.0, 0.0, 0.0])
    gradients[:, :, 5] = -weights[:, 5]
    rates = np.where(np.arange(steps) == 3, 0.0, RATE * (1.0 + np.arange(steps)))
    found = _run(_max_norm(lambda n: jnp.asarray(rates)[n], bound=bound, beta=beta), weights, gradients)
    for n in range(vectors):
        expected = _by_hand(weights[:, n], gradients[:, :, n], rates, bound, beta)
        np.testing.assert_allclose(found[:, :, n], expected, rtol=1e-12, atol=1e-14)
    norms = np.linalg.norm(found, axis=1)
    above = norms[0] > bound
    assert above.any() and not above.all()
    assert norms[:, ~above].max() <= bound * (1.0 + 1e-14)
    assert (norms[1:, above] <= np.maximum(bound, norms[:-1, above]) + 1e-14).all()
    np.testing.assert_allclose(norms[1, 0], RATE * bound, rtol=1e-12)  # from zero, by the rate
    np.testing.assert_allclose(norms[0, 5] - norms[1, 5], RATE * bound, rtol=1e-12)  # and back at its pace
    np.testing.assert_array_equal(found[:, :, 6], weights[None, :, 6].repeat(steps + 1, 0))


@pytest.mark.parametrize("bound", [0.0, float("nan"), float("inf")])
def test_a_bound_is_positive(bound: float) -> None:
    with refused("bad bound", "max_norm", "write bound=1.0"):
        _max_norm(bound=bound)


BOUNDED: dict[str, Any] = {
    "max_norm": lambda bound: go.norms.max_norm(optax.sgd(RATE), {"w": "_ n"}, learning_rate=RATE, bound=bound),
    "keep_norms_below": lambda bound: optax.chain(optax.sgd(RATE), go.links.keep_norms_below({"w": "_ n"}, bound)),
    "max_norm_muon": lambda bound: go.max_norm_muon(RATE, NO_GAUGE, {"w": "_ n"}, {"t": "token _"}, bound=bound),
}


@pytest.mark.parametrize(("name", "leaf"), [*((name, "w") for name in BOUNDED), ("max_norm_muon", "t")])
def test_check_names_vectors_above_their_bound_and_the_bound_that_they_need(name: str, leaf: str) -> None:
    """The bound of a token in a table of embeddings is in units of √d."""
    params = {"w": jnp.eye(4), "t": jnp.ones((3, 9)), "shift": jnp.zeros(3)}
    params[leaf] = 3.0 * params[leaf]

    def check(bound: float) -> None:
        tx = BOUNDED[name](bound)
        go.check(tx, tx.init(params), params, params)

    with refused(f"weights above the norm bound, '{leaf}'", name, "of 3 times", "write bound=3.3"):
        check(1.0)
    check(3.3)


# Link by link ------------------------------------------------------------------------------------------------

NEURONS = {"up": "_ neuron", "down": "_ neuron"}


@pytest.mark.parametrize("bound", [1.0, 0.3])
def test_two_links_around_a_rate_are_max_norm(bound: float, x64: None) -> None:
    rate = lambda count: 0.01 * (2.0 + count)  # noqa: E731  # in float64, which schedules of Optax are not
    params = {"up": jnp.asarray(_noise(0, 4, 6)), "down": jnp.asarray(_noise(1, 6, 3)), "bias": jnp.zeros(3)}
    gradients = jax.tree.map(lambda x: jnp.asarray(_noise(x.size, 10, *x.shape)), params)
    momentum, by_rate = optax.trace(0.9, nesterov=True), optax.scale_by_learning_rate(rate)
    whole = go.norms.max_norm(optax.chain(momentum, by_rate), NEURONS, learning_rate=rate, bound=bound)
    links = optax.chain(
        momentum, go.links.scale_by_vector_norm(NEURONS),
        optax.masked(optax.scale(bound), {"up": True, "down": True, "bias": False}), by_rate,
        go.links.keep_norms_below(NEURONS, bound),
    )
    a, b = (walk(tx, params, gradients)[0] for tx in (whole, links))
    for path in params:
        np.testing.assert_allclose(a[path], b[path], rtol=1e-12, atol=1e-13)


# Name → the axes, the shape, and the kernel as matrices, inputs by outputs.
LAYOUTS: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "inputs first": ("_ neuron", (4, 6), lambda x: x),
    "inputs last": ("neuron _", (6, 4), lambda x: x.T),
    "stacked layers": ("layer _ neuron", (3, 4, 6), lambda x: x),
    "heads": ("_ head neuron", (4, 2, 3), lambda x: x.reshape(4, 6)),
    "fused": (("_ qkv=0 neuron", "_ qkv=1 neuron", "_ qkv=2 neuron"), (4, 3, 6), lambda x: x.swapaxes(0, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_polar_factor_is_muons(layout: str, x64: None) -> None:
    """The axes say which matrices a kernel holds."""
    axes, shape, matrices = LAYOUTS[layout]
    updates = {"up": jnp.asarray(_noise(1, *shape)), "bias": jnp.ones(6)}
    tx = go.links.scale_by_polar({"up": axes}, "sharp", 12)
    found, _ = tx.update(updates, tx.init(updates), updates)
    u, _, v = np.linalg.svd(matrices(updates["up"]), full_matrices=False)
    np.testing.assert_allclose(matrices(found["up"]), (6 / 4) ** 0.5 * u @ v, atol=1e-2)
    assert bool(jnp.all(found["bias"] == updates["bias"]))


def test_neurons_without_inputs_are_no_matrix() -> None:
    with pytest.raises(ValueError, match="the neurons of 'up' describe no matrix"):
        go.links.scale_by_polar({"up": "neuron other"}).init({"up": jnp.ones((2, 3))})


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("size", [1e-12, 1e-30, 1e12])
def test_the_size_of_gradients_does_not_matter(size: float, dtype: str) -> None:
    """Over steps, in which a vector has no gradient at all; squares of 1e-30 are no float32."""
    with jax.enable_x64(dtype == "float64"):
        weights, gradients = _noise(0, 6, 4) / 3, _noise(1, 5, 6, 4) * np.array([1.0, 1e-3, 0.0, 1.0])
        one, other = (np.asarray(_run(_max_norm(), weights, c * gradients, dtype), float) for c in (1.0, size))
        assert np.isfinite(other).all()
        np.testing.assert_array_equal(other[:, :, 2], other[0, :, 2][None].repeat(6, 0))
        moved = np.linalg.norm(one - one[0])
        close = {"bfloat16": 2e-2, "float32": tolerance("twins", "float32"), "float64": 1e-12}[dtype]
        assert moved > 0.05 and np.linalg.norm(one - other) <= close * moved
