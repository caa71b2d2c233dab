"""Optimizers from three starts: loss after a fixed number of steps, and fewest steps to a stated loss.

    python -m benchmarks.track3 --out benchmarks/results            # a day of one CPU core; killed, it goes on
    python -m benchmarks.track3 --only "64 | * | Muon | *"          # some of it
    python -m benchmarks.track3 --show                              # the tables and the figure of what is done

The rule of modded-nanogpt's optimization track at the size of two CPU cores: architecture, data and batch are fixed,
the optimizer and its schedule are free, and only the loss at the end of training counts. The network is a Llama of two
layers on bytes of text (`examples/starts.py`). An arm is an optimizer run plainly, under `quotient`, with controlled
rotation, or both (`arms.py`). A sweep takes one seed: first the peak rate, at a decay of 0.1, until the best rate has a
worse one on both sides, then the decay at that rate. Wider networks take the decay of the narrowest. The best pair runs
with every seed. With `--ladder` it also runs
with more or fewer steps, to find the fewest whose mean loss is below the target by 3.09 standard errors.
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.ticker import NullFormatter

from benchmarks.track3 import arms
from benchmarks.track3.arms import ARMS, WAYS
from benchmarks.track3.runs import WARMUP, Task
from examples.studies import harness, report, starts
from examples.studies.harness import Result, best_for_all, climb, loss_of
from examples.studies.starts import STARTS

NAME = "track3"
STEPS = {64: 400, 128: 200}
SEEDS = (42, 142, 242)
RATIO, NUMBERS = 2.5, range(-5, 6)  # of neighbouring rates; those that may be tried, the middle one is 0
DECAYS = (0.0, 0.1, 0.4)
DECAY = 0.1  # while rates are swept
LONGEST = 2  # times the usual number of steps
LADDER = tuple(2 ** (k / 4) for k in range(-8, 5))  # of steps, relative to the usual number
SIGNIFICANT = 3.09  # standard errors: p < 0.001, one-sided

Cell = tuple[int, str, str, str, int, float, float, int]
"""Size, start, arm, way, steps, decay, peak rate, seed."""


class Group(NamedTuple):
    """What one sweep is about."""

    size: int
    start: str
    arm: str
    way: str

    def cell(self, decay: float, rate: float, seed: int, steps: int | None = None) -> Cell:
        """One run of it."""
        return (*self, STEPS[self.size] if steps is None else steps, decay, rate, seed)

    def narrowest(self) -> "Group":
        """The same sweep at the narrowest size."""
        return self._replace(size=min(STEPS))

    def rate(self, n: int) -> float:
        """The n-th rate above the middle one, to two digits."""
        return float(f"{ARMS[self.arm].middle * RATIO**n:.2g}")


def train(cell: Cell) -> dict[str, Any]:
    """One run."""
    size, start, arm, way, steps, decay, rate, seed = cell
    task = Task(size, longest=LONGEST * STEPS[size])
    return task.train(ARMS[arm], way, start, steps, decay, rate, seed)


# What to train next -------------------------------------------------------------------------------------


def losses_of(result: Result, group: Group, decay: float, rate: float, steps: int | None = None) -> list[float]:
    """The losses of all seeds that are done."""
    found = (loss_of(result, group.cell(decay, rate, seed, steps)) for seed in result["seeds"])
    return [x for x in found if x is not None]


def swept_rates(result: Result, group: Group) -> tuple[dict[float, float], list[Cell]]:
    """The sweep of rates: rate → loss of the first seed, and what is missing before its best is inside."""
    decay, seed = sweep_decay(result, group), result["seeds"][0]
    if decay is None:
        return {}, missing(result, group.narrowest())
    cells = {n: group.cell(decay, group.rate(n), seed) for n in NUMBERS}
    losses = {n: x for n, cell in cells.items() if (x := loss_of(result, cell)) is not None}
    absent = climb(losses, 0 if losses else first_rate(result, group), NUMBERS)
    return {group.rate(n): losses[n] for n in sorted(losses)}, [cells[n] for n in absent]


def sweep_decay(result: Result, group: Group) -> float | None:
    """The decay at which rates are swept: at wider sizes the narrowest one's best, None before that is done."""
    if group.size == min(STEPS):
        return DECAY
    narrow = best(result, group.narrowest())
    return None if narrow is None else narrow[0]


def first_rate(result: Result, group: Group) -> int:
    """Where a sweep begins: at the best rate of the narrowest size, else of the plain optimizer, else in the middle."""
    for other in (group.narrowest(), group._replace(way=arms.PLAIN)):
        pair = best(result, other) if other != group else None
        if pair is not None:
            return round(math.log(pair[1] / ARMS[group.arm].middle, RATIO))
    return 0


def best(result: Result, group: Group) -> tuple[float, float] | None:
    """Decay and rate of least loss; None before the sweep is done."""
    rates, absent = swept_rates(result, group)
    if absent:
        return None
    rate = min(rates, key=lambda rate: rates[rate])
    losses, absent = swept_decays(result, group, rate)
    return None if absent else (min(losses, key=lambda decay: losses[decay]), rate)


def swept_decays(result: Result, group: Group, rate: float) -> tuple[dict[float, float], list[Cell]]:
    """The sweep of decays at the best rate: decay → loss of the first seed, and what is missing."""
    decay, seed = sweep_decay(result, group), result["seeds"][0]
    swept = group.size == min(STEPS)
    cells = {x: group.cell(x, rate, seed) for x in (DECAYS if swept else (decay,)) if x is not None}
    losses = {x: loss for x, cell in cells.items() if (loss := loss_of(result, cell)) is not None}
    # More decay than is swept with is only tried where less of it was worse.
    less, usual, more = DECAYS
    if swept and less in losses and losses[less] < losses[usual]:
        cells.pop(more)
    return losses, [cell for x, cell in cells.items() if x not in losses]


def missing(result: Result, group: Group, ladder: bool = False) -> list[Cell]:
    """What a group needs next; empty once it is done."""
    rates, cells = swept_rates(result, group)
    if cells:
        return cells
    rate = min(rates, key=lambda rate: rates[rate])
    cells = swept_decays(result, group, rate)[1][:1]
    pair = best(result, group)
    if pair is not None:
        cells = [group.cell(*pair, seed) for seed in result["seeds"]]
        cells = [cell for cell in cells if loss_of(result, cell) is None]
    if cells or not ladder or pair is None:
        return cells
    steps = fewest(result, group)[1]
    cells = [] if steps is None else [group.cell(*pair, seed, steps) for seed in result["seeds"]]
    return [cell for cell in cells if loss_of(result, cell) is None]


# Statistics ---------------------------------------------------------------------------------------------


def at_best(result: Result, group: Group) -> list[float] | None:
    """Losses of all seeds at the best rate and decay; None before they are done."""
    pair = best(result, group)
    losses = [] if pair is None else losses_of(result, group, *pair)
    return losses if len(losses) == len(result["seeds"]) else None


def sigma(result: Result, size: int) -> float:
    """Standard deviation of a run's loss about its arm's mean and its seed's, over all groups of a size.

    Seeds share initial weights and batches between arms, so that a seed's mean over arms says nothing of an arm.
    """
    squares, free = 0.0, 0
    for start in STARTS:
        rows = [losses for group in groups([size], [start]) if (losses := at_best(result, group)) is not None]
        if len(rows) > 1 and (table := np.array([x for x in rows if np.isfinite(x).all()])).size:
            rest = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
            squares += float(np.sum(rest**2))
            free += (table.shape[0] - 1) * (table.shape[1] - 1)
    return math.sqrt(squares / free) if free else math.nan


def z_score(a: Sequence[float], b: Sequence[float], sigma: float) -> float:
    """How many standard errors the mean of `a` is above that of `b`.

    >>> round(z_score([1.0, 1.2], [1.0, 1.0], 0.1), 6)
    1.0
    """
    return float((np.mean(a) - np.mean(b)) / (sigma * math.sqrt(1 / len(a) + 1 / len(b))))


def target(result: Result, size: int) -> tuple[float, float] | None:
    """The loss to reach, and σ: AdamW's mean in the usual number of steps from LeCun-normal kernels."""
    losses = at_best(result, Group(size, STARTS[0], "AdamW", arms.PLAIN))
    return None if losses is None else (float(np.mean(losses)), sigma(result, size))


def fewest(result: Result, group: Group) -> tuple[int | None, int | None]:
    """Fewest steps on the ladder that reach the target, or None; and the rung to try next, None once it is known."""
    aim, pair = target(result, group.size), best(result, group)
    if aim is None or pair is None or math.isnan(aim[1]):
        return None, None
    rungs = [round(STEPS[group.size] * x) for x in LADDER]
    least, below, above = None, -1, len(rungs)  # rungs known to fail are up to `below`, to pass from `above` on
    middle = LADDER.index(1.0)  # which every arm has run
    while above - below > 1:
        losses = losses_of(result, group, *pair, rungs[middle])
        if len(losses) < len(result["seeds"]):
            return least, rungs[middle]
        if (aim[0] - float(np.mean(losses))) * math.sqrt(len(losses)) >= SIGNIFICANT * aim[1]:
            least, above = rungs[middle], middle
        else:
            below = middle
        middle = (below + above) // 2
    return least, None


def groups(
    sizes: Sequence[int] = tuple(STEPS), of_starts: Sequence[str] = STARTS, names: Sequence[str] = tuple(ARMS),
    ways: Sequence[str] = WAYS,
) -> list[Group]:
    """All sweeps; those of one compiled program are neighbours."""
    chosen = itertools.product(sizes, names, ways, of_starts)
    return [Group(size, start, arm, way) for size, arm, way, start in chosen if way in ARMS[arm].ways]


# Tables and figure --------------------------------------------------------------------------------------


def section(result: Result) -> str:
    """The tables, and the sentence that follows from them."""
    about = (
        f"A Llama of two layers on bytes of text, batches of {starts.BATCH} × {starts.LENGTH} tokens, a warm-up of "
        f"{WARMUP} steps and a cosine to zero. Rates are a factor of {RATIO} apart. They are swept with seed "
        f"{result['seeds'][0]}, at d = {min(STEPS)} with a decay of {DECAY}, until the best has a worse one on both "
        f"sides; then no decay is tried at the best rate, and {DECAYS[-1]} where none is worse. Wider networks take "
        f"that decay and sweep rates. Losses are means over seeds {', '.join(map(str, result['seeds']))}, in nats per "
        f"byte; float32, {result['machine']}. A rotational arm turns each neuron of attention and MLP by the rate a "
        "step, at the norm it starts with; *free* is `pin=False`, and *both* is pinned where the arm is not a kind of "
        "Muon. max_norm_muon on the quotient is the public function. – is not compared. *, an end*: the best rate is "
        "the last that the sweep may try. What max_norm_muon does with tokens was chosen among about thirty variants "
        "at these sizes and starts, with seeds 42 and 142, at a rate of 0.04; seed 242 had no part in it. No other arm "
        "was changed."
    )
    parts = [about]
    for size in STEPS:
        for start in STARTS:
            rows = list(_rows(result, size, start))
            if rows:
                heads = ["optimizer", *WAYS, "rate, decay", "z to AdamW", "z to Muon"]
                title = f"**d = {size}, {STEPS[size]} steps, {start}** (σ = {sigma(result, size):.4f})"
                parts.append(f"{title}\n\n{report.plain([heads, *rows])}")
    return "\n\n".join([*parts, *ladders(result), *sentences(result)])


def ladders(result: Result) -> Iterator[str]:
    """A table per size: the fewest steps to the target, for what has climbed the ladder."""
    for size, usual in STEPS.items():
        aim = target(result, size)
        if aim is None:
            continue
        lines = []
        for arm, way in dict.fromkeys((group.arm, group.way) for group in groups([size])):
            found = [_fewest(result, Group(size, start, arm, way)) for start in STARTS]
            if set(found) != {"not run"}:
                lines.append([f"{arm} ({way})", *found])
        if lines:
            about = (
                f"**Fewest steps at d = {size}** to the mean loss of AdamW from {STARTS[0]} in {usual} steps, "
                f"{aim[0]:.4f}: the mean of the seeds is below it by {SIGNIFICANT} standard errors. Rate and decay are "
                f"the best of {usual} steps, and the cosine ends with the run. Numbers of steps are a factor of "
                f"2^(1/4) apart, from {round(usual * LADDER[0])} to {round(usual * LADDER[-1])}."
            )
            yield f"{about}\n\n{report.plain([['optimizer', *STARTS], *lines])}"


def _fewest(result: Result, group: Group) -> str:
    """For the table."""
    steps, untried = fewest(result, group)
    if at_best(result, group) is None or untried is not None:
        return "not run"
    return f"> {round(STEPS[group.size] * LADDER[-1])}" if steps is None else str(steps)


def _rows(result: Result, size: int, start: str) -> Iterator[list[str]]:
    """A row per optimizer; rate, decay and z are those of its best way."""
    base = {name: at_best(result, Group(size, start, name, arms.PLAIN)) for name in ("AdamW", "Muon")}
    for arm, spec in ARMS.items():
        found = {way: at_best(result, Group(size, start, arm, way)) for way in spec.ways}
        done = {way: losses for way, losses in found.items() if losses is not None}
        if not done:
            continue
        leading = min(done, key=lambda way: float(np.mean(done[way])))
        shown = []
        for way in WAYS:
            text = f"{np.mean(done[way]):.4f}" if way in done else "–" if way not in spec.ways else "not run"
            shown.append(f"**{text}**" if way == leading else text)
        group = Group(size, start, arm, leading)
        decay, rate = best(result, group) or (math.nan, math.nan)
        ends = swept_rates(result, group)[0]
        knobs = f"{rate:g}, {decay:g}" + ", an end" * (rate in (min(ends), max(ends)))
        scores = [
            "–" if other is None else f"{z_score(done[leading], other, sigma(result, size)):+.1f}"
            for other in base.values()
        ]
        yield [arm, *shown, knobs, *scores]


PLACES = tuple((size, start) for size in STEPS for start in STARTS)


def behind(result: Result) -> dict[tuple[str, str], list[float]]:
    """Arm and way → standard errors behind the better of plain AdamW and Muon in each place, where all are done."""
    scores: dict[tuple[str, str], list[float]] = {}
    for size, start in PLACES:
        plain = [at_best(result, Group(size, start, name, arms.PLAIN)) for name in ("AdamW", "Muon")]
        for group in groups([size], [start]):
            losses = at_best(result, group)
            if losses is not None and all(plain):
                better = min((x for x in plain if x is not None), key=lambda x: float(np.mean(x)))
                scores.setdefault((group.arm, group.way), []).append(z_score(losses, better, sigma(result, size)))
    return {name: x for name, x in scores.items() if len(x) == len(PLACES)}


def one_rate(result: Result, arm: str, way: str) -> tuple[float, float] | None:
    """The rate that serves all sizes and starts best, and the most that it adds anywhere to the loss of the best rate.

    One seed. None where no rate was run everywhere.
    """
    swept = [swept_rates(result, Group(size, start, arm, way))[0] for size, start in PLACES]
    return best_for_all(swept) if set.intersection(*(set(rates) for rates in swept)) else None


def ranked(result: Result, place: tuple[int, str]) -> list[tuple[str, str, float]]:
    """Arm, way and mean loss of what is done at a size and start, least first."""
    done = [(group, losses) for group in groups([place[0]], [place[1]]) if (losses := at_best(result, group))]
    return sorted(((g.arm, g.way, float(np.mean(x))) for g, x in done), key=lambda row: row[2])


def sentences(result: Result) -> Iterator[str]:
    """Which arms are never behind the better of AdamW and Muon, and what one rate for all sizes and starts costs."""
    scores = behind(result)
    never = [name for name, x in scores.items() if max(x) < SIGNIFICANT and name[0] != "Muon"]
    ahead = [name for name, x in scores.items() if max(x) <= -SIGNIFICANT]
    if not scores:
        return
    yield _listed("Ahead of both plain AdamW and plain Muon in every row, by 3.09 standard errors or more", ahead)
    yield _listed("Never behind the better of the two by as much", never)
    lines = [["optimizer", "one rate", "costs at most"]]
    for arm, way in dict.fromkeys([("AdamW", arms.PLAIN), ("Muon", arms.PLAIN), *ahead]):
        found = one_rate(result, arm, way)
        if found is not None:
            lines.append([f"{arm} ({way})", f"{found[0]:g}", f"{found[1]:.3f}"])
    yield (
        "What one rate for all sizes and starts adds to the loss, where it adds most, against the best rate of each "
        f"(seed {result['seeds'][0]}):\n\n{report.plain(lines)}"
    )


def _listed(text: str, names: Sequence[tuple[str, str]]) -> str:
    return f"{text}: {'; '.join(f'{arm} ({way})' for arm, way in names) or 'none'}."


def leaders(result: Result, count: int = 3) -> list[tuple[str, str]]:
    """Plain AdamW and Muon, and the other arms of least mean loss over all places, in one way each."""
    base = [("AdamW", arms.PLAIN), ("Muon", arms.PLAIN)]
    sums: dict[tuple[str, str], list[float]] = {}
    for place in PLACES:
        for arm, way, loss in ranked(result, place):
            sums.setdefault((arm, way), []).append(loss)
    whole = sorted((name for name, x in sums.items() if len(x) == len(PLACES)), key=lambda name: sum(sums[name]))
    ways = {arm: way for arm, way in reversed(whole) if arm not in {name for name, _ in base}}
    return [*base, *[name for name in whole if ways.get(name[0]) == name[1]][:count]]


def figure(result: Result, path: Path) -> None:
    """Loss over rate: a panel per size and start, the optimizers that lead over all places beside the plain ones."""
    if not any(at_best(result, group) for group in groups()):
        return
    shown = leaders(result)
    fig, axes = report.grid_of_panels(len(PLACES), "Validation loss over the peak rate, one seed", columns=len(STARTS))
    for axis, (size, start) in zip(axes, PLACES, strict=True):
        for arm, way in shown:
            rates = swept_rates(result, Group(size, start, arm, way))[0]
            axis.plot(list(rates), list(rates.values()), ".-", label=f"{arm} ({way})")
        axis.set(title=f"d = {size}, {start}", xscale="log", xlabel="peak rate")
        axis.xaxis.set_minor_formatter(NullFormatter())
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(shown), fontsize=8)
    report.save_as_is(fig, path)


# Study --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """Whether to find the fewest steps to the target too."""

    ladder: bool = False


def cells(c: Config, args: argparse.Namespace) -> Callable[[Result], harness.Cells]:
    """What all groups need next; the ladder last, whose target needs other groups."""

    def wanted(result: Result) -> harness.Cells:
        found = [cell for group in groups() for cell in missing(result, group)]
        if c.ladder and not found:
            found = [cell for group in groups() for cell in missing(result, group, True)]
        return harness.keyed(found, train)

    return wanted


def page(result: Result) -> str:
    """Markdown."""
    picture = f"![Loss over rate, a panel per size and start]({NAME}.png)"
    return f"# Optimizers from three starts\n\n`python -m benchmarks.track3`. {section(result)}\n\n{picture}\n"


STUDY = harness.Study(
    __doc__, NAME, cells, section, figure, page, config=Config(), seeds=SEEDS, partial=True,
    settings=lambda _: {"steps": STEPS, "warmup": WARMUP, "sweep_decay": DECAY},
)

if __name__ == "__main__":
    harness.main(STUDY)
