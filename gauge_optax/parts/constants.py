"""Constants: what may be added to weights without a change of the function. An element is what is added.

* `Mean`: one number along some axes of every block (logits along classes, writers of a centred stream along channels,
  a tied table along both), or one for each entry (a key bias);
* `Trade`: a vector that the rows of some tables gain and those of others lose;
* `Absorption`: a bias that moves through kernels into the biases behind them;
* `ReadShift`: what a centred norm hides from the kernels that read it.
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
    """Leaves with something added to the views of blocks."""
    out = dict(x)
    for b, shift in added:
        out[b.path] = b.write(out[b.path], b.view(out[b.path]) + shift)
    return out


def _without(b: Block, axes: tuple[str, ...]) -> list[int]:
    """The shape of a block's view with length 1 along some axes."""
    return [1 if label in axes else n for n, label in zip(b.view_shape, b.labels, strict=True)]


class Sum(Additive, Constant[Any]):
    """A constant whose elements add: arrays of `shape`, or tuples of arrays. It says what it adds to which block."""

    def identity(self) -> Any:
        return jnp.zeros(self.shape, real_dtype())

    @abc.abstractmethod
    def added(self, e: Any, x: Arrays) -> Iterable[tuple[Block, jax.Array]]:
        """Blocks, each with what is added to its view."""

    def act(self, e: Any, x: Arrays) -> Arrays:
        return plus(x, self.added(e, x))

    def undo(self, e: Any, x: Arrays) -> Arrays:
        """Rows without their constant: exactly zero where only roundoff remains.

        The roundoff of a dead unit, or of a head that is constant over classes, would be read as a size or as a frame.
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
    """A sum that is the same wherever it acts, so that steps and gradients stay as they are."""

    def push(self, e: Any, u: Arrays, at: Arrays) -> Arrays:
        return u

    def pull(self, e: Any, g: Arrays, at: Arrays) -> Arrays:
        return g

    def beside_frozen(self, frozen: frozenset[str]) -> Part[Any] | None:
        return self


@dataclasses.dataclass(frozen=True)
class Mean(Translation):
    """One number along some axes of every block, read as the mean. Elements are tuples of one array per block.

    Attributes:
      along: the axes; () for what is added entry by entry.
    """

    along: tuple[str, ...] = ()

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        # If means along two axes of one leaf wait for each other, either may be read first: () says that.
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
    """The mean over classes of an output layer. While that layer is constant, no other leaf has a gradient."""

    def reference_gradient(self, x: Arrays, g: Arrays) -> jax.Array | None:
        """The largest gradient of the output layer if it is constant over classes at a slice point, else 0.

        None for a bias alone, which does not keep gradients from other leaves.
        """
        kernels = [b for b in self.blocks if len(b.view_shape) > 1]
        if not kernels:
            return None
        largest = jnp.stack([jnp.max(jnp.abs(b.view(g[b.path]))) for b in self.blocks]).max()
        constant = jnp.stack([jnp.all(b.view(x[b.path]) == 0.0) for b in kernels]).any()
        return jnp.where(constant, largest, 0.0).astype(real_dtype())


@dataclasses.dataclass(frozen=True)
class Trade(Translation):
    """A vector that rows of the "up" tables gain and rows of the "down" tables lose, read from the mean of one side.

    Attributes:
      hidden: whether the "down" tables alone are centred along the vector's axis. They then hide the vector's mean,
        which is read from the "up" tables.
    """

    hidden: bool = False

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        # What is read from tables that other parts centre does not depend on their means, so that it need not wait: ().
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
    """b ↦ b + t, c ↦ c − t·W: a bias that moves through kernels into the biases behind them.

    Attributes:
      kernels: the kernels that read the bias, one per further block. Blocks after these are biases that a residual
        stream gains later: c ↦ c − t.
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
        """t·W, laid out like the bias behind this kernel."""
        named = [*range(len(self.named))]  # the axes of the product by number, those of t first
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
    """W ↦ W + u/γ, c ↦ c − Σ(β/γ)·u. Elements are tuples of one array per kernel; γ and β may be trained.

    Attributes:
      scale: γ, a norm's scale; () for a norm without one.
      bias: β, its bias, or ().
      count: how many blocks are kernels. The others are the biases behind them, if the norm has a bias.
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
        """γ and β, (*named, channel) each; `if_absent` and zeros for a norm that lacks one."""

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

    def added(self, e: Any, x: Arrays) -> Iterable[tuple[Block, jax.Array]]:
        scale, bias = self._of_norm(x, 1.0)
        return self._times(e, safe_divide(jnp.ones((), scale.dtype), scale), safe_divide(bias, scale))

    def push(self, e: Any, u: Arrays, at: Arrays) -> Arrays:
        """act(e, at + u) − act(e, at), as `act` is not affine in γ. With γ′ = γ + dγ, 1/γ′ − 1/γ is −dγ/(γγ′)."""
        (scale, bias), (ds, db) = self._of_norm(at, 1.0), self._of_norm(u, 0.0)
        after = scale + ds
        to_bias = safe_divide(db - safe_divide(bias, scale) * ds, after)
        return plus(u, self._times(e, -safe_divide(ds, scale * after), to_bias))

    def read(self, anchor: Anchor, x: Arrays) -> tuple[jax.Array, ...]:
        scale, _ = self._of_norm(x, 1.0)
        whole = jnp.all(scale != 0.0, -1).astype(scale.dtype)  # a norm that leaves a channel out hides nothing
        read = []
        for b in self.kernels:
            rows = b.view(x[b.path]) * self._laid(scale, b.labels)
            mean = jnp.mean(rows, b.labels.index(CHANNEL), keepdims=True)
            read.append(mean * self._laid(whole, b.labels))
        return tuple(read)
