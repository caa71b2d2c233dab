"""Leaves as stacks of matrices, for Muon: the axes that gauges name say which axes are rows, columns and batch.

A rotated leaf has one matrix per head, with the basis on one side. A leaf with a scale gauge has its channels on one
side and its free axes on the other; among several named axes, the channels are the axis called `channel`, or the last.
All other axes count matrices (are batch axes): stacked layers, a named axis between free axes (`_ head _`), an index
(`qkv=0`), and an axis that shares parentheses with a head (`(head _)`, grouped queries).
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from gauge_optax.binding import Block
from gauge_optax.errors import binding_error
from gauge_optax.parts.heads import BASIS, PLANE
from gauge_optax.parts.part import Part
from gauge_optax.parts.sizes import Factor
from gauge_optax.parts.turns import Planes, Rotation

HEAD, TOKEN = "head", "token"
COUNTING = ("layer", "expert")  # names of axes that count matrices where the axes of neurons say what a matrix is


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
      heads: the axis of `split` that counts heads, and the axes of one head's basis or channels; None without heads.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    heads: tuple[int, tuple[int, ...]] | None = None

    def grouped(self, path: str, count: Any) -> "Matrices":
        """Returns the reading with `count` neighbouring heads side by side in one matrix.

        Args:
          path: path of the leaf, for messages.
          count: how many heads; 1 changes nothing, and a leaf without heads is unchanged by any count.

        Raises:
          ValueError: a `count` that does not divide the number of heads.
        """
        if isinstance(count, jax.Array):
            raise binding_error(
                "quotient_muon", "heads_per_matrix is traced", "an array", "a Python integer",
                'write inject_hyperparams(..., static_args=("heads_per_matrix",))',
            )
        if count == 1 or self.heads is None:
            return self
        (at, side), total = self.heads, self.split[self.heads[0]]
        if count < 1 or total % count:
            raise binding_error(
                "quotient_muon", f"heads_per_matrix={count} at '{path}'", f"{total} heads",
                "a divisor of the number of heads", "write heads_per_matrix=1",
            )

        # The axis `at` is split in two: groups of heads count matrices, and the heads of a group extend their side.
        def after(axes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(k + (k > at) for k in axes)

        joined = tuple(sorted((at + 1, *after(side))))
        return Matrices(
            self.shape,
            (*self.split[:at], total // count, count, *self.split[at + 1 :]),
            tuple(tuple(x for k in group for x in ((at, at + 1) if k == at else after((k,)))) for group in self.groups),
            after(self.batch),
            joined if set(side) == set(self.rows) else after(self.rows),
            joined if set(side) == set(self.columns) else after(self.columns),
        )

    @property
    def count(self) -> int:
        """Number of matrices."""
        return math.prod(self.split[k] for k in self.batch)

    @property
    def fan_in(self) -> int:
        """Number of rows of one matrix."""
        return math.prod(self.split[k] for k in self.rows)

    @property
    def fan_out(self) -> int:
        """Number of columns of one matrix."""
        return math.prod(self.split[k] for k in self.columns)

    def view(self, leaf: jax.Array) -> jax.Array:
        """Returns the matrices, (*batch, rows, columns)."""
        order = self.batch + self.rows + self.columns
        batch = tuple(self.split[k] for k in self.batch)
        return leaf.reshape(self.split).transpose(order).reshape((*batch, self.fan_in, self.fan_out))

    def leaf(self, view: jax.Array) -> jax.Array:
        """Returns the leaf from its matrices: the inverse of `view`."""
        order = self.batch + self.rows + self.columns
        back = tuple(order.index(k) for k in range(len(order)))
        return view.reshape(tuple(self.split[k] for k in order)).transpose(back).reshape(self.shape)

    def leaf_axes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the axes of the leaf that hold any of these axes of `split`."""
        return tuple(k for k, group in enumerate(self.groups) if set(group) & set(axes))


def matrix(shape: tuple[int, int]) -> Matrices:
    """Returns the reading of a leaf that is one matrix."""
    return Matrices(shape, shape, ((0,), (1,)), (), (0,), (1,))


@functools.singledispatch
def matrices(part: Part[Any], block: Block) -> tuple[int, Matrices | None] | None:
    """How Muon reads a block of a part as matrices, with a priority: 0 comes before 1 before 2.

    Args:
      part: the part.
      block: one of its blocks.

    Returns:
      None for a part that says nothing of matrices. A reading that is None says that the block is no matrix.
    """
    return None


@matrices.register
def _of_factor(part: Factor, block: Block) -> tuple[int, Matrices | None] | None:
    if PLANE in part.named:
        return None  # the planes' own part answers
    if HEAD in part.named:  # the kernels of QK-norm have one matrix per head
        return 1, channel_matrices(block, part.named)
    return (2, channel_matrices(block, part.named)) if part.down else None


@matrices.register(Rotation)
@matrices.register(Planes)
def _of_heads(part: Any, block: Block) -> tuple[int, Matrices | None]:
    return 0, head_matrices(block)


def matrices_of(parts: Iterable[Part[Any]]) -> dict[str, Matrices]:
    """Returns leaf path → how it is read as matrices.

    Args:
      parts: of a list of gauges on a tree.

    Returns:
      An entry for every leaf that is a matrix to a gauge that binds it, and none for vectors (biases, norms' scales).
    """
    pairs = ((block.path, matrices(part, block)) for part in parts for block in part.blocks)
    answers = [(answer[0], path, answer[1]) for path, answer in pairs if answer is not None]
    read: dict[str, tuple[int, Matrices | None]] = {}
    for priority, path, reading in sorted(answers, key=lambda row: row[0]):
        # Answers come by priority; the first wins. A rotation's bias stays no matrix, even if a scale moves it too,
        # unless that is a scale per head (priority 1).
        first, before = read.setdefault(path, (priority, reading))
        # Of equal answers the one with more matrices wins, whatever the order of the gauges: a norm reads a stack of
        # experts as one matrix, because it cannot name them, where a rescale of their units does.
        finer = priority == first and before is not None and reading is not None and reading.count > before.count
        if finer or (priority == 1 and before is None):
            read[path] = priority, reading
    return {path: reading for path, (_, reading) in read.items() if reading is not None}


def _on_whole_axes(block: Block) -> Block | None:
    """Returns a block that selects whole axes: (k, …, n) on a range becomes (length/n, 1, …, n) on the whole axis.

    In a fused kernel, heads outside the bound range are matrices too. Returns None where n does not divide
    the start of the range or the length of the axis.
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
    """Returns one matrix per head, with the basis on one side; None if the block is no matrix."""
    whole = _on_whole_axes(block)
    if whole is None:
        return None
    labels = whole.split_labels
    # A free part that shares its parentheses with a name counts matrices: `(head _)` are heads of grouped queries.
    counting = {k for group in whole.groups for k in group if any(labels[j] not in ("_", "", BASIS) for j in group)}
    free = [k for k, label in enumerate(labels) if label == "_" and k not in counting]
    return _between(whole, [labels.index(BASIS)], free)


def channel_matrices(block: Block, names: tuple[str, ...]) -> Matrices | None:
    """Returns matrices with channels on one side and free axes on the other; None if the block is no matrix."""
    whole = _on_whole_axes(block)
    if whole is None:
        return None
    labels = whole.split_labels
    free = [k for k, label in enumerate(labels) if label == "_"]
    named = "channel" if "channel" in names else next(reversed(names), None)
    at = None if named is None else labels.index(named)
    # The last free axis is the outputs if there are no channels, or if a named axis between free axes counts matrices.
    if at is None or (named != "channel" and free and free[0] < at < free[-1]):
        return _between(whole, free[-1:], free[:-1])
    return _between(whole, [at], free)


def labelled_matrices(block: Block) -> Matrices | None:
    """Returns matrices as a user's axes describe them; None if they do not leave one side on each of two axes.

    The free parts `_` of one axis of the leaf are the rows, those of a later axis the columns. Everything that has a
    name, or an index, counts matrices.
    """
    whole = _on_whole_axes(block)
    if whole is None:
        return None
    labels = whole.split_labels
    sides = [free for group in whole.groups if (free := [k for k in group if labels[k] == "_"])]
    if len(sides) != 2:
        return None
    made = _between(whole, *sides)
    if made is None or made.heads is None:
        return made
    # The entries of a head stand behind its axis.
    entries = made.rows if made.heads[0] < made.rows[0] else made.columns
    return dataclasses.replace(made, heads=(made.heads[0], entries))


def neuron_matrices(block: Block) -> Matrices | None:
    """Returns a kernel's one matrix, neurons as columns and their inputs `_` as rows; None if the block is no matrix.

    Every name counts neurons (`head neuron` counts them in two axes), except that each layer of a stack and each expert
    has a matrix of its own. An index, as of one part of a fused kernel, counts matrices too.
    """
    whole = _on_whole_axes(block)
    if whole is None:
        return None
    labels = whole.split_labels
    inputs = [k for k, label in enumerate(labels) if label == "_"]
    neurons = [k for k, label in enumerate(labels) if label not in ("_", "", *COUNTING)]
    made = _between(whole, inputs, neurons)
    # The axes say which side is the inputs, so that a leaf may have its outputs first.
    return None if made is None else dataclasses.replace(made, rows=tuple(inputs), columns=tuple(neurons), heads=None)


def _between(block: Block, one: Sequence[int], other: Sequence[int]) -> Matrices | None:
    """Returns matrices with these axes as sides; None if a side is empty, or one axis of the leaf holds both sides."""
    if len({k for k, group in enumerate(block.groups) if set(group) & {*one, *other}}) < 2 or not one or not other:
        return None
    rows, columns = sorted((tuple(one), tuple(other)))
    batch = tuple(k for k in range(len(block.split)) if k not in rows + columns)
    counting = [k for k in batch if block.split_labels[k] == HEAD]
    heads = (counting[0], tuple(one)) if counting else None
    return Matrices(block.shape, block.split, block.groups, batch, rows, columns, heads)


def optax_axes(matrices: Mapping[str, Matrices]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns leaf path → the leaf's axes that hold rows, and those that hold columns; `_between` keeps them apart."""
    return {path: (m.leaf_axes(m.rows), m.leaf_axes(m.columns)) for path, m in matrices.items()}
