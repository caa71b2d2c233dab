"""Rows of heads: sums and products over the rows of blocks that share a basis, for any layout of the leaves.

The blocks have a basis axis of one length, `size`. Stacked, the rows of all of them form one matrix W (rows × size) per
head, and a rotation R of the basis takes W to W·R. `turns.Rotation` is such a rotation; `sizes.Stretch` is what
GL(d) does to the length of rows.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Block
from gauge_optax.linalg import HIGHEST, direction_tolerance, matmul, safe_divide, transpose
from gauge_optax.parts.part import Arrays
from gauge_optax.xla import fixed_noise

BASIS, PLANE = "basis", "plane"


@dataclasses.dataclass(frozen=True)
class PlaneBlock(Block):
    """A block whose basis axis pairs coordinates to rotary planes.

    Its view has the axes `basis` (2, the coordinates of a plane) and `plane` in place of the basis axis.

    Attributes:
      pairing: "half": coordinate j pairs with j + d/2; "interleaved": 2j with 2j + 1.
    """

    pairing: str

    @classmethod
    def of(cls, block: Block, pairing: str) -> "PlaneBlock":
        """The block with this pairing."""
        return cls(**{f.name: getattr(block, f.name) for f in dataclasses.fields(block)}, pairing=pairing)

    @property
    def row_labels(self) -> tuple[str, ...]:
        at = self.labels.index(BASIS)
        pair = (BASIS, PLANE) if self.pairing == "half" else (PLANE, BASIS)
        return self.labels[:at] + pair + self.labels[at + 1 :]

    def rows(self, leaf: jax.Array) -> jax.Array:
        at = self.labels.index(BASIS)
        planes = self.view_shape[at] // 2
        pair = (2, planes) if self.pairing == "half" else (planes, 2)
        rows: jax.Array = self.view(leaf).reshape(self.view_shape[:at] + pair + self.view_shape[at + 1 :])
        return rows

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.labels, PLANE)

    def spread(self, named: tuple[str, ...], value: jax.Array, elsewhere: float = 0.0) -> jax.Array:
        """As `Block.spread`; a number per plane goes to both of its coordinates."""
        if PLANE not in named:
            return super().spread(named, value, elsewhere)
        at, shape = named.index(PLANE), list(value.shape)
        paired = jnp.stack([value, value], at if self.pairing == "half" else at + 1)
        shape[at] *= 2
        return super().spread(_by_basis(named), paired.reshape(shape), elsewhere)

    def total(self, named: tuple[str, ...], leaf: jax.Array) -> jax.Array:
        """As `Block.total`; a plane's sum is over both of its coordinates."""
        if PLANE not in named:
            return super().total(named, leaf)
        sums, at = super().total(_by_basis(named), leaf), named.index(PLANE)
        pair = (2, -1) if self.pairing == "half" else (-1, 2)
        split = sums.reshape(*sums.shape[:at], *pair, *sums.shape[at + 1 :])
        return jnp.sum(split, at if self.pairing == "half" else at + 1)

    def ids_along(self, label: str, length: int, names: Collection[str]) -> np.ndarray | None:
        """As `Block.ids_along`; both coordinates of a plane have one index."""
        if label == BASIS and PLANE in names and BASIS not in names:
            return np.arange(length) % (length // 2) if self.pairing == "half" else np.arange(length) // 2
        return super().ids_along(label, length, names)


def _by_basis(named: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(BASIS if name == PLANE else name for name in named)


class Heads:
    """What has blocks that share a basis: a part that turns heads, or one side of GL(d).

    Attributes:
      named: names of the axes that count heads.
      shape: lengths of the named axes.
      blocks: the blocks.
      size: length of the basis axis; 2 for rotary planes.
    """

    named: tuple[str, ...]
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    size: int

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths of the leaves, each once."""
        return tuple(dict.fromkeys(block.path for block in self.blocks))

    @functools.cached_property
    def heads(self) -> int:
        """How many heads (or rotary planes) there are."""
        return math.prod(self.shape)

    def row_count(self, block: Block) -> int:
        """How many rows of a head one block holds."""
        return math.prod(block.view_shape) // (self.heads * self.size)

    # Products over rows ---------------------------------------------------------------------------------

    def gram(self, a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> jax.Array:
        """aᵀ·b over the rows of all blocks: (*shape, size, size)."""
        products = [self.block_gram(x, a[x.path], b[x.path]) for x in self.blocks]
        return sum(products[1:], products[0])

    def block_gram(self, block: Block, a: jax.Array, b: jax.Array) -> jax.Array:
        """aᵀ·b over the rows of one block: (*shape, size, size)."""
        (left, wide), (right, _) = self.as_matrices(block, block.rows(a)), self.as_matrices(block, block.rows(b))
        return jnp.einsum("...ir,...jr->...ij" if wide else "...ri,...rj->...ij", left, right, precision=HIGHEST)

    def turned(self, point: Mapping[str, jax.Array], matrix: jax.Array) -> dict[str, jax.Array]:
        """All leaves of the blocks, with W·matrix in place of W; matrix is (*shape, size, size)."""
        out = {path: point[path] for path in self.paths}
        for block in self.blocks:
            rows = self.turned_view(block, block.rows(out[block.path]), matrix)
            out[block.path] = block.write(out[block.path], rows)
        return out

    def added(self, sums: Arrays, point: Mapping[str, jax.Array], matrix: jax.Array) -> dict[str, jax.Array]:
        """Those leaves of `sums`, with W·matrix added, where W are the rows of `point`."""
        out = {path: sums[path] for path in self.paths}
        for block in self.blocks:
            move = self.turned_view(block, block.rows(point[block.path]), matrix)
            out[block.path] = block.write(out[block.path], block.rows(out[block.path]) + move)
        return out

    def turned_view(self, block: Block, rows: jax.Array, matrix: jax.Array) -> jax.Array:
        """W·matrix for one block's view."""
        matrices, wide = self.as_matrices(block, rows)
        # Also one row (a bias) is a product, not a sum: XLA:CPU may fuse a sum with the write of the same rows into one
        # loop, which then reads what it has overwritten (openxla/xla issue 49176).
        product = matmul(transpose(matrix), matrices) if wide else matmul(matrices, matrix)
        order, _ = self._head_major(block)
        return product.reshape([rows.shape[k] for k in order]).transpose([order.index(k) for k in range(len(order))])

    def as_matrices(self, block: Block, rows: jax.Array) -> tuple[jax.Array, bool]:
        """A block's view as one matrix per head, (*shape, rows, size), and whether it is stored, and left, transposed.

        This transpose to heads first copies whole rows. A matrix product that had to do it would move single entries.
        """
        order, wide = self._head_major(block)
        sides = (self.size, -1) if wide else (-1, self.size)
        return rows.transpose(order).reshape(*(rows.shape[k] for k in order[: len(self.named)]), *sides), wide

    def _head_major(self, block: Block) -> tuple[list[int], bool]:
        """The order of a view's axes that puts heads first, and whether the basis axis comes before the rows in it."""
        labels = block.row_labels
        named, basis = [labels.index(name) for name in self.named], labels.index(BASIS)
        free = [k for k, label in enumerate(labels) if label not in (*self.named, BASIS)]
        wide = bool(free) and basis < free[0]
        return [*named, basis, *free] if wide else [*named, *free, basis], wide

    def stacked(self, point: Mapping[str, jax.Array]) -> jax.Array:
        """The rows of all blocks as one matrix per head: (*shape, rows, size)."""
        parts = [self.rows_of(block, point) for block in self.blocks]
        return jnp.concatenate(parts, -2) if len(parts) > 1 else parts[0]

    def rows_of(self, block: Block, point: Mapping[str, jax.Array]) -> jax.Array:
        """The rows of one block as one matrix per head: (*shape, rows, size)."""
        matrices, wide = self.as_matrices(block, block.rows(point[block.path]))
        return transpose(matrices) if wide else matrices

    def mixed_rows(self, point: Mapping[str, jax.Array], noise_number: int | jax.Array = 0) -> jax.Array:
        """CᵀW of every head, (*shape, size, size): `size` generic combinations of its rows, C being `fixed_noise`.

        Args:
          point: bound leaves.
          noise_number: which C; may be traced.
        """
        total = jnp.zeros((*self.shape, self.size, self.size), next(iter(point.values())).dtype)
        letters = dict(zip(self.named, string.ascii_lowercase, strict=False)) | {BASIS: "Y"}
        # Blocks are sorted, because the order in which a user lists them must not change what is read.
        for number, block in enumerate(sorted(self.blocks, key=lambda b: (b.path, b.axes))):
            rows = block.rows(point[block.path])
            constant = fixed_noise(number, self.row_count(block), self.size, noise_number)
            free = iter(string.ascii_lowercase[len(self.named) :])
            axes = [letters[x] if x in letters else next(free) for x in block.row_labels]
            lengths = {x: n for x, n in zip(axes, rows.shape, strict=True) if x not in letters.values()}
            # C's rows are split to match the leaf's axes. Merging the leaf's axes would move data if one is sharded.
            split = constant.astype(total.dtype).reshape(*lengths.values(), self.size)
            heads = "".join(letters[name] for name in self.named)
            spec = f"{''.join(lengths)}Z,{''.join(axes)}->{heads}ZY"
            total = total + jnp.einsum(spec, split, rows, precision=HIGHEST)
        return total

    # Sums over rows -------------------------------------------------------------------------------------

    def sums(self, point: Mapping[str, jax.Array], axes: tuple[str, ...] = ()) -> jax.Array:
        """Sums over the rows of all blocks, and over the basis unless `axes` keep it: (*shape, …)."""
        totals = [self.block_sums(block, block.rows(point[block.path]), axes) for block in self.blocks]
        return sum(totals[1:], totals[0])

    def block_sums(self, block: Block, rows: jax.Array, axes: tuple[str, ...] = ()) -> jax.Array:
        """As `sums`, for one block's view."""
        labels, kept = block.row_labels, (*self.named, *axes)
        order = [label for label in labels if label in kept]
        free = tuple(k for k, label in enumerate(labels) if label not in kept)
        return jnp.sum(rows, free).transpose([order.index(label) for label in kept])

    def mean(self, point: Mapping[str, jax.Array]) -> jax.Array:
        """Mean over all rows of all blocks and over the basis: (*shape)."""
        return self.sums(point) / (self.size * sum(map(self.row_count, self.blocks)))

    def along_basis(self, block: Block, vectors: jax.Array) -> jax.Array:
        """A vector per head, (*shape, size), laid out to broadcast with the block's view."""
        labels, kept = block.row_labels, (*self.named, BASIS)
        ordered = jnp.transpose(vectors, [kept.index(x) for x in labels if x in kept])
        lengths = iter(ordered.shape)
        return ordered.reshape([next(lengths) if x in kept else 1 for x in labels])

    def per_head(self, block: Block, numbers: jax.Array) -> jax.Array:
        """A number per head, (*shape), laid out to broadcast with the block's view."""
        return self.along_basis(block, jnp.broadcast_to(numbers[..., None], (*self.shape, self.size)))

    # Roundoff -------------------------------------------------------------------------------------------

    def quiet(self, g: Arrays) -> Arrays:
        """A gradient with zeros for biases (single rows of a head) whose gradient is roundoff beside their head's.

        A key's bias shifts all scores of a query by one number, which softmax ignores: its gradient is only roundoff.
        """
        single = [block for block in self.blocks if self.row_count(block) == 1]
        if not single or len(single) == len(self.blocks):
            return g
        out, order = dict(g), [name for name in self.named if name != PLANE]
        sizes = [self._row_norm(block, out[block.path], order) for block in self.blocks]
        largest = functools.reduce(jnp.maximum, sizes)
        for block, size in zip(self.blocks, sizes, strict=True):
            if block in single:
                rows, labels = block.rows(out[block.path]), block.row_labels
                axes = [label for label in labels if label in order]
                small = jnp.transpose(size < direction_tolerance(rows.dtype) * largest, [order.index(x) for x in axes])
                small = small.reshape([n if x in order else 1 for n, x in zip(rows.shape, labels, strict=True)])
                out[block.path] = block.write(out[block.path], jnp.where(small, 0.0, rows))
        return out

    def _row_norm(self, block: Block, leaf: jax.Array, order: Sequence[str]) -> jax.Array:
        """The root mean square norm of a head's rows in one block; its axes are `order`."""
        if isinstance(block, PlaneBlock):
            rows, labels = block.rows(leaf), block.row_labels
        else:  # the layout in which matrix products return gradients, so that nothing is copied
            rows, labels = self.as_matrices(block, block.rows(leaf))[0], (*self.named, "", "")
        spare = tuple(k for k, label in enumerate(labels) if label not in order)
        # Rows are divided by the largest entry first, because squares of gradients may underflow or overflow.
        largest = jnp.max(jnp.abs(rows), spare, keepdims=True)
        squares = jnp.sum(jnp.square(rows * safe_divide(jnp.ones(()), largest)), spare, keepdims=True)
        norms = jnp.squeeze(largest * jnp.sqrt(squares / self.row_count(block)), spare)
        kept = [label for label in labels if label in order]
        return jnp.transpose(norms, [kept.index(name) for name in order])


@dataclasses.dataclass(frozen=True)
class Side(Heads):
    """The rows of one factor of a product, such as the queries of heads. See `Heads` for the attributes."""

    named: tuple[str, ...]
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    size: int


def among(parts: Iterable[Any]) -> tuple[Any, ...]:
    """Those of some parts that turn heads or rotary planes."""
    return tuple(part for part in parts if isinstance(part, Heads))


def stack_heads(arrays: Sequence[jax.Array], tail: int = 2) -> jax.Array:
    """Concatenates arrays of several parts, (*shape, …) with `tail` more axes, to one array, (heads, …)."""
    return jnp.concatenate([x.reshape(-1, *x.shape[x.ndim - tail :]) for x in arrays])


def unstack_heads(stacked: jax.Array, turns: Sequence[Any]) -> list[jax.Array]:
    """The inverse of `stack_heads`."""
    parts = jnp.split(stacked, np.cumsum([turn.heads for turn in turns])[:-1].tolist())
    return [x.reshape(*turn.shape, *x.shape[1:]) for turn, x in zip(turns, parts, strict=True)]


def by_size(turns: Sequence[Any]) -> list[list[Any]]:
    """Parts grouped by the size of their heads, ascending."""
    return [[turn for turn in turns if turn.size == size] for size in sorted({turn.size for turn in turns})]
