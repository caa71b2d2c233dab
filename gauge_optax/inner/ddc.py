"""DDC's Adam on the slice: the length of every scale channel by itself, heads by one of five second moments.

On the slice the anchor of a scale channel has a fixed size, and what else the channel holds (a unit's outgoing weights,
the rows that read a norm) has a length s, which is the channel's invariant scale, and a direction:

* radial: one Adam per channel on s, or on log s;
* tangential: Adam entry by entry on the rest of the gradient, without what would change lengths; or the polar factor
  of a matrix's first moment (DDC's Muon).

Moments of one function are the same numbers here, so that none has to know how it moves. Points and gradients may come
with their heads as they lie (`slice.Origin`): what is done to them but for moments is the same in any basis.

Here: the step. Not here: sums along channels (`channels`), second moments of heads (`heads`), what enters and leaves
the slice (`quotient`). References: DDC B.1–B.8; docs/design.md §4. Deviations: a length moves by lr·√n, n the entries
that carry it, which is what Adam can move it by; where several kernels read a norm, each has a length of its own; a
chain's inner lengths are those of anchors, which leaves one radial part (B.6).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import binding_error, is_empty, leaves_by_path, with_leaves
from gauge_optax.gauges._matrices import Matrices
from gauge_optax.gauges.chart import Chart, centred, turning_removed
from gauge_optax.gauges.product import Product
from gauge_optax.gauges.reading import Arrays
from gauge_optax.inner.adam import Adam
from gauge_optax.inner.channels import Measured, Pair, as_they_lie, carried, inverse_of, without_lengths
from gauge_optax.inner.heads import HeadMoments, divided, in_bases, init_heads, refreshed
from gauge_optax.inner.polar import Polar, polar_steps
from gauge_optax.inner.vertical import VERTICAL, VerticalMoments, init_vertical, vertical_step
from gauge_optax.linalg import noise
from gauge_optax.meshes import layout, zeros_like
from gauge_optax.slice import Origin

Scalar = float | jax.Array
RADIAL = ("linear", "log")
__all__ = ["RADIAL", "VERTICAL", "Options", "ScaleByDDCState", "ddc"]
_LEAST = 1e-3  # of a gauge's mean length: below it the radial step is relative to this
_REGROWTH = 4.0  # of Adam's largest step: how fast lengths below their floor grow, against decay too


class Options(NamedTuple):
    """The arguments of `scale_by_ddc` but the gauges."""

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
    scale_floor: Scalar
    live_threshold: Scalar
    refresh_drift: Scalar
    refresh_every: int | jax.Array | None


class GaugeMoments(NamedTuple):
    """What DDC remembers per gauge coordinate; small beside the parameters.

    Attributes:
      radial_mu: first moment of the derivative by s (or log s), per scale channel that has a length.
      radial_nu: its second moment.
      least: per such block, the length that no channel falls below.
      heads: what `v_mode` keeps of heads.
      vertical: moments of orbit coordinates.
    """

    radial_mu: tuple[jax.Array, ...]
    radial_nu: tuple[jax.Array, ...]
    least: tuple[jax.Array, ...]
    heads: HeadMoments
    vertical: VerticalMoments


class ScaleByDDCState(NamedTuple):
    """State of DDC's Adam, all of it in slice coordinates.

    Attributes:
      count: steps so far, int32.
      mu: first moment, shaped like the parameters; of heads in the coordinates of their mode.
      nu: second moment, the same. `optax.MaskedNode` where a leaf is stepped by its polar factor.
      gauges: a `GaugeMoments`.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates
    nu: optax.Updates
    gauges: Any


def ddc(group: Product, options: Options, polar: Polar | None = None) -> optax.GradientTransformationExtraArgs:
    """DDC's Adam as an ordinary optimizer for points of the slice, or DDC's Muon; with an `origin`, for points near it.

    Args:
      group: the product.
      options: the settings.
      polar: how matrices are stepped; Adam's step by default.

    Returns:
      A transformation of gradients with respect to slice coordinates; leaves that no gauge binds get Adam.
    """

    def matrices(params: optax.Params) -> dict[str, Matrices]:
        return {} if polar is None or is_empty(params) else polar.routing.matrices(group.bound(params), params)

    def init_fn(params: optax.Params) -> ScaleByDDCState:
        mu = zeros_like(params, options.mu_dtype)
        nu = with_leaves(zeros_like(params), dict.fromkeys(matrices(params), optax.MaskedNode()))
        count = jnp.zeros((), jnp.int32)
        if is_empty(params):
            return ScaleByDDCState(count, mu, nu, jnp.zeros(()))
        on = group.chart(params)
        _check(on, params)

        def moments(params: optax.Params) -> GaugeMoments:
            values = on.joint.vectors(params)
            lengths = [jnp.sqrt(own.squares(values)) for own in carried(on)]
            mus, nus = (tuple(jnp.zeros_like(s) for s in lengths) for _ in range(2))
            least = tuple(options.scale_floor * jnp.mean(s) for s in lengths)
            heads, vertical = init_heads(on, values, options.v_mode), init_vertical(on, options.vertical, values)
            return GaugeMoments(mus, nus, least, heads, vertical)

        return ScaleByDDCState(count, mu, nu, layout(params).run(moments, params))

    def update_fn(
        updates: Any, state: ScaleByDDCState, params: Any = None, origin: Origin | None = None, **extra: Any
    ) -> tuple[Any, ScaleByDDCState]:
        del extra
        on, past = group.chart(params), state.gauges
        adam = Adam.at(options, optax.safe_increment(state.count))
        point, gradient = on.joint.vectors(params), leaves_by_path(updates)
        gradient |= on.joint.vectors(updates)
        back, faint = ({}, None) if origin is None else (origin.by_reading(on), origin.faint)
        carriers, anchors, pairs = as_they_lie(on, origin, back)
        lengths = [(own, own.squares(point)) for own in carriers]
        measured = lengths + [(own, own.squares(point)) for own in anchors]
        fixed = [(own, inverse_of(squares)) for own, squares in measured]
        along, radial_mu, radial_nu = _radial(lengths, options, adam, point, gradient, pairs, past, faint)
        across = _above_rounding(without_lengths(fixed, point, gradient, pairs), gradient, faint)
        old_mu, old_nu = leaves_by_path(state.mu), leaves_by_path(state.nu)
        heads, frames, old_mu, old_nu = refreshed(on, point, back, past.heads, old_mu, old_nu, options)
        across, own = in_bases(on, frames, across), matrices(params)
        muon = adam if polar is None else Adam.at(options._replace(b1=polar.options.beta), adam.count)
        mu = {p: (muon if p in own else adam).first(across[p], m) for p, m in old_mu.items()}
        mean = {p: (muon if p in own else adam).mean(m, across[p]) for p, m in mu.items()}
        step, nu, heads = divided(on, heads, frames.live, options, adam, mean, across, old_nu)
        if polar is not None:
            step |= polar_steps(polar.options, own, mean)
        step = in_bases(on, frames, step, back=True)
        step = centred(on, turning_removed(on, point, without_lengths(fixed, point, step), back))
        step |= {p: step[p] + x for p, x in along.items()}
        vertical = past.vertical
        if options.vertical != "frozen":
            slopes = on.joint.vectors(updates)
            down, vertical = vertical_step(on, options.vertical, adam, point, slopes, vertical)
            step |= {p: step[p] + x for p, x in down.items()}
        new = GaugeMoments(radial_mu, radial_nu, past.least, heads, vertical)
        return _like(updates, step), ScaleByDDCState(adam.count, _like(state.mu, mu), _like(state.nu, nu), new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _above_rounding(left: Arrays, whole: Arrays, faint: jax.Array | None) -> Arrays:
    """What is left of a gradient, zero where it is what taking the rest away rounds: Adam would make a step of it.

    And zero where the whole is faint. Entry by entry, in the basis in which heads lie.
    """

    def kept(x: jax.Array, own: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        size = jnp.abs(own)
        known = [jnp.abs(x) <= noise(x.dtype) * size] if x is not own else []
        known += [] if faint is None else [size < faint]  # NaN is not
        return jax.lax.select(functools.reduce(jnp.logical_or, known), jnp.zeros_like(x), x) if known else x

    return {p: kept(x, whole[p]) for p, x in left.items()}


def _radial(
    channels: Sequence[Measured],
    options: Options,
    adam: Adam,
    point: Arrays,
    gradient: Arrays,
    pairs: Mapping[str, Pair],
    past: GaugeMoments,
    faint: jax.Array | None,
) -> tuple[Arrays, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Adam on the length of every channel: a tangent, and the new moments."""
    out: Arrays = {}
    mus, nus = [], []
    for (own, squares), mu, nu, least in zip(channels, past.radial_mu, past.radial_nu, past.least, strict=True):
        length = jnp.sqrt(squares)
        unit = jnp.maximum(length, _LEAST * jnp.mean(length)) if options.radial == "linear" else jnp.ones_like(length)
        inverse = inverse_of(unit)
        slope = own.dot(point, gradient, pairs, ())
        if faint is not None:
            slope = jnp.where(jnp.abs(slope) < own.entries**0.5 * faint * length, 0.0, slope)
        slope = slope * inverse
        mu, nu = adam.first(slope, mu), adam.second(jnp.square(slope), nu)
        move = jnp.where(length < least, -_REGROWTH, adam.mean(mu, slope) / adam.root(nu))
        size = own.entries**0.5 if options.radial == "linear" else own.reading.log_step
        rates = options.radial_scale * size * move * inverse
        for path, x in own.times(point, rates).items():
            out[path] = out[path] + x if path in out else x
        mus.append(mu)
        nus.append(nu)
    return out, tuple(mus), tuple(nus)


def _check(on: Chart, params: optax.Params) -> None:
    """Raises ValueError where GL(d) is among the gauges, whose anchors have no length, and of complex leaves."""
    if on.joint.linear:
        first = on.joint.linear[0]
        raise binding_error(
            "scale_by_ddc", f"{first.gauge} on '{first.paths[0]}'", "a linear gauge in the list of DDC",
            "shifts, scales, rotations, tori and rope_linear",
            "write go.quotient_adamw or go.quotient_muon, which take the whole list, or put go.head_rotation in its "
            "place",
        )  # fmt: skip
    for path, leaf in leaves_by_path(params).items():
        if jnp.iscomplexobj(leaf):
            raise binding_error(
                "scale_by_ddc", f"a complex leaf '{path}'", f"{leaf.dtype}", "real leaves",
                "mask it with optax.masked, or write go.quotient(optax.adamw(...)), which leaves it to Optax",
            )  # fmt: skip


def _like(tree: Any, leaves: Mapping[str, jax.Array]) -> Any:
    own = leaves_by_path(tree)
    return with_leaves(tree, {p: x.astype(own[p].dtype) for p, x in leaves.items()})
