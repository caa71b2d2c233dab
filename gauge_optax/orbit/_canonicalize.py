"""Canonicalizes weights: moves them to the one point of their orbit that all weight sets of one function share.

The point is on the slice (`gauge_optax.slice`): kernels have taken over the scales of norms and the multipliers, later
biases have taken over the biases of norms and of values, and kernels that read or write the stream of LayerNorms have
means of zero. Heads and the residual stream are rotated to the eigenbasis of a Gram matrix. This basis depends on the
function alone, but it may jump as weights change, because no continuous rule chooses one rotation at every point. The
weights that an optimizer sees must not jump. Optimizers therefore choose rotations once, at `init`, by comparison with
a constant matrix.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp

from gauge_optax.binding import leaves_by_path, shared_leaves, with_leaves
from gauge_optax.errors import binding_error, warn
from gauge_optax.gauges.bound import require_nonzero_norms, require_readings_without_turns
from gauge_optax.gauges.gauge import Gauges, bind
from gauge_optax.gauges.unread import no_frame, unread
from gauge_optax.linalg import matmul, roundoff, unit_and_size
from gauge_optax.orbit.eigenbases import Weights, eigenbases, weights_without_order
from gauge_optax.parts.part import Arrays, Part
from gauge_optax.parts.permutation import Permutation
from gauge_optax.parts.sizes import Factor, Stretch
from gauge_optax.slice import Elements, Slice
from gauge_optax.states.statistics import require_no_statistics_behind
from gauge_optax.transformation import on_any_mesh, overflow_check, require_no_shapes

Params = TypeVar("Params")
Basis = Literal["eigenbasis", "anchor", "stored"]

_NAME, _BUT = "canonicalize", "these heads stay as they are, so that twins stay different"


@on_any_mesh
def canonicalize(
    params: Params,
    gauges: Gauges,
    *,
    heads: Basis = "eigenbasis",
    stream: Basis = "eigenbasis",
    signs: bool = True,
    donate: bool = False,
) -> Params:
    """Moves weights to a point of their orbit that is the same for all twins.

    At the returned point the following holds, gauge by gauge.

    * `norm_scale`: the norm's scale is 1; the kernels behind it take over its size and its sign.
    * `rescale`: a column of `up`, its bias included, has the norm 1. `multiplier_balance`: a multiplier is 1 or −1; if
      several share a channel, their root mean square is 1.
    * `scale_invariant`, `residual_scale`: all leaves together have the norm that they would have if every column of a
      kernel had the norm 1 and every bias were zero.
    * `bias_absorption`, `key_bias`: the bias is zero. Later biases have taken over its effect; a key bias has none.
    * `logit_shift`: the mean over classes is zero.
    * `norm_write_shift`: the mean over the stream's channels is zero; for a `tied` table, the mean over all entries.
    * `norm_read_shift`: the mean over the rows of a kernel behind the norm, weighted by the norm's scale, is zero.
    * `embedding_shift`: the mean over the rows of the position table is zero.
    * `head_rotation`: the Gram matrix of a head's rows is diagonal, entries descending.
    * `head_linear`: if A·Bᵀ = U·Σ·Vᵀ is the singular value decomposition of the product of a head's factors, the left
      factor is U and the right one V·Σ.
    * `rope_torus`, `rope_linear`: a rotary plane is turned so that the sum of squares of its first coordinate, over all
      rows, is as large as possible.
    * `residual_rotation`: the Gram matrix of the rows that it rotates, in all leaves that no head rotates too, is
      diagonal.

    The remaining choices are made as follows.

    * The sign of an eigenvector makes the entry of largest magnitude in its column positive. In a rotary plane, the
      first coordinates are such a column. If rows come in pairs w and −w, a column has two largest entries of opposite
      signs; then a weighted sum of the column is made positive.
    * A `permutation` sorts units by a weighted sum of x·√|x| over their entries x.
    * Eigenvalues that differ by at most √ε of the largest (1.5e-8 in float64, 3e-4 in float32) count as equal. Their
      eigenspace gets the basis that is nearest to the projection of a constant matrix onto it.
    * Under LayerNorm the stream's rotation keeps the vector of ones. The Gram matrix is then diagonal in a constant
      basis of the directions orthogonal to that vector, and not in the basis of the channels.

    No choice depends on the order of heads. If no eigenvalues are equal, none depends on the order of units either.

    Args:
      params: parameters of any layout.
      gauges: a gauge or a sequence of them. Only these gauges move weights.
      heads: the basis of heads and rotary planes: "eigenbasis", as above; "anchor", the basis in which the optimizer
        inside a fresh `quotient` sees them; "stored", the basis that they have in `params`.
      stream: the basis of the residual stream, with the same three choices.
      signs: whether negative norm scales become 1. If False, they become −1.
      donate: whether the arrays of `params` may be overwritten, which saves the memory of a second tree.

    Returns:
      Parameters like `params`, every leaf in its dtype. If both factors of a head in `head_linear` have less than full
      rank, as in padded heads, that head stays as it is, and a warning names it. Computation is in float32, and in
      float64 under x64. In a leaf of float16, numbers below 3e-8 become zero.

    Raises:
      ValueError: gauges that do not fit `params`; an unknown basis; a zero in a norm's scale that a gauge divides by;
        running statistics of BatchNorm in `params` that would not fit the moved weights; outside `jit`, a leaf of
        float16 that overflows.

    >>> gauge = go.norm_scale({"scale": "channel"}, {"kernel": "channel _"})
    >>> params = {"scale": jnp.array([2.0, -3.0]), "kernel": jnp.ones((2, 3))}
    >>> folded = go.orbit.canonicalize(params, gauge)
    >>> folded["scale"].round(4).tolist(), folded["kernel"][:, 0].round(4).tolist()
    ([1.0, 1.0], [2.0, -3.0])

    Reference: docs/design.md §3. TransformerLens has an adapter per architecture for such moves (`fold_ln`,
    `center_writing_weights`, `center_unembed`, `fold_value_biases`); this function needs gauges alone.
    """
    for argument, choice in (("heads", heads), ("stream", stream)):
        if choice not in get_args(Basis):
            raise binding_error(
                _NAME, f"no such basis, {argument}={choice!r}", f"{choice!r}", ", ".join(map(repr, get_args(Basis))),
                f"write {argument}='eigenbasis'",
            )

    s, leaves = bind(gauges, params).whole, leaves_by_path(params)
    require_no_shapes(_NAME, params)
    require_nonzero_norms(_NAME, s, leaves)
    require_readings_without_turns(_NAME, s)
    require_no_statistics_behind(_NAME, s, params)
    s = s if signs else _without_signs(s)
    shared = shared_leaves(leaves) if donate else ()
    bound = {path: jnp.array(leaves[path]) if path in shared else leaves[path] for path in s.added}
    elements, without_frame = _read(s, heads, stream, bound)
    for part in {part.label: part for part, _, _ in s.sizes}.values():
        count = without_frame.get(part.label, 0)
        if not isinstance(count, jax.core.Tracer) and count:
            warn(no_frame(_NAME, part, int(count), _BUT))
    check = overflow_check(_NAME, bound)
    moved = (_entered_donated if donate else _entered)(s, elements, bound)
    check(moved)
    return with_leaves(params, moved)


# `_read` and `_enter` are compiled as two programs, to need less memory at once: the arrays that the first one makes on
# its way are freed before the second one starts.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _read(
    s: Slice, heads: Basis, stream: Basis, leaves: dict[str, jax.Array]
) -> tuple[Elements, dict[str, jax.Array]]:
    """The elements of the point; and for each size of heads (by its label), the number of heads without a frame."""
    of_heads = {type(turn) for turn in s.heads}

    def reader(kind: Any) -> Any:
        choice = heads if kind in of_heads else stream
        return {"eigenbasis": in_eigenbases, "anchor": kind.read_all, "stored": None}[choice]

    def in_eigenbases(turns: Sequence[Any], point: Arrays) -> list[Any]:
        return eigenbases(turns[0], turns, point, weights_without_order(s.free, point))

    values = s.values(leaves)
    elements = s.read(values, reader=reader).elements
    refinements = {part.label: refined(part, elements[part.label]) for part, _, _ in s.sizes}
    seen = s.seen(values)
    counts = {part.label: unread(part, values, seen) for part, _, _ in s.sizes}
    return elements | refinements, {label: count for label, count in counts.items() if count is not None}


def _enter(s: Slice, elements: Elements, leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    point = s.enter(elements, s.values(leaves)).point
    for part, _, _ in s.sizes:
        point = without_roundoff(part, point)
    weights = weights_without_order(s.free, point)
    for part in s.free:
        point = part.undo(sorting(part, point, weights), point)
    return {path: (x - s.added[path]).astype(jnp.result_type(leaves[path])) for path, x in point.items()}


_entered = jax.jit(_enter, static_argnums=0)
_entered_donated = jax.jit(_enter, static_argnums=0, donate_argnums=2)


@functools.lru_cache(maxsize=64)
def _without_signs(s: Slice) -> Slice:
    """A slice like `s`, but on which the scale of a norm keeps its sign: 1, or −1 where it is negative."""
    return Slice.of([unsigned(part) for part in (*s.parts, *s.free)])


@functools.singledispatch
def unsigned(part: Part[Any]) -> Part[Any]:
    """The part restricted to elements that multiply by positive numbers. The default returns the part itself."""
    return part


@unsigned.register
def _positive(part: Factor) -> Factor:
    return dataclasses.replace(part, signed=False)


@functools.singledispatch
def refined(part: Part[Any], e: Any) -> Any:
    """Corrects an element of a size whose roundoff would change the function. The default returns e itself."""
    return e


@refined.register
def _with_exact_inverse(part: Stretch, e: jax.Array) -> jax.Array:
    """Improves S⁻¹ by one Newton step: S and S⁻¹ are read separately, and S·S⁻¹ ≠ 1 would change a head's product."""
    s, inverse = jnp.unstack(e, axis=-3)
    return jnp.stack([s, 2.0 * inverse - matmul(matmul(inverse, s), inverse)], -3)


@functools.singledispatch
def without_roundoff(part: Part[Any], point: Arrays) -> Arrays:
    """Replaces entries of a canonical point by zero that should be zero but for roundoff. The default keeps all."""
    return point


@without_roundoff.register
def _exact_columns(part: Stretch, point: Arrays) -> Arrays:
    """Sets the columns of a factor to zero that are roundoff beside the largest column of their head.

    They belong to singular values that are zero, in a factor of less than full rank. If `canonicalize` were applied
    again, the arbitrary directions of such columns would count as full rank, and the head would move once more.
    """
    for side in (part.left, part.right):
        rows, _ = unit_and_size(side.stacked(point), (-2, -1))  # squares of a tiny head's entries would underflow
        squares = jnp.sum(jnp.square(rows), -2)
        kept = squares > roundoff(squares.dtype) ** 2 * jnp.max(squares, -1, keepdims=True)
        for block in side.blocks:
            rows = block.rows(point[block.path])
            rows = jnp.where(side.along_basis(block, kept), rows, 0.0)
            point = point | {block.path: block.write(point[block.path], rows)}
    return point


@functools.singledispatch
def sorting(part: Part[Any], point: Arrays, weights: Weights) -> Any:
    """The element whose inverse sorts the units of a permutation; the identity for other parts (the default).

    Units are sorted by a number that no other gauge changes. At `point`, all other gauges are canonical already.
    """
    return part.identity()


@sorting.register
def _sorted_units(part: Permutation, point: Arrays, weights: Weights) -> Any:
    """Sorts units by a weighted sum of their entries' powers x·√|x|, descending.

    The order must be the same for all weights of one function. It is: up to the order of units `point` is the same for
    all of them, and entries that other permutations exchange have equal weights. The power keeps signs, so that the sum
    tells a unit w from its mirror image −w, which a sum of squares does not. The entries themselves are not summed,
    because such sums are zero where the slice makes means zero.
    """
    keys = (part.total(b, weights(b.path) * point[b.path] * jnp.sqrt(jnp.abs(point[b.path]))) for b in part.blocks)
    return part.inverse(jnp.argsort(-jnp.asarray(sum(keys, 0.0)), -1).astype(jnp.int32))
