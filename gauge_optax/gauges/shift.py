"""Shifts: constants that have no effect, because a softmax or a LayerNorm follows.

* `logit_shift`: for logits z = x·W + b and any vector t and number τ, W ↦ W + t·1ᵀ and b ↦ b + τ·1 change z by a
  constant over classes, which softmax ignores. It is not a symmetry of a tied head or of soft-capped logits.
  Reference: the paper DDC (docs/design.md §4), §3.2 and B.2–B.3.
* `norm_write_shift`: a LayerNorm subtracts the mean of its input. If LayerNorms alone read a residual stream, the mean
  over its channels never reaches the output, so that each row of the leaves that write to the stream may gain a number.
  The rows of a tied table also give the logits. The logits all change by the same number only if all rows gain the
  same number. Reference: docs/design.md §3, "What else is dead"; van Nierop, §4.
* `key_bias`: the score of query q and key k + b is q·k + q·b. The second term is the same for all keys, so that softmax
  drops it, and the function is the same for every value of the bias. Reference: docs/design.md §3.

The groups are Rⁿ under addition. What `read` returns for a point is the mean along the axis, or the key bias itself. On
the slice it is zero. A shift moves points, but neither tangents nor cotangents. Public elements are {leaf path: shift},
where a shift has the leaf's shape without the axis.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Block, BlockSpec, Matched, copy_key, overlap
from gauge_optax.binding.axes import parse_axes
from gauge_optax.errors import binding_error
from gauge_optax.gauges.copies import Copy, Effect, normal, part_label
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.linalg import real_dtype
from gauge_optax.parts.constants import CHANNEL, Logits, Mean
from gauge_optax.parts.part import Arrays

VOCAB = "vocab"


def logit_shift(blocks: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None) -> BlockGauge:
    """A constant added along the `vocab` axis of an output layer's kernel and bias, or of one of them.

    Args:
      blocks: path → axes with one `vocab` axis, e.g. `{"lm_head/kernel": "_ vocab", "lm_head/bias": "vocab"}`.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

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


def norm_write_shift(
    write: Mapping[str, Axes] | None = None, *, tied: Mapping[str, Axes] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> BlockGauge:
    """A number added to all channels of what is written to a residual stream that only LayerNorms read.

    Args:
      write: path → axes of every leaf that writes to the stream; `channel` is the stream's axis:
        `{"embed/embedding": "_ channel", "blocks/{i}/mlp/down/kernel": "_ channel"}`. The leaves may also be divided
        among several gauges, because each leaf has its own numbers.
      tied: path → axes of an embedding that also gives the logits, in place of `write`: `{"embed/embedding": "vocab
        channel"}`. One number is added to all rows and channels. All logits of a position then gain the same number,
        which softmax ignores. If the model adds a table of positions to this embedding, an `embedding_shift` and a
        `write` shift of the positions make the same move together, so that `tied` need not be listed.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are {leaf path: shift}, a shift having the leaf's shape
      without `channel` and `vocab`.

    Raises:
      ValueError: malformed axes, or both or neither of `write` and `tied`, at once; any mismatch with the tree, when it
        is first seen.

    >>> go.norm_write_shift({"embedding": "_ channel"}).dim({"embedding": jnp.ones((5, 4))})
    5
    >>> gauge = go.norm_write_shift(tied={"embedding": "vocab channel"})
    >>> gauge.read({"embedding": jnp.array([[1.0, 2.0], [3.0, 6.0]])})
    {'': {'embedding': Array(3., dtype=float32)}}

    Reference: docs/design.md §3. Not a symmetry where an RMSNorm, or no norm, reads the stream.
    """
    if (write is None) == (tied is None):
        raise binding_error(
            "norm_write_shift", "takes either `write` or `tied`", "both" if write is not None else "neither",
            "leaves that only write to the stream, or embeddings that also give the logits",
            "[go.norm_write_shift({...}), go.norm_write_shift(tied={...})] for both kinds of leaves")
    if tied is not None:
        return block_gauge("norm_write_shift", TiedShift, {"tied": tied}, sizes)
    return block_gauge("norm_write_shift", WriteShift, {"write": write or {}}, sizes)


def key_bias(blocks: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None) -> BlockGauge:
    """Any array added to a bias that the function does not depend on, such as a key bias before softmax.

    Args:
      blocks: path → axes of such biases: `{"key/bias": "_ _"}`.
      sizes: axis name → length, for axes inside `(a b)` whose length no other block determines.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are {leaf path: array}, where the array has the leaf's shape
      and is added to the leaf; its entries outside the block do nothing.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> gauge = go.key_bias({"key/bias": "_ _"})
    >>> gauge.dim({"key": {"bias": jnp.ones((2, 3)), "kernel": jnp.ones((6, 2, 3))}})
    6

    Reference: docs/design.md §3. Not a symmetry under rotary embeddings or QK-norm.
    """
    return block_gauge("key_bias", Bias, {"blocks": blocks}, sizes)


@dataclasses.dataclass(frozen=True)
class Shift(Copy):
    """One copy. An element has a shift per leaf, which is constant along `vocab`."""

    effect: ClassVar[Effect] = "shift"
    balancing: ClassVar[Effect] = "shift"
    reserved: ClassVar[tuple[str, ...]] = (VOCAB,)
    part: ClassVar[type[Mean]] = Logits
    breaks: ClassVar[str] = (
        "logits themselves move: return the loss, or log-probabilities; else a tied head, soft-capping, or a loss that "
        "is no softmax"
    )

    @classmethod
    def of(cls, found: Matched, **options: Any) -> "Shift":
        for at, block in enumerate(found.blocks):
            for other in found.blocks[:at]:
                if block.path == other.path and overlap(cls.one_along(block), cls.one_along(other)):
                    raise binding_error(
                        found.gauge, f"two ranges of {', '.join(cls.reserved)} on '{block.path}'",
                        f"'{other.axes}' and '{block.axes}'", "one range per leaf in one gauge",
                        f"write one {found.gauge} per range, as a list of gauges")
        # A state has one array per block. The blocks are sorted, so that it does not depend on the order of a dict.
        blocks = tuple(sorted(found.blocks, key=lambda block: (block.path, block.axes)))
        return cls(found.key, (cls.part(part_label(found), found.named, found.shape, blocks, along=cls.reserved),))

    @classmethod
    def one_along(cls, block: Block) -> Block:
        """The block with length 1 along the axes along which a shift is constant."""
        return functools.reduce(shift_block, cls.reserved, block)

    @property
    def shifted(self) -> tuple[Block, ...]:
        """The blocks for which an element has a shift."""
        return self.blocks

    @property
    def dim(self) -> int:
        return sum(math.prod(self.one_along(block).view_shape) for block in self.shifted)

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> Arrays:
        views = []
        for block, key_of_block in zip(self.shifted, jax.random.split(key, len(self.shifted)), strict=True):
            rms = jnp.sqrt(jnp.mean(jnp.square(jnp.asarray(leaves[block.path], real_dtype()))))
            views.append(normal(key_of_block, self.one_along(block).view_shape, scale * rms))
        return self.join([tuple(views)])

    def split(self, element: Arrays) -> tuple[Any, ...]:
        views = []
        for block in self.shifted:
            one = self.one_along(block)
            views.append(one.view(jnp.asarray(element[block.path]).reshape(one.shape)))
        return (tuple(views),)

    def join(self, elements: Sequence[Any]) -> Arrays:
        ones = [(block, self.one_along(block)) for block in self.shifted]
        out = {one.path: jnp.zeros(one.shape, real_dtype()) for _, one in ones}
        for (_, one), view in zip(ones, elements[0], strict=True):
            out[one.path] = one.write(out[one.path], view)
        shapes = {block.path: _without(block, self.reserved) for block in self.shifted}
        return {path: x.reshape(shapes[path]) for path, x in out.items()}

    @classmethod
    def conjugated(cls, specs: Sequence[BlockSpec], element: Any, moved: Callable[[str, jax.Array], jax.Array]) -> Any:
        def after(path: str, shift: jax.Array) -> jax.Array:
            # `moved` takes an array with all axes of the leaf, `vocab` with length 1. Where an axis of the leaf is
            # `vocab` alone, the public element has no such axis, so that it is inserted here.
            spec = next(s for s in specs if copy_key(specs, s, path) is not None)
            lengths = iter(shift.shape)
            groups = parse_axes(cls.__name__, spec.pattern, spec.axes).groups
            alone = [len(group) == 1 and group[0].name in cls.reserved for group in groups]
            return moved(path, shift.reshape([1 if one else next(lengths) for one in alone])).reshape(shift.shape)

        return {path: after(path, shift) for path, shift in element.items()}

    @classmethod
    def axis_sizes(cls, named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        return {}  # the leaf alone determines all lengths


@dataclasses.dataclass(frozen=True)
class WriteShift(Shift):
    """One copy. An element has a number per row of each leaf, which all channels gain."""

    reserved: ClassVar[tuple[str, ...]] = (CHANNEL,)
    part: ClassVar[type[Mean]] = Mean
    breaks: ClassVar[str] = "a reader of the stream that does not subtract its mean, such as an RMSNorm, or a tied head"


@dataclasses.dataclass(frozen=True)
class TiedShift(Shift):
    """One copy. An element has a number per table, which all entries gain."""

    reserved: ClassVar[tuple[str, ...]] = (VOCAB, CHANNEL)
    part: ClassVar[type[Mean]] = Mean
    breaks: ClassVar[str] = (
        "logits themselves move: return the loss, or log-probabilities; else a reader of the stream that does not "
        "subtract its mean, such as an RMSNorm, or soft-capping"
    )


@dataclasses.dataclass(frozen=True)
class Bias(Shift):
    """One copy. An element has an array per leaf, of the leaf's shape."""

    reserved: ClassVar[tuple[str, ...]] = ()
    part: ClassVar[type[Mean]] = Mean
    breaks: ClassVar[str] = "rotary embeddings or QK-norm between the bias and the scores, or no softmax"

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> Arrays:
        keys = jax.random.split(key, len(self.blocks))
        views = (normal(k, block.view_shape, scale) for block, k in zip(self.blocks, keys, strict=True))
        return self.join([tuple(views)])


def shift_block(block: Block, axis: str) -> Block:
    """The block with length 1 along an axis: it makes the same selection on a leaf in which that axis has length 1."""
    at = [k for k, i in enumerate(block.picks) if not isinstance(i, int)][block.labels.index(axis)]
    split = tuple(1 if k == at else n for k, n in enumerate(block.split))
    picks = tuple(((0, 1),) if k == at else i for k, i in enumerate(block.picks))
    window = tuple(None if at in group else span for group, span in zip(block.groups, block.window, strict=True))
    shape = tuple(
        math.prod(split[k] for k in group) if span is None else n
        for group, span, n in zip(block.groups, window, block.shape, strict=True)
    )
    return dataclasses.replace(block, shape=shape, split=split, picks=picks, window=window)


def _without(block: Block, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Shape of a leaf's shift in a public element: the leaf's shape without these axes.

    If such an axis shares an axis of the leaf with others, as in `(vocab _)`, it has length 1 there instead.
    """
    shape = functools.reduce(shift_block, axes, block).shape
    labels = [[block.split_labels[i] for i in group] for group in block.groups]
    alone = [k for k, own in enumerate(labels) if len(own) == 1 and own[0] in axes]
    return tuple(n for k, n in enumerate(shape) if k not in alone)
