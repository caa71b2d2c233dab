"""Time and memory of `go.discover` on models of several sizes and libraries.

    python -m benchmarks.discover_times            # or some of the cases: `... --only d64 equinox`

Each case runs in a process of its own, so that nothing is compiled yet. Finished cases stay in the JSON.
"""

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gauge_optax as go
from benchmarks import timing
from benchmarks.sizes import SIZES
from benchmarks.timing import host
from examples.studies import harness
from examples.studies.report import bare
from models import lm

WIDTH, HEADS, LAYERS, VOCAB = 64, 4, 2, 256  # sizes of the models that are defined in this file
TOKENS = (2, 2, 16)  # two batches of two sequences


class Arguments(NamedTuple):
    """The arguments of `go.discover`."""

    fn: Callable[[Any, Any], Any]
    params: Any
    batches: list[Any]
    outputs: Any = None


class Case(NamedTuple):
    """A row of the table: a description of the model, and the function that makes the arguments."""

    about: str
    build: Callable[[], Arguments]


def _tokens(vocab: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, vocab, TOKENS))


def of_lm(config: lm.LMConfig, shapes: bool = False) -> Arguments:
    """A model of `models/lm.py`. With `shapes`, its parameters are shapes without values."""
    model = nnx.eval_shape(lambda: lm.build(config, nnx.Rngs(0))) if shapes else lm.build(config, nnx.Rngs(0))
    graph, state = nnx.split(model)
    return Arguments(lambda p, tokens: nnx.merge(graph, p)(tokens), nnx.to_pure_dict(state), _tokens(config.vocab))


def _flash(query: jax.Array, key: jax.Array, value: jax.Array, mask: Any = None, **_: Any) -> jax.Array:
    """JAX's own attention function, which computes the softmax in float32."""
    return jax.nn.dot_product_attention(query, key, value, mask=None if mask is None else mask.astype(bool))


class Block(nnx.Module):
    """A transformer block of Flax's own layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=rngs, decode=False, attention_fn=_flash)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """The residual stream behind the block, (batch, time, d)."""
        x = x + self.attn(self.norm1(x), mask=mask)
        return x + self.down(nnx.relu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """A GPT in NNX: tokens (batch, time) → logits (batch, time, vocab)."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm, self.head = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits (batch, time, vocab)."""
        x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def of_flax() -> Arguments:
    """The NNX model. The module itself is the first argument of the function."""
    return Arguments(lambda model, tokens: model(tokens), GPT(nnx.Rngs(0)), _tokens(VOCAB))


class LinenGPT(nn.Module):
    """The same GPT in Linen, with weights and arithmetic in bfloat16."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits (batch, time, vocab)."""
        low: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        x, mask = nn.Embed(VOCAB, WIDTH, **low)(tokens), nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            x = x + nn.MultiHeadDotProductAttention(HEADS, **low)(nn.LayerNorm(**low)(x), mask=mask)
            y = nn.relu(nn.Dense(4 * WIDTH, **low)(nn.LayerNorm(**low)(x)))
            x = x + nn.Dense(WIDTH, **low)(y)
        return nn.Dense(VOCAB, **low)(nn.LayerNorm(**low)(x))


def of_linen() -> Arguments:
    """The Linen model. Its variables are the first argument of the function."""
    tokens = _tokens(VOCAB)
    return Arguments(LinenGPT().apply, LinenGPT().init(jax.random.key(0), tokens[0]), tokens)


def of_equinox(width: int = WIDTH, vocab: int = VOCAB) -> Arguments:
    """A GPT in Equinox. The module itself is the first argument of the function."""
    import equinox as eqx

    class EquinoxBlock(eqx.Module):
        norm1: eqx.nn.LayerNorm
        norm2: eqx.nn.LayerNorm
        attn: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP

        def __init__(self, key: jax.Array) -> None:
            first, second = jax.random.split(key)
            self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
            self.attn = eqx.nn.MultiheadAttention(HEADS, width, key=first)
            self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, key=second)

        def __call__(self, x: jax.Array) -> jax.Array:
            y, causal = jax.vmap(self.norm1)(x), jnp.tril(jnp.ones((len(x), len(x)), bool))
            x = x + self.attn(y, y, y, mask=causal)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))

    class EquinoxGPT(eqx.Module):
        embed: eqx.nn.Embedding
        blocks: list[EquinoxBlock]
        norm: eqx.nn.LayerNorm
        head: eqx.nn.Linear

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key, LAYERS + 2)
            self.embed = eqx.nn.Embedding(vocab, width, key=keys[0])
            self.blocks = [EquinoxBlock(k) for k in keys[2:]]
            self.norm, self.head = eqx.nn.LayerNorm(width), eqx.nn.Linear(width, vocab, key=keys[1])

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = jax.vmap(self.embed)(tokens)
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.head)(jax.vmap(self.norm)(x))

    return Arguments(lambda m, tokens: jax.vmap(m)(tokens), EquinoxGPT(jax.random.key(0)), _tokens(vocab))


MIDDLE = lm.LMConfig(d_model=256, layers=6, heads=8, kv_heads=8, d_head=32, d_ff=1024)
CASES: Mapping[str, Case] = {
    "d64": Case("`models/lm.py`, LayerNorm, ReLU: 2 layers of d = 64, 4 heads", lambda: of_lm(lm.LMConfig())),
    "d256": Case("the same: 6 layers of d = 256, 8 heads", lambda: of_lm(MIDDLE)),
    "d768": Case(
        "GPT-2 124M by shapes alone: 12 layers of d = 768, 12 heads, vocabulary of 50,257",
        lambda: of_lm(SIZES["gpt2"].config, shapes=True),
    ),
    "flax": Case(
        "NNX: `nnx.Embed`, `nnx.MultiHeadAttention`, `jax.nn.dot_product_attention`; 2 layers of d = 64", of_flax
    ),
    "linen_bfloat16": Case("Linen in bfloat16: 2 layers of d = 64", of_linen),
    "equinox": Case("equinox: 2 layers of d = 64", of_equinox),
}


def measure(name: str) -> dict[str, Any]:
    """Measures one case: seconds, memory, and counts of its report. `alone` calls it in a new process."""
    fn, params, batches, _ = CASES[name].build()
    began, worked = time.perf_counter(), time.process_time()
    report = go.discover(fn, params, batches, progress=sys.stderr.isatty())
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    counted = (x.size for x in jax.tree.leaves(params) if hasattr(x, "size") and jnp.issubdtype(x.dtype, jnp.floating))
    return {
        "parameters": sum(counted),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "load": round(os.getloadavg()[0], 1),
        "gauges": [held.call.kind for held in report.held],
        "nearly": [held.call.kind for held in report.nearly],
        "rejected": list(report.rejected),
    }


def alone(name: str) -> dict[str, Any]:
    """Calls `measure` in a new process, without the XLA flags and caches of this one."""
    row: dict[str, Any] = timing.alone("benchmarks.discover_times", f"measure({name!r})")
    return row


def render(result: dict[str, Any]) -> str:
    """The results as a Markdown page."""
    lines = [
        "# Times of `discover`", "",
        "`go.discover` finds the gauges of a model. This page says how long that took, and how much memory its process",
        "had at most, Python and JAX included (`python -m benchmarks.discover_times`).", "",
        f"{result['host']}; two batches of two sequences of {TOKENS[-1]} tokens. Every case ran alone in a new",
        "process, which compiled everything. *Load* is the mean number of programs that ran or waited for a core in",
        "the last minute, this one included.", "",
    ]
    rows: list[list[Any]] = [["model", "million parameters", "seconds", "CPU seconds", "peak MiB", "load", "gauges"]]
    for name, case in CASES.items():
        if row := result["cases"].get(name):
            rows.append([
                case.about, f"{row['parameters'] / 1e6:.1f}", f"{row['seconds']:.0f}", f"{row['cpu_seconds']:.0f}",
                f"{row['peak_mib']:,}", f"{row['load']:.1f}", len(row["gauges"]),
            ])
    return "\n".join([*lines, bare(rows)]) + "\n"


STUDY = timing.benchmark(
    __doc__, "discover", harness.by_name(CASES, lambda c, args, name: alone(name), "cases"), render,
    head=lambda _: {"host": host(), "cases": {}},
)

if __name__ == "__main__":
    harness.main(STUDY)
