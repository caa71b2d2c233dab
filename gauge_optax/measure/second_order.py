"""What a step of finite size adds to the leakage: the gap between a discrete step and the flow that it follows.

*Leakage* is the motion of a step along orbits, see `measure.leakage`. Let g be the gradient, P the preconditioner, H
the Hessian and u(θ) = P(θ)·g(θ). A step leads to θ − η·u. The flow θ' = −u(θ) leads to θ − η·u + ½η²·Du·u + O(η³) in
time η. Step and flow therefore differ by ½η²·Du·u, up to O(η³). Du·u is the sum of two terms: P·H·u, where the Hessian
acts on the step, and (DP[u])·g, where the preconditioner changes along the step.

The leakage of second order is the vertical part of ½·Du·u, the part along orbits. `SecondOrderLeakage` has its two
terms as `hessian` and `derivative`: along orbits, a step lands at flow − η²·(hessian + derivative) + O(η³). The step as
a vector is linear in η. How far a finite step moves a curved coordinate is measured by `drift` and `vertical_motion`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.gauges.gauge import Element, Gauges
from gauge_optax.measure.leakage import RESCALE, ROTATION, Orbit


class SecondOrderLeakage(NamedTuple):
    """Leakage to second order in the learning rate; all but `crossover` are rates in the structure of an element.

    Attributes:
      first: the generator of the vertical part of u = P·g.
      hessian: the generator of the vertical part of ½·P·H·u.
      derivative: the generator of the vertical part of ½·(DP[u])·g.
      crossover: η*, where the two orders are of one size: |first|/|hessian + derivative| per channel, head or plane;
        inf where there is no second order.
    """

    first: Element
    hessian: Element
    derivative: Element
    crossover: Element


def second_order_leakage(
    grad_fn: Callable[[Any], Any],
    precondition: Callable[[Any, Any], Any],
    params: Any,
    gauge: Gauges,
) -> SecondOrderLeakage:
    """Lemma 20: both orders of a preconditioned step's leakage, and the step size where they meet.

    Args:
      grad_fn: params → gradient, differentiable.
      precondition: (params, gradient) → step, linear in the gradient: P(params) applied to it. If P depends on the
        point, for instance by a second moment of the gradient, it computes that from params (`adam_precondition`).
      params: the point, floating leaves only.
      gauge: one scale or rotation gauge.

    Returns:
      Rates of first and second order and the crossover.

    Raises:
      ValueError: several gauges or one of another kind, bindings that do not fit.

    >>> gauge = go.rescale({"up": "_ _"}, {"down": "_ _"})
    >>> params = {"up": jnp.full((1, 1), 2.0), "down": jnp.full((1, 1), 1.0)}
    >>> grad_fn = jax.grad(lambda p: 0.5 * jnp.sum(p["up"] * p["down"]) ** 2)  # g = (2, 4)
    >>> leakage = go.measure.second_order_leakage(
    ...     grad_fn, lambda params, gradient: gradient, params, gauge
    ... )
    >>> # ½·(4² − 2²)/(2² + 1²).
    >>> float(leakage.first[""]), round(float(leakage.hessian[""]), 4)
    (0.0, 1.2)

    Reference: DDC Lemma 20, modified equations after Li et al. 2019. The lemma pairs with a unit vector; this has one
    rate per direction of the orbit, which gives the same η*. The lemma calls this the η² term of the step's increment,
    up to sign; it is that of the flow. Remark 22 says that SGD has no second order. That holds for rotations; along a
    scale's orbit SGD's pairing is −½(‖g_up‖² − p·‖g_down‖²), because the generator of that orbit is symmetric.
    """
    orbit = Orbit("second_order_leakage", gauge, params, (RESCALE, ROTATION))
    gradient = grad_fn(params)
    # A preconditioner may compute in another dtype; forward derivatives want the parameters'.
    step = jax.tree.map(lambda x, p: jnp.asarray(x, p.dtype), precondition(params, gradient), params)
    _, curved = jax.jvp(grad_fn, (params,), (step,))
    _, composed = jax.jvp(lambda g: precondition(params, g), (gradient,), (curved,))
    _, changed = jax.jvp(lambda p: precondition(p, gradient), (params,), (step,))
    first = orbit.rates(orbit.vectors(step))
    hessian, derivative = (
        jax.tree.map(lambda x: 0.5 * x, orbit.rates(orbit.vectors(twice))) for twice in (composed, changed)
    )
    second = orbit.norms(jax.tree.map(jnp.add, hessian, derivative), along=True)
    crossover = {
        key: jnp.where(second[key] == 0, jnp.inf, size / jnp.where(second[key] == 0, 1.0, second[key]))
        for key, size in orbit.norms(first, along=True).items()
    }
    return SecondOrderLeakage(first, hessian, derivative, crossover)
