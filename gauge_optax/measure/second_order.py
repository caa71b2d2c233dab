"""The leakage that a step of finite size adds, because a discrete step differs from the flow that it follows.

*Leakage* is the motion of a step along orbits, see `measure.leakage`. Let g be the gradient, P the preconditioner, H
the Hessian, η the learning rate and u(θ) = P(θ)·g(θ). A step leads to θ − η·u. The flow θ' = −u(θ) leads to
θ − η·u + ½η²·Du·u + O(η³) in time η, where D is the derivative by θ. Step and flow therefore differ by ½η²·Du·u, up to
O(η³). Du·u is the sum of two terms: P·H·u, where the Hessian acts on the step, and (DP[u])·g, where the preconditioner
changes along the step.

The leakage of second order is the part of ½·Du·u along orbits, its vertical part. `SecondOrderLeakage` has the two
terms as `hessian` and `derivative`: along orbits, a step ends at flow − η²·(hessian + derivative) + O(η³). Both orders
of leakage are projections on the tangents of the orbit at θ. `drift` and `vertical_motion` measure instead how far a
finite step moves a coordinate along the orbit, which is curved.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import leaves_by_path
from gauge_optax.gauges.gauge import Element, Gauges
from gauge_optax.measure.leakage import RESCALE, ROTATION, Orbit
from gauge_optax.transformation import require_differentiable, require_function, updates_at


class SecondOrderLeakage(NamedTuple):
    """Leakage to second order in the learning rate. All fields but `crossover` have the structure of an element.

    Attributes:
      first: the generator of the vertical part of u = P·g.
      hessian: the generator of the vertical part of ½·P·H·u.
      derivative: the generator of the vertical part of ½·(DP[u])·g.
      crossover: the learning rate η* at which both orders have the same size: |first|/|hessian + derivative|, one
        number per channel, head or plane; inf if the second order is zero.
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
    """Lemma 20: both orders of a preconditioned step's leakage, and the learning rate at which they are equal.

    Args:
      grad_fn: params → gradient, differentiable.
      precondition: (params, gradient) → P(params) applied to the gradient; linear in the gradient. If P depends on the
        point, as by a second moment of the gradient, it has to compute this from params (`adam_precondition` does).
      params: the point, floating leaves only.
      gauge: one gauge of scales, `head_rotation` or `rope_torus`.

    Returns:
      The leakage of first and second order, and the learning rate at which they are equal.

    Raises:
      ValueError: several gauges or one of another kind, bindings that do not fit; a gradient, or what `precondition`
        makes of it, that is no tree of updates of the parameters.

    >>> gauge = go.rescale({"up": "_ _"}, {"down": "_ _"})
    >>> params = {"up": jnp.full((1, 1), 2.0), "down": jnp.full((1, 1), 1.0)}
    >>> grad_fn = jax.grad(lambda p: 0.5 * jnp.sum(p["up"] * p["down"]) ** 2)  # g = (2, 4)
    >>> leakage = go.measure.second_order_leakage(
    ...     grad_fn, lambda params, gradient: gradient, params, gauge
    ... )
    >>> # ½·(4² − 2²)/(2² + 1²).
    >>> float(leakage.first[""]), round(float(leakage.hessian[""]), 4)
    (0.0, 1.2)

    Reference: DDC Lemma 20, by modified equations as in Li et al. 2019. The lemma takes the product with one unit
    vector; here there is one rate per direction of the orbit, which gives the same η*. The lemma presents ½·Du·u, up to
    sign, as the η² term of a step. It is the η² term of the flow; a step is linear in η. Remark 22 says that SGD has no
    leakage of second order. That is true for rotations. Along a scale's orbit, SGD's is −½(‖g_up‖² − p·‖g_down‖²),
    because the generator of that orbit is symmetric.
    """
    require_differentiable("second_order_leakage", params)
    require_function("second_order_leakage", "grad_fn", grad_fn, "params")
    require_function("second_order_leakage", "precondition", precondition, "params, gradient")
    params = jax.tree.map(jnp.asarray, params)  # Python numbers have no dtype
    orbit = Orbit("second_order_leakage", gauge, params, (RESCALE, ROTATION))
    gradient = grad_fn(params)
    paths = leaves_by_path(params)
    updates_at("second_order_leakage", paths, gradient, params)
    made = precondition(params, gradient)
    updates_at("second_order_leakage", paths, made, params)
    # A preconditioner may compute in another dtype; `jax.jvp` needs tangents in the dtype of the parameters.
    step = jax.tree.map(lambda x, p: jnp.asarray(x, p.dtype), made, params)
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
