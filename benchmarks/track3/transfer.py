"""Does the best rate of a narrow network serve a wide one: loss over rate at four widths, two depths and three starts.

    python -m benchmarks.track3.transfer --out benchmarks/results      # a day of one CPU core; killed, it goes on
    python -m benchmarks.track3.transfer --only "2 | lecun | *"        # some of it
    python -m benchmarks.track3.transfer --show                        # the table and the figure of what is done

Networks and data are those of `benchmarks.track3`, with 200 steps at every width. A setting is a depth, a start, with
or without warm-up, and a batch. Rates are a factor of 2 apart, with one seed, until the best rate has a worse one on
both sides; every width also runs at the best rate of the narrowest.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.ticker import NullFormatter

from benchmarks.track3.arms import ARMS, FALLING, FREE, MUP, PLAIN, QUOTIENT, Arm
from benchmarks.track3.runs import WARMUP, Task
from examples.studies import harness, report, starts
from examples.studies.harness import Result, best_for_all, climb, loss_of
from examples.studies.starts import STARTS

NAME = "transfer"
SIZES = (64, 128, 256, 512)
STEPS, SEED, DECAY = 200, 42, 0.1
RATIO, NUMBERS = 2.0, range(-6, 7)
COMPARED: Mapping[str, tuple[Arm, str]] = {
    "AdamW": (ARMS["AdamW"], PLAIN),
    "AdamW, muP": (MUP, PLAIN),
    "quotient(AdamW)": (ARMS["AdamW"], QUOTIENT),
    "Muon": (ARMS["Muon"], PLAIN),
    "quotient(Muon)": (ARMS["Muon"], FREE),
    "max_norm(Muon)": (ARMS["Muon, max_norm"], PLAIN),
    "max_norm_muon": (ARMS["max_norm_muon"], FREE),
    "max_norm_muon, rate/√d": (FALLING, PLAIN),
    "symmetry-compatible": (ARMS["symmetry-compatible"], PLAIN),
}


class Setting(NamedTuple):
    """What one panel is about."""

    depth: int
    start: str
    warmup: int = WARMUP
    batch: int = starts.BATCH

    @property
    def text(self) -> str:
        """For tables."""
        parts = [f"depth {self.depth}", self.start]
        parts += ["no warm-up"] * (self.warmup == 0) + [f"batch {self.batch}"] * (self.batch != starts.BATCH)
        return ", ".join(parts)


SETTINGS = (
    *(Setting(2, start) for start in STARTS), Setting(2, "lecun", warmup=0),
    Setting(2, "lecun", batch=4 * starts.BATCH), Setting(8, "lecun"),
)
Cell = tuple[int, str, int, int, int, str, float, int]
"""Depth, start, warm-up, batch, size, arm, rate, seed."""


def cell(setting: Setting, size: int, arm: str, rate: float) -> Cell:
    """One run."""
    return (*setting, size, arm, rate, SEED)


def train(of: Cell) -> dict[str, Any]:
    """One run."""
    depth, start, warmup, batch, size, name, rate, seed = of
    arm, way = COMPARED[name]
    return Task(size, depth, warmup, batch, STEPS).train(arm, way, start, STEPS, DECAY, rate, seed)


def rate_of(arm: str, n: int) -> float:
    """The n-th rate above the middle one, to three digits."""
    return float(f"{COMPARED[arm][0].middle * RATIO**n:.3g}")


def numbered(result: Result, setting: Setting, size: int, arm: str) -> dict[int, float]:
    """Number of a rate → loss of what is done, infinite where it diverged."""
    found = {n: loss_of(result, cell(setting, size, arm, rate_of(arm, n))) for n in NUMBERS}
    return {n: loss for n, loss in found.items() if loss is not None}


def losses(result: Result, setting: Setting, size: int, arm: str) -> dict[float, float]:
    """The same by rate."""
    return {rate_of(arm, n): loss for n, loss in numbered(result, setting, size, arm).items()}


def missing(result: Result, setting: Setting, size: int, arm: str) -> list[float]:
    """The rates to run next: from the narrowest width's best on, until the best is inside."""
    narrow, done = numbered(result, setting, SIZES[0], arm), numbered(result, setting, size, arm)
    first = min(narrow, key=lambda n: narrow[n]) if narrow else 0
    wanted = [n for n in (first,) if n not in done] or climb(done, first, NUMBERS)
    return [rate_of(arm, n) for n in wanted]


# Table and figure ---------------------------------------------------------------------------------------


def section(result: Result) -> str:
    """The table: how far the best rate moves with width, and what staying at the narrow one's costs."""
    about = (
        f"A Llama on bytes of text, {STEPS} steps, decay {DECAY}, one seed ({SEED}), rates {RATIO:g}-fold apart; "
        f"float32, {result['machine']}. *Moved*: the best rate of the widest network done over that of the narrowest. "
        "*Cost*: what the narrowest network's best rate adds to the widest one's least loss, in nats per byte. *One "
        "rate*: that which serves all widths best, and the most that it adds to the least loss of one of them. "
        "*rate/√d* runs at √(64/d) times the rates that the table shows."
    )
    heads = ["setting", "optimizer", *(f"d = {size}" for size in SIZES), "moved", "cost", "one rate"]
    return f"{about}\n\n{report.plain([heads, *_rows(result)])}"


def _rows(result: Result) -> Iterator[list[str]]:
    for setting in SETTINGS:
        for arm in COMPARED:
            done = [size for size in SIZES if not missing(result, setting, size, arm)]
            if not done:
                continue
            shown = []
            for size in SIZES:
                of_size = losses(result, setting, size, arm)
                shown.append(f"{min(of_size.values()):.3f} at {_at(of_size):g}" if size in done else "not run")
            moved, cost, one = ("–", "–", "–")
            if len(done) > 1:
                narrow, wide = (losses(result, setting, size, arm) for size in (done[0], done[-1]))
                moved = f"{_at(wide) / _at(narrow):.2g}"
                cost = f"{wide.get(_at(narrow), math.nan) - min(wide.values()):.3f}"
                one = "{:g}, {:.3f}".format(*best_for_all([losses(result, setting, size, arm) for size in done]))
            yield [setting.text, arm, *shown, moved, cost, one]


def _at(of_size: Mapping[float, float]) -> float:
    return min(of_size, key=lambda rate: of_size[rate])


def figure(result: Result, path: Path) -> None:
    """Loss over rate: a panel per setting and arm, a curve per width."""
    panels = [(s, a) for s in SETTINGS for a in COMPARED if not missing(result, s, SIZES[0], a)]
    if not panels:
        return
    fig, axes = report.grid_of_panels(len(panels), "Loss over the peak rate: a curve per width", common=False)
    for axis, (setting, arm) in zip(axes, panels, strict=True):
        for size in SIZES:
            of_size = dict(sorted(losses(result, setting, size, arm).items()))
            if of_size:
                axis.plot(list(of_size), list(of_size.values()), ".-", label=f"d = {size}")
        least = min(min(losses(result, setting, size, arm).values(), default=math.inf) for size in SIZES)
        axis.set(xscale="log", xlabel="peak rate", ylabel="validation loss", ylim=(0.98 * least, 1.3 * least))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(f"{arm}: {setting.text}", fontsize=8)
        axis.legend(fontsize=6)
    report.save_as_is(fig, path)


# Study --------------------------------------------------------------------------------------------------


def cells(c: None, args: argparse.Namespace) -> Callable[[Result], harness.Cells]:
    """What all sweeps need next, narrow networks first."""
    sweeps = [(setting, size, arm) for size in SIZES for setting in SETTINGS for arm in COMPARED]

    def wanted(result: Result) -> harness.Cells:
        return harness.keyed([cell(*sweep, rate) for sweep in sweeps for rate in missing(result, *sweep)], train)

    return wanted


def page(result: Result) -> str:
    """Markdown."""
    return (
        f"# Rates from narrow to wide\n\n`python -m benchmarks.track3.transfer`. {section(result)}\n\n"
        f"![Loss over rate, a curve per width]({NAME}.png)\n"
    )


STUDY = harness.Study(
    __doc__, NAME, cells, section, figure, page, seeds=(SEED,), partial=True,
    settings=lambda _: {"steps": STEPS, "decay": DECAY, "warmup": WARMUP},
)

if __name__ == "__main__":
    harness.main(STUDY)
