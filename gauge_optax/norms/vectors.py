"""Axes strings that say which entries of a leaf form one weight vector (a neuron, a head, a whole layer).

Named axes count vectors, and `_` marks the axes that one vector spans. An axis name may have different lengths in two
leaves, unlike in the blocks of a gauge: vectors of two leaves have nothing in common.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import (
    Axes,
    Block,
    BlockSpec,
    bind,
    block_specs,
    frozen_sizes,
    hidden_match,
    leaves_by_path,
    match,
    overlap,
    shown_and_hidden,
)
from gauge_optax.binding.axes import parse_axes
from gauge_optax.errors import binding_error
from gauge_optax.linalg import real_dtype
from gauge_optax.transformation import in_dtype_of

Leaves = Mapping[str, Any]
"""Leaves by path."""

Specs = tuple[tuple[BlockSpec, tuple[tuple[str, int], ...]], ...]
"""Per axes string that the user wrote: the parsed string, and the user's `sizes` of the axis names in it."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """All vectors that one axes string selects from one leaf.

    Attributes:
      block: the leaf, and where in it the vectors are stored.
      pattern: the path pattern that matched the leaf.
      axes: the axes of `view` that one vector spans.
      length: the number of entries of one vector.
    """

    block: Block
    pattern: str
    axes: tuple[int, ...]
    length: int

    def view(self, leaves: Leaves) -> jax.Array:
        """Returns the selected entries of updates or gradients, in the computing dtype."""
        return self.block.view(jnp.asarray(leaves[self.block.path], real_dtype()))

    def value(self, leaves: Leaves) -> jax.Array:
        """Returns the selected weights: the stored numbers, plus 1 if the axes string begins with `1+`."""
        return self.view(leaves) + 1.0 if self.block.one_plus else self.view(leaves)

    def norm(self, leaves: Leaves) -> jax.Array:
        """Returns the norm of every vector, shaped like the named axes."""
        return jnp.sqrt(jnp.sum(jnp.square(self.value(leaves)), self.axes))

    def spread(self, x: Any) -> jax.Array:
        """Reshapes an array with one number per vector to broadcast against `view`; a scalar stays a scalar."""
        shape = [1 if k in self.axes else n for k, n in enumerate(self.block.view_shape)]
        return x.reshape(shape) if jnp.ndim(x) else jnp.asarray(x, real_dtype())


def parse(name: str, axes: Mapping[str, Axes], sizes: Mapping[str, int] | None) -> Specs:
    """Parses the user's axes strings and checks them as far as possible without a tree.

    Args:
      name: name of the transformation, for errors.
      axes: path → axes string, or a tuple of them for ranges of a leaf.
      sizes: axis name → length, for axes whose lengths do not follow from a leaf's shape; None for {}.

    Returns:
      Per axes string: the parsed string, and the entries of `sizes` that it contains.

    Raises:
      ValueError: malformed axes; a name in `sizes` that no axes string contains.
    """
    if not isinstance(axes, Mapping) or not axes:
        block_specs(name, "axes", axes)  # raises
    specs = [
        spec
        for pattern, strings in axes.items()
        # One string at a time, because `block_specs` requires that all strings of a call have the same names.
        for string in (strings if isinstance(strings, tuple) and strings else (strings,))
        for spec in block_specs(name, "axes", {pattern: string})
    ]
    names = {spec: {part.name for part in parse_axes(name, spec.pattern, spec.axes).items} for spec in specs}
    lengths = frozen_sizes(name, sizes)
    for axis, _ in lengths:
        if not any(axis in names[spec] for spec in specs):
            raise binding_error(
                name, f"unknown axis in sizes '{axis}'",
                f"named axes: {', '.join(sorted(set().union(*names.values()) - {'_'})) or 'none'}",
                "names that stand in an axes string", f"drop '{axis}' or correct it",
            )
    return tuple((spec, tuple(size for size in lengths if size[0] in names[spec])) for spec in specs)


def resolve(name: str, specs: Specs, tree: Any) -> list[Selection]:
    """Resolves axes strings on a tree.

    Args:
      name: name of the transformation, for errors.
      specs: the result of `parse`.
      tree: the parameters.

    Returns:
      One selection per axes string and leaf that it matches. The selections of one leaf are adjacent, in the order of
      `specs`.

    Raises:
      ValueError: an axes string that matches no leaf; a leaf that `optax.MaskedNode` hides; ranks or lengths that do
        not fit; an entry in two vectors.
    """
    leaves, hidden = shown_and_hidden(tree)
    by_path: dict[str, list[Selection]] = {}
    for spec, sizes in specs:
        paths = [path for path in leaves if match(name, spec.pattern, path) is not None]
        # A hidden subtree that may or may not contain a leaf of the pattern counts only if no other leaf matches.
        hits = [(path, hit) for path in hidden if (hit := hidden_match(name, spec.pattern, path)) is not None]
        masked = [path for path, (_, certain) in hits if certain or not paths]
        if masked:
            raise binding_error(
                name, f"MaskedNode hides a leaf of '{spec.pattern}'", f"MaskedNode at {', '.join(masked[:3])}",
                "every leaf that is listed",
                "give each partition (optax.partition, optax.masked) its own axes, of the leaves it holds",
            )
        # Leaf by leaf, because a name that two leaves share may have two lengths. Without a match, `bind` gets the
        # whole tree and raises.
        trees = [{path: leaves[path]} for path in paths] or [tree]
        copies = [copy for part in trees for copy in bind(name, (spec,), sizes, part)]
        for block in (block for copy in copies for block in copy.blocks):
            on_leaf = by_path.setdefault(block.path, [])
            for other in on_leaf:
                if overlap(block, other.block):
                    raise binding_error(
                        name, f"an entry in two vectors of '{block.path}'",
                        f"\"{other.block.axes}\" and \"{block.axes}\"", "every entry of a leaf in one vector",
                        "drop one, or select different entries with 'name=3' or 'name=0:4'",
                    )
            axes = tuple(k for k, label in enumerate(block.labels) if label == "_")
            length = math.prod(block.view_shape[k] for k in axes)
            on_leaf.append(Selection(block, spec.pattern, axes, length))
    return [selection for on_leaf in by_path.values() for selection in on_leaf]


def updates_by_path(name: str, selections: Sequence[Selection], updates: Any) -> dict[str, Any]:
    """Returns path → leaf of updates.

    Raises:
      ValueError: a selected leaf has no update.
    """
    leaves = leaves_by_path(updates)
    for selection in selections:
        if selection.block.path not in leaves:
            raise binding_error(
                name, f"no update for '{selection.block.path}'",
                f"a tree with {', '.join(list(leaves)[:3]) or 'no leaves'}",
                "updates of the same structure as params", "pass the updates of the very parameters that are passed",
            )
    return leaves


def replace(updates: Any, selections: Sequence[Selection], views: Sequence[jax.Array]) -> Any:
    """Returns updates with the entries of all selections replaced, every leaf in its dtype."""
    leaves, changed = leaves_by_path(updates), dict[str, jax.Array]()
    for selection, view in zip(selections, views, strict=True):
        path = selection.block.path
        leaf = changed.get(path, jnp.asarray(leaves[path], real_dtype()))
        changed[path] = selection.block.write(leaf, view)
    return in_dtype_of(updates, changed)


def by_axes(selections: Sequence[Selection], arrays: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Returns leaf path → axes string → array, from one array per selection."""
    kept: dict[str, dict[str, Any]] = {}
    for selection, array in zip(selections, arrays, strict=True):
        kept.setdefault(selection.block.path, {})[selection.block.axes] = array
    return kept


def arrays_of(selections: Sequence[Selection], kept: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Returns one array per selection, from the result of `by_axes`."""
    return [kept[selection.block.path][selection.block.axes] for selection in selections]


def require_same(name: str, selections: Sequence[Selection], length: Any) -> None:
    """Raises ValueError if a state was made for other vectors.

    It compares axes strings too, because the shapes of a square kernel's arrays cannot tell rows from columns.
    """

    def text(kept: Any) -> str:
        rows = [f'"{path}" as "{axes}" {shape}' for path, by_axes in kept.items() for axes, shape in by_axes.items()]
        return ", ".join(rows) or "no vectors"

    named = [tuple(selection.block.view_shape[k] for k in range(len(selection.block.view_shape))
                   if k not in selection.axes) for selection in selections]
    expected = by_axes(selections, named)
    by_path = isinstance(length, Mapping) and all(isinstance(by_axes, Mapping) for by_axes in length.values())
    found = {p: {axes: jnp.shape(x) for axes, x in by_axes.items()} for p, by_axes in length.items()} if by_path else {}
    if found != expected:
        path = next((p for p in {**expected, **found} if found.get(p) != expected.get(p)), "")
        raise binding_error(
            name, f"a state that was made for other vectors, at '{path}'", text({path: found.get(path, {})}),
            text({path: expected.get(path, {})}),
            "write state = tx.init(params), or give the axes that it was made with",
        )
