"""One step over all components of a product: state dealt out, heads refreshed together, state collected.

Components come in turn, so that what follows a step (decay, retraction) is done while its leaves are at hand. Layers of
one kind share one function, traced once: a component goes into it with its leaves numbered.

Here: `take_step`. Not here: the maths of a component (`_step`), the public transformations (`ddc`, `polar`, `fused`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax._sequence import after
from gauge_optax.binding import leaves_by_path
from gauge_optax.gauges._basis import grouped
from gauge_optax.gauges._components import (
    Component,
    collect_frame,
    collect_heads,
    collect_scales,
    components,
)
from gauge_optax.gauges._frame import FrameState
from gauge_optax.gauges._matrices import Matrices
from gauge_optax.gauges._split import Bound
from gauge_optax.gauges._system import Channels, Sides
from gauge_optax.linalg import real_dtype
from gauge_optax.transforms import _moments, _vertical
from gauge_optax.transforms._common import float_leaves, in_dtype_of
from gauge_optax.transforms._heads import turned
from gauge_optax.transforms._here import Adam, Here, Known, enter, survey
from gauge_optax.transforms._moments import BodyFrame
from gauge_optax.transforms._refresh import refreshed_heads, surveyed
from gauge_optax.transforms._state import FramedState, GaugeMoments, Method, apart, together
from gauge_optax.transforms._step import Moments, Settings, component_step, plain_step
from gauge_optax.transforms._turns import Task, one_by_one

Arrays = dict[str, jax.Array]
Finish = Callable[[Here, Arrays, Sides, Any], tuple[Any, Any]]
"""What follows a component's step: (point, tangent, its dot products, arrays) → (result, what to wait for). Static."""


class Own(NamedTuple):
    """What the step of one component reads, leaves by their names in its form.

    Attributes:
      params: its leaves.
      gradient: of its leaves.
      mu: first moments.
      nu: second moments, in the body frames of the last step.
      frame: of the last step.
      radial: moments of the joint scales' derivatives.
      heads: eigenbases and body frames of this step.
      moved: per group, what second moments are carried by to them.
      renewed: per group, whether they are new.
      vertical: moments of vertical coordinates.
      known: of a component with heads, which is read ahead of the others.
      step: this step's number.
    """

    params: Arrays
    gradient: Arrays
    mu: Arrays
    nu: Arrays
    frame: FrameState
    radial: tuple[Channels, Channels]
    heads: tuple[BodyFrame, ...]
    moved: tuple[Any, ...]
    renewed: tuple[jax.Array, ...]
    vertical: tuple[Any, Any]
    known: Known | None
    step: jax.Array


class Step(NamedTuple):
    """What a step leaves.

    Attributes:
      parts: the components.
      finished: per component, what `Finish` made of its tangent.
      plain: the tangent of leaves that no gauge binds.
      state: the new state.
    """

    parts: tuple[Component, ...]
    finished: list[Any]
    plain: Arrays
    state: FramedState


def take_step(
    bound: Bound,
    params: optax.Params,
    updates: optax.Updates,
    state: FramedState,
    method: Method,
    matrices: Mapping[str, Matrices],
    finish_of: Callable[[Component], tuple[Finish, Any]],
) -> Step:
    """One step, component by component.

    Args:
      bound: the product on this tree.
      params: the parameters.
      updates: gradients.
      state: of the step before.
      method: the settings.
      matrices: the leaves that are stepped by their polar factor.
      finish_of: what follows the step of a component, and the arrays it takes.

    Returns:
      The results, and the new state.
    """
    bound.vectors(updates)  # raises where a leaf is missing
    parts, old, count = components(bound), state.gauges, optax.safe_increment(state.count)
    trees = {"params": params, "gradient": updates, "mu": state.mu, "nu": state.nu}
    leaves = {kind: leaves_by_path(tree) for kind, tree in trees.items()}
    known = surveyed(parts, leaves["params"], old.frame, method.options.vertical != "frozen")
    heads, moved, renewed = refreshed_heads(bound, known, leaves["params"], old.heads, method.options, count)
    static, traced = apart(method)
    finishes = [finish_of(part) for part in parts]

    def task(k: int) -> Task:
        """A component's part in the step: what it has in common with others of its kind, and its own arrays."""
        part, (finish, extra) = parts[k], finishes[k]
        own = Own(
            part.numbered(leaves["params"]),
            part.numbered(leaves["gradient"]),
            part.numbered(leaves["mu"]),
            part.numbered(leaves["nu"]),
            part.of_frame(old.frame),
            (part.of_scales(old.radial_mu), part.of_scales(old.radial_nu)),
            part.of_heads(heads),
            part.of_heads(moved),
            tuple(renewed[at] for at, _ in part.heads),
            (_vertical.of(part, old.vertical_mu), _vertical.of(part, old.vertical_nu)),
            known.get(part),
            count,
        )
        return (part.form, static, tuple(part.numbered(matrices).items()), finish), (own, extra)

    def step_of(kind: Any, one: jax.Array, arrays: Any) -> tuple[Any, jax.Array]:
        *out, one = _component(*kind, one, traced, *arrays)
        return tuple(out), one

    done, one = one_by_one([task(k) for k in range(len(parts))], step_of)
    finished = [result for result, _, _ in done]
    found = [
        (frame, new._replace(mu=part.by_path(new.mu), nu=part.by_path(new.nu)))
        for part, (_, frame, new) in zip(parts, done, strict=True)
    ]
    unbound = {kind: float_leaves(tree, real_dtype(), without=bound.offset) for kind, tree in trees.items()}
    chosen = _settings(method, count, {p: m for p, m in matrices.items() if p not in bound.offset})
    plain, mu, nu = plain_step(chosen, unbound["gradient"], unbound["mu"], unbound["nu"], one)
    for _, new in found:
        mu, nu = mu | new.mu, nu | new.nu
    frame = collect_frame(parts, [frame for frame, _ in found])
    gauges = _collected(parts, frame, [new for _, new in found], old, renewed)
    new_state = FramedState(count, in_dtype_of(state.mu, mu), in_dtype_of(state.nu, nu), gauges)
    return Step(parts, finished, plain, new_state)


def bare(here: Here, tangent: Arrays, dots: Sides, extra: Any) -> tuple[Arrays, Arrays]:
    """A `Finish` that leaves the tangent as it is."""
    del here, dots, extra
    return tangent, tangent


def tangents(step: Step) -> Arrays:
    """All tangents by path, where `bare` finished the components."""
    out = dict(step.plain)
    for part, own in zip(step.parts, step.finished, strict=True):
        out |= part.by_path(own)
    return out


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _component(
    form: Bound,
    static: Method,
    polar: tuple[tuple[str, Matrices], ...],
    finish: Finish,
    one: jax.Array,
    traced: Any,
    own: Own,
    extra: Any,
) -> tuple[Any, FrameState, Moments, jax.Array]:
    """One component: what `finish` made of its tangent, its frame, its moments, and `one` for the next."""
    method = together(static, traced)
    chosen = _settings(method, own.step, dict(polar))
    known = own.known
    if known is None:
        known = survey(form, own.params, own.frame, method.options.vertical != "frozen", one)
    here = enter(form, own.params, known, one)
    gradient, mu, nu = (float_leaves(x, real_dtype()) for x in (own.gradient, own.mu, own.nu))
    if not form.scales:
        # No frame multiplies it, so that XLA would read the gradients of all layers first, and keep copies.
        gradient = {p: one * x for p, x in gradient.items()}
    if method.options.reset_every is not None:
        mu, nu = (_restarted(x, form, chosen.head_adam.step) for x in (mu, nu))
    past = Moments(mu, _carried(form, nu, own.moved, own.renewed), own.radial, own.heads, own.vertical)
    tangent, dots, new = component_step(here, gradient, past, chosen)
    result, wait = finish(here, tangent, dots, extra)
    return result, here.known.frame, new, after((wait, new.mu, new.nu))


def _settings(method: Method, count: jax.Array, matrices: Mapping[str, Matrices]) -> Settings:
    options = method.options
    adam = Adam(options.b1, options.b2, options.eps, options.eps_root, count, options.nesterov)
    age = count if options.reset_every is None else (count - 1) % options.reset_every + 1
    cut = _moments.threshold_of(options.v_mode, options.live_threshold)
    return Settings(
        adam, adam._replace(step=age), options.vertical, options.v_mode, cut, options.radial, options.radial_scale,
        options.reproject, method.project, method.polar, matrices,
    )  # fmt: skip


def _restarted(moments: Arrays, form: Bound, age: jax.Array) -> Arrays:
    """Moments with those of rotated leaves set to zero where their age is 1."""
    return {p: jnp.where(age == 1, 0.0, x) if p in form.turned else x for p, x in moments.items()}


def _carried(form: Bound, nu: Arrays, moved: Sequence[Any], renewed: Sequence[jax.Array]) -> Arrays:
    """Second moments in this step's body frames."""
    for group, new, by in zip(grouped(form.heads), renewed, moved, strict=True):
        if len(jax.tree.leaves(by)):
            own = {p: nu[p] for head in group for p in head.paths}
            nu = nu | jax.lax.cond(new, functools.partial(turned, group), lambda own, _: own, own, by)
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
