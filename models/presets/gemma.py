"""Gauges of Gemma (Linen).

Its einsum weights have heads on the first axis, one leaf holds keys and values, and norms store their scale less one.
The head is tied, so that there is no gauge of logits.
"""

import gauge_optax as go
from gauge_optax import Gauge

_ATTENTION, _MLP = "layer_{i}/attn", "layer_{i}/mlp"


def gemma(kv_heads: int, *, linear: bool = False) -> list[Gauge]:
    """Gauges of Gemma with `q_einsum` and `kv_einsum`. Rotary embeddings pair entry c with entry c + d_h/2.

    Args:
      kv_heads: the number of key-value heads.
      linear: whether to use `rope_linear` and `head_linear` for heads, in place of `rope_torus` and `head_rotation`.

    Returns:
      The gauges of norms' scales, of heads, and of the gated MLP's units (by the branch without activation).
    """
    query, key = {f"{_ATTENTION}/q_einsum/w": "(head _) _ basis"}, {f"{_ATTENTION}/kv_einsum/w": "kv=0 head _ basis"}
    sizes = {"head": kv_heads}
    turn = go.rope_linear(query, key, sizes=sizes) if linear else go.rope_torus(query | key, sizes=sizes)
    return [*_norms(), turn, *_values(sizes, linear)]


def gemma3(kv_heads: int, d_head: int, *, linear: bool = False) -> list[Gauge]:
    """Gauges of Gemma 3, which is Gemma with QK-norm and with norms behind attention and behind the MLP.

    A norm divides by the size of its input. The kernels in front of QK-norm and of the norms behind attention and MLP
    can therefore have any size.

    Args:
      kv_heads: the number of key-value heads.
      d_head: the size of a head.
      linear: whether to use `head_linear` for values and outputs in place of `head_rotation`.

    Returns:
      The gauges of norms' scales, of the sizes of query and key heads, of QK-norm's two scales, of values and outputs,
      of the gated MLP's units (by the branch without activation), and of the sizes of the two output kernels. A
      change of size is a symmetry only if the eps of the norm behind the kernel is negligible.
    """
    axes = "1+ (_ channel)"
    return [
        *_norms(),
        go.scale_invariant({f"{_ATTENTION}/q_einsum/w": "head _ _"}),
        go.scale_invariant({f"{_ATTENTION}/kv_einsum/w": "kv=0 head _ _"}),
        go.rescale(
            {f"{_ATTENTION}/_query_norm/scale": axes}, {f"{_ATTENTION}/_key_norm/scale": axes},
            sizes={"channel": d_head // 2},
        ),
        *_values({"head": kv_heads}, linear),
        go.scale_invariant({f"{_ATTENTION}/attn_vec_einsum/w": "_ _ _"}),
        go.scale_invariant({f"{_MLP}/linear": "_ _"}),
    ]


def _norms() -> list[Gauge]:
    return [
        go.norm_scale(
            {"layer_{i}/pre_attention_norm/scale": "1+ channel"},
            {f"{_ATTENTION}/q_einsum/w": "_ channel _", f"{_ATTENTION}/kv_einsum/w": "_ _ channel _"},
        ),
        go.norm_scale({"layer_{i}/pre_ffw_norm/scale": "1+ channel"}, {f"{_MLP}/gating_einsum": "_ channel _"}),
    ]


def _values(sizes: dict[str, int], linear: bool) -> list[Gauge]:
    value = {f"{_ATTENTION}/kv_einsum/w": "kv=1 head _ basis"}
    out = {f"{_ATTENTION}/attn_vec_einsum/w": "(head _) basis _"}
    return [
        go.head_linear(value, out, sizes=sizes) if linear else go.head_rotation(value | out, sizes=sizes),
        go.rescale({f"{_MLP}/gating_einsum": "gate=1 _ channel"}, {f"{_MLP}/linear": "channel _"}),
    ]
