"""Which gauges the parts of an architecture leave, by a finite move in float64: the table of docs/guides/bind.md."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

import gauge_optax as go
from models import latent
from tests.quick import jit
from tests.twins import normal

Params = dict[str, jax.Array]
TOKENS, WIDTH, HEADS, BASIS, HIDDEN, VOCAB, EXPERTS = 7, 8, 2, 4, 6, 9, 5

_draws = np.random.default_rng(0)
INPUTS = _draws.standard_normal((TOKENS, WIDTH))
ATTENTION = np.exp(_draws.standard_normal((HEADS, TOKENS, TOKENS)))
ATTENTION /= ATTENTION.sum(-1, keepdims=True)


def _rms(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))


def _layer(x: jax.Array) -> jax.Array:
    return _rms(x - jnp.mean(x, -1, keepdims=True))


def _rotary(x: jax.Array) -> jax.Array:
    angle = jnp.arange(float(TOKENS))[:, None, None] * 10.0 ** -jnp.arange(BASIS / 2)
    first, second = jnp.split(x, 2, -1)
    turned = first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)
    return jnp.concatenate(turned, -1)


def _heads(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.einsum("td,dhe->the", x, kernel)


def _scores(norm: Callable[[jax.Array], jax.Array], rotary: bool = False, scales: bool = False) -> Any:
    def fn(p: Params) -> jax.Array:
        sides = [norm(_heads(INPUTS, p[name])) * (p[f"{name}_norm"] if scales else 1.0) for name in ("query", "key")]
        return jnp.einsum("the,she->hts", *(_rotary(x) if rotary else x for x in sides))

    return fn


def _glu(activation: Callable[[jax.Array], jax.Array], post: bool = False) -> Any:
    def fn(p: Params) -> jax.Array:
        out = (activation(INPUTS @ p["gate"]) * (INPUTS @ p["up"])) @ p["down"]
        return INPUTS + (_rms(out) * p["post"] if post else out)

    return fn


def _attention(gate: str = "", post: bool = False) -> Any:
    def fn(p: Params) -> jax.Array:
        mixed = jnp.einsum("hts,she->the", ATTENTION, _heads(INPUTS, p["value"]))
        if gate == "entry":
            mixed = mixed * jax.nn.sigmoid(_heads(INPUTS, p["gate"]))
        if gate == "head":
            mixed = mixed * jax.nn.sigmoid(_heads(INPUTS, p["gate"][..., :1]))
        out = jnp.einsum("the,hed->td", mixed, p["out"])
        return INPUTS + (_rms(out) * p["post"] if post else out)

    return fn


def _post(scaled: bool) -> Any:
    """A decoder of one MLP with a norm behind it, as Gemma's."""

    def fn(p: Params) -> jax.Array:
        x = p["embed"][:TOKENS]
        x = x + _rms(jax.nn.gelu(_rms(x) @ p["up"]) @ p["down"]) * (p["post"] if scaled else 1.0)
        return _rms(x) @ p["head"]

    return fn


def _encoder(p: Params) -> jax.Array:
    """An encoder whose LayerNorms stand behind the sums, as BERT's."""

    y = _layer(p["embed"][:TOKENS]) * p["norm"]
    y = _layer(y + jax.nn.gelu(y @ p["up"]) @ p["down"] + p["down_bias"]) * p["post"]
    return y @ p["head"]


def _parallel(p: Params) -> jax.Array:
    x = p["embed"][:TOKENS]
    y = _rms(x) * p["norm"]
    mixed = jnp.einsum("hts,she,hed->td", ATTENTION, _heads(y, p["value"]), p["out"]) + p["out_bias"]
    return _rms(x + mixed + jax.nn.relu(y @ p["up"]) @ p["down"] + p["down_bias"]) @ p["head"]


def _tied(scaled: bool, bias: bool = False, norm: Callable[[jax.Array], jax.Array] = _rms) -> Any:
    def fn(p: Params) -> jax.Array:
        x = p["embed"][:TOKENS]
        x = norm(x + jax.nn.relu(norm(x) * p["norm"] @ p["up"]) @ p["down"])
        logits = (x * p["final"] if scaled else x) @ p["embed"].T
        return jax.nn.log_softmax(logits + p["head_bias"] if bias else logits)

    return fn


def _experts(count: int, renormalized: bool, weigh: Callable[[jax.Array], jax.Array] = jax.nn.softmax) -> Any:
    """A mixture of experts of which each token takes the `count` that the router likes best."""

    def fn(p: Params) -> jax.Array:
        weights = weigh(INPUTS @ p["router"] + p["router_bias"])
        best, which = jax.lax.top_k(weights, count)
        best = best / best.sum(-1, keepdims=True) if renormalized else best
        taken = jnp.zeros_like(weights).at[jnp.arange(TOKENS)[:, None], which].set(best)
        hidden = jax.nn.relu(jnp.einsum("td,ndf->tnf", INPUTS, p["expert_up"]))
        return INPUTS + jnp.einsum("tn,tnf,nfd->td", taken, hidden, p["expert_down"])

    return fn


LATENT = latent.LatentConfig(gated=False, rotary=4)


def _latent(p: Params) -> jax.Array:
    return latent.outputs(LATENT, unflatten_dict(p, sep="/"), jnp.asarray(INPUTS)[None])


SHAPES = {
    "query": (WIDTH, HEADS, BASIS), "key": (WIDTH, HEADS, BASIS), "value": (WIDTH, HEADS, BASIS),
    "gate": (WIDTH, HIDDEN), "out": (HEADS, BASIS, WIDTH), "query_norm": (BASIS,), "key_norm": (BASIS,),
    "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "post": (WIDTH,), "norm": (WIDTH,), "final": (WIDTH,),
    "embed": (VOCAB, WIDTH), "head": (WIDTH, VOCAB), "head_bias": (VOCAB,), "out_bias": (WIDTH,),
    "down_bias": (WIDTH,), "router": (WIDTH, EXPERTS), "router_bias": (EXPERTS,),
    "expert_up": (EXPERTS, WIDTH, HIDDEN), "expert_down": (EXPERTS, HIDDEN, WIDTH), **LATENT.shapes,
}

ROTATION = go.head_rotation({"query": "_ head basis", "key": "_ head basis"})
TORUS = go.rope_torus({"query": "_ head basis", "key": "_ head basis"}, pairing="half")
GATE = go.rescale({"gate": "_ channel"}, {"down": "channel _"})
VALUES = go.head_linear({"value": "_ head basis"}, {"out": "head basis _"})
NORM = go.norm_scale({"norm": "channel"}, {"up": "channel _"})
BOTH = go.norm_scale({"norm": "channel"}, {"value": "channel _ _", "up": "channel _"})
WRITE = {"embed": "_ basis", "down": "_ basis"}
STREAM = go.residual_rotation({"up": "basis _", "head": "basis _"}, WRITE)
PARALLEL_STREAM = go.residual_rotation(
    {"value": "basis _ _", "up": "basis _", "head": "basis _"},
    WRITE | {"out": "_ _ basis", "out_bias": "basis", "down_bias": "basis"},
    [BOTH],
)
TIED_STREAM = go.residual_rotation({"up": "basis _"}, WRITE, [NORM])
TABLE = go.norm_write_shift(tied={"embed": "vocab channel"})
LOGITS = go.logit_shift({"router": "_ vocab", "router_bias": "vocab"})


class Row(NamedTuple):
    """A part of an architecture, gauges, and whether it has them."""

    name: str
    fn: Callable[[Params], jax.Array]
    gauges: go.Gauge | Sequence[go.Gauge]
    holds: bool
    gate: tuple[int, ...] = SHAPES["gate"]


ROWS = [
    Row("QK-norm without scales: a rotation of the basis", _scores(_rms), ROTATION, True),
    Row("QK-norm without scales: each kernel's size, per head", _scores(_rms), [
        go.scale_invariant({"query": "_ head _"}), go.scale_invariant({"key": "_ head _"})], True),
    Row("QK-norm without scales: not GL", _scores(_rms), go.head_linear(
        {"query": "_ head basis"}, {"key": "_ head basis"}), False),
    Row("QK-norm without scales, rotary: planes", _scores(_rms, rotary=True), TORUS, True),
    Row("QK-norm without scales, rotary: no rotation", _scores(_rms, rotary=True), ROTATION, False),
    Row("QK-norm that subtracts the mean: no rotation", _scores(_layer), ROTATION, False),
    Row("QK-norm with scales: no rotation", _scores(_rms, scales=True), ROTATION, False),
    Row("QK-norm with scales: they trade factors", _scores(_rms, scales=True), go.rescale(
        {"query_norm": "channel"}, {"key_norm": "channel"}), True),
    Row("SwiGLU: the linear branch", _glu(jax.nn.silu), go.rescale({"up": "_ channel"}, {"down": "channel _"}), True),
    Row("SwiGLU: not the gate", _glu(jax.nn.silu), GATE, False),
    Row("ReGLU: the gate too", _glu(jax.nn.relu), GATE, True),
    Row("a gate per head: GL of values", _attention("head"), VALUES, True, (WIDTH, HEADS, BASIS)),
    Row("a gate per entry: no GL of values", _attention("entry"), VALUES, False, (WIDTH, HEADS, BASIS)),
    Row("a gate per entry: factors of entries", _attention("entry"), go.rescale(
        {"value": "_ head channel"}, {"out": "head channel _"}), True, (WIDTH, HEADS, BASIS)),
    Row("a norm behind attention: the kernel's size", _attention(post=True), [
        VALUES, go.scale_invariant({"out": "_ _ _"})], True),
    Row("a norm behind attention: not the size of one head", _attention(post=True), go.scale_invariant(
        {"out": "head _ _"}), False),
    Row("a norm behind a GLU: sizes of both kernels", _glu(jax.nn.gelu, post=True), [
        go.scale_invariant({"up": "_ _"}), go.scale_invariant({"down": "_ _"})], True),
    Row("a norm behind the MLP without a scale: the stream", _post(False), STREAM, True),
    Row("a norm behind the MLP with a scale: not the stream", _post(True), STREAM, False),
    Row("a norm behind the sum: what it hides from a kernel", _encoder, go.norm_read_shift(
        {"up": "channel _"}, {"norm": "channel"}), True),
    Row("a norm behind the sum: what writers hide from it", _encoder, go.norm_write_shift({"down": "_ channel"}), True),
    Row("a norm behind the sum: the layer as a whole", _encoder, go.rescale(
        {"norm": "_", "down": "_ _", "down_bias": "_"}, {"up": "_ _"}), True),
    Row("a norm behind the sum: not into the readers", _encoder, NORM, False),
    Row("parallel blocks: one norm into both", _parallel, BOTH, True),
    Row("parallel blocks: not into one alone", _parallel, NORM, False),
    Row("parallel blocks: the stream", _parallel, [PARALLEL_STREAM, BOTH], True),
    Row("parallel blocks: two output biases", _parallel, go.embedding_shift(
        {"out_bias": "channel"}, {"down_bias": "channel"}), True),
    Row("tied, final norm with a scale: no rotation of the stream", _tied(True), [TIED_STREAM, NORM], False),
    Row("tied, final norm without: a rotation of the stream", _tied(False), [TIED_STREAM, NORM], True),
    Row("tied: the final norm's scale goes nowhere", _tied(True), go.norm_scale(
        {"final": "channel"}, {"embed": "_ channel"}), False),
    Row("tied: no shift of logits by the kernel", _tied(True), go.logit_shift({"embed": "vocab _"}), False),
    Row("tied: a shift of logits by the bias", _tied(True, True), go.logit_shift({"head_bias": "vocab"}), True),
    Row("tied, LayerNorms: one number in the whole table", _tied(True, norm=_layer), TABLE, True),
    Row("tied, RMSNorms: not one number in the whole table", _tied(True), TABLE, False),
    Row("a softmax router, all experts", _experts(EXPERTS, False), LOGITS, True),
    Row("a softmax router, top 2", _experts(2, False), LOGITS, True),
    Row("a softmax router, top 2 renormalised", _experts(2, True), LOGITS, True),
    Row("a sigmoid router, top 2", _experts(2, False, jax.nn.sigmoid), LOGITS, False),
    Row("a sigmoid router, top 2 renormalised", _experts(2, True, jax.nn.sigmoid), LOGITS, False),
    Row("experts: factors of units", _experts(2, True), go.rescale(
        {"expert_up": "expert _ channel"}, {"expert_down": "expert channel _"}), True),
    Row("latent attention: planes", _latent, latent.gauges(LATENT), True),
    Row("latent attention: no rotation", _latent, go.head_rotation(
        {"attn/q_b/kernel": "_ _ basis=3:7", "attn/kv_a/kernel": "_ basis=6:10"}), False),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_finite_move_keeps_the_function_where_the_symmetry_holds(row: Row, x64: None) -> None:
    params, group = normal(1, SHAPES | {"gate": row.gate}), go.product(row.gauges)

    @jit
    def found(params: Params) -> tuple[Params, jax.Array, jax.Array]:
        moved = group.act(group.sample(jax.random.key(0), params), params)
        return moved, row.fn(params), row.fn(moved)

    moved, before, after = found(params)
    assert max(float(np.linalg.norm(moved[path] - x)) for path, x in params.items()) > 0.1
    change = np.max(np.abs(after - before)) / np.max(np.abs(before))
    assert change < 1e-12 if row.holds else change > 1e-3
