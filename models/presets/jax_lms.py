"""Gauges of language models written for JAX: nanodo, MaxText's Llama with scanned layers, bonsai's Qwen3."""

import gauge_optax as go
from gauge_optax import Gauge


def nanodo(*, linear: bool = False) -> list[Gauge]:
    """Gauges of nanodo's decoder (Linen): GELU, tied head, LayerNorms without bias.

    Args:
      linear: whether elements of heads are all invertible matrices, and not only rotations.

    Returns:
      The gauges of the norms in front of attention and MLP, and of heads.
    """
    attention = "blocks_{i}/CausalAttn_0"
    query, key, value = ({f"{attention}/{name}/kernel": "_ head basis"} for name in ("query", "key", "value"))
    out = {f"{attention}/attn_out_proj/kernel": "head basis _"}
    norms = [
        go.norm_scale(
            {"blocks_{i}/LayerNorm_0/scale": "channel"},
            {f"{attention}/{name}/kernel": "channel _ _" for name in ("query", "key", "value")},
        ),
        go.norm_scale({"blocks_{i}/LayerNorm_1/scale": "channel"}, {"blocks_{i}/Mlp_0/Dense_0/kernel": "channel _"}),
    ]
    if linear:
        return [*norms, go.head_linear(query, key), go.head_linear(value, out)]
    return [*norms, go.head_rotation(query | key), go.head_rotation(value | out)]


def maxtext_llama(kv_heads: int, *, linear: bool = False) -> list[Gauge]:
    """Gauges of MaxText's Llama with scanned layers, whose layer axis is axis 1; untied head, grouped queries.

    Args:
      kv_heads: the number of key-value heads. The number of query heads is a multiple of it.
      linear: whether to use `rope_linear` and `head_linear` for heads, in place of `rope_torus` and `head_rotation`.

    Returns:
      The gauges of norms' scales, of heads, of the gated MLP's units (by the branch without activation), and of logits.
    """
    layers = "decoder/layers"
    attention = f"{layers}/self_attention"
    query = {f"{attention}/query/kernel": "_ layer (head _) basis"}
    key, value = ({f"{attention}/{name}/kernel": "_ layer head basis"} for name in ("key", "value"))
    out, sizes = {f"{attention}/out/kernel": "(head _) layer basis _"}, {"head": kv_heads}
    mlp = f"{layers}/mlp"
    return [
        go.norm_scale(
            {f"{layers}/pre_self_attention_layer_norm/scale": "channel layer"},
            {f"{attention}/{name}/kernel": "channel layer _ _" for name in ("query", "key", "value")},
        ),
        go.norm_scale(
            {f"{layers}/post_self_attention_layer_norm/scale": "channel layer"},
            {f"{mlp}/wi_0/kernel": "channel layer _", f"{mlp}/wi_1/kernel": "channel layer _"},
        ),
        go.norm_scale({"decoder/decoder_norm/scale": "channel"}, {"decoder/logits_dense/kernel": "channel _"}),
        go.rope_linear(query, key, sizes=sizes) if linear else go.rope_torus(query | key, sizes=sizes),
        go.head_linear(value, out, sizes=sizes) if linear else go.head_rotation(value | out, sizes=sizes),
        go.rescale({f"{mlp}/wi_1/kernel": "_ layer channel"}, {f"{mlp}/wo/kernel": "channel layer _"}),
        go.logit_shift({"decoder/logits_dense/kernel": "_ vocab"}),
    ]


def qwen3(kv_heads: int, d_head: int, *, linear: bool = False) -> list[Gauge]:
    """Gauges of bonsai's dense Qwen3 (NNX) with an untied head: QK-norm before rotary embeddings, grouped queries.

    The paths are those of versions that call the weight of a projection `kernel`. For versions that call it `w`, use
    the gauges that `discover` finds.

    Args:
      kv_heads: the number of key-value heads.
      d_head: the size of a head.
      linear: whether to use `head_linear` for values and outputs in place of `head_rotation`.

    Returns:
      The gauges of norms' scales, of the sizes of query and key heads, of QK-norm's two scales, of values and outputs,
      of the gated MLP's units (by the branch without activation), and of logits.
    """
    layer = "layers/{i}"
    attention, mlp = f"{layer}/attn", f"{layer}/mlp"
    value, out = {f"{attention}/v_proj/kernel": "_ head basis"}, {f"{attention}/o_proj/kernel": "(head _) basis _"}
    sizes, planes = {"head": kv_heads}, {"channel": d_head // 2}
    return [
        go.norm_scale(
            {f"{layer}/input_layernorm/scale": "channel"},
            {f"{attention}/{name}_proj/kernel": "channel _ _" for name in "qkv"},
        ),
        go.norm_scale(
            {f"{layer}/post_attention_layernorm/scale": "channel"},
            {f"{mlp}/{name}_proj/kernel": "channel _" for name in ("gate", "up")},
        ),
        go.norm_scale({"final_norm/scale": "channel"}, {"lm_head/kernel": "channel _"}),
        go.scale_invariant({f"{attention}/q_proj/kernel": "_ head _"}),
        go.scale_invariant({f"{attention}/k_proj/kernel": "_ head _"}),
        go.rescale(
            {f"{attention}/q_norm/scale": "(_ channel)"}, {f"{attention}/k_norm/scale": "(_ channel)"}, sizes=planes
        ),
        go.head_linear(value, out, sizes=sizes) if linear else go.head_rotation(value | out, sizes=sizes),
        go.rescale({f"{mlp}/up_proj/kernel": "_ channel"}, {f"{mlp}/down_proj/kernel": "channel _"}),
        go.logit_shift({"lm_head/kernel": "_ vocab"}),
    ]
