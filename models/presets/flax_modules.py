"""Trees of Flax's own attention module: alone, and in big_vision's scanned vision transformer."""

import gauge_optax as go
from gauge_optax import Gauge


def flax_attention(path: str, *, bias: bool = True, linear: bool = False, layer: str = "") -> list[Gauge]:
    """`MultiHeadAttention` of NNX or Linen: `{query,key,value,out}/kernel`, heads apart.

    Args:
      path: where it stands, with captures (`"blocks/{i}/attn"`).
      bias: whether it has biases.
      linear: GL(d_h) in place of the rotations.
      layer: name of a leading axis of stacked layers.

    Returns:
      The query-key and the value-output gauge.
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
    """big_vision's ViT with `scan=True` and mean pooling: `Transformer/encoderblock/…`, layers on the first axis.

    Args:
      linear: GL(d_h) in place of the rotations.

    Returns:
      Norms into attention and MLP, the encoder's norm into the head, heads, the logit shift. The MLP is GELU: none.
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
