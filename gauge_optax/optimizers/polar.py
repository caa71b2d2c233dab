"""Muon's step of a matrix: the polar factor of its first moment, times one invariant number per matrix.

Here: which leaves are matrices, and scales of a polar factor. Not here: the iteration (`linalg.polar`), the momentum
(`muon`, `ddc`). References: DDC B.10, Table 1; Jordan et al. 2024 (Muon).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import binding_error, leaves_by_path
from gauge_optax.binding.paths import match, nearest
from gauge_optax.gauges.matrices import Matrices, matrices_of, matrix
from gauge_optax.linalg import Coefficients, Schedule, ns_schedule, polar
from gauge_optax.slice import Slice
from gauge_optax.transformation import require_choice

Arrays = dict[str, jax.Array]
Scalar = float | jax.Array
Labels = Mapping[str, str] | None
SCALES = ("width", "rms", "none")


class PolarOptions(NamedTuple):
    """How matrices are stepped.

    Attributes:
      beta: decay of first moments.
      eps: added to ‖M‖_F in the normalisation.
      schedule: the polynomials of the Newton–Schulz iteration, one per step.
      scale: "width", "rms", "none", or the RMS of a step.
    """

    beta: Scalar
    eps: Scalar
    schedule: Schedule
    scale: str | Scalar


def polar_steps(options: PolarOptions, matrices: Mapping[str, Matrices], mean: Mapping[str, jax.Array]) -> Arrays:
    """C·P per leaf, P the polar factor of every matrix of a first moment.

    Args:
      options: the settings.
      matrices: how each leaf is read.
      mean: bias-corrected first moments.

    Returns:
      The leaves; zero where the moment is zero.
    """
    return {
        path: own.leaf(scaled_polar(options, (own.fan_in, own.fan_out), own.view(mean[path])))
        for path, own in matrices.items()
    }


def scaled_polar(options: PolarOptions, fans: tuple[int, int], m: jax.Array) -> jax.Array:
    """C·P of matrices (…, rows, columns) with these numbers of inputs and outputs."""
    factor = polar(m, options.schedule, eps=options.eps)
    fan_in, fan_out = fans
    if not isinstance(options.scale, str):
        return options.scale * math.sqrt(max(fan_in, fan_out)) * factor
    if options.scale == "width":
        return math.sqrt(max(1.0, fan_out / fan_in)) * factor
    if options.scale == "rms":
        return jnp.linalg.norm(m, axis=(-2, -1), keepdims=True) / math.sqrt(min(fan_in, fan_out)) * factor
    return factor


def polar_options(
    name: str, ns_coeffs: Coefficients, ns_steps: int | None, beta: Scalar, eps: Scalar, scale: str | Scalar
) -> PolarOptions:
    """The settings of matrices, checked on behalf of the transformation `name`."""
    if isinstance(scale, str):
        require_choice(name, "scale", scale, SCALES)
    if isinstance(ns_steps, jax.Array):
        raise binding_error(
            name, "ns_steps is traced", "an array", "a Python integer",
            'write inject_hyperparams(..., static_args=("ns_steps",)), or give ns_coeffs one tuple per step',
        )  # fmt: skip
    return PolarOptions(beta, eps, ns_schedule(ns_coeffs, 5 if ns_steps is None else ns_steps), scale)


@dataclasses.dataclass(frozen=True)
class Routing:
    """Which leaves are stepped by their polar factor.

    Attributes:
      labels: what the user wrote, in order.
      rotations_alone: whether only leaves that a rotation binds are matrices where no label says more.
    """

    labels: tuple[tuple[str, str], ...]
    rotations_alone: bool = False

    @classmethod
    def of(cls, labels: Labels, rotations_alone: bool = False) -> "Routing":
        """The routing with these labels. Raises ValueError for a label that is neither "muon" nor "adam"."""
        chosen = tuple((labels or {}).items())
        for pattern, label in chosen:
            if label not in ("muon", "adam"):
                raise binding_error(
                    "scale_by_scaled_polar", f"bad label of '{pattern}'", repr(label), "'muon' or 'adam'",
                    f"write labels={{{pattern!r}: 'adam'}}",
                )  # fmt: skip
        return cls(chosen, rotations_alone)

    def matrices(self, s: Slice, params: optax.Params) -> dict[str, Matrices]:
        """Leaf path → how it is read, for the leaves stepped by their polar factor."""
        leaves, read = leaves_by_path(params), matrices_of(s.instances)
        shifted = {path for i in s.instances if i.effect == "shift" for path in i.paths}
        turned = {path for turn in s.turns for path in turn.paths}
        # An unembedding, though bound as a matrix, is Adam's, as Muon's authors have it.
        chosen = {path: path in read and path not in shifted for path in leaves}
        if self.rotations_alone:
            chosen = {path: muon and path in turned for path, muon in chosen.items()}
        for pattern, label in self.labels:
            hits = [path for path in leaves if match("scale_by_scaled_polar", pattern, path) is not None]
            if not hits:
                raise _unmatched(pattern, {path: leaf.shape for path, leaf in leaves.items()})
            chosen |= dict.fromkeys(hits, label == "muon")
        shapes = {path: leaves[path].shape for path, muon in chosen.items() if muon}
        vectors = turned | {path for i in s.instances if i.log_step and i.sides for path in i.paths}
        return {p: read.get(p) or _lone(p, shape, p in vectors) for p, shape in shapes.items()}


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


class Polar(NamedTuple):
    """How matrices are stepped where they are not Adam's.

    Attributes:
      options: of the polar factor.
      routing: which leaves are matrices.
    """

    options: PolarOptions
    routing: Routing


def polar_of(
    name: str,
    ns_coeffs: Coefficients,
    ns_steps: int | None,
    beta: Scalar,
    eps: Scalar,
    scale: str | Scalar,
    labels: Labels,
    preset: str | None,
) -> Polar:
    """The settings of matrices and their routing, with DDC's own under the preset "paper"."""
    if preset is None:
        return Polar(polar_options(name, ns_coeffs, ns_steps, beta, eps, scale), Routing.of(labels))
    require_choice(name, "preset", preset, ("paper",))
    if scale != "width":
        raise _two_scales(name, f"preset='paper' and scale={scale!r}", "drop scale, or the preset")
    return Polar(polar_options(name, ns_coeffs, ns_steps, beta, eps, "rms"), Routing.of(labels, rotations_alone=True))


def rms_alone(name: str, consistent_rms: Scalar, scale: str | Scalar) -> Scalar:
    """The number that optax calls `consistent_rms`, as a scale; raises ValueError beside another scale."""
    if scale != "width":
        found = f"consistent_rms={consistent_rms!r} and scale={scale!r}"
        raise _two_scales(name, found, f"write scale={consistent_rms!r}")
    return consistent_rms


def _two_scales(name: str, found: str, remedy: str) -> ValueError:
    return binding_error(name, "two scales", found, "one of them", remedy)
