"""Which entries of a leaf make one vector: a neuron, a head, a whole layer, by axes strings.

Named axes count vectors, `_` is what a vector takes up. Here: the binding, and vectors' values, norms and shapes.
Not here: what is done to them. Unlike a gauge's blocks, vectors of two leaves have nothing in common.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import (
    Axes,
    Block,
    BlockSpec,
    bind,
    binding_error,
    block_specs,
    hidden_paths,
    leaves_by_path,
    overlap,
)
from gauge_optax.binding.axes import parse_axes
from gauge_optax.binding.paths import hidden_match, match
from gauge_optax.linalg import real_dtype


class VectorSpec(NamedTuple):
    """One axes string of the user's, with the lengths that are its own."""

    spec: BlockSpec
    sizes: tuple[tuple[str, int], ...]


def vector_specs(name: str, axes: Mapping[str, Axes], sizes: tuple[tuple[str, int], ...]) -> tuple[VectorSpec, ...]:
    """What the user wrote, checked as far as it can be without a tree.

    Args:
      name: of the transformation, for errors.
      axes: path → axes.
      sizes: lengths of axes that shapes do not fix.

    Returns:
      One per axes string.

    Raises:
      ValueError: malformed axes; a name in `sizes` that stands in none.
    """
    if not isinstance(axes, Mapping) or not axes:
        block_specs(name, "axes", axes)  # raises
    specs = [
        spec
        for pattern, value in axes.items()
        # String by string: vectors have no names in common that would have to agree.
        for one in (value if isinstance(value, tuple) and value else (value,))
        for spec in block_specs(name, "axes", {pattern: one})
    ]
    known = {spec: {part.name for part in parse_axes(name, spec.pattern, spec.axes).parts} for spec in specs}
    for axis, _ in sizes:
        if not any(axis in names for names in known.values()):
            raise binding_error(
                name, f"unknown axis in sizes '{axis}'",
                f"named axes: {', '.join(sorted(set().union(*known.values()) - {'_'})) or 'none'}",
                "names that stand in an axes string", f"drop '{axis}' or correct it",
            )  # fmt: skip
    return tuple(VectorSpec(spec, tuple(x for x in sizes if x[0] in known[spec])) for spec in specs)


def vectors(name: str, specs: Sequence[VectorSpec], tree: Any) -> dict[str, list[tuple[Block, str]]]:
    """Leaf path → its blocks of vectors, in the order of `specs`, each with the pattern that it comes from.

    Raises:
      ValueError: no match, a hidden leaf, ranks or lengths that do not fit, an entry in two vectors.
    """
    found: dict[str, list[tuple[Block, str]]] = {}
    for one in specs:
        for block in _bound(name, one, tree):
            known = found.setdefault(block.path, [])
            for other, _ in known:
                if overlap(block, other):
                    raise binding_error(
                        name, f"an entry in two vectors of '{block.path}'", f"\"{other.axes}\" and \"{block.axes}\"",
                        "every entry of a leaf in one vector",
                        "drop one, or select different entries with 'name=3' or 'name=0:4'",
                    )  # fmt: skip
            known.append((block, one.spec.pattern))
    return found


def _bound(name: str, one: VectorSpec, tree: Any) -> list[Block]:
    """The blocks of one axes string, leaf by leaf: a name that two leaves share may have two lengths."""
    spec, leaves = one.spec, leaves_by_path(tree)
    paths = [path for path in leaves if match(name, spec.pattern, path) is not None]
    masked = [p for p in hidden_paths(tree) if (hit := hidden_match(name, spec.pattern, p)) and (hit[1] or not paths)]
    if masked:
        raise binding_error(
            name, f"MaskedNode hides a leaf of '{spec.pattern}'", f"MaskedNode at {', '.join(masked[:3])}",
            "every leaf that is listed",
            "give each partition (optax.partition, optax.masked) its own axes, of the leaves it holds",
        )  # fmt: skip
    trees = [{path: leaves[path]} for path in paths] or [tree]  # without a match it is for `bind` to say so
    bindings = [bind(name, (spec,), one.sizes, leaf) for leaf in trees]
    return [block for binding in bindings for instance in binding.instances for block in instance.blocks]


def update_of(name: str, path: str, tangents: Mapping[str, Any]) -> Any:
    """The update of a leaf.

    Raises:
      ValueError: there is none.
    """
    if path not in tangents:
        raise binding_error(
            name, f"no update for '{path}'", f"a tree with {', '.join(list(tangents)[:3]) or 'no leaves'}",
            "updates of the same structure as params", "pass the updates of the very parameters that are passed",
        )  # fmt: skip
    return tangents[path]


def value(block: Block, leaf: Any) -> jax.Array:
    """What the block selects, as values: one more than is stored under `1+`."""
    view = block.view(jnp.asarray(leaf, real_dtype()))
    return view + 1.0 if block.one_plus else view


def taken(block: Block) -> tuple[int, ...]:
    """The axes of a block's view that one vector takes up."""
    return tuple(k for k, label in enumerate(block.labels) if label == "_")


def entries(block: Block) -> int:
    """Entries of one vector."""
    total = 1
    for n, label in zip(block.view_shape, block.labels, strict=True):
        total *= n if label == "_" else 1
    return total


def norm(block: Block, view: jax.Array) -> jax.Array:
    """Norms of a view's vectors, shaped like the named axes."""
    return jnp.sqrt(jnp.sum(jnp.square(view), taken(block)))


def beside(block: Block, x: Any) -> jax.Array:
    """A number, or one per vector, shaped to the block's view."""
    if jnp.ndim(x) == 0:
        return jnp.asarray(x, real_dtype())
    return x.reshape([1 if label == "_" else n for n, label in zip(block.view_shape, block.labels, strict=True)])


def one_or_all(found: Sequence[Any]) -> Any:
    """What a state keeps of a leaf's blocks: that of the only one, or a tuple."""
    return found[0] if len(found) == 1 else tuple(found)


def each(kept: Any) -> Sequence[Any]:
    """What was kept, block by block."""
    return kept if isinstance(kept, tuple) else (kept,)
