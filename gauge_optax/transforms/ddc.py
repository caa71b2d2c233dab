"""DDC-Adam: Adam on the quotient, one gauge-invariant coordinate system at a time.

Parameters and gradient enter the frame, where every quantity is an invariant of the product group (or turns with a
head). There a scaled leaf splits into

* vertical: (+θ̂_up, −p·θ̂_down) per channel, frozen by default;
* radial: the channel's joint scale s = ρ_up^p·ρ_down, one scalar Adam per channel;
* tangential: everything else, per-coordinate Adam on ρ·ĝ, stepping by ρ.

Rotated leaves keep their second moment in the head's body frame, a shift's leaf loses its mean, other leaves get
Adam. What the division leaked into the vertical space is projected out again, and the step leaves the frame as a
tangent.
Invariant: the frame's channels' ρ, s, all moments of scaled leaves. Covariant under rotations: the first moment.

References: DDC §3, B.1–B.9. Deviations (DESIGN §5): the whole product group at once, in the frame metric; v is moved
to a new frame by R∘R, not |R|; degenerate heads get an anchored frame; scales have floors. For squared ReLU (p = 2)
the frame metric gives both sides the same relative step where B.7 gives p : 1.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import is_empty, leaves_by_path
from gauge_optax.gauges import _frame, _split
from gauge_optax.gauges._basis import Group, HeadBasis, body_frame, grouped
from gauge_optax.gauges._frame import FrameState
from gauge_optax.gauges._head import HeadBlock, HeadInstance
from gauge_optax.gauges._split import Bound, Coordinates
from gauge_optax.gauges._system import Channels, ScaleSystem
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.linalg import real_dtype
from gauge_optax.transforms import _channels, _moments, _vertical
from gauge_optax.transforms._common import (
    float_leaves,
    in_dtype_of,
    placeholder,
    require_choice,
    require_params,
)
from gauge_optax.transforms._heads import horizontal, init_bases, refreshed
from gauge_optax.transforms._here import Adam, Here, enter
from gauge_optax.transforms._moments import V_MODES, BodyFrame
from gauge_optax.transforms.retract import RADIAL, VERTICAL

Arrays = dict[str, jax.Array]
Scalar = float | jax.Array

_NEVER = 2**31 - 1


class GaugeMoments(NamedTuple):
    """What DDC remembers per gauge coordinate; small beside the parameters.

    Attributes:
      frame: the reference frame, one log-scale per channel.
      radial_mu: first moment of the joint scale's derivative, per channel of every instance with two sides.
      radial_nu: its second moment.
      heads: eigenbasis and body frame per group of rotation instances.
      vertical_mu: first moment of the vertical coordinates; () when frozen.
      vertical_nu: their second moment; () unless vertical is "adam".
      refreshes: how often some gauge's eigenbasis was renewed, int32.
    """

    frame: FrameState
    radial_mu: Channels
    radial_nu: Channels
    heads: tuple[BodyFrame, ...]
    vertical_mu: Coordinates | tuple[()]
    vertical_nu: Coordinates | tuple[()]
    refreshes: jax.Array


class ScaleByDDCState(NamedTuple):
    """State of `scale_by_ddc`.

    Attributes:
      count: steps so far, int32.
      mu: first moment, shaped like the parameters: of ρ·ĝ in the rescale frame and in the heads' own (world) basis.
      nu: second moment, shaped like the parameters; rotated leaves in body coordinates.
      gauges: a `GaugeMoments`.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates
    nu: optax.Updates
    gauges: Any


def scale_by_ddc(
    gauges: Gauges,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    vertical: str = "frozen",
    v_mode: str = "body_frame_topk",
    radial: str = "linear",
    radial_scale: Scalar = 1.0,
    live_threshold: Scalar = 1e-3,
    refresh_drift: Scalar = 0.1,
    refresh_every: int | jax.Array | None = None,
    reset_every: int | jax.Array | None = None,
    reproject: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Adam in the frame of a product of gauges; ungauged leaves get Adam.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.
      b1: decay of first moments.
      b2: decay of second moments.
      eps: added to √v̂.
      eps_root: added to v̂ inside the root.
      mu_dtype: dtype of the first moment; by default the parameters', at least float32.
      nesterov: whether to use Nesterov momentum, as in `optax.adam`.
      vertical: "frozen" (no motion along orbits), "sgd" or "adam" (for losses that hold a penalty).
      v_mode: second moment of rotated leaves: "body_frame_topk", "body_frame", "per_head_scalar",
        "per_head_matrix" (one eigendecomposition a step) or "none".
      radial: "linear" (Adam on s) or "log" (Adam on log s, which decay drives to zero).
      radial_scale: factor on the radial step.
      live_threshold: eigendirections below it times λ_max follow momentum alone under "body_frame_topk".
      refresh_drift: whitened drift of a head's Gram matrix at which its eigenbasis is renewed.
      refresh_every: age in steps at which it is renewed anyway; None for never.
      reset_every: period in steps at which moments and bias correction of rotated leaves start anew in a fresh
        eigenbasis (the reference's mitigation of its own drift, DDC A.4); None for never.
      reproject: whether the step is projected again after the division (DDC Remark 12).

    Returns:
      A transformation of gradients (cotangents) into a tangent, to be scaled by the learning rate and finished by
      `gauge_retract`.

    Raises:
      ValueError: a mode that does not exist; bindings that do not fit; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    >>> tx = go.scale_by_ddc(gauge)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    >>> go.testing.assert_horizontal(updates, params, gauge)

    Reference: DDC Eq. (2), B.4–B.9.
    """
    require_choice("scale_by_ddc", "vertical", vertical, VERTICAL)
    require_choice("scale_by_ddc", "v_mode", v_mode, V_MODES)
    require_choice("scale_by_ddc", "radial", radial, RADIAL)
    group = product(gauges)
    moving = vertical != "frozen"
    cut = _moments.threshold_of(v_mode, live_threshold)

    def init_fn(params: optax.Params) -> ScaleByDDCState:
        mu = jax.tree.map(lambda p: jnp.zeros_like(p, mu_dtype or _wide(p)), params)
        nu = jax.tree.map(lambda p: jnp.zeros_like(p, _wide(p)), params)
        moments = (
            placeholder() if is_empty(params) else _init_gauges(group.bound(params), params, v_mode, cut, vertical)
        )
        return ScaleByDDCState(jnp.zeros((), jnp.int32), mu, nu, moments)

    def update_fn(
        updates: optax.Updates, state: ScaleByDDCState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, ScaleByDDCState]:
        del extra
        require_params("scale_by_ddc", params)
        old, count = state.gauges, optax.safe_increment(state.count)
        adam = Adam(b1, b2, eps, eps_root, count, nesterov)
        here = enter(group.bound(params), params, old.frame, moving)
        age = count if reset_every is None else (count - 1) % reset_every + 1
        adams = dict.fromkeys(leaves_by_path(params), adam) | dict.fromkeys(here.bound.turned, adam._replace(step=age))
        mu, nu = (float_leaves(m, real_dtype()) for m in (state.mu, state.nu))
        oldest = refresh_every
        if reset_every is not None:
            mu, nu = (_restarted(m, here.bound, age) for m in (mu, nu))
            oldest = jnp.where(age == 1, 0, _NEVER if refresh_every is None else refresh_every)
        mu, nu = here.transfer(mu, 1), here.transfer(nu, 2)
        heads, nu, renewed = _refreshed_heads(here, old.heads, nu, v_mode, cut, (live_threshold, refresh_drift, oldest))
        bases = [h.basis for h in heads]

        gradient = float_leaves(updates, real_dtype())
        framed = here.point.cotangent_in({p: gradient[p] for p in here.bound.offset})
        dots = here.dots(framed)
        slopes = _channels.radial_slopes(here.system, dots)
        drifts, framed = _vertical.split(here, framed, bases) if moving else (None, framed)
        flat, _ = _channels.tangential(here, dots)
        seen = gradient | here.resize(here.added(here.bound.centre(framed), flat))

        mu = {p: b1 * x + (1 - b1) * seen[p] for p, x in mu.items()}
        mean = {p: adams[p].debias(x, seen[p], b1) for p, x in mu.items()}
        step, nu, heads = _divided(here.bound, heads, mean, seen, nu, v_mode, cut, adams)
        tangent = here.resize({p: step[p] for p in here.bound.offset})
        added = rest = _channels.none(here.system)
        if reproject:
            tangent = here.bound.centre(tangent)
            added, rest = _channels.tangential(here, here.dots(tangent))
            tangent, _ = horizontal(here.bound, here.point.hat, tangent, bases, here.grams)

        moments = (old.radial_mu, old.radial_nu)
        outward, radial_mu, radial_nu = _channels.radial(here, slopes, moments, radial, radial_scale, adam)
        tangent = here.added(tangent, _channels.with_radial(here, added, rest, outward))
        vertical_mu, vertical_nu = old.vertical_mu, old.vertical_nu
        if drifts is not None:
            rates, vertical_mu, vertical_nu = _vertical.step(here, drifts, vertical_mu, vertical_nu, vertical, adam)
            tangent = _vertical.added(here, tangent, rates)

        out = in_dtype_of(updates, step | here.point.tangent_out(tangent))
        gauges_state = GaugeMoments(
            here.frame, radial_mu, radial_nu, heads, vertical_mu, vertical_nu, old.refreshes + renewed
        )
        return out, ScaleByDDCState(count, in_dtype_of(state.mu, mu), in_dtype_of(state.nu, nu), gauges_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init_gauges(bound: Bound, params: optax.Params, v_mode: str, cut: Scalar, vertical: str) -> GaugeMoments:
    centred = bound.centre(bound.values(params))
    frame = _frame.init_frame(bound.system, centred)
    hat = _split.at(bound, centred, frame.f).hat
    heads = _moments.init_frames(bound, hat, init_bases(bound, hat), v_mode, cut)
    mu = _vertical.zero_coordinates(bound) if vertical != "frozen" else ()
    nu = _vertical.zero_variances(bound) if vertical == "adam" else ()
    return GaugeMoments(frame, _zeros(bound.system), _zeros(bound.system), heads, mu, nu, jnp.zeros((), jnp.int32))


def _restarted(moments: Arrays, bound: Bound, age: jax.Array) -> Arrays:
    """Moments with those of rotated leaves set to zero where their age is 1."""
    return {p: jnp.where(age == 1, 0.0, x) if p in bound.turned else x for p, x in moments.items()}


def _wide(leaf: Any) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _zeros(system: ScaleSystem) -> Channels:
    return tuple(jnp.zeros(i.shape, real_dtype()) for i in system.instances)


def _refreshed_heads(
    here: Here,
    heads: tuple[BodyFrame, ...],
    nu: Arrays,
    v_mode: str,
    cut: Scalar,
    refresh: tuple[Scalar, Scalar, int | jax.Array | None],
) -> tuple[tuple[BodyFrame, ...], Arrays, jax.Array]:
    """Eigenbases and body frames of this step, second moments in them, and how many groups were renewed."""
    fresh, total = [], jnp.zeros((), jnp.int32)
    for group, head, gram in zip(grouped(here.bound.heads), heads, here.grams, strict=True):
        basis, renewed = refreshed(head.basis, gram, *refresh)
        total, frame = total + renewed, head.frame
        if _moments.uses_frame(v_mode):
            own = {p: nu[p] for h in group for p in h.paths}
            renew = functools.partial(_renewed, group, here.point.hat, basis, cut)
            frame, own = jax.lax.cond(renewed, renew, lambda frame, own: (frame, own), frame, own)
            nu = nu | own
        fresh.append(head._replace(basis=basis, frame=frame))
    return tuple(fresh), nu, total


def _renewed(
    group: Group, hat: Arrays, basis: HeadBasis, cut: Scalar, old: jax.Array, nu: Arrays
) -> tuple[jax.Array, Arrays]:
    frame = body_frame(group, hat, basis, cut)
    return frame, nu | _moments.moved_to(group, nu, old, frame)


def _divided(
    bound: Bound,
    heads: tuple[BodyFrame, ...],
    mean: Arrays,
    seen: Arrays,
    nu: Arrays,
    v_mode: str,
    cut: Scalar,
    adams: dict[str, Adam],
) -> tuple[Arrays, Arrays, tuple[BodyFrame, ...]]:
    """First moments over root second moments, and the new second moments."""
    framed = _moments.uses_frame(v_mode)
    mean_in, seen_in = (_moments.to_body(bound, heads, x) for x in (mean, seen)) if framed else (mean, seen)
    squares = {p: jnp.square(x) for p, x in seen_in.items()}
    if v_mode in ("none", "per_head_matrix"):
        squares = _moments.on_blocks(bound, squares, lambda g, i, h, b, view: jnp.zeros_like(view))
    elif v_mode == "per_head_scalar":
        squares = _moments.on_blocks(bound, squares, lambda g, i, h, b, view: _moments.per_head_mean(h, b, view))
    nu = {p: adams[p].b2 * x + (1 - adams[p].b2) * squares[p] for p, x in nu.items()}
    roots = _moments.above_rounding(bound, {p: adams[p].root(x) for p, x in nu.items()}, nu, adams)
    step = {p: mean_in[p] / roots[p] for p in nu}
    if v_mode == "none":
        return _replaced(bound, step, mean, None), nu, heads
    if v_mode == "per_head_matrix":
        by_matrix, heads = _moments.divided_by_matrix(bound, heads, mean, seen, adams)
        return _replaced(bound, step, by_matrix, None), nu, heads
    if not framed:
        return step, nu, heads
    masks = [_moments.divided_directions(g, h, cut) for g, h in zip(grouped(bound.heads), heads, strict=True)]
    step = _replaced(bound, step, mean_in, masks)
    turned = bound.turned
    change = _moments.from_body(bound, heads, {p: x - mean_in[p] if p in turned else x for p, x in step.items()})
    return {p: mean[p] + x if p in turned else x for p, x in change.items()}, nu, heads


def _replaced(bound: Bound, step: Arrays, mean: Arrays, masks: list[jax.Array] | None) -> Arrays:
    """`step` with the bare mean on directions that are not divided."""

    def change(at: int, number: int, head: HeadInstance, block: HeadBlock, view: jax.Array) -> jax.Array:
        bare = block.view(mean[block.block.path])
        return bare if masks is None else jnp.where(head.along_basis(block, masks[at][number]), view, bare)

    return _moments.on_blocks(bound, step, change)
