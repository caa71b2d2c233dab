"""Motion along orbits, for losses that are not invariant: one momentum or one scalar Adam per group coordinate.

Here: the coordinates' moments and their lift to leaves. Not here: the default, which is no motion at all. Scales
move in log coordinates normalised as in DDC B.4; a rotation has one variance per head, because a variance per
generator entry would depend on the basis.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.gauges import _split
from gauge_optax.gauges._basis import HeadBasis, grouped
from gauge_optax.gauges._components import Component, collect_heads, collect_scales
from gauge_optax.gauges._split import Bound, Coordinates
from gauge_optax.linalg import real_dtype
from gauge_optax.transforms._heads import add_turn, horizontal
from gauge_optax.transforms._here import Adam, Here

Arrays = dict[str, jax.Array]


def zero_coordinates(bound: Bound) -> Coordinates:
    """Coordinates of no motion: per scale instance, per shifted leaf, per group of rotation instances."""
    dtype = real_dtype()
    shapes = [(len(g), *g[0].shape, g[0].size, g[0].size) for g in grouped(bound.heads)]
    return Coordinates(
        tuple(jnp.zeros(i.shape, dtype) for i in bound.scales),
        bound.zero_slices(),
        tuple(jnp.zeros(shape, dtype) for shape in shapes),
    )


def zero_variances(bound: Bound) -> Coordinates:
    """Second moments of the coordinates: as the coordinates, one number per head for rotations."""
    zero = zero_coordinates(bound)
    return zero._replace(heads=tuple(_per_head(h) for h in zero.heads))


def of(part: Component, whole: Any) -> Any:
    """A component's part of coordinates of the product, leaves by their names in its form; () stays ()."""
    if whole == ():
        return ()
    return Coordinates(part.of_scales(whole.scales), part.numbered(whole.shifts), part.of_heads(whole.heads))


def collected(parts: Sequence[Component], found: Sequence[Any], kept: bool) -> Any:
    """Coordinates of the product from its components'; () where none are kept."""
    if not kept:
        return ()
    shifts = {p: x for part, own in zip(parts, found, strict=True) for p, x in part.by_path(own.shifts).items()}
    heads = collect_heads(parts, [own.heads for own in found])
    return Coordinates(collect_scales(parts, [own.scales for own in found]), shifts, heads)


def _per_head(generator: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(generator), (-2, -1), keepdims=True)


def split(here: Here, framed: Arrays, bases: Sequence[HeadBasis]) -> tuple[Coordinates, Arrays]:
    """The loss's slopes along the orbit, and the cotangent without its rotation part.

    Args:
      here: the point.
      framed: the in-frame gradient.
      bases: stored eigenbases per group of heads.

    Returns:
      Slopes (scales: dL/d log α; shifts: the mean; rotations: generators of the vertical part), and what is left.
    """
    pairing = here.system.along_orbits(here.system.dots(here.point.hat, framed))
    rest, generators = horizontal(here.bound, here.point.hat, framed, bases, here.known.grams)
    return Coordinates(pairing, here.bound.shift_means(framed), generators), rest


def step(
    here: Here, slopes: Coordinates, mu: Coordinates, nu: Any, mode: str, adam: Adam
) -> tuple[Coordinates, Coordinates, Any]:
    """Rates along the orbit and their new moments.

    Args:
      here: the point.
      slopes: derivatives of the loss along the coordinates.
      mu: first moments.
      nu: second moments; () for "sgd".
      mode: "sgd" or "adam".
      adam: hyperparameters.

    Returns:
      Rates, first moments, second moments.
    """
    if mode == "sgd":
        new_mu = jax.tree.map(lambda m, x: adam.b1 * m + (1 - adam.b1) * x, mu, slopes)
        rates = jax.tree.map(lambda m, x: adam.debias(m, x, adam.b1), new_mu, slopes)
        return _normalised(here.bound, rates, 1.0), new_mu, ()
    plain = slopes._replace(heads=())
    leaves = (jax.tree.leaves(c._replace(heads=())) for c in (slopes, mu, nu))
    triples = [adam.scalar(*own) for own in zip(*leaves, strict=True)]
    heads = [adam.scalar(*own, variance_of=_per_head) for own in zip(slopes.heads, mu.heads, nu.heads, strict=True)]
    rates, new_mu, new_nu = (
        jax.tree.unflatten(jax.tree.structure(plain), [t[k] for t in triples])._replace(
            heads=tuple(t[k] for t in heads)
        )
        for k in range(3)
    )
    return _normalised(here.bound, rates, 0.5), new_mu, new_nu


def _normalised(bound: Bound, rates: Coordinates, power: float) -> Coordinates:
    """Scale rates divided by |(1, −p)|^(2·power), the length of the gauge mode in log-norm coordinates."""
    lengths = [math.pow(1.0 + i.degree**2 if i.down else 1.0, power) for i in bound.scales]
    return rates._replace(scales=tuple(r / n for r, n in zip(rates.scales, lengths, strict=True)))


def added(here: Here, tangent: Arrays, rates: Coordinates) -> Arrays:
    """An in-frame tangent with motion along the orbit at these rates, and no other.

    Radial parts of two gauges on one leaf cross into each other's orbits; unfrozen, no retraction undoes that later, so
    what the tangent already holds of it is taken out.
    """
    bound, hat = here.bound, here.point.hat
    leaked = _split.scale_coordinates(here.system, hat, tangent)
    logs = bound.system.exponents(tuple(a - b for a, b in zip(rates.scales, leaked, strict=True)))
    moved = {p: x + hat[p] * logs[p] if p in logs else x for p, x in tangent.items()}
    moved = bound.add_shifts(moved, rates.shifts)
    for group, generator in zip(grouped(bound.heads), rates.heads, strict=True):
        moved |= add_turn(group, moved, hat, generator)
    return moved
