"""Muon's step of a matrix: the polar factor of its first moment, times one number per matrix that is equal for twins.

The gauges' bindings decide which leaves are matrices, unless the user's labels decide otherwise.
References: DDC B.10, Table 1; Jordan et al. 2024 (Muon).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import (
    Axes,
    Block,
    BlockSpec,
    bind_leaf,
    frozen_sizes,
    in_single_or_better,
    leaves_by_path,
    overlap,
)
from gauge_optax.binding.axes import parse_axes
from gauge_optax.binding.paths import match, nearest
from gauge_optax.binding.specs import Sizes
from gauge_optax.errors import binding_error
from gauge_optax.linalg import Coefficients, Schedule, ns_schedule, polar, unit_and_size
from gauge_optax.optimizers.sides import channel_sides
from gauge_optax.parts.constants import Logits
from gauge_optax.parts.matrices import (
    Fused,
    Matrices,
    Reading,
    cuts_of,
    labelled_matrices,
    matrices_of,
    matrix,
    uncovered,
)
from gauge_optax.parts.part import Part, changed
from gauge_optax.slice import Slice
from gauge_optax.transformation import require_choice, require_count, require_moments, require_number

Scalar = float | jax.Array
Labels = Mapping[str, Axes] | None
SCALES = ("width", "rms", "none")


@functools.singledispatch
def is_output_layer(part: Part[Any]) -> bool:
    """Whether the leaves of a part are the output layer, which Muon leaves to Adam."""
    return False


@is_output_layer.register
def _logits_are(part: Logits) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Polar:
    """Settings: which leaves are stepped by their polar factor, and how.

    Attributes:
      name: name of the public function, for messages.
      beta: decay of first moments.
      eps: a first moment M is divided by its largest entry, and then by its Frobenius norm plus eps. Steps therefore do
        not depend on the size of gradients.
      schedule: the polynomials of the Newton–Schulz iteration, one per step of the iteration.
      scale: "width", "rms" or "none", see `scale_by_scaled_polar`; or a number, the RMS of a step.
      labels: the user's pairs of a path pattern and a label, in order. A label is "muon", "adam", or one or more axes
        strings.
      sizes: pairs of a name and a length, for axes in labels whose lengths do not follow from a leaf's shape.
      rotations_alone: if True, a leaf without a label is a matrix only if a rotation binds it.
    """

    name: str
    beta: Scalar
    eps: Scalar
    schedule: Schedule
    scale: str | Scalar
    labels: tuple[tuple[str, Axes], ...]
    sizes: Sizes
    rotations_alone: bool

    def matrices(self, s: Slice, params: optax.Params) -> dict[str, Reading]:
        """Returns leaf path → which matrices it holds, for the leaves that are stepped by their polar factor.

        Raises ValueError for a label that matches no leaf; for a leaf that is labelled "muon" but is no matrix; for
        axes that do not fit a leaf, describe no matrices, or contradict a rotation; and for a leaf with entries that
        gauges and labels together put into no matrix, or into two.
        """
        leaves, read = leaves_by_path(params), matrices_of(s.parts)
        rotated = {path: [b for turn in s.heads for b in turn.blocks if b.path == path]
                   for turn in s.heads for path in turn.paths}
        if self.rotations_alone:  # of a fused leaf, only the ranges that rotations bind are matrices
            read |= matrices_of(s.heads)
        # A logit shift binds the unembedding, which Muon's authors leave to Adam although it is a matrix.
        muon = read.keys() - {path for part in s.parts if is_output_layer(part) for path in changed(part)}
        if self.rotations_alone:
            muon &= rotated.keys()
        for pattern, label in self.labels:
            hits = {path for path in leaves if match(self.name, pattern, path) is not None}
            if not hits:
                near = nearest(pattern, {path: leaf.shape for path, leaf in leaves.items()}, 2)
                raise binding_error(
                    self.name, f"no leaf matches the label '{pattern}'",
                    "nearest " + ", ".join(path for path, _ in near) if near else "no leaves",
                    "a pattern of at least one leaf", f"write '{near[0][1]}'" if near else "drop the label",
                )
            muon = muon - hits if label == "adam" else muon | hits
            for path in sorted(hits) if _is_axes(label) else ():
                own = [self._labelled(pattern, axes, path, leaves[path].shape, rotated.get(path, []))
                       for axes in (label if isinstance(label, tuple) else (label,))]
                # If gauges describe matrices in ranges of a leaf, a label replaces those whose ranges it overlaps.
                blocks = [piece.block for piece in own if piece.block]
                of_gauges = read[path].pieces if path in read and len(blocks) == len(own) else ()
                others = [x for x in of_gauges if x.block and not any(overlap(x.block, other) for other in blocks)]
                read[path] = own[0] if len(own + others) == 1 else Fused((*own, *others))
        vectors = rotated_or_scaled(s)
        for path in (path for path in leaves if path in muon and path not in read):
            shape, vector = leaves[path].shape, path in vectors
            if len(shape) != 2 or vector:
                raise binding_error(
                    self.name, f"'{path}' is labelled muon",
                    f"shape {shape}, {'vectors to its gauges' if vector else 'in no gauge that names its axes'}",
                    "a matrix, or a leaf of a rotation, rescale or norm",
                    f"write labels={{'{path}': 'adam'}}" + ", or list it in a gauge" * (not vector),
                )
            read[path] = matrix(shape)
        for path in (path for path in leaves if path in muon):
            if rest := uncovered(read[path], leaves[path].shape):
                ranges = [f'"{piece.block.axes}"' for piece in read[path].pieces if piece.block is not None]
                beside = f"{abs(rest)} of {math.prod(leaves[path].shape)} entries in {'none' if rest > 0 else 'two'}"
                raise binding_error(
                    self.name, f"nothing says which matrices '{path}' holds beside its ranges",
                    f"{beside} of {', '.join(ranges) or 'its ranges'}",
                    "every entry of a fused kernel in one range of a gauge or of a label",
                    f"label {'the other entries' if rest > 0 else 'every entry once'}, "
                    f"labels={{'{path}': {_open_ranges(read[path], leaves[path].shape)}}} if each range is one matrix; "
                    "or bind them, or label it adam",
                )
        return {path: read[path] for path in leaves if path in muon}

    def _labelled(
        self, pattern: str, axes: str, path: str, shape: tuple[int, ...], turns: Sequence[Block]
    ) -> Matrices:
        """Returns the matrices that the user's axes describe in a leaf, or in a range of it."""
        block = bind_leaf(self.name, BlockSpec("labels", pattern, axes), path, shape, dict(self.sizes), "sizes")
        # A rotation decides which matrices its entries form, so that a label may not contain any of these entries.
        rotated = turns and (not any(cuts_of(block)) or any(overlap(block, turn) for turn in turns))
        reading = None if rotated else labelled_matrices(block)
        if reading is None:
            raise binding_error(
                self.name, f"the label of '{path}' describes no matrices",
                f'"{axes}" for shape {shape}' + (", and a rotation that binds the leaf" if rotated else ""),
                "'_' in two axes of a leaf that no rotation binds, for rows and columns, and names that count matrices",
                "drop the label: rotations say which matrices there are; label only ranges that no rotation binds"
                if rotated else
                'write for example "_ head _", or "_ (head _)" and sizes={"head": 12}',
            )
        return reading

    def steps(self, matrices: Mapping[str, Reading], mean: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns leaf path → the scaled polar factors of its matrices, in the leaf's shape; zero for a zero moment.

        Args:
          matrices: leaf path → which matrices it holds.
          mean: leaf path → bias-corrected first moment.
        """
        steps = dict(mean)
        for path, stack in ((path, piece) for path, reading in matrices.items() for piece in reading.pieces):
            moment, inputs, outputs = stack.view(mean[path]), stack.fan_in, stack.fan_out
            m, size = unit_and_size(in_single_or_better(moment), (-2, -1))
            factor = polar(m, self.schedule, eps=self.eps)
            if not isinstance(self.scale, str):
                # The RMS of a polar factor is 1/√max(inputs, outputs).
                factor = self.scale * math.sqrt(max(inputs, outputs)) * factor
            elif self.scale == "width":
                factor = math.sqrt(max(1.0, outputs / inputs)) * factor
            elif self.scale == "rms":
                # A polar factor has the Frobenius norm √rank. The step gets the norm of the moment (B.10).
                norm = size * jnp.linalg.norm(m, axis=(-2, -1), keepdims=True)
                factor = norm / math.sqrt(min(inputs, outputs)) * factor
            steps[path] = stack.write(steps[path], factor)
        return {path: steps[path] for path in matrices}


def _open_ranges(reading: Reading, shape: Sequence[int]) -> str:
    """A label, for a message, of the ranges of a matrix that no piece of its reading covers.

    For a leaf that is no matrix cut along one axis, it is only an example of a label.
    """
    cuts = [(axis, cut) for piece in reading.pieces if piece.block
            for axis, cut in enumerate(cuts_of(piece.block)) if cut is not None]
    if len(shape) != 2 or len({axis for axis, _ in cuts}) != 1:
        return '("_ _=0:8", "_ _=8:12")'
    axis, spans = cuts[0][0], sorted(span for _, cut in cuts for span in cut)
    gaps = [(a, b) for (_, a), (b, _) in itertools.pairwise([(0, 0), *spans, (shape[axis], 0)]) if a < b]
    labels = [f'"_={a}:{b} _"' if axis == 0 else f'"_ _={a}:{b}"' for a, b in gaps]
    return labels[0] if len(labels) == 1 else f"({', '.join(labels)})" if labels else '("_ _=0:8", "_ _=8:12")'


def rotated_or_scaled(s: Slice) -> set[str]:
    """Returns the paths of the leaves that rotate with heads or that a scale with two sides multiplies.

    If such a leaf is not in `matrices_of`, it is a bias or a norm's scale, whatever its shape.
    """
    scales = {path for part in s.parts if channel_sides(part) is not None for path in changed(part)}
    return scales | {path for turn in s.heads for path in turn.paths}


def polar_of(
    name: str,
    ns_coeffs: Coefficients,
    ns_steps: int | None,
    beta: Scalar,
    eps: Scalar,
    scale: str | Scalar,
    labels: Labels,
    preset: str | None = None,
    consistent_rms: Scalar | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Polar:
    """Makes a `Polar` from the arguments that `scale_by_scaled_polar` and the aliases share.

    Raises ValueError, with the name of the transformation, for arguments that are unknown or contradict each other.
    """

    def two_scales(arguments: str, remedy: str) -> ValueError:
        return binding_error(name, "two scales", arguments, "one of them", remedy)

    require_moments(name, beta=beta, eps=eps)
    if consistent_rms is not None:
        if scale != "width":
            arguments = f"consistent_rms={consistent_rms!r} and scale={scale!r}"
            raise two_scales(arguments, f"write scale={consistent_rms!r}")
        scale = consistent_rms
    if preset is not None:
        require_choice(name, "preset", preset, ("paper",))
        if scale != "width":
            raise two_scales(f"preset='paper' and scale={scale!r}", "drop scale, or the preset")
        scale = "rms"
        # In B.10 the iteration brings singular values close to 1, as "sharp" does and "standard" does not.
        ns_coeffs = "sharp" if ns_coeffs == "standard" else ns_coeffs
    if isinstance(scale, str):
        require_choice(name, "scale", scale, SCALES)
    else:
        require_number(name, "scale", scale, "(0, inf)", "write scale=0.2 for the RMS of Adam's steps, or 'width'")
    if isinstance(ns_steps, jax.Array):
        raise binding_error(
            name, "ns_steps is traced", "an array", "a Python integer",
            'write inject_hyperparams(..., static_args=("ns_steps",)), or give ns_coeffs one tuple per step',
        )
    if ns_steps is not None:
        require_count(name, "ns_steps", ns_steps, 1)
    named: set[str] = set()
    for pattern, label in (labels or {}).items():
        if _is_axes(label):
            for axes in label if isinstance(label, tuple) else (label,):
                named |= {part.name for part in parse_axes(name, pattern, axes).items} - {"_"}
        elif label not in ("muon", "adam"):
            raise binding_error(
                name, f"bad label of '{pattern}'", repr(label), "'muon', 'adam', or axes such as '_ head _'",
                f"write labels={{{pattern!r}: 'adam'}}",
            )
    lengths = frozen_sizes(name, sizes)
    if unknown := [axis for axis, _ in lengths if axis not in named]:
        raise binding_error(
            name, f"unknown axis in sizes '{unknown[0]}'", f"named axes: {', '.join(sorted(named)) or 'none'}",
            "names that stand in the axes of a label", f"drop '{unknown[0]}' or correct it",
        )
    schedule = ns_schedule(ns_coeffs, 5 if ns_steps is None else ns_steps)
    return Polar(
        name, beta, eps, schedule, scale, tuple((labels or {}).items()), lengths,
        rotations_alone=preset is not None,
    )


def _is_axes(label: Any) -> bool:
    """Whether a label is an axes string, which has at least two axes, or a tuple of them."""
    several = label if isinstance(label, tuple) and label else (label,)
    return all(isinstance(axes, str) and " " in axes for axes in several)
