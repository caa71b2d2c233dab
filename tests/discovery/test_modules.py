"""A whole module as params, as optimizers' `init` takes it: its leaves may be functions, keys and counters too."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gauge_optax as go
from tests.discovery.test_traps import refused

BATCHES = list(np.random.default_rng(0).normal(size=(2, 6, 4)))
MLP = [
    go.rescale({"layers/0/weight": "channel _", "layers/0/bias": "channel"}, {"layers/1/weight": "_ channel"}),
    go.logit_shift({"layers/1/weight": "vocab _", "layers/1/bias": "vocab"}),
]
SHIFT = go.logit_shift({"down/kernel": "_ vocab", "down/bias": "vocab"})
NET = [go.rescale({"up/kernel": "_ channel", "up/bias": "channel"}, {"down/kernel": "channel _"}), SHIFT]
NORMED = [go.rescale({"norm/scale": "channel", "norm/bias": "channel"}, {"down/kernel": "channel _"}), SHIFT]
split: Any = nnx.split  # mypy cannot unpack its results


class Net(nnx.Module):
    """A ReLU layer with dropout behind it, or with a BatchNorm in training before it."""

    def __init__(self, normed: bool = False) -> None:
        self.up, self.down = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(1))
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(2)) if normed else None
        self.drop = None if normed else nnx.Dropout(0.5, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm(self.up(x)) if self.norm else self.up(x))
        return self.down(self.drop(y) if self.drop else y)


def test_a_variable_under_two_paths_is_refused() -> None:
    """A tree has it twice, and nnx.Optimizer once."""
    net: Any = Net()
    net.again = net.down
    refused("one variable under two paths", "'again/bias' and 'down/bias'", "nnx.split", fn=called, params=net,
            batches=BATCHES)


def called(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def gauges_of(fn: Any, params: Any) -> list[Any]:
    return go.discover(fn, params, BATCHES, "logits", progress=False).gauges


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_equinox_module(dtype: Any) -> None:
    """As shapes, or as it is."""
    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0), dtype=dtype)
    assert any(callable(leaf) for leaf in jax.tree.leaves(model)), "no leaf that is a function"
    params = eqx.filter_eval_shape(lambda: model) if dtype == jnp.float32 else model
    assert gauges_of(lambda model, x: jax.vmap(model)(x), params) == MLP


def test_an_nnx_module_and_shapes_of_one() -> None:
    """Keys of dropout need values; parameters do not."""
    model, abstract = Net(), nnx.eval_shape(Net)
    refused("no values of 'drop/rngs/", "nnx.state(model, nnx.Param)", fn=called, params=abstract, batches=BATCHES)
    for net in (model, abstract):
        net.set_attributes(deterministic=True)
    assert gauges_of(called, model) == NET
    up = np.asarray(model.up.kernel[...])
    assert up.dtype == np.float32 and up.std() < 1, "the module that was passed has changed"
    graph, shapes, rest = split(abstract, nnx.Param, ...)
    assert gauges_of(lambda p, x: nnx.merge(graph, p, rest)(x), shapes) == NET


def test_statistics_of_a_batch_norm_that_trains_are_no_parameters() -> None:
    """Whole, split into everything, split into parameters: one list, which fits the tree of `wrt=nnx.Param`."""
    model: Any = Net(normed=True)
    whole = go.discover(called, model, BATCHES, "logits", progress=False)
    assert whole.gauges == NORMED and {"norm/mean", "norm/var"} <= set(whole.dead)
    assert float(jnp.sum(jnp.square(model.norm.mean[...]))) == 0.0, "the module that was passed has changed"
    graph, state = nnx.split(model)
    assert gauges_of(lambda p, x: nnx.merge(graph, p)(x), state) == NORMED
    graph, params, rest = split(model, nnx.Param, ...)
    assert gauges_of(lambda p, x: nnx.merge(graph, p, rest, copy=True)(x), params) == NORMED
    go.bind(NORMED, params)
    refused("Cannot mutate BatchStat", "nnx.merge(graph, params, rest, copy=True)",
            fn=lambda p, x: nnx.merge(graph, p, rest)(x), params=params, batches=BATCHES)


def test_dropout_of_a_module_that_trains_is_named() -> None:
    """As a part of the parameters, and captured by the function."""
    graph, params, rest = split(Net(), nnx.Param, ...)
    for fn, given in ((called, Net()), (lambda p, x: nnx.merge(graph, p, rest)(x), params)):
        refused("dropout", "model.set_attributes(deterministic=True)", fn=fn, params=given, batches=BATCHES)


class LinenNormed(nn.Module):
    """The same in Linen, where the new statistics are returned beside the outputs."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.BatchNorm(use_running_average=False, name="norm")(nn.Dense(8, name="up")(x))
        return nn.Dense(3, name="down")(nn.relu(y))


def test_statistics_that_linen_returns_are_no_outputs() -> None:
    variables = LinenNormed().init(jax.random.key(0), BATCHES[0])

    def fn(variables: Any, x: jax.Array) -> Any:
        return LinenNormed().apply(variables, x, mutable=["batch_stats"])

    assert gauges_of(lambda params, x: fn({**variables, "params": params}, x), variables["params"]) == NORMED
    paths = [spec.pattern for gauge in gauges_of(fn, variables) for spec in gauge.specs]
    assert paths and all(path.startswith("params/") for path in paths)


@pytest.mark.parametrize("model", [Net(), eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))], ids=["nnx", "equinox"])
def test_a_module_as_the_function_is_refused_with_the_call_to_write(model: object) -> None:
    refused("fn is a module", "go.discover(lambda model, x: model(x), model, batches)",
            fn=model, params=model, batches=BATCHES)


@pytest.mark.slow
def test_what_flaxs_layer_norm_hides() -> None:
    """flax multiplies x − mean by scale/σ: the scale is in a factor that depends on parameters too."""
    rngs = nnx.Rngs(0)
    graph, state = nnx.split(nnx.Sequential(
        nnx.Embed(11, 6, rngs=rngs), nnx.LayerNorm(6, rngs=rngs), nnx.Linear(6, 5, rngs=rngs), jnp.tanh,
        nnx.Linear(5, 11, rngs=rngs)))
    tokens = list(np.random.default_rng(0).integers(11, size=(2, 3, 7)))
    report = go.discover(lambda p, x: nnx.merge(graph, p)(x), state, tokens, progress=False)
    assert {"norm_read_shift", "norm_write_shift", "bias_absorption"} <= {gauge.name for gauge in report.whole}
