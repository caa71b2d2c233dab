"""Paths of leaves, patterns that match them, and the form of every error about a tree.

The *normalised path* of a leaf is its key path joined by `/`. The key of a box that holds nothing else is left out: the
attribute `value` (`nnx.Variable`, Linen's `Partitioned`, penzai's parameters) and the number of a node that names no
keys (haliax's `NamedArray`). An optimizer's `init` often sees a boxed tree and its `update` a bare one, and leaves have
the same paths in both.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import optax
from jax.tree_util import FlattenedIndexKey, GetAttrKey

from gauge_optax.errors import binding_error

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_CAPTURE = re.compile(r"\{([^{}]*)\}")


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _only_children(treedef: Any, only: bool = False) -> Iterator[bool]:
    """For each leaf in order: whether it is its parent's only child."""
    # Key paths cannot tell: a field that is None has none, yet it shows that its parent is not a box of one thing.
    if treedef.num_leaves == treedef.num_nodes == 1:
        yield only
        return
    children = treedef.children()
    for child in children:
        yield from _only_children(child, len(children) == 1)


def _flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Normalised paths, leaves with every MaskedNode as a leaf, and the treedef."""
    treedef: Any
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_masked)
    paths = []
    for (keys, _), only in zip(pairs, _only_children(treedef), strict=True):
        # Keys of these two types only: a dict's key "value" and a list's index are names that the user gave.
        if only and (keys[-1] == GetAttrKey("value") or isinstance(keys[-1], FlattenedIndexKey)):
            keys = keys[:-1]
        paths.append(jax.tree_util.keystr(keys, simple=True, separator="/"))
    if len(set(paths)) < len(paths):
        twice = next(path for k, path in enumerate(paths) if path in paths[:k])
        raise binding_error(
            "binding", f"two leaves share the path '{twice}'", "keys that contain '/' or print alike",
            "one leaf per normalised path", "rename one of the keys")
    return paths, [leaf for _, leaf in pairs], treedef


def shown_and_hidden(tree: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns `leaves_by_path(tree)` and `hidden_paths(tree)`, but flattens the tree once."""
    paths, leaves, _ = _flatten(tree)
    shown = {path: leaf for path, leaf in zip(paths, leaves, strict=True) if not _is_masked(leaf)}
    return shown, tuple(path for path in paths if path not in shown)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Leaves by normalised path, in tree order. `None` and `optax.MaskedNode` are left out.

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
    """Paths at which `optax.masked` or `optax.partition` put a `MaskedNode` in place of a leaf or a subtree.

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
      leaves: new leaves by normalised path; all other leaves stay, and so do `MaskedNode`s.

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
    """Whether a tree has neither leaves nor `MaskedNode`s.

    `optax.tree.map_params` calls `init` with such a tree, and a gauge must not complain about missing leaves then.

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
    """Shape of a leaf.

    Args:
      leaf: an array, tracer, ShapeDtypeStruct, number, or anything else that a tree may hold.

    Returns:
      The shape, () for a leaf that has none.

    >>> from gauge_optax.binding import leaf_shape
    >>> leaf_shape(jnp.ones((2, 3))), leaf_shape(1.0)
    ((2, 3), ())
    """
    shape = getattr(leaf, "shape", None)
    return shape if isinstance(shape, tuple) else ()


@functools.lru_cache(maxsize=4096)
def compile_pattern(gauge: str, pattern: str) -> re.Pattern[str]:
    """Compiles a pattern to a regular expression for "/" + path, with a group per capture.

    Raises:
      ValueError: not a string, braces out of balance, a capture without a valid name, a lone `*`.
    """

    def malformed(found: str, expected: str, remedy: str) -> ValueError:
        return binding_error(gauge, f"malformed pattern '{pattern}'", found, expected, remedy)

    if not isinstance(pattern, str):
        raise malformed(f"a {type(pattern).__name__}", "a string", "write the path of the leaf, keys joined by '/'")
    regex = ""
    captures: set[str] = set()
    for segment in pattern.split("/"):
        # Every segment brings its own slash, so that `**` can stand for no segments in any position.
        if segment == "**":
            regex += "(?:/[^/]*)*"
            continue
        regex += "/"
        for k, piece in enumerate(_CAPTURE.split(segment)):  # text and names of captures alternate
            if k % 2 == 0:
                if set(piece) & set("{}*"):
                    raise malformed(
                        f"'{segment}'", "text and {name} captures, or ** as a whole segment",
                        "balance the braces; {name} matches within a segment, ** any number of segments")
                regex += re.escape(piece)
            elif not piece.isidentifier() or piece == "_":
                raise malformed(f"the capture '{{{piece}}}'", "a capture named by an identifier", "name it, as in {i}")
            else:
                # A capture that appears again must match the same text.
                regex += f"(?P={piece})" if piece in captures else f"(?P<{piece}>[^/]+)"
                captures.add(piece)
    return re.compile(regex)


def captures_of(gauge: str, pattern: str) -> tuple[str, ...]:
    """Names of a pattern's captures, in order of appearance."""
    return tuple(compile_pattern(gauge, pattern).groupindex)


def match(gauge: str, pattern: str, path: str) -> dict[str, str] | None:
    """Matches a path against a pattern.

    Args:
      gauge: name for errors.
      pattern: `{name}` captures text within one segment; `**` matches any number of segments.
      path: normalised path.

    Returns:
      The text of each capture; None where the path does not match.

    Raises:
      ValueError: a malformed pattern.

    >>> from gauge_optax.binding import match
    >>> match("rescale", "blocks/{i}/**/kernel", "blocks/3/mlp/up/kernel")
    {'i': '3'}
    """
    hit = compile_pattern(gauge, pattern).fullmatch("/" + path)
    return None if hit is None else hit.groupdict()


def hidden_match(gauge: str, pattern: str, path: str) -> tuple[dict[str, str], bool] | None:
    """Whether a `MaskedNode` hides a leaf of a pattern.

    A mask can be a prefix of the tree, so a `MaskedNode` may stand for a whole subtree, and the first segments of the
    pattern may be all that matches. Nothing in the tree tells a hidden leaf from a hidden subtree. If the captures of
    such a partial match are numbers (`blocks/{i}` against `blocks/3`), it counts as certain.

    Args:
      gauge: name for errors.
      pattern: path of the leaves, with captures.
      path: path of the `MaskedNode`.

    Returns:
      The captures, and whether a leaf of the pattern is certainly hidden; None if none can be.

    >>> from gauge_optax.binding import hidden_match
    >>> hidden_match("rescale", "blocks/{i}/up", "blocks/3"), hidden_match("rescale", "blocks/{i}/up", "head")
    (({'i': '3'}, True), None)
    """
    whole = match(gauge, pattern, path)
    if whole is not None:
        return whole, True
    segments = pattern.split("/")
    for k in range(1, len(segments)):
        captures = None if "**" in segments[:k] else match(gauge, "/".join(segments[:k]), path)
        if captures is not None:
            return captures, all(re.fullmatch("[0-9]+", value) for value in captures.values())
    return None


def natural_key(text: str) -> tuple[Any, ...]:
    """Sort key that puts `blocks_2` before `blocks_10`, and differs for texts that differ."""
    pieces = re.split("([0-9]+)", text)  # text and numbers alternate
    return tuple(int(piece) if k % 2 else piece for k, piece in enumerate(pieces)), text


def nearest(pattern: str, shapes: Shapes, rank: int) -> list[tuple[str, str]]:
    """The leaves that a pattern without a match may have meant.

    Args:
      pattern: the pattern.
      shapes: shapes of all leaves by path.
      rank: the rank that the pattern's axes ask for; leaves that have it are preferred.

    Returns:
      Up to three pairs of a path and the pattern to propose for it, most similar first.

    >>> from gauge_optax.binding import nearest
    >>> nearest("blocks/{i}/upp", {"blocks/0/up": (4, 8), "blocks/1/up": (4, 8), "head": (8, 3)}, 2)
    [('blocks/0/up', 'blocks/{i}/up'), ('head', 'head')]
    """
    paths: dict[str, str] = {}  # proposed pattern -> the first path that it matches
    for path in sorted(shapes, key=natural_key):
        paths.setdefault(_with_captures(pattern, path), path)

    def score(proposal: str) -> float:
        likeness = difflib.SequenceMatcher(None, pattern, proposal, autojunk=False).ratio()
        return likeness + (0.1 if len(shapes[paths[proposal]]) == rank else 0.0)

    return [(paths[proposal], proposal) for proposal in sorted(paths, key=score, reverse=True)[:3]]


def no_match(
    gauge: str, pattern: str, shapes: Shapes, rank: int, expected: str, hidden: Sequence[str] = ()
) -> ValueError:
    """The error for a pattern that matches no leaf: it names the nearest leaves, and where `MaskedNode`s are."""
    near = nearest(pattern, shapes, rank)
    found = "nearest " + ", ".join(f"{path} {shapes[path]}" for path, _ in near) if near else "no leaves"
    remedy = f"write '{near[0][1]}'" if near else "pass the parameters that the pattern was written for"
    if hidden:
        found += f", and MaskedNode at {', '.join(hidden[:3])}"
        remedy += ", or give each partition its own gauge list"
    return binding_error(gauge, f"no leaf matches '{pattern}'", found, expected, remedy)


def _with_captures(pattern: str, path: str) -> str:
    """A path with the captures of a pattern put back; the path itself if they have no place in it."""
    pieces, segments, start = path.split("/"), pattern.split("/"), 0
    for at, segment in enumerate(segments):
        names = _CAPTURE.findall(segment)
        if not names:
            continue
        # A capture most often stands for a number: look at the same position first, then from left to right.
        order = sorted(range(start, len(pieces)), key=lambda k: k != at)
        numbered = [k for k in order if re.search("[0-9]", pieces[k]) and pieces[k] not in segments]
        place = numbered[0] if numbered else at
        text = ".+".join(map(re.escape, _CAPTURE.split(segment)[::2]))
        if place == at >= start and len(pieces) == len(segments) and re.fullmatch(text, pieces[at]):
            pieces[at] = segment
        elif numbered and len(names) == 1:
            pieces[place] = re.sub("[0-9]+(?=[^0-9]*$)", f"{{{names[0]}}}", pieces[place])  # the last number
        else:
            return path
        start = place + 1
    return "/".join(pieces)


def mask_by_path(mask: Any, params: Any) -> dict[str, bool]:
    """Leaf path → what a mask of Optax's form says of it.

    Args:
      mask: a tree or prefix of booleans, or a callable from parameters to one.
      params: the tree.

    >>> from gauge_optax.binding import mask_by_path
    >>> mask_by_path({"up": True, "down": False}, {"up": {"kernel": 1.0}, "down": 2.0})
    {'down': False, 'up/kernel': True}
    """
    whole = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: bool(flag), part), values_at(mask, params), params)
    return dict(zip(leaves_by_path(params), jax.tree.leaves(whole), strict=True))


def values_at(mask: Any, params: Any) -> Any:
    """Returns the tree of a mask, or of labels, that may be a function of the parameters.

    The modules of some frameworks are trees that can be called (`eqx.Module`). So are masks of their structure, and
    `callable` cannot tell them from functions.

    Args:
      mask: a tree, or a function from a tree to a tree.
      params: what a function gets.

    >>> from gauge_optax.binding import values_at
    >>> values_at({"w": True}, {"w": 1.0}), values_at(lambda p: {"w": p["w"] > 2}, {"w": 1.0})
    ({'w': True}, {'w': False})
    """
    return mask(params) if callable(mask) and jax.tree.leaves(mask) == [mask] else mask
