"""`lora`: the pairs of factors in a tree of adapters, found by their names and shapes.

An adapter adds a product of two factors to a kernel: x·A·B where A is (in, rank) and B (rank, out), or x·Aᵀ·Bᵀ where
PyTorch's layout gives A (rank, in) and B (out, rank). Neither notices GL(rank) acting between them.

Here: which leaves are factors, and which of their axes is the rank. Not here: the group (`gauges.linear`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gauge_optax.binding import binding_error, leaf_shape, leaves_by_path, match
from gauge_optax.discovery.calls import Call, merge_layers
from gauge_optax.gauges.base import Gauge

# Bare `down` and `up` are an MLP's.
_NAMES = re.compile(r"(?P<prefix>.*lora_|.*lora_embedding_|)(?P<name>a|b|A|B|(?<=lora_)(?:down|up))")
_PARTNER = {"a": "b", "A": "B", "down": "up"}
_FIRST = {b: a for a, b in _PARTNER.items()}
_BASIS = "basis"
Pair = tuple[str, str]


class _Factors(NamedTuple):
    """Paths and shapes of one pair."""

    a: str
    b: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]


def lora(params: Any, *, axes: Mapping[str, Pair] | None = None) -> list[Gauge]:
    """The gauges of all LoRA factors in a tree: one `head_linear` per kind of pair, layers as captures.

    A pair is two leaves whose paths differ in one name: `…lora_a` and `…lora_b` (Qwix's `w_lora_a`, Flax's `lora_a`,
    PEFT's `lora_A/default/weight`), `lora_embedding_A`, `lora_down` and `lora_up`, or plain `a` and `b`, `A` and `B`
    where shapes say that their product has low rank. Ranks may differ from pair to pair. The rank is A's last axis and
    B's first behind axes that both begin with (scanned layers, experts): one group per index of these. In PyTorch's
    layout (`weight`, or where no other makes so low a rank) it is A's first axis and B's second. The bias of A, if it
    has one, moves with it.

    Args:
      params: arrays or shapes: adapters alone, `nnx.state(model, nnx.LoRAParam)`, or a whole model with them.
      axes: for modules whose shapes do not say it, path pattern of the pair's module → axes of A and of B, e.g.
        `{"**/experts": ("_ expert basis", "basis expert _")}`.

    Returns:
      A list for `quotient`, its aliases and `gauge_fix`.

    Raises:
      ValueError: no pair; a factor called `lora_…` without partner or of another rank; axes that shapes leave open.

    >>> ranks = {"layer_0": 2, "layer_1": 4}
    >>> params = {k: {"w_lora_a": jnp.ones((8, r)), "w_lora_b": jnp.zeros((r, 6))} for k, r in ranks.items()}
    >>> gauges = go.lora(params)
    >>> len(gauges), go.product(gauges).dim(params)  # 2² + 4²
    (1, 20)
    >>> tx = go.quotient_adamw(1e-3, gauges)

    Reference: Hu et al. 2022 (LoRA); the group is `head_linear`'s.
    """
    leaves = {path: leaf_shape(leaf) for path, leaf in leaves_by_path(params).items()}
    calls = [_call(pair, leaves, axes or {}) for pair in _pairs(leaves)]
    if not calls:
        raise binding_error(
            "lora", "no pair of factors", f"leaves {', '.join(list(leaves)[:6])}",
            "paths such as '…/lora_a' and '…/lora_b', 'w_lora_a', 'lora_A/default/weight'",
            "pass the tree that holds the adapters, or bind them with go.head_linear")
    return [call.gauge() for call, _ in merge_layers(calls, lambda merged, group: _exact(merged, group, leaves) == [merged])]


def _pairs(leaves: Mapping[str, tuple[int, ...]]) -> Iterator[_Factors]:
    """Factors in tree order."""
    met = set[str]()
    for path, shape in leaves.items():
        for at, prefix, name in _factor_names(path) if len(shape) > 1 and path not in met else ():
            first = name in _PARTNER
            other = _with(path, at, prefix + (_PARTNER[name] if first else _FIRST[name]))
            if len(leaves.get(other, ())) < 2:
                if prefix:
                    raise _lonely(path, other)
                continue
            a, b = (path, other) if first else (other, path)
            pair = _Factors(a, b, (leaves[a], leaves[b]))
            if "lora" in path.lower() or _low_rank(pair):
                met |= {a, b}
                yield pair
                break


def _factor_names(path: str) -> Iterator[tuple[int, str, str]]:
    """Place, prefix and name of a factor among a path's pieces, innermost first; bare names are a leaf's own."""
    pieces = re.split(r"[/.]", path)
    for at in reversed(range(len(pieces))):
        hit = _NAMES.fullmatch(pieces[at])
        if hit is not None and (hit["prefix"] or at == len(pieces) - 1):
            yield at, hit["prefix"], hit["name"]


def _with(path: str, at: int, name: str) -> str:
    pieces = re.split(r"([/.])", path)
    pieces[2 * at] = name
    return "".join(pieces)


def _is_torch(path: str) -> bool:
    """Whether names say PyTorch's layout."""
    return re.search(r"[/.]weight$|lora_embedding_", path) is not None


def _layouts(pair: _Factors) -> list[Pair]:
    """Axes of the two factors in every way that shapes allow, those of least rank."""
    (a, b), torch = pair.shapes, _is_torch(pair.a)
    ways: list[tuple[int, Pair]] = []
    for lead in () if torch else range(min(len(a), len(b)) - 1):
        if a[:lead] == b[:lead] and b[lead] == a[-1]:
            batch = [f"layer{k}" if k else "layer" for k in range(lead)]
            left = _axes(batch, ["_"] * (len(a) - lead - 1), [_BASIS])
            ways.append((a[-1], (left, _axes(batch, [_BASIS], ["_"] * (len(b) - lead - 1)))))
    least = min((rank for rank, _ in ways), default=min(math.prod(a[1:]), b[0]) + 1)
    if a[0] == b[1] and (torch or a[0] < least):
        ways.append((a[0], (_axes([_BASIS], ["_"] * (len(a) - 1)), _axes(["_", _BASIS], ["_"] * (len(b) - 2)))))
    return [way for rank, way in ways if rank == min(rank for rank, _ in ways)]


def _axes(*parts: Sequence[str]) -> str:
    return " ".join(item for part in parts for item in part)


def _low_rank(pair: _Factors) -> bool:
    """Whether shapes alone say that the two are factors of something larger."""
    layouts = _layouts(pair)
    return bool(layouts) and pair.shapes[0][layouts[0][0].split().index(_BASIS)] < min(map(max, pair.shapes))


def _call(pair: _Factors, leaves: Mapping[str, tuple[int, ...]], axes: Mapping[str, Pair]) -> Call:
    left, right = _chosen(pair, axes)
    blocks = {pair.a: left}
    bias = re.sub(r"(kernel|weight)$", "bias", pair.a)
    named = [item for item in left.split() if item != "_"]
    if bias != pair.a and len(leaves.get(bias, ())) == len(named):
        blocks[bias] = " ".join(named)
    return Call("head_linear", {"left": blocks, "right": {pair.b: right}}, {}, {})


def _chosen(pair: _Factors, axes: Mapping[str, Pair]) -> Pair:
    pieces = pair.a.split("/")
    modules = ["/".join(pieces[:k]) for k in range(len(pieces))]
    given = [own for pattern, own in axes.items() if any(match("lora", pattern, x) is not None for x in modules)]
    if given:
        return given[0]
    layouts, (a, b) = _layouts(pair), pair.shapes
    if not layouts:
        raise _unequal(pair)
    counted = [k for k in range(1, len(a) - 1) if len(a) == len(b) and a[k] == b[k] and "layer" not in layouts[0][0]]
    if len(layouts) > 1 or (counted and not _is_torch(pair.a)):
        if len(layouts) == 1:
            left, right = layouts[0]
            layouts.append((_counting(left, counted[0]), _counting(right, counted[0])))
        raise binding_error(
            "lora", f"unclear axes of '{pair.a}'", f"shapes {a} and {b}, which fit several readings",
            " or ".join(map(repr, layouts)), f"say it: axes={{{modules[-1]!r}: {layouts[-1]!r}}}")
    return layouts[0]


def _counting(axes: str, axis: int) -> str:
    return " ".join("layer" if k == axis else item for k, item in enumerate(axes.split()))


def _exact(merged: Call, group: list[Call], leaves: Mapping[str, tuple[int, ...]]) -> list[Call]:
    """A merged call where its patterns match what its group has and nothing else; else the group."""
    own = {path for call in group for path in call.paths}
    hit = {path for path in leaves for pattern in merged.paths if match("lora", pattern, path) is not None}
    return [merged] if hit == own else group


def _lonely(path: str, other: str) -> ValueError:
    return binding_error(
        "lora", f"a factor without its partner, '{path}'", f"no leaf '{other}'", "both factors in one tree",
        "pass the tree that holds both; under optax.masked or partition keep pairs together")


def _unequal(pair: _Factors) -> ValueError:
    return binding_error(
        "lora", f"factors of unequal rank, '{pair.a}' and '{pair.b}'", f"shapes {pair.shapes[0]} and {pair.shapes[1]}",
        "A (…, rank) and B (rank, …), or PyTorch's A (rank, …) and B (…, rank)",
        f"say which axes: axes={{{pair.a.rpartition('/')[0]!r}: ('_ basis', 'basis _')}}")
