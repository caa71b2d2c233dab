"""The decoder with rotations on its skip connections: local invariance, gauge fixing, training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gauge_optax as go
from models import gauged_transformer, lm
from tests.twins import stepper, train

SIZES: dict[str, Any] = dict(vocab=9, d_model=6, layers=2, heads=2, kv_heads=2, d_head=4, d_ff=7, max_len=5)
LLAMA, GPT = lm.llama_config(**SIZES), lm.LMConfig(**SIZES)


def _model(config: lm.LMConfig) -> tuple[Any, Any, jax.Array]:
    """Graph, parameters away from every special point, and tokens."""
    graph, state = nnx.split(gauged_transformer.GaugedLM(config, nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    start = jax.tree.map(lambda x: jnp.asarray(x, float), nnx.to_pure_dict(state))
    params = start | {"lm": jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape), start["lm"])}
    return graph, params, jnp.asarray(rng.integers(config.vocab, size=(3, config.max_len)))


@pytest.mark.slow_rows("gpt")
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_every_basis_turns_by_itself(config: lm.LMConfig, x64: None) -> None:
    graph, params, tokens = _model(config)
    turns = gauged_transformer.gauges(config)[: 2 * config.layers + 1]
    before = nnx.merge(graph, params)(tokens)
    moved = params
    for number, turn in enumerate(turns):
        moved = turn.act(turn.sample(jax.random.key(number), moved), moved)
        np.testing.assert_allclose(nnx.merge(graph, moved)(tokens), before, atol=1e-11)
    assert min(float(jnp.max(jnp.abs(x - jnp.eye(6)))) for x in jax.tree.leaves(moved["skips"])) > 0.1
    # Gauge fixing finds a plain decoder of the same function, whatever the bases were.
    plain = gauged_transformer.fixed(config, moved)
    for skip in jax.tree.leaves(plain["skips"]):
        np.testing.assert_allclose(skip, np.eye(6), atol=1e-12)
    model = lm.build(config, nnx.Rngs(0))
    np.testing.assert_allclose(nnx.merge(nnx.split(model)[0], plain["lm"])(tokens), before, atol=1e-11)


@pytest.mark.slow
def test_twins_train_alike_and_rotations_stay_orthogonal(x64: None) -> None:
    graph, params, tokens = _model(GPT)
    gauges = gauged_transformer.gauges(GPT)
    group = go.product(gauges)
    twin = group.act(group.sample(jax.random.key(1), params, 0.5), params)

    def loss(params: Any) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def trained(inner: optax.GradientTransformation, params: Any) -> tuple[Any, np.ndarray]:
        tx = gauged_transformer.orthogonal_skips(inner)
        return train(tx.init, stepper(tx, loss), params, 10)

    (end, ours), (_, theirs) = (trained(go.quotient(optax.adam(1e-2), gauges), p) for p in (params, twin))
    np.testing.assert_allclose(theirs, ours, rtol=1e-10)
    assert ours[-1] < ours[0]
    for skip in jax.tree.leaves(end["skips"]):
        np.testing.assert_allclose(skip.T @ skip, np.eye(6), atol=1e-12)
    plain, other = (trained(optax.adam(1e-2), p)[1] for p in (params, twin))
    assert np.max(np.abs(np.subtract(plain, other))) > 1e-6


def test_a_tied_head_is_refused() -> None:
    with pytest.raises(ValueError, match="write tied=False"):
        gauged_transformer.gauges(lm.LMConfig(**SIZES, tied=True))
