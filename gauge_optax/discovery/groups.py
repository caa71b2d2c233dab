"""How groups act on pieces of leaves, and which groups contain which. All arrays are NumPy's, in float64.

A *space* is an axis on which a group could act. A *piece* is a leaf, or a range of it, seen along one space. A piece
may have *companions*, which are axes such as that of heads: the group then has one element per index of them. Groups
come in families, such as all invertible matrices. An element here is the logarithm of a scale or matrix (a member of
the Lie algebra), or a number that is added. The *motion* of an element is the derivative of its move at a fixed point,
one array per leaf. It is linear in the element: `Symmetry.tangent` is this map, and `adjoint` its transpose. With the
two, `independent` finds by least squares whether the motions of one group are sums of motions of others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy.linalg

from gauge_optax.discovery.sketch import Leaves
from gauge_optax.discovery.spaces import Space
from gauge_optax.discovery.views import Piece

ZERO = 1e-13  # a residual below this is roundoff (`Symmetry.residual`); a norm's eps leaves 1e-12 to 1e-3
STILL = 1e-12  # relative change of the outputs under a finite move that is roundoff
_WITHIN = 1e-6  # a motion that is at most this far (relatively) from a sum of motions of other groups counts as one
_STEPS = 500  # of conjugate gradients, at most
_MOST_PARTS = 8  # a group with one scale per part of a leaf is tried scale by scale if it has at most so many
_PATIENCE = 30  # conjugate gradients end if the squared distance falls by less than 1 % in this number of steps
WHOLE: Space = (0,)  # stands for the space of a group that multiplies whole leaves, or parts of them, by one number
# Family of groups → the modes in which an element can act on a piece. A matrix multiplies a "vector", and its inverse a
# "covector"; a number multiplies ("scale") or is added ("offset"). Larger groups come first: a smaller group is not
# reported if a reported one contains it.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "linear": ("vector", "covector"),
    "orthogonal": ("vector",),
    "centred": ("vector",),  # rotations that keep the vector of ones
    "complex": ("vector", "covector"),
    "phase": ("vector",),
    "diagonal": ("scale", "offset"),
    "per_plane": ("scale", "offset"),
}


class Term(NamedTuple):
    """A piece of a leaf that moves, its mode (`FAMILIES`), and its exponent, by which the element is multiplied.

    >>> from gauge_optax.discovery.views import Atom, View, Window
    >>> up = View("up", (2, 3), (Window(0, 2, (Atom(None, 2),)), Window(0, 3, (Atom((5, 6, 7), 3),))))
    >>> Term(Piece(up, 1, ()), "scale", -1.0).piece.path
    'up'
    """

    piece: Piece
    mode: str
    exponent: float


@dataclasses.dataclass(frozen=True)
class Symmetry:
    """A group, and the pieces of leaves that it moves.

    It is a symmetry of the function if the gradients of all outputs are orthogonal to its motions: `residual` is then
    roundoff.

    Attributes:
      family: the key of its family in `FAMILIES`.
      space: the space (an axis) that it acts on.
      beside: the spaces of its companions, such as heads. The group has one element per combination of their indices.
      terms: the pieces of leaves that move.
      residual: the product of the gradients with its motion, relative to the sizes of both; roundoff for a symmetry.
      along: pieces that do not affect the outputs, but should move together with pieces of their module. An example is
        a key bias, which the softmax hides: it moves with the key kernel.

    >>> from gauge_optax.discovery.views import Atom, View, Window
    >>> up = View("up", (2, 3), (Window(0, 2, (Atom(None, 2),)), Window(0, 3, (Atom((5, 6, 7), 3),))))
    >>> scale = Symmetry("diagonal", (5, 6, 7), (), (Term(Piece(up, 1, ()), "scale", 1.0),), 0.0)
    >>> scale.tangent({"up": np.full((2, 3), 2.0)}, np.array([[1.0, 0.0, -1.0]]))["up"]
    array([ 2.,  0., -2.,  2.,  0., -2.])
    """

    family: str
    space: Space
    beside: tuple[Space, ...]
    terms: tuple[Term, ...]
    residual: float
    along: tuple[Term, ...] = ()

    @property
    def paths(self) -> frozenset[str]:
        """Leaves that it moves."""
        return frozenset(term.piece.path for term in self.terms)

    @functools.cached_property
    def ids(self) -> frozenset[int]:
        """The ids of its space and companions."""
        return frozenset(self.space).union(*self.beside)

    @property
    def dim(self) -> int:
        """The dimension of the family's algebra, times the number of combinations of the companions' indices."""
        n, planes = len(self.space), len(set(self.space))
        skew, centred = n * (n - 1) // 2, (n - 1) * (n - 2) // 2
        dims = {"linear": n * n, "orthogonal": skew, "centred": centred, "complex": 2 * planes, "diagonal": n}
        return math.prod(map(len, self.beside)) * dims.get(self.family, planes)

    def tangent(self, point: Leaves, element: np.ndarray) -> Leaves:
        """The tangent along an element of the algebra: path → flat array. Exponents are divided by the largest."""
        largest, out = max(abs(term.exponent) for term in self.terms), {p: np.zeros(point[p].size) for p in self.paths}
        for piece, mode, exponent in self.terms:
            values = point[piece.path].reshape(-1)[piece.entries]
            out[piece.path][piece.entries] += exponent / largest * direction(mode, values, element)
        return out

    def moved(self, point: Leaves, rng: np.random.Generator) -> Leaves:
        """The point moved by a random element."""
        largest, out = max(abs(term.exponent) for term in self.terms), dict(point)
        element = 0.5 * draw(rng, self.family, self.space, self.beside)
        exponents: dict[Piece, dict[str, float]] = {}
        for piece, mode, exponent in (*self.terms, *self.along):
            exponents.setdefault(piece, {})[mode] = exponent / largest
        for piece, modes in exponents.items():
            flat = out[piece.path].reshape(-1).copy()
            values, scale = flat[piece.entries], modes.get("scale", 0.0)
            if matrix := modes.get("vector", 0.0):
                values = scipy.linalg.expm(matrix * element).swapaxes(-1, -2) @ values
            elif matrix := modes.get("covector", 0.0):
                values = scipy.linalg.expm(-matrix * element) @ values
            elif scale:  # scale and offset together multiply the distance from a fixed point, `centre`
                centre = -modes.get("offset", 0.0) / scale
                values = centre + (values - centre) * np.exp(scale * element[:, :, None])
            else:
                values = values + modes["offset"] * element[:, :, None]
            flat[piece.entries] = values
            out[piece.path] = flat.reshape(point[piece.path].shape)
        return out

    def adjoint(self, point: Leaves, tangent: Mapping[str, np.ndarray]) -> np.ndarray:
        """The transpose of `tangent`, a linear map of elements: takes a motion (path → flat array) to an element."""
        largest, total = max(abs(term.exponent) for term in self.terms), np.zeros(())
        for piece, mode, exponent in self.terms:
            values, moved = point[piece.path].reshape(-1)[piece.entries], tangent[piece.path][piece.entries]
            if mode == "vector":
                element = values @ moved.swapaxes(-1, -2)
            elif mode == "covector":
                element = -moved @ values.swapaxes(-1, -2)
            else:
                element = (values * moved if mode == "scale" else moved).sum(-1)
            total = total + exponent / largest * element
        return _projected(self.family, self.space, total)


def draw(rng: np.random.Generator, family: str, space: Space, beside: Sequence[Space]) -> np.ndarray:
    """A random element of a family's algebra for each combination of indices of the spaces `beside`, such as heads.

    The shape is (combinations, n) for scales and (combinations, n, n) for matrices, where n is the length of `space`.

    >>> element = draw(np.random.default_rng(0), "orthogonal", (0, 1, 2), ())
    >>> np.allclose(element, -element.swapaxes(1, 2))
    True
    """
    n, many = len(space), math.prod(map(len, beside))
    shape = (many, n) if family in ("diagonal", "per_plane") else (many, n, n)
    return _projected(family, space, rng.standard_normal(shape))


def direction(mode: str, values: np.ndarray, element: np.ndarray) -> np.ndarray:
    """The tangent of a piece's `values` along an element of the algebra.

    Args:
      mode: how the element acts, as in `FAMILIES`.
      values: the entries of the piece, (companions, space, rest). The result has this shape too.
      element: an array like those of `draw`.

    >>> direction("scale", np.full((1, 2, 3), 2.0), np.array([[1.0, -1.0]]))[0]
    array([[ 2.,  2.,  2.],
           [-2., -2., -2.]])
    """
    if mode == "vector":
        return element.swapaxes(-1, -2) @ values
    if mode == "covector":
        return -element @ values
    wide = element[:, :, None]
    return values * wide if mode == "scale" else np.broadcast_to(wide, values.shape)


def _projected(family: str, space: Space, element: np.ndarray) -> np.ndarray:
    """The orthogonal projection of an array onto the family's algebra."""
    if family in ("diagonal", "linear"):
        return element
    if family == "centred":
        element = element - element.mean(-1, keepdims=True)
        element = element - element.mean(-2, keepdims=True)
    if family in ("orthogonal", "centred"):
        return (element - element.swapaxes(-1, -2)) / 2
    if family == "per_plane":
        same = np.equal.outer(space, space).astype(float)
        return element @ (same / same.sum(1, keepdims=True))
    out = np.zeros_like(element)
    for i, j in itertools.combinations(range(len(space)), 2):
        if space[i] == space[j]:  # two entries with one id span a rotary plane
            turn = (element[..., i, j] - element[..., j, i]) / 2
            out[..., i, j], out[..., j, i] = turn, -turn
            if family == "complex":
                out[..., i, i] = out[..., j, j] = (element[..., i, i] + element[..., j, j]) / 2
    return out


def independent(
    symmetries: Sequence[Symmetry], point: Leaves, rng: np.random.Generator, before: Sequence[Symmetry] = (),
    dead: Mapping[str, np.ndarray] | None = None,
) -> list[Symmetry]:
    """The symmetries that larger ones, or those in `before`, do not contain.

    Args:
      symmetries: the symmetries to choose from.
      point: the leaves at which tangents are compared.
      rng: draws elements.
      before: symmetries that were found before.
      dead: path → mask of the entries without effect on the outputs, whose motion is ignored.

    >>> from gauge_optax.discovery.views import Atom, View, Window
    >>> up = View("up", (2, 3), (Window(0, 2, (Atom(None, 2),)), Window(0, 3, (Atom((5, 6, 7), 3),))))
    >>> scale = Symmetry("diagonal", (5, 6, 7), (), (Term(Piece(up, 1, ()), "scale", 1.0),), 0.0)
    >>> matrix = Symmetry("linear", (5, 6, 7), (), (Term(Piece(up, 1, ()), "vector", 1.0),), 0.0)
    >>> point, rng = {"up": np.arange(1.0, 7.0).reshape(2, 3)}, np.random.default_rng(0)
    >>> [one.family for one in independent([scale, matrix], point, rng)]
    ['linear']
    """
    kept, families = list(before), list(FAMILIES)
    order = sorted(symmetries, key=lambda s: (-s.dim, families.index(s.family), -len(s.beside), len(s.terms)))

    def contained(symmetry: Symmetry, others: Sequence[Symmetry]) -> bool:
        # Only groups that act on its spaces can contain a group: those that share a leaf with it, and those that share
        # a leaf with one of these, and so on.
        paths, linked = set(symmetry.paths), list[Symmetry]()
        near = [other for other in others if WHOLE in (symmetry.space, other.space) or symmetry.ids & other.ids]
        while more := [other for other in near if other not in linked and other.paths & paths]:
            linked += more
            paths.update(*(other.paths for other in more))
        return _contained(symmetry, linked, point, rng, dead or {})

    for symmetry in order:
        if not contained(symmetry, kept):
            kept.append(symmetry)
    # A group may have one scale per part of a leaf, such as one for the keys and one for the values in it. If another
    # group has a scale per head of the keys, it contains the scale of all keys. Then the group is replaced by those of
    # its scales that no other group contains.
    for symmetry in [s for s in kept[len(before) :] if s.family == "diagonal" and 1 < s.dim <= _MOST_PARTS]:
        others = [other for other in kept if other is not symmetry]
        parts = [s for s in order if s.space == WHOLE and s not in kept and s.paths == symmetry.paths]
        single = [part for part in parts if not contained(part, others)]
        touching = [other for other in (*others, *single) if other.paths & symmetry.paths]
        if 0 < len(single) < symmetry.dim and _contained(symmetry, touching, point, rng, dead or {}):
            kept = [*others, *single]
    return kept[len(before) :]


def _contained(
    one: Symmetry, others: Sequence[Symmetry], point: Leaves, rng: np.random.Generator, dead: Mapping[str, np.ndarray]
) -> bool:
    """Whether a random motion of a group is a sum of motions of others, by least squares (conjugate gradients)."""
    if not others:
        return False

    def seen(tangent: Mapping[str, np.ndarray]) -> Leaves:
        return {path: np.where(dead[path].ravel(), 0.0, x) if path in dead else x for path, x in tangent.items()}

    target = seen(one.tangent(point, draw(rng, one.family, one.space, one.beside)))
    size = math.sqrt(_squared(target.values()))
    if size == 0:
        return True
    paths = frozenset().union(*(other.paths for other in others), target)
    rest = {p: target.get(p, np.zeros(point[p].size)) / size for p in paths}
    gradient = [other.adjoint(point, rest) for other in others]
    step, length, distance = gradient, _squared(gradient), 1.0
    first, level = length, distance
    for number in range(1, _STEPS):
        moved = {p: np.zeros(point[p].size) for p in paths}
        for other, element in zip(others, step, strict=True):
            for p, x in seen(other.tangent(point, element)).items():
                moved[p] += x
        energy = _squared(moved.values())
        if energy == 0:
            break
        rest = {p: x - length / energy * moved[p] for p, x in rest.items()}
        gradient = [other.adjoint(point, rest) for other in others]
        before, length = length, _squared(gradient)
        last, distance = distance, _squared(rest.values())
        if distance < _WITHIN**2:
            return True
        if length < (_WITHIN * 1e-6) ** 2 * first or distance >= last:  # converged at a positive distance
            break
        if number % _PATIENCE == 0:
            if distance > 0.99 * level:  # it falls so slowly that it will end at a positive distance
                break
            level = distance
        step = [g + length / before * d for g, d in zip(gradient, step, strict=True)]
    return False


def _squared(arrays: Iterable[np.ndarray]) -> float:
    return float(sum(np.square(x).sum() for x in arrays))
