"""The grokking testbed: its network beside a plain one, its gauges, its queue when it is killed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from examples.studies import grokking as example
from models import grokking
from models.grokking import GrokConfig
from models.lm import ACTIVATIONS, rotary

SMALL = [
    GrokConfig(p=7, d_model=8, heads=2, d_ff=12),
    GrokConfig(p=7, d_model=8, heads=2, d_ff=12, mlp="relu2", layers=2, rope=True),
]
by_depth = pytest.mark.parametrize("c", SMALL, ids=["one block", "two blocks, rotary"])


def _generic(c: GrokConfig) -> Any:
    start = grokking.init(c, jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 99))
    return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape, x.dtype), start)


def _plainly(c: GrokConfig, p: Any, tokens: jax.Array) -> jax.Array:
    """The same network with every projection made for every pair and position."""

    def norm(q: Any, x: jax.Array) -> jax.Array:
        x = x - jnp.mean(x, -1, keepdims=True)
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * q["scale"] + q["bias"]

    x = p["embed"]["embedding"][tokens]
    x = x if c.rope else x + p["pos"]["embedding"]
    for block in p["blocks"].values():
        y, attn, mlp = norm(block["norm1"], x), block["attn"], block["mlp"]
        q, k, v = (jnp.einsum("btd,dhe->bthe", y, attn[name]["kernel"]) for name in ("query", "key", "value"))
        q, k = (rotary(q), rotary(k)) if c.rope else (q, k)
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(jnp.tri(2, dtype=bool), scores, -jnp.inf))
        x = x + jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, attn["out"]["kernel"])
        hidden = ACTIVATIONS[c.mlp](norm(block["norm2"], x) @ mlp["up"]["kernel"] + mlp["up"]["bias"])
        x = x + hidden @ mlp["down"]["kernel"] + mlp["down"]["bias"]
    return x[:, -1] @ p["lm_head"]["kernel"]


@pytest.mark.slow_rows("one block")
@by_depth
def test_each_number_is_projected_once_and_the_logits_are_the_plain_ones(c: GrokConfig, x64: None) -> None:
    params, (train, _) = _generic(c), grokking.data(c, 0)
    expected = _plainly(c, params, train[0])
    np.testing.assert_allclose(grokking.logits(c, params, train[0]), expected, rtol=1e-11, atol=1e-12)
    assert float(jnp.std(expected)) > 0.1


@pytest.mark.slow_rows("one block")
@by_depth
def test_its_gauges_are_symmetries_and_a_full_rotation_is_none_under_rotary(c: GrokConfig, x64: None) -> None:
    params, (train, _) = _generic(c), grokking.data(c, 0)
    loss = functools.partial(grokking.loss, c, pairs=train)
    go.testing.assert_invariant(loss, params, grokking.gauges(c), jax.random.key(2), rtol=1e-12)
    if c.rope:
        with pytest.raises(AssertionError, match="head_rotation"):
            go.testing.assert_invariant(loss, params, grokking.gauges(c, full_rotation=True), jax.random.key(2))


def test_pairs_are_split_and_sums_are_modulo_p() -> None:
    c = GrokConfig(p=11)
    (tokens, sums), (others, _) = grokking.data(c, 3)
    assert len(tokens) == round(0.3 * 121) and len(tokens) + len(others) == 121
    assert len({tuple(x) for x in np.concatenate([tokens, others]).tolist()}) == 121
    assert np.array_equal(sums, tokens.sum(1) % 11)


# Controls ---------------------------------------------------------------------------------------------


# The queue --------------------------------------------------------------------------------------------


def test_grokking_is_sustained_and_falls_after_it_are_collapses() -> None:
    accuracy = [0.1, 0.96, 0.2, *[0.97] * 12, 0.5, 0.4, 0.99, 0.3, 0.99]
    said = example.summary(accuracy, 100)
    assert (said["grokked"], said["collapses"], said["below"], said["lowest"]) == (300, 2, 3, 0.3)
    assert example.summary([0.96] * 5, 100)["grokked"] == float("inf")


def test_the_best_cell_of_a_grid_is_known_when_the_grid_is_done() -> None:
    first, *others = example.grid_cells("AdamW")
    assert len({first, *others}) == 6
    means = {cell.name: {"final": {"mean": 0.5 - 0.1 * abs(number - 2)}} for number, cell in enumerate(others)}
    assert example.best({"grid": {"AdamW": means}}, "AdamW") is None
    means[first.name] = {"final": {"mean": 0.1}}
    assert example.best({"grid": {"AdamW": means}}, "AdamW") == others[2]
