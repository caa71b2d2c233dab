"""Sensitivity: optimizers in the order that is known, and the numbers against a plain loop."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import gauge_optax as go
from benchmarks.sensitivity import Attention, attention
from tests.quick import jit
from tests.refusals import each_refused
from tests.tolerances import tolerance
from tests.twins import normal, trained

Tree = Any
RATE = 1e-3


@functools.cache
def _model() -> Attention:
    with jax.enable_x64(True):
        return attention(jax.random.key(0))


# The group, and the optimizer of its gauges.
OPTIMIZERS: dict[str, tuple[str, Callable[[Any], optax.GradientTransformation]]] = {
    "adamw": ("O", lambda gauges: optax.adamw(RATE)),
    "muon": ("O", lambda gauges: optax.contrib.muon(
        RATE, muon_weight_dimension_numbers=go.product(gauges).muon_dimension_numbers)),
    "polyak_sgd": ("O", lambda gauges: optax.polyak_sgd(1 / RATE, scaling=RATE)),  # it needs the loss's value
    "quotient_adamw": ("GL", lambda gauges: go.quotient_adamw(RATE, gauges)),
    "quotient_muon": ("GL", lambda gauges: go.quotient_muon(RATE, gauges)),
}


@pytest.mark.slow_rows("*muon*")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_known_optimizers_see_what_they_are_known_to_see(name: str, x64: None) -> None:
    """Linear and spectral steps do not see rotations, AdamW does; those on the quotient see no matrices either."""
    group, make = OPTIMIZERS[name]
    model, gauges = _model(), _model().groups[group]
    found = go.measure.gauge_sensitivity(
        make(gauges), model.loss_fn, model.params, gauges, represent=model.represent,
        key=jax.random.key(1), num_samples=3, scale={"O": 1.0, "GL": 0.5 * float(np.log(100.0))}[group],
    )
    assert np.min(found.relative_change) > 0.1 if name == "adamw" else found.max <= 0.1 * tolerance("twins")


# Against a plain loop -----------------------------------------------------------------------------


def _pair() -> tuple[Tree, Any, Any, list[go.Gauge]]:
    """Two factor pairs: parameters, loss, both products, a rotation of the one and a rescaling of the other."""
    params = normal(0, dict.fromkeys(("a", "b", "up", "down"), (4, 3)))

    def represent(p: Tree) -> Tree:
        return {"ab": p["a"] @ p["b"].T, "ud": p["up"] @ p["down"].T}

    def loss(p: Tree) -> Any:
        return sum(jnp.sum((m - 1.0) ** 2) for m in represent(p).values())

    turn, scale = go.head_rotation({"a": "_ basis", "b": "_ basis"}), go.rescale({"up": "_ c"}, {"down": "_ c"})
    return params, loss, represent, [turn, scale]


def test_the_figures_are_those_of_a_plain_loop(x64: None) -> None:
    params, loss, represent, gauges = _pair()
    tx, group, key = optax.adam(0.05), go.product(gauges), jax.random.key(2)
    found = go.measure.gauge_sensitivity(
        tx, loss, params, gauges, represent=represent, key=key, num_samples=2, scale=0.7, steps=3
    )

    def motion(p: Tree) -> jax.Array:
        after = trained(tx, loss, p, 3)[0]
        return ravel_pytree(optax.tree.sub(represent(after), represent(p)))[0]

    plain, act = motion(params), jit(group.act)
    for k, sample in enumerate(jax.random.split(key, 2)):
        element, still = group.sample(sample, params, 0.7), group.identity(params)
        moved = [element, (element[0], still[1]), (still[0], element[1])]
        for own, g in zip((found, *found.per_gauge), moved, strict=True):
            expected = jnp.linalg.norm(motion(act(g, params)) - plain) / jnp.linalg.norm(plain)
            assert expected > 0.01
            assert abs(own.relative_change[k] / expected - 1) <= tolerance("oracle")
    for own in (found, *found.per_gauge):
        assert own.mean == jnp.mean(own.relative_change) and own.max == jnp.max(own.relative_change)
    assert [own.per_gauge for own in found.per_gauge] == [(), ()]


def test_one_gauge_is_its_own_whole() -> None:
    """In float32."""
    params, loss, represent, gauges = _pair()
    found = go.measure.gauge_sensitivity(
        optax.sgd(0.01), loss, params, gauges[0], represent=represent, key=jax.random.key(0)
    )
    assert found.relative_change.shape == (8,) and found.relative_change.dtype == jnp.float32
    assert np.array_equal([own.relative_change for own in found.per_gauge], [found.relative_change])
    assert found.max <= tolerance("twins", jnp.float32)


# What is refused ----------------------------------------------------------------------------------


def _refused(said: str, **given: Any) -> tuple[Callable[[], Any], str]:
    params, loss, represent, gauges = _pair()
    options = dict(loss_fn=loss, params=params, gauges=gauges, represent=represent, num_samples=2) | given
    return functools.partial(go.measure.gauge_sensitivity, optax.sgd(0.01), key=jax.random.key(0), **options), said


test_what_has_no_sensitivity_is_refused = each_refused([
    _refused("(?s)^(?!.*head_rotation).*rescale", represent=lambda p: {"ab": p["a"] @ p["b"].T, "up": p["up"]}),
    # One changes it, and the other does not.
    _refused("(?s)^(?!.*rescale).*head_rotation", represent=lambda p: p["a"]),
    _refused("represent is no function", represent="a"),
    _refused("do not move", represent=lambda p: jnp.ones(3)),
    _refused("do not move", loss_fn=lambda p: jnp.nan * jnp.sum(p["a"])),
    _refused("no gauges", gauges=[]),
    _refused("bad num_samples", num_samples=0),
    _refused("bad steps", steps=0),
    _refused("num_samples=2.0", num_samples=2.0),
    _refused("a loss that is no scalar", loss_fn=lambda p: p["a"]),
    _refused("no arrays", represent=lambda p: {}),
])
