"""`Permutation`: the order of units, heads or experts. It is a part without a role, because no optimizer notices it."""

import dataclasses

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, laid_out
from gauge_optax.parts.part import Arrays, Isometry

Indices = jax.Array | None
"""An element: (*shape, size), integers; None for the identity, which adds no operation to a compiled program."""


class Renumbering:
    """Inverse and product of permutations. Both the part and the gauge's `Copy` inherit them."""

    @staticmethod
    def inverse(e: Indices) -> Indices:
        """The indices that put every entry back."""
        return None if e is None else jnp.argsort(e, -1).astype(e.dtype)

    @staticmethod
    def compose(a: Indices, b: Indices) -> Indices:
        """The indices of the move `a` after the move `b`: entry i of the result is b[a[i]]."""
        return b if a is None else a if b is None else jnp.take_along_axis(b, a, -1)


@dataclasses.dataclass(frozen=True)
class Permutation(Renumbering, Isometry[Indices]):
    """Entry i of the moved leaf is entry e[i] of the leaf, along one axis.

    Attributes:
      axis: the permuted axis.
      size: its length.
    """

    axis: str = ""
    size: int = 0

    @property
    def along(self) -> tuple[str, ...]:
        return (self.axis,)

    def identity(self) -> Indices:
        return None

    def act(self, e: Indices, x: Arrays) -> Arrays:
        if e is None:
            return x
        out = dict(x)
        for block in self.blocks:
            laid = laid_out(e, (*self.named, self.axis), block.labels)
            moved = jnp.take_along_axis(block.view(out[block.path]), laid, block.labels.index(self.axis))
            out[block.path] = block.write(out[block.path], moved)
        return out

    def rows(self, block: Block, x: Arrays) -> jax.Array:
        """The entries of a block, one row per unit: (*shape, size, entries)."""
        view, kept = block.view(x[block.path]), (*self.named, self.axis)
        free = [k for k, label in enumerate(block.labels) if label not in kept]
        return view.transpose([*(block.labels.index(name) for name in kept), *free]).reshape(*self.shape, self.size, -1)

    def total(self, block: Block, leaf: jax.Array) -> jax.Array:
        """The sum of a block's entries for every unit, (*shape, size)."""
        return block.total((*self.named, self.axis), leaf)
