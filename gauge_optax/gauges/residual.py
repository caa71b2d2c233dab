"""Residual rotation: an orthogonal matrix that rotates the residual stream, and all that writes to it and reads it.

Every layer adds to one stream x of d channels. For an orthogonal R let all writers (embeddings, output kernels,
biases) write x·R, and let all readers undo it: W_write ↦ W·R, W_read ↦ Rᵀ·W. An RMSNorm without a scale commutes with
every R. A LayerNorm commutes with those R that keep the vector of ones, which form a group O(d−1). All layers share one
R, because they add to the same stream (van Nierop, §4.4).

A norm's scale γ does not commute with R. If γ is first moved into the readers, readers move by Rᵀ·W as above. On the
stored leaves this is W_read ↦ γ⁻¹·Rᵀ·γ·W, and β ↦ γ·((β/γ)·R) for the norm's bias β. A kernel in front of the scale γ
of a layer (LayerScale) becomes W·γ·R·γ⁻¹. `parts.stream` says how R is read, and how rotations are removed from steps.

Cost of a step under `quotient`: three products of every kernel with a d × d matrix. With `hold=True` there is one more,
and the solution of an equation of d × d matrices (`parts.stream`).
Reference: van Nierop, Eq. (6)-(16), (17); docs/design.md §3, "The residual stream". Deviation: O(d) in place of
SO(d), which adds no dimension; norm scales are part of the action, where the paper has none.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Block, BlockSpec, Matched, bind_leaf, overlap
from gauge_optax.errors import binding_error
from gauge_optax.gauges.copies import part_label
from gauge_optax.gauges.gauge import BlockGauge, Gauges, block_gauge, product
from gauge_optax.gauges.rotation import HeadRotation, random_rotation, rotation_of
from gauge_optax.gauges.scale import Scale
from gauge_optax.linalg import nearly_orthogonal, real_dtype
from gauge_optax.parts.heads import BASIS
from gauge_optax.parts.sizes import Factor
from gauge_optax.parts.stream import READ, WRITE, Stream

_AXIS = re.compile(r"(?:\([^)]*\)|[^\s(])+")  # one item of an axes string, which may have parts in parentheses


def residual_rotation(
    read: Mapping[str, Axes],
    write: Mapping[str, Axes],
    norms: Gauges = (),
    *,
    centred: bool = False,
    hold: bool = False,
    per_layer: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> BlockGauge:
    """An orthogonal matrix that rotates the residual stream. It keeps the vector of ones if LayerNorms read the stream.

    Args:
      read: path → axes of every kernel that reads the stream; `basis` is the stream's axis, `_` the others:
        `{"blocks/{i}/attn/query/kernel": "basis _ _", "lm_head/kernel": "basis _"}`. All layers share one rotation,
        whatever the captures are.
      write: path → axes of every leaf that writes to it: embeddings, output kernels, their biases. Norms' biases are
        not listed.
      norms: the `norm_scale` gauges of all norms between the stream and its readers that have a scale, and of all
        scales between writers and the stream (LayerScale). The rotation also moves the norms' biases that these gauges
        bind.
      centred: True if the norms subtract the mean, as LayerNorm does. R then keeps the vector of ones.
      hold: whether optimizers remove the part of each step that rotates the stream. It costs a d × d equation per step.
        With False, the stream rotates as it does under the wrapped optimizer.
      per_layer: True if the stream is no vector that all layers share, but each layer has its own, such as the latent
        vector of latent attention. Every capture has its own rotation then, and so has every index of a named axis,
        such as `layer`, or `head` for heads behind a norm.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are {"": R} with R (d, d), which moves writers by W ↦ W·R;
      with `per_layer`, {captures: R} with R `(*named, d, d)`.

    Raises:
      ValueError: malformed axes, norms that are no `norm_scale`, at once; any mismatch with the tree, when first seen.

    >>> gauge = go.residual_rotation({"head": "basis _"}, {"embedding": "_ basis"})
    >>> params = {"embedding": jnp.ones((7, 4)), "head": jnp.ones((4, 7))}
    >>> gauge.dim(params)  # 4·3/2
    6

    Reference: van Nierop, Eq. (6)-(17). Not a symmetry of a tied embedding behind a norm with a scale, of a norm with a
    scale whose output becomes the stream or is added to it, or of anything that reads single channels.
    """
    passed = product(norms).gauges if norms else ()
    for norm in passed:
        if not isinstance(norm, BlockGauge) or norm.kind is not Scale or norm.name != "norm_scale":
            raise binding_error(
                "residual_rotation", "norms that are no norm_scale", repr(norm).splitlines()[0],
                "the go.norm_scale gauges of the norms that the rotation passes",
                "pass norms=[go.norm_scale(...), ...]",
            )
    roles, kind = {READ: read, WRITE: write}, LatentRotation if per_layer else ResidualRotation
    options: dict[str, Any] = {"norms": passed, "centred": centred, "hold": hold}
    return block_gauge("residual_rotation", kind, roles, sizes, **options, **{"per_layer": True} if per_layer else {})


@dataclasses.dataclass(frozen=True)
class ResidualRotation(HeadRotation):
    """The one copy. An element is an orthogonal matrix, (d, d), for all layers."""

    parts: tuple[Stream]

    joined: ClassVar[bool] = True
    composes: ClassVar[bool] = False
    breaks: ClassVar[str] = (
        "a reader or a writer that is not listed, a norm with a scale that is not in `norms`, a tied embedding behind "
        "such a norm, a LayerNorm without `centred=True`, or a norm behind a layer"
    )

    @classmethod
    def of(cls, found: Matched, **options: Any) -> Self:
        norms, centred = options.get("norms", ()), bool(options.get("centred"))
        gauge, blocks = found.gauge, found.blocks
        if found.named and cls.joined:
            raise binding_error(
                gauge, f"a named axis '{found.named[0]}'", f"axes {', '.join(found.named)}",
                "one rotation for the whole stream",
                "write '_' for every axis but basis: one rotation serves all layers and heads; or per_layer=True",
            )
        moved, scales = list(blocks), []
        for (norm,) in (copy.parts for copy in norms):
            scale, *biases = norm.up
            if "_" in scale.labels:
                raise binding_error(
                    gauge, f"a norm whose scale '{scale.path}' has a free axis", f"'{scale.axes}'",
                    "norms whose gauges name every axis of the scale, so that it can be divided out entry by entry",
                    f"name the axis: scale={{'{scale.path}': 'channel'}}, and in `into` the axis that it multiplies",
                )
            behind = [dataclasses.replace(b, argument=WRITE) for b in biases]
            for scaled in norm.down:  # a kernel behind the norm; or one in front of a layer's scale, which writes
                if any(overlap(b, scaled) and (b.argument == READ or _names_basis(b, scaled)) for b in blocks):
                    behind.append(dataclasses.replace(scaled, argument=READ))
            stream = _stream_axis(norm, blocks)
            if stream == "_":
                raise binding_error(
                    gauge, f"a norm whose scale '{scale.path}' multiplies another axis than the stream's",
                    f"'{norm.down[0].axes}' of '{norm.down[0].path}'", "a norm of the residual stream",
                    "take this norm_scale out of `norms`; the rotation does not pass it",
                )
            moved += [part for b in biases for part in _turned_bias(b, norm, blocks, stream, found)]
            scales.append((scale, tuple(behind)))
        bound = found._replace(blocks=(*moved, *(scale for scale, _ in scales)))
        held = bool(options.get("hold"))
        passed = sorted((scale.path, scale.axes, sorted((b.path, b.axes) for b in behind)) for scale, behind in scales)
        name, size, turned = part_label(bound, centred=centred, norms=passed), found.sizes[BASIS], tuple(moved)
        part = Stream(name, found.named, found.shape, turned, size, tuple(scales), centred, held, turned)
        return cls(found.key, (part,))

    @property
    def _free(self) -> int:
        """The n of the group O(n): d, or d − 1 if R keeps the vector of ones."""
        return self.size - self.parts[0].keeps_ones

    @property
    def dim(self) -> int:
        return math.prod(self.shape) * self._free * (self._free - 1) // 2

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        return self.parts[0].embedded(random_rotation(key, (*self.shape, self._free, self._free), scale))

    def algebra(self) -> jax.Array:
        return jnp.zeros((*self.shape, self._free, self._free), real_dtype())

    def exponential(self, coordinates: jax.Array, near: bool = False) -> jax.Array:
        return self.parts[0].embedded(rotation_of(coordinates, near))

    def normalized(self, element: jax.Array) -> jax.Array:
        return self.parts[0].embedded(nearly_orthogonal(self.parts[0].restricted(element)))


class LatentRotation(ResidualRotation):
    """The copy of one layer, if each layer has a vector of its own. An element is the rotation R of it, (*shape, d, d).

    Latent attention writes a short vector c = RMSNorm(x·A)·γ, from which kernels B compute keys and values. It turns as
    a residual stream does: A ↦ A·R and B ↦ γ⁻¹·Rᵀ·γ·B. Reference: DeepSeek-V2 (arXiv 2405.04434), Eq. (9)-(13).
    """

    joined: ClassVar[bool] = False

    @classmethod
    def of(cls, found: Matched, **options: Any) -> Self:
        readers = [b for b in found.blocks if b.argument == READ]
        # `norms` has the copies of all layers. The rotation of this layer passes only the norms of this layer.
        own = [copy for copy in options["norms"] if any(overlap(a, b) for a in readers for b in copy.parts[0].down
                                                        if a.path == b.path)]
        for (norm,) in (copy.parts for copy in own):
            for bias in norm.up[1:]:  # vectors may share a norm's scale, but not its bias, which turns with the vector
                if absent := [name for name in found.named if name not in norm.named]:
                    raise binding_error(
                        found.gauge, f"a norm's bias '{bias.path}' without the axis '{absent[0]}'", f"'{bias.axes}'",
                        f"the axes that count vectors, {', '.join(found.named)}, by these names",
                        f"write '{absent[0]}' in the axes of the norm_scale gauge too; vectors that share one bias "
                        f"turn as one: then write '_' for '{absent[0]}' here")
        return super().of(found, **options | {"norms": tuple(own)})


def _names_basis(block: Block, scaled: Block) -> bool:
    """Whether a norm's gauge has a name, not `_`, for the axis of a leaf that the rotation's block calls `basis`."""
    return block.split == scaled.split and scaled.split_labels[block.split_labels.index(BASIS)] != "_"


def _stream_axis(norm: Factor, blocks: Sequence[Block]) -> str:
    """The name that a norm's gauge gives to the stream's axis. The gauge may also name an axis of stacked layers."""
    for reader in norm.down:
        for block in blocks:
            if block.argument == READ and overlap(block, reader) and block.split == reader.split:
                return reader.split_labels[block.split_labels.index(BASIS)]
    return norm.named[-1]


def _turned_bias(bias: Block, norm: Factor, blocks: Sequence[Block], stream: str, found: Matched) -> list[Block]:
    """The blocks of a norm's bias that turn: `basis` in place of the stream's axis `stream`, and "_" for other axes.

    Named axes, which count streams, keep their names.

    A norm may act on several vectors of the stream that are concatenated. Its readers then split this axis, as in
    `(n basis)`. The bias is split in the same way, and each part turns.
    """
    parts: list[Block] = []
    items = bias.axes.split()
    for reader in norm.down if stream in items else ():
        for block in blocks:
            item = next(text for text in _AXIS.findall(block.axes) if re.search(rf"\b{BASIS}\b", text))
            if block.argument == READ and item != BASIS and overlap(block, reader):
                axes = " ".join(item if text == stream else text if text in found.named else "_" for text in items)
                part = bind_leaf(found.gauge, BlockSpec(WRITE, bias.path, axes), bias.path, bias.shape, found.sizes)
                parts += [] if any(overlap(part, other) for other in parts) else [part]
    names = {stream: BASIS} | {name: name for name in found.named}
    renamed = tuple(names.get(label, "_") for label in bias.labels)
    return parts or [dataclasses.replace(bias, argument=WRITE, labels=renamed)]
