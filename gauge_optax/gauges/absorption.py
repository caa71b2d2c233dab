"""Bias absorption: a bias that a later layer adds again, so that a constant can move from one bias to the other.

Let a layer read x + b through a kernel W and add a bias c, so that it computes (x + b)·W + c. For any t, b ↦ b + t and
c ↦ c − t·W change nothing. A norm's bias moves so into the biases of its readers; a value bias moves through the output
projection into the output bias, because the weights of attention sum to 1. The group is Rⁿ under addition, n being the
number of entries of b. A point reads as b itself: on the slice b is zero, and c carries all of it.

A move adds −t·dW to the tangent dc, so that it changes tangents, unlike a shift. Reference: docs/design.md §5, "More
dead directions"; the symmetry is not in the papers.
"""

import dataclasses
import string
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Block
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.instance import Additive, Anchor, Arrays, Effect
from gauge_optax.linalg import HIGHEST, real_dtype

INTO = "into"


def bias_absorption(
    bias: Mapping[str, Axes],
    through: Mapping[str, Axes],
    into: Mapping[str, Axes],
    *,
    sizes: Mapping[str, int] | None = None,
) -> BlockGauge:
    """A constant moved from a bias, through the kernels that read it, into the biases that follow these kernels.

    Args:
      bias: path → axes of the one bias b, all named: `{"norm/bias": "channel"}`, `{"value/bias": "head entry"}`.
      through: path → axes of every kernel that reads it, with the same named axes: `{"query/kernel": "channel _ _"}`.
        Where several heads read one value head, write `"(head _) entry _"`; axes of the kernel that the bias behind it
        lacks are summed.
      into: path → axes of the bias behind each of these kernels, in the same order: `{"query/bias": "_ _"}`. Its axes
        are the last free axes of its kernel, after the axis of stacked layers, which all three name.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are t, shaped like the named axes.

    Raises:
      ValueError: malformed axes, a kernel without a bias behind it, at once; any mismatch with the tree, when it is
        first seen.

    >>> gauge = go.bias_absorption({"b": "channel"}, {"w": "channel _"}, {"c": "_"})
    >>> params = {"b": jnp.array([1.0, 2.0]), "w": jnp.ones((2, 3)), "c": jnp.zeros(3)}
    >>> moved = gauge.act(gauge.inverse(gauge.read(params)), params)
    >>> moved["b"].tolist(), moved["c"].tolist()
    ([0.0, 0.0], [3.0, 3.0, 3.0])

    Reference: docs/design.md §5. Not a symmetry where one reader has no bias, or reads the bias through an activation.
    """
    gauge = block_gauge("bias_absorption", Absorption, {"bias": bias, "through": through, INTO: into}, sizes)
    counts = {role: sum(spec.role == role for spec in gauge.specs) for role in ("bias", "through", INTO)}
    if counts["bias"] != 1 or counts["through"] != counts[INTO]:
        raise binding_error(
            "bias_absorption", "kernels and biases that do not pair",
            ", ".join(f"{n} in {k}" for k, n in counts.items()),
            "one bias, and one entry of `into` per entry of `through`, in the same order",
            "list the bias behind every kernel that reads the one in `bias`",
        )  # fmt: skip
    return gauge


@dataclasses.dataclass(frozen=True)
class Absorption(Additive):
    """One instance: a vector t, (*shape).

    Attributes:
      kernels: the blocks that read the bias; the action reads them and does not move them.
    """

    kernels: tuple[Block, ...]

    effect: ClassVar[Effect] = "linear"
    keeps_place: ClassVar[bool] = True
    composes: ClassVar[bool] = False
    partial: ClassVar[tuple[str, ...]] = (INTO,)
    breaks: ClassVar[str] = "a reader of the bias that is not listed, or an activation between bias and kernel"

    @classmethod
    def of(cls, gauge: str, key: str, named: tuple[str, ...], sizes: Mapping[str, int], blocks: Any) -> "Absorption":
        """The instance of a binding's blocks. Raises ValueError for a bias that does not fit the kernel before it."""
        source = next(block for block in blocks if block.role == "bias")
        kernels = [block for block in blocks if block.role == "through"]
        targets = [block for block in blocks if block.role == INTO]
        for kernel, target in zip(kernels, targets, strict=True):
            free, of_target = (_free(block, named) for block in (kernel, target))
            if free[len(free) - len(of_target) :] != of_target:
                raise binding_error(
                    gauge, f"'{target.path}' does not follow '{kernel.path}'", f"{target.view_shape}",
                    f"the last free axes of \"{kernel.axes}\", {free}", "pair every kernel with its own bias",
                )  # fmt: skip
        shape = tuple(sizes[name] for name in named)
        return cls(gauge, key, named, shape, (source, *targets), tuple(kernels))

    @property
    def context(self) -> tuple[Block, ...]:
        return self.kernels

    @property
    def targets(self) -> tuple[Block, ...]:
        return self.blocks[1:]

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        return scale * jax.random.normal(key, self.shape, real_dtype())

    def coordinate(self, e: jax.Array, point: Arrays) -> Any:
        return e

    # The action -----------------------------------------------------------------------------------------

    def act(self, e: jax.Array, point: Arrays) -> Arrays:
        source = self.blocks[0]
        order = [self.named.index(name) for name in source.labels]
        moved = source.write(point[source.path], source.view(point[source.path]) + e.transpose(order))
        return self.push(e, point) | {source.path: moved}

    def push(self, e: jax.Array, tangent: Arrays) -> Arrays:
        out = dict(tangent)
        for kernel, target in zip(self.kernels, self.blocks[1:], strict=True):
            passed = self._through(e, kernel, target, tangent[kernel.path])
            out[target.path] = target.write(out[target.path], target.view(out[target.path]) - passed)
        return out

    def pull(self, e: jax.Array, cotangent: Arrays) -> Arrays:
        # The transpose of `push`, which is linear in the tangent: dc loses t·dW, so that ĝ_W loses t ⊗ ĝ_c.
        out = dict(cotangent)
        for kernel, target in zip(self.kernels, self.blocks[1:], strict=True):
            leaf = cotangent[kernel.path]
            _, transposed = jax.vjp(lambda w, k=kernel, t=target: self._through(e, k, t, w), jnp.zeros_like(leaf))
            out[kernel.path] = out[kernel.path] - transposed(target.view(cotangent[target.path]))[0]
        return out

    def _through(self, e: jax.Array, kernel: Block, target: Block, leaf: jax.Array) -> jax.Array:
        """t·W, laid out like the bias behind this kernel."""
        letters = iter(string.ascii_lowercase)
        name_of = {name: next(letters) for name in self.named}
        axes = [name_of.get(label) or next(letters) for label in kernel.labels]
        free = [x for x, label in zip(axes, kernel.labels, strict=True) if label not in self.named]
        kept = iter(free[len(free) - len(_free(target, self.named)) :])
        laid = [name_of.get(label) or next(kept) for label in target.labels]
        spec = f"{''.join(name_of[n] for n in self.named)},{''.join(axes)}->{''.join(laid)}"
        return jnp.einsum(spec, e, kernel.view(leaf), precision=HIGHEST)

    # Reading --------------------------------------------------------------------------------------------

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return (self.blocks[:1],)

    def read(self, anchor: Anchor, point: Arrays, within: jax.Array, near: bool) -> tuple[jax.Array, jax.Array]:
        source = anchor[0]
        order = [source.labels.index(name) for name in self.named]
        return jnp.where(within, source.view(point[source.path]).transpose(order), 0.0), within

    def read_mean(self, point: Arrays) -> jax.Array:
        return self.read(self.anchors[0], point, jnp.ones(self.shape, bool), near=False)[0]


def _free(block: Block, named: tuple[str, ...]) -> tuple[int, ...]:
    """The lengths of a block's axes that have no name."""
    return tuple(n for n, label in zip(block.view_shape, block.labels, strict=True) if label not in named)
