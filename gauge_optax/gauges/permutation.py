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
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Axes, Block, group_axes, overlap
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.instance import Arrays, Effect, Instance, apart_from
from gauge_optax.linalg import matmul, real_dtype, safe_divide, transpose
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

    def carried(self, e: Indices, other: Instance, value: Any) -> Any:
        """g·h·g⁻¹ for an element h of another instance: h with its units or heads renumbered.

        Args:
          e: an element of this instance, g.
          other: the other instance.
          value: h; the leading axes of its arrays are `other.shape`.
        """
        if e is None or value is None or not other.shape:
            return value
        count = math.prod(other.shape)
        numbers = jnp.arange(count, dtype=jnp.int32)
        for block in other.blocks:
            if not any(overlap(block, permuted) for permuted in self.blocks):
                continue
            # A leaf of channel numbers, moved like the weights, shows where each channel comes from.
            field = jnp.broadcast_to(block.spread(other.named, numbers.reshape(other.shape)), block.shape)
            same_leaf = tuple(permuted for permuted in self.blocks if permuted.path == block.path)
            moved = dataclasses.replace(self, blocks=same_leaf).act(e, {block.path: field})[block.path]
            kept = [label for label in block.row_labels if label in other.named]
            first = block.rows(moved)[tuple(slice(None) if x in kept else 0 for x in block.row_labels)]
            source = jnp.transpose(first, [kept.index(name) for name in other.named]).ravel()
            if not bool(jnp.all(source == numbers)):
                return jax.tree.map(functools.partial(_gathered, source), value)
        return value

    def sorting(self, point: Arrays) -> Indices:
        """Units by the sum of the cubes of their entries, descending: no other move of a canonical point changes it.

        Sums of squares would not do, because the slice makes them equal.
        """
        sizes = sum((self._total(block, jnp.abs(point[block.path]) ** 3) for block in self.blocks), 0.0)
        return self.inverse(jnp.argsort(-jnp.asarray(sizes), -1).astype(jnp.int32))

    # Alignment ----------------------------------------------------------------------------------------

    def nearest(self, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> jax.Array:
        """See `Instance`. Heads are compared after the rotation, among `others`, that suits each pair of them best."""
        inside = [other for other in others if self.renumbers(other)]
        outside = [other for other in others if other not in inside]
        blocks = apart_from(self.blocks, outside)
        plain = [block for block in blocks if not any(overlap(block, x) for other in inside for x in other.blocks)]
        gains = jnp.zeros((*self.shape, self.size, self.size), real_dtype())
        for block in plain:
            gains = gains + matmul(self._rows(block, target), transpose(self._rows(block, point)))
        turned = [block for block in blocks if block not in plain]
        if turned:
            gains = gains + self._gains_after(inside, outside, turned, target, point)
        return self._assigned(gains)

    def _gains_after(
        self,
        inside: Sequence[Instance],
        outside: Sequence[Instance],
        blocks: Sequence[Block],
        target: Arrays,
        point: Arrays,
    ) -> jax.Array:
        """Inner products of all pairs, each after the moves of `inside` that take the one nearest to the other."""
        numbers, columns = np.arange(self.size), []
        for offset in range(self.size):  # every unit of the target beside the one that stands `offset` places on
            turn = jnp.broadcast_to(jnp.asarray(np.roll(numbers, -offset), jnp.int32), (*self.shape, self.size))
            moved = self.act(turn, point)
            for other in inside:
                moved = other.act(other.nearest(target, moved, outside), moved)
            columns.append(sum(self._total(block, target[block.path] * moved[block.path]) for block in blocks))
        gains = jnp.stack(columns, -1)  # (…, unit of the target, offset)
        order = (numbers[None, :] - numbers[:, None]) % self.size
        return jnp.take_along_axis(gains, jnp.broadcast_to(jnp.asarray(order), gains.shape), -1)

    def _assigned(self, gains: jax.Array) -> jax.Array:
        """The permutation with the largest sum of gains, (*shape, unit of the target, unit of the point)."""
        from scipy.optimize import linear_sum_assignment  # a quarter of a second, which only this needs

        tables = np.asarray(gains, np.float64).reshape(-1, self.size, self.size)
        chosen = [linear_sum_assignment(table, maximize=True)[1] for table in tables]
        return jnp.asarray(np.stack(chosen), jnp.int32).reshape(*self.shape, self.size)

    def renumbers(self, other: Instance) -> bool:
        return any(
            overlap(permuted, block) and varies_along(block, other.named, permuted, self.axis)
            for permuted in self.blocks for block in other.blocks
        )  # fmt: skip

    def _rows(self, block: Block, point: Arrays) -> jax.Array:
        """A block with one row per unit, (*shape, size, entries)."""
        view, kept = block.view(point[block.path]), (*self.named, self.axis)
        free = [k for k, label in enumerate(block.labels) if label not in kept]
        return view.transpose([*(block.labels.index(name) for name in kept), *free]).reshape(*self.shape, self.size, -1)

    def _total(self, block: Block, leaf: jax.Array) -> jax.Array:
        return block.total((*self.named, self.axis), leaf)

    def responses(self, point: Arrays, gradient: Arrays) -> jax.Array:
        products = [self._total(block, point[block.path] * gradient[block.path]) for block in self.blocks]
        return jnp.stack(products, -1)

    def matched(self, target: jax.Array, point: jax.Array) -> jax.Array:
        rows = [safe_divide(x, jnp.sqrt(jnp.sum(jnp.square(x), -1, keepdims=True))) for x in (target, point)]
        return self._assigned(matmul(rows[0], transpose(rows[1])))


def _gathered(source: jax.Array, array: jax.Array) -> jax.Array:
    """An array whose leading axes count channels, with channel source[i] in place of channel i."""
    shape, leading = array.shape, 0
    while math.prod(shape[:leading]) < len(source):
        leading += 1
    return array.reshape(len(source), *shape[leading:])[source].reshape(shape)
