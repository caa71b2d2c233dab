"""`rotational`: weight vectors turn by a set angle a step on average, and their norms never change.

Gradient noise makes a weight vector longer and weight decay makes it shorter, until its norm settles where the two
cancel. From then on the vector turns by an angle per step that only learning rate and decay decide (`equilibrium`). The
wrapper turns vectors by that angle from the first step on, without decay. It takes the direction, and how the length
varies from step to step, from the update of another optimizer.

Reference: Kosson, Messmer and Jaggi, "Rotational Equilibrium" (ICML 2024), Algorithm 1.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import Axes, leaves_by_path
from gauge_optax.errors import binding_error, counted
from gauge_optax.linalg import root_mean_square, safe_divide, unit_and_size
from gauge_optax.norms import vectors
from gauge_optax.norms.equilibrium import predict_equilibrium
from gauge_optax.norms.links import require_beta
from gauge_optax.norms.vectors import Clock, Selection, at
from gauge_optax.transformation import checked_inner, placeholder, require_number, require_rates, transformation
from gauge_optax.wrapped import preflight_of

Scalar = float | jax.Array

# The class of an optimizer's state → its row in the paper's Table 1, see `equilibrium`.
_KINDS: dict[type, str] = {optax.ScaleByAdamState: "adamw", optax.TraceState: "sgdm", optax.ScaleByLionState: "lion"}
# A difference of sums counts as zero if it is below this many machine epsilons of the squared length it came from.
_ROUNDOFF = 16.0


class RotationalState(NamedTuple):
    """State of `rotational`.

    Attributes:
      inner_state: the state of the optimizer inside.
      count: the number of steps so far.
      tracked: the number of steps whose learning rate was not zero.
      length: leaf path → axes string → norms at `init`, shaped like the named axes. `update` raises an error for other
        paths or strings.
      square: in the same form, −√ν, where ν is the average of ‖Δ‖², see `rotational`; ν itself may be no float32. A
        positive number is ν, as states of earlier versions have it.
      gain: in the same form, the trained factor of each norm; () without `gain`.
      gain_state: the state of the optimizer that trains these factors; () without `gain`.
    """

    inner_state: optax.OptState
    count: Any
    tracked: jax.Array
    length: Any
    square: Any
    gain: Any
    gain_state: Any


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

    Let p be a vector of norm n, η the learning rate, η_r the angle in radians, and t the number of steps. Δ is the
    update of `inner` divided by η, without its parts along p and along the vector of ones. Then

    .. math::
      \nu \leftarrow \beta\nu + (1 - \beta)\lVert\Delta\rVert^2, \qquad
      p \leftarrow n\,\frac{q}{\lVert q\rVert}, \quad
      q = p + \eta_r\, n\, \frac{\Delta}{\sqrt{\nu/(1 - \beta^t) + \epsilon}}

    Args:
      inner: a whole optimizer, its learning rate included. A decoupled decay of p is along p and drops out. A decay
        that is added to gradients before a momentum (ℓ2) is along earlier values of p, which have a small angle to p,
        and drops out nearly: with SGD one step differs by 7e-6 from that of the paper's Algorithm 1. Leaves that
        `blocks` do not list get `inner`'s update, decay included.
      blocks: path → axes string, as in gauges. Named axes count vectors, and a vector spans the axes `_`: `"_ channel"`
        makes a vector per output, `"_ head _"` one per head, `"_ _"` one per layer.
      learning_rate: the learning rate of `inner`, a number or a schedule.
      weight_decay: λ in the default of `eta_r`, a number or a schedule. It does not decay any weight.
      eta_r: radians a step, a number or a schedule. None for the angle of the paper's Table 1, chosen by the class of
        `inner`'s state: √(2ηλ·(1 − β₁)/(1 + β₁)) for Adam, whether its decay is decoupled or not; √(2ηλ/(1 + α)) for
        momentum; √(πηλγ) for Lion, where `norms/equilibrium.py` defines γ. If Adam gets gradients plus λp, this is the
        paper's special variant: directions of Adam with ℓ2, angle of AdamW.
      beta: decay of the average of squared lengths; with 0, each step turns by exactly `eta_r`.
      eps: added to the average ν of ‖Δ‖². For SGD, ν depends on the scale of the loss, so that only 0 is safe.
      center: if True, vectors and their steps have a mean of zero; the first step removes the vectors' means.
      gain: None, or an optimizer that trains a factor of each vector's norm, for weights whose size matters. The norm
        is then the norm at `init` times this factor, which starts at 1 and may not reach 0.
      b1: the momentum of `inner`, β₁ or α; only the default of `eta_r` uses it.
      b2: the second momentum β₂ of Lion; only the default of `eta_r` uses it.
      sizes: axis name → length, for axes in parentheses, `(a b)`, whose lengths do not follow from a leaf's shape.

    Returns:
      A whole optimizer. Beside the state of `inner`, its state has two numbers per vector; with `gain`, one more and
      the state of that optimizer.

    Raises:
      ValueError: when called, malformed axes, or neither `eta_r` nor a positive `weight_decay`; at `init`, vectors too
        short to turn, a pattern that matches no leaf, entries in two vectors, a leaf that `optax.MaskedNode` hides, or
        without `eta_r` an `inner` whose state is of no class in Table 1; `update` without params.

    A vector that is zero at `init` has no norm to keep: it always gets the update of `inner`. A step whose learning
    rate is zero turns nothing.

    >>> params = {
    ...     "kernel": jnp.array([[3.0, 0.0], [-4.0, 2.0], [1.0, -2.0]]),
    ...     "bias": jnp.zeros(2),
    ... }
    >>> tx = go.norms.rotational(
    ...     optax.adamw(1e-3), {"kernel": "_ channel"}, learning_rate=1e-3, weight_decay=0.1
    ... )
    >>> step, state = tx.update(
    ...     {"kernel": jnp.eye(3, 2), "bias": jnp.ones(2)}, tx.init(params), params
    ... )
    >>> moved = optax.apply_updates(params, step)["kernel"]
    >>> norms = [jnp.linalg.norm(x, axis=0) for x in (params["kernel"], moved)]
    >>> bool(jnp.allclose(*norms))
    True

    Reference: Kosson et al. 2024, Algorithm 1, Table 1, App. I. Deviations: vectors are centred in the first step, not
      before it (a transformation cannot change parameters at `init`); ν, its correction and gains wait while the
      learning rate is zero; a trained gain is part of the state and multiplies the vector, but in the paper it is a
      parameter of the model.
    """
    return named_rotational(
        "rotational", inner, blocks, sizes, learning_rate, weight_decay, eta_r, beta, center, gain, eps, b1, b2
    )


def named_rotational(
    name: str, inner: optax.GradientTransformation, blocks: Mapping[str, Axes], sizes: Mapping[str, int] | None,
    learning_rate: optax.ScalarOrSchedule, weight_decay: optax.ScalarOrSchedule, eta_r: optax.ScalarOrSchedule | None,
    beta: Scalar, center: bool, gain: optax.GradientTransformation | None, eps: Scalar, b1: Scalar, b2: Scalar = 0.99,
) -> optax.GradientTransformationExtraArgs:
    """`rotational`, whose errors carry the name of the function that the user called."""
    specs = vectors.parse(name, "blocks", blocks, sizes)
    optimizer = checked_inner(name, inner)
    require_rates(name, learning_rate=learning_rate, weight_decay=weight_decay)
    require_beta(name, beta)
    require_number(name, "eps", eps, "[0, inf)", "write eps=0.0 for steps that no scale of the loss changes")
    if eta_r is not None and not callable(eta_r):
        require_number(name, "eta_r", eta_r, "[0, inf)", "write eta_r=0.03, in radians a step")
    # A schedule, or a number that `inject_hyperparams` holds, may have another value later.
    if eta_r is None and isinstance(weight_decay, int | float | np.number) and not weight_decay > 0:
        raise binding_error(
            name, "no angle to turn by", f"weight_decay={weight_decay!r}, and no eta_r",
            "a positive weight_decay, from which the angle follows, or an angle",
            "write eta_r=0.03, in radians a step, or leave these vectors to the optimizer alone")

    def empty(params: Any) -> RotationalState:
        gains, gain_state = ((), ()) if gain is None else (placeholder(), gain.init(params))
        zero = jnp.int32(0), jnp.int32(0)
        return RotationalState(optimizer.init(params), *zero, placeholder(), placeholder(), gains, gain_state)

    def init(params: optax.Params) -> RotationalState:
        inner_state = optimizer.init(params)
        if eta_r is None:
            _kind(name, inner_state)
        selections, leaves, least = vectors.resolve(name, specs, params), leaves_by_path(params), 3 if center else 2
        for block, entries in ((x.block, x.length) for x in selections):
            # A fixed norm removes one degree of freedom of a vector, and centring another.
            if entries < least:
                raise binding_error(
                    name, f"nothing to turn at '{block.path}'",
                    f"vectors of {counted(entries, 'entry', 'entries')}, axes \"{block.axes}\"",
                    f"at least {least}" + (" with center=True" if center else ""),
                    "leave norms and biases out: they get the inner update; in a kernel, `_` is the axis that is "
                    "summed over",
                )
        length = vectors.by_axes(selections, [x.norm(leaves) for x in selections])
        gains = () if gain is None else jax.tree.map(jnp.ones_like, length)
        gain_state = () if gain is None else gain.init(gains)
        counts, square = (jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)), jax.tree.map(jnp.zeros_like, length)
        return RotationalState(inner_state, *counts, length, square, gains, gain_state)

    def update(updates: Any, state: RotationalState, params: Any, **extra: Any) -> tuple[Any, RotationalState]:
        selections, now = vectors.resolve(name, specs, params, state.length), Clock.read(state, learning_rate, beta)
        given, inner_state = optimizer.update(updates, state.inner_state, params, **extra)
        if eta_r is not None:
            angle = at(eta_r, state.count)
        else:
            # The angle does not depend on `dim` and `gradient_norm`, which only decide the norm: any number will do.
            angle = predict_equilibrium(
                _kind(name, state.inner_state), learning_rate=jnp.where(now.inverse > 0, now.rate, 1.0),
                weight_decay=at(weight_decay, state.count), b1=b1, b2=b2, dim=1.0, gradient_norm=1.0,
            ).rotation

        lengths, gains, gain_state = state.length, state.gain, state.gain_state
        if gain is not None:
            # p = gain·p₁, where p₁ does not depend on the gain, so that the derivative by the gain is ⟨p, g⟩/gain.
            def slope(x: Selection, point: jax.Array, gradient: jax.Array, factor: jax.Array) -> tuple[Any, Any]:
                return gradient, safe_divide(jnp.sum(point * gradient, x.axes), factor)

            _, slopes = vectors.moved(name, selections, slope, updates, params, gains)
            steps, after = gain.update(slopes, gain_state, gains)
            trained = optax.apply_updates(gains, steps), after
            # Where the rate is zero no vector moves, and its factor waits.
            gains, gain_state = jax.tree.map(
                functools.partial(jnp.where, now.inverse > 0), trained, (gains, gain_state))
            lengths = jax.tree.map(jnp.multiply, lengths, gains)

        def turned(x: Selection, point: jax.Array, step: jax.Array, length: jax.Array, square: jax.Array) -> Any:
            """Returns the chord from p to the turned p, and what the state keeps of ν."""

            def total(entries: jax.Array) -> jax.Array:
                return jnp.sum(entries, x.axes, keepdims=True)

            # Five sums of p and of the inner update, over its largest entry, decide the step; Δ is not stored as an
            # array, to save memory traffic. The chord is a combination of p, this direction and 1.
            direction, most = unit_and_size(step, x.axes)
            share, roundoff = 1.0 / x.length if center else 0.0, _ROUNDOFF * float(jnp.finfo(point.dtype).eps)
            least = max(roundoff, vectors.rounding(x, given) ** 2)
            point_mean, direction_mean = share * total(point), share * total(direction)
            point_square, direction_square = total(point * point), total(direction * direction)
            # ‖p‖² without the mean. For a constant vector this is roundoff, and the vector has no direction to keep.
            size = point_square - x.length * point_mean * point_mean
            size = jnp.where(size > roundoff * point_square, size, 0.0)
            along = safe_divide(total(point * direction) - x.length * point_mean * direction_mean, size)
            # ‖ηΔ/most‖². For an update along p and 1, such as decay, this is roundoff, which must not turn p.
            across = direction_square - x.length * direction_mean * direction_mean - along * along * size
            across = jnp.where(across > least * direction_square, across, 0.0)
            # States of earlier versions have ν, which is positive.
            before = jnp.where(square > 0, jnp.sqrt(jnp.abs(square)), -square)
            average = root_mean_square(now.memory, x.spread(before), most * now.inverse * jnp.sqrt(across))
            usual = jnp.hypot(average / jnp.sqrt(now.correction), jnp.sqrt(eps))
            pace = jnp.where(across > 0, angle * safe_divide(most * now.inverse, usual), 0.0)
            # q/n is p/‖p‖ + pace·ηΔ/most. Both terms are orthogonal, so that the norm of q/n is this root.
            reach = x.spread(length) / jnp.sqrt(1.0 + pace * pace * across)
            b = reach * pace
            a = reach * safe_divide(jnp.ones_like(size), jnp.sqrt(size)) - b * along
            chord = (a - 1.0) * point + b * direction - (a * point_mean + b * direction_mean)
            # A vector that has no direction or no norm gets inner's update. Without an update, as in a leaf that
            # `inner` freezes, it stays.
            turns = (size > 0) & (x.spread(length) != 0) & (most > 0)
            return jnp.where(turns, chord, step), -average.reshape(jnp.shape(square))

        moves, square = vectors.moved(name, selections, turned, given, params, lengths, state.square)
        count = optax.safe_increment(state.count)
        return moves, RotationalState(inner_state, count, now.tracked, state.length, square, gains, gain_state)

    return transformation(name, init, update, RotationalState, empty, preflight=preflight_of(inner))


def _kind(name: str, inner_state: Any) -> str:
    """Returns the row of Table 1 for the optimizer that made this state. Raises ValueError unless just one row fits."""
    nodes = jax.tree.leaves(inner_state, is_leaf=lambda x: isinstance(x, tuple(_KINDS)))
    kinds = [kind for kind in _KINDS if any(isinstance(node, kind) for node in nodes)]
    if len(kinds) != 1:
        raise binding_error(
            name, f"no default angle for {'several optimizers at once' if kinds else 'this optimizer'}",
            ", ".join(kind.__name__ for kind in kinds) or f"a state of {type(inner_state).__name__}",
            f"one of {', '.join(kind.__name__ for kind in _KINDS)} in inner's state",
            "give eta_r: radians a step, a number or a schedule",
        )
    return _KINDS[kinds[0]]
