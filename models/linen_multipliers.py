"""Learnable multipliers for Flax Linen, as `models.multipliers` has them for NNX: as a module, and as two functions.

Multipliers are numbers that multiply the rows and columns of a kernel. The module is `Multiplied`. With the functions,
the code of an existing model, such as `nn.MultiHeadDotProductAttention`, stays as it is: `multiply` adds multipliers to
its parameters, and the loss calls `model.apply({"params": fold(params)}, x)`. The tree of a layer with multipliers is
the same as under NNX: layer/kernel and layer/bias as before, and the new leaves `rows` and `columns`. The gauges are
those of `models.multipliers`.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp


class Multiplied(nn.Module):
    """Calls a `Dense` or `DenseGeneral` with the kernel rows·kernel·columns in place of its own.

    Attributes:
      wrapped: any module with a parameter `kernel`, inputs first and outputs last, and no other state.
      inputs: how many axes of the kernel are summed over.
      rows: whether there are `rows`, one multiplier per output. They start as ones.
      columns: whether there are `columns`, one multiplier per input. They start as ones.

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
        """The output of the wrapped layer, computed with the multiplied kernel."""
        layer = self.wrapped.clone(parent=None)
        params = {"layer": self.param("layer", lambda key: layer.init(key, *args)["params"])}
        kernel = params["layer"]["kernel"]
        for name, shape in (("rows", kernel.shape[self.inputs :]), ("columns", kernel.shape[: self.inputs])):
            if getattr(self, name):
                params[name] = self.param(name, nn.initializers.ones, shape, kernel.dtype)
        outputs: Any = layer.apply({"params": _folded(params)}, *args)
        return outputs


def multiply(params: Mapping[str, Any], layers: Mapping[str, int]) -> dict[str, Any]:
    """Adds multipliers, which start as ones, to the parameters of every layer whose name is a key of `layers`.

    The values of `layers` say how many axes of the layer's kernel are summed over. Scanned layers are not possible,
    because their kernels have a layer axis in front.

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
    """Removes multipliers: multiplies them into the kernels. Returns parameters of the layers without wrapper.

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
