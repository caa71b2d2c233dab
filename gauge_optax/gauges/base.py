"""The protocol of a gauge: a symmetry of a parameter tree, with its action, reading and split.

A subclass of `Gauge` that has the seven abstract methods works everywhere: what it needs of its action and reading is
taken from there (`by_action`). One that says more of itself, as those of this package do (`BoundGauge`), is faster.

Here: the methods every gauge has, and those that are the same for all. Not here: any particular symmetry, and
anything that an optimizer does with one.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib

from gauge_optax.binding import (
    Binding,
    Block,
    BlockSpec,
    Instance,
    bind,
    bind_leaf,
    binding_error,
    group_axes,
    instance_key,
    leaves_by_path,
    with_leaves,
)
from gauge_optax.gauges._matrices import matrices_of, named_axes
from gauge_optax.gauges.balance import least_norm
from gauge_optax.gauges.bound import Arrays, Bound
from gauge_optax.gauges.by_action import action_motion, action_reading
from gauge_optax.gauges.chart import Chart, read, split
from gauge_optax.gauges.reading import Motion, Reading

Element = Any
"""A group element: `dict[str, Array]` keyed by instance, or for a product the tuple of its gauges' elements."""

Params = TypeVar("Params")

Effect = Literal["still", "shift", "diagonal", "orthogonal", "linear"]
"""What a move does to a vector's entries: nothing; nothing, though it moves points; it multiplies them; it turns bases
and keeps norms; it mixes them."""


class Gauge(abc.ABC):
    """A symmetry of a network, bound to the leaves of a parameter tree.

    Gauges are frozen, hashable and hold no arrays. Every method takes the parameters, of which only the shapes are
    read unless said otherwise. The action is affine in the parameters.

    Attributes:
      name: for messages.
      effect: of a move on vectors.
      breaks: what usually is amiss where it is bound and is no symmetry, for messages.
      balancing: of a move to the balance, or part of the way.

    >>> class Translation(go.Gauge):  # a constant from one table of embeddings to another
    ...     name, effect = "translation", "shift"
    ...     def act(self, element, params):
    ...         return {"token": params["token"] + element[""], "place": params["place"] - element[""]}
    ...     def read(self, params):  # the slice: positions of mean zero
    ...         return {"": -jnp.mean(params["place"], 0)}
    ...     def sample(self, key, params, scale=1.0):
    ...         return {"": scale * jax.random.normal(key, params["place"].shape[1:])}
    ...     def identity(self, params):
    ...         return {"": jnp.zeros(params["place"].shape[1:])}
    ...     def inverse(self, element):
    ...         return {"": -element[""]}
    ...     def compose(self, a, b):
    ...         return {"": a[""] + b[""]}
    ...     def dim(self, params):
    ...         return params["place"].shape[1]
    >>> params = {"token": jnp.ones((5, 2)), "place": jnp.arange(6.0).reshape(3, 2)}
    >>> step = {"token": jnp.zeros((5, 2)), "place": jnp.ones((3, 2))}
    >>> across = Translation().horizontal(params, step)  # the part that the function can see
    >>> float(across["token"][0, 0]), float(across["place"][0, 0])
    (1.0, 0.0)
    """

    name: ClassVar[str]
    effect: ClassVar[Effect] = "linear"
    breaks: ClassVar[str] = "another reader of these leaves, or an index"
    balancing: ClassVar[Effect] = "still"

    @abc.abstractmethod
    def act(self, element: Element, params: Params) -> Params:
        """The function-preserving move g·θ: the same structure, every leaf in its dtype."""

    @abc.abstractmethod
    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        """A random element; `scale` 1 moves log-scales by up to 1 and takes rotations from the Haar measure.

        Args:
          key: a PRNG key.
          params: the parameters (values are read for shifts, whose size follows the leaf's RMS).
          scale: size of the move.
        """

    @abc.abstractmethod
    def identity(self, params: Any) -> Element:
        """The element that moves nothing."""

    @abc.abstractmethod
    def inverse(self, element: Element) -> Element:
        """The element g⁻¹ with act(g⁻¹, act(g, θ)) = θ."""

    @abc.abstractmethod
    def compose(self, a: Element, b: Element) -> Element:
        """The product with act(compose(a, b), θ) = act(a, act(b, θ))."""

    @abc.abstractmethod
    def read(self, params: Any) -> Element:
        """The element that takes the slice to this point, read off anchors: read(g·θ) = g·read(θ).

        Args:
          params: the point (values are read).

        Returns:
          An element, the identity on the slice; act(inverse(read(θ)), θ) is the same for all points of an orbit. A
          channel or a head whose blocks are all zero reads as the identity.

        >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
        >>> params = {"up": jnp.array([[3.0], [4.0]]), "down": jnp.ones((1, 1))}
        >>> round(float(jnp.exp(gauge.read(params)[""][0])), 4)  # a column of norm 5, on the slice of norm 1
        5.0
        """

    @abc.abstractmethod
    def dim(self, params: Any) -> int:
        """Number of vertical dimensions, summed over instances."""

    def fraction(self, element: Element, strength: float | jax.Array) -> Element:
        """What lies `strength` of the way from the identity to a *balance*, in the group's logarithm."""
        del element, strength
        raise binding_error(
            self.name, "no way to go a part of", "a gauge without a logarithm", "strength=1.0, all the way",
            "write strength=1.0, or give the gauge a method `fraction(element, strength)`",
        )  # fmt: skip

    # Made of the above, by default -------------------------------------------------------------------

    def bound(self, params: Any) -> Bound:
        """The gauge's instances on this tree. Raises ValueError where the binding does not fit it."""
        return Bound(more=(action_reading(self, params),))

    def chart(self, params: Any) -> Chart:
        """The gauge, or the gauges of a product, on this tree, with all readings in their order."""
        bound = self.bound(params)
        bound.check()
        return Chart(((self, bound),), bound)

    def readings(self, bound: Bound) -> tuple[Reading, ...]:
        """The small groups that this gauge is made of on a tree."""
        return bound.more

    def element_of(self, bound: Bound, found: Mapping[Reading, Any], values: Mapping[str, jax.Array]) -> Element:
        """The gauge's element from its readings.

        Args:
          bound: its instances.
          found: elements by reading.
          values: bound leaves, with the gauges that act after this one undone.
        """
        del values
        return found[bound.more[0]]

    def coordinates_of(self, bound: Bound, element: Element, values: Arrays) -> Element:
        """Coordinates of a point with these values, that reads as this element; empty where there are none."""
        del bound, element, values
        return {}

    def motion(self, bound: Bound, element: Element, inverse: Element) -> Motion:
        """A frame of this gauge, ready to be applied to points, tangents and cotangents.

        Args:
          bound: its instances.
          element: F.
          inverse: F⁻¹.
        """
        return action_motion(bound.more[0], element, inverse)

    def by_reading(self, bound: Bound, element: Element) -> Mapping[Reading, jax.Array]:
        """Of a gauge that does nothing but scale or turn, log-scales or matrices by reading; of all others nothing."""
        return {}

    def move(self, bound: Bound, element: Element, values: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """`values` of bound leaves after the move: what `act` does, before dtypes and `1+` come in."""
        return {**values, **bound.more[0].acted(element, values)}

    def centred(self, bound: Bound, values: Arrays) -> Arrays:
        """`values` without what is added by shifts along `vocab`."""
        del bound
        return values

    def sole_gradient(self, bound: Bound, point: Arrays, gradient: Arrays) -> jax.Array | None:
        """The size of this gauge's gradients at a point of the slice where every other one is zero; zero elsewhere.

        None where there are no such points.
        """
        del bound, point, gradient
        return None

    def carried(self, element: Element, by: "Sequence[tuple[Gauge, Element]]") -> Element:
        """h·g·h⁻¹ for moves h of other gauges of a product, which mostly commute with this one."""
        del by
        return element

    def moved_leaf(self, path: str, leaf: jax.Array, element: Element) -> jax.Array:
        """A slice of one leaf after the linear part of a move that acts on the slice's entries alone."""
        del path, element
        return leaf

    def effect_of(self, element: Element) -> Effect:
        """`effect`, of an element that may be known to do less."""
        del element
        return self.effect

    def _of(self, parts: Sequence[Any]) -> Any:
        """What is found part by part, as an element."""
        return parts[0]

    def vertical(self, params: Any, tangent: Params) -> Params:
        """The part of a tangent along the orbit.

        Args:
          params: the point (values are read).
          tangent: an update or a difference of parameters, same structure.

        Returns:
          The vertical part; zero on leaves the gauge does not bind.
        """
        left, leaves = leaves_by_path(self.horizontal(params, tangent)), leaves_by_path(tangent)
        bound = self.bound(params).offset
        return with_leaves(tangent, {p: x - left[p] if p in bound else jnp.zeros_like(x) for p, x in leaves.items()})

    def horizontal(self, params: Any, tangent: Params) -> Params:
        """The part of a tangent across the orbit: what the way back to the slice leaves of it.

        Args:
          params: the point (values are read).
          tangent: an update or a difference of parameters.

        Returns:
          The horizontal part, along which no anchor changes what it reads and no head turns; leaves the gauge does not
          bind come back unchanged.

        >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
        >>> params = {"up": jnp.array([[3.0], [4.0]]), "down": jnp.ones((1, 1))}
        >>> across = gauge.horizontal(params, {"up": params["up"], "down": jnp.zeros((1, 1))})
        >>> bool(jnp.allclose(across["up"], 0.0, atol=1e-6) and jnp.allclose(across["down"], 1.0))  # its partner grows
        True
        """
        leaves = leaves_by_path(tangent)
        found = split(self.chart(params), params, tangent)
        return with_leaves(tangent, {p: x.astype(leaves[p].dtype) for p, x in found.items()})

    def coordinates(self, params: Any) -> Element:
        """Where on its orbit a point stands: the logarithm of what its anchors read, for scales and shifts.

        Args:
          params: the point (values are read).

        Returns:
          The structure of an element; empty dicts for rotations and linear gauges, which have holonomy instead of a
          coordinate. coordinates(g·θ) = coordinates(θ) + log α; of a shift the mean along `vocab` of the leaf as it
          stands.
        """
        on = self.chart(params)
        elements, _ = read(on, params, turning=False)
        values = on.joint.values(params)
        parts = zip(on.parts, elements, strict=True)
        return self._of(tuple(part.coordinates_of(bound, own, values) for (part, bound), own in parts))

    def frame(self, params: Any) -> Element:
        """The element that takes the least-norm representative of its orbit to a point.

        Args:
          params: the point (values are read).

        Returns:
          An element: the identity for rotations, and for channels and heads without such a representative (a side is
          zero, or has less than full rank).
        """
        return self.inverse(self.balance(params))

    def balance(self, params: Any) -> Element:
        """The element that takes a point to the least-norm representative of its orbit.

        Args:
          params: the point (values are read).

        Returns:
          The inverse of `frame`; for `head_linear` (H_A⁻¹ # H_B)^{1/2}. The identity, unless the gauge says otherwise.
        """
        return self.identity(params)

    def muon_dimension_numbers(self, params: Any) -> Any:
        """How `optax.contrib.muon` is to read the gauge's leaves: one matrix per head where a rotation binds the leaf.

        Args:
          params: the parameters.

        Returns:
          A tree like `params` with an `optax.contrib.MuonDimensionNumbers` for every matrix of a rotation, a rescale or
          a norm, and None for every other leaf: what `muon_weight_dimension_numbers` takes.

        Of a leaf whose heads share an axis with its rows or columns (a fused kernel) optax can see one matrix alone:
        its polar factor too turns with every head, but has one scale for all. `quotient_muon` reads it per head.

        >>> gauge = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
        >>> numbers = gauge.muon_dimension_numbers({"value": jnp.ones((6, 2, 4)), "out": jnp.ones((2, 4, 6))})
        >>> numbers["out"]  # rows, columns; the heads are what is left
        MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2,))
        """
        axes = named_axes(matrices_of(self.bound(params)))
        numbers = {p: optax.contrib.MuonDimensionNumbers(*own) for p, own in axes.items()}
        return with_leaves(params, dict.fromkeys(leaves_by_path(params)) | numbers)


class ReadGauge(Gauge):
    """What gauges share that are made of readings: their own, or those of a product's parts."""

    def read(self, params: Any) -> Element:
        return self._of(read(self.chart(params), params)[0])

    def frame(self, params: Any) -> Element:
        return self._of(least_norm(self.chart(params), params))

    def balance(self, params: Any) -> Element:
        return self.inverse(self.frame(params))


@dataclasses.dataclass(frozen=True)
class BoundGauge(ReadGauge):
    """A gauge given by one list of block specifications.

    Attributes:
      specs: what the user wrote, in order.
      sizes: lengths of axes that shapes alone do not fix.
    """

    specs: tuple[BlockSpec, ...]
    sizes: tuple[tuple[str, int], ...]
    reserved: ClassVar[tuple[str, ...]] = ()

    def binding(self, params: Any) -> Binding:
        """The specifications resolved on a tree, from shapes only."""
        return bind(self.name, self.specs, self.sizes, params, self.reserved)

    @abc.abstractmethod
    def assemble(self, named: tuple[str, ...], instances: Sequence[Instance]) -> Bound:
        """Resolved instances as kernels."""

    @abc.abstractmethod
    def element_sizes(self, named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        """Lengths of the named axes and of the reserved one, read off an instance's element."""

    @abc.abstractmethod
    def move(self, bound: Bound, element: Element, values: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]: ...

    @abc.abstractmethod
    def element_of(self, bound: Bound, found: Mapping[Reading, Any], values: Mapping[str, jax.Array]) -> Element: ...

    @abc.abstractmethod
    def motion(self, bound: Bound, element: Element, inverse: Element) -> Motion: ...

    def bound(self, params: Any) -> Bound:
        binding = self.binding(params)
        return self.assemble(binding.named, binding.instances)

    def readings(self, bound: Bound) -> tuple[Reading, ...]:
        del bound
        return ()

    def moved_leaf(self, path: str, leaf: jax.Array, element: Element) -> jax.Array:
        named = group_axes(self.name, self.specs, self.reserved)
        found: dict[str, tuple[Block, ...]] = {}
        for spec in self.specs:
            key = instance_key(self.specs, spec, path)
            if key is not None and key in element:
                block = bind_leaf(self.name, spec, path, leaf.shape, self.element_sizes(named, element[key]))
                found[key] = found.get(key, ()) + ((block,) if block is not None else ())
        sizes = {key: tuple(self.element_sizes(named, element[key]).items()) for key in found}
        bound = self.assemble(named, [Instance(key, blocks, sizes[key]) for key, blocks in found.items()])
        return self.move(bound, element, {path: leaf})[path]

    def act(self, element: Element, params: Params) -> Params:
        bound, leaves = self.bound(params), leaves_by_path(params)
        moved = self.move(bound, element, bound.values(params))
        stored = {p: moved[p] - off if np.any(off) else moved[p] for p, off in bound.offset.items()}
        return with_leaves(params, {p: x.astype(leaves[p].dtype) for p, x in stored.items()})


Gauges = Gauge | Sequence[Gauge]
"""What every transformation, assertion and measure takes: one gauge, or several that mean their product."""
