"""Draws generic points in weight space, and takes gradients of random projections of the outputs there.

A direction leaves a function unchanged to first order if and only if it is orthogonal to every such gradient. The
points are generic because zeros, ones and equal leaves of an initialization make symmetries that training breaks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gauge_optax.xla import jit_unfused, quick_options

Leaves = dict[str, np.ndarray]
Function = Callable[[Mapping[str, Any], Any], Any]
DRAWS = 5  # at most so many times the needed number of points are drawn, because at some the outputs are not finite
_SPREAD = 0.5  # noise around the given point, relative to a leaf's RMS
# A leaf with only positive entries, whose RMS is below `_TINY`, is scaled up to the RMS `_RAISED`.
_TINY, _RAISED = 1e-2, 0.1
_CHUNK = 2**29  # bytes of gradients that are in memory at a time
# The step of a finite difference, relative to a leaf's RMS. A step of 1e-5 crosses kinks of wide ReLU nets, so that the
# difference is off by 1e-2.
_STEP = 1e-7
_UNTRUE = 1e-3  # a gradient and a finite difference disagree if they differ by more than this share of their sum
TRIALS, _AGREED = 4, 2  # a gradient is compared at most `TRIALS` times; it is true if `_AGREED` comparisons agree
_ROUNDED = 1e-12  # what roundoff adds to a finite difference, relative to the outputs
_MASK = 5e3  # numbers from this size on may be those of a mask, such as -1e9 and -65504 before a softmax
_GAP = 100.0  # numbers from `_MASK` on are a mask's if they are at least so many times as large as all smaller numbers


def masked(x: np.ndarray) -> np.ndarray:
    """Finds entries that a mask wrote, such as -1e9 before a softmax, by their size, which is far above all others.

    In a norm over all entries, they would hide the size of the other entries.

    >>> masked(np.array([0.5, -1e9, 2.0])).tolist(), masked(np.array([1e6, 2e6])).tolist()
    ([False, True, False], [False, False])
    """
    sizes = np.abs(x)
    large = sizes >= _MASK
    apart = large.any() and not large.all() and sizes[large].min() >= _GAP * sizes[~large].max()
    return large if apart else np.zeros(x.shape, bool)


def root_mean_square(leaf: np.ndarray) -> float:
    """The root mean square of the entries that are not a mask's (`masked`); 0 if there are none."""
    own = leaf[~masked(leaf)]
    return float(np.sqrt(np.mean(np.square(own)))) if own.size else 0.0


def generic_point(
    leaves: Mapping[str, np.ndarray], rng: np.random.Generator, signed: Collection[str] = ()
) -> Leaves:
    """A point near the given one without zeros, ones or repeats.

    Args:
      leaves: float64 arrays by path.
      rng: source of the noise.
      signed: leaves whose entries get random signs, even if all are positive.

    Returns:
      Leaves plus normal noise of half their RMS. A leaf with small values gets more noise, so that a kernel's outputs
      are about as large as its inputs. Otherwise the function would hardly depend on a layer with initial values of
      0.02. Leaves with only positive entries (norms' scales, variances) are multiplied by the noise's exponential, and
      stay positive. If they are tiny, as a LayerScale of 1e-6, they are also scaled up to 0.1. Otherwise the outputs
      would hardly depend on the layer that they multiply.

    >>> point = generic_point({"scale": np.ones(3), "bias": np.zeros(3)}, np.random.default_rng(0))
    >>> bool((point["scale"] > 0).all()), bool(point["bias"].any())
    (True, True)
    """

    def moved(path: str, leaf: np.ndarray) -> np.ndarray:
        noise = _SPREAD * rng.standard_normal(leaf.shape)
        if path in signed:
            leaf = leaf * rng.choice((-1.0, 1.0), leaf.shape)
        elif not leaf.size or (leaf > 0).all():
            return leaf * np.exp(noise) * (_RAISED / rms if 0 < (rms := root_mean_square(leaf)) < _TINY else 1.0)
        rms = root_mean_square(leaf)
        width = leaf.size ** (1 / leaf.ndim) if leaf.ndim > 1 else 4.0
        return leaf + max(rms, 2.0 * width**-0.5) * noise

    return {path: moved(path, leaf) for path, leaf in leaves.items()}


def positive_kernels(fn: Function, leaves: Leaves, batch: Any, rng: np.random.Generator) -> frozenset[str]:
    """Leaves of two axes or more with only positive entries, whose entries may change sign: outputs stay finite.

    Kernels may begin as ones, for instance. With positive kernels and positive data no ReLU would ever switch off, and
    the function would look linear. Stacked variances, of which the function takes a root, are not returned.

    >>> leaves = {"kernel": np.ones((2, 2)), "variance": np.ones((2, 2)), "scale": np.ones(2)}
    >>> fn = lambda p, x: [x @ p["kernel"] * p["scale"] / jnp.sqrt(p["variance"])]
    >>> sorted(positive_kernels(fn, leaves, np.ones(2), np.random.default_rng(0)))
    ['kernel']
    """

    def finite(signed: Collection[str]) -> bool:
        return all(np.isfinite(x).all() for x in jax.tree.leaves(fn(generic_point(leaves, rng, signed), batch)))

    tried = frozenset(path for path, x in leaves.items() if x.ndim > 1 and x.size and (x > 0).all())
    if not tried or finite(tried):
        return tried
    return frozenset(path for path in sorted(tried) if finite({path}))


def finite_points(
    fn: Function, batches: Sequence[Any], points: Iterable[Leaves], count: int
) -> list[Leaves]:
    """The first `count` points at which the outputs are finite; if there are fewer, the last point fills the list.

    Outputs are not finite where, for example, a norm without eps reads a layer whose units are all dead.

    >>> points = [{"a": np.zeros(())}, {"a": np.ones(())}]
    >>> finite_points(lambda p, x: x / p["a"], [jnp.ones(2)], points, 1)
    [{'a': array(1.)}]
    """
    found, last = list[Leaves](), dict[str, np.ndarray]()
    for last in points:
        if all(np.isfinite(x).all() for batch in batches for x in jax.tree.leaves(fn(last, batch))):
            found.append(last)
        if len(found) == count:
            break
    return found + [last] * (count - len(found))


def over_rows(fn: Callable[[Any], Any], rows: Any) -> Any:
    """`jax.vmap(fn)(rows)`; one row after the other if an operation in `fn` has no batching rule.

    >>> over_rows(lambda x: 2.0 * x, jnp.ones(3)).tolist()
    [2.0, 2.0, 2.0]
    """
    try:
        return jax.vmap(fn)(rows)
    except NotImplementedError:
        return jax.lax.map(fn, rows)


def squared_gradients(
    fn: Function, batches: Sequence[Any], point: Mapping[str, Any], rng: np.random.Generator, paths: Sequence[str]
) -> Leaves:
    """Sums over batches the squared gradient of one random projection of the outputs, for a large tree.

    A gradient of all leaves at once would need the memory of another tree in float64. So leaves are differentiated a
    few at a time, and the squares are returned in float32. Operations run one by one (without `jit`), so that all
    layers share the compiled operations: a program of many unrolled layers would compile for longer than it runs.

    Args:
      fn: (leaves, batch) to a tree of outputs.
      batches: what it is called on.
      point: float64 leaves by path.
      rng: source of the projections.
      paths: the leaves whose gradients are asked for.

    Returns:
      Arrays of the leaves' shapes by path; a leaf's gradient that is not finite counts as zero.

    >>> fn, point = lambda p, x: [x * p["a"]], {"a": np.ones(2), "b": np.ones(2)}
    >>> squares = squared_gradients(fn, [np.ones(2)], point, np.random.default_rng(0), ["a", "b"])
    >>> {path: bool(x.all()) for path, x in squares.items()}
    {'a': True, 'b': False}
    """
    groups, held = [list[str]()], 0
    for path in paths:
        size = 8 * point[path].size
        if groups[-1] and held + size > _CHUNK:
            groups, held = [*groups, []], 0
        groups[-1].append(path)
        held += size
    sums = {path: np.zeros(point[path].shape, np.float32) for path in paths}
    for batch in batches:
        outputs = jax.eval_shape(fn, point, batch)
        projection = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), outputs)
        for group in groups:
            others = {path: leaf for path, leaf in point.items() if path not in group}

            def of_some(some: Mapping[str, Any], others: Any = others, batch: Any = batch) -> Any:
                return fn({**others, **some}, batch)

            (gradient,) = jax.vjp(of_some, {path: point[path] for path in group})[1](projection)
            for path in group:
                of_leaf = np.asarray(gradient.pop(path))
                if np.isfinite(of_leaf).all():
                    sums[path] += np.square(of_leaf, dtype=np.float32)
    return sums


class Trial(NamedTuple):
    """What `untrue` tests: the gradient, by path, of a weighted sum of a batch's outputs at a point.

    >>> Trial({"a": np.ones(2)}, np.ones(2), [np.ones(2)], {"a": np.ones(2)}).weights
    [array([1., 1.])]
    """

    point: Mapping[str, np.ndarray]
    batch: Any
    weights: Any
    gradient: Mapping[str, np.ndarray]


def untrue(call: Function, trials: Iterable[Trial], rng: np.random.Generator) -> list[str]:
    """The leaves whose gradients are not derivatives of the outputs, by finite differences along random directions.

    Causes are a `stop_gradient`, a straight-through estimator, or the compiler, which makes some gradients wrong
    (`unfused_options`).

    Args:
      call: the function, compiled.
      trials: the gradients to test. A leaf is returned if its finite difference agrees with the gradient in fewer than
        two trials. If only one trial is given, a single agreement is enough.
      rng: source of the directions.

    >>> point = {"a": np.ones(2), "b": np.ones(2)}
    >>> told = Trial(point, np.ones(2), [np.ones(2)], {"a": np.ones(2), "b": np.zeros(2)})
    >>> untrue(lambda p, x: [x * p["a"] + x * p["b"]], [told] * 4, np.random.default_rng(0))
    ['b']
    """
    agreed, count = dict[str, int](), 0
    for point, batch, weights, gradient in trials:
        agreed, count = agreed or dict.fromkeys(sorted(point), 0), count + 1
        weighted = list(zip(jax.tree.leaves(weights), jax.tree.leaves(call(point, batch)), strict=True))
        scale = sum(float(np.abs(c * np.asarray(y)).sum()) for c, y in weighted)

        def along(path: str, step: np.ndarray, point: Any = point, batch: Any = batch, weights: Any = weights) -> float:
            ends = (call({**point, path: point[path] + d}, batch) for d in (step, -step))
            arrays = zip(jax.tree.leaves(weights), *map(jax.tree.leaves, ends), strict=True)
            return sum(float(np.vdot(c, np.asarray(after) - np.asarray(before))) for c, after, before in arrays)

        for path in [path for path, times in agreed.items() if times < _AGREED]:
            step = _STEP * root_mean_square(point[path]) * rng.standard_normal(point[path].shape)
            measured, told = along(path, step), 2.0 * float(np.vdot(gradient[path], step))
            # If a number is not finite, the comparison is false, and counts as an agreement.
            differ = abs(measured - told) > _UNTRUE * (abs(measured) + abs(told)) + _ROUNDED * scale
            agreed[path] += not differ
        if min(agreed.values(), default=_AGREED) >= _AGREED:
            break
    return [path for path, times in agreed.items() if times < min(_AGREED, count)]


def with_constants(fn: Function, paths: Collection[str]) -> Function:
    """The function with some leaves among its outputs, so that every change of these leaves is a change of outputs.

    >>> with_constants(lambda p, x: [x * p["a"]], ["b"])({"a": 2.0, "b": 3.0}, 5.0)
    [10.0, 3.0]
    """
    return lambda leaves, batch: [*fn(leaves, batch), *(leaves[path] for path in paths)]


class Gradients:
    """Gradients of random projections of the outputs, in chunks. It compiles one program per shape of batches.

    If a gradient is not finite, it is computed again by a program without fusion (`unfused_options`). This program then
    computes all later gradients too.

    Args:
      fn: (leaves, batch) to a tree of outputs.
      batches: what it is called on.

    >>> gradients = Gradients(lambda p, x: [x * p["a"]], [np.ones(2), np.ones(2)])
    >>> [chunk["a"].shape for chunk in gradients.at({"a": np.ones(2)}, 6, np.random.default_rng(0))]
    [(6, 2)]
    """

    def __init__(self, fn: Function, batches: Sequence[Any]) -> None:
        def pull(leaves: Mapping[str, jax.Array], batch: Any, projections: Any) -> Any:
            _, backward = jax.vjp(lambda p: fn(p, batch), leaves)
            return over_rows(lambda projection: backward(projection)[0], projections)

        self._fn, self._batches = fn, batches
        self._pull: Callable[..., Any] = jax.jit(pull, compiler_options=quick_options())
        self._unfused = jit_unfused(pull)

    def compute_unfused(self) -> None:
        """From now on programs are compiled without fusion, which makes some gradients wrong (`unfused_options`)."""
        self._pull = self._unfused

    def _pulled(self, leaves: Mapping[str, Any], batch: Any, projections: Any) -> Leaves:
        """The gradients of a batch's outputs along projections, which are arrays (rows, *shape of an output)."""
        found = {path: np.asarray(x) for path, x in self._pull(leaves, batch, projections).items()}
        if self._pull is self._unfused or all(np.isfinite(x).all() for x in found.values()):
            return found
        self.compute_unfused()
        return self._pulled(leaves, batch, projections)

    def outputs(self, leaves: Leaves) -> int:
        """The number of output entries of a batch. At a point, no more gradients per batch can be independent."""
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(self._fn, leaves, self._batches[0])))

    def untrue(self, call: Function, points: Sequence[Leaves], count: int, rng: np.random.Generator) -> list[str]:
        """The leaves whose gradients are not derivatives of the first batch's outputs: `untrue`.

        Args:
          call: the function, compiled.
          points: where gradients and finite differences are compared.
          count: as in `at`. With equal counts, the program that `at` compiles is used here too.
          rng: source of projections and steps.

        >>> fn = lambda p, x: [x * p["a"] + jax.lax.stop_gradient(x * p["b"] - x * p["a"])]
        >>> points, rng = [{"a": np.ones(2), "b": np.ones(2)}] * 2, np.random.default_rng(0)
        >>> with jax.enable_x64(True):
        ...     Gradients(fn, [np.ones(2)]).untrue(fn, points, 2, rng)
        ['a', 'b']
        """
        batch = self._batches[0]

        def trial(point: Leaves) -> Trial:
            outputs = [np.asarray(y) for y in jax.tree.leaves(call(point, batch))]
            weights = [np.where(masked(y), 0.0, rng.standard_normal(y.shape)).astype(y.dtype) for y in outputs]
            rows = min(self._most(point), -(-count // len(self._batches)))
            given = jax.tree.unflatten(
                jax.tree.structure(jax.eval_shape(self._fn, point, batch)),
                [np.broadcast_to(c, (rows, *c.shape)) for c in weights])
            gradient = self._pulled(point, batch, given)
            return Trial(point, batch, weights, {path: x[0] for path, x in gradient.items()})

        return untrue(call, map(trial, itertools.islice(itertools.cycle(points), TRIALS)), rng)

    def at(self, leaves: Leaves, count: int, rng: np.random.Generator) -> Iterator[Leaves]:
        """Takes at least `count` gradients at a point, equally many per batch, in chunks that fit in memory.

        Gradients that are not finite are left out, and not replaced.

        Args:
          leaves: the point.
          count: how many.
          rng: source of the projections.

        Yields:
          Arrays (rows, *shape) by path.
        """
        most = self._most(leaves)
        each = -(-count // len(self._batches))
        if each * len(self._batches) <= most:  # one chunk, because each chunk costs the caller time
            chunks = [chunk for batch in self._batches for chunk in self._chunks(leaves, [batch], each, most, rng)]
            if chunks:
                yield {path: np.concatenate([chunk[path] for chunk in chunks]) for path in leaves}
        else:
            yield from self._chunks(leaves, self._batches, each, most, rng)

    def _most(self, leaves: Leaves) -> int:
        """How many gradients fit in the memory of a chunk."""
        return max(1, _CHUNK // (8 * max(1, sum(leaf.size for leaf in leaves.values()))))

    def _chunks(
        self, leaves: Leaves, batches: Sequence[Any], each: int, most: int, rng: np.random.Generator
    ) -> Iterator[Leaves]:
        """Yields `each` gradients per batch, for random weights of the outputs, in chunks of at most `most`."""
        for batch in batches:
            outputs = jax.eval_shape(self._fn, leaves, batch)
            for start in range(0, each, most):
                rows = min(most, each - start)
                projections = [rng.standard_normal((rows, *x.shape)).astype(x.dtype) for x in jax.tree.leaves(outputs)]
                whole = self._pulled(leaves, batch, jax.tree.unflatten(jax.tree.structure(outputs), projections))
                finite = np.all([np.isfinite(x.reshape(rows, -1)).all(1) for x in whole.values()], axis=0)
                if finite.any():
                    yield whole if finite.all() else {path: x[finite] for path, x in whole.items()}
