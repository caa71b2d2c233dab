"""`lora`: the gauges of LoRA factors, which are recognized by their names and shapes.

An adapter adds a product of two factors to a kernel: x·A·B where A is (in, rank) and B (rank, out), or x·Aᵀ·Bᵀ where
PyTorch's layout gives A (rank, in) and B (out, rank). An element of GL(rank) between the factors changes neither.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gauge_optax.binding import leaf_shape, leaves_by_path, match
from gauge_optax.discovery.calls import Call, merge_layers
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Gauge

# Names without a prefix are `a` and `b` only: bare `down` and `up` are the layers of an MLP.
_NAMES = re.compile(r"(?P<prefix>.*lora_|.*lora_embedding_|)(?P<name>a|b|A|B|(?<=lora_)(?:down|up))")
_PARTNER = {"a": "b", "A": "B", "down": "up"}
_FIRST = {b: a for a, b in _PARTNER.items()}
Pair = tuple[str, str]  # of A and of B: paths, or axes
Shape = tuple[int, ...]


def lora(params: Any, *, axes: Mapping[str, Pair] | None = None) -> list[Gauge]:
    """The gauges of all LoRA factors in a tree: one `head_linear` per kind of pair, layers as captures.

    A pair is two leaves whose paths differ in one name: `...lora_a` and `...lora_b` (Qwix's `w_lora_a`, Flax's
    `lora_a`, PEFT's `lora_A/default/weight`), `lora_embedding_A`, `lora_down` and `lora_up`, or plain `a` and `b`, `A`
    and `B` where shapes say that their product has low rank. Ranks may differ from pair to pair. The rank is A's last
    axis, and B's first axis after leading axes that both factors share (scanned layers, experts); each index of those
    has its own group. In PyTorch's layout (`weight`, or where it has the lowest rank) the rank is A's first axis and
    B's second. The bias of A, if it has one, moves with it.

    Args:
      params: arrays or shapes: the adapters alone, `nnx.state(model, nnx.LoRAParam)`, or a whole model with them.
      axes: for modules whose shapes are ambiguous: path pattern of the pair's module → axes of A and of B, for example
        `{"**/experts": ("_ expert basis", "basis expert _")}`.

    Returns:
      A list for `quotient`, its aliases and `gauge_fix`.

    Raises:
      ValueError: the tree has no pair; a factor called `lora_...` has no partner, or one of another rank; the shapes
        allow several axes.

    >>> ranks = {"layer_0": 2, "layer_1": 4}
    >>> params = {
    ...     k: {"w_lora_a": jnp.ones((8, r)), "w_lora_b": jnp.zeros((r, 6))}
    ...     for k, r in ranks.items()
    ... }
    >>> gauges = go.lora(params)
    >>> len(gauges), go.product(gauges).dim(params)  # 2² + 4²
    (1, 20)
    >>> tx = go.quotient_adamw(1e-3, gauges)

    Reference: Hu et al. 2022 (LoRA); the group is `head_linear`'s.
    """
    leaves = {path: leaf_shape(leaf) for path, leaf in leaves_by_path(params).items()}
    calls = []
    for a, b in _pairs(leaves):
        left, right = _axes_of(a, b, leaves, axes or {})
        blocks, bias = {a: left}, re.sub(r"(kernel|weight)$", "bias", a)
        named = [item for item in left.split() if item != "_"]
        if bias != a and len(leaves.get(bias, ())) == len(named):
            blocks[bias] = " ".join(named)
        calls.append(Call("head_linear", {"left": blocks, "right": {b: right}}))
    if not calls:
        raise binding_error(
            "lora", "no pair of factors", f"leaves {', '.join(list(leaves)[:6])}",
            "paths such as '.../lora_a' and '.../lora_b', 'w_lora_a', 'lora_A/default/weight'",
            "pass the tree that holds the adapters, or bind them with go.head_linear")

    def same(merged: Call, group: list[Call]) -> bool:
        """Whether the merged patterns match the leaves of the group and no others."""
        matched = {path for path in leaves for pattern in merged.paths if match("lora", pattern, path) is not None}
        return matched == {path for call in group for path in call.paths}

    return [call.gauge() for call, _ in merge_layers(calls, same)]


def _pairs(leaves: Mapping[str, Shape]) -> Iterator[Pair]:
    """Paths of A and B, in tree order."""
    paired = set[str]()
    for path, shape in leaves.items():
        pieces = re.split(r"([/.])", path)  # names, with the separators between them
        for at in reversed(range(0, len(pieces), 2)) if len(shape) > 1 and path not in paired else ():
            hit = _NAMES.fullmatch(pieces[at])
            if hit is None or not (hit["prefix"] or at == len(pieces) - 1):  # a bare name counts at the end only
                continue
            partner = _PARTNER.get(hit["name"]) or _FIRST[hit["name"]]
            other = "".join([*pieces[:at], hit["prefix"] + partner, *pieces[at + 1 :]])
            if len(leaves.get(other, ())) < 2:
                if hit["prefix"]:
                    raise binding_error(
                        "lora", f"a factor without its partner, '{path}'", f"no leaf '{other}'",
                        "both factors in one tree",
                        "pass the tree that holds both; under optax.masked or partition keep pairs together")
                continue
            a, b = (path, other) if hit["name"] in _PARTNER else (other, path)
            layouts = _layouts(a, leaves[a], leaves[b])
            rank = leaves[a][layouts[0][0].split().index("basis")] if layouts else math.inf
            if "lora" in path.lower() or rank < min(max(leaves[a]), max(leaves[b])):
                paired |= {a, b}
                yield a, b
                break


def _is_torch(path: str) -> bool:
    """Whether a name belongs to PyTorch's layout."""
    return re.search(r"[/.]weight$|lora_embedding_", path) is not None


def _layouts(path: str, a: Shape, b: Shape) -> list[Pair]:
    """Axes of the two factors in every way that the shapes allow, of the least rank."""
    ways: list[tuple[int, Pair]] = []
    for lead in () if _is_torch(path) else range(min(len(a), len(b)) - 1):
        if a[:lead] == b[:lead] and b[lead] == a[-1]:
            batch = [f"layer{k}" if k else "layer" for k in range(lead)]
            left, right = ["_"] * (len(a) - lead - 1), ["_"] * (len(b) - lead - 1)
            ways.append((a[-1], (" ".join([*batch, *left, "basis"]), " ".join([*batch, "basis", *right]))))
    least = min((rank for rank, _ in ways), default=min(math.prod(a[1:]), b[0]) + 1)
    if a[0] == b[1] and (_is_torch(path) or a[0] < least):
        ways.append((a[0], (" ".join(["basis", *["_"] * (len(a) - 1)]), " ".join(["_ basis", *["_"] * (len(b) - 2)]))))
    return [way for rank, way in ways if rank == min(rank for rank, _ in ways)]


def _axes_of(path: str, other: str, leaves: Mapping[str, Shape], axes: Mapping[str, Pair]) -> Pair:
    """Axes of A and B: the user's for their module, or the only ones that the shapes allow."""
    (a, b), pieces = (leaves[path], leaves[other]), path.split("/")
    modules = ["/".join(pieces[:k]) for k in range(len(pieces))]
    for pattern, pair in axes.items():
        if any(match("lora", pattern, module) is not None for module in modules):
            return pair
    layouts = _layouts(path, a, b)
    if not layouts:
        raise binding_error(
            "lora", f"factors of unequal rank, '{path}' and '{other}'", f"shapes {a} and {b}",
            "A (..., rank) and B (rank, ...), or PyTorch's A (rank, ...) and B (..., rank)",
            f"say which axes: axes={{{modules[-1]!r}: ('_ basis', 'basis _')}}")
    # An inner axis that both share (experts) could be a layer axis: the shapes cannot tell.
    shared = [k for k in range(1, len(a) - 1) if len(a) == len(b) and a[k] == b[k] and "layer" not in layouts[0][0]]
    if len(layouts) == 1 and shared and not _is_torch(path):
        named = [["layer" if k == shared[0] else x for k, x in enumerate(side.split())] for side in layouts[0]]
        layouts.append((" ".join(named[0]), " ".join(named[1])))
    if len(layouts) > 1:
        raise binding_error(
            "lora", f"ambiguous axes of '{path}'", f"shapes {a} and {b}, which allow several layouts",
            " or ".join(map(repr, layouts)), f"choose one: axes={{{modules[-1]!r}: {layouts[-1]!r}}}")
    return layouts[0]
