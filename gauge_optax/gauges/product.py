"""The product of several gauges: one group, acting through all of them at once.

Scales and rotations on disjoint axes commute, so that part is a direct product. A logit shift does not: a scale or a
rotation on its leaf moves the shift, W ↦ L·W + t. The product is semidirect there, and `inverse` and `compose` carry
shifts through the linear parts that act after them. `act` applies the list left to right.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax

from gauge_optax.binding import binding_error
from gauge_optax.gauges.base import Element, Gauge, Params, ReadGauge
from gauge_optax.gauges.bound import Bound
from gauge_optax.gauges.chart import Chart


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
    parts: list[Gauge] = []
    for gauge in gauges:
        if isinstance(gauge, Product):
            parts.extend(gauge.parts)
        elif isinstance(gauge, Gauge):
            parts.append(gauge)
        else:
            raise binding_error(
                "product",
                f"not a gauge: {gauge!r}",
                f"a {type(gauge).__name__}",
                "a gauge, or a sequence of gauges",
                "pass what go.rescale(...) and the like return",
            )
    twice = next((part for at, part in enumerate(parts) if part in parts[:at]), None)
    if twice is not None:
        raise binding_error(
            "product", "a gauge given twice", f"{twice!r}", "every gauge once in a list", "drop one of the two"
        )
    return Product(tuple(parts))


@dataclasses.dataclass(frozen=True)
class Product(ReadGauge):
    """See `product`."""

    parts: tuple[Gauge, ...]
    name: ClassVar[str] = "product"

    def bound(self, params: Any) -> Bound:
        return self.chart(params).joint

    def chart(self, params: Any) -> Chart:
        bounds = [part.bound(params) for part in self.parts]
        joint = Bound(
            tuple(i for b in bounds for i in b.scales),
            tuple(i for b in bounds for i in b.shifts),
            tuple(h for b in bounds for h in b.heads),
            tuple(i for b in bounds for i in b.linear),
            tuple(r for b in bounds for r in b.more),
        )
        joint.check()
        return Chart(tuple(zip(self.parts, bounds, strict=True)), joint)

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
            part.carried(part.carried(own, self._pairs(plain)[:at]), self._pairs(element)[at + 1 :])
            for at, (part, own) in enumerate(zip(self.parts, plain, strict=True))
        )

    def compose(self, a: Element, b: Element) -> Element:
        undo = tuple(part.inverse(own) for part, own in zip(self.parts, b, strict=True))
        return tuple(
            part.compose(part.carried(a[at], self._pairs(undo)[at + 1 :]), part.carried(b[at], self._pairs(a)[:at]))
            for at, part in enumerate(self.parts)
        )

    def fraction(self, element: Element, strength: float | jax.Array) -> Element:
        return tuple(part.fraction(own, strength) for part, own in zip(self.parts, element, strict=True))

    def dim(self, params: Any) -> int:
        return sum(part.dim(params) for part in self.parts)

    def _pairs(self, element: Element) -> list[tuple[Gauge, Element]]:
        return list(zip(self.parts, element, strict=True))

    def _of(self, parts: Sequence[Any]) -> Any:
        return tuple(parts)
