"""`Copy`: one copy of a gauge on a tree, that of one layer or of another capture of the gauge's paths.

Every constructor of gauges has a subclass of `Copy`. A copy holds one or two parts (`parts.part`), which act on the
leaves, and defines its public elements: their dimension, how a random one is drawn, and how one is split among the
parts. A *public element* is what `gauge.read(params)` returns for the copy. It can differ from the elements of parts:
that of a scale is log α, while its part computes with α.
"""

import abc
import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, BlockSpec, Matched
from gauge_optax.linalg import real_dtype
from gauge_optax.parts.part import Additive, Part, name_of
from gauge_optax.slice import VERSION

Effect = Literal["still", "shift", "diagonal", "permutation", "orthogonal", "linear"]
"""What a move does to tangents: nothing ("still", "shift"), multiply entries ("diagonal"), renumber them
("permutation"), rotate them ("orthogonal"), or any linear map ("linear").

A "shift" adds a constant to points; a "still" move changes neither tangents nor points.
"""


def part_label(found: Matched, **options: Any) -> str:
    """The label of a part: the gauge, its captures, a checksum of what it binds, and the version of states.

    Parts of different blocks have different labels. Blocks can differ although their axes strings and shapes are equal:
    the gauge's `sizes` may split an axis into 2 heads or into 4.

    Args:
      found: what the patterns of the gauge match for this copy.
      **options: whatever else two parts can differ by, such as arguments of the gauge, or which blocks belong together.
    """
    bound = sorted(str((b.path, b.argument, b.axes, b.shape, b.split, b.picks, b.window)) for b in found.blocks)
    checksum = zlib.crc32(f"{bound} {sorted(options.items())}".encode())
    return f"{found.gauge}[{found.key}].{checksum:08x}.v{VERSION}"


@dataclasses.dataclass(frozen=True)
class Copy(Additive, abc.ABC):
    """One copy of a gauge on a tree, such as that of one layer.

    By default two elements compose by adding their arrays, and the copy has one part, whose element is the public one.
    Subclasses override what differs.

    Attributes:
      key: the captures, see `Matched`.
      parts: the parts to which the gauge compiles for this copy.
    """

    key: str
    parts: tuple[Part[Any], ...]

    # Options of `binding.bind` and `binding.block_specs` for this gauge.
    reserved: ClassVar[tuple[str, ...]] = ()  # names of the axes on which the group acts
    joined: ClassVar[bool] = False  # whether all captures belong to one copy: one element for all layers
    partial: ClassVar[tuple[str, ...]] = ()  # arguments whose blocks may lack named axes
    without_axis: ClassVar[tuple[str, ...]] = ()  # arguments whose blocks lack the axes of `reserved`
    # Properties of the gauge, see `Gauge`.
    effect: ClassVar[Effect] = "linear"  # what a move does to tangents and cotangents
    balancing: ClassVar[Effect] = "still"  # what the move to the point of least norm on the orbit does to tangents
    composes: ClassVar[bool] = True  # whether h·g·h⁻¹ is the same for all weights, where h moves by another gauge
    breaks: ClassVar[str] = "another reader of these leaves, or an index"  # usual reasons why it is no symmetry

    @classmethod
    @abc.abstractmethod
    def of(cls, found: Matched, **options: Any) -> "Copy":
        """Makes the copy from matched blocks and the gauge's options. Raises ValueError for blocks that do not fit."""

    @property
    def gauge(self) -> str:
        """The name of the gauge."""
        return name_of(self.parts[0])

    @property
    def named(self) -> tuple[str, ...]:
        """Names of the axes that index an element."""
        return self.parts[0].named

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes `named`."""
        return self.parts[0].shape

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that the copy moves."""
        return self.parts[0].blocks

    @property
    def dim(self) -> int:
        """The dimension of the group, and of the orbit of a generic point."""
        return math.prod(self.shape)

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> Any:
        """A random public element.

        Args:
          key: a PRNG key.
          scale: size of the move, see `Gauge.sample`.
          leaves: the parameters by path. Most kinds of `Shift` draw numbers relative to a leaf's size.
        """
        return normal(key, self.shape, scale)

    # Public elements, and elements of the parts ---------------------------------------------------------------

    def split(self, element: Any) -> tuple[Any, ...]:
        """Splits a public element into one element per part; together they make the same move."""
        return (element,)

    def join(self, elements: Sequence[Any]) -> Any:
        """The inverse of `split`."""
        return elements[0]

    def identity(self) -> Any:
        """The public element that moves nothing."""
        return self.join([part.identity() for part in self.parts])

    def coordinate(self, elements: Sequence[Any]) -> Any:
        """The coordinate (its change is drift) of a point that the parts read as `elements`; None if it has none."""
        return self.join(elements)

    def algebra(self) -> Any:
        """Zeros with the shapes of an element's coordinates."""
        return self.identity()

    def exponential(self, coordinates: Any, near: bool = False) -> Any:
        """The public element with these coordinates; if `near`, only to first order in them."""
        return coordinates

    def normalized(self, element: Any) -> Any:
        """The element moved back into the group, if roundoff has moved it out."""
        return element

    # Operations on public elements that need no tree -----------------------------------------------------------

    # `inverse` and `compose` are inherited from `Additive`; a subclass whose group is not addition overrides them.

    @staticmethod
    def power(element: Any, exponent: float | jax.Array) -> Any:
        """A power of a public element that `balance` returns; for log α it is a multiple."""
        return jax.tree.map(lambda x: exponent * x, element)

    @staticmethod
    def conjugated(specs: Sequence[BlockSpec], element: Any, moved: Callable[[str, jax.Array], jax.Array]) -> Any:
        """h·g·h⁻¹ for a public element g and moves h of other gauges. It is g itself, except for shifts.

        Args:
          specs: the gauge's blocks.
          element: g.
          moved: (path, leaf) ↦ the leaf after the linear part of h.
        """
        return element

    @classmethod
    def axis_sizes(cls, named: tuple[str, ...], element: Any) -> dict[str, int]:
        """Name → length of the axes that a public element has."""
        return dict(zip((*named, *cls.reserved), element.shape, strict=False))


@dataclasses.dataclass(frozen=True)
class Compact(Copy):
    """A copy of a group whose moves change no norm. It has no coordinate that could drift, and nothing to balance."""

    def coordinate(self, elements: Sequence[Any]) -> None:
        return None

    @staticmethod
    def power(element: Any, exponent: float | jax.Array) -> Any:
        return element


def drawn(key: jax.Array, shape: tuple[int, ...], scale: float | jax.Array) -> jax.Array:
    """Numbers uniform in [−scale, scale]."""
    return jax.random.uniform(key, shape, real_dtype(), -scale, scale)


def normal(key: jax.Array, shape: tuple[int, ...], scale: float | jax.Array) -> jax.Array:
    """Random numbers from the normal distribution with mean zero and standard deviation `scale`."""
    return jnp.asarray(scale * jax.random.normal(key, shape, real_dtype()))
