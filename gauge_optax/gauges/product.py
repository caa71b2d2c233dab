"""The product of several gauges: one group, acting through all of them at once.

Scales and rotations on disjoint axes commute, so that part is a direct product. A logit shift does not: a scale or a
rotation on its leaf moves the shift, W ↦ L·W + t. The product is semidirect there, and `inverse` and `compose` carry
shifts through the linear parts that act after them. `act` applies the list left to right.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax

from gauge_optax._axes import parse_axes
from gauge_optax.binding import BlockSpec, binding_error, instance_key
from gauge_optax.gauges._shift import VOCAB
from gauge_optax.gauges.base import BoundGauge, Element, Gauge, Params
from gauge_optax.gauges.bound import Bound
from gauge_optax.gauges.chart import Chart
from gauge_optax.gauges.shift import LogitShift


def product(gauges: "Gauge | Sequence[Gauge]") -> "Product":
    """One gauge made of several, in the order in which they act.

    Args:
      gauges: a gauge or a sequence of them; products inside are flattened.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are tuples of the parts' elements in list order.

    Raises:
      ValueError: something that is not a gauge, here; parts that do not commute on a leaf, when a tree is first seen.

    >>> norm = go.norm_scale({"scale": "channel"}, {"up": "channel _"})
    >>> relu = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> both = go.product([norm, relu])
    >>> both.dim({"scale": jnp.ones(3), "up": jnp.ones((3, 4)), "down": jnp.ones((4, 3))})
    7

    Reference: docs/design.md §2.
    """
    if isinstance(gauges, Gauge):
        gauges = (gauges,)
    if isinstance(gauges, str | Mapping) or not isinstance(gauges, Iterable):
        raise binding_error(
            "product",
            "no gauges",
            f"a {type(gauges).__name__}",
            "a gauge, or a sequence of gauges",
            "pass the list of gauges; in an optimizer it comes after the learning rate",
        )
    parts: list[BoundGauge] = []
    for gauge in gauges:
        if isinstance(gauge, Product):
            parts.extend(gauge.parts)
        elif isinstance(gauge, BoundGauge):
            parts.append(gauge)
        else:
            raise binding_error(
                "product",
                f"not a gauge: {gauge!r}",
                f"a {type(gauge).__name__}",
                "a gauge, or a sequence of gauges",
                "pass what go.rescale(...) and the like return",
            )
    return Product(tuple(parts))


@dataclasses.dataclass(frozen=True)
class Product(Gauge):
    """See `product`."""

    parts: tuple[BoundGauge, ...]
    name: ClassVar[str] = "product"

    def bound(self, params: Any) -> Bound:
        parts = [part.bound(params) for part in self.parts]
        joint = Bound(
            tuple(i for b in parts for i in b.scales),
            tuple(i for b in parts for i in b.shifts),
            tuple(h for b in parts for h in b.heads),
            tuple(i for b in parts for i in b.linear),
        )
        joint.check()
        return joint

    def chart(self, params: Any) -> Chart:
        return Chart(tuple((part, part.bound(params)) for part in self.parts), self.bound(params))

    def act(self, element: Element, params: Params) -> Params:
        for part, own in zip(self.parts, element, strict=True):
            params = part.act(own, params)
        return params

    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        keys = jax.random.split(key, max(1, len(self.parts)))
        return tuple(part.sample(k, params, scale) for part, k in zip(self.parts, keys, strict=False))

    def identity(self, params: Any) -> Element:
        return tuple(part.identity(params) for part in self.parts)

    def inverse(self, element: Element) -> Element:
        plain = tuple(part.inverse(own) for part, own in zip(self.parts, element, strict=True))
        return tuple(
            self._carry(self._carry(own, at, range(at), plain), at, range(at + 1, len(self.parts)), element)
            if isinstance(self.parts[at], LogitShift)
            else own
            for at, own in enumerate(plain)
        )

    def compose(self, a: Element, b: Element) -> Element:
        undo = tuple(part.inverse(own) for part, own in zip(self.parts, b, strict=True))
        return tuple(
            part.compose(
                self._carry(a[at], at, range(at + 1, len(self.parts)), undo), self._carry(b[at], at, range(at), a)
            )
            if isinstance(part, LogitShift)
            else part.compose(a[at], b[at])
            for at, part in enumerate(self.parts)
        )

    def dual(self, element: Element) -> Element:
        return tuple(part.dual(own) for part, own in zip(self.parts, element, strict=True))

    def fraction(self, element: Element, strength: float | jax.Array) -> Element:
        return tuple(part.fraction(own, strength) for part, own in zip(self.parts, element, strict=True))

    def dim(self, params: Any) -> int:
        return sum(part.dim(params) for part in self.parts)

    def _carry(self, shifts: Element, at: int, indices: range, element: Element) -> Element:
        """A shift element moved by the linear parts `indices` of `element`."""
        specs = self.parts[at].specs
        return {
            key: {
                path: self._carried(_spec_of(specs, path), path, shift, indices, element)
                for path, shift in instance.items()
            }
            for key, instance in shifts.items()
        }

    def _carried(self, spec: BlockSpec, path: str, shift: jax.Array, indices: range, element: Element) -> jax.Array:
        leaf = shift.reshape(_slice_shape(spec, shift.shape))
        for part, own in ((self.parts[k], element[k]) for k in indices):
            if not isinstance(part, LogitShift):
                bound = part.bound_leaf(path, leaf.shape, own)
                leaf = part.move(bound, own, {path: leaf})[path]
        return leaf.reshape(shift.shape)


def _spec_of(specs: Sequence[BlockSpec], path: str) -> BlockSpec:
    return next(s for s in specs if instance_key(specs, s, path) is not None)


def _slice_shape(spec: BlockSpec, shift: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the leaf's slice at one vocab entry, from the shape of a shift in an element."""
    lengths = iter(shift)
    return tuple(
        1 if [part.name for part in group] == [VOCAB] else next(lengths)
        for group in parse_axes("logit_shift", spec.pattern, spec.axes).groups
    )
