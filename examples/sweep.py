"""Sweeps of a peak rate that end where the best has a worse neighbour on both sides; finished runs are kept as JSON.

A group is what one sweep is about (size, start, arm …); a cell is a group with a rate and a seed. `result["cells"]` has
what the caller's training function returned for each cell, at least `validation` and `finite`. Several processes may
fill one file.
"""

import fcntl
import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from tqdm import tqdm

from examples import study

Group = tuple[Any, ...]
Cell = tuple[Any, ...]
"""A group, then peak rate and seed."""
Result = dict[str, Any]
"""The JSON: a header with `seeds`, and `cells` by `key`."""

RATIO, RATES, LONGER = 2.5, 4, 3  # of neighbouring rates; how many at first; how many may be added on either side


class Sweep(NamedTuple):
    """One group's sweep: its first rate."""

    group: Group
    first: float

    def rates(self, low: int, high: int) -> list[float]:
        """Rates number `low` to `high`, both included, to two digits."""
        return [float(f"{self.first * RATIO**n:.2g}") for n in range(low, high + 1)]

    def losses(self, result: Result) -> dict[float, list[float]]:
        """Rate → validation losses, seed by seed, infinite where not finite; rates that lack a seed are left out."""
        losses = {}
        for rate in self.rates(-LONGER, RATES - 1 + LONGER):
            cells = [result["cells"].get(key((*self.group, rate, seed))) for seed in result["seeds"]]
            if all(cells):
                losses[rate] = [cell["validation"] if cell["finite"] else math.inf for cell in cells]
        return losses

    def missing(self, result: Result) -> list[Cell]:
        """What to train next: the first rates, then one more on the side where the best is the last."""
        low, high, losses = 0, RATES - 1, self.losses(result)
        while True:
            wanted = self.rates(low, high)
            cells = [(*self.group, rate, seed) for rate in wanted if rate not in losses for seed in result["seeds"]]
            if cells:
                return [cell for cell in cells if key(cell) not in result["cells"]]
            at = best({rate: losses[rate] for rate in wanted})
            if at == wanted[0] and low > -LONGER:
                low -= 1
            elif at == wanted[-1] and high < RATES - 1 + LONGER:
                high += 1
            else:
                return []


def climb(losses: Mapping[int, float], first: int, most: int) -> list[int]:
    """Which rates of a geometric grid to try next, by number; none once the best has a worse one on both sides.

    Args:
      losses: of the rates that are done.
      first: where to begin.
      most: the largest number on either side of zero.

    >>> climb({}, 1, 3), climb({1: 2.0}, 1, 3), climb({0: 2.2, 1: 2.0, 2: 2.1}, 1, 3)
    ([1], [0, 2], [])
    """
    best = min(losses, key=lambda n: losses[n]) if losses else first
    wanted = (best - 1, best + 1) if losses else (best,)
    return [n for n in wanted if abs(n) <= most and n not in losses]


def key(cell: Cell) -> str:
    """A cell's name in the JSON."""
    *group, rate, seed = cell
    return " | ".join([*map(str, group), f"{rate:g}", str(seed)])


def best(losses: dict[float, list[float]]) -> float:
    """The rate of least mean."""
    return min(losses, key=lambda rate: float(np.mean(losses[rate])))


def best_for_all(swept: Sequence[Mapping[float, float]]) -> tuple[float, float]:
    """The rate that serves all sweeps best, of those that all have run, and the most that it adds to a least loss.

    >>> best_for_all([{0.1: 2.0, 0.2: 2.5}, {0.1: 1.25, 0.2: 1.0}])
    (0.1, 0.25)
    """
    common = set.intersection(*(set(rates) for rates in swept))
    worst = {rate: max(rates[rate] - min(rates.values()) for rates in swept) for rate in common}
    rate = min(worst, key=lambda rate: worst[rate])
    return rate, worst[rate]


def save(path: Path, cell: Cell, done: dict[str, Any]) -> Result:
    """Add a cell to the file as it is now: other processes may have added theirs."""
    folder = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        result: Result = json.loads(path.read_text())
        result["cells"][key(cell)] = done
        study.write(path, result)
    finally:
        os.close(folder)
    return result


def fill(
    path: Path, result: Result, sweeps: Sequence[Sweep], train: Callable[[Cell], dict[str, Any]]
) -> Result:
    """Trains what is missing, one cell after the other; killed, it goes on where it was."""
    if not path.exists():
        study.write(path, result)
    with tqdm(unit="run") as progress:
        while cells := [cell for sweep in sweeps for cell in sweep.missing(result)]:
            progress.total = progress.n + len(cells)
            done = train(cells[0])
            result = save(path, cells[0], done)
            tqdm.write(f"{key(cells[0])}: {done}")
            progress.update()
    return result


def trained(
    tx: optax.GradientTransformation,
    loss: Callable[..., jax.Array],
    params: Any,
    batches: jax.Array,
    held_out: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Training losses over the batches, and the validation loss after them; to be traced."""

    def step(carry: tuple[Any, Any], tokens: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), batches)
    return losses, jax.lax.map(functools.partial(loss, params), held_out).mean()


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table of equal columns; the first line is its head."""
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(f"| {' | '.join(x.ljust(w) for x, w in zip(row, widths, strict=True))} |" for row in rows)
