"""Gauges that a user defines by an action and a reading (`Gauge` subclasses with their own `act` and `read`).

On a tree, such a gauge has a single part. The derivative of `act` takes tangents from θ to g·θ; its transpose takes
cotangents, such as gradients, from g·θ back to θ.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import (
    Block,
    BlockSpec,
    Matched,
    bind_leaf,
    has_dtype,
    leaves_by_path,
    with_leaves,
)
from gauge_optax.errors import binding_error
from gauge_optax.gauges.copies import Copy, Effect
from gauge_optax.linalg import real_dtype
from gauge_optax.parts.part import EXCLUSIVE, Anchor, Arrays, Size
from gauge_optax.slice import VERSION


@dataclasses.dataclass(frozen=True)
class OfUser(Size[Any]):
    """What a user's gauge is on a tree: one part, which counts as a size. It is read and removed at every step.

    Attributes:
      gauge: the gauge, a `Gauge`.
      treedef: structure of the parameters.
      leaves: shapes and dtypes of all leaves of the parameters; a leaf that is no array, such as a function, itself.
      read_from: the leaves that the gauge's `read` depends on, each as a block that is the whole leaf.
    """

    gauge: Any = None
    treedef: Any = None
    leaves: tuple[Any, ...] = ()
    read_from: tuple[Block, ...] = ()

    @property
    def along(self) -> tuple[str, ...]:
        return () if self.gauge.commutes else EXCLUSIVE

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return (self.read_from or self.blocks,)

    def tree(self, x: Mapping[str, jax.Array]) -> Any:
        """A tree of parameters with the bound leaves of `x`; all other leaves are `jax.ShapeDtypeStruct`s."""
        return with_leaves(jax.tree.unflatten(self.treedef, self.leaves), {b.path: x[b.path] for b in self.blocks})

    def zeros(self) -> Any:
        """A tree of parameters whose bound leaves are zero."""
        return self.tree({b.path: jnp.zeros(b.shape) for b in self.blocks})

    def identity(self) -> Any:
        return self.gauge.identity(self.zeros())

    def inverse(self, e: Any) -> Any:
        return self.gauge.inverse(e)

    def compose(self, a: Any, b: Any) -> Any:
        return self.gauge.compose(a, b)

    def act(self, e: Any, x: Arrays) -> Arrays:
        moved = leaves_by_path(self.gauge.act(e, self.tree(x)))
        return x | {b.path: moved[b.path] for b in self.blocks}

    def read(self, anchor: Anchor, x: Arrays, within: jax.Array, near: bool) -> tuple[Any, jax.Array]:
        read, identity = self.gauge.read(self.tree(x)), self.identity()
        return jax.tree.map(lambda a, b: jnp.where(within, a, b), read, identity), within


class ShiftOfUser(OfUser):
    """A user's gauge with `effect = "shift"`: it moves points, but does not change tangents."""


class PermutationOfUser(OfUser):
    """A user's gauge with `effect = "permutation"`: it renumbers entries."""


class IsometryOfUser(OfUser):
    """A user's gauge with `effect` "diagonal" or "orthogonal": it multiplies entries or rotates.

    Under such moves the inner product of every leaf with its gradient stays the same.
    """


_BY_EFFECT: Mapping[Effect, type[OfUser]] = {
    "shift": ShiftOfUser, "permutation": PermutationOfUser, "diagonal": IsometryOfUser, "orthogonal": IsometryOfUser,
}


@dataclasses.dataclass(frozen=True)
class UserCopy(Copy):
    """The one copy of a user's gauge on a tree."""

    parts: tuple[OfUser]

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "UserCopy":
        whole, params = options["whole"], options["params"]
        before = whole._checksum(())
        shapes = jax.tree.map(lambda x: jax.eval_shape(lambda y: y, x) if has_dtype(x) else x, params)
        leaves, treedef = jax.tree.flatten(shapes)
        by_path = leaves_by_path(shapes)
        reading, acting = (
            _used(function, shapes, count)
            for function, count in ((whole.read, None), (lambda p: whole.act(whole.identity(p), p), len(leaves)))
        )
        if whole._checksum(()) != before:  # an optimizer state knows its gauge by this checksum, which must not change
            raise binding_error(
                found.gauge, "act or read changes an attribute of the gauge", f"{whole!r:.80}",
                "functions of their arguments, with attributes that stay as they are",
                "keep what act computes in the element, or in an attribute that is no number or string")
        paths = [path for path, number in zip(by_path, range(len(leaves)), strict=True) if number in reading | acting]
        wrong = [path for path in paths if not jnp.issubdtype(by_path[path].dtype, jnp.floating)]
        if wrong or not paths:
            raise binding_error(
                found.gauge, f"not on real numbers: '{wrong[0]}'" if wrong else "no leaf",
                f"{by_path[wrong[0]].dtype}" if wrong else "an action that computes with no leaf",
                "an action and a reading of some floating-point leaves", "leave all others as they are")
        bound = {path: _whole_leaf(found.gauge, path, by_path[path].shape) for path in paths}
        anchor = tuple(bound[path] for number, path in enumerate(by_path) if number in reading)
        name = f"{found.gauge}[].{whole._checksum(bound.values())}.v{VERSION}"
        kind = _BY_EFFECT.get(whole.effect, OfUser)
        part = kind(name, (), (), tuple(bound.values()), whole, treedef, tuple(leaves), anchor)
        return cls("", (part,))

    @property
    def dim(self) -> int:
        return int(self.parts[0].gauge.dim(self.parts[0].zeros()))

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> Any:
        return self.parts[0].gauge.sample(key, self.parts[0].tree(leaves), scale)

    def coordinate(self, elements: Sequence[Any]) -> Any:
        return self.parts[0].gauge.logarithm(elements[0])


def broken_law(gauge: Any, params: Any) -> str | None:
    """The first law that a user's gauge breaks, a law of groups or of `read`, as a formula; None if it breaks none.

    Args:
      gauge: a `Gauge`.
      params: the parameters (values are read).
    """
    if not isinstance(gauge._bound(params).copies[0][0], UserCopy):
        return None  # the library's own gauges obey these laws by construction
    element = gauge.sample(jax.random.key(0), params, 0.5)
    moved = gauge.act(element, params)
    slice_point = gauge.act(gauge.inverse(gauge.read(params)), params)
    twice = gauge.act(gauge.compose(element, element), params)
    laws = {
        "act(inverse(g), act(g, θ)) = θ": (gauge.act(gauge.inverse(element), moved), params),
        "act(compose(g, g), θ) = act(g, act(g, θ))": (twice, gauge.act(element, moved)),
        "act(identity(θ), θ) = θ": (gauge.act(gauge.identity(params), params), params),
        "act(inverse(read(θ)), θ) is the same for θ and g·θ": (
            gauge.act(gauge.inverse(gauge.read(moved)), moved), slice_point),
    }
    return next((law for law, pair in laws.items() if not all(map(_near, *map(jax.tree.leaves, pair)))), None)


def _near(a: Any, b: Any) -> bool:
    """Whether two leaves differ by at most √ε of the second one's largest entry, for the ε of the first one's dtype."""
    if not has_dtype(a) or not jnp.issubdtype(jnp.result_type(a), jnp.floating):
        return True
    x, y = (jnp.asarray(leaf, real_dtype()) for leaf in (a, b))
    limit = float(jnp.finfo(jnp.result_type(a)).eps) ** 0.5 * float(jnp.max(jnp.abs(y), initial=0.0))
    return float(jnp.max(jnp.abs(x - y), initial=0.0)) <= limit


def _used(function: Any, shapes: Any, outputs: int | None) -> set[int]:
    """Positions of the leaves that a function computes with; if `outputs` is None, also of those that it returns.

    An `act` also returns leaves that it does not move, which do not count. So `outputs` is not None for an `act`.
    """
    from jax.extend.core import Var  # here, because it imports Pallas

    leaves, treedef = jax.tree.flatten(shapes)
    arrays = {number: leaf for number, leaf in enumerate(leaves) if has_dtype(leaf)}

    def of_arrays(given: Mapping[int, jax.Array]) -> list[Any]:
        tree = jax.tree.unflatten(treedef, [given.get(number, leaf) for number, leaf in enumerate(leaves)])
        return [leaf for leaf in jax.tree.leaves(function(tree)) if has_dtype(leaf)]

    traced = jax.make_jaxpr(of_arrays)(arrays).jaxpr
    used = {x for equation in traced.eqns for x in equation.invars if isinstance(x, Var)}
    if outputs is None:
        used |= {x for x in traced.outvars if isinstance(x, Var)}
    return {number for number, x in zip(arrays, traced.invars, strict=True) if x in used}


def _whole_leaf(gauge: str, path: str, shape: tuple[int, ...]) -> Block:
    return bind_leaf(gauge, BlockSpec("", path, " ".join("_" * len(shape))), path, shape, {})
