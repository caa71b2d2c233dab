"""Heads: the rows of blocks that share a basis, and the turns of that basis, by rotations or by rotary planes.

The blocks have a basis axis of one length, `size`. Stacked, the rows of all of them form one matrix W (rows × size) per
head, and a rotation R of the basis takes W to W·R. `Heads` has the sums and products over these rows, for any layout of
the leaves. `Rotation` and `Planes` are the turns of heads; `sizes.Stretch` is what GL(d) does to the length of rows,
and `stream` has the rotation of the residual stream.

Let C be a fixed random matrix.

* Reading: the polar factor Q of CᵀW obeys Q(W·R) = Q(W)·R. No reading is continuous everywhere (CᵀW may lose rank), so
  that it is taken once, at `init`. In float32, CᵀW nearly loses a direction of W in 0.3 % of heads of 32 dimensions and
  in 6 % of those of 128 (normal weights, 300 heads). Those take another C.
* Hold: the part of a step U that rotates is W·A, where A solves M·A + A·M = WᵀU − UᵀW with M = WᵀW.

A closed path of horizontal steps can return with a rotated head (holonomy), so that no function of the weights measures
rotation: the turning of a head is the accumulated vertical part of its steps.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Block
from gauge_optax.linalg import (
    HIGHEST,
    direction_tolerance,
    lyapunov_by_products,
    matmul,
    real_dtype,
    safe_divide,
    svd,
    transpose,
)
from gauge_optax.parts.part import Arrays, Turn
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
        (left, _, wide), (right, _, _) = (self.as_matrices(block, block.rows(x)) for x in (a, b))
        return jnp.einsum("...ir,...jr->...ij" if wide else "...ri,...rj->...ij", left, right, precision=HIGHEST)

    def turned(self, point: Mapping[str, jax.Array], matrix: jax.Array, added_to: Arrays | None = None) -> Arrays:
        """All leaves of the blocks with W·matrix in place of W, or those of `added_to` with W·matrix added.

        Args:
          point: bound leaves, with the rows W.
          matrix: (*shape, size, size).
          added_to: bound leaves.
        """
        out = {path: (added_to or point)[path] for path in self.paths}
        for block in self.blocks:
            rows = self.turned_view(block, block.rows(point[block.path]), matrix)
            out[block.path] = block.write(out[block.path], block.rows(out[block.path]) + rows if added_to else rows)
        return out

    def turned_view(self, block: Block, rows: jax.Array, matrix: jax.Array) -> jax.Array:
        """W·matrix for one block's view."""
        matrices, order, wide = self.as_matrices(block, rows)
        # Also one row (a bias) is a product, not a sum: XLA:CPU may fuse a sum with the write of the same rows into one
        # loop, which then reads what it has overwritten (openxla/xla issue 49176).
        product = matmul(transpose(matrix), matrices) if wide else matmul(matrices, matrix)
        return product.reshape([rows.shape[k] for k in order]).transpose([order.index(k) for k in range(len(order))])

    def as_matrices(self, block: Block, rows: jax.Array) -> tuple[jax.Array, list[int], bool]:
        """A block's view as one matrix per head, (*shape, rows, size).

        This transpose to heads first copies whole rows. A matrix product that had to do it would move single entries.

        Returns:
          The matrices; the order of the view's axes in them; whether they are stored, and left, transposed.
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


def stack_heads(arrays: Sequence[jax.Array]) -> jax.Array:
    """Concatenates matrices of several parts, (*shape, rows, columns), to one array, (heads, rows, columns)."""
    return jnp.concatenate([x.reshape(-1, *x.shape[-2:]) for x in arrays])


def unstack_heads(stacked: jax.Array, turns: Sequence[Any]) -> list[jax.Array]:
    """The inverse of `stack_heads`."""
    parts = jnp.split(stacked, np.cumsum([turn.heads for turn in turns])[:-1].tolist())
    return [x.reshape(*turn.shape, *x.shape[1:]) for turn, x in zip(turns, parts, strict=True)]


def by_size(turns: Sequence[Any]) -> list[list[Any]]:
    """Parts grouped by the size of their heads, ascending."""
    return [[turn for turn in turns if turn.size == size] for size in sorted({turn.size for turn in turns})]


# Turns ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rotation(Heads, Turn[jax.Array]):
    """W ↦ W·R for the rows W of every head. Elements are R, (*shape, d, d).

    Attributes:
      size: d.
      of_linear: whether it is the orthogonal part of GL(d), where a head of less than full rank keeps its basis.
    """

    size: int = 0
    of_linear: bool = False

    @property
    def along(self) -> tuple[str, ...]:
        return (BASIS,)

    def identity(self) -> jax.Array:
        return jnp.broadcast_to(jnp.eye(self.size, dtype=real_dtype()), (*self.shape, self.size, self.size))

    def inverse(self, e: jax.Array) -> jax.Array:
        return transpose(e)

    def compose(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return matmul(b, a)  # W ↦ (W·b)·a

    def act(self, e: jax.Array, x: Arrays) -> Arrays:
        return x | self.turned(x, e)

    # Heads of one size are one batch, in all layers.

    @classmethod
    def read_all(cls, turns: Sequence[Any], x: Arrays) -> list[jax.Array]:
        factors: dict[Any, jax.Array] = {}
        for same in by_size(turns):
            paths = sorted({path for turn in same for path in turn.paths})
            polar = _polar_factors(tuple(same), {path: x[path] for path in paths})
            factors |= zip(same, unstack_heads(polar, same), strict=True)
        return [turn._or_identity(factors[turn]) if turn.of_linear else factors[turn] for turn in turns]

    def _or_identity(self, r: jax.Array) -> jax.Array:
        whole = jnp.sum(jnp.square(r), (-2, -1), keepdims=True) > self.size - 0.5  # else a partial isometry
        return jnp.where(whole, r, self.identity())

    @classmethod
    def project(
        cls, turns: Sequence[Any], x: Arrays, u: Arrays, into: Mapping[Any, jax.Array] | None = None
    ) -> Arrays:
        out = dict(u)
        for same in by_size(turns):
            gram = stack_heads([turn.gram(x, x) for turn in same])
            moment = stack_heads([turn.gram(x, u) for turn in same])
            basis = None if into is None else stack_heads([into[turn] for turn in same])
            if basis is not None:
                # The equation is solved on the slice, because the residual error of the iteration depends on the basis.
                gram, moment = (matmul(matmul(transpose(basis), y), basis) for y in (gram, moment))
            # The heads of all layers are solved as one batch. Each part then multiplies by its share of the solution.
            for turn, generator in zip(same, unstack_heads(lyapunov_by_products(gram, -moment), same), strict=True):
                if into is not None:
                    generator = matmul(matmul(into[turn], generator), transpose(into[turn]))
                out |= turn.turned(x, generator, added_to=out)
        return out


@dataclasses.dataclass(frozen=True)
class Planes(Heads, Turn[jax.Array]):
    """An angle per head and rotary plane, (*shape); the last named axis is `plane`. All is in closed form.

    If W_L and W_R stack a plane's two coordinates over all rows, a step U turns the plane by ⟨W_L, U_R⟩ − ⟨W_R, U_L⟩
    over ‖W_L‖² + ‖W_R‖². Products with 2 × 2 matrices would first copy a plane's pairs side by side, so that everything
    is computed entry by entry.
    """

    size: int = 2

    # XLA keeps less in memory if what is computed entry by entry comes after what is computed by matrix products.
    last: ClassVar[bool] = True

    @property
    def along(self) -> tuple[str, ...]:
        return (BASIS,)

    def identity(self) -> jax.Array:
        return jnp.zeros(self.shape, real_dtype())

    def inverse(self, e: jax.Array) -> jax.Array:
        return -e

    def compose(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return a + b

    def act(self, e: jax.Array, x: Arrays) -> Arrays:
        return self._turned_by(jnp.cos(e), jnp.sin(e), x)

    def _turned_by(self, cosine: jax.Array, sine: jax.Array, x: Arrays) -> Arrays:
        """The point with every row (l, r) replaced by (l·cos − r·sin, l·sin + r·cos)."""
        out = dict(x)
        same, crossed = jnp.stack([cosine, cosine], -1), jnp.stack([-sine, sine], -1)
        for block in self.blocks:
            rows = block.rows(out[block.path])
            swapped = jax.lax.rev(rows, (block.row_labels.index(BASIS),))
            moved = rows * self.along_basis(block, same) + swapped * self.along_basis(block, crossed)
            out[block.path] = block.write(out[block.path], moved)
        return out

    def block_gram(self, block: Block, a: jax.Array, b: jax.Array) -> jax.Array:
        left, right, at = block.rows(a), block.rows(b), block.row_labels.index(BASIS)
        diagonal, crossed = (self.block_sums(block, x * right, (BASIS,)) for x in (left, jax.lax.rev(left, (at,))))
        on_diagonal = jnp.broadcast_to(jnp.eye(2, dtype=bool), (*self.shape, 2, 2))
        return jnp.where(on_diagonal, diagonal[..., None, :], crossed[..., None, :])

    def turned_view(self, block: Block, rows: jax.Array, matrix: jax.Array) -> jax.Array:
        at = block.row_labels.index(BASIS)
        first, second = (jax.lax.slice_in_dim(rows, y, y + 1, axis=at) for y in range(2))
        return first * self.along_basis(block, matrix[..., 0, :]) + second * self.along_basis(block, matrix[..., 1, :])

    @classmethod
    def read_all(cls, turns: Sequence[Any], x: Arrays) -> list[jax.Array]:
        first = [turn.mixed_rows(x)[..., 0, :] for turn in turns]
        return [jnp.arctan2(row[..., 1], row[..., 0]) for row in first]

    @classmethod
    def hold(cls, turns: Sequence[Any], x: Arrays, u: Arrays) -> Arrays:
        """The step with its end point turned back by the angle from start to end; exact for steps of any size."""
        out = dict(u)
        for turn in turns:
            after = {path: x[path] + out[path] for path in turn.paths}
            gram = turn.gram(x, after)
            along, across = gram[..., 0, 0] + gram[..., 1, 1], gram[..., 0, 1] - gram[..., 1, 0]
            size = jnp.sqrt(along * along + across * across)
            cosine = jnp.where(size > 0, safe_divide(along, size), 1.0)
            back = turn._turned_by(cosine, -safe_divide(across, size), after)
            out |= {path: back[path] - x[path] for path in turn.paths}
        return out

    @classmethod
    def project(
        cls, turns: Sequence[Any], x: Arrays, u: Arrays, into: Mapping[Any, jax.Array] | None = None
    ) -> Arrays:
        # A plane's angle is the same in any basis, so `into` makes no difference.
        out = dict(u)
        for turn in turns:
            swapped = {path: x[path] for path in turn.paths}
            for block in turn.blocks:
                rows = jax.lax.rev(block.rows(x[block.path]), (block.row_labels.index(BASIS),))
                swapped[block.path] = block.write(swapped[block.path], rows)
            size = turn.sums({path: jnp.square(y) for path, y in swapped.items()})
            sums = turn.sums({path: y * out[path] for path, y in swapped.items()}, (BASIS,))
            rate = safe_divide(sums[..., 1] - sums[..., 0], size)
            quarter = jnp.stack([-rate, rate], -1)  # a quarter turn takes (l, r) to (−r, l)
            for block in turn.blocks:
                moved = block.rows(swapped[block.path]) * turn.along_basis(block, quarter)
                out[block.path] = block.write(out[block.path], block.rows(out[block.path]) - moved)
        return out


_Readings = tuple[jax.Array, jax.Array, jax.Array]
_MOST_READINGS = 4  # a head of less than full rank uses all of them, because every C loses a direction


@functools.partial(jax.jit, static_argnums=0)  # outside jit, a loop would be compiled anew at every call
def _polar_factors(turns: tuple[Any, ...], point: Arrays) -> jax.Array:
    """The polar factors of CᵀW for heads of one size, (heads, d_h, d_h), each with the first C that loses no direction.

    Where W itself has less than full rank, the first C that keeps the most directions is used. The factor is then a
    partial isometry, because directions that are roundoff have no polar factor.
    """

    def with_noise(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        u, sizes, vt = svd(stack_heads([turn.mixed_rows(point, number) for turn in turns]))
        live = sizes > direction_tolerance(sizes.dtype) * sizes[..., :1]
        return matmul(u * live[..., None, :].astype(u.dtype), vt), jnp.sum(live, -1)

    def again(carry: _Readings) -> _Readings:
        number, factors, ranks = carry
        others, their_ranks = with_noise(number)
        better = their_ranks > ranks
        return number + 1, jnp.where(better[:, None, None], others, factors), jnp.maximum(ranks, their_ranks)

    def unfinished(carry: _Readings) -> jax.Array:
        number, _, ranks = carry
        return (number < _MOST_READINGS) & jnp.any(ranks < turns[0].size)

    first = (jnp.uint32(1), *with_noise(jnp.uint32(0)))
    return jax.lax.while_loop(unfinished, again, first)[1]
