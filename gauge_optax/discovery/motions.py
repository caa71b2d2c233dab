"""What groups do to pieces of leaves, and which groups contain which.

A symmetry's tangent at a point is linear in the element; its transpose tells, by least squares, whether a group's
motions are those of others.

Here: families of groups as arrays, numpy float64. Not here: which of them a function does not notice (`search`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gauge_optax.discovery.sketch import Leaves
from gauge_optax.discovery.views import Piece, Space

ZERO = 1e-9  # of a column: less is rounding
_STEPS = 500  # of conjugate gradients, at most
WHOLE: Space = (0,)  # of one scale for whole leaves
FAMILIES = ("linear", "orthogonal", "complex", "phase", "diagonal", "per_plane")  # larger groups first
MODES = {
    "linear": ("vector", "covector"),
    "orthogonal": ("vector",),
    "complex": ("vector", "covector"),
    "phase": ("vector",),
    "diagonal": ("scale", "offset"),
    "per_plane": ("scale", "offset"),
}


class Term(NamedTuple):
    """A piece that moves, how, and with which exponent."""

    piece: Piece
    mode: str
    exponent: float


@dataclasses.dataclass(frozen=True)
class Symmetry:
    """A null vector: a group with the pieces it moves.

    Attributes:
      family: kind of group.
      space: what it acts on.
      beside: the companions that index its copies.
      terms: the pieces that move.
      residual: what the gradients see of it, of a column.
      along: dead pieces that are best moved along; nothing depends on them.
    """

    family: str
    space: Space
    beside: tuple[Space, ...]
    terms: tuple[Term, ...]
    residual: float
    along: tuple[Term, ...] = ()

    @property
    def paths(self) -> frozenset[str]:
        """Leaves it moves."""
        return frozenset(term.piece.path for term in self.terms)

    @property
    def _largest(self) -> float:
        return max(abs(term.exponent) for term in self.terms)

    @property
    def dim(self) -> int:
        """Dimensions of the group."""
        n, planes = len(self.space), len(set(self.space))
        own = {"linear": n * n, "orthogonal": n * (n - 1) // 2, "complex": 2 * planes, "phase": planes, "diagonal": n}
        return math.prod(map(len, self.beside)) * own.get(self.family, planes)

    def tangent(self, point: Leaves, element: np.ndarray) -> Leaves:
        """The motion that an element of the algebra makes at a point, the largest exponent taken for one."""
        out = {path: np.zeros(point[path].size) for path in self.paths}
        for term in self.terms:
            view = point[term.piece.path].reshape(-1)[term.piece.entries]
            motion = term.exponent / self._largest * direction(term.mode, view, element)
            out[term.piece.path][term.piece.entries] += motion
        return out

    def adjoint(self, point: Leaves, tangent: Mapping[str, np.ndarray]) -> np.ndarray:
        """The transpose of `tangent`, on elements."""
        total: np.ndarray | float = 0.0
        for term in self.terms:
            view = point[term.piece.path].reshape(-1)[term.piece.entries]
            own = _transposed(term.mode, view, tangent[term.piece.path][term.piece.entries])
            total = total + term.exponent / self._largest * own
        return _projected(self.family, self.space, np.asarray(total))


# Groups -------------------------------------------------------------------------------------------


def draw(rng: np.random.Generator, family: str, many: int, space: Space) -> np.ndarray:
    """A random element of a family's algebra, one per companion: (many, n) or (many, n, n)."""
    n = len(space)
    shape = (many, n) if family in ("diagonal", "per_plane") else (many, n, n)
    return _projected(family, space, rng.standard_normal(shape))


def _projected(family: str, space: Space, element: np.ndarray) -> np.ndarray:
    """An array on the family's algebra, orthogonally."""
    if family in ("diagonal", "linear"):
        return element
    if family == "orthogonal":
        return (element - element.swapaxes(-1, -2)) / 2
    same = np.equal.outer(space, space).astype(float)
    if family == "per_plane":
        return element @ (same / same.sum(1, keepdims=True))
    planes = [(i, j) for i, j in itertools.combinations(range(len(space)), 2) if space[i] == space[j]]
    out = np.zeros_like(element)
    for i, j in planes:
        turn = (element[..., i, j] - element[..., j, i]) / 2
        out[..., i, j], out[..., j, i] = turn, -turn
        if family == "complex":
            out[..., i, i] = out[..., j, j] = (element[..., i, i] + element[..., j, j]) / 2
    return out


def direction(mode: str, view: np.ndarray, element: np.ndarray) -> np.ndarray:
    """What an element's generator does to a piece: (companions, space, rest)."""
    if mode == "vector":
        return np.einsum("ckf,ckl->clf", view, element)
    if mode == "covector":
        return -np.einsum("ckf,clk->clf", view, element)
    wide = element[:, :, None]
    return view * wide if mode == "scale" else np.broadcast_to(wide, view.shape)


def _transposed(mode: str, view: np.ndarray, seen: np.ndarray) -> np.ndarray:
    if mode == "vector":
        return np.einsum("ckf,clf->ckl", view, seen)
    if mode == "covector":
        return -np.einsum("ckf,clf->clk", view, seen)
    return (view * seen if mode == "scale" else seen).sum(-1)


# Which contains which ----------------------------------------------------------------------------


def independent(
    found: Sequence[Symmetry], point: Leaves, rng: np.random.Generator, known: Sequence[Symmetry] = ()
) -> list[Symmetry]:
    """Symmetries that larger ones before them, or known ones, do not contain."""
    kept = list(known)
    order = sorted(found, key=lambda s: (-s.dim, FAMILIES.index(s.family), -len(s.beside), len(s.terms)))
    for symmetry in order:
        if not _contained(symmetry, _connected(symmetry, kept), point, rng):
            kept.append(symmetry)
    return kept[len(known) :]


def _connected(symmetry: Symmetry, kept: Sequence[Symmetry]) -> list[Symmetry]:
    """Those that share a leaf with it, or with one that does."""
    paths, found = set(symmetry.paths), list[Symmetry]()
    while True:
        more = [other for other in kept if other not in found and other.paths & paths]
        if not more:
            return found
        found += more
        paths.update(*(other.paths for other in more))


def _contained(one: Symmetry, others: Sequence[Symmetry], point: Leaves, rng: np.random.Generator) -> bool:
    """Whether a random motion of a group is a motion of the others: least squares by conjugate gradients."""
    if not others:
        return False
    many = math.prod(len(c) for c in one.beside)
    target = one.tangent(point, draw(rng, one.family, many, one.space))
    size = math.sqrt(sum(np.square(x).sum() for x in target.values()))
    if size == 0:
        return True
    paths = frozenset().union(*(other.paths for other in others), target)
    left = {p: target.get(p, np.zeros(point[p].size)) / size for p in paths}

    def gather(tangent: Leaves) -> list[np.ndarray]:
        return [other.adjoint(point, tangent) for other in others]

    slope = gather(left)
    step, length = slope, _squared(slope)
    first, rest = length, 1.0
    for _ in range(_STEPS):
        moved = {p: np.zeros(point[p].size) for p in paths}
        for other, own in zip(others, step, strict=True):
            for p, x in other.tangent(point, own).items():
                moved[p] += x
        energy = sum(np.square(x).sum() for x in moved.values())
        if energy == 0:
            break
        left = {p: x - length / energy * moved[p] for p, x in left.items()}
        slope = gather(left)
        before, length = length, _squared(slope)
        rest, last = sum(np.square(x).sum() for x in left.values()), rest
        if rest < ZERO**2:
            return True
        if length < (ZERO * 1e-4) ** 2 * first or rest >= last:  # the distance is what it is
            break
        step = [s + length / before * d for s, d in zip(slope, step, strict=True)]
    return False


def _squared(arrays: Sequence[np.ndarray]) -> float:
    return float(sum(np.square(x).sum() for x in arrays))
