"""Steps of a set length inside a max-norm ball, beside the same in plain NumPy, and Muon with them on the slice."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from models import lm
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


# Muon ---------------------------------------------------------------------------------------------------

CONFIG = lm.llama_config(vocab=7, d_model=8, layers=2, heads=2, kv_heads=2, d_head=4, d_ff=12, max_len=5)
NEURONS = {
    **{f"blocks/{{i}}/attn/{name}/kernel": "_ head neuron" for name in ("query", "key", "value")},
    "blocks/{i}/attn/out/kernel": "_ _ neuron",
    **{f"blocks/{{i}}/mlp/{name}/kernel": "_ neuron" for name in ("up", "gate", "down")},
}


def _trained(tx: Any, params: Any, loss: Any, steps: int = 10) -> tuple[Any, np.ndarray]:
    tokens = jax.random.randint(jax.random.key(1), (4, 6), 0, CONFIG.vocab)

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    (params, _), losses = jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), None, length=steps))(params)
    return params, np.asarray(losses)


def test_twins_train_as_one(x64: None) -> None:
    """Weights of one function, far apart by all gauges at once; plain AdamW and the link without `quotient` differ."""
    params, loss = lm.params_and_loss(CONFIG, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
    group = go.product(lm.gauges(CONFIG))
    twin = group.act(group.sample(jax.random.key(2), params, 1.0), params)
    muon = go.max_norm_muon(0.04, group, NEURONS, weight_decay=0.1)
    plain = go.max_norm(optax.adam(0.04), NEURONS, learning_rate=0.04)
    apart = {}
    for name, tx in {"adamw": optax.adamw(0.04), "plain": plain, "muon": muon}.items():
        one, other = (_trained(tx, start, loss)[1] for start in (params, twin))
        apart[name] = float(np.abs(one - other).max())
    assert apart["adamw"] > 1e-3
    assert apart["plain"] > 1e-3
    assert apart["muon"] <= tolerance("twins", "float64")


def test_neurons_stay_in_the_ball_and_all_of_them_move() -> None:
    """From zero outputs, on the point of the slice; a head's anchor is a kernel that the bound holds, too."""
    params, loss = lm.params_and_loss(CONFIG, jax.random.key(0))
    params["blocks"][0]["attn"]["out"]["kernel"] *= 0.0
    after, losses = _trained(go.max_norm_muon(0.04, lm.gauges(CONFIG), NEURONS), params, loss, steps=30)
    assert losses[-1] < losses[0] - 0.3
    for block in after["blocks"].values() if isinstance(after["blocks"], dict) else after["blocks"]:
        norms = jnp.linalg.norm(block["attn"]["out"]["kernel"], axis=(0, 1))
        assert 0.1 < float(norms.min())


def test_the_axes_say_which_matrix_a_kernel_is() -> None:
    """Inputs last as in PyTorch, stacked layers, heads side by side, and one head's matrices in a fused kernel."""
    params = {
        "inputs_last": (6, 4), "scanned": (3, 4, 6), "heads": (4, 2, 3), "experts": (2, 4, 6), "fused": (4, 3, 6),
    }
    params = {name: jnp.asarray(_noise(n, *shape), jnp.float32) for n, (name, shape) in enumerate(params.items())}
    neurons = {
        "inputs_last": "neuron _", "scanned": "layer _ neuron", "heads": "_ head neuron", "experts": "expert _ neuron",
        "fused": ("_ qkv=0 neuron", "_ qkv=1 neuron", "_ qkv=2 neuron"),
    }  # fmt: skip
    gauge = go.logit_shift({"shift": "_ vocab"})
    params["shift"] = jnp.zeros((2, 3))
    tx = go.max_norm_muon(1.0, gauge, neurons, ns_coeffs="sharp", bound=1e6, nesterov=False)
    grads = jax.tree.map(lambda x: jnp.asarray(_noise(9, *x.shape), jnp.float32), params)
    steps = jit(tx.update)(grads, jit(tx.init)(params), params)[0]
    stacks = {
        "inputs_last": steps["inputs_last"].T[None], "scanned": steps["scanned"],
        "heads": steps["heads"].reshape(1, 4, 6), "experts": steps["experts"],
        "fused": steps["fused"].transpose(1, 0, 2),
    }  # fmt: skip
    for name, stack in stacks.items():
        # A polar factor of (4, 6) has orthonormal rows; steps of one length per column leave them near it.
        lengths = jnp.linalg.norm(stack, axis=1)
        np.testing.assert_allclose(lengths, 1e6, rtol=1e-3, err_msg=name)
        factor = np.linalg.svd(grads_of(name, grads), full_matrices=False)
        expected = -np.asarray(factor[0] @ factor[2])
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(stack / 1e6, expected, atol=2e-2, err_msg=name)


def grads_of(name: str, grads: Any) -> np.ndarray:
    """A leaf's gradient as its stack of matrices, inputs by outputs."""
    x = np.asarray(grads[name])
    shaped = {"inputs_last": lambda: x.T[None], "heads": lambda: x.reshape(1, 4, 6), "fused": lambda: x.swapaxes(0, 1)}
    return shaped.get(name, lambda: x)()


@pytest.mark.parametrize(
    "neurons", [{"w": "_ _"}, {"w": "a b", "v": "_ neuron"}, {"w": ("_ neuron=0", "neuron=1 _")}], ids=str
)
def test_neurons_that_are_no_matrix_are_refused(neurons: Any) -> None:
    params = {"w": jnp.ones((4, 4)), "v": jnp.ones((2, 2)), "head": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match="max_norm_muon") as error:
        go.max_norm_muon(0.1, go.logit_shift({"head": "_ vocab"}), neurons).init(params)
    for part in ("found:", "expected:", "remedy:", "'w'"):
        assert part in str(error.value)
