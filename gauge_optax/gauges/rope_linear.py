"""Rope linear: the part of GL(d_h) that commutes with rotary position embeddings.

Rotary turns every plane of a head by an angle that grows with position. What commutes with that is one complex number z
per plane: its angle turns queries and keys alike (`torus`), its modulus scales one up and the other down (`scale`). One
instance does both: with planes as complex coordinates, it makes left·z and right/z̄. The gauge has d_h dimensions per
head. It is new in this library.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Axes, Block
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.heads import BASIS, PLANE
from gauge_optax.gauges.instance import Anchor, Arrays, Effect
from gauge_optax.gauges.matrices import Matrices, head_matrices
from gauge_optax.gauges.scale import Scale
from gauge_optax.gauges.torus import Torus, check_pairing, planes
from gauge_optax.linalg import real_dtype


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
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are `(log |z|, arg z)`, `(*named, d_h/2, 2)`.

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
class ComplexScale(Scale):
    """One instance: (log |z|, arg z) per head and plane, (*shape, 2)."""

    effect: ClassVar[Effect] = "linear"
    balancing: ClassVar[Effect] = "diagonal"
    rigid: ClassVar[str | None] = BASIS
    breaks: ClassVar[str] = Torus.breaks

    @classmethod
    def of(
        cls, gauge: str, key: str, named: tuple[str, ...], sizes: Mapping[str, int], blocks: Any, **options: Any
    ) -> "ComplexScale":
        shape = (*(sizes[name] for name in named), sizes[BASIS] // 2)
        return cls(gauge, key, (*named, PLANE), shape, planes(gauge, sizes, blocks, options["pairing"]))

    @staticmethod
    def axis_sizes(named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        return Torus.axis_sizes(named, element[..., 0])

    @property
    def dim(self) -> int:
        return 2 * math.prod(self.shape)

    @property
    def turn(self) -> Torus:
        return Torus(self.gauge, self.key, self.named, self.shape, self.blocks, 2)

    def identity(self) -> jax.Array:
        return jnp.zeros((*self.shape, 2), real_dtype())

    @staticmethod
    def from_logs(logs: jax.Array) -> jax.Array:
        return jnp.stack([logs, jnp.zeros_like(logs)], -1)

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        moduli, angles = jax.random.split(key)
        logs = jax.random.uniform(moduli, self.shape, real_dtype(), -scale, scale)
        return jnp.stack([logs, self.turn.sample(angles, scale, leaves)], -1)

    def coordinate(self, e: jax.Array, point: Arrays) -> None:
        return None

    def motion(self, e: jax.Array, change: Any, end: Arrays, turn: jax.Array | None) -> Any:
        return change if turn is None else jnp.stack([change[..., 0], turn[..., 0, 1]], -1)

    def act(self, e: jax.Array, point: Arrays) -> Arrays:
        return self.turn.act(e[..., 1], super().act(e, point))

    def pull(self, e: jax.Array, cotangent: Arrays) -> Arrays:
        return super().act(e, self.turn.pull(e[..., 1], cotangent))

    def dual(self, e: jax.Array) -> jax.Array:
        return e * jnp.array([1.0, -1.0], e.dtype)

    def factors(self, e: jax.Array, block: Block) -> jax.Array:
        return super().factors(e[..., 0], block)

    def read(self, anchor: Anchor, point: Arrays, within: jax.Array, near: bool) -> tuple[jax.Array, jax.Array]:
        logs, read = super().read(anchor, point, within, near)
        return self.from_logs(logs), read

    def from_turn(self, turn: jax.Array) -> jax.Array:
        return jnp.stack([jnp.zeros_like(turn), turn], -1)

    def balanced(self, point: Arrays) -> jax.Array:
        return self.from_logs(super().balanced(point))

    def matrices(self, block: Block) -> tuple[int, Matrices | None]:
        return 0, head_matrices(block)

    @classmethod
    def effect_of(cls, element: jax.Array) -> Effect:
        """Returns "diagonal" for an element that is known not to turn, and "linear" for any other."""
        turns = isinstance(element, jax.core.Tracer) or np.any(np.asarray(element)[..., 1])
        return "linear" if turns else "diagonal"
