"""Multiplicative gauges: a factor per channel that multiplies one side and divides the other, or that a norm removes.

Let a unit's output be homogeneous of degree p in its input weights. The move up ↦ α·up, down ↦ α⁻ᵖ·down of input and
output weights then changes nothing. Examples are ReLU units (p = 1), squared ReLU (p = 2), the linear branch of a gated
unit, and a norm's scale with the kernels that read it. If a norm follows a block, the function does not depend on the
block's size, and no second side is needed. Elements are log α, and compose by addition. The vertical tangents of a
channel are the multiples of (+θ_up, −p·θ_down).
References: DDC §3.2, B.4–B.7; Rotational Equilibrium Eq. (99).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Axes, Matched
from gauge_optax.errors import binding_error
from gauge_optax.gauges.copies import Copy, Effect, drawn, part_label
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.parts.sizes import Factor


def rescale(
    up: Mapping[str, Axes], down: Mapping[str, Axes], degree: float = 1, *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """A scale moved between two sides, up·α and down·α^(−degree): one α per channel, or one if no axis has a name.

    Args:
      up: path → axes of what is multiplied by α (a ReLU unit's input weights and bias; α is read from the norm of
        all of them together).
      down: path → axes of what is divided by α^degree (the weights that read the unit).
      degree: p, if the unit's output grows αᵖ times when `up` grows α times: 1 for ReLU and the linear branch of gated
        units, 2 for squared ReLU.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are log α, an array with the named axes.

    Raises:
      ValueError: malformed axes or a degree that is not positive, at once; any mismatch with the tree, when first seen.

    >>> gauge = go.rescale(up={"w1": "_ channel"}, down={"w2": "channel _"})
    >>> moved = gauge.act(
    ...     {"": jnp.log(jnp.array([2.0, 1.0]))},
    ...     {"w1": jnp.ones((1, 2)), "w2": jnp.ones((2, 1))},
    ... )
    >>> moved["w1"].tolist(), moved["w2"].tolist()
    ([[2.0, 1.0]], [[0.5], [1.0]])

    Reference: DDC §3.2, B.4; Rotational Equilibrium Eq. (99). Not a symmetry of GELU or SiLU units.
    """
    degree = degree.item() if isinstance(degree, np.number) else degree  # type: ignore[unreachable]
    if isinstance(degree, bool) or not isinstance(degree, int | float) or not 0 < degree < math.inf:
        raise binding_error(
            "rescale", "bad degree", repr(degree), "a positive number, the homogeneity of the unit",
            "write 1 for ReLU and gated units, 2 for squared ReLU",
        )
    return block_gauge("rescale", Scale, {"up": up, "down": down}, sizes, degree=degree)


def norm_scale(
    scale: Mapping[str, Axes], into: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """A scale moved between a norm's parameters (scale and bias) and every kernel that reads the norm.

    Args:
      scale: path → axes of the norm's parameters; `"1+ channel"` if it stores its scale less one.
      into: path → axes of all kernels that read the norm. If one is not listed, the move is no symmetry.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are log α, an array with the named axes. The readers are
      linear, so that α may be negative: the norm's scale and the rows that read it then change their signs. `read`
      returns complex logarithms, whose imaginary part is π where α is negative. Real arrays mean positive α. Where a
      ReLU stands between the norm and the kernels, α must be positive: write `rescale(scale, into)`.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> gauge = go.norm_scale(
    ...     {"norm/scale": "channel"}, {"query": "channel _ _", "key": "channel _ _"}
    ... )
    >>> kernel = jnp.ones((4, 2, 3))
    >>> gauge.dim({"norm": {"scale": jnp.ones(4)}, "query": kernel, "key": kernel})
    4

    Reference: DDC §3.2, B.5. Not a symmetry of a final norm that feeds a tied head.
    """
    return block_gauge("norm_scale", Scale, {"up": scale, "down": into}, sizes, signed=True)


def scale_invariant(blocks: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None) -> BlockGauge:
    """A scale of weights that a normalisation follows, so that their size has no effect.

    Args:
      blocks: path → axes; every index of the named axes has one α, which multiplies all blocks.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are log α, an array with the named axes. `balance` leads to
      a root mean square of 1.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> gauge = go.scale_invariant({"query/kernel": "_ head _"})
    >>> params = {"query": {"kernel": jnp.full((4, 2, 4), jnp.e / 2)}}
    >>> gauge.coordinates(params)[""].round(3).tolist()
    [1.0, 1.0]

    Reference: Rotational Equilibrium §3; the queries and keys of QK-norm.
    """
    return block_gauge("scale_invariant", Scale, {"up": blocks}, sizes)


def multiplier_balance(
    query: Mapping[str, Axes], key: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """A head's scale moved between learnable multipliers of queries and of keys: query·α, key/α.

    It moves leaves as `rescale` does, but balances differently. `rescale` balances sums of squares over all leaves,
    which depend on how many query heads a key head serves. This gauge makes the root mean squares of the first leaf on
    either side equal. Further leaves (a bias without a multiplier) move with the first one.

    Args:
      query: path → axes of the query multipliers, `"head _"`; `"(head _) _"` where a key head serves several.
      key: path → axes of the key multipliers, `"head _"`.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are log α, an array with the named axes.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> gauge = go.multiplier_balance({"query": "head _"}, {"key": "head _"})
    >>> params = {"query": jnp.full((2, 3), 4.0), "key": jnp.full((2, 3), -1.0)}
    >>> balanced = gauge.act(gauge.balance(params), params)
    >>> balanced["query"][0].tolist(), balanced["key"][0].tolist()
    ([2.0, 2.0, 2.0], [-2.0, -2.0, -2.0])

    Reference: GaugeFix-LRM, Eq. (4) to (6). Deviation: there is no ε. A head whose multipliers are all zero on one
      side is unchanged; with the ε of the reference its other side would be divided by 1e6.
    """
    return block_gauge("multiplier_balance", Scale, {"up": query, "down": key}, sizes, by_entry=True)


def residual_scale(
    write: Mapping[str, Axes], tied: Mapping[str, Axes] | None = None, *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """One positive factor on every leaf that writes to the residual stream.

    Args:
      write: path → axes of every leaf that writes to the stream, every axis `_`. The factor is read from the norm of
        all these leaves together. All layers share the factor, whatever the captures are.
      tied: path → axes of the final norm's scale and bias, if the output kernel is the embedding, which the factor
        multiplies too. The scale and bias are divided by the factor, so that logits do not change.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are {"": log α}, a number.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> gauge = go.residual_scale({"embedding": "_ _", "blocks/{i}/out": "_ _"})
    >>> blocks = [{"out": jnp.ones((3, 4))}, {"out": jnp.ones((3, 4))}]
    >>> gauge.dim({"embedding": jnp.ones((7, 4)), "blocks": blocks})
    1

    Reference: docs/design.md §3. Not a symmetry where anything but a norm reads the stream.
    """
    roles = {"up": write} | ({} if tied is None else {"down": tied})
    return block_gauge("residual_scale", StreamScale, roles, sizes)


def two_sided(gauge: Any) -> bool:
    """Whether a gauge is a scale with two sides, such as a `rescale`."""
    sides = {"up", "down"}
    return isinstance(gauge, BlockGauge) and gauge.kind is Scale and {spec.argument for spec in gauge.specs} == sides


def keeps_product(gauge: Any) -> bool:
    """Whether a gauge is a scale with two sides and degree 1, so that the product of both sides does not change."""
    return two_sided(gauge) and dict(gauge.options).get("degree", 1) == 1


@dataclasses.dataclass(frozen=True)
class Scale(Copy):
    """One copy. An element is log α, (*shape); the one part, a `Factor`, computes with α."""

    parts: tuple[Factor]

    effect: ClassVar[Effect] = "diagonal"
    balancing: ClassVar[Effect] = "diagonal"
    breaks: ClassVar[str] = (
        "a norm that stores its scale less one (1+ in front of its axes) or has an eps, a consumer or a bias that is "
        "not listed, an activation that is not homogeneous, or another degree"
    )

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "Scale":
        (up,), degree = found.of_argument("up"), float(options.get("degree", 1))
        name = part_label(found, degree=degree, anchor=[(b.path, b.axes) for b in up[:1]])
        signed = bool(options.get("signed")) and all(b.entries(found.named) == 1 for b in up[:1])
        by_entry = bool(options.get("by_entry"))
        return cls(found.key, (Factor(name, found.named, found.shape, found.blocks, degree, by_entry, signed),))

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        return drawn(key, self.shape, scale)

    def split(self, element: jax.Array) -> tuple[jax.Array]:
        return (from_log(element),)

    def join(self, elements: Sequence[jax.Array]) -> jax.Array:
        (alpha,) = elements
        return to_log(alpha) if self.parts[0].signed else jnp.log(alpha)

    def identity(self) -> jax.Array:
        return self.coordinate([part.identity() for part in self.parts])

    def coordinate(self, elements: Sequence[jax.Array]) -> jax.Array:
        return jnp.log(jnp.abs(elements[0]))


def from_log(element: jax.Array) -> jax.Array:
    """α from its logarithm, a real or a complex one."""
    size = jnp.exp(jnp.real(element))
    return jnp.where(jnp.cos(jnp.imag(element)) < 0, -size, size) if jnp.iscomplexobj(element) else size


def to_log(alpha: jax.Array) -> jax.Array:
    """The complex logarithm of a real α; its imaginary part is 0 or π."""
    return jax.lax.complex(jnp.log(jnp.abs(alpha)), jnp.where(alpha < 0, math.pi, 0.0).astype(alpha.dtype))


@dataclasses.dataclass(frozen=True)
class StreamScale(Scale):
    """The one copy. Its factor serves all layers."""

    joined: ClassVar[bool] = True
    breaks: ClassVar[str] = "the eps of a norm, a writer that is not listed, or a reader that is no norm"
