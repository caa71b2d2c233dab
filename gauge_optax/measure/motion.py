"""How far a trajectory has moved along the orbits.

Scales and shifts have a coordinate, so that `drift` needs two points alone. A rotation has none: horizontal motion
around a closed loop turns a head (holonomy). Its drift is the sum of `vertical_motion`, the vertical part of one step
as a group logarithm, over steps. docs/design.md §2.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import gauge_optax.slice as slices
from gauge_optax.gauges._head import PLANE, HeadInstance
from gauge_optax.gauges._linear import LinearInstance, LinearReading
from gauge_optax.gauges.base import Element, Gauges
from gauge_optax.gauges.bound import Arrays
from gauge_optax.gauges.chart import Chart
from gauge_optax.gauges.product import product
from gauge_optax.linalg import (
    inverse_pair_sums,
    matmul,
    orthogonal_logarithm,
    skew,
    symmetric,
    symmetric_eigen,
    transpose,
)
from gauge_optax.xla import in_turn

_SMALL = 0.1  # relative size of a step up to which `_near_logarithm` converges to float64
_CAYLEY_STEPS = 6  # each leaves the square of the half angle, 1e-2 at most
_LAST_ORDER = 13  # of the series of 2·artanh, whose argument is at most 0.05


def drift(params_0: Any, params_t: Any, gauges: Gauges) -> tuple[Element, ...]:
    """The difference between what the anchors of two points read.

    Args:
      params_0: parameters before.
      params_t: parameters after, same structure.
      gauges: a gauge or a sequence of them, meaning their product.

    Returns:
      Per gauge, the structure of its element: log-scales and shifts that carry the first point's representative to the
      second's; empty dicts for rotations and linear gauges.

    Raises:
      ValueError: bindings that do not fit the tree.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 1)), "down": jnp.ones((1, 2))}
    >>> moved = gauge.act({"": jnp.array([0.5])}, params)
    >>> go.measure.drift(params, moved, gauge)[0][""].round(4).tolist()
    [0.5]
    """
    group = product(gauges)
    return jax.tree.map(jnp.subtract, group.coordinates(params_t), group.coordinates(params_0))


def vertical_motion(params: Any, update: Any, gauges: Gauges) -> tuple[Element, ...]:
    """The group logarithm of one step's motion along the orbits; sum it over steps.

    Args:
      params: the point before the step.
      update: θ_new − θ.
      gauges: a gauge or a sequence of them, meaning their product.

    Returns:
      Per gauge, the structure of its element. Scales and shifts: the change of what their anchors read. Rotations: the
      skew logarithm of the rotation that, in slice coordinates, best carries the rows before to those after (polar
      factor of Wᵀ(W + U)), to first order the A of the vertical part W·A, zero for a horizontal step of any size. Tori:
      its angles; `rope_linear`: the change of the log-modulus, and these angles. `head_linear`: to first order alone,
      the Z of the vertical part (A·Z, −B·Zᵀ), d_h × d_h.

    Raises:
      ValueError: bindings that do not fit the tree.

    >>> gauge = go.head_rotation({"w": "_ basis"})
    >>> params = {"w": jnp.array([[1.0, 0.0], [0.0, 2.0]])}
    >>> turned = gauge.act({"": jnp.array([[0.0, 1.0], [-1.0, 0.0]])}, params)
    >>> step = jax.tree.map(jnp.subtract, turned, params)
    >>> round(float(go.measure.vertical_motion(params, step, gauge)[0][""][0, 1]), 3)
    1.571
    """
    group = product(gauges)
    after = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, update)
    chart = slices.chart(group, params)
    # Turning is measured in the basis in which the point is stored, so that its frame need not be read.
    frame = slices.read(chart, params, turning=False)
    into = slices.motions(chart, frame)
    start, end = (slices.enter(into, chart.joint.values(x)) for x in (params, after))
    stretches, turns = _read_turns(chart, start, end, _logarithm)

    changes = jax.tree.map(jnp.subtract, slices.read(chart, after, turning=False).element, frame.element)
    coordinates = drift(params, after, group)  # a shift's is that of the stored leaf, whatever else moves it
    motions: list[Element] = []
    for k, (_, bound) in enumerate(chart.parts):
        motion = coordinates[k] or changes[k]
        if bound.linear:
            motion = {}
            for i in bound.linear:
                turn = turns[LinearReading(i).turned]
                stretch = stretches[i][..., 0, :, :] - jnp.eye(turn.shape[-1], dtype=turn.dtype)
                # A = Â·P with the slice point Â, so that Â·Z·P is A·(P⁻¹·Z·P).
                motion[i.key] = matmul(matmul(frame.inverse[k][i.key], stretch + turn), frame.element[k][i.key])
        elif bound.rotations:
            angles = {h.key: turns[h][..., 0, 1] if _is_plane(h) else turns[h] for h in bound.rotations}
            # A plane that is scaled as well has complex elements: log-modulus and angle.
            scaled = {key: jnp.stack([changes[k][key][..., 0], x], -1) for key, x in angles.items() if bound.scales}
            motion = scaled or angles
        motions.append(motion)
    return tuple(motions)


def turning(chart: Chart, point: Arrays, tangent: Arrays) -> tuple[dict[str, jax.Array], ...]:
    """By how much a step turns every head, for steps that turn by less than 0.1.

    Args:
      chart: the product on its tree.
      point: bound leaves of a slice point, heads in the basis in which they are stored.
      tangent: bound leaves of the step in slice coordinates.

    Returns:
      Per gauge, instance → radians, the root of the sum of squares over planes; one number per head.
    """
    end = slices.SlicePoint({path: x + tangent[path] for path, x in point.items()})

    def logarithm(gram: jax.Array, step: jax.Array) -> jax.Array:
        return _near_logarithm(gram + symmetric(step), skew(step))

    turns = _read_turns(chart, slices.SlicePoint(point), end, logarithm)[1]
    angles: list[dict[str, jax.Array]] = []
    for _, bound in chart.parts:
        heads = {h.key: h for h in bound.rotations} | {i.key: LinearReading(i).turned for i in bound.linear}
        squares = {key: jnp.sum(jnp.square(turns[h]), (-2, -1)) / 2 for key, h in heads.items()}
        angles.append({key: jnp.sqrt(jnp.sum(x, -1) if _is_plane(heads[key]) else x) for key, x in squares.items()})
    return tuple(angles)


def _is_plane(head: HeadInstance) -> bool:
    return head.named[-1:] == (PLANE,)


def _read_turns(
    chart: Chart,
    start: slices.SlicePoint,
    end: slices.SlicePoint,
    logarithm: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[dict[LinearInstance, jax.Array], dict[HeadInstance, jax.Array]]:
    """By how much linear gauges stretch and heads turn between two points near the slice."""
    stretches, unstretched = {}, dict(end)
    for reading in map(LinearReading, chart.joint.linear):
        every_head = jnp.ones(reading.shape, bool)
        stretches[reading.instance], _ = reading.read(reading.anchors[0], dict(end), every_head, near=True)
        unstretched |= reading.divide(stretches[reading.instance], unstretched)
    # Both sides of a linear gauge turn as one head; two gauges with the same head share one entry.
    heads = tuple(dict.fromkeys((*chart.joint.rotations, *(LinearReading(i).turned for i in chart.joint.linear))))
    change = slices.between(start, slices.SlicePoint(unstretched))
    products = [h.gram(start, start) for h in heads], [h.gram(start, change) for h in heads]
    return stretches, dict(zip(heads, in_turn(logarithm, *products), strict=True))


def _logarithm(gram: jax.Array, step: jax.Array) -> jax.Array:
    """log of the polar factor of M + S."""
    # A small step's angle is read from skew(S): as a difference from M it would lose its digits in float32.
    near = _near_logarithm(gram + symmetric(step), skew(step))
    u, _, vt = jnp.linalg.svd(gram + step, full_matrices=False)
    small = jnp.linalg.norm(step, axis=(-2, -1)) < _SMALL * jnp.linalg.norm(gram, axis=(-2, -1))
    return jnp.where(small[..., None, None], near, orthogonal_logarithm(matmul(u, vt)))


def _near_logarithm(even: jax.Array, odd: jax.Array) -> jax.Array:
    """log of the polar factor of Y + K, for Y symmetric and K skew and small.

    With the polar factor (1 + C)(1 − C)⁻¹, the condition that its transpose times Y + K be symmetric reads
    Y·C + C·Y = K + C·K·C.
    """
    values, vectors = symmetric_eigen(even)
    pairs, odd = inverse_pair_sums(values), skew(matmul(matmul(transpose(vectors), odd), vectors))
    cayley = odd * pairs
    for _ in range(_CAYLEY_STEPS):
        cayley = skew(odd + matmul(matmul(cayley, odd), cayley)) * pairs
    square = matmul(cayley, cayley)
    total = power = cayley
    for order in range(3, _LAST_ORDER + 1, 2):
        power = matmul(power, square)
        total = total + power / order
    return skew(matmul(matmul(vectors, 2.0 * total), transpose(vectors)))
