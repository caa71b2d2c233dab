"""A gauge that is known only by its action and its reading, as a gauge that a user defines is.

One instance stands for the whole gauge. Tangents move by the derivative of the action, cotangents by its transpose.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, leaves_by_path, with_leaves
from gauge_optax.errors import binding_error
from gauge_optax.gauges.instance import Anchor, Arrays, Effect, Instance


@dataclasses.dataclass(frozen=True)
class ActionInstance(Instance):
    """The one instance of such a gauge on a tree; it is read anew at every step.

    Attributes:
      whole: the gauge, a `Gauge`.
      treedef: structure of the parameters.
      leaves: shapes and dtypes of the parameters.
      read_blocks: the leaves that its reading depends on.
    """

    whole: Any
    treedef: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    read_blocks: tuple[Block, ...]

    # Its elements may have any structure, so that no offset can be computed: the inner optimizer stays on the slice.
    known_by_action: ClassVar[bool] = True

    @classmethod
    def of(cls, gauge: Any, params: Any) -> "ActionInstance":
        """The instance of a gauge on a tree.

        Args:
          gauge: the gauge.
          params: the parameters, of which the shapes are read.

        Raises:
          ValueError: a gauge that computes with no leaf, or with one that is not of real numbers.
        """
        shapes = jax.eval_shape(lambda tree: tree, params)
        leaves, treedef = jax.tree.flatten(shapes)
        by_path = leaves_by_path(shapes)
        reading, acting = (
            _used(function, shapes, count)
            for function, count in ((gauge.read, None), (lambda p: gauge.act(gauge.identity(p), p), len(leaves)))
        )
        paths = [path for path, number in zip(by_path, range(len(leaves)), strict=True) if number in reading | acting]
        wrong = [path for path in paths if not jnp.issubdtype(by_path[path].dtype, jnp.floating)]
        if wrong or not paths:
            raise binding_error(
                gauge.name, f"not on real numbers: '{wrong[0]}'" if wrong else "no leaf",
                f"{by_path[wrong[0]].dtype}" if wrong else "an action that computes with no leaf",
                "an action and a reading of some floating-point leaves", "leave all others as they are",
            )  # fmt: skip
        blocks = {path: _whole_leaf(path, by_path[path].shape) for path in paths}
        anchor = tuple(blocks[path] for number, path in enumerate(by_path) if number in reading)
        return cls(gauge.name, "", (), (), tuple(blocks.values()), gauge, treedef, tuple(leaves), anchor)

    @property
    def effect(self) -> Effect:  # type: ignore[override]
        """See `Instance`."""
        effect: Effect = self.whole.effect
        return effect

    @property
    def commutes(self) -> bool:
        """Whether it may share leaves with other gauges."""
        return bool(self.whole.commutes)

    @property
    def dim(self) -> int:
        return int(self.whole.dim(self._tree(self._zeros())))

    def _zeros(self) -> Arrays:
        return {block.path: jnp.zeros(block.shape) for block in self.blocks}

    def _tree(self, point: Mapping[str, jax.Array]) -> Any:
        """Parameters with these leaves; all other leaves are `jax.ShapeDtypeStruct`s."""
        return with_leaves(jax.tree.unflatten(self.treedef, self.leaves), self._bound(point))

    def _bound(self, point: Mapping[str, jax.Array]) -> Arrays:
        return {block.path: point[block.path] for block in self.blocks}

    def _moved(self, e: Any, point: Mapping[str, jax.Array]) -> Arrays:
        return self._bound(leaves_by_path(self.whole.act(e, self._tree(point))))

    def identity(self) -> Any:
        return self.whole.identity(self._tree(self._zeros()))

    def inverse(self, e: Any) -> Any:  # type: ignore[override]
        return self.whole.inverse(e)

    def compose(self, a: Any, b: Any) -> Any:  # type: ignore[override]
        return self.whole.compose(a, b)

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> Any:
        return self.whole.sample(key, self._tree(leaves), scale)

    def coordinate(self, e: Any, point: Arrays) -> Any:
        return self.whole.logarithm(e)

    def where(self, condition: jax.Array, e: Any, other: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(condition, x, y), e, other)

    def act(self, e: Any, point: Arrays) -> Arrays:
        return point | self._moved(e, point)

    def push(self, e: Any, tangent: Arrays) -> Arrays:
        moved = jax.jvp(lambda x: self._moved(e, x), (self._zeros_like(tangent),), (self._bound(tangent),))[1]
        return tangent | moved

    def pull(self, e: Any, cotangent: Arrays) -> Arrays:
        _, transposed = jax.vjp(lambda x: self._moved(e, x), self._zeros_like(cotangent))
        return cotangent | transposed(self._bound(cotangent))[0]

    def _zeros_like(self, vector: Arrays) -> Arrays:
        return jax.tree.map(jnp.zeros_like, self._bound(vector))

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return (self.read_blocks or self.blocks,)

    def read(self, anchor: Anchor, point: Arrays, within: jax.Array, near: bool) -> tuple[Any, jax.Array]:
        return self.where(within, self.whole.read(self._tree(point)), self.identity()), within

    def nearest(self, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> Any:
        """The element that takes the point's reading to the target's: the nearest one, if both are of one function."""
        reading, its_own = (self.whole.read(self._tree(x)) for x in (target, point))
        return self.whole.compose(reading, self.whole.inverse(its_own))

    def balanced(self, point: Arrays) -> Any:
        return self.whole.inverse(self.whole.balance(self._tree(point)))


def _used(function: Any, shapes: Any, outputs: int | None) -> set[int]:
    """Positions of the leaves that a function computes with, without those that it only passes on."""
    from jax.extend.core import Var  # here, because it imports Pallas

    traced = jax.make_jaxpr(function)(shapes).jaxpr
    used = {x for equation in traced.eqns for x in equation.invars if isinstance(x, Var)}
    if outputs is None:
        used |= {x for x in traced.outvars if isinstance(x, Var)}
    return {number for number, x in enumerate(traced.invars) if x in used}


def _whole_leaf(path: str, shape: tuple[int, ...]) -> Block:
    free, whole = ("_",) * len(shape), (None,) * len(shape)
    return Block(path, "", " ".join(free), shape, shape, tuple(((0, n),) for n in shape), free, False, whole)
