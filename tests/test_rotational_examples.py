"""Studies of rotational equilibrium: nets are invariant where they say, claims hold."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples.studies import digits, rotational_balance, rotational_networks, rotational_walk, text
from models import digits as nets
from models import lm, random_walk
from models.weight_standardization import WeightStandardized, standardize

RESULTS = Path(__file__).parent.parent / "examples" / "results"


# Nets ---------------------------------------------------------------------------------------------------


def test_a_standardized_layer_sees_neither_size_nor_mean(x64: None) -> None:
    layer = WeightStandardized(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), "_ channel")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8)))
    graph, state = nnx.split(layer)
    params = nnx.to_pure_dict(state)
    moved = jax.tree.map(lambda a: a, params)
    moved["layer"]["kernel"] = 3.0 * params["layer"]["kernel"] + jnp.array([1.0, -2.0, 0.5])

    def call(p: Any) -> jax.Array:
        return nnx.merge(graph, p)(x)

    np.testing.assert_allclose(call(params), call(moved), rtol=1e-6, atol=1e-6)
    kernel = params["layer"]["kernel"]
    expected = x @ (kernel - kernel.mean(0)) + params["layer"]["bias"]
    np.testing.assert_allclose(call(params), expected, rtol=1e-5, atol=1e-5)


def test_every_linear_layer_of_the_language_model_is_wrapped() -> None:
    config = lm.llama_config(vocab=16, d_model=8, layers=2, heads=2, kv_heads=2, d_head=4, d_ff=12)
    model, plain = lm.build(config, nnx.Rngs(0)), lm.build(config, nnx.Rngs(0))
    standardize(model, text.KERNELS)
    wrapped = [path for path, module in nnx.iter_modules(model) if isinstance(module, WeightStandardized)]
    assert len(wrapped) == 2 * len(text.KERNELS)
    tokens = jnp.zeros((1, 5), jnp.int32)
    assert model(tokens).shape == plain(tokens).shape
    with pytest.raises(ValueError, match="do not fit a kernel"):
        WeightStandardized(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), "_ head channel")


def test_patches_make_a_convolution() -> None:
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 8, 8, 3), (3, 3, 3, 4)))
    expected = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    np.testing.assert_allclose(nets.patches(x, 1) @ kernel.reshape(-1, 4), expected, rtol=1e-4, atol=1e-4)


def test_a_walk_is_invariant_and_orthogonal(x64: None) -> None:
    walk, weights = random_walk.start(jax.random.key(0), 4, 6)
    grad = random_walk.noise(walk, weights, jax.random.key(1), 8)
    np.testing.assert_allclose(jnp.sum(grad * weights, 1), 0.0, atol=1e-10)
    scaled = random_walk.noise(walk, 2.0 * weights, jax.random.key(1), 8)
    np.testing.assert_allclose(2.0 * scaled, grad, rtol=1e-6, atol=1e-12)


def test_digits_learn() -> None:
    task = digits.Task(net=nets.DigitsConfig(width=32), steps=150, batch=64)
    found = digits.train(task, lambda rate, decay: optax.adamw(rate, weight_decay=decay), [(1e-2, 0.0)], [0, 1])
    assert found.accuracy.shape == (1, 2) and found.accuracy.min() > 0.8


# Claims -------------------------------------------------------------------------------------------------


def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())["cells"]


def test_the_walks_rest_where_predicted() -> None:
    """The promise: 2 % for SGDM and AdamW, 6 % for Adam + l2, 3 % for Lion; three seeds."""
    cells = _result("rotational_walk")
    most = {"SGDM": 0.02, "AdamW": 0.02, "Adam + l2": 0.06, "Lion": 0.03, "Lion, even inputs": 0.03, "Muon": 0.06}
    assert all(len(cells[name]["norm"]) == 3 for name in most)
    for name, bound in most.items():
        assert max(abs(x - 1) for key in ("norm", "rotation") for x in cells[name][key]) <= bound, name
    assert max(cells["AdamW, b2 = 0.95"]["transient"]) <= 0.05
    assert max(abs(x - 1) for key in ("aligned_norm", "aligned_rotation") for x in cells["Lion"][key]) <= 0.03


def test_trained_layers_are_near_table_1() -> None:
    for name, cell in _result("rotational_networks").items():
        if "no decay" not in name:
            ratios = [rotational_networks.ratios(layer, True) for layer in cell["layers"].values()]
            assert 0.75 < np.min(ratios) and np.max(ratios) < 1.25, name


def test_the_variant_is_level_with_adamw_on_the_language_model() -> None:
    cell = _result("rotational_variants")["LM, AdamW"]
    assert len(cell["baseline"]) == 3
    assert np.mean(cell["zero-shot"]) <= 1.01 * np.mean(cell["baseline"])


@pytest.mark.slow
def test_a_small_walk_fills_a_cell() -> None:
    found = rotational_walk.measured(rotational_walk.Config(steps=400, width=8, batch=8), "Lion", [0])
    assert all(np.isfinite(found[key][0]) for key in ("norm", "rotation", "alignment", "transient"))


@pytest.mark.slow
def test_slowed_neurons_are_slowed() -> None:
    """The two halves of a layer, by a factor of ten."""

    def observe(params: Any, grads: Any, state: Any, updates: Any, after: Any) -> jax.Array:
        kernel, move = (digits.layers(tree, nets.NET)[0] for tree in (params, updates))
        return digits.turned(kernel, move)[0]

    def make(rate: Any, decay: Any) -> optax.GradientTransformation:
        return rotational_balance.slowed(rate, decay, 0.5, 10.0)

    task = digits.Task(steps=100, constant=True, warmup=0.0)
    found = digits.train(task, make, [(1e-2, 0.1)], [0], observe).observed[0, 0, 20:].mean(0)
    assert found[:32].mean() / found[32:].mean() == pytest.approx(10.0, rel=0.1)
