"""GPT-2 at 124 million parameters, with or without learnable multipliers, started as nanoGPT starts it.

This is the language model of `lm` with tied embeddings, GELU, no biases and 50,304 tokens. Multipliers are learnable
numbers that multiply the rows and columns of a matrix (`models.multipliers`). All linear layers have them. The tables
of tokens and of positions have one multiplier per feature, and the table of positions also one per position.
Reference: GaugeFix-LRM §4.1, which reports 123.76M parameters, 170K of them multipliers, and does not say which leaves
have multipliers. Counted as nanoGPT counts, without the table of positions, this model has 123,755,776 parameters, of
which 168,448 are multipliers (`parameters`).
"""

import math
from typing import Any

import jax
from flax import nnx

import gauge_optax as go
from models import lm, multipliers

START = 0.02


def config(**sizes: Any) -> lm.LMConfig:
    """The configuration with 124 million parameters. `sizes` overrides any field of it."""
    full: dict[str, Any] = {"vocab": 50_304, "d_model": 768, "layers": 12, "heads": 12, "kv_heads": 12, "d_head": 64}
    full |= {"d_ff": 3_072, "max_len": 1_024, "mlp": "gelu", "tied": True, "bias": False}
    return lm.LMConfig(**(full | sizes))


class MultipliedTable(multipliers.Multiplied):
    """A table of embeddings with multipliers. Layers that use `embedding`, such as a tied head, get the product."""

    def __init__(self, layer: lm.Embedding, **sides: bool) -> None:
        """Adds `rows`, one multiplier per feature, and `columns`, one per row of the table.

        `sides` can switch them off: rows=False, columns=False.
        """
        super().__init__(layer, "_ feature", weight="embedding", **sides)

    @property
    def embedding(self) -> jax.Array:
        """The table that the network sees."""
        return self.folded()


def build(config: lm.LMConfig, rngs: nnx.Rngs, multiplied: bool = True) -> lm.LM:
    """A freshly initialised model. The kernels of blocks are normal with standard deviation 0.02.

    For kernels whose output is added to the residual stream it is 0.02/√(2·layers).
    """
    model = lm.build(config, rngs)
    for block in model.blocks:
        layers = [block.attn.query, block.attn.key, block.attn.value, block.attn.out, block.mlp.up, block.mlp.down]
        for layer in layers:
            ends = layer is block.attn.out or layer is block.mlp.down
            size = START / math.sqrt(2 * config.layers) if ends else START
            shape = layer.kernel[...].shape
            layer.kernel[...] = size * jax.random.normal(rngs.params(), shape)
    if multiplied:
        multipliers.multiply(model, multipliers.linear_axes(config))
        model.embed = MultipliedTable(model.embed, columns=False)  # type: ignore[assignment]
        if model.pos is not None:  # with rotary embeddings there is no table of positions
            model.pos = MultipliedTable(model.pos)  # type: ignore[assignment]
    return model


def parameters(config: lm.LMConfig, multiplied: bool = True) -> tuple[int, int]:
    """The number of parameters, without the table of positions, and how many of them are multipliers.

    Both are computed from shapes, without arrays.

    >>> parameters(config())
    (123755776, 168448)
    >>> parameters(config(), multiplied=False)
    (123587328, 0)
    """
    shapes = nnx.state(nnx.eval_shape(lambda: build(config, nnx.Rngs(0), multiplied)), nnx.Param)
    whole = multipliers_count = 0
    for path, x in nnx.to_flat_state(shapes):
        multipliers_count += math.prod(x.shape) if path[-1] in ("rows", "columns") else 0
        whole += 0 if path[0] == "pos" and path[-1] == "embedding" else math.prod(x.shape)
    return whole, multipliers_count


def kernel_gauges(config: lm.LMConfig) -> list[go.Gauge]:
    """Gauges that multiply each multiplier by a factor and divide the matrix or table behind it by the same factor."""
    tables = [go.rescale({"embed/rows": "feature"}, {"embed/layer/embedding": "_ feature"})]
    if not config.rope:
        tables += [
            go.rescale({"pos/rows": "feature"}, {"pos/layer/embedding": "_ feature"}),
            go.rescale({"pos/columns": "entry"}, {"pos/layer/embedding": "entry _"}),
        ]
    return [*multipliers.kernel_gauges(config), *tables]
