"""Spectra and norms of one matrix of weights, or of activations with one row per input.

These are measurements that the DDC paper makes at a checkpoint: how many directions a matrix has, how small its
smallest singular value is, which units or channels are dead, and how much of a leaf lies along an orbit. Only the last
of these functions needs a gauge.
Reference: DDC §5.4, App. C.1, C.6, C.11.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import leaves_by_path
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Gauges, product
from gauge_optax.linalg import near_power_of_two, real_dtype, safe_divide, svd, unit_and_size
from gauge_optax.transformation import require_real, updates_at


def effective_rank(matrix: jax.Array | np.ndarray) -> jax.Array:
    """The effective number of directions of a matrix: exp(−Σ pᵢ·log pᵢ), with the singular values' shares pᵢ = σᵢ/Σσ.

    Args:
      matrix: (…, rows, columns).

    Returns:
      Numbers (…) between 1 and the rank; 0 for zero matrices.

    Raises:
      ValueError: an array without rows and columns.

    >>> go.measure.effective_rank(jnp.eye(4)[:3])
    Array(3., dtype=float32)

    Reference: Roy and Vetterli 2007. DDC App. C.11 computes it for matrices of activations, with one row per input.
    """
    sizes, _ = _singular_values("effective_rank", matrix)
    total = jnp.sum(sizes, -1, keepdims=True)
    shares = safe_divide(sizes, total)
    entropy = -jnp.sum(jnp.where(shares > 0, shares * jnp.log(jnp.where(shares > 0, shares, 1.0)), 0.0), -1)
    # The last summand is 0, or NaN if an entry of the matrix is infinite or NaN.
    return jnp.where(total[..., 0] == 0, 0.0, jnp.exp(entropy) + 0.0 * total[..., 0])


def smallest_singular_value(matrix: jax.Array | np.ndarray) -> jax.Array:
    """σ_min, the last of the min(rows, columns) singular values.

    Args:
      matrix: (…, rows, columns).

    Returns:
      Numbers (…).

    Raises:
      ValueError: an array without rows and columns.

    >>> matrix = jnp.array([[3.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
    >>> round(float(go.measure.smallest_singular_value(matrix)), 4)
    0.5
    """
    sizes, multiple = _singular_values("smallest_singular_value", matrix)
    return sizes[..., -1] * multiple[..., 0]


def dead_units(preactivations: jax.Array | np.ndarray) -> jax.Array:
    """Finds the hidden units of a ReLU layer that are off for every input.

    Args:
      preactivations: the inputs of the ReLU, (…, units); all axes but the last count inputs of the network.

    Returns:
      A mask (units,): True where no input has a pre-activation above zero.

    Raises:
      ValueError: no inputs; NaN (inside `jit` this cannot be checked).

    >>> go.measure.dead_units(jnp.array([[1.0, -1.0], [-2.0, -3.0]]))
    Array([False,  True], dtype=bool)

    Reference: DDC App. C.11, which calls a unit dead if its pre-activation never crosses zero. Deviation: a unit whose
    pre-activations are all positive does not count. It is linear on these inputs, and its weights are in use.
    """
    require_real("dead_units", "preactivations", preactivations)
    preactivations = jnp.asarray(preactivations)
    if preactivations.ndim < 2 or not preactivations.size:
        raise binding_error(
            "dead_units", "no inputs", _said(preactivations), "real numbers, (inputs, units)",
            "stack the pre-activations of all inputs",
        )
    if not isinstance(preactivations, jax.core.Tracer) and bool(jnp.isnan(preactivations).any()):
        raise binding_error(
            "dead_units", "pre-activations that are no numbers", "NaN", "real numbers, (inputs, units)",
            "look for the input or the leaf in which there is a NaN",
        )
    return jnp.all(preactivations <= 0, tuple(range(preactivations.ndim - 1)))


def axis_alignment(directions: jax.Array | np.ndarray) -> jax.Array:
    """How close directions are to coordinate axes: the mean over unit vectors of the largest squared entry.

    Args:
      directions: (count, dimensions), such as the right singular vectors whose singular values are about zero. They are
        divided by their lengths.

    Returns:
      1 if each direction is a coordinate axis; about 2·log(dimensions)/dimensions for random directions. Another basis
      of the same space gives another number: pass the vectors that a decomposition returns.

    Raises:
      ValueError: no directions, or a zero one.

    >>> go.measure.axis_alignment(jnp.array([[0.0, 2.0], [1.0, 1.0]]))
    Array(0.75, dtype=float32)

    Reference: DDC App. C.13.
    """
    require_real("axis_alignment", "directions", directions)
    if jnp.ndim(directions) != 2 or not jnp.size(directions):
        raise binding_error(
            "axis_alignment", "no directions", _said(directions), "real numbers, (count, dimensions)",
            "pass one direction per row",
        )
    units, sizes = unit_and_size(jnp.asarray(directions, real_dtype()), -1)
    if not isinstance(sizes, jax.core.Tracer) and bool(jnp.any(sizes == 0)):
        raise binding_error(
            "axis_alignment", "a direction of length zero", f"{int(jnp.sum(sizes == 0))} of {sizes.size} rows",
            "directions that are not zero", "leave these rows out",
        )
    squares = jnp.square(units)
    return jnp.mean(jnp.max(squares, -1) / jnp.sum(squares, -1))


def gauge_fraction(params: Any, gauges: Gauges, tangent: Any = None) -> dict[str, jax.Array]:
    """The share of each leaf that lies along the orbit: ‖vertical part‖²/‖leaf‖².

    Args:
      params: the point, at which the vertical part is computed.
      gauges: a gauge or a sequence of them.
      tangent: the tree whose leaves are split, such as a step; `params` themselves by default.

    Returns:
      Path of a bound leaf → its share; 0 for a leaf of zeros. For gauges that add to a single leaf, such as
      `logit_shift` and `key_bias`, it is between 0 and 1. For other gauges it can exceed 1, by far: the vertical part
      of one leaf depends on the other leaves that the gauge moves. And for gauges that multiply, the projection on
      directions along the orbit need not be orthogonal.

    Raises:
      ValueError: bindings that do not fit the tree; a tangent of another shape.

    >>> gauge = go.logit_shift({"head": "_ vocab"})
    >>> shares = go.measure.gauge_fraction({"head": jnp.array([[3.0, 1.0]])}, gauge)
    >>> # The mean (2, 2) of the row lies along the orbit, (1, −1) across.
    >>> round(float(shares["head"]), 3)
    0.8

    Reference: DDC App. C.1, "the share of the unembed weight lying along the gauge orbit".
    """
    group, split = product(gauges), params if tangent is None else tangent
    paths = group._bound(params).slice.added
    along = leaves_by_path(group.vertical(params, split))
    whole = updates_at("gauge_fraction", paths, split, params)

    def share(part: Any, leaf: Any) -> jax.Array:
        part, leaf = (jnp.asarray(x, real_dtype()) for x in (part, leaf))
        most = jnp.max(jnp.abs(leaf), initial=0.0)  # so that no square overflows or underflows
        part, leaf = (jnp.sum(jnp.square(safe_divide(x, most))) for x in (part, leaf))
        return safe_divide(part, leaf)

    return {path: share(along[path], whole[path]) for path in paths}


def _singular_values(name: str, matrix: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array]:
    """The singular values, (…, count), divided by a number per matrix of about the largest entry, and that number."""
    _require_matrix(name, matrix)
    given = jnp.asarray(matrix, real_dtype())
    # A sum of singular values may overflow float32, and LAPACK fails for matrices of tiny numbers.
    size = near_power_of_two(jnp.max(jnp.abs(given), (-2, -1), keepdims=True))
    return svd(given / size)[1], size[..., 0]


def _require_matrix(name: str, matrix: jax.Array | np.ndarray) -> None:
    require_real(name, "matrix", matrix)
    if jnp.ndim(matrix) < 2 or not jnp.size(matrix):
        raise binding_error(
            name, "no matrix", _said(matrix), "real numbers, (…, rows, columns)",
            "reshape it to the matrix that it stands for",
        )


def _said(array: Any) -> str:
    return f"an array of shape {jnp.shape(array)} of {jnp.asarray(array).dtype}"
