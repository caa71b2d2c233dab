"""A product of gauges on one tree, and its reading: the frame of a point in closed form.

Here: which readings there are, and taking them in order. Not here: one reading (`_scale`, `_linear`, `turning`), what
is done on the slice (`gauge_optax.slice`).
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from gauge_optax.binding import binding_error
from gauge_optax.gauges.bound import Bound
from gauge_optax.gauges.reading import Anchored, Arrays, Motion, Order, Place, Reading, Turning, order_of
from gauge_optax.linalg import real_dtype
from gauge_optax.xla import after, anew

Change = Callable[[Sequence[Any], Arrays, Arrays], Arrays]
"""What a class of rotations makes of its readings, a point and a vector."""

VERSION = 2  # of what states mean: raised where an older one would be read otherwise


class Part(Protocol):
    """What a chart needs of one gauge of a product."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def effect(self) -> str:
        """Of its moves on vectors: "shift", "diagonal", …"""

    def readings(self, bound: Bound) -> tuple[Reading, ...]:
        """Its readings on a tree."""

    def element_of(self, bound: Bound, found: Mapping[Reading, jax.Array], values: Mapping[str, jax.Array]) -> Any:
        """Its element, from its readings."""

    def coordinates_of(self, bound: Bound, element: Any, values: Arrays) -> Any:
        """What must not drift."""

    def inverse(self, element: Any) -> Any:
        """g⁻¹."""

    def sole_gradient(self, bound: Bound, point: Arrays, gradient: Arrays) -> jax.Array | None:
        """How large its gradients are where all others are zero; zero elsewhere."""

    def centred(self, bound: Bound, values: Arrays) -> Arrays:
        """`values` without what is added by shifts."""

    def move(self, bound: Bound, element: Any, values: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Points, moved."""

    def by_reading(self, bound: Bound, element: Any) -> Mapping[Reading, jax.Array]:
        """Log-scales or matrices by reading, where it does nothing else."""

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
    def labels(self) -> tuple[str, ...]:
        """Every gauge's place in the list, its name, a checksum of what it binds, and the states' version."""
        parts = enumerate(self.parts)
        return tuple(f"{at:03d}.{part.name}.{_checksum(part, own):08x}.v{VERSION}" for at, (part, own) in parts)

    def check(self, labels: Collection[str]) -> None:
        """Raises ValueError where a state with these labels was made with other gauges, or on other leaves."""
        if set(labels) != set(self.labels):
            ends = [label.rpartition(".v")[2] for label in labels]
            versions = {end if end.isdigit() else "1" for end in ends}
            if versions - {str(VERSION)}:
                raise binding_error(
                    "gauges", "a state of another version of this library",
                    f"states of version {', '.join(sorted(versions))}",
                    f"version {VERSION}", "go on with the library that made it, or start anew by tx.init(params)",
                )  # fmt: skip
            raise binding_error(
                "gauges", "a state of other gauges",
                f"in the state {', '.join(sorted(labels)) or 'none'}",
                f"of the optimizer {', '.join(map(self._bound_to, self.labels, self.parts)) or 'none'}",
                "give the optimizer the list that its state was made with, in that order and on leaves of those "
                "shapes; or start anew by tx.init(params)",
            )  # fmt: skip

    def _bound_to(self, label: str, part: tuple[Any, Bound]) -> str:
        found = {block.path: block.shape for block in part[1].blocks}
        return f"{label} (on {', '.join(f'{path} {shape}' for path, shape in found.items())})"

    @functools.cached_property
    def moving(self) -> tuple[int, ...]:
        """The order in which parts are applied: between two shifts first what mixes entries, then scales.

        These commute. Scales that are undone first are written down once, with the product that turns them.
        """
        shifts = [part.effect == "shift" for part, _ in self.parts]
        keys = [(2 * sum(shifts[:k]) + shift, self.parts[k][0].effect == "diagonal") for k, shift in enumerate(shifts)]
        return tuple(sorted(range(len(keys)), key=keys.__getitem__))

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
    def turning_alone(self) -> frozenset[Reading]:
        """Those of gauges that do nothing but turn heads: they can be undone when all else is."""
        own = [part.readings(bound) for part, bound in self.parts]
        return frozenset(r for several in own if all(isinstance(x, Turning) for x in several) for r in several)

    @functools.cached_property
    def order(self) -> Order:
        """Where and in what order the anchored ones are taken."""
        return order_of(self.anchored)


def _checksum(part: Part, bound: Bound) -> int:
    written = repr(part) if dataclasses.is_dataclass(part) else type(part).__qualname__
    return zlib.crc32(f"{written} {[(b.path, b.axes, b.shape) for b in bound.blocks]}".encode())


def read(
    on: Chart, params: Any, turning: bool = True
) -> tuple[tuple[Any, ...], tuple[jax.Array, ...]]:
    """The frame of a point.

    Args:
      on: the product on its tree.
      params: the point.
      turning: whether to read rotations; without, they are the identity.

    Returns:
      The element of every gauge; and per place of the order, which channels were read there. One all of whose anchors
      are zero reads as the identity.
    """
    values = on.joint.values(params)
    found, masks, divided = _anchored(on, on.joint.centre(values))
    found |= {r: r.identity() for r in on.turning}
    for kind, alike in by_class(on.turning if turning else ()):
        found |= dict(zip(alike, kind.read_all(alike, divided), strict=True))
    return elements_of(on, found, values), masks


def elements_of(on: Chart, found: Mapping[Reading, jax.Array], values: Arrays) -> tuple[Any, ...]:
    """The element of every gauge, from its readings and the point."""
    elements: list[Any] = []
    for part, bound in reversed(on.parts):  # what acts last is undone first
        elements.insert(0, part.element_of(bound, found, values))
        values = part.motion(bound, elements[0], part.inverse(elements[0])).undo(values)
    return tuple(elements)


def fixed(
    on: Chart, values: Arrays, places: Sequence[Place], masks: Sequence[jax.Array]
) -> tuple[Arrays, list[jax.Array]]:
    """Values near the slice, moved to it along the orbit, and the element of every place that was divided out.

    Args:
      on: the product on its tree.
      values: bound leaves.
      places: where to read, in their order.
      masks: which channels to read, per place.
    """
    values, elements = _divided(on, values, places, masks)
    return centred(on, values), elements


def _divided(
    on: Chart, values: Arrays, places: Sequence[Place], masks: Sequence[jax.Array]
) -> tuple[Arrays, list[jax.Array]]:
    elements = []
    for place, mask in zip(places, masks, strict=True):
        reading = on.anchored[place.reading]
        element, _ = reading.read(place.anchor, values, mask, near=True)
        values = values | reading.divide(element, values)
        elements.append(element)
    return values, elements


def centred(on: Chart, values: Arrays) -> Arrays:
    """Values, tangents or cotangents without what shifts add."""
    for part, bound in on.parts:
        values = part.centred(bound, values)
    return values


def motions(
    on: Chart, element: Sequence[Any], inverse: Sequence[Any], turning: bool = True
) -> tuple[Motion, ...]:
    """An element of every gauge, ready to be applied together; in the order of `on.moving`.

    Without `turning`, gauges that do nothing but turn heads do nothing.
    """
    still, found = Motion(dict, dict, dict), []
    for k in on.moving:
        part, bound = on.parts[k]
        moves = turning or on.turning_alone.isdisjoint(part.readings(bound))
        found.append(part.motion(bound, element[k], inverse[k]) if moves else still)
    return tuple(found)


def undone(along: Sequence[Motion], values: Arrays) -> Arrays:
    """F⁻¹·θ, of points."""
    for motion in reversed(along):
        values = motion.undo(values)
    return values


def pushed(along: Sequence[Motion], tangent: Arrays) -> Arrays:
    """F·u, of tangents."""
    for motion in along:
        tangent = motion.push(tangent)
    return tangent


def pulled(along: Sequence[Motion], cotangent: Arrays) -> Arrays:
    """Fᵀ·g, of cotangents."""
    for motion in reversed(along):
        cotangent = motion.pull(cotangent)
    return cotangent


def split(on: Chart, params: Any, vector: Any, dual: bool = False) -> Arrays:
    """The horizontal part of a tangent, or of a cotangent, at any point: bound leaves.

    Args:
      on: the product on its tree.
      params: the point.
      vector: a tree like it.
      dual: whether it is a cotangent.
    """
    here = nearest(on, params)
    values = on.joint.vectors(vector)
    if dual:
        return pulled(here.back, horizontal_dual(on, here.point, here.masks, pulled(here.out, values)))
    return pushed(here.out, horizontal(on, here.point, here.masks, pushed(here.back, values)))


class Nearest(NamedTuple):
    """A point of the slice, and the ways from there to a point of its orbit and back.

    Attributes:
      element: the frame, by gauge.
      point: bound leaves.
      masks: which channels have a frame, per place of the order.
      out: the frame, ready to be applied.
      back: its inverse.
    """

    element: tuple[Any, ...]
    point: Arrays
    masks: tuple[jax.Array, ...]
    out: tuple[Motion, ...]
    back: tuple[Motion, ...]


def nearest(on: Chart, params: Any) -> Nearest:
    """The point of the slice on the orbit of this one, heads as they are."""
    element, masks = read(on, params, turning=False)
    inverse = tuple(part.inverse(own) for (part, _), own in zip(on.parts, element, strict=True))
    out, back = motions(on, element, inverse), motions(on, inverse, element)[::-1]
    return Nearest(element, undone(out, on.joint.values(params)), masks, out, back)


def turning_removed(
    on: Chart, point: Arrays, tangent: Arrays, back: Mapping[Reading, jax.Array] | None = None
) -> Arrays:
    """A tangent of the slice without the part that turns heads; the same map for cotangents.

    Where rotations are not undone, `back` has what undoes them, see `Turning.across`.
    """
    return class_after_class(on, point, tangent, lambda kind: functools.partial(kind.across, back=back or {}))


def class_after_class(on: Chart, point: Arrays, vector: Arrays, change: Callable[[type[Turning]], Change]) -> Arrays:
    """A vector that all rotations change: those of one class together, entrywise ones when the others are done.

    Args:
      on: the product on its tree.
      point: bound leaves of a point of the slice.
      vector: bound leaves.
      change: what a class makes of its readings, the point and the vector.
    """
    done: list[jax.Array] = []
    for kind, alike in sorted(by_class(on.turning), key=lambda pair: pair[0].entrywise):
        paths = sorted({block.path for reading in alike for block in reading.moved})
        # Entry by entry a point is made again at little cost: it is not kept while the others have their arrays.
        here = point | anew({p: point[p] for p in paths}, done) if kind.entrywise and done else point
        vector = change(kind)(alike, here, vector)
        done = [vector[p] for p in paths]
    return vector


def horizontal(on: Chart, point: Arrays, masks: Sequence[jax.Array], tangent: Arrays) -> Arrays:
    """A tangent at a point of the slice without its part along the orbit: what the way back to the slice leaves of it.

    Args:
      on: the product on its tree.
      point: bound leaves of a point of the slice.
      masks: which channels have a frame, per place of the order.
      tangent: bound leaves.
    """
    _, left = jax.jvp(lambda values: _scaled_back(on, values, masks), (point,), (tangent,))
    return turning_removed(on, point, centred(on, left))


def horizontal_dual(on: Chart, point: Arrays, masks: Sequence[jax.Array], cotangent: Arrays) -> Arrays:
    """The adjoint of `horizontal`: a gradient of which no motion along the orbit has a part."""
    _, pull = jax.vjp(lambda values: _scaled_back(on, values, masks), point)
    found: Arrays = pull(centred(on, turning_removed(on, point, cotangent)))[0]
    return found


def _scaled_back(on: Chart, values: Arrays, masks: Sequence[jax.Array]) -> Arrays:
    # Channels that are read off a later anchor are not fixed by any step: along their orbit a tangent stays.
    return _divided(on, values, on.order.first, masks[: len(on.order.first)])[0]


def _anchored(on: Chart, values: Arrays) -> tuple[dict[Reading, jax.Array], tuple[jax.Array, ...], Arrays]:
    """Elements of the anchored readings, which channels each place served, and the values with them divided out."""
    found = [r.identity() for r in on.anchored]
    known = [jnp.zeros(r.shape, bool) for r in on.anchored]
    masks = []
    one = jnp.ones((), real_dtype())
    places = on.order.first + on.order.later
    for place in places:
        k, reading = place.reading, on.anchored[place.reading]
        seen = _known_entries(on, place, known, values)
        if reading.sequential:
            seen |= {b.path: seen[b.path] * one for b in place.anchor}
        element, new = reading.read(place.anchor, seen, ~known[k], near=False)
        one = after(element) if reading.sequential else one
        masks.append(new)
        found[k], known[k] = reading.where(new, element, found[k]), known[k] | new
        values = values | reading.divide(element, values)
    # Now that every channel has a frame, anchors count whole, as they do at every step.
    for place, mask in zip(on.order.first, masks, strict=False):
        k, reading = place.reading, on.anchored[place.reading]
        element, _ = reading.read(place.anchor, values, mask, near=True)
        found[k], values = reading.composed(element, found[k]), values | reading.divide(element, values)
    for k, reading in enumerate(on.anchored):  # what has no frame is no part of a rotation's rows
        for block in reading.moved:
            factor = block.spread(reading.named, known[k].astype(real_dtype()), elsewhere=1.0)
            values = values | {block.path: values[block.path] * factor}
    return dict(zip(on.anchored, found, strict=True)), tuple(masks), values


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


