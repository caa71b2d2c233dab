"""`Permutation`: the order of units, heads or experts. It is a part without a role, because no optimizer notices it."""

import dataclasses

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block
from gauge_optax.parts.part import Arrays, Part

Indices = jax.Array | None
"""An element: (*shape, size), integers; None for the identity, which adds nothing to a program."""


@dataclasses.dataclass(frozen=True)
class Permutation(Part[Indices]):
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

    def inverse(self, e: Indices) -> Indices:
        return None if e is None else jnp.argsort(e, -1).astype(e.dtype)

    def compose(self, a: Indices, b: Indices) -> Indices:
        return b if a is None else a if b is None else jnp.take_along_axis(b, a, -1)  # (θ∘b)∘a

    def act(self, e: Indices, x: Arrays) -> Arrays:
        if e is None:
            return x
        out = dict(x)
        for block in self.blocks:
            view, kept = block.view(out[block.path]), (*self.named, self.axis)
            ordered = jnp.transpose(e, [kept.index(label) for label in block.labels if label in kept])
            lengths = iter(ordered.shape)
            laid = ordered.reshape([next(lengths) if label in kept else 1 for label in block.labels])
            moved = jnp.take_along_axis(view, laid, block.labels.index(self.axis))
            out[block.path] = block.write(out[block.path], moved)
        return out

    def push(self, e: Indices, u: Arrays, at: Arrays) -> Arrays:
        return self.act(e, u)

    def pull(self, e: Indices, g: Arrays, at: Arrays) -> Arrays:
        return self.act(self.inverse(e), g)

    def rows(self, block: Block, x: Arrays) -> jax.Array:
        """A block with one row per unit, (*shape, size, entries)."""
        view, kept = block.view(x[block.path]), (*self.named, self.axis)
        free = [k for k, label in enumerate(block.labels) if label not in kept]
        return view.transpose([*(block.labels.index(name) for name in kept), *free]).reshape(*self.shape, self.size, -1)

    def total(self, block: Block, leaf: jax.Array) -> jax.Array:
        """Sums over the entries of every unit, (*shape, size)."""
        return block.total((*self.named, self.axis), leaf)
