"""Symmetries as calls of the library's gauges: kinds, roles and axes strings.

Here: from shapes alone. Not here: layers (`calls`), whether what is written holds (`prove`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from gauge_optax.discovery.calls import Axes, Call, template
from gauge_optax.discovery.motions import Symmetry, Term
from gauge_optax.discovery.views import Atom, Piece, View, Window

_CLOSE = 1e-5  # exponents that are one number
_COMPANIONS = ("head", "group", "part", "slot")


class Unwritable(Exception):
    """A symmetry for which the library has no gauge; its text says which kind."""


# One symmetry -------------------------------------------------------------------------------------


def written(
    symmetry: Symmetry, linear: bool, layers: Iterable[tuple[int, ...]] = (), positive: Iterable[str] = ()
) -> Call:
    """The gauge of a symmetry.

    Args:
      symmetry: what was found.
      linear: linear groups as such; else the rotations in them.
      layers: spaces that are scanned over, which get the name `layer`.
      positive: leaves without a zero or negative entry: of vectors they are listed first, as a gauge's anchor.

    Returns:
      The call, for concrete leaves.

    Raises:
      Unwritable: there is no such gauge.
    """
    names = _Names(symmetry, set(layers), frozenset(positive))
    if symmetry.family in ("diagonal", "per_plane"):
        return _scale_call(symmetry, names)
    return _matrix_call(symmetry, names, linear)


def _matrix_call(symmetry: Symmetry, names: _Names, linear: bool) -> Call:
    planes = symmetry.family in ("complex", "phase")
    options = {"pairing": _pairing(symmetry)} if planes else {}
    sides: dict[str, list[Term]] = {"vector": [], "covector": []}
    for term in whole_leaves(symmetry.terms + symmetry.along):
        if abs(abs(term.exponent) - 1) > _CLOSE or (term.exponent < 0 and symmetry.family in ("orthogonal", "phase")):
            raise Unwritable(f"a turn by {term.exponent:.3g} times the angle")
        if (term.exponent > 0) == (symmetry.terms[0].exponent > 0):
            sides[term.mode].append(term)
        else:
            raise Unwritable("a linear map with a sign of its own on one leaf")
    roles = [(_order(terms), names.role(terms, "basis")) for terms in sides.values()]
    (_, left), (_, right) = sorted(roles, key=lambda side: (side[0], list(side[1].values())))
    both = symmetry.family in ("linear", "complex")
    if both and linear:
        if not left or not right:
            raise Unwritable("a linear map with one side")
        kind = "rope_linear" if planes else "head_linear"
        return Call(kind, {"left": left, "right": right}, options, names.sizes)
    kind = "rope_torus" if planes else "head_rotation"
    return Call(kind, {"blocks": _merged(left, right)}, options, names.sizes)


def _scale_call(symmetry: Symmetry, names: _Names) -> Call:
    planes = symmetry.family == "per_plane"
    exponents: dict[Piece, dict[str, float]] = {}
    for term in symmetry.terms + symmetry.along:
        exponents.setdefault(term.piece, {})[term.mode] = term.exponent
    terms, plus = [], set()
    for piece, found in exponents.items():
        scale, offset = found.get("scale", 0.0), found.get("offset", 0.0)
        if not scale:
            raise Unwritable("a constant added")
        if offset and abs(offset / scale - 1) > _CLOSE:
            raise Unwritable(f"a scale about {-offset / scale:.3g}")
        terms.append(Term(piece, "offset" if offset else "scale", scale))
        plus.update([piece.path] if offset else [])
    values = sorted({round(term.exponent, 5) for term in terms})
    if len(values) > 2 or (len(values) == 2 and values[0] * values[1] > 0):
        raise Unwritable(f"a scale with exponents {', '.join(f'{v:g}' for v in values)}")
    merged = whole_leaves(terms)
    pairing = _pairing(symmetry) if planes else None

    def role(value: float) -> dict[str, Axes]:
        own = [term for term in merged if abs(term.exponent - value) < _CLOSE]
        return names.role(own, "channel", plus, pairing)

    if len(values) == 1:
        return Call("scale_invariant", {"blocks": role(values[0])}, {}, names.sizes)
    up, down, degree = _sides(merged, values)
    vectors = all(term.piece.vector for term in merged if abs(term.exponent - up) < _CLOSE)
    kernels = not all(term.piece.vector for term in merged if abs(term.exponent - down) < _CLOSE)
    if degree == 1 and vectors and kernels:
        return Call("norm_scale", {"scale": role(up), "into": role(down)}, {}, names.sizes)
    return Call("rescale", {"up": role(up), "down": role(down)}, {"degree": degree} if degree != 1 else {}, names.sizes)


def _sides(terms: Sequence[Term], values: Sequence[float]) -> tuple[float, float, float]:
    """Exponents of the two sides, up first, and the degree: up is what moves less, or is made before the other."""
    ratio = Fraction(-values[0] / values[1]).limit_denominator(12)
    degree = max(ratio, 1 / ratio)

    def order(value: float) -> tuple[Any, ...]:
        return abs(value), *_order([term for term in terms if abs(term.exponent - value) < _CLOSE])

    up, down = sorted(values, key=order)
    return up, down, int(degree) if degree.denominator == 1 else float(degree)


def _order(terms: Sequence[Term]) -> tuple[Any, ...]:
    """What writes to a space before what reads it: vectors alone, vectors with kernels, kernels by their last axis."""
    pieces = [term.piece for term in terms]
    kernels = [p for p in pieces if not p.vector]
    last = [p for p in kernels if p.at is not None and p.view.places[p.at][0] == len(p.view.shape) - 1]
    return len(kernels) == len(pieces), len(last) == 0, len(kernels), template(p.path for p in pieces)


def _pairing(symmetry: Symmetry) -> str:
    space = symmetry.space
    halves = tuple(dict.fromkeys(space))
    if space == halves * 2:
        return "half"
    if space == tuple(x for x in halves for _ in range(2)):
        return "interleaved"
    raise Unwritable("planes of an unusual layout")


def _merged(
    left: Mapping[str, Axes], right: Mapping[str, Axes]
) -> dict[str, Axes]:
    out = dict(left)
    for path, axes in right.items():
        out[path] = _joined(out.get(path), axes)
    return out


def _joined(old: Axes | None, new: Axes) -> Axes:
    if old is None:
        return new
    return (*((old,) if isinstance(old, str) else old), *((new,) if isinstance(new, str) else new))


# Axes strings -------------------------------------------------------------------------------------


class _Names:
    """Names of a symmetry's axes, and the sizes that its strings need.

    Companions that stand side by side in every leaf are one axis; so is the space with them, where a group acts on
    each entry alone.
    """

    def __init__(self, symmetry: Symmetry, layers: set[tuple[int, ...]], positive: frozenset[str]) -> None:
        self.sizes: dict[str, int] = {}
        self._positive = positive
        diagonal = symmetry.family == "diagonal"
        own = [_places(term.piece) for term in symmetry.terms]
        count = len(own[0])
        runs = [[k] for k in range(count)]
        again = True
        while again:
            again = False
            for a, b in itertools.permutations(runs, 2):
                free = diagonal or (0 not in a and 0 not in b)
                if free and all(_adjacent(places[a[-1]], places[b[0]]) for places in own):
                    runs = [run for run in runs if run not in (a, b)] + [a + b]
                    again = True
                    break
        spare, self._names = iter(_COMPANIONS), dict[int, str]()
        for run in sorted(runs):
            layer = run != [0] and len(run) == 1 and symmetry.beside[run[0] - 1] in layers
            name = "" if 0 in run else "layer" if layer else next(spare, f"axis{run[0]}")
            for k in run:
                self._names[k] = name if k == run[0] else "+"

    def role(
        self, terms: Sequence[Term], target: str, plus: Collection[str] = (), pairing: str | None = None
    ) -> dict[str, Axes]:
        """Paths and axes of some terms: kernels first, then norms' scales."""

        def order(term: Term) -> tuple[bool, bool, str]:
            path = term.piece.path
            return term.piece.vector, path not in plus and path not in self._positive, path

        out: dict[str, Axes] = {}
        for term in sorted(terms, key=order):
            path = term.piece.path
            text = self._axes(term.piece, target, pairing)
            out[path] = _joined(out.get(path), f"1+ {text}" if path in plus else text)
        return out

    def _axes(self, piece: Piece, target: str, pairing: str | None) -> str:
        names = {place: self._names[k] or target for k, place in enumerate(_places(piece))}
        items = [
            self._item(n, window, [names.get((k, j), "_") for j in range(len(window.atoms))],
                       pairing if any(names.get((k, j)) == target for j in range(len(window.atoms))) else None, target)
            for k, (n, window) in enumerate(zip(piece.view.shape, piece.view.windows, strict=True))
        ]  # fmt: skip
        return " ".join(items)

    def _item(self, length: int, window: Window, names: Sequence[str], pairing: str | None, target: str) -> str:
        parts: list[tuple[str, int]] = []
        for atom, name in zip(window.atoms, names, strict=True):
            if atom.pick is not None:
                parts.append((f"part{atom.size}={atom.pick}", atom.size))
            elif atom.span is not None and pairing is None:
                inside = f"/{atom.full}" if len(window.atoms) > 1 else ""
                parts.append((f"{name}={atom.span[0]}:{atom.span[0] + atom.size}{inside}", atom.size))
            elif name == "+" or (name == "_" and parts and parts[-1][0] == "_"):
                parts[-1] = (parts[-1][0], parts[-1][1] * atom.size)
            elif pairing is not None and name == target:
                pair = [("_", 2), (target, atom.size // 2)]
                parts += pair if pairing == "half" else pair[::-1]
            else:
                parts.append((name, atom.size))
        size = window.stop - window.start
        span = "" if size == length else f"={window.start}:{window.stop}"
        if span and length % size == 0 and window.start % size == 0:  # equal parts have a number
            span, parts = "", [(f"part{length // size}={window.start // size}", length // size), *parts]
        if len(parts) == 1:
            return parts[0][0] + span
        told = any(name == "_" or ":" in name for name, _ in parts)
        for k, (name, own) in enumerate(parts):  # one length follows by division
            self._size(name.split("=")[0], own, name != "_" and ":" not in name and (told or k < len(parts) - 1))
        return f"({' '.join(name for name, _ in parts)}){span}"

    def _size(self, name: str, size: int, needed: bool) -> None:
        if needed and self.sizes.setdefault(name, size) != size:
            raise Unwritable(f"an axis '{name}' of two lengths")


def _places(piece: Piece) -> list[tuple[int, int]]:
    """Axis and atom of the space and of each companion."""
    places = piece.view.places
    return [places[k] for k in (*(() if piece.at is None else (piece.at,)), *piece.beside)]


def _adjacent(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return other == (one[0], one[1] + 1)


def whole_leaves(terms: Sequence[Term]) -> list[Term]:
    """Terms that move all parts of an axis alike, as one term on the whole axis."""
    found = list(terms)
    for axis in range(max(len(term.piece.view.shape) for term in terms)):
        groups: dict[Any, list[Term]] = {}
        for term in found:
            groups.setdefault(_but_for(term, axis), []).append(term)
        found = [term for group in groups.values() for term in _tiled(group, axis)]
    return found


def _but_for(term: Term, axis: int) -> Any:
    """What tells a term from others that read one axis elsewhere; the term itself where the group acts there."""
    piece = term.piece
    if axis >= len(piece.view.shape) or any(at == axis for at, _ in _places(piece)):
        return term
    others = tuple(w for k, w in enumerate(piece.view.windows) if k != axis)
    return piece.path, others, tuple(_places(piece)), term.mode, round(term.exponent, 5)


def _tiled(group: list[Term], axis: int) -> list[Term]:
    """One term on the whole axis where the group's windows and picks fill it; else the group."""
    piece, length = group[0].piece, group[0].piece.view.shape[axis] if axis < len(group[0].piece.view.shape) else 0
    if len(group) == 1:
        return group
    count = np.zeros(length, int)
    for term in group:
        window = term.piece.view.windows[axis]
        places = np.arange(window.start, window.stop).reshape([atom.full for atom in window.atoms])
        np.add.at(count, places[tuple(atom.reads for atom in window.atoms)].ravel(), 1)
    if not (count == 1).all():
        return group
    whole = Window(0, length, (Atom(None, length),))
    windows = tuple(whole if k == axis else w for k, w in enumerate(piece.view.windows))
    view, own = View(piece.path, piece.view.shape, windows), _places(piece)
    at = [view.places.index(place) for place in own]
    if piece.at is None:
        return [Term(Piece(view, None, tuple(at)), group[0].mode, group[0].exponent)]
    return [Term(Piece(view, at[0], tuple(at[1:])), group[0].mode, group[0].exponent)]


def shift_call(views: Sequence[tuple[View, int]]) -> Call:
    """A constant along one space of several leaves: their views, and the atom of each that it is constant along."""
    terms = tuple(Term(Piece(view, at, ()), "offset", 1.0) for view, at in views)
    names = _Names(Symmetry("shift", (), (), terms, 0.0), set(), frozenset())
    return Call("logit_shift", {"blocks": names.role(whole_leaves(terms), "vocab")}, {}, names.sizes)
