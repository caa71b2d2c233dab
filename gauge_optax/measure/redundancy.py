"""Redundancy: how many parameters a function does not need, counted from shapes alone.

`redundancy` adds up the orbits' dimensions of any list of gauges. `transformer_redundancy` has a formula for decoders.
It also returns the number of Eq. (17) in van Nierop's paper: 2·layers·heads·d_head² + (d − 1)(d − 2)/2, where d is the
width. The two numbers differ for three reasons. The paper counts all of GL(d_head) for queries and keys even with
rotary embeddings, with which only d_head dimensions of this group commute. It counts a rotation of the residual stream
even if the output layer is the embedding (a tied head), which forbids it. And it leaves out norm scales, rescalings,
shifts and biases.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Gauges, product
from gauge_optax.transformation import require_choice, require_count

_NAME = "transformer_redundancy"


class Redundancy(NamedTuple):
    """Counts of the redundant dimensions of a decoder.

    Attributes:
      parameters: the number of entries of all leaves.
      total: the number of dimensions along all orbits.
      parts: name of a symmetry → its dimensions; `total` is the sum.
      paper: van Nierop's count, Eq. (17).
    """

    parameters: int
    total: int
    parts: Mapping[str, int]
    paper: int

    def __str__(self) -> str:
        rows = [f"{name:44} {n:15,}" for name, n in self.parts.items() if n]
        share = 100.0 * self.total / max(1, self.parameters)
        rows += [f"{'redundant':44} {self.total:15,}", f"{'parameters':44} {self.parameters:15,}  ({share:.2f} %)"]
        rows.append(f"{'van Nierop, Eq. (17)':44} {self.paper:15,}")
        return "\n".join(rows)


def redundancy(gauges: Gauges, params: Any) -> int:
    """Counts the dimensions along the orbits of a list of gauges.

    Args:
      gauges: a gauge or a sequence of them.
      params: the parameters, or their shapes (`jax.eval_shape`).

    Returns:
      The dimensions, summed over all gauges and their copies; `go.plan` shows them per gauge. Directions that two
      orbits share are counted twice; `go.measure.census` finds such an overlap.

    Raises:
      ValueError: bindings that do not fit the tree.

    >>> params = {"query": jnp.ones((6, 2, 3)), "key": jnp.ones((6, 2, 3))}
    >>> gauge = go.head_linear({"query": "_ head basis"}, {"key": "_ head basis"})
    >>> go.measure.redundancy(gauge, jax.eval_shape(lambda: params))  # 2 heads of 3 × 3
    18

    Reference: van Nierop, §3 and §4.5.
    """
    return product(gauges).dim(params)


def transformer_redundancy(
    *,
    layers: int,
    d_model: int,
    heads: int,
    d_head: int,
    d_ff: int,
    vocab: int,
    kv_heads: int | None = None,
    positions: int = 0,
    norm: Literal["layernorm", "rmsnorm"] = "layernorm",
    bias: bool = True,
    head_bias: bool | None = None,
    rope: bool = False,
    qk_norm: bool = False,
    mlp: Literal["gelu", "relu", "relu2", "swiglu"] = "gelu",
    tied: bool = False,
    eps: bool = True,
) -> Redundancy:
    """Counts the redundant parameters of a decoder of pre-norm blocks from its configuration.

    Args:
      layers: number of blocks.
      d_model: width of the residual stream.
      heads: query heads per layer.
      d_head: width of a head.
      d_ff: hidden units of the MLP.
      vocab: rows of the embedding.
      kv_heads: key and value heads per layer, a divisor of `heads`; `heads` by default.
      positions: rows of a learned table of positions; 0 for none.
      norm: "layernorm" or "rmsnorm", with scales.
      bias: whether linear layers, and LayerNorms, have biases.
      head_bias: whether the output layer has a bias; `bias` by default.
      rope: whether queries and keys have rotary embeddings over all of d_head, which is then even.
      qk_norm: whether queries and keys are normalized, with one scale vector for all heads.
      mlp: the activation: "gelu" (pass it for SiLU, too), "relu", "relu2" (the square of a ReLU), or "swiglu",
        which has a gate (pass it for GEGLU, too).
      tied: whether the output layer is the embedding.
      eps: whether norms have an eps, which breaks the scale of the residual stream.

    Returns:
      The counts of this package and the count of the paper. Directions that two orbits share count once, so that
      `total` is the number of dead directions.

    Raises:
      ValueError: another `norm` or `mlp`; sizes that are no positive integers; flags that are neither True nor False;
        `heads` that are no multiple of `kv_heads`; an odd d_head with `rope`.

    >>> gpt2 = go.measure.transformer_redundancy(
    ...     layers=12, d_model=768, heads=12, d_head=64, d_ff=3072,
    ...     vocab=50257, positions=1024, head_bias=False, tied=True,
    ... )
    >>> gpt2.paper, gpt2.total, gpt2.parameters
    (1473409, 1347352, 124439808)

    Reference: van Nierop, Eq. (17) and Table 1.
    """
    kv = heads if kv_heads is None else kv_heads
    require_choice(_NAME, "norm", norm, ("layernorm", "rmsnorm"))
    require_choice(_NAME, "mlp", mlp, ("gelu", "relu", "relu2", "swiglu"))
    sizes = dict(layers=layers, d_model=d_model, heads=heads, d_head=d_head, d_ff=d_ff, vocab=vocab, kv_heads=kv)
    for name, size in sizes.items():
        require_count(_NAME, name, size, 1)
    require_count(_NAME, "positions", positions, 0)
    # Python's integers do not overflow, as NumPy's do.
    layers, d_model, heads, d_head, d_ff, vocab, kv = map(int, sizes.values())
    positions, has_head_bias = int(positions), bias if head_bias is None else head_bias
    flags = dict(bias=bias, head_bias=has_head_bias, rope=rope, qk_norm=qk_norm, tied=tied, eps=eps)
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise binding_error(_NAME, f"bad {name}", f"{name}={flag!r}", "True or False", f"pass {name}=True")
    if heads % kv:
        raise binding_error(
            _NAME, "heads that do not share keys equally", f"heads={heads}, kv_heads={kv}", "a divisor of heads",
            f"pass kv_heads={math.gcd(heads, kv)}",
        )
    if rope and d_head % 2:
        raise binding_error(
            _NAME, "a rotary embedding of an odd width", f"d_head={d_head}",
            "an even d_head, whose entries turn in pairs", f"pass d_head={d_head + 1}, or rope=False",
        )
    centred, d = norm == "layernorm", d_model
    inner, shared, ups = heads * d_head, kv * d_head, 2 if mlp == "swiglu" else 1
    if qk_norm:
        scores = heads + kv + (d_head // 2 if rope else d_head)
    else:
        scores = kv * d_head if rope else kv * d_head**2
    # LayerNorm centres its input, so that a multiple of 1/γ (γ is its scale) may be added to each logit's column of the
    # output layer. But the norm's bias β then shifts that logit. A bias of the logits absorbs all vocab shifts. Without
    # one, only d + 1 of the vocab + d joint changes of these multiples and of β keep all logits, up to a common number.
    means_of_head = 0 if tied else d + 1 if bias and not has_head_bias else vocab
    parts = {
        "queries and keys": layers * scores,
        "values and outputs": layers * kv * d_head**2,
        "rotation of the residual stream": 0 if tied else (d - 1) * (d - 2) // 2 if centred else d * (d - 1) // 2,
        "scales of norms": 2 * layers * d + (0 if tied else d),
        "rescalings of hidden units": 0 if mlp == "gelu" else layers * d_ff,
        "logits": (0 if tied else d) + has_head_bias,
        "positions against tokens": d if positions else 0,
        "one number on the whole tied table": 1 if centred and tied and not positions else 0,
        "value biases, into output biases": layers * shared if bias else 0,
        "key biases": layers * shared if bias and not rope and not qk_norm else 0,
        "norm biases, into biases": (2 * layers * d + d * has_head_bias) if bias and centred else 0,
        "means that norms hide from readers": (
            layers * (inner + 2 * shared + ups * d_ff) + means_of_head if centred else 0
        ),
        "means that norms hide of writers": (
            layers * (inner + d_ff + 2 * bias) + positions + (0 if tied else vocab) if centred else 0
        ),
        "scale of the residual stream": 0 if eps else 1,
        "counted twice": -((1 if positions else 0) + 1) if centred and not tied else 0,
    }
    norms = 2 * d if centred and bias else d
    attention = d * (inner + 2 * shared) + inner * d + (inner + 2 * shared + d if bias else 0)
    block = 2 * norms + attention + (ups + 1) * d * d_ff + (ups * d_ff + d if bias else 0) + (2 * d_head * qk_norm)
    size = layers * block + norms + (1 if tied else 2) * vocab * d + positions * d + vocab * has_head_bias
    paper = 2 * layers * heads * d_head**2 + (d - 1) * (d - 2) // 2
    return Redundancy(size, sum(parts.values()), parts, paper)
