"""Learnable multipliers: W = r·W̄·c, one number per output and one per input of a linear layer (GaugeFix-LRM, Eq. 1).

The tree of a wrapped layer has layer/kernel (W̄) and layer/bias as they were, `rows` (r, shaped like the outputs) and
`columns` (c, shaped like the inputs). The network sees only the product, and so does not notice

    r·α, W̄/α per output     c·β, W̄/β per input     r_Q·γ, r_K/γ     r_V·γ, c_O/γ     r_up·γ, c_down/γ

per coordinate of a head and per unit. r·α against c/α for a whole matrix is the first two together. `gauge_fix` and
`hold_products` act on these gauges, as `condition` shows.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gauge_optax as go
from models import lm
from models.wrapping import called_with, inputs_of, replaced, wrapped

AXES = {
    "query": "_ head channel", "key": "_ head channel", "value": "_ head channel", "out": "head channel _",
    "up": "_ channel", "gate": "_ channel", "down": "channel _",
}
"""Attribute name of a layer of `models/lm.py` → names of its kernel's axes; `_` is the residual stream's."""
OUTPUTS = {"out": "_ _ residual", "down": "_ residual"}
"""Where outputs are the residual stream: axes as the wrapper takes them."""


class Multiplied(nnx.Module):
    """A layer with a `kernel`, whose call sees rows·kernel·columns.

    Attributes:
      layer: as it was: any module that reads its own `kernel`.
      weight: the name of what is multiplied.
      rows: one per output, ones at first; None without them.
      columns: one per input, likewise.

    >>> layer = Multiplied(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), "_ channel")
    >>> layer.rows.shape, layer.columns.shape
    ((3,), (4,))
    """

    def __init__(
        self, layer: nnx.Module, axes: str, *, rows: bool = True, columns: bool = True, weight: str = "kernel"
    ) -> None:
        """`axes` of the weight, in order: `_` for inputs, a name for outputs."""
        kernel = getattr(layer, weight)[...]
        self.layer, self.weight, self.inputs = layer, weight, inputs_of(axes, kernel)
        self.outputs = tuple(k for k in range(kernel.ndim) if k not in self.inputs)
        shapes = [tuple(kernel.shape[k] for k in axes_kept) for axes_kept in (self.outputs, self.inputs)]
        self.rows = nnx.Param(jnp.ones(shapes[0], kernel.dtype)) if rows else None
        self.columns = nnx.Param(jnp.ones(shapes[1], kernel.dtype)) if columns else None

    def folded(self) -> jax.Array:
        """The kernel that the network sees."""
        kernel = getattr(self.layer, self.weight)[...]
        if self.rows is not None:
            kernel = kernel * jnp.expand_dims(self.rows[...], self.inputs)
        if self.columns is not None:
            kernel = kernel * jnp.expand_dims(self.columns[...], self.outputs)
        return kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's, with that kernel."""
        return called_with(self.layer, self.folded(), *args, **kwargs)


def multiply(model: nnx.Module, axes: Mapping[str, str]) -> None:
    """Wraps, in place, every layer whose attribute name is listed; name → axes, `_` for inputs."""
    wrapped(model, axes, Multiplied)


def fold(model: nnx.Module) -> None:
    """Multiplies, in place, every wrapped layer's kernel out: the same function without multipliers.

    >>> class One(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.up = Multiplied(nnx.Linear(4, 3, rngs=rngs), "_ channel")
    >>> model = One(nnx.Rngs(0))
    >>> model.up.rows[...] = jnp.array([2.0, 3.0, -1.0])
    >>> before = model.up(jnp.ones((1, 4)))
    >>> fold(model)
    >>> type(model.up).__name__, bool(jnp.all(model.up(jnp.ones((1, 4))) == before))
    ('Linear', True)
    """

    done: dict[int, nnx.Module] = {}

    def out(name: str, layer: Any) -> nnx.Module | None:
        del name
        if not isinstance(layer, Multiplied):
            return None
        if id(layer) not in done:  # a layer may have two names
            getattr(layer.layer, layer.weight)[...] = layer.folded()
            done[id(layer)] = layer.layer
        return done[id(layer)]

    replaced(model, out)


def linear_axes(config: lm.LMConfig) -> dict[str, str]:
    """Attribute names and axes of the language model's linear layers, as `multiply` takes them."""
    names = [name for name in AXES if name != "gate" or config.mlp == "swiglu"]
    return {name: OUTPUTS.get(name, AXES[name]) for name in names}


def build(config: lm.LMConfig, rngs: nnx.Rngs) -> lm.LM:
    """The language model with multipliers on every linear layer of its blocks."""
    model = lm.build(config, rngs)
    multiply(model, linear_axes(config))
    return model


# Gauges -------------------------------------------------------------------------------------------------


def head_gauge(config: lm.LMConfig, module: str = "blocks/{i}/attn") -> go.Gauge:
    """The paper's: one scale per head between multipliers of queries and keys, and biases, which have none."""
    head = _query_head(config)
    query = {f"{module}/query/rows": f"{head} _"} | _bias(config, f"{module}/query", f"{head} _")
    key = {f"{module}/key/rows": "head _"} | _bias(config, f"{module}/key", "head _")
    return go.multiplier_balance(query, key)


def _query_head(config: lm.LMConfig) -> str:
    return "head" if config.heads == config.kv_heads else "(head _)"


def _bias(config: lm.LMConfig, module: str, axes: str) -> dict[str, str]:
    return {f"{module}/layer/bias": axes} if config.bias else {}


def kernel_gauges(config: lm.LMConfig) -> list[go.Gauge]:
    """Rows and columns of every matrix against the matrix itself: after them no multiplier is free."""
    gauges: list[go.Gauge] = []
    for name, axes in AXES.items():
        if name == "gate" and config.mlp != "swiglu":
            continue
        module = f"blocks/{{i}}/{'attn' if name in ('query', 'key', 'value', 'out') else 'mlp'}/{name}"
        kernel, named = f"{module}/layer/kernel", " ".join(x for x in axes.split() if x != "_")
        inside, residual = f"{module}/rows", f"{module}/columns"
        if name in OUTPUTS:
            inside, residual = residual, inside
        other = " ".join("residual" if x == "_" else "_" for x in axes.split())
        gauges += [go.rescale({inside: named}, {kernel: axes}), go.rescale({residual: "residual"}, {kernel: other})]
    return gauges


def traded_gauges(config: lm.LMConfig) -> list[go.Gauge]:
    """Between two layers, kernels left alone: values and outputs, units, without rotary queries and keys too."""
    attn, mlp = "blocks/{i}/attn", "blocks/{i}/mlp"
    head = _query_head(config)
    value = {f"{attn}/value/rows": "head channel"} | _bias(config, f"{attn}/value", "head channel")
    gauges: list[go.Gauge] = [go.rescale(value, {f"{attn}/out/columns": f"{head} channel"})]
    if not config.rope and not config.qk_norm:
        query = {f"{attn}/query/rows": f"{head} channel"} | _bias(config, f"{attn}/query", f"{head} channel")
        key = {f"{attn}/key/rows": "head channel"} | _bias(config, f"{attn}/key", "head channel")
        gauges.append(go.rescale(query, key))
    if config.mlp in ("relu", "swiglu", "relu2"):
        up = {f"{mlp}/up/rows": "channel"} | _bias(config, f"{mlp}/up", "channel")
        gauges.append(go.rescale(up, {f"{mlp}/down/columns": "channel"}, degree=2 if config.mlp == "relu2" else 1))
    return gauges


# The paper's conditions ---------------------------------------------------------------------------------


MATRIX_DECAY, MULTIPLIER_DECAY = 0.1, 2e-3
QK = {f"**/{name}/{side}": "qk" for name in ("query", "key") for side in ("rows", "columns")}
KINDS = QK | {"**/rows": "multiplier", "**/columns": "multiplier", "**/kernel": "matrix", "**/embedding": "matrix"}


def condition(
    which: str,
    learning_rate: optax.ScalarOrSchedule,
    gauge: go.Gauge,
    held: Mapping[str, Any] | None = None,
    **fixing: Any,
) -> optax.GradientTransformationExtraArgs:
    """AdamW as in GaugeFix-LRM §4.1, under one of its conditions; B carries moments along unless told not to.

    Args:
      which: "A", decay on all multipliers; "B", none on those of queries and keys, which are fixed; "C", neither.
      learning_rate: a number or a schedule.
      gauge: the gauge of queries and keys, `head_gauge(config)`.
      held: keyword arguments of `go.orbit.hold_products` in B, {"kind": "cap", "cap": 2.0}; None leaves s_Q·s_K free,
        as the paper does.
      **fixing: keyword arguments of `go.orbit.gauge_fix` in B: `every=`; `transport=False`, which is what the paper
        did.

    Returns:
      The optimizer: gradients clipped at 1, b2 of 0.95, decay of 0.1 on matrices and 2e-3 on multipliers.
    """
    if which not in ("A", "B", "C"):
        raise ValueError(f"no condition {which!r}: A, B or C")
    options = [*fixing, *(["held"] if held else [])]
    if options and which != "B":
        raise ValueError(f"nothing is fixed in condition {which}: leave {', '.join(options)} out, or take B")
    decays = ("qk", "multiplier") if which == "A" else ("multiplier",)

    def among(*kinds: str) -> Callable[[Any], Any]:
        labels = go.tools.by_path(KINDS, default="other")
        return lambda params: jax.tree.map(lambda label: label in kinds, labels(params))

    adamw = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(MATRIX_DECAY, among("matrix")),
        optax.add_decayed_weights(MULTIPLIER_DECAY, among(*decays)),
        optax.scale_by_learning_rate(learning_rate),
    )
    if which != "B":
        return optax.with_extra_args_support(adamw)
    return go.orbit.gauge_fix(go.orbit.hold_products(adamw, gauge, **held) if held else adamw, gauge, **fixing)
