"""`rest`: where on its orbit a point rests is seen by no loss; "balanced" holds the paper's coordinate."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.cases import GAUGE_CASES, GaugeCase
from tests.twins import furthest, stepper, train

Tree = Any
MAKE: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "quotient(adamw)": lambda g, rest: go.quotient(optax.adamw(1e-2, weight_decay=0.1), g, rest=rest),
    "quotient(lion)": lambda g, rest: go.quotient(optax.lion(1e-3), g, rest=rest),
    "quotient_adamw": lambda g, rest: go.quotient_adamw(1e-2, g, rest=rest),
    "quotient_muon": lambda g, rest: go.quotient_muon(1e-2, g, rest=rest),
    "ddc_adamw": lambda g, rest: go.ddc_adamw(1e-2, g, rest=rest),
    "ddc_muon": lambda g, rest: go.ddc_muon(1e-2, g, rest=rest),
}
CASES: dict[str, GaugeCase] = {case.name: case for case in GAUGE_CASES}


def _trained(tx: Any, params: Tree, loss: Any, steps: int = 40) -> tuple[Tree, np.ndarray]:
    return train(tx.init, stepper(tx, loss), params, steps)


@pytest.mark.slow_rows("rescale/layers-ddc_muon", "*-quotient_*", "*-ddc_adamw")
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("case", ["rescale/layers", pytest.param("product/llama", marks=pytest.mark.slow)])
def test_losses_are_the_same(case: str, name: str, x64: None) -> None:
    gauges, params = CASES[case].gauges(), CASES[case].params(jax.random.key(1))
    group = go.product(gauges)
    twin = group.act(group.sample(jax.random.key(2), params, 0.5), params)
    end, anchor = _trained(MAKE[name](gauges, "anchor"), params, CASES[case].loss)
    tx = MAKE[name](gauges, "balanced")
    for start in (params, twin):
        other, balanced = _trained(tx, start, CASES[case].loss)
        np.testing.assert_allclose(balanced, anchor, rtol=1e-10)
        assert furthest(end, other) > 1e-3, "both rest at one point"
    assert abs(anchor[-1] / anchor[0] - 1) > 1e-2


@pytest.mark.slow_rows("quotient_muon-2", "q*-[!2]", "ddc_adamw-2")
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("name", ["quotient(adamw)", "quotient_muon", "ddc_adamw"])
def test_the_papers_coordinate_stays(name: str, degree: int) -> None:
    """log ‖up‖ − p·log ‖down‖ of every channel, in float32; the anchor's rest moves it."""
    gauge = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"}, degree=degree)
    up, down, x, y = map(jax.random.normal, jax.random.split(jax.random.key(0), 4), ((4, 8), (8, 3), (64, 4), (64, 3)))
    params = {"up": up / 2, "bias": jnp.full(8, 0.1), "down": down / 3}

    def loss(p: Tree) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ p["up"] + p["bias"]) ** degree @ p["down"] - y) ** 2)

    def coordinate(p: Tree) -> np.ndarray:
        up, bias, down = (np.asarray(p[n], np.float64) for n in ("up", "bias", "down"))
        return 0.5 * np.log((up**2).sum(0) + bias**2) - degree * 0.5 * np.log((down**2).sum(1))

    moved = {}
    for rest in ("anchor", "balanced"):
        end, _ = _trained(MAKE[name](gauge, rest), params, loss, 300)
        moved[rest] = float(np.max(np.abs(coordinate(end) - coordinate(params))))
    assert moved["balanced"] <= 1e-6 < 0.1 < moved["anchor"]


RELU = go.rescale({"up": "_ channel"}, {"down": "channel _"})


@pytest.mark.parametrize(("make", "options", "words"), [
    (lambda g, **options: go.quotient(optax.adam(0.1), g, **options), {"rest": "nowhere"}, "rest"),
    (functools.partial(go.ddc_adamw, 0.1), {"rest": "nowhere"}, "rest"),
    (functools.partial(go.ddc_adamw, 0.1), {"rest": "balanced", "vertical": "adam"}, "rest"),
    (functools.partial(go.ddc_adamw, 0.1), {"rest": "balanced", "preset": "paper"}, "rest='balanced'"),
])
def test_other_rests_are_refused(make: Callable[..., Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(RELU, **options)


def test_a_state_of_the_other_rest_is_refused() -> None:
    params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    state = go.quotient(optax.adam(0.1), RELU).init(params)
    with pytest.raises(ValueError, match="a state made with rest='anchor'"):
        go.quotient(optax.adam(0.1), RELU, rest="balanced").update(params, state, params)


def test_a_side_of_zeros_rests_where_its_first_step_ends() -> None:
    """The first step away from zeros moved the other side by its own size, to a ratio that was made up."""
    params = {"up": jnp.ones((2, 3)), "down": jnp.zeros((3, 2))}
    gradients = {"up": jnp.zeros((2, 3)), "down": jnp.ones((3, 2))}
    tx = go.quotient(optax.sgd(0.01), RELU, rest="balanced")
    state, ratios = tx.init(params), []
    for number in range(3):
        updates, state = tx.update(gradients, state, params)
        assert number > 0 or max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(updates)) < 0.03
        params = optax.apply_updates(params, updates)
        ratios.append(jnp.log(jnp.linalg.norm(params["up"], axis=0) / jnp.linalg.norm(params["down"], axis=1)))
    np.testing.assert_allclose(ratios[1:], [ratios[0]] * 2, atol=1e-5)
