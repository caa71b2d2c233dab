"""Records in an optimizer's state how weight vectors turn: norm, angle and step of every vector.

`norms.equilibrium` predicts these numbers at equilibrium, and `rotational` keeps the angle at the predicted value.

Reference: Kosson, Messmer and Jaggi, "Rotational Equilibrium" (ICML 2024), §2, App. G and H.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import Axes, leaves_by_path
from gauge_optax.errors import binding_error
from gauge_optax.linalg import safe_divide, unit_and_size
from gauge_optax.measure._recording import recorded
from gauge_optax.measure.live import Figures
from gauge_optax.norms import vectors
from gauge_optax.norms.vectors import Leaves, Selection
from gauge_optax.transformation import checked_inner, layout, placeholder, require_every, transformation, updates_at
from gauge_optax.xla import zeros_of

# Two vectors count as parallel if the square of the sine of their angle is at most this many machine epsilons.
_ROUNDOFF = 8.0


class Rotation(NamedTuple):
    """The record of one step. Each field but the first maps leaf path to an array with one number per weight vector ω.

    An array has the named axes of the leaf's axes string. Symbols are those of the paper.

    Attributes:
      recorded_at: the number of that step, from 0.
      norm: ‖ω‖ before the step.
      rotation: the angle η_r between ω before and ω after the step, in radians.
      rms_update: ‖Δω‖, decay included. The paper's η_g is its root mean square over steps.
      weight_gradient_angle: the angle between ω and the gradient g, in radians; π/2 if the loss does not depend on ‖ω‖.
      gradient_momentum_angle: the angle between g and the first moment before the step, in radians. It is about π/2 if
        gradients of different steps are independent and have mean zero (a random walk).
      radial_decay: λ_u = ⟨ω, g⟩/‖ω‖². The part of g along ω is λ_u·ω, which acts like decay at this rate.
    """

    recorded_at: jax.Array
    norm: Figures
    rotation: Figures
    rms_update: Figures
    weight_gradient_angle: Figures
    gradient_momentum_angle: Figures
    radial_decay: Figures


class TrackRotationState(NamedTuple):
    """State of `track_rotation`.

    Attributes:
      inner_state: the state of the optimizer; () without an optimizer.
      taken: the number of steps so far.
      metrics: the last record.
    """

    inner_state: optax.OptState
    taken: jax.Array
    metrics: Rotation


def track_rotation(
    blocks: Mapping[str, Axes],
    inner: optax.GradientTransformation | None = None,
    *,
    every: int | np.integer[Any] | jax.Array = 50,
    sizes: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Records norm, angle and step of weight vectors. Updates pass unchanged.

    Use it around an optimizer, `go.measure.track_rotation(blocks, inner)`: it then sees the gradient, the first moment
    and the update. Or put it last in a chain, `optax.chain(optax.adamw(1e-3), go.measure.track_rotation(blocks))`: it
    then sees the update alone, and fields that need more are NaN, unless `update` gets `gradient=` and `momentum=`.
    Read a record by name: `optax.tree.get(state, "rotation")["mlp/up/kernel"]`.

    Args:
      blocks: path → axes string, as in `rotational`. A vector spans the axes `_`, and each index of the named axes has
        a vector of its own: `"_ channel"` for neurons.
      inner: an optimizer, which runs unchanged. Its first moment is the field named mu or trace in its state. If
        `inner` is a `quotient`, this moment is in slice coordinates, but the gradient is not. If a gauge rotates a
        vector, or scales its entries by different numbers, `gradient_momentum_angle` then has no meaning.
      every: the number of steps between records; the first step is recorded.
      sizes: axis name → length, for axes in parentheses, `(a b)`, which share one array axis, so that the array's shape
        does not determine their lengths.

    Returns:
      The transformation. Its `update` needs `params`.

    Raises:
      ValueError: when called, malformed axes or an `every` that is no positive int; at `init`, a path that no leaf
        matches, a leaf that `optax.MaskedNode` hides, or an entry in two vectors; `update` without params, or with a
        gradient or a momentum of another shape.

    >>> params = {"kernel": jnp.array([[3.0, 1.0], [4.0, 0.0]])}
    >>> tx = optax.chain(
    ...     optax.sgd(1.0), go.measure.track_rotation({"kernel": "_ channel"}, every=1)
    ... )
    >>> grads = {"kernel": jnp.array([[0.0, 0.0], [0.0, 1.0]])}
    >>> _, state = tx.update(grads, tx.init(params), params, gradient=grads)
    >>> optax.tree.get(state, "norm")["kernel"].tolist()
    [5.0, 1.0]
    >>> # The second column turns by 45 degrees.
    >>> optax.tree.get(state, "rotation")["kernel"].round(4).tolist()
    [0.0, 0.7853999733924866]

    Reference: Kosson et al. 2024, Eq. (3), App. G, Eq. (101).
    """
    require_every("track_rotation", every)
    specs = vectors.parse("track_rotation", "blocks", blocks, sizes)
    optimizer = None if inner is None else checked_inner("track_rotation", inner)

    def measured(params: Any, steps: Any, gradient: Any, momentum: Leaves, taken: jax.Array) -> Rotation:
        selections = vectors.resolve("track_rotation", specs, params)
        paths = [selection.block.path for selection in selections]
        leaves, gradients = leaves_by_path(params), leaves_by_path(gradient)
        moves = updates_at("track_rotation", paths, steps, params)
        for given in (gradients, momentum):  # some leaves may be missing in these two
            updates_at("track_rotation", [path for path in paths if path in given], given, params)
        # Several axes strings on one leaf have several records: path/0, path/1.
        keys = [path if paths.count(path) == 1 else f"{path}/{paths[:k].count(path)}" for k, path in enumerate(paths)]
        rows = [_figures(selection, leaves, moves, gradients, momentum) for selection in selections]
        columns = zip(*rows, strict=True)
        return Rotation(taken, *(Figures.of(dict(zip(keys, column, strict=True))) for column in columns))

    def empty(params: Any) -> TrackRotationState:
        inner_state = () if optimizer is None else optimizer.init(params)
        return TrackRotationState(inner_state, jnp.int32(0), placeholder())  # type: ignore[arg-type]

    def init(params: optax.Params) -> TrackRotationState:
        inner_state, taken = () if optimizer is None else optimizer.init(params), jnp.zeros((), jnp.int32)
        shapes = jax.eval_shape(lambda p: layout(p).run(measured, p, p, p, {}, taken), params)
        return TrackRotationState(inner_state, taken, zeros_of(shapes))

    def update(updates: Any, state: TrackRotationState, params: Any, **extra: Any) -> tuple[Any, TrackRotationState]:
        if optimizer is None:
            gradient, momentum = extra.get("gradient"), leaves_by_path(extra.get("momentum"))
        else:
            gradient, momentum = updates, _first_moments(state.inner_state)

        def step(gradient: optax.Updates) -> tuple[optax.Updates, optax.OptState]:
            if optimizer is None:
                return gradient, state.inner_state
            return optimizer.update(gradient, state.inner_state, params, **extra)

        def record(steps: optax.Updates) -> Rotation:
            return measured(params, steps, gradient, momentum, state.taken)

        steps, inner_state, metrics = recorded(step, record, state.metrics, updates, state.taken, every)
        return steps, TrackRotationState(inner_state, optax.safe_increment(state.taken), metrics)

    return transformation("track_rotation", init, update, TrackRotationState, empty)


def _first_moments(state: Any) -> dict[str, jax.Array]:
    """Returns leaf path → first moment, from all optimizers of a partition; raises ValueError where a leaf has two."""
    moments: dict[str, jax.Array] = {}
    trees = [tree for field in ("mu", "trace") for _, tree in optax.tree.get_all_with_path(state, field)]
    for path, moment in (pair for tree in trees for pair in leaves_by_path(tree).items()):
        if path in moments:
            raise binding_error(
                "track_rotation", f"several first moments of '{path}'", f"two in {type(state).__name__}", "one",
                "track the one optimizer that has the moment meant, inside the other",
            )
        moments[path] = moment
    return moments


def _figures(
    selection: Selection, leaves: Leaves, moves: Leaves, gradients: Leaves, momentum: Leaves
) -> tuple[jax.Array, ...]:
    """Returns the fields of `Rotation` from `norm` on, for the vectors that one axes string selects.

    Each vector is divided by its largest entry before sums over its entries are taken, because float32 cannot hold the
    squares of gradients of 1e-20 or 1e20.
    """
    path, weights, step = selection.block.path, selection.value(leaves), selection.view(moves)
    gradient = selection.view(gradients) if path in gradients else jnp.full_like(weights, jnp.nan)
    moment = selection.view(momentum) if path in momentum else jnp.full_like(weights, jnp.nan)

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(a * b, selection.axes)

    def direction(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns sine and cosine of the angle between two vectors."""
        squares = dot(a, a), dot(b, b)
        cosine = safe_divide(dot(a, b), jnp.sqrt(squares[0]) * jnp.sqrt(squares[1]))
        rest = (1.0 - cosine) * (1.0 + cosine)
        apart = (rest > _ROUNDOFF * jnp.finfo(rest.dtype).eps) & (squares[0] > 0) & (squares[1] > 0)
        return jnp.sqrt(jnp.where(apart | jnp.isnan(rest), rest, 0.0)), cosine

    units, sizes = zip(*(unit_and_size(x, selection.axes) for x in (weights, step, gradient, moment)), strict=True)
    most = [jnp.squeeze(size, selection.axes) for size in sizes]
    norm, step_norm = (most[k] * jnp.sqrt(dot(units[k], units[k])) for k in range(2))
    sine, cosine = direction(units[0], units[1])
    radial = safe_divide(dot(units[0], units[2]), dot(units[0], units[0]))
    return (
        norm,
        jnp.arctan2(step_norm * sine, norm + step_norm * cosine),
        step_norm,
        jnp.arctan2(*direction(units[0], units[2])),
        jnp.arctan2(*direction(units[2], units[3])),
        radial * safe_divide(most[2], most[0]),
    )
