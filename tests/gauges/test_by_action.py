"""A gauge that a user wrote works everywhere: optimizers, transport, measures and assertions know it by its action."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.gauges.user_gauges import Trade, Translation
from tests.tolerances import tolerance
from tests.twins import apart, stepper, train

Tree = Any
TOKENS, TARGETS = np.array([[0, 3, 1, 4], [2, 2, 4, 0]]), np.array([[1, 0, 1, 1], [0, 1, 0, 0]])
SHAPES = {"token": (5, 4), "position": (4, 4), "up": (4, 6), "down": (6, 2)}
KEY = jax.random.key(3)
OURS = [go.rescale({"up": "_ channel"}, {"down": "channel _"}), go.logit_shift({"down": "_ vocab"})]


def _params(dtype: str = "float64") -> Tree:
    generator = np.random.default_rng(0)
    return {path: jnp.asarray(generator.normal(size=shape), dtype) for path, shape in SHAPES.items()}


def _loss(p: Tree) -> jax.Array:
    hidden = jnp.tanh(p["token"][TOKENS] + p["position"][None])
    logits = jax.nn.relu(hidden @ p["up"]) @ p["down"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS))


def _trained(tx: optax.GradientTransformation, params: Tree) -> Tree:
    return train(jax.jit(tx.init), stepper(tx, _loss), params)[0]


WRAPPED = {
    "adamw": lambda g: go.quotient(optax.adamw(0.02, weight_decay=0.1), g),
    "adamw_free": lambda g: go.quotient(optax.adamw(0.02, weight_decay=0.1), g, pin=False),
    "lion": lambda g: go.quotient(optax.lion(0.01), g),
    "quotient_muon": lambda g: go.quotient_muon(0.02, g),
    "ddc_adamw": lambda g: go.ddc_adamw(0.02, g, weight_decay=0.1),
    "ddc_muon": lambda g: go.ddc_muon(0.02, g),
    "chain": lambda g: optax.chain(
        go.gauge_project(g), go.scale_by_ddc(g), optax.scale_by_learning_rate(0.02), go.gauge_retract(g)
    ),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", WRAPPED)
def test_twins_under_a_list_with_a_users_gauge(name: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        group = go.product([*OURS, Translation("token", "position")])
        params = _params(dtype)
        element = group.sample(jax.random.key(1), params)
        alone = _trained(optax.adamw(0.02), params)
        parted = apart(group.act(element, alone), _trained(optax.adamw(0.02), group.act(element, params)))
        assert max(parted.values()) > 1e-2
        tx = WRAPPED[name](group)
        there = _trained(tx, group.act(element, params))
        found = apart(group.act(element, _trained(tx, params)), there)
        assert max(found.values()) <= tolerance("quotient_twins", dtype), found


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("inner", [optax.adamw(0.02, weight_decay=0.1), optax.lion(0.01), optax.contrib.muon(0.02)])
def test_a_gauge_by_its_action_trains_as_the_same_one_of_ours(inner: optax.GradientTransformation) -> None:
    mine, ours = (_trained(go.quotient(inner, gauge), _params()) for gauge in (Trade("up", "down"), OURS[0]))
    assert max(apart(mine, ours).values()) <= tolerance("quotient_twins")


@pytest.mark.usefixtures("x64")
def test_state_moves_with_the_weights() -> None:
    gauges, params = [*OURS, Translation("token", "position")], _params()
    group, tx = go.product(gauges), go.quotient(optax.adamw(0.02), gauges)
    element, step = group.sample(jax.random.key(1), params), stepper(tx, _loss)
    here, state, _ = step(params, tx.init(params))
    there, moved = group.act(element, here), go.transport(state, here, gauges, element)
    for _ in range(3):
        (here, state, _), (there, moved, _) = step(here, state), step(there, moved)
    assert max(apart(group.act(element, here), there).values()) <= tolerance("quotient_twins")
    bare, plain = stepper(optax.adam(0.02), _loss), optax.adam(0.02).init(params)  # a shift moves no moment
    _, plain, _ = bare(params, plain)
    same = go.transport(plain, params, gauges[2], element[2])
    assert all(map(jnp.array_equal, jax.tree.leaves(plain), jax.tree.leaves(same)))


@pytest.mark.usefixtures("x64")
def test_balance_is_the_least_norm_and_gauge_fix_goes_there() -> None:
    gauge, params = Translation("token", "position"), _params()

    def norm(shift: jax.Array) -> jax.Array:
        return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gauge.act({"": shift}, params)))

    slope = jax.grad(norm)(gauge.balance(params)[""])
    assert float(jnp.max(jnp.abs(slope))) <= tolerance("oracle")
    tx = go.gauge_fix(optax.adam(0.0), [*OURS[1:], gauge])
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    found = apart(optax.apply_updates(params, updates), gauge.act(gauge.balance(params), params))
    assert max(found[path] for path in ("token", "position")) <= tolerance("oracle")


@pytest.mark.usefixtures("x64")
def test_measures_and_assertions_take_it() -> None:
    gauge, params = Translation("token", "position"), _params()
    go.testing.assert_invariant(_loss, params, gauge, KEY)
    go.testing.assert_equivariant_step(go.quotient(optax.adamw(0.02), gauge), _loss, params, gauge, KEY)
    with pytest.raises(AssertionError):
        go.testing.assert_equivariant_step(optax.adamw(0.02), _loss, params, Trade("up", "down"), KEY)
    moved = gauge.act({"": jnp.arange(4.0)}, params)
    np.testing.assert_allclose(go.measure.drift(params, moved, gauge)[0][""], jnp.arange(4.0), atol=1e-12)
    step = jax.tree.map(jnp.subtract, moved, params)
    np.testing.assert_allclose(go.measure.vertical_motion(params, step, gauge)[0][""], jnp.arange(4.0), atol=1e-12)


def test_errors_name_the_gauge_and_the_remedy() -> None:
    gauge, params = Translation("token", "position"), _params("float32")
    with pytest.raises(ValueError, match=r"translation.*does not commute with rescale.*'position'"):
        go.product([go.rescale({"position": "_ channel"}, {"up": "channel _"}), gauge]).read(params)
    with pytest.raises(ValueError, match="not on real numbers: 'token'"):
        go.quotient(optax.sgd(0.1), gauge).init(params | {"token": jnp.ones((5, 4), jnp.int32)})
    tx = go.gauge_fix(optax.sgd(0.1), gauge, strength=0.5)
    with pytest.raises(ValueError, match="translation: no way to go a part of"):
        tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match="translation: no leaf"):
        Translation("tokens", "position").read(params)
