"""An explicit gauge move, as an optimizer's state meets it: what it does to the vectors that a state holds."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import binding_error, leaves_by_path, with_leaves
from gauge_optax.gauges.gauge import Element, Gauge, Product
from gauge_optax.gauges.instance import Arrays, Effect
from gauge_optax.linalg import real_dtype

Tree = TypeVar("Tree")


class MovingPart(NamedTuple):
    """One gauge's part of a move.

    Attributes:
      gauge: the gauge.
      element: its element.
      effect: what it does to vectors, see `Gauge`.
    """

    gauge: Gauge
    element: Element
    effect: Effect


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """A group element with what is known of it while tracing. Holds arrays: it stays inside one trace.

    Attributes:
      parts: one per gauge, in the order of the optimizer's list.
      params: a tree with the leaves of θ; shapes only.
      on_unknown: "error", "reset" or "keep".
    """

    parts: tuple[MovingPart, ...]
    params: Any
    on_unknown: str

    @property
    def group(self) -> Product:
        """All gauges as one."""
        return Product(tuple(part.gauge for part in self.parts))

    @property
    def element(self) -> Element:
        """Its element."""
        return tuple(part.element for part in self.parts)

    @functools.cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every leaf of θ."""
        return {path: jnp.shape(leaf) for path, leaf in leaves_by_path(self.params).items()}

    def with_effect(self, *effects: Effect) -> "Move":
        """The parts that do one of these to vectors."""
        return dataclasses.replace(self, parts=tuple(part for part in self.parts if part.effect in effects))

    def binders(self, *effects: Effect) -> dict[str, str]:
        """Leaf path → name of the first gauge with one of these effects that binds it."""
        names: dict[str, str] = {}
        for part in self.with_effect(*effects).parts:
            for path in part.gauge._slice(self.params).added:
                names.setdefault(path, part.gauge.name)
        return names

    @functools.cached_property
    def moved(self) -> Mapping[str, str]:
        """Leaf path → name of the first gauge that moves it."""
        return self.binders("shift", "diagonal", "orthogonal", "linear")

    def refuse(self, what: str, gauge: str, found: str, remedy: str = "") -> ValueError:
        """The complaint about a part of a state that the move cannot carry."""
        return binding_error(
            "transport", f"no rule for {what} under {gauge}", found,
            "averages of gradients, or squares of their entries under a gauge that scales entries",
            remedy or "write on_unknown='reset' to start that leaf's moments afresh or 'keep' to leave them as they "
            f"are, train with go.quotient(tx, gauges), whose state moves exactly, or leave {gauge} where it is",
        )  # fmt: skip

    def vectors(self, leaves: Arrays, outgoing: Collection[str]) -> Arrays:
        """Averages at g·θ: of updates (tangents) on `outgoing` leaves, of gradients (cotangents) on the others."""
        return self.with_effect("diagonal", "orthogonal", "linear")._carried(leaves, outgoing, 1)

    def entries(self, leaves: Arrays, power: int, outgoing: Collection[str]) -> Arrays:
        """The same for averages of this power of every entry; only gauges that scale entries can move these."""
        return self.with_effect("diagonal")._carried(leaves, outgoing, power)

    def _carried(self, leaves: Arrays, outgoing: Collection[str], times: int) -> Arrays:
        if not self.parts:
            return leaves
        tangents = {path: x for path, x in leaves.items() if path in outgoing}
        cotangents = {path: x for path, x in leaves.items() if path not in outgoing}
        for _ in range(times):
            tangents = move_tangent(self.group, self.element, self.params, tangents) if tangents else tangents
            cotangents = move_cotangent(self.group, self.element, self.params, cotangents) if cotangents else {}
        return tangents | cotangents


def moving_part(gauge: Gauge, element: Element, params: Any) -> MovingPart:
    """A part of a move; its effect is told from the element as far as that can be read while tracing."""
    leaves = jax.tree.leaves(element)
    known = not any(isinstance(x, jax.core.Tracer) for x in leaves)
    still = known and all(map(np.array_equal, leaves, jax.tree.leaves(gauge.identity(params))))
    return MovingPart(gauge, element, "still" if still else gauge._effect_of(element))


def move_tangent(group: Product, element: Element, params: Any, tangent: Tree) -> Tree:
    """A tangent at θ carried to g·θ.

    Args:
      group: the gauges.
      element: g.
      params: a tree with the leaves of θ; shapes only.
      tangent: a tree with the same paths, or some of them.

    Returns:
      The tangent, every leaf in its dtype.
    """
    return _moved(group, element, params, tangent, dual=False)


def move_cotangent(group: Product, element: Element, params: Any, cotangent: Tree) -> Tree:
    """A cotangent at θ carried to g·θ: as `move_tangent`, by the inverse transpose."""
    return _moved(group, element, params, cotangent, dual=True)


def _moved(group: Product, element: Element, params: Any, tree: Tree, dual: bool) -> Tree:
    s, leaves = group._slice(params), leaves_by_path(tree)
    shapes = {path: leaf.shape for path, leaf in leaves_by_path(params).items() if path in s.added}
    vectors = {
        path: jnp.asarray(leaves[path], real_dtype()) if path in leaves else jnp.zeros(shape, real_dtype())
        for path, shape in shapes.items()
    }
    for instance, e in zip(s.instances, s.from_elements(element), strict=True):
        vectors = instance.pull(instance.inverse(e), vectors) if dual else instance.push(e, vectors)
    return with_leaves(tree, {path: x.astype(leaves[path].dtype) for path, x in vectors.items() if path in leaves})
