"""What controlled rotation costs: updates in units of the inner optimizer's, and `track_rotation` in whole steps.

    python -m benchmarks.rotation                             # ten minutes on 2 CPU cores

Updates: each alias beside the optimizer that it wraps, on the kernels of 12 layers of width 768, in turns, parameters
and state donated. Steps: as in `benchmarks.metrics`. Writes benchmarks/results/rotation.json and rotation.md.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import gauge_optax as go
from benchmarks import metrics
from benchmarks.timing import host, in_turns, nbytes, prepared, quartiles
from examples import cli
from models import lm

OUT = Path(__file__).parent / "results"
MOST, RECORDS = 1.3, 50
NEURONS = {
    **{f"blocks/{{i}}/attn/{name}/kernel": "_ head channel" for name in ("query", "key", "value")},
    "blocks/{i}/attn/out/kernel": "_ _ channel",
    "blocks/{i}/mlp/up/kernel": "_ channel",
    "blocks/{i}/mlp/down/kernel": "_ channel",
}


def pairs() -> dict[str, tuple[optax.GradientTransformation, optax.GradientTransformation]]:
    """Name → (inner, its rotational variant)."""
    return {
        "adamw": (optax.adamw(1e-4, weight_decay=0.1), go.norms.rotational_adamw(1e-4, NEURONS, weight_decay=0.1)),
        "sgdm": (optax.sgd(1e-2, 0.9), go.norms.rotational_sgdm(1e-2, NEURONS)),
        "lion": (optax.lion(1e-4, weight_decay=0.1), go.norms.rotational_lion(1e-4, NEURONS, weight_decay=0.1)),
    }


def updates(layers: int, rounds: int) -> dict[str, Any]:
    """Milliseconds, ratios and bytes of state of every pair."""
    config = lm.LMConfig(vocab=256, d_model=768, layers=layers, heads=12, kv_heads=12, d_head=64, d_ff=3072, max_len=64)
    params, _ = lm.params_and_loss(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: 1e-3 * rng.standard_normal(x.shape, np.float32), params)
    rows = {}
    for name, (inner, variant) in pairs().items():
        both = {"inner": prepared(inner, params, grads), "variant": prepared(variant, params, grads)}
        in_turns(both, grads, rounds)
        rows[name] = {
            "inner_ms": 1e3 * float(np.median(both["inner"].seconds)),
            "ratio": quartiles(both["variant"], both["inner"]),
            "state": nbytes(both["variant"].state) / nbytes(both["inner"].state),
        }
    return rows


def whole_steps(size: metrics.Size, rounds: int) -> dict[str, Any]:
    """A training step with RV-AdamW in units of the same with AdamW."""
    params, loss = lm.params_and_loss(size.config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, size.config.vocab, (size.batch, size.config.max_len + 1))
    inner, variant = optax.adamw(1e-4, weight_decay=0.1), go.norms.rotational_adamw(1e-4, neurons(size.config))
    both = {name: prepared(tx, params, tokens, loss) for name, tx in (("inner", inner), ("variant", variant))}
    in_turns(both, tokens, rounds)
    return {
        "step_ms": 1e3 * float(np.median(both["inner"].seconds)),
        "ratio": quartiles(both["variant"], both["inner"]),
    }


def neurons(config: lm.LMConfig) -> dict[str, str]:
    """Of a model's blocks."""
    return NEURONS | ({"blocks/{i}/mlp/gate/kernel": "_ channel"} if config.mlp == "swiglu" else {})


def tracked(config: lm.LMConfig) -> metrics.Arms:
    """AdamW, and with `track_rotation` around it."""
    plain = optax.adamw(1e-4, weight_decay=0.1)
    return {"plain": plain, "tracked": go.measure.track_rotation(neurons(config), plain, every=metrics.EACH)}


def page(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "# What controlled rotation costs", "",
        f"`python -m benchmarks.rotation`: {result['host']}; float32. Updates on {result['layers']} layers of width "
        f"768; held to {MOST} times the inner optimizer's.", "",
        "| inner | its update, ms | variant over it (quartiles) | state |", "|---|---|---|---|",
    ]
    for name, row in result["updates"].items():
        low, middle, high = row["ratio"]
        missed = " **missed**" if middle > MOST else ""
        over = f"{middle:.2f} ({low:.2f} to {high:.2f}){missed}"
        lines.append(f"| {name} | {row['inner_ms']:.1f} | {over} | {row['state']:.4f} |")
    lines += [
        "",
        "Where leaves do not fit a cache the least is 1.4: no entry of the new vector is known before sums over the "
        "whole step are. AdamW's step goes over 7 arrays (four read, three written); one that has to come back for the "
        "parameters, and for the step or the moments it is made of, goes over 10, SGDM's and Lion's over 7 for 5. The "
        "rest is a compiler that makes one pass per sum.",
    ]
    lines += ["", "Whole training steps, RV-AdamW over AdamW:", ""]
    lines += ["| model, batch | step ms | ratio |", "|---|---|---|"]
    for name, row in result["whole"].items():
        low, middle, high = row["ratio"]
        lines.append(f"| {name} | {row['step_ms']:.1f} | {middle:.3f} ({low:.3f} to {high:.3f}) |")
    about = f"`track_rotation` around `optax.adamw`. {metrics.about(RECORDS)}"
    lines += ["", about, "", *metrics.table(result["steps"], RECORDS)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Time everything; write JSON and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=cli.Help)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="*", choices=metrics.SIZES, default=list(metrics.SIZES))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    result = {
        "host": host(), "layers": args.layers, "updates": updates(args.layers, args.rounds),
        "whole": {name: whole_steps(metrics.SIZES[name], args.rounds) for name in args.sizes},
        "steps": {name: metrics.measured(metrics.SIZES[name], tracked) for name in args.sizes},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rotation.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "rotation.md").write_text(page(result))
    print(page(result))
    return result


if __name__ == "__main__":
    main()
