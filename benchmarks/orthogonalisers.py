"""The optimizers of the DDC paper's cost table (Table 8): ways to orthogonalise a momentum, with and without gauges.

They act on attention kernels alone. Each consists of Muon's momentum and an orthogonaliser, without the other links of
an optimizer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

import gauge_optax as go
from benchmarks.sizes import Case, muon_axes
from gauge_optax.linalg import polar

Matrices = list[jax.Array]
PLAIN = "plain Muon's orthogonaliser"
POLAR = "scaled polar per head, no gauge"


def orthogonalisers(case: Case) -> dict[str, optax.GradientTransformation]:
    """Name of a row → its optimizer. The first row is the base, with which the others are compared."""
    axes, by_head = muon_axes(case.params), muon_axes(case.params, per_head=True)
    return {
        PLAIN: optax.contrib.scale_by_muon(weight_dimension_numbers=axes),
        "plain Muon's, per head": optax.contrib.scale_by_muon(weight_dimension_numbers=by_head),
        POLAR: per_head(case.params, lambda matrices: [_sized(m, polar(m)) for m in matrices]),
        "exact SVD per head, no gauge": per_head(case.params, exact_polar),
        "scaled polar per head, rotation gauge": go.links.scale_by_scaled_polar(case.gauges, scale="rms"),
    }


def per_head(
    params: Any, orthogonalise: Callable[[Matrices], Matrices], beta: float = 0.95
) -> optax.GradientTransformation:
    """Muon's momentum, and then a function of each head's momentum.

    Args:
      params: attention kernels and nothing else.
      orthogonalise: kernels as (heads, d, d_head) → steps of the same shapes.
      beta: decay of the momentum.

    Returns:
      The transformation; its state is (count, momentum).
    """
    axes, treedef = jax.tree.flatten(muon_axes(params, True), lambda x: isinstance(x, MuonDimensionNumbers))
    # Orders of axes that lead from (d, heads, d_head) and from (heads, d_head, d) to (heads, d, d_head). Each is its
    # own inverse.
    orders = [(1, 0, 2) if numbers.reduction_axis == 0 else (0, 2, 1) for numbers in axes]

    def init(params: Any) -> tuple[jax.Array, Any]:
        return jnp.zeros((), jnp.int32), optax.tree.zeros_like(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = optax.safe_increment(state[0])
        momentum = optax.tree.update_moment(updates, state[1], beta, 1)
        later = optax.tree.bias_correction(momentum, beta, optax.safe_increment(count))
        now = optax.tree.bias_correction(updates, beta, count)
        ahead = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, later, now)
        heads = [x.transpose(order) for x, order in zip(jax.tree.leaves(ahead), orders, strict=True)]
        out = [x.transpose(order) for x, order in zip(orthogonalise(heads), orders, strict=True)]
        return jax.tree.unflatten(treedef, out), (count, momentum)

    return optax.GradientTransformation(init, update)


def exact_polar(matrices: Matrices) -> Matrices:
    """U·Vᵀ·‖M‖_F/√d_head from the singular value decomposition M = U·S·Vᵀ of every head.

    All heads are in one batch. Several decompositions at the same time can block each other for ever on two CPU
    threads.
    """
    whole = jnp.concatenate(matrices)
    left, _, right = jnp.linalg.svd(whole, full_matrices=False)
    return jnp.split(_sized(whole, jnp.matmul(left, right, precision="highest")), len(matrices))


def _sized(moment: jax.Array, factor: jax.Array) -> jax.Array:
    """Scales a polar factor to the Frobenius norm of its moment."""
    return jnp.linalg.norm(moment, axis=(-2, -1), keepdims=True) * moment.shape[-1] ** -0.5 * factor
