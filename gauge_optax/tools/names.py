"""Writes axes strings from the axis names that a tree carries: Linen's and NNX's partitioning names, haliax's axes.

This must happen once, on the model's own tree, where a box (an object such as Linen's `Partitioned`) holds each array
and the names of its axes. The bare arrays that an optimizer sees have no axis names.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import jax

from gauge_optax.binding.leaves import leaves_by_path
from gauge_optax.binding.paths import match, no_match
from gauge_optax.binding.specs import Axes
from gauge_optax.errors import binding_error, counted

_NNX_METADATA = ("out_sharding", "sharding_names", "sharding")  # the key of axis names in several versions of NNX


def axes_by_name(params: Any, blocks: Mapping[str, Mapping[str, str]]) -> dict[str, Axes]:
    """Makes axes strings for gauges from the axis names that a tree carries, so that you need not know positions.

    Args:
      params: the tree with its boxes: Linen's `Partitioned`, `nnx.Variable`s with partitioning names, haliax's
        `NamedArray`s. For an NNX model, pass `nnx.state(model)`.
      blocks: path pattern → {axis name in the tree: word of the axes string}. Other axes of the leaf become free (`_`).

    Returns:
      Path pattern → axes string, as every gauge takes it.

    Raises:
      ValueError: `blocks` of another form; a pattern that matches no leaf; leaves of one pattern without names or with
        different names; a name that no axis of a leaf has, or two axes.

    >>> import flax.linen as nn
    >>> params = {"up": nn.Partitioned(jnp.ones((2, 3)), ("embed", "mlp")),
    ...           "down": nn.Partitioned(jnp.ones((3, 2)), ("mlp", "embed"))}
    >>> names = {"up": {"mlp": "channel"}, "down": {"mlp": "channel"}}
    >>> go.tools.axes_by_name(params, names)
    {'up': '_ channel', 'down': 'channel _'}
    """

    parted = isinstance(blocks, Mapping) and all(isinstance(parts, Mapping) for parts in blocks.values())
    if not parted or not all(isinstance(word, str) for parts in blocks.values() for word in parts.values()):
        raise binding_error(
            "axes_by_name", "bad 'blocks'", repr(blocks)[:60], "path pattern → {axis name: word of the axes string}",
            "write {'up': {'mlp': 'channel'}}")

    def unboxed(node: Any) -> types.SimpleNamespace:
        # A SimpleNamespace is one leaf for JAX. A tuple of names would become a subtree.
        return types.SimpleNamespace(names=_axis_names(node), shape=tuple(getattr(node, "shape", ())))

    leaves = leaves_by_path(jax.tree.map(unboxed, params, is_leaf=lambda node: _axis_names(node) is not None))
    out: dict[str, Axes] = {}
    for pattern, parts in blocks.items():
        names_by_path = {p: leaf.names for p, leaf in leaves.items() if match("axes_by_name", pattern, p) is not None}
        if not names_by_path:
            shapes = {path: leaf.shape for path, leaf in leaves.items()}
            raise no_match("axes_by_name", pattern, shapes, len(parts), "the path of a leaf that has axis names")
        path, names = next(iter(names_by_path.items()))
        if names is None or any(others != names for others in names_by_path.values()):
            raise binding_error(
                "axes_by_name", f"no common axis names at '{pattern}'",
                f"{names} at '{path}', the first of {counted(len(names_by_path), 'leaf', 'leaves')}",
                "the same names on every leaf that matches", "pass the boxed tree, or write the axes by position")
        for name in parts:
            if names.count(name) != 1:
                raise binding_error(
                    "axes_by_name", f"{'two axes' if name in names else 'no axis'} '{name}' at '{path}'",
                    f"axes {', '.join(map(str, names))}", "a name that one axis of the leaf has",
                    "write the axes string by position" if name in names else f"correct '{name}'")
        out[pattern] = " ".join("_" if name is None else parts.get(name, "_") for name in names)
    return out


def _axis_names(node: Any) -> tuple[str | None, ...] | None:
    """The axis names of a box, with None for an axis without a name; None if the node is no box with axis names."""
    axes = getattr(node, "axes", None)
    metadata = node.get_metadata() if hasattr(node, "get_metadata") else {}
    candidates = (
        getattr(node, "names", None),  # Linen
        tuple(getattr(axis, "name", ...) for axis in axes) if isinstance(axes, tuple) else None,  # haliax
        *map(metadata.get, _NNX_METADATA),
    )
    for names in candidates:
        if isinstance(names, tuple) and names and all(name is None or isinstance(name, str) for name in names):
            return names
    return None
