"""Census of a large model: counts dead directions inside blocks of its entries, and bounds the number of all.

The null space of a Jacobian with a million columns is too large to compute. Its dimension cannot be estimated either:
trained and random decoders have thousands of *flat* directions, along which outputs hardly change, and no random sketch
tells these from dead ones. What can be counted exactly are the dead directions *inside a block*, a set of a few
thousand entries, while all other entries stay constant. A block shows a symmetry if it contains all entries that the
symmetry moves. A *space* is a set of indices that axes of several leaves share, such as hidden units, entries of heads
or channels of the stream (`discovery.trace` finds them). Two kinds of block suffice for most symmetries:

* some indices of one space, in every leaf that has the space;
* all small leaves (biases, scales) of a layer.

Only one of several layers that are alike is counted, drawn at random. A dead direction of a block is explained if it is
in the span of the orbits. `_Span` projects onto this span without a basis of it, which would be too large.

An upper bound for the number of all dead directions needs no block. Draw a random z of length 1. Any number of Lanczos
steps on JᵀJ from z gives a Gauss–Radau quadrature rule. Its weight at zero is at least the squared length of z's
projection onto the null space of J (Golub and Meurant 2010, §6.2). The mean of this weight over z, times the number of
parameters, is the bound.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse.linalg import LinearOperator, gmres
from tqdm import tqdm

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.discovery.calls import template
from gauge_optax.discovery.sketch import TRIALS, Trial, over_rows, untrue, with_constants
from gauge_optax.discovery.trace import Trace, walked
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Gauge, product
from gauge_optax.linalg import singular_vectors
from gauge_optax.xla import jit_unfused, quick_options

Leaves = Mapping[str, np.ndarray]
Function = Callable[[Any, Any], Sequence[jax.Array]]

_BYTES = 2**28  # of gradients in memory at once
_ERRORS = 100.0  # computed dead directions are off by up to this, times roundoff / smallest nonzero singular value
_INSIDE = 1e-6  # relative distance from the span of the orbits up to which a direction lies in it
_ROUNDS, _SOLVED = 60, 1e-11  # most iterations of GMRES, which projects onto the span, and its relative residual
_EXHAUSTED = 1e-9  # below this share of the largest diagonal entry Lanczos ends, and singular values count as zero
# Singular values below `_ROUNDOFF`, relative to the largest, are roundoff. There is a gap between two adjacent singular
# values if their ratio is at least `_GAP`.
_ROUNDOFF, _GAP = 1e-16, 1e3
_MOST = 8  # unexplained directions of a block are counted up to this number: 8 stands for 8 or more
_SPARE = 64  # rows beyond the number of a block's entries, so that random combinations keep the rank
_FOR_NORMS = 24  # random rows from which the sizes of the Jacobian's columns are estimated


class EntrySet(NamedTuple):
    """A block: a set of entries. Dead directions that change these entries alone are counted.

    Attributes:
      name: a text that says which entries these are, for the table.
      entries: leaf path → flat indices of its entries, ascending.

    >>> EntrySet("biases", {"b": np.arange(3)}).size
    3
    """

    name: str
    entries: Mapping[str, np.ndarray]

    @property
    def size(self) -> int:
        """The number of entries."""
        return sum(map(len, self.entries.values()))


class BlockCount(NamedTuple):
    """One row of the table of a census by blocks.

    Attributes:
      name: the block's name.
      size: the number of its entries.
      dead: directions inside the block along which no output changes.
      unreached: entries of the block that no output depends on; they count as dead.
      unexplained: dead directions of the reached entries, outside the span of the orbits; 8 stands for 8 or more.
      gap: the largest singular value that was counted as zero, and the smallest that was not. Both are divided by the
        largest of all.
    """

    name: str
    size: int
    dead: int
    unreached: int
    unexplained: int
    gap: tuple[float, float]


# Which blocks ---------------------------------------------------------------------------------------------


def blocks_of(
    trace: Trace, leaves: Leaves, most: int, rng: np.random.Generator
) -> tuple[list[EntrySet], list[str]]:
    """Returns one block per space, with up to three of its indices, and one per layer, with its small leaves.

    Args:
      trace: the result of `walked` on the function.
      leaves: arrays by path.
      most: the largest number of entries of a block.
      rng: draws the indices, and one of several layers that are alike.

    Returns:
      The blocks, and a text for each space without a block, because one index of it has more than `most` entries even
      in single layers. If several blocks differ in the layer alone, one is returned. If three indices of a space have
      more than `most` entries, its block has fewer indices, and there are also blocks of the space within single
      layers.

    >>> from gauge_optax.discovery.trace import walked
    >>> leaves = {"up": np.ones((2, 3)), "down": np.ones((3, 4))}
    >>> trace = walked(lambda p, x: [jax.nn.relu(x @ p["up"]) @ p["down"]], leaves, np.ones((5, 2)))
    >>> [block.name for block in blocks_of(trace, leaves, 100, np.random.default_rng(0))[0]][:2]
    ['2 of 2 along an axis of up', '3 of 3 along an axis of down, up']
    """
    by_kind: dict[Any, list[EntrySet]] = {}
    large: list[str] = []
    for axes in _spaces(trace, leaves):
        sizes: list[int] = []
        for places in (axes, *_by_layer(axes)):
            ids = np.unique(np.concatenate([ids for of_leaf in places.values() for _, ids in of_leaf]))
            picked = rng.permutation(ids)
            for count in (3, 2, 1):
                entries = _selected(places, leaves, picked[:count])
                sizes.append(sum(map(len, entries.values())))
                if 0 < sizes[-1] <= most:
                    break
            else:
                continue  # even one index has too many entries here; in single layers, which come next, it has fewer
            kind = tuple(sorted({(template(path), axis) for path, of_leaf in places.items() for axis, _ in of_leaf}))
            names = sorted({template(path) for path in places})
            label = f"{min(count, len(ids))} of {len(ids)} along an axis of {', '.join(names)}"
            by_kind.setdefault(kind, []).append(EntrySet(label, entries))
            if places is axes and count == 3:
                break
        if (least := min(sizes)) > most:
            held = ", ".join(sorted({template(path) for path in axes}))
            large.append(f"an axis of {held}, which has {least:,} entries at one index: pass block={least}")
    small = {path: x for path, x in leaves.items() if x.size <= most // 6}
    for layer in _by_layer(small):
        entries, names = {}, []
        for path in sorted(layer, key=lambda path: leaves[path].size):
            if sum(map(len, entries.values())) + leaves[path].size <= most:
                entries[path] = np.arange(leaves[path].size)
                names.append(template(path))
        names = sorted(names)
        by_kind.setdefault(("small", *names), []).append(EntrySet(f"all of {', '.join(names)}", entries))
    return [blocks[int(rng.integers(len(blocks)))] for blocks in by_kind.values()], large


Axes = dict[str, list[tuple[int, np.ndarray]]]
"""Leaf path → (axis, ids) for each of its axes that have one space. `ids` says for every index of the axis which index
of the space it is."""


def _spaces(trace: Trace, leaves: Leaves) -> list[Axes]:
    """The axes of all leaves, grouped by space: two axes that share an id belong to one space."""
    gathered = []
    for places in trace.families(leaves):
        axes: Axes = {}
        for path, axis, number in places:
            components, length = trace.components(path, axis), leaves[path].shape[axis]
            grid = np.unravel_index(np.arange(length), [len(ids) for ids in components])
            axes.setdefault(path, []).append((axis, components[number][grid[number]]))
        gathered.append(axes)
    return gathered


def _by_layer(places: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Splits a mapping into one per layer: leaf paths with equal numbers, as `0/up` and `0/down`, stay together."""
    layers: dict[tuple[str, ...], dict[str, Any]] = {}
    for path, value in places.items():
        numbers = tuple(part for part in path.split("/") if part.isdigit())
        layers.setdefault(numbers, {})[path] = value
    yield from layers.values()


def _selected(places: Axes, leaves: Leaves, picked: np.ndarray) -> dict[str, np.ndarray]:
    """Leaf path → flat indices of the entries that have one of the picked ids along one of the axes in `places`."""
    entries = {}
    for path, of_leaf in places.items():
        mask = np.zeros(leaves[path].shape, bool)
        for axis, ids in of_leaf:
            mask |= np.isin(ids, picked).reshape([-1 if k == axis else 1 for k in range(mask.ndim)])
        if mask.any():
            entries[path] = np.flatnonzero(mask)
    return entries


def _least(places: Axes, leaves: Leaves) -> int:
    """The number of entries, in all leaves, at one index of a space: the first index on the axes in `places`."""
    first = min(int(ids.min()) for of_leaf in places.values() for _, ids in of_leaf)
    return sum(map(len, _selected(places, leaves, np.array([first])).values()))


# Counting in blocks ---------------------------------------------------------------------------------------


def dead_in_blocks(
    fn: Function, leaves: Leaves, point: Any, batches: Sequence[Any], gauges: Sequence[Gauge], cutoff: float, most: int,
    rng: np.random.Generator, progress: bool, deadline: float,
) -> tuple[list[BlockCount], np.ndarray, list[str], list[str]]:
    """Counts the dead directions in blocks of entries, until the deadline.

    Args:
      fn: (leaves, batch) to a list of outputs.
      leaves: float64 leaves by path.
      point: the same leaves as the user's tree.
      batches: what fn is called on.
      gauges: those that should explain the directions.
      cutoff: share of the largest singular value below which a singular value may count as zero, as in `rank_of`.
      most: the largest number of entries of a block.
      rng: draws blocks and directions.
      progress: True shows a bar.
      deadline: the value of `time.monotonic()` after which no further block is counted.

    Returns:
      One count per block; an orthonormal basis per block of the directions that no gauge explains, all in one array
      (directions, parameters); the names of blocks that were not counted; and the leaves that were held constant,
      because their gradients are not derivatives of the outputs.

    Raises:
      ValueError: not one index of an axis fits in a block; too few outputs.
    """
    trace = walked(fn, leaves, batches[0])
    blocks, skipped = blocks_of(trace, leaves, most, rng)
    if not blocks:
        least = min((_least(places, leaves) for axes in _spaces(trace, leaves) for places in (axes, *_by_layer(axes))),
                    default=1)
        raise binding_error(
            "census", f"no block of {most:,} entries", f"{least:,} entries at one index of an axis, in all leaves that "
            "have it", "at least one index of some axis in a block", f"pass block={least}")
    needed = max(block.size for block in blocks) + _SPARE
    outputs = sum(x.size for batch in batches for x in jax.eval_shape(fn, leaves, batch))
    if outputs < needed:
        raise too_few(outputs, f"{needed:,} entries of a block")
    span, rest = _Span(gauges, point, leaves), [np.zeros((0, sum(x.size for x in leaves.values())))]
    counts, trials = list[BlockCount](), list[Trial]()
    found = rows_of(fn, leaves, batches, blocks, needed, rng, progress, deadline, trials)
    if held := untrue(jax.jit(fn, compiler_options=quick_options()), trials, rng.spawn(1)[0]):
        found = rows_of(with_constants(fn, held), leaves, batches, blocks, needed, rng, progress, deadline)
    for block, rows in zip(blocks, found, strict=True):
        if len(rows) < block.size + _SPARE or (counts and time.monotonic() > deadline):
            skipped.append(f"{block.name}: the time ended")
            continue
        dead, reached, gap = _null_space(rows, cutoff)
        rest.append(_unexplained_in(block, dead, reached, gap[1], span, leaves, rng))
        unreached = block.size - len(reached)
        counts.append(BlockCount(block.name, block.size, len(dead) + unreached, unreached, len(rest[-1]), gap))
    return counts, np.concatenate(rest), skipped, held


def too_few(outputs: int, than: str) -> ValueError:
    """The error for too few output numbers: `outputs` is their number, and `than` a text on how many are needed.

    >>> print(str(too_few(5, "7 parameters")).splitlines()[0])
    census: too few outputs
    """
    return binding_error(
        "census", "too few outputs", f"{outputs:,} output number{'s' * (outputs != 1)} for {than}",
        "more output numbers than that", "pass more batches, or larger ones"
    )


def rows_of(
    fn: Function, leaves: Leaves, batches: Sequence[Any], blocks: Sequence[EntrySet], count: int,
    rng: np.random.Generator, progress: bool, deadline: float = math.inf, trials: list[Trial] | None = None,
) -> list[np.ndarray]:
    """Returns for every block at least `count` random combinations of the Jacobian's rows, (combinations, entries).

    They are fewer if `time.monotonic()` passes the deadline before all are computed. A few whole rows are appended to
    `trials`, if it is given.

    >>> fn, leaves = lambda p, x: [x * p["a"]], {"a": np.ones(4)}
    >>> block = EntrySet("", {"a": np.arange(2)})
    >>> rows_of(fn, leaves, [np.ones(4)], [block], 3, np.random.default_rng(0), False)[0].shape
    (3, 2)
    """
    sizes = [sum(x.size for x in jax.eval_shape(fn, leaves, batch)) for batch in batches]

    pulled = pulled_back(fn)
    # Each batch gives a number of rows in proportion to its outputs, so that many small batches give a few each.
    wanted = [-(-count * size // sum(sizes)) for size in sizes]
    chunk = min(max(wanted), max(1, _BYTES // (8 * sum(x.size for x in leaves.values()))))
    parts: list[list[np.ndarray]] = [[] for _ in blocks]
    with tqdm(total=count, desc="census", unit="row", disable=not progress, leave=False) as bar:
        for batch, size, left in zip(batches, sizes, wanted, strict=True):
            shapes = jax.eval_shape(fn, leaves, batch)
            while left > 0 and time.monotonic() < deadline:
                weights = [rng.standard_normal((chunk, *x.shape)) / size**0.5 for x in shapes]
                gradients = pulled(dict(leaves), batch, weights)
                add_trials(trials, leaves, batch, weights, gradients)
                flat = {path: np.asarray(x).reshape(chunk, -1) for path, x in gradients.items()}
                for block, rows in zip(blocks, parts, strict=True):
                    rows.append(np.concatenate([flat[path][:, at] for path, at in block.entries.items()], 1))
                left -= chunk
                bar.update(chunk)
    return [np.concatenate([np.zeros((0, block.size)), *rows]) for block, rows in zip(blocks, parts, strict=True)]


def pulled_back(fn: Function) -> Callable[[Any, Any, Any], Any]:
    """A compiled function of leaves, a batch and weights, (rows, *shape) per output: rows of gradients by path.

    >>> pulled_back(lambda p, x: [x * p["a"]])({"a": np.ones(2)}, np.full(2, 3.0), [np.ones((4, 2))])["a"].shape
    (4, 2)
    """

    def pulled(leaves: Any, batch: Any, weights: Any) -> Any:
        _, pull = jax.vjp(lambda p: list(fn(p, batch)), leaves)
        return over_rows(lambda w: pull(w)[0], weights)

    return jit_unfused(pulled)


def add_trials(trials: list[Trial] | None, leaves: Leaves, batch: Any, weights: Sequence[Any], gradients: Any) -> None:
    """Appends rows of gradients to a list of trials, until it has as many as `untrue` takes.

    >>> trials = []
    >>> add_trials(trials, {"a": np.ones(2)}, None, [np.ones((9, 2))], {"a": np.ones((9, 2))})
    >>> len(trials)
    4
    """
    if trials is not None:
        for k in range(min(TRIALS - len(trials), len(weights[0]))):
            gradient = {path: np.asarray(x[k]) for path, x in gradients.items()}
            trials.append(Trial(leaves, batch, [w[k] for w in weights], gradient))


def _null_space(rows: np.ndarray, cutoff: float) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """Finds the dead directions of a block among its *reached* entries, those that some output depends on.

    Args:
      rows: random combinations of the Jacobian's rows, (combinations, entries).
      cutoff: as in `rank_of`. An entry is not reached if its column's norm is below this share of the largest norm.

    Returns:
      An orthonormal basis (directions, reached entries), the indices of the reached entries in the block, and the gap
      as in `BlockCount`.

    >>> dead, reached, gap = _null_space(np.array([[1.0, -1.0, 0.0], [2.0, -2.0, 0.0], [3.0, -3.0, 0.0]]), 1e-10)
    >>> dead.round(3), reached
    (array([[-0.707, -0.707]]), array([0, 1]))
    """
    norms = np.linalg.norm(rows, axis=0)
    reached = np.flatnonzero(norms > cutoff * norms.max(initial=0.0))
    if not len(reached):
        return np.zeros((0, 0)), reached, (0.0, 1.0)
    # Columns are scaled to equal norms. This makes the singular values of flat directions larger, and the gap wider.
    sizes, right = singular_vectors(rows[:, reached] / norms[reached])
    rank = rank_of(sizes, cutoff)
    dead = np.linalg.qr((right[rank:] / norms[reached]).T)[0].T
    gap = float(sizes[rank] / sizes[0]) if rank < len(sizes) else 0.0, float(sizes[rank - 1] / sizes[0])
    return dead, reached, gap


def rank_of(sizes: np.ndarray, cutoff: float) -> int:
    """The number of singular values that are not zero, up to roundoff.

    Args:
      sizes: singular values, descending.
      cutoff: values above this share of the largest are not zero. If the values on its two sides differ by the factor
        `_GAP` or more, all values below it are zero; otherwise only those below the widest gap under it are.

    >>> rank_of(np.array([1.0, 1e-9, 1e-11, 1e-16]), 1e-10), rank_of(np.array([1.0, 1e-3, 1e-15, 1e-16]), 1e-10)
    (3, 2)
    """
    rank = int((sizes > cutoff * sizes[0]).sum())
    known = np.maximum(sizes, _ROUNDOFF * sizes[0])
    gaps = known[rank - 1 : -1] / known[rank:] if rank else np.zeros(0)
    return rank if not len(gaps) or gaps[0] >= _GAP else rank + int(np.argmax(gaps))


def inaccuracy(least: float) -> float:
    """How far a computed dead direction may lie from the space of true ones.

    Roundoff adds a multiple of each flat direction to a computed dead one. The factor is roundoff divided by the flat
    direction's singular value (Wedin, 1972).

    Args:
      least: the smallest singular value that does not count as zero, relative to the largest.

    Returns:
      A distance between unit vectors, at least 1e-6 and at most 0.1.

    >>> inaccuracy(1e-3), inaccuracy(1e-11) > 1e-3, inaccuracy(1e-15)
    (1e-06, True, 0.1)
    """
    return float(np.clip(_ERRORS * np.finfo(float).eps / max(least, np.finfo(float).tiny), _INSIDE, 0.1))


def _spread(block: EntrySet, reached: np.ndarray, direction: np.ndarray, leaves: Leaves) -> np.ndarray:
    """Extends a direction on a block's reached entries by zeros to a flat array of all parameters.

    >>> leaves = {"a": np.zeros(2), "b": np.zeros(2)}
    >>> _spread(EntrySet("", {"b": np.array([1])}), np.array([0]), np.ones(1), leaves)
    array([0., 0., 0., 1.])
    """
    inside = np.zeros(block.size)
    inside[reached] = direction
    out = {path: np.zeros(leaf.size) for path, leaf in leaves.items()}
    cuts = np.cumsum([len(at) for at in block.entries.values()])[:-1]
    for (path, at), part in zip(block.entries.items(), np.split(inside, cuts), strict=True):
        out[path][at] = part
    return np.concatenate(list(out.values()))


def parted(flat: Any, leaves: Leaves) -> dict[str, Any]:
    """Splits a flat array of all parameters into the leaves: path → array of the leaf's shape.

    >>> parted(np.arange(3), {"a": np.zeros(()), "b": np.zeros((2, 1))})
    {'a': array(0), 'b': array([[1],
           [2]])}
    """
    starts = itertools.accumulate((x.size for x in leaves.values()), initial=0)
    return {path: flat[start : start + x.size].reshape(x.shape)
            for (path, x), start in zip(leaves.items(), starts, strict=False)}


class _Span:
    """The span of all directions along the orbits of gauges at a point. No basis of it is formed.

    For a list that can be bound, `horizontal` is a projection that removes exactly the directions along the orbits.
    Some lists cannot be bound, because their gauges share leaves in a circle (the first with the second, the second
    with the third, the third with the first). Such a list is divided into lists that can be bound, and T is the product
    of their projections. The part of x in the span is the v in the span for which T keeps x − v as it is:
    (I − T)·v = (I − T)·x. Iterations that start from (I − T)·x and stay in the span find it.

    Args:
      gauges: a list, also one that cannot be bound as a whole.
      params: the point, a tree.
      leaves: its float64 leaves by path.

    >>> leaves = {"up": np.ones((1, 2)), "down": np.ones((2, 1))}
    >>> span = _Span([go.rescale({"up": "_ channel"}, {"down": "channel _"})], leaves, leaves)
    >>> np.allclose(span.outside(np.array([1.0, 0.0, -1.0, 0.0])), 0.0)
    True
    """

    def __init__(self, gauges: Sequence[Gauge], params: Any, leaves: Leaves) -> None:
        smallest = sorted(gauges, key=lambda g: g.dim(params))
        few = (list(apart) for count in range(3) for apart in itertools.combinations(smallest, count))
        for apart in itertools.chain(few, [smallest]):
            together = [gauge for gauge in gauges if not any(gauge is other for other in apart)]
            try:
                if together:
                    product(together)._bound(params)
                break
            except ValueError:
                continue
        self._leaves = leaves
        self._across = [self._horizontal(g, params) for g in ([product(together)] if together else []) + apart]

    def _horizontal(self, gauge: Gauge, params: Any) -> Callable[[np.ndarray], np.ndarray]:

        @jax.jit
        def across(leaves: Any, flat: jax.Array) -> jax.Array:
            tangent = with_leaves(params, parted(flat, self._leaves))
            kept = leaves_by_path(gauge.horizontal(with_leaves(params, leaves), tangent))
            return jnp.concatenate([kept[path].ravel() for path in self._leaves])

        return lambda flat: np.asarray(across(dict(self._leaves), flat))

    def _moved(self, direction: np.ndarray) -> np.ndarray:
        """(I − T) times a direction. The result is in the span."""
        kept = direction
        for across in self._across:
            kept = across(kept)
        return direction - kept

    def outside(self, direction: np.ndarray) -> np.ndarray:
        """A direction less its part in the span. This map is linear, and takes exactly the span to zero."""
        size = len(direction)
        moved = LinearOperator((size, size), matvec=self._moved, dtype=np.float64)
        most = _SOLVED * float(np.linalg.norm(direction))
        # The steps of GMRES are sums of (I − T)ᵏ times a direction in the span, so that they stay in the span.
        inside, _ = gmres(moved, self._moved(direction), rtol=0.0, atol=most, restart=_ROUNDS, maxiter=1)
        return np.asarray(direction - inside)


def _unexplained_in(
    block: EntrySet, dead: np.ndarray, reached: np.ndarray, least: float, span: _Span, leaves: Leaves,
    rng: np.random.Generator,
) -> np.ndarray:
    """Removes from the dead directions of a block their parts in the span of the orbits.

    Args:
      block: the block.
      dead: a basis of its dead directions, (directions, reached entries).
      reached: the numbers of the reached entries in the block.
      least: the smallest singular value of the block that does not count as zero, relative to the largest.
      span: the span of the orbits.
      leaves: float64 leaves by path.
      rng: draws combinations of the dead directions.

    Returns:
      An orthonormal basis of what remains, (at most `_MOST`, parameters).

    >>> leaves, block = {"a": np.ones(2)}, EntrySet("", {"a": np.arange(2)})
    >>> dead = np.array([[0.0, 1.0]])
    >>> span, rng = _Span([], leaves, leaves), np.random.default_rng(0)
    >>> _unexplained_in(block, dead, np.arange(2), 1.0, span, leaves, rng).shape
    (1, 2)
    """
    rest = np.zeros((0, sum(x.size for x in leaves.values())))
    # If one random combination of the dead directions adds nothing to the basis, no other one would.
    for _ in range(min(_MOST, len(dead))):
        direction = _spread(block, reached, rng.standard_normal(len(dead)) @ dead, leaves)
        new = span.outside(direction)
        new = new - rest.T @ (rest @ new)
        if np.linalg.norm(new) <= inaccuracy(least) * np.linalg.norm(direction):
            break
        rest = np.concatenate([rest, new[None] / np.linalg.norm(new)])
    return rest


# A bound for all ------------------------------------------------------------------------------------------


def upper_bound(
    fn: Function, leaves: Leaves, batches: Sequence[Any], probes: int, steps: int, rng: np.random.Generator,
    progress: bool,
) -> tuple[float, float]:
    """An upper bound for the number of dead directions, and its standard error over probes.

    Args:
      fn: (leaves, batch) to a list of outputs.
      leaves: float64 leaves by path.
      batches: what fn is called on.
      probes: the number of random directions z, at least two.
      steps: Lanczos steps per direction; more of them lower the bound.
      rng: draws the directions.
      progress: True shows a bar.

    Returns:
      The bound, which is a mean over the random directions, and its standard error.

    Raises:
      ImportError: `matfree` is not installed.
    """
    try:
        from matfree import decomp  # an extra, which only this bound needs
    except ImportError:
        raise ImportError(
            "census: an upper bound needs matfree, which is not installed\n"
            '  remedy:   pip install "gauge_optax[measure]", or pass probes=0'
        ) from None
    total = sum(x.size for x in leaves.values())
    steps = min(steps, total)

    def gram(tangent: Any, leaves: Any, scales: Any, batches: Any) -> Any:
        """D·JᵀJ·D·tangent, where D is the diagonal matrix of `scales`."""
        scaled, out = jax.tree.map(jnp.multiply, scales, tangent), []
        for batch in batches:
            _, push = jax.linearize(lambda p, batch=batch: list(fn(p, batch)), leaves)
            out += jax.linear_transpose(push, scaled)(push(scaled))
        return jax.tree.map(lambda scale, *x: scale * sum(x), scales, *out)

    decompose = decomp.tridiag_sym(steps, materialize=False, custom_vjp=False)
    lanczos = jax.jit(lambda *x: decompose(gram, *x).J_small)
    # D scales the columns of J to about equal norms. The null space of J·D has the same dimension as that of J, and
    # flat directions become less flat.
    whole = EntrySet("", {path: np.arange(x.size) for path, x in leaves.items()})
    norms = np.sqrt(np.mean(np.square(rows_of(fn, leaves, batches, [whole], _FOR_NORMS, rng, False)[0]), 0))
    inverse = np.where(norms > 0, 1.0 / np.where(norms > 0, norms, 1.0), 1.0)
    scales, shares = parted(inverse, leaves), list[float]()
    for _ in tqdm(range(probes), desc="census: upper bound", disable=not progress, leave=False):
        probe = {path: rng.standard_normal(x.shape) for path, x in leaves.items()}
        small = lanczos(probe, dict(leaves), scales, list(batches))
        shares.append(_weight_of_zero(*(np.asarray(x) for x in small)))
    return total * float(np.mean(shares)), total * float(np.std(shares, ddof=1)) / probes**0.5


def _weight_of_zero(diagonal: np.ndarray, beside: np.ndarray) -> float:
    """The weight of a Gauss–Radau rule at zero, from Lanczos' tridiagonal matrix.

    It is the least ‖z − JᵀJ·x‖² over x in the span of all Lanczos vectors but the last, for the starting vector z. The
    recurrence of orthonormal polynomials gives the same number, but its roundoff grows from step to step. After as many
    steps as JᵀJ has distinct eigenvalues the number could have any size, and would be no upper bound.

    Args:
      diagonal: the diagonal of the matrix, (steps,).
      beside: its off-diagonal, (steps − 1,).
    """
    least = _EXHAUSTED * np.nanmax(np.abs(diagonal))
    # What follows a small off-diagonal entry is roundoff, or NaN.
    kept = next((j for j, across in enumerate(beside) if not across > least), len(beside))
    whole = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    left, sizes, _ = np.linalg.svd(whole[: kept + 1, :kept])
    return float(np.sum(np.square(left[0, np.sum(sizes > least) :])))
