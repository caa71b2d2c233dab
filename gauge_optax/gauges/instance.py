"""`Instance`, the interface of one copy of a gauge on a tree: a small group and how it moves leaves.

A gauge bound to a tree is a list of instances, one per layer or other capture of its paths. The element of an instance
has one member of the group per value of the named axes (per head, per channel), all in one array. Each symmetry is one
subclass, in a file of its own: it defines the group law, the action, and how an element is read from weights. The slice
(`gauge_optax.slice`) combines the instances of all gauges and treats all subclasses alike. That module also defines the
words orbit, vertical, fix and hold.

Elements inside the library may carry more than the public ones (a matrix with its inverse); `to_element` and
`from_element` convert.
"""

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Block, BlockSpec, overlap
from gauge_optax.errors import binding_error
from gauge_optax.gauges.matrices import Matrices
from gauge_optax.linalg import real_dtype, safe_divide

Arrays = dict[str, jax.Array]
"""Leaf path → array in the computing dtype."""

Anchor = tuple[Block, ...]
"""Blocks that move alike. An element is read from all of them together."""

Effect = Literal["still", "shift", "diagonal", "permutation", "orthogonal", "linear"]
"""What a move does to tangents: nothing ("still", "shift"), scale entries, renumber them, rotate, or any linear map.

A "shift" adds a constant to points, a "still" move leaves points unchanged too.
"""


@dataclasses.dataclass(frozen=True)
class Instance(abc.ABC):
    """One copy of a gauge on a tree.

    Attributes:
      gauge: the name of its gauge, for messages.
      key: the captures, as in the keys of elements: "i=0", or "" for a gauge without captures.
      named: names of the axes that index an element.
      shape: lengths of the named axes.
      blocks: every block that the instance moves.
    """

    gauge: str
    key: str
    named: tuple[str, ...]
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    effect: ClassVar[Effect] = "linear"  # of a move on tangents and cotangents
    balancing: ClassVar[Effect] = "still"  # of the move to the point of least norm on the orbit
    breaks: ClassVar[str] = "another reader of these leaves, or an index"  # usual reasons why a binding is no symmetry
    rigid: ClassVar[str | None] = None  # the axis along which other gauges must scale all entries alike
    joined: ClassVar[bool] = False  # whether the captures of paths make no copies: one element for all layers
    partial: ClassVar[tuple[str, ...]] = ()  # roles whose blocks may lack named axes
    without_axis: ClassVar[tuple[str, ...]] = ()  # roles whose blocks lack the axis `rigid`
    # Whether products with it have `inverse` and `compose`; its conjugates by other gauges may depend on weights.
    composes: ClassVar[bool] = True
    # Whether it acts at its place in the list of gauges, because it does not commute with linear moves of its leaves.
    keeps_place: ClassVar[bool] = False
    # Whether moves are affine in all leaves that steps change. If not, `push` and `pull` are not asked for.
    affine: ClassVar[bool] = True
    # Whether `quotient(pin=False)` may let the inner optimizer leave the slice along this instance.
    known_by_action: ClassVar[bool] = False

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths of the leaves that the instance moves, each once."""
        return tuple(dict.fromkeys(block.path for block in self.blocks))

    @property
    def context(self) -> tuple[Block, ...]:
        """Blocks that the action reads and does not move."""
        return ()

    @property
    def targets(self) -> tuple[Block, ...]:
        """Blocks that an instance which keeps its place moves by an amount that depends on other blocks."""
        return ()

    @property
    def divided(self) -> tuple[Block, ...]:
        """Scales of norms that are 1 in slice coordinates, which `push` and `pull` rely on."""
        return ()

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """The dimension of the group, and of the orbit of a generic point."""

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
        """A random public element. `leaves` are the parameters by path: the size of a shift follows theirs."""

    @classmethod
    def inverse_element(cls, element: Any) -> Any:
        """Like `inverse`, for a public element."""
        return cls.inverse(element)

    @classmethod
    def compose_elements(cls, a: Any, b: Any) -> Any:
        """Like `compose`, for public elements."""
        return cls.compose(a, b)

    @staticmethod
    def power(element: Any, exponent: float | jax.Array) -> Any:
        """A power of a public element that `balance` returns. For rotations that element is the identity."""
        return element

    @staticmethod
    def conjugated(specs: Sequence[BlockSpec], element: Any, moved: Callable[[str, jax.Array], jax.Array]) -> Any:
        """h·g·h⁻¹ for a public element g: g itself except for shifts. `moved(path, leaf)` applies h's linear part."""
        return element

    @classmethod
    def effect_of(cls, element: Any) -> Effect:
        """The effect of one public element, which may be a special case of `effect`."""
        return cls.effect

    def to_element(self, e: Any) -> Any:
        """The public form of an element."""
        return e

    def from_element(self, element: Any) -> Any:
        """An element from its public form."""
        return element

    def coordinate(self, e: Any, point: Arrays) -> Any:
        """The coordinate whose change is drift, of a stored point that reads as `e`; None where there is none."""
        return None

    def where(self, condition: jax.Array, e: Any, other: Any) -> Any:
        """`e` where a condition of shape `shape` holds, `other` elsewhere."""

        def chosen(x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, y)

        return jax.tree.map(chosen, e, other)

    # The action ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def act(self, e: Any, point: Arrays) -> Arrays:
        """g·θ. Leaves that the instance does not move are returned unchanged."""

    def enter(self, e: Any, point: Arrays) -> Arrays:
        """g⁻¹·θ."""
        return self.act(self.inverse(e), point)

    def push(self, e: Any, tangent: Arrays) -> Arrays:
        """The derivative of the action, applied to a tangent; the action itself where that is linear."""
        return self.act(e, tangent)

    @abc.abstractmethod
    def pull(self, e: Any, cotangent: Arrays) -> Arrays:
        """The transpose of `push`, applied to a cotangent."""

    # What the slice needs -----------------------------------------------------------------------------

    def log_ratio(self, point: Arrays) -> jax.Array | None:
        """log ‖up‖ − p·log ‖down‖ per channel, of a scale with two sides; None for other kinds."""
        return None

    def with_log_ratio(self, e: Any, change: jax.Array) -> Any:
        """The element that adds `change` to `log_ratio`, after the element e. Only for kinds that have a ratio."""
        raise NotImplementedError

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        """The anchors that sizes can be read from, best first; () for shifts and rotations, which have no size."""
        return ()

    def read(self, anchor: Anchor, point: Arrays, within: jax.Array, near: bool) -> tuple[Any, jax.Array]:
        """Reads elements from one anchor.

        Args:
          anchor: one of `anchors`.
          point: leaves, where all other instances that move the anchor are already undone.
          within: which channels to read, (`shape`, bool); the others get the identity.
          near: whether the point is near the slice, so that a cheaper method suffices.

        Returns:
          The element, and which channels were read (`shape`, bool): an anchor that is zero has no size.
        """
        return self.identity(), jnp.zeros(self.shape, bool)

    def dual(self, e: Any) -> Any:
        """The element whose `act` is the transpose of the `act` of `e`, for instances with anchors."""
        return e

    def centred(self, vector: Arrays) -> Arrays:
        """Subtracts the part along shifts from a point, tangent or cotangent."""
        return vector

    def read_mean(self, point: Arrays) -> Any:
        """The element of a shift or of what keeps its place, where all later instances are undone; else None."""
        return None

    @property
    def turn(self) -> "Turn | None":
        """The instance of its rotations, which are read once, at `init`, and then held; None where there are none."""
        return None

    def from_turn(self, turn: Any) -> Any:
        """The element of this instance that moves leaves as the element `turn` of `self.turn` does."""
        return turn

    def balanced(self, point: Arrays) -> Any:
        """The element e that maps the point of least norm on the orbit to `point`; the identity where there is none."""
        return self.identity()

    def beside(self, others: "Sequence[Instance]") -> "Instance":
        """This instance in a slice together with others, of which it may ask which leaves they move."""
        return self

    def completed(self, point: Arrays, cotangent: Arrays, block: Block) -> Arrays | None:
        """A cotangent whose entries of the first anchor `block` follow from all others, by invariance; None if not."""
        return None

    # What choices of a point on the orbit ask (`orbit`) ---------------------------------------------------

    def with_positive_signs(self, point: Arrays) -> Arrays:
        """The point with signs made positive that the function does not see, and that no element can change."""
        return point

    def rotation(self, key: jax.Array, by: str) -> Any:
        """A random public element that rotates, by "random" or "hadamard". Raises ValueError where there is none."""
        raise binding_error(
            self.gauge, "no rotation", f"{self.gauge} in the list of go.rotate", "rotations of heads or of the stream",
            "take it out of the list; go.canonicalize moves scales and shifts",
        )  # fmt: skip

    def algebra(self) -> Any:
        """Zero coordinates of elements near the identity, in the structure of a public element unless it says so."""
        return self.to_element(self.identity())

    def exponential(self, coordinates: Any, near: bool = False) -> Any:
        """The public element with these coordinates; for groups under addition, the coordinates themselves.

        `near` asks for it to first order in the coordinates, which is all that a derivative at zero depends on.
        """
        return coordinates

    def misfit(self, element: Any) -> jax.Array | float:
        """How far a public element is from the group, relative to 1; 0 where every array of its shape is in it."""
        return 0.0

    def normalized(self, element: Any) -> Any:
        """A public element near the group, without the roundoff that leads away from it."""
        return element

    def on_leaf(self, path: str) -> "tuple[Any, dict[str, str]]":
        """The instance on one leaf, with the path "" there, and the paths of the leaves that its action reads, by name.

        It says nothing of layers, so that equal leaves of several layers have equal instances.
        """
        blocks = tuple(dataclasses.replace(block, path="") for block in self.blocks if block.path == path)
        return dataclasses.replace(self, key="", blocks=blocks), {}

    def with_blocks(self, change: Callable[[Block], Block]) -> "Any":
        """The instance with every block that it moves changed."""
        return dataclasses.replace(self, blocks=tuple(map(change, self.blocks)))

    def sorting(self, point: Arrays) -> Any:
        """The element that sorts the copies of a unit by an invariant of theirs; None for groups that do not permute.

        `point` is canonical but for the order of copies, and is moved by the inverse of what is returned.
        """
        return None

    # What alignment asks (`orbit.align`) ------------------------------------------------------------------

    def nearest(self, target: Arrays, point: Arrays, others: "Sequence[Instance]" = ()) -> Any:
        """The element e for which act(e, point) is nearest to `target`: the least sum of squares over moved leaves.

        Args:
          target: leaves.
          point: leaves.
          others: instances whose elements are not known yet. The answer should depend on theirs as little as possible:
            blocks that they move are left out where others remain.

        This method is for actions that are affine in e, the additions of constants: it solves the normal equations by
        conjugate gradients.
        """
        paths = self.paths

        def moved(e: Any) -> Arrays:
            after = self.act(e, point)
            return {path: after[path] for path in paths}

        start = self.identity()
        at_start, linear = jax.linearize(moved, start)  # a difference of two moves would lose small directions
        _, pull = jax.vjp(moved, start)

        def inner(a: Any, b: Any) -> jax.Array:
            return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)), jnp.zeros(()))

        residual = direction = pull({path: target[path] - at_start[path] for path in paths})[0]
        energy, element = inner(residual, residual), start
        least = energy * float(jnp.finfo(energy.dtype).eps) ** 2
        for _ in range(_MOST_STEPS):
            if not bool(energy > least):
                break
            change = pull(linear(direction))[0]
            rate = safe_divide(energy, inner(direction, change))
            element, residual = _plus(element, rate, direction), _plus(residual, -rate, change)
            fresh = inner(residual, residual)
            direction, energy = _plus(residual, safe_divide(fresh, energy), direction), fresh
        return element

    def renumbers(self, other: "Instance") -> bool:
        """Whether elements of another instance have an entry per unit that this instance renumbers."""
        return False

    def carried(self, e: Any, other: "Instance", value: Any) -> Any:
        """g·h·g⁻¹ for g = e and an element h of another instance: h itself, but for what renumbers its units."""
        return value

    def responses(self, point: Arrays, gradient: Arrays) -> jax.Array | None:
        """Derivatives of a function by the logs of the sizes of units, (*shape, units, blocks).

        Args:
          point: leaves.
          gradient: the function's gradient there.

        Returns:
          None for instances that are not matched by such numbers. They depend on the function and on the order of units
          alone: all other gauges leave them as they are.
        """
        return None

    def matched(self, target: jax.Array, point: jax.Array) -> Any:
        """The element that takes the responses of one point's units nearest to those of another, (*shape, units, …)."""
        raise NotImplementedError

    # What packing asks (`orbit.pack`) -------------------------------------------------------------------

    @property
    def packable(self) -> tuple[Block, ...]:
        """Blocks in which an element can make rows constant, best first; () if no entry can be left out of a tree.

        Such a block has the named axes, one free axis of rows, and the axis `basis`.
        """
        return ()

    @property
    def constant_rows(self) -> np.ndarray:
        """The rows that an element can bring about in a packable block of every head, (rows, basis)."""
        raise NotImplementedError

    def choose_rows(self, block: Block, point: Arrays, per_head: bool) -> jax.Array:
        """Numbers of the rows of a packable block that are best made constant.

        Args:
          block: one of `packable`.
          point: leaves.
          per_head: whether every head has rows of its own.

        Returns:
          (heads, rows), or (1, rows) for rows that all heads share. Heads are those of all named axes, flattened.
        """
        raise NotImplementedError

    def to_constant(self, block: Block, point: Arrays, rows: jax.Array, size: float) -> tuple[Any, jax.Array]:
        """The element whose move makes these rows `size` times `constant_rows`, and how badly conditioned it is.

        Args:
          block: one of `packable`.
          point: leaves.
          rows: as `choose_rows` returns them.
          size: a positive number.

        Returns:
          The element, and a condition number per head, flattened as in `choose_rows`; infinite if there is no element.
        """
        raise NotImplementedError

    # What optimizers ask ------------------------------------------------------------------------------

    def signal(self, point: Arrays, gradient: Arrays) -> jax.Array | None:
        """The largest gradient of this instance, if all gradients of other leaves are zero at this slice point; else 0.

        None if that holds at no slice point.
        """
        return None

    @property
    def log_step(self) -> float:
        """√(1 + p²), the norm of the changes (1, −p) that log α = 1 makes to both sides' logs; 0 if it is no scale."""
        return 0.0

    @property
    def sides(self) -> "tuple[tuple[Block, ...], tuple[Block, ...]] | tuple[Turn, Turn] | None":
        """Both factors of a product that the gauge does not change; None where there is no second factor."""
        return None

    def matrices(self, block: Block) -> tuple[int, Matrices | None] | None:
        """How Muon reads a block as matrices, with a priority: 0 comes before 1 before 2. None for no preference."""
        return None


class Turn(Instance):
    """Rotations of a common basis: orthogonal moves, read at `init` and held at every step.

    The class methods take several instances at once, so that heads of all layers form one batch.
    """

    of_heads: ClassVar[bool] = True  # whether it rotates heads, not the residual stream that all layers share
    entrywise: ClassVar[bool] = False  # whether moves are made entry by entry rather than by matrix products

    @staticmethod
    @abc.abstractmethod
    def matrix(e: Any) -> jax.Array:
        """The orthogonal matrices of an element, (*shape, size, size): rows W go to W·matrix."""

    @classmethod
    @abc.abstractmethod
    def read_all(cls, turns: Sequence[Any], point: Arrays) -> list[Any]:
        """Elements of several instances, at a point where all scales are already on the slice."""

    @classmethod
    @abc.abstractmethod
    def eigenbases(cls, turns: Sequence[Any], point: Arrays) -> list[Any]:
        """As `read_all`, with rows on the slice in the eigenbasis of their Gram matrix, eigenvalues descending.

        The entry of largest magnitude of every column is positive there. See `linalg.eigenbasis` for equal eigenvalues.
        """

    @classmethod
    @abc.abstractmethod
    def project(
        cls, turns: Sequence[Any], point: Arrays, vector: Arrays, into: Mapping[Any, jax.Array] | None = None
    ) -> Arrays:
        """Removes the part along rotations from a tangent or a cotangent, by an orthogonal projection.

        Args:
          turns: instances of this class.
          point: leaves.
          vector: leaves.
          into: per instance, the matrix whose product with its rows is on the slice; None if the rows are there.
        """

    @classmethod
    def project_dual(cls, turns: Sequence[Any], point: Arrays, vector: Arrays) -> Arrays:
        """The transpose of `project`; `project` itself, because that is an orthogonal projection."""
        return cls.project(turns, point, vector)

    @classmethod
    def hold(cls, turns: Sequence[Any], point: Arrays, step: Arrays) -> Arrays:
        """Removes the part of a step at a slice point that rotates rows: to first order; exactly in some subclasses."""
        return cls.project(turns, point, step)

    @classmethod
    @abc.abstractmethod
    def without_roundoff(cls, turns: Sequence[Any], cotangent: Arrays) -> Arrays:
        """Sets entries of a cotangent that are roundoff to zero: those that are zero for every invariant loss."""


@dataclasses.dataclass(frozen=True)
class Additive(Instance):
    """An instance whose group is addition: elements are arrays of `shape`, or dicts of arrays."""

    @staticmethod
    def axis_sizes(named: tuple[str, ...], element: Any) -> dict[str, int]:
        """Lengths of axes, read off an element."""
        return dict(zip(named, element.shape, strict=True))

    @property
    def dim(self) -> int:
        return math.prod(self.shape)

    def identity(self) -> Any:
        return jnp.zeros(self.shape, real_dtype())

    @staticmethod
    def inverse(e: Any) -> Any:
        return jax.tree.map(operator.neg, e)

    @staticmethod
    def compose(a: Any, b: Any) -> Any:
        return jax.tree.map(operator.add, a, b)


_MOST_STEPS = 200  # of conjugate gradients, which end long before


def _plus(a: Any, factor: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: x + factor * y, a, b)


def apart_from(blocks: Sequence[Block], others: Sequence[Instance]) -> tuple[Block, ...]:
    """The blocks that none of these instances moves; all of them if there is none.

    Args:
      blocks: of one instance.
      others: other instances.
    """
    apart = tuple(b for b in blocks if not any(overlap(b, x) for other in others for x in other.blocks))
    return apart or tuple(blocks)
