"""Certificates: counts dead directions of whole models by the rank of a Jacobian, and those that gauges explain.

    python -m benchmarks.certificates                # every row; five minutes on 2 CPU cores
    python -m benchmarks.certificates --only "*Llama*"      # rows of this name

A direction of weight space is dead if a step along it changes no output. Each row is a decoder of `models/lm.py` with
random weights and with norms without eps, of one layer unless the name says two; or it is the block of the design's §5.
Writes results/certificates.json and .md.

In the block of the design's §5 the head gets the stream without a norm in between, while all other layers have a norm,
which removes the stream's mean. This gives a symmetry of d dimensions that no released architecture has. Its gauge,
`StreamMean`, is defined here, as a user would define a gauge.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gauge_optax as go
from benchmarks.timing import benchmark
from examples.studies import harness
from examples.studies.report import bare
from models import lm

SIZES: dict[str, Any] = dict(
    vocab=9, d_model=6, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=7, max_len=5, norm_eps=0.0
)
LLAMA: dict[str, Any] = dict(norm="rmsnorm", rope=True, mlp="swiglu", bias=False)
ROWS: dict[str, dict[str, Any]] = {
    "LayerNorm, GELU, biases": dict(mlp="gelu"),
    "LayerNorm, ReLU, biases": dict(mlp="relu"),
    "LayerNorm, squared ReLU, biases": dict(mlp="relu2"),
    "LayerNorm, SwiGLU, biases": dict(mlp="swiglu"),
    "LayerNorm, GELU, no biases": dict(mlp="gelu", bias=False),
    "LayerNorm, GELU, biases, grouped queries": dict(mlp="gelu", kv_heads=1),
    "LayerNorm, GELU, biases, rotary": dict(mlp="gelu", rope=True),
    "LayerNorm, GELU, biases, QK-norm": dict(mlp="gelu", qk_norm=True),
    "LayerNorm, GELU, biases, tied": dict(mlp="gelu", tied=True),
    "LayerNorm, GELU, no biases, tied": dict(mlp="gelu", bias=False, tied=True),
    "RMSNorm, GELU, biases": dict(norm="rmsnorm", mlp="gelu"),
    "Llama": LLAMA,
    "Llama, biases": LLAMA | dict(bias=True),
    "Llama, grouped queries": LLAMA | dict(kv_heads=1),
    "Llama, QK-norm": LLAMA | dict(qk_norm=True),
    "Llama, QK-norm, grouped queries": LLAMA | dict(qk_norm=True, kv_heads=1),
    "Llama, tied": LLAMA | dict(tied=True),
    "Llama, ReLU": LLAMA | dict(mlp="relu"),
    "Llama, 1 + scale, two layers": LLAMA | dict(norm_one_plus=True, layers=2),
    "LayerNorm, GELU, biases, two layers": dict(mlp="gelu", layers=2),
}


class Row(NamedTuple):
    """The arguments of `go.measure.census` for one row."""

    fn: Callable[[Any, Any], Any]
    params: Any
    batches: list[Any]
    gauges: Sequence[go.Gauge]


def decoder(switches: dict[str, Any], seed: int = 0) -> Row:
    """A decoder with random weights. Biases are small, so that no ReLU is on for all inputs, or off for all."""
    config = lm.LMConfig(**(SIZES | switches))
    graph, state = nnx.split(lm.build(config, nnx.Rngs(0)))
    rng = np.random.default_rng(seed)

    def drawn(x: Any) -> np.ndarray:
        noise = rng.standard_normal(x.shape)
        return 0.6 * noise if x.ndim > 1 else np.asarray(x) + 0.15 * noise

    params = jax.tree.map(drawn, nnx.to_pure_dict(state))
    tokens = rng.integers(config.vocab, size=(60 * config.layers, config.max_len))
    return Row(lambda p, t: nnx.merge(graph, p)(t), params, [tokens], lm.whole_gauges(config))


@dataclasses.dataclass(frozen=True)
class StreamMean(go.Gauge):
    """Adds a number to all channels of a residual stream, x ↦ x + (x·v)·1, where 1 is the vector of ones.

    LayerNorms subtract this number again. One kernel H gets the stream without a norm. It undoes the move:
    H ↦ H − v·cᵀ/(1 + Σv), where c are the sums of its columns. Elements are {"": v} with Σv > −1, (channels,).

    `read` uses H alone. It returns the identity if c has the norm √outputs and all rows of H have the same product with
    c.

    Attributes:
      writers: paths of the leaves that write to the stream, with channels last.
      kernel: the path of H, (channels, outputs).
    """

    writers: tuple[str, ...]
    kernel: str

    name: ClassVar[str] = "stream_mean"

    def act(self, element: Any, params: Any) -> Any:
        v, head = element[""], params[self.kernel]
        moved = {path: params[path] + (params[path] @ v)[..., None] for path in self.writers}
        return params | moved | {self.kernel: head - jnp.outer(v, jnp.sum(head, 0)) / (1.0 + jnp.sum(v))}

    def read(self, params: Any) -> Any:
        head = params[self.kernel]
        sums, outputs = jnp.sum(head, 0), head.shape[1]
        size = jnp.sqrt(outputs / jnp.sum(jnp.square(sums)))
        return {"": size * (1.0 / len(head) - size * (head @ sums) / outputs)}

    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Any:
        noise = scale * jax.random.normal(key, params[self.kernel].shape[:1]) / len(params[self.kernel])
        mean = jnp.mean(noise)
        return {"": noise - mean + jnp.expm1(mean) / len(noise)}  # Σv = e^mean − 1 > −1

    def identity(self, params: Any) -> Any:
        return {"": jnp.zeros(params[self.kernel].shape[:1])}

    def inverse(self, element: Any) -> Any:
        return {"": -element[""] / (1.0 + jnp.sum(element[""]))}

    def compose(self, a: Any, b: Any) -> Any:
        return {"": a[""] + b[""] * (1.0 + jnp.sum(a[""]))}

    def dim(self, params: Any) -> int:
        return int(params[self.kernel].shape[0])


def design_block(seed: int = 0) -> Row:
    """The block of the design's §5. It has no positions, no final norm, and one bias that is added to all logits."""
    d, heads, size, hidden, vocab = 6, 2, 3, 10, 13
    shapes = {
        "embed": (vocab, d), "norm1/scale": (d,), "norm1/bias": (d,), "norm2/scale": (d,), "norm2/bias": (d,),
        **{f"{name}/kernel": (d, heads, size) for name in ("query", "key", "value")},
        **{f"{name}/bias": (heads, size) for name in ("query", "key", "value")},
        "out/kernel": (heads, size, d), "out/bias": (d,), "up/kernel": (d, hidden), "up/bias": (hidden,),
        "down/kernel": (hidden, d), "down/bias": (d,), "head/kernel": (d, vocab), "head/bias": (1,),
    }
    rng = np.random.default_rng(seed)
    params = {k: 0.6 * rng.standard_normal(n) + float(k.endswith("scale")) for k, n in shapes.items()}

    def norm(p: Any, name: str, x: jax.Array) -> jax.Array:
        x = x - jnp.mean(x, -1, keepdims=True)
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) * p[f"{name}/scale"] + p[f"{name}/bias"]

    def fn(p: Any, tokens: Any) -> jax.Array:
        x = p["embed"][tokens]
        y = norm(p, "norm1", x)
        q, k, v = (jnp.einsum("btd,dhe->bthe", y, p[f"{n}/kernel"]) + p[f"{n}/bias"] for n in ("query", "key", "value"))
        scores = jnp.einsum("bthe,bshe->bhts", q, k)
        causal = np.tril(np.ones((tokens.shape[1], tokens.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        x = x + jnp.einsum("bhts,bshe,hed->btd", weights, v, p["out/kernel"]) + p["out/bias"]
        hidden = jax.nn.gelu(norm(p, "norm2", x) @ p["up/kernel"] + p["up/bias"])
        x = x + hidden @ p["down/kernel"] + p["down/bias"]
        return x @ p["head/kernel"] + p["head/bias"]

    into = {f"{name}/kernel": "channel _ _" for name in ("query", "key", "value")}
    behind = {f"{name}/bias": "_ _" for name in ("query", "key", "value")}
    scales = [{f"norm{k}/scale": "channel"} for k in (1, 2)]
    biases = [{f"norm{k}/bias": "channel"} for k in (1, 2)]
    readers = [(into, behind), ({"up/kernel": "channel _"}, {"up/bias": "_"})]
    norms = [go.norm_scale(s | b, r) for s, b, (r, _) in zip(scales, biases, readers, strict=True)]
    read = {path: axes.replace("channel", "basis") for r, _ in readers for path, axes in r.items()}
    write = {"embed": "_ basis", "out/kernel": "_ _ basis", "out/bias": "basis", "down/kernel": "_ basis"}
    write |= {"down/bias": "basis"}
    gauges = [
        go.residual_rotation(read | {"head/kernel": "basis _"}, write, norms, centred=True),
        *(go.norm_read_shift(r, s, b, i) for s, b, (r, i) in zip(scales, biases, readers, strict=True)),
        *norms,
        go.head_linear(
            {"query/kernel": "_ head basis", "query/bias": "head basis"},
            {"key/kernel": "_ head basis", "key/bias": "head basis"},
        ),
        go.head_linear({"value/kernel": "_ head basis", "value/bias": "head basis"}, {"out/kernel": "head basis _"}),
        go.logit_shift({"head/kernel": "_ vocab"}),
        go.bias_absorption({"value/bias": "head entry"}, {"out/kernel": "head entry _"}, {"out/bias": "_"}),
        go.key_bias({"key/bias": "_ _", "head/bias": "_"}),  # a softmax removes both
        *(go.bias_absorption(b, r, i) for b, (r, i) in zip(biases, readers, strict=True)),
        # Norms remove the stream's mean. Only the head gets it, as a sum of the means of three leaves that write to the
        # stream: two of the three can be changed if the third makes up for it.
        go.embedding_shift({"embed": "_ _"}, {"down/bias": "_"}),
        go.embedding_shift({"out/bias": "_"}, {"down/bias": "_"}),
        go.residual_scale({path: axes.replace("basis", "_") for path, axes in write.items()}, {"head/kernel": "_ _"}),
        StreamMean(tuple(write), "head/kernel"),
    ]
    return Row(fn, params, [rng.integers(vocab, size=(40, 5))], gauges)


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown page with a table."""
    lines = [
        "# Certificates",
        "",
        "Dead directions of whole models: parameters less the rank of the outputs' Jacobian, in float64, at random",
        "weights, with logits up to a constant. `python -m benchmarks.certificates` prints this table.",
        "",
        "The design's block has no final norm, so that its head alone sees the stream's mean: a symmetry of d = 6",
        "dimensions, whose gauge this benchmark defines as a user would.",
        "",
    ]
    table: list[list[Any]] = [
        ["model", "parameters", "dead", "explained by orbits", "not reached by a batch", "unexplained",
         "outputs change along orbits by", "singular values: dead, live"]]
    for name, r in rows.items():
        table.append([name, r["parameters"], r["dead"], r["explained"], r["unreached"], f"**{r['unexplained']}**",
                      f"{r['seen']:.0e}", f"{r['gap'][0]:.0e}, {r['gap'][1]:.0e}"])
    return "\n".join([*lines, bare(table), ""])


def certified(name: str) -> dict[str, Any]:
    """Makes the census of one row, and returns its numbers."""
    row, start = design_block() if name == DESIGN else decoder(ROWS[name]), time.perf_counter()
    found = go.measure.census(row.fn, row.params, row.batches, row.gauges, progress=False)
    return {
        **{k: v for k, v in found._asdict().items() if k not in ("gauges", "by_leaf", "blocks", "bound")},
        "seen": max(g.seen for g in found.gauges),
        "by_gauge": {g.name: g.dim for g in found.gauges},
        "seconds": round(time.perf_counter() - start, 1),
    }


DESIGN = "the design's block"


STUDY = benchmark(
    __doc__, "certificates", harness.by_name((DESIGN, *ROWS), lambda c, args, name: certified(name), ""), page
)

if __name__ == "__main__":
    harness.main(STUDY)
