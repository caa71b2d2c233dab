"""Read shift: numbers that kernels gain and that a LayerNorm before them hides.

Before its scale γ and its bias β, a LayerNorm's output x̂ has the mean zero over channels. Let a kernel W read the norm,
and let u have one number per output of W. W ↦ W + γ⁻¹ ⊗ u then changes x̂·γ·W by Σ x̂·u = 0, a sum over channels. It
changes β·W by Σ(β/γ)·u, which is subtracted from the bias behind W. An element is one number per output of each kernel,
and elements compose by addition.

What `read` returns for a point is the mean of γ·W over channels. A norm behind a layer (BERT) has no `norm_scale`,
because the residual stream of the next layer depends on γ too. Then γ is trained like any weight, and the move is not
affine in W and γ together.

A kernel W in front of a trained scale γ has a similar move, if LayerNorms alone read the stream to which the product
x·W·γ is added. With one number per input in u, W ↦ W + u ⊗ γ⁻¹ adds x·u to all channels of the stream. The scale of a
layer (LayerScale) is such a γ.
Reference: docs/design.md §3, "What else is dead"; van Nierop, §4 (the plane that layer normalisation restricts to).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from gauge_optax.binding import Axes, Block, Matched
from gauge_optax.errors import binding_error
from gauge_optax.gauges.copies import Effect, part_label
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.shift import WriteShift
from gauge_optax.parts.constants import CHANNEL, ReadShift

READ, SCALE, BIAS, INTO = "read", "scale", "bias", "into"


def norm_read_shift(
    read: Mapping[str, Axes],
    scale: Mapping[str, Axes] | None = None,
    bias: Mapping[str, Axes] | None = None,
    into: Mapping[str, Axes] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
) -> BlockGauge:
    """A number per output, added to all channels of a kernel that reads a LayerNorm.

    Args:
      read: path → axes of kernels that read the norm; `channel` is the axis that the norm centres:
        `{"blocks/{i}/mlp/up/kernel": "channel _"}`. Or path → axes of kernels and biases whose sum is multiplied by a
        scale and then added to a stream that only LayerNorms read: `{"blocks/{i}/mlp/down/kernel": "_ channel"}`.
      scale: path → axes of the norm's scale, or of the scale behind such kernels, `"channel"` or `"1+ channel"`, if
        there is one.
      bias: path → axes of the norm's bias, `"channel"`, if it has one.
      into: path → axes of the bias behind each kernel, in the order of `read`, if the norm has a bias.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are {kernel path: u, the leaf's shape without `channel`}.

    Raises:
      ValueError: malformed axes, a norm's bias without biases behind its readers, at once; any mismatch with the tree,
        when it is first seen.

    >>> gauge = go.norm_read_shift({"up": "channel _"}, scale={"norm": "channel"})
    >>> gauge.dim({"up": jnp.ones((4, 3)), "norm": jnp.ones(4)})
    3

    Reference: docs/design.md §3. Not a symmetry under RMSNorm.
    """
    arguments = {READ: read, SCALE: scale, BIAS: bias, INTO: into}
    gauge = block_gauge("norm_read_shift", NormReadShift, {k: v for k, v in arguments.items() if v is not None}, sizes)
    counts = {argument: sum(spec.argument == argument for spec in gauge.specs) for argument in arguments}
    if max(counts[SCALE], counts[BIAS]) > 1 or counts[INTO] != (counts[READ] if counts[BIAS] else 0):
        raise binding_error(
            "norm_read_shift", "a norm's bias and the biases behind its readers do not pair",
            ", ".join(f"{n} in {k}" for k, n in counts.items()),
            "at most one scale and one bias; with a bias, one entry of `into` per entry of `read`",
            "list the bias behind every kernel, in the same order; readers without one have no such symmetry",
        )
    return gauge


@dataclasses.dataclass(frozen=True)
class NormReadShift(WriteShift):
    """One copy. An element has, per kernel, a number for every output."""

    effect: ClassVar[Effect] = "linear"
    balancing: ClassVar[Effect] = "still"
    composes: ClassVar[bool] = False
    partial: ClassVar[tuple[str, ...]] = (SCALE, BIAS, INTO)
    without_axis: ClassVar[tuple[str, ...]] = (INTO,)
    breaks: ClassVar[str] = "an RMSNorm, which does not subtract the mean, or a bias that is not listed"

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "NormReadShift":
        found.require_named(SCALE, BIAS)
        kernels, scale, bias, behind = found.of_argument(READ, SCALE, BIAS, INTO)
        for argument, blocks, number in ((SCALE, scale, 1), (BIAS, bias, 1), (INTO, behind, len(kernels))):
            found.require_as_many(argument, number if blocks else 0)
        for block in (*scale, *bias):
            for name in [name for name in found.named if name not in block.labels][:1]:
                raise binding_error(
                    found.gauge, f"an axis '{name}' that '{block.path}' lacks", f'"{block.axes}"',
                    "a norm that has all named axes of its readers, as an axis of layers",
                    f"write '_' in place of '{name}' in `{READ}` and in `{INTO}`")
        for kernel, target in zip(kernels, behind, strict=bool(behind)):
            outputs = tuple(n for n, x in zip(kernel.view_shape, kernel.labels, strict=True) if x != CHANNEL)
            labels = [x for x in kernel.labels if x != CHANNEL]
            named = [x in ("_", y) for x, y in zip(target.labels, labels, strict=False)]
            if outputs != target.view_shape or not all(named):
                raise binding_error(
                    found.gauge, f"'{target.path}' has another shape than the outputs of '{kernel.path}'",
                    f"{target.view_shape}",
                    f"the axes of \"{kernel.axes}\" without channel, {outputs}", "pair every kernel with its own bias")
        # An element has one array per kernel, in the order of the kernels. If `into` is given, the biases behind the
        # kernels have the same order. This order is part of what the element means, so that the label lists them
        # without sorting.
        name = part_label(found, kernels=[(b.path, b.axes) for b in (*kernels, *behind)])
        part = ReadShift(name, found.named, found.shape, (*kernels, *behind), scale, bias, len(kernels))
        return cls(found.key, (part,))

    @property
    def shifted(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.argument == READ)
