"""What fixing the gauge of multipliers costs: updates of GPT-2 124M in units of AdamW's.

    python -m benchmarks.multipliers                          # five minutes on 2 CPU cores, 8 GiB

AdamW is condition C of `models.multipliers`, on the whole tree with multipliers; beside it the same, fixed at every
step, with the product capped too, and with `track_balance` behind it. In turns, parameters and state donated. Writes
benchmarks/results/multipliers.json and multipliers.md.
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
from benchmarks.timing import host, in_turns, nbytes, prepared, quartiles
from examples import cli
from models import gpt2, lm, multipliers

OUT = Path(__file__).parent / "results"
MOST = 1.01


def variants(gauge: go.Gauge) -> dict[str, optax.GradientTransformation]:
    """AdamW, and what is put around it."""
    fixed = multipliers.condition("B", 1e-4, gauge)
    capped = multipliers.condition("B", 1e-4, gauge, magnitude="cap", cap=3.0)
    plain = multipliers.condition("C", 1e-4, gauge)
    tracked = optax.chain(plain, go.track_balance(gauge))
    return {"AdamW": plain, "fixed at every step": fixed, "fixed, product capped": capped, "tracked": tracked}


def measured(config: lm.LMConfig, rounds: int) -> dict[str, Any]:
    """Milliseconds, ratios, state."""
    params = nnx.to_pure_dict(nnx.split(gpt2.build(config, nnx.Rngs(0)))[1])
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: 1e-3 * rng.standard_normal(x.shape, np.float32), params)
    own = {name: prepared(tx, params, grads) for name, tx in variants(multipliers.head_gauge(config)).items()}
    in_turns(own, grads, rounds)
    plain = own["AdamW"]
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "milliseconds": 1e3 * float(np.median(plain.seconds)),
        "ratios": {name: quartiles(update, plain) for name, update in own.items() if update is not plain},
        "state": {name: nbytes(update.state) / nbytes(plain.state) for name, update in own.items()},
    }


def page(result: dict[str, Any]) -> str:
    """Markdown."""
    size, plain = result["parameters"] / 1e6, result["milliseconds"]
    about = f"{size:.1f}M parameters, AdamW's update {plain:.0f} ms; held to {MOST}."
    lines = [
        "# What fixing multipliers costs", "",
        f"`python -m benchmarks.multipliers`: {result['host']}; float32. {about}", "",
        "| | over AdamW's update (quartiles) | state |", "|---|---|---|",
    ]  # fmt: skip
    for name, (low, middle, high) in result["ratios"].items():
        missed = " **missed**" if middle > MOST else ""
        lines.append(f"| {name} | {middle:.4f} ({low:.3f} to {high:.3f}){missed} | {result['state'][name]:.6f} |")
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
