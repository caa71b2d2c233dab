"""The rotation of the residual stream: x ↦ x·R for everything that writes to it, undone by everything that reads it.

A norm's scale γ stands between the stream and its readers, and does not commute with R. With γ = 1 the rotation is
plain; as a move of stored leaves it is W_read ↦ γ⁻¹·Rᵀ·γ·W, and β ↦ γ·((β/γ)·R) for the norm's bias. The slice has
γ = 1, because the sizes of norms are undone before turns are.

* Reading: the polar factor of CᵀE, with C fixed noise. E are the blocks that no other turn moves, above all the
  embedding; under LayerNorm E is first projected off the ones vector.
* The vertical part of a tangent U is W·A on every writer and Aᵀ·W on every reader, with the antisymmetric A that solves
  M·A + A·M = EᵀU − UᵀE, M = EᵀE: the rotation that E shows, so that rotations of heads can be removed afterwards.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, laid_out
from gauge_optax.linalg import lyapunov_by_products, orthogonal_factor, real_dtype, transpose
from gauge_optax.parts.heads import BASIS, Heads
from gauge_optax.parts.part import Anchor, Arrays, Orthogonal, Part, Turn, changed, moves

READ, WRITE = "read", "write"
_STEPS = 200


@dataclasses.dataclass(frozen=True)
class Stream(Orthogonal, Turn[jax.Array]):
    """The one part: an orthogonal matrix, (d, d), for all layers.

    Attributes:
      size: d.
      scales: pairs of a norm's scale and the blocks behind it: its readers, which γ multiplies, and its bias, which γ
        divides.
      keeps_ones: whether the rotation keeps the vector of ones, as LayerNorm needs.
      held: whether optimizers keep the rotation from drifting.
      seen: the blocks that it is read from, because no other turn moves them.
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
        turns = [other for other in others if isinstance(other, Turn)]
        return dataclasses.replace(self, seen=tuple(b for b in self.blocks if not any(moves(t, (b,)) for t in turns)))

    def identity(self) -> jax.Array:
        return jnp.eye(self.size, dtype=real_dtype())

    def act(self, e: jax.Array, x: Arrays) -> Arrays:
        inside = self.divided(x, x)
        return x | self.divided(inside | self.rows.turned(inside, e), x, back=True)

    def push(self, e: jax.Array, u: Arrays, at: Arrays) -> Arrays:
        # Slice coordinates: the scales of norms are 1, and no step changes them.
        return u | self.rows.turned(u, e)

    def pull(self, e: jax.Array, g: Arrays, at: Arrays) -> Arrays:
        return g | self.rows.turned(g, transpose(e))

    @functools.cached_property
    def rows(self) -> Heads:
        """All rows that it turns."""
        return Heads((), (), self.blocks, self.size)

    @functools.cached_property
    def rows_seen(self) -> Heads:
        """The rows that it is read from."""
        return Heads((), (), self.seen or self.blocks, self.size)

    def divided(self, x: Arrays, at: Arrays, back: bool = False) -> Arrays:
        """Readers multiplied, and norms' biases divided, by the scales that their norms have at a point.

        Args:
          x: leaves.
          at: the point.
          back: whether to do the inverse.
        """
        out = dict(x)
        for scale, behind in self.scales:
            gamma = scale.view(at[scale.path])  # (d,), or (layers, d) where layers are stacked
            for b in behind:
                laid, rows = laid_out(gamma, scale.labels, b.labels), b.view(out[b.path])
                out[b.path] = b.write(out[b.path], rows * laid if (b.argument == READ) != back else rows / laid)
        return {path: out[path] for path in changed(self)}

    def restricted(self, matrix: jax.Array) -> jax.Array:
        """HᵀMH for a (d, d) matrix, H an orthonormal basis of what is orthogonal to the ones; M if not `keeps_ones`."""
        if not self.keeps_ones:
            return matrix
        return reflected(reflected(matrix, -1), -2)[1:, 1:]

    def embedded(self, matrix: jax.Array) -> jax.Array:
        """H·M·Hᵀ + 1·1ᵀ/d for an orthogonal (d − 1, d − 1) matrix: the inverse of `restricted`."""
        if not self.keeps_ones:
            return matrix
        embedded = jnp.zeros((self.size, self.size), matrix.dtype).at[1:, 1:].set(matrix).at[0, 0].set(1.0)
        return reflected(reflected(embedded, -1), -2)

    @classmethod
    def read_all(cls, turns: Sequence[Any], x: Arrays) -> list[jax.Array]:
        return [turn._read(x) for turn in turns]

    def _read(self, x: Arrays) -> jax.Array:
        mixed = self.restricted(self.rows_seen.mixed_rows(self.divided(x, x)))
        return self.embedded(orthogonal_factor(mixed[None])[0])

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
        """Removes the rotation that `seen` shows from all blocks of a tangent; the transpose of that if `dual`."""
        out = dict(vector)
        for turn in turns:
            seen = turn.rows_seen
            measured, moved = (turn.rows, seen) if dual else (seen, turn.rows)
            # A cotangent is multiplied where a tangent is divided.
            inside, values = turn.divided(out, x, back=dual), turn.divided(x, x)
            pairs = (seen, values), (measured, inside)
            gram, cross_gram = (turn.restricted(side.gram(values, y)) for side, y in pairs)
            generator = lyapunov_by_products(gram, -cross_gram, steps=_STEPS)
            if turn.keeps_ones:
                generator = turn.embedded(generator) - turn.embedded(jnp.zeros_like(generator))
            out |= turn.divided(inside | moved.turned(values, generator, added_to=inside), x, back=not dual)
        return out

    @classmethod
    def hold(cls, turns: Sequence[Any], x: Arrays, u: Arrays) -> Arrays:
        return cls.project([turn for turn in turns if turn.held], x, u)


def reflected(matrix: jax.Array, axis: int) -> jax.Array:
    """The matrix times the reflection that swaps the first unit vector and the ones of length one, along an axis."""
    size = matrix.shape[axis]
    normal = jnp.full(size, -1.0 / size**0.5, matrix.dtype).at[0].add(1.0)
    unit = normal / jnp.sqrt(jnp.sum(jnp.square(normal)))
    along = jnp.tensordot(matrix, unit, ((axis,), (0,)))
    return matrix - 2.0 * (along[..., :, None] * unit if axis == -1 else unit[:, None] * along[None, :])
