"""Every preset against `discover`, on a small decoder or encoder that reads its tree."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gauge_optax.gauges.gauge import Gauge
from models import presets
from tests.discovery.test_layouts import check, half

D, H, K, E, F, V, L, T = 8, 4, 2, 4, 10, 11, 2, 5
Shapes = Mapping[str, tuple[int, ...]]


class Layer(NamedTuple):
    """What a block reads: kernels (d, h, e), (h, e, d) and (d, f), norms as pairs of scale and bias."""

    norm1: Any
    q: Any
    k: Any
    v: Any
    out: Any
    norm2: Any
    up: Any
    down: Any
    gate: Any = None
    qk: Any = None
    behind: Any = None
    biases: Any = (0.0, 0.0, 0.0)


def norm(x: jax.Array, own: Any, centred: bool = False, eps: float = 1e-20) -> jax.Array:
    scale, bias = own if isinstance(own, tuple) else (own, 0.0)
    x = x - jnp.mean(x, -1, keepdims=True) if centred else x
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale + bias


def block(x: jax.Array, p: Layer, rope: bool, centred: bool, causal: bool = True) -> jax.Array:
    y = norm(x, p.norm1, centred, 1e-2)
    q, k, v = (jnp.einsum("btd,dhe->bthe", y, w) + b for w, b in zip((p.q, p.k, p.v), p.biases, strict=True))
    if p.qk is not None:
        q, k = norm(q, p.qk[0]), norm(k, p.qk[1])
    q, k = (half(q), half(k)) if rope else (q, k)
    q = q.reshape(*k.shape[:3], -1, k.shape[-1])
    scores = jnp.einsum("btkge,bske->bkgts", q, k) * 0.5
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e30) if causal else scores
    mixed = jnp.einsum("bkgts,bske->btkge", jax.nn.softmax(scores), v).reshape(*x.shape[:2], -1, k.shape[-1])
    y = jnp.einsum("bthe,hed->btd", mixed, p.out)
    x = x + (y if p.behind is None else norm(y, p.behind[0]))
    y = norm(x, p.norm2, centred, 1e-2)
    y = jax.nn.gelu(y @ p.up) if p.gate is None else jax.nn.silu(y @ p.gate) * (y @ p.up)
    y = y @ p.down
    return x + (y if p.behind is None else norm(y, p.behind[1]))


def decoder(layers: Callable[[Any, int], Layer], embed: str, final: Any, head: str | None, rope: bool, centred: bool):
    def fn(p: Mapping[str, Any], tokens: Any) -> jax.Array:
        x = p[embed][tokens]
        for i in range(L):
            x = block(x, layers(p, i), rope, centred)
        return norm(x, final(p), centred, 1e-2) @ (p[embed].T if head is None else p[head])

    return fn


def stacked_numbers(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Patterns with {i} written out for every layer."""
    return {p.replace("{i}", str(i)): s for p, s in shapes.items() for i in (range(L) if "{i}" in p else range(1))}


# Trees --------------------------------------------------------------------------------------------


def nanodo_layer(p: Any, i: int) -> Layer:
    b, a = f"blocks_{i}", f"blocks_{i}/CausalAttn_0"
    own = [p[f"{a}/{name}/kernel"] for name in ("query", "key", "value", "attn_out_proj")]
    mlp = [p[f"{b}/Mlp_0/Dense_{k}/kernel"] for k in (0, 1)]
    return Layer(p[f"{b}/LayerNorm_0/scale"], *own, p[f"{b}/LayerNorm_1/scale"], *mlp)


NANODO = {f"blocks_{{i}}/CausalAttn_0/{n}/kernel": (D, H, E) for n in ("query", "key", "value")} | {
    "blocks_{i}/CausalAttn_0/attn_out_proj/kernel": (H, E, D), "blocks_{i}/LayerNorm_0/scale": (D,),
    "blocks_{i}/LayerNorm_1/scale": (D,), "blocks_{i}/Mlp_0/Dense_0/kernel": (D, F),
    "blocks_{i}/Mlp_0/Dense_1/kernel": (F, D), "embed/embedding": (V, D), "out_ln/scale": (D,),
}


def maxtext_layer(p: Any, i: int) -> Layer:
    s, m = "decoder/layers/self_attention", "decoder/layers/mlp"
    own = [p[f"{s}/{name}/kernel"][:, i] for name in ("query", "key", "value", "out")]
    norms = [p[f"decoder/layers/{when}_self_attention_layer_norm/scale"][:, i] for when in ("pre", "post")]
    gate, up, down = (p[f"{m}/{name}/kernel"][:, i] for name in ("wi_0", "wi_1", "wo"))
    return Layer(norms[0], *own, norms[1], up, down, gate)


def maxtext(p: Any, tokens: Any) -> jax.Array:
    """Layers are scanned over, along axis 1 of every leaf."""
    layers = {name: jnp.moveaxis(x, 1, 0) for name, x in p.items() if name.startswith("decoder/layers")}

    def body(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return block(x, maxtext_layer({name: y[:, None] for name, y in own.items()}, 0), True, False), None

    x, _ = jax.lax.scan(body, p["token_embedder/embedding"][tokens], layers)
    return norm(x, p["decoder/decoder_norm/scale"], False, 1e-2) @ p["decoder/logits_dense/kernel"]


MAXTEXT = {
    "decoder/layers/self_attention/query/kernel": (D, L, H, E),
    "decoder/layers/self_attention/key/kernel": (D, L, K, E),
    "decoder/layers/self_attention/value/kernel": (D, L, K, E),
    "decoder/layers/self_attention/out/kernel": (H, L, E, D),
    "decoder/layers/mlp/wi_0/kernel": (D, L, F), "decoder/layers/mlp/wi_1/kernel": (D, L, F),
    "decoder/layers/mlp/wo/kernel": (F, L, D), "decoder/layers/pre_self_attention_layer_norm/scale": (D, L),
    "decoder/layers/post_self_attention_layer_norm/scale": (D, L), "decoder/decoder_norm/scale": (D,),
    "decoder/logits_dense/kernel": (D, V), "token_embedder/embedding": (V, D),
}


def gemma_layer(p: Any, i: int) -> Layer:
    a, b = f"layer_{i}/attn", f"layer_{i}"
    q, kv = p[f"{a}/q_einsum/w"].transpose(1, 0, 2), p[f"{a}/kv_einsum/w"].transpose(0, 2, 1, 3)
    gate, up = p[f"{b}/mlp/gating_einsum"]
    third = f"{b}/post_attention_norm/scale" in p
    return Layer(
        1 + p[f"{b}/pre_attention_norm/scale"], q, kv[0], kv[1], p[f"{a}/attn_vec_einsum/w"],
        1 + p[f"{b}/pre_ffw_norm/scale"], up, p[f"{b}/mlp/linear"], gate,
        (1 + p[f"{a}/_query_norm/scale"], 1 + p[f"{a}/_key_norm/scale"]) if third else None,
        (1 + p[f"{b}/post_attention_norm/scale"], 1 + p[f"{b}/post_ffw_norm/scale"]) if third else None,
    )


GEMMA = {
    "layer_{i}/attn/q_einsum/w": (H, D, E), "layer_{i}/attn/kv_einsum/w": (2, K, D, E),
    "layer_{i}/attn/attn_vec_einsum/w": (H, E, D), "layer_{i}/mlp/gating_einsum": (2, D, F),
    "layer_{i}/mlp/linear": (F, D), "layer_{i}/pre_attention_norm/scale": (D,), "layer_{i}/pre_ffw_norm/scale": (D,),
    "embedder/input_embedding": (V, D), "final_norm/scale": (D,),
}
GEMMA3 = GEMMA | {
    "layer_{i}/attn/_query_norm/scale": (E,), "layer_{i}/attn/_key_norm/scale": (E,),
    "layer_{i}/post_attention_norm/scale": (D,), "layer_{i}/post_ffw_norm/scale": (D,),
}


def qwen_layer(p: Any, i: int) -> Layer:
    a, m = f"layers/{i}/attn", f"layers/{i}/mlp"
    own = [p[f"{a}/{name}_proj/kernel"] for name in "qkvo"]
    gate, up, down = (p[f"{m}/{name}_proj/kernel"] for name in ("gate", "up", "down"))
    norms = [p[f"layers/{i}/{name}_layernorm/scale"] for name in ("input", "post_attention")]
    return Layer(norms[0], *own, norms[1], up, down, gate, tuple(p[f"{a}/{n}_norm/scale"] for n in "qk"))


QWEN = {
    "layers/{i}/attn/q_proj/kernel": (D, H, E), "layers/{i}/attn/k_proj/kernel": (D, K, E),
    "layers/{i}/attn/v_proj/kernel": (D, K, E), "layers/{i}/attn/o_proj/kernel": (H, E, D),
    "layers/{i}/attn/q_norm/scale": (E,), "layers/{i}/attn/k_norm/scale": (E,),
    "layers/{i}/mlp/gate_proj/kernel": (D, F), "layers/{i}/mlp/up_proj/kernel": (D, F),
    "layers/{i}/mlp/down_proj/kernel": (F, D), "layers/{i}/input_layernorm/scale": (D,),
    "layers/{i}/post_attention_layernorm/scale": (D,), "embedder/embedding": (V, D), "final_norm/scale": (D,),
    "lm_head/kernel": (D, V),
}


def gpt2_layer(p: Any, i: int) -> Layer:
    b = f"transformer/h/{i}"
    kernels = p[f"{b}/attn/c_attn/kernel"].T.reshape(D, 3, H, D // H)
    q, k, v = (kernels[:, n] for n in range(3))
    biases = p[f"{b}/attn/c_attn/bias"].reshape(3, H, D // H)
    norms = [(p[f"{b}/{name}/scale"], p[f"{b}/{name}/bias"]) for name in ("ln_1", "ln_2")]
    out = p[f"{b}/attn/c_proj/kernel"].T.reshape(H, D // H, D)
    return Layer(norms[0], q, k, v, out, norms[1], p[f"{b}/mlp/c_fc/kernel"].T, p[f"{b}/mlp/c_proj/kernel"].T,
                 biases=tuple(biases[n] for n in range(3)))


GPT2 = {
    "transformer/h/{i}/attn/c_attn/kernel": (3 * D, D), "transformer/h/{i}/attn/c_attn/bias": (3 * D,),
    "transformer/h/{i}/attn/c_proj/kernel": (D, D), "transformer/h/{i}/mlp/c_fc/kernel": (F, D),
    "transformer/h/{i}/mlp/c_proj/kernel": (D, F), "transformer/h/{i}/ln_1/scale": (D,),
    "transformer/h/{i}/ln_1/bias": (D,), "transformer/h/{i}/ln_2/scale": (D,), "transformer/h/{i}/ln_2/bias": (D,),
    "transformer/wte/embedding": (V, D), "transformer/ln_f/scale": (D,), "transformer/ln_f/bias": (D,),
}


def llama_layer(p: Any, i: int) -> Layer:
    a, m = f"model/layers/{i}/self_attn", f"model/layers/{i}/mlp"
    q, k, v = (p[f"{a}/{name}_proj/kernel"].reshape(D, -1, E) for name in "qkv")
    gate, up, down = (p[f"{m}/{name}_proj/kernel"] for name in ("gate", "up", "down"))
    norms = [p[f"model/layers/{i}/{name}_layernorm/weight"] for name in ("input", "post_attention")]
    return Layer(norms[0], q, k, v, p[f"{a}/o_proj/kernel"].reshape(H, E, D), norms[1], up, down, gate)


LLAMA = {
    "model/layers/{i}/self_attn/q_proj/kernel": (D, H * E), "model/layers/{i}/self_attn/k_proj/kernel": (D, K * E),
    "model/layers/{i}/self_attn/v_proj/kernel": (D, K * E), "model/layers/{i}/self_attn/o_proj/kernel": (H * E, D),
    "model/layers/{i}/mlp/gate_proj/kernel": (D, F), "model/layers/{i}/mlp/up_proj/kernel": (D, F),
    "model/layers/{i}/mlp/down_proj/kernel": (F, D), "model/layers/{i}/input_layernorm/weight": (D,),
    "model/layers/{i}/post_attention_layernorm/weight": (D,), "model/embed_tokens/embedding": (V, D),
    "model/norm/weight": (D,), "lm_head/kernel": (D, V),
}


def vit(p: Any, patches: Any) -> jax.Array:
    b = "Transformer/encoderblock"
    a = f"{b}/MultiHeadDotProductAttention_0"

    def body(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        norms = [(own[f"{b}/LayerNorm_{k}/scale"], own[f"{b}/LayerNorm_{k}/bias"]) for k in (0, 1)]
        kernels = [own[f"{a}/{name}/kernel"] for name in ("query", "key", "value", "out")]
        biases = tuple(own[f"{a}/{name}/bias"] for name in ("query", "key", "value"))
        mlp = [own[f"{b}/MlpBlock_0/Dense_{k}/kernel"] for k in (0, 1)]
        return block(x, Layer(norms[0], *kernels, norms[1], *mlp, biases=biases), False, True, causal=False), None

    layers = {name: x for name, x in p.items() if name.startswith(b)}
    x, _ = jax.lax.scan(body, patches @ p["embedding/kernel"], layers)
    x = norm(x, (p["Transformer/encoder_norm/scale"], p["Transformer/encoder_norm/bias"]), True, 1e-2)
    return jnp.mean(x, 1) @ p["head/kernel"] + p["head/bias"]


VIT = {f"Transformer/encoderblock/MultiHeadDotProductAttention_0/{n}": s for n, s in {
    **{f"{n}/kernel": (L, D, H, E) for n in ("query", "key", "value")}, "out/kernel": (L, H, E, D),
    **{f"{n}/bias": (L, H, E) for n in ("query", "key", "value")},
}.items()} | {
    **{f"Transformer/encoderblock/LayerNorm_{k}/{n}": (L, D) for k in (0, 1) for n in ("scale", "bias")},
    "Transformer/encoderblock/MlpBlock_0/Dense_0/kernel": (L, D, F),
    "Transformer/encoderblock/MlpBlock_0/Dense_1/kernel": (L, F, D), "Transformer/encoder_norm/scale": (D,),
    "Transformer/encoder_norm/bias": (D,), "embedding/kernel": (6, D), "head/kernel": (D, V), "head/bias": (V,),
}


class Tree(NamedTuple):
    """A function with its tree's shapes, and the preset."""

    fn: Callable[[Any, Any], jax.Array]
    shapes: Shapes
    gauges: Callable[[bool], list[Gauge]]


def scale(path: str, plus: bool = False) -> Callable[[Any], Any]:
    return lambda p: (1 + p[path]) if plus else p[path]


def final_of_gpt2(p: Any) -> Any:
    return p["transformer/ln_f/scale"], p["transformer/ln_f/bias"]


embedded = decoder(gemma_layer, "embedder/input_embedding", scale("final_norm/scale", True), None, True, False)
of_nanodo = decoder(nanodo_layer, "embed/embedding", scale("out_ln/scale"), None, False, True)
of_qwen = decoder(qwen_layer, "embedder/embedding", scale("final_norm/scale"), "lm_head/kernel", True, False)
of_gpt2 = decoder(gpt2_layer, "transformer/wte/embedding", final_of_gpt2, None, False, True)
of_llama = decoder(
    llama_layer, "model/embed_tokens/embedding", scale("model/norm/weight"), "lm_head/kernel", True, False
)
TREES: Mapping[str, Tree] = {
    "nanodo": Tree(of_nanodo, NANODO, lambda linear: presets.nanodo(linear=linear)),
    "vision_transformer": Tree(vit, VIT, lambda linear: presets.vision_transformer(linear=linear)),
    "maxtext_llama": Tree(maxtext, MAXTEXT, lambda linear: presets.maxtext_llama(K, linear=linear)),
    "gemma": Tree(embedded, GEMMA, lambda linear: presets.gemma(K, linear=linear)),
    "gemma3": Tree(embedded, GEMMA3, lambda linear: presets.gemma3(K, E, linear=linear)),
    "qwen3": Tree(of_qwen, QWEN, lambda linear: presets.qwen3(K, E, linear=linear)),
    "hf_gpt2": Tree(of_gpt2, GPT2, lambda linear: presets.hf_gpt2(H, linear=linear)),
    "hf_llama": Tree(of_llama, LLAMA, lambda linear: presets.hf_llama(K, linear=linear)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_a_preset_is_what_discover_finds_beside_a_rotation_of_the_stream(name: str) -> None:
    """No rotation with a tied head behind a norm with a scale (nanodo, GPT-2) or a norm behind a layer (Gemma)."""
    rng, (fn, shapes, gauges) = np.random.default_rng(0), TREES[name]
    params = {p: 0.4 * rng.standard_normal(s).astype(np.float32) for p, s in stacked_numbers(shapes).items()}
    images = name == "vision_transformer"
    batches = list(rng.standard_normal((2, 2, T, 6)) if images else rng.integers(0, V, (2, 2, T)))
    report = check(fn, params, batches, gauges(True), lambda report: report.gauges, outputs="logits")
    turned = [gauge for gauge in report.whole if gauge.name == "residual_rotation"]
    assert len(turned) == (name in ("vision_transformer", "maxtext_llama", "qwen3", "hf_llama")), report
    size = D - images  # a LayerNorm keeps the vector of ones
    assert all(gauge.dim(params) == size * (size - 1) // 2 for gauge in turned)
    # Values are wider than the stream here, so that an output kernel maps a part of their biases to nothing.
    hidden = [kind for kind in report.ungauged if "maps to nothing" in kind or "the norm hides" in kind]
    assert not report.rejected and list(report.ungauged) == hidden, report
    assert bool(hidden) == (name in ("vision_transformer", "hf_gpt2")), report


def test_attention_alone() -> None:
    """Flax's module, at any path."""
    rotation, other = presets.flax_attention("blocks/{i}/attn")
    shapes = {name: {"kernel": (D, H, E), "bias": (H, E)} for name in ("query", "key", "value")}
    tree = {"blocks": [{"attn": {**shapes, "out": {"kernel": (H, E, D), "bias": (D,)}}}] * 2}
    params = jax.tree.map(np.ones, tree, is_leaf=lambda x: isinstance(x, tuple))
    assert rotation.dim(params) == other.dim(params) == 2 * H * E * (E - 1) // 2
    assert [g.name for g in presets.flax_attention("a", bias=False, linear=True)] == ["head_linear"] * 2
