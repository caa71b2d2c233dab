"""A transformer block with multi-head latent attention, gated head outputs and experts.

The leaves with their shapes, for width d; q and c latent features of queries and of keys and values; h heads; per head
n entries of queries and keys without rotary, r entries with rotary, and v entries of values; E experts of f units each:

    norm1/scale (d)      attn/q_a/kernel (d, q)         attn/q_norm/scale (q)    attn/q_b/kernel (q, h, n+r)
                         attn/kv_a/kernel (d, c+r)      attn/kv_norm/scale (c)   attn/kv_b/kernel (c, h, n+v)
                         attn/gate/kernel (d, h, v)     attn/out/kernel (h, v, d)
    norm2/scale (d)      moe/router/kernel (d, E)       moe/gate (E, d, f)   moe/up (E, d, f)   moe/down (E, f, d)

With `fused`, heads and entries are one axis of a kernel, as in released checkpoints, and moe/gate and moe/up are one
leaf moe/gate_up (E, d, 2f). All heads share the rotary part of the keys, which is the last r outputs of kv_a
(DeepSeek-V2, section 2.1). The gate multiplies every entry of the heads' outputs by a sigmoid. Therefore values and
outputs do not have all of GL(v) as a symmetry, but only one scale per entry.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import gauge_optax as go
from models.lm import NORM_EPS, rotary

Params = Any


@dataclass(frozen=True)
class LatentConfig:
    """Sizes, in the order of the module's docstring. With `gated`, attention has the gate attn/gate."""

    d_model: int = 8
    heads: int = 2
    q_latent: int = 7
    kv_latent: int = 6
    entries: int = 3
    rotary: int = 2
    values: int = 4
    experts: int = 3
    d_ff: int = 5
    gated: bool = True
    fused: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Leaf path → shape."""
        c, d, h = self, self.d_model, self.heads
        heads = {"q_b": (c.q_latent, h, c.entries + c.rotary), "kv_b": (c.kv_latent, h, c.entries + c.values)}
        heads |= {"gate": (d, h, c.values)} if c.gated else {}
        shapes: dict[str, tuple[int, ...]] = {
            f"attn/{name}/kernel": (rows, n * size) if c.fused else (rows, n, size)
            for name, (rows, n, size) in heads.items()
        }
        shapes["attn/out/kernel"] = (h * c.values, d) if c.fused else (h, c.values, d)
        kernels = {"moe/gate_up": (c.experts, d, 2 * c.d_ff)} if c.fused else {
            "moe/gate": (c.experts, d, c.d_ff), "moe/up": (c.experts, d, c.d_ff),
        }
        return shapes | kernels | {
            "norm1/scale": (d,), "norm2/scale": (d,), "attn/q_norm/scale": (c.q_latent,),
            "attn/kv_norm/scale": (c.kv_latent,), "attn/q_a/kernel": (d, c.q_latent),
            "attn/kv_a/kernel": (d, c.kv_latent + c.rotary), "moe/router/kernel": (d, c.experts),
            "moe/down": (c.experts, c.d_ff, d),
        }


def _rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + NORM_EPS) * scale


def _by_head(c: LatentConfig, kernel: jax.Array) -> jax.Array:
    """The kernel with the axes (inputs, heads, entries), whether it is stored fused or not."""
    return kernel.reshape(kernel.shape[0], c.heads, -1)


def logits_and_values(c: LatentConfig, params: Params, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The attention logits before the causal mask, and the values.

    Args:
      c: the configuration.
      params: the block's parameters.
      y: the output of the first norm, (batch, time, d).

    Returns:
      Logits (batch, heads, time of the query, time of the key), and values (batch, time, heads, v).
    """
    attn = params["attn"]
    heads = {name: _by_head(c, attn[name]["kernel"]) for name in ("q_b", "kv_b")}
    query = jnp.einsum("btq,qhe->bthe", _rms(y @ attn["q_a"]["kernel"], attn["q_norm"]["scale"]), heads["q_b"])
    latent, shared = jnp.split(y @ attn["kv_a"]["kernel"], [c.kv_latent], -1)
    both = jnp.einsum("btc,che->bthe", _rms(latent, attn["kv_norm"]["scale"]), heads["kv_b"])
    key, value = jnp.split(both, [c.entries], -1)
    plain, turned = jnp.split(query, [c.entries], -1)
    scores = jnp.einsum("bthe,bshe->bhts", plain, key)
    scores += jnp.einsum("bthe,bse->bhts", rotary(turned), rotary(shared[:, :, None])[:, :, 0])
    return scores * query.shape[-1] ** -0.5, value


def outputs(c: LatentConfig, params: Params, x: jax.Array) -> jax.Array:
    """The block's outputs for a stream of (batch, time, d)."""
    attn, moe = params["attn"], params["moe"]
    y = _rms(x, params["norm1"]["scale"])
    scores, value = logits_and_values(c, params, y)
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores), value)
    if c.gated:
        mixed *= jax.nn.sigmoid(jnp.einsum("btd,dhe->bthe", y, _by_head(c, attn["gate"]["kernel"])))
    x += jnp.einsum("bthe,hed->btd", mixed, attn["out"]["kernel"].reshape(c.heads, c.values, -1))
    y = _rms(x, params["norm2"]["scale"])
    gate, up = jnp.split(moe["gate_up"], 2, -1) if c.fused else (moe["gate"], moe["up"])
    units = jax.nn.silu(jnp.einsum("btd,edf->btef", y, gate)) * jnp.einsum("btd,edf->btef", y, up)
    weights = jax.nn.softmax(y @ moe["router"]["kernel"])
    return x + jnp.einsum("bte,btef,efd->btd", weights, units, moe["down"])


def gauges(c: LatentConfig, linear: bool = True) -> list[go.Gauge]:
    """The gauges of norms' scales, of heads (entries without and with rotary, values), of experts, and of their router.

    Args:
      c: the configuration.
      linear: whether a head's gauge has all invertible matrices (GL) as its elements, and not only rotations.
    """
    of_heads = go.head_linear if linear else _rotation
    attn, sizes = "attn/{}/kernel".format, {"head": c.heads} if c.fused else None
    per_row = "channel _" if c.fused else "channel _ _"

    def entries(name: str, start: int, stop: int) -> str:
        """The axes string for entries `start` to `stop` of each head of a kernel (inputs, heads, entries)."""
        axes = f"head {name}={start}:{stop}"
        return f"_ ({axes})" if c.fused else f"_ {axes}"

    def values(name: str) -> tuple[dict[str, str], dict[str, str]]:
        """The two arguments of a gauge of values and outputs: the blocks of values, and those of outputs."""
        side = {attn("kv_b"): entries(name, c.entries, c.entries + c.values)}
        return side, {attn("out"): f"(head {name}) _" if c.fused else f"head {name} _"}

    plain = entries("basis", 0, c.entries)
    first = {attn("q_a"): "channel _", attn("kv_a"): "channel _"} | ({attn("gate"): per_row} if c.gated else {})
    second = {f"moe/{name}": "_ channel _" for name in (("gate_up",) if c.fused else ("gate", "up"))}
    units = {"moe/gate_up": "expert _ (part=1 channel)"} if c.fused else {"moe/up": "expert _ channel"}
    return [
        go.norm_scale({"norm1/scale": "channel"}, first),
        go.norm_scale({"attn/q_norm/scale": "channel"}, {attn("q_b"): per_row}),
        go.norm_scale({"attn/kv_norm/scale": "channel"}, {attn("kv_b"): per_row}),
        of_heads({attn("q_b"): plain}, {attn("kv_b"): plain}, sizes=sizes),
        _rotary_gauge(c),
        (go.rescale if c.gated else of_heads)(*values("channel" if c.gated else "basis"), sizes=sizes),
        go.norm_scale({"norm2/scale": "channel"}, second | {"moe/router/kernel": "channel _"}),
        go.rescale(units, {"moe/down": "expert channel _"}, sizes={"part": 2} if c.fused else None),
        go.logit_shift({"moe/router/kernel": "_ vocab"}),
    ]


def _rotation(left: dict[str, str], right: dict[str, str], sizes: dict[str, int] | None) -> go.Gauge:
    return go.head_rotation(left | right, sizes=sizes)


def _rotary_gauge(c: LatentConfig) -> go.Gauge:
    """One torus for all heads, because they share the rotary key."""
    part, width = f"basis={c.entries}:{c.entries + c.rotary}", c.kv_latent + c.rotary
    query = tuple(f"_ (query={n} {part})" for n in range(c.heads)) if c.fused else f"_ _ {part}"
    blocks = {"attn/q_b/kernel": query, "attn/kv_a/kernel": f"_ basis={c.kv_latent}:{width}"}
    return go.rope_torus(blocks, sizes={"query": c.heads} if c.fused else None)


def muon_labels(c: LatentConfig) -> dict[str, str]:
    """Axes for Muon's matrices that no gauge binds: the gate has one matrix per head, `moe/gate` one per expert.

    Muon orthogonalizes each matrix by itself, and learns from gauges which axes of a leaf count matrices.
    """
    gate = {"attn/gate/kernel": "_ (head _)" if c.fused else "_ head _"} if c.gated else {}
    return gate if c.fused else gate | {"moe/gate": "expert _ _"}


def qk_clip(c: LatentConfig) -> tuple[go.Gauge, dict[str, str]]:
    """Arguments with which `go.orbit.hold_products` bounds the logits of every head (QK-clip).

    A head's logits are a sum of two products. To scale the product without rotary, queries and keys are both multiplied
    by the square root of the factor. All heads share the rotary key, so that in the other product the queries alone are
    multiplied, by the whole factor.

    Args:
      c: the configuration.

    Returns:
      The arguments `gauges` and `alone`.
    """
    sizes = {"head": c.heads} if c.fused else None

    def part(start: int, stop: int) -> str:
        return f"_ (head _={start}:{stop})" if c.fused else f"_ head _={start}:{stop}"

    query, key = "attn/q_b/kernel", "attn/kv_b/kernel"
    gauge = go.multiplier_balance({query: part(0, c.entries)}, {key: part(0, c.entries)}, sizes=sizes)
    return gauge, {query: part(c.entries, c.entries + c.rotary)}
