"""A decoder-only language model with switches that decide its symmetries, and the gauges for each setting of them.

The leaves with their shapes, for width d, h query heads and k key-value heads of size e, f hidden units, V tokens. The
last column says when a leaf exists; biases exist only with `bias`.

    embed/embedding (V, d)            pos/embedding (max_len, d)            pos: only without `rope`
    blocks/{i}/norm1/scale (d)        blocks/{i}/norm1/bias (d)             bias: only for norm="layernorm"
    blocks/{i}/attn/query/kernel (d, h, e)    key, value (d, k, e)    out (h, e, d)
    blocks/{i}/attn/query/bias (h, e)         key, value (k, e)       out (d)
    blocks/{i}/attn/q_norm/scale (e)  blocks/{i}/attn/k_norm/scale (e)      only with `qk_norm`
    blocks/{i}/mlp/up/kernel (d, f)   gate (d, f)   down (f, d)             gate: only for mlp="swiglu"
    blocks/{i}/norm2, final_norm      same leaves as norm1
    lm_head/kernel (d, V)             lm_head/bias (V)                      kernel: only if not `tied`

Arithmetic is in the parameters' dtype, float64 included, so that a symmetry can be checked up to roundoff.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gauge_optax as go

LINEAR_INIT = nnx.initializers.lecun_normal()
EMBED_INIT = nnx.initializers.normal(0.02)
NORM_EPS = 1e-6
# With QK-norm, a scale on the query or key kernel is a symmetry only if the norm's eps is negligible beside the mean
# square of a head. This eps is negligible even in float64, and still keeps the output of a zero head finite.
QK_NORM_EPS = 1e-20


@dataclass(frozen=True)
class LMConfig:
    """Sizes and switches of the model.

    With `norm_one_plus`, leaves store the scale of a norm less one. With init="orthogonal", each head has a kernel with
    orthonormal columns. With `zero_out`, the kernels that write to the residual stream start as zeros.
    """

    vocab: int = 256
    d_model: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    d_head: int = 16
    d_ff: int = 256
    max_len: int = 64
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_one_plus: bool = False
    rope: bool = False
    qk_norm: bool = False
    mlp: Literal["swiglu", "relu", "relu2", "gelu"] = "relu"
    bias: bool = True
    tied: bool = False
    init: Literal["normal", "orthogonal"] = "normal"
    zero_out: bool = False
    norm_eps: float = NORM_EPS

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that do not fit each other."""
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.rope and self.d_head % 2:
            raise ValueError(f"rotary embedding needs an even d_head, got {self.d_head}")


def llama_config(**sizes: Any) -> LMConfig:
    """The switches of Llama: RMSNorm, rotary, SwiGLU, no biases, untied head. `sizes` overrides any field."""
    switches: dict[str, Any] = {"norm": "rmsnorm", "rope": True, "mlp": "swiglu", "bias": False}
    return LMConfig(**(switches | sizes))


# Layers -------------------------------------------------------------------------------------------


def _per_head_orthogonal(key: jax.Array, heads: int, rows: int, d_head: int) -> jax.Array:
    """Draws (heads, rows, d_head), where the columns of each head W are orthonormal, WᵀW = 1: no basis is preferred."""
    draw = nnx.initializers.orthogonal()
    return jax.vmap(lambda k: draw(k, (rows, d_head), jnp.float32))(jax.random.split(key, heads))


class Linear(nnx.Module):
    """A linear layer: `equation` is an einsum of the input and the kernel. The bias is optional.

    A study may give a layer another function in place of the einsum, as `product`. It takes the equation, the input and
    the kernel.
    """

    product: Callable[..., jax.Array] = staticmethod(jnp.einsum)

    def __init__(self, equation: str, kernel: jax.Array, bias_shape: tuple[int, ...] | None) -> None:
        self.equation = equation
        self.kernel = nnx.Param(kernel)
        self.bias = None if bias_shape is None else nnx.Param(jnp.zeros(bias_shape, kernel.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiplies the input by the kernel, and adds the bias if there is one."""
        y = self.product(self.equation, x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...]


class Norm(nnx.Module):
    """LayerNorm (with a scale, and a bias if `bias`) or RMSNorm (with a scale) over the last axis."""

    def __init__(self, kind: str, width: int, one_plus: bool, bias: bool = True, eps: float = NORM_EPS) -> None:
        self.kind, self.one_plus, self.eps = kind, one_plus, eps
        self.scale = nnx.Param(jnp.zeros(width) if one_plus else jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width)) if kind == "layernorm" and bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the input, multiplies by the scale and adds the bias if there is one."""
        if self.kind == "layernorm":
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        y = y * (1 + self.scale[...] if self.one_plus else self.scale[...])
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """A table with one row per token or position."""

    def __init__(self, rows: int, width: int, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Param(EMBED_INIT(rngs.params(), (rows, width), jnp.float32))


def rotary(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotates coordinates c and c + e/2 of (batch, time, heads, e) by the angle time · base^(−2c/e), as Llama does."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1], dtype=x.dtype)[:, None] * base ** (-jnp.arange(half, dtype=x.dtype) / half)
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    """Causal attention: multi-head, grouped or multi-query; query head n reads key-value head n // (h/k)."""

    def __init__(self, c: LMConfig, rngs: nnx.Rngs) -> None:
        def project(heads: int) -> Linear:
            if c.init == "orthogonal":
                kernel = _per_head_orthogonal(rngs.params(), heads, c.d_model, c.d_head).transpose(1, 0, 2)
            else:
                kernel = LINEAR_INIT(rngs.params(), (c.d_model, heads * c.d_head))
                kernel = kernel.reshape(c.d_model, heads, c.d_head)
            return Linear("btd,dhe->bthe", kernel, (heads, c.d_head) if c.bias else None)

        self.rope = c.rope
        self.query, self.key, self.value = project(c.heads), project(c.kv_heads), project(c.kv_heads)
        if c.zero_out:
            out = jnp.zeros((c.heads, c.d_head, c.d_model))
        elif c.init == "orthogonal":
            out = _per_head_orthogonal(rngs.params(), c.heads, c.d_model, c.d_head).transpose(0, 2, 1)
            out = out * (c.d_model / (c.heads * c.d_head)) ** 0.5
        else:
            out = LINEAR_INIT(rngs.params(), (c.heads * c.d_head, c.d_model))
            out = out.reshape(c.heads, c.d_head, c.d_model)
        self.out = Linear("bthe,hed->btd", out, (c.d_model,) if c.bias else None)
        # All heads share the scale of q_norm, and of k_norm, as in Qwen3.
        self.q_norm = Norm("rmsnorm", c.d_head, c.norm_one_plus, eps=QK_NORM_EPS) if c.qk_norm else None
        self.k_norm = Norm("rmsnorm", c.d_head, c.norm_one_plus, eps=QK_NORM_EPS) if c.qk_norm else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output for a normed stream x, (batch, time, d); it has the same shape."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rope:
            query, key = rotary(query), rotary(key)
        batch, time, heads, e = query.shape
        query = query.reshape(batch, time, key.shape[2], -1, e)
        scores = jnp.einsum("btkge,bske->bkgts", query, key) * e**-0.5
        scores = jnp.where(jnp.tri(time, dtype=bool), scores, -jnp.inf)
        mixed = jnp.einsum("bkgts,bske->btkge", jax.nn.softmax(scores, axis=-1), value)
        return self.out(mixed.reshape(batch, time, heads, e))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": jax.nn.gelu,
}


class MLP(nnx.Module):
    """down(act(up x)), or with SwiGLU down(silu(gate x) · up x), which is linear in up."""

    def __init__(self, c: LMConfig, rngs: nnx.Rngs) -> None:
        def linear(rows: int, columns: int, zero: bool = False) -> Linear:
            kernel = jnp.zeros((rows, columns)) if zero else LINEAR_INIT(rngs.params(), (rows, columns))
            return Linear("btd,df->btf", kernel, (columns,) if c.bias else None)

        self.kind = c.mlp
        self.up = linear(c.d_model, c.d_ff)
        self.gate = linear(c.d_model, c.d_ff) if c.mlp == "swiglu" else None
        self.down = linear(c.d_ff, c.d_model, zero=c.zero_out)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output for a normed stream x, (batch, time, d); it has the same shape."""
        activation, up = ACTIVATIONS[self.kind], self.up(x)
        return self.down(activation(up) if self.gate is None else activation(self.gate(x)) * up)


class Block(nnx.Module):
    """A block: x ↦ x + attention(norm1 x), then x ↦ x + mlp(norm2 x)."""

    def __init__(self, c: LMConfig, rngs: nnx.Rngs) -> None:
        self.norm1, self.attn = Norm(c.norm, c.d_model, c.norm_one_plus, c.bias, c.norm_eps), Attention(c, rngs)
        self.norm2, self.mlp = Norm(c.norm, c.d_model, c.norm_one_plus, c.bias, c.norm_eps), MLP(c, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The residual stream behind the block, (batch, time, d), from the stream x in front of it."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nnx.Module):
    """Computes logits from the stream: by its own kernel, or by the table of embeddings if it is tied."""

    def __init__(self, c: LMConfig, rngs: nnx.Rngs) -> None:
        kernel = LINEAR_INIT(rngs.params(), (c.d_model, c.vocab))
        self.kernel = None if c.tied else nnx.Param(kernel)
        self.bias = nnx.Param(jnp.zeros(c.vocab)) if c.bias else None

    def __call__(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        """The logits (batch, time, vocab) for a normed stream (batch, time, d)."""
        logits = x @ (embedding.T if self.kernel is None else self.kernel[...])
        return logits if self.bias is None else logits + self.bias[...]


class LM(nnx.Module):
    """The language model: tokens (batch, time) → logits (batch, time, vocab)."""

    def __init__(self, c: LMConfig, rngs: nnx.Rngs) -> None:
        self.embed = Embedding(c.vocab, c.d_model, rngs)
        self.pos = None if c.rope else Embedding(c.max_len, c.d_model, rngs)
        self.blocks = nnx.List([Block(c, rngs) for _ in range(c.layers)])
        self.final_norm = Norm(c.norm, c.d_model, c.norm_one_plus, c.bias, c.norm_eps)
        self.lm_head = Head(c, rngs)

    def streams(self, tokens: jax.Array) -> list[jax.Array]:
        """The residual streams (batch, time, d) in front of the first block and behind every block."""
        x = self.embed.embedding[...][tokens]
        if self.pos is not None:
            x = x + self.pos.embedding[: tokens.shape[1]]
        streams = [x]
        for block in self.blocks:
            streams.append(block(streams[-1]))
        return streams

    def logits(self, stream: jax.Array) -> jax.Array:
        """The logits for a stream behind the last block."""
        return self.lm_head(self.final_norm(stream), self.embed.embedding[...])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the next token, at every position."""
        return self.logits(self.streams(tokens)[-1])


# Building and loss --------------------------------------------------------------------------------


def build(config: LMConfig, rngs: nnx.Rngs) -> LM:
    """A freshly initialised model."""
    return LM(config, rngs)


def loss_fn(model: LM, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each token, given the tokens before it. `tokens` has the shape (batch, time + 1)."""
    logits = model(tokens[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def params_and_loss(config: LMConfig, key: jax.Array) -> tuple[Any, Callable[[Any, jax.Array], jax.Array]]:
    """Returns the parameters, as a nested dict of arrays, and the pure function loss(params, tokens)."""
    graphdef, state = nnx.split(build(config, nnx.Rngs(key)))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return loss_fn(nnx.merge(graphdef, params), tokens)

    return nnx.to_pure_dict(state), loss


# Symmetries ---------------------------------------------------------------------------------------


def gauges(config: LMConfig, linear: bool = False) -> list[go.Gauge]:
    """The gauges of a configuration: of norms, heads, the MLP's units and logits. Their order has no effect.

    Args:
      config: the model's configuration.
      linear: whether a head's gauge has all invertible matrices as its elements, and not only rotations. For queries
        and keys with rotary embeddings, only those that commute with the rotary rotation (`rope_linear`).
    """
    return [
        *_norm_gauges(config),
        *_query_key_gauges(config, linear),
        _value_output_gauge(config, linear),
        *_mlp_gauges(config),
        *_head_gauges(config),
    ]


def whole_gauges(config: LMConfig, linear: bool = True, residual: bool = True, hold: bool = False) -> list[go.Gauge]:
    """Every continuous symmetry of a configuration: `gauges`, and gauges for all other directions without effect.

    Args:
      config: the model's configuration.
      linear: as in `gauges`. To train a LayerNorm model with biases, pass False. Only then every gauge has an anchor, a
        leaf from which its element can be computed.
      residual: whether to add the rotation of the residual stream, which costs most in training.
      hold: whether optimizers remove from their steps what rotates the residual stream.
    """
    return [
        *(_residual_gauge(config, hold) if residual else []),
        *_centring_gauges(config),
        *gauges(config, linear),
        *_bias_gauges(config),
        *_scale_gauges(config),
    ]


def permutations(config: LMConfig) -> list[go.Gauge]:
    """Gauges that permute the units of MLPs, and the heads. Query heads that share a key head move together.

    Optimizers need no gauge for the order of units and heads. `go.orbit.align` needs them to match two models.
    """
    unit = {"blocks/{i}/mlp/down/kernel": "channel _"}
    for name in ("up", "gate") if config.mlp == "swiglu" else ("up",):
        unit |= _with_bias(config, f"blocks/{{i}}/mlp/{name}", "_ channel", "channel")
    head = {"blocks/{i}/attn/out/kernel": f"{_query_head(config)} _ _"}
    for name, axis in (("query", _query_head(config)), ("key", "head"), ("value", "head")):
        head |= _with_bias(config, f"blocks/{{i}}/attn/{name}", f"_ {axis} _", f"{axis} _")
    return [go.permutation(head), go.permutation(unit)]


def _readers(c: LMConfig) -> dict[str, dict[str, str]]:
    """Path of a norm → the modules that get its output → axes string of the modules' own outputs."""
    mlp = ("gate", "up") if c.mlp == "swiglu" else ("up",)
    readers = {
        "blocks/{i}/norm1": {f"blocks/{{i}}/attn/{name}": "_ _" for name in ("query", "key", "value")},
        "blocks/{i}/norm2": {f"blocks/{{i}}/mlp/{name}": "_" for name in mlp},
    }
    return readers if c.tied else readers | {"final_norm": {"lm_head": "_"}}


def _writers(c: LMConfig) -> dict[str, str]:
    """Paths of leaves whose output is added to the residual stream → axes string of the axes before the stream's."""
    embeddings = {"embed/embedding": "_ "} | ({} if c.rope else {"pos/embedding": "_ "})
    kernels = {"blocks/{i}/attn/out/kernel": "_ _ ", "blocks/{i}/mlp/down/kernel": "_ "}
    biases = {"blocks/{i}/attn/out/bias": "", "blocks/{i}/mlp/down/bias": ""} if c.bias else {}
    return embeddings | kernels | biases


def _residual_gauge(c: LMConfig, hold: bool) -> list[go.Gauge]:
    """The rotation of the residual stream. With a tied head there is none.

    A rotation does not commute with the final norm's scale. A kernel of the head can take over this scale first; the
    table of embeddings, which a tied head uses, cannot.
    """
    if c.tied:
        return []
    read = {f"{m}/kernel": f"basis {axes}" for modules in _readers(c).values() for m, axes in modules.items()}
    write = {path: f"{axes}basis" for path, axes in _writers(c).items()}
    return [go.residual_rotation(read, write, _norm_gauges(c), centred=c.norm == "layernorm", hold=hold)]


def _centring_gauges(c: LMConfig) -> list[go.Gauge]:
    """Shifts that LayerNorms undo, because they subtract the mean over the stream's channels.

    They are a number per row of every kernel that writes to the stream, and a number per output of every kernel that
    gets the output of a LayerNorm.
    """
    if c.norm != "layernorm":
        return []
    shifts: list[go.Gauge] = []
    for norm, modules in _readers(c).items():
        scale = {f"{norm}/scale": "1+ channel" if c.norm_one_plus else "channel"}
        read = {f"{module}/kernel": f"channel {axes}" for module, axes in modules.items()}
        if c.bias:
            into = {f"{module}/bias": axes for module, axes in modules.items()}
            shifts.append(go.norm_read_shift(read, scale, {f"{norm}/bias": "channel"}, into))
        else:
            shifts.append(go.norm_read_shift(read, scale))
    for path, axes in _writers(c).items():
        if not (c.tied and path == "embed/embedding"):
            shifts.append(go.norm_write_shift({path: f"{axes}channel"}))
    if c.tied and c.rope:  # with learned positions, `embedding_shift` of `_bias_gauges` contains this direction
        shifts.append(go.norm_write_shift(tied={"embed/embedding": "vocab channel"}))
    return shifts


def _scale_gauges(c: LMConfig) -> list[go.Gauge]:
    """One factor for all leaves that write to the stream. It is a symmetry only if norms have no eps."""
    if c.norm_eps > 0:
        return []
    final = {"final_norm/scale": "1+ _" if c.norm_one_plus else "_"}
    final |= {"final_norm/bias": "_"} if c.norm == "layernorm" and c.bias else {}
    return [go.residual_scale({path: f"{axes}_" for path, axes in _writers(c).items()}, final if c.tied else None)]


def _bias_gauges(c: LMConfig) -> list[go.Gauge]:
    """Gauges of constants: those that a later bias can take over, and those that have no effect (key biases)."""
    found: list[go.Gauge] = [] if c.rope else [
        go.embedding_shift({"embed/embedding": "_ channel"}, {"pos/embedding": "_ channel"})
    ]
    if not c.bias:
        return found
    # Values' biases move into the output's bias. Norms' biases (below) move into the biases of the norms' readers.
    attn = "blocks/{i}/attn"
    kernel = {f"{attn}/out/kernel": f"{_query_head(c)} entry _"}
    found.append(go.bias_absorption({f"{attn}/value/bias": "head entry"}, kernel, {f"{attn}/out/bias": "_"}))
    if not c.rope and not c.qk_norm:
        found.append(go.key_bias({f"{attn}/key/bias": "_ _"}))
    if c.norm == "layernorm":
        for norm, modules in _readers(c).items():
            through = {f"{module}/kernel": f"channel {axes}" for module, axes in modules.items()}
            into = {f"{module}/bias": axes for module, axes in modules.items()}
            found.append(go.bias_absorption({f"{norm}/bias": "channel"}, through, into))
        if c.tied:
            final, embedding = {"final_norm/bias": "channel"}, {"embed/embedding": "_ channel"}
            found.append(go.bias_absorption(final, embedding, {"lm_head/bias": "_"}))
    return found


def _with_bias(config: LMConfig, module: str, kernel_axes: str, bias_axes: str) -> dict[str, str]:
    """The blocks of one linear layer, path → axes string: its kernel, and its bias if the model has biases."""
    bias = {f"{module}/bias": bias_axes} if config.bias else {}
    return {f"{module}/kernel": kernel_axes} | bias


def _norm_gauges(c: LMConfig) -> list[go.Gauge]:
    """Gauges that multiply a norm's scale by a factor per channel, and divide the rows of the kernels behind it.

    A LayerNorm's bias is multiplied by the same factor as its scale.
    """

    def absorbed(norm: str, consumers: dict[str, str]) -> go.Gauge:
        scale = {f"{norm}/scale": "1+ channel" if c.norm_one_plus else "channel"}
        bias = {f"{norm}/bias": "channel"} if c.norm == "layernorm" and c.bias else {}
        return go.norm_scale(scale=scale | bias, into=consumers)

    attn = {f"blocks/{{i}}/attn/{name}/kernel": "channel _ _" for name in ("query", "key", "value")}
    layers = ("gate", "up") if c.mlp == "swiglu" else ("up",)
    mlp = {f"blocks/{{i}}/mlp/{name}/kernel": "channel _" for name in layers}
    gauges = [absorbed("blocks/{i}/norm1", attn), absorbed("blocks/{i}/norm2", mlp)]
    # A tied head has no kernel of its own: its table is also the embedding, and cannot take over the final norm's
    # scale.
    return gauges if c.tied else [*gauges, absorbed("final_norm", {"lm_head/kernel": "channel _"})]


def _query_head(c: LMConfig) -> str:
    """The words for the axis of query heads in an axes string. Query heads that share a key head share its element.

    With grouped queries, the axis is split into key heads (`head`) and the query heads of one key head (`_`).
    """
    return "head" if c.heads == c.kv_heads else "(head _)"


def _query_key_gauges(c: LMConfig, linear: bool) -> list[go.Gauge]:
    """The gauges of queries and keys: changes of a head's basis; with `rope` only those that commute with it.

    With `qk_norm`, no change of basis is a symmetry. There are scales of the kernels, which the norms undo, and of the
    norms' scales.
    """
    query, key = "blocks/{i}/attn/query", "blocks/{i}/attn/key"
    if c.qk_norm:
        each = [go.scale_invariant(_with_bias(c, module, "_ head _", "head _")) for module in (query, key)]
        return [*each, _qk_norm_trade(c)]
    head = _query_head(c)
    left = _with_bias(c, query, f"_ {head} basis", f"{head} basis")
    right = _with_bias(c, key, "_ head basis", "head basis")
    if linear:
        return [go.rope_linear(left, right, pairing="half") if c.rope else go.head_linear(left, right)]
    return [go.rope_torus(left | right, pairing="half") if c.rope else go.head_rotation(left | right)]


def _qk_norm_trade(c: LMConfig) -> go.Gauge:
    """The gauge that multiplies the scale of q_norm and divides that of k_norm, per channel.

    With rotary embeddings, the two coordinates of a plane need the same factor.
    """
    axes = "(_ channel)" if c.rope else "channel"
    axes = f"1+ {axes}" if c.norm_one_plus else axes
    return go.rescale(
        up={"blocks/{i}/attn/q_norm/scale": axes},
        down={"blocks/{i}/attn/k_norm/scale": axes},
        sizes={"channel": c.d_head // 2} if c.rope else None,
    )


def _value_output_gauge(c: LMConfig, linear: bool) -> go.Gauge:
    """Changes of the basis of values, which the kernels of the outputs undo."""
    value = _with_bias(c, "blocks/{i}/attn/value", "_ head basis", "head basis")
    out = {"blocks/{i}/attn/out/kernel": f"{_query_head(c)} basis _"}
    return go.head_linear(value, out) if linear else go.head_rotation(value | out)


def _mlp_gauges(c: LMConfig) -> list[go.Gauge]:
    """The scales of the MLP's units. They need an activation that is homogeneous in `up`: ReLU, its square, SwiGLU."""
    if c.mlp == "gelu":
        return []
    up = _with_bias(c, "blocks/{i}/mlp/up", "_ channel", "channel")
    down = {"blocks/{i}/mlp/down/kernel": "channel _"}
    return [go.rescale(up=up, down=down, degree=2 if c.mlp == "relu2" else 1)]


def _head_gauges(c: LMConfig) -> list[go.Gauge]:
    """The gauge that adds one number to all logits. With a tied head, only the head's bias can do that."""
    kernel = {} if c.tied else {"lm_head/kernel": "_ vocab"}
    bias = {"lm_head/bias": "vocab"} if c.bias else {}
    blocks = kernel | bias
    return [go.logit_shift(blocks)] if blocks else []
