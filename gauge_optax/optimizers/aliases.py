"""Whole optimizers: `quotient` around AdamW and Muon, with the argument names and defaults of Optax's optimizers."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from gauge_optax.gauges.bound import bound as slice_of
from gauge_optax.gauges.gauge import Gauges
from gauge_optax.linalg import Coefficients
from gauge_optax.optimizers._quotient import group_of, quotient_for
from gauge_optax.optimizers.muon import muon
from gauge_optax.optimizers.polar import Labels, polar_of
from gauge_optax.parts.matrices import Reading
from gauge_optax.transformation import GaugeTransformation, require_moments

Scalar = float | jax.Array


def quotient_adamw(
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
    nesterov: bool = False,
    hold: bool = True,
    pin: bool = True,
    rest: str = "anchor",
) -> GaugeTransformation:
    """`quotient` around `optax.adamw`.

    Args:
      learning_rate: a number or a schedule.
      gauges: a gauge or a sequence of gauges; leaves that no gauge binds get plain AdamW.
      b1: decay of first moments.
      b2: decay of second moments.
      eps: added to the root of the second moment.
      eps_root: added inside that root.
      mu_dtype: dtype of the first moment; by default at least float32 for leaves that gauges bind, and the leaf's own
        dtype for all others.
      weight_decay: decoupled decay, multiplied by the learning rate; a number or a schedule.
      mask: which leaves decay, as in `optax.adamw`. A callable gets the slice point at `init`, and updates on the
        slice later, as in Optax. Both are the same for all weights of one function (twins), so that no mask can make
        twins differ.
      nesterov: whether to use Nesterov momentum.
      hold: see `quotient`.
      pin: see `quotient`.
      rest: see `quotient`.

    Returns:
      The optimizer. Its `update` needs `params`.

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
    >>> bool(loss(params) < 1.2)  # it starts at 2, and the least of rank one is 1
    True

    Reference: docs/design.md §3, §5. In float32, the two factors that a `head_linear` binds may have condition numbers
      of up to about 1e2.
    """
    group = group_of("quotient_adamw", learning_rate, gauges)
    require_moments("quotient_adamw", b1=b1, b2=b2, eps=eps, eps_root=eps_root)
    inner = optax.adamw(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov=nesterov)
    return quotient_for("quotient_adamw", inner, group, hold=hold, pin=pin, rest=rest)


def quotient_muon(
    learning_rate: optax.ScalarOrSchedule,
    gauges: Gauges,
    ns_coeffs: Coefficients = "standard",
    ns_steps: int | None = None,
    beta: Scalar = 0.95,
    eps: Scalar = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
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
    sizes: Mapping[str, int] | None = None,
    heads_per_matrix: int | None = None,
    hold: bool = True,
    pin: bool = False,
    rest: str = "anchor",
) -> GaugeTransformation:
    """`quotient` around Muon with one matrix per head, and Adam for the leaves that are not matrices.

    Matrices are the leaves that rotations, tori, linear gauges and rescales bind, and the kernels that read a norm,
    except vectors and the leaves of a `logit_shift`. If one of these gauges acts on each head, or if an axis is called
    `head`, the leaf has one matrix per head. Otherwise it is one matrix, with its channels on one side and its free
    axes (`_`) on the other. If gauges bind ranges of a fused kernel, each range is treated like a separate leaf. Every
    other leaf gets Adam, even a kernel that no gauge binds, unless `labels` say "muon".

    Args:
      learning_rate: a number or a schedule.
      gauges: a gauge or a sequence of gauges.
      ns_coeffs: see `scale_by_scaled_polar`.
      ns_steps: see `scale_by_scaled_polar`.
      beta: decay of the first moment of matrices.
      eps: see `scale_by_scaled_polar`.
      weight_decay: decoupled decay of matrices, multiplied by the learning rate; a number or a schedule.
      weight_decay_mask: where `weight_decay` decays, as in `optax.contrib.muon`. A callable gets the slice point
        at `init`, and updates on the slice later, as in Optax; both are the same for all weights of one function.
      mu_dtype: dtype of the first moment; by default at least float32 for leaves that gauges bind, and the leaf's own
        dtype for all others.
      nesterov: whether to use Nesterov momentum, for matrices and all other leaves.
      adam_b1: decay of Adam's first moments.
      adam_b2: decay of Adam's second moments.
      adam_eps_root: added inside the root of Adam's second moment.
      adam_weight_decay: decoupled decay of the leaves that Adam steps.
      adam_learning_rate: learning rate of the leaves that Adam steps; by default `learning_rate`.
      consistent_rms: the RMS of a matrix's step before the learning rate. This is Optax's name for a number as `scale`;
        give only one of the two.
      scale: see `scale_by_scaled_polar`.
      labels: see `scale_by_scaled_polar`.
      sizes: see `scale_by_scaled_polar`.
      heads_per_matrix: how many neighbouring heads make one matrix; 1 by default. For grouped queries, `(head _)`, this
        counts query heads: a matrix holds whole groups of them or a part of one group. It must not be traced.
      hold: see `quotient`.
      pin: see `quotient`.
      rest: see `quotient`.

    Returns:
      The optimizer. Its `update` needs `params`.

    Raises:
      ValueError: the errors of `scale_by_scaled_polar`; a `heads_per_matrix` that does not divide the number of heads;
        a kernel of which gauges bind some ranges, if neither gauges nor `labels` say which matrices the other ranges
        are.

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

    Reference: Jordan et al. 2024 (Muon); DDC B.10 for heads; `optax.contrib.muon` for names and defaults.
    """
    group = group_of("quotient_muon", learning_rate, gauges)
    require_moments("quotient_muon", adam_b1=adam_b1, adam_b2=adam_b2, adam_eps_root=adam_eps_root)
    polar = polar_of("quotient_muon", ns_coeffs, ns_steps, beta, eps, scale, labels, None, consistent_rms, sizes)
    tail = optax.add_decayed_weights(weight_decay, weight_decay_mask), optax.scale_by_learning_rate(learning_rate)
    adam_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    adam = optax.adamw(adam_rate, adam_b1, adam_b2, eps, adam_eps_root, mu_dtype, adam_weight_decay, nesterov=nesterov)
    heads = 1 if heads_per_matrix is None else heads_per_matrix

    def matrices(params: Any) -> dict[str, Reading]:
        read = polar.matrices(slice_of(group.gauges, params).slice, params)
        return {path: stack.grouped(path, heads) for path, stack in read.items()}

    inner = muon(matrices, polar, nesterov, mu_dtype, tail, adam)
    return quotient_for("quotient_muon", inner, group, hold=hold, pin=pin, rest=rest)
