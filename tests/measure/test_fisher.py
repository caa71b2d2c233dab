"""Curvature operators, against matrices that are written out, closed forms, and the zeros that gauges explain."""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gauge_optax as go
from models import lm
from tests.cases import _lm_params
from tests.quick import jit

Tree = Any
KEY = jax.random.key(0)
SIZES = (5, 4, 3)


def _noise(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), float)


def _net(p: Tree, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["up"]) @ p["down"] + p["bias"]


def _relu_net(p: Tree, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ p["up"]) @ p["down"]


def _linear(p: Tree, x: jax.Array) -> jax.Array:
    return x @ p["w"]


def _point() -> Tree:
    inputs, hidden, outputs = SIZES
    return {"up": _noise(0, inputs, hidden), "down": _noise(1, hidden, outputs), "bias": _noise(2, outputs)}


def _jacobian(fn: Any, params: Tree, x: jax.Array) -> np.ndarray:
    """(rows, outputs, parameters), in the order of the tree."""
    parts = jax.tree.leaves(jax.jacobian(fn)(params, x))
    return np.concatenate([np.asarray(part).reshape(*part.shape[:2], -1) for part in parts], -1)


# Dense oracles ------------------------------------------------------------------------------------


def test_the_hessian_is_the_mean_of_the_hessians_of_batches(x64: None) -> None:
    params = _point()

    def loss(p: Tree, batch: Any) -> jax.Array:
        return jnp.mean(jnp.square(_net(p, batch)))

    batches = [_noise(3, 7, 5), _noise(4, 9, 5)]
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    expected = jit(jax.hessian(lambda v: sum(loss(unravel(v), x) for x in batches) / 2))(flat)
    np.testing.assert_allclose(go.measure.Hessian(loss, params, batches).dense(), expected, atol=1e-12)


@pytest.mark.parametrize("likelihood", ["softmax", "gaussian"])
def test_the_ggn_is_written_out(x64: None, likelihood: str) -> None:
    params, batches = _point(), [_noise(3, 7, 5), _noise(4, 9, 5)]
    jacobian = np.concatenate([_jacobian(_net, params, x) for x in batches])
    p = np.asarray(jax.nn.softmax(jnp.concatenate([_net(params, x) for x in batches])))
    curves = np.eye(3) * p[:, None] - p[:, :, None] * p[:, None] if likelihood == "softmax" else np.eye(3)[None]
    expected = np.mean(np.swapaxes(jacobian, 1, 2) @ curves @ jacobian, 0)
    operator = go.measure.GGN(_net, params, batches, likelihood)
    np.testing.assert_allclose(operator.dense(), expected, atol=1e-13)
    vector = _noise(5, operator.shape[0])
    np.testing.assert_allclose(operator @ vector, expected @ vector, atol=1e-12)
    np.testing.assert_array_equal(operator.ravel(operator.unravel(vector)), vector)


@pytest.mark.parametrize("likelihood", ["softmax", "gaussian"])
def test_the_empirical_fisher_takes_the_labels_of_the_data(x64: None, likelihood: str) -> None:
    params, x = _point(), _noise(3, 30, 5)
    labels = jnp.arange(30) % 3 if likelihood == "softmax" else _noise(6, 30, 3)
    outputs = _net(params, x)
    scores = jax.nn.softmax(outputs) - jax.nn.one_hot(labels, 3) if likelihood == "softmax" else outputs - labels
    gradients = np.einsum("nc,ncd->nd", scores, _jacobian(_net, params, x))
    operator = go.measure.EmpiricalFisher(_net, params, [x], [labels], likelihood)
    np.testing.assert_allclose(operator.dense(), gradients.T @ gradients / 30, atol=1e-13)


@pytest.mark.slow
def test_a_block_of_leaves_is_a_block_of_the_matrix(x64: None) -> None:
    params, x = _point(), _noise(3, 30, 5)
    whole = go.measure.GGN(_net, params, [x])
    both = go.measure.GGN(_net, params, [x], only=["bias", "up"])
    assert both.paths == ("bias", "up") and both.shape == (23, 23)
    entries = np.r_[0:3, 15:35]  # bias, down, up
    np.testing.assert_allclose(both.dense(), whole.dense()[np.ix_(entries, entries)], atol=1e-14)
    blocks = whole.blocks()
    assert list(blocks) == ["bias", "down", "up"]
    np.testing.assert_allclose(blocks["up"], whole.dense()[15:, 15:], atol=1e-14)


# Labels that the model draws ----------------------------------------------------------------------


def _z_scores(found: np.ndarray, scores: np.ndarray, weights: np.ndarray, jacobian: np.ndarray, each: int) -> Any:
    """Entries of a sampled Fisher less the exact ones, over their standard errors.

    Args:
      found: the sampled matrix.
      scores: (rows, draws, outputs), every score of a row with its weight.
      weights: (rows, draws), which add up to 1.
      jacobian: (rows, outputs, parameters).
      each: labels drawn per row.
    """
    gradients = np.einsum("nkc,ncd->nkd", scores, jacobian)
    first = np.einsum("nk,nkd,nke->nde", weights, gradients, gradients)
    second = np.einsum("nk,nkd,nke->nde", weights, gradients**2, gradients**2)
    error = np.sqrt(np.sum(second - first**2, 0) / each) / len(first)
    upper = np.triu_indices(len(found))
    return ((found - first.mean(0)) / np.where(error > 0, error, np.inf))[upper]


def test_softmax_regression_has_its_closed_form_within_three_standard_errors(x64: None) -> None:
    """F = mean of x·xᵀ ⊗ (diag p − p·pᵀ)."""
    x, params = _noise(0, 40, 4), {"w": _noise(1, 4, 3)}
    p = np.asarray(jax.nn.softmax(x @ params["w"]))
    jacobian = np.einsum("ni,cd->ncid", x, np.eye(3)).reshape(40, 3, 12)
    scores = np.broadcast_to(p[:, None], (40, 3, 3)) - np.eye(3)
    squares = []
    for seed in range(20):
        fisher = go.measure.Fisher(_linear, params, [x], jax.random.key(seed))
        assert fisher.samples == 1200 == 100 * fisher.shape[0]
        z = _z_scores(np.asarray(fisher.dense()), scores, p, jacobian, 30)
        squares.append(z**2)
    # Entries of one matrix share their labels: the law holds over keys.
    assert np.mean(squares) == pytest.approx(1.0, abs=0.2) and np.mean(np.array(squares) > 9) < 0.015
    many = go.measure.Fisher(_linear, params, [x], KEY, 10**9)
    exact = np.einsum("ni,nj,ncd->icjd", x, x, np.eye(3) * p[:, None] - p[:, :, None] * p[:, None]) / 40
    np.testing.assert_allclose(many.dense(), exact.reshape(12, 12), atol=3e-4)


@pytest.mark.parametrize("each", [2, 100])  # fewer draws per row than outputs, and more
@pytest.mark.filterwarnings("ignore:Fisher")
def test_gaussian_noise_has_the_moments_of_its_law(x64: None, each: int) -> None:
    x, params = _noise(0, 40, 4), {"w": _noise(1, 4, 3)}
    found = []
    for seed in range(40):
        fisher = go.measure.Fisher(_linear, params, [x], jax.random.key(seed), 40 * each, likelihood="gaussian")
        found.append(np.asarray(fisher.dense()))
    exact = np.kron(x.T @ x / 40, np.eye(3))
    # E (ε_a ε_b)² − δ_ab = 1 + δ_ab.
    spread = np.einsum("ni,nj->ij", x**2, x**2) / 40**2 / each
    expected = np.sqrt(np.kron(spread, 1.0 + np.eye(3)))
    error = np.mean(found, 0) - exact
    assert np.mean((error / expected * np.sqrt(40)) ** 2) == pytest.approx(1.0, abs=0.4)
    assert np.mean(np.std(found, 0) / expected) == pytest.approx(1.0, abs=0.1)


def test_fewer_than_a_hundred_labels_per_parameter_warn(x64: None) -> None:
    with pytest.warns(UserWarning, match=r"1,199 labels for 12 parameters.*samples=1_200"):
        go.measure.Fisher(_linear, {"w": _noise(1, 4, 3)}, [_noise(0, 40, 4)], KEY, 1199)


# Without a dense matrix ---------------------------------------------------------------------------


def _wide() -> Tree:
    return {"up": _noise(0, 30, 50) / 30**0.5, "down": _noise(1, 50, 10) / 50**0.5}


@functools.cache
def _two_thousand() -> tuple[Any, np.ndarray]:
    operator = go.measure.GGN(_relu_net, _wide(), [_noise(2, 400, 30)])
    return operator, operator.eigenvalues()


def test_lanczos_is_within_a_percent_of_dense_at_two_thousand_parameters(x64: None) -> None:
    pytest.importorskip("matfree")
    operator, values = _two_thousand()
    assert operator.shape == (2000, 2000)
    found = operator.lanczos(KEY, 60, vectors=True)
    np.testing.assert_allclose(found.values[:10], values[:10], rtol=1e-2)
    vectors = found.vectors[:3]
    np.testing.assert_allclose(operator @ vectors.T, (found.values[:3, None] * vectors).T, atol=1e-2 * values[0])
    np.testing.assert_allclose(operator.lanczos(KEY, 60).values, found.values, rtol=1e-6, atol=1e-12)


def test_random_probes_estimate_the_trace(x64: None) -> None:
    pytest.importorskip("matfree")
    operator, values = _two_thousand()
    trace = operator.trace(KEY, 40)
    assert abs(trace.mean - values.sum()) < 4 * trace.error < 0.1 * values.sum()


def test_without_matfree_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matfree", None)
    monkeypatch.delitem(sys.modules, "matfree.decomp", raising=False)
    with pytest.raises(ImportError, match=r'pip install "gauge_optax\[measure\]"'):
        go.measure.GGN(_relu_net, {"up": jnp.ones((2, 2)), "down": jnp.ones((2, 2))}, [jnp.ones((3, 2))]).lanczos(
            KEY, 2
        )


# On the quotient ----------------------------------------------------------------------------------


@functools.cache
def _llama() -> tuple[Any, Tree, Any, list[go.Gauge]]:
    config = lm.llama_config(vocab=7, d_model=4, layers=1, heads=2, kv_heads=1, d_head=2, d_ff=3, norm_eps=0.0)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: lm.build(config, nnx.Rngs(0))))
    params = _lm_params(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 7, (24, 6))
    return lambda p, x: nnx.merge(graphdef, p)(x), params, tokens, lm.whole_gauges(config)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [False, True], ids=["GGN", "Fisher"])
def test_the_quotient_has_no_zeros_and_the_whole_exactly_those_of_its_gauges(x64: None, drawn: bool) -> None:
    fn, params, tokens, gauges = _llama()
    if drawn:
        operator: Any = go.measure.Fisher(fn, params, [tokens], KEY)
    else:
        operator = go.measure.GGN(fn, params, [tokens])
    values, quotient = operator.eigenvalues(), go.measure.quotient_fisher(operator, gauges)
    dead = go.measure.redundancy(gauges, params)
    assert np.sum(values < 1e-12 * values[0]) == dead > 20
    assert values[-dead - 1] > 1e-9 * values[0]
    across = quotient.eigenvalues()
    assert quotient.dim == len(across) == operator.shape[0] - dead
    assert across[-1] > 1e-9 * across[0]
    # A list without one gauge leaves as many zeros.
    fewer = go.measure.quotient_fisher(operator, [gauge for gauge in gauges if gauge.name != "rescale"]).eigenvalues()
    assert np.sum(fewer < 1e-12 * fewer[0]) == 3


def test_probes_stay_on_the_quotient(x64: None) -> None:
    pytest.importorskip("matfree")
    fn, params, tokens, gauges = _llama()
    quotient = go.measure.quotient_fisher(go.measure.GGN(fn, params, [tokens]), gauges)
    values = quotient.eigenvalues()
    found = quotient.lanczos(KEY, 40)
    np.testing.assert_allclose(found.values[:5], values[:5], rtol=1e-4)
    assert found.values[-1] > 0
    trace = quotient.trace(KEY, 60)
    assert abs(trace.mean - values.sum()) < 4 * trace.error


def test_the_curvature_along_a_direction(x64: None) -> None:
    params, x = _point(), _noise(3, 30, 5)
    operator = go.measure.GGN(_net, params, [x])
    direction = jax.tree.map(lambda x: _noise(7, *x.shape), params)
    u = np.asarray(operator.ravel(direction))
    expected = u @ operator.dense() @ u / (u @ u)
    assert float(go.measure.directional_fisher(operator, direction)) == pytest.approx(float(expected))
    assert go.measure.directional_fisher(operator, jax.tree.map(jnp.zeros_like, params)) == 0.0


# Messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "message"), [
    (lambda fn, p, x: go.measure.GGN(fn, p, []), "at least one batch"),
    (lambda fn, p, x: go.measure.GGN(fn, p, [x], "poisson"), 'likelihood="softmax"'),
    (lambda fn, p, x: go.measure.GGN(fn, p, [x], only="side"), "no leaf matches 'side'"),
    (lambda fn, p, x: go.measure.EmpiricalFisher(fn, p, [x], []), "labels do not fit batch 0"),
    (lambda fn, p, x: go.measure.GGN(fn, p, [x]) @ jnp.ones(3), "operator.ravel"),
    (lambda fn, p, x: go.measure.quotient_fisher(
        go.measure.GGN(fn, p, [x], only="up"), go.rescale({"up": "_ c"}, {"down": "c _"})), "'down', which is not"),
    (lambda fn, p, x: go.measure.quotient_fisher(
        go.measure.Hessian(lambda p, x: jnp.sum(fn(p, x)), p, [x]), []), "no operator with zeros along orbits"),
])
@pytest.mark.filterwarnings("ignore:an empty list of gauges")
def test_messages(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(_net, _point(), _noise(3, 6, 5))


def test_many_products_at_once_are_right_where_the_outputs_are_shared() -> None:
    """jaxlib 0.10.2 fuses two sums into one call that is wrong under `vmap` (jax issue 39103); float32, on a CPU."""
    rows, classes = 529, 23
    outputs = jax.random.normal(jax.random.key(0), (rows, classes))
    params = {"shift": jnp.zeros(classes)}

    def fn(p: Any, x: jax.Array) -> jax.Array:
        return x + p["shift"]

    q = np.asarray(jax.nn.softmax(outputs), np.float64)
    exact = np.diag(q.mean(0)) - q.T @ q / rows
    np.testing.assert_allclose(go.measure.GGN(fn, params, [outputs]).dense(), exact, atol=1e-6)
    fisher = go.measure.Fisher(fn, params, [outputs], jax.random.key(1), 200 * rows)
    np.testing.assert_allclose(fisher.dense(), exact, atol=3e-3)
    one_by_one = np.stack([fisher @ x for x in jnp.eye(classes)])
    np.testing.assert_allclose(fisher.dense(), one_by_one, atol=1e-6)
