"""What `track_rotation` records, beside the same in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go

BLOCKS = {"mlp/up": "_ channel", "attn/out": "head _ _"}


def _noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def _params() -> Any:
    return {"mlp": {"up": _noise(0, 6, 4)}, "attn": {"out": _noise(1, 2, 3, 5)}, "bias": _noise(2, 4)}


def _angle(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.arccos(np.clip(a @ b / np.linalg.norm(a) / np.linalg.norm(b), -1.0, 1.0)))


def _vectors(tree: Any) -> dict[str, np.ndarray]:
    """Path → (vectors, entries)."""
    return {"mlp/up": np.asarray(tree["mlp"]["up"]).T, "attn/out": np.asarray(tree["attn"]["out"]).reshape(2, -1)}


def test_every_figure_is_what_it_says(x64: None) -> None:
    params, grads = _params(), [jax.tree.map(lambda x, s=s: _noise(s, *x.shape), _params()) for s in (5, 6)]
    tracked = go.measure.track_rotation(BLOCKS, optax.adamw(0.01, weight_decay=0.5), every=1)
    tx = optax.chain(optax.clip_by_global_norm(1e3), tracked)
    state = tx.init(params)
    _, state = tx.update(grads[0], state, params)
    momentum = optax.tree.get(state, "mu")
    updates, state = tx.update(grads[1], state, params)
    moved = _vectors(optax.apply_updates(params, updates))
    w, u, g, m = (_vectors(tree) for tree in (params, updates, grads[1], momentum))
    for path in BLOCKS:
        expected = {
            "norm": np.linalg.norm(w[path], axis=1),
            "rotation": [_angle(a, b) for a, b in zip(w[path], moved[path], strict=True)],
            "rms_update": np.linalg.norm(u[path], axis=1),
            "weight_gradient_angle": [_angle(a, b) for a, b in zip(w[path], g[path], strict=True)],
            "gradient_momentum_angle": [_angle(a, b) for a, b in zip(g[path], m[path], strict=True)],
            "radial_decay": np.sum(w[path] * g[path], 1) / np.sum(w[path] ** 2, 1),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(optax.tree.get(state, name)[path], values, rtol=1e-8, err_msg=name)
    assert int(optax.tree.get(state, "recorded_at")) == 1


def test_last_in_a_chain_it_needs_the_gradient_for_angles_with_it() -> None:
    params, grads = _params(), _params()
    tx = optax.chain(optax.sgd(0.1), go.measure.track_rotation(BLOCKS, every=1))
    _, bare = tx.update(grads, tx.init(params), params)
    _, told = tx.update(grads, tx.init(params), params, gradient=grads, momentum=grads)
    for name in ("norm", "rotation", "rms_update"):
        np.testing.assert_array_equal(optax.tree.get(bare, name)["mlp/up"], optax.tree.get(told, name)["mlp/up"])
    assert np.all(np.isnan(optax.tree.get(bare, "radial_decay")["mlp/up"]))
    np.testing.assert_allclose(optax.tree.get(told, "radial_decay")["mlp/up"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(optax.tree.get(told, "gradient_momentum_angle")["mlp/up"], 0.0, atol=1e-3)


def test_it_changes_nothing_and_keeps_what_it_recorded() -> None:
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), _params())
    inner = optax.adamw(0.01)
    tx = go.measure.track_rotation(BLOCKS, inner, every=3)
    state, plain = tx.init(params), inner.init(params)
    for step in range(5):
        updates, state = jax.jit(tx.update)(params, state, params)
        expected, plain = jax.jit(inner.update)(params, plain, params)
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
        assert int(optax.tree.get(state, "recorded_at")) == 3 * (step // 3)


def test_moments_of_a_partition_are_found_by_leaf() -> None:
    params = {"a": jnp.ones((6, 4)), "b": jnp.ones((6, 4))}
    inner = optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, {"a": "a", "b": "b"})
    tx = go.measure.track_rotation({"{leaf}": "_ channel"}, inner, every=1)
    _, state = tx.update(params, tx.init(params), params)
    _, state = tx.update(params, state, params)
    for path in ("a", "b"):
        np.testing.assert_allclose(optax.tree.get(state, "gradient_momentum_angle")[path], 0.0, atol=1e-3)


def test_two_moments_of_a_leaf_are_refused() -> None:
    params = {"a": jnp.ones((6, 4))}
    tx = go.measure.track_rotation({"a": "_ channel"}, optax.chain(optax.adam(0.1), optax.trace(0.9)), every=1)
    with pytest.raises(ValueError, match="several first moments of 'a'"):
        tx.update(params, tx.init(params), params)
