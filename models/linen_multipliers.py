"""Learnable multipliers for Flax Linen: `multipliers.Multiplied` again, and as functions of parameters.

An existing model, `nn.MultiHeadDotProductAttention` say, need not be rebuilt: `multiply` its parameters, and train them
through `model.apply({"params": fold(params)}, x)`. The tree of a wrapped layer is that of NNX: layer/kernel (W̄) and
layer/bias as they were, `rows` (r) and `columns` (c). Its gauges are in `multipliers`.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp


class Multiplied(nn.Module):
    """A `Dense` or `DenseGeneral` whose call sees rows·kernel·columns.

    Attributes:
      wrapped: any module with a parameter `kernel`, inputs first and outputs last, and no other state.
      inputs: how many axes of the kernel are summed over.
      rows: whether there is one per output, ones at first.
      columns: whether there is one per input, likewise.

    >>> layer = Multiplied(nn.DenseGeneral((2, 3)))
    >>> params = layer.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    >>> params["rows"].shape, params["columns"].shape, params["layer"]["kernel"].shape
    ((2, 3), (4,), (4, 2, 3))
    """

    wrapped: nn.Module
    inputs: int = 1
    rows: bool = True
    columns: bool = True

    @nn.compact
    def __call__(self, *args: Any) -> Any:
        """The layer's, with that kernel."""
        layer = self.wrapped.clone(parent=None)
        params = {"layer": self.param("layer", lambda key: layer.init(key, *args)["params"])}
        kernel = params["layer"]["kernel"]
        for name, shape in (("rows", kernel.shape[self.inputs :]), ("columns", kernel.shape[: self.inputs])):
            if getattr(self, name):
                params[name] = self.param(name, nn.initializers.ones, shape, kernel.dtype)
        outputs: Any = layer.apply({"params": _folded(params)}, *args)
        return outputs


def multiply(params: Mapping[str, Any], layers: Mapping[str, int]) -> dict[str, Any]:
    """Parameters with multipliers of one on every layer whose name is listed; name → how many axes are summed over.

    Not of scanned layers, whose kernels have an axis more.

    >>> model = nn.MultiHeadDotProductAttention(2)
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 3, 4)))["params"]
    >>> tree = multiply(params, {"query": 1, "key": 1, "value": 1, "out": 2})
    >>> tree["out"]["columns"].shape, tree["out"]["rows"].shape
    ((2, 2), (4,))
    >>> jax.tree.structure(fold(tree)) == jax.tree.structure(params)
    True
    """
    missing = set(layers)

    def multiplied(name: str, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        if name not in layers or "kernel" not in tree:
            return {key: multiplied(key, x) for key, x in tree.items()}
        missing.discard(name)
        kernel, inputs = tree["kernel"], layers[name]
        rows, columns = kernel.shape[inputs:], kernel.shape[:inputs]
        if "bias" in tree and tree["bias"].shape != rows:
            raise ValueError(f"outputs of {name} are {tree['bias'].shape} by its bias, {rows} behind {inputs} axes")
        return {"layer": dict(tree), "rows": jnp.ones(rows, kernel.dtype), "columns": jnp.ones(columns, kernel.dtype)}

    tree: dict[str, Any] = multiplied("", params)
    if missing:
        raise ValueError(f"no layer with a kernel is called {', '.join(sorted(missing))}")
    return tree


def fold(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the same model without the wrapper: every kernel multiplied out, the same function.

    >>> layer = Multiplied(nn.Dense(3))
    >>> params = layer.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    >>> params["rows"] = jnp.array([2.0, 3.0, -1.0])
    >>> x = jnp.ones((1, 4))
    >>> bool(jnp.all(nn.Dense(3).apply({"params": fold(params)}, x) == layer.apply({"params": params}, x)))
    True
    """
    if "layer" in params and {"rows", "columns"} & set(params):
        return _folded(params)
    return {name: fold(x) if isinstance(x, Mapping) else x for name, x in params.items()}


def _folded(params: Mapping[str, Any]) -> dict[str, Any]:
    kernel = params["layer"]["kernel"]
    if "rows" in params:
        kernel = kernel * params["rows"]
    if "columns" in params:
        inputs = params["columns"].ndim
        kernel = kernel * jnp.expand_dims(params["columns"], tuple(range(inputs, kernel.ndim)))
    return {**params["layer"], "kernel": kernel}
