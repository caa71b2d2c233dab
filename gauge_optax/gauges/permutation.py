"""Permutation: S_n acting on units, heads or experts, whose order no function depends on.

The hidden units of a layer may be renumbered, if the kernels before and behind them are renumbered alike; so may the
heads of a layer (a key head with all query heads of its group), and experts with their router's outputs. An element
is a list of indices p, and a move picks entries: entry i of the moved leaf is entry p[i] of the leaf.

The group is finite, so that it has no directions. The vertical part of every tangent is zero, and its horizontal part
is the tangent. An optimizer that treats all entries, or all heads, alike does not notice a renumbering: no frame is
read, and `read` and `balance` return the identity; `canonicalize` sorts units and heads. Inside the library the
identity is `None`, which adds nothing to a program and nothing to a state. What needs the gauge is `align`: the element
that takes one set of weights nearest to another solves an assignment problem.

Reference: Ainsworth, Hayase and Srinivasa, Git Re-Basin, Eq. (1) and (2). Deviation: also heads and experts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, group_axes, overlap
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.instance import Arrays, Effect, Instance
from gauge_optax.linalg import real_dtype
from gauge_optax.slice import varies_along

Indices = jax.Array | None
"""An element inside the library: (*shape, size), integers; None for the identity."""


def permutation(
    blocks: Mapping[str, Axes], axis: str | None = None, *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """S_n acting on one named axis: units, heads or experts, which all blocks renumber together.

    Args:
      blocks: path → axes of every leaf that has an entry per unit, head or expert: `{"up/kernel": "_ channel",
        "up/bias": "channel", "down/kernel": "channel _"}`. In grouped-query attention the query heads of one key head
        move together: `{"query": "_ (head _) _", "key": "_ head _", …}`.
      axis: the name of the permuted axis. It may be left out if no other axis is named. Further names index the group,
        as `layer` does for stacked layers: every layer then has a permutation of its own.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

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
    gauge = block_gauge("permutation", Permutation, {"blocks": blocks}, sizes, axis=axis)
    names = group_axes(gauge.name, gauge.specs, ())
    if axis not in names and (axis is not None or len(names) != 1):
        raise binding_error(
            "permutation", "no axis to permute" if axis is None else f"no axis '{axis}'",
            f"named axes: {', '.join(names) or 'none'}", "one named axis, or `axis` with the name of one of them",
            f"write axis={names[-1]!r}" if names else "name the axis of units, heads or experts, as in '_ channel'",
        )  # fmt: skip
    return gauge


@dataclasses.dataclass(frozen=True)
class Permutation(Instance):
    """One instance: a permutation per value of the other named axes.

    Attributes:
      axis: name of the permuted axis.
      size: its length.
    """

    axis: str
    size: int

    effect: ClassVar[Effect] = "permutation"
    composes: ClassVar[bool] = False
    breaks: ClassVar[str] = (
        "a leaf that is not listed, a reader that knows units or heads by their position, or groups of heads that the "
        "axes split in another order, (_ head) for (head _)"
    )

    @classmethod
    def of(
        cls, gauge: str, key: str, named: tuple[str, ...], sizes: Mapping[str, int], blocks: Any, axis: str | None
    ) -> "Permutation":
        """The instance of a binding's blocks."""
        axis = named[0] if axis is None else axis
        others = tuple(name for name in named if name != axis)
        return cls(gauge, key, others, tuple(sizes[name] for name in others), tuple(blocks), axis, sizes[axis])

    def beside(self, others: Sequence[Instance]) -> "Permutation":
        """This instance. Raises ValueError where another gauge rotates, or adds a constant along, the permuted axis."""
        for other in others:
            for block in other.blocks if other.rigid is not None else ():
                for permuted in self.blocks:
                    if overlap(permuted, block) and varies_along(block, (str(other.rigid),), permuted, self.axis):
                        raise binding_error(
                            self.gauge, f"permutes the axis of '{permuted.path}' that {other.gauge} acts on",
                            f"'{permuted.axes}' and '{block.axes}'", "an axis that no other gauge mixes",
                            f"drop one of the two: rotations contain the permutations, and {other.gauge} stays",
                        )  # fmt: skip
        return self

    @property
    def dim(self) -> int:
        return 0

    # The group ----------------------------------------------------------------------------------------

    def identity(self) -> Indices:
        return None

    @staticmethod
    def inverse(e: Indices) -> Indices:
        return None if e is None else jnp.argsort(e, -1).astype(e.dtype)

    @staticmethod
    def compose(a: Indices, b: Indices) -> Indices:
        return b if a is None else a if b is None else jnp.take_along_axis(b, a, -1)  # (θ∘b)∘a

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        """Uniform over all permutations, whatever `scale` is: a finite group has no small moves."""
        return jax.random.permutation(key, self.to_element(None), -1, independent=True)

    def to_element(self, e: Indices) -> jax.Array:
        return jnp.broadcast_to(jnp.arange(self.size, dtype=jnp.int32), (*self.shape, self.size)) if e is None else e

    def algebra(self) -> jax.Array:
        return jnp.zeros((0,), real_dtype())  # there are no elements near the identity

    def exponential(self, coordinates: Any, near: bool = False) -> jax.Array:
        return self.to_element(None)

    # The action ---------------------------------------------------------------------------------------

    def act(self, e: Indices, point: Arrays) -> Arrays:
        if e is None:
            return point
        out = dict(point)
        for block in self.blocks:
            view, kept = block.view(out[block.path]), (*self.named, self.axis)
            ordered = jnp.transpose(e, [kept.index(label) for label in block.labels if label in kept])
            lengths = iter(ordered.shape)
            laid = ordered.reshape([next(lengths) if label in kept else 1 for label in block.labels])
            moved = jnp.take_along_axis(view, laid, block.labels.index(self.axis))
            out[block.path] = block.write(out[block.path], moved)
        return out

    def pull(self, e: Indices, cotangent: Arrays) -> Arrays:
        return self.act(self.inverse(e), cotangent)
