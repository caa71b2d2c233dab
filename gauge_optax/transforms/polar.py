"""DDC-Muon: the polar factor of a matrix's first moment on the slice, as a link of a chain.

Muon replaces a momentum M = UΣVᵀ by its polar factor UVᵀ. A rotation M ↦ M·R carries over, UVᵀ ↦ UVᵀ·R, so attention
heads get theirs head by head. A rescale M ↦ M·D does not: the spectrum it changes is what Muon throws away (DDC §6,
Table 7). On the slice there is nothing left to change.

Here: the link. Not here: the step in slice coordinates (`inner.ddc`, `inner.polar`), whole optimizers (`optimizers`).
References: DDC §3.1, B.10, C.14 (DDC-Muon); Jordan et al. 2024 (Muon).
"""

from typing import Any

import jax
import optax

from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.inner.ddc import Options, ddc
from gauge_optax.inner.polar import Labels, polar_of
from gauge_optax.linalg import Coefficients
from gauge_optax.meshes import opened
from gauge_optax.transforms.ddc import around_ddc, check_modes

Scalar = float | jax.Array


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
    options = muon_options(
        "scale_by_scaled_polar", eps, mu_dtype, nesterov, adam_b1, adam_b2, adam_eps_root, vertical, radial,
        radial_scale, scale_floor,
    )  # fmt: skip
    return around_ddc("scale_by_scaled_polar", opened(ddc(group, options, polar)), group, vertical, ends=False)


def muon_options(
    name: str,
    eps: Scalar,
    mu_dtype: Any,
    nesterov: bool,
    b1: Scalar,
    b2: Scalar,
    eps_root: Scalar,
    vertical: str,
    radial: str,
    radial_scale: Scalar,
    scale_floor: Scalar,
) -> Options:
    """The settings of what is not a matrix, checked: heads' vectors have one variance per head, without frames."""
    options = Options(
        b1, b2, eps, eps_root, mu_dtype, nesterov, vertical, "per_head_scalar", radial, radial_scale, scale_floor,
        1e-3, 0.1, None,
    )  # fmt: skip
    check_modes(name, options)
    return options

