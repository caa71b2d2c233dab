"""Multipliers in Linen: wrapped layers and multiplied parameters are one tree, and fold to the same function."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import gauge_optax as go
from models import linen_multipliers as linen


class Heads(nn.Module):
    """Two layers with an axis of heads between them, as they are or behind multipliers."""

    multiplied: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        def layer(name: str, inputs: int, outputs: Any) -> nn.Module:
            dense = functools.partial(nn.DenseGeneral, outputs, axis=tuple(range(-inputs, 0)), param_dtype=x.dtype)
            return linen.Multiplied(dense(), inputs, name=name) if self.multiplied else dense(name=name)

        return layer("out", 2, 5)(jnp.tanh(layer("value", 1, (2, 3))(x)) + layer("key", 1, (2, 3))(x))


def test_wrapped_layers_and_multiplied_parameters_are_one_function_with_these_gauges(x64: None) -> None:
    rng = np.random.default_rng(1)
    x, wrapped = jnp.asarray(rng.normal(size=(2, 4, 5))), Heads(True)
    alone = Heads(False).init(jax.random.key(0), x)["params"]
    params = wrapped.init(jax.random.key(0), x)["params"]
    multiplied = linen.multiply(alone, {"value": 1, "key": 1, "out": 2})
    assert jax.tree.map(jnp.shape, multiplied) == jax.tree.map(jnp.shape, params)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
    found, expected = wrapped.apply({"params": params}, x), Heads(False).apply({"params": linen.fold(params)}, x)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    gauges = [go.rescale({"value/rows": "head channel"}, {"value/layer/kernel": "_ head channel"}),
              go.rescale({"out/columns": "head channel"}, {"out/layer/kernel": "head channel _"})]
    loss = lambda p: jnp.sum(jnp.sin(wrapped.apply({"params": p}, x)))  # noqa: E731
    go.testing.assert_invariant(loss, params, gauges, jax.random.key(0))
