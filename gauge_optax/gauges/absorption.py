"""Bias absorption: a vector that moves from a bias into the biases behind the kernels that read it.

Let a layer read x + b through a kernel W and add a bias c, so that it computes (x + b)·W + c. For any t, b ↦ b + t and
c ↦ c − t·W change nothing. In this way a norm's bias moves into the biases of its readers, and a value bias moves
through the output projection into the output bias, because the weights of attention sum to 1. If a norm follows its
sublayer, its output x + b also becomes the residual stream. The bias c of the next sublayer is added to this stream,
and loses t itself: c ↦ c − t. The group is Rⁿ under addition, where n is the number of entries of b. What `read`
returns for a point is b itself: on the slice b is zero, and the biases c contain what b added.

Unlike a shift, a move changes tangents: to the tangent dc it adds −t·dW, where dW is the tangent of W. Reference:
docs/design.md §3, "What else is dead"; the symmetry is not in the papers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from gauge_optax.binding import Axes, Block, Matched
from gauge_optax.errors import binding_error
from gauge_optax.gauges.copies import Copy, part_label
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.parts.constants import Absorption

INTO = "into"


def bias_absorption(
    bias: Mapping[str, Axes],
    through: Mapping[str, Axes],
    into: Mapping[str, Axes],
    *,
    residual: Mapping[str, Axes] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> BlockGauge:
    """A vector moved from a bias, through the kernels that read it, into the biases that follow these kernels.

    Args:
      bias: path → axes of the one bias b, all named: `{"norm/bias": "channel"}`, `{"value/bias": "head entry"}`.
      through: path → axes of every kernel that reads b, with the same named axes: `{"query/kernel": "channel _ _"}`.
        If several heads read one value head, write `"(head _) entry _"`. The product t·W is summed over axes of the
        kernel that the bias behind it lacks.
      into: path → axes of the bias behind each of these kernels, in the same order: `{"query/bias": "_ _"}`. Its axes
        are the last free axes of its kernel. If layers are stacked, all three arguments name the axis of layers.
      residual: if x + b is in the residual stream, path → axes of the next bias that is added to this stream, with the
        same named axes: `{"down/bias": "channel"}`.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are t, an array with the named axes.

    Raises:
      ValueError: malformed axes, a kernel without a bias behind it, at once; any mismatch with the tree, when it is
        first seen.

    >>> gauge = go.bias_absorption({"b": "channel"}, {"w": "channel _"}, {"c": "_"})
    >>> params = {"b": jnp.array([1.0, 2.0]), "w": jnp.ones((2, 3)), "c": jnp.zeros(3)}
    >>> moved = gauge.act(gauge.inverse(gauge.read(params)), params)
    >>> moved["b"].tolist(), moved["c"].tolist()
    ([0.0, 0.0], [3.0, 3.0, 3.0])

    Reference: docs/design.md §3. Not a symmetry where one reader has no bias, or reads the bias through an activation.
    """
    roles = {"bias": bias, "through": through, INTO: into} | ({"residual": residual} if residual else {})
    gauge = block_gauge("bias_absorption", BiasAbsorption, roles, sizes)
    counts = {x: sum(spec.argument == x for spec in gauge.specs) for x in ("bias", "through", INTO)}
    if counts["bias"] != 1 or counts["through"] != counts[INTO]:
        raise binding_error(
            "bias_absorption", "kernels and biases that do not pair",
            ", ".join(f"{n} in {k}" for k, n in counts.items()),
            "one bias, and one entry of `into` per entry of `through`, in the same order",
            "list the bias behind every kernel that reads the one in `bias`",
        )
    return gauge


@dataclasses.dataclass(frozen=True)
class BiasAbsorption(Copy):
    """One copy. An element is the vector t, (*shape)."""

    composes: ClassVar[bool] = False
    partial: ClassVar[tuple[str, ...]] = (INTO,)
    breaks: ClassVar[str] = "a reader of the bias that is not listed, or an activation between bias and kernel"

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "BiasAbsorption":
        found.require_named("bias", "residual")
        source, kernels, targets, carried = found.of_argument("bias", "through", INTO, "residual")
        found.require_as_many("bias", 1)
        found.require_as_many(INTO, len(kernels))
        for kernel, target in zip(kernels, targets, strict=True):
            free, of_target = (_free(block, found.named) for block in (kernel, target))
            if free[len(free) - len(of_target) :] != of_target:
                raise binding_error(
                    found.gauge, f"'{target.path}' has another shape than the outputs of '{kernel.path}'",
                    f"{target.view_shape}",
                    f"the last free axes of \"{kernel.axes}\", {free}", "pair every kernel with its own bias")
        pairs = sorted((w.path, w.axes, c.path, c.axes) for w, c in zip(kernels, targets, strict=True))
        name, moved = part_label(found, pairs=pairs), (*source, *targets, *carried)
        part = Absorption(name, found.named, found.shape, moved, kernels)
        return cls(found.key, (part,))


def _free(block: Block, named: tuple[str, ...]) -> tuple[int, ...]:
    """The lengths of a block's axes that have no name."""
    return tuple(n for n, label in zip(block.view_shape, block.labels, strict=True) if label not in named)
