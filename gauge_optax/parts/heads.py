"""Heads: the rows of blocks that share a basis, and the turns of that basis, by rotations or by rotary planes.

The blocks have a basis axis of one length, `size`. Stacked, the rows of all of them form one matrix W (rows × size) per
head, and a rotation R of the basis takes W to W·R. `Heads` has the sums and products over these rows, for any layout of
the leaves. `Rotation` and `Planes` are the turns of heads. Two relatives are elsewhere: `sizes.Stretch`, the symmetric
part of an invertible change of basis, and `stream`, the rotation of the residual stream.

* Reading: let C be a fixed random matrix. The polar factor Q of CᵀW obeys Q(W·R) = Q(W)·R, and is the frame of W. No
  reading is continuous everywhere (CᵀW may lose rank), so that a head is read once, at `init`. In float32, CᵀW nearly
  loses a direction of W in 0.3 % of heads of 32 dimensions and in 6 % of those of 128 (normal weights, 300 heads).
  These heads are read with another C. A direction that is small in W itself is read as any other, down to a share of
  `linalg.roundoff` of the largest.
* Project: the part of a tangent U that rotates is the matrix W·A, with an antisymmetric A, that is nearest to U. A
  solves M·A + A·M = WᵀU − UᵀW with M = WᵀW.
* Hold: the end W + U of a step turns back to (W + U)·R, with the rotation R for which Wᵀ(W + U)R is symmetric. Then
  the step from W to (W + U)·R has no part that rotates, and the function at its end is that of W + U.

Steps none of which rotates a head can together lead from W to W·R with R ≠ 1 (holonomy). Therefore no function of the
weights tells how far steps have rotated a head. Its turning is the sum of the rotations that its steps contain.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Block, laid_out
from gauge_optax.linalg import (
    HIGHEST,
    direction_tolerance,
    lyapunov_by_products,
    matmul,
    real_dtype,
    rotation_2x2,
    rotation_back,
    roundoff,
    safe_divide,
    svd,
    transpose,
)
from gauge_optax.parts.part import Additive, Anchor, Arrays, Orthogonal, Part, Turn, blocks_by_path, overlaps
from gauge_optax.xla import fixed_noise

BASIS, PLANE = "basis", "plane"


@dataclasses.dataclass(frozen=True)
class PlaneBlock(Block):
    """A block whose basis axis consists of rotary planes, which are pairs of coordinates.

    Its `rows` have two axes in place of the view's basis axis: `basis`, of length 2, the coordinates of a plane; and
    `plane`, which counts planes.

    Attributes:
      pairing: "half": coordinate j of a basis of length d pairs with j + d/2; "interleaved": 2j pairs with 2j + 1.
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
        """See `Block.spread`. A number per plane is written to both coordinates of the plane."""
        if PLANE not in named:
            return super().spread(named, value, elsewhere)
        at, shape = named.index(PLANE), list(value.shape)
        paired = jnp.stack([value, value], at if self.pairing == "half" else at + 1)
        shape[at] *= 2
        by_basis = tuple(BASIS if name == PLANE else name for name in named)
        return super().spread(by_basis, paired.reshape(shape), elsewhere)

    def total(self, named: tuple[str, ...], leaf: jax.Array) -> jax.Array:
        """See `Block.total`. The sum for a plane includes both of its coordinates."""
        return self.row_sums(named, self.rows(leaf)) if PLANE in named else super().total(named, leaf)

    def entries(self, named: tuple[str, ...]) -> int:
        """See `Block.entries`. A plane has both of its coordinates."""
        planes = self.view_shape[self.labels.index(BASIS)] // 2 if PLANE in named and BASIS not in named else 1
        return super().entries(named) // planes

    def ids_along(self, label: str, length: int, names: Collection[str]) -> np.ndarray | None:
        """See `Block.ids_along`. Both coordinates of a plane have the plane's index."""
        if label == BASIS and PLANE in names and BASIS not in names:
            return np.arange(length) % (length // 2) if self.pairing == "half" else np.arange(length) // 2
        return super().ids_along(label, length, names)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Blocks that share a basis: all blocks of a part that turns heads, or one factor of a product, say the queries.

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
        """aᵀ·b per head, (*shape, size, size), where a and b are the rows of all blocks at two points."""
        products = [self.block_gram(x, a[x.path], b[x.path]) for x in self.blocks]
        return sum(products[1:], products[0])

    def block_gram(self, block: Block, a: jax.Array, b: jax.Array) -> jax.Array:
        """aᵀ·b per head, (*shape, size, size).

        The matrices a and b are the rows of the block in two arrays shaped like its leaf, such as weights and a step.
        """
        (left, _, wide), (right, _, _) = (self.as_matrices(block, block.rows(x)) for x in (a, b))
        return jnp.einsum("...ir,...jr->...ij" if wide else "...ri,...rj->...ij", left, right, precision=HIGHEST)

    def turned(self, point: Mapping[str, jax.Array], matrix: jax.Array, added_to: Arrays | None = None) -> Arrays:
        """Multiplies the rows W of all blocks by a matrix per head.

        Args:
          point: the leaves that gauges bind, by path. They have the rows W.
          matrix: (*shape, size, size).
          added_to: leaves by path, to whose rows the products are added; None to replace the rows of `point`.

        Returns:
          The leaves of the blocks: those of `point` with W·matrix in place of W, or those of `added_to` with W·matrix
          added to their rows.
        """
        out = {path: (added_to or point)[path] for path in self.paths}
        for block in self.blocks:
            rows = self.turned_view(block, block.rows(point[block.path]), matrix)
            out[block.path] = block.write(out[block.path], block.rows(out[block.path]) + rows if added_to else rows)
        return out

    def turned_view(self, block: Block, rows: jax.Array, matrix: jax.Array) -> jax.Array:
        """W·matrix for the `rows` of one block, in the same layout."""
        matrices, order, wide = self.as_matrices(block, rows)
        # Even a single row (a bias) is multiplied by `matmul`, not by an entrywise product and a sum: XLA:CPU may fuse
        # such a sum with the write of the same rows into one loop, which then reads what it has overwritten
        # (openxla/xla issue 49176).
        product = matmul(transpose(matrix), matrices) if wide else matmul(matrices, matrix)
        return product.reshape([rows.shape[k] for k in order]).transpose([order.index(k) for k in range(len(order))])

    def as_matrices(self, block: Block, rows: jax.Array) -> tuple[jax.Array, list[int], bool]:
        """The `rows` of a block as one matrix per head, (*shape, rows, size) or its transpose.

        It moves the axes of heads to the front, which copies whole rows. If a matrix product got the axes in the order
        of the leaf, XLA would move them inside the product, and copy entry by entry.

        Returns:
          The matrices; the order in which they have the axes of `rows`; and whether they are transposed,
          (*shape, size, rows), because the leaf stores them so.
        """
        labels = block.row_labels
        named, basis = [labels.index(name) for name in self.named], labels.index(BASIS)
        free = [k for k, label in enumerate(labels) if label not in (*self.named, BASIS)]
        wide = bool(free) and basis < free[0]
        order, sides = ([*named, basis, *free], (self.size, -1)) if wide else ([*named, *free, basis], (-1, self.size))
        return rows.transpose(order).reshape(*(rows.shape[k] for k in named), *sides), order, wide

    def stacked(self, point: Mapping[str, jax.Array]) -> jax.Array:
        """The rows of all blocks as one matrix per head: (*shape, rows, size)."""
        parts = [self.rows_of(block, point) for block in self.blocks]
        return jnp.concatenate(parts, -2) if len(parts) > 1 else parts[0]

    def rows_of(self, block: Block, point: Mapping[str, jax.Array]) -> jax.Array:
        """The rows of one block as one matrix per head: (*shape, rows, size)."""
        matrices, _, wide = self.as_matrices(block, block.rows(point[block.path]))
        return transpose(matrices) if wide else matrices

    def mixed_rows(self, point: Mapping[str, jax.Array], noise_number: int | jax.Array = 0) -> jax.Array:
        """CᵀW of every head, (*shape, size, size): `size` random combinations of its rows W. C is `xla.fixed_noise`.

        Args:
          point: the leaves that gauges bind, by path.
          noise_number: says which C is taken: the `draw` of `fixed_noise`. It may be traced.
        """
        total = jnp.zeros((*self.shape, self.size, self.size), next(iter(point.values())).dtype)
        # einsum names axes by numbers: first those of heads, then the basis, the combinations, and the free axes.
        names, combined = (*self.named, BASIS), len(self.named) + 1
        # Blocks are sorted, because the order in which a user lists them must not change what is read.
        for number, block in enumerate(sorted(self.blocks, key=lambda b: (b.path, b.axes))):
            rows = block.rows(point[block.path])
            constant = fixed_noise(number, self.row_count(block), self.size, noise_number)
            axes = [names.index(x) if x in names else combined + 1 + k for k, x in enumerate(block.row_labels)]
            free = {k: n for k, n in zip(axes, rows.shape, strict=True) if k > combined}
            # The rows of C are reshaped to the leaf's free axes. Merging these axes of the leaf instead would move data
            # between devices if one of them is sharded.
            split = constant.astype(total.dtype).reshape(*free.values(), self.size)
            heads = [*range(len(self.named)), combined, names.index(BASIS)]
            total = total + jnp.einsum(split, [*free, combined], rows, axes, heads, precision=HIGHEST)
        return total

    # Sums over rows -------------------------------------------------------------------------------------

    def mean(self, point: Mapping[str, jax.Array]) -> jax.Array:
        """The mean of all entries of a head, over the rows of all blocks and the basis: (*shape)."""
        totals = [block.total(self.named, point[block.path]) for block in self.blocks]
        return sum(totals[1:], totals[0]) / (self.size * sum(map(self.row_count, self.blocks)))

    def along_basis(self, block: Block, vectors: jax.Array) -> jax.Array:
        """A vector per head, (*shape, size), laid out to broadcast with the block's `rows`."""
        return laid_out(vectors, (*self.named, BASIS), block.row_labels)

    def per_head(self, block: Block, numbers: jax.Array) -> jax.Array:
        """A number per head, (*shape), laid out to broadcast with the block's `rows`."""
        return self.along_basis(block, jnp.broadcast_to(numbers[..., None], (*self.shape, self.size)))

    # Roundoff -------------------------------------------------------------------------------------------

    def quiet(self, g: Arrays) -> Arrays:
        """Sets the gradient of a bias to zero if it is roundoff in comparison with the largest gradient of its head.

        A bias is a block with one row per head. A key's bias shifts all scores of a query by one number, which softmax
        ignores, so that its gradient is only roundoff.
        """
        single = [block for block in self.blocks if self.row_count(block) == 1]
        if not single or len(single) == len(self.blocks):
            return g
        out, order = dict(g), [name for name in self.named if name != PLANE]
        sizes = [self._row_norm(block, out[block.path], order) for block in self.blocks]
        largest = functools.reduce(jnp.maximum, sizes)
        for block, size in zip(self.blocks, sizes, strict=True):
            if block in single:
                rows = block.rows(out[block.path])
                small = laid_out(size < direction_tolerance(rows.dtype) * largest, order, block.row_labels)
                out[block.path] = block.write(out[block.path], jnp.where(small, 0.0, rows))
        return out

    def _row_norm(self, block: Block, leaf: jax.Array, order: Sequence[str]) -> jax.Array:
        """The root mean square of the norms of a head's rows in one block. The result has the axes `order`."""
        if isinstance(block, PlaneBlock):
            rows, labels = block.rows(leaf), block.row_labels
        else:  # matrix products return gradients in this layout, so that nothing is copied
            rows, labels = self.as_matrices(block, block.rows(leaf))[0], (*self.named, "", "")
        spare = tuple(k for k, label in enumerate(labels) if label not in order)
        # Rows are divided by the largest entry first, because squares of gradients may underflow or overflow.
        largest = jnp.max(jnp.abs(rows), spare, keepdims=True)
        squares = jnp.sum(jnp.square(rows * safe_divide(jnp.ones(()), largest)), spare, keepdims=True)
        norms = jnp.squeeze(largest * jnp.sqrt(squares / self.row_count(block)), spare)
        kept = [label for label in labels if label in order]
        return jnp.transpose(norms, [kept.index(name) for name in order])


def among(parts: Iterable[Any]) -> tuple[Any, ...]:
    """The parts that turn heads or rotary planes."""
    return tuple(part for part in parts if isinstance(part, HeadTurn))


def stack_heads(arrays: Sequence[jax.Array]) -> jax.Array:
    """Concatenates matrices of several parts, (*shape, rows, columns), to one array, (heads, rows, columns)."""
    return jnp.concatenate([x.reshape(-1, *x.shape[-2:]) for x in arrays])


def unstack_heads(stacked: jax.Array, turns: Sequence[Any]) -> list[jax.Array]:
    """The inverse of `stack_heads`."""
    parts = jnp.split(stacked, np.cumsum([turn.heads for turn in turns])[:-1].tolist())
    return [x.reshape(*turn.shape, *x.shape[1:]) for turn, x in zip(turns, parts, strict=True)]


def seen_beside(turn: Any, others: Sequence[Any]) -> tuple[Block, ...]:
    """The blocks that a rotation is read from if other turns move some of its blocks: those that no other turn moves.

    Sometimes these have too few rows, fewer than `size`. In a chain of kernels, the kernel between two rotations is
    moved by both. In latent attention, the rotation of the residual stream also moves the kernel that writes the latent
    vector, and rotations of heads also move the kernels that read it. In such a case, the other rotations of the class
    of `turn` that have enough rows are read and undone first. What they move then counts as not moved.

    Args:
      turn: the rotation. It has the attributes `rows`, which are `Heads`, and `size`, as all rotations of its class.
      others: the other turns of the list.

    Returns:
      The blocks. They have fewer than `size` rows if there are too few in every order.
    """
    moving = blocks_by_path([turn, *others])
    waiting = [one for one in (turn, *others) if isinstance(one, type(turn))]

    def unmoved(one: Any) -> tuple[Block, ...]:
        return tuple(b for b in one.blocks if not any(q is not one and overlaps(b, x) for q, x in moving[b.path]))

    while True:
        ready = [one for one in waiting if sum(map(one.rows.row_count, unmoved(one))) >= one.size]
        if turn in ready or not ready:
            return unmoved(turn)
        waiting = [one for one in waiting if one not in ready]
        moving = {path: [pair for pair in pairs if pair[0] not in ready] for path, pairs in moving.items()}


def by_size(turns: Sequence[Any]) -> list[list[Any]]:
    """Parts grouped by the size of their heads, ascending."""
    return [[turn for turn in turns if turn.size == size] for size in sorted({turn.size for turn in turns})]


# Turns ------------------------------------------------------------------------------------------------


class HeadTurn(Heads, Turn[jax.Array]):
    """A turn of heads, or of their rotary planes."""

    @property
    def along(self) -> tuple[str, ...]:
        return (BASIS,)

    @property
    def rows_seen(self) -> Heads:
        """The rows of the blocks that the turn is read from: all of them, if a class does not say otherwise."""
        return self


@dataclasses.dataclass(frozen=True)
class Rotation(Orthogonal, HeadTurn):
    """W ↦ W·R for the rows W of every head. Elements are R, (*shape, d, d), where d is `size`.

    Attributes:
      of_linear: whether this is the orthogonal part of an invertible change of basis (`head_linear`). Then a head whose
        rows have less than full rank reads as the identity.
      seen: the blocks that the rotation is read from, if other turns move the rest, see `seen_beside`; () for all.
    """

    of_linear: bool = False
    seen: tuple[Block, ...] = ()

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return (self.seen or self.blocks,)

    def beside(self, others: Sequence[Part[Any]]) -> "Rotation":
        turning = [q for q in others if isinstance(q, HeadTurn)]
        if not any(q.path == b.path and overlaps(q, b) for other in turning for q in other.blocks for b in self.blocks):
            return self
        seen = seen_beside(self, turning)
        # With too few rows, all blocks are the anchor, which another turn moves: such a list is refused as cyclic.
        return dataclasses.replace(self, seen=seen if sum(map(self.row_count, seen)) >= self.size else ())

    @property
    def rows(self) -> "Rotation":
        """The rows of all blocks."""
        return self

    @property
    def rows_seen(self) -> "Rotation":
        """The rows of the blocks that the rotation is read from."""
        return dataclasses.replace(self, blocks=self.seen) if self.seen else self

    def identity(self) -> jax.Array:
        return jnp.broadcast_to(jnp.eye(self.size, dtype=real_dtype()), (*self.shape, self.size, self.size))

    def act(self, e: jax.Array, x: Arrays) -> Arrays:
        return x | self.turned(x, e)

    # The heads of one size, in all layers, are computed as one batch.

    @classmethod
    def read_all(cls, turns: Sequence[Any], x: Arrays) -> list[jax.Array]:
        factors: dict[Any, jax.Array] = {}
        for same in by_size(turns):
            paths = sorted({path for turn in same for path in turn.paths})
            polar = _polar_factors(tuple(same), {path: x[path] for path in paths})
            factors |= zip(same, unstack_heads(polar, same), strict=True)
        return [turn._or_identity(factors[turn]) if turn.of_linear else factors[turn] for turn in turns]

    def read_from(self, x: Arrays) -> Arrays:
        """The point `x` as the rotation is read from it: for `head_linear`, a large factor is scaled down.

        At this point one factor A of `head_linear` has orthonormal columns, and the other, B, has all of the product's
        size. In the sum over the rows of both, a large singular value of B would round away what A says of the other
        directions. So B is scaled down where ‖BᵀB‖_F is above the ‖AᵀA‖_F = √d of orthonormal columns.
        """
        if not self.of_linear:
            return x
        out = dict(x)
        for side in {block.argument: None for block in self.blocks}:
            rows = dataclasses.replace(self, blocks=tuple(b for b in self.blocks if b.argument == side))
            size = jnp.sqrt(jnp.linalg.norm(rows.gram(x, x), axis=(-2, -1)))
            scale = self.size**0.25 / jnp.maximum(self.size**0.25, size)
            for b in rows.blocks:
                out[b.path] = out[b.path] * b.spread(self.named, scale, elsewhere=1.0)
        return out

    def _or_identity(self, r: jax.Array) -> jax.Array:
        whole = jnp.sum(jnp.square(r), (-2, -1), keepdims=True) > self.size - 0.5  # ‖R‖² is the rank
        return jnp.where(whole, r, self.identity())

    @classmethod
    def project(
        cls, turns: Sequence[Any], x: Arrays, u: Arrays, into: Mapping[Any, jax.Array] | None = None
    ) -> Arrays:
        return cls._without_rotation(turns, x, u, into, dual=False)

    @classmethod
    def project_dual(cls, turns: Sequence[Any], x: Arrays, g: Arrays) -> Arrays:
        return cls._without_rotation(turns, x, g, None, dual=True)

    @classmethod
    def _without_rotation(
        cls, turns: Sequence[Any], x: Arrays, vector: Arrays, into: Mapping[Any, jax.Array] | None, dual: bool
    ) -> Arrays:
        """Measures on the rows `rows_seen` how a tangent turns heads, and removes this rotation from all rows.

        If `dual`, it applies the transpose of this projection to a cotangent.
        """
        out = dict(vector)
        for same in by_size(turns):
            gram = stack_heads([turn.rows_seen.gram(x, x) for turn in same])
            cross_gram = stack_heads([(turn if dual else turn.rows_seen).gram(x, vector) for turn in same])
            basis = None if into is None else stack_heads([into[turn] for turn in same])
            if basis is not None:
                # When the iteration stops, an error is left that depends on the basis. So the basis of the slice is
                # used, which twins share.
                gram, cross_gram = (matmul(matmul(transpose(basis), y), basis) for y in (gram, cross_gram))
            # One batch solves for the heads of all layers. Each part then multiplies its rows by its own solutions.
            for turn, generator in zip(same, unstack_heads(lyapunov_by_products(gram, -cross_gram), same), strict=True):
                if into is not None:
                    generator = matmul(matmul(into[turn], generator), transpose(into[turn]))
                out |= (turn.rows_seen if dual else turn).turned(x, generator, added_to=out)
        return out

    @classmethod
    def hold(cls, turns: Sequence[Any], x: Arrays, u: Arrays, backs: dict[Any, Any]) -> Arrays:
        """Turns the end point of the step back by a rotation R of every head; adds R − 1 to `backs`."""
        out = dict(u)
        for same in by_size(turns):
            gram, cross_gram = (stack_heads([turn.rows_seen.gram(x, y) for turn in same]) for y in (x, out))
            for turn, back in zip(same, unstack_heads(rotation_back(gram, cross_gram), same), strict=True):
                after = {path: x[path] + out[path] for path in turn.paths}
                out |= turn.turned(after, back, added_to=out)
                backs[turn] = back
        return out


@dataclasses.dataclass(frozen=True)
class Planes(Additive, HeadTurn):
    """A rotation of every rotary plane. Elements are angles in radians, (*shape); the last named axis is `plane`.

    Let the vectors W_L and W_R hold a plane's two coordinates in all rows. A step U turns the plane by the angle
    (⟨W_L, U_R⟩ − ⟨W_R, U_L⟩)/(‖W_L‖² + ‖W_R‖²), to first order. All is computed entry by entry, because products with
    2 × 2 matrices would first copy the two coordinates of every plane side by side.
    """

    size: int = 2

    # XLA keeps less in memory if what is computed entry by entry comes after what is computed by matrix products.
    last: ClassVar[bool] = True

    def identity(self) -> jax.Array:
        return jnp.zeros(self.shape, real_dtype())

    def act(self, e: jax.Array, x: Arrays) -> Arrays:
        return x | self.turned(x, rotation_2x2(-e))  # rows (l, r) ↦ (l·cos − r·sin, l·sin + r·cos)

    def block_gram(self, block: Block, a: jax.Array, b: jax.Array) -> jax.Array:
        left, right, at = block.rows(a), block.rows(b), block.row_labels.index(BASIS)
        names = (*self.named, BASIS)
        diagonal, crossed = (block.row_sums(names, x * right) for x in (left, jax.lax.rev(left, (at,))))
        on_diagonal = jnp.broadcast_to(jnp.eye(2, dtype=bool), (*self.shape, 2, 2))
        return jnp.where(on_diagonal, diagonal[..., None, :], crossed[..., None, :])

    def turned_view(self, block: Block, rows: jax.Array, matrix: jax.Array) -> jax.Array:
        at = block.row_labels.index(BASIS)
        first, second = (jax.lax.slice_in_dim(rows, y, y + 1, axis=at) for y in range(2))
        of_first, of_second = (self.along_basis(block, row) for row in jnp.unstack(matrix, axis=-2))
        return first * of_first + second * of_second

    @classmethod
    def read_all(cls, turns: Sequence[Any], x: Arrays) -> list[jax.Array]:
        first = [turn.mixed_rows(x)[..., 0, :] for turn in turns]
        return [jnp.arctan2(row[..., 1], row[..., 0]) for row in first]

    @classmethod
    def hold(cls, turns: Sequence[Any], x: Arrays, u: Arrays, backs: dict[Any, Any]) -> Arrays:
        """Turns the end point of the step back by the angle between start and end; exact for steps of any size."""
        out = dict(u)
        for turn in turns:
            after = {path: x[path] + out[path] for path in turn.paths}
            gram = turn.gram(x, after)
            angle = jnp.arctan2(gram[..., 0, 1] - gram[..., 1, 0], gram[..., 0, 0] + gram[..., 1, 1])
            back = turn.act(-angle, after)
            out |= {path: back[path] - x[path] for path in turn.paths}
        return out

    @classmethod
    def project(
        cls, turns: Sequence[Any], x: Arrays, u: Arrays, into: Mapping[Any, jax.Array] | None = None
    ) -> Arrays:
        # Rotations of a plane commute, so that its angle does not depend on the basis, and `into` is not needed.
        out = dict(u)
        for turn in turns:
            # Each block, with the coordinates of its rows (l, r) exchanged: (r, l) is a quarter turn, up to a sign.
            swapped = [(b, jax.lax.rev(b.rows(x[b.path]), (b.row_labels.index(BASIS),))) for b in turn.blocks]
            sizes = [b.row_sums(turn.named, jnp.square(rows)) for b, rows in swapped]
            pairs = [b.row_sums((*turn.named, BASIS), rows * b.rows(out[b.path])) for b, rows in swapped]
            size, paired = sum(sizes[1:], sizes[0]), sum(pairs[1:], pairs[0])
            rate = safe_divide(paired[..., 1] - paired[..., 0], size)
            quarter = jnp.stack([-rate, rate], -1)
            for b, rows in swapped:
                out[b.path] = b.write(out[b.path], b.rows(out[b.path]) - rows * turn.along_basis(b, quarter))
        return out


_Readings = tuple[jax.Array, jax.Array, jax.Array]
_MOST_READINGS = 4  # how many random matrices C are tried for a head


@functools.partial(jax.jit, static_argnums=0)  # outside jit, a loop would be compiled anew at every call
def _polar_factors(turns: tuple[Any, ...], point: Arrays) -> jax.Array:
    """The polar factors of CᵀW for heads of one size, (heads, d_h, d_h), each with the first C that loses no direction.

    A fixed random matrix C combines the rows of W to d_h rows. First, two C together make 2·d_h rows, whose singular
    values have nearly the same ratios as those of W. They tell the rank of W, and how small the singular value of a
    direction in CᵀW may be if it is small in W itself. A direction whose value is much smaller is lost. If every C
    loses a direction, the first of those that keep the most is taken.

    A head of full rank reads as an orthogonal matrix, however small some of its directions are. If W has less than full
    rank, the factor is a partial isometry: it is zero in the directions of which only roundoff is left in W.
    """
    seen = [turn.read_from(point) for turn in turns]

    def mixed(number: jax.Array) -> jax.Array:
        return stack_heads([turn.rows_seen.mixed_rows(x, number) for turn, x in zip(turns, seen, strict=True)])

    both = jax.vmap(mixed, out_axes=1)(jnp.arange(2, dtype=jnp.uint32))
    _, sizes, directions = svd(jax.lax.stop_gradient(both.reshape(len(both), -1, turns[0].size)))
    live = sizes > roundoff(sizes.dtype) * sizes[..., :1]
    rank = jnp.sum(live, -1)
    # The directions in which W is more than roundoff, as rows. CᵀW is restricted to them if W has less than full rank.
    whole = (rank == turns[0].size)[:, None, None]
    basis = jnp.where(whole, jnp.eye(turns[0].size, dtype=sizes.dtype), jnp.where(live[..., :, None], directions, 0.0))

    def with_noise(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        u, kept, vt = svd(matmul(mixed(number), transpose(basis)))
        found = live & (kept > direction_tolerance(sizes.dtype) * sizes)
        return matmul(u * live[..., None, :].astype(u.dtype), matmul(vt, basis)), jnp.sum(found, -1)

    def again(carry: _Readings) -> _Readings:
        number, factors, ranks = carry
        others, their_ranks = with_noise(number)
        better = their_ranks > ranks
        return number + 1, jnp.where(better[:, None, None], others, factors), jnp.maximum(ranks, their_ranks)

    def unfinished(carry: _Readings) -> jax.Array:
        number, _, ranks = carry
        return (number < _MOST_READINGS) & jnp.any(ranks < rank)

    start = jnp.uint32(0), jnp.zeros_like(directions), jnp.full_like(rank, -1)
    return jax.lax.while_loop(unfinished, again, start)[1]
