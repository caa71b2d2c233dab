"""Which gauges the parts of an architecture leave, by a finite move in float64: the table of docs/guides/bind.md."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

import gauge_optax as go
from models import latent
from tests.cases import _layer_normalised as _layer
from tests.cases import _normalised as _rms
from tests.cases import _rotary
from tests.quick import jit
from tests.twins import normal

Params = dict[str, jax.Array]
Function = Callable[[Params], jax.Array]
Entrywise = Callable[[jax.Array], jax.Array]
TOKENS, WIDTH, HEADS, BASIS, HIDDEN, VOCAB, EXPERTS = 7, 8, 2, 4, 6, 9, 5

_draws = np.random.default_rng(0)
INPUTS: Any = _draws.standard_normal((TOKENS, WIDTH))
ATTENTION = np.exp(_draws.standard_normal((HEADS, TOKENS, TOKENS)))
ATTENTION /= ATTENTION.sum(-1, keepdims=True)


def _heads(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.einsum("td,dhe->the", x, kernel)


def _scores(p: Params, norm: Entrywise = _rms, rotary: bool = False, scales: bool = False) -> jax.Array:
    sides = [norm(_heads(INPUTS, p[name])) * (p[f"{name}_norm"] if scales else 1.0) for name in ("query", "key")]
    return jnp.einsum("the,she->hts", *(_rotary(x, "half", BASIS) if rotary else x for x in sides))


def _glu(p: Params, activation: Entrywise, post: bool = False) -> jax.Array:
    out = (activation(INPUTS @ p["gate"]) * (INPUTS @ p["up"])) @ p["down"]
    return INPUTS + (_rms(out) * p["post"] if post else out)


def _attention(p: Params, gates: int = 0, post: bool = False) -> jax.Array:
    """With so many gates per head, if any."""
    mixed = jnp.einsum("hts,she->the", ATTENTION, _heads(INPUTS, p["value"]))
    if gates:
        mixed = mixed * jax.nn.sigmoid(_heads(INPUTS, p["head_gate"][..., :gates]))
    out = jnp.einsum("the,hed->td", mixed, p["out"])
    return INPUTS + (_rms(out) * p["post"] if post else out)


def _scaled(p: Params) -> jax.Array:
    """A decoder of one MLP that writes to the stream through a trained scale."""
    x = p["embed"][:TOKENS]
    return _rms(x + jax.nn.gelu(_rms(x) @ p["up"]) @ p["down"] * p["post"]) @ p["head"]


def _post(p: Params, scaled: bool) -> jax.Array:
    """A decoder of one MLP with a norm behind it, as Gemma's."""
    x = p["embed"][:TOKENS]
    x = x + _rms(jax.nn.gelu(_rms(x) @ p["up"]) @ p["down"]) * (p["post"] if scaled else 1.0)
    return _rms(x) @ p["head"]


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


def _tied(p: Params, scaled: bool = True, bias: bool = False, norm: Entrywise = _rms) -> jax.Array:
    x = p["embed"][:TOKENS]
    x = norm(x + jax.nn.relu(norm(x) * p["norm"] @ p["up"]) @ p["down"])
    logits = (x * p["final"] if scaled else x) @ p["embed"].T
    return jax.nn.log_softmax(logits + p["head_bias"] if bias else logits)


def _experts(p: Params, count: int = 2, renormalized: bool = True, weigh: Entrywise = jax.nn.softmax) -> jax.Array:
    """A mixture of experts of which each token takes the `count` that the router likes best."""
    weights = weigh(INPUTS @ p["router"] + p["router_bias"])
    best, which = jax.lax.top_k(weights, count)
    best = best / best.sum(-1, keepdims=True) if renormalized else best
    taken = jnp.zeros_like(weights).at[jnp.arange(TOKENS)[:, None], which].set(best)
    hidden = jax.nn.relu(jnp.einsum("td,ndf->tnf", INPUTS, p["expert_up"]))
    return INPUTS + jnp.einsum("tn,tnf,nfd->td", taken, hidden, p["expert_down"])


def _linear_layers(p: Params) -> jax.Array:
    return INPUTS @ p["up"] @ p["layers"][0] @ p["layers"][1] @ p["down"]


LATENT = latent.LatentConfig(gated=False, rotary=4)


def _latent(p: Params) -> jax.Array:
    return latent.outputs(LATENT, unflatten_dict(p, sep="/"), jnp.asarray(INPUTS)[None])


HEAD = (WIDTH, HEADS, BASIS)
SHAPES = {
    "query": HEAD, "key": HEAD, "value": HEAD, "head_gate": HEAD, "out": (HEADS, BASIS, WIDTH), "query_norm": (BASIS,),
    "key_norm": (BASIS,), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "post": (WIDTH,),
    "norm": (WIDTH,), "final": (WIDTH,), "embed": (VOCAB, WIDTH), "head": (WIDTH, VOCAB), "head_bias": (VOCAB,),
    "out_bias": (WIDTH,), "down_bias": (WIDTH,), "router": (WIDTH, EXPERTS), "router_bias": (EXPERTS,),
    "expert_up": (EXPERTS, WIDTH, HIDDEN), "expert_down": (EXPERTS, HIDDEN, WIDTH), **LATENT.shapes,
    "layers": (2, HIDDEN, HIDDEN),
}

QUERY, KEY = {"query": "_ head basis"}, {"key": "_ head basis"}
ROTATION, TORUS = go.head_rotation(QUERY | KEY), go.rope_torus(QUERY | KEY, pairing="half")
GATE, BRANCH = (go.rescale({name: "_ channel"}, {"down": "channel _"}) for name in ("gate", "up"))
VALUES = go.head_linear({"value": "_ head basis"}, {"out": "head basis _"})
NORM = go.norm_scale({"norm": "channel"}, {"up": "channel _"})
FINAL = go.norm_scale({"final": "channel"}, {"embed": "_ channel"})
BOTH = go.norm_scale({"norm": "channel"}, {"value": "channel _ _", "up": "channel _"})
WRITE = {"embed": "_ basis", "down": "_ basis"}
STREAM = go.residual_rotation({"up": "basis _", "head": "basis _"}, WRITE)
PARALLEL_STREAM = go.residual_rotation(
    {"value": "basis _ _", "up": "basis _", "head": "basis _"},
    WRITE | {"out": "_ _ basis", "out_bias": "basis", "down_bias": "basis"}, [BOTH])
TIED_STREAM = go.residual_rotation({"up": "basis _"}, WRITE, [NORM])
SCALE = go.norm_scale({"post": "channel"}, {"down": "_ channel"})
SCALED_STREAM = go.residual_rotation({"up": "basis _", "head": "basis _"}, WRITE, [SCALE])
TABLE = go.norm_write_shift(tied={"embed": "vocab channel"})
LOGITS = go.logit_shift({"router": "_ vocab", "router_bias": "vocab"})


# A part of an architecture, what it computes, gauges, and whether it has them.
ROWS: list[tuple[str, Function, Any, bool]] = [
    ("QK-norm without scales: a rotation of the basis", _scores, ROTATION, True),
    ("QK-norm without scales: each kernel's size, per head", _scores, [
        go.scale_invariant({"query": "_ head _"}), go.scale_invariant({"key": "_ head _"})], True),
    ("QK-norm without scales: not GL", _scores, go.head_linear(QUERY, KEY), False),
    ("QK-norm without scales, rotary: planes", partial(_scores, rotary=True), TORUS, True),
    ("QK-norm without scales, rotary: no rotation", partial(_scores, rotary=True), ROTATION, False),
    ("QK-norm that subtracts the mean: no rotation", partial(_scores, norm=_layer), ROTATION, False),
    ("QK-norm with scales: no rotation", partial(_scores, scales=True), ROTATION, False),
    ("QK-norm with scales: they trade factors", partial(_scores, scales=True), go.rescale(
        {"query_norm": "channel"}, {"key_norm": "channel"}), True),
    ("SwiGLU: the linear branch", partial(_glu, activation=jax.nn.silu), BRANCH, True),
    ("SwiGLU: not the gate", partial(_glu, activation=jax.nn.silu), GATE, False),
    ("ReGLU: the gate too", partial(_glu, activation=jax.nn.relu), GATE, True),
    ("a gate per head: GL of values", partial(_attention, gates=1), VALUES, True),
    ("a gate per entry: no GL of values", partial(_attention, gates=BASIS), VALUES, False),
    ("a gate per entry: factors of entries", partial(_attention, gates=BASIS), go.rescale(
        {"value": "_ head channel"}, {"out": "head channel _"}), True),
    ("a norm behind attention: the kernel's size", partial(_attention, post=True), [
        VALUES, go.scale_invariant({"out": "_ _ _"})], True),
    ("a norm behind attention: not the size of one head", partial(_attention, post=True), go.scale_invariant(
        {"out": "head _ _"}), False),
    ("a norm behind a GLU: sizes of both kernels", partial(_glu, activation=jax.nn.gelu, post=True), [
        go.scale_invariant({"up": "_ _"}), go.scale_invariant({"down": "_ _"})], True),
    ("a norm behind the MLP without a scale: the stream", partial(_post, scaled=False), STREAM, True),
    ("a norm behind the MLP with a scale: not the stream", partial(_post, scaled=True), STREAM, False),
    ("the scale of a layer: into the kernel in front of it", _scaled, SCALE, True),
    ("the scale of a layer: the stream past it", _scaled, [SCALED_STREAM, SCALE], True),
    ("the scale of a layer: not the stream without it", _scaled, STREAM, False),
    ("a norm behind the sum: what it hides from a kernel", _encoder, go.norm_read_shift(
        {"up": "channel _"}, {"norm": "channel"}), True),
    ("a norm behind the sum: what writers hide from it", _encoder, go.norm_write_shift({"down": "_ channel"}), True),
    ("a norm behind the sum: the layer as a whole", _encoder, go.rescale(
        {"norm": "_", "down": "_ _", "down_bias": "_"}, {"up": "_ _"}), True),
    ("a norm behind the sum: not into the readers", _encoder, NORM, False),
    ("parallel blocks: one norm into both", _parallel, BOTH, True),
    ("parallel blocks: not into one alone", _parallel, NORM, False),
    ("parallel blocks: the stream", _parallel, [PARALLEL_STREAM, BOTH], True),
    ("parallel blocks: two output biases", _parallel, go.embedding_shift(
        {"out_bias": "channel"}, {"down_bias": "channel"}), True),
    ("tied, final norm with a scale: no rotation of the stream", _tied, [TIED_STREAM, NORM], False),
    ("tied, final norm without: a rotation of the stream", partial(_tied, scaled=False), [TIED_STREAM, NORM], True),
    ("tied: the final norm's scale goes nowhere", _tied, FINAL, False),
    ("tied: no shift of logits by the kernel", _tied, go.logit_shift({"embed": "vocab _"}), False),
    ("tied: a shift of logits by the bias", partial(_tied, bias=True), go.logit_shift({"head_bias": "vocab"}), True),
    ("tied, LayerNorms: one number in the whole table", partial(_tied, norm=_layer), TABLE, True),
    ("tied, RMSNorms: not one number in the whole table", _tied, TABLE, False),
    ("a softmax router, all experts", partial(_experts, count=EXPERTS, renormalized=False), LOGITS, True),
    ("a softmax router, top 2", partial(_experts, renormalized=False), LOGITS, True),
    ("a softmax router, top 2 renormalised", _experts, LOGITS, True),
    ("a sigmoid router, top 2", partial(_experts, renormalized=False, weigh=jax.nn.sigmoid), LOGITS, False),
    ("a sigmoid router, top 2 renormalised", partial(_experts, weigh=jax.nn.sigmoid), LOGITS, False),
    ("experts: factors of units", _experts, go.rescale(
        {"expert_up": "expert _ channel"}, {"expert_down": "expert channel _"}), True),
    ("linear layers, two of them stacked: matrices between all", _linear_layers, [
        go.head_linear({"up": "_ basis"}, {"layers": "layer=0 basis _"}),
        go.head_linear({"layers": "layer=0 _ basis"}, {"layers": "layer=1 basis _"}),
        go.head_linear({"layers": "layer=1 _ basis"}, {"down": "basis _"})], True),
    ("latent attention: planes", _latent, latent.gauges(LATENT), True),
    ("latent attention: vectors", _latent, go.residual_rotation(
        {"attn/q_b/kernel": "basis _ _"}, {"attn/q_a/kernel": "_ basis"},
        [go.norm_scale({"attn/q_norm/scale": "channel"}, {"attn/q_b/kernel": "channel _ _"})], per_layer=True), True),
    ("latent attention: vectors, not the norm", _latent, go.residual_rotation(
        {"attn/q_b/kernel": "basis _ _"}, {"attn/q_a/kernel": "_ basis"}, per_layer=True), False),
    ("latent attention: no rotation", _latent, go.head_rotation(
        {"attn/q_b/kernel": "_ _ basis=3:7", "attn/kv_a/kernel": "_ basis=6:10"}), False),
]


@pytest.mark.slow_rows("latent attention: planes")
@pytest.mark.parametrize(("fn", "gauges", "holds"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_finite_move_keeps_the_function_where_the_symmetry_holds(
    fn: Function, gauges: Any, holds: bool, x64: None
) -> None:
    params, group = normal(1, SHAPES), go.product(gauges)

    @jit
    def found(params: Params) -> tuple[Params, jax.Array, jax.Array]:
        moved = group.act(group.sample(jax.random.key(0), params), params)
        return moved, fn(params), fn(moved)

    moved, before, after = found(params)
    assert max(float(np.linalg.norm(moved[path] - x)) for path, x in params.items()) > 0.1
    change = np.max(np.abs(after - before)) / np.max(np.abs(before))
    assert change < 1e-12 if holds else change > 1e-3
