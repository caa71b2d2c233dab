"""Aliases: what chains of the transformations do, some of them fused into one pass (`transforms.fused` says why)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import Product
from gauge_optax.linalg import Coefficients
from gauge_optax.transforms._here import Adam
from gauge_optax.transforms._pairs import Base
from gauge_optax.transforms._state import Method, Options
from gauge_optax.transforms.ddc import check_modes
from gauge_optax.transforms.decay import Decay
from gauge_optax.transforms.fused import Rates, fused
from gauge_optax.transforms.polar import Labels, Routing, polar_method, rms_alone
from gauge_optax.transforms.quotient import Moments, quotient

Scalar = float | jax.Array


def ddc_adamw(
    learning_rate: optax.ScalarOrSchedule,
    gauges: Gauges,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: Any = None,
    weight_decay: Decay = 1e-4,
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
      weight_decay: decoupled decay, multiplied by the learning rate as in `optax.adamw`; a number, a schedule, or a
        number per role as in `add_gauge_decay`.
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
    check_modes(options)
    rates = Rates(learning_rate, weight_decay)
    method = Method(options, project=vertical == "frozen")
    return fused("ddc_adamw", gauges, method, None, rates, rates, match, mask)


def ddc_muon(
    learning_rate: optax.ScalarOrSchedule,
    gauges: Gauges,
    ns_coeffs: Coefficients = "standard",
    ns_steps: int | None = None,
    beta: Scalar = 0.95,
    eps: Scalar = 1e-8,
    weight_decay: Decay = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adam_b1: Scalar = 0.9,
    adam_b2: Scalar = 0.999,
    adam_eps_root: Scalar = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    consistent_rms: Scalar | None = None,
    scale: str | Scalar = "width",
    labels: Labels = None,
    match: str = "adamw",
    vertical: str = "frozen",
    radial: str = "linear",
    radial_scale: Scalar = 1.0,
    refresh_drift: Scalar = 0.1,
    refresh_every: int | jax.Array | None = None,
    reproject: bool = True,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon on the quotient: matrices by their polar factor in the frame, everything else by `ddc_adamw`.

    Per step: project the gradient, precondition in the frame, add decay, scale by the learning rate, retract,

    .. math::
      \theta_{t+1} = \mathrm{retract}_{\theta_t}\big(-\eta_t\,(\mathrm{Polar}(\Pi_H g_t) + \lambda\,\theta_t)\big).

    Args:
      learning_rate: a number or a schedule.
      gauges: a gauge or a sequence of them, meaning their product; leaves that none binds get AdamW.
      ns_coeffs: see `scale_by_scaled_polar`.
      ns_steps: see `scale_by_scaled_polar`.
      beta: decay of the first moment of matrices.
      eps: see `scale_by_scaled_polar`.
      weight_decay: decoupled decay, multiplied by the learning rate as in `optax.contrib.muon`; a number, a schedule,
        or a number per role as in `add_gauge_decay`.
      weight_decay_mask: where `weight_decay` decays, as in `optax.contrib.muon`; constant over the leaves of a gauge.
      mu_dtype: dtype of the first moment; by default the parameters', at least float32.
      nesterov: whether to use Nesterov momentum, for matrices and vectors alike.
      adam_b1: decay of Adam's first moments.
      adam_b2: decay of Adam's second moments.
      adam_eps_root: added inside the root of Adam's second moment.
      adam_weight_decay: decay of leaves that no gauge connects to a matrix under Muon. A norm's scale and the biases of
        such a matrix decay and step with it: one side of a gauge alone would move along the orbit.
      adam_learning_rate: learning rate of these leaves; by default `learning_rate`.
      consistent_rms: optax's name for a number as `scale`; not beside another `scale`.
      scale: see `scale_by_scaled_polar`.
      labels: see `scale_by_scaled_polar`.
      match: see `add_gauge_decay`.
      vertical: see `scale_by_ddc`; other than "frozen" the gradient is not projected first.
      radial: see `scale_by_ddc`.
      radial_scale: see `scale_by_ddc`.
      refresh_drift: see `scale_by_ddc`.
      refresh_every: see `scale_by_ddc`.
      reproject: see `scale_by_scaled_polar`.

    Returns:
      The optimizer. Its `update` needs `params`.

    Raises:
      ValueError: as `scale_by_scaled_polar`; `consistent_rms` beside another `scale`.

    >>> gauge = go.rescale(up={"up": "_ channel"}, down={"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.full((3, 1), 0.5)}
    >>> loss = lambda p: jnp.sum((jax.nn.relu(jnp.array([1.0, 2.0]) @ p["up"]) @ p["down"] - 1.0) ** 2)
    >>> tx = go.ddc_muon(0.03, gauge)
    >>> state = tx.init(params)
    >>> for _ in range(5):
    ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> bool(loss(params) < 8)
    True

    Reference: DDC §3.1, B.10, C.14; `optax.contrib.muon` for names and defaults. Its `adaptive` and `preconditioning`
      are left out: a dual norm per leaf and row-wise scales break the gauge.
    """
    if consistent_rms is not None:
        scale = rms_alone("ddc_muon", consistent_rms, scale)
    options, polar = polar_method(
        ns_coeffs, ns_steps, beta, eps, mu_dtype, nesterov, scale, adam_b1, adam_b2, adam_eps_root, vertical, radial,
        radial_scale, refresh_drift, refresh_every, reproject,
    )  # fmt: skip
    rates = Rates(learning_rate, weight_decay)
    adam_rates = Rates(learning_rate if adam_learning_rate is None else adam_learning_rate, adam_weight_decay)
    method = Method(options, polar, project=vertical == "frozen")
    return fused("ddc_muon", gauges, method, Routing.of(labels), rates, adam_rates, match, weight_decay_mask)


def quotient_adamw(
    learning_rate: optax.ScalarOrSchedule,
    gauges: Gauges,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: Any = None,
    weight_decay: Decay = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW that sees A·Bᵀ alone: in the frame of the current point, exact under GL(d).

    The difference to `equivariant` in one sentence: here every represented *step* depends on the represented point (and
    the moments, which are kept as its invariants), there the *trajectory* on the represented start.

    Per linear head, with orthonormal bases Q of the factors' column spaces and matrix second moments V,

    .. math::
      \hat g_A = G\,Q_B, \qquad \Delta M = -\eta\,\big(\hat m_A \hat V_A^{-1/2} Q_B^\top
      + Q_A (\hat m_B \hat V_B^{-1/2})^\top\big).

    Args:
      learning_rate: a number or a schedule. Of pairs it is the RMS of a step in the represented matrix' basis, whatever
        the size of the factors.
      gauges: a gauge or a sequence of them, meaning their product. Gauges connected with a `head_linear` through leaves
        are stepped in the current frame, the others by `ddc_adamw`; leaves that none binds get AdamW.
      b1: decay of first moments.
      b2: decay of second moments.
      eps: added to the root of the second moment.
      eps_root: added inside that root.
      mu_dtype: dtype of the first moment; by default the parameters', at least float32.
      weight_decay: see `add_gauge_decay`. Decay of a factor is equivariant: it moves as the factor does.
      mask: where to decay, as in `optax.adamw`; constant over the leaves of a gauge.
      nesterov: whether to use Nesterov momentum.

    Returns:
      The optimizer. Its `update` needs `params`. Nothing is frozen on leaves stepped here: factors may drift out of
      balance, which their represented steps do not see; `gauge_fix` brings them back.

    Raises:
      ValueError: bindings that do not fit the tree; `update` without params.

    >>> gauge = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
    >>> params = {"a": jnp.array([[2.0], [1.0]]), "b": jnp.zeros((1, 2))}  # LoRA's start
    >>> loss = lambda p: jnp.sum(jnp.square(p["a"] @ p["b"] - jnp.eye(2)))
    >>> tx = go.quotient_adamw(0.1, gauge)
    >>> state = tx.init(params)
    >>> for _ in range(20):
    ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> bool(loss(params) < 1.2)  # from 2; the best of rank one is 1
    True

    Reference: When Equivalent Weights Train Differently, §3, §8; DESIGN §5, GL(d_h). In float32 for conditions of the
    factors up to about 1e2. A loss of fewer ranks than the factors leaves them directions of rounding, which are taken
    out; *measured* in float32 from B = 0, rank 4, 300 steps: twins 4e-6 apart on a target of rank 2, 4e-2 of rank 1.
    """
    adam = Adam(b1, b2, eps, eps_root, jnp.zeros((), jnp.int32), nesterov)
    rates = Rates(learning_rate, weight_decay)

    def rest_of(rest: Product, decay: Decay) -> optax.GradientTransformationExtraArgs:
        return ddc_adamw(learning_rate, rest, b1, b2, eps, eps_root, mu_dtype, decay, mask, nesterov=nesterov)

    return quotient("quotient_adamw", gauges, Moments(adam, Base(adam, None), mu_dtype), rates, mask, rest_of)


def quotient_muon(
    learning_rate: optax.ScalarOrSchedule,
    gauges: Gauges,
    ns_coeffs: Coefficients = "standard",
    ns_steps: int | None = None,
    beta: Scalar = 0.95,
    eps: Scalar = 1e-8,
    weight_decay: Decay = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adam_b1: Scalar = 0.9,
    adam_b2: Scalar = 0.999,
    adam_eps_root: Scalar = 0.0,
    adam_weight_decay: Decay = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    consistent_rms: Scalar | None = None,
    scale: str | Scalar = "width",
    labels: Labels = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon that sees A·Bᵀ alone: polar factors in the frame of the current point, exact under GL(d).

    The difference to `equivariant(optax.contrib.muon(…), gauges)` in one sentence: here every represented *step*
    depends on the represented point, there the *trajectory* on the represented start.

    Per linear head, with orthonormal bases Q of the factors' column spaces,

    .. math::
      \Delta M = -\eta\,\big(\mathrm{Polar}(\hat m_A) Q_B^\top + Q_A\,\mathrm{Polar}(\hat m_B)^\top\big).

    Args:
      learning_rate: a number or a schedule.
      gauges: a gauge or a sequence of them, meaning their product. Gauges connected with a `head_linear` through leaves
        are stepped in the current frame, the others by `ddc_muon`.
      ns_coeffs: see `scale_by_scaled_polar`.
      ns_steps: see `scale_by_scaled_polar`.
      beta: decay of the first moment of matrices.
      eps: see `scale_by_scaled_polar`.
      weight_decay: decay of every leaf connected with a linear gauge, and of matrices; see `add_gauge_decay`.
      weight_decay_mask: where `weight_decay` decays; constant over the leaves of a gauge.
      mu_dtype: dtype of the first moment; by default the parameters', at least float32.
      nesterov: whether to use Nesterov momentum, for matrices and vectors alike.
      adam_b1: decay of Adam's first moments.
      adam_b2: decay of Adam's second moments.
      adam_eps_root: added inside the root of Adam's second moment.
      adam_weight_decay: see `ddc_muon`.
      adam_learning_rate: see `ddc_muon`.
      consistent_rms: see `ddc_muon`.
      scale: see `scale_by_scaled_polar`.
      labels: see `scale_by_scaled_polar`; of leaves that no linear gauge is connected with.

    Returns:
      The optimizer. Its `update` needs `params`. A factor and its bias are one matrix, of which the bias is a row.

    Raises:
      ValueError: as `ddc_muon`.

    >>> gauge = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
    >>> params = {"a": jnp.array([[2.0], [1.0]]), "b": jnp.array([[0.5, 0.0]])}
    >>> twin = gauge.act({"": jnp.array([[100.0]])}, params)
    >>> tx = go.quotient_muon(0.1, gauge)
    >>> def step(p):
    ...     grads = jax.grad(lambda p: jnp.sum(jnp.square(p["a"] @ p["b"] - jnp.eye(2))))(p)
    ...     p = optax.apply_updates(p, tx.update(grads, tx.init(p), p)[0])
    ...     return (p["a"] @ p["b"]).round(3).tolist()
    >>> step(params) == step(twin)
    True

    Reference: When Equivalent Weights Train Differently, §6; DESIGN §5; `optax.contrib.muon` for names and defaults.
    """
    if consistent_rms is not None:
        scale = rms_alone("quotient_muon", consistent_rms, scale)
    options, polar = polar_method(
        ns_coeffs, ns_steps, beta, eps, mu_dtype, nesterov, scale, adam_b1, adam_b2, adam_eps_root, "frozen", "linear",
        1.0, 0.1, None, True,
    )  # fmt: skip
    zero = jnp.zeros((), jnp.int32)
    adam = Adam(adam_b1, adam_b2, options.eps, adam_eps_root, zero, nesterov)
    base = Base(adam._replace(b1=beta), polar)
    rates = Rates(learning_rate, weight_decay)

    def rest_of(rest: Product, decay: Decay) -> optax.GradientTransformationExtraArgs:
        return ddc_muon(
            learning_rate, rest, ns_coeffs, ns_steps, beta, eps, decay, weight_decay_mask, mu_dtype,
            nesterov=nesterov, adam_b1=adam_b1, adam_b2=adam_b2, adam_eps_root=adam_eps_root,
            adam_weight_decay=adam_weight_decay, adam_learning_rate=adam_learning_rate, scale=scale, labels=labels,
        )  # fmt: skip

    return quotient("quotient_muon", gauges, Moments(adam, base, mu_dtype), rates, weight_decay_mask, rest_of)
