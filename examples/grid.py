"""Runs the cells of an experiment one after the other, keeps each in a JSON as it is done, draws and prints a table.

A cell is one setting, run from all seeds at once; `train(cell)` returns its numbers as lists by seed. A killed
experiment goes on after the last cell that it finished. `sweep` runs sweeps that look for their own ends, and `study`
runs studies of gauges.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

from examples import cli, report, study

plt = report.plt

Result = dict[str, Any]
Cell = dict[str, Any]
SEEDS = (0, 1, 2)
DIGITS = 5


class Experiment(NamedTuple):
    """What is trained, and what is made of it.

    Attributes:
      name: of the JSON and PNG files.
      settings: everything that must agree before two runs may stand in one table.
      cells: name → a function of the seeds that gives numbers, or lists of them.
      figure: draws a result to a path.
      section: the Markdown of a result.
    """

    name: str
    settings: Mapping[str, Any]
    cells: Mapping[str, Callable[[Sequence[int]], Cell]]
    figure: Callable[[Result, Path], None]
    section: Callable[[Result], str]


def main(
    doc: str | None,
    experiment: Experiment | Callable[[argparse.Namespace], Experiment],
    argv: Sequence[str] | None = None,
    seeds: Sequence[int] = SEEDS,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Result:
    """Trains what is missing, then draws and prints; `options` adds what an experiment that is a function reads."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=cli.Help)
    parser.add_argument("--out", type=Path, default=Path("outputs") / "rotational", help="folder of JSON and PNG")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds), help="of starts and data")
    parser.add_argument("--stop-after", type=int, default=None, help="leave after this many cells, as if killed")
    if options is not None:
        options(parser)
    args = parser.parse_args(argv)
    experiment = experiment if isinstance(experiment, Experiment) else experiment(args)
    path = args.out / f"{experiment.name}.json"
    head = {
        "settings": json.loads(json.dumps(dict(experiment.settings))), "seeds": args.seeds,
        "machine": study.machine(), "versions": {"jax": jax.__version__, "optax": optax.__version__},
    }
    result = _kept(path, head)
    missing = [name for name in experiment.cells if name not in result["cells"]][: args.stop_after]
    for name in (progress := tqdm(missing)):
        progress.set_description(f"{experiment.name}: {name} (the first step compiles)")
        result["cells"][name] = rounded(experiment.cells[name](args.seeds))
        study.write(path, result)
    if all(name in result["cells"] for name in experiment.cells):
        experiment.figure(result, path.with_suffix(".png"))
        tqdm.write(experiment.section(result))
    return result


def _kept(path: Path, head: Result) -> Result:
    if not path.exists():
        return head | {"cells": {}}
    result: Result = json.loads(path.read_text())
    if (result["settings"], result["seeds"]) != (head["settings"], head["seeds"]):
        raise ValueError(
            f"{path} holds runs of other settings or seeds\n"
            f"  found:    {result['settings']}, seeds {result['seeds']}\n"
            f"  expected: {head['settings']}, seeds {head['seeds']}\n"
            f"  remedy:   delete it, or give another --out"
        )
    return result


def rounded(x: Any) -> Any:
    """Arrays and numbers as JSON, to five digits."""
    if isinstance(x, dict):
        return {key: rounded(y) for key, y in x.items()}
    if isinstance(x, list | tuple):
        return [rounded(y) for y in x]
    if isinstance(x, np.ndarray | jax.Array):
        return rounded(np.asarray(x, float).tolist())
    return float(f"{x:.{DIGITS}g}") if isinstance(x, float) else x


def save(fig: Figure, path: Path) -> None:
    """Writes a figure and closes it."""
    fig.savefig(path, dpi=110)
    plt.close(fig)


def warmed(rate: Any, steps: int, warmup: float, constant: bool) -> optax.Schedule:
    """Warm-up over a share of the steps, then a cosine to zero, or constant."""
    warm = int(warmup * steps)

    def at(count: Any) -> jax.Array:
        rising = jnp.minimum(1.0, (count + 1) / max(1, warm))
        along = jnp.clip((count - warm) / max(1, steps - warm), 0.0, 1.0)
        return rate * rising * (1.0 if constant else 0.5 * (1.0 + jnp.cos(jnp.pi * along)))

    return at


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Mean ± standard deviation over seeds."""
    array = np.asarray(values, float)
    return f"{array.mean():{form}} ± {array.std(ddof=1) if array.size > 1 else 0.0:{form}}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def best(cells: Mapping[str, Cell], names: Sequence[str], key: str, least: bool = True) -> str:
    """The cell of the best mean over seeds."""
    sign = 1.0 if least else -1.0
    means = {name: sign * float(np.mean(cells[name][key])) for name in names}
    return min(means, key=lambda name: means[name] if np.isfinite(means[name]) else np.inf)
