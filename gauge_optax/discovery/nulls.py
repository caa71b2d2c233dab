"""Null spaces of what gradients see, as symmetries with few terms.

Here: singular values, and a sparse basis of a null space. Not here: the columns (`search`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gauge_optax.discovery.motions import ZERO, Symmetry, Term
from gauge_optax.discovery.search import Candidate
from gauge_optax.discovery.sketch import Leaves
from gauge_optax.discovery.views import Piece


def solve(one: Candidate, squares: Leaves, dead: Mapping[str, np.ndarray], near: float) -> list[Symmetry]:
    """The symmetries of a candidate whose residual is below `near`, on pieces that the outputs notice at all.

    Args:
      one: the candidate, after all observations.
      squares: mean squared gradient per entry.
      dead: entries without any gradient.
      near: largest residual of interest.

    Returns:
      Symmetries; those that hold have a residual below `ZERO`.
    """
    lengths = np.broadcast_to(one.sizes, len(one.columns))
    awake = [not piece.read(dead[piece.path][None]).all() for piece, _ in one.columns]
    alive = [k for k, on in enumerate(awake) if on and lengths[k] > 0]
    columns = [one.columns[k] for k in alive]
    if not columns:
        return []
    seen = np.concatenate(one.seen)[:, alive]
    energy = np.array([piece.read(squares[piece.path][None]).mean() for piece, _ in columns])
    sizes = np.sqrt(energy * lengths[alive] * len(seen))
    seen = seen / sizes
    _, values, right = np.linalg.svd(seen, full_matrices=True)
    values = np.concatenate([values, np.zeros(len(columns) - len(values))])
    asleep = [column for column, on in zip(one.columns, awake, strict=True) if not on and column[1] != "offset"]
    found = []
    for bound, coarse in ((ZERO, 1e-6), (near, 10 * near)):
        null = right[values < bound] / sizes
        for row in map(_rounded if bound == near else np.asarray, sparse_basis(null, coarse)):
            residual = float(np.linalg.norm(seen @ (row * sizes)) / np.linalg.norm(row * sizes))
            if bound == ZERO or residual >= ZERO:
                terms = _terms(columns, row)
                along = _siblings(terms, asleep)
                found.append(Symmetry(one.family, one.space, one.beside, terms, residual, along))
    return [symmetry for symmetry in found if not _both_ways(symmetry)]


def _terms(columns: Sequence[tuple[Piece, str]], row: np.ndarray) -> tuple[Term, ...]:
    return tuple(Term(*columns[k], float(row[k])) for k in np.nonzero(row)[0].tolist())


def _siblings(terms: Sequence[Term], asleep: Sequence[tuple[Piece, str]]) -> tuple[Term, ...]:
    """Dead pieces as they move with one of the same parent and place: a key bias, which softmax hides."""
    moved = {(_parent(t.piece), t.mode): t for t in terms}
    taken = {(t.piece.path, _parent(t.piece)) for t in terms}
    found = [(piece, mode, moved.get((_parent(piece), mode))) for piece, mode in asleep]
    out: dict[Piece, Term] = {}
    for piece, mode, like in found:
        if like is not None and (piece.path, _parent(piece)) not in taken:
            out.setdefault(piece, Term(piece, mode, like.exponent))
    return tuple(out.values())


def _parent(piece: Piece) -> tuple[Any, ...]:
    """The node that holds a leaf, and which part of its axes the group acts on."""
    axes = [piece.view.places[k][0] for k in (() if piece.at is None else (piece.at, *piece.beside))]
    windows = [piece.view.windows[k] for k in axes]
    parts = [(w.start, w.stop, *((atom.size, atom.pick, atom.span) for atom in w.atoms)) for w in windows]
    return piece.path.rpartition("/")[0] or piece.path, *parts


def _both_ways(symmetry: Symmetry) -> bool:
    """Whether a piece moves as vector and covector: then only a skew or a symmetric part holds, of another family."""
    pieces = [term.piece for term in symmetry.terms if term.mode in ("vector", "covector")]
    return len(set(pieces)) < len(pieces)


def sparse_basis(null: np.ndarray, zero: float) -> np.ndarray:
    """A basis of the row space with few entries: reduced echelon form by largest pivots, then pairs thinned.

    Args:
      null: rows that span it.
      zero: entries below, of a row's largest, are rounding.

    Returns:
      Rows whose smallest entry is ±1 and whose first is positive.
    """
    rows = null.copy()
    for i in range(len(rows)):
        k, j = np.unravel_index(np.abs(rows[i:]).argmax(), rows[i:].shape)
        rows[[i, i + k]] = rows[[i + k, i]]
        rows[i] /= rows[i, j]
        others = np.arange(len(rows)) != i
        rows[others] -= np.outer(rows[others, j], rows[i])
    rows[np.abs(rows) < zero] = 0.0
    thinner = True
    while thinner:
        thinner = any(_thin(rows, i, j, zero) for i, j in itertools.permutations(range(len(rows)), 2))
    for row in rows:
        row /= np.abs(row[row != 0]).min()
        row *= np.sign(row[np.nonzero(row)[0][0]])
    return rows


def _rounded(row: np.ndarray) -> np.ndarray:
    """Exponents of what nearly holds, as the halves and thirds they are nearly."""
    near = np.round(row * 6) / 6
    return np.where(np.abs(near - row) < 0.05 * np.abs(row), near, row)


def _thin(rows: np.ndarray, i: int, j: int, zero: float) -> bool:
    """Takes a multiple of row j off row i where that leaves fewer entries."""
    for k in np.nonzero(rows[i] * rows[j])[0]:
        less = rows[i] - rows[i, k] / rows[j, k] * rows[j]
        less[np.abs(less) < zero] = 0.0
        if np.count_nonzero(less) < np.count_nonzero(rows[i]):
            rows[i] = less
            return True
    return False
