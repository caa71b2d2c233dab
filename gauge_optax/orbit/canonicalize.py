"""Canonicalizes weights: moves them to the one point of their orbit that all weight sets of one function share.

The point is on the slice (`gauge_optax.slice`): norm scales are 1 and their factors are in the kernels that read them,
multipliers are in their kernels, norm and value biases in later biases, writers and readers of LayerNorms are centred.
Rotations have no slice through all points, so that optimizers read them once, from an arbitrary constant matrix. Here
heads, and the residual stream, are in the eigenbasis of a Gram matrix instead, which is a property of the function.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Gauges, product
from gauge_optax.gauges.instance import Arrays, Instance
from gauge_optax.gauges.permutation import Indices, Permutation
from gauge_optax.gauges.scale import Scale
from gauge_optax.linalg import real_dtype
from gauge_optax.orbit.eigenbases import eigenbases
from gauge_optax.orbit.renumber import unit_totals
from gauge_optax.slice import Slice

Params = TypeVar("Params")
Basis = Literal["eigenbasis", "anchor", "stored"]

_NAME = "canonicalize"


def canonicalize(
    params: Params,
    gauges: Gauges,
    *,
    heads: Basis = "eigenbasis",
    stream: Basis = "eigenbasis",
    signs: bool = True,
    donate: bool = False,
) -> Params:
    """The representative of a function's weights: two weight sets that gauges lead to each other become the same one.

    At the returned point this holds, gauge by gauge.

    * `norm_scale`: the norm's scale is 1; a negative one gives its sign to the readers too.
    * `rescale`, `multiplier_balance`: a column of the first leaf of `up` has the norm 1, a multiplier is 1 or −1.
    * `scale_invariant`, `residual_scale`: the first leaf has the root mean square that unit columns have.
    * `bias_absorption`, `key_bias`: the bias is zero; the biases behind its readers have what it had.
    * `logit_shift`, `norm_write_shift`: the mean over classes, over the stream's channels, is zero.
    * `norm_read_shift`, `embedding_shift`: the mean over rows of a reader, of the position table, is zero.
    * `head_rotation`: the Gram matrix of a head's rows is diagonal, entries descending.
    * `head_linear`: A·Bᵀ = U·Σ·Vᵀ: the left factor has the columns U, the right one V·Σ.
    * `rope_torus`, `rope_linear`: the rows of a rotary plane are longest along its first coordinate.
    * `residual_rotation`: the Gram matrix of what writes to the stream, and no head rotates, is diagonal.

    The sign of an eigenvector is such that the entry of largest magnitude in its column is positive, and for rotary
    planes in the first coordinate. Eigenvalues that differ by at most √ε of the largest (1.5e-8 in float64, 3e-4 in
    float32) count as equal: in the space of equal ones the basis is nearest to a constant matrix's image. None of this
    depends on the order of heads and units. Under LayerNorm the stream's rotation fixes the vector of ones. Then the
    Gram matrix is diagonal in a constant basis of what is orthogonal to that vector, not in that of the channels.

    Args:
      params: parameters of any layout.
      gauges: a gauge or a sequence of them. Kinds that are not listed stay as they are stored.
      heads: the basis of heads and rotary planes. "eigenbasis"; "anchor", the one in which optimizers see them;
        "stored", which does not turn them.
      stream: the basis of the residual stream, likewise.
      signs: whether negative norm scales become positive. No element of `norm_scale` does that.
      donate: whether the arrays of `params` may be overwritten, which saves the memory of a second tree.

    Returns:
      Parameters like `params`, every leaf in its dtype. Computation is in float32, and in float64 under x64.

    Raises:
      ValueError: gauges of another tree, an unknown choice of a basis, or a rotation of the stream that passes a norm
        with a scale of zero.

    >>> gauge = go.norm_scale({"scale": "channel"}, {"kernel": "channel _"})
    >>> params = {"scale": jnp.array([2.0, -3.0]), "kernel": jnp.ones((2, 3))}
    >>> folded = go.canonicalize(params, gauge)
    >>> folded["scale"].round(4).tolist(), folded["kernel"][:, 0].round(4).tolist()
    ([1.0, 1.0], [2.0, -3.0])

    Reference: docs/design.md §3. What TransformerLens does with an adapter per architecture (`fold_ln`,
    `center_writing_weights`, `center_unembed`, `fold_value_biases`), for every model that has gauges.
    """
    for argument, choice in (("heads", heads), ("stream", stream)):
        if choice not in get_args(Basis):
            raise binding_error(
                _NAME, f"no such basis, {argument}={choice!r}", f"{choice!r}", ", ".join(map(repr, get_args(Basis))),
                f"write {argument}='eigenbasis'",
            )  # fmt: skip

    on_tree, leaves = product(gauges)._slice(params), leaves_by_path(params)
    require_nonzero_norms(_NAME, on_tree, leaves)
    bound = {path: leaves[path] for path in on_tree.added}
    elements = _with_means(on_tree, signs, _read(on_tree, heads, stream, signs, bound), bound)
    return with_leaves(params, (_entered_donated if donate else _entered)(on_tree, signs, elements, bound))


# Three programs: each starts when all copies that the one before it needs are gone.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _read(on_tree: Slice, heads: Basis, stream: Basis, signs: bool, leaves: dict[str, jax.Array]) -> tuple[Any, ...]:
    def reader(kind: Any) -> Any:
        choice = heads if kind.of_heads else stream
        return {"eigenbasis": in_eigenbases, "anchor": kind.read_all, "stored": None}[choice]

    def in_eigenbases(turns: Sequence[Any], point: Arrays) -> list[Any]:
        return eigenbases(turns[0], turns, point)

    return on_tree.read(_values(on_tree, signs, leaves), reader=reader, means=False).elements


@functools.partial(jax.jit, static_argnums=(0, 1))
def _with_means(
    on_tree: Slice, signs: bool, elements: tuple[Any, ...], leaves: dict[str, jax.Array]
) -> tuple[Any, ...]:
    return on_tree.with_means(elements, _values(on_tree, signs, leaves))


def _enter(
    on_tree: Slice, signs: bool, elements: tuple[Any, ...], leaves: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    point: dict[str, jax.Array] = dict(on_tree.enter(elements, _values(on_tree, signs, leaves)))
    for instance in on_tree.instances:
        order = sorting(instance, point)
        point = point if order is None else instance.enter(order, point)
    return stored(point, on_tree.added, leaves)


_entered = jax.jit(_enter, static_argnums=(0, 1))
_entered_donated = jax.jit(_enter, static_argnums=(0, 1), donate_argnums=3)


def _values(on_tree: Slice, signs: bool, leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    values = on_tree.values(leaves)
    for instance in on_tree.instances if signs else ():
        values = with_positive_signs(instance, values)
    return values


@functools.singledispatch
def with_positive_signs(instance: Instance, point: Arrays) -> Arrays:
    """The point with signs made positive that the function does not see, and that no element can change."""
    return point


@with_positive_signs.register
def _with_positive_norms(instance: Scale, point: Arrays) -> Arrays:
    # A norm's readers are linear, so that a negative scale may change sign with their rows. A unit's may not.
    if instance.gauge != "norm_scale" or instance.up[0].entries(instance.named) > 1:
        return point
    negative = instance.up[0].total(instance.named, point[instance.up[0].path]) < 0
    signs = jnp.where(negative, -1.0, 1.0).astype(real_dtype())
    out = dict(point)
    for block in instance.blocks:
        out[block.path] = out[block.path] * block.spread(instance.named, signs, elsewhere=1.0)
    return out


@functools.singledispatch
def sorting(instance: Instance, point: Arrays) -> Any:
    """The element that sorts the copies of a unit by an invariant of theirs; None for groups that do not permute.

    `point` is canonical but for the order of copies, and is moved by the inverse of what is returned.
    """
    return None


@sorting.register
def _sorted_units(instance: Permutation, point: Arrays) -> Indices:
    """Units by the sum of the cubes of their entries, descending: no other move of a canonical point changes it.

    Sums of squares would not do, because the slice makes them equal.
    """
    cubes = (unit_totals(instance, block, jnp.abs(point[block.path]) ** 3) for block in instance.blocks)
    return instance.inverse(jnp.argsort(-jnp.asarray(sum(cubes, 0.0)), -1).astype(jnp.int32))


def require_nonzero_norms(name: str, on_tree: Slice, leaves: Mapping[str, Any]) -> None:
    """Raises ValueError where a rotation of the stream passes a norm with a zero scale, by which it would divide."""
    for block in dict.fromkeys(block for instance in on_tree.instances for block in instance.divided):
        scale = leaves[block.path]
        if not isinstance(scale, jax.core.Tracer) and not np.all(np.asarray(block.view(scale)) + block.one_plus):
            raise binding_error(
                name, f"a norm that hides a channel, '{block.path}'", "a scale of zero", "scales that are not zero",
                "take residual_rotation and norm_read_shift out of the list, or give the channel a small scale",
            )  # fmt: skip


def stored(point: Mapping[str, jax.Array], added: Mapping[str, Any], leaves: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The numbers of a point as a tree with these leaves stores them: less one where it does, in the leaves' dtypes."""
    return {
        path: (x - added[path] if np.any(added[path]) else x).astype(leaves[path].dtype) for path, x in point.items()
    }
