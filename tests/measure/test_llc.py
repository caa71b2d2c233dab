"""The local learning coefficient: on deep linear networks, where it is known, and for twins."""

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.quick import jit
from tests.refusals import each_refused
from tests.twins import normal, trained

Tree = Any
KEY = jax.random.key(0)


def _minimum(widths: Sequence[int], rank: int) -> Tree:
    """Weights of rank `rank` each, the most singular ones of their product; no channel is zero."""
    draw = np.random.default_rng(0).normal
    turns = [np.eye(widths[0]), *(np.linalg.qr(draw(size=(n, n)))[0] for n in widths[1:-1]), np.eye(widths[-1])]
    cores = [np.eye(a, b) * (np.arange(b) < rank) for a, b in itertools.pairwise(widths)]
    return {f"w{k}": jnp.asarray(turns[k] @ core @ turns[k + 1].T, float) for k, core in enumerate(cores)}


def _product(p: Tree) -> jax.Array:
    return functools.reduce(jnp.matmul, [p[f"w{k}"] for k in range(len(p))])


def _loss(p: Tree, target: jax.Array) -> jax.Array:
    """The KL divergence from a teacher, for white inputs and unit noise."""
    return 0.5 * jnp.sum(jnp.square(_product(p) - target))


def _gauges(widths: Sequence[int]) -> list[go.Gauge]:
    return [go.rescale({f"w{k}": "_ channel"}, {f"w{k + 1}": "channel _"}) for k in range(len(widths) - 2)]


# λ of a true product of this rank, by Aoyagi 2024; Lau et al. 2023, Theorem 4.5.
KNOWN = [((4, 3, 4), 1, 6.0), ((4, 4, 4), 2, 7.5), ((5, 3, 3, 5), 2, 8.5)]
SAMPLED = dict[str, Any](n_beta=3e4, lr=1.5e-6, localization=10.0)
QUICK = dict[str, Any](n_beta=200.0, lr=1e-3, localization=1.0, num_chains=4, num_draws=300, num_burnin_steps=100)


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "invariant"])
@pytest.mark.parametrize(("widths", "rank", "expected"), KNOWN)
def test_deep_linear_networks_have_their_coefficient(
    x64: None, widths: tuple[int, ...], rank: int, expected: float, invariant: bool
) -> None:
    params, gauges = _minimum(widths, rank), _gauges(widths) if invariant else None
    counts = dict(num_chains=8, num_burnin_steps=10_000, num_draws=2_000, num_steps_bw_draws=20)
    found = go.measure.llc(_loss, params, [_product(params)], KEY, gauges, **SAMPLED, **counts)
    assert float(found.mean) == pytest.approx(expected, rel=0.1)
    assert found.per_chain.shape == (8,) and found.losses.shape == (8, 2000)
    assert float(found.std) == pytest.approx(np.std(found.per_chain, ddof=1)) and found.std < 0.1 * expected
    assert found.initial_loss < 1e-25 and found.at_minimum


@pytest.mark.slow_rows("widths1")
@pytest.mark.parametrize("widths", [(4, 3, 4), (5, 3, 3, 5)])
def test_twins_have_one_coefficient_in_the_invariant_form_alone(x64: None, widths: tuple[int, ...]) -> None:
    params, gauges = _minimum(widths, 2), _gauges(widths)
    group = go.product(gauges)
    twin = jit(group.act)(group.sample(jax.random.key(3), params), params)
    counts = dict(num_chains=2, num_draws=300, num_burnin_steps=500, num_steps_bw_draws=5)

    def both(given: Any) -> Any:
        return [go.measure.llc(_loss, p, [_product(params)], KEY, given, **SAMPLED, **counts) for p in (params, twin)]

    (one, other), (plain, plain_twin) = both(gauges), both(None)
    np.testing.assert_allclose(other.per_chain, one.per_chain, rtol=1e-6)
    assert np.min(np.abs(plain_twin.per_chain / plain.per_chain - 1.0)) > 1e-4


def test_a_regular_minimum_has_half_its_dimensions_less_what_the_pull_takes(x64: None) -> None:
    """Gaussians: the mean of nβ·h·w²/2 is ½·nβ·h/(nβ·h + γ), up to the step size."""
    curvatures = jnp.array([1.0, 0.5, 0.1, 0.01])
    options = dict[str, Any](n_beta=1e3, lr=1e-4, localization=10.0, num_chains=16, num_draws=5000)
    found = go.measure.llc(
        lambda p, x: 0.5 * jnp.sum(x * jnp.square(p["w"])), {"w": jnp.zeros(4)}, [curvatures], KEY, **options,
        num_burnin_steps=5000, num_steps_bw_draws=20,
    )
    expected = float(0.5 * np.sum(1e3 * curvatures / (1e3 * curvatures + 10.0)))
    assert float(found.mean) == pytest.approx(expected, rel=0.03)


def test_batches_are_drawn_at_random(x64: None) -> None:
    """Their mean has the minimum at zero, where no batch alone has it: on single batches the loss falls below."""
    batches = [jnp.array([0.1, -0.1]), jnp.array([-0.1, 0.1]), jnp.array([0.05, 0.05]), jnp.array([-0.05, -0.05])]
    found = go.measure.llc(
        lambda p, x: 0.5 * jnp.sum(jnp.square(p["w"] - x)), {"w": jnp.zeros(2)}, batches, KEY,
        n_beta=100.0, lr=1e-3, num_chains=8, num_draws=5000, num_burnin_steps=1000,
    )
    assert float(found.initial_loss) == pytest.approx(0.00625)
    assert float(found.mean) == pytest.approx(1.0, rel=0.15)
    assert bool(found.at_minimum) and float(jnp.min(found.losses)) < float(found.initial_loss)


def test_differences_between_batches_cancel(x64: None) -> None:
    """A number that a batch adds to the loss of all weights is no excess."""
    batches = [jnp.array(10.0), jnp.array(-10.0), jnp.array(3.0)]
    sampled = functools.partial(go.measure.llc, lambda p, x: jnp.sum(jnp.square(p["w"])) + x, {"w": jnp.zeros(2)})
    one, several = (sampled(given, KEY, **QUICK) for given in ([jnp.array(1.0)], batches))
    np.testing.assert_allclose(several.per_chain, one.per_chain, rtol=1e-8)
    assert several.at_minimum and float(jnp.std(several.losses)) > 1.0


ONES, GIVEN = jnp.ones(2), dict[str, Any](key=KEY, n_beta=1.0, lr=1e-3)
estimated: Any = functools.partial(go.measure.llc, lambda p, x: jnp.sum(p["w"] * x), {"w": ONES}, **GIVEN)
test_messages = each_refused([
    (lambda: estimated([]), "one batch or more"),
    (lambda: go.measure.llc(None, {"w": ONES}, [ONES], **GIVEN), "llc: loss is no function"),  # type: ignore[arg-type]
    (lambda: estimated({"x": ONES}), "batches is a dict"),
    (lambda: estimated([ONES, jnp.ones(3)]), "different shapes"),
    (lambda: estimated([ONES], num_draws=0), "num_draws=1"),
    (lambda: estimated([ONES], num_chains=0), "num_chains=1"),
    *((functools.partial(estimated, [ONES], **{name: size}), f"{name}={size}")
      for name, size in [("lr", -1e-3), ("lr", 0.0), ("lr", None), ("n_beta", -1.0), ("n_beta", np.nan),
                         ("localization", -1.0)]),
    (lambda: go.measure.llc(lambda p, x: p["w"], {"w": ONES}, [ONES], **GIVEN), "a loss that is no scalar"),
    (lambda: go.measure.llc(lambda p, x: jnp.zeros(()), {"w": 1j * ONES}, [ONES], **GIVEN), "a complex leaf 'w'"),
])


def test_half_precision_is_sampled_in_float32() -> None:
    """In bfloat16 itself, steps of this length round away at 100, and the number is 0."""
    sampled = functools.partial(go.measure.llc, lambda p, x: jnp.sum(jnp.square(p["w"] - 100.0 * x)), key=KEY)
    options, starts = QUICK | {"num_draws": 50}, [{"w": jnp.full(2, 100.0, dtype)} for dtype in ("bfloat16", "float32")]
    half, single = (float(sampled(start, [ONES], **options).mean) for start in starts)
    assert half == single > 0.0


@pytest.mark.parametrize("size", [np.float64, jnp.float64], ids=["numpy", "jax"])
@pytest.mark.parametrize("jitted", [False, True])
def test_sizes_in_float64_do_not_promote_the_point(x64: None, size: Any, jitted: bool) -> None:
    def estimate(n_beta: Any) -> jax.Array:
        loss = lambda p, x: jnp.sum(jnp.square(p["w"] * x))  # noqa: E731
        return go.measure.llc(loss, {"w": jnp.ones(2, "float32")}, [1.0], KEY, **QUICK | {"n_beta": n_beta}).mean

    assert np.isfinite((jax.jit(estimate) if jitted else estimate)(size(2.0)))


# Away from a minimum ------------------------------------------------------------------------------------


def _net_loss(p: Tree, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean(jnp.square(jnp.tanh(x @ p["w"]) * p.get("scale", 1.0) @ p["v"] - y))


def _net(seed: int) -> Tree:
    return normal(seed, {"w": (3, 4), "v": (4,)})


@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "invariant"])
def test_a_teacher_is_at_a_minimum_and_a_net_in_training_is_not(x64: None, batches: int, invariant: bool) -> None:
    x, teacher = normal(0, {"x": (64, 3)})["x"], _net(1)
    y = jnp.tanh(x @ teacher["w"]) @ teacher["v"]
    parts = list(zip(jnp.split(x, batches), jnp.split(y, batches), strict=True))
    gauges = [go.rescale({"scale": "_ channel"}, {"v": "channel"})] if invariant else None
    more = {"scale": jnp.ones((1, 4))} if invariant else {}
    later, _ = trained(optax.sgd(0.05), lambda p: _net_loss(p, (x, y)), _net(2), 100)
    points = (teacher, _net(2), later)
    found = [go.measure.llc(_net_loss, point | more, parts, KEY, gauges, **QUICK) for point in points]
    assert [bool(x.at_minimum) for x in found] == [True, False, False]
    assert found[2].at_minimum.shape == () and found[2].at_minimum.dtype == bool
    assert all(x.lowest_loss <= x.initial_loss for x in found)
    assert found[2].lowest_loss < 0.9 * found[2].initial_loss


POINTS: dict[str, tuple[Any, bool]] = {
    "minimum": (lambda x, y: x**2 + 0.5 * y**2, True),
    "minimum of fourth order": (lambda x, y: x**2 + y**4, True),
    "saddle": (lambda x, y: x * y, False),
    "saddle that levels off": (lambda x, y: x**2 - 0.5 * y**2 + y**4, False),
    "saddle held by the pull": (lambda x, y: 5 * x**2 - 0.5 * y**2 + y**4, False),
    "maximum": (lambda x, y: jnp.cos(x) + jnp.cos(y), False),
}


@pytest.mark.parametrize("name", POINTS)
def test_a_saddle_without_a_gradient_is_no_minimum(x64: None, name: str) -> None:
    (loss, expected), options = POINTS[name], QUICK | ({"localization": 300.0} if "held" in name else {})
    found = go.measure.llc(lambda p, _: loss(**p), dict.fromkeys("xy", jnp.zeros(())), [jnp.ones(1)], KEY, **options)
    assert bool(found.at_minimum) == expected
    assert "held" not in name or found.mean > 0, "the estimate alone does not tell"


@pytest.mark.parametrize("lr", [1e-6, 1e-3, 1e-1, 10.0])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_large_gradient_is_seen_at_every_step_size(x64: None, lr: float, bounded: bool) -> None:
    """At rates that are far too large the chain diverges, or stays at high losses where they are bounded."""
    def loss(p: Tree, _: Any) -> jax.Array:
        size = 50.0 * jnp.sum(jnp.square(p["w"]))
        return size / (1 + size) if bounded else size

    options = QUICK | {"lr": lr, "n_beta": 1000.0}
    found = go.measure.llc(loss, {"w": jnp.full(3, 0.05)}, [jnp.ones(1)], KEY, **options)
    assert not bool(found.at_minimum) and not bool(jnp.isnan(found.lowest_loss) & jnp.isfinite(found.mean))
    assert lr != 1e-1 or not bounded or found.mean > 0, "the estimate alone does not tell"


def test_chains_of_a_large_model_run_one_after_the_other(x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same numbers as all at once."""
    params = _minimum((4, 3, 4), 2)
    given = _loss, params, [_product(params) + 1.0], KEY, _gauges((4, 3, 4))
    options = dict[str, Any](n_beta=10.0, lr=1e-3, num_draws=5, num_burnin_steps=2)
    at_once = go.measure.llc(*given, **options)
    monkeypatch.setattr(sys.modules["gauge_optax.measure.llc"], "_LARGE", 1)  # the package has a function of this name
    jax.clear_caches()
    one_by_one = go.measure.llc(*given, **options)
    np.testing.assert_allclose(one_by_one.losses, at_once.losses, rtol=1e-12)
    np.testing.assert_allclose(one_by_one.lowest_loss, at_once.lowest_loss, rtol=1e-12)
