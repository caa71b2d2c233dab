"""How a point's place on its orbit is read, in closed form: the protocol of one reading, and the order of all of them.

A product of gauges on a tree is a direct product of small groups: log-scales per channel, a matrix per head. Each has a
`Reading`, which reads its element off one block, its *anchor*, once the readings that move that block are divided out.
An anchor that is zero reads nothing, so that a channel whose first block is zero is read off a later one.

Here: the protocol and the order. Not here: any particular reading (`_scale`, `_head`, `_linear`), what is done on the
slice that they define (`gauge_optax.slice`).
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, binding_error, overlap

Arrays = dict[str, jax.Array]
"""Leaf path → array in the computing dtype."""

Anchor = tuple[Block, ...]
"""Blocks that move alike, read together."""


class Reading(abc.ABC):
    """One small group of a product on a tree, an element per value of its named axes."""

    @property
    @abc.abstractmethod
    def gauge(self) -> str:
        """The name of its gauge."""

    @property
    @abc.abstractmethod
    def key(self) -> str:
        """The captures of its instance, as in elements."""

    @property
    @abc.abstractmethod
    def named(self) -> tuple[str, ...]:
        """The axes that index elements."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Their lengths."""

    @property
    @abc.abstractmethod
    def moved(self) -> tuple[Block, ...]:
        """Every block that it moves."""


@dataclasses.dataclass(frozen=True)
class InstanceReading(Reading):
    """One whose names and lengths are those of an instance.

    Attributes:
      instance: of its gauge, on a concrete tree.
    """

    instance: Any

    @property
    def gauge(self) -> str:
        return self.instance.gauge

    @property
    def key(self) -> str:
        return self.instance.key

    @property
    def named(self) -> tuple[str, ...]:
        return self.instance.named

    @property
    def shape(self) -> tuple[int, ...]:
        return self.instance.shape


class Anchored(Reading):
    """One that is read off an anchor, at `init` and again at every step, to come back to the slice.

    Attributes:
      sequential: whether it calls LAPACK far from the identity: two such calls must not run at once.
      grows: whether the optimizer inside can be let off the slice along it.
    """

    sequential: ClassVar[bool] = False
    grows: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def anchors(self) -> tuple[Anchor, ...]:
        """What it can be read off, best first."""

    @abc.abstractmethod
    def read(self, anchor: Anchor, values: Arrays, within: jax.Array, near: bool) -> tuple[jax.Array, jax.Array]:
        """Elements, and for which of the named values (`shape`, bool) they were found.

        Args:
          anchor: one of `anchors`.
          values: leaves, with all readings that move the anchor divided out.
          within: which to read, (`shape`, bool); all others, and those whose anchor has none, get the identity.
          near: elements are near the identity; cheaper ways will do.
        """

    @abc.abstractmethod
    def identity(self) -> jax.Array:
        """The element that moves nothing."""

    @abc.abstractmethod
    def divide(self, element: jax.Array, values: Arrays) -> Arrays:
        """The leaves that it moves, with the element divided out."""

    @abc.abstractmethod
    def inverse(self, element: jax.Array) -> jax.Array:
        """The element that moves back."""

    @abc.abstractmethod
    def dual(self, element: jax.Array) -> jax.Array:
        """The element that, divided out of cotangents, moves them as this one moves points."""

    @abc.abstractmethod
    def composed(self, last: jax.Array, first: jax.Array) -> jax.Array:
        """The element of a point whose own is `last` after `first` was divided out."""

    @abc.abstractmethod
    def balanced(self, values: Arrays) -> jax.Array:
        """The element of the least-norm representative, the identity where there is none.

        Args:
          values: leaves, with all other readings divided out.
        """

    @property
    def log_step(self) -> float:
        """How far log s moves where the logs of both sides of a scale move by a unit together; 0 for no scale."""
        return 0.0

    def factors(self, element: jax.Array, block: Block) -> jax.Array:
        """What an element of a scale multiplies a block by, per channel; 1 for no scale."""
        del element, block
        return jnp.ones(self.shape)

    def partner(self, anchor: Anchor) -> tuple[Block, ...]:
        """The blocks that carry the size of a scale whose anchor has one that is fixed."""
        del anchor
        return ()

    def where(self, condition: jax.Array, element: jax.Array, other: jax.Array) -> jax.Array:
        """One element where a condition (`shape`) holds, elsewhere another."""
        return jnp.where(condition.reshape(condition.shape + (1,) * (element.ndim - condition.ndim)), element, other)


class Turning(Reading):
    """A compact one: its moves keep every norm. It is read at `init` alone, and steps are kept from turning.

    Attributes:
      entrywise: whether its moves are made entry by entry, not by products of matrices.
    """

    entrywise: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def read_all(cls, readings: Sequence[Any], values: Arrays) -> list[jax.Array]:
        """The elements of several readings of this class.

        Args:
          readings: of this class.
          values: leaves, with all anchored readings divided out.
        """

    @classmethod
    @abc.abstractmethod
    def held(cls, readings: Sequence[Any], before: Arrays, change: Arrays) -> Arrays:
        """A change of leaves without the part that turns these readings' rows."""

    @classmethod
    @abc.abstractmethod
    def across(
        cls, readings: Sequence[Any], point: Arrays, vector: Arrays, back: Mapping[Reading, jax.Array]
    ) -> Arrays:
        """The orthogonal projection of a tangent, or of a cotangent, off the directions in which these turn.

        Args:
          readings: of this class.
          point: leaves.
          vector: leaves.
          back: what rows of these readings have yet to be multiplied by to lie on the slice; empty where they do.
        """

    @classmethod
    def without_rounding(cls, readings: Sequence[Any], cotangents: Arrays) -> Arrays:
        """Cotangents, with zero where invariance says zero and arithmetic leaves something."""
        del readings
        return cotangents

    @abc.abstractmethod
    def identity(self) -> jax.Array:
        """The element that moves nothing."""


class Motion(NamedTuple):
    """A frame F of one gauge, ready to be applied to bound leaves.

    Attributes:
      undo: F⁻¹·θ, of points.
      push: F·u, of tangents.
      pull: Fᵀ·g, of cotangents.
    """

    undo: Callable[[Arrays], Arrays]
    push: Callable[[Arrays], Arrays]
    pull: Callable[[Arrays], Arrays]


class Place(NamedTuple):
    """One look at one anchor.

    Attributes:
      reading: index of the reading.
      anchor: what it is read off.
      others: per leaf of the anchor, the indices and blocks of the readings that share entries with it.
    """

    reading: int
    anchor: Anchor
    others: tuple[tuple[int, Block], ...]


class Order(NamedTuple):
    """When readings are taken.

    Attributes:
      first: every reading once, by its anchor.
      later: by its other anchors, for channels that the first is zero in.
    """

    first: tuple[Place, ...]
    later: tuple[Place, ...]


@functools.lru_cache(maxsize=256)
def order_of(readings: tuple[Anchored, ...]) -> Order:
    """The order of reading, whatever the order of the gauges.

    Forwards, every reading by its first anchor, as soon as nothing undivided moves it; then backwards by the others, so
    that a channel of zeros in a chain is read off what comes after it.

    Args:
      readings: the anchored ones of a product on a tree.

    Returns:
      The places.

    Raises:
      ValueError: readings none of whose anchors is free of the others.
    """
    by_path: dict[str, list[tuple[int, Block]]] = {}
    for index, reading in enumerate(readings):
        for block in reading.moved:
            by_path.setdefault(block.path, []).append((index, block))

    def others(index: int, anchor: Anchor) -> tuple[tuple[int, Block], ...]:
        found = ((j, b, a) for a in anchor for j, b in by_path.get(a.path, ()) if j != index)
        return tuple(dict.fromkeys((j, b) for j, b, a in found if overlap(a, b)))

    waiting = sorted(range(len(readings)), key=lambda i: _blocks(readings[i]))
    first: list[Place] = []
    done: set[int] = set()
    # Anchors that are not the first serve as such only where readings would wait for each other.
    level, most = 0, max((len(readings[i].anchors) for i in waiting), default=0)
    while waiting:
        offered = [Place(i, r.anchors[level], others(i, r.anchors[level]))
                   for i in waiting if level < len((r := readings[i]).anchors)]  # fmt: skip
        ready = [place for place in offered if {j for j, _ in place.others} <= done]
        if not ready and level + 1 >= most:
            raise _cycle([readings[i] for i in waiting])
        first += ready if level == 0 else ready[:1]
        done = {place.reading for place in first}
        waiting = [i for i in waiting if i not in done]
        level = 0 if ready else level + 1
    later = tuple(
        Place(place.reading, anchor, others(place.reading, anchor))
        for place in reversed(first)
        for anchor in readings[place.reading].anchors
        if anchor != place.anchor
    )
    return Order(tuple(first), later)


def _blocks(reading: Reading) -> tuple[str, ...]:
    return tuple(f"{block.path} {block.axes}" for block in reading.moved)


def _cycle(waiting: Sequence[Reading]) -> ValueError:
    names, first = ", ".join(f"{r.gauge}[{r.key}]" for r in waiting), waiting[0]
    return binding_error(
        first.gauge,
        f"cyclic gauges at '{first.moved[0].path}'",
        f"every leaf of {names} is shared with another of them",
        "an order in which each gauge has a leaf whose other gauges come earlier",
        "drop one gauge of the cycle, or train it with its own transformation",
    )
