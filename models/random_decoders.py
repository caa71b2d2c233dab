"""Random small decoders, on which `gauge_optax.discover` is tested.

A number determines a decoder: `drawn(number)` draws its sizes and switches, a `Spec`, at random. The switches decide
its symmetries. Sizes are tiny, and parameters are those at the start of training. `benchmarks.fuzz` calls `discover` on
many of them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TOKENS = 6
OUTLIER = 30.0  # with `outlier`, one channel of the residual stream is this many times as large as the others


@dataclasses.dataclass(frozen=True)
class Spec:
    """A decoder: its sizes, and the switches that decide its symmetries."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    norm: Literal["rms", "layer"]
    scale: Literal["plain", "one_plus", "none"]
    norm_bias: bool
    eps: float
    place: Literal["before", "after", "both"]
    qk_norm: Literal["none", "rms", "layer", "bare", "wide"]
    bias: Literal["none", "qkv", "all"]
    position: Literal["none", "learned", "half", "interleaved", "partial"]
    mlp: Literal["relu", "relu2", "gelu", "swiglu", "reglu"]
    gated_heads: bool
    layout: Literal["heads", "flat", "fused"]
    parallel: bool
    tied: bool
    head_bias: bool
    cap: bool
    final: bool
    scanned: bool
    outlier: bool

    @property
    def vocab(self) -> int:
        """The number of tokens.

        In some decoders the first MLP, or the first norm of queries and keys, gets the embedding of a single token. It
        then has only as many different inputs as there are tokens. These must be more than a quadratic form of the
        stream has entries, or weights have dead directions for lack of inputs.
        """
        normed = self.qk_norm == "wide" or (self.qk_norm != "none" and self.position in ("none", "partial"))
        return 71 if self.parallel or normed else 13

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are rotated by an angle that depends on the position."""
        return self.position in ("half", "interleaved", "partial")


def drawn(number: int) -> Spec:
    """Draws the specification that belongs to a number."""
    rng = np.random.default_rng([54, number])

    def of(*choices: Any, p: Any = None) -> Any:
        return choices[rng.choice(len(choices), p=p)]

    heads = of(2, 4, p=(0.75, 0.25))
    norm = of("rms", "layer")
    layout = of("heads", "flat", "fused", p=(0.6, 0.25, 0.15))
    kv_heads = heads if layout == "fused" else of(*(k for k in (1, 2, 4) if k <= heads))
    position = of("none", "learned", "half", "interleaved", "partial", p=(0.1, 0.2, 0.35, 0.2, 0.15))
    head = 8 if position == "partial" else of(4, 6, p=(0.75, 0.25))  # else "partial" would rotate a single plane
    layers, width, hidden = of(1, 2), max(of(6, 8), head + 2), of(5, 7)
    # Sizes must not make directions dead that are not dead in any real model. A head is therefore not wider than its
    # input, and there are more tokens than channels.
    spec = Spec(
        layers=layers, width=width, heads=heads, kv_heads=kv_heads, head=head, hidden=hidden, norm=norm,
        scale=of("plain", "one_plus", "none", p=(0.7, 0.15, 0.15)),
        norm_bias=norm == "layer" and of(True, False), eps=of(0.0, 1e-6, 1e-5),
        place=of("before", "after", "both", p=(0.8, 0.05, 0.15)),
        qk_norm=of("none", "rms", "layer", "bare", "wide", p=(0.5, 0.25, 0.1, 0.1, 0.05)),
        bias=of("none", "qkv", "all", p=(0.4, 0.2, 0.4)),
        position=position,
        mlp=of("relu", "relu2", "gelu", "swiglu", "reglu"), gated_heads=of(True, False, p=(0.15, 0.85)),
        layout=layout, parallel=of(True, False, p=(0.15, 0.85)), tied=of(True, False),
        head_bias=of(True, False, p=(0.2, 0.8)), cap=of(True, False, p=(0.1, 0.9)),
        final=of(True, False, p=(0.85, 0.15)), scanned=of(True, False, p=(0.3, 0.7)),
        outlier=of(True, False, p=(0.25, 0.75)),
    )
    # Two more cases would make such directions dead, if norms stand behind the sublayers. One is an MLP with fewer
    # units than the stream has channels. The other is a single block with LayerNorms: only the head gets the output of
    # its second norm (docs/design.md §8).
    layers = 2 if spec.place == "after" and spec.norm == "layer" else layers
    return spec if spec.place == "before" else dataclasses.replace(spec, hidden=max(hidden, width), layers=layers)


class Net(NamedTuple):
    """The arguments of `go.discover`: a function, its parameters, and batches."""

    fn: Callable[[Any, Any], jax.Array]
    params: Any
    batches: list[np.ndarray]


def built(spec: Spec) -> Net:
    """Builds the decoder of a specification. Its parameters are those at the start of training."""
    rng = np.random.default_rng(0)

    def kernel(*shape: int, fan: int) -> np.ndarray:
        return (rng.standard_normal(shape) / fan**0.5).astype(np.float32)

    def norm(*shape: int) -> dict[str, np.ndarray]:
        start = {"plain": np.ones, "one_plus": np.zeros}.get(spec.scale)
        scale = {"scale": start(shape, np.float32)} if start else {}
        return scale | ({"bias": np.zeros(shape, np.float32)} if spec.norm_bias else {})

    d, h, k, e, f = spec.width, spec.heads, spec.kv_heads, spec.head, spec.hidden

    def layer() -> dict[str, Any]:
        joined = spec.layout != "heads"
        shapes: dict[str, tuple[int, ...]] = {"q": (h, e), "k": (k, e), "v": (k, e)}
        if spec.layout == "fused":
            shapes = {"qkv": (3, h, e)}
        out: dict[str, Any] = {}
        for name, shape in shapes.items():
            wide = (int(np.prod(shape)),) if joined else shape
            out[name] = kernel(d, *wide, fan=d)
            if spec.bias != "none":
                out[f"{name}_bias"] = np.zeros(wide, np.float32)
        out["o"] = kernel(*((h * e,) if joined else (h, e)), d, fan=h * e)
        out |= {"up": kernel(d, f, fan=d), "down": kernel(f, d, fan=f)}
        if spec.mlp in ("swiglu", "reglu"):
            out["gate"] = kernel(d, f, fan=d)
        if spec.gated_heads:
            out["head_gate"] = kernel(d, h, fan=d)
        if spec.bias == "all":
            out |= {"o_bias": np.zeros(d, np.float32), "up_bias": np.zeros(f, np.float32)}
            out |= {"down_bias": np.zeros(d, np.float32)}
        names = [] if spec.place == "after" else ["norm1"] if spec.parallel else ["norm1", "norm2"]
        names += [] if spec.place == "before" else ["post1", "post2"]
        out |= {name: norm(d) for name in names}
        if spec.qk_norm in ("rms", "layer"):
            out |= {"q_norm": norm(e), "k_norm": norm(e)}
        if spec.qk_norm == "wide":
            out |= {"q_norm": norm(h * e), "k_norm": norm(k * e)}
        return out

    params: dict[str, Any] = {"embed": kernel(spec.vocab, d, fan=1), "layers": [layer() for _ in range(spec.layers)]}
    if spec.position == "learned":
        params["pos"] = kernel(TOKENS, d, fan=1)
    if spec.final:
        params["norm"] = norm(d)
    if not spec.tied:
        params["head"] = kernel(d, spec.vocab, fan=d)
    if spec.head_bias:
        params["head_bias"] = np.zeros(spec.vocab, np.float32)
    if spec.outlier:
        params["embed"][:, 3] *= OUTLIER
        params["layers"][0]["down"][:, 3] *= OUTLIER
    if spec.scanned:
        params["layers"] = jax.tree.map(lambda *x: np.stack(x), *params["layers"])
    batches = rng.integers(0, spec.vocab, (2, max(8, 1 + spec.vocab // TOKENS), TOKENS))
    batches.ravel()[: spec.vocab] = np.arange(spec.vocab)  # every token occurs
    return Net(lambda p, tokens: _outputs(spec, p, tokens), params, list(batches))


def _normed(spec: Spec, x: Any, weights: Mapping[str, Any], kind: str = "") -> Any:
    x = x - jnp.mean(x, -1, keepdims=True) if (kind or spec.norm) == "layer" else x
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + spec.eps)
    if "scale" in weights:
        x = x * (weights["scale"] + (spec.scale == "one_plus"))
    return x + weights["bias"] if "bias" in weights else x


def _turned(spec: Spec, x: Any) -> Any:
    """Applies rotary embeddings to queries or keys (batch, token, head, entry)."""
    turned = x.shape[-1] // 2 if spec.position == "partial" else x.shape[-1]
    turned -= turned % 2
    x, rest = x[..., :turned], x[..., turned:]
    angles = jnp.arange(x.shape[1])[:, None, None] * 10.0 ** -jnp.arange(turned // 2)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    if spec.position == "interleaved":
        one, other = x[..., ::2], x[..., 1::2]
        pairs = jnp.stack([one * cosine - other * sine, one * sine + other * cosine], -1)
        return pairs.reshape(x.shape)
    one, other = jnp.split(x, 2, -1)
    return jnp.concatenate([one * cosine - other * sine, one * sine + other * cosine, rest], -1)


def _attention(spec: Spec, z: Any, w: Mapping[str, Any]) -> Any:
    many, length = z.shape[:2]

    def made(name: str, *shape: int) -> Any:
        y = jnp.einsum("btd,d...->bt...", z, w[name])
        y = y + w[f"{name}_bias"] if f"{name}_bias" in w else y
        return y.reshape(many, length, *shape)

    if spec.layout == "fused":
        q, k, v = jnp.moveaxis(made("qkv", 3, spec.heads, spec.head), 2, 0)
    else:
        q = made("q", spec.heads, spec.head)
        k, v = (made(name, spec.kv_heads, spec.head) for name in "kv")
    if spec.qk_norm == "wide":
        q = _normed(spec, q.reshape(many, length, -1), w["q_norm"], "rms").reshape(q.shape)
        k = _normed(spec, k.reshape(many, length, -1), w["k_norm"], "rms").reshape(k.shape)
    elif spec.qk_norm != "none":
        kind = "layer" if spec.qk_norm == "layer" else "rms"
        q, k = (_normed(spec, x, w.get(name, {}), kind) for x, name in ((q, "q_norm"), (k, "k_norm")))
    if spec.rotary:
        q, k = _turned(spec, q), _turned(spec, k)
    k, v = (jnp.repeat(x, spec.heads // spec.kv_heads, 2) for x in (k, v))
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / spec.head**0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    y = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores), v)
    if "head_gate" in w:
        y = y * jax.nn.sigmoid(z @ w["head_gate"])[..., None]
    y = jnp.einsum("bqm,md->bqd", y.reshape(many, length, -1), w["o"].reshape(-1, spec.width))
    return y + w["o_bias"] if "o_bias" in w else y


def _mlp(spec: Spec, z: Any, w: Mapping[str, Any]) -> Any:
    up = z @ w["up"] + w.get("up_bias", 0.0)
    kinds = {"relu": jax.nn.relu, "relu2": lambda x: jax.nn.relu(x) ** 2, "gelu": jax.nn.gelu}
    if spec.mlp in kinds:
        y = kinds[spec.mlp](up)
    else:
        y = (jax.nn.silu if spec.mlp == "swiglu" else jax.nn.relu)(z @ w["gate"]) * up
    return y @ w["down"] + w.get("down_bias", 0.0)


def _outputs(spec: Spec, p: Any, tokens: Any) -> jax.Array:
    x = p["embed"][tokens]
    x = x + p["pos"] if "pos" in p else x

    def normed(x: Any, w: Mapping[str, Any], name: str) -> Any:
        return _normed(spec, x, w[name]) if name in w else x

    def block(x: Any, w: Mapping[str, Any]) -> Any:
        z = normed(x, w, "norm1")
        attended = normed(_attention(spec, z, w), w, "post1")
        if spec.parallel:
            return x + attended + normed(_mlp(spec, z, w), w, "post2")
        x = x + attended
        return x + normed(_mlp(spec, normed(x, w, "norm2"), w), w, "post2")

    if spec.scanned:
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, p["layers"])
    else:
        for w in p["layers"]:
            x = block(x, w)
    x = normed(x, p, "norm")
    y = x @ (p["embed"].T if spec.tied else p["head"]) + p.get("head_bias", 0.0)
    return 5.0 * jnp.tanh(y / 5.0) if spec.cap else y
