"""The rescale frame of a product of gauges: one log-scale f per channel, moving with the group, F(g·θ) = g·F(θ).

Here: the triangular start, the balancing rounds, the state a transformation keeps of the frame. Not here: what is done
in the frame.

In the frame a value reads θ̂ = e^(−w·f)·θ, where w·f sums over the channels that hold the entry. The fixed point
of the rounds is the representative of least norm, ‖θ̂_up‖² = p·‖θ̂_down‖² for every channel at once (Kempf–Ness; Gram
balance; equi-normalisation). DESIGN §5.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, binding_error, overlap
from gauge_optax.gauges._scale import ScaleInstance, Values
from gauge_optax.linalg import real_dtype

Channels = tuple[jax.Array, ...]
"""One array per scale instance, shaped like the instance's named axes."""

Sides = Sequence[tuple[jax.Array, jax.Array]]
"""Per scale instance, something of its up and of its down side."""

Squares = tuple[tuple[jax.Array, jax.Array], ...]
"""Per scale instance, the sums of squares of its up and its down side."""

_NEAR = 1e-5  # a round that moves f by less leaves about 1e-6


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

    def step_sizes(self, rho: Sequence[tuple[jax.Array, jax.Array]]) -> dict[str, jax.Array]:
        """Per leaf, each entry's ρ in the first instance that lists it, 1 where none does; broadcastable to it."""
        sizes = {}
        for path, entries in self.terms.items():
            size = jnp.ones((), real_dtype())
            for k, (index, block, weight) in enumerate(entries):
                if not any(overlap(block, earlier) for _, earlier, _ in entries[:k]):
                    size = size + block.spread(self.instances[index].named, rho[index][weight < 0] - 1.0)
            sizes[path] = size
        return sizes

    def squares(self, hat: Values) -> "Squares":
        """Sums of squares of every instance's sides, from framed values."""
        return tuple(i.sides({p: jnp.square(hat[p]) for p in i.paths}) for i in self.instances)

    def framed_squares(self, index: int, values: Values, channels: Channels) -> tuple[jax.Array, jax.Array]:
        """Sums of squares of one instance's sides in the frame `channels`."""
        instance = self.instances[index]
        logs = self.exponents(channels, instance.paths)
        return instance.sides({p: jnp.square(values[p] * jnp.exp(-logs[p])) for p in instance.paths})


def triangular(system: ScaleSystem, values: Values) -> Channels:
    """A frame read off one block per channel, exactly equivariant whatever the sizes.

    Args:
      system: the scale instances.
      values: leaf path → value (γ rather than γ − 1; shifts centred).

    Returns:
      f per instance. A channel whose readable block is zero is read off all its blocks; one that is all zero has f = 0.
    """
    f = [jnp.zeros(i.shape, real_dtype()) for i in system.instances]
    for index, blocks in system.order:
        f[index] = _read(system, index, blocks, values, tuple(f))[0]
    for index, blocks in system.order:
        _, found = _read(system, index, blocks, values, tuple(f))
        instance = system.instances[index]
        for side in (instance.up, instance.down):
            if side and side != blocks:
                fallback, alive = _read(system, index, side, values, tuple(f))
                f[index] = jnp.where(~found & alive, fallback, f[index])
                found = found | alive
    return tuple(f)


def _read(
    system: ScaleSystem,
    index: int,
    blocks: tuple[Block, ...],
    values: Values,
    f: Channels,
) -> tuple[jax.Array, jax.Array]:
    """f of one instance read off `blocks` with the other instances framed, and where that block is not zero."""
    instance = system.instances[index]
    others = tuple(jnp.zeros_like(x) if i == index else x for i, x in enumerate(f))
    logs = system.exponents(others, [b.path for b in blocks])
    parts = [b.total(instance.named, jnp.square(values[b.path] * jnp.exp(-logs[b.path]))) for b in blocks]
    total = sum(parts[1:], parts[0])
    if not instance.down:
        total = instance.mean_square(total)
    alive = total > 0
    log_norm = 0.5 * jnp.log(jnp.where(alive, total, 1.0))
    return (log_norm if blocks[0] in instance.up else -log_norm / instance.degree), alive


def balancing_step(instance: ScaleInstance, squares: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The change of f that balances one instance with all others held; 0 for channels with two zero sides.

    Args:
      instance: the scale instance.
      squares: its in-frame sums of squares, up and down.

    Returns:
      log(Σ_up/(p·Σ_down))/(2(1+p)) per channel; without a partner, log of the RMS.
    """
    up, down = squares
    if not instance.down:
        alive = up > 0
        return 0.5 * jnp.log(jnp.where(alive, instance.mean_square(up), 1.0))
    p, above, below = instance.degree, up > 0, down > 0
    log_up, log_down = jnp.log(jnp.where(above, up, 1.0)), jnp.log(jnp.where(below, down, 1.0))
    # With one side zero the other reaches norm 1, as in `triangular`: without that, f of a shared leaf would depend
    # on where the point stands on its orbit.
    lone = 0.5 * log_up - 0.5 * log_down / p
    return jnp.where(above & below, (log_up - log_down - math.log(p)) / (2.0 * (1.0 + p)), lone)


def balancing_round(
    system: ScaleSystem,
    values: Values,
    f: Channels,
    alive: Sequence[jax.Array] | None = None,
) -> Channels:
    """One round: every instance balanced in turn, channels that are not `alive` left alone."""
    current = list(f)
    for index, instance in enumerate(system.instances):
        step = balancing_step(instance, system.framed_squares(index, values, tuple(current)))
        current[index] = current[index] + (step if alive is None else jnp.where(alive[index], step, 0.0))
    return tuple(current)


def solve(system: ScaleSystem, values: Values) -> Channels:
    """The minimum-norm frame: triangular start, then rounds to convergence.

    Args:
      system: the scale instances.
      values: leaf path → value.

    Returns:
      f per instance.
    """
    if not system.instances:
        return ()
    tolerance = 8.0 * float(jnp.finfo(real_dtype()).eps)
    return _rounds_until(lambda f: balancing_round(system, values, f), triangular(system, values), tolerance)


def follow(system: ScaleSystem, values: Values, start: Channels, held: Sequence[jax.Array]) -> Channels:
    """The frame of a nearby point: two rounds, and more while a channel still moves by more than 1e-5.

    Args:
      system: the scale instances.
      values: leaf path → value.
      start: a frame close by.
      held: channels to balance; the others keep their f.

    Returns:
      f per instance, within about 1e-6 of the fixed point. Equivariant whatever the number of rounds.
    """
    return _rounds_until(lambda f: balancing_round(system, values, f, held), start, _NEAR, at_least=2, at_most=10)


def _rounds_until(
    step: Callable[[Channels], Channels], start: Channels, tolerance: float, at_least: int = 1, at_most: int = 60
) -> Channels:
    if not start:
        return start

    def unfinished(carry: tuple[Channels, jax.Array, jax.Array]) -> jax.Array:
        return ((carry[1] > tolerance) | (carry[2] < at_least)) & (carry[2] < at_most)

    def body(carry: tuple[Channels, jax.Array, jax.Array]) -> tuple[Channels, jax.Array, jax.Array]:
        f, _, count = carry
        fresh = step(f)
        moved = jnp.max(jnp.stack([jnp.max(jnp.abs(a - b), initial=0.0) for a, b in zip(fresh, f, strict=True)]))
        return fresh, moved, count + 1

    first = (start, jnp.asarray(jnp.inf, real_dtype()), jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(unfinished, body, first)[0]


class FrameState(NamedTuple):
    """The reference frame that a transformation carries from step to step.

    Attributes:
      f: log-scale per channel, one array per scale instance.
      settled: whether the channel has had two live sides, and so a balanced f, at least once.
      floor_up: ρ below which an up side has no radial direction; a scalar per instance.
      floor_down: the same for down sides.
      floor_scale: joint scale s below which the linear radial step does not shrink any further.
    """

    f: Channels
    settled: tuple[jax.Array, ...]
    floor_up: tuple[jax.Array, ...]
    floor_down: tuple[jax.Array, ...]
    floor_scale: tuple[jax.Array, ...]


FLOOR = 1e-2
_LOST = 1e-3  # of the floor


def floor_of(rho: jax.Array) -> jax.Array:
    """1e-2 of the mean over a gauge's channels; a mean of zero counts as 1."""
    mean = jnp.mean(rho)
    return FLOOR * jnp.where(mean > 0, mean, 1.0)


def init_frame(system: ScaleSystem, values: Values) -> FrameState:
    """The frame of the starting point, with the floors that decide which channels are alive.

    Args:
      system: the scale instances.
      values: leaf path → value.

    Returns:
      The state.
    """
    f = solve(system, values)
    rho = norms(system, all_squares(system, values, f))
    up, down = tuple(floor_of(r[0]) for r in rho), tuple(floor_of(r[1]) for r in rho)
    scale = tuple(floor_of(r[0] ** i.degree * r[1]) for i, r in zip(system.instances, rho, strict=True))
    state = FrameState(f, (), up, down, scale)
    return state._replace(settled=alive_channels(system, state, rho))


def alive_channels(system: ScaleSystem, state: FrameState, rho: Sides, share: float = 1.0) -> tuple[jax.Array, ...]:
    """Channels all of whose sides exceed `share` of their floor."""
    return tuple(
        (up > share * state.floor_up[k]) & ((down > share * state.floor_down[k]) if instance.down else True)
        for k, (instance, (up, down)) in enumerate(zip(system.instances, rho, strict=True))
    )


def held_channels(system: ScaleSystem, state: FrameState, rho: Sides) -> tuple[jax.Array, ...]:
    """Channels whose f is known and is kept: alive now, or settled once and not yet lost in rounding.

    Deviation from DESIGN §5, which lets go of every channel below its floor: a settled channel is balanced, so both
    sides shrink together and the retraction stays well-posed far below. Letting go cost 7e-2 of drift in 20 steps.
    """
    alive, large = alive_channels(system, state, rho), alive_channels(system, state, rho, _LOST)
    return tuple(a | (s & b) for a, s, b in zip(alive, state.settled, large, strict=True))


def all_squares(system: ScaleSystem, values: Values, f: Channels) -> Squares:
    """Sums of squares of every instance's sides in the frame f."""
    return tuple(system.framed_squares(k, values, f) for k in range(len(system.instances)))


def norms(system: ScaleSystem, squares: Squares) -> list[tuple[jax.Array, jax.Array]]:
    """ρ_up and ρ_down of every instance."""
    return [i.norms(s) for i, s in zip(system.instances, squares, strict=True)]


def track(system: ScaleSystem, values: Values, state: FrameState) -> FrameState:
    """The frame of a nearby point: a few rounds from the last frame, for parameters that may have moved along orbits.

    Args:
      system: the scale instances.
      values: leaf path → value at the new point.
      state: the frame of the point before.

    Returns:
      The state with f of the new point; channels below their floor keep theirs.
    """
    rho = norms(system, all_squares(system, values, state.f))
    alive, held = alive_channels(system, state, rho), held_channels(system, state, rho)
    f = follow(system, values, state.f, held)
    return state._replace(f=f, settled=tuple(s | a for s, a in zip(state.settled, alive, strict=True)))


def settle(system: ScaleSystem, values: Values, state: FrameState, squares: Squares) -> tuple[FrameState, Squares]:
    """Anchors channels that came alive for the first time; every other channel keeps its f.

    Args:
      system: the scale instances.
      values: leaf path → value.
      state: the frame.
      squares: sums of squares of the sides at `values` in that frame.

    Returns:
      The state and the sums of squares in its frame; nothing is solved unless some channel has just come alive.
    """
    if not system.instances:
        return state, squares
    alive = alive_channels(system, state, norms(system, squares))
    fresh = tuple(a & ~s for a, s in zip(alive, state.settled, strict=True))
    anybody = jnp.any(jnp.stack([jnp.any(x) for x in fresh]))

    def anchored() -> tuple[Channels, Squares]:
        f = anchor(system, values, state.f, fresh)
        return f, all_squares(system, values, f)

    f, squares = jax.lax.cond(anybody, anchored, lambda: (state.f, squares))
    return state._replace(f=f, settled=tuple(s | a for s, a in zip(state.settled, alive, strict=True))), squares


def anchor(system: ScaleSystem, values: Values, f: Channels, fresh: tuple[jax.Array, ...]) -> Channels:
    """f with the `fresh` channels balanced against all others, which stay."""
    return jax.lax.fori_loop(0, 12, lambda _, g: balancing_round(system, values, g, fresh), f)
