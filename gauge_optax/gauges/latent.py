"""Latent rotation: an orthogonal matrix per layer that rotates the vector between two kernels of one layer.

Latent attention writes a short vector c = RMSNorm(x·A)·γ, from which kernels B compute keys and values. An RMSNorm
commutes with every orthogonal R, so that A ↦ A·R and B ↦ γ⁻¹·Rᵀ·γ·B leave the function as it is. This is the rotation
of a residual stream (`gauges.residual`) in small, but every layer has its own. Without a norm, `head_linear` has every
invertible matrix in place of R.

Reference: the latents of DeepSeek-V2 (arXiv 2405.04434, Eq. 9-13); van Nierop, Eq. (6)-(17), for the residual stream.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from gauge_optax.binding import Axes, Matched, overlap
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import BlockGauge, Gauges
from gauge_optax.gauges.residual import ResidualRotation, rotation_of_stream
from gauge_optax.parts.stream import READ


def latent_rotation(
    read: Mapping[str, Axes],
    write: Mapping[str, Axes],
    norms: Gauges = (),
    *,
    centred: bool = False,
    hold: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> BlockGauge:
    """An orthogonal matrix per layer that rotates the latent vector between the layer's kernels, past its norm.

    Args:
      read: path → axes of every kernel that reads the latent vector: `{"{i}/kv_b": "basis _ _"}`. `basis` is the
        vector's axis; a named axis, such as `layer`, counts vectors; `_` is any other axis.
      write: path → axes of every leaf that writes it: `{"{i}/kv_a": "_ basis=0:512"}`. Every capture has a matrix of
        its own.
      norms: the `norm_scale` gauges of the norms between them that have a scale. They may have more captures.
      centred: True if the norm subtracts the mean, as LayerNorm does. R then keeps the vector of ones.
      hold: whether optimizers remove the part of each step that rotates the vector, see `residual_rotation`.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are {captures: R} with R `(*named, d, d)`, which moves
      writers by W ↦ W·R.

    Raises:
      ValueError: malformed axes, norms that are no `norm_scale`, at once; any mismatch with the tree, when first seen.

    >>> gauge = go.latent_rotation({"{i}/kv_b": "basis _"}, {"{i}/kv_a": "_ basis"})
    >>> layer = {"kv_a": jnp.ones((7, 4)), "kv_b": jnp.ones((4, 7))}
    >>> gauge.dim({"0": layer, "1": layer})  # 2 layers × 4·3/2
    12

    Reference: DeepSeek-V2, Eq. (9)-(13). Not a symmetry of anything that reads single entries of the vector. Without a
    norm, `head_linear` is larger.
    """
    options = {"centred": centred, "hold": hold}
    return rotation_of_stream("latent_rotation", LatentRotation, read, write, norms, sizes, options)


@dataclasses.dataclass(frozen=True)
class LatentRotation(ResidualRotation):
    """The copy of one layer. An element is an orthogonal matrix per vector, (*shape, d, d)."""

    joined: ClassVar[bool] = False
    breaks: ClassVar[str] = (
        "a reader or a writer that is not listed, a norm with a scale that is not in `norms`, or a LayerNorm without "
        "`centred=True`"
    )

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "LatentRotation":
        readers = [b for b in found.blocks if b.argument == READ]

        def own(copy: Any) -> bool:
            (norm,) = copy.parts
            return any(a.path == b.path and overlap(a, b) for a in readers for b in norm.down)

        norms = tuple(copy for copy in options.get("norms", ()) if own(copy))
        for (norm,) in (copy.parts for copy in norms):
            if absent := [name for name in found.named if name not in norm.named]:
                raise binding_error(
                    found.gauge, f"a norm whose scale '{norm.up[0].path}' has no axis '{absent[0]}'",
                    f"'{norm.up[0].axes}'", f"the axes that count vectors, {', '.join(found.named)}, by these names",
                    f"write '{absent[0]}' in the axes of the norm_scale gauge and of latent_rotation alike")
        copy = super().of(found, **options | {"norms": norms})
        assert isinstance(copy, LatentRotation)
        return copy
