"""Calls of gauge constructors as data. A call can make its gauge, be written as source, and be merged with others.

Calls for several layers are merged into one, whose paths have a capture such as `{i}` in place of a layer's number.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gauge_optax.binding import leaf_shape, leaves_by_path, match
from gauge_optax.binding.axes import AxisItem, parse_axes
from gauge_optax.errors import binding_error
from gauge_optax.gauges.absorption import bias_absorption
from gauge_optax.gauges.embedding_shift import embedding_shift
from gauge_optax.gauges.gauge import Gauge
from gauge_optax.gauges.linear import head_linear
from gauge_optax.gauges.permutation import permutation
from gauge_optax.gauges.read_shift import norm_read_shift
from gauge_optax.gauges.residual import residual_rotation
from gauge_optax.gauges.rope_linear import rope_linear
from gauge_optax.gauges.rotation import head_rotation
from gauge_optax.gauges.scale import multiplier_balance, norm_scale, rescale, residual_scale, scale_invariant
from gauge_optax.gauges.shift import key_bias, logit_shift, norm_write_shift
from gauge_optax.gauges.torus import rope_torus
from gauge_optax.parts.heads import BASIS, PLANE

CONSTRUCTORS: Mapping[str, Callable[..., Gauge]] = {
    constructor.__name__: constructor
    for constructor in (
        bias_absorption, embedding_shift, head_linear, head_rotation, key_bias, logit_shift, multiplier_balance,
        norm_read_shift, norm_scale, norm_write_shift, permutation, rescale, residual_rotation, residual_scale,
        rope_linear, rope_torus, scale_invariant,
    )
}

# The order in which a report lists gauges: first those that optimizers take, then those that would slow a step down.
TRAINING = ("norm_scale", "scale_invariant", "head_rotation", "head_linear", "rope_torus", "rope_linear", "rescale",
            "logit_shift")
REST = ("residual_rotation", "norm_read_shift", "norm_write_shift", "embedding_shift", "key_bias", "bias_absorption")

Axes = str | tuple[str, ...]
Roles = Mapping[str, Mapping[str, Axes]]
CAPTURES = ("{i}", "{j}", "{k}", "{l}", "{m}", "{n}")
_NUMBER = re.compile("([0-9]+)")
_RANGE_END = re.compile("(=(?=[0-9]+:)|:|/)([0-9]+)")  # the numbers in "=4:16" and "=4:16/64"


def _listed(sizes: Mapping[str, Any]) -> str:
    """Lengths of axes as text, such as "basis=4, head=2"."""
    return ", ".join(f"{name}={n}" for name, n in sorted(sizes.items()))


def template(path: str) -> str:
    """A path with `#` in place of its numbers: equal for the same leaf of two layers.

    >>> template("layers/11/mlp/w2")
    'layers/#/mlp/w#'
    """
    return _NUMBER.sub("#", path)


def with_captures(paths: Sequence[str], capture: Callable[[tuple[str, ...]], str]) -> str:
    """One pattern for paths that differ in numbers alone, with a capture for each number that differs.

    Args:
      paths: at least one.
      capture: called for each position at which the paths' numbers differ, with the number of every path there;
        returns the capture.

    >>> with_captures(["layer_0/w1", "layer_1/w1"], lambda numbers: "{i}")
    'layer_{i}/w1'
    """
    places = zip(*map(_NUMBER.split, paths), strict=True)
    return "".join(place[0] if len(set(place)) == 1 else capture(place) for place in places)


def joined(before: Axes | None, axes: Axes) -> Axes:
    """Appends axes strings to those that a path already has: `before`, which is None if it has none.

    >>> joined("_ head=0", ("_ head=1", "_ head=2")), joined(None, "_ head")
    (('_ head=0', '_ head=1', '_ head=2'), '_ head')
    """
    if before is None:
        return axes
    return (*((before,) if isinstance(before, str) else before), *((axes,) if isinstance(axes, str) else axes))


_BASIS = re.compile(rf"\b{BASIS}\b")
_TURNING = {"head_linear": "head_rotation", "rope_linear": "rope_torus"}


@dataclasses.dataclass(frozen=True)
class Call:
    """A gauge's constructor with its arguments.

    Attributes:
      kind: the constructor's name.
      roles: name of an argument that takes blocks, such as `up` → path or pattern → axes.
      options: other keyword arguments.
      sizes: name → length of each named axis whose length does not follow from shapes, such as `head` in
        `(head basis)`.
      norms: for a rotation of the residual stream, the calls of the norms' gauges, which are its argument `norms`.
      trained: the calls that optimizers take in place of this one (`readable`); () if they take this one.

    >>> call = Call("head_linear", {"left": {"q": "_ basis"}, "right": {"k": "_ basis"}})
    >>> call.turning().gauge()
    go.head_rotation(
      blocks={'q': '_ basis', 'k': '_ basis'},
    )
    """

    kind: str
    roles: Roles
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    norms: tuple[Call, ...] = ()
    trained: tuple[Call, ...] = ()

    @property
    def paths(self) -> list[str]:
        """Paths or patterns of all arguments in `roles`."""
        return [path for blocks in self.roles.values() for path in blocks]

    def within(self, other: Call) -> bool:
        """Whether the other call has the same kind, and all paths of this call."""
        return self.kind == other.kind and set(self.paths) <= set(other.paths)

    def gauge(self) -> Gauge:
        """The gauge that the call makes."""
        norms = {"norms": [norm.gauge() for norm in self.norms]} if self.norms else {}
        return CONSTRUCTORS[self.kind](**self.roles, **self.options, **norms, sizes=self.sizes or None)

    def turning(self) -> Call:
        """If the gauge's elements are invertible matrices, the call for the rotations among them; else this call."""
        if self.kind not in _TURNING:
            return self
        blocks: dict[str, Axes] = {}
        for path, axes in (item for role in self.roles.values() for item in role.items()):
            blocks[path] = joined(blocks.get(path), axes)
        return dataclasses.replace(self, kind=_TURNING[self.kind], roles={"blocks": blocks})

    def connected(self, params: Any) -> Call | None:
        """The call for the elements that are connected with the identity; None if no gauge has exactly these.

        A factor of `norm_scale` may be negative, and an element of `head_rotation` may be a reflection. Both are left
        out of the result.

        Args:
          params: the tree that the gauge binds to; shapes are enough.

        >>> call = Call("head_rotation", {"blocks": {"re_and_im": "_ basis"}})
        >>> call.connected({"re_and_im": jnp.ones((3, 2))}).kind
        'rope_torus'
        """
        if self.kind == "norm_scale":
            return Call("rescale", {"up": self.roles["scale"], "down": self.roles["into"]}, {}, self.sizes)
        if self.kind != "head_rotation":
            return None
        blocks = [block for _, _, blocks in bound_copies(self.gauge(), params) for block in blocks]
        planar = all(block.view_shape[block.labels.index(BASIS)] == 2 for block in blocks)
        return dataclasses.replace(self, kind="rope_torus", options={"pairing": "half"}) if planar else None

    def readable(self, params: Any) -> tuple[Call, ...]:
        """Calls for those elements that the leaves determine; () if they determine all elements.

        Two vectors, or two matrices with fewer rows than columns, do not determine the matrix S of a `head_linear`.
        They do determine a rotation that turns both, and one factor, the ratio of their sizes.

        Args:
          params: the tree that the gauge binds to; shapes are enough.

        >>> vectors = Call("head_linear", {"left": {"a": "basis"}, "right": {"b": "basis"}})
        >>> [call.roles for call in vectors.readable({"a": jnp.ones(3), "b": jnp.ones(3)})]
        [{'blocks': {'a': 'basis', 'b': 'basis'}}, {'up': {'a': ('_',)}, 'down': {'b': ('_',)}}]
        """
        copies = bound_copies(self.gauge(), params) if self.kind == "head_linear" else []
        for _, sizes, blocks in copies:
            rows = collections.Counter[str]()
            for block in blocks:
                rows[block.argument] += block.entries((*sizes, BASIS))
            if max(rows.values()) < blocks[0].view_shape[blocks[0].labels.index(BASIS)]:
                break
        else:
            return ()
        up, down = ({path: tuple(_BASIS.sub("_", text) for text in joined((), axes)) for path, axes in role.items()}
                    for role in self.roles.values())
        scale = Call("rescale", {"up": up, "down": down}, {}, {n: k for n, k in self.sizes.items() if n != BASIS})
        try:
            scale.gauge().dim(params)
        except ValueError:  # the scale would leave two parts of one axis free (`_`), which no axes string can express
            return (self.turning(),)
        return self.turning(), scale

    def rebound(self, params: Any, sizes: Mapping[str, int]) -> Call:
        """The call for a tree whose axes have other lengths.

        Args:
          params: that tree; shapes are enough.
          sizes: name of an axis in `Call.sizes` → its length in that tree. An axis that is not given keeps its length.

        Raises:
          ValueError: an axes string has a range, such as `head=0:4`, or a length does not fit the tree.
        """
        ranges = [axes for blocks in self.roles.values() for axes in blocks.values() if ":" in str(axes)]
        if ranges:
            raise binding_error(
                self.kind, f"a range that belongs to another instance on '{self.paths[0]}'", str(ranges[0]),
                "axes without ranges", "call discover on this instance, or write the range by hand")
        stated = {name: sizes.get(name, n) for name, n in self.sizes.items()}
        small = {name: n for name, n in self.sizes.items() if name not in sizes and not self._picked(name)}
        for path, text, shape, parts, length in self._groups(params) if small else ():
            size = math.prod(stated.get(part.name, 1) for part in parts)
            whole = all(part.name in stated for part in parts)
            if length != size if whole else length % size:
                needed = {**dict.fromkeys(small, "..."), **self.lengths(params, sizes)}
                raise binding_error(
                    "rebind", f"lengths of the smaller instance do not fit '{path}': {_listed(small)}",
                    f"axes \"{text}\" on shape {shape}", f"lengths in the larger tree of {', '.join(sorted(needed))}",
                    f"write rebind(params, {_listed(needed)})")
        call = self._resized(lambda name, n: sizes.get(name, n))
        call.gauge().dim(params)
        return call

    def _resized(self, length: Callable[[str, int], int]) -> Call:
        """The call with `length(name, old length)` in place of every length in `sizes`, also of its norms."""
        norms = tuple(norm._resized(length) for norm in self.norms)
        sizes = {name: length(name, n) for name, n in self.sizes.items()}
        return dataclasses.replace(self, sizes=sizes, norms=norms)

    def lengths(self, params: Any, sizes: Mapping[str, int]) -> dict[str, int]:
        """Completes lengths: adds those of axes in `Call.sizes` that follow from the given ones and a tree's shapes.

        If the length of `head` is given, that of `basis` follows from a leaf with the axis `(head basis)`.

        Args:
          params: a tree; shapes are enough.
          sizes: axis name → length, also of named axes that are not in `Call.sizes`.
        """
        out = dict(sizes)
        for _, _, _, parts, length in self._groups(params):
            given = [self.sizes[part.name] if part.pick is not None else out.get(part.name) for part in parts]
            left = [part.name for part, n in zip(parts, given, strict=True) if n is None]
            size = math.prod(n for n in given if n is not None)
            if len(left) == 1 and left[0] in self.sizes and size and length % size == 0:
                out[left[0]] = length // size
        return out

    def _groups(self, params: Any) -> Iterator[tuple[str, str, tuple[int, ...], tuple[AxisItem, ...], int]]:
        """Yields, for each axis of a leaf that is written as parts, such as `(a b)`, a tuple of five items.

        They are the path or pattern, the axes string, the leaf's shape, the parts, and the axis' length.
        """
        leaves = leaves_by_path(params)
        for role in self.roles.values():
            for pattern, axes in role.items():
                shapes = [leaf_shape(x) for path, x in leaves.items() if match(self.kind, pattern, path) is not None]
                for text in joined((), axes):
                    groups = parse_axes(self.kind, pattern, text).groups
                    for shape in shapes:
                        pairs = zip(groups, shape, strict=False)  # for a leaf of another rank, binding raises an error
                        yield from ((pattern, text, shape, parts, n) for parts, n in pairs if len(parts) > 1)

    def _picked(self, name: str) -> bool:
        """Whether the call takes single indices of an axis, as in "qkv=0". Larger models have as many indices there."""
        return any(f"{name}=" in str(axes) for role in self.roles.values() for axes in role.values())

    def scaled(self, full: Callable[[int], int]) -> Call:
        """The call for an instance of another size: changes the lengths in `sizes` and the numbers in ranges.

        Args:
          full: maps a length, or an end of a range, of this instance to that of the other instance.
        """

        def ends(match: re.Match[str]) -> str:
            return match[1] + str(full(int(match[2])))

        def axes(text: Axes) -> Axes:
            return tuple(map(axes, text)) if isinstance(text, tuple) else _RANGE_END.sub(ends, text)  # type: ignore[arg-type]

        roles = {role: {path: axes(text) for path, text in blocks.items()} for role, blocks in self.roles.items()}
        norms = tuple(norm.scaled(full) for norm in self.norms)
        return dataclasses.replace(self, roles=roles, norms=norms)._resized(lambda _, n: full(n))

    def alternatives(self) -> Iterator[Call]:
        """Calls of the same gauge with other anchors: the anchor is the first block, if an element can be read from it.

        Each block of the first argument comes first in one call. If the two arguments can be exchanged, each block of
        the second argument also comes first in one call.
        """
        sides = [self]
        if self.kind in ("rescale", "norm_scale") and not self.options:
            one, other = self.roles.values()
            sides.append(Call("rescale", {"up": other, "down": one}, {}, self.sizes))
        if self.kind in ("head_linear", "rope_linear"):
            left, right = self.roles.values()
            sides.append(dataclasses.replace(self, roles={"left": right, "right": left}))
        for call in sides:
            first, blocks = next(iter(call.roles.items()))
            for path in blocks:
                yield dataclasses.replace(call, roles={**call.roles, first: {path: blocks[path], **blocks}})


def bound_copies(gauge: Any, params: Any) -> list[tuple[str, dict[str, int], list[Any]]]:
    """For each copy of a gauge on a tree: its key, the lengths of its named axes, and its blocks.

    A gauge has one copy per value of the captures in its paths, such as one per layer. A gauge that a user defined by
    its action has one copy.

    >>> gauge = go.rescale({"{i}/up": "_ channel"}, {"{i}/down": "channel _"})
    >>> tree = {k: {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))} for k in "01"}
    >>> [(key, sizes) for key, sizes, blocks in bound_copies(gauge, tree)]
    [('i=0', {'channel': 3}), ('i=1', {'channel': 3})]
    """
    (copies,) = gauge._bound(params).copies
    found = []
    for copy in copies:
        sizes = {name: n for name, n in zip(copy.named, copy.shape, strict=True) if name != PLANE}
        found.append((copy.key, sizes, list(copy.blocks)))
    return found


def captured_blocks(blocks: Mapping[str, Axes], leaves: Iterable[str] = ()) -> dict[str, Axes]:
    """Replaces paths that differ in one number and have the same axes by one pattern with a capture.

    Args:
      blocks: path → axes.
      leaves: all paths of the tree. A pattern that would match others of them is not taken.

    >>> captured_blocks({"layer_0/w": "basis _", "layer_1/w": "basis _", "head": "basis _"})
    {'layer_{i}/w': 'basis _', 'head': 'basis _'}
    >>> captured_blocks({"w1": "basis _", "w3": "basis _"}, ["w1", "w2", "w3"])
    {'w1': 'basis _', 'w3': 'basis _'}
    """
    groups: dict[tuple[str, Axes], list[str]] = {}
    for path, axes in blocks.items():
        groups.setdefault((template(path), axes), []).append(path)
    out: dict[str, Axes] = {}
    for (_, axes), paths in groups.items():
        pattern = with_captures(paths, lambda numbers: "{i}")
        fits = pattern.count("{i}") == 1 and not any(
            path not in paths and match("discover", pattern, path) is not None for path in leaves)
        out |= dict.fromkeys([pattern] if fits else paths, axes)
    return out


def merge_layers(calls: Iterable[Call], same: Callable[[Call, list[Call]], bool]) -> list[tuple[Call, list[Call]]]:
    """Merges calls that differ in the numbers of their paths alone into one call with captures.

    Args:
      calls: calls whose paths have no captures.
      same: tells whether a merged call binds what the calls that it replaces bind, and nothing else.

    Returns:
      Pairs of a call and the calls that it replaces. A call that could not be merged replaces itself alone.

    >>> calls = [Call("logit_shift", {"blocks": {f"{k}/head": "_ vocab"}}) for k in range(2)]
    >>> [(call, merged)] = merge_layers(calls, lambda call, group: True)
    >>> call.paths, len(merged)
    (['{i}/head'], 2)
    """
    groups: dict[Any, list[Call]] = {}
    for call in calls:
        roles = tuple(
            (role, tuple((template(path), axes) for path, axes in _ordered(blocks).items()))
            for role, blocks in call.roles.items()
        )
        # A rotation of a stream is the same for all values of a capture. Two streams turn by two rotations, so that
        # their calls must not be merged.
        apart = id(call) if call.kind == "residual_rotation" and "per_layer" not in call.options else 0
        norms = map(id, call.norms)
        key = (call.kind, roles, *call.options.items(), *sorted(call.sizes.items()), *norms, apart)
        groups.setdefault(key, []).append(call)
    out = []
    for group in groups.values():
        merged = _captured(group) if len(group) > 1 else None
        out += [(merged, group)] if merged is not None and same(merged, group) else [(call, [call]) for call in group]
    return out


def _ordered(blocks: Mapping[str, Axes]) -> dict[str, Axes]:
    """Blocks sorted by their paths, in which numbers count by value: layer 2 is before layer 10."""
    return dict(sorted(blocks.items(), key=lambda item: (template(item[0]), list(map(int, _NUMBER.findall(item[0]))))))


def _captured(group: Sequence[Call]) -> Call | None:
    """One call for calls that differ in numbers alone; None if captures cannot express how they differ.

    Whether the patterns also match other paths is not tested here, but by `same` in `merge_layers`.
    """
    tables = [[path for blocks in call.roles.values() for path in _ordered(blocks)] for call in group]
    captures: dict[tuple[str, ...], str] = {}  # the numbers at one position of a path, one per call → their capture
    patterns, varying, names = dict[str, str](), list[set[tuple[str, ...]]](), iter(CAPTURES)

    def capture(numbers: tuple[str, ...]) -> str:
        varying[-1].add(numbers)
        if numbers not in captures:
            captures[numbers] = next(names, "")
        return captures[numbers]

    for paths in zip(*tables, strict=True):
        varying.append(set())
        patterns[paths[0]] = with_captures(paths, capture)
    # A merged call needs enough captures, each of them in every pattern, and as many patterns as there were paths.
    roles = {role: {patterns[p]: axes for p, axes in blocks.items()} for role, blocks in group[0].roles.items()}
    lost = any(len(roles[role]) < len(blocks) for role, blocks in group[0].roles.items())
    if "" in captures.values() or lost or any(slots != set(captures) for slots in varying):
        return None
    return dataclasses.replace(group[0], roles=roles)
