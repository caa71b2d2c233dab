"""A gauge known by its action and its reading alone: how one that is defined elsewhere enters the slice.

Here: one reading and one motion, made of `act`, `read`, `identity`, `inverse` and `compose`; tangents and cotangents
move by the derivative of the action and its transpose. Not here: gauges that say more of themselves (`BoundGauge`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from gauge_optax.binding import Block, binding_error, leaves_by_path, with_leaves
from gauge_optax.gauges.reading import Anchor, Anchored, Arrays, Motion


class Acting(Protocol):
    """What is asked of the gauge."""

    @property
    def name(self) -> str:
        """For messages."""

    def act(self, element: Any, params: Any) -> Any:
        """g·θ, affine in θ."""

    def read(self, params: Any) -> Any:
        """read(g·θ) = g·read(θ)."""

    def identity(self, params: Any) -> Any:
        """The element that moves nothing; of shapes alone."""

    def inverse(self, element: Any) -> Any:
        """g⁻¹."""

    def compose(self, a: Any, b: Any) -> Any:
        """First b, then a."""

    def balance(self, params: Any) -> Any:
        """The element that leads to the least-norm representative."""


@dataclasses.dataclass(frozen=True)
class ActionReading(Anchored):
    """The whole of such a gauge on a tree, read anew at every step. The optimizer inside never leaves its slice.

    Attributes:
      whole: the gauge.
      treedef: of the parameters.
      leaves: their shapes and dtypes.
      blocks: the leaves that the gauge computes with.
    """

    grows: ClassVar[bool] = False
    whole: Acting
    treedef: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    blocks: tuple[Block, ...]

    @property
    def gauge(self) -> str:
        return self.whole.name

    @property
    def key(self) -> str:
        return ""

    @property
    def named(self) -> tuple[str, ...]:
        return ()

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def moved(self) -> tuple[Block, ...]:
        return self.blocks

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return (self.blocks,)

    def tree(self, values: Mapping[str, jax.Array]) -> Any:
        """Parameters with these leaves; of the others, shapes alone."""
        return with_leaves(jax.tree.unflatten(self.treedef, self.leaves), self.own(values))

    def own(self, values: Mapping[str, jax.Array]) -> Arrays:
        """The leaves that the gauge computes with."""
        return {b.path: values[b.path] for b in self.blocks}

    def acted(self, element: Any, values: Mapping[str, jax.Array]) -> Arrays:
        """Those leaves after the move."""
        return self.own(leaves_by_path(self.whole.act(element, self.tree(values))))

    def read(self, anchor: Anchor, values: Arrays, within: jax.Array, near: bool) -> tuple[Any, jax.Array]:
        del anchor, near
        return self.where(within, self.whole.read(self.tree(values)), self.identity()), within

    def identity(self) -> Any:
        return self.whole.identity(self.tree({b.path: jnp.zeros(b.shape) for b in self.blocks}))

    def divide(self, element: Any, values: Arrays) -> Arrays:
        return self.acted(self.whole.inverse(element), values)

    def inverse(self, element: Any) -> Any:
        return self.whole.inverse(element)

    def dual(self, element: Any) -> Any:
        return element  # the identity, as nothing has grown

    def composed(self, last: Any, first: Any) -> Any:
        return self.whole.compose(first, last)

    def balanced(self, values: Arrays) -> Any:
        return self.whole.inverse(self.whole.balance(self.tree(values)))

    def where(self, condition: jax.Array, element: Any, other: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(condition, x, y), element, other)


def action_reading(gauge: Acting, params: Any) -> ActionReading:
    """The reading of a gauge on a tree.

    Args:
      gauge: the gauge.
      params: the parameters, of which the shapes are read.

    Raises:
      ValueError: a gauge that computes with no leaf, or with one that is not of real numbers.
    """
    shapes = jax.eval_shape(lambda tree: tree, params)
    leaves, treedef = jax.tree.flatten(shapes)
    traced = jax.make_jaxpr(lambda p: (gauge.read(p), gauge.act(gauge.identity(p), p)))(shapes).jaxpr
    read = len(traced.outvars) - len(leaves)
    used = {x for equation in traced.eqns for x in equation.invars if isinstance(x, Var)} | set(traced.outvars[:read])
    paths = [path for path, x in zip(leaves_by_path(shapes), traced.invars, strict=True) if x in used]
    by_path = leaves_by_path(shapes)
    wrong = [path for path in paths if not jnp.issubdtype(by_path[path].dtype, jnp.floating)]
    if wrong or not paths:
        raise binding_error(
            gauge.name, f"not on real numbers: '{wrong[0]}'" if wrong else "no leaf",
            f"{by_path[wrong[0]].dtype}" if wrong else "an action that computes with no leaf",
            "an action and a reading of some floating-point leaves", "leave all others as they are",
        )  # fmt: skip
    return ActionReading(gauge, treedef, tuple(leaves), tuple(_whole_leaf(p, by_path[p].shape) for p in paths))


def _whole_leaf(path: str, shape: tuple[int, ...]) -> Block:
    free, whole = ("_",) * len(shape), (None,) * len(shape)
    return Block(path, "", " ".join(free), shape, shape, tuple(((0, n),) for n in shape), free, False, whole)


def action_motion(reading: ActionReading, element: Any, inverse: Any) -> Motion:
    """The frame of such a gauge, ready to be applied."""

    def undo(values: Arrays) -> Arrays:
        return values | reading.acted(inverse, values)

    def moved(values: Arrays) -> Arrays:
        return reading.acted(element, values)

    def push(tangent: Arrays) -> Arrays:
        own = reading.own(tangent)
        return tangent | jax.jvp(moved, (jax.tree.map(jnp.zeros_like, own),), (own,))[1]

    def pull(cotangent: Arrays) -> Arrays:
        own = reading.own(cotangent)
        return cotangent | jax.vjp(moved, jax.tree.map(jnp.zeros_like, own))[1](own)[0]

    return Motion(undo, push, pull)
