"""The kernel of every multiplicative gauge: one instance of R₊ acting by α on its up blocks and α⁻ᵖ on its down blocks.

Here: sums over a channel's two sides, one number per channel spread over the leaves, what a channel reads. Not here:
names and bindings (`rescale`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block
from gauge_optax.gauges.reading import Anchor, Anchored, Arrays, InstanceReading, Motion
from gauge_optax.linalg import real_dtype

Values = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ScaleInstance:
    """One instance of a scale gauge on a concrete tree.

    Attributes:
      gauge: the gauge's name, for messages.
      key: the instance's captures, as in elements.
      named: the group's axes; each of their values is a channel.
      shape: their lengths.
      up: blocks that move as α.
      down: blocks that move as α^(−degree); empty for `scale_invariant`.
      degree: p.
      by_entry: whether the first blocks of both sides balance by mean square; else whole sides by sum of squares.
    """

    gauge: str
    key: str
    named: tuple[str, ...]
    shape: tuple[int, ...]
    up: tuple[Block, ...]
    down: tuple[Block, ...]
    degree: float
    by_entry: bool = False

    @property
    def weighted_blocks(self) -> tuple[tuple[Block, float], ...]:
        """Every block with its exponent w: the value moves as α^w."""
        return tuple((b, 1.0) for b in self.up) + tuple((b, -float(self.degree)) for b in self.down)

    @property
    def paths(self) -> tuple[str, ...]:
        """The leaves this instance touches, each once."""
        return tuple(dict.fromkeys(b.path for b in self.up + self.down))

    def sides(self, products: Values) -> tuple[jax.Array, jax.Array]:
        """Per channel, the sums of leaf-shaped arrays over the up blocks and over the down blocks.

        Blocks of leaves that are not among `products` are left out.
        """
        return self._side(self.up, products), self._side(self.down, products)

    def _side(self, blocks: tuple[Block, ...], products: Values) -> jax.Array:
        totals = [b.total(self.named, products[b.path]) for b in blocks if b.path in products]
        return sum(totals[1:], totals[0]) if totals else jnp.zeros(self.shape, real_dtype())

    def compared(self, squares: Values) -> tuple[jax.Array, jax.Array]:
        """Per channel, the sums of squares of what balance compares."""
        up, down = (self._side(side, squares) for side in self._judged)
        return up, down

    def sizes(self) -> tuple[int, int]:
        """How many entries a channel has in what balance compares."""
        up, down = (sum(channel_entries(b, self.named) for b in side) for side in self._judged)
        return up, down

    @property
    def _judged(self) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
        return (self.up[:1], self.down[:1]) if self.by_entry else (self.up, self.down)


@dataclasses.dataclass(frozen=True)
class ScaleReading(InstanceReading, Anchored):
    """log α of every channel, off the norm of its anchor: α is 1 where that is √(entries/rows).

    Of a column of a kernel that is unit variance per input, of a norm's scale the number 1: at the usual starts the
    slice is where the weights are. Anchors: the first block; else the rest of its side, as one; else the other side.

    Attributes:
      instance: the scale instance.
    """

    instance: ScaleInstance

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        sides = (self.instance.up[:1], self.instance.up[1:], self.instance.down)
        return tuple(side for side in sides if side)

    @property
    def moved(self) -> tuple[Block, ...]:
        return self.instance.up + self.instance.down

    def read(self, anchor: Anchor, values: Arrays, within: jax.Array, near: bool) -> tuple[jax.Array, jax.Array]:
        totals = [b.total(self.named, jnp.square(values[b.path])) for b in anchor]
        entries = sum(channel_entries(b, self.named) for b in anchor)
        natural = entries / max(1, *(channel_rows(b, self.named) for b in anchor))
        square = sum(totals[1:], totals[0])
        found = within & (square > 0)
        power = 2.0 if anchor[0] in self.instance.up else -2.0 * self.instance.degree
        return jnp.log(jax.lax.select(found, square / natural, jnp.ones_like(square))) / power, found

    def balanced(self, values: Arrays) -> jax.Array:
        own, p = self.instance, self.instance.degree
        up, down = own.compared({path: jnp.square(values[path]) for path in own.paths})
        whole = (up > 0) & (down > 0) if own.down else up > 0
        up, down = (jnp.where(whole, x, 1.0) for x in (up, down))
        if not own.down:
            return jnp.where(whole, 0.5 * jnp.log(up / own.sizes()[0]), 0.0)
        if own.by_entry:
            up, down = up / own.sizes()[0], down / own.sizes()[1]
        return jnp.where(whole, (jnp.log(up) - jnp.log(down) - math.log(p)) / (2.0 * (1.0 + p)), 0.0)

    def identity(self) -> jax.Array:
        return jnp.zeros(self.shape, real_dtype())

    def inverse(self, element: jax.Array) -> jax.Array:
        return -element

    def dual(self, element: jax.Array) -> jax.Array:
        return element

    def composed(self, last: jax.Array, first: jax.Array) -> jax.Array:
        return last + first

    @property
    def log_step(self) -> float:
        return math.hypot(1.0, self.instance.degree)

    def partner(self, anchor: Anchor) -> tuple[Block, ...]:
        return self.instance.down if anchor[0] in self.instance.up else ()

    def factors(self, element: jax.Array, block: Block) -> jax.Array:
        return jnp.exp(element if block in self.instance.up else -self.instance.degree * element)

    def divide(self, element: jax.Array, values: Arrays) -> Arrays:
        up, down = jnp.exp(-element), jnp.exp(self.instance.degree * element)
        out: Arrays = {}
        for block, weight in self.instance.weighted_blocks:
            factor = block.spread(self.named, up if weight > 0 else down, elsewhere=1.0)
            out[block.path] = out.get(block.path, values[block.path]) * factor
        return out


def scale_factors(instances: Sequence[ScaleInstance], logs: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """Per leaf e^(Σ w·log α), broadcastable to the leaf.

    The exponential is taken per channel: taken per entry it would cost more than everything else in a step.
    """
    factors: dict[str, jax.Array] = {}
    for instance, log in zip(instances, logs, strict=True):
        up, down = jnp.exp(log), jnp.exp(-instance.degree * log)
        for block, weight in instance.weighted_blocks:
            factor = block.spread(instance.named, up if weight > 0 else down, elsewhere=1.0)
            factors[block.path] = factors[block.path] * factor if block.path in factors else factor
    return factors


def scale_motion(instances: Sequence[ScaleInstance], logs: Sequence[jax.Array]) -> Motion:
    """The frame e^(w·f) of scales: the same factors for tangents and cotangents."""
    outward = scale_factors(instances, logs)
    inward = {path: 1.0 / x for path, x in outward.items()}

    def times(factors: Values, values: Arrays) -> Arrays:
        return {p: x * factors[p] if p in factors else x for p, x in values.items()}

    out = functools.partial(times, outward)
    return Motion(functools.partial(times, inward), out, out)


def log_sizes(instances: Sequence[ScaleInstance], values: Values) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Key → logs of both sides' root mean squares per channel; minus infinity, on both, where a side is zero."""
    squares = {path: jnp.square(x) for path, x in values.items()}
    found = {}
    for instance in instances:
        means = [x / n for x, n in zip(instance.compared(squares), instance.sizes(), strict=True)]
        whole = (means[0] != 0) & (means[1] != 0)
        up, down = (jnp.where(whole, 0.5 * jnp.log(jnp.where(whole, x, 1.0)), -jnp.inf) for x in means)
        found[instance.key] = up, down
    return found


def channel_entries(block: Block, named: tuple[str, ...]) -> int:
    """How many entries of `block` one channel holds."""
    return math.prod(n for n, label in zip(block.view_shape, block.labels, strict=True) if label not in named)


def channel_rows(block: Block, named: tuple[str, ...]) -> int:
    """Fan-in of one channel: its free axes but the last, or all of them where there is only one."""
    free = [n for n, label in zip(block.view_shape, block.labels, strict=True) if label not in named]
    return math.prod(free[:-1]) if len(free) > 1 else math.prod(free)
