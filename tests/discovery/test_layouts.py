"""Layouts of kernels and bases that people train: fused, grouped, rotary in every pairing, experts, convolutions."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from gauge_optax.discovery.report import Report
from gauge_optax.gauges.gauge import Gauge
from tests.discovery.test_discover import near
from tests.oracles import orbit, outside

D, HEADS, KEYS, F, V, T = 8, 4, 2, 10, 11, 6
SIZES = {"head": KEYS, "basis": 8}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-2) * scale


def angles(x: jax.Array, planes: int) -> tuple[jax.Array, jax.Array]:
    angle = jnp.arange(x.shape[1])[:, None, None] * 100.0 ** (-jnp.arange(planes) / planes)
    return jnp.cos(angle), jnp.sin(angle)


def half(x: jax.Array) -> jax.Array:
    cos, sin = angles(x, x.shape[-1] // 2)
    u, v = jnp.split(x, 2, -1)
    return jnp.concatenate([u * cos - v * sin, v * cos + u * sin], -1)


def interleaved(x: jax.Array) -> jax.Array:
    cos, sin = angles(x, x.shape[-1] // 2)
    u, v = x[..., ::2], x[..., 1::2]
    return jnp.stack([u * cos - v * sin, v * cos + u * sin], -1).reshape(x.shape)


def partial(x: jax.Array) -> jax.Array:
    return jnp.concatenate([half(x[..., :4]), x[..., 4:]], -1)


def fused(p: Any, tokens: Any, turn: Callable[[jax.Array], jax.Array] = lambda x: x, e: int = 8) -> jax.Array:
    """One block with grouped queries, one kernel for query, key and value, one for gate and up."""
    x = p["embed"][tokens]
    q, k, v = jnp.split(norm(x, p["norm1"]) @ p["qkv"], [HEADS * e, (HEADS + KEYS) * e], -1)
    q, k, v = (y.reshape(*x.shape[:2], -1, e) for y in (q, k, v))
    k, v = (jnp.repeat(y, HEADS // KEYS, 2) for y in (turn(k), v))
    scores = jnp.einsum("bthe,bshe->bhts", turn(q), k)
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e30)
    mixed = jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores), v)
    x = x + mixed.reshape(*x.shape[:2], -1) @ p["out"]
    gate, up = jnp.split(norm(x, p["norm2"]) @ p["gate_up"], 2, -1)
    x = x + (jax.nn.silu(gate) * up) @ p["down"]
    return norm(x, p["final"]) @ p["head"]


def fused_params(e: int = 8) -> dict[str, np.ndarray]:
    shapes = {"embed": (V, D), "qkv": (D, (HEADS + 2 * KEYS) * e), "out": (HEADS * e, D), "gate_up": (D, 2 * F)}
    shapes |= {"down": (F, D), "head": (D, V)}
    rng = np.random.default_rng(0)
    ones = {name: np.ones(D, np.float32) for name in ("norm1", "norm2", "final")}
    return {name: rng.normal(size=s).astype(np.float32) / 2 for name, s in shapes.items()} | ones


QUERY, KEY, VALUE = "_ (head _ {})=0:32", "_ (head {})=32:48", "_ (head {})=48:64"
REST = [
    go.norm_scale({"norm1": "channel"}, {"qkv": "channel _"}),
    go.norm_scale({"norm2": "channel"}, {"gate_up": "channel _"}),
    go.norm_scale({"final": "channel"}, {"head": "channel _"}),
    go.head_linear({"qkv": VALUE.format("basis")}, {"out": "(head _ basis) _"}, sizes=SIZES),
    go.rescale({"gate_up": "_ channel=10:20"}, {"down": "channel _"}),
    go.logit_shift({"head": "_ vocab"}),
]


STREAM = go.residual_rotation(
    {"qkv": "basis _", "gate_up": "basis _", "head": "basis _"},
    {"embed": "_ basis", "out": "_ basis", "down": "_ basis"},
    REST[:3],
)


def of_keys(constructor: Callable[..., Gauge], basis: str, **options: Any) -> Gauge:
    sizes = SIZES if basis == "basis" else {"head": KEYS}
    return constructor({"qkv": QUERY.format(basis)}, {"qkv": KEY.format(basis)}, **options, sizes=sizes)


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
    tokens = np.random.default_rng(1).integers(0, V, (2, 2, T))
    hand = [STREAM, *REST, *gauges]
    check(lambda p, t: fused(p, t, function), fused_params(), list(tokens), hand)


def experts(p: Any, x: Any) -> jax.Array:
    """The two best of four experts, weighed by a softmax."""
    scores = jax.nn.softmax(x @ p["router"])
    best, which = jax.lax.top_k(scores, 2)
    chosen = jnp.sum(jax.nn.one_hot(which, 4) * best[..., None], -2)
    inner = jnp.einsum("bd,edf->bef", x, p["gate"]), jnp.einsum("bd,edf->bef", x, p["up"])
    each = jnp.einsum("bef,efd->bed", jax.nn.silu(inner[0]) * inner[1], p["down"])
    return jnp.sin(jnp.einsum("be,bed->bd", chosen, each))


def test_a_mixture_of_experts() -> None:
    """One scale per expert and channel, and a number added to all scores of the router."""
    rng = np.random.default_rng(0)
    shapes = {"router": (D, 4), "gate": (4, D, 5), "up": (4, D, 5), "down": (4, 5, D)}
    hand = [
        go.rescale({"up": "expert _ channel"}, {"down": "expert channel _"}),
        go.logit_shift({"router": "_ vocab"}),
    ]
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    check(experts, params, list(rng.normal(size=(2, 24, D))), hand, outputs="loss")


def convolutions(p: Any, x: Any) -> jax.Array:
    """Two convolutions with batch norms in evaluation around a residual sum, then a mean over the image."""

    def block(x: jax.Array, i: int) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, p[f"conv{i}"], (1, 1), "SAME", dimension_numbers=numbers)
        return (y - p[f"mean{i}"]) * p[f"scale{i}"] + p[f"bias{i}"]

    x = jax.nn.relu(block(x, 0))
    x = jax.nn.relu(x + block(x, 1))
    return jnp.mean(x, (1, 2)) @ p["head"]


def test_convolutions_around_a_residual_sum() -> None:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"conv0": (3, 3, 2, 4), "conv1": (3, 3, 4, 4), "head": (4, 3)}
    shapes |= {f"{name}{i}": (4,) for i in (0, 1) for name in ("mean", "scale", "bias")}
    stream = {f"{name}{i}": "channel" for i in (0, 1) for name in ("scale", "bias")}
    hand = [
        *(go.rescale({f"conv{i}": "_ _ _ channel", f"mean{i}": "channel"}, {f"scale{i}": "channel"}) for i in (0, 1)),
        go.rescale(stream, {"conv1": "_ _ channel _", "head": "channel _"}),
        go.logit_shift({"head": "_ vocab"}),
    ]
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    report = check(convolutions, params, list(rng.normal(size=(2, 3, 5, 5, 2))), hand, outputs="logits")
    assert not report.rejected
