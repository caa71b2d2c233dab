"""Calls of the library's gauges as data: their source, and layers merged into captures.

Here: text and tables. Not here: which call a symmetry is (`write`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gauge_optax.gauges.base import Gauge

Axes = str | tuple[str, ...]
Roles = Mapping[str, Mapping[str, Axes]]
_CAPTURES = "ijklmn"
_NUMBER, _PIECES = re.compile("[0-9]+"), re.compile("([0-9]+)")


def template(paths: Iterable[str]) -> list[str]:
    """Paths with their numbers left out, sorted."""
    return sorted(_NUMBER.sub("#", path) for path in paths)


@dataclasses.dataclass(frozen=True)
class Call:
    """A gauge's constructor with its arguments.

    Attributes:
      kind: the constructor's name.
      roles: per role, paths and axes.
      options: keyword arguments besides.
      sizes: lengths of axes that shapes alone do not fix.
    """

    kind: str
    roles: Roles
    options: Mapping[str, Any]
    sizes: Mapping[str, int]

    @property
    def paths(self) -> list[str]:
        """Paths or patterns of all roles."""
        return [path for role in self.roles.values() for path in role]

    def source(self) -> str:
        """The call as Python source."""
        rows = [f"  {role}={{{', '.join(f'{p!r}: {a!r}' for p, a in blocks.items())}}}," for role, blocks in
                self.roles.items()]  # fmt: skip
        rows += [f"  {name}={value!r}," for name, value in self.options.items()]
        rows += [f"  sizes={dict(self.sizes)!r},"] if self.sizes else []
        return "\n".join([f"go.{self.kind}(", *(line for row in rows for line in _wrapped(row)), ")"])


class Held(NamedTuple):
    """A gauge with its evidence.

    Attributes:
      gauge: the gauge.
      call: its constructor with arguments.
      exponents: leaf path → exponent with which it moves; for linear groups the sign tells vectors from covectors.
      residual: the singular value: what gradients see of its generators, of what they see of a leaf's own.
      change: largest relative change of the outputs under a random finite move, over points and batches.
      parts: the same of every layer that it merges; () of one that merges none.
    """

    gauge: Gauge
    call: Call
    exponents: Mapping[str, float]
    residual: float
    change: float
    parts: tuple[Held, ...] = ()

    def __str__(self) -> str:
        paths = ", ".join(dict.fromkeys(getattr(spec, "pattern", "") for spec in getattr(self.gauge, "specs", ())))
        return f"{getattr(self.gauge, 'name', 'gauge')}: {paths}  (moves the outputs by {self.change:.1e})"


def _wrapped(row: str) -> list[str]:
    """A row of source of at most 110 columns where it is a mapping of paths."""
    if len(row) <= 110 or "{" not in row:
        return [row]
    head, body = row.split("{", 1)
    items = re.split(r", (?=')", body.rsplit("}", 1)[0])
    items = [item for item in items if item]
    joined: list[str] = []
    for item in items:  # a tuple's strings stay on their line
        if joined and joined[-1].count("(") > joined[-1].count(")"):
            joined[-1] += ", " + item
        else:
            joined.append(item)
    return [f"{head}{{", *(f"    {item}," for item in joined), "  },"]


def alternatives(call: Call) -> Iterator[Call]:
    """The same gauge with other anchors: every block listed first once, then the two sides of a scale exchanged."""
    sides = [call]
    if call.kind in ("rescale", "norm_scale") and not call.options:
        one, other = call.roles.values()
        sides.append(Call("rescale", {"up": other, "down": one}, {}, call.sizes))
    for own in sides:
        first, blocks = next(iter(own.roles.items()))
        for path in blocks:
            ordered = {path: blocks[path], **blocks}
            yield dataclasses.replace(own, roles={**own.roles, first: ordered})


def merge_layers(calls: Sequence[Call]) -> list[tuple[Call, list[Call]]]:
    """Calls that differ in numbers of their paths alone as one call with captures, beside the calls that it stands for.

    Where numbers vary in some paths only, or two in ways that no capture joins, calls stay as they are.
    """
    groups: dict[Any, list[Call]] = {}
    for call in calls:
        groups.setdefault(_signature(call), []).append(call)
    out = []
    for group in groups.values():
        merged = _captured(group) if len(group) > 1 else None
        out += [(merged, group)] if merged is not None else [(call, [call]) for call in group]
    return out


def _signature(call: Call) -> Any:
    roles = tuple(
        (role, tuple((_NUMBER.sub("#", p), axes) for p, axes in _ordered(blocks))) for role, blocks in
        call.roles.items()
    )  # fmt: skip
    return call.kind, roles, tuple(call.options.items()), tuple(sorted(call.sizes.items()))


def _ordered(blocks: Mapping[str, Any]) -> list[tuple[str, Any]]:
    def key(item: tuple[str, Any]) -> Any:
        return _NUMBER.sub("#", item[0]), [int(n) for n in _NUMBER.findall(item[0])]

    return sorted(blocks.items(), key=key)


def _captured(group: Sequence[Call]) -> Call | None:
    """One call for a group of equal signature, None where captures cannot say it."""
    tables = [[path for blocks in call.roles.values() for path, _ in _ordered(blocks)] for call in group]
    columns = list(zip(*[[tuple(_NUMBER.findall(path)) for path in paths] for paths in tables], strict=True))
    captures: dict[tuple[str, ...], str] = {}
    patterns = []
    for path, numbers in zip(tables[0], columns, strict=True):
        slots = [tuple(own) for own in zip(*numbers, strict=True)]
        own = {slot for slot in slots if len(set(slot)) > 1}
        for slot in slots:
            if slot in own and slot not in captures:
                if len(captures) == len(_CAPTURES):
                    return None
                captures[slot] = "{" + _CAPTURES[len(captures)] + "}"
        texts = iter([captures.get(slot, slot[0]) for slot in slots])
        patterns.append(("".join(next(texts) if k % 2 else text for k, text in enumerate(_PIECES.split(path))), own))
    if any(own != set(captures) for _, own in patterns):
        return None
    pattern = {path: pattern for path, (pattern, _) in zip(tables[0], patterns, strict=True)}
    roles = {role: {pattern[path]: axes for path, axes in own.items()} for role, own in group[0].roles.items()}
    if any(len(roles[role]) < len(own) for role, own in group[0].roles.items()):
        return None
    return Call(group[0].kind, roles, group[0].options, group[0].sizes)
