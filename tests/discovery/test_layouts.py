"""Layouts of kernels and bases that people train: fused, grouped, rotary in every pairing, experts, convolutions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from gauge_optax.discovery.report import Report
from gauge_optax.gauges.gauge import Gauge
from tests.discovery.axes_nets import MOE, attention, convolve, experts, flat, heads, norm
from tests.discovery.nets import near
from tests.oracles import orbit, outside

D, HEADS, KEYS, F, V, T = 8, 4, 2, 10, 11, 6
SIZES = {"head": KEYS, "basis": 8}


def turned(x: jax.Array, u: jax.Array, v: jax.Array, still: int = 0) -> tuple[jax.Array, jax.Array]:
    """Planes (u, v) by angles that are speeds times positions; the last ones do not turn."""
    planes = u.shape[-1]
    speeds = np.where(np.arange(planes) < planes - still, 100.0 ** (-np.arange(planes) / planes), 0.0)
    angle = jnp.arange(x.shape[1])[:, None, None] * speeds
    return u * jnp.cos(angle) - v * jnp.sin(angle), v * jnp.cos(angle) + u * jnp.sin(angle)


def half(x: jax.Array, still: int = 0) -> jax.Array:
    return jnp.concatenate(turned(x, *jnp.split(x, 2, -1), still), -1)


def interleaved(x: jax.Array) -> jax.Array:
    return jnp.stack(turned(x, x[..., ::2], x[..., 1::2]), -1).reshape(x.shape)


def partial(x: jax.Array) -> jax.Array:
    return jnp.concatenate([half(x[..., :4]), x[..., 4:]], -1)


def fused(p: Any, tokens: Any, turn: Callable[[jax.Array], jax.Array] = lambda x: x) -> jax.Array:
    """One block with grouped queries, one kernel for query, key and value, one for gate and up."""
    x = p["embed"][tokens]
    q, k, v = jnp.split(norm(x, p["norm1"]) @ p["qkv"], [HEADS * 8, (HEADS + KEYS) * 8], -1)
    k, v = (jnp.repeat(y, HEADS // KEYS, 2) for y in (turn(heads(k, KEYS)), heads(v, KEYS)))
    x = x + flat(attention(turn(heads(q, HEADS)), k, v)) @ p["out"]
    gate, up = jnp.split(norm(x, p["norm2"]) @ p["gate_up"], 2, -1)
    x = x + (jax.nn.silu(gate) * up) @ p["down"]
    return norm(x, p["final"]) @ p["head"]


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}


def fused_params() -> dict[str, np.ndarray]:
    kernels = {"qkv": (D, (HEADS + 2 * KEYS) * 8), "out": (HEADS * 8, D), "gate_up": (D, 2 * F), "down": (F, D)}
    ones = {name: np.ones(D, np.float32) for name in ("norm1", "norm2", "final")}
    return drawn({"embed": (V, D), **kernels, "head": (D, V)}) | ones


NORMS = [go.norm_scale({scale: "channel"}, {kernel: "channel _"})
         for scale, kernel in (("norm1", "qkv"), ("norm2", "gate_up"), ("final", "head"))]
REST = [
    *NORMS,
    go.residual_rotation(dict.fromkeys(("qkv", "gate_up", "head"), "basis _"),
                         dict.fromkeys(("embed", "out", "down"), "_ basis"), NORMS),
    go.head_linear({"qkv": "_ (head basis)=48:64"}, {"out": "(head _ basis) _"}, sizes=SIZES),
    go.rescale({"gate_up": "_ channel=10:20"}, {"down": "channel _"}),
    go.logit_shift({"head": "_ vocab"}),
]


def of_keys(constructor: Callable[..., Gauge], basis: str, **options: Any) -> Gauge:
    sizes = SIZES if basis == "basis" else {"head": KEYS}
    return constructor(
        {"qkv": f"_ (head _ {basis})=0:32"}, {"qkv": f"_ (head {basis})=32:48"}, **options, sizes=sizes)


TURNS: dict[str, tuple[Callable[[jax.Array], jax.Array], list[Gauge]]] = {
    "none": (lambda x: x, [of_keys(go.head_linear, "basis")]),
    "half": (half, [of_keys(go.rope_linear, "basis")]),
    "interleaved": (interleaved, [of_keys(go.rope_linear, "basis", pairing="interleaved")]),
    "partial": (partial, [of_keys(go.rope_linear, "basis=0:4/8"), of_keys(go.head_linear, "basis=4:8/8")]),
}


def whole(report: Report) -> Sequence[Gauge]:
    return report.whole


def check(
    fn: Any, params: Any, batches: Any, hand: Sequence[Gauge], listed: Callable[[Report], Sequence[Gauge]] = whole,
    **options: Any,
) -> Report:
    """Whether a list of the report and one written by hand have the same orbits."""
    report = go.discover(fn, params, batches, progress=False, **options)
    with jax.enable_x64(True):
        point = near(params, 5)
        mine, theirs = orbit(listed(report), point), orbit(hand, point)
        assert outside(theirs, mine) < 1e-6, report
        assert outside(mine, theirs) < 1e-6, report
    assert eval(report.code(), {"go": go}) == report.gauges
    return report


@pytest.mark.slow
@pytest.mark.parametrize("turn", TURNS)
def test_a_fused_block_with_grouped_queries(turn: str) -> None:
    function, gauges = TURNS[turn]
    tokens = list(np.random.default_rng(1).integers(0, V, (2, 2, T)))
    check(lambda p, t: fused(p, t, function), fused_params(), tokens, [*REST, *gauges])


def test_a_mixture_of_experts() -> None:
    """One scale per expert and channel, and a number added to all scores of the router."""
    hand = [go.rescale({"up": "expert _ channel"}, {"down": "expert channel _"}), go.logit_shift({"router": "_ vocab"})]
    inputs = list(np.random.default_rng(1).normal(size=(2, 4, 6, D)))
    check(lambda p, x: jnp.sin(experts(p, x)), drawn(MOE | {"gate": MOE["up"]}), inputs, hand, outputs="loss")


def convolutions(p: Any, x: Any) -> jax.Array:
    """Two convolutions with batch norms in evaluation around a residual sum, then a mean over the image."""

    def block(x: jax.Array, i: int) -> jax.Array:
        return (convolve(x, p[f"conv{i}"]) - p[f"mean{i}"]) * p[f"scale{i}"] + p[f"bias{i}"]

    x = jax.nn.relu(block(x, 0))
    return jnp.mean(jax.nn.relu(x + block(x, 1)), (1, 2)) @ p["head"]


def test_convolutions_around_a_residual_sum() -> None:
    shapes: dict[str, tuple[int, ...]] = {"conv0": (3, 3, 2, 4), "conv1": (3, 3, 4, 4), "head": (4, 3)}
    shapes |= {f"{name}{i}": (4,) for i in (0, 1) for name in ("mean", "scale", "bias")}
    stream = {f"{name}{i}": "channel" for i in (0, 1) for name in ("scale", "bias")}
    hand = [
        *(go.rescale({f"conv{i}": "_ _ _ channel", f"mean{i}": "channel"}, {f"scale{i}": "channel"}) for i in (0, 1)),
        go.rescale(stream, {"conv1": "_ _ channel _", "head": "channel _"}),
        go.logit_shift({"head": "_ vocab"}),
    ]
    inputs = list(np.random.default_rng(1).normal(size=(2, 3, 5, 5, 2)))
    assert not check(convolutions, drawn(shapes), inputs, hand, outputs="logits").rejected
