"""With every symmetry of a decoder on the quotient: is training as good as with the usual ones, and what does it cost?

    python -m examples.studies whole_model --out examples/results     # an hour on 2 CPU cores; killed, it goes on
    python -m examples.studies whole_model --out examples/results --show         # the table, without training
    python -m examples.studies whole_model --steps 50 --only "llama | adamw | *" "llama | usual | *"       # to try it

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
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import gauge_optax as go
from benchmarks.timing import in_turns, prepared, quartiles
from examples import data
from examples.studies import harness, report
from examples.studies.harness import RATIO, Group, Result, Run, Sweep, best
from examples.studies.starts import BATCH, DECAY, HELD_OUT, LENGTH, WARMUP, batches, held_out
from models import lm

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
def program(name: str, arm: str, steps: int) -> Callable[..., Any]:
    """Compiled once for all rates."""
    params, loss = lm.params_and_loss(model(name), jax.random.key(0))
    inputs = params, batches(steps, SEEDS[0]), held_out()
    return harness.at_rates(lambda rate: optimizer(arm, model(name), rate), lambda _: loss, inputs, WARMUP)


def train_cell(cell: Group, steps: int) -> dict[str, Any]:
    """Train once."""
    name, arm, rate, seed = cell
    inputs = lm.params_and_loss(model(name), jax.random.key(seed))[0], batches(steps, seed), held_out()
    return harness.scored(program(name, arm, steps), inputs, rate, ("validation", "finite", "seconds"))


def costs(run: Run, name: str, width: int) -> dict[str, Any]:
    """Milliseconds of each arm's update, and quartiles of its ratio to AdamW's in the same round."""
    config = model(name, width)
    params, _ = lm.params_and_loss(config, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    draws = [1e-2 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    gradients = jax.tree.unflatten(tree, draws)
    updates = {arm: prepared(optimizer(arm, config, 1e-6), params, gradients) for arm in ARMS}
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
    """The sweep of a model and arm."""
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
    return report.markdown(lines)


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
    size = (14, 3.6 * len(MODELS))
    fig, axes = report.plt.subplots(len(MODELS), 3, figsize=size, layout="constrained", squeeze=False)
    for name, (by_rate, by_seed, cost) in zip(MODELS, axes, strict=True):
        found = finals(result, name)
        for arm in ARMS:
            if by_arm := swept((name, arm)).losses(result):
                report.by_rate(by_rate, by_arm, COLORS[arm], arm)
        if found:
            lowest = min(losses.mean() for _, losses in found.values())
            by_rate.set_ylim(lowest - 0.05, lowest + 0.4)
        by_rate.set_title(f"{name}: loss by peak rate")
        report.at_rates(by_rate, [rate for arm in ARMS for rate in swept((name, arm)).losses(result)])
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
        report.rows(cost, ARMS)
        cost.margins(x=0.3)
        cost.set(title=f"{name}: time of an update", xlabel="in units of AdamW's")
        for axis in (by_rate, by_seed, cost):
            axis.grid(alpha=0.3)
            axis.set_axisbelow(True)
    report.save_as_is(fig, path)


@dataclasses.dataclass(frozen=True)
class Config:
    """Steps of training."""

    steps: int = STEPS


def cells(c: Config, args: argparse.Namespace) -> Callable[[Result], harness.Cells]:
    """What the sweeps need next, then the times of updates."""
    trained = harness.swept(
        [swept((name, arm)) for name in MODELS for arm in ARMS], lambda cell: train_cell(cell, c.steps)
    )
    timed: harness.Cells = {
        ("costs", f"{name} {width}"): functools.partial(costs, name=name, width=width)
        for name in MODELS for width in (WIDTH, LARGER)
    }
    return lambda result: {**trained(result), **timed}


STUDY = harness.Study(
    __doc__, "whole_model", cells, section, figure, config=Config(), seeds=SEEDS, partial=True,
    settings=lambda c: {"steps": c.steps, "batch": BATCH, "length": LENGTH, "held_out": HELD_OUT, "width": WIDTH},
)
