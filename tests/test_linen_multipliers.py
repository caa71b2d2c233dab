"""Multipliers in Linen: a wrapped layer and multiplied parameters are one tree, and fold to the same function."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import gauge_optax as go
from models import linen_multipliers as linen

HEADS, WIDTH = 2, 3
X = np.random.default_rng(0).normal(size=(2, 4, 5))


class Wrapped(nn.Module):
    """The projections of attention, each behind multipliers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def project(name: str) -> jax.Array:
            dense = nn.DenseGeneral((HEADS, WIDTH), param_dtype=x.dtype)
            outputs: jax.Array = linen.Multiplied(dense, name=name)(x)
            return outputs

        query, key, value = map(project, ("query", "key", "value"))
        weights = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", query, key) / jnp.sqrt(WIDTH).astype(x.dtype))
        mixed = jnp.einsum("bhts,bshe->bthe", weights, value)
        out = nn.DenseGeneral(5, axis=(-2, -1), param_dtype=x.dtype)
        outputs: jax.Array = linen.Multiplied(out, inputs=2, name="out")(mixed)
        return outputs


PLAIN = nn.MultiHeadDotProductAttention(HEADS, qkv_features=HEADS * WIDTH, param_dtype=jnp.float64)


def test_wrapped_layers_and_multiplied_parameters_are_one_function_with_these_gauges(x64: None) -> None:
    x, rng = jnp.asarray(X), np.random.default_rng(1)
    params_alone = PLAIN.init(jax.random.key(0), x)["params"]
    multiplied = linen.multiply(params_alone, {"query": 1, "key": 1, "value": 1, "out": 2})
    params = Wrapped().init(jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, multiplied) == jax.tree.map(jnp.shape, params)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
    assert jax.tree.structure(linen.fold(params)) == jax.tree.structure(params_alone)
    wrapped = Wrapped().apply({"params": params}, x)
    np.testing.assert_allclose(wrapped, PLAIN.apply({"params": linen.fold(params)}, x), rtol=1e-12)

    sides = [{f"{name}/rows": "head _", f"{name}/layer/bias": "head _"} for name in ("query", "key")]
    gauges = [
        go.multiplier_balance(*sides),
        go.rescale({"value/rows": "head channel"}, {"value/layer/kernel": "_ head channel"}),
    ]
    loss = lambda p: jnp.sum(jnp.sin(Wrapped().apply({"params": p}, x)))  # noqa: E731
    go.testing.assert_invariant(loss, params, gauges, jax.random.key(0))
