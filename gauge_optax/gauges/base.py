"""The protocol of a gauge: a symmetry bound to leaves by paths and named axes, with its action, split and frame.

Here: the ten methods every gauge has, and those that are the same for all. Not here: any particular symmetry, and
anything that an optimizer does with one.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
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
from gauge_optax.gauges.chart import Chart, read, split
from gauge_optax.gauges.reading import Motion, Reading

Element = Any
"""A group element: `dict[str, Array]` keyed by instance, or for a product the tuple of its gauges' elements."""

Params = TypeVar("Params")


class Gauge(abc.ABC):
    """A symmetry of a network, bound to the leaves of a parameter tree.

    Gauges are frozen, hashable and hold no arrays. Every method takes the parameters, of which only the shapes are
    read unless said otherwise.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def bound(self, params: Any) -> Bound:
        """The gauge's instances on this tree. Raises ValueError where the binding does not fit it."""

    @abc.abstractmethod
    def act(self, element: Element, params: Params) -> Params:
        """The function-preserving move g·θ; every leaf keeps its dtype.

        Args:
          element: a group element.
          params: the parameters.

        Returns:
          The moved parameters, same structure.
        """

    @abc.abstractmethod
    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        """A random element; `scale` 1 moves log-scales by up to 1 and takes rotations from the Haar measure.

        Args:
          key: a PRNG key.
          params: the parameters (values are read for shifts, whose size follows the leaf's RMS).
          scale: size of the move.

        Returns:
          The element.
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
    def dual(self, element: Element) -> Element:
        """The element that moves tangents as `element` moves cotangents: S⁻ᵀ for S; the same for a rotation."""

    @abc.abstractmethod
    def fraction(self, element: Element, strength: float | jax.Array) -> Element:
        """What lies `strength` of the way from the identity to a *balance*, in the group's logarithm."""

    @abc.abstractmethod
    def dim(self, params: Any) -> int:
        """Number of vertical dimensions, summed over instances."""

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

    @abc.abstractmethod
    def chart(self, params: Any) -> Chart:
        """The gauge, or the gauges of a product, on this tree, with all readings in their order."""

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
        on = self.chart(params)
        elements, _ = read(on, params)
        return elements if isinstance(self.identity(params), tuple) else elements[0]

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
        elements, _ = read(on, params, lambda _: False)
        values = on.joint.values(params)
        parts = zip(on.parts, elements, strict=True)
        found = tuple(part.coordinates_of(bound, own, values) for (part, bound), own in parts)
        return found if isinstance(self.identity(params), tuple) else found[0]

    def frame(self, params: Any) -> Element:
        """The element that takes the least-norm representative of its orbit to a point.

        Args:
          params: the point (values are read).

        Returns:
          An element: the identity for rotations, and for channels and heads without such a representative (a side is
          zero, or has less than full rank).
        """
        elements = least_norm(self.chart(params), params)
        return elements if isinstance(self.identity(params), tuple) else elements[0]

    def balance(self, params: Any) -> Element:
        """The element that takes a point to the least-norm representative of its orbit.

        Args:
          params: the point (values are read).

        Returns:
          The inverse of `frame`; for `head_linear` (H_A⁻¹ # H_B)^{1/2}.
        """
        return self.inverse(self.frame(params))

    def muon_dimension_numbers(self, params: Any) -> Any:
        """How `optax.contrib.muon` is to read the gauge's leaves: one matrix per head where a rotation binds the leaf.

        Args:
          params: the parameters.

        Returns:
          A tree like `params` with an `optax.contrib.MuonDimensionNumbers` for every matrix of a rotation, a rescale or
          a norm, and None for every other leaf: what `muon_weight_dimension_numbers` takes.

        Raises:
          ValueError: a leaf whose rows or columns share an axis with something else (a fused kernel).

        >>> gauge = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
        >>> numbers = gauge.muon_dimension_numbers({"value": jnp.ones((6, 2, 4)), "out": jnp.ones((2, 4, 6))})
        >>> numbers["out"]  # rows, columns; the heads are what is left
        MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2,))
        """
        axes = named_axes(matrices_of(self.bound(params)))
        fused = [path for path, own in axes.items() if own is None]
        if fused:
            raise binding_error(
                self.name, f"no dimension numbers for '{fused[0]}'", "rows or columns that share a leaf axis",
                "leaf axes that are rows, columns or neither as a whole",
                "use go.ddc_muon, which reads split axes, or leave the leaf out of this gauge list",
            )  # fmt: skip
        numbers = {p: optax.contrib.MuonDimensionNumbers(*own) for p, own in axes.items() if own is not None}
        return with_leaves(params, dict.fromkeys(leaves_by_path(params)) | numbers)


@dataclasses.dataclass(frozen=True)
class BoundGauge(Gauge):
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

    def bound(self, params: Any) -> Bound:
        binding = self.binding(params)
        return self.assemble(binding.named, binding.instances)

    def bound_leaf(self, path: str, shape: tuple[int, ...], element: Element) -> Bound:
        """The gauge on one leaf alone, sizes read off an element: how it moves a slice of that leaf."""
        named = group_axes(self.name, self.specs, self.reserved)
        found: dict[str, tuple[Block, ...]] = {}
        for spec in self.specs:
            key = instance_key(self.specs, spec, path)
            if key is not None and key in element:
                block = bind_leaf(self.name, spec, path, shape, self.element_sizes(named, element[key]))
                found[key] = found.get(key, ()) + ((block,) if block is not None else ())
        return self.assemble(
            named,
            [
                Instance(key, blocks, tuple(self.element_sizes(named, element[key]).items()))
                for key, blocks in found.items()
            ],
        )

    @abc.abstractmethod
    def move(self, bound: Bound, element: Element, values: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """`values` of bound leaves after the move: what `act` does, before dtypes and `1+` come in."""

    def moved_linearly(self, bound: Bound, element: Element, vectors: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Bound leaves of a tangent after the move: the linear part of `move`."""
        return dict(self.move(bound, element, vectors))

    def readings(self, bound: Bound) -> tuple[Reading, ...]:
        """The small groups that this gauge is made of on a tree, those read off anchors."""
        del bound
        return ()

    @abc.abstractmethod
    def element_of(self, bound: Bound, found: Mapping[Reading, jax.Array], values: Mapping[str, jax.Array]) -> Element:
        """The gauge's element from its readings.

        Args:
          bound: its instances.
          found: elements by reading.
          values: bound leaves, with the gauges that act after this one undone.
        """

    def coordinates_of(self, bound: Bound, element: Element, values: Arrays) -> Element:
        """Coordinates of a point with these values, that reads as this element; empty where there are none."""
        del bound, element, values
        return {}

    def chart(self, params: Any) -> Chart:
        bound = self.bound(params)
        return Chart(((self, bound),), bound)

    def silences(self, bound: Bound) -> bool:
        """Whether there are points that this gauge's slice has at zero and at which every other gradient is zero."""
        del bound
        return False

    def centred(self, bound: Bound, values: Arrays) -> Arrays:
        """`values` without what is added by shifts."""
        del bound
        return values

    @abc.abstractmethod
    def motion(self, bound: Bound, element: Element, inverse: Element) -> Motion:
        """A frame of this gauge, ready to be applied to points, tangents and cotangents.

        Args:
          bound: its instances.
          element: F.
          inverse: F⁻¹.
        """

    def act(self, element: Element, params: Params) -> Params:
        bound, leaves = self.bound(params), leaves_by_path(params)
        moved = self.move(bound, element, bound.values(params))
        return with_leaves(
            params,
            {p: (moved[p] - off if off else moved[p]).astype(leaves[p].dtype) for p, off in bound.offset.items()},
        )


Gauges = Gauge | Sequence[Gauge]
"""What every transformation, assertion and measure takes: one gauge, or several that mean their product."""
