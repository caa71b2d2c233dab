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


def fused(p: Any, tokens: Any, turn: Callable[[jax.Array], jax.Array] = half) -> jax.Array:
    """One block with grouped queries, one kernel for query, key and value, one for gate and up."""
    x = p["embed"][tokens]
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


def inputs(*shape: int) -> list[np.ndarray]:
    return list(np.random.default_rng(1).normal(size=shape))


def check(
    fn: Any, params: Any, batches: Any, hand: Sequence[Gauge], clean: bool = False, **options: Any
) -> Report:
    """Whether the whole list of the report and one written by hand have the same orbits, and whether it is all."""
    report = go.discover(fn, params, batches, progress=False, **options)
    with jax.enable_x64(True):
        point = near(params, 5)
        mine, theirs = orbit(report.whole, point), orbit(hand, point)
        assert outside(theirs, mine) < 1e-6, report
        assert outside(mine, theirs) < 1e-6, report
    assert eval(report.code(), {"go": go}) == report.gauges
    assert not clean or not (report.rejected or report.ungauged), report
    return report


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "pairing"), [(half, "half"), (interleaved, "interleaved")])
def test_a_fused_block_with_grouped_queries(turn: Callable[[jax.Array], jax.Array], pairing: Any) -> None:
    tokens = list(np.random.default_rng(1).integers(0, V, (2, 2, T)))
    of_keys = go.rope_linear({"qkv": "_ (head _ basis)=0:32"}, {"qkv": "_ (head basis)=32:48"}, pairing, sizes=SIZES)
    check(lambda p, t: fused(p, t, turn), fused_params(), tokens, [*REST, of_keys])


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
    outputs = 48 if layout == "one key" else 64 if layout in COPIES else 96
    check(fn, drawn({"qkv": (D, outputs), "out": (HEADS * 8, D)}), inputs(2, 2, T, D), hand, True, outputs="loss")


def of_one_einsum(p: Any, x: Any) -> jax.Array:
    """Kernels as (outputs, inputs), with a bias. Heads that share keys meet them in one einsum, without copies."""
    q, k, v = jnp.split(heads(x @ p["qkv"].T + p["bias"], HEADS + 2 * KEYS), [HEADS, HEADS + KEYS], 2)
    scores = jnp.einsum("btkre,bske->bkrts", q.reshape(*x.shape[:2], KEYS, HEADS // KEYS, 8), k)
    mixed = jnp.einsum("bkrts,bske->btkre", jax.nn.softmax(scores, -1), v)
    return jnp.sin(mixed.reshape(*x.shape[:2], -1) @ p["out"].T)


def convolutions(p: Any, x: Any) -> jax.Array:
    """Two convolutions with batch norms in evaluation around a residual sum, then a mean over the image."""

    def block(x: jax.Array, i: int) -> jax.Array:
        return (convolve(x, p[f"conv{i}"]) - p[f"mean{i}"]) * p[f"scale{i}"] + p[f"bias{i}"]

    x = jax.nn.relu(block(x, 0))
    return jnp.sin(jnp.mean(jax.nn.relu(x + block(x, 1)), (1, 2)) @ p["head"])


QUERY, KEY, VALUE = "(head _ basis)=0:32", "(head basis)=32:48", "(head basis)=48:64"
VECTORS = {f"{name}{i}": (4,) for i in (0, 1) for name in ("mean", "scale", "bias")}
NETS: dict[str, tuple[Any, dict[str, tuple[int, ...]], tuple[int, ...], list[Gauge]]] = {
    "heads that are split from a kernel with a bias": (
        of_one_einsum, {"qkv": (64, D), "bias": (64,), "out": (D, HEADS * 8)}, (2, 2, T, D), [
            go.head_linear({"qkv": f"{QUERY} _", "bias": QUERY}, {"qkv": f"{KEY} _"}, sizes=SIZES),
            go.head_linear({"qkv": f"{VALUE} _", "bias": VALUE}, {"out": "_ (head _ basis)"}, sizes=SIZES),
            go.key_bias({"bias": "channel=32:48"})]),
    "a mixture of experts": (
        lambda p, x: jnp.sin(experts(p, x)), MOE | {"gate": MOE["up"]}, (2, 4, 6, D), [
            go.rescale({"up": "expert _ channel"}, {"down": "expert channel _"}),
            go.logit_shift({"router": "_ vocab"})]),
    "convolutions around a residual sum": (
        convolutions, VECTORS | {"conv0": (3, 3, 2, 4), "conv1": (3, 3, 4, 4), "head": (4, 3)}, (2, 3, 5, 5, 2), [
            *(go.rescale({f"conv{i}": "_ _ _ channel", f"mean{i}": "channel"}, {f"scale{i}": "channel"})
              for i in (0, 1)),
            go.rescale({f"{name}{i}": "channel" for i in (0, 1) for name in ("scale", "bias")},
                       {"conv1": "_ _ channel _", "head": "channel _"})]),
}


@pytest.mark.parametrize("name", NETS)
def test_every_gauge_of_a_small_net(name: str) -> None:
    fn, shapes, batches, hand = NETS[name]
    assert not check(fn, drawn(shapes), inputs(*batches), hand, outputs="loss").rejected
