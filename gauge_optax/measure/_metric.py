"""The metric in which curvature and lengths are measured: it gives the same numbers for all weights of one function.

The *quotient* is the set of orbits: it has one point per function. To measure a tangent, gauges move it with its point
to one point of the orbit: the slice point, or the *balanced* point, which has the least norm on the orbit. The
tangent's part perpendicular to the orbit is measured there, in the Euclidean metric. All weights of one function are
moved to the same point, up to rotations, which change no length. They therefore give the same numbers.

The two points behave differently when a channel dies. Take the output u·v of two weights, and let it go to zero. The
slice point has u = 1 and v = u·v: its curvature u² + v² goes to 1. The balanced point has |u| = |v| = √|u·v|: its
curvature 2·|u·v| goes to zero.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import leaves_by_path
from gauge_optax.errors import binding_error
from gauge_optax.gauges.balance import balanced_elements
from gauge_optax.gauges.gauge import Product
from gauge_optax.gauges.unread import heads_without_frame
from gauge_optax.linalg import safe_divide
from gauge_optax.slice import Elements, Slice, Undone

Leaves = dict[str, jax.Array]

_SOLVED = 1e-12  # relative residual at which conjugate gradients stop in float64; in float32 it is 1e-6
_ROUNDS = 200  # the most rounds of conjugate gradients; they need about ten


def check_at(name: str, at: str) -> None:
    """Raises ValueError unless `at` is "balanced" or "slice"."""
    if at not in ("balanced", "slice"):
        raise binding_error(
            name, f"no point of the orbit '{at}'", f"at={at!r}", "'balanced' or 'slice'", 'pass at="balanced"'
        )


def require_frame(name: str, group: Product, params: Any) -> None:
    """Raises ValueError if heads have no frame: then no point of their orbit is the same for all weights.

    Args:
      name: the name of the public function, for the message.
      group: the gauges.
      params: the point.
    """
    s, but = group._bound(params).slice, "the result would not be the same for all weights of one function"
    for sentence in heads_without_frame(name, s, read_elements(group, params), leaves_by_path(params), but):
        raise sentence


@partial(jax.jit, static_argnums=0)
def read_elements(group: Product, params: Any) -> Elements:
    """The elements that all parts read at a point: label → element."""
    s = group._bound(params).slice
    return s.read(s.values(params)).elements


def ways(group: Product, params: Any, at: str, frame: Elements | None = None) -> list[Undone]:
    """The moves that lead from a point to the balanced point or the slice point of its orbit, in order.

    Args:
      group: the gauges.
      params: the point.
      at: "balanced" or "slice".
      frame: the frame of another point. If given, the rotations in it are undone, and not the rotations in the frame of
        `params`.

    Returns:
      The moves. Each starts at the point where the move before it ends.
    """
    s = group._bound(params).slice
    values = s.values(params)
    found = [s.enter(s.read(values).elements if frame is None else frame, values)]
    if frame is not None:
        point = found[-1].point
        found.append(s.enter(s.read(point, turning=False).elements, point))
    if at == "balanced":
        point = found[-1].point
        found.append(s.enter(balanced_elements(s, point), point))
    return found


def stored(s: Slice, values: Any) -> Leaves:
    """Converts values of bound leaves to stored numbers: a leaf whose axes string begins with `1+` stores value − 1."""
    return {path: x - s.added[path] for path, x in values.items()}


@partial(jax.jit, static_argnums=(0, 1))
def point_of(group: Product, at: str, params: Any) -> Leaves:
    """The bound leaves at the balanced point or the slice point, as stored numbers: path → array."""
    return stored(group._bound(params).slice, ways(group, params, at)[-1].point)


@partial(jax.jit, static_argnums=(0, 1))
def tangent_of(group: Product, at: str, params: Any, tangent: Any) -> Leaves:
    """The bound leaves of a tangent, moved with the point to the balanced point or the slice point: path → array."""
    s = group._bound(params).slice
    values, vectors = s.values(params), s.vectors(tangent)
    for way in ways(group, params, at):
        values, vectors = jax.jvp(way.enter, (values,), (vectors,))
    return vectors


def across(group: Product, params: Any, vector: Leaves) -> Leaves:
    """The horizontal part of a tangent, which need not be perpendicular to the orbit."""
    return vector | group._bound(params).slice.horizontal_at(params, vector)


def across_dual(group: Product, params: Any, vector: Leaves) -> Leaves:
    """The transpose of `across`: a projection onto the vectors perpendicular to orbits."""
    return vector | group._bound(params).slice.horizontal_at(params, vector, dual=True)


def perpendicular(group: Product, params: Any, vector: Leaves) -> Leaves:
    """The part of a vector that is perpendicular to orbits: the vector minus the nearest vertical vector R·y.

    R maps a vector to its vertical part, and y solves the normal equations RᵀR·y = Rᵀ·vector.
    """

    def along(x: Leaves) -> Leaves:  # R
        return jax.tree.map(jnp.subtract, x, across(group, params, x))

    def along_dual(x: Leaves) -> Leaves:
        return jax.tree.map(jnp.subtract, x, across_dual(group, params, x))

    # A tiny or huge vector would have squares of 0 or infinity.
    most = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in vector.values()]))
    vector = jax.tree.map(lambda x: safe_divide(x, most.astype(x.dtype)), vector)
    # R is a projection: its singular values are 0 or at least 1, so that a few rounds are enough. The residual is
    # compared with the vector and not with Rᵀ·vector, which is only roundoff if the vector is perpendicular already.
    least = _SOLVED if jnp.finfo(jnp.result_type(*vector.values())).eps < 1e-10 else 1e-6
    size = jnp.sqrt(sum((jnp.sum(jnp.square(x)) for x in vector.values()), start=jnp.zeros(())))
    solved, _ = jax.scipy.sparse.linalg.cg(
        lambda y: along_dual(along(y)), along_dual(vector), tol=0.0, atol=least * size, maxiter=_ROUNDS
    )
    return jax.tree.map(lambda x, part: most.astype(x.dtype) * (x - part), vector, along(solved))
