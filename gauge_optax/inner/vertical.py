"""Motion along orbits, for losses that hold a penalty: every coordinate by momentum, or by an Adam of its own.

Coordinates are log α of a scale channel, what a shift adds to a leaf, and the turning of a head, which has one
variance.

Here: slopes along orbits and the tangents that go down them. Not here: motion across (`ddc`). Reference: DDC B.1–B.4,
`vertical_mode`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.gauges._head import HeadInstance
from gauge_optax.gauges._shift import add_slice
from gauge_optax.gauges.chart import Chart, turning_removed
from gauge_optax.gauges.reading import Anchored, Arrays
from gauge_optax.inner.adam import Adam
from gauge_optax.linalg import noise, real_dtype, skew

VERTICAL = ("frozen", "sgd", "adam")


class Moments(NamedTuple):
    """A number per orbit coordinate.

    Attributes:
      scales: per reading.
      shifts: by leaf, a slice of it.
      turning: by leaf; of second moments by head.
    """

    scales: Any
    shifts: Any
    turning: Any


class VerticalMoments(NamedTuple):
    """Moments of orbit coordinates; empty where they are frozen, `second` where momentum alone moves them.

    Attributes:
      first: first moments: of scales, reading by reading; of shifts, by leaf; of what turns heads, by leaf.
      second: second moments: of scales and shifts the same, of turning one per head.
    """

    first: Moments | tuple[()]
    second: Moments | tuple[()]


def init_vertical(on: Chart, mode: str, point: Arrays) -> VerticalMoments:
    """At a starting point."""
    if mode == "frozen":
        return VerticalMoments((), ())
    slopes = _slopes(on, point, point)
    first: Moments = jax.tree.map(jnp.zeros_like, slopes)
    if mode != "adam":
        return VerticalMoments(first, ())
    heads = {str(k): jnp.zeros(h.shape, real_dtype()) for k, h in enumerate(on.joint.rotations)}
    return VerticalMoments(first, jax.tree.map(jnp.zeros_like, slopes._replace(turning=heads)))


def vertical_step(
    on: Chart, mode: str, adam: Adam, point: Arrays, gradient: Arrays, past: VerticalMoments
) -> tuple[Arrays, VerticalMoments]:
    """A tangent along the orbit, and the new moments.

    Args:
      on: the product on its tree.
      mode: "sgd" or "adam".
      adam: hyperparameters.
      point: bound leaves.
      gradient: of this step.
      past: moments so far.
    """
    slopes = _slopes(on, point, gradient)
    mu: Moments = jax.tree.map(adam.first, slopes, past.first)
    nu, rates = past.second, jax.tree.map(adam.mean, mu, slopes)
    if isinstance(nu, Moments):
        seen = jax.tree.map(jnp.square, slopes)
        nu = jax.tree.map(adam.second, seen._replace(turning=_by_head(on, seen.turning)), nu)
        roots = jax.tree.map(adam.root, nu)
        whole = jax.tree.map(jnp.divide, rates._replace(turning=0.0), roots._replace(turning=1.0))
        rates = whole._replace(turning=_over(on, rates.turning, roots.turning))
    out = {p: jnp.zeros_like(x) for p, x in point.items()} | rates.turning
    for reading, rate in zip(on.anchored, rates.scales, strict=True):
        _, along = jax.jvp(lambda e, r=reading: _moved(r, point, e), (reading.identity(),), (rate,))
        out |= {p: out[p] + x for p, x in along.items()}
    for shifted in on.joint.shift_blocks:
        out[shifted.path] = add_slice(shifted, out[shifted.path], rates.shifts[shifted.path])
    return out, VerticalMoments(mu, nu)


def _slopes(on: Chart, point: Arrays, gradient: Arrays) -> Moments:
    """The gradient along every orbit; zero where that is what arithmetic leaves of an invariant loss."""
    sizes = {p: jnp.abs(point[p] * x) for p, x in gradient.items()}
    scales = []
    for reading in on.anchored:
        out, pull = jax.vjp(functools.partial(_moved, reading, point), reading.identity())
        size = sum((b.total(reading.named, sizes[b.path]) for b in reading.moved), start=jnp.zeros(()))
        scales.append(_above(pull({p: gradient[p] for p in out})[0], size) / reading.log_step**2)
    largest = on.joint.shift_means({p: jnp.abs(x) for p, x in gradient.items()})
    shifts = {p: _above(x, largest[p]) for p, x in on.joint.shift_means(gradient).items()}
    across = turning_removed(on, point, gradient)
    turning = {p: gradient[p] - across[p] for h in on.joint.rotations for p in h.paths}
    live = {str(k): _turns(h, point, gradient).astype(real_dtype()) for k, h in enumerate(on.joint.rotations)}
    return Moments(tuple(scales), shifts, _times(on, turning, live))


def _by_head(on: Chart, values: Arrays) -> Arrays:
    """Means over heads, by the number of their instance."""
    return {str(k): h.mean(values) for k, h in enumerate(on.joint.rotations)}


def _over(on: Chart, turning: Arrays, roots: Arrays) -> Arrays:
    return _times(on, turning, {k: 1.0 / x for k, x in roots.items()})


def _times(on: Chart, turning: Arrays, factors: Arrays) -> Arrays:
    """Leaves of heads times a number per head."""
    out = dict(turning)
    for k, head in enumerate(on.joint.rotations):
        spread = jnp.broadcast_to(factors[str(k)][..., None], (*head.shape, head.size))
        for block in head.blocks:
            path = block.block.path
            out[path] = block.write(out[path], block.view(out[path]) * head.along_basis(block, spread))
    return out


def _above(slope: jax.Array, size: jax.Array) -> jax.Array:
    """A slope, zero where it is what a sum of this size rounds."""
    return jnp.where(jnp.abs(slope) > noise(slope.dtype) * size, slope, 0.0)


def _turns(head: HeadInstance, point: Arrays, gradient: Arrays) -> jax.Array:
    """Whether a gradient turns a head by more than what sums over its rows round."""
    lengths = (jnp.sqrt(jnp.trace(head.gram(x, x), axis1=-2, axis2=-1)) for x in (point, gradient))
    found = jnp.linalg.norm(skew(head.gram(point, gradient)), axis=(-2, -1))
    return found > noise(found.dtype) * math.prod(lengths, start=jnp.ones(()))


def _moved(reading: Anchored, point: Arrays, element: jax.Array) -> Arrays:
    return reading.divide(reading.inverse(element), point)
