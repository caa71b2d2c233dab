"""`hyperball`: every weight vector keeps its norm, and a step changes only its direction.

A step U is projected onto the tangents of the sphere, which also removes decoupled weight decay, because decay is
normal to the sphere. Then W ← R·(W + U)/‖W + U‖ moves the result back to the radius R. If each factor A, B of a product
A·Bᵀ is on a sphere, the Gram matrices AᵀA and BᵀB can still differ, and invertible matrices can still move from one
factor to the other. A step is equivariant under rotations within a sphere, but not under rescalings or under the
invertible matrices of a product, GL(r).

Reference: "When Equivalent Weights Train Differently" ("the post") §5.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import Axes, leaves_by_path
from gauge_optax.errors import binding_error, warn
from gauge_optax.linalg import safe_divide, unit_and_size
from gauge_optax.norms import vectors
from gauge_optax.norms.vectors import Selection
from gauge_optax.transformation import in_interval, placeholder, require_rates, transformation

Radius = float | jax.Array
_JUMP = 0.01  # share of a radius by which a norm may differ without a warning; bfloat16 rounds norms by less


class HyperballState(NamedTuple):
    """State of `hyperball`.

    Attributes:
      radius: leaf path → axes string → the radii of the spheres that the string counts, shaped like its named axes; ()
        if the user gave numbers. `update` raises an error for a state with other paths or strings than the user's.
      count: the number of steps so far, int32; () unless the learning rate is a schedule.
    """

    radius: Any
    count: Any


def hyperball(
    axes: Mapping[str, Axes],
    radius: str | Radius | Mapping[str, Radius] = "initial",
    *,
    learning_rate: optax.ScalarOrSchedule | None = None,
    sizes: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps weights on spheres: projects each step onto the sphere's tangents, then moves the result onto the sphere.

    Put it last in a chain, after the learning rate. For each sphere with the weights W, the radius R and the update U,
    it computes

    .. math::
      U_T = U - \frac{\langle U, W\rangle}{\lVert W\rVert^2} W, \qquad
      W_{new} = R\,\frac{W + U_T}{\lVert W + U_T\rVert}.

    One sphere per factor of a product A·Bᵀ fixes the traces of AᵀA and BᵀB, but does not make these matrices equal. A
    step is equivariant under rotations that act within a sphere, but not under rescalings or other invertible matrices.

    Args:
      axes: path → axes string, as in gauges. Named axes count independent spheres, and a sphere spans the axes `_`:
        `"_ _"` is a sphere per matrix, `"_ head _"` one per head, `"_ channel"` one per channel. If a pattern matches
        several leaves, each has its own spheres. If the string begins with `1+`, the stored number plus 1 is on the
        sphere.
      radius: "initial" for the norm at `init`; a positive number; or pattern → number, with the keys of `axes`. With a
        number, the first step moves the weights onto their sphere, however small the learning rate. `init` warns if
        the weights are far from it, unless `init` is traced.
      learning_rate: None, or a number or a schedule that sets the length of the step: U_T is scaled to the length
        learning_rate·R, so that only its direction comes from the transformations before. If U_T is only roundoff, the
        sphere's weights do not move. A step turns W by the angle atan(learning_rate·R/‖W‖), also if W is not yet on its
        sphere.
      sizes: axis name → length, for axes in parentheses, `(a b)`, whose lengths do not follow from a leaf's shape.

    Returns:
      A transformation of updates (tangents) into differences of parameters (chords) W_new − W, where W_new is on the
      sphere whatever W is. Updates of unlisted leaves pass unchanged.

    Raises:
      ValueError: when called, malformed axes, radii that are not positive, or patterns that only one of `axes` and
        `radius` has; at `init`, a pattern that matches no leaf, a leaf that `optax.MaskedNode` hides, ranks or lengths
        that do not fit, entries on two spheres, or with "initial" a vector of norm zero; `update` without params.

    A vector of zeros has no direction. A traced `init` cannot detect it: its radius is then 0, and its updates pass
    unchanged. If `radius` is a number, the first update decides the direction of a vector of zeros.

    >>> tx = optax.chain(
    ...     optax.add_decayed_weights(0.1),
    ...     optax.sgd(0.1),
    ...     go.norms.hyperball({"kernel": "_ channel"}),
    ... )
    >>> params = {"kernel": jnp.array([[3.0, 0.0], [4.0, 2.0]])}
    >>> step, _ = tx.update(
    ...     {"kernel": jnp.array([[0.0, 5.0], [0.0, 0.0]])}, tx.init(params), params
    ... )
    >>> moved = optax.apply_updates(params, step)["kernel"]
    >>> jnp.linalg.norm(moved, axis=0).round(3).tolist()
    [5.0, 2.0]
    >>> # A column that only decays stays.
    >>> bool(jnp.allclose(moved[:, 0], params["kernel"][:, 0]))
    True

    Reference: the post's §5. Deviation: `learning_rate` sets the length of the tangent part. In the post it sets the
      length of the whole update, so that adding decay shortens the tangent part.
    """
    specs, initial = vectors.parse("hyperball", "axes", axes, sizes), isinstance(radius, str) and radius == "initial"
    numbers = {} if initial else _numbers(axes, radius)
    if learning_rate is not None:
        require_rates("hyperball", learning_rate=learning_rate)

    def empty(params: Any) -> HyperballState:
        return HyperballState(placeholder() if initial else (), jnp.int32(0) if callable(learning_rate) else ())

    def init(params: optax.Params) -> HyperballState:
        spheres, leaves = vectors.resolve("hyperball", specs, params), leaves_by_path(params)
        norms = [sphere.norm(leaves) for sphere in spheres]
        for sphere, own in zip(spheres, norms, strict=True):
            if isinstance(own, jax.core.Tracer):
                continue  # a traced `init` sees no numbers
            if not initial:
                _warn_of_a_jump(sphere, own, numbers[sphere.pattern])
            elif bool(jnp.any(own == 0)):
                raise binding_error(
                    "hyperball", f"a sphere of radius 0 at '{sphere.block.path}'",
                    f"norm 0 in {int(jnp.sum(own == 0))} of {own.size} spheres, axes \"{sphere.block.axes}\"",
                    "weights with a direction, for radius='initial'",
                    "give it a number for a radius, or leave the leaf out (LoRA's B, zero output kernels)",
                )
        count = jnp.zeros((), jnp.int32) if callable(learning_rate) else ()
        return HyperballState(vectors.by_axes(spheres, norms) if initial else (), count)

    def update(updates: Any, state: HyperballState, params: Any, **extra: Any) -> tuple[Any, HyperballState]:
        spheres = vectors.resolve("hyperball", specs, params, state.radius if initial else None)
        radii = state.radius if initial else vectors.by_axes(spheres, [numbers[x.pattern] for x in spheres])
        rate = None if learning_rate is None else vectors.at(learning_rate, state.count)

        def chord(sphere: Selection, point: jax.Array, tangent: jax.Array, own: Any) -> tuple[jax.Array]:
            least = None if rate is None else vectors.rounding(sphere, updates)
            return (_chord(sphere, point, tangent, sphere.spread(own), rate, least),)

        count = optax.safe_increment(state.count) if callable(learning_rate) else ()
        updates, *_ = vectors.moved("hyperball", spheres, chord, updates, params, radii)
        return updates, HyperballState(state.radius, count)

    return transformation("hyperball", init, update, HyperballState, empty)


def _chord(
    sphere: Selection, point: jax.Array, tangent: jax.Array, radius: jax.Array, rate: Any, least: Any
) -> jax.Array:
    """Returns W_new − W for the spheres of one axes string.

    `rate` is the length of U_T in units of R, and `least` the share of an update's length below which U_T is roundoff.
    Both are None where U_T keeps its length.
    """

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(a * b, sphere.axes, keepdims=True)

    def projected(x: jax.Array) -> jax.Array:
        return x - safe_divide(dot(x, point), dot(point, point)) * point

    flat = projected(tangent)
    if rate is not None:
        # Only the direction counts: dividing by the largest entry keeps squares from overflow and underflow. The first
        # projection leaves roundoff along W, which would count towards the length; the second removes it.
        unit, _ = unit_and_size(tangent, sphere.axes)
        flat = projected(projected(unit))
        length = jnp.sqrt(dot(flat, flat))
        # If the update is along W, as decay is, only roundoff is left of it, which must not be scaled to a full step.
        turns = length > least * jnp.sqrt(dot(unit, unit))
        flat = flat * jnp.where(turns, safe_divide(rate * radius, length), 0.0)
    # An update of any size decides the direction; with a rate, it is no longer than W.
    moved = point + flat if rate is not None else unit_and_size(point + flat, sphere.axes)[0]
    # Vectors of zeros get the radius 0 from a traced `init`: their updates pass unchanged.
    return jnp.where(radius > 0, radius * safe_divide(moved, jnp.sqrt(dot(moved, moved))) - point, tangent)


def _warn_of_a_jump(sphere: Selection, norms: jax.Array, radius: Radius) -> None:
    """Warns if weights are not on their spheres yet."""
    if isinstance(radius, jax.core.Tracer) or not norms.size:
        return
    if float(jnp.max(jnp.abs(norms - radius))) > _JUMP * radius:
        found = f"norms of '{sphere.block.path}' {jnp.min(norms):.3g} to {jnp.max(norms):.3g}, radius {radius:.3g}"
        problem = "the first step moves weights onto their spheres, however small the learning rate"
        remedy = "write radius='initial' to keep the norms, scale the weights first, or silence this warning"
        message = binding_error("hyperball", problem, found, "weights whose norms are the radii", remedy)
        warn(message)


def _numbers(axes: Mapping[str, Axes], radius: Any) -> Mapping[str, Radius]:
    """Returns pattern → the user's number. Raises ValueError unless each pattern of axes has a positive one."""
    numbers = radius if isinstance(radius, Mapping) else dict.fromkeys(axes, radius)
    for pattern in {**axes, **numbers}:
        if pattern not in axes or not in_interval(numbers.get(pattern), "(0, inf)"):
            raise binding_error(
                "hyperball", f"bad radius of '{pattern}'", repr(numbers.get(pattern)),
                f"a positive number for each of {', '.join(map(repr, axes))}, and for no other pattern; or 'initial'",
                "write radius='initial' for the norms at init",
            )
    return numbers
