"""`track_balance`: figures are NumPy's, of the weights after the step; other gauges are none of its business."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from tests.quick import jit

Tree = Any
GAUGES = [
    go.multiplier_balance({"{i}/query": "(head _) _"}, {"{i}/key": "head _"}),
    go.rescale({"{i}/up": "_ channel"}, {"{i}/down": "channel _"}),
    go.head_rotation({"{i}/value": "_ basis", "{i}/out": "basis _"}),
]


def _drawn(seed: int) -> Tree:
    rng = np.random.default_rng(seed)
    shapes = {"query": (4, 3), "key": (2, 3), "up": (3, 5), "down": (5, 2), "value": (3, 2), "out": (2, 3)}
    return {str(i): {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()} for i in range(2)}


def _sizes(block: Tree) -> tuple[np.ndarray, np.ndarray]:
    """Root mean squares of queries and of keys per key head."""
    query, key = np.asarray(block["query"]).reshape(2, 2, 3), np.asarray(block["key"])
    return np.sqrt(np.mean(query**2, (1, 2))), np.sqrt(np.mean(key**2, 1))


def test_figures_are_those_of_numpy_after_the_step(x64: None) -> None:
    params, tx = _drawn(0), optax.chain(optax.adam(0.1), go.measure.track_balance(GAUGES))
    state, update = tx.init(params), jit(tx.update)
    for step in range(3):
        updates, state = update(_drawn(step + 1), state, params)
        params = optax.apply_updates(params, updates)
    found = optax.tree.get(state, "metrics")
    assert int(found.recorded_at) == 2
    assert set(found.product) == {f"{name}/i={i}" for name in ("multiplier_balance", "rescale") for i in range(2)}
    ratios = []
    for i in range(2):
        query, key = _sizes(params[str(i)])
        np.testing.assert_allclose(found.log_ratio[f"multiplier_balance/i={i}"], np.log(query / key), rtol=1e-12)
        np.testing.assert_allclose(found.product[f"multiplier_balance/i={i}"], query * key, rtol=1e-12)
        up, down = (np.asarray(params[str(i)][name]) for name in ("up", "down"))
        ratio = 0.5 * np.log(np.mean(up**2, 0) / np.mean(down**2, 1))
        np.testing.assert_allclose(found.log_ratio[f"rescale/i={i}"], ratio, rtol=1e-12)
        ratios += [np.abs(np.log(query / key)).max(), np.abs(ratio).max()]
    np.testing.assert_allclose(optax.tree.get(state, "drift"), max(ratios), rtol=1e-12)


def test_it_records_when_it_is_due(x64: None) -> None:
    params, tx = _drawn(0), optax.chain(optax.sgd(0.1), go.measure.track_balance(GAUGES, every=3))
    state, seen = tx.init(params), []
    for step in range(5):
        updates, state = tx.update(_drawn(step + 1), state, params)
        params = optax.apply_updates(params, updates)
        seen.append((int(optax.tree.get(state, "recorded_at")), float(optax.tree.get(state, "drift"))))
    assert [at for at, _ in seen] == [0, 0, 0, 3, 3]
    assert len({drift for _, drift in seen}) == 2


def test_a_side_that_is_zero_has_no_ratio() -> None:
    params = {"query": jnp.ones((2, 3)), "key": jnp.zeros((2, 3)).at[1].set(4.0)}
    tx = go.measure.track_balance(go.multiplier_balance({"query": "head _"}, {"key": "head _"}))
    _, state = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(state.metrics.product["multiplier_balance"], [0.0, 4.0])
    np.testing.assert_allclose(state.metrics.log_ratio["multiplier_balance"], [0.0, -np.log(4.0)], rtol=1e-6)
    np.testing.assert_allclose(state.metrics.drift, np.log(4.0), rtol=1e-6)
