"""Multiplicative gauges: R₊ per channel, traded between two sides (or owned by one side that a norm follows).

A unit whose output is homogeneous of degree p in its input weights is unchanged by up ↦ α·up, down ↦ α⁻ᵖ·down: ReLU
(p = 1), squared ReLU (p = 2), the linear branch of a gated unit, a norm's scale with the kernels that read it. Where a
norm follows, a block's size is dead with no partner. Elements are log α, additive, read off the norm of the first block
(`_scale`); the vertical vector of a channel is (+θ_up, −p·θ_down). One dimension per channel.
References: DDC §3.2, B.4–B.7; Rotational Equilibrium Eq. (99).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Instance, binding_error, block_specs, check_specs, frozen_sizes
from gauge_optax.gauges._scale import ScaleInstance, ScaleReading, scale_factors, scale_motion
from gauge_optax.gauges.base import BoundGauge, Effect, Element
from gauge_optax.gauges.bound import Arrays, Bound
from gauge_optax.gauges.reading import Motion, Reading
from gauge_optax.linalg import real_dtype


def rescale(
    up: Mapping[str, Axes], down: Mapping[str, Axes], degree: float = 1, *, sizes: Mapping[str, int] | None = None
) -> "Rescale":
    """A scale traded between two sides: up·α, down·α^(−degree), per channel or, with no axis named, per block.

    Args:
      up: path → axes of what is multiplied by α (a ReLU unit's input weights and bias).
      down: path → axes of what is divided by α^degree (the weights that read the unit).
      degree: homogeneity of what lies between: 1 for ReLU and gated linear branches, 2 for squared ReLU.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are log α, shaped like the named axes.

    Raises:
      ValueError: malformed axes or a degree that is not positive, here; any mismatch with the tree, when first seen.

    >>> gauge = go.rescale(up={"w1": "_ channel"}, down={"w2": "channel _"})
    >>> moved = gauge.act({"": jnp.log(jnp.array([2.0, 1.0]))}, {"w1": jnp.ones((1, 2)), "w2": jnp.ones((2, 1))})
    >>> moved["w1"].tolist(), moved["w2"].tolist()
    ([[2.0, 1.0]], [[0.5], [1.0]])

    Reference: DDC §3.2, B.4; Rotational Equilibrium Eq. (99). Not a symmetry of GELU or SiLU units.
    """
    return _scale_gauge("rescale", up, down, degree, sizes)


def norm_scale(
    scale: Mapping[str, Axes], into: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None
) -> "Rescale":
    """A norm's scale (and bias) traded with every kernel that reads the norm.

    Args:
      scale: path → axes of the norm's parameters; `"1+ channel"` where it stores its scale less one.
      into: path → axes of all consumers; each must be listed, or the move is no symmetry.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are log α, shaped like the named axes.

    Raises:
      ValueError: malformed axes, here; any mismatch with the tree, when it is first seen.

    >>> gauge = go.norm_scale({"norm/scale": "channel"}, {"query": "channel _ _", "key": "channel _ _"})
    >>> gauge.dim({"norm": {"scale": jnp.ones(4)}, "query": jnp.ones((4, 2, 3)), "key": jnp.ones((4, 2, 3))})
    4

    Reference: DDC §3.2, B.5. Not a symmetry of a final norm that feeds a tied head.
    """
    return _scale_gauge("norm_scale", scale, into, 1, sizes)


def scale_invariant(blocks: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None) -> "Rescale":
    """A scale with no partner: weights that a normalisation follows.

    Args:
      blocks: path → axes; all blocks scale together, per value of the named axes.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are log α; balance makes the RMS 1.

    Raises:
      ValueError: malformed axes, here; any mismatch with the tree, when it is first seen.

    >>> gauge = go.scale_invariant({"query/kernel": "_ head _"})
    >>> gauge.coordinates({"query": {"kernel": jnp.full((4, 2, 4), jnp.e / 2)}})[""].round(3).tolist()
    [1.0, 1.0]

    Reference: Rotational Equilibrium §3; the queries and keys of QK-norm.
    """
    return _scale_gauge("scale_invariant", blocks, None, 1, sizes)


def multiplier_balance(
    query: Mapping[str, Axes], key: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None
) -> "Rescale":
    """A head's scale traded between learnable multipliers of queries and of keys: query·α, key/α.

    The move of `rescale`; what differs is where it is balanced. With queries in groups a key head answers to several
    query heads: `rescale` balances sums of squares, this gauge root mean squares, s_Q = s_K, of the first leaf on
    either side; what follows it (a bias that no multiplier stands before) goes along.

    Args:
      query: path → axes of the query multipliers, `"head _"`; `"(head _) _"` where a key head serves several.
      key: path → axes of the key multipliers, `"head _"`.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are log α, shaped like the named axes.

    Raises:
      ValueError: malformed axes, here; any mismatch with the tree, when it is first seen.

    >>> gauge = go.multiplier_balance({"query": "head _"}, {"key": "head _"})
    >>> params = {"query": jnp.full((2, 3), 4.0), "key": jnp.full((2, 3), -1.0)}
    >>> balanced = gauge.act(gauge.balance(params), params)
    >>> balanced["query"][0].tolist(), balanced["key"][0].tolist()
    ([2.0, 2.0, 2.0], [-2.0, -2.0, -2.0])

    Reference: GaugeFix-LRM, Eq. (4) to (6). Deviation: no ε; a head whose multipliers are zero on a side stays where it
      is, with it those of the other would be divided by 1e6.
    """
    return dataclasses.replace(_scale_gauge("multiplier_balance", query, key, 1, sizes), by_entry=True)


def two_sided(gauge: Any) -> bool:
    """Whether a gauge trades a scale between two sides."""
    return isinstance(gauge, Rescale) and {spec.role for spec in gauge.specs} == {"up", "down"}


def keeps_product(gauge: Any) -> bool:
    """Whether what it gives to one side it takes from the other in full, so that the product of both stays."""
    return two_sided(gauge) and gauge.degree == 1


def _scale_gauge(
    name: str, up: Mapping[str, Axes], down: Mapping[str, Axes] | None, degree: float, sizes: Mapping[str, int] | None
) -> "Rescale":
    if isinstance(degree, bool) or not isinstance(degree, int | float) or not 0 < degree < math.inf:
        raise binding_error(
            name,
            "bad degree",
            repr(degree),
            "a positive number, the homogeneity of the unit",
            "write 1 for ReLU and gated units, 2 for squared ReLU",
        )
    specs = block_specs(name, "up", up) + (block_specs(name, "down", down) if down is not None else ())
    check_specs(name, specs, frozen_sizes(name, sizes))
    return Rescale(specs, frozen_sizes(name, sizes), name, degree)


@dataclasses.dataclass(frozen=True)
class Rescale(BoundGauge):
    """See `rescale`, `norm_scale`, `scale_invariant`, `multiplier_balance`: one move under four names."""

    name: str  # type: ignore[misc]
    degree: float
    by_entry: bool = False
    effect: ClassVar[Effect] = "diagonal"
    breaks: ClassVar[str] = (
        "a norm that stores its scale less one (1+ in front of its axes) or has an eps, a consumer or a bias that is "
        "not listed, an activation that is not homogeneous, or another degree"
    )
    balancing: ClassVar[Effect] = "diagonal"
    reserved: ClassVar[tuple[str, ...]] = ()

    def assemble(self, named: tuple[str, ...], instances: Sequence[Instance]) -> Bound:
        return Bound(
            scales=tuple(
                ScaleInstance(
                    self.name,
                    i.key,
                    named,
                    i.shape(named),
                    tuple(b for b in i.blocks if b.role == "up"),
                    tuple(b for b in i.blocks if b.role == "down"),
                    self.degree,
                    self.by_entry,
                )
                for i in instances
            )
        )

    def element_sizes(self, named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        return dict(zip(named, element.shape, strict=True))

    def move(self, bound: Bound, element: Element, values: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        factors = scale_factors(bound.scales, [element[i.key] for i in bound.scales])
        return {p: x * factors[p] if p in factors else x for p, x in values.items()}

    def readings(self, bound: Bound) -> tuple[Reading, ...]:
        return tuple(map(ScaleReading, bound.scales))

    def element_of(self, bound: Bound, found: Mapping[Reading, jax.Array], values: Mapping[str, jax.Array]) -> Element:
        return {r.key: found[r] for r in self.readings(bound)}

    def by_reading(self, bound: Bound, element: Element) -> Mapping[Reading, jax.Array]:
        return {r: element[r.key] for r in self.readings(bound)}

    def coordinates_of(self, bound: Bound, element: Element, values: Arrays) -> Element:
        return element

    def motion(self, bound: Bound, element: Element, inverse: Element) -> Motion:
        return scale_motion(bound.scales, [element[i.key] for i in bound.scales])

    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        instances = self.bound(params).scales
        keys = jax.random.split(key, max(1, len(instances)))
        return {
            i.key: jax.random.uniform(k, i.shape, real_dtype(), -scale, scale)
            for k, i in zip(keys, instances, strict=False)
        }

    def identity(self, params: Any) -> Element:
        return {i.key: jnp.zeros(i.shape, real_dtype()) for i in self.bound(params).scales}

    def inverse(self, element: Element) -> Element:
        return jax.tree.map(jnp.negative, element)

    def compose(self, a: Element, b: Element) -> Element:
        return jax.tree.map(jnp.add, a, b)

    def fraction(self, element: Element, strength: float | jax.Array) -> Element:
        return jax.tree.map(lambda x: strength * x, element)

    def dim(self, params: Any) -> int:
        return sum(math.prod(i.shape) for i in self.bound(params).scales)
