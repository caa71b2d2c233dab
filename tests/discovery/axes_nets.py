"""Networks whose axes are known: layouts that shapes alone do not tell apart, each with its mappings by hand."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from models import latent

D, H, E, F, V, T, N, L = 8, 2, 4, 12, 11, 6, 3, 2
"""Width, heads, entries of a head, hidden units, vocabulary, time, experts, layers; grouped queries have one key."""


class Case(NamedTuple):
    """A function, its shapes, a batch, what it returns, and the mappings by hand."""

    fn: Callable[[Any, Any], Any]
    shapes: Mapping[str, tuple[int, ...]]
    batch: Callable[[np.random.Generator], Any]
    neurons: Mapping[str, Any]
    embeddings: Mapping[str, Any] = {}
    outputs: str = "logits"


def tokens(rng: np.random.Generator) -> Any:
    return rng.integers(0, V, (2, T))


def features(rng: np.random.Generator) -> Any:
    return rng.normal(size=(2, T, D))


def norm(x: jax.Array, scale: Any = 1.0) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3) * scale


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Of (batch, time, heads, entries)."""
    scores = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k))
    return jnp.einsum("bhts,bshe->bthe", scores, v)


def flat(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1)


def heads(x: jax.Array, count: int = H) -> jax.Array:
    return x.reshape(*x.shape[:2], count, -1)


EMBED = {"embed": (V, D), "head": (D, V)}
TABLE = {"embed": "token _"}
HEAD = {"head": "_ token"}


def decoder(inner: Callable[[Any, jax.Array], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """A residual block between a table and an unembedding."""

    def fn(p: Any, t: Any) -> jax.Array:
        x = p["embed"][t]
        return norm(x + inner(p, norm(x))) @ p["head"]

    return fn


def unequal(p: Any, x: jax.Array) -> jax.Array:
    """Grouped queries, one key-value head that is repeated; outputs come first."""
    q, k, v = jnp.split(x @ p["qkv"].T + p["bias"], [H * E, (H + 1) * E], -1)
    k, v = (jnp.repeat(heads(y, 1), H, 2) for y in (k, v))
    return flat(attention(heads(q), k, v)) @ p["o"]


def unstacked(p: Any, x: jax.Array) -> jax.Array:
    """One product, of which the parts are taken apart afterwards."""
    y = jnp.einsum("btd,dnhe->nbthe", x, p["qkv"])
    return flat(attention(y[0], y[1], y[2])) @ p["o"]


def interleaved(p: Any, x: jax.Array) -> jax.Array:
    """Each head's query, key and value beside each other, as in GPT-NeoX."""
    return flat(attention(*jnp.split(heads(x @ p["qkv"]), 3, -1))) @ p["o"]


def experts(p: Any, x: jax.Array) -> jax.Array:
    """The two best of some experts, weighed; all of them run."""
    best, which = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    weights = jnp.sum(jax.nn.one_hot(which, N) * best[..., None], -2)
    units = jax.nn.silu(jnp.einsum("btd,ndf->btnf", x, p["gate"])) * jnp.einsum("btd,ndf->btnf", x, p["up"])
    return jnp.einsum("btn,btnf,nfd->btd", weights, units, p["down"])


def gathered_experts(p: Any, x: jax.Array) -> jax.Array:
    """Each token's kernels by index."""
    which = jnp.argmax(x @ p["router"], -1)
    units = jax.nn.relu(jnp.einsum("btd,btdf->btf", x, p["up"][which]))
    return jnp.einsum("btf,btfd->btd", units, p["down"][which])


def ragged_experts(p: Any, x: jax.Array) -> jax.Array:
    rows = x.reshape(-1, D)
    which = jnp.argmax(rows @ p["router"], -1)
    order = jnp.argsort(which)
    counts = jnp.bincount(which, length=N).astype(jnp.int32)
    units = jax.nn.relu(jax.lax.ragged_dot(rows[order], p["up"], counts))
    out = jax.lax.ragged_dot(units, p["down"], counts)
    return jnp.zeros_like(out).at[order].set(out).reshape(x.shape)


def taken_experts(p: Any, x: jax.Array) -> jax.Array:
    """All experts run, and each token takes the result of one."""
    units = jax.nn.relu(jnp.einsum("btd,ndf->btnf", x, p["up"]))
    which = jnp.argmax(x @ p["router"], -1)[..., None, None]
    return jnp.take_along_axis(jnp.einsum("btnf,nfd->btnd", units, p["down"]), which, 2)[:, :, 0]


def modulated(p: Any, batch: Any) -> jax.Array:
    """A block whose norms are shifted and scaled by a condition (adaLN), and gated."""
    x, c = batch[0] @ p["patches"], batch[1]
    shift, scale, gate = jnp.split(jax.nn.silu(c) @ p["modulation"] + p["bias"], 3, -1)
    y = norm(x) * (1 + scale[:, None]) + shift[:, None]
    return x + gate[:, None] * (jax.nn.gelu(y @ p["up"]) @ p["down"])


def lstm(p: Any, t: Any) -> jax.Array:
    """Four gates in one kernel; weights that the scan closes over."""

    def step(carry: Any, x: jax.Array) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(x @ p["inputs"] + h @ p["state"] + p["bias"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((2, D), p["inputs"].dtype)
    _, out = jax.lax.scan(step, (zero, zero), jnp.swapaxes(p["embed"][t], 0, 1))
    return out @ p["head"]


def scanned(p: Any, t: Any) -> jax.Array:
    """Layers along axis 1."""

    def layer(x: jax.Array, own: Any) -> Any:
        return x + jax.nn.relu(norm(x) @ own[0]) @ own[1], None

    x, _ = jax.lax.scan(layer, p["embed"][t], [jnp.moveaxis(p[name], 1, 0) for name in ("up", "down")])
    return norm(x) @ p["head"]


def scan_of_scans(p: Any, x: Any) -> jax.Array:
    def layer(x: jax.Array, own: Any) -> Any:
        return x + jax.nn.relu(x @ own[0]) @ own[1], None

    return jax.lax.scan(lambda x, own: jax.lax.scan(layer, x, own), x, (p["up"], p["down"]))[0]


def one_by_one(p: Any, t: Any) -> jax.Array:
    """An RNN that looks up one token per turn."""

    def step(h: jax.Array, token: jax.Array) -> Any:
        h = jnp.tanh(p["embed"][token] @ p["inputs"] + h @ p["state"])
        return h, h @ p["head"]

    return jax.lax.scan(step, jnp.zeros(D), t[0])[1]


def mixed_kernels(p: Any, x: Any) -> jax.Array:
    """Mixes kernels of a product and of a convolution, one mixture per example, before they meet it."""
    gates = jax.nn.softmax(x[:, 0] @ p["router"])
    images = jax.vmap(lambda image, kernel: convolve(image[None], kernel)[0])(
        heads(x), jnp.einsum("be,ehwio->bhwio", gates, p["filters"]))
    rows = jnp.einsum("bti,bio->bto", x, (gates @ p["up"].reshape(N, -1)).reshape(-1, D, F))
    return jnp.tanh(rows + images.mean((1, 2))[:, None])


def looped(p: Any, t: Any) -> jax.Array:
    """Stacked layers by a loop's counter."""

    def layer(i: Any, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(norm(x) @ p["up"][i]) @ p["down"][i]

    return norm(jax.lax.fori_loop(0, L, layer, p["embed"][t])) @ p["head"]


def indexed_layers(p: Any, t: Any) -> jax.Array:
    x = p["embed"][t]
    for i in range(L):
        x = x + jax.nn.relu(norm(x) @ p["up"][i]) @ p["down"][i]
    return norm(x) @ p["head"]


def convolve(x: jax.Array, kernel: jax.Array, groups: int = 1, numbers: Any = ("NHWC", "HWIO", "NHWC")) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", None, None, numbers, groups)


def convolutions(p: Any, x: Any) -> jax.Array:
    """The pointwise kernel is stored as PyTorch does it."""
    y = jax.nn.relu(convolve(jax.nn.relu(convolve(x, p["first"])), p["depthwise"], D) * p["scale"])
    y = jax.nn.relu(convolve(y, p["pointwise"], numbers=("NHWC", "OIHW", "NHWC")))
    return jnp.mean(jax.nn.relu(convolve(y, p["grouped"], 2)), (1, 2)) @ p["head"] + p["bias"]


def shifted(p: Any, x: jax.Array) -> jax.Array:
    """A short depthwise convolution along time, by shifts, as in Mamba."""
    y = x @ p["in"]
    padded = jnp.pad(y, ((0, 0), (2, 0), (0, 0)))
    y = sum(padded[:, k : k + T] * p["taps"][k] for k in range(3))
    return jax.nn.silu(y) @ p["out"]


def one_hot_and_merged(p: Any, t: Any) -> jax.Array:
    """A table whose rows a product takes, and a kernel with LoRA's factors merged in."""
    x = jax.nn.one_hot(t, V, dtype=p["embed"].dtype) @ p["embed"]
    return jax.nn.relu(x @ (p["w"] + p["a"] @ p["b"])) @ p["head"]


def joined(p: Any, x: Any) -> jax.Array:
    """One product with two kernels side by side, and one with two above each other."""
    both = x @ jnp.concatenate([p["up"], p["gate"]], 1)
    up, gate = jnp.split(both, 2, -1)
    return jnp.concatenate([up * jax.nn.silu(gate), x], -1) @ jnp.concatenate([p["down"], p["skip"]], 0)


def latents(p: Any, x: Any) -> jax.Array:
    """Learned queries that a residual sum keeps, and a block-diagonal kernel behind it."""
    own = jnp.broadcast_to(p["latents"], (2, *p["latents"].shape))
    y = own + jax.nn.softmax(own @ p["q"] @ jnp.swapaxes(x @ p["k"], 1, 2)) @ (x @ p["v"])
    return jnp.mean(flat(jnp.einsum("bthe,hef->bthf", heads(jax.nn.relu(y)), p["blocks"])), 1) @ p["head"]


MATRIX = "_ neuron"
MOE = {"router": (D, N), "up": (N, D, F), "down": (N, F, D)}
OF_MOE = {"router": MATRIX, "up": "expert _ neuron", "down": "expert _ neuron"}


def of_decoder(
    inner: Callable[[Any, jax.Array], jax.Array], shapes: Mapping[str, tuple[int, ...]], neurons: Mapping[str, Any]
) -> Case:
    return Case(decoder(inner), {**EMBED, **shapes}, tokens, {**neurons, **HEAD}, TABLE)


def of_stack(fn: Callable[[Any, Any], Any], within: bool) -> Case:
    """Layers in one leaf, along axis 0 or within it."""
    axes = "_ layer neuron" if within else "layer _ neuron"
    shapes = {"up": (D, L, F), "down": (F, L, D)} if within else {"up": (L, D, F), "down": (L, F, D)}
    return Case(fn, {**EMBED, **shapes}, tokens, {"up": axes, "down": axes, **HEAD}, TABLE)


def latent_attention(p: Any, x: Any) -> jax.Array:
    """`models.latent`: latent attention with gated outputs, and experts that a softmax weighs, in fused kernels."""
    return latent.outputs(LATENT, unflatten_dict(p, sep="/"), x)


LATENT = latent.LatentConfig(fused=True)
CASES: Mapping[str, Case] = {
    "latent attention": Case(
        latent_attention, LATENT.shapes, features, {
            **{f"attn/{name}/kernel": MATRIX for name in ("q_a", "q_b", "gate", "out")}, "moe/router/kernel": MATRIX,
            "attn/kv_a/kernel": ("_ neuron=0:6", "_ neuron=6:8"),
            "attn/kv_b/kernel": ("_ neuron=0:3+7:10", "_ neuron=3:7+10:14"),
            "moe/gate_up": ("expert _ neuron=0:5", "expert _ neuron=5:10"), "moe/down": "expert _ neuron",
        }, outputs="loss"),
    "fused, repeated keys": of_decoder(
        unequal, {"qkv": ((H + 2) * E, D), "bias": ((H + 2) * E,), "o": (D, D)},
        {"qkv": ("neuron=0:8 _", "neuron=8:12 _", "neuron=12:16 _"), "o": MATRIX}),
    "fused, taken apart": of_decoder(unstacked, {"qkv": (D, 3, H, E), "o": (D, D)}, {
        "qkv": tuple(f"_ part={n} head neuron" for n in range(3)), "o": MATRIX}),
    "fused in each head": of_decoder(interleaved, {"qkv": (D, 3 * H * E), "o": (D, D)}, {
        "qkv": ("_ neuron=0:4+12:16", "_ neuron=4:8+16:20", "_ neuron=8:12+20:24"), "o": MATRIX}),
    "experts": of_decoder(experts, MOE | {"gate": (N, D, F)}, OF_MOE | {"gate": "expert _ neuron"}),
    "gathered experts": of_decoder(gathered_experts, MOE, OF_MOE),
    "taken experts": of_decoder(taken_experts, MOE, OF_MOE),
    "ragged experts": of_decoder(ragged_experts, MOE, OF_MOE),
    "adaLN": Case(
        modulated, {"patches": (D, D), "modulation": (D, 3 * D), "bias": (3 * D,), "up": (D, F), "down": (F, D)},
        lambda rng: (rng.normal(size=(2, T, D)), rng.normal(size=(2, D))),
        {"modulation": ("_ neuron=0:8", "_ neuron=8:16", "_ neuron=16:24"),
         **dict.fromkeys(("patches", "up", "down"), MATRIX)}, outputs="loss"),
    "LSTM": Case(
        lstm, {**EMBED, "inputs": (D, 4 * D), "state": (D, 4 * D), "bias": (4 * D,)}, tokens,
        dict.fromkeys(("inputs", "state"), tuple(f"_ neuron={8 * n}:{8 * n + 8}" for n in range(4))) | HEAD, TABLE),
    "scanned along axis 1": of_stack(scanned, True),
    "a scan of scans": Case(scan_of_scans, {"up": (2, L, D, F), "down": (2, L, F, D)}, features,
                            dict.fromkeys(("up", "down"), "layer expert _ neuron"), outputs="loss"),
    "a kernel per place": Case(lambda p, x: jnp.einsum("bthe,theo->btho", heads(x), p["w"]), {"w": (T, H, E, 3)},
                               features, {"w": "layer expert _ neuron"}, outputs="loss"),
    "one token at a time": Case(one_by_one, {**EMBED, "inputs": (D, D), "state": (D, D)}, tokens,
                                {"inputs": MATRIX, "state": MATRIX, **HEAD}, TABLE),
    "concatenated embeddings": Case(
        lambda p, t: jnp.tanh(jnp.concatenate([p["user"][t], p["item"][t]], -1) @ p["w"]),
        {"user": (V, D), "item": (V, 2), "w": (D + 2, F)}, tokens, {"w": MATRIX},
        {"user": "token _", "item": "token _"}, "loss"),
    "mixed kernels": Case(
        mixed_kernels, {"router": (D, N), "up": (N, D, F), "filters": (N, 3, 3, E, F)}, features,
        {"router": MATRIX, "up": "expert _ neuron", "filters": "expert _ _ _ neuron"}, outputs="loss"),
    "looped": of_stack(looped, False),
    "layers by index": of_stack(indexed_layers, False),
    "layers by index, one transposed": Case(
        lambda p, x: jax.nn.relu(jax.nn.relu(x @ p["w"][0]) @ p["w"][1].T), {"w": (2, D, F)}, features,
        {"w": ("part=0 _ neuron", "part=1 neuron _")}, outputs="loss"),
    "convolutions": Case(
        convolutions,
        {"first": (3, 3, 2, D), "depthwise": (3, 3, 1, D), "pointwise": (F, D, 1, 1), "grouped": (3, 3, F // 2, F),
         "scale": (D,), "head": (F, 5), "bias": (5,)},
        lambda rng: rng.normal(size=(2, 5, 5, 2)),
        {"first": "_ _ _ neuron", "pointwise": "neuron _ _ _", "grouped": ("_ _ _ neuron=0:6", "_ _ _ neuron=6:12"),
         "head": "_ token"}),
    "depthwise by shifts": of_decoder(
        shifted, {"in": (D, F), "taps": (3, F), "out": (F, D)}, {"in": MATRIX, "out": MATRIX}),
    "one-hot table, merged LoRA": Case(
        one_hot_and_merged, {**EMBED, "w": (D, D), "a": (D, 3), "b": (3, D)}, tokens,
        dict.fromkeys("wab", MATRIX) | HEAD, TABLE),
    "kernels side by side": Case(joined, {"up": (D, F), "gate": (D, F), "down": (F, D), "skip": (D, D)}, features,
                                 dict.fromkeys(("up", "gate", "down", "skip"), MATRIX), outputs="loss"),
    "factors of a tensor, kernels divided by their norms": Case(
        lambda p, x: jnp.einsum("bti,ir,jr,kr->btjk", x @ (p["w"] / jnp.linalg.norm(p["w"] @ (np.ones(D) @ p["w"]))),
                                p["a"], p["b"], p["c"]),
        {"w": (D, D), "a": (D, 2), "b": (4, 2), "c": (3, 2)}, features,
        {"w": MATRIX, "a": MATRIX, "b": "neuron _", "c": "neuron _"}, outputs="loss"),
    "latents": Case(
        latents, {"latents": (N, D), **dict.fromkeys("qkv", (D, D)), "blocks": (H, E, E), "head": (D, 5)}, features,
        {**dict.fromkeys("qkv", MATRIX), "blocks": "expert _ neuron", **HEAD}, {"latents": "token _"}),
}
