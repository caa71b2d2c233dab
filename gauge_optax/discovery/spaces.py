"""Finds which entries of different axes are one index, such as one hidden unit, by union-find over the leaves' axes.

An axis of a parameter, or of anything computed from parameters, is a vector of ids, one per entry. It is None if no
parameter varies along it. If an operation combines two entries, as a sum or a contraction does, it unites their ids,
which are equal from then on. A reshape that joins axes makes an axis of new ids. Each of these is a cell of a grid
(`_Grid`) that stores the ids of its components on the joined axes, so that a later split recovers them. Cells with
equal components are united. The *atoms* of an axis are the axes of the finest grid that is known of it.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Axis = np.ndarray | None
Space = tuple[int, ...]  # an axis as a hashable value: the representatives of its ids
MOST_IDS = 200_000  # joined axes with more entries get no ids: in practice they are batches, never a basis or channels


class _Grid(NamedTuple):
    """An id as a cell of a grid: the cell's ids along the grid's axes, the grid's sizes, its row-major number."""

    components: tuple[int, ...]
    sizes: tuple[int, ...]
    place: int


class Spaces:
    """All ids: which of them are equal, and which are cells of a grid of others.

    Attributes:
      changes: number of unions and splits so far. The walks over the jaxpr (`trace`) end when it no longer rises.
      picked: ids of axes from which the function takes single indices, such as the query of a fused kernel.
      grids: id → its grid, for each id that is a cell of one.

    >>> spaces = Spaces()
    >>> rows, columns = spaces.fresh(2), spaces.fresh(3)
    >>> one, other = spaces.join([(rows, 2), (columns, 3)]), spaces.fresh(6)
    >>> spaces.key(spaces.unify(one, other)) == spaces.key(other)
    True
    >>> [len(atom) for atom in spaces.atoms(other)]
    [2, 3]
    """

    def __init__(self) -> None:
        self.changes = 0
        self.picked: set[int] = set()
        self.grids: dict[int, _Grid] = {}
        self._parent = np.arange(1024)
        self._count = 0
        # The id of a cell, by its components, the grid's sizes, and the number of earlier cells of the grid with the
        # same components: in a grid that contains an axis of rotary planes, equal components occur twice.
        self._joined: dict[tuple[tuple[int, ...], tuple[int, ...], int], int] = {}
        self._nothing: dict[tuple[int, int], np.ndarray] = {}

    def fresh(self, count: int) -> np.ndarray:
        """`count` new ids."""
        start, self._count = self._count, self._count + count
        while self._count > len(self._parent):
            self._parent = np.concatenate([self._parent, np.arange(len(self._parent), 2 * len(self._parent))])
        return np.arange(start, self._count)

    def nothing(self, equation: int, axis: int, count: int) -> np.ndarray:
        """Ids for entries along an axis of an equation's result that no operand determines, such as zeros.

        Every walk over the equation gets the same ids.
        """
        if (equation, axis) not in self._nothing:
            self._nothing[equation, axis] = self.fresh(count)
        return self._nothing[equation, axis]

    def canon(self, ids: np.ndarray) -> np.ndarray:
        """The representative of each id."""
        while not np.array_equal(parents := self._parent[ids], ids):
            ids = parents
        return ids

    def key(self, axis: np.ndarray) -> Space:
        """An axis as a hashable value, its *space*: two axes have equal keys if their ids are equal, entry by entry."""
        return tuple(self.canon(axis).tolist())

    def unite(self, one: int, other: int) -> None:
        """Makes two ids equal. If both are cells of grids of equal sizes, it makes their components equal too."""
        one, other = sorted(self.canon(np.array([one, other])).tolist())
        if one == other:
            return
        self.changes += 1
        self._parent[other] = one
        kept, merged = self.grids.get(one), self.grids.pop(other, None)
        if merged is None:
            return
        if kept is not None and kept.sizes == merged.sizes:
            for a, b in zip(kept.components, merged.components, strict=True):
                self.unite(a, b)
        elif kept is None or len(merged.sizes) > len(kept.sizes):
            self.grids[one] = merged

    def unite_entries(self, one: np.ndarray, other: np.ndarray) -> None:
        """Unites two axes of equal length, entry by entry."""
        for k in np.nonzero(self.canon(one) != self.canon(other))[0].tolist():
            self.unite(int(one[k]), int(other[k]))

    def unify(self, *axes: Axis) -> Axis:
        """Unites the axes that an operation aligns, entry by entry, and returns one of them.

        If an axis is a grid, the others are split into grids with the same atoms, and the atoms are united too.
        """
        present = [axis for axis in axes if axis is not None]
        if not present:
            return None
        whole = present[0]
        for axis in present[1:]:
            if len(whole) != len(axis):
                whole = whole if len(whole) > 1 else axis
                continue
            atoms = self.atoms(whole), self.atoms(axis)
            cuts = _common_cuts(*([len(atom) for atom in side] for side in atoms))
            if max(map(len, atoms)) > 1 and cuts is not None:
                for a, b in zip(*(self._cut(side, cuts) for side in atoms), strict=True):
                    self.unite_entries(a, b)
            self.unite_entries(whole, axis)
        return whole

    def factors(self, axis: np.ndarray) -> list[np.ndarray] | None:
        """The axes that an axis is the grid of, or None if it is no grid."""
        grids = [grid for x in self.canon(axis).tolist() if (grid := self.grids.get(x)) is not None]
        if len(axis) == 1 or len(grids) < len(axis) or len({grid.sizes for grid in grids}) > 1:
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
        """The axes of the finest grid that is known of an axis; the axis itself if it is no grid."""
        parts = self.factors(axis)
        return [axis] if parts is None else [atom for part in parts for atom in self.atoms(part)]

    def split(self, axis: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
        """Splits an axis that is one atom into a grid of these sizes, and returns the grid's axes.

        If the axis cannot be marked as this grid, it stays one atom, and the axes that are returned are new.
        """
        if len(sizes) <= 1:
            return [axis]
        parts = self.factors(axis)
        if parts is not None and [len(part) for part in parts] == list(sizes):
            return parts
        parts, ids = [self.fresh(size) for size in sizes], self.canon(axis).tolist()
        # An id can be a cell of one grid only. The axis therefore stays one atom if an id occurs twice in it, as in
        # rotary planes, or is a cell of another grid.
        if len(set(ids)) == len(ids) and self.grids.keys().isdisjoint(ids):
            self.changes += 1
            for place, at in enumerate(np.ndindex(*sizes)):
                components = tuple(int(part[k]) for part, k in zip(parts, at, strict=True))
                self.grids[ids[place]] = _Grid(components, tuple(sizes), place)
        return parts

    def join(self, axes: Sequence[tuple[Axis, int]]) -> Axis:
        """The axis into which a reshape joins axes, each given with its length.

        The result is None if no axis has ids, or if the joined axis would have more than `MOST_IDS`.
        """
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
        ids, number = list[int](), collections.Counter[tuple[int, ...]]()
        for place, at in enumerate(np.ndindex(*sizes)):
            components = tuple(int(atom[k]) for atom, k in zip(atoms, at, strict=True))
            cell = components, sizes, number[components]
            number[components] += 1
            if cell not in self._joined:
                self._joined[cell] = int(self.fresh(1)[0])
                self.grids[self._joined[cell]] = _Grid(components, sizes, place)
            ids.append(self._joined[cell])
        return np.array(ids)

    def close(self) -> None:
        """Unites cells with equal components until nothing changes (congruence closure)."""
        before = -1
        while before != self.changes:
            before, cells = self.changes, dict[_Grid, int]()
            for x, grid in list(self.grids.items()):
                cell = grid._replace(components=self.key(np.array(grid.components)))
                self.unite(cells.setdefault(cell, x), x)
            self._joined, number = {}, collections.Counter[Any]()
            for (components, sizes, _), x in sorted(cells.items(), key=lambda item: item[0].place):
                self._joined[components, sizes, number[components, sizes]] = x
                number[components, sizes] += 1

    def reshape(self, axes: Sequence[Axis], shape: Sequence[int], new: Sequence[int]) -> list[Axis]:
        """Reshapes an array with the shape `shape` and the axes `axes` to the shape `new`; returns its new axes."""
        out: list[Axis] = [None] * len(new)
        for before, after in equal_runs(shape, new):
            source = [(axes[k], shape[k]) for k in before if shape[k] > 1]
            target = [k for k in after if new[k] > 1]
            if any(axis is not None for axis, _ in source):
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
        pieces = iter(self._cut(atoms, cuts))
        out = []
        for length in lengths:
            parts: list[tuple[Axis, int]] = []
            while math.prod(n for _, n in parts) < length:
                piece = next(pieces)
                parts.append((piece, len(piece)))
            out.append(self.join(parts))
        return out

    def _cut(self, atoms: Sequence[np.ndarray], cuts: Sequence[int]) -> list[np.ndarray]:
        """Splits the atoms of a grid further, until every number in `cuts` is the product of its last k sizes."""
        out, outer = list[np.ndarray](), math.prod(len(atom) for atom in atoms)
        for atom in atoms:
            inner = outer // len(atom)
            within = [cut for cut in cuts if inner <= cut <= outer]
            out += self.split(atom, [b // a for a, b in itertools.pairwise(within)][::-1])
            outer = inner
        return out


def equal_runs(shape: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Divides the axes of two shapes into the shortest runs such that paired runs have equal numbers of entries.

    >>> list(equal_runs((4, 6, 5), (2, 12, 5)))
    [(range(0, 2), range(0, 2)), (range(2, 3), range(2, 3))]
    """
    i = j = 0
    while i < len(shape) or j < len(new):
        a, b = min(i + 1, len(shape)), min(j + 1, len(new))
        while (before := math.prod(shape[i:a])) != (after := math.prod(new[j:b])):
            a, b = (a + 1, b) if before < after else (a, b + 1)
        yield range(i, a), range(j, b)
        i, j = a, b


def _common_cuts(one: Sequence[int], other: Sequence[int]) -> list[int] | None:
    """For each of two grids, given by the lengths of its axes, the products of its last k lengths, for every k.

    Returns the products of both in one ascending list, or None if a product does not divide the next one.
    """
    cuts = sorted({math.prod(sizes[k:]) for sizes in (one, other) for k in range(len(sizes) + 1)})
    return cuts if all(b % a == 0 for a, b in itertools.pairwise(cuts)) else None
