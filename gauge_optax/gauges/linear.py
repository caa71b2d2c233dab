"""Linear gauges: GL(d_h) acting on the basis that two factors share, and what of it commutes with rotary embeddings.

A product M = A·Bᵀ is unchanged by (A, B) ↦ (A·S, B·S⁻ᵀ) for every invertible S: queries and keys without rotary, values
and outputs (rows of W_O), LoRA factors. With Gram matrices H_A = AᵀA and H_B = BᵀB the least-norm representative is the
balanced one, H_A = H_B, reached by S = (H_A⁻¹ # H_B)^{1/2}, # the geometric mean; orbit tangents are (A·Z, −B·Zᵀ). Left
over is the rotation group, which has holonomy: no coordinate. d_h² dimensions a head.

Rotary turns every plane of a head by an angle that grows with position. What commutes with that is one complex number
per plane: an angle, turning both sides (the torus of `torus`), and a modulus, traded between them (a rescale per
plane). Both are built from those gauges' kernels, so that every transformation takes `rope_linear`; d_h dimensions a
head.

References: When Equivalent Weights Train Differently, §1, §3; docs/design.md §5. `rope_linear` is ours.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Axes, Instance, block_specs, check_specs, frozen_sizes
from gauge_optax.gauges._head import BASIS, HeadBlock, HeadInstance
from gauge_optax.gauges._linear import LinearInstance, LinearReading
from gauge_optax.gauges._scale import ScaleInstance, ScaleReading, scale_factors, scale_motion
from gauge_optax.gauges.base import BoundGauge, Effect, Element
from gauge_optax.gauges.bound import Arrays, Bound
from gauge_optax.gauges.reading import Motion, Reading
from gauge_optax.gauges.rotation import HeadRotation, haar
from gauge_optax.gauges.torus import RopeTorus, check_pairing
from gauge_optax.gauges.turning import PlaneReading, WholeTurnReading, plane_motion
from gauge_optax.linalg import matmul, real_dtype, transpose
from gauge_optax.xla import singly


def head_linear(
    left: Mapping[str, Axes], right: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None
) -> "HeadLinear":
    """GL(d_h) acting on every head: left·S and right·S⁻ᵀ along the `basis` axis.

    Args:
      left: path → axes of one factor (queries; values and their bias; LoRA's A). One `basis` axis; `head` indexes the
        group; `_` is summed.
      right: path → axes of the other (keys; the output kernel, "head basis _"; LoRA's B).
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are S, `(*named, d_h, d_h)`.

    Raises:
      ValueError: malformed axes, here; any mismatch with the tree, when it is first seen.

    >>> gauge = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
    >>> params = {"a": jnp.array([[4.0, 0.0], [0.0, 1.0]]), "b": jnp.array([[1.0, 0.0], [0.0, 9.0]])}
    >>> balanced = gauge.act(gauge.balance(params), params)
    >>> jax.tree.map(lambda x: x.round(4).tolist(), balanced)  # the product is diag(4, 9)
    {'a': [[2.0, 0.0], [0.0, 3.0]], 'b': [[2.0, 0.0], [0.0, 3.0]]}

    Reference: When Equivalent Weights Train Differently, §1. Not a symmetry under RoPE (`rope_linear`) or QK-norm; of
    values that are normalised `head_rotation` is left. In float32 for conditions of S up to about 1e2.
    """
    return _linear("head_linear", left, right, sizes, HeadLinear)


def rope_linear(
    left: Mapping[str, Axes],
    right: Mapping[str, Axes],
    pairing: str = "half",
    *,
    sizes: Mapping[str, int] | None = None,
) -> "RopeLinear":
    """One complex number z per head and rotary plane: left·z and right/z̄, with planes read as complex coordinates.

    Args:
      left: path → axes of the queries; `basis` is the rotary axis (a range of it for partial rotary).
      right: path → axes of the keys.
      pairing: "half": coordinate j pairs with j + d_h/2 (Llama, NeoX); "interleaved": 2j with 2j + 1 (GPT-J).
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are `(log |z|, arg z)`, `(*named, d_h/2, 2)`.

    Raises:
      ValueError: malformed axes or pairing, here; an odd basis or any mismatch with the tree, when it is first seen.

    >>> params = {"q": jnp.ones((6, 4, 8)), "k": jnp.full((6, 4, 8), 2.0)}
    >>> gauge = go.rope_linear({"q": "_ head basis"}, {"k": "_ head basis"})
    >>> gauge.dim(params), round(float(gauge.balance(params)[""][0, 0, 0]), 4)  # ½·log 2
    (32, 0.3466)

    Reference: ours; the angles alone are DDC B.9.
    """
    check_pairing("rope_linear", pairing)
    return _linear("rope_linear", left, right, sizes, RopeLinear, pairing)


def _linear(name: str, left: Any, right: Any, sizes: Any, kind: Any, *more: Any) -> Any:
    specs = block_specs(name, "left", left, (BASIS,)) + block_specs(name, "right", right, (BASIS,))
    frozen = frozen_sizes(name, sizes)
    check_specs(name, specs, frozen)
    return kind(specs, frozen, *more)


@dataclasses.dataclass(frozen=True)
class HeadLinear(BoundGauge):
    """See `head_linear`."""

    name: ClassVar[str] = "head_linear"
    breaks: ClassVar[str] = HeadRotation.breaks.replace("rope_torus", "rope_linear")
    balancing: ClassVar[Effect] = "linear"
    reserved: ClassVar[tuple[str, ...]] = (BASIS,)

    def assemble(self, named: tuple[str, ...], instances: Sequence[Instance]) -> Bound:
        return Bound(linear=tuple(self._instance(i, named) for i in instances))

    def _instance(self, instance: Instance, named: tuple[str, ...]) -> LinearInstance:
        def side(role: str) -> HeadInstance:
            blocks = tuple(HeadBlock(b, None) for b in instance.blocks if b.role == role)
            size = dict(instance.sizes)[BASIS]
            return HeadInstance(self.name, instance.key, named, instance.shape(named), size, blocks)

        return LinearInstance(side("left"), side("right"))

    def element_sizes(self, named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        return dict(zip((*named, BASIS), element.shape, strict=False))

    def readings(self, bound: Bound) -> tuple[Reading, ...]:
        sides = tuple(map(LinearReading, bound.linear))
        return (*sides, *(WholeTurnReading(side.turned) for side in sides))

    def element_of(self, bound: Bound, found: Mapping[Reading, jax.Array], values: Mapping[str, jax.Array]) -> Element:
        sides = map(LinearReading, bound.linear)
        return {r.key: matmul(found[WholeTurnReading(r.turned)], found[r][..., 0, :, :]) for r in sides}

    def move(self, bound: Bound, element: Element, values: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        return self.motion(bound, element, self.inverse(element)).push(dict(values))

    def motion(self, bound: Bound, element: Element, inverse: Element) -> Motion:
        def moved(by: Element, back: Element, dual: bool, values: Arrays) -> Arrays:
            out = dict(values)
            for i in bound.linear:
                out |= (i.move_dual if dual else i.move)(out, by[i.key], back[i.key])
            return out

        return Motion(
            functools.partial(moved, inverse, element, False),
            functools.partial(moved, element, inverse, False),
            functools.partial(moved, inverse, element, True),
        )

    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        instances = self.bound(params).linear
        keys = jax.random.split(key, max(1, len(instances)))
        return {i.key: _random_matrix(k, i, scale) for k, i in zip(keys, instances, strict=False)}

    def identity(self, params: Any) -> Element:
        return {
            i.key: jnp.broadcast_to(jnp.eye(i.size, dtype=real_dtype()), (*i.shape, i.size, i.size))
            for i in self.bound(params).linear
        }

    def inverse(self, element: Element) -> Element:
        return jax.tree.map(lambda x: singly(jnp.linalg.inv, x), element)

    def compose(self, a: Element, b: Element) -> Element:
        return jax.tree.map(lambda last, first: matmul(first, last), a, b)

    def fraction(self, element: Element, strength: float | jax.Array) -> Element:
        return jax.tree.map(lambda x: _power(x, strength), element)

    def dim(self, params: Any) -> int:
        return sum(math.prod(i.shape) * i.size**2 for i in self.bound(params).linear)



def _power(matrix: jax.Array, exponent: float | jax.Array) -> jax.Array:
    """A power of symmetric positive matrices, as balances are."""
    values, vectors = jnp.linalg.eigh(matrix)
    return matmul(vectors * (values**exponent)[..., None, :], transpose(vectors))


def _random_matrix(key: jax.Array, instance: LinearInstance, scale: float) -> jax.Array:
    first, second, sizes = jax.random.split(key, 3)
    shape = (*instance.shape, instance.size, instance.size)
    logs = jax.random.uniform(sizes, shape[:-1], real_dtype(), -scale, scale)
    return matmul(haar(first, shape) * jnp.exp(logs)[..., None, :], transpose(haar(second, shape)))


@dataclasses.dataclass(frozen=True)
class RopeLinear(BoundGauge):
    """See `rope_linear`: a torus and, on the same planes, a rescale."""

    name: ClassVar[str] = "rope_linear"
    breaks: ClassVar[str] = RopeTorus.breaks
    balancing: ClassVar[Effect] = "diagonal"
    reserved: ClassVar[tuple[str, ...]] = (BASIS,)
    pairing: str

    @property
    def angles(self) -> RopeTorus:
        """The compact part."""
        return RopeTorus(self.specs, self.sizes, self.pairing)

    def assemble(self, named: tuple[str, ...], instances: Sequence[Instance]) -> Bound:
        heads = self.angles.planes(self.name, named, instances)
        return Bound(scales=tuple(map(_moduli, heads)), heads=(heads,))

    def element_sizes(self, named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        return self.angles.element_sizes(named, element[..., 0])

    def readings(self, bound: Bound) -> tuple[Reading, ...]:
        return (*map(ScaleReading, bound.scales), *map(PlaneReading, bound.rotations))

    def element_of(self, bound: Bound, found: Mapping[Reading, jax.Array], values: Mapping[str, jax.Array]) -> Element:
        pairs = zip(map(ScaleReading, bound.scales), map(PlaneReading, bound.rotations), strict=True)
        return {r.key: jnp.stack([found[r], found[plane]], -1) for r, plane in pairs}

    def move(self, bound: Bound, element: Element, values: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        factors = scale_factors(bound.scales, [element[i.key][..., 0] for i in bound.scales])
        scaled = {p: x * factors[p] if p in factors else x for p, x in values.items()}
        angles = {key: x[..., 1] for key, x in element.items()}
        return self.angles.move(bound, angles, scaled)

    def motion(self, bound: Bound, element: Element, inverse: Element) -> Motion:
        scales = scale_motion(bound.scales, [element[i.key][..., 0] for i in bound.scales])
        planes = plane_motion(bound.rotations, {key: x[..., 1] for key, x in element.items()})
        return Motion(
            lambda values: scales.undo(planes.undo(values)),
            lambda tangents: planes.push(scales.push(tangents)),
            lambda cotangents: scales.pull(planes.pull(cotangents)),
        )

    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        sizes, turns = jax.random.split(key)
        angles = self.angles.sample(turns, params, scale)
        keys = jax.random.split(sizes, max(1, len(angles)))

        def with_modulus(key: jax.Array, angle: jax.Array) -> jax.Array:
            return jnp.stack([jax.random.uniform(key, angle.shape, angle.dtype, -scale, scale), angle], -1)

        return {name: with_modulus(k, x) for k, (name, x) in zip(keys, angles.items(), strict=False)}

    def identity(self, params: Any) -> Element:
        return {key: jnp.stack([x, x], -1) for key, x in self.angles.identity(params).items()}

    def inverse(self, element: Element) -> Element:
        return jax.tree.map(jnp.negative, element)

    def compose(self, a: Element, b: Element) -> Element:
        return jax.tree.map(jnp.add, a, b)

    def fraction(self, element: Element, strength: float | jax.Array) -> Element:
        return jax.tree.map(lambda x: strength * x, element)

    def dim(self, params: Any) -> int:
        return sum(2 * math.prod(head.shape) for head in self.bound(params).rotations)

    def effect_of(self, element: Element) -> Effect:
        turns = any(isinstance(x, jax.core.Tracer) or np.any(np.asarray(x)[..., 1]) for x in element.values())
        return self.effect if turns else self.balancing



def _moduli(head: HeadInstance) -> ScaleInstance:
    """The rescale per plane on the blocks of a torus."""
    up, down = (tuple(b.block for b in head.blocks if b.block.role == role) for role in ("left", "right"))
    return ScaleInstance(head.gauge, head.key, head.named, head.shape, up, down, 1)
