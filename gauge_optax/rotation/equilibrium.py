r"""Where weight decay takes norm and rotation of a weight vector: closed forms, and what corrects them.

One step moves ω ∈ R^C by η·Δ and decays it by ηλω. Of a gradient the steps after it make, in all, u; decay takes d. In
a random walk u is orthogonal to ω on average, and the norm rests where one makes up for the other,

    (‖ω‖ − ‖d‖)² + ‖u‖² = ‖ω‖².

`rms_update` is the length of one step's Δ, `rms_diffusion` that of u; both over the norm are rotations. Five rules:

| | ‖Δ‖²/η² | ‖u‖²/η² | d |
|---|---|---|---|
| SGDM, m ← αm + g + λω | E‖g‖²/(1 − α²) | E‖g‖²/(1 − α)² | ηλω/(1 − α) |
| AdamW | C·(1 − β₁)/(1 + β₁) | C | ηλω |
| Adam + ℓ₂ | C·(1 − β₁)/(1 + β₁) | C | ηλω/√v, by coordinate |
| Lion, sign of n = β₁m + (1 − β₁)g | C | C·a²/γ | ηλω |
| Muon, polar factor of n | S² | S²·a²/γ | ηλω |

γ = (1 − β₁)² + β₁²·(1 − β₂)/(1 + β₂) is E‖n‖²/E‖g‖², since n gives a gradient the weights 1 − β₁, β₁(1 − β₂),
β₁(1 − β₂)β₂, …, which sum to 1; a is the cosine between n and what is made of it, and a²/γ what of that is along g's
total contribution. Lion's n is a row of signs, a = ‖n‖₁/(√C·‖n‖₂); Muon's a matrix, a = ‖n‖_*/(√r·‖n‖_F).

Here: predictions. Not here: what is measured on a run (`rotation`), what holds it there (`transforms.rotational`).
Reference: Kosson, Messmer and Jaggi, "Rotational Equilibrium" (ICML 2024).
"""

import math
from typing import Any, NamedTuple

import numpy as np

from gauge_optax.binding import binding_error
from gauge_optax.checks import require_choice

Number = Any
"""A float, or arrays that broadcast: of neurons, of steps."""

KINDS = ("sgdm", "adamw", "adam_l2", "lion", "muon")
DECOUPLED = ("adamw", "lion", "muon")
_B1 = {"sgdm": 0.9, "adamw": 0.9, "adam_l2": 0.9, "lion": 0.9, "muon": 0.95}


class Equilibrium(NamedTuple):
    """A weight vector's steady state.

    Attributes:
      norm: √E‖ω‖².
      rms_update: √E‖Δω‖² of one step's gradient part: η_g; of any parameter of this size, a bias too.
      rotation: rms_update / norm: η_r, radians a step.
      rms_diffusion: √E‖u‖², what one gradient moves in all: how far steps go that follow each other.
      rotational_diffusion: rms_diffusion / norm.
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
    r"""Table 1 and Table 6: norm, step and rotation of a scale-invariant weight vector in a random walk.

    Args:
      kind: "sgdm", "adamw", "adam_l2" (Adam on the gradient plus λω), "lion" or "muon".
      learning_rate: η.
      weight_decay: λ, multiplied by η in a step.
      b1: momentum: α of SGDM, β₁ of the rest, Muon's β; by default 0.9, of Muon 0.95.
      b2: Lion's second momentum. Adam's does not matter here.
      dim: entries C of the vector; not for SGDM.
      gradient_norm: √E‖g̃‖², of the gradient at weights of norm 1, g̃ = ‖ω‖·g: SGDM, and Adam + ℓ₂.
      gradient_roots: Σᵢ √E g̃ᵢ² for Adam + ℓ₂; by default √C·gradient_norm, as if all entries had one variance.
      sign_alignment: the cosine a between n and its sign (Lion) or its polar factor (Muon); by default √(2/π), of
        entries with one variance, and for Muon a Gaussian matrix's of this `shape`.
      shape: (rows, columns) of Muon's matrix; the vector is the whole matrix.
      update_norm: Frobenius norm S of Muon's update before η; by default √min(rows, columns), a polar factor's.
      nesterov: whether Muon's n has it.
      second_order: whether to keep the term λ²η² of decay, Eq. (18); Table 1 leaves it out.

    Returns:
      The steady state. All arguments broadcast.

    Raises:
      ValueError: an unknown kind; an argument that this kind needs is not there.

    >>> found = go.measure.predict_equilibrium("adamw", learning_rate=1.25e-2, weight_decay=8e-2, dim=128)
    >>> round(float(found.norm), 3), round(float(found.rotation), 5)
    (3.162, 0.01026)

    In slice coordinates a gauge's anchor is held: it does not grow by noise, its norm is the one at `init`, and decay
    goes to its partner. Predictions are then for the partner, and for vectors that no gauge binds.

    Reference: Kosson et al., Table 1 and 6. Deviations: Table 6 prints SGDM's rotation as √(2ηλ/(1 − α)), which is the
      diffusion below it; by its own definition it is Table 1's √(2ηλ/(1 + α)). Eq. (68), (69) and (72) have one η in
      E‖u‖² where their Eq. (67) gives η²; Eq. (73) is right again. Muon is not in the paper; the derivation is Lion's,
      with the polar factor in place of the sign. That its updates have one norm, and so its weights a resting norm, is
      said by Liu et al., "Muon is Scalable" (2502.16982), and in work since (Hägele et al. 2606.25971, Lion et al.
      2605.10797).
    """
    require_choice("predict_equilibrium", "kind", kind, KINDS)
    b1 = _B1[kind] if b1 is None else b1
    lr, decay = learning_rate, weight_decay
    if kind == "sgdm":
        gradient = _needed(kind, "gradient_norm", gradient_norm)
        left = 2 * decay * (1 - b1) - (lr * decay**2 if second_order else 0.0)
        norm = (lr * gradient**2 / left) ** 0.25
        step, total = lr * gradient / norm / (1 - b1**2) ** 0.5, lr * gradient / norm / (1 - b1)
        return _equilibrium(norm, step, total)
    if kind == "adam_l2":
        dim = _needed(kind, "dim", dim)
        if gradient_roots is None:
            gradient_roots = dim**0.5 * _needed(kind, "gradient_norm", gradient_norm)
        norm = (lr / (2 * decay) * gradient_roots) ** (1 / 3)
        return _equilibrium(norm, lr * (dim * (1 - b1) / (1 + b1)) ** 0.5, lr * dim**0.5)
    step, total = _step_and_total(kind, b1, b2, dim, sign_alignment, shape, update_norm, nesterov)
    left = 2 * decay - (lr * decay**2 if second_order else 0.0)
    return _equilibrium((lr / left) ** 0.5 * total, lr * step, lr * total)


def _equilibrium(norm: Number, step: Number, total: Number) -> Equilibrium:
    return Equilibrium(norm, step, step / norm, total, total / norm)


def _step_and_total(
    kind: str, b1: Number, b2: Number, dim: Any, alignment: Any, shape: Any, size: Any, nesterov: bool
) -> tuple[Number, Number]:
    """‖Δ‖/η and ‖u‖/η of rules whose decay is apart."""
    if kind == "adamw":
        dim = _needed(kind, "dim", dim)
        return (dim * (1 - b1) / (1 + b1)) ** 0.5, dim**0.5
    if kind == "lion":
        size = _needed(kind, "dim", dim) ** 0.5
        alignment = math.sqrt(2 / math.pi) if alignment is None else alignment
        return size, size * alignment / _momentum_variance(b1, b2) ** 0.5
    rows, columns = _needed(kind, "shape", shape)
    size = min(rows, columns) ** 0.5 if size is None else size
    alignment = polar_alignment(rows, columns) if alignment is None else alignment
    # m of momentum β has the weights of Lion's n with β₁ = β₂ = β; β·m + (1 − β)·g those with β₁ = β².
    return size, size * alignment / _momentum_variance(b1**2 if nesterov else b1, b1) ** 0.5


def _momentum_variance(b1: Number, b2: Number) -> Number:
    return (1 - b1) ** 2 + b1**2 * (1 - b2) / (1 + b2)


def _needed(kind: str, argument: str, value: Any) -> Any:
    if value is None:
        raise binding_error(
            "predict_equilibrium", f"'{kind}' without {argument}", f"{argument}=None", "a number",
            f"give {argument}: see the argument's line in the docstring",
        )  # fmt: skip
    return value


def polar_alignment(rows: int, columns: int) -> float:
    """‖X‖_*/(√r·‖X‖_F) of a large Gaussian matrix, r its smaller side: from the Marchenko–Pastur law.

    >>> from gauge_optax.measure.equilibrium import polar_alignment
    >>> round(polar_alignment(64, 64), 4)  # 8/(3π)
    0.8488
    """
    ratio = min(rows, columns) / max(rows, columns)
    low, high = (1 - ratio**0.5) ** 2, (1 + ratio**0.5) ** 2
    # By x = mid + half·cos: the density's roots at both ends become sines.
    angle = (np.arange(4096) + 0.5) * np.pi / 4096
    x = (low + high) / 2 + (high - low) / 2 * np.cos(angle)
    weights = (high - low) ** 2 / 4 * np.sin(angle) ** 2 / (2 * np.pi * ratio * x)
    return float(np.sum(np.sqrt(x) * weights) / np.sum(weights))


def predict_norm(
    kind: str, steps: Number, start: Number, *, learning_rate: Number, weight_decay: Number, **more: Any
) -> Number:
    r"""The norm on its way to equilibrium: Eq. (16).

    .. math::
      E\lVert\omega_t\rVert^p = a^t \lVert\omega_0\rVert^p + (1 - a^t)\,\hat{\lVert\omega\rVert}^p

    with p = 2, a = (1 − ηλ)² for AdamW, Lion and Muon; with p = 4 and (1 − ηλ/(1 − α))⁴ for SGDM, whose gradient falls
    as the weights grow.

    Args:
      kind: "sgdm", "adamw", "lion" or "muon".
      steps: t.
      start: ‖ω₀‖.
      learning_rate: η.
      weight_decay: λ.
      more: what `predict_equilibrium` takes for this kind.

    Returns:
      √E‖ω_t‖², as if a gradient's whole contribution came at once: good where the norm changes slowly beside momentum.

    Raises:
      ValueError: Adam + ℓ₂, whose decay depends on the gradient and has no closed form; as `predict_equilibrium`.

    >>> args = {"learning_rate": 1e-2, "weight_decay": 0.1, "dim": 100}
    >>> found = go.measure.predict_norm("adamw", np.array([0, 500, 100_000]), 1.0, **args)
    >>> found.round(3).tolist()
    [1.0, 1.879, 2.237]

    Reference: Kosson et al., Eq. (13) to (18) for AdamW; the same recurrence for the others.
    """
    require_choice("predict_norm", "kind", kind, tuple(k for k in KINDS if k != "adam_l2"))
    rest = predict_equilibrium(
        kind, learning_rate=learning_rate, weight_decay=weight_decay, second_order=kind in DECOUPLED, **more
    )
    power, kept = 2, 1 - learning_rate * weight_decay
    if kind == "sgdm":
        power, kept = 4, 1 - learning_rate * weight_decay / (1 - more.get("b1", _B1[kind]))
    share = kept ** (power * steps)
    return (share * start**power + (1 - share) * rest.norm**power) ** (1 / power)


def effective_decay(weight_decay: Number, weights: Any, gradient: Any, axes: Any = None) -> Number:
    """λ_e = λ + ⟨ω, g⟩/‖ω‖²: decay, and what of the gradient acts as decay.

    Args:
      weight_decay: λ.
      weights: vectors ω.
      gradient: g there; of SGDM the gradient itself, of another rule what it makes of a gradient before η: g/√v.
      axes: what one vector takes up; None for everything.

    Returns:
      One per vector. Predictions for weights that are not scale-invariant take it in place of λ.

    >>> round(float(go.measure.effective_decay(0.1, jnp.array([3.0, 4.0]), jnp.array([0.0, -0.25]))), 3)
    0.06

    Reference: Kosson et al., §3.4 and Eq. (101).
    """
    return weight_decay + (weights * gradient).sum(axes) / (weights * weights).sum(axes)


def corrected(found: Equilibrium, *, decay_ratio: Number = 1.0, gradient_square: Number = 1.0) -> Equilibrium:
    """A prediction where two of its assumptions do not hold.

    Args:
      found: of `predict_equilibrium`, for AdamW, Lion or Muon.
      decay_ratio: λ_err = λ_e/λ, see `effective_decay`.
      gradient_square: C_err = E‖g/√v‖²/C, 1 if v is what g² is on average.

    Returns:
      Norm over √λ_err and times √C_err, rotation times √λ_err; a step grows with √C_err, the rotation does not.

    >>> plain = go.measure.predict_equilibrium("adamw", learning_rate=0.01, weight_decay=0.1, dim=100)
    >>> round(float(go.measure.corrected(plain, decay_ratio=0.25).norm / plain.norm), 3)
    2.0

    Reference: Kosson et al., Eq. (96) to (98). Deviation: C_err is there defined by E‖g/√v‖; what the derivation uses
      is its square.
    """
    size, turn = gradient_square**0.5, decay_ratio**0.5
    return Equilibrium(
        found.norm * size / turn,
        found.rms_update * size,
        found.rotation * turn,
        found.rms_diffusion * size,
        found.rotational_diffusion * turn,
    )
