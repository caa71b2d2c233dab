"""How long curvature on GPT-2's shapes takes, and how much memory: products, Lanczos, traces, without a d × d array.

    python -m benchmarks.curvature                         # 124 million parameters on 2 CPU cores
    python -m benchmarks.curvature --layers 1 --width 64 --vocab 99   # to try it

The Fisher has labels drawn from the model, 100 per parameter. Writes benchmarks/results/curvature.json and
curvature.md. Needs matfree, and Linux, which can say the peak of a process.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import gauge_optax as go
from benchmarks import orbit
from benchmarks.orbit import resident
from benchmarks.timing import host
from examples.studies import harness
from models import lm

OUT = Path(__file__).parent / "results"
NAMES = {
    "Fisher": "draw the labels",
    "product": "one product F·v",
    "Lanczos": "Lanczos",
    "trace": "trace",
    "quotient": "the balanced point",
    "quotient Lanczos": "Lanczos on the quotient",
}


@dataclasses.dataclass(frozen=True)
class Config(orbit.Config):
    """Sizes: tokens, steps of Lanczos, probes for the trace."""

    tokens: int = 128
    steps: int = 8
    probes: int = 4


def measured(c: Config) -> dict[str, Any]:
    """Seconds of every reading, what it read, and the peak of memory in units of the parameters."""
    config = c.model
    tokens = np.random.default_rng(1).integers(0, c.vocab, (2, c.tokens // 2))
    graphdef, params = orbit.drawn(config, np.random.default_rng(0))
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
    top = row("Lanczos", lambda: fisher.lanczos(jax.random.key(1), c.steps))
    trace = row("trace", lambda: tuple(fisher.trace(jax.random.key(2), c.probes)))
    row("quotient", lambda: made.append(go.measure.quotient_fisher(fisher, lm.gauges(config))))
    across = row("quotient Lanczos", lambda: made[1].lanczos(jax.random.key(1), c.steps))
    rows["Lanczos"]["read"] = [float(x) for x in top.values[:3]]
    rows["quotient Lanczos"]["read"] = [float(x) for x in across.values[:3]]
    rows["trace"]["read"] = [float(x) for x in trace]
    about = dict(parameters=size, samples=fisher.samples, tokens=tokens.size, steps=c.steps, probes=c.probes)
    return about | dict(rows=rows, host=host())


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
    """Measure, write JSON and page."""
    return harness.once(__doc__, "curvature", measured, page, Config(), OUT, argv)


if __name__ == "__main__":
    main()
