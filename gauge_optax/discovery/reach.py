"""Tells which entries of the leaves affect the outputs, by their gradients and by giving them new values.

`instance` leaves the entries without effect out of the search, and `report` lists them.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from gauge_optax.discovery.calls import bound_copies
from gauge_optax.discovery.groups import STILL
from gauge_optax.discovery.prove import Held, Prover
from gauge_optax.discovery.sketch import Leaves, root_mean_square

_DEAD = 1e-11  # an entry of a leaf has no effect if its gradient, relative to the median of all entries, is smaller


class Uncovered(NamedTuple):
    """The number of a leaf's entries that no batch uses (`entries` out of `of`), such as rows of an embedding.

    >>> Uncovered("table", 3, 7).entries
    3
    """

    path: str
    entries: int
    of: int


def unreached(
    prover: Prover, squares: Leaves, noise: np.random.Generator
) -> tuple[dict[str, np.ndarray], list[str], list[Uncovered], dict[str, str]]:
    """Classifies the entries without a gradient: new values of them may change the outputs nevertheless.

    Args:
      prover: measures how much new values change the outputs.
      squares: sums of squared gradients by leaf.
      noise: source of the new values.

    Returns:
      Masks of the entries without a gradient, by path; leaves without effect on the outputs; entries that no batch
      reaches; and, by path, a text on each leaf in which new values of such entries do change the outputs.
    """
    masks = without_gradient(squares, prover.points[0])
    dead, uncovered, rejected = list[str](), list[Uncovered](), dict[str, str]()
    for path, mask in masks.items():
        if not mask.any():
            continue
        change = prover.change_of_entries(path, mask, noise, turn=bool(mask.all()))
        if change > STILL:  # for example, stop_gradient hides a value from gradients and not from the outputs
            which = "" if mask.all() else f" at {mask.sum()} of {mask.size} entries"
            why = "stop_gradient?" if mask.all() else "dead units, stop_gradient?"
            rejected[path] = f"{path}: no gradient{which} ({why}), but its values move the outputs by {change:.1e}"
        elif mask.all():
            dead.append(path)
        else:
            uncovered.append(Uncovered(path, int(mask.sum()), mask.size))
    return masks, dead, uncovered, rejected


def of_no_key_bias(uncovered: Iterable[Uncovered], held: Iterable[Held], params: Any) -> tuple[Uncovered, ...]:
    """Leaves out the entries that a proved `key_bias` moves: batches do use them, but no output depends on them.

    Args:
      uncovered: what no batch seems to reach.
      held: the proved gauges.
      params: the tree that they bind to; shapes are enough.
    """
    moved = collections.Counter[str]()
    for one in held:
        for _, _, blocks in bound_copies(one.gauge, params) if one.call.kind == "key_bias" else ():
            moved.update({block.path: math.prod(block.view_shape) for block in blocks})
    rest = (u._replace(entries=u.entries - moved[u.path]) for u in uncovered)
    return tuple(u for u in rest if u.entries > 0)


def without_gradient(squares: Leaves, point: Leaves) -> dict[str, np.ndarray]:
    """Masks, by path, of the entries whose gradients are roundoff compared with the median over all entries.

    Args:
      squares: sums of squared gradients by leaf.
      point: the leaves at a point. Each leaf's gradients are multiplied by its root mean square there before they are
        compared. Otherwise the gradient of a leaf of 1e12, which the function divides by 1e12, would look like zero.
    """
    sizes = {path: root_mean_square(np.asarray(point[path])) or 1.0 for path in squares}
    step = 1 + sum(x.size for x in squares.values()) // 4_000_000  # a sample of the entries gives the median
    sample = np.concatenate([sizes[path] * np.sqrt(x.ravel()[::step]) for path, x in squares.items()])
    typical = np.median(sample[sample > 0]) if (sample > 0).any() else 0.0
    return {path: np.sqrt(x) <= _DEAD * typical / sizes[path] for path, x in squares.items()}
