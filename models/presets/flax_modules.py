"""Gauges of Flax's own attention module, alone and in big_vision's vision transformer with scanned layers."""

import gauge_optax as go
from gauge_optax import Gauge


def flax_attention(path: str, *, bias: bool = True, linear: bool = False, layer: str = "") -> list[Gauge]:
    """Gauges of a `MultiHeadAttention` of NNX or Linen: `{query,key,value,out}/kernel`, with an axis for heads.

    Args:
      path: the path of the module, with captures (`"blocks/{i}/attn"`).
      bias: whether the module has biases.
      linear: whether elements are all invertible matrices (`head_linear`), and not only rotations (`head_rotation`).
      layer: the name for a leading axis of stacked layers; "" if there is none.

    Returns:
      The gauge of queries and keys, and that of values and outputs.
    """
    lead = f"{layer} " if layer else ""

    def of(name: str, kernel: str, vector: str | None) -> dict[str, str]:
        blocks = {f"{path}/{name}/kernel": lead + kernel}
        return blocks | ({f"{path}/{name}/bias": lead + vector} if bias and vector else {})

    query, key, value = (of(name, "_ head basis", "head basis") for name in ("query", "key", "value"))
    out = of("out", "head basis _", None)
    if linear:
        return [go.head_linear(query, key), go.head_linear(value, out)]
    return [go.head_rotation(query | key), go.head_rotation(value | out)]


def vision_transformer(*, linear: bool = False) -> list[Gauge]:
    """Gauges of big_vision's ViT with `scan=True` and mean pooling: `Transformer/encoderblock/…`, layers on axis 0.

    Args:
      linear: whether elements of heads are all invertible matrices, and not only rotations.

    Returns:
      The gauges of the norms in front of attention, MLP and head, of heads, and of the logits. The units of the MLP
      have none, because a GELU is not homogeneous.
    """
    block = "Transformer/encoderblock"
    attention = f"{block}/MultiHeadDotProductAttention_0"

    def norm(name: str, axes: str) -> dict[str, str]:
        return {f"{name}/scale": axes, f"{name}/bias": axes}

    return [
        go.norm_scale(
            norm(f"{block}/LayerNorm_0", "layer channel"),
            {f"{attention}/{name}/kernel": "layer channel _ _" for name in ("query", "key", "value")},
        ),
        go.norm_scale(
            norm(f"{block}/LayerNorm_1", "layer channel"), {f"{block}/MlpBlock_0/Dense_0/kernel": "layer channel _"}
        ),
        go.norm_scale(norm("Transformer/encoder_norm", "channel"), {"head/kernel": "channel _"}),
        *flax_attention(attention, linear=linear, layer="layer"),
        go.logit_shift({"head/kernel": "_ vocab", "head/bias": "vocab"}),
    ]
