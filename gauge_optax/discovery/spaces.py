"""Which entries of which axes are one index: a union-find over the entries of every axis of every leaf.

An axis of a parameter, or of anything computed from parameters, is a vector of ids, one per entry; None where no
parameter lies along it. Ids that an operation takes together are united. An axis that a reshape made out of others
keeps its components (a `Grid` per id), so that a later split finds them again; ids with equal components are equal
(`close`).

Here: ids and what is known of them. Not here: which operation unites what (`trace`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

Axis = np.ndarray | None
MOST_IDS = 200_000  # of an axis that a reshape joins: longer ones are data in all but name


class Grid(NamedTuple):
    """An id as one place of a grid: its components' ids, the grid's sizes, its row-major place."""

    components: tuple[int, ...]
    sizes: tuple[int, ...]
    place: int


class Spaces:
    """Ids, which of them are one, and which are grids of others.

    Attributes:
      changes: how many unions and splits there were, to tell a fix-point.
      picked: ids of axes out of which single indices are taken.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.picked: set[int] = set()
        self._parent = np.arange(1024)
        self._count = 0
        self._grids: dict[int, Grid] = {}
        self._joined: dict[tuple[int, ...], int] = {}

    def fresh(self, count: int) -> np.ndarray:
        """New ids."""
        start, self._count = self._count, self._count + count
        while self._count > len(self._parent):
            self._parent = np.concatenate([self._parent, np.arange(len(self._parent), 2 * len(self._parent))])
        return np.arange(start, self._count)

    def canon(self, ids: np.ndarray) -> np.ndarray:
        """The representative of each id."""
        found = self._parent[ids]
        while True:
            further = self._parent[found]
            if np.array_equal(further, found):
                return found
            found = further

    def key(self, axis: np.ndarray) -> tuple[int, ...]:
        """An axis as a hashable value: equal for axes that are one space."""
        return tuple(self.canon(axis).tolist())

    def grid(self, id_: int) -> Grid | None:
        """The grid that an id is a place of."""
        return self._grids.get(id_)

    def unite(self, one: int, other: int) -> None:
        """Makes two ids one; their components too, where both are places of equal grids."""
        one, other = sorted(self.canon(np.array([one, other])).tolist())
        if one == other:
            return
        self.changes += 1
        self._parent[other] = one
        mine, theirs = self._grids.get(one), self._grids.pop(other, None)
        if theirs is None:
            return
        if mine is not None and mine.sizes == theirs.sizes:
            for a, b in zip(mine.components, theirs.components, strict=True):
                self.unite(a, b)
        elif mine is None or len(theirs.sizes) > len(mine.sizes):
            self._grids[one] = theirs

    def unite_entries(self, one: np.ndarray, other: np.ndarray) -> None:
        """Unites two axes of one length, entry by entry."""
        differ = np.nonzero(self.canon(one) != self.canon(other))[0]
        for k in differ.tolist():
            self.unite(int(one[k]), int(other[k]))

    def unify(self, one: Axis, other: Axis) -> Axis:
        """Two axes that an operation lays on each other: one axis from now on, with the finer of their components."""
        if one is None or other is None:
            return other if one is None else one
        if len(one) != len(other):
            return one if len(one) > 1 else other
        mine, theirs = self.atoms(one), self.atoms(other)
        if len(mine) > 1 or len(theirs) > 1:
            for a, b in zip(*self._aligned(mine, theirs), strict=True):
                self.unite_entries(a, b)
        self.unite_entries(one, other)
        return one

    def factors(self, axis: np.ndarray) -> list[np.ndarray] | None:
        """The components whose grid an axis is, None where it is none."""
        found = [self._grids.get(x) for x in self.canon(axis).tolist()]
        grids = [grid for grid in found if grid is not None]
        if len(axis) == 1 or len(grids) < len(found) or len({grid.sizes for grid in grids}) > 1:
            return None
        places = np.array([grid.place for grid in grids])
        if not (np.diff(places) == 1).all():
            return None
        components = self.canon(np.array([grid.components for grid in grids]))
        out = []
        for k, along in enumerate(np.unravel_index(places, grids[0].sizes)):
            levels = [np.unique(components[along == level, k]) for level in np.unique(along)]
            if any(len(level) > 1 for level in levels):
                return None
            if len(levels) > 1:
                out.append(np.concatenate(levels))
        return out if len(out) > 1 and math.prod(map(len, out)) == len(axis) else None

    def atoms(self, axis: np.ndarray) -> list[np.ndarray]:
        """An axis as the finest grid that is known of it."""
        found = self.factors(axis)
        return [axis] if found is None else [atom for part in found for atom in self.atoms(part)]

    def split(self, axis: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
        """An axis that is one atom as a grid of these sizes."""
        if len(sizes) == 1:
            return [axis]
        known = self.factors(axis)
        if known is not None and [len(part) for part in known] == list(sizes):
            return known
        parts, ids = [self.fresh(size) for size in sizes], self.canon(axis).tolist()
        if len(set(ids)) == len(ids) and not any(x in self._grids for x in ids):
            self.changes += 1
            for place, at in enumerate(np.ndindex(*sizes)):
                components = tuple(int(part[k]) for part, k in zip(parts, at, strict=True))
                self._grids[ids[place]] = Grid(components, tuple(sizes), place)
        return parts

    def join(self, axes: Sequence[tuple[Axis, int]]) -> Axis:
        """The grid of axes (with their lengths) as one axis."""
        if all(axis is None for axis, _ in axes):
            return None
        whole = [self.fresh(length) if axis is None else axis for axis, length in axes]
        whole = [axis for axis in whole if len(axis) > 1] or whole[:1]
        if len(whole) == 1:
            return whole[0]
        atoms = [self.canon(atom) for axis in whole for atom in self.atoms(axis)]
        sizes = tuple(map(len, atoms))
        if math.prod(sizes) > MOST_IDS:
            return None
        return np.array([self._place(atoms, sizes, place, at) for place, at in enumerate(np.ndindex(*sizes))])

    def _place(self, atoms: Sequence[np.ndarray], sizes: tuple[int, ...], place: int, at: tuple[int, ...]) -> int:
        components = tuple(int(atom[k]) for atom, k in zip(atoms, at, strict=True))
        found = self._joined.get(components)
        if found is None:
            found = self._joined[components] = int(self.fresh(1)[0])
            self._grids[found] = Grid(components, sizes, place)
        return found

    def close(self) -> None:
        """Unites places of equal components, until nothing changes."""
        before = -1
        while before != self.changes:
            before, seen = self.changes, dict[tuple[tuple[int, ...], tuple[int, ...], int], int]()
            for x, (components, sizes, place) in list(self._grids.items()):
                own = tuple(self.canon(np.array(components)).tolist())
                self.unite(seen.setdefault((own, sizes, place), x), x)
            self._joined = {own: x for (own, _, _), x in seen.items()}

    def reshape(self, axes: Sequence[Axis], shape: Sequence[int], new: Sequence[int]) -> list[Axis]:
        """The axes of a reshaped array."""
        out: list[Axis] = [None] * len(new)
        for old_axes, new_axes in _matching(shape, new):
            source = [(axes[k], shape[k]) for k in old_axes if shape[k] > 1]
            target = [k for k in new_axes if new[k] > 1]
            if all(axis is None for axis, _ in source):
                continue
            for k, axis in zip(target, self._recut(source, [new[k] for k in target]), strict=True):
                out[k] = axis
        return out

    def _recut(self, source: Sequence[tuple[Axis, int]], lengths: Sequence[int]) -> list[Axis]:
        if len(source) == len(lengths) == 1:
            return [source[0][0]]
        atoms = [a for axis, n in source for a in self.atoms(self.fresh(n) if axis is None else axis)]
        cuts = _common_cuts([len(atom) for atom in atoms], lengths)
        if cuts is None:
            return [None] * len(lengths)
        pieces = iter(self._fine(atoms, cuts))
        out = []
        for length in lengths:
            own: list[tuple[Axis, int]] = []
            while math.prod(n for _, n in own) < length:
                piece = next(pieces)
                own.append((piece, len(piece)))
            out.append(self.join(own))
        return out

    def _aligned(
        self, one: Sequence[np.ndarray], other: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Two lists of atoms cut alike; empty where they cannot be."""
        cuts = _common_cuts([len(a) for a in one], [len(a) for a in other])
        if cuts is None:
            return [], []
        mine, theirs = self._fine(one, cuts), self._fine(other, cuts)
        return (mine, theirs) if [len(a) for a in mine] == [len(a) for a in theirs] else ([], [])

    def _fine(self, atoms: Sequence[np.ndarray], cuts: Sequence[int]) -> list[np.ndarray]:
        out, outer = list[np.ndarray](), math.prod(len(atom) for atom in atoms)
        for atom in atoms:
            inner = outer // len(atom)
            within = [cut for cut in cuts if inner <= cut <= outer]
            sizes = [b // a for a, b in itertools.pairwise(within)][::-1]
            out += self.split(atom, sizes) if len(sizes) > 1 else [atom]
            outer = inner
        return out


def _matching(shape: Sequence[int], new: Sequence[int]) -> Iterable[tuple[range, range]]:
    """The shortest runs of axes of both shapes with equal numbers of entries."""
    i = j = 0
    while i < len(shape) or j < len(new):
        a, b = min(i + 1, len(shape)), min(j + 1, len(new))
        while math.prod(shape[i:a]) != math.prod(new[j:b]):
            if math.prod(shape[i:a]) < math.prod(new[j:b]):
                a += 1
            else:
                b += 1
        yield range(i, a), range(j, b)
        i, j = a, b


def _common_cuts(one: Sequence[int], other: Sequence[int]) -> list[int] | None:
    """Suffix products of both, ascending; None where one does not divide the next."""
    cuts = sorted({math.prod(sizes[k:]) for sizes in (one, other) for k in range(len(sizes) + 1)})
    return cuts if all(b % a == 0 for a, b in itertools.pairwise(cuts)) else None
