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
from gauge_optax.gauges.gauge import Element, Gauge, Gauges, Params, SliceGauge


def product(gauges: Gauges) -> "Product":
    """One gauge made of several, in the order in which they act.

    Args:
      gauges: a gauge or a sequence of them; products inside are flattened.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are tuples of the parts' elements in list order.

    Raises:
      ValueError: something that is not a gauge, at once; parts that do not commute on a leaf, when a tree is first
        seen.

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
            "product", "no gauges", f"a {type(gauges).__name__}", "a gauge, or a sequence of gauges",
            "pass the list of gauges; in an optimizer it comes after the learning rate",
        )  # fmt: skip
    parts: list[Gauge] = []
    for gauge in gauges:
        if not isinstance(gauge, Gauge):
            raise binding_error(
                "product", f"not a gauge: {gauge!r}", f"a {type(gauge).__name__}", "a gauge, or a sequence of gauges",
                "pass what go.rescale(...) and the like return",
            )  # fmt: skip
        parts.extend(gauge._parts)
    twice = next((part for at, part in enumerate(parts) if part in parts[:at]), None)
    if twice is not None:
        raise binding_error(
            "product", "a gauge given twice", f"{twice!r}", "every gauge once in a list", "drop one of the two"
        )
    return Product(tuple(parts))


@dataclasses.dataclass(frozen=True)
class Product(SliceGauge):
    """See `product`."""

    parts: tuple[Gauge, ...]
    name: ClassVar[str] = "product"

    @property
    def _parts(self) -> tuple[Gauge, ...]:
        return self.parts

    def _packed(self, elements: Sequence[Element]) -> Element:
        return tuple(elements)

    def act(self, element: Element, params: Params) -> Params:
        for part, x in zip(self.parts, element, strict=True):
            params = part.act(x, params)
        return params

    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        keys = jax.random.split(key, max(1, len(self.parts)))
        return tuple(part.sample(k, params, scale) for part, k in zip(self.parts, keys, strict=False))

    def identity(self, params: Any) -> Element:
        return tuple(part.identity(params) for part in self.parts)

    def inverse(self, element: Element) -> Element:
        plain = tuple(part.inverse(x) for part, x in zip(self.parts, element, strict=True))
        return tuple(
            part._carried(part._carried(x, self._pairs(plain)[:at]), self._pairs(element)[at + 1 :])
            for at, (part, x) in enumerate(zip(self.parts, plain, strict=True))
        )

    def compose(self, a: Element, b: Element) -> Element:
        undo = tuple(part.inverse(x) for part, x in zip(self.parts, b, strict=True))
        return tuple(
            part.compose(part._carried(a[at], self._pairs(undo)[at + 1 :]), part._carried(b[at], self._pairs(a)[:at]))
            for at, part in enumerate(self.parts)
        )

    def power(self, element: Element, exponent: float | jax.Array) -> Element:
        return tuple(part.power(x, exponent) for part, x in zip(self.parts, element, strict=True))

    def dim(self, params: Any) -> int:
        return sum(part.dim(params) for part in self.parts)

    def _pairs(self, element: Element) -> list[tuple[Gauge, Element]]:
        return list(zip(self.parts, element, strict=True))
