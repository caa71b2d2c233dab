"""All heads of a gauge refreshed together, before any component takes its step.

Here: reading the components with heads, stored eigenbases, body frames. Not here: the step (`_pass`).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax._sequence import after
from gauge_optax.gauges import _split
from gauge_optax.gauges._basis import Group, HeadBasis, body_frame, grouped
from gauge_optax.gauges._components import Component, collect_heads
from gauge_optax.gauges._frame import FrameState
from gauge_optax.gauges._split import Bound
from gauge_optax.transforms import _moments
from gauge_optax.transforms._heads import refreshed
from gauge_optax.transforms._here import Known, survey
from gauge_optax.transforms._moments import BodyFrame
from gauge_optax.transforms._state import Options
from gauge_optax.transforms._turns import one_by_one

Arrays = dict[str, jax.Array]
Scalar = float | jax.Array

_NEVER = 2**31 - 1


def surveyed(
    parts: Sequence[Component], leaves: Mapping[str, jax.Array], frame: FrameState, moving: bool
) -> dict[Component, Known]:
    """Components with heads, read first: all heads of a gauge are refreshed together."""
    with_heads = [part for part in parts if part.heads]

    def step(form: Any, one: jax.Array, arrays: Any) -> tuple[Known, jax.Array]:
        return _survey(form, moving, *arrays, one)

    found, _ = one_by_one([(p.form, (p.numbered(leaves), p.of_frame(frame))) for p in with_heads], step)
    return dict(zip(with_heads, found, strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _survey(
    form: Bound, moving: bool, params: Arrays, frame: FrameState, one: jax.Array
) -> tuple[Known, jax.Array]:
    known = survey(form, params, frame, moving, one)
    return known, after((known.grams, known.rho))


def refreshed_heads(
    bound: Bound,
    known: Mapping[Component, Known],
    leaves: Mapping[str, jax.Array],
    heads: tuple[BodyFrame, ...],
    options: Options,
    count: jax.Array,
) -> tuple[tuple[BodyFrame, ...], tuple[Any, ...], list[jax.Array]]:
    """Eigenbases and body frames of this step per group, what second moments are carried by, and which are new."""
    grams = collect_heads(list(known), [own.grams for own in known.values()])
    oldest = options.refresh_every
    if options.reset_every is not None:
        oldest = jnp.where((count - 1) % options.reset_every == 0, 0, _NEVER if oldest is None else oldest)
    cut = _moments.threshold_of(options.v_mode, options.live_threshold)
    fresh, moved, renewals = list[BodyFrame](), list[Any](), []
    for group, head, gram in zip(grouped(bound.heads), heads, grams, strict=True):
        # One refresh after the other: see `_heads.in_turn`.
        gram = gram * (after((fresh[-1].basis, fresh[-1].frame)) if fresh else 1.0)
        basis, renewed = refreshed(head.basis, gram, options.live_threshold, options.refresh_drift, oldest)
        frame, carry = head.frame, ()  # only body frames carry anything
        if _moments.uses_frame(options.v_mode):
            renew = functools.partial(_new_frame, group, known, leaves, basis, head.frame, cut)
            frame, carry = jax.lax.cond(renewed, renew, functools.partial(_same_frame, head.frame))
        fresh.append(head._replace(basis=basis, frame=frame))
        moved.append(carry)
        renewals.append(renewed)
    return tuple(fresh), tuple(moved), renewals


def _new_frame(
    group: Group,
    known: Mapping[Component, Known],
    leaves: Mapping[str, jax.Array],
    basis: HeadBasis,
    old: jax.Array,
    cut: Scalar,
) -> tuple[jax.Array, jax.Array]:
    paths = {path for head in group for path in head.paths}
    hat: Arrays = {}
    for part, own in known.items():
        if paths & part.bound.turned:
            hat |= part.by_path(_hat(part.form, part.numbered(leaves), own.frame))
    frame = body_frame(group, hat, basis, cut)
    return frame, _moments.carried_by(old, frame)


@functools.partial(jax.jit, static_argnums=0)
def _hat(form: Bound, params: Arrays, frame: FrameState) -> Arrays:
    return _split.at(form, form.centre(form.values(params)), frame.f).hat


def _same_frame(old: jax.Array) -> tuple[jax.Array, jax.Array]:
    return old, jnp.broadcast_to(jnp.eye(old.shape[-1], dtype=old.dtype), old.shape)


