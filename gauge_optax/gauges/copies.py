"""`Copy`: what a constructor's file says of its gauge. One `Copy` is one copy of a gauge on a tree.

A copy is a layer, or another capture of the gauge's paths. It has the parts to which the gauge compiles, and knows the
public elements: their dimension, how a random one is drawn, and how one is split among the parts. A *public element* is
what `gauge.read(params)` has, such as log α of a scale, where the part computes with α.
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
"""What a move does to tangents: nothing ("still", "shift"), scale entries, renumber them, rotate, or any linear map.

A "shift" adds a constant to points, a "still" move leaves points unchanged too.
"""


def part_label(found: Matched, **options: Any) -> str:
    """The label of a part: the gauge, its captures, a checksum of what it binds, and the version of states.

    Args:
      found: what the part's copy binds.
      **options: further arguments of the gauge.
    """
    bound = sorted((b.path, b.argument, b.axes, b.shape) for b in found.blocks)
    checksum = zlib.crc32(f"{bound} {sorted(options.items())}".encode())
    return f"{found.gauge}[{found.key}].{checksum:08x}.v{VERSION}"


@dataclasses.dataclass(frozen=True)
class Copy(Additive, abc.ABC):
    """One copy of a gauge on a tree. By default its group is addition, and its element is that of its one part.

    Attributes:
      key: the captures, see `Matched`.
      parts: what the gauge is on this tree.
    """

    key: str
    parts: tuple[Part[Any], ...]

    # What the binder has to know of axes and arguments.
    reserved: ClassVar[tuple[str, ...]] = ()  # names of the axes on which the group acts
    joined: ClassVar[bool] = False  # whether all captures belong to one copy: one element for all layers
    partial: ClassVar[tuple[str, ...]] = ()  # arguments whose blocks may lack named axes
    without_axis: ClassVar[tuple[str, ...]] = ()  # arguments whose blocks lack the axes of `reserved`
    # What messages and states say of it.
    effect: ClassVar[Effect] = "linear"  # of a move on tangents and cotangents
    balancing: ClassVar[Effect] = "still"  # of the move to the point of least norm on the orbit
    composes: ClassVar[bool] = True  # whether its conjugates by other gauges are the same for all weights
    breaks: ClassVar[str] = "another reader of these leaves, or an index"  # why a binding is usually no symmetry

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
        """Lengths of those axes."""
        return self.parts[0].shape

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What it moves."""
        return self.parts[0].blocks

    @property
    def dim(self) -> int:
        """The dimension of the group, and of the orbit of a generic point."""
        return math.prod(self.shape)

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> Any:
        """A random public element. `leaves` are the parameters by path: the size of a shift follows theirs."""
        return normal(key, self.shape, scale)

    # Public elements, and those of the parts ----------------------------------------------------------------

    def split(self, element: Any) -> tuple[Any, ...]:
        """The elements of the parts whose moves together are that of a public element."""
        return (element,)

    def join(self, elements: Sequence[Any]) -> Any:
        """The inverse of `split`."""
        return elements[0]

    def identity(self) -> Any:
        """The public element that moves nothing."""
        return self.join([part.identity() for part in self.parts])

    def coordinate(self, elements: Sequence[Any]) -> Any:
        """The coordinate whose change is drift, of a point that the parts read as these elements; None if none is."""
        return self.join(elements)

    def algebra(self) -> Any:
        """Zeros with the shapes of an element's coordinates."""
        return self.identity()

    def exponential(self, coordinates: Any, near: bool = False) -> Any:
        """The public element with these coordinates; `near` asks for it to first order in them."""
        return coordinates

    def normalized(self, element: Any) -> Any:
        """A public element near the group, without the roundoff that leads away from it."""
        return element

    # Laws of public elements, which need no tree ------------------------------------------------------------

    # `inverse` and `compose` are those of `Additive`, unless a kind has another law.

    @staticmethod
    def power(element: Any, exponent: float | jax.Array) -> Any:
        """A power of a public element that `balance` returns."""
        return jax.tree.map(lambda x: exponent * x, element)

    @staticmethod
    def conjugated(specs: Sequence[BlockSpec], element: Any, moved: Callable[[str, jax.Array], jax.Array]) -> Any:
        """h·g·h⁻¹ for a public element g: g itself except for shifts. `moved(path, leaf)` applies h's linear part."""
        return element

    @classmethod
    def axis_sizes(cls, named: tuple[str, ...], element: Any) -> dict[str, int]:
        """Lengths of axes, read off a public element."""
        return dict(zip((*named, *cls.reserved), element.shape, strict=False))


@dataclasses.dataclass(frozen=True)
class Compact(Copy):
    """A copy of a group whose moves change no norm: it has no coordinate that drifts, and balance does not move it."""

    def coordinate(self, elements: Sequence[Any]) -> None:
        return None

    @staticmethod
    def power(element: Any, exponent: float | jax.Array) -> Any:
        return element


def drawn(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Numbers uniform in [−scale, scale]."""
    return jax.random.uniform(key, shape, real_dtype(), -scale, scale)


def normal(key: jax.Array, shape: tuple[int, ...], scale: float | jax.Array) -> jax.Array:
    """Normal numbers of this standard deviation."""
    return jnp.asarray(scale * jax.random.normal(key, shape, real_dtype()))
