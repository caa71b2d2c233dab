"""Steps along orbits, for losses that are not constant along orbits because they contain a penalty on weights.

Coordinates say where in its orbit a point lies: log α of every scale channel, the shift of a leaf, and the rotation of
a head. Each is stepped by momentum (mode "sgd") or by Adam (mode "adam"). All derivatives by the rotation of one head
share one second moment.
Reference: DDC B.1–B.4, `vertical_mode`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.ddc.heads import Adam
from gauge_optax.gauges.by_action import OfUser
from gauge_optax.linalg import direction_tolerance, real_dtype, skew
from gauge_optax.parts.constants import Mean
from gauge_optax.parts.heads import Rotation
from gauge_optax.parts.part import Anchor, Arrays, Constant, Part, changed
from gauge_optax.parts.sizes import Factor
from gauge_optax.parts.stream import Stream
from gauge_optax.slice import Slice
from gauge_optax.xla import varying_like

VERTICAL = ("frozen", "sgd", "adam")


class Moments(NamedTuple):
    """The first moments of all orbit coordinates, or the second moments.

    Attributes:
      scales: one array per scale, with a number per channel.
      shifts: one tuple per shift, with an array per block.
      turning: for rotations of heads. First moments map the path of a leaf that rotations move to an average of the
        part of its gradient along rotations. Second moments map the index of a rotation in `Slice.heads`, as a string,
        to one number per head.
    """

    scales: Any
    shifts: Any
    turning: Any


class VerticalMoments(NamedTuple):
    """Moments of orbit coordinates.

    Attributes:
      first: first moments; () in mode "frozen".
      second: second moments; () in modes "frozen" and "sgd".
    """

    first: Moments | tuple[()]
    second: Moments | tuple[()]


def init_vertical(s: Slice, mode: str, point: Arrays) -> VerticalMoments:
    """Returns zero moments, in the form that `mode` needs at this slice point."""
    if mode == "frozen":
        return VerticalMoments((), ())
    derivatives = _derivatives(s, point, point)
    first: Moments = jax.tree.map(jnp.zeros_like, derivatives)
    if mode != "adam":
        return VerticalMoments(first, ())
    heads = {str(k): turn.mean(derivatives.turning) for k, turn in enumerate(s.heads)}
    return VerticalMoments(first, jax.tree.map(jnp.zeros_like, derivatives._replace(turning=heads)))


def vertical_step(
    s: Slice, mode: str, adam: Adam, point: Arrays, gradient: Arrays, past: VerticalMoments
) -> tuple[Arrays, VerticalMoments]:
    """Returns a tangent along the orbit, and the new moments.

    Args:
      s: the slice.
      mode: "sgd" or "adam".
      adam: hyperparameters.
      point: bound leaves of the slice point.
      gradient: bound leaves of the slice gradient.
      past: moments so far.
    """
    derivatives = _derivatives(s, point, gradient)
    mu: Moments = jax.tree.map(adam.first, derivatives, past.first)
    nu, rates = past.second, jax.tree.map(adam.mean, mu, derivatives)
    if mode == "adam":
        heads = {str(k): turn.mean(jax.tree.map(jnp.square, derivatives.turning)) for k, turn in enumerate(s.heads)}
        squares = jax.tree.map(jnp.square, derivatives._replace(turning=()))._replace(turning=heads)
        nu = jax.tree.map(adam.second, squares, nu)
        roots = jax.tree.map(adam.root, nu)
        whole = jax.tree.map(jnp.divide, rates._replace(turning=()), roots._replace(turning=()))
        inverses = {k: 1.0 / x for k, x in roots.turning.items()}
        rates = whole._replace(turning=_times(s, rates.turning, inverses))
    out = {p: jnp.zeros_like(x) for p, x in point.items()} | rates.turning
    for part, rate in zip(_scales(s), rates.scales, strict=True):
        _, along = jax.jvp(functools.partial(_scaled, part, point), (jnp.zeros_like(rate),), (rate,))
        out |= {p: out[p] + along[p] for p in changed(part)}
    for (part, _), rate in zip(_shifts(s), rates.shifts, strict=True):
        out = part.act(rate, out)
    return out, VerticalMoments(mu, nu)


# What this module needs to know about a part: one `singledispatch` function per property -----------------


@functools.singledispatch
def has_orbit_coordinates(part: Part[Any]) -> bool:
    """Whether `vertical_step` can step all orbit coordinates of a part. True for permutations, which have none."""
    return True


@has_orbit_coordinates.register(OfUser)  # only its action is known, not its coordinates
@has_orbit_coordinates.register(Constant)
@has_orbit_coordinates.register(Stream)  # rotations of heads turn some of the same leaves
def _has_none(part: Part[Any]) -> bool:
    return False


@has_orbit_coordinates.register
def _rotations_have(part: Rotation) -> bool:
    return not part.seen  # `seen` is not empty if another rotation turns some of the same entries


@has_orbit_coordinates.register
def _means_have(part: Mean) -> bool:
    return True


@functools.singledispatch
def log_step(part: Part[Any]) -> float:
    """How far a change of log α by 1 moves the logs of a scale's two sides: the norm of (1, −p), with the degree p.

    1 for a scale with one side; 0 for parts that are no scales.
    """
    return 0.0


@log_step.register
def _log_step_of_factor(part: Factor) -> float:
    return math.hypot(1.0, part.degree if part.down else 0.0)


@functools.singledispatch
def is_shift(part: Part[Any]) -> bool:
    """Whether the coordinates of a part are the constants that it adds to leaves, one array per block."""
    return False


@is_shift.register
def _means_are(part: Mean) -> bool:
    return True


# Coordinates ----------------------------------------------------------------------------------------------


def _scales(s: Slice) -> list[Any]:
    return [part for part, _, _ in s.sizes if log_step(part)]


def _shifts(s: Slice) -> list[tuple[Any, Anchor]]:
    return [(part, anchor) for part, anchor, _ in s.constants if is_shift(part)]


def _scaled(part: Any, point: Arrays, logs: jax.Array) -> Arrays:
    """Returns the point moved by the scale whose log α per channel are `logs`."""
    out: Arrays = part.act(jnp.exp(logs), point)
    return out


def _derivatives(s: Slice, point: Arrays, gradient: Arrays) -> Moments:
    """Returns the loss's derivative by every orbit coordinate, with zeros in place of roundoff.

    A loss without a penalty on weights is constant along orbits, and all these derivatives are roundoff.
    """
    sizes = {p: jnp.abs(point[p] * x) for p, x in gradient.items()}
    scales = []
    for part in _scales(s):
        # Inside `shard_map`, the derivative by an array that is equal on all devices would be summed over them. `logs`
        # therefore varies over devices as the point does.
        logs = varying_like(jnp.zeros(part.shape, real_dtype()), point[part.blocks[0].path])
        moved, pull = jax.vjp(functools.partial(_scaled, part, point), logs)
        size = sum((b.total(part.named, sizes[b.path]) for b in part.blocks), start=jnp.zeros(()))
        cotangent = {p: gradient[p] if p in changed(part) else jnp.zeros_like(x) for p, x in moved.items()}
        # A change of log α by 1 moves the logs of both sides by (1, −p), or the log of a single side by 1. What is
        # appended is the coefficient of the projection on this vector.
        scales.append(_above_noise(pull(cotangent)[0], size) / log_step(part) ** 2)
    absolute = {p: jnp.abs(x) for p, x in gradient.items()}
    shifts = [jax.tree.map(_above_noise, i.read(a, gradient), i.read(a, absolute)) for i, a in _shifts(s)]
    across = s.project_turning(point, gradient)
    turning = {path: gradient[path] - across[path] for turn in s.heads for path in turn.paths}
    live = {str(k): _is_turned(turn, point, gradient).astype(real_dtype()) for k, turn in enumerate(s.heads)}
    return Moments(tuple(scales), tuple(shifts), _times(s, turning, live))


def _times(s: Slice, turning: Arrays, factors: Arrays) -> Arrays:
    """Multiplies every head in the leaves `turning` by its factor; `factors` has the indices of `s.heads` as keys."""
    out = dict(turning)
    for k, turn in enumerate(s.heads):
        for block in turn.blocks:
            rows = block.rows(out[block.path]) * turn.per_head(block, factors[str(k)])
            out[block.path] = block.write(out[block.path], rows)
    return out


def _above_noise(derivative: jax.Array, size: jax.Array) -> jax.Array:
    """Returns a derivative, with zeros where it is only roundoff of a sum; `size` is the sum of absolute values."""
    return jnp.where(jnp.abs(derivative) > direction_tolerance(derivative.dtype) * size, derivative, 0.0)


def _is_turned(turn: Any, point: Arrays, gradient: Arrays) -> jax.Array:
    """For each head, whether the gradient's part along rotations exceeds the roundoff of sums over the head's rows."""
    lengths = (jnp.sqrt(jnp.trace(turn.gram(x, x), axis1=-2, axis2=-1)) for x in (point, gradient))
    moment = jnp.linalg.norm(skew(turn.gram(point, gradient)), axis=(-2, -1))
    return moment > direction_tolerance(moment.dtype) * math.prod(lengths, start=jnp.ones(()))
