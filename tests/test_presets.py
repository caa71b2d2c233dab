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


def norm(x: jax.Array, own: Any, centred: bool = False, eps: float = 1e-20) -> jax.Array:
    scale, bias = own if isinstance(own, tuple) else (own, 0.0)
    x = x - jnp.mean(x, -1, keepdims=True) if centred else x
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale + bias


def block(
    x: Any, norm1: Any, q: Any, k: Any, v: Any, out: Any, norm2: Any, up: Any, down: Any, gate: Any = None, *,
    qk: Any = None, behind: Any = None, biases: Any = (0.0, 0.0, 0.0), rope: bool, centred: bool, causal: bool,
) -> jax.Array:
    """Kernels are (d, h, e), (h, e, d) and (d, f), norms a scale or a pair of scale and bias."""
    y = norm(x, norm1, centred, 1e-2)
    q, k, v = (jnp.einsum("btd,dhe->bthe", y, w) + b for w, b in zip((q, k, v), biases, strict=True))
    if qk is not None:
        q, k = norm(q, qk[0]), norm(k, qk[1])
    q, k = (half(q), half(k)) if rope else (q, k)
    q = q.reshape(*k.shape[:3], -1, k.shape[-1])
    scores = jnp.einsum("btkge,bske->bkgts", q, k) * 0.5
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e30) if causal else scores
    mixed = jnp.einsum("bkgts,bske->btkge", jax.nn.softmax(scores), v).reshape(*x.shape[:2], -1, k.shape[-1])
    y = jnp.einsum("bthe,hed->btd", mixed, out)
    x = x + (y if behind is None else norm(y, behind[0]))
    y = norm(x, norm2, centred, 1e-2)
    y = (jax.nn.gelu(y @ up) if gate is None else jax.nn.silu(y @ gate) * (y @ up)) @ down
    return x + (y if behind is None else norm(y, behind[1]))


class Tree(NamedTuple):
    """A preset, and the leaves of the tree that it is for.

    `layer` has a layer's leaves in the order in which `read` takes them behind the stream. Where `scanned` is given,
    layers are one loop, along this axis of every leaf. `ends` has what is around the layers, by its role.
    """

    gauges: Callable[[bool], list[Gauge]]
    layer: Shapes
    ends: Mapping[str, tuple[str, tuple[int, ...]]]
    read: Callable[..., jax.Array] = block
    rope: bool = True
    centred: bool = False
    one_plus: bool = False
    scanned: int | None = None
    images: bool = False

    @property
    def shapes(self) -> Shapes:
        return {**self.layer, **dict(self.ends.values())}

    def fn(self, p: Mapping[str, Any], inputs: Any) -> jax.Array:
        def layer(x: jax.Array, leaves: list[jax.Array]) -> tuple[jax.Array, None]:
            return self.read(x, *leaves, rope=self.rope, centred=self.centred, causal=not self.images), None

        own = {role: p[path] for role, (path, _) in self.ends.items()}
        x = inputs @ own["embed"] if self.images else own["embed"][inputs]
        if self.scanned is not None:
            x, _ = jax.lax.scan(layer, x, [jnp.moveaxis(p[path], self.scanned, 0) for path in self.layer])
        else:
            for i in range(L):
                x, _ = layer(x, [p[path.replace("{i}", str(i))] for path in self.layer])
        x = norm(x, (self.one_plus + own["scale"], own.get("bias", 0.0)), self.centred, 1e-2)
        return (jnp.mean(x, 1) if self.images else x) @ own.get("head", own["embed"].T) + own.get("head_bias", 0.0)


def stacked_numbers(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Patterns with {i} written out for every layer."""
    return {p.replace("{i}", str(i)): s for p, s in shapes.items() for i in (range(L) if "{i}" in p else range(1))}


# Trees --------------------------------------------------------------------------------------------


def under(prefix: str, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {prefix + path: shape for path, shape in shapes.items()}


def gemma(
    x: Any, norm1: Any, q: Any, kv: Any, out: Any, norm2: Any, gates: Any, down: Any, query: Any = None,
    key: Any = None, after: Any = None, last: Any = None, **how: bool,
) -> jax.Array:
    """Scales are stored less one; Gemma 3 has norms of queries and keys, and behind attention and the MLP."""
    qk, behind = (None, None) if query is None else ((1 + query, 1 + key), (1 + after, 1 + last))
    q, (k, v) = q.transpose(1, 0, 2), kv.transpose(0, 2, 1, 3)
    return block(x, 1 + norm1, q, k, v, out, 1 + norm2, gates[1], down, gates[0], qk=qk, behind=behind, **how)


def qwen(x: Any, *leaves: Any, **how: bool) -> jax.Array:
    return block(x, *leaves[:-2], qk=leaves[-2:], **how)


def gpt2(x: Any, scale1: Any, bias1: Any, qkv: Any, bias: Any, out: Any, scale2: Any, bias2: Any, up: Any, down: Any,
         **how: bool) -> jax.Array:
    """Kernels are stored transposed, query, key and value in one."""
    q, k, v = jnp.moveaxis(qkv.T.reshape(D, 3, H, D // H), 1, 0)
    biases, out = bias.reshape(3, H, D // H), out.T.reshape(H, D // H, D)
    return block(x, (scale1, bias1), q, k, v, out, (scale2, bias2), up.T, down.T, biases=biases, **how)


def llama(x: Any, norm1: Any, q: Any, k: Any, v: Any, out: Any, *others: Any, **how: bool) -> jax.Array:
    """Heads are stored in one axis."""
    q, k, v = (w.reshape(D, -1, E) for w in (q, k, v))
    return block(x, norm1, q, k, v, out.reshape(H, E, D), *others, **how)


def vit(x: Any, scale1: Any, bias1: Any, q: Any, k: Any, v: Any, out: Any, scale2: Any, bias2: Any, up: Any, down: Any,
        *biases: Any, **how: bool) -> jax.Array:
    return block(x, (scale1, bias1), q, k, v, out, (scale2, bias2), up, down, biases=biases, **how)


ENCODER = "Transformer/encoderblock/"
GEMMA = under("layer_{i}/", {
    "pre_attention_norm/scale": (D,), "attn/q_einsum/w": (H, D, E), "attn/kv_einsum/w": (2, K, D, E),
    "attn/attn_vec_einsum/w": (H, E, D), "pre_ffw_norm/scale": (D,), "mlp/gating_einsum": (2, D, F),
    "mlp/linear": (F, D),
})
GEMMA3 = GEMMA | under("layer_{i}/", {
    "attn/_query_norm/scale": (E,), "attn/_key_norm/scale": (E,), "post_attention_norm/scale": (D,),
    "post_ffw_norm/scale": (D,),
})
GEMMA_ENDS = {"embed": ("embedder/input_embedding", (V, D)), "scale": ("final_norm/scale", (D,))}
TREES: Mapping[str, Tree] = {
    "nanodo": Tree(lambda linear: presets.nanodo(linear=linear), under("blocks_{i}/", {
        "LayerNorm_0/scale": (D,), **{f"CausalAttn_0/{n}/kernel": (D, H, E) for n in ("query", "key", "value")},
        "CausalAttn_0/attn_out_proj/kernel": (H, E, D), "LayerNorm_1/scale": (D,), "Mlp_0/Dense_0/kernel": (D, F),
        "Mlp_0/Dense_1/kernel": (F, D),
    }), {"embed": ("embed/embedding", (V, D)), "scale": ("out_ln/scale", (D,))}, rope=False, centred=True),
    "vision_transformer": Tree(lambda linear: presets.vision_transformer(linear=linear), under(ENCODER, {
        "LayerNorm_0/scale": (L, D), "LayerNorm_0/bias": (L, D),
        **{f"MultiHeadDotProductAttention_0/{n}/kernel": (L, D, H, E) for n in ("query", "key", "value")},
        "MultiHeadDotProductAttention_0/out/kernel": (L, H, E, D), "LayerNorm_1/scale": (L, D),
        "LayerNorm_1/bias": (L, D), "MlpBlock_0/Dense_0/kernel": (L, D, F), "MlpBlock_0/Dense_1/kernel": (L, F, D),
        **{f"MultiHeadDotProductAttention_0/{n}/bias": (L, H, E) for n in ("query", "key", "value")},
    }), {
        "embed": ("embedding/kernel", (6, D)), "scale": ("Transformer/encoder_norm/scale", (D,)),
        "bias": ("Transformer/encoder_norm/bias", (D,)), "head": ("head/kernel", (D, V)),
        "head_bias": ("head/bias", (V,)),
    }, vit, rope=False, centred=True, scanned=0, images=True),
    "maxtext_llama": Tree(lambda linear: presets.maxtext_llama(K, linear=linear), under("decoder/layers/", {
        "pre_self_attention_layer_norm/scale": (D, L), "self_attention/query/kernel": (D, L, H, E),
        "self_attention/key/kernel": (D, L, K, E), "self_attention/value/kernel": (D, L, K, E),
        "self_attention/out/kernel": (H, L, E, D), "post_self_attention_layer_norm/scale": (D, L),
        "mlp/wi_1/kernel": (D, L, F), "mlp/wo/kernel": (F, L, D), "mlp/wi_0/kernel": (D, L, F),
    }), {
        "embed": ("token_embedder/embedding", (V, D)), "scale": ("decoder/decoder_norm/scale", (D,)),
        "head": ("decoder/logits_dense/kernel", (D, V)),
    }, scanned=1),
    "gemma": Tree(lambda linear: presets.gemma(K, linear=linear), GEMMA, GEMMA_ENDS, gemma, one_plus=True),
    "gemma3": Tree(lambda linear: presets.gemma3(K, E, linear=linear), GEMMA3, GEMMA_ENDS, gemma, one_plus=True),
    "qwen3": Tree(lambda linear: presets.qwen3(K, E, linear=linear), under("layers/{i}/", {
        "input_layernorm/scale": (D,), "attn/q_proj/kernel": (D, H, E), "attn/k_proj/kernel": (D, K, E),
        "attn/v_proj/kernel": (D, K, E), "attn/o_proj/kernel": (H, E, D), "post_attention_layernorm/scale": (D,),
        "mlp/up_proj/kernel": (D, F), "mlp/down_proj/kernel": (F, D), "mlp/gate_proj/kernel": (D, F),
        "attn/q_norm/scale": (E,), "attn/k_norm/scale": (E,),
    }), {
        "embed": ("embedder/embedding", (V, D)), "scale": ("final_norm/scale", (D,)),
        "head": ("lm_head/kernel", (D, V)),
    }, qwen),
    "hf_gpt2": Tree(lambda linear: presets.hf_gpt2(H, linear=linear), under("transformer/h/{i}/", {
        "ln_1/scale": (D,), "ln_1/bias": (D,), "attn/c_attn/kernel": (3 * D, D), "attn/c_attn/bias": (3 * D,),
        "attn/c_proj/kernel": (D, D), "ln_2/scale": (D,), "ln_2/bias": (D,), "mlp/c_fc/kernel": (F, D),
        "mlp/c_proj/kernel": (D, F),
    }), {
        "embed": ("transformer/wte/embedding", (V, D)), "scale": ("transformer/ln_f/scale", (D,)),
        "bias": ("transformer/ln_f/bias", (D,)),
    }, gpt2, rope=False, centred=True),
    "hf_llama": Tree(lambda linear: presets.hf_llama(K, linear=linear), under("model/layers/{i}/", {
        "input_layernorm/weight": (D,), "self_attn/q_proj/kernel": (D, H * E), "self_attn/k_proj/kernel": (D, K * E),
        "self_attn/v_proj/kernel": (D, K * E), "self_attn/o_proj/kernel": (H * E, D),
        "post_attention_layernorm/weight": (D,), "mlp/up_proj/kernel": (D, F), "mlp/down_proj/kernel": (F, D),
        "mlp/gate_proj/kernel": (D, F),
    }), {
        "embed": ("model/embed_tokens/embedding", (V, D)), "scale": ("model/norm/weight", (D,)),
        "head": ("lm_head/kernel", (D, V)),
    }, llama),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_a_preset_is_what_discover_finds_beside_a_rotation_of_the_stream(name: str) -> None:
    """No rotation with a tied head behind a norm with a scale (nanodo, GPT-2) or a norm behind a layer (Gemma)."""
    rng, tree = np.random.default_rng(0), TREES[name]
    params = {path: 0.4 * rng.standard_normal(s).astype(np.float32) for path, s in stacked_numbers(tree.shapes).items()}
    batches = list(rng.standard_normal((2, 2, T, 6)) if tree.images else rng.integers(0, V, (2, 2, T)))
    report = check(tree.fn, params, batches, tree.gauges(True), taken="gauges", outputs="logits")
    turned = [gauge for gauge in report.whole if gauge.name == "residual_rotation"]
    assert len(turned) == (name in ("vision_transformer", "maxtext_llama", "qwen3", "hf_llama")), report
    size = D - tree.images  # a LayerNorm keeps the vector of ones
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
