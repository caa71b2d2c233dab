"""What anchors read, for every row with directions: equivariant, and the identity on the slice."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from tests.cases import FLAT_CASES, GAUGE_CASES, GaugeCase
from tests.quick import jit
from tests.tolerances import tolerance
from tests.twins import normal

rows = pytest.mark.parametrize("case", (*GAUGE_CASES, *FLAT_CASES), ids=lambda case: case.name)
CASES = {case.name: case for case in GAUGE_CASES}
LARGE = 2.303  # condition 100 of linear gauges, factors of 10 of scales


def _far(a: Any, b: Any) -> float:
    """The largest distance of a leaf, relative to its size, or to 0.001 of the tree's: a leaf γ − 1 may be zero."""
    pairs = [(np.subtract(x, y), np.asarray(y)) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)]
    least = max(1e-3 * float(np.sqrt(sum(np.sum(y**2) for _, y in pairs))), 1e-30)
    return max(float(np.linalg.norm(x) / max(np.linalg.norm(y), least)) for x, y in pairs)


def _slice_point(group: go.Gauge, params: Any) -> Any:
    return go.bind(group, params).slice_point(params)


@pytest.mark.slow_rows("product/[lw]*", "*stacked", "*fused", "*value_gqa", "*trained_scale")
@rows
def test_twins_have_one_slice_point_and_readings_lead_back(case: GaugeCase, x64: None) -> None:
    """A reading is the element that leads from the slice to the point, and the identity on the slice itself."""
    group, params = go.product(case.gauges()), case.params(jax.random.key(1))
    flat = case in FLAT_CASES
    twin = group.act(group.sample(jax.random.key(2), params, 1.0 if flat else LARGE), params)
    assert _far(twin, params) > 0.1, "the twins are the same weights"
    on_slice, read, limit = jit(functools.partial(_slice_point, group)), jit(group.read), tolerance("oracle")
    limit = 1e-11 if flat else limit
    assert _far(on_slice(twin), on_slice(params)) <= limit
    for point in (params, twin):
        assert _far(group.act(read(point), on_slice(point)), point) <= limit
    assert _far(group.act(read(on_slice(params)), params), params) <= tolerance("oracle")


@pytest.mark.parametrize("zeros", [("w1",), ("w2",), ("w3",), ("w1", "w2"), ("w1", "w3"), ("w2", "w3")])
def test_zero_anchors_are_read_off_what_is_left(zeros: tuple[str, ...], x64: None) -> None:
    """In a chain whose links share leaves; with two zero leaves a channel has nothing left, and stays where it is."""
    case = CASES["product/chain"]
    group, params = go.product(case.gauges()), case.params(jax.random.key(1))
    params = params | {path: jnp.zeros_like(params[path]) for path in zeros}
    twin = group.act(group.sample(jax.random.key(2), params), params)
    on_slice = jit(functools.partial(_slice_point, group))
    here, there = on_slice(params), on_slice(twin)
    if len(zeros) == 1:
        assert _far(there, here) <= tolerance("oracle")
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves((here, there)))


def test_single_channels_of_zeros_do_not_disturb_the_others(x64: None) -> None:
    norm = go.norm_scale({"norm": "channel"}, {"up": "channel _"})
    unit = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    group = go.product([unit, norm])
    params = normal(0, {"norm": (5,), "up": (5, 4), "down": (4, 3)})
    params |= {"norm": params["norm"].at[1].set(0.0), "up": params["up"].at[:, 2].set(0.0)}
    params["up"] = params["up"].at[3].set(0.0)
    twin = group.act(group.sample(jax.random.key(2), params), params)
    assert _far(_slice_point(group, twin), _slice_point(group, params)) <= tolerance("oracle")


def test_a_slice_is_made_once() -> None:
    """Instances are hashable and equal by value, so that all of an update shares one slice and its tables."""
    case = CASES["product/gpt"]
    group, params = go.product(case.gauges()), case.params(jax.random.key(0))
    shapes = jax.eval_shape(lambda: params)
    assert group._bound(params).slice is group._bound(shapes).slice is go.product(case.gauges())._bound(params).slice


@pytest.mark.slow
def test_heads_of_full_rank_read_as_orthogonal_matrices() -> None:
    """In float32, one noise matrix of the reading loses a direction of several heads of this many (18 of 300)."""
    shape = (128, 300, 128)
    q, k = (jax.random.normal(jax.random.key(seed), shape) for seed in (0, 1))
    gauge = go.head_rotation({"q": "_ head basis", "k": "_ head basis"})
    (frames,) = gauge.read({"q": q, "k": k}).values()
    products = jnp.einsum("hij,hkj->hik", frames, frames, precision="highest")
    assert float(jnp.abs(products - jnp.eye(128)).max()) <= 1e-5


@pytest.mark.parametrize("up", [{"up": "_ unit", "bias": "unit"}, {"bias": "unit", "up": "_ unit"}])
def test_a_column_is_read_together_with_its_bias(up: dict[str, str]) -> None:
    params = {"up": jnp.array([[3.0], [4.0]]), "bias": jnp.array([12.0]), "down": jnp.ones((1, 2))}
    on_slice = _slice_point(go.rescale(up, {"down": "unit _"}), params)
    np.testing.assert_allclose(on_slice["bias"], [12.0 / 13.0], rtol=1e-6)
    np.testing.assert_allclose(on_slice["down"], [[13.0, 13.0]], rtol=1e-6)


def test_all_writers_of_a_stream_are_read_together() -> None:
    """On the slice their norm is that of kernels whose columns have norm 1: two of width 4."""
    params = {"embed": 3.0 * jnp.ones((7, 4)), "out": jnp.ones((2, 3, 4)), "bias": jnp.ones(4)}
    gauge = go.residual_scale({"embed": "_ _", "out": "_ _ _", "bias": "_"})
    on_slice = _slice_point(gauge, params)
    np.testing.assert_allclose(sum(float(jnp.sum(x**2)) for x in on_slice.values()), 8.0, rtol=1e-6)
