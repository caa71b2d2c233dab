"""Axes strings: the parser, and the solver for the lengths of named axes.

    axes  = ["1+"] {item}                           one item per axis of the leaf
    item  = part | "(" part {part} ")" [range]      a group splits one axis, row-major, or a range of it
    part  = "_" [some] | name | name "=" i | name some
    range = "=" i ":" j
    some  = range {"+" i ":" j} ["/" n]             ranges in order; n the full length, where nothing else tells it
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple, TypeAlias

from gauge_optax.binding.paths import binding_error

_TOKEN = re.compile(r"\)=[^\s()]*|[()]|[^\s()]+")
_RANGE = re.compile(r"\)=([0-9]{1,9}):([0-9]{1,9})")
_SPAN = "[0-9]{1,9}:[0-9]{1,9}"
_PART = re.compile(rf"([^=]+)(?:=(?:([0-9]{{1,9}})|({_SPAN}(?:\+{_SPAN})*)(?:/([0-9]{{1,9}}))?))?")

Ranges: TypeAlias = tuple[tuple[int, int], ...]


class Part(NamedTuple):
    """One name of an axes string, "_" for a free axis; an integer picks one index, ranges some of `full`."""

    name: str
    pick: int | None = None
    ranges: Ranges = ()
    full: int | None = None

    @property
    def picked(self) -> bool:
        """Whether an integer selects one index, so that the axis is gone from the view."""
        return self.pick is not None

    @property
    def last(self) -> int:
        """The least length of which the selection is part."""
        return self.ranges[-1][1] if self.ranges else 0 if self.pick is None else self.pick + 1

    @property
    def local(self) -> bool:
        """Whether only the leaf itself can tell the full length."""
        return self.full is None and (self.name == "_" or bool(self.ranges))

    def __str__(self) -> str:
        if self.pick is not None:
            return f"{self.name}={self.pick}"
        if not self.ranges:
            return self.name
        return f"{self.name}={'+'.join(f'{a}:{b}' for a, b in self.ranges)}" + (f"/{self.full}" if self.full else "")


class AxesPlan(NamedTuple):
    """A parsed axes string: per leaf axis a group of parts, and the range that it splits, None for the whole axis."""

    one_plus: bool
    groups: tuple[tuple[Part, ...], ...]
    ranges: tuple[tuple[int, int] | None, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts in order: the axes of the split leaf."""
        return tuple(part for group in self.groups for part in group)


def _malformed(gauge: str, pattern: str, axes: object, found: str, remedy: str) -> ValueError:
    expected = (
        "one of '_', 'name', 'name=3', 'name=0:4', 'name=0:4+8:12', '(a b)' or '(a b)=0:8' per axis, after an "
        "optional '1+'")
    return binding_error(gauge, f"malformed axes \"{axes}\" of '{pattern}'", found, expected, remedy)


def _parse_part(gauge: str, pattern: str, axes: str, token: str) -> Part:
    hit = _PART.fullmatch(token)
    if hit is None or not hit[1].isidentifier():
        remedy = "names are identifiers, an index is '=3', a range '=0:4'; '1+' comes first"
        raise _malformed(gauge, pattern, axes, f"'{token}'", remedy)
    pick, full = (None if number is None else int(number) for number in (hit[2], hit[4]))
    pairs = [pair.split(":") for pair in hit[3].split("+")] if hit[3] else []
    part = Part(hit[1], pick, tuple((int(a), int(b)) for a, b in pairs), full)
    if part.name == "_" and part.picked:
        raise _malformed(gauge, pattern, axes, f"an index on a free axis, '{token}'", "give the axis a name")
    if any(a >= b for a, b in part.ranges) or part.last > (part.full or part.last):
        remedy = "write start < stop, stop at most the full length"
        raise _malformed(gauge, pattern, axes, f"an empty range, '{token}'", remedy)
    if any(b >= a for (_, b), (a, _) in itertools.pairwise(part.ranges)):
        remedy = "write ranges in order, each behind the one before and not next to it"
        raise _malformed(gauge, pattern, axes, f"ranges out of order, '{token}'", remedy)
    return part


def _parse_range(gauge: str, pattern: str, axes: str, token: str) -> tuple[int, int]:
    hit = _RANGE.fullmatch(token)
    if hit is None or int(hit[1]) >= int(hit[2]):
        raise _malformed(gauge, pattern, axes, f"'{token}' behind a group", "write '(a b)=0:8', start < stop")
    return int(hit[1]), int(hit[2])


@functools.lru_cache(maxsize=4096)
def parse_axes(gauge: str, pattern: str, axes: str) -> AxesPlan:
    """Parses an axes string; `gauge` and `pattern` only tell errors where it stands."""
    tokens = _TOKEN.findall(axes)
    one_plus = tokens[:1] == ["1+"]
    groups: list[tuple[Part, ...]] = []
    ranges: list[tuple[int, int] | None] = []
    inside: list[Part] | None = None
    for token in tokens[one_plus:]:
        if token == "(":
            if inside is not None:
                raise _malformed(gauge, pattern, axes, "a group in a group", "write one level of parentheses")
            inside = []
        elif token.startswith(")"):
            if not inside:
                found = "an empty group" if inside is not None else "a ')' without a '('"
                raise _malformed(gauge, pattern, axes, found, "write '(a b)', balanced")
            groups.append(tuple(inside))
            ranges.append(None if token == ")" else _parse_range(gauge, pattern, axes, token))
            inside = None
        else:
            part = _parse_part(gauge, pattern, axes, token)
            if inside is None:
                groups.append((part,))
                ranges.append(None)
            else:
                inside.append(part)
    if inside is not None:
        raise _malformed(gauge, pattern, axes, "an open '('", "balance the parentheses")
    plan = AxesPlan(one_plus, tuple(groups), tuple(ranges))
    _check_plan(gauge, pattern, axes, plan)
    return plan


def _check_plan(gauge: str, pattern: str, axes: str, plan: AxesPlan) -> None:
    names = [part.name for part in plan.parts if part.name != "_"]
    for name in names:
        if names.count(name) > 1:
            raise _malformed(gauge, pattern, axes, f"the name '{name}' twice", "use each name once")
    for group in plan.groups:
        if sum(part.local for part in group) > 1:
            raise _malformed(
                gauge, pattern, axes, f"two lengths that nothing can tell in '{_group(group)}'",
                "keep at most one '_' or range in a group; name the others and give sizes={...}")


def _group(group: Sequence[Part]) -> str:
    text = " ".join(map(str, group))
    return f"({text})" if len(group) > 1 else text


class Site(NamedTuple):
    """One axes string on one leaf, before its lengths are known."""

    path: str
    axes: str
    shape: tuple[int, ...]
    plan: AxesPlan

    def length(self, axis: int) -> int:
        """How much of a leaf axis its group splits."""
        span = self.plan.ranges[axis]
        return self.shape[axis] if span is None else span[1] - span[0]


def check_rank(gauge: str, site: Site) -> None:
    """Raises where a leaf does not have one axis per item."""
    rank = len(site.plan.groups)
    if len(site.shape) != rank:
        raise binding_error(
            gauge, f"wrong rank at '{site.path}'", f"shape {site.shape}, rank {len(site.shape)}",
            f"rank {rank}, axes \"{site.axes}\"",
            f"write {len(site.shape)} items, one per axis: '_' where free, '(a b)' where it holds two")
    for axis, span in enumerate(site.plan.ranges):
        if span is not None and span[1] > site.shape[axis]:
            raise binding_error(
                gauge, f"range out of bounds, '={span[0]}:{span[1]}' at '{site.path}'",
                f"length {site.shape[axis]} in shape {site.shape}", f"at least {span[1]}, axes \"{site.axes}\"",
                "correct the range")


def full_lengths(
    gauge: str, site: Site, axis: int, known: MutableMapping[str, int], origin: MutableMapping[str, str]
) -> tuple[int, ...] | None:
    """Full lengths of the parts of one leaf axis, None while two are unknown; learns a name by division."""
    group, length = site.plan.groups[axis], site.length(axis)
    sizes = [part.full or (None if part.local else known.get(part.name)) for part in group]
    rest = math.prod(size for size in sizes if size is not None)
    unknown = [k for k, size in enumerate(sizes) if size is None]
    if len(unknown) > 1:
        return None
    quotient = (length // rest if rest else 0) if unknown else 1
    if rest * quotient != length:
        raise _unequal(gauge, site, axis, known, origin)
    for part in [group[k] for k in unknown if not group[k].local]:
        known[part.name], origin[part.name] = quotient, f"'{site.path}' {site.shape}"
    return tuple(quotient if size is None else size for size in sizes)


def _unequal(
    gauge: str, site: Site, axis: int, known: Mapping[str, int], origin: Mapping[str, str]
) -> ValueError:
    group, length = site.plan.groups[axis], site.length(axis)
    names = [part.name for part in group if not part.local and part.name in known]
    theirs = ", ".join(f"{name}={known[name]} from {origin[name]}" for name in names)
    if len(group) == 1:
        problem = f"unequal sizes of '{names[0]}' at '{site.path}'"
        remedy = "correct the axes or sizes; for grouped queries split the longer axis, \"(head _)\""
    else:
        problem = f"axis {axis} does not split into \"{_group(group)}\" at '{site.path}'"
        remedy = "correct the sizes, or the order and names of the group; for grouped queries write \"(head _ basis)\""
    return binding_error(gauge, problem, f"length {length} in shape {site.shape}", theirs, remedy)


def solve_sizes(
    gauge: str, sites: Sequence[Site], sizes: Mapping[str, int], given: str = "sizes="
) -> dict[str, int]:
    """Length of every name over the sites of one instance, by fix-point.

    A name that an integer picks counts with its full length, a range with its own.
    """
    known, origin = dict(sizes), dict.fromkeys(sizes, given)
    for site in sites:
        check_rank(gauge, site)
        for part in site.plan.parts:
            if part.ranges and part.name != "_":
                _learn_range(gauge, site, part, known, origin)
    work = [(site, axis) for site in sites for axis in range(len(site.shape))]
    # Single names first: they state lengths, groups only divide; the blame then falls on the group.
    work.sort(key=lambda item: len(item[0].plan.groups[item[1]]))
    while work:
        left = [item for item in work if full_lengths(gauge, *item, known, origin) is None]
        if len(left) == len(work):
            raise unresolved(gauge, *left[0], known)
        work = left
    return known


def _learn_range(
    gauge: str, site: Site, part: Part, known: MutableMapping[str, int], origin: MutableMapping[str, str]
) -> None:
    length = sum(b - a for a, b in part.ranges)
    if known.setdefault(part.name, length) != length:
        raise binding_error(
            gauge, f"unequal sizes of '{part.name}' at '{site.path}'",
            f"the range '{part}', length {length}",
            f"{part.name}={known[part.name]} from {origin[part.name]}", "select ranges of one length")
    origin.setdefault(part.name, f"the range '{part}' of '{site.path}'")


def unresolved(gauge: str, site: Site, axis: int, known: Mapping[str, int]) -> ValueError:
    """The complaint about a group of axes in which more than one length is unknown."""
    group = site.plan.groups[axis]
    names = [part.name for part in group if not part.local and part.name not in known]
    # One unknown follows by division; a free axis or a range takes that place.
    needed = names if any(part.local for part in group) else names[:-1]
    sizes = ", ".join(f'"{name}": ...' for name in needed)
    return binding_error(
        gauge, f"unknown lengths in \"{_group(group)}\" at '{site.path}'",
        f"axis {axis} of shape {site.shape}, nothing fixes {', '.join(names)}",
        "at most one unknown length per group; head counts are never inferred",
        f"give sizes={{{sizes}}}")
