"""Planes that rotary leaves still, learned probes, multipliers per query head, fused biases: what was missed once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.discovery.test_discover import near
from tests.discovery.test_layouts import check

D, H, K, E, V, T = 8, 4, 2, 4, 11, 6
RNG = np.random.default_rng(0)
TOKENS = list(RNG.integers(0, V, (2, 3, T)))


def normal(*shape: int) -> np.ndarray:
    return 0.4 * RNG.standard_normal(shape)


def normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-20)


def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention with grouped queries: (batch, time, heads, entries)."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("btkge,bske->bkgts", grouped, k)
    scores = jnp.where(jnp.tri(T, dtype=bool), scores, -1e30)
    return jnp.einsum("bkgts,bske->btkge", jax.nn.softmax(scores), v).reshape(q.shape)


def turned(x: jax.Array, share: float) -> jax.Array:
    """Rotary embeddings by halves that turn the first planes alone, as proportional rotary does."""
    half = x.shape[-1] // 2
    moving = int(half * share)
    speeds = np.concatenate([50.0 ** (-np.arange(moving) / half), np.zeros(half - moving)])
    angle = jnp.arange(T)[:, None, None] * speeds
    u, v = x[..., :half], x[..., half:]
    return jnp.concatenate([u * jnp.cos(angle) - v * jnp.sin(angle), v * jnp.cos(angle) + u * jnp.sin(angle)], -1)


def stream() -> go.Gauge:
    """The rotation of the residual stream of the decoders below, whose norms have no scale."""
    read = dict.fromkeys(("q", "k", "v"), "basis _ _") | {"head": "basis _"}
    return go.residual_rotation(read, {"embed": "_ basis", "o": "_ _ basis"})


@pytest.mark.slow
def test_planes_that_rotary_leaves_still_have_all_matrices() -> None:
    def fn(p: Any, tokens: Any) -> jax.Array:
        x = p["embed"][tokens]
        q, k, v = (jnp.einsum("btd,dhe->bthe", normalised(x), p[name]) for name in ("q", "k", "v"))
        x = x + jnp.einsum("bthe,hed->btd", attended(turned(q, 0.5), turned(k, 0.5), v), p["o"])
        return normalised(x) @ p["head"]

    shapes = {"q": (D, 2, 8), "k": (D, 2, 8), "v": (D, 2, 8), "o": (2, 8, D)}
    params = {name: normal(*shape) for name, shape in shapes.items()} | {"embed": normal(V, D), "head": normal(D, V)}
    hand = [
        stream(),
        go.rope_linear({"q": "_ head basis=0:2+4:6"}, {"k": "_ head basis=0:2+4:6"}),
        go.head_linear({"q": "_ head basis=2:4+6:8"}, {"k": "_ head basis=2:4+6:8"}),
        go.head_linear({"v": "_ head basis"}, {"o": "head basis _"}),
        go.scale_invariant({"embed": "_ _", "v": "_ _ _"}),
        go.logit_shift({"head": "_ vocab"}),
    ]
    check(fn, params, TOKENS, hand)


@pytest.mark.slow
def test_a_learned_probe_has_query_and_key_matrices() -> None:
    """An attention-pooling head: the query comes from a parameter, the same for every input."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = jnp.tanh(x @ p["in"])
        probe = jnp.tile(p["probe"], (len(x), 1, 1))
        q = jnp.einsum("bqd,dhe->bqhe", probe, p["q"]) + p["bias"]
        k, v = (jnp.einsum("btd,dhe->bthe", y, p[name]) for name in ("k", "v"))
        weights = jax.nn.softmax(jnp.einsum("bqhe,bthe->bhqt", q, k))
        return jnp.sin(jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqt,bthe->bqhe", weights, v), p["o"]))[:, 0]

    shapes = {"q": (D, 2, E), "k": (D, 2, E), "v": (D, 2, E), "o": (2, E, D), "bias": (2, E)}
    params = {name: normal(*shape) for name, shape in shapes.items()} | {"in": normal(6, D), "probe": normal(1, 1, D)}
    hand = [
        go.head_linear({"q": "_ head basis", "bias": "head basis"}, {"k": "_ head basis"}),
        go.head_linear({"v": "_ head basis"}, {"o": "head basis _"}),
        go.head_linear({"probe": "_ _ basis"}, {"q": "basis _ _"}),
    ]
    check(fn, params, list(RNG.standard_normal((2, 5, 7, 6))), hand, outputs="loss")


@pytest.mark.slow
def test_a_multiplier_of_every_query_head_of_a_group() -> None:
    def fn(p: Any, tokens: Any) -> jax.Array:
        x = p["embed"][tokens]
        q, k, v = (jnp.einsum("btd,dhe->bthe", normalised(x), p[name]) for name in ("q", "k", "v"))
        q, k = q * p["of_query"][:, None], k * p["of_key"][:, None]
        return normalised(x + jnp.einsum("bthe,hed->btd", attended(q, k, v), p["o"])) @ p["head"]

    shapes = {"q": (D, H, E), "k": (D, K, E), "v": (D, K, E), "o": (H, E, D), "of_query": (H,), "of_key": (K,)}
    params = {name: normal(*shape) for name, shape in shapes.items()} | {"embed": normal(V, D), "head": normal(D, V)}
    sizes = {"head": K}
    hand = [
        stream(),
        go.rescale({"of_query": "head"}, {"q": "_ head _"}),  # four elements, not one per group
        go.rescale({"of_key": "head"}, {"k": "_ head _"}),
        go.head_linear({"q": "_ (head _) basis"}, {"k": "_ head basis"}, sizes=sizes),
        go.head_linear({"v": "_ head basis"}, {"o": "(head _) basis _"}, sizes=sizes),
        go.scale_invariant({"embed": "_ _", "v": "_ _ _"}),
        go.logit_shift({"head": "_ vocab"}),
    ]
    check(fn, params, TOKENS, hand)


@pytest.mark.slow
def test_biases_of_a_fused_kernel() -> None:
    """Query, key and value in one leaf: the norm's bias flows into all of it, its value part into the output's bias."""

    def fn(p: Any, tokens: Any) -> jax.Array:
        x = p["embed"][tokens]
        y = (x - jnp.mean(x, -1, keepdims=True)) / jnp.std(x, -1, keepdims=True) * p["scale"] + p["shift"]
        q, k, v = jnp.split((y @ p["qkv"] + p["bias"]).reshape(*x.shape[:2], 3 * H, E), 3, axis=2)
        return jnp.sin(attended(q, k, v).reshape(*x.shape[:2], -1) @ p["o"] + p["out"])

    shapes = {"qkv": (D, 3 * H * E), "bias": (3 * H * E,), "o": (H * E, D), "out": (D,), "scale": (D,), "shift": (D,)}
    params = {name: normal(*shape) for name, shape in shapes.items()} | {"embed": normal(V, D)}
    report = go.discover(fn, params, TOKENS, outputs="loss", progress=False)
    found = {(gauge.name, tuple(sorted({spec.pattern for spec in gauge.specs}))) for gauge in report.whole}  # type: ignore[attr-defined]
    assert {
        ("bias_absorption", ("bias", "qkv", "shift")),
        ("bias_absorption", ("bias", "o", "out")),
        ("norm_read_shift", ("bias", "qkv", "scale", "shift")),
        ("norm_write_shift", ("embed",)),
        ("key_bias", ("bias",)),
    } <= found, report
    assert not report.rejected and not report.ungauged, report


def test_arrays_that_are_added_to_each_other_trade_every_entry() -> None:
    """Biases of parallel branches, of one stacked layer too, and two tables of positions."""

    def fn(p: Any, x: Any) -> jax.Array:
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w["up"] + w["a"] + w["b"]), None), x, p["layers"])
        return jnp.sin(y @ p["out"] + p["c"] + p["d"] + p["e"] + p["first"] + p["second"])

    shapes = {"out": (4, 3), "c": (3,), "d": (3,), "e": (3,), "first": (5, 3), "second": (5, 3)}
    layers = {"up": normal(1, 4, 4), "a": normal(1, 4), "b": normal(1, 4)}
    params = {name: normal(*shape) for name, shape in shapes.items()} | {"layers": layers}
    hand = [
        go.embedding_shift({"layers/a": "only=0 channel"}, {"layers/b": "only=0 channel"}),
        go.embedding_shift({"first": "row channel"}, {"second": "row channel"}),
        go.embedding_shift({"c": "channel"}, {"d": "channel"}),
        go.embedding_shift({"d": "channel"}, {"e": "channel"}),
        go.embedding_shift({"first": "_ channel"}, {"d": "channel"}),
    ]
    check(fn, params, list(RNG.standard_normal((2, 6, 5, 4))), hand, outputs="loss")


def test_what_a_norm_behind_a_layer_hides_from_its_readers() -> None:
    """The next layer is added to the norm's output, so that the norm's scale cannot move into a kernel, and stays."""

    def centred(x: jax.Array) -> jax.Array:
        return normalised(x - jnp.mean(x, -1, keepdims=True))

    def fn(p: Any, tokens: Any) -> jax.Array:
        y = centred(p["embed"][tokens]) * p["scale"]
        y = centred(y + jax.nn.silu(y @ p["up"] + p["bias"]) @ p["down"]) * p["last"]
        return y @ p["head"]

    shapes = {"embed": (V, D), "up": (D, 5), "bias": (5,), "down": (5, D), "head": (D, V)}
    params = {name: normal(*shape) for name, shape in shapes.items()} | {"scale": np.ones(D), "last": np.ones(D)}
    hand = [
        go.norm_write_shift({"embed": "_ channel"}),
        go.norm_write_shift({"down": "_ channel"}),
        go.norm_read_shift({"up": "channel _"}, scale={"scale": "channel"}),
        go.norm_read_shift({"head": "channel _"}, scale={"last": "channel"}),
        go.norm_scale({"last": "channel"}, {"head": "channel _"}),
        go.rescale({"down": "_ _", "scale": "_"}, {"up": "_ _"}),
        go.scale_invariant({"embed": "row _"}),
        go.logit_shift({"head": "_ vocab"}),
    ]
    report = check(fn, params, TOKENS, hand)
    assert not report.rejected and not report.ungauged

    def loss(p: Any) -> jax.Array:
        return jnp.mean(jnp.square(jax.nn.log_softmax(fn(p, TOKENS[0])) - jnp.arange(V)))

    with jax.enable_x64(True):
        point, tx = near(params, 5), go.quotient(optax.adamw(1e-2), report.gauges)
        go.testing.assert_equivariant_step(tx, loss, point, report.gauges, jax.random.key(0), rtol=1e-10)


def _centred(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("between", [lambda x: x, lambda x: x + jnp.sin(_centred(x))])
def test_a_constant_on_a_whole_tied_table_is_found(between: Any) -> None:
    """The norm hides what rows gain, the softmax what logits gain. A table of positions makes it another gauge's."""
    draw = np.random.default_rng(0)
    params = {"table": jnp.asarray(draw.normal(size=(11, 6))), "scale": jnp.asarray(draw.uniform(0.5, 2.0, 6))}
    tokens = list(draw.integers(11, size=(2, 3, 20)))

    def tied(p: Any, batch: Any) -> jax.Array:
        return (_centred(between(p["table"][batch])) * p["scale"]) @ p["table"].T

    for seed in range(2):
        report = go.discover(tied, params, tokens, "logits", seed=seed, progress=False)
        assert go.norm_write_shift(tied={"table": "vocab channel"}) in report.whole and not report.ungauged

    def with_positions(p: Any, batch: Any) -> jax.Array:
        return (_centred(between(p["table"][batch] + p["positions"])) * p["scale"]) @ p["table"].T

    positions = {"positions": jnp.asarray(draw.normal(size=(20, 6)))}
    report = go.discover(with_positions, params | positions, tokens, "logits", progress=False)
    names = [gauge.name for gauge in report.whole]
    assert names.count("embedding_shift") == names.count("norm_write_shift") == 1 and not report.ungauged

    def untied(p: Any, batch: Any) -> jax.Array:
        return (_centred(between(p["table"][batch])) * p["scale"]) @ p["head"]

    report = go.discover(untied, params | {"head": params["table"].T + 0.1}, tokens, "logits", progress=False)
    assert not report.ungauged and any(gauge.name == "norm_write_shift" for gauge in report.whole)


@pytest.mark.parametrize(("norm", "width"), [("none", 5), ("centred", 8), ("none", 8), ("centred", 9)])
def test_a_part_of_a_bias_that_its_kernel_maps_to_nothing_is_named(norm: str, width: int) -> None:
    """A bias of 8 entries in front of a kernel with fewer outputs, or as many where a norm hides their mean."""
    draw = np.random.default_rng(0)
    sizes = {"up": (4, 8), "bias": (8,), "down": (8, width), "head": (width, 7)}
    params = {name: jnp.asarray(draw.normal(size=size)) for name, size in sizes.items()}
    inputs = list(draw.normal(size=(2, 40, 4)))

    def fn(p: Any, x: Any) -> jax.Array:
        y = jnp.tanh(x[:, :1]) * (x @ p["up"]) + p["bias"]
        y = y @ p["down"]
        return jnp.sin((_centred(y) if norm == "centred" else jnp.cos(y)) @ p["head"])

    named = go.discover(fn, params, inputs, "predictions", progress=False).ungauged
    kind = "a part of a bias that the kernel behind it maps to nothing that is read"
    assert (kind in named) == (width < 8 or (norm == "centred" and width == 8))


@pytest.mark.parametrize(("norm", "last", "named"), [("centred", False, True), ("centred", True, False),
                                                     ("plain", False, False)])
def test_the_mean_of_a_stream_that_a_head_reads_past_the_norms_is_named(norm: str, last: bool, named: bool) -> None:
    """A stream of MLPs: with a centred norm before each and none before the head, x may gain c·x in every entry."""
    draw = np.random.default_rng(0)
    sizes = {"in": (5, 6), "up": (6, 7), "down": (7, 6), "wide": (6, 8), "narrow": (8, 6), "head": (6, 4)}
    params = {name: jnp.asarray(draw.normal(size=size)) for name, size in sizes.items()}
    inputs = list(draw.normal(size=(2, 60, 5)))
    of = _centred if norm == "centred" else normalised

    def fn(p: Any, x: Any) -> jax.Array:
        x = jnp.tanh(x) @ p["in"]
        x = x + jnp.sin(of(x) @ p["up"]) @ p["down"]
        x = x + jnp.cos(of(x) @ p["wide"]) @ p["narrow"]
        return jnp.sin((of(x) if last else x) @ p["head"])

    kind = "the mean of a stream, which centred norms hide, and which a kernel without a norm before it reads"
    for seed in range(2):
        ungauged = go.discover(fn, params, inputs, "predictions", seed=seed, progress=False).ungauged
        assert ungauged == ({kind: ("down + head + in + narrow",)} if named else {})


def test_a_norm_behind_a_sublayer_gives_its_bias_to_the_next_sublayers(x64: None) -> None:
    """As in BERT: the stream carries its bias on, to the biases behind its readers and to that of the next sublayer."""
    d, hidden, blocks = 5, 6, 2

    def normed(x: jax.Array) -> jax.Array:
        return normalised(x - x.mean(-1, keepdims=True))

    params = {"embed": normal(9, d), "head": normal(d, 7), "head_bias": normal(7), "norm": normal(d), "bias": normal(d)}
    for k in range(blocks):
        params |= {f"up{k}": normal(d, hidden), f"up_bias{k}": normal(hidden), f"down{k}": normal(hidden, d),
                   f"down_bias{k}": normal(d), f"norm{k}": normal(d), f"bias{k}": normal(d)}

    def fn(p: dict[str, jax.Array], inputs: np.ndarray) -> jax.Array:
        x = normed(inputs @ p["embed"]) * p["norm"] + p["bias"]
        for k in range(blocks):
            written = jnp.tanh(x @ p[f"up{k}"] + p[f"up_bias{k}"]) @ p[f"down{k}"] + p[f"down_bias{k}"]
            x = normed(x + written) * p[f"norm{k}"] + p[f"bias{k}"]
        return x @ p["head"] + p["head_bias"]

    batches = list(np.random.default_rng(1).normal(size=(2, 60, 9)))
    report = go.discover(fn, params, batches, "logits", progress=False)
    assert not report.ungauged
    group = go.product(report.whole)
    moved = [{spec.pattern for spec in gauge.specs} for gauge in group.gauges if gauge.name == "bias_absorption"]
    assert {"bias", "up0", "up_bias0", "down_bias0"} in moved and {"bias0", "up1", "up_bias1", "down_bias1"} in moved
    assert go.census(fn, params, batches, group, progress=False).unexplained == 0
