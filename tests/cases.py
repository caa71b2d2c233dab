"""The registers: every gauge and every transformation that the conformance tests run over.

Data only, nothing is computed at import. A public name that stands in neither register fails `test_structure.py`.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gauge_optax as go
from gauge_optax.gauges.gauge import BlockGauge, Gauge
from models import latent, lm
from tests.gauges.user_gauges import Translation

Tree = Any
Shapes = Mapping[str, tuple[int, ...]]
Loss = Callable[[Tree], jax.Array]


@dataclass(frozen=True)
class GaugeCase:
    """A gauge, or a product of several, on a tiny model in general position.

    Attributes:
      name: "constructor/variant", or "product/variant".
      gauges: makes the gauges; more than one mean their product.
      params: key → parameters, float64 under x64 and float32 otherwise.
      loss: what the gauges must keep.
      dim: vertical dimensions.
    """

    name: str
    gauges: Callable[[], list[Gauge]]
    params: Callable[[jax.Array], Tree]
    loss: Loss
    dim: int


@dataclass(frozen=True)
class TransformCase:
    """One setting of one transformation: what `optax.inject_hyperparams(factory)(gauges=..., **options)` takes.

    Attributes:
      name: "constructor/variant".
      factory: the public constructor, or what calls it with gauges where it takes none.
      options: its arguments, `gauges` apart.
      linear: whether it is tried with GL(d_h) in place of the rotation of values and outputs.
    """

    name: str
    factory: Callable[..., optax.GradientTransformationExtraArgs]
    options: Mapping[str, Any]
    linear: bool = False

    def make(self, gauges: Sequence[Gauge]) -> optax.GradientTransformationExtraArgs:
        """The transformation: an optimizer, or a link of a chain."""
        return self.factory(gauges=self.of_its_kind(gauges), **self.options)

    def of_its_kind(self, gauges: Sequence[Gauge]) -> list[Gauge]:
        """The list with linear gauges for rotations of values and outputs, where that is what this row is about."""
        return [_as_linear(gauge) if self.linear and gauge.name == "head_rotation" else gauge for gauge in gauges]


def _as_linear(rotation: Any) -> Gauge:
    blocks = {spec.pattern: spec.axes for spec in rotation.specs}
    right = {pattern: axes for pattern, axes in blocks.items() if pattern.startswith("out")}
    return go.head_linear({pattern: axes for pattern, axes in blocks.items() if pattern not in right}, right)


# Parameters ---------------------------------------------------------------------------------------


def _draw(key: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Unit normals, by numpy: nothing to compile."""
    generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return [jnp.asarray(generator.normal(size=shape), float) for shape in shapes]


def _normal(shapes: Shapes, key: jax.Array) -> Tree:
    """A nested dict of unit normals, one leaf per path."""
    tree: dict[str, Any] = {}
    for path, leaf in zip(shapes, _draw(key, list(shapes.values())), strict=True):
        *parents, last = path.split("/")
        functools.reduce(lambda t, name: t.setdefault(name, {}), parents, tree)[last] = leaf
    return tree


def _params(**shapes: tuple[int, ...]) -> Callable[[jax.Array], Tree]:
    """`_normal` with paths as keywords, `__` for the slash."""
    return partial(_normal, {name.replace("__", "/"): shape for name, shape in shapes.items()})


def _lm_params(config: lm.LMConfig, key: jax.Array) -> Tree:
    """A language model's parameters in general position: no zero bias, no unit scale."""
    shapes, treedef = jax.tree.flatten(lm_parts(config)[0])
    drawn = _draw(key, [x.shape for x in shapes])
    return jax.tree.unflatten(treedef, [0.4 * x + (1.0 if x.ndim == 1 else 0.0) for x in drawn])


@functools.lru_cache(maxsize=4)
def lm_parts(config: lm.LMConfig) -> tuple[Tree, Callable[[Tree, Any], jax.Array]]:
    """The shapes of the parameters, and loss(params, tokens); nothing is initialised."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: lm.build(config, nnx.Rngs(0))))
    return nnx.to_pure_dict(state), lambda p, tokens: lm.loss_fn(nnx.merge(graphdef, p), tokens)


# Losses -------------------------------------------------------------------------------------------


def _fixed(*shape: int) -> np.ndarray:
    """The same inputs for every call."""
    return np.random.default_rng(0).normal(size=shape)


LATENT = {"fused": latent.LatentConfig(fused=True), "split": latent.LatentConfig(gated=False)}


def _latent_loss(layout: str, p: Tree) -> jax.Array:
    return jnp.mean(jnp.square(latent.outputs(LATENT[layout], p, jnp.asarray(_fixed(2, 5, 8), float)) - 1.0))


def _square(x: jax.Array) -> jax.Array:
    """Distance from fixed targets: a scalar that sees every output."""
    return jnp.mean(jnp.square(x - jnp.asarray(_fixed(*x.shape), x.dtype)))


def _cross_entropy(logits: jax.Array) -> jax.Array:
    labels = np.arange(logits.shape[0]) % logits.shape[1]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def _inputs(leaf: jax.Array, *shape: int) -> jax.Array:
    return jnp.asarray(_fixed(*shape), leaf.dtype)


def _normalised(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True))


def _head_loss(p: Tree) -> jax.Array:
    bias = p.get("bias", 0.0)
    if "kernel" not in p:
        return _cross_entropy(_inputs(bias, 4, 7) + bias)
    return _cross_entropy((_inputs(p["kernel"], 4, 6) @ p["kernel"] + bias)[:, :7])


def _two_heads_loss(params: Tree) -> jax.Array:
    """Two heads on the same features."""
    return sum((_head_loss({"kernel": kernel}) for kernel in params["kernel"]), start=jnp.zeros(()))


def _unit_loss(power: int, p: Tree) -> jax.Array:
    hidden = jax.nn.relu(_inputs(p["up"]["kernel"], 4, 6) @ p["up"]["kernel"] + p["up"]["bias"]) ** power
    return _square(hidden @ p["down"])


def _layers_loss(p: Tree) -> jax.Array:
    x = _inputs(p["layers"]["0"]["up"], 4, 6)
    for layer in p["layers"].values():
        x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
    return _square(x)


def _lora_loss(p: Tree) -> jax.Array:
    return _square(_inputs(p["a"], 4, 6) @ p["a"] @ p["b"])


def _gate_loss(p: Tree) -> jax.Array:
    x = _inputs(p["down"], 4, 6)
    return _square((jax.nn.silu(x @ p["gate"][0]) * (x @ p["gate"][1])) @ p["down"])


def _multiplier_loss(p: Tree) -> jax.Array:
    """Scores of query heads against the key head of their group, one multiplier per coordinate of either."""
    fixed = _inputs(p["query"], 4, *p["query"].shape)
    groups = p["query"].shape[0] // p["key"].shape[0]
    return _square(jnp.einsum("xhe,he,he->xh", fixed, p["query"], jnp.repeat(p["key"], groups, 0)))


def _chain_loss(p: Tree) -> jax.Array:
    return _square(jax.nn.relu(jax.nn.relu(_inputs(p["w1"], 4, 6) @ p["w1"]) @ p["w2"]) @ p["w3"])


def _norm_loss(p: Tree) -> jax.Array:
    x = _normalised(_inputs(p["scale"], 4, 6)) * p["scale"] + p.get("bias", 0.0)
    return _square(jnp.tanh(x @ p["kernel"]))


def _consumers_loss(p: Tree) -> Any:
    x = _normalised(_inputs(p["norm"], 4, 6)) * (1.0 + p["norm"])
    return sum(_square(jnp.tanh(jnp.einsum("nd,dhe->nhe", x, p[name]))) for name in ("query", "key", "value"))


def _normed_head_loss(p: Tree) -> jax.Array:
    x = jnp.einsum("nd,dhe->nhe", _inputs(p["kernel"], 4, 6), p["kernel"]) + p.get("bias", 0.0)
    return _square(_normalised(x))


def _project(p: Tree, name: str, x: jax.Array) -> jax.Array:
    """One of query, key, value: (time, heads, d_h); a kernel of two axes is one head."""
    module = p[name] if isinstance(p[name], dict) else {"kernel": p[name]}
    kernel = module["kernel"]
    kernel = kernel if kernel.ndim == 3 else kernel[:, None]
    return jnp.einsum("nd,dhe->nhe", x, kernel) + module.get("bias", 0.0)


def _scores(q: jax.Array, k: jax.Array, seen: Callable[[jax.Array], jax.Array] = jnp.tanh) -> jax.Array:
    """Every score as it is seen; key heads repeat over their group."""
    return _square(seen(jnp.einsum("nhe,mhe->hnm", q, jnp.repeat(k, q.shape[1] // k.shape[1], 1))))


def _attention_loss(p: Tree, turn: Callable[[jax.Array], jax.Array] = lambda x: x, **seen: Any) -> jax.Array:
    x = _inputs(jax.tree.leaves(p)[0], 4, 6)
    return _scores(turn(_project(p, "query", x)), turn(_project(p, "key", x)), **seen)


def _value_loss(p: Tree) -> jax.Array:
    x = _inputs(p["out"], 4, 6) * p.get("norm", 1.0)
    return _square(jnp.einsum("nhe,hed->nd", _project(p, "value", x), p["out"]))


def _fused_loss(p: Tree) -> jax.Array:
    x = _inputs(p["qkv"], 4, 6)
    qkv = (x @ p["qkv"] + p["bias"]).reshape(4, 3, 2, 4)
    return _scores(qkv[:, 0], qkv[:, 1]) + _square(qkv[:, 2])


def _scanned_loss(p: Tree) -> Any:
    return sum(_attention_loss({"query": p["query"][i], "key": p["key"][i]}) for i in range(2))


def _rotary(x: jax.Array, pairing: str, rotary: int) -> jax.Array:
    """Turns plane j of position n by n·3^(−j), on the first `rotary` coordinates."""
    turned, rest = x[..., :rotary], x[..., rotary:]
    half = rotary // 2
    planes = turned.reshape(*x.shape[:-1], *((2, half) if pairing == "half" else (half, 2)))
    a, b = jnp.moveaxis(planes, -2 if pairing == "half" else -1, 0)
    angle = jnp.asarray(np.arange(x.shape[0])[:, None, None] * 3.0 ** -np.arange(half), x.dtype)
    a, b = a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)
    turned = jnp.stack([a, b], -2 if pairing == "half" else -1).reshape(turned.shape)
    return jnp.concatenate([turned, rest], -1)


def _rope_loss(pairing: str) -> Loss:
    """Rotary over four coordinates."""
    return partial(_attention_loss, turn=lambda x: _rotary(x, pairing, 4))


def _slow_planes_loss(p: Tree) -> jax.Array:
    """Rotary over halves that turns the first two of three planes only."""
    return _attention_loss(p, lambda x: _rotary(x[..., np.array([0, 1, 3, 4, 2, 5])], "half", 4))


def _semidirect_loss(p: Tree) -> jax.Array:
    x = _normalised(_inputs(p["norm"], 4, 6)) * p["norm"]
    return _cross_entropy(x @ p["kernel"] + p["bias"])


def _carried_bias_loss(p: Tree) -> jax.Array:
    stream = 0.1 * jnp.arange(18.0).reshape(3, 6) ** 0.5 + p["bias"]
    hidden = jnp.tanh(stream @ p["up"]["kernel"] + p["up"]["bias"])
    return _square(stream + hidden @ p["down"]["kernel"] + p["down"]["bias"])


def _value_bias_loss(p: Tree) -> jax.Array:
    """Weights of attention that sum to 1, and two query heads per value head."""
    x = _inputs(p["out"]["kernel"], 4, 6)
    weights = jax.nn.softmax(_inputs(p["out"]["kernel"], 4, 4, 4))
    value = jnp.repeat(_project(p, "value", x), 2, 1)
    mixed = jnp.einsum("hnm,mhe->nhe", weights, value)
    return _square(jnp.tanh(jnp.einsum("nhe,hed->nd", mixed, p["out"]["kernel"]) + p["out"]["bias"]))


_softmax_loss = partial(_attention_loss, seen=lambda scores: jax.nn.softmax(scores) - 0.3)


def _fused_softmax_loss(p: Tree) -> jax.Array:
    x = _inputs(p["qkv"], 4, 6)
    q, k, v = jnp.moveaxis((x @ p["qkv"] + p["bias"]).reshape(4, 3, 2, 4), 1, 0)
    return _square(jnp.einsum("hnm,mhe->nhe", jax.nn.softmax(jnp.einsum("nhe,mhe->hnm", q, k)), v) - 0.3)


def _layer_normalised(x: jax.Array) -> jax.Array:
    return _normalised(x - jnp.mean(x, -1, keepdims=True))


def _written_loss(p: Tree) -> jax.Array:
    x = _inputs(p["out"], 4, 2, 4)
    return _square(jnp.tanh(_layer_normalised(jnp.einsum("nhe,hed->nd", x, p["out"]) + p["bias"])[:, :3]))


def _tied_loss(p: Tree) -> jax.Array:
    """A table that embeds and unembeds: a LayerNorm hides what rows gain, a softmax what all logits gain."""
    x = _layer_normalised(p["table"] + jnp.tanh(_layer_normalised(p["table"]) @ p["up"]))
    return _square(jax.nn.log_softmax((x * jnp.arange(1.0, 1.0 + x.shape[-1])) @ p["table"].T)[:3])


def _readers_loss(p: Tree, normalise: Callable[[jax.Array], jax.Array] = _layer_normalised) -> jax.Array:
    """Two kernels that read a norm."""
    x = normalise(_inputs(p["up"]["kernel"], 4, 6)) * (1.0 + p.get("scale", 0.0)) + p.get("bias", 0.0)
    up = x @ p["up"]["kernel"] + p["up"].get("bias", 0.0)
    return _square(jnp.tanh(_project(p, "query", x))) + _square(jnp.tanh(up))


def _post_norm_loss(p: Tree) -> jax.Array:
    """A layer behind a norm whose output it is added to, so that the norm's scale cannot move into the kernel."""
    y = _layer_normalised(_inputs(p["up"]["kernel"], 4, 6)) * (1.0 + p["scale"]) + p["bias"]
    hidden = jax.nn.relu(y @ p["up"]["kernel"] + p["up"]["bias"])
    return _square(jnp.tanh(y + hidden @ p["down"]["kernel"]))


def _stream_loss(p: Tree, centred: bool = False) -> jax.Array:
    """A stream that an embedding and a bias write to, and one kernel reads through a norm."""
    x = p["token"][np.array([0, 3, 7, 1])] + p["bias"]
    x = (_layer_normalised if centred else _normalised)(x) * p.get("scale", 1.0) + p.get("norm_bias", 0.0)
    return _square(jnp.tanh(x @ p["up"]["kernel"] + p["up"].get("bias", 0.0)))


def _skips_loss(p: Tree) -> jax.Array:
    x = p["token"][np.array([0, 3, 7, 1])]
    for layer in p["layers"].values():
        x = x + jnp.tanh(_normalised(x)) @ layer["out"]
    return _square(jnp.tanh(_normalised(x) @ p["up"]))


def _lm_loss(config: lm.LMConfig, p: Tree) -> jax.Array:
    tokens = np.random.default_rng(0).integers(config.vocab, size=(3, config.max_len + 1))
    return lm_parts(config)[1](p, tokens)


# Gauges -------------------------------------------------------------------------------------------

_SIZES: dict[str, Any] = dict(vocab=7, d_model=6, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=5, max_len=4)
GPT = lm.LMConfig(**_SIZES)
LLAMA = lm.llama_config(**_SIZES | {"heads": 4})


def _near_one(key: jax.Array) -> Tree:
    """A norm whose scale, stored less one, is positive: numbers near zero would be ill-conditioned in float32."""
    shapes = dict(query__kernel=(6, 2, 4), query__bias=(2, 4), up__kernel=(6, 5), up__bias=(5,))
    params = _params(scale=(6,), bias=(6,), **shapes)(key)
    return params | {"scale": 0.2 * params["scale"]}


def _post_norm(key: jax.Array) -> Tree:
    """Small enough that no tanh is saturated: Adam would divide a gradient of nothing but roundoff by its size."""
    params = _params(scale=(6,), bias=(6,), up__kernel=(6, 5), up__bias=(5,), down__kernel=(5, 6))(key)
    return jax.tree.map(lambda x: 0.3 * x, params)


def _residual_gauges() -> list[Gauge]:
    norm = go.norm_scale({"scale": "channel", "norm_bias": "channel"}, {"up/kernel": "channel _"})
    write = {"token": "_ basis", "bias": "basis"}
    return [go.residual_rotation({"up/kernel": "basis _"}, write, [norm], centred=True), norm]


def _stacked_residual_gauges() -> list[Gauge]:
    own = {"layers/scale": "layer channel", "layers/norm_bias": "layer channel"}
    norm = go.norm_scale(own, {"layers/up": "layer channel _"})
    read, write = {"layers/up": "_ basis _"}, {"token": "_ basis", "layers/down": "_ _ basis"}
    return [go.residual_rotation(read, write, [norm], centred=True, hold=True), norm]


def _stacked_stream_loss(p: Tree) -> jax.Array:
    def layer(x: jax.Array, q: Tree) -> tuple[jax.Array, None]:
        return x + jnp.tanh((_layer_normalised(x) * q["scale"] + q["norm_bias"]) @ q["up"]) @ q["down"], None

    x, _ = jax.lax.scan(layer, p["token"][np.array([0, 3, 1, 7])], p["layers"])
    return _square(x @ x.T)


def _latent_gauges() -> list[Gauge]:
    norm = go.norm_scale({"layers/{i}/scale": "channel"}, {"layers/{i}/up": "channel _"})
    return [go.residual_rotation(
        {"layers/{i}/up": "basis _"}, {"layers/{i}/down": "_ basis"}, [norm], per_layer=True), norm]


def _latents_loss(p: Tree) -> jax.Array:
    x = p["token"][np.array([0, 3, 1, 7])]
    for q in p["layers"].values():
        latent = x @ q["down"]
        latent = latent * jax.lax.rsqrt(jnp.mean(jnp.square(latent), -1, keepdims=True)) * q["scale"]
        x = x + jnp.tanh(latent @ q["up"])
    return _square(x)


def _stacked_latent_gauges() -> list[Gauge]:
    """A residual stream, and a centred latent vector per layer, whose kernels all turn with the stream."""
    own = {"layers/scale": "layer channel", "layers/norm_bias": "layer channel"}
    norm = go.norm_scale(own, {"layers/up": "layer channel _"})
    read, write = {"layers/up": "layer basis _"}, {"layers/down": "layer _ basis"}
    return [go.residual_rotation(read, write, [norm], centred=True, hold=True, per_layer=True), norm,
            go.residual_rotation({"layers/down": "_ basis _"}, {"token": "_ basis", "layers/up": "_ _ basis"})]


def _stacked_latents_loss(p: Tree) -> jax.Array:
    def layer(x: jax.Array, q: Tree) -> tuple[jax.Array, None]:
        return x + (_layer_normalised(x @ q["down"]) * q["scale"] + q["norm_bias"]) @ q["up"], None

    x, _ = jax.lax.scan(layer, p["token"][np.array([0, 3, 1, 7])], p["layers"])
    return _square(x @ x.T)


def _mixed_gauges() -> list[Gauge]:
    """Values of two layers are mixed with shared ones, each by a multiplier: no order of whole sides reads them all."""
    writers = dict.fromkeys(("shared", "v0", "v1"), "_ basis")
    return [go.head_linear(writers, {"o0": "basis _", "o1": "basis _"}),
            go.rescale({"lam{i}": "part=0"}, {"v{i}": "_ _"}),
            go.rescale({"shared": "_ _"}, {"lam0": "part=1", "lam1": "part=1"}),
            go.rescale({"o1": "_ _"}, {"lam1": "part=1", "v1": "_ _"})]


def _mixed_loss(p: Tree) -> jax.Array:
    x = _inputs(p["shared"], 4, 8)
    shared = x[:, 4:] @ p["shared"]
    first, second = (p[f"lam{k}"][0] * (x[:, :4] @ p[f"v{k}"]) + p[f"lam{k}"][1] * shared for k in (0, 1))
    return _square(jnp.tanh(jnp.tanh(first @ p["o0"]) + second @ p["o1"]))


def _kernels_loss(p: Tree) -> jax.Array:
    return _square(jnp.tanh(_inputs(p["a"], 4, 6) @ p["a"] @ p["b"] @ p["c"] @ p["d"]))


def _core_loss(p: Tree) -> jax.Array:
    x = _inputs(p["a"], 4, 6)
    return _square(jnp.tanh(jnp.einsum("ti,tj,ijk->tk", x @ p["a"] + p["bias"], jnp.cos(x) @ p["b"], p["core"])))


def _latent_head_gauges() -> list[Gauge]:
    """Keys of heads from a latent vector: the stream is read first, then the vector, then the heads."""
    norm = go.norm_scale({"scale": "1+ channel"}, {"key": "channel _ _"})
    return [go.head_rotation({"query": "_ head basis", "key": "_ head basis"}), norm,
            go.residual_rotation({"key": "basis _ _"}, {"down": "_ basis"}, [norm], per_layer=True),
            go.residual_rotation({"query": "basis _ _", "down": "basis _"}, {"token": "_ basis"})]


def _latent_heads_loss(p: Tree) -> jax.Array:
    x = p["token"][np.array([0, 3, 1, 7])]
    latent = x @ p["down"]
    latent = latent * jax.lax.rsqrt(jnp.mean(jnp.square(latent), -1, keepdims=True)) * (1.0 + p["scale"])
    query, key = (jnp.einsum("ti,ihd->thd", *pair) for pair in ((x, p["query"]), (latent, p["key"])))
    return _square(jnp.tanh(jnp.einsum("thd,shd->hts", query, key)))


def _normed_head_gauges() -> list[Gauge]:
    """Heads whose outputs are normalised one by one, with one scale for all of them, as in differential attention."""
    norm = go.norm_scale({"scale": "channel"}, {"out": "_ channel _"})
    read, write = {"out": "head basis _"}, {"value": "_ head basis"}
    return [go.residual_rotation(read, write, [norm], per_layer=True, hold=True), norm]


def _normed_heads_loss(p: Tree) -> jax.Array:
    values = jnp.einsum("ti,ihd->thd", _inputs(p["value"], 4, 6), p["value"])
    values = values * jax.lax.rsqrt(jnp.mean(jnp.square(values), -1, keepdims=True)) * p["scale"]
    return _square(jnp.tanh(jnp.einsum("thd,hdo->to", values, p["out"])))


def _layer_scale_gauges() -> list[Gauge]:
    """A layer writes to the stream through a trained scale."""
    scale = go.norm_scale({"scale": "channel"}, {"down": "_ channel", "bias": "channel"})
    write = {"token": "_ basis", "down": "_ basis", "bias": "basis"}
    return [go.residual_rotation({"up": "basis _"}, write, [scale]), scale]


def _layer_scale_loss(p: Tree) -> jax.Array:
    x = p["token"][np.array([0, 3, 1, 7])]
    x = x + (jnp.tanh(x @ p["up"]) @ p["down"] + p["bias"]) * p["scale"]
    return _square(x @ x.T)


def _norm_and_shift() -> list[Gauge]:
    return [go.norm_scale({"norm": "channel"}, {"kernel": "channel _"}), go.logit_shift(_KERNEL_AND_BIAS)]


def _embedded_loss(p: Tree) -> jax.Array:
    return _square(jnp.tanh((p["token"][np.array([0, 3, 1])] + p["position"])[:, None, :]))


def _one(name: str, dim: int, loss: Loss, params: Any, make: Callable[..., Gauge], *blocks: Any, **options: Any) -> Any:
    """A row of one gauge, that `make` makes of its blocks and options."""
    return GaugeCase(name, lambda: [make(*blocks, **options)], params, loss, dim)


def _of_lm(name: str, dim: int, config: lm.LMConfig, gauges: Callable[[lm.LMConfig], list[Gauge]]) -> GaugeCase:
    """A row of a language model's gauges."""
    return GaugeCase(name, lambda: gauges(config), partial(_lm_params, config), partial(_lm_loss, config), dim)


def _of_latent(layout: str, dim: int) -> GaugeCase:
    config = LATENT[layout]
    params, loss = partial(_normal, config.shapes), partial(_latent_loss, layout)
    return GaugeCase(f"product/latent_{layout}", lambda: latent.gauges(config, linear=False), params, loss, dim)


_UNIT = _params(up__kernel=(6, 5), up__bias=(5,), down=(5, 3))
_QK, _QK_PARTIAL = _params(query=(6, 2, 4), key=(6, 2, 4)), _params(query=(6, 2, 6), key=(6, 2, 6))
_GROUPED = _params(query=(6, 4, 4), key=(6, 2, 4))
_VALUE = _params(value__kernel=(6, 2, 4), value__bias=(2, 4), out=(2, 4, 6))
_FUSED, _LORA = _params(qkv=(6, 24), bias=(24,)), _params(a=(6, 3), b=(3, 5))
_EMBEDDED, _CHAIN = _params(token=(5, 4), position=(3, 4)), _params(w1=(6, 5), w2=(5, 4), w3=(4, 3))
_NORMED_HEAD = _params(norm=(6,), kernel=(6, 7), bias=(7,))
_TURNS, _STILL = "_ head basis=0:2+3:5", "_ head basis=2:3+5:6"
_QUERIES, _KEY = {"query": "_ (head _) basis"}, {"key": "_ head basis"}
_HEADS, _FIRST_FOUR = (dict.fromkeys(("query", "key"), f"_ head {basis}") for basis in ("basis", "basis=0:4"))
_KERNEL_AND_BIAS = {"kernel": "_ vocab", "bias": "vocab"}
_VALUE_READ, _VALUE_WRITE = {"value/kernel": "_ head basis", "value/bias": "head basis"}, {"out": "head basis _"}
_UP, _DOWN = {"up/kernel": "_ channel", "up/bias": "channel"}, {"down": "channel _"}
_READERS = {"query/kernel": "channel _ _", "up/kernel": "channel _"}
_READER_BIASES = {"query/bias": "_ _", "up/bias": "_"}
_SPLIT = {"qkv": 3, "head": 2}


GAUGE_CASES: tuple[GaugeCase, ...] = (
    _one("user_gauge/translation", 4, _embedded_loss, _EMBEDDED, Translation, "token", "position"),
    _one("logit_shift/kernel", 6, _head_loss, _params(kernel=(6, 7)), go.logit_shift, {"kernel": "_ vocab"}),
    _one("logit_shift/kernel_bias", 7, _head_loss, _params(kernel=(6, 7), bias=(7,)), go.logit_shift, _KERNEL_AND_BIAS),
    _one("logit_shift/bias", 1, _head_loss, _params(bias=(7,)), go.logit_shift, {"bias": "vocab"}),
    _one("logit_shift/padded", 7, lambda p: _head_loss({"kernel": p["kernel"][:, :7], "bias": p["bias"][:7]}),
         _params(kernel=(6, 9), bias=(9,)), go.logit_shift, {"kernel": "_ vocab=0:7", "bias": "vocab=0:7"}),
    _one("logit_shift/two_heads", 12, _two_heads_loss, _params(kernel=(2, 6, 7)),  # two blocks on one leaf
         go.logit_shift, {"kernel": ("slot=0 _ vocab", "slot=1 _ vocab")}),
    GaugeCase("logit_shift/two_gauges", lambda: [go.logit_shift({"kernel": f"slot={n} _ vocab"}) for n in (0, 1)],
              _params(kernel=(2, 6, 7)), _two_heads_loss, dim=12),  # two gauges on one leaf
    _one("logit_shift/grouped", 12, lambda p: _two_heads_loss({"kernel": p["kernel"].reshape(6, 2, 7).swapaxes(0, 1)}),
         _params(kernel=(6, 14)), go.logit_shift, {"kernel": "_ (slot vocab)"}, sizes={"slot": 2}),  # of one axis
    _one("rescale/channel", 5, partial(_unit_loss, 1), _UNIT, go.rescale, _UP, _DOWN, degree=1),
    _one("rescale/degree_2", 5, partial(_unit_loss, 2), _UNIT, go.rescale, _UP, _DOWN, degree=2),
    _one("rescale/degree_3", 5, partial(_unit_loss, 3), _UNIT, go.rescale, _UP, _DOWN, degree=3),
    _one("rescale/block", 1, _lora_loss, _LORA, go.rescale, {"a": "_ _"}, {"b": "_ _"}),
    _one("multiplier_balance/mha", 3, _multiplier_loss, _params(query=(3, 4), key=(3, 4)), go.multiplier_balance,
         {"query": "head _"}, {"key": "head _"}),
    _one("rescale/gate", 5, _gate_loss, _params(gate=(2, 6, 5), down=(5, 6)), go.rescale, {"gate": "gate=1 _ channel"},
         {"down": "channel _"}),
    _one("rescale/layers", 8, _layers_loss,
         _params(layers__0__up=(6, 5), layers__0__down=(5, 6), layers__1__up=(6, 3), layers__1__down=(3, 6)),
         go.rescale, {"layers/{i}/up": "_ channel"}, {"layers/{i}/down": "channel _"}),
    _one("norm_scale/bias", 6, _norm_loss, _params(scale=(6,), bias=(6,), kernel=(6, 5)), go.norm_scale,
         {"scale": "channel", "bias": "channel"}, {"kernel": "channel _"}),
    _one("norm_scale/one_plus", 6, _consumers_loss,
         _params(norm=(6,), query=(6, 2, 4), key=(6, 2, 4), value=(6, 2, 4)), go.norm_scale, {"norm": "1+ channel"},
         dict.fromkeys(("query", "key", "value"), "channel _ _")),
    _one("scale_invariant/kernel", 2, _normed_head_loss, _params(kernel=(6, 2, 4)), go.scale_invariant,
         {"kernel": "_ head _"}),
    _one("scale_invariant/kernel_bias", 2, _normed_head_loss, _params(kernel=(6, 2, 4), bias=(2, 4)),
         go.scale_invariant, {"kernel": "_ head _", "bias": "head _"}),
    _one("head_rotation/mha", 12, _attention_loss, _QK, go.head_rotation, _HEADS),
    _one("head_rotation/gqa", 12, _attention_loss, _GROUPED, go.head_rotation, _QUERIES | _KEY),
    _one("head_rotation/mqa", 6, _attention_loss, _params(query=(6, 2, 4), key=(6, 4)), go.head_rotation,
         {"query": "_ _ basis", "key": "_ basis"}),
    _one("head_rotation/bias", 12, _attention_loss,
         _params(query__kernel=(6, 2, 4), query__bias=(2, 4), key__kernel=(6, 2, 4), key__bias=(2, 4)),
         go.head_rotation, {f"{n}/kernel": "_ head basis" for n in ("query", "key")}
         | {f"{n}/bias": "head basis" for n in ("query", "key")}),
    _one("head_rotation/value_out", 12, _value_loss, _VALUE, go.head_rotation, _VALUE_READ | _VALUE_WRITE),
    _one("head_rotation/fused", 12, _fused_loss, _FUSED, go.head_rotation,
         {"qkv": ("_ (qkv=0 head basis)", "_ (qkv=1 head basis)"),
          "bias": ("(qkv=0 head basis)", "(qkv=1 head basis)")}, sizes=_SPLIT),
    _one("head_rotation/scanned", 24, _scanned_loss, _params(query=(2, 6, 2, 4), key=(2, 6, 2, 4)), go.head_rotation,
         {"query": "layer _ head basis", "key": "layer _ head basis"}),
    _one("rope_torus/half", 4, _rope_loss("half"), _QK, go.rope_torus, _HEADS, pairing="half"),
    _one("rope_torus/partial", 4, _rope_loss("interleaved"), _QK_PARTIAL, go.rope_torus, _FIRST_FOUR,
         pairing="interleaved"),
    _one("head_linear/value_out", 32, _value_loss, _VALUE, go.head_linear, _VALUE_READ, _VALUE_WRITE),
    _one("head_linear/gqa", 32, _attention_loss, _GROUPED, go.head_linear, _QUERIES, _KEY),
    _one("head_linear/fused", 32, _fused_loss, _FUSED, go.head_linear,
         {"qkv": "_ (qkv=0 head basis)", "bias": "(qkv=0 head basis)"},
         {"qkv": "_ (qkv=1 head basis)", "bias": "(qkv=1 head basis)"}, sizes=_SPLIT),
    _one("head_linear/lora", 9, _lora_loss, _LORA, go.head_linear, {"a": "_ basis"}, {"b": "basis _"}),
    _one("rope_linear/half", 8, _rope_loss("half"), _GROUPED, go.rope_linear, _QUERIES, _KEY),
    _one("rope_linear/partial", 8, _rope_loss("interleaved"), _QK_PARTIAL, go.rope_linear,
         {"query": "_ head basis=0:4"}, {"key": "_ head basis=0:4"}, pairing="interleaved"),
    GaugeCase(
        "product/slow_planes",  # coordinates that do not turn: any rotation
        lambda: [go.rope_torus({"query": _TURNS, "key": _TURNS}), go.head_rotation({"query": _STILL, "key": _STILL})],
        _QK_PARTIAL, _slow_planes_loss, dim=6),
    GaugeCase(
        "product/linear",  # a norm's scale on the rows, GL(d_h) on the columns
        lambda: [go.norm_scale({"norm": "channel"}, {"value/kernel": "channel _ _"}),
                 go.head_linear(_VALUE_READ, _VALUE_WRITE)],
        _params(norm=(6,), value__kernel=(6, 2, 4), value__bias=(2, 4), out=(2, 4, 6)), _value_loss, dim=38),
    _of_lm("product/gpt", 54, GPT, lm.gauges),  # LayerNorms 18, query-key 12, value-out 12, ReLU 5, shift 7.
    _of_lm("product/llama", 45, LLAMA, lm.gauges),  # RMSNorms 18, torus 4, value-out 12, SwiGLU 5, shift 6.
    _of_latent("fused", 67),  # norms 8 + 7 + 6 + 8, query-key 6, rotary 1, values 8, experts 15, router 8
    _of_latent("split", 71),  # values and outputs 12, because there is no gate
    GaugeCase(
        "product/chain",
        lambda: [go.rescale({"w1": "_ channel"}, {"w2": "channel _"}),
                 go.rescale({"w2": "_ channel"}, {"w3": "channel _"})], _CHAIN, _chain_loss, dim=9),
    GaugeCase("product/mixed_linear", _mixed_gauges, _params(
        shared=(4, 3), v0=(4, 3), v1=(4, 3), o0=(3, 5), o1=(3, 5), lam0=(2,), lam1=(2,)), _mixed_loss, dim=13),
    GaugeCase(  # linear layers: a matrix, or a rotation, on either side of two of the kernels
        "product/linear_kernels",
        lambda: [go.head_linear({x: "_ basis"}, {y: "basis _"}) for x, y in itertools.pairwise("abcd")],
        _params(a=(6, 2), b=(2, 2), c=(2, 2), d=(2, 5)), _kernels_loss, dim=12),
    GaugeCase(
        "product/kernel_rotations",
        lambda: [go.head_rotation({x: "_ basis", y: "basis _"}) for x, y in itertools.pairwise("abcd")],
        _params(a=(6, 4), b=(4, 4), c=(4, 4), d=(4, 5)), _kernels_loss, dim=18),
    GaugeCase(  # the outputs of two kernels meet in one
        "product/linear_core", lambda: [go.head_linear({"a": "_ basis", "bias": "basis"}, {"core": "basis _ _"}),
                                 go.head_linear({"b": "_ basis"}, {"core": "_ basis _"})],
        _params(a=(6, 2), bias=(2,), b=(6, 4), core=(2, 4, 5)), _core_loss, dim=20),
    GaugeCase("product/semidirect", _norm_and_shift, _NORMED_HEAD, _semidirect_loss, dim=13),
    GaugeCase(  # the shift first: scales move it
        "product/semidirect_reversed", lambda: _norm_and_shift()[::-1], _NORMED_HEAD, _semidirect_loss, dim=13),
)

FLAT_CASES: tuple[GaugeCase, ...] = (
    _one("bias_absorption/norm", 6, partial(_readers_loss, normalise=_normalised),  # with biases of unlike shapes
         _params(bias=(6,), query__kernel=(6, 2, 4), query__bias=(2, 4), up__kernel=(6, 5), up__bias=(5,)),
         go.bias_absorption, {"bias": "channel"}, _READERS, _READER_BIASES),
    _one("bias_absorption/stacked", 12,
         lambda p: _square(jnp.tanh(jnp.einsum("lc,lcf->lf", 0.3 + p["bias"], p["up"]["kernel"]) + p["up"]["bias"])),
         _params(bias=(2, 6), up__kernel=(2, 6, 5), up__bias=(2, 5)),
         go.bias_absorption, {"bias": "layer channel"}, {"up/kernel": "layer channel _"}, {"up/bias": "layer _"}),
    _one("bias_absorption/residual", 6, _carried_bias_loss,  # behind a sublayer: the stream carries its bias past it
         _params(bias=(6,), up__kernel=(6, 5), up__bias=(5,), down__kernel=(5, 6), down__bias=(6,)), go.bias_absorption,
         {"bias": "channel"}, {"up/kernel": "channel _"}, {"up/bias": "_"}, residual={"down/bias": "channel"}),
    _one("bias_absorption/value_gqa", 8, _value_bias_loss,  # two query heads read each value head
         _params(value__kernel=(6, 2, 4), value__bias=(2, 4), out__kernel=(4, 4, 6), out__bias=(6,)),
         go.bias_absorption, {"value/bias": "head entry"}, {"out/kernel": "(head _) entry _"}, {"out/bias": "_"}),
    _one("key_bias/mha", 8, _softmax_loss, _params(query__kernel=(6, 2, 4), key__kernel=(6, 2, 4), key__bias=(2, 4)),
         go.key_bias, {"key/bias": "_ _"}),
    _one("key_bias/fused", 8, _fused_softmax_loss, _FUSED, go.key_bias, {"bias": "(qkv=1 _)"}, sizes={"qkv": 3}),
    _one("embedding_shift/positions", 4, _embedded_loss, _EMBEDDED, go.embedding_shift, {"token": "_ channel"},
         {"position": "_ channel"}),
    _one("norm_write_shift/layer", 9, _written_loss, _params(out=(2, 4, 6), bias=(6,)), go.norm_write_shift,
         {"out": "_ _ channel", "bias": "channel"}),
    _one("norm_write_shift/tied", 1, _tied_loss, _params(table=(5, 4), up=(4, 4)), go.norm_write_shift,
         tied={"table": "vocab channel"}),
    _one("norm_read_shift/plain", 13, _readers_loss, _params(query__kernel=(6, 2, 4), up__kernel=(6, 5)),
         go.norm_read_shift, _READERS),
    _one("residual_rotation/plain", 15, _stream_loss, _params(token=(8, 6), bias=(6,), up__kernel=(6, 5)),
         go.residual_rotation, {"up/kernel": "basis _"}, {"token": "_ basis", "bias": "basis"}),
    GaugeCase(
        "residual_rotation/stacked", _stacked_residual_gauges, _params(
            token=(8, 6), layers__scale=(2, 6), layers__norm_bias=(2, 6), layers__up=(2, 6, 5), layers__down=(2, 5, 6)
        ), _stacked_stream_loss, dim=22),
    GaugeCase(
        "residual_rotation/latents", _latent_gauges, _params(
            token=(8, 6), **{f"layers__{i}__{name}": shape for i in (0, 1) for name, shape in (
                ("down", (6, 4)), ("scale", (4,)), ("up", (4, 6)))}
        ), _latents_loss, dim=20),
    GaugeCase(
        "residual_rotation/layer_scale", _layer_scale_gauges, _params(
            token=(8, 6), up=(6, 5), down=(5, 6), bias=(6,), scale=(6,)
        ), _layer_scale_loss, dim=21),
    GaugeCase(
        "product/normed_heads", _normed_head_gauges, _params(value=(6, 2, 4), scale=(4,), out=(2, 4, 5)),
        _normed_heads_loss, dim=16),
    GaugeCase(
        "product/latent_heads", _latent_head_gauges, _params(
            token=(8, 6), down=(6, 4), scale=(4,), query=(6, 2, 3), key=(4, 2, 3)
        ), _latent_heads_loss, dim=31),
    GaugeCase(
        "product/stacked_latents", _stacked_latent_gauges, _params(
            token=(8, 6), layers__down=(2, 6, 4), layers__scale=(2, 4), layers__norm_bias=(2, 4), layers__up=(2, 4, 6)
        ), _stacked_latents_loss, dim=29),
    _one("residual_scale/layers", 1, _skips_loss,
         _params(token=(8, 6), layers__0__out=(6, 6), layers__1__out=(6, 6), up=(6, 5)),
         go.residual_scale, {"token": "_ _", "layers/{i}/out": "_ _"}),
    GaugeCase(
        "norm_read_shift/one_plus_bias",
        lambda: [go.norm_read_shift(_READERS, {"scale": "1+ channel"}, {"bias": "channel"}, _READER_BIASES),
                 go.norm_scale({"scale": "1+ channel", "bias": "channel"}, _READERS)],
        _near_one, _readers_loss, dim=19),
    GaugeCase(
        "norm_read_shift/trained_scale",  # a norm behind a layer: the next layer adds to its output
        lambda: [go.norm_read_shift({"up/kernel": "channel _"}, {"scale": "1+ channel"}, {"bias": "channel"},
                                    {"up/bias": "_"}), go.rescale(_UP, {"down/kernel": "channel _"})],
        _post_norm, _post_norm_loss, dim=10),
    GaugeCase(
        "product/residual_layernorm", _residual_gauges,
        _params(token=(8, 6), bias=(6,), scale=(6,), norm_bias=(6,), up__kernel=(6, 5), up__bias=(5,)),
        partial(_stream_loss, centred=True), dim=16),
    # All that a LayerNorm network with biases has, but GL of heads.
    _of_lm("product/whole_gpt", 166, GPT, partial(lm.whole_gauges, linear=False)),
    # Shifts and matrices that are read from the same kernels.
    _of_lm("product/whole_gpt_linear", 166 + 2 * 2 * (16 - 6), GPT, lm.whole_gauges),
    _of_lm("product/whole_llama", 60, LLAMA, partial(lm.whole_gauges, linear=False)),
)
"""The residual stream and the dead directions beside it. Their products have neither `inverse` nor `compose`."""


def _mlp_units(stacked: str = "") -> Gauge:
    return go.permutation(
        {"up/kernel": f"{stacked}_ channel", "up/bias": f"{stacked}channel", "down": f"{stacked}channel _"},
        axis="channel" if stacked else None,
    )


def _experts() -> list[Gauge]:
    up, down = {"up": "expert _ channel"}, {"down": "expert channel _"}
    order = go.permutation({"router": "_ expert", "up": "expert _ _", "down": "expert _ _"})
    return [go.rescale(up, down), go.permutation(up | down, axis="channel"), order]


def _experts_loss(p: Tree) -> jax.Array:
    x = _inputs(p["router"], 4, 6)
    hidden = jax.nn.relu(jnp.einsum("nd,edf->nef", x, p["up"]))
    return _square(jnp.einsum("ne,nef,efd->nd", jax.nn.softmax(x @ p["router"]), hidden, p["down"]))


def _grouped_heads_loss(p: Tree) -> jax.Array:
    """Two query heads per key and value head, and an output kernel that reads all of them."""
    x = _inputs(p["query"], 4, 6)
    keys, values = (jnp.repeat(_project(p, name, x), 2, 1) for name in ("key", "value"))
    weights = jax.nn.softmax(jnp.einsum("nhe,mhe->hnm", _project(p, "query", x), keys))
    return _square(jnp.tanh(jnp.einsum("hnm,mhe,hed->nd", weights, values, p["out"])))


_GROUPED_HEADS = _params(query=(6, 6, 4), key=(6, 3, 4), value=(6, 3, 4), out=(6, 4, 6))


def _grouped_heads() -> Gauge:
    whole = {"query": "_ (head _) _", "key": "_ head _", "value": "_ head _", "out": "(head _) _ _"}
    return go.permutation(whole, sizes={"head": 3})


def _in_every_basis() -> list[Gauge]:
    """Rotations of heads of any order, on both sides of the permutation in the list."""
    sizes = {"head": 3}
    values = go.head_rotation({"value": "_ head basis", "out": "(head _) basis _"}, sizes=sizes)
    return [go.head_linear(_QUERIES, _KEY, sizes=sizes), _grouped_heads(), values]


def _stacked_units_loss(p: Tree) -> jax.Array:
    def layer(x: jax.Array, q: Tree) -> tuple[jax.Array, None]:
        return jax.nn.gelu(x @ q["up"]["kernel"] + q["up"]["bias"]) @ q["down"], None

    return _square(jax.lax.scan(layer, _inputs(p["down"], 4, 6), p)[0])


def _lm_with_order(linear: bool, config: lm.LMConfig) -> list[Gauge]:
    return [*lm.whole_gauges(config, linear), *lm.permutations(config)]


DISCRETE_CASES: tuple[GaugeCase, ...] = (
    GaugeCase("permutation/units", lambda: [_mlp_units()], _UNIT, partial(_unit_loss, 1), dim=0),
    GaugeCase("permutation/stacked", lambda: [_mlp_units("layer ")],
              _params(up__kernel=(2, 6, 5), up__bias=(2, 5), down=(2, 5, 6)), _stacked_units_loss, dim=0),
    GaugeCase("permutation/grouped_heads", lambda: [_grouped_heads()], _GROUPED_HEADS, _grouped_heads_loss, dim=0),
    GaugeCase("permutation/rotated_heads", _in_every_basis, _GROUPED_HEADS, _grouped_heads_loss, dim=3 * (16 + 6)),
    GaugeCase("permutation/experts", _experts, _params(router=(6, 4), up=(4, 6, 5), down=(4, 5, 6)), _experts_loss,
              dim=20),
    GaugeCase(
        "permutation/chain",  # the kernel between two layers has both of their units
        lambda: [
            go.permutation({"w1": "_ channel", "w2": "channel _"}),
            go.permutation({"w2": "_ channel", "w3": "channel _"}),
            go.rescale({"w1": "_ channel"}, {"w2": "channel _"}), go.rescale({"w2": "_ channel"}, {"w3": "channel _"}),
        ], _params(w1=(6, 5), w2=(5, 4), w3=(4, 6)), _chain_loss, dim=9),
    _of_lm("permutation/whole_gpt", 166 + 2 * 2 * (16 - 6), GPT, partial(_lm_with_order, True)),
    _of_lm("permutation/whole_llama", 60, LLAMA, partial(_lm_with_order, False)),
)
"""Permutations, and products with them. The group has no directions, and what reads or splits has nothing to find."""


def _falling(count: jax.Array) -> jax.Array:
    """A schedule: 1e-2, falling with the step's number."""
    return 1e-2 / (1.0 + count)


def _hyperball(
    gauges: Sequence[Gauge], radius: str | float = "initial", learning_rate: optax.ScalarOrSchedule | None = None
) -> optax.GradientTransformationExtraArgs:
    """Spheres on the leaves that gauges bind, each as the first of them reads it."""
    return go.norms.hyperball(_axes(gauges), radius, learning_rate=learning_rate)


def _axes(gauges: Sequence[Any]) -> dict[str, str]:
    """Path → axes as the first gauge reads it, summed over what its group acts on."""
    axes: dict[str, str] = {}
    for spec in (spec for gauge in gauges for spec in gauge.specs):
        axes.setdefault(spec.pattern, spec.axes.replace("basis", "_").replace("vocab", "_"))
    return axes


def _on_vectors(gauges: Sequence[Gauge]) -> dict[str, str]:
    """Of these the ones that turn: vectors of more than one entry."""
    return {path: axes for path, axes in _axes(gauges).items() if "_" in axes}


def _rotational(gauges: Sequence[Gauge], learning_rate: Any, eta_r: Any, center: bool) -> Any:
    return go.norms.rotational(
        optax.adam(0.01), _on_vectors(gauges), learning_rate=learning_rate, weight_decay=0.1, eta_r=eta_r, center=center
    )


def _rotational_adamw(gauges: Sequence[Gauge], learning_rate: Any, weight_decay: Any) -> Any:
    return go.norms.rotational_adamw(learning_rate, _on_vectors(gauges), weight_decay=weight_decay)


def _rotational_sgdm(gauges: Sequence[Gauge], learning_rate: Any) -> Any:
    return go.norms.rotational_sgdm(learning_rate, _on_vectors(gauges), gain=optax.adam(0.01))


def _rotational_lion(gauges: Sequence[Gauge], learning_rate: Any, eta_r: Any) -> Any:
    return go.norms.rotational_lion(learning_rate, _on_vectors(gauges), eta_r=eta_r)


def _max_norm(gauges: Sequence[Gauge], learning_rate: Any, bound: float = 1.0) -> Any:
    return go.norms.max_norm(optax.adam(learning_rate), _on_vectors(gauges), learning_rate=learning_rate, bound=bound)


def _max_norm_muon(gauges: Sequence[Gauge], learning_rate: Any) -> Any:
    return go.max_norm_muon(learning_rate, gauges, _neurons(gauges))


def _neurons(gauges: Sequence[Any]) -> dict[str, str]:
    """Neurons of whatever leaf has an axis of outputs beside `_`, as the first gauge that binds it names them."""
    neurons: dict[str, str] = {}
    for spec in (spec for gauge in gauges for spec in gauge.specs):
        axes = spec.axes.replace("basis", "_").replace("vocab", "token")
        if "_" in axes and set(axes.split()) - {"_"}:
            neurons.setdefault(spec.pattern, axes)
    return neurons


def _opposite_gram(
    gauges: Sequence[Gauge], damping: float = 0.0, diagonal: bool = False, every: int = 1
) -> optax.GradientTransformationExtraArgs:
    """Without norms, which share kernels with units; with GL in place of a torus."""
    linear = {"rope_torus": lambda torus: go.head_linear(*({s.pattern: s.axes} for s in torus.specs))}
    chosen = [linear.get(g.name, lambda gauge: gauge)(g) for g in gauges if g.name != "norm_scale"]
    return go.links.scale_by_opposite_gram(chosen, damping, diagonal=diagonal, every=every)


def _compressed(gauges: Sequence[Gauge], dtype: str) -> Any:
    """Around Adam on the slice."""
    return go.links.compress_second_moments(go.quotient(optax.adamw(0.01, weight_decay=0.1), gauges), dtype)


def _hold_products(gauges: Sequence[Gauge], kind: str, cap: float | None = None) -> Any:
    """Around Adam, for the units and, in place of a rotation of heads, for one scale per head on the same leaves."""
    scales: list[Gauge] = []
    for gauge in gauges:
        if isinstance(gauge, BlockGauge) and gauge.name == "head_rotation":
            up, down = ({spec.pattern: spec.axes.replace("basis", "_")} for spec in gauge.specs)
            scales.append(go.rescale(up, down))
        elif gauge.name == "rescale":
            scales.append(gauge)
    return go.orbit.hold_products(optax.adam(0.01), scales, kind, cap=cap)


TRANSFORM_CASES: tuple[TransformCase, ...] = (
    TransformCase("gauge_project/gradient", go.gauge_project, {"kind": "gradient"}),
    TransformCase("gauge_project/update", go.gauge_project, {"kind": "update"}),
    TransformCase("scale_by_ddc/body_frame_topk", go.scale_by_ddc, {}),
    TransformCase("scale_by_ddc/per_head_scalar", go.scale_by_ddc, {"v_mode": "per_head_scalar"}),
    TransformCase("scale_by_ddc/per_head_matrix", go.scale_by_ddc, {"v_mode": "per_head_matrix"}),
    TransformCase("scale_by_ddc/none", go.scale_by_ddc, {"v_mode": "none"}),
    TransformCase("scale_by_ddc/sgd", go.scale_by_ddc, {"vertical": "sgd"}),
    TransformCase("scale_by_ddc/adam", go.scale_by_ddc, {"vertical": "adam"}),
    TransformCase("scale_by_ddc/log", go.scale_by_ddc, {"radial": "log", "scale_floor": 0.1}),
    TransformCase("scale_by_ddc/nesterov", go.scale_by_ddc, {"nesterov": True, "refresh_every": 2}),
    TransformCase("scale_by_scaled_polar/sharp", go.links.scale_by_scaled_polar, {"scale": 0.2, "ns_coeffs": "sharp"}),
    TransformCase("add_gauge_decay/number", go.add_gauge_decay, {"weight_decay": 0.1}),
    TransformCase("add_gauge_decay/schedule", go.add_gauge_decay, {"weight_decay": _falling}),
    TransformCase("gauge_retract/rotation", go.gauge_retract, {}),
    TransformCase("gauge_fix/none", go.orbit.gauge_fix, {"inner": None}),
    TransformCase("gauge_fix/adam", go.orbit.gauge_fix, {"inner": optax.adam(0.01), "every": 2, "strength": 0.5}),
    TransformCase("hold_products/init", _hold_products, {"kind": "init"}),
    TransformCase("hold_products/cap", _hold_products, {"kind": "cap", "cap": 0.5}),
    TransformCase("hyperball/initial", _hyperball, {}),
    TransformCase("hyperball/number", _hyperball, {"radius": 2.0, "learning_rate": 0.01}),
    TransformCase("hyperball/schedule", _hyperball, {"learning_rate": _falling}),
    TransformCase("scale_by_opposite_gram/full", _opposite_gram, {}),
    TransformCase("scale_by_opposite_gram/stale", _opposite_gram, {"damping": 1e-3, "diagonal": True, "every": 2}),
    TransformCase("ddc_adamw/number", go.ddc_adamw, {"learning_rate": 0.01}),
    TransformCase("ddc_adamw/schedule", go.ddc_adamw, {"learning_rate": _falling, "weight_decay": _falling}),
    TransformCase("gauge_project/linear", go.gauge_project, {}, linear=True),
    TransformCase("quotient/adamw", go.quotient, {"inner": optax.adamw(0.01, weight_decay=0.1)}),
    TransformCase("quotient/lion", go.quotient, {"inner": optax.lion(0.01)}, linear=True),
    TransformCase("quotient/link", go.quotient, {"inner": optax.scale_by_adam(), "hold": False}),
    TransformCase("compress_second_moments/adam", _compressed, {"dtype": "bfloat16"}),
    TransformCase("compress_second_moments/codes", _compressed, {"dtype": "uint8"}),
    TransformCase("track/adam", go.measure.track, {"inner": optax.adam(0.01), "every": 2}),
    TransformCase("track_balance/every", go.measure.track_balance, {"every": 2}),
    TransformCase("track_rotation/adam",
                  lambda gauges: go.measure.track_rotation(_on_vectors(gauges), optax.adam(0.01), every=2), {}),
    TransformCase("rotational/adam", _rotational, {"learning_rate": 0.01, "eta_r": _falling, "center": False}),
    TransformCase("rotational_adamw/schedule", _rotational_adamw, {"learning_rate": _falling, "weight_decay": 0.1}),
    TransformCase("rotational_sgdm/gain", _rotational_sgdm, {"learning_rate": 0.01}),
    TransformCase("rotational_lion/schedule", _rotational_lion, {"learning_rate": 0.01, "eta_r": _falling}),
    TransformCase("max_norm/number", _max_norm, {"learning_rate": 0.01}),
    TransformCase("max_norm/schedule", _max_norm, {"learning_rate": _falling, "bound": 2.0}),
    TransformCase("max_norm_muon/schedule", _max_norm_muon, {"learning_rate": _falling}),
    TransformCase("scale_by_polar/number", lambda gauges: go.links.scale_by_polar(_neurons(gauges)), {}),
    TransformCase("scale_by_vector_norm/number", lambda gauges: go.links.scale_by_vector_norm(_on_vectors(gauges)),
                  {}),
    TransformCase("keep_norms_below/number",
                  lambda gauges, bound: go.links.keep_norms_below(_on_vectors(gauges), bound), {"bound": 0.5}),
    TransformCase("scale_by_relative_rms/number", go.links.scale_by_relative_rms, {}),
    TransformCase("quotient_adamw/rotation", go.quotient_adamw, {"learning_rate": 0.01}),
    TransformCase("quotient_adamw/linear", go.quotient_adamw, {"learning_rate": 0.01, "nesterov": True}, linear=True),
    TransformCase(
        "quotient_muon/linear", go.quotient_muon,
        {"learning_rate": _falling, "weight_decay": _falling, "adam_learning_rate": 0.01}, linear=True,
    ),
    TransformCase("ddc_muon/number", go.ddc_muon, {"learning_rate": 0.01}),
    TransformCase(
        "ddc_muon/schedule", go.ddc_muon,
        {"learning_rate": _falling, "adam_learning_rate": _falling, "adam_weight_decay": 0.1},
    ),
)


def with_masks(gauge: Gauge, neurons: Mapping[str, str]) -> dict[str, Callable[[Any], Any]]:
    """Every optimizer with weight decay, at a rate of 1e-2, as a function of the decay's mask."""
    links = go.gauge_project(gauge), go.scale_by_ddc(gauge), optax.scale_by_learning_rate(1e-2), go.gauge_retract(gauge)
    decay, muons = dict[str, Any](weight_decay=0.5), partial(go.max_norm_muon, 1e-2, gauge, neurons)
    return {
        "quotient": lambda mask: go.quotient(optax.adamw(1e-2, mask=mask, **decay), gauge),
        "quotient_adamw": lambda mask: go.quotient_adamw(1e-2, gauge, mask=mask, **decay),
        "quotient_muon": lambda mask: go.quotient_muon(1e-2, gauge, weight_decay_mask=mask, **decay),
        "max_norm_muon": lambda mask: muons(weight_decay_mask=mask, **decay),
        "ddc_adamw": lambda mask: go.ddc_adamw(1e-2, gauge, mask=mask, **decay),
        "ddc_muon": lambda mask: go.ddc_muon(1e-2, gauge, weight_decay_mask=mask, **decay),
        "links": lambda mask: optax.chain(*links[:2], go.add_gauge_decay(0.5, gauge, mask=mask), *links[2:]),
    }


# Rows that go through the code of another row of their kind, with another binding or one option more. What is theirs
# alone is checked where bindings and options are; the whole matrix is run with the slow tests.
VARIANTS: frozenset[str] = frozenset({
    "logit_shift/kernel", "logit_shift/bias", "logit_shift/padded", "logit_shift/two_heads", "logit_shift/two_gauges",
    "logit_shift/grouped", "rescale/channel", "multiplier_balance/mha", "rescale/degree_2", "rescale/degree_3",
    "rescale/block", "rescale/gate",
    "norm_scale/bias", "scale_invariant/kernel", "head_rotation/mha", "head_rotation/mqa", "head_rotation/bias",
    "head_rotation/value_out", "head_rotation/scanned", "head_rotation/fused", "rope_torus/half",
    "head_linear/value_out", "head_linear/fused", "head_linear/gqa", "rope_linear/partial",
    "product/gpt", "product/linear", "product/chain", "product/semidirect_reversed", "product/slow_planes",
    "gauge_project/update", "gauge_project/linear", "scale_by_ddc/per_head_scalar", "scale_by_ddc/none",
    "scale_by_ddc/sgd", "scale_by_ddc/log", "scale_by_ddc/nesterov", "add_gauge_decay/number", "gauge_fix/none",
    "hyperball/initial", "hyperball/number", "scale_by_opposite_gram/full", "ddc_adamw/schedule", "quotient/lion",
    "ddc_muon/schedule", "scale_by_ddc/adam", "quotient_adamw/rotation", "product/latent_split",
    "product/kernel_rotations", "product/linear_core",
})
