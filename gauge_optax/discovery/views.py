"""Reads leaves as tensors, each of whose axes is one *space* (`spaces`), an axis on which a group could act.

A `View` reads a range of each axis of a leaf, a *window*. If a window holds several axes in one, such as heads and
entries of heads, the view splits it into these, its *atoms*. An atom has at most one space. The view reads all indices
of an atom, some ranges of them, or one index, which it *picks*: of an atom with the indices query, key and value in a
fused kernel, it can pick query. A `Piece` is a view in which a group acts on one atom, or on all of it. Other
atoms, its *companions*, count copies of the group, as heads do. A piece reads the leaf as a tensor (companions, space,
rest).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gauge_optax.discovery.spaces import Axis, Space
from gauge_optax.discovery.trace import Trace

_MOST_PICKED = 64  # the indices of longer axes are not picked one by one
_MOST_PARTS = 8  # `parts_of` divides an axis into more parts only if that is the main way to read it
Ranges = tuple[tuple[int, int], ...]  # start and stop of each range of indices


class Atom(NamedTuple):
    """A component of an axis that reshapes split, or all of an axis.

    Attributes:
      space: its ids (`spaces.Space`); None if it has no ids.
      size: its number of indices, which are all read if `pick` is None.
      pick: the only index that is read; None if all are.
      span: None; or, if the atom is a part of a longer component, its ranges there and that component's length.

    >>> Atom(None, 3).selection, Atom(None, 3, pick=2).selection
    (slice(0, 3, None), slice(2, 3, None))
    """

    space: Space | None
    size: int
    pick: int | None = None
    span: tuple[Ranges, int] | None = None

    @property
    def full(self) -> int:
        """Length of the whole component."""
        return self.size if self.span is None else self.span[1]

    @property
    def selection(self) -> slice | np.ndarray:
        """The entries of the component that are read."""
        if self.pick is not None:
            return slice(self.pick, self.pick + 1)
        ranges = ((0, self.size),) if self.span is None else self.span[0]
        return slice(*ranges[0]) if len(ranges) == 1 else np.concatenate([np.arange(a, b) for a, b in ranges])


class Window(NamedTuple):
    """The entries from start to stop of an axis of a leaf, as a grid of atoms: the axes into which a reshape splits it.

    >>> Window(4, 8, (Atom(None, 4),)).stop
    8
    """

    start: int
    stop: int
    atoms: tuple[Atom, ...]

    @property
    def spaces(self) -> tuple[Space | None, ...]:
        """The spaces of the atoms, except those of which only one index is read (`pick`)."""
        return tuple(atom.space for atom in self.atoms if atom.pick is None)

    @property
    def entries(self) -> np.ndarray:
        """The entries of the axis that are read, in order."""
        grid = np.arange(self.start, self.stop).reshape([atom.full for atom in self.atoms])
        return selected(grid, self.atoms).ravel()


@dataclasses.dataclass(frozen=True)
class View:
    """A leaf as a tensor. Its axes are the atoms of all windows, without those of which one index is picked.

    Attributes:
      path: the leaf's normalised path.
      shape: its shape.
      windows: for each axis of the leaf, the entries that are read, and the atoms into which they are split.
      other: the axis that this view reads in another way than the leaf's main views do; None for a main view. Together
        the main views read all entries of the leaf (`views_of`).

    >>> view = View("up", (2, 3), (Window(0, 2, (Atom(None, 2),)), Window(1, 3, (Atom((5, 6), 2),))))
    >>> view.read(np.arange(6).reshape(1, 2, 3))
    array([[[1, 2],
            [4, 5]]])
    """

    path: str
    shape: tuple[int, ...]
    windows: tuple[Window, ...]
    other: int | None = None

    @functools.cached_property
    def atoms(self) -> dict[tuple[int, int], Atom]:
        """The atoms that are axes of the tensor (not picked), by axis of the leaf and number within the axis."""
        places = {(k, j): atom for k, w in enumerate(self.windows) for j, atom in enumerate(w.atoms)}
        return {place: atom for place, atom in places.items() if atom.pick is None}

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The leaf's axis, and the number within it, of every atom that is an axis of the tensor."""
        return tuple(self.atoms)

    @functools.cached_property
    def labels(self) -> tuple[Space | None, ...]:
        """The spaces of the tensor's axes."""
        return tuple(atom.space for atom in self.atoms.values())

    @property
    def module(self) -> str:
        """The path of the tree node that contains the leaf; of the leaf itself if the leaf is at the root."""
        return self.path.rpartition("/")[0] or self.path

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the tensor's axes."""
        return tuple(atom.size for atom in self.atoms.values())

    @property
    def size(self) -> int:
        """The number of entries of the tensor."""
        return math.prod(self.lengths)

    def read(self, values: np.ndarray) -> np.ndarray:
        """The entries that the view selects from an array (rows, *shape), as (rows, *lengths).

        It makes no copy if the windows and atoms are whole.
        """
        cut = values[(slice(None), *(slice(w.start, w.stop) for w in self.windows))]
        atoms = [atom for window in self.windows for atom in window.atoms]
        grid = selected(cut.reshape(len(values), *(atom.full for atom in atoms)), atoms, first=1)
        return grid.reshape(len(values), *self.lengths)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A view in which a group acts along one axis of the tensor, and has one element per index of the companions.

    Attributes:
      view: the view.
      at: number of the tensor's axis that the group acts on; None for one scale of all that the view reads.
      beside: numbers of the tensor's axes that are companions, such as that of heads.

    >>> view = View("up", (2, 3), (Window(0, 2, (Atom(None, 2),)), Window(0, 3, (Atom((5, 6, 7), 3),))))
    >>> Piece(view, 1, ()).entries.shape
    (1, 3, 2)
    """

    view: View
    at: int | None
    beside: tuple[int, ...]

    @property
    def path(self) -> str:
        """The leaf's path."""
        return self.view.path

    @property
    def places(self) -> list[tuple[int, int]]:
        """The leaf's axis, and the number within it, of the atom that the group acts on; then of each companion."""
        return [self.view.places[k] for k in (*(() if self.at is None else (self.at,)), *self.beside)]

    @property
    def vector(self) -> bool:
        """Whether the whole leaf consists of the space and its companions alone, as a bias does."""
        return self.lone and self.view.size == math.prod(self.view.shape)

    @property
    def lone(self) -> bool:
        """Whether all atoms but the space and its companions have length 1, as in a bias or a part of one."""
        longer = [atom for atom in self.view.atoms.values() if atom.size > 1 or atom.space is not None]
        return len(longer) == 1 + len(self.beside)

    @functools.cached_property
    def entries(self) -> np.ndarray:
        """The flat indices in the leaf of the entries that it reads: (companions, space, rest)."""
        return self.read(np.arange(math.prod(self.view.shape)).reshape(1, *self.view.shape))[0]

    def read(self, values: np.ndarray) -> np.ndarray:
        """Reads an array (rows, *shape) as (rows, companions, space, rest)."""
        tensor = self.view.read(values)
        if self.at is None:
            return tensor.reshape(len(values), 1, 1, -1)
        rest = [k for k in range(len(self.view.places)) if k != self.at and k not in self.beside]
        copies, length = math.prod(tensor.shape[1 + k] for k in self.beside), tensor.shape[1 + self.at]
        tensor = tensor.transpose(0, *(1 + k for k in (*self.beside, self.at, *rest)))
        return tensor.reshape(len(values), copies, length, -1)


def views_of(trace: Trace, path: str, shape: tuple[int, ...], searched: set[Space]) -> Iterator[View]:
    """All views of a leaf: the main ones, which together read all entries, and those that read one axis in another way.

    Args:
      trace: the walk over the function's jaxpr.
      path: the leaf's path.
      shape: its shape.
      searched: the spaces on which symmetries are looked for. The function adds spaces that only views show, such as
        those of rotary planes.

    >>> from gauge_optax.discovery.trace import walked
    >>> trace = walked(lambda p, x: [x @ p["a"]], {"a": np.ones((2, 3))}, np.ones(2))
    >>> [view.labels for view in views_of(trace, "a", (2, 3), {(0, 1), (2, 3, 4)})]
    [((0, 1), (2, 3, 4))]
    """
    ways = [_readings(trace, axis, n, searched) for axis, n in zip(trace.leaves[path], shape, strict=True)]
    main = [way[0] for way in ways]
    yield from (View(path, shape, windows) for windows in itertools.product(*main))
    for k, way in enumerate(ways):
        # Two ways can read the same entries along the same spaces: one as a range of an atom, the other as a window.
        seen = {(w.entries.tobytes(), w.spaces) for w in way[0]}
        for other in way[1:]:
            new = [w for w in other if (w.entries.tobytes(), w.spaces) not in seen]
            seen.update((w.entries.tobytes(), w.spaces) for w in new)
            yield from (View(path, shape, windows, k) for windows in itertools.product(*main[:k], new, *main[k + 1 :]))


def undivided(trace: Trace, path: str, shape: tuple[int, ...]) -> View:
    """The view of a whole leaf in which every axis is one atom.

    It is needed where each view of `views_of` reads only a part of the leaf. If a function multiplies the two halves of
    a kernel's output with each other, for example, both halves are along one space, and each view reads one half.

    >>> from gauge_optax.discovery.trace import walked
    >>> trace = walked(lambda p, x: [x @ p["a"]], {"a": np.ones((2, 3))}, np.ones(2))
    >>> undivided(trace, "a", (2, 3)).labels
    ((0, 1), (2, 3, 4))
    """
    keys = [None if axis is None else trace.spaces.key(axis) for axis in trace.leaves[path]]
    return View(path, shape, tuple(Window(0, n, (Atom(key, n),)) for key, n in zip(keys, shape, strict=True)))


def parts_of(trace: Trace, path: str, shape: tuple[int, ...], searched: set[Space]) -> Iterator[View]:
    """The parts of a leaf that the function uses separately, as views that together read every entry once.

    >>> from gauge_optax.discovery.trace import walked
    >>> trace = walked(lambda p, x: [jnp.split(x @ p["a"], [2])], {"a": np.ones((2, 5))}, np.ones(2))
    >>> parts = parts_of(trace, "a", (2, 5), {(2, 3, 4, 5, 6), (2, 3), (4, 5, 6)})
    >>> [view.windows[1].entries.tolist() for view in parts]
    [[0, 1], [2, 3, 4]]
    """
    parts, count = list[list[Window]](), 1
    for axis, length in zip(trace.leaves[path], shape, strict=True):
        main, *others = _readings(trace, axis, length, searched)
        ways = [main, *(way for way in others if len(way) <= _MOST_PARTS)]
        entries = [np.sort(np.concatenate([window.entries for window in way])) for way in ways]
        once = [way for way, read in zip(ways, entries, strict=True) if np.array_equal(read, np.arange(length))]
        fitting = [way for way in once if count * len(way) <= _MOST_PICKED]
        parts.append(max(fitting, key=len) if fitting else min(once, key=len))
        count *= len(parts[-1])
    yield from (View(path, shape, windows) for windows in itertools.product(*parts))


def selected(grid: np.ndarray, atoms: Sequence[Atom], first: int = 0) -> np.ndarray:
    """The entries of an array that atoms read, one atom per axis from axis `first` on; a picked axis keeps length 1.

    >>> selected(np.arange(6).reshape(2, 3), [Atom(None, 2, pick=1), Atom(None, 3)])
    array([[3, 4, 5]])
    """
    for axis, atom in enumerate(atoms, start=first):
        entries = atom.selection
        grid = grid[(*[slice(None)] * axis, entries)] if isinstance(entries, slice) else grid.take(entries, axis)
    return grid


def runs(space: Space) -> list[Ranges]:
    """Cuts a space into runs whose ids occur equally often, such as the rotary part of a basis and the rest.

    The result is empty if all ids occur equally often. A run is returned if it is longer than one and its ids occur
    nowhere else. All runs whose ids occur once are also returned together, as the ranges of one space, and so are those
    whose ids occur twice: a rotary embedding that turns only some planes leaves a run unchanged in each of the halves.

    >>> runs((7, 8, 7, 8, 5, 6))
    [((0, 4),), ((4, 6),)]
    """
    times = [space.count(x) for x in space]
    cuts = [0, *(k for k in range(1, len(space)) if times[k] != times[k - 1]), len(space)]
    if len(cuts) == 2:
        return []
    pieces = list(itertools.pairwise(cuts))
    whole = [((a, b),) for a, b in pieces if b - a > 1 and all(space[a:b].count(x) == times[a] for x in space[a:b])]
    kinds = [tuple((a, b) for a, b in pieces if times[a] == count) for count in sorted(set(times))]
    return [*whole, *(kind for kind in kinds if len(kind) > 1)]


def part(space: Space, ranges: Ranges) -> Space:
    """The ids in some ranges of a space.

    >>> part((5, 6, 7, 8), ((0, 1), (2, 4)))
    (5, 7, 8)
    """
    return tuple(x for a, b in ranges for x in space[a:b])


def _readings(trace: Trace, axis: Axis, length: int, searched: set[Space]) -> list[list[Window]]:
    """Ways to split one axis of a leaf into ranges of entries (`Window`), each split again by a reshape.

    The first way covers all entries.
    """
    if axis is None or length == 1:
        return [[Window(0, length, (Atom(None, length),))]]
    spaces, whole = trace.spaces, trace.spaces.key(axis)
    if len(atoms := trace.atom_keys(axis)) > 1:
        # A segment of the first atom is a window of the axis, and can be a grid itself. Examples are the query heads
        # in a fused kernel if groups of them share key heads.
        main, *others = _grid_readings(trace, 0, length, atoms, searched)
        return [main, *_segments(trace, atoms[0], atoms[1:], searched), *others]
    one = Window(0, length, (Atom(whole, length),))
    if length <= _MOST_PICKED and not spaces.picked.isdisjoint(whole):
        ways = [[Window(0, length, (Atom(whole, length, q),)) for q in range(length)], [one]]
    else:
        ways = [[one]] if whole in searched else []
    # A window with a part of a segment is written as a window of the whole axis, whose first atom has a range.
    parts = [
        [Window(0, length, _lifted(w, length)) if len(w.atoms) == 1 and w.atoms[0].span else w for w in way]
        for way in _segments(trace, whole, (), searched)
    ]
    ways += [*parts, *([Window(0, length, (atom,))] for atom in _divided(whole, searched))]
    inner = [] if parts else _inner_windows(whole, searched)
    fine = _inner_windows(whole, searched, shortest=True)  # such as each layer's features in a DenseNet's stream
    if not ways and sum(window.stop - window.start for window in inner) < length:
        ways = [[one]]  # the main way has to read all entries
    return [*ways, *(way for way in (inner, fine) if way), *_strided(whole, searched)]


def _segments(trace: Trace, key: Space, inside: Sequence[Space], searched: set[Space]) -> list[list[Window]]:
    """Ways to read an axis in segments, such as the query, key and value of a fused kernel.

    A grid (`spaces`) numbers the entries of an axis that was split. A segment has consecutive entries of one grid, or
    entries of no grid, or is a searched space. A segment that is a grid, or has rotary planes in a part of it, can be
    read in several ways itself. If no segment can, the result is empty, because `_inner_windows` finds the same.

    Args:
      trace: the walk over the function's jaxpr.
      key: the axis, or the first of the atoms that it is a grid of.
      inside: the other atoms.
      searched: the spaces on which symmetries are looked for.
    """
    grids, inner = [trace.spaces.grids.get(x) for x in key], math.prod(map(len, inside))
    cuts = {
        k for k, (a, b) in enumerate(itertools.pairwise(grids), start=1)
        if (a is None) != (b is None) or (a and b and (a.sizes != b.sizes or b.place != a.place + 1))
    }
    cuts |= {k for window in _inner_windows(key, searched) for k in (window.start, window.stop)} - {0, len(key)}
    parts = [
        _grid_readings(trace, a * inner, b * inner, [*trace.atom_keys(np.array(key[a:b])), *inside], searched)
        for a, b in itertools.pairwise([0, *sorted(cuts), len(key)])
    ]
    if len(parts) == 1 or all(len(ways) == 1 and len(ways[0][0].atoms) == 1 for ways in parts):
        return []
    return [[window for part in parts if k < len(part) for window in part[k]] for k in range(max(map(len, parts)))]


def _strided(key: Space, searched: set[Space]) -> list[list[Window]]:
    """Ways to read every k-th entry of an axis, such as gates and channels that take turns in a fused kernel.

    >>> (way,) = _strided((5, 8, 6, 9), {(8, 9)})
    >>> [window.entries.tolist() for window in way]
    [[0, 2], [1, 3]]
    """
    found = []
    for step in (n for n in range(2, min(len(key) // 2, _MOST_PICKED) + 1) if len(key) % n == 0):
        turns = [key[k::step] for k in range(step)]
        if not searched.isdisjoint(turns):
            length = len(key) // step
            grids = [(Atom(turn, length), Atom(None, step, k)) for k, turn in enumerate(turns)]
            found.append([Window(0, len(key), grid) for grid in grids])
    return found


def _lifted(window: Window, length: int) -> tuple[Atom, ...]:
    """Rewrites a window of an axis of this length as a grid of the whole axis: its atoms, the first with a range.

    The result is empty if the window's start, or the length, is no multiple of the other atoms' sizes together.

    >>> _lifted(Window(6, 12, (Atom(None, 2), Atom(None, 3))), 18)
    (Atom(space=None, size=2, pick=None, span=(((2, 4),), 6)), Atom(space=None, size=3, pick=None, span=None))
    """
    first, *rest = window.atoms
    inner = math.prod(atom.full for atom in rest)
    if window.start % inner or length % inner:
        return ()
    start, full = window.start // inner, length // inner
    if first.pick is not None:
        return (first._replace(size=full, pick=start + first.pick), *rest)
    ranges = ((0, first.size),) if first.span is None else first.span[0]
    return (first._replace(span=(tuple((start + a, start + b) for a, b in ranges), full)), *rest)


def _inner_windows(whole: Space, searched: set[Space], shortest: bool = False) -> list[Window]:
    """The windows of an axis whose ids are a searched space; of windows that overlap, the longest, or the shortest."""
    taken = np.zeros(len(whole), bool)
    windows = []
    for space in sorted((s for s in searched if len(s) < len(whole)), key=len, reverse=not shortest):
        for start in range(len(whole) - len(space) + 1):
            stop = start + len(space)
            if whole[start] == space[0] and whole[start:stop] == space and not taken[start:stop].any():
                taken[start:stop] = True
                windows.append(Window(start, stop, (Atom(space, len(space)),)))
    return sorted(windows)


def _divided(key: Space, searched: set[Space]) -> list[Atom]:
    """Atoms for the searched spaces that consist of several ranges of an axis (`runs`)."""
    several = [(part(key, ranges), ranges) for ranges in runs(key) if len(ranges) > 1]
    return [Atom(inner, len(inner), None, (ranges, len(key))) for inner, ranges in several if inner in searched]


def _grid_readings(
    trace: Trace, start: int, stop: int, keys: Sequence[Space], searched: set[Space]
) -> list[list[Window]]:
    """Ways to read a window that is a grid of these spaces.

    The first has a window for every choice of indices along picked axes. The others read a part of one axis, or join a
    picked axis of length 2 with its neighbour into rotary planes.
    """
    picked = [not trace.spaces.picked.isdisjoint(key) and len(key) <= _MOST_PICKED for key in keys]
    atoms = [Atom(key, len(key)) for key in keys]

    def chosen(k: int, at_k: Sequence[Atom]) -> Iterator[list[Atom]]:
        """The grid with these atoms in place of atom k, once for every choice of one index along each picked axis."""
        choices = itertools.product(*(range(a.size) if p else (None,) for a, p in zip(atoms, picked, strict=True)))
        for choice in choices:
            grid = [a._replace(pick=q) for a, q in zip(atoms, choice, strict=True)]
            yield [*grid[:k], *([grid[k]] if picked[k] else at_k), *grid[k + 1 :]]

    main = list(chosen(0, atoms[:1]))
    others: list[list[list[Atom]]] = [[atoms]] if any(picked) else []
    for k, key in enumerate(keys):
        if picked[k]:
            continue
        # Segments of the first atom (k = 0) are not wanted here, because `_readings` reads them as windows of the axis.
        parts = _segments(trace, key, (), searched) if k else []
        inner = [[Atom(key[w.start : w.stop], w.stop - w.start, None, (((w.start, w.stop),), len(key)))]
                 for w in _inner_windows(key, searched)]
        ways = [*([inner] if inner else []), *([[atom]] for atom in _divided(key, searched))]
        for way in [[lifted for w in part if (lifted := _lifted(w, len(key)))] for part in parts] + ways:
            others.append([grid for at_k in way for grid in chosen(k, at_k)])
    for k, key in enumerate(keys):  # two indices that are picked one by one may be the two entries of a rotary plane
        if picked[k] and len(key) == 2:
            if k > 0 and not picked[k - 1]:
                space = tuple(x for x in keys[k - 1] for _ in range(2))
                others.append([[*atoms[: k - 1], Atom(space, len(space)), *atoms[k + 1 :]]])
            if k + 1 < len(atoms) and not picked[k + 1]:
                others.append([[*atoms[:k], Atom(keys[k + 1] * 2, 2 * len(keys[k + 1])), *atoms[k + 2 :]]])
    searched.update(atom.space for way in others for window in way for atom in window if atom.space is not None)
    return [[Window(start, stop, tuple(window)) for window in way] for way in [main, *others]]
