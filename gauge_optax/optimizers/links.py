"""Links of a chain for `optax.chain`: projection, DDC's preconditioners, and the retraction.

    optax.chain(gauge_project(gauges), scale_by_ddc(gauges), add_gauge_decay(0.1, gauges),
                optax.scale_by_learning_rate(3e-4), gauge_retract(gauges))

is `ddc_adamw(3e-4, gauges, weight_decay=0.1)`. Each link enters the slice and leaves it by itself.
References: DDC §3, B.1–B.10.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import with_leaves
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.linalg import Coefficients
from gauge_optax.optimizers._quotient import QuotientState, start
from gauge_optax.optimizers.ddc import checked_options, ddc
from gauge_optax.optimizers.polar import Labels, polar_of
from gauge_optax.slice import Slice, SliceTangent
from gauge_optax.transformation import (
    cast_like,
    checked_inner,
    in_dtype_of,
    placeholder,
    require_choice,
    transformation,
)

Scalar = float | jax.Array


def link(
    name: str, inner: optax.GradientTransformation, group: Product, still: bool = True
) -> optax.GradientTransformationExtraArgs:
    """A link of a chain: enters the slice, applies `inner` there, and leaves. `gauge_retract` brings the step back.

    Args:
      name: of the public function, for messages.
      inner: a transformation of slice gradients.
      group: the gauges.
      still: whether `inner` stays on the slice; otherwise it sees the gradient along shifts and may move along orbits.
    """
    inner = checked_inner(name, inner)

    def update(updates: Any, state: QuotientState, params: Any, **extra: Any) -> tuple[Any, QuotientState]:
        s = Slice.of(group.parts, params)
        f = s.elements(state.frame)
        point = s.enter(f, s.values(params))
        gradient = with_leaves(updates, s.enter_dual(f, s.vectors(updates), still=still))
        u, inner_state = inner.update(
            s.without_roundoff(point, gradient), state.inner_state, with_leaves(params, point), **extra
        )
        step = s.leave(f, SliceTangent(s.vectors(u)))
        return with_leaves(u, cast_like(step, updates)), QuotientState(state.frame, inner_state)

    def init(params: Any) -> QuotientState:
        frame, point = start(name, group, params)
        return QuotientState(frame, inner.init(point))

    return transformation(name, init, update, QuotientState, lambda p: QuotientState(placeholder(), inner.init(p)))


class GaugeRetractState(NamedTuple):
    """State of `gauge_retract`.

    Attributes:
      frame: what was read at `init`; every step returns to the slice that this frame shifts to the stored weights.
    """

    frame: Any


def gauge_project(gauges: Gauges, kind: str = "gradient") -> optax.GradientTransformationExtraArgs:
    """Keeps the horizontal part of what comes in.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.
      kind: "gradient" for cotangents (gradients, averages of gradients), "update" for tangents.

    Returns:
      A transformation without state; leaves that no gauge binds pass unchanged.

    Raises:
      ValueError: another `kind`; bindings that do not fit; `update` without params.

    >>> shift = go.logit_shift({"w": "_ vocab"})
    >>> params, grads = {"w": jnp.ones((1, 2))}, {"w": jnp.array([[1.0, 3.0]])}
    >>> tx = go.gauge_project(shift)
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> updates["w"].tolist()
    [[-1.0, 1.0]]

    Reference: DDC Eq. (1), the projectors. Deviation: all gauges of the list at once; along scales and shifts the
      projection is that of the anchors (docs/design.md §2), for gradients its adjoint.
    """
    require_choice("gauge_project", "kind", kind, ("gradient", "update"))
    group = product(gauges)

    def init(params: optax.Params) -> optax.EmptyState:
        Slice.of(group.parts, params)  # raises where a binding does not fit
        return optax.EmptyState()

    def update(updates: Any, state: optax.EmptyState, params: Any, **extra: Any) -> tuple[Any, optax.EmptyState]:
        horizontal = Slice.of(group.parts, params).horizontal_at(params, updates, dual=kind == "gradient")
        return in_dtype_of(updates, horizontal), state

    return transformation("gauge_project", init, update, optax.EmptyState, lambda params: optax.EmptyState())


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
    options = checked_options(
        "scale_by_ddc", b1, b2, eps, eps_root, mu_dtype, nesterov, vertical, v_mode, radial, radial_scale, scale_floor,
        live_threshold, refresh_drift, refresh_every,
    )  # fmt: skip
    return link("scale_by_ddc", ddc(group, options), group, still=vertical == "frozen")


def scale_by_scaled_polar(
    gauges: Gauges,
    ns_coeffs: Coefficients = "standard",
    ns_steps: int | None = None,
    beta: Scalar = 0.95,
    eps: Scalar = 1e-8,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    scale: str | Scalar = "width",
    labels: Labels = None,
    preset: str | None = None,
    adam_b1: Scalar = 0.9,
    adam_b2: Scalar = 0.999,
    adam_eps_root: Scalar = 0.0,
    vertical: str = "frozen",
    radial: str = "linear",
    radial_scale: Scalar = 1.0,
    scale_floor: Scalar = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Muon on the slice of a product of gauges for matrices, `scale_by_ddc` for everything else.

    Matrices are the leaves of rotations, rescales and norms' consumers that are no vectors and in no `logit_shift`:
    one matrix per head where a rotation binds the leaf, else channels on one side and free axes on the other.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.
      ns_coeffs: polynomials of the Newton–Schulz iteration: a preset ("standard", "dion", "polar_express", "sharp"),
        one tuple of coefficients, or a tuple of such tuples.
      ns_steps: how often a single polynomial is applied; 5 by default. Not to be traced.
      beta: decay of the first moment of matrices.
      eps: added to ‖M‖_F where a moment is normalised, and to √v̂ of Adam.
      mu_dtype: dtype of the first moment; by default that of slice coordinates, at least float32.
      nesterov: whether to use Nesterov momentum, for matrices and vectors alike.
      scale: what multiplies a polar factor. "width": √max(1, outputs/inputs), as `optax.contrib.muon` does by default;
        "rms": ‖M‖_F/√rank, the size of the moment (DDC B.10); "none": 1; a number: √max(inputs, outputs) times it, so
        that it is the RMS of the step (`consistent_rms` of optax).
      labels: path pattern → "muon" or "adam", where the rule above should not hold. Later patterns win.
      preset: "paper" is DDC's: matrices are those of rotations alone (Table 1), and `scale` is "rms" (B.10).
      adam_b1: decay of Adam's first moments.
      adam_b2: decay of Adam's second moments.
      adam_eps_root: added to v̂ inside the root.
      vertical: see `scale_by_ddc`.
      radial: see `scale_by_ddc`.
      radial_scale: see `scale_by_ddc`.
      scale_floor: see `scale_by_ddc`.

    Returns:
      A transformation of gradients (cotangents) into a horizontal tangent, to be scaled by the learning rate and
      finished by `gauge_retract`. In its state, `nu` has an `optax.MaskedNode` for every matrix, as
      `optax.contrib.muon`'s.

    Raises:
      ValueError: a mode that does not exist; a label that is neither, or fits no leaf; "muon" for a leaf that is not a
        matrix; bindings that do not fit; `update` without params.

    >>> gauge = go.head_rotation({"query": "_ head basis", "key": "_ head basis"})
    >>> keys = jax.random.split(jax.random.key(0), 4)
    >>> params = {"query": jax.random.normal(keys[0], (6, 2, 3)), "key": jax.random.normal(keys[1], (6, 2, 3))}
    >>> grads = {"query": jax.random.normal(keys[2], (6, 2, 3)), "key": jax.random.normal(keys[3], (6, 2, 3))}
    >>> tx = go.scale_by_scaled_polar(gauge)
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> go.testing.assert_horizontal(updates, params, gauge)

    Reference: DDC B.10. Deviations: its scale ‖M‖_F/√rank is a choice, because steps as small as the gradient need
      other learning rates than Muon's; projected after the polar factor as well as before; rescales are admitted.
    """
    group = product(gauges)
    polar = polar_of("scale_by_scaled_polar", ns_coeffs, ns_steps, beta, eps, scale, labels, preset)
    options = checked_options(
        "scale_by_scaled_polar", adam_b1, adam_b2, eps, adam_eps_root, mu_dtype, nesterov, vertical,
        "per_head_scalar", radial, radial_scale, scale_floor,
    )  # fmt: skip
    return link("scale_by_scaled_polar", ddc(group, options, polar), group, still=vertical == "frozen")


def gauge_retract(gauges: Gauges) -> optax.GradientTransformationExtraArgs:
    """Turns a scaled tangent into the step that ends on the slice of the starting point, where coordinates stand still.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.

    Returns:
      A transformation of updates (tangents) into differences of parameters, last in a chain; leaves that no gauge
      binds pass unchanged.

    Raises:
      ValueError: bindings that do not fit; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((1, 1)), "down": jnp.ones((1, 1))}
    >>> tx = go.gauge_retract(gauge)
    >>> step, _ = tx.update({"up": jnp.full((1, 1), 0.21), "down": jnp.zeros((1, 1))}, tx.init(params), params)
    >>> [round(float(x[0, 0]), 4) for x in (step["up"], step["down"])]  # the anchor keeps its size
    [0.0, 0.21]

    Reference: DDC B.7. Deviation: the reference moves each gauge on its own and lets rounding walk.
    """
    group = product(gauges)

    def update(updates: Any, state: GaugeRetractState, params: Any, **extra: Any) -> tuple[Any, GaugeRetractState]:
        s = Slice.of(group.parts, params)
        f = s.elements(state.frame)
        point, tangent = s.enter(f, s.values(params)), s.enter_tangent(f, s.vectors(updates))
        after = s.fix(jax.tree.map(jnp.add, dict(point), dict(tangent)), state.frame.live)
        step = s.leave(f, SliceTangent(jax.tree.map(jnp.subtract, dict(after), dict(point))))
        return in_dtype_of(updates, step), state

    def init(params: optax.Params) -> GaugeRetractState:
        return GaugeRetractState(start("gauge_retract", group, params)[0])

    return transformation("gauge_retract", init, update, GaugeRetractState, lambda p: GaugeRetractState(placeholder()))
