"""Gemma (Linen): einsum weights with heads first, keys and values stacked, norms stored less one, a tied head."""

import gauge_optax as go
from gauge_optax import Gauge

_ATTENTION, _MLP = "layer_{i}/attn", "layer_{i}/mlp"


def gemma(kv_heads: int, *, linear: bool = False) -> list[Gauge]:
    """Gemma with `q_einsum` and `kv_einsum`; rotary by halves.

    Args:
      kv_heads: key-value heads.
      linear: what of GL(d_h) holds, in place of rotations and torus.

    Returns:
      Norms into their readers, heads, the gated MLP's linear branch.
    """
    query, key = {f"{_ATTENTION}/q_einsum/w": "(head _) _ basis"}, {f"{_ATTENTION}/kv_einsum/w": "kv=0 head _ basis"}
    sizes = {"head": kv_heads}
    turn = go.rope_linear(query, key, sizes=sizes) if linear else go.rope_torus(query | key, sizes=sizes)
    return [*_norms(), turn, *_values(sizes, linear)]


def gemma3(kv_heads: int, d_head: int, *, linear: bool = False) -> list[Gauge]:
    """Gemma 3: the same with QK-norm, and norms behind attention and MLP, which leave the size before them free.

    Args:
      kv_heads: key-value heads.
      d_head: width of a head.
      linear: GL(d_h) of values and outputs in place of the rotation.

    Returns:
      Norms into their readers, sizes of query and key heads, QK-norm's scales against each other, value-output heads,
      the gated MLP's linear branch, sizes of the two output kernels. These two are exact as far as their norms' eps is
      nothing.
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
