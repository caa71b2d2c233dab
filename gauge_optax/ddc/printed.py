"""`preset="paper"`: appendix B of *Dead-Direction Conditioners* to the letter, as an ordinary inner transformation.

`ddc.plain` is the library's own version of DDC, which trains better (examples/results/starts.json). This module follows
the paper's text, for comparison with its figures. A scale gauge joins *tensors* with norms ρ₁, ρ₂, … per channel: the
two sides of a rescale, a norm's scale and the kernels that read it, or all layers of a chain of rescales of whole
tensors. The product s = Π ρᵢ^eᵢ does not change along the orbit. Its exponents are e = (p, 1) for the two sides of a
gauge of degree p, and (1, …, 1) for a chain of gauges of degree 1; |e| is the norm of the vector e. A step has these
parts:

* radial (B.4, B.6, B.7): one scalar Adam on s, or on log s / |e|. The step of log s is clamped, and each log ρᵢ moves
  by eᵢ/|e|² times this step. Decay acts here, as a factor exp(−|e|²·lr·wd) of s;
* tangential (B.4, B.5): Adam entry by entry on ρ·g without its radial part, where g is the gradient and ρ the norm of
  the entry's channel. The step is proportional to ρ: −lr·ρ·U, where U is Adam's result;
* heads (B.8, B.9): the gradient loses its part along rotations. Its first moment is divided by the root of its second
  moment, which is of the kind `v_mode` (`ddc.heads`). If the eigenbasis rotates by R, second moments move by the matrix
  of absolute values |Rᵢⱼ|. In directions that are not live (`ddc.heads`), the step is the first moment itself;
* matrices under Muon (B.10): the polar factor of the horizontal first moment M, times ‖M‖_F/√rank.

The step is taken in the coordinates F⁻¹·θ, with the frame F that was read at `init` (`ddc.links.link`). If two gauges
share a leaf, ρ of an entry is the geometric mean of the norms of both channels that contain it. Nothing moves back to
the slice: the norms stay where the step leaves them. Two numbers that the paper does not give are arguments:
`max_log_step`, the bound of the step of log s, and `scale_floor`, the floor of s as a share of the value
s* = 1/(|e|²·wd) at which decay and Adam's largest step balance.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import Block, leaves_by_path, overlap, with_leaves
from gauge_optax.ddc.heads import Adam, init_heads
from gauge_optax.ddc.plain import (
    Channels,
    GaugeMoments,
    Options,
    ScaleByDDCState,
    check_ddc,
    inverse_of,
    polar_matrices,
    tangential_step,
    without_lengths,
    without_roundoff,
)
from gauge_optax.ddc.vertical import init_vertical
from gauge_optax.errors import binding_error
from gauge_optax.gauges.bound import bound
from gauge_optax.gauges.gauge import Product
from gauge_optax.optimizers.muon import polar_rules
from gauge_optax.optimizers.polar import Polar
from gauge_optax.parts.heads import PLANE
from gauge_optax.parts.part import Arrays, Part
from gauge_optax.parts.sizes import Factor
from gauge_optax.slice import Slice
from gauge_optax.transformation import (
    GaugeTransformation,
    LeafRule,
    cast_like,
    layout,
    placeholder,
    require_choice,
    require_number,
    transformation,
    zeros_like,
)

Scalar = float | jax.Array
_RESET_EVERY = 1000  # eigenbases are computed anew at least every so many steps; the paper's text gives no number
_MAX_LOG_STEP = 0.5


class PaperOptions(NamedTuple):
    """The settings of appendix B that `Options` does not have.

    Attributes:
      learning_rate: a number or a schedule. With None, the result is no step, but a direction that a later link
        multiplies by −rate: minus the derivative of the step by the rate, at the rate 0 and without decay.
      weight_decay: decoupled decay, multiplied by the rate; a number or a schedule. For leaves that a scale gauge binds
        it shrinks s; for all other leaves it shrinks the entries.
      matrix_rate: the learning rate of matrices under Muon.
      matrix_decay: the decay of these matrices.
      max_log_step: the largest change of log s in a step with radial="linear".
      scale_floor: with radial="linear", the derivative by s has a factor 1/s. If s is smaller than this share of s*,
        the factor is one over that share of s* instead. `ddc/printed.py` defines s and s*.
    """

    learning_rate: Any
    weight_decay: Any
    matrix_rate: Any = None
    matrix_decay: Any = 0.0
    max_log_step: Scalar = _MAX_LOG_STEP
    scale_floor: Scalar = 1e-3


def paper_options(
    name: str,
    preset: str,
    options: Options,
    weight_decay: Any,
    mask: Any = None,
    rest: str = "anchor",
    match: str = "adamw",
    max_log_step: Scalar = _MAX_LOG_STEP,
) -> Options:
    """Returns the settings under a preset.

    Raises ValueError for an unknown preset, and for arguments that appendix B does not have.

    Args:
      name: name of the transformation, for messages.
      preset: "paper".
      options: the settings without the preset.
      weight_decay: the decay of the optimizer; None for a link, which is given no decay and so has no floor of s.
      mask: the mask of this decay.
      rest: as in `quotient`.
      match: as in `add_gauge_decay`.
      max_log_step: see `PaperOptions`.
    """
    require_choice(name, "preset", preset, ("paper",))
    without_floor = weight_decay is None or options.radial == "log"
    given = {
        f"vertical={options.vertical!r}": options.vertical != "frozen",
        "a mask of the decay": mask is not None,
        f"rest={rest!r}": rest != "anchor",
        f"weight_decay={weight_decay!r}": isinstance(weight_decay, Mapping),
        f"match={match!r}": match != "adamw",
        f"radial_scale={options.radial_scale!r}": _is_another(options.radial_scale, 1.0),
        f"scale_floor={options.scale_floor!r}": without_floor and _is_another(options.scale_floor, 0.0),
        f"max_log_step={max_log_step!r}": options.radial == "log" and _is_another(max_log_step, _MAX_LOG_STEP),
    }
    for refused in (argument for argument, is_given in given.items() if is_given):
        raise binding_error(
            name, "an argument that preset='paper' does not take", refused,
            "vertical='frozen', rest='anchor', match='adamw', radial_scale=1.0, no mask, and a number or a schedule as "
            "weight_decay; scale_floor and max_log_step only in a whole optimizer with radial='linear'",
            "drop the preset, or this",
        )
    require_number(name, "max_log_step", max_log_step, "(0, inf]", f"write max_log_step={_MAX_LOG_STEP}")
    every = _RESET_EVERY if options.refresh_every is None else options.refresh_every
    return options._replace(paper=True, refresh_every=every)


def require_no_clamp(name: str, max_log_step: Scalar) -> None:
    """Raises ValueError for a `max_log_step` that is given without the preset: it bounds only steps of the preset."""
    if _is_another(max_log_step, _MAX_LOG_STEP):
        raise binding_error(
            name, "max_log_step without preset='paper'", f"max_log_step={max_log_step!r}",
            "no bound: without the preset, steps of lengths have none", "write preset='paper', or drop this",
        )


def _is_another(value: Any, default: float) -> bool:
    """Whether a number is not its default. False for a tracer, as `inject_hyperparams` makes one of every number."""
    return not isinstance(value, jax.core.Tracer) and bool(np.any(np.asarray(value) != default))


@dataclasses.dataclass(frozen=True)
class Tensors:
    """Tensors that scale gauges join: a product of powers of their norms does not change along the orbit.

    Attributes:
      channels: one item per tensor: the tensor's blocks, with lengths per channel.
      exponents: e, a number per tensor.
      frozen: True if there is only one tensor, whose length is not stepped (a scale-invariant kernel).
    """

    channels: tuple[Channels, ...]
    exponents: tuple[float, ...]
    frozen: bool = False

    @property
    def square(self) -> float:
        """|e|²."""
        return sum(e * e for e in self.exponents)


@functools.singledispatch
def joined_sides(part: Part[Any]) -> tuple[tuple[Block, ...], ...]:
    """The tensors that appendix B joins by a product of powers of their norms; () for a part without such a rule.

    A scale with two sides does not change this product. A scale with one side (a scale-invariant kernel)
    has no such product, and the length of its one tensor is not stepped. The planes of rotary heads have no lengths in
    the paper.
    """
    return ()


@joined_sides.register
def _joined_by_factor(part: Factor) -> tuple[tuple[Block, ...], ...]:
    if PLANE in part.named:
        return ()
    return (part.up, part.down) if part.down else (part.blocks,)


def joined_tensors(s: Slice) -> list[Tensors]:
    """Returns one `Tensors` for each scale with two sides and named axes (a pair), for each chain of scales without
    named axes, and for each scale with one side (a single tensor).
    """
    joined = {i: joined_sides(i) for i in s.parts}
    pairs = {i: sides for i, sides in joined.items() if len(sides) == 2}
    tensors: list[Tensors] = []
    whole = [i for i in pairs if not i.named]
    while whole:
        # A chain begins with a gauge whose first side is the second side of no other gauge.
        chain = [next(i for i in whole if not any(_meet(pairs[i][0], pairs[j][1]) for j in whole if j is not i))]
        while later := [i for i in whole if i not in chain and _meet(pairs[chain[-1]][1], pairs[i][0])]:
            chain.append(later[0])
        sides = [(chain[0], pairs[chain[0]][0]), *((i, pairs[i][1]) for i in chain)]
        degrees = [i.degree for i in chain]
        exponents = tuple(math.prod(degrees[k:]) for k in range(len(sides)))
        tensors.append(Tensors(tuple(Channels(i, side) for i, side in sides), exponents))
        whole = [i for i in whole if i not in chain]
    for i in (i for i in pairs if i.named):
        tensors.append(Tensors(tuple(Channels(i, side) for side in pairs[i]), (float(i.degree), 1.0)))
    single = {i: sides[0] for i, sides in joined.items() if len(sides) == 1}
    tensors += [Tensors((Channels(i, side),), (1.0,), frozen=True) for i, side in single.items()]
    return tensors


def _meet(side: Sequence[Block], other: Sequence[Block]) -> bool:
    return any(overlap(a, b) for a in side for b in other)


def paper_ddc(
    group: Product, options: Options, paper: PaperOptions, polar: Polar | None = None
) -> GaugeTransformation:
    """Appendix B as a transformation of gradients into steps, in the coordinates of `link`.

    Args:
      group: the gauges.
      options: the settings of `ddc`, with paper=True.
      paper: the paper's further settings. If their learning rate is None, the result is a direction, not a step.
      polar: settings of the polar factors; None for Adam everywhere.
    """

    def update(updates: Any, state: ScaleByDDCState, params: Any, **extra: Any) -> tuple[Any, ScaleByDDCState]:
        s, past = bound(group.gauges, params).slice, state.gauges
        adam = Adam.at(options, optax.safe_increment(state.count))
        point, gradient = s.vectors(params), leaves_by_path(updates) | s.vectors(updates)
        gradient = s.project_turning(point, gradient)  # B.8, B.9
        for turn in s.heads:  # not in the paper: the gradient of a key bias is only roundoff, and is set to zero
            gradient = turn.quiet(gradient)
        now = PaperOptions(*(x(state.count) if callable(x) else x for x in paper))
        rate, matrix_rate = now.learning_rate, now.matrix_rate

        tensors = joined_tensors(s)
        sized = [(c, c.dot(point, point)) for t in tensors for c in t.channels]
        across = without_lengths(sized, point, gradient)
        across = {path: without_roundoff(x, gradient[path]) for path, x in across.items()}

        matrices = polar_matrices(s, polar, params)
        sizes = _sizes(sized, point)
        scaled = sizes.keys() - matrices.keys()
        relative = {path: x * sizes[path] if path in scaled else x for path, x in across.items()}
        step, mu, nu, heads = tangential_step(
            s, options, adam, polar, matrices, point, relative, state,
            before_polar=lambda mean: s.project_turning(point, mean),
        )
        # The parts along lengths, constants and rotations are removed again from Adam's steps. From polar factors, only
        # the part along lengths is removed.
        step = without_lengths(sized, point, step)
        step = s.centred(s.project_turning(point, step)) | {path: step[path] for path in matrices}

        sign = 1.0 if rate is None else -rate
        values = s.centred(point) | {p: x for p, x in leaves_by_path(params).items() if p not in point}
        out: Arrays = {}
        for path, x in step.items():
            if path in matrices:
                factor = sign if matrix_rate is None else -matrix_rate
                out[path] = factor * (x + (0.0 if rate is None or path in sizes else now.matrix_decay) * values[path])
            elif path in sizes:
                out[path] = sign * sizes[path] * x
            else:
                out[path] = sign * (x + (0.0 if rate is None else now.weight_decay) * values[path])
        radial, radial_mu, radial_nu = _radial(tensors, options, now, adam, point, gradient, past)
        out |= {path: out[path] + x for path, x in radial.items()}
        moments = GaugeMoments(radial_mu, radial_nu, (), heads, past.vertical)
        mu, nu = (with_leaves(tree, cast_like(new, tree)) for tree, new in ((state.mu, mu), (state.nu, nu)))
        return with_leaves(updates, cast_like(out, updates, params)), ScaleByDDCState(adam.count, mu, nu, moments)

    def init(params: optax.Params) -> ScaleByDDCState:
        s = bound(group.gauges, params).slice
        check_ddc(s, options, params)

        def moments(params: optax.Params) -> GaugeMoments:
            point = s.vectors(params)
            squares = [t.channels[0].dot(point, point) for t in joined_tensors(s)]
            # `mu` and `nu` have separate buffers, because a buffer that occurs twice in a state cannot be donated.
            mu, nu = (tuple(jnp.zeros_like(square) for square in squares) for _ in range(2))
            heads = init_heads(s, point, options.v_mode, paper=True)
            return GaugeMoments(mu, nu, (), heads, init_vertical(s, "frozen", point))

        matrices = dict.fromkeys(polar_matrices(s, polar, params), optax.MaskedNode())
        mu, nu = zeros_like(params, options.mu_dtype), with_leaves(zeros_like(params), matrices)
        return ScaleByDDCState(jnp.zeros((), jnp.int32), mu, nu, layout(params).run(moments, params))

    def empty(params: Any) -> ScaleByDDCState:
        return ScaleByDDCState(jnp.int32(0), zeros_like(params, options.mu_dtype), zeros_like(params), placeholder())

    def rules(params: Any) -> dict[str, LeafRule]:
        return polar_rules(leaves_by_path(params), polar_matrices(bound(group.gauges, params).slice, polar, params))

    return transformation("scale_by_ddc", init, update, ScaleByDDCState, empty, gauges=group.gauges, rules=rules)


def _sizes(sized: Sequence[tuple[Channels, jax.Array]], point: Arrays) -> Arrays:
    """Returns leaf path → ρ per entry: the geometric mean of the norms of all channels that contain the entry."""
    logs: Arrays = {}
    counts: dict[str, jax.Array] = {}
    for channels, square in sized:
        length = jnp.sqrt(jnp.where(square > 0, square, 1.0))
        for block in channels.blocks:
            named, path = channels.part.named, block.path
            one = block.spread(named, jnp.ones_like(length)) * jnp.ones_like(point[path])
            log = block.spread(named, jnp.log(length)) * jnp.ones_like(point[path])
            logs[path], counts[path] = logs.get(path, 0.0) + log, counts.get(path, 0.0) + one
    return {path: jnp.exp(x / jnp.maximum(counts[path], 1.0)) for path, x in logs.items()}


def _radial(
    tensors: Sequence[Tensors],
    options: Options,
    paper: PaperOptions,
    adam: Adam,
    point: Arrays,
    gradient: Arrays,
    past: GaugeMoments,
) -> tuple[Arrays, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns the step of all lengths by B.4, B.6 and B.7, and both new moments."""
    out: Arrays = {}
    mus, nus = [], []
    for joined, mu, nu in zip(tensors, past.radial_mu, past.radial_nu, strict=True):
        if not joined.frozen:
            move, mu, nu = _log_step(joined, options, paper, adam, point, gradient, mu, nu)
            for channels, e in zip(joined.channels, joined.exponents, strict=True):
                share = move * e / joined.square
                change = share if paper.learning_rate is None else jnp.expm1(share)
                for path, x in channels.times(point, change).items():
                    out[path] = out[path] + x if path in out else x
        mus.append(mu)
        nus.append(nu)
    return out, tuple(mus), tuple(nus)


def _log_step(
    joined: Tensors,
    options: Options,
    paper: PaperOptions,
    adam: Adam,
    point: Arrays,
    gradient: Arrays,
    mu: jax.Array,
    nu: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the change of log s per channel, and both new moments.

    If the learning rate is None, the first result is minus its derivative by the rate, see `PaperOptions`.
    """
    e2, rate = joined.square, paper.learning_rate
    squares = [c.dot(point, point) for c in joined.channels]
    pairings = [e * c.dot(point, gradient) for c, e in zip(joined.channels, joined.exponents, strict=True)]
    pairing = sum(pairings[1:], pairings[0])
    logs = [0.5 * e * jnp.log(jnp.where(x > 0, x, 1.0)) for x, e in zip(squares, joined.exponents, strict=True)]
    alive = jnp.stack([x > 0 for x in squares]).all(0)
    s = jnp.where(alive, jnp.exp(sum(logs[1:], logs[0])), 0.0)
    linear = options.radial == "linear"
    if linear:
        decay = 0.0 if rate is None else paper.weight_decay
        floor = jnp.where(jnp.asarray(decay) > 0, paper.scale_floor / (e2 * jnp.maximum(decay, 1e-30)), 0.0)
        derivative = pairing / e2 * inverse_of(jnp.maximum(s, floor))
    else:
        derivative = pairing / e2**0.5
    mu, nu = adam.first(derivative, mu), adam.second(jnp.square(derivative), nu)
    step = adam.mean(mu, derivative) / adam.root(nu)
    if rate is None:
        move = step * inverse_of(s) if linear else e2**0.5 * step
    elif linear:
        after = s * jnp.exp(-e2 * rate * paper.weight_decay) - rate * step
        # B.7 has log(s_new) − log(s). The maximum keeps the logarithm finite where the step leads below zero.
        ratio = jnp.maximum(after * inverse_of(s), jnp.finfo(s.dtype).tiny)
        move = jnp.clip(jnp.log(ratio), -paper.max_log_step, paper.max_log_step)
    else:
        move = -rate * (e2**0.5 * step + e2 * paper.weight_decay)
    return jnp.where(alive, move, 0.0), mu, nu
