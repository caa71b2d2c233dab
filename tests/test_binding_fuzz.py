"""Random trees and bindings: legal ones against numpy indexing, anything at all against the error format."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

from gauge_optax.binding import bind, block_specs, frozen_sizes, leaves_by_path
from tests.refusals import FOUR_PARTS

check = functools.partial(settings, derandomize=True, deadline=None, database=None)


@dataclasses.dataclass(frozen=True)
class Part:
    """An axis before grouping: what selects it and how long it is."""

    name: str
    full: int
    index: int | slice

    @property
    def text(self) -> str:
        if isinstance(self.index, int):
            return f"{self.name}={self.index}"
        return self.name if self.index == slice(0, self.full) else f"{self.name}={self.index.start}:{self.index.stop}"

    @property
    def local(self) -> bool:
        return self.name == "_" or ":" in self.text


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf with one block: the oracle of what `Block` has to do."""

    groups: tuple[tuple[Part, ...], ...]
    one_plus: bool

    @property
    def axes(self) -> str:
        items = [" ".join(part.text for part in group) for group in self.groups]
        items = [f"({item})" if " " in item else item for item in items]
        return " ".join(["1+"] * self.one_plus + items)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(itertools.chain.from_iterable(self.groups))

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts if not isinstance(part.index, int))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(part.full for part in group) for group in self.groups)

    def view(self, leaf: np.ndarray) -> np.ndarray:
        return leaf.reshape([part.full for part in self.parts])[(*(part.index for part in self.parts), ...)]


@st.composite
def leaves(draw: st.DrawFn) -> tuple[Leaf, dict[str, int], dict[str, int]]:
    """A leaf, the lengths of its named axes, and what a constructor would take as `sizes`."""
    lengths = draw(st.dictionaries(st.sampled_from(["head", "channel", "layer"]), st.integers(1, 4), max_size=3))
    picked, parts = draw(st.sampled_from([{}, {"qkv": 3}, {"gate": 2}, {"qkv": 3, "gate": 2}])), []
    for name, length in lengths.items():
        before, after = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 2), (1, 1)]))
        parts.append(Part(name, before + length + after, slice(before, before + length)))
    parts += [Part("_", length, slice(0, length)) for length in draw(st.lists(st.integers(1, 3), max_size=2))]
    parts += [Part(name, full, draw(st.integers(0, full - 1))) for name, full in picked.items()]
    groups: list[list[Part]] = []
    for part in draw(st.permutations(parts)):
        # Nothing could tell two such lengths apart, so they may not share a group.
        clash = bool(groups) and part.local and any(other.local for other in groups[-1])
        if groups and not clash and draw(st.booleans()):
            groups[-1].append(part)
        else:
            groups.append([part])
    sizes = lengths | picked if any(len(group) > 1 for group in groups) else {}
    return Leaf(tuple(map(tuple, groups)), draw(st.booleans())), lengths, sizes


@check(max_examples=200)
@given(leaves())
def test_legal_bindings_resolve_and_are_numpy_indexing(drawn: tuple[Leaf, dict[str, int], dict[str, int]]) -> None:
    leaf, lengths, sizes = drawn
    array = np.random.default_rng(0).integers(-8, 9, leaf.shape).astype(np.float32)
    specs = block_specs("gauge", "blocks", {"net_{i}/w": leaf.axes})
    (found,) = bind("gauge", specs, frozen_sizes("gauge", sizes), {"net_2/w": array, "bias": 1.0})
    (one,), names = found.blocks, [name for name in leaf.labels if name != "_"]
    assert (found.key, found.named, dict(found.sizes)) == ("i=2", tuple(names), lengths)
    assert (one.path, one.one_plus, one.shape, one.labels) == ("net_2/w", leaf.one_plus, leaf.shape, leaf.labels)
    view, want = one.view(array), array.copy()
    np.testing.assert_array_equal(view, leaf.view(array))
    assert view.shape == one.view_shape
    leaf.view(want)[...] = 99.0
    np.testing.assert_array_equal(one.write(array, np.full_like(view, 99.0)), want)


TEXT = st.text(alphabet="ab_i01+=:(){}*/ ", max_size=12)
PATTERNS = st.one_of(TEXT, st.sampled_from(["a", "a/{i}", "**/b", "**", "{i}", "a/**/{i}"]))
AXES = st.one_of(TEXT, st.sampled_from(["_", "a _", "(a b) _", "(a=0 _)", "a=0:2 b", "_ _", "1+ _"]))
BLOCKS = st.dictionaries(PATTERNS, st.one_of(AXES, st.lists(AXES, max_size=2).map(tuple)), min_size=1, max_size=3)
LEAVES = [*map(np.zeros, [(), (2,), (0,), (4, 2), (0, 3), (2, 1, 6)]), optax.MaskedNode(), None]
TREES = st.dictionaries(st.sampled_from(["a", "b", "0", "a/b", "a/0", "i/b"]), st.sampled_from(LEAVES), max_size=4)


@check(max_examples=500)
@given(BLOCKS, st.dictionaries(st.sampled_from(["a", "b", "i"]), st.integers(-1, 4), max_size=2), TREES)
def test_anything_binds_or_raises_in_four_parts(blocks: Any, sizes: dict[str, int], tree: dict[str, Any]) -> None:
    try:
        found = bind("gauge", block_specs("gauge", "blocks", blocks), frozen_sizes("gauge", sizes), tree)
    except ValueError as error:
        assert FOUR_PARTS.fullmatch(str(error)), str(error)
        return
    present = leaves_by_path(tree)
    for one in itertools.chain.from_iterable(instance.blocks for instance in found):
        assert one.view(present[one.path]).shape == one.view_shape
        assert [len(one.axis_ids(k, ())) for k in range(len(one.shape))] == list(one.shape)
