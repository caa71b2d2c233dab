"""A vision transformer for small images, and its gauges.

Tree (d model, h heads, e = d_head, f hidden, k classes, t patches of s numbers each):

    embed/kernel (s, d)    embed/bias (d)    pos/embedding (t, d)
    blocks/{i}/norm1/scale (d)        blocks/{i}/norm1/bias (d)             norm2, final_norm alike
    blocks/{i}/attn/query/kernel (d, h, e)    key, value alike    out (h, e, d)
    blocks/{i}/mlp/up/kernel (d, f)   up/bias (f)   down/kernel (f, d)   down/bias (d)
    head/kernel (d, k)     head/bias (k)

LayerNorm before each block, squared ReLU, the mean over patches before the head.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import gauge_optax as go
from models import blocks

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
    keys, d = iter(jax.random.split(key, 3 + 6 * c.depth)), c.d_model
    kernel = blocks.lecun(keys)
    return {
        "embed": {"kernel": kernel(c.patch**2 * c.channels, d), "bias": jnp.zeros(d)},
        "pos": {"embedding": 0.02 * jax.random.normal(next(keys), (c.patches, d))},
        "blocks": {i: blocks.init(kernel, d, c.heads, c.d_ff) for i in range(c.depth)},
        "final_norm": blocks.norm(d),
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
        mlp = block["mlp"]
        x = x + blocks.attention(block["attn"], blocks.layer_norm(block["norm1"], x))
        hidden.append(blocks.layer_norm(block["norm2"], x) @ mlp["up"]["kernel"] + mlp["up"]["bias"])
        x = x + jnp.square(jax.nn.relu(hidden[-1])) @ mlp["down"]["kernel"] + mlp["down"]["bias"]
    return {"hidden": jnp.stack(hidden), "stream": x}


def logits(c: ViTConfig, params: Params, images: jax.Array) -> jax.Array:
    """(batch, side, side, channels) to (batch, classes)."""
    pooled = jnp.mean(blocks.layer_norm(params["final_norm"], features(c, params, images)["stream"]), 1)
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
