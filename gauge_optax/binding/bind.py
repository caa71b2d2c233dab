"""Binds a gauge to a concrete tree, from paths and shapes alone.

A gauge holds the `BlockSpec`s that the user wrote. It has one copy per combination of captures, such as `i=0`. `bind`
finds the leaves that the patterns match, and returns one `Matched` per copy, with the `Block`s of this copy.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding.axes import Site, parse_axes, solve_lengths
from gauge_optax.binding.leaves import Block, leaf_shape, overlap, resolve_block, shown_and_hidden
from gauge_optax.binding.paths import captures_of, hidden_match, match, natural_key, no_match
from gauge_optax.binding.specs import BlockSpec, Sizes, check_specs, group_axes
from gauge_optax.errors import binding_error, counted


class Matched(NamedTuple):
    """What the patterns of a gauge have matched for one copy of it, say for one layer: the blocks whose captures agree.

    Attributes:
      gauge: the name of the gauge.
      key: the captures, "i=0,j=k"; "" if the patterns have none. A gauge's elements are dicts with these keys.
      named: names of the axes that index an element, such as `head`, in order of first appearance. Reserved names, such
        as `basis`, are left out, and so are axes of which an integer selects one index.
      sizes: length of every named axis, including reserved names; for ranges, how many indices they select.
      blocks: the blocks in the order of the specs.
    """

    gauge: str
    key: str
    named: tuple[str, ...]
    sizes: Mapping[str, int]
    blocks: tuple[Block, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes that index an element."""
        return tuple(self.sizes[name] for name in self.named)

    def of_argument(self, *arguments: str) -> tuple[tuple[Block, ...], ...]:
        """Per argument of the constructor, its blocks."""
        return tuple(tuple(b for b in self.blocks if b.argument == argument) for argument in arguments)

    def require_as_many(self, argument: str, number: int) -> None:
        """Raises ValueError if a pattern of this argument, such as one with `**`, matches more or fewer leaves."""
        (blocks,) = self.of_argument(argument)
        if len(blocks) != number:
            paths = [block.path for block in blocks]
            raise binding_error(
                self.gauge, f"`{argument}` matches {counted(len(blocks), 'leaf', 'leaves')} in one layer",
                ", ".join(f"'{p}'" for p in paths[:3]), f"{number}, one for each that it belongs to",
                "write what counts layers as {i} in every pattern: 'blocks/{i}/bias' in place of '**/bias'")

    def require_named(self, *arguments: str) -> None:
        """Raises ValueError if a block of these arguments, which must be vectors, has an axis without a name."""
        for block in (b for blocks in self.of_argument(*arguments) for b in blocks):
            if "_" in block.labels:
                raise binding_error(
                    self.gauge, f"'{block.path}' has an axis without a name", f'"{block.axes}" in `{block.argument}`',
                    "a leaf whose axes all have names", "name every axis, or take the leaf that has no other axes")


def copy_key(specs: Sequence[BlockSpec], spec: BlockSpec, path: str) -> str | None:
    """Key of the copy of a gauge that the leaf at a path belongs to.

    Args:
      specs: all specs of the gauge; the key has the captures in the order of the first spec.
      spec: the spec that binds the path.
      path: normalised path.

    Returns:
      The key, None if the pattern does not match.

    >>> from gauge_optax.binding import block_specs, copy_key
    >>> specs = block_specs("rescale", "up", {"{i}/{j}/up": "_"})
    >>> copy_key(specs, specs[0], "3/k/up")
    'i=3,j=k'
    """
    captures = match("binding", spec.pattern, path)
    if captures is None:
        return None
    # In gauges with one copy for all layers, a spec may lack captures of the first one.
    first = captures_of("binding", specs[0].pattern)
    return ",".join(f"{name}={captures[name]}" for name in first if name in captures)


def bind(
    gauge: str,
    specs: tuple[BlockSpec, ...],
    sizes: Sizes,
    tree: Any,
    reserved: tuple[str, ...] = (),
    joined: bool = False,
    partial: tuple[str, ...] = (),
    apart: bool = False,
) -> tuple[Matched, ...]:
    """Finds the blocks of a gauge on a tree. The result is cached by paths and shapes.

    Args:
      gauge: name for errors.
      specs: the specs of all arguments of the constructor.
      sizes: the constructor's `sizes`, as `frozen_sizes` returns them.
      tree: arrays, tracers or ShapeDtypeStructs. Each may be in a box, such as an `nnx.Variable`.
      reserved: names of axes on which the group acts, such as `basis`; they do not index an element.
      joined: True if all captures belong to one copy, as for gauges that act on the residual stream of all layers.
      partial: arguments whose blocks may lack named axes.
      apart: True if every leaf is a copy of its own, so that one name can have different lengths in two leaves.

    Returns:
      A `Matched` per copy, in natural order of their captures (2 before 10).

    Raises:
      ValueError: a pattern without a leaf in some copy, a leaf that an `optax.MaskedNode` hides, wrong ranks, lengths
        that disagree or stay unknown, indices out of range, blocks that overlap, leaves that do not hold floating-point
        numbers.

    >>> from gauge_optax.binding import bind, block_specs
    >>> specs = block_specs("rescale", "up", {"{i}/up": "_ channel"})
    >>> found = bind("rescale", specs, (), {"b": {"up": jnp.ones((2, 3))}, "a": {"up": jnp.ones((2, 5))}})
    >>> [(copy.key, copy.named, copy.shape) for copy in found]
    [('i=a', ('channel',), (5,)), ('i=b', ('channel',), (3,))]
    """
    shown, hidden = shown_and_hidden(tree)
    # Every method of a gauge binds anew by this function. The tree of `update` may differ from that of `init` in its
    # boxes, and in the leaves that `optax.MaskedNode` hides. `_bind` has a cache by paths and shapes.
    leaves = tuple((path, leaf_shape(leaf)) for path, leaf in shown.items())
    found = _bind(gauge, tuple(specs), tuple(sizes), tuple(reserved), leaves, hidden, joined, partial, apart)
    # Dtypes are checked outside of the cache: they are not part of its key.
    for path in dict.fromkeys(block.path for copy in found for block in copy.blocks):
        dtype = getattr(shown[path], "dtype", None)
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise binding_error(
                gauge, f"not on real numbers: '{path}'", f"a leaf of {dtype}", "floating-point leaves",
                "leave it out of the gauge; keep the real and imaginary parts of complex weights as separate leaves")
    return found


@functools.lru_cache(maxsize=1024)
def _bind(
    gauge: str,
    specs: tuple[BlockSpec, ...],
    sizes: Sizes,
    reserved: tuple[str, ...],
    leaves: tuple[tuple[str, tuple[int, ...]], ...],
    hidden: tuple[str, ...],
    joined: bool,
    partial: tuple[str, ...],
    apart: bool,
) -> tuple[Matched, ...]:
    check_specs(gauge, specs, sizes, joined, partial)
    shapes = dict(leaves)
    paths_by_key: dict[str, list[list[str]]] = {}  # key of a copy -> per spec, the paths that it binds
    for k, spec in enumerate(specs):
        hits = {path: key for path in shapes if (key := copy_key(specs, spec, path)) is not None}
        for path, key in hits.items():
            paths_by_key.setdefault("" if joined else path if apart else key, [[] for _ in specs])[k].append(path)
        # A MaskedNode that certainly hides a leaf of the pattern is an error. One that only may hide a leaf is an error
        # if the pattern matches no leaf at all.
        masked = [p for p in hidden if (hit := hidden_match(gauge, spec.pattern, p)) and (hit[1] or not hits)]
        if masked:
            raise _hidden(gauge, f"MaskedNode hides a leaf of '{spec.pattern}'", masked)
        if not hits:
            rank = len(parse_axes(gauge, spec.pattern, spec.axes).groups)
            expected = f"one rank-{rank} leaf per block, axes \"{spec.axes}\""
            taken = {other.pattern for other in specs} - {spec.pattern}
            raise no_match(gauge, spec.pattern, shapes, rank, expected, hidden, taken)

    named, copies = group_axes(gauge, specs, reserved), []
    # Linen sorts `blocks_10` before `blocks_2`, so the order of the tree is not the order of the layers.
    for key in sorted(paths_by_key, key=natural_key):
        sites = []
        for spec, paths in zip(specs, paths_by_key[key], strict=True):
            if not paths:
                problem = f"no leaf for {key} matches '{spec.pattern}'"
                masked = [path for path in hidden if hidden_match(gauge, spec.pattern, path) is not None]
                if masked:
                    raise _hidden(gauge, problem, masked)
                present = ", ".join(itertools.islice(itertools.chain(*paths_by_key[key]), 3))
                raise binding_error(
                    gauge, problem, f"for {key} only {present}", "a leaf for every pattern in every copy",
                    "narrow the patterns; where layers differ in kind write one gauge each, in a Python loop")
            plan = parse_axes(gauge, spec.pattern, spec.axes)
            sites += [Site(spec.argument, path, spec.axes, shapes[path], plan) for path in paths]
        lengths, splits = solve_lengths(gauge, sites, dict(sizes))
        blocks = tuple(resolve_block(gauge, site, split) for site, split in zip(sites, splits, strict=True))
        names = dict.fromkeys(label for block in blocks for label in block.labels if label != "_")
        copies.append(Matched(gauge, key, named, {name: lengths[name] for name in names}, blocks))

    # If two blocks shared an entry, the gauge would move it twice, and its gradient would count twice.
    blocks_by_path: dict[str, list[Block]] = collections.defaultdict(list)
    for block in itertools.chain.from_iterable(copy.blocks for copy in copies):
        for other in blocks_by_path[block.path]:
            if overlap(other, block):
                raise binding_error(
                    gauge, f"overlapping blocks on '{block.path}'",
                    f"{other.argument} \"{other.axes}\" and {block.argument} \"{block.axes}\"",
                    "blocks that select different entries", "select with 'name=3' or 'name=0:4', or drop one")
        blocks_by_path[block.path].append(block)
    return tuple(copies)


def require_no_absent_leaf(gauge: str, specs: Sequence[BlockSpec], tree: Any) -> None:
    """Raises ValueError if a pattern of the gauge matches a leaf that is None, to explain a binding that failed.

    Args:
      gauge: name for errors.
      specs: the specs of all arguments.
      tree: any pytree.

    >>> from gauge_optax.binding import block_specs
    >>> from gauge_optax.binding.bind import require_no_absent_leaf
    >>> require_no_absent_leaf("rescale", block_specs("rescale", "up", {"up/bias": "channel"}), {"up": {"bias": None}})
    Traceback (most recent call last):
    ValueError: rescale: the leaf 'up/bias' is None
    ...
    """
    pairs = jax.tree.leaves_with_path(tree, is_leaf=lambda node: node is None)
    absent = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, leaf in pairs if leaf is None]
    for spec, path in itertools.product(specs, absent):
        # A pattern with `**` usually matches other leaves too, so that a missing one is no error.
        if "**" not in spec.pattern and match(gauge, spec.pattern, path) is not None:
            raise binding_error(
                gauge, f"the leaf '{path}' is None", "None, as a layer without a bias has", "an array",
                f"leave '{spec.pattern}' out of the gauge; where other layers have it, write one gauge for those")


def _hidden(gauge: str, problem: str, paths: Sequence[str]) -> ValueError:
    return binding_error(
        gauge, problem, f"MaskedNode at {', '.join(paths[:3])}", "every listed leaf in the same partition",
        "give each partition (optax.partition, optax.masked) its own gauge list, or its own axes, for its leaves")
