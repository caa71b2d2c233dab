"""`track`: its figures are those of `measure`, twins have the same ones, and the optimizer does not notice."""

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

Tree = Any
CASES = {case.name: case for case in GAUGE_CASES if case.name in ("product/llama", "head_linear/lora")}


def _drawn(tree: Tree, seed: int, size: float = 1.0) -> Tree:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(size * rng.standard_normal(x.shape), x.dtype), tree)


def _start(name: str) -> tuple[Product, Tree]:
    return go.product(CASES[name].gauges()), CASES[name].params(jax.random.key(0))


def _close(found: Any, expected: Any, rtol: float = 1e-9) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol), dict(found), dict(expected))


def test_it_records_what_a_penalty_does_to_a_gauge(x64: None) -> None:
    gauges, params = _start("product/llama")
    tx, loss = go.measure.track(optax.adam(1e-3), gauges, every=1), CASES["product/llama"].loss
    for weight, low, high in ((0.0, 0.0, 1e-10), (1e-2, 1e-3, 10.0)):
        penalty = jax.tree.map(lambda x, w=weight: 2.0 * w * x, params)
        grads = optax.tree.add(jit(jax.grad(loss))(params), penalty)
        _, state = jit(tx.update)(grads, tx.init(params), params)
        found = {name: float(x) for name, x in optax.tree.get(state, "metrics").asymmetry.items()}
        assert low <= max(found.values()) <= high
        assert any("logit_shift" in name for name in found) and all(x >= 0.0 for x in found.values())


@pytest.mark.slow_rows("product/llama")
@pytest.mark.parametrize("name", CASES)
def test_figures_are_those_of_measure(name: str, x64: None) -> None:
    gauges, start = _start(name)
    tx, params = go.measure.track(optax.adam(1e-3), gauges, every=1), start
    state, update = tx.init(params), jit(tx.update)
    for step in range(3):
        before, grads = params, _drawn(params, step)
        steps, state = update(grads, state, params)
        params = optax.apply_updates(params, steps)
    found = optax.tree.get(state, "metrics")
    assert int(found.recorded_at) == 2
    norms = jit(lambda *own: go.measure.slice_norms(*own, gauges))(before, grads, steps)
    for field in ("parameter_norm", "gradient_norm", "update_norm"):
        _close(getattr(found, field), getattr(norms, field))
        assert set(getattr(found, field).keys()) == set(leaves_by_path(params))
    np.testing.assert_allclose(found.relevant_share, norms.relevant_share, rtol=1e-9)
    assert 0 < float(found.relevant_share) < 1, "Adam moves along the orbit"
    drift = [np.abs(x).max() for x in jax.tree.leaves(jit(lambda *p: go.measure.drift(*p, gauges))(start, before))]
    np.testing.assert_allclose(np.abs([float(x) for x in found.drift.values()]), drift, rtol=1e-9)
    turned = jit(lambda *own: go.measure.vertical_motion(*own, gauges))(before, steps)
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


@pytest.mark.slow_rows("product/llama")
@pytest.mark.parametrize("name", CASES)
def test_twins_have_one_set_of_norms_and_the_share_is_that_of_what_is_across(name: str, x64: None) -> None:
    gauges, params = _start(name)
    element = gauges.sample(jax.random.key(1), params, 1.0)
    there, push = jax.linearize(lambda p: gauges.act(element, p), params)
    grads, step = _drawn(params, 1), _drawn(params, 2, 1e-3)
    (dual,) = jax.vjp(lambda p: gauges.act(gauges.inverse(element), p), there)[1](grads)
    np.testing.assert_allclose(optax.tree.vdot(dual, push(step)), optax.tree.vdot(grads, step), rtol=1e-9)
    norms = jit(lambda *own: go.measure.slice_norms(*own, gauges))
    here, moved = norms(params, grads, step), norms(there, dual, push(step))
    assert float(optax.tree.norm(optax.tree.sub(params, there), "inf")) > 0.1
    for one, other in zip(here, moved, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8), one, other)
    across = jit(gauges.horizontal)(params, step)
    along = optax.tree.sub(step, across)
    shares = [float(norms(params, grads, x).relevant_share) for x in (across, step, along)]
    assert shares[0] == pytest.approx(1.0, abs=1e-12) and 0.1 < shares[1] < 0.99 and shares[2] < 1e-12


def _scanned() -> tuple[Tree, list[go.Gauge]]:
    shapes = {"norm": (3, 4), "up": (3, 4, 5), "down": (3, 5, 4), "head": (4, 7)}
    return {name: jnp.ones(shape) for name, shape in shapes.items()}, [
        go.norm_scale({"norm": "layer channel"}, {"up": "layer channel _"}),
        go.rescale({"up": "layer _ channel"}, {"down": "layer channel _"}),
        go.logit_shift({"head": "_ vocab"}),
    ]


def test_scanned_layers_are_kept_apart() -> None:
    params, gauges = _scanned()
    tx = go.measure.track(optax.sgd(1.0), gauges, every=1)
    steps = jax.tree.map(jnp.zeros_like, params)
    steps["up"] = steps["up"].at[1].set(-0.5)
    update = jit(tx.update)
    updates, state = update(steps, tx.init(params), params)
    metrics = update(steps, state, optax.apply_updates(params, updates))[1].metrics
    drifts, norms = ({k: x.shape for k, x in own.items()} for own in (metrics.drift, metrics.update_norm))
    assert drifts == {"norm_scale": (3,), "rescale": (3,), "logit_shift/head": ()}
    assert norms == {"norm": (3,), "up": (3,), "down": (3,), "head": ()}
    np.testing.assert_allclose(metrics.drift["rescale"], [0.0, np.log(1.5), 0.0], atol=1e-6)
    assert go.measure.track(optax.sgd(1.0), gauges, layers=()).init(params).metrics.drift["rescale"].shape == ()


@pytest.mark.parametrize("large", [0, 10**9], ids=["large", "small"])
def test_records_every_so_many_steps_and_changes_nothing(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recording, "_LARGE", large)
    params, gauges = _scanned()
    plain, tx = optax.adam(0.01), optax.chain(optax.clip(1.0), go.measure.track(optax.adam(0.01), gauges, every=3))
    update = jit(tx.update)
    own, other, at = plain.init(params), tx.init(params), []
    for step in range(7):
        grads = jax.tree.map(lambda x: jnp.clip(x, -1, 1), _drawn(params, step))
        expected, own = plain.update(grads, own, params)
        found, other = update(grads, other, params)
        _close(found, expected, 1e-6)
        at.append(int(optax.tree.get(other, "recorded_at")))
    assert at == [0, 0, 0, 3, 3, 3, 6] and update._cache_size() == 1


def test_hidden_leaves_are_left_out() -> None:
    params, gauges = _scanned()
    hidden = optax.masked(go.measure.track(optax.adam(0.01), gauges[:2]), {name: name != "head" for name in params})
    state = hidden.update(params, hidden.init(params), params)[1]
    assert set(optax.tree.get(state, "update_norm").keys()) == {"norm", "up", "down"}
    free = {"head": jnp.array([3.0 + 4.0j])}
    tx = go.measure.track(optax.sgd(1.0), gauges[:2])
    state = tx.update(params | free, tx.init(params | free), params | free)[1]
    assert optax.tree.get(state, "update_norm")["head"] == optax.tree.get(state, "parameter_norm")["head"] == 5.0
    with refused("track: bad every"):
        go.measure.track(optax.adam(0.01), gauges, every=0)


# track_balance ------------------------------------------------------------------------------------


BALANCED = [
    go.multiplier_balance({"{i}/query": "(head _) _"}, {"{i}/key": "head _"}),
    go.rescale({"{i}/up": "_ channel"}, {"{i}/down": "channel _"}),
    go.head_rotation({"{i}/value": "_ basis", "{i}/out": "basis _"}),
]


def test_figures_are_those_of_numpy_after_every_other_step(x64: None) -> None:
    shapes = {"query": (4, 3), "key": (2, 3), "up": (3, 5), "down": (5, 2), "value": (3, 2), "out": (2, 3)}
    blocks = {str(i): {name: jnp.zeros(shape) for name, shape in shapes.items()} for i in range(2)}
    params, tx = _drawn(blocks, 0), optax.chain(optax.adam(0.1), go.measure.track_balance(BALANCED, every=2))
    state, update, seen = tx.init(params), jit(tx.update), []
    for step in range(4):
        updates, state = update(_drawn(blocks, step + 1), state, params)
        params = optax.apply_updates(params, updates)
        seen.append((params, optax.tree.get(state, "metrics")))
    assert [int(found.recorded_at) for _, found in seen] == [0, 0, 2, 2]
    params, found = seen[2]
    ratios = []
    for i in range(2):
        block = {name: np.asarray(x) for name, x in params[str(i)].items()}
        query = np.sqrt(np.mean(block["query"].reshape(2, 2, 3) ** 2, (1, 2)))
        key = np.sqrt(np.mean(block["key"] ** 2, 1))
        np.testing.assert_allclose(found.log_ratio[f"multiplier_balance/i={i}"], np.log(query / key), rtol=1e-12)
        np.testing.assert_allclose(found.product[f"multiplier_balance/i={i}"], query * key, rtol=1e-12)
        ratio = 0.5 * np.log(np.mean(block["up"] ** 2, 0) / np.mean(block["down"] ** 2, 1))
        np.testing.assert_allclose(found.log_ratio[f"rescale/i={i}"], ratio, rtol=1e-12)
        ratios += [np.abs(np.log(query / key)).max(), np.abs(ratio).max()]
    pairs = ((name, i) for name in ("multiplier_balance", "rescale") for i in range(2))
    assert set(found.product.keys()) == {f"{name}/i={i}" for name, i in pairs}
    np.testing.assert_allclose(found.drift, max(ratios), rtol=1e-12)
    jax.tree.map(np.testing.assert_array_equal, seen[3][1], found)


def test_a_side_that_is_zero_has_no_ratio() -> None:
    params = {"query": jnp.ones((2, 3)), "key": jnp.zeros((2, 3)).at[1].set(4.0)}
    tx = go.measure.track_balance(go.multiplier_balance({"query": "head _"}, {"key": "head _"}))
    _, state = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(state.metrics.product["multiplier_balance"], [0.0, 4.0])
    np.testing.assert_allclose(state.metrics.log_ratio["multiplier_balance"], [0.0, -np.log(4.0)], rtol=1e-6)
    np.testing.assert_allclose(state.metrics.drift, np.log(4.0), rtol=1e-6)
