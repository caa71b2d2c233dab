"""A transformer with a rotation on every skip connection: one local basis of the stream per half block.

In an ordinary decoder, x ↦ x + attention(norm x), all layers use the same basis of the residual stream. Here the stream
is rotated on its way, x ↦ x·G + attention(norm x) and x ↦ x·Ḡ + mlp(norm x), with orthogonal matrices G and Ḡ as
parameters. The stream therefore has a basis of its own between any two half blocks. A rotation of one such basis is a
symmetry, if it is applied to all kernels that write to the stream in this basis or read it there, to the rotation
before and to the rotation after.
An ordinary decoder is the case in which every G and Ḡ is the identity. `fixed` moves any weights there without changing
the function. Reference: van Nierop, §4.6, Eq. (18)-(21).

    model = GaugedLM(config, nnx.Rngs(0))
    tx = orthogonal_skips(optax.adamw(1e-3))   # keeps G and Ḡ orthogonal
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gauge_optax as go
from models import lm

SKIPS = ("attn", "mlp")


class GaugedLM(nnx.Module):
    """A language model with a rotation on every skip connection: tokens (batch, time) → logits (batch, time, vocab)."""

    def __init__(self, config: lm.LMConfig, rngs: nnx.Rngs) -> None:
        self.lm = lm.build(config, rngs)
        unit = jnp.eye(config.d_model)
        self.skips = nnx.List([nnx.Dict({name: nnx.Param(unit) for name in SKIPS}) for _ in range(config.layers)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the next token, at every position."""
        embedding = self.lm.embed.embedding[...]
        x = embedding[tokens]
        if self.lm.pos is not None:
            x = x + self.lm.pos.embedding[: tokens.shape[1]]
        for block, skip in zip(self.lm.blocks, self.skips, strict=True):
            x = x @ skip["attn"][...] + block.attn(block.norm1(x))
            x = x @ skip["mlp"][...] + block.mlp(block.norm2(x))
        return self.lm.lm_head(self.lm.final_norm(x), embedding)


def gauges(config: lm.LMConfig) -> list[go.Gauge]:
    """The gauges of the 2·layers + 1 local bases, in the order of the stream, and then those of the norms.

    A rotation of the stream acts through a norm, so that it needs the gauge of the norm's scale.

    Args:
      config: the configuration of a decoder with `tied=False`.
    """
    if config.tied:
        raise ValueError("a tied head ties the last basis to the first: write tied=False")
    one_plus = "1+ " if config.norm_one_plus else ""
    has_bias = config.norm == "layernorm" and config.bias
    mlp = ("gate", "up") if config.mlp == "swiglu" else ("up",)
    # One entry per basis of the stream: the norm that follows, the kernels that read the norm's output, the rotation of
    # the next skip connection, and the leaves whose output is added to the stream in this basis.
    write = {"lm/embed/embedding": "_ basis"} | ({} if config.rope else {"lm/pos/embedding": "_ basis"})
    sites: list[tuple[str, dict[str, str], str | None, dict[str, str]]] = []
    for i in range(config.layers):
        block = f"lm/blocks/{i}"
        readers = {f"{block}/attn/{name}/kernel": "basis _ _" for name in ("query", "key", "value")}
        sites.append((f"{block}/norm1", readers, f"skips/{i}/attn", write))
        write = {f"{block}/attn/out/kernel": "_ _ basis", f"skips/{i}/attn": "_ basis"}
        write |= {f"{block}/attn/out/bias": "basis"} if config.bias else {}
        sites.append((f"{block}/norm2", {f"{block}/mlp/{n}/kernel": "basis _" for n in mlp}, f"skips/{i}/mlp", write))
        write = {f"{block}/mlp/down/kernel": "_ basis", f"skips/{i}/mlp": "_ basis"}
        write |= {f"{block}/mlp/down/bias": "basis"} if config.bias else {}
    sites.append(("lm/final_norm", {"lm/lm_head/kernel": "basis _"}, None, write))
    turns, norms = [], []
    for norm, readers, skip, written in sites:
        scale = {f"{norm}/scale": f"{one_plus}channel"} | ({f"{norm}/bias": "channel"} if has_bias else {})
        norms.append(go.norm_scale(scale, {path: axes.replace("basis", "channel") for path, axes in readers.items()}))
        read = readers | ({} if skip is None else {skip: "basis _"})
        turns.append(go.residual_rotation(read, written, [norms[-1]], centred=config.norm == "layernorm"))
    return [*turns, *norms]


def fixed(config: lm.LMConfig, params: Any) -> Any:
    """Moves weights to the point of their orbit where the rotations of all skip connections are the identity.

    Args:
      config: the decoder's configuration.
      params: the parameters as a nested dict, `nnx.to_pure_dict` of the state.

    Returns:
      A tree like `params`. Its subtree `lm`, as the parameters of an ordinary `lm.LM`, computes the same function.
    """
    turns = gauges(config)[: 2 * config.layers + 1]
    # Go through the bases in the order of the stream, and rotate each so that the rotation that leads to it becomes the
    # identity. This changes the rotation after it, which is next.
    for number, turn in enumerate(turns[1:]):
        skip = params["skips"][number // 2][SKIPS[number % 2]]
        params = turn.act({"": skip.T}, params)
    return params


def orthogonal_skips(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that the rotations of skip connections stay orthogonal.

    Args:
      inner: an optimizer.

    Returns:
      A transformation. It replaces a step U of a rotation G: with the antisymmetric part A of Gᵀ·U, the Cayley
      transform takes G to G·(1 − A/2)⁻¹·(1 + A/2), which is orthogonal for a step of any size.
    """
    inner = optax.with_extra_args_support(inner)

    def along(u: jax.Array, g: jax.Array) -> jax.Array:
        a = 0.5 * (g.T @ u - u.T @ g)
        unit = jnp.eye(len(g), dtype=g.dtype)
        return g @ jnp.linalg.solve(unit - 0.5 * a, unit + 0.5 * a) - g

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(updates, state, params, **extra)
        return {**updates, "skips": jax.tree.map(along, updates["skips"], params["skips"])}, state

    return optax.GradientTransformationExtraArgs(inner.init, update)
