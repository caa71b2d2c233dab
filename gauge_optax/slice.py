"""The slice: one representative of every function, and what takes points, tangents and cotangents there and back.

A point's *frame* F is the group element that its anchors read; the points that read as the identity form the slice.
With θ̂ = F⁻¹·θ, two weight sets of one function are the same numbers:

    θ̂ = F⁻¹·θ      ĝ = Fᵀ·g      u = inner(ĝ, θ̂)      θ̂′ = fix(θ̂ + u)      step = F·(θ̂′ − θ̂)

Here: one function per arrow, for any product of gauges. Not here: what a gauge is (`gauges`), the optimizer inside
(`quotient`). References: Fels and Olver 1999, moving frames; docs/design.md §3.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NewType

import jax
import jax.numpy as jnp

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.gauges.base import Element
from gauge_optax.gauges.chart import Chart, by_class, class_after_class, fixed, pushed, undone
from gauge_optax.gauges.chart import motions as chart_motions
from gauge_optax.gauges.chart import read as chart_read
from gauge_optax.gauges.product import Product
from gauge_optax.gauges.reading import Anchored, Arrays, Motion, Reading
from gauge_optax.linalg import real_dtype, zero

SlicePoint = NewType("SlicePoint", dict[str, jax.Array])
"""Bound leaves of θ̂: values, γ where a leaf stores γ − 1."""

SliceTangent = NewType("SliceTangent", dict[str, jax.Array])
"""Bound leaves of a difference of slice points."""

SliceCotangent = NewType("SliceCotangent", dict[str, jax.Array])
"""Bound leaves of a gradient with respect to θ̂."""


class Frame(NamedTuple):
    """What is kept of the starting point.

    Attributes:
      elements: F by gauge, under a label that says which gauge on which leaves; shifts are measured where `act` adds
        them.
      inverses: the inverse of each: no step inverts a matrix.
      live: per anchored reading, in their order, the channels that were read off their first anchor: those are fixed at
        every step.
      grown: per anchored reading, in their order, how far the optimizer inside has left the slice: it is at θ̃ = A·θ̂.
        Empty where it is kept there.
    """

    elements: dict[str, Element]
    inverses: dict[str, Element]
    live: tuple[jax.Array, ...]
    grown: tuple[jax.Array, ...]

    @property
    def element(self) -> Element:
        """F, an element of the product."""
        return tuple(self.elements[label] for label in sorted(self.elements))

    @property
    def inverse(self) -> Element:
        """The inverses of its parts, in their order."""
        return tuple(self.inverses[label] for label in sorted(self.inverses))


def chart(group: Product, params: Any) -> Chart:
    """The product on this tree. Raises ValueError where a binding does not fit it, or two gauges do not commute."""
    return group.chart(params)


def read(on: Chart, params: Any, turning: bool = True) -> Frame:
    """The frame of a point; see `gauges.chart.read`."""
    element, masks = chart_read(on, params, turning)
    return framed(on, element, masks[: len(on.order.first)])


def framed(on: Chart, element: Element, live: tuple[jax.Array, ...]) -> Frame:
    """A frame from its element."""
    inverse = [part.inverse(own) for (part, _), own in zip(on.parts, element, strict=True)]
    labels = on.labels
    return Frame(dict(zip(labels, element, strict=True)), dict(zip(labels, inverse, strict=True)), live, ())


def unpinned(on: Chart, frame: Frame) -> Frame:
    """The same frame for an optimizer inside that is on the slice now, and may leave it."""
    return frame._replace(grown=tuple(reading.identity() for reading in in_order(on)))


def in_order(on: Chart) -> tuple[Anchored, ...]:
    """Anchored readings in their order."""
    return tuple(on.anchored[place.reading] for place in on.order.first)


# Into the slice and out ---------------------------------------------------------------------------


def motions(on: Chart, frame: Frame, turning: bool = True) -> tuple[Motion, ...]:
    """The frame of every gauge, ready to be applied; see `gauges.chart.motions`.

    Raises ValueError where it is that of other gauges.
    """
    on.check(frame.elements)
    return chart_motions(on, frame.element, frame.inverse, turning)


class Origin(NamedTuple):
    """What a slice point is made of, for an optimizer inside that takes it to the slice the rest of the way.

    Attributes:
      back: F⁻¹ by the number of the reading: log-scales, which have been applied, and matrices of rotations, by which
        rows have yet to be multiplied. What gauges do that both scale and turn has been applied, and is not here.
      faint: the size below which entries of the slice's gradient are rounding, see `faint`.
      params: parameters as they lie.
      updates: gradients as they came.
    """

    back: dict[str, jax.Array]
    faint: jax.Array | None
    params: Any = ()
    updates: Any = ()

    def by_reading(self, on: Chart) -> dict[Reading, jax.Array]:
        """F⁻¹ by reading."""
        return {on.readings[int(k)]: x for k, x in self.back.items()}


def origin(on: Chart, frame: Frame, point: SlicePoint, gradient: Any) -> Origin:
    """Of a point and a gradient whose rotations are not undone and whose faint entries are not taken away."""
    back: dict[Reading, jax.Array] = {}
    for (part, bound), inverse in zip(on.parts, frame.inverse, strict=True):
        back |= part.by_reading(bound, inverse)
    by_number = {str(k): back[r] for k, r in enumerate(on.readings) if r in back}
    return Origin(by_number, faint(on, point, gradient))


def enter(frame: Sequence[Motion], values: Arrays) -> SlicePoint:
    """θ̂ = F⁻¹·θ, from the bound leaves' values."""
    return SlicePoint(undone(frame, values))


def enter_tangent(on: Chart, frame: Frame, tangent: Arrays) -> SliceTangent:
    """F⁻¹·u."""
    return SliceTangent(pushed(chart_motions(on, frame.inverse, frame.element)[::-1], tangent))


def enter_dual(on: Chart, frame: Sequence[Motion], gradient: Arrays, centred: bool = True) -> SliceCotangent:
    """ĝ = Fᵀ·g, without the part along shifts and rounding in place of rows that invariance makes zero."""
    for k, motion in zip(reversed(on.moving), reversed(frame), strict=True):
        part, bound = on.parts[k]
        gradient = motion.pull(gradient)
        gradient = part.centred(bound, gradient) if centred else gradient
    for kind, alike in by_class(on.turning):
        gradient = kind.without_rounding(alike, gradient)
    return SliceCotangent(gradient)


def faint(on: Chart, point: SlicePoint, gradient: Any) -> jax.Array | None:
    """The size below which entries of a gradient are rounding beside the only one that is not zero; None for nowhere.

    Before a head that is constant over classes, every gradient is zero; what arithmetic leaves of it would come out of
    an optimizer that divides by size as a full step.
    """
    leaves = leaves_by_path(gradient)
    sizes = [part.sole_gradient(bound, dict(point), leaves) for part, bound in on.parts]
    known = [size for size in sizes if size is not None]
    return zero(real_dtype()) * jnp.stack(known).max() if known else None


def without_faint(on: Chart, point: SlicePoint, gradient: Any) -> Any:
    """A gradient, of the whole tree, with zero for what is `faint`."""
    leaves = {p: x for p, x in leaves_by_path(gradient).items() if jnp.issubdtype(x.dtype, jnp.floating)}
    least = faint(on, point, gradient)
    if least is None:
        return gradient

    def kept(x: jax.Array) -> jax.Array:
        return jax.lax.select(jnp.abs(x) < least, jnp.zeros_like(x), x)

    return with_leaves(gradient, {path: kept(x) for path, x in leaves.items()})


def place(on: Chart, frame: Frame, point: SlicePoint) -> Arrays:
    """F·θ̂, as values of the bound leaves."""
    values: Arrays = dict(point)
    for (part, bound), element in zip(on.parts, frame.element, strict=True):
        values = dict(part.move(bound, element, values))
    return values


def leave(frame: Sequence[Motion], tangent: SliceTangent) -> Arrays:
    """F·u."""
    return pushed(frame, dict(tangent))


# On the slice -------------------------------------------------------------------------------------


def added(point: SlicePoint, tangent: SliceTangent) -> SlicePoint:
    """θ̂ + u."""
    return SlicePoint({path: point[path] + x for path, x in tangent.items()})


def between(before: SlicePoint, now: SlicePoint) -> SliceTangent:
    """θ̂′ − θ̂."""
    return SliceTangent({path: x - before[path] for path, x in now.items()})


def fix(on: Chart, frame: Frame, point: SlicePoint) -> tuple[SlicePoint, Frame]:
    """Back to the slice along the orbit, in closed form: every anchor to its size, every shift to nothing.

    What that takes is added to `grown`: where the optimizer inside is does not change.
    """
    values, elements = fixed(on, dict(point), on.order.first, frame.live)
    moved = zip(in_order(on), elements, frame.grown, strict=False)
    grown = tuple(r.composed(new, past) if r.grows else past for r, new, past in moved)
    return SlicePoint(values), frame._replace(grown=grown)


def hold(on: Chart, point: SlicePoint, tangent: SliceTangent) -> SliceTangent:
    """u without the part that turns heads."""
    return SliceTangent(class_after_class(on, dict(point), dict(tangent), lambda kind: kind.held))


# Between the slice and where the optimizer inside is ----------------------------------------------


def outward(on: Chart, frame: Frame, point: SlicePoint) -> Arrays:
    """θ̃ = A·θ̂."""
    values: Arrays = dict(point)
    for reading, grown in zip(in_order(on), frame.grown, strict=False):
        values |= reading.divide(reading.inverse(grown), values)
    return values


def outward_dual(on: Chart, frame: Frame, gradient: SliceCotangent) -> Arrays:
    """A⁻ᵀ·ĝ."""
    vectors: Arrays = dict(gradient)
    for reading, grown in zip(in_order(on), frame.grown, strict=False):
        vectors |= reading.divide(reading.dual(grown), vectors)
    return vectors


def inward(on: Chart, frame: Frame, tangent: Arrays) -> SliceTangent:
    """A⁻¹·u."""
    vectors = dict(tangent)
    for reading, grown in zip(in_order(on), frame.grown, strict=False):
        vectors |= reading.divide(grown, vectors)
    return SliceTangent(vectors)
