"""One step on one component of a product: everything between the in-frame gradient and the tangent.

Adam and Muon in the frame differ in one line: what a leaf's tangential part is preconditioned by.

Here: the order of things in a step. Not here: what is kept between steps and when bases are renewed (`_pass`).
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax._sequence import after
from gauge_optax.gauges import _split
from gauge_optax.gauges._basis import grouped
from gauge_optax.gauges._head import HeadBlock, HeadInstance
from gauge_optax.gauges._matrices import Matrices
from gauge_optax.gauges._split import Bound, Coordinates
from gauge_optax.gauges._system import Channels
from gauge_optax.transforms import _channels, _moments, _vertical
from gauge_optax.transforms._heads import horizontal, without_vertical
from gauge_optax.transforms._here import Adam, Here
from gauge_optax.transforms._moments import BodyFrame
from gauge_optax.transforms._polar import PolarOptions, polar_steps

Arrays = dict[str, jax.Array]
Scalar = float | jax.Array

_NEGLIGIBLE = 1e-3  # vertical share of a channel's derivatives that may stay: it has no effect but on the radial part


class Settings(NamedTuple):
    """What the user chose.

    Attributes:
      adam: hyperparameters of all leaves and coordinates that no rotation binds.
      head_adam: the same with the age of the rotated leaves' moments for a step number.
      vertical: as `scale_by_ddc`'s.
      v_mode: as `scale_by_ddc`'s.
      cut: which directions `v_mode` divides.
      radial: as `scale_by_ddc`'s.
      radial_scale: as `scale_by_ddc`'s.
      reproject: as `scale_by_ddc`'s.
      project: whether the vertical part of the gradient is taken out first.
      polar: of the leaves that are stepped by their polar factor; None where there are none.
      matrices: these leaves, and how they are read.
    """

    adam: Adam
    head_adam: Adam
    vertical: str
    v_mode: str
    cut: Scalar
    radial: str
    radial_scale: Scalar
    reproject: bool
    project: bool
    polar: PolarOptions | None
    matrices: Mapping[str, Matrices]

    def decays(self, leaves: Iterable[str]) -> dict[str, Scalar]:
        """Per leaf, the decay of its first moment."""
        muon = self.adam.b1 if self.polar is None else self.polar.beta
        return {p: muon if p in self.matrices else self.adam.b1 for p in leaves}

    def polar_steps(self, mean: Arrays) -> Arrays:
        """The steps of the leaves that are stepped by their polar factor."""
        return {} if self.polar is None else polar_steps(self.polar, self.matrices, mean)


class Moments(NamedTuple):
    """What a component remembers.

    Attributes:
      mu: first moments of its leaves.
      nu: second moments of its leaves.
      radial: first and second moments of the joint scales' derivatives.
      heads: eigenbases and body frames.
      vertical: first and second moments of vertical coordinates; () where not kept.
    """

    mu: Arrays
    nu: Arrays
    radial: tuple[Channels, Channels]
    heads: tuple[BodyFrame, ...]
    vertical: tuple[Any, Any]


def plain_step(chosen: Settings, gradient: Arrays, mu: Arrays, nu: Arrays, one: jax.Array) -> tuple[Arrays, ...]:
    """Adam or Muon on leaves that no gauge binds: the step, and the new moments."""
    adam, decays = chosen.adam, chosen.decays(gradient)
    mu = {p: decays[p] * x + (1 - decays[p]) * gradient[p] for p, x in mu.items()}
    nu = {p: adam.b2 * x + (1 - adam.b2) * jnp.square(gradient[p]) for p, x in nu.items()}
    mean = {p: adam.debias(x, gradient[p], decays[p]) for p, x in mu.items()}
    step: Arrays = {}
    for path in chosen.matrices:
        # One after the other: the iterates of a large matrix are as large as it is.
        only = chosen._replace(matrices={path: chosen.matrices[path]})
        step |= only.polar_steps({path: one * mean[path]})
        one = after(step[path])
    return step | {p: mean[p] / adam.root(x) for p, x in nu.items()}, mu, nu


def component_step(
    here: Here, gradient: Arrays, old: Moments, chosen: Settings
) -> tuple[Arrays, _channels.Sides, Moments]:
    """The tangent of one component.

    Args:
      here: the point.
      gradient: of its leaves.
      old: its moments, second ones in this step's body frames.
      chosen: the settings.

    Returns:
      The tangent per leaf, out of the frame; its dot products with every channel's sides; and the new moments.
    """
    adam, bases = chosen.adam, [h.basis for h in old.heads]
    framed = here.point.cotangent_in(gradient)
    dots = here.slopes(gradient)
    flat = _channels.none(here.system)
    if chosen.project:
        flat, dots = _projected(here, dots)
        framed = without_vertical(here.bound, here.point.hat, framed, bases, here.known.grams)
    slopes = _channels.radial_slopes(here.system, dots)
    drifts: Coordinates | None = None
    if chosen.vertical != "frozen":
        drifts, framed = _vertical.split(here, framed, bases)
    flat = _channels.total(flat, _channels.tangential(here, dots, _channels.GRADIENT_SWEEPS)[0])
    seen = here.resize(here.bound.centre(here.added(framed, flat)))

    adams = dict.fromkeys(seen, adam) | dict.fromkeys(here.bound.turned, chosen.head_adam)
    past, decays = (here.transfer(old.mu, 1), here.transfer(old.nu, 2)), chosen.decays(seen)
    mu = in_place({p: decays[p] * x + (1 - decays[p]) * seen[p] for p, x in past[0].items()})
    mean = {p: adams[p].debias(x, seen[p], decays[p]) for p, x in mu.items()}
    step, nu, heads = _divided(
        here.bound, old.heads, mean, seen, past[1], chosen.v_mode, chosen.cut, adams, chosen.matrices
    )
    step |= chosen.polar_steps(mean)

    tangent = jax.lax.optimization_barrier(here.resize(step))
    added = rest = left = _channels.none(here.system)
    if chosen.reproject:
        tangent = here.bound.centre(tangent)
        added, rest = _channels.tangential(here, here.dots(tangent), _channels.TANGENT_SWEEPS)
        tangent, _ = horizontal(here.bound, here.point.hat, tangent, bases, here.known.grams)
    else:
        left = here.dots(tangent)
    outward, radial_mu, radial_nu = _channels.radial(
        here, slopes, old.radial, chosen.radial, chosen.radial_scale, adam
    )
    added, rest = _channels.with_radial(here, added, rest, outward)
    tangent, rest = here.added(tangent, added), _channels.total(left, rest)
    vertical = old.vertical
    if drifts is not None:
        rates, *fresh = _vertical.step(here, drifts, *old.vertical, chosen.vertical, adam)
        vertical = (fresh[0], fresh[1])
        tangent = _vertical.added(here, tangent, rates)
        rest = here.dots(tangent)
    return here.point.tangent_out(tangent), rest, Moments(mu, nu, (radial_mu, radial_nu), heads, vertical)


def _without(bound: Bound, paths: Collection[str]) -> Bound:
    """A product whose rotations do not bind these leaves."""
    if not paths:
        return bound

    def others(head: HeadInstance) -> HeadInstance:
        return dataclasses.replace(head, blocks=tuple(b for b in head.blocks if b.block.path not in paths))

    return dataclasses.replace(bound, heads=tuple(tuple(map(others, gauge)) for gauge in bound.heads))


def in_place(fresh: Arrays) -> Arrays:
    """New moments, for good: what follows reads them, and not the old ones once more, whose memory they can so take."""
    return jax.lax.optimization_barrier(fresh)


def _projected(here: Here, dots: _channels.Sides) -> tuple[_channels.Sides, _channels.Sides]:
    """Multiples of θ̂ that take the vertical part out of a cotangent, and its dot products after that."""
    added = _channels.none(here.system)
    if not here.system.instances:
        return added, dots

    def removed() -> tuple[_channels.Sides, _channels.Sides]:
        out, rest = added, dots
        for k, rate in enumerate(_split.vertical_rates(here.overlap, dots, _NEGLIGIBLE)):
            out = _channels.plus(out, k, -rate, here.system.instances[k].degree * rate)
            rest = here.overlap.moved_along(rest, k, -rate)
        return list(out), list(rest)

    vertical = sum(jnp.sum(jnp.square(x)) for x in here.system.along_orbits(dots))
    whole = sum(jnp.sum(jnp.square(up) + jnp.square(down)) for up, down in dots)
    return jax.lax.cond(vertical > _NEGLIGIBLE**2 * whole, removed, lambda: (list(added), list(dots)))


def _divided(
    bound: Bound,
    heads: tuple[BodyFrame, ...],
    mean: Arrays,
    seen: Arrays,
    nu: Arrays,
    v_mode: str,
    cut: Scalar,
    adams: dict[str, Adam],
    spared: Collection[str],
) -> tuple[Arrays, Arrays, tuple[BodyFrame, ...]]:
    """First moments over root second moments, and the new second moments, of all leaves but the `spared`."""
    whole, bound = bound, _without(bound, spared)
    framed = _moments.uses_frame(v_mode)
    mean_in, seen_in = (_moments.to_body(bound, heads, x) for x in (mean, seen)) if framed else (mean, seen)
    squares = {p: jnp.square(seen_in[p]) for p in nu}
    if v_mode in ("none", "per_head_matrix"):
        squares = _moments.on_blocks(bound, squares, lambda g, i, h, b, view: jnp.zeros_like(view))
    elif v_mode == "per_head_scalar":
        squares = _moments.on_blocks(bound, squares, lambda g, i, h, b, view: _moments.per_head_mean(h, b, view))
    nu = in_place({p: adams[p].b2 * x + (1 - adams[p].b2) * squares[p] for p, x in nu.items()})
    would_be = {p: jnp.square(mean[p]) * (1 - adams[p].b2 ** adams[p].step) for p in spared}
    roots = _moments.above_rounding(whole, {p: adams[p].root(x) for p, x in nu.items()}, would_be | nu, adams)
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
