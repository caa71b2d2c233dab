"""Controlled rotation: weight vectors turn by a set angle a step on average, at a norm that never changes.

Weight decay brings a weight vector to a norm at which noise and decay make up for each other; from then on it turns by
an angle that learning rate and decay alone decide (`measure.equilibrium`). The wrapper takes that angle from the first
step on and needs no decay: of any optimizer's update it keeps the direction, and of its length how it varies from step
to step.

Here: the wrapper, and where its angle comes from. Not here: aliases (`rotational_optimizers`), predictions
(`measure.equilibrium`), which entries make a vector (`_vectors`), spheres for a step that comes from outside
(`hyperball`).
Reference: Kosson, Messmer and Jaggi, "Rotational Equilibrium" (ICML 2024), Algorithm 1.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import Axes, Block, binding_error, frozen_sizes, is_empty, leaves_by_path
from gauge_optax.checks import require_own, require_params, require_transformation, with_own_state
from gauge_optax.linalg import real_dtype, safe_divide
from gauge_optax.rotation.vectors import (
    beside,
    each,
    entries,
    norm,
    one_or_all,
    taken,
    update_of,
    value,
    vector_specs,
    vectors,
)
from gauge_optax.transforms._common import in_dtype_of, placeholder

Scalar = float | jax.Array

# A sum's rounding, in units of eps: what is smaller than this share of a squared step is none of its own.
_ROUNDING = 16.0


class RotationalState(NamedTuple):
    """State of `rotational`.

    Attributes:
      inner_state: of the optimizer.
      count: steps so far.
      tracked: those whose learning rate was not zero.
      length: leaf path → norms at `init`, shaped like the named axes; a tuple of them where a leaf has several blocks.
      square: likewise, the average squared length of the inner update over its learning rate, across the vector.
      gain: likewise, what multiplies the norm, where it is trained; else ().
      gain_state: of the gains' optimizer; else ().
    """

    inner_state: optax.OptState
    count: Any
    tracked: jax.Array
    length: Any
    square: Any
    gain: Any
    gain_state: Any


class Rule(NamedTuple):
    """What decides a step: the arguments of `rotational` that are no binding."""

    learning_rate: optax.ScalarOrSchedule
    weight_decay: optax.ScalarOrSchedule
    eta_r: optax.ScalarOrSchedule | None = None
    beta: Scalar = 0.9
    eps: Scalar = 1e-8
    center: bool = True
    gain: optax.GradientTransformation | None = None
    b1: Scalar = 0.9
    b2: Scalar = 0.99


def rotational(
    inner: optax.GradientTransformation,
    blocks: Mapping[str, Axes],
    *,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule,
    eta_r: optax.ScalarOrSchedule | None = None,
    beta: Scalar = 0.9,
    eps: Scalar = 1e-8,
    center: bool = True,
    gain: optax.GradientTransformation | None = None,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    sizes: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Rotates weight vectors by a set angle a step on average, in the direction of another optimizer's updates.

    Per vector p of norm n, with Δ what `inner` gives, over its learning rate and across p and 1:

    .. math::
      \nu \leftarrow \beta\nu + (1 - \beta)\lVert\Delta\rVert^2, \qquad
      p \leftarrow n\,\frac{q}{\lVert q\rVert}, \quad
      q = p + \eta_r\, n\, \frac{\Delta}{\sqrt{\nu/(1 - \beta^t) + \epsilon}}

    Args:
      inner: a whole optimizer, its learning rate in it. Decay that it applies to p is along p, and drops out; leaves
        that `blocks` do not list get its update as it is, decay included.
      blocks: path → axes, as in gauges. Named axes count vectors, `_` is what a vector takes up: `"_ channel"` for a
        neuron per output, `"_ head _"` per head, `"_ _"` for a layer.
      learning_rate: inner's, a number or a schedule.
      weight_decay: λ of equilibrium, a number or a schedule; nothing decays by it.
      eta_r: radians a step, a number or a schedule. None for Table 1's, by what kind of state `inner` has: √(2ηλ·(1 −
        β₁)/(1 + β₁)) for Adam, whatever decay it sees; √(2ηλ/(1 + α)) for momentum; √(πηλγ) for Lion. For Adam on g +
        λω that is the paper's special variant: one rule's direction, the other's angle.
      beta: memory of the average squared length; 0 turns by exactly `eta_r` each step.
      eps: added to that average. It is a squared length over a squared learning rate, so that for SGD it depends on the
        loss's scale: 0 is safe.
      center: whether vectors, and how they turn, are kept of mean zero; the first step takes their mean away.
      gain: trains a factor on each vector's norm with this optimizer, for weights whose size matters; the norm is then
        that at `init` times the gain, which starts at 1 and may not reach 0.
      b1: inner's momentum β₁ or α, for Table 1 alone.
      b2: Lion's second momentum, for Table 1 alone.
      sizes: lengths of axes inside `(a b)` that shapes do not fix.

    Returns:
      A whole optimizer. State: two scalars a vector beside inner's; with `gain` one more, and its optimizer's.

    Raises:
      ValueError: malformed axes, here; vectors too short to turn, no match, entries in two vectors, a hidden leaf, an
        `inner` whose state does not tell what kind it is, without `eta_r`, at `init`; `update` without params.

    A vector that is zero at `init` has no norm to keep: it gets inner's update throughout. A step whose learning rate
    is zero turns nothing.

    >>> params = {"kernel": jnp.array([[3.0, 0.0], [-4.0, 2.0], [1.0, -2.0]]), "bias": jnp.zeros(2)}
    >>> tx = go.rotational(optax.adamw(1e-3), {"kernel": "_ channel"}, learning_rate=1e-3, weight_decay=0.1)
    >>> step, state = tx.update({"kernel": jnp.eye(3, 2), "bias": jnp.ones(2)}, tx.init(params), params)
    >>> moved = optax.apply_updates(params, step)["kernel"]
    >>> bool(jnp.allclose(jnp.linalg.norm(moved, axis=0), jnp.linalg.norm(params["kernel"], axis=0)))
    True

    Reference: Kosson et al. 2024, Algorithm 1, Table 1, App. I. Deviations: vectors are centred in the first step, not
      before it (a transformation cannot change parameters at `init`); ν and its correction wait while the learning rate
      is zero; `gain` is trained beside the vector and multiplied in, where the paper has a parameter of the model.
    """
    settings = Rule(learning_rate, weight_decay, eta_r, beta, eps, center, gain, b1, b2)
    return rotating("rotational", inner, blocks, settings, sizes)


def rotating(
    name: str,
    inner: optax.GradientTransformation,
    blocks: Mapping[str, Axes],
    rule: Rule,
    sizes: Mapping[str, int] | None,
) -> optax.GradientTransformationExtraArgs:
    """`rotational` under the name that messages are to have."""
    specs = vector_specs(name, blocks, frozen_sizes(name, sizes))
    require_transformation(name, inner)
    inner, trained = optax.with_extra_args_support(inner), rule.gain is not None
    gains = optax.with_extra_args_support(optax.identity() if rule.gain is None else rule.gain)

    def rotation(state: RotationalState, eta: jax.Array) -> jax.Array:
        if rule.eta_r is not None:
            return _at(rule.eta_r, state.count)
        return _table_1(name, state.inner_state, eta * _at(rule.weight_decay, state.count), rule)

    def init_fn(params: optax.Params) -> RotationalState:
        inner_state, zero = inner.init(params), jnp.zeros((), jnp.int32)
        if is_empty(params):
            gain_part = (placeholder(), gains.init(params)) if trained else ((), ())
            return RotationalState(inner_state, zero, zero, placeholder(), placeholder(), *gain_part)
        if rule.eta_r is None:
            _table_1(name, inner_state, jnp.ones(()), rule)
        leaves, bound = leaves_by_path(params), vectors(name, specs, params)
        norms = {path: [norm(b, value(b, leaves[path])) for b, _ in own] for path, own in bound.items()}
        for path, own in bound.items():
            for block, _ in own:
                _check_length(name, path, block, rule.center)
        start = {path: one_or_all(own) for path, own in norms.items()}
        ones = jax.tree.map(jnp.ones_like, start)
        squares = jax.tree.map(jnp.zeros_like, start)
        return RotationalState(
            inner_state, zero, zero, start, squares, *((ones, gains.init(ones)) if trained else ((), ()))
        )

    def update_fn(
        updates: optax.Updates, state: RotationalState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, RotationalState]:
        require_params(name, params)
        require_own(name, state, RotationalState)
        with with_own_state(name, inner, state.inner_state, params):
            moves, inner_state = inner.update(updates, state.inner_state, params, **extra)
        eta = _at(rule.learning_rate, state.count)
        going = eta != 0
        tracked = state.tracked + going.astype(jnp.int32)
        turning = _Turning(
            jnp.where(going, rotation(state, eta), 0.0),
            jnp.where(going, safe_divide(jnp.ones_like(eta), eta), 0.0),
            jnp.where(going, rule.beta, 1.0),
            1.0 - jnp.asarray(rule.beta, real_dtype()) ** jnp.maximum(tracked, 1),
            rule.eps,
            rule.center,
        )
        leaves, tangents, gradients = (leaves_by_path(tree) for tree in (params, moves, updates))
        bound = vectors(name, specs, params)
        gain_now, gain_state = state.gain, state.gain_state
        if trained:
            slopes = {
                path: one_or_all([
                    _slope(b, leaves[path], update_of(name, path, gradients), g)
                    for (b, _), g in zip(own, each(state.gain[path]), strict=True)
                ])
                for path, own in bound.items()
            }  # fmt: skip
            steps, gain_state = gains.update(slopes, state.gain_state, state.gain)
            gain_now = optax.apply_updates(state.gain, steps)
        out, squares = {}, {}
        for path, own in bound.items():
            tangent = update_of(name, path, tangents)
            moved, kept = jnp.asarray(tangent, real_dtype()), []
            wanted = jax.tree.map(jnp.multiply, state.length[path], gain_now[path]) if trained else state.length[path]
            for (block, _), length, square in zip(own, each(wanted), each(state.square[path]), strict=True):
                chord, square = _turned(block, leaves[path], moved, length, square, turning)
                moved = block.write(moved, chord)
                kept.append(square)
            out[path], squares[path] = moved, one_or_all(kept)
        count = optax.safe_increment(state.count)
        return in_dtype_of(moves, out), RotationalState(
            inner_state, count, tracked, state.length, squares, gain_now, gain_state
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


# One vector, or several side by side -----------------------------------------------------------------


class _Turning(NamedTuple):
    """What all vectors of a step share: the angle, 1/η (0 for none), β, ν's correction, ε, whether to centre."""

    angle: jax.Array
    undo: jax.Array
    memory: jax.Array
    seen: jax.Array
    eps: Scalar
    center: bool


def _turned(
    block: Block, leaf: Any, tangent: jax.Array, length: Any, square: Any, turning: _Turning
) -> tuple[jax.Array, jax.Array]:
    """The chord to the turned vectors, and ν: p and Δ are read once for five sums and once for the sum of both."""
    axes, count = taken(block), entries(block)
    point, arriving = value(block, leaf), block.view(tangent)
    share = 1.0 / count if turning.center else 0.0

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axes, keepdims=True)

    mean, drift = share * total(point), share * total(arriving)
    square_of_point, sure = total(point * point), _ROUNDING * jnp.finfo(point.dtype).eps
    size = square_of_point - count * mean * mean
    # Of a constant vector rounding alone is left.
    size = jnp.where(size > sure * square_of_point, size, 0.0)
    along = safe_divide(total(point * arriving) - count * mean * drift, size)
    whole = total(arriving * arriving)
    across = whole - count * drift * drift - along * along * size
    # What is left of a step along p and 1 is rounding.
    across = jnp.where(across > sure * whole, across, 0.0)
    average = beside(block, square)
    average = turning.memory * average + (1.0 - turning.memory) * (across * turning.undo**2)
    # The turned vector is a·p + b·Δ + c: here + turn, of lengths 1 and t across each other.
    usual = jnp.sqrt(average / turning.seen + turning.eps)
    pace = turning.angle * turning.undo * safe_divide(jnp.ones_like(usual), usual)
    pace = jnp.where(across > 0, pace, 0.0)
    wanted = beside(block, length)
    reach = wanted / jnp.sqrt(1.0 + pace * pace * across)
    here = reach * safe_divide(jnp.ones_like(size), jnp.sqrt(size))
    a, b = here - reach * pace * along, reach * pace
    chord = jnp.where((size > 0) & (wanted != 0), (a - 1.0) * point + b * arriving - (a * mean + b * drift), arriving)
    return chord, average.reshape(jnp.shape(square))


def _slope(block: Block, leaf: Any, gradient: Any, gain: Any) -> jax.Array:
    """The loss's derivative by the gain: ⟨p, g⟩ over it."""
    view = value(block, leaf) * block.view(jnp.asarray(gradient, real_dtype()))
    return safe_divide(jnp.sum(view, taken(block)), gain)


def _at(given: optax.ScalarOrSchedule, count: jax.Array) -> jax.Array:
    return jnp.asarray(given(count) if callable(given) else given, real_dtype())


def _check_length(name: str, path: str, block: Block, center: bool) -> None:
    least = 3 if center else 2
    if entries(block) < least:
        raise binding_error(
            name, f"nothing to turn at '{path}'", f"vectors of {entries(block)} entries, axes \"{block.axes}\"",
            f"at least {least}" + (" with center=True" if center else ""),
            "leave norms and biases out: they get the inner update; in a kernel, `_` is the axis that is summed over",
        )  # fmt: skip


# Table 1 ---------------------------------------------------------------------------------------------


def _table_1(name: str, inner_state: Any, product: jax.Array, rule: Rule) -> jax.Array:
    """The angle by the kind of state that `inner` has; `product` is ηλ."""
    kinds = [kind for kind in _KINDS if _holds(inner_state, kind)]
    if len(kinds) != 1:
        raise binding_error(
            name, f"the angle of Table 1 for {'several kinds' if kinds else 'an unknown kind'} of optimizer",
            ", ".join(kind.__name__ for kind in kinds) or f"a state of {type(inner_state).__name__}",
            f"one of {', '.join(kind.__name__ for kind in _KINDS)} in inner's state",
            "give eta_r: radians a step, a number or a schedule",
        )  # fmt: skip
    return jnp.sqrt(2.0 * product * _KINDS[kinds[0]](rule.b1, rule.b2))


def _holds(state: Any, kind: type) -> bool:
    return any(isinstance(x, kind) for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind)))


# η_r²/(2ηλ) of Table 1: what one step turns beside what its gradient turns in all.
_KINDS: dict[type, Callable[[Any, Any], Any]] = {
    optax.ScaleByAdamState: lambda b1, b2: (1 - b1) / (1 + b1),
    optax.TraceState: lambda b1, b2: 1 / (1 + b1),
    optax.ScaleByLionState: lambda b1, b2: jnp.pi / 2 * ((1 - b1) ** 2 + b1**2 * (1 - b2) / (1 + b2)),
}
