"""A whole module as params, as optimizers' `init` takes it: its leaves may be functions, keys and counters too."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gauge_optax as go
from gauge_optax.gauges.gauge import Gauge
from tests.discovery.test_traps import refused

BATCHES = list(np.random.default_rng(0).normal(size=(2, 6, 4)))
MLP = [
    go.rescale({"layers/0/weight": "channel _", "layers/0/bias": "channel"}, {"layers/1/weight": "_ channel"}),
    go.logit_shift({"layers/1/weight": "vocab _", "layers/1/bias": "vocab"}),
]
NET = [
    go.rescale({"up/kernel": "_ channel", "up/bias": "channel"}, {"down/kernel": "channel _"}),
    go.logit_shift({"down/kernel": "_ vocab", "down/bias": "vocab"}),
]


class Net(nnx.Module):
    """A ReLU layer with dropout behind it."""

    def __init__(self) -> None:
        self.up, self.down = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(1))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.drop(nnx.relu(self.up(x))))


def rows(model: eqx.Module, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


def gauges_of(fn: object, params: object) -> list[Gauge]:
    return go.discover(fn, params, BATCHES, "logits", progress=False).gauges  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", ["whole", "shapes", "arrays", "bfloat16"])
def test_an_equinox_module(cut: str) -> None:
    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0), dtype=jnp.bfloat16 if cut == "bfloat16" else jnp.float32)
    assert any(callable(leaf) for leaf in jax.tree.leaves(model)), "no leaf that is a function"
    if cut == "arrays":
        params, static = eqx.partition(model, eqx.is_inexact_array)
        assert gauges_of(lambda p, x: rows(eqx.combine(p, static), x), params) == MLP
    else:
        params = eqx.filter_eval_shape(lambda: model) if cut == "shapes" else model
        assert gauges_of(rows, params) == MLP


def test_an_nnx_module() -> None:
    model = Net()
    model.eval()
    assert gauges_of(lambda model, x: model(x), model) == NET
    up = np.asarray(model.up.kernel[...])
    assert up.dtype == np.float32 and up.std() < 1, "the module that was passed has changed"


def test_dropout_of_a_module_that_trains_is_named() -> None:
    text = refused(lambda model, x: model(x), Net(), BATCHES)
    assert "dropout" in text and "model.eval()" in text


@pytest.mark.parametrize("model", [Net(), eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))], ids=["nnx", "equinox"])
def test_a_module_as_the_function_is_refused_with_the_call_to_write(model: object) -> None:
    text = refused(model, model, BATCHES)
    assert "fn is a module" in text and "go.discover(lambda model, x: model(x), model, batches)" in text


def test_shapes_of_a_module_need_values_of_its_keys() -> None:
    text = refused(lambda model, x: model(x), nnx.eval_shape(Net), BATCHES)
    assert "no values of 'drop/rngs/" in text and "nnx.state(model, nnx.Param)" in text
    model = nnx.eval_shape(Net)
    model.eval()
    graph, shapes, rest = nnx.split(model, nnx.Param, ...)
    assert gauges_of(lambda p, x: nnx.merge(graph, p, rest)(x), shapes) == NET


def test_what_flaxs_layer_norm_hides() -> None:
    """flax multiplies x − mean by scale/σ: the scale is in a factor that depends on parameters too."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed, self.norm = nnx.Embed(11, 6, rngs=rngs), nnx.LayerNorm(6, rngs=rngs)
            self.up, self.down = nnx.Linear(6, 5, rngs=rngs), nnx.Linear(5, 11, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.down(jnp.tanh(self.up(self.norm(self.embed(tokens)))))

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(11, size=(2, 3, 7))
    fn = lambda p, x: nnx.merge(graph, p)(x)  # noqa: E731  called twice
    bound = {gauge.name for gauge in go.discover(fn, state, list(tokens), progress=False).whole}
    assert {"norm_read_shift", "norm_write_shift", "bias_absorption"} <= bound
