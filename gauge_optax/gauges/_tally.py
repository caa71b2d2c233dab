"""Channel sums while channels are scaled: what a leaf must be read for once, and what follows in closed form.

Reading a leaf costs as much as all arithmetic on its channels together. Scaling a channel multiplies its sums of
squares by a known factor, and adding a multiple of the channel to a vector changes its dot product by a known
amount, except on leaves that two instances share: there the other's sums are read off the leaf again.

Here: those two rules. Not here: what they are used for (`_frame`, `transforms`).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.gauges._scale import Values
from gauge_optax.gauges._system import Channels, ScaleSystem, SideLogs, Sides, Squares

Side = tuple[jax.Array, jax.Array]


class Tally(NamedTuple):
    """Sums of squares of every channel's sides under log factors that change.

    Attributes:
      system: the scale instances.
      shared: squares of the leaves that instances share.
      lone: sums of squares over all other leaves, per side, before any factor.
      logs: the log factor on each side.
    """

    system: ScaleSystem
    shared: Values
    lone: Squares
    logs: SideLogs

    def of(self, index: int) -> Side:
        """Sums of squares of one instance's sides."""
        (up, down), (log_up, log_down) = self.lone[index], self.logs[index]
        own = (up * jnp.exp(2.0 * log_up), down * jnp.exp(2.0 * log_down))
        paths = self.system.shared_paths(index)
        if not paths:
            return own
        # A channel's own factor is the same for all it sums, so that only the others' need to meet the leaf.
        others = self.system.side_factors([(2.0 * a, 2.0 * b) for a, b in self.logs], paths, without=index)
        read = self.system.instances[index].sides({p: self.shared[p] * others[p] for p in paths})
        return own[0] + read[0] * jnp.exp(2.0 * log_up), own[1] + read[1] * jnp.exp(2.0 * log_down)

    def all(self) -> Squares:
        """Sums of squares of every instance's sides."""
        return tuple(self.of(k) for k in range(len(self.system.instances)))

    def grown(self, index: int, up: jax.Array, down: jax.Array) -> "Tally":
        """With more log factor on the sides of one instance."""
        logs = list(self.logs)
        logs[index] = (logs[index][0] + up, logs[index][1] + down)
        return self._replace(logs=logs)

    def framed(self, index: int, change: jax.Array) -> "Tally":
        """With the frame of one instance moved by `change`."""
        return self.grown(index, -change, self.system.instances[index].degree * change)


def tally(system: ScaleSystem, framed: Values) -> Tally:
    """Sums of squares at these values.

    Args:
      system: the scale instances.
      framed: leaf path → value, with the frame that later changes are relative to divided out.

    Returns:
      The tally, at log factors of zero.
    """
    lone = tuple(
        i.sides({p: jnp.square(framed[p]) for p in system.lone_paths(k)}) for k, i in enumerate(system.instances)
    )
    logs = [(jnp.zeros_like(up), jnp.zeros_like(down)) for up, down in lone]
    return Tally(system, squares_once({p: framed[p] for p in system.shared}), lone, logs)


class Overlap(NamedTuple):
    """How adding multiples of channels to a vector changes its dot products with the channels.

    Attributes:
      system: the scale instances.
      shared: θ̂∘θ̂ on the leaves that instances share.
      squares: sums of squares of every channel's sides.
    """

    system: ScaleSystem
    shared: Values
    squares: Squares

    def after(self, dots: Sides, index: int, up: jax.Array, down: jax.Array) -> list[Side]:
        """Dot products once θ̂·up and θ̂·down were added on the sides of one instance."""
        out, instance = list(dots), self.system.instances[index]
        square = self.squares[index]
        out[index] = (out[index][0] + square[0] * up, out[index][1] + square[1] * down)
        spread = instance.spread_sides(up, down)
        for other in self._neighbours(index):
            paths = [p for p in self.system.shared_paths(index) if other in self.system.shared[p]]
            seen = self.system.instances[other].sides({p: self.shared[p] * spread[p] for p in paths})
            out[other] = (out[other][0] + seen[0], out[other][1] + seen[1])
        return out

    def after_all(self, dots: Sides, changes: Sequence[Side]) -> list[Side]:
        """Dot products once multiples of every channel were added."""
        return functools.reduce(lambda d, k: self.after(d, k, *changes[k]), range(len(changes)), list(dots))

    def vertical_squares(self) -> Channels:
        """‖v‖² of every channel."""
        return tuple(
            up + i.degree**2 * down if i.down else up
            for i, (up, down) in zip(self.system.instances, self.squares, strict=True)
        )

    def moved_along(self, dots: Sides, index: int, rate: jax.Array) -> list[Side]:
        """Dot products once one instance moved along its orbit."""
        return self.after(dots, index, rate, -self.system.instances[index].degree * rate)

    def _neighbours(self, index: int) -> list[int]:
        paths = self.system.shared_paths(index)
        return sorted({other for p in paths for other in self.system.shared[p]} - {index})


def overlap_of(system: ScaleSystem, hat: Values, squares: Squares) -> Overlap:
    """The overlap of all channels at θ̂."""
    return Overlap(system, squares_once({p: hat[p] for p in system.shared}), squares)


def squares_once(values: Values) -> Values:
    """Squares of leaves, kept: XLA would square the leaf anew for every sum."""
    return jax.lax.optimization_barrier({p: jnp.square(x) for p, x in values.items()})
