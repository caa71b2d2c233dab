"""Rope torus: SO(2) per rotary plane, the rotations that commute with rotary position embeddings.

Rotary turns each plane of query and key by an angle that grows with position. An extra angle per head and plane, the
same on both, cancels in q·kᵀ. Everything is in closed form: if W_L and W_R stack a plane's two coordinates over all
rows, a step U turns the plane by ⟨W_L, U_R⟩ − ⟨W_R, U_L⟩ over ‖W_L‖² + ‖W_R‖². The gauge has d_h/2 dimensions per head.
Reference: DDC B.9; Lemma 25 for grouped queries.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Block
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.heads import BASIS, PLANE, Heads, PlaneBlock
from gauge_optax.gauges.instance import Additive, Arrays, Effect, Instance, apart_from
from gauge_optax.gauges.matrices import Matrices, head_matrices
from gauge_optax.linalg import equal_eigenvalues, real_dtype, rotation_2x2, safe_divide, transpose

_PAIRINGS = ("half", "interleaved")


def rope_torus(
    blocks: Mapping[str, Axes], pairing: str = "half", *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """One angle per head and rotary plane, which turns queries and keys together.

    Args:
      blocks: path → axes of the query and key leaves; `basis` is the rotary axis (a range of it for partial rotary).
      pairing: "half": coordinate j pairs with j + d_h/2 (Llama, NeoX); "interleaved": 2j with 2j + 1 (GPT-J).
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are angles in radians, `(*named, d_h/2)`.

    Raises:
      ValueError: malformed axes or pairing, at once; an odd basis or any mismatch with the tree, when it is first seen.

    >>> params = {"q": jnp.ones((6, 4, 8)), "k": jnp.ones((6, 2, 8))}
    >>> # 2 key heads × 4 planes.
    >>> go.rope_torus({"q": "_ (head _) basis", "k": "_ head basis"}).dim(params)
    8

    Reference: DDC B.9.
    """
    check_pairing("rope_torus", pairing)
    return block_gauge("rope_torus", Torus, {"blocks": blocks}, sizes, pairing=pairing)


def check_pairing(gauge: str, pairing: str) -> None:
    """Raises ValueError for an unknown pairing."""
    if pairing not in _PAIRINGS:
        raise binding_error(
            gauge, "bad pairing", repr(pairing), " or ".join(map(repr, _PAIRINGS)),
            "write 'half' if your rotary code splits the head in two halves, 'interleaved' if it takes neighbours",
        )  # fmt: skip


def planes(gauge: str, sizes: Mapping[str, int], blocks: Sequence[Block], pairing: str) -> tuple[PlaneBlock, ...]:
    """The blocks, with their basis split into rotary planes. Raises ValueError for a basis of odd length."""
    if sizes[BASIS] % 2:
        raise binding_error(
            gauge, f"odd basis at '{blocks[0].path}'", f"basis of length {sizes[BASIS]}",
            "an even number of rotary coordinates",
            "bind the rotary range alone, e.g. 'basis=0:4', if only part of the head is rotary",
        )  # fmt: skip
    return tuple(PlaneBlock.of(block, pairing) for block in blocks)


@dataclasses.dataclass(frozen=True)
class Torus(Additive, Heads):
    """One instance: an angle per head and plane, (*shape); the last named axis is `plane`."""

    effect: ClassVar[Effect] = "orthogonal"
    rigid: ClassVar[str | None] = BASIS
    entrywise: ClassVar[bool] = True
    breaks: ClassVar[str] = "the other pairing, a rotary part that is shorter than the basis (basis=0:32), or QK-norm"

    @classmethod
    def of(
        cls, gauge: str, key: str, named: tuple[str, ...], sizes: Mapping[str, int], blocks: Any, pairing: str
    ) -> "Torus":
        """The instance of a binding's blocks."""
        shape = (*(sizes[name] for name in named), sizes[BASIS] // 2)
        return cls(gauge, key, (*named, PLANE), shape, planes(gauge, sizes, blocks, pairing), 2)

    @staticmethod
    def axis_sizes(named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        """Lengths of axes, read off an element."""
        return dict(zip(named, element.shape, strict=False)) | {BASIS: 2 * element.shape[-1]}

    @property
    def dim(self) -> int:
        return self.heads

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        limit = math.pi * min(scale, 1.0)
        return jax.random.uniform(key, self.shape, real_dtype(), -limit, limit)

    def rotation(self, key: jax.Array, by: str) -> jax.Array:
        if by == "hadamard":
            raise binding_error(
                self.gauge, "no Hadamard rotation", "rotary planes, which turn one by one", "rotations of whole heads",
                "take it out of the list; rotary embeddings leave the values of heads alone free to rotate",
            )  # fmt: skip
        return self.sample(key, 1.0, {})

    def act(self, e: jax.Array, point: Arrays) -> Arrays:
        return self._turned_by(jnp.cos(e), jnp.sin(e), point)

    def pull(self, e: jax.Array, cotangent: Arrays) -> Arrays:
        return self.act(-e, cotangent)

    def _turned_by(self, cosine: jax.Array, sine: jax.Array, point: Arrays) -> Arrays:
        """The point with every row (l, r) replaced by (l·cos − r·sin, l·sin + r·cos)."""
        out = dict(point)
        same, crossed = jnp.stack([cosine, cosine], -1), jnp.stack([-sine, sine], -1)
        for block in self.blocks:
            rows = block.rows(out[block.path])
            swapped = jax.lax.rev(rows, (block.row_labels.index(BASIS),))
            moved = rows * self.along_basis(block, same) + swapped * self.along_basis(block, crossed)
            out[block.path] = block.write(out[block.path], moved)
        return out

    # These methods work entry by entry: products with 2 × 2 matrices would first copy a plane's pairs side by side.

    def block_gram(self, block: Block, a: jax.Array, b: jax.Array) -> jax.Array:
        left, right, at = block.rows(a), block.rows(b), block.row_labels.index(BASIS)
        diagonal, crossed = (self.block_sums(block, x * right, (BASIS,)) for x in (left, jax.lax.rev(left, (at,))))
        on_diagonal = jnp.broadcast_to(jnp.eye(2, dtype=bool), (*self.shape, 2, 2))
        return jnp.where(on_diagonal, diagonal[..., None, :], crossed[..., None, :])

    def turned_view(self, block: Block, rows: jax.Array, matrix: jax.Array) -> jax.Array:
        at = block.row_labels.index(BASIS)
        first, second = (jax.lax.slice_in_dim(rows, y, y + 1, axis=at) for y in range(2))
        return first * self.along_basis(block, matrix[..., 0, :]) + second * self.along_basis(block, matrix[..., 1, :])

    @property
    def turn(self) -> "Torus":
        return self

    @staticmethod
    def matrix(e: jax.Array) -> jax.Array:
        return transpose(rotation_2x2(e))  # rows (l, r) ↦ (l·cos − r·sin, l·sin + r·cos)

    def matrices(self, block: Block) -> tuple[int, Matrices | None]:
        return 0, head_matrices(block)

    def nearest(self, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> jax.Array:
        seen = dataclasses.replace(self, blocks=apart_from(self.blocks, others))
        gram = seen.gram(point, target)
        return jnp.arctan2(gram[..., 0, 1] - gram[..., 1, 0], gram[..., 0, 0] + gram[..., 1, 1])

    # Reading and holding ------------------------------------------------------------------------------

    @classmethod
    def read_all(cls, turns: Sequence["Torus"], point: Arrays) -> list[jax.Array]:
        first = [turn.mixed_rows(point)[..., 0, :] for turn in turns]
        return [jnp.arctan2(row[..., 1], row[..., 0]) for row in first]

    @classmethod
    def eigenbases(cls, turns: Sequence["Torus"], point: Arrays) -> list[jax.Array]:
        read = []
        for turn, phase in zip(turns, cls.read_all(turns, point), strict=True):
            gram = turn.gram(point, point)
            gap, crossed = gram[..., 0, 0] - gram[..., 1, 1], 2.0 * gram[..., 0, 1]
            equal = jnp.hypot(gap, crossed) <= equal_eigenvalues(gram.dtype) * jnp.trace(gram, axis1=-2, axis2=-1)
            angle = jnp.where(equal, phase, 0.5 * jnp.arctan2(crossed, gap))
            largest = turn.largest_entries(turn.act(-angle, point))[..., 0]
            read.append(angle + jnp.where(largest < 0, math.pi, 0.0).astype(angle.dtype))
        return read

    @classmethod
    def hold(cls, turns: Sequence["Torus"], point: Arrays, step: Arrays) -> Arrays:
        """The step with its end point turned back by the angle from start to end; exact for steps of any size."""
        out = dict(step)
        for turn in turns:
            after = {path: point[path] + out[path] for path in turn.paths}
            gram = turn.gram(point, after)
            along, across = gram[..., 0, 0] + gram[..., 1, 1], gram[..., 0, 1] - gram[..., 1, 0]
            size = jnp.sqrt(along * along + across * across)
            cosine = jnp.where(size > 0, safe_divide(along, size), 1.0)
            back = turn._turned_by(cosine, -safe_divide(across, size), after)
            out |= {path: back[path] - point[path] for path in turn.paths}
        return out

    @classmethod
    def project(
        cls, turns: Sequence["Torus"], point: Arrays, vector: Arrays, into: Mapping[Any, jax.Array] | None = None
    ) -> Arrays:
        # A plane's angle is the same in any basis, so `into` makes no difference.
        out = dict(vector)
        for turn in turns:
            swapped = {path: point[path] for path in turn.paths}
            for block in turn.blocks:
                rows = jax.lax.rev(block.rows(point[block.path]), (block.row_labels.index(BASIS),))
                swapped[block.path] = block.write(swapped[block.path], rows)
            size = turn.sums({path: jnp.square(x) for path, x in swapped.items()})
            sums = turn.sums({path: x * out[path] for path, x in swapped.items()}, (BASIS,))
            rate = safe_divide(sums[..., 1] - sums[..., 0], size)
            quarter = jnp.stack([-rate, rate], -1)  # a quarter turn takes (l, r) to (−r, l)
            for block in turn.blocks:
                moved = block.rows(swapped[block.path]) * turn.along_basis(block, quarter)
                out[block.path] = block.write(out[block.path], block.rows(out[block.path]) - moved)
        return out
