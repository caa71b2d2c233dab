"""What DDC does on scale channels: the radial part by scalar Adam on the joint scale, and the tangential projection.

Here: pure functions of one step. Not here: moments of parameters-shaped leaves (`_step`), the frame (`gauges._frame`).
"""

import jax
import jax.numpy as jnp

from gauge_optax.gauges._system import Channels, ScaleSystem, Sides
from gauge_optax.linalg import real_dtype, safe_divide
from gauge_optax.transforms._here import Adam, Here

# Gauss–Seidel sweeps where two scale gauges share a leaf. A sweep leaves a few hundredths of what it started with: of a
# gradient that has no effect, of a tangent the retraction removes it.
GRADIENT_SWEEPS, TANGENT_SWEEPS, _CROSSTALK_SWEEPS = 1, 2, 2


def radial_slopes(system: ScaleSystem, dots: Sides) -> Channels:
    """dL/d log s per channel, the whole channel scaled together; from the in-frame gradient's dot products."""
    return tuple((up + down) / (i.degree + 1.0) for i, (up, down) in zip(system.instances, dots, strict=True))


def radial(
    here: Here,
    slopes: Channels,
    moments: tuple[Channels, Channels],
    mode: str,
    factor: float | jax.Array,
    adam: Adam,
) -> tuple[Channels, Channels, Channels]:
    """Adam on the joint scale s = ρ_up^p·ρ_down of every channel with two live sides.

    Args:
      here: the point.
      slopes: dL/d log s.
      moments: first and second moments of the derivative.
      mode: "linear" (derivative and step of s) or "log" (of log s).
      factor: multiplies the step.
      adam: hyperparameters.

    Returns:
      Relative rates of the channels, and the new moments.
    """
    rates, mus, nus = [], [], []
    for k, instance in enumerate(here.system.instances):
        (up, down), (live_up, live_down) = here.known.rho[k], here.known.alive[k]
        live = live_up & live_down if instance.down else jnp.zeros_like(live_up)
        scale = jnp.maximum(up**instance.degree * down, here.known.frame.floor_scale[k])
        unit = scale if mode == "linear" else jnp.ones((), real_dtype())
        move, mu, nu = adam.scalar(jnp.where(live, slopes[k] / unit, 0.0), moments[0][k], moments[1][k])
        move = _above_rounding(adam, nu) * move
        rates.append(jnp.where(live, factor * move / ((instance.degree + 1.0) * unit), 0.0))
        mus.append(mu)
        nus.append(nu)
    return tuple(rates), tuple(mus), tuple(nus)


def _above_rounding(adam: Adam, nu: jax.Array) -> jax.Array:
    """1, but less where a channel's root is within 1e3 machine epsilons of its gauge's RMS.

    A dead ReLU unit has rounding for a slope; divided by its own root it would be a full step: float32 twins of a small
    GPT were 1.5e-3 apart in a leaf after 50 steps at learning rate 3e-3, and are 1.1e-5.
    """
    root = adam.root(nu)
    size = jnp.sqrt(jnp.mean(adam.unbiased_variance(nu)))
    return root / (root + 1e3 * float(jnp.finfo(nu.dtype).eps) * size)


def tangential(here: Here, dots: Sides, sweeps: int) -> tuple[Sides, Sides]:
    """What makes an in-frame vector orthogonal to every live side of every channel.

    Args:
      here: the point.
      dots: ⟨θ̂, X̂⟩.
      sweeps: how often instances that share leaves are gone through.

    Returns:
      The multiples of θ̂ to add, and the dot products after that.
    """
    system, rest = here.system, list(dots)
    added = none(system)
    for sweep in range(sweeps):
        for k in range(len(system.instances)):
            if sweep and k not in system.coupled:
                continue
            up, down = (
                jnp.where(live, -safe_divide(dot, square), 0.0)
                for live, dot, square in zip(here.known.alive[k], rest[k], here.overlap.squares[k], strict=True)
            )
            added = plus(added, k, up, down)
            rest = here.overlap.after(rest, k, up, down)
    return added, rest


def with_radial(here: Here, added: Sides, rest: Sides, rates: Channels) -> tuple[Sides, Sides]:
    """Multiples of θ̂ with channels growing at these rates, without what that puts into each other's orbits.

    Where two scale gauges share a leaf, the radial part of one has a share in the other's orbit. The retraction takes
    out what two sweeps leave; without them 8-channel leaves were 4e-2 vertical, against 1e-2 in DESIGN §6.

    Args:
      here: the point.
      added: multiples of θ̂ so far.
      rest: dot products of the vector so far.
      rates: relative growth per channel.

    Returns:
      All multiples of θ̂, and the dot products after that.
    """
    system, overlap = here.system, here.overlap
    for k, rate in enumerate(rates):
        added = plus(added, k, rate, rate)
        rest = overlap.after(rest, k, rate, rate)
    lengths = overlap.vertical_squares()
    for _ in range(_CROSSTALK_SWEEPS):
        for k in sorted(system.coupled):
            rate = -safe_divide(system.along_orbits(rest)[k], lengths[k])
            added = plus(added, k, rate, -system.instances[k].degree * rate)
            rest = overlap.moved_along(rest, k, rate)
    return added, rest


def none(system: ScaleSystem) -> Sides:
    """No multiple of any channel."""
    return [(jnp.zeros(i.shape, real_dtype()), jnp.zeros(i.shape, real_dtype())) for i in system.instances]


def total(a: Sides, b: Sides) -> Sides:
    """The sum of two sets of multiples."""
    return [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, b, strict=True)]


def plus(multiples: Sides, index: int, up: jax.Array, down: jax.Array) -> Sides:
    """More on the sides of one instance."""
    out = list(multiples)
    out[index] = (out[index][0] + up, out[index][1] + down)
    return out
