"""Rope linear: the part of GL(d_h) that commutes with rotary position embeddings.

Rotary embeddings turn every plane of a head by an angle that grows with position. If the two coordinates of a plane are
read as one complex number, the linear maps that commute with this are multiplications by a complex number z per plane.
Queries become left·z and keys right/z̄: the modulus of z multiplies queries and divides keys (a size), and its angle
turns both by the same angle (a turn). The gauge has d_h dimensions per head. It is new in this library.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Matched
from gauge_optax.gauges.copies import Copy, Effect, drawn, part_label
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.torus import Torus, check_pairing, in_planes, random_angles
from gauge_optax.parts.heads import BASIS, Planes
from gauge_optax.parts.sizes import Factor


def rope_linear(
    left: Mapping[str, Axes],
    right: Mapping[str, Axes],
    pairing: str = "half",
    *,
    sizes: Mapping[str, int] | None = None,
) -> BlockGauge:
    """One complex number z per head and rotary plane: left·z and right/z̄, with planes read as complex coordinates.

    Args:
      left: path → axes of the queries; `basis` is the rotary axis (a range of it for partial rotary).
      right: path → axes of the keys.
      pairing: "half": coordinate j pairs with j + d_h/2 (Llama, NeoX); "interleaved": 2j with 2j + 1 (GPT-J).
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are pairs `(log |z|, arg z)`, `(*named, d_h/2, 2)`.

    Raises:
      ValueError: malformed axes or pairing, at once; an odd basis or any mismatch with the tree, when it is first seen.

    >>> params = {"q": jnp.ones((6, 4, 8)), "k": jnp.full((6, 4, 8), 2.0)}
    >>> gauge = go.rope_linear({"q": "_ head basis"}, {"k": "_ head basis"})
    >>> gauge.dim(params), round(float(gauge.balance(params)[""][0, 0, 0]), 4)  # ½·log 2
    (32, 0.3466)

    Reference: ours; the angles alone are DDC B.9.
    """
    check_pairing("rope_linear", pairing)
    return block_gauge("rope_linear", ComplexScale, {"left": left, "right": right}, sizes, pairing=pairing)


@dataclasses.dataclass(frozen=True)
class ComplexScale(Copy):
    """One copy. An element is (log |z|, arg z) per head and plane, (*shape, 2). The parts are moduli and angles."""

    effect: ClassVar[Effect] = "linear"
    balancing: ClassVar[Effect] = "diagonal"
    reserved: ClassVar[tuple[str, ...]] = (BASIS,)
    breaks: ClassVar[str] = Torus.breaks

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "ComplexScale":
        # The label depends on the first block, from which angles are read, but not on the order of the others.
        name = part_label(found, pairing=options["pairing"], anchor=[(b.path, b.axes) for b in found.blocks][:1])
        whole = in_planes(found, options["pairing"])
        moduli = Factor(f"{name} moduli", whole.named, whole.shape, whole.blocks)
        return cls(found.key, (moduli, Planes(f"{name} angles", whole.named, whole.shape, whole.blocks)))

    @property
    def dim(self) -> int:
        return 2 * math.prod(self.shape)

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        moduli, angles = jax.random.split(key)
        return jnp.stack([drawn(moduli, self.shape, scale), random_angles(angles, self.shape, scale)], -1)

    def split(self, element: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.exp(element[..., 0]), element[..., 1]

    def join(self, elements: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.log(elements[0]), elements[1]], -1)

    def coordinate(self, elements: Sequence[Any]) -> None:
        return None

    @classmethod
    def axis_sizes(cls, named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        return Torus.axis_sizes(named, element[..., 0])
