"""Does the best rate of a narrow network serve a wide one: loss over rate at four widths, two depths and three starts.

    python -m benchmarks.track3.transfer --out benchmarks/results      # a day of one CPU core; killed, it goes on
    python -m benchmarks.track3.transfer --panels "depth 2, lecun"     # some of it
    python -m benchmarks.track3.transfer --show                        # the table and the figure of what is done

Networks and data are those of `benchmarks.track3`, with 200 steps at every width. A setting is a depth, a start, with
or without warm-up, and a batch. Rates are a factor of 2 apart, with one seed, until the best rate has a worse one on
both sides; every width also runs at the best rate of the narrowest.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from matplotlib.ticker import NullFormatter
from tqdm import tqdm

from benchmarks.track3.arms import ARMS, FALLING, FREE, MUP, PLAIN, QUOTIENT, Arm
from benchmarks.track3.runs import WARMUP, Task
from examples import cli, report, starts, study
from examples.starts import STARTS
from examples.sweep import Result, best_for_all, climb, key, save

NAME = "transfer"
SIZES = (64, 128, 256, 512)
STEPS, SEED, DECAY = 200, 42, 0.1
RATIO, MOST = 2.0, 6
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
    found = {}
    for n in range(-MOST, MOST + 1):
        done = result["cells"].get(key(cell(setting, size, arm, rate_of(arm, n))))
        if done is not None:
            found[n] = math.inf if done["validation"] is None else done["validation"]
    return found


def losses(result: Result, setting: Setting, size: int, arm: str) -> dict[float, float]:
    """The same by rate."""
    return {rate_of(arm, n): loss for n, loss in numbered(result, setting, size, arm).items()}


def missing(result: Result, setting: Setting, size: int, arm: str) -> list[float]:
    """The rates to run next: from the narrowest width's best on, until the best is inside."""
    narrow, done = numbered(result, setting, SIZES[0], arm), numbered(result, setting, size, arm)
    first = min(narrow, key=lambda n: narrow[n]) if narrow else 0
    wanted = [n for n in (first,) if n not in done] or climb(done, first, MOST)
    return [rate_of(arm, n) for n in wanted]


def best_rate(result: Result, setting: Setting, size: int, arm: str) -> float | None:
    """The rate of least loss; None before anything is done."""
    done = losses(result, setting, size, arm)
    return min(done, key=lambda rate: done[rate]) if done else None


# Table and figure ---------------------------------------------------------------------------------------


def complete(result: Result, setting: Setting, size: int, arm: str) -> bool:
    """Whether a sweep is done."""
    return not missing(result, setting, size, arm)


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
    lines = [heads, ["---"] * len(heads), *_rows(result)]
    return about + "\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _rows(result: Result) -> Iterator[list[str]]:
    for setting in SETTINGS:
        for arm in COMPARED:
            done = [size for size in SIZES if complete(result, setting, size, arm)]
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
    panels = [(s, a) for s in SETTINGS for a in COMPARED if complete(result, s, SIZES[0], a)]
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


# Command line -------------------------------------------------------------------------------------------


def header() -> dict[str, Any]:
    """What must agree before two runs may stand in one table."""
    settings = {"steps": STEPS, "decay": DECAY, "warmup": WARMUP}
    return {
        "study": NAME, "settings": settings, "seeds": [SEED], "machine": study.machine(), "versions": study.versions(),
    }


def main(argv: Sequence[str] | None = None) -> Result:
    """Runs what is missing, narrow networks first, then prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=cli.Help)
    parser.add_argument("--out", type=Path, default=Path("outputs/track3"))
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=SIZES, help="d_model")
    panels = {setting.text: setting for setting in SETTINGS}
    parser.add_argument("--panels", nargs="+", choices=panels, default=list(panels), metavar="PANEL",
                        help="settings: " + "; ".join(panels))
    parser.add_argument("--arms", nargs="+", choices=COMPARED, default=list(COMPARED), metavar="ARM")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--stop-after", type=int, help="leave after this many runs")
    args = parser.parse_args(argv)
    path = args.out / f"{NAME}.json"
    result = study.load(path, header())
    if not args.show:
        if not path.exists():
            study.write(path, result)
        result = fill(path, result, args.sizes, [panels[name] for name in args.panels], args.arms, args.stop_after)
    text = section(result)
    path.with_suffix(".md").write_text(
        f"# Rates from narrow networks to wide ones\n\n`python -m benchmarks.track3.transfer`. {text}\n\n"
        f"![Loss over rate, a curve per width]({NAME}.png)\n"
    )
    print(text)
    if any(complete(result, setting, SIZES[0], arm) for setting in SETTINGS for arm in COMPARED):
        figure(result, path.with_suffix(".png"))
    return result


def fill(
    path: Path, result: Result, sizes: Sequence[int], settings: Sequence[Setting], names: Sequence[str],
    stop_after: int | None,
) -> Result:
    """Trains what is missing, saving every run."""
    chosen = [(size, s, arm) for size in sizes for s in settings for arm in names]
    number = 0
    with tqdm(chosen, unit="sweep") as progress:
        for size, setting, arm in progress:
            progress.set_description(f"d = {size}, {setting.text}, {arm}")
            while rates := missing(result, setting, size, arm):
                if stop_after is not None and number >= stop_after:
                    return result
                of = cell(setting, size, arm, rates[0])
                result = save(path, of, train(of))
                number += 1
    return result


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        main()
