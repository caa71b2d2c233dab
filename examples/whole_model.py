"""With every symmetry of a decoder on the quotient: is training as good as with the usual ones, and what does it cost?

    python -m examples.whole_model --out examples/results     # an hour on 2 CPU cores; killed, it goes on where it was
    python -m examples.whole_model --out examples/results --plan         # what is missing, without training
    python -m examples.whole_model --models llama --steps 50 --arms adamw whole       # to try it

Two decoders of 2 layers (d = 64) on bytes of text: "gpt" has LayerNorms, biases, learned positions and GELU; "llama"
has RMSNorms, rotary embeddings, grouped queries and SwiGLU. The arms, all with AdamW inside:

* adamw: without gauges.
* usual: `quotient` with `lm.gauges`: norm scales, rotations of heads, rescalings, the logit shift.
* whole: `quotient` with `lm.whole_gauges`: also the rotation of the residual stream, what LayerNorms hide, and biases.
* held: the same, and the stream is kept from turning.

A cell is a model, arm, peak rate and seed (initial weights and order of the data). A sweep goes on until the best mean
over seeds has a worse neighbour on both sides. Finished cells are kept in whole_model.json and not trained again.
Afterwards the updates of all arms are timed in turns, at the trained width and at a larger one, and whole_model.png is
drawn. Losses are validation losses in nats per byte. *Seed noise* is the standard deviation over seeds of the arm
"usual".
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax

import gauge_optax as go
from benchmarks.timing import in_turns, prepared, quartiles
from examples import cli, data, study
from examples.starts import BATCH, DECAY, HELD_OUT, LENGTH, WARMUP, batches, held_out
from examples.sweep import RATIO, Cell, Result, Sweep, best, fill, markdown, trained
from models import lm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Group = tuple[str, str]
"""Model, arm: one sweep."""

STEPS, SEEDS, FIRST = 400, (42, 142, 242, 342, 442), 1.6e-3
WIDTH, LARGER = 64, 512
MODELS: dict[str, dict[str, Any]] = {
    "gpt": dict(mlp="gelu"),
    "llama": dict(norm="rmsnorm", rope=True, mlp="swiglu", bias=False),
}
ARMS: dict[str, Callable[[lm.LMConfig], list[go.Gauge] | None]] = {
    "adamw": lambda config: None,
    "usual": lm.gauges,
    "whole": lambda config: lm.whole_gauges(config, linear=False),
    "held": lambda config: lm.whole_gauges(config, linear=False, hold=True),
}
COLORS = {"adamw": "tab:red", "usual": "tab:blue", "whole": "tab:green", "held": "tab:purple"}
ROUNDS = 30  # of timed updates


def model(name: str, width: int = WIDTH) -> lm.LMConfig:
    """Four heads; of the Llama's, two share a key head."""
    groups = 2 if name == "llama" else 4
    hidden = 4 * width if name == "gpt" else 3 * width
    return lm.LMConfig(
        vocab=data.VOCAB, d_model=width, layers=2, heads=4, kv_heads=groups, d_head=width // 4, d_ff=hidden,
        max_len=LENGTH, **MODELS[name],
    )


def optimizer(arm: str, config: lm.LMConfig, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """AdamW, inside `quotient` if the arm has gauges."""
    adamw, gauges = optax.adamw(rate, weight_decay=DECAY), ARMS[arm](config)
    return adamw if gauges is None else go.quotient(adamw, gauges)


# Training -----------------------------------------------------------------------------------------


@functools.cache
def program(name: str, arm: str, steps: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Compiled once: (initial weights, batches, held-out batches, rate) → training losses, validation loss."""
    params, loss = lm.params_and_loss(model(name), jax.random.key(0))
    shape = optax.warmup_cosine_decay_schedule(0.1, 1.0, warmup_steps=min(WARMUP, steps // 2), decay_steps=steps)

    def run(params: Any, batches: jax.Array, held_out: jax.Array, rate: jax.Array) -> tuple[jax.Array, jax.Array]:
        return trained(optimizer(arm, model(name), lambda n: rate * shape(n)), loss, params, batches, held_out)

    return jax.jit(run).lower(params, batches(steps, SEEDS[0]), held_out(), jnp.float32(0)).compile()


def train_cell(cell: Cell, steps: int) -> dict[str, Any]:
    """Train once: validation loss, None where a loss is not finite; seconds on the clock, without compiling."""
    name, arm, rate, seed = cell
    run, (params, _) = program(name, arm, steps), lm.params_and_loss(model(name), jax.random.key(seed))
    began = time.monotonic()
    losses, validation = jax.device_get(run(params, batches(steps, seed), held_out(), jnp.float32(rate)))
    finite = bool(np.isfinite(losses).all() and np.isfinite(validation))
    seconds = round(time.monotonic() - began, 1)
    return {"validation": float(validation) if finite else None, "finite": finite, "seconds": seconds}


def costs(name: str, width: int, arms: Sequence[str]) -> dict[str, Any]:
    """Milliseconds of each arm's update, and quartiles of its ratio to AdamW's in the same round."""
    config = model(name, width)
    params, _ = lm.params_and_loss(config, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    draws = [1e-2 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    gradients = jax.tree.unflatten(tree, draws)
    names = dict.fromkeys(["adamw", *arms])
    updates = {arm: prepared(optimizer(arm, config, 1e-6), params, gradients) for arm in names}
    in_turns(updates, gradients, ROUNDS)
    return {
        arm: {
            "milliseconds": round(1e3 * float(np.median(update.seconds)), 2),
            "ratio": [round(x, 2) for x in quartiles(update, updates["adamw"])],
            "dimensions": 0 if (gauges := ARMS[arm](config)) is None else go.measure.redundancy(gauges, params),
            "parameters": sum(x.size for x in leaves),
        }
        for arm, update in updates.items()
    }


# Results ------------------------------------------------------------------------------------------


def swept(group: Group) -> Sweep:
    """The sweep of a group."""
    return Sweep(group, FIRST)


def finals(result: Result, name: str) -> dict[str, tuple[float, np.ndarray]]:
    """Arm → its best rate, and the losses there, seed by seed; finished sweeps."""
    losses = {arm: swept((name, arm)).losses(result) for arm in ARMS if not swept((name, arm)).missing(result)}
    return {arm: (best(x), np.array(x[best(x)])) for arm, x in losses.items()}


def table(result: Result) -> str:
    """Markdown: every arm at its best rate, beside "usual" seed by seed, and what its update costs."""
    lines = [["model", "arm", "dead directions", "loss", "at rate", "less usual's", f"update, d = {WIDTH}",
              f"update, d = {LARGER}"]]
    for name in MODELS:
        found = finals(result, name)
        for arm, (rate, losses) in found.items():
            lines += [[
                name, arm, *_dimensions(result, name, arm), f"{losses.mean():.4f} ± {losses.std():.4f}", f"{rate:g}",
                f"{(losses - found['usual'][1]).mean():+.4f} ± {(losses - found['usual'][1]).std():.4f}"
                if "usual" in found else "",
                *(_cost(result, name, width, arm) for width in (WIDTH, LARGER)),
            ]]
    return markdown(lines)


def _dimensions(result: Result, name: str, arm: str) -> list[str]:
    row = result.get("costs", {}).get(f"{name} {WIDTH}", {}).get(arm)
    return [f"{row['dimensions']:,} of {row['parameters']:,}" if row else ""]


def _cost(result: Result, name: str, width: int, arm: str) -> str:
    row = result.get("costs", {}).get(f"{name} {width}", {}).get(arm)
    return f"{row['ratio'][1]:.2f} ({row['milliseconds']:.1f} ms)" if row else ""


def verdicts(result: Result) -> str:
    """One sentence per model: whether "whole" and "held" stay within the seed noise of "usual"."""
    said = []
    for name in MODELS:
        found = finals(result, name)
        if "usual" not in found:
            continue
        noise = found["usual"][1].std()
        for arm in ("whole", "held"):
            if arm in found:
                gap = float((found[arm][1] - found["usual"][1]).mean())
                holds = "within" if abs(gap) <= noise else "NOT within"
                said.append(f"{name}, {arm}: {gap:+.4f}, {holds} the seed noise of {noise:.4f}.")
    return " ".join(said)


def section(result: Result) -> str:
    """Its part of the page of all results."""
    settings = result["settings"]
    about = (
        f"Two decoders of 2 layers, d = {WIDTH}, {settings['steps']} steps on bytes of text, {len(result['seeds'])} "
        f"seeds, {result['machine']}: *gpt* has LayerNorms, biases, learned positions and GELU; *llama* has RMSNorms, "
        "rotary embeddings, grouped queries and SwiGLU. All arms have AdamW inside. *usual* is `quotient` with "
        "`lm.gauges`; *whole* is `quotient` with `lm.whole_gauges`, which adds the rotation of the residual stream, "
        "what LayerNorms hide and what biases can take over; *held* also keeps the stream from turning. Heads have "
        "rotations in all arms, not GL."
    )
    columns = (
        f"Every arm stands at the best rate of its own sweep (rates are a factor of {RATIO} apart). *Dead directions* "
        "are those that the arm's gauges bind, of all parameters. *Less usual's* is the difference to *usual*, seed by "
        "seed. *Update* is the median over rounds of the time of `tx.update` in units of AdamW's in the same round, "
        "float32."
    )
    claim = (
        "The claim: with all symmetries on the quotient, training stays within seed noise (the standard deviation of "
        f"*usual* over seeds). {verdicts(result)}"
    )
    return f"{about}\n\n{columns}\n\n{table(result)}\n\n{claim}"


def figure(result: Result, path: Path) -> None:
    """A row per model: loss by rate; loss at the best rate less that of "usual", by seed; cost of an update."""
    fig, axes = plt.subplots(len(MODELS), 3, figsize=(14, 3.6 * len(MODELS)), layout="constrained", squeeze=False)
    for name, (by_rate, by_seed, cost) in zip(MODELS, axes, strict=True):
        found = finals(result, name)
        for arm in ARMS:
            if by_arm := swept((name, arm)).losses(result):
                values = np.array(list(by_arm.values()))
                by_rate.plot(list(by_arm), values.mean(1), ".-", color=COLORS[arm], label=arm)
                by_rate.fill_between(list(by_arm), values.min(1), values.max(1), color=COLORS[arm], alpha=0.15, lw=0)
        if found:
            lowest = min(losses.mean() for _, losses in found.values())
            by_rate.set_ylim(lowest - 0.05, lowest + 0.4)
        by_rate.set(title=f"{name}: loss by peak rate", xlabel="peak learning rate", ylabel="nats per byte")
        by_rate.set_xscale("log")
        ticks = sorted({line for arm in ARMS for line in swept((name, arm)).losses(result)})
        by_rate.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        by_rate.set_xticks([], minor=True)
        by_rate.legend(title="lines: mean; bands: all seeds", fontsize=8, title_fontsize=8)
        if "usual" in found:
            base = found["usual"][1]
            by_seed.axvspan(-base.std(), base.std(), color="0.9", label="seed noise of usual")
            for row, (arm, (_, losses)) in enumerate(found.items()):
                by_seed.plot(losses - base, np.full(len(losses), row), "o", color=COLORS[arm], alpha=0.5)
                by_seed.plot((losses - base).mean(), row, "|", color=COLORS[arm], ms=22, mew=3)
            by_seed.set_yticks(range(len(found)), list(found))
            by_seed.set_ylim(len(found) - 0.5, -0.5)
            by_seed.legend(fontsize=8, loc="lower right")
        by_seed.set(title=f"{name}: loss at the best rate, less that of usual", xlabel="nats per byte; left is better")
        for offset, width, shade in ((-0.2, WIDTH, 0.45), (0.2, LARGER, 1.0)):
            rows = result.get("costs", {}).get(f"{name} {width}", {})
            for row, arm in enumerate(arm for arm in ARMS if arm in rows):
                middle = rows[arm]["ratio"][1]
                cost.barh(row + offset, middle, 0.36, color=COLORS[arm], alpha=shade)
                cost.text(middle, row + offset, f" {middle:.1f} (d = {width})", va="center", fontsize=8)
        cost.set_yticks(range(len(ARMS)), list(ARMS))
        cost.invert_yaxis()
        cost.margins(x=0.3)
        cost.set(title=f"{name}: time of an update", xlabel="in units of AdamW's")
        for axis in (by_rate, by_seed, cost):
            axis.grid(alpha=0.3)
            axis.set_axisbelow(True)
    fig.savefig(path, dpi=100)
    plt.close(fig)


# Command line -------------------------------------------------------------------------------------


# Elsewhere than on a CPU the default is shorter floats in matrix products.
@jax.default_matmul_precision("highest")
def main(argv: Sequence[str] | None = None) -> Result:
    """Run what is missing, print the table, write JSON and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=cli.Help)
    parser.add_argument("--out", type=Path, default=Path("outputs/whole_model"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--widths", type=int, nargs="*", default=[WIDTH, LARGER], help="at which updates are timed")
    parser.add_argument("--plan", action="store_true", help="print what is missing, and the table of what is not")
    args = parser.parse_args(argv)
    settings = {"steps": args.steps, "batch": BATCH, "length": LENGTH, "held_out": HELD_OUT, "width": WIDTH}
    head = {"study": "whole_model", "settings": settings, "seeds": args.seeds, "machine": study.machine()}
    path = args.out / "whole_model.json"
    result = study.load(path, head | {"versions": {"jax": jax.__version__, "optax": optax.__version__}})
    chosen = [(name, arm) for name in args.models for arm in args.arms]
    if args.plan:
        for group in chosen:
            print(f"{' | '.join(group)}: {len(swept(group).missing(result)) or 'nothing'} missing")
        print(table(result))
        return result
    result = fill(path, result, [swept(group) for group in chosen], lambda cell: train_cell(cell, args.steps))
    for name in args.models:
        for width in args.widths:
            if f"{name} {width}" not in result.get("costs", {}):
                measured = costs(name, width, args.arms)
                result = json.loads(path.read_text())
                result.setdefault("costs", {})[f"{name} {width}"] = measured
                study.write(path, result)
    print(section(result))
    figure(result, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png')}")
    return result


if __name__ == "__main__":
    main()
