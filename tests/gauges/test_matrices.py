"""How a leaf is read as a stack of matrices, and told to `optax.contrib.muon`: from the axes its gauges name."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from gauge_optax.parts.matrices import Matrices, matrices_of
from models import lm
from tests.cases import GAUGE_CASES
from tests.quick import jit
from tests.tolerances import tolerance
from tests.twins import normal

Tree = Any
Shape = tuple[int, ...]
Numbers = optax.contrib.MuonDimensionNumbers
CASES = {c.name: c for c in GAUGE_CASES}


class Reading(NamedTuple):
    """A binding, and how its leaves are to be read.

    Attributes:
      gauges: what binds the leaves.
      shapes: of all leaves.
      views: (matrices, inputs, outputs) of the leaves that are matrices.
      numbers: (inputs, outputs) by leaf axes; None where the leaf's axes are not split as its matrices are.
    """

    gauges: Callable[[], list[go.Gauge]]
    shapes: dict[str, Shape]
    views: dict[str, tuple[int, int, int]]
    numbers: dict[str, tuple[Shape, Shape] | None]


def _attention(make: Any = go.head_rotation, sizes: Any = None, **axes: Any) -> Callable[[], list[go.Gauge]]:
    return lambda: [make(axes, sizes=sizes)]


READINGS: dict[str, Reading] = {
    "heads": Reading(
        _attention(query="_ head basis", query_bias="head basis", key="_ head basis", key_bias="head basis",
                   out="head basis _"),
        {"query": (6, 2, 4), "query_bias": (2, 4), "key": (6, 2, 4), "key_bias": (2, 4), "out": (2, 4, 5)},
        {"query": (2, 6, 4), "key": (2, 6, 4), "out": (2, 4, 5)},
        {"query": ((0,), (2,)), "key": ((0,), (2,)), "out": ((1,), (2,))}),
    "grouped queries": Reading(
        _attention(query="_ (head _) basis", key="_ head basis", out="(head _) basis _"),
        {"query": (6, 4, 3), "key": (6, 2, 3), "out": (4, 3, 6)},
        {"query": (4, 6, 3), "key": (2, 6, 3), "out": (4, 3, 6)},
        {"query": ((0,), (2,)), "key": ((0,), (2,)), "out": ((1,), (2,))}),
    "one key head": Reading(
        _attention(query="_ _ basis", key="_ basis"), {"query": (6, 2, 4), "key": (6, 4)},
        {"query": (1, 12, 4), "key": (1, 6, 4)},  # one basis for all queries: one matrix
        {"query": ((0, 1), (2,)), "key": ((0,), (1,))}),
    "one key head, queries apart": Reading(
        _attention(query="_ (head _) basis", key="_ (head basis)", sizes={"head": 1}),
        {"query": (6, 2, 4), "key": (6, 4)}, {"query": (2, 6, 4), "key": (1, 6, 4)},
        {"query": ((0,), (2,)), "key": None}),
    "fused": Reading(
        _attention(qkv=("_ (qkv=0 head basis)", "_ (qkv=1 head basis)"),
                   bias=("(qkv=0 head basis)", "(qkv=1 head basis)"), sizes={"qkv": 3, "head": 2}),
        {"qkv": (6, 24), "bias": (24,)}, {"qkv": (6, 6, 4)}, {"qkv": None}),
    "stacked layers of heads": Reading(
        _attention(query="layer _ head basis", key="layer _ head basis"),
        {"query": (3, 6, 2, 4), "key": (3, 6, 2, 4)}, {"query": (6, 6, 4), "key": (6, 6, 4)},
        {"query": ((1,), (3,)), "key": ((1,), (3,))}),
    "partial rotary": Reading(
        _attention(go.rope_torus, query="_ head basis=0:4", key="_ head basis=0:4"),
        {"query": (6, 2, 6), "key": (6, 2, 6)},
        {"query": (2, 6, 6), "key": (2, 6, 6)},  # the whole head: what is not rotated is in the same matrix
        {"query": ((0,), (2,)), "key": ((0,), (2,))}),
    "unit": Reading(
        lambda: [go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"})],
        {"up": (6, 5), "bias": (5,), "down": (5, 3)}, {"up": (1, 6, 5), "down": (1, 5, 3)},
        {"up": ((0,), (1,)), "down": ((0,), (1,))}),
    "gates": Reading(
        lambda: [go.rescale({"gate": "gate=1 _ channel"}, {"down": "channel _"})],
        {"gate": (2, 6, 5), "down": (5, 6)}, {"gate": (2, 6, 5), "down": (1, 5, 6)},
        {"gate": ((1,), (2,)), "down": ((0,), (1,))}),
    "convolutions": Reading(
        lambda: [go.rescale({"up": "_ _ _ channel", "bias": "channel"}, {"down": "_ _ channel _"})],
        {"up": (3, 3, 2, 5), "bias": (5,), "down": (3, 3, 5, 4)},
        {"up": (1, 18, 5), "down": (1, 36, 5)},  # the free axes of `down` lie on both sides of its channels
        {"up": ((0, 1, 2), (3,)), "down": ((0, 1, 3), (2,))}),
    "a norm stored less one": Reading(
        lambda: [go.norm_scale({"norm": "1+ channel", "bias": "channel"}, {"query": "channel _ _", "up": "channel _"})],
        {"norm": (6,), "bias": (6,), "query": (6, 2, 4), "up": (6, 5)},
        {"query": (1, 6, 8), "up": (1, 6, 5)},  # under QK-norm no rotation splits a query into heads
        {"query": ((0,), (1, 2)), "up": ((0,), (1,))}),
    "rotations before scales": Reading(
        lambda: [go.norm_scale({"norm": "channel"}, {"value": "channel _ _"}),
                 go.head_rotation({"value": "_ head basis", "out": "head basis _"})],
        {"norm": (6,), "value": (6, 2, 4), "out": (2, 4, 6)}, {"value": (2, 6, 4), "out": (2, 4, 6)},
        {"value": ((0,), (2,)), "out": ((1,), (2,))}),
    "no matrices": Reading(
        lambda: [go.logit_shift({"head": "_ vocab"}), go.scale_invariant({"normed": "_ channel"})],
        {"head": (6, 7), "normed": (6, 5)}, {}, {}),
}
by_name = pytest.mark.parametrize("name", READINGS)


def _params(shapes: dict[str, Shape], seed: int = 0) -> Tree:
    return normal(seed, shapes) | {"free": jnp.ones((3, 4))}


def _read(gauges: list[go.Gauge], params: Tree) -> dict[str, Matrices]:
    return matrices_of(go.product(gauges)._bound(params).slice.parts)


def _stack(own: Matrices, leaf: Any) -> Any:
    """The matrices along one axis."""
    view = own.view(leaf)
    return view.reshape((-1, *view.shape[-2:]))


def _polar(own: Matrices, leaf: Any) -> Any:
    """Every matrix replaced by its polar factor, by an exact decomposition."""
    u, _, vt = np.linalg.svd(np.asarray(own.view(leaf)), full_matrices=False)
    return own.leaf(u @ vt)


@by_name
def test_leaves_are_read_as_these_matrices(name: str) -> None:
    """Reading and writing a leaf loses nothing."""
    gauges, shapes, views, _ = READINGS[name]
    params = _params(shapes)
    found = _read(gauges(), params)
    assert {path: _stack(own, params[path]).shape for path, own in found.items()} == views
    for path, own in found.items():
        assert (own.fan_in, own.fan_out) == views[path][1:]
        np.testing.assert_array_equal(own.leaf(own.view(params[path])), params[path])
        assert sorted(own.batch + own.rows + own.columns) == list(range(len(own.split)))


TURNS = ("head_rotation", "rope_torus")


def test_a_matrix_is_a_head_and_the_features() -> None:
    """Of a fused leaf and of stacked layers: which entries stand in which matrix, and where.

    Dimension numbers, below, tell it of all others.
    """
    fused = {"qkv": jnp.arange(144.0).reshape(6, 24)}
    gauge = go.head_rotation({"qkv": ("_ (qkv=0 head basis)", "_ (qkv=1 head basis)")}, sizes={"qkv": 3, "head": 2})
    own = _read([gauge], fused)["qkv"]
    split = fused["qkv"].reshape(6, 3, 2, 4)
    for number, (which, head) in enumerate(np.ndindex(3, 2)):
        np.testing.assert_array_equal(_stack(own, fused["qkv"])[number], split[:, which, head])
    stack = {"up": jnp.arange(90.0).reshape(3, 6, 5), "down": jnp.ones((3, 5, 6))}
    own = _read([go.rescale({"up": "layer _ channel"}, {"down": "layer channel _"})], stack)["up"]
    np.testing.assert_array_equal(own.view(stack["up"]), stack["up"])


@pytest.mark.parametrize("name", [name for name, row in READINGS.items() if row.gauges()[-1].name in TURNS])
def test_the_polar_factor_of_every_matrix_commutes_with_rotations(name: str, x64: None) -> None:
    gauges, shapes, _, _ = READINGS[name]
    group = go.product([gauge for gauge in gauges() if gauge.name in TURNS])
    for seed in range(3):
        params = _params(shapes, seed)
        element, found = group.sample(jax.random.key(seed), params), _read(gauges(), params)
        moved = group.act(element, params)
        expected = group.act(element, params | {path: _polar(own, params[path]) for path, own in found.items()})
        for path, own in found.items():
            assert float(jnp.linalg.norm(moved[path] - params[path])) > 0.1
            error = float(jnp.linalg.norm(_polar(own, moved[path]) - expected[path]) / jnp.linalg.norm(expected[path]))
            assert error <= tolerance("oracle"), path


# Dimension numbers --------------------------------------------------------------------------------


@by_name
def test_dimension_numbers_name_the_same_matrices(name: str) -> None:
    """From shapes alone."""
    gauges, shapes, views, numbers = READINGS[name]
    params, group = _params(shapes), go.product(gauges())
    found = group.muon_dimension_numbers(params)
    assert {path for path, own in found.items() if own is not None} == set(numbers)
    if None not in numbers.values():
        assert group.muon_dimension_numbers(jax.eval_shape(lambda: params)) == found
    for path, own in _read(gauges(), params).items():
        theirs = _by_numbers(found[path], params[path])
        if numbers[path] is None:  # heads share an axis with rows or columns: one matrix
            assert theirs.size == params[path].size and min(theirs.shape[1:]) > 1
            continue
        assert found[path] == Numbers(*numbers[path])
        np.testing.assert_array_equal(theirs, _stack(own, params[path]))
        assert theirs.shape == views[path]


def _by_numbers(numbers: Any, leaf: Any) -> Any:
    """A leaf as optax's Muon reads it."""
    inputs, outputs = numbers
    batch = tuple(k for k in range(leaf.ndim) if k not in (*inputs, *outputs))
    size = math.prod(leaf.shape[k] for k in inputs), math.prod(leaf.shape[k] for k in outputs)
    return leaf.transpose(*batch, *inputs, *outputs).reshape(-1, *size)


def test_a_gauge_names_its_own_leaves() -> None:
    """The method of one gauge of a list knows nothing of the others."""
    norm, turn = READINGS["rotations before scales"].gauges()
    params = _params(READINGS["rotations before scales"].shapes)
    assert norm.muon_dimension_numbers(params)["value"] == Numbers((0,), (1, 2))
    assert turn.muon_dimension_numbers(params)["value"] == Numbers((0,), (2,))
    assert go.product([norm, turn]).muon_dimension_numbers(params)["value"] == Numbers((0,), (2,))
    assert norm.muon_dimension_numbers(params)["out"] is None


@pytest.mark.parametrize("name", ["heads", "grouped queries", "stacked layers of heads", "gates", "convolutions"])
def test_muon_of_optax_takes_them(name: str) -> None:
    gauges, shapes, views, _ = READINGS[name]
    params, grads, group = _params(shapes), _params(shapes, 1), go.product(gauges())
    numbers = group.muon_dimension_numbers(params)
    tx = optax.contrib.muon(1.0, ns_steps=9, consistent_rms=1.0, muon_weight_dimension_numbers=numbers)
    step, _ = jit(tx.update)(grads, tx.init(params), params)
    for path, own in _read(gauges(), params).items():
        sizes = np.linalg.svd(_stack(own, step[path]), compute_uv=False) / math.sqrt(max(views[path][1:]))
        assert 0.5 < sizes.min() <= sizes.max() < 1.5, path  # every matrix of the leaf is orthogonalised
    for path in set(params) - set(views):
        np.testing.assert_allclose(jnp.abs(step[path]), 1 + 0.9 / 1.9, rtol=1e-4)  # Adam's first step


@pytest.mark.parametrize("row", ["product/gpt", "product/llama"])
def test_a_whole_model_is_told_in_one_call(row: str) -> None:
    """What a user of `optax.contrib.muon` writes in place of a tree by hand."""
    case = CASES[row]
    params, group = case.params(jax.random.key(0)), go.product(case.gauges())
    numbers = group.muon_dimension_numbers(params)
    blocks = numbers["blocks"][0]
    heads = dict.fromkeys(("query", "key", "value"), Numbers((0,), (2,))) | {"out": Numbers((1,), (2,))}
    assert {name: module["kernel"] for name, module in blocks["attn"].items()} == heads
    assert {module["kernel"] for module in blocks["mlp"].values()} == {Numbers((0,), (1,))}
    assert set(leaves_by_path(blocks["norm1"])) == set()  # None, for Adam
    tx = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers)
    jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)


def test_under_qk_norm_a_query_is_one_matrix_per_head_and_scales_are_none() -> None:
    config = lm.llama_config(vocab=7, d_model=6, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=5, qk_norm=True)
    params = jax.eval_shape(lambda: lm.params_and_loss(config, jax.random.key(0))[0])
    found = {path: own for path, own in _read(lm.gauges(config), params).items() if "/attn/" in path}
    sizes = {path.split("/")[3]: (own.batch, own.fan_in, own.fan_out) for path, own in found.items()}
    assert sizes == {"query": ((1,), 6, 4), "key": ((1,), 6, 4), "value": ((1,), 6, 4), "out": ((0,), 4, 6)}


# Properties ---------------------------------------------------------------------------------------

check = functools.partial(settings, derandomize=True, deadline=None, database=None)


@st.composite
def _bindings(draw: Any) -> tuple[list[go.Gauge], dict[str, Shape]]:
    """A pair of leaves of a rotation or a rescale: axes in any order, some of them sharing one axis of the leaf."""
    rotation = draw(st.booleans())
    named = draw(st.lists(st.sampled_from(["head", "layer"]), unique=True, max_size=2))
    named.append("basis" if rotation else "channel")
    lengths = {name: draw(st.integers(1, 3)) for name in named}
    axes, shapes = {}, {}
    for path in ("left", "right"):
        items = list(draw(st.permutations([*named, *["_"] * draw(st.integers(1, 2))])))
        if not rotation:  # the channel comes last of the named axes of a rescale
            kept = iter(named)
            items = [name if name == "_" else next(kept) for name in items]
        groups, shape = [], []
        while items:
            group = items[: draw(st.integers(1, 2))]
            group = group[:1] if group.count("_") == 2 else group
            del items[: len(group)]
            groups.append(f"({' '.join(group)})" if len(group) > 1 else group[0])
            shape.append(math.prod(draw(st.integers(1, 3)) if name == "_" else lengths[name] for name in group))
        axes[path], shapes[path] = " ".join(groups), tuple(shape)
    if rotation:
        return [go.head_rotation(axes, sizes=lengths)], shapes
    return [go.rescale({"left": axes["left"]}, {"right": axes["right"]}, sizes=lengths)], shapes


@check(max_examples=60)
@given(_bindings())
def test_any_reading_loses_nothing(binding: tuple[list[go.Gauge], dict[str, Shape]]) -> None:
    gauges, shapes = binding
    params: Tree = {path: np.arange(math.prod(shape)).reshape(shape) for path, shape in shapes.items()}
    abstract = {path: jax.ShapeDtypeStruct(x.shape, jnp.float32) for path, x in params.items()}
    for path, own in _read(gauges, abstract).items():
        view: Any = own.view(params[path])  # numpy: nothing to compile
        np.testing.assert_array_equal(own.leaf(view), params[path])
        assert view.shape[-2:] == (own.fan_in, own.fan_out)
        assert sorted(np.ravel(view)) == sorted(np.ravel(params[path]))
