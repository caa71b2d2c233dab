"""Gauges that share no leaf have nothing to do with each other: a product splits into components, done in turn.

One component after the other keeps the temporaries of one alive, not of all: XLA schedules independent work side by
side, and at twelve layers that held 4.5 copies of the parameters at once. So each waits for a number of the one before.

Here: the split, how a product's state is dealt out to components and collected again, the wait. Not here: any maths.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block
from gauge_optax.gauges._basis import grouped
from gauge_optax.gauges._frame import FrameState
from gauge_optax.gauges._head import HeadInstance
from gauge_optax.gauges._linear import LinearInstance
from gauge_optax.gauges._scale import ScaleInstance
from gauge_optax.gauges._shift import ShiftInstance
from gauge_optax.gauges._split import Bound

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Component:
    """The instances of a product that are connected through leaves they share.

    Attributes:
      bound: these instances as a product of their own.
      scales: their indices among the product's scale instances.
      heads: per group of rotation instances, the product's group and the positions in it.
    """

    bound: Bound
    scales: tuple[int, ...]
    heads: tuple[tuple[int, tuple[int, ...]], ...]

    @functools.cached_property
    def names(self) -> Mapping[str, str]:
        """Leaf path → its name in `form`."""
        return {path: str(k) for k, path in enumerate(self.bound.offset)}

    @functools.cached_property
    def form(self) -> Bound:
        """The component with its leaves numbered and its instances nameless: equal for layers of one kind.

        A function compiled for it is traced once, however many layers there are.
        """
        return _interned(_renamed(self.bound, self.names))

    def numbered(self, leaves: Mapping[str, T]) -> dict[str, T]:
        """Those of `leaves` that are this component's, by their names in `form`."""
        return {name: leaves[path] for path, name in self.names.items() if path in leaves}

    def by_path(self, leaves: Mapping[str, T]) -> dict[str, T]:
        """The inverse of `numbered`."""
        return {path: leaves[name] for path, name in self.names.items() if name in leaves}

    def of_scales(self, whole: Sequence[T]) -> tuple[T, ...]:
        """This component's part of something per scale instance."""
        return tuple(whole[k] for k in self.scales)

    def of_heads(self, whole: Sequence[Any]) -> tuple[Any, ...]:
        """This component's part of something per group: pytrees whose arrays have a leading instance axis, or none."""
        return tuple(jax.tree.map(_those(at), whole[group]) for group, at in self.heads)

    def of_frame(self, frame: FrameState) -> FrameState:
        """This component's part of a frame."""
        return FrameState(*(self.of_scales(field) for field in frame))


def _those(at: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jnp.stack([x[n] for n in at]) if jnp.ndim(x) else x


@functools.lru_cache(maxsize=256)
def _interned(bound: Bound) -> Bound:
    """The first of all equal ones, with what it has cached."""
    return bound


def _renamed(bound: Bound, names: Mapping[str, str]) -> Bound:
    def renamed(block: Block) -> Block:
        return dataclasses.replace(block, path=names[block.path])

    def scale(i: ScaleInstance) -> ScaleInstance:
        up, down = (tuple(renamed(b) for b in side) for side in (i.up, i.down))
        return dataclasses.replace(i, key="", up=up, down=down)

    def shift(i: ShiftInstance) -> ShiftInstance:
        return dataclasses.replace(i, key="", blocks=tuple(renamed(b) for b in i.blocks))

    def head(i: HeadInstance) -> HeadInstance:
        own = tuple(dataclasses.replace(b, block=renamed(b.block)) for b in i.blocks)
        return dataclasses.replace(i, key="", blocks=own)

    heads = tuple(tuple(map(head, gauge)) for gauge in bound.heads)
    linear = tuple(LinearInstance(head(i.left), head(i.right)) for i in bound.linear)
    return Bound(tuple(map(scale, bound.scales)), tuple(map(shift, bound.shifts)), heads, linear)


def components(bound: Bound) -> tuple[Component, ...]:
    """The components of a product, in the order of their first instances.

    Args:
      bound: the product on a tree.

    Returns:
      Components that touch disjoint leaves; together they hold every instance.
    """
    members: list[tuple[str, int, int, tuple[str, ...]]] = [
        *(("scale", 0, k, i.paths) for k, i in enumerate(bound.scales)),
        *(("shift", 0, k, tuple(b.path for b in i.blocks)) for k, i in enumerate(bound.shifts)),
        *(("head", g, k, h.paths) for g, heads in enumerate(bound.heads) for k, h in enumerate(heads)),
        *(("linear", 0, k, i.paths) for k, i in enumerate(bound.linear)),
    ]
    places = {id(h): (g, n) for g, group in enumerate(grouped(bound.heads)) for n, h in enumerate(group)}
    return tuple(_component(bound, [members[m] for m in own], places) for own in _connected([m[3] for m in members]))


def _connected(paths: Sequence[tuple[str, ...]]) -> list[list[int]]:
    """Indices grouped so that members of different groups have no path in common."""
    groups: list[tuple[list[int], set[str]]] = []
    for index, own in enumerate(paths):
        touching = [g for g in groups if g[1] & set(own)]
        groups = [g for g in groups if not g[1] & set(own)]
        groups.append((sorted(sum((g[0] for g in touching), [index])), set(own).union(*(g[1] for g in touching))))
    return sorted(g[0] for g in groups)


def _component(
    bound: Bound, members: Sequence[tuple[str, int, int, Any]], places: dict[int, tuple[int, int]]
) -> Component:
    def chosen(kind: str, gauge: int = 0) -> tuple[int, ...]:
        return tuple(k for name, g, k, _ in members if name == kind and g == gauge)

    scales = chosen("scale")
    own = Bound(
        tuple(bound.scales[k] for k in scales),
        tuple(bound.shifts[k] for k in chosen("shift")),
        tuple(tuple(heads[k] for k in at) for g, heads in enumerate(bound.heads) if (at := chosen("head", g))),
        tuple(bound.linear[k] for k in chosen("linear")),
    )
    heads = tuple((places[id(g[0])][0], tuple(places[id(h)][1] for h in g)) for g in grouped(own.heads))
    return Component(own, scales, heads)


def collect_scales(parts: Sequence[Component], found: Sequence[Sequence[T]]) -> tuple[T, ...]:
    """What every component has per scale instance, in the product's order."""
    placed = {k: x for part, own in zip(parts, found, strict=True) for k, x in zip(part.scales, own, strict=True)}
    return tuple(placed[k] for k in sorted(placed))


def collect_frame(parts: Sequence[Component], found: Sequence[FrameState]) -> FrameState:
    """The frame of the product from its components' frames."""
    return FrameState(*(collect_scales(parts, [f[k] for f in found]) for k in range(len(FrameState._fields))))


def collect_heads(parts: Sequence[Component], found: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """What every component has per group, in the product's order; arrays are joined along the instance axis."""
    placed: dict[int, dict[int, Any]] = {}
    for part, own in zip(parts, found, strict=True):
        for (group, at), tree in zip(part.heads, own, strict=True):
            for n, position in enumerate(at):
                placed.setdefault(group, {})[position] = jax.tree.map(_picked(n), tree)
    return tuple(
        jax.tree.map(lambda *xs: jnp.stack(xs) if jnp.ndim(xs[0]) else xs[0], *(own[n] for n in sorted(own)))
        for _, own in sorted(placed.items())
    )


def _picked(n: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x[n] if jnp.ndim(x) else x
