"""Learnable multipliers: W = r·W̄·c, one number per output and one per input of a linear layer (GaugeFix-LRM, Eq. 1).

The tree of a layer with multipliers has layer/kernel (W̄) and layer/bias as before, and the new leaves `rows` (r,
shaped like the outputs) and `columns` (c, shaped like the inputs). The network sees only the product W. Therefore it
computes the same function after any of these moves:

    r·α, W̄/α per output     c·β, W̄/β per input     r_Q·γ, r_K/γ     r_V·γ, c_O/γ     r_up·γ, c_down/γ

The last three move multipliers of two layers (queries and keys, values and outputs, the MLP's two layers), with one
factor γ per coordinate of a head, or per unit. `gauge_fix` and `hold_products` act on these gauges, as `condition`
shows.
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
"""Attribute name of a layer of `models/lm.py` → names of its kernel's axes. `_` is the axis of the residual stream."""
OUTPUTS = {"out": "_ _ residual", "down": "_ residual"}
"""The axes strings, as `Multiplied` takes them, of the layers whose outputs are the residual stream."""


class Multiplied(nnx.Module):
    """Calls a layer with the kernel rows·kernel·columns in place of its own.

    Attributes:
      layer: the layer, any module that uses its own `kernel`. It is not changed.
      weight: the name of the attribute that is multiplied, such as "kernel".
      rows: one multiplier per output, ones at the start; None if there are none.
      columns: one multiplier per input, ones at the start; None if there are none.

    >>> layer = Multiplied(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), "_ channel")
    >>> layer.rows.shape, layer.columns.shape
    ((3,), (4,))
    """

    def __init__(
        self, layer: nnx.Module, axes: str, *, rows: bool = True, columns: bool = True, weight: str = "kernel"
    ) -> None:
        """Adds multipliers. `axes` has a word per axis of the weight: `_` for an input, any name for an output."""
        kernel = getattr(layer, weight)[...]
        self.layer, self.weight, self.inputs = layer, weight, inputs_of(axes, kernel)
        self.outputs = tuple(k for k in range(kernel.ndim) if k not in self.inputs)
        shapes = [tuple(kernel.shape[k] for k in axes_kept) for axes_kept in (self.outputs, self.inputs)]
        self.rows = nnx.Param(jnp.ones(shapes[0], kernel.dtype)) if rows else None
        self.columns = nnx.Param(jnp.ones(shapes[1], kernel.dtype)) if columns else None

    def folded(self) -> jax.Array:
        """The product rows·kernel·columns, which the network sees."""
        kernel = getattr(self.layer, self.weight)[...]
        if self.rows is not None:
            kernel = kernel * jnp.expand_dims(self.rows[...], self.inputs)
        if self.columns is not None:
            kernel = kernel * jnp.expand_dims(self.columns[...], self.outputs)
        return kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the layer, computed with the multiplied kernel."""
        return called_with(self.layer, self.folded(), *args, **kwargs)


def multiply(model: nnx.Module, axes: Mapping[str, str]) -> None:
    """Adds multipliers, in place, to every layer whose attribute name is a key of `axes` (see `Multiplied`)."""
    wrapped(model, axes, Multiplied)


def fold(model: nnx.Module) -> None:
    """Removes multipliers, in place: multiplies them into the kernels. The function stays the same.

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
        if id(layer) not in done:  # two attributes may hold one layer
            getattr(layer.layer, layer.weight)[...] = layer.folded()
            done[id(layer)] = layer.layer
        return done[id(layer)]

    replaced(model, out)


def linear_axes(config: lm.LMConfig) -> dict[str, str]:
    """Attribute name → axes string for the linear layers of the language model, as `multiply` takes them."""
    names = [name for name in AXES if name != "gate" or config.mlp == "swiglu"]
    return {name: OUTPUTS.get(name, AXES[name]) for name in names}


def build(config: lm.LMConfig, rngs: nnx.Rngs) -> lm.LM:
    """The language model with multipliers on every linear layer of its blocks."""
    model = lm.build(config, rngs)
    multiply(model, linear_axes(config))
    return model


# Gauges -------------------------------------------------------------------------------------------------


def head_gauge(config: lm.LMConfig, module: str = "blocks/{i}/attn") -> go.Gauge:
    """The gauge of the paper: one scale per head, by which queries are multiplied and keys divided.

    It acts on the multipliers, and on the biases, which have no multipliers.
    """
    head = _query_head(config)
    query = {f"{module}/query/rows": f"{head} _"} | _bias(config, f"{module}/query", f"{head} _")
    key = {f"{module}/key/rows": "head _"} | _bias(config, f"{module}/key", "head _")
    return go.multiplier_balance(query, key)


def _query_head(config: lm.LMConfig) -> str:
    return "head" if config.heads == config.kv_heads else "(head _)"


def _bias(config: lm.LMConfig, module: str, axes: str) -> dict[str, str]:
    return {f"{module}/layer/bias": axes} if config.bias else {}


def kernel_gauges(config: lm.LMConfig) -> list[go.Gauge]:
    """Gauges that multiply `rows` or `columns` and divide the matrix between them.

    They can take every multiplier to 1 (up to its sign), so that no further gauge of multipliers is needed.
    """
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
    """Gauges that multiply multipliers of one layer and divide those of another. Kernels do not change.

    The layers are values and outputs, the MLP's two layers, and, without rotary embeddings and QK-norm, queries and
    keys.
    """
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
    """AdamW as in GaugeFix-LRM §4.1, under one of the paper's three conditions.

    Args:
      which: "A": weight decay on all multipliers. "B": no decay on multipliers of queries and keys, but
        `go.orbit.gauge_fix` balances them, after every step or every `every` steps. "C": no decay on multipliers of
        queries and keys, and no gauge fixing.
      learning_rate: a number or a schedule.
      gauge: the gauge of queries and keys, `head_gauge(config)`.
      held: keyword arguments of `go.orbit.hold_products` in B, such as {"kind": "cap", "cap": 2.0}. With None, as in
        the paper, the product of the sizes of queries and keys is not controlled.
      **fixing: keyword arguments of `go.orbit.gauge_fix` in B, such as `every=`. With `transport=False`, as in the
        paper, Adam's moments do not move along with the weights.

    Returns:
      The optimizer: gradients are clipped at 1, b2 is 0.95, decay is 0.1 on matrices and 2e-3 on multipliers.
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
