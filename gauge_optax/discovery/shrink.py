"""A small instance of a function: the same code, called with shorter axes wherever it allows that.

The walk over the jaxpr tells which axes have one length. Their common length becomes a small prime, another for every
set of axes, so that a length of the small instance says which lengths of the large one it stands for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gauge_optax.discovery.calls import template
from gauge_optax.discovery.sketch import Function, Leaves
from gauge_optax.discovery.trace import Trace

LARGE = 400_000  # entries of all leaves; smaller trees are searched as they are
_TABLE = 16  # rows that a table keeps at least, so that tokens stay different
Atoms = dict[tuple[str, int], list[int]]  # by leaf and axis: the lengths of the components that the axis is a grid of


@dataclasses.dataclass(frozen=True)
class Small:
    """A small instance.

    Attributes:
      leaves: float64 leaves by path.
      batches: batches whose indices are within the shorter axes.
      lengths: prime of the small instance → length of the large one, per set of axes that were shortened.
    """

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
    """Components of axes that have one common length, of all layers: leaf, axis and number of each.

    Attributes:
      places: leaf, axis and number of every component.
      unit: the common divisor of their lengths; the basis of rotary planes is twice as long as the planes are many.
      table: whether rows are taken from it by index, as from an embedding.
    """

    places: list[tuple[str, int, int]]
    unit: int
    table: bool


class _Short(NamedTuple):
    """A set of axes that is short: its unit becomes a prime, or a small multiple of one."""

    group: _Group
    prime: int
    times: int = 1

    @property
    def unit(self) -> int:
        return self.prime * self.times


def smaller(fn: Function, trace: Trace, leaves: Leaves, batches: Sequence[Any]) -> Small | None:
    """An instance with every axis short that the function lets be short, or None where it is not much smaller.

    Args:
      fn: (leaves, batch) to outputs.
      trace: its walk.
      leaves: float64 leaves by path.
      batches: what it is called on.

    Returns:
      The small instance; None for small trees, and for functions that fix the lengths of their axes.
    """
    total = sum(leaf.size for leaf in leaves.values())
    if total < LARGE:
        return None
    outputs = jax.eval_shape(fn, leaves, batches[0])
    atoms = {(path, k): _lengths(trace, path, k, n) for path, x in leaves.items() for k, n in enumerate(x.shape)}
    groups = sorted(_groups(trace, atoms), key=lambda group: group.unit)
    of_batches = {n for x in jax.tree.leaves(batches) for n in np.shape(x)}
    longest = max(of_batches, default=1)
    taken = of_batches | {n for lengths in atoms.values() for n in lengths}

    def shortened(group: _Group, chosen: Sequence[_Short]) -> list[_Short]:
        """What is chosen, with a prime for this group that no other length has; the same where it is short already.

        It stays longer than what it is longer than: a vocabulary shorter than the stream hides directions of the
        stream, and a basis of heads longer than the stream has directions that nothing reads.
        """
        least = max(_TABLE, longest) if group.table else 5 if group.unit < 48 else 11
        least = max([least, *(one.unit for one in chosen if one.group.unit < group.unit)])
        used = {one.prime for one in chosen}
        prime = next(p for p in itertools.count(least) if _is_prime(p) and p not in used and all(n % p for n in taken))
        return [*chosen, _Short(group, prime)] if group.unit > 1.5 * prime else list(chosen)

    def paired(group: _Group, other: _Group, chosen: Sequence[_Short]) -> list[_Short]:
        """What is chosen, with two groups that the function lets be short only in one ratio; the same where it cannot.

        The function says that they are tied where it reshapes the values of a head as those of a query, without one
        index that both have. An even length stays even, for the planes of a rotary embedding.
        """
        ratio, rest = divmod(group.unit, other.unit)
        if rest or any(one.group in (group, other) for one in chosen):
            return list(chosen)
        places = {*group.places, *other.places, *(place for one in chosen for place in one.group.places)}
        components = (((path, k, i), n) for (path, k), lengths in atoms.items() for i, n in enumerate(lengths))
        left = of_batches | {n for place, n in components if place not in places}
        used = {one.prime for one in chosen}
        prime = next(p for p in itertools.count(3) if _is_prime(p) and p not in used and all(n % p for n in left))
        even = 2 - other.unit % 2
        longer = [*chosen, _Short(other, prime, even), _Short(group, prime, even * ratio)]
        return longer if other.unit > 1.5 * even * prime else list(chosen)

    def instance(chosen: Sequence[_Short]) -> Small | None:
        """The instance with these groups shortened; None where the function refuses it."""
        small = _cut(leaves, atoms, chosen)
        rows = min((one.unit for one in chosen if one.group.table), default=None)
        short = [jax.tree.map(lambda x: _within(x, rows), batch) for batch in batches]
        try:
            shapes = jax.eval_shape(fn, small, short[0])
        except Exception:  # whatever the user's code raises about a shape
            return None
        same = jax.tree.map(lambda x, y: x.ndim == y.ndim, shapes, outputs)
        lengths = {one.prime: one.group.unit // one.times for one in chosen}
        return Small(small, short, lengths) if all(jax.tree.leaves(same)) else None

    chosen: list[_Short] = []
    for group in groups:
        chosen = shortened(group, chosen)
    best = instance(chosen) if chosen else None
    if best is None:  # some lengths are written in the function: one set of axes after the other, longest first
        accepted: list[_Short] = []
        for group in reversed(groups):
            longer = shortened(group, accepted)
            if len(longer) > len(accepted) and (attempt := instance(longer)):
                accepted, best = longer, attempt
        singles = [one.group for one in accepted]
        for two in itertools.permutations(reversed(groups), 2):
            longer = paired(*two, accepted)
            if len(longer) > len(accepted) and (attempt := instance(longer)):
                accepted, best = longer, attempt
        # Primes of single groups once more, now in the order of their lengths.
        ordered = accepted[len(singles) :]
        for group in groups:
            ordered = shortened(group, ordered) if group in singles else ordered
        if len(ordered) == len(accepted) and (attempt := instance(ordered)):
            best = attempt
    if best is None or 2 * sum(leaf.size for leaf in best.leaves.values()) > total:
        return None
    return best


def _lengths(trace: Trace, path: str, axis: int, length: int) -> list[int]:
    ids = trace.leaves[path][axis]
    return [length] if ids is None else [len(atom) for atom in trace.spaces.atoms(ids)]


def _groups(trace: Trace, atoms: Atoms) -> list[_Group]:
    """Components that share an index, and those of other layers in their places, without those that must stay."""
    of_id: dict[int, int] = {}
    families: dict[int, set[tuple[str, int, int]]] = {}
    fixed: set[int] = set()
    tables = {x for axis in trace.tables for atom in trace.atom_keys(axis) for x in atom}
    rows: set[int] = set()
    for path, axis in atoms:
        ids = trace.leaves[path][axis]
        for number, atom in enumerate([] if ids is None else trace.spaces.atoms(ids)):
            key = set(trace.spaces.key(atom))
            joined = {of_id[x] for x in key if x in of_id}
            name = min(joined, default=min(key))
            places = families.setdefault(name, set())
            for other in joined - {name}:
                places |= families.pop(other)
                of_id.update({x: name for x, family in of_id.items() if family == other})
            fixed.update([name] if joined & fixed else [])
            rows.update([name] if joined & rows or not tables.isdisjoint(key) else [])
            places.add((path, axis, number))
            of_id.update(dict.fromkeys(key, name))
            # Single entries are taken from it, or parts of it are grids of their own, as in a fused kernel.
            if not trace.spaces.picked.isdisjoint(key) or not trace.spaces.grids.keys().isdisjoint(key):
                fixed.add(name)
    by_places: dict[Any, list[int]] = {}
    for name, places in families.items():
        kind = frozenset((template(path), axis, number) for path, axis, number in places)
        by_places.setdefault(kind, []).append(name)
    groups = []
    for names in by_places.values():
        members = [place for name in names for place in sorted(families[name])]
        unit = math.gcd(*(atoms[path, axis][number] for path, axis, number in members))
        if unit > 1 and fixed.isdisjoint(names):
            groups.append(_Group(members, unit, not rows.isdisjoint(names)))
    return groups


def _cut(leaves: Leaves, atoms: Atoms, chosen: Sequence[_Short]) -> Leaves:
    """The leaves, of which every chosen component keeps its first entries."""
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
    """Indices within so many rows."""
    if rows is None or not np.issubdtype(getattr(x, "dtype", object), np.integer):
        return x
    return np.where(np.asarray(x) >= rows, np.asarray(x) % rows, x)


def _is_prime(number: int) -> bool:
    return all(number % k for k in range(2, math.isqrt(number) + 1))
