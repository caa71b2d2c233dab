"""Reads a study's JSON: numbers over seeds, Markdown tables, verdicts, curves."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Result = dict[str, Any]
Values = list[float]
Reading = Callable[[Result, str, str], Values]

ROUNDING = 2.0**-24
"""Half the spacing of float32 numbers just above 1: a smaller drift counts as this one."""
MATCHED = 2.0
"""A loss of at most so many times the other's counts as matched."""
COLORS = ("tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:gray", "tab:olive", "tab:cyan")


# Numbers ----------------------------------------------------------------------------------------------


def final(result: Result, arm: str, key: str) -> Values:
    """The last reading, per seed."""
    return [cell["final"][key] for cell in result["cells"][arm].values()]


def largest(result: Result, arm: str, key: str) -> Values:
    """The largest reading along the run, per seed."""
    return [max(cell["curves"][key]) for cell in result["cells"][arm].values()]


def smallest(result: Result, arm: str, key: str) -> Values:
    """The smallest reading along the run, per seed."""
    return [min(cell["curves"][key]) for cell in result["cells"][arm].values()]


def settled(result: Result, arm: str, key: str) -> Values:
    """The median over the last quarter of the run, per seed: the end of a run at a constant rate is noise."""
    curves = [cell["curves"][key] for cell in result["cells"][arm].values()]
    return [statistics.median(curve[-max(1, len(curve) // 4) :]) for curve in curves]


def ratios(above: Values, below: Values, least: float = ROUNDING) -> Values:
    """Seed by seed; what is below `least` counts as `least`."""
    return [max(a, least) / max(b, least) for a, b in zip(above, below, strict=True)]


def span(values: Sequence[float], form: str = ".2g") -> str:
    """Smallest to largest, or one number where both read the same."""
    low, high = (number(x, form) for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def number(x: float, form: str = ".2g") -> str:
    """A number for people: 3.1e-07 as it is, 12,000 rather than 1.2e+04."""
    return f"{float(f'{x:.2g}'):,.0f}" if form == ".2g" and 100 <= abs(x) < 1e9 else f"{x:{form}}"


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Mean ± standard deviation over seeds."""
    array = np.asarray(values, float)
    return f"{array.mean():{form}} ± {array.std(ddof=1) if array.size > 1 else 0.0:{form}}"


def listed(values: Sequence[float], form: str = ".2g") -> str:
    """All seeds, in order."""
    return " / ".join(number(x, form) for x in values)


# Markdown ---------------------------------------------------------------------------------------------

Column = Callable[[str], str]
"""From an arm's name to a cell of a table."""


def markdown(lines: Sequence[Sequence[str]], padded: bool = True) -> str:
    """A table; the first line is its head. Padded columns read well without a renderer too."""
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    widths = [max(map(len, column)) if padded else 0 for column in zip(*rows, strict=True)]
    return "\n".join(f"| {' | '.join(x.ljust(w) for x, w in zip(row, widths, strict=True))} |" for row in rows)


def plain(lines: Sequence[Sequence[str]]) -> str:
    """A table whose columns are not padded."""
    return markdown(lines, padded=False)


def bare(lines: Sequence[Sequence[Any]]) -> str:
    """A table without any padding, of cells that need not be text yet."""
    head, *rows = (f"| {' | '.join(map(str, line))} |" for line in lines)
    return "\n".join([head.replace("|  |", "| |"), "|---" * len(lines[0]) + "|", *rows])


def table(result: Result, columns: Mapping[str, Column]) -> str:
    """One row per arm."""
    rows = [[arm, *(column(arm) for column in columns.values())] for arm in result["arms"]]
    return plain([["arm", *columns], *rows])


def column(result: Result, key: str, form: str = ".2g", at: Reading = final) -> Column:
    """One reading, all seeds."""
    return lambda arm: listed(at(result, arm, key), form)


def made_with(result: Result) -> str:
    """Seeds and machine, in words."""
    seeds = ", ".join(str(seed) for seed in result["seeds"])
    if len(result["seeds"]) == 1:
        return f"One seed, {seeds}; {result['machine']}."
    return f"Seeds {seeds}, in this order where three numbers stand; float32, {result['machine']}."


def containment(
    result: Result, theirs: str, ours: str, mode: str, coordinate: str, loss: str = "loss", at: Reading = final
) -> str:
    """How much less `ours` drifts than `theirs` in each run, and whether that cost anything.

    Args:
      result: what the JSON holds.
      theirs: the arm that is expected to drift.
      ours: the arm that is not.
      mode: the key of the coordinate's distance from its start.
      coordinate: the coordinate, in words or as a formula.
      loss: the key of the loss that is compared.
      at: which reading of the loss.
    """
    times = ratios(largest(result, theirs, mode), largest(result, ours, mode))
    losses = [a / b for a, b in zip(at(result, ours, loss), at(result, theirs, loss), strict=True)]
    return (f"In {coordinate}, {ours} drifts {span(times)} times less than {theirs} (1,000 times or more "
            f"{on_seeds([x >= 1000 for x in times])}); its {'final' if at is final else 'settled'} loss is "
            f"{span(losses)} times {theirs}'s (matched {on_seeds([x <= MATCHED for x in losses])}).")


def farther(result: Result, ours: str, theirs: str, mode: str) -> str:
    """How many times as far one arm goes as another, in words."""
    times = ratios(largest(result, ours, mode), largest(result, theirs, mode))
    return f"{ours} goes {span(times)} times as far as {theirs}"


def on_seeds(holds: Sequence[bool], cases: str = "seeds") -> str:
    """On how many seeds, or other cases, something was so."""
    if len(holds) == 1:
        return f"on the one {cases.removesuffix('s')}" if holds[0] else f"on NONE of 1 {cases}"
    count = "all" if all(holds) else f"{sum(holds) or 'NONE'} of"
    return f"on {count} {len(holds)} {cases}"


def paper(finding: str, holds: Sequence[bool], by: str, cases: str = "seeds") -> str:
    """A finding of the paper, and on how many seeds it shows here.

    Args:
      finding: what the paper claims.
      holds: whether it is so, case by case.
      by: the coordinate or statistic that `holds` was read from, with the bound where there is one. The page's test
        looks for one of the words that the section declares (`tables.Section.by`).
      cases: what `holds` counts, in the plural.
    """
    few = "only " if 2 * sum(holds) < len(holds) else ""
    verdict = f"shows here {few}{on_seeds(holds, cases)}"
    if not any(holds):
        verdict = f"does NOT show here, on none of {len(holds)} {cases}"
    return f"The paper: {finding}; by {by}, this {verdict}."


# Figures ----------------------------------------------------------------------------------------------


def panels(count: int, title: str, grid: bool = False) -> tuple[Figure, list[Axes]]:
    """A row of panels under one title."""
    fig, axes = plt.subplots(1, count, figsize=(5.2 * count, 4.4), layout="constrained", squeeze=False)
    fig.suptitle(title)
    for axis in axes[0] if grid else ():
        axis.grid(alpha=0.3)
    return fig, list(axes[0])


def rows(axis: Axes, names: Iterable[str]) -> None:
    """Names beside the places 0, 1, …, from top to bottom."""
    shown = list(names)
    axis.set_yticks(range(len(shown)), shown)
    axis.invert_yaxis()


def colors(arms: Sequence[str]) -> dict[str, str]:
    """Red for AdamW and blue for the first DDC arm, in every figure."""
    ours = next((arm for arm in arms if arm.startswith("DDC")), "")
    fixed = {"AdamW": "tab:red", ours: "tab:blue"}
    others = iter(COLORS)
    return {arm: fixed.get(arm) or next(others) for arm in arms}


class Panel(NamedTuple):
    """A quantity along the run, a line per seed and a colour per arm.

    Attributes:
      key: of the curves.
      title: above the panel.
      scale: of the quantity.
      ylabel: beside it.
      drift: whether what rounding hides is drawn at the rounding of float32, which is marked.
    """

    key: str
    title: str
    scale: str = "log"
    ylabel: str = ""
    drift: bool = False


def figure(title: str, *shown: Panel) -> Callable[[Result, Path], None]:
    """What draws these panels in a row, under one title."""

    def draw(result: Result, path: Path) -> None:
        fig, axes = panels(len(shown), title, grid=True)
        for axis, panel in zip(axes, shown, strict=True):
            curves(axis, result, panel)
        save(fig, path)

    return draw


def curves(axis: Axes, result: Result, panel: Panel) -> None:
    """One panel."""
    for arm, color in colors(result["arms"]).items():
        for n, cell in enumerate(result["cells"][arm].values()):
            values = cell["curves"][panel.key]
            values = [max(value, ROUNDING) for value in values] if panel.drift else values
            axis.plot(cell["curves"]["step"], values, color=color, lw=1.3, alpha=0.8, label=None if n else arm)
    axis.set(title=panel.title, xlabel="step", ylabel=panel.ylabel, yscale=panel.scale)
    if panel.drift:
        axis.axhline(ROUNDING, color="gray", ls=":", label="rounding of float32")
        axis.set(ylim=(ROUNDING / 2, None), ylabel=panel.ylabel or "distance from the start")


def by_rate(axis: Axes, losses: Mapping[float, Sequence[float]], color: str, label: str) -> None:
    """Losses of a sweep over the rate: a line through the means, a band from the least to the largest of the seeds."""
    rates, values = list(losses), np.array(list(losses.values()))
    axis.plot(rates, values.mean(1), ".-", color=color, label=label)
    axis.fill_between(rates, values.min(1), values.max(1), color=color, alpha=0.2, lw=0)
    axis.set(xlabel="peak learning rate", ylabel="nats per byte", xscale="log")
    axis.grid(alpha=0.3)


def at_rates(axis: Axes, rates: Iterable[float]) -> None:
    """Ticks at these rates and nowhere else."""
    ticks = sorted(set(rates))
    axis.set_xticks(ticks, [f"{rate:g}" for rate in ticks], fontsize=8)
    axis.set_xticks([], minor=True)


def save(fig: Figure, path: Path) -> None:
    """Write the PNG, with the legend of all panels below them."""
    shown = {label: line for axis in fig.axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    fig.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=min(len(shown), 6))
    save_as_is(fig, path)


def save_as_is(fig: Figure, path: Path) -> None:
    """Write the PNG of panels that have legends of their own."""
    fig.savefig(path, dpi=110)
    plt.close(fig)
