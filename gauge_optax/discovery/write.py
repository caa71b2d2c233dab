"""Writes symmetries as calls of the library's gauge constructors, with their mappings of paths to axes strings.

Words: a symmetry (`groups.Symmetry`) has *terms*. A term is a piece of a leaf, and the exponent with which the element
acts on it. A piece (`views`) has an axis along the *space* on which the group acts, and axes along *companions*, which
index copies of the group.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from gauge_optax.discovery.calls import Axes, Call, joined, template
from gauge_optax.discovery.groups import Symmetry, Term
from gauge_optax.discovery.spaces import Space
from gauge_optax.discovery.views import Atom, Piece, View, Window

_CLOSE = 1e-5  # exponents that differ by less count as equal
_TRADED = "a vector that some leaves gain and others lose, each times a number of its own"
_LOGARITHM = "factors of leaves that an addition to another leaf undoes, as to a scale that is stored as its logarithm"
_COMPANIONS = ("head", "group", "part", "slot")  # names of the axes that index a group's copies


def companion_names(beside: Iterable[Space], layers: set[Space]) -> dict[Space, str]:
    """Names axes along which a gauge has one element per index: space → name, `layer` for the spaces in `layers`.

    >>> companion_names([(0, 1), (2, 3), (4, 5)], {(2, 3)})
    {(0, 1): 'head', (2, 3): 'layer', (4, 5): 'group'}
    """
    stacks = (f"layer{k}" if k else "layer" for k in itertools.count())  # a scan of scans has two axes of layers
    spare = itertools.chain(_COMPANIONS, (f"axis{k}" for k in itertools.count()))
    return {space: next(stacks if space in layers else spare) for space in beside}


class Unwritable(Exception):
    """The library has no gauge for a symmetry. The message says which kind of symmetry it is."""


def written(
    symmetry: Symmetry, layers: set[Space], positive: Collection[str], contracted: Collection[str] = ()
) -> Call:
    """The gauge of a symmetry.

    Args:
      symmetry: the symmetry.
      layers: spaces that are scanned over, which get the name `layer`.
      positive: paths of leaves that are no bias or have only positive entries. Among vectors they are listed first,
        because the first block becomes the gauge's anchor.
      contracted: paths of leaves that the function contracts. Such a leaf is a kernel. With a single output it looks
        like a vector, but it is not taken for a norm's scale.

    Returns:
      The call, for concrete leaves.

    Raises:
      Unwritable: there is no such gauge.

    >>> up = View("up", (2, 3), (Window(0, 2, (Atom(None, 2),)), Window(0, 3, (Atom((5, 6, 7), 3),))))
    >>> down = View("down", (3, 2), up.windows[::-1])
    >>> terms = Term(Piece(up, 1, ()), "scale", 1.0), Term(Piece(down, 0, ()), "scale", -1.0)
    >>> written(Symmetry("diagonal", (5, 6, 7), (), terms, 0.0), set(), ()).gauge()
    go.rescale(
      up={'up': '_ channel'},
      down={'down': 'channel _'},
    )
    """
    names = _Names(symmetry, layers, positive)
    if symmetry.family in ("diagonal", "per_plane"):
        return _scale_call(symmetry, names, contracted)
    if symmetry.family == "centred":
        raise Unwritable("a rotation of heads that keeps the vector of ones")
    options = {"pairing": _pairing(symmetry)} if symmetry.family in ("complex", "phase") else {}
    sides: dict[str, list[Term]] = {"vector": [], "covector": []}
    for term in whole_leaves(symmetry.terms + symmetry.along):
        if abs(abs(term.exponent) - 1) > _CLOSE or (term.exponent < 0 and symmetry.family in ("orthogonal", "phase")):
            raise Unwritable(f"a rotation by {term.exponent:.3g} times the angle")
        if (term.exponent > 0) != (symmetry.terms[0].exponent > 0):
            raise Unwritable("a linear map that acts on one leaf with the opposite sign")
        sides[term.mode].append(term)
    roles = [(_order(terms), names.role(terms, "basis")) for terms in sides.values()]
    (_, left), (_, right) = sorted(roles, key=lambda side: (side[0], list(side[1].values())))
    if symmetry.family in ("linear", "complex"):
        if not left or not right:
            raise Unwritable("a linear map with one side")
        kind = "rope_linear" if options else "head_linear"
        return Call(kind, {"left": left, "right": right}, options, names.sizes)
    blocks = dict(left)
    for path, axes in right.items():
        blocks[path] = joined(blocks.get(path), axes)
    return Call("rope_torus" if options else "head_rotation", {"blocks": blocks}, options, names.sizes)


def _scale_call(symmetry: Symmetry, names: _Names, contracted: Collection[str]) -> Call:
    exponents: dict[Piece, dict[str, float]] = {}
    for term in symmetry.terms + symmetry.along:
        exponents.setdefault(term.piece, {})[term.mode] = term.exponent
    if len(exponents) == 2 and not any(modes.get("scale") for modes in exponents.values()):
        return _trade_call(symmetry.terms, names)
    terms, plus = [], set()  # `plus`: leaves that store a value less one; they move by a scale and an equal offset
    for piece, modes in exponents.items():
        scale, offset = modes.get("scale", 0.0), modes.get("offset", 0.0)
        if not scale:
            factors = any(modes.get("scale") for modes in exponents.values())
            raise Unwritable(_LOGARITHM if factors else _TRADED)
        if offset and abs(offset / scale - 1) > _CLOSE:
            raise Unwritable(f"a scale about {-offset / scale:.3g}")
        terms.append(Term(piece, "offset" if offset else "scale", scale))
        plus.update([piece.path] if offset else [])
    values = sorted({round(term.exponent, 5) for term in terms})
    if len(values) > 2 or (len(values) == 2 and values[0] * values[1] > 0):
        raise Unwritable(f"a scale with exponents {', '.join(f'{v:g}' for v in values)}")
    merged = whole_leaves(terms)
    sides = {value: [term for term in merged if abs(term.exponent - value) < _CLOSE] for value in values}
    pairing = _pairing(symmetry) if symmetry.family == "per_plane" else None

    def role(value: float) -> dict[str, Axes]:
        return names.role(sides[value], "channel", plus, pairing)

    if len(values) == 1:
        return Call("scale_invariant", {"blocks": role(values[0])}, {}, names.sizes)
    quotient = max(-values[0] / values[1], -values[1] / values[0])
    degree = Fraction(quotient).limit_denominator(12)
    if abs(degree - quotient) > 10 * _CLOSE * quotient:
        raise Unwritable(f"a scale with exponents {', '.join(f'{v:g}' for v in values)}")
    # "up" is the side with the smaller absolute exponent. If both are equal, it is the side that `_order` puts first.
    up, down = sorted(values, key=lambda value: (abs(value), *_order(sides[value], contracted)))
    vectors = [all(t.piece.vector and t.piece.path not in contracted for t in sides[value]) for value in (up, down)]
    # A norm's vectors are "up". A layer scale's vector is "down" if a kernel and its bias, in front of it, are "up".
    if degree == 1 and vectors in ([True, False], [False, True]):
        scale, into = (up, down) if vectors[0] else (down, up)
        return Call("norm_scale", {"scale": role(scale), "into": role(into)}, {}, names.sizes)
    options = {} if degree == 1 else {"degree": int(degree) if degree.denominator == 1 else float(degree)}
    return Call("rescale", {"up": role(up), "down": role(down)}, options, names.sizes)


def _trade_call(terms: Sequence[Term], names: _Names) -> Call:
    """The gauge of two biases that are added to each other: what one gains at an entry, the other loses."""
    gains, loses = terms
    if abs(gains.exponent + loses.exponent) > _CLOSE * abs(gains.exponent):
        raise Unwritable(_TRADED)
    roles = {"token": names.role([gains], "channel"), "position": names.role([loses], "channel")}
    return Call("embedding_shift", roles, {}, names.sizes)


def shift_call(places: Sequence[tuple[View, int]]) -> Call:
    """The `logit_shift` of leaves to which a constant along one space may be added.

    Args:
      places: views of the leaves, and the number of each view's atom along the space.

    >>> head = View("head", (2, 3), (Window(0, 2, (Atom(None, 2),)), Window(0, 3, (Atom((5, 6, 7), 3),))))
    >>> shift_call([(head, 1)]).roles
    {'blocks': {'head': '_ vocab'}}
    """
    blocks, sizes = _constants(places, "vocab")
    return Call("logit_shift", {"blocks": blocks}, {}, sizes)


def write_shift_calls(places: Sequence[tuple[View, int]]) -> list[Call]:
    """For an axis that only centred norms read: one gauge per leaf, which adds a constant that the norms subtract.

    >>> out = View("out", (2, 3), (Window(0, 2, (Atom(None, 2),)), Window(0, 3, (Atom((5, 6, 7), 3),))))
    >>> [(call.kind, call.roles) for call in write_shift_calls([(out, 1)])]
    [('norm_write_shift', {'write': {'out': '_ channel'}})]
    """
    calls = []
    for path in dict.fromkeys(view.path for view, _ in places):
        blocks, sizes = _constants([place for place in places if place[0].path == path], "channel")
        calls.append(Call("norm_write_shift", {"write": blocks}, {}, sizes))
    return calls


def _constants(places: Sequence[tuple[View, int]], name: str) -> tuple[dict[str, Axes], dict[str, int]]:
    """Path → axes string of each leaf that gains a constant along a space called `name`; and the lengths to state."""
    terms, taken = list[Term](), dict[str, np.ndarray]()
    for view, at in places:  # a leaf's views may overlap, but each entry gains the constant once
        term = Term(Piece(view, at, ()), "offset", 1.0)
        counts = taken.setdefault(view.path, np.zeros(math.prod(view.shape), bool))
        if not counts[term.piece.entries].any():
            terms.append(term)
            counts[term.piece.entries] = True
    names = _Names(Symmetry("shift", (), (), tuple(terms), 0.0), set(), ())
    return names.role(whole_leaves(terms), name), names.sizes


def _order(terms: Sequence[Term], contracted: Collection[str] = ()) -> tuple[Any, ...]:
    """A sort key that puts the side that writes to a space before the side that reads it.

    First comes the side with a vector; then the side with a kernel whose last axis is the space; then the side with
    fewer kernels.
    """
    pieces = [term.piece for term in terms]
    kernels = [p for p in pieces if not p.vector or p.path in contracted]
    last = [p for p in kernels if p.at is not None and p.view.places[p.at][0] == len(p.view.shape) - 1]
    return len(kernels) == len(pieces), len(last) == 0, len(kernels), sorted(template(p.path) for p in pieces)


def _pairing(symmetry: Symmetry) -> str:
    space = symmetry.space
    halves = tuple(dict.fromkeys(space))
    if space == halves * 2:
        return "half"
    if space == tuple(x for x in halves for _ in range(2)):
        return "interleaved"
    raise Unwritable("planes of an unusual layout")


# Axes strings -------------------------------------------------------------------------------------


class _Names:
    """The names of a symmetry's axes, and the lengths that its axes strings must state.

    Companions that are neighbours in every leaf get one name together. If the group is a scale per entry ("diagonal"),
    the space and its neighbours also get one name together.
    """

    def __init__(self, symmetry: Symmetry, layers: set[Space], positive: Collection[str]) -> None:
        self.sizes: dict[str, int] = {}
        self._positive = positive
        # For each term, the place (axis and number of the atom) of the space, then the places of the companions.
        places = [term.piece.places for term in symmetry.terms]
        # If the group moves a range of an axis, such as a half of each head, then no axes get a name together.
        whole = not any(term.piece.view.windows[axis].atoms[number].span
                        for term in symmetry.terms for axis, number in term.piece.places)
        runs = [[k] for k in range(len(places[0]))]

        def neighbours(a: list[int], b: list[int]) -> bool:
            free = whole and (symmetry.family == "diagonal" or (0 not in a and 0 not in b))
            ends = [(row[a[-1]], row[b[0]]) for row in places]
            return free and all(second == (axis, number + 1) for (axis, number), second in ends)

        while pair := next((p for p in itertools.permutations(runs, 2) if neighbours(*p)), None):
            runs = [run for run in runs if run not in pair] + [pair[0] + pair[1]]
        spare, self._names = iter(_COMPANIONS), dict[int, str]()
        stacks = (f"layer{k}" if k else "layer" for k in itertools.count())  # a scan of scans has two axes of layers
        for run in sorted(runs):
            layer = run != [0] and len(run) == 1 and symmetry.beside[run[0] - 1] in layers
            name = "" if 0 in run else next(stacks) if layer else next(spare, f"axis{run[0]}")
            for k in run:
                self._names[k] = name if k == run[0] else "+"

    def role(
        self, terms: Iterable[Term], target: str, plus: Collection[str] = (), pairing: str | None = None
    ) -> dict[str, Axes]:
        """Path → axes string of some terms, with the name `target` for the space.

        Leaves that store a value less one (`plus`) come first, then kernels, then vectors. `pairing` is the layout of
        rotary planes along the space; None if there are none.
        """

        def order(term: Term) -> tuple[bool, bool, bool, str]:
            path = term.piece.path
            # The first leaf is the anchor, which should not be zero. A scale that is stored less one starts at one,
            # while a kernel that computes a part of this scale from data may start at zero.
            stored = path in plus and term.mode == "offset"
            return not stored, term.piece.vector, path not in plus and path not in self._positive, path

        out: dict[str, Axes] = {}
        for piece, mode, _ in sorted(terms, key=order):
            names = {place: self._names[k] or target for k, place in enumerate(piece.places)}
            items = []
            for k, (length, window) in enumerate(zip(piece.view.shape, piece.view.windows, strict=True)):
                inside = [names.get((k, j), "_") for j in range(len(window.atoms))]
                planes = pairing if target in inside else None
                # In a stack of one layer, a norm's scale has an axis of length 1. If this axis were free, "_", the
                # string would say that one factor moves several entries.
                one = length == 1 and piece.vector and inside == ["_"]
                items.append(_only(k) if one else _axis_text(length, window, inside, self.sizes, planes, target))
            text = " ".join(items)
            one_plus = piece.path in plus and mode == "offset"  # perhaps only one of several blocks of the leaf
            out[piece.path] = joined(out.get(piece.path), f"1+ {text}" if one_plus else text)
        return out


def _only(axis: int) -> str:
    """The item of an axes string that picks the only index of an axis of length 1, so that the axis is not free.

    Names within a leaf have to differ, so that the name contains the number of the axis, except for axis 0.
    """
    return f"only{axis}=0" if axis else "only=0"


def axes_text(view: View, names: Mapping[Space, str], only: bool = False) -> tuple[str, dict[str, int]]:
    """The axes string of a view, and the lengths that its gauge has to state, by name.

    Args:
      view: the view.
      names: space → its name; axes along other spaces are free, `_`.
      only: whether to write an axis of length 1 as its one index, so that it is no free axis.

    >>> view = View("up", (6,), (Window(0, 6, (Atom((0, 1), 2), Atom(None, 3))),))
    >>> axes_text(view, {(0, 1): "channel"})
    ('(channel _)', {'channel': 2})
    """
    items, sizes = [], dict[str, int]()
    for k, (length, window) in enumerate(zip(view.shape, view.windows, strict=True)):
        inside = [names.get(atom.space, "_") if atom.space is not None else "_" for atom in window.atoms]
        text = _axis_text(length, window, inside, sizes) if length > 1 else _only(k) if only else "_"
        items.append(text)
    return " ".join(items), sizes


def _axis_text(
    length: int, window: Window, names: Sequence[str], sizes: dict[str, int], pairing: str | None = None,
    target: str = "",
) -> str:
    """The item of an axes string for one axis. The entries of the axis in a window are those that move.

    Args:
      length: the axis's length.
      window: the part that moves, with its atoms.
      names: the name of each atom: "_" for a free one, "+" to share the name of the atom before it.
      sizes: name → length; the lengths that the gauge has to state are added.
      pairing: layout of rotary planes in the atom called `target`; None if it has none.
      target: the name of the space.
    """
    parts: list[tuple[str, int]] = []
    for atom, name in zip(window.atoms, names, strict=True):
        if atom.pick is not None:
            parts.append((f"part{atom.size}={atom.pick}", atom.size))
        elif atom.span is not None and pairing is None:
            inside = f"/{atom.full}" if len(window.atoms) > 1 else ""
            ranges = "+".join(f"{start}:{stop}" for start, stop in atom.span[0])
            parts.append((f"{name}={ranges}{inside}", atom.size))
        elif name == "+" or (name == "_" and parts and parts[-1][0] == "_"):
            parts[-1] = (parts[-1][0], parts[-1][1] * atom.size)
        elif pairing is not None and name == target:
            if atom.span is not None:  # planes in a part of every head: if all parts are equal, "part2=0" is the first
                ((start, _), *more), count = atom.span[0], atom.full // atom.size
                if more or atom.full % atom.size or start % atom.size:
                    raise Unwritable("factors for rotary planes in a part of an axis, which no axes string can say")
                parts.append((f"part{count}={start // atom.size}", count))
            pair = [("_", 2), (target, atom.size // 2)]
            if pairing == "half" and parts and parts[-1][0] == "_":
                pair[0] = ("_", 2 * parts.pop()[1])  # free axes that are neighbours become one
            parts += pair if pairing == "half" else pair[::-1]
        else:
            parts.append((name, atom.size))
    size = window.stop - window.start
    span = "" if size == length else f"={window.start}:{window.stop}"
    if span and length % size == 0 and window.start % size == 0:  # one of equal parts: "part3=1" is the second of three
        span, parts = "", [(f"part{length // size}={window.start // size}", length // size), *parts]
    if len(parts) == 1:
        return parts[0][0] + span
    if sum(name == "_" for name, _ in parts) > 1:
        raise Unwritable("factors for an axis of which two parts are free, which no axes string can say")
    named = [name != "_" and ":" not in name for name, _ in parts]
    for k, (name, count) in enumerate(parts):
        # Where all parts are named, the length of the last follows by division from those of the others.
        if named[k] and (not all(named) or k < len(parts) - 1):
            if sizes.setdefault(name.split("=")[0], count) != count:
                raise Unwritable(f"an axis '{name.split('=')[0]}' of two lengths")
    return f"({' '.join(name for name, _ in parts)}){span}"


def whole_leaves(terms: Sequence[Term]) -> list[Term]:
    """Merges terms that move all parts of an axis equally into one term on the whole axis.

    >>> rows = [Window(0, 2, (Atom((8, 9), 2, row),)) for row in range(2)]
    >>> views = [View("pair", (2, 3), (row, Window(0, 3, (Atom((5, 6, 7), 3),)))) for row in rows]
    >>> (term,) = whole_leaves([Term(Piece(view, 0, ()), "scale", 1.0) for view in views])
    >>> term.piece.view.size
    6
    """
    merged = list(terms)
    for axis in range(max(len(term.piece.view.shape) for term in terms)):
        groups: dict[Any, list[Term]] = {}
        for term in merged:
            key: Any = term  # a term whose space or companion is on this axis, or that has no such axis, stays separate
            piece = term.piece
            if axis < len(piece.view.shape) and all(at != axis for at, _ in piece.places):
                others = tuple(w for k, w in enumerate(piece.view.windows) if k != axis)
                key = piece.path, others, tuple(piece.places), term.mode, round(term.exponent, 5)
            groups.setdefault(key, []).append(term)
        merged = [term for group in groups.values() for term in _tiled(group, axis)]
    return merged


def _tiled(group: list[Term], axis: int) -> list[Term]:
    """Merges terms into one if the entries of an axis that they read are disjoint and fill a range; else returns them.

    The range must be the whole axis, unless every term reads a single entry.
    """
    piece, places = group[0].piece, group[0].piece.places
    if len(group) == 1:
        return group
    length = piece.view.shape[axis]
    count = np.zeros(length, int)
    for term in group:
        np.add.at(count, term.piece.view.windows[axis].entries, 1)
    start, stop = int(np.argmax(count > 0)), length - int(np.argmax(count[::-1] > 0))
    filled = (count[start:stop] == 1).all() and (stop - start in (length, len(group)))
    if not filled:
        return group
    whole = Window(start, stop, (Atom(None, stop - start),))
    windows = (*piece.view.windows[:axis], whole, *piece.view.windows[axis + 1 :])
    view = dataclasses.replace(piece.view, windows=windows, other=None)
    at = [view.places.index(place) for place in places]
    has_target = piece.at is not None
    return [group[0]._replace(piece=Piece(view, at[0] if has_target else None, tuple(at[has_target:])))]
