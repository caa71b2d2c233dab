"""Makes a small instance of a function: the same code called with shorter axes, or its traced operations on these.

The walk over the jaxpr (`trace`) tells which axes must have one common length. For each such set of axes, the length
becomes a small prime that no other set has. The prime factors of any length in the small instance therefore show which
length it stands for in the large one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gauge_optax.discovery.calls import template
from gauge_optax.discovery.shorten import Refused, shorter
from gauge_optax.discovery.sketch import Function, Leaves
from gauge_optax.discovery.trace import Place, Trace

LARGE = 400_000  # entries of all leaves; smaller trees are searched as they are
_TABLE = 16  # rows that a table keeps at least, so that different tokens mostly have different rows
Atoms = dict[tuple[str, int], list[int]]  # by leaf and axis: the lengths of the components that the axis is a grid of


@dataclasses.dataclass(frozen=True)
class Small:
    """A small instance.

    Attributes:
      fn: the function of these leaves.
      leaves: float64 leaves by path.
      batches: batches whose indices are within the shorter axes.
      lengths: for each set of axes that were shortened: the prime factor of its lengths in the small instance → the
        factor that replaces the prime in the large instance.

    >>> Small(lambda p, x: x, {}, [], {11: 768}).full(22)
    1536
    """

    fn: Function
    leaves: Leaves
    batches: list[Any]
    lengths: Mapping[int, int]

    def full(self, length: int) -> int:
        """The length of the large instance that a length of the small one stands for."""
        for prime, whole in self.lengths.items():
            if length % prime == 0:
                length = length // prime * whole
        return length


@dataclasses.dataclass
class _Group:
    """Components of axes (`trace.Place`) that are shortened together, in all layers.

    Attributes:
      places: leaf, axis and number of every component.
      length: length of the longest of them.
      unit: greatest common divisor of their lengths, which differ if one is a basis with two entries per rotary plane
        and another has one entry per plane.
      table: whether rows are taken from it by index, as from an embedding.
    """

    places: list[Place]
    length: int
    unit: int
    table: bool


class _Short(NamedTuple):
    """A group of axes that are shortened: the prime `unit` replaces the group's unit in every length."""

    group: _Group
    unit: int

    @property
    def length(self) -> int:
        """The length of the longest component after it is shortened."""
        return self.group.length // self.group.unit * self.unit


def smaller(fn: Function, trace: Trace, leaves: Leaves, batches: Sequence[Any]) -> Small | None:
    """An instance in which every axis is short, or None if it is not much smaller.

    Args:
      fn: (leaves, batch) to outputs.
      trace: the walk over the jaxpr of fn.
      leaves: float64 leaves by path.
      batches: what it is called on.

    Returns:
      The small instance; None for small trees, and for functions whose operations have no shorter form. Its function is
      fn, called on shorter axes; for a function that refuses these, its traced operations on them (`shorten`).

    >>> from gauge_optax.discovery.trace import walked
    >>> fn = lambda p, x: [jnp.tanh(x @ p["up"]) @ p["down"]]
    >>> tree, x = {"up": np.ones((32, 8192)), "down": np.ones((8192, 32))}, np.ones((4, 32))
    >>> small = smaller(fn, walked(fn, tree, x), tree, [x, x])
    >>> {path: leaf.shape for path, leaf in small.leaves.items()}
    {'up': (5, 11), 'down': (11, 7)}
    """
    total = sum(leaf.size for leaf in leaves.values())
    if total < LARGE:
        return None
    atoms = _atoms(trace, leaves)
    of_batches = {n for x in jax.tree.leaves(batches) for n in np.shape(x)}

    def instance(on_few: Function, small: Leaves, chosen: Sequence[_Short]) -> Small:
        """The instance with these groups shortened; raises whatever the function raises when it gets these shapes."""
        rows = min((one.unit for one in chosen if one.group.table), default=None)
        short = [jax.tree.map(lambda x: _within(x, rows), batch) for batch in batches]
        shapes, outputs = jax.eval_shape(on_few, small, short[0]), jax.eval_shape(fn, leaves, batches[0])
        if any(x.ndim != y.ndim for x, y in zip(shapes, outputs, strict=True)):
            raise ValueError("outputs of other ranks")
        return Small(on_few, small, short, {one.unit: one.group.unit for one in chosen})

    def evaluated() -> Small:
        """The instance whose function evaluates the traced operations of fn without some indices of their axes."""
        chosen: list[_Short] = []

        def dropped(walked: Trace) -> set[int]:
            own = _atoms(walked, leaves)
            groups = []
            for group in _groups(walked, own):
                counts = [len(_indices(walked, place)) for place in group.places]
                groups.append(dataclasses.replace(group, unit=math.gcd(group.unit, *counts)))
            while True:
                chosen[:] = _chosen(groups, own, of_batches)
                split = [(one.group, *_split(walked, one)) for one in chosen]
                gone = {x for _, _, rest in split for x in rest}
                # If another group drops an index that this group keeps, this group is not shortened at all. Its axis is
                # then a part of the other group's axis, and not the first part.
                clashing = [group for group, first, _ in split if not first.isdisjoint(gone)]
                if not clashing:
                    return gone
                groups = [group for group in groups if group not in clashing]

        function, small = shorter(fn, leaves, batches[0], dropped)
        return instance(function, small, chosen)

    chosen = _chosen(_groups(trace, atoms), atoms, of_batches)
    first = _cut(leaves, atoms, chosen)  # every chosen component keeps its first entries
    best = None
    try:
        best = instance(fn, first, chosen)
    except Exception:  # whatever the user's code raises about a shape
        with contextlib.suppress(Refused):
            best = evaluated()
    return best if best is not None and 2 * sum(leaf.size for leaf in best.leaves.values()) <= total else None


def _chosen(groups: Sequence[_Group], atoms: Atoms, of_batches: set[int]) -> list[_Short]:
    """The groups that can be shorter, each with a prime that no other length has.

    If one axis is longer than another, it stays longer. A vocabulary shorter than the stream would hide directions of
    the stream, and a head's basis longer than the stream would have directions that no output depends on. Axes with
    rotary planes are treated first and get the smallest primes, so that there are fewer planes than tokens. With fewer
    tokens, the scores of attention could not tell all planes apart.
    """

    def shortened(group: _Group, chosen: Sequence[_Short], stay: set[int]) -> list[_Short]:
        least = max(_TABLE, *of_batches) if group.table else 5 if group.unit < 48 else 11
        before = [one.length for one in chosen if one.group.length < group.length]
        least = max([least, *(-(-n * group.unit // group.length) for n in before)])
        used = {*of_batches, *(one.unit for one in chosen)}
        prime = next(p for p in itertools.count(least) if _is_prime(p) and p not in used and all(n % p for n in stay))
        return [*chosen, _Short(group, prime)] if group.unit > 1.5 * prime else list(chosen)

    stay = {n for lengths in atoms.values() for n in lengths}
    for _ in range(2):  # in the second round, primes may divide the lengths that the first round has shortened
        chosen = list[_Short]()
        for group in sorted(groups, key=lambda group: (group.unit == group.length, group.length)):
            chosen = shortened(group, chosen, stay)
        short = {place for one in chosen for place in one.group.places}
        stay = {n for (path, k), lengths in atoms.items() for i, n in enumerate(lengths) if (path, k, i) not in short}
    return chosen


def _split(trace: Trace, one: _Short) -> tuple[set[int], set[int]]:
    """The indices of a group that are kept, and those that are dropped."""
    first, every = set[int](), set[int]()
    for place in one.group.places:
        ids = _indices(trace, place)
        first |= set(ids[: len(ids) // one.group.unit * one.unit])
        every |= set(ids)
    return first, every - first


def _atoms(trace: Trace, leaves: Leaves) -> Atoms:
    return {(path, k): [len(ids) for ids in trace.components(path, k)] or [n]
            for path, x in leaves.items() for k, n in enumerate(x.shape)}


def _indices(trace: Trace, place: Place) -> list[int]:
    """The indices of a component of an axis, each once, in their order."""
    path, axis, number = place
    return list(dict.fromkeys(trace.components(path, axis)[number].tolist()))


def _groups(trace: Trace, atoms: Atoms) -> list[_Group]:
    """Groups of components (`trace.Place`) that share an index, together with the same components of other layers.

    Components that cannot be shorter are left out.
    """
    tables = {x for axis in trace.tables for atom in trace.atom_keys(axis) for x in atom}
    # Axes with these ids are not shortened: the function takes single entries from them, or parts of them are grids, as
    # in a fused kernel.
    fixed = trace.spaces.picked | trace.spaces.grids.keys()
    by_kind: dict[Any, list[list[Place]]] = {}
    for places in trace.families(dict.fromkeys(path for path, _ in atoms)):
        kind = frozenset((template(path), axis, number) for path, axis, number in places)
        by_kind.setdefault(kind, []).append(sorted(places))
    groups = []
    for families in by_kind.values():
        members = [place for places in families for place in places]
        ids = {x for place in members for x in _indices(trace, place)}
        lengths = [atoms[path, axis][number] for path, axis, number in members]
        if (unit := math.gcd(*lengths)) > 1 and fixed.isdisjoint(ids):
            groups.append(_Group(members, max(lengths), unit, not tables.isdisjoint(ids)))
    return groups


def _cut(leaves: Leaves, atoms: Atoms, chosen: Sequence[_Short]) -> Leaves:
    """The leaves, with each chosen component, a factor of the length of an axis, cut to its first entries.

    How many entries it keeps is in `chosen`.
    """
    kept = {place: (one.group.unit, one.unit) for one in chosen for place in one.group.places}
    out = {}
    for path, leaf in leaves.items():
        shape: list[int] = []
        grid = leaf.reshape([n for axis in range(leaf.ndim) for n in atoms[path, axis]])
        cuts = []
        for axis in range(leaf.ndim):
            sizes = []
            for number, n in enumerate(atoms[path, axis]):
                unit, short = kept.get((path, axis, number), (1, 1))
                sizes.append(n // unit * short)
            cuts += [slice(n) for n in sizes]
            shape.append(math.prod(sizes))
        out[path] = np.ascontiguousarray(grid[tuple(cuts)]).reshape(shape)
    return out


def _within(x: Any, rows: int | None) -> Any:
    """An array of a batch. Integers are reduced modulo `rows`, because they may be indices of shortened tables."""
    if rows is None or not np.issubdtype(getattr(x, "dtype", object), np.integer):
        return x
    return np.where(np.asarray(x) >= rows, np.asarray(x) % rows, x)


def _is_prime(number: int) -> bool:
    return all(number % k for k in range(2, math.isqrt(number) + 1))
