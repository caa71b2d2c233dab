"""Permutation: renumbering units, heads or experts, on whose order no function depends.

The hidden units of a layer may be renumbered if all kernels before and behind them are renumbered in the same way. So
may the heads of a layer (a key head with all query heads of its group), and experts with the outputs of their router.
An element is a list of indices p: entry i of the moved leaf is entry p[i] of the leaf.

The group is finite, so that it has no directions: the vertical part of every tangent is zero. An optimizer that applies
one rule to all entries, or to all heads, takes the same steps after a renumbering. Therefore optimizers need no frame
of it, and `read` and `balance` return the identity. The gauge serves `align`, which solves an assignment problem for
the element that brings one set of weights nearest to another, and `canonicalize`, which sorts units and heads.

Reference: Ainsworth, Hayase and Srinivasa, Git Re-Basin, Eq. (1) and (2). Deviation: also heads and experts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Matched, group_axes
from gauge_optax.errors import binding_error
from gauge_optax.gauges.copies import Compact, Effect, part_label
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.linalg import real_dtype
from gauge_optax.parts.permutation import Permutation, Renumbering


def permutation(
    blocks: Mapping[str, Axes], axis: str | None = None, *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """A permutation of one named axis: units, heads or experts, which all blocks renumber together.

    Args:
      blocks: path → axes of every leaf that has an entry per unit, head or expert: `{"up/kernel": "_ channel",
        "up/bias": "channel", "down/kernel": "channel _"}`. In grouped-query attention the query heads of one key head
        move together: `{"query": "_ (head _) _", "key": "_ head _", …}`.
      axis: the name of the permuted axis. It may be left out if no other axis is named. Every index of another named
        axis has a permutation of its own: every layer, for example, if stacked layers have the axis `layer`.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are integers, `(*other named axes, n)`: entry i of the moved
      leaf is entry element[i] of the leaf.

    Raises:
      ValueError: malformed axes, several named axes without `axis`, at once; any mismatch with the tree, when it is
        first seen.

    >>> gauge = go.permutation({"up": "_ channel", "down": "channel _"})
    >>> down = jnp.array([[4.0], [5.0], [6.0]])
    >>> params = {"up": jnp.array([[1.0, 2.0, 3.0]]), "down": down}
    >>> moved = gauge.act({"": jnp.array([2, 0, 1])}, params)
    >>> moved["up"].tolist(), moved["down"].tolist()
    ([[3.0, 1.0, 2.0]], [[6.0], [4.0], [5.0]])

    Reference: Git Re-Basin, §2. Not a symmetry where an axis is read by position, as the channels of rotary planes are.
      A product with another gauge has no `inverse` and no `compose`, because a permutation renumbers the elements of
      gauges that have one per unit or head.
    """
    gauge = block_gauge("permutation", Order, {"blocks": blocks}, sizes, axis=axis)
    names = group_axes(gauge.name, gauge.specs, ())
    if axis not in names and (axis is not None or len(names) != 1):
        raise binding_error(
            "permutation", "no axis to permute" if axis is None else f"no axis '{axis}'",
            f"named axes: {', '.join(names) or 'none'}", "one named axis, or `axis` with the name of one of them",
            f"write axis={names[-1]!r}" if names else "name the axis of units, heads or experts, as in '_ channel'",
        )
    return gauge


@dataclasses.dataclass(frozen=True)
class Order(Renumbering, Compact):
    """One copy. An element is a list of indices per index of the other named axes, (*shape, n)."""

    parts: tuple[Permutation]

    effect: ClassVar[Effect] = "permutation"
    composes: ClassVar[bool] = False
    breaks: ClassVar[str] = (
        "a leaf that is not listed, a reader that knows units or heads by their position, or groups of heads that the "
        "axes split in another order, (_ head) for (head _)"
    )

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "Order":
        axis = options.get("axis") or found.named[0]
        others = found._replace(named=tuple(name for name in found.named if name != axis))
        name, size = part_label(found, axis=axis), found.sizes[axis]
        return cls(found.key, (Permutation(name, others.named, others.shape, found.blocks, axis, size),))

    @property
    def dim(self) -> int:
        return 0

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        """A random permutation, uniform over all, whatever `scale` is: a finite group has no small moves."""
        return jax.random.permutation(key, self.identity(), -1, independent=True)

    def join(self, elements: Sequence[Any]) -> jax.Array:
        size = self.parts[0].size
        still = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (*self.shape, size))
        return still if elements[0] is None else elements[0]

    def algebra(self) -> jax.Array:
        return jnp.zeros((0,), real_dtype())  # there are no elements near the identity

    def exponential(self, coordinates: Any, near: bool = False) -> jax.Array:
        return self.identity()

