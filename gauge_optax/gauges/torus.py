"""Rope torus: SO(2) per rotary plane, the rotations that commute with rotary position embeddings.

Rotary turns each plane of query and key by an angle that grows with position; an extra angle per head and plane, the
same on both, cancels in q·kᵀ. Per plane, with coordinates (L, R) of all rows stacked, the horizontal projection is in
closed form: the angle ⟨W_L, U_R⟩ − ⟨W_R, U_L⟩ over ‖W_L‖² + ‖W_R‖². A plane is a head of size 2, so the kernels are
those of `rotation`. d_h/2 dimensions a head. Reference: DDC B.9; grouped queries: Lemma 25.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Instance, binding_error, block_specs, frozen_sizes
from gauge_optax.gauges._head import BASIS, PLANE, HeadBlock, HeadInstance, PlaneBlock
from gauge_optax.gauges.base import Element
from gauge_optax.gauges.bound import Arrays, Bound
from gauge_optax.gauges.reading import Motion, Reading
from gauge_optax.gauges.rotation import TurningGauge
from gauge_optax.gauges.turning import PlaneReading, plane_motion
from gauge_optax.linalg import real_dtype, rotation_2x2, transpose

_PAIRINGS = ("half", "interleaved")


def rope_torus(
    blocks: Mapping[str, Axes], pairing: str = "half", *, sizes: Mapping[str, int] | None = None
) -> "RopeTorus":
    """One angle per head and rotary plane, turning queries and keys together.

    Args:
      blocks: path → axes of the query and key leaves; `basis` is the rotary axis (a range of it for partial rotary).
      pairing: "half": coordinate j pairs with j + d_h/2 (Llama, NeoX); "interleaved": 2j with 2j + 1 (GPT-J).
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are angles in radians, `(*named, d_h/2)`.

    Raises:
      ValueError: malformed axes or pairing, here; an odd basis or any mismatch with the tree, when it is first seen.

    >>> params = {"q": jnp.ones((6, 4, 8)), "k": jnp.ones((6, 2, 8))}
    >>> go.rope_torus({"q": "_ (head _) basis", "k": "_ head basis"}).dim(params)  # 2 key heads × 4 planes
    8

    Reference: DDC B.9.
    """
    check_pairing("rope_torus", pairing)
    return RopeTorus(block_specs("rope_torus", "blocks", blocks, (BASIS,)), frozen_sizes("rope_torus", sizes), pairing)


def check_pairing(gauge: str, pairing: str) -> None:
    """Raises ValueError where a pairing is not one of those in use."""
    if pairing not in _PAIRINGS:
        raise binding_error(
            gauge,
            "bad pairing",
            repr(pairing),
            " or ".join(map(repr, _PAIRINGS)),
            "write 'half' if your rotary code splits the head in two halves, 'interleaved' if it takes neighbours",
        )


@dataclasses.dataclass(frozen=True)
class RopeTorus(TurningGauge):
    """See `rope_torus`."""

    name: ClassVar[str] = "rope_torus"
    breaks: ClassVar[str] = "the other pairing, a rotary part that is shorter than the basis (basis=0:32), or QK-norm"
    pairing: str

    def assemble(self, named: tuple[str, ...], instances: Sequence[Instance]) -> Bound:
        return Bound(heads=(self.planes(self.name, named, instances),))

    def planes(self, gauge: str, named: tuple[str, ...], instances: Sequence[Instance]) -> tuple[HeadInstance, ...]:
        """The instances as 2×2 rotations, on behalf of the gauge of this name."""
        return tuple(self._instance(gauge, i, named) for i in instances)

    def readings(self, bound: Bound) -> tuple[Reading, ...]:
        return tuple(map(PlaneReading, bound.rotations))

    def motion(self, bound: Bound, element: Element, inverse: Element) -> Motion:
        return plane_motion(bound.rotations, element)

    def move(self, bound: Bound, element: Element, values: Mapping[str, jax.Array]) -> Arrays:
        return plane_motion(bound.rotations, element).push(dict(values))

    def element_sizes(self, named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        return dict(zip(named, element.shape, strict=False)) | {BASIS: 2 * element.shape[-1]}

    def _instance(self, gauge: str, instance: Instance, named: tuple[str, ...]) -> HeadInstance:
        basis = dict(instance.sizes)[BASIS]
        if basis % 2:
            raise binding_error(
                gauge,
                f"odd basis at '{instance.blocks[0].path}'",
                f"basis of length {basis}",
                "an even number of rotary coordinates",
                "bind the rotary range alone, e.g. 'basis=0:4', if only part of the head is rotary",
            )
        return HeadInstance(
            gauge,
            instance.key,
            (*named, PLANE),
            (*instance.shape(named), basis // 2),
            2,
            tuple(HeadBlock(PlaneBlock.of(b, self.pairing), self.pairing) for b in instance.blocks),
        )

    def matrix(self, element: jax.Array) -> jax.Array:
        return transpose(rotation_2x2(element))  # rows (l, r) ↦ (l·cos − r·sin, l·sin + r·cos)

    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        heads = self.bound(params).rotations
        keys = jax.random.split(key, max(1, len(heads)))
        limit = math.pi * min(scale, 1.0)
        return {
            h.key: jax.random.uniform(k, h.shape, real_dtype(), -limit, limit)
            for k, h in zip(keys, heads, strict=False)
        }

    def identity(self, params: Any) -> Element:
        return {h.key: jnp.zeros(h.shape, real_dtype()) for h in self.bound(params).rotations}

    def inverse(self, element: Element) -> Element:
        return jax.tree.map(jnp.negative, element)

    def compose(self, a: Element, b: Element) -> Element:
        return jax.tree.map(jnp.add, a, b)
