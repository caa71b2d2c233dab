"""Optimizers whose rates and decay are tuned apart, by an equal budget of runs, in one queue that goes on after a kill.

    python -m benchmarks.tuned --out benchmarks/results           # days of one CPU core; killed, it goes on
    python -m benchmarks.tuned --out benchmarks/results --show    # the table of what is done

A Llama of 3 layers, d = 128, on bytes of Python's standard library: 1,000 steps of 8 × 128 bytes. An optimizer has
three numbers: the rate of matrices, the rate of all other leaves, and the decay. A search that anyone can repeat tunes
them with one seed: from the best point so far it tries a neighbour of each number in turn, a factor of 2 away and then
a factor of √2, and moves where the loss is lower, until no neighbour is better or the budget is spent. The best point
then runs with three other seeds. `STAGES` says in which order; a stage after the first begins its searches at the
optimizer's best point of the first, and a stage without a budget runs that point alone.
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
STRIDES = (2, 1)  # factors of √2 for a rate, places in `DECAYS` for the decay

Point = tuple[int, int, int]
"""Two rates, as factors of √2 above their first value, and the decay, as a place in `DECAYS`."""


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
    """An optimizer, and where the first search begins.

    Attributes:
      arm: how it is made; its schedule returns two rates.
      rates: of matrices and of all other leaves.
      decay: a place in `DECAYS`.
    """

    arm: Arm
    rates: tuple[float, float]
    decay: int

    def values(self, point: Point) -> tuple[float, float, float]:
        """The two rates, to three digits, and the decay."""
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
"""AdamW and Optax's Muon with b2 = 0.95 of Adam, and decay on every leaf; `max_norm_muon` decays matrices, MuonH and
NorMuonH all leaves but matrices. Those with a comma begin where the search of the optimizer that they change
ended."""


# Problems and stages ------------------------------------------------------------------------------------


def llama(size: int = 128, layers: int = 3, **other: Any) -> lm.LMConfig:
    """A Llama with heads of size 32 and an MLP three times as wide as the residual stream."""
    heads = size // 32
    sizes = dict(vocab=data.VOCAB, d_model=size, layers=layers, heads=heads, kv_heads=heads, d_head=32, max_len=128)
    return lm.llama_config(**sizes, d_ff=3 * size, **other)


def task_of(config: lm.LMConfig, steps: int = 1000, prose: bool = False) -> Task:
    """A problem of so many steps, a twentieth of which warm up."""
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
    """Optimizers on one problem, from one start.

    Attributes:
      problem: a key of `PROBLEMS`.
      start: the initial weights, one of `starts.STARTS`.
      arms: the optimizers, which take turns.
      budget: runs of a search; 0 for none.
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
    # The two that are level with `max_norm_muon` at 1,000 steps.
    *(Stage(problem, "lecun", (arm,)) for problem in LONGER for arm in ("symmetry-compatible", "NorMuon")),
)


def cell(stage: Stage, arm: str, point: Point, seed: int) -> Cell:
    """One run."""
    rate, other, decay = ARMS[arm].values(point)
    return stage.problem, stage.start, arm, other, decay, rate, seed


def train(of_run: Cell) -> dict[str, Any]:
    """One run, the machine that it ran on, and the version of JAX."""
    problem, start, arm, other, decay, rate, seed = of_run
    run = PROBLEMS[problem].train(ARMS[arm].arm, start, decay, (rate, other), seed)
    return run | {"machine": harness.machine(), "jax": jax.__version__}


# The search ---------------------------------------------------------------------------------------------


def search(losses: Mapping[Point, float], origin: Point, budget: int) -> Point | None:
    """The point to run next; None once no neighbour of the best is better, or the budget is spent.

    Args:
      losses: of the points that are done.
      origin: where it begins.
      budget: the most points.

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
                # The number that moved comes last: the others have not been tried beside its new value.
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
    """What a stage knows of an optimizer.

    Attributes:
      losses: of the points that are tuned over.
      waiting: the cell to run next, None once all is done.
      point: the best, None as long as the search goes on.
      final: the losses of the best point by seed.
    """

    losses: dict[Point, float]
    waiting: Cell | None
    point: Point | None
    final: dict[int, float]


def found(result: Result, stage: Stage, arm: str) -> Found:
    """Replays a search on what is done."""
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
    """The loss of a finished run, infinite where it diverged; None if it is not finished."""
    done = result["cells"].get(key(run))
    return None if done is None else math.inf if done["validation"] is None else done["validation"]


def waiting(result: Result) -> list[Cell]:
    """What may run next, stage by stage; in a stage, the optimizer with the fewest runs comes first."""
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
    """A row per problem, start and optimizer."""
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
    """Which machine a run took place on; older runs leave that to the header."""
    return str(result["cells"][name].get("machine", result.get("machine")))


def section(result: Result) -> str:
    """The table, and what is not finished."""
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
    """The texts and the seed of searches."""
    texts = {name: hashlib.sha256(text.tobytes()).hexdigest()[:12]
             for name, text in (("sources", data.read_bytes()), ("prose", data.read_prose()))}
    return {"tuning_seed": TUNING_SEED, "texts": texts}


def head(_: None) -> Result:
    """What must agree before two runs may stand in one table: neither machine, which each run says, nor versions."""
    return {"study": NAME, "settings": settings(None), "seeds": list(SEEDS), "cells": {}}


def cells(_: None, args: argparse.Namespace) -> Callable[[Result], harness.Cells]:
    """The runs that may come next: as many processes as there are of them share the queue."""
    return lambda result: harness.keyed(waiting(result), train)


STUDY = harness.Study(
    __doc__, NAME, cells, section, seeds=SEEDS, head=head, partial=True,
    page=lambda result: f"# Optimizers with tuned rates\n\n`python -m benchmarks.tuned`. {section(result)}\n",
)

if __name__ == "__main__":
    harness.main(STUDY)
