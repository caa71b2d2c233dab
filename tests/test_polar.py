"""The polar factor against the scalar map on numpy's SVD: every shape and spectrum, both precisions, all presets."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gauge_optax import linalg
from tests.programs import innermost, primitives
from tests.quick import jit
from tests.refusals import refused
from tests.tolerances import tolerance

PRESETS = tuple(linalg.NS_PRESETS)
FLOOR = 1e-2  # σ/‖M‖_F from which a preset keeps its interval
INTERVALS = {"standard": (0.68, 1.14), "dion": (0.977, 1.032), "polar_express": (0.876, 1.124), "sharp": (0.996, 1.004)}
ASKED = {name: (0.99, 1.01) if name == "sharp" else (0.65, 1.25) for name in PRESETS}
CONDITIONS = (1.0, 1e1, 1e2, 1e3, 1e6)
SHAPES = ((9, 5), (5, 9), (6, 6), (2, 2), (7, 2), (1, 1), (4, 1), (1, 4))
HEADS = ((768, 64), (64, 768), (64, 64), (16, 8))

polar = jit(linalg.polar, static_argnames=("ns_coeffs", "ns_steps", "eps"))


by_preset = pytest.mark.parametrize("preset", PRESETS)


def run(m: np.ndarray, dtype: str, preset: Any = "standard", **more: Any) -> Any:
    """The kernel in this precision, its result in float64."""
    return np.asarray(polar(jnp.asarray(m, dtype), ns_coeffs=preset, **more), np.float64)


def orthogonal(generator: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Orthonormal columns."""
    return np.linalg.qr(generator.normal(size=(rows, cols)))[0]


def matrices(shape: tuple[int, int], conditions: tuple[float, ...] = CONDITIONS) -> np.ndarray:
    """Of rank one, of half rank; graded, with one large or small value, with half of them small, per condition."""
    generator, rank = np.random.default_rng(sum(shape)), min(shape)
    half = rank - rank // 2
    spectra = [
        np.r_[1.0, np.zeros(rank - 1)], np.r_[np.ones(half), np.zeros(rank - half)],
        np.r_[np.logspace(0, -3, half), np.zeros(rank - half)],
    ]
    for c in conditions:
        spectra += [
            np.logspace(0, -np.log10(c), rank), np.r_[1.0, np.full(rank - 1, 1.0 / c)],
            np.r_[np.ones(rank - 1), 1.0 / c], np.r_[np.ones(half), np.full(rank - half, 1.0 / c)],
        ]
    left, right = orthogonal(generator, shape[0], rank), orthogonal(generator, shape[1], rank)
    return np.stack([left * values for values in spectra]) @ right.T


def norm(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=(-2, -1))


def scalar(values: Any, schedule: linalg.Schedule) -> np.ndarray:
    """What the steps make of singular values: σ ← a·σ + b·σ³ + c·σ⁵ + …"""
    for step in schedule:
        values = sum(c * values ** (2 * power + 1) for power, c in enumerate(step))
    return values


def oracle(m: np.ndarray, preset: Any, ns_steps: int = 5, eps: float = 1e-8) -> np.ndarray:
    """U·f(Σ/(‖M‖_F + eps))·Vᵀ."""
    u, values, vt = np.linalg.svd(m, full_matrices=False)
    values = values / np.maximum(norm(m) + eps, 1e-300)[..., None]
    return (u * scalar(values, linalg.ns_schedule(preset, ns_steps))[..., None, :]) @ vt


# The scalar map -----------------------------------------------------------------------------------


@by_preset
@pytest.mark.parametrize("shape", SHAPES)
def test_every_singular_value_goes_through_the_map(shape: tuple[int, int], preset: str, dtype: str) -> None:
    m = np.asarray(jnp.asarray(matrices(shape), dtype), np.float64)
    assert np.max(norm(run(m, dtype, preset) - oracle(m, preset))) <= tolerance("oracle", dtype)


@pytest.mark.parametrize("name", PRESETS)
def test_the_interval_of_the_map_is_what_is_documented(name: str) -> None:
    """Rounded outwards to two or three figures; what lies below 1e-2 rises from 0 and overshoots by at most 1.21."""
    schedule = linalg.ns_schedule(name, 5)
    above = scalar(np.linspace(FLOOR, 1.0, 200_001), schedule)
    below = scalar(np.logspace(-8, -2, 20_001), schedule)
    low, high = INTERVALS[name]
    assert low <= above.min() < low + 3e-3 and high - 6e-3 < above.max() <= high
    assert ASKED[name][0] <= low and high <= ASKED[name][1]
    assert below.min() > 0.0 and below.max() <= 1.21
    assert name != "sharp" or (np.diff(below) > 0).all()


# Equivariance -------------------------------------------------------------------------------------


# Sums of 128 terms round more, which the split product must see.
WIDE = [("standard", (128, 128)), ("polar_express", (128, 128))]


@pytest.mark.slow_rows("[!s]*-(768, 64)", "standard-(768, 64)", "standard-(128, 128)", "*-(64, 768)")
@pytest.mark.parametrize(("name", "shape"), [*((name, shape) for name in PRESETS for shape in HEADS), *WIDE], ids=str)
def test_equivariant_in_float32(name: str, shape: tuple[int, int]) -> None:
    """‖f(L·M·R) − L·f(M)·R‖/‖f(M)‖: all presets need a fresh Gram matrix for it, a steep one the split product too."""
    m, generator = matrices(shape, CONDITIONS[1:4]), np.random.default_rng(3)  # of condition 1 all four are one matrix
    left, right = orthogonal(generator, shape[0], shape[0]), orthogonal(generator, shape[1], shape[1])
    m = np.asarray(jnp.asarray(m, "float32"), np.float64)
    here, rotated, turned = np.split(run(np.concatenate([m, left @ m, m @ right]), "float32", name), 3)
    worst = np.maximum(norm(rotated - left @ here), norm(turned - here @ right)) / norm(here)
    assert np.max(worst) <= tolerance("oracle", "float32") and np.median(worst) <= 0.3 * tolerance("oracle", "float32")


# Cost, dtypes, scales, arguments ------------------------------------------------------------------


def products(shape: tuple[int, int], preset: str) -> tuple[int, int, set[str]]:
    """Products of d·h² and of h³, and the names of all other primitives."""
    jaxpr = jax.make_jaxpr(functools.partial(linalg.polar, ns_coeffs=preset))(jnp.ones(shape))
    dots = [x for x in innermost(jaxpr.jaxpr) if x.primitive.name == "dot_general"]
    large = sum(any(max(shape) in operand.aval.shape for operand in dot.invars) for dot in dots)
    return large, len(dots) - large, set(primitives(jaxpr.jaxpr))


@by_preset
@pytest.mark.parametrize("shape", [(768, 64), (64, 768)])
def test_costs_the_products_it_is_documented_to_cost(shape: tuple[int, int], preset: str) -> None:
    large, small, others = products(shape, preset)
    assert (large, small) == {"polar_express": (6, 14), "sharp": (4, 11)}.get(preset, (4, 14))
    assert not others & {"while", "scan", "eigh", "svd", "qr", "cholesky", "triangular_solve", "pure_callback", "cond"}
    with jax.enable_x64(True):
        assert products(shape, preset)[:2] == (2, 14 if preset == "sharp" else 17)


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_dtype_is_kept_and_computed_in_float32(narrow: str) -> None:
    m = jnp.asarray(matrices((9, 5)), narrow)
    found = polar(m)
    assert found.dtype == jnp.dtype(narrow)
    np.testing.assert_array_equal(found, polar(m.astype("float32")).astype(narrow))
    with jax.enable_x64(True):
        assert all(polar(jnp.ones((3, 2), dtype)).dtype == dtype for dtype in ("float32", "float64"))


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_zero_gives_zero_and_leaves_its_neighbours_alone(eps: float, dtype: str) -> None:
    m = matrices((9, 5))
    m[1] = 0.0
    found = run(m, dtype, eps=eps)
    assert np.isfinite(found).all() and not found[1].any()
    np.testing.assert_allclose(found[2], run(m[2], dtype, eps=eps), atol=tolerance("oracle", dtype))


@pytest.mark.parametrize(("coeffs", "ns_steps", "steps", "eps"), [
    ((3.4445, -4.7750, 2.0315), 3, 3, 1e-8), ((1.5, -0.5), 6, 6, 1e-8),
    ((2.1875, -2.1875, 1.3125, -0.3125), 2, 2, 1e-8), (((1.5, -0.5), (1.875, -1.25, 0.375)), 7, 2, 1e-8),
    ("standard", 2, 2, 1e-8), ("sharp", 9, 4, 1e-8), ("standard", 5, 5, 0.5),
])
def test_coefficients_and_what_is_added_to_the_norm_may_be_given(
    coeffs: Any, ns_steps: int, steps: int, eps: float, x64: None
) -> None:
    """Of a batch of any depth."""
    m = np.concatenate([matrices((6, 4)), matrices((6, 4))[:1]]).reshape(2, 3, 4, 6, 4)
    assert len(linalg.ns_schedule(coeffs, ns_steps)) == steps
    found = run(m, "float64", coeffs, ns_steps=ns_steps, eps=eps)
    np.testing.assert_allclose(found, oracle(m, coeffs, ns_steps, eps), atol=tolerance("oracle"))
    as_array = np.asarray(coeffs) if coeffs[0] == 1.5 else coeffs
    assert linalg.ns_schedule(as_array, ns_steps) == linalg.ns_schedule(coeffs, ns_steps)


@pytest.mark.parametrize(("coeffs", "ns_steps"), [
    ("sharper", 5), ("", 5), ((3.4, -4.7, 2.0), 0), ((), 5), (((3.4, -4.7, 2.0), (1.5,)), 5), ((1.5,), 5),
])
def test_bad_coefficients_are_refused(coeffs: Any, ns_steps: int) -> None:
    with refused("polar: bad ns_coeffs", f"found:    {coeffs!r}", *map(repr, PRESETS), "write ns_coeffs='standard'"):
        linalg.polar(jnp.ones((3, 2)), coeffs, ns_steps)
