"""`Part`: one small group that acts on leaves. This is all that the slice knows of a symmetry.

A gauge that is bound to a tree compiles to parts, one or two per layer (or other capture of its paths). An *element* of
a part has one member of the group for every index of the named axes (for every head or channel). To *read* a part is to
compute its element from the weights. A part has one of three roles, and its role is its class:

* a `Constant` adds something that the function does not see. It is read from the weights and removed at every step;
* a `Size` multiplies. It is also read and removed at every step. A gauge that a user defines by its action has this
  role, whatever it does;
* a `Turn` rotates. It is read once, at `init`. From then on, the rotation that a step contains is removed from it.

A part whose class has none of the three roles (a permutation) moves weights, but no optimizer notices it.

A part defines its group (`identity`, `inverse`, `compose`), how it acts, and how it is read; a turn also defines what
it removes from a step. Anything else that an optimizer, a measure or `align` needs to know of a part is written in the
module that needs it, as a `functools.singledispatch` function with a default that holds for every part.

How steps and gradients move follows from `act`. A *tangent* is a change of weights, such as a step: `push` moves it
from the slice to the stored weights. A *cotangent* is a gradient: `pull` moves it from the stored weights to the slice,
by the transpose of the same derivative. For stored weights W = 2·Ŵ, `push` doubles a step of Ŵ, and `pull` doubles a
gradient at W.
"""

import abc
import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax

from gauge_optax.binding import Block, overlap
from gauge_optax.linalg import matmul, transpose

Arrays = dict[str, jax.Array]
"""Leaf path → array in the computing dtype, see `linalg.real_dtype`."""

Anchor = tuple[Block, ...]
"""Blocks from which an element is read together. An empty anchor sets no order: the part may be read at any time."""

EXCLUSIVE = ("",)
"""The value of `Part.along` for a part whose blocks no other part may move."""

E = TypeVar("E")

overlaps = functools.cache(overlap)


@dataclasses.dataclass(frozen=True)
class Part(abc.ABC, Generic[E]):
    """One small group on one tree. It is frozen and hashable, and holds no array.

    Attributes:
      label: the name of its gauge, its captures, a checksum and the version of states, "rescale[i=0].8bc7f390.v5"; if a
        gauge has two parts, a word that names this one follows. The label does not depend on the order of a list of
        gauges, and is the key of the part's element in a state.
      named: names of the axes that index an element.
      shape: lengths of the named axes.
      blocks: the blocks that `act` changes.
    """

    label: str
    named: tuple[str, ...]
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def passes(self) -> tuple[Block, ...]:
        """Blocks whose values `act` uses and does not change: a norm's scale, a kernel."""
        return ()

    @property
    def along(self) -> tuple[str, ...]:
        """The axes of its blocks along which this part moves entries together.

        A rotation, for example, mixes the entries along `basis`, and a shift adds one number to all entries along
        `vocab`. Any other part on these blocks, except one that adds, must treat all entries along these axes alike (a
        scale multiplies them by one number), or the two parts do not commute. Only a size that is read from a block in
        `passes` commutes in any case. The empty tuple sets no such condition. `EXCLUSIVE` means that no other part may
        move these blocks.
        """
        return ()

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        """The groups of blocks (anchors) from which an element can be computed, best first. One of them is enough."""
        return (self.blocks,)

    @abc.abstractmethod
    def identity(self) -> E:
        """The element that moves nothing."""

    @abc.abstractmethod
    def inverse(self, e: E) -> E:
        """The element that undoes `e`."""

    @abc.abstractmethod
    def compose(self, a: E, b: E) -> E:
        """The element that acts as `a` after `b`."""

    @abc.abstractmethod
    def act(self, e: E, x: Arrays) -> Arrays:
        """The point `x` moved by the element `e`. Leaves that the part does not change are returned as they are."""

    def undo(self, e: E, x: Arrays) -> Arrays:
        """The point `x` moved by the inverse of `e`.

        A `Constant` subtracts here. If only roundoff remains of a row of weights, the row becomes zero.
        """
        return self.act(self.inverse(e), x)

    def push(self, e: E, u: Arrays, at: Arrays) -> Arrays:
        """The difference act(e, at + u) − act(e, at) of two points; `u` is a step, a tangent.

        The default applies the derivative of `act` to `u`, which is exact if `act` is affine. A part whose `act` is not
        affine has a closed form of its own.
        """
        paths = paths_of(self)
        moved = jax.jvp(lambda x: _moved(self, e, x), ({p: at[p] for p in paths},), ({p: u[p] for p in paths},))[1]
        return u | moved

    def pull(self, e: E, g: Arrays, at: Arrays) -> Arrays:
        """The transpose of the derivative of `act` at the point `at`, applied to a gradient, a cotangent."""
        paths = paths_of(self)
        _, transposed = jax.vjp(lambda x: _moved(self, e, x), {p: at[p] for p in paths})
        return g | transposed({p: g[p] for p in paths})[0]

    def quiet(self, g: Arrays) -> Arrays:
        """A gradient with zeros in place of roundoff, where the gradient of every invariant loss is zero."""
        return g

    def beside(self, others: "Sequence[Part[Any]]") -> "Part[E]":
        """This part, adapted to the other parts of its list, `others`.

        Some parts must be read from blocks that no other part moves. They store here which blocks these are.
        """
        return self

    def beside_frozen(self, frozen: frozenset[str]) -> "Part[E] | None":
        """This part for a run in which the leaves with these paths never change.

        It is None if the part cannot be used then, because a step of other leaves would change a frozen one.
        """
        return self


class Additive:
    """Inverse and product of elements that add: arrays, or trees of arrays. Both `Part`s and `Copy`s inherit them."""

    @staticmethod
    def inverse(e: Any) -> Any:
        """−e."""
        return jax.tree.map(operator.neg, e)

    @staticmethod
    def compose(a: Any, b: Any) -> Any:
        """a + b."""
        return jax.tree.map(operator.add, a, b)


class Orthogonal:
    """Inverse and product of rotations R that take rows W to W·R. Both `Part`s and `Copy`s inherit them."""

    @staticmethod
    def inverse(e: jax.Array) -> jax.Array:
        """Rᵀ."""
        return transpose(e)

    @staticmethod
    def compose(a: jax.Array, b: jax.Array) -> jax.Array:
        """b·a, which acts as `a` after `b`: W ↦ (W·b)·a."""
        return matmul(b, a)


class Isometry(Part[E]):
    """A part whose `act` is orthogonal: steps and gradients move as points do, and inner products stay the same."""

    def push(self, e: E, u: Arrays, at: Arrays) -> Arrays:
        return self.act(e, u)

    def pull(self, e: E, g: Arrays, at: Arrays) -> Arrays:
        return self.act(self.inverse(e), g)


class Constant(Part[E]):
    """A part that acts by adding. It is read and removed at every step."""

    @abc.abstractmethod
    def read(self, anchor: Anchor, x: Arrays) -> E:
        """The element at the point `x`, computed from an anchor. On the slice it is zero; `undo` leads there."""

    def reference_gradient(self, x: Arrays, g: Arrays) -> jax.Array | None:
        """A number with which all entries of all gradients are compared; None for a part that has none.

        An entry counts as roundoff if its absolute value is less than this number times `linalg.roundoff`
        (`Slice.least_signal`).

        Args:
          x: the slice point.
          g: the gradient, all leaves.
        """
        return None

    def beside_frozen(self, frozen: frozenset[str]) -> "Part[E] | None":
        return None if frozen & {b.path for b in self.blocks} else self


class Size(Part[E]):
    """A part that acts by multiplying.

    In channels whose first anchor is not zero at `init`, it is read and removed at every step. In all other channels it
    is read at `init` alone.
    """

    @abc.abstractmethod
    def read(self, anchor: Anchor, x: Arrays, within: jax.Array, near: bool) -> tuple[E, jax.Array]:
        """Computes the element at a point from one anchor.

        Args:
          anchor: one of `anchors`.
          x: a point; all other parts that move the anchor are already undone.
          within: which channels or heads to read, (*shape) booleans; the others get the identity.
          near: True if the point is near the slice, so that a cheaper method suffices.

        Returns:
          The element, and which channels were read, (*shape) booleans: False where the anchor is zero.
        """

    def is_one_at(self, anchor: Anchor) -> bool:
        """Whether all entries of an anchor are 1 on the slice, as those of a norm's scale are, and none is −1."""
        return False

    def completed(self, x: Arrays, g: Arrays) -> Arrays:
        """A gradient at a slice point, with the anchor's entries computed from those of all other blocks.

        The gradient of an invariant loss is orthogonal to the orbit. From this condition the anchor's entries follow.
        The default returns the gradient unchanged.
        """
        return g

    def follows(self, bits: Mapping[str, int]) -> bool:
        """Whether what the anchor gains in a step stays in the anchor, instead of moving to the part's other leaves.

        It stays if another leaf has a less precise dtype, which would round it away.

        Args:
          bits: leaf path → bits of the mantissa of the leaf's dtype.
        """
        return False


class Turn(Isometry[E]):
    """A part that rotates. It is read once, at `init`; later, rotations are removed from the steps.

    The class methods take several parts of one class at once, so that the heads of all layers are one batch.
    """

    last: ClassVar[bool] = False  # whether a step handles this class after the others, which only saves memory

    @classmethod
    @abc.abstractmethod
    def read_all(cls, turns: Sequence[Any], x: Arrays) -> list[Any]:
        """Elements of several parts of this class, at a point where all sizes and constants are undone."""

    @classmethod
    @abc.abstractmethod
    def project(
        cls, turns: Sequence[Any], x: Arrays, u: Arrays, into: Mapping[Any, jax.Array] | None = None
    ) -> Arrays:
        """Removes the part along rotations from a tangent.

        Args:
          turns: parts of this class.
          x: the point.
          u: the tangent.
          into: per part the rotation R, (*shape, size, size), that takes the part's rows W at `x` to rows W·R on the
            slice; None if W itself is on the slice. The error of an iterative method depends on the basis. Such a
            method therefore computes in the basis of W·R, which twins share.
        """

    @classmethod
    def project_dual(cls, turns: Sequence[Any], x: Arrays, g: Arrays) -> Arrays:
        """The transpose of `project`. The default is for a `project` that is orthogonal, and so its own transpose."""
        return cls.project(turns, x, g)

    @classmethod
    def hold(cls, turns: Sequence[Any], x: Arrays, u: Arrays, backs: dict[Any, Any]) -> Arrays:
        """Removes the part of a finite step that rotates. The default does so to first order in the step.

        A class can do it exactly: it turns the end point of the step back by an element of its group, which does not
        change the function there.

        Args:
          turns: parts of this class.
          x: the point.
          u: the step.
          backs: a dict to which a class adds, for every turn, by what it turned the end point back. Classes whose turns
            commute with all sizes need not add anything, because the sizes' elements stay as they are.
        """
        return cls.project(turns, x, u)


def paths_of(part: Part[Any]) -> tuple[str, ...]:
    """The leaves that a part reads or changes, each once."""
    return _paths(part.blocks, part.passes)


def changed(part: Part[Any]) -> tuple[str, ...]:
    """The leaves that a part changes, each once."""
    return _paths(part.blocks, ())


@functools.cache
def _paths(blocks: tuple[Block, ...], passes: tuple[Block, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(b.path for b in (*blocks, *passes)))


def blocks_by_path(parts: Iterable[Any]) -> dict[str, list[tuple[Any, Block]]]:
    """Leaf path → pairs of a part that changes the leaf and the block of the leaf that it changes."""
    pairs: dict[str, list[tuple[Any, Block]]] = {}
    for part in parts:
        for block in part.blocks:
            pairs.setdefault(block.path, []).append((part, block))
    return pairs


def _moved(part: Part[Any], e: Any, x: Arrays) -> Arrays:
    moved = part.act(e, x)
    return {p: moved[p] for p in x}


def moves(part: Part[Any], blocks: Sequence[Block]) -> bool:
    """Whether a part changes an entry of these blocks."""
    return any(a.path == b.path and overlaps(a, b) for a in part.blocks for b in blocks)


def name_of(part: Part[Any]) -> str:
    """The name of the part's gauge, for messages."""
    return part.label.split("[")[0]
