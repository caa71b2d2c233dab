"""`ddc_fused` against `quotient` around `ddc`: the same step, on the whole register."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.ddc import fused as ddc_fused
from tests.cases import GAUGE_CASES, GaugeCase

STEPS = 3
CASES = [case for case in GAUGE_CASES if case.loss is not None and "linear" not in case.name]

# Layers scanned; gate and up in one kernel, of which a norm scales all rows and a rescaling the columns of up.
NORM_AND_UNITS = [
    go.norm_scale(
        scale={"norm/scale": "layer channel"}, into={"mlp/gate_up": "layer _ channel _", "skip": "layer channel _"}
    ),
    go.rescale(up={"mlp/gate_up": "layer half=1 _ channel"}, down={"mlp/down": "layer channel _"}, degree=1),
    go.rescale(up={"mlp/gate_up": "layer half=0 _ channel"}, down={"after": "layer channel _"}, degree=2),
]
SHAPES = {
    "norm": {"scale": (2, 3)},
    "mlp": {"gate_up": (2, 2, 3, 5), "down": (2, 5, 3)},
    "skip": (2, 3, 4),
    "after": (2, 5, 2),
}


def _trained(tx: optax.GradientTransformation, gradient: Any, params: Any) -> Any:
    @jax.jit
    def run(params: Any) -> Any:
        state = tx.init(params)
        for number in range(STEPS):
            updates, state = tx.update(gradient(params, number), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    return run(params)


def _check(make: Any, gradient: Any, params: Any, monkeypatch: pytest.MonkeyPatch, fused: bool = True) -> None:
    calls = []
    applies = ddc_fused._applies
    monkeypatch.setattr(ddc_fused, "_applies", lambda s: calls.append(applies(s)) or calls[-1])
    ours = _trained(make(), gradient, params)
    assert all(calls) == fused and calls
    monkeypatch.setattr(ddc_fused, "_applies", lambda s: False)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(_trained(make(), gradient, params)), strict=True):
        size = float(np.linalg.norm(np.asarray(y, float)))
        assert float(np.linalg.norm(np.asarray(x, float) - np.asarray(y, float))) <= 1e-13 * max(size, 1.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal_on_every_row(case: GaugeCase, x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gauges, params = case.gauges(), case.params(jax.random.key(0))
    loss: Any = case.loss
    _check(
        lambda: go.ddc_adamw(1e-2, gauges, weight_decay=0.1), lambda p, _: jax.grad(loss)(p), params, monkeypatch
    )


@pytest.mark.parametrize("shifted", [False, True], ids=["scales alone", "a shift on one leaf"])
def test_equal_where_two_scales_share_a_kernel(shifted: bool, x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over stored leaves, with what other scales multiply them by; a leaf with a shift has none."""

    def tree(seed: int) -> Any:
        leaves, structure = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        return jax.tree.unflatten(structure, [jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)])

    gauges = [*NORM_AND_UNITS, *([go.logit_shift({"skip": "layer _ vocab"})] if shifted else [])]
    gradients = [tree(k + 1) for k in range(STEPS)]
    _check(lambda: go.ddc_adamw(1e-2, gauges), lambda _, number: gradients[number], tree(0), monkeypatch)


def test_a_shift_on_a_turned_leaf_takes_the_plain_step(x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gauges = [go.head_rotation({"w": "_ _ basis", "v": "_ basis"}), go.logit_shift({"w": "vocab _ _"})]
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 4))), "v": jnp.ones((5, 4))}
    _check(lambda: go.ddc_adamw(1e-2, gauges), lambda p, _: p, params, monkeypatch, fused=False)
