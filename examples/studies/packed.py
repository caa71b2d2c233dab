"""Training with packed heads: does a network without some rows of its heads reach the loss of the whole network?

    python -m examples.studies packed --out examples/results      # half an hour on two CPU cores; killed, it goes on
    python -m examples.studies packed --steps 30 --only "plain | *" "packed | *"       # to try it

A decoder of 2 layers (LayerNorm, GELU, learned positions, biases, 4 heads of 16) learns bytes of text. `go.orbit.pack`
moves heads to weights of the same function in which some rows are constant, and leaves these rows out: d_h² numbers per
head in the queries and as many in the values. AdamW then trains the other numbers. A *cell* is one arm, peak learning
rate and seed (of the initial weights and of the order of the data). The sweep of rates goes on until the best mean over
seeds has a worse neighbour on both sides. Finished cells are kept in packed.json and not trained again. At the end
packed.png is drawn, and the table is printed.

The arms: "plain" is without packing. "packed" is `go.orbit.pack` with its defaults; with "shared", all heads leave out
the same rows; with "identity", the constant rows are exactly the identity (`size=1.0`). "quotient" is AdamW inside
`go.quotient`, with the gauges that bind no packed leaf.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import gauge_optax as go
from examples import data
from examples.studies import harness, report
from examples.studies.harness import RATIO, Group, Result, Sweep, best, key
from examples.studies.starts import BATCH, DECAY, HELD_OUT, LENGTH, WARMUP, batches, held_out
from models import lm

CONFIG = lm.LMConfig(vocab=data.VOCAB, mlp="gelu")
FIRST = 1.6e-3


class Arm(NamedTuple):
    """An arm: options of `pack` (None if heads are not packed), whether AdamW is inside `quotient`, and a colour."""

    options: dict[str, Any] | None
    quotient: bool
    color: str


ARMS = {
    "plain": Arm(None, False, "tab:red"),
    "packed": Arm({}, False, "tab:blue"),
    "packed, identity": Arm({"size": 1.0}, False, "tab:cyan"),
    "packed, shared": Arm({"shared": True}, False, "tab:green"),
    "packed, shared, identity": Arm({"shared": True, "size": 1.0}, False, "tab:olive"),
    "packed, quotient": Arm({}, True, "tab:purple"),
}


def gauges() -> tuple[list[go.Gauge], list[go.Gauge]]:
    """Two lists: the gauges by which heads are packed, and those of the other gauges that bind no packed leaf."""
    everything = lm.gauges(CONFIG, linear=True)
    packed = [gauge for gauge in everything if gauge.name == "head_linear"]
    leaves = ("attn/query", "attn/key", "attn/value", "attn/out")
    kept = [gauge for gauge in everything if not any(name in repr(gauge) for name in leaves)]
    return packed, kept


@functools.cache
def initial(arm: str, seed: int) -> Any:
    """The initial parameters of a seed, packed with the options of the arm."""
    params, _ = lm.params_and_loss(CONFIG, jax.random.key(seed))
    options = ARMS[arm].options
    return params if options is None else go.orbit.pack(params, gauges()[0], **options)


@functools.lru_cache(maxsize=4)
def program(arm: str, seed: int, steps: int) -> Callable[..., Any]:
    """Compiles the runs of one arm and seed, for all rates.

    Each seed needs a program of its own, because packed leaves contain which rows are left out.
    """
    _, packed_loss = lm.params_and_loss(CONFIG, jax.random.key(0))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return packed_loss(go.orbit.unpack(params), tokens)

    def build(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        adamw = optax.adamw(rate, weight_decay=DECAY)
        return go.quotient(adamw, gauges()[1]) if ARMS[arm].quotient else adamw

    start = initial(arm, seed)
    if ARMS[arm].quotient:
        go.check(build(1e-3), build(1e-3).init(start), start, jax.grad(loss)(start, held_out()[0]))
    return harness.at_rates(build, lambda _: loss, (start, batches(steps, seed), held_out()), WARMUP)


def train_cell(cell: Group, steps: int) -> dict[str, Any]:
    """Trains one cell. Returns its losses, and how many numbers are trained."""
    arm, rate, seed = cell
    params = initial(arm, seed)
    inputs, keys = (params, batches(steps, seed), held_out()), ("validation", "training", "finite", "seconds")
    found = harness.scored(program(arm, seed, steps), inputs, rate, keys)
    return found | {"parameters": sum(x.size for x in jax.tree.leaves(params))}


# Results ------------------------------------------------------------------------------------------


def sweeps(result: Result) -> dict[str, dict[float, list[float]]]:
    """Arm → rate → validation losses of all seeds, for arms that have a finished rate."""
    found = {arm: Sweep((arm,), FIRST).losses(result) for arm in ARMS}
    return {arm: losses for arm, losses in found.items() if losses}


def section(result: Result) -> str:
    """The section on the page of all results: every arm at its best learning rate, compared with "plain" at its own."""
    found = sweeps(result)
    ends = {arm: np.array(losses[best(losses)]) for arm, losses in found.items()}
    plain = ends["plain"]
    lines = [["arm", "parameters", "rate", "validation loss", "to plain's, %", "not finite"]]
    for arm, at in ends.items():
        cells = [result["cells"][key((arm, rate, seed))] for rate in found[arm] for seed in result["seeds"]]
        change = 100 * (at / plain - 1)
        lines.append([arm, f"{cells[0]['parameters']:,}", f"{best(found[arm]):g}", f"{at.mean():.4f} ± {at.std():.4f}",
                      "" if arm == "plain" else f"{change.mean():+.2f} ± {change.std():.2f}",
                      f"{sum(not cell['finite'] for cell in cells)} of {len(cells)}"])
    saved = 2 * CONFIG.layers * CONFIG.heads * CONFIG.d_head**2
    about = ("A decoder of 2 layers and 4 heads of 16 (GELU, learned positions) on bytes of text, "
             f"{result['settings']['steps']} steps, {len(result['seeds'])} seeds, {result['machine']}, float32. "
             f"`go.orbit.pack` leaves 2 · layers · heads · d_h² = {saved:,} numbers out, and AdamW trains what is "
             "left. By default every head leaves out rows of its own, and `pack` chooses the number on the diagonal. "
             "*Shared*: all heads leave out the same rows (`shared=True`). *Identity*: that number is 1 (`size=1.0`). "
             "*Quotient*: AdamW inside `go.quotient`, with the gauges that bind no packed leaf. Every arm at the best "
             f"rate of its own sweep (rates are a factor of {RATIO} apart), mean ± standard deviation over seeds.")
    within: dict[bool, list[str]] = {True: [], False: []}
    for arm, at in list(ends.items())[1:]:
        near = abs(at.mean() - plain.mean()) <= np.hypot(at.std(), plain.std())
        within[bool(near)].append(f"*{arm}*")
    said = ("An arm's mean loss differs from the plain one's by at most the standard deviation over seeds (of both "
            f"runs together): {', '.join(within[True]) or 'no arm'}. By more: {', '.join(within[False]) or 'no arm'}.")
    return f"{about}\n\n{report.markdown(lines)}\n\n{said}"


def figure(result: Result, path: Path) -> None:
    """Draws validation loss over rates (a curve per arm, a band over seeds), and each arm's losses at its best rate."""
    found = sweeps(result)
    fig, (left, right) = report.plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for number, (arm, losses) in enumerate(found.items()):
        report.by_rate(left, losses, ARMS[arm].color, arm)
        at = losses[best(losses)]
        right.plot([number] * len(at), at, "o", color=ARMS[arm].color, alpha=0.7)
        right.plot([number - 0.25, number + 0.25], [np.mean(at)] * 2, color=ARMS[arm].color)
    lowest = min(float(np.mean(losses[best(losses)])) for losses in found.values())
    left.set(title="validation loss by rate", ylim=(0.98 * lowest, 1.1 * lowest))
    report.at_rates(left, [rate for losses in found.values() for rate in losses])
    left.legend(loc="upper left")
    right.set(title="at each arm's best rate: seeds, and their mean", ylabel="validation loss, nats per byte")
    right.set_xticks(range(len(found)), list(found), rotation=20, ha="right")
    right.grid(alpha=0.3)
    report.save_as_is(fig, path)


@dataclasses.dataclass(frozen=True)
class Config:
    """The number of training steps."""

    steps: int = 400


def cells(c: Config, args: argparse.Namespace) -> Callable[[Result], harness.Cells]:
    """The cells that the sweeps of all arms need next."""
    return harness.swept([Sweep((arm,), FIRST) for arm in ARMS], lambda cell: train_cell(cell, c.steps))


STUDY = harness.Study(
    __doc__, "packed", cells, section, figure, config=Config(), partial=True,
    settings=lambda c: {"steps": c.steps, "batch": BATCH, "length": LENGTH, "held_out": HELD_OUT, "decay": DECAY},
)
