"""Tests the advice on the learning rate of `max_norm_muon`, for several numbers of steps, widths and depths.

    python -m benchmarks.rates --out benchmarks/results            # three hours of one CPU core; killed, it goes on
    python -m benchmarks.rates --out benchmarks/results --show     # the table of the finished runs

Networks, text and schedule are those of `benchmarks.tuned`. All leaves but matrices and tokens have half of the rate,
as by default, and there is no decay. A sweep has five rates, a factor of 2 apart, and one seed. `rule` is the advice in
the docstring of `max_norm_muon`. The table says how much higher the loss of each sweep is with it than at the best
rate.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks import tuned
from benchmarks.training.runs import Task
from examples.studies import harness
from examples.studies.harness import Result, loss_of
from examples.studies.report import plain

NAME = "rates"
SEED = 42
RATES = (0.005, 0.01, 0.02, 0.04, 0.08)
PROBLEMS: Mapping[str, Task] = {
    f"{steps:,} steps, width {width}, depth {depth}": tuned.task_of(tuned.llama(width, depth), steps)
    for steps, width, depth in (
        (250, 128, 3), (250, 64, 3), (1000, 64, 3), (500, 128, 3), (250, 256, 3), (250, 128, 8), (1000, 128, 3),
        (1000, 128, 8), (1000, 256, 3), (4000, 128, 3),
    )
}


def rule(task: Task) -> float:
    """The peak rate that is advised: 0.02·√(1000 / steps)."""
    return 0.02 * math.sqrt(1000 / task.longest)


def train(of_run: tuple[str, float, int]) -> dict[str, Any]:
    """Makes one training run of a problem, with this rate and seed."""
    problem, rate, seed = of_run
    return PROBLEMS[problem].train(tuned.ARMS["max_norm_muon"].arm, "lecun", 0.0, (rate, rate / 2), seed)


def losses(result: Result, problem: str) -> dict[float, float]:
    """Rate → loss of the finished runs of a problem; inf if a run diverged."""
    found = {rate: loss_of(result, (problem, rate, SEED)) for rate in RATES}
    return {rate: loss for rate, loss in found.items() if loss is not None}


def at(curve: Mapping[float, float], rate: float) -> float:
    """The loss at any rate, interpolated: by a parabola in log(rate) through the three nearest rates that were run."""
    nearest = sorted(curve, key=lambda x: abs(math.log(x / rate)))[:3]
    x, y = np.log(nearest), [curve[r] for r in nearest]
    return float(np.polyval(np.polyfit(x, y, 2), math.log(rate)))


def rows(result: Result) -> Iterator[list[str]]:
    """The rows of the table: one per sweep whose best rate has worse rates on both sides."""
    for problem, task in PROBLEMS.items():
        curve, advised = losses(result, problem), rule(task)
        best = min(curve, key=lambda x: curve[x], default=math.nan)
        if min(curve, default=math.nan) < best < max(curve, default=math.nan):
            cost = max(0.0, at(curve, advised) / curve[best] - 1.0)
            shown = (f"{curve[x]:.4f}" if x in curve else "–" for x in RATES)
            yield [problem, *shown, f"{best:g}", f"{advised:.3g}", f"{100 * cost:.1f} %"]


def section(result: Result) -> str:
    """The results as Markdown: a description and a table."""
    about = (
        f"A Llama on bytes of text, batches of 8 × 128, from LeCun-normal kernels, a warm-up over a twentieth of the "
        f"steps and a cosine to zero; one seed ({SEED}); float32, one thread of a {result['machine']}. "
        "Validation loss in nats per byte by peak rate; *best* of the five; *advised* by the rule "
        "0.02·√(1,000/steps); *cost*: what the advised rate, on a parabola through its three neighbours, adds to the "
        "best of the five."
    )
    return f"{about}\n\n{plain([['sweep', *(f'{x:g}' for x in RATES), 'best', 'advised', 'cost'], *rows(result)])}"


def cells(_: None, args: argparse.Namespace) -> harness.Cells:
    """The cells of all sweeps, with the short runs first."""
    return harness.keyed([(problem, rate, SEED) for problem in PROBLEMS for rate in RATES], train)


STUDY = harness.Study(
    __doc__, NAME, cells, section, seeds=(SEED,), settings=lambda _: tuned.settings(None), partial=True,
    page=lambda result: f"# Rates of max_norm_muon\n\n`python -m benchmarks.rates`. {section(result)}\n",
)

if __name__ == "__main__":
    harness.main(STUDY)
