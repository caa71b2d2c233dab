"""Generic points, and gradients of random projections of the outputs there.

A direction leaves a function alone to first order if and only if it is orthogonal to every such gradient. Points are
generic: ones, zeros and equal leaves of a start make symmetries that are not there.

Here: what is differentiated, and where. Not here: what is asked of the gradients (`search`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Leaves = dict[str, np.ndarray]
Function = Callable[[Mapping[str, Any], Any], Any]
SPREAD = 0.5  # of a leaf's RMS, in which a point's entries are drawn around it
_CHUNK = 2**28  # bytes of gradients that are held at a time


def generic_point(leaves: Mapping[str, np.ndarray], rng: np.random.Generator) -> Leaves:
    """A point near the given one without zeros, ones or repeats.

    Args:
      leaves: float64 arrays by path.
      rng: source of the noise.

    Returns:
      Leaves plus normal noise of half their RMS, and of at least the size at which a kernel keeps the size of what it
      is applied to (starts at 0.02 make layers that the outputs hardly notice); leaves all positive (norms' scales,
      variances) are multiplied by its exponential instead, so that they stay positive.
    """

    def moved(leaf: np.ndarray) -> np.ndarray:
        noise = SPREAD * rng.standard_normal(leaf.shape)
        if not leaf.size or (leaf > 0).all():
            return leaf * np.exp(noise)
        rms = float(np.sqrt(np.mean(np.square(leaf))))
        width = leaf.size ** (1 / leaf.ndim) if leaf.ndim > 1 else 4.0
        return leaf + max(rms, 2.0 * width**-0.5) * noise

    return {path: moved(leaf) for path, leaf in leaves.items()}


class Gradients:
    """Rows of gradients, a chunk at a time; the program is compiled once per shape of batches.

    Args:
      fn: (leaves, batch) to a tree of outputs.
      batches: what it is called on.
    """

    def __init__(self, fn: Function, batches: Sequence[Any]) -> None:
        self._batches = batches

        def pull(leaves: Mapping[str, jax.Array], batch: Any, projections: Any) -> Any:
            _, backward = jax.vjp(lambda p: fn(p, batch), leaves)
            return jax.vmap(lambda projection: backward(projection)[0])(projections)

        self._pull = jax.jit(pull)
        self._outputs = fn

    def outputs(self, leaves: Leaves) -> int:
        """How many numbers a batch has as outputs: no more independent rows can be drawn of it at a point."""
        out = jax.eval_shape(self._outputs, leaves, self._batches[0])
        return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating))

    def at(self, leaves: Leaves, rows: int, rng: np.random.Generator) -> Iterator[Leaves]:
        """At least `rows` gradients at a point, shared out over the batches: arrays (rows, *shape) by path.

        Args:
          leaves: the point.
          rows: how many.
          rng: source of the projections.

        Yields:
          Chunks of rows that fit in memory.
        """
        entries = sum(leaf.size for leaf in leaves.values())
        most = max(1, _CHUNK // (8 * max(1, entries)))
        each = -(-rows // len(self._batches))
        for batch in self._batches:
            shape = jax.eval_shape(self._outputs, leaves, batch)
            for start in range(0, each, most):
                count = min(most, each - start)
                found = self._pull(leaves, batch, jax.tree.map(lambda x, n=count: _projection(rng, n, x), shape))
                yield {path: np.asarray(gradient) for path, gradient in found.items()}


def _projection(rng: np.random.Generator, count: int, like: Any) -> np.ndarray:
    shape = (count, *like.shape)
    if not jnp.issubdtype(like.dtype, jnp.floating):
        return np.zeros(shape, jax.dtypes.float0)
    return rng.standard_normal(shape).astype(like.dtype)
