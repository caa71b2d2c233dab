"""DDC-Adam: Adam on the quotient, one gauge-invariant coordinate system at a time.

Parameters and gradient enter the frame, where every quantity is an invariant of the product group (or turns with a
head). There a scaled leaf splits into

* vertical: (+θ̂_up, −p·θ̂_down) per channel, frozen by default;
* radial: the channel's joint scale s = ρ_up^p·ρ_down, one scalar Adam per channel;
* tangential: everything else, per-coordinate Adam on ρ·ĝ, stepping by ρ.

Rotated leaves keep their second moment in the head's body frame, a shift's leaf loses its mean, other leaves get
Adam. What the division leaked into the vertical space is projected out again, and the step leaves the frame as a
tangent.
Invariant: the frame's channels' ρ, s, all moments of scaled leaves. Covariant under rotations: the first moment.

References: DDC §3, B.1–B.9. Deviations (DESIGN §5): the whole product group at once, in the frame metric; v is moved
to a new frame by R∘R, not |R|; degenerate heads get an anchored frame; scales have floors. For squared ReLU (p = 2)
the frame metric gives both sides the same relative step where B.7 gives p : 1.
"""

from typing import Any

import jax
import optax

from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.transforms._common import in_dtype_of, require_choice, require_params
from gauge_optax.transforms._moments import V_MODES
from gauge_optax.transforms._pass import bare, take_step, tangents
from gauge_optax.transforms._state import FramedState, Method, Options, init_state
from gauge_optax.transforms.retract import RADIAL, VERTICAL

Scalar = float | jax.Array


def scale_by_ddc(
    gauges: Gauges,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    vertical: str = "frozen",
    v_mode: str = "body_frame_topk",
    radial: str = "linear",
    radial_scale: Scalar = 1.0,
    live_threshold: Scalar = 1e-3,
    refresh_drift: Scalar = 0.1,
    refresh_every: int | jax.Array | None = None,
    reset_every: int | jax.Array | None = None,
    reproject: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Adam in the frame of a product of gauges; ungauged leaves get Adam.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.
      b1: decay of first moments.
      b2: decay of second moments.
      eps: added to √v̂.
      eps_root: added to v̂ inside the root.
      mu_dtype: dtype of the first moment; by default the parameters', at least float32.
      nesterov: whether to use Nesterov momentum, as in `optax.adam`.
      vertical: "frozen" (no motion along orbits), "sgd" or "adam" (for losses that hold a penalty).
      v_mode: second moment of rotated leaves: "body_frame_topk", "body_frame", "per_head_scalar",
        "per_head_matrix" or "none".
      radial: "linear" (Adam on s) or "log" (Adam on log s, which decay drives to zero).
      radial_scale: factor on the radial step.
      live_threshold: eigendirections below it times λ_max follow momentum alone under "body_frame_topk".
      refresh_drift: whitened drift of a head's Gram matrix at which its eigenbasis is renewed.
      refresh_every: age in steps at which it is renewed anyway; None for never.
      reset_every: period in steps at which moments and bias correction of rotated leaves start anew in a fresh
        eigenbasis (the reference's mitigation of its own drift, DDC A.4); None for never.
      reproject: whether the step is projected again after the division (DDC Remark 12).

    Returns:
      A transformation of gradients (cotangents) into a tangent, to be scaled by the learning rate and finished by
      `gauge_retract`.

    Raises:
      ValueError: a mode that does not exist; bindings that do not fit; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    >>> tx = go.scale_by_ddc(gauge)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    >>> go.testing.assert_horizontal(updates, params, gauge)

    Reference: DDC Eq. (2), B.4–B.9.
    """
    options = Options(
        b1, b2, eps, eps_root, mu_dtype, nesterov, vertical, v_mode, radial, radial_scale,
        live_threshold, refresh_drift, refresh_every, reset_every, reproject,
    )  # fmt: skip
    check_modes(options)
    group = product(gauges)

    def update_fn(
        updates: optax.Updates, state: FramedState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, FramedState]:
        del extra
        require_params("scale_by_ddc", params)
        step = take_step(group.bound(params), params, updates, state, Method(options), {}, lambda _: (bare, ()))
        return in_dtype_of(updates, tangents(step)), step.state

    return optax.GradientTransformationExtraArgs(
        lambda params: init_state("scale_by_ddc", group, params, options), update_fn
    )


def check_modes(options: Options) -> None:
    """Raises ValueError for a mode that does not exist."""
    require_choice("scale_by_ddc", "vertical", options.vertical, VERTICAL)
    require_choice("scale_by_ddc", "v_mode", options.v_mode, V_MODES)
    require_choice("scale_by_ddc", "radial", options.radial, RADIAL)
