"""What the user writes of a gauge's binding, checked for all that can be told without a tree."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from gauge_optax.binding.axes import Part, parse_axes
from gauge_optax.binding.paths import binding_error, captures_of, compile_pattern

Axes = str | tuple[str, ...]
Sizes = tuple[tuple[str, int], ...]

_RESERVED = ("basis", "vocab")


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """One pattern with one axes string, checked for syntax only.

    Attributes:
      role: the gauge's argument it was given in, e.g. "up".
      pattern: path of the leaves, with captures.
      axes: their axes.
    """

    role: str
    pattern: str
    axes: str


def block_specs(
    gauge: str, role: str, blocks: Mapping[str, Axes], reserved: Sequence[str] = ()
) -> tuple[BlockSpec, ...]:
    """Checks and freezes one mapping *path -> axes* of a gauge.

    Args:
      gauge: name for errors.
      role: name of the argument.
      blocks: patterns and their axes; a tuple of axes where one leaf holds several blocks.
      reserved: names (`basis`, `vocab`) that must stand once in each axes string, without an integer index.

    Returns:
      One `BlockSpec` per axes string, in order.

    Raises:
      ValueError: an empty mapping, malformed patterns or axes, a reserved name missing or out of place, a
        capture or a named axis that does not stand in all of them.

    >>> from gauge_optax.binding import block_specs
    >>> block_specs("rescale", "up", {"mlp/{i}/up": "_ channel"})
    (BlockSpec(role='up', pattern='mlp/{i}/up', axes='_ channel'),)
    """
    if not isinstance(blocks, Mapping) or not blocks:
        raise binding_error(
            gauge, f"no blocks in '{role}'", repr(blocks), "a mapping from paths to axes",
            f"write {role}={{\"path/to/kernel\": \"_ name\"}}")
    specs = []
    for pattern, value in blocks.items():
        compile_pattern(gauge, pattern)
        strings = value if isinstance(value, tuple) else (value,)
        if not strings or not all(isinstance(axes, str) for axes in strings):
            raise binding_error(
                gauge, f"malformed axes of '{pattern}'", repr(value), "a string, or a tuple of strings",
                "write one item per axis, and one string per block of the leaf")
        for axes in strings:
            _check_reserved(gauge, pattern, axes, reserved)
            specs.append(BlockSpec(role, pattern, axes))
    check_specs(gauge, specs)
    return tuple(specs)


def _check_reserved(gauge: str, pattern: str, axes: str, reserved: Sequence[str]) -> None:
    parts = parse_axes(gauge, pattern, axes).parts
    for name in reserved:
        own = [part for part in parts if part.name == name]
        if not own or own[0].picked:
            raise binding_error(
                gauge, f"'{name}' out of place in \"{axes}\" of '{pattern}'",
                f"'{own[0]}'" if own else f"no axis '{name}'", f"the axis '{name}' once, whole or a range",
                f"name the axis that the gauge acts on '{name}'")
    for part in parts:
        if part.name in _RESERVED and part.name not in reserved:
            raise binding_error(
                gauge, f"reserved name in \"{axes}\" of '{pattern}'", f"'{part.name}'",
                "other names: this gauge has no such axis", "rename the axis, or write '_'")


def check_specs(gauge: str, specs: Sequence[BlockSpec], sizes: Sizes = ()) -> None:
    """Checks that captures and named axes agree over all the specs of a gauge.

    Args:
      gauge: name for errors.
      specs: all roles together.
      sizes: frozen `sizes`.

    Raises:
      ValueError: a dangling capture, a named axis missing from a block, a name in `sizes` that no axes string
        has.

    >>> from gauge_optax.binding import BlockSpec, check_specs
    >>> up, down = BlockSpec("up", "{i}/up", "_ channel"), BlockSpec("down", "{i}/down", "channel _")
    >>> check_specs("rescale", [up, down])
    """
    captures = {spec: captures_of(gauge, spec.pattern) for spec in specs}
    axes = {spec: named_axes(gauge, spec) for spec in specs}
    for kind, table, form in (("capture", captures, "{{{}}}"), ("axis", axes, "{}")):
        for spec, other in itertools.product(specs, specs):
            missing = [form.format(name) for name in table[other] if name not in table[spec]]
            if missing:
                where = f"'{spec.pattern}'" if kind == "capture" else f"\"{spec.axes}\" of '{spec.pattern}'"
                have = ", ".join(map(form.format, table[spec])) or "none"
                raise binding_error(
                    gauge, f"dangling {kind} {missing[0]}, absent from {where}", have,
                    f"{', '.join(map(form.format, table[other]))}, as in '{other.pattern}': \"{other.axes}\"",
                    f"write {missing[0]} in both, or in neither")
    known = {part.name for spec in specs for part in _parts(gauge, spec)} - {"_"}
    for name, _ in sizes:
        if name not in known:
            raise binding_error(
                gauge, f"unknown axis in sizes '{name}'", f"named axes: {', '.join(sorted(known)) or 'none'}",
                "names that stand in an axes string", f"drop '{name}' or correct it")


def _parts(gauge: str, spec: BlockSpec) -> tuple[Part, ...]:
    return parse_axes(gauge, spec.pattern, spec.axes).parts


def named_axes(gauge: str, spec: BlockSpec) -> tuple[str, ...]:
    """Names of a spec's axes in order, without those that an integer selects."""
    return tuple(part.name for part in _parts(gauge, spec) if part.name != "_" and not part.picked)


def group_axes(gauge: str, specs: Sequence[BlockSpec], reserved: Sequence[str]) -> tuple[str, ...]:
    """The group's axes: names in order of first appearance over the specs, the reserved ones left out.

    Args:
      gauge: name for errors.
      specs: all roles together.
      reserved: names that are no axes of the group.

    Returns:
      The names; `Binding.named` is the same tuple.

    >>> from gauge_optax.binding import block_specs, group_axes
    >>> specs = block_specs("head_rotation", "blocks", {"qkv": "qkv=0 _ head basis"}, ("basis",))
    >>> group_axes("head_rotation", specs, ("basis",))
    ('head',)
    """
    names = (name for spec in specs for name in named_axes(gauge, spec))
    return tuple(dict.fromkeys(name for name in names if name not in reserved))


def frozen_sizes(gauge: str, sizes: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    """Checks and freezes the `sizes` argument of a gauge.

    Args:
      gauge: name for errors.
      sizes: lengths by axis name, or None.

    Returns:
      Sorted pairs of Python values.

    Raises:
      ValueError: not a mapping of names to positive integers.

    >>> from gauge_optax.binding import frozen_sizes
    >>> frozen_sizes("head_rotation", {"qkv": 3, "head": 12})
    (('head', 12), ('qkv', 3))
    """
    if sizes is not None and not isinstance(sizes, Mapping):
        raise binding_error(
            gauge, f"malformed sizes '{sizes}'", f"a {type(sizes).__name__}",
            "a mapping from axis names to lengths", 'write sizes={"head": 12}')
    frozen = {name: _integer(size) for name, size in (sizes or {}).items()}
    for name, size in frozen.items():
        if not isinstance(name, str) or size < 1:
            raise binding_error(
                gauge, f"malformed size of '{name}'", repr((sizes or {})[name]), "a positive integer",
                'write the length of the axis, as in sizes={"head": 12}')
    return tuple(sorted(frozen.items()))


def _integer(size: Any) -> int:
    """A length as a Python int, 0 for what is none."""
    try:
        return 0 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        return 0
