"""The patterns, axes strings and sizes that a user writes, and all checks of them that need no tree."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence

from gauge_optax.binding.axes import parse_axes
from gauge_optax.binding.paths import captures_of, compile_pattern
from gauge_optax.errors import binding_error

Axes = str | tuple[str, ...]
Sizes = tuple[tuple[str, int], ...]

_RESERVED = ("basis", "vocab")


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """One pattern with one axes string, checked for syntax only.

    Attributes:
      argument: the constructor's argument that it comes from, e.g. "up".
      pattern: path of the leaves, with captures such as `{i}`.
      axes: the axes string of the leaves.
    """

    argument: str
    pattern: str
    axes: str


def block_specs(
    gauge: str, argument: str, blocks: Mapping[str, Axes], reserved: Sequence[str] = (), joined: bool = False
) -> tuple[BlockSpec, ...]:
    """Checks one mapping *path -> axes* that a constructor of a gauge takes, and makes it hashable.

    Args:
      gauge: name for errors.
      argument: the name of the constructor's argument.
      blocks: patterns and their axes; a tuple of axes where one leaf holds several blocks.
      reserved: names of axes, such as `basis`, that every axes string must have, without an integer index.
      joined: as in `check_specs`.

    Returns:
      One `BlockSpec` per axes string, in order.

    Raises:
      ValueError: an empty mapping, malformed patterns or axes, a reserved name that is missing or out of place, a
        capture or a named axis that some of the blocks lack.

    >>> from gauge_optax.binding import block_specs
    >>> block_specs("rescale", "up", {"mlp/{i}/up": "_ channel"})
    (BlockSpec(argument='up', pattern='mlp/{i}/up', axes='_ channel'),)
    """
    if not isinstance(blocks, Mapping) or not blocks:
        raise binding_error(
            gauge, f"no blocks in '{argument}'", repr(blocks), "a mapping from paths to axes",
            f"write {argument}={{\"path/to/kernel\": \"_ name\"}}")
    specs = []
    for pattern, value in blocks.items():
        compile_pattern(gauge, pattern)
        strings = value if isinstance(value, tuple) else (value,)
        if not strings or not all(isinstance(axes, str) for axes in strings):
            raise binding_error(
                gauge, f"malformed axes of '{pattern}'", repr(value), "a string, or a tuple of strings",
                "write one item per axis, and one string per block of the leaf")
        for axes in strings:
            parts = {part.name: part for part in parse_axes(gauge, pattern, axes).items}
            for name in reserved:
                if name not in parts or parts[name].pick is not None:
                    raise binding_error(
                        gauge, f"'{name}' out of place in \"{axes}\" of '{pattern}'",
                        f"'{parts[name].text}'" if name in parts else f"no axis '{name}'",
                        f"the axis '{name}' once, whole or a range", f"name the axis that the gauge acts on '{name}'")
            for name in parts:
                if name in _RESERVED and name not in reserved:
                    raise binding_error(
                        gauge, f"reserved name in \"{axes}\" of '{pattern}'", f"'{name}'",
                        "other names: this gauge has no such axis", "rename the axis, or write '_'")
            specs.append(BlockSpec(argument, pattern, axes))
    check_specs(gauge, specs, joined=joined)
    return tuple(specs)


def check_specs(
    gauge: str, specs: Sequence[BlockSpec], sizes: Sizes = (), joined: bool = False, partial: Sequence[str] = ()
) -> None:
    """Checks that all specs of a gauge have the same captures and the same named axes.

    Args:
      gauge: name for errors.
      specs: the specs of all arguments of the constructor.
      sizes: the constructor's `sizes`, as `frozen_sizes` returns them.
      joined: True if all captures belong to one copy, so that specs may have different ones.
      partial: arguments whose blocks may lack some of the named axes. If there are further arguments, the blocks of
        `partial` have no names but those of the further arguments.

    Raises:
      ValueError: a capture or a named axis that some of the specs lack, a name in `sizes` that no axes string has.

    >>> from gauge_optax.binding import BlockSpec, check_specs
    >>> up, down = BlockSpec("up", "{i}/up", "_ channel"), BlockSpec("down", "{i}/down", "channel _")
    >>> check_specs("rescale", [up, down])
    """
    captures = {spec: [f"{{{name}}}" for name in captures_of(gauge, spec.pattern)] for spec in specs}
    axes = {spec: _named_axes(gauge, spec) for spec in specs}
    for kind, table in (("capture", captures), ("axis", axes)):
        for spec, other in itertools.product(specs, specs):
            if joined if kind == "capture" else {spec.argument, other.argument} & set(partial):
                continue
            missing = [name for name in table[other] if name not in table[spec]]
            if missing:
                where = f"'{spec.pattern}'" if kind == "capture" else f"\"{spec.axes}\" of '{spec.pattern}'"
                raise binding_error(
                    gauge, f"dangling {kind} {missing[0]}, absent from {where}", ", ".join(table[spec]) or "none",
                    f"{', '.join(table[other])}, as in '{other.pattern}': \"{other.axes}\"",
                    f"write {missing[0]} in both, or in neither")
    whole = [spec for spec in specs if spec.argument not in partial]
    shared = {name for spec in whole for name in axes[spec]}
    for spec in specs if whole else ():
        for name in [name for name in axes[spec] if name not in shared][:1]:
            raise binding_error(
                gauge, f"dangling axis {name} in \"{spec.axes}\" of '{spec.pattern}'",
                f"a name that only `{spec.argument}` has", f"names of the other arguments: {', '.join(sorted(shared))}",
                f"write '_' in place of '{name}'")
    names = {part.name for spec in specs for part in parse_axes(gauge, spec.pattern, spec.axes).items} - {"_"}
    for name, _ in sizes:
        if name not in names:
            raise binding_error(
                gauge, f"unknown axis in sizes '{name}'", f"named axes: {', '.join(sorted(names)) or 'none'}",
                "names that an axes string has", f"drop '{name}' or correct it")


def _named_axes(gauge: str, spec: BlockSpec) -> list[str]:
    """Names of a spec's axes in order, without axes of which an integer selects one index."""
    parts = parse_axes(gauge, spec.pattern, spec.axes).items
    return [part.name for part in parts if part.name != "_" and part.pick is None]


def group_axes(gauge: str, specs: Sequence[BlockSpec], reserved: Sequence[str]) -> tuple[str, ...]:
    """The names of the axes that index an element of a gauge.

    They are the names in all specs, in order of first appearance, without the reserved ones.

    Args:
      gauge: name for errors.
      specs: the specs of all arguments of the constructor.
      reserved: names of axes on which the group acts, which do not index an element.

    Returns:
      The names; `Matched.named` is the same tuple.

    >>> from gauge_optax.binding import block_specs, group_axes
    >>> specs = block_specs("head_rotation", "blocks", {"qkv": "qkv=0 _ head basis"}, ("basis",))
    >>> group_axes("head_rotation", specs, ("basis",))
    ('head',)
    """
    names = (name for spec in specs for name in _named_axes(gauge, spec))
    return tuple(dict.fromkeys(name for name in names if name not in reserved))


def frozen_sizes(gauge: str, sizes: Mapping[str, int] | None) -> Sizes:
    """Checks the `sizes` argument of a gauge and makes it hashable.

    Args:
      gauge: name for errors.
      sizes: lengths by axis name, or None.

    Returns:
      Pairs of a name and a Python integer, sorted.

    Raises:
      ValueError: not a mapping of names to positive integers.

    >>> from gauge_optax.binding import frozen_sizes
    >>> frozen_sizes("head_rotation", {"qkv": 3, "head": 12})
    (('head', 12), ('qkv', 3))
    """
    if sizes is not None and not isinstance(sizes, Mapping):
        raise binding_error(
            gauge, "'sizes' is no mapping", f"sizes={sizes!r:.60}", "a mapping from axis names to lengths",
            'write sizes={"head": 12}')
    frozen = []
    for name, size in (sizes or {}).items():
        try:
            # `index` accepts NumPy's integers and rejects floats. It accepts bool too, which can only be a mistake.
            length = 0 if isinstance(size, bool) else operator.index(size)
        except TypeError:
            length = 0
        if not isinstance(name, str) or length < 1:
            raise binding_error(
                gauge, f"malformed size of '{name}'", repr(size), "a positive integer",
                'write the length of the axis, as in sizes={"head": 12}')
        frozen.append((name, length))
    return tuple(sorted(frozen))
