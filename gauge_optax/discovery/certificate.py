"""Computes a certificate, the count of dead directions at a generic point, on inputs that are drawn for it.

With too few inputs the Jacobian of the outputs would have too low a rank, and directions would look dead that are not.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.discovery.census import Census, census
from gauge_optax.discovery.checks import own_points
from gauge_optax.discovery.sketch import (
    DRAWS,
    Function,
    Leaves,
    Trial,
    finite_points,
    generic_point,
    positive_kernels,
    untrue,
)
from gauge_optax.errors import warn
from gauge_optax.gauges.gauge import Gauge
from gauge_optax.xla import quick_options

_WHOLE = 6_000  # models of at most so many parameters are counted at once, in a minute; larger ones in blocks
_SECONDS = 600.0  # time after which no further block is counted
_POINTS = 6  # points, at most: a ReLU may be on (or off) for every input at one point, so that more directions are dead
_PATIENCE = 60.0  # seconds after which no further point is tried
_NEAR = 0.3  # vectors go this share of the way from their given values to a generic point
# The least number of random batches. At one position in a sequence, a norm hides some changes of a token's embedding,
# such as a change of its length. They would look dead if the token occurred only there. At other positions, where other
# vectors are added to the embedding, the norm hides other changes.
_LEAST = 8
_REDRAWS = 20  # at most so many batches are drawn in place of one at which derivatives are not finite
_MARGIN = 2  # output numbers per parameter: more than one, because those of one sequence depend on each other


def certified(
    fn: Function, params: Any, leaves: Leaves, batches: Sequence[Any], gauges: Sequence[Gauge], seed: int,
    progress: bool = False,
) -> Census:
    """Counts dead directions at a generic point, and those that the gauges explain.

    If some remain unexplained, it counts again at further points, each with twice as many inputs as the one before, and
    returns the census with the fewest.

    Args:
      fn: (leaves, batch) to a list of outputs, in float64. A direction is dead only if it changes none of them.
      params: the tree that the gauges bind to.
      leaves: its float64 leaves by path.
      batches: at least two.
      gauges: the gauges that should explain the dead directions.
      seed: seed of the points, the inputs and the census.
      progress: True shows a bar.
    """
    rng = np.random.default_rng([seed, 18])
    if not _differ(batches):
        warn("the batches that discover got are equal, so that the certificate sees too few inputs and counts live "
             "directions as dead: pass different batches")

    def by_tree(tree: Any, batch: Any) -> Any:
        moved = leaves_by_path(tree)
        return fn({path: moved[path] for path in leaves}, batch)

    with own_points():
        outputs = sum(math.prod(x.shape) for x in jax.eval_shape(fn, leaves, batches[0]))
        count = max(_LEAST, -(-_MARGIN * sum(leaf.size for leaf in leaves.values()) // max(1, outputs)))
        inputs = [*batches, *(_redrawn(batches, rng) for _ in range(count))]
        call, started = jax.jit(fn, compiler_options=quick_options()), time.monotonic()
        signed = positive_kernels(call, leaves, batches[0], rng)
        slope = jax.jit(jax.grad(lambda p, x: sum(jnp.sum(y) for y in fn(p, x))), compiler_options=quick_options())

        def at(point: Leaves, batch: Any) -> Trial:
            return Trial(point, batch, [np.ones(x.shape) for x in call(point, batch)], slope(point, batch))

        def smooth(point: Leaves, batch: Any, told: Sequence[str]) -> bool:
            """Whether the gradient at a batch is finite, and the derivative of the outputs for the leaves in `told`.

            It is not finite where a norm reads units that are all dead for an input. It is no derivative if an index
            is beyond the end of a table: JAX then reads the last row, and gives it no gradient.
            """
            trial = at(point, batch)
            finite = all(np.isfinite(x).all() for x in trial.gradient.values())
            return finite and (not _has_indices(batch) or not untrue(*_along_a_line(call, trial, told, rng), rng))

        def counted() -> Census:
            drawn = (_near_vectors(leaves, generic_point(leaves, rng, signed)) for _ in range(DRAWS))
            point = finite_points(call, batches, drawn, 1)[0]
            told = sorted(leaves.keys() - untrue(call, [at(point, x) for x in batches], rng))
            tried = (itertools.chain([x], (_redrawn(batches, rng, n % 2 > 0) for n in range(_REDRAWS))) for x in inputs)
            first = (next((x for x in again if smooth(point, x, told)), None) for again in tried)
            given = [x for x in first if x is not None]
            return census(
                by_tree, with_leaves(params, point), given or inputs, gauges, "loss", whole=_WHOLE, seed=seed,
                progress=progress, seconds=_SECONDS,
            )

        best = counted()
        for _ in range(_POINTS - 1):
            if best.unexplained and time.monotonic() - started < _PATIENCE:
                # The outputs show a head's scores only for pairs of tokens that occur: more inputs have more pairs.
                inputs += [_redrawn(batches, rng) for _ in inputs]
                best = min(best, counted(), key=lambda counts: counts.unexplained)
        return best


def _differ(batches: Sequence[Any]) -> bool:
    """Whether two batches have different numbers."""
    if len({jax.tree.structure(batch) for batch in batches}) > 1:
        return True
    first, *others = (jax.tree.leaves(batch) for batch in batches)
    pairs = [pair for other in others for pair in zip(first, other, strict=True)]
    keys = any(jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.extended) for x in first)
    return keys or not all(np.array_equal(x, y) for x, y in pairs)


def _near_vectors(leaves: Leaves, point: Leaves) -> Leaves:
    """Moves some leaves of a generic point back towards the given leaves: vectors, and leaves that are given as zeros.

    These leaves may be biases. Biases stacked over layers are no vectors, but they often start as zeros. Large biases
    would turn many a ReLU on, or off, for every input.
    """
    near = {path for path, leaf in leaves.items() if leaf.ndim < 2 or not leaf.any()}
    return {path: leaves[path] + _NEAR * (x - leaves[path]) if path in near else x for path, x in point.items()}


def _has_indices(batch: Any) -> bool:
    return any(jnp.issubdtype(jnp.asarray(x).dtype, jnp.integer) for x in jax.tree.leaves(batch))


def _along_a_line(
    call: Function, trial: Trial, paths: Sequence[str], rng: np.random.Generator
) -> tuple[Function, list[Trial]]:
    """A function and its gradient along a random line through a point, on which only leaves at some paths change.

    Args:
      call: the function, compiled.
      trial: its gradient at the point, which is where the line's coordinate is 1.
      paths: the leaves that change.
      rng: source of the line.
    """
    line = {path: trial.point[path] * rng.standard_normal(trial.point[path].shape) for path in paths}
    told = sum(float(np.vdot(trial.gradient[path], x)) for path, x in line.items())

    def along(at: Mapping[str, Any], batch: Any) -> Any:
        moved = {path: trial.point[path] + (at["t"] - 1.0) * x for path, x in line.items()}
        return call({**trial.point, **moved}, batch)

    return along, [trial._replace(point={"t": np.ones(1)}, gradient={"t": np.full(1, told)})]


def _redrawn(batches: Sequence[Any], rng: np.random.Generator, by_column: bool = False) -> Any:
    """A new random batch with the structure and the shapes of the first one, or of any one if structures differ.

    Arrays that are equal in all batches, such as positions, stay. Arrays of several lengths take values that occur
    anywhere in the batches. Rows with one sum, such as one-hot vectors and probabilities, are drawn whole. Arrays with
    at most two different values, such as masks, take at every place the value that a randomly chosen batch has there:
    where all batches agree, it stays. All other arrays take values that occur anywhere in the batches. With
    `by_column`, arrays of integers take at each index of their last axis values that occur there, because the numbers
    at one index may be rows of another table than those at the next.
    """

    def of(*arrays: Any) -> Any:
        if jnp.issubdtype(getattr(arrays[0], "dtype", float), jax.dtypes.extended):
            return arrays[rng.integers(len(arrays))]  # a key of random numbers
        values_by_batch = [np.asarray(x) for x in arrays]
        shape = values_by_batch[0].shape
        if all(np.array_equal(x, values_by_batch[0]) for x in values_by_batch):
            return arrays[0]
        whole = all(x.shape == shape for x in values_by_batch)
        flat = np.concatenate([x.ravel() for x in values_by_batch])
        if flat.dtype.kind == "f" and all(x.ndim > 1 and x.shape[-1] == shape[-1] > 1 for x in values_by_batch):
            rows = flat.reshape(-1, shape[-1])
            if rows.any() and np.allclose(rows.sum(-1), rows[0].sum(), rtol=1e-5, atol=0.0):
                return rows[rng.integers(len(rows), size=shape[:-1])]
        values = np.unique(flat)
        if by_column and whole and flat.dtype.kind in "iu" and len(shape) > 1:
            columns = np.stack(values_by_batch).reshape(-1, shape[-1])
            return columns[rng.integers(len(columns), size=shape), np.arange(shape[-1])]
        if len(values) > 2 or not whole:
            return rng.choice(values if flat.dtype.kind in "iu" else flat, shape)
        stacked = np.stack(values_by_batch)
        which = rng.integers(len(stacked), size=shape)
        return np.take_along_axis(stacked, which[None], 0)[0]

    if len({jax.tree.structure(batch) for batch in batches}) == 1:
        return jax.tree.map(of, *batches)
    # If an input is None in some batches, the new batch has the structure of a random one. Numbers of an input that it
    # has are drawn from all batches that have this input.
    batch = batches[int(rng.integers(len(batches)))]
    found = [dict(jax.tree_util.tree_leaves_with_path(other)) for other in batches]
    return jax.tree_util.tree_map_with_path(
        lambda path, x: of(x, *(leaves[path] for leaves in found if path in leaves)), batch)
