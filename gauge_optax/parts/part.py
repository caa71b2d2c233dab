"""`Part`: one small group that acts on leaves. This is all that the slice knows of a symmetry.

A gauge that is bound to a tree compiles to parts, one or two per layer (or other capture of its paths). The element of
a part has one member of the group per value of the named axes (per head, per channel), all in one array. A part has one
of three roles, and its role is its class:

* a `Constant` adds something that the function does not see. It is read from the weights and removed at every step;
* a `Size` multiplies. It is read and removed at every step too. A gauge that a user defines by its action is one, too,
  whatever it does;
* a `Turn` rotates. It is read once, at `init`; then every step loses the part of it that only rotates.

A part whose class has none of the three roles (a permutation) moves weights, but no optimizer notices it.

A part says what its group is (`identity`, `inverse`, `compose`), how it acts, and how it is read; a turn also says how
a step loses what only turns. What a consumer
(an optimizer, a measure, `align`) needs to know of a part stands with the consumer, as a `functools.singledispatch`
function with a default that holds for every part.

How steps and gradients move follows from `act`. A *tangent* is a change of weights, as a step is: `push` moves it
out of the slice with the weights. A *cotangent* is a gradient: `pull` moves it in, by the transpose of the same
derivative. At W = 2·Ŵ a step of Ŵ is doubled on its way out, and a gradient at W on its way in.
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
"""Leaf path → array in the computing dtype."""

Anchor = tuple[Block, ...]
"""Blocks that an element is read from together. With the empty anchor, a part waits for no other part."""

EXCLUSIVE = ("",)
"""The value of `Part.along` for a part whose blocks no other part may move."""

E = TypeVar("E")

overlaps = functools.cache(overlap)


@dataclasses.dataclass(frozen=True)
class Part(abc.ABC, Generic[E]):
    """One small group on one tree. It is frozen and hashable, and holds no array.

    Attributes:
      label: the name of its gauge, its captures, a checksum and the version of states, "rescale[i=0].8bc7f390.v4";
        where a gauge has two parts, a word for this one behind it. It does not depend on the order of a list of
        gauges, and is the key of the part's element in a state.
      named: names of the axes that index an element.
      shape: lengths of the named axes.
      blocks: what `act` changes.
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
        """The axes of its blocks whose entries this part mixes, as a rotation mixes those of `basis`.

        Every other part on these blocks must multiply all entries along them by one number; a size that is read from a
        block which this part passes is exempt. (): no condition. `EXCLUSIVE`: no other part may move these blocks.
        """
        return ()

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        """What an element can be read from, best first."""
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
        """The move of a point. Leaves that the part does not change are returned as they are."""

    def undo(self, e: E, x: Arrays) -> Arrays:
        """The move back. Constants leave exact zeros where there was nothing else."""
        return self.act(self.inverse(e), x)

    def push(self, e: E, u: Arrays, at: Arrays) -> Arrays:
        """The difference act(e, at + u) − act(e, at) of two points; `u` is a step, a tangent.

        The default is the derivative, which is exact where `act` is affine. Otherwise a part has a closed form.
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
        """A gradient without the roundoff that stands where the gradient of every invariant loss is zero."""
        return g

    def beside(self, others: "Sequence[Part[Any]]") -> "Part[E]":
        """The form that this part takes in a list with `others`, which decide from which blocks some parts are read."""
        return self

    def beside_frozen(self, frozen: frozenset[str]) -> "Part[E] | None":
        """This part where the leaves with these paths never change; None if a step of another would change one."""
        return self


class Additive:
    """The law of elements that add: arrays, or trees of arrays. Parts and public elements have it alike."""

    @staticmethod
    def inverse(e: Any) -> Any:
        """−e."""
        return jax.tree.map(operator.neg, e)

    @staticmethod
    def compose(a: Any, b: Any) -> Any:
        """a + b."""
        return jax.tree.map(operator.add, a, b)


class Orthogonal:
    """The law of rotations R that take rows W to W·R. Parts and public elements have it alike."""

    @staticmethod
    def inverse(e: jax.Array) -> jax.Array:
        """Rᵀ."""
        return transpose(e)

    @staticmethod
    def compose(a: jax.Array, b: jax.Array) -> jax.Array:
        """W ↦ (W·b)·a."""
        return matmul(b, a)


class Isometry(Part[E]):
    """A part that moves steps and gradients as it moves points, and keeps their products."""

    def push(self, e: E, u: Arrays, at: Arrays) -> Arrays:
        return self.act(e, u)

    def pull(self, e: E, g: Arrays, at: Arrays) -> Arrays:
        return self.act(self.inverse(e), g)


class Constant(Part[E]):
    """A part that acts by adding. It is read and removed at every step."""

    @abc.abstractmethod
    def read(self, anchor: Anchor, x: Arrays) -> E:
        """The element whose removal leads to the slice, where this reading is zero."""

    def reference_gradient(self, x: Arrays, g: Arrays) -> jax.Array | None:
        """The size of gradients with which those of all leaves are compared at a slice point; None where there is none.

        What is smaller than it by the roundoff of the dtype is itself roundoff (`Slice.least_signal`).

        Args:
          x: the slice point.
          g: the gradient, all leaves.
        """
        return None

    def beside_frozen(self, frozen: frozenset[str]) -> "Part[E] | None":
        return None if frozen & {b.path for b in self.blocks} else self


class Size(Part[E]):
    """A part that acts by multiplying.

    It is read and removed at every step, in the channels whose first anchor is not zero at `init`; other channels are
    read at `init` alone.
    """

    @abc.abstractmethod
    def read(self, anchor: Anchor, x: Arrays, within: jax.Array, near: bool) -> tuple[E, jax.Array]:
        """Reads an element from one anchor.

        Args:
          anchor: one of `anchors`.
          x: a point; all other parts that move the anchor are already undone.
          within: which channels or heads to read, (*shape, bool); the others get the identity.
          near: whether the point is near the slice, so that a cheaper method suffices.

        Returns:
          The element, and which channels were read, (*shape, bool): an anchor that is zero has no size.
        """

    def completed(self, x: Arrays, g: Arrays) -> Arrays:
        """A gradient at a slice point whose entries of the anchor follow from all others, because the loss is
        invariant.
        """
        return g

    def follows(self, bits: Mapping[str, int]) -> bool:
        """Whether growth rests on the anchor, because another leaf is less precise; `bits` are those of mantissas."""
        return False


class Turn(Isometry[E]):
    """A part that acts orthogonally. It is read once; then every step loses what only turns.

    The class methods take several parts of one class at once, so that the heads of all layers are one batch.
    """

    last: ClassVar[bool] = False  # whether its class comes after the others in a step, for the compiler's sake alone

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
          into: per part a rotation R, (*shape, size, size), such that W·R is on the slice, where W are the part's rows
            at `x`; None if W itself is on the slice.
        """

    @classmethod
    def project_dual(cls, turns: Sequence[Any], x: Arrays, g: Arrays) -> Arrays:
        """The transpose of `project`; `project` itself where that is an orthogonal projection."""
        return cls.project(turns, x, g)

    @classmethod
    def hold(cls, turns: Sequence[Any], x: Arrays, u: Arrays) -> Arrays:
        """Removes the part of a step that rotates: to first order, or exactly where that has a closed form."""
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
    """Leaf path → the parts that change the leaf, each with the block by which it does."""
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
