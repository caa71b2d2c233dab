"""DDC's whole optimizers `ddc_adamw` and `ddc_muon`, with the argument names and defaults of Optax's optimizers."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from gauge_optax.binding import is_empty, leaves_by_path, with_leaves
from gauge_optax.ddc.fused import fused_ddc
from gauge_optax.ddc.links import link
from gauge_optax.ddc.plain import Options, checked_options, ddc
from gauge_optax.ddc.printed import PaperOptions, paper_ddc, paper_options, require_no_clamp
from gauge_optax.gauges.bound import bound
from gauge_optax.gauges.gauge import Gauges, Product
from gauge_optax.linalg import Coefficients
from gauge_optax.optimizers._quotient import group_of, leaves_that_never_change, quotient_for
from gauge_optax.optimizers.decay import Decay, decay
from gauge_optax.optimizers.polar import Labels, Polar, polar_of
from gauge_optax.optimizers.rest import RESTS
from gauge_optax.slice import Slice
from gauge_optax.transformation import GaugeTransformation, require_choice

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
    scale_floor: Scalar | None = None,
    live_threshold: Scalar = 1e-3,
    refresh_drift: Scalar = 0.1,
    refresh_every: int | jax.Array | None = None,
    preset: str | None = None,
    max_log_step: Scalar = 0.5,
    rest: str = "anchor",
) -> GaugeTransformation:
    """DDC's AdamW on the slice: one Adam per length of a scale channel, and second moments of heads by `v_mode`.

    A scale gauge multiplies each channel of one side, the anchor, and divides the same channel of the other side. On
    the slice, the anchor of each channel has a constant size. The channel's entries on the other side form a vector
    with a *length* and a direction, which get different steps. `ddc/plain.py` explains them. The chain of
    `gauge_project`, `scale_by_ddc`, `add_gauge_decay`, `scale_by_learning_rate` and `gauge_retract` is the same
    optimizer.

    Args:
      learning_rate: a number or a schedule.
      gauges: a gauge or a sequence of gauges; leaves that no gauge binds get plain AdamW.
      b1: decay of first moments.
      b2: decay of second moments.
      eps: added to the root of the second moment.
      eps_root: added inside that root.
      mu_dtype: dtype of the first moment; by default at least float32 for leaves that gauges bind, and the leaf's own
        dtype for all others.
      weight_decay: decoupled decay, multiplied by the learning rate as in `optax.adamw`; a number, a schedule, or a
        number per role as in `add_gauge_decay`.
      mask: which leaves decay, as in `optax.adamw`. A callable gets the slice point at `init`, and updates on the
        slice later, as in Optax. Both are the same for all weights of one function (twins), so that no mask can make
        twins differ.
      match: see `add_gauge_decay`.
      nesterov: whether to use Nesterov momentum.
      vertical: see `scale_by_ddc`; unless it is "frozen", steps do not return to the slice.
      v_mode: see `scale_by_ddc`.
      radial: see `scale_by_ddc`.
      radial_scale: see `scale_by_ddc`.
      scale_floor: see `scale_by_ddc`.
      live_threshold: see `scale_by_ddc`.
      refresh_drift: see `scale_by_ddc`.
      refresh_every: see `scale_by_ddc`.
      preset: "paper" for appendix B to the letter; None for the version that trains best, which deviates from it
        (`ddc/plain.py`, and a table in docs/design.md §4). The preset takes no `mask`, `match` or `radial_scale`. It
        takes `scale_floor` only with radial="linear"; the floor is then a share of the s (see `max_log_step`) at which
        decay and steps balance.
      max_log_step: with `preset="paper"` and radial="linear", the largest change of log s in a step. Here s
        is the product of powers of the norms on the sides of a channel that scale gauges do not change: ρ_upᵖ·ρ_down
        for one gauge of degree p (`ddc/printed.py`).
      rest: see `quotient`. The preset accepts only "anchor"; its steps do not return to the slice.

    Returns:
      The optimizer. Its `update` needs `params`.

    Raises:
      ValueError: an unknown mode; an argument that the preset does not take, such as a mask or a decay per role;
        `max_log_step` without the preset; bindings that do not fit; `update` without params.

    >>> gauge = go.rescale(up={"up": "_ channel"}, down={"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.full((3, 1), 0.5)}
    >>> loss = lambda p: jnp.sum(
    ...     (jax.nn.relu(jnp.array([1.0, 2.0]) @ p["up"]) @ p["down"] - 1.0) ** 2
    ... )
    >>> tx = go.ddc_adamw(0.03, gauge)
    >>> state = tx.init(params)
    >>> for _ in range(5):
    ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
    ...     params = optax.apply_updates(params, updates)
    ...     print(f"{loss(params):.2f}")
    10.55
    8.97
    7.52
    6.21
    5.05

    Reference: DDC §3, App. B; `optax.adamw` for the leaves that no gauge binds. Deviations of the default: see
      `ddc/plain.py`. With `preset="paper"` there are none, but the paper's text leaves two numbers open.
    """
    options = checked_options(
        "ddc_adamw", b1, b2, eps, eps_root, mu_dtype, nesterov, vertical, v_mode, radial, radial_scale,
        0.0 if scale_floor is None else scale_floor, live_threshold, refresh_drift, refresh_every,
    )
    group = group_of("ddc_adamw", learning_rate, gauges)
    if preset is not None:
        options = paper_options("ddc_adamw", preset, options, weight_decay, mask, rest, match, max_log_step)
        paper = PaperOptions(learning_rate, weight_decay, max_log_step=max_log_step, **_floor(scale_floor))
        return link("ddc_adamw", paper_ddc(group, options, paper), group)
    require_no_clamp("ddc_adamw", max_log_step)
    tail = (decay(weight_decay, group, match, mask, on_slice=True), optax.scale_by_learning_rate(learning_rate))
    return _ddc_optimizer("ddc_adamw", group, options, None, tail, rest)


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
    adam_weight_decay: Decay = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    consistent_rms: Scalar | None = None,
    scale: str | Scalar = "width",
    labels: Labels = None,
    sizes: Mapping[str, int] | None = None,
    preset: str | None = None,
    match: str = "adamw",
    vertical: str = "frozen",
    radial: str = "linear",
    radial_scale: Scalar = 1.0,
    scale_floor: Scalar | None = None,
    max_log_step: Scalar = 0.5,
    rest: str = "anchor",
) -> GaugeTransformation:
    """DDC's Muon on the slice: polar factors for matrices, Adam for the lengths of scales, `ddc_adamw` for all else.

    Args:
      learning_rate: a number or a schedule.
      gauges: a gauge or a sequence of gauges; leaves that no gauge binds get plain AdamW.
      ns_coeffs: see `scale_by_scaled_polar`.
      ns_steps: see `scale_by_scaled_polar`.
      beta: decay of the first moment of matrices.
      eps: see `scale_by_scaled_polar`.
      weight_decay: decoupled decay of matrices, multiplied by the learning rate as in `optax.contrib.muon`; a number, a
        schedule, or a number per role as in `add_gauge_decay`.
      weight_decay_mask: where `weight_decay` decays, as in `optax.contrib.muon`. A callable gets the slice point
        at `init`, and updates on the slice later, as in Optax; both are the same for all weights of one function.
      mu_dtype: dtype of the first moment; by default at least float32 for leaves that gauges bind, and the leaf's own
        dtype for all others.
      nesterov: whether to use Nesterov momentum, for matrices and all other leaves.
      adam_b1: decay of Adam's first moments.
      adam_b2: decay of Adam's second moments.
      adam_eps_root: added inside the root of Adam's second moment.
      adam_weight_decay: decoupled decay of the leaves that are no matrices.
      adam_learning_rate: learning rate of the leaves that are no matrices; by default `learning_rate`.
      consistent_rms: the RMS of a matrix's step before the learning rate. This is Optax's name for a number as `scale`;
        give only one of the two.
      scale: see `scale_by_scaled_polar`.
      labels: see `scale_by_scaled_polar`.
      sizes: see `scale_by_scaled_polar`.
      preset: "paper" for appendix B to the letter. Matrices are then the leaves that the paper's Table 1 names, and
        their steps follow its section B.10; all other leaves get the preset of `ddc_adamw`. There is no Nesterov
        momentum, and ns_coeffs is "sharp" by default.
      match: see `add_gauge_decay`.
      vertical: see `scale_by_ddc`; unless it is "frozen", steps do not return to the slice.
      radial: see `scale_by_ddc`.
      radial_scale: see `scale_by_ddc`.
      scale_floor: see `scale_by_ddc`.
      max_log_step: see `ddc_adamw`.
      rest: see `ddc_adamw`.

    Returns:
      The optimizer. Its `update` needs `params`.

    Raises:
      ValueError: the errors of `scale_by_scaled_polar`; `consistent_rms` together with another `scale` than the
        default; with the preset, the errors of `ddc_adamw`.

    >>> gauge = go.rescale(up={"up": "_ channel"}, down={"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.full((3, 1), 0.5)}
    >>> loss = lambda p: jnp.sum(
    ...     (jax.nn.relu(jnp.array([1.0, 2.0]) @ p["up"]) @ p["down"] - 1.0) ** 2
    ... )
    >>> tx = go.ddc_muon(0.03, gauge)
    >>> state = tx.init(params)
    >>> for _ in range(5):
    ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> bool(loss(params) < 8)
    True

    Reference: DDC §3.1, B.10, C.14; `optax.contrib.muon` for names and defaults. Its arguments `adaptive` and
      `preconditioning` are left out: they use a dual norm per leaf and a scale per row, which differ between twins.
    """
    group = group_of("ddc_muon", learning_rate, gauges)
    polar = polar_of("ddc_muon", ns_coeffs, ns_steps, beta, eps, scale, labels, preset, consistent_rms, sizes)
    options = checked_options(
        "ddc_muon", adam_b1, adam_b2, eps, adam_eps_root, mu_dtype, nesterov and preset is None, vertical,
        "per_head_scalar", radial, radial_scale, 0.0 if scale_floor is None else scale_floor,
    )
    adam_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    if preset is not None:
        for given in (weight_decay, adam_weight_decay):
            options = paper_options(
                "ddc_muon", preset, options, given, weight_decay_mask, rest, match, max_log_step
            )
        paper = PaperOptions(
            adam_rate, adam_weight_decay, learning_rate, weight_decay, max_log_step, **_floor(scale_floor)
        )
        return link("ddc_muon", paper_ddc(group, options, paper, polar), group)
    require_no_clamp("ddc_muon", max_log_step)
    matrices = polar.matrices

    def others(s: Slice, params: Any) -> set[str]:
        return leaves_by_path(params).keys() - matrices(s, params).keys()

    def labelled(params: Any) -> Any:
        muon_paths = {} if is_empty(params) else matrices(bound(group.gauges, params).slice, params)
        return with_leaves(jax.tree.map(lambda _: "adam", params), dict.fromkeys(muon_paths, "muon"))

    rates = {"muon": learning_rate, "adam": adam_rate}
    tail = (
        decay(weight_decay, group, match, weight_decay_mask, only=matrices, on_slice=True),
        decay(adam_weight_decay, group, match, only=others, on_slice=True),
        optax.partition({name: optax.scale_by_learning_rate(rate) for name, rate in rates.items()}, labelled),
    )
    return _ddc_optimizer("ddc_muon", group, options, polar, tail, rest)


def _floor(scale_floor: Scalar | None) -> dict[str, Any]:
    return {} if scale_floor is None else {"scale_floor": scale_floor}


def _ddc_optimizer(
    name: str,
    group: Product,
    options: Options,
    polar: Polar | None,
    tail: tuple[optax.GradientTransformation, ...],
    rest: str,
) -> GaugeTransformation:
    """Makes `quotient` around a chain of `ddc` and `tail`, by `fused_ddc`, which needs less memory, where possible.

    Args:
      name: name of the public function, for messages.
      group: the gauges.
      options: the settings of `ddc`.
      polar: settings of the polar factors; None for Adam everywhere.
      tail: the links that follow `ddc` in the chain: decay and learning rate.
      rest: see `quotient`.
    """
    first = ddc(group, options, polar)
    chain = optax.chain(first, *tail)
    inner = GaugeTransformation(chain.init, chain.update, rules=first.rules)
    require_choice(name, "rest", rest, RESTS if options.vertical == "frozen" else RESTS[:1])
    if options.vertical != "frozen":  # `inner` moves along orbits, so its steps must not return to the slice
        return link(name, inner, group, without_shifts=False)
    frozen = leaves_that_never_change(name, inner)
    # `hold=True` would remove the part of each step that only rotates heads. DDC's steps have no such part.
    plain = quotient_for(name, inner, group, hold=False, rest=rest, never_changing=frozen)
    if rest != "anchor":
        return plain
    # `fused_ddc` makes the same steps as `plain`, but computes them from stored leaves, which needs less memory.
    return fused_ddc(name, plain, group, options, polar, optax.chain(*tail), frozen)
