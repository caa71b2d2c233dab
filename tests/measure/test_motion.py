"""Motion along orbits: finite gauge moves give their logarithm back, horizontal steps give nothing."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from gauge_optax.gauges.gauge import Product
from tests import oracles
from tests.cases import GAUGE_CASES, GaugeCase
from tests.quick import jit
from tests.tolerances import tolerance
from tests.twins import normal, normal_like

Tree = Any
pytestmark = pytest.mark.slow_rows("product/latent_fused*")
ENDS = ("/kernel", "/gqa", "/degree_2", "rope_linear/half")
CASES = [c for c in GAUGE_CASES if c.name.startswith("product") or c.name.endswith(ENDS)]
everywhere = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@functools.cache
def _compiled(case: GaugeCase) -> tuple[Product, Callable[..., Any], Callable[..., Any]]:
    """The product, its act, and vertical_motion(params, update)."""
    group = go.product(case.gauges())
    return group, jit(group.act), jit(lambda params, update: go.measure.vertical_motion(params, update, group))


def _as(tree: Tree, dtype: str) -> Tree:
    return jax.tree.map(lambda x: np.asarray(x).astype(dtype), tree)


def _largest(tree: Tree) -> float:
    return max((float(np.max(np.abs(x))) for x in jax.tree.leaves(tree)), default=0.0)


def _rotations(skew: Any) -> np.ndarray:
    """What skew matrices generate."""
    matrices = np.asarray(skew, np.float64)
    return np.stack([oracles.exponential(a) for a in matrices.reshape(-1, *skew.shape[-2:])]).reshape(skew.shape)


@pytest.mark.slow_rows("*-float32", "product/llama-*")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("size", (1e-4, 0.03, 0.5))
@everywhere
def test_a_gauge_move_gives_its_logarithm(case: GaugeCase, size: float, dtype: str) -> None:
    """Of a shift, the change of the mean of the leaf, which a product's scales move too."""
    group, act, motion = _compiled(case)
    with jax.enable_x64(True):
        params = _as(case.params(jax.random.key(0)), dtype)
        element = _as(group.sample(jax.random.key(1), params, size), dtype)
    with jax.enable_x64(dtype == "float64"):
        step = _as(optax.tree.sub(act(element, params), params), dtype)
        assert _largest(step) > size / 10
        for gauge, own, found in zip(group.gauges, element, motion(params, step), strict=True):
            if gauge.name == "head_rotation":
                for key, r in own.items():
                    skew = np.asarray(found[key], np.float64)
                    errors = [_rotations(skew) - r, skew + np.swapaxes(skew, -1, -2)]
                    assert _largest(errors) <= tolerance("logarithm", dtype) and _largest(skew) < np.pi
            elif gauge.name == "logit_shift":
                means = {path: leaves_by_path(step)[path].mean(-1) for path in found[""]}
                assert _largest(optax.tree.sub(found[""], means)) <= tolerance("logarithm", dtype)
            elif gauge.name != "head_linear":
                assert _largest(optax.tree.sub(found, own)) <= tolerance("logarithm", dtype)


@pytest.mark.parametrize(
    "case", [c for c in CASES if any(g.name == "head_linear" for g in c.gauges())], ids=lambda c: c.name)
def test_a_small_linear_move_gives_its_generator(case: GaugeCase, x64: None) -> None:
    """S = 1 + Z: to first order, in the basis in which the point stands."""
    group, act, motion = _compiled(case)
    params, draw = case.params(jax.random.key(0)), np.random.default_rng(3).normal
    for index in (k for k, g in enumerate(group.gauges) if g.name == "head_linear"):
        still = group.identity(params)
        z = {key: 1e-6 * draw(size=x.shape) for key, x in still[index].items()}
        moved = {key: x + z[key] for key, x in still[index].items()}
        element = (*still[:index], moved, *still[index + 1 :])
        found = motion(params, optax.tree.sub(act(element, params), params))
        assert _largest(optax.tree.sub(found[index], z)) <= 1e-4 * _largest(z)
        assert _largest([own for k, own in enumerate(found) if k != index]) <= 1e-4 * _largest(z)


@pytest.mark.slow_rows("product/slow_planes")
@everywhere
def test_a_horizontal_step_does_not_turn(case: GaugeCase, x64: None) -> None:
    """Of any size: WᵀU is symmetric, so M + S is its own polar factor. Scales and shifts do not move at first order.

    A linear gauge's stretch is read to first order alone.
    """
    (group, _, motion), params = _compiled(case), case.params(jax.random.key(0))
    direction = normal_like(5, params)
    flat = optax.tree.sub(direction, jit(group.vertical)(params, direction))

    def motion_along(tangent: Tree, size: float) -> Tree:
        return motion(params, optax.tree.scale(size, tangent))

    for size in (1e-3, 0.3):
        for gauge, own in zip(group.gauges, motion_along(flat, size), strict=True):
            if gauge.name in ("head_rotation", "rope_torus"):
                assert _largest(own) <= tolerance("logarithm")
                assert _largest(motion_along(direction, size)) > size / 100
    once, twice = (_largest(motion_along(flat, size)) for size in (1e-4, 2e-4))
    assert twice <= 5.0 * once + tolerance("logarithm")  # quadratic: 4, where a vertical part would give 2
    assert once <= 1e-2 * _largest(motion_along(direction, 1e-4))


@pytest.mark.parametrize("centred", [False, True])
def test_a_turn_of_the_residual_stream_gives_its_logarithm(centred: bool, x64: None) -> None:
    """Behind a norm with a scale, and with heads that turn on their own."""
    params = normal(0, {"embedding": (7, 4), "norm": (4,), "query": (4, 2, 3), "key": (4, 2, 3), "head": (4, 7)})
    heads = go.head_rotation({"query": "_ head basis", "key": "_ head basis"})
    norm = go.norm_scale({"norm": "channel"}, {"query": "channel _ _", "key": "channel _ _"})
    readers = {"query": "basis _ _", "key": "basis _ _", "head": "basis _"}
    stream = go.residual_rotation(readers, {"embedding": "_ basis"}, norm, centred=centred)
    turn, spin = heads.sample(jax.random.key(2), params, 0.3), stream.sample(jax.random.key(1), params, 0.3)
    moved = go.product([heads, norm, stream]).act((turn, norm.identity(params), spin), params)
    found = go.measure.vertical_motion(params, optax.tree.sub(moved, params), [heads, norm, stream])
    for own, expected in ((found[0], turn), (found[2], spin)):
        assert _largest(_rotations(own[""]) - expected[""]) <= tolerance("logarithm")


def test_a_step_that_no_rotation_brings_back_has_no_angle(x64: None) -> None:
    """Determinants of −1 and half turns; a step to nearly zero is horizontal."""
    heads = go.head_rotation({"w": "_ basis"})
    w = np.random.default_rng(0).normal(size=(6, 4))
    mirror, half = np.diag([-1.0, 1.0, 1.0, 1.0]), np.diag([-1.0, -1.0, 1.0, 1.0])
    for matrix, angle in ((0.1 * np.eye(4), 0.0), (-np.eye(4), np.nan), (mirror, np.nan), (half, np.nan)):
        (found,) = jax.tree.leaves(go.measure.vertical_motion({"w": w}, {"w": w @ (matrix - np.eye(4))}, heads))
        np.testing.assert_allclose(_largest(found), angle, atol=1e-12)


@pytest.mark.parametrize(("angle", "size"), [(0.05, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 1e-22), (1.0, 1e20)])
def test_a_short_step_may_turn_a_weak_plane_far(angle: float, size: float) -> None:
    """Of weights, too, whose squares are no float32."""
    gauge, w = go.head_rotation({"w": "_ basis"}), {"w": np.diag(np.array([size, 0.1 * size, 0.1 * size], np.float32))}
    turn = np.float32(_rotations(np.array([[0.0, 0.0, 0.0], [0.0, 0.0, angle], [0.0, -angle, 0.0]])))
    step = optax.tree.sub({"w": w["w"] @ turn}, w)
    assert float(go.measure.vertical_motion(w, step, gauge)[0][""][1, 2]) == pytest.approx(angle, rel=1e-4)
    tx = go.measure.track(optax.identity(), gauge)
    found = tx.update(step, tx.init(w), w)[1].metrics.turning["head_rotation"]
    assert float(found) == pytest.approx(angle, rel=1e-4)


def test_a_drift_is_copied_and_pickled() -> None:
    w, gauge = {"w": np.eye(3)}, go.scale_invariant({"w": "_ channel"})
    drift = go.measure.drift(w, {"w": 2.0 * np.eye(3)}, gauge)
    for made in (pickle.loads(pickle.dumps(drift)), copy.copy(drift), copy.deepcopy(drift)):
        assert repr(made) == repr(drift) and isinstance(made, type(drift))


def test_drift_is_the_change_of_the_joint_coordinate(x64: None) -> None:
    (case,) = (c for c in CASES if c.name == "product/chain")
    (group, act, _), params = _compiled(case), case.params(jax.random.key(0))
    element, drift = group.sample(jax.random.key(1), params), jit(lambda a, b: go.measure.drift(a, b, group))
    assert _largest(element) > 0.1
    assert _largest(optax.tree.sub(tuple(drift(params, act(element, params))), element)) <= tolerance("coordinates")
    assert _largest(drift(params, params)) == 0.0
    for gauge, own in zip(case.gauges(), element, strict=True):  # alone, a gauge sees its own blocks only
        (alone,) = go.measure.drift(params, gauge.act(own, params), gauge)
        assert _largest(optax.tree.sub(alone, own)) <= tolerance("coordinates")
