"""Random trees and bindings: legal ones against numpy indexing, anything at all against the error format."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gauge_optax.binding import Block, Matched, bind, block_specs, frozen_sizes, leaves_by_path, overlap
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
        whole = self.index == slice(0, self.full)
        return self.name if whole else f"{self.name}={self.index.start}:{self.index.stop}"

    @property
    def local(self) -> bool:
        return self.name == "_" or (not isinstance(self.index, int) and self.index != slice(0, self.full))

    @property
    def length(self) -> int:
        return 1 if isinstance(self.index, int) else self.index.stop - self.index.start


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf per instance with one block: the oracle of what `Block` has to do."""

    groups: tuple[tuple[Part, ...], ...]
    one_plus: bool

    @property
    def axes(self) -> str:
        items = [" ".join(part.text for part in group) for group in self.groups]
        items = [f"({item})" if len(group) > 1 else item for item, group in zip(items, self.groups, strict=True)]
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


@dataclasses.dataclass
class Case:
    """A tree with a legal binding."""

    lengths: dict[str, int]
    leaves: list[Leaf]
    instances: list[str]
    sizes: dict[str, int]
    extra: dict[str, Any]

    def pattern(self, k: int) -> str:
        return f"net_{{i}}/w{k}" if self.instances else f"net/w{k}"

    def path(self, k: int, instance: str) -> str:
        return self.pattern(k).replace("{i}", instance)

    @property
    def tree(self) -> dict[str, Any]:
        tree = dict(self.extra)
        for instance in self.instances or [""]:
            for k, leaf in enumerate(self.leaves):
                tree[self.path(k, instance)] = np.zeros(leaf.shape, np.float32)
        return tree

    def bind(self) -> tuple[Matched, ...]:
        blocks = {self.pattern(k): leaf.axes for k, leaf in enumerate(self.leaves)}
        return bind("gauge", block_specs("gauge", "blocks", blocks), frozen_sizes("gauge", self.sizes), self.tree)


@st.composite
def ranges(draw: st.DrawFn, name: str, length: int) -> Part:
    before, after = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 2), (1, 1)]))
    return Part(name, before + length + after, slice(before, before + length))


@st.composite
def leaves(draw: st.DrawFn, lengths: dict[str, int], picked: dict[str, int]) -> Leaf:
    parts = [draw(ranges(name, length)) for name, length in lengths.items()]
    free = draw(st.lists(st.integers(1, 3), max_size=2))
    parts += [Part("_", length, slice(0, length)) for length in free]
    parts += [Part(name, full, draw(st.integers(0, full - 1))) for name, full in picked.items() if draw(st.booleans())]
    groups: list[list[Part]] = []
    for part in draw(st.permutations(parts)):
        # Nothing could tell two such lengths apart, so they may not share a group.
        clash = bool(groups) and part.local and any(other.local for other in groups[-1])
        if groups and not clash and draw(st.booleans()):
            groups[-1].append(part)
        else:
            groups.append([part])
    return Leaf(tuple(map(tuple, groups)), draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn, max_leaves: int = 3) -> Case:
    lengths = draw(st.dictionaries(st.sampled_from(["head", "channel", "layer"]), st.integers(1, 4), max_size=3))
    picked = {"qkv": 3, "gate": 2}
    found = draw(st.lists(leaves(lengths, picked), min_size=1, max_size=max_leaves))
    used = {part.name for leaf in found for part in leaf.parts} - {"_"}
    grouped = any(len(group) > 1 for leaf in found for group in leaf.groups)
    sizes = {name: n for name, n in (lengths | picked).items() if name in used} if grouped else {}
    instances = draw(st.lists(st.sampled_from(["0", "2", "10", "x"]), unique=True, max_size=3))
    extra = draw(st.sampled_from([{}, {"net": {"bias": 1.0}, "head": None}, {"m": optax.MaskedNode()}]))
    return Case(lengths, found, instances, sizes, extra)


def numbers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Small integers as floats, so that every sum is exact in float32."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


@check(max_examples=200)
@given(cases())
def test_legal_bindings_resolve(case: Case) -> None:
    found = case.bind()
    natural: list[str] = [name for name in ("0", "2", "10", "x") if name in case.instances]
    assert [instance.key for instance in found] == ([f"i={name}" for name in natural] or [""])
    assert set(found[0].named) == set(case.lengths)
    for instance, name in zip(found, natural or [""], strict=True):
        assert dict(instance.sizes) == case.lengths
        for k, (one, leaf) in enumerate(zip(instance.blocks, case.leaves, strict=True)):
            assert (one.path, one.one_plus, one.shape) == (case.path(k, name), leaf.one_plus, leaf.shape)
            assert one.labels == leaf.labels
            assert hash(one) == hash(dataclasses.replace(one))


@check(max_examples=200)
@given(cases(max_leaves=1), st.booleans())
def test_view_and_write_are_numpy_indexing(case: Case, jax_view: bool) -> None:
    (leaf,), one = case.leaves, case.bind()[0].blocks[0]
    array = numbers(leaf.shape)
    view = one.view(array)
    np.testing.assert_array_equal(view, leaf.view(array))
    assert view.shape == one.view_shape
    np.testing.assert_array_equal(one.write(array, view), array)
    new = np.full(one.view_shape, 99.0, np.float32)
    written = one.write(jnp.asarray(array), jnp.asarray(new)) if jax_view else one.write(array, new)
    want = array.copy()
    leaf.view(want)[...] = 99.0
    np.testing.assert_array_equal(written, want)


@pytest.mark.slow
@check(max_examples=50)
@given(cases(max_leaves=1), st.data())
def test_spread_is_the_adjoint_of_total(case: Case, data: st.DataObject) -> None:
    (leaf,), one = case.leaves, case.bind()[0].blocks[0]
    named = tuple(data.draw(st.permutations(sorted(case.lengths))))
    named = named[: data.draw(st.integers(0, len(named)))]
    value, array = numbers(tuple(case.lengths[name] for name in named)), numbers(leaf.shape, seed=1)
    spread, total = np.asarray(one.spread(named, value)), np.asarray(one.total(named, array))
    assert total.shape == value.shape and spread.ndim == len(leaf.shape)
    assert all(n in (1, full) for n, full in zip(spread.shape, leaf.shape, strict=True))
    assert np.vdot(np.broadcast_to(spread, leaf.shape), array) == np.vdot(value, total)
    letters = {name: chr(97 + k) for k, name in enumerate(case.lengths)}
    script = "".join(letters.get(label, chr(110 + k)) for k, label in enumerate(leaf.labels))
    want = np.einsum(f"{script}->{''.join(letters[name] for name in named)}", leaf.view(array))
    np.testing.assert_array_equal(total, want)


@check(max_examples=150)
@given(st.data())
def test_overlap_is_a_common_entry(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=3)))
    blocks: list[Block] = []
    chosen: list[set[int]] = []
    for _ in range(2):
        groups = []
        for axis, n in enumerate(shape):
            inner = data.draw(st.sampled_from([1, 2]))
            start = data.draw(st.integers(0, n // inner - 1))
            stop = data.draw(st.integers(start + 1, n // inner))
            pick = data.draw(st.integers(0, inner - 1))
            groups.append((Part(f"x{axis}", n // inner, slice(start, stop)), Part(f"y{axis}", inner, pick)))
        leaf = Leaf(tuple(groups), False)
        sizes = {outer.name: outer.length for outer, _ in groups} | {inner.name: inner.full for _, inner in groups}
        case = Case({}, [leaf], [], sizes, {})
        blocks.append(case.bind()[0].blocks[0])
        chosen.append(set(leaf.view(np.arange(math.prod(shape)).reshape(shape)).ravel().tolist()))
    assert overlap(*blocks) == overlap(*reversed(blocks)) == bool(chosen[0] & chosen[1])
    assert not overlap(blocks[0], dataclasses.replace(blocks[0], path="another leaf"))


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
