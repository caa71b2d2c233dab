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


def fused(
    p: Any, tokens: Any, turn: Callable[[jax.Array], jax.Array] = lambda x: x, heads_first: bool = False
) -> jax.Array:
    """One block with grouped queries, one kernel for query, key and value, one for gate and up."""
    x = p["embed"][tokens]
    if heads_first:
        q, k, v = jnp.split(heads(norm(x, p["norm1"]) @ p["qkv"], HEADS + 2 * KEYS), [HEADS, HEADS + KEYS], 2)
    else:
        parts = jnp.split(norm(x, p["norm1"]) @ p["qkv"], [HEADS * 8, (HEADS + KEYS) * 8], -1)
        q, k, v = (heads(part, n) for part, n in zip(parts, (HEADS, KEYS, KEYS), strict=True))
    k, v = (jnp.repeat(y, HEADS // KEYS, 2) for y in (turn(k), v))
    x = x + flat(attention(turn(q), k, v)) @ p["out"]
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
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("turn", TURNS)
def test_a_fused_block_with_grouped_queries(turn: str, heads_first: bool) -> None:
    """The kernel's outputs are split into query, key and value, or reshaped into heads first and split along them."""
    function, gauges = TURNS[turn]
    tokens = list(np.random.default_rng(1).integers(0, V, (2, 2, T)))
    check(lambda p, t: fused(p, t, function, heads_first), fused_params(), tokens, [*REST, *gauges])


# Fused kernels: outputs → query, key, value, all with HEADS heads; and the axes of the entries a to b of every head. A
# range of an axis is a grid itself, or a range of one axis meets a range of another.
SHARED = HEADS // KEYS
Fused = tuple[Callable[[jax.Array], Sequence[jax.Array]], Callable[[int, int], Sequence[str]]]


def copied(parts: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.repeat(x, HEADS // x.shape[2], 2) for x in parts]


FUSED: dict[str, Fused] = {
    "heads of query, key, value": (
        lambda y: jnp.split(heads(y, 3 * HEADS), 3, 2),
        lambda a, b: [f"_ (part={k} head basis={a}:{b}/8)" for k in range(3)]),
    "query, key, value of every head": (
        lambda y: jnp.split(heads(y, HEADS), 3, -1),
        lambda a, b: [f"_ (head basis={8 * k + a}:{8 * k + b}/24)" for k in range(3)]),
    "queries, key, value of every group": (
        lambda y: copied([
            part.reshape(*part.shape[:2], -1, 8)
            for part in jnp.split(heads(y, KEYS), [8 * SHARED, 8 * SHARED + 8], -1)]),
        lambda a, b: [f"_ (head _=0:{SHARED}/{SHARED + 2} basis={a}:{b}/8)",
                      *(f"_ (head basis={8 * k + a}:{8 * k + b}/32)" for k in (SHARED, SHARED + 1))]),
    "heads behind their entries": (
        lambda y: copied(jnp.split(heads(y, 8).swapaxes(2, 3), [HEADS, HEADS + KEYS], 2)),
        lambda a, b: [f"_ (basis={a}:{b}/8 {text})" for text in ("head=0:2/4 _", "head=4:6/8", "head=6:8/8")]),
    "one key": (
        lambda y: copied([heads(x, x.shape[-1] // 8) for x in jnp.split(y, [8 * HEADS, 8 * HEADS + 8], -1)]),
        lambda a, b: [f"_ (_ basis={a}:{b}/8)=0:32", *(f"_ basis={k + a}:{k + b}" for k in (32, 40))]),
}
COPIES = {"queries, key, value of every group": "(head _ basis) _", "heads behind their entries": "(head _ basis) _",
          "one key": "(_ basis) _"}


@pytest.mark.slow_rows("queries, key, value of every group")
@pytest.mark.parametrize("layout", FUSED)
def test_a_rotary_part_of_heads_in_a_fused_kernel(layout: str) -> None:
    split, axes = FUSED[layout]

    def fn(p: Any, x: Any) -> jax.Array:
        q, k, v = split(x @ p["qkv"])
        return jnp.sin(flat(attention(partial(q), partial(k), v)) @ p["out"])

    def gauge(constructor: Callable[..., Gauge], *sides: dict[str, str]) -> Gauge:
        named = {"part": 3, "head": KEYS if layout in COPIES else HEADS}
        text = " ".join(axes for side in sides for axes in side.values())
        return constructor(*sides, sizes={name: n for name, n in named.items() if name in text})

    turned, still, whole = ([{"qkv": text} for text in axes(*ends)] for ends in ((0, 4), (4, 8), (0, 8)))
    hand = [
        gauge(go.rope_linear, *turned[:2]), gauge(go.head_linear, *still[:2]),
        gauge(go.head_linear, whole[2], {"out": COPIES.get(layout, "(head basis) _")}),
    ]
    outputs = {"heads of query, key, value": 96, "query, key, value of every head": 96, "one key": 48}.get(layout, 64)
    inputs = list(np.random.default_rng(1).normal(size=(2, 2, T, D)))
    report = check(fn, drawn({"qkv": (D, outputs), "out": (HEADS * 8, D)}), inputs, hand, outputs="loss")
    assert not report.rejected and not report.ungauged


def test_heads_that_are_split_from_a_kernel_with_a_bias() -> None:
    """The kernel is stored as (outputs, inputs). Heads that share keys meet them in one einsum, without copies."""

    def fn(p: Any, x: Any) -> jax.Array:
        q, k, v = jnp.split(heads(x @ p["qkv"].T + p["bias"], HEADS + 2 * KEYS), [HEADS, HEADS + KEYS], 2)
        scores = jnp.einsum("btkre,bske->bkrts", q.reshape(*x.shape[:2], KEYS, HEADS // KEYS, 8), k)
        mixed = jnp.einsum("bkrts,bske->btkre", jax.nn.softmax(scores, -1), v)
        return jnp.sin(mixed.reshape(*x.shape[:2], -1) @ p["out"].T)

    rows = (HEADS + 2 * KEYS) * 8
    query, key, value = "(head _ basis)=0:32", "(head basis)=32:48", "(head basis)=48:64"
    hand = [
        go.head_linear({"qkv": f"{query} _", "bias": query}, {"qkv": f"{key} _"}, sizes=SIZES),
        go.head_linear({"qkv": f"{value} _", "bias": value}, {"out": "_ (head _ basis)"}, sizes=SIZES),
        go.key_bias({"bias": "channel=32:48"}),
    ]
    inputs = list(np.random.default_rng(1).normal(size=(2, 2, T, D)))
    check(fn, drawn({"qkv": (rows, D), "bias": (rows,), "out": (D, HEADS * 8)}), inputs, hand, outputs="loss")


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
