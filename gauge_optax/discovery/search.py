"""Where groups could act, and what gradients see of it: columns for null spaces.

For every space, set of companions and family of groups, one random element is drawn per point; a column is what the
gradients see of its generator on one leaf (as a vector X·A, as a covector −X·Aᵀ, as an offset). Null vectors are the
exponents with which the leaves move together (`nulls`).

Here: candidates and their columns. Not here: where entries are one space (`trace`), what groups do (`motions`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from gauge_optax.discovery.motions import FAMILIES, MODES, WHOLE, ZERO, direction, draw
from gauge_optax.discovery.sketch import Leaves
from gauge_optax.discovery.spaces import Spaces
from gauge_optax.discovery.trace import Contracted, Walked
from gauge_optax.discovery.views import Piece, Space, View, runs, views_of

_MATRIX = 128  # the largest basis that a linear group is tried on


@dataclasses.dataclass
class Candidate:
    """Pieces that share a space and companions, with what the gradients see of a family's generators on them.

    Attributes:
      family: kind of group.
      space: what it acts on.
      beside: companions.
      columns: piece and mode of every column.
      seen: rows of values, chunk after chunk.
      sizes: squared length of every column's direction, summed over points.
    """

    family: str
    space: Space
    beside: tuple[Space, ...]
    columns: list[tuple[Piece, str]]
    seen: list[np.ndarray] = dataclasses.field(default_factory=list)
    sizes: np.ndarray | float = 0.0


def spaces_with_companions(walked: Walked) -> dict[Space, set[Space]]:
    """Spaces that are contracted, gathered or returned, and what runs beside each."""
    spaces: Spaces = walked.trace.spaces
    found: dict[Space, set[Space]] = {}

    def atoms(contracted: np.ndarray) -> list[Space]:
        return [spaces.key(atom) for atom in spaces.atoms(contracted) if len(atom) > 1]

    contracted: Contracted
    for contracted in walked.trace.contracted:
        own = atoms(contracted.axis)
        others = [atom for axis in contracted.beside for atom in atoms(axis)]
        for atom in own:
            found.setdefault(atom, set()).update(x for x in (*own, *others) if x != atom)
        for atom in others:
            found.setdefault(atom, set())
    for space, companions in list(found.items()):
        for start, stop in runs(space):
            found.setdefault(space[start:stop], set()).update(companions)
    return found


def candidates(walked: Walked, leaves: Leaves) -> list[Candidate]:
    """Everything that is tried."""
    spaces = spaces_with_companions(walked)
    known = set(spaces)
    views = [
        view
        for (path, leaf), axes in zip(leaves.items(), walked.axes, strict=True)
        for view in views_of(walked.trace.spaces, path, leaf.shape, axes, known)
    ]
    labels = {label for view in views for label in view.labels if label is not None}
    for space in labels - set(spaces):  # planes, whose halves alone are contracted
        if space in known or _paired(space):
            spaces[space] = set()
    for space in spaces:
        halves = tuple(dict.fromkeys(space))
        spaces[space] |= spaces.get(halves, set()) if halves != space else set()
    whole = [Piece(view, None, ()) for view in {view.path: view for view in reversed(views)}.values()]
    found = [Candidate("diagonal", WHOLE, (), [(piece, "scale") for piece in whole])]
    for space, companions in sorted(spaces.items(), key=lambda item: (-len(item[0]), item[0])):
        for beside in _subsets(space, companions, views):
            pieces = list(_pieces(space, beside, views))
            if pieces:
                found += [Candidate(f, space, beside, _columns(f, pieces)) for f in _families(space)]
    return found


def _subsets(space: Space, companions: set[Space], views: Sequence[View]) -> Iterator[tuple[Space, ...]]:
    """Sets of companions, large ones first; of more than three, only all, each and none."""
    present = sorted(c for c in companions if any(space in v.labels and c in v.labels for v in views))
    sizes: Iterable[int] = range(len(present), -1, -1) if len(present) <= 3 else (len(present), 1, 0)
    for size in sizes:
        yield from itertools.combinations(present, size)


def _pieces(space: Space, beside: tuple[Space, ...], views: Sequence[View]) -> Iterator[Piece]:
    taken: set[tuple[str, int]] = set()
    for view in views:
        labels = view.labels
        if not all(c in labels for c in beside):
            continue
        own = tuple(labels.index(c) for c in beside)
        for k, label in enumerate(labels):
            axis = view.places[k][0]
            if label != space or k in own or view.other not in (None, axis):
                continue
            if view.other is not None and (view.path, axis) in taken:
                continue
            yield Piece(view, k, own)
        if view.other is None:
            taken.update((view.path, view.places[k][0]) for k, label in enumerate(labels) if label == space)


def _paired(space: Space) -> bool:
    return {space.count(x) for x in space} == {2}


def _families(space: Space) -> Iterator[str]:
    paired = _paired(space)
    for family in FAMILIES:
        matrices = family in ("linear", "orthogonal")
        if (matrices and 2 <= len(space) <= _MATRIX) or family == "diagonal" or (not matrices and paired):
            yield family


def _columns(family: str, pieces: Sequence[Piece]) -> list[tuple[Piece, str]]:
    return [(piece, mode) for piece in pieces for mode in MODES[family] if mode != "offset" or piece.vector]


class Shifts:
    """Which leaves a constant along one space leaves alone: their gradients sum to zero along it."""

    def __init__(self, walked: Walked, leaves: Leaves) -> None:
        spaces = walked.trace.spaces
        self._read = {spaces.key(atom) for axis in walked.trace.read for atom in spaces.atoms(axis)}
        known = set(spaces_with_companions(walked))
        self._asked: list[tuple[View, int]] = []
        for (path, leaf), axes in zip(leaves.items(), walked.axes, strict=True):
            for view in views_of(spaces, path, leaf.shape, axes, set(known)):
                own = [k for k, label in enumerate(view.labels) if label in known]
                self._asked += [(view, k) for k in own if view.labels.count(view.labels[k]) == 1]
        self._sums = np.zeros((len(self._asked), 2))

    def observe(self, rows: Leaves) -> None:
        """Adds some gradients."""
        for k, (view, at) in enumerate(self._asked):
            gradient = view.read(rows[view.path])
            along = gradient.sum(1 + at)
            self._sums[k] += np.square(along).sum(), np.square(gradient).sum()

    def found(self, read: bool = False) -> list[tuple[list[tuple[View, int]], float]]:
        """Views and atoms by space, with the largest residual of each.

        Args:
          read: of spaces that a kernel reads. What is constant there is hidden by a centred norm: it is no logit shift.
        """
        out: dict[Space, list[tuple[View, int]]] = {}
        worst: dict[Space, float] = {}
        for (view, at), (along, whole) in zip(self._asked, self._sums, strict=True):
            residual = math.sqrt(along / whole) if whole > 0 else 1.0
            space = view.labels[at]
            if residual < ZERO and space is not None and (space in self._read) == read:
                out.setdefault(space, []).append((view, at))
                worst[space] = max(worst.get(space, 0.0), residual)
        return [(views, worst[space]) for space, views in out.items()]


def observe(
    tried: Sequence[Candidate], shifts: Shifts, point: Leaves, gradients: Iterable[Leaves], seed: Sequence[int]
) -> Leaves:
    """Adds what the gradients at a point see of every candidate; returns the gradients' squares, summed over rows."""
    squares = {path: np.zeros(leaf.shape) for path, leaf in point.items()}
    elements = []
    for k, one in enumerate(tried):
        many = math.prod(len(c) for c in one.beside)
        elements.append(draw(np.random.default_rng([*seed, k]), one.family, many, one.space))
    for chunk, rows in enumerate(gradients):
        shifts.observe(rows)
        for path, gradient in rows.items():
            squares[path] += np.square(gradient).sum(0)
        for one, element in zip(tried, elements, strict=True):
            motions = (direction(mode, piece.read(point[piece.path][None])[0], element) for piece, mode in one.columns)
            seen = [_seen(piece, rows, motion) for (piece, _), motion in zip(one.columns, motions, strict=True)]
            one.seen.append(np.stack([own for own, _ in seen], 1))
            if chunk == 0:
                one.sizes = one.sizes + np.array([size for _, size in seen])
    return squares


def _seen(piece: Piece, rows: Leaves, motion: np.ndarray) -> tuple[np.ndarray, float]:
    """Products of gradients with a motion, and the motion's squared length."""
    gradient = piece.read(rows[piece.path])
    return gradient.reshape(len(gradient), -1) @ motion.reshape(-1), float(np.square(motion).sum())
