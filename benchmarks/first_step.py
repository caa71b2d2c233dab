"""Time to the first training step of a new process, per optimizer.

    python -m benchmarks.first_step                              # ten minutes on 2 CPU cores
    python -m benchmarks.first_step --before ../046d0ba          # and of the commit unpacked there
    python -m benchmarks.first_step --only ddc_adamw --repeats 1

A GPT of 6 unrolled layers, d = 256. Every figure comes from a process of its own, in CPU seconds, because other load on
a machine changes those least; of several repeats the smallest is shown. Then each row starts twice with JAX's
compilation cache, from an empty folder, and the second start is shown. Writes benchmarks/results/first_step.json and
first_step.md.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

import gauge_optax as go
from models import lm

HERE = Path(__file__).parent
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


def in_a_process(row: str, args: argparse.Namespace, tree: Path, cache: str | None = None) -> dict[str, float]:
    """`measured` in a new process, with the library and the models of `tree`."""
    hidden = {"XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", *CACHE}
    env = {name: value for name, value in os.environ.items() if name not in hidden} | {"PYTHONPATH": str(tree)}
    if cache is not None:
        env |= {"JAX_COMPILATION_CACHE_DIR": cache, **CACHE}
    command = [sys.executable, "-P", __file__, "--row", row, "--layers", str(args.layers), "--width", str(args.width)]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def row_of(row: str, args: argparse.Namespace) -> dict[str, Any]:
    """All runs of one optimizer, in turns with the earlier version."""
    runs: dict[str, list[dict[str, float]]] = {"now": [], "before": []}
    trees = {"now": HERE.parent} | ({"before": args.before.resolve()} if args.before else {})
    for _ in range(args.repeats):
        for name, tree in trees.items():
            runs[name].append(in_a_process(row, args, tree))
    with tempfile.TemporaryDirectory() as cache:
        in_a_process(row, args, HERE.parent, cache)
        return runs | {"cached": [in_a_process(row, args, HERE.parent, cache)]}


def page(result: dict[str, Any]) -> str:
    """Markdown."""
    before = bool(result["before"])
    columns = [*STAGES.values(), "programs of `init`", "**total**", "wall", "second start, with JAX's cache"]
    lines = [
        "# Time to the first step", "",
        "This page says how long a new process computes before its first training step is done, per optimizer.", "",
        f"`python -m benchmarks.first_step`: {result['host']}; {result['about']}. CPU seconds (wall in seconds), of "
        f"{result['repeats']} processes the one with the smallest total. Step: loss, gradient and update as one "
        "compiled function. Second start: the total of a process that finds its programs in JAX's compilation cache."
        + (f" Before: the total with {result['before']}." if before else ""), "",
        "| | " + " | ".join([*columns, *(["before"] if before else [])]) + " |",
        "|---|" + "---|" * (len(columns) + before),
    ]
    for name, row in result["rows"].items():
        best, cached = (min(row[kind], key=lambda run: run["total"]) for kind in ("now", "cached"))
        cells = [f"{best[stage]:.1f}" for stage in STAGES] + [f"{best['programs']:.0f}", f"**{best['total']:.1f}**"]
        cells += [f"{best['wall']:.1f}", f"{cached['total']:.1f}"]
        cells += [f"{min(run['total'] for run in row['before']):.1f}"] if before else []
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything; write JSON and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), help="rows, beside those kept")
    parser.add_argument("--before", type=Path, help="folder of an earlier commit, named after it")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.row:
        print(json.dumps(measured(args.row, args.layers, args.width)))
        return
    from benchmarks.timing import host  # a process of another version has no such module

    about = f"a GPT of {args.layers} unrolled layers, d = {args.width}, float32"
    earlier = f"commit {args.before.resolve().name}" if args.before else ""
    result = {"host": host(), "about": about, "repeats": args.repeats, "before": earlier, "rows": {}}
    file = args.out / "first_step.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    if {**kept, "rows": {}} == result:
        result = kept
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        result["rows"][name] = row_of(name, args)
        result["rows"] = {name: result["rows"][name] for name in ROWS if name in result["rows"]}
        file.write_text(json.dumps(result, indent=1) + "\n")
        (args.out / "first_step.md").write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    main()
