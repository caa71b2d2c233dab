"""A vision transformer for small images, and its gauges.

Tree (d model, h heads, e = d_head, f hidden, k classes, t patches of s numbers each):

    embed/kernel (s, d)    embed/bias (d)    pos/embedding (t, d)
    blocks/{i}/norm1/scale (d)        blocks/{i}/norm1/bias (d)             norm2, final_norm alike
    blocks/{i}/attn/query/kernel (d, h, e)    key, value alike    out (h, e, d)
    blocks/{i}/mlp/up/kernel (d, f)   up/bias (f)   down/kernel (f, d)   down/bias (d)
    head/kernel (d, k)     head/bias (k)

LayerNorm before each block, squared ReLU, the mean over patches before the head.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import gauge_optax as go
from models.lm import LINEAR_INIT

Params = Any


@dataclass(frozen=True)
class ViTConfig:
    """Sizes. Images are (side, side, channels), patches (patch, patch)."""

    side: int = 8
    patch: int = 2
    channels: int = 1
    classes: int = 10
    d_model: int = 32
    depth: int = 2
    heads: int = 4
    d_ff: int = 128

    @property
    def patches(self) -> int:
        """How many patches an image has."""
        return (self.side // self.patch) ** 2


def init(c: ViTConfig, key: jax.Array) -> Params:
    """Parameters as a nested dict."""
    keys = iter(jax.random.split(key, 3 + 6 * c.depth))
    d, e = c.d_model, c.d_model // c.heads

    def kernel(*shape: int, inputs: int = 1) -> jax.Array:
        flat = math.prod(shape[:inputs]), math.prod(shape[inputs:])
        return LINEAR_INIT(next(keys), flat).reshape(shape)

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(d), "bias": jnp.zeros(d)}

    def block() -> dict[str, Any]:
        heads = {name: {"kernel": kernel(d, c.heads, e)} for name in ("query", "key", "value")}
        return {
            "norm1": norm(),
            "attn": heads | {"out": {"kernel": kernel(c.heads, e, d, inputs=2)}},
            "norm2": norm(),
            "mlp": {
                "up": {"kernel": kernel(d, c.d_ff), "bias": jnp.zeros(c.d_ff)},
                "down": {"kernel": kernel(c.d_ff, d), "bias": jnp.zeros(d)},
            },
        }

    return {
        "embed": {"kernel": kernel(c.patch**2 * c.channels, d), "bias": jnp.zeros(d)},
        "pos": {"embedding": 0.02 * jax.random.normal(next(keys), (c.patches, d))},
        "blocks": {i: block() for i in range(c.depth)},
        "final_norm": norm(),
        "head": {"kernel": kernel(d, c.classes), "bias": jnp.zeros(c.classes)},
    }


def features(c: ViTConfig, params: Params, images: jax.Array) -> dict[str, jax.Array]:
    """The activations that a study reads.

    Args:
      c: the configuration.
      params: from `init`.
      images: (batch, side, side, channels).

    Returns:
      `hidden`, before the activations of all blocks, (depth, batch, patches, f), and the residual `stream` behind the
      last block, (batch, patches, d).
    """
    rows = c.side // c.patch
    cut = images.reshape(-1, rows, c.patch, rows, c.patch, c.channels).swapaxes(2, 3)
    x = cut.reshape(len(images), c.patches, -1) @ params["embed"]["kernel"] + params["embed"]["bias"]
    x, hidden = x + params["pos"]["embedding"], []
    for i in range(c.depth):
        block = params["blocks"][i]
        y, attn, mlp = _normalised(block["norm1"], x), block["attn"], block["mlp"]
        q, k, v = (jnp.einsum("btd,dhe->bthe", y, attn[name]["kernel"]) for name in ("query", "key", "value"))
        weights = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5)
        x = x + jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, attn["out"]["kernel"])
        hidden.append(_normalised(block["norm2"], x) @ mlp["up"]["kernel"] + mlp["up"]["bias"])
        x = x + jnp.square(jax.nn.relu(hidden[-1])) @ mlp["down"]["kernel"] + mlp["down"]["bias"]
    return {"hidden": jnp.stack(hidden), "stream": x}


def logits(c: ViTConfig, params: Params, images: jax.Array) -> jax.Array:
    """(batch, side, side, channels) to (batch, classes)."""
    pooled = jnp.mean(_normalised(params["final_norm"], features(c, params, images)["stream"]), 1)
    return pooled @ params["head"]["kernel"] + params["head"]["bias"]


def multiplicative_gauges() -> list[go.Gauge]:
    """The gauges of DDC, C.10: the scales of LayerNorms, and the units of the feed-forward blocks."""
    readers = {f"blocks/{{i}}/attn/{name}/kernel": "channel _ _" for name in ("query", "key", "value")}

    def norm(path: str) -> dict[str, str]:
        return {f"{path}/{name}": "channel" for name in ("scale", "bias")}

    return [
        go.norm_scale(norm("blocks/{i}/norm1"), readers),
        go.norm_scale(norm("blocks/{i}/norm2"), {"blocks/{i}/mlp/up/kernel": "channel _"}),
        go.norm_scale(norm("final_norm"), {"head/kernel": "channel _"}),
        go.rescale(
            {"blocks/{i}/mlp/up/kernel": "_ channel", "blocks/{i}/mlp/up/bias": "channel"},
            {"blocks/{i}/mlp/down/kernel": "channel _"}, degree=2,
        ),
    ]


def _normalised(norm: Params, x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5) * norm["scale"] + norm["bias"]
