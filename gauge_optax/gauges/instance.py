"""What one copy of a gauge on a tree must say about itself: a small group and how it moves leaves.

A gauge bound to a tree is a list of instances, one per layer or other capture. An instance holds one group element per
value of its named axes (per head, per channel), all of them in one array. Each kind of symmetry is one subclass, in a
file of its own: its group law, its action, how an element is read from weights, what it holds still. The slice
(`gauge_optax.slice`) combines the instances of all gauges and knows no kind.

Elements inside the library may carry more than the public ones (a matrix with its inverse); `to_element` and
`from_element` convert.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, BlockSpec
from gauge_optax.gauges.matrices import Matrices

Arrays = dict[str, jax.Array]
"""Leaf path → array in the computing dtype."""

Anchor = tuple[Block, ...]
"""Blocks that move alike and that an element is read from together."""

Effect = Literal["still", "shift", "diagonal", "orthogonal", "linear"]
"""What a move does to vectors: nothing; nothing, though it moves points; scales entries; turns bases; mixes entries."""


@dataclasses.dataclass(frozen=True)
class Instance(abc.ABC):
    """One copy of a gauge on a tree.

    Attributes:
      gauge: the name of its gauge, for messages.
      key: the captures, as in elements: "i=0", or "" without any.
      named: the axes that index elements.
      shape: their lengths.
      blocks: every block that it moves.
    """

    gauge: str
    key: str
    named: tuple[str, ...]
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    effect: ClassVar[Effect] = "linear"  # of a move on vectors
    balancing: ClassVar[Effect] = "still"  # of the move to the balanced representative
    breaks: ClassVar[str] = "another reader of these leaves, or an index"  # usual reasons why a binding is no symmetry
    rigid: ClassVar[str | None] = None  # the axis along which other gauges must scale all entries alike
    # Whether `quotient(pin=False)` may let the inner optimizer leave the slice along this instance.
    has_offset: ClassVar[bool] = True

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The leaves that it moves, each once."""
        return tuple(dict.fromkeys(block.path for block in self.blocks))

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Number of vertical dimensions."""

    # The group ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def identity(self) -> Any:
        """The element that moves nothing."""

    @staticmethod
    @abc.abstractmethod
    def inverse(e: Any) -> Any:
        """The element that undoes `e`."""

    @staticmethod
    @abc.abstractmethod
    def compose(a: Any, b: Any) -> Any:
        """The element that acts as `a` after `b`."""

    @abc.abstractmethod
    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> Any:
        """A random public element; `leaves` are the parameters by path, for moves whose size follows theirs."""

    @classmethod
    def inverse_element(cls, element: Any) -> Any:
        """`inverse`, of a public element."""
        return cls.inverse(element)

    @classmethod
    def compose_elements(cls, a: Any, b: Any) -> Any:
        """`compose`, of public elements."""
        return cls.compose(a, b)

    @staticmethod
    def power(element: Any, exponent: float | jax.Array) -> Any:
        """The public element that goes a fraction of the way of a balance; balances of rotations are the identity."""
        return element

    @staticmethod
    def conjugated(specs: Sequence[BlockSpec], element: Any, moved: Callable[[str, jax.Array], jax.Array]) -> Any:
        """h·g·h⁻¹ of a public element g, where `moved(path, leaf)` is the linear part of h; most moves commute."""
        return element

    @classmethod
    def effect_of(cls, element: Any) -> Effect:
        """`effect`, of a public element that may be known to do less."""
        return cls.effect

    def to_element(self, e: Any) -> Any:
        """The public form of an element."""
        return e

    def from_element(self, element: Any) -> Any:
        """An element from its public form."""
        return element

    def coordinate(self, e: Any, point: Arrays) -> Any:
        """What must not drift: a coordinate of the stored point, which reads as `e`; None where there is none."""
        return None

    def motion(self, e: Any, change: Any, end: Arrays, turn: jax.Array | None) -> Any:
        """The logarithm of the part of a step along the orbit, in the public structure of an element.

        Args:
          e: what the point before the step reads as, rotations apart.
          change: how much that reading, or its coordinate, has changed.
          end: the point after the step, in the slice coordinates of the one before.
          turn: the skew logarithm of the turning of rows, (*shape, size, size), where there is one.
        """
        return change

    def where(self, condition: jax.Array, e: Any, other: Any) -> Any:
        """`e` where a condition of shape `shape` holds, `other` elsewhere."""

        def chosen(x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, y)

        return jax.tree.map(chosen, e, other)

    # The action ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def act(self, e: Any, point: Arrays) -> Arrays:
        """g·θ. Leaves that the instance does not move are passed on."""

    def enter(self, e: Any, point: Arrays) -> Arrays:
        """g⁻¹·θ."""
        return self.act(self.inverse(e), point)

    def push(self, e: Any, tangent: Arrays) -> Arrays:
        """The derivative of the action, applied to a tangent; the action itself where that is linear."""
        return self.act(e, tangent)

    @abc.abstractmethod
    def pull(self, e: Any, cotangent: Arrays) -> Arrays:
        """The transpose of `push`, applied to a cotangent."""

    # What the slice fixes -----------------------------------------------------------------------------

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        """What sizes are read from at every step, best first; () for what has no size (shifts, rotations)."""
        return ()

    def read(self, anchor: Anchor, point: Arrays, within: jax.Array, near: bool) -> tuple[Any, jax.Array]:
        """Reads elements from one anchor.

        Args:
          anchor: one of `anchors`.
          point: leaves, on the slice of all instances that move the anchor but this one.
          within: which elements to read, (`shape`, bool); the others get the identity.
          near: the point is near the slice, so that a cheaper way will do.

        Returns:
          The elements, and which were read (`shape`, bool): an anchor that is zero has no size.
        """
        return self.identity(), jnp.zeros(self.shape, bool)

    def dual(self, e: Any) -> Any:
        """The element whose `act` is `e`'s transpose, for instances with anchors."""
        return e

    def centred(self, vector: Arrays) -> Arrays:
        """A point, tangent or cotangent without the part along shifts."""
        return vector

    def read_mean(self, point: Arrays) -> Any:
        """A shift's element, read when all that acts after it is undone; None for everything else."""
        return None

    @property
    def turn(self) -> "Turn | None":
        """The rotations among its moves, which are read once and then held; None where there are none."""
        return None

    def from_turn(self, turn: Any) -> Any:
        """The element that moves as `turn`'s does."""
        return turn

    def balanced(self, point: Arrays) -> Any:
        """The element e of point = e·(its least-norm representative); the identity where there is none."""
        return self.identity()

    # What optimizers ask ------------------------------------------------------------------------------

    def signal(self, point: Arrays, gradient: Arrays) -> jax.Array | None:
        """The size of this instance's gradients where, at this slice point, all other gradients are zero; else zero.

        None where there is no such point.
        """
        return None

    @property
    def log_step(self) -> float:
        """How far log s moves when the logs of both sides of a scale move by one together; 0 for what is no scale."""
        return 0.0

    def partner(self, anchor: Anchor) -> tuple[Block, ...]:
        """The blocks that carry the length of a scale while its anchor's size stays; () for what is no scale."""
        return ()

    def factors(self, e: Any, block: Block) -> jax.Array:
        """By what an element of a scale multiplies a block, per channel; 1 for what is no scale."""
        return jnp.ones(self.shape)

    @property
    def sides(self) -> "tuple[tuple[Block, ...], tuple[Block, ...]] | tuple[Turn, Turn] | None":
        """Both factors of a product that the gauge leaves alone; None where there is no opposite factor."""
        return None

    @property
    def degree_of_decay(self) -> float | None:
        """The homogeneity p of a scale, for decay that is matched to it; None for what is no scale."""
        return None

    def matrices(self, block: Block) -> tuple[int, Matrices | None] | None:
        """How Muon reads a block as matrices, with a rank: 0 wins over 1 over 2. None where it has nothing to say."""
        return None


class Turn(Instance):
    """Rotations of a common basis: orthogonal moves, read at `init` and held at every step.

    Several instances are treated at once, so that heads of all layers form one batch.
    """

    entrywise: ClassVar[bool] = False  # whether moves are made entry by entry rather than by matrix products

    @staticmethod
    @abc.abstractmethod
    def matrix(e: Any) -> jax.Array:
        """The orthogonal matrices of an element, (*shape, size, size): rows W go to W·matrix."""

    @classmethod
    @abc.abstractmethod
    def read_all(cls, turns: Sequence[Any], point: Arrays) -> list[Any]:
        """Elements of several instances at a point all of whose sizes are on the slice."""

    @classmethod
    @abc.abstractmethod
    def project(
        cls, turns: Sequence[Any], point: Arrays, vector: Arrays, into: Mapping[Any, jax.Array] | None = None
    ) -> Arrays:
        """The orthogonal projection of a tangent, or of a cotangent, off the directions in which rows turn.

        Args:
          turns: instances of this class.
          point: leaves.
          vector: leaves.
          into: per instance, by what its rows have yet to be multiplied to be on the slice; None where they are there.
        """

    @classmethod
    def hold(cls, turns: Sequence[Any], point: Arrays, step: Arrays) -> Arrays:
        """A step from a slice point without the part that turns rows; closed forms are exact for steps of any size."""
        return cls.project(turns, point, step)

    @classmethod
    @abc.abstractmethod
    def without_roundoff(cls, turns: Sequence[Any], cotangent: Arrays) -> Arrays:
        """A cotangent with zero where invariance says zero and arithmetic leaves something."""
