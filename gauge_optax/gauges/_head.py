"""The kernel of rotation gauges: stacked rows W of all blocks of a head, and a matrix acting on their common basis.

Here: Gram matrices WᵀU per head, W ↦ W·R, the torus read as 2×2 rotations of rotary planes. Not here: what turns a head
(`turning`).
"""

import dataclasses
import math
import string
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Block
from gauge_optax.gauges._scale import Values
from gauge_optax.linalg import HIGHEST, matmul, transpose

BASIS, PLANE = "basis", "plane"


@dataclasses.dataclass(frozen=True)
class PlaneBlock(Block):
    """A block whose basis axis pairs coordinates to planes; `plane` is one more name by which it sums and spreads.

    Attributes:
      pairing: "half": coordinate j pairs with j + d/2; "interleaved": 2j with 2j + 1.
    """

    pairing: str

    @classmethod
    def of(cls, block: Block, pairing: str) -> "PlaneBlock":
        """The block with this pairing."""
        own = {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}
        return cls(**own, pairing=pairing)

    @property
    def names(self) -> tuple[str, ...]:
        """Its labels, and `plane`."""
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
        """As `Block.total`; a plane's sum is that of both of its coordinates."""
        if PLANE not in named:
            return super().total(named, leaf)
        sums, at = super().total(_by_basis(named), leaf), named.index(PLANE)
        pair = (2, -1) if self.pairing == "half" else (-1, 2)
        split = sums.reshape(*sums.shape[:at], *pair, *sums.shape[at + 1 :])
        return jnp.sum(split, at if self.pairing == "half" else at + 1)

    def ids_along(self, label: str, length: int, names: Collection[str]) -> np.ndarray | None:
        """As `Block.ids_along`; coordinates of one plane have one index."""
        if label == BASIS and PLANE in names and BASIS not in names:
            return np.arange(length) % (length // 2) if self.pairing == "half" else np.arange(length) // 2
        return super().ids_along(label, length, names)


def _by_basis(named: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(BASIS if name == PLANE else name for name in named)


@dataclasses.dataclass(frozen=True)
class HeadBlock:
    """A block whose basis axis is, for a torus, read as (2, planes) or (planes, 2).

    Attributes:
      block: the bound block.
      pairing: None for full rotations, else how rotary pairs coordinates.
    """

    block: Block
    pairing: str | None

    @property
    def labels(self) -> tuple[str, ...]:
        """One label per axis of `view`."""
        if self.pairing is None:
            return self.block.labels
        pair = (BASIS, PLANE) if self.pairing == "half" else (PLANE, BASIS)
        at = self.block.labels.index(BASIS)
        return self.block.labels[:at] + pair + self.block.labels[at + 1 :]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `view`."""
        if self.pairing is None:
            return self.block.view_shape
        at = self.block.labels.index(BASIS)
        planes = self.block.view_shape[at] // 2
        pair = (2, planes) if self.pairing == "half" else (planes, 2)
        return self.block.view_shape[:at] + pair + self.block.view_shape[at + 1 :]

    def view(self, leaf: jax.Array) -> jax.Array:
        """The selected entries, axes as `labels`."""
        return self.block.view(leaf).reshape(self.shape)

    def write(self, leaf: jax.Array, view: jax.Array) -> jax.Array:
        """The leaf with the selected entries replaced."""
        return self.block.write(leaf, view.reshape(self.block.view_shape))


@dataclasses.dataclass(frozen=True)
class HeadInstance:
    """One instance of a rotation gauge on a concrete tree.

    Attributes:
      gauge: the gauge's name, for messages.
      key: the instance's captures.
      named: the axes that index independent rotations (heads; for a torus, heads and planes).
      shape: their lengths.
      size: length of the basis axis (2 for a torus).
      blocks: the leaves that share the basis.
    """

    gauge: str
    key: str
    named: tuple[str, ...]
    shape: tuple[int, ...]
    size: int
    blocks: tuple[HeadBlock, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The leaves this instance touches, each once."""
        return tuple(dict.fromkeys(b.block.path for b in self.blocks))

    @property
    def heads(self) -> int:
        """How many rotations it holds."""
        return math.prod(self.shape)

    def combined(self, block: HeadBlock, leaf: jax.Array, weights: jax.Array) -> jax.Array:
        """weightsᵀ·W over the rows of one block, weights (rows, size) the same for every head: (*shape, size, size)."""
        letters, named = self._letters(block), self._named_letters()
        lengths = {x: n for x, n in zip(letters, block.shape, strict=True) if x not in named and x != "Y"}
        # Rows are the weights' to split, not W's axes to merge: one of these may be dealt out over a mesh.
        split = weights.reshape(*lengths.values(), self.size)
        spec = f"{''.join(lengths)}Z,{''.join(letters)}->{''.join(named)}ZY"
        return jnp.einsum(spec, split, block.view(leaf), precision=HIGHEST)

    def gram(self, a: Values, b: Values) -> jax.Array:
        """Σ over rows of all blocks of aᵀb: (*shape, size, size)."""
        products = [self.block_gram(x, a[x.block.path], b[x.block.path]) for x in self.blocks]
        return sum(products[1:], products[0])

    def over_rows(self, values: Values) -> jax.Array:
        """Σ over rows of all blocks: (*shape, size)."""
        sums = [self._over_rows(x, x.view(values[x.block.path])) for x in self.blocks]
        return sum(sums[1:], sums[0])

    def swapped(self, values: Values) -> dict[str, jax.Array]:
        """Of planes, the touched leaves with rows (r, l) in place of (l, r)."""
        out = {path: values[path] for path in self.paths}
        for block in self.blocks:
            path, at = block.block.path, block.labels.index(BASIS)
            out[path] = block.write(out[path], jax.lax.rev(block.view(values[path]), (at,)))
        return out

    def turn(self, values: Values, matrix: jax.Array) -> dict[str, jax.Array]:
        """The touched leaves with W·matrix in place of W; matrix is (*shape, size, size)."""
        out = {path: values[path] for path in self.paths}
        for block in self.blocks:
            path = block.block.path
            out[path] = block.write(out[path], self.turn_view(block, block.view(values[path]), matrix))
        return out

    def added(self, sums: Values, rows: Values, matrix: jax.Array) -> dict[str, jax.Array]:
        """The touched leaves of `sums` with W·matrix added."""
        out = {path: sums[path] for path in self.paths}
        for block in self.blocks:
            path = block.block.path
            move = self.turn_view(block, block.view(rows[path]), matrix)
            out[path] = block.write(out[path], block.view(out[path]) + move)
        return out

    def block_gram(self, block: HeadBlock, a: jax.Array, b: jax.Array) -> jax.Array:
        """aᵀb over the rows of one block: (*shape, size, size)."""
        if block.pairing is not None:
            view = block.view(a)
            return self._plane_gram(block, view, view if b is a else block.view(b))
        (left, wide), (right, _) = self.matrices(block, block.view(a)), self.matrices(block, block.view(b))
        return jnp.einsum("...ir,...jr->...ij" if wide else "...ri,...rj->...ij", left, right, precision=HIGHEST)

    def turn_view(self, block: HeadBlock, view: jax.Array, matrix: jax.Array) -> jax.Array:
        """W·matrix for one block's view."""
        if block.pairing is not None:
            return self._turned_planes(block, view, matrix)
        rows, wide = self.matrices(block, view)
        turned = matmul(transpose(matrix), rows) if wide else matmul(rows, matrix)
        order, _ = self._major(block)
        back = [order.index(k) for k in range(len(order))]
        return turned.reshape([view.shape[k] for k in order]).transpose(back)

    # Planes of two coordinates, entry by entry: as matrices they would be copied with their pairs side by side.

    def _plane_gram(self, block: HeadBlock, a: jax.Array, b: jax.Array) -> jax.Array:
        swapped = jax.lax.rev(a, (block.labels.index(BASIS),))
        same, swapped = (self._over_rows(block, x * b) for x in (a, swapped))
        diagonal = np.broadcast_to(np.eye(2, dtype=bool), (*self.shape, 2, 2))
        return jax.lax.select(diagonal, *(jnp.broadcast_to(x[..., None, :], diagonal.shape) for x in (same, swapped)))

    def _over_rows(self, block: HeadBlock, view: jax.Array) -> jax.Array:
        axes = (*self.named, BASIS)
        kept = [label for label in block.labels if label in axes]
        free = tuple(k for k, label in enumerate(block.labels) if label not in axes)
        return jnp.sum(view, free).transpose([kept.index(label) for label in axes])

    def _turned_planes(self, block: HeadBlock, view: jax.Array, matrix: jax.Array) -> jax.Array:
        at = block.labels.index(BASIS)
        first, second = (jax.lax.slice_in_dim(view, y, y + 1, axis=at) for y in range(2))
        return first * self.along_basis(block, matrix[..., 0, :]) + second * self.along_basis(block, matrix[..., 1, :])

    def matrices(self, block: HeadBlock, view: jax.Array) -> tuple[jax.Array, bool]:
        """A block's view as one matrix per head: (*shape, rows, size), or transposed where it is stored so.

        Heads come first by a copy of whole rows: left to a product, it would be a transposition, entry by entry.
        """
        order, wide = self._major(block)
        lead = len(self.named)
        rows = (self.size, -1) if wide else (-1, self.size)
        return view.transpose(order).reshape(*(view.shape[k] for k in order[:lead]), *rows), wide

    def _major(self, block: HeadBlock) -> tuple[list[int], bool]:
        """The order of a view's axes with heads first and the basis at one end; whether that is before its rows."""
        labels = block.labels
        named, basis = [labels.index(name) for name in self.named], labels.index(BASIS)
        free = [k for k, label in enumerate(labels) if label not in (*self.named, BASIS)]
        wide = bool(free) and basis < free[0]
        return [*named, basis, *free] if wide else [*named, *free, basis], wide

    def stacked(self, values: Values) -> jax.Array:
        """The rows of all blocks as one matrix per head: (*shape, rows, size)."""
        parts = []
        for block in self.blocks:
            view = block.view(values[block.block.path])
            parts.append(view.transpose(self._order(block)).reshape(*self.shape, self.rows(block), self.size))
        return jnp.concatenate(parts, -2) if len(parts) > 1 else parts[0]

    def _order(self, block: HeadBlock) -> list[int]:
        labels = block.labels
        free = [k for k, label in enumerate(labels) if label not in (*self.named, BASIS)]
        return [*(labels.index(name) for name in self.named), *free, labels.index(BASIS)]

    def rows(self, block: HeadBlock) -> int:
        """How many rows of a head one block holds."""
        return math.prod(block.shape) // (math.prod(self.shape) * self.size)

    def total(self, values: Values) -> jax.Array:
        """Sum over all rows of all blocks and over the basis: (*shape)."""
        sums = []
        for block in self.blocks:
            axes = tuple(k for k, label in enumerate(block.labels) if label not in self.named)
            kept = [label for label in block.labels if label in self.named]
            order = [kept.index(name) for name in self.named]
            sums.append(jnp.transpose(jnp.sum(block.view(values[block.block.path]), axes), order))
        return sum(sums[1:], sums[0])

    def mean(self, values: Values) -> jax.Array:
        """Mean over all rows of all blocks and over the basis: (*shape)."""
        return self.total(values) / (self.size * sum(map(self.rows, self.blocks)))

    def along_basis(self, block: HeadBlock, values: jax.Array) -> jax.Array:
        """Per-head vectors (*shape, size), broadcastable to the block's view."""
        order = [
            self.named.index(x) if x in self.named else len(self.named)
            for x in block.labels
            if x in self.named or x == BASIS
        ]
        kept = jnp.transpose(values, order)
        lengths = iter(kept.shape)
        return kept.reshape([next(lengths) if x in self.named or x == BASIS else 1 for x in block.labels])

    def _letters(self, block: HeadBlock) -> list[str]:
        free = iter(string.ascii_lowercase[len(self.named) :])
        names: Mapping[str, str] = dict(zip(self.named, self._named_letters(), strict=True)) | {BASIS: "Y"}
        return [names[x] if x in names else next(free) for x in block.labels]

    def _named_letters(self) -> list[str]:
        return list(string.ascii_lowercase[: len(self.named)])
