"""Compares optimizers. The learning rates and decay of each are tuned by themselves, with the same number of runs.

    python -m benchmarks.tuned --out benchmarks/results           # days of one CPU core; killed, it goes on
    python -m benchmarks.tuned --out benchmarks/results --show    # the table of the finished runs

A Llama of 3 layers, d = 128, learns bytes of Python's standard library in 1,000 steps of 8 × 128 bytes. Three numbers
of an optimizer are tuned: the learning rate of matrices, that of all other leaves, and the decay. They are a *point*.
The search is deterministic, and uses one seed. From the best point so far it tries a neighbour of each number in turn,
first a factor of 2 away, and later a factor of √2. It moves to a neighbour with a lower loss. It ends when no neighbour
is better, or when the budget of runs is spent. The best point is then run with three other seeds.

`STAGES` lists problems and their optimizers, in the order in which they are run. In a stage after the first, the search
for an optimizer begins at its best point of the first stage. A stage with a budget of 0 only runs that point.
"""

import argparse
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import gauge_optax as go
from benchmarks.training import links as of
from benchmarks.training import recent
from benchmarks.training.links import NEURONS, TOKENS, Link, Rate
from benchmarks.training.runs import Arm, Gauges, Start, Task
from examples import data
from examples.studies import harness, starts
from examples.studies.harness import Group as Cell
from examples.studies.harness import Result, key
from examples.studies.report import markdown
from examples.studies.starts import STARTS
from models import lm

NAME = "tuned"
BUDGET, TUNING_SEED, SEEDS = 15, 42, (142, 242, 342)
DECAYS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
STRIDES = (2, 1)  # distances of neighbours: factors of √2 for a rate, positions in `DECAYS` for the decay

Point = tuple[int, int, int]
"""A point of the search: for two learning rates the number of factors √2 above the first value, and for the decay its
position in `DECAYS`."""


# Optimizers ---------------------------------------------------------------------------------------------


def _adamw(rate: Rate, decay: jax.Array, gauges: Gauges) -> Link:
    return of.split(of.adamw(lambda n: rate(n)[0], decay), of.adamw(lambda n: rate(n)[1], decay))


def _muon(rate: Rate, decay: jax.Array, gauges: Gauges) -> Link:
    return optax.contrib.muon(
        lambda n: rate(n)[0], weight_decay=decay, adam_b2=0.95, adam_weight_decay=decay,
        adam_learning_rate=lambda n: rate(n)[1], muon_weight_dimension_numbers=starts.muon_axes,
    )


def _max_norm_muon(rate: Rate, decay: jax.Array, gauges: Gauges, **options: Any) -> Link:
    return go.max_norm_muon(
        lambda n: rate(n)[0], gauges, {**NEURONS, **TOKENS}, {"{table}/embedding": "token _"}, weight_decay=decay,
        adam_learning_rate=lambda n: rate(n)[1], **options,
    )


class Tuned(NamedTuple):
    """An optimizer, and the point at which its first search begins.

    Attributes:
      arm: how the optimizer is made. Its schedule returns two rates.
      rates: the first learning rates, of matrices and of all other leaves.
      decay: the position in `DECAYS` of the first decay.
    """

    arm: Arm
    rates: tuple[float, float]
    decay: int

    def values(self, point: Point) -> tuple[float, float, float]:
        """The values at a point: two learning rates, with three digits, and the decay."""
        first, second = (float(f"{x * 2 ** (n / 2):.3g}") for x, n in zip(self.rates, point[:2], strict=True))
        return first, second, DECAYS[point[2]]


def _recent(
    make: Callable[[Rate, jax.Array], Link], rates: tuple[float, float], start: Start = lambda params, name: params
) -> Tuned:
    return Tuned(Arm(lambda rate, decay, gauges: make(rate, decay), start), rates, 2)


ARMS: Mapping[str, Tuned] = {
    "Muon": Tuned(Arm(_muon), (0.02, 0.02), 2),
    "max_norm_muon": Tuned(Arm(_max_norm_muon), (0.02, 0.01), 0),
    "AdamW": Tuned(Arm(_adamw), (4e-3, 4e-3), 2),
    "Muown": _recent(recent.muown, (6e-3, 0.02)),
    "NorMuon": _recent(recent.normuon, (0.02, 0.02)),
    "MuonH": _recent(recent.muonh, (0.02, 0.02), recent.its_start),
    "NorMuonH": _recent(functools.partial(recent.muonh, neurons=True), (0.02, 0.02), recent.its_start),
    "Aurora": _recent(recent.aurora, (0.02, 0.02)),
    "Scion": _recent(recent.scion, (0.02, 0.04)),
    "symmetry-compatible": _recent(recent.symmetric, (0.02, 0.02)),
    "Compositional Muon": _recent(recent.compositional, (0.02, 0.02)),
    "Muon, EMA-Nesterov": Tuned(Arm(recent.ahead(_muon)), (0.0141, 0.0283), 2),
    "Muon, tail average": Tuned(Arm(recent.averaged(_muon)), (0.0141, 0.0283), 2),
    "max_norm_muon, tail average": Tuned(Arm(recent.averaged(_max_norm_muon)), (0.02, 0.02), 0),
    "max_norm_muon, b2 0.99": Tuned(Arm(functools.partial(_max_norm_muon, adam_b2=0.99)), (0.02, 0.02), 0),
    "max_norm_muon, brake": Tuned(Arm(recent.even_pace(_max_norm_muon, 0.0, 1.0)), (0.02, 0.02), 0),
    "Muon, floor and brake": Tuned(Arm(recent.even_pace(_muon, 0.5, 2.0)), (0.0141, 0.0283), 2),
}
"""Name → optimizer. AdamW and Optax's Muon have b2 = 0.95 in Adam, and decay on every leaf. `max_norm_muon` has decay
on matrices only, and MuonH and NorMuonH on all leaves but matrices. Names with a comma are variants of an optimizer:
their search begins at the best point of that optimizer."""


# Problems and stages ------------------------------------------------------------------------------------


def llama(size: int = 128, layers: int = 3, **other: Any) -> lm.LMConfig:
    """A Llama with heads of size 32 and an MLP three times as wide as the residual stream."""
    heads = size // 32
    sizes = dict(vocab=data.VOCAB, d_model=size, layers=layers, heads=heads, kv_heads=heads, d_head=32, max_len=128)
    return lm.llama_config(**sizes, d_ff=3 * size, **other)


def task_of(config: lm.LMConfig, steps: int = 1000, prose: bool = False) -> Task:
    """The problem with this network and number of steps. A twentieth of the steps is the warm-up."""
    return Task(config, warmup=steps // 20, longest=steps, prose=prose)


FIRST = "1,000 steps"
PROBLEMS: Mapping[str, Task] = {
    FIRST: task_of(llama()),
    "another net and text": task_of(llama(norm="layernorm", bias=True, rope=False), prose=True),
    "4,000 steps": task_of(llama(), steps=4000),
    "width 256": task_of(llama(size=256)),
    "depth 8": task_of(llama(layers=8)),
}


class Stage(NamedTuple):
    """A part of the comparison: optimizers on one problem, from one kind of start.

    Attributes:
      problem: a key of `PROBLEMS`.
      start: the kind of initial weights, one of `starts.STARTS`.
      arms: the names of the optimizers, whose searches advance in turns.
      budget: the number of runs of a search; 0 if nothing is tuned.
    """

    problem: str
    start: str
    arms: tuple[str, ...]
    budget: int = BUDGET


BOTH = ("Muon", "max_norm_muon")
LONGER = ("4,000 steps", "width 256", "depth 8")
RECENT = (
    "Muown", "MuonH", "NorMuon", "NorMuonH", "Aurora", "symmetry-compatible", "Muon, EMA-Nesterov", "Scion",
    "Compositional Muon",
)
STAGES = (
    Stage(FIRST, "lecun", BOTH), Stage(FIRST, "lecun", ("AdamW",)),
    Stage("another net and text", "lecun", (*BOTH, "AdamW"), budget=0),
    *(Stage(FIRST, start, (*BOTH, "AdamW")) for start in STARTS[1:]),
    *(Stage(problem, "lecun", BOTH) for problem in ("4,000 steps", "width 256")),
    *(Stage(FIRST, "lecun", (arm,)) for arm in RECENT),
    Stage(FIRST, "lecun", ("Muon, tail average", "max_norm_muon, tail average"), budget=0),
    Stage("depth 8", "lecun", BOTH),
    *(Stage(problem, "lecun", ("AdamW",)) for problem in LONGER),
    Stage(FIRST, "lecun", ("max_norm_muon, b2 0.99", "max_norm_muon, brake", "Muon, floor and brake"), budget=0),
    # At 1,000 steps the losses of these two differ from that of `max_norm_muon` by no more than about their errors.
    *(Stage(problem, "lecun", (arm,)) for problem in LONGER for arm in ("symmetry-compatible", "NorMuon")),
)


def cell(stage: Stage, arm: str, point: Point, seed: int) -> Cell:
    """The cell of one run: of an optimizer at a point, in a stage, with a seed."""
    rate, other, decay = ARMS[arm].values(point)
    return stage.problem, stage.start, arm, other, decay, rate, seed


def train(of_run: Cell) -> dict[str, Any]:
    """Makes one run. Returns its numbers, the machine that it ran on, and the version of JAX."""
    problem, start, arm, other, decay, rate, seed = of_run
    run = PROBLEMS[problem].train(ARMS[arm].arm, start, decay, (rate, other), seed)
    return run | {"machine": harness.machine(), "jax": jax.__version__}


# The search ---------------------------------------------------------------------------------------------


def search(losses: Mapping[Point, float], origin: Point, budget: int) -> Point | None:
    """The next point of a search; None if no neighbour of the best point is better, or if the budget is spent.

    Args:
      losses: point → loss, of the points that were run.
      origin: the point at which the search begins.
      budget: the largest number of points.

    >>> search({}, (0, 0, 2), 15), search({(0, 0, 2): 2.0}, (0, 0, 2), 15)
    ((0, 0, 2), (2, 0, 2))
    >>> search({(0, 0, 2): 2.0, (2, 0, 2): 1.9}, (0, 0, 2), 15)  # it has moved
    (2, 2, 2)
    """
    if origin not in losses:
        return origin
    best = origin
    for stride in STRIDES:
        waiting = list(_neighbours(best, stride))
        while waiting:
            point = waiting.pop(0)
            if point not in losses:
                return point if len(losses) < budget else None
            if losses[point] < losses[best]:
                knob = next(k for k in range(3) if point[k] != best[k])
                best, around = point, list(_neighbours(point, stride))
                # Neighbours in the number that has just moved come last, because the other two numbers have not been
                # tried with its new value yet.
                waiting = [x for x in around if x[knob] == best[knob]] + [x for x in around if x[knob] != best[knob]]
    return None


def _neighbours(point: Point, stride: int) -> Iterator[Point]:
    for knob in range(3):
        for sign in (1, -1):
            moved = list(point)
            moved[knob] += sign * stride
            if 0 <= moved[2] < len(DECAYS):
                yield moved[0], moved[1], moved[2]


class Found(NamedTuple):
    """The progress of an optimizer in a stage.

    Attributes:
      losses: point → loss, of the points that the search has run.
      waiting: the cell to run next; None if all runs are finished.
      point: the best point; None until the search has ended.
      final: the losses of the best point for the other seeds.
    """

    losses: dict[Point, float]
    waiting: Cell | None
    point: Point | None
    final: dict[int, float]


def found(result: Result, stage: Stage, arm: str) -> Found:
    """Finds the progress of an optimizer in a stage: replays its search with the losses of the finished runs."""
    origin = (0, 0, ARMS[arm].decay)
    first = next(other for other in STAGES if arm in other.arms)._replace(arms=(arm,))
    if stage._replace(arms=(arm,)) != first:
        known = found(result, first, arm)
        if known.point is None:
            return Found({}, known.waiting, None, {})
        origin = known.point
    losses: dict[Point, float] = {}
    point: Point | None = origin
    if stage.budget:
        while (tried := search(losses, origin, stage.budget)) is not None:
            loss = loss_of(result, cell(stage, arm, tried, TUNING_SEED))
            if loss is None:
                return Found(losses, cell(stage, arm, tried, TUNING_SEED), None, {})
            losses[tried] = loss
        point = min(losses, key=lambda x: losses[x])
    assert point is not None
    runs = {seed: cell(stage, arm, point, seed) for seed in SEEDS}
    final = {seed: loss for seed, run in runs.items() if (loss := loss_of(result, run)) is not None}
    return Found(losses, next((runs[seed] for seed in SEEDS if seed not in final), None), point, final)


def loss_of(result: Result, run: Cell) -> float | None:
    """The loss of a finished run, inf if it diverged; None if the run is not finished."""
    done = result["cells"].get(key(run))
    return None if done is None else math.inf if done["validation"] is None else done["validation"]


def waiting(result: Result) -> list[Cell]:
    """The runs that may be made next, stage by stage. In a stage, the optimizer with the fewest runs comes first."""
    runs: list[Cell] = []
    for stage in STAGES:
        known = [own for arm in stage.arms if (own := found(result, stage, arm)).waiting is not None]
        runs += [own.waiting for own in sorted(known, key=lambda own: len(own.losses) + len(own.final)) if own.waiting]
    return list(dict.fromkeys(runs))


# Table --------------------------------------------------------------------------------------------------


def mean_and_error(losses: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error over seeds."""
    return float(np.mean(losses)), float(np.std(losses, ddof=1) / len(losses) ** 0.5)


def rows(result: Result) -> Iterator[list[str]]:
    """The rows of the table: one per problem, start and optimizer."""
    for stage in STAGES:
        muon = found(result, stage._replace(arms=("Muon",)), "Muon").final
        for arm in stage.arms:
            known = found(result, stage, arm)
            tuned = f"{min(known.losses.values()):.4f}" if known.losses else "–"
            knobs = "–" if known.point is None else "{:g}, {:g}, {:g}".format(*ARMS[arm].values(known.point))
            done = "" if not stage.budget else f" of {stage.budget}" if known.point is None else " (done)"
            ended, apart = f"{len(known.final)} of {len(SEEDS)} seeds", "–"
            if len(known.final) == len(SEEDS):
                ended = "{:.4f} ± {:.4f}".format(*mean_and_error(list(known.final.values())))
                if arm != "Muon" and len(muon) == len(SEEDS):
                    gaps = [known.final[seed] - muon[seed] for seed in SEEDS]
                    apart = "{:+.4f} ± {:.4f}".format(*mean_and_error(gaps))
            made = [cell(stage, arm, point, TUNING_SEED) for point in known.losses]
            made += [cell(stage, arm, known.point, seed) for seed in known.final if known.point is not None]
            machines = dict.fromkeys(machine_of(result, key(run)) for run in made)
            tries = f"{len(known.losses)}{done}"
            yield [stage.problem, stage.start, arm, tries, tuned, knobs, ended, apart, ", ".join(machines) or "–"]


def machine_of(result: Result, name: str) -> str:
    """The machine on which a run was made. Older runs do not say it, and are of the machine in the header."""
    return str(result["cells"][name].get("machine", result.get("machine")))


def section(result: Result) -> str:
    """The results as Markdown: a table, and a list of what is not finished."""
    begun = "; ".join("{} {:g}, {:g}, {:g}".format(arm, *own.values((0, 0, own.decay))) for arm, own in ARMS.items())
    seconds = sorted(x["seconds"] for x in result["cells"].values())
    older = result.get("versions", {}).get("jax")
    made_on = Counter(f"{machine_of(result, name)}, JAX {x.get('jax', older)}" for name, x in result["cells"].items())
    by_machine = "; ".join(f"{count} runs: {machine}" for machine, count in made_on.most_common())
    about = (
        f"Bytes of text, batches of 8 × 128, a warm-up over a twentieth of the steps and a cosine to zero; validation "
        f"loss in nats per byte, float32, one thread of a CPU or a whole GPU ({by_machine}). *Machine* says whose runs "
        f"a row holds. *Numbers*: the rate of matrices, the rate of all other leaves, the decay. Seed {TUNING_SEED} "
        f"tunes them by at most {BUDGET} runs for each optimizer and start; the best point of them ends at the loss "
        f"*tuned*, and then runs with the seeds {', '.join(map(str, SEEDS))}, which had no part in the choice: *loss* "
        f"is their mean and its standard error, *less Muon* that of the difference, seed by seed. The first searches "
        f"begin at {begun}; later ones begin at the best point of the first. *Another net and text* (LayerNorm, "
        f"biases, learned positions; English prose) takes that point as it is. In searches of max_norm_muon, unlike in "
        f"its rows, a decay was still a part of the update whose length is divided out. {len(seconds)} runs are done"
        + (f", of {seconds[len(seconds) // 2]:.0f} s in the median." if seconds else ".")
    )
    heads = ["problem", "start", "optimizer", "tries", "tuned", "numbers", "loss", "less Muon", "machine"]
    known = [(stage, arm, found(result, stage, arm)) for stage in STAGES for arm in stage.arms]
    missing = [f"{arm} ({stage.problem}, {stage.start})" for stage, arm, own in known if own.waiting is not None]
    unfinished = f"Not finished: {'; '.join(missing)}." if missing else "All stages are finished."
    return f"{about}\n\n{markdown([heads, *rows(result)])}\n\n{unfinished}"


# Study --------------------------------------------------------------------------------------------------


def settings(_: None) -> dict[str, Any]:
    """Settings that must be equal for two runs that share a file: hashes of the texts, and the seed of searches."""
    texts = {name: hashlib.sha256(text.tobytes()).hexdigest()[:12]
             for name, text in (("sources", data.read_bytes()), ("prose", data.read_prose()))}
    return {"tuning_seed": TUNING_SEED, "texts": texts}


def head(_: None) -> Result:
    """The header of the results. It has no machine and no versions, which may differ: each run says its own."""
    return {"study": NAME, "settings": settings(None), "seeds": list(SEEDS), "cells": {}}


def cells(_: None, args: argparse.Namespace) -> Callable[[Result], harness.Cells]:
    """The runs that may be made next. Several processes can share them."""
    return lambda result: harness.keyed(waiting(result), train)


STUDY = harness.Study(
    __doc__, NAME, cells, section, seeds=SEEDS, head=head, partial=True,
    page=lambda result: f"# Optimizers with tuned rates\n\n`python -m benchmarks.tuned`. {section(result)}\n",
)

if __name__ == "__main__":
    harness.main(STUDY)
