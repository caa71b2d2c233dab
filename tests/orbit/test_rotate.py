"""`rotate`: the function stays, QuaRot's fusing is reproduced, and outliers spread."""

import contextlib
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.orbit import _rotate as module
from gauge_optax.orbit import hadamard
from gauge_optax.orbit.hadamard import known_hadamard
from gauge_optax.orbit.rotations import random_rotation
from models import lm
from tests.cases import FLAT_CASES, GAUGE_CASES, lm_parts
from tests.orbit.test_canonicalize import apart, keeps
from tests.quick import rows
from tests.refusals import each_refused, refused
from tests.twins import normal

Tree = Any

SIZES: dict[str, Any] = dict(vocab=11, d_model=16, layers=2, heads=4, kv_heads=2, d_head=4, d_ff=6, max_len=5)
LLAMA, GPT = lm.llama_config(**SIZES), lm.LMConfig(**SIZES, mlp="gelu")
ROTATIONS = ("residual_rotation", "head_rotation", "head_linear")
NORMS = [gauge for gauge in lm.whole_gauges(LLAMA) if gauge.name == "norm_scale"]


@functools.cache
def numbers(config: lm.LMConfig) -> Tree:
    """Random weights; norms have scales near one."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: 0.4 * rng.normal(size=x.shape) + (x.ndim == 1), lm_parts(config)[0])


def rotations(config: lm.LMConfig, linear: bool = False) -> list[go.Gauge]:
    return [gauge for gauge in lm.whole_gauges(config, linear) if gauge.name in ROTATIONS]


def quarot(p: Tree, r1: np.ndarray, r2: list[np.ndarray]) -> Tree:
    """QuaRot's stages 1a and 1b by hand: fold norms, turn readers, writers and heads."""
    p = jax.tree.map(np.array, p)
    p["embed"]["embedding"] = p["embed"]["embedding"] @ r1
    for layer, heads in zip(p["blocks"].values(), r2, strict=True):
        attn, mlp = layer["attn"], layer["mlp"]
        for kernel in (attn["query"], attn["key"], attn["value"]):
            kernel["kernel"] = np.einsum("dc,d,dhe->che", r1, layer["norm1"]["scale"], kernel["kernel"])
        for kernel in (mlp["gate"], mlp["up"]):
            kernel["kernel"] = r1.T @ (layer["norm2"]["scale"][:, None] * kernel["kernel"])
        for norm in ("norm1", "norm2"):
            layer[norm]["scale"] = np.ones(16)
        attn["value"]["kernel"] = np.einsum("dhe,hef->dhf", attn["value"]["kernel"], heads)
        out = attn["out"]["kernel"].reshape(2, 2, 4, 16)  # two query heads read a value head
        attn["out"]["kernel"] = np.einsum("hgec,hef,cd->hgfd", out, heads, r1).reshape(4, 4, 16)
        mlp["down"]["kernel"] = mlp["down"]["kernel"] @ r1
    p["lm_head"]["kernel"] = r1.T @ (p["final_norm"]["scale"][:, None] * p["lm_head"]["kernel"])
    p["final_norm"]["scale"] = np.ones(16)
    return p


@pytest.mark.slow_rows("False")
@pytest.mark.parametrize("linear", [False, True])
def test_it_is_quarots_fusing(linear: bool, x64: None) -> None:
    params, gauges = jax.tree.map(jnp.asarray, numbers(LLAMA)), rotations(LLAMA, linear)
    folded = go.orbit.canonicalize(params, NORMS)
    rotated = go.orbit.rotate(folded, gauges, "hadamard", key=jax.random.key(3))
    keys = jax.random.split(jax.random.key(3), 3)
    (stream,), heads_of_layers = go.bind(gauges, params).copies
    r1 = np.asarray(random_rotation(stream.parts[-1], keys[0], "hadamard"))
    of_heads = zip(heads_of_layers, keys[1:], strict=True)
    heads = [np.asarray(random_rotation(copy.parts[-1], k, "hadamard")) for copy, k in of_heads]
    assert np.allclose(np.abs(r1), 0.25) and np.allclose(np.abs(heads), 0.5)
    assert apart(rotated, quarot(params, r1, heads)) <= 1e-13
    element = ({"": r1}, {f"i={number}": head for number, head in enumerate(heads)})
    assert apart(go.orbit.rotate(folded, gauges, element), rotated) <= 1e-13


TURNING = {*ROTATIONS, "rope_torus", "rope_linear"}
ROTATING = [case for case in (*FLAT_CASES, *GAUGE_CASES) if {gauge.name for gauge in case.gauges()} <= TURNING]
QUICK = [case.name for case in ROTATING if case.name.endswith(("plain", "fused", "slow_planes"))]


@rows(ROTATING, QUICK)
def test_the_function_stays(case: Any, dtype: str) -> None:
    """Also where norms have scales, biases, and LayerNorms subtract the mean."""
    params = case.params(jax.random.key(1))
    in_planes = any(gauge.name.startswith("rope") for gauge in case.gauges())
    for by in ("random",) if in_planes or "lora" in case.name else ("random", "hadamard"):  # whose rank is 3
        rotated = go.orbit.rotate(params, case.gauges(), by)
        assert {x.dtype for x in jax.tree.leaves(rotated)} == {jnp.dtype(dtype)}
        assert apart(rotated, params) > 0.1 and keeps(case.loss, params, rotated)


@pytest.mark.parametrize("by", ["hadamard", "random"])
def test_the_function_of_a_decoder_stays(by: str, x64: None) -> None:
    """With LayerNorms, and all of its rotations at once."""
    params, loss = jax.tree.map(jnp.asarray, numbers(GPT)), lm_parts(GPT)[1]
    rotated = go.orbit.rotate(params, rotations(GPT), by)
    assert apart(rotated, params) > 0.5 and keeps(lambda p: loss(p, np.arange(12).reshape(2, 6) % 11), params, rotated)


@pytest.mark.parametrize("by", ["hadamard", "random"])
def test_a_leaf_between_two_streams_reads_the_norm_of_each(by: str, x64: None) -> None:
    params = normal(0, {"x": (7, 4), "y": (7, 4), "norm_x": (4,), "norm_y": (4,), "kernel": (4, 4)})
    norms = [go.norm_scale({"norm_x": "channel"}, {"kernel": "channel _"}),
             go.norm_scale({"norm_y": "channel"}, {"kernel": "_ channel"})]
    streams = [go.residual_rotation({"kernel": "basis _"}, {"x": "_ basis"}, norms=norms[:1]),
               go.residual_rotation({"kernel": "_ basis"}, {"y": "_ basis"}, norms=norms[1:])]

    def products(p: Tree) -> jax.Array:
        return (p["x"] * p["norm_x"]) @ p["kernel"] @ (p["y"] * p["norm_y"]).T

    rotated = go.orbit.rotate(params, streams, by)
    assert apart(rotated, params) > 0.1 and apart([products(rotated)], [products(params)]) <= 1e-12


def test_norms_that_are_more_precise_than_kernels_are_passed() -> None:
    """Optimizers leave such a rotation out, because the norms' growth could not leave them; `rotate` does not."""
    kernels = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if x.ndim == 1 else jnp.bfloat16), numbers(LLAMA))
    params, gauges = optax.tree.cast(kernels, jnp.float32), NORMS + rotations(LLAMA)
    stream = gauges[-2]
    assert stream.name == "residual_rotation" and not go.bind(gauges, kernels).slice.turns[1:]

    def embedding(p: Tree) -> jax.Array:
        return p["embed"]["embedding"].astype(jnp.float32)

    rotated, expected = (go.orbit.rotate(p, rotations(LLAMA), key=jax.random.key(3)) for p in (kernels, params))
    assert apart(optax.tree.cast(rotated, jnp.float32), expected) < 1e-2
    assert apart(embedding(rotated), embedding(params)) > 0.5
    element = stream.sample(jax.random.key(4), kernels)
    acted, exact = (embedding(stream.act(element, p)) for p in (kernels, params))
    assert apart(acted, exact) < 1e-2 < 0.5 < apart(acted, embedding(params))


@pytest.mark.parametrize("after", [-jnp.inf, jnp.inf, jnp.nan, 0.0])
def test_infinities_of_the_outputs_have_to_stay(after: float) -> None:
    """A padded vocabulary has logits of −inf."""
    outputs = iter([-jnp.inf, after])

    def fn(p: Tree, _: Any) -> jax.Array:
        product = jnp.einsum("dhe,hef->df", p["value"], p["out"])
        return jnp.append(product, next(outputs))

    params = normal(0, {"value": (5, 2, 4), "out": (2, 4, 5)})
    with refused("another function") if after != -jnp.inf else contextlib.nullcontext():
        go.orbit.rotate(params, HEADS, fn=fn)


def test_what_is_donated_is_not_needed_any_more() -> None:
    """One array may be two leaves, and a check that fails must leave the weights where they are."""
    one = jnp.ones((4, 1, 4))
    params = {"value": one, "out": jnp.ones((1, 4, 4)), "other": one}
    with refused("another function"):
        go.orbit.rotate(params, HEADS, donate=True, fn=lambda p, x: p["value"], batch=0)
    for result in (go.orbit.rotate(params, HEADS, donate=True, fn=lambda p, x: p["other"], batch=0),
                   go.orbit.canonicalize(params | {"out": jnp.ones((1, 4, 4))}, HEADS, donate=True)):
        assert result["other"].sum() == 16.0 and params["out"].is_deleted()


def test_products_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bfloat16 leaf is what float64 gives, rounded; also in parts, the last of which overlaps the one before it."""
    gauge = go.residual_rotation({"head": "basis _"}, {"embedding": "_ basis"})
    low = normal(0, {"embedding": (37, 16), "head": (16, 37)}, jnp.bfloat16)
    with jax.enable_x64(True):
        exact = go.orbit.rotate(optax.tree.cast(low, jnp.float64), gauge)
        expected = optax.tree.cast(exact, jnp.bfloat16)
    chex.assert_trees_all_equal(go.orbit.rotate(low, gauge), expected)
    monkeypatch.setattr(module, "_CHUNK", 160)  # ten rows
    jax.clear_caches()
    chex.assert_trees_all_equal(go.orbit.rotate(low, gauge, donate=True), expected)
    assert low["head"].is_deleted()
    jax.clear_caches()


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 20, 24, 28, 36, 40, 48, 64, 768, 1152, 1600])
def test_hadamard_matrices(size: int) -> None:
    matrix = known_hadamard(size)
    assert matrix is not None and set(np.unique(matrix)) <= {-1.0, 1.0}
    np.testing.assert_array_equal(matrix @ matrix.T, size * np.eye(size))


@pytest.mark.parametrize("size", [4, 8, 12, 16, 24, 32, 48])
def test_hadamard_matrices_that_keep_the_ones(size: int, x64: None) -> None:
    matrix = hadamard.hadamard_with_ones(jax.random.key(0), size)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-13)
    np.testing.assert_allclose(jnp.sum(matrix, 1), 1.0)
    assert size not in (4, 16) or np.allclose(jnp.abs(matrix), size**-0.5)


@pytest.mark.parametrize("size", [10, 52])
def test_other_even_sizes_take_an_orthogonal_factor(size: int, x64: None) -> None:
    """The first is 2·5; of order 52 there are Hadamard matrices, but none of Paley's."""
    assert known_hadamard(size) is None
    matrices = hadamard.randomized_hadamard(jax.random.key(0), (3,), size)
    np.testing.assert_allclose(matrices @ matrices.mT, np.stack([np.eye(size)] * 3), atol=1e-13)
    assert float(jnp.max(jnp.abs(matrices[0] - matrices[1]))) > 0.1


HEADS = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
PARAMS = {"value": jnp.ones((6, 2, 3)), "out": jnp.ones((2, 3, 6)), "scale": jnp.ones(6)}
CENTRED = go.residual_rotation({"out": "_ _ basis"}, {"value": "basis _ _"}, centred=True)
NORM = go.norm_scale({"scale": "channel"}, {"value": "channel _ _"})
QK, PLANES = dict.fromkeys("qk", jnp.ones((6, 2, 4))), go.rope_torus({"q": "_ head basis", "k": "_ head basis"})
rotated = functools.partial(go.orbit.rotate, PARAMS)
test_bad_input_is_refused = each_refused([
    (lambda: rotated(HEADS, "hadamard"), "(?s)no Hadamard rotation at 'value'.*3 dimensions.*by='random'"),
    (lambda: rotated(HEADS, "walsh"), "no such rotation, by='walsh'"),
    (lambda: rotated(NORM, "hadamard"), "(?s)norm_scale: no rotation.*take it out of the list"),
    (lambda: rotated(HEADS, {"": jnp.eye(3)}), "an element of other gauges"),
    (lambda: rotated(HEADS, {"": jnp.ones((2, 3, 3))}), "(?s)an element that is no rotation.*QR"),
    (lambda: rotated(go.head_linear({"value": "_ head basis"}, {"out": "head basis _"}), {"": jnp.ones((2, 3, 3))}),
     "(?s)no matrix with an inverse.*QR"),
    (lambda: rotated(HEADS, "random", batch=1), "a batch without a function"),
    (lambda: rotated(CENTRED, "hadamard"), "(?s)6 dimensions.*a multiple of 4"),
    (lambda: go.orbit.rotate(QK, PLANES), "(?s)no Hadamard rotation.*rotary planes"),
    (lambda: jax.jit(lambda p: go.orbit.rotate(p, HEADS, "random"))(PARAMS), "(?s)called inside jit.*outside jit"),
])
