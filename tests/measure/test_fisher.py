"""Curvature operators, against matrices that are written out, closed forms, and the zeros that gauges explain."""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import gauge_optax as go
from models import lm
from tests.cases import _lm_params
from tests.quick import jit
from tests.refusals import each_refused

Tree = Any
KEY, DRAW = jax.random.key(0), np.random.default_rng(0).normal
# numpy's float64, which is float32 for JAX without x64.
POINT, INPUTS = {"up": DRAW(size=(5, 4)), "down": DRAW(size=(4, 3)), "bias": DRAW(size=3)}, DRAW(size=(30, 5))
BATCHES = [INPUTS[:7], INPUTS[7:16]]


def _net(p: Tree, x: Any) -> jax.Array:
    return jnp.tanh(x @ p["up"]) @ p["down"] + p["bias"]


def _linear(p: Tree, x: jax.Array) -> jax.Array:
    return x @ p["w"]


LINEAR = _linear, {"w": DRAW(size=(4, 3))}, [DRAW(size=(40, 4))]


def _jacobian(fn: Any, params: Tree, x: Any) -> np.ndarray:
    """(rows, outputs, parameters), in the order of the tree."""
    parts = jax.tree.leaves(jax.jacobian(fn)(params, x))
    return np.concatenate([np.asarray(part).reshape(*part.shape[:2], -1) for part in parts], -1)


def _softmax_curves(outputs: Any) -> np.ndarray:
    """diag p − p·pᵀ of every row."""
    p = np.asarray(jax.nn.softmax(outputs), float)
    return np.eye(p.shape[1]) * p[:, None] - p[:, :, None] * p[:, None]


# Dense oracles ------------------------------------------------------------------------------------


def test_the_hessian_is_the_mean_of_the_hessians_of_batches(x64: None) -> None:
    def loss(p: Tree, batch: Any) -> jax.Array:
        return jnp.mean(jnp.square(_net(p, batch)))

    flat, unravel = ravel_pytree(POINT)
    expected = jit(jax.hessian(lambda v: sum(loss(unravel(v), x) for x in BATCHES) / 2))(flat)
    np.testing.assert_allclose(go.measure.Hessian(loss, POINT, BATCHES).dense(), expected, atol=1e-12)


@pytest.mark.parametrize("likelihood", ["softmax", "gaussian"])
def test_the_ggn_is_written_out(x64: None, likelihood: str) -> None:
    jacobian = _jacobian(_net, POINT, INPUTS[:16])
    curves = _softmax_curves(_net(POINT, INPUTS[:16])) if likelihood == "softmax" else np.eye(3)
    expected = np.mean(np.swapaxes(jacobian, 1, 2) @ curves @ jacobian, 0)
    operator, vector = go.measure.GGN(_net, POINT, BATCHES, likelihood), jnp.cos(jnp.arange(35.0))
    np.testing.assert_allclose(operator.dense(), expected, atol=1e-13)
    np.testing.assert_allclose(operator @ vector, expected @ vector, atol=1e-12)
    np.testing.assert_array_equal(operator.ravel(operator.unravel(vector)), vector)
    along, zero = (go.measure.directional_fisher(operator, operator.unravel(x)) for x in (vector, 0.0 * vector))
    assert float(along) == pytest.approx(float(vector @ expected @ vector / (vector @ vector))) and zero == 0.0


@pytest.mark.parametrize("likelihood", ["softmax", "gaussian"])
def test_the_empirical_fisher_takes_the_labels_of_the_data(x64: None, likelihood: str) -> None:
    outputs, labels = _net(POINT, INPUTS), jnp.arange(30) % 3 if likelihood == "softmax" else INPUTS[:, :3]
    scores = jax.nn.softmax(outputs) - jax.nn.one_hot(labels, 3) if likelihood == "softmax" else outputs - labels
    gradients = np.einsum("nc,ncd->nd", scores, _jacobian(_net, POINT, INPUTS))
    operator = go.measure.EmpiricalFisher(_net, POINT, [INPUTS], [labels], likelihood)
    np.testing.assert_allclose(operator.dense(), gradients.T @ gradients / 30, atol=1e-13)


@pytest.mark.slow
def test_a_block_of_leaves_is_a_block_of_the_matrix(x64: None) -> None:
    whole, both = (go.measure.GGN(_net, POINT, [INPUTS], only=only) for only in (None, ["bias", "up"]))
    assert both.paths == ("bias", "up") and both.shape == (23, 23)
    blocks, entries = whole.blocks(), np.r_[0:3, 15:35]  # bias, down, up
    np.testing.assert_allclose(both.dense(), whole.dense()[np.ix_(entries, entries)], atol=1e-14)
    assert list(blocks) == ["bias", "down", "up"]
    np.testing.assert_allclose(blocks["up"], whole.dense()[15:, 15:], atol=1e-14)


# Labels that the model draws ----------------------------------------------------------------------


@pytest.mark.parametrize(("likelihood", "each"), [
    ("softmax", 30), ("gaussian", 2), ("gaussian", 100)  # fewer draws per row than outputs, and more
])
@pytest.mark.filterwarnings("ignore:Fisher")
def test_sampled_labels_have_the_moments_of_their_law(x64: None, likelihood: str, each: int) -> None:
    """A row's share is x·xᵀ ⊗ s·sᵀ; of s·sᵀ the mean and the variance of every entry have closed forms."""
    _, params, (x,) = LINEAR

    def sampled(seed: int, samples: int) -> Any:
        return go.measure.Fisher(*LINEAR, jax.random.key(seed), samples, likelihood=likelihood).dense()

    means, variances = np.stack([np.eye(3)] * 40), np.stack([1.0 + np.eye(3)] * 40)
    if likelihood == "softmax":
        p, means = np.asarray(jax.nn.softmax(x @ params["w"])), _softmax_curves(x @ params["w"])
        scores = np.square(p[:, None] - np.eye(3))
        variances = np.einsum("nk,nka,nkb->nab", p, scores, scores) - means**2
    exact = np.einsum("ni,nj,nab->iajb", x, x, means).reshape(12, 12) / 40
    spread = np.sqrt(np.einsum("ni,nj,nab->iajb", x**2, x**2, variances).reshape(12, 12) / each) / 40
    found = np.stack([sampled(seed, 40 * each) for seed in range(40)])
    error = (found.mean(0) - exact) / spread * np.sqrt(40)
    assert np.mean(error**2) == pytest.approx(1.0, abs=0.4)
    assert np.mean(np.std(found, 0) / spread) == pytest.approx(1.0, abs=0.1)
    np.testing.assert_allclose(sampled(0, 10**9), exact, atol=3e-4)


def test_fewer_than_a_hundred_labels_per_parameter_warn(x64: None) -> None:
    assert go.measure.Fisher(*LINEAR, KEY).samples == 1200
    with pytest.warns(UserWarning, match=r"1,199 labels for 12 parameters.*samples=1_200"):
        go.measure.Fisher(*LINEAR, KEY, 1199)


# Without a dense matrix ---------------------------------------------------------------------------


@pytest.mark.slow
def test_lanczos_and_probes_agree_with_the_dense_matrix_at_two_thousand_parameters(x64: None) -> None:
    """The largest ten eigenvalues to a percent, and the trace to its standard error."""
    draw = np.random.default_rng(1).normal
    params = {"up": draw(size=(30, 50)) / 30**0.5, "down": draw(size=(50, 10)) / 50**0.5, "bias": jnp.zeros(10)}
    operator = go.measure.GGN(_net, params, [draw(size=(400, 30))], only=["up", "down"])
    values, found = operator.eigenvalues(), operator.lanczos(KEY, 60, vectors=True)
    assert operator.shape == (2000, 2000)
    np.testing.assert_allclose(found.values[:10], values[:10], rtol=1e-2)
    vectors = np.asarray(found.vectors)[:3]
    np.testing.assert_allclose(operator @ vectors.T, (found.values[:3, None] * vectors).T, atol=1e-2 * values[0])
    np.testing.assert_allclose(operator.lanczos(KEY, 60).values, found.values, rtol=1e-6, atol=1e-12)
    pytest.importorskip("matfree")
    trace = operator.trace(KEY, 40)
    assert abs(trace.mean - values.sum()) < 4 * trace.error < 0.1 * values.sum()


def _few_rows(quotient: bool) -> Any:
    operator = go.measure.GGN(_net, POINT, [INPUTS[:2]])  # rank 4 of 35
    shift = go.logit_shift({"down": "_ vocab", "bias": "vocab"})
    return go.measure.quotient_fisher(operator, shift) if quotient else operator


@pytest.mark.parametrize("operator", [
    lambda: _few_rows(False), lambda: _few_rows(True),
    lambda: go.measure.Hessian(lambda p, x: jnp.sum(p["down"] ** 2), POINT, [0]),  # two eigenvalues, 12 and 23 times
], ids=["GGN", "quotient", "equal eigenvalues"])
def test_lanczos_beyond_the_rank_finds_the_other_eigenvalues_too(x64: None, operator: Any) -> None:
    found = (matrix := operator()).lanczos(KEY, 40, vectors=True)
    np.testing.assert_allclose(found.values, matrix.eigenvalues(), atol=1e-12)
    np.testing.assert_allclose(found.vectors @ found.vectors.T, np.eye(len(found.values)), atol=1e-12)


def test_without_matfree_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matfree", None)
    monkeypatch.delitem(sys.modules, "matfree.stochtrace", raising=False)
    with pytest.raises(ImportError, match=r'pip install "gauge_optax\[measure\]"'):
        go.measure.GGN(*LINEAR).trace(KEY)


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
    operator: Any = go.measure.Fisher(fn, params, [tokens], KEY) if drawn else go.measure.GGN(fn, params, [tokens])
    values, quotient = operator.eigenvalues(), go.measure.quotient_fisher(operator, gauges)
    dead = go.measure.redundancy(gauges, params)
    assert np.sum(values < 1e-12 * values[0]) == dead > 20 and values[-dead - 1] > 1e-9 * values[0]
    across = quotient.eigenvalues()
    assert quotient.dim == len(across) == operator.shape[0] - dead and across[-1] > 1e-9 * across[0]
    # A list without one gauge leaves as many zeros.
    fewer = go.measure.quotient_fisher(operator, [gauge for gauge in gauges if gauge.name != "rescale"]).eigenvalues()
    assert np.sum(fewer < 1e-12 * fewer[0]) == 3


@pytest.mark.slow
def test_probes_stay_on_the_quotient(x64: None) -> None:
    fn, params, tokens, gauges = _llama()
    quotient = go.measure.quotient_fisher(go.measure.GGN(fn, params, [tokens]), gauges)
    values, found = quotient.eigenvalues(), quotient.lanczos(KEY, 40).values
    np.testing.assert_allclose(found[:5], values[:5], rtol=1e-4)
    assert found[-1] > 0
    pytest.importorskip("matfree")
    trace = quotient.trace(KEY, 60)
    assert abs(trace.mean - values.sum()) < 4 * trace.error


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_the_curvature_along_a_tiny_or_huge_step_is_that_along_its_direction(scale: float) -> None:
    quotient = go.measure.quotient_fisher(_few_rows(False), go.logit_shift({"down": "_ vocab"}))
    of, step = go.measure.directional_fisher, jax.tree.map(jnp.float32, POINT)
    assert of(quotient, jax.tree.map(lambda x: scale * x, step)) == pytest.approx(float(of(quotient, step)), rel=1e-5)


def test_functions_without_a_hash_are_taken() -> None:
    """As modules of equinox and dataclasses are."""

    @dataclasses.dataclass
    class Net:
        factor: float

        def __call__(self, p: Any, x: Any) -> Any:
            return self.factor * _net(p, x)

    ours, theirs = (go.measure.GGN(fn, POINT, [INPUTS[:6]]) for fn in (Net(1.0), _net))
    np.testing.assert_array_equal(ours @ np.ones(theirs.shape[0]), theirs @ np.ones(theirs.shape[0]))


# Messages -----------------------------------------------------------------------------------------


GIVEN, UNIT = (_net, POINT, [INPUTS[:6]]), go.rescale({"up": "_ c"}, {"down": "c _"})
DICT: Any = {"x": INPUTS}
HESSIAN = go.measure.Hessian(lambda p, x: jnp.sum(_net(p, x)), *GIVEN[1:])
test_messages = each_refused([
    (lambda: go.measure.GGN(*GIVEN[:2], []), "at least one batch"),
    *((functools.partial(kind, *GIVEN[:2], DICT, *more), "batches is a dict")
      for kind, *more in ((go.measure.GGN,), (go.measure.Hessian,), (go.measure.Fisher, KEY),
                          (go.measure.EmpiricalFisher, []))),
    (lambda: go.measure.GGN("net", *GIVEN[1:]), "GGN: fn is no function"),  # type: ignore[arg-type]
    (lambda: go.measure.GGN(_net, POINT, ["text"]), "batch 0 holds what is no array"),
    (lambda: go.measure.Hessian(_net, POINT, None), "Hessian: batches is no list"),  # type: ignore[arg-type]
    (lambda: go.measure.EmpiricalFisher(*GIVEN, None), "labels is no list"),  # type: ignore[arg-type]
    (lambda: go.measure.GGN(*GIVEN, only=3), "only is no list"),  # type: ignore[arg-type]
    (lambda: go.measure.quotient_fisher(_net, UNIT), "quotient_fisher: no operator"),  # type: ignore[arg-type]
    (lambda: go.measure.GGN(*GIVEN, "poisson"), 'likelihood="softmax"'),
    (lambda: go.measure.GGN(*GIVEN, only="side"), "no leaf matches 'side'"),
    (lambda: go.measure.EmpiricalFisher(*GIVEN, []), "labels do not fit batch 0"),
    (lambda: go.measure.EmpiricalFisher(*GIVEN, [jnp.zeros(6, int)] * 2), "2 arrays for 1 batch\n"),
    (lambda: go.measure.EmpiricalFisher(*GIVEN, [jnp.full(6, -100)]), "labels that are no classes in batch 0"),
    (lambda: go.measure.GGN(*GIVEN) @ jnp.ones(3), "operator.ravel"),
    (lambda: go.measure.GGN(*GIVEN) @ jnp.full(35, 1j), "a complex vector"),
    (lambda: go.measure.Hessian(*GIVEN), "a loss that is no scalar"),
    (lambda: go.measure.GGN(lambda p, x: jnp.argmax(_net(p, x), -1), *GIVEN[1:]), "no real numbers for batch 0"),
    (lambda: go.measure.Fisher(*GIVEN, KEY, "gaussian"), "write likelihood='gaussian'"),  # type: ignore[arg-type]
    (lambda: go.measure.Fisher(*GIVEN, KEY, 0), "samples=0"),
    (lambda: go.measure.GGN(*GIVEN).unravel(jnp.ones(3)), "found:    shape \\(3,\\)"),
    (lambda: go.measure.GGN(*GIVEN).ravel({"up": POINT["up"]}), "no leaf 'bias'"),
    (lambda: go.measure.directional_fisher(HESSIAN, jax.tree.map(np.transpose, POINT)), "no leaf 'down' like"),
    (lambda: go.measure.GGN(*GIVEN).lanczos(KEY, 0), "pass steps=1"),
    (lambda: go.measure.GGN(*GIVEN).trace(KEY, 2.5), "probes=2.5"),  # type: ignore[arg-type]
    (lambda: go.measure.quotient_fisher(go.measure.GGN(*GIVEN, only="up"), UNIT), "'down', which is not"),
    (lambda: go.measure.GGN(_net, {**GIVEN[1], "phase": 1j}, GIVEN[2]), "a complex leaf 'phase'"),
    (lambda: go.measure.quotient_fisher(HESSIAN, UNIT), "no operator with zeros along orbits"),
])


def test_many_products_at_once_are_right_where_the_outputs_are_shared() -> None:
    """jaxlib 0.10.2 fuses two sums into one call that is wrong under `vmap` (jax issue 39103); float32, on a CPU."""
    rows, classes = 529, 23
    outputs = jax.random.normal(jax.random.key(0), (rows, classes))
    given = lambda p, x: x + p["shift"], {"shift": jnp.zeros(classes)}, [outputs]
    exact = _softmax_curves(outputs).mean(0)
    np.testing.assert_allclose(go.measure.GGN(*given).dense(), exact, atol=1e-6)
    fisher = go.measure.Fisher(*given, jax.random.key(1), 200 * rows)
    np.testing.assert_allclose(fisher.dense(), exact, atol=3e-3)
    one_by_one = np.stack([fisher @ x for x in jnp.eye(classes)])
    np.testing.assert_allclose(fisher.dense(), one_by_one, atol=1e-6)
