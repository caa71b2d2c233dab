"""The network of arXiv 2608.05136 for addition modulo a prime.

Its input has three tokens: two numbers and an equals sign. The sum is predicted at the equals sign. The network has no
causal mask; it has RMSNorms, and SiLU as its activation. The leaves with their shapes, for p numbers and width d; the
blocks are those of `models/blocks.py`, without biases:

    embed/embedding (p + 1, d)    pos/embedding (3, d)    blocks/{i}    norm/scale (d)    lm_head/kernel (d, p)
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import gauge_optax as go
from models import blocks

Params = Any


@dataclass(frozen=True)
class ModularConfig:
    """Sizes. The defaults are those of the paper."""

    modulus: int = 47
    width: int = 64
    heads: int = 4
    blocks: int = 2


def init(c: ModularConfig, key: jax.Array) -> Params:
    """The parameters at the start of training.

    Kernels are uniform in ±1/√inputs, embeddings normal with standard deviation 1, positions normal with 0.02.
    """
    keys, d = iter(jax.random.split(key, 3 + 6 * c.blocks)), c.width

    def kernel(*shape: int, inputs: int = 1) -> jax.Array:
        bound = math.prod(shape[:inputs]) ** -0.5
        return jax.random.uniform(next(keys), shape, minval=-bound, maxval=bound)

    return {
        "embed": {"embedding": jax.random.normal(next(keys), (c.modulus + 1, d))},
        "pos": {"embedding": 0.02 * jax.random.normal(next(keys), (3, d))},
        "blocks": {i: blocks.init(kernel, d, c.heads, 4 * d, bias=False) for i in range(c.blocks)},
        "norm": blocks.norm(d, bias=False),
        "lm_head": {"kernel": kernel(d, c.modulus)},
    }


def logits(c: ModularConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """The logits of the sum, (pairs, modulus), at the last position of tokens (pairs, 3)."""
    x = params["embed"]["embedding"][tokens] + params["pos"]["embedding"]
    for i, block in params["blocks"].items():
        read = slice(-1, None) if i == c.blocks - 1 else slice(None)
        mixed = blocks.attention(block["attn"], rms_norm(block["norm1"], x), read)
        x = x[:, read] + mixed
        hidden = jax.nn.silu(rms_norm(block["norm2"], x) @ block["mlp"]["up"]["kernel"])
        x = x + hidden @ block["mlp"]["down"]["kernel"]
    return rms_norm(params["norm"], x[:, 0]) @ params["lm_head"]["kernel"]


def rms_norm(norm: Params, x: jax.Array) -> jax.Array:
    """RMSNorm over the last axis, without eps."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * norm["scale"]


def gauges() -> list[go.Gauge]:
    """The gauges of heads, norms' scales and logits.

    The first is the one that the paper studies, and the last is the shift of the logits.
    """
    bases = {name: f"blocks/{{i}}/attn/{name}/kernel" for name in ("query", "key", "value", "out")}
    readers = {bases[name]: "channel _ _" for name in ("query", "key", "value")}
    return [
        go.head_rotation({bases["query"]: "_ head basis", bases["key"]: "_ head basis"}),
        go.head_rotation({bases["value"]: "_ head basis", bases["out"]: "head basis _"}),
        go.norm_scale({"blocks/{i}/norm1/scale": "channel"}, readers),
        go.norm_scale({"blocks/{i}/norm2/scale": "channel"}, {"blocks/{i}/mlp/up/kernel": "channel _"}),
        go.norm_scale({"norm/scale": "channel"}, {"lm_head/kernel": "channel _"}),
        go.logit_shift({"lm_head/kernel": "_ vocab"}),
    ]
