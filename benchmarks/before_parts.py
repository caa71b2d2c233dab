"""What an update costs beside the same update of the package before its core became parts: compile time and time.

    python -m benchmarks.before_parts                 # 12 layers of d = 768; about an hour of 2 CPU cores
    python -m benchmarks.before_parts --only pin      # one row; the others in the JSON stay

Both packages run in one process, on the stack and the gauges of `benchmarks.update`. They take turns: at compiling,
which counts CPU seconds of all threads, tracing included, so that other work on the machine counts little; and at
updates, which count wall time. A ratio is the median over rounds of this package's figure in units of the old one's of
the same round. Writes benchmarks/results/before_parts.json and before_parts.md after every row.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

import gauge_optax as new
from benchmarks.side_by_side import REVISION, old_package, rebuilt
from benchmarks.timing import host, in_turns, prepared, quartiles, update_step
from models import lm

RATE = 1e-6
"""Small, so that no eigenbasis drifts to a refresh while times are taken."""


def optimizers(go: Any, gauges: Sequence[Any]) -> dict[str, optax.GradientTransformation]:
    """Rows of the table, in one of the packages."""
    return {
        "quotient_adamw": go.quotient_adamw(RATE, gauges, weight_decay=0.1),
        "quotient_adamw, pin=False": go.quotient_adamw(RATE, gauges, weight_decay=0.1, pin=False),
        "quotient_muon": go.quotient_muon(RATE, gauges, weight_decay=0.1),
        "ddc_adamw": go.ddc_adamw(RATE, gauges, weight_decay=0.1),
        "gauge_project": optax.chain(go.gauge_project(gauges), optax.scale_by_learning_rate(RATE)),
    }


def compile_seconds(tx: optax.GradientTransformation, params: Any, grads: Any) -> float:
    """CPU seconds, of all threads, to trace and compile an update."""
    state = jax.eval_shape(tx.init, params)
    start = time.process_time()
    jax.jit(update_step(tx), donate_argnums=(0, 1)).lower(params, state, grads).compile()
    return time.process_time() - start


def row(
    pair: Mapping[str, optax.GradientTransformation], params: Any, grads: Any, compiles: int, repeats: int
) -> dict[str, Any]:
    """One line of the table, from "this" and "old"."""
    seconds: dict[str, list[float]] = {side: [] for side in pair}
    for number in range(compiles):
        for side in list(pair)[:: 1 if number % 2 else -1]:
            seconds[side].append(compile_seconds(pair[side], params, grads))
    updates = {side: prepared(tx, params, grads) for side, tx in pair.items()}
    in_turns(updates, grads, repeats)
    return {
        "compile_s": {side: statistics.median(times) for side, times in seconds.items()},
        "compile": statistics.median(a / b for a, b in zip(seconds["this"], seconds["old"], strict=True)),
        "update_s": {side: statistics.median(update.seconds) for side, update in updates.items()},
        "update": quartiles(updates["this"], updates["old"]),
        "scratch": updates["this"].scratch_bytes / updates["old"].scratch_bytes,
    }


def table(result: Mapping[str, Any]) -> str:
    """The JSON as Markdown."""
    sizes = result["sizes"]
    lines = [
        "# Updates, new core and old",
        "",
        f"`python -m benchmarks.before_parts`: {sizes['layers']} layers of d = {sizes['width']}, "
        f"{sizes['parameters'] / 1e6:.1f} M parameters, float32, {result['host']}, jax {result['jax']}. The old "
        f"package is commit {REVISION}, in the same process. A ratio is the median over rounds ({result['compiles']} "
        f"of compiling, {result['repeats']} of updates) of this package's figure in units of the old one's of the same "
        "round, with its quartiles for updates. Compiling counts CPU seconds of all threads, tracing included; scratch "
        "is the memory that the compiled update takes beside its arguments and results. `quotient_muon` has operations "
        "that the old package lacked: it divides every matrix by its largest entry first, so that steps do not depend "
        "on the size of gradients.",
        "",
        "| update | compile ratio | update ratio | scratch ratio | compile s, this and old | ms, this and old |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, r in result["rows"].items():
        low, middle, high = r["update"]
        compiles, updates = (r[key] for key in ("compile_s", "update_s"))
        lines.append(
            f"| {name} | {r['compile']:.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) | {r['scratch']:.2f} | "
            f"{compiles['this']:.1f}, {compiles['old']:.1f} | {1e3 * updates['this']:.0f}, {1e3 * updates['old']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compiles and times every row in both packages, prints and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=1024, help="small: the stack is what is measured")
    parser.add_argument("--compiles", type=int, default=3, help="rounds of compiling")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of updates")
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose name contains one of these")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    heads = args.width // 64
    config = lm.LMConfig(
        vocab=args.vocab, d_model=args.width, layers=args.layers, heads=heads, kv_heads=heads, d_head=64,
        d_ff=4 * args.width, max_len=512,
    )
    params, loss = lm.params_and_loss(config, jax.random.key(0))
    grads = jax.jit(jax.grad(loss))(params, jax.random.randint(jax.random.key(1), (2, 65), 0, config.vocab))
    gauges, old = lm.gauges(config), old_package()
    sides = {"this": optimizers(new, gauges), "old": optimizers(old, [rebuilt(gauge, old) for gauge in gauges])}
    sizes = {
        "layers": args.layers, "width": args.width, "vocab": args.vocab,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
    }
    result: dict[str, Any] = {
        "revision": REVISION, "sizes": sizes, "host": host(), "jax": jax.__version__, "compiles": args.compiles,
        "repeats": args.repeats, "rows": {},
    }
    path = args.out / "before_parts.json"
    if path.exists() and (before := json.loads(path.read_text())) | {"rows": {}} == result:
        result["rows"] = before["rows"]
    for name in [name for name in sides["this"] if any(part in name for part in args.only)]:
        pair = {side: rows[name] for side, rows in sides.items()}
        result["rows"][name] = row(pair, params, grads, args.compiles, args.repeats)
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1))
        (args.out / "before_parts.md").write_text(table(result))
    print(table(result))
    return result


if __name__ == "__main__":
    main()
