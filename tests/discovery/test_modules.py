"""A whole module as params, as optimizers' `init` takes it: its leaves may be functions, keys and counters too."""

import equinox as eqx
import flax.linen as nn
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
    model.set_attributes(deterministic=True)
    assert gauges_of(lambda model, x: model(x), model) == NET
    up = np.asarray(model.up.kernel[...])
    assert up.dtype == np.float32 and up.std() < 1, "the module that was passed has changed"


def test_dropout_of_a_module_that_trains_is_named() -> None:
    text = refused(lambda model, x: model(x), Net(), BATCHES)
    assert "dropout" in text and "model.set_attributes(deterministic=True)" in text


class Normed(nnx.Module):
    """A BatchNorm between a ReLU layer and its kernel, in training."""

    def __init__(self) -> None:
        self.up, self.down = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(1))
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.norm(self.up(x))))


NORMED = [
    go.norm_scale({"norm/scale": "channel", "norm/bias": "channel"}, {"down/kernel": "channel _"}),
    go.logit_shift({"down/kernel": "_ vocab", "down/bias": "vocab"}),
]


def test_statistics_of_a_batch_norm_that_trains_are_no_parameters() -> None:
    """Whole, split into everything, split into parameters: one list, which fits the tree of `wrt=nnx.Param`."""
    model = Normed()
    whole = go.discover(lambda model, x: model(x), model, BATCHES, "logits", progress=False)
    assert whole.gauges == NORMED and {"norm/mean", "norm/var"} <= set(whole.dead)
    assert float(jnp.sum(jnp.square(model.norm.mean[...]))) == 0.0, "the module that was passed has changed"
    graph, state = nnx.split(model)
    assert gauges_of(lambda p, x: nnx.merge(graph, p)(x), state) == NORMED
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    assert gauges_of(lambda p, x: nnx.merge(graph, p, rest, copy=True)(x), params) == NORMED
    go.bind(NORMED, params)
    text = refused(lambda p, x: nnx.merge(graph, p, rest)(x), params, BATCHES)
    assert "Cannot mutate BatchStat" in text and "nnx.merge(graph, params, rest, copy=True)" in text


class LinenNormed(nn.Module):
    """The same in Linen, where the new statistics are returned beside the outputs."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.BatchNorm(use_running_average=False, name="norm")(nn.Dense(8, name="up")(x))
        return nn.Dense(3, name="down")(nn.relu(y))


def test_statistics_that_linen_returns_are_no_outputs() -> None:
    model = LinenNormed()
    variables = model.init(jax.random.key(0), BATCHES[0])
    stats = variables["batch_stats"]

    def of_params(params: object, x: jax.Array) -> object:
        return model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])

    def of_variables(variables: object, x: jax.Array) -> object:
        return model.apply(variables, x, mutable=["batch_stats"])

    assert gauges_of(of_params, variables["params"]) == NORMED
    paths = [spec.pattern for gauge in gauges_of(of_variables, variables) for spec in gauge.specs]  # type: ignore[attr-defined]
    assert paths and all(path.startswith("params/") for path in paths)


@pytest.mark.parametrize("model", [Net(), eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))], ids=["nnx", "equinox"])
def test_a_module_as_the_function_is_refused_with_the_call_to_write(model: object) -> None:
    text = refused(model, model, BATCHES)
    assert "fn is a module" in text and "go.discover(lambda model, x: model(x), model, batches)" in text


def test_shapes_of_a_module_need_values_of_its_keys() -> None:
    text = refused(lambda model, x: model(x), nnx.eval_shape(Net), BATCHES)
    assert "no values of 'drop/rngs/" in text and "nnx.state(model, nnx.Param)" in text
    model = nnx.eval_shape(Net)
    model.set_attributes(deterministic=True)
    graph, shapes, rest = nnx.split(model, nnx.Param, ...)
    assert gauges_of(lambda p, x: nnx.merge(graph, p, rest)(x), shapes) == NET


@pytest.mark.slow
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
