"""One step of DDC-Adam over all components of a product: state dealt out, heads refreshed together, state collected.

Components come in turn, so that what follows a step (decay, retraction) can be done while its leaves are at hand.

Here: `Pass`. Not here: the maths of a component (`_step`), the public transformation (`ddc`).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.gauges import _frame, _split
from gauge_optax.gauges._basis import Group, HeadBasis, body_frame, grouped
from gauge_optax.gauges._components import (
    Component,
    after,
    collect_frame,
    collect_heads,
    collect_scales,
    components,
)
from gauge_optax.gauges._frame import FrameState
from gauge_optax.gauges._split import Bound, Coordinates
from gauge_optax.gauges._system import Channels, ScaleSystem, Sides
from gauge_optax.linalg import real_dtype
from gauge_optax.transforms import _moments, _vertical
from gauge_optax.transforms._common import float_leaves, in_dtype_of
from gauge_optax.transforms._heads import init_bases, refreshed, turned
from gauge_optax.transforms._here import Adam, Here, enter
from gauge_optax.transforms._moments import BodyFrame
from gauge_optax.transforms._step import Moments, Settings, component_step, plain_step

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


class Options(NamedTuple):
    """The arguments of `scale_by_ddc` but the gauges, in its order."""

    b1: Scalar
    b2: Scalar
    eps: Scalar
    eps_root: Scalar
    mu_dtype: Any
    nesterov: bool
    vertical: str
    v_mode: str
    radial: str
    radial_scale: Scalar
    live_threshold: Scalar
    refresh_drift: Scalar
    refresh_every: int | jax.Array | None
    reset_every: int | jax.Array | None
    reproject: bool


class Pass:
    """One step, component by component: `take` each of `parts` in turn, then `finish`."""

    def __init__(
        self, bound: Bound, params: Any, updates: Any, state: ScaleByDDCState, options: Options, project: bool
    ) -> None:
        """Enters the components with heads and refreshes what has drifted."""
        bound.vectors(updates)  # raises where a leaf is missing
        self.bound, self.params, self.state = bound, params, state
        self.moving = options.vertical != "frozen"
        self.count = optax.safe_increment(state.count)
        self.chosen = _settings(options, self.count, project)
        self.parts = components(bound)
        trees = zip(_KINDS, (updates, state.mu, state.nu), strict=True)
        self.leaves = {kind: float_leaves(tree, real_dtype()) for kind, tree in trees}
        if options.reset_every is not None:
            age = self.chosen.head_adam.step
            self.leaves |= {kind: _restarted(self.leaves[kind], bound, age) for kind in _KINDS[1:]}
        self.entered = _entered_heads(self.parts, params, state.gauges.frame, self.moving)
        self.heads, self.moved, self.renewed = _refreshed_heads(
            bound, self.entered, params, state.gauges.heads, options, self.chosen
        )
        self.done: list[tuple[Here, Moments]] = []

    def take(self, part: Component, one: jax.Array) -> tuple[Arrays, Sides, Here]:
        """The tangent of one component once `one` is known, its dot products with the channels, and the point."""
        old = self.state.gauges
        if part in self.entered:
            here = self.entered[part].again(self.params, one)
        else:
            here = enter(part.bound, self.params, part.of_frame(old.frame), self.moving, one)
        gradient, mu, nu = ({p: self.leaves[kind][p] for p in part.bound.offset} for kind in _KINDS)
        past = Moments(
            mu,
            _carried(part, nu, self.moved, self.renewed),
            (part.of_scales(old.radial_mu), part.of_scales(old.radial_nu)),
            part.of_heads(self.heads),
            (_vertical.of(part, old.vertical_mu), _vertical.of(part, old.vertical_nu)),
        )
        tangent, dots, new = component_step(here, gradient, past, self.chosen)
        self.done.append((here, new))
        return tangent, dots, here

    def taken(self) -> Any:
        """Arrays that are known once the last component taken is finished."""
        _, new = self.done[-1]
        return new.mu, new.nu

    def finish(self) -> tuple[Arrays, ScaleByDDCState]:
        """The step of leaves that no gauge binds, and the new state."""
        plain = [{p: x for p, x in self.leaves[k].items() if p not in self.bound.offset} for k in _KINDS]
        step, mu, nu = plain_step(self.chosen.adam, *plain)
        for _, new in self.done:
            mu, nu = mu | new.mu, nu | new.nu
        frame = collect_frame(self.parts, [here.frame for here, _ in self.done])
        gauges = _collected(self.parts, frame, [new for _, new in self.done], self.state.gauges, self.renewed)
        mu, nu = in_dtype_of(self.state.mu, mu), in_dtype_of(self.state.nu, nu)
        return step, ScaleByDDCState(self.count, mu, nu, gauges)


_KINDS = ("gradient", "mu", "nu")


def _settings(options: Options, count: jax.Array, project: bool) -> Settings:
    adam = Adam(options.b1, options.b2, options.eps, options.eps_root, count, options.nesterov)
    age = count if options.reset_every is None else (count - 1) % options.reset_every + 1
    cut = _moments.threshold_of(options.v_mode, options.live_threshold)
    return Settings(
        adam, adam._replace(step=age), options.vertical, options.v_mode, cut, options.radial, options.radial_scale,
        options.reproject, project,
    )  # fmt: skip


def init_gauges(bound: Bound, params: optax.Params, options: Options) -> GaugeMoments:
    centred = bound.centre(bound.values(params))
    frame = _frame.init_frame(bound.system, centred)
    hat = _split.at(bound, centred, frame.f).hat
    heads = _moments.init_frames(bound, hat, init_bases(bound, hat), options.v_mode, options.live_threshold)
    mu = _vertical.zero_coordinates(bound) if options.vertical != "frozen" else ()
    nu = _vertical.zero_variances(bound) if options.vertical == "adam" else ()
    return GaugeMoments(frame, _zeros(bound.system), _zeros(bound.system), heads, mu, nu, jnp.zeros((), jnp.int32))


def _restarted(moments: Arrays, bound: Bound, age: jax.Array) -> Arrays:
    """Moments with those of rotated leaves set to zero where their age is 1."""
    return {p: jnp.where(age == 1, 0.0, x) if p in bound.turned else x for p, x in moments.items()}


def wide(leaf: Any) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _zeros(system: ScaleSystem) -> Channels:
    return tuple(jnp.zeros(i.shape, real_dtype()) for i in system.instances)


def _entered_heads(
    parts: Sequence[Component], params: optax.Params, frame: FrameState, moving: bool
) -> dict[Component, Here]:
    """The points of components with heads, entered first: all heads of a gauge are refreshed together."""
    one, entered = jnp.ones(()), {}
    for part in parts:
        if part.heads:
            entered[part] = enter(part.bound, params, part.of_frame(frame), moving, one)
            one = after((entered[part].grams, entered[part].rho))
    return entered


def _refreshed_heads(
    bound: Bound,
    entered: Mapping[Component, Here],
    params: optax.Params,
    heads: tuple[BodyFrame, ...],
    options: Options,
    chosen: Settings,
) -> tuple[tuple[BodyFrame, ...], tuple[Any, ...], list[jax.Array]]:
    """Eigenbases and body frames of this step per group, what second moments are carried by, and which are new."""
    grams = collect_heads(list(entered), [here.grams for here in entered.values()])
    oldest = options.refresh_every
    if options.reset_every is not None:
        oldest = jnp.where(chosen.head_adam.step == 1, 0, _NEVER if oldest is None else oldest)
    fresh, moved, renewals = list[BodyFrame](), list[Any](), []
    for group, head, gram in zip(grouped(bound.heads), heads, grams, strict=True):
        # One refresh after the other: see `in_turn`.
        gram = gram * (after((fresh[-1].basis, fresh[-1].frame)) if fresh else 1.0)
        basis, renewed = refreshed(head.basis, gram, options.live_threshold, options.refresh_drift, oldest)
        frame, carry = head.frame, ()  # only body frames carry anything
        if _moments.uses_frame(options.v_mode):
            renew = functools.partial(_new_frame, group, entered, params, basis, head.frame, chosen.cut)
            frame, carry = jax.lax.cond(renewed, renew, functools.partial(_same_frame, head.frame))
        fresh.append(head._replace(basis=basis, frame=frame))
        moved.append(carry)
        renewals.append(renewed)
    return tuple(fresh), tuple(moved), renewals


def _new_frame(
    group: Group,
    entered: Mapping[Component, Here],
    params: optax.Params,
    basis: HeadBasis,
    old: jax.Array,
    cut: Scalar,
) -> tuple[jax.Array, jax.Array]:
    paths = {path for head in group for path in head.paths}
    hat: Arrays = {}
    for here in entered.values():
        if paths & here.bound.turned:
            hat |= _split.at(here.bound, here.bound.centre(here.bound.values(params)), here.frame.f).hat
    frame = body_frame(group, hat, basis, cut)
    return frame, _moments.carried_by(old, frame)


def _same_frame(old: jax.Array) -> tuple[jax.Array, jax.Array]:
    return old, jnp.broadcast_to(jnp.eye(old.shape[-1], dtype=old.dtype), old.shape)


def _carried(part: Component, nu: Arrays, moved: Sequence[Any], renewed: Sequence[jax.Array]) -> Arrays:
    """Second moments in this step's body frames."""
    for group, (at, _), by in zip(grouped(part.bound.heads), part.heads, part.of_heads(moved), strict=True):
        if len(jax.tree.leaves(by)):
            own = {p: nu[p] for head in group for p in head.paths}
            nu = nu | jax.lax.cond(renewed[at], functools.partial(turned, group), lambda own, _: own, own, by)
    return nu


def _collected(
    parts: Sequence[Component], frame: FrameState, found: Sequence[Moments], old: GaugeMoments, renewed: list[jax.Array]
) -> GaugeMoments:
    radial_mu, radial_nu = (collect_scales(parts, [new.radial[k] for new in found]) for k in range(2))
    heads = collect_heads(parts, [new.heads for new in found])
    vertical_mu, vertical_nu = (
        _vertical.collected(parts, [new.vertical[k] for new in found], kept != ())
        for k, kept in enumerate((old.vertical_mu, old.vertical_nu))
    )
    refreshes = old.refreshes + sum(renewed)
    return GaugeMoments(frame, radial_mu, radial_nu, heads, vertical_mu, vertical_nu, refreshes)
