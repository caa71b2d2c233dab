"""Key paths, path patterns, and the error format every check of a binding uses.

A leaf's *normalised path* is its key path joined with `/`, without the key of a box that holds nothing else: the
attribute `value` (`nnx.Variable`, Linen's `Partitioned`, penzai's parameters), the number of a node that names no keys
(haliax's `NamedArray`). Gauges name leaves by it, so one gauge fits the
boxed tree that an optimizer's `init` sees and the bare one that its `update` sees.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

_CAPTURE = re.compile(r"\{([^{}]*)\}")
_ANY_SEGMENTS = r"(?:/[^/]*)*"


def binding_error(gauge: str, problem: str, found: str, expected: str, remedy: str) -> ValueError:
    """The one form of every complaint about a gauge and a tree.

    Args:
      gauge: name of the gauge's constructor.
      problem: what is wrong, ending in the quoted path or pattern.
      found: what the tree or the call holds.
      expected: what it should hold.
      remedy: what to write instead.

    Returns:
      A `ValueError` to raise.

    >>> from gauge_optax.binding import binding_error
    >>> print(binding_error("rescale", "no leaf matches 'up'", "nothing", "a leaf", "write 'mlp/up'"))
    rescale: no leaf matches 'up'
      found:    nothing
      expected: a leaf
      remedy:   write 'mlp/up'
    """
    lines = (f"{gauge}: {problem}", f"found:    {found}", f"expected: {expected}", f"remedy:   {remedy}")
    return ValueError("\n  ".join(lines))


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _only_children(treedef: Any) -> Iterator[bool]:
    """For each leaf in order: whether it is its parent's only child (None and empty containers count)."""
    children = treedef.children()
    for child in children:
        if child.num_leaves == child.num_nodes == 1:
            yield len(children) == 1
        else:
            yield from _only_children(child)


def _is_box(key: Any) -> bool:
    """Whether a key is that of a box; a dict's key or a list's index never is."""
    named = isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value"
    return named or isinstance(key, jax.tree_util.FlattenedIndexKey)


def _flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Normalised paths, leaves with every MaskedNode as a leaf, and the treedef."""
    treedef: Any
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_masked)
    # A tree that is a single leaf has no parent to look at.
    only_child = _only_children(treedef) if treedef.children() else [False] * len(pairs)
    paths = []
    for (keys, _), only in zip(pairs, only_child, strict=True):
        if only and _is_box(keys[-1]):
            keys = keys[:-1]
        paths.append(jax.tree_util.keystr(keys, simple=True, separator="/"))
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise binding_error(
                "binding", f"two leaves share the path '{path}'", "keys that contain '/' or print alike",
                "one leaf per normalised path", "rename one of the keys")
        seen.add(path)
    return paths, [leaf for _, leaf in pairs], treedef


def shown_and_hidden(tree: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`leaves_by_path` and `hidden_paths` in one pass."""
    paths, leaves, _ = _flatten(tree)
    shown = {path: leaf for path, leaf in zip(paths, leaves, strict=True) if not _is_masked(leaf)}
    return shown, tuple(path for path in paths if path not in shown)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Leaves by normalised path, in tree order; None and `optax.MaskedNode` are left out.

    Args:
      tree: any pytree.

    Returns:
      A dict from path to leaf.

    Raises:
      ValueError: two leaves have one normalised path.

    >>> from gauge_optax.binding import leaves_by_path
    >>> leaves_by_path({"mlp": [{"kernel": 1.0}, None, {"kernel": 2.0}]})
    {'mlp/0/kernel': 1.0, 'mlp/2/kernel': 2.0}
    """
    return shown_and_hidden(tree)[0]


def hidden_paths(tree: Any) -> tuple[str, ...]:
    """Paths where `optax.masked` or `optax.partition` put a `MaskedNode`, for a leaf or for a subtree.

    Args:
      tree: any pytree.

    Returns:
      The normalised paths, in tree order.

    Raises:
      ValueError: two leaves have one normalised path.

    >>> import optax
    >>> from gauge_optax.binding import hidden_paths
    >>> hidden_paths({"a": {"kernel": 1.0, "bias": optax.MaskedNode()}})
    ('a/bias',)
    """
    return shown_and_hidden(tree)[1]


def with_leaves(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The same tree with some leaves replaced.

    Args:
      tree: any pytree.
      leaves: new leaves by normalised path; all other leaves, `MaskedNode`s included, stay.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: a path that the tree does not have.

    >>> from gauge_optax.binding import with_leaves
    >>> with_leaves({"a": [1.0, 2.0]}, {"a/1": 5.0})
    {'a': [1.0, 5.0]}
    """
    paths, old, treedef = _flatten(tree)
    for path in set(leaves).difference(paths):
        raise binding_error(
            "binding", f"no leaf to replace at '{path}'", f"leaves {', '.join(paths[:6])}",
            "paths of the same tree", "take the paths from leaves_by_path(tree)")
    return treedef.unflatten([leaves.get(path, leaf) for path, leaf in zip(paths, old, strict=True)])


def is_empty(tree: Any) -> bool:
    """Whether a tree has neither leaves nor `MaskedNode`s: the placeholder of `optax.tree.map_params`.

    Args:
      tree: any pytree.

    Returns:
      True for a tree with nothing to bind to.

    >>> import optax
    >>> from gauge_optax.binding import is_empty
    >>> is_empty({"a": None}), is_empty({"a": optax.MaskedNode()})
    (True, False)
    """
    return not jax.tree_util.tree_leaves(tree, is_leaf=_is_masked)


def leaf_shape(leaf: Any) -> tuple[int, ...]:
    """Shape of an array, tracer, ShapeDtypeStruct or number; () for anything else a tree may carry."""
    shape = getattr(leaf, "shape", None)
    return shape if isinstance(shape, tuple) else ()


def _segment_regex(gauge: str, pattern: str, segment: str, seen: set[str]) -> str:
    out = ""
    for k, piece in enumerate(_CAPTURE.split(segment)):
        if k % 2 == 0:
            if set(piece) & set("{}*"):
                raise binding_error(
                    gauge, f"malformed pattern '{pattern}'", f"'{segment}'",
                    "text and {name} captures, or ** as a whole segment",
                    "balance the braces; {name} matches within a segment, ** any number of segments")
            out += re.escape(piece)
        elif not piece.isidentifier() or piece == "_":
            raise binding_error(gauge, f"malformed pattern '{pattern}'", f"the capture '{{{piece}}}'",
                                "a capture named by an identifier", "name it, as in {i}")
        else:
            out += f"(?P={piece})" if piece in seen else f"(?P<{piece}>[^/]+)"
            seen.add(piece)
    return out


@functools.lru_cache(maxsize=4096)
def compile_pattern(gauge: str, pattern: str) -> re.Pattern[str]:
    """Regex for '/' + path. The leading slash lets `**` stand for zero segments anywhere."""
    if not isinstance(pattern, str):
        raise binding_error(gauge, f"malformed pattern '{pattern}'", f"a {type(pattern).__name__}",
                            "a string", "write the path of the leaf, keys joined by '/'")
    seen: set[str] = set()
    segments = pattern.split("/")
    return re.compile("".join(
        _ANY_SEGMENTS if s == "**" else "/" + _segment_regex(gauge, pattern, s, seen) for s in segments
    ))


def captures_of(gauge: str, pattern: str) -> tuple[str, ...]:
    """Names of a pattern's captures, in order of appearance."""
    return tuple(compile_pattern(gauge, pattern).groupindex)


def match(gauge: str, pattern: str, path: str) -> dict[str, str] | None:
    """The captures of a path under a pattern, None where it does not match."""
    hit = compile_pattern(gauge, pattern).fullmatch("/" + path)
    return None if hit is None else hit.groupdict()


def hidden_match(gauge: str, pattern: str, path: str) -> tuple[dict[str, str], bool] | None:
    """Captures of a hidden path, and whether it surely hides a leaf of the pattern.

    A prefix mask hides whole subtrees, so a head of the pattern may match as well. Whether a leaf or a
    subtree stood there cannot be told; a numbered capture (`blocks/{i}` against `blocks/3`) is taken for one.
    """
    whole = match(gauge, pattern, path)
    if whole is not None:
        return whole, True
    segments = pattern.split("/")
    for k in range(1, len(segments)):
        head = None if "**" in segments[:k] else match(gauge, "/".join(segments[:k]), path)
        if head is not None:
            return head, all(re.fullmatch("[0-9]+", value) for value in head.values())
    return None


def natural_key(values: Sequence[str]) -> tuple[Any, ...]:
    """Sort key that puts `blocks_2` before `blocks_10`."""
    parts = [re.split("([0-9]+)", value) for value in values]
    return tuple(tuple(int(p) if k % 2 else p for k, p in enumerate(part)) for part in parts), tuple(values)


def with_captures(pattern: str, path: str) -> str:
    """A path with a failing pattern's captures put back, as a proposal; the path itself where that fails."""
    pieces, wanted, start = path.split("/"), pattern.split("/"), 0
    for at, segment in enumerate(wanted):
        names = _CAPTURE.findall(segment)
        if not names:
            continue
        aligned = len(pieces) == len(wanted) and at >= start and _fits(segment, pieces[at])
        order = ([at] if start <= at < len(pieces) else []) + list(range(start, len(pieces)))
        numbered = [k for k in order if re.search("[0-9]", pieces[k]) and pieces[k] not in wanted]
        k = numbered[0] if numbered else at
        if aligned and k == at:
            pieces[k] = segment
        elif numbered and len(names) == 1:
            pieces[k] = re.sub("[0-9]+(?=[^0-9]*$)", f"{{{names[0]}}}", pieces[k])
        else:
            return path
        start = k + 1
    return "/".join(pieces)


def _fits(segment: str, piece: str) -> bool:
    return re.fullmatch(".+".join(map(re.escape, _CAPTURE.split(segment)[::2])), piece) is not None


def nearest(pattern: str, shapes: Mapping[str, tuple[int, ...]], rank: int) -> list[tuple[str, str]]:
    """Up to three (path, proposed pattern), most similar first; leaves of the right rank are preferred."""
    proposals: dict[str, str] = {}
    for path in sorted(shapes, key=lambda p: natural_key([p])):
        proposals.setdefault(with_captures(pattern, path), path)

    def score(proposal: str) -> float:
        likeness = difflib.SequenceMatcher(None, pattern, proposal, autojunk=False).ratio()
        return likeness + (0.1 if len(shapes[proposals[proposal]]) == rank else 0.0)

    best = sorted(proposals, key=lambda proposal: -score(proposal))[:3]
    return [(proposals[proposal], proposal) for proposal in best]
