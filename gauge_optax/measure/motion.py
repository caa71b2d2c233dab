"""How far a trajectory has moved along the orbits.

The position along the orbit of a scale or shift has a coordinate, so that `drift` needs only two points. That of a
rotation has none: a series of horizontal steps can return to its start, except that a head is rotated (holonomy). For
rotations, sum `vertical_motion` over the steps instead: it is the vertical part of one step, as a logarithm in the
group. docs/design.md §2.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, SequenceKey

from gauge_optax.binding import leaves_by_path
from gauge_optax.gauges.bound import Bound, require_nonzero_norms
from gauge_optax.gauges.copies import Copy
from gauge_optax.gauges.gauge import Element, Gauges, product
from gauge_optax.gauges.linear import Linear
from gauge_optax.gauges.rope_linear import ComplexScale
from gauge_optax.gauges.rotation import HeadRotation
from gauge_optax.gauges.torus import Torus
from gauge_optax.linalg import (
    eigenvalue_cutoff,
    inverse_pair_sums,
    matmul,
    matrix_exponential,
    near_power_of_two,
    orthogonal_logarithm,
    skew,
    svd,
    symmetric,
    symmetric_eigen,
    transpose,
)
from gauge_optax.orbit._align import check_same_tree
from gauge_optax.parts.heads import PLANE
from gauge_optax.parts.part import Arrays, Part, moves
from gauge_optax.parts.sizes import Stretch
from gauge_optax.parts.stream import Stream
from gauge_optax.slice import Elements, Slice
from gauge_optax.transformation import on_any_mesh, stepped

_SMALL = 0.1  # angle up to which `_near_logarithm` converges to the precision of float64
_WRONG = 1e-3  # a matrix whose exponential is this far from a rotation is no logarithm of it
_CAYLEY_STEPS = 6  # rounds; each multiplies the error by about the square of half the angle, a factor of at most 1e-2
_LAST_ORDER = 13  # the series of 2·artanh is summed up to this order; its argument is at most 0.05


class Drift(tuple[Element, ...]):
    """The result of `drift`: a tuple with one element per gauge, which prints as a table of the largest changes.

    It is a pytree, so that a jitted function may return it.

    Attributes:
      names: per gauge, (its description, ((key of a copy, names of the copy's axes), …)).
    """

    names: tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...]

    def __new__(cls, elements: Sequence[Element], names: Any) -> "Drift":
        """Makes a tuple of the elements, with the attribute `names`."""
        self = super().__new__(cls, elements)
        self.names = names
        return self

    def __getnewargs__(self) -> tuple[tuple[Element, ...], Any]:
        """The arguments with which `copy` and `pickle` call `__new__`."""
        return tuple(self), self.names

    def __repr__(self) -> str:
        if not all(hasattr(x, "__array__") and not isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self)):
            return super().__repr__()  # inside `jit`, or a tree of shapes, there are no numbers to print
        rows = [("gauge", "layer", "largest drift", "where")]
        for (gauge, axes_by_key), element in zip(self.names, self, strict=True):
            first, *others = gauge.split(", ")
            rows += [(f"{first}, …)" if others else gauge, *row) for row in _largest_drifts(element, dict(axes_by_key))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join(lines)


jax.tree_util.register_pytree_with_keys(
    Drift,
    lambda drift: ([(SequenceKey(number), element) for number, element in enumerate(drift)], drift.names),
    lambda names, elements: Drift(tuple(elements), names),
)


def _largest_drifts(element: Element, axes_by_key: dict[str, tuple[str, ...]]) -> list[tuple[str, str, str]]:
    """Returns rows (layer, largest change, its place) for printing, one for each array in the drift of one gauge."""
    rows = []
    for keys, array in jax.tree.leaves_with_path(element):
        key = keys[0].key if keys and isinstance(keys[0], DictKey) else None
        array, axes = np.asarray(array), axes_by_key.get(str(key), ())
        if not array.size:
            continue
        # `argmax` treats NaN as the largest number, so that a NaN is shown.
        at = np.unravel_index(int(np.argmax(np.abs(array))), array.shape)
        names = axes if len(axes) == array.ndim else ("entry",) * array.ndim
        leaf = [jax.tree_util.keystr(keys[1:], simple=True, separator="/")] if len(keys) > 1 else []
        where = ", ".join([*leaf, *(f"{name} {index}" for name, index in zip(names, at, strict=True))])
        rows.append(("" if key is None else str(key), f"{array[at]:.2e}", where))
    return rows or [("", "", "no coordinate: sum measure.vertical_motion over the steps")]


@on_any_mesh
def drift(params_0: Any, params_t: Any, gauges: Gauges) -> Drift:
    """Returns the difference of two points in the log-scales and shifts that are read from their anchors.

    Args:
      params_0: parameters before.
      params_t: parameters after, same structure.
      gauges: a gauge or a sequence of them.

    Returns:
      A tuple with one element per gauge: the differences of log-scales and shifts; empty dicts for rotations and linear
      gauges. Printed, it is a table with a row per gauge and layer, which shows the entry of largest magnitude and its
      channel. Inside `jit` it is an ordinary pytree.

    Raises:
      ValueError: trees that differ in structure or shapes; bindings that do not fit the tree.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    >>> moved = gauge.act({"": jnp.array([0.0, -0.5, 0.1])}, params)
    >>> drift = go.measure.drift(params, moved, gauge)
    >>> drift
    gauge             layer  largest drift  where
    rescale('up', …)         -5.00e-01      channel 1
    >>> [round(float(x), 3) for x in drift[0][""]]
    [0.0, -0.5, 0.1]
    """
    check_same_tree("drift", params_0, params_t)
    group = product(gauges)
    for params in (params_0, params_t):
        require_nonzero_norms("drift", group._bound(params).whole, leaves_by_path(params))
    elements = jax.tree.map(jnp.subtract, group.coordinates(params_t), group.coordinates(params_0))
    b = group._bound(params_0)
    names = tuple(
        (gauge._description, tuple((copy.key, copy.named) for copy in copies))
        for gauge, copies in zip(b.gauges, b.copies, strict=True)
    )
    return Drift(elements, names)


@on_any_mesh
def vertical_motion(params: Any, update: Any, gauges: Gauges) -> tuple[Element, ...]:
    """Returns how far one step moves along the orbits, as a logarithm in the group, which may be summed over steps.

    Args:
      params: the point before the step.
      update: the difference θ_new − θ, a tree like `params`.
      gauges: a gauge or a sequence of them.

    Returns:
      One entry per gauge, in the structure of its element.

      * Scales and shifts: the change of the log-scale or shift that is read from their anchors.
      * Rotations: in slice coordinates, let W be a head's rows before the step and W + U those after it. The entry is
        the skew logarithm of the rotation that brings W nearest to W + U (the polar factor of Wᵀ(W + U)). To first
        order it is the A of the step's vertical part W·A. It is zero for a horizontal step, as long as WᵀW + WᵀU stays
        positive. It is NaN where the polar factor has the determinant −1, or turns some plane by π: only a step about
        as long as the rows in that plane can do that.
      * Rotation of the residual stream: the same logarithm, for the rows from which the rotation is read.
      * Tori: the angle of that rotation in each plane. `rope_linear`: per plane, the change of the logarithm of the
        modulus, and the angle.
      * `head_linear`, with the factors A and B: the matrix Z, d_h × d_h, of the step's vertical part (A·Z, −B·Zᵀ). This
        is correct to first order only.

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
    b, after = group._bound(params), stepped(group, params, update)
    s = b.slice
    for point in (params, after):
        require_nonzero_norms("vertical_motion", s, leaves_by_path(point))
    # Turning is measured in the stored basis of heads, so that the frame's rotations need not be read.
    values = s.values(params), s.values(after)
    before, now = (s.read(point, turning=False).elements for point in values)
    start, end = (s.enter(before, point).point for point in values)
    found: dict[str, Any] = {}
    for part in s.parts:
        found[part.label], end = along(part, start, end)
    found |= {part.label: turn for part, turn in _turns_of_heads(s, start, end).items()}
    step = Step(before, now, found)
    return b.by_gauge(lambda copy: motion(copy, step))


class Step(NamedTuple):
    """What one step does to each part; all fields are part label → array or element.

    Attributes:
      before: the elements of constants and sizes that are read before the step.
      now: the elements of constants and sizes that are read after the step.
      found: for turns of heads, the skew logarithms of the rotations that the step contains. For parts whose motion
        would disturb the measurement of these rotations, the motion that `along` returns. Both are in the slice
        coordinates of the point before the step.
    """

    before: Elements
    now: Elements
    found: Elements


# What is asked of each kind of gauge ----------------------------------------------------------------------


@functools.singledispatch
def motion(copy: Copy, step: Step) -> Any:
    """The logarithm of a step's motion along the orbit of one copy, in the public structure of an element.

    The default subtracts coordinates; it returns None for a copy without coordinates.

    Args:
      copy: a copy of a gauge.
      step: the motion of the step along all parts.
    """
    pair = [
        copy.coordinate([f[part.label] if part.label in f else part.identity() for part in copy.parts])
        for f in (step.now, step.before)
    ]
    return jax.tree.map(jnp.subtract, *pair)


@motion.register
def _of_rotation(copy: HeadRotation, step: Step) -> Any:
    return step.found[copy.parts[0].label]


@motion.register
def _of_angles(copy: Torus, step: Step) -> Any:
    return step.found[copy.parts[0].label][..., 0, 1]


@motion.register
def _of_complex_numbers(copy: ComplexScale, step: Step) -> Any:
    moduli, angles = (part.label for part in copy.parts)
    change = jnp.log(step.now[moduli]) - jnp.log(step.before[moduli])
    return jnp.stack([change, step.found[angles][..., 0, 1]], -1)


@motion.register
def _of_matrices(copy: Linear, step: Step) -> Any:
    stretch, turn = (part.label for part in copy.parts)
    generator = step.found[stretch][..., 0, :, :] - copy.identity() + step.found[turn]
    # A vertical tangent Â·Z at the slice point is Â·Z·S = A·(S⁻¹·Z·S) at the stored point A = Â·S.
    matrix, inverse = jnp.unstack(step.before[stretch], axis=-3)
    return matmul(matmul(inverse, generator), matrix)


@functools.singledispatch
def along(part: Part[Any], start: Arrays, end: Arrays) -> tuple[Any, Arrays]:
    """Measures how far a step moves along a part, and removes this motion from the end of the step.

    It is called before rotations of heads are measured, because motion along some parts would disturb this measurement.

    Args:
      part: any part. If motion along it does not disturb that measurement, the default applies: it measures and removes
        nothing.
      start: the slice point before the step, path → leaf.
      end: the point after the step, path → leaf.

    Returns:
      The motion (None by default), and the end of the step without it.
    """
    return None, end


@along.register
def _along_stretch(part: Stretch, start: Arrays, end: Arrays) -> tuple[Any, Arrays]:
    stretch, _ = part.read(part.anchors[0], end, jnp.ones(part.shape, bool), near=True)
    return stretch, part.undo(stretch, end)


@along.register
def _along_stream(part: Stream, start: Arrays, end: Arrays) -> tuple[Any, Arrays]:
    rows, (here, there) = part.rows_seen, (part.divided(x, x) for x in (start, end))
    change = {path: there[path] - x for path, x in here.items()}
    gram, step = (part.restricted(rows.gram(here, x)) for x in (here, change))
    turn = _logarithm(*(x.reshape(-1, *x.shape[-2:]) for x in (gram, step))).reshape(gram.shape)
    still = part.embedded(jnp.zeros_like(turn))
    return part.embedded(turn) - still, part.undo(part.embedded(matrix_exponential(turn)), end)


# Turning --------------------------------------------------------------------------------------------------


def turning(b: Bound, point: Arrays, tangent: Arrays) -> tuple[dict[str, jax.Array], ...]:
    """Returns the angle by which a step turns each head; NaN under the conditions that `vertical_motion` states.

    Args:
      b: the gauges.
      point: bound leaves of a slice point, with heads in their stored basis.
      tangent: bound leaves of the step in slice coordinates.

    Returns:
      Per gauge, copy → one angle in radians per head: the root of the sum of the squared angles of its planes.
    """

    end = {path: x + tangent[path] for path, x in point.items()}
    for part, _, _ in b.slice.sizes:
        _, end = along(part, point, end)
    angles = {}
    for turn, generator in _turns_of_heads(b.slice, point, end).items():
        squares = jnp.sum(jnp.square(generator), (-2, -1)) / 2
        angles[turn] = jnp.sqrt(jnp.sum(squares, -1) if turn.named[-1:] == (PLANE,) else squares)
    return tuple(
        {copy.key: angles[part] for copy in copies for part in copy.parts if part in angles} for copies in b.copies
    )


def _turns_of_heads(s: Slice, start: Arrays, end: Arrays) -> dict[Any, jax.Array]:
    """Turn → the skew logarithms, (*named, size, size), of the rotations of its heads from `start` to `end`."""
    found = {}
    for turn in s.heads:
        # Angles do not depend on the size of the rows, whose squares may be no float32.
        size = near_power_of_two(jnp.max(jnp.stack([jnp.max(jnp.abs(start[path])) for path in turn.paths])))
        rows = {path: start[path] / size for path in turn.paths}
        change = {path: end[path] / size - x for path, x in rows.items()}
        found[turn] = _logarithm(turn.rows_seen.gram(rows, rows), turn.rows_seen.gram(rows, change))
        if any(moves(turn, other.rows_seen.blocks) for other in s.heads if other is not turn):
            # Turns of the same rows are measured after this one was undone.
            end = turn.undo(matrix_exponential(found[turn]), end)
    return found


def _logarithm(gram: jax.Array, step: jax.Array) -> jax.Array:
    """The logarithm of the polar factor of WᵀW + WᵀU, for rows W of heads and their change U, (…, size, size).

    Args:
      gram: WᵀW.
      step: WᵀU.
    """
    # A small angle is computed from skew(step): in the sum gram + step it would lose its digits in float32. The size of
    # the step does not show whether the angle is small, because a step that is small compared with the largest rows may
    # turn small rows far. `_near_logarithm` therefore returns a mask of the small angles too.
    near, small = _near_logarithm(gram + symmetric(step), skew(step))
    return jax.lax.cond(jnp.all(small), _as_it_is, _with_large_angles, near, small, gram + step)


# The branches of `cond` are functions of the module. Outside `jit`, JAX would compile nested functions at every call.


def _as_it_is(near: jax.Array, *_: jax.Array) -> jax.Array:
    return near


def _with_large_angles(near: jax.Array, small: jax.Array, matrix: jax.Array) -> jax.Array:
    """`near` where the angles are small, and elsewhere the logarithm of the polar factor of `matrix`."""
    u, _, vt = svd(matrix)
    nearest = matmul(u, vt)
    far = orthogonal_logarithm(nearest)
    # With a determinant of −1, or near half a turn, there is no such logarithm, and `far` is another matrix.
    holds = jnp.linalg.norm(matrix_exponential(far) - nearest, axis=(-2, -1)) < _WRONG
    return jnp.where(small[..., None, None], near, jnp.where(holds[..., None, None], far, jnp.nan))


def _near_logarithm(even: jax.Array, odd: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logarithm of the polar factor of Y + K, for a symmetric Y (`even`) and a small skew K (`odd`).

    Also returns where the angles are small enough for this method, (…,) booleans; elsewhere the logarithm is wrong.

    The polar factor is written as (1 + C)(1 − C)⁻¹ with a skew C. Its transpose times Y + K has to be symmetric, which
    is the equation Y·C + C·Y = K + C·K·C. It is solved by iteration.
    """
    values, vectors = symmetric_eigen(even)
    pairs, odd = inverse_pair_sums(values), skew(matmul(matmul(transpose(vectors), odd), vectors))
    cayley = odd * pairs  # half of the tangents of the angles; if Y is positive, no angle exceeds a quarter turn
    positive = values[..., -1] >= -eigenvalue_cutoff(values.dtype) * values[..., 0]
    small = positive & (jnp.linalg.norm(cayley, axis=(-2, -1)) < 0.5 * _SMALL)
    for _ in range(_CAYLEY_STEPS):
        cayley = skew(odd + matmul(matmul(cayley, odd), cayley)) * pairs
    square = matmul(cayley, cayley)
    total = power = cayley
    for order in range(3, _LAST_ORDER + 1, 2):
        power = matmul(power, square)
        total = total + power / order
    return skew(matmul(matmul(vectors, 2.0 * total), transpose(vectors))), small
