"""A small causal decoder from `flax.linen`'s own layers, and its gauges. Its tree is what a user of Linen has.

The leaves with their shapes, for a vocabulary of V tokens, width d, h heads of size e, and f hidden units:

    embed/embedding (V, d)    pos (max_len, d)
    blocks_{i}/norm1, norm2/{scale (d), bias (d)}
    blocks_{i}/attn/{query,key,value}/{kernel (d, h, e), bias (h, e)}
    blocks_{i}/attn/out/{kernel (h, e, d), bias (d)}
    blocks_{i}/up/{kernel (d, f), bias (f)}    blocks_{i}/down/{kernel (f, d), bias (d)}
    final_norm/{scale (d), bias (d)}    lm_head/{kernel (d, V), bias (V)}
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import gauge_optax as go


@dataclass(frozen=True)
class MHAConfig:
    """Sizes of the decoder. The size of a head is d_model / heads."""

    vocab: int = 256
    d_model: int = 64
    layers: int = 2
    heads: int = 4
    d_ff: int = 256
    max_len: int = 64


class Block(nn.Module):
    """A residual block: LayerNorm and multi-head attention, then LayerNorm and an MLP with a ReLU."""

    config: MHAConfig

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """The residual stream behind the block, (batch, time, d), from the stream in front of it."""
        c = self.config
        y = nn.LayerNorm(name="norm1")(x)
        x = x + nn.MultiHeadDotProductAttention(c.heads, name="attn")(y, mask=mask)
        y = nn.LayerNorm(name="norm2")(x)
        y = nn.relu(nn.Dense(c.d_ff, name="up")(y))
        return x + nn.Dense(c.d_model, name="down")(y)


class MHADecoder(nn.Module):
    """A causal decoder: tokens (batch, time) → logits (batch, time, vocab)."""

    config: MHAConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the next token, at every position."""
        c = self.config
        pos = self.param("pos", nn.initializers.normal(0.02), (c.max_len, c.d_model))
        x = nn.Embed(c.vocab, c.d_model, embedding_init=nn.initializers.normal(0.02), name="embed")(tokens)
        x = x + pos[: tokens.shape[1]]
        mask = nn.make_causal_mask(tokens)
        for i in range(c.layers):
            x = Block(c, name=f"blocks_{i}")(x, mask)
        x = nn.LayerNorm(name="final_norm")(x)
        return nn.Dense(c.vocab, name="lm_head")(x)


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the tokens tokens[:, 1:], given the logits that the model returns for tokens[:, :-1]."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def params_and_loss(config: MHAConfig, key: jax.Array) -> tuple[Any, Callable[[Any, jax.Array], jax.Array]]:
    """Returns the parameters, and the pure function loss(params, tokens) with tokens (batch, time + 1)."""
    model = MHADecoder(config)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens[:, :-1])
        return next_token_loss(logits, tokens)

    return model.init(key, jnp.zeros((1, config.max_len), jnp.int32))["params"], loss


def gauges(config: MHAConfig) -> list[go.Gauge]:
    """The gauges of norms' scales, of heads (queries and keys, values and outputs), of ReLU units, and of logits."""
    del config  # Models of all sizes have the same gauges. The argument is here because `models.lm.gauges` has it.
    attn, norm1, norm2 = "blocks_{i}/attn", "blocks_{i}/norm1", "blocks_{i}/norm2"

    def linear(module: str, kernel: str, bias: str) -> dict[str, str]:
        return {f"{module}/kernel": kernel, f"{module}/bias": bias}

    def norm(module: str) -> dict[str, str]:
        return {f"{module}/scale": "channel", f"{module}/bias": "channel"}

    projections = [f"{attn}/{name}" for name in ("query", "key", "value")]
    query, key, value = (linear(module, "_ head basis", "head basis") for module in projections)
    readers = {f"{module}/kernel": "channel _ _" for module in projections}
    up = linear("blocks_{i}/up", "_ channel", "channel")
    return [
        go.norm_scale(scale=norm(norm1), into=readers),
        go.norm_scale(scale=norm(norm2), into={"blocks_{i}/up/kernel": "channel _"}),
        go.norm_scale(scale=norm("final_norm"), into={"lm_head/kernel": "channel _"}),
        go.head_rotation(query | key),
        go.head_rotation(value | {f"{attn}/out/kernel": "head basis _"}),
        go.rescale(up=up, down={"blocks_{i}/down/kernel": "channel _"}),
        go.logit_shift(linear("lm_head", "_ vocab", "vocab")),
    ]
