"""Rope torus: a rotation of every rotary plane. Such rotations commute with rotary position embeddings.

Rotary embeddings turn each plane of queries and keys by an angle that grows with position. If both are turned by one
more angle per head and plane, it cancels in q·kᵀ. The gauge has d_h/2 dimensions per head. Reference: DDC B.9; Lemma 25
for grouped queries.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Matched
from gauge_optax.errors import binding_error
from gauge_optax.gauges.copies import Compact, Effect, drawn, part_label
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
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

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


def in_planes(found: Matched, pairing: str) -> Matched:
    """`found` with the basis split into rotary planes. They are a further axis of elements, named `plane`.

    Raises:
      ValueError: an odd basis, or an axis that the user calls `plane`.
    """
    size = found.sizes[BASIS]
    if PLANE in found.named:
        raise binding_error(
            found.gauge, f"reserved name '{PLANE}' at '{found.blocks[0].path}'", f'"{found.blocks[0].axes}"',
            "other names: it is the axis of elements that counts rotary planes", "rename the axis, or write '_'")
    if size % 2:
        raise binding_error(
            found.gauge, f"odd basis at '{found.blocks[0].path}'", f"basis of length {size}",
            "an even number of rotary coordinates",
            "bind the rotary range alone, e.g. 'basis=0:4', if only part of the head is rotary",
        )
    blocks = tuple(PlaneBlock.of(block, pairing) for block in found.blocks)
    return found._replace(named=(*found.named, PLANE), sizes={**found.sizes, PLANE: size // 2}, blocks=blocks)


@dataclasses.dataclass(frozen=True)
class Torus(Compact):
    """One copy. An element is an angle per head and plane, (*shape); the last named axis is `plane`."""

    effect: ClassVar[Effect] = "orthogonal"
    reserved: ClassVar[tuple[str, ...]] = (BASIS,)
    breaks: ClassVar[str] = "the other pairing, a rotary part that is shorter than the basis (basis=0:32), or QK-norm"

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "Torus":
        name, whole = part_label(found, pairing=options["pairing"]), in_planes(found, options["pairing"])
        return cls(found.key, (Planes(name, whole.named, whole.shape, whole.blocks),))

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        return random_angles(key, self.shape, scale)

    @classmethod
    def axis_sizes(cls, named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        return dict(zip(named, element.shape, strict=False)) | {BASIS: 2 * element.shape[-1]}


def random_angles(key: jax.Array, shape: tuple[int, ...], scale: float | jax.Array) -> jax.Array:
    """Random angles in radians, uniform between −π·min(scale, 1) and π·min(scale, 1)."""
    at_most = jnp.minimum(scale, 1.0) if isinstance(scale, jax.core.Tracer) else min(scale, 1.0)
    return drawn(key, shape, math.pi * at_most)
