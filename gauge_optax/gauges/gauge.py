"""`Gauge`: a symmetry of a parameter tree, bound to its leaves.

A subclass needs two methods, `act` and `read`, if its elements compose by addition (as shifts and logarithms of scales
do). A subclass whose elements compose otherwise also needs `identity`, `inverse`, `compose`, and either its coordinates
(`algebra` and `exponential`) or `sample` and `dim`; `align` and `choose` need coordinates. Everything else that
transformations and measures use is derived from these methods (`by_action`). The gauges of this library are
`BlockGauge`s. A `BlockGauge` holds a list of blocks (the entries of leaves that it moves) and the class of its copies
(`copies`). It has one copy per layer, or per other capture of its paths, and its methods are loops over these copies.

`product` makes one gauge of several. Whatever the order of the list, the moves that rotate weights (turns) act first,
then those that multiply weights (sizes), then those that add to weights (constants). Turns and sizes of different
gauges commute, so that the product inverts and composes their elements gauge by gauge. A constant t does not commute
with a linear map L that another gauge applies to the same leaf, W ↦ L·W + t. Therefore `inverse` and `compose` of a
product also apply such maps to the constants (a semidirect product).
"""

import abc
import dataclasses
import functools
import inspect
import sys
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import optax.contrib

from gauge_optax.binding import (
    Axes,
    Block,
    BlockSpec,
    Matched,
    bind_leaf,
    block_specs,
    check_specs,
    copy_key,
    frozen_sizes,
    group_axes,
    has_dtype,
    leaves_by_path,
    with_leaves,
)
from gauge_optax.binding import bind as bind_blocks
from gauge_optax.errors import binding_error, kind_of, warn
from gauge_optax.gauges.balance import balance_beside
from gauge_optax.gauges.bound import Bound, bound, require_nonzero_norms
from gauge_optax.gauges.by_action import UserCopy
from gauge_optax.gauges.copies import Copy, Effect
from gauge_optax.parts.matrices import matrices_of, optax_axes
from gauge_optax.transformation import require_key

Element = Any
"""An element, in the form that `read` returns.

For a gauge of this library it is a dict with one entry per copy, keyed by the copy's captures, such as "i=0" ("" if the
paths have no captures). For a product it is a tuple with one element per gauge. A user's class chooses its own form.
"""

Params = TypeVar("Params")

_ROW = 110  # most characters in a row of `repr`; a longer mapping is written with a row per item


class Gauge(abc.ABC):
    """A symmetry of a network, bound to the leaves of a parameter tree.

    Gauges are frozen, hashable and hold no arrays. Methods that take the parameters read only their shapes, unless said
    otherwise. An `act` that a user writes must be affine in the parameters: optimizers move steps by its derivative,
    which is exact for affine maps only.

    Attributes:
      name: name for messages.
      effect: what a move does to tangents, the differences of weights. "shift": nothing, because the move adds a
        constant to weights. "diagonal": it multiplies entries. "permutation": it renumbers entries. "orthogonal": it
        rotates bases. "linear": any other linear map.
      balancing: what the move to the smallest weights on the orbit, whose element `balance` returns, does to tangents,
        in the same words; "still" if `balance` returns the identity.
      breaks: the usual reasons why the leaves that a user bound do not have this symmetry, for messages.
      commutes: for a subclass with its own `act`. True declares that its moves commute with those of all other gauges.
        Only then may it share leaves with them.

    >>> class Translation(go.Gauge):  # a constant from one table of embeddings to another
    ...     name, effect = "translation", "shift"
    ...     def act(self, element, params):
    ...         token, place = params["token"] + element, params["place"] - element
    ...         return {"token": token, "place": place}
    ...     def read(self, params):  # the slice: positions of mean zero
    ...         return -jnp.mean(params["place"], 0)
    >>> params = {"token": jnp.ones((5, 2)), "place": jnp.arange(6.0).reshape(3, 2)}
    >>> step = {"token": jnp.zeros((5, 2)), "place": jnp.ones((3, 2))}
    >>> # The part of the step that changes the function.
    >>> across = Translation().horizontal(params, step)
    >>> float(across["token"][0, 0]), float(across["place"][0, 0])
    (1.0, 0.0)
    """

    name: ClassVar[str]
    effect: ClassVar[Effect] = "linear"
    balancing: ClassVar[Effect] = "still"
    breaks: ClassVar[str] = "another reader of these leaves, or an index"
    commutes: ClassVar[bool] = False

    @abc.abstractmethod
    def act(self, element: Element, params: Params) -> Params:
        """The function-preserving move g·θ. The result has the structure and dtypes of `params`."""

    @abc.abstractmethod
    def read(self, params: Any) -> Element:
        """The frame of a point θ: the element that moves the slice point, which all twins of θ share, to θ.

        It obeys read(g·θ) = g·read(θ).

        Args:
          params: the point (values are read).

        Returns:
          An element. The slice point, act(inverse(read(θ)), θ), is the same for all points that moves of θ reach.
          Points on the slice read as the identity, and so does a channel or a head whose blocks are all zero.

        >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
        >>> params = {"up": jnp.array([[3.0], [4.0]]), "down": jnp.ones((1, 1))}
        >>> # The column `up` has norm 5. On the slice it has norm 1.
        >>> round(float(jnp.exp(gauge.read(params)[""][0])), 4)
        5.0
        """

    # By default the group is addition -----------------------------------------------------------------

    def identity(self, params: Any) -> Element:
        """The element that moves nothing."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(self.read, params))

    def inverse(self, element: Element) -> Element:
        """The element g⁻¹ with act(g⁻¹, act(g, θ)) = θ."""
        return jax.tree.map(jnp.negative, element)

    def compose(self, a: Element, b: Element) -> Element:
        """The product with act(compose(a, b), θ) = act(a, act(b, θ))."""
        return jax.tree.map(jnp.add, a, b)

    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        """A random element.

        Args:
          key: a PRNG key.
          params: the parameters. Values are read for `logit_shift`, `norm_write_shift` and `norm_read_shift`, whose
            shifts are relative to the leaf's root mean square.
          scale: size of the move: 1 changes log-scales by up to 1 and takes rotations from the Haar measure. At a small
            scale, elements are near the identity, except those of `permutation`, which are uniform at every scale.
        """
        require_key("sample", key)
        zeros, structure = jax.tree.flatten(self.algebra(params))
        keys = jax.random.split(key, max(1, len(zeros)))
        drawn = [jax.random.uniform(k, x.shape, x.dtype, -scale, scale) for k, x in zip(keys, zeros, strict=False)]
        return self.exponential(jax.tree.unflatten(structure, drawn), params)

    def dim(self, params: Any) -> int:
        """The dimension of the orbit, the set of points that moves reach from one point. Copies are summed."""
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(self.algebra, params)))

    def balance(self, params: Any) -> Element:
        """The element that moves a point to the point of least norm on its orbit.

        Args:
          params: the point (values are read).

        Returns:
          An element. It is the identity for rotations, which change no norm. It is also the identity for a channel or
          head without a point of least norm, because one of its two sides (such as `up` or `down`) is zero or has less
          than full rank. And it is the identity for `embedding_shift`, `bias_absorption` and `norm_read_shift`, whose
          moves to least norm are not computed: beside other gauges, the norm is the least that those others reach. For
          `head_linear` it is (H_A⁻¹ # H_B)^{1/2}, where H_A and H_B are the Gram matrices of its left and its right
          factor and # is the geometric mean. Two kinds of scales are balanced otherwise: one without a second side, as
          `scale_invariant`, whose root mean square becomes 1; and `multiplier_balance`, see there.
        """
        return self.identity(params)

    def power(self, element: Element, exponent: float | jax.Array) -> Element:
        """exp(exponent·log element), for an element of `balance`: the exponent ½ goes half the way to least norm."""
        self._require_addition("power(element, exponent)")
        return jax.tree.map(lambda x: exponent * x, element)

    def algebra(self, params: Any) -> Any:
        """A tree of zeros with the shapes of an element's coordinates; `exponential` maps such trees to elements.

        Args:
          params: the parameters.

        >>> gauge = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
        >>> gauge.algebra({"value": jnp.ones((6, 2, 4)), "out": jnp.ones((2, 4, 6))})[""].shape
        (2, 4, 4)
        """
        self._require_addition("algebra(params)")
        return self.identity(params)

    def exponential(self, coordinates: Any, params: Any, near: bool = False) -> Element:
        """The element with these coordinates; the identity for zeros.

        Args:
          coordinates: a tree like `algebra(params)`: logarithms for scales, constants for shifts, any matrix for
            `head_linear`; for rotations any matrix, of which only the antisymmetric part counts.
          params: the parameters.
          near: True if the element must be correct only to first order in the coordinates, for a derivative at zero.
        """
        self._require_addition("exponential(coordinates, params, near=False)")
        return coordinates

    def normalized(self, element: Element, params: Any) -> Element:
        """The element moved back into the group: roundoff moves a product of many rotations out of it, for example."""
        return element

    def logarithm(self, element: Element) -> Element:
        """The coordinate of an element, {} if it has none. Coordinates add under `compose`.

        The change of a coordinate along a run is the drift.
        """
        return element if self._adds else {}

    @property
    def _adds(self) -> bool:
        """Whether elements compose by addition: whether the class inherits `compose`."""
        return type(self).compose is Gauge.compose

    def _require_addition(self, method: str) -> None:
        if not self._adds:
            raise binding_error(
                self.name, f"no method {method.partition('(')[0]}", "a group with its own `compose`",
                "coordinates of its elements", f"give the gauge a method `{method}`")

    # Derived --------------------------------------------------------------------------------------------

    def vertical(self, params: Any, tangent: Params) -> Params:
        """The part of a tangent along the orbit.

        Args:
          params: the point (values are read).
          tangent: an update or a difference of parameters, same structure.

        Returns:
          The vertical part; zero on leaves that the gauge does not bind. A leaf that is no array, such as a
          function, stays.
        """
        horizontal, leaves = leaves_by_path(self.horizontal(params, tangent)), leaves_by_path(tangent)
        paths = self._bound(params).whole.added
        parts = {p: x - horizontal[p] if p in paths else jnp.zeros_like(x)
                 for p, x in leaves.items() if has_dtype(x)}
        return with_leaves(tangent, parts)

    def horizontal(self, params: Any, tangent: Params) -> Params:
        """The part of a tangent across the orbit: the tangent less its vertical part.

        To first order, this is what `quotient` keeps of a small step: what `Slice.fix` and `Slice.hold` leave of it.

        Args:
          params: the point (values are read).
          tangent: an update or a difference of parameters.

        Returns:
          The horizontal part. To first order, a step along it does not change the scales and shifts that `read`
          computes, and rotates no head. Leaves that the gauge does not bind are returned unchanged.

        >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
        >>> params = {"up": jnp.array([[3.0], [4.0]]), "down": jnp.ones((1, 1))}
        >>> across = gauge.horizontal(params, {"up": params["up"], "down": jnp.zeros((1, 1))})
        >>> # The tangent scales `up` alone. Its horizontal part scales `down` instead.
        >>> bool(
        ...     jnp.allclose(across["up"], 0.0, atol=1e-6) and jnp.allclose(across["down"], 1.0)
        ... )
        True
        """
        s = self._bound(params).whole
        require_nonzero_norms("horizontal", s, leaves_by_path(params))
        leaves, parts = leaves_by_path(tangent), s.horizontal_at(params, tangent)
        return with_leaves(tangent, {p: x.astype(jnp.result_type(leaves[p])) for p, x in parts.items()})

    def coordinates(self, params: Any) -> Element:
        """The position of a point on its orbit: for scales the logarithm of the factor, without its sign.

        For shifts it is what `read` returns.

        Args:
          params: the point (values are read).

        Returns:
          A tree with the structure of an element. For scales, coordinates(g·θ) = coordinates(θ) + log α. A shift's
          coordinate is the mean along `vocab` of the stored leaf. The dicts of rotations and linear gauges are empty.
          These have no coordinate: steps none of which rotates a head can together rotate it (holonomy).
        """
        b = self._bound(params)
        return b.coordinates(b.slice.read(b.slice.values(params), turning=False).elements)

    def muon_dimension_numbers(self, params: Any) -> Any:
        """How `optax.contrib.muon` should read the gauge's leaves: as one matrix per head where a rotation binds them.

        Args:
          params: the parameters.

        Returns:
          A tree like `params` with an `optax.contrib.MuonDimensionNumbers` for every matrix of a rotation, a rescale or
          a norm, and None for every other leaf: what `muon_weight_dimension_numbers` takes.

        Optax reads two kinds of leaves as one matrix: kernels whose heads share an axis with rows or columns, and
        kernels of which gauges bind ranges. If a head is rotated, the polar factor of this one matrix is rotated in the
        same way, as Muon's step should be, but it does not consist of one polar factor per head. `quotient_muon`
        reads these leaves per head and range by range.

        >>> gauge = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
        >>> numbers = gauge.muon_dimension_numbers(
        ...     {"value": jnp.ones((6, 2, 4)), "out": jnp.ones((2, 4, 6))}
        ... )
        >>> numbers["out"]  # rows, columns; the remaining axis counts heads
        MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2,))
        """
        axes = optax_axes(matrices_of(self._bound(params).slice.parts))
        numbers = {path: optax.contrib.MuonDimensionNumbers(*sides) for path, sides in axes.items()}
        return with_leaves(params, dict.fromkeys(leaves_by_path(params)) | numbers)

    # Inside the library -----------------------------------------------------------------------------------

    # Whether the copies depend on nothing but paths, shapes and dtypes, so that they are cached by these.
    _by_paths: ClassVar[bool] = False

    def __repr__(self) -> str:
        """The gauge as Python source: a call of the class with its attributes, as dataclasses write it."""
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @property
    def _description(self) -> str:
        """The gauge's name with what it binds, on one line, for messages."""
        return self.name

    def _checksum(self, blocks: Iterable[Block]) -> str:
        """A checksum of a user's gauge and its blocks. It makes the labels of parts differ for two gauges of one class.

        For a class that is no dataclass, only attributes that are numbers or strings count. Others, such as functions,
        may print differently in another process. Cached properties do not count, because they become attributes only
        when they are first used.
        """
        own = {k: v for k, v in vars(self).items()
               if not isinstance(getattr(type(self), k, None), functools.cached_property)}
        plain = sorted((k, v) for k, v in own.items() if isinstance(v, bool | int | float | str))
        text = repr(self) if dataclasses.is_dataclass(self) else f"{type(self).__qualname__} {plain}"
        return f"{zlib.crc32(f'{text} {[(b.path, b.shape) for b in blocks]}'.encode()):08x}"

    @property
    def _gauges(self) -> "tuple[Gauge, ...]":
        """The gauges of a product, or this one."""
        return (self,)

    def _copies(self, params: Any) -> tuple[Copy, ...]:
        """The copies of this gauge on a tree. Raises ValueError where the binding does not fit it."""
        return (UserCopy.of(Matched(self.name, "", (), {}, ()), whole=self, params=params),)

    def _bound(self, params: Any) -> Bound:
        """Binds this gauge, or the gauges of a product, to a tree."""
        return bound(self._gauges, params, single=not isinstance(self, Product))

    def _join(self, copies: Sequence[Copy], values: Sequence[Any]) -> Element:
        """The element made of one value per copy. A value of None leaves the copy out."""
        return values[0]

    def _split(self, copies: Sequence[Copy], element: Element) -> tuple[Any, ...]:
        """The inverse of `_join`."""
        return (element,)

    def _conjugated(self, element: Element, by: "Sequence[tuple[Gauge, Element]]") -> Element:
        """h·g·h⁻¹ for an element g and moves h of other gauges. It differs from g for shifts only: others commute."""
        return element

    def _moved_leaf(self, path: str, leaf: jax.Array, element: Element) -> jax.Array:
        """The leaf after the linear part of a move, without what the move adds.

        Along an axis on which the gauge does not act, the leaf may have any length: `_conjugated` passes the constants
        of a shift, which have length 1 along `vocab`.
        """
        return leaf


Gauges = Gauge | Sequence[Gauge]
"""The argument `gauges` of transformations, checks and measures: one gauge, or a sequence that means its product."""


class SliceGauge(Gauge):
    """A gauge whose `act`, `read`, `dim` and `balance` are computed from its parts: a `BlockGauge`, or a product."""

    def act(self, element: Element, params: Params) -> Params:
        return self._bound(params).act(element, params)

    def read(self, params: Any) -> Element:
        return self._bound(params).read(params)

    def dim(self, params: Any) -> int:
        return self._bound(params).dim

    def balance(self, params: Any) -> Element:
        return balance_beside(self, params)

    def _balancing(self, element: Element) -> Element:
        """The inverse of an element that is the identity for every gauge whose `balancing` is "still".

        For a product, this restriction makes the inverse exist even with gauges whose elements `inverse` refuses.
        """
        return self.inverse(element)


@dataclasses.dataclass(frozen=True, repr=False)
class BlockGauge(SliceGauge):
    """A gauge given by lists of blocks: what every constructor of this library returns.

    Attributes:
      name: the name of the constructor.
      kind: the class of its copies, a subclass of `Copy`.
      specs: the blocks, in the order in which they were written.
      sizes: (name, length) of axes that shapes alone do not fix.
      options: (name, value) of further arguments of `kind.of`, such as a degree.
    """

    name: str  # type: ignore[misc]
    kind: Any
    specs: tuple[BlockSpec, ...]
    sizes: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...] = ()

    _by_paths: ClassVar[bool] = True

    def __repr__(self) -> str:
        """The gauge as Python source: a call of its constructor, without arguments that have their default."""
        rows: list[str] = []
        for name, value in self._arguments().items():
            if isinstance(value, tuple) and any(isinstance(item, Gauge) for item in value):
                gauges = [textwrap.indent(f"{item!r},", "    ") for item in value]
                rows += [f"  {name}=[", *gauges, "  ],"]
                continue
            if not isinstance(value, dict):
                rows += [f"  {name}={value!r},"] if value != self._parameters[name].default else []
                continue
            items = [f"{key!r}: {item!r}" for key, item in value.items()]
            row = f"  {name}={{{', '.join(items)}}},"
            rows += [row] if len(row) <= _ROW else [f"  {name}={{", *(f"    {item}," for item in items), "  },"]
        return "\n".join([f"go.{self.name}(", *rows, ")"])

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the constructor: the function with the gauge's name in the module of `kind`."""
        return inspect.signature(getattr(sys.modules[self.kind.__module__], self.name)).parameters

    def _arguments(self) -> dict[str, Any]:
        """The arguments with which the constructor makes an equal gauge."""
        roles: dict[str, dict[str, list[str]]] = {}
        for spec in self.specs:
            roles.setdefault(spec.argument, {}).setdefault(spec.pattern, []).append(spec.axes)
        blocks = {
            role if role in self._parameters else parameter:
            {path: x[0] if len(x) == 1 else tuple(x) for path, x in own.items()}
            for (role, own), parameter in zip(roles.items(), self._parameters, strict=False)
        }
        options = {name: value for name, value in self.options if name in self._parameters}
        sizes = {"sizes": dict(self.sizes)} if self.sizes else {}
        return {**blocks, **options, **sizes}

    @property
    def _description(self) -> str:
        return f"{self.name}({', '.join(repr(p) for p in dict.fromkeys(spec.pattern for spec in self.specs))})"

    @property
    def effect(self) -> Effect:  # type: ignore[override]
        """See `Gauge`."""
        return self.kind.effect

    @property
    def balancing(self) -> Effect:  # type: ignore[override]
        """See `Gauge`."""
        return self.kind.balancing

    @property
    def breaks(self) -> str:  # type: ignore[override]
        """See `Gauge`."""
        return self.kind.breaks

    def _copies(self, params: Any) -> tuple[Copy, ...]:
        kind, options = self.kind, dict(self.options)
        if "norms" in options:  # the `norm_scale` gauges of a residual rotation, bound to the same tree
            options["norms"] = tuple(copy for norm in options["norms"] for copy in norm._copies(params))
        copies = bind_blocks(self.name, self.specs, self.sizes, params, kind.reserved, kind.joined, kind.partial)
        return tuple(kind.of(found, **options) for found in copies)

    def _join(self, copies: Sequence[Copy], values: Sequence[Any]) -> Element:
        return {copy.key: x for copy, x in zip(copies, values, strict=True) if x is not None}

    def _split(self, copies: Sequence[Copy], element: Element) -> tuple[Any, ...]:
        return tuple(element[copy.key] for copy in copies)

    # Loops over copies ------------------------------------------------------------------------------------

    def _by_copy(self, params: Any) -> tuple[Copy, ...]:
        (copies,) = self._bound(params).copies
        return copies

    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        require_key("sample", key)
        copies, leaves = self._by_copy(params), leaves_by_path(params)
        keys = jax.random.split(key, max(1, len(copies)))
        return {copy.key: copy.sample(k, scale, leaves) for copy, k in zip(copies, keys, strict=False)}

    def identity(self, params: Any) -> Element:
        return {copy.key: copy.identity() for copy in self._by_copy(params)}

    def inverse(self, element: Element) -> Element:
        return {key: self.kind.inverse(x) for key, x in element.items()}

    def compose(self, a: Element, b: Element) -> Element:
        return {key: self.kind.compose(a[key], b[key]) for key in a}

    def power(self, element: Element, exponent: float | jax.Array) -> Element:
        return {key: self.kind.power(x, exponent) for key, x in element.items()}

    def algebra(self, params: Any) -> Any:
        return {copy.key: copy.algebra() for copy in self._by_copy(params)}

    def exponential(self, coordinates: Any, params: Any, near: bool = False) -> Element:
        return {copy.key: copy.exponential(coordinates[copy.key], near) for copy in self._by_copy(params)}

    def normalized(self, element: Element, params: Any) -> Element:
        return {copy.key: copy.normalized(element[copy.key]) for copy in self._by_copy(params)}

    def _conjugated(self, element: Element, by: Sequence[tuple[Gauge, Element]]) -> Element:
        def moved(path: str, leaf: jax.Array) -> jax.Array:
            for gauge, other in by:
                leaf = gauge._moved_leaf(path, leaf, other)
            return leaf

        return {key: self.kind.conjugated(self.specs, x, moved) for key, x in element.items()}

    def _moved_leaf(self, path: str, leaf: jax.Array, element: Element) -> jax.Array:
        if self.effect == "shift":
            return leaf
        # Without a tree, the lengths of axes are taken from the element and the leaf.
        named = group_axes(self.name, self.specs, self.kind.reserved)
        for key, x in element.items():
            sizes = self.kind.axis_sizes(named, x)
            hits = [(spec, copy_key(self.specs, spec, path)) for spec in self.specs]
            matching = [spec for spec, hit in hits if hit is not None and (self.kind.joined or hit == key)]
            blocks = tuple(bind_leaf(self.name, spec, path, leaf.shape, sizes) for spec in matching)
            if blocks:
                found = Matched(self.name, key, named, sizes, blocks)
                copy = self.kind.of(found, **dict(self.options))
                for part, e in reversed(list(zip(copy.parts, copy.split(x), strict=True))):
                    leaf = part.act(e, {path: leaf})[path]
        return leaf


def block_gauge(
    name: str,
    kind: Any,
    roles: Mapping[str, Mapping[str, Axes]],
    sizes: Mapping[str, int] | None,
    **options: Any,
) -> BlockGauge:
    """Makes the gauge that a constructor returns.

    Args:
      name: the name of the constructor.
      kind: the class of the gauge's copies, a subclass of `Copy`.
      roles: argument of the constructor → its blocks, as the user wrote them.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.
      **options: further arguments of `kind.of`.

    Returns:
      The gauge.

    Raises:
      ValueError: malformed paths, axes or sizes.
    """
    specs = tuple(
        spec for role, blocks in roles.items()
        for spec in block_specs(name, role, blocks, () if role in kind.without_axis else kind.reserved, kind.joined)
    )
    frozen = frozen_sizes(name, sizes)
    check_specs(name, specs, frozen, kind.joined, kind.partial)
    return BlockGauge(name, kind, specs, frozen, tuple(options.items()))


# Products ---------------------------------------------------------------------------------------------------


def product(gauges: Gauges) -> "Product":
    """One gauge made of several. Their order does not matter.

    Args:
      gauges: a gauge or a sequence of them; products inside are flattened.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are tuples of the gauges' elements in list order. An empty
      list causes a warning, because it has no effect.

    Raises:
      ValueError: at once for something that is not a gauge, a gauge given twice, or a gauge of your own without a name
        or a hash; when a tree is first seen, for gauges that do not commute on a leaf.

    >>> norm = go.norm_scale({"scale": "channel"}, {"up": "channel _"})
    >>> relu = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> both = go.product([norm, relu])
    >>> both.dim({"scale": jnp.ones(3), "up": jnp.ones((3, 4)), "down": jnp.ones((4, 3))})
    7

    Reference: docs/design.md §2.
    """
    parts = listed_gauges(gauges)
    for part in parts:
        if not isinstance(part, BlockGauge):
            _require_hash(part)
    return Product(parts)


def listed_gauges(gauges: Gauges) -> tuple[Gauge, ...]:
    """Returns the gauges of a `product` as a flat tuple. Raises the errors of `product`, except for a missing hash."""
    if isinstance(gauges, Gauge):
        gauges = (gauges,)
    if isinstance(gauges, str | Mapping | optax.GradientTransformation) or not isinstance(gauges, Iterable):
        raise binding_error(
            "product", "no gauges", kind_of(gauges), "a gauge, or a sequence of gauges",
            "write report.gauges, or report.whole outside of optimizers" if hasattr(type(gauges), "certificate") else
            "pass the list: quotient(inner, gauges), bind(gauges, params) or canonicalize(params, gauges)",
        )
    parts: list[Gauge] = []
    gauges = tuple(gauges)
    if not gauges:
        warn(
            "an empty list of gauges does nothing: pass the gauges of the model, such as those that "
            "go.discover(fn, params, batches) returns"
        )
    for number, gauge in enumerate(gauges):
        if not isinstance(gauge, Gauge):
            raise binding_error(
                "product", f"element {number} of the list is no gauge", kind_of(gauge), "a gauge",
                "write report.gauges, or report.whole outside of optimizers" if hasattr(type(gauge), "certificate") else
                "join the lists: [*report.gauges, other]" if isinstance(gauge, list | tuple) else
                "pass what go.rescale(...) and the like return",
            )
        parts.extend(gauge._gauges)
    for part in parts:
        _require_name(part)
    twice = next((part for at, part in enumerate(parts) if part in parts[:at]), None)
    if twice is not None:
        raise binding_error(
            "product", "a gauge given twice", twice._description, "every gauge once in a list", "drop one of the two"
        )
    return tuple(parts)


def _require_name(gauge: Gauge) -> None:
    """Raises ValueError if a user's gauge cannot be named in messages."""
    kind = type(gauge).__name__
    if not isinstance(getattr(gauge, "name", None), str):
        raise binding_error(
            "product", f"{kind} has no name", f"a {kind} without the attribute `name`", "a name for messages",
            f"write name: ClassVar[str] = '{kind.lower()}' in the class",
        )


def _require_hash(gauge: Gauge) -> None:
    """Raises ValueError if a user's gauge has no hash. What is bound is cached with the gauge as a key."""
    try:
        hash(gauge)
    except TypeError as error:
        raise binding_error(
            gauge.name, "a gauge that has no hash", f"{error}", "a frozen class, whose fields have hashes",
            "write @dataclasses.dataclass(frozen=True) above the class, and tuples in place of lists, dicts and arrays",
        ) from error


@dataclasses.dataclass(frozen=True, repr=False)
class Product(SliceGauge):
    """See `product`."""

    gauges: tuple[Gauge, ...]
    name: ClassVar[str] = "product"

    @property
    def _description(self) -> str:
        return f"{self.name} of all the gauges together"

    def __repr__(self) -> str:
        return "\n".join(["go.product([", *(textwrap.indent(repr(gauge), "  ") + "," for gauge in self.gauges), "])"])

    @property
    def _gauges(self) -> tuple[Gauge, ...]:
        return self.gauges

    def sample(self, key: jax.Array, params: Any, scale: float = 1.0) -> Element:
        require_key("sample", key)
        keys = jax.random.split(key, max(1, len(self.gauges)))
        return tuple(gauge.sample(k, params, scale) for gauge, k in zip(self.gauges, keys, strict=False))

    def identity(self, params: Any) -> Element:
        return tuple(gauge.identity(params) for gauge in self.gauges)

    def _require_elements_that_compose(self, what: str) -> None:
        """Raises ValueError if h·g·h⁻¹, for moves g of one gauge and h of another, depends on the weights."""
        for gauge in self.gauges:
            if len(self.gauges) > 1 and isinstance(gauge, BlockGauge) and not gauge.kind.composes:
                raise binding_error(
                    gauge.name, f"no {what} of elements of a product", f"a product with {gauge.name}, which does not "
                    "commute with the others in a way that is the same for all weights", "the elements of one gauge",
                    f"act with one element after the other, or call {what} of each gauge",
                )

    def inverse(self, element: Element) -> Element:
        self._require_elements_that_compose("inverse")
        plain = tuple(gauge.inverse(x) for gauge, x in zip(self.gauges, element, strict=True))
        return tuple(gauge._conjugated(x, self._pairs(plain)) for gauge, x in self._pairs(plain))

    def _balancing(self, element: Element) -> Element:
        plain = tuple(gauge.inverse(x) for gauge, x in zip(self.gauges, element, strict=True))
        moving = [pair for pair in self._pairs(plain) if pair[0].balancing != "still"]
        # A "still" gauge has the identity as its element, which is its own inverse. Moves of other gauges do not change
        # it, and it changes no shift of theirs, so that it is left out of `moving`.
        return tuple(x if g.balancing == "still" else g._conjugated(x, moving) for g, x in self._pairs(plain))

    def compose(self, a: Element, b: Element) -> Element:
        self._require_elements_that_compose("compose")
        moved = (gauge._conjugated(x, self._pairs(a)) for gauge, x in self._pairs(b))
        return tuple(gauge.compose(x, y) for gauge, x, y in zip(self.gauges, a, moved, strict=True))

    def power(self, element: Element, exponent: float | jax.Array) -> Element:
        return tuple(gauge.power(x, exponent) for gauge, x in zip(self.gauges, element, strict=True))

    def algebra(self, params: Any) -> Any:
        return tuple(gauge.algebra(params) for gauge in self.gauges)

    def exponential(self, coordinates: Any, params: Any, near: bool = False) -> Element:
        return tuple(gauge.exponential(x, params, near) for gauge, x in zip(self.gauges, coordinates, strict=True))

    def normalized(self, element: Element, params: Any) -> Element:
        return tuple(gauge.normalized(x, params) for gauge, x in zip(self.gauges, element, strict=True))

    def _pairs(self, element: Element) -> list[tuple[Gauge, Element]]:
        return list(zip(self.gauges, element, strict=True))


def bind(gauges: Gauges, params: Any) -> Bound:
    """Binds gauges to a tree of parameters, and returns an object that moves and reads such parameters.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.
      params: the parameters, or a tree of their shapes. No values are read.

    Returns:
      The bound gauges, with the methods `act(element, params)`, `read(params)`, `slice_point(params)`,
      `random_twin(key, params)`, `asymmetry(params, grads)` and the number `dim`. Printed, it is a table of the gauges,
      their leaves, copies and dimensions. If one gauge was given, elements are its own; else they are tuples.

    Raises:
      ValueError: bindings that do not fit the tree, gauges that do not commute.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((1, 2), 3.0), "down": jnp.ones((2, 1))}
    >>> bound = go.bind(gauge, params)
    >>> bound
    gauge    leaves    copies  directions
    rescale  up, down  1       2
    all      2 leaves          2
    >>> bool(jnp.allclose(bound.slice_point(params)["down"], 3.0))
    True
    >>> twin = bound.random_twin(jax.random.key(0), params)
    >>> bool(jnp.allclose(bound.slice_point(twin)["down"], 3.0))
    True

    Reference: docs/design.md §2.
    """
    group = product(gauges)
    return bound(group.gauges, params, single=isinstance(gauges, Gauge) and not isinstance(gauges, Product))
