"""Moves of weights by a given element, and how they change the tangents and cotangents in an optimizer's state."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.errors import binding_error
from gauge_optax.gauges.by_action import UserCopy
from gauge_optax.gauges.copies import Copy, Effect
from gauge_optax.gauges.gauge import Element, Gauge, Product
from gauge_optax.gauges.rope_linear import ComplexScale
from gauge_optax.linalg import real_dtype
from gauge_optax.parts.constants import ReadShift
from gauge_optax.parts.part import Arrays, Part
from gauge_optax.parts.stream import Stream

Tree = TypeVar("Tree")


class MovingPart(NamedTuple):
    """What one gauge of a list does in a move.

    Attributes:
      gauge: the gauge.
      element: the element of this gauge that acts.
      effect: how the element changes vectors: "diagonal" scales entries, for example; see `gauges.copies.Effect`.
    """

    gauge: Gauge
    element: Element
    effect: Effect


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """A move of weights by one element per gauge of a list. It may hold tracers: use it in the trace that made it.

    Attributes:
      parts: one per gauge, in the order of the optimizer's list.
      params: a tree with the leaves of θ; only their shapes are used.
      on_unknown: what to do with moments that cannot move: "error", "reset" or "keep", as in `transport`.
    """

    same_list: ClassVar[str] = (
        "give transport the optimizer's own list of gauges, identity elements for what does not move, and give "
        "go.orbit.gauge_fix the same list as the optimizer inside it"
    )  # the advice of an error: a frame in the state was made with another list of gauges

    parts: tuple[MovingPart, ...]
    params: Any
    on_unknown: str

    @property
    def group(self) -> Product:
        """The product of all gauges."""
        return Product(tuple(part.gauge for part in self.parts))

    @property
    def element(self) -> Element:
        """The element of `group`."""
        return tuple(part.element for part in self.parts)

    @functools.cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Leaf path → shape, for every leaf of θ."""
        return {path: jnp.shape(leaf) for path, leaf in leaves_by_path(self.params).items()}

    @property
    def on_vectors(self) -> tuple[MovingPart, ...]:
        """The gauges and elements that move vectors: those of `parts`, unless a subclass says otherwise."""
        return self.parts

    def with_effect(self, *effects: Effect) -> "Move":
        """Returns a move by those gauges of `on_vectors` alone that have one of these effects."""
        chosen = tuple(moving for moving in self.on_vectors if moving.effect in effects)
        return Move(chosen, self.params, self.on_unknown)

    def binders(self, *effects: Effect) -> dict[str, str]:
        """Returns leaf path → name of the first gauge with one of these effects that binds it."""
        names: dict[str, str] = {}
        for part in self.with_effect(*effects).parts:
            for path in part.gauge._bound(self.params).slice.added:
                names.setdefault(path, part.gauge.name)
        return names

    @functools.cached_property
    def moved(self) -> Mapping[str, str]:
        """Leaf path → name of the first gauge that moves it."""
        return self.binders("shift", "diagonal", "permutation", "orthogonal", "linear")

    def refuse(self, what: str, gauge: str, content: str, remedy: str = "") -> ValueError:
        """Returns the error for a piece of a state that the move cannot carry.

        Args:
          what: the piece, such as "ScaleByAdamState.nu of 'up'".
          gauge: the name of the gauge under which it has no rule.
          content: what the piece contains, in words.
          remedy: what to do instead; by default, the choices of `on_unknown` and `quotient`.
        """
        return binding_error(
            "transport", f"no rule for {what} under {gauge}", content,
            "averages of gradients, or squares of their entries under a gauge that scales entries",
            remedy or "write on_unknown='reset' to start that leaf's moments afresh or 'keep' to leave them as they "
            f"are, train with go.quotient(tx, gauges), whose state moves exactly, or give {gauge} its identity element",
        )

    def averages(self, leaves: Arrays, outgoing: Collection[str], power: int = 1) -> Arrays:
        """Moves running averages of a power of every entry, such as Adam's first (1) and second (2) moments.

        A power above 1 is moved only by gauges that scale or renumber entries; all other gauges leave it.

        Args:
          leaves: path → average.
          outgoing: paths of leaves whose averages are of updates (tangents). All others are of gradients (cotangents).
          power: the power that is averaged.
        """
        tangents = {path: x for path, x in leaves.items() if path in outgoing}
        cotangents = {path: x for path, x in leaves.items() if path not in outgoing}
        mixing: tuple[Effect, ...] = ("orthogonal", "linear") if power == 1 else ()
        # The diagonal move is repeated `power` times, which raises its factors to the power. Entries then change places
        # once.
        for move in (*[self.with_effect("diagonal", *mixing)] * power, self.with_effect("permutation")):
            if move.parts:
                tangents = move_tangent(move.group, move.element, self.params, tangents) if tangents else {}
                cotangents = move_cotangent(move.group, move.element, self.params, cotangents) if cotangents else {}
        return tangents | cotangents


def moving_part(gauge: Gauge, element: Element, params: Any) -> MovingPart:
    """Returns the `MovingPart` of one gauge. Its effect is "still" if `element` is the identity and not traced."""
    leaves = jax.tree.leaves(element)
    traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    still = not traced and all(map(np.array_equal, leaves, jax.tree.leaves(gauge.identity(params))))
    (copies,) = gauge._bound(params).copies
    if not still and any(depends_on_scales(p) for copy in copies for p in copy.parts):
        raise binding_error(
            "transport", f"no rule for {gauge.name} through norms with scales", "a move that depends on the scales",
            "an identity element for it, or norms without scales",
            "move the other gauges, and give this one its identity element",
        )
    effects = {effect_of(copy, x) for copy, x in zip(copies, gauge._split(copies, element), strict=True)}
    effect = effects.pop() if len(effects) == 1 else gauge.effect
    return MovingPart(gauge, element, "still" if still else effect)


@functools.singledispatch
def effect_of(copy: Copy, element: Any) -> Effect:
    """The effect of one element of a copy (the gauge in one layer, for example).

    It may be simpler than the effect of the gauge: a complex number mixes two coordinates ("linear"), but a complex
    number of angle zero only scales them ("diagonal").
    """
    return copy.effect


@effect_of.register
def _of_modulus_and_angle(copy: ComplexScale, element: jax.Array) -> Effect:
    turns = isinstance(element, jax.core.Tracer) or np.any(np.asarray(element)[..., 1])
    return "linear" if turns else "diagonal"


@effect_of.register
def _of_user(copy: UserCopy, element: Any) -> Effect:
    effect: Effect = copy.parts[0].gauge.effect
    return effect


@functools.singledispatch
def depends_on_scales(part: Part[Any]) -> bool:
    """Whether the move of a tangent depends on the values of norms' scales. A `Move` knows shapes only, no values."""
    return False


@depends_on_scales.register(ReadShift)
@depends_on_scales.register(Stream)
def _through_norms(part: Any) -> bool:
    return bool(part.passes)


def move_tangent(group: Product, element: Element, params: Any, tangent: Tree) -> Tree:
    """Moves a tangent from θ to g·θ.

    Args:
      group: the gauges.
      element: g.
      params: a tree with the leaves of θ; only their shapes are used.
      tangent: a tree with the same paths, or some of them. Missing leaves count as zero.

    Returns:
      The tangent, every leaf in its dtype.
    """
    return _moved(group, element, params, tangent, dual=False)


def move_cotangent(group: Product, element: Element, params: Any, cotangent: Tree) -> Tree:
    """Moves a cotangent from θ to g·θ, by the inverse transpose of `move_tangent`, with the same arguments."""
    return _moved(group, element, params, cotangent, dual=True)


def _moved(group: Product, element: Element, params: Any, tree: Tree, dual: bool) -> Tree:
    b, leaves, shapes = group._bound(params), leaves_by_path(tree), leaves_by_path(params)
    s, elements = b.slice, b.elements(element)
    # Parts need all their leaves, so that leaves missing in `tree` are filled with zeros. `at`, the point at which the
    # derivative of the move is taken, may be zero too: the moves that `moving_part` admits do not depend on its values.
    at = {path: jnp.zeros(jnp.shape(shapes[path]), real_dtype()) for path in s.added}
    vectors = {path: jnp.asarray(leaves.get(path, x), real_dtype()) for path, x in at.items()}
    for part in (*reversed(s.parts), *s.free):
        e = elements[part.label]
        vectors = part.pull(part.inverse(e), vectors, at) if dual else part.push(e, vectors, at)
    own = {path: x for path, x in vectors.items() if path in leaves}
    return with_leaves(tree, {path: x.astype(jnp.result_type(leaves[path])) for path, x in own.items()})
