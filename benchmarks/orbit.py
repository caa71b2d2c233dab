"""How long choosing a point of GPT-2's orbit takes, and how much memory: `canonicalize`, `rotate` and `align`.

    python -m benchmarks.orbit                             # five minutes on 2 CPU cores, 8 GiB
    python -m benchmarks.orbit --layers 1 --width 128 --vocab 99   # to try it

Every row is a process of its own. The first call compiles; the second is timed, and its peak of resident memory read,
in units of the parameters: 1 is the parameters alone, 2 the parameters and the result. Also how far logits move.
Writes benchmarks/results/orbit.json and orbit.md. Needs Linux, which can say and reset the peak of a process.
"""

import argparse
import dataclasses
import functools
import gc
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gauge_optax as go
from benchmarks.timing import alone, benchmark, host
from examples.studies import harness, report
from models import gpt2, lm

ROTATIONS = ("residual_rotation", "head_rotation")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of GPT-2; d_model is in heads of 64."""

    layers: int = 12
    vocab: int = 50_304
    width: int = 768

    @property
    def model(self) -> lm.LMConfig:
        """The model."""
        heads = self.width // 64
        return gpt2.config(
            layers=self.layers, vocab=self.vocab, d_model=self.width, heads=heads, kv_heads=heads, d_ff=4 * self.width
        )


class Row(NamedTuple):
    """What is measured.

    Attributes:
      function: of the library.
      tied: whether the output kernel is the embedding, as GPT-2's is; then the stream has no rotation.
      linear: whether heads have GL(d_h) in place of rotations.
      donate: whether the parameters may be overwritten.
    """

    function: str
    tied: bool
    linear: bool = False
    donate: bool = False


ROWS = {
    "canonicalize": Row("canonicalize", tied=True, linear=True),
    "canonicalize, donated": Row("canonicalize", tied=True, linear=True, donate=True),
    "canonicalize with the stream, untied, donated": Row("canonicalize", tied=False, donate=True),
    "rotate, R1 and R2, untied": Row("rotate", tied=False),
    "rotate, R1 and R2, untied, donated": Row("rotate", tied=False, donate=True),
    "align to a twin, with permutations": Row("align", tied=True),
}


def resident(kind: str) -> float:
    """Bytes of this process in memory now (`VmRSS`), or at most so far (`VmHWM`)."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024.0 * float(found[1]) if found else float("nan")


def drawn(config: lm.LMConfig, rng: np.random.Generator) -> tuple[Any, Any]:
    """A model's graph, and parameters drawn at random."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: lm.build(config, nnx.Rngs(0))))

    def one(x: Any) -> jax.Array:
        noise = rng.standard_normal(x.shape, dtype=np.float32)
        return jnp.asarray(0.02 * noise if x.ndim > 1 else 0.1 * noise + 1.0)

    return graphdef, jax.block_until_ready(jax.tree.map(one, nnx.to_pure_dict(state)))


def measured(row: Row, c: Config) -> dict[str, Any]:
    """Seconds, peak and accuracy of one row, in this process."""
    config = dataclasses.replace(c.model, bias=True, tied=row.tied)
    rng = np.random.default_rng(0)
    gauges = lm.whole_gauges(config, linear=row.linear)
    if row.function == "rotate":
        gauges = [gauge for gauge in gauges if gauge.name in ROTATIONS]
    tokens = jnp.asarray(rng.integers(0, config.vocab, (2, 64)))
    graphdef, params = drawn(config, rng)
    logits = jax.jit(lambda p, x: jax.nn.log_softmax(nnx.merge(graphdef, p)(x)))
    before = logits(params, tokens)
    twin = None
    if row.function == "align":
        group = go.product([*gauges, *lm.permutations(config)])
        act = jax.jit(group.act)
        twin = jax.block_until_ready(act(group.sample(jax.random.key(1), params), params))

        def call(params: Any, gauges: Any) -> Any:
            return act(go.orbit.align(params, twin, group), twin)

    else:
        call = functools.partial(getattr(go, row.function), donate=row.donate)
    held = 1 if twin is None else 2
    seconds, cpu, size = [], [], sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    for _ in range(2):  # the first call compiles
        gc.collect()
        start_bytes = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
        start, start_cpu = time.perf_counter(), time.process_time()
        moved = jax.block_until_ready(call(params, gauges))
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)  # does not count pauses of a busy machine
        peak = held + (resident("VmHWM") - start_bytes) / size
        change = float(jnp.max(jnp.abs(logits(moved, tokens) - before)) / jnp.max(jnp.abs(before)))
        params = moved if row.donate else params
        del moved
    return {
        "parameters": size // 4, "first": seconds[0], "first_cpu": cpu[0], "seconds": seconds[1], "cpu": cpu[1],
        "peak": peak, "change": change,
    }


def page(result: dict[str, Any]) -> str:
    """Markdown."""
    about = (
        f"`python -m benchmarks.orbit`: {result['host']}; float32; {result['layers']} layers of d = "
        f"{result['width']}. The first call compiles. CPU seconds are those of both cores; wall "
        "times include what else the machine did. The peak is resident memory in units of the parameters, which are "
        "among it: 2 is the parameters and the result; for `align`, 3 is both sets of weights and the result. The "
        "change is the largest one of a log-probability, of the largest log-probability."
    )
    rows = [["", "parameters, millions", "first call, s (CPU s)", "later, s (CPU s)", "peak", "change (limit 1e-05)"]]
    for name, own in result["rows"].items():
        missed = " **missed**" if own["change"] > 1e-5 else ""
        most = 3.0 if name.startswith("align") else 2.0
        over = f" **over {most:.0f}**" if own["peak"] > most else ""
        times = [f"{own[wall]:.1f} ({own[cpu]:.1f})" for wall, cpu in (("first", "first_cpu"), ("seconds", "cpu"))]
        rows.append([name, f"{own['parameters'] / 1e6:.1f}", *times, f"{own['peak']:.2f}{over}",
                     f"{own['change']:.1e}{missed}"])
    return f"# Choosing a point of GPT-2's orbit\n\n{about}\n\n{report.bare(rows)}\n"


def in_a_process(c: Config, args: argparse.Namespace, name: str) -> Any:
    """`measured` in a new process."""
    return alone("benchmarks.orbit", f"measured(ROWS[{name!r}], {c!r})")


STUDY = benchmark(
    __doc__, "orbit", harness.by_name(ROWS, in_a_process, "rows"), page, page=page, config=Config(),
    head=lambda c: {"host": host(), "layers": c.layers, "width": c.width, "rows": {}},
)

if __name__ == "__main__":
    harness.main(STUDY)
