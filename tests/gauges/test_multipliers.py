"""Multipliers of queries and keys: balanced by root mean squares, whatever the sizes of groups."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.twins import trained

GROUPED = go.multiplier_balance({"query": "(head _) _"}, {"key": "head _"})


def _params(dtype: Any = jnp.float64) -> Any:
    rng = np.random.default_rng(0)
    query, key = 2.0 * rng.normal(size=(4, 3)), rng.normal(size=(2, 3))
    return {"query": jnp.asarray(query, dtype), "key": jnp.asarray(key, dtype)}


def _scales(p: Any) -> tuple[np.ndarray, np.ndarray]:
    """s_Q and s_K per key head, Eq. (3)."""
    query, key = np.asarray(p["query"]).reshape(2, 2, 3), np.asarray(p["key"])
    return np.sqrt(np.mean(query**2, (1, 2))), np.sqrt(np.mean(key**2, 1))


def _scores(p: Any) -> np.ndarray:
    return np.asarray(p["query"]) * np.repeat(np.asarray(p["key"]), 2, 0)


def test_groups_are_balanced_by_root_mean_squares(x64: None) -> None:
    """Eq. (4) to (6) by hand; `rescale` balances sums of squares, which is another point of the same orbit."""
    params = _params()
    s_q, s_k = _scales(params)
    g = np.sqrt(s_q / s_k)
    balanced = GROUPED.act(GROUPED.balance(params), params)
    np.testing.assert_allclose(balanced["query"], params["query"] / np.repeat(g, 2)[:, None], rtol=1e-12)
    np.testing.assert_allclose(balanced["key"], params["key"] * g[:, None], rtol=1e-12)
    np.testing.assert_allclose(_scores(balanced), _scores(params), rtol=1e-12)
    sums = go.rescale({"query": "(head _) _"}, {"key": "head _"})
    least = sums.act(sums.balance(params), params)
    found = _scales(least)
    np.testing.assert_allclose(found[0] / found[1], 2**-0.5, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zeros_stay_and_signs_are_kept(dtype: str) -> None:
    params = _params(dtype)
    params["key"] = params["key"].at[0].set(0.0)
    tx = go.orbit.gauge_fix(optax.sgd(0.0), GROUPED)
    moved = optax.apply_updates(params, tx.update(params, tx.init(params), params)[0])
    np.testing.assert_array_equal(moved["query"][:2], params["query"][:2])
    for name in params:
        assert moved[name].dtype == dtype and bool(jnp.all(jnp.isfinite(moved[name])))
        np.testing.assert_array_equal(jnp.sign(moved[name]), jnp.sign(params[name]))
    s_q, s_k = _scales(jax.tree.map(lambda x: x.astype(jnp.float32), moved))
    assert abs(np.log(s_q[1] / s_k[1])) <= (3.5e-7 if dtype == "float32" else 1e-2)


def _loss(p: Any) -> jax.Array:
    return jnp.sum(jnp.square(p["query"] * jnp.repeat(p["key"], 2, 0) - 1.0))


@pytest.mark.parametrize("every", [1, 10, 100])
def test_drift_is_rounding_at_every_frequency(every: int) -> None:
    """After a fix; Table 2 has 3.5e-7."""
    params, _ = trained(go.orbit.gauge_fix(optax.adam(1e-2), GROUPED, every=every), _loss, _params(jnp.float32), 200)
    s_q, s_k = _scales(params)
    assert np.max(np.abs(np.log(s_q / s_k))) <= 3.5e-7


def test_biases_go_along_and_do_not_count(x64: None) -> None:
    params = _params() | {"bias": jnp.full((4, 3), 5.0)}
    gauge = go.multiplier_balance({"query": "(head _) _", "bias": "(head _) _"}, {"key": "head _"})
    moved = gauge.act(gauge.balance(params), params)
    s_q, s_k = _scales(moved)
    np.testing.assert_allclose(s_q, s_k, rtol=1e-12)
    np.testing.assert_allclose(moved["bias"] / params["bias"], moved["query"] / params["query"], rtol=1e-12)


@pytest.mark.parametrize("queries", ["head _", "(head _) _"])
def test_multipliers_of_one_are_on_the_slice(queries: str, x64: None) -> None:
    """Otherwise an optimizer inside `quotient` would start elsewhere than the plain one, with other relative steps."""
    gauge = go.multiplier_balance({"query": queries}, {"key": "head _"})
    params = {"query": jnp.ones((4 if "(" in queries else 2, 3)), "key": jnp.ones((2, 3))}
    np.testing.assert_allclose(gauge.coordinates(params)[""], 0.0, atol=1e-15)
    updates = []
    for tx in (optax.adam(0.1), go.quotient(optax.adam(0.1), gauge, rest="balanced")):
        grads = jax.tree.map(lambda x: 0.0 * x + 1.0, params)
        updates.append(tx.update(grads, tx.init(params), params)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *updates)
