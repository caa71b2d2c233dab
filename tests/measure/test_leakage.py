"""Leakage: closed forms against explicit orbit tangents, second order against half steps, Adam's factors."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests import oracles
from tests.cases import GAUGE_CASES, GaugeCase
from tests.quick import jit
from tests.refusals import each_refused
from tests.tolerances import tolerance

Tree = Any
BY_NAME = {case.name: case for case in GAUGE_CASES}
SCALES = ("rescale/degree_2", "rescale/gate", "norm_scale/one_plus", "scale_invariant/kernel_bias")
ROTATIONS = ("head_rotation/gqa", "head_rotation/fused", "rope_torus/partial")
SMOOTH = ("rescale/gate", "norm_scale/bias", "head_rotation/gqa", "rope_torus/half")


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled, and numpy comes out: what a test does with it compiles nothing more."""
    inner = jit(function)
    return lambda *arguments: jax.tree.map(np.asarray, inner(*arguments))


@functools.cache
def _compiled(case: GaugeCase, **options: Any) -> tuple[go.Gauge, Callable[..., Any]]:
    """The gauge, and its leakage, both lemmas under one name."""
    (gauge,) = case.gauges()
    lemma = go.measure.rotation_leakage if gauge.name in ("head_rotation", "rope_torus") else go.measure.rescale_leakage
    return gauge, _compile(functools.partial(lemma, gauge, **options))


def _params(case: GaugeCase) -> Tree:
    return jax.tree.map(np.asarray, case.params(jax.random.key(0)))


def _positive(params: Tree, seed: int = 0) -> Tree:
    """A preconditioner."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.exp(generator.normal(size=x.shape)), params)


@functools.cache
def _start(case: GaugeCase) -> tuple[Tree, Tree, Tree]:
    """A point, the gradient there, a random positive preconditioner."""
    params = _params(case)
    return params, _compile(jax.grad(case.loss))(params), _positive(params)


def _plus(a: Tree, b: Tree, factor: float = 1.0) -> Tree:
    return jax.tree.map(lambda x, y: x + factor * y, a, b)


def _largest(tree: Tree) -> float:
    return max(float(np.max(np.abs(x))) for x in jax.tree.leaves(tree))


def _apart(a: Tree, b: Tree) -> float:
    return _largest(optax.tree.sub(a, b))


def _terms(found: Any) -> list[Tree]:
    return [found.of_gradient, found.per_tensor, found.residual]


def _per_tensor(params: Tree) -> Tree:
    """A preconditioner of one number per leaf, 1, 2, 3, …"""
    leaves, treedef = jax.tree.flatten(params)
    return jax.tree.unflatten(treedef, [np.full_like(x, 1.0 + k) for k, x in enumerate(leaves)])


def _flat(gauge: go.Gauge, pairing: Tree) -> np.ndarray:
    """A pairing in the oracle's coordinates: of a skew matrix, every entry above the diagonal counts twice."""
    arrays = [np.asarray(x) for x in jax.tree.leaves(pairing)]
    if gauge.name == "head_rotation":
        arrays = [2.0 * x[..., *np.triu_indices(x.shape[-1], 1)] for x in arrays]
    return np.concatenate([x.reshape(-1) for x in arrays])


# First order: the lemmas --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALES + ROTATIONS)
def test_measured_is_the_pairing_with_explicit_orbit_tangents(name: str, x64: None) -> None:
    (gauge, measure), (params, gradient, preconditioner) = _compiled(BY_NAME[name]), _start(BY_NAME[name])
    tangents, found = oracles.dense(gauge, params).tangents, measure(params, gradient, preconditioner)
    step = np.concatenate([np.ravel(x) for x in jax.tree.leaves(optax.tree.mul(preconditioner, gradient))])
    expected, size = tangents.T @ step, np.max(np.abs(tangents.T) @ np.abs(step))
    assert np.max(np.abs(_flat(gauge, found.measured) - expected)) <= tolerance("oracle") * size
    assert np.max(np.abs(expected)) > 1e-3 * size
    rate = np.linalg.lstsq(tangents, step, rcond=None)[0]  # the generator of the projection
    rate = 2.0 * rate if gauge.name == "head_rotation" else rate
    assert np.max(np.abs(_flat(gauge, found.rate) - rate)) <= tolerance("oracle") * np.max(np.abs(rate))


@pytest.mark.parametrize("name", SCALES + ROTATIONS)
def test_measured_is_the_sum_of_terms_one_per_layer_of_the_preconditioner(name: str, x64: None) -> None:
    """For any gradient; of an invariant loss the gradient adds nothing of its own."""
    (_, measure), (params, gradient, preconditioner) = _compiled(BY_NAME[name]), _start(BY_NAME[name])
    anything = jax.tree.map(lambda x: np.cos(7.0 * x), params)
    for slope, invariant in ((anything, False), (gradient, True)):
        found = measure(params, slope, preconditioner)
        size = _largest(_terms(found))
        assert _apart(found.measured, functools.reduce(optax.tree.add, _terms(found))) <= tolerance("kernel") * size
        assert _largest(found.residual) > 1e-3 * size
        of_gradient = _largest(found.of_gradient)
        assert of_gradient <= tolerance("kernel") * size if invariant else of_gradient > 1e-3 * size
    size, sgd = _largest(found.measured), measure(params, gradient, jax.tree.map(np.ones_like, params))
    assert _largest(sgd) <= tolerance("kernel") * size
    found = measure(params, gradient, _per_tensor(params))
    assert max(_largest(found.residual), _apart(found.measured, found.per_tensor)) <= tolerance("kernel") * size
    assert _largest(found.per_tensor) > 1e-3 * size


def test_rotation_residual_is_a_covariance_beside_the_columns_means(x64: None) -> None:
    """Lemma 10 leaves the columns' means out."""
    draw, measure = np.random.default_rng(1).normal, _compile(functools.partial(go.measure.rotation_leakage, TURN))
    params, gradient, d = ({"q": draw(size=(6, 4)), "k": draw(size=(7, 4))} for _ in range(3))
    found, lemma = measure(params, gradient, d), np.zeros((4, 4))
    for name, w in params.items():
        for i, j in np.ndindex(4, 4):
            lemma[i, j] += len(w) * np.cov(w[:, i] * gradient[name][:, j], d[name][:, j], bias=True)[0, 1]
    lemma = 0.5 * (lemma - lemma.T)
    assert _largest(found.covariance[""] - lemma) <= 10 * tolerance("kernel")
    assert _largest(found.residual[""] - lemma) > 0.1
    found = measure(params, gradient, {name: x - x.mean(0) + 3.0 for name, x in d.items()})
    assert _apart(found.residual, found.covariance) <= 10 * tolerance("kernel")


@pytest.mark.parametrize("name", ROTATIONS)
def test_the_bound_holds_and_is_reached_by_preconditioners_per_tensor(name: str, x64: None) -> None:
    (_, measure), (params, gradient, _) = _compiled(BY_NAME[name]), _start(BY_NAME[name])

    def size(x: np.ndarray) -> np.ndarray:
        return np.abs(x) if name.startswith("rope_torus") else np.linalg.norm(x, axis=(-2, -1))

    for seed in range(4):
        found, above = measure(params, gradient, _positive(params, seed)), 1.0 + tolerance("kernel")
        assert all(np.all(found.bound[key] * above >= size(x)) for key, x in found.measured.items())
    if not name.endswith("fused"):  # two blocks: the triangle is a line
        tight = measure(params, gradient, _per_tensor(params))
        assert _apart(tight.bound, jax.tree.map(size, tight.measured)) <= tolerance("kernel") * _largest(tight.bound)


@pytest.mark.parametrize("name", ["rescale/degree_2", "head_rotation/gqa"])
def test_entries_without_gradient_do_not_count_in_means_by_gradient(name: str) -> None:
    """Adam's D is 1/eps there. In float32, the terms of the plain means are rounding."""
    (_, by_entries), (_, by_gradient) = _compiled(BY_NAME[name]), _compiled(BY_NAME[name], means="gradient")
    params, generator = _params(BY_NAME[name]), np.random.default_rng(0)
    dead = jax.tree.map(lambda x: np.arange(x.size).reshape(x.shape) % 3 == 0, params)
    gradient = jax.tree.map(lambda x, n: np.where(n, 0.0, generator.normal(size=x.shape)), params, dead)
    d = jax.tree.map(lambda x, n: np.where(n, 1e8, x), _positive(params), dead)
    point = jax.tree.map(lambda x: x.astype(np.float32), (params, gradient, d))
    plain, found = by_entries(*point), by_gradient(*point)
    size = _largest(found.measured)
    assert _largest(_terms(plain)[1:]) > 1e6 * size and _largest(_terms(found)) < 10.0 * size
    whole = functools.reduce(optax.tree.add, _terms(found))
    assert _apart(found.measured, whole) <= tolerance("oracle", "float32") * size
    alike = by_gradient(*point[:2], jax.tree.map(lambda x, n: np.where(n, x, 2.0).astype("f"), point[2], dead))
    assert _largest(_terms(alike)[1:]) <= tolerance("oracle", "float32") * size


@pytest.mark.parametrize("name", ["rescale/gate", "norm_scale/bias"])
def test_adams_factors_make_its_step(name: str, x64: None) -> None:
    """Of any options, injected ones too, and its momentum is not quite horizontal."""
    case, (_, measure) = BY_NAME[name], _compiled(BY_NAME[name])
    options = dict(b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4)
    tx = optax.chain(optax.clip(1e6), optax.inject_hyperparams(optax.scale_by_adam)(**options))
    params, gradient, update = _params(case), _compile(jax.grad(case.loss)), _compile(tx.update)
    factors_of, state = _compile(functools.partial(go.measure.adam_factors, **options)), _compile(tx.init)(params)
    for _ in range(30):
        step, state = update(gradient(params), state, params)
        factors = factors_of(state)
        assert _apart(step, optax.tree.mul(*factors)) <= tolerance("optax") * _largest(step)
        found = measure(params, factors.momentum, factors.preconditioner)
        params = _plus(params, step, -1e-3)
    assert _largest(found.residual) > 1e-2 and _largest(found.of_gradient) > 1e-4


@pytest.mark.parametrize("name", ["rescale/degree_2", "head_rotation/gqa", "rope_torus/half"])
def test_leakage_is_right_where_squares_are_no_float32(name: str) -> None:
    """Rates of weights of 1e-20 and 1e20 are those of weights of 1; terms are in proportion to gradients of 1e-25."""
    (gauge, measure), (params, gradient, d) = _compiled(BY_NAME[name], means="gradient"), _start(BY_NAME[name])

    def times(size: float, tree: Tree) -> Tree:
        return jax.tree.map(lambda x: np.float32(size * x), tree)

    @_compile
    def rates(point: Tree, step: Tree, size: float) -> tuple[Tree, Tree]:
        def slope(p: Tree) -> Tree:  # of a loss that has one value for the weights of every size
            return optax.tree.scale(size, jax.grad(BY_NAME[name].loss)(optax.tree.scale(1.0 / size, p)))

        return go.measure.step_leakage(gauge, point, step).rate, go.measure.second_order_leakage(
            slope, lambda p, g: jax.tree.map(lambda x, w: x * (1.0 + w / size), g, p), point, gauge).hessian

    usual = rates(times(1.0, params), times(1.0, d), 1.0)
    for size in (1e-20, 1e20):
        for one, other in zip(rates(times(size, params), times(size, d), size), usual, strict=True):
            assert _apart(one, other) <= 1e-3 * _largest(other)
    found, usual = (measure(times(1.0, params), times(size, gradient), d) for size in (1e-25, 1.0))
    for one, other in zip(found, usual, strict=True):
        assert _apart(times(1e25, one), other) <= 1e-3 * _largest(usual[:-1])


# Second order -------------------------------------------------------------------------------------


def _second_order(grad_fn: Any, precondition: Any, params: Tree, gauge: go.Gauge) -> Any:
    return _compile(lambda p: go.measure.second_order_leakage(grad_fn, precondition, p, gauge))(params)


@pytest.mark.parametrize("name", SMOOTH)
def test_second_order_is_the_gap_between_a_step_and_two_of_half_its_size(name: str, x64: None) -> None:
    """Of an Adam three steps old whose second moment, in general position, sees the gradient change."""
    case = BY_NAME[name]
    gauge, params, grad_fn = _compiled(case)[0], _params(case), jax.grad(case.loss)
    nu = jax.tree.map(lambda x: 1e-3 * (0.1 + np.square(np.cos(5.0 * x))), params)
    state = optax.ScaleByAdamState(jnp.asarray(3, jnp.int32), jax.tree.map(np.zeros_like, params), nu)
    precondition = go.measure.adam_precondition(state, grad_fn, b2=0.9)
    found = _second_order(grad_fn, precondition, params, gauge)
    assert _largest(found.derivative) > 1e-3 * _largest(found.hessian) > 0.0
    field = _compile(lambda p: precondition(p, grad_fn(p)))
    rate_of = _compile(lambda x: go.measure.step_leakage(gauge, params, x).rate)
    step = field(params)
    assert _apart(found.first, rate_of(step)) <= tolerance("kernel") * _largest(rate_of(step))
    second = optax.tree.add(found.hessian, found.derivative)
    scale, errors = 3e-4 / _largest(step), []
    for eta in (scale, scale / 2):
        half = _plus(params, step, -eta / 2)
        gap = rate_of(optax.tree.sub(_plus(half, field(half), -eta / 2), _plus(params, step, -eta)))
        errors.append(_largest(_plus(gap, second, -0.5 * eta**2)) / eta**2)
    assert errors[0] < 0.1 * _largest(second)
    assert 1.7 < errors[0] / errors[1] < 2.3  # of third order in η


def test_an_entry_that_never_had_a_gradient_has_a_derivative(x64: None) -> None:
    """√v has none at 0; a dead unit must not turn its neighbours into NaN."""
    gauge = go.rescale({"a": "_ channel"}, {"b": "channel _"})
    params = {"a": jnp.array([[1.0, 0.5]]), "b": jnp.array([[2.0], [1.0]])}
    grad_fn = jax.grad(lambda p: jnp.sum(jnp.square(p["a"][:, :1] @ p["b"][:1])))
    precondition = go.measure.adam_precondition(optax.adam(1.0).init(params), grad_fn)
    found = _second_order(grad_fn, precondition, params, gauge)
    assert np.all(np.isfinite(found.first[""] + found.hessian[""] + found.derivative[""]))
    assert found.crossover[""][1] == np.inf


def test_the_drift_of_whole_rates_is_no_whole_number() -> None:
    found = go.measure.predicted_drift({"": jnp.array([1, 2, 3])}, 0.5)[""]
    assert found.tolist() == [-0.5, -1.5, -3.0]


# Refusals -----------------------------------------------------------------------------------------

PARAMS, TWO_ADAMS = dict.fromkeys("qk", jnp.ones((6, 4))), optax.chain(optax.adam(0.1), optax.adam(0.1))
TURN, SCALE = go.head_rotation(dict.fromkeys("qk", "_ basis")), go.rescale({"q": "_ _"}, {"k": "_ _"})
FIXED = go.orbit.gauge_fix(optax.adam(0.1), SCALE)
STREAM, SAME = go.residual_rotation({"k": "basis _"}, {"q": "basis _"}), lambda *given: given[-1]
test_what_has_no_leakage_is_refused = each_refused({
    "a rotation for a scale": (lambda: go.measure.rescale_leakage(TURN, PARAMS, PARAMS, PARAMS), "head_rotation"),
    "a scale for a rotation": (lambda: go.measure.rotation_leakage(SCALE, PARAMS, PARAMS, PARAMS), "rescale"),
    "several gauges": (lambda: go.measure.step_leakage([SCALE, TURN], PARAMS, PARAMS), "rescale, head_rotation"),
    "a shift": (lambda: go.measure.step_leakage(go.logit_shift({"q": "_ vocab"}), PARAMS, PARAMS), "logit_shift"),
    "a rotation of the stream": (lambda: go.measure.rotation_leakage(STREAM, PARAMS, PARAMS, PARAMS), "rope_torus"),
    "its step": (lambda: go.measure.step_leakage(STREAM, PARAMS, PARAMS), "residual_rotation"),
    "its second order": (lambda: go.measure.second_order_leakage(SAME, SAME, PARAMS, STREAM), "residual_rotation"),
    "a loss for its gradient": (
        lambda: go.measure.second_order_leakage(lambda p: jnp.sum(p["q"]), SAME, PARAMS, TURN), "no update for 'k'"),
    "a gradient of one leaf": (
        lambda: go.measure.second_order_leakage(lambda p: {"k": p["k"]}, SAME, PARAMS, TURN), "no update for 'q'"),
    "other means": (lambda: go.measure.rescale_leakage(SCALE, PARAMS, PARAMS, PARAMS, means="rms"), "one of 'entries'"),
    "points that are trees": (
        lambda: go.measure.leakage_along(SAME, [PARAMS]), "no tuple of arguments"),  # type: ignore[list-item]
    "a dict of points": (lambda: go.measure.leakage_along(SAME, {"a": (PARAMS,)}), "no tuple of arguments"),
    "no trajectory": (lambda: go.measure.leakage_along(SAME, 3), "no tuple of arguments"),  # type: ignore[arg-type]
    "no measure": (lambda: go.measure.leakage_along(None, [(PARAMS,)]), "no function"),  # type: ignore[arg-type]
    "no gradient": (
        lambda: go.measure.second_order_leakage(PARAMS, SAME, PARAMS, TURN), "no function"),  # type: ignore[arg-type]
    "rates that are names": (lambda: go.measure.predicted_drift({"": jnp.ones(3)}, ["a"]), "no numbers"),  # type: ignore[arg-type]
    "no points": (lambda: go.measure.leakage_along(lambda: None, []), "no points"),
    "four rates for three": (lambda: go.measure.predicted_drift({"": jnp.ones((3, 2))}, jnp.ones(4)), "one per step"),
    "a schedule": (
        lambda: go.measure.predicted_drift({"": jnp.ones(3)}, SAME), "call a schedule first"),  # type: ignore[arg-type]
    "no Adam": (lambda: go.measure.adam_factors(optax.sgd(0.1).init(PARAMS)), "0 Adam states"),
    "no Adam to precondition": (lambda: go.measure.adam_precondition((), lambda p: p), "0 Adam states"),
    "codes": (lambda: go.measure.adam_factors(
        go.links.compress_second_moments(optax.adam(0.1), "uint8").init(PARAMS)), "CompressedState"),
    "two Adams": (lambda: go.measure.adam_factors(TWO_ADAMS.init(PARAMS)), "2 Adam states"),
    "a decay of 1": (lambda: go.measure.adam_factors(optax.adam(0.1).init(PARAMS), b2=1.0), "b2=1.0"),
    "a masked Adam": (
        lambda: go.measure.adam_precondition(
            optax.masked(optax.adam(0.1), dict.fromkeys(PARAMS, False)).init(PARAMS), SAME), "an Adam that does not"),
    "a negative eps": (lambda: go.measure.adam_precondition(optax.adam(0.1).init(PARAMS), SAME, eps=-1.0), "eps=-1.0"),
    "before a step": (lambda: go.measure.adam_factors(optax.adam(0.1).init(PARAMS)), "the state that update returns"),
    "inside quotient": (lambda: go.measure.adam_factors(go.quotient_adamw(0.1, SCALE).init(PARAMS)), "a QuotientState"),
    "inside a fix": (lambda: go.measure.adam_precondition(FIXED.init(PARAMS), SAME), "a GaugeFixState"),
    "DDC's framed moments": (lambda: go.measure.adam_factors(go.scale_by_ddc(TURN).init(PARAMS)), "step_leakage"),
})
