"""Muon inside a quotient: one matrix per head, or several, beside what Optax does with the same matrices."""

import jax
import jax.numpy as jnp
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import gauge_optax as go
from models import lm
from tests.quick import jit
from tests.tolerances import tolerance

GAUGE = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
SHAPES = {"value": (6, 4, 3), "out": (4, 3, 6)}


def _draw(seed: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, SHAPES.items(), strict=True)}


@pytest.mark.parametrize("per_matrix", [1, 4])
def test_steps_are_those_of_optax_on_the_same_matrices(per_matrix: int) -> None:
    """Without turns taken out: heads one by one, and all in one matrix."""
    one = {"value": MuonDimensionNumbers(0, 2), "out": MuonDimensionNumbers(1, 2)}
    whole = {"value": MuonDimensionNumbers(0, (1, 2)), "out": MuonDimensionNumbers((0, 1), 2)}
    axes = one if per_matrix == 1 else whole
    plain = optax.contrib.muon(0.1, muon_weight_dimension_numbers=lambda _: axes)
    ours = go.quotient_muon(0.1, GAUGE, heads_per_matrix=per_matrix, hold=False)
    params = _draw(0)
    states = [jit(tx.init)(params) for tx in (plain, ours)]
    for n in (1, 2):
        expected, states[0] = plain.update(_draw(n), states[0], params)
        found, states[1] = ours.update(_draw(n), states[1], params)
        for name in SHAPES:
            error = float(jnp.linalg.norm(found[name] - expected[name]) / jnp.linalg.norm(expected[name]))
            assert error <= tolerance("twins", "float32")


def test_two_heads_make_a_matrix() -> None:
    params = _draw(0)
    tx = go.quotient_muon(0.1, GAUGE, heads_per_matrix=2, hold=False, ns_coeffs="sharp")
    updates, _ = tx.update(_draw(1), jit(tx.init)(params), params)
    pair = updates["value"][:, :2].reshape(6, 6)
    sizes = jnp.linalg.svd(pair, compute_uv=False)
    assert float(jnp.max(sizes) / jnp.min(sizes)) < 1.5


@pytest.mark.parametrize("count", [3, 0])
def test_heads_must_be_dealt_out_evenly(count: int) -> None:
    with pytest.raises(ValueError, match="heads_per_matrix") as error:
        go.quotient_muon(0.1, GAUGE, heads_per_matrix=count).init(_draw(0))
    for part in ("found:", "expected:", "remedy:", f"={count} at '"):
        assert part in str(error.value)


def test_a_traced_number_of_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="static_args"):
        optax.inject_hyperparams(go.quotient_muon)(0.1, GAUGE, heads_per_matrix=2).init(_draw(0))


def test_under_qk_norm_queries_are_matrices_per_head() -> None:
    config = lm.llama_config(vocab=7, d_model=6, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=5, qk_norm=True)
    params, _ = lm.params_and_loss(config, jax.random.key(0))
    tx = go.quotient_muon(0.1, lm.gauges(config), ns_coeffs="sharp", hold=False)
    state = jit(tx.init)(params)
    grads = jax.tree.map(lambda x: jnp.asarray(jax.random.normal(jax.random.key(x.size), x.shape)), params)
    _, after = tx.update(grads, state, params)
    muon = after.inner_state.inner_state.inner_states["muon"]
    moments = muon.inner_state[0].mu["blocks"][0]["attn"]
    assert moments["query"]["kernel"].shape == (6, 2, 4)
