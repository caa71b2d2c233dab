"""Constants: what may be added to weights without a change of the function. An element is what is added.

* `Mean`: a number that is the same along some axes: along the classes of an output layer; along the channels of a leaf
  that writes to a residual stream, if LayerNorms alone read the stream; along both in a tied table. For a key bias, a
  number per entry;
* `Trade`: a vector that the rows of some embedding tables gain and the rows of others lose;
* `Absorption`: a vector that moves from a bias, through the kernels that read it, into the biases behind them;
* `ReadShift`: a number per output that all channels of a kernel gain. The kernel reads a LayerNorm, whose output sums
  to zero over channels.
"""

import abc
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, laid_out
from gauge_optax.linalg import HIGHEST, real_dtype, safe_divide
from gauge_optax.parts.part import Additive, Anchor, Arrays, Constant, Part, moves

CHANNEL = "channel"


def plus(x: Arrays, added: Iterable[tuple[Block, jax.Array]]) -> Arrays:
    """The leaves `x` with arrays added to views of blocks; `added` has pairs of a block and its array."""
    out = dict(x)
    for b, shift in added:
        out[b.path] = b.write(out[b.path], b.view(out[b.path]) + shift)
    return out


def _without(b: Block, axes: tuple[str, ...]) -> list[int]:
    """The shape of a block's view with length 1 along some axes."""
    return [1 if label in axes else n for n, label in zip(b.view_shape, b.labels, strict=True)]


class Sum(Additive, Constant[Any]):
    """A constant whose elements, arrays or tuples of arrays, compose by addition. `added` is what each block gains."""

    def identity(self) -> Any:
        return jnp.zeros(self.shape, real_dtype())

    @abc.abstractmethod
    def added(self, e: Any, x: Arrays) -> Iterable[tuple[Block, jax.Array]]:
        """Pairs of a block and the array that the element `e` adds to its view, at the point `x`."""

    def act(self, e: Any, x: Arrays) -> Arrays:
        return plus(x, self.added(e, x))

    def undo(self, e: Any, x: Arrays) -> Arrays:
        """The point without the constant. A row, along the axes `along`, becomes zero if only roundoff remains of it.

        Otherwise the roundoff of a dead unit, or of an output layer that is constant over classes, would be read as a
        size or a rotation.
        """
        out = dict(x)
        for b, shift in self.added(e, x):
            axes, rows = tuple(k for k, label in enumerate(b.labels) if label in self.along), b.view(out[b.path])
            rest = rows - shift
            largest, before = (jnp.max(jnp.abs(v), axes, keepdims=True) for v in (rest, rows))
            least = 8.0 * float(jnp.finfo(rest.dtype).eps) * before
            out[b.path] = b.write(out[b.path], jnp.where(largest <= least, 0.0, rest))
        return out


class Translation(Sum):
    """A sum that adds the same numbers at every point, so that steps and gradients do not change."""

    def push(self, e: Any, u: Arrays, at: Arrays) -> Arrays:
        return u

    def pull(self, e: Any, g: Arrays, at: Arrays) -> Arrays:
        return g

    def beside_frozen(self, frozen: frozenset[str]) -> Part[Any] | None:
        return self


@dataclasses.dataclass(frozen=True)
class Mean(Translation):
    """Numbers that are equal along some axes of each block, read as the means along these axes.

    Elements are tuples with one array per block, shaped like the block's view but with length 1 along these axes.

    Attributes:
      along: the axes; () if every entry gains a number of its own.
    """

    along: tuple[str, ...] = ()

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        # Parts that read means along two axes of one leaf would wait for each other. Either may be read first: both can
        # take the empty anchor, which waits for nothing.
        return self.blocks, ()

    def identity(self) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(_without(b, self.along), real_dtype()) for b in self.blocks)

    def added(self, e: Any, x: Arrays) -> Iterable[tuple[Block, jax.Array]]:
        return zip(self.blocks, e, strict=True)

    def read(self, anchor: Anchor, x: Arrays) -> tuple[jax.Array, ...]:
        views = [(b.view(x[b.path]), tuple(map(b.labels.index, self.along))) for b in self.blocks]
        return tuple(jnp.mean(v, axes, keepdims=True) if axes else v for v, axes in views)

    def quiet(self, g: Arrays) -> Arrays:
        return self.undo(self.read(self.blocks, g), g)


class Logits(Mean):
    """The mean over classes of an output layer. While the layer is constant over classes, no other leaf has a gradient.
    """

    def reference_gradient(self, x: Arrays, g: Arrays) -> jax.Array | None:
        """The largest gradient of the output layer if one of its kernels is constant over classes at `x`, else 0.

        It is None if the blocks are biases alone, because a constant bias does not make other gradients zero.
        """
        kernels = [b for b in self.blocks if len(b.view_shape) > 1]
        if not kernels:
            return None
        largest = jnp.stack([jnp.max(jnp.abs(b.view(g[b.path])), initial=0.0) for b in self.blocks]).max()
        constant = jnp.stack([jnp.all(b.view(x[b.path]) == 0.0) for b in kernels]).any()
        return jnp.where(constant, largest, 0.0).astype(real_dtype())


@dataclasses.dataclass(frozen=True)
class Trade(Translation):
    """A vector that rows of the "up" tables gain and rows of the "down" tables lose, read from one side's mean row.

    Attributes:
      hidden: True if `Mean` parts remove the mean over the vector's axis from all "down" tables, but not from all "up"
        tables. The mean of the vector's entries is then read from the "up" tables.
    """

    hidden: bool = False

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        # If `hidden`, `read` uses both sides. Its result is the same before and after `Mean` parts have removed their
        # means, so that it need not wait for them: its only anchor is empty.
        return ((),) if self.hidden else (self._side("down"), self._side("up"))

    def _side(self, argument: str) -> Anchor:
        return tuple(b for b in self.blocks if b.argument == argument)

    def beside(self, others: Sequence[Part[Any]]) -> "Trade":
        means = [part for part in others if isinstance(part, Mean) and set(part.along) <= set(self.named)]
        down, up = (all(any(moves(m, (b,)) for m in means) for b in self._side(x)) for x in ("down", "up"))
        return dataclasses.replace(self, hidden=len(self.named) == 1 and down and not up)

    def added(self, e: jax.Array, x: Arrays) -> Iterable[tuple[Block, jax.Array]]:
        return [(b, laid_out(e if b.argument == "up" else -e, self.named, b.labels)) for b in self.blocks]

    def read(self, anchor: Anchor, x: Arrays) -> jax.Array:
        if not self.hidden:
            return self._mean(anchor, x) if anchor[0].argument == "up" else -self._mean(anchor, x)
        down, up = (self._mean(self._side(side), x) for side in ("down", "up"))
        return jnp.mean(down) - down + jnp.mean(up)

    def _mean(self, blocks: Anchor, x: Arrays) -> jax.Array:
        means = [b.total(self.named, x[b.path]) / b.entries(self.named) for b in blocks]
        return sum(means[1:], means[0]) / len(means)


@dataclasses.dataclass(frozen=True)
class Absorption(Sum):
    """A vector t that a bias b gains and later biases c lose: b ↦ b + t, c ↦ c − t·W, with the kernel W between them.

    `blocks` has b, then the bias behind each of `kernels`, in their order, then the biases that are added later to a
    residual stream that carries b. These last ones lose t itself: c ↦ c − t.

    Attributes:
      kernels: the kernels that read b.
    """

    kernels: tuple[Block, ...] = ()

    @property
    def passes(self) -> tuple[Block, ...]:
        return self.kernels

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return (self.blocks[:1],)

    def read(self, anchor: Anchor, x: Arrays) -> jax.Array:
        source = anchor[0]
        return source.view(x[source.path]).transpose([source.labels.index(name) for name in self.named])

    def added(self, e: jax.Array, x: Arrays) -> Iterable[tuple[Block, jax.Array]]:
        source, *targets = self.blocks
        yield source, laid_out(e, self.named, source.labels)
        for w, c in itertools.zip_longest(self.kernels, targets):
            yield c, -(laid_out(e, self.named, c.labels) if w is None else self._through(e, w, c, x[w.path]))

    def _through(self, e: jax.Array, kernel: Block, target: Block, leaf: jax.Array) -> jax.Array:
        """t·W, laid out like the view of `target`, the bias behind the kernel; `leaf` is the leaf that holds W."""
        named = [*range(len(self.named))]  # einsum names axes by numbers: first the axes of t, then the others of W
        axes = [self.named.index(x) if x in self.named else len(named) + k for k, x in enumerate(kernel.labels)]
        free = [k for k in axes if k not in named]
        # The axes of a target are the last free axes of its kernel; the sum runs over the earlier ones.
        kept = iter(free[len(free) - sum(label not in self.named for label in target.labels) :])
        laid = [self.named.index(label) if label in self.named else next(kept) for label in target.labels]
        return jnp.einsum(e, named, kernel.view(leaf), axes, laid, precision=HIGHEST)

    def beside_frozen(self, frozen: frozenset[str]) -> Part[Any] | None:
        return None if frozen & {b.path for b in self.blocks[1:]} else self


@dataclasses.dataclass(frozen=True)
class ReadShift(Sum):
    """A number u per output of a kernel W that reads a LayerNorm with scale γ and bias β: W ↦ W + u/γ.

    The norm's output before γ sums to zero over channels, and so hides u. But β·W grows by Σ(β/γ)·u, a sum over
    channels, which the bias c behind W loses: c ↦ c − Σ(β/γ)·u. Elements are tuples of one array u per kernel. `act`
    takes γ and β from the point that it moves, because they may be trained. With a zero in γ the norm hides nothing:
    such a point reads as zero, and no element moves it.

    Attributes:
      scale: the block of γ; () for a norm without a scale.
      bias: the block of β; () for a norm without a bias.
      count: how many of `blocks` are kernels, which come first. If the norm has a bias, all others are the biases c.
    """

    scale: Anchor = ()
    bias: Anchor = ()
    count: int = 1

    @property
    def along(self) -> tuple[str, ...]:
        return (CHANNEL,)

    @property
    def kernels(self) -> tuple[Block, ...]:
        """The kernels that read the norm."""
        return self.blocks[: self.count]

    @property
    def passes(self) -> tuple[Block, ...]:
        return (*self.scale, *self.bias)

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        return ((*self.kernels, *self.scale),)

    def identity(self) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(_without(b, (CHANNEL,)), real_dtype()) for b in self.kernels)

    def _of_norm(self, x: Arrays, if_absent: float) -> tuple[jax.Array, jax.Array]:
        """γ and β at `x`, (*named, channel) each. A missing γ is replaced by `if_absent`, a missing β by zeros."""

        def values(blocks: Anchor, default: float) -> jax.Array:
            if not blocks:
                return jnp.full((*(1 for _ in self.shape), 1), default, real_dtype())
            (b,) = blocks
            out: jax.Array = b.view(x[b.path]).transpose([b.labels.index(name) for name in (*self.named, CHANNEL)])
            return out

        return values(self.scale, if_absent), values(self.bias, 0.0)

    def _laid(self, values: jax.Array, labels: Sequence[str]) -> jax.Array:
        """Numbers, (*named) or (*named, channel), laid out to broadcast with axes of these labels."""
        return laid_out(values, (*self.named, CHANNEL)[: values.ndim], labels)

    def _times(self, e: Any, to_kernel: jax.Array, to_bias: jax.Array) -> Iterable[tuple[Block, jax.Array]]:
        for b, shift in zip(self.kernels, e, strict=True):
            yield b, shift * self._laid(to_kernel, b.labels)
        for b, c, shift in zip(self.kernels, self.blocks[self.count :], e, strict=False):
            outputs = [label for label in b.labels if label != CHANNEL]
            yield c, -shift.squeeze(b.labels.index(CHANNEL)) * self._laid(jnp.sum(to_bias, -1), outputs)

    @staticmethod
    def _whole(scale: jax.Array) -> jax.Array:
        """1 where γ has no zero in any channel, else 0, (*named, 1)."""
        return jnp.all(scale != 0.0, -1, keepdims=True).astype(scale.dtype)

    def added(self, e: Any, x: Arrays) -> Iterable[tuple[Block, jax.Array]]:
        scale, bias = self._of_norm(x, 1.0)
        inverse = safe_divide(self._whole(scale), scale)
        return self._times(e, inverse, bias * inverse)

    def push(self, e: Any, u: Arrays, at: Arrays) -> Arrays:
        """act(e, at + u) − act(e, at). As `act` is not affine in γ, it uses 1/γ′ − 1/γ = −dγ/(γγ′) with γ′ = γ + dγ.

        This formula avoids the roundoff of a difference of two inverses that are nearly equal. If γ or γ′ has a zero,
        `act` does nothing at that point. Only one of the two inverses then remains, and there is no difference.
        """
        (scale, bias), (ds, db) = self._of_norm(at, 1.0), self._of_norm(u, 0.0)
        after, before_whole, after_whole = scale + ds, self._whole(scale), self._whole(scale + ds)
        before_inverse, after_inverse = safe_divide(before_whole, scale), safe_divide(after_whole, after)
        both = before_whole * after_whole > 0.0
        to_kernel = jnp.where(both, -safe_divide(ds, scale * after), after_inverse - before_inverse)
        moved = safe_divide(db - safe_divide(bias, scale) * ds, after)
        to_bias = jnp.where(both, moved, (bias + db) * after_inverse - bias * before_inverse)
        return plus(u, self._times(e, to_kernel, to_bias))

    def read(self, anchor: Anchor, x: Arrays) -> tuple[jax.Array, ...]:
        scale, _ = self._of_norm(x, 1.0)
        whole = self._whole(scale).squeeze(-1)
        read = []
        for b in self.kernels:
            rows = b.view(x[b.path]) * self._laid(scale, b.labels)
            mean = jnp.mean(rows, b.labels.index(CHANNEL), keepdims=True)
            read.append(mean * self._laid(whole, b.labels))
        return tuple(read)
