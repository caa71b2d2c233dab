"""Still planes of rotary, learned probes, multipliers per query head, fused biases, hidden means: missed once."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from gauge_optax.gauges.gauge import Gauge
from tests.discovery.axes_nets import attention, scan_of_scans
from tests.discovery.test_layouts import check, half, inputs

D, H, K, E, V, T = 8, 4, 2, 4, 11, 6
TOKENS = list(np.random.default_rng(0).integers(0, V, (2, 3, T)))


def drawn(seed: int = 0, /, **shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: 0.4 * rng.normal(size=shape) for name, shape in shapes.items()}


def normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-20)


def centred(x: jax.Array) -> jax.Array:
    return normalised(x - x.mean(-1, keepdims=True))


def by_head(x: jax.Array, *kernels: jax.Array) -> list[jax.Array]:
    return [jnp.einsum("btd,dhe->bthe", x, kernel) for kernel in kernels]


def explained(fn: Any, params: Any, *names: str) -> None:
    """Gauges with these names are found, and the gauges contain every dead direction."""
    report = go.discover(fn, params, inputs(2, 40, D), "predictions", progress=False)
    assert {gauge.name for gauge in report.whole} >= set(names), report
    found = report.certificate
    assert found.unexplained == 0 and max(gauge.seen for gauge in found.gauges) < 1e-8, found


def ungauged(fn: Any, params: Any, batches: Any, seed: int = 0) -> Mapping[str, tuple[str, ...]]:
    return go.discover(fn, params, batches, "predictions", seed=seed, progress=False).ungauged


@pytest.mark.slow
def test_a_learned_probe_has_query_and_key_matrices() -> None:
    """The query comes from a parameter, the same for every input: `q` has a matrix on either side."""

    def fn(p: Any, x: Any) -> jax.Array:
        (q,) = by_head(jnp.tile(p["probe"], (len(x), 1, 1)), p["q"])
        mixed = attention(q + p["bias"], *by_head(jnp.tanh(x @ p["in"]), p["k"], p["v"]))
        return jnp.sin(jnp.einsum("bqhe,hed->bqd", mixed, p["o"]))[:, 0]

    kernels = dict.fromkeys("qkv", (D, 2, E))
    params = drawn(**kernels, **{"in": (6, D)}, o=(2, E, D), bias=(2, E), probe=(1, 1, D))
    hand = [
        go.head_linear({"q": "_ head basis", "bias": "head basis"}, {"k": "_ head basis"}),
        go.head_linear({"v": "_ head basis"}, {"o": "head basis _"}),
        go.head_linear({"probe": "_ _ basis"}, {"q": "basis _ _"}),
    ]
    assert not check(fn, params, inputs(2, 5, 7, 6), hand, outputs="loss").rejected


@pytest.mark.slow
def test_biases_of_a_fused_kernel() -> None:
    """Query, key and value in one leaf: the norm's bias flows into all of it, its value part into the output's bias."""

    def fn(p: Any, tokens: Any) -> jax.Array:
        y = centred(p["embed"][tokens]) * p["scale"] + p["shift"]
        q, k, v = jnp.split((y @ p["qkv"] + p["bias"]).reshape(*y.shape[:2], 3 * H, E), 3, axis=2)
        return jnp.sin(attention(q, k, v).reshape(*y.shape[:2], -1) @ p["o"] + p["out"])

    params = drawn(
        embed=(V, D), qkv=(D, 3 * H * E), bias=(3 * H * E,), o=(H * E, D), out=(D,), scale=(D,), shift=(D,))
    report: Any = go.discover(fn, params, TOKENS, outputs="loss", progress=False)
    found = {(gauge.name, *sorted({spec.pattern for spec in gauge.specs})) for gauge in report.whole}
    assert {
        ("bias_absorption", "bias", "qkv", "shift"), ("bias_absorption", "bias", "o", "out"), ("key_bias", "bias"),
        ("norm_read_shift", "bias", "qkv", "scale", "shift"), ("norm_write_shift", "embed"),
    } <= found, report
    assert not report.rejected and not report.ungauged, report


@pytest.mark.parametrize(("layer", "factor", "beside"), [
    (True, 4.0, 0), (False, 1.0, 0), (False, 4.0, 0), (True, 1.0, 3), (False, 1.0, 3),
])
def test_what_a_norm_of_a_layer_or_of_the_data_hides(layer: bool, factor: float, beside: int) -> None:
    """The scale is multiplied with the data, or with a constant before it is. The kernel may read other values too."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = centred(jnp.tanh(x @ p["first"]) if layer else x) * (factor * p["scale"]) + p["shift"]
        y = jnp.concatenate([jnp.tanh(x @ p["other"]), y], -1) if beside else y
        return jnp.sin(jax.nn.silu(y @ p["up"] + p["bias"]) @ p["down"])

    params = drawn(scale=(D,), shift=(D,), up=(D + beside, 5), bias=(5,), down=(5, 3))
    params |= (drawn(first=(D, D)) if layer else {}) | (drawn(other=(D, beside)) if beside else {})
    explained(fn, params, "norm_read_shift", "bias_absorption")


GATED: dict[str, Any] = {
    "halves": lambda y, u, v: jax.nn.silu(u) * v,
    "halves of an activation": lambda y, u, v: jnp.prod(jnp.stack(jnp.split(jax.nn.gelu(y), 2, -1)), 0),
    "mixed along the sequence": lambda y, u, v: u * (jnp.cumsum(jnp.exp(v), 1) + 1.0),
}


@pytest.mark.parametrize("gated", GATED)
def test_parts_of_one_kernel_that_multiply_each_other(gated: str) -> None:
    """The norm before the kernel hides a number per output, and its bias flows into all parts of the bias behind."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = (centred(jnp.tanh(x @ p["first"])) * p["scale"] + p["shift"]) @ p["up"] + p["bias"]
        return jnp.sin(GATED[gated](y, *jnp.split(y, 2, -1)) @ p["down"])

    params = drawn(first=(D, D), scale=(D,), shift=(D,), up=(D, 8), bias=(8,), down=(4, 3))
    explained(fn, params, "norm_read_shift", "bias_absorption")


# Nets with all their gauges ---------------------------------------------------------------------------------


def still_planes(p: Any, x: Any) -> jax.Array:
    """Planes that rotary leaves still have all matrices."""
    q, k, v = by_head(x, p["q"], p["k"], p["v"])
    return jnp.sin(jnp.einsum("bthe,hed->btd", attention(half(q, still=2), half(k, still=2), v), p["o"]))


def multipliers(p: Any, x: Any) -> jax.Array:
    """One per query head of a group, and one per key."""
    q, k, v = by_head(x, p["q"], p["k"], p["v"])
    k, v = (jnp.repeat(y, H // K, 2) for y in (k * p["of_key"][:, None], v))
    return jnp.sin(jnp.einsum("bthe,hed->btd", attention(q * p["of_query"][:, None], k, v), p["o"]))


def divided_parts(p: Any, x: Any) -> jax.Array:
    """Layers in one leaf that a Python loop takes out by index, and halves of a kernel, each divided by its norm."""
    for k in range(2):
        x = jnp.tanh(x @ (p["layers"][k] / jnp.linalg.norm(p["layers"][k])))
    gate, up = (x @ (half / jnp.linalg.norm(half)) for half in jnp.split(p["up"], 2, -1))
    return jnp.sin((jax.nn.silu(gate) * jnp.tanh(up)) @ p["down"])


def in_turns(p: Any, x: Any) -> jax.Array:
    """Gates and channels that take turns in one kernel, whose bias moves along."""
    y = x @ p["fused"] + p["bias"]
    return jnp.sin((jax.nn.silu(y[..., ::2]) * y[..., 1::2]) @ p["down"])


def concatenated(p: Any, x: Any) -> jax.Array:
    """Heads and a gated layer beside them."""
    q, k, v = (y.reshape(*x.shape[:2], H, E) for y in (x @ p["q"], x @ p["k"], x @ p["v"]))
    gated = jax.nn.silu(x @ p["gate"]) * (x @ p["up"])
    return jnp.sin(jnp.concatenate([attention(q, k, v).reshape(*x.shape[:2], -1), gated], -1) @ p["out"])


def dense(p: Any, x: Any) -> jax.Array:
    """As in DenseNet: each kernel reads one range per earlier layer, and what came in."""
    for k in range(4):
        x = jnp.concatenate([x, jax.nn.relu(x @ p[f"up{k}"])], -1)
    return jnp.sin(x @ p["up4"])


def at_two_places(p: Any, x: Any) -> jax.Array:
    """Concatenated with its neighbour in the sequence, and with itself after a ReLU of the other sign."""
    y = x @ p["first"]
    y = jnp.tanh(jnp.concatenate([y[:, :-1], y[:, 1:]], -1) @ p["pairs"]) @ p["both"]
    return jnp.sin(jnp.concatenate([jax.nn.relu(y), jax.nn.relu(-y)], -1) @ p["last"])


def sums(p: Any, x: Any) -> jax.Array:
    """Biases of parallel branches, of one stacked layer too, and two tables of positions: they trade every entry."""
    y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w["up"] + w["a"] + w["b"]), None), x, p["layers"])
    return jnp.sin(y @ p["out"] + p["c"] + p["d"] + p["e"] + p["first"] + p["second"])


def post_norm(p: Any, tokens: Any) -> jax.Array:
    """The next layer is added to the norm's output, so that the norm's scale cannot move into a kernel, and stays."""
    y = centred(p["embed"][tokens]) * p["scale"]
    y = centred(y + jax.nn.silu(y @ p["up"] + p["bias"]) @ p["down"]) * p["last"]
    return jnp.sin(jax.nn.log_softmax(y @ p["head"]))


HAND: dict[str, tuple[Any, dict[str, Any], Any, list[Gauge]]] = {
    "still planes": (still_planes, drawn(**dict.fromkeys("qkv", (D, 2, 8)), o=(2, 8, D)), inputs(2, 3, T, D), [
        go.rope_linear({"q": "_ head basis=0:2+4:6"}, {"k": "_ head basis=0:2+4:6"}),
        go.head_linear({"q": "_ head basis=2:4+6:8"}, {"k": "_ head basis=2:4+6:8"}),
        go.head_linear({"v": "_ head basis"}, {"o": "head basis _"})]),
    "multipliers": (
        multipliers, drawn(q=(D, H, E), k=(D, K, E), v=(D, K, E), o=(H, E, D), of_query=(H,), of_key=(K,)),
        inputs(2, 3, T, D), [
            go.rescale({"of_query": "head"}, {"q": "_ head _"}),  # four elements, not one per group
            go.rescale({"of_key": "head"}, {"k": "_ head _"}),
            go.head_linear({"q": "_ (head _) basis"}, {"k": "_ head basis"}, sizes={"head": K}),
            go.head_linear({"v": "_ head basis"}, {"o": "(head _) basis _"}, sizes={"head": K})]),
    "divided parts": (divided_parts, drawn(layers=(2, D, D), up=(D, 8), down=(4, 3)), inputs(2, 6, D), [
        *(go.scale_invariant({"layers": f"layer={k} _ _"}) for k in range(2)),
        *(go.scale_invariant({"up": f"_ _={k}:{k + 4}"}) for k in (0, 4))]),
    "in turns": (in_turns, drawn(fused=(D, 12), bias=(12,), down=(6, D)), inputs(2, 6, D), [
        go.rescale({"fused": "_ (channel turn=1)", "bias": "(channel turn=1)"}, {"down": "channel _"},
                   sizes={"turn": 2})]),
    "concatenated": (
        concatenated, drawn(**dict.fromkeys("qkv", (D, H * E)), gate=(D, 5), up=(D, 5), out=(H * E + 5, D)),
        inputs(2, 3, T, D), [
            go.head_linear({"q": "_ (head basis)"}, {"k": "_ (head basis)"}, sizes={"head": H}),
            go.head_linear({"v": "_ (head basis)"}, {"out": f"(head basis)=0:{H * E} _"}, sizes={"head": H}),
            go.rescale({"up": "_ channel"}, {"out": f"channel={H * E}:{H * E + 5} _"})]),
    "dense": (dense, drawn(**{f"up{k}": (5 + 3 * k, 3) for k in range(5)}), inputs(2, 40, 5), [
        go.rescale({f"up{k}": "_ channel"}, {f"up{n}": f"channel={5 + 3 * k}:{8 + 3 * k} _" for n in range(k + 1, 5)})
        for k in range(4)]),
    "at two places": (
        at_two_places, drawn(first=(D, 5), pairs=(10, 6), both=(6, 4), last=(8, 3)), inputs(2, 3, T, D), [
            go.head_linear({"first": "_ basis"}, {"pairs": "(_ basis) _"}),
            go.rescale({"both": "_ channel"}, {"last": "(_ channel) _"})]),
    "sums": (
        sums, drawn(out=(4, 3), c=(3,), d=(3,), e=(3,), first=(5, 3), second=(5, 3)) | {
            "layers": drawn(1, up=(1, 4, 4), a=(1, 4), b=(1, 4))}, inputs(2, 6, 5, 4), [
            go.embedding_shift({"layers/a": "only=0 channel"}, {"layers/b": "only=0 channel"}),
            go.embedding_shift({"first": "row channel"}, {"second": "row channel"}),
            go.embedding_shift({"c": "channel"}, {"d": "channel"}),
            go.embedding_shift({"d": "channel"}, {"e": "channel"}),
            go.embedding_shift({"first": "_ channel"}, {"d": "channel"})]),
    "post-norm": (
        post_norm, drawn(embed=(V, D), up=(D, 5), bias=(5,), down=(5, D), head=(D, V)) | {
            "scale": np.ones(D), "last": np.ones(D)}, TOKENS, [
            go.norm_write_shift({"embed": "_ channel"}),
            go.norm_write_shift({"down": "_ channel"}),
            go.norm_read_shift({"up": "channel _"}, scale={"scale": "channel"}),
            go.norm_read_shift({"head": "channel _"}, scale={"last": "channel"}),
            go.norm_scale({"last": "channel"}, {"head": "channel _"}),
            go.rescale({"down": "_ _", "scale": "_"}, {"up": "_ _"}),
            go.scale_invariant({"embed": "row _"}),
            go.logit_shift({"head": "_ vocab"})]),
}


@pytest.mark.slow_rows("concatenated", "still planes", "multipliers")
@pytest.mark.parametrize("name", HAND)
def test_every_gauge_by_hand_is_found(name: str) -> None:
    fn, params, batches, hand = HAND[name]
    check(fn, params, batches, hand, name in ("concatenated", "dense", "at two places", "post-norm"), outputs="loss")


# Parts of nets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [lambda x: x, lambda x: x + jnp.sin(centred(x))])
def test_a_constant_on_a_whole_tied_table_is_found(between: Any) -> None:
    """The norm hides what rows gain, the softmax what logits gain. A table of positions makes it another gauge's."""
    rng = np.random.default_rng(0)
    params = {"table": rng.normal(size=(11, 6)), "scale": rng.uniform(0.5, 2.0, 6)}
    tokens = list(rng.integers(11, size=(2, 3, 20)))

    def found(seed: int = 0, **more: Any) -> list[go.Gauge]:
        def fn(p: Any, batch: Any) -> jax.Array:
            x = between(p["table"][batch] + p.get("positions", 0.0))
            return (centred(x) * p["scale"]) @ p.get("head", p["table"].T)

        report = go.discover(fn, params | more, tokens, "logits", seed=seed, progress=False)
        assert not report.ungauged
        return list(report.whole)

    for seed in range(2):
        assert go.norm_write_shift(tied={"table": "vocab channel"}) in found(seed)
    names = [gauge.name for gauge in found(**drawn(2, positions=(20, 6)))]
    assert names.count("embedding_shift") == names.count("norm_write_shift") == 1
    assert any(gauge.name == "norm_write_shift" for gauge in found(head=params["table"].T + 0.1))


@pytest.mark.parametrize(("norm", "width"), [("none", 5), ("centred", 8), ("none", 8), ("centred", 9)])
def test_a_part_of_a_bias_that_its_kernel_maps_to_nothing_is_named(norm: str, width: int) -> None:
    """A bias of 8 entries in front of a kernel with fewer outputs, or as many where a norm hides their mean."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = (jnp.tanh(x[:, :1]) * (x @ p["up"]) + p["bias"]) @ p["down"]
        return jnp.sin((centred(y) if norm == "centred" else jnp.cos(y)) @ p["head"])

    kind = "a part of a bias that the kernel behind it maps to nothing that is read"
    named = ungauged(fn, drawn(up=(4, 8), bias=(8,), down=(8, width), head=(width, 7)), inputs(2, 40, 4))
    assert (kind in named) == (width < 8 or (norm == "centred" and width == 8))


@pytest.mark.parametrize(("form", "classes", "named"), [
    ("sum", 3, "down + first"), ("sum", 9, ""), ("gained", 3, "shift"), ("gained", 9, "")])
def test_a_part_of_a_kernel_that_the_kernel_behind_it_maps_to_nothing_is_named(
    form: str, classes: int, named: str
) -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        y = jnp.tanh(x @ p["up"])
        y = y @ p["down"] + x @ p["first"] if form == "sum" else y * (x @ p["gain"]) + x @ p["shift"] + p["bias"]
        return jnp.sin(y @ p["head"])

    shapes = {"down": (8, 8), "first": (4, 8)} if form == "sum" else {"gain": (4, 8), "shift": (4, 8), "bias": (8,)}
    found = ungauged(fn, drawn(up=(4, 8), **shapes, head=(8, classes)), inputs(2, 40, 4))
    kind = "a part of what a kernel writes that the kernels behind it map to nothing that is read"
    assert set(found.get(kind, ())) == set(named.split(" + ") if named else ()), found


KINDS = np.arange(40) % D
MODULATED: dict[str, tuple[Any, str]] = {
    "halves of one kernel": (lambda p, y, g, h, x: y * (1 + g) + h, "bias + both + c"),
    "two kernels": (lambda p, y, g, h, x: y * (x @ p["gain"]) + x @ p["shift"] + p["b"], "bias + shift"),
    "vectors": (lambda p, y, g, h, x: y * p["a"] + p["b"], "bias + b"),
    "tables": (lambda p, y, g, h, x: y * (1 + p["gain"][KINDS]) + p["shift"][KINDS], "bias + shift"),
    "no shift": (lambda p, y, g, h, x: y * (1 + g) + jnp.sin(h), ""),
}


@pytest.mark.parametrize("how", MODULATED)
def test_a_bias_in_front_of_a_gain_and_a_shift_is_named(how: str) -> None:
    """As in FiLM: what computes the shift takes away what the bias gains, times what computes the gain."""
    modulated, moved = MODULATED[how]

    def fn(p: Any, x: Any) -> jax.Array:
        gain, shift = jnp.split(x @ p["both"] + p["c"], 2, -1)
        return jnp.sin(jax.nn.silu(modulated(p, x[..., :3] @ p["in"] + p["bias"], gain, shift, x)) @ p["out"])

    params = drawn(**{"in": (3, 4)}, bias=(4,), out=(4, 3), both=(D, 8), c=(8,), a=(4,), b=(4,))
    params |= drawn(1, gain=(D, 4), shift=(D, 4))
    kind = "a bias in front of a gain, which the leaves that compute the shift behind the gain take away"
    assert ungauged(fn, params, inputs(2, 40, D)) == ({kind: (moved,)} if moved else {})


@pytest.mark.parametrize(("norm", "last", "named"), [
    (centred, False, True), (centred, True, False), (normalised, False, False)])
def test_the_mean_of_a_stream_that_a_head_reads_past_the_norms_is_named(norm: Any, last: bool, named: bool) -> None:
    """A stream of MLPs: with a centred norm before each and none before the head, x may gain c·x in every entry."""

    def fn(p: Any, x: Any) -> jax.Array:
        x = jnp.tanh(x) @ p["in"]
        x = x + jnp.sin(norm(x) @ p["up"]) @ p["down"]
        x = x + jnp.cos(norm(x) @ p["wide"]) @ p["narrow"]
        return jnp.sin((norm(x) if last else x) @ p["head"])

    params = drawn(**{"in": (5, 6)}, up=(6, 7), down=(7, 6), wide=(6, 8), narrow=(8, 6), head=(6, 4))
    kind = "the mean of a stream, which centred norms or a softmax hide, and which a kernel reads past them"
    for seed in range(2):
        found = ungauged(fn, params, inputs(2, 60, 5), seed)
        assert found == ({kind: ("down + head + in + narrow",)} if named else {})


def test_a_norm_behind_a_sublayer_gives_its_bias_to_the_next_sublayers(x64: None) -> None:
    """As in BERT: the stream carries its bias on, to the biases behind its readers and to that of the next sublayer."""
    params = drawn(embed=(9, 5), head=(5, 7), head_bias=(7,), norm=(5,), bias=(5,))
    for k in range(2):
        block = drawn(k + 1, up=(5, 6), up_bias=(6,), down=(6, 5), down_bias=(5,), norm=(5,), bias=(5,))
        params |= {f"{name}{k}": x for name, x in block.items()}

    def fn(p: Any, x: Any) -> jax.Array:
        x = centred(x @ p["embed"]) * p["norm"] + p["bias"]
        for k in range(2):
            written = jnp.tanh(x @ p[f"up{k}"] + p[f"up_bias{k}"]) @ p[f"down{k}"] + p[f"down_bias{k}"]
            x = centred(x + written) * p[f"norm{k}"] + p[f"bias{k}"]
        return x @ p["head"] + p["head_bias"]

    report = go.discover(fn, params, inputs(2, 60, 9), "logits", progress=False)
    assert not report.ungauged
    group: Any = go.product(report.whole)
    moved = [{spec.pattern for spec in gauge.specs} for gauge in group.gauges if gauge.name == "bias_absorption"]
    assert {"bias", "up0", "up_bias0", "down_bias0"} in moved and {"bias0", "up1", "up_bias1", "down_bias1"} in moved
    assert go.measure.census(fn, params, inputs(2, 60, 9), group, progress=False).unexplained == 0


@pytest.mark.parametrize(("first", "second", "missed"), [
    ("weight", "plain", 0), ("plain", "weight", 4), ("weight", "weight", 4), ("spectral", "plain", 4)])
def test_factors_of_units_in_a_kernel_divided_by_its_norm_are_not_found(first: str, second: str, missed: int) -> None:
    """Of five ReLU units, as docs/design.md says: these moves are no powers of the units' factors."""

    def kernel(p: Any, kind: str) -> jax.Array:
        w = p["kernel"]
        size = jnp.linalg.norm(w, axis=0) if kind == "weight" else jnp.linalg.norm(w, 2) if kind == "spectral" else 1.0
        return w / size * (p["length"] if kind == "weight" else 1.0)

    def fn(p: Any, x: Any) -> jax.Array:
        y = jax.nn.relu(x @ kernel(p["up"], first) + p["bias"])
        return jnp.sin(y @ kernel(p["down"], second))

    params: dict[str, Any] = {"bias": np.ones(5)}
    for name, kind, shape in (("up", first, (4, 5)), ("down", second, (5, 3))):
        params[name] = drawn(1, kernel=shape) | ({"length": np.ones(shape[1])} if kind == "weight" else {})
    report = go.discover(fn, params, inputs(2, 60, 4), "predictions", progress=False)
    assert report.certificate.unexplained == missed and not report.rejected and not report.ungauged


def test_a_scan_of_scans_has_two_axes_of_layers() -> None:
    """Both were called `layer`, and the model was refused."""
    (gauge,) = go.discover(
        scan_of_scans, drawn(up=(2, 3, D, 5), down=(2, 3, 5, D)), inputs(2, 9, D), "loss", progress=False).gauges
    assert gauge == go.rescale({"up": "layer layer1 _ channel"}, {"down": "layer layer1 channel _"})


@pytest.mark.skipif("axis" not in inspect.signature(jax.lax.top_k).parameters, reason="a newer JAX's argument")
def test_the_largest_along_another_axis_than_the_last() -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        return jax.lax.top_k(jax.nn.relu(x @ p["up"]), 2, axis=0)[0] @ p["down"]

    explained(fn, drawn(up=(D, 5), down=(5, 3)), "rescale")


@pytest.mark.parametrize("last", [1, 2])
def test_ragged_experts_have_a_scale_per_unit(last: int) -> None:
    """Their derivative has no rule for `vmap`; the kernel's contracted axis may be its last one."""
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (last,)), ((), ())), (0,), (0,))

    def fn(p: Any, x: Any) -> jax.Array:
        up = jax.lax.ragged_dot_general(x, p["up"], jnp.array([30, 10]), numbers)
        return jax.lax.ragged_dot(jax.nn.relu(up), p["down"], jnp.array([30, 10]))

    explained(fn, drawn(up=(2, D, 5) if last == 1 else (2, 5, D), down=(2, 5, 3)), "rescale")


def test_experts_that_are_taken_by_index_have_a_scale_per_unit() -> None:
    """Found was one per unit, which all experts share, and none where one is added to the biases' products."""

    def fn(p: Any, x: Any) -> jax.Array:
        share, chosen = jax.lax.top_k(x @ p["router"], 2)
        y = p["bias"][chosen] + jnp.einsum("td,tedf->tef", x, p["up"][chosen])
        y = jnp.einsum("tef,tefd->ted", (1.0 + y[..., ::2]) * jax.nn.silu(y[..., 1::2]), p["down"][chosen])
        return jnp.sin(jnp.einsum("ted,te->td", y, jax.nn.softmax(share)))

    explained(fn, drawn(router=(D, 3), up=(3, D, 6), bias=(3, 6), down=(3, 3, 5)), "rescale")


def test_rows_that_a_router_scatters_keep_their_columns() -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        share = jax.nn.softmax(x @ p["router"])
        order = jnp.argsort(jnp.argmax(share, -1))
        y = jax.nn.relu(x @ p["up"]) @ p["down"] * jnp.max(share, -1, keepdims=True)
        return jnp.zeros_like(y).at[order].set(y[order]) @ p["head"]

    params = drawn(router=(D, 3), up=(D, 5), down=(5, 3), head=(3, 4))
    explained(fn, params, "head_linear", "rescale", "logit_shift")


def test_a_channel_with_two_filters_of_a_depthwise_convolution_has_a_scale() -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        y = jax.nn.relu(x.reshape(-1, 4, 2, D) @ p["up"])
        y = jax.lax.conv_general_dilated(y, p["filters"], (1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"), 5)
        return jnp.tanh(y).mean((1, 2)) @ p["down"]

    explained(fn, drawn(up=(D, 5), filters=(2, 2, 1, 10), down=(10, 3)), "rescale")


@pytest.mark.parametrize("whole", [True, False])
def test_a_norm_over_several_places_of_a_stream(whole: bool) -> None:
    """Its bias has a part per place, and each part turns; the search ended in an error of shapes."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = (x @ p["in"]).reshape(-1, 2, 4)
        y = y + jnp.sin(centred(y) @ p["up"]) @ p["down"]
        places = y.reshape(len(y), -1) if whole else jnp.concatenate([y[:, 0], x[::2, :2], y[:, 1]], -1)
        return jnp.sin((centred(places) * p["scale"] + p["bias"]) @ p["out"])

    size = 8 if whole else 10
    params = drawn(**{"in": (D, 4)}, up=(4, 5), down=(5, 4), scale=(size,), bias=(size,), out=(size, 9))
    report = go.discover(fn, params, inputs(2, 40, D), "predictions", progress=False)
    assert "residual_rotation" in {gauge.name for gauge in report.whole}, report


def test_the_scale_of_a_layer_stands_between_a_kernel_and_the_mean_that_norms_hide() -> None:
    """LayerScale, as in ConvNeXt: the kernel and bias before it gain u/γ. None of it was named."""

    def fn(p: Any, x: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            y = jnp.sin(centred(x) @ w["up"]) @ w["down"] + w["bias"]
            return x + (1.0 + w["scale"]) * y, None

        x = jax.lax.scan(layer, jnp.sin(p["in"] * x), p["layers"])[0]
        return jnp.sin(centred(x) @ p["head"])

    layers = drawn(up=(2, D, 3), down=(2, 3, D), bias=(2, D), scale=(2, D))
    explained(fn, drawn(**{"in": (D,)}, head=(D, 6)) | {"layers": layers}, "norm_read_shift")


@pytest.mark.parametrize("mean", [False, True])
def test_a_stream_turns_through_the_scales_of_its_layers(mean: bool) -> None:
    """As in DINOv2: a layer's kernel and bias write to the stream through a trained scale, in every layer its own."""

    def norm(x: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True) if mean else x
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 0.1)

    def fn(p: Any, x: Any) -> jax.Array:
        x = jnp.tanh(x) @ p["in"]
        for w in p["layers"]:
            x = x + w["scale"] * (jnp.sin(norm(x) * w["norm"] @ w["up"]) @ w["down"] + w["bias"])
        return jnp.sin(norm(x) @ p["head"])

    layers = [drawn(k, norm=(6,), up=(6, 7), down=(7, 6), bias=(6,), scale=(6,)) for k in range(2)]
    explained(fn, drawn(**{"in": (D, 6)}, head=(6, 5)) | {"layers": layers}, "residual_rotation", "norm_scale")


def test_a_vector_on_every_row_of_a_table_whose_rows_are_concatenated() -> None:
    """The bias of the kernel that reads the concatenation takes it away."""

    def fn(p: Any, ids: Any) -> jax.Array:
        return jnp.tanh(jnp.concatenate([p["user"][ids], p["item"][ids]], -1) @ p["w"] + p["bias"])

    params = drawn(user=(5, 3), item=(5, 2), w=(5, 6), bias=(6,))
    ids = [np.random.default_rng(k).integers(0, 5, 20) for k in range(2)]
    assert set(*ungauged(fn, params, ids).values()) == {"item + bias", "user + bias"}


def test_the_key_part_of_a_fused_bias_is_reached_by_every_batch() -> None:
    """It has a gauge, and no other batch would show an effect of it."""

    def fn(p: Any, x: Any) -> jax.Array:
        q, k, v = jnp.split(x @ p["qkv"] + p["bias"], 3, -1)
        return jnp.sin(jax.nn.softmax(q @ k.T) @ v)

    report = go.discover(fn, drawn(qkv=(3, 6), bias=(6,)), inputs(2, 5, 3), "loss", progress=False)
    assert "key_bias" in {gauge.name for gauge in report.whole} and not report.uncovered, report


def test_a_kernel_that_reads_one_norm_twice() -> None:
    """As a message of a graph network reads both ends of an edge: the second part's gauge took the first's place.

    A vector on the norm's bias, which both parts read, is named once, and no half of it is called refuted.
    """

    def fn(p: Any, x: Any) -> jax.Array:
        y = centred(x) * p["scale"] + p["shift"]
        message = jnp.concatenate([jnp.roll(y, 1, 0), y], -1) @ p["up"] + p["bias"]
        return jnp.sin(jax.nn.silu(message) @ p["down"])

    params = drawn(scale=(4,), shift=(4,), up=(8, 5), bias=(5,), down=(5, 3))
    report = go.discover(fn, params, inputs(2, 40, 4), "predictions", progress=False)
    assert sum(gauge.dim(params) for gauge in report.whole if gauge.name == "norm_read_shift") == 10, report
    assert [*report.ungauged.values()] == [("shift + bias",)] and not report.rejected, report


@pytest.mark.parametrize("grouped", [True, False])
def test_a_kernel_whose_outputs_are_added_to_what_it_reads(grouped: bool) -> None:
    """Both of its axes are along one space, or along the same two. What the norm hides was neither found nor named."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = centred(jnp.tanh(x @ p["first"])) * p["scale"] + p["shift"]
        y = y + jax.nn.silu(y @ p["w"] + p["bias"])
        if grouped:
            y = y + jnp.tanh(jnp.einsum("bhe,hef->bhf", y.reshape(-1, 2, 2), p["groups"])).reshape(-1, 4)
        return jnp.sin(y @ p["out"])

    params = drawn(first=(D, 4), scale=(4,), shift=(4,), w=(4, 4), bias=(4,), out=(4, 5), groups=(2, 2, 2))
    report = go.discover(fn, params, inputs(2, 40, D), "predictions", progress=False)
    hidden = "a direction that a centred norm hides from the kernel behind it"
    found = [*report.ungauged.get(hidden, ()), *(gauge.name for gauge in report.whole)]
    assert found == (["w + bias"] if grouped else ["norm_read_shift"]), report


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_vectors_behind_a_norm_turn_layer_by_layer_and_head_by_head(stacked: bool, heads: bool) -> None:
    """A norm's scale hid the rotation of a latent vector between two kernels, or of a head; heads share the scale."""

    def layer(x: jax.Array, q: Any) -> tuple[jax.Array, None]:
        latent = normalised(jnp.tensordot(x, q["down"], 1)) * q["scale"]
        return x + jnp.sin(jnp.tensordot(latent, q["up"], 2 if heads else 1)).prod(-2), None

    def fn(p: Any, x: Any) -> jax.Array:
        if stacked:
            return jax.lax.scan(layer, x, p)[0]
        return functools.reduce(lambda x, q: layer(x, q)[0], p.values(), x)

    head = (2,) if heads else ()
    params = drawn(down=(2, D, *head, 4), scale=(2, 4), up=(2, *head, 4, 3, D))
    params = params if stacked else {str(i): {name: x[i] for name, x in params.items()} for i in range(2)}
    explained(fn, params, "residual_rotation", "norm_scale")


def test_a_scale_and_a_bias_that_no_module_holds_are_of_one_norm() -> None:
    """The leaves of a flat tree have no modules: the readers tell which scale and bias are of one norm."""

    def fn(p: Any, x: Any) -> jax.Array:
        return jnp.sin((centred(x @ p["down"]) * p["scale"] + p["bias"]) @ p["up"])

    params = drawn(down=(D, 4), scale=(4,), bias=(4,), up=(4, 9))
    assert list(ungauged(fn, params, inputs(2, 40, D)).values()) == [("bias + up",)]


def test_a_code_book_behind_stop_gradient_is_no_bias_without_effect() -> None:
    """As in VQ-VAE: no gradient reaches the code book, but it was called a bias without effect, and also refuted."""

    def fn(p: Any, x: Any) -> jax.Array:
        z = x @ p["encode"]
        code = p["book"][jnp.argmin(jnp.square(z[:, None] - p["book"]).sum(-1), -1)]
        return jnp.sin((z + jax.lax.stop_gradient(code - z)) @ p["decode"])

    params = drawn(encode=(D, 3), book=(5, 3), decode=(3, 4))
    report = go.discover(fn, params, inputs(2, 40, D), "predictions", progress=False)
    assert not report.ungauged and [row.startswith("book: no gradient") for row in report.rejected] == [True, False]


@pytest.mark.parametrize("stacked", [True, False])
def test_one_number_on_a_bias_in_front_of_a_kernel_along_another_axis_is_named(stacked: bool) -> None:
    """As in MLP-Mixer: the kernel mixes places, and reads the number at each of them."""

    def layer(x: jax.Array, q: Any) -> tuple[jax.Array, None]:
        y = jnp.einsum("bsd,st->btd", centred(x) * q["scale"] + q["shift"], q["mix"]) + q["bias"][:, None]
        return x + jnp.sin(y), None

    def fn(p: Any, x: Any) -> jax.Array:
        x = jnp.tanh(x.reshape(-1, 3, D))
        return jnp.sin(jax.lax.scan(layer, x, p)[0] if stacked else layer(x, p)[0])

    leaves = {"scale": (D,), "shift": (D,), "mix": (3, 3), "bias": (3,)}
    found = ungauged(fn, drawn(**{name: (2,) * stacked + x for name, x in leaves.items()}), inputs(2, 60, D))
    assert list(found.values()) == [("shift + bias",)]


def test_the_bias_of_a_norm_flows_through_a_kernel_that_gates_what_it_reads() -> None:
    """As in AlphaFold: both axes of the gate's kernel are along the stream, and its bias was passed over."""

    def fn(p: Any, x: Any) -> jax.Array:
        x = jnp.tanh(x @ p["first"])
        y = centred(x) * p["scale"] + p["shift"]
        x = x + jax.nn.sigmoid(y @ p["gate"] + p["gate_bias"]) * (jnp.sin(y @ p["up"] + p["up_bias"]) @ p["down"])
        return jnp.sin(x @ p["out"])

    params = drawn(first=(D, 4), scale=(4,), shift=(4,), gate=(4, 4), gate_bias=(4,), up=(4, 5), up_bias=(5,))
    explained(fn, params | drawn(1, down=(5, 4), out=(4, 5)), "bias_absorption", "norm_read_shift")


def test_two_biases_in_front_of_a_norm_of_groups_have_one_gauge() -> None:
    """As in a UNet whose time embedding is added in front of a GroupNorm: the gauge was refused beside itself."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = x[:, :3] @ p["w"] + p["bias"] + jnp.sin(x[:, 3:]) @ p["time"] + p["shift"]
        return jnp.sin(jax.nn.silu(centred(y.reshape(-1, 2, 3)).reshape(-1, 6) * p["scale"]) @ p["out"])

    params = drawn(w=(3, 6), bias=(6,), time=(D - 3, 6), shift=(6,), scale=(6,), out=(6, 4))
    report = go.discover(fn, params, inputs(2, 40, D), "predictions", progress=False)
    assert [gauge.name for gauge in report.whole].count("embedding_shift") == 1 and not report.rejected, report


@pytest.mark.parametrize("net", ["tucker", "outer product mean", "linear layers"])
def test_a_kernel_with_a_matrix_on_either_side(net: str) -> None:
    """Tucker fusion, AlphaFold's outer product mean, and linear layers: one of two gauges was refused, as cyclic."""

    def fn(p: Any, x: Any) -> jax.Array:
        if net == "linear layers":
            return jnp.sin(x @ p["a"] @ p["core"] @ p["b"].T)
        a, b = jnp.tanh(x[:, :4]) @ p["a"][:4] + p["bias"], jnp.sin(x) @ p["b"]
        if net == "tucker":
            return jnp.sin(jnp.einsum("bi,bj,ijk->bk", a, b, p["core"]))
        return jnp.sin(jnp.einsum("bi,bj->bij", a, b).reshape(len(x), -1) @ p["core"])

    core = {"tucker": (2, 3, 5), "outer product mean": (6, 5), "linear layers": (3, 3)}[net]
    params = drawn(a=(4, 3 if net == "linear layers" else 2), b=(D, 3), core=core)
    params |= {} if net == "linear layers" else drawn(1, bias=(2,))
    batches = inputs(2, 40, 4 if net == "linear layers" else D)
    report = go.discover(fn, params, batches, "predictions", progress=False)
    assert [gauge.name for gauge in report.whole] == ["head_linear"] * 2 and not report.rejected, report
    assert go.bind(report.turning, params).dim == (6 if net == "linear layers" else 4), net
    assert report.certificate.unexplained == 0


@pytest.mark.parametrize("more", [(), (3,)])
def test_two_kernels_that_are_multiplied_entry_by_entry_have_a_factor_per_entry(more: tuple[int, ...]) -> None:
    """As the scales of the splines of a KAN. A factor per row was found, and one per column was refused as cyclic."""

    def fn(p: Any, x: Any) -> jax.Array:
        kernel = p["kernel"] * p["scale"].reshape(D, 4, *[1] * len(more))
        powers = jnp.stack([jnp.sin(k * x) for k in range(1, 4)], -1)
        return jnp.sin(jnp.einsum("big,iog->bo", powers, kernel) if more else x @ kernel)

    report = go.discover(
        fn, drawn(kernel=(D, 4, *more), scale=(D, 4)), inputs(2, 40, D), "predictions", progress=False)
    assert [gauge.dim(drawn(kernel=(D, 4, *more), scale=(D, 4))) for gauge in report.whole] == [4 * D], report
    assert not report.rejected


def test_what_has_no_gauge_is_said_in_words_one_by_one() -> None:
    """Such rows were called "a constant added", and their leaves stood in one list."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = jnp.sin(x @ p["w"] * jnp.exp(p["logs"])) + jnp.cos(x @ p["v"] * jnp.exp(p["more"]))
        return jnp.sin(y + p["bias"] + 0.5 * p["half"])

    params = drawn(w=(D, 4), logs=(4,), v=(D, 4), more=(4,), bias=(4,), half=(4,))
    text = str(go.discover(fn, params, inputs(2, 40, D), "predictions", progress=False))
    assert "as to a scale that is stored as its logarithm: logs, w; more, v" in text, text
    assert "each times a number of its own: bias, half" in text, text


def test_layers_that_mix_their_values_with_shared_ones_by_trained_multipliers() -> None:
    """Value embeddings: each multiplier's factor is read from one leaf of its side, or else the matrices go."""

    def fn(p: Any, x: Any) -> jax.Array:
        shared = x[:, 4:] @ p["shared"]
        values = {k: p[f"lam{k}"][0] * (x[:, :4] @ p[f"v{k}"]) + p[f"lam{k}"][1] * shared for k in range(2)}
        return jnp.sin(jnp.sin(values[0] @ p["o0"]) + values[1] @ p["o1"])

    layers = [{f"v{k}": (4, 3), f"o{k}": (3, 5), f"lam{k}": (2,)} for k in range(2)]
    explained(fn, drawn(shared=(4, 3), **layers[0], **layers[1]), "head_linear", "rescale")


def test_scales_of_a_norm_over_all_heads_have_a_factor_per_plane() -> None:
    """As in OLMo 2, in front of rotary embeddings: the axes string of the halves of each head was malformed."""

    def fn(p: Any, x: Any) -> jax.Array:
        q, k = (half((normalised(x @ p[n]) * p[n + "_norm"]).reshape(-1, 4, 2, 4)) for n in "qk")
        return jnp.sin(attention(q, k, (x @ p["v"]).reshape(-1, 4, 2, 1)))

    params = drawn(q=(D, 8), k=(D, 8), q_norm=(8,), k_norm=(8,), v=(D, 2))
    report = go.discover(fn, params, inputs(2, 40, D), "loss", progress=False)
    (gauge,) = (gauge for gauge in report.gauges if gauge.name == "rescale")
    assert gauge.dim(params) == 4 and not report.ungauged, report


@pytest.mark.parametrize("outputs", [(), (1,), (2,)])
def test_a_kernel_of_a_single_output_is_a_kernel(outputs: tuple[int, ...]) -> None:
    """As in reward models: its norm had no `norm_scale`, so that the stream could not turn; no bias flowed through."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = x @ p["in"]
        y = y + jnp.sin((centred(y) * p["scale"] + p["shift"]) @ p["up"] + p["bias"]) @ p["down"]
        return jnp.sin((centred(y) * p["last"] + p["last_shift"]) @ p["head"] + p["out"])

    params = drawn(**{"in": (D, 4)}, scale=(4,), shift=(4,), up=(4, 3), bias=(3,), down=(3, 4), last=(4,))
    params |= drawn(1, last_shift=(4,), head=(4, *outputs), out=outputs)
    explained(fn, params, "norm_scale", "residual_rotation", "norm_read_shift", "bias_absorption")


def test_a_part_of_a_bias_in_front_of_a_single_output_is_named() -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        return jnp.sin((jnp.sin(x @ p["in"]) * x[:, :1] + p["bias"]) @ p["head"])

    found = ungauged(fn, drawn(**{"in": (D, 4)}, bias=(4,), head=(4, 1)), inputs(2, 40, D))
    assert [*found.values()] == [("bias",)]


@pytest.mark.parametrize("last", [(), (1,)])
def test_tables_with_one_number_per_row_trade_one_number(last: tuple[int, ...]) -> None:
    """As the biases of users and items in a recommender: neither found nor named, because an axis of one has no space.
    """

    def fn(p: Any, x: Any) -> jax.Array:
        first, second = (jnp.asarray(x[:, k] > 0, int) + 2 * jnp.asarray(x[:, k + 2] > 0, int) for k in (0, 1))
        return jnp.sin(p["user"][first] + p["item"][second] + p["bias"] + jnp.sin(x[:, :1] if last else x[:, 0]))

    params = drawn(user=(4, *last), item=(4, *last), bias=last)
    report = go.discover(fn, params, inputs(2, 60, D), "predictions", progress=False)
    assert [gauge.name for gauge in report.whole] == ["embedding_shift"] * 2, report
    assert report.certificate.unexplained == 0


def test_a_symmetry_that_is_found_twice_is_not_rejected_once() -> None:
    """DCN-v2: the bias of a cross layer is stored less one. Where it was nearly −1, the second answer looked new."""

    def fn(p: Any, batch: Any) -> jax.Array:
        kinds, features = batch
        rows = jnp.stack([p[f"table{k}"][kinds[:, k]] for k in range(3)], 1)
        x = y = jnp.concatenate([rows.reshape(len(kinds), -1), features], -1)
        for k in range(2):
            y = x * (y @ p[f"down{k}"] @ p[f"up{k}"] + p[f"bias{k}"]) + y
        return (rows.sum(1) ** 2 - (rows**2).sum(1)).sum(-1) + y @ p["out"]

    rng, width = np.random.default_rng(0), 14
    params = drawn(out=(width,), **{f"table{k}": (7, 4) for k in range(3)})
    for k in range(2):
        params |= drawn(k + 1, **{f"down{k}": (width, 3), f"up{k}": (3, width), f"bias{k}": (width,)})
    batches = [(rng.integers(0, 7, (40, 3)), rng.normal(size=(40, 2))) for _ in range(2)]
    assert not go.discover(fn, params | {"bias0": -np.ones(width)}, batches, "predictions", progress=False).rejected


def test_a_stream_of_stacked_layers_whose_kernels_are_numbered() -> None:
    """Llama's names: w1 and w3 read the stream and w2 writes to it, so that no pattern stands for the first two."""

    def fn(p: Any, x: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> Any:
            y = normalised(x) * w["scale"]
            return x + (jax.nn.silu(y @ w["w1"]) * (y @ w["w3"])) @ w["w2"], None

        x, _ = jax.lax.scan(layer, x @ p["in"], p["layers"])
        return jnp.sin(normalised(x) @ p["head"])

    params = drawn(**{"in": (5, D)}, head=(D, 5)) | {"layers": drawn(w1=(2, D, 5), w2=(2, 5, D), w3=(2, D, 5))}
    params["layers"]["scale"] = np.ones((2, D))
    report = go.discover(fn, params, inputs(2, 20, 5), "predictions", progress=False)
    assert "residual_rotation" in {gauge.name for gauge in report.whole}, report
