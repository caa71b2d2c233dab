"""The local learning coefficient: on deep linear networks, where it is known, and for twins."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from tests.quick import jit

Tree = Any
KEY = jax.random.key(0)


def coefficient(widths: Sequence[int], rank: int) -> float:
    """λ of a deep linear network whose true product has this rank: Aoyagi 2024; Lau et al. 2023, Theorem 4.5."""
    excess = [width - rank for width in widths]
    for count in range(2, len(widths) + 1):
        for chosen in itertools.combinations(range(len(widths)), count):
            inside = [excess[k] for k in chosen]
            outside = [excess[k] for k in range(len(widths)) if k not in chosen]
            layers, total = count - 1, sum(inside)
            largest, next_one = max(inside), min(outside, default=math.inf)
            if largest < next_one and total >= layers * largest and total < layers * next_one:
                rest = total - (math.ceil(total / layers) - 1) * layers
                pairs = sum(x * y for x, y in itertools.combinations(inside, 2))
                regular = (rank * (widths[0] + widths[-1]) - rank**2) / 2
                singular = rest * (layers - rest) / (4 * layers) - (layers - 1) / (4 * layers) * total**2 + pairs / 2
                return regular + singular
    raise AssertionError(widths)


def test_the_formula_is_right_where_λ_is_known_without_it() -> None:
    assert coefficient((1, 1, 1), 0) == 0.5  # (a·b)²
    assert coefficient((3, 1, 3), 0) == 1.5  # ‖a‖²·‖b‖²
    assert coefficient((3, 2, 3), 2) == 4.0  # matrices of rank 2: a manifold of 8 dimensions
    assert coefficient((4, 5, 3), 3) == 6.0  # all 4 × 3 matrices


def _minimum(widths: Sequence[int], rank: int) -> Tree:
    """Weights of rank `rank` each, the most singular ones of their product; no channel is zero."""
    rng = np.random.default_rng(0)
    turns = [np.eye(n) if k in (0, len(widths) - 1) else _orthogonal(rng, n) for k, n in enumerate(widths)]
    cores = [np.eye(a, b) * (np.arange(b) < rank) for a, b in itertools.pairwise(widths)]
    return {f"w{k}": jnp.asarray(turns[k] @ core @ turns[k + 1].T, float) for k, core in enumerate(cores)}


def _orthogonal(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def _product(p: Tree) -> jax.Array:
    return functools.reduce(jnp.matmul, [p[f"w{k}"] for k in range(len(p))])


def _loss(p: Tree, target: jax.Array) -> jax.Array:
    """The KL divergence from a teacher, for white inputs and unit noise."""
    return 0.5 * jnp.sum(jnp.square(_product(p) - target))


def _gauges(widths: Sequence[int]) -> list[go.Gauge]:
    return [go.rescale({f"w{k}": "_ channel"}, {f"w{k + 1}": "channel _"}) for k in range(len(widths) - 2)]


SAMPLED = dict(n_beta=3e4, lr=1.5e-6, localization=10.0)


@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "invariant"])
@pytest.mark.parametrize(("widths", "rank"), [((4, 3, 4), 1), ((4, 4, 4), 2), ((5, 3, 3, 5), 2)])
def test_deep_linear_networks_have_their_coefficient(
    x64: None, widths: tuple[int, ...], rank: int, invariant: bool
) -> None:
    params = _minimum(widths, rank)
    dimensions = sum(x.size for x in params.values())
    expected = coefficient(widths, rank)
    assert expected < 0.55 * dimensions / 2
    found = go.measure.llc(
        _loss, params, [_product(params)], KEY, _gauges(widths) if invariant else None, **SAMPLED,
        num_chains=8, num_burnin_steps=10_000, num_draws=2_000, num_steps_bw_draws=20,
    )
    assert float(found.mean) == pytest.approx(expected, rel=0.1)
    assert found.per_chain.shape == (8,) and found.losses.shape == (8, 2000)
    assert float(found.std) == pytest.approx(np.std(found.per_chain, ddof=1)) and found.std < 0.1 * expected
    assert found.initial_loss < 1e-25


@pytest.mark.parametrize("widths", [(4, 3, 4), (5, 3, 3, 5)])
def test_twins_have_one_coefficient_in_the_invariant_form_alone(x64: None, widths: tuple[int, ...]) -> None:
    params, gauges = _minimum(widths, 2), _gauges(widths)
    group = go.product(gauges)
    twin = jit(group.act)(group.sample(jax.random.key(3), params), params)
    counts = dict(num_chains=2, num_draws=300, num_burnin_steps=500, num_steps_bw_draws=5)

    def both(given: Any) -> Any:
        return [go.measure.llc(_loss, p, [_product(params)], KEY, given, **SAMPLED, **counts) for p in (params, twin)]

    one, other = both(gauges)
    np.testing.assert_allclose(other.per_chain, one.per_chain, rtol=1e-6)
    one, other = both(None)
    assert np.min(np.abs(other.per_chain / one.per_chain - 1.0)) > 1e-4


def test_twins_by_rotations_of_heads_have_one_coefficient(x64: None) -> None:
    params = _minimum((4, 3, 4), 3)
    gauges = [go.head_linear({"w0": "_ basis"}, {"w1": "basis _"})]
    twin = gauges[0].act(gauges[0].sample(jax.random.key(3), params), params)
    found = [
        go.measure.llc(_loss, p, [_product(params)], KEY, gauges, **SAMPLED, num_draws=200, num_steps_bw_draws=5)
        for p in (params, twin)
    ]
    np.testing.assert_allclose(found[1].per_chain, found[0].per_chain, rtol=1e-6)


def test_a_regular_minimum_has_half_its_dimensions_less_what_the_pull_takes(x64: None) -> None:
    """Gaussians: the mean of nβ·h·w²/2 is ½·nβ·h/(nβ·h + γ), up to the step size."""
    curvatures = jnp.array([1.0, 0.5, 0.1, 0.01])
    found = go.measure.llc(
        lambda p, x: 0.5 * jnp.sum(x * jnp.square(p["w"])), {"w": jnp.zeros(4)}, [curvatures], KEY,
        n_beta=1e3, lr=1e-4, localization=10.0, num_chains=16, num_draws=5000, num_burnin_steps=5000,
        num_steps_bw_draws=20,
    )
    expected = 0.5 * np.sum(1e3 * curvatures / (1e3 * curvatures + 10.0))
    assert float(found.mean) == pytest.approx(float(expected), rel=0.03)


def test_batches_are_drawn_at_random(x64: None) -> None:
    """Two batches whose mean has the minimum at zero, where neither alone has it."""
    batches = [jnp.array([0.1, -0.1]), jnp.array([-0.1, 0.1])]
    found = go.measure.llc(
        lambda p, x: 0.5 * jnp.sum(jnp.square(p["w"] - x)), {"w": jnp.zeros(2)}, batches, KEY,
        n_beta=100.0, lr=1e-3, num_chains=8, num_draws=5000, num_burnin_steps=1000,
    )
    assert float(found.initial_loss) == pytest.approx(0.01)
    assert float(found.mean) == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize(("batches", "options", "message"), [
    ([], {}, "one batch or more"),
    ([jnp.ones(2), jnp.ones(3)], {}, "different shapes"),
    ([jnp.ones(2)], {"num_draws": 0}, "num_draws=1"),
    ([jnp.ones(2)], {"num_chains": 0}, "num_chains=1"),
])
def test_messages(batches: list[jax.Array], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        go.measure.llc(
            lambda p, x: jnp.sum(p["w"] * x), {"w": jnp.ones(2)}, batches, KEY, n_beta=1.0, lr=1e-3, **options
        )
