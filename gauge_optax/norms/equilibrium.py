r"""Closed forms of the norm at which a weight vector settles under weight decay, and of its rotation per step there.

One step moves a weight vector ω of C entries by η·Δ and decays it by ηλω, with the learning rate η and the decay λ.
Through momentum, one gradient g acts in many steps: it moves ω by u in total. Decay removes d per step. In a random
walk u is orthogonal to ω on average, and the norm settles where u lengthens ω as much as d shortens it,

    (‖ω‖ − ‖d‖)² + ‖u‖² = ‖ω‖².

`rms_update` is the length of one step's ηΔ, and `rms_diffusion` is the length of u. Divided by the norm, they are
angles in radians. Each optimizer has its rule. E is the mean over steps, α and β are momenta, m is an average of past
gradients, n what Lion and Muon step along, v Adam's second moment, and S the norm of Muon's update:

| | ‖Δ‖² | ‖u‖²/η² | d |
|---|---|---|---|
| SGDM, m ← αm + g + λω | E‖g‖²/(1 − α²) | E‖g‖²/(1 − α)² | ηλω/(1 − α) |
| AdamW | C·(1 − β₁)/(1 + β₁) | C | ηλω |
| Adam + ℓ₂ | C·(1 − β₁)/(1 + β₁) | C | ηλω/√v, by coordinate |
| Lion, sign of n = β₁m + (1 − β₁)g | C | C·a²/γ | ηλω |
| Muon, polar factor of n | S² | S²·a²/γ | ηλω |

γ = (1 − β₁)² + β₁²·(1 − β₂)/(1 + β₂) is E‖n‖²/E‖g‖²: n weights the last gradients by 1 − β₁, β₁(1 − β₂), β₁(1 − β₂)β₂,
…, which sum to 1. The number a is the cosine between n and its sign or polar factor. For Lion n is a vector, and
a = ‖n‖₁/(√C·‖n‖₂). For Muon n is a matrix of rank r, and a = ‖n‖_*/(√r·‖n‖_F), where ‖n‖_* is the nuclear norm.

Reference: Kosson, Messmer and Jaggi, "Rotational Equilibrium" (ICML 2024).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gauge_optax.errors import binding_error, kind_of
from gauge_optax.transformation import require_choice, require_real

Number = Any
"""A float, or an array that broadcasts against the other arguments, such as one number per neuron or per step."""


class Equilibrium(NamedTuple):
    """A weight vector's steady state.

    Attributes:
      norm: √E‖ω‖².
      rms_update: η_g = √E‖ηΔ‖², the length of one step without its decay. For Adam and Lion it depends only on the
        number of entries, so that it also holds for parameters that are not scale-invariant, such as biases.
      rotation: η_r = rms_update / norm, radians a step.
      rms_diffusion: √E‖u‖², how far one gradient moves the vector over all later steps.
      rotational_diffusion: rms_diffusion / norm, radians.
    """

    norm: Number
    rms_update: Number
    rotation: Number
    rms_diffusion: Number
    rotational_diffusion: Number


def predict_equilibrium(
    kind: str,
    *,
    learning_rate: Number,
    weight_decay: Number,
    b1: Number | None = None,
    b2: Number = 0.99,
    dim: Number | None = None,
    gradient_norm: Number | None = None,
    gradient_roots: Number | None = None,
    sign_alignment: Number | None = None,
    shape: tuple[int, int] | None = None,
    update_norm: Number | None = None,
    nesterov: bool = True,
    second_order: bool = False,
) -> Equilibrium:
    r"""Predicts norm, step length and rotation of a weight vector in a random walk: the paper's Tables 1 and 6.

    The vector is scale-invariant: its norm does not change the outputs. The module's docstring defines the letters.

    Args:
      kind: "sgdm", "adamw", "adam_l2" (Adam on the gradient plus λω), "lion" or "muon".
      learning_rate: η.
      weight_decay: λ, which a step multiplies by η.
      b1: the momentum: α for SGDM, β for Muon, β₁ for the others; by default 0.9, for Muon 0.95.
      b2: Lion's second momentum. Adam's does not matter here.
      dim: the number of entries C of the vector; for AdamW, Adam + ℓ₂ and Lion.
      gradient_norm: √E‖g̃‖², where g̃ = ‖ω‖·g is the gradient at weights of norm 1; for SGDM and Adam + ℓ₂.
      gradient_roots: Σᵢ √E g̃ᵢ² for Adam + ℓ₂; by default √C·gradient_norm, as if all entries had the same variance.
      sign_alignment: the cosine a between n and its sign (Lion) or its polar factor (Muon). The default is that of
        normal entries with the same variance: √(2/π) for Lion, and for Muon that of a matrix of this `shape`.
      shape: (rows, columns) of Muon's matrix; the vector is the whole matrix.
      update_norm: Frobenius norm S of Muon's update before η; by default that of a polar factor, √min(rows, columns).
      nesterov: whether Muon's n has Nesterov momentum; other kinds ignore it.
      second_order: if True, keeps the term λ²η² of decay, Eq. (18), which Table 1 leaves out; not for Adam + ℓ₂.

    Returns:
      The steady state. Each field has the shape to which the arguments that it depends on broadcast.

    Raises:
      ValueError: an unknown kind; an argument that this kind needs is missing; a rate or a decay that is not positive,
        a momentum outside [0, 1), a negative size, a `shape` of no matrix; `second_order` with Adam + ℓ₂, or with a
        decay so large that no norm settles. Values of JAX's arrays are not looked at.

    >>> rest = go.measure.predict_equilibrium(
    ...     "adamw", learning_rate=1.25e-2, weight_decay=8e-2, dim=128
    ... )
    >>> round(float(rest.norm), 3), round(float(rest.rotation), 5)
    (3.162, 0.01026)

    Inside `quotient`, the norm of a gauge's anchor stays what it was at `init`: noise does not make the anchor longer,
    and decay acts on the other side of the gauge. The predictions then hold for that other side, and for vectors that
    no gauge binds.

    Reference: Kosson et al., Table 1 and 6. Deviations: Table 6 prints SGDM's rotation as √(2ηλ/(1 − α)), which is the
      rotational diffusion in the row below; by its own definition it is Table 1's √(2ηλ/(1 + α)). Eq. (68), (69) and
      (72) have one η in E‖u‖² where their Eq. (67) gives η²; Eq. (73) is right again. Muon is not in the paper; its
      derivation here is that of Lion, with the polar factor in place of the sign. Liu et al., "Muon is Scalable"
      (2502.16982), and later work (Hägele et al. 2606.25971, Lion et al. 2605.10797) say that Muon's updates have one
      norm, so that the norm of its weights settles.
    """
    require_choice("predict_equilibrium", "kind", kind, ("sgdm", "adamw", "adam_l2", "lion", "muon"))

    def needed(argument: str, value: Any) -> Any:
        if value is None:
            raise binding_error(
                "predict_equilibrium", f"'{kind}' without {argument}", f"{argument}=None", "a number",
                _REMEDIES[argument],
            )
        return value

    lr, decay = needed("learning_rate", learning_rate), needed("weight_decay", weight_decay)
    _refuse("weight_decay", decay, lambda x: x < 0, "a positive number", _REMEDIES["weight_decay"])
    if _known(weight_decay) and not np.all(np.asarray(weight_decay) > 0):
        raise binding_error(
            "predict_equilibrium", "no decay", f"weight_decay={weight_decay!r}", "a positive number",
            f"{_REMEDIES['weight_decay']}: without decay the norm of a scale-invariant vector grows for ever",
        )
    b1 = (0.95 if kind == "muon" else 0.9) if b1 is None else b1
    _refuse("learning_rate", lr, lambda x: x <= 0, "a positive number", _REMEDIES["learning_rate"])
    for argument, momentum in {"b1": b1, "b2": b2}.items():
        momentum_of = "give the momentum of the optimizer"
        _refuse(argument, momentum, lambda x: (x < 0) | (x >= 1), "a number from 0 to below 1", momentum_of)
    measured = {
        "gradient_norm": gradient_norm, "gradient_roots": gradient_roots, "sign_alignment": sign_alignment,
        "update_norm": update_norm,
    }
    for argument, size in measured.items():  # in an array of several vectors, some may have 0 or NaN
        expected = "a positive number, or an array without negative ones"
        _refuse(argument, size, lambda x: x < 0 if np.ndim(x) else x <= 0, expected, _REMEDIES[argument])
    _refuse("dim", dim, lambda x: x <= 0, "a positive number", _REMEDIES["dim"])
    if second_order and kind == "adam_l2":
        raise binding_error(
            "predict_equilibrium", "second_order with 'adam_l2'", "second_order=True",
            "a decay that is the same for all entries, as that of the other kinds", "write second_order=False",
        )
    if second_order:
        most = 2 * (1 - b1) if kind == "sgdm" else 2.0
        _refuse(
            "learning_rate·weight_decay", lr * decay, lambda x: x >= most, f"less than {most}, or no norm settles",
            "give a smaller rate or decay",
        )
    # `step` is the length of Δ and `total` that of u/η; for SGDM both are at weights of norm 1.
    if kind == "sgdm":
        gradient = needed("gradient_norm", gradient_norm)
        step, total = gradient / (1 - b1**2) ** 0.5, gradient / (1 - b1)
    elif kind in ("adamw", "adam_l2"):
        dim = needed("dim", dim)
        step, total = (dim * (1 - b1) / (1 + b1)) ** 0.5, dim**0.5
    else:
        if kind == "lion":
            step = needed("dim", dim) ** 0.5
            alignment = math.sqrt(2 / math.pi) if sign_alignment is None else sign_alignment
        else:
            matrix = needed("shape", shape)
            require_real("predict_equilibrium", "shape", matrix)
            if np.shape(matrix) != (2,) or min(matrix) < 1:
                raise binding_error(
                    "predict_equilibrium", "a shape of no matrix", f"shape={shape!r}", "(rows, columns)",
                    "give the matrix that Muon takes a polar factor of; predict stacked matrices one at a time",
                )
            rows, columns = matrix
            step = min(rows, columns) ** 0.5 if update_norm is None else update_norm
            alignment = polar_alignment(rows, columns) if sign_alignment is None else sign_alignment
            # Muon's m weights past gradients as Lion's n with β₁ = β₂ = β does. With Nesterov, n = β·m + (1 − β)·g
            # weights them as Lion's n with β₁ = β² and β₂ = β does.
            b1, b2 = b1**2 if nesterov else b1, b1
        total = step * alignment / ((1 - b1) ** 2 + b1**2 * (1 - b2) / (1 + b2)) ** 0.5

    squared_decay = lr * decay**2 if second_order else 0.0
    if kind == "sgdm":
        # SGD's steps are proportional to gradients, and gradients to 1/norm. The equation of the module's docstring
        # therefore determines the fourth power of the norm.
        norm = (lr * gradient**2 / (2 * decay * (1 - b1) - squared_decay)) ** 0.25
        step, total = step / norm, total / norm
    elif kind == "adam_l2":
        roots = total * needed("gradient_norm", gradient_norm) if gradient_roots is None else gradient_roots
        norm = (lr / (2 * decay) * roots) ** (1 / 3)
    else:
        norm = (lr / (2 * decay - squared_decay)) ** 0.5 * total
    return Equilibrium(norm, lr * step, lr * step / norm, lr * total, lr * total / norm)


_REMEDIES = {
    "learning_rate": "pass learning_rate=1e-3, the rate of the optimizer, without steps at which it is zero",
    "weight_decay": "pass weight_decay=0.1, the decay of the optimizer",
    "dim": "pass dim=weights.size, the number of entries of the vector",
    "gradient_norm": "pass gradient_norm=jnp.linalg.norm(weights) * jnp.linalg.norm(gradient)",
    "gradient_roots": "leave gradient_roots out: then all entries count as of one variance",
    "sign_alignment": "leave sign_alignment out: then entries count as normal",
    "shape": "pass shape=kernel.shape, of one matrix",
    "update_norm": "leave update_norm out: then updates count as polar factors",
}


def _known(value: Any) -> bool:
    """Whether the numbers in a value can be checked: not those of a JAX array, which may be traced."""
    return isinstance(value, int | float | np.ndarray | np.generic)


def _refuse(
    argument: str, value: Any, bad: Callable[[Any], Any], expected: str, remedy: str, name: str = "predict_equilibrium"
) -> None:
    """Raises ValueError for an argument that is no real number, or is known and `bad` is True anywhere."""
    if isinstance(value, list | tuple):
        raise binding_error(name, f"bad {argument}", kind_of(value), "a number or an array",
                            f"pass {argument}=jnp.array([...])")
    if value is not None:
        require_real(name, argument, value)
    if _known(value) and _known(found := bad(value)) and np.any(found):
        raise binding_error(name, f"bad {argument}", f"{argument}={value!r}", expected, remedy)


def polar_alignment(rows: int, columns: int) -> float:
    """Returns the cosine between a large Gaussian matrix X and its polar factor, by the Marchenko–Pastur law.

    It is ‖X‖_*/(√r·‖X‖_F), where r is the smaller of `rows` and `columns`.

    >>> from gauge_optax.norms.equilibrium import polar_alignment
    >>> round(polar_alignment(64, 64), 4)  # 8/(3π)
    0.8488
    """
    ratio = min(rows, columns) / max(rows, columns)
    low, high = (1 - ratio**0.5) ** 2, (1 + ratio**0.5) ** 2
    # The substitution x = mid + half·cos(angle) turns the density's square roots at both ends into sines.
    angle = (np.arange(4096) + 0.5) * np.pi / 4096
    x = (low + high) / 2 + (high - low) / 2 * np.cos(angle)
    weights = (high - low) ** 2 / 4 * np.sin(angle) ** 2 / (2 * np.pi * ratio * x)
    return float(np.sum(np.sqrt(x) * weights) / np.sum(weights))


def corrected(prediction: Equilibrium, *, decay_ratio: Number = 1.0, gradient_square: Number = 1.0) -> Equilibrium:
    """Corrects a prediction for gradients that also decay ω, and for second moments v that are not E[g²].

    Args:
      prediction: a result of `predict_equilibrium`, for AdamW, Lion or Muon.
      decay_ratio: λ_err = λ_e/λ, where λ_e = λ + ⟨ω, g⟩/‖ω‖² also counts the part of the gradient along ω, which acts
        like decay. For AdamW, take g/√v in place of g.
      gradient_square: C_err = E‖g/√v‖²/C, which is 1 if v is the average of g².

    Returns:
      The corrected prediction: the norm is multiplied by √(C_err/λ_err), both rotations by √λ_err, and `rms_update` and
      `rms_diffusion` by √C_err.

    Raises:
      ValueError: a ratio that is not positive, for which there is no steady state, or a negative square.

    >>> plain = go.measure.predict_equilibrium(
    ...     "adamw", learning_rate=0.01, weight_decay=0.1, dim=100
    ... )
    >>> round(float(go.measure.corrected(plain, decay_ratio=0.25).norm / plain.norm), 3)
    2.0

    Reference: Kosson et al., Eq. (96) to (98). Deviation: the paper defines C_err by E‖g/√v‖, but its derivation uses
      E‖g/√v‖².
    """
    if not isinstance(prediction, Equilibrium):
        raise binding_error(
            "corrected", "no prediction", kind_of(prediction), "what predict_equilibrium returned",
            'pass go.measure.predict_equilibrium("adamw", ...)')
    for argument, ratio in {"decay_ratio": decay_ratio, "gradient_square": gradient_square}.items():
        require_real("corrected", argument, ratio)
    nowhere = "leave out vectors that the gradient makes longer than decay makes them shorter: they do not settle"
    _refuse("decay_ratio", decay_ratio, lambda x: x <= 0, "a positive number", nowhere, name="corrected")
    square = "pass the mean of squares, which is 1.0 where the second moments are exact"
    _refuse("gradient_square", gradient_square, lambda x: x < 0, "a number of at least 0", square, name="corrected")
    norm, update, rotation, diffusion, rotational = prediction
    size, turn = gradient_square**0.5, decay_ratio**0.5
    return Equilibrium(norm * size / turn, update * size, rotation * turn, diffusion * size, rotational * turn)
