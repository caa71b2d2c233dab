"""What fixing the gauge of multipliers costs: updates of GPT-2 124M in units of AdamW's.

    python -m benchmarks.multipliers                          # five minutes on 2 CPU cores, 8 GiB

AdamW is condition C of `models.multipliers`, on the whole tree with multipliers; beside it the same, fixed at every
step, with the product capped too, and with `track_balance` behind it. In turns, parameters and state donated. Whole
updates scatter by more than the difference: so the same again on the leaves that the gauge binds alone, in units of the
whole update. Writes benchmarks/results/multipliers.json and multipliers.md.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import gauge_optax as go
from benchmarks.timing import Update, host, in_turns, nbytes, prepared, quartiles
from examples import cli
from models import gpt2, lm, multipliers

OUT = Path(__file__).parent / "results"
MOST = 1.01


def variants(plain: optax.GradientTransformation, gauge: go.Gauge) -> dict[str, optax.GradientTransformation]:
    """An optimizer, and what is put around it."""
    return {
        "AdamW": plain,
        "fixed at every step": go.orbit.gauge_fix(plain, gauge),
        "fixed, product capped": go.orbit.gauge_fix(go.orbit.hold_products(plain, gauge, "cap", cap=3.0), gauge),
        "tracked": optax.chain(plain, go.measure.track_balance(gauge)),
    }


def measured(config: lm.LMConfig, rounds: int) -> dict[str, Any]:
    """Milliseconds, ratios, state, and milliseconds that each adds on the gauge's leaves."""
    params = nnx.to_pure_dict(nnx.split(gpt2.build(config, nnx.Rngs(0)))[1])
    sides = {"query": ("rows",), "key": ("rows",)}
    bound = {"blocks": {i: {"attn": {n: {k: x["attn"][n][k] for k in keys} for n, keys in sides.items()}}
             for i, x in params["blocks"].items()}}
    gauge = multipliers.head_gauge(config)
    whole = _timed(variants(multipliers.condition("C", 1e-4, gauge), gauge), params, rounds)
    alone = _timed(variants(optax.adam(1e-4), gauge), bound, 20 * rounds)
    plain = whole["AdamW"]
    rest = np.median(alone["AdamW"].seconds)
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "milliseconds": 1e3 * float(np.median(plain.seconds)),
        "ratios": {name: quartiles(update, plain) for name, update in whole.items() if update is not plain},
        "alone": {name: 1e3 * float(np.median(x.seconds) - rest) for name, x in alone.items() if name != "AdamW"},
        "state": {name: nbytes(update.state) / nbytes(plain.state) for name, update in whole.items()},
    }


def _timed(optimizers: dict[str, optax.GradientTransformation], params: Any, rounds: int) -> dict[str, Update]:
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: 1e-3 * rng.standard_normal(x.shape, np.float32), params)
    updates = {name: prepared(tx, params, grads) for name, tx in optimizers.items()}
    in_turns(updates, grads, rounds)
    return updates


def page(result: dict[str, Any]) -> str:
    """Markdown."""
    size, plain = result["parameters"] / 1e6, result["milliseconds"]
    about = f"{size:.1f}M parameters, AdamW's update {plain:.0f} ms; held to {MOST}."
    lines = [
        "# What fixing multipliers costs", "",
        f"`python -m benchmarks.multipliers`: {result['host']}; float32. {about}", "",
        "| | over AdamW's update (quartiles) | added on the gauge's leaves, ms | of the update | state |",
        "|---|---|---|---|---|",
    ]
    for name, (low, middle, high) in result["ratios"].items():
        added = result["alone"][name]
        share = added / plain
        missed = " **missed**" if 1.0 + share > MOST else ""
        lines.append(
            f"| {name} | {middle:.3f} ({low:.3f} to {high:.3f}) | {added:.2f} | {100 * share:.2f} %{missed} "
            f"| {result['state'][name]:.6f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Time everything; write JSON and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=cli.Help)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    result = {"host": host(), **measured(gpt2.config(layers=args.layers), args.rounds)}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "multipliers.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "multipliers.md").write_text(page(result))
    print(page(result))
    return result


if __name__ == "__main__":
    main()
