"""Gauges of the Flax models in Hugging Face's transformers.

Their kernels have heads and entries in one axis. Kernels of GPT-2 are stored as (outputs, inputs).
"""

import gauge_optax as go
from gauge_optax import Gauge


def hf_gpt2(heads: int, *, linear: bool = False) -> list[Gauge]:
    """Gauges of `FlaxGPT2LMHeadModel`: queries, keys and values in one kernel, GELU, tied head.

    Args:
      heads: the number of heads.
      linear: whether elements of heads are all invertible matrices, and not only rotations.

    Returns:
      The gauges of the norms in front of attention and MLP, and of heads. A head's gauge moves the biases of queries,
      keys and values with their kernels.
    """
    block = "transformer/h/{i}"
    fused, sizes = f"{block}/attn/c_attn", {"qkv": 3, "head": heads}

    def of(part: int) -> dict[str, str]:
        return {f"{fused}/kernel": f"(qkv={part} head basis) _", f"{fused}/bias": f"(qkv={part} head basis)"}

    def norm(name: str, reader: str) -> Gauge:
        scale = {f"{block}/{name}/scale": "channel", f"{block}/{name}/bias": "channel"}
        return go.norm_scale(scale, {f"{block}/{reader}/kernel": "_ channel"})

    out = {f"{block}/attn/c_proj/kernel": "_ (head basis)"}
    norms = [norm("ln_1", "attn/c_attn"), norm("ln_2", "mlp/c_fc")]
    if linear:
        return [*norms, go.head_linear(of(0), of(1), sizes=sizes), go.head_linear(of(2), out, sizes=sizes)]
    both = {path: (axes, of(1)[path]) for path, axes in of(0).items()}
    return [*norms, go.head_rotation(both, sizes=sizes), go.head_rotation(of(2) | out, sizes=sizes)]


def hf_llama(kv_heads: int, *, linear: bool = False) -> list[Gauge]:
    """Gauges of `FlaxLlamaForCausalLM`, and of Mistral: grouped queries, untied head.

    Rotary embeddings pair entry c with entry c + d_h/2.

    Args:
      kv_heads: the number of key-value heads. The number of query heads is a multiple of it.
      linear: whether to use `rope_linear` and `head_linear` for heads, in place of `rope_torus` and `head_rotation`.

    Returns:
      The gauges of norms' scales, of heads, of the gated MLP's units (by the branch without activation), and of logits.
    """
    layer = "model/layers/{i}"
    attention, mlp = f"{layer}/self_attn", f"{layer}/mlp"
    sizes = {"head": kv_heads}
    query = {f"{attention}/q_proj/kernel": "_ (head _ basis)"}
    key, value = ({f"{attention}/{name}_proj/kernel": "_ (head basis)"} for name in "kv")
    out = {f"{attention}/o_proj/kernel": "(head _ basis) _"}
    return [
        go.norm_scale(
            {f"{layer}/input_layernorm/weight": "channel"},
            {f"{attention}/{name}_proj/kernel": "channel _" for name in "qkv"},
        ),
        go.norm_scale(
            {f"{layer}/post_attention_layernorm/weight": "channel"},
            {f"{mlp}/{name}_proj/kernel": "channel _" for name in ("gate", "up")},
        ),
        go.norm_scale({"model/norm/weight": "channel"}, {"lm_head/kernel": "channel _"}),
        go.rope_linear(query, key, sizes=sizes) if linear else go.rope_torus(query | key, sizes=sizes),
        go.head_linear(value, out, sizes=sizes) if linear else go.head_rotation(value | out, sizes=sizes),
        go.rescale({f"{mlp}/up_proj/kernel": "_ channel"}, {f"{mlp}/down_proj/kernel": "channel _"}),
        go.logit_shift({"lm_head/kernel": "_ vocab"}),
    ]
