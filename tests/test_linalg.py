"""The small-matrix kernels against dense float64: conditioning, degenerate spectra, both precisions."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gauge_optax import linalg
from tests import oracles
from tests.quick import jit
from tests.tolerances import tolerance

lyapunov = jit(linalg.lyapunov)
eigen = jit(linalg.symmetric_eigen)
by_products = jit(linalg.inverse_sqrt_by_products, static_argnames="least")
logarithm = jit(linalg.orthogonal_logarithm)


@pytest.fixture(params=(2, 3, 8, 32))
def size(request: pytest.FixtureRequest) -> int:
    return request.param


def run(kernel: Callable[..., Any], dtype: str, *matrices: np.ndarray) -> Any:
    """A kernel in this precision, its results in float64."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), kernel(*(jnp.asarray(x, dtype) for x in matrices)))


def orthogonal(generator: np.random.Generator, size: int) -> np.ndarray:
    return np.linalg.qr(generator.normal(size=(size, size)))[0]


def skew(x: np.ndarray) -> np.ndarray:
    return 0.5 * (x - np.swapaxes(x, -1, -2))


def spectra(size: int) -> dict[str, np.ndarray]:
    """By name: graded, one large, one small, per condition number; and every way to be degenerate."""
    found, rank_one = {}, np.r_[1.0, np.zeros(size - 1)]
    for c in (1.0, 1e3, 1e5):
        found[f"graded {c:.0e}"] = np.logspace(0, -np.log10(c), size)
        found[f"one large {c:.0e}"] = np.r_[1.0, np.full(size - 1, 1.0 / c)]
        found[f"one small {c:.0e}"] = np.r_[np.ones(size - 1), 1.0 / c]
    return found | {"rank one": rank_one, "hyperplane": 1.0 - rank_one[::-1], "zero": np.zeros(size)}


def points(size: int) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Names, eigenvalues, bases and rows W of all spectra, stacked; M = WᵀW."""
    generator, named = np.random.default_rng(size), spectra(size)
    bases = np.stack([orthogonal(generator, size) for _ in named])
    values = np.stack(list(named.values()))
    return list(named), values, bases, np.sqrt(values)[:, :, None] * np.swapaxes(bases, -1, -2)


def equations(w: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """M = WᵀW and K = skew(WᵀU), U in the span of W or anywhere."""
    noise, turned = np.random.default_rng(1).normal(size=w.shape), np.swapaxes(w, -1, -2)
    return turned @ w, {"span": skew(turned @ w @ noise), "anywhere": skew(turned @ noise)}


def norm(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=(-2, -1))


# The Lyapunov equation ----------------------------------------------------------------------------


def test_lyapunov_solves_the_equation(size: int, dtype: str) -> None:
    """The residual relative to 2K; in float32, of an arbitrary U, relative to all that is added up: M is rounded."""
    names, _, _, w = points(size)
    m, sides = equations(w)
    for kind, k in sides.items():
        a = run(lyapunov, dtype, m, k)
        added_up = 2.0 * norm(m) * norm(a) if (kind, dtype) == ("anywhere", "float32") else 0.0
        errors = norm(m @ a + a @ m - 2.0 * k) / np.maximum(added_up + 2.0 * norm(k), 1e-300)
        assert np.max(errors) <= tolerance("kernel", dtype), (kind, dict(zip(names, errors, strict=True)))
        assert np.max(np.abs(a + np.swapaxes(a, -1, -2))) <= tolerance("kernel", dtype) * np.max(np.abs(a))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_lyapunov_is_the_dense_solution(size: int, x64: None) -> None:
    """Zero on what the equation does not fix: pairs of null directions."""
    names, values, _, w = points(size)
    m, sides = equations(w)
    found = run(lyapunov, "float64", m, sides["anywhere"])
    for name, lam, gram, k, a in zip(names, values, m, sides["anywhere"], found, strict=True):
        expected, live = oracles.lyapunov(gram, k), lam[lam > 0]
        scale = max(1.0, float(np.linalg.norm(expected))) * (np.max(live) / np.min(live) if live.size else 1.0)
        assert np.linalg.norm(a - expected) <= tolerance("kernel") * scale, name
    assert not found[names.index("zero")].any()


# Eigenbases and roots -----------------------------------------------------------------------------


# The closed form of two at every quarter turn, and where there is no basis to find.
TURNS_OF_TWO = np.stack([np.diag(x) for x in ([2.0, 1.0], [1.0, 2.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0])] + [
    np.array([[1.0, x], [x, 1.0]]) for x in (0.5, -0.5, 1.0, 1e-30)])


def test_eigenbasis_rebuilds_the_matrix(size: int, dtype: str) -> None:
    """Columns are orthonormal, eigenvalues fall, and both together are the matrices."""
    m, limit = equations(points(size)[-1])[0], tolerance("kernel", dtype) * np.sqrt(size)
    if size == 2:
        m = np.concatenate([m, TURNS_OF_TWO])
    values, vectors = run(eigen, dtype, m)
    turned = np.swapaxes(vectors, -1, -2)
    assert np.max(norm((vectors * values[:, None, :]) @ turned - m)) <= limit
    assert np.max(norm(turned @ vectors - np.eye(size))) <= limit and (np.diff(values, axis=-1) <= 0).all()
    np.testing.assert_allclose(values, np.linalg.eigvalsh(m)[:, ::-1], atol=limit)


LEAST = 1e-8  # covers every condition number below, and reaches no rank-deficient spectrum


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6])
def test_products_give_the_inverse_root(condition: float, size: int, dtype: str) -> None:
    """To ε times the condition number: what rounding M to its precision already costs."""
    generator = np.random.default_rng(size)
    values = np.stack([np.logspace(0, -np.log10(condition), size), np.r_[1.0, np.full(size - 1, 1.0 / condition)]])
    bases = np.stack([orthogonal(generator, size) for _ in values])
    units = np.array([1e-8, 1e8])[:, None, None]  # a variance has any size
    m = units * (bases * values[:, None, :]) @ np.swapaxes(bases, -1, -2)
    expected = (bases / np.sqrt(values)[:, None, :]) @ np.swapaxes(bases, -1, -2) / np.sqrt(units)
    with jax.numpy_rank_promotion("raise"):
        found = run(functools.partial(by_products, least=LEAST), dtype, m)
    rounding = 10 * float(jnp.finfo(dtype).eps) * condition
    assert np.max(norm(found - expected) / norm(expected)) <= rounding


@pytest.mark.parametrize("name", ["rank one", "hyperplane", "zero"])
def test_products_stay_finite_on_a_singular_matrix(name: str, size: int, dtype: str) -> None:
    """Live directions get λ^{−1/2}, at d = 2 up to the root of a rounded determinant; dead ones some bounded number."""
    names, values, bases, w = points(size)
    at, least = names.index(name), 1e-3
    found = run(functools.partial(by_products, least=least), dtype, w[at].T @ w[at])
    live, turned = values[at] > 0, bases[at].T @ found @ bases[at]
    roots = values[at][live] ** -0.5
    np.testing.assert_allclose(np.diag(turned)[live], roots, rtol=float(jnp.finfo(dtype).eps) ** 0.5)
    assert np.linalg.norm(found, 2) <= 10.0 / np.sqrt(least) and found.any() == live.any()


@pytest.mark.parametrize("eigenvalue", [1.0, 1e-4, 1e-6, 1e-9, 0.0])
def test_a_root_and_its_inverse_are_inverse_of_any_matrix(eigenvalue: float, size: int, dtype: str) -> None:
    basis = orthogonal(np.random.default_rng(size), size)
    m = 25.0 * basis * np.r_[1.0, np.full(size - 1, eigenvalue)] @ basis.T
    root, inverse_root = (np.asarray(x, float) for x in jit(linalg.root_and_inverse, static_argnames="least")(
        jnp.asarray(m, dtype), least=1e-4))
    rounding = 1e3 * float(jnp.finfo(dtype).eps)
    assert norm(inverse_root @ root - np.eye(size)) <= rounding
    assert norm(root @ root - m) <= (1e-2 if eigenvalue < 1e-4 else rounding) * norm(m)


@pytest.mark.parametrize("step", [1e-6, 1e-2, 0.1, 10.0])
@pytest.mark.parametrize("rank", [1, 8])
def test_rotation_back_is_a_rotation_and_leaves_a_step_that_does_not_rotate(step: float, rank: int, dtype: str) -> None:
    draw = np.random.default_rng(0).normal
    w = draw(size=(5, 30, rank)) @ draw(size=(5, rank, 8))
    u = step * draw(size=(5, 30, 8))
    m, cross = (np.swapaxes(w, 1, 2) @ x for x in (w, u))
    back = run(linalg.rotation_back, dtype, m, cross)
    r, end = back + np.eye(8), m + cross
    assert np.max(np.abs(np.swapaxes(r, 1, 2) @ r - np.eye(8))) <= 30 * float(jnp.finfo(dtype).eps)
    if rank == 8 and step < 1.0:  # a larger step is turned back in part
        before, after = (norm(x - np.swapaxes(x, 1, 2)) for x in (end, end @ r))
        assert np.max(after / before) <= 2e-2  # of a head with a condition number of 6e3; 1e-4 of others


@pytest.mark.parametrize("least", [1e-2, 1e-8])
def test_products_need_their_iterations(least: float, x64: None) -> None:
    """`least` is what it says: exact above, less below."""
    m = np.diag([1.0, 1.0, 1e-5])
    smallest = run(functools.partial(by_products, least=least), "float64", m)[2, 2]
    assert (smallest > 0.99e5**0.5) == (least < 1e-5)


# Doors to LAPACK ----------------------------------------------------------------------------------


DOORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "svd": (linalg.svd, functools.partial(jnp.linalg.svd, full_matrices=False)),
    "qr": (linalg.qr, jnp.linalg.qr),
    "triangular_factor": (linalg.triangular_factor, functools.partial(jnp.linalg.qr, mode="r")),
    "inverse": (linalg.inverse, jnp.linalg.inv),
    "solve": (lambda m: linalg.solve(m, m[..., :2]), lambda m: jnp.linalg.solve(m, m[..., :2])),
    "symmetric_eigen": (lambda m: linalg.symmetric_eigen(linalg.symmetric(m)),
                        lambda m: tuple(x[..., ::-1] for x in jnp.linalg.eigh(linalg.symmetric(m)))),
    "matrix_exponential": (lambda m: linalg.matrix_exponential(linalg.skew(m)),
                           lambda m: jax.scipy.linalg.expm(linalg.skew(m))),
}


@pytest.mark.parametrize("door", DOORS)
def test_on_cpu_lapack_gets_one_matrix_at_a_time(door: str) -> None:
    """Two batched calls at once can wait for each other's threads forever."""
    batched = []
    for kernel in DOORS[door]:
        program = jax.jit(kernel).lower(jnp.ones((5, 4, 4))).as_text()
        calls = [line for line in program.splitlines() if "lapack_" in line]
        assert calls
        batched.append(any("tensor<5x4" in line for line in calls))
    assert batched == [False, True], "ours, and the plain one"


@pytest.mark.parametrize("door", DOORS)
def test_a_loop_over_matrices_is_compiled_once_outside_jit(door: str) -> None:
    m = 4.0 * jnp.eye(4) + jnp.ones((3, 4, 4))
    DOORS[door][0](m)
    with jax.no_tracing(True):
        DOORS[door][0](m)


@pytest.mark.slow_rows("matrix_exponential")
@pytest.mark.parametrize("door", DOORS)
def test_a_door_gives_maps_and_differentiates_what_one_batched_call_does(door: str) -> None:
    draw = np.random.default_rng(0).normal
    several = [jnp.asarray(draw(size=shape), jnp.float32) for shape in ((4, 4), (3, 4, 4), (2, 3, 4, 4), (0, 4, 4))]
    m = several[2] + several[2].swapaxes(-1, -2) + 8.0 * jnp.diag(jnp.array([1.0, -2.0, 3.0, -4.0]))

    def results(kernel: Callable[..., Any]) -> Any:
        def total(x: jax.Array) -> Any:
            return sum(jnp.sum(jnp.abs(y)) for y in jax.tree.leaves(kernel(x)))

        return jit(lambda m, several: (
            [tuple(kernel(x)) for x in several], (jax.vmap(kernel)(m), jax.grad(total)(m), jax.vmap(jax.grad(total))(m))
        ))(m, several)

    (exact, close), (same, near) = map(results, DOORS[door])
    jax.tree.map(np.testing.assert_array_equal, exact, same)
    for x, y in zip(jax.tree.leaves(close), jax.tree.leaves(near), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


# The logarithm, and what else there is ------------------------------------------------------------


def test_logarithm_undoes_the_exponential(size: int, dtype: str) -> None:
    """Up to angles near π, where one rounding turns into 1/(π − angle) of them."""
    angles = np.array([0.0, 1e-3, 0.3, 1.0, 2.0, 3.0])  # the largest of each generator
    drawn = skew(np.random.default_rng(size).normal(size=(len(angles), size, size)))
    a = drawn * (angles / np.linalg.norm(drawn, 2, axis=(-2, -1)))[:, None, None]
    found = run(logarithm, dtype, np.stack([oracles.exponential(x) for x in a]))
    assert (norm(found - a) <= tolerance("logarithm", dtype) * np.sqrt(size) / (np.pi - angles)).all()
    assert np.max(np.abs(found + np.swapaxes(found, -1, -2))) <= tolerance("kernel", dtype)


def test_division_by_zero_is_zero() -> None:
    found = linalg.safe_divide(jnp.array([1.0, 0.0, 3.0, jnp.inf]), jnp.array([0.0, 0.0, 2.0, 0.0]))
    assert found.tolist() == [0.0, 0.0, 1.5, 0.0]


@pytest.mark.parametrize("shape, full, count", [((9, 5), True, 5), ((4, 7), True, 7), ((4, 7), False, 4)])
def test_singular_vectors_where_the_fast_routine_fails(
    shape: tuple[int, int], full: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(0).normal(size=shape)
    expected = np.pad(np.linalg.svd(rows, compute_uv=False), (0, count - min(shape)))

    def check() -> None:
        sizes, right = linalg.singular_vectors(rows, full)
        np.testing.assert_allclose(sizes, expected, atol=1e-12)
        np.testing.assert_allclose(np.linalg.norm(rows @ right.T, axis=0), sizes, atol=1e-12)
        np.testing.assert_allclose(right @ right.T, np.eye(count), atol=1e-12)

    check()
    monkeypatch.setattr(np.linalg, "svd", mock.Mock(side_effect=np.linalg.LinAlgError("SVD did not converge")))
    check()
    with pytest.raises(ValueError, match="infs or NaNs"):
        linalg.singular_vectors(rows * np.nan)
