"""Hard radial control: weights stay on spheres, and only their direction is trained.

On a sphere decoupled weight decay is normal to the constraint, so that the tangent projection takes all of it away. A
step goes along the tangent and is drawn back to the radius, W ← R·(W + U)/‖W + U‖.

Here: which entries share a sphere, the projection, the retraction. Not here: gauges. A sphere per factor is not Gram
balance, and leaves the GL(r) between two factors where it was (post §5); a sphere's step is equivariant under
rotations that act within it, under rescalings and GL it is not.
Reference: "When Equivalent Weights Train Differently" §5.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import Axes, Block, binding_error, frozen_sizes, is_empty, leaves_by_path
from gauge_optax.checks import require_params
from gauge_optax.linalg import real_dtype, safe_divide
from gauge_optax.rotation.vectors import beside, each, norm, one_or_all, taken, update_of, value, vector_specs, vectors
from gauge_optax.transforms._common import in_dtype_of, placeholder

Radius = float | jax.Array

_NAME = "hyperball"
_INITIAL = "initial"


class HyperballState(NamedTuple):
    """State of `hyperball`.

    Attributes:
      radius: leaf path → the radii of its spheres, an array shaped like the named axes, or a tuple of them where the
        leaf has several axes strings; () where radii were given.
      count: steps so far, int32; () unless the learning rate is a schedule.
    """

    radius: Any
    count: Any


def hyperball(
    axes: Mapping[str, Axes],
    radius: str | Radius | Mapping[str, Radius] = _INITIAL,
    *,
    learning_rate: optax.ScalarOrSchedule | None = None,
    sizes: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps weights on spheres: tangent projection of the step, then retraction.

    Last in a chain, after the learning rate. Per sphere, with U what comes in,

    .. math::
      U_T = U - \frac{\langle U, W\rangle}{\lVert W\rVert^2} W, \qquad
      W_{new} = R\,\frac{W + U_T}{\lVert W + U_T\rVert}.

    A sphere per factor is not Gram balance: it fixes the traces of AᵀA and BᵀB alone. Nor is the step gauge-equivariant
    under rescalings or GL, only under rotations that act within a sphere.

    Args:
      axes: path → axes, as in gauges. Named axes count independent spheres, `_` is summed over: `"_ _"` is a sphere per
        matrix, `"_ head _"` per head, `"_ channel"` per channel. Every leaf has spheres of its own, whatever else its
        pattern matches. `1+` puts the value on the sphere, not the stored number.
      radius: "initial" for the norm at `init`; a positive number; or pattern → number, with the keys of `axes`. With a
        number the first step moves weights onto their sphere.
      learning_rate: None, or a number or a schedule of the step: U_T is scaled to the length learning_rate·R, its
        direction alone comes from before. A sphere where nothing but rounding is tangent stays. Weights that are not
        on their sphere yet turn by atan(learning_rate·R/‖W‖).
      sizes: lengths of axes inside `(a b)` that shapes do not fix.

    Returns:
      A transformation of updates (tangents) into differences of parameters (chords) W_new − W, which end on the sphere
      from wherever W stands. Leaves that are not listed pass unchanged.

    Raises:
      ValueError: malformed axes, radii that are not positive, patterns in one of `axes` and `radius` alone, here; no
        match, a hidden leaf, ranks or lengths that do not fit, entries on two spheres, with "initial" a sphere that is
        zero, at `init`; `update` without params.

    Zeros have no direction. Where `init` is traced it cannot see them: a sphere that is zero then has radius 0, and
    is free, its updates pass unchanged. With a number for a radius the first update to a zero gives it its direction.

    >>> tx = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1), go.hyperball({"kernel": "_ channel"}))
    >>> params = {"kernel": jnp.array([[3.0, 0.0], [4.0, 2.0]])}
    >>> step, _ = tx.update({"kernel": jnp.array([[0.0, 5.0], [0.0, 0.0]])}, tx.init(params), params)
    >>> moved = optax.apply_updates(params, step)["kernel"]
    >>> jnp.linalg.norm(moved, axis=0).round(3).tolist()
    [5.0, 2.0]
    >>> bool(jnp.allclose(moved[:, 0], params["kernel"][:, 0]))  # a column that only decays stays
    True

    Reference: the post's §5. Deviation: the length that `learning_rate` sets is the tangent part's, the post's that of
      all that comes in, so that decay would shorten the step.
    """
    specs, given = vector_specs(_NAME, axes, frozen_sizes(_NAME, sizes)), _radii(axes, radius)
    initial = isinstance(radius, str)

    def init_fn(params: optax.Params) -> HyperballState:
        count = jnp.zeros((), jnp.int32) if callable(learning_rate) else ()
        if is_empty(params):
            return HyperballState(placeholder() if initial else (), count)
        spheres = vectors(_NAME, specs, params)
        return HyperballState(_initial_radii(spheres, params) if initial else (), count)

    def update_fn(
        updates: optax.Updates, state: HyperballState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, HyperballState]:
        del extra
        require_params(_NAME, params)
        values, tangents = leaves_by_path(params), leaves_by_path(updates)
        count, rate = state.count, learning_rate
        if callable(learning_rate):
            rate, count = learning_rate(state.count), optax.safe_increment(state.count)
        out = {}
        for path, spheres in vectors(_NAME, specs, params).items():
            tangent = update_of(_NAME, path, tangents)
            noise = 2.0 * max(float(jnp.finfo(dtype).eps) for dtype in (tangent.dtype, real_dtype()))
            moved = jnp.asarray(tangent, real_dtype())
            radii = each(state.radius[path]) if initial else [given[pattern] for _, pattern in spheres]
            for (block, _), own in zip(spheres, radii, strict=True):
                point = value(block, values[path])
                chord = _chord(point, block.view(moved), beside(block, own), taken(block), rate, noise)
                moved = block.write(moved, chord)
            out[path] = moved
        return in_dtype_of(updates, out), HyperballState(state.radius, count)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


# One sphere, or several side by side -----------------------------------------------------------------


def _chord(
    point: jax.Array, tangent: jax.Array, radius: Any, axes: tuple[int, ...], rate: Any, noise: float
) -> jax.Array:
    """W_new − W.

    Args:
      point: W, with every sphere along `axes`.
      tangent: what comes in.
      radius: broadcastable to `point`; 0 where a sphere is free.
      axes: the axes that a sphere takes up.
      rate: what share of R the tangent part is to be long; None for as long as it comes.
      noise: up to what share of `tangent` its tangent part is rounding.

    Returns:
      The chord.
    """

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(a * b, axes, keepdims=True)

    def projected(x: jax.Array) -> jax.Array:
        return x - safe_divide(dot(x, point), dot(point, point)) * point

    flat = projected(tangent)
    if rate is not None:
        # Once more: what rounding leaves along W would count towards the length.
        flat = projected(flat)
        length = jnp.sqrt(dot(flat, flat))
        real = length > noise * jnp.sqrt(dot(tangent, tangent))
        flat = flat * jnp.where(real, safe_divide(rate * radius, length), 0.0)
    moved = point + flat
    chord = radius * safe_divide(moved, jnp.sqrt(dot(moved, moved))) - point
    return jnp.where(radius > 0, chord, tangent)


def _initial_radii(spheres: Mapping[str, Sequence[tuple[Block, str]]], params: Any) -> dict[str, Any]:
    leaves = leaves_by_path(params)
    radii: dict[str, Any] = {}
    for path, own in spheres.items():
        norms = [norm(block, value(block, leaves[path])) for block, _ in own]
        for (block, _), found in zip(own, norms, strict=True):
            if not isinstance(found, jax.core.Tracer) and bool(jnp.any(found == 0)):
                raise binding_error(
                    _NAME, f"a sphere of radius 0 at '{path}'",
                    f"norm 0 of {int(jnp.sum(found == 0))} of {found.size} spheres, axes \"{block.axes}\"",
                    "weights with a direction, for radius='initial'",
                    "give it a number for a radius, or leave the leaf out (LoRA's B, zero output kernels)",
                )  # fmt: skip
        radii[path] = one_or_all(norms)
    return radii


# Radii --------------------------------------------------------------------------------------------


def _radii(axes: Mapping[str, Axes], radius: Any) -> dict[str, Radius | None]:
    if isinstance(radius, str) and radius == _INITIAL:
        return dict.fromkeys(axes)
    if not isinstance(radius, Mapping):
        return dict.fromkeys(axes, _positive(radius, ""))
    for pattern in {**axes, **radius}:
        if pattern not in axes or pattern not in radius:
            raise binding_error(
                _NAME, f"'{pattern}' in {'axes' if pattern in axes else 'radius'} alone",
                f"radii of {', '.join(map(repr, radius)) or 'nothing'}", f"of {', '.join(map(repr, axes))}",
                "give every pattern of axes a radius, and no other",
            )  # fmt: skip
    return {pattern: _positive(own, f" of '{pattern}'") for pattern, own in radius.items()}


def _positive(radius: Any, where: str) -> Any:
    """The radius, if it is a positive number as far as can be told."""
    if isinstance(radius, jax.core.Tracer) and radius.ndim == 0:
        return radius
    try:
        fits = not isinstance(radius, bool | str) and np.ndim(radius) == 0 and 0 < float(radius) < math.inf
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise binding_error(
            _NAME, f"bad radius{where}", repr(radius), "'initial', a positive number, or pattern → positive number",
            "write radius='initial' for the norms at init",
        )  # fmt: skip
    return radius
