"""Optimizers in the frame of the current point, for lists of gauges with GL(d) among them.

The list falls in two. Linear gauges, and all that share a leaf with them directly or through others, are stepped here:
scales are divided out by a frame read off the leaves that no linear gauge binds, pairs step by `_pairs`, rotated rows
by the same base in their own basis, everything else by Adam in the frame. The remaining gauges, and leaves in no gauge,
go to `fused`.

Here: the division, the state, the order of things. Not here: the maths of a pair (`_pairs`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax._sequence import alike
from gauge_optax.binding import Block, is_empty, leaves_by_path, with_leaves
from gauge_optax.gauges import _frame
from gauge_optax.gauges._head import BASIS, HeadInstance
from gauge_optax.gauges._linear import LinearInstance
from gauge_optax.gauges._matrices import Matrices, matrices_of
from gauge_optax.gauges._split import Bound, times
from gauge_optax.gauges.base import Gauges
from gauge_optax.gauges.product import Product, product
from gauge_optax.linalg import real_dtype
from gauge_optax.transforms._common import float_leaves, in_dtype_of, placeholder, require_params, zeros_sharded_like
from gauge_optax.transforms._here import Adam
from gauge_optax.transforms._pairs import Base, PairMoments, RowMoments, pair_step, parted, row_step
from gauge_optax.transforms._polar import polar_steps
from gauge_optax.transforms.decay import Decay, Mask, decay_factors, decay_rate, roles_of
from gauge_optax.transforms.fused import Rates

Arrays = dict[str, jax.Array]
Scalar = float | jax.Array


class Moments(NamedTuple):
    """How moments are kept.

    Attributes:
      adam: hyperparameters of leaves that are no matrices; the step is filled in.
      base: of pairs and rotated rows.
      mu_dtype: dtype of first moments; None for the parameters', at least float32.
    """

    adam: Adam
    base: Base
    mu_dtype: Any


class QuotientState(NamedTuple):
    """State of `quotient_adamw` and `quotient_muon`. All moments are numbers of the represented point.

    Attributes:
      count: steps so far, int32.
      mu: first moment of the in-frame gradient, on the leaves stepped here.
      nu: second moment of leaves that have one each; `optax.MaskedNode` elsewhere.
      columns: orthonormal columns of both factors of every pair, on their leaves.
      gauges: second moments of pairs and of rotated rows, (…, d, d).
      rest: of the optimizer of all other leaves.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates
    nu: optax.Updates
    columns: optax.Updates
    gauges: Any
    rest: Any


class Parts(NamedTuple):
    """A list of gauges in two.

    Attributes:
      linear: linear gauges, and those connected with them.
      rest: the others.
      bound: of `linear`.
      rows: rotated blocks of `linear`, one by one.
      matrices: rotated or scaled leaves that are stepped by a polar factor; none under Adam.
    """

    linear: Product
    rest: Product
    bound: Bound
    rows: tuple[HeadInstance, ...]
    matrices: Mapping[str, Matrices]

    @property
    def paired(self) -> frozenset[str]:
        """Leaves of pairs."""
        return frozenset(path for i in self.bound.linear for path in i.paths)

    @property
    def elementwise(self) -> frozenset[str]:
        """Leaves with entries that have a second moment of their own: in no pair and no row."""
        blocks = [b.block for head in (*self.rows, *self.sides) for b in head.blocks]
        whole = {p for p in self.bound.offset if _covers([b for b in blocks if b.path == p])}
        return frozenset(self.bound.offset) - whole - frozenset(self.matrices)

    @property
    def sides(self) -> tuple[HeadInstance, ...]:
        """Both sides of every pair."""
        return tuple(side for i in self.bound.linear for side in (i.left, i.right))


def _covers(blocks: Sequence[Block]) -> bool:
    """Whether blocks of one leaf select all of its entries."""
    if not blocks:
        return False
    seen = np.zeros(blocks[0].shape, bool)
    for block in blocks:
        seen = block.write(seen, np.ones(block.view_shape, bool))
    return bool(seen.all())


def divide(group: Product, params: optax.Params, by_polar: bool) -> Parts:
    """The two halves of a list on this tree."""
    paths = [set(part.bound(params).offset) for part in group.parts]
    linear = {k for k, part in enumerate(group.parts) if part.bound(params).linear}
    while more := {
        k for k, own in enumerate(paths) if k not in linear and any(own & paths[other] for other in linear)
    }:
        linear |= more
    here = Product(tuple(part for k, part in enumerate(group.parts) if k in linear))
    rest = Product(tuple(part for k, part in enumerate(group.parts) if k not in linear))
    bound = here.bound(params)
    paired = {path for i in bound.linear for path in i.paths}
    read = {p: m for p, m in matrices_of(bound).items() if p not in paired} if by_polar else {}
    rows = tuple(
        HeadInstance(h.gauge, h.key, h.named, h.shape, h.size, (block,))
        for h in bound.rotations
        for block in h.blocks
        if block.block.path not in read
    )
    return Parts(here, rest, bound, rows, read)


def quotient(
    name: str,
    gauges: Gauges,
    moments: Moments,
    rates: Rates,
    mask: Mask,
    rest_of: Callable[[Product, Decay], optax.GradientTransformationExtraArgs],
) -> optax.GradientTransformationExtraArgs:
    """The optimizer behind `quotient_adamw` and `quotient_muon`.

    Args:
      name: of the alias, for messages.
      gauges: a gauge or a sequence of them.
      moments: the base.
      rates: learning rate and decay of the leaves stepped here.
      mask: where they decay.
      rest_of: makes the optimizer of all other leaves from their gauges and decay.

    Returns:
      The optimizer; its `update` needs `params`.
    """
    group = product(gauges)

    def rest_at(parts: Parts, params: optax.Params) -> optax.GradientTransformationExtraArgs:
        return rest_of(parts.rest, roles_of(rates.weight_decay, parts.rest.bound(params)))

    def init_fn(params: optax.Params) -> QuotientState:
        count = jnp.zeros((), jnp.int32)
        if is_empty(params):
            rest = rest_of(group, rates.weight_decay).init(params)
            return QuotientState(count, params, params, params, placeholder(), rest)
        parts = divide(group, params, moments.base.polar is not None)
        decay_factors(rates.weight_decay, group.bound(params), params, "adamw", mask)
        mu = _only(params, parts.bound.offset, lambda p: zeros_sharded_like(p, moments.mu_dtype or _wide(p)))
        nu = _only(params, parts.elementwise, lambda p: zeros_sharded_like(p, _wide(p)))
        columns = _only(params, parts.paired, lambda p: zeros_sharded_like(p, _wide(p)))
        rest = rest_at(parts, params).init(_without(params, parts.bound.offset))
        return QuotientState(count, mu, nu, columns, _outers(parts, moments.base), rest)

    def update_fn(
        updates: optax.Updates, state: QuotientState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, QuotientState]:
        require_params(name, params)
        parts = divide(group, params, moments.base.polar is not None)
        parts.bound.vectors(updates)  # raises where a leaf is missing
        hidden = [_without(tree, parts.bound.offset) for tree in (updates, params)]
        others, rest = rest_at(parts, params).update(hidden[0], state.rest, hidden[1], **extra)
        count = optax.safe_increment(state.count)
        tangents, new = _step(parts, moments, params, updates, state, count)
        factors = decay_factors(rates.weight_decay, group.bound(params), params, "adamw", mask)
        values = parts.bound.centre(parts.bound.values(params))
        rate, decay = _at(rates.learning_rate, state.count), decay_rate(rates.weight_decay, state.count)
        steps = {p: -rate * (x + decay * factors[p] * values[p]) for p, x in tangents.items()}
        out = in_dtype_of(updates, steps | leaves_by_path(others))
        return out, new._replace(count=count, rest=rest)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _at(rate: optax.ScalarOrSchedule, count: jax.Array) -> Any:
    return rate(count) if callable(rate) else rate


def _wide(leaf: Any) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _only(params: optax.Params, paths: Any, made: Callable[[Any], jax.Array]) -> Any:
    """A tree like `params` with something made of these leaves, `optax.MaskedNode` elsewhere."""
    leaves = leaves_by_path(params)
    return with_leaves(params, {p: made(x) if p in paths else optax.MaskedNode() for p, x in leaves.items()})


def _without(tree: Any, paths: Any) -> Any:
    return with_leaves(tree, dict.fromkeys(paths, optax.MaskedNode()))


def _outers(parts: Parts, base: Base) -> Any:
    """Second moments that several rows share, zero."""
    if base.polar is not None and not parts.rows:
        return ()

    def zeros(head: HeadInstance) -> jax.Array:
        return jnp.zeros((*head.shape, head.size, head.size), real_dtype())

    pairs = tuple((zeros(i.left), zeros(i.right)) for i in parts.bound.linear) if base.polar is None else ()
    return pairs, tuple(zeros(head) for head in parts.rows)


def _step(
    parts: Parts,
    moments: Moments,
    params: optax.Params,
    updates: optax.Updates,
    state: QuotientState,
    count: jax.Array,
) -> tuple[Arrays, QuotientState]:
    """Tangents of the leaves stepped here, and the state without its count and rest.

    Of a leaf that pairs and rows do not cover, Adam steps every entry first; theirs are then replaced.
    """
    bound = parts.bound
    values = bound.centre(bound.values(params))
    outward, inward = _scale_factors(bound, values, parts.paired)
    hat, gradient = times(values, inward), times(bound.vectors(updates), outward)
    mu, nu, columns = (float_leaves(tree, real_dtype()) for tree in (state.mu, state.nu, state.columns))
    adam, old = moments.adam._replace(step=count), dict(mu)
    base = moments.base._replace(adam=moments.base.adam._replace(step=count))
    out: Arrays = {}
    for path in parts.elementwise:
        out[path], mu[path], nu[path] = adam.scalar(gradient[path], mu[path], nu[path])
    out |= _by_polar(base, parts.matrices, gradient, mu)
    old_pairs, old_rows = state.gauges or ((), ())
    plain, kept = Base(adam, None), (mu, columns, out)
    rows = tuple(_turned(plain, h, x, gradient, old, kept) for h, x in zip(parts.rows, old_rows, strict=True))
    pairs = _paired(base, bound.linear, old_pairs, (hat, gradient, old), kept)
    new = state._replace(
        mu=in_dtype_of(state.mu, mu),
        nu=in_dtype_of(state.nu, nu),
        columns=in_dtype_of(state.columns, columns),
        gauges=(pairs if old_pairs else (), rows) if state.gauges else (),
    )
    return times(out, outward), new


def _turned(
    plain: Base,
    head: HeadInstance,
    outer: jax.Array,
    gradient: Arrays,
    old: Arrays,
    kept: tuple[Arrays, Arrays, Arrays],
) -> jax.Array:
    """The step of one rotated block, into the last of `kept`; first moments are renewed, the second is returned."""
    mu, _, out = kept
    step, new = row_step(plain, (1, 1), head.stacked(gradient), RowMoments(head.stacked(old), outer))
    out |= head.unstacked({**gradient, **out}, step)
    mu |= head.unstacked(mu, new.mu)
    return new.outer


def _paired(
    base: Base,
    linear: Sequence[LinearInstance],
    outers: Sequence[Any],
    here: tuple[Arrays, Arrays, Arrays],
    kept: tuple[Arrays, Arrays, Arrays],
) -> tuple[Any, ...]:
    """The steps of all pairs, into the last of `kept`; first moments and bases are renewed, second moments returned."""
    (hat, gradient, before), (mu, columns, out) = here, kept
    static, traced = parted(base)
    given = []
    for k, instance in enumerate(linear):
        (left, right), own = instance.factors(before), outers[k] if outers else ((), ())
        old = PairMoments(RowMoments(left, own[0]), RowMoments(right, own[1]), instance.factors(columns))
        given.append((instance.factors(hat), instance.factors(gradient), old))
    fans = [(_fans(i.left), _fans(i.right)) for i in linear]
    found = alike(lambda arrays, fan: pair_step(static, fan, traced, *arrays), given, fans)
    for instance, (steps, new) in zip(linear, found, strict=True):
        out |= _unpaired(instance, {**gradient, **out}, steps)
        mu |= _unpaired(instance, mu, (new.left.mu, new.right.mu))
        columns |= _unpaired(instance, columns, new.bases)
    return tuple((new.left.outer, new.right.outer) for _, new in found)


def _by_polar(base: Base, matrices: Mapping[str, Matrices], gradient: Arrays, mu: Arrays) -> Arrays:
    """Polar steps of rotated or scaled matrices; their first moments in `mu` are renewed."""
    if base.polar is None:
        return {}
    b1, means = base.adam.b1, {}
    for path in matrices:
        mu[path] = b1 * mu[path] + (1 - b1) * gradient[path]
        means[path] = base.adam.debias(mu[path], gradient[path], b1)
    return polar_steps(base.polar, matrices, means)


def _scale_factors(bound: Bound, values: Arrays, paired: frozenset[str]) -> tuple[Arrays, Arrays]:
    """e^(w·f) and its inverse per scaled leaf, f read where no linear gauge acts: that does not move with GL."""
    still = {p: jnp.zeros_like(x) if p in paired else x for p, x in values.items()}
    f = _frame.triangular(bound.system, still)
    return bound.system.factors(f), bound.system.factors(tuple(-x for x in f))


def _fans(side: HeadInstance) -> tuple[int, int]:
    """Inputs and outputs of one side's largest block as its leaf stores it: a basis that stands last is an output."""
    block = max(side.blocks, key=side.rows)
    return (side.rows(block), side.size) if block.labels[-1] == BASIS else (side.size, side.rows(block))


def _unpaired(instance: LinearInstance, leaves: Arrays, rows: tuple[jax.Array, jax.Array]) -> Arrays:
    """The touched leaves with the rows of both sides in place."""
    once = {**leaves, **instance.left.unstacked(leaves, rows[0])}
    twice = {**once, **instance.right.unstacked(once, rows[1])}
    return {path: twice[path] for path in instance.paths}
