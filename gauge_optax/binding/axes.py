"""Parses axes strings, and solves for the lengths of the axes that they name.

An axes string says what the axes of a leaf are, as in `"(head basis) _"`. "_" is an axis without a name; "=" selects
indices along an axis. In EBNF ([optional], {repeated}), where i, j and n are integers:

    axes  = ["1+"] {item}                           one item per axis of the leaf
    item  = part | "(" part {part} ")" [range]      parentheses split one axis, or a range of it, in row-major order
    part  = "_" [some] | name | name "=" i | name some
    range = "=" i ":" j
    some  = range {"+" i ":" j} ["/" n]             ranges in order; n is the full length, if nothing else gives it
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from gauge_optax.errors import binding_error

# Nine digits at most: Python refuses to convert very long numbers, with an error that does not name the axes string.
_NUMBER = "[0-9]{1,9}"
_RANGE = re.compile(f"({_NUMBER}):({_NUMBER})")
_RANGES = rf"{_NUMBER}:{_NUMBER}(?:\+{_NUMBER}:{_NUMBER})*"
_PART = re.compile(rf"([^=]+)(?:=(?:({_NUMBER})|({_RANGES})(?:/({_NUMBER}))?))?")
# Matches "(a b)=0:8" or a bare part. It matches no nested parentheses: text that no match covers is malformed.
_ITEM = re.compile(r"\(([^()]*)\)(?:=([^\s()]*))?|([^\s()]+)")

Ranges: TypeAlias = tuple[tuple[int, int], ...]


class AxisItem(NamedTuple):
    """One part of an axes string: a name, and the indices of its axis that it selects.

    Attributes:
      text: the part as the user wrote it, for errors.
      name: the axis's name, "_" for a free axis.
      pick: the index, if an integer selects one; the axis is then dropped.
      ranges: the selected (start, stop), in order; empty where the whole axis is selected.
      full: the full length of the axis, if the string states it.
    """

    text: str
    name: str
    pick: int | None
    ranges: Ranges
    full: int | None

    @property
    def shortest(self) -> int:
        """The smallest length of the axis for which all selected indices exist."""
        if self.pick is not None:
            return self.pick + 1
        return self.ranges[-1][1] if self.ranges else 0

    @property
    def local(self) -> bool:
        """Whether only this leaf determines the axis's full length.

        The ranges of a name, as in `neuron=0:8`, select equally many indices in every block that has the name. But the
        axes from which they select may have different lengths in different leaves.
        """
        return self.full is None and (self.name == "_" or bool(self.ranges))


class ParsedAxes(NamedTuple):
    """A parsed axes string.

    Attributes:
      one_plus: whether the string starts with "1+", because the leaf stores its value less one.
      groups: per axis of the leaf, the items into which it splits.
      windows: per axis of the leaf, the (start, stop) that is split, as in `(a b)=0:8`; None for the whole axis.
    """

    one_plus: bool
    groups: tuple[tuple[AxisItem, ...], ...]
    windows: tuple[tuple[int, int] | None, ...]

    @property
    def items(self) -> tuple[AxisItem, ...]:
        """All items in order; they are the axes of the split leaf."""
        return tuple(itertools.chain.from_iterable(self.groups))


def _text(group: Sequence[AxisItem]) -> str:
    text = " ".join(part.text for part in group)
    return f"({text})" if len(group) > 1 else text


@functools.lru_cache(maxsize=4096)
def parse_axes(gauge: str, pattern: str, axes: str) -> ParsedAxes:
    """Parses an axes string.

    Args:
      gauge: name for errors.
      pattern: the pattern of the leaves that have these axes, for errors.
      axes: one item per axis of a leaf, such as "(head basis) _".

    Returns:
      The items, axis by axis.

    Raises:
      ValueError: a malformed string.

    >>> from gauge_optax.binding.axes import parse_axes
    >>> [item.name for item in parse_axes("heads", "mlp/up", "(head basis) _").items]
    ['head', 'basis', '_']
    """

    def malformed(found: str, remedy: str) -> ValueError:
        expected = (
            "one of '_', 'name', 'name=3', 'name=0:4', 'name=0:4+8:12', '(a b)' or '(a b)=0:8' per axis, after an "
            "optional '1+'")
        return binding_error(gauge, f"malformed axes \"{axes}\" of '{pattern}'", found, expected, remedy)

    def parse_part(token: str) -> AxisItem:
        hit = _PART.fullmatch(token)
        if hit is None or not hit[1].isidentifier():
            raise malformed(f"'{token}'", "names are identifiers, an index is '=3', a range '=0:4'; '1+' comes first")
        pick, full = (None if number is None else int(number) for number in (hit[2], hit[4]))
        ranges = tuple((int(start), int(stop)) for start, stop in _RANGE.findall(hit[3] or ""))
        part = AxisItem(token, hit[1], pick, ranges, full)
        if part.name == "_" and pick is not None:
            raise malformed(f"an index on a free axis, '{token}'", "give the axis a name")
        if any(start >= stop for start, stop in ranges) or (full is not None and part.shortest > full):
            raise malformed(f"an empty range, '{token}'", "write start < stop, stop at most the full length")
        # Adjacent ranges are refused too. Every selection then has one spelling, so that equal blocks compare equal.
        if any(stop >= start for (_, stop), (start, _) in itertools.pairwise(ranges)):
            remedy = "write the ranges in order, with a gap between one and the next"
            raise malformed(f"ranges out of order, '{token}'", remedy)
        return part

    if _ITEM.sub("", axes).strip():
        raise malformed("parentheses that are nested or unbalanced", "write '(a b)', one level deep")
    items = list(_ITEM.finditer(axes))
    one_plus = bool(items) and items[0][0] == "1+"
    groups: list[tuple[AxisItem, ...]] = []
    windows: list[tuple[int, int] | None] = []
    for item in items[one_plus:]:
        inside, window, single = item.groups()
        groups.append(tuple(parse_part(token) for token in ([single] if inside is None else inside.split())))
        if not groups[-1]:
            raise malformed("an empty group", "write '(a b)', or '_' for a free axis")
        hit = _RANGE.fullmatch(window or "")
        windows.append(None if hit is None else (int(hit[1]), int(hit[2])))
        if window is not None and (hit is None or int(hit[1]) >= int(hit[2])):
            raise malformed(f"')={window}' behind a group", "write '(a b)=0:8', start < stop")
    plan = ParsedAxes(one_plus, tuple(groups), tuple(windows))
    names = [part.name for part in plan.items if part.name != "_"]
    for name in names:
        if names.count(name) > 1:
            raise malformed(f"the name '{name}' twice", "use each name once")
    for group in groups:
        # The length of a local item, such as `_`, is found only by dividing the axis by all other lengths of the group.
        # If a group had two local items, neither length could be found.
        if sum(part.local for part in group) > 1:
            remedy = "keep at most one '_' or range in a group; name the others and give sizes={...}"
            raise malformed(f"two lengths that nothing determines in '{_text(group)}'", remedy)
    return plan


class Site(NamedTuple):
    """One axes string on one leaf, before the lengths of its names are solved. `plan` is the parsed string."""

    argument: str
    path: str
    axes: str
    shape: tuple[int, ...]
    plan: ParsedAxes


def solve_lengths(
    gauge: str, sites: Sequence[Site], sizes: Mapping[str, int], source: str = "sizes="
) -> tuple[dict[str, int], list[tuple[int, ...]]]:
    """Solves for the lengths of all axes of one copy of a gauge, say that of one layer.

    If a name has an axis of a leaf to itself, the leaf's shape gives its length. A group such as `(head basis)` gives
    one unknown length by division. With this length another group may have only one unknown left, so that the solver
    repeats until all lengths are known.

    Args:
      gauge: name for errors.
      sites: the axes strings of the copy with their leaves.
      sizes: axis name → length, for lengths that are known beforehand.
      source: where `sizes` come from, for errors.

    Returns:
      The length of every name. For a name with ranges it is the number of indices that they select, else the full
      length of its axis. Then, per site, the leaf's shape after its groups are split, with full lengths.

    Raises:
      ValueError: wrong rank, lengths that disagree, stay unknown or are zero.

    >>> from gauge_optax.binding.axes import Site, parse_axes, solve_lengths
    >>> site = Site("up", "q", "(head basis) _", (12, 5), parse_axes("heads", "q", "(head basis) _"))
    >>> solve_lengths("heads", [site], {"head": 3})
    ({'head': 3, 'basis': 4}, [(3, 4, 5)])
    """
    lengths, sources = dict(sizes), dict.fromkeys(sizes, source)
    for site in sites:
        rank = len(site.shape)
        if rank != len(site.plan.groups):
            raise binding_error(
                gauge, f"wrong rank at '{site.path}'", f"shape {site.shape}, rank {rank}",
                f"rank {len(site.plan.groups)}, axes \"{site.axes}\"",
                f"write {rank} items, one per axis: '_' where free, '(a b)' where it holds two")
        for window, length in zip(site.plan.windows, site.shape, strict=True):
            if window is not None and window[1] > length:
                raise binding_error(
                    gauge, f"range out of bounds, '={window[0]}:{window[1]}' at '{site.path}'",
                    f"length {length} in shape {site.shape}", f"at least {window[1]}, axes \"{site.axes}\"",
                    "correct the range")
        for part in site.plan.items:
            # A named axis with ranges has their length, whatever the leaf's shape: 8 for `neuron=0:8`. Free axes are
            # left out, because they may have other lengths in other blocks.
            if part.ranges and part.name != "_":
                length = sum(stop - start for start, stop in part.ranges)
                if lengths.setdefault(part.name, length) != length:
                    expected = f"{part.name}={lengths[part.name]} from {sources[part.name]}"
                    raise binding_error(
                        gauge, f"unequal sizes of '{part.name}' at '{site.path}'",
                        f"the range '{part.text}', length {length}", expected, "select ranges of one length")
                sources.setdefault(part.name, f"the range '{part.text}' of '{site.path}'")
    splits: dict[tuple[Site, int], tuple[int, ...]] = {}
    pending = [(site, axis) for site in sites for axis in range(len(site.shape))]
    # Names that have an axis to themselves come first. A disagreement is then reported at a group, which is more often
    # the mistake.
    pending.sort(key=lambda item: len(item[0].plan.groups[item[1]]))
    while pending:
        solved = {item: split for item in pending if (split := _split(gauge, *item, lengths, sources)) is not None}
        if not solved:
            (site, axis), *_ = pending
            group = site.plan.groups[axis]
            unknown = [part.name for part in group if not part.local and part.name not in lengths]
            # The error asks for one length less than is unknown, because division gives one: that of the local part if
            # there is one, else that of the last name.
            needed = unknown if any(part.local for part in group) else unknown[:-1]
            sizes_to_give = ", ".join(f'"{name}": ...' for name in needed)
            raise binding_error(
                gauge, f"unknown lengths in \"{_text(group)}\" at '{site.path}'",
                f"axis {axis} of shape {site.shape}, nothing fixes {', '.join(unknown)}",
                "at most one unknown length per group; head counts are never inferred",
                f"give sizes={{{sizes_to_give}}}")
        splits |= solved
        pending = [item for item in pending if item not in solved]
    for site in sites:
        empty = next((part.name for part in site.plan.items if not part.local and lengths.get(part.name) == 0), None)
        if empty is not None:  # without heads or channels there is nothing to move, and no size to divide by
            raise binding_error(
                gauge, f"no entries along '{empty}' at '{site.path}'", f"shape {site.shape}",
                "one index of every named axis, or more", f"leave '{site.path}' out of the gauge, or of the tree")
    return lengths, [tuple(n for axis in range(len(site.shape)) for n in splits[site, axis]) for site in sites]


def _split(
    gauge: str, site: Site, axis: int, lengths: dict[str, int], sources: dict[str, str]
) -> tuple[int, ...] | None:
    """The full lengths of the parts of one axis of a leaf; None while two of them are unknown.

    A name whose length it finds is added to `lengths` and `sources`.
    """
    group, window = site.plan.groups[axis], site.plan.windows[axis]
    total = site.shape[axis] if window is None else window[1] - window[0]
    stated = [part.full or (None if part.local else lengths.get(part.name)) for part in group]
    if stated.count(None) > 1:
        return None
    # The maximum avoids a division by zero for axes of length 0. The check below then fails unless `total` is 0 too.
    quotient = total // max(1, math.prod(n for n in stated if n is not None))
    split = tuple(quotient if n is None else n for n in stated)
    if math.prod(split) != total:
        expected = ", ".join(
            f"{part.name}={n} from " + (f"'{part.text}'" if part.full else sources[part.name])
            for part, n in zip(group, stated, strict=True) if n is not None)
        if len(group) == 1:
            problem = f"unequal sizes of '{group[0].name}' at '{site.path}'"
            remedy = "correct the axes or sizes; for grouped queries split the longer axis, \"(head _)\""
        else:
            problem = f"axis {axis} does not split into \"{_text(group)}\" at '{site.path}'"
            remedy = "correct the sizes, or the order and names of the group; for grouped queries \"(head _ basis)\""
        raise binding_error(gauge, problem, f"length {total} in shape {site.shape}", expected, remedy)
    for part, n in zip(group, stated, strict=True):
        if n is None and not part.local:
            lengths[part.name], sources[part.name] = quotient, f"'{site.path}' {site.shape}"
    return split
