"""Leakage: closed forms against explicit orbit tangents, second order against a flow, sums against measured drift."""

import functools
import re
from collections.abc import Callable, Iterator
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


def _leakage(gauge: go.Gauge, *point: Tree, **options: Any) -> Any:
    """Both lemmas under one name."""
    lemma = go.measure.rotation_leakage if gauge.name in ("head_rotation", "rope_torus") else go.measure.rescale_leakage
    return lemma(gauge, *point, **options)


@functools.cache
def _compiled(case: GaugeCase) -> tuple[go.Gauge, Callable[..., Any]]:
    """The gauge, and its leakage."""
    (gauge,) = case.gauges()
    return gauge, _compile(lambda *point: _leakage(gauge, *point))


@functools.cache
def _gradient(case: GaugeCase) -> Callable[[Tree], Tree]:
    return _compile(jax.grad(case.loss))


def _params(case: GaugeCase, seed: int = 0) -> Tree:
    return jax.tree.map(np.asarray, case.params(jax.random.key(seed)))


def _start(case: GaugeCase, seed: int = 0) -> tuple[Tree, Tree, Tree]:
    """A point, the gradient there, a random positive preconditioner."""
    params, generator = _params(case, seed), np.random.default_rng(seed)
    preconditioner = jax.tree.map(lambda x: np.exp(generator.normal(size=x.shape)), params)
    return params, _gradient(case)(params), preconditioner


def _times(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(lambda x, y: x * y, a, b)


def _scaled(tree: Tree, factor: float) -> Tree:
    return jax.tree.map(lambda x: factor * x, tree)


def _plus(a: Tree, b: Tree, factor: float = 1.0) -> Tree:
    return jax.tree.map(lambda x, y: x + factor * y, a, b)


def _largest(tree: Tree) -> float:
    return max(float(np.max(np.abs(x))) for x in jax.tree.leaves(tree))


def _per_tensor(params: Tree) -> Tree:
    """A preconditioner of one number per leaf, 1, 2, 3, …"""
    leaves, treedef = jax.tree.flatten(params)
    return treedef.unflatten([np.full_like(x, 1.0 + k) for k, x in enumerate(leaves)])


def _ravel(tree: Tree) -> np.ndarray:
    """In the oracle's order, `ravel_pytree`'s."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def _terms(found: Any) -> Tree:
    return _plus(_plus(found.of_gradient, found.per_tensor), found.residual)


def _flat(gauge: go.Gauge, pairing: Tree) -> np.ndarray:
    """A pairing in the oracle's coordinates: of a skew matrix, every entry above the diagonal counts twice."""
    arrays = [np.asarray(x) for x in jax.tree.leaves(pairing)]
    if gauge.name == "head_rotation":
        arrays = [2.0 * x[..., *np.triu_indices(x.shape[-1], 1)] for x in arrays]
    return np.concatenate([x.reshape(-1) for x in arrays])


# First order: the lemmas --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALES + ROTATIONS)
def test_measured_is_the_pairing_with_explicit_orbit_tangents(name: str, x64: None) -> None:
    gauge, measure = _compiled(BY_NAME[name])
    params, gradient, preconditioner = _start(BY_NAME[name])
    oracle = oracles.dense(gauge, params)
    step = _ravel(_times(preconditioner, gradient))
    found = measure(params, gradient, preconditioner)
    expected, size = oracle.tangents.T @ step, np.max(np.abs(oracle.tangents.T) @ np.abs(step))
    assert np.max(np.abs(_flat(gauge, found.measured) - expected)) <= tolerance("oracle") * size
    assert np.max(np.abs(expected)) > 1e-3 * size
    rate = np.linalg.lstsq(oracle.tangents, step, rcond=None)[0]  # the generator of the projection
    scale = 2.0 if gauge.name == "head_rotation" else 1.0
    assert np.max(np.abs(_flat(gauge, found.rate) - scale * rate)) <= tolerance("oracle") * np.max(np.abs(rate))


@pytest.mark.parametrize("name", SCALES + ROTATIONS)
def test_measured_is_the_sum_of_its_terms(name: str, x64: None) -> None:
    """For any gradient; of an invariant loss the gradient adds nothing of its own."""
    _, measure = _compiled(BY_NAME[name])
    for seed in range(4):
        params, gradient, preconditioner = _start(BY_NAME[name], seed)
        anything = jax.tree.map(lambda x: np.cos(7.0 * x), params)
        found = measure(params, gradient, preconditioner)
        size = _largest([found.per_tensor, found.residual])
        assert _largest(_plus(found.measured, _terms(found), -1.0)) <= tolerance("kernel") * size
        assert _largest(found.of_gradient) <= tolerance("kernel") * size
        assert _largest(found.residual) > 1e-3 * size
        vertical = measure(params, anything, preconditioner)
        size = _largest([vertical.of_gradient, vertical.per_tensor, vertical.residual])
        assert _largest(_plus(vertical.measured, _terms(vertical), -1.0)) <= tolerance("kernel") * size
        assert _largest(vertical.of_gradient) > 1e-3 * size


@pytest.mark.parametrize("name", SCALES + ROTATIONS)
def test_each_layer_of_the_preconditioner_has_its_term(name: str, x64: None) -> None:
    _, plain = _compiled(BY_NAME[name])
    params, gradient, preconditioner = _start(BY_NAME[name])
    size = _largest(plain(params, gradient, preconditioner).measured)

    sgd = plain(params, gradient, jax.tree.map(np.ones_like, params))
    assert _largest(sgd) <= tolerance("kernel") * size

    found = plain(params, gradient, _per_tensor(params))
    assert _largest(found.residual) <= tolerance("kernel") * size
    assert _largest(found.per_tensor) > 1e-3 * size
    assert _largest(_plus(found.measured, found.per_tensor, -1.0)) <= tolerance("kernel") * size


def test_two_blocks_give_the_lemmas_own_formulas(x64: None) -> None:
    generator = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return generator.normal(size=shape)

    up, down, slope_up, slope_down = draw(6, 5), draw(5, 3), draw(6, 5), draw(5, 3)
    excess = (up * slope_up).sum(0) - 2.0 * (down * slope_down).sum(1)
    slope_up = slope_up - up * excess / (up**2).sum(0)  # horizontal for degree 2
    d_up, d_down = np.exp(draw(6, 5)), np.exp(draw(5, 3))
    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"}, degree=2)
    trees = ({"up": a, "down": b} for a, b in ((up, down), (slope_up, slope_down), (d_up, d_down)))
    found = _compile(functools.partial(go.measure.rescale_leakage, gauge))(*trees)
    expected = (d_up.mean(0) - d_down.mean(1)) * (up * slope_up).sum(0)
    assert _largest(found.per_tensor[""] - expected) <= 10 * tolerance("kernel")
    covariance = [np.cov((w * g)[:, 2], d[:, 2], bias=True)[0, 1] * len(w) for w, g, d in (
        (up, slope_up, d_up), (down.T, slope_down.T, d_down.T))]
    assert abs(float(found.residual[""][2]) - (covariance[0] - 2.0 * covariance[1])) <= 10 * tolerance("kernel")


def test_rotation_residual_is_a_covariance_beside_the_columns_means(x64: None) -> None:
    """Lemma 10 leaves the columns' means out."""
    gauge = go.head_rotation({"q": "_ basis", "k": "_ basis"})
    generator = np.random.default_rng(1)
    params, gradient, d = ({"q": generator.normal(size=(6, 4)), "k": generator.normal(size=(7, 4))} for _ in range(3))
    measure = _compile(functools.partial(go.measure.rotation_leakage, gauge))
    found = measure(params, gradient, d)
    lemma = np.zeros((4, 4))
    for w, g, x in ((params[n], gradient[n], d[n]) for n in ("q", "k")):
        for i, j in np.ndindex(4, 4):
            lemma[i, j] += len(w) * np.cov(w[:, i] * g[:, j], x[:, j], bias=True)[0, 1]
    lemma = 0.5 * (lemma - lemma.T)
    assert _largest(found.covariance[""] - lemma) <= 10 * tolerance("kernel")
    assert _largest(found.residual[""] - lemma) > 0.1
    no_columns = {n: x - x.mean(0) + 3.0 for n, x in d.items()}
    found = measure(params, gradient, no_columns)
    assert _largest(_plus(found.residual, found.covariance, -1.0)) <= 10 * tolerance("kernel")


@pytest.mark.parametrize("name", ROTATIONS)
def test_the_bound_holds_and_is_reached_by_preconditioners_per_tensor(name: str, x64: None) -> None:
    _, plain = _compiled(BY_NAME[name])
    torus = name.startswith("rope_torus")

    def size(x: np.ndarray) -> np.ndarray:
        return np.abs(x) if torus else np.linalg.norm(x, axis=(-2, -1))

    for seed in range(4):
        params, gradient, preconditioner = _start(BY_NAME[name], seed)
        found = plain(params, gradient, preconditioner)
        above = 1.0 + tolerance("kernel")
        assert all(np.all(found.bound[key] * above >= size(x)) for key, x in found.measured.items())
        if len(jax.tree.leaves(params)) == 2 and not name.endswith("fused"):  # two blocks: the triangle is a line
            tight = plain(params, gradient, _per_tensor(params))
            gap = _plus(tight.bound, jax.tree.map(size, tight.measured), -1.0)
            assert _largest(gap) <= tolerance("kernel") * _largest(tight.bound)


@pytest.mark.parametrize("name", ["rescale/degree_2", "head_rotation/gqa"])
def test_entries_without_gradient_do_not_count_in_means_by_gradient(name: str) -> None:
    """Adam's D is 1/eps there. In float32, the terms of the plain means are rounding."""
    case = BY_NAME[name]
    gauge = case.gauges()[0]
    measure = _compile(lambda *point: _leakage(gauge, *point, means="gradient"))
    params = _params(case)
    dead = jax.tree.map(lambda x: np.arange(x.size).reshape(x.shape) % 3 == 0, params)
    generator = np.random.default_rng(0)
    gradient = jax.tree.map(lambda x, n: np.where(n, 0.0, generator.normal(size=x.shape)), params, dead)
    d = jax.tree.map(lambda x, n: np.where(n, 1e8, np.exp(generator.normal(size=x.shape))), params, dead)
    point = jax.tree.map(lambda x: x.astype(np.float32), (params, gradient, d))
    plain, found = _compiled(case)[1](*point), measure(*point)
    size = _largest(found.measured)
    assert _largest([plain.per_tensor, plain.residual]) > 1e6 * size
    assert _largest([found.of_gradient, found.per_tensor, found.residual]) < 10.0 * size
    assert _largest(_plus(found.measured, _terms(found), -1.0)) <= tolerance("oracle", "float32") * size
    alike = measure(*point[:2], jax.tree.map(lambda x, n: np.where(n, x, 2.0).astype("f"), point[2], dead))
    assert _largest([alike.per_tensor, alike.residual]) <= tolerance("oracle", "float32") * size


# Along a trajectory -------------------------------------------------------------------------------


def _trained(case: GaugeCase, tx: Any, rate: float, steps: int = 30) -> Iterator[tuple[Tree, Tree, Tree, Any, Tree]]:
    """(params, gradient, update, state after it, params after it) of every step; the update is before −rate."""
    params, gradient, update = _params(case), _gradient(case), _compile(tx.update)
    state = _compile(tx.init)(params)
    for _ in range(steps):
        g = gradient(params)
        u, state = update(g, state, params)
        after = _plus(params, u, -rate)
        yield params, g, u, state, after
        params = after


def _error_and_size(found: Tree, expected: Tree) -> tuple[float, float]:
    return _largest(_plus(found, expected, -1.0)), _largest(expected)


def _of_second_order(errors: list[tuple[float, float]]) -> None:
    """At rates r and r/2, prediction errors fall by four where the motion falls by two."""
    (error, size), (half_error, half_size) = errors
    print(f"relative error {error / size:.1e}, {half_error / half_size:.1e}; motion {size:.1e}")
    assert 1.8 < size / half_size < 2.2
    assert 2.5 < error / half_error < 5.5
    assert error < 0.05 * size


@pytest.mark.parametrize("name", ["rescale/gate", "norm_scale/bias"])
def test_leakage_predicts_the_imbalance_under_adam(name: str, x64: None) -> None:
    """½(‖up‖² − p·‖down‖²), which gradient flow conserves, moves by −lr·measured."""
    case = BY_NAME[name]
    gauge, measure = _compiled(case)
    factors_of = _compile(go.measure.adam_factors)
    twice = _compile(lambda p: go.measure.step_leakage(gauge, p, p).measured)
    errors = []
    for rate in (1e-3, 5e-4):
        run = list(_trained(case, optax.scale_by_adam(), rate))
        factors = [factors_of(state) for *_, state, _ in run]
        found = go.measure.leakage_along(
            measure, ((p, f.momentum, f.preconditioner) for (p, *_), f in zip(run, factors, strict=True))
        )
        assert jax.tree.leaves(found)[0].shape[0] == len(run)
        predicted = jax.tree.map(lambda x: x[-1], go.measure.predicted_drift(found.measured, jnp.full(len(run), rate)))
        change = _scaled(_plus(twice(run[-1][-1]), twice(run[0][0]), -1.0), 0.5)
        errors.append(_error_and_size(predicted, change))
    assert _largest(found.residual) > 1e-2 and _largest(found.of_gradient) > 1e-4  # momentum is not quite horizontal
    _of_second_order(errors)


# Second order -------------------------------------------------------------------------------------


def _flow(field: Callable[[Tree], Tree], params: Tree, time: float, steps: int = 8) -> Tree:
    """θ' = −field(θ), by Runge and Kutta's method of fourth order."""
    h = -time / steps
    for _ in range(steps):
        a = field(params)
        b = field(_plus(params, a, h / 2))
        c = field(_plus(params, b, h / 2))
        d = field(_plus(params, c, h))
        params = jax.tree.map(lambda p, a, b, c, d: p + h / 6 * (a + 2 * b + 2 * c + d), params, a, b, c, d)
    return params


def _adam_state(case: GaugeCase) -> Any:
    """A second moment in general position, three steps old."""
    params = _params(case)
    nu = jax.tree.map(lambda x: 1e-3 * (0.1 + np.square(np.cos(5.0 * x))), params)
    return optax.ScaleByAdamState(jnp.asarray(3, jnp.int32), jax.tree.map(np.zeros_like, params), nu)


def _second_order(grad_fn: Any, precondition: Any, params: Tree, gauge: go.Gauge) -> Any:
    return _compile(lambda p: go.measure.second_order_leakage(grad_fn, precondition, p, gauge))(params)


@pytest.mark.slow_rows("*-fixed")
@pytest.mark.parametrize("responds", [True, False], ids=["responds", "fixed"])
@pytest.mark.parametrize("name", SMOOTH)
def test_second_order_is_the_gap_between_step_and_flow(name: str, responds: bool, x64: None) -> None:
    case = BY_NAME[name]
    gauge = _compiled(case)[0]
    params, grad_fn = _params(case), jax.grad(case.loss)
    precondition = go.measure.adam_precondition(_adam_state(case), grad_fn, b2=0.9)
    if not responds:
        d = _compile(go.measure.adam_factors)(_adam_state(case)).preconditioner
        precondition = functools.partial(lambda d, params, gradient: _times(d, gradient), d)
    found = _second_order(grad_fn, precondition, params, gauge)
    assert _largest(found.hessian) > 0.0
    assert (_largest(found.derivative) > 1e-3 * _largest(found.hessian)) == responds

    field = _compile(lambda p: precondition(p, grad_fn(p)))
    rate_of = _compile(lambda x: go.measure.step_leakage(gauge, params, x).rate)
    first = rate_of(field(params))
    assert _largest(_plus(found.first, first, -1.0)) <= tolerance("kernel") * _largest(first)

    second = _plus(found.hessian, found.derivative)
    scale = 3e-4 / _largest(field(params))
    errors = []
    for eta in (scale, scale / 2):
        stepped, flowed = _plus(params, field(params), -eta), _flow(field, params, eta)
        gap = rate_of(_plus(stepped, flowed, -1.0))
        errors.append(_largest(_plus(gap, _scaled(second, -(eta**2)), -1.0)) / eta**2)
    print(f"error {errors[0] / _largest(second):.1e}, {errors[1] / _largest(second):.1e}")
    assert errors[0] < 0.2 * _largest(second)
    assert 1.7 < errors[0] / errors[1] < 2.3  # of third order in η

    whole = _plus(params, field(params), -eta)
    half = _plus(params, field(params), -eta / 2)
    halves = _plus(half, field(half), -eta / 2)
    gap = rate_of(_plus(halves, whole, -1.0))
    assert _largest(_plus(gap, _scaled(second, 0.5 * eta**2), -1.0)) < 0.1 * _largest(gap)


def test_an_entry_that_never_had_a_gradient_has_a_derivative(x64: None) -> None:
    """√v has none at 0; a dead unit must not turn its neighbours into NaN."""
    gauge = go.rescale({"a": "_ channel"}, {"b": "channel _"})
    params = {"a": jnp.array([[1.0, 0.5]]), "b": jnp.array([[2.0], [1.0]])}
    grad_fn = jax.grad(lambda p: jnp.sum(jnp.square(p["a"][:, :1] @ p["b"][:1])))
    precondition = go.measure.adam_precondition(optax.adam(1.0).init(params), grad_fn)
    found = _second_order(grad_fn, precondition, params, gauge)
    assert np.all(np.isfinite(found.first[""] + found.hessian[""] + found.derivative[""]))
    assert found.crossover[""][1] == np.inf


# Adam's factors, refusals -------------------------------------------------------------------------


def test_adams_factors_make_its_step(x64: None) -> None:
    case = BY_NAME["rescale/gate"]
    options = dict(b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4)
    tx = optax.chain(optax.clip(1e6), optax.inject_hyperparams(optax.scale_by_adam)(**options))
    factors_of = _compile(functools.partial(go.measure.adam_factors, **options))
    for *_, u, state, _ in _trained(case, tx, 1e-2, steps=3):
        factors = factors_of(state)
        assert _largest(_plus(u, _times(*factors), -1.0)) <= tolerance("optax") * _largest(u)


FOUR_PARTS = re.compile(r"\w+: [^\n]+\n  found:    \S[^\n]*\n  expected: \S[^\n]*\n  remedy:   \S[^\n]*")
PARAMS = {"q": jnp.ones((6, 4)), "k": jnp.ones((6, 4))}
TURN = go.head_rotation({"q": "_ basis", "k": "_ basis"})
SCALE = go.rescale({"q": "_ _"}, {"k": "_ _"})
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a rotation for a scale": (lambda: go.measure.rescale_leakage(TURN, PARAMS, PARAMS, PARAMS), "head_rotation"),
    "a scale for a rotation": (lambda: go.measure.rotation_leakage(SCALE, PARAMS, PARAMS, PARAMS), "rescale"),
    "several gauges": (lambda: go.measure.step_leakage([SCALE, TURN], PARAMS, PARAMS), "rescale, head_rotation"),
    "a shift": (lambda: go.measure.step_leakage(go.logit_shift({"q": "_ vocab"}), PARAMS, PARAMS), "logit_shift"),
    "other means": (lambda: go.measure.rescale_leakage(SCALE, PARAMS, PARAMS, PARAMS, means="rms"), "one of 'entries'"),
    "no points": (lambda: go.measure.leakage_along(lambda: None, []), "no points"),
    "no Adam": (lambda: go.measure.adam_factors(optax.sgd(0.1).init(PARAMS)), "0 Adam states"),
    "no Adam to precondition": (lambda: go.measure.adam_precondition((), lambda p: p), "0 Adam states"),
    "two Adams": (
        lambda: go.measure.adam_factors(optax.chain(optax.adam(0.1), optax.adam(0.1)).init(PARAMS)),
        "2 Adam states",
    ),
    "DDC, whose moments live in a frame": (
        lambda: go.measure.adam_factors(jax.eval_shape(go.scale_by_ddc(TURN).init, PARAMS)),
        "step_leakage",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_leakage_is_refused(name: str) -> None:
    call, said = REFUSED[name]
    with pytest.raises(ValueError) as error:
        call()
    assert FOUR_PARTS.fullmatch(str(error.value)), str(error.value)
    assert said in str(error.value)
