"""Axes strings from the axis names that a tree carries: Linen's and NNX's partitioning names, haliax's axes.

Here: names to places, once, on the boxed tree, since optimizers see bare arrays. Not here: what an axes string means
(`_axes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import jax

from gauge_optax.binding import leaves_by_path
from gauge_optax.binding.paths import binding_error, match, nearest
from gauge_optax.binding.specs import Axes

_NNX = ("out_sharding", "sharding_names", "sharding")  # of a variable's metadata


def axes_by_name(params: Any, blocks: Mapping[str, Mapping[str, str]]) -> dict[str, Axes]:
    """Bindings by the names that a tree's axes have, in place of their positions.

    Args:
      params: the tree with its boxes: Linen's `Partitioned`, `nnx.Variable`s with partitioning names, haliax's
        `NamedArray`s. Of an NNX model, `nnx.state(model)`.
      blocks: path → {name in the tree: part of an axes string}; axes that are not named here are free.

    Returns:
      Path → axes string, as every gauge takes it.

    Raises:
      ValueError: no leaf of a path, leaves without names or with different ones, a name that a leaf does not have.

    >>> import flax.linen as nn
    >>> params = {"up": nn.Partitioned(jnp.ones((2, 3)), ("embed", "mlp")),
    ...           "down": nn.Partitioned(jnp.ones((3, 2)), ("mlp", "embed"))}
    >>> go.axes_by_name(params, {"up": {"mlp": "channel"}, "down": {"mlp": "channel"}})
    {'up': '_ channel', 'down': 'channel _'}
    """
    boxes = leaves_by_path(jax.tree.map(_Named, params, is_leaf=lambda node: _names(node) is not None))
    return {pattern: _axes(pattern, wanted, boxes) for pattern, wanted in blocks.items()}


class _Named:
    """A leaf, or a box as one leaf."""

    def __init__(self, node: Any) -> None:
        self.names = _names(node)
        self.shape = tuple(getattr(node, "shape", ()))


def _names(node: Any) -> tuple[str | None, ...] | None:
    """Names of a box's axes, None for anything that names none."""
    own = getattr(node, "names", None)
    if _is_names(own):
        return own
    axes = getattr(node, "axes", None)
    if isinstance(axes, tuple) and axes and all(hasattr(axis, "name") for axis in axes):
        return tuple(axis.name for axis in axes)
    metadata = node.get_metadata() if hasattr(node, "get_metadata") else {}
    return next((own for own in map(metadata.get, _NNX) if _is_names(own)), None)


def _is_names(own: Any) -> TypeGuard[tuple[str | None, ...]]:
    return isinstance(own, tuple) and bool(own) and all(name is None or isinstance(name, str) for name in own)


def _axes(pattern: str, wanted: Mapping[str, str], boxes: Mapping[str, Any]) -> str:
    hits = {path: box.names for path, box in boxes.items() if match("axes_by_name", pattern, path) is not None}
    if not hits:
        near = nearest(pattern, {path: box.shape for path, box in boxes.items()}, 0)
        raise binding_error(
            "axes_by_name", f"no leaf matches '{pattern}'",
            "nearest " + ", ".join(path for path, _ in near) if near else "no leaves", "a path of a leaf with names",
            f"write '{near[0][1]}'" if near else "pass the parameters with their boxes")
    path, names = next(iter(hits.items()))
    if names is None or any(own != names for own in hits.values()):
        raise binding_error(
            "axes_by_name", f"no names to go by at '{pattern}'", f"{names} at '{path}', of {len(hits)} leaves",
            "one and the same names on every leaf", "pass the boxed tree, or write the axes by position")
    for name in wanted:
        if name not in names:
            raise binding_error(
                "axes_by_name", f"no axis '{name}' at '{path}'", f"axes {', '.join(map(str, names))}",
                "names that the leaf has", f"correct '{name}'")
    return " ".join(wanted.get(name, "_") if name is not None else "_" for name in names)
