"""Rope torus: SO(2) per rotary plane, the rotations that commute with rotary position embeddings.

Rotary turns each plane of query and key by an angle that grows with position. An extra angle per head and plane, the
same on both, cancels in q·kᵀ. The gauge has d_h/2 dimensions per head. Reference: DDC B.9; Lemma 25 for grouped
queries.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax

from gauge_optax.binding import Axes, Block
from gauge_optax.errors import binding_error
from gauge_optax.gauges.copies import Copy, Effect, drawn, label
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.parts.heads import BASIS, PLANE, PlaneBlock, Planes

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
        )


def planes(gauge: str, sizes: Mapping[str, int], blocks: Sequence[Block], pairing: str) -> tuple[PlaneBlock, ...]:
    """The blocks, with their basis split into rotary planes. Raises ValueError for a basis of odd length."""
    if sizes[BASIS] % 2:
        raise binding_error(
            gauge, f"odd basis at '{blocks[0].path}'", f"basis of length {sizes[BASIS]}",
            "an even number of rotary coordinates",
            "bind the rotary range alone, e.g. 'basis=0:4', if only part of the head is rotary",
        )
    return tuple(PlaneBlock.of(block, pairing) for block in blocks)


@dataclasses.dataclass(frozen=True)
class Torus(Copy):
    """One copy: an angle per head and plane, (*shape); the last named axis is `plane`."""

    effect: ClassVar[Effect] = "orthogonal"
    axis: ClassVar[str | None] = BASIS
    breaks: ClassVar[str] = "the other pairing, a rotary part that is shorter than the basis (basis=0:32), or QK-norm"

    @classmethod
    def of(
        cls, gauge: str, key: str, named: tuple[str, ...], sizes: Mapping[str, int], blocks: Any, **options: Any
    ) -> "Torus":
        name = label(gauge, key, blocks, pairing=options["pairing"])
        shape = (*(sizes[axis] for axis in named), sizes[BASIS] // 2)
        blocks = planes(gauge, sizes, blocks, options["pairing"])
        return cls(gauge, key, (Planes(name, (*named, PLANE), shape, blocks),))

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        return random_angles(key, self.shape, scale)

    def coordinate(self, elements: Sequence[Any]) -> None:
        return None

    @staticmethod
    def power(element: jax.Array, exponent: float | jax.Array) -> jax.Array:
        return element  # the balance of a rotation is the identity

    @staticmethod
    def axis_sizes(named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        return dict(zip(named, element.shape, strict=False)) | {BASIS: 2 * element.shape[-1]}


def random_angles(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Angles uniform in ±π·min(scale, 1)."""
    return drawn(key, shape, math.pi * min(scale, 1.0))
