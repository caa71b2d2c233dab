"""Turns: rotations of a head's basis and of its rotary planes. The residual stream's rotation is in `stream`.

Rotations of heads. Let W be the rows of a head and C a fixed random matrix.

* Reading: the polar factor Q of CᵀW obeys Q(W·R) = Q(W)·R. No reading is continuous everywhere (CᵀW may lose rank), so
  that it is taken once, at `init`. In float32, CᵀW nearly loses a direction of W in 0.3 % of heads of 32 dimensions and
  in 6 % of those of 128 (normal weights, 300 heads). Those take another C.
* Hold: the part of a step U that rotates is W·A, where A solves M·A + A·M = WᵀU − UᵀW with M = WᵀW.

A closed path of horizontal steps can return with a rotated head (holonomy), so that no function of the weights measures
rotation: the turning of a head is the accumulated vertical part of its steps.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block
from gauge_optax.linalg import HIGHEST, direction_tolerance, matmul, real_dtype, safe_divide, svd, transpose
from gauge_optax.parts.heads import BASIS, Heads, by_size, stack_heads, unstack_heads
from gauge_optax.parts.part import Arrays, Turn


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
    def along(self) -> str | None:
        return BASIS

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
            for turn, generator in zip(same, unstack_heads(lyapunov(gram, -moment), same), strict=True):
                if into is not None:
                    generator = matmul(matmul(into[turn], generator), transpose(into[turn]))
                out |= turn.added(out, x, generator)
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
    def along(self) -> str | None:
        return BASIS

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


_Solving = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def lyapunov(m: jax.Array, k: jax.Array, steps: int = 24) -> jax.Array:
    """The antisymmetric solution A of M·A + A·M = K − Kᵀ, by conjugate gradients preconditioned by the diagonal.

    It uses matrix products alone, because an eigendecomposition of M, as in `linalg.lyapunov`, would take most of the
    time of a step.

    Args:
      m: (…, d, d), symmetric positive semi-definite.
      k: (…, d, d), any.
      steps: the largest number of iterations. In exact arithmetic d(d − 1)/2 are enough for every M.

    Returns:
      A (…, d, d), antisymmetric. The solution of a head that has converged does not change any more.
    """
    size = m.shape[-1]
    diagonal = jnp.diagonal(m, axis1=-2, axis2=-1)
    weight = safe_divide(jnp.ones(()), diagonal[..., :, None] + diagonal[..., None, :])

    def inner(a: jax.Array, b: jax.Array) -> jax.Array:
        # This is an einsum, because on a CPU a sum over the last two axes takes longer than the products of a step.
        return jnp.einsum("...ij,...ij->...", a, b, precision=HIGHEST)[..., None, None]

    def step(carry: _Solving, _: None) -> tuple[_Solving, None]:
        solution, residual, direction, energy = carry
        product = matmul(m, direction)  # direction D is antisymmetric: D·M = −(M·D)ᵀ, ⟨D, M·D + D·M⟩ = 2⟨D, M·D⟩
        rate = jnp.where(energy > done, safe_divide(energy, 2.0 * inner(direction, product)), 0.0)
        residual = residual - rate * (product - transpose(product))
        scaled = weight * residual
        fresh = inner(residual, scaled)
        return (solution + rate * direction, residual, scaled + safe_divide(fresh, energy) * direction, fresh), None

    # The upper triangle is mirrored, because the arrays that XLA computes, above all on a mesh, can have a symmetric
    # part of roundoff. The iteration cannot reduce such a part, and would amplify it.
    above = jnp.triu(k - transpose(k), 1)
    residual = above - transpose(above)
    scaled = weight * residual
    energy = inner(residual, scaled)
    done = energy * jnp.square(0.1 * jnp.finfo(m.dtype).eps)
    start = (jnp.zeros_like(k), residual, scaled, energy)
    (solution, *_), _ = jax.lax.scan(step, start, length=min(steps, 2 + size * (size - 1) // 2))
    return solution
