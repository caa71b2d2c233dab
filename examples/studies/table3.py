"""The constructions of DDC's Tables 3 and 7: for each gauge one small problem that has it, and optimizers that keep it.

Here too: the reference's own body frame, B.8 as printed. Twins, tables and the figure are in `self_tests`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from gauge_optax.linalg import lyapunov, matmul, symmetric_eigen, transpose
from models import lm

Params = dict[str, jax.Array]
Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and rates. At 1e-2 AdamW itself turns float32's rounding of a start into 1e-5 within 20 steps."""

    steps64: int = 20
    steps32: int = 50
    rate64: float = 1e-2
    rate32: float = 3e-3
    weight_decay: float = 0.1
    samples: int = 64
    width: int = 12
    heads: int = 2
    head_size: int = 4


FULL = Config(steps64=200, steps32=500)


class Problem(NamedTuple):
    """A network with a symmetry: shapes of its leaves, what is minimised, the gauges."""

    shapes: Shapes
    loss: Callable[[Params], jax.Array]
    gauges: Sequence[go.Gauge]


class Construction(NamedTuple):
    """A row of the table: a problem, and (learning rate, gauges) → optimizer."""

    problem: Problem
    make: Callable[[float, Sequence[go.Gauge]], optax.GradientTransformation]


# Problems -------------------------------------------------------------------------------------------


def _fixed(like: jax.Array, *shape: int) -> jax.Array:
    """The same inputs, targets and teachers for every seed, in the precision of a leaf."""
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), like.dtype)


def _distance(x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x - _fixed(x, *x.shape)))


def _cross_entropy(logits: jax.Array) -> jax.Array:
    labels = np.arange(logits.shape[0]) % 7
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def bias_shift(c: Config) -> Problem:
    """A softmax with an output bias: all logits may shift alike."""

    def loss(p: Params) -> jax.Array:
        return _cross_entropy(_fixed(p["bias"], c.samples, 9) + p["bias"])

    return Problem({"bias": (9,)}, loss, [go.logit_shift({"bias": "vocab"})])


def row_shift(c: Config) -> Problem:
    """A softmax without one: one vector may be added to every column of the unembedding."""

    def loss(p: Params) -> jax.Array:
        return _cross_entropy(_fixed(p["kernel"], c.samples, c.width) @ p["kernel"])

    return Problem({"kernel": (c.width, 9)}, loss, [go.logit_shift({"kernel": "_ vocab"})])


def relu_rescale(c: Config) -> Problem:
    """A hidden layer: its units trade factors with what reads them."""

    def loss(p: Params) -> jax.Array:
        x = _fixed(p["up"], c.samples, c.width)
        return _distance(jax.nn.relu(x @ p["up"] + p["bias"]) @ p["down"])

    gauge = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"})
    return Problem({"up": (c.width, 8), "bias": (8,), "down": (8, 3)}, loss, [gauge])


def swiglu_rescale(c: Config) -> Problem:
    """A gated layer (A.6, Lemma 28): units trade factors between the linear branch and what reads them."""

    def loss(p: Params) -> jax.Array:
        x = _fixed(p["up"], c.samples, c.width)
        return _distance((jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"])

    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    return Problem({"gate": (c.width, 8), "up": (c.width, 8), "down": (8, 3)}, loss, [gauge])


def norm_scale(c: Config) -> Problem:
    """A LayerNorm: its scale and bias trade factors with the rows that read them."""

    def loss(p: Params) -> jax.Array:
        x = jax.nn.standardize(_fixed(p["scale"], c.samples, c.width))
        return _distance(jnp.tanh((x * p["scale"] + p["bias"]) @ p["kernel"]))

    gauge = go.norm_scale({"scale": "channel", "bias": "channel"}, {"kernel": "channel _"})
    return Problem({"scale": (c.width,), "bias": (c.width,), "kernel": (c.width, 5)}, loss, [gauge])


def chain(c: Config, up: str, down: str) -> Problem:
    """Three hidden layers: whole matrices, or single units, trade factors with their neighbours."""
    shapes = {"w0": (c.width, 8), "w1": (8, 8), "w2": (8, 8), "w3": (8, 3)}

    def loss(p: Params) -> jax.Array:
        x = _fixed(p["w0"], c.samples, c.width)
        for n in range(3):
            x = jax.nn.relu(x @ p[f"w{n}"])
        return _distance(x @ p["w3"])

    return Problem(shapes, loss, [go.rescale({f"w{n}": up}, {f"w{n + 1}": down}) for n in range(3)])


def attention(c: Config, rotary: bool = False, queries: int = 1) -> Problem:
    """One attention layer, kernels as (head, d, basis): queries and keys turn together, values and outputs too.

    Args:
      c: sizes.
      rotary: whether queries and keys are turned by their position, which leaves a torus of their rotations.
      queries: how many query heads read one key and value head.
    """
    whole, shared = (c.heads * queries, c.width, c.head_size), (c.heads, c.width, c.head_size)

    def loss(p: Params) -> jax.Array:
        x = _fixed(p["query"], c.samples // 8, 8, c.width)
        query, key, value = (jnp.einsum("btd,hde->bhte", x, p[name]) for name in ("query", "key", "value"))
        if rotary:
            query, key = (lm.rotary(y.swapaxes(1, 2)).swapaxes(1, 2) for y in (query, key))
        key, value = (jnp.repeat(y, queries, axis=1) for y in (key, value))
        weights = jax.nn.softmax(jnp.einsum("bhte,bhse->bhts", query, key), axis=-1)
        return _distance(jnp.einsum("bhts,bhse,hde->btd", weights, value, p["out"]))

    axes = dict.fromkeys(("query", "out"), "(head _) _ basis" if queries > 1 else "head _ basis")
    axes |= dict.fromkeys(("key", "value"), "head _ basis")
    scores, outputs = ({name: axes[name] for name in pair} for pair in PAIRS)
    turning = go.rope_torus(scores, pairing="half") if rotary else go.head_rotation(scores)
    shapes = {"query": whole, "key": shared, "value": shared, "out": whole}
    return Problem(shapes, loss, [turning, go.head_rotation(outputs)])


PAIRS = (("query", "key"), ("value", "out"))


# DDC B.8 as printed -----------------------------------------------------------------------------------


class BodyFrameState(NamedTuple):
    """Moments per kernel in body coordinates, and the eigenbasis per pair of kernels."""

    number: jax.Array
    mu: Params
    nu: Params
    bases: tuple[jax.Array, ...]


def b8(transport: str) -> optax.GradientTransformation:
    """The reference's body frame on `attention`: a new eigenbasis at each step, its signs pinned to the last one's.

    `transport` is one of TRANSPORTS. Gradients become tangents without a part along rotations.
    """

    def init(params: Params) -> BodyFrameState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return BodyFrameState(jnp.zeros((), jnp.int32), zeros, zeros, tuple(_eigenbasis(params, p) for p in PAIRS))

    def update(grads: Params, state: BodyFrameState, params: Params | None = None) -> tuple[Params, BodyFrameState]:
        if params is None:
            raise ValueError("b8 needs params")
        count, out, mu, nu, bases = state.number + 1, {}, {}, {}, []
        for pair, old in zip(PAIRS, state.bases, strict=True):
            new = _eigenbasis(params, pair)
            overlap = jnp.sum(old * new, axis=-2, keepdims=True)
            new = new * jnp.where(overlap < 0, -1.0, 1.0)
            turn = matmul(transpose(old), new)
            seen = horizontal(params, grads, pair)
            for name in pair:
                body = matmul(seen[name], new)
                mu[name] = 0.9 * matmul(state.mu[name], turn) + 0.1 * body
                nu[name] = 0.999 * TRANSPORTS[transport](state.nu[name], turn) + 0.001 * jnp.square(body)
                step = mu[name] / (1 - 0.9**count) / (jnp.sqrt(nu[name] / (1 - 0.999**count)) + 1e-8)
                out[name] = matmul(step, transpose(new))
            out |= horizontal(params, out, pair)
            bases.append(new)
        return out, BodyFrameState(count, mu, nu, tuple(bases))

    return optax.GradientTransformation(init, update)


TRANSPORTS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "|v·R|": lambda nu, turn: jnp.abs(matmul(nu, turn)),
    "v·|R|": lambda nu, turn: matmul(nu, jnp.abs(turn)),
    "v·(R∘R)": lambda nu, turn: matmul(nu, jnp.square(turn)),
}


def gram(a: Params, b: Params, pair: Sequence[str]) -> jax.Array:
    """Σ aᵀb over the tensors of a head, (head, basis, basis)."""
    return sum((matmul(transpose(a[name]), b[name]) for name in pair), start=jnp.zeros(()))


def _eigenbasis(params: Params, pair: Sequence[str]) -> jax.Array:
    return symmetric_eigen(gram(params, params, pair))[1]


def horizontal(params: Params, vector: Params, pair: Sequence[str]) -> Params:
    """A vector without its part along the rotations of a pair's heads."""
    cross = gram(params, vector, pair)
    generator = lyapunov(gram(params, params, pair), 0.5 * (cross - transpose(cross)))
    return {name: vector[name] - matmul(params[name], generator) for name in pair}


# Constructions ----------------------------------------------------------------------------------------


def build(c: Config) -> dict[str, Construction]:
    """The rows, by name."""

    def ddc(rate: float, gauges: Sequence[go.Gauge], **options: Any) -> optax.GradientTransformation:
        return go.ddc_adamw(rate, gauges, weight_decay=c.weight_decay, **options)

    def printed(rate: float, gauges: Sequence[go.Gauge], transport: str) -> optax.GradientTransformation:
        decay = optax.add_decayed_weights(c.weight_decay)
        return optax.chain(b8(transport), decay, optax.scale_by_learning_rate(rate))

    abelian = {
        "CE shift, bias": bias_shift(c), "CE shift, row": row_shift(c), "ReLU rescale": relu_rescale(c),
        "SwiGLU rescale": swiglu_rescale(c), "LayerNorm scale": norm_scale(c),
        "chained ReLU": chain(c, "_ _", "_ _"), "chained ReLU, per unit": chain(c, "_ channel", "channel _"),
    }
    rows = {name: Construction(problem, ddc) for name, problem in abelian.items()}
    heads = attention(c)
    for mode in ("none", "per_head_scalar", "per_head_matrix", "body_frame", "body_frame_topk"):
        # A new basis at each step, as in B.8: between refreshes nothing is carried.
        rows[f"rotation, {mode}"] = Construction(heads, functools.partial(ddc, v_mode=mode, refresh_every=1))
    latest = functools.partial(ddc, refresh_every=1)
    rows["rotation, grouped queries"] = Construction(attention(c, queries=2), latest)
    rows["torus of rotary heads"] = Construction(attention(c, rotary=True), latest)
    for transport in TRANSPORTS:
        rows[f"B.8, {transport}"] = Construction(heads, functools.partial(printed, transport=transport))
    return rows
