"""The local learning coefficient before and after grokking.

    python -m examples.grokking_llc            # a quarter of an hour on 2 CPU cores

The network and the data of `examples.grokking` at p = 59, AdamW and DDC-AdamW at the rates and decays that its grid
chose. The local learning coefficient λ (Lau et al. 2023) counts how many parameters a minimum takes, half of them per
regular direction: lower is more degenerate. It is estimated by Langevin dynamics on the training loss, once plainly and
once on the slice that the gauges leave, at three points of each run: *memorised*, where the training accuracy first
reaches 99 %; *grokked*, where the test accuracy first reaches 95 %; and the *end*.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import gauge_optax as go
from examples import grokking as runs
from examples import report, study, sweep
from examples.report import Result
from models import grokking
from models.grokking import GrokConfig, Params

Cell = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Sizes. The rate and decay of either arm come from the grid of `examples.grokking`."""

    p: int = 59
    steps: int = 6_000
    every: int = 100
    rate: float = 3e-3
    decay: float = 1.0
    ddc_decay: float = 3.0
    chains: int = 4
    draws: int = 100
    burn_in: int = 100
    step_size: float = 1e-5
    localization: float = 1e4

    @property
    def network(self) -> GrokConfig:
        """The network."""
        return GrokConfig(p=self.p)


FULL = Config(p=113, steps=20_000)
ARMS = ("AdamW", "DDC-AdamW")
POINTS = ("memorised", "grokked", "end")
PLAIN, SLICE = "plain", "on the slice"


@functools.cache
def _estimator(c: Config) -> Callable[..., dict[str, Any]]:
    """(parameters, pairs, key) → both estimates."""
    loss = functools.partial(grokking.loss, c.network)  # one object, so that it compiles once

    def estimates(params: Params, pairs: grokking.Pairs, key: jax.Array) -> dict[str, Any]:
        count = len(pairs[1])
        options: dict[str, Any] = {
            "n_beta": count / math.log(count), "lr": c.step_size, "localization": c.localization,
            "num_chains": c.chains, "num_draws": c.draws, "num_burnin_steps": c.burn_in,
        }  # fmt: skip
        return {
            name: go.measure.llc(loss, params, [pairs], key, gauges, **options)
            for name, gauges in ((PLAIN, None), (SLICE, grokking.gauges(c.network)))
        }

    return estimates


def cell(c: Config, arm: str, seed: int) -> Cell:
    """Trains one run and estimates λ at its points; a point that the run does not reach is left out."""
    config = runs.Config(p=c.p, every=c.every)
    compiled = runs.program(config, arm)
    knobs = jnp.float32(c.rate), jnp.float32(c.decay if arm == "AdamW" else c.ddc_decay)
    start = jax.jit(functools.partial(grokking.init, c.network))(jax.random.key(seed))
    train, test = grokking.data(c.network, seed)
    carry = start, compiled.init(start, *knobs)
    points: Cell = {}

    def estimate(name: str, step: int, read: dict[str, jax.Array]) -> None:
        found = _estimator(c)(carry[0], train, jax.random.key(seed))
        points[name] = {"step": step, **{key: study.rounded(read[key]) for key in ("train_loss", "test_accuracy")}}
        for kind, llc in found.items():
            points[name][kind] = [study.rounded(llc.mean), study.rounded(llc.std)]

    for step in range(c.every, c.steps + 1, c.every):
        carry = compiled.advance(*carry, train, *knobs)
        read = compiled.read(start, carry[0], train, test)
        if "memorised" not in points and read["train_accuracy"] >= 0.99:
            estimate("memorised", step, read)
        if "grokked" not in points and read["test_accuracy"] >= runs.GROKKED:
            estimate("grokked", step, read)
    estimate("end", c.steps, read)
    return points


def values(result: Result, arm: str, point: str, kind: str) -> list[float]:
    """The mean over chains, a number per seed; NaN where a run has not reached the point."""
    return [x[point][kind][0] if point in x else math.nan for x in result["cells"][arm].values()]


def section(result: Result) -> str:
    """The table, and what it says."""
    c = Config(**result["settings"])
    lines = [["arm", "point", "at step", "training loss", "test accuracy", "λ, plain", "λ, on the slice"]]
    for arm in result["arms"]:
        for point in POINTS:
            cells = [x.get(point, {}) for x in result["cells"][arm].values()]
            texts = [
                " / ".join(format(x[key], form) if x else "–" for x in cells)
                for key, form in (("step", ".0f"), ("train_loss", ".1e"), ("test_accuracy", ".2f"))
            ]
            lines.append([arm, point, *texts, *(_with_spread(cells, kind) for kind in (PLAIN, SLICE))])
    count = round(c.network.share * c.p**2)
    return "\n\n".join([
        f"Addition modulo {c.p}; AdamW at {c.rate:g} with decay {c.decay:g}, DDC-AdamW at {c.rate:g} with decay "
        f"{c.ddc_decay:g}. λ is the mean ± standard deviation over {c.chains} chains of {c.draws} draws after "
        f"{c.burn_in} steps, with n·β = {count / math.log(count):.0f} (n = {count:,} pairs), steps of {c.step_size:g} "
        f"and a pull of {c.localization:g}. {report.made_with(result)}",
        sweep.markdown(lines),
        " ".join(sentences(result)),
    ])  # fmt: skip


def _with_spread(cells: Sequence[Cell], kind: str) -> str:
    return " / ".join("{:.0f} ± {:.0f}".format(*x[kind]) if x else "–" for x in cells)


def sentences(result: Result) -> Iterator[str]:
    """Whether λ falls as a run groks, and what the gauges change."""
    for arm in result["arms"]:
        for kind in (PLAIN, SLICE):
            before, after = values(result, arm, "memorised", kind), values(result, arm, "grokked", kind)
            fell = [b < a for a, b in zip(before, after, strict=True) if not math.isnan(b)]
            times = [b / a for a, b in zip(before, after, strict=True) if not math.isnan(b)]
            if fell:
                yield (
                    f"Under {arm}, λ ({kind}) is lower grokked than memorised {report.on_seeds(fell)}, "
                    f"{report.span(times)} times."
                )


def figure(result: Result, path: Path) -> None:
    """λ at the three points, a line per seed."""
    fig, axes = report.panels(2, "The local learning coefficient along grokking runs")
    for axis, kind in zip(axes, (PLAIN, SLICE), strict=True):
        for arm, color in report.colors(result["arms"]).items():
            for n, points in enumerate(result["cells"][arm].values()):
                at = [k for k, point in enumerate(POINTS) if point in points]
                means, spreads = zip(*(points[POINTS[k]][kind] for k in at), strict=True)
                label = None if n else arm
                axis.errorbar(at, means, spreads, fmt="o-", color=color, lw=1.2, capsize=3, label=label)
        axis.set(title=f"λ, {kind}", yscale="log")
        axis.set_xticks(range(len(POINTS)), POINTS)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("λ, mean and deviation over chains")
    report.save(fig, path)


def main(argv: Sequence[str] | None = None) -> Result | None:
    """Make the missing cells; then draw and print. None if told to stop before the end."""
    config, args = study.parse(__doc__, Config(), FULL, argv)
    return study.run_cells("grokking_llc", ARMS, config, args, functools.partial(cell, config), figure, section)


if __name__ == "__main__":
    main()
