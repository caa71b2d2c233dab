"""The order in which parts are read, and whether they commute.

A part is read once the other parts of its role that move what it is read from are undone. What it merely passes does
not count: an absorption passes kernels that a read shift moves, and the read shift passes a norm's bias that the
absorption moves, but the two commute. So the order follows from the parts alone, and the order of a list of gauges
means nothing.
"""

import functools
import itertools
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
    Size,
    Turn,
    blocks_by_path,
    moves,
    name_of,
    overlaps,
)


class Place(NamedTuple):
    """A constant or a size, and what it is read from.

    Attributes:
      part: the part.
      anchor: the blocks that it is read from.
      others: the other parts of its role that move entries of this anchor, with their blocks.
    """

    part: Any
    anchor: Anchor
    others: tuple[tuple[Any, Block], ...]


by_label = operator.attrgetter("label")  # what parts are sorted by where nothing else decides


def anchor_key(anchor: Anchor) -> tuple[tuple[str, str], ...]:
    """Paths and axes of an anchor: equal for two parts that are read from one block."""
    return tuple((b.path, b.axes) for b in anchor)


def others_of(part: Any, anchor: Anchor, parts: Sequence[Any]) -> tuple[tuple[Any, Block], ...]:
    """The other parts that move an anchor, with the blocks by which they do, in the order of their labels."""
    pairs = ((q, b) for q in parts if q is not part for b in q.blocks)
    found = [(q, b) for q, b in pairs if any(a.path == b.path and overlaps(a, b) for a in anchor)]
    return tuple(sorted(found, key=lambda pair: (pair[0].label, pair[1].path, pair[1].axes)))


def in_order(parts: Sequence[Any]) -> list[Place]:
    """Parts of one role, each with an anchor that only earlier parts move. Raises ValueError for a cycle.

    A later anchor is taken only where parts would wait for each other with all earlier ones. Ties are broken by label,
    so that the order of a list of gauges does not matter.
    """
    waiting = {p.label: p for p in sorted(parts, key=by_label)}
    offered = {p.label: [Place(p, anchor, others_of(p, anchor, parts)) for anchor in p.anchors] for p in parts}
    places: list[Place] = []
    while waiting:
        ready = [
            (level, place) for label in waiting for level, place in enumerate(offered[label])
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
    """Turns in order, in groups of one class, because a class computes with all of its heads at once.

    Turns whose anchor another turn moves form groups of their own, behind those that wait for nothing. Among either,
    the class that is the compiler's last comes last.
    """
    ordered = [place.part for place in in_order(turns)]
    waits = {t: any(moves(q, t.anchors[0]) for q in turns if q is not t) for t in ordered}
    kinds = sorted({(waits[t], type(t).last, type(t).__name__): type(t) for t in ordered}.items())
    return tuple((kind, tuple(t for t in ordered if type(t) is kind and waits[t] == key[0])) for key, kind in kinds)


def _cycle(waiting: Sequence[Any]) -> ValueError:
    names = ", ".join(part.label.split(".")[0] for part in waiting)
    first = min(waiting, key=lambda part: part.blocks[0].path)
    return binding_error(
        name_of(first),
        f"cyclic gauges at '{first.blocks[0].path}'",
        f"every leaf of {names} is moved by another gauge of the list",
        "for each gauge a leaf from which it can be read before, or after, the others",
        "drop one gauge of the cycle, or train it with its own transformation",
    )


# Whether parts commute --------------------------------------------------------------------------------------


def check_commute(parts: Sequence[Any]) -> None:
    """Raises ValueError where one part does not map the moves of another one to moves of that part."""
    for pairs in blocks_by_path(parts).values():
        for (p, a), (q, b) in itertools.permutations(pairs, 2):
            error = _clash(p, a, q, b)
            if error is not None:
                raise error


def _clash(p: Any, a: Block, q: Any, b: Block) -> ValueError | None:
    """The error where a part does not act alike along the axis that another one needs; None where it does."""
    if p is q or not p.along or p.label.split(" ")[0] == q.label.split(" ")[0] or not overlaps(a, b):
        return None  # a gauge may be two parts of the same blocks, which commute
    roles = Constant | Size | Turn
    # Sizes that act alike, and rotations, turn the move of a constant into another move of that constant.
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
        return None  # the part acts where this size is 1
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
    """Whether entries that differ only along the axis `rigid` of one block differ in a named index of another one.

    Args:
      scaled: a block.
      named: names of its axes.
      rigid_block: another block of the same leaf.
      rigid: name of one of its axes.
    """
    fixed = {*rigid_block.names, "_"} - {rigid}
    for axis in range(len(rigid_block.shape)):
        groups, channels = rigid_block.axis_ids(axis, fixed), scaled.axis_ids(axis, set(named))
        used = groups >= 0
        pairs = np.unique(np.stack([groups[used], channels[used]]), axis=1)
        if pairs.shape[1] > len(np.unique(groups[used])):
            return True
    return False
