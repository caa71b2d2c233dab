"""Every preset against `discover`, on a small decoder or encoder that reads its tree."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from gauge_optax.gauges.gauge import Gauge
from models import presets
from tests.discovery.test_layouts import check

D, H, K, E, F, V, L, T = 8, 4, 2, 4, 10, 11, 2, 5
Shapes = Mapping[str, tuple[int, ...]]
Leaves = Mapping[str, tuple[Any, ...]]
"""Role in the net → path and shape; several roles where one leaf holds several kernels."""
Forms = Mapping[str, Callable[[Any], Any]]
"""Role → what makes of the leaf kernels (d, h, e), (h, e, d) or (d, f), a norm's scale, or a bias."""
OUTSIDE = ("embed", "final", "final_bias", "head", "head_bias")


def norm(x: jax.Array, p: Any, name: str, centred: bool = False, eps: float = 1e-20) -> jax.Array:
    x = x - jnp.mean(x, -1, keepdims=True) if centred else x
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * p[name] + p.get(f"{name}_bias", 0.0)


def rotary(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 50.0 ** (-jnp.arange(half) / half)
    u, v = x[..., :half], x[..., half:]
    return jnp.concatenate([u * jnp.cos(angle) - v * jnp.sin(angle), v * jnp.cos(angle) + u * jnp.sin(angle)], -1)


def block(x: jax.Array, p: Any, rope: bool, centred: bool, causal: bool) -> jax.Array:
    y = norm(x, p, "norm1", centred, 1e-2)
    q, k, v = (jnp.einsum("btd,dhe->bthe", y, p[name]) + p.get(f"{name}_bias", 0.0) for name in "qkv")
    q, k = (norm(q, p, "q_norm"), norm(k, p, "k_norm")) if "q_norm" in p else (q, k)
    q, k = (rotary(q), rotary(k)) if rope else (q, k)
    q = q.reshape(*k.shape[:3], -1, k.shape[-1])
    scores = jnp.einsum("btkge,bske->bkgts", q, k) * 0.5
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e30) if causal else scores
    mixed = jnp.einsum("bkgts,bske->btkge", jax.nn.softmax(scores), v).reshape(*x.shape[:2], -1, k.shape[-1])
    y = jnp.einsum("bthe,hed->btd", mixed, p["out"])
    x = x + (norm(y, p, "behind1") if "behind1" in p else y)
    y = norm(x, p, "norm2", centred, 1e-2)
    y = (jax.nn.silu(y @ p["gate"]) * (y @ p["up"]) if "gate" in p else jax.nn.gelu(y @ p["up"])) @ p["down"]
    return x + (norm(y, p, "behind2") if "behind2" in p else y)


def stacked_numbers(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Patterns with {i} written out for every layer."""
    return {p.replace("{i}", str(i)): s for p, s in shapes.items() for i in (range(L) if "{i}" in p else range(1))}


# Trees --------------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """A function with its tree's shapes, and the preset."""

    fn: Callable[[Any, Any], jax.Array]
    shapes: Shapes
    gauges: Callable[[bool], list[Gauge]]


def tree(
    leaves: Leaves, gauges: Callable[..., list[Gauge]], forms: Forms | None = None, *, rope: bool = False,
    centred: bool = False, axis: int | None = None, images: bool = False,
) -> Tree:
    """A net with these leaves; layers that are stacked along an axis are scanned over."""

    def read(p: Any, inside: bool, i: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for roles, (path, *_) in leaves.items():
            if (roles not in OUTSIDE) == inside:
                x = (forms or {}).get(roles, lambda x: x)(p[path.replace("{i}", str(i))])
                found |= dict(zip(roles.split(), x, strict=True)) if " " in roles else {roles: x}
        return found

    def fn(p: Any, inputs: Any) -> jax.Array:
        own = read(p, inside=False)
        x = inputs @ own["embed"] if images else own["embed"][inputs]
        if axis is None:
            for i in range(L):
                x = block(x, read(p, True, i), rope, centred, not images)
        else:
            paths = [path for roles, (path, *_) in leaves.items() if roles not in OUTSIDE]
            step = lambda x, layer: (block(x, read(layer, True), rope, centred, not images), None)  # noqa: E731
            x, _ = jax.lax.scan(step, x, {path: jnp.moveaxis(p[path], axis, 0) for path in paths})
        x = norm(x, own, "final", centred, 1e-2)
        outputs = (jnp.mean(x, 1) if images else x) @ (own["head"] if "head" in own else own["embed"].T)
        return outputs + own["head_bias"] if "head_bias" in own else outputs

    return Tree(fn, {path: tuple(shape) for path, *shape in leaves.values()}, lambda linear: gauges(linear=linear))


def under(form: str, leaves: Leaves) -> Leaves:
    """Leaves whose names stand for `*` in a path."""
    return {roles: (form.replace("*", name), *shape) for roles, (name, *shape) in leaves.items()}


QKV = {"q": ("query", D, H, E), "k": ("key", D, H, E), "v": ("value", D, H, E)}
NANODO = under("*", {"embed": ("embed/embedding", V, D), "final": ("out_ln/scale", D)}) | under("blocks_{i}/*", {
    **under("CausalAttn_0/*/kernel", QKV | {"out": ("attn_out_proj", H, E, D)}),
    **under("LayerNorm_*/scale", {"norm1": ("0", D), "norm2": ("1", D)}),
    **under("Mlp_0/Dense_*/kernel", {"up": ("0", D, F), "down": ("1", F, D)}),
})
MAXTEXT = {
    "embed": ("token_embedder/embedding", V, D), "final": ("decoder/decoder_norm/scale", D),
    "head": ("decoder/logits_dense/kernel", D, V),
    **under("decoder/layers/self_attention/*/kernel", {
        "q": ("query", D, L, H, E), "k": ("key", D, L, K, E), "v": ("value", D, L, K, E), "out": ("out", H, L, E, D)}),
    **under("decoder/layers/mlp/*/kernel", {
        "gate": ("wi_0", D, L, F), "up": ("wi_1", D, L, F), "down": ("wo", F, L, D)}),
    **under("decoder/layers/*_self_attention_layer_norm/scale", {"norm1": ("pre", D, L), "norm2": ("post", D, L)}),
}
GEMMA = {
    "embed": ("embedder/input_embedding", V, D), "final": ("final_norm/scale", D),
    **under("layer_{i}/*", {
        "q": ("attn/q_einsum/w", H, D, E), "k v": ("attn/kv_einsum/w", 2, K, D, E),
        "out": ("attn/attn_vec_einsum/w", H, E, D), "gate up": ("mlp/gating_einsum", 2, D, F),
        "down": ("mlp/linear", F, D), "norm1": ("pre_attention_norm/scale", D), "norm2": ("pre_ffw_norm/scale", D)}),
}
GEMMA3 = GEMMA | under("layer_{i}/*/scale", {
    "q_norm": ("attn/_query_norm", E), "k_norm": ("attn/_key_norm", E), "behind1": ("post_attention_norm", D),
    "behind2": ("post_ffw_norm", D)})
ONE_PLUS: Forms = dict.fromkeys(
    ("norm1", "norm2", "q_norm", "k_norm", "behind1", "behind2", "final"), lambda x: 1 + x
)
OF_GEMMA = {"q": lambda x: x.transpose(1, 0, 2), "k v": lambda x: x.transpose(0, 2, 1, 3), **ONE_PLUS}
QWEN = {
    "embed": ("embedder/embedding", V, D), "final": ("final_norm/scale", D), "head": ("lm_head/kernel", D, V),
    **under("layers/{i}/attn/*_proj/kernel", {
        "q": ("q", D, H, E), "k": ("k", D, K, E), "v": ("v", D, K, E), "out": ("o", H, E, D)}),
    **under("layers/{i}/attn/*_norm/scale", {"q_norm": ("q", E), "k_norm": ("k", E)}),
    **under("layers/{i}/mlp/*_proj/kernel", {"gate": ("gate", D, F), "up": ("up", D, F), "down": ("down", F, D)}),
    **under("layers/{i}/*_layernorm/scale", {"norm1": ("input", D), "norm2": ("post_attention", D)}),
}
GPT2 = under("transformer/*", {
    "embed": ("wte/embedding", V, D), "final": ("ln_f/scale", D), "final_bias": ("ln_f/bias", D),
    **under("h/{i}/*", {
        "q k v": ("attn/c_attn/kernel", 3 * D, D), "q_bias k_bias v_bias": ("attn/c_attn/bias", 3 * D),
        "out": ("attn/c_proj/kernel", D, D), "up": ("mlp/c_fc/kernel", F, D), "down": ("mlp/c_proj/kernel", D, F),
        "norm1": ("ln_1/scale", D), "norm1_bias": ("ln_1/bias", D), "norm2": ("ln_2/scale", D),
        "norm2_bias": ("ln_2/bias", D)}),
})
OF_GPT2: Forms = {
    "q k v": lambda x: x.T.reshape(D, 3, H, D // H).transpose(1, 0, 2, 3),
    "q_bias k_bias v_bias": lambda x: x.reshape(3, H, D // H), "out": lambda x: x.T.reshape(H, D // H, D),
    "up": jnp.transpose, "down": jnp.transpose,
}
LLAMA = {
    "head": ("lm_head/kernel", D, V), **under("model/*", {
        "embed": ("embed_tokens/embedding", V, D), "final": ("norm/weight", D)}),
    **under("model/layers/{i}/self_attn/*_proj/kernel", {
        "q": ("q", D, H * E), "k": ("k", D, K * E), "v": ("v", D, K * E), "out": ("o", H * E, D)}),
    **under("model/layers/{i}/mlp/*_proj/kernel", {"gate": ("gate", D, F), "up": ("up", D, F), "down": ("down", F, D)}),
    **under("model/layers/{i}/*_layernorm/weight", {"norm1": ("input", D), "norm2": ("post_attention", D)}),
}
OF_LLAMA: Forms = dict.fromkeys("qkv", lambda x: x.reshape(D, -1, E)) | {"out": lambda x: x.reshape(H, E, D)}
VIT = {
    "embed": ("embedding/kernel", 6, D), "head": ("head/kernel", D, V), "head_bias": ("head/bias", V),
    "final": ("Transformer/encoder_norm/scale", D), "final_bias": ("Transformer/encoder_norm/bias", D),
    **under("Transformer/encoderblock/MultiHeadDotProductAttention_0/*", {
        **{role: (f"{name}/kernel", L, *shape) for role, (name, *shape) in QKV.items()},
        "out": ("out/kernel", L, H, E, D),
        **{f"{role}_bias": (f"{name}/bias", L, H, E) for role, (name, *_) in QKV.items()}}),
    **under("Transformer/encoderblock/*", {
        "norm1": ("LayerNorm_0/scale", L, D), "norm1_bias": ("LayerNorm_0/bias", L, D),
        "norm2": ("LayerNorm_1/scale", L, D), "norm2_bias": ("LayerNorm_1/bias", L, D),
        "up": ("MlpBlock_0/Dense_0/kernel", L, D, F), "down": ("MlpBlock_0/Dense_1/kernel", L, F, D)}),
}
of = functools.partial
TREES: Mapping[str, Tree] = {
    "nanodo": tree(NANODO, presets.nanodo, centred=True),
    "vision_transformer": tree(VIT, presets.vision_transformer, centred=True, axis=0, images=True),
    "maxtext_llama": tree(MAXTEXT, of(presets.maxtext_llama, K), rope=True, axis=1),
    "gemma": tree(GEMMA, of(presets.gemma, K), OF_GEMMA, rope=True),
    "gemma3": tree(GEMMA3, of(presets.gemma3, K, E), OF_GEMMA, rope=True),
    "qwen3": tree(QWEN, of(presets.qwen3, K, E), rope=True),
    "hf_gpt2": tree(GPT2, of(presets.hf_gpt2, H), OF_GPT2, centred=True),
    "hf_llama": tree(LLAMA, of(presets.hf_llama, K), OF_LLAMA, rope=True),
}


def drawn(name: str) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Parameters of a tree, and two batches."""
    rng = np.random.default_rng(0)
    shapes = stacked_numbers(TREES[name].shapes)
    params = {p: 0.4 * rng.standard_normal(s).astype(np.float32) for p, s in shapes.items()}
    images = name == "vision_transformer"
    return params, list(rng.standard_normal((2, 2, T, 6)) if images else rng.integers(0, V, (2, 2, T)))


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_a_preset_is_what_discover_finds(name: str) -> None:
    params, batches = drawn(name)
    check(TREES[name].fn, params, batches, TREES[name].gauges(True), lambda report: report.gauges)


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_the_residual_rotation_is_found_where_the_architecture_has_it(name: str) -> None:
    """Not with a tied head behind a norm with a scale (nanodo, GPT-2), nor with a norm behind a layer (Gemma)."""
    params, batches = drawn(name)
    report = go.discover(TREES[name].fn, params, batches, "logits", progress=False)
    turned = [gauge for gauge in report.whole if gauge.name == "residual_rotation"]
    assert len(turned) == (name in ("vision_transformer", "maxtext_llama", "qwen3", "hf_llama")), report
    size = D - (name == "vision_transformer")  # a LayerNorm keeps the vector of ones
    assert all(gauge.dim(params) == size * (size - 1) // 2 for gauge in turned)
    assert not report.rejected and not report.ungauged, report


def test_attention_alone() -> None:
    """Flax's module, at any path."""
    rotation, other = presets.flax_attention("blocks/{i}/attn")
    shapes = {name: {"kernel": (D, H, E), "bias": (H, E)} for name in ("query", "key", "value")}
    tree = {"blocks": [{"attn": {**shapes, "out": {"kernel": (H, E, D), "bias": (D,)}}}] * 2}
    params = jax.tree.map(np.ones, tree, is_leaf=lambda x: isinstance(x, tuple))
    assert rotation.dim(params) == other.dim(params) == 2 * H * E * (E - 1) // 2
    assert [g.name for g in presets.flax_attention("a", bias=False, linear=True)] == ["head_linear"] * 2
