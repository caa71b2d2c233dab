"""Links for `optax.chain`: a projection, DDC's preconditioners, and a retraction.

    optax.chain(gauge_project(gauges), scale_by_ddc(gauges), add_gauge_decay(0.1, gauges),
                optax.scale_by_learning_rate(3e-4), gauge_retract(gauges))

is `ddc_adamw(3e-4, gauges, weight_decay=0.1)`. Every link maps its input to slice coordinates and its result back.
*Vertical* updates are along the orbit, the set of all twins of a point; the other part of an update is *horizontal*.
References: DDC §3, B.1–B.10.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.ddc.plain import checked_options, ddc
from gauge_optax.ddc.printed import PaperOptions, paper_ddc, paper_options
from gauge_optax.gauges.bound import bound, require_nonzero_norms
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.linalg import Coefficients
from gauge_optax.optimizers._quotient import (
    QuotientState,
    frame_and_slice_point,
    slice_gradient,
    stays_where_inner_leads,
)
from gauge_optax.optimizers.polar import Labels, polar_of
from gauge_optax.parts.part import changed
from gauge_optax.transformation import (
    GaugeTransformation,
    cast_like,
    checked_inner,
    in_dtype_of,
    placeholder,
    require_choice,
    transformation,
    with_gauges_of,
)

Scalar = float | jax.Array


def link(
    name: str, inner: optax.GradientTransformation, group: Product, without_shifts: bool = True
) -> GaugeTransformation:
    """Makes a link of a chain that runs `inner` on the slice. Its step leads off the slice; `gauge_retract` leads back.

    Args:
      name: name of the public function, for messages.
      inner: a transformation of slice gradients into slice tangents.
      group: the gauges.
      without_shifts: if True, gradients lose their part along constants (gauges that add). False for an `inner` that
        steps along orbits and needs this part.
    """
    given, inner = inner, checked_inner(name, inner)

    def update(updates: Any, state: QuotientState, params: Any, **extra: Any) -> tuple[Any, QuotientState]:
        s = bound(group.gauges, params).slice
        entered = s.enter(s.checked(state.frame), s.values(params))
        gradient = slice_gradient(s, entered, updates, without_shifts)
        u, inner_state = inner.update(gradient, state.inner_state, with_leaves(params, entered.point), **extra)
        step = entered.push(s.vectors(u))
        return with_leaves(u, cast_like(step, updates, params)), QuotientState(state.frame, inner_state, {})

    def init(params: Any) -> QuotientState:
        frame, point = frame_and_slice_point(name, group, params)
        return QuotientState(frame, inner.init(point), {})

    def empty(params: Any) -> QuotientState:
        return QuotientState(placeholder(), inner.init(params), {})

    gauges = with_gauges_of(inner, group.gauges)
    tx = transformation(name, init, update, QuotientState, empty, gauges=gauges, rules=inner.rules)
    tx.linked = given
    return tx


class GaugeRetractState(NamedTuple):
    """State of `gauge_retract`.

    Attributes:
      frame: the frame F that was read at `init`. Every step ends on F·x for a point x of the slice.
    """

    frame: Any


def gauge_project(gauges: Gauges, kind: str = "gradient") -> GaugeTransformation:
    """Keeps the horizontal part of updates: it removes their part along the orbit.

    Args:
      gauges: a gauge or a sequence of gauges.
      kind: "gradient" if the updates are cotangents (gradients and their averages), "update" if they are tangents.

    Returns:
      A transformation without state; leaves that no gauge binds pass unchanged.

    Raises:
      ValueError: an unknown `kind`; bindings that do not fit; `update` without params.

    >>> shift = go.logit_shift({"w": "_ vocab"})
    >>> params, grads = {"w": jnp.ones((1, 2))}, {"w": jnp.array([[1.0, 3.0]])}
    >>> tx = go.gauge_project(shift)
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> updates["w"].tolist()
    [[-1.0, 1.0]]

    Reference: DDC Eq. (1), the projectors. Deviations: one projection serves all gauges of the list. Along scales and
      shifts, it removes from a tangent the part that changes the elements that are read from the anchors
      (docs/design.md §2). This projection is not orthogonal, so that gradients need its transpose.
    """
    require_choice("gauge_project", "kind", kind, ("gradient", "update"))
    group = product(gauges)

    def init(params: optax.Params) -> optax.EmptyState:
        bound(group.gauges, params)  # raises where a binding does not fit
        return optax.EmptyState()

    def update(updates: Any, state: optax.EmptyState, params: Any, **extra: Any) -> tuple[Any, optax.EmptyState]:
        s = bound(group.gauges, params).slice
        require_nonzero_norms("gauge_project", s, leaves_by_path(params))
        horizontal = s.horizontal_at(params, updates, dual=kind == "gradient")
        return in_dtype_of(updates, horizontal), state

    def empty(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    return transformation("gauge_project", init, update, optax.EmptyState, empty, gauges=group.gauges)


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
    preset: str | None = None,
) -> GaugeTransformation:
    """DDC's Adam on the slice; leaves that no gauge binds get Adam. `ddc/plain.py` explains the steps.

    Args:
      gauges: a gauge or a sequence of gauges.
      b1: decay of first moments.
      b2: decay of second moments.
      eps: added to √v̂, where v̂ is the second moment with its bias corrected.
      eps_root: added to v̂ inside the root.
      mu_dtype: dtype of the first moment; by default at least float32 for leaves that gauges bind, and the leaf's own
        dtype for all others.
      nesterov: whether to use Nesterov momentum, as in `optax.adam`.
      vertical: "frozen" for no motion along orbits; "sgd" or "adam" for losses that change along orbits, because they
        contain a penalty on weights. These two modes refuse `residual_rotation`, rotations of heads that share entries,
        `embedding_shift`, `bias_absorption`, `norm_read_shift`, and gauges that users define.
      v_mode: the kind of second moments of leaves that rotations bind: "body_frame_topk", "body_frame",
        "per_head_scalar", "per_head_matrix" or "none"; `ddc/heads.py` defines them.
      radial: "linear" for Adam on the length s of a channel; "log" for Adam on log s, where a large decay shrinks s to
        zero whatever the gradient is (docs/design.md §4). `ddc/plain.py` defines lengths.
      radial_scale: a factor of the steps of lengths. With 1, the length of a vector of n entries moves by up to lr·√n a
        step, as far as Adam's steps of the entries could move it.
      scale_floor: the least length, as a share of the mean length that the channels of a gauge in one layer have at
        `init`. A length below it is made to grow. With 0, channels can become zero.
      live_threshold: with "body_frame_topk", eigendirections whose eigenvalue is below this share of the largest have
        no second moments per entry; their first moments are divided by the root of the head's mean second moment.
      refresh_drift: if more than this share of a head's Gram matrix is off the diagonal in the current eigenbasis, a
        new basis is computed. The share is a ratio of Frobenius norms.
      refresh_every: number of steps after which a new basis is computed in any case; None for never.
      preset: "paper" for appendix B to the letter, but to first order in the learning rate and without decay, because a
        link is given neither the rate nor the decay; `ddc_adamw` follows the whole appendix. With the preset, neither
        `radial_scale` nor `scale_floor` may be given.

    Returns:
      A transformation of gradients (cotangents) into a tangent, which the learning rate scales and `gauge_retract`
      turns into a step. If `vertical` is "frozen", the tangent is horizontal.

    Raises:
      ValueError: an unknown mode; an argument that the preset does not take; bindings that do not fit; `update` without
        params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    >>> tx = go.scale_by_ddc(gauge)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    >>> go.testing.assert_horizontal(updates, params, gauge)

    Reference: DDC Eq. (2), B.4–B.9; `ddc/plain.py` and `ddc/heads.py` list the deviations.
    """
    group = product(gauges)
    options = checked_options(
        "scale_by_ddc", b1, b2, eps, eps_root, mu_dtype, nesterov, vertical, v_mode, radial, radial_scale, scale_floor,
        live_threshold, refresh_drift, refresh_every,
    )
    if preset is not None:
        options = paper_options("scale_by_ddc", preset, options, None)
        return link("scale_by_ddc", paper_ddc(group, options, PaperOptions(None, 0.0)), group)
    return link("scale_by_ddc", ddc(group, options), group, without_shifts=vertical == "frozen")


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
    sizes: Mapping[str, int] | None = None,
    preset: str | None = None,
    adam_b1: Scalar = 0.9,
    adam_b2: Scalar = 0.999,
    adam_eps_root: Scalar = 0.0,
    vertical: str = "frozen",
    radial: str = "linear",
    radial_scale: Scalar = 1.0,
    scale_floor: Scalar = 0.0,
) -> GaugeTransformation:
    """Muon's steps on the slice for matrices, `scale_by_ddc` for everything else.

    Matrices are the leaves that rotations, tori and rescales bind, and the kernels that read a norm, except vectors and
    the leaves of a `logit_shift`. A leaf has one matrix per head if a rotation or torus binds it. Otherwise it is one
    matrix, with its channels on one side and its free axes (`_`) on the other. If gauges bind ranges of a fused kernel,
    each range is treated like a separate leaf.

    Args:
      gauges: a gauge or a sequence of gauges.
      ns_coeffs: polynomials of the Newton–Schulz iteration: a preset ("standard", "dion", "polar_express", "sharp"),
        one tuple of coefficients, or a tuple of such tuples.
      ns_steps: how often a single polynomial is applied; 5 by default. It must not be traced.
      beta: decay of the first moment of matrices.
      eps: a moment M of a matrix is divided by its largest entry and then by its Frobenius norm plus eps. For the
        lengths of scale channels, eps times the largest √v̂ of a layer is added to √v̂, the root of the second moment.
        Steps of matrices and of lengths therefore do not depend on the size of gradients. For all other leaves, eps is
        added to √v̂, as in Adam.
      mu_dtype: dtype of the first moment; by default at least float32 for leaves that gauges bind, and the leaf's own
        dtype for all others.
      nesterov: whether to use Nesterov momentum, for matrices and all other leaves.
      scale: the factor of a polar factor. "width": √max(1, outputs/inputs), the default of `optax.contrib.muon`. "rms":
        ‖M‖_F/√rank, so that the step has the norm of the moment M (DDC B.10). "none": 1. A number: the number times
        √max(inputs, outputs), so that the step has this number as its RMS (Optax's `consistent_rms`).
      labels: path pattern → "muon", "adam" or axes, for leaves that the rule above should not decide. If several
        patterns match, the last one decides. Axes say which matrices a leaf holds: `_` stands for rows and for columns,
        and each index of a named axis has a matrix of its own: "_ head _" for a gate per head, "expert _ _" for stacked
        experts. Give a tuple of axes for the ranges of a fused kernel: ("_ _=0:32", "_ _=32:40").
      sizes: axis name → length, for axes in parentheses in `labels`, `(a b)`, whose lengths do not follow from a shape.
      preset: "paper" for the rules of the DDC paper: only leaves that rotations bind are matrices (Table 1), `scale` is
        "rms", ns_coeffs is "sharp" by default (B.10), and there is no Nesterov momentum. All other leaves get the
        preset of `scale_by_ddc`.
      adam_b1: decay of Adam's first moments.
      adam_b2: decay of Adam's second moments.
      adam_eps_root: added to v̂ inside the root.
      vertical: see `scale_by_ddc`.
      radial: see `scale_by_ddc`.
      radial_scale: see `scale_by_ddc`.
      scale_floor: see `scale_by_ddc`.

    Returns:
      A transformation of gradients (cotangents) into a tangent, which the learning rate scales and `gauge_retract`
      turns into a step. If `vertical` is "frozen", the tangent is horizontal. In its state, `nu` has an
      `optax.MaskedNode` for every matrix, as in `optax.contrib.muon`.

    Raises:
      ValueError: an unknown mode; a label that is neither "muon" nor "adam" nor axes, or that matches no leaf; "muon"
        for a leaf that is no matrix; axes without both rows and columns, or axes for a leaf that a rotation binds; a
        kernel of which gauges bind some ranges, if nothing says which matrices the other ranges are; bindings that do
        not fit; `update` without params.

    >>> gauge = go.head_rotation({"query": "_ head basis", "key": "_ head basis"})
    >>> keys = jax.random.split(jax.random.key(0), 4)
    >>> params = {
    ...     "query": jax.random.normal(keys[0], (6, 2, 3)),
    ...     "key": jax.random.normal(keys[1], (6, 2, 3)),
    ... }
    >>> grads = {
    ...     "query": jax.random.normal(keys[2], (6, 2, 3)),
    ...     "key": jax.random.normal(keys[3], (6, 2, 3)),
    ... }
    >>> tx = go.links.scale_by_scaled_polar(gauge)
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> go.testing.assert_horizontal(updates, params, gauge)

    Reference: DDC B.10. Deviations: its scale ‖M‖_F/√rank is an option and not the default, because steps as small as
      the gradient need other learning rates than Muon's; the part of a step along orbits is removed after the polar
      factor, while before it only the part along scales and shifts is; leaves of rescales are matrices too.
    """
    group = product(gauges)
    polar = polar_of("scale_by_scaled_polar", ns_coeffs, ns_steps, beta, eps, scale, labels, preset, sizes=sizes)
    options = checked_options(
        "scale_by_scaled_polar", adam_b1, adam_b2, eps, adam_eps_root, mu_dtype, nesterov and preset is None, vertical,
        "per_head_scalar", radial, radial_scale, scale_floor,
    )
    if preset is not None:
        options = paper_options("scale_by_scaled_polar", preset, options, None)
        inner = paper_ddc(group, options, PaperOptions(None, 0.0), polar)
        return link("scale_by_scaled_polar", inner, group)
    return link("scale_by_scaled_polar", ddc(group, options, polar), group, without_shifts=vertical == "frozen")


def gauge_retract(gauges: Gauges) -> GaugeTransformation:
    """Turns a scaled tangent into a step after which scales and shifts read at their anchors what they read at `init`.

    There is one exception: `norm_read_shift` in a list without `norm_scale` of the same norm. This gauge divides by the
    norm's scale, which noise may lead through zero, so that its coordinate stays where the tangent moves it.

    Args:
      gauges: a gauge or a sequence of gauges.

    Returns:
      A transformation of updates (tangents) into differences of parameters, the last element of a chain; leaves that no
      gauge binds pass unchanged.

    Raises:
      ValueError: bindings that do not fit; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((1, 1)), "down": jnp.ones((1, 1))}
    >>> tx = go.gauge_retract(gauge)
    >>> step, _ = tx.update(
    ...     {"up": jnp.full((1, 1), 0.21), "down": jnp.zeros((1, 1))},
    ...     tx.init(params),
    ...     params,
    ... )
    >>> # The anchor keeps its size.
    >>> [round(float(x[0, 0]), 4) for x in (step["up"], step["down"])]
    [0.0, 0.21]

    Reference: DDC B.7. Deviation: the reference retracts one gauge after the other, which lets roundoff accumulate.
    """
    group = product(gauges)

    def update(updates: Any, state: GaugeRetractState, params: Any, **extra: Any) -> tuple[Any, GaugeRetractState]:
        s = bound(group.gauges, params).slice
        entered = s.enter(s.checked(state.frame), s.values(params))
        tangent = entered.enter_step(s.vectors(updates))
        read_elsewhere = [p for p, anchor, _ in s.constants if {b.path for b in anchor} - {*changed(p)}]
        left = [p.label for p in read_elsewhere if stays_where_inner_leads(p, s, pin=True)]
        _, after = s.fix(optax.tree.add(entered.point, tangent), state.frame.live, left)
        step = entered.push(optax.tree.sub(after, entered.point))
        return in_dtype_of(updates, step, params), state

    def init(params: optax.Params) -> GaugeRetractState:
        return GaugeRetractState(frame_and_slice_point("gauge_retract", group, params)[0])

    def empty(params: Any) -> GaugeRetractState:
        return GaugeRetractState(placeholder())

    return transformation("gauge_retract", init, update, GaugeRetractState, empty, gauges=group.gauges)
