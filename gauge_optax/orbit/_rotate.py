"""Rotates weights along their orbit: random or Hadamard rotations of the residual stream and of heads.

Quantization rounds all entries of a row or column to evenly spaced values. A channel that is far larger than the others
makes the spacing coarse for all of them. A rotation of the basis spreads the large channel over all channels. If the
rotation is a symmetry, the network computes the same function as before. QuaRot and SpinQuant multiply such rotations
into the weights: their R1 turns the residual stream, and their R2 turns the values of each head. Here R1 is an element
of `residual_rotation` and R2 one of `head_rotation`.
References: QuaRot (Ashkboos et al. 2024), §4; SpinQuant (Liu et al. 2024), §3.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Block, inexact_leaves, leaves_by_path, shared_leaves, with_leaves
from gauge_optax.errors import binding_error
from gauge_optax.gauges.bound import Bound, require_nonzero_norms
from gauge_optax.gauges.copies import Copy
from gauge_optax.gauges.gauge import Element, Gauges, product
from gauge_optax.orbit.rotations import checked_element, on_leaf, random_rotation, with_blocks
from gauge_optax.parts.part import changed
from gauge_optax.slice import Elements
from gauge_optax.transformation import (
    on_any_mesh,
    overflow_check,
    own_settings,
    require_arrays,
    require_function,
    require_key,
)
from gauge_optax.xla import unseen

Params = TypeVar("Params")

_NAME = "rotate"
_CHUNK = 2**22  # entries of a leaf that are converted to float64 at a time, which bounds memory


@on_any_mesh
def rotate(
    params: Params,
    gauges: Gauges,
    by: str | Element = "hadamard",
    *,
    key: jax.Array | None = None,
    donate: bool = False,
    fn: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
) -> Params:
    """Returns weights of the same function in a rotated basis, for example to quantize them there.

    A norm multiplies the residual stream by its scale γ before a kernel W reads it. Under a rotation R of the stream
    the stored kernel therefore becomes γ⁻¹·Rᵀ·γ·W, which preserves the function but keeps the outliers of γ. Call
    `canonicalize` first, which makes γ = 1, so that the stored kernel becomes Rᵀ·W.

    Args:
      params: parameters of any layout.
      gauges: rotations: `residual_rotation` (R1); `head_rotation` or `head_linear` between values and outputs (R2), or
        between queries and keys if there are no rotary embeddings. With by="random" also `rope_torus` and `rope_linear`
        (of the latter, only the angles).
      by: "hadamard", "random", or an element such as `choose` and `align` return. "random" draws from the Haar measure.
        "hadamard" is a Hadamard matrix times random signs. It exists for sizes 2ᵏ and for Paley's orders times 2ᵏ (12,
        20, 24, 28, 36, 40, …). For any other even size m·2ᵏ, the Hadamard matrix of size 2ᵏ and a random orthogonal
        m × m matrix are combined by a Kronecker product. Under LayerNorm a rotation of the stream has to keep the
        vector of ones: its size must be a multiple of 4, and permutations take the place of random signs.
      key: a PRNG key for the random choices; `jax.random.key(0)` if None.
      donate: whether the arrays of `params` are deleted, each as soon as its rotated leaf is there; with `fn`, all of
        them once the outputs are compared. An array that is two leaves of the tree is kept.
      fn: the model: fn(params, batch) returns an array or a tree of arrays. If given, `rotate` raises an error if the
        outputs change by more than roundoff.
      batch: the second argument of `fn`.

    Returns:
      Parameters like `params`. Every product is computed in float64, whatever the dtype of the leaf and of the process,
      and rounded once to the leaf's dtype. Call it outside `jit`.

    Raises:
      ValueError: a gauge that is no rotation, or for whose size there is no Hadamard matrix; an element of other
        gauges; matrices of an element that are not orthogonal or, for `head_linear`, have no inverse; a norm with a
        zero in its scale; gauges that do not fit `params`; a leaf of float16 that overflows; only one of `fn` and
        `batch`; outputs of `fn` that the rotation changes.

    >>> gauge = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
    >>> value = jnp.zeros((4, 1, 4)).at[:, 0, 0].set(1.0)  # one channel has everything
    >>> params = {"value": value, "out": jnp.ones((1, 4, 4))}
    >>> rotated = go.orbit.rotate(params, gauge, "hadamard")
    >>> jnp.abs(rotated["value"][0, 0]).tolist()
    [0.5, 0.5, 0.5, 0.5]

    Reference: QuaRot, §4, stages 1a and 1b; `Q = diag(±1)·H/√d`.
    """
    group = product(gauges)
    require_arrays(_NAME, params)
    if key is not None:
        require_key(_NAME, key)
    if fn is not None:
        require_function(_NAME, "fn", fn, "params, batch")
    before = None if fn is None else jax.tree.map(np.asarray, fn(params, batch))
    if fn is None and batch is not None:
        raise binding_error(_NAME, "a batch without a function", "fn=None", "both or neither", "pass fn=model")
    params, by = unseen((params, by))
    with own_settings(wide=True):
        on_tree, leaves = group._bound(params), leaves_by_path(params)
        added = on_tree.whole.added
        require_nonzero_norms(_NAME, on_tree.whole, leaves)
        if isinstance(by, str):
            elements = _drawn(on_tree, by, jax.random.key(0) if key is None else key)
        else:
            elements = _given(on_tree, jax.eval_shape(lambda: group.identity(params)), by)
        kept = shared_leaves(leaves) | {block.path for part in on_tree.whole.parts for block in part.passes}
        moved, spent = {}, list[jax.Array]()
        for path in added:
            leaf = jnp.asarray(leaves[path])
            check = overflow_check(_NAME, {path: leaf})
            moved[path] = _moved_leaf(on_tree, elements, path, leaf, leaves)
            check(moved)
            if donate and path not in kept and moved[path] is not leaf and isinstance(leaves[path], jax.Array):
                # If the check of `fn` below refuses the result, the caller needs the old weights: delete them after it.
                (leaves[path].delete if fn is None else functools.partial(spent.append, leaves[path]))()
    # A NumPy leaf in float64 was computed as such. If this process has x64 switched off, it becomes float32, as usual.
    rotated = with_leaves(params, {path: x.astype(jax.dtypes.canonicalize_dtype(x.dtype)) for path, x in moved.items()})
    if fn is not None:
        _require_same_function(before, jax.tree.map(np.asarray, fn(rotated, batch)), rotated)
    for leaf in spent:
        leaf.delete()
    return rotated


def _require_same_function(before: Any, after: Any, params: Any) -> None:
    """Raises ValueError if outputs differ by more than √ε of the largest one; ε is the eps of the coarsest dtype.

    An infinity, such as the −inf of a padded vocabulary, has to stay the same infinity.
    """
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    numbers = [(a.astype(complex), b.astype(complex)) for a, b in pairs if jnp.issubdtype(a.dtype, jnp.inexact)]
    if not numbers:
        raise binding_error(
            _NAME, "fn returns nothing to compare", ", ".join(str(x.dtype) for x in jax.tree.leaves(before)) or "()",
            "floating-point outputs", "return logits from fn, and not tokens")
    alike = [np.isinf(a) & (a == b) for a, b in numbers]  # equal infinities, whose difference would be NaN
    numbers = [(np.where(k, 0.0, a), np.where(k, 0.0, b)) for k, (a, b) in zip(alike, numbers, strict=True)]
    # `np.max` and not `max`: NumPy's maximum of NaN and a number is NaN, Python's may be the number.
    with np.errstate(invalid="ignore"):  # infinities that differ make `change` NaN or infinite: refused
        change = np.max([
            np.max(np.abs(b - a), initial=0.0) / max(np.max(np.abs(a), initial=0.0), 1e-30) for a, b in numbers])
    dtypes = [jnp.result_type(x) for tree in (params, after) for x in inexact_leaves(tree).values()]
    limit = max(float(jnp.finfo(x).eps) for x in dtypes if jnp.issubdtype(x, jnp.floating)) ** 0.5
    if not change <= limit:
        raise binding_error(
            _NAME, "the rotated weights compute another function",
            f"outputs that change by {change:.1e} of the largest", f"at most {limit:.0e}, roundoff",
            "look for a kernel that the gauges do not list and that takes the rotated vector as input, or adds to it; "
            "a table that also gives the logits needs go.orbit.untie first")


def _drawn(on_tree: Bound, by: str, key: jax.Array) -> Elements:
    """Returns turn label → a random rotation, for every copy of every gauge."""
    if by not in ("hadamard", "random"):
        raise binding_error(
            _NAME, f"no such rotation, by={by!r}", f"{by!r}", "'hadamard', 'random' or an element of the gauges",
            "write by='hadamard'",
        )
    copies = list(itertools.chain(*on_tree.copies))
    keys = jax.random.split(key, max(1, len(copies)))
    pairs = zip(copies, keys, strict=False)
    return {turn.label: random_rotation(turn, k, by) for copy, k in pairs for turn in _turns(on_tree, copy)}


def _turns(on_tree: Bound, copy: Copy) -> Sequence[Any]:
    """The rotations of one copy of a gauge. If it has none, all of its parts, which `random_rotation` then refuses."""
    turns = {turn.label: turn for _, same in on_tree.whole.turns for turn in same}
    return [turns[part.label] for part in copy.parts if part.label in turns] or copy.parts


def _given(on_tree: Bound, expected: Any, element: Element) -> Elements:
    """Splits the user's element into elements of parts. Raises ValueError if it is no rotation by these gauges."""
    for copy in itertools.chain(*on_tree.copies):
        for turn in _turns(on_tree, copy):  # raises for a part that is no rotation; the element is not needed
            jax.eval_shape(functools.partial(random_rotation, turn, by="random"), jax.random.key(0))
    elements: Elements = {}
    given = checked_element(_NAME, on_tree, expected, element)
    for gauge, copies, value in zip(on_tree.gauges, on_tree.copies, given, strict=True):
        for copy, own in zip(copies, gauge._split(copies, value), strict=True):
            elements |= zip([part.label for part in copy.parts], copy.split(copy.normalized(own)), strict=True)
    return elements


def _moved_leaf(
    on_tree: Bound, elements: Elements, path: str, leaf: jax.Array, leaves: dict[str, jax.Array]
) -> jax.Array:
    """Returns one leaf, moved by all parts that bind it and have an element."""
    parts, of_leaf, added = list[Any](), [], on_tree.whole.added
    context: dict[str, jax.Array] = {}
    for part in on_tree.whole.acting:
        if part.label in elements and path in changed(part):
            alone, read = on_leaf(part, path, len(parts))
            parts.append(alone)
            of_leaf.append(elements[part.label])
            context |= {name: jnp.asarray(leaves[p]).astype(float) + added[p] for name, p in read.items()}
    if not parts:
        return leaf
    return _act(tuple(parts), tuple(of_leaf), leaf, context, added[path])


@functools.partial(jax.jit, static_argnums=0)  # `parts` without paths (`on_leaf`): equal layers share a program
def _act(
    parts: tuple[Any, ...], elements: tuple[Any, ...], leaf: jax.Array, context: dict[str, jax.Array], added: Any
) -> jax.Array:
    def moved(parts: Sequence[Any], rows: jax.Array, added: Any) -> jax.Array:
        point = {"": rows.astype(float) + added} | context
        for part, e in zip(parts, elements, strict=True):
            point = part.act(e, point)
        return (point[""] - added).astype(leaf.dtype)

    axis = _free_axis([block for part in parts for block in part.blocks])
    rows = None if axis is None else max(1, _CHUNK * leaf.shape[axis] // max(1, leaf.size))
    if axis is None or rows is None or rows >= leaf.shape[axis] or np.ndim(added):
        return moved(parts, leaf, added)
    short = [_shortened(part, axis, rows) for part in parts]

    def chunk(number: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(number * rows, leaf.shape[axis] - rows)  # the last chunk overlaps the one before it
        chosen = jax.lax.dynamic_slice_in_dim(leaf, start, rows, axis)
        return jax.lax.dynamic_update_slice_in_dim(out, moved(short, chosen, added), start, axis)

    return jax.lax.fori_loop(0, math.ceil(leaf.shape[axis] / rows), chunk, jnp.zeros_like(leaf))


def _free_axis(blocks: Sequence[Block]) -> int | None:
    """The longest axis of a leaf along which no part moves anything (`_` in all blocks); None if there is none.

    Along such an axis the leaf can be moved in chunks.
    """

    def free(axis: int) -> bool:
        return all(
            len(b.groups[axis]) == 1 and b.split_labels[b.groups[axis][0]] == "_" and b.window[axis] is None
            and b.picks[b.groups[axis][0]] == ((0, b.shape[axis]),) for b in blocks
        )

    shape = blocks[0].shape
    return max((axis for axis in range(len(shape)) if free(axis)), key=shape.__getitem__, default=None)


def _shortened(part: Any, axis: int, length: int) -> Any:
    """The part as it acts on a chunk of its leaf: `length` entries along `axis`, which is free."""

    def short(block: Block) -> Block:
        at = block.groups[axis][0]
        return dataclasses.replace(
            block, shape=_set(block.shape, axis, length), split=_set(block.split, at, length),
            picks=_set(block.picks, at, ((0, length),)),
        )

    return with_blocks(part, lambda blocks: tuple(map(short, blocks)))


def _set(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return tuple(itertools.chain(values[:at], (value,), values[at + 1 :]))
