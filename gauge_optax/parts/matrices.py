"""Leaves as stacks of matrices, for Muon: the axes that gauges name say which axes are rows, columns and batch.

A leaf that a rotation acts on has one matrix per head, with the basis on one side and free axes (`_`) on the other. A
leaf that a scale acts on has its channels on one side and its free axes on the other; among several named axes, the
channels are the axis called `channel`, or the last. All other axes count matrices (are batch axes): stacked layers, a
named axis between free axes (`_ head _`), an index (`qkv=0`), and the free axis of grouped queries, which shares
parentheses with a head (`(head _)`) or is an axis that keys and values lack (`_ head _ basis`).

A fused kernel may hold several matrices of unequal widths side by side. Gauges then bind ranges of it,
`(head basis)=0:32` or `channel=0:12`. Each range is read by itself, as if it were a leaf of its own. A range within a
head (`head basis=0:4`, the rotary part of a head) does not divide the leaf: the head is read as one matrix.

The *reading* of a leaf says how it is read as matrices: a `Matrices`, or a `Fused` with one `Matrices` per range.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from gauge_optax.binding import Block
from gauge_optax.binding.axes import Ranges
from gauge_optax.errors import binding_error
from gauge_optax.parts.heads import BASIS, PLANE, HeadTurn
from gauge_optax.parts.part import Part, blocks_by_path
from gauge_optax.parts.sizes import CHANNEL, COUNTING, DIVIDED, HEAD, Factor

TOKEN = "token"


@dataclasses.dataclass(frozen=True)
class Matrices:
    """How a leaf, or a range of it, is read as matrices, (*batch, rows, columns).

    Rows count as inputs, columns as outputs. A scale says which axes these are: its channels are the outputs of leaves
    that it multiplies, and the inputs of leaves that it divides. A rotation does not say it: then the rows are the side
    that comes first in the leaf.

    Attributes:
      shape: the leaf's shape.
      split: the shape after groups of axes, such as `(head basis)`, are split; for a range, the shape of the range.
      groups: per leaf axis, the axes of `split` it was split into.
      batch: the axes of `split` that count matrices.
      rows: the axes of `split` that one matrix has as rows.
      columns: the axes of `split` that one matrix has as columns.
      heads: two groups of axes of `split`: those that count heads (two for the grouped queries `(head _)`), and those
        that have the basis or the channels of one head; None without heads.
      block: the range; None for a whole leaf.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    heads: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    block: Block | None = None

    @property
    def pieces(self) -> "tuple[Matrices, ...]":
        """One `Matrices` per range of the leaf, see `Fused`. A leaf that is read as a whole has this one alone."""
        return (self,)

    def grouped(self, path: str, count: Any) -> "Matrices":
        """Returns the reading with `count` neighbouring heads side by side in one matrix.

        Args:
          path: path of the leaf, for messages.
          count: how many heads, a Python integer. With 1, or for a leaf without heads, the reading stays as it is.

        Raises:
          ValueError: no integer; a `count` that does not divide the number of heads, or the heads of a group.
        """
        if not isinstance(count, int | np.integer):
            traced = isinstance(count, jax.Array)
            raise binding_error(
                "quotient_muon", f"heads_per_matrix is {'traced' if traced else 'no integer'}",
                "an array" if traced else repr(count), "a Python integer",
                'write inject_hyperparams(..., static_args=("heads_per_matrix",))' if traced
                else "write heads_per_matrix=2",
            )
        if count == 1 or self.heads is None:
            return self
        axes, side = self.heads
        total, left, joined = math.prod(self.split[k] for k in axes), int(count), list[int]()
        at, inside = axes[-1], 1
        for at in reversed(axes):  # the last axis has the nearest neighbours
            inside = math.gcd(left, self.split[at])
            left //= inside
            if inside < self.split[at] or left == 1:
                break
            joined.append(at)
        if count < 1 or left > 1:
            lengths = " × ".join(str(self.split[k]) for k in axes)
            raise binding_error(
                "quotient_muon", f"heads_per_matrix={count} at '{path}'", f"{lengths} head{'s' * (lengths != '1')}",
                f"a divisor of the number of heads, {total}" + (
                    ", that fills groups of queries, or parts of one, evenly" if len(axes) > 1 else ""),
                "write heads_per_matrix=1",
            )

        # The axis `at` is split in two: one that counts matrices, and the heads of a matrix, which become part of the
        # side that has one head's entries. So do the axes behind it.
        def after(axes: Iterable[int]) -> tuple[int, ...]:
            return tuple(k + (k > at) for k in axes)

        of_matrix = tuple(sorted((at + 1, *after((*side, *joined)))))
        return Matrices(
            self.shape,
            (*self.split[:at], self.split[at] // inside, inside, *self.split[at + 1 :]),
            tuple(tuple(x for k in group for x in ((at, at + 1) if k == at else after((k,)))) for group in self.groups),
            after(k for k in self.batch if k not in joined),
            of_matrix if set(side) == set(self.rows) else after(self.rows),
            of_matrix if set(side) == set(self.columns) else after(self.columns),
            block=self.block,
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

    @property
    def text(self) -> str:
        """How many matrices of which shape, as in `4 × (8, 3)`."""
        return f"{self.count} × ({self.fan_in}, {self.fan_out})"

    def view(self, leaf: jax.Array) -> jax.Array:
        """Returns the matrices, (*batch, rows, columns)."""
        order = self.batch + self.rows + self.columns
        batch = tuple(self.split[k] for k in self.batch)
        entries = leaf if self.block is None else self.block.view(leaf)
        return entries.reshape(self.split).transpose(order).reshape((*batch, self.fan_in, self.fan_out))

    def leaf(self, view: jax.Array) -> jax.Array:
        """Returns a whole leaf from its matrices: the inverse of `view`."""
        return self._entries(view).reshape(self.shape)

    def write(self, leaf: jax.Array, view: jax.Array) -> jax.Array:
        """Returns a leaf with these matrices in place of its own, in the leaf's dtype."""
        return self.leaf(view).astype(leaf.dtype) if self.block is None else self.block.write(leaf, self._entries(view))

    def _entries(self, view: jax.Array) -> jax.Array:
        order = self.batch + self.rows + self.columns
        back = tuple(order.index(k) for k in range(len(order)))
        return view.reshape(tuple(self.split[k] for k in order)).transpose(back)

    def leaf_axes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the axes of the leaf that hold any of these axes of `split`."""
        return tuple(k for k, group in enumerate(self.groups) if set(group) & set(axes))


@dataclasses.dataclass(frozen=True)
class Fused:
    """How a leaf is read if gauges bind several ranges of it, each with matrices of its own.

    Attributes:
      pieces: the readings of the ranges, which share no entry. Entries outside of all ranges are in no matrix, because
        no gauge says how to read them.
    """

    pieces: tuple[Matrices, ...]

    def grouped(self, path: str, count: Any) -> "Fused":
        """See `Matrices.grouped`."""
        return Fused(tuple(piece.grouped(path, count) for piece in self.pieces))

    @property
    def text(self) -> str:
        """How many matrices of which shape each range has, as in `1 × (8, 12) + 1 × (8, 3)`."""
        return " + ".join(piece.text for piece in self.pieces)


Reading: TypeAlias = Matrices | Fused


def uncovered(reading: Reading, shape: Sequence[int]) -> int:
    """Returns the number of a leaf's entries that are in no matrix."""
    return math.prod(shape) - sum(math.prod(piece.split) for piece in reading.pieces)


def matrix(shape: tuple[int, int]) -> Matrices:
    """Returns the reading of a leaf that is one matrix.

    >>> from gauge_optax.parts.matrices import matrix
    >>> matrix((8, 12)).text
    '1 × (8, 12)'
    """
    return Matrices(shape, shape, ((0,), (1,)), (), (0,), (1,))


@functools.singledispatch
def matrices(part: Part[Any], block: Block) -> tuple[int, Matrices | None] | None:
    """How Muon reads a block of a part as matrices, according to this part.

    Args:
      part: the part.
      block: one of its blocks.

    Returns:
      A priority and a reading; if several parts bind a leaf, the lowest number counts. A reading of None says that the
      block is no matrix. None in place of the pair: the part does not say how to read its blocks.
    """
    return None


@matrices.register
def _of_factor(part: Factor, block: Block) -> tuple[int, Matrices | None] | None:
    if PLANE in part.named or part.by_entry:
        return None  # the part `Planes` of the same planes says how to read them; multipliers are no matrices
    if HEAD in part.named:  # the kernels of QK-norm have one matrix per head
        return 1, channel_matrices(part, block)
    return (2, channel_matrices(part, block)) if part.down else None


@matrices.register
def _of_heads(part: HeadTurn, block: Block) -> tuple[int, Matrices | None]:
    return 0, head_matrices(block, part.blocks)


def matrices_of(parts: Iterable[Part[Any]]) -> dict[str, Reading]:
    """Returns leaf path → how Muon reads the leaf as matrices.

    Args:
      parts: the parts of a list of gauges on a tree.

    Returns:
      A reading for every leaf that some gauge on it reads as matrices, and none for vectors (biases, norms' scales).
      If gauges bind ranges of a leaf, each range has matrices of its own; entries outside of all ranges are in none.
    """
    read: dict[str, Reading] = {}
    for path, pairs in blocks_by_path(parts).items():
        whole = _chosen(matrices(part, block) for part, block in pairs)
        cuts = {(axis, cut) for _, block in pairs for axis, cut in enumerate(cuts_of(block)) if cut is not None}
        if whole is None or not cuts:
            read |= {} if whole is None else {path: whole}
            continue
        axis, *others = {axis for axis, _ in cuts}
        pieces = [] if others else _pieces([cut for _, cut in cuts])
        within = [[(part, kept) for part, block in pairs if (kept := _restricted(block, axis, piece)) is not None]
                  for piece in pieces]
        readings = [_chosen(matrices(part, block) for part, block in chosen) for chosen in within]
        read[path] = Fused(tuple(reading for reading in readings if reading is not None))
    return read


def _chosen(answers: Iterable[tuple[int, Matrices | None] | None]) -> Matrices | None:
    """Returns the reading of one leaf or range, chosen from the answers of all parts; None if it is no matrix."""
    first: int | None = None
    chosen: Matrices | None = None
    for priority, reading in sorted((answer for answer in answers if answer is not None), key=lambda row: row[0]):
        # Answers come by priority; the first wins. If a rotation says that its bias is no matrix, a scale that also
        # moves the bias does not change that, unless it is a scale per head (priority 1).
        if first is None:
            first, chosen = priority, reading
        # Among answers of one priority, the one with more matrices wins, so that the order of gauges has no effect. For
        # a stack of experts, a `rescale` of their units names the experts' axis and so reads a matrix per expert. The
        # gauge of the norm before them cannot name it, and reads one matrix.
        finer = priority == first and chosen is not None and reading is not None and reading.count > chosen.count
        if finer or (priority == 1 and chosen is None):
            first, chosen = priority, reading
    return chosen


def cuts_of(block: Block) -> tuple[Ranges | None, ...]:
    """Returns, per axis of the leaf, the ranges to which a block is confined; None where it is not.

    Such a range is read like a leaf of its own. It belongs to a group, `(head basis)=0:32`, or to an axis without a
    group, `channel=0:12`. A range within a head does not count.
    """
    labels = block.split_labels

    def cut(axis: int) -> Ranges | None:
        window, (first, *others) = block.window[axis], block.groups[axis]
        if window is not None:
            return (window,)
        index, label = block.picks[first], labels[first]
        in_head = label in (BASIS, PLANE) or (HEAD in labels and label != HEAD)
        if others or isinstance(index, int) or in_head or index == ((0, block.split[first]),):
            return None
        return index

    return tuple(cut(axis) for axis in range(len(block.shape)))


def _pieces(cuts: Sequence[Ranges]) -> list[Ranges]:
    """Returns the pieces into which `cuts` divide an axis: indices that lie in the same cuts form one piece.

    Indices that lie in no cut are left out.
    """
    pieces: dict[tuple[Ranges, ...], Ranges] = {}
    for start, stop in itertools.pairwise(sorted({edge for cut in cuts for span in cut for edge in span})):
        holding = tuple(cut for cut in cuts if any(first <= start and stop <= last for first, last in cut))
        pieces[holding] = (*pieces.get(holding, ()), (start, stop))
    return sorted(piece for holding, piece in pieces.items() if holding)


def _restricted(block: Block, axis: int, piece: Ranges) -> Block | None:
    """Returns the block without the indices of one axis that lie outside a piece of this axis.

    If the axis splits into axes of lengths (k, …, n), these become (length/n, 1, …, n), where length is the piece's.
    The result is None if the block does not contain the piece, or if n does not divide its length.
    """
    held = cuts_of(block)[axis] or ((0, block.shape[axis]),)
    if held == piece:
        return block
    if not all(any(start <= first and last <= stop for start, stop in held) for first, last in piece):
        return None
    split, picks, window, group = list(block.split), list(block.picks), list(block.window), block.groups[axis]
    if len(group) == 1:
        picks[group[0]] = piece
    else:
        ((start, stop), *others), last = piece, split[group[-1]]
        length = stop - start
        if others or length % last or (start - held[0][0]) % last or any(isinstance(picks[k], int) for k in group):
            return None
        for k in group:
            split[k] = last if k == group[-1] else length // last if k == group[0] else 1
            picks[k] = ((0, split[k]),)
        window[axis] = (start, stop)
    return dataclasses.replace(block, split=tuple(split), picks=tuple(picks), window=tuple(window))


def within(block: Block, reading: Reading) -> tuple[Block, ...]:
    """Returns a block cut down to each of the ranges in which its leaf is read; the block itself for a whole leaf."""
    ranges = [piece.block for piece in reading.pieces if piece.block is not None] if isinstance(reading, Fused) else []
    kept: list[Block] = []
    for span in ranges:
        own: Block | None = block
        for axis, cut in enumerate(cuts_of(span)):
            own = own if own is None or cut is None else _restricted(own, axis, cut)
        kept += [] if own is None else [own]
    return tuple(kept) or (block,)


def _widened(block: Block, at_index: bool = False) -> Block:
    """Returns the block extended to whole axes, except along ranges that are read like leaves of their own.

    An axis of which the block selects an index (`qkv=0`) then counts matrices, or, with `at_index`, keeps this index
    alone. A block that selects a part of each head is read as whole heads.
    """
    cuts = cuts_of(block)
    picks: list[int | Ranges] = []
    for axis, group in enumerate(block.groups):
        lone = cuts[axis] is not None and block.window[axis] is None
        picks += [block.selected[k] if lone or (at_index and isinstance(block.picks[k], int))
                  else ((0, block.split[k]),) for k in group]
    return dataclasses.replace(block, picks=tuple(picks), labels=block.split_labels)


def head_matrices(block: Block, beside: Iterable[Block] = ()) -> Matrices | None:
    """Returns one matrix per head, with the basis on one side; None if the block is no matrix.

    Args:
      block: the block.
      beside: all blocks of its heads, which tell whether a free axis counts the queries of a key head.
    """
    whole = _widened(block)
    queries = _query_axis(whole, [_widened(other) for other in beside])
    basis, free = [whole.split_labels.index(BASIS)], [k for k in _free_axes(whole) if k != queries]
    rows, columns = sorted((basis, free))
    return _between(whole, rows, columns, of_head=basis, queries=queries)


def _free_axes(block: Block) -> list[int]:
    """The free axes, without parts that share parentheses with a name: `(head _)` are heads of grouped queries."""
    labels = block.split_labels
    counting = {k for group in block.groups for k in group if any(labels[j] not in ("_", "", BASIS) for j in group)}
    return [k for k, label in enumerate(labels) if label == "_" and k not in counting]


def _query_axis(block: Block, beside: Sequence[Block]) -> int | None:
    """The free axis of a leaf that counts the queries of each key head, as in `_ head _ basis`; None if there is none.

    A block of grouped queries has one free axis more than the keys or values beside it. The axis that counts queries is
    directly behind the axis of heads, or directly in front of it. An axis is preferred without which the block has the
    lengths of the keys or values. If there is one key head, whose axis has no name, the axis directly in front of the
    basis counts queries, `_ _ basis`, provided that the lengths agree.

    A free axis next to another one may instead be the window of a convolution, as in `_ _ head basis` beside the output
    kernel `head basis _`. It counts queries only beside a block whose inputs are on the same side of the basis, as
    those of keys are. The bias of grouped queries has no free axis but the one that counts queries.
    """
    labels, free = block.split_labels, _free_axes(block)
    named = [k for k, label in enumerate(labels) if label not in ("", *COUNTING)]
    heads = [n for n, k in enumerate(named) if labels[k] not in ("_", BASIS, PLANE, CHANNEL)]
    inside = next((name for name in (BASIS, CHANNEL) if name in labels), None)
    near = [heads[-1] + 1, heads[0] - 1] if heads else [named.index(labels.index(BASIS)) - 1]
    others = [(other, _free_axes(other)) for other in beside]
    # Where no axis is called `basis` or `channel`, one free axis has the entries of a head. A block that has no other
    # free axis is then a bias, and not compared.
    single = [(other, own) for other, own in others if len(own) == len(free) - 1 > (inside is None)]

    def counts(n: int, fits: bool) -> bool:
        k = named[n]
        rest = [j for j in free if j != k]
        # An axis that shares parentheses, `_ (_ basis)`, is never a window.
        window = (k,) in block.groups and not {*named[max(n - 1, 0) : n + 2]}.isdisjoint(rest)
        alike = [(other, own) for other, own in single if not fits or _lengths(other, own) == _lengths(block, rest)]
        if window and inside is not None:
            alike = [(other, own) for other, own in alike if _sides(other, own, inside) == _sides(block, rest, inside)]
        return bool(alike) and (fits or (bool(heads) and (n > heads[-1] or not window)))

    near = [n for n in near if 0 <= n < len(named) and named[n] in free]
    for n, fits in [(n, fits) for fits in (True, False) for n in near]:
        # Beside `_ head _ basis` the bias `head _ basis` has as many free axes as keys. If the two were compared, the
        # axis of inputs would be taken for the axis that counts queries.
        if counts(n, fits) and not (n != near[0] and len(single) > 1 and counts(near[0], False)):
            return named[n]
    for other, own in others:
        # A block with one free axis is taken for the keys, and not for a bias, if no other block can be the keys.
        keys = any(each != block and len(axes) == len(own) - 1 for each, axes in others)
        if len(free) == 1 < len(own) and keys and (at := _query_axis(other, beside)) is not None:
            kept = [k for k in range(len(other.split)) if k not in own or k == at]
            axes = [(other.split_labels[k], other.split[k]) for k in kept]
            if axes == list(zip(labels, block.split, strict=True)):
                return free[0]
    return None


def _lengths(block: Block, axes: Iterable[int]) -> list[int]:
    return sorted(block.split[k] for k in axes)


def _sides(block: Block, axes: Iterable[int], inside: str) -> list[bool]:
    """For each of some axes, whether it is behind the axis of a head's entries."""
    return sorted(k > block.split_labels.index(inside) for k in axes)


def channel_matrices(part: Factor, block: Block) -> Matrices | None:
    """Returns matrices with channels on one side and free axes on the other; None if the block is no matrix.

    If channels are inputs and have free axes on both sides, the kernel is a convolution, (*window, inputs, outputs). If
    one axis is in front, it is (outputs, inputs, *window) where several axes are behind the channels, or where the
    kernel before it has its outputs first. For the channels of a norm, a single axis in front counts kernels that read
    the norm, and is part of the outputs.
    """
    whole = _widened(block)
    labels = whole.split_labels
    named = CHANNEL if CHANNEL in part.named else next(reversed(part.named), None)
    every = [k for k, label in enumerate(labels) if label == "_"]
    # A free part in parentheses with heads counts grouped queries, if enough other axes are left for both sides of a
    # matrix.
    grouped = _query_axis(whole, [_widened(other) for other in part.blocks]) if HEAD in labels else None
    queries = {k for group in whole.groups if HEAD in (labels[j] for j in group) for k in group} | {grouped}
    free = [k for k in every if k not in queries]
    free = free if len(free) > (named != CHANNEL) else every
    at = None if named is None else labels.index(named)
    # The last free axis is the outputs if there are no channels, or if the named axis is no side of a matrix, because
    # it is between free axes, or because it counts heads or matrices.
    between = named != CHANNEL and at is not None and free and free[0] < at < free[-1]
    of_heads = named == HEAD and (len(free) > 1 or (block.argument not in DIVIDED and labels[-1] == "_"))
    if at is None or between or of_heads or named in COUNTING:
        rows, columns = free[:-1], free[-1:]
        of_head = rows if HEAD in labels[: min(free, default=0)] else columns
        return _between(whole, rows, columns, of_head, grouped)
    front, behind = [k for k in free if k < at], [k for k in free if k > at]
    if block.argument not in DIVIDED:
        rows, columns = free, [at]
    elif not front or not behind or (part.signed and len(front) == 1):
        rows, columns = [at], free
    else:
        before = any(b.split_labels[0] == named and b.split_labels.count("_") > 1 for b in part.up)
        outputs_first = len(front) == 1 and (before or len(behind) > 1)
        rows, columns = ([at, *behind], front) if outputs_first else ([*front, at], behind)
    return _between(whole, rows, columns, [at], grouped)


def labelled_matrices(block: Block) -> Matrices | None:
    """Returns matrices as a user's axes describe them; None unless exactly two axes of the leaf have free parts `_`.

    The free parts of the first of these axes are the rows, those of the second the columns. All parts that have a name
    or an index say which matrix: there is one for each of their indices.
    """
    whole = _widened(block)
    labels = whole.split_labels
    sides = [free for group in whole.groups if (free := [k for k in group if labels[k] == "_"])]
    if len(sides) != 2:
        return None
    rows, columns = sides
    # The side that comes after the axis of heads has the entries of one head.
    return _between(whole, rows, columns, of_head=rows if HEAD in labels[: rows[0]] else columns)


def neurons_reading(blocks: Sequence[Block]) -> Reading | None:
    """Returns how a kernel is read as matrices, with neurons as columns and their inputs `_` as rows.

    All axes with a name count neurons (`head neuron` counts them in two axes), except `layer` and `expert`: each layer
    of a stack and each expert has a matrix of its own. So has an index such as `qkv=0` of a fused kernel. If all blocks
    have the same rows and columns, and together list all indices, the matrices are one stack. Otherwise (in a stack of
    layers of which one is transposed, say) each block is read at its own index.

    Args:
      blocks: blocks of one leaf, which share no entry.

    Returns:
      The reading; None if a block is no matrix.

    >>> from gauge_optax.binding import BlockSpec, bind_leaf
    >>> def text(*axes):
    ...     specs = [BlockSpec("neurons", "w", one) for one in axes]
    ...     return neurons_reading([bind_leaf("", spec, "w", (2, 3, 4), {}) for spec in specs]).text
    >>> text("part=0 _ neuron", "part=1 _ neuron"), text("part=0 _ neuron", "part=1 neuron _")
    ('2 × (3, 4)', '1 × (3, 4) + 1 × (4, 3)')
    """
    made = [_neuron_matrices(block, False) for block in blocks]
    # If the stacks hold more entries than the blocks, they overlap, or contain indices that no block lists. Then each
    # block is read at its own index.
    if sum(math.prod(stack.split) for stack in set(made) if stack) > sum(math.prod(x.view_shape) for x in blocks):
        made = [_neuron_matrices(block, True) for block in blocks]
    pieces = tuple(dict.fromkeys(stack for stack in made if stack is not None))
    return None if None in made else pieces[0] if len(pieces) == 1 else Fused(pieces)


def _neuron_matrices(block: Block, at_index: bool) -> Matrices | None:
    whole = _widened(block, at_index)
    labels = whole.split_labels
    inputs = [k for k, label in enumerate(labels) if label == "_"]
    neurons = [k for k, label in enumerate(labels) if label not in ("_", "", *COUNTING)]
    return _between(whole, inputs, neurons)


def _between(
    block: Block, rows: Sequence[int], columns: Sequence[int], of_head: Sequence[int] = (), queries: int | None = None
) -> Matrices | None:
    """Returns the block as matrices.

    Args:
      block: the block.
      rows: the axes of `block.split` that are inputs.
      columns: the axes of `block.split` that are outputs.
      of_head: the axes of `rows` or of `columns` that have the entries of one head; () if no axis counts heads.
      queries: the axis of `block.split` that counts the queries of a key head by itself, if there is one.

    Returns:
      The matrices; None if a side is empty, or if both sides lie in a single axis of the leaf.
    """
    used, labels = {*rows, *columns}, block.split_labels
    if len({k for k, group in enumerate(block.groups) if set(group) & used}) < 2 or not rows or not columns:
        return None
    batch = tuple(k for k in range(len(block.split)) if k not in used)
    # Free parts in parentheses with heads count heads too.
    counting = tuple(k for group in block.groups if HEAD in (labels[j] for j in group)
                     for k in group if k in batch and labels[k] in (HEAD, "_"))
    counting = tuple(sorted({*counting, queries})) if queries in batch else counting
    heads = (counting, tuple(of_head)) if counting and of_head else None
    whole = None if block.whole else block
    return Matrices(block.shape, block.view_shape, block.groups, batch, tuple(rows), tuple(columns), heads, whole)


def optax_axes(matrices: Mapping[str, Reading]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns leaf path → the leaf's axes that hold rows, and the leaf's axes that hold columns.

    A leaf that is read in ranges has the axes of its first range.
    """
    first = {path: reading.pieces[0] for path, reading in matrices.items() if reading.pieces}
    return {path: (m.leaf_axes(m.rows), m.leaf_axes(m.columns)) for path, m in first.items()}
