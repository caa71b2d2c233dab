"""The metric in which curvature and lengths are measured: it gives the same numbers for all weights of one function.

The *quotient* is the set of orbits: it has one point per function. To measure a tangent, gauges move it with its point
to one point of the orbit: the slice point, or the *balanced* point, which has the least norm on the orbit. The
tangent's part perpendicular to the orbit is measured there, in the Euclidean metric. All weights of one function are
moved to the same point, up to rotations, which change no length. They therefore give the same numbers.

The two points behave differently when a channel dies. Take a network of two weights u and v with the output w = u·v,
and let w go to zero. The slice point has u = 1 and v = w, and its curvature u² + v² goes to 1. The balanced point has
|u| = |v| = √|w|, and its curvature u² + v² = 2·|w| goes to zero.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import leaves_by_path
from gauge_optax.errors import binding_error
from gauge_optax.gauges.balance import balanced_elements
from gauge_optax.gauges.gauge import Product
from gauge_optax.gauges.unread import heads_without_frame
from gauge_optax.linalg import safe_divide, symmetric_eigen
from gauge_optax.parts.heads import Rotation
from gauge_optax.parts.part import Part
from gauge_optax.slice import Elements, Slice, Undone
from gauge_optax.xla import while_loop

Leaves = dict[str, jax.Array]

_ROUNDS = 500  # the most rounds of conjugate gradients; about ten suffice, more if heads are small in some direction
_DRAWS = 4  # how many random coordinates the norms of vertical vectors are estimated from


def check_at(name: str, at: str) -> None:
    """Raises ValueError unless `at` is "balanced" or "slice"."""
    if at not in ("balanced", "slice"):
        raise binding_error(
            name, f"no point of the orbit '{at}'", f"at={at!r}", "'balanced' or 'slice'", 'pass at="balanced"'
        )


def require_frame(name: str, group: Product, params: Any) -> None:
    """Raises ValueError if both factors of a `head_linear` have less than full rank in some heads.

    These heads have no frame, so that no point of their orbit is the same for all weights of one function.

    Args:
      name: the name of the public function, for the message.
      group: the gauges.
      params: the point.
    """
    s, but = group._bound(params).slice, "the result would not be the same for all weights of one function"
    for sentence in heads_without_frame(name, s, read_elements(group, params), leaves_by_path(params), but):
        raise sentence


@functools.partial(jax.jit, static_argnums=0)
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
      frame: the frame of another point. If given, its rotations are undone in place of those that `params` have.

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


@functools.partial(jax.jit, static_argnums=(0, 1))
def point_of(group: Product, at: str, params: Any) -> Leaves:
    """The bound leaves at the balanced point or the slice point, as stored numbers: path → array."""
    return stored(group._bound(params).slice, ways(group, params, at)[-1].point)


@functools.partial(jax.jit, static_argnums=(0, 1))
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
    """The part of a vector that is perpendicular to orbits: the vector minus the nearest vertical vector T·c.

    T maps coordinates c of the group's elements to vertical vectors, and c is found by conjugate gradients for least
    squares (CGLS, Björck 1996). Each round subtracts a multiple of a vertical vector from what is left of the vector
    (`rest`), the multiple that makes the rest shortest. Roundoff can therefore slow the method down, but cannot make it
    diverge. The result is NaN if the rounds do not suffice.
    """
    s = group._bound(params).slice
    if not s.parts:
        return vector
    point, rest = s.values(params), s.vectors({**leaves_by_path(params), **vector})
    # A tiny or huge vector would have squares of 0 or infinity.
    most = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in rest.values()]))
    rest = jax.tree.map(lambda x: safe_divide(x, most), rest)
    # In the basis in which the Gram matrix of a head is diagonal, the vertical vectors of the head's coordinates are
    # perpendicular to each other, so that few rounds are needed.
    bases = {turn: _basis(turn, point) for turn in s.heads}
    for turn, basis in bases.items():
        point, rest = turn.act(basis, point), turn.act(basis, rest)
    push, pull = _vertical(group, params, point)
    size, slope = optax.tree.norm(rest), pull(rest)
    # `slope` is Tᵀ·rest. It can be small although a vertical part is left in `rest`, if T makes some coordinates short.
    # With `weak`, the least ratio |T·c|/|c| so far, the norm of that part is at most about |slope|/weak.
    precise, usable = (1e-12, 1e-6) if jnp.finfo(size.dtype).eps < 1e-10 else (1e-6, 1e-3)

    def unfinished(carry: Any) -> jax.Array:
        return (carry[4] > precise * size) & (carry[5] < _ROUNDS)

    def one_round(carry: Any) -> Any:
        rest, slope, way, weak, error, count = carry
        image = push(way)
        square, before = optax.tree.vdot(image, image), optax.tree.vdot(slope, slope)
        rest = optax.tree.add_scale(rest, -safe_divide(optax.tree.vdot(rest, image), square), image)
        weak = jnp.minimum(weak, safe_divide(jnp.sqrt(square), optax.tree.norm(way)))
        slope = pull(rest)
        after = optax.tree.vdot(slope, slope)
        error = jnp.minimum(error, safe_divide(jnp.sqrt(after), weak))
        return rest, slope, optax.tree.add_scale(slope, safe_divide(after, before), way), weak, error, count + 1

    start = rest, slope, slope, jnp.ones_like(size), optax.tree.norm(slope), jnp.int32(0)
    rest, _, _, _, error, _ = while_loop(unfinished, one_round, start)
    for turn, basis in reversed(bases.items()):
        rest = turn.undo(basis, rest)
    return vector | jax.tree.map(lambda x: jnp.where(error <= usable * size, most * x, jnp.nan), rest)


def require_solved(name: str, found: jax.Array, *given: Any) -> None:
    """Raises ValueError if a result of `perpendicular` has NaN, and the trees from which it was computed are finite.

    Args:
      name: the name of the public function, for the message.
      found: numbers computed from the result.
      *given: the trees.
    """
    if np.isnan(found).any() and all(np.isfinite(x).all() for x in jax.tree.leaves(given)):
        raise binding_error(
            name, "the part along the orbit was not found", f"no convergence in {_ROUNDS} rounds in {found.dtype}",
            "channels and heads of less different sizes, or float64", "call it under `with jax.enable_x64(True):`",
        )


@functools.singledispatch
def _basis(turn: Part[Any], point: Leaves) -> Any:
    """The rotation after which the Gram matrix of every head is diagonal; by default the identity: none is needed."""
    return turn.identity()


@_basis.register
def _basis_of_heads(turn: Rotation, point: Leaves) -> jax.Array:
    return symmetric_eigen(turn.gram(point, point))[1]


def _vertical(group: Product, params: Any, point: Leaves) -> tuple[Callable[[Any], Leaves], Callable[[Leaves], Any]]:
    """The map from coordinates to vertical vectors, and its transpose.

    Each coordinate is scaled such that its change by 1 moves the point along a vertical vector of norm about 1.

    Args:
      group: the gauges.
      params: a tree that they bind.
      point: values of the bound leaves; vertical vectors are those at this point.
    """
    b = group._bound(params)
    zero = group.algebra(params)
    push = jax.linearize(lambda c: b.slice.act(b.elements(group.exponential(c, params, near=True)), point), zero)[1]
    transposed = jax.linear_transpose(push, zero)
    scale = jax.tree.map(jnp.ones_like, zero)

    def scaled(c: Any) -> Leaves:
        return push(optax.tree.mul(scale, c))

    def pull(x: Leaves) -> Any:
        return optax.tree.mul(scale, transposed(x)[0])

    # The norms of vertical vectors are estimated from coordinates whose entries have random signs. Entries (i, j) and
    # (j, i) of a rotation's coordinate have opposite vertical vectors, which would cancel if both entries had one sign.
    # The signs are therefore those of what `pull` makes of a random vector: they are opposite for such entries.
    keys = map(jax.random.key, range(_DRAWS))
    drawn = [jax.tree.map(jnp.sign, pull(optax.tree.random_like(key, point, jax.random.normal))) for key in keys]
    # A coordinate whose vertical vector t shares no entry with the others gets the scale 1/|t|. Before norms are taken,
    # the first round divides by sums of absolute values, because squares may underflow or overflow.
    for weigh, root in ((jnp.sign, jnp.positive), (jnp.positive, jnp.sqrt)):
        pulled = [pull(jax.tree.map(weigh, scaled(c))) for c in drawn]
        norms = jax.tree.map(lambda *y: root(jnp.mean(jnp.abs(jnp.stack(y)), 0)), *pulled)  # noqa: B023
        scale = jax.tree.map(lambda c, y: c * safe_divide(jnp.ones_like(y), y), scale, norms)
    return scaled, pull
