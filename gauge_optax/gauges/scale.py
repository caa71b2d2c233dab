"""Multiplicative gauges: one positive factor per channel, on two sides inversely, or on one side before a norm.

A unit whose output is homogeneous of degree p in its input weights is unchanged by up ↦ α·up, down ↦ α⁻ᵖ·down: ReLU
(p = 1), squared ReLU (p = 2), the linear branch of a gated unit, a norm's scale with the kernels that read it. Where a
norm follows, the function does not depend on a block's size, and there is no second side. Elements are log α, and
compose by addition. The vertical tangents of a channel are the multiples of (+θ_up, −p·θ_down).

A channel reads as the log of its first anchor's norm divided by √(entries/rows), times −1/p for an anchor on the down
side. On the slice the column of a kernel has norm 1, a norm's scale is 1 and multipliers have root mean square 1, close
to the usual initial values.
References: DDC §3.2, B.4–B.7; Rotational Equilibrium Eq. (99).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Block
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.instance import Additive, Anchor, Arrays, Effect, Instance
from gauge_optax.gauges.matrices import HEAD, Matrices, channel_matrices
from gauge_optax.linalg import real_dtype


def rescale(
    up: Mapping[str, Axes], down: Mapping[str, Axes], degree: float = 1, *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """A scale moved between two sides: up·α, down·α^(−degree), per channel or, with no axis named, per block.

    Args:
      up: path → axes of what is multiplied by α (a ReLU unit's input weights and bias).
      down: path → axes of what is divided by α^degree (the weights that read the unit).
      degree: homogeneity of the function between both sides: 1 for ReLU and gated linear branches, 2 for squared ReLU.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are log α, shaped like the named axes.

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
    if isinstance(degree, bool) or not isinstance(degree, int | float) or not 0 < degree < math.inf:
        raise binding_error(
            "rescale", "bad degree", repr(degree), "a positive number, the homogeneity of the unit",
            "write 1 for ReLU and gated units, 2 for squared ReLU",
        )  # fmt: skip
    return block_gauge("rescale", Scale, {"up": up, "down": down}, sizes, degree=degree)


def norm_scale(
    scale: Mapping[str, Axes], into: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None
) -> BlockGauge:
    """A scale moved between a norm's parameters (scale and bias) and every kernel that reads the norm.

    Args:
      scale: path → axes of the norm's parameters; `"1+ channel"` where it stores its scale less one.
      into: path → axes of all consumers; each must be listed, or the move is no symmetry.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are log α, shaped like the named axes.

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
    return block_gauge("norm_scale", Scale, {"up": scale, "down": into}, sizes)


def scale_invariant(blocks: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None) -> BlockGauge:
    """A scale on one side alone: weights that a normalisation follows.

    Args:
      blocks: path → axes; all blocks scale together, per value of the named axes.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are log α; balance makes the RMS 1.

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

    It moves leaves as `rescale` does, but balances differently. In grouped-query attention a key head serves several
    query heads. `rescale` balances sums of squares over all leaves; this gauge balances root mean squares, s_Q = s_K,
    of the first leaf on either side. Further leaves (a bias without a multiplier) move with the first one.

    Args:
      query: path → axes of the query multipliers, `"head _"`; `"(head _) _"` where a key head serves several.
      key: path → axes of the key multipliers, `"head _"`.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are log α, shaped like the named axes.

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


def two_sided(gauge: Any) -> bool:
    """Whether a gauge is a scale with two sides."""
    sides = {"up", "down"}
    return isinstance(gauge, BlockGauge) and gauge.kind is Scale and {spec.role for spec in gauge.specs} == sides


def keeps_product(gauge: Any) -> bool:
    """Whether a gauge is a scale with two sides and degree 1, so that the product of both sides does not change."""
    return two_sided(gauge) and dict(gauge.options).get("degree", 1) == 1


@dataclasses.dataclass(frozen=True)
class Scale(Additive):
    """One instance: log α per channel, (*shape).

    Attributes:
      degree: p: up is multiplied by α, down by α^(−p).
      by_entry: whether balance compares mean squares of each side's first block; else sums of squares of whole sides.
    """

    degree: float = 1
    by_entry: bool = False

    effect: ClassVar[Effect] = "diagonal"
    balancing: ClassVar[Effect] = "diagonal"
    breaks: ClassVar[str] = (
        "a norm that stores its scale less one (1+ in front of its axes) or has an eps, a consumer or a bias that is "
        "not listed, an activation that is not homogeneous, or another degree"
    )

    @classmethod
    def of(
        cls, gauge: str, key: str, named: tuple[str, ...], sizes: Mapping[str, int], blocks: Any, **options: Any
    ) -> "Scale":
        """The instance of a binding's blocks."""
        return cls(gauge, key, named, tuple(sizes[name] for name in named), tuple(blocks), **options)

    @functools.cached_property
    def up(self) -> tuple[Block, ...]:
        """The blocks that are multiplied by α."""
        return tuple(block for block in self.blocks if block.role in ("up", "left"))

    @functools.cached_property
    def down(self) -> tuple[Block, ...]:
        """The blocks that are multiplied by α^(−p)."""
        return tuple(block for block in self.blocks if block.role in ("down", "right"))

    # The group: addition of logs ----------------------------------------------------------------------

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        return jax.random.uniform(key, self.shape, real_dtype(), -scale, scale)

    def coordinate(self, e: jax.Array, point: Arrays) -> Any:
        return e

    @staticmethod
    def power(element: jax.Array, exponent: float | jax.Array) -> jax.Array:
        """The power of a public element."""
        return exponent * element

    # The action ---------------------------------------------------------------------------------------

    def act(self, e: jax.Array, point: Arrays) -> Arrays:
        out = dict(point)
        # Exponentials are taken once per channel: per entry they would cost more than everything else in a step.
        for blocks in (self.up, self.down):
            factor = self.factors(e, blocks[0]) if blocks else None
            for block in blocks:
                out[block.path] = out[block.path] * block.spread(self.named, factor, elsewhere=1.0)
        return out

    def pull(self, e: jax.Array, cotangent: Arrays) -> Arrays:
        return self.act(e, cotangent)  # diagonal: its own transpose

    def factors(self, e: jax.Array, block: Block) -> jax.Array:
        """The factors by which an element multiplies a block, per channel."""
        # A negated power, not a power of a negated degree: XLA then computes 1/α and the inverse of α once.
        return jnp.exp(e if block.role in ("up", "left") else -(e if self.degree == 1.0 else self.degree * e))

    # Reading and balance ------------------------------------------------------------------------------

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return tuple(side for side in (self.up[:1], self.up[1:], self.down) if side)

    def read(self, anchor: Anchor, point: Arrays, within: jax.Array, near: bool) -> tuple[jax.Array, jax.Array]:
        totals = [block.total(self.named, jnp.square(point[block.path])) for block in anchor]
        square = sum(totals[1:], totals[0])
        # The inputs of a channel are its free axes but the last, or the one free axis. The squared norm of
        # a channel on the slice is `natural`, its number of columns; multipliers, which start at 1, have RMS 1 there.
        free = [[n for n, x in zip(b.view_shape, b.labels, strict=True) if x not in self.named] for b in anchor]
        inputs = max(math.prod(lengths[:-1] or lengths) for lengths in free)
        natural = sum(map(math.prod, free)) / (1 if self.by_entry else max(1, inputs))
        read = within & (square > 0)
        power = 2.0 if anchor[0].role in ("up", "left") else -2.0 * self.degree
        return jnp.log(jax.lax.select(read, square / natural, jnp.ones_like(square))) / power, read

    def with_positive_signs(self, point: Arrays) -> Arrays:
        # A norm's readers are linear, so that a negative scale may change sign with their rows. A unit's may not.
        if self.gauge != "norm_scale" or self.up[0].entries(self.named) > 1:
            return point
        negative = self.up[0].total(self.named, point[self.up[0].path]) < 0
        signs = jnp.where(negative, -1.0, 1.0).astype(real_dtype())
        return point | {
            path: functools.reduce(
                lambda leaf, block: leaf * block.spread(self.named, signs, elsewhere=1.0),
                [block for block in self.blocks if block.path == path], point[path],
            )
            for path in self.paths
        }  # fmt: skip

    def squared_sides(self, point: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Sums of squares of both sides, per channel."""
        zero = jnp.zeros(self.shape, real_dtype())
        up, down = (
            sum((b.total(self.named, jnp.square(point[b.path])) for b in side), zero) for side in (self.up, self.down)
        )
        return up, down

    def compared(self, point: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The sizes that balance compares, per channel: sums of squares of both sides; mean squares for `by_entry`."""
        up, down = (self.up[:1], self.down[:1]) if self.by_entry else (self.up, self.down)
        sizes = []
        for side in (up, down):
            total = sum((b.total(self.named, jnp.square(point[b.path])) for b in side), jnp.zeros(self.shape))
            sizes.append(total / sum(b.entries(self.named) for b in side) if self.by_entry else total)
        return sizes[0], sizes[1]

    def balanced(self, point: Arrays) -> jax.Array:
        up, down = self.compared(point)
        if not self.down:
            entries = sum(block.entries(self.named) for block in self.up)
            return jnp.where(up > 0, 0.5 * jnp.log(jnp.where(up > 0, up, 1.0) / entries), 0.0)
        whole = (up > 0) & (down > 0)
        up, down = (jnp.where(whole, x, 1.0) for x in (up, down))
        p = self.degree
        return jnp.where(whole, (jnp.log(up) - jnp.log(down) - math.log(p)) / (2.0 * (1.0 + p)), 0.0)

    def log_ratio(self, point: Arrays) -> jax.Array | None:
        if not self.down:
            return None
        up, down = self.squared_sides(point)
        alive = (up > 0) & (down > 0)  # a dead channel has no ratio: 0 stands for it
        logs = [jnp.log(jnp.where(alive, x, 1.0)) for x in (up, down)]
        return 0.5 * (logs[0] - self.degree * logs[1])

    def with_log_ratio(self, e: jax.Array, change: jax.Array) -> jax.Array:
        return e + change / (1.0 + self.degree**2)

    def completed(self, point: Arrays, cotangent: Arrays, block: Block) -> Arrays | None:
        if self.up[:1] != (block,) or not self.down:
            return None

        def pairing(blocks: tuple[Block, ...]) -> jax.Array:
            zero = jnp.zeros(self.shape, real_dtype())
            return sum((b.total(self.named, point[b.path] * cotangent[b.path]) for b in blocks), zero)

        # Invariance: the pairing of the gradient with (up, −p·down) is zero. On the slice the anchor is ±1.
        paired = self.degree * pairing(self.down) - pairing(self.up[1:])
        order = [self.named.index(name) for name in block.labels]
        sign = jnp.where(block.view(point[block.path]) < 0, -1.0, 1.0).astype(paired.dtype)
        return cotangent | {block.path: block.write(cotangent[block.path], sign * paired.transpose(order))}

    def nearest(self, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> jax.Array:
        """See `Instance`: the least |T_up − α·up|² + |T_down − down/α^p|², a problem in one variable per channel."""
        up, down = (self.paired(side, target, point) for side in (self.up, self.down))
        return _nearest_log(up, down, jnp.asarray(self.degree, real_dtype()))

    def paired(self, side: tuple[Block, ...], target: Arrays, point: Arrays) -> tuple[jax.Array, jax.Array]:
        """Sums over one side, per channel: squares of the point, and products of both."""
        zero = jnp.zeros(self.shape, real_dtype())
        squares = (b.total(self.named, jnp.square(point[b.path])) for b in side)
        products = (b.total(self.named, point[b.path] * target[b.path]) for b in side)
        return sum(squares, zero), sum(products, zero)

    # What optimizers ask ------------------------------------------------------------------------------

    @property
    def log_step(self) -> float:
        return math.hypot(1.0, self.degree)

    @property
    def sides(self) -> tuple[tuple[Block, ...], tuple[Block, ...]] | None:
        return (self.up, self.down) if self.down else None

    def matrices(self, block: Block) -> tuple[int, Matrices | None] | None:
        if HEAD in self.named:  # the kernels of QK-norm have one matrix per head
            return 1, channel_matrices(block, self.named)
        return (2, channel_matrices(block, self.named)) if self.down else None


@jax.jit
def _nearest_log(up: tuple[jax.Array, jax.Array], down: tuple[jax.Array, jax.Array], degree: jax.Array) -> jax.Array:
    """The logs x that minimise A·e²ˣ − 2B·eˣ + C·e⁻²ᵖˣ − 2E·e⁻ᵖˣ, for (A, B) and (C, E); 0 where no x is least."""
    (a, b), (c, e) = up, down

    def loss(x: jax.Array) -> jax.Array:
        return a * jnp.exp(2.0 * x) - 2.0 * b * jnp.exp(x) + (c * jnp.exp(-degree * x) - 2.0 * e) * jnp.exp(-degree * x)

    def log_ratio(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where((x > 0) & (y > 0), jnp.log(jnp.where(x > 0, x, 1.0) / jnp.where(y > 0, y, 1.0)), 0.0)

    # Each side alone has its least value at the first two; where the sides disagree most, both shrink to balance.
    starts = log_ratio(b, a), -log_ratio(e, c) / degree, log_ratio(c, a) / (2.0 + 2.0 * degree), jnp.zeros_like(a)
    bounded = ((c > 0) | (b > 0)) & ((a > 0) | (e > 0))
    return jnp.where(bounded, least_point(loss, starts), 0.0)


def least_point(loss: Callable[[jax.Array], jax.Array], starts: Sequence[jax.Array]) -> jax.Array:
    """Where a function of one variable per channel is least: on a grid around some points, then by bisection.

    Args:
      loss: entry by entry, from an array of the shape of each of `starts` to one of that shape.
      starts: points near which the least value is expected; 0 among them.

    Returns:
      The point; 0 where no point found is lower.
    """
    slope = jax.grad(lambda x: jnp.sum(loss(x)))
    low, high = jnp.min(jnp.stack(starts), 0) - 1.0, jnp.max(jnp.stack(starts), 0) + 1.0
    grid = low + (high - low) * jnp.linspace(0.0, 1.0, _GRID).reshape(-1, *(1,) * low.ndim).astype(low.dtype)
    best = jnp.argmin(jax.lax.map(loss, grid), 0)
    width = (high - low) / (_GRID - 1)
    left, right = (low + jnp.clip(best + k, 0, _GRID - 1) * width for k in (-1, 1))

    def halved(_: int, sides: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, right = sides
        middle = 0.5 * (left + right)
        rising = slope(middle) > 0
        return jnp.where(rising, left, middle), jnp.where(rising, middle, right)

    left, right = jax.lax.fori_loop(0, _HALVINGS, halved, (left, right))
    least = 0.5 * (left + right)
    return jnp.where(loss(least) < loss(jnp.zeros_like(least)), least, 0.0)


_GRID, _HALVINGS = 129, 60
