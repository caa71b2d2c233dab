"""Muon with one matrix per head, to run on the slice.

A rotation of a head's basis carries over to a polar factor, (M·R)(RᵀMᵀM·R)^(−1/2) = U·Vᵀ·R, so that rotations need no
frame where matrices are read per head. Which leaves are matrices, and along which axes, is read off the gauges'
bindings.

Here: routing and the momentum. Not here: the polar factor (`linalg.polar`), the slice. References: Jordan et al. 2024
(Muon); DDC B.10 for heads.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import is_empty, leaves_by_path, with_leaves
from gauge_optax.gauges.gauge import Product
from gauge_optax.gauges.matrices import Matrices
from gauge_optax.optimizers.polar import PolarOptions, Routing, polar_steps
from gauge_optax.slice import Slice


class ScaleByHeadPolarState(NamedTuple):
    """State of `scale_by_head_polar`.

    Attributes:
      count: steps so far, int32.
      mu: first moment.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates


@dataclasses.dataclass(frozen=True)
class Muon:
    """The settings of Muon and of the Adam beside it, as `optax.contrib.muon` names them.

    Attributes:
      polar: of matrices.
      nesterov: whether to use Nesterov momentum, for both.
      mu_dtype: dtype of the first moment.
      matrix_tail: decay and learning rate of matrices, a chain's rest.
      adam: the optimizer of every other leaf.
      routing: which leaves are matrices.
      heads_per_matrix: how many neighbouring heads make one matrix.
    """

    polar: PolarOptions
    nesterov: bool
    mu_dtype: Any
    matrix_tail: tuple[optax.GradientTransformation, ...]
    adam: optax.GradientTransformation
    routing: Routing
    heads_per_matrix: int

    def matrices(self, group: Product, params: Any) -> dict[str, Matrices]:
        """Leaf path → how it is read, for leaves stepped by their polar factor."""
        found = self.routing.matrices(Slice.of(group.parts, params), params)
        return {path: own.grouped(path, self.heads_per_matrix) for path, own in found.items()}


def muon(settings: Muon, group: Product) -> optax.GradientTransformationExtraArgs:
    """Polar factors for matrices, Adam for the rest: an ordinary optimizer, for points of the slice."""

    def of(params: Any) -> optax.GradientTransformationExtraArgs:
        matrices = {} if is_empty(params) else settings.matrices(group, params)
        labels = jax.tree.map(lambda _: "adam", params)
        transforms = {
            "muon": optax.chain(scale_by_head_polar(settings, matrices), *settings.matrix_tail),
            "adam": settings.adam,
        }
        return optax.partition(transforms, with_leaves(labels, dict.fromkeys(matrices, "muon")))

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return of(params).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(lambda params: of(params).init(params), update_fn)


def scale_by_head_polar(settings: Muon, matrices: Mapping[str, Matrices]) -> optax.GradientTransformation:
    """The scaled polar factor of every matrix of a first moment.

    Args:
      settings: see `Muon`.
      matrices: leaf path → how it is read; every leaf it sees is among them.

    Returns:
      A transformation of gradients.
    """
    beta = settings.polar.beta

    def init_fn(params: optax.Params) -> ScaleByHeadPolarState:
        mu = optax.tree.zeros_like(params, dtype=settings.mu_dtype)
        return ScaleByHeadPolarState(jnp.zeros((), jnp.int32), mu)

    def update_fn(updates: Any, state: ScaleByHeadPolarState, params: Any = None) -> tuple[Any, Any]:
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        if settings.nesterov:
            ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            now = optax.tree.bias_correction(updates, beta, count)
            mean = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        else:
            mean = optax.tree.bias_correction(mu, beta, count)
        steps = polar_steps(settings.polar, matrices, leaves_by_path(mean))
        return with_leaves(updates, steps), ScaleByHeadPolarState(count, optax.tree.cast(mu, settings.mu_dtype))

    return optax.GradientTransformation(init_fn, update_fn)
