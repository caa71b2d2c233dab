"""Sensitivity: optimizers in the order that is known, the numbers against a plain loop, and the program."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from benchmarks.sensitivity import Attention, attention
from tests.quick import jit
from tests.tolerances import tolerance

Tree = Any
RATE, CONDITION = 1e-3, 100.0
SCALES = {"O": 1.0, "GL": 0.5 * float(np.log(CONDITION))}
NOTHING = 0.1 * tolerance("twins")


@functools.cache
def _model() -> Attention:
    with jax.enable_x64(True):
        return attention(jax.random.key(0))


@functools.cache
def _measured(name: str, group: str) -> Any:
    """In float64, 3 samples."""
    model = _model()
    gauges = model.groups[group]
    numbers = go.product(model.groups["O"]).muon_dimension_numbers
    factories = {
        "sgd": lambda: optax.sgd(RATE),
        "adamw": lambda: optax.adamw(RATE),
        "muon": lambda: optax.contrib.muon(RATE, muon_weight_dimension_numbers=numbers),
        "polyak_sgd": lambda: optax.polyak_sgd(1 / RATE, scaling=RATE),
        "quotient_adamw": lambda: go.quotient_adamw(RATE, gauges),
        "quotient_muon": lambda: go.quotient_muon(RATE, gauges),
    }
    with jax.enable_x64(True):
        found = go.measure.gauge_sensitivity(
            factories[name](), model.loss_fn, model.params, gauges, represent=model.represent, key=jax.random.key(1),
            num_samples=3, scale=SCALES[group],
        )
        print(f"{name}, {group}: mean {found.mean:.2g}, max {found.max:.2g}")
        return jax.tree.map(np.asarray, found)


# Known optimizers ---------------------------------------------------------------------------------


@pytest.mark.slow_rows("*muon*")
@pytest.mark.parametrize("name", ["sgd", "muon", "polyak_sgd"])
def test_spectral_and_linear_steps_do_not_see_rotations(name: str) -> None:
    """The last one needs the loss's value: extra arguments arrive."""
    assert _measured(name, "O").max <= NOTHING


def test_adamw_sees_rotations() -> None:
    assert np.min(_measured("adamw", "O").relative_change) > 0.1


@pytest.mark.slow_rows("quotient_muon")
@pytest.mark.parametrize("name", ["quotient_adamw", "quotient_muon"])
def test_quotient_optimizers_see_nothing(name: str) -> None:
    assert _measured(name, "GL").max <= NOTHING


# Against a plain loop -----------------------------------------------------------------------------


def _pair(shift: float = 0.0) -> tuple[Tree, Any, Any, list[go.Gauge]]:
    """Two factor pairs: parameters, loss, both products, a rotation of the one and a rescaling of the other."""
    generator = np.random.default_rng(0)
    params = {name: generator.normal(size=(4, 3)) for name in ("a", "b", "up", "down")}

    def represent(p: Tree) -> Tree:
        return {"ab": p["a"] @ p["b"].T, "ud": p["up"] @ p["down"].T}

    def loss(p: Tree) -> jax.Array:
        return sum(jnp.sum((m - 1.0 + shift) ** 2) for m in represent(p).values())

    gauges = [
        go.head_rotation({"a": "_ basis", "b": "_ basis"}),
        go.rescale({"up": "_ channel"}, {"down": "_ channel"}),
    ]
    return params, loss, represent, gauges


def test_the_figures_are_those_of_a_plain_loop(x64: None) -> None:
    params, loss, represent, gauges = _pair()
    tx, group, steps, samples = optax.adam(0.05), go.product(gauges), 3, 2
    found = go.measure.gauge_sensitivity(
        tx, loss, params, gauges, represent=represent, key=jax.random.key(2), num_samples=samples, scale=0.7,
        steps=steps,
    )

    @jit
    def motion(p: Tree) -> jax.Array:
        before, state = represent(p), tx.init(p)
        for _ in range(steps):
            updates, state = tx.update(jax.grad(loss)(p), state, p)
            p = optax.apply_updates(p, updates)
        return jnp.concatenate([(x - y).ravel() for x, y in zip(represent(p).values(), before.values(), strict=True)])

    plain = motion(params)
    act = jit(group.act)
    for k, key in enumerate(jax.random.split(jax.random.key(2), samples)):
        element, still = group.sample(key, params, 0.7), group.identity(params)
        moved = [element, (element[0], still[1]), (still[0], element[1])]
        for own, g in zip((found, *found.per_gauge), moved, strict=True):
            expected = jnp.linalg.norm(motion(act(g, params)) - plain) / jnp.linalg.norm(plain)
            assert expected > 0.01
            assert abs(own.relative_change[k] / expected - 1) <= tolerance("oracle")
    for own in (found, *found.per_gauge):
        assert own.mean == jnp.mean(own.relative_change)
        assert own.max == jnp.max(own.relative_change)
    assert [own.per_gauge for own in found.per_gauge] == [(), ()]


def test_one_gauge_is_its_own_whole() -> None:
    """In float32."""
    params, loss, represent, gauges = _pair()
    found = go.measure.gauge_sensitivity(
        optax.sgd(0.01), loss, params, gauges[0], represent=represent, key=jax.random.key(0)
    )
    (own,) = found.per_gauge
    assert found.relative_change.shape == (8,)
    assert found.relative_change.dtype == jnp.float32
    assert np.array_equal(own.relative_change, found.relative_change)
    assert found.max <= tolerance("twins", jnp.float32)


# What is refused ----------------------------------------------------------------------------------


def _refusal(represent: Any = None, gauges: Any = None, shift: float = 0.0, **options: Any) -> str:
    params, loss, own, both = _pair(shift)
    with pytest.raises(ValueError) as error:
        go.measure.gauge_sensitivity(
            optax.sgd(0.01), loss, params, both if gauges is None else gauges, represent=represent or own,
            key=jax.random.key(0), **{"num_samples": 2} | options,
        )
    return str(error.value)


def test_a_representation_that_a_gauge_changes_is_refused_by_its_name() -> None:
    text = _refusal(lambda p: {"ab": p["a"] @ p["b"].T, "up": p["up"]})
    assert "rescale" in text and "head_rotation" not in text
    text = _refusal(lambda p: p["a"])
    assert "head_rotation" in text and "rescale" not in text


def test_steps_that_move_nothing_are_refused() -> None:
    assert "do not move" in _refusal(lambda p: jnp.ones(3))
    assert "do not move" in _refusal(shift=float("nan"))


def test_an_empty_request_is_refused() -> None:
    assert "no gauges" in _refusal(gauges=[])
    assert "num_samples" in _refusal(num_samples=0)
    assert "steps" in _refusal(steps=0)
    assert "no arrays" in _refusal(lambda p: {})


# The program --------------------------------------------------------------------------------------
