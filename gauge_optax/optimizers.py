"""Aliases: what chains of the transformations do, some of them fused into one pass (`transforms.adamw` says why)."""

from typing import Any

import jax
import optax

from gauge_optax.gauges.base import Gauges
from gauge_optax.transforms._pass import Options
from gauge_optax.transforms.adamw import fused_ddc_adamw

Scalar = float | jax.Array


def ddc_adamw(
    learning_rate: optax.ScalarOrSchedule,
    gauges: Gauges,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    match: str = "adamw",
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
    r"""AdamW on the quotient: two weight sets that are one function stay one function.

    Per step: project the gradient, precondition in the frame, add decay, scale by the learning rate, retract,

    .. math::
      \theta_{t+1} = \mathrm{retract}_{\theta_t}\big(-\eta_t\,(\mathrm{DDC}(\Pi_H g_t) + \lambda\,\theta_t)\big).

    Args:
      learning_rate: a number or a schedule.
      gauges: a gauge or a sequence of them, meaning their product; leaves that none binds get AdamW.
      b1: decay of first moments.
      b2: decay of second moments.
      eps: added to the root of the second moment.
      eps_root: added inside that root.
      mu_dtype: dtype of the first moment; by default the parameters', at least float32.
      weight_decay: decoupled decay, multiplied by the learning rate as in `optax.adamw`; a number or a schedule.
      mask: where to decay, as in `optax.adamw`; constant over the leaves of a gauge.
      match: see `add_gauge_decay`.
      nesterov: whether to use Nesterov momentum.
      vertical: see `scale_by_ddc`; other than "frozen" the gradient is not projected first.
      v_mode: see `scale_by_ddc`.
      radial: see `scale_by_ddc`.
      radial_scale: see `scale_by_ddc`.
      live_threshold: see `scale_by_ddc`.
      refresh_drift: see `scale_by_ddc`.
      refresh_every: see `scale_by_ddc`.
      reset_every: see `scale_by_ddc`.
      reproject: see `scale_by_ddc`.

    Returns:
      The optimizer. Its `update` needs `params`.

    Raises:
      ValueError: a mode that does not exist; bindings that do not fit the tree; `update` without params.

    >>> gauge = go.rescale(up={"up": "_ channel"}, down={"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.full((3, 1), 0.5)}
    >>> loss = lambda p: jnp.sum((jax.nn.relu(jnp.array([1.0, 2.0]) @ p["up"]) @ p["down"] - 1.0) ** 2)
    >>> tx = go.ddc_adamw(0.03, gauge)
    >>> state = tx.init(params)
    >>> for _ in range(5):
    ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
    ...     params = optax.apply_updates(params, updates)
    ...     print(f"{loss(params):.2f}")
    10.52
    8.91
    7.44
    6.11
    4.94

    Reference: DDC §3, App. B; `optax.adamw` for what is not gauged.
    """
    options = Options(
        b1, b2, eps, eps_root, mu_dtype, nesterov, vertical, v_mode, radial, radial_scale,
        live_threshold, refresh_drift, refresh_every, reset_every, reproject,
    )  # fmt: skip
    return fused_ddc_adamw(gauges, options, learning_rate, weight_decay, match, mask)
