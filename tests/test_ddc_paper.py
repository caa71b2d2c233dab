"""`preset="paper"` against appendix B in NumPy, and on twins."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests import appendix_b
from tests.refusals import each_refused, refused
from tests.tolerances import tolerance
from tests.twins import driven

Tree = Any
STEPS = 30


def normal(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def apart(a: Tree, b: Tree) -> float:
    return float(np.max([np.max(np.abs(a[n] - b[n])) / np.max(np.abs(b[n])) for n in b]))


SIDES, TWO = ({"a": "_ channel"}, {"b": "channel _"}), {"a": (4, 3), "b": (3, 5)}
FOUR = TWO | {"c": (5, 2), "d": (2, 2)}
CHAIN = [go.rescale({x: "_ _"}, {y: "_ _"}) for x, y in zip("abc", "bcd", strict=True)]
# The gauges, the shapes, exponents, and whether lengths are by channel.
SCALES: dict[str, tuple[Any, Any, tuple[float, ...], bool]] = {
    "pair": (go.rescale({"a": "_ _"}, {"b": "_ _"}), TWO, (1.0, 1.0), False),
    "channels": (go.rescale(*SIDES), TWO, (1.0, 1.0), True),
    "square": (go.rescale(*SIDES, degree=2), TWO, (2.0, 1.0), True),
    "norm": (go.norm_scale({"a": "channel"}, {"b": "channel _"}), TWO | {"a": (3,)}, (1.0, 1.0), True),
    "chain": (CHAIN, FOUR, (1.0,) * 4, False),
}


@pytest.mark.parametrize("radial", ["linear", "log"])
@pytest.mark.parametrize("wd", [0.0, 0.3])
@pytest.mark.parametrize("kind", SCALES)
def test_scales_follow_the_pseudocode(kind: str, wd: float, radial: str, x64: None) -> None:
    """B.4 to B.7, at a rate at which B.7's clamp acts."""
    gauges, shapes, exponents, by_channel = SCALES[kind]
    params, gradients = normal(0, **shapes), [normal(1 + k, **shapes) for k in range(STEPS)]
    ours = driven(go.ddc_adamw(0.1, gauges, weight_decay=wd, radial=radial, preset="paper"), params, gradients)[0]
    theirs = {name: x.copy() for name, x in params.items()}
    oracle = appendix_b.Rescale(list(shapes.values()), exponents, by_channel, 0.1, wd, radial)
    for g in gradients:
        oracle.step(list(theirs.values()), list(g.values()))
    assert apart(theirs, params) > 0.3
    assert apart(ours, theirs) <= 1e-12
    default = driven(go.ddc_adamw(0.1, gauges, weight_decay=wd, radial=radial), params, gradients)[0]
    assert apart(default, theirs) > 1e-2, "the preset is the default"


HEADS = go.head_rotation({"query": "_ head basis", "key": "_ head basis"})
HEAD_SHAPES = {"query": (6, 1, 4), "key": (6, 1, 4)}


@pytest.mark.parametrize("v_mode", ["per_head_scalar", "per_head_matrix", "body_frame"])
def test_heads_follow_the_pseudocode(v_mode: str, x64: None) -> None:
    """B.8 with B.1's outer projection."""
    params, gradients = normal(0, **HEAD_SHAPES), [normal(1 + k, **HEAD_SHAPES) for k in range(STEPS)]
    tx = go.ddc_adamw(0.02, HEADS, weight_decay=0.0, v_mode=v_mode, refresh_drift=1e9, preset="paper")
    ours = driven(tx, params, gradients)[0]
    theirs = {name: x[:, 0].copy() for name, x in params.items()}
    oracle = appendix_b.Head(0.02, v_mode)
    for g in gradients:
        oracle.step(list(theirs.values()), [x[:, 0] for x in g.values()])
    assert apart({n: x[:, 0] for n, x in ours.items()}, theirs) <= 1e-11
    assert apart(theirs, {n: x[:, 0] for n, x in params.items()}) > 0.05


@pytest.mark.parametrize("other", [
    {"mask": True}, {"vertical": "adam"}, {"weight_decay": {"up": 0.1, "down": 0.0}}, {"preset": "nonsense"},
    {"radial_scale": 2.0}, {"match": "horizontal"}, {"radial": "log", "max_log_step": 0.1},
    {"radial": "log", "scale_floor": 0.1},
])
def test_arguments_that_appendix_b_does_not_have(other: dict[str, Any]) -> None:
    with refused("'paper'" if "preset" in other else "preset='paper' does not take"):
        go.ddc_adamw(0.1, CHAIN, **{"preset": "paper"} | other)


test_arguments_that_would_change_nothing = each_refused([
    (lambda: go.scale_by_ddc(CHAIN, preset="paper", scale_floor=0.1), "does not take"),
    (lambda: go.ddc_adamw(0.1, CHAIN, max_log_step=0.1), "max_log_step without preset"),
    (lambda: go.ddc_muon(0.1, CHAIN, max_log_step=0.1), "max_log_step without preset"),
])


def test_hyperparameters_that_optax_injects_are_the_defaults() -> None:
    for preset in (None, "paper"):
        tx, params = optax.inject_hyperparams(go.ddc_adamw)(0.1, CHAIN, preset=preset), normal(0, **FOUR)
        plain = go.ddc_adamw(0.1, CHAIN, preset=preset)
        found, expected = (jax.jit(t.update)(params, jax.jit(t.init)(params), params)[0] for t in (tx, plain))
        assert apart(found, expected) <= tolerance("optax", "float32")


def test_polar_factors_are_sharp(x64: None) -> None:
    """B.10: the horizontal moment's polar factor, singular values 1 to 0.4 %, times its RMS singular value."""
    params, g = normal(0, **HEAD_SHAPES), normal(1, **HEAD_SHAPES)
    after = driven(go.ddc_muon(0.1, HEADS, preset="paper"), params, [g])[0]
    moments = appendix_b.Head.horizontal([x[:, 0] for x in params.values()], [x[:, 0] for x in g.values()])
    for name, moment in zip(HEAD_SHAPES, moments, strict=True):
        size = np.linalg.norm(moment) / 2.0  # √rank
        values = np.linalg.svd((params[name] - np.asarray(after[name]))[:, 0] / (0.1 * size), compute_uv=False)
        np.testing.assert_allclose(values, 1.0, atol=5e-3)


@pytest.mark.parametrize("make", [go.ddc_adamw, go.ddc_muon])
def test_a_fresh_state_has_no_buffer_twice(make: Any) -> None:
    """JAX does not donate one buffer as two arguments."""
    params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 1))}
    state = make(0.1, [go.rescale({"up": "_ channel"}, {"down": "channel _"})], preset="paper").init(params)
    leaves = jax.tree.leaves(state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
