"""Learnable multipliers for Flax Linen: `multipliers.Multiplied` again, and as functions of parameters.

A model that is there already, `nn.MultiHeadDotProductAttention` say, is not rebuilt: `multiply` its parameters, train
those of `model.apply({"params": fold(params)}, x)`.

Tree of a wrapped layer, as in NNX: layer/kernel (W̄) and layer/bias as they were, `rows` (r) and `columns` (c).

Here: the wrapper, multipliers put in and folded. Not here: what the tree's symmetries are (`multipliers`).
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
        found: Any = layer.apply({"params": _folded(params)}, *args)
        return found


def multiply(params: Mapping[str, Any], layers: Mapping[str, int]) -> dict[str, Any]:
    """Parameters with multipliers of one on every layer whose name is listed; name → how many axes are summed over.

    Not of scanned layers, whose kernels have an axis more.

    >>> model = nn.MultiHeadDotProductAttention(2)
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 3, 4)))["params"]
    >>> found = multiply(params, {"query": 1, "key": 1, "value": 1, "out": 2})
    >>> found["out"]["columns"].shape, found["out"]["rows"].shape
    ((2, 2), (4,))
    >>> jax.tree.structure(fold(found)) == jax.tree.structure(params)
    True
    """
    missing = set(layers)

    def multiplied(name: str, own: Any) -> Any:
        if not isinstance(own, Mapping):
            return own
        if name not in layers or "kernel" not in own:
            return {key: multiplied(key, x) for key, x in own.items()}
        missing.discard(name)
        kernel, inputs = own["kernel"], layers[name]
        rows, columns = kernel.shape[inputs:], kernel.shape[:inputs]
        if "bias" in own and own["bias"].shape != rows:
            raise ValueError(f"outputs of {name} are {own['bias'].shape} by its bias, {rows} behind {inputs} axes")
        return {"layer": dict(own), "rows": jnp.ones(rows, kernel.dtype), "columns": jnp.ones(columns, kernel.dtype)}

    found: dict[str, Any] = multiplied("", params)
    if missing:
        raise ValueError(f"no layer with a kernel is called {', '.join(sorted(missing))}")
    return found


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
