"""What a step in the frame is told and what it remembers: settings, state, the state at a starting point.

Here: NamedTuples, and how settings that may be traced are told from those that may not. Not here: a step (`_pass`).
"""

from collections.abc import Collection
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import is_empty, with_leaves
from gauge_optax.gauges import _frame, _split
from gauge_optax.gauges._frame import FrameState
from gauge_optax.gauges._split import Bound, Coordinates
from gauge_optax.gauges._system import Channels
from gauge_optax.gauges.product import Product
from gauge_optax.transforms import _moments, _vertical
from gauge_optax.transforms._common import bound_without_linear, placeholder, zeros_sharded_like
from gauge_optax.transforms._heads import init_bases
from gauge_optax.transforms._moments import BodyFrame
from gauge_optax.transforms._polar import PolarOptions

Scalar = float | jax.Array
Chosen = TypeVar("Chosen", bound=tuple)


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


class FramedState(NamedTuple):
    """State of `scale_by_ddc` and of `scale_by_scaled_polar`.

    Attributes:
      count: steps so far, int32.
      mu: first moment, shaped like the parameters: of ρ·ĝ in the rescale frame and in the heads' own (world) basis.
      nu: second moment, shaped like the parameters; rotated leaves in body coordinates. `optax.MaskedNode` where a leaf
        is stepped by its polar factor.
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


class Method(NamedTuple):
    """How every step is made.

    Attributes:
      options: of Adam in the frame.
      polar: of leaves stepped by their polar factor; None where there are none.
      project: whether the vertical part of the gradient is taken out first.
    """

    options: Options
    polar: PolarOptions | None = None
    project: bool = False


def apart(method: Method) -> tuple[Method, Any]:
    """The settings without those that are arrays (a schedule's, an injected hyperparameter's), and these."""
    options, arrays = without_arrays(method.options)
    polar, more = (None, {}) if method.polar is None else without_arrays(method.polar)
    return method._replace(options=options, polar=polar), (arrays, more)


def without_arrays(chosen: Chosen) -> tuple[Chosen, dict[str, Any]]:
    """A NamedTuple with None for its fields that are arrays, and these by name."""
    named = chosen._asdict()  # type: ignore[attr-defined]
    traced = {k: x for k, x in named.items() if isinstance(x, jax.Array | np.ndarray)}
    return chosen._replace(**dict.fromkeys(traced)), traced  # type: ignore[attr-defined]


def together(static: Method, traced: Any) -> Method:
    options, polar = static.options._replace(**traced[0]), static.polar
    return static._replace(options=options, polar=None if polar is None else polar._replace(**traced[1]))


def init_state(
    name: str, group: Product, params: optax.Params, options: Options, polar: Collection[str] = ()
) -> FramedState:
    """State of the transformation `name` at a point; a placeholder for the gauges' part where there are no leaves."""
    mu = jax.tree.map(lambda p: zeros_sharded_like(p, options.mu_dtype or _wide(p)), params)
    nu = jax.tree.map(lambda p: zeros_sharded_like(p, _wide(p)), params)
    nu = with_leaves(nu, dict.fromkeys(polar, optax.MaskedNode()))
    moments: Any = placeholder()
    if not is_empty(params):
        moments = _init_gauges(bound_without_linear(name, group, params), params, options)
    return FramedState(jnp.zeros((), jnp.int32), mu, nu, moments)


def _init_gauges(bound: Bound, params: optax.Params, options: Options) -> GaugeMoments:
    centred = bound.centre(bound.values(params))
    frame = _frame.init_frame(bound.system, centred)
    hat = _split.at(bound, centred, frame.f).hat
    heads = _moments.init_frames(bound, hat, init_bases(bound, hat), options.v_mode, options.live_threshold)
    mu = _vertical.zero_coordinates(bound) if options.vertical != "frozen" else ()
    nu = _vertical.zero_variances(bound) if options.vertical == "adam" else ()
    radial_mu, radial_nu = (tuple(zeros_sharded_like(f, f.dtype) for f in frame.f) for _ in range(2))
    return GaugeMoments(frame, radial_mu, radial_nu, heads, mu, nu, jnp.zeros((), jnp.int32))


def _wide(leaf: Any) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)
