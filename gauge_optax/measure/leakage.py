"""How much of a preconditioned step runs along the orbits, and which property of the preconditioner puts it there.

The gradient g of an invariant loss has no part along an orbit. Adam's step D⊙g has one, because D differs from entry to
entry: it *leaks*. The leakage is linear in D, and D has three layers: one number for a whole channel (or head), what
each tensor's mean adds, what each entry adds. Their leakages are the three terms here. The first is the gradient's own
vertical part, zero for an invariant loss; the second goes away when the tensors' means agree; the third stays.

A mean of Adam's D is easily a mean of nothing: an entry without gradient has D = 1/eps, counts like every other, and
its 1e8 comes back with both signs in the second term and the third (*measured*: 1e6 times the leakage, on a tiny
model with two dead units). `means="gradient"` averages by g², which gives the number d closest to D in ‖D⊙g − d·g‖.

Everything is a pairing with orbit tangents: for a generator a (log α, a skew matrix, an angle), the step's inner
product with a's orbit tangent is Σ a·L, and L is what `measured` holds. θ moves by −lr·step, so the orbit is travelled
at −lr·`rate`. The metric is the lemmas' own, the Euclidean one, in which gradient flow leaks nothing: for scales −lr·L
is, to first order, the change of ½(‖up‖² − p·‖down‖²), which it conserves and Adam does not. What a step does to the
coordinate that a slice keeps is another question, `motion.vertical_motion`'s.

Here: first order, at a point. Not here: sums along a trajectory (`trajectory`), what a finite step adds
(`second_order`), reading D out of an optimizer's state (`adam`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, binding_error
from gauge_optax.gauges._head import HeadBlock, HeadInstance
from gauge_optax.gauges._scale import ScaleInstance
from gauge_optax.gauges.base import Element, Gauges
from gauge_optax.gauges.bound import Arrays
from gauge_optax.linalg import safe_divide
from gauge_optax.measure._orbit import (
    ROTATIONS,
    SCALES,
    Orbit,
    one_gauge,
    orbit_at,
    turning_pairing,
    turning_size,
)

_MEANS = ("entries", "gradient")


class StepLeakage(NamedTuple):
    """What a step does along an orbit; both fields have the structure of the gauge's element.

    Attributes:
      measured: pairing with the orbit tangents.
      rate: the generator of the step's vertical part; −lr·rate is the motion along the orbit.
    """

    measured: Element
    rate: Element


class RescaleLeakage(NamedTuple):
    """Leakage along a scale's orbit, per channel; measured = of_gradient + per_tensor + residual.

    Attributes:
      measured: Σ_up θ·D·g − p·Σ_down θ·D·g, from the gauge's action.
      of_gradient: with one number for D, its mean over the channel: zero for the gradient of an invariant loss.
      per_tensor: what the means of the single tensors add.
      residual: what single entries add, Σ ±n·Cov(θ·g, D).
      rate: the same motion as the rate of log α.
    """

    measured: Element
    of_gradient: Element
    per_tensor: Element
    residual: Element
    rate: Element


class RotationLeakage(NamedTuple):
    """Leakage along a head's orbit, skew per head or a number per plane; the same sum.

    Attributes:
      measured: skew(Σ θᵀ(D⊙g)), from the gauge's action; for a plane S₀₁ − S₁₀.
      of_gradient: with one number for D, its mean over the head: zero for the gradient of an invariant loss.
      per_tensor: what the means of the single tensors add.
      residual: what single entries add.
      covariance: the part of `residual` that is n·Cov over rows of θ_i·g_j and D_j; the rest is the columns' means.
      bound: Lemma 10's bound on the Frobenius norm of `measured`, one number per head, or per plane.
      rate: the same motion as a skew generator, or the rate of the angle.
    """

    measured: Element
    of_gradient: Element
    per_tensor: Element
    residual: Element
    covariance: Element
    bound: Element
    rate: Element


def step_leakage(gauge: Gauges, params: Any, step: Any) -> StepLeakage:
    """What the step of any optimizer leaks along one gauge's orbits.

    Args:
      gauge: one scale or rotation gauge.
      params: the point.
      step: a tangent; θ moves by −lr·step. What comes out of a `scale_by_…`, whatever it did to get there.

    Returns:
      Pairing and rate.

    Raises:
      ValueError: several gauges or one of another kind, bindings that do not fit.

    >>> gauge = go.rescale({"up": "_ _"}, {"down": "_ _"})
    >>> params = {"up": jnp.full((2, 2), 2.0), "down": jnp.ones((2, 2))}
    >>> float(go.measure.step_leakage(gauge, params, params).measured[""])  # 4·2² − 4·1²
    12.0
    """
    orbit = orbit_at(one_gauge("step_leakage", gauge, SCALES + ROTATIONS), params)
    tangent = orbit.own.vectors(step)
    return StepLeakage(orbit.pairing(tangent), orbit.rates(tangent))


def rescale_leakage(
    gauge: Gauges,
    params: Any,
    gradient: Any,
    preconditioner: Any,
    means: str = "entries",
) -> RescaleLeakage:
    """Lemma 7: what a coordinate-wise preconditioner leaks along a scale's orbits, and why.

    Args:
      gauge: one `rescale`, `norm_scale` or `scale_invariant`.
      params: the point.
      gradient: a cotangent; a first moment may take its place, its vertical part then shows in `of_gradient`.
      preconditioner: D, same structure, every leaf broadcastable to the parameter's shape.
      means: how a tensor's D is averaged: "entries", all alike, which is the lemma's; or "gradient", by g².

    Returns:
      The leakage and its terms, each in the structure of the gauge's element: one number per channel.

    Raises:
      ValueError: several gauges or one of another kind, other means, bindings
        that do not fit.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.array([[1.0], [1.0]]), "down": jnp.array([[2.0]])}
    >>> gradient = {"up": jnp.array([[1.0], [3.0]]), "down": jnp.array([[2.0]])}  # 1·1 + 1·3 = 2·2
    >>> found = go.measure.rescale_leakage(
    ...     gauge, params, gradient, {"up": jnp.array([[1.0], [2.0]]), "down": 1.0})
    >>> [float(x[""][0]) for x in found[:4]]  # 7 − 4 = 0 + (1.5 − 1)·4 + 2·Cov
    [3.0, 0.0, 2.0, 1.0]

    Reference: DDC Lemma 7, Remark 9. A channel is a pair of tensors of its own, so means are over a block's entries
    within the channel: for any degree p and number of blocks `per_tensor` is Σ_b w_b·(d̄_b − d̄)·⟨θ_b, g_b⟩, with two
    blocks and a horizontal g the lemma's (d̄_up − d̄_down)·⟨θ_up, g_up⟩. The lemma's "iff" overlooks that this is zero,
    too, where the gradient has no radial part.
    """
    orbit = orbit_at(one_gauge("rescale_leakage", gauge, SCALES), params)
    factors = _factors("rescale_leakage", orbit, gradient, preconditioner, means)
    terms = {
        i.key: _layers([_channel_tensor(i, block, weight, factors) for block, weight in i.weighted_blocks])
        for i in orbit.own.scales
    }
    return RescaleLeakage(measured=orbit.pairing(factors.step), rate=orbit.rates(factors.step), **_by_field(terms))


def rotation_leakage(
    gauge: Gauges,
    params: Any,
    gradient: Any,
    preconditioner: Any,
    means: str = "entries",
) -> RotationLeakage:
    """Lemma 10: what a coordinate-wise preconditioner leaks along a head's orbit, and why.

    Args:
      gauge: one `head_rotation` or `rope_torus`.
      params: the point.
      gradient: a cotangent; a first moment may take its place, its vertical part then shows in `of_gradient`.
      preconditioner: D, same structure, every leaf broadcastable to the parameter's shape.
      means: how a tensor's D is averaged: "entries", all alike, which is the lemma's; or "gradient", by g².

    Returns:
      The leakage and its terms in the structure of the gauge's element: skew `(*named, d_h, d_h)`, ½(S − Sᵀ) of S =
      Σ θᵀ(D⊙g), or `(*named, d_h/2)` for a torus.

    Raises:
      ValueError: several gauges or one of another kind, other means, bindings
        that do not fit.

    >>> gauge = go.head_rotation({"q": "_ basis", "k": "_ basis"})
    >>> params = {"q": jnp.array([[1.0, 0.0]]), "k": jnp.array([[0.0, 1.0]])}
    >>> gradient = {"q": jnp.array([[0.0, 2.0]]), "k": jnp.array([[2.0, 0.0]])}
    >>> found = go.measure.rotation_leakage(gauge, params, gradient, {"q": 3.0, "k": 1.0})
    >>> [float(x[""][0, 1]) for x in found[:4]]  # (3 − 1)·skew(qᵀg)₀₁
    [2.0, 0.0, 2.0, 0.0]

    Reference: DDC Lemma 10; grouped queries and tori by instance. The lemma writes its residual as a column-pair
    covariance, which holds for deviations of zero mean in every column; the deviations from a tensor's mean that it
    takes have zero mean over the tensor only. The columns' means add skew(θᵀg·diag(c − d̄)): `residual` − `covariance`.
    """
    orbit = orbit_at(one_gauge("rotation_leakage", gauge, ROTATIONS), params)
    factors = _factors("rotation_leakage", orbit, gradient, preconditioner, means)
    terms = {}
    for head in orbit.own.rotations:
        tensors = [_head_tensor(head, block, factors) for block in head.blocks]
        layers = _layers(tensors) | {"covariance": _sum([t.covariance for t in tensors])}
        parts = {field: turning_pairing(head, x) for field, x in layers.items()}
        terms[head.key] = parts | {"bound": _bound(head, tensors, parts)}
    return RotationLeakage(measured=orbit.pairing(factors.step), rate=orbit.rates(factors.step), **_by_field(terms))


# One tensor's share -------------------------------------------------------------------------------


class _Factors(NamedTuple):
    """What meets in a pairing, per bound leaf.

    Attributes:
      point: θ.
      gradient: g.
      d: D.
      weight: what an entry counts in a mean of D.
    """

    point: Arrays
    gradient: Arrays
    d: Arrays
    weight: Arrays

    @property
    def step(self) -> Arrays:
        """D⊙g."""
        return {p: self.d[p] * g for p, g in self.gradient.items()}


def _factors(caller: str, orbit: Orbit, gradient: Any, preconditioner: Any, means: str) -> _Factors:
    if means not in _MEANS:
        raise binding_error(
            caller,
            "bad means",
            repr(means),
            " or ".join(map(repr, _MEANS)),
            "write 'entries' for the lemma's means, 'gradient' where some entries have no gradient",
        )
    d, slopes = orbit.own.vectors(preconditioner), orbit.own.vectors(gradient)
    weight = {p: jnp.square(g) if means == "gradient" else jnp.ones_like(g) for p, g in slopes.items()}
    return _Factors(orbit.point, slopes, {p: jnp.broadcast_to(d[p], g.shape) for p, g in slopes.items()}, weight)


class _Tensor(NamedTuple):
    """What one block adds, per channel (*shape) or per head (*shape, d, d).

    Attributes:
      weight: what the block counts in a mean of D; for heads with trailing axes of length 1, as is `mean`.
      mean: d̄, the block's mean of D.
      slope: the pairing of the gradient itself.
      residual: the pairing of (D − d̄)⊙g.
      covariance: the part of `residual` that is no column's mean.
    """

    weight: jax.Array
    mean: jax.Array
    slope: jax.Array
    residual: jax.Array
    covariance: jax.Array


def _channel_tensor(instance: ScaleInstance, block: Block, exponent: float, factors: _Factors) -> _Tensor:
    products = factors.point[block.path] * factors.gradient[block.path]
    d, weight = factors.d[block.path], factors.weight[block.path]
    total = block.total(instance.named, weight)
    mean = safe_divide(block.total(instance.named, weight * d), total)
    slope = exponent * block.total(instance.named, products)
    residual = exponent * block.total(instance.named, products * (d - block.spread(instance.named, mean)))
    return _Tensor(total, mean, slope, residual, residual)


def _head_tensor(head: HeadInstance, block: HeadBlock, factors: _Factors) -> _Tensor:
    path = block.block.path
    hat, gradient, d, weight = factors.point[path], factors.gradient[path], factors.d[path], factors.weight[path]
    totals, sums = (_over_rows(head, block, x) for x in (weight, weight * d))
    columns = safe_divide(sums, totals)
    total = jnp.sum(totals, -1)[..., None, None]
    mean = safe_divide(jnp.sum(sums, -1)[..., None, None], total)
    centred = block.write(d, block.view(d) - head.along_basis(block, columns))
    slope = head.block_gram(block, hat, gradient)
    covariance = head.block_gram(block, hat, gradient * centred)
    return _Tensor(total, mean, slope, covariance + slope * (columns[..., None, :] - mean), covariance)


def _over_rows(head: HeadInstance, block: HeadBlock, leaf: jax.Array) -> jax.Array:
    """Sums over the rows of a block: (*shape, size)."""
    return head.block_gram(block, jnp.ones_like(leaf), leaf)[..., 0, :]


def _layers(tensors: Sequence[_Tensor]) -> dict[str, jax.Array]:
    """Pairings of D's three layers: its overall mean, the tensors' means beyond it, the entries beyond those."""
    overall = _overall_mean(tensors)
    return {
        "of_gradient": overall * _sum([t.slope for t in tensors]),
        "per_tensor": _sum([(t.mean - overall) * t.slope for t in tensors]),
        "residual": _sum([t.residual for t in tensors]),
    }


def _overall_mean(tensors: Sequence[_Tensor]) -> jax.Array:
    return safe_divide(_sum([t.weight * t.mean for t in tensors]), _sum([t.weight for t in tensors]))


def _bound(head: HeadInstance, tensors: Sequence[_Tensor], parts: Mapping[str, jax.Array]) -> jax.Array:
    """‖of_gradient‖ + Σ_b |d̄_b − d̄|·‖pairing of g_b‖ + ‖residual‖.

    With two blocks and a horizontal gradient the sum is |d̄_Q − d̄_K|·‖skew(θ_Qᵀg_Q)‖.
    """
    overall = _overall_mean(tensors)
    per_tensor = [
        jnp.abs(t.mean - overall)[..., 0, 0] * turning_size(head, turning_pairing(head, t.slope)) for t in tensors
    ]
    return _sum([turning_size(head, parts["of_gradient"]), *per_tensor, turning_size(head, parts["residual"])])


def _sum(arrays: Sequence[jax.Array]) -> jax.Array:
    return sum(arrays[1:], start=arrays[0])


def _by_field(terms: Mapping[str, Mapping[str, jax.Array]]) -> dict[str, Element]:
    """Instance → field → array, the other way round."""
    fields = next(iter(terms.values()), {})
    return {field: {key: parts[field] for key, parts in terms.items()} for field in fields}
