"""Symmetries of parts of kernels: adaptive norms, queries beside gates, kernels that the model flattens, one factor."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.gauges.gauge import Gauge
from tests import twins
from tests.discovery.axes_nets import CASES, attention, decoder, flat, heads
from tests.discovery.test_layouts import check, drawn, half, inputs

D, H, E = 8, 2, 4
ADAPTIVE = CASES["adaLN"]
BATCHES = [ADAPTIVE.batch(np.random.default_rng(seed)) for seed in (1, 2)]
BY_HAND = [
    go.rescale(
        {"modulation": ("_ channel=0:8", "_ channel=8:16"), "bias": ("1+ channel=8:16", "channel=0:8")},
        {"up": "channel _"}),
    go.rescale({"modulation": "_ channel=16:24", "bias": "channel=16:24"}, {"down": "_ channel"}),
]


def test_the_scale_and_the_shift_of_an_adaptive_norm_move_with_its_readers() -> None:
    """x·(1 + scale) + shift: one plus the bias of the scale, its kernel, and the whole shift."""
    report = check(ADAPTIVE.fn, drawn(ADAPTIVE.shapes), BATCHES, BY_HAND, True, outputs="loss")
    assert report.certificate.unexplained == 0
    # What starts at one comes first, because a frame is read from it; the kernel may start at zero.
    (scale,) = [held.call for held in report.held if "up" in held.call.paths]
    assert next(iter(scale.roles["up"].values()))[0].startswith("1+")


def test_twins_of_an_adaptive_norm_that_starts_at_zero_train_as_one(x64: None) -> None:
    """And AdamW alone does not."""
    params = {p: jnp.asarray(x, jnp.float64) for p, x in drawn(ADAPTIVE.shapes).items()}
    params |= {name: jnp.zeros_like(params[name]) for name in ("modulation", "bias")}
    gauges = go.discover(ADAPTIVE.fn, params, BATCHES, outputs="loss", progress=False).gauges
    group, adamw = go.product(gauges), optax.adamw(0.03, weight_decay=0.1)
    tx = go.quotient(adamw, gauges)
    moved = group.act(group.sample(jax.random.key(0), params), params)

    def loss(p: Any) -> jax.Array:
        return jnp.mean((ADAPTIVE.fn(p, BATCHES[0]) - 1.0) ** 2)

    def losses(tx: optax.GradientTransformation, start: Any) -> np.ndarray:
        return twins.train(tx.init, twins.stepper(tx, loss), start, 10)[1]

    assert np.abs(losses(adamw, params) - losses(adamw, moved)).max() > 1e-3
    one, other = losses(tx, params), losses(tx, moved)
    assert one[-1] < 0.8 * one[0] and np.abs(one - other).max() < 1e-10


@pytest.mark.parametrize(("turns", "gated"), [(False, True), (True, False), (True, True)])
def test_kernels_by_head_that_the_model_flattens(turns: bool, gated: bool) -> None:
    """(d, h, e) as (d, h·e), with rotary heads, and with a gate beside the query in each head."""

    def inner(p: Any, x: Any) -> jax.Array:
        q, k, v = (heads(x @ p[name].reshape(D, -1)) for name in "qkv")
        q, gate = jnp.split(q, 2, -1) if gated else (q, jnp.zeros(()))
        mixed = attention(*((half(y) if turns else y) for y in (q, k)), v)
        return flat(mixed * jax.nn.sigmoid(gate) if gated else mixed) @ p["o"].reshape(-1, D)

    shapes = {"embed": (11, D), "head": (D, 11), "q": (D, H, E * (1 + gated)), "k": (D, H, E), "v": (D, H, E)}
    of_keys, query = go.rope_linear if turns else go.head_linear, f"_ head basis=0:{E}" if gated else "_ head basis"
    hand: list[Gauge] = [
        of_keys({"q": query}, {"k": "_ head basis"}),
        go.rescale({"v": "_ head channel"}, {"o": "head channel _"}) if gated else
        go.head_linear({"v": "_ head basis"}, {"o": "head basis _"}),
        go.logit_shift({"head": "_ vocab"}),
        go.residual_rotation(
            {**dict.fromkeys("qkv", "basis _ _"), "head": "basis _"}, {"o": "_ _ basis", "embed": "_ basis"}),
    ]
    batches = list(np.random.default_rng(1).integers(0, 11, (2, 2, 6)))
    check(decoder(inner), drawn(shapes | {"o": (H, E, D)}), batches, hand, True)


def state_space(p: Any, x: Any, split: Any) -> jax.Array:
    """Mamba's block: one kernel has the step, what the state takes in (B), and what it is read by (C)."""
    step, b, c = split(x @ p["in"])
    y = jnp.tril(c @ jnp.swapaxes(b, -1, -2)) @ (x * jax.nn.softplus(step @ p["step"])) + x * p["skip"]
    return jnp.sin(y * jax.nn.silu(x @ p["gate"]) @ p["out"])


def uneven(p: Any, x: Any, step: int = 2) -> jax.Array:
    return state_space(p, x, lambda y: jnp.split(y, [step, step + 3], -1))


def in_turns(p: Any, x: Any) -> jax.Array:
    return state_space(p, x, lambda y: [y[..., k::3] for k in range(3)])


def by_index(p: Any, x: Any) -> jax.Array:
    for k in range(3):
        x = jnp.sin(x @ p["in"][k] * p["scale"][k])
    return x


def fused_as_one(p: Any, x: Any) -> jax.Array:
    q, k, v = (heads(jnp.tanh(y)) for y in jnp.split((x * p["scale"]) @ p["in"], 3, -1))
    return jnp.sin(flat(attention(q, k, v)))


def beside(p: Any, x: Any) -> jax.Array:
    return jnp.sin(jnp.concatenate([jnp.tanh(x @ p["in"]) * p["scale"], jnp.tanh(x @ p["wide"])], -1) @ p["out"])


MAMBA = {"in": (D, 8), "step": (2, D), "skip": (D,), "gate": (D, D), "out": (D, 5)}
OF_TURNS = MAMBA | {"in": (D, 9), "step": (3, D)}
ONE_FACTOR: dict[str, tuple[Any, dict[str, tuple[int, ...]], Sequence[Gauge]]] = {
    "a range": (uneven, MAMBA, [
        go.head_linear({"in": "_ basis=2:5"}, {"in": "_ basis=5:8"}),
        go.head_linear({"in": "_ basis=0:2"}, {"step": "basis _"}),
        go.rescale({"in": "_ _=5:8", "skip": "_"}, {"out": "_ _"})]),
    "a range beside a single entry": (functools.partial(uneven, step=1), MAMBA | {"in": (D, 7), "step": (1, D)}, [
        go.head_linear({"in": "_ basis=1:4"}, {"in": "_ basis=4:7"}),
        go.rescale({"step": "_ _"}, {"in": "_ _=0:1"}),
        go.rescale({"in": "_ _=4:7", "skip": "_"}, {"out": "_ _"})]),
    "every third": (in_turns, OF_TURNS, [
        go.head_linear({"in": "_ (basis part=1)"}, {"in": "_ (basis part=2)"}, sizes={"part": 3}),
        go.head_linear({"in": "_ (basis part=0)"}, {"step": "basis _"}, sizes={"part": 3}),
        go.rescale({"in": "_ (_ part=2)", "skip": "_"}, {"out": "_ _"}, sizes={"part": 3})]),
    "layers by index": (
        by_index, {"in": (3, D, D), "scale": (3,)}, [go.rescale({"in": "layer _ _"}, {"scale": "layer"})]),
    "all of a fused kernel": (fused_as_one, {"in": (D, 24), "scale": ()}, [go.rescale({"in": "_ _"}, {"scale": ""})]),
    "a kernel by its multiplier": (
        lambda p, x: jnp.sin(x @ (p["scale"] * p["in"])), {"in": (D, 3), "scale": ()},
        [go.rescale({"in": "_ _"}, {"scale": ""})]),
    "rows of a concatenation": (beside, {"in": (D, 3), "wide": (D, 5), "out": (D, 4), "scale": ()}, [
        go.rescale({"out": "_=0:3 _"}, {"scale": ""})]),
}


@pytest.mark.parametrize("name", ONE_FACTOR)
def test_one_factor_that_a_part_of_a_leaf_shares_with_whole_leaves(name: str) -> None:
    fn, shapes, hand = ONE_FACTOR[name]
    report = check(fn, drawn(shapes), inputs(2, 2, 6, D), hand, True, outputs="loss")
    assert report.certificate.unexplained == 0
