"""Transformer blocks as nested dicts, which the small transformers for studies share.

A norm stands before attention, and another before the MLP.

The tree of a block, with leaves' shapes, for width d, h heads of size e = d / h, and f hidden units. The leaves called
`bias` exist only with `bias=True`. The leaves of norm2 are like those of norm1, and those of key and value like
query's.

    norm1/scale (d)    norm1/bias (d)    norm2/...
    attn/query/kernel (d, h, e)    attn/key/...    attn/value/...    attn/out/kernel (h, e, d)
    mlp/up/kernel (d, f)   mlp/up/bias (f)   mlp/down/kernel (f, d)   mlp/down/bias (d)
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from models.lm import LINEAR_INIT

Params = Any
Kernel = Callable[..., jax.Array]
"""kernel(*shape, inputs=1): draws a kernel of a shape, of whose axes the first `inputs` are summed over."""


def lecun(keys: Iterator[jax.Array]) -> Kernel:
    """Returns a function that draws LeCun-normal kernels. Every call takes the next key."""

    def kernel(*shape: int, inputs: int = 1) -> jax.Array:
        flat = math.prod(shape[:inputs]), math.prod(shape[inputs:])
        return LINEAR_INIT(next(keys), flat).reshape(shape)

    return kernel


def norm(d: int, bias: bool = True) -> Params:
    """The parameters of a norm at the start of training: scales of one, biases of zero."""
    return {"scale": jnp.ones(d)} | ({"bias": jnp.zeros(d)} if bias else {})


def init(kernel: Kernel, d: int, heads: int, f: int, bias: bool = True) -> Params:
    """The parameters of a block at the start of training. `kernel` draws its kernels, in the order of the tree."""

    def linear(inputs: int, outputs: int) -> Params:
        return {"kernel": kernel(inputs, outputs)} | ({"bias": jnp.zeros(outputs)} if bias else {})

    attn = {name: {"kernel": kernel(d, heads, d // heads)} for name in ("query", "key", "value")}
    return {
        "norm1": norm(d, bias),
        "attn": attn | {"out": {"kernel": kernel(heads, d // heads, d, inputs=2)}},
        "norm2": norm(d, bias),
        "mlp": {"up": linear(d, f), "down": linear(f, d)},
    }


def layer_norm(norm: Params, x: jax.Array) -> jax.Array:
    """LayerNorm over the last axis."""
    return jax.nn.standardize(x, epsilon=1e-5) * norm["scale"] + norm["bias"]


def heads(attn: Params, y: jax.Array) -> tuple[jax.Array, ...]:
    """Queries, keys and values, (batch, time, h, e)."""
    return tuple(jnp.einsum("btd,dhe->bthe", y, attn[name]["kernel"]) for name in ("query", "key", "value"))


def attention(attn: Params, y: jax.Array, read: slice = slice(None)) -> jax.Array:
    """The output of attention without a mask, for queries at the positions `read`. It is added to the stream there."""
    q, k, v = heads(attn, y)
    q = q[:, read]
    weights = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, attn["out"]["kernel"])
