"""Rope linear: the part of GL(d_h) that commutes with rotary position embeddings.

Rotary turns every plane of a head by an angle that grows with position. What commutes with that is one complex number z
per plane: its angle turns queries and keys alike (`torus`), its modulus scales one up and the other down (`scale`). One
instance does both: with planes as complex coordinates, it makes left·z and right/z̄. The gauge has d_h dimensions per
head. It is new in this library.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Axes, Block
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.heads import BASIS, PLANE, packable_blocks
from gauge_optax.gauges.instance import Anchor, Arrays, Effect, Instance
from gauge_optax.gauges.matrices import Matrices, head_matrices
from gauge_optax.gauges.scale import Scale, least_point
from gauge_optax.gauges.torus import Torus, check_pairing, planes
from gauge_optax.linalg import real_dtype, safe_divide


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
        """The element with these log-moduli, (*shape), and without angles."""
        return jnp.stack([logs, jnp.zeros_like(logs)], -1)

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        moduli, angles = jax.random.split(key)
        logs = jax.random.uniform(moduli, self.shape, real_dtype(), -scale, scale)
        return jnp.stack([logs, self.turn.sample(angles, scale, leaves)], -1)

    def rotation(self, key: jax.Array, by: str) -> jax.Array:
        return self.from_turn(self.turn.rotation(key, by))

    def coordinate(self, e: jax.Array, point: Arrays) -> None:
        return None

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

    def nearest(self, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> jax.Array:
        """See `Instance`: for every modulus the best angle is known, which leaves one variable per plane."""
        sides = [dataclasses.replace(self.turn, blocks=side) for side in (self.up, self.down)]
        grams = [side.gram(point, target) for side in sides]
        squares = [side.sums({path: jnp.square(point[path]) for path in side.paths}) for side in sides]
        return _nearest_pair(*squares, *grams)

    # Packing --------------------------------------------------------------------------------------------

    @property
    def packable(self) -> tuple[Block, ...]:
        return packable_blocks(self.blocks, 1)

    @property
    def constant_rows(self) -> np.ndarray:
        """One row of complex coordinates 1 + 0i."""
        parts = {BASIS: np.array([1.0, 0.0]), PLANE: np.ones(self.shape[-1])}
        first, second = (parts[label] for label in self.blocks[0].row_labels if label in parts)
        return np.outer(first, second).reshape(1, -1)

    def choose_rows(self, block: Block, point: Arrays, per_head: bool) -> jax.Array:
        moduli = jnp.linalg.norm(self.turn.rows_of(block, point), axis=-1)
        scores = safe_divide(moduli, jnp.mean(moduli, -1, keepdims=True)).reshape(-1, *moduli.shape[-2:])
        least = jnp.min(scores, 1)  # over the planes of a head
        return jnp.argmax(least if per_head else jnp.min(least, 0, keepdims=True), -1)[:, None]

    def to_constant(self, block: Block, point: Arrays, rows: jax.Array, size: float) -> tuple[jax.Array, jax.Array]:
        planes = self.turn.rows_of(block, point)
        heads = planes.reshape(-1, *planes.shape[-3:])
        row = jnp.take_along_axis(heads, rows[:, None, :, None], -2)[..., 0, :]
        modulus, angle = jnp.linalg.norm(row, axis=-1), jnp.arctan2(row[..., 1], row[..., 0])
        typical = jnp.mean(jnp.linalg.norm(heads, axis=-1), -1)
        condition = jnp.where(modulus > 0, typical / modulus, jnp.inf)
        logs = math.log(size) - jnp.log(modulus)  # the left side is multiplied by z, the right side divided by z̄
        logs = logs if block.role == "left" else -logs
        return jnp.stack([logs, -angle], -1).reshape(*self.shape, 2), jnp.max(condition, -1)

    def matrices(self, block: Block) -> tuple[int, Matrices | None]:
        return 0, head_matrices(block)

    @classmethod
    def effect_of(cls, element: jax.Array) -> Effect:
        """Returns "diagonal" for an element that is known not to turn, and "linear" for any other."""
        turns = isinstance(element, jax.core.Tracer) or np.any(np.asarray(element)[..., 1])
        return "linear" if turns else "diagonal"


@jax.jit
def _nearest_pair(a: jax.Array, c: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    """The element (x, φ) that minimises a·e²ˣ − 2·Re(e^(x − iφ)·l) + c·e⁻²ˣ − 2·Re(e^(−x − iφ)·r), per plane.

    Args:
      a: squared norms of the left side.
      c: those of the right side.
      left: cross-moments with the target, (…, 2, 2), which hold l: its real part on the diagonal.
      right: those of the right side, r.
    """
    (l_re, l_im), (r_re, r_im) = ((x[..., 0, 0] + x[..., 1, 1], x[..., 0, 1] - x[..., 1, 0]) for x in (left, right))

    def at(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.exp(x) * l_re + jnp.exp(-x) * r_re, jnp.exp(x) * l_im + jnp.exp(-x) * r_im

    def loss(x: jax.Array) -> jax.Array:
        re, im = at(x)
        return a * jnp.exp(2.0 * x) + c * jnp.exp(-2.0 * x) - 2.0 * jnp.sqrt(re * re + im * im + _TINY)

    sizes = jnp.sqrt(l_re**2 + l_im**2), jnp.sqrt(r_re**2 + r_im**2)
    ratios = (sizes[0], a), (c, sizes[1])
    starts = [jnp.where((x > 0) & (y > 0), jnp.log(safe_divide(x, y) + (x <= 0) + (y <= 0)), 0.0) for x, y in ratios]
    logs = jnp.where((a > 0) & (c > 0), least_point(loss, (*starts, jnp.zeros_like(a))), 0.0)
    re, im = at(logs)
    return jnp.stack([logs, jnp.arctan2(im, re)], -1)


_TINY = 1e-30  # under the root, so that its derivative is finite where both cross-moments are zero
