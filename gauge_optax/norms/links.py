"""Two links of a chain: one gives updates the length 1 per weight vector, one keeps norms below a bound.

The first link stands before the learning rate, the second behind it. `max_norm_muon` is made of them; `max_norm` does
both around a whole optimizer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import Axes, leaves_by_path
from gauge_optax.errors import binding_error
from gauge_optax.linalg import near_power_of_two, real_dtype, root_mean_square, safe_divide, unit_and_size
from gauge_optax.norms import vectors
from gauge_optax.norms.vectors import Selection
from gauge_optax.transformation import GaugeTransformation, placeholder, require_number, transformation

Scalar = float | jax.Array
Sizes = Callable[[Selection], Scalar]
"""A function that returns one length for all vectors of a selection."""


class ScaleByVectorNormState(NamedTuple):
    """State of `scale_by_vector_norm`.

    Attributes:
      count: the number of steps so far, int32.
      length: leaf path → axes string → ν, the average over steps (root mean square) of the length of updates, shaped
        like the named axes.
    """

    count: Any
    length: Any


def scale_by_vector_norm(
    neurons: Mapping[str, Axes], *, beta: Scalar = 0.9, sizes: Mapping[str, int] | None = None
) -> GaugeTransformation:
    r"""Divides the update of every weight vector by its average length, so that its length is 1 on average over steps.

    For the update u of a vector at step t,

    .. math::
      \nu^2 \leftarrow \beta\nu^2 + (1 - \beta)\lVert u\rVert^2, \qquad u \leftarrow \frac{u}{\nu/\sqrt{1 - \beta^t}}

    Args:
      neurons: path → axes string. Named axes count vectors, and a vector spans the axes `_`: `"_ neuron"` for a kernel
        (inputs, outputs). Unlisted leaves keep their updates.
      beta: decay of the average of squared lengths; with 0, every update has exactly the length 1.
      sizes: axis name → length, for axes in parentheses, `(a b)`, whose lengths do not follow from a leaf's shape.

    Returns:
      A link; put it before the learning rate. Its `update` needs `params`, but uses only their shapes.

    Raises:
      ValueError: malformed axes; `beta` outside [0, 1); a path that matches no leaf; entries in two vectors; a state
        that was made for other vectors.

    >>> neurons = {"kernel": "_ neuron"}
    >>> tx = optax.chain(
    ...     go.links.scale_by_vector_norm(neurons),
    ...     optax.scale_by_learning_rate(0.1),
    ...     go.links.keep_norms_below(neurons, bound=1.0),
    ... )
    >>> params = {"kernel": jnp.array([[0.8, 0.0], [0.6, 0.0]])}
    >>> grads = {"kernel": jnp.array([[-7.0, 3.0], [0.0, 4.0]])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> moved = optax.apply_updates(params, updates)["kernel"]
    >>> jnp.linalg.norm(moved, axis=0).round(3)  # on the bound, and one step from zero
    Array([1. , 0.1], dtype=float32)

    Reference: Kosson et al. 2024, Algorithm 1, for steps of one length on average.
    """
    name = "scale_by_vector_norm"
    require_beta(name, beta)
    return vector_norm(name, vectors.parse(name, "neurons", neurons, sizes), beta, lambda selection: 1.0)


def vector_norm(name: str, specs: vectors.Specs, beta: Scalar, unit: Sizes) -> GaugeTransformation:
    """`scale_by_vector_norm` for parsed axes, with the name that errors carry, and the average length of updates."""

    def init(params: optax.Params) -> ScaleByVectorNormState:
        length = no_lengths(vectors.resolve(name, specs, params), params)
        return ScaleByVectorNormState(jnp.zeros((), jnp.int32), length)

    def update(updates: Any, state: ScaleByVectorNormState, params: Any, **extra: Any) -> tuple[Any, Any]:
        selections, count = vectors.resolve(name, specs, params, state.length), optax.safe_increment(state.count)
        correction = 1.0 - jnp.asarray(beta, real_dtype()) ** count

        def rule(x: Selection, point: jax.Array, tangent: jax.Array, usual: jax.Array) -> tuple[Any, Any]:
            direction, after = of_length_one(x, tangent, usual, beta, correction)
            return unit(x) * direction, after

        updates, length = vectors.moved(name, selections, rule, updates, params, state.length)
        return updates, ScaleByVectorNormState(count, length)

    def empty(params: Any) -> ScaleByVectorNormState:
        return ScaleByVectorNormState(jnp.int32(0), placeholder())

    return transformation(name, init, update, ScaleByVectorNormState, empty)


def keep_norms_below(
    neurons: Mapping[str, Axes], bound: Scalar = 1.0, *, sizes: Mapping[str, int] | None = None
) -> GaugeTransformation:
    r"""Scales back every weight vector that a step would make longer than a bound.

    For a vector p with the update u,

    .. math::
      q = p + u, \qquad
      p \leftarrow q\,\min\!\left(1, \frac{\max(R, \lVert p\rVert - \lVert u\rVert)}{\lVert q\rVert}\right)

    Args:
      neurons: path → axes string, as in `scale_by_vector_norm`. Unlisted leaves keep their updates.
      bound: R, the largest norm of a vector. A vector that starts above it never grows: its norm falls by the length of
        its step, until it is within the bound.
      sizes: axis name → length, for axes in parentheses, `(a b)`, whose lengths do not follow from a leaf's shape.

    Returns:
      A link without state; put it last in a chain. Its `update` needs `params`.

    Raises:
      ValueError: malformed axes; a bound that is not positive; a path that matches no leaf; entries in two vectors.

    >>> tx = optax.chain(optax.sgd(1.0), go.links.keep_norms_below({"w": "_ neuron"}, 2.0))
    >>> params = {"w": jnp.array([[1.0, 0.0]])}
    >>> updates, _ = tx.update({"w": jnp.array([[-5.0, -1.5]])}, tx.init(params), params)
    >>> [round(float(x), 3) for x in optax.apply_updates(params, updates)["w"][0]]
    [2.0, 1.5]

    Reference: Srebro and Shraibman 2005 for max-norm.
    """
    name = "keep_norms_below"
    require_bound(name, bound)
    return norms_below(name, vectors.parse(name, "neurons", neurons, sizes), bound, lambda selection: 1.0)


def norms_below(name: str, specs: vectors.Specs, bound: Scalar, unit: Sizes) -> GaugeTransformation:
    """`keep_norms_below` for parsed axes, with the name that errors carry, and the length that a bound of 1 means."""

    def init(params: optax.Params) -> optax.EmptyState:
        vectors.resolve(name, specs, params)  # raises where axes do not fit
        return optax.EmptyState()

    def update(updates: Any, state: optax.EmptyState, params: Any, **extra: Any) -> tuple[Any, optax.EmptyState]:
        def rule(x: Selection, point: jax.Array, tangent: jax.Array) -> tuple[Any]:
            return (kept_below(x, point, tangent, bound * unit(x)),)

        return vectors.moved(name, vectors.resolve(name, specs, params), rule, updates, params)[0], state

    def preflight(params: Any) -> list[ValueError]:
        return above(name, vectors.resolve(name, specs, params), params, bound, unit)

    return transformation(name, init, update, optax.EmptyState, lambda params: optax.EmptyState(), preflight=preflight)


def no_lengths(selections: list[Selection], params: Any) -> dict[str, dict[str, jax.Array]]:
    """Returns ν before the first step, zeros: leaf path → axes string → array, shaped like the named axes."""
    leaves = leaves_by_path(params)
    return vectors.by_axes(selections, [jnp.zeros_like(selection.norm(leaves)) for selection in selections])


def of_length_one(
    selection: Selection, tangent: jax.Array, usual: jax.Array, memory: Scalar, correction: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns updates divided by the average length of each vector's updates, and the new ν.

    Args:
      selection: the vectors.
      tangent: their updates, as `selection.view` returns them.
      usual: ν so far, the root mean square of the updates' lengths, shaped like the named axes.
      memory: β, the decay of ν².
      correction: 1 − βᵗ, which corrects the bias of ν².
    """
    direction, size = unit_and_size(tangent, selection.axes)
    share = jnp.sqrt(jnp.sum(direction * direction, selection.axes, keepdims=True))
    average = root_mean_square(memory, selection.spread(usual), size * share)
    return safe_divide(size, average / jnp.sqrt(correction)) * direction, average.reshape(jnp.shape(usual))


def kept_below(selection: Selection, point: jax.Array, step: jax.Array, bound: Scalar) -> jax.Array:
    """Returns the step changed so that no vector ends longer than max(bound, its norm less its step's length)."""

    def norm(x: jax.Array, unit: Scalar = 1.0) -> jax.Array:
        # All vectors have one unit, because XLA's CPU backend would store copies of entries over a unit of their own.
        return unit * jnp.sqrt(jnp.sum(jnp.square(x * (1.0 / unit)), selection.axes, keepdims=True))

    moved, length = point + step, norm(step)
    # In this unit the square of a huge step does not overflow, and what underflows is far below the bound. It is a
    # power of two, so that a vector that does not move has the same norm before and after.
    unit = 2.0**40 * near_power_of_two(jnp.asarray(bound, real_dtype()))
    after, most = norm(moved, unit), jnp.maximum(bound, norm(point, unit) - length)
    # Within the bound the step gets no roundoff.
    return jnp.where((after > most) & (length > 0), safe_divide(most, after) * moved - point, step)


def require_bound(name: str, bound: Scalar) -> None:
    """Raises ValueError for a bound that is no positive number."""
    require_number(name, "bound", bound, "(0, inf)", "write bound=1.0: the norm of a neuron at the start")


def require_beta(name: str, beta: Any) -> None:
    """Raises ValueError for a decay of an average that is no number in [0, 1)."""
    require_number(name, "beta", beta, "[0, 1)", "write beta=0.9; beta=0.0 averages over nothing but the last step")


_ABOVE = 1.25  # norms in units of the bound from which on `check` raises: LeCun-normal vectors have 1, He-normal 1.41


def above(name: str, selections: Sequence[Selection], params: Any, bound: Scalar, unit: Sizes) -> list[ValueError]:
    """Returns an error per selection whose vectors start above their bound; none for a bound that is traced."""
    leaves, errors = leaves_by_path(params), []
    for selection in selections if not isinstance(bound, jax.core.Tracer) else ():
        usual = float(jnp.sqrt(jnp.mean(jnp.square(selection.norm(leaves)))) / (bound * unit(selection)))
        if usual > _ABOVE:
            errors.append(binding_error(
                name, f"weights above the norm bound, '{selection.block.path}'",
                f"vectors \"{selection.block.axes}\" with a root mean square norm of {usual:.3g} times the bound",
                "vectors within the bound at the start: others shrink in training, whatever the loss says",
                f"write bound={1.1 * usual * float(bound):.2g} or more, or start from kernels of variance 1/inputs"))
    return errors
