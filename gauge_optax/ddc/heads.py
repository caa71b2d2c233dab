"""Moments: `Adam`'s arithmetic for one array, as in `optax.scale_by_adam`, and the second moments of attention heads.

The argument `v_mode` says which numbers of a head share one second moment (variance). A head has one block per
kernel or bias (queries, keys and their biases, say), with rows of d numbers:

* "none": one variance per head, of all its blocks together;
* "per_head_scalar": one per block and head;
* "per_head_matrix": a d × d matrix V per block and head; rows are multiplied by V^(−1/2);
* "body_frame": one per entry, in the eigenbasis of the Gram matrix WᵀW of the head's rows W. Only *live* directions
  have variances of their own: those whose eigenvalue is not roundoff. In the other directions, the first moment is
  divided by the root of the head's mean variance;
* "body_frame_topk": the same, but a direction is live if its eigenvalue exceeds `live_threshold` times the largest.

All weights of one function (twins) have the same slice point. They therefore get the same eigenvectors, whatever signs
these have. The eigenbasis is kept until the Gram matrix is too far from diagonal in it. Then moments move to the new
basis: first moments by the rotation R between the two bases, second moments by R∘R, its entrywise square.

Reference: DDC B.8. Deviations: the reference takes |R| in place of R∘R, which makes variances grow; a fixed diagonal is
added to the Gram matrix, which makes the eigenbasis unique if eigenvalues are equal; in directions that are not live,
the reference steps by the first moment itself, undivided, so that the step grows with the scale of the loss.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import in_single_or_better
from gauge_optax.linalg import (
    eigenvalue_cutoff,
    inverse_sqrt_by_products,
    matmul,
    real_dtype,
    symmetric_eigen,
    transpose,
)
from gauge_optax.parts.heads import by_size, stack_heads, unstack_heads
from gauge_optax.parts.part import Arrays
from gauge_optax.slice import Slice
from gauge_optax.transformation import in_dtypes_of_state
from gauge_optax.xla import cond, varying_like

Scalar = float | jax.Array
V_MODES = ("body_frame_topk", "body_frame", "per_head_scalar", "per_head_matrix", "none")
_TIE_BREAK = 5e-2  # numbers from 0 to this share of the mean eigenvalue are added to a Gram matrix's diagonal
_MATRIX_FLOOR = 3e-2  # a first moment is divided by at least this share of √‖V‖_F, which bounds the step


class Adam(NamedTuple):
    """The hyperparameters at one step.

    Attributes:
      b1: decay of first moments.
      b2: decay of second moments.
      eps: added to the root of the second moment.
      eps_root: added to the second moment inside the root.
      nesterov: whether `mean` uses Nesterov momentum.
      count: the number of this step, from 1.
      first_weight: the bias correction of first moments, 1 − b1^count.
      next_weight: this correction at the next step, 1 − b1^(count+1); unused without `nesterov`.
      second_weight: the bias correction of second moments, 1 − b2^count.
    """

    b1: Scalar
    b2: Scalar
    eps: Scalar
    eps_root: Scalar
    nesterov: bool
    count: jax.Array  # type: ignore[assignment]
    first_weight: jax.Array
    next_weight: jax.Array
    second_weight: jax.Array

    @classmethod
    def at(cls, options: Any, count: jax.Array) -> "Adam":
        """Returns the hyperparameters at step `count`; `options` has the first five fields of this class."""
        b1, b2 = options.b1, options.b2
        weights = 1 - b1**count, 1 - b1 ** (count + 1), 1 - b2**count
        return cls(b1, b2, options.eps, options.eps_root, options.nesterov, count, *weights)

    def first(self, gradient: jax.Array, past: jax.Array) -> jax.Array:
        """Returns the new first moment."""
        return self.b1 * past + (1 - self.b1) * gradient

    def second(self, square: jax.Array, past: jax.Array) -> jax.Array:
        """Returns the new second moment."""
        return self.b2 * past + (1 - self.b2) * square

    def mean(self, moment: jax.Array, gradient: jax.Array) -> jax.Array:
        """Returns the first moment with its bias corrected, and with Nesterov's look-ahead if `nesterov` is True."""
        # JAX does not divide a float8 array by a float32 one.
        moment, gradient = in_single_or_better(moment), in_single_or_better(gradient)
        if not self.nesterov:
            return moment / self.first_weight
        return self.b1 * moment / self.next_weight + (1 - self.b1) * gradient / self.first_weight

    def variance(self, moment: jax.Array) -> jax.Array:
        """Returns the second moment with its bias corrected."""
        return in_single_or_better(moment) / self.second_weight

    def without_bias(self, root: jax.Array) -> jax.Array:
        """Returns the root of the bias-corrected second moment, given the root of the second moment itself."""
        root = root / jnp.sqrt(self.second_weight)
        zero = isinstance(self.eps_root, int | float) and self.eps_root == 0
        return root if zero else jnp.sqrt(jnp.square(root) + self.eps_root)

    def root(self, moment: jax.Array) -> jax.Array:
        """Returns the divisor of a first moment: √(v̂ + eps_root) + eps, with v̂ the bias-corrected second moment."""
        variance = self.variance(moment)
        # `eps_root` is traced under `inject_hyperparams`; where it is a plain zero, no leaf needs the addition.
        zero = isinstance(self.eps_root, int | float) and self.eps_root == 0
        return jnp.sqrt(variance if zero else variance + self.eps_root) + self.eps


class HeadMoments(NamedTuple):
    """The state of heads between steps; which fields are empty depends on `v_mode`.

    Attributes:
      bases: for the two "body_frame" modes, the eigenbasis of every head: one array (heads, d, d) per head size d.
      outer: for "per_head_matrix", one array V of shape (*shape, d, d) per block: the average over steps of gᵀg/n,
        where g are the n rows of a head's gradient in the block. Blocks are ordered as the turns in `Slice.heads`.
      age: steps since the bases were computed, int32.
    """

    bases: tuple[jax.Array, ...]
    outer: tuple[jax.Array, ...]
    age: jax.Array


class Bases(NamedTuple):
    """The bases in which the moments of heads are kept. A *turn* is a part that rotates the heads of some leaves.

    Attributes:
      matrices: turn → (*shape, d, d), the matrices that map rows to these bases; {} if rows need no change.
      live: turn → which directions are live, (*shape, d), for the modes with eigenbases; else {}.
    """

    matrices: Mapping[Any, jax.Array]
    live: Mapping[Any, jax.Array]


def init_heads(s: Slice, point: Arrays, v_mode: str, paper: bool = False) -> HeadMoments:
    """Returns the state of heads at a starting point.

    Args:
      s: the slice.
      point: bound leaves of the slice point.
      v_mode: one of `V_MODES`.
      paper: if True, follows B.8 to the letter.
    """
    bases: tuple[jax.Array, ...] = ()
    outer: tuple[jax.Array, ...] = ()
    if v_mode.startswith("body_frame"):
        bases = tuple(_eigenbasis(_grams(turns, point), paper) for turns in by_size(s.heads))
    if v_mode == "per_head_matrix":
        blocks = [(b, jnp.zeros((*t.shape, t.size, t.size), real_dtype())) for t in s.heads for b in t.blocks]
        outer = tuple(varying_like(zeros, point[b.path]) for b, zeros in blocks)
    return HeadMoments(bases, outer, jnp.zeros((), jnp.int32))


def refreshed(
    s: Slice,
    point: Arrays,
    into: Mapping[Any, jax.Array] | None,
    heads: HeadMoments,
    mu: Arrays,
    nu: Arrays,
    options: Any,
) -> tuple[HeadMoments, Bases, Arrays, Arrays]:
    """Computes new eigenbases if the old ones are stale, and moves the moments to them.

    Args:
      s: the slice.
      point: bound leaves of the slice point; if `into` is given, with heads in their stored basis.
      into: turn of heads → the matrices that map its rows in `point` to the slice; None if they are on the slice.
      heads: the state after the last step.
      mu: first moments in the old bases.
      nu: second moments in the old bases.
      options: the settings of `scale_by_ddc`.

    Returns:
      The state of heads, its bases, and the first and the second moments in these bases.
    """
    groups = by_size(s.heads)
    turns = [turn for group in groups for turn in group]
    if not heads.bases:
        return heads, Bases(into or {}, {}), mu, nu
    grams = [_grams(turns, point) for turns in groups]
    if into is not None:
        entering = [stack_heads([into[turn] for turn in turns]) for turns in groups]
        grams = [matmul(matmul(transpose(e), gram), e) for e, gram in zip(entering, grams, strict=True)]
    kept = in_dtypes_of_state(heads.bases, heads.bases)
    turned = jnp.stack([_off_diagonal(gram, basis) for gram, basis in zip(grams, kept, strict=True)])
    age = heads.age + 1
    stale = jnp.max(turned) > options.refresh_drift
    if options.refresh_every is not None:
        stale |= age >= options.refresh_every

    def renew(mu: Arrays, nu: Arrays) -> Any:
        fresh = in_dtypes_of_state(kept, tuple(_eigenbasis(gram, options.paper) for gram in grams))
        # `_eigenbasis` ends by reversing columns. This reversal is undone before `_unstacked` and done again after the
        # matrix product, because only matrix products should read the results of `_unstacked`; its docstring says why.
        ascending = _unstacked(groups, [basis[..., ::-1] for basis in fresh])
        pairs = zip(_unstacked(groups, kept), ascending, strict=True)
        rotations = dict(zip(turns, (matmul(transpose(old), new)[..., ::-1] for old, new in pairs), strict=True))
        weights = jnp.abs if options.paper else jnp.square
        squares = {turn: weights(rotation) for turn, rotation in rotations.items()}
        return fresh, _turned(rotations, mu), _turned(squares, nu), jnp.zeros_like(age)

    paths = [path for turn in s.heads for path in turn.paths]
    head_mu, head_nu = ({p: moments[p].astype(real_dtype()) for p in paths} for moments in (mu, nu))
    # Inside `shard_map`, new bases may vary over mesh axes over which the stored ones do not. `jax.lax.cond` refuses
    # branches that differ in this.
    choose = cond if jax.sharding.get_abstract_mesh().manual_axes else jax.lax.cond
    bases, head_mu, head_nu, age = choose(
        stale, renew, lambda mu, nu: (kept, mu, nu, age), head_mu, head_nu
    )
    matrices = dict(zip(turns, _unstacked(groups, bases), strict=True))
    cut = options.live_threshold if options.v_mode == "body_frame_topk" else eigenvalue_cutoff(real_dtype())
    live = {}
    for (turn, basis), gram in zip(matrices.items(), _unstacked(groups, grams), strict=True):
        size = jnp.einsum("...ii->...i", matmul(transpose(basis), matmul(gram, basis)))
        live[turn] = size > cut * jnp.max(size, -1, keepdims=True)
    if into is not None:
        matrices = {turn: matmul(into[turn], basis) for turn, basis in matrices.items()}
    return HeadMoments(bases, (), age), Bases(matrices, live), mu | head_mu, nu | head_nu


def in_bases(bases: Bases, vector: Arrays, back: bool = False) -> Arrays:
    """Moves a vector's heads to the bases in which moments are kept; with back=True, from these bases back."""
    return _turned({turn: transpose(x) if back else x for turn, x in bases.matrices.items()}, vector)


def divided(
    s: Slice,
    heads: HeadMoments,
    live: Mapping[Any, jax.Array],
    options: Any,
    adam: Adam,
    mean: Arrays,
    gradient: Arrays,
    nu: Arrays,
) -> tuple[Arrays, Arrays, HeadMoments]:
    """Divides the first moments of all leaves by the roots of their second moments.

    Args:
      s: the slice.
      heads: the state of heads at this step.
      live: turn → which directions are live, as in `Bases`.
      options: the settings of `scale_by_ddc`.
      adam: hyperparameters of this step.
      mean: first moments with their bias corrected, in the bases of moments.
      gradient: the gradient of this step, in the same bases.
      nu: second moments so far.

    Returns:
      The step, in the bases of moments, the new second moments, and the new state of heads.
    """
    mode = options.v_mode
    squares = {p: jnp.square(gradient[p]) for p in nu}
    for turn in s.heads if mode in ("none", "per_head_scalar", "per_head_matrix") else ():
        pooled = None if mode == "per_head_scalar" else turn.mean({p: jnp.square(gradient[p]) for p in turn.paths})
        for block in turn.blocks:
            if block.path in squares:  # matrices under Muon have no second moment
                rows = block.rows(squares[block.path])
                own = block.row_sums(turn.named, rows) / (turn.row_count(block) * turn.size)
                variance = own if pooled is None else pooled
                spread = jnp.broadcast_to(turn.per_head(block, variance), rows.shape)
                squares[block.path] = block.write(squares[block.path], spread)
    nu = {p: adam.second(squares[p], x) for p, x in nu.items()}
    step = {p: mean[p] / adam.root(x) for p, x in nu.items()}
    if mode == "per_head_matrix":
        by_matrix, outer = _by_matrix(s, heads.outer, adam, mean, step, gradient, options.paper)
        return step | by_matrix, nu, heads._replace(outer=outer)
    for turn, alive in live.items():
        # In directions that are not live, `mean` is divided by the root of the head's mean second moment; in the paper,
        # it is not divided.
        root = jnp.ones(turn.shape, real_dtype()) if options.paper else adam.root(turn.mean(nu))
        for block in turn.blocks:
            rows = block.rows(step[block.path])
            plain = block.rows(mean[block.path]) / turn.per_head(block, root)
            chosen = jnp.where(turn.along_basis(block, alive), rows, plain)
            step[block.path] = block.write(step[block.path], chosen)
    return step, nu, heads


def _grams(turns: Sequence[Any], point: Arrays) -> jax.Array:
    """Gram matrices WᵀW of heads of one size, (heads, d, d), scaled to a mean eigenvalue of 1."""
    gram = stack_heads([turn.gram(point, point) for turn in turns])
    size = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None] / gram.shape[-1]
    return gram / jnp.where(size > 0, size, 1.0)


def _eigenbasis(gram: jax.Array, paper: bool) -> jax.Array:
    if paper:
        return symmetric_eigen(gram)[1]
    ramp = _TIE_BREAK * jnp.diag(jnp.linspace(0.0, 1.0, gram.shape[-1], dtype=gram.dtype))
    return symmetric_eigen(gram + jnp.broadcast_to(ramp, gram.shape))[1]


def _off_diagonal(gram: jax.Array, basis: jax.Array) -> jax.Array:
    """The largest share, over all heads, of a Gram matrix (in Frobenius norm) that is off the diagonal in its basis."""
    inside = matmul(matmul(transpose(basis), gram), basis)
    off = inside * (1.0 - jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), inside.shape))
    whole = jnp.linalg.norm(inside, axis=(-2, -1))
    return jnp.max(jnp.linalg.norm(off, axis=(-2, -1)) / jnp.where(whole > 0, whole, 1.0))


def _unstacked(groups: Sequence[Sequence[Any]], stacked: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns one array per turn of heads, from one array per head size.

    Only matrix products should read the results. XLA fuses a slice of an array with any other operation that reads it,
    and compiles every fused program separately. Programs without slices are equal in all layers and compiled once.
    """
    return [x for turns, array in zip(groups, stacked, strict=True) for x in unstack_heads(array, turns)]


def _turned(matrices: Mapping[Any, jax.Array], leaves: Arrays) -> Arrays:
    """Multiplies the rows of every head of these leaves by the head's matrix."""
    out = dict(leaves)
    for turn, matrix in matrices.items():
        out |= turn.turned(out, matrix)
    return out


def _by_matrix(
    s: Slice, outer: tuple[jax.Array, ...], adam: Adam, mean: Arrays, step: Arrays, gradient: Arrays, paper: bool
) -> tuple[Arrays, tuple[jax.Array, ...]]:
    """Returns the first moments of heads with rows multiplied by (V̂ + floor)^(−1/2), and the new V of every block.

    Entries of a fused leaf that are in no head keep Adam's `step`. A leaf that Muon steps is not in `step`; there, such
    entries keep their first moment, `mean`.
    """
    out, fresh = {p: step.get(p, mean[p]) for turn in s.heads for p in turn.paths}, []
    past = iter(outer)
    for turn in s.heads:
        products = [turn.block_gram(b, gradient[b.path], gradient[b.path]) / turn.row_count(b) for b in turn.blocks]
        moments = [adam.second(square, next(past)) for square in products]
        fresh += moments
        variances = [adam.variance(x) for x in moments]
        # The floor of a block is a share of its own variance or of the mean over the head's blocks, whichever is
        # larger. A block whose gradient is always zero, such as a key bias, therefore has a floor above zero.
        pooled = functools.reduce(jnp.add, variances) / len(variances)
        for block, variance in zip(turn.blocks, variances, strict=True):
            if paper:
                values, vectors = symmetric_eigen(variance)
                roots = jnp.maximum(values, 0.0) + jnp.square(adam.eps)
                factor = matmul(vectors * (roots**-0.5)[..., None, :], transpose(vectors))
                rows = turn.turned_view(block, block.rows(mean[block.path]), factor)
                out[block.path] = block.write(out[block.path], rows)
                continue
            size = jnp.maximum(*(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) for x in (variance, pooled)))
            floor = jnp.square(adam.eps + _MATRIX_FLOOR * jnp.sqrt(size)) + adam.eps_root
            damped = variance + floor * jnp.broadcast_to(jnp.eye(turn.size, dtype=variance.dtype), variance.shape)
            factor = inverse_sqrt_by_products(damped, _MATRIX_FLOOR**2)
            rows = turn.turned_view(block, block.rows(mean[block.path]), factor)
            out[block.path] = block.write(out[block.path], rows)
    return out, tuple(fresh)
