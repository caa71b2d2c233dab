"""A leaf as a stack of matrices, read off the axes that its gauges name: what Muon needs to know of it.

A rotated leaf has one matrix per head, its basis on one side. A leaf with a scale gauge has its channels on one side
and its free axes on the other; of several named axes the one called `channel`, or the last, is meant. The others
(stacked layers) count matrices, as does another name between free axes (`_ head _`), an index (`qkv=0`), and what
shares parentheses with a head (`(head _)`, grouped queries).

Here: which axes are which. Not here: what is done with the matrices, which leaves it is done to.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from gauge_optax.binding import Block, binding_error

BASIS, HEAD = "basis", "head"


@dataclasses.dataclass(frozen=True)
class Matrices:
    """How a leaf is read as matrices, (*batch, rows, columns): rows are inputs, columns outputs, in the leaf's order.

    Attributes:
      shape: the leaf's shape.
      split: the shape after groups of axes are split.
      groups: per leaf axis, the axes of `split` it was split into.
      batch: the axes of `split` that count matrices.
      rows: those that are one matrix's rows.
      columns: those that are its columns.
      heads: the axis of `split` that counts heads, and those of one head's own side; None where there are none.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    heads: tuple[int, tuple[int, ...]] | None = None

    def grouped(self, path: str, count: Any) -> "Matrices":
        """The same with `count` neighbouring heads side by side in one matrix.

        Args:
          path: the leaf's, for messages.
          count: how many; 1 changes nothing, nor does any where there are no heads.

        Returns:
          The reading.

        Raises:
          ValueError: heads that cannot be dealt out evenly.
        """
        if isinstance(count, jax.Array):
            raise binding_error(
                "quotient_muon", "heads_per_matrix is traced", "an array", "a Python integer",
                'write inject_hyperparams(..., static_args=("heads_per_matrix",))')
        if count == 1 or self.heads is None:
            return self
        (at, own), total = self.heads, self.split[self.heads[0]]
        if count < 1 or total % count:
            raise binding_error(
                "quotient_muon", f"heads_per_matrix={count} at '{path}'", f"{total} heads",
                "a divisor of the number of heads", "write heads_per_matrix=1")

        def after(axes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(k + (k > at) for k in axes)

        rows, columns = after(self.rows), after(self.columns)
        joined = tuple(sorted((at + 1, *after(own))))
        return Matrices(
            self.shape,
            (*self.split[:at], total // count, count, *self.split[at + 1 :]),
            tuple(tuple(x for k in group for x in ((at, at + 1) if k == at else after((k,)))) for group in self.groups),
            after(self.batch),
            joined if set(after(own)) == set(rows) else rows,
            joined if set(after(own)) == set(columns) else columns,
        )

    @property
    def fan_in(self) -> int:
        """Rows of one matrix."""
        return math.prod(self.split[k] for k in self.rows)

    @property
    def fan_out(self) -> int:
        """Columns of one matrix."""
        return math.prod(self.split[k] for k in self.columns)

    def view(self, leaf: jax.Array) -> jax.Array:
        """The matrices, (*batch, rows, columns)."""
        order = self.batch + self.rows + self.columns
        batch = tuple(self.split[k] for k in self.batch)
        return leaf.reshape(self.split).transpose(order).reshape((*batch, self.fan_in, self.fan_out))

    def leaf(self, view: jax.Array) -> jax.Array:
        """The inverse of `view`."""
        order = self.batch + self.rows + self.columns
        back = tuple(order.index(k) for k in range(len(order)))
        return view.reshape(tuple(self.split[k] for k in order)).transpose(back).reshape(self.shape)

    def leaf_axes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The leaf's own axes that hold any of these axes of `split`."""
        return tuple(k for k, group in enumerate(self.groups) if set(group) & set(axes))


def matrix(shape: tuple[int, int]) -> Matrices:
    """A leaf that is one matrix."""
    return Matrices(shape, shape, ((0,), (1,)), (), (0,), (1,))


def matrices_of(instances: Iterable[Any]) -> dict[str, Matrices]:
    """Leaf path → how it is read as matrices, for leaves that are matrices to the gauges that bind them.

    Args:
      instances: of a list of gauges on a tree.

    Returns:
      Vectors (biases, norms' scales) and leaves that gauges say nothing about are left out.
    """
    ranked: list[list[tuple[str, Matrices | None]]] = [[], [], []]
    for instance in instances:
        for block in instance.blocks:
            if (answer := instance.matrices(block)) is not None:
                ranked[answer[0]].append((block.path, answer[1]))
    read: dict[str, Matrices | None] = {}
    for path, matrices in ranked[0]:  # a bias of a rotation is no matrix, whatever else binds it
        read.setdefault(path, matrices)
    for path, matrices in ranked[1]:  # scales per head
        if read.get(path) is None:
            read[path] = matrices
    for path, matrices in ranked[2]:  # other scales
        read.setdefault(path, matrices)
    return {path: matrices for path, matrices in read.items() if matrices is not None}


def on_whole_axes(block: Block) -> Block | None:
    """A block whose ranges of axes are taken for all of them: (k, …, n) on a range as (length/n, 1, …, n) on the whole.

    Heads of a fused kernel are matrices whether a gauge names them or not. None where the last part does not divide
    what stands before the range, or the axis.
    """
    split, index = list(block.split), list(block.index)
    for axis, (span, group) in enumerate(zip(block.ranges, block.groups, strict=True)):
        if span is None:
            continue
        length, last = block.shape[axis], split[group[-1]] if len(group) > 1 else 1
        if length % last or span[0] % last or any(isinstance(index[k], int) for k in group):
            return None
        for k in group:
            split[k] = last if k == group[-1] else length // last if k == group[0] else 1
            index[k] = ((0, split[k]),)
        if len(group) == 1:
            split[group[0]], index[group[0]] = length, ((0, length),)
    return dataclasses.replace(block, split=tuple(split), index=tuple(index), ranges=(None,) * len(block.shape))


def head_matrices(block: Block) -> Matrices | None:
    """One matrix per head, the basis on one side; None for what is no matrix."""
    whole = on_whole_axes(block)
    if whole is None:
        return None
    block = whole
    labels = block.split_labels
    free = [k for k, label in enumerate(labels) if label == "_" and not _beside_a_name(block, k)]
    return _between(block, [labels.index(BASIS)], free)


def _beside_a_name(block: Block, axis: int) -> bool:
    """Whether an axis shares its parentheses with a named axis other than the basis."""
    labels = block.split_labels
    group = next(g for g in block.groups if axis in g)
    return any(labels[k] not in ("_", "", BASIS) for k in group)


def channel_matrices(block: Block, names: tuple[str, ...]) -> Matrices | None:
    """Channels on one side, free axes on the other; None for what is no matrix."""
    whole = on_whole_axes(block)
    if whole is None:
        return None
    block = whole
    labels = block.split_labels
    free = [k for k, label in enumerate(labels) if label == "_"]
    named = "channel" if "channel" in names else next(reversed(names), None)
    at = None if named is None else labels.index(named)
    if at is None or (named != "channel" and free and free[0] < at < free[-1]):
        return _between(block, free[-1:], free[:-1])
    return _between(block, [at], free)


def _between(block: Block, one: Sequence[int], other: Sequence[int]) -> Matrices | None:
    """Matrices with these axes on their two sides; None where a side has none, or both are parts of one leaf axis."""
    if len({k for k, group in enumerate(block.groups) if set(group) & {*one, *other}}) < 2 or not one or not other:
        return None
    rows, columns = sorted((tuple(one), tuple(other)))
    batch = tuple(k for k in range(len(block.split)) if k not in rows + columns)
    counting = [k for k in batch if block.split_labels[k] == HEAD]
    heads = (counting[0], tuple(one)) if counting else None
    return Matrices(block.shape, block.split, block.groups, batch, rows, columns, heads)


def optax_axes(own: Mapping[str, Matrices]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Leaf path → the leaf's axes that hold rows and columns, which never share one (`_between`)."""
    return {path: (m.leaf_axes(m.rows), m.leaf_axes(m.columns)) for path, m in own.items()}
