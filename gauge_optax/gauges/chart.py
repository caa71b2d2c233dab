"""A product of gauges on one tree, and its reading: the frame of a point in closed form.

Here: which readings there are, and taking them in order. Not here: one reading (`_scale`, `_linear`, `turning`), what
is done on the slice (`gauge_optax.slice`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from gauge_optax._sequence import after
from gauge_optax.gauges._split import Bound
from gauge_optax.gauges.reading import Anchored, Arrays, Motion, Order, Place, Reading, Turning, order_of
from gauge_optax.linalg import real_dtype


class Part(Protocol):
    """What a chart needs of one gauge of a product."""

    def readings(self, bound: Bound) -> tuple[Reading, ...]:
        """Its readings on a tree."""

    def element_of(self, bound: Bound, found: Mapping[Reading, jax.Array], values: Mapping[str, jax.Array]) -> Any:
        """Its element, from its readings."""

    def coordinates_of(self, bound: Bound, element: Any, values: Arrays) -> Any:
        """What must not drift."""

    def inverse(self, element: Any) -> Any:
        """g⁻¹."""

    def silences(self, bound: Bound) -> bool:
        """Whether every other gradient may be zero."""

    def centred(self, bound: Bound, values: Arrays) -> Arrays:
        """`values` without what is added by shifts."""

    def move(self, bound: Bound, element: Any, values: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Points, moved."""

    def motion(self, bound: Bound, element: Any, inverse: Any) -> Motion:
        """A frame, ready to be applied."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A product of gauges on one tree: static, made anew at every trace.

    Attributes:
      parts: its gauges, each with its instances on the tree.
      joint: the instances of all of them together.
    """

    parts: tuple[tuple[Part, Bound], ...]
    joint: Bound

    @functools.cached_property
    def readings(self) -> tuple[Reading, ...]:
        """Of all gauges."""
        return tuple(reading for part, bound in self.parts for reading in part.readings(bound))

    @functools.cached_property
    def anchored(self) -> tuple[Anchored, ...]:
        """Those that are taken at every step."""
        return tuple(r for r in self.readings if isinstance(r, Anchored))

    @functools.cached_property
    def turning(self) -> tuple[Turning, ...]:
        """Those that are taken once."""
        return tuple(r for r in self.readings if isinstance(r, Turning))

    @functools.cached_property
    def order(self) -> Order:
        """Where and in what order the anchored ones are taken."""
        return order_of(self.anchored)


def read(
    on: Chart, params: Any, turned: Callable[[Turning], bool] | None = None
) -> tuple[tuple[Any, ...], tuple[jax.Array, ...]]:
    """The frame of a point.

    Args:
      on: the product on its tree.
      params: the point.
      turned: which rotations to read; all by default, the others are the identity.

    Returns:
      The element of every gauge; and per anchored reading, which channels were read off their first anchor. Others
      are read off a later one, and not fixed at every step; one all of whose anchors are zero reads as the identity.
    """
    values = on.joint.values(params)
    found, live, divided = _anchored(on, on.joint.centre(values))
    found |= {r: r.identity() for r in on.turning}
    for kind, alike in by_class([r for r in on.turning if turned is None or turned(r)]):
        found |= dict(zip(alike, kind.read_all(alike, divided), strict=True))
    elements: list[Any] = []
    for part, bound in reversed(on.parts):  # what acts last is undone first
        elements.insert(0, part.element_of(bound, found, values))
        values = part.motion(bound, elements[0], part.inverse(elements[0])).undo(values)
    return tuple(elements), live


def _anchored(on: Chart, values: Arrays) -> tuple[dict[Reading, jax.Array], tuple[jax.Array, ...], Arrays]:
    """Elements of the anchored readings, where their first anchor served, and the values with them divided out."""
    found = [r.identity() for r in on.anchored]
    known = [jnp.zeros(r.shape, bool) for r in on.anchored]
    live = list(known)
    one = jnp.ones((), real_dtype())
    places = on.order.first + on.order.later
    for number, place in enumerate(places):
        k, reading = place.reading, on.anchored[place.reading]
        seen = _known_entries(on, place, known, values)
        if reading.sequential:
            seen |= {b.path: seen[b.path] * one for b in place.anchor}
        element, new = reading.read(place.anchor, seen, ~known[k], near=False)
        one = after(element) if reading.sequential else one
        if number < len(on.order.first):
            live[k] = new
        found[k], known[k] = reading.where(new, element, found[k]), known[k] | new
        values = values | reading.divide(element, values)
    # Now that every channel has a frame, anchors count whole, as they do at every step.
    for place in on.order.first:
        k, reading = place.reading, on.anchored[place.reading]
        element, _ = reading.read(place.anchor, values, live[k], near=True)
        found[k], values = reading.composed(element, found[k]), values | reading.divide(element, values)
    for k, reading in enumerate(on.anchored):  # what has no frame is no part of a rotation's rows
        for block in reading.moved:
            factor = block.spread(reading.named, known[k].astype(real_dtype()), elsewhere=1.0)
            values = values | {block.path: values[block.path] * factor}
    return dict(zip(on.anchored, found, strict=True)), tuple(live), values


def _known_entries(on: Chart, place: Place, known: Sequence[jax.Array], values: Arrays) -> Arrays:
    """Leaves, those of an anchor without entries of channels that are not divided out yet."""
    seen = dict(values)
    for other, block in place.others:
        factor = block.spread(on.anchored[other].named, known[other].astype(real_dtype()), elsewhere=1.0)
        seen[block.path] = seen[block.path] * factor
    return seen


def by_class(readings: Sequence[Turning]) -> Iterator[tuple[type[Turning], list[Turning]]]:
    """Readings of one class together."""
    for kind in dict.fromkeys(map(type, readings)):
        yield kind, [r for r in readings if type(r) is kind]


