"""The constructions of DDC's Tables 3 and 7: for each gauge a small problem with that symmetry, and an optimizer.

The optimizers are those that should respect the symmetry, which `self_tests` tests. Among them is DDC's *body frame*
(second moments in the eigenbasis of a head), as the pseudocode B.8 of the paper prints it.
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
    """Sizes and rates. Float32 has a lower rate: at 1e-2, AdamW enlarges a start's rounding to 1e-5 in 20 steps."""

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
    """A network with a symmetry: the shapes of its leaves, its loss, and its gauges."""

    shapes: Shapes
    loss: Callable[[Params], jax.Array]
    gauges: Sequence[go.Gauge]


class Construction(NamedTuple):
    """A row of the table: a problem, and the function (learning rate, gauges) → optimizer."""

    problem: Problem
    make: Callable[[float, Sequence[go.Gauge]], optax.GradientTransformation]


# Problems -------------------------------------------------------------------------------------------


def _fixed(like: jax.Array, *shape: int) -> jax.Array:
    """Random numbers for inputs, targets and teachers, the same for every seed, in the dtype of `like`."""
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), like.dtype)


def _distance(x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x - _fixed(x, *x.shape)))


def _cross_entropy(logits: jax.Array) -> jax.Array:
    labels = np.arange(logits.shape[0]) % 7
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def bias_shift(c: Config) -> Problem:
    """A softmax with an output bias. Adding a number to all entries of the bias has no effect."""

    def loss(p: Params) -> jax.Array:
        return _cross_entropy(_fixed(p["bias"], c.samples, 9) + p["bias"])

    return Problem({"bias": (9,)}, loss, [go.logit_shift({"bias": "vocab"})])


def row_shift(c: Config) -> Problem:
    """A softmax without an output bias. Adding one vector to every column of the unembedding has no effect."""

    def loss(p: Params) -> jax.Array:
        return _cross_entropy(_fixed(p["kernel"], c.samples, c.width) @ p["kernel"])

    return Problem({"kernel": (c.width, 9)}, loss, [go.logit_shift({"kernel": "_ vocab"})])


def relu_rescale(c: Config) -> Problem:
    """A hidden layer with a ReLU. A unit's inputs may be multiplied, and its outputs divided, by a positive number."""

    def loss(p: Params) -> jax.Array:
        x = _fixed(p["up"], c.samples, c.width)
        return _distance(jax.nn.relu(x @ p["up"] + p["bias"]) @ p["down"])

    gauge = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"})
    return Problem({"up": (c.width, 8), "bias": (8,), "down": (8, 3)}, loss, [gauge])


def swiglu_rescale(c: Config) -> Problem:
    """A gated layer (A.6, Lemma 28). Its branch without activation may be multiplied, and outputs divided, per unit."""

    def loss(p: Params) -> jax.Array:
        x = _fixed(p["up"], c.samples, c.width)
        return _distance((jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"])

    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    return Problem({"gate": (c.width, 8), "up": (c.width, 8), "down": (8, 3)}, loss, [gauge])


def norm_scale(c: Config) -> Problem:
    """A LayerNorm. Its scale and bias may be multiplied, and the rows of the next kernel divided, per channel."""

    def loss(p: Params) -> jax.Array:
        x = jax.nn.standardize(_fixed(p["scale"], c.samples, c.width))
        return _distance(jnp.tanh((x * p["scale"] + p["bias"]) @ p["kernel"]))

    gauge = go.norm_scale({"scale": "channel", "bias": "channel"}, {"kernel": "channel _"})
    return Problem({"scale": (c.width,), "bias": (c.width,), "kernel": (c.width, 5)}, loss, [gauge])


def chain(c: Config, up: str, down: str) -> Problem:
    """Three hidden layers with ReLUs. Neighbouring matrices, or single units of them, may be multiplied and divided."""
    shapes = {"w0": (c.width, 8), "w1": (8, 8), "w2": (8, 8), "w3": (8, 3)}

    def loss(p: Params) -> jax.Array:
        x = _fixed(p["w0"], c.samples, c.width)
        for n in range(3):
            x = jax.nn.relu(x @ p[f"w{n}"])
        return _distance(x @ p["w3"])

    return Problem(shapes, loss, [go.rescale({f"w{n}": up}, {f"w{n + 1}": down}) for n in range(3)])


def attention(c: Config, rotary: bool = False, queries: int = 1) -> Problem:
    """One attention layer with kernels (head, d, basis).

    Queries and keys of a head may be rotated together, and values and outputs may be too.

    Args:
      c: sizes.
      rotary: whether queries and keys have rotary embeddings. Only the rotations of planes (a torus) are a symmetry
        then.
      queries: the number of query heads that share one key and value head.
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
    """State of `b8`: number of steps, moments of kernels in their eigenbases, and an eigenbasis per pair.

    A pair is two kernels that rotate together.
    """

    number: jax.Array
    mu: Params
    nu: Params
    bases: tuple[jax.Array, ...]


def b8(transport: str) -> optax.GradientTransformation:
    """The paper's body frame for the problem `attention`, with a new eigenbasis at each step.

    The signs of a basis are chosen so that it is near to the last one. `transport`, a key of TRANSPORTS, says how
    second moments move to the new basis. The part of gradients and of steps along rotations is removed.
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
    """The sum of aᵀb over the two kernels of a pair, (head, basis, basis)."""
    return sum((matmul(transpose(a[name]), b[name]) for name in pair), start=jnp.zeros(()))


def _eigenbasis(params: Params, pair: Sequence[str]) -> jax.Array:
    return symmetric_eigen(gram(params, params, pair))[1]


def horizontal(params: Params, vector: Params, pair: Sequence[str]) -> Params:
    """Removes from a vector (a gradient or step) its part along the rotations of a pair's heads."""
    cross = gram(params, vector, pair)
    generator = lyapunov(gram(params, params, pair), 0.5 * (cross - transpose(cross)))
    return {name: vector[name] - matmul(params[name], generator) for name in pair}


# Constructions ----------------------------------------------------------------------------------------


def build(c: Config) -> dict[str, Construction]:
    """Name of a row → its construction."""

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
        # With refresh_every=1, the eigenbasis is computed at each step, as in B.8.
        rows[f"rotation, {mode}"] = Construction(heads, functools.partial(ddc, v_mode=mode, refresh_every=1))
    latest = functools.partial(ddc, refresh_every=1)
    rows["rotation, grouped queries"] = Construction(attention(c, queries=2), latest)
    rows["torus of rotary heads"] = Construction(attention(c, rotary=True), latest)
    for transport in TRANSPORTS:
        rows[f"B.8, {transport}"] = Construction(heads, functools.partial(printed, transport=transport))
    return rows
