"""Turns a study's JSON into text and figures: numbers over seeds, Markdown tables, verdicts, curves."""

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
"""Half the spacing of float32 numbers just above 1. A drift that is smaller counts as this number."""
MATCHED = 2.0
"""A loss counts as matched if it is at most this many times the loss that it is compared with."""
COLORS = ("tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:gray", "tab:olive", "tab:cyan")


# Numbers ----------------------------------------------------------------------------------------------


def final(result: Result, arm: str, key: str) -> Values:
    """The last measurement of a run, for every seed."""
    return [cell["final"][key] for cell in result["cells"][arm].values()]


def largest(result: Result, arm: str, key: str) -> Values:
    """The largest measurement along the run, for every seed."""
    return [max(cell["curves"][key]) for cell in result["cells"][arm].values()]


def smallest(result: Result, arm: str, key: str) -> Values:
    """The smallest measurement along the run, for every seed."""
    return [min(cell["curves"][key]) for cell in result["cells"][arm].values()]


def settled(result: Result, arm: str, key: str) -> Values:
    """The median over the last quarter of the run, for every seed. With a constant rate, the last value is noisy."""
    curves = [cell["curves"][key] for cell in result["cells"][arm].values()]
    return [statistics.median(curve[-max(1, len(curve) // 4) :]) for curve in curves]


def ratios(above: Values, below: Values, least: float = ROUNDING) -> Values:
    """The ratios of two lists, seed by seed. Values below `least` count as `least`."""
    return [max(a, least) / max(b, least) for a, b in zip(above, below, strict=True)]


def span(values: Sequence[float], form: str = ".2g") -> str:
    """The text "smallest to largest", or one number if both have the same text."""
    low, high = (number(x, form) for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def number(x: float, form: str = ".2g") -> str:
    """A number as text: small numbers as 3.1e-07, large ones as 12,000 and not 1.2e+04."""
    return f"{float(f'{x:.2g}'):,.0f}" if form == ".2g" and 100 <= abs(x) < 1e9 else f"{x:{form}}"


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """The text "mean ± standard deviation" over seeds."""
    array = np.asarray(values, float)
    return f"{array.mean():{form}} ± {array.std(ddof=1) if array.size > 1 else 0.0:{form}}"


def listed(values: Sequence[float], form: str = ".2g") -> str:
    """The numbers of all seeds in order, as text, separated by slashes."""
    return " / ".join(number(x, form) for x in values)


# Markdown ---------------------------------------------------------------------------------------------

Column = Callable[[str], str]
"""Name of an arm → the text of a table cell."""


def markdown(lines: Sequence[Sequence[str]], padded: bool = True) -> str:
    """A Markdown table whose first line is its head. Padded columns are aligned in the plain text too."""
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    widths = [max(map(len, column)) if padded else 0 for column in zip(*rows, strict=True)]
    return "\n".join(f"| {' | '.join(x.ljust(w) for x, w in zip(row, widths, strict=True))} |" for row in rows)


def plain(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are not padded."""
    return markdown(lines, padded=False)


def bare(lines: Sequence[Sequence[Any]]) -> str:
    """A Markdown table without any padding. Its cells may be of any type."""
    head, *rows = (f"| {' | '.join(map(str, line))} |" for line in lines)
    return "\n".join([head.replace("|  |", "| |"), "|---" * len(lines[0]) + "|", *rows])


def table(result: Result, columns: Mapping[str, Column]) -> str:
    """A table with one row per arm. `columns` maps a heading to the function that makes its cells."""
    rows = [[arm, *(column(arm) for column in columns.values())] for arm in result["arms"]]
    return plain([["arm", *columns], *rows])


def column(result: Result, key: str, form: str = ".2g", at: Reading = final) -> Column:
    """A column of a table: the measurement `key` of an arm, for all seeds. `at` says which: the last, the largest, …"""
    return lambda arm: listed(at(result, arm, key), form)


def made_with(result: Result) -> str:
    """A sentence about the seeds and the machine of a result."""
    seeds = ", ".join(str(seed) for seed in result["seeds"])
    if len(result["seeds"]) == 1:
        return f"One seed, {seeds}; {result['machine']}."
    return f"Seeds {seeds}, in this order where three numbers stand; float32, {result['machine']}."


def containment(
    result: Result, theirs: str, ours: str, mode: str, coordinate: str, loss: str = "loss", at: Reading = final
) -> str:
    """Sentences that say how much less `ours` drifts than `theirs`, and whether the loss is as low.

    Args:
      result: the content of the JSON.
      theirs: the arm that is expected to drift.
      ours: the arm that is expected not to drift.
      mode: the key of the measurement: the distance of a coordinate from its start.
      coordinate: the name of that coordinate, in words or as a formula.
      loss: the key of the loss that is compared.
      at: which measurement of the loss: the last, the smallest, …
    """
    times = ratios(largest(result, theirs, mode), largest(result, ours, mode))
    losses = [a / b for a, b in zip(at(result, ours, loss), at(result, theirs, loss), strict=True)]
    return (f"In {coordinate}, {ours} drifts {span(times)} times less than {theirs} (1,000 times or more "
            f"{on_seeds([x >= 1000 for x in times])}); its {'final' if at is final else 'settled'} loss is "
            f"{span(losses)} times {theirs}'s (matched {on_seeds([x <= MATCHED for x in losses])}).")


def farther(result: Result, ours: str, theirs: str, mode: str) -> str:
    """A clause that says how many times as far one arm drifts as another."""
    times = ratios(largest(result, ours, mode), largest(result, theirs, mode))
    return f"{ours} goes {span(times)} times as far as {theirs}"


def on_seeds(holds: Sequence[bool], cases: str = "seeds") -> str:
    """Words that say on how many seeds (or other cases) something is true."""
    if len(holds) == 1:
        return f"on the one {cases.removesuffix('s')}" if holds[0] else f"on NONE of 1 {cases}"
    count = "all" if all(holds) else f"{sum(holds) or 'NONE'} of"
    return f"on {count} {len(holds)} {cases}"


def paper(finding: str, holds: Sequence[bool], by: str, cases: str = "seeds") -> str:
    """A sentence that says on how many seeds a finding of the paper shows here.

    Args:
      finding: what the paper claims.
      holds: whether the claim is true, for every case.
      by: the coordinate or statistic by which `holds` was decided, and its bound if there is one. It must contain a
        word of the section's list `tables.Section.by`, which a test of the page checks.
      cases: the name of the cases, in the plural.
    """
    few = "only " if 2 * sum(holds) < len(holds) else ""
    verdict = f"shows here {few}{on_seeds(holds, cases)}"
    if not any(holds):
        verdict = f"does NOT show here, on none of {len(holds)} {cases}"
    return f"The paper: {finding}; by {by}, this {verdict}."


# Figures ----------------------------------------------------------------------------------------------


def panels(count: int, title: str, grid: bool = False) -> tuple[Figure, list[Axes]]:
    """Makes a figure with a row of panels under one title."""
    fig, axes = plt.subplots(1, count, figsize=(5.2 * count, 4.4), layout="constrained", squeeze=False)
    fig.suptitle(title)
    for axis in axes[0] if grid else ():
        axis.grid(alpha=0.3)
    return fig, list(axes[0])


def rows(axis: Axes, names: Iterable[str]) -> None:
    """Writes names beside the positions 0, 1, … of the vertical axis, from top to bottom."""
    shown = list(names)
    axis.set_yticks(range(len(shown)), shown)
    axis.invert_yaxis()


def colors(arms: Sequence[str]) -> dict[str, str]:
    """Arm → colour. In every figure AdamW is red, and the first DDC arm blue."""
    ours = next((arm for arm in arms if arm.startswith("DDC")), "")
    fixed = {"AdamW": "tab:red", ours: "tab:blue"}
    others = iter(COLORS)
    return {arm: fixed.get(arm) or next(others) for arm in arms}


class Panel(NamedTuple):
    """A panel that draws a quantity along the run, with a curve per seed and a colour per arm.

    Attributes:
      key: the key of the quantity in a cell's curves.
      title: the text above the panel.
      scale: the scale of the vertical axis, "log" or "linear".
      ylabel: the text beside that axis.
      drift: whether the quantity is a drift: values below float32's rounding are drawn there, and this level is marked.
    """

    key: str
    title: str
    scale: str = "log"
    ylabel: str = ""
    drift: bool = False


def figure(title: str, *shown: Panel) -> Callable[[Result, Path], None]:
    """Returns a function that draws these panels in a row under one title."""

    def draw(result: Result, path: Path) -> None:
        fig, axes = panels(len(shown), title, grid=True)
        for axis, panel in zip(axes, shown, strict=True):
            curves(axis, result, panel)
        save(fig, path)

    return draw


def curves(axis: Axes, result: Result, panel: Panel) -> None:
    """Draws one panel."""
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
    """Draws the losses of a sweep over rates: a curve through the means, and a band from the least to the largest."""
    rates, values = list(losses), np.array(list(losses.values()))
    axis.plot(rates, values.mean(1), ".-", color=color, label=label)
    axis.fill_between(rates, values.min(1), values.max(1), color=color, alpha=0.2, lw=0)
    axis.set(xlabel="peak learning rate", ylabel="nats per byte", xscale="log")
    axis.grid(alpha=0.3)


def at_rates(axis: Axes, rates: Iterable[float]) -> None:
    """Puts ticks at these rates and nowhere else."""
    ticks = sorted(set(rates))
    axis.set_xticks(ticks, [f"{rate:g}" for rate in ticks], fontsize=8)
    axis.set_xticks([], minor=True)


def save(fig: Figure, path: Path) -> None:
    """Writes the PNG, with one legend for all panels below them."""
    shown = {label: line for axis in fig.axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    fig.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=min(len(shown), 6))
    save_as_is(fig, path)


def save_as_is(fig: Figure, path: Path) -> None:
    """Writes the PNG of panels that have legends of their own."""
    fig.savefig(path, dpi=110)
    plt.close(fig)
