"""What an update costs beside `optax.adamw`'s: time, floating-point operations, bytes, memory, compile time.

    python -m benchmarks.update                       # 12 layers of d = 768; a quarter of an hour on 2 CPU cores
    python -m benchmarks.update --layers 2 --repeats 5

A GPT-2-like stack (LayerNorm, ReLU MLP, biases, untied head) with its full gauge set, float32, gradients of its own
loss. Every row is timed in turns with `optax.adamw`; a row's ratio is the median over rounds. No eigenbasis is
refreshed in a timed round. Writes benchmarks/results/update.json and update.md.
"""

import argparse
import json
import os
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from tqdm import tqdm

import gauge_optax as go
from benchmarks.timing import Update, best, in_turns, machine, prepared, ratio
from models import lm

V_MODES = ("body_frame_topk", "body_frame", "per_head_scalar", "per_head_matrix", "none")
RATE = 1e-6
"""Small, so that no eigenbasis drifts to a refresh while times are taken."""


def optimizers(gauges: Sequence[go.Gauge]) -> dict[str, optax.GradientTransformation]:
    """Rows of the table: the whole by mode, the whole by gauges, the links of the chain."""
    rotations = [g for g in gauges if g.name in ("head_rotation", "rope_torus")]
    scales = [g for g in gauges if g.name in ("norm_scale", "rescale")]
    shifts = [g for g in gauges if g.name == "logit_shift"]

    def ddc(gauges: Sequence[go.Gauge], **options: Any) -> optax.GradientTransformation:
        return go.ddc_adamw(RATE, gauges, weight_decay=0.1, **options)

    chain = optax.chain(
        go.gauge_project(gauges), go.scale_by_ddc(gauges), go.add_gauge_decay(0.1, gauges),
        optax.scale_by_learning_rate(RATE), go.gauge_retract(gauges),
    )
    with warnings.catch_warnings(action="ignore"):  # an empty list warns
        without = ddc([])
    return {
        **{f"ddc_adamw, {mode}": ddc(gauges, v_mode=mode) for mode in V_MODES},
        "ddc_adamw, no gauge": without,
        "ddc_adamw, shift alone": ddc(shifts),
        "ddc_adamw, scales alone": ddc(scales),
        "ddc_adamw, rotations alone": ddc(rotations),
        "ddc_adamw, rest='balanced'": ddc(gauges, rest="balanced"),
        "quotient(adamw)": go.quotient(optax.adamw(RATE, weight_decay=0.1), gauges),
        "quotient(adamw), rest='balanced'": go.quotient(optax.adamw(RATE, weight_decay=0.1), gauges, rest="balanced"),
        "the chain of five": chain,
        "gauge_project alone": optax.chain(go.gauge_project(gauges), optax.scale_by_learning_rate(RATE)),
        "scale_by_ddc alone": optax.chain(go.scale_by_ddc(gauges), optax.scale_by_learning_rate(RATE)),
        "gauge_retract alone": optax.chain(optax.scale_by_learning_rate(RATE), go.gauge_retract(gauges)),
    }


def row(update: Update, base: Update) -> dict[str, Any]:
    """One line of the table."""
    seconds = sorted(update.seconds)[len(update.seconds) // 2]
    cost = update.cost
    try:
        refreshes = int(optax.tree_utils.tree_get(update.state, "refreshes", default=0))
    except KeyError:
        refreshes = 0
    return {
        "seconds": seconds,
        "ratio": ratio(update, base),
        **cost,
        "gflop_s": cost["gflop"] / seconds,
        "gb_s": cost["gbyte"] / seconds,
        "compile_s": update.compile_seconds,
        "state_mb": sum(x.nbytes for x in jax.tree.leaves(update.state)) / 1e6,
        "refreshes": refreshes,
    }


def table(result: dict[str, Any]) -> str:
    """The JSON as Markdown."""
    sizes, best_of = result["sizes"], result["machine"]
    lines = [
        "# What an update costs",
        "",
        f"`python -m benchmarks.update`: {sizes['layers']} layers of d = {sizes['width']}, "
        f"{sizes['parameters'] / 1e6:.1f} M parameters, float32, {result['host']}, jax {result['jax']}. At best this "
        f"machine moves {best_of['memory_gb_s']:.0f} GB/s and does {best_of['product_gflop_s']:.0f} GFLOP/s "
        f"({best_of['heads_gflop_s']:.0f} on 12 products of 768 × 64 × 64). Ratio: median over {result['repeats']} "
        "rounds of the time in units of `optax.adamw`'s in the same round. GFLOP and GB are the compiler's count, and "
        "both branches of a condition and one round of a loop are in it.",
        "",
        "| update | ms | ratio | GFLOP | GB | GFLOP/s | GB/s | scratch MB | state MB | compile s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, r in result["rows"].items():
        lines.append(
            f"| {name} | {1e3 * r['seconds']:.0f} | {r['ratio']:.2f} | {r['gflop']:.2f} | {r['gbyte']:.2f} | "
            f"{r['gflop_s']:.0f} | {r['gb_s']:.0f} | {r['scratch_mb']:.0f} | {r['state_mb']:.0f} | "
            f"{r['compile_s']:.0f} |"
        )
    if "step" in result:
        step = result["step"]
        share = [
            f"{name} {100 * (r['seconds'] / (r['seconds'] + step['seconds'])):.1f} %"
            for name, r in result["rows"].items()
            if name in ("optax.adamw", "ddc_adamw, body_frame_topk", "ddc_adamw, per_head_scalar")
        ]
        lines += [
            "",
            f"Loss and gradient at batch {step['batch']} × {step['length']} take {step['seconds']:.1f} s; of a "
            f"training step, the update is: {', '.join(share)}.",
        ]
    return "\n".join(lines) + "\n"


def gradient_step(config: lm.LMConfig, params: Any, loss: Any, batch: int, length: int) -> float:
    """Seconds of loss and gradient on one batch."""
    tokens = jax.random.randint(jax.random.key(2), (batch, length + 1), 0, config.vocab)
    grad = jax.jit(jax.value_and_grad(loss))
    return best(lambda: grad(params, tokens), repeats=1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=1024, help="small: the stack is what is measured")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose name contains one of these")
    parser.add_argument("--step-batch", type=int, default=8, help="of the training step; 0 leaves it out")
    parser.add_argument("--step-length", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Time every row against `optax.adamw`, print and write the table."""
    args = parse(argv)
    config = lm.LMConfig(
        vocab=args.vocab, d_model=args.width, layers=args.layers, heads=args.width // 64, kv_heads=args.width // 64,
        d_head=64, d_ff=4 * args.width, max_len=max(args.step_length, 64),
    )
    params, loss = lm.params_and_loss(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 65), 0, config.vocab)
    grads = jax.block_until_ready(jax.jit(jax.grad(loss))(params, tokens))
    chosen = {n: tx for n, tx in optimizers(lm.gauges(config)).items() if any(part in n for part in args.only)}
    result: dict[str, Any] = {
        "sizes": {
            "layers": args.layers, "width": args.width, "vocab": args.vocab,
            "parameters": sum(x.size for x in jax.tree.leaves(params)),
        },
        "host": f"{os.cpu_count()} cores {platform.machine()}, {jax.devices()[0].device_kind}",
        "jax": jax.__version__, "repeats": args.repeats, "machine": machine(), "rows": {},
    }
    for name, tx in tqdm(chosen.items(), unit="row"):
        pair = {"optax.adamw": prepared(optax.adamw(RATE, weight_decay=0.1), params, grads)}
        pair[name] = prepared(tx, params, grads)
        in_turns(pair, grads, args.repeats)
        result["rows"].setdefault("optax.adamw", row(pair["optax.adamw"], pair["optax.adamw"]))
        result["rows"][name] = row(pair[name], pair["optax.adamw"])
    if args.step_batch:
        seconds = gradient_step(config, params, loss, args.step_batch, args.step_length)
        result["step"] = {"batch": args.step_batch, "length": args.step_length, "seconds": seconds}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "update.json").write_text(json.dumps(result, indent=1))
    (args.out / "update.md").write_text(table(result))
    print(table(result))
    return result


if __name__ == "__main__":
    main()
