"""Layouts of kernels and biases that people train: fused, grouped, rotary, experts, convolutions; and their parts."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.discovery.report import Report
from gauge_optax.gauges.gauge import Gauge
from tests import twins
from tests.discovery.axes_nets import CASES, MOE, attention, convolve, decoder, experts, flat, heads
from tests.discovery.nets import near
from tests.oracles import orbit, outside

D, HEADS, KEYS, V, T = 8, 4, 2, 11, 6
SIZES = {"head": KEYS, "basis": 8}


def turned(x: jax.Array, u: jax.Array, v: jax.Array, still: int = 0) -> tuple[jax.Array, jax.Array]:
    """Planes (u, v) by angles that are speeds times positions; the last ones do not turn."""
    planes = u.shape[-1]
    speeds = np.where(np.arange(planes) < planes - still, 100.0 ** (-np.arange(planes) / planes), 0.0)
    angle = jnp.arange(x.shape[1])[:, None, None] * speeds
    return u * jnp.cos(angle) - v * jnp.sin(angle), v * jnp.cos(angle) + u * jnp.sin(angle)


def half(x: jax.Array, still: int = 0) -> jax.Array:
    u, v = jnp.split(x, 2, -1)
    return jnp.concatenate(turned(x, u, v, still), -1)


def interleaved(x: jax.Array) -> jax.Array:
    # What `x[..., ::2]` is in newer JAX. In 0.8 it is a gather, which a shorter instance refuses.
    even, odd = (jax.lax.slice_in_dim(x, start, None, 2, -1) for start in (0, 1))
    return jnp.stack(turned(x, even, odd), -1).reshape(x.shape)


def partial(x: jax.Array) -> jax.Array:
    return jnp.concatenate([half(x[..., :4]), x[..., 4:]], -1)


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}


def inputs(*shape: int) -> list[np.ndarray]:
    return list(np.random.default_rng(1).normal(size=shape))


def check(
    fn: Any, params: Any, batches: Any, hand: Sequence[Gauge], clean: bool = False, taken: str = "whole", **options: Any
) -> Report:
    """Whether a list of the report and one written by hand have the same orbits, and whether it is all."""
    report = go.discover(fn, params, batches, progress=False, **options)
    with jax.enable_x64(True):
        point = near(params, 5)
        mine, theirs = orbit(getattr(report, taken), point), orbit(hand, point)
        assert outside(theirs, mine) < 1e-6, report
        assert outside(mine, theirs) < 1e-6, report
    assert eval(report.code(), {"go": go}) == report.gauges
    assert not clean or not (report.rejected or report.ungauged), report
    return report


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


@pytest.mark.slow_rows("queries, key, value of every group-partial", "heads of*-interleaved")
@pytest.mark.parametrize(("layout", "turn"), [
    *((layout, partial) for layout in FUSED), ("heads of query, key, value", interleaved), ("one key", interleaved)])
def test_rotary_heads_in_a_fused_kernel(layout: str, turn: Callable[[jax.Array], jax.Array]) -> None:
    """Rotary turns a part of every head, or all of it in the other pairing."""
    split, axes = FUSED[layout]

    def fn(p: Any, x: Any) -> jax.Array:
        q, k, v = split(x @ p["qkv"])
        return jnp.sin(flat(attention(turn(q), turn(k), v)) @ p["out"])

    def gauge(constructor: Callable[..., Gauge], *sides: dict[str, str], **options: Any) -> Gauge:
        named = {"part": 3, "head": KEYS if layout in COPIES else HEADS}
        text = " ".join(axes for side in sides for axes in side.values())
        return constructor(*sides, **options, sizes={name: n for name, n in named.items() if name in text})

    turned, still, whole = ([{"qkv": text} for text in axes(*ends)] for ends in ((0, 4), (4, 8), (0, 8)))
    if turn is partial:
        hand = [gauge(go.rope_linear, *turned[:2]), gauge(go.head_linear, *still[:2])]
    else:
        hand = [gauge(go.rope_linear, *whole[:2], pairing="interleaved")]
    hand.append(gauge(go.head_linear, whole[2], {"out": COPIES.get(layout, "(head basis) _")}))
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


# Parts of kernels: adaptive norms, queries beside gates, kernels that the model flattens, one factor ---------------

H, E = 2, 4
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
        q, k = ((half(y) if turns else y) for y in (q, k))
        mixed = attention(q, k, v)
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
