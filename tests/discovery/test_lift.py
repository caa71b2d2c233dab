"""Functions are searched in float64, whatever dtypes they name; what has no float64 version is refused by its line."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import gauge_optax as go
from gauge_optax.discovery.lift import in_double
from tests.discovery.test_layouts import D, check, drawn, inputs
from tests.discovery.test_traps import BATCHES, MLP, RELU, mlp, refused

TOKENS = list(np.random.default_rng(0).integers(0, 11, (2, 2, 6)))


def both(p: Any, x: Any, between: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The MLP of `test_traps`, with something between its kernels."""
    return mlp(p, x, lambda hidden: between(jax.nn.relu(hidden)).astype(x.dtype))


def scanned_in_float32(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, row: (carry + row, carry * row), jnp.zeros(x.shape[-1:], jnp.float32), x)[0]


@jax.custom_vjp
def in_bfloat16(x: jax.Array) -> jax.Array:
    return 2.0 * x.astype(jnp.bfloat16)


in_bfloat16.defvjp(lambda x: (in_bfloat16(x), None), lambda _, g: (2.0 * g.astype(jnp.float32),))


def chosen(x: jax.Array) -> jax.Array:
    low = x.astype(jnp.float16)
    return jax.lax.cond(low.shape[0] > jnp.argmax(low[:, 0]), lambda y: 3 * y, lambda y: y, low)


WEIGHTS = np.arange(1.0, 6.0, dtype=np.float32)
BETWEEN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "a cast": lambda x: x.astype(jnp.bfloat16),
    "a loop with a float32 carry": lambda x: x + scanned_in_float32(x.astype(jnp.float32)),
    "a derivative of its own": in_bfloat16,
    "a condition": chosen,
    "an accumulator": lambda x: jnp.einsum(
        "ti,i->ti", x.astype(jnp.bfloat16), WEIGHTS.astype(jnp.bfloat16), preferred_element_type=jnp.float32),
    "an algorithm": lambda x: jnp.einsum("ti,i->ti", x.astype(jnp.float32), WEIGHTS, precision="F32_F32_F32"),
    "fewer bits": lambda x: jax.lax.reduce_precision(x, 8, 7),
    "a window": lambda x: jax.lax.reduce_window(
        x.astype(jnp.float32), np.float32(0), jax.lax.add, (1, 1), (1, 1), "SAME"),
    "a checkpoint": jax.checkpoint(lambda x: 2 * x.astype(jnp.bfloat16)),
    "an inverse": lambda x: jnp.linalg.inv((2.0 + 0 * jnp.sum(x)).astype(jnp.float32) * jnp.eye(x.shape[0])) @ x,
    "a median": lambda x: x + jnp.median(x.astype(jnp.float32), 0),
    "a sharded map": lambda x: jax.shard_map(
        lambda y: jax.lax.psum(y * (1 + jax.lax.axis_index("rows")), "rows"), mesh=jax.make_mesh((1,), ("rows",)),
        in_specs=P(), out_specs=P())(x.astype(jnp.bfloat16)),
    "noise whose key is computed": lambda x: (
        x.astype(jnp.float32) * jax.random.uniform(jax.random.key(jnp.int32(jnp.max(x) > -1)), (1,), jnp.float32)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_dtype_hides_no_gauge(name: str) -> None:
    """And the lifted values are what low precision rounds."""

    def fn(leaves: Any, x: Any) -> jax.Array:
        return both(unflatten_dict(leaves, sep="/"), x, BETWEEN[name])

    leaves, batch = flatten_dict(MLP, sep="/"), BATCHES[0].astype(np.float32)
    check(fn, leaves, BATCHES, [RELU], outputs="loss")
    rounded = fn(leaves, batch)
    with jax.enable_x64(True):
        double = {path: np.asarray(x, np.float64) for path, x in leaves.items()}
        exact = in_double(fn, double, {path: x.dtype for path, x in leaves.items()}, batch)(double, batch)
        assert exact.dtype == jnp.float64
    np.testing.assert_allclose(rounded, exact, rtol=0.05, atol=0.05 * np.abs(exact).max())


def attention(q: Any, k: Any, v: Any, mask: Any = None, **_: Any) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, mask=mask.astype(bool))


@pytest.mark.slow_rows("<class*")
@pytest.mark.parametrize("options", [{}, {"attention_fn": attention}], ids=["flax", "jax.nn"])
@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16], ids=str)
def test_stock_flax_attention_is_taken_as_it_is(dtype: Any, options: dict[str, Any]) -> None:
    model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), dtype=dtype, decode=False, use_bias=False, **options)
    graph, state = nnx.split(model)
    mask = nnx.make_causal_mask(jnp.ones((3, 6)))
    check(lambda p, x: nnx.merge(graph, p)(x, mask=mask), nnx.to_pure_dict(state), inputs(2, 3, 6, 8), [
        go.head_linear({"query/kernel": "_ head basis"}, {"key/kernel": "_ head basis"}),
        go.head_linear({"value/kernel": "_ head basis"}, {"out/kernel": "head basis _"}),
    ], outputs="loss")


def _kernel(x: jax.Array) -> jax.Array:
    def double(ref: Any, out: Any) -> None:
        out[...] = 2.0 * ref[...]

    shape = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    return pl.pallas_call(double, out_shape=shape, interpret=True)(x.astype(jnp.bfloat16))


def _quantized(x: jax.Array) -> jax.Array:
    codes = jnp.round(x * 16).astype(jnp.int8)
    return jax.lax.dot(codes, jnp.eye(x.shape[-1], dtype=jnp.int8), preferred_element_type=jnp.int32) / 16


@jax.custom_vjp
def _until(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda y: jnp.max(y) < 9.0, lambda y: 1.5 * y, x)


_until.defvjp(lambda x: (_until(x), None), lambda _, g: (g,))
REFUSED: dict[str, tuple[Callable[[jax.Array], jax.Array], str]] = {
    "a kernel": (_kernel, "`pallas_call`"), "a quantized product": (_quantized, "int8 into `dot_general`"),
    "a callback": (
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, jnp.float32), x.astype(jnp.float32)),
        "`pure_callback`"),
    "a loop without a derivative": (lambda x: _until(x.astype(jnp.float32)), "`while`"),
    "captured dropout": (lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), "switch dropout off"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_float64_version_is_refused_by_name_and_line(name: str) -> None:
    between, words = REFUSED[name]
    refused(words, "test_lift.py", fn=lambda p, x: both(p, x, between))


def test_constants_have_the_width_that_they_have_for_the_user() -> None:
    """An angle of `linspace` would be of 64 bits in the search, where a carry of 32 bits beside it is refused."""

    def fn(p: Any, tokens: Any) -> jax.Array:
        angles = jnp.linspace(0.1, 1.0, D // 2)[:, None] * jnp.arange(tokens.shape[1])
        turned = jnp.sin(jnp.concatenate([angles, angles]).T)

        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            y = jax.nn.dot_product_attention(*(z[:, :, None] for z in (x * turned, x * turned, x)))
            return x + jax.nn.relu(y[:, :, 0] @ p["up"]) @ p["down"], None

        return jax.lax.scan(layer, jnp.asarray(p["embed"][tokens], jnp.float32), None, 2)[0]

    params = drawn({"embed": (11, D), "up": (D, 7), "down": (7, D)})
    assert go.discover(fn, params, TOKENS, "predictions", progress=False).gauges == [
        go.rescale({"up": "_ channel"}, {"down": "channel _"})]
