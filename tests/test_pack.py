"""Packed heads: what is saved, that the function stays, round trips, training, checkpoints, errors."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from models import gpt2, lm
from tests import quick
from tests.cases import GAUGE_CASES, GaugeCase
from tests.refusals import refused
from tests.tolerances import tolerance
from tests.twins import CONFIGS, loss_of, normal, start_of, stepper, structure, train

Tree = Any
PACKABLE = ("head_linear", "rope_linear")
CASES = [case for case in GAUGE_CASES if case.name.startswith((*PACKABLE, "product/linear"))]
HEADS = go.head_linear({"query": "_ head basis"}, {"key": "_ head basis"})
STACKED, PART = "layer _ head basis", ("qkv=0 _ head=0:2 basis", "qkv=1 _ head=0:2 basis")
OF_LAYERS = go.head_linear({"query": STACKED}, {"key": STACKED})
MORE = [  # a layer axis, and a block on a part of two axes
    GaugeCase("stacked", lambda: [OF_LAYERS],
              lambda _: normal(0, {"query": (2, 6, 2, 3), "key": (2, 6, 2, 3)}),
              lambda p: jnp.sum(jnp.cos(jnp.einsum("ldhe,lfhe->lhdf", p["query"], p["key"]))), dim=36),
    GaugeCase("part", lambda: [go.head_linear({"qkv": PART[0]}, {"qkv": PART[1]})],
              lambda _: normal(0, {"qkv": (3, 6, 4, 3)}), lambda p: _scores_and_rest(*p["qkv"]), dim=18),
]
SIX: dict[str, tuple[int, ...]] = {"query": (6, 2, 3), "key": (6, 2, 3)}
GPT = CONFIGS["gpt"]
WHOLE = [gauge for gauge in lm.gauges(GPT, linear=True) if gauge.name == "head_linear"]


def _scores_and_rest(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Scores of the first two heads, and all other entries."""
    scores = jnp.einsum("dhe,fhe->hdf", q[:, :2], k[:, :2])
    return jnp.sum(jnp.cos(scores)) + sum(jnp.sum(jnp.cos(x)) for x in (q[:, 2:], k[:, 2:], v))


def _size(tree: Tree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def _same_bits(a: Tree, b: Tree) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b))


# What is saved, and that the function stays -----------------------------------------------------------


@pytest.mark.slow_rows("*-float32-shared", "stacked-*", "part-*")
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", [*CASES, *MORE], ids=lambda case: case.name)
def test_every_register_row_is_packed(case: GaugeCase, dtype: str, shared: bool) -> None:
    """The function stays; as many numbers go as the gauges have dimensions; the round trip keeps every bit."""
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda x: x.astype(dtype), case.params(jax.random.key(0)))
        gauges = [gauge for gauge in case.gauges() if gauge.name in PACKABLE]
        packed = go.orbit.pack(params, case.gauges(), shared=shared)
        assert _size(params) - _size(packed) == sum(gauge.dim(params) for gauge in gauges)
        whole = go.orbit.unpack(packed)
        assert jax.tree.map(jnp.shape, whole) == jax.tree.map(jnp.shape, params)
        np.testing.assert_allclose(case.loss(whole), case.loss(params), rtol=tolerance("invariant", dtype))
        again = go.orbit.pack(whole, case.gauges(), shared=shared)
        assert structure(again) == structure(packed)
        assert _same_bits(again, packed) and _same_bits(go.orbit.unpack(again), whole)
        assert all(x.dtype == dtype for x in jax.tree.leaves(packed))


def test_gpt2_saves_two_squares_per_layer_and_head() -> None:
    """2 · 12 layers · 12 heads · 64² numbers, by shapes: the rows are given."""
    config = gpt2.config()
    shapes = nnx.to_pure_dict(nnx.split(nnx.eval_shape(lambda: gpt2.build(config, nnx.Rngs(0), multiplied=False)))[1])
    gauges = [gauge for gauge in lm.gauges(config, linear=True) if gauge.name == "head_linear"]
    own = {"_ head basis": {"size": 1.0, "rows": [list(range(64))]}}
    rows = {f"blocks/{i}/attn/{name}/kernel": own for i in range(12) for name in ("query", "value")}
    packed = jax.eval_shape(lambda p: go.orbit.pack(p, gauges, rows=rows), shapes)
    assert _size(shapes) - _size(packed) == 2 * 12 * 12 * 64**2 == 1_179_648
    assert leaves_by_path(packed)["blocks/3/attn/query/kernel"].shape == (704, 12, 64)


def test_the_size_keeps_the_block_as_large_as_it_was() -> None:
    params = jax.tree.map(lambda x: 0.01 * x, normal(0, {"query": (64, 4, 8), "key": (64, 4, 8)}))
    packed = go.orbit.pack(params, HEADS, size=np.float32(1.0))  # type: ignore[arg-type]
    assert go.orbit.packed_rows(packed)["query"]["_ head basis"]["size"] == 1.0
    packed = go.orbit.pack(params, HEADS)
    own = go.orbit.packed_rows(packed)["query"]["_ head basis"]
    assert np.log2(own["size"]) == round(np.log2(own["size"]))
    ratio = jnp.linalg.norm(go.orbit.unpack(packed)["query"]) / jnp.linalg.norm(params["query"])
    assert 2**-0.5 <= ratio <= 2**0.5
    # Another size than the one that a block has is set, and an odd one is rounded to what the leaf can hold.
    whole = go.orbit.unpack(go.orbit.pack(go.orbit.unpack(packed), HEADS, size=0.1))
    assert _same_bits(go.orbit.unpack(go.orbit.pack(whole, HEADS, size=0.1)), whole)
    assert float(jnp.max(whole["query"][np.array(own["rows"])[0], 0])) == float(np.float32(0.1))


@pytest.mark.slow
def test_the_packed_leaf_may_count_heads_in_another_order_than_the_gauge() -> None:
    gauge = go.head_linear({"query": "layer _ head basis"}, {"key": "head _ layer basis"})
    params = {"query": jnp.zeros((2, 6, 3, 3))} | normal(0, {"key": (3, 6, 2, 3)})
    rows = go.orbit.packed_rows(go.orbit.pack(params, gauge))["key"]["head _ layer basis"]["rows"]
    whole = go.orbit.unpack(go.orbit.pack(params, gauge, size=1.0))["key"]
    for at, own in enumerate(rows):
        np.testing.assert_array_equal(whole[at % 3, np.array(own), at // 3], np.eye(3))


@pytest.mark.slow_rows("per_head")
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
def test_queries_and_values_in_one_leaf_with_keys_whose_entries_stay(shared: bool) -> None:
    fused, gauges = normal(0, {"qkv": (6, 18), "out": (6, 5)}), _fused_gauges()
    packed = go.orbit.pack(fused, gauges, shared=shared)
    assert _size(fused) - _size(packed) == 2 * 2 * 9
    assert {path: x.shape for path, x in leaves_by_path(packed).items() if path != "out"} == {
        "qkv/part0": (3, 6), "qkv/part1": (3, 6), "qkv/rest": (6, 6),
    }
    whole = go.orbit.unpack(packed)
    for tree in (packed, whole):
        np.testing.assert_allclose(_fused_outputs(tree), _fused_outputs(fused), atol=1e-5)
    assert _same_bits(go.orbit.unpack(go.orbit.pack(whole, gauges, shared=shared)), whole)


def _fused_gauges() -> list[go.Gauge]:
    sizes = {"qkv": 3, "head": 2}
    q, k, v = (f"_ (qkv={n} head basis)" for n in range(3))
    return [
        go.head_linear({"qkv": q}, {"qkv": k}, sizes=sizes),
        go.head_linear({"qkv": v}, {"out": "(head basis) _"}, sizes=sizes),
    ]


def _fused_outputs(params: Tree) -> jax.Array:
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 6)), float)
    q, k, v = jnp.moveaxis(go.orbit.packed_dot(x, params["qkv"]).reshape(4, 3, 2, 3), 1, 0)
    weights = jax.nn.softmax(jnp.einsum("nhe,mhe->hnm", q, k))
    return jnp.einsum("hnm,mhe->nhe", weights, v).reshape(4, 6) @ params["out"]


def test_keys_are_packed_where_queries_are_grouped_and_outputs_where_values_are_zero() -> None:
    grouped = go.head_linear({"query": "_ (head _) basis"}, {"key": "_ head basis"})
    queries = normal(0, SIX | {"query": (6, 4, 3)})
    assert list(go.orbit.packed_rows(go.orbit.pack(queries, grouped))) == ["key"]
    biased = go.rope_linear(
        {"query": "_ (head _) basis", "bias": "(head _) basis"}, {"key": "_ head basis"}, pairing="interleaved")
    even = normal(0, {"query": (6, 4, 4), "bias": (4, 4), "key": (6, 2, 4)})
    assert list(go.orbit.packed_rows(go.orbit.pack(even, biased))) == ["key"]  # a bias has no axis of rows
    narrow = go.head_linear({"query": "_ _ basis", "other": "_ basis"}, {"key": "basis"})  # a kernel, and no bias
    own = normal(0, {"query": (5, 2, 3), "other": (6, 3), "key": (3,)})
    assert list(go.orbit.packed_rows(go.orbit.pack(own, narrow))) == ["other"]
    params = normal(0, {"out": (2, 3, 5)}) | {"value": jnp.zeros((6, 2, 3))}
    packed = go.orbit.pack(params, go.head_linear({"value": "_ head basis"}, {"out": "head basis _"}))
    assert list(go.orbit.packed_rows(packed)) == ["out"] and leaves_by_path(packed)["out"].shape == (2, 3, 2)
    assert not jnp.any(go.orbit.unpack(packed)["value"])


def test_bfloat16_leaves_keep_their_dtype_and_bits() -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), normal(0, {"query": (16, 2, 3), "key": (16, 2, 3)}))
    whole = go.orbit.unpack(go.orbit.pack(params, HEADS, size=0.3))
    assert whole["query"].dtype == jnp.bfloat16
    assert _same_bits(go.orbit.unpack(go.orbit.pack(whole, HEADS)), whole)
    before, after = (jnp.einsum("dhe,fhe->hdf", p["query"], p["key"], precision="highest") for p in (params, whole))
    np.testing.assert_allclose(np.asarray(before, np.float32), np.asarray(after, np.float32), atol=0.2)


# The slice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_twins_have_one_packed_tree(case: GaugeCase, x64: None) -> None:
    """With the same rows, all weights of one function are packed to the same numbers: no other gauge is left."""
    gauges = [gauge for gauge in case.gauges() if gauge.name in PACKABLE]
    params, group = case.params(jax.random.key(0)), go.product(gauges)
    packed = go.orbit.pack(params, gauges)

    def close(x: jax.Array, y: jax.Array) -> None:
        np.testing.assert_allclose(x, y, atol=1e-10 * float(jnp.max(jnp.abs(y), initial=0.0)))

    for seed in range(3):
        twin = group.act(group.sample(jax.random.key(seed), params), params)
        jax.tree.map(close, go.orbit.pack(twin, gauges, rows=go.orbit.packed_rows(packed)), packed)


# Products of activations --------------------------------------------------------------------------------


LINEAR = functools.partial(go.head_linear, right={"key": "_ head basis"})
LAYOUTS: dict[str, tuple[go.Gauge, tuple[int, ...], int]] = {  # of a query of this shape, and the axis that is summed
    "last": (HEADS, (6, 2, 3), 0), "first": (LINEAR({"query": "head basis _"}), (2, 3, 6), 2),
    "flat": (LINEAR({"query": "_ (head basis)"}), (6, 6), 0),
    "between": (LINEAR({"query": "basis head _"}), (3, 2, 6), -1),
    "rotary": (go.rope_linear({"query": "_ head basis"}, {"key": "_ head basis"}, pairing="interleaved"), (6, 2, 4), 0),
}


@pytest.mark.slow_rows("per_head*")
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_products_are_plain_ones(layout: str, shared: bool) -> None:
    gauge, shape, axis = LAYOUTS[layout]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 6)), float)
    params = normal(0, {"query": shape, "key": (6, 2, 4 if layout == "rotary" else 3)})
    packed = go.orbit.pack(params, gauge, shared=shared)
    plain = jnp.tensordot(x, go.orbit.unpack(packed)["query"], ([-1], [axis]))
    np.testing.assert_allclose(go.orbit.packed_dot(x, packed["query"], axis), plain, atol=1e-5)
    whole = go.orbit.packed_dot(x, params["query"], axis)
    np.testing.assert_array_equal(whole, jnp.tensordot(x, params["query"], ([-1], [axis])))


def test_shared_rows_save_multiplications() -> None:
    params = normal(0, {"query": (64, 4, 16), "key": (64, 4, 16)})
    packed = go.orbit.pack(params, HEADS, shared=True)["query"]
    x = jnp.ones((32, 64))

    def flops(kernel: Any) -> float:
        analysis: Any = jax.jit(go.orbit.packed_dot).lower(x, kernel).compile().cost_analysis()
        return float((analysis[0] if isinstance(analysis, list) else analysis)["flops"])

    assert flops(packed) < 0.8 * flops(params["query"])  # 48 of 64 rows, and one addition per output


# Training -------------------------------------------------------------------------------------------------


def test_a_packed_tree_trains_under_optax() -> None:
    """States mirror it under the plain tree's paths; constant rows stay; one program serves all steps."""
    params, plain_loss = start_of("gpt", "float32"), loss_of("gpt")
    packed = go.orbit.pack(params, WHOLE, size=1.0)
    tx = optax.adamw(1e-2, weight_decay=0.1, mask=go.tools.by_path({"**/kernel": True}, default=False))
    assert list(leaves_by_path(packed)) == list(leaves_by_path(params))
    assert _size(tx.init(packed)[0].mu) == _size(packed) == _size(params) - sum(gauge.dim(params) for gauge in WHOLE)
    step = stepper(tx, lambda p: plain_loss(go.orbit.unpack(p)))
    trained, losses = train(tx.init, step, packed, 5)
    assert losses[-1] < losses[0] and step._cache_size() == 1
    rows = go.orbit.packed_rows(trained)["blocks/0/attn/query/kernel"]["_ head basis"]["rows"]
    query = leaves_by_path(go.orbit.unpack(trained))["blocks/0/attn/query/kernel"]
    np.testing.assert_array_equal(query[np.array(rows[0]), 0], np.eye(3))


def test_the_gradient_is_the_plain_ones_without_the_constant_rows() -> None:
    weights = normal(1, {"query": (6, 2, 3)})["query"]
    packed = go.orbit.pack(normal(0, SIX), HEADS)
    grads = jax.grad(lambda p: jnp.sum(go.orbit.unpack(p)["query"] * weights))(packed)
    rows = go.orbit.packed_rows(packed)["query"]["_ head basis"]["rows"]
    for head, row in enumerate(rows):
        expected = np.delete(weights[:, head], row, axis=0)
        np.testing.assert_array_equal(leaves_by_path(grads)["query"][:, head], expected)


def test_gauges_that_are_left_go_on_under_quotient(x64: None) -> None:
    """Twins under the gauges that bind no packed leaf make one packed run; the other gauges are refused."""
    plain_loss = loss_of("gpt")
    packed = go.orbit.pack(start_of("gpt", "float64"), WHOLE)
    left = [g for g in lm.gauges(GPT, linear=True) if "attn" not in repr(g)]
    assert {gauge.name for gauge in left} == {"norm_scale", "rescale", "logit_shift"}
    tx, group = go.quotient(optax.adamw(1e-2), left), go.product(left)
    step = stepper(tx, lambda p: plain_loss(go.orbit.unpack(p)))
    twin = group.act(group.sample(jax.random.key(0), packed), packed)
    (first, losses), (_, of_twin) = (train(quick.jit(tx.init), step, p, 3) for p in (packed, twin))
    assert structure(first) == structure(packed)
    np.testing.assert_allclose(losses, of_twin, rtol=tolerance("quotient_loss"))
    plain = optax.adamw(1e-2)
    alone = stepper(plain, lambda p: plain_loss(go.orbit.unpack(p)))
    (_, losses), (_, of_twin) = (train(quick.jit(plain.init), alone, p, 3) for p in (packed, twin))
    assert abs(losses[-1] - of_twin[-1]) > 1e-5 * abs(losses[-1]), "AdamW does not tell these twins apart"
    for gauge in (lm.gauges(GPT)[0], WHOLE[1]):
        with pytest.raises(ValueError, match=rf"^{gauge.name}: binds the packed leaf 'blocks/0/attn/"):
            go.quotient(optax.adamw(1e-2), gauge).init(packed)


# Errors -----------------------------------------------------------------------------------------------------


def test_singular_heads_are_named() -> None:
    params = {name: x.at[:, 1, 2].set(x[:, 1, 0]) for name, x in normal(0, SIX).items()}
    with refused(r"^head_linear: singular heads in '(query|key)'", "head=1", "condition number", "leave this layer"):
        go.orbit.pack(params, HEADS)
    # Heads that read disjoint features have rows of their own, but none that both could share.
    params = dict.fromkeys(("query", "key"), jnp.eye(6).reshape(6, 2, 3))
    with pytest.raises(ValueError, match=r"leave out shared=True"):
        go.orbit.pack(params, HEADS, shared=True)
    assert _same_bits(go.orbit.unpack(go.orbit.pack(params, HEADS)), params)


TURN = go.head_rotation({"query": "_ head basis", "key": "_ head basis"})
ROWS_OF_OTHERS: list[Any] = [
    {}, {"key": {"head _ basis": {}}}, {"query": {"_ head basis": {"rows": [[0, 1, 2]]}}},
    *({"query": {"_ head basis": {"size": 1.0, "rows": own}}} for own in ([[0, 1]], [[0, 1, 6]], [[0, 1, 1]])),
    {"query": {"_ head basis": {"size": 1.0, "rows": [[0, 1, 2]] * 3}}},
]


@pytest.mark.parametrize(("call", "match"), [
    (lambda p: go.orbit.pack(p, TURN), r"nothing to pack\n  found:    gauges head_rotation"),
    (lambda p: go.orbit.pack(p, HEADS, size=0.0), r"bad size"),
    (lambda p: go.orbit.pack(p, HEADS, rows=[1]), r"bad rows"),  # type: ignore[arg-type]
    (jax.jit(lambda p: go.orbit.pack(p, HEADS)), r"no numbers in '(query|key)'"),
    (lambda p: go.orbit.pack(jax.eval_shape(lambda: p), HEADS), r"no numbers in '(query|key)'"),
    (lambda p: go.orbit.packed_dot(jnp.ones((2, 5)), p["query"]), "x does not fit axis 0"),
    (lambda p: jax.vmap(go.orbit.unpack)(go.orbit.pack(jax.tree.map(lambda x: jnp.stack([x, x]), p), OF_LAYERS)),
     "outside of scan"),
    (lambda p: go.orbit.packed_dot(jnp.ones((2, 2)), go.orbit.pack(p, HEADS)["query"], 1),
     r"no product with 'query' along axis 1"),
    *((lambda p, n=n: go.orbit.packed_dot(jnp.ones((2, n)), go.orbit.pack(p, HEADS)["query"]), "x does not fit axis 0")
      for n in (5, 7)),
    *((functools.partial(go.orbit.pack, gauges=HEADS, rows=rows), r"no rows for 'query'") for rows in ROWS_OF_OTHERS),
])
def test_what_cannot_be_packed_is_refused(call: Any, match: str) -> None:
    with refused(match):
        call(normal(0, SIX))


@pytest.mark.slow
def test_given_rows_can_be_traced() -> None:
    params = normal(0, SIX)
    packed = go.orbit.pack(params, HEADS)
    rows = go.orbit.packed_rows(packed)
    assert json.loads(json.dumps(rows)) == rows
    traced = jax.jit(lambda p: go.orbit.pack(p, HEADS, rows=rows))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), traced(params), packed)
    assert _same_bits(traced(go.orbit.unpack(packed)), packed)
