"""Second moments of heads: on which numbers of a head a variance lives, per `v_mode`.

* "none": one variance per head, of all its blocks together;
* "per_head_scalar": one per block and head;
* "per_head_matrix": a d × d matrix per block and head, by which rows are divided;
* "body_frame": one per entry, in the eigenbasis of the head's Gram matrix WᵀW;
* "body_frame_topk": the same for directions that the head has; the others are divided as under "none".

On the slice twins are the same numbers, so that eigenvectors need no signs. The eigenbasis is kept until the Gram
matrix has turned away from it; then moments go along, first ones by R, the rotation between two bases, second ones by
R∘R.

Here: variances of leaves that a rotation binds. Not here: all others, which have Adam's. References: DDC B.8.
Deviations: |R| in the reference makes variances grow; a fixed slope is added to the Gram matrix, which says what an
eigenbasis is where eigenvalues are equal; directions that are not divided follow the mean over the head's RMS, not
the bare mean, whose size is the loss's.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.gauges._head import HeadBlock, HeadInstance
from gauge_optax.gauges.chart import Chart
from gauge_optax.gauges.reading import Arrays, Reading
from gauge_optax.gauges.turning import TurnReading
from gauge_optax.inner.adam import Adam
from gauge_optax.linalg import (
    eigenvalue_cutoff,
    inverse_sqrt_by_products,
    matmul,
    real_dtype,
    symmetric_eigen,
    transpose,
)
from gauge_optax.xla import in_turn

V_MODES = ("body_frame_topk", "body_frame", "per_head_scalar", "per_head_matrix", "none")
_SLOPE = 5e-2  # of the mean eigenvalue, from the first direction to the last
_MATRIX_FLOOR = 3e-2  # of √‖V‖_F: directions with less variance than its square are stepped no further


class HeadMoments(NamedTuple):
    """What a mode keeps.

    Attributes:
      bases: eigenbasis per head, (heads, d, d), one array per size of heads; () for modes without.
      outer: second moment gᵀg/rows per head of every block, instance after instance; () for modes without.
      age: steps since the bases were renewed, int32.
    """

    bases: tuple[jax.Array, ...]
    outer: tuple[jax.Array, ...]
    age: jax.Array


def init_heads(on: Chart, point: Arrays, v_mode: str) -> HeadMoments:
    """At a starting point."""
    bases: tuple[jax.Array, ...] = ()
    outer: tuple[jax.Array, ...] = ()
    if v_mode.startswith("body_frame"):
        bases = tuple(in_turn(_eigenbasis, [_grams(alike, point) for alike in _by_size(on)]))
    if v_mode == "per_head_matrix":
        outer = tuple(jnp.zeros((*h.shape, h.size, h.size), real_dtype()) for h, _ in _blocks(on))
    return HeadMoments(bases, outer, jnp.zeros((), jnp.int32))


class Frames(NamedTuple):
    """How heads' leaves become what moments are kept of, per size of heads.

    Attributes:
      matrices: (heads, d, d), by which rows are multiplied; () where they come as moments are kept.
      live: which directions heads have, (heads, d), under the modes with eigenbases.
    """

    matrices: tuple[jax.Array, ...]
    live: tuple[jax.Array, ...]


def refreshed(
    on: Chart,
    point: Arrays,
    back: Mapping[Reading, jax.Array],
    heads: HeadMoments,
    mu: Arrays,
    nu: Arrays,
    options: Any,
) -> tuple[HeadMoments, Frames, Arrays, Arrays]:
    """The bases of this step, both moments in them.

    Args:
      on: the product on its tree.
      point: bound leaves.
      back: by reading what takes rows to the slice, for those that are not there.
      heads: of the last step.
      mu: first moments.
      nu: second moments.
      options: the settings of `scale_by_ddc`.
    """
    groups = _by_size(on)
    turns = {r.instance: x for r, x in back.items() if isinstance(r, TurnReading)}
    into = tuple(_joined(alike, turns) for alike in groups) if turns else ()
    if not heads.bases:
        return heads, Frames(into, ()), mu, nu
    grams = [_grams(alike, point) for alike in groups]
    if turns:
        grams = [matmul(matmul(transpose(turn), gram), turn) for turn, gram in zip(into, grams, strict=True)]
    turned = jnp.stack([_away(gram, basis) for gram, basis in zip(grams, heads.bases, strict=True)])
    age = heads.age + 1
    stale = jnp.max(turned) > options.refresh_drift
    if options.refresh_every is not None:
        stale |= age >= options.refresh_every

    def renew(mu: Arrays, nu: Arrays) -> tuple[tuple[jax.Array, ...], Arrays, Arrays, jax.Array]:
        fresh = tuple(in_turn(_eigenbasis, grams))
        for alike, old, new in zip(groups, heads.bases, fresh, strict=True):
            turn = matmul(transpose(old), new)
            mu, nu = _turned(alike, mu, turn), _turned(alike, nu, jnp.square(turn))
        return fresh, mu, nu, jnp.zeros_like(age)

    def kept(moments: Arrays) -> Arrays:
        return {p: moments[p].astype(real_dtype()) for alike in groups for h in alike for p in h.paths}

    bases, own_mu, own_nu, age = jax.lax.cond(
        stale, renew, lambda mu, nu: (heads.bases, mu, nu, age), kept(mu), kept(nu)
    )
    cut = options.live_threshold if options.v_mode == "body_frame_topk" else eigenvalue_cutoff(real_dtype())
    live = tuple(_live(gram, basis, cut) for gram, basis in zip(grams, bases, strict=True))
    matrices = tuple(map(matmul, into, bases)) if turns else bases
    return HeadMoments(bases, (), age), Frames(matrices, live), mu | own_mu, nu | own_nu


def _joined(alike: Sequence[HeadInstance], turns: Mapping[HeadInstance, jax.Array]) -> jax.Array:
    """Matrices of heads of one size, (heads, d, d)."""
    return jnp.concatenate([_flat(turns.get(h, _identity(h))) for h in alike])


def _identity(head: HeadInstance) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(head.size, dtype=real_dtype()), (*head.shape, head.size, head.size))


def in_bases(on: Chart, frames: Frames, vector: Arrays, back: bool = False) -> Arrays:
    """A vector as moments are kept, or back."""
    for alike, matrices in zip(_by_size(on), frames.matrices, strict=False):
        vector = _turned(alike, vector, transpose(matrices) if back else matrices)
    return vector


def divided(
    on: Chart,
    heads: HeadMoments,
    live: Sequence[jax.Array],
    options: Any,
    adam: Adam,
    mean: Arrays,
    gradient: Arrays,
    nu: Arrays,
) -> tuple[Arrays, Arrays, HeadMoments]:
    """Means over roots of second moments, of all leaves.

    Args:
      on: the product on its tree.
      heads: of this step.
      live: which directions heads have.
      options: the settings of `scale_by_ddc`.
      adam: hyperparameters.
      mean: first moments, corrected.
      gradient: of this step, as moments are kept.
      nu: second moments so far.

    Returns:
      The step, as moments are kept, the new second moments, and what else is kept of heads.
    """
    mode = options.v_mode
    squares = {p: jnp.square(gradient[p]) for p in nu}
    if mode == "per_head_scalar":
        squares = _on_blocks(on, squares, lambda h, b, view: _block_mean(h, b, view))
    if mode in ("none", "per_head_matrix"):
        means = {id(h): h.mean(squares) for h in on.joint.rotations}
        squares = _on_blocks(on, squares, lambda h, b, view: _per_head(h, b, means[id(h)], view))
    nu = {p: adam.second(squares[p], x) for p, x in nu.items()}
    step = {p: mean[p] / adam.root(x) for p, x in nu.items()}
    if mode == "per_head_matrix":
        by_matrix, outer = _by_matrix(on, heads.outer, adam, mean, gradient)
        return step | by_matrix, nu, heads._replace(outer=outer)
    for alike, own in zip(_by_size(on), live, strict=False):
        step = _only_live(alike, own, adam, mean, nu, step)
    return step, nu, heads


def _by_size(on: Chart) -> list[list[HeadInstance]]:
    sizes = sorted({h.size for h in on.joint.rotations})
    return [[h for h in on.joint.rotations if h.size == size] for size in sizes]


def _blocks(on: Chart) -> list[tuple[HeadInstance, HeadBlock]]:
    return [(h, b) for h in on.joint.rotations for b in h.blocks]


def _on_blocks(
    on: Chart, values: Arrays, change: Callable[[HeadInstance, HeadBlock, jax.Array], jax.Array]
) -> Arrays:
    out = dict(values)
    for head, block in _blocks(on):
        path = block.block.path
        if path in out:  # matrices under Muon have no second moment
            out[path] = block.write(out[path], change(head, block, block.view(out[path])))
    return out


def _block_mean(head: HeadInstance, block: HeadBlock, view: jax.Array) -> jax.Array:
    spare = tuple(k for k, label in enumerate(block.labels) if label not in head.named)
    return jnp.broadcast_to(jnp.mean(view, spare, keepdims=True), view.shape)


def _per_head(head: HeadInstance, block: HeadBlock, values: jax.Array, view: jax.Array) -> jax.Array:
    """A number per head on every entry of a block."""
    along = head.along_basis(block, jnp.broadcast_to(values[..., None], (*head.shape, head.size)))
    return jnp.broadcast_to(along, view.shape)


def _grams(alike: Sequence[HeadInstance], point: Arrays) -> jax.Array:
    """WᵀW of heads of one size, (heads, d, d), of mean eigenvalue 1."""
    gram = jnp.concatenate([_flat(h.gram(point, point)) for h in alike])
    size = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None] / gram.shape[-1]
    return gram / jnp.where(size > 0, size, 1.0)


def _flat(matrices: jax.Array) -> jax.Array:
    return matrices.reshape(-1, *matrices.shape[-2:])


def _eigenbasis(gram: jax.Array) -> jax.Array:
    slope = _SLOPE * jnp.diag(jnp.linspace(0.0, 1.0, gram.shape[-1], dtype=gram.dtype))
    return symmetric_eigen(gram + jnp.broadcast_to(slope, gram.shape))[1]


def _away(gram: jax.Array, basis: jax.Array) -> jax.Array:
    """The largest share of a head's Gram matrix that is off the diagonal of its basis."""
    seen = matmul(matmul(transpose(basis), gram), basis)
    off = seen * (1.0 - jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), seen.shape))
    whole = jnp.linalg.norm(seen, axis=(-2, -1))
    return jnp.max(jnp.linalg.norm(off, axis=(-2, -1)) / jnp.where(whole > 0, whole, 1.0))


def _live(gram: jax.Array, basis: jax.Array, cut: float | jax.Array) -> jax.Array:
    """Per direction of every head, whether its weights have it."""
    sizes = jnp.sum(basis * matmul(gram, basis), -2)
    return sizes > cut * jnp.max(sizes, -1, keepdims=True)


def _dealt(alike: Sequence[HeadInstance], whole: jax.Array) -> list[jax.Array]:
    """What heads of one size have in one array, instance by instance."""
    parts = jnp.split(whole, np.cumsum([h.heads for h in alike])[:-1])
    return [part.reshape(*h.shape, *whole.shape[1:]) for h, part in zip(alike, parts, strict=True)]


def _turned(alike: Sequence[HeadInstance], values: Arrays, matrices: jax.Array) -> Arrays:
    """Leaves with every head's rows times its matrix."""
    out = dict(values)
    for head, own in zip(alike, _dealt(alike, matrices), strict=True):
        out |= head.turn(out, own)
    return out


def _only_live(
    alike: Sequence[HeadInstance], live: jax.Array, adam: Adam, mean: Arrays, nu: Arrays, step: Arrays
) -> Arrays:
    """A step, where directions that a head has not follow the mean over the head's RMS."""
    out = dict(step)
    for head, own in zip(alike, _dealt(alike, live), strict=True):
        root = adam.root(head.mean(nu))
        for block in head.blocks:
            path = block.block.path
            view = block.view(out[path])
            plain = block.view(mean[path]) / _per_head(head, block, root, view)
            out[path] = block.write(out[path], jnp.where(head.along_basis(block, own), view, plain))
    return out


def _by_matrix(
    on: Chart, outer: tuple[jax.Array, ...], adam: Adam, mean: Arrays, gradient: Arrays
) -> tuple[Arrays, tuple[jax.Array, ...]]:
    """Rows times (V̂ + floor)^(−1/2): leaves of heads, and V of every block."""
    out, fresh = {p: mean[p] for h in on.joint.rotations for p in h.paths}, []
    for (head, block), past in zip(_blocks(on), outer, strict=True):
        path = block.block.path
        square = head.block_gram(block, gradient[path], gradient[path]) / head.rows(block)
        fresh.append(adam.second(square, past))
    at = iter(fresh)
    for head in on.joint.rotations:
        own = [adam.variance(next(at)) for _ in head.blocks]
        # A block without gradient (a key bias) is divided by what the head has.
        pooled = functools.reduce(jnp.add, own) / len(own)
        for block, variance in zip(head.blocks, own, strict=True):
            path = block.block.path
            size = jnp.maximum(*(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) for x in (variance, pooled)))
            floor = jnp.square(adam.eps + _MATRIX_FLOOR * jnp.sqrt(size)) + adam.eps_root
            damped = variance + floor * jnp.broadcast_to(jnp.eye(head.size, dtype=variance.dtype), variance.shape)
            factor = inverse_sqrt_by_products(damped, _MATRIX_FLOOR**2)
            out[path] = block.write(out[path], head.turn_view(block, block.view(mean[path]), factor))
    return out, tuple(fresh)
