"""Muon on the quotient: the polar factor of a matrix's first moment, in the frame.

Muon replaces a momentum M = UΣVᵀ by its polar factor UVᵀ. A rotation M ↦ M·R carries over, UVᵀ ↦ UVᵀ·R, so attention
heads get theirs head by head. A rescale M ↦ M·D does not: the spectrum it changes is what Muon throws away (DDC §6,
Table 7). In the frame there is nothing left to change. There the gradient of a scaled leaf, times the ρ of its
channels, is an invariant matrix; its polar factor, times ρ, is the tangential step, and the channels' joint scales move
by scalar Adam as under `scale_by_ddc`.

Vectors, embeddings and heads get Adam in the frame. Steps are projected again: the polar factor of a horizontal moment
is not horizontal.

References: DDC §3.1, B.10, C.14 (DDC-Muon); Jordan et al. 2024 (Muon).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax

from gauge_optax._paths import match, nearest
from gauge_optax.binding import binding_error, is_empty, leaves_by_path
from gauge_optax.gauges._matrices import Matrices, matrices_of, matrix
from gauge_optax.gauges._split import Bound
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import product
from gauge_optax.linalg import Coefficients, ns_schedule
from gauge_optax.transforms._common import in_dtype_of, require_choice, require_params
from gauge_optax.transforms._pass import bare, take_step, tangents
from gauge_optax.transforms._polar import SCALES, PolarOptions
from gauge_optax.transforms._state import FramedState, Method, Options, init_state
from gauge_optax.transforms.retract import RADIAL, VERTICAL

Scalar = float | jax.Array
Labels = Mapping[str, str] | None


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
    adam_b1: Scalar = 0.9,
    adam_b2: Scalar = 0.999,
    adam_eps_root: Scalar = 0.0,
    vertical: str = "frozen",
    radial: str = "linear",
    radial_scale: Scalar = 1.0,
    refresh_drift: Scalar = 0.1,
    refresh_every: int | jax.Array | None = None,
    reproject: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Muon in the frame of a product of gauges for matrices, Adam in the frame for everything else.

    Matrices are the leaves of rotations, rescales and norms' consumers that are no vectors and in no `logit_shift`:
    one matrix per head where a rotation binds the leaf, else channels on one side and free axes on the other.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.
      ns_coeffs: polynomials of the Newton–Schulz iteration: a preset ("standard", "dion", "polar_express", "sharp"),
        one tuple of coefficients, or a tuple of such tuples.
      ns_steps: how often a single polynomial is applied; 5 by default. Not to be traced.
      beta: decay of the first moment of matrices.
      eps: added to ‖M‖_F where a moment is normalised, and to √v̂ of Adam.
      mu_dtype: dtype of the first moment; by default the parameters', at least float32.
      nesterov: whether to use Nesterov momentum, for matrices and vectors alike.
      scale: what multiplies a polar factor. "width": √max(1, outputs/inputs), as `optax.contrib.muon` does by default;
        "rms": ‖M‖_F/√rank, the size of the moment (DDC B.10); "none": 1; a number: √max(inputs, outputs) times it, so
        that it is the RMS of the step (`consistent_rms` of optax).
      labels: path pattern → "muon" or "adam", where the rule above should not hold. Later patterns win.
      adam_b1: decay of Adam's first moments.
      adam_b2: decay of Adam's second moments.
      adam_eps_root: added to v̂ inside the root.
      vertical: see `scale_by_ddc`.
      radial: see `scale_by_ddc`.
      radial_scale: see `scale_by_ddc`.
      refresh_drift: see `scale_by_ddc`; the eigenbases serve the projection alone.
      refresh_every: see `scale_by_ddc`.
      reproject: whether the step is projected again after the polar factor.

    Returns:
      A transformation of gradients (cotangents) into a tangent, to be scaled by the learning rate and finished by
      `gauge_retract`. In its state, `nu` has an `optax.MaskedNode` for every matrix, as `optax.contrib.muon`'s.

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

    Reference: DDC B.10. Deviations: its scale ‖M‖_F/√rank is a choice, because steps as small as the gradient make
      Muon's learning rates useless (a small Llama on text, 300 steps, rates 0.005 to 0.05, one seed: validation loss
      2.34 to 2.38, 1.85 to 2.01 with "width"); projected after the polar factor as well as before; rescales are
      admitted, in the frame.
    """
    options, polar = polar_method(
        ns_coeffs, ns_steps, beta, eps, mu_dtype, nesterov, scale, adam_b1, adam_b2, adam_eps_root, vertical, radial,
        radial_scale, refresh_drift, refresh_every, reproject,
    )  # fmt: skip
    group, routing = product(gauges), Routing.of(labels)

    def init_fn(params: optax.Params) -> FramedState:
        polar_leaves = {} if is_empty(params) else routing.matrices(group.bound(params), params)
        return init_state("scale_by_scaled_polar", group, params, options, polar_leaves)

    def update_fn(
        updates: optax.Updates, state: FramedState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, FramedState]:
        del extra
        require_params("scale_by_scaled_polar", params)
        bound = group.bound(params)
        matrices = routing.matrices(bound, params)
        step = take_step(bound, params, updates, state, Method(options, polar), matrices, lambda _: (bare, ()))
        return in_dtype_of(updates, tangents(step)), step.state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def polar_method(
    ns_coeffs: Coefficients,
    ns_steps: int | None,
    beta: Scalar,
    eps: Scalar,
    mu_dtype: Any,
    nesterov: bool,
    scale: str | Scalar,
    b1: Scalar,
    b2: Scalar,
    eps_root: Scalar,
    vertical: str,
    radial: str,
    radial_scale: Scalar,
    refresh_drift: Scalar,
    refresh_every: int | jax.Array | None,
    reproject: bool,
) -> tuple[Options, PolarOptions]:
    """The settings of `scale_by_scaled_polar`, checked."""
    require_choice("scale_by_scaled_polar", "vertical", vertical, VERTICAL)
    require_choice("scale_by_scaled_polar", "radial", radial, RADIAL)
    polar = polar_options(ns_coeffs, ns_steps, beta, eps, scale)
    # Rotated vectors (biases of queries, keys and values) have one variance per head: no frames are kept for them.
    options = Options(
        b1, b2, eps, eps_root, mu_dtype, nesterov, vertical, "per_head_scalar", radial, radial_scale,
        1e-3, refresh_drift, refresh_every, None, reproject,
    )  # fmt: skip
    return options, polar


def polar_options(
    ns_coeffs: Coefficients, ns_steps: int | None, beta: Scalar, eps: Scalar, scale: str | Scalar
) -> PolarOptions:
    """The settings of matrices alone, checked."""
    if isinstance(scale, str):
        require_choice("scale_by_scaled_polar", "scale", scale, SCALES)
    if isinstance(ns_steps, jax.Array):
        raise binding_error(
            "scale_by_scaled_polar", "ns_steps is traced", "an array", "a Python integer",
            'write inject_hyperparams(..., static_args=("ns_steps",)), or give ns_coeffs one tuple per step',
        )  # fmt: skip
    return PolarOptions(beta, eps, ns_schedule(ns_coeffs, 5 if ns_steps is None else ns_steps), scale)


def rms_alone(name: str, consistent_rms: Scalar, scale: str | Scalar) -> Scalar:
    """The number that optax calls `consistent_rms`, as a scale; raises ValueError beside another scale."""
    if scale != "width":
        raise binding_error(
            name, "two scales", f"consistent_rms={consistent_rms!r} and scale={scale!r}", "one of them",
            f"write scale={consistent_rms!r}",
        )  # fmt: skip
    return consistent_rms


@dataclasses.dataclass(frozen=True)
class Routing:
    """Which leaves are stepped by their polar factor.

    Attributes:
      labels: what the user wrote, in order.
    """

    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, labels: Labels) -> "Routing":
        """The routing with these labels. Raises ValueError for a label that is neither "muon" nor "adam"."""
        chosen = tuple((labels or {}).items())
        for pattern, label in chosen:
            if label not in ("muon", "adam"):
                raise binding_error(
                    "scale_by_scaled_polar", f"bad label of '{pattern}'", repr(label), "'muon' or 'adam'",
                    f"write labels={{{pattern!r}: 'adam'}}",
                )  # fmt: skip
        return cls(chosen)

    def matrices(self, bound: Bound, params: optax.Params) -> dict[str, Matrices]:
        """Leaf path → how it is read, for the leaves stepped by their polar factor."""
        leaves, read = leaves_by_path(params), matrices_of(bound)
        shifted = {block.path for block in bound.shift_blocks}
        chosen = {path: path in read and path not in shifted for path in leaves}
        for pattern, label in self.labels:
            hits = [path for path in leaves if match("scale_by_scaled_polar", pattern, path) is not None]
            if not hits:
                raise _unmatched(pattern, {path: leaf.shape for path, leaf in leaves.items()})
            chosen |= dict.fromkeys(hits, label == "muon")
        on = {path: leaves[path].shape for path, muon in chosen.items() if muon}
        vectors = bound.turned | {p for i in bound.scales if i.down for p in i.paths}
        return {p: read.get(p) or _lone(p, shape, p in vectors) for p, shape in on.items()}


def _lone(path: str, shape: tuple[int, ...], vector: bool) -> Matrices:
    if len(shape) == 2 and not vector:
        return matrix((shape[0], shape[1]))
    raise binding_error(
        "scale_by_scaled_polar", f"'{path}' is labelled muon",
        f"shape {shape}, {'vectors to its gauges' if vector else 'in no gauge that names its axes'}",
        "a matrix, or a leaf of a rotation, rescale or norm",
        "label it adam" if vector else "label it adam, or bind it",
    )  # fmt: skip


def _unmatched(pattern: str, shapes: Mapping[str, tuple[int, ...]]) -> ValueError:
    near = nearest(pattern, shapes, 2)
    return binding_error(
        "scale_by_scaled_polar", f"no leaf matches the label '{pattern}'",
        "nearest " + ", ".join(path for path, _ in near) if near else "no leaves",
        "a pattern of at least one leaf", f"write '{near[0][1]}'" if near else "drop the label",
    )  # fmt: skip
