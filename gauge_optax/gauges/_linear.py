"""The kernel of GL(d) gauges: two sides of stacked rows, left·S and right·S⁻ᵀ.

Here: the action on one instance, what it reads, its balance. Not here: names and bindings (`linear`).
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block
from gauge_optax.factors import balance, full_rank, triangular, triangulars
from gauge_optax.gauges._head import HeadInstance
from gauge_optax.gauges._scale import Values
from gauge_optax.gauges.reading import Anchor, Anchored, Arrays, InstanceReading
from gauge_optax.linalg import inverse_sqrt_by_products, matmul, real_dtype, transpose
from gauge_optax.xla import singly


@dataclasses.dataclass(frozen=True)
class LinearInstance:
    """One instance of a linear gauge on a concrete tree.

    Attributes:
      left: the blocks that move as S, as rows of a basis.
      right: the blocks that move as S⁻ᵀ; same named axes, shape and size.
    """

    left: HeadInstance
    right: HeadInstance

    @property
    def gauge(self) -> str:
        """The gauge's name, for messages."""
        return self.left.gauge

    @property
    def key(self) -> str:
        """The instance's captures."""
        return self.left.key

    @property
    def named(self) -> tuple[str, ...]:
        """The axes that index matrices."""
        return self.left.named

    @property
    def shape(self) -> tuple[int, ...]:
        """Their lengths."""
        return self.left.shape

    @property
    def size(self) -> int:
        """Length of the basis."""
        return self.left.size

    @property
    def paths(self) -> tuple[str, ...]:
        """The leaves this instance touches, each once."""
        return tuple(dict.fromkeys(self.left.paths + self.right.paths))

    def move(self, values: Values, matrix: jax.Array, inverse: jax.Array) -> dict[str, jax.Array]:
        """How points and tangents move: left·S, right·S⁻ᵀ; the touched leaves."""
        return self._turned(values, matrix, transpose(inverse))

    def move_dual(self, values: Values, matrix: jax.Array, inverse: jax.Array) -> dict[str, jax.Array]:
        """How cotangents move: left·S⁻ᵀ, right·S; the touched leaves."""
        return self._turned(values, transpose(inverse), matrix)

    def _turned(self, values: Values, left: jax.Array, right: jax.Array) -> dict[str, jax.Array]:
        # A fused leaf may hold both sides.
        once = {**values, **self.left.turn(values, left)}
        turned = {**once, **self.right.turn(once, right)}
        return {path: turned[path] for path in self.paths}

    def factors(self, values: Values) -> tuple[jax.Array, jax.Array]:
        """A and B, (*shape, rows, size) each."""
        return self.left.stacked(values), self.right.stacked(values)


@dataclasses.dataclass(frozen=True)
class LinearReading(InstanceReading, Anchored):
    """The symmetric positive P with which a side is Q·P, Q of orthonormal columns; of the right side, its inverse.

    What is left is a rotation of both sides, read by `turned`.

    Attributes:
      instance: the linear instance.
    """

    instance: LinearInstance
    sequential: ClassVar[bool] = True

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return tuple(tuple(b.block for b in side.blocks) for side in (self.instance.left, self.instance.right))

    @property
    def moved(self) -> tuple[Block, ...]:
        return self.anchors[0] + self.anchors[1]

    @property
    def turned(self) -> HeadInstance:
        """Both sides as one: a rotation moves them alike."""
        left, right = self.instance.left, self.instance.right
        return dataclasses.replace(left, blocks=left.blocks + right.blocks)

    def read(self, anchor: Anchor, values: Arrays, within: jax.Array, near: bool) -> tuple[jax.Array, jax.Array]:
        on_left = anchor == self.anchors[0]
        side = self.instance.left if on_left else self.instance.right
        eye = self.identity()[..., 0, :, :]
        if near:
            gram = side.gram(values, values)
            found = within & (jnp.trace(gram, axis1=-2, axis2=-1) > 0)
            gram = jnp.where(found[..., None, None], gram, eye)
            inverse = inverse_sqrt_by_products(gram, _LEAST)
            pair = (matmul(gram, inverse), inverse)
        else:
            root = singly(triangular, side.stacked(values))
            found = within & full_rank(root)
            _, sizes, vectors = singly(jnp.linalg.svd, jnp.where(found[..., None, None], root, eye))
            pair = (_conjugated(vectors, sizes), _conjugated(vectors, 1.0 / sizes))
        return jnp.stack(pair if on_left else pair[::-1], -3), found

    def balanced(self, values: Arrays) -> jax.Array:
        found = balance(*triangulars(*self.instance.factors(values)))
        return jnp.stack([found.power(-1.0), found.power(1.0)], -3)

    def identity(self) -> jax.Array:
        size = self.instance.size
        return jnp.broadcast_to(jnp.eye(size, dtype=real_dtype()), (*self.shape, 2, size, size))

    def inverse(self, element: jax.Array) -> jax.Array:
        return element[..., ::-1, :, :]

    def dual(self, element: jax.Array) -> jax.Array:
        return transpose(element)

    def composed(self, last: jax.Array, first: jax.Array) -> jax.Array:
        (p, p_back), (q, q_back) = (jnp.unstack(x, axis=-3) for x in (last, first))
        return jnp.stack([matmul(p, q), matmul(q_back, p_back)], -3)

    def divide(self, element: jax.Array, values: Arrays) -> Arrays:
        """Elements are P and its inverse, (*shape, 2, size, size)."""
        return self.instance.move(values, element[..., 1, :, :], element[..., 0, :, :])


_LEAST = 1e-4  # λ_min/‖M‖_F of the Gram matrix after one step, down to which the way back to the slice is exact


def _conjugated(vectors: jax.Array, sizes: jax.Array) -> jax.Array:
    return matmul(transpose(vectors) * sizes[..., None, :], vectors)
