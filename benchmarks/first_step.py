"""Time to the first training step of a new process, per optimizer.

    python -m benchmarks.first_step                              # ten minutes on 2 CPU cores
    python -m benchmarks.first_step --only ddc_adamw --repeats 1

A GPT of 6 unrolled layers, d = 256. Every figure comes from a process of its own, in CPU seconds, because other load on
a machine changes those least; of several repeats the smallest is shown. Then each row starts twice with JAX's
compilation cache, from an empty folder, and the second start is shown. Writes benchmarks/results/first_step.json and
first_step.md.
"""

import argparse
import dataclasses
import resource
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

import gauge_optax as go
from benchmarks.timing import alone, benchmark, host
from examples.studies import harness
from examples.studies.report import bare
from models import lm

ROWS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "optax.adamw": lambda gauges: optax.adamw(1e-3),
    "quotient(optax.adamw)": lambda gauges: go.quotient(optax.adamw(1e-3), gauges),
    "ddc_adamw": lambda gauges: go.ddc_adamw(1e-3, gauges),
    "quotient_muon": lambda gauges: go.quotient_muon(1e-3, gauges),
    "ddc_muon": lambda gauges: go.ddc_muon(1e-3, gauges),
}
STAGES = {
    "init": "`tx.init(params)`, outside `jit`",
    "trace": "tracing the step",
    "lower": "lowering it",
    "compile": "compiling it",
    "call": "its first call",
}
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the GPT, and processes per optimizer."""

    layers: int = 6
    width: int = 256
    repeats: int = 2


def measured(row: str, layers: int, width: int) -> dict[str, float]:
    """CPU seconds of every stage in this process, the wall time of all, and how many programs `init` compiled."""
    config = lm.LMConfig(
        vocab=256, d_model=width, layers=layers, heads=width // 32, kv_heads=width // 32, d_head=32, d_ff=4 * width,
        max_len=128,
    )
    params, loss = lm.params_and_loss(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, config.vocab)
    jax.block_until_ready((params, tokens))
    tx = ROWS[row](lm.gauges(config))
    programs: list[str] = []

    def compiled_one(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            programs.append(event)

    jax.monitoring.register_event_duration_secs_listener(compiled_one)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    start, times = time.perf_counter(), [_cpu_seconds()]

    def timed(made: Any) -> Any:
        times.append(_cpu_seconds())
        return made

    state = timed(jax.block_until_ready(tx.init(params)))
    found = len(programs)
    traced = timed(jax.jit(step, donate_argnums=(0, 1)).trace(params, state, tokens))
    lowered = timed(traced.lower())
    compiled = timed(lowered.compile())
    timed(jax.block_until_ready(compiled(params, state, tokens)))
    stages = {name: end - begin for name, begin, end in zip(STAGES, times, times[1:], strict=False)}
    wall = time.perf_counter() - start
    return stages | {"programs": found, "total": times[-1] - times[0], "wall": wall}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def in_processes(c: Config, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """All runs of one optimizer, each in a new process."""
    call = f"measured({name!r}, {c.layers}, {c.width})"
    now = [alone("benchmarks.first_step", call) for _ in range(c.repeats)]
    with tempfile.TemporaryDirectory() as folder:
        _, again = (alone("benchmarks.first_step", call, JAX_COMPILATION_CACHE_DIR=folder, **CACHE) for _ in range(2))
    return {"now": now, "cached": [again]}


def page(result: dict[str, Any]) -> str:
    """Markdown; the stored one has a column of an earlier commit, too."""
    before = result.get("before")
    rows = [["", *STAGES.values(), "programs of `init`", "**total**", "wall", "second start, with JAX's cache",
             *(["before"] if before else [])]]
    about = (
        f"`python -m benchmarks.first_step`: {result['host']}; {result['about']}. CPU seconds (wall in seconds), of "
        f"{result['repeats']} processes the one with the smallest total. Step: loss, gradient and update as one "
        "compiled function. Second start: the total of a process that finds its programs in JAX's compilation cache."
        + (f" Before: the total with {before}." if before else "")
    )
    for name, row in result["rows"].items():
        best, cached = (min(row[kind], key=lambda run: run["total"]) for kind in ("now", "cached"))
        stages = (f"{best[stage]:.1f}" for stage in STAGES)
        rows.append([f"`{name}`", *stages, f"{best['programs']:.0f}", f"**{best['total']:.1f}**", f"{best['wall']:.1f}",
                     f"{cached['total']:.1f}"])
        rows[-1] += [f"{min(run['total'] for run in row['before']):.1f}"] if before else []
    said = "This page says how long a new process computes before its first training step is done, per optimizer."
    return f"# Time to the first step\n\n{said}\n\n{about}\n\n{bare(rows)}\n"


def head(c: Config) -> harness.Result:
    """What must agree before two runs may stand in one table."""
    about = f"a GPT of {c.layers} unrolled layers, d = {c.width}, float32"
    return {"host": host(), "about": about, "repeats": c.repeats, "rows": {}}


STUDY = benchmark(
    __doc__, "first_step", harness.by_name(ROWS, in_processes, "rows"), page, page=page, config=Config(), head=head,
)

if __name__ == "__main__":
    harness.main(STUDY)
