"""Draws generic points in weight space, and takes gradients of random projections of the outputs there.

A direction leaves a function unchanged to first order if and only if it is orthogonal to every such gradient. The
points are generic because zeros, ones and equal leaves of an initialization make symmetries that training breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gauge_optax.xla import quick_options

Leaves = dict[str, np.ndarray]
Function = Callable[[Mapping[str, Any], Any], Any]
DRAWS = 5  # where outputs or gradients are not finite, up to so many times as many points are drawn as are needed
_SPREAD = 0.5  # noise around the given point, relative to a leaf's RMS
_CHUNK = 2**29  # bytes of gradients that are held at a time


def generic_point(leaves: Mapping[str, np.ndarray], rng: np.random.Generator) -> Leaves:
    """A point near the given one without zeros, ones or repeats.

    Args:
      leaves: float64 arrays by path.
      rng: source of the noise.

    Returns:
      Leaves plus normal noise of half their RMS. The noise of a small leaf is so large that a kernel's outputs are as
      large as its inputs: the function would hardly depend on a layer that keeps initial values of 0.02. Leaves with
      only positive entries (norms' scales, variances) are multiplied by the noise's exponential, and stay positive.

    >>> point = generic_point({"scale": np.ones(3), "bias": np.zeros(3)}, np.random.default_rng(0))
    >>> bool((point["scale"] > 0).all()), bool(point["bias"].any())
    (True, True)
    """

    def moved(leaf: np.ndarray) -> np.ndarray:
        noise = _SPREAD * rng.standard_normal(leaf.shape)
        if not leaf.size or (leaf > 0).all():
            return leaf * np.exp(noise)
        rms = float(np.sqrt(np.mean(np.square(leaf))))
        width = leaf.size ** (1 / leaf.ndim) if leaf.ndim > 1 else 4.0
        return leaf + max(rms, 2.0 * width**-0.5) * noise

    return {path: moved(leaf) for path, leaf in leaves.items()}


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


def squared_gradients(
    fn: Function, batches: Sequence[Any], point: Mapping[str, Any], rng: np.random.Generator, paths: Sequence[str]
) -> Leaves:
    """Sums over batches the squared gradient of one random projection of the outputs, for a large tree.

    A gradient of all leaves at once would be another copy of the tree in float64. So leaves are differentiated a few at
    a time, and the squares are returned in float32. Operations run one by one, so that all layers share what is
    compiled: a program of many unrolled layers would compile for longer than it runs.

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


class Gradients:
    """Gradients of random projections of the outputs, in chunks. It compiles one program per shape of batches.

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
            return jax.vmap(lambda projection: backward(projection)[0])(projections)

        self._fn, self._batches = fn, batches
        self._pull = jax.jit(pull, compiler_options=quick_options())

    def outputs(self, leaves: Leaves) -> int:
        """Number of output entries of a batch, and so of the gradients per batch that can be independent at a point."""
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(self._fn, leaves, self._batches[0])))

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
        most = max(1, _CHUNK // (8 * max(1, sum(leaf.size for leaf in leaves.values()))))
        each = -(-count // len(self._batches))
        if each * len(self._batches) <= most:  # one chunk, because each chunk costs the caller time
            chunks = [chunk for batch in self._batches for chunk in self._chunks(leaves, [batch], each, most, rng)]
            if chunks:
                yield {path: np.concatenate([chunk[path] for chunk in chunks]) for path in leaves}
        else:
            yield from self._chunks(leaves, self._batches, each, most, rng)

    def _chunks(
        self, leaves: Leaves, batches: Sequence[Any], each: int, most: int, rng: np.random.Generator
    ) -> Iterator[Leaves]:
        """Gradients for some batches: `each` per batch, of which a chunk holds `most` at most."""
        for batch in batches:
            outputs = jax.eval_shape(self._fn, leaves, batch)
            for start in range(0, each, most):
                rows = min(most, each - start)
                projections = [rng.standard_normal((rows, *x.shape)).astype(x.dtype) for x in jax.tree.leaves(outputs)]
                chunk = self._pull(leaves, batch, jax.tree.unflatten(jax.tree.structure(outputs), projections))
                whole = {path: np.asarray(gradient) for path, gradient in chunk.items()}
                finite = np.all([np.isfinite(x.reshape(rows, -1)).all(1) for x in whole.values()], axis=0)
                if finite.any():
                    yield whole if finite.all() else {path: x[finite] for path, x in whole.items()}
