"""How a leaf is read as a stack of matrices, and told to `optax.contrib.muon`: from the axes its gauges name."""

import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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
HEADS, OUT = {"query": "_ head basis", "key": "_ head basis"}, {"out": "head basis _"}
QUERIES, FIRST, FLAT = Numbers((0,), (2,)), Numbers((1,), (2,)), Numbers((0,), (1,))


class Reading(NamedTuple):
    """A binding, and how its leaves are to be read.

    Attributes:
      gauges: what binds the leaves.
      shapes: of all leaves.
      numbers: of the leaves that are matrices: inputs and outputs by leaf axes; where the leaf's axes are not split as
        its matrices are, (matrices, inputs, outputs).
    """

    gauges: list[go.Gauge]
    shapes: dict[str, Shape]
    numbers: dict[str, Any]

    @property
    def views(self) -> dict[str, Shape]:
        """(matrices, inputs, outputs) of every leaf that is read as matrices."""
        found = dict(self.numbers)
        for path, own in self.numbers.items():
            if isinstance(own, Numbers):
                sizes = [math.prod(self.shapes[path][k] for k in axes) for axes in own]
                found[path] = (math.prod(self.shapes[path]) // math.prod(sizes), *sizes)
        return found


READINGS: dict[str, Reading] = {
    "grouped queries": Reading(
        [go.head_rotation({"query": "_ (head _) basis", "bias": "(head _) basis", "key": "_ head basis",
                           "out": "(head _) basis _"})],
        {"query": (6, 4, 3), "bias": (4, 3), "key": (6, 2, 3), "out": (4, 3, 5)},
        {"query": QUERIES, "key": QUERIES, "out": Numbers((1,), (2,))}),
    "grouped queries, an axis of their own": Reading(
        [go.head_rotation({"query": "_ head _ basis", "bias": "head _ basis", "key": "_ head basis"}),
         go.head_rotation({"value": "_ head basis", "out": "head _ basis _"})],
        {"query": (6, 2, 4, 3), "bias": (2, 4, 3), "key": (6, 2, 3), "value": (6, 2, 3), "out": (2, 4, 3, 6)},
        {"query": Numbers((0,), (3,)), "key": QUERIES, "value": QUERIES, "out": Numbers((2,), (3,))}),
    "grouped queries, groups and heads first": Reading(
        [go.head_linear({"key": "head _ basis"}, {"query": "head _ _ basis", "bias": "head _ basis"}),
         go.head_linear({"value": "_ head basis"}, {"out": "_ head basis _"})],
        {"query": (2, 4, 6, 3), "bias": (2, 4, 3), "key": (2, 6, 3), "value": (6, 2, 3), "out": (4, 2, 3, 5)},
        {"query": Numbers((2,), (3,)), "key": FIRST, "value": QUERIES, "out": Numbers((2,), (3,))}),
    "one key head": Reading(  # as `discover` writes it
        [go.head_rotation({"query": "_ _ basis", "bias": "_ basis", "key": "_ basis"}),
         go.head_rotation({"value": "_ basis", "out": "_ basis _"})],
        {"query": (6, 2, 4), "bias": (2, 4), "key": (6, 4), "value": (6, 4), "out": (2, 4, 6)},
        {"query": QUERIES, "key": FLAT, "value": FLAT, "out": Numbers((1,), (2,))}),
    "factors of a convolution": Reading(  # the window is no axis of queries
        [go.head_linear({"a": "_ _ basis"}, {"b": "basis _"})], {"a": (2, 6, 4), "b": (4, 6)},
        {"a": Numbers((0, 1), (2,)), "b": FLAT}),
    "factors of a convolution as wide as its window": Reading(
        [go.head_linear({"a": "_ _ basis"}, {"b": "basis _"})], {"a": (3, 6, 4), "b": (4, 3)},
        {"a": Numbers((0, 1), (2,)), "b": FLAT}),
    "convolutions inside heads": Reading(
        [go.head_linear({"value": "_ _ head basis"}, OUT),
         go.head_rotation({"v": "head _ _ basis", "o": "head basis _"}),
         go.rescale({"up": "_ _ head channel"}, {"down": "head channel _"})],
        {"value": (3, 6, 2, 4), "out": (2, 4, 6), "v": (2, 3, 6, 4), "o": (2, 4, 5), "up": (3, 6, 2, 4),
         "down": (2, 4, 6)},
        dict.fromkeys(("value", "up"), Numbers((0, 1), (3,))) | {"v": Numbers((1, 2), (3,))}
        | dict.fromkeys(("out", "o", "down"), Numbers((1,), (2,)))),
    "outputs of two axes": Reading(
        [go.head_linear({"value": "_ head basis"}, {"out": "head basis _ _"})],
        {"value": (6, 2, 4), "out": (2, 4, 6, 3)}, {"value": QUERIES, "out": Numbers((1,), (2, 3))}),
    "grouped queries of other inputs than the keys": Reading(  # without the inputs, the lengths are those of the bias
        [go.head_rotation({"query": "_ head _ basis", "bias": "head _ basis", "key": "_ head basis"})],
        {"query": (8, 2, 5, 4), "bias": (2, 5, 4), "key": (6, 2, 4)},
        {"query": Numbers((0,), (3,)), "key": QUERIES}),
    "as many queries as inputs": Reading(  # the keys are no bias of the queries
        [go.head_rotation({"query": "_ _ basis", "key": "_ basis"}), go.head_linear({"k": "head _ basis"},
                                                                                 {"q": "head _ _ basis"})],
        {"query": (6, 6, 4), "key": (6, 4), "k": (2, 6, 4), "q": (2, 6, 6, 4)},
        {"query": QUERIES, "key": FLAT, "k": FIRST, "q": Numbers((2,), (3,))}),
    "one key head, queries apart": Reading(
        [go.head_rotation({"query": "_ (head _) basis", "key": "_ (head basis)"}, sizes={"head": 1})],
        {"query": (6, 2, 4), "key": (6, 4)}, {"query": QUERIES, "key": (1, 6, 4)}),
    "fused": Reading(
        [go.head_rotation({"qkv": ("_ (qkv=0 head basis)", "_ (qkv=1 head basis)"),
                           "bias": ("(qkv=0 head basis)", "(qkv=1 head basis)")}, sizes={"qkv": 3, "head": 2})],
        {"qkv": (6, 24), "bias": (24,)}, {"qkv": (6, 6, 4)}),
    "stacked layers of heads": Reading(
        [go.head_rotation(dict.fromkeys(HEADS, "layer _ head basis"))], dict.fromkeys(HEADS, (3, 6, 2, 4)),
        dict.fromkeys(HEADS, Numbers((1,), (3,)))),
    "partial rotary": Reading(  # the whole head: what is not rotated is in the same matrix
        [go.rope_torus(dict.fromkeys(HEADS, "_ head basis=0:4"))], dict.fromkeys(HEADS, (6, 2, 6)),
        dict.fromkeys(HEADS, QUERIES)),
    "experts behind a norm": Reading(  # the norm names no axis of experts, and reads one matrix
        [go.norm_scale({"norm": "channel"}, {"up": "_ channel _"}),
         go.rescale({"up": "expert _ channel"}, {"down": "expert channel _"})],
        {"norm": (6,), "up": (3, 6, 5), "down": (3, 5, 6)},
        {"up": Numbers((1,), (2,)), "down": Numbers((1,), (2,))}),
    "gates": Reading(
        [go.rescale({"gate": "gate=1 _ channel"}, {"down": "channel _"})],
        {"gate": (2, 6, 5), "down": (5, 6)}, {"gate": Numbers((1,), (2,)), "down": FLAT}),
    "convolutions": Reading(  # the free axes of `down` lie on both sides of its channels
        [go.rescale({"up": "_ _ _ channel", "bias": "channel"}, {"down": "_ _ channel _"})],
        {"up": (3, 3, 2, 5), "bias": (5,), "down": (3, 3, 5, 4)},
        dict.fromkeys(("up", "down"), Numbers((0, 1, 2), (3,)))),
    "convolutions, outputs first": Reading(
        [go.rescale({"up": "channel _ _ _", "bias": "channel"}, {"down": "_ channel _ _"})],
        {"up": (5, 2, 3, 3), "bias": (5,), "down": (4, 5, 3, 3)},
        dict.fromkeys(("up", "down"), Numbers((1, 2, 3), (0,)))),
    "convolutions of one axis": Reading(
        [go.rescale({"up": "_ _ channel"}, {"down": "_ channel _"}),
         go.rescale({"first": "channel _ _"}, {"second": "_ channel _"})],
        {"up": (3, 2, 5), "down": (3, 5, 4), "first": (5, 2, 3), "second": (4, 5, 3)},
        dict.fromkeys(("up", "down"), Numbers((0, 1), (2,)))
        | dict.fromkeys(("first", "second"), Numbers((1, 2), (0,)))),
    "queries, keys and values behind a norm": Reading(
        [go.norm_scale({"norm": "channel"}, {"qkv": "_ channel _ _", "gates": "_ channel _"})],
        {"norm": (6,), "qkv": (3, 6, 2, 4), "gates": (2, 6, 5)},
        {"qkv": Numbers((1,), (0, 2, 3)), "gates": Numbers((1,), (0, 2))}),
    "a scale per head": Reading(
        [go.rescale({"value": "_ head _", "bias": "head _"}, {"out": "head _ _"})],
        {"value": (6, 2, 4), "bias": (2, 4), "out": (2, 4, 5)}, {"value": QUERIES, "out": Numbers((1,), (2,))}),
    "a scale per entry or head, and grouped queries": Reading(
        [go.rescale({"value": "_ head channel"}, {"out": "head _ channel _"}),
         go.rescale({"v": "_ head _"}, {"o": "head _ _ _"})],
        {"value": (6, 2, 3), "out": (2, 4, 3, 6), "v": (6, 2, 3), "o": (2, 4, 3, 6)},
        dict.fromkeys(("value", "v"), QUERIES) | dict.fromkeys(("out", "o"), Numbers((2,), (3,)))),
    "QK-norm": Reading(
        [go.scale_invariant({"query": "_ (head _) _"}, sizes={"head": 2}),
         go.multiplier_balance({"m": "(head _) _"}, {"n": "head _"})],
        {"query": (6, 4, 3), "m": (4, 3), "n": (2, 3)}, {"query": QUERIES}),
    "a scale per layer": Reading(
        [go.rescale({"up": "layer _ _", "bias": "layer _"}, {"down": "layer _ _"})],
        {"up": (3, 6, 5), "bias": (3, 5), "down": (3, 5, 4)}, dict.fromkeys(("up", "down"), Numbers((1,), (2,)))),
    "outputs first": Reading(
        [go.rescale({up: "channel _"}, {down: "_ channel"}) for up, down in (("up", "mid"), ("mid", "down"))],
        {"up": (5, 6), "mid": (4, 5), "down": (3, 4)}, dict.fromkeys(("up", "mid", "down"), Numbers((1,), (0,)))),
    "a norm stored less one": Reading(  # under QK-norm no rotation splits a query into heads
        [go.norm_scale({"norm": "1+ channel", "bias": "channel"}, {"query": "channel _ _", "up": "channel _"})],
        {"norm": (6,), "bias": (6,), "query": (6, 2, 4), "up": (6, 5)}, {"query": Numbers((0,), (1, 2)), "up": FLAT}),
    "rotations before scales": Reading(
        [go.norm_scale({"norm": "channel"}, {"value": "channel _ _"}),
         go.head_rotation({"value": "_ head basis"} | OUT)],
        {"norm": (6,), "value": (6, 2, 4), "out": (2, 4, 6)}, {"value": QUERIES, "out": Numbers((1,), (2,))}),
    "no matrices": Reading(
        [go.logit_shift({"head": "_ vocab"}), go.scale_invariant({"normed": "_ channel"})],
        {"head": (6, 7), "normed": (6, 5)}, {}),
}
by_name = pytest.mark.parametrize("name", READINGS)


def _params(shapes: dict[str, Shape], seed: int = 0) -> Tree:
    return normal(seed, shapes) | {"free": jnp.ones((3, 4))}


def _read(gauges: list[go.Gauge], params: Tree) -> dict[str, Any]:
    return matrices_of(go.product(gauges)._bound(params).slice.parts)


def _stack(own: Matrices, leaf: Any) -> Any:
    """The matrices along one axis."""
    view = own.view(leaf)
    return view.reshape((-1, *view.shape[-2:]))


def _polar(own: Matrices, leaf: Any) -> Any:
    """Every matrix replaced by its polar factor, by an exact decomposition."""
    u, _, vt = np.linalg.svd(np.asarray(own.view(leaf)), full_matrices=False)
    return own.leaf(u @ vt)


def _by_numbers(numbers: Any, leaf: Any) -> Any:
    """A leaf as optax's Muon reads it."""
    inputs, outputs = numbers
    batch = tuple(k for k in range(leaf.ndim) if k not in (*inputs, *outputs))
    size = math.prod(leaf.shape[k] for k in inputs), math.prod(leaf.shape[k] for k in outputs)
    return leaf.transpose(*batch, *inputs, *outputs).reshape(-1, *size)


@by_name
def test_leaves_are_read_as_these_matrices(name: str) -> None:
    """Reading and writing a leaf loses nothing, and dimension numbers, from shapes alone, name the same matrices."""
    row = READINGS[name]
    params, group = _params(row.shapes), go.product(row.gauges)
    found, numbers = _read(row.gauges, params), group.muon_dimension_numbers(params)
    assert {path: _stack(own, params[path]).shape for path, own in found.items()} == row.views
    assert {path for path, own in numbers.items() if own is not None} == set(row.numbers)
    for path, own in found.items():
        leaf, theirs = params[path], _by_numbers(numbers[path], params[path])
        assert (own.fan_in, own.fan_out) == row.views[path][1:]
        np.testing.assert_array_equal(own.leaf(own.view(leaf)), leaf)
        assert sorted(own.batch + own.rows + own.columns) == list(range(len(own.split)))
        if isinstance(row.numbers[path], Numbers):
            assert numbers[path] == row.numbers[path]
            np.testing.assert_array_equal(theirs, _stack(own, leaf))
        else:  # heads share an axis with rows or columns: one matrix
            assert theirs.shape[0] == 1 and min(theirs.shape[1:]) > 1
    if all(isinstance(own, Numbers) for own in row.numbers.values()):
        assert group.muon_dimension_numbers(jax.eval_shape(lambda: params)) == numbers


@pytest.mark.parametrize(("count", "order"), [(2, [[0, 1], [2, 3]]), (4, [[0, 1, 2, 3]])])
def test_neighbouring_queries_share_a_matrix(count: int, order: list[list[int]]) -> None:
    """Not those at one place of their groups, as (0, 2)."""
    query = jnp.arange(72.0).reshape(6, 4, 3)
    own = _read(READINGS["grouped queries"].gauges, _params(READINGS["grouped queries"].shapes))["query"]
    found = _stack(own.grouped("query", count), query)
    np.testing.assert_array_equal(found, [query[:, heads].reshape(6, -1) for heads in np.array(order)])
    apart: list[go.Gauge] = [go.head_rotation({"query": "_ head _ basis", "key": "_ head basis"})]
    own = _read(apart, normal(0, {"query": (6, 2, 2, 3), "key": (6, 2, 3)}))["query"]
    np.testing.assert_array_equal(_stack(own.grouped("query", count), query.reshape(6, 2, 2, 3)), found)


def test_a_bias_beside_a_scale_per_head_makes_no_axis_of_queries() -> None:
    row = READINGS["a scale per head"]
    for path, own in _read(row.gauges, _params(row.shapes)).items():
        assert own.grouped(path, 2).text == {"value": "1 × (6, 8)", "out": "1 × (8, 5)"}[path]


def test_relative_steps_of_grouped_queries_have_one_factor() -> None:
    row = READINGS["grouped queries"]
    params, tx = _params(row.shapes), go.links.scale_by_relative_rms(row.gauges, 0.0)
    steps, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    for name, inputs in {"query": 6, "out": 12}.items():
        np.testing.assert_allclose(steps[name], jnp.sqrt(inputs * jnp.mean(params[name] ** 2)), rtol=1e-5)


TURNS = ("head_rotation", "rope_torus")


@pytest.mark.parametrize("name", [name for name, row in READINGS.items() if row.gauges[-1].name in TURNS])
def test_the_polar_factor_of_every_matrix_commutes_with_rotations(name: str, x64: None) -> None:
    row = READINGS[name]
    params, group = _params(row.shapes), go.product([gauge for gauge in row.gauges if gauge.name in TURNS])
    element, found = group.sample(jax.random.key(0), params), _read(row.gauges, params)
    moved = group.act(element, params)
    expected = group.act(element, params | {path: _polar(own, params[path]) for path, own in found.items()})
    for path, own in found.items():
        assert float(jnp.linalg.norm(moved[path] - params[path])) > 0.1
        error = float(jnp.linalg.norm(_polar(own, moved[path]) - expected[path]) / jnp.linalg.norm(expected[path]))
        assert error <= tolerance("oracle"), path


# Dimension numbers --------------------------------------------------------------------------------


def test_a_gauge_names_its_own_leaves() -> None:
    """The method of one gauge of a list knows nothing of the others."""
    norm, turn = READINGS["rotations before scales"].gauges
    params = _params(READINGS["rotations before scales"].shapes)
    assert norm.muon_dimension_numbers(params)["value"] == Numbers((0,), (1, 2))
    assert turn.muon_dimension_numbers(params)["value"] == QUERIES
    assert norm.muon_dimension_numbers(params)["out"] is None


@pytest.mark.skipif(
    "consistent_rms" not in inspect.signature(optax.contrib.muon).parameters, reason="a newer Optax's argument")
@pytest.mark.parametrize("name", ["grouped queries", "experts behind a norm", "convolutions"])
def test_muon_of_optax_takes_them(name: str) -> None:
    row = READINGS[name]
    params, grads, numbers = _params(row.shapes), _params(row.shapes, 1), go.product(row.gauges).muon_dimension_numbers
    tx = optax.contrib.muon(1.0, ns_steps=9, consistent_rms=1.0, muon_weight_dimension_numbers=numbers(params))
    step, _ = jit(tx.update)(grads, tx.init(params), params)
    for path, own in _read(row.gauges, params).items():
        sizes = np.linalg.svd(_stack(own, step[path]), compute_uv=False) / math.sqrt(max(own.fan_in, own.fan_out))
        assert 0.5 < sizes.min() <= sizes.max() < 1.5, path  # every matrix of the leaf is orthogonalised
    for path in set(params) - set(row.numbers):
        np.testing.assert_allclose(jnp.abs(step[path]), 1 + 0.9 / 1.9, rtol=1e-4)  # Adam's first step


@pytest.mark.parametrize("name", ["product/gpt", "product/llama"])
def test_a_whole_model_is_told_in_one_call(name: str) -> None:
    """What a user of `optax.contrib.muon` writes in place of a tree by hand."""
    case = next(case for case in GAUGE_CASES if case.name == name)
    params = case.params(jax.random.key(0))
    numbers = go.product(case.gauges()).muon_dimension_numbers(params)
    blocks = numbers["blocks"][0]
    heads = dict.fromkeys(("query", "key", "value"), QUERIES) | {"out": Numbers((1,), (2,))}
    assert {name: module["kernel"] for name, module in blocks["attn"].items()} == heads
    assert {module["kernel"] for module in blocks["mlp"].values()} == {FLAT}
    assert set(leaves_by_path(blocks["norm1"])) == set()  # None, for Adam
    tx = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers)
    jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)


def test_under_qk_norm_a_query_is_one_matrix_per_head_and_scales_are_none() -> None:
    config = lm.llama_config(vocab=7, d_model=6, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=5, qk_norm=True)
    params = jax.eval_shape(lambda: lm.params_and_loss(config, jax.random.key(0))[0])
    found = {path: own for path, own in _read(lm.gauges(config), params).items() if "/attn/" in path}
    sizes = {path.split("/")[3]: (own.batch, own.fan_in, own.fan_out) for path, own in found.items()}
    assert sizes == {"query": ((1,), 6, 4), "key": ((1,), 6, 4), "value": ((1,), 6, 4), "out": ((0,), 4, 6)}
