"""Spectra of matrices, against NumPy and against what is known of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from tests.refusals import each_refused
from tests.tolerances import tolerance

RNG = np.random.default_rng(0)


def _with_spectrum(sizes: Any, rows: int, columns: int) -> np.ndarray:
    left, right = (np.linalg.qr(RNG.normal(size=(n, len(sizes))))[0] for n in (rows, columns))
    return (left * sizes) @ right.T


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
def test_effective_rank_is_the_exponential_of_the_entropy(x64: None, shape: tuple[int, int]) -> None:
    sizes = np.array([4.0, 2.0, 1.0, 1.0, 0.5])
    p, matrix = sizes / np.sum(sizes), jnp.asarray(_with_spectrum(sizes, *shape))
    assert go.measure.effective_rank(matrix) == pytest.approx(np.exp(-np.sum(p * np.log(p))), abs=1e-10)
    assert go.measure.smallest_singular_value(matrix) == pytest.approx(0.5, abs=1e-10)


def test_equal_sizes_count_in_full_and_zeros_not_at_all(x64: None) -> None:
    """And what is not finite has no rank."""
    stack = jnp.stack([jnp.asarray(_with_spectrum([2.0] * 3, 6, 6)), jnp.zeros((6, 6)), jnp.eye(6).at[0].set(jnp.nan)])
    np.testing.assert_allclose(jax.jit(go.measure.effective_rank)(stack), [3.0, 0.0, np.nan], atol=1e-6)


def test_dead_units_are_off_for_all_inputs() -> None:
    pre = jnp.array([[[1.0, -1.0, 0.0], [2.0, -1.0, 0.0]], [[1.0, 1e-3, 0.0], [3.0, -2.0, -1.0]]])
    assert go.measure.dead_units(pre).tolist() == [False, False, True]


def test_the_gauge_fraction_of_a_head_is_its_mean_over_classes(x64: None) -> None:
    kernel = jnp.asarray(RNG.normal(size=(6, 5)) + 1.0)
    params, gauge = {"kernel": kernel, "other": jnp.ones(2)}, go.logit_shift({"kernel": "_ vocab"})
    mean = np.mean(kernel, 1, keepdims=True)
    expected = {"kernel": float(5 * np.sum(mean**2) / np.sum(np.square(kernel)))}
    assert go.measure.gauge_fraction(params, gauge) == pytest.approx(expected, rel=tolerance("optax"))
    assert go.measure.gauge_fraction(params, gauge, params | {"kernel": kernel - mean})["kernel"] < 1e-25


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_leaves_whose_squares_leave_the_range_of_float32_have_the_same_shares(scale: float) -> None:
    leaf, gauge = jnp.array([[3.0, 1.0], [1.0, 1.0]]), go.logit_shift({"head": "_ vocab"})
    assert go.measure.axis_alignment(scale * leaf) == pytest.approx(0.7)
    assert go.measure.effective_rank(3e7 * scale * jnp.eye(12)) == pytest.approx(12)  # 12 · 3e37 is no float32 either
    assert go.measure.gauge_fraction({"head": leaf}, gauge, {"head": scale * leaf})["head"] == pytest.approx(10 / 12)


def test_a_leaf_of_a_gauge_on_two_can_have_a_share_above_one() -> None:
    gauge = go.embedding_shift({"tokens": "_ channel"}, {"positions": "_ channel"})
    shares = go.measure.gauge_fraction({"tokens": jnp.array([[0.1], [-0.1]]), "positions": jnp.ones((4, 1))}, gauge)
    assert shares["tokens"] > 10.0


test_a_vector_is_refused = each_refused([
    (lambda: go.measure.effective_rank(jnp.ones(4)), "(?s)effective_rank.*no matrix"),
    (lambda: go.measure.smallest_singular_value(jnp.ones(4)), "(?s)smallest_singular_value.*no matrix"),
    (lambda: go.measure.dead_units(jnp.full((2, 1), jnp.nan)), "pre-activations that are no numbers"),
    (lambda: go.measure.dead_units(jnp.ones(4)), "(?s)dead_units.*stack the pre-activations"),
    (lambda: go.measure.gauge_fraction({"a": jnp.ones(3)}, go.key_bias({"a": "_"}), {"a": 1.0}), "shape for 'a'"),
    *((functools.partial(getattr(go.measure, name), "a"), f"{name}: no numbers in")
      for name in ("effective_rank", "dead_units", "axis_alignment")),
    (lambda: go.measure.axis_alignment(jnp.eye(3, 2)), "a direction of length zero"),
])
