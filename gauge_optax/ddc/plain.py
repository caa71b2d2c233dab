"""DDC's Adam and Muon in slice coordinates: ordinary inner transformations that follow the paper's appendix B.

DDC is the paper *Dead-Direction Conditioners*; numbers such as B.4 name its sections. *Vertical* motion is along the
orbit and changes no output; the other part of a motion is *horizontal*. A scale gauge multiplies each channel of one
block, the anchor, and divides the same channel of another block. On the slice, each channel of the anchor has a
constant size. The channel's entries in the other block (a unit's outgoing weights, or a row of a kernel behind a norm)
form a vector with a *length* s and a *direction*. A step has two parts, which are added:

* radial: one Adam per channel on s, or on log s (B.4);
* tangential: Adam entry by entry on the part of the gradient that changes no length (B.5). Heads get one of five kinds
  of second moments (B.8, `ddc.heads`). Under Muon, a matrix gets the polar factor of its first moment (B.10, `polar`).

All weights of one function (twins) have the same slice point, so that their moments are the same numbers, and no gauge
has to move a moment.

Deviations from appendix B: a length moves by up to lr·√n, where n is the number of entries of its vector, because Adam
can change the norm of n entries by that much. If several kernels read a norm, each has lengths of its own. In a chain
of layers all lengths but the last belong to anchors, which are constant, so that one radial part remains (B.6). Radial
steps are not clamped (B.7). docs/design.md §4 has a table.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import Block, leaves_by_path, overlap, with_leaves
from gauge_optax.ddc.heads import V_MODES, Adam, HeadMoments, divided, in_bases, init_heads, refreshed
from gauge_optax.ddc.vertical import (
    VERTICAL,
    VerticalMoments,
    has_orbit_coordinates,
    init_vertical,
    log_step,
    vertical_step,
)
from gauge_optax.errors import binding_error
from gauge_optax.gauges.bound import bound
from gauge_optax.gauges.gauge import Product
from gauge_optax.linalg import direction_tolerance, root_mean_square, safe_divide
from gauge_optax.optimizers.muon import polar_rules
from gauge_optax.optimizers.polar import Polar
from gauge_optax.parts.matrices import COUNTING, Reading, within
from gauge_optax.parts.part import Anchor, Arrays, Part, name_of
from gauge_optax.parts.sizes import Factor, Stretch
from gauge_optax.slice import Slice
from gauge_optax.transformation import (
    GaugeTransformation,
    LeafRule,
    at_once,
    cast_like,
    layout,
    placeholder,
    require_choice,
    require_every,
    require_moments,
    require_number,
    transformation,
    updates_at,
    zeros_like,
)

Scalar = float | jax.Array
RADIAL = ("linear", "log")
# Steps are divided by the length, or by this share of the mean length in the layer if that is larger, so that the step
# of a channel that is nearly zero stays finite.
_LEAST_SHARE = 1e-3
# A length below its floor grows in each step by this many times Adam's usual largest step. With a factor above 1, decay
# cannot undo the growth.
_REGROWTH = 4.0
# Argument → the interval in which it must be, and its usual value.
_NUMBERS = {"radial_scale": ("[0, inf)", 1.0), "scale_floor": ("[0, inf)", 0.0), "live_threshold": ("[0, inf]", 1e-3),
            "refresh_drift": ("[0, inf]", 0.1)}


class Options(NamedTuple):
    """The arguments of `scale_by_ddc` without the gauges, and one more field, `paper`."""

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
    live_threshold: Scalar = 1e-3
    refresh_drift: Scalar = 0.1
    refresh_every: int | jax.Array | None = None
    paper: bool = False  # True: second moments of heads follow B.8 to the letter, see `ddc.heads`


def checked_options(name: str, *settings: Any) -> Options:
    """Returns settings, given in the order of `Options`. Raises ValueError for unknown modes and bad numbers."""
    options = Options(*settings)
    require_moments(name, b1=options.b1, b2=options.b2, eps=options.eps, eps_root=options.eps_root)
    require_choice(name, "vertical", options.vertical, VERTICAL)
    require_choice(name, "v_mode", options.v_mode, V_MODES)
    require_choice(name, "radial", options.radial, RADIAL)
    for argument, (interval, usual) in _NUMBERS.items():
        require_number(name, argument, getattr(options, argument), interval, f"write {argument}={usual}")
    if options.refresh_every is not None:
        require_every(name, options.refresh_every, "refresh_every")
    return options


class GaugeMoments(NamedTuple):
    """The moments that DDC keeps per channel, head or orbit coordinate; they are much smaller than the parameters.

    Attributes:
      radial_mu: first moments of the derivatives by s (or log s): one array per block with lengths, with a number per
        channel.
      radial_nu: second moments of the same derivatives, in the same form; under Muon the roots of second moments.
      least: per block with lengths, the floor below which a length is made to grow.
      heads: the state of heads, which depends on `v_mode`.
      vertical: moments of the coordinates along orbits, see `ddc.vertical`.
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
      mu: first moment, shaped like the parameters; heads are in the bases that `heads.Bases` describes.
      nu: second moment, in the same form; `optax.MaskedNode` in place of leaves that are stepped by polar factors.
      gauges: a `GaugeMoments`.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates
    nu: optax.Updates
    gauges: Any


def ddc(group: Product, options: Options, polar: Polar | None = None) -> GaugeTransformation:
    """DDC's Adam for slice gradients at slice points; with `polar`, DDC's Muon.

    Args:
      group: the gauges.
      options: the settings.
      polar: settings of the polar factors; None for Adam everywhere.

    Returns:
      A transformation of gradients into a tangent, which is horizontal if `options.vertical` is "frozen"; leaves that
      no gauge binds get Adam.
    """

    def update(updates: Any, state: ScaleByDDCState, params: Any, **extra: Any) -> tuple[Any, ScaleByDDCState]:
        s, past = bound(group.gauges, params).slice, state.gauges
        adam = Adam.at(options, optax.safe_increment(state.count))
        gradient = updates_at("scale_by_ddc", leaves_by_path(params), updates, params) | s.vectors(updates)
        point = s.vectors(params)

        # B.4: the derivative by a length s is ⟨θ̂, ĝ⟩/s, summed over the entries whose norm s is.
        matrices = polar_matrices(s, polar, params)
        carriers, anchors = channels_with_length(s, matrices), channels_of_anchors(s)
        squares = [channels.dot(point, point) for channels in carriers]
        pairings = [channels.dot(point, gradient) for channels in carriers]
        along, radial_mu, radial_nu = radial_step(
            options, adam, carriers, point, squares, pairings, past, polar is not None
        )

        # B.5: the rest of the gradient changes only directions.
        sized = [*zip(carriers, squares, strict=True), *((c, c.dot(point, point)) for c in anchors)]
        across = without_lengths(sized, point, gradient)
        across = {p: without_roundoff(x, gradient[p]) for p, x in across.items()}
        step, mu, nu, heads = tangential_step(s, options, adam, polar, matrices, point, across, state)
        step = without_lengths(sized, point, step)
        step = s.centred(s.project_turning(point, step))

        step |= {p: step[p] + x for p, x in along.items()}
        vertical = past.vertical
        if options.vertical != "frozen":
            along_orbit, vertical = vertical_step(s, options.vertical, adam, point, s.vectors(updates), vertical)
            step |= {p: step[p] + x for p, x in along_orbit.items()}
        moments = GaugeMoments(radial_mu, radial_nu, past.least, heads, vertical)
        mu, nu = (with_leaves(tree, cast_like(new, tree)) for tree, new in ((state.mu, mu), (state.nu, nu)))
        return with_leaves(updates, cast_like(step, updates, params)), ScaleByDDCState(adam.count, mu, nu, moments)

    def empty(params: Any) -> ScaleByDDCState:
        return ScaleByDDCState(jnp.int32(0), zeros_like(params, options.mu_dtype), zeros_like(params), placeholder())

    def init(params: optax.Params) -> ScaleByDDCState:
        return init_ddc(group, options, polar, params)

    def rules(params: Any) -> dict[str, LeafRule]:
        return polar_rules(leaves_by_path(params), polar_matrices(bound(group.gauges, params).slice, polar, params))

    return transformation("scale_by_ddc", init, update, ScaleByDDCState, empty, gauges=group.gauges, rules=rules)


def init_ddc(group: Product, options: Options, polar: Polar | None, params: optax.Params) -> ScaleByDDCState:
    """Returns the state of `ddc` at the slice point `params`. Raises ValueError for what `check_ddc` refuses."""
    s = bound(group.gauges, params).slice
    check_ddc(s, options, params)

    def moments(params: optax.Params) -> GaugeMoments:
        leaves = leaves_by_path(params)
        bound = {path: leaves[path] for path in s.added}
        carriers = tuple(channels_with_length(s, matrices))
        return at_once(_init_moments, (s, options.v_mode, options.vertical, carriers), options.scale_floor, bound)

    matrices = polar_matrices(s, polar, params)
    hidden = dict.fromkeys(matrices, optax.MaskedNode())
    mu, nu = zeros_like(params, options.mu_dtype), with_leaves(zeros_like(params), hidden)
    return ScaleByDDCState(jnp.zeros((), jnp.int32), mu, nu, layout(params).run(moments, params))


def _init_moments(
    s: Slice, v_mode: str, vertical: str, carriers: "Sequence[Channels]", scale_floor: Scalar, bound: Any
) -> GaugeMoments:
    point = s.vectors(bound)
    lengths = [jnp.sqrt(channels.dot(point, point)) for channels in carriers]
    mus, nus = (tuple(jnp.zeros_like(length) for length in lengths) for _ in range(2))
    pairs = zip(carriers, lengths, strict=True)
    least = tuple(scale_floor * channels.in_layer(jnp.mean, length) for channels, length in pairs)
    return GaugeMoments(mus, nus, least, init_heads(s, point, v_mode), init_vertical(s, vertical, point))


def polar_matrices(s: Slice, polar: Polar | None, params: Any) -> dict[str, Reading]:
    """Returns leaf path → which matrices it holds, for leaves stepped by polar factors; {} if `polar` is None."""
    return {} if polar is None else polar.matrices(s, params)


# Lengths ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Channels:
    """Blocks of one scale; the entries of a channel in all of them form one vector, which has one length.

    Attributes:
      part: the scale.
      blocks: the blocks.
    """

    part: Any
    blocks: tuple[Block, ...]

    @property
    def entries(self) -> int:
        """The number of entries of one channel's vector."""
        return sum(block.entries(self.part.named) for block in self.blocks)

    def dot(self, a: Arrays, b: Arrays) -> jax.Array:
        """Returns the inner product ⟨a, b⟩ of every channel's vectors, shaped like the scale's named axes."""
        totals = [block.total(self.part.named, a[block.path] * b[block.path]) for block in self.blocks]
        return sum(totals[1:], totals[0])

    def in_layer(self, reduce: Callable[..., jax.Array], lengths: jax.Array) -> jax.Array:
        """Returns the mean or maximum of the lengths in each layer or expert. The result broadcasts to `lengths`."""
        axes = tuple(k for k, name in enumerate(self.part.named) if name not in COUNTING)
        return reduce(lengths, axis=axes, keepdims=len(axes) < lengths.ndim)

    def times(self, point: Arrays, rates: jax.Array) -> Arrays:
        """Returns path → leaf: every entry of the blocks times its channel's rate, and zero for all other entries."""
        out: Arrays = {}
        for block in self.blocks:
            part = point[block.path] * block.spread(self.part.named, rates)
            out[block.path] = out[block.path] + part if block.path in out else part
        return out


@functools.singledispatch
def has_lengths(part: Part[Any]) -> bool:
    """Whether a part is a scale: it multiplies the entries of each channel, and so changes the channel's lengths."""
    return False


@has_lengths.register
def _factor_has_lengths(part: Factor) -> bool:
    return True


@functools.singledispatch
def partner(part: Part[Any], anchor: Anchor) -> tuple[Block, ...]:
    """The blocks `down` of a scale whose anchor is in `up`: their channels have lengths. () for other parts or anchors.
    """
    return ()


@partner.register
def _partner_of_factor(part: Factor, anchor: Anchor) -> tuple[Block, ...]:
    return part.down if anchor[0] in part.up else ()


def channels_with_length(s: Slice, matrices: Mapping[str, Reading]) -> list[Channels]:
    """Returns a `Channels` per block opposite to an anchor, or per range of it if Muon steps a fused kernel by ranges.
    """
    # The norm of a whole block is constant on the slice if the block is the anchor of another gauge without named axes.
    # A gauge without named axes then has no length to step in this block.
    whole = [anchor[0] for part, anchor, _ in s.sizes if not part.named and len(anchor) == 1]
    channels = []
    for part, anchor, _ in s.sizes:
        for block in partner(part, anchor):
            if part.named or not any(overlap(block, other) for other in whole):
                ranges = within(block, matrices[block.path]) if block.path in matrices else (block,)
                channels += [Channels(part, (own,)) for own in ranges]
    return channels


def channels_of_anchors(s: Slice) -> list[Channels]:
    """Returns the anchors of scales, whose lengths are constant on the slice."""
    return [Channels(part, anchor) for part, anchor, _ in s.sizes if has_lengths(part)]


def inverse_of(x: jax.Array) -> jax.Array:
    """Returns 1/x, and 0 where 1/x would be infinite."""
    least = float(jnp.finfo(x.dtype).tiny)
    return jax.lax.select(x < least, jnp.zeros_like(x), 1.0 / jnp.maximum(x, least))


def radial_step(
    options: Options,
    adam: Adam,
    channels: Sequence[Channels],
    point: Arrays,
    squares: Sequence[jax.Array],
    pairings: Sequence[jax.Array],
    past: GaugeMoments,
    muon: bool,
) -> tuple[Arrays, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Steps the length of every channel by Adam.

    Args:
      options: the settings.
      adam: the hyperparameters of this step.
      channels: blocks that have lengths.
      point: bound leaves of the slice point.
      squares: per item of `channels`, the squared length of every channel.
      pairings: per item of `channels`, ⟨θ̂, ĝ⟩ along every channel.
      past: moments so far.
      muon: True if matrices are stepped by polar factors, whose steps do not depend on the size of gradients. The steps
        of lengths are then made independent of this size too: `radial_nu` has roots of second moments, which do not
        underflow, and eps is multiplied by the largest root.

    Returns:
      A tangent along the lengths, and both new moments.
    """
    out: Arrays = {}
    mus, nus = [], []
    linear = options.radial == "linear"
    moments = zip(past.radial_mu, past.radial_nu, past.least, strict=True)
    for each, square, pairing, (mu, nu, least) in zip(channels, squares, pairings, moments, strict=True):
        length = jnp.sqrt(square)
        # The derivative by a length s is ⟨θ̂, ĝ⟩/s, and the step is along θ̂/s. Both factors 1/s are bounded, so that
        # steps stay finite for channels that are nearly zero.
        unit = jnp.maximum(length, _LEAST_SHARE * each.in_layer(jnp.mean, length)) if linear else jnp.ones_like(length)
        inverse = inverse_of(unit)
        derivative = pairing * inverse
        mu = adam.first(derivative, mu)
        if muon:
            nu = root_mean_square(adam.b2, nu, jnp.abs(derivative))
            root = adam.without_bias(nu)
            move = safe_divide(adam.mean(mu, derivative), root + adam.eps * each.in_layer(jnp.max, root))
        else:
            nu = adam.second(jnp.square(derivative), nu)
            move = adam.mean(mu, derivative) / adam.root(nu)
        move = jnp.where(length < least, -_REGROWTH, move)
        size = each.entries**0.5 if linear else log_step(each.part)
        rates = options.radial_scale * size * move * inverse
        for path, x in each.times(point, rates).items():
            out[path] = out[path] + x if path in out else x
        mus.append(mu)
        nus.append(nu)
    return out, tuple(mus), tuple(nus)


def without_lengths(sized: Sequence[tuple[Channels, jax.Array]], point: Arrays, vector: Arrays) -> Arrays:
    """Removes the part of a vector that changes lengths.

    Args:
      sized: pairs of channels and their squared lengths. The part is removed for one pair after the other.
      point: bound leaves of the slice point.
      vector: bound leaves of a slice gradient or tangent.
    """
    out = dict(vector)
    for channels, square in sized:
        rates = channels.dot(point, out) * inverse_of(square)
        out |= {p: out[p] - x for p, x in channels.times(point, rates).items()}
    return out


# Directions ---------------------------------------------------------------------------------------------


def without_roundoff(rest: jax.Array, whole: jax.Array) -> jax.Array:
    """Sets entries of a gradient to zero that are only roundoff of a subtraction. Adam would turn them into full steps.

    Args:
      rest: a leaf's gradient after a part of it was subtracted.
      whole: the leaf's gradient before.
    """
    if rest is whole:
        return rest
    return jax.lax.select(jnp.abs(rest) <= direction_tolerance(rest.dtype) * jnp.abs(whole), jnp.zeros_like(rest), rest)


def tangential_step(
    s: Slice,
    options: Options,
    adam: Adam,
    polar: Polar | None,
    matrices: Mapping[str, Reading],
    point: Arrays,
    across: Arrays,
    state: ScaleByDDCState,
    into: Mapping[Any, jax.Array] | None = None,
    before_polar: Callable[[Arrays], Arrays] | None = None,
) -> tuple[Arrays, Arrays, Arrays, HeadMoments]:
    """Computes the step of directions: Adam's quotient of moments; for matrices, the polar factor of the first moment.

    Args:
      s: the slice.
      options: the settings.
      adam: the hyperparameters of this step.
      polar: settings of the polar factors; None for Adam everywhere.
      matrices: leaf path → which matrices it holds, see `polar_matrices`.
      point: bound leaves of the slice point.
      across: all leaves of the gradient, without the part that changes lengths.
      state: the state so far.
      into: turn of heads → the matrices that map its rows in `point` to the slice; None if they are on the slice.
      before_polar: a function that changes first moments before their polar factors are computed; by default none.

    Returns:
      The step, the new first and second moments, and the new state of heads.
    """
    mu, nu = leaves_by_path(state.mu), leaves_by_path(state.nu)
    heads, bases, mu, nu = refreshed(s, point, into, state.gauges.heads, mu, nu, options)
    across = in_bases(bases, across)
    muon = adam if polar is None else Adam.at(options._replace(b1=polar.beta), adam.count)
    rule: Callable[[str], Adam] = lambda path: muon if path in matrices else adam  # noqa: E731
    mu = {p: rule(p).first(across[p], m) for p, m in mu.items()}
    mean = {p: rule(p).mean(m, across[p]) for p, m in mu.items()}
    step, nu, heads = divided(s, heads, bases.live, options, adam, mean, across, nu)
    if polar is not None:
        step |= polar.steps(matrices, mean if before_polar is None else before_polar(mean))
    return in_bases(bases, step, back=True), mu, nu, heads


@functools.singledispatch
def can_step(part: Part[Any]) -> bool:
    """Whether DDC has a rule for the leaves of a part. It has none for GL(d), which keeps neither lengths nor bases."""
    return True


@can_step.register
def _cannot_step_matrices(part: Stretch) -> bool:
    return False


def check_ddc(s: Slice, options: Options, params: optax.Params) -> None:
    """Raises ValueError for what DDC has no rule for: complex leaves, and gauges of all invertible matrices, GL(d).

    Unless `options.vertical` is "frozen", it also raises for gauges along whose orbit `vertical_step` cannot step:
    `residual_rotation`, rotations of heads that share entries, `embedding_shift`, `bias_absorption`, `norm_read_shift`,
    and gauges that a user defined.

    Args:
      s: the slice.
      options: the settings.
      params: the parameters.
    """
    for part in s.parts:
        if not has_orbit_coordinates(part) and options.vertical != "frozen":
            raise binding_error(
                "scale_by_ddc", f"vertical={options.vertical!r} with the gauge {name_of(part)}",
                "a gauge without orbit coordinates to step",
                "scales, rotations that share no entry, tori, rope_linear, permutations, and shifts of single leaves",
                'write vertical="frozen", or leave this gauge out of the list',
            )
        if not can_step(part):
            raise binding_error(
                "scale_by_ddc", f"{name_of(part)} on '{part.blocks[0].path}'",
                "a linear gauge in the list of DDC", "shifts, scales, rotations, tori and rope_linear",
                "write go.quotient_adamw or go.quotient_muon, which take the whole list, or put go.head_rotation in "
                "its place, as report.turning has it",
            )
    for path, leaf in leaves_by_path(params).items():
        if jnp.iscomplexobj(leaf):
            raise binding_error(
                "scale_by_ddc", f"a complex leaf '{path}'", f"{jnp.result_type(leaf)}", "real leaves",
                "mask it with optax.masked, or write go.quotient(optax.adamw(...)), which leaves it to Optax",
            )
