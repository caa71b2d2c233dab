"""How long curvature on GPT-2's shapes takes, and how much memory: products, Lanczos, traces, without a d × d array.

    python -m benchmarks.curvature                         # 124 million parameters on 2 CPU cores
    python -m benchmarks.curvature --layers 1 --width 64 --vocab 99   # to try it

The Fisher has labels drawn from the model, 100 per parameter. Writes benchmarks/results/curvature.json and
curvature.md. Needs matfree, and Linux, which can say the peak of a process.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gauge_optax as go
from benchmarks.orbit import resident
from benchmarks.timing import host
from examples import cli
from models import gpt2, lm

OUT = Path(__file__).parent / "results"
NAMES = {
    "Fisher": "draw the labels",
    "product": "one product F·v",
    "Lanczos": "Lanczos",
    "trace": "trace",
    "quotient": "the balanced point",
    "quotient Lanczos": "Lanczos on the quotient",
}


def measured(config: lm.LMConfig, tokens: np.ndarray, steps: int, probes: int) -> dict[str, Any]:
    """Seconds of every reading, what it read, and the peak of memory in units of the parameters."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: lm.build(config, nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def drawn(x: Any) -> jax.Array:
        noise = rng.standard_normal(x.shape, dtype=np.float32)
        return jnp.asarray(0.02 * noise if x.ndim > 1 else 0.1 * noise + 1.0)

    params = jax.tree.map(drawn, nnx.to_pure_dict(state))
    rows: dict[str, Any] = {}
    size = sum(x.size for x in jax.tree.leaves(params))

    def row(name: str, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        out = jax.block_until_ready(run())
        rows[name] = dict(seconds=time.perf_counter() - began, peak=resident("VmHWM") / (4 * size))
        print(f"{name:20} {rows[name]['seconds']:8.1f} s, peak {rows[name]['peak']:.1f} × the parameters", flush=True)
        return out

    def fn(p: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, p)(x)

    made: list[Any] = []
    row("Fisher", lambda: made.append(go.measure.Fisher(fn, params, [tokens], jax.random.key(0))))
    fisher = made[0]
    gradient = fisher.ravel(params)
    row("product", lambda: fisher @ gradient)
    top = row("Lanczos", lambda: fisher.lanczos(jax.random.key(1), steps))
    trace = row("trace", lambda: tuple(fisher.trace(jax.random.key(2), probes)))
    row("quotient", lambda: made.append(go.measure.quotient_fisher(fisher, lm.gauges(config))))
    across = row("quotient Lanczos", lambda: made[1].lanczos(jax.random.key(1), steps))
    rows["Lanczos"]["read"] = [float(x) for x in top.values[:3]]
    rows["quotient Lanczos"]["read"] = [float(x) for x in across.values[:3]]
    rows["trace"]["read"] = [float(x) for x in trace]
    return dict(parameters=size, samples=fisher.samples, tokens=int(tokens.size), steps=steps, probes=probes, rows=rows)


def page(result: dict[str, Any]) -> str:
    """The table."""
    lines = [
        "# Curvature on GPT-2's shapes",
        "",
        f"{result['parameters']:,} parameters drawn at random, {result['tokens']} tokens, {result['samples']:,} labels "
        f"drawn from the model; {result['steps']} steps of Lanczos, {result['probes']} probes; float32, compilation "
        f"included. {result['host']}.",
        "",
        "| | seconds | peak so far, in units of the parameters | read |",
        "|---|---:|---:|---|",
    ]
    for name, row in result["rows"].items():
        read = ", ".join(f"{x:.3g}" for x in row.get("read", []))
        read = read.replace(", ", " ± ") if name == "trace" else read
        lines.append(f"| {NAMES[name]} | {row['seconds']:.1f} | {row['peak']:.1f} | {read} |")
    lines += [
        "",
        "Lanczos reads the largest eigenvalues. It takes two or three vectors per step; no array has d × d numbers.",
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=cli.Help)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="d_model, in heads of 64")
    parser.add_argument("--vocab", type=int, default=50_304)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8, help="of Lanczos")
    parser.add_argument("--probes", type=int, default=4, help="for the trace")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    heads = args.width // 64
    config = gpt2.config(
        layers=args.layers, vocab=args.vocab, d_model=args.width, heads=heads, kv_heads=heads, d_ff=4 * args.width
    )
    tokens = np.random.default_rng(1).integers(0, args.vocab, (2, args.tokens // 2))
    result = measured(config, tokens, args.steps, args.probes) | dict(host=host())
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "curvature.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "curvature.md").write_text(page(result))
    print(page(result))
    return result


if __name__ == "__main__":
    main()
