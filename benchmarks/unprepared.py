"""Tests `go.discover` on ten models that were not written for it, and times training steps with the gauges it finds.

    python -m benchmarks.unprepared                # or some of them: `... --only "MLP-Mixer"`

Each model is written as users of its library write models, without any code for gauges. A step is the gradient of a
loss and the update. AdamW, `quotient_adamw` with `report.gauges` and `quotient_adamw` with `report.whole` are timed in
turns.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gauge_optax as go
from benchmarks.discover_times import Arguments, of_equinox
from benchmarks.timing import Timed, benchmark, host, in_turns, prepared, quartiles
from examples.studies import harness
from examples.studies.report import bare

D, HEADS, LAYERS, VOCAB, TIME, BATCH, CLASSES = 256, 4, 2, 1024, 64, 16, 10
ROUNDS = 15
TOKENS = list(np.random.default_rng(0).integers(0, VOCAB, (2, BATCH, TIME)))
IMAGES = list(np.random.default_rng(1).standard_normal((2, BATCH, 16, 16, 3), np.float32))
VECTORS = list(np.random.default_rng(2).standard_normal((2, BATCH, TIME, D), np.float32))


def _kernel(*shape: int, fan: int = D) -> jax.Array:
    rng = np.random.default_rng([len(shape), *shape])
    return jnp.asarray(rng.standard_normal(shape) / fan**0.5, jnp.float32)


def _rms(x: jax.Array, scale: Any = 1.0) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


class Block(nnx.Module):
    """A transformer block of Flax's own layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(D, rngs=rngs), nnx.LayerNorm(D, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, D, rngs=rngs, decode=False)
        self.up, self.down = nnx.Linear(D, 4 * D, rngs=rngs), nnx.Linear(4 * D, D, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """The residual stream behind the block, (batch, time, d)."""
        x = x + self.attn(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """A GPT in NNX, tokens (batch, time) → logits, with learned positions and a tied head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.pos = nnx.Embed(VOCAB, D, rngs=rngs), nnx.Embed(TIME, D, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(D, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits (batch, time, vocab)."""
        x, mask = self.embed(tokens) + self.pos(jnp.arange(TIME)), nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


def nnx_gpt() -> Arguments:
    """The GPT in NNX."""
    graph, params = nnx.split(GPT(nnx.Rngs(0)))
    return Arguments(lambda p, tokens: nnx.merge(graph, p)(tokens), nnx.to_pure_dict(params), TOKENS)


class LlamaBlock(nnx.Module):
    """A block of a Llama: rotary embeddings, grouped queries, QK-norm, SwiGLU."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.RMSNorm(D, rngs=rngs), nnx.RMSNorm(D, rngs=rngs)
        e, linear = D // HEADS, nnx.LinearGeneral
        self.q = linear(D, (HEADS, e), use_bias=False, rngs=rngs)
        self.k, self.v = (linear(D, (HEADS // 2, e), use_bias=False, rngs=rngs) for _ in range(2))
        self.q_norm, self.k_norm = nnx.RMSNorm(e, rngs=rngs), nnx.RMSNorm(e, rngs=rngs)
        self.o = linear((HEADS, e), D, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.gate, self.up = (nnx.Linear(D, 2 * D, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(2 * D, D, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The residual stream behind the block, (batch, time, d)."""
        y = self.norm1(x)
        q, k = _turned(self.q_norm(self.q(y))), _turned(self.k_norm(self.k(y)))
        x = x + self.o(jax.nn.dot_product_attention(q, k, self.v(y), is_causal=True))
        y = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


def _turned(x: jax.Array) -> jax.Array:
    """Applies rotary embeddings to queries or keys (batch, time, head, entry)."""
    angles = jnp.arange(x.shape[1])[:, None, None] * 10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2)
    one, other = jnp.split(x, 2, -1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([one * cosine - other * sine, one * sine + other * cosine], -1)


class Llama(nnx.Module):
    """A language model like Qwen3, whose layers are stacked and scanned."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, D, rngs=rngs)
        self.blocks = nnx.vmap(LlamaBlock, in_axes=0, out_axes=0)(rngs.fork(split=LAYERS))
        self.norm, self.head = nnx.RMSNorm(D, rngs=rngs), nnx.Linear(D, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits (batch, time, vocab)."""
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(self.norm(run(self.embed(tokens), self.blocks)))


def nnx_llama() -> Arguments:
    """The Llama in NNX, with QK-norm and scanned layers."""
    graph, params, *rest = nnx.split(Llama(nnx.Rngs(0)), nnx.Param, ...)
    return Arguments(lambda p, t: nnx.merge(graph, p, *rest, copy=True)(t), nnx.to_pure_dict(params), TOKENS)


class ViT(nn.Module):
    """A vision transformer in Linen: images → logits of classes."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits (batch, class)."""
        x = nn.Conv(D, (4, 4), 4)(images).reshape(len(images), -1, D)
        x = x + self.param("pos", nn.initializers.normal(0.1), x.shape[1:])
        for _ in range(LAYERS):
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
            x = x + nn.Dense(D)(nn.gelu(nn.Dense(4 * D)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(jnp.mean(nn.LayerNorm()(x), 1))


def linen_vit() -> Arguments:
    """The vision transformer in Linen."""
    params = ViT().init(jax.random.key(0), IMAGES[0])["params"]
    return Arguments(lambda p, x: ViT().apply({"params": p}, x), params, IMAGES, "logits")


def _equinox(module: Any, batches: list[Any]) -> Arguments:
    arrays, rest = eqx.partition(module, eqx.is_inexact_array)
    return Arguments(lambda p, x: jax.vmap(eqx.combine(p, rest))(x), arrays, batches, "logits")


class Mixer(eqx.Module):
    """One block of an MLP-Mixer in Equinox: (time, d) → logits of classes."""

    norms: list[eqx.nn.LayerNorm]
    over_time: eqx.nn.MLP
    over_channels: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D)]
        self.over_time = eqx.nn.MLP(TIME, TIME, 2 * TIME, 1, key=keys[0])
        self.over_channels = eqx.nn.MLP(D, D, 4 * D, 1, key=keys[1])
        self.head = eqx.nn.Linear(D, CLASSES, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits (class,)."""
        x = x + jax.vmap(self.over_time, 1, 1)(jax.vmap(self.norms[0])(x))
        x = x + jax.vmap(self.over_channels)(jax.vmap(self.norms[1])(x))
        return self.head(jnp.mean(x, 0))


class CNN(nnx.Module):
    """A CNN in NNX, with BatchNorms in training mode."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        pairs = list(itertools.pairwise(widths := (3, 64, 128)))
        self.convs = nnx.List([nnx.Conv(a, b, (3, 3), use_bias=False, rngs=rngs) for a, b in pairs])
        self.norms = nnx.List([nnx.BatchNorm(b, rngs=rngs) for _, b in pairs])
        self.head = nnx.Linear(widths[-1], CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits (batch, class)."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.avg_pool(nnx.relu(norm(conv(x))), (2, 2), (2, 2))
        return self.head(jnp.mean(x, (1, 2)))


def nnx_cnn() -> Arguments:
    """The CNN in NNX, with BatchNorms in training mode."""
    graph, params, *rest = nnx.split(CNN(nnx.Rngs(0)), nnx.Param, ...)
    return Arguments(lambda p, x: nnx.merge(graph, p, *rest, copy=True)(x), nnx.to_pure_dict(params), IMAGES, "logits")


def flow() -> Arguments:
    """A velocity field of a flow model. The time determines scales and shifts behind its norms (adaLN)."""
    params = {"in": _kernel(D, D), "time": _kernel(16, 3 * D, fan=16), "bias": jnp.zeros(3 * D), "out": _kernel(D, D),
              "up": _kernel(D, 4 * D), "down": _kernel(4 * D, D, fan=4 * D)}

    def fn(p: Any, batch: Any) -> jax.Array:
        x, c = batch[0] @ p["in"], jax.nn.silu(batch[1]) @ p["time"] + p["bias"]
        shift, scale, gate = jnp.split(c[:, None], 3, -1)
        y = (x - jnp.mean(x, -1, keepdims=True)) / (jnp.std(x, -1, keepdims=True) + 1e-6)
        return (x + gate * (jax.nn.gelu((y * (1 + scale) + shift) @ p["up"]) @ p["down"])) @ p["out"]

    times = np.random.default_rng(3).standard_normal((2, BATCH, 16), np.float32)
    return Arguments(fn, params, list(zip(VECTORS, times, strict=True)), "predictions")


def experts() -> Arguments:
    """A mixture of four experts, of which each token uses two."""
    params = {"embed": _kernel(VOCAB, D, fan=1), "scale": jnp.ones(D), "router": _kernel(D, 4),
              "gate": _kernel(4, D, D), "up": _kernel(4, D, D), "down": _kernel(4, D, D), "head": _kernel(D, VOCAB)}

    def fn(p: Any, tokens: Any) -> jax.Array:
        x = p["embed"][tokens]
        y = _rms(x, p["scale"])
        best, chosen = jax.lax.top_k(y @ p["router"], 2)
        share = jnp.einsum("btkn,btk->btn", jax.nn.one_hot(chosen, 4), jax.nn.softmax(best))
        hidden = jax.nn.silu(jnp.einsum("btd,ndf->btnf", y, p["gate"])) * jnp.einsum("btd,ndf->btnf", y, p["up"])
        return (x + jnp.einsum("btnf,nfd,btn->btd", hidden, p["down"], share)) @ p["head"]

    return Arguments(fn, params, TOKENS)


def gru() -> Arguments:
    """Flax's GRU over tokens."""
    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            return nn.Dense(VOCAB)(nn.RNN(nn.GRUCell(D))(nn.Embed(VOCAB, D)(tokens)))

    params = Net().init(jax.random.key(0), TOKENS[0])["params"]
    return Arguments(lambda p, t: Net().apply({"params": p}, t), params, TOKENS)


def ssm() -> Arguments:
    """A diagonal state-space layer, as in S4D, between two linear maps, with a gate."""
    params = {"embed": _kernel(VOCAB, D, fan=1), "scale": jnp.ones(D), "in": _kernel(D, 2 * D), "out": _kernel(D, D),
              "decay": jnp.linspace(1, 3, D), "b": _kernel(D, fan=1), "head": _kernel(D, VOCAB)}

    def fn(p: Any, tokens: Any) -> jax.Array:
        x = p["embed"][tokens]
        u, gate = jnp.split(_rms(x, p["scale"]) @ p["in"], 2, -1)

        def step(h: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jax.nn.sigmoid(p["decay"]) * h + p["b"] * u
            return h, h

        _, states = jax.lax.scan(step, jnp.zeros_like(u[:, 0]), jnp.swapaxes(u, 0, 1))
        return (x + (jnp.swapaxes(states, 0, 1) * jax.nn.silu(gate)) @ p["out"]) @ p["head"]

    return Arguments(fn, params, TOKENS)


MODELS: Mapping[str, Callable[[], Arguments]] = {
    "NNX GPT": nnx_gpt, "NNX Llama with QK-norm, scanned": nnx_llama, "Linen ViT": linen_vit,
    "equinox transformer": lambda: _equinox(of_equinox(D, VOCAB).params, TOKENS),
    "equinox MLP-Mixer": lambda: _equinox(Mixer(jax.random.key(0)), VECTORS), "NNX CNN with BatchNorm": nnx_cnn,
    "adaLN flow": flow, "mixture of experts": experts, "GRU": gru, "SSM": ssm,
}


def measured(name: str) -> dict[str, Any]:
    """Makes the row of one model: its two lists of gauges, and the time of steps with each, divided by AdamW's."""
    model = MODELS[name]()
    began = time.perf_counter()
    report = go.discover(model.fn, model.params, model.batches, model.outputs, progress=False)
    seconds = round(time.perf_counter() - began, 1)
    row: dict[str, Any] = {
        "seconds": seconds, "gauges": [g.name for g in report.gauges], "whole": [g.name for g in report.whole],
        "ungauged": sorted(report.ungauged), "rejected": list(report.rejected),
        "neurons": len(report.neurons), "matrices": len(report.matrices),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.square(model.fn(params, batch)))

    arms = {
        "AdamW": optax.adamw(1e-3), "gauges": go.quotient_adamw(1e-3, report.gauges),
        "whole": go.quotient_adamw(1e-3, report.whole),
    }
    updates: dict[str, Timed] = {arm: prepared(tx, model.params, model.batches[0], loss) for arm, tx in arms.items()}
    in_turns(updates, model.batches[0], ROUNDS)
    base = updates["AdamW"]
    row["AdamW ms"] = round(1e3 * float(np.median(base.seconds)), 2)
    return row | {arm + " step": [round(x, 3) for x in quartiles(updates[arm], base)] for arm in ("gauges", "whole")}


def make(c: Any, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Makes the row of one model, and then frees its compiled programs."""
    row = measured(name)
    jax.clear_caches()
    return row


def render(result: dict[str, Any]) -> str:
    """The results as a Markdown page."""
    lines = [
        "# Ten models that nobody prepared", "",
        "What `go.discover` finds in models as their libraries' users write them, and what a training step costs with",
        "`quotient_adamw` on the list for training and on the whole list (`python -m benchmarks.unprepared`).", "",
        f"{result['host']}; d = {D}, {LAYERS} layers, {BATCH} rows of {TIME} tokens. A step is the gradient and the",
        f"update, in units of AdamW's: the median of {ROUNDS} rounds in turns, with quartiles.", "",
    ]
    rows: list[list[Any]] = [["model", "discover, s", "gauges", "whole list", "without a gauge", "neurons",
                              "Muon's matrices", "AdamW, ms", "gauges' step", "whole list's step"]]
    for name, row in result["cases"].items():
        low, middle, high = zip(row["gauges step"], row["whole step"], strict=True)
        steps = [f"{m:.2f} ({a:.2f} to {b:.2f})" for a, m, b in zip(low, middle, high, strict=True)]
        counts = len(row["gauges"]), len(row["whole"]), len(row["ungauged"]), row["neurons"], row["matrices"]
        rows.append([name, row["seconds"], *counts, row["AdamW ms"], *steps])
    return "\n".join([*lines, bare(rows)]) + "\n"


STUDY = benchmark(
    __doc__, "unprepared", harness.by_name(MODELS, make, "cases"), render,
    head=lambda _: {"host": host(), "cases": {}},
)

if __name__ == "__main__":
    harness.main(STUDY)
