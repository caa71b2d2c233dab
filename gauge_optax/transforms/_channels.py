"""What DDC does on scale channels: the radial part by scalar Adam on the joint scale, and the tangential projection.

Here: pure functions of one step. Not here: moments of parameters-shaped leaves (`ddc`), the frame (`gauges._frame`).
"""

import jax
import jax.numpy as jnp

from gauge_optax.gauges import _split
from gauge_optax.gauges._system import Channels
from gauge_optax.linalg import real_dtype, safe_divide
from gauge_optax.transforms._here import Adam, Here

Arrays = dict[str, jax.Array]

_CROSSTALK_STEPS = 3
_SWEEPS = 3  # Gauss–Seidel sweeps where two scale gauges share a leaf; the retraction removes what they leave


def radial_slopes(here: Here, framed: Arrays) -> Channels:
    """dL/d log s per channel, the whole channel scaled together; `framed` is an in-frame cotangent."""
    slopes = []
    for instance in here.system.instances:
        up, down = instance.sides({p: here.point.hat[p] * framed[p] for p in instance.paths})
        slopes.append((up + down) / (instance.degree + 1.0))
    return tuple(slopes)


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
        (up, down), (live_up, live_down) = here.rho[k], here.alive[k]
        live = live_up & live_down if instance.down else jnp.zeros_like(live_up)
        scale = jnp.maximum(up**instance.degree * down, here.frame.floor_scale[k])
        unit = scale if mode == "linear" else jnp.ones((), real_dtype())
        move, mu, nu = adam.scalar(jnp.where(live, slopes[k] / unit, 0.0), moments[0][k], moments[1][k])
        rates.append(jnp.where(live, factor * move / ((instance.degree + 1.0) * unit), 0.0))
        mus.append(mu)
        nus.append(nu)
    return tuple(rates), tuple(mus), tuple(nus)


def tangential(here: Here, framed: Arrays) -> Arrays:
    """An in-frame vector without its component along any live side of any channel."""
    out, hat = dict(framed), here.point.hat
    for sweep in range(_SWEEPS):
        for k, instance in enumerate(here.system.instances):
            if sweep and k not in here.system.coupled:
                continue
            dots = instance.sides({p: hat[p] * out[p] for p in instance.paths})
            up, down = (
                jnp.where(live, safe_divide(dot, square), 0.0)
                for live, dot, square in zip(here.alive[k], dots, here.squares[k], strict=True)
            )
            along = instance.spread_sides(up, down)
            out |= {p: out[p] - hat[p] * along[p] for p in instance.paths}
    return out


def without_crosstalk(here: Here, tangent: Arrays) -> Arrays:
    """`tangent` without what radial parts of two gauges on one leaf put into each other's orbits, to a few 1e-3.

    The retraction takes out the rest; before it, 8-channel leaves were 4e-2 vertical, against 1e-2 in DESIGN §6.
    """
    system, hat = here.system, here.point.hat
    if not system.coupled:
        return tangent
    along = system.exponents(_split.scale_coordinates(system, hat, tangent, _CROSSTALK_STEPS))
    return {p: x - hat[p] * along[p] if p in along else x for p, x in tangent.items()}
