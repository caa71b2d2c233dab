"""The grokking testbed: a small transformer that learns addition modulo a prime from pairs of numbers.

The leaves with their shapes, for p numbers, width d, h heads of size e, and f hidden units. The table of positions
exists only without `rope`. The leaves of norm2 are like those of norm1, and those of key and value like query's.

    embed/embedding (p, d)            pos/embedding (2, d)
    blocks/{i}/norm1/scale (d)        blocks/{i}/norm1/bias (d)             blocks/{i}/norm2/...
    blocks/{i}/attn/query/kernel (d, h, e)    attn/key/...    attn/value/...    attn/out/kernel (h, e, d)
    blocks/{i}/mlp/up/kernel (d, f)   mlp/up/bias (f)   mlp/down/kernel (f, d)   mlp/down/bias (d)
    lm_head/kernel (d, p)

With one block this is the network of Nanda et al. (2023) plus LayerNorms, as in DDC, C.11. The deeper networks have
rotary positions (`rope`). The paper's text names no activation and no initialisation; the biases of the MLP and the
usual initialisation are our choice.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from models import blocks
from models.lm import ACTIVATIONS, rotary

Params = Any
Pairs = tuple[jax.Array, jax.Array]
LENGTH = 2


@dataclass(frozen=True)
class GrokConfig:
    """Sizes and switches. `p` is the modulus, and `share` the share of all pairs of numbers to train on."""

    p: int = 113
    d_model: int = 128
    heads: int = 4
    d_ff: int = 512
    layers: int = 1
    mlp: Literal["relu", "relu2", "gelu"] = "relu"
    rope: bool = False
    share: float = 0.3


def init(c: GrokConfig, key: jax.Array) -> Params:
    """The parameters at the start of training, as a nested dict."""
    keys, d = iter(jax.random.split(key, 3 + 6 * c.layers)), c.d_model
    kernel = blocks.lecun(keys)
    params = {"embed": {"embedding": jax.random.normal(next(keys), (c.p, d)) * d**-0.5}}
    if not c.rope:
        params["pos"] = {"embedding": jax.random.normal(next(keys), (LENGTH, d)) * d**-0.5}
    return params | {
        "blocks": {i: blocks.init(kernel, d, c.heads, c.d_ff) for i in range(c.layers)},
        "lm_head": {"kernel": kernel(d, c.p)},
    }


def features(c: GrokConfig, params: Params, tokens: jax.Array) -> dict[str, jax.Array]:
    """Intermediate values at the last position: `hidden`, before the last activation; `streams`, behind each block.

    Args:
      c: the configuration.
      params: from `init`.
      tokens: pairs of numbers, (batch, 2).

    Returns:
      Arrays (batch, f) and (layers, batch, d). The first block's projections are computed once per number and position,
      and then looked up for all pairs, which costs less.
    """
    table = jnp.broadcast_to(params["embed"]["embedding"][:, None], (c.p, LENGTH, c.d_model))
    table = table if c.rope else table + params["pos"]["embedding"]

    def of_pairs(rows: jax.Array, places: range) -> jax.Array:
        # On a CPU, one gather per position is faster than one gather for all positions.
        return jnp.stack([rows[:, place][tokens[:, place]] for place in places], 1)

    everywhere = range(LENGTH)
    x, streams = table, []
    for i in range(c.layers):
        block, last = params["blocks"][i], i == c.layers - 1
        read = everywhere[-1:] if last else everywhere  # only the last position is used after the last block
        q, k, v = blocks.heads(block["attn"], blocks.layer_norm(block["norm1"], x))
        if c.rope:
            q, k = rotary(q), rotary(k)
        if i == 0:
            x, q, k, v = of_pairs(x, read), of_pairs(q, read), of_pairs(k, everywhere), of_pairs(v, everywhere)
        elif last:
            x, q = x[:, -1:], q[:, -1:]
        # Written as sums over a few numbers per pair: as products of matrices there would be thousands of tiny ones.
        scores = jnp.sum(q[:, :, None] * k[:, None], -1) * q.shape[-1] ** -0.5
        causal = jnp.tri(q.shape[1], LENGTH, LENGTH - q.shape[1], dtype=bool)[:, :, None]
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), 2)
        mixed = jnp.sum(weights[..., None] * v[:, None], 2)
        # Join the axes of pairs and positions. A separate axis of length 1 would cost a fifth of a step on a CPU.
        rows = (x + jnp.einsum("bqhe,hed->bqd", mixed, block["attn"]["out"]["kernel"])).reshape(-1, c.d_model)
        hidden = blocks.layer_norm(block["norm2"], rows) @ block["mlp"]["up"]["kernel"] + block["mlp"]["up"]["bias"]
        rows = rows + ACTIVATIONS[c.mlp](hidden) @ block["mlp"]["down"]["kernel"] + block["mlp"]["down"]["bias"]
        x = rows.reshape(x.shape)
        streams.append(x[:, -1])
    return {"hidden": hidden, "streams": jnp.stack(streams)}


def logits(c: GrokConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """The logits of the sum, (batch, p), for pairs of numbers (batch, 2)."""
    return features(c, params, tokens)["streams"][-1] @ params["lm_head"]["kernel"]


def loss(c: GrokConfig, params: Params, pairs: Pairs) -> jax.Array:
    """Mean cross-entropy of the sums."""
    tokens, sums = pairs
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(c, params, tokens), sums))


def accuracy(c: GrokConfig, params: Params, pairs: Pairs) -> jax.Array:
    """The share of pairs for which the largest logit is the right sum."""
    tokens, sums = pairs
    return jnp.mean(jnp.argmax(logits(c, params, tokens), -1) == sums)


def data(c: GrokConfig, seed: int) -> tuple[Pairs, Pairs]:
    """All pairs with their sums modulo p, divided at random into pairs to train on and pairs to test on."""
    order = np.random.default_rng(seed).permutation(c.p**2)
    tokens = np.stack(np.divmod(order, c.p), 1)
    sums, cut = tokens.sum(1) % c.p, round(c.share * c.p**2)
    train, test = (tokens[:cut], sums[:cut]), (tokens[cut:], sums[cut:])
    return (jnp.asarray(train[0]), jnp.asarray(train[1])), (jnp.asarray(test[0]), jnp.asarray(test[1]))


def gauges(c: GrokConfig, full_rotation: bool = False) -> list[go.Gauge]:
    """The gauges of DDC, C.11: of heads, the LayerNorm before the MLP, the MLP's units, and the shift of the logits.

    Args:
      c: the configuration. Units with a GELU have no gauge, because it is not homogeneous.
      full_rotation: see `rotations`.
    """
    up = {"blocks/{i}/mlp/up/kernel": "_ channel", "blocks/{i}/mlp/up/bias": "channel"}
    down = {"blocks/{i}/mlp/down/kernel": "channel _"}
    norm = {f"blocks/{{i}}/norm2/{name}": "channel" for name in ("scale", "bias")}
    return [
        go.norm_scale(norm, {"blocks/{i}/mlp/up/kernel": "channel _"}),
        *rotations(c, full_rotation),
        *([] if c.mlp == "gelu" else [go.rescale(up, down, degree=2 if c.mlp == "relu2" else 1)]),
        shift(),
    ]


def rotations(c: GrokConfig, full_rotation: bool = False) -> list[go.Gauge]:
    """The gauges of heads: one of queries and keys, and one of values and outputs.

    Args:
      c: the configuration.
      full_rotation: whether to use all rotations of O(d_h) for queries and keys although positions are rotary. This is
        the paper's control experiment: with rotary positions, only rotations of the planes are a symmetry.
    """
    queries = {f"blocks/{{i}}/attn/{name}/kernel": "_ head basis" for name in ("query", "key")}
    values = {"blocks/{i}/attn/value/kernel": "_ head basis", "blocks/{i}/attn/out/kernel": "head basis _"}
    of_queries = go.head_rotation if full_rotation or not c.rope else go.rope_torus
    return [of_queries(queries), go.head_rotation(values)]


def shift() -> go.Gauge:
    """The gauge that adds one number to all logits, through the head's kernel."""
    return go.logit_shift({"lm_head/kernel": "_ vocab"})
