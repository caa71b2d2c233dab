"""One step's point of view: parameters in the frame, channel sizes, and Adam's scalars.

Here: what every part of DDC reads in a step. Not here: what it does with it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.gauges import _frame, _split
from gauge_optax.gauges._basis import grouped, stacked_gram
from gauge_optax.gauges._frame import FrameState
from gauge_optax.gauges._split import Bound, Point
from gauge_optax.gauges._system import ScaleSystem, Sides, Squares
from gauge_optax.gauges._tally import Overlap, overlap_of

Arrays = dict[str, jax.Array]
Scalar = float | jax.Array

_STEP_FLOOR = 0.1  # of the mean ρ of a gauge's channels at init


class Adam(NamedTuple):
    """Hyperparameters of one Adam step, possibly traced.

    Attributes:
      b1: decay of first moments.
      b2: decay of second moments.
      eps: added to the root.
      eps_root: added inside the root.
      step: the step's number, from 1.
      nesterov: whether to use Nesterov momentum.
    """

    b1: Scalar
    b2: Scalar
    eps: Scalar
    eps_root: Scalar
    step: jax.Array
    nesterov: bool

    def debias(self, moment: jax.Array, fresh: jax.Array, decay: Scalar) -> jax.Array:
        """The bias-corrected first moment."""
        if not self.nesterov:
            return moment / (1 - decay**self.step)
        ahead = decay * moment / (1 - decay ** (self.step + 1))
        return ahead + (1 - decay) * fresh / (1 - decay**self.step)

    def root(self, nu: jax.Array) -> jax.Array:
        """What a first moment is divided by."""
        return jnp.sqrt(self.unbiased_variance(nu) + self.eps_root) + self.eps

    def unbiased_variance(self, nu: jax.Array) -> jax.Array:
        """The bias-corrected second moment."""
        return nu / (1 - self.b2**self.step)

    def scalar(
        self,
        fresh: jax.Array,
        mu: jax.Array,
        nu: jax.Array,
        variance_of: Callable[[jax.Array], jax.Array] = jnp.square,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One step of Adam on gauge coordinates: step, first moment, second moment."""
        mu = self.b1 * mu + (1 - self.b1) * fresh
        nu = self.b2 * nu + (1 - self.b2) * variance_of(fresh)
        return self.debias(mu, fresh, self.b1) / self.root(nu), mu, nu


class Known(NamedTuple):
    """What is known of a point once its leaves have been read: numbers per channel and per head.

    Attributes:
      frame: the frame, with channels anchored that have just come alive.
      squares: sums of squares of every channel's sides.
      rho: their sizes ρ.
      alive: whether each side exceeds its floor.
      sizes: per leaf, the ρ that its tangential part is seen and stepped with.
      moment_factors: per leaf, what first moments are multiplied by where f was anchored anew.
      grams: Gram matrices of every group of heads.
    """

    frame: FrameState
    squares: Squares
    rho: Sides
    alive: Sides
    sizes: Arrays
    moment_factors: Arrays
    grams: tuple[jax.Array, ...]


class Here(NamedTuple):
    """The current point in its frame.

    Attributes:
      bound: the product on this tree.
      known: numbers per channel and per head.
      point: θ̂ and the factors in and out.
      values: θ per leaf, out of the frame.
      raw: the same, centred.
      overlap: how the channels' sums of squares change each other's.
    """

    bound: Bound
    known: Known
    point: Point
    values: Mapping[str, jax.Array]
    raw: Mapping[str, jax.Array]
    overlap: Overlap

    @property
    def system(self) -> ScaleSystem:
        """The scale instances."""
        return self.bound.system

    def transfer(self, moments: Arrays, power: int) -> Arrays:
        """Moments of this power, carried to this step's frame."""
        factors = self.known.moment_factors
        return {p: x * factors[p] ** power if p in factors else x for p, x in moments.items()}

    def resize(self, framed: Arrays) -> Arrays:
        """Every scaled leaf times the ρ of its channels."""
        return _split.times(framed, self.known.sizes)

    def added(self, framed: Arrays, multiples: Sides) -> Arrays:
        """`framed` plus θ̂ times a multiple per side of every channel."""
        spread = self.system.spread(multiples)
        return {p: x + self.point.hat[p] * spread[p] if p in spread else x for p, x in framed.items()}

    def dots(self, framed: Arrays) -> Sides:
        """⟨θ̂, X̂⟩ per side of every channel."""
        return self.system.dots(self.point.hat, framed)

    def slopes(self, cotangent: Arrays) -> Sides:
        """⟨θ̂, ĝ⟩ per side of every channel, of a cotangent outside the frame: no factor is needed."""
        return self.system.dots(self.raw, cotangent)


def survey(bound: Bound, params: Any, frame: FrameState, moving: bool, one: jax.Array) -> Known:
    """Reads the leaves at `params` once.

    Args:
      bound: the product on this tree, or a component of it.
      params: the parameters.
      frame: the frame of the last step.
      moving: whether parameters may have moved along orbits, so that f has to be followed.
      one: the number 1, once the component before is finished (see `gauges._components.after`).

    Returns:
      Numbers per channel and per head.
    """
    system = bound.system
    frame, values = gated(one, bound, frame, bound.values(params))
    centred, before = bound.centre(values), frame
    if moving:
        frame = _frame.track(system, centred, frame)
    old = _frame.all_squares(system, centred, frame.f)
    frame, squares = (frame, old) if moving else _frame.settle(system, centred, frame, old)
    rho = tuple(_frame.norms(system, squares))
    sizes = system.step_sizes(_stepped(frame, rho))
    factors: Arrays = {}
    if not moving:
        # ρ·ĝ changes with f only through other channels on the leaf; nothing moves unless a channel came alive.
        change = system.factors(tuple(a - b for a, b in zip(frame.f, before.f, strict=True)))
        old_sizes = system.step_sizes(_stepped(frame, _frame.norms(system, old)))
        factors = {p: x * sizes[p] / old_sizes[p] for p, x in change.items()}
    alive = tuple((up > frame.floor_up[k], down > frame.floor_down[k]) for k, (up, down) in enumerate(rho))
    hat = _split.at(bound, centred, frame.f).hat if bound.heads else {}
    grams = tuple(stacked_gram(g, hat, hat) for g in grouped(bound.heads))
    return Known(frame, squares, rho, alive, sizes, factors, grams)


def enter(bound: Bound, params: Any, known: Known, one: jax.Array) -> Here:
    """The point at `params` when `one` is known; its leaves are read anew, and need not have been kept since `survey`.

    Args:
      bound: the product on this tree, or a component of it.
      params: the parameters.
      known: of `survey` at these parameters.
      one: the number 1, once the component before is finished.

    Returns:
      Everything a step reads.
    """
    frame, values = gated(one, bound, known.frame, bound.values(params))
    raw = bound.centre(values)
    point = _split.at(bound, raw, frame.f)
    return Here(
        bound, known._replace(frame=frame), point, values, raw, overlap_of(bound.system, point.hat, known.squares)
    )


def gated(
    one: jax.Array, bound: Bound, frame: FrameState, values: Mapping[str, jax.Array]
) -> tuple[FrameState, Mapping[str, jax.Array]]:
    """The frame, or without scales the values, times `one`: everything of this component follows from them."""
    if bound.scales:
        return frame._replace(f=tuple(one * f for f in frame.f)), values
    return frame, {p: one * x for p, x in values.items()}


def _stepped(frame: FrameState, rho: Sequence[tuple[jax.Array, jax.Array]]) -> Sides:
    """ρ that steps are taken with: never below a tenth of the starting point's mean.

    DESIGN §5 floors at a hundredth. From zero-initialised output kernels that left the loss 1.6 % above AdamW's after
    200 steps at learning rate 1e-3 (Llama-style, d = 32, one seed), a tenth 0.7 %; at 3e-3 both leave 1.9 %.
    """
    low = _STEP_FLOOR / _frame.FLOOR
    return tuple(
        (jnp.maximum(up, low * frame.floor_up[k]), jnp.maximum(down, low * frame.floor_down[k]))
        for k, (up, down) in enumerate(rho)
    )
