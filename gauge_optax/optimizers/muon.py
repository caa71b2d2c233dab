"""Muon for some leaves, momentum for some, and Adam for all others: an ordinary optimizer, which `quotient` wraps.

If a rotation R turns a head's moment M = U·Σ·Vᵀ to M·R, the polar factor U·Vᵀ of M turns with it:
(M·R)(RᵀMᵀM·R)^(−1/2) = U·Vᵀ·R. If every head's kernel is one matrix, rotations of heads therefore need no frame.
References: Jordan et al. 2024 (Muon); DDC B.10 for heads.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import Axes, Block, is_empty, leaves_by_path, with_leaves
from gauge_optax.errors import binding_error
from gauge_optax.linalg import Coefficients
from gauge_optax.norms import vectors
from gauge_optax.optimizers.polar import Polar, polar_of
from gauge_optax.parts.matrices import Reading, neurons_reading
from gauge_optax.transformation import GaugeTransformation, LeafRule, transformation, updates_at
from gauge_optax.wrapped import preflight_of


class ScaleByHeadPolarState(NamedTuple):
    """State of `scale_by_head_polar`.

    Attributes:
      count: steps so far, int32.
      mu: first moment.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates


def muon(
    matrices: Callable[[Any], Mapping[str, Reading]],
    polar: Polar,
    nesterov: bool,
    mu_dtype: Any,
    matrix_tail: tuple[optax.GradientTransformation, ...],
    adam: optax.GradientTransformation,
    momentum: tuple[Callable[[Any], Collection[str]], optax.GradientTransformation] | None = None,
) -> GaugeTransformation:
    """Steps matrices by polar factors, the leaves that `momentum` names by their momentum, and all others by Adam.

    Args:
      matrices: a function of params that returns leaf path → which matrices the leaf holds, for the leaves that are
        stepped by polar factors. It uses only shapes.
      polar: settings of the polar factors.
      nesterov: whether matrices and momentum leaves use Nesterov momentum.
      mu_dtype: dtype of the first moments of matrices and momentum leaves.
      matrix_tail: transformations that follow the polar factor in a chain, such as decay and learning rate.
      adam: the optimizer of every other leaf.
      momentum: None, or two things: a function of params that returns the paths of the leaves that are stepped by their
        momentum, and a transformation that follows it, such as a learning rate.

    Returns:
      A whole optimizer.
    """

    # Shapes alone decide which leaves are matrices, so that `init` and every traced `update` make the same partition.
    def partition(params: Any) -> optax.GradientTransformationExtraArgs:
        read = {} if is_empty(params) else matrices(params)
        head_polar = scale_by_head_polar(polar, read, nesterov, mu_dtype)
        rules = {"muon": optax.chain(head_polar, *matrix_tail), "adam": adam}
        labels = dict.fromkeys(read, "muon")
        if momentum is not None:
            paths, tail = momentum
            rules["momentum"] = optax.chain(optax.trace(polar.beta, nesterov, mu_dtype), tail)
            labels |= dict.fromkeys(() if is_empty(params) else paths(params), "momentum")
        tree = with_leaves(jax.tree.map(lambda _: "adam", params), labels)
        # Not `tree` itself: if a user's parameters are a callable pytree, Optax would call it.
        return optax.partition(rules, lambda _: tree)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return partition(params).update(updates, state, params, **extra)

    def rules(params: Any) -> dict[str, LeafRule]:
        found = polar_rules(leaves_by_path(params), matrices(params))
        return found | dict.fromkeys(() if momentum is None else momentum[0](params), LeafRule("momentum"))

    preflight = preflight_of((matrix_tail, momentum))
    return GaugeTransformation(lambda params: partition(params).init(params), update_fn, (), rules, preflight)


def polar_rules(paths: Iterable[str], matrices: Mapping[str, Reading]) -> dict[str, LeafRule]:
    """Returns leaf path → the name of its rule, for `go.plan`: polar factors for matrices, Adam for all other leaves.
    """

    def rule(reading: Reading) -> LeafRule:
        by_head = all(piece.heads is not None for piece in reading.pieces)
        return LeafRule("per-head polar" if by_head else "polar", reading.text)

    return {path: rule(matrices[path]) if path in matrices else LeafRule("Adam") for path in paths}


def scale_by_head_polar(
    polar: Polar, matrices: Mapping[str, Reading], nesterov: bool, mu_dtype: Any
) -> optax.GradientTransformation:
    """Replaces gradients by the scaled polar factors of their first moments, matrix by matrix.

    Args:
      polar: settings of the polar factors.
      matrices: leaf path → which matrices the leaf holds, for every leaf of the updates.
      nesterov: whether to use Nesterov momentum.
      mu_dtype: dtype of the first moment.

    Returns:
      A transformation of gradients.
    """
    beta = polar.beta

    def init_fn(params: optax.Params) -> ScaleByHeadPolarState:
        return ScaleByHeadPolarState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params, dtype=mu_dtype))

    def update_fn(updates: Any, state: ScaleByHeadPolarState, params: Any = None) -> tuple[Any, Any]:
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        if nesterov:
            ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            now = optax.tree.bias_correction(updates, beta, count)
            mean = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        else:
            mean = optax.tree.bias_correction(mu, beta, count)
        steps = polar.steps(matrices, leaves_by_path(mean))
        return with_leaves(updates, steps), ScaleByHeadPolarState(count, optax.tree.cast(mu, mu_dtype))

    return optax.GradientTransformation(init_fn, update_fn)


def scale_by_polar(
    neurons: Mapping[str, Axes],
    ns_coeffs: Coefficients = "standard",
    ns_steps: int | None = None,
    eps: float | jax.Array = 1e-8,
    *,
    sizes: Mapping[str, int] | None = None,
) -> GaugeTransformation:
    """Replaces the update of every kernel by its approximate polar factor times √max(1, outputs/inputs): Muon's step.

    Args:
      neurons: path → axes of kernels, as in `max_norm_muon`: `_` are a neuron's inputs, and named axes count neurons.
        A leaf is one matrix, or one per index of axes named `layer` or `expert`. Unlisted leaves keep their updates.
      ns_coeffs: see `scale_by_scaled_polar`.
      ns_steps: see `scale_by_scaled_polar`.
      eps: see `scale_by_scaled_polar`.
      sizes: axis name → length, for axes in parentheses, `(a b)`, whose lengths do not follow from a leaf's shape.

    Returns:
      A link without state; put it behind a momentum. Its `update` needs `params`, but uses only their shapes.

    Raises:
      ValueError: malformed axes; a path that matches no leaf; an entry in two matrices; neurons that describe no
        matrix.

    >>> neurons = {"kernel": "_ neuron"}
    >>> tx = optax.chain(
    ...     optax.trace(0.95, nesterov=True),
    ...     go.links.scale_by_polar(neurons, "sharp"),
    ...     go.links.scale_by_vector_norm(neurons),
    ...     optax.scale_by_learning_rate(0.02),
    ...     go.links.keep_norms_below(neurons),
    ... )
    >>> params = {"kernel": 0.5 * jnp.eye(2)}
    >>> grads = {"kernel": -jnp.diag(jnp.array([1.0, 9.0]))}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> jnp.abs(updates["kernel"]).round(3)
    Array([[0.02, 0.  ],
           [0.  , 0.02]], dtype=float32)

    Reference: Jordan et al. 2024 (Muon).
    """
    name = "scale_by_polar"
    specs = vectors.parse(name, "neurons", neurons, sizes)
    polar = polar_of(name, ns_coeffs, ns_steps, 0.0, eps, "width", None)

    def init(params: optax.Params) -> optax.EmptyState:
        readings_of_neurons(name, vectors.resolve(name, specs, params))  # raises where axes describe no matrix
        return optax.EmptyState()

    def update(updates: Any, state: optax.EmptyState, params: Any, **extra: Any) -> tuple[Any, optax.EmptyState]:
        selections = vectors.resolve(name, specs, params)
        read = readings_of_neurons(name, selections)
        leaves = updates_at(name, read, updates, params)
        steps = polar.steps(read, {path: leaves[path] for path in read})
        return with_leaves(updates, {path: x.astype(leaves[path].dtype) for path, x in steps.items()}), state

    return transformation(name, init, update, optax.EmptyState, lambda params: optax.EmptyState())


def readings_of_neurons(name: str, selections: Iterable[vectors.Selection]) -> dict[str, Reading]:
    """Returns leaf path → the matrices that the leaf's neurons form. Raises ValueError for neurons that form none."""
    blocks: dict[str, list[Block]] = {}
    for selection in selections:
        blocks.setdefault(selection.block.path, []).append(selection.block)
    read = {path: neurons_reading(own) for path, own in blocks.items()}
    if none := [path for path, reading in read.items() if reading is None]:
        axes = " and ".join(f'"{block.axes}"' for block in blocks[none[0]])
        raise binding_error(
            name, f"the neurons of '{none[0]}' describe no matrix", f"axes {axes}",
            "'_' for a neuron's inputs in one axis, and a name that counts neurons in another",
            'write "_ neuron" for a kernel of (inputs, outputs), and leave vectors out',
        )
    return {path: reading for path, reading in read.items() if reading is not None}
