"""The element of one gauge that takes a point nearest to a target: what alignment asks of each kind of gauge.

For one gauge, given all others, the nearest element has a closed form or is a small problem: Procrustes for rotations,
an assignment for permutations, one variable per channel for scales, Gauss–Newton steps for invertible matrices. What
remains are additions of constants, which are affine in their element: the default solves their normal equations.
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
from gauge_optax.gauges.by_action import ActionInstance
from gauge_optax.gauges.instance import Arrays, Instance
from gauge_optax.gauges.linear import Linear
from gauge_optax.gauges.permutation import Permutation
from gauge_optax.gauges.residual import ResidualRotation, SignedRotation
from gauge_optax.gauges.rope_linear import ComplexScale
from gauge_optax.gauges.rotation import Rotation
from gauge_optax.gauges.scale import Scale
from gauge_optax.gauges.torus import Torus
from gauge_optax.linalg import (
    inverse,
    matmul,
    orthogonal_factor,
    real_dtype,
    safe_divide,
    solve,
    symmetric_eigen,
    transpose,
)
from gauge_optax.orbit.renumber import assigned, renumbers, unit_totals


@functools.singledispatch
def nearest(instance: Instance, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> Any:
    """The element e for which act(e, point) is nearest to `target`: the least sum of squares over moved leaves.

    Args:
      instance: the instance whose element it is.
      target: leaves.
      point: leaves.
      others: instances whose elements are not known yet. The answer should depend on theirs as little as possible:
        blocks that they move are left out where others remain.

    The default is for actions that are affine in e, the additions of constants: it solves the normal equations by
    conjugate gradients.
    """
    paths = instance.paths

    def moved(e: Any) -> Arrays:
        after = instance.act(e, point)
        return {path: after[path] for path in paths}

    start = instance.identity()
    at_start, linear = jax.linearize(moved, start)  # a difference of two moves would lose small directions
    _, pull = jax.vjp(moved, start)

    def inner(a: Any, b: Any) -> jax.Array:
        return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)), jnp.zeros(()))

    residual = direction = pull({path: target[path] - at_start[path] for path in paths})[0]
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
def _nearest_scale(instance: Scale, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> jax.Array:
    """The least |T_up − α·up|² + |T_down − down/α^p|², a problem in one variable per channel."""

    def paired(side: tuple[Block, ...]) -> tuple[jax.Array, jax.Array]:
        """Sums over one side, per channel: squares of the point, and products of both."""
        zero = jnp.zeros(instance.shape, real_dtype())
        squares = (b.total(instance.named, jnp.square(point[b.path])) for b in side)
        products = (b.total(instance.named, point[b.path] * target[b.path]) for b in side)
        return sum(squares, zero), sum(products, zero)

    return _nearest_log(paired(instance.up), paired(instance.down), jnp.asarray(instance.degree, real_dtype()))


@nearest.register
def _nearest_complex_scale(
    instance: ComplexScale, target: Arrays, point: Arrays, others: Sequence[Instance] = ()
) -> jax.Array:
    """For every modulus the best angle is known, which leaves one variable per plane."""
    sides = [dataclasses.replace(instance.turn, blocks=side) for side in (instance.up, instance.down)]
    grams = [side.gram(point, target) for side in sides]
    squares = [side.sums({path: jnp.square(point[path]) for path in side.paths}) for side in sides]
    return _nearest_pair(*squares, *grams)


@nearest.register
def _nearest_rotation(instance: Rotation, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> jax.Array:
    """The polar factor of the cross-moment WᵀT (orthogonal Procrustes)."""
    seen = dataclasses.replace(instance, blocks=apart_from(instance.blocks, others))
    return orthogonal_factor(seen.gram(point, target))


@nearest.register
def _nearest_angles(instance: Torus, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> jax.Array:
    """Procrustes in two dimensions: the angle of every plane's cross-moment."""
    seen = dataclasses.replace(instance, blocks=apart_from(instance.blocks, others))
    gram = seen.gram(point, target)
    return jnp.arctan2(gram[..., 0, 1] - gram[..., 1, 0], gram[..., 0, 0] + gram[..., 1, 1])


@nearest.register
def _nearest_stream_rotation(
    instance: ResidualRotation, target: Arrays, point: Arrays, others: Sequence[Instance] = ()
) -> SignedRotation:
    """Procrustes over readers and writers, each side with its own norm scales divided out.

    With scales of norms that are not 1, this is the nearest element of the divided weights, not of the stored ones.
    """
    seen = dataclasses.replace(instance, blocks=apart_from(instance.blocks, others))
    inside = (instance.scaled(x, instance.gammas(x)) for x in (point, target))
    matrix = orthogonal_factor(instance.restricted(seen.gram(*inside)))
    return instance.from_element(instance.whole(matrix))


@nearest.register
def _nearest_linear(instance: Linear, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> jax.Array:
    """From the best of four starts, Gauss–Newton steps with a line search.

    The starts are the identity, the least-squares solutions of either side alone, and the rotation of both.
    """
    left, right = instance.left, instance.right
    turn = nearest(instance.turn, target, point, others)
    return _nearest_matrix(
        left.gram(point, point), left.gram(point, target), right.gram(point, point), right.gram(point, target), turn
    )


@nearest.register
def _nearest_permutation(
    instance: Permutation, target: Arrays, point: Arrays, others: Sequence[Instance] = ()
) -> jax.Array:
    """An assignment. Heads are compared after the rotation, among `others`, that suits each pair of them best."""
    inside = [other for other in others if renumbers(instance, other)]
    outside = [other for other in others if other not in inside]
    blocks = apart_from(instance.blocks, outside)
    plain = [block for block in blocks if not any(overlap(block, x) for other in inside for x in other.blocks)]
    gains = jnp.zeros((*instance.shape, instance.size, instance.size), real_dtype())
    for block in plain:
        gains = gains + matmul(_units(instance, block, target), transpose(_units(instance, block, point)))
    turned = [block for block in blocks if block not in plain]
    if turned:
        gains = gains + _gains_after(instance, inside, outside, turned, target, point)
    return assigned(instance, gains)


@nearest.register
def _nearest_by_action(instance: ActionInstance, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> Any:
    """The element that takes the point's reading to the target's: the nearest one, if both are of one function."""
    reading, its_own = (instance.whole.read(instance.tree(x)) for x in (target, point))
    return instance.compose(reading, instance.inverse(its_own))


def apart_from(blocks: Sequence[Block], others: Sequence[Instance]) -> tuple[Block, ...]:
    """The blocks that none of these instances moves; all of them if there is none.

    Args:
      blocks: of one instance.
      others: other instances.
    """
    apart = tuple(b for b in blocks if not any(overlap(b, x) for other in others for x in other.blocks))
    return apart or tuple(blocks)


# Constants: conjugate gradients -------------------------------------------------------------------------


_MOST_STEPS = 200  # of conjugate gradients, which end long before


def _plus(a: Any, factor: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: x + factor * y, a, b)


# Permutations: gains of all pairs -----------------------------------------------------------------------


def _units(instance: Permutation, block: Block, point: Arrays) -> jax.Array:
    """A block with one row per unit, (*shape, size, entries)."""
    view, kept = block.view(point[block.path]), (*instance.named, instance.axis)
    free = [k for k, label in enumerate(block.labels) if label not in kept]
    ordered = view.transpose([*(block.labels.index(name) for name in kept), *free])
    return ordered.reshape(*instance.shape, instance.size, -1)


def _gains_after(
    instance: Permutation,
    inside: Sequence[Instance],
    outside: Sequence[Instance],
    blocks: Sequence[Block],
    target: Arrays,
    point: Arrays,
) -> jax.Array:
    """Inner products of all pairs, each after the moves of `inside` that take the one nearest to the other."""
    size, numbers, columns = instance.size, np.arange(instance.size), []
    for offset in range(size):  # every unit of the target beside the one that stands `offset` places on
        turn = jnp.broadcast_to(jnp.asarray(np.roll(numbers, -offset), jnp.int32), (*instance.shape, size))
        moved = instance.act(turn, point)
        for other in inside:
            moved = other.act(nearest(other, target, moved, outside), moved)
        columns.append(sum(unit_totals(instance, block, target[block.path] * moved[block.path]) for block in blocks))
    gains = jnp.stack(columns, -1)  # (…, unit of the target, offset)
    order = (numbers[None, :] - numbers[:, None]) % size
    return jnp.take_along_axis(gains, jnp.broadcast_to(jnp.asarray(order), gains.shape), -1)


# Scales: one variable per channel -----------------------------------------------------------------------


@jax.jit
def _nearest_log(up: tuple[jax.Array, jax.Array], down: tuple[jax.Array, jax.Array], degree: jax.Array) -> jax.Array:
    """The logs x that minimise A·e²ˣ − 2B·eˣ + C·e⁻²ᵖˣ − 2E·e⁻ᵖˣ, for (A, B) and (C, E); 0 where no x is least."""
    (a, b), (c, e) = up, down

    def loss(x: jax.Array) -> jax.Array:
        return a * jnp.exp(2.0 * x) - 2.0 * b * jnp.exp(x) + (c * jnp.exp(-degree * x) - 2.0 * e) * jnp.exp(-degree * x)

    def log_ratio(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where((x > 0) & (y > 0), jnp.log(jnp.where(x > 0, x, 1.0) / jnp.where(y > 0, y, 1.0)), 0.0)

    # Each side alone has its least value at the first two; where the sides disagree most, both shrink to balance.
    starts = log_ratio(b, a), -log_ratio(e, c) / degree, log_ratio(c, a) / (2.0 + 2.0 * degree), jnp.zeros_like(a)
    bounded = ((c > 0) | (b > 0)) & ((a > 0) | (e > 0))
    return jnp.where(bounded, least_point(loss, starts), 0.0)


def least_point(loss: Callable[[jax.Array], jax.Array], starts: Sequence[jax.Array]) -> jax.Array:
    """Where a function of one variable per channel is least: on a grid around some points, then by bisection.

    Args:
      loss: entry by entry, from an array of the shape of each of `starts` to one of that shape.
      starts: points near which the least value is expected; 0 among them.

    Returns:
      The point; 0 where no point found is lower.
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


@jax.jit
def _nearest_pair(a: jax.Array, c: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    """The element (x, φ) that minimises a·e²ˣ − 2·Re(e^(x − iφ)·l) + c·e⁻²ˣ − 2·Re(e^(−x − iφ)·r), per plane.

    Args:
      a: squared norms of the left side.
      c: those of the right side.
      left: cross-moments with the target, (…, 2, 2), which hold l: its real part on the diagonal.
      right: those of the right side, r.
    """
    (l_re, l_im), (r_re, r_im) = ((x[..., 0, 0] + x[..., 1, 1], x[..., 0, 1] - x[..., 1, 0]) for x in (left, right))

    def at(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.exp(x) * l_re + jnp.exp(-x) * r_re, jnp.exp(x) * l_im + jnp.exp(-x) * r_im

    def loss(x: jax.Array) -> jax.Array:
        re, im = at(x)
        return a * jnp.exp(2.0 * x) + c * jnp.exp(-2.0 * x) - 2.0 * jnp.sqrt(re * re + im * im + _TINY)

    sizes = jnp.sqrt(l_re**2 + l_im**2), jnp.sqrt(r_re**2 + r_im**2)
    ratios = (sizes[0], a), (c, sizes[1])
    starts = [jnp.where((x > 0) & (y > 0), jnp.log(safe_divide(x, y) + (x <= 0) + (y <= 0)), 0.0) for x, y in ratios]
    logs = jnp.where((a > 0) & (c > 0), least_point(loss, (*starts, jnp.zeros_like(a))), 0.0)
    re, im = at(logs)
    return jnp.stack([logs, jnp.arctan2(im, re)], -1)


_GRID, _HALVINGS = 129, 60
_TINY = 1e-30  # under the root, so that its derivative is finite where both cross-moments are zero


# Invertible matrices: Gauss–Newton steps ---------------------------------------------------------------


@jax.jit  # compiled once for all layers
def _nearest_matrix(
    left: jax.Array, left_target: jax.Array, right: jax.Array, right_target: jax.Array, turn: jax.Array
) -> jax.Array:
    """S and S⁻¹ that make |T_A − A·S|² + |T_B − B·S⁻ᵀ|² least, (…, 2, d_h, d_h); no start is lower.

    Args:
      left: AᵀA.
      left_target: AᵀT_A.
      right: BᵀB.
      right_target: BᵀT_B.
      turn: the rotation that serves as a start.
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
        # With A′ = A·S and B′ = B·S⁻ᵀ, and S·(1 + Z) in place of S: H_A′·Z + Z·H_B′ = K to first order.
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
    starts = solve(left, left_target), transpose(inverse(solve(right, right_target))), turn
    for start in starts:
        pair = better(pair, (start, inverse(start)))
    return jnp.stack(jax.lax.fori_loop(0, _STEPS, step, pair), -3)


_LENGTHS = (1.0, 0.5, 0.2, 0.05, 0.01)
_STEPS = 20
