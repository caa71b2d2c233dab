"""Read shift: what a centred norm hides from every kernel that reads it.

A LayerNorm's output x̂, before its scale γ and its bias β, has the mean zero over channels. So W ↦ W + γ⁻¹ ⊗ u changes
x̂·γ·W by Σ x̂·u = 0, for any vector u over the kernel's outputs; what β sends through W changes by Σ(β/γ)·u, which the
bias behind W takes back. The group is one number per output of each kernel, under addition.

A point reads as the mean of γ·W over channels. With the norm's `norm_scale` in the list of gauges, slice coordinates
have γ = ±1. This gauge acts before that one, which must stand behind it. Inside the library an element also has the
signs of γ, which no step changes: tangents and cotangents move by them.

A norm behind a layer (BERT) has no `norm_scale`, because the next layer's residual sees γ too. Then γ is trained like
any weight, the move is not affine in W and γ together, and `Slice` moves steps as differences of points.
Reference: docs/design.md §5, "More dead directions"; van Nierop, §4 (the plane that layer normalisation restricts to).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Block
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.instance import Anchor, Arrays, Effect, Instance
from gauge_optax.gauges.shift import Shift
from gauge_optax.gauges.write_shift import CHANNEL
from gauge_optax.linalg import real_dtype

READ, SCALE, BIAS, INTO = "read", "scale", "bias", "into"
SIGNS = ""  # the key of an element's signs; no leaf has an empty path


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
        `{"blocks/{i}/mlp/up/kernel": "channel _"}`.
      scale: path → axes of the norm's scale, `"channel"` or `"1+ channel"`, if it has one.
      bias: path → axes of the norm's bias, `"channel"`, if it has one.
      into: path → axes of the bias behind each kernel, in the order of `read`, if the norm has a bias.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are {kernel path: u, the leaf's shape without `channel`}.

    Raises:
      ValueError: malformed axes, a norm's bias without biases behind its readers, at once; any mismatch with the tree,
        when it is first seen.

    >>> gauge = go.norm_read_shift({"up": "channel _"}, scale={"norm": "channel"})
    >>> gauge.dim({"up": jnp.ones((4, 3)), "norm": jnp.ones(4)})
    3

    Reference: docs/design.md §5. Not a symmetry under RMSNorm.
    """
    roles = {READ: read, SCALE: scale, BIAS: bias, INTO: into}
    gauge = block_gauge("norm_read_shift", ReadShift, {k: v for k, v in roles.items() if v is not None}, sizes)
    counts = {role: sum(spec.role == role for spec in gauge.specs) for role in roles}
    if max(counts[SCALE], counts[BIAS]) > 1 or counts[INTO] != (counts[READ] if counts[BIAS] else 0):
        raise binding_error(
            "norm_read_shift", "a norm's bias and the biases behind its readers do not pair",
            ", ".join(f"{n} in {k}" for k, n in counts.items()),
            "at most one scale and one bias; with a bias, one entry of `into` per entry of `read`",
            "list the bias behind every kernel, in the same order; readers without one have no such symmetry",
        )  # fmt: skip
    return gauge


@dataclasses.dataclass(frozen=True)
class ReadShift(Shift):
    """One instance: a vector per kernel.

    Attributes:
      norm: the norm's scale and bias, as far as it has them; the action reads them and does not move them.
      behind: the bias behind each kernel; () for a norm without a bias.
      affine: see `Instance`; False where the norm's scale has no `norm_scale` and is trained as it is.
    """

    norm: tuple[Block, ...] = ()
    behind: tuple[Block, ...] = ()
    affine: bool = True  # type: ignore[misc]

    rigid: ClassVar[str] = CHANNEL
    effect: ClassVar[Effect] = "linear"
    balancing: ClassVar[Effect] = "still"
    keeps_place: ClassVar[bool] = True
    composes: ClassVar[bool] = False
    partial: ClassVar[tuple[str, ...]] = (SCALE, BIAS, INTO)
    without_axis: ClassVar[tuple[str, ...]] = (INTO,)
    breaks: ClassVar[str] = "an RMSNorm, which does not subtract the mean, or a bias that is not listed"

    @classmethod
    def of(cls, gauge: str, key: str, named: tuple[str, ...], sizes: Mapping[str, int], blocks: Any) -> "ReadShift":
        """The instance of a binding's blocks. Raises ValueError for a bias that does not fit the kernel before it."""
        kernels = tuple(block for block in blocks if block.role == READ)
        behind = tuple(block for block in blocks if block.role == INTO)
        for kernel, target in zip(kernels, behind, strict=bool(behind)):
            outputs = tuple(n for n, x in zip(kernel.view_shape, kernel.labels, strict=True) if x != CHANNEL)
            if outputs != target.view_shape:
                raise binding_error(
                    gauge, f"'{target.path}' does not follow '{kernel.path}'", f"{target.view_shape}",
                    f"the axes of \"{kernel.axes}\" without channel, {outputs}", "pair every kernel with its own bias",
                )  # fmt: skip
        norm = tuple(block for block in blocks if block.role in (SCALE, BIAS))
        shape = tuple(sizes[name] for name in named)
        return cls(gauge, key, named, shape, (*kernels, *behind), norm=norm, behind=behind)

    @property
    def shifted(self) -> tuple[Block, ...]:
        return self.blocks[: len(self.blocks) - len(self.behind)]

    @property
    def context(self) -> tuple[Block, ...]:
        return self.norm

    @property
    def targets(self) -> tuple[Block, ...]:
        return self.behind

    @property
    def divided(self) -> tuple[Block, ...]:
        return tuple(block for block in self.norm if block.role == SCALE)

    def beside(self, others: Sequence[Instance]) -> "ReadShift":
        scales = [dataclasses.replace(block, role="up") for block in self.divided]
        norms = [i.anchors[0] for i in others if i.anchors and i.log_step]
        return dataclasses.replace(self, affine=all((scale,) in norms for scale in scales))

    # The group: shifts add, signs stay --------------------------------------------------------------------

    def identity(self) -> Arrays:
        channels = self.shifted[0].view_shape[self.shifted[0].labels.index(CHANNEL)]
        return super().identity() | {SIGNS: jnp.ones((*self.shape, channels), real_dtype())}

    @staticmethod
    def inverse(e: Arrays) -> Arrays:
        return {path: x if path == SIGNS else -x for path, x in e.items()}

    @staticmethod
    def compose(a: Arrays, b: Arrays) -> Arrays:
        return {path: x if path == SIGNS else a[path] + x for path, x in b.items()}

    def to_element(self, e: Arrays) -> Arrays:
        return super().to_element({path: x for path, x in e.items() if path != SIGNS})

    def from_element(self, element: Arrays) -> Arrays:
        return self.identity() | super().from_element(element)

    # The action -----------------------------------------------------------------------------------------

    def act(self, e: Arrays, point: Arrays) -> Arrays:
        scale, bias = self._of_norm(point)
        out = dict(point)
        for number, kernel in enumerate(self.shifted):
            shift = self.one_along(kernel).view(e[kernel.path])
            added = shift if scale is None else shift / self._laid(scale, kernel.labels)
            out[kernel.path] = kernel.write(out[kernel.path], kernel.view(out[kernel.path]) + added)
            if bias is not None:
                self._take(out, number, shift, jnp.sum(bias if scale is None else bias / scale, -1))
        return out

    def push(self, e: Arrays, tangent: Arrays) -> Arrays:
        # Slice coordinates: the norm's scale is ±1, and no step changes it.
        _, bias = self._of_norm(tangent)
        out = dict(tangent)
        if bias is not None:
            for number, kernel in enumerate(self.shifted):
                self._take(out, number, self.one_along(kernel).view(e[kernel.path]), jnp.sum(bias * e[SIGNS], -1))
        return out

    def pull(self, e: Arrays, cotangent: Arrays) -> Arrays:
        # The transpose of `push`. The gradient of the norm's scale follows from the others, see `Slice.enter_dual`.
        zeros = jax.tree.map(jnp.zeros_like, {path: cotangent[path] for path in self._moved_paths})
        _, transposed = jax.vjp(lambda tangent: self.push(e, tangent), zeros)
        return cotangent | transposed({path: cotangent[path] for path in zeros})[0]

    @property
    def _moved_paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(block.path for block in (*self.blocks, *self.norm)))

    def _of_norm(self, vector: Arrays) -> tuple[jax.Array | None, jax.Array | None]:
        """The norm's scale and its bias, (*named, channel), or None."""

        def of(role: str) -> jax.Array | None:
            block = next((block for block in self.norm if block.role == role), None)
            if block is None:
                return None
            return block.view(vector[block.path]).transpose([block.labels.index(x) for x in (*self.named, CHANNEL)])

        return of(SCALE), of(BIAS)

    def _laid(self, values: jax.Array, labels: tuple[str, ...]) -> jax.Array:
        """Numbers, (*named) or (*named, channel), laid out to broadcast with axes of these labels."""
        kept = (*self.named, CHANNEL)[: values.ndim]
        ordered = values.transpose([kept.index(x) for x in labels if x in kept])
        lengths = iter(ordered.shape)
        return ordered.reshape([next(lengths) if x in kept else 1 for x in labels])

    def _take(self, out: Arrays, number: int, shift: jax.Array, reading: jax.Array) -> None:
        """Subtracts `reading`, a number per element of the named axes, times a shift from the bias behind a kernel."""
        kernel, target = self.shifted[number], self.behind[number]
        outputs = tuple(x for x in kernel.labels if x != CHANNEL)
        taken = shift.squeeze(kernel.labels.index(CHANNEL)) * self._laid(reading, outputs)
        out[target.path] = target.write(out[target.path], target.view(out[target.path]) - taken)

    # Reading --------------------------------------------------------------------------------------------

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return (self.shifted,)

    def read(self, anchor: Anchor, point: Arrays, within: jax.Array, near: bool) -> tuple[Arrays, jax.Array]:
        return self.read_mean(point), within

    def read_mean(self, point: Arrays) -> Arrays:
        scale, _ = self._of_norm(point)
        signs = jnp.ones_like(self.identity()[SIGNS]) if scale is None else jnp.where(scale < 0, -1.0, 1.0)
        times = {} if scale is None else {k.path: self._laid(scale, k.labels) for k in self.shifted}
        read = super().identity()
        for kernel in self.shifted:
            rows = kernel.view(point[kernel.path]) * times.get(kernel.path, 1.0)
            mean = jnp.mean(rows, kernel.labels.index(CHANNEL), keepdims=True)
            read[kernel.path] = self.one_along(kernel).write(read[kernel.path], mean)
        return read | {SIGNS: signs.astype(real_dtype())}

    def enter(self, e: Arrays, point: Arrays) -> Arrays:
        return self.act(self.inverse(e), point)

    def centred(self, vector: Arrays) -> Arrays:
        return vector

    def signal(self, point: Arrays, gradient: Arrays) -> None:
        return
