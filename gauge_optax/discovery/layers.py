"""Searches three of many layers that are alike, and extends what is found to all of them.

Layers with equal shapes may still be treated differently by the function. They are alike if every further layer adds
the same operations to it. A function that fixes the number of its layers cannot be called on a tree with fewer. From
such a function, the operations of the other layers are cut out (`cut`).
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.discovery.axes import LeafAxes
from gauge_optax.discovery.calls import Axes, Call
from gauge_optax.discovery.cut import Said, Unlike, Value, without_layers
from gauge_optax.discovery.interpret import equations, jaxprs_of
from gauge_optax.discovery.trace import traced_once

_KEPT = 3  # layers: a first one, a last one and one between them
_NUMBERED = re.compile("([^0-9]*)([0-9]+)([^0-9]*)")
_Operations = collections.Counter[tuple[Hashable, ...]]


class _Layers(NamedTuple):
    """One list of layers, whose paths differ in a number alone.

    Attributes:
      before: the text of the paths in front of the number.
      behind: the text of the paths behind the number, up to the next slash.
    """

    before: str
    behind: str

    @classmethod
    def at(cls, keys: Any, name: tuple[str, str]) -> _Layers:
        """The layers in the node at the tree path `keys`. `name`: the texts before and behind the number in their keys.
        """
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        return cls(f"{path}/{name[0]}" if path else name[0], name[1])

    def pattern(self) -> re.Pattern[str]:
        """A pattern that finds a layer's number in a path, or in a sentence with paths."""
        before, behind = map(re.escape, self)
        return re.compile(rf"(?<![\w/])({before})[0-9]+({behind})(?![\w])")


@dataclasses.dataclass(frozen=True)
class Shallow:
    """A function with fewer layers, and its tree.

    Attributes:
      fn: function of the tree and a batch.
      tree: the parameters, with three layers of each list.
      patterns: one per list that is shortened: it finds a layer's number in a path.

    >>> short = Shallow(lambda tree, x: x, {}, (re.compile("(layer_)[0-9]+(/)"),))
    >>> short.with_captures("layer_0/w"), short.names_one("head/w")
    ('layer_{i}/w', False)
    """

    fn: Callable[[Any, Any], Any]
    tree: Any
    patterns: tuple[re.Pattern[str], ...]

    def names_one(self, text: str) -> bool:
        """Whether a path, or a sentence with paths, names a single layer."""
        return any(pattern.search(text) for pattern in self.patterns)

    def of_all_layers(self, call: Call, params: Any) -> Call:
        """Extends a call from the kept layers to all layers; raises `Unlike` if it moves some layers and not others.

        Args:
          call: a call on the shallow tree. Paths with captures stay as they are. If a leaf occurs three times, once in
            each kept layer, the result has this leaf of every layer.
          params: the whole tree.
        """
        of_pattern = dict[str, list[str]]()
        for path in leaves_by_path(params):
            of_pattern.setdefault(self.with_captures(path), []).append(path)
        roles = {}
        for role, blocks in call.roles.items():
            counts = collections.Counter((self.with_captures(path), axes) for path, axes in blocks.items())
            # A search of all layers would list kernels before scales, each sorted by path. To get the same order here,
            # blocks are divided into runs of ascending paths, layers are added to each run, and each run is sorted.
            runs = [dict[str, Axes]()]
            for before, (path, axes) in zip(("", *blocks), blocks.items(), strict=False):
                if path < before:
                    runs.append({})
                if not self.names_one(path):
                    runs[-1][path] = axes
                elif counts[self.with_captures(path), axes] == _KEPT:
                    runs[-1] |= dict.fromkeys(of_pattern[self.with_captures(path)], axes)
                else:
                    raise Unlike
            roles[role] = {path: run[path] for run in runs for path in sorted(run)}
        norms = tuple(self.of_all_layers(norm, params) for norm in call.norms)
        return dataclasses.replace(call, roles=roles, norms=norms)

    def with_captures(self, text: str) -> str:
        """A path, or a sentence with paths, with `{i}` in place of a layer's number."""
        for pattern in self.patterns:
            text = pattern.sub(r"\1{i}\2", text)
        return text

    def of_all(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Texts, each a list of paths, with `{i}` in place of layers' numbers; equal ones are returned once.

        Raises:
          Unlike: a path occurs for some of the kept layers and not for all.
        """
        counts = collections.Counter(self.with_captures(part) for text in texts for part in text.split(", "))
        if any(self.with_captures(part) != part and counts[self.with_captures(part)] % _KEPT
               for text in texts for part in text.split(", ")):
            raise Unlike
        return tuple(dict.fromkeys(
            ", ".join(dict.fromkeys(map(self.with_captures, text.split(", ")))) for text in texts))

    def axes(self, axes: LeafAxes, params: Any) -> LeafAxes:
        """The axes of the leaves of all layers; raises `Unlike` if the kept layers differ, or are undecided."""
        if any(map(self.names_one, (*axes.neurons, *axes.embeddings, *axes.undecided))):
            raise Unlike
        readings = {self.with_captures(path): reading for path, reading in axes.readings.items()}
        captured = {path: self.with_captures(path) for path in leaves_by_path(params)}
        named = {path: readings[key] for path, key in captured.items() if key in readings}
        return dataclasses.replace(axes, readings=named)


def shallower(fn: Callable[[Any, Any], Any], params: Any, batch: Any) -> Shallow | None:
    """A function with three layers in place of more, if it treats its layers alike.

    Args:
      fn: function of params and a batch.
      params: any tree. Layers are the items of a list or tuple, or of a dict whose keys differ in one number.
      batch: what fn is called on.

    Returns:
      The shorter tree, with a function of it: fn if it takes that tree, else the operations of fn that belong to three
      layers. None if no list has more than three layers that are alike, or if fn treats some of them differently.

    >>> tree = [{"a": jnp.ones((2, 2))} for _ in range(5)]
    >>> def fn(layers, x):
    ...     for layer in layers:
    ...         x = jnp.tanh(x @ layer["a"])
    ...     return x
    >>> len(shallower(fn, tree, jnp.ones(2)).tree)
    3
    """
    lists = _lists(params)
    if not lists:
        return None
    found = Shallow(fn, _cut(params, dict.fromkeys(lists, _KEPT)), tuple(name.pattern() for name in lists))
    # With layers' numbers replaced by `{i}`, both trees must have the same paths. Otherwise a pattern missed a number.
    named = [set(map(found.with_captures, leaves_by_path(tree))) for tree in (params, found.tree)]
    if named[0] != named[1]:
        return None
    return found if _takes_fewer(fn, params, batch, lists) else _counting(found, params, batch, list(lists.values()))


def _takes_fewer(fn: Callable[[Any, Any], Any], params: Any, batch: Any, lists: Mapping[_Layers, int]) -> bool:
    """Whether a function takes trees with fewer layers, and every further layer adds the same operations."""
    short = dict.fromkeys(lists, _KEPT)
    try:
        least, expected = _operations(fn, _cut(params, short), batch), _operations(fn, params, batch)
        for name, count in lists.items():
            one_more = _operations(fn, _cut(params, {**short, name: _KEPT + 1}), batch)
            one_more.subtract(least)
            expected.subtract({operation: (count - _KEPT) * n for operation, n in one_more.items()})
    except Exception:  # whatever the user's code raises about a layer that is missing
        return False
    expected.subtract(least)
    return not any(expected.values())


# Functions that fix the number of layers ------------------------------------------------------------------


def _counting(short: Shallow, params: Any, batch: Any, counts: Sequence[int]) -> Shallow | None:
    """Makes a function of three layers from one that needs all layers; None if it treats some layers differently.

    Args:
      short: the function of the whole tree, and the shorter tree.
      params: the whole tree.
      batch: what the function is called on.
      counts: number of layers of each list.
    """
    # Lists of equal length may alternate, as `attention_0`, `mlp_0`, `attention_1` do, or follow each other, as an
    # encoder's and a decoder's layers do. Both are tried.
    at_once = [[k for k, n in enumerate(counts) if n == count] for count in sorted(set(counts))]
    for groups in (at_once, [[k] for k in range(len(counts))]):
        fn = _cut_function(short, params, [(group, counts[group[0]]) for group in groups])
        try:
            jax.eval_shape(fn, short.tree, batch)
        except Unlike:
            continue
        except Exception:  # whatever the user's code raises about a leaf that is traced, such as int(params["heads"])
            return None
        return dataclasses.replace(short, fn=fn)
    return None


def _cut_function(
    short: Shallow, params: Any, groups: Sequence[tuple[Sequence[int], int]]
) -> Callable[[Any, Any], Any]:
    """A function of the shorter tree: traces the whole function, and cuts the other layers out of it.

    The trace needs leaves of all layers. The first and the last layer get those of the kept first and last one, and all
    layers between them get those of the kept middle one.

    Args:
      short: the function of the whole tree, and the shorter tree.
      params: the whole tree.
      groups: pairs of the lists whose layers alternate, as indices into `short.patterns`, and their number of layers.
    """
    paths = list(leaves_by_path(params))
    places = [_places(paths, short, group) for group, _ in groups]
    stands_for = {path: path for path in paths}
    for (_, count), of in zip(groups, places, strict=True):
        kept = {value: path for path, value in of.items() if value.layer < _KEPT}
        for path, value in of.items():
            layer = 0 if value.layer == 0 else 2 if value.layer == count - 1 else 1
            stands_for[path] = kept[value._replace(layer=layer)]

    def fn(tree: Any, batch: Any) -> Any:
        given = leaves_by_path(tree)
        flat, structure = jax.tree.flatten(([given[stands_for[path]] for path in paths], batch))
        closed, out = jax.make_jaxpr(
            lambda leaves, batch: short.fn(with_leaves(params, dict(zip(paths, leaves, strict=True))), batch),
            return_shape=True)(*jax.tree.unflatten(structure, flat))
        for (_, count), of in zip(groups, places, strict=True):
            others = [None] * (len(flat) - len(paths))
            closed = without_layers(closed, [*map(of.get, paths), *others], count)
        return jax.tree.unflatten(jax.tree.structure(out), core.jaxpr_as_fun(closed)(*flat))

    return traced_once(fn)


def _places(paths: Sequence[str], short: Shallow, group: Sequence[int]) -> dict[str, Value]:
    """Path of each leaf of these lists → its layer, counted from 0, and its path with a capture for the number."""
    found = dict[str, Value]()
    for pattern in (short.patterns[k] for k in group):
        numbers = {path: int(path[m.end(1) : m.start(2)]) for path in paths if (m := pattern.search(path))}
        order = sorted(set(numbers.values()))
        found |= {path: Value(order.index(number), short.with_captures(path)) for path, number in numbers.items()}
    return found


# Operations and lists -------------------------------------------------------------------------------------


def _operations(fn: Callable[[Any, Any], Any], params: Any, batch: Any) -> _Operations:
    """Counts the operations of `fn`: primitives, each with its parameters and the types of its operands and results."""
    said = Said()

    def own(eqn: Any) -> Hashable:  # leaves out functions that the equation calls: their operations are counted apart
        return said({key: x for key, x in eqn.params.items() if not any(jaxprs_of([x]))})

    return collections.Counter(
        (eqn.primitive.name, own(eqn), *(str(v.aval) for v in (*eqn.invars, *eqn.outvars)))
        for eqn in equations(jax.make_jaxpr(fn)(params, batch).jaxpr))


def _alike(node: Any) -> dict[tuple[str, str], list[Any]]:
    """The lists of layers in a node: more than three children of the same structure, whose keys differ in a number.

    Returns:
      (text before the number, text behind it) → the keys of the children, in the order of their numbers.
    """
    if isinstance(node, Mapping):
        matches = [(key, _NUMBERED.fullmatch(str(key)), child) for key, child in node.items()]
        numbered = [((m[1], m[3]), int(m[2]), key, child) for key, m, child in matches if m is not None]
    elif isinstance(node, Sequence) and not isinstance(node, str | bytes) and not hasattr(node, "_fields"):
        numbered = [(("", ""), k, k, child) for k, child in enumerate(node)]
    else:
        return {}
    layers = dict[tuple[str, str], list[tuple[int, Any]]]()
    kinds = dict[tuple[str, str], set[Any]]()
    for name, number, key, child in numbered:
        layers.setdefault(name, []).append((number, key))
        shapes = tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(child))
        kinds.setdefault(name, set()).add((jax.tree.structure(child), shapes))
    return {name: [key for _, key in sorted(pairs, key=lambda pair: pair[0])] for name, pairs in layers.items()
            if len(pairs) > _KEPT and len(kinds[name]) == 1}


def _lists(params: Any) -> dict[_Layers, int]:
    """All lists of layers in a tree, with their lengths. Lists inside such a layer are left out."""
    found = dict[_Layers, int]()
    nodes = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda node: bool(_alike(node)))[0]
    for keys, node in nodes:
        found |= {_Layers.at(keys, name): len(layers) for name, layers in _alike(node).items()}
    return found


def _cut(params: Any, lengths: Mapping[_Layers, int]) -> Any:
    """The tree with only the first `lengths[list]` layers of every list."""

    def cut(keys: Any, node: Any) -> Any:
        lists = _alike(node)
        gone = {key for name, layers in lists.items() for key in layers[lengths[_Layers.at(keys, name)] :]}
        if isinstance(node, Mapping) and lists:
            return type(node)({key: child for key, child in node.items() if key not in gone})  # type: ignore[call-arg]
        return type(node)(child for k, child in enumerate(node) if k not in gone) if lists else node

    return jax.tree_util.tree_map_with_path(cut, params, is_leaf=lambda node: bool(_alike(node)))
