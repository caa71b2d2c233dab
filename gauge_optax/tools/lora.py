"""`lora`: the gauges of LoRA factors, which are recognized by their names and shapes.

An adapter adds a product of two factors to a kernel's output: x·A·B with A (in, rank) and B (rank, out). In PyTorch's
layout it is x·Aᵀ·Bᵀ with A (rank, in) and B (out, rank). For an invertible matrix S of GL(rank), A·S and S⁻¹·B have the
same product.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gauge_optax.binding import frozen_sizes, leaf_shape, leaves_by_path, match
from gauge_optax.binding.axes import parse_axes
from gauge_optax.discovery.calls import Call, merge_layers
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Gauge
from gauge_optax.tools import _adapters
from gauge_optax.tools._adapters import Adapter

# `a` and `b` are names of factors with or without a prefix. `down` and `up` need a prefix, because alone they are the
# layers of an MLP.
_NAMES = re.compile(
    r"(?P<prefix>.*lora_|.*lora_embedding_|hada_w[12]_|lokr_w[12]_|)(?P<name>a|b|A|B|(?<=lora_)(?:down|up))")
_PARTNER = {"a": "b", "A": "B", "down": "up"}
_FIRST = {b: a for a, b in _PARTNER.items()}
Axes = tuple[str, str]  # of A and of B
Shape = tuple[int, ...]


def lora(
    params: Any, *, axes: Mapping[str, Axes] | None = None, sizes: Mapping[str, int] | None = None
) -> list[Gauge]:
    """Returns the gauges of all LoRA factors in a tree. Pairs whose paths differ only in layer numbers share a gauge.

    A pair is two leaves whose paths differ in one name. These names are found:

    * `...lora_a` and `...lora_b` (Qwix's `w_lora_a`, Flax's `lora_a`, PEFT's `lora_A/default/weight`),
      `lora_embedding_A` and `lora_embedding_B`, `lora_down` and `lora_up`,
    * LoHa's `hada_w1_a` and LoKr's `lokr_w2_a` with their `b`,
    * only `a` and `b`, or `A` and `B`, if the shapes say that their product has low rank.

    Each pair is bound by a `head_linear` gauge; ranks may differ from pair to pair. The rank is A's last axis, and B's
    first axis after leading axes that both factors share (scanned layers, experts); each index of the shared axes has
    its own element. In PyTorch's layout (paths that end in `weight`, or shapes for which this layout gives the lowest
    rank) the rank is A's first axis and B's second. The bias of A's layer moves with A.

    The function must depend on the product of the two factors alone. A leaf of the same module with an axis of the
    rank's length raises an error, because it may stand between the factors, as AdaLoRA's `lora_E` does. Exempt are the
    adapted kernel and its bias, the biases of A and B, and DoRA's magnitudes. PEFT stores the factors of all experts of
    a fused kernel in two matrices, which look like one adapter of a higher rank. In this case say where the experts
    are: `axes={"**/experts": ("(expert basis) _", "_ (basis expert)")}, sizes={"expert": 8}`.

    Args:
      params: a tree of arrays or shapes: the adapters alone, `nnx.state(model, nnx.LoRAParam)`, or a whole model.
      axes: for pairs whose shapes are ambiguous: path pattern of the pair's module, or of a module around it → axes of
        A and of B, for example `{"**/experts": ("_ expert basis", "basis expert _")}`.
      sizes: lengths of axes inside parentheses of `axes` that the shapes do not determine, as `expert` above.

    Returns:
      A list for `quotient`, its aliases and `gauge_fix`.

    Raises:
      ValueError: the tree has no pair; a pair has no entries, as at rank 0; a factor called `lora_...` has no partner,
        or one of another rank; the shapes allow several axes; another leaf stands, or may stand, between the factors;
        without `axes`, a pair in a module of experts, or a pair whose kernel is several times as large as the product
        of its factors; factors of a method that does not use their product alone (`delora_A`); `axes` or `sizes` of
        another form, or that apply to no pair.

    >>> ranks = {"layer_0": 2, "layer_1": 4}
    >>> params = {
    ...     k: {"w_lora_a": jnp.ones((8, r)), "w_lora_b": jnp.zeros((r, 6))}
    ...     for k, r in ranks.items()
    ... }
    >>> gauges = go.lora(params)
    >>> len(gauges), go.product(gauges).dim(params)  # 2² + 4²
    (1, 20)
    >>> tx = go.quotient_adamw(1e-3, gauges)

    Reference: Hu et al. 2022 (LoRA).
    """
    leaves = {path: leaf_shape(leaf) for path, leaf in leaves_by_path(params).items()}
    axes, sizes = {} if axes is None else axes, dict(frozen_sizes("lora", sizes))
    if not isinstance(axes, Mapping) or not all(_is_pair(sides) for sides in axes.values()):
        raise binding_error(
            "lora", "bad axes", f"axes={axes!r}", "path pattern of a module → axes of A and of B",
            "write axes={'**/experts': ('_ expert basis', 'basis expert _')}")
    calls, adapters, used, bound = [], [], set[str](), set[str]()
    for pair in _pairs(leaves):
        if 0 in (*leaves[pair.a], *leaves[pair.b]):
            raise binding_error(
                "lora", f"factors without entries, '{pair.a}' and '{pair.b}'",
                f"shapes {leaves[pair.a]} and {leaves[pair.b]}", "a rank of 1 or more",
                "pass the tree without this adapter; the gauges of the others fit the whole tree too")
        patterns = _patterns_of(pair, axes)
        left, right = axes[patterns[0]] if patterns else _axes_of(pair, leaves)
        used |= set(patterns)
        blocks, bias = {pair.a: left}, re.sub(r"(kernel|weight)$", "bias", pair.a)
        items = [item for item in _items(left) if item != "_"]
        if bias != pair.a and len(leaves.get(bias, ())) == len(items):
            blocks[bias] = " ".join(items)
        names = {part.name for side in (left, right) for part in parse_axes("lora", pair.a, side).items}
        given = {name: n for name, n in sizes.items() if name in names}
        used |= set(given)
        calls.append(Call("head_linear", {"left": blocks, "right": {pair.b: right}}, sizes=given))
        bound |= {*blocks, pair.b}
        adapters.append((pair._replace(left=left, right=right, sizes=sizes), bool(patterns)))
    if not calls:
        raise binding_error(
            "lora", "no pair of factors", f"leaves {', '.join(list(leaves)[:6])}",
            "paths such as '.../lora_a' and '.../lora_b', 'w_lora_a', 'lora_A/default/weight'",
            "pass the tree that holds the adapters, or bind them with go.head_linear")
    for name, given_names, kind in (("axes", axes, "module of a pair"), ("sizes", sizes, "axis of a pair")):
        for unused in (x for x in given_names if x not in used):
            raise binding_error(
                "lora", f"{name} for '{unused}', which is no {kind}",
                f"pairs {', '.join(repr(pair.a) for pair, _ in adapters[:4])}", f"the {kind}",
                "correct the pattern" if name == "axes" else "name the axis inside parentheses in axes={...}")
    modules = _adapters.by_module(leaves)
    for adapter, told in adapters:
        _adapters.refuse_between(adapter, leaves, modules, bound)
        if not told:
            _adapters.refuse_flattened(adapter, leaves, modules)

    def same(merged: Call, group: list[Call]) -> bool:
        """Whether the patterns of the merged call match the leaves of the calls in the group, and no other leaves."""
        matched = {path for path in leaves for pattern in merged.paths if match("lora", pattern, path) is not None}
        return matched == {path for call in group for path in call.paths}

    return [call.gauge() for call, _ in merge_layers(calls, same)]


def _is_pair(sides: Any) -> bool:
    return isinstance(sides, tuple | list) and len(sides) == 2 and all(isinstance(side, str) for side in sides)


def _items(axes: str) -> list[str]:
    """Splits an axes string into one item per axis, such as "_" or "(expert basis)"."""
    return re.findall(r"\([^()]*\)|\S+", axes)


def _pairs(leaves: Mapping[str, Shape]) -> Iterator[Adapter]:
    """Yields the pairs of factors, in tree order, with `left` and `right` still empty."""
    paired = set[str]()
    for path, shape in leaves.items():
        pieces = re.split(r"([/.])", path)  # names, with the separators between them
        for at in reversed(range(0, len(pieces), 2)) if len(shape) > 1 and path not in paired else ():
            hit = _NAMES.fullmatch(pieces[at])
            if hit is None or not (hit["prefix"] or at == len(pieces) - 1):  # `a` alone only as the last name
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
            _adapters.refuse_method(hit["prefix"], a, b)
            layouts = _layouts(a, leaves[a], leaves[b])
            rank = leaves[a][layouts[0][0].split().index("basis")] if layouts else math.inf
            if hit["prefix"] or "lora" in path.lower() or rank < min(max(leaves[a]), max(leaves[b])):
                paired |= {a, b}
                yield Adapter(a, b, tuple(pieces[:at:2]))
                break


def _is_torch(path: str) -> bool:
    """Whether a path ends in `weight`, which says that the leaf has PyTorch's layout."""
    return re.search(r"[/.]weight$", path) is not None


def _layouts(path: str, a: Shape, b: Shape) -> list[Axes]:
    """The pairs of axes strings, of A and of B, that the factors' names and shapes allow.

    If the path shows PyTorch's layout, all pairs for this layout are returned. Otherwise only those with the least rank
    are returned, because a rank is normally smaller than the lengths of other axes.
    """
    ways: list[tuple[int, Axes]] = []
    if re.search(r"(hada|lokr)_w[12]_", path):  # LoHa and LoKr multiply a·b, also in PyTorch
        return [("_ basis", "basis _")] if len(a) == len(b) == 2 and a[1] == b[0] else []
    torch = _is_torch(path)
    for lead in () if torch else range(min(len(a), len(b)) - 1):
        if a[:lead] == b[:lead] and b[lead] == a[-1]:
            left, right = ["_"] * (len(a) - lead - 1), ["_"] * (len(b) - lead - 1)
            ways.append((a[-1], _joined(lead, [*left, "basis"], ["basis", *right])))
    least = min((rank for rank, _ in ways), default=min(math.prod(a[1:]), b[0]) + 1)
    # If both layouts give the same rank, names decide: `lora_A`, `lora_B`, `lora_down` and `lora_up` allow both
    # layouts, PEFT's embeddings only PyTorch's.
    either = re.search(r"lora_[AB]\b|lora_(?:down|up)\b", path) is not None
    embedding = re.search(r"lora_embedding_[AB]\b", path) is not None
    if a[0] == b[1] and (torch or a[0] < least or (a[0] == least and (either or embedding))):
        ways = [] if embedding and a[0] == least else ways
        ways.append((a[0], _joined(0, ["basis", *["_"] * (len(a) - 1)], ["_", "basis", *["_"] * (len(b) - 2)])))
    # PyTorch's layout with leading axes, such as experts. Convolutions do not match here: their B ends in (1, 1).
    for lead in range(1, min(len(a), len(b)) - 1) if torch else ():
        if a[:lead] == b[:lead] and a[lead] == b[lead + 1]:
            left, right = ["_"] * (len(a) - lead - 1), ["_"] * (len(b) - lead - 2)
            ways.append((a[lead], _joined(lead, ["basis", *left], ["_", "basis", *right])))
    if torch:  # the path decides the layout, whatever the rank. Leading axes may still be shared axes or not.
        return [way for _, way in ways]
    return [way for rank, way in ways if rank == min(rank for rank, _ in ways)]


def _joined(lead: int, left: list[str], right: list[str]) -> Axes:
    """Joins the axes of both factors to strings, with `lead` shared layer axes in front."""
    shared = [f"layer{k}" if k else "layer" for k in range(lead)]
    return " ".join([*shared, *left]), " ".join([*shared, *right])


def _else_by_axes(key: str, a: Shape, b: Shape) -> str:
    """Text for an error message: which `axes` to write if the axes of A and B with equal lengths are the rank.

    The text is "" if no axis of A is as long as one of B.
    """
    lead = next((k for k, (n, m) in enumerate(zip(a, b, strict=False)) if n != m), min(len(a), len(b)))
    for i, j in itertools.product(reversed(range(lead, len(a))), range(lead, len(b))):
        if a[i] == b[j]:
            items = [["basis" if k == at else "_" for k in range(lead, n)] for at, n in ((i, len(a)), (j, len(b)))]
            return f"; if their rank is {a[i]}, write axes={{{key!r}: {_joined(lead, *items)!r}}}"
    return ""


def _patterns_of(pair: Adapter, axes: Mapping[str, Axes]) -> list[str]:
    """The user's patterns that match the module of a pair, or a module around it."""
    texts = {tuple(pair.a.split("/")), tuple(re.split("[/.]", pair.a))}
    modules = {"/".join(names[:k]) for names in texts for k in range(len(names))}
    return [pattern for pattern in axes if any(match("lora", pattern, module) is not None for module in modules)]


def _axes_of(pair: Adapter, leaves: Mapping[str, Shape]) -> Axes:
    """The axes strings of A and B. Raises ValueError if the shapes allow none, or several."""
    path, a, b = pair.a, leaves[pair.a], leaves[pair.b]
    layouts, key = _layouts(path, a, b), _adapters.pattern_of(pair.module)
    if not layouts and re.search(r"(hada|lokr)_w", path):
        raise binding_error(
            "lora", f"no product of two factors, '{path}' and '{pair.b}'", f"shapes {a} and {b}",
            "(out, rank) and (rank, in); a convolution's factors may have a core between them",
            "pass the tree without this adapter, or with use_effective_conv2d=False")
    if not layouts:
        raise binding_error(
            "lora", f"factors of unequal rank, '{path}' and '{pair.b}'", f"shapes {a} and {b}",
            "A (..., rank) and B (rank, ...), or PyTorch's A (rank, ...) and B (..., rank)",
            f"pass two factors of one product{_else_by_axes(key, a, b)}")
    # If A and B have an inner axis of equal length, it may be free in both, or count layers or experts, which need one
    # element each: the shapes cannot tell. Both layouts are then possible.
    shared = [k for k in range(1, len(a) - 1) if len(a) == len(b) and a[k] == b[k] and "layer" not in layouts[0][0]]
    if len(layouts) == 1 and shared and not _is_torch(path):
        named = [["layer" if k == shared[0] else x for k, x in enumerate(side.split())] for side in layouts[0]]
        layouts.append((" ".join(named[0]), " ".join(named[1])))
    if len(layouts) > 1:
        raise binding_error(
            "lora", f"ambiguous axes of '{path}'", f"shapes {a} and {b}, which allow several layouts",
            " or ".join(map(repr, layouts)), f"choose one: axes={{{key!r}: {layouts[-1]!r}}}")
    return layouts[0]
