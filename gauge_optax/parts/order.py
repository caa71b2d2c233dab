"""The order in which parts are read, and whether they commute.

A part is read after the other parts of its role that move its anchor were undone. Blocks that a part uses and does not
change (`Part.passes`) impose no order. For example, `Absorption` uses kernels that `ReadShift` moves, and `ReadShift`
uses a norm's bias that `Absorption` moves, but the two commute. The order thus follows from the parts alone, and the
order of a list of gauges has no effect.
"""

import collections
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gauge_optax.binding import Block
from gauge_optax.errors import binding_error
from gauge_optax.parts.part import (
    EXCLUSIVE,
    Anchor,
    Constant,
    Part,
    Size,
    Turn,
    blocks_by_path,
    moves,
    name_of,
    overlaps,
)


class Place(NamedTuple):
    """A constant or a size, with the anchor that it is read from.

    Attributes:
      part: the part.
      anchor: the blocks that it is read from.
      others: the other parts of its role that move entries of this anchor, each with the block that it moves.
    """

    part: Any
    anchor: Anchor
    others: tuple[tuple[Any, Block], ...]


by_label = operator.attrgetter("label")  # sorts parts whose order nothing else decides


@functools.singledispatch
def last_anchors(part: Part[Any]) -> tuple[Anchor, ...]:
    """Further anchors of a part. They are taken only if no order of the parts exists with `Part.anchors` alone."""
    return ()


def anchor_key(anchor: Anchor) -> tuple[tuple[str, str], ...]:
    """The path and axes string of every block of an anchor: equal for two parts with the same anchor."""
    return tuple((b.path, b.axes) for b in anchor)


def others_of(part: Any, anchor: Anchor, parts: Sequence[Any]) -> tuple[tuple[Any, Block], ...]:
    """The parts, other than `part`, that move an anchor, each with the block that it moves, sorted by label."""
    pairs = ((q, b) for q in parts if q is not part for b in q.blocks)
    found = [(q, b) for q, b in pairs if any(a.path == b.path and overlaps(a, b) for a in anchor)]
    return tuple(sorted(found, key=lambda pair: (pair[0].label, pair[1].path, pair[1].axes)))


def in_order(parts: Sequence[Any]) -> list[Place]:
    """Sorts parts of one role, and chooses for each an anchor that only earlier parts move.

    A part is ready with an anchor if no remaining part moves it. Parts that are ready with their first anchor are taken
    before parts that are ready only with a later one. Ties are broken by label, so that the order of a list of gauges
    does not matter.

    Raises:
      ValueError: each of the remaining parts waits for another one, whichever of its anchors it takes.
    """
    waiting = {p.label: p for p in sorted(parts, key=by_label)}
    levels = {p.label: [*enumerate(p.anchors), *((math.inf, anchor) for anchor in last_anchors(p))] for p in parts}
    offered = {p.label: [(level, Place(p, anchor, others_of(p, anchor, parts))) for level, anchor in levels[p.label]]
               for p in parts}
    places: list[Place] = []
    while waiting:
        ready = [
            (level, place) for label in waiting for level, place in offered[label]
            if not any(q.label in waiting for q, _ in place.others)
        ]
        if not ready:
            raise _cycle([*waiting.values()])
        least = min(level for level, _ in ready)
        chosen = [place for level, place in ready if level == least]
        # If no part is ready with its first anchor, one part alone takes a later one, if possible the empty anchor,
        # which waits for nothing. Others may then become ready with their first anchor.
        chosen = sorted(chosen, key=lambda place: bool(place.anchor))[:1] if least else chosen
        places += chosen
        for place in chosen:
            del waiting[place.part.label]
    return places


def turns_by_class(turns: Sequence[Any]) -> tuple[tuple[type[Any], tuple[Any, ...]], ...]:
    """Turns in the order in which they are read, grouped by class, because a class computes all of its turns at once.

    A turn whose anchor another turn moves comes after this other turn, in a later *round*. Turns of one class and one
    round are one group. In every round, a class with `last = True` comes last.
    """
    rounds: dict[Any, int] = {}
    for place in in_order(turns):
        earlier = [rounds[q] for q in turns if q is not place.part and moves(q, place.part.anchors[0])]
        rounds[place.part] = max(earlier, default=-1) + 1
    groups: dict[tuple[int, bool, str], list[Any]] = {}
    for turn, number in rounds.items():
        groups.setdefault((number, type(turn).last, type(turn).__name__), []).append(turn)
    return tuple((type(group[0]), tuple(group)) for _, group in sorted(groups.items()))


def _cycle(waiting: Sequence[Any]) -> ValueError:
    counts = collections.Counter(part.label.split(".")[0] for part in waiting)
    names = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())
    first = min(waiting, key=lambda part: part.blocks[0].path)
    return binding_error(
        name_of(first),
        f"cyclic gauges at '{first.blocks[0].path}'",
        f"{names}: the leaves from which each computes its element are changed by another of them",
        "an order in which only earlier gauges change the leaves from which a gauge computes its element",
        "drop one of these gauges from the list",
    )


# Whether parts commute --------------------------------------------------------------------------------------


def check_commute(parts: Sequence[Any]) -> None:
    """Raises ValueError for two parts whose moves cannot be exchanged.

    A move of part p after a move of part q must equal a move of q after a move of p, with elements that may differ.
    """
    for pairs in blocks_by_path(parts).values():
        for (p, a), (q, b) in itertools.permutations(pairs, 2):
            error = _clash(p, a, q, b)
            if error is not None:
                raise error


def _clash(p: Any, a: Block, q: Any, b: Block) -> ValueError | None:
    """The error if p mixes entries along an axis and q moves these entries differently from each other; else None.

    Args:
      p: a part that mixes the axes `p.along`.
      a: one of its blocks.
      q: another part on the same leaf.
      b: one of the blocks of q.
    """
    if p is q or not p.along or p.label.split(" ")[0] == q.label.split(" ")[0] or not overlaps(a, b):
        return None  # the two parts of one gauge share their blocks and commute
    roles = Constant | Size | Turn
    # If q is a constant, sizes and rotations p map what q adds to something that q can add too, so that they commute.
    if not isinstance(p, roles) or isinstance(q, Constant):
        return None

    def error(found: str, expected: str) -> ValueError:
        problem = f"does not commute with {name_of(q)} on '{a.path}'"
        return binding_error(name_of(p), problem, found, expected, "drop one of the two from this list")

    if p.along == EXCLUSIVE:
        return error(
            "a gauge known by its action alone, which cannot be told to commute",
            "leaves that no other gauge of the list binds, or a gauge that says `commutes = True`",
        )
    if isinstance(p, Constant) and isinstance(q, roles) and q.along:
        return None
    if isinstance(q, Size) and {anchor_key((x,)) for x in p.passes} & {anchor_key(x) for x in q.anchors}:
        return None  # p uses the anchor of q, a norm's scale, in such a way that their moves commute
    named = (*q.named, *(() if q.along == EXCLUSIVE else q.along))
    if not any(axis in a.names and varies_along(b, named, a, axis) for axis in p.along):
        return None
    if not isinstance(q, roles):
        return binding_error(
            name_of(q),
            f"permutes the axis of '{b.path}' that {name_of(p)} acts on",
            f"'{b.axes}' and '{a.axes}'",
            "an axis that no other gauge mixes",
            f"drop one of the two: rotations contain the permutations, and {name_of(p)} stays",
        )
    if not q.along:
        return error(
            f"the axis that {name_of(p)} needs constant is scaled entry by entry",
            f"scales of {name_of(q)} constant along `{'`, `'.join(p.along)}`",
        )
    return error("the same entries turned by two gauges", "at most one rotation or linear gauge per entry")


@functools.cache
def varies_along(scaled: Block, named: tuple[str, ...], rigid_block: Block, rigid: str) -> bool:
    """Whether a part can make different moves of entries that differ only along an axis of another part's block.

    Args:
      scaled: a block that the first part moves.
      named: names of the axes of `scaled` that index an element of this part.
      rigid_block: the other part's block, on the same leaf.
      rigid: name of that axis of `rigid_block`.

    Returns:
      True if two entries that differ only along `rigid` have different indices along the axes `named` of `scaled`.
    """
    fixed = {*rigid_block.names, "_"} - {rigid}
    for axis in range(len(rigid_block.shape)):
        groups, channels = rigid_block.axis_ids(axis, fixed), scaled.axis_ids(axis, set(named))
        used = groups >= 0
        pairs = np.unique(np.stack([groups[used], channels[used]]), axis=1)
        if pairs.shape[1] > len(np.unique(groups[used])):
            return True
    return False
