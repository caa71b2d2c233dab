"""Scale and GL(d) gauges together: their joint frame, and their joint vertical part where they share leaves.

A norm's scale on the rows of W_V and GL(d_h) on its columns commute, yet neither is balanced alone: the least norm is
found by turns, the vertical part by conjugate gradients. Where no leaf is shared each has its own closed form.

Here: solving for both. Not here: either alone (`_frame`, `_linear`).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.gauges import _frame
from gauge_optax.gauges._linear import (
    Frames,
    LinearFrame,
    LinearInstance,
    add_orbit,
    balanced_frames,
    generators,
    pairing,
)
from gauge_optax.gauges._scale import Values
from gauge_optax.gauges._system import Channels, ScaleSystem
from gauge_optax.linalg import real_dtype, safe_divide

Generators = tuple[jax.Array, ...]
_MOST_TURNS = 200


class JointFrame(NamedTuple):
    """A frame of scales and linear instances.

    Attributes:
      channels: f per scale instance.
      linear: per linear instance.
    """

    channels: Channels
    linear: tuple[LinearFrame, ...]


def shares_leaves(system: ScaleSystem, linear: Sequence[LinearInstance]) -> bool:
    """Whether some leaf has both a scale and a linear gauge."""
    return bool(set(system.terms) & {path for instance in linear for path in instance.paths})


@functools.partial(jax.jit, static_argnums=(0, 1))
def solve(system: ScaleSystem, linear: tuple[LinearInstance, ...], values: Values) -> JointFrame:
    """The minimum-norm frame.

    Args:
      system: the scale instances.
      linear: the linear instances.
      values: leaf path → value, shifts centred.

    Returns:
      The frame; f balances every channel, S_F every pair, with the other divided out.
    """
    f = _frame.solve(system, values)
    if not shares_leaves(system, linear):
        return JointFrame(f, balanced_frames(linear, values))
    tolerance = 32.0 * float(jnp.finfo(real_dtype()).eps)

    def turn(carry: tuple[Channels, jax.Array, jax.Array]) -> tuple[Channels, jax.Array, jax.Array]:
        f, _, count = carry
        balanced = _balanced(linear, balanced_frames(linear, _divided(system, values, f)), values)
        new = _frame.solve(system, balanced)
        moved = jnp.max(jnp.stack([jnp.max(jnp.abs(a - b), initial=0.0) for a, b in zip(new, f, strict=True)]))
        return new, moved, count + 1

    def unfinished(carry: tuple[Channels, jax.Array, jax.Array]) -> jax.Array:
        return (carry[1] > tolerance) & (carry[2] < _MOST_TURNS)

    start = f, jnp.asarray(jnp.inf, real_dtype()), jnp.zeros((), jnp.int32)
    f = jax.lax.while_loop(unfinished, turn, start)[0]
    return JointFrame(f, balanced_frames(linear, _divided(system, values, f)))


def _divided(system: ScaleSystem, values: Values, f: Channels) -> Values:
    return {**values, **_frame.in_frame(system, values, f)}


def _balanced(linear: Sequence[LinearInstance], frames: Sequence[LinearFrame], values: Values) -> Values:
    moved = dict(values)
    for instance, frame in zip(linear, frames, strict=True):
        moved |= instance.move(moved, frame.inner, frame.outer)
    return moved


def coupled_rates(
    system: ScaleSystem, linear: tuple[LinearInstance, ...], hat: Values, framed: Values
) -> tuple[Channels, Generators]:
    """Rates of log α and generators of the joint vertical part, by conjugate gradients preconditioned gauge by gauge.

    Args:
      system: the scale instances.
      linear: the linear instances.
      hat: θ̂.
      framed: an in-frame vector per bound leaf.

    Returns:
      a per scale instance and Z per linear instance, to rounding.
    """
    diagonal = tuple(
        up + i.degree**2 * down if i.down else up
        for i, (up, down) in zip(system.instances, system.squares(hat), strict=True)
    )

    def pairings(vector: Values) -> tuple[Channels, Generators]:
        return system.along_orbits(system.dots(hat, vector)), tuple(pairing(i, hat, vector) for i in linear)

    def along(rates: tuple[Channels, Generators]) -> Values:
        logs = system.exponents(rates[0])
        vector = {p: x * logs[p] if p in logs else jnp.zeros_like(x) for p, x in hat.items()}
        for instance, z in zip(linear, rates[1], strict=True):
            vector |= add_orbit(instance, vector, hat, z)
        return vector

    def precondition(rates: tuple[Channels, Generators]) -> tuple[Channels, Generators]:
        scales = tuple(safe_divide(a, d) for a, d in zip(rates[0], diagonal, strict=True))
        return scales, generators(linear, hat, rates[1])

    return jax.scipy.sparse.linalg.cg(
        lambda rates: pairings(along(rates)), pairings(framed), tol=float(jnp.finfo(real_dtype()).eps),
        maxiter=200, M=precondition,
    )[0]  # fmt: skip


def paired(linear: Sequence[LinearInstance], frames: Sequence[LinearFrame]) -> Frames:
    """Instances with their frames."""
    return tuple(zip(linear, frames, strict=True))
