"""Computes the element of one part that takes a point nearest to a target: one rule of `align` per kind of part.

A gauge has one or two parts per layer; each rotates, permutes, multiplies or adds. If all other parts stay, the nearest
element has a closed form or is a small problem: Procrustes for rotations, an assignment for permutations, one variable
per channel for scales, Gauss–Newton steps for invertible matrices. The action of a part that adds constants is affine
in its element, so that the default solves the normal equations.
References: Schönemann 1966 (Procrustes); Ainsworth, Hayase and Srinivasa, Git Re-Basin, §3.2 (assignment).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Block, overlap
from gauge_optax.gauges.by_action import OfUser
from gauge_optax.gauges.unread import deficient
from gauge_optax.linalg import (
    inverse,
    matmul,
    near_power_of_two,
    orthogonal_factor,
    real_dtype,
    safe_divide,
    solve,
    symmetric_eigen,
    transpose,
)
from gauge_optax.orbit.renumber import assigned, renumbers
from gauge_optax.parts.heads import Heads, Planes, Rotation
from gauge_optax.parts.part import Arrays, Constant, Part, changed
from gauge_optax.parts.permutation import Permutation
from gauge_optax.parts.sizes import Factor, Stretch
from gauge_optax.parts.stream import Stream


@functools.singledispatch
def nearest(part: Part[Any], target: Arrays, point: Arrays, others: Sequence[Part[Any]] = ()) -> Any:
    """The element e for which act(e, point) is nearest to `target`: the least sum of squares over the leaves it moves.

    Args:
      part: the part whose element is computed.
      target: leaf path → array, to come near to.
      point: leaf path → array, to be moved.
      others: parts whose elements are not known yet. The result should depend on these elements as little as possible:
        blocks that `others` move are ignored, unless they move all blocks of the part.

    The default is for additions of constants, whose action is affine in e: it solves the normal equations by conjugate
    gradients.
    """
    paths = changed(part)

    def moved(e: Any) -> Arrays:
        after = part.act(e, point)
        return {path: after[path] for path in paths}

    return _least_squares(moved, part.identity(), {path: target[path] for path in paths})


def _least_squares(moved: Callable[[Any], Arrays], start: Any, target: Arrays) -> Any:
    """The e with the least |moved(e) − target|², by conjugate gradients, if `moved` is affine.

    If it is not, `moved` is linearized at `start`, and the result is one Gauss–Newton step from there.
    """

    at_start, linear = jax.linearize(moved, start)  # moved(e) − moved(start) would lose small entries to roundoff
    _, pull = jax.vjp(moved, start)

    def inner(a: Any, b: Any) -> jax.Array:
        return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)), jnp.zeros(()))

    residual = direction = pull({path: target[path] - at_start[path] for path in target})[0]
    energy, element = inner(residual, residual), start
    least = energy * float(jnp.finfo(energy.dtype).eps) ** 2
    for _ in range(_MOST_STEPS):
        if not bool(energy > least):
            break
        change = pull(linear(direction))[0]
        rate = safe_divide(energy, inner(direction, change))
        element, residual = _plus(element, rate, direction), _plus(residual, -rate, change)
        fresh = inner(residual, residual)
        direction, energy = _plus(residual, safe_divide(fresh, energy), direction), fresh
    return element


@nearest.register
def _nearest_factor(part: Factor, target: Arrays, point: Arrays, others: Sequence[Part[Any]] = ()) -> jax.Array:
    """The α per channel with the least |T_up − α·up|² + |T_down − down/α^p|²: T is the target, p the degree."""

    def paired(side: tuple[Block, ...]) -> tuple[jax.Array, jax.Array]:
        """Sums over the blocks of one side, per channel: squares of the point, and products of point and target."""
        zero = jnp.zeros(part.shape, real_dtype())
        squares = (b.total(part.named, jnp.square(point[b.path])) for b in side)
        products = (b.total(part.named, point[b.path] * target[b.path]) for b in side)
        return sum(squares, zero), sum(products, zero)

    return _nearest_factors(paired(part.up), paired(part.down), jnp.asarray(part.degree, real_dtype()), part.signed)


@nearest.register
def _nearest_stretch(part: Stretch, target: Arrays, point: Arrays, others: Sequence[Part[Any]] = ()) -> jax.Array:
    """An invertible matrix per head that moves the point near to the target: a local minimum of the distance.

    It is found by Gauss–Newton steps, each with a line search, from the best of three starts: the identity, the
    least-squares solution for the left blocks alone, and that for the right blocks alone. Starts at other rotations are
    not needed, because `align` has rotated the same heads before. A head whose blocks determine no matrix
    (`deficient`: both factors have less than full rank, in the point or in the target) keeps the identity, because a
    least-squares solution could have entries of any size.
    """
    grams = [side.gram(point, x) for side in (part.left, part.right) for x in (point, target)]
    stays = (deficient(part, point) | deficient(part, target))[..., None, None, None]
    return jnp.where(stays, part.identity(), _nearest_matrix(*grams))


@nearest.register
def _nearest_rotation(part: Rotation, target: Arrays, point: Arrays, others: Sequence[Part[Any]] = ()) -> jax.Array:
    """Solves orthogonal Procrustes by the polar factor of WᵀT, where W and T are the rows of point and target."""
    seen = dataclasses.replace(part, blocks=apart_from(part.rows_seen.blocks, others))
    return orthogonal_factor(seen.gram(point, target))


@nearest.register
def _nearest_angles(part: Planes, target: Arrays, point: Arrays, others: Sequence[Part[Any]] = ()) -> jax.Array:
    """Solves Procrustes per plane: the angle of the 2 × 2 rotation nearest to WᵀT. W, T: rows of point and target."""
    seen = dataclasses.replace(part, blocks=apart_from(part.blocks, others))
    gram = seen.gram(point, target)
    return jnp.arctan2(gram[..., 0, 1] - gram[..., 1, 0], gram[..., 0, 0] + gram[..., 1, 1])


@nearest.register
def _nearest_stream_rotation(
    part: Stream, target: Arrays, point: Arrays, others: Sequence[Part[Any]] = ()
) -> jax.Array:
    """Solves Procrustes over the rows of kernels that read or write the stream.

    In the point and in the target, each norm's scale is first multiplied into the kernels behind it. If scales are not
    1, the result brings these products nearest to each other, and not the stored weights.
    """
    seen = Heads(part.named, part.shape, apart_from(part.blocks, others), part.size)
    inside = (part.divided(x, x) for x in (point, target))
    return part.embedded(orthogonal_factor(part.restricted(seen.gram(*inside))))


@nearest.register
def _nearest_permutation(
    part: Permutation, target: Arrays, point: Arrays, others: Sequence[Part[Any]] = ()
) -> jax.Array:
    """The assignment of units with the largest sum of inner products between the point's and the target's units.

    If `others` has rotations of heads, a pair of heads is compared after its best rotation.
    """
    inside = [other for other in others if renumbers(part, other)]
    outside = [other for other in others if other not in inside]
    blocks = apart_from(part.blocks, outside)
    plain = [block for block in blocks if not any(overlap(block, x) for other in inside for x in other.blocks)]
    gains = jnp.zeros((*part.shape, part.size, part.size), real_dtype())
    for block in plain:
        gains = gains + matmul(part.rows(block, target), transpose(part.rows(block, point)))
    turned = [block for block in blocks if block not in plain]
    if turned:
        gains = gains + _gains_after(part, inside, outside, turned, target, point)
    return assigned(part, gains)


@nearest.register
def _nearest_by_action(part: OfUser, target: Arrays, point: Arrays, others: Sequence[Part[Any]] = ()) -> Any:
    """The nearest element for a gauge of a user's class, by Gauss–Newton steps in the coordinates of its group.

    Each step is halved until it leads nearer to the target. The start is computed by the gauge's method `read`: it is
    the element that moves the point to where `read` returns the same as for the target. If point and target compute one
    function, this is the nearest element already. For a group without coordinates no steps follow.
    """
    reading, its_own = (part.gauge.read(part.tree(x)) for x in (target, point))
    element, paths = part.compose(reading, part.inverse(its_own)), changed(part)
    try:
        zero = part.gauge.algebra(part.zeros())
    except ValueError:
        return element

    def apart(e: Any) -> float:
        after = part.act(e, point)
        return float(sum(jnp.sum(jnp.square(after[path] - target[path])) for path in paths))

    least = apart(element)
    for _ in range(_MOST_ROUNDS):
        here = part.act(element, point)

        def moved(coordinates: Any, here: Arrays = here) -> Arrays:
            after = part.act(part.gauge.exponential(coordinates, part.zeros(), near=True), here)
            return {path: after[path] for path in paths}

        step = _least_squares(moved, zero, {path: target[path] for path in paths})
        tried = (
            part.compose(part.gauge.exponential(jax.tree.map(lambda x, f=0.5**n: f * x, step), part.zeros()), element)
            for n in range(_MOST_HALVINGS)
        )
        nearer = next((e for e in tried if apart(e) < least), None)
        if nearer is None:
            return element
        element, least = nearer, apart(nearer)
    return element


@functools.singledispatch
def in_range(part: Part[Any], target: Arrays, point: Arrays) -> tuple[Arrays, Arrays]:
    """Target and point, divided by one number in the leaves that the part changes, to keep their squares in range.

    If the part's action is linear, the nearest element does not depend on that number. For parts with another action,
    target and point are returned as they are.
    """
    paths = changed(part)
    most = jnp.max(jnp.stack([jnp.max(jnp.abs(x[path]), initial=0.0) for x in (target, point) for path in paths]))
    size = near_power_of_two(most)
    first, second = ({**x, **{path: x[path] / size for path in paths}} for x in (target, point))
    return first, second


@in_range.register(Constant)
@in_range.register(OfUser)
def _as_they_are(part: Part[Any], target: Arrays, point: Arrays) -> tuple[Arrays, Arrays]:
    return target, point


def apart_from(blocks: Sequence[Block], others: Sequence[Part[Any]]) -> tuple[Block, ...]:
    """The blocks that no part of `others` moves; all blocks if they move every one.

    Args:
      blocks: the blocks of one part.
      others: other parts.
    """
    apart = tuple(b for b in blocks if not any(overlap(b, x) for other in others for x in other.blocks))
    return apart or tuple(blocks)


# Constants: conjugate gradients -------------------------------------------------------------------------


_MOST_STEPS = 200  # a bound on conjugate gradient steps, which usually end long before
_MOST_ROUNDS, _MOST_HALVINGS = 50, 10  # Gauss–Newton steps for a user's gauge, and halvings of each step


def _plus(a: Any, factor: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: x + factor * y, a, b)


# Permutations: gains of all pairs -----------------------------------------------------------------------


def _gains_after(
    part: Permutation,
    inside: Sequence[Part[Any]],
    outside: Sequence[Part[Any]],
    blocks: Sequence[Block],
    target: Arrays,
    point: Arrays,
) -> jax.Array:
    """Inner products of all pairs of units, each after the elements of `inside` that bring this pair nearest.

    Args:
      part: the permutation.
      inside: parts with an element per unit, such as rotations of heads.
      outside: other parts whose elements are not known yet.
      blocks: the permutation's blocks that parts of `inside` move.
      target: leaf path → array.
      point: leaf path → array.

    Returns:
      (*shape, unit of the target, unit of the point).
    """
    size, numbers, columns = part.size, np.arange(part.size), []
    for offset in range(size):  # compares unit i of the target with unit i + offset of the point, for all i at once
        turn = jnp.broadcast_to(jnp.asarray(np.roll(numbers, -offset), jnp.int32), (*part.shape, size))
        moved = part.act(turn, point)
        for other in inside:
            moved = other.act(nearest(other, target, moved, outside), moved)
        columns.append(sum(part.total(block, target[block.path] * moved[block.path]) for block in blocks))
    gains = jnp.stack(columns, -1)  # (…, unit of the target, offset)
    order = (numbers[None, :] - numbers[:, None]) % size
    return jnp.take_along_axis(gains, jnp.broadcast_to(jnp.asarray(order), gains.shape), -1)


# Scales: one variable per channel -----------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=3)
def _nearest_factors(
    up: tuple[jax.Array, jax.Array], down: tuple[jax.Array, jax.Array], degree: jax.Array, signed: bool
) -> jax.Array:
    """The α per channel that minimizes A·α² − 2B·α + C·α⁻²ᵖ − 2E·α⁻ᵖ; 1 where there is no minimum.

    Args:
      up: A, the sum of squares of the `up` blocks, and B, the sum of their products with the target; per channel.
      down: C and E, the same sums of the `down` blocks.
      degree: p.
      signed: whether α may be negative. A negative α is found as −|α|, by changing the signs of B and E.
    """
    (a, b), (c, e) = up, down

    def loss(x: jax.Array, sign: float = 1.0) -> jax.Array:
        shrunk = jnp.exp(-degree * x)
        return a * jnp.exp(2.0 * x) - 2.0 * sign * b * jnp.exp(x) + (c * shrunk - 2.0 * sign * e) * shrunk

    def log_ratio(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where((x > 0) & (y > 0), jnp.log(jnp.where(x > 0, x, 1.0) / jnp.where(y > 0, y, 1.0)), 0.0)

    def least(sign: float) -> jax.Array:
        # The first start minimizes the `up` side alone, the second the `down` side alone. The third makes A·α² and
        # C·α⁻²ᵖ equal, as is best for targets near zero.
        sides = log_ratio(sign * b, a), -log_ratio(sign * e, c) / degree
        starts = *sides, log_ratio(c, a) / (2.0 + 2.0 * degree), jnp.zeros_like(a)
        bounded = ((c > 0) | (sign * b > 0)) & ((a > 0) | (sign * e > 0))
        return jnp.where(bounded, least_point(functools.partial(loss, sign=sign), starts), 0.0)

    positive = least(1.0)
    if not signed:
        return jnp.exp(positive)
    negative = least(-1.0)
    return jnp.where(loss(negative, -1.0) < loss(positive), -jnp.exp(negative), jnp.exp(positive))


def least_point(loss: Callable[[jax.Array], jax.Array], starts: Sequence[jax.Array]) -> jax.Array:
    """Minimizes functions of one variable, one per channel.

    First it compares values on evenly spaced points, then it finds the zero of the slope near the best by bisection.

    Args:
      loss: maps an array with the shape of each of `starts` to the values of the functions, entry by entry.
      starts: points near which the least value is expected, 0 among them. The search spans them, and 1 on each side.

    Returns:
      The minimizers, with the shape of each of `starts`; 0 where no point with a lower loss than that at 0 was found.
    """
    slope = jax.grad(lambda x: jnp.sum(loss(x)))
    low, high = jnp.min(jnp.stack(starts), 0) - 1.0, jnp.max(jnp.stack(starts), 0) + 1.0
    grid = low + (high - low) * jnp.linspace(0.0, 1.0, _GRID).reshape(-1, *(1,) * low.ndim).astype(low.dtype)
    best = jnp.argmin(jax.lax.map(loss, grid), 0)
    width = (high - low) / (_GRID - 1)
    left, right = (low + jnp.clip(best + k, 0, _GRID - 1) * width for k in (-1, 1))

    def halved(_: int, sides: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, right = sides
        middle = 0.5 * (left + right)
        rising = slope(middle) > 0
        return jnp.where(rising, left, middle), jnp.where(rising, middle, right)

    left, right = jax.lax.fori_loop(0, _HALVINGS, halved, (left, right))
    least = 0.5 * (left + right)
    return jnp.where(loss(least) < loss(jnp.zeros_like(least)), least, 0.0)


_GRID, _HALVINGS = 129, 60  # evenly spaced points, and bisections between the neighbours of the best one


# Invertible matrices: Gauss–Newton steps ---------------------------------------------------------------


@jax.jit  # compiled once for all layers
def _nearest_matrix(
    left: jax.Array, left_target: jax.Array, right: jax.Array, right_target: jax.Array
) -> jax.Array:
    """S and S⁻¹, (…, 2, d_h, d_h), at a local minimum of |T_A − A·S|² + |T_B − B·S⁻ᵀ|².

    A and B are the rows of a head's left and right blocks, T_A and T_B those of the target. The minimum is no larger
    than the value at any of the starts. All arguments are (…, d_h, d_h).

    Args:
      left: AᵀA.
      left_target: AᵀT_A.
      right: BᵀB.
      right_target: BᵀT_B.
    """
    eye = jnp.broadcast_to(jnp.eye(left.shape[-1], dtype=left.dtype), left.shape)

    def loss(s: jax.Array, back: jax.Array) -> jax.Array:
        a = s * (matmul(left, s) - 2.0 * left_target)
        b = transpose(back) * (matmul(right, transpose(back)) - 2.0 * right_target)
        total = jnp.sum(a + b, (-2, -1))
        return jnp.where(jnp.isfinite(total), total, jnp.inf)

    def better(one: tuple[jax.Array, jax.Array], two: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lower = (loss(*two) < loss(*one))[..., None, None]
        return jnp.where(lower, two[0], one[0]), jnp.where(lower, two[1], one[1])

    def step(_: int, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        s, back = pair
        # The next S is S·(1 + Z). To first order, with A′ = A·S and B′ = B·S⁻ᵀ, the best Z solves
        # A′ᵀA′·Z + Z·B′ᵀB′ = K, where K (`k`) comes from the differences T_A − A′ and T_B − B′ that are left.
        gram_a, gram_b = matmul(transpose(s), matmul(left, s)), matmul(matmul(back, right), transpose(back))
        k = matmul(transpose(s), left_target) - gram_a - transpose(matmul(back, right_target) - gram_b)
        (a, u), (b, v) = symmetric_eigen(gram_a), symmetric_eigen(gram_b)
        inside = safe_divide(matmul(matmul(transpose(u), k), v), a[..., :, None] + b[..., None, :])
        z, best = matmul(matmul(u, inside), transpose(v)), pair
        for length in _LENGTHS:
            more = eye + length * z
            best = better(best, (matmul(s, more), matmul(inverse(more), back)))
        return best

    pair = eye, eye
    for start in (solve(left, left_target), transpose(inverse(solve(right, right_target)))):
        pair = better(pair, (start, inverse(start)))
    return jnp.stack(jax.lax.fori_loop(0, _STEPS, step, pair), -3)


_LENGTHS = (1.0, 0.5, 0.2, 0.05, 0.01)  # the lengths that the line search of a step compares
_STEPS = 20  # Gauss–Newton steps
