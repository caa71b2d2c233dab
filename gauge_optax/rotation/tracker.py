"""How weight vectors turn while an optimizer runs: norm, angle and step per neuron, in its own state.

Here: figures of one step, and the element that keeps them. Not here: what they should be (`equilibrium`), what gauges
do (`live`), the optimizer that holds the angle (`transforms.rotational`).
Reference: Kosson, Messmer and Jaggi, "Rotational Equilibrium" (ICML 2024), §2, App. G and H.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import Axes, Block, binding_error, frozen_sizes, is_empty, leaves_by_path
from gauge_optax.checks import require_every, require_own, require_params, require_transformation, with_own_state
from gauge_optax.linalg import real_dtype, safe_divide
from gauge_optax.measure._recording import recorded
from gauge_optax.measure.live import Figures
from gauge_optax.meshes import layout
from gauge_optax.rotation.vectors import VectorSpec, taken, update_of, value, vector_specs, vectors

_NAME = "track_rotation"
_MOMENTS = ("mu", "trace")
_ROUNDING = 8.0


class Rotation(NamedTuple):
    """Of one step, per vector: leaf path → an array shaped like the named axes.

    Attributes:
      recorded_at: that step's number, from 0.
      norm: ‖ω‖ before it.
      rotation: the angle between ω before and after, radians: η_r.
      rms_update: ‖Δω‖, decay included; the root of its mean square over steps is η_g.
      weight_gradient_angle: ∠(ω, g), radians; π/2 where the loss does not see the size of ω.
      gradient_momentum_angle: ∠(g, m) with the moment before the step, radians; π/2 in a random walk.
      radial_decay: λ_u = ⟨ω, g⟩/‖ω‖², what of the gradient acts as decay; see `effective_decay`.
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
      inner_state: of the optimizer; () without one.
      taken: steps so far.
      metrics: of the step recorded last.
    """

    inner_state: optax.OptState
    taken: jax.Array
    metrics: Rotation


def track_rotation(
    blocks: Mapping[str, Axes],
    inner: optax.GradientTransformation | None = None,
    *,
    every: int | jax.Array = 50,
    sizes: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Records norm, angle and step of weight vectors; updates pass unchanged.

    Last in a chain, `optax.chain(optax.adamw(1e-3), go.track_rotation(blocks))`, it sees updates alone: what needs more
    is NaN, unless `update` is given `gradient=` and `momentum=`. Around an optimizer, `go.track_rotation(blocks,
    inner)`, it sees everything. Read it by name: `optax.tree.get(state, "rotation")["mlp/up/kernel"]`.

    Args:
      blocks: path → axes of the vectors, as in `rotational`: `"_ channel"` for neurons.
      inner: an optimizer, run as it is. Its first moment is what is called mu or trace in its state.
      every: steps between records, the first step among them.
      sizes: lengths of axes inside `(a b)` that shapes do not fix.

    Returns:
      The transformation. Its `update` needs `params`.

    Raises:
      ValueError: malformed axes, `every` that is no positive int, here; no match, a hidden leaf, entries in two
        vectors, at `init`; `update` without params.

    >>> params = {"kernel": jnp.array([[3.0, 1.0], [4.0, 0.0]])}
    >>> tx = optax.chain(optax.sgd(1.0), go.track_rotation({"kernel": "_ channel"}, every=1))
    >>> grads = {"kernel": jnp.array([[0.0, 0.0], [0.0, 1.0]])}
    >>> _, state = tx.update(grads, tx.init(params), params, gradient=grads)
    >>> optax.tree.get(state, "norm")["kernel"].tolist()
    [5.0, 1.0]
    >>> optax.tree.get(state, "rotation")["kernel"].round(4).tolist()  # the second by 45 degrees
    [0.0, 0.7853999733924866]

    Reference: Kosson et al. 2024, Eq. (3), App. G, Eq. (101).
    """
    require_every(_NAME, every)
    specs = vector_specs(_NAME, blocks, frozen_sizes(_NAME, sizes))
    if inner is not None:
        require_transformation(_NAME, inner)
    optimizer = None if inner is None else optax.with_extra_args_support(inner)

    def figures(params: optax.Params, *given: Any) -> Rotation:
        return layout(params).run(functools.partial(_rotation, specs), params, *given)

    def init_fn(params: optax.Params) -> TrackRotationState:
        inner_state = () if optimizer is None else optimizer.init(params)
        zero = jnp.zeros((), jnp.int32)
        if is_empty(params):
            return TrackRotationState(inner_state, zero, jnp.zeros(()))  # type: ignore[arg-type]
        shapes = jax.eval_shape(lambda p: figures(p, p, p, {}, zero), params)
        return TrackRotationState(inner_state, zero, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))

    def update_fn(
        updates: optax.Updates, state: TrackRotationState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, TrackRotationState]:
        require_params(_NAME, params)
        require_own(_NAME, state, TrackRotationState)
        if optimizer is None:
            gradient, momentum = extra.get("gradient"), leaves_by_path(extra.get("momentum"))
        else:
            gradient, momentum = updates, _first_moment(state.inner_state)

        def update(gradient: optax.Updates) -> tuple[optax.Updates, optax.OptState]:
            if optimizer is None:
                return gradient, state.inner_state
            with with_own_state(_NAME, optimizer, state.inner_state, params):
                return optimizer.update(gradient, state.inner_state, params, **extra)

        def record(steps: optax.Updates) -> Rotation:
            return figures(params, steps, gradient, momentum, state.taken)

        steps, inner_state, metrics = recorded(update, record, state.metrics, updates, state.taken, every)
        return steps, TrackRotationState(inner_state, optax.safe_increment(state.taken), metrics)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _first_moment(state: Any) -> dict[str, jax.Array]:
    """Leaf path → its first moment; of a partition each leaf's own."""
    found: dict[str, jax.Array] = {}
    for name in _MOMENTS:
        for _, tree in optax.tree.get_all_with_path(state, name):
            for path, moment in leaves_by_path(tree).items():
                if path in found:
                    raise binding_error(
                        _NAME, f"several first moments of '{path}'", f"two in {type(state).__name__}", "one",
                        "track the one optimizer that has the moment meant, inside the other",
                    )  # fmt: skip
                found[path] = moment
    return found


def _rotation(
    specs: Sequence[VectorSpec], params: Any, steps: Any, gradient: Any, momentum: Mapping[str, Any], step: jax.Array
) -> Rotation:
    leaves, moves = leaves_by_path(params), leaves_by_path(steps)
    gradients = leaves_by_path(gradient)
    columns: dict[str, dict[str, jax.Array]] = {name: {} for name in Rotation._fields[1:]}
    for path, bound in vectors(_NAME, specs, params).items():
        for number, (block, _) in enumerate(bound):
            move = update_of(_NAME, path, moves)
            found = _figures(block, leaves[path], move, gradients.get(path), momentum.get(path))
            name = path if len(bound) == 1 else f"{path}/{number}"
            for column, x in zip(columns.values(), found, strict=True):
                column[name] = x
    return Rotation(step, *(Figures.of(column) for column in columns.values()))


def _figures(block: Block, leaf: Any, move: Any, gradient: Any, momentum: Any) -> tuple[jax.Array, ...]:
    """From sums over a vector alone: a second reading of every leaf would cost as much as the first."""
    weights, step = value(block, leaf), _view(block, move)
    slope, moment = (None if x is None else _view(block, x) for x in (gradient, momentum))

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(a * b, taken(block))

    square, along, length = dot(weights, weights), dot(weights, step), dot(step, step)
    sine, cosine = _direction(along, square, length)
    size, reach = jnp.sqrt(square), jnp.sqrt(length)
    unknown = jnp.full_like(square, jnp.nan)
    pull, steep = (unknown, unknown) if slope is None else (dot(weights, slope), dot(slope, slope))
    met = unknown
    if slope is not None and moment is not None:
        met = jnp.arctan2(*_direction(dot(slope, moment), steep, dot(moment, moment)))
    return (
        size,
        jnp.arctan2(reach * sine, size + reach * cosine),
        reach,
        jnp.arctan2(*_direction(pull, square, steep)),
        met,
        safe_divide(pull, square),
    )


def _direction(product: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sine and cosine between two vectors, from their product and squares; parallel ones, up to rounding, have none."""
    cosine = safe_divide(product, jnp.sqrt(a) * jnp.sqrt(b))
    rest = (1.0 - cosine) * (1.0 + cosine)
    apart = (rest > _ROUNDING * jnp.finfo(rest.dtype).eps) & (a > 0) & (b > 0)
    return jnp.sqrt(jnp.where(apart, rest, jnp.where(jnp.isnan(rest), rest, 0.0))), cosine


def _view(block: Block, leaf: Any) -> jax.Array:
    return block.view(jnp.asarray(leaf, real_dtype()))
