"""Scale channels: their lengths, and vectors without what changes these.

Along a channel, a point and a gradient make the sum on the slice that they make as they lie, and scales that are
constant along it stand outside of a sum: so it reads leaves, and no array is made for it.

Here: which channels there are, and sums along them. Not here: what DDC does with lengths (`ddc`), what anchors read
(`gauges`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, overlap
from gauge_optax.gauges.chart import Chart
from gauge_optax.gauges.reading import Anchored, Arrays, Reading
from gauge_optax.slice import Origin


class Pair(NamedTuple):
    """A leaf and its gradient as they lie: along a channel they make the sums that they make on the slice.

    Attributes:
      leaf: of the parameters.
      slope: of the gradient.
    """

    leaf: jax.Array
    slope: jax.Array


class Lying(NamedTuple):
    """A block that scales take to the slice entry by entry, so that sums need not have it there.

    Attributes:
      leaf: of the parameters, as it lies.
      along: what the channel's own scale multiplies it by, per channel: constant along a sum.
      others: the other scales on it: their readings, blocks and elements of F⁻¹.
    """

    leaf: jax.Array
    along: jax.Array
    others: tuple[tuple[Anchored, Block, jax.Array], ...]

    def weighted(self, *powers: int, by: jax.Array | None = None) -> jax.Array:
        """The leaf times what other scales multiply it by, once per power to that power, and times another factor.

        Powers (1, 1) make (2,), of other products: what two sums share, XLA's CPU backend writes down.
        """
        factors = [b.spread(r.named, r.factors(k * x, b), elsewhere=1.0) for r, b, x in self.others for k in powers]
        factors += [] if by is None else [by]
        return self.leaf * functools.reduce(jnp.multiply, factors) if factors else self.leaf


@dataclasses.dataclass(frozen=True)
class Channels:
    """Blocks of one reading that have one length per channel.

    Sums are taken off leaves as they lie where they can be: then the slice point is made entry by entry in what reads
    it, and need not be an array.

    Attributes:
      reading: the scale reading.
      blocks: the blocks.
      lying: of blocks that scales alone move, rotations aside.
    """

    reading: Anchored
    blocks: tuple[Block, ...]
    lying: Mapping[Block, Lying] = dataclasses.field(default_factory=dict)

    @property
    def entries(self) -> int:
        """How many entries carry one length."""
        return sum(b.entries(self.reading.named) for b in self.blocks)

    def dot(self, point: Arrays, vector: Arrays, pairs: Mapping[str, Pair], gone: Sequence["Measured"]) -> jax.Array:
        """Sums of products of a point and a vector, per channel.

        Args:
          point: bound leaves.
          vector: bound leaves.
          pairs: of leaves that make the same sums with what `vector` was.
          gone: channels whose part was taken from it since, with the rates.
        """
        totals = []
        for block in self.blocks:
            pair = _left(pairs.get(block.path), block, gone)
            if pair is not None:
                totals.append(block.total(self.reading.named, pair.leaf * pair.slope))
            elif own := self.lying.get(block):
                totals.append(block.total(self.reading.named, own.weighted(1) * vector[block.path]) * own.along)
            else:
                totals.append(block.total(self.reading.named, point[block.path] * vector[block.path]))
        return sum(totals[1:], totals[0])

    def squares(self, point: Arrays) -> jax.Array:
        """Sums of squares of a point, per channel."""
        totals = []
        for block in self.blocks:
            if own := self.lying.get(block):
                total = block.total(self.reading.named, own.weighted(1, 1) * own.leaf)
                totals.append(total * own.along * own.along)
            else:
                totals.append(block.total(self.reading.named, jnp.square(point[block.path])))
        return sum(totals[1:], totals[0])

    def times(self, point: Arrays, rates: jax.Array) -> Arrays:
        """Blocks of a point times a number per channel; zero elsewhere on their leaves."""
        out: Arrays = {}
        for block in self.blocks:
            part = point[block.path] * block.spread(self.reading.named, rates)
            out[block.path] = out[block.path] + part if block.path in out else part
        return out


Measured = tuple[Channels, jax.Array]
"""Channels with a number for each: their sums of squares at a point, the inverses of these, or rates."""


def _left(pair: Pair | None, block: Block, gone: Sequence[Measured]) -> Pair | None:
    """What is left of a pair, as far as a block goes; None where it cannot be told as it lies."""
    for channels, rates in gone:
        for other in channels.blocks:
            if pair is not None and overlap(other, block):
                own = channels.lying.get(other)
                if own is None:
                    return None
                part = other.spread(channels.reading.named, rates * own.along * own.along)
                pair = pair._replace(slope=pair.slope - own.weighted(2, by=part))
    return pair


def carried(on: Chart) -> tuple[Channels, ...]:
    """The blocks whose lengths are a channel's scales, each by itself."""
    # A whole block that is the next gauge's anchor has no length of its own.
    anchors = [block for place in on.order.first for block in place.anchor if not on.anchored[place.reading].named]
    found = []
    for place in on.order.first:
        reading = on.anchored[place.reading]
        blocks = reading.partner(place.anchor)
        taken = [not reading.named and any(overlap(block, anchor) for anchor in anchors) for block in blocks]
        found += [Channels(reading, (block,)) for block, off in zip(blocks, taken, strict=True) if not off]
    return tuple(found)


def fixed_sizes(on: Chart) -> tuple[Channels, ...]:
    """The anchors of scales."""
    places = [(on.anchored[place.reading], place.anchor) for place in on.order.first]
    return tuple(Channels(reading, anchor) for reading, anchor in places if reading.log_step)


def as_they_lie(
    on: Chart, origin: Origin | None, back: Mapping[Reading, jax.Array]
) -> tuple[list[Channels], list[Channels], dict[str, Pair]]:
    """What `carried` and `fixed_sizes` give, with their blocks as they lie, and gradients as they came.

    Args:
      on: the product on its tree.
      origin: what a slice point is made of; without, all sums are taken on the slice.
      back: F⁻¹ by reading.
    """
    if origin is None:
        return list(carried(on)), list(fixed_sizes(on)), {}
    leaves, movers = on.joint.values(origin.params), _movers(on)

    def placed(own: Channels) -> Channels:
        lying: dict[Block, Lying] = {}
        for block in own.blocks if own.reading in back else ():
            others = [(r, b) for r, b in movers[block.path] if r is not own.reading and overlap(block, b)]
            known = tuple((r, b, back[r]) for r, b in others if isinstance(r, Anchored) and r in back)
            if len(known) == len(others):
                along = own.reading.factors(back[own.reading], block)
                lying[block] = Lying(leaves[block.path], along, known)
        return dataclasses.replace(own, lying=lying)

    slopes = on.joint.vectors(origin.updates)
    pairs = {p: Pair(leaves[p], slopes[p]) for p in sorted(_paired(on))}
    return list(map(placed, carried(on))), list(map(placed, fixed_sizes(on))), pairs


def _paired(on: Chart) -> set[str]:
    """The leaves that gauges of scales and gauges of rotations move and nothing else.

    Without single rows of heads: their gradient may be rounding (`Turning.without_rounding`).
    """
    known = [(part.effect in ("diagonal", "orthogonal"), b.path) for part, own in on.parts for b in own.blocks]
    single = {b.block.path for head in on.joint.rotations for b in head.blocks if head.rows(b) == 1}
    return {p for _, p in known} - {p for plain, p in known if not plain} - single


def _movers(on: Chart) -> dict[str, list[tuple[Reading | None, Block]]]:
    """By leaf, the blocks that readings move, rotations aside, and those of shifts."""
    found: dict[str, list[tuple[Reading | None, Block]]] = {}
    moved = [(r, b) for r in on.readings if r not in on.turning_alone for b in r.moved]
    for reading, block in [*moved, *((None, b) for b in on.joint.shift_blocks)]:
        found.setdefault(block.path, []).append((reading, block))
    return found


def inverse_of(x: jax.Array) -> jax.Array:
    """1/x, and 0 where that would be infinite."""
    least = float(jnp.finfo(x.dtype).tiny)
    return jax.lax.select(x < least, jnp.zeros_like(x), 1.0 / jnp.maximum(x, least))


def without_lengths(
    channels: Sequence[Measured], point: Arrays, vector: Arrays, pairs: Mapping[str, Pair] | None = None
) -> Arrays:
    """A vector without what changes lengths, one gauge after the other; channels come with inverse squares."""
    out = dict(vector)
    gone: list[Measured] = []
    for own, inverse in channels:
        # Where no length is, the inverse is zero already. The select keeps XLA's CPU backend from handing the sum and
        # what it is spread over to one library call, which takes several times as long as the two apart.
        rates = jax.lax.select(inverse > 0, own.dot(point, out, pairs or {}, gone) * inverse, inverse)
        gone.append((own, rates))
        out |= {p: out[p] - x for p, x in own.times(point, rates).items()}
    return out
