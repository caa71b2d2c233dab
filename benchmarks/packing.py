"""What packed heads save: numbers, floating-point operations and time of GPT-2 124M beside the plain model.

    python -m benchmarks.packing                          # ten minutes on 2 CPU cores, 8 GiB
    python -m benchmarks.packing --layers 2 --rounds 5    # to try it

One attention layer's query and value products, a whole forward pass and a whole training step (AdamW), each compiled,
and timed in turns in one process. *Packed* leaves out rows of its own in every head, which `go.orbit.unpack` puts back
before the product. *Packed, shared* leaves out the same rows in all heads, and multiplies with `go.orbit.packed_dot`.
Also: how far logits move, and whether a second round trip changes a bit. Writes benchmarks/results/packing.json and
packing.md.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gauge_optax as go
from benchmarks import orbit
from benchmarks.timing import host, in_turns, prepared, quartiles
from examples.studies import harness
from models import gpt2, lm

OUT = Path(__file__).parent / "results"
LAYOUTS: dict[str, dict[str, Any] | None] = {"plain": None, "packed": {}, "packed, shared": {"shared": True}}


@dataclass
class Call:
    """A compiled function of one tree and the data: what `in_turns` times."""

    compiled: Any
    tree: Any
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, function: Callable[..., Any], tree: Any, given: Any) -> "Call":
        """Compiles it."""
        return cls(jax.jit(function).lower(tree, given).compile(), tree)

    def run(self, given: Any) -> float:
        """One call's wall time."""
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(self.tree, given))
        return time.perf_counter() - start

    @property
    def flops(self) -> float:
        """As the compiler counts them."""
        analysis = self.compiled.cost_analysis()
        return float((analysis[0] if isinstance(analysis, list) else analysis)["flops"])


class PackedLinear(nnx.Module):
    """A linear layer of `lm` with a packed kernel."""

    def __init__(self, layer: lm.Linear, kernel: Any) -> None:
        self.layer, self.kernel = layer, nnx.data(kernel)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The packed product, then the bias."""
        y = go.orbit.packed_dot(x, self.kernel)
        return y if self.layer.bias is None else y + self.layer.bias[...]


def logits_of(graphdef: Any, packed_products: bool) -> Callable[[Any, jax.Array], jax.Array]:
    """(packed or plain tree, tokens) → logits; with products of packed leaves where `packed_products` says so."""

    def logits(tree: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, go.orbit.unpack(tree))
        for number, block in enumerate(model.blocks if packed_products else ()):
            for name in ("query", "value"):
                kernel = tree["blocks"][number]["attn"][name]["kernel"]
                setattr(block.attn, name, PackedLinear(getattr(block.attn, name), kernel))
        out: jax.Array = model(tokens)
        return out

    return logits


@dataclass(frozen=True)
class Config(orbit.Config):
    """Sizes, and rounds of timing."""

    batch: int = 2
    length: int = 128
    rounds: int = 12


def measured(c: Config) -> dict[str, Any]:
    """Counts, operations, times and differences, by layout."""
    config, batch, length, rounds = c.model, c.batch, c.length, c.rounds
    graphdef, state = nnx.split(gpt2.build(config, nnx.Rngs(0), multiplied=False))
    params = nnx.to_pure_dict(state)
    gauges = [gauge for gauge in lm.gauges(config, linear=True) if gauge.name == "head_linear"]
    trees, seconds = {"plain": params}, {}
    for name, options in LAYOUTS.items():
        if options is not None:
            for _ in range(2):  # the first call compiles
                start = time.perf_counter()
                trees[name] = jax.block_until_ready(go.orbit.pack(params, gauges, **options))
                seconds[name] = time.perf_counter() - start
    generator = np.random.default_rng(0)
    tokens = jnp.asarray(generator.integers(config.vocab, size=(batch, length + 1)))
    x = jnp.asarray(generator.normal(size=(batch * length, config.d_model)), jnp.float32)
    result: dict[str, Any] = {"host": host(), "layers": c.layers, "batch": batch, "length": length}
    result |= {"pack_seconds": seconds, "parameters": {}, "exact": {}, "work": {}}
    plain = sum(leaf.size for leaf in jax.tree.leaves(params))
    for name, tree in trees.items():
        count = sum(leaf.size for leaf in jax.tree.leaves(tree))
        moments = jax.tree.leaves(jax.eval_shape(optax.adamw(1e-4).init, tree))
        state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in moments)
        result["parameters"][name] = {"count": count, "saved": plain - count, "adamw_state": state_bytes}
    result["formula"] = 2 * config.layers * config.heads * config.d_head**2
    result["exact"] = _exactness(graphdef, params, gauges, tokens[:, :-1])

    heads = {name: [tree["blocks"][0]["attn"][n]["kernel"] for n in ("query", "value")] for name, tree in trees.items()}
    products = {
        name: Call.of(_products(name), kernels, x) for name, kernels in heads.items()
    }
    result["work"]["query and value of a layer"] = _timed(products, x, 10 * rounds)
    forwards = {
        name: Call.of(logits_of(graphdef, name == "packed, shared"), tree, tokens[:, :-1])
        for name, tree in trees.items()
    }
    result["work"]["forward"] = _timed(forwards, tokens[:, :-1], rounds)
    del forwards, products
    steps = {}
    for name, tree in trees.items():
        logits = logits_of(graphdef, name == "packed, shared")

        def loss(tree: Any, tokens: jax.Array, logits: Callable[..., jax.Array] = logits) -> jax.Array:
            out = logits(tree, tokens[:, :-1])
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(out, tokens[:, 1:]))

        steps[name] = prepared(optax.adamw(1e-4), tree, tokens, loss)
    in_turns(steps, tokens, rounds)
    result["work"]["training step"] = {
        name: {
            "gflop": step.cost["gflop"], "milliseconds": 1e3 * float(np.median(step.seconds)),
            "ratio": quartiles(step, steps["plain"]),
        }
        for name, step in steps.items()
    }
    return result


def _products(name: str) -> Callable[..., Any]:
    def products(kernels: Any, x: jax.Array) -> list[jax.Array]:
        kernels = kernels if name == "packed, shared" else go.orbit.unpack(kernels)
        return [go.orbit.packed_dot(x, kernel) for kernel in kernels]

    return products


def _timed(calls: dict[str, Call], given: Any, rounds: int) -> dict[str, Any]:
    in_turns(calls, given, rounds)
    return {
        name: {
            "gflop": call.flops / 1e9, "milliseconds": 1e3 * float(np.median(call.seconds)),
            "ratio": quartiles(call, calls["plain"]),
        }
        for name, call in calls.items()
    }


def _exactness(graphdef: Any, params: Any, gauges: Sequence[go.Gauge], tokens: jax.Array) -> dict[str, Any]:
    """Per precision and layout: the largest change of a logit over the largest logit; whether round trips keep bits."""
    found: dict[str, Any] = {}
    for dtype in ("float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            tree = jax.tree.map(lambda leaf: leaf.astype(dtype), params)  # noqa: B023
            logits = jax.jit(logits_of(graphdef, False))
            before = logits(tree, tokens)
            for name, options in LAYOUTS.items():
                if options is None:
                    continue
                whole = go.orbit.unpack(go.orbit.pack(tree, gauges, **options))
                again = go.orbit.unpack(go.orbit.pack(whole, gauges, **options))
                change = jnp.max(jnp.abs(logits(whole, tokens) - before)) / jnp.max(jnp.abs(before))
                pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True)
                same = all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
                found[f"{name}, {dtype}"] = {"change": float(change), "same_bits": same}
    return found


def page(result: dict[str, Any]) -> str:
    """Markdown."""
    counts, formula = result["parameters"], result["formula"]
    plain = counts["plain"]["count"]
    exact = all(own["saved"] == formula for name, own in counts.items() if name != "plain")
    lines = [
        "# Packed heads of GPT-2", "",
        f"`python -m benchmarks.packing`: {result['host']}; float32; {result['layers']} layers, batches of "
        f"{result['batch']} × {result['length']} tokens. `packed` leaves out rows of its own in every head, and "
        "`unpack` puts them back; `packed, shared` leaves out the same rows in all heads, and uses `packed_dot`. "
        "Operations are counted by XLA; times are medians, ratios medians (quartiles) over rounds in turns.", "",
        f"Saved: {formula:,} = 2 · layers · heads · d_h² numbers"
        f"{', exactly that in both packed trees' if exact else ' **missed**'}, {100 * formula / plain:.2f} % of "
        f"{plain:,}; AdamW's state has twice as many less.", "",
        "| | | GFLOP | of plain's | ms | over plain's time |", "|---|---|---|---|---|---|",
    ]
    for work, rows in result["work"].items():
        for name, own in rows.items():
            low, middle, high = own["ratio"]
            share = own["gflop"] / rows["plain"]["gflop"]
            lines.append(
                f"| {work} | {name} | {own['gflop']:.3f} | {share:.4f} | {own['milliseconds']:.1f} "
                f"| {middle:.3f} ({low:.3f} to {high:.3f}) |"
            )
    lines += ["", "| | largest change of a logit, of the largest | a second round trip |", "|---|---|---|"]
    for name, own in result["exact"].items():
        most = 1e-11 if name.endswith("float64") else 1e-5
        missed = " **missed**" if own["change"] > most else ""
        lines.append(f"| {name} | {own['change']:.1e} (limit {most:.0e}){missed} | "
                     f"{'the same bits' if own['same_bits'] else '**other bits**'} |")
    took = ", ".join(f"{name} {own:.1f} s" for name, own in result["pack_seconds"].items())
    return "\n".join([*lines, "", f"`go.orbit.pack` itself, compiled before: {took}."]) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, write JSON and page."""
    return harness.once(__doc__, "packing", measured, page, Config(), OUT, argv)


if __name__ == "__main__":
    main()
