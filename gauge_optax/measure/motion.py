"""How far a trajectory has moved along the orbits.

Here: the drift of gauge coordinates between two points, and the vertical part of one step as a group logarithm.
Scales and shifts have a coordinate, so two points are enough. A rotation has none: horizontal motion round a closed
loop turns a head (holonomy), so its drift is the sum over steps of `vertical_motion`. docs/design.md §2.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import gauge_optax.slice as slices
from gauge_optax.gauges._head import PLANE, HeadInstance
from gauge_optax.gauges._linear import LinearInstance, LinearReading
from gauge_optax.gauges.base import Element, Gauge, Gauges
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

_SMALL = 0.1
_CAYLEY_STEPS = 6  # each leaves the square of the half angle, 1e-2 at most
_LAST_ORDER = 13


def drift(params_0: Any, params_t: Any, gauges: Gauges) -> tuple[Element, ...]:
    """Difference of what the anchors of two points read.

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
      its angles; `rope_linear`: the change of the log-modulus, and these. `head_linear`: to first order alone, the Z of
      the vertical part (A·Z, −B·Zᵀ), d_h × d_h.

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
    on = slices.chart(group, params)
    frame = slices.read(on, params, turning=False)  # heads in the basis they have
    into = slices.motions(on, frame)
    here, there = (slices.enter(into, on.joint.values(x)) for x in (params, after))
    stretches, turns = _read_turns(on, here, there, _logarithm)
    generators = {
        i: _generator(stretches[i], turns[LinearReading(i).turned], element[i.key], inverse[i.key])
        for (_, bound), element, inverse in zip(on.parts, frame.element, frame.inverse, strict=True)
        for i in bound.linear
    }
    read = jax.tree.map(jnp.subtract, slices.read(on, after, turning=False).element, frame.element)
    moved = (shift or own for shift, own in zip(drift(params, after, group), read, strict=True))
    return tuple(_motion(part, params, own, turns, generators) for part, own in zip(group.parts, moved, strict=True))


def small_turns(on: Chart, point: Arrays, tangent: Arrays) -> dict[HeadInstance, jax.Array]:
    """The skew logarithms of `vertical_motion`, (*named, d, d), of a slice step that turns heads by under 0.1.

    Args:
      on: the product on its tree.
      point: bound leaves of a slice point, heads in the basis they have.
      tangent: bound leaves of the step.
    """
    there = slices.SlicePoint({path: x + tangent[path] for path, x in point.items()})

    def logarithm(gram: jax.Array, step: jax.Array) -> jax.Array:
        return _near_logarithm(gram + symmetric(step), skew(step))

    return _read_turns(on, slices.SlicePoint(point), there, logarithm)[1]


def _read_turns(
    on: Chart,
    here: slices.SlicePoint,
    there: slices.SlicePoint,
    logarithm: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[dict[LinearInstance, jax.Array], dict[HeadInstance, jax.Array]]:
    """By how much heads are stretched and turned between two points near the slice."""
    stretches, straight = {}, dict(there)
    for reading in map(LinearReading, on.joint.linear):
        everywhere = jnp.ones(reading.shape, bool)
        stretches[reading.instance], _ = reading.read(reading.anchors[0], dict(there), everywhere, near=True)
        straight |= reading.divide(stretches[reading.instance], straight)
    heads = tuple({**dict.fromkeys(on.joint.rotations), **{LinearReading(i).turned: None for i in on.joint.linear}})
    change = slices.between(here, slices.SlicePoint(straight))
    products = [h.gram(here, here) for h in heads], [h.gram(here, change) for h in heads]
    return stretches, dict(zip(heads, in_turn(logarithm, *products), strict=True))


def _generator(stretch: jax.Array, turn: jax.Array, element: jax.Array, inverse: jax.Array) -> jax.Array:
    """Z of (A·Z, −B·Zᵀ): what the anchor reads, and the turn; A = Â·S, so that Â·Z·S is A·(S⁻¹·Z·S)."""
    symmetric_part = stretch[..., 0, :, :] - jnp.eye(turn.shape[-1], dtype=turn.dtype)
    return matmul(matmul(inverse, symmetric_part + turn), element)


def _motion(
    part: Gauge,
    params: Any,
    moved: Element,
    turns: dict[HeadInstance, jax.Array],
    generators: dict[LinearInstance, jax.Array],
) -> Element:
    bound = part.bound(params)
    angles = {h.key: turns[h][..., 0, 1] if h.named[-1:] == (PLANE,) else turns[h] for h in bound.rotations}
    if bound.scales and bound.rotations:  # complex numbers
        return {key: jnp.stack([moved[key][..., 0], x], -1) for key, x in angles.items()}
    return angles or {i.key: generators[i] for i in bound.linear} or moved


def _logarithm(gram: jax.Array, step: jax.Array) -> jax.Array:
    """log of the polar factor of M + S; from skew(S) where the step is small, so that float32 keeps its digits."""
    near = _near_logarithm(gram + symmetric(step), skew(step))
    u, _, vt = jnp.linalg.svd(gram + step, full_matrices=False)
    small = jnp.linalg.norm(step, axis=(-2, -1)) < _SMALL * jnp.linalg.norm(gram, axis=(-2, -1))
    return jnp.where(small[..., None, None], near, orthogonal_logarithm(matmul(u, vt)))


def _near_logarithm(even: jax.Array, odd: jax.Array) -> jax.Array:
    """log of the polar factor of Y + K, Y symmetric and K small and skew, without Y's digits in the way.

    With the factor (1 + C)(1 − C)⁻¹, that its product with Y + K be symmetric reads Y·C + C·Y = K + C·K·C.
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
