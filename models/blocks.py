"""What the small transformers for studies share: blocks as nested dicts, with a norm before attention and MLP.

Tree of a block (d model, h heads, e = d / h, f hidden); the biases only where there are any:

    norm1/scale (d)    norm1/bias (d)                           norm2 alike
    attn/query/kernel (d, h, e)    key, value alike    out (h, e, d)
    mlp/up/kernel (d, f)   up/bias (f)   down/kernel (f, d)   down/bias (d)
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from models.lm import LINEAR_INIT

Params = Any
Kernel = Callable[..., jax.Array]
"""Draws a kernel: its shape, and as `inputs` how many of its axes, the first ones, are inputs; by default one."""


def lecun(keys: Iterator[jax.Array]) -> Kernel:
    """LeCun-normal kernels, each from the next key."""

    def kernel(*shape: int, inputs: int = 1) -> jax.Array:
        flat = math.prod(shape[:inputs]), math.prod(shape[inputs:])
        return LINEAR_INIT(next(keys), flat).reshape(shape)

    return kernel


def norm(d: int, bias: bool = True) -> Params:
    """The start of a norm."""
    return {"scale": jnp.ones(d)} | ({"bias": jnp.zeros(d)} if bias else {})


def init(kernel: Kernel, d: int, heads: int, f: int, bias: bool = True) -> Params:
    """The start of a block, whose kernels are drawn in the order of the tree."""

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
    """What attention without a mask adds to the stream at the positions `read`."""
    q, k, v = heads(attn, y)
    q = q[:, read]
    weights = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, attn["out"]["kernel"])
