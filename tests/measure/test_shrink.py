"""Shared and independent shrink: the closed forms of Gram matrices, and decays that differ from role to role."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.refusals import each_refused, refused
from tests.tolerances import tolerance
from tests.twins import apart, driven, trained

Tree = Any


def _noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def _close(found: Tree, expected: Tree, check: str = "optax") -> None:
    errors = apart(found, expected)
    assert max(errors.values()) <= tolerance(check), errors


# Closed forms -------------------------------------------------------------------------------------

LEFT, RIGHT = _noise(0, 2, 5, 3), _noise(1, 2, 4, 3)
LEFT_UPDATE, RIGHT_UPDATE = 0.1 * _noise(2, 2, 5, 3), 0.1 * _noise(3, 2, 4, 3)


def _gram(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2) @ x


@pytest.mark.parametrize("shrinks", [(1.0, 1.0), (0.9, 0.9), (0.5, 0.99), (np.array([0.9, 0.3]), np.array(0.7))])
def test_grams_after_a_step_are_those_of_the_factors_after_it(shrinks: tuple[Any, Any], x64: None) -> None:
    found = go.measure.gram_evolution(LEFT, RIGHT, LEFT_UPDATE, RIGHT_UPDATE, *shrinks)
    by_pair = [np.reshape(s, (-1, 1, 1)) for s in shrinks]
    left, right = _gram(by_pair[0] * LEFT + LEFT_UPDATE), _gram(by_pair[1] * RIGHT + RIGHT_UPDATE)
    for x, expected in zip(found, (left, right, left - right), strict=True):
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)


def test_a_step_that_takes_back_a_large_factor_leaves_the_small_one() -> None:
    """In float32, the formula's terms of 1e8 cancel to 0 there."""
    a, b, update, still = (np.array([[x]], np.float32) for x in (1e4, 1.0, 1.0 - 1e4, 0.0))
    found = go.measure.gram_evolution(a, b, update, still)
    assert float(found.left[0, 0]) == 1.0 and float(found.imbalance[0, 0]) == 0.0


evolved: Any = go.measure.gram_evolution
test_shapes_that_do_not_fit_are_refused = each_refused([
    *((functools.partial(evolved, left, right, left, right), "gram_evolution: factors that are no pair")
      for left, right in [(LEFT[0, 0], RIGHT), (LEFT, RIGHT[..., :2]), (LEFT, RIGHT[:1])]),
    (lambda: evolved([2.0], [1.0], [0.0], [0.0]), "gram_evolution: factors that are no pair"),
    (lambda: evolved(LEFT, RIGHT, LEFT, RIGHT, np.ones(5)), "left_shrink of another shape"),
    (lambda: evolved(LEFT, RIGHT, LEFT, RIGHT, 1j), "complex numbers in left_shrink"),
    (lambda: evolved(LEFT, None, LEFT, RIGHT), "no numbers in right"),
    (lambda: evolved(LEFT, RIGHT, LEFT, LEFT), "gram_evolution: right_update of another shape"),
])


# Decay by role ------------------------------------------------------------------------------------

NORM = go.norm_scale({"norm": "channel"}, {"up": "channel _"})
UNIT = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"})
TURN = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
SHIFT = go.logit_shift({"logits": "_ vocab"})
NORMED = go.scale_invariant({"normed": "_ channel"})
SHAPES = {
    "norm": (6,), "up": (6, 5), "bias": (5,), "down": (5, 3), "value": (6, 2, 3), "out": (2, 3, 4), "logits": (3, 7),
    "normed": (4, 2), "free": (3,),
}

def _params(*names: str) -> dict[str, np.ndarray]:
    return {name: _noise(k, *shape) for k, (name, shape) in enumerate(SHAPES.items()) if name in names or not names}


BY_ROLE: dict[str, tuple[list[go.Gauge], Mapping[str, float], dict[str, float]]] = {
    "names of the gauges": (
        [NORM, UNIT, TURN, SHIFT, NORMED],
        {"scale": 0.3, "into": 0.1, "up": 0.1, "down": 0.02, "blocks": 0.5, "other": 0.7},
        dict.fromkeys(SHAPES, 0.5) | {"norm": 0.3, "up": 0.1, "bias": 0.1, "down": 0.02, "free": 0.7},
    ),
    "names of the sides": (
        [NORM, UNIT, TURN, SHIFT], {"up": 0.1, "down": 0.1, "blocks": 0},
        dict.fromkeys(SHAPES, 0.0) | dict.fromkeys(["norm", "up", "bias", "down"], 0.1),
    ),
}


@pytest.mark.parametrize(("gauges", "by_role", "numbers"), BY_ROLE.values(), ids=BY_ROLE)
def test_every_leaf_decays_by_the_number_of_its_role(gauges: Any, by_role: Any, numbers: Any, x64: None) -> None:
    params, tx = _params(), go.add_gauge_decay(by_role, gauges)
    found, _ = tx.update(jax.tree.map(np.zeros_like, params), tx.init(params), params)
    values = params | {"logits": params["logits"] - params["logits"].mean(-1, keepdims=True)}
    _close(found, {name: numbers[name] * x for name, x in values.items()})


# Optimizers ---------------------------------------------------------------------------------------

BLOCK = [NORM, UNIT]
DECAY = {"scale": 0.9, "into": 0.3, "up": 0.3, "down": 0.1, "other": 0.2}


def _loss(p: Tree) -> jax.Array:
    x = jnp.asarray(_noise(20, 4, 6)) * p["norm"]
    y = jax.nn.relu(x @ p["up"] + p["bias"]) @ p["down"] + p["free"]
    return jnp.mean(jnp.square(y - _noise(21, 4, 3)))


@pytest.mark.slow_rows("ddc_muon")
@pytest.mark.parametrize(("alias", "precondition"), [
    (go.ddc_adamw, go.scale_by_ddc),
    # What Muon leaves to Adam has a decay of its own.
    (functools.partial(go.ddc_muon, adam_weight_decay=DECAY), go.links.scale_by_scaled_polar),
], ids=["ddc_adamw", "ddc_muon"])
def test_an_alias_decays_by_roles_as_its_chain_does(alias: Any, precondition: Any, x64: None) -> None:
    """The chain of five links, and a leaf that two gauges share: one decay for both of its roles."""
    chain = optax.chain(
        go.gauge_project(BLOCK), precondition(BLOCK), go.add_gauge_decay(DECAY, BLOCK),
        optax.scale_by_learning_rate(0.05), go.gauge_retract(BLOCK),
    )
    params = jax.tree.map(jnp.asarray, _params("norm", "up", "bias", "down") | {"free": _noise(22, 3)})
    found, expected = (trained(tx, _loss, params, 3)[0] for tx in (alias(0.05, BLOCK, weight_decay=DECAY), chain))
    _close(found, expected, "oracle")


def test_a_retraction_keeps_the_joint_scales_part_of_an_independent_shrink(x64: None) -> None:
    """s = ρ_up²·ρ_down shrinks as the factors did, and the coordinate stays."""
    gauge, rate = go.rescale({"a": "_ channel"}, {"b": "channel _"}, degree=2), 0.1
    tx = optax.chain(go.add_gauge_decay({"up": 0.3, "down": 0.1}, gauge), optax.scale(-rate), go.gauge_retract(gauge))
    params = {"a": LEFT[0], "b": RIGHT[0].T}
    after, _ = driven(tx, params, [jax.tree.map(jnp.zeros_like, params)])
    before, shrunk = (np.sum(np.square(p["a"]), 0) * np.sqrt(np.sum(np.square(p["b"]), 1)) for p in (params, after))
    np.testing.assert_allclose(shrunk / before, (1 - 0.3 * rate) ** 2 * (1 - 0.1 * rate), rtol=tolerance("optax"))
    drift = go.measure.drift(params, after, gauge)[0][""]
    np.testing.assert_allclose(drift, 0.0, atol=tolerance("coordinates"))


# Complaints ---------------------------------------------------------------------------------------

COMPLAINTS: dict[str, tuple[Any, Sequence[go.Gauge], str]] = {
    "a role without a number": ({"up": 0.1}, [UNIT], "add 'down': 0.0"),
    "a role of a norm": ({"up": 0.1, "down": 0.1, "into": 0.1, "other": 0.0}, [TURN], "no decay for the role 'blocks'"),
    "a key that is no role": ({"up": 0.1, "down": 0.1, "left": 0.1}, [UNIT], "no block has the role 'left'"),
    "a key that another hides": ({"scale": 0.1, "into": 0.1, "up": 0.1}, [NORM], "no block has the role 'up'"),
    "two roles": ({"scale": 0.3, "into": 0.1, "up": 0.2, "down": 0.1}, BLOCK, "'into': 0.1 and 'up': 0.2"),
    "a schedule": ({"up": lambda count: 0.1, "down": 0.1}, [UNIT], "bad decay of role 'up'"),
    "no number": ({"up": float("nan"), "down": 0.1}, [UNIT], "bad decay of role 'up'"),
}


@pytest.mark.parametrize(("decay", "gauges", "text"), COMPLAINTS.values(), ids=COMPLAINTS)
@pytest.mark.parametrize("constructor", [go.add_gauge_decay, functools.partial(go.ddc_adamw, 0.1)], ids=["link", "all"])
def test_roles_that_do_not_fit_are_refused(constructor: Any, decay: Any, gauges: list[go.Gauge], text: str) -> None:
    with refused("", "add_gauge_decay", text):
        jax.eval_shape(constructor(weight_decay=decay, gauges=gauges).init, _params())
