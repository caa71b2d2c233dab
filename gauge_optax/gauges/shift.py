"""Logit shift: adding the same number to the logits of all classes does not change a softmax.

For logits z = x·W + b and any vector t and number τ, W ↦ W + t·1ᵀ and b ↦ b + τ·1 change z by a constant over classes.
The group is Rᵈ, or Rᵈ⁺¹ with a bias, under addition. A point reads as its mean along `vocab`, and the vertical part of
a tangent is its mean too. A shift moves points, but neither tangents nor cotangents. It is not a symmetry of a tied
head or of soft-capped logits. Reference: the paper DDC (docs/design.md §4), §3.2 and B.2–B.3.

Inside the library a shift has the leaf's shape with `vocab` of length 1, and is zero outside all blocks. Public
elements have no `vocab` axis.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Block, BlockSpec, instance_key, overlap
from gauge_optax.binding.axes import parse_axes
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.instance import Additive, Arrays, Effect
from gauge_optax.linalg import real_dtype

VOCAB = "vocab"


def logit_shift(blocks: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None) -> BlockGauge:
    """A constant added along `vocab`: an unembedding kernel, its bias, or either alone.

    Args:
      blocks: path → axes with one `vocab` axis, e.g. `{"lm_head/kernel": "_ vocab", "lm_head/bias": "vocab"}`.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are {leaf path: shift, the leaf's shape without `vocab`}.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> params = {"kernel": jnp.ones((3, 5)), "bias": jnp.zeros(5)}
    >>> go.logit_shift({"kernel": "_ vocab", "bias": "vocab"}).dim(params)
    4

    Reference: DDC §3.2. Not a symmetry of a tied embedding.
    """
    return block_gauge("logit_shift", Shift, {"blocks": blocks}, sizes)


@dataclasses.dataclass(frozen=True)
class Shift(Additive):
    """One instance: a vector per leaf, constant along `vocab`."""

    effect: ClassVar[Effect] = "shift"
    balancing: ClassVar[Effect] = "shift"
    rigid: ClassVar[str] = VOCAB
    breaks: ClassVar[str] = (
        "logits themselves move: return the loss, or log-probabilities; else a tied head, soft-capping, or a loss that "
        "is no softmax"
    )

    @classmethod
    def of(cls, gauge: str, key: str, named: tuple[str, ...], sizes: Mapping[str, int], blocks: Any) -> "Shift":
        """The instance of a binding's blocks. Raises ValueError for two blocks of a leaf that would share a shift."""
        for at, block in enumerate(blocks):
            for other in blocks[:at]:
                if block.path == other.path and overlap(cls.one_along(block), cls.one_along(other)):
                    raise binding_error(
                        gauge, f"two ranges of {cls.rigid} on '{block.path}'", f"'{other.axes}' and '{block.axes}'",
                        "one range per leaf in one gauge", f"write one {gauge} per range, as a list of gauges",
                    )  # fmt: skip
        return cls(gauge, key, named, tuple(sizes[name] for name in named), tuple(blocks))

    @classmethod
    def one_along(cls, block: Block) -> Block:
        """The block of one entry along the axis that a shift is constant along."""
        return shift_block(block, cls.rigid)

    @staticmethod
    def axis_sizes(named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        """Lengths of axes, read off an element: none, because the leaf alone determines all of them."""
        return {}

    @property
    def shifted(self) -> tuple[Block, ...]:
        """The blocks that an element has a shift of."""
        return self.blocks

    @property
    def dim(self) -> int:
        return sum(math.prod(self.one_along(block).view_shape) for block in self.shifted)

    # The group: addition, leaf by leaf ----------------------------------------------------------------

    def identity(self) -> Arrays:
        return {block.path: jnp.zeros(self.one_along(block).shape, real_dtype()) for block in self.shifted}

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> Arrays:
        shifts = self.identity()
        for block, key_of_block in zip(self.shifted, jax.random.split(key, len(self.shifted)), strict=True):
            rms = jnp.sqrt(jnp.mean(jnp.square(jnp.asarray(leaves[block.path], real_dtype()))))
            target = self.one_along(block)
            drawn = scale * rms * jax.random.normal(key_of_block, target.view_shape, real_dtype())
            shifts[block.path] = target.write(shifts[block.path], drawn)
        return self.to_element(shifts)

    def to_element(self, e: Arrays) -> Arrays:
        shapes = {block.path: _without(block, self.rigid) for block in self.shifted}
        return {path: x.reshape(shapes[path]) for path, x in e.items()}

    def from_element(self, element: Arrays) -> Arrays:
        return {block.path: element[block.path].reshape(self.one_along(block).shape) for block in self.shifted}

    @staticmethod
    def power(element: Arrays, exponent: float | jax.Array) -> Arrays:
        """The power of a public element."""
        return jax.tree.map(lambda x: exponent * x, element)

    @classmethod
    def conjugated(cls, specs: Sequence[BlockSpec], element: Any, moved: Callable[[str, jax.Array], jax.Array]) -> Any:
        def after(path: str, shift: jax.Array) -> jax.Array:
            # `moved` needs the leaf's shape with `vocab` of length 1; an element lacks an axis that is `vocab` alone.
            spec = next(s for s in specs if instance_key(specs, s, path) is not None)
            lengths = iter(shift.shape)
            groups = parse_axes(cls.__name__, spec.pattern, spec.axes).groups
            shape = [1 if [part.name for part in group] == [cls.rigid] else next(lengths) for group in groups]
            return moved(path, shift.reshape(shape)).reshape(shift.shape)

        return {path: after(path, shift) for path, shift in element.items()}

    # The action ---------------------------------------------------------------------------------------

    def act(self, e: Arrays, point: Arrays) -> Arrays:
        out = dict(point)
        for block in self.shifted:
            out[block.path] = block.write(
                out[block.path], block.view(out[block.path]) + self.one_along(block).view(e[block.path])
            )
        return out

    def enter(self, e: Arrays, point: Arrays) -> Arrays:
        return self._subtracted(point, e)

    def push(self, e: Arrays, tangent: Arrays) -> Arrays:
        return tangent

    def pull(self, e: Arrays, cotangent: Arrays) -> Arrays:
        return cotangent

    def centred(self, vector: Arrays) -> Arrays:
        return self._subtracted(vector, None)

    def _subtracted(self, vector: Arrays, e: Arrays | None) -> Arrays:
        """Subtracts a shift, or the mean if `e` is None. Rows that are constant up to roundoff become exactly zero.

        A shifted twin of a zero head is constant. Its roundoff would be read as nonzero weights that have a frame.
        """
        out = dict(vector)
        for block in self.shifted:
            rows = block.view(out[block.path])
            mean = jnp.mean(rows, block.labels.index(self.rigid), keepdims=True)
            spread = jnp.max(jnp.abs(rows - mean), block.labels.index(self.rigid), keepdims=True)
            constant = spread <= 8.0 * jnp.finfo(rows.dtype).eps * jnp.abs(mean)
            shift = mean if e is None else self.one_along(block).view(e[block.path])
            out[block.path] = block.write(out[block.path], jnp.where(constant, 0.0, rows - shift))
        return out

    # Reading ------------------------------------------------------------------------------------------

    def coordinate(self, e: Arrays, point: Arrays) -> Arrays:
        return self.to_element(self.read_mean(point))

    def read_mean(self, point: Arrays) -> Arrays:
        means = self.identity()
        for block in self.shifted:
            mean = jnp.mean(block.view(point[block.path]), block.labels.index(self.rigid), keepdims=True)
            means[block.path] = self.one_along(block).write(means[block.path], mean)
        return means

    def signal(self, point: Arrays, gradient: Arrays) -> jax.Array | None:
        # If the output layer is constant over classes, which is zero on the slice, only its own gradient is not zero.
        kernels = [block for block in self.shifted if math.prod(self.one_along(block).view_shape) > 1]
        if not kernels:
            return None
        largest = jnp.stack([jnp.max(jnp.abs(block.view(gradient[block.path]))) for block in self.shifted]).max()
        constant = jnp.stack([jnp.all(block.view(point[block.path]) == 0.0) for block in kernels]).any()
        return jnp.where(constant, largest, 0.0).astype(real_dtype())


def shift_block(block: Block, axis: str) -> Block:
    """The block of one entry along an axis: the same selection on a leaf where that axis has length 1."""
    at = [k for k, i in enumerate(block.index) if not isinstance(i, int)][block.labels.index(axis)]
    split = tuple(1 if k == at else n for k, n in enumerate(block.split))
    index = tuple(((0, 1),) if k == at else i for k, i in enumerate(block.index))
    ranges = tuple(None if at in group else span for group, span in zip(block.groups, block.ranges, strict=True))
    shape = tuple(
        math.prod(split[k] for k in group) if span is None else n
        for group, span, n in zip(block.groups, ranges, block.shape, strict=True)
    )
    return dataclasses.replace(block, shape=shape, split=split, index=index, ranges=ranges)


def _without(block: Block, axis: str) -> tuple[int, ...]:
    """Shape of a shift in a public element: without the axis, or with length 1 for it in its group."""
    shape = shift_block(block, axis).shape
    alone = [k for k, group in enumerate(block.groups) if [block.split_labels[i] for i in group] == [axis]]
    return tuple(n for k, n in enumerate(shape) if k not in alone)
