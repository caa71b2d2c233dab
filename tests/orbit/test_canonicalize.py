"""`canonicalize`: twins become the same numbers, and the function stays, on every row of the registers and trees."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from models import lm
from tests.cases import DISCRETE_CASES, FLAT_CASES, GAUGE_CASES, GaugeCase, lm_parts
from tests.quick import jit, rows
from tests.refusals import refused
from tests.twins import normal

Tree = Any

QUICK = (
    "bias_absorption/value_gqa", "residual_rotation/stacked", "product/linear", "rope_linear/half", "rescale/layers",
    "norm_scale/one_plus", "head_rotation/gqa", "user_gauge/translation", "product/slow_planes",
    *(case.name for case in DISCRETE_CASES if "/whole" not in case.name),
)


def apart(a: Tree, b: Tree) -> float:
    """The largest difference of a leaf, relative to the leaf or to 1."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.linalg.norm(np.subtract(x, y)) / max(1.0, float(np.linalg.norm(y)))) for x, y in pairs)


def whole(model: str) -> tuple[list[go.Gauge], Tree]:
    """All gauges of a whole decoder, and its weights."""
    (case,) = (case for case in FLAT_CASES if case.name == f"product/whole_{model}")
    return case.gauges(), case.params(jax.random.key(1))


def twin_of(gauges: Any, params: Tree, seed: int = 2) -> Tree:
    group = go.product(gauges)
    return group.act(group.sample(jax.random.key(seed), params), params)


def keeps(loss: Any, params: Tree, moved: Tree) -> bool:
    """Whether two points have one loss, up to roundoff of the precision in use."""
    before, after = (float(loss(p)) for p in (params, moved))
    return abs(after - before) <= (1e-12 if jax.config.read("jax_enable_x64") else 1e-5) * abs(before)


@rows((*FLAT_CASES, *GAUGE_CASES, *DISCRETE_CASES), QUICK)
def test_twins_become_the_same_numbers_and_the_loss_stays(case: GaugeCase, x64: None) -> None:
    gauges, params = case.gauges(), case.params(jax.random.key(1))
    seed, limit = (3, 1e-12) if case in DISCRETE_CASES else (2, 1e-10)
    twin, canonical = twin_of(gauges, params, seed), go.orbit.canonicalize(params, gauges)
    assert apart(twin, params) > 0.1 < apart(canonical, params) + apart(canonical, twin)
    assert apart(go.orbit.canonicalize(twin, gauges), canonical) <= limit
    assert apart(go.orbit.canonicalize(canonical, gauges), canonical) <= 1e-12
    assert keeps(case.loss, params, canonical)


@rows((*FLAT_CASES, *GAUGE_CASES, *DISCRETE_CASES), ["product/whole_gpt"])
def test_the_loss_stays_in_float32(case: GaugeCase) -> None:
    params = case.params(jax.random.key(1))
    assert keeps(case.loss, params, go.orbit.canonicalize(params, case.gauges()))


SIZES: dict[str, Any] = dict(vocab=7, d_model=8, layers=2, heads=4, kv_heads=2, d_head=4, d_ff=5, max_len=4)


def drawn(config: lm.LMConfig, dtype: str) -> Tree:
    """Normal weights of one size, norms included."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.4 * rng.normal(size=x.shape), dtype), lm_parts(config)[0])


@pytest.mark.slow
def test_what_holds_at_the_canonical_point(x64: None) -> None:
    """Norm scales 1, biases that pass on 0, writers and logits centred, heads as singular value decompositions."""
    config = lm.LMConfig(**SIZES, mlp="relu", norm_one_plus=True)
    p = go.orbit.canonicalize(drawn(config, "float64"), lm.whole_gauges(config))
    zero = functools.partial(np.testing.assert_allclose, desired=0.0, atol=1e-12)
    for block in p["blocks"].values():
        attn, up = block["attn"], block["mlp"]["up"]["kernel"]
        units = jnp.concatenate([up, block["mlp"]["up"]["bias"][None]])
        jax.tree.map(zero, [block["norm1"], block["norm2"]])  # scales are stored less one
        jax.tree.map(zero, [attn["value"]["bias"], attn["key"]["bias"]])
        jax.tree.map(zero, [jnp.mean(attn["out"]["kernel"], -1), jnp.mean(up, 0)])
        np.testing.assert_allclose(jnp.linalg.norm(units, axis=0), 1.0)
        left, right = jnp.moveaxis(attn["value"]["kernel"], 1, 0), attn["out"]["kernel"].reshape(2, 2, 4, 8)
        np.testing.assert_allclose(jnp.einsum("hde,hdf->hef", left, left), np.stack([np.eye(4)] * 2), atol=1e-12)
        gram = jnp.einsum("hgef,hgcf->hec", right, right)
        sizes = jnp.diagonal(gram, axis1=1, axis2=2)
        zero(gram - sizes[:, :, None] * jnp.eye(4))
        both = jnp.concatenate([left, right.transpose(0, 1, 3, 2).reshape(2, 16, 4)], 1)
        assert jnp.all(sizes[:, :-1] > sizes[:, 1:]) and jnp.all(jnp.max(both, 1) >= -jnp.min(both, 1))
    jax.tree.map(zero, [jnp.mean(p["lm_head"]["kernel"], -1), jnp.mean(p["pos"]["embedding"], 0)])


LINEAR = go.head_linear({"a": "_ head basis"}, {"b": "head basis _"})


def mirrored(*shape: int, axis: int = 0, seed: int = 0) -> np.ndarray:
    """Random numbers, followed along one axis by their negatives."""
    x = np.random.default_rng(seed).normal(size=shape)
    return np.concatenate([x, -x], axis)


QK, HEADS = dict.fromkeys("qk", "_ head basis"), go.head_rotation({"v": "_ head basis", "o": "head basis _"})
DEEP = [go.permutation({"a": "_ unit", "b": "unit _"}), go.permutation({"b": "_ unit", "c": "unit _"})]
# Heads with orthonormal columns, whose Gram matrix has one eigenvalue, and with two pairs of equal ones.
COLUMNS = np.linalg.qr(np.random.default_rng(0).normal(size=(2, 12, 4)))[0].swapaxes(0, 1)
COLUMNS[:, 1] *= np.array([3.0, 1.0, 3.0, 1.0])
EQUAL = {"q": COLUMNS[:6], "k": COLUMNS[6:]}
TIES: dict[str, tuple[Any, dict[str, np.ndarray]]] = {
    "units": (DEEP[0], {"a": mirrored(5, 3, axis=1), "b": mirrored(3, 4)}),
    "units of two layers": (DEEP, {"a": mirrored(4, 3, axis=1), "c": mirrored(5, 2),
                                   "b": np.concatenate([mirrored(3, 5, axis=1), mirrored(3, 5, axis=1, seed=1)])}),
    "rows of heads": ([go.norm_scale({"s": "channel"}, {"v": "channel _ _"}), HEADS],
                      {"s": np.ones(6), "v": mirrored(3, 2, 4), "o": 0.1 * mirrored(2, 4, 3, axis=2, seed=1)}),
    "rows of planes": (go.rope_torus(QK), {"q": mirrored(3, 2, 4), "k": mirrored(3, 2, 4, seed=1)}),
    "equal eigenvalues": (go.head_rotation(QK), EQUAL),
    "equal eigenvalues in planes": (go.rope_torus(QK), EQUAL),
}


@pytest.mark.parametrize("name", TIES)
def test_what_is_equal_decides_nothing(name: str, x64: None) -> None:
    """Units, heads and rows that come in pairs w and −w, as in a network that starts as a linear one; eigenvalues."""
    gauges, params = TIES[name][0], jax.tree.map(jnp.asarray, TIES[name][1])
    canonical = go.orbit.canonicalize(params, gauges)
    for seed in range(4):
        assert apart(go.orbit.canonicalize(twin_of(gauges, params, seed), gauges), canonical) <= 1e-12


@pytest.mark.slow
def test_bases_by_choice(x64: None) -> None:
    """`anchor` is the slice point of optimizers; `stored` leaves heads and the stream where they are."""
    gauges, params = whole("gpt")
    group = go.product(gauges)
    anchored = go.orbit.canonicalize(params, group, heads="anchor", stream="anchor")
    assert apart(anchored, go.orbit.canonicalize(anchored, group, heads="stored", stream="stored")) <= 1e-12
    assert apart(anchored, go.bind(group, params).slice_point(params)) <= 1e-12
    assert apart(go.orbit.canonicalize(EQUAL, go.head_rotation(QK), heads="stored"), EQUAL) == 0.0


def test_negative_scales_of_norms_may_stay_negative(x64: None) -> None:
    """They become −1 then, their twins by positive scales too; the function stays, and so does all that has no sign."""
    case = next(case for case in FLAT_CASES if case.name == "product/whole_llama")
    gauges, params = case.gauges(), case.params(jax.random.key(1))
    for block in params["blocks"].values():
        block["norm1"]["scale"] = block["norm1"]["scale"].at[::2].multiply(-1.0)
    kept, positive = (go.orbit.canonicalize(params, gauges, signs=signs) for signs in (False, True))
    for path, scale in leaves_by_path(kept).items():
        if path.endswith("scale"):
            np.testing.assert_allclose(scale, jnp.sign(leaves_by_path(params)[path]), rtol=1e-12)
            np.testing.assert_allclose(leaves_by_path(positive)[path], 1.0, rtol=1e-12)
    assert apart(go.orbit.canonicalize(twin_of(gauges, params), gauges, signs=False), kept) <= 1e-10
    assert apart(go.orbit.canonicalize(kept, gauges), positive) <= 1e-10
    assert keeps(case.loss, params, kept)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_factor_of_less_than_full_rank_is_read_from_the_other(rank: int, x64: None) -> None:
    """Twins agree, and the canonical point is its own canonical point: columns of roundoff do not count again."""
    rng = np.random.default_rng(0)
    low = np.einsum("ihr,hrj->ihj", rng.normal(size=(4, 2, rank)), rng.normal(size=(2, rank, 3)))
    full = rng.normal(size=(5, 2, 3))
    for params in ({"a": low, "b": np.moveaxis(full, 0, 2)}, {"a": full, "b": np.moveaxis(low, 0, 2)}):
        canonical = go.orbit.canonicalize(params, LINEAR)
        for other in (canonical, twin_of(LINEAR, params)):
            assert apart(go.orbit.canonicalize(other, LINEAR), canonical) <= 1e-10
        product = [np.einsum("ihd,hdj->ihj", p["a"], p["b"]) for p in (params, canonical)]
        np.testing.assert_allclose(product[1], product[0], atol=1e-12)


def test_a_tiny_head_keeps_its_product() -> None:
    """Squares of its entries underflow in float32."""
    params = normal(0, {"a": (6, 2, 3), "b": (2, 3, 6)}, "float32")
    params["a"] *= 1e-20
    canonical = go.orbit.canonicalize(params, LINEAR)
    product = [1e20 * np.einsum("ihd,hdj->ihj", np.float64(p["a"]), p["b"]) for p in (params, canonical)]
    np.testing.assert_allclose(product[1], product[0], atol=1e-4)


@pytest.mark.parametrize("size", [1e-20, 1e20])
@pytest.mark.parametrize("gauge", [
    go.head_rotation({"a": "_ head basis", "b": "head basis _"}), go.rope_torus({"a": "_ head basis"}),
    go.residual_rotation({"a": "_ _ basis"}, {"b": "_ basis _"}),
], ids=lambda gauge: gauge.name)
def test_the_basis_of_tiny_and_huge_weights_has_no_squares_of_them(gauge: go.Gauge, size: float) -> None:
    """In float32 these were 0, so that heads kept their basis, or infinite: all weights became NaN."""
    params = normal(0, {"a": (6, 2, 4), "b": (2, 4, 6)}, "float32")
    usual, scaled = (go.orbit.canonicalize({name: np.float32(n) * x for name, x in params.items()}, gauge)
                     for n in (1.0, size))
    assert apart({name: x / np.float32(size) for name, x in scaled.items()}, usual) <= 1e-4


@pytest.mark.filterwarnings("ignore:canonicalize. heads without full rank")
def test_heads_without_a_frame_stay_as_they_are() -> None:
    params = normal(0, {"a": (2, 1, 3), "b": (1, 3, 2)}, "float32")
    assert apart(go.orbit.canonicalize(params, LINEAR), params) == 0.0


def test_heads_without_a_frame_are_named() -> None:
    """Both factors are padded. A head of zeros has nothing to move, and rotations turn padded heads like others."""
    turning = go.head_rotation({"a": "_ head basis", "b": "head basis _"})
    kernel = jnp.ones((4, 2, 3)).at[:, :, 0].set(jnp.arange(8.0).reshape(4, 2)).at[:, 1].set(0.0)
    params = {"a": kernel, "b": jnp.moveaxis(kernel, 0, 2)}
    ggn = go.measure.GGN(lambda p, x: jnp.einsum("ni,ihb,hbo->no", x, p["a"], p["b"]), params, [jnp.eye(4)], "gaussian")
    for call in (
        lambda gauge: go.orbit.canonicalize(params, gauge),
        lambda gauge: go.quotient(optax.adam(1e-3), gauge).init(params),
        lambda gauge: go.quotient_muon(1e-3, gauge).init(params),
    ):
        with pytest.warns(UserWarning, match=r"without full rank in 'a' and 'b'\n.*1 of 2 heads(.|\n)*remedy") as told:
            call(LINEAR)
        assert {str(w.filename) for w in told} == {__file__}
        call(turning)
    for measured in (
        lambda gauge: go.measure.quotient_fisher(ggn, gauge).dim,
        lambda gauge: go.measure.quotient_arc_length([params, params], gauge),
    ):
        with refused("heads without full rank in 'a' and 'b'", "1 of 2 heads"):
            measured(LINEAR)
        measured(turning)


CALLS = {
    "canonicalize": go.orbit.canonicalize, "quotient": lambda p, g: go.quotient(optax.adam(1e-3), g).init(p),
    "quotient_arc_length": lambda p, g: go.measure.quotient_arc_length([p, p], g),
}


@pytest.mark.slow_rows("[!c]*")
@pytest.mark.parametrize("name", CALLS)
def test_rows_behind_a_scale_of_zero_determine_no_frame(name: str) -> None:
    """Twins have rows of other sizes there. What is left of both factors has rank one."""
    params = normal(0, {"a": (2, 1, 2), "b": (2, 1, 2)}) | {"s": jnp.array([0.0, 1.0])}
    axes, match = "_ head basis", r"heads without full rank in 'a' and 'b'\n.*1 of 1 heads"
    gauges = [go.norm_scale({"s": "c"}, {"a": "c _ _", "b": "c _ _"}), go.head_linear({"a": axes}, {"b": axes})]
    with refused(match) if name == "quotient_arc_length" else pytest.warns(UserWarning, match=match):
        CALLS[name](params, gauges)
    CALLS[name](params, [gauges[0], go.head_rotation({"a": axes, "b": axes})])


@pytest.mark.slow
@pytest.mark.parametrize("linear", [False, True])
def test_dead_heads_and_channels_stay_finite(linear: bool) -> None:
    """A zero output kernel, a zero norm scale, a dead unit, a head of rank one: finite, and the same loss."""
    config = lm.LMConfig(**SIZES, mlp="relu", norm="rmsnorm", bias=False)
    params = drawn(config, "float32")
    block = params["blocks"][0]
    block["attn"]["out"]["kernel"] *= 0.0
    block["norm1"]["scale"] = block["norm1"]["scale"].at[1].set(0.0)
    block["mlp"]["up"]["kernel"] = block["mlp"]["up"]["kernel"].at[:, 0].set(0.0)
    block["attn"]["query"]["kernel"] = jnp.ones_like(block["attn"]["query"]["kernel"])
    canonical = go.orbit.canonicalize(params, lm.whole_gauges(config, linear, residual=False))
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(canonical))
    assert keeps(lambda p: lm_parts(config)[1](p, np.arange(10).reshape(2, 5) % 7), params, canonical)


@pytest.mark.slow
def test_it_may_be_compiled_and_keeps_dtypes() -> None:
    gauges, params = whole("llama")
    inside = jit(lambda p: go.orbit.canonicalize(p, gauges))(params)
    assert apart(inside, go.orbit.canonicalize(params, gauges)) <= 1e-4
    low = jax.eval_shape(lambda p: go.orbit.canonicalize(optax.tree.cast(p, jnp.bfloat16), gauges), params)
    assert {x.dtype for x in jax.tree.leaves(low)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(("gauge", "shapes"), [
    (go.head_rotation({"v": "_ head basis", "o": "head basis _"}), {"v": (4, 2, 3), "o": (2, 3, 4)}),
    (go.head_rotation({"v": "_ head basis", "o": "head basis _"}), {"v": (1, 2, 5), "o": (2, 5, 2)}),  # of rank three
    (go.residual_rotation(read={"k": "basis _"}, write={"e": "_ basis"}), {"e": (7, 4), "k": (4, 5)}),
])
def test_its_derivative(gauge: go.Gauge, shapes: dict[str, tuple[int, ...]], x64: None) -> None:
    params, along = normal(0, shapes), normal(1, shapes)

    def number(step: Any) -> Any:
        moved = go.orbit.canonicalize(jax.tree.map(lambda x, y: x + step * y, params, along), gauge)
        return sum(jnp.sum(jnp.cos(3 * x) * np.arange(x.size).reshape(x.shape)) for x in moved.values())

    expected = (number(1e-6) - number(-1e-6)) / 2e-6
    assert abs(expected) > 1.0 and abs(jax.grad(number)(0.0) - expected) <= 1e-6 * abs(expected)


def test_bad_input_is_refused() -> None:
    gauge = go.norm_scale({"scale": "channel"}, {"kernel": "channel _"})
    with refused(r"no such basis, heads='svd'", "write heads='eigenbasis'"):
        go.orbit.canonicalize({"scale": jnp.ones(2), "kernel": jnp.ones((2, 3))}, gauge, heads="svd")  # type: ignore[arg-type]
    with refused("norm_scale: no leaf matches"):
        go.orbit.canonicalize({"other": jnp.ones(2)}, gauge)
