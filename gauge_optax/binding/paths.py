"""Patterns that match the paths of leaves, and the error for one that matches none."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from gauge_optax.errors import binding_error, kind_of

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_CAPTURE = re.compile(r"\{([^{}]*)\}")
_UNLIKE = 0.3  # below this likeness to a pattern, a path is hardly the one that the user misspelled


@functools.lru_cache(maxsize=4096)
def compile_pattern(gauge: str, pattern: str) -> re.Pattern[str]:
    """Compiles a pattern to a regular expression that matches "/" + path and has a named group per capture.

    Args:
      gauge: name for errors.
      pattern: as in `match`.

    Returns:
      The regular expression.

    Raises:
      ValueError: not a string, braces out of balance, a capture without a valid name, a lone `*`.

    >>> from gauge_optax.binding.paths import compile_pattern
    >>> compile_pattern("rescale", "blocks/{i}/up").fullmatch("/blocks/3/up").groupdict()
    {'i': '3'}
    """

    def malformed(found: str, expected: str, remedy: str) -> ValueError:
        return binding_error(gauge, f"malformed pattern '{pattern}'", found, expected, remedy)

    if not isinstance(pattern, str):
        raise malformed(kind_of(pattern), "a string", "write the path of the leaf, keys joined by '/'")
    regex = ""
    captures: set[str] = set()
    for segment in pattern.split("/"):
        # The slash before a segment belongs to the segment, so that `**` can stand for no segments in any position.
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
    """Names of a pattern's captures, in order of appearance.

    >>> from gauge_optax.binding.paths import captures_of
    >>> captures_of("heads", "blocks/{i}/heads/{j}/q")
    ('i', 'j')
    """
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

    A mask can be a prefix of the tree, so that a `MaskedNode` may stand for a leaf or for a whole subtree, and the tree
    does not say for which. Its path may therefore match only the first segments of the pattern. Such a partial match
    counts as certain if its captures are numbers, as when `blocks/3` matches `blocks/{i}`.

    Args:
      gauge: name for errors.
      pattern: path of the leaves, with captures.
      path: path of the `MaskedNode`.

    Returns:
      The captures, and whether a leaf of the pattern is certainly hidden; None if the node can hide no such leaf.

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
    """Sort key that puts `blocks_2` before `blocks_10`. Different texts, also `a1` and `a01`, have different keys.

    >>> from gauge_optax.binding.paths import natural_key
    >>> sorted(["blocks_10", "blocks_2", "a"], key=natural_key)
    ['a', 'blocks_2', 'blocks_10']
    """
    pieces = re.split("([0-9]+)", text)  # text and numbers alternate
    return tuple(int(piece) if k % 2 else piece for k, piece in enumerate(pieces)), text


def nearest(pattern: str, shapes: Shapes, rank: int) -> list[tuple[str, str]]:
    """Finds the leaves that the author of a pattern without a match may have meant.

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
        return _likeness(pattern, proposal) + (0.1 if len(shapes[paths[proposal]]) == rank else 0.0)

    return [(paths[proposal], proposal) for proposal in sorted(paths, key=score, reverse=True)[:3]]


def no_match(
    gauge: str, pattern: str, shapes: Shapes, rank: int, expected: str, hidden: Sequence[str] = (),
    taken: Collection[str] = (), absent: str = "",
) -> ValueError:
    """The error for a pattern that matches no leaf: it names the nearest leaves, and where `MaskedNode`s are.

    Args:
      gauge: name for errors.
      pattern: the pattern.
      shapes: shapes of all leaves by path.
      rank: the rank that the pattern's axes ask for.
      expected: what the pattern should match, in words.
      hidden: paths of `MaskedNode`s.
      taken: the gauge's other patterns. If the best proposal is one of them, the pattern is probably no misspelling.
      absent: what to do if the tree has no such leaf. If it is empty, there is general advice, and only where the
        pattern is probably no misspelling.

    Returns:
      The error, for the caller to raise.

    >>> from gauge_optax.binding.paths import no_match
    >>> print(no_match("rescale", "blocks/{i}/upp", {"blocks/0/up": (4, 8)}, 2, "a leaf of rank 2"))
    rescale: no leaf matches 'blocks/{i}/upp'
      found: nearest blocks/0/up (4, 8)
      expected: a leaf of rank 2
      remedy: write 'blocks/{i}/up'
    """
    near = nearest(pattern, shapes, rank)
    found = "nearest " + ", ".join(f"{path} {shapes[path]}" for path, _ in near) if near else "no leaves"
    remedy = f"write '{near[0][1]}'" if near else "pass the parameters that the pattern was written for"
    if near and (absent or near[0][1] in taken or _likeness(pattern, near[0][1]) < _UNLIKE):
        # This may be no misspelling: the tree may be only a part of the one that the gauge was made for, as
        # `nnx.Optimizer` makes with `wrt=`, or the model has no such leaf, as one without biases.
        absent = absent or (
            f"take '{pattern}' out of {gauge} if the model has no such leaf; leave {gauge} out if its leaves are not "
            "trained here")
        remedy = absent if near[0][1] in taken else f"{absent}; if its name is wrong, {remedy}"
    if hidden:
        found += f", and MaskedNode at {', '.join(hidden[:3])}"
        remedy += ", or give each partition its own gauge list"
    return binding_error(gauge, f"no leaf matches '{pattern}'", found, expected, remedy)


def _likeness(pattern: str, proposal: str) -> float:
    return difflib.SequenceMatcher(None, pattern, proposal, autojunk=False).ratio()


def _with_captures(pattern: str, path: str) -> str:
    """Proposes a pattern for a path: the path, with the captures and `**` of another pattern where they fit in it.

    It is the path itself if the captures do not fit. A `**` in the pattern is kept in the proposal. The gauge's other
    patterns may have a `**` too, and then match leaves of all layers, while a path without `**` matches one leaf alone.
    """
    pieces, segments, start = path.split("/"), pattern.split("/"), 0
    if "**" in segments:
        before = segments.index("**")
        head, tail = "/".join(segments[:before]), "/".join(segments[before + 1 :])
        proposals = [path]
        # The path may have a segment more than the pattern names: `**/up` was meant for `**/up/kernel`.
        for after in range(len(segments) - before - 1, len(segments) - before + 1):
            if before + after <= len(pieces):
                ends = (head, pieces[:before]), (tail, pieces[len(pieces) - after :])
                proposals.append("/**/".join(_with_captures(text, "/".join(own)) for text, own in ends).strip("/"))
        return max(proposals[1:] or proposals, key=lambda proposal: _likeness(pattern, proposal))
    for at, segment in enumerate(segments):
        names = _CAPTURE.findall(segment)
        if not names:
            continue
        # A capture most often stands for a number. Look for a number at the capture's own segment first, then in the
        # other segments from left to right.
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
