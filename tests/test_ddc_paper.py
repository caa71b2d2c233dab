"""`preset="paper"` against appendix B in NumPy, and on twins."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests import appendix_b

Tree = Any
STEPS = 30


def normal(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def trained(tx: Any, params: Tree, gradients: list[Tree]) -> Tree:
    params, update = jax.tree.map(jnp.asarray, params), jax.jit(tx.update)
    state = tx.init(params)
    for g in gradients:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params


def apart(a: Tree, b: Tree) -> float:
    return max(float(np.max(np.abs(a[n] - b[n])) / np.max(np.abs(b[n]))) for n in b)


@pytest.mark.parametrize("radial", ["linear", "log"])
@pytest.mark.parametrize("wd", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["pair", "channels", "square", "norm", "chain"])
def test_scales_follow_the_pseudocode(kind: str, wd: float, radial: str, x64: None) -> None:
    """B.4 to B.7, at a rate at which B.7's clamp acts."""
    shapes: dict[str, tuple[int, ...]] = {"a": (4, 3), "b": (3, 5)}
    exponents, by_channel, gauges = (1.0, 1.0), True, [go.rescale({"a": "_ channel"}, {"b": "channel _"})]
    if kind == "pair":
        by_channel, gauges = False, [go.rescale({"a": "_ _"}, {"b": "_ _"})]
    if kind == "square":
        exponents, gauges = (2.0, 1.0), [go.rescale({"a": "_ channel"}, {"b": "channel _"}, degree=2)]
    if kind == "norm":
        shapes, gauges = {"a": (3,), "b": (3, 5)}, [go.norm_scale({"a": "channel"}, {"b": "channel _"})]
    if kind == "chain":
        shapes = {"a": (4, 3), "b": (3, 5), "c": (5, 2), "d": (2, 2)}
        exponents, by_channel = (1.0,) * 4, False
        gauges = [go.rescale({x: "_ _"}, {y: "_ _"}) for x, y in zip("abc", "bcd", strict=True)]
    params, gradients = normal(0, **shapes), [normal(1 + k, **shapes) for k in range(STEPS)]
    ours = trained(go.ddc_adamw(0.1, gauges, weight_decay=wd, radial=radial, preset="paper"), params, gradients)
    theirs = {name: x.copy() for name, x in params.items()}
    oracle = appendix_b.Rescale(list(shapes.values()), exponents, by_channel, 0.1, wd, radial)
    for g in gradients:
        oracle.step(list(theirs.values()), list(g.values()))
    assert apart(theirs, params) > 0.3
    assert apart(ours, theirs) <= 1e-12
    default = trained(go.ddc_adamw(0.1, gauges, weight_decay=wd, radial=radial), params, gradients)
    assert apart(default, theirs) > 1e-2, "the preset is the default"


@pytest.mark.parametrize("v_mode", ["per_head_scalar", "per_head_matrix", "body_frame"])
def test_heads_follow_the_pseudocode(v_mode: str, x64: None) -> None:
    """B.8 with B.1's outer projection."""
    shapes = {"query": (6, 1, 4), "key": (6, 1, 4)}
    gauge = go.head_rotation({"query": "_ head basis", "key": "_ head basis"})
    params, gradients = normal(0, **shapes), [normal(1 + k, **shapes) for k in range(STEPS)]
    tx = go.ddc_adamw(0.02, gauge, weight_decay=0.0, v_mode=v_mode, refresh_drift=1e9, preset="paper")
    ours = trained(tx, params, gradients)
    theirs = {name: x[:, 0].copy() for name, x in params.items()}
    oracle = appendix_b.Head(6, 4, 0.02, v_mode)
    for g in gradients:
        oracle.step(list(theirs.values()), [x[:, 0] for x in g.values()])
    assert apart({n: x[:, 0] for n, x in ours.items()}, theirs) <= 1e-11
    assert apart(theirs, {n: x[:, 0] for n, x in params.items()}) > 0.05


def test_one_joint_step_of_a_chain(x64: None) -> None:
    """B.6: √L·lr in the log of the product, whatever the weights; ours moves √2·lr."""
    gauges = [go.rescale({x: "_ _"}, {y: "_ _"}) for x, y in zip("abc", "bcd", strict=True)]
    params = normal(0, a=(4, 3), b=(3, 5), c=(5, 2), d=(2, 2))
    tx = go.ddc_adamw(1e-4, gauges, weight_decay=0.0, radial="log", preset="paper")
    after = trained(tx, params, [jax.tree.map(jnp.asarray, params)])  # along the lengths alone
    moved = sum(float(jnp.log(jnp.linalg.norm(params[n]) / jnp.linalg.norm(after[n]))) for n in "abcd")
    np.testing.assert_allclose(moved, 2 * 1e-4, rtol=1e-6)


def test_a_block_keeps_its_sign(x64: None) -> None:
    """B.7's clamp: a length of 0.02 at a rate of 0.1."""
    gauge = go.rescale({"a": "_ channel"}, {"b": "channel _"})
    params = {"a": jnp.full((1, 1), 1.0), "b": jnp.full((1, 1), 0.02)}
    gradient = {"a": jnp.full((1, 1), 0.02), "b": jnp.ones((1, 1))}
    after = trained(go.ddc_adamw(0.1, gauge, weight_decay=0.0, preset="paper"), params, [gradient])
    np.testing.assert_allclose(float(after["a"][0, 0] * after["b"][0, 0]), 0.02 * np.exp(-0.5), rtol=1e-6)


def test_arguments_that_appendix_b_does_not_have() -> None:
    gauge = go.rescale({"a": "_ channel"}, {"b": "channel _"})
    for arguments in ({"mask": True}, {"vertical": "adam"}, {"weight_decay": {"up": 0.1, "down": 0.0}}):
        with pytest.raises(ValueError, match="preset='paper' does not take"):
            go.ddc_adamw(0.1, gauge, preset="paper", **arguments)
    with pytest.raises(ValueError, match="'paper'"):
        go.ddc_adamw(0.1, gauge, preset="nonsense")


def test_polar_factors_are_sharp(x64: None) -> None:
    """B.10: the horizontal moment's polar factor, singular values 1 to 0.4 %, times its RMS singular value."""
    gauge = go.head_rotation({"query": "_ head basis", "key": "_ head basis"})
    shapes = {"query": (6, 1, 4), "key": (6, 1, 4)}
    params, g = normal(0, **shapes), normal(1, **shapes)
    after = trained(go.ddc_muon(0.1, gauge, preset="paper"), params, [g])
    moments = appendix_b.Head.horizontal([x[:, 0] for x in params.values()], [x[:, 0] for x in g.values()])
    for name, moment in zip(shapes, moments, strict=True):
        size = np.linalg.norm(moment) / 2.0  # √rank
        values = np.linalg.svd((params[name] - np.asarray(after[name]))[:, 0] / (0.1 * size), compute_uv=False)
        np.testing.assert_allclose(values, 1.0, atol=5e-3)
