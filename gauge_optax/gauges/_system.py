"""All scale instances of a product on one tree: which act on a leaf, which share entries, in what order to frame them.

Here: static structure, and the linear maps between channels and leaves. Not here: solving for a frame (`_frame`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, binding_error, overlap
from gauge_optax.gauges._scale import ScaleInstance, Values
from gauge_optax.gauges.reading import Arrays, Motion
from gauge_optax.linalg import real_dtype

Channels = tuple[jax.Array, ...]
"""One array per scale instance, shaped like the instance's named axes."""

Sides = Sequence[tuple[jax.Array, jax.Array]]
"""Per scale instance, something of its up and of its down side."""

Squares = tuple[tuple[jax.Array, jax.Array], ...]
"""Per scale instance, the sums of squares of its up and its down side."""

SideLogs = Sequence[tuple[jax.Array, jax.Array]]
"""Per scale instance, a log factor on its up and one on its down side."""


def scale_motion(system: "ScaleSystem", logs: Channels) -> Motion:
    """The frame e^(w·f) of scales: the same factors for tangents and cotangents."""
    outward = system.factors(logs)
    inward = {path: 1.0 / x for path, x in outward.items()}

    def times(factors: Mapping[str, jax.Array], values: Arrays) -> Arrays:
        return {p: x * factors[p] if p in factors else x for p, x in values.items()}

    out = functools.partial(times, outward)
    return Motion(functools.partial(times, inward), out, out)


@dataclasses.dataclass(frozen=True)
class ScaleSystem:
    """All scale instances of a product, and for every leaf the (instance, block, exponent) that act on it."""

    instances: tuple[ScaleInstance, ...]

    @functools.cached_property
    def terms(self) -> Mapping[str, tuple[tuple[int, Block, float], ...]]:
        """Leaf path → the (instance index, block, exponent w) that bind it, in list order."""
        found: dict[str, list[tuple[int, Block, float]]] = {}
        for index, instance in enumerate(self.instances):
            for block, weight in instance.weighted_blocks:
                found.setdefault(block.path, []).append((index, block, weight))
        return {path: tuple(entries) for path, entries in found.items()}

    @functools.cached_property
    def coupled(self) -> frozenset[int]:
        """Indices of the instances that share an entry with another instance."""
        return frozenset(
            i for i in range(len(self.instances)) for b, _ in self.instances[i].weighted_blocks if self._others(i, b)
        )

    @functools.cached_property
    def order(self) -> tuple[tuple[int, tuple[Block, ...]], ...]:
        """Instances in an order in which each has blocks whose other gauges are framed already, with those blocks."""
        done: list[tuple[int, tuple[Block, ...]]] = []
        waiting = list(range(len(self.instances)))
        while waiting:
            framed = {i for i, _ in done}
            ready = ((i, self._readable(i, framed)) for i in waiting)
            chosen = next(((i, blocks) for i, blocks in ready if blocks), None)
            if chosen is None:
                raise self._cycle(waiting)
            done.append(chosen)
            waiting.remove(chosen[0])
        return tuple(done)

    @functools.cached_property
    def shared(self) -> Mapping[str, frozenset[int]]:
        """Leaf path → the instances that share entries of it; leaves where none do are left out."""
        found: dict[str, set[int]] = {}
        for i in self.coupled:
            for block, _ in self.instances[i].weighted_blocks:
                if self._others(i, block):
                    found.setdefault(block.path, set()).add(i)
        return {path: frozenset(found[path]) for path in self.terms if path in found}

    def shared_paths(self, index: int) -> tuple[str, ...]:
        """Leaves on which this instance shares entries with another."""
        return tuple(path for path, who in self.shared.items() if index in who)

    def lone_paths(self, index: int) -> tuple[str, ...]:
        """The other leaves of this instance."""
        return tuple(p for p in self.instances[index].paths if index not in self.shared.get(p, ()))

    def _others(self, index: int, block: Block) -> set[int]:
        return {j for j, other, _ in self.terms[block.path] if j != index and overlap(block, other)}

    def _readable(self, index: int, framed: set[int]) -> tuple[Block, ...]:
        for side in (self.instances[index].up, self.instances[index].down):
            blocks = tuple(b for b in side if self._others(index, b) <= framed)
            if blocks:
                return blocks
        return ()

    def _cycle(self, waiting: Sequence[int]) -> ValueError:
        names = ", ".join(f"{self.instances[i].gauge}[{self.instances[i].key}]" for i in waiting)
        first = self.instances[waiting[0]]
        return binding_error(
            first.gauge,
            f"cyclic scale gauges at '{first.paths[0]}'",
            f"every leaf of {names} is shared with another of them",
            "an order in which each gauge has a leaf whose other gauges come earlier",
            "drop one gauge of the cycle, or train it with its own transformation",
        )

    def exponents(
        self,
        channels: Channels,
        paths: Sequence[str] | None = None,
        *,
        euler: bool = False,
    ) -> dict[str, jax.Array]:
        """Per leaf Σ w·spread(channels), broadcastable to the leaf; with `euler`, every w counts as 1."""
        return {
            path: sum(
                (
                    block.spread(self.instances[i].named, (1.0 if euler else w) * channels[i])
                    for i, block, w in self.terms[path]
                ),
                start=jnp.zeros((), real_dtype()),
            )
            for path in (self.terms if paths is None else paths)
        }

    def factors(self, channels: Channels, paths: Sequence[str] | None = None) -> dict[str, jax.Array]:
        """Per leaf e^(Σ w·spread(channels)), broadcastable to the leaf.

        The exponential is taken per channel: taken per entry it would cost more than everything else in a step.
        """
        return self.side_factors(
            [(x, -i.degree * x) for i, x in zip(self.instances, channels, strict=True)],
            paths,
        )

    def side_factors(
        self, logs: SideLogs, paths: Sequence[str] | None = None, without: int | None = None
    ) -> dict[str, jax.Array]:
        """Per leaf the exponential of a log factor per side of every channel, broadcastable to the leaf.

        Args:
          logs: the log factors.
          paths: the leaves; all of them by default.
          without: an instance that is left out.

        Returns:
          Factors of the leaf's rank.
        """
        sides = [(jnp.exp(up), jnp.exp(down)) for up, down in logs]
        return {
            path: functools.reduce(
                jnp.multiply,
                (
                    block.spread(self.instances[i].named, sides[i][w < 0], elsewhere=1.0)
                    for i, block, w in self.terms[path]
                    if i != without
                ),
            )
            for path in (self.terms if paths is None else paths)
        }

    def dots(self, hat: Values, framed: Values) -> Sides:
        """Per side of every channel ⟨θ̂, X̂⟩, of an in-frame vector."""
        return [i.sides({p: hat[p] * framed[p] for p in i.paths}) for i in self.instances]

    def along_orbits(self, dots: Sides) -> Channels:
        """⟨v, X̂⟩ for the orbit tangent v of every channel, from an in-frame vector's dot products with its sides."""
        return tuple(
            up - i.degree * down if i.down else up for i, (up, down) in zip(self.instances, dots, strict=True)
        )

    def spread(self, multiples: Sides) -> dict[str, jax.Array]:
        """Per leaf the sum of what every channel's side is to be multiplied by, broadcastable to the leaf."""
        total: dict[str, jax.Array] = {}
        for instance, (up, down) in zip(self.instances, multiples, strict=True):
            for path, x in instance.spread_sides(up, down).items():
                total[path] = total[path] + x if path in total else x
        return total

    def step_sizes(self, rho: Sequence[tuple[jax.Array, jax.Array]]) -> dict[str, jax.Array]:
        """Per leaf, each entry's ρ in the first instance that lists it, 1 where none does; broadcastable to it."""
        sizes = {}
        for path, entries in self.terms.items():
            size = jnp.ones((), real_dtype())
            for k, (index, block, weight) in enumerate(entries):
                if not any(overlap(block, earlier) for _, earlier, _ in entries[:k]):
                    size = size * block.spread(self.instances[index].named, rho[index][weight < 0], elsewhere=1.0)
            sizes[path] = size
        return sizes

    def squares(self, hat: Values) -> Squares:
        """Sums of squares of every instance's sides, from framed values."""
        return tuple(i.sides({p: jnp.square(hat[p]) for p in i.paths}) for i in self.instances)
