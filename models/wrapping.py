"""Calls layers with another kernel than their own, and wraps every layer of a model at once.

`models.weight_standardization` and `models.multipliers` use this. Each computes its kernel in its own way.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx


def inputs_of(axes: str, kernel: jax.Array) -> tuple[int, ...]:
    """The axes of a kernel that a neuron sums over, which are those called `_` in the axes string."""
    names = axes.split()
    inputs = tuple(k for k, name in enumerate(names) if name == "_")
    if len(names) != kernel.ndim or not inputs:
        raise ValueError(f"axes {axes!r} do not fit a kernel of shape {kernel.shape}")
    return inputs


def called_with(layer: nnx.Module, kernel: jax.Array, *args: Any, **kwargs: Any) -> Any:
    """The layer's output with this kernel in place of its own."""
    graph, state = nnx.split(layer)
    kernel_box: Any = state["kernel"]
    state["kernel"] = kernel_box.replace(kernel)
    return nnx.merge(graph, state)(*args, **kwargs)


def replaced(model: nnx.Module, choose: Callable[[str, Any], nnx.Module | None]) -> None:
    """Replaces modules of a model in place: each by choose(attribute name, module), unless that is None."""
    for module in [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]:
        for name, layer in list(vars(module).items()):
            if isinstance(layer, nnx.Module) and (new := choose(name, layer)) is not None:
                setattr(module, name, new)


def wrapped(model: nnx.Module, axes: Mapping[str, str], wrap: Callable[[nnx.Module, str], nnx.Module]) -> None:
    """Wraps, in place, every layer that has a kernel and whose attribute name is a key of `axes`.

    The values of `axes` are the axes strings of the kernels.
    """
    missing = set(axes)

    def choose(name: str, layer: Any) -> nnx.Module | None:
        if name not in axes or not hasattr(layer, "kernel"):
            return None
        missing.discard(name)
        return wrap(layer, axes[name])

    replaced(model, choose)
    if missing:
        raise ValueError(f"no layer with a kernel is called {', '.join(sorted(missing))}")
