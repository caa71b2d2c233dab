"""Path patterns and named axes resolved to leaves: what a gauge means on a concrete tree.

A gauge holds `BlockSpec`s, what the user wrote. `bind` resolves them on a tree, from paths and shapes
alone, to `Instance`s: one per combination of captures, each a tuple of `Block`s (a leaf, its axes split,
selected and labelled). All of it is data; nothing here holds an array.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from gauge_optax.binding.axes import Site, parse_axes, solve_sizes
from gauge_optax.binding.blocks import Block, overlap, resolve_block
from gauge_optax.binding.paths import (
    binding_error,
    captures_of,
    hidden_match,
    leaf_shape,
    match,
    natural_key,
    nearest,
    shown_and_hidden,
)
from gauge_optax.binding.specs import BlockSpec, Sizes, check_specs, group_axes


@dataclasses.dataclass(frozen=True)
class Instance:
    """One copy of the gauge: the blocks whose captures agree.

    Attributes:
      key: the captures, "i=0,j=k"; "" without any.
      blocks: in the binding's order.
      sizes: length of every named axis, reserved ones included; for a range, the range's.
    """

    key: str
    blocks: tuple[Block, ...]
    sizes: tuple[tuple[str, int], ...]

    def shape(self, names: Sequence[str]) -> tuple[int, ...]:
        """Lengths of the named axes, in that order."""
        sizes = dict(self.sizes)
        return tuple(sizes[name] for name in names)


@dataclasses.dataclass(frozen=True)
class Binding:
    """A gauge resolved on a tree.

    Attributes:
      named: the group's axes, in order of first appearance, without reserved and integer-selected names.
      instances: in natural order of their captures.
    """

    named: tuple[str, ...]
    instances: tuple[Instance, ...]


def instance_key(specs: Sequence[BlockSpec], spec: BlockSpec, path: str) -> str | None:
    """Key of the instance that a path belongs to.

    Args:
      specs: all specs of the gauge; the first gives the order of captures.
      spec: the one that binds the path.
      path: normalised path.

    Returns:
      The key, None if the pattern does not match.

    >>> from gauge_optax.binding import block_specs, instance_key
    >>> specs = block_specs("rescale", "up", {"{i}/{j}/up": "_"})
    >>> instance_key(specs, specs[0], "3/k/up")
    'i=3,j=k'
    """
    captures = match("binding", spec.pattern, path)
    if captures is None:
        return None
    order = captures_of("binding", specs[0].pattern)
    return _key(order, [captures[name] for name in order])


def _key(order: Sequence[str], values: Sequence[str]) -> str:
    return ",".join(f"{name}={value}" for name, value in zip(order, values, strict=True))


def bind(
    gauge: str,
    specs: tuple[BlockSpec, ...],
    sizes: tuple[tuple[str, int], ...],
    tree: Any,
    reserved: tuple[str, ...] = (),
) -> Binding:
    """Resolves a gauge's specs on a tree; cached by paths and shapes.

    Args:
      gauge: name for errors.
      specs: all roles together.
      sizes: frozen `sizes`.
      tree: arrays, tracers, ShapeDtypeStructs, boxed or bare.
      reserved: names that are no axes of the group.

    Returns:
      The binding.

    Raises:
      ValueError: a pattern without a leaf in some instance, a hidden leaf, wrong ranks, lengths that disagree
        or stay unknown, indices out of range, blocks that overlap, leaves that are not of floating-point numbers.

    >>> from gauge_optax.binding import bind, block_specs
    >>> specs = block_specs("rescale", "up", {"{i}/up": "_ channel"})
    >>> binding = bind("rescale", specs, (), {"b": {"up": jnp.ones((2, 3))}, "a": {"up": jnp.ones((2, 5))}})
    >>> binding.named, [(instance.key, instance.sizes) for instance in binding.instances]
    (('channel',), [('i=a', (('channel', 5),)), ('i=b', (('channel', 3),))])
    """
    shown, hidden = shown_and_hidden(tree)
    leaves = tuple((path, leaf_shape(leaf)) for path, leaf in shown.items())
    binding = _bind(gauge, tuple(specs), tuple(sizes), tuple(reserved), leaves, hidden)
    _check_real(gauge, binding, shown)
    return binding


_Captures = tuple[str, ...]
_Found = dict[_Captures, list[list[str]]]


@functools.lru_cache(maxsize=1024)
def _bind(
    gauge: str,
    specs: tuple[BlockSpec, ...],
    sizes: Sizes,
    reserved: tuple[str, ...],
    leaves: tuple[tuple[str, tuple[int, ...]], ...],
    hidden: tuple[str, ...],
) -> Binding:
    check_specs(gauge, specs, sizes)
    shapes = dict(leaves)
    order = captures_of(gauge, specs[0].pattern)
    found = _find(gauge, specs, order, shapes, hidden)
    instances = tuple(
        _instance(gauge, specs, dict(sizes), _key(order, values), found[values], shapes)
        for values in sorted(found, key=natural_key)
    )
    _check_overlap(gauge, [block for instance in instances for block in instance.blocks])
    return Binding(group_axes(gauge, specs, reserved), instances)


def _find(
    gauge: str,
    specs: Sequence[BlockSpec],
    order: _Captures,
    shapes: Mapping[str, tuple[int, ...]],
    hidden: Sequence[str],
) -> _Found:
    """Per instance and spec, the paths that match; complete, or it raises."""
    found: _Found = {}
    for k, spec in enumerate(specs):
        hits = [(path, hit) for path in shapes if (hit := match(gauge, spec.pattern, path)) is not None]
        for path, captures in hits:
            values = tuple(captures[name] for name in order)
            found.setdefault(values, [[] for _ in specs])[k].append(path)
        _check_hidden(gauge, spec, hidden, sure=bool(hits))
        if not hits:
            raise _no_match(gauge, spec, shapes, hidden)
    for values in sorted(found, key=natural_key):
        for spec, paths in zip(specs, found[values], strict=True):
            if not paths:
                raise _missing(gauge, spec, _key(order, values), found[values], hidden)
    return found


def _check_hidden(gauge: str, spec: BlockSpec, hidden: Sequence[str], sure: bool) -> None:
    """Raises where a MaskedNode hides a leaf of a pattern; one that only may counts when nothing matches."""
    hits = [(path, hit) for path in hidden if (hit := hidden_match(gauge, spec.pattern, path)) is not None]
    paths = [path for path, (_, certain) in hits if certain or not sure]
    if paths:
        raise _hidden(gauge, f"MaskedNode hides a leaf of '{spec.pattern}'", paths)


def _hidden(gauge: str, problem: str, paths: Sequence[str]) -> ValueError:
    return binding_error(
        gauge, problem, f"MaskedNode at {', '.join(paths[:3])}",
        "every block of the gauge in the same partition",
        "give each partition (optax.partition, optax.masked) its own gauge list, "
        "with the gauges whose leaves it holds")


def _no_match(
    gauge: str, spec: BlockSpec, shapes: Mapping[str, tuple[int, ...]], hidden: Sequence[str]
) -> ValueError:
    rank = len(parse_axes(gauge, spec.pattern, spec.axes).groups)
    near = nearest(spec.pattern, shapes, rank)
    found = "nearest " + ", ".join(f"{path} {shapes[path]}" for path, _ in near) if near else "no leaves"
    remedy = f"write '{near[0][1]}'" if near else "pass the parameters that the gauge was written for"
    if hidden:
        found += f", and MaskedNode at {', '.join(hidden[:3])}"
        remedy += ", or give each partition its own gauge list"
    expected = f"one rank-{rank} leaf per block, axes \"{spec.axes}\""
    return binding_error(gauge, f"no leaf matches '{spec.pattern}'", found, expected, remedy)


def _missing(
    gauge: str, spec: BlockSpec, key: str, paths: Sequence[Sequence[str]], hidden: Sequence[str]
) -> ValueError:
    present = [path for several in paths for path in several]
    problem = f"no leaf for {key} matches '{spec.pattern}'"
    masked = [path for path in hidden if hidden_match(gauge, spec.pattern, path) is not None]
    if masked:
        return _hidden(gauge, problem, masked)
    return binding_error(
        gauge, problem, f"for {key} only {', '.join(present[:3])}",
        "a leaf for every pattern in every instance",
        "narrow the patterns; where layers differ in kind write one gauge each, in a Python loop")


def _instance(
    gauge: str,
    specs: Sequence[BlockSpec],
    sizes: Mapping[str, int],
    key: str,
    found: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Instance:
    sites = [
        (spec.role, Site(path, spec.axes, shapes[path], parse_axes(gauge, spec.pattern, spec.axes)))
        for spec, paths in zip(specs, found, strict=True)
        for path in paths
    ]
    known = solve_sizes(gauge, [site for _, site in sites], sizes)
    blocks = tuple(resolve_block(gauge, role, site, known) for role, site in sites)
    names = dict.fromkeys(label for block in blocks for label in block.labels if label != "_")
    return Instance(key, blocks, tuple((name, known[name]) for name in names))


def _check_real(gauge: str, binding: Binding, leaves: Mapping[str, Any]) -> None:
    for path in dict.fromkeys(block.path for instance in binding.instances for block in instance.blocks):
        dtype = getattr(leaves[path], "dtype", None)
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise binding_error(
                gauge, f"not on real numbers: '{path}'", f"a leaf of {dtype}", "floating-point leaves",
                "leave it out of the gauge; of complex weights, keep real and imaginary parts as leaves of their own",
            )  # fmt: skip


def _check_overlap(gauge: str, blocks: Sequence[Block]) -> None:
    by_path: dict[str, list[Block]] = {}
    for block in blocks:
        by_path.setdefault(block.path, []).append(block)
    for a, b in itertools.chain.from_iterable(itertools.combinations(same, 2) for same in by_path.values()):
        found = f"{a.role} \"{a.axes}\" and {b.role} \"{b.axes}\""
        if overlap(a, b):
            raise binding_error(
                gauge, f"overlapping blocks on '{a.path}'", found,
                "blocks that select different entries", "select with 'name=3' or 'name=0:4', or drop one")
