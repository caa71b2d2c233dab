"""`track`: its figures are those of `measure`, twins have the same ones, and the optimizer does not notice."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from gauge_optax.gauges.gauge import Product
from gauge_optax.measure import _recording
from tests.cases import GAUGE_CASES
from tests.quick import jit
from tests.refusals import refused
from tests.twins import driven, normal, normal_like

Tree = Any
CASES = {case.name: case for case in GAUGE_CASES if case.name in ("product/llama", "head_linear/lora")}


def _start(name: str) -> tuple[Product, Tree]:
    return go.product(CASES[name].gauges()), CASES[name].params(jax.random.key(0))


def _close(found: Any, expected: Any, rtol: float = 1e-9) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol), dict(found), dict(expected))


def test_it_records_what_a_penalty_does_to_a_gauge(x64: None) -> None:
    gauges, params = _start("product/llama")
    tx, loss = go.measure.track(optax.adam(1e-3), gauges, every=1), CASES["product/llama"].loss
    gradient, update, state = jit(jax.grad(loss))(params), jit(tx.update), tx.init(params)
    for penalty, low, high in ((0.0, 0.0, 1e-10), (2e-2, 1e-3, 10.0)):
        grads = optax.tree.add(gradient, optax.tree.scale(penalty, params))
        found = optax.tree.get(update(grads, state, params)[1], "metrics").asymmetry
        assert low <= max(found.values()) <= high and min(found.values()) >= 0.0
        assert any("logit_shift" in name for name in found.keys())


@pytest.mark.slow_rows("product/llama")
@pytest.mark.parametrize("name", CASES)
def test_figures_are_those_of_measure(name: str, x64: None) -> None:
    gauges, start = _start(name)
    tx, params = go.measure.track(optax.adam(1e-3), gauges, every=1), start
    state, update = tx.init(params), jit(tx.update)
    for step in range(3):
        before, grads = params, normal_like(step, params)
        steps, state = update(grads, state, params)
        params = optax.apply_updates(params, steps)
    found = optax.tree.get(state, "metrics")
    assert int(found.recorded_at) == 2
    norms = jit(lambda p, g, u: go.measure.slice_norms(p, g, u, gauges))(before, grads, steps)
    for field in ("parameter_norm", "gradient_norm", "update_norm"):
        _close(getattr(found, field), getattr(norms, field))
        assert set(getattr(found, field).keys()) == set(leaves_by_path(params))
    np.testing.assert_allclose(found.relevant_share, norms.relevant_share, rtol=1e-9)
    assert 0 < float(found.relevant_share) < 1, "Adam moves along the orbit"
    drifts = jit(lambda p, q: go.measure.drift(p, q, gauges))(start, before)
    drift = [np.abs(x).max() for x in jax.tree.leaves(drifts)]
    np.testing.assert_allclose(np.abs([float(x) for x in found.drift.values()]), drift, rtol=1e-9)
    turned = jit(lambda p, u: go.measure.vertical_motion(p, u, gauges))(before, steps)
    assert found.turning.keys() and all(x.shape for x in found.turning.values()) == (name == "product/llama")
    for label, angle in found.turning.items():
        kind, _, key = label.partition("/")
        own = turned[[part.name for part in gauges.gauges].index(kind)][key]
        skew, axes = (own, (-1,)) if kind == "rope_torus" else (0.5 * (own - np.swapaxes(own, -1, -2)), (-2, -1))
        size = np.sqrt(np.sum(np.square(skew), axes) / len(axes))
        if kind == "head_linear":  # in the frame of the point, where the skew part is another
            assert angle.shape == size.shape and 0 < float(angle) < 1
        else:
            np.testing.assert_allclose(angle, size, rtol=1e-6)


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_norms_of_tiny_and_huge_steps_neither_underflow_nor_overflow(size: float) -> None:
    params, gauge = normal(0, {"up": (3, 4), "down": (4, 2)}), go.rescale({"up": "_ channel"}, {"down": "channel _"})
    params = optax.tree.cast(params, "float32")
    along = {"up": size * params["up"], "down": -size * params["down"]}
    norms = go.measure.slice_norms(params, along, along, gauge)
    assert float(norms.relevant_share) < 1e-6
    np.testing.assert_allclose(dict(norms.update_norm.items())["up"], 2.0 * size, rtol=1e-5)


@pytest.mark.slow_rows("product/llama")
@pytest.mark.parametrize("name", CASES)
def test_twins_have_one_set_of_norms_and_the_share_is_that_of_what_is_across(name: str, x64: None) -> None:
    gauges, params = _start(name)
    element = gauges.sample(jax.random.key(1), params, 1.0)
    there, push = jax.linearize(lambda p: gauges.act(element, p), params)
    grads, step = normal_like(1, params), optax.tree.scale(1e-3, normal_like(2, params))
    (dual,) = jax.vjp(lambda p: gauges.act(gauges.inverse(element), p), there)[1](grads)
    np.testing.assert_allclose(optax.tree.vdot(dual, push(step)), optax.tree.vdot(grads, step), rtol=1e-9)
    norms = jit(lambda p, g, u: go.measure.slice_norms(p, g, u, gauges))
    assert float(optax.tree.norm(optax.tree.sub(params, there), "inf")) > 0.1
    close = functools.partial(np.testing.assert_allclose, rtol=1e-8)
    jax.tree.map(close, norms(params, grads, step), norms(there, dual, push(step)))
    across = jit(gauges.horizontal)(params, step)
    shares = [norms(params, grads, x).relevant_share for x in (across, step, optax.tree.sub(step, across))]
    assert shares[0] == pytest.approx(1.0, abs=1e-12) and 0.1 < shares[1] < 0.99 and shares[2] < 1e-12


# Of scanned layers.
PARAMS = {"norm": jnp.ones((3, 4)), "up": jnp.ones((3, 4, 5)), "down": jnp.ones((3, 5, 4)), "head": jnp.ones((4, 7))}
GAUGES = [
    go.norm_scale({"norm": "layer channel"}, {"up": "layer channel _"}),
    go.rescale({"up": "layer _ channel"}, {"down": "layer channel _"}),
    go.logit_shift({"head": "_ vocab"}),
]


def test_scanned_layers_are_kept_apart() -> None:
    tx, steps = go.measure.track(optax.sgd(1.0), GAUGES, every=1), jax.tree.map(jnp.zeros_like, PARAMS)
    steps["up"] = steps["up"].at[1].set(-0.5)
    metrics = driven(tx, PARAMS, [steps, steps])[1].metrics
    drifts, norms = ({k: x.shape for k, x in own.items()} for own in (metrics.drift, metrics.update_norm))
    assert drifts == {"norm_scale": (3,), "rescale": (3,), "logit_shift/head": ()}
    assert norms == {"norm": (3,), "up": (3,), "down": (3,), "head": ()}
    np.testing.assert_allclose(metrics.drift["rescale"], [0.0, np.log(1.5), 0.0], atol=1e-6)
    assert go.measure.track(optax.sgd(1.0), GAUGES, layers=()).init(PARAMS).metrics.drift["rescale"].shape == ()


@pytest.mark.parametrize("large", [0, 10**9], ids=["large", "small"])
def test_records_every_so_many_steps_and_changes_nothing(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recording, "_LARGE", large)
    plain, tx = optax.adam(0.01), optax.chain(optax.clip(1.0), go.measure.track(optax.adam(0.01), GAUGES, every=3))
    update, own, other, at = jit(tx.update), plain.init(PARAMS), tx.init(PARAMS), []
    for step in range(7):
        grads = jax.tree.map(lambda x: jnp.clip(x, -1, 1), normal_like(step, PARAMS))
        expected, own = plain.update(grads, own, PARAMS)
        found, other = update(grads, other, PARAMS)
        _close(found, expected, 1e-6)
        at.append(int(optax.tree.get(other, "recorded_at")))
    assert at == [0, 0, 0, 3, 3, 3, 6] and update._cache_size() == 1


def test_hidden_leaves_are_left_out() -> None:
    tx, params = go.measure.track(optax.sgd(1.0), GAUGES[:2]), PARAMS | {"head": jnp.array([3.0 + 4.0j])}
    state = driven(optax.masked(tx, {name: name != "head" for name in PARAMS}), PARAMS, [PARAMS])[1]
    assert set(optax.tree.get(state, "update_norm").keys()) == {"norm", "up", "down"}
    state = driven(tx, params, [params])[1]
    assert optax.tree.get(state, "update_norm")["head"] == optax.tree.get(state, "parameter_norm")["head"] == 5.0
    with refused("track: bad every"):
        go.measure.track(optax.adam(0.01), GAUGES, every=0)
    for layers in ("layer", None):
        with refused("track: bad layers"):
            go.measure.track(optax.adam(0.01), GAUGES, layers=layers)  # type: ignore[arg-type]
    with refused("slice_norms: an update of another shape for 'head'"):
        go.measure.slice_norms(params, params, params | {"head": jnp.ones(7)}, GAUGES[:2])


# track_balance ------------------------------------------------------------------------------------


BALANCED = [
    go.multiplier_balance({"{i}/query": "(head _) _"}, {"{i}/key": "head _"}),
    go.rescale({"{i}/up": "_ channel"}, {"{i}/down": "channel _"}),
    go.head_rotation({"{i}/value": "_ basis", "{i}/out": "basis _"}),
]


def test_figures_are_those_of_numpy_after_every_other_step(x64: None) -> None:
    shapes = {"query": (4, 3), "key": (2, 3), "up": (3, 5), "down": (5, 2), "value": (3, 2), "out": (2, 3)}
    params = {str(i): normal(i, shapes) for i in range(2)}
    tx = optax.chain(optax.adam(0.1), go.measure.track_balance(BALANCED, every=2))
    state, update, seen = tx.init(params), jit(tx.update), []
    for step in range(4):
        updates, state = update(normal_like(step, params), state, params)
        params = optax.apply_updates(params, updates)
        seen.append((params, optax.tree.get(state, "metrics")))
    assert [int(found.recorded_at) for _, found in seen] == [0, 0, 2, 2]
    (params, found), ratios, products = seen[2], {}, {}
    for i in params:
        sizes = {"query": params[i]["query"].reshape(2, 2, 3), "key": params[i]["key"], "up": params[i]["up"].T}
        rows = {name: np.reshape(x, (len(x), -1)) for name, x in (params[i] | sizes).items()}
        sizes = {name: np.sqrt(np.mean(np.square(x), 1)) for name, x in rows.items()}
        for gauge, up, down in (("multiplier_balance", "query", "key"), ("rescale", "up", "down")):
            ratios[f"{gauge}/i={i}"] = np.log(sizes[up] / sizes[down])
            products[f"{gauge}/i={i}"] = sizes[up] * sizes[down]
    _close(found.log_ratio, ratios, 1e-12)
    _close(found.product, products, 1e-12)
    np.testing.assert_allclose(found.drift, max(np.abs(x).max() for x in ratios.values()), rtol=1e-12)
    jax.tree.map(np.testing.assert_array_equal, seen[3][1], found)


def test_a_side_that_is_zero_has_no_ratio() -> None:
    params = {"query": jnp.ones((2, 3)), "key": jnp.zeros((2, 3)).at[1].set(4.0)}
    tx = go.measure.track_balance(go.multiplier_balance({"query": "head _"}, {"key": "head _"}))
    state = driven(tx, params, [jax.tree.map(jnp.zeros_like, params)])[1]
    np.testing.assert_allclose(state.metrics.product["multiplier_balance"], [0.0, 4.0])
    np.testing.assert_allclose(state.metrics.log_ratio["multiplier_balance"], [0.0, -np.log(4.0)], rtol=1e-6)
    np.testing.assert_allclose(state.metrics.drift, np.log(4.0), rtol=1e-6)


def test_weights_that_are_no_numbers_are_not_balanced() -> None:
    """They counted as sides of zeros, with a ratio of 1."""
    params = {"query": jnp.ones((2, 3)).at[0, 0].set(jnp.nan), "key": jnp.ones((2, 3))}
    tx = go.measure.track_balance(go.multiplier_balance({"query": "head _"}, {"key": "head _"}))
    found = driven(tx, params, [jax.tree.map(jnp.zeros_like, params)])[1].metrics
    assert np.isnan([found.drift, found.log_ratio["multiplier_balance"][0]]).all()
    assert found.log_ratio["multiplier_balance"][1] == 0.0


@pytest.mark.parametrize("every", [1, 2])
def test_a_state_of_other_axes_is_refused(every: int) -> None:
    params = {"up": jnp.ones((2, 3))}
    state = go.measure.track_rotation({"up": "_ channel"}, every=every).init(params)
    with refused("measure: a state of other gauges, axes or leaves", "tx.init(params)", "found:    'norm/layout'"):
        go.measure.track_rotation({"up": "channel _"}, every=every).update(params, state, params)
