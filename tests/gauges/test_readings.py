"""What anchors read, for every row with directions: equivariant, the identity on the slice; balanced multipliers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.cases import FLAT_CASES, GAUGE_CASES, GaugeCase
from tests.quick import jit
from tests.tolerances import tolerance
from tests.twins import normal, trained

rows = pytest.mark.parametrize("case", (*GAUGE_CASES, *FLAT_CASES), ids=lambda case: case.name)
CASES = {case.name: case for case in GAUGE_CASES}
HEADS = {"q": "_ head basis"}
LARGE = 2.303  # condition 100 of linear gauges, factors of 10 of scales


def _far(a: Any, b: Any) -> float:
    """The largest distance of a leaf, relative to its size, or to 0.001 of the tree's: a leaf γ − 1 may be zero."""
    pairs = [(np.subtract(x, y), np.asarray(y)) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)]
    least = max(1e-3 * float(np.sqrt(sum(np.sum(y**2) for _, y in pairs))), 1e-30)
    return max(float(np.linalg.norm(x) / max(float(np.linalg.norm(y)), least)) for x, y in pairs)


def _slice_point(group: go.Gauge, params: Any) -> Any:
    return go.bind(group, params).slice_point(params)


@pytest.mark.slow_rows("product/[lw]*", "*stacked", "*fused", "*value_gqa", "*trained_scale")
@rows
def test_twins_have_one_slice_point_and_readings_lead_back(case: GaugeCase, x64: None) -> None:
    """A reading is the element that leads from the slice to the point, and the identity on the slice itself."""
    group, params, flat = go.product(case.gauges()), case.params(jax.random.key(1)), case in FLAT_CASES
    twin = group.act(group.sample(jax.random.key(2), params, 1.0 if flat else LARGE), params)
    assert _far(twin, params) > 0.1, "the twins are the same weights"
    on_slice, read = jit(go.bind(group, params).slice_point), jit(group.read)
    limit = 1e-11 if flat else tolerance("oracle")
    assert _far(on_slice(twin), on_slice(params)) <= limit
    for point in (params, twin):
        assert _far(group.act(read(point), on_slice(point)), point) <= limit
    assert _far(group.act(read(on_slice(params)), params), params) <= tolerance("oracle")


@pytest.mark.parametrize("zeros", [("w1",), ("w2",), ("w3",), ("w1", "w2"), ("w1", "w3"), ("w2", "w3")])
def test_zero_anchors_are_read_off_what_is_left(zeros: tuple[str, ...], x64: None) -> None:
    """In a chain whose links share leaves; with two zero leaves a channel has nothing left, and stays where it is."""
    group, params = go.product(CASES["product/chain"].gauges()), CASES["product/chain"].params(jax.random.key(1))
    params = params | {path: jnp.zeros_like(params[path]) for path in zeros}
    twin = group.act(group.sample(jax.random.key(2), params), params)
    here, there = map(jit(go.bind(group, params).slice_point), (params, twin))
    assert len(zeros) > 1 or _far(there, here) <= tolerance("oracle")
    for point, resting in ((params, here), (twin, there)):
        assert _far(group.act(group.read(point), resting), point) <= tolerance("oracle")
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves((here, there)))


def test_single_channels_of_zeros_do_not_disturb_the_others(x64: None) -> None:
    norm = go.norm_scale({"norm": "channel"}, {"up": "channel _"})
    group = go.product([go.rescale({"up": "_ channel"}, {"down": "channel _"}), norm])
    params = normal(0, {"norm": (5,), "up": (5, 4), "down": (4, 3)})
    params |= {"norm": params["norm"].at[1].set(0.0), "up": params["up"].at[:, 2].set(0.0).at[3].set(0.0)}
    twin = group.act(group.sample(jax.random.key(2), params), params)
    assert _far(_slice_point(group, twin), _slice_point(group, params)) <= tolerance("oracle")


def test_a_slice_is_made_once() -> None:
    """Instances are hashable and equal by value, so that all of an update shares one slice and its tables."""
    gauges, params = CASES["product/gpt"].gauges, CASES["product/gpt"].params(jax.random.key(0))
    group, shapes = go.product(gauges()), jax.eval_shape(lambda: params)
    assert group._bound(params).slice is group._bound(shapes).slice is go.product(gauges())._bound(params).slice


@pytest.mark.slow
def test_heads_of_full_rank_read_as_orthogonal_matrices() -> None:
    """In float32, one noise matrix of the reading loses a direction of several heads of this many (18 of 300)."""
    q, k = (jax.random.normal(jax.random.key(seed), (128, 300, 128)) for seed in (0, 1))
    gauge = go.head_rotation({"q": "_ head basis", "k": "_ head basis"})
    (frames,) = gauge.read({"q": q, "k": k}).values()
    products = jnp.einsum("hij,hkj->hik", frames, frames, precision="highest")
    assert float(jnp.abs(products - jnp.eye(128)).max()) <= 1e-5


QUERY, KEY = {"q": "_ head basis"}, {"k": "_ head basis"}
SMALL = {f"small columns of {x}": (go.head_rotation(QUERY | KEY), [1.0] * 8 + [x] * 8) for x in (3e-3, 1e-4, 0.0)}
LARGE_COLUMN = {"a large column": (go.head_linear(QUERY, KEY), [30.0] + [1.0] * 15)}


@pytest.mark.slow_rows("small columns of 0.003", "small columns of 0.0")
@pytest.mark.parametrize("gauge, columns", (SMALL | LARGE_COLUMN).values(), ids=SMALL | LARGE_COLUMN)
def test_small_directions_of_a_head_are_read_in_float32(gauge: go.Gauge, columns: list[float]) -> None:
    """Small columns were no part of the frame, and never trained. Beside a large product, no rotation was read."""
    params = normal(0, {"q": (24, 3, 16), "k": (24, 3, 16)}, "float32")
    params = {name: x * jnp.array(columns, jnp.float32) for name, x in params.items()}
    twin = gauge.act(gauge.sample(jax.random.key(2), params, 0.5), params)
    on_slice, read = jit(go.bind(gauge, params).slice_point), jit(gauge.read)
    here, there = map(on_slice, (params, twin))
    assert _far(there, here) <= tolerance("twins", "float32")
    assert max(_far(gauge.act(read(p), x), p) for p, x in ((params, here), (twin, there))) <= 1e-5


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_channels_of_any_size_are_read_and_train_as_their_twins(size: float) -> None:
    """Squares of 1e20 are no float32: steps were NaN, and those from 1e-19 others than their twins'."""
    gauge = go.rescale({"up": "_ unit"}, {"down": "unit _"})
    params = normal(0, {"up": (5, 4), "down": (4, 3)}, "float32")
    twin = gauge.act({"": jnp.log(jnp.array([1.0, size, size, 1.0], jnp.float32))}, params)
    assert _far(_slice_point(gauge, twin), _slice_point(gauge, params)) <= 1e-5
    tx = go.quotient(optax.adam(0.1), gauge)

    def after(p: Any) -> jax.Array:
        grads = jax.grad(lambda p: jnp.sum(jnp.square(p["up"] @ p["down"] - 1.0)))(p)
        p = optax.apply_updates(p, tx.update(grads, tx.init(p), p)[0])
        return p["up"] @ p["down"]

    np.testing.assert_allclose(after(twin), after(params), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("up", [{"up": "_ unit", "bias": "unit"}, {"bias": "unit", "up": "_ unit"}])
def test_a_column_is_read_together_with_its_bias(up: dict[str, str]) -> None:
    params = {"up": jnp.array([[3.0], [4.0]]), "bias": jnp.array([12.0]), "down": jnp.ones((1, 2))}
    on_slice = _slice_point(go.rescale(up, {"down": "unit _"}), params)
    np.testing.assert_allclose(on_slice["bias"], [12.0 / 13.0], rtol=1e-6)
    np.testing.assert_allclose(on_slice["down"], [[13.0, 13.0]], rtol=1e-6)


def test_all_writers_of_a_stream_are_read_together() -> None:
    """On the slice their norm is that of kernels whose columns have norm 1: two of width 4."""
    params = {"embed": 3.0 * jnp.ones((7, 4)), "out": jnp.ones((2, 3, 4)), "bias": jnp.ones(4)}
    on_slice = _slice_point(go.residual_scale({"embed": "_ _", "out": "_ _ _", "bias": "_"}), params)
    np.testing.assert_allclose(sum(float(jnp.sum(x**2)) for x in on_slice.values()), 8.0, rtol=1e-6)


def test_the_asymmetry_of_heads_adds_arrays_of_one_rank() -> None:
    gauge, params = go.head_rotation({"q": "_ head basis"}), normal(0, {"q": (5, 2, 4)}, "float32")
    with jax.numpy_rank_promotion("raise"):
        assert go.bind(gauge, params).asymmetry(params, params)


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_the_asymmetry_does_not_depend_on_the_size_of_weights(size: float) -> None:
    params = jax.tree.map(lambda x: size * x, normal(0, {"up": (4, 3), "down": (3, 2)}, "float32"))
    grads = jax.grad(lambda p: jnp.sum((p["up"] / size) @ (p["down"] / size)))(params)
    right, wrong = (go.rescale({"up": "_ unit"}, {"down": "unit _"}, degree=n) for n in (1, 2))
    assert go.bind(right, params).asymmetry(params, grads)[0][""] < 1e-5
    assert go.bind(wrong, params).asymmetry(params, grads)[0][""] > 0.05


def test_heads_are_read_and_their_turns_measured_where_jax_forbids_promotion() -> None:
    gauge, params = go.head_rotation({"q": "_ head basis"}), normal(0, {"q": (5, 2, 4)}, "float32")
    step = jax.tree.map(lambda x: x[::-1], params)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert gauge.read(params)[""].shape == go.measure.vertical_motion(params, step, gauge)[0][""].shape


@pytest.mark.parametrize(
    "gauge", [go.head_rotation(HEADS), go.rope_torus(HEADS), go.rope_linear(HEADS, {"k": "_ head basis"})],
    ids=lambda gauge: gauge.name)
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_random_element_may_have_a_traced_size(gauge: go.Gauge, scale: float) -> None:
    params, key = normal(0, {"q": (5, 2, 4), "k": (5, 2, 4)}, "float32"), jax.random.key(0)
    traced, known = jax.jit(lambda s: gauge.sample(key, params, s))(scale), gauge.sample(key, params, scale)
    np.testing.assert_allclose(traced[""], known[""], rtol=1e-4, atol=1e-5)


# Multipliers of queries and keys ------------------------------------------------------------------

GROUPED = go.multiplier_balance({"query": "(head _) _"}, {"key": "head _"})


def _multipliers(dtype: str) -> Any:
    params = normal(0, {"query": (4, 3), "key": (2, 3)}, dtype)
    return params | {"query": 2.0 * params["query"]}


def _ratio(p: Any) -> np.ndarray:
    """s_Q / s_K per key head, Eq. (3): the root mean squares of its multipliers."""
    query, key = (np.asarray(p[name], np.float64).reshape(2, -1) for name in ("query", "key"))
    return np.sqrt(np.mean(query**2, 1) / np.mean(key**2, 1))


def _scores(p: Any) -> jax.Array:
    return p["query"] * jnp.repeat(p["key"], 2, 0)


def test_groups_are_balanced_by_root_mean_squares(x64: None) -> None:
    """Eq. (4) to (6) by hand; `rescale` balances sums of squares. Biases of queries go along, and do not count."""
    params = _multipliers("float64") | {"bias": jnp.full((4, 3), 5.0)}
    g = np.sqrt(_ratio(params))
    gauge = go.multiplier_balance({"query": "(head _) _", "bias": "(head _) _"}, {"key": "head _"})
    balanced = gauge.act(gauge.balance(params), params)
    for name in ("query", "bias"):
        np.testing.assert_allclose(balanced[name], params[name] / np.repeat(g, 2)[:, None], rtol=1e-12)
    np.testing.assert_allclose(balanced["key"], params["key"] * g[:, None], rtol=1e-12)
    np.testing.assert_allclose(_scores(balanced), _scores(params), rtol=1e-12)
    sums = go.rescale({"query": "(head _) _"}, {"key": "head _"})
    np.testing.assert_allclose(_ratio(sums.act(sums.balance(params), params)), 2**-0.5, rtol=1e-12)


def test_gauges_without_a_balance_stay_as_they_are_beside_others(x64: None) -> None:
    """They moved to where they read as zero, with norms of up to twice the least, and no product had a balance."""
    tables = normal(0, {"tok": (50, 6), "pos": (4, 6), "b": (6,), "w": (6, 8), "c": (8,), "v": (8, 3)})
    params = tables | {"tok": tables["tok"] + 1.0, "pos": tables["pos"] + 1.0, "s": jnp.ones(6)}
    reader, bias, behind = {"w": "channel _"}, {"b": "channel"}, {"c": "_"}
    still = [
        go.embedding_shift({"tok": "_ channel"}, {"pos": "_ channel"}), go.bias_absorption(bias, reader, behind),
        go.norm_read_shift(reader, {"s": "channel"}, bias, behind),
    ]
    others = [go.norm_scale({"s": "channel", "b": "channel"}, reader), go.logit_shift({"v": "_ vocab"})]
    together, alone = (gauge.act(gauge.balance(params), params) for gauge in map(go.product, (still + others, others)))
    assert _far(alone, params) > 0.1
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), together, alone)
    for gauge in still:
        assert gauge.balancing == "still"
        jax.tree.map(np.testing.assert_array_equal, gauge.act(gauge.balance(params), params), params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zeros_stay_and_signs_are_kept(dtype: str) -> None:
    params = _multipliers(dtype)
    params["key"] = params["key"].at[0].set(0.0)
    tx = go.orbit.gauge_fix(optax.sgd(0.0), GROUPED)
    moved = optax.apply_updates(params, tx.update(params, tx.init(params), params)[0])
    np.testing.assert_array_equal(moved["query"][:2], params["query"][:2])
    for name, x in params.items():
        assert moved[name].dtype == dtype and bool(jnp.all(jnp.isfinite(moved[name])))
        np.testing.assert_array_equal(jnp.sign(moved[name]), jnp.sign(x))
    with np.errstate(divide="ignore"):
        assert abs(np.log(_ratio(moved)[1])) <= (3.5e-7 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("every", [1, 100])
def test_drift_is_rounding_at_every_frequency(every: int) -> None:
    """After a fix; Table 2 has 3.5e-7."""
    tx, start = go.orbit.gauge_fix(optax.adam(1e-2), GROUPED, every=every), _multipliers("float32")
    params, _ = trained(tx, lambda p: jnp.sum(jnp.square(_scores(p) - 1.0)), start, 200)
    assert np.max(np.abs(np.log(_ratio(params)))) <= 3.5e-7


@pytest.mark.parametrize("queries", ["head _", "(head _) _"])
def test_multipliers_of_one_are_on_the_slice(queries: str, x64: None) -> None:
    """Otherwise an optimizer inside `quotient` would start elsewhere than the plain one, with other relative steps."""
    gauge = go.multiplier_balance({"query": queries}, {"key": "head _"})
    params = {"query": jnp.ones((4 if "(" in queries else 2, 3)), "key": jnp.ones((2, 3))}
    np.testing.assert_allclose(gauge.coordinates(params)[""], 0.0, atol=1e-15)
    plain, ours = (
        tx.update(params, tx.init(params), params)[0]  # a gradient of ones
        for tx in (optax.adam(0.1), go.quotient(optax.adam(0.1), gauge, rest="balanced"))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), plain, ours)
