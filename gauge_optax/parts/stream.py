"""The rotation of a stream: x ↦ x·R for everything that writes to it, undone by everything that reads it.

A stream is the residual stream, or a latent vector between two kernels.

A norm's scale γ stands between the stream and its readers, and does not commute with R. With γ = 1 a reader W moves to
Rᵀ·W. In general it moves to γ⁻¹·Rᵀ·γ·W, and the norm's bias β to γ·((β/γ)·R). On the slice γ = 1, because the sizes of
norms are undone before turns.

* Reading: let E be the rows of all blocks that no other turn moves, above all the embedding, and C a fixed random
  matrix. R is the polar factor of CᵀE. Under LayerNorm, the vector of ones is first projected out of E.
* The vertical part of a tangent U is W·A on every writer W, and Aᵀ·W on every reader W. The antisymmetric A solves
  M·A + A·M = EᵀU − UᵀE with M = EᵀE, where U has the rows of E. Rotations of heads do not move these rows, and can
  therefore be removed afterwards.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, laid_out
from gauge_optax.linalg import lyapunov_by_products, orthogonal_factor, real_dtype, rotation_back, transpose
from gauge_optax.parts.heads import BASIS, Heads, seen_beside
from gauge_optax.parts.part import Anchor, Arrays, Orthogonal, Part, Turn, changed

READ, WRITE = "read", "write"
_STEPS = 200


@dataclasses.dataclass(frozen=True)
class Stream(Orthogonal, Turn[jax.Array]):
    """The rotation of one stream. An element is an orthogonal matrix, (*shape, d, d); a residual stream has one alone.

    Attributes:
      size: d, the number of channels of the stream.
      scales: pairs of a norm's scale γ and the blocks behind it: the norm's readers, which are multiplied by γ before
        they turn, and its bias, which is divided by γ. Or the scale of a layer (LayerScale) and the blocks in front of
        it, the layer's writers, which are multiplied by it.
      keeps_ones: whether the rotation keeps the vector of ones, as LayerNorm needs.
      held: whether optimizers remove the rotation from every step.
      seen: the blocks that the rotation is read from, see `heads.seen_beside`.
    """

    size: int = 0
    scales: tuple[tuple[Block, tuple[Block, ...]], ...] = ()
    keeps_ones: bool = False
    held: bool = False
    seen: tuple[Block, ...] = ()

    @property
    def along(self) -> tuple[str, ...]:
        return (BASIS,)

    @property
    def passes(self) -> tuple[Block, ...]:
        return tuple(scale for scale, _ in self.scales)

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return (self.seen,) if self.seen else ()

    def beside(self, others: Sequence[Part[Any]]) -> "Stream":
        return dataclasses.replace(self, seen=seen_beside(self, [q for q in others if isinstance(q, Turn)]))

    def identity(self) -> jax.Array:
        return jnp.broadcast_to(jnp.eye(self.size, dtype=real_dtype()), (*self.shape, self.size, self.size))

    def act(self, e: jax.Array, x: Arrays) -> Arrays:
        inside = self.divided(x, x)
        return x | self.divided(inside | self.rows.turned(inside, e), x, back=True)

    def push(self, e: jax.Array, u: Arrays, at: Arrays) -> Arrays:
        # Here `at` and `u` are in slice coordinates, where the scales of norms are 1 and no step changes them.
        return u | self.rows.turned(u, e)

    def pull(self, e: jax.Array, g: Arrays, at: Arrays) -> Arrays:
        return g | self.rows.turned(g, transpose(e))

    @functools.cached_property
    def rows(self) -> Heads:
        """The rows of all blocks that the rotation moves."""
        return Heads(self.named, self.shape, self.blocks, self.size)

    @functools.cached_property
    def rows_seen(self) -> Heads:
        """The rows of the blocks that the rotation is read from."""
        return Heads(self.named, self.shape, self.seen or self.blocks, self.size)

    def divided(self, x: Arrays, at: Arrays, back: bool = False) -> Arrays:
        """Multiplies kernels behind or in front of a scale by this scale, and divides a norm's bias by its own scale.

        Args:
          x: bound leaves.
          at: the point from which the scales are taken.
          back: True for the inverse.
        """
        out = dict(x)
        for scale, behind in self.scales:
            gamma = scale.view(at[scale.path])  # (d,), or (layers, d) where layers are stacked
            for b in behind:
                laid, rows = laid_out(gamma, scale.labels, b.labels), b.view(out[b.path])
                out[b.path] = b.write(out[b.path], rows * laid if (b.argument == READ) != back else rows / laid)
        return {path: out[path] for path in changed(self)}

    def restricted(self, matrix: jax.Array) -> jax.Array:
        """HᵀMH for a (…, d, d) matrix M, where the columns of H are an orthonormal basis of the vectors of sum zero.

        It is M itself without `keeps_ones`.
        """
        if not self.keeps_ones:
            return matrix
        return reflected(reflected(matrix, -1), -2)[..., 1:, 1:]

    def embedded(self, matrix: jax.Array) -> jax.Array:
        """H·M·Hᵀ + 1·1ᵀ/d for orthogonal (…, d − 1, d − 1) matrices M: 1 is the vector of ones, H that of `restricted`.

        The result keeps 1, and `restricted` takes it back to M. Without `keeps_ones` it is M itself, (…, d, d).
        """
        if not self.keeps_ones:
            return matrix
        larger = jnp.zeros((*matrix.shape[:-2], self.size, self.size), matrix.dtype)
        embedded = larger.at[..., 1:, 1:].set(matrix).at[..., 0, 0].set(1.0)
        return reflected(reflected(embedded, -1), -2)

    @classmethod
    def read_all(cls, turns: Sequence[Any], x: Arrays) -> list[jax.Array]:
        return [turn._read(x) for turn in turns]

    def _read(self, x: Arrays) -> jax.Array:
        mixed = self.restricted(self.rows_seen.mixed_rows(self.divided(x, x)))
        factors = orthogonal_factor(mixed.reshape(-1, *mixed.shape[-2:]))
        return self.embedded(factors.reshape(mixed.shape))

    @classmethod
    def project(
        cls, turns: Sequence[Any], x: Arrays, u: Arrays, into: Mapping[Any, jax.Array] | None = None
    ) -> Arrays:
        return cls._without_rotation(turns, x, u, dual=False)

    @classmethod
    def project_dual(cls, turns: Sequence[Any], x: Arrays, g: Arrays) -> Arrays:
        return cls._without_rotation(turns, x, g, dual=True)

    @classmethod
    def _without_rotation(cls, turns: Sequence[Any], x: Arrays, vector: Arrays, dual: bool) -> Arrays:
        """Measures on the blocks `seen` how a tangent rotates the stream, and removes this rotation from all blocks.

        If `dual`, it applies the transpose of this projection to a cotangent.
        """
        out = dict(vector)
        for turn in turns:
            seen = turn.rows_seen
            measured, moved = (turn.rows, seen) if dual else (seen, turn.rows)
            # A cotangent moves by the inverse transpose: it is multiplied by a scale that divides a tangent.
            inside, values = turn.divided(out, x, back=dual), turn.divided(x, x)
            pairs = (seen, values), (measured, inside)
            gram, cross_gram = (turn.restricted(side.gram(values, y)) for side, y in pairs)
            generator = lyapunov_by_products(gram, -cross_gram, steps=_STEPS)
            if turn.keeps_ones:
                generator = turn.embedded(generator) - turn.embedded(jnp.zeros_like(generator))
            out |= turn.divided(inside | moved.turned(values, generator, added_to=inside), x, back=not dual)
        return out

    @classmethod
    def hold(cls, turns: Sequence[Any], x: Arrays, u: Arrays, backs: dict[Any, Any]) -> Arrays:
        """Turns the end point of the step back, so that the step does not rotate the rows of the blocks `seen`."""
        out = dict(u)
        for turn in turns:
            if turn.held:
                after = {path: x[path] + out[path] for path in x}
                start, end = turn.divided(x, x), turn.divided(after, after)
                step = {path: end[path] - start[path] for path in end}
                gram, cross_gram = (turn.restricted(turn.rows_seen.gram(start, y)) for y in (start, step))
                back = rotation_back(gram, cross_gram, steps=_STEPS // 2)
                if turn.keeps_ones:
                    back = turn.embedded(back) - turn.embedded(jnp.zeros_like(back))
                moved = turn.rows.turned(end, back, added_to=jax.tree.map(jnp.zeros_like, end))
                moved = turn.divided(moved, after, back=True)
                out |= {path: out[path] + moved[path] for path in moved}
        return out


def reflected(matrix: jax.Array, axis: int) -> jax.Array:
    """The matrix times, along an axis, the reflection that swaps the vectors (1, 0, …, 0) and (1, …, 1)/√d."""
    size = matrix.shape[axis]
    normal = jnp.full(size, -1.0 / size**0.5, matrix.dtype).at[0].add(1.0)
    unit = normal / jnp.sqrt(jnp.sum(jnp.square(normal)))
    along = jnp.tensordot(matrix, unit, ((axis,), (0,)))
    return matrix - 2.0 * (along[..., :, None] * unit if axis == -1 else unit[:, None] * along[..., None, :])
