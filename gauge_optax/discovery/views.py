"""Leaves as tensors over index spaces: which windows and components an axis has, and the entries of each.

A `View` cuts every axis of a leaf to a window and splits the window into atoms, one per space; an atom may be picked
at one index (fused kernels). A `Piece` is a view read along one space, with companions: a tensor (companions, space,
rest).

Here: where a group could act on a leaf. Not here: whether it does (`search`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gauge_optax.discovery.spaces import Axis, Spaces
from gauge_optax.discovery.trace import Axes

Space = tuple[int, ...]
MOST_PICKED = 64  # indices of an axis that are looked at one by one


class Atom(NamedTuple):
    """A component of an axis.

    Attributes:
      space: None where it has none.
      size: how many of its indices are read.
      pick: the one index that is selected instead.
      span: where it is a part of a longer component, its first index and that one's length.
    """

    space: Space | None
    size: int
    pick: int | None = None
    span: tuple[int, int] | None = None

    @property
    def full(self) -> int:
        """Length of the component."""
        return self.size if self.span is None else self.span[1]

    @property
    def reads(self) -> int | slice:
        """What is read of it."""
        start = 0 if self.span is None else self.span[0]
        return slice(start, start + self.size) if self.pick is None else self.pick


class Window(NamedTuple):
    """Entries start to stop of a leaf axis, as a grid of atoms."""

    start: int
    stop: int
    atoms: tuple[Atom, ...]


@dataclasses.dataclass(frozen=True)
class View:
    """A leaf as a tensor over the atoms that are not picked.

    Attributes:
      path: the leaf's normalised path.
      shape: its shape.
      windows: one per axis.
      other: the axis that is read in another way than the first, None for the leaf's main views.
    """

    path: str
    shape: tuple[int, ...]
    windows: tuple[Window, ...]
    other: int | None = None

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Axis and number of every atom that is not picked."""
        return tuple(
            (k, j) for k, w in enumerate(self.windows) for j, atom in enumerate(w.atoms) if atom.pick is None
        )

    @property
    def labels(self) -> tuple[Space | None, ...]:
        """Their spaces."""
        return tuple(self.windows[k].atoms[j].space for k, j in self.places)

    @property
    def size(self) -> int:
        """How many entries are selected."""
        return math.prod(self.windows[k].atoms[j].size for k, j in self.places)

    def read(self, values: np.ndarray) -> np.ndarray:
        """Selected entries of (rows, *shape): (rows, *atoms). A view where windows are whole."""
        cut = values[(slice(None), *(slice(w.start, w.stop) for w in self.windows))]
        grid = cut.reshape(len(values), *(atom.full for w in self.windows for atom in w.atoms))
        return grid[(slice(None), *(atom.reads for w in self.windows for atom in w.atoms))]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A view along one space.

    Attributes:
      view: the view.
      at: which of its atoms the group acts on; None for one scale of the whole.
      beside: which index the group.
    """

    view: View
    at: int | None
    beside: tuple[int, ...]

    @property
    def path(self) -> str:
        """The leaf's path."""
        return self.view.path

    @property
    def vector(self) -> bool:
        """Whether there is nothing but the space and its companions in the whole leaf."""
        return self.view.size == math.prod(self.view.shape) and len(self.view.places) == 1 + len(self.beside)

    @functools.cached_property
    def entries(self) -> np.ndarray:
        """Flat indices in the leaf: (companions, space, rest)."""
        return self.read(np.arange(math.prod(self.view.shape)).reshape(1, *self.view.shape))[0]

    def read(self, values: np.ndarray) -> np.ndarray:
        """(rows, *shape) as (rows, companions, space, rest)."""
        tensor = self.view.read(values)
        if self.at is None:
            return tensor.reshape(len(values), 1, 1, -1)
        rest = [k for k in range(len(self.view.places)) if k != self.at and k not in self.beside]
        many = math.prod(tensor.shape[1 + k] for k in self.beside)
        length = tensor.shape[1 + self.at]
        tensor = tensor.transpose(0, *(1 + k for k in (*self.beside, self.at, *rest)))
        return tensor.reshape(len(values), many, length, -1)


def views_of(spaces: Spaces, path: str, shape: tuple[int, ...], axes: Axes, known: set[Space]) -> Iterator[View]:
    """All views of a leaf: the main ones, and those that read one axis in another way."""
    ways = [_readings(spaces, axis, n, known) for axis, n in zip(axes, shape, strict=True)]
    yield from (View(path, shape, windows) for windows in itertools.product(*(way[0] for way in ways)))
    for k, way in enumerate(ways):
        for other in way[1:]:
            own = [other if j == k else ways[j][0] for j in range(len(ways))]
            yield from (View(path, shape, windows, k) for windows in itertools.product(*own))


def _readings(spaces: Spaces, axis: Axis, length: int, known: set[Space]) -> list[list[Window]]:
    """Ways to read one axis, each as a list of windows."""
    if axis is None or length == 1:
        return [[Window(0, length, (Atom(None, length),))]]
    atoms, whole = spaces.atoms(axis), spaces.key(axis)
    if len(atoms) > 1:
        return _grid_readings(spaces, 0, length, atoms, known)
    one = Window(0, length, (Atom(whole, length),))
    if length <= MOST_PICKED and not spaces.picked.isdisjoint(whole):
        return [[Window(0, length, (Atom(whole, length, q),)) for q in range(length)], [one]]
    ways = [[one]] if whole in known else []
    segments = _segments(spaces, axis)
    if len(segments) > 1:
        parts = [_grid_readings(spaces, a, b, spaces.atoms(axis[a:b]), known) for a, b in segments]
        for k in range(max(map(len, parts))):
            ways.append(list(itertools.chain(*(own[k] for own in parts if k < len(own)))))
    found = _known_windows(whole, known)
    return [*ways, found] if found else ways or [[one]]


def runs(space: Space) -> list[tuple[int, int]]:
    """Runs in which ids occur equally often, where they do not all: the rotary part of a basis, and the rest.

    A run is whole: its ids occur nowhere else.
    """
    times = [space.count(x) for x in space]
    cuts = [0, *(k for k in range(1, len(space)) if times[k] != times[k - 1]), len(space)]
    found = [(a, b) for a, b in itertools.pairwise(cuts) if b - a > 1]
    whole = [(a, b) for a, b in found if all(space[a:b].count(x) == times[a] for x in space[a:b])]
    return whole if len(cuts) > 2 else []


def _segments(spaces: Spaces, axis: np.ndarray) -> list[tuple[int, int]]:
    """Runs of an axis that are places of one grid in order, or of none."""
    grids = [spaces.grid(x) for x in spaces.key(axis)]
    if all(grid is None for grid in grids):
        return []
    cuts = [0]
    for k, (a, b) in enumerate(itertools.pairwise(grids), start=1):
        if (a is None) != (b is None) or (a and b and (a.sizes != b.sizes or b.place != a.place + 1)):
            cuts.append(k)
    return list(itertools.pairwise([*cuts, len(axis)]))


def _known_windows(whole: Space, known: set[Space]) -> list[Window]:
    """Windows of an axis that are spaces of their own, longest first, without overlaps."""
    taken = np.zeros(len(whole), bool)
    windows = []
    for space in sorted((s for s in known if len(s) < len(whole)), key=len, reverse=True):
        for start in range(len(whole) - len(space) + 1):
            stop = start + len(space)
            if whole[start] == space[0] and whole[start:stop] == space and not taken[start:stop].any():
                taken[start:stop] = True
                windows.append(Window(start, stop, (Atom(space, len(space)),)))
    return sorted(windows)


def _grid_readings(
    spaces: Spaces, start: int, stop: int, parts: Sequence[np.ndarray], known: set[Space]
) -> list[list[Window]]:
    """A grid with all choices of what is picked; and with a picked pair as the planes of its neighbour."""
    keys = [spaces.key(part) for part in parts]
    picked = [not spaces.picked.isdisjoint(key) and len(key) <= MOST_PICKED for key in keys]
    atoms = [Atom(key, len(key)) for key in keys]
    choices = itertools.product(*(range(a.size) if on else (None,) for a, on in zip(atoms, picked, strict=True)))
    main = [
        Window(start, stop, tuple(a._replace(pick=q) for a, q in zip(atoms, choice, strict=True))) for choice in choices
    ]
    ways = [main]
    if any(picked):
        ways.append([Window(start, stop, tuple(atoms))])
    for k, atom in enumerate(atoms):
        inner = [(w.start, w.stop) for w in _known_windows(keys[k], known)]
        cut = [Atom(keys[k][a:b], b - a, None, (a, atom.size)) for a, b in inner]
        ways += [[Window(start, stop, (*atoms[:k], part, *atoms[k + 1 :])) for part in cut]] if cut else []
    for k, (atom, on) in enumerate(zip(atoms, picked, strict=True)):
        if not on or atom.size != 2 or atom.space is None:
            continue
        if k > 0 and not picked[k - 1]:
            space = tuple(x for x in keys[k - 1] for _ in range(2))
            ways.append([Window(start, stop, (*atoms[: k - 1], Atom(space, len(space)), *atoms[k + 1 :]))])
        if k + 1 < len(atoms) and not picked[k + 1]:
            space = keys[k + 1] * 2
            ways.append([Window(start, stop, (*atoms[:k], Atom(space, len(space)), *atoms[k + 2 :]))])
    known.update(atom.space for way in ways[1:] for w in way for atom in w.atoms if atom.space is not None)
    return ways
