"""DDC-Adam: Adam on the quotient, as a link of a chain.

Here: the link. Not here: the optimizer in slice coordinates (`inner.ddc`), the whole one (`optimizers.ddc_adamw`).
References: DDC §3, B.1–B.9.
"""

from typing import Any

import jax
import optax

from gauge_optax.checks import require_choice
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import Product, product
from gauge_optax.inner.ddc import RADIAL, VERTICAL, Options, ddc
from gauge_optax.inner.heads import V_MODES
from gauge_optax.meshes import opened
from gauge_optax.optimizers._quotient import wrapped

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
    scale_floor: Scalar = 0.0,
    live_threshold: Scalar = 1e-3,
    refresh_drift: Scalar = 0.1,
    refresh_every: int | jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam on the slice of a product of gauges; ungauged leaves get Adam.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.
      b1: decay of first moments.
      b2: decay of second moments.
      eps: added to √v̂.
      eps_root: added to v̂ inside the root.
      mu_dtype: dtype of the first moment; by default that of slice coordinates, at least float32.
      nesterov: whether to use Nesterov momentum, as in `optax.adam`.
      vertical: "frozen" (no motion along orbits), "sgd" or "adam" (for losses that hold a penalty).
      v_mode: second moment of rotated leaves: "body_frame_topk", "body_frame", "per_head_scalar",
        "per_head_matrix" or "none".
      radial: "linear" (Adam on a channel's length s) or "log" (on log s, which decay drives to zero).
      radial_scale: factor on the radial step, which is what Adam can move a length by: lr·√n for n entries.
      scale_floor: share of a gauge's mean length at `init` below which a length grows; 0 lets channels die.
      live_threshold: eigendirections below it times λ_max are not divided by themselves under "body_frame_topk".
      refresh_drift: share of a head's Gram matrix off the diagonal of its eigenbasis at which that is renewed.
      refresh_every: age in steps at which it is renewed anyway; None for never.

    Returns:
      A transformation of gradients (cotangents) into a horizontal tangent, to be scaled by the learning rate and
      finished by `gauge_retract`.

    Raises:
      ValueError: a mode that does not exist; bindings that do not fit; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    >>> tx = go.scale_by_ddc(gauge)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    >>> go.testing.assert_horizontal(updates, params, gauge)

    Reference: DDC Eq. (2), B.4–B.9; deviations in `inner.ddc` and `inner.heads`.
    """
    group = product(gauges)
    options = Options(
        b1, b2, eps, eps_root, mu_dtype, nesterov, vertical, v_mode, radial, radial_scale, scale_floor,
        live_threshold, refresh_drift, refresh_every,
    )  # fmt: skip
    check_modes("scale_by_ddc", options)
    return around_ddc("scale_by_ddc", opened(ddc(group, options)), group, vertical, ends=False)


def around_ddc(
    name: str, inner: optax.GradientTransformation, group: Product, vertical: str, ends: bool = True
) -> optax.GradientTransformationExtraArgs:
    """`inner`, with DDC in it, on the slice; `ends`: whether steps end there too."""
    frozen = vertical == "frozen"
    return wrapped(name, inner, group, hold=False, ends=ends, still=frozen, origin=frozen)


def check_modes(name: str, options: Options) -> None:
    """Raises ValueError for a mode that does not exist."""
    require_choice(name, "vertical", options.vertical, VERTICAL)
    require_choice(name, "v_mode", options.v_mode, V_MODES)
    require_choice(name, "radial", options.radial, RADIAL)
