"""What a step of finite size adds to the leakage: the gap between a discrete step and the flow it follows.

With u(θ) = P(θ)·g(θ) a step is θ − η·u(θ), and the flow θ' = −u(θ) reaches θ − η·u + ½η²·Du·u + O(η³) in time η. The
step lands short of it by ½η²·Du·u, and Du·u is a sum of two: P·H·u, the Hessian seen through the preconditioner, and
(DP[u])·g, the preconditioner that changes on the way. What these do along an orbit is the leakage of second order.

Read it so: along the orbits the step lands at flow − η²·(hessian + derivative) + O(η³); or, the steps follow
θ' = −(u + ½η·Du·u), which leaks first + η·(hessian + derivative). The step's own displacement is linear in η, its
vertical part −η·first with no term in η²; the finite motion of a step, with the curvature of the coordinate, is what
`drift` and `vertical_motion` measure.

Here: a point and any preconditioner. Not here: the leakage of first order and its causes (`leakage`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.gauges.base import Element, Gauges
from gauge_optax.measure._orbit import ROTATIONS, SCALES, one_gauge, orbit_at


class SecondOrderLeakage(NamedTuple):
    """Leakage to second order in the learning rate; all but `crossover` are rates in the structure of an element.

    Attributes:
      first: the generator of the vertical part of u = P·g.
      hessian: that of ½·P·H·u.
      derivative: that of ½·(DP[u])·g.
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
      precondition: (params, gradient) → step, linear in the gradient: P(params) applied to it. What P sees of the
        point, a second moment that follows the gradient included, it takes from params (`adam_precondition`).
      params: the point, floating leaves only.
      gauge: one scale or rotation gauge.

    Returns:
      Rates of first and second order and the crossover.

    Raises:
      ValueError: several gauges or one of another kind, bindings that do not fit.

    >>> gauge = go.rescale({"up": "_ _"}, {"down": "_ _"})
    >>> params = {"up": jnp.full((1, 1), 2.0), "down": jnp.full((1, 1), 1.0)}
    >>> grad_fn = jax.grad(lambda p: 0.5 * jnp.sum(p["up"] * p["down"]) ** 2)  # g = (2, 4)
    >>> found = go.measure.second_order_leakage(grad_fn, lambda params, gradient: gradient, params, gauge)
    >>> float(found.first[""]), round(float(found.hessian[""]), 4)  # ½·(4² − 2²)/(2² + 1²)
    (0.0, 1.2)

    Reference: DDC Lemma 20, modified equations after Li et al. 2019; one rate per direction of the orbit for the
    lemma's unit vector, which leaves η* what it is. The lemma calls this the η² term of the step's own increment, up to
    sign; it is the flow's. Remark 22 has no second order for SGD, which holds for rotations; along a scale's orbit
    SGD's pairing is −½(‖g_up‖² − p·‖g_down‖²), because that orbit's generator is symmetric.
    """
    orbit = orbit_at(one_gauge("second_order_leakage", gauge, SCALES + ROTATIONS), params)
    gradient = grad_fn(params)
    step = _like(precondition(params, gradient), params)
    _, curved = jax.jvp(grad_fn, (params,), (step,))
    _, composed = jax.jvp(lambda g: precondition(params, g), (gradient,), (curved,))
    _, changed = jax.jvp(lambda p: precondition(p, gradient), (params,), (step,))
    first, twice_hessian, twice_derivative = (orbit.rates(orbit.own.vectors(x)) for x in (step, composed, changed))
    hessian, derivative = (jax.tree.map(lambda x: 0.5 * x, twice) for twice in (twice_hessian, twice_derivative))
    second = jax.tree.map(jnp.add, hessian, derivative)
    crossover = jax.tree.map(_ratio, orbit.sizes(first), orbit.sizes(second))
    return SecondOrderLeakage(first, hessian, derivative, crossover)


def _like(tangent: Any, params: Any) -> Any:
    """A tangent in the dtypes that forward derivatives ask for."""
    return jax.tree.map(lambda x, p: jnp.asarray(x, p.dtype), tangent, params)


def _ratio(first: jax.Array, second: jax.Array) -> jax.Array:
    none = second == 0
    return jnp.where(none, jnp.inf, first / jnp.where(none, 1.0, second))
