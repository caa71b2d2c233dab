"""Searches for rotations of streams, at points where the norms' scales are one.

A stream is the residual stream, or the latent vector between two kernels of one layer.

A rotation R of the stream does not commute with a norm's scale γ: a kernel W behind the norm must become γ⁻¹·Rᵀ·γ·W.
At points with γ = 1 this is Rᵀ·W, and the leaf only rotates. The gradients of this search are therefore taken at such
points. No generality is lost if the norm has a proved gauge, which can move any γ into the kernels behind the norm. The
finite move that proves the rotation is made at points with any γ.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gauge_optax.binding import leaves_by_path
from gauge_optax.discovery.calls import Axes, Call, bound_copies, captured_blocks, joined
from gauge_optax.discovery.groups import ZERO, Symmetry, independent
from gauge_optax.discovery.search import candidates, sketched
from gauge_optax.discovery.sketch import Gradients, Leaves, generic_point
from gauge_optax.discovery.trace import Trace
from gauge_optax.discovery.write import Unwritable, axes_text, companion_names, whole_leaves

_POINTS = 3  # points at which gradients are taken, at least


def stream_rotations(
    trace: Trace, leaves: Leaves, gradients: Gradients, at_once: int, rows: float, norms: Sequence[Call], params: Any,
    before: Sequence[Symmetry], dead: Mapping[str, np.ndarray], rng: Callable[..., np.random.Generator],
) -> list[Symmetry]:
    """Finds the rotations of the residual stream, and of the vectors that layers or heads have behind their norms.

    Args:
      trace: the walk over the function's jaxpr.
      leaves: the parameters by path.
      gradients: computes gradients of the function.
      at_once: number of gradients per point.
      rows: number of gradients per column of a candidate (`search`), at least.
      norms: the proved gauges of norms' scales.
      params: the tree that they bind to.
      before: symmetries that are known; a rotation that they contain is left out.
      dead: by path, masks of the entries without effect on the outputs.
      rng: makes a random generator from numbers, of which the first says what it is for.

    Returns:
      The rotations whose motions are orthogonal to all gradients, so that they change no output to first order.
    """
    ones = _scales(norms, params)
    # A residual stream is the same for all layers and heads, so that candidates without companions suffice for it. But
    # each layer or head may also have a vector of its own behind a norm. If this norm has no scale, the search at other
    # points (`instance`) finds the rotation of the vector. If it has one, candidates with companions are tried here.
    axes = [axis for path in ones for axis in trace.leaves[path] if axis is not None]
    scaled = {space for axis in axes for space in trace.atom_keys(axis)}
    tried = [one for one in candidates(trace, leaves, stream=True) if not one.beside or one.space in scaled]
    if not tried:
        return []
    columns = max(len(one.columns) for one in tried)
    squares = {path: np.zeros(leaf.shape) for path, leaf in leaves.items()}

    def point(number: int) -> Leaves:
        return _with_ones(generic_point(leaves, rng(13, number)), ones)

    needed = max(_POINTS * at_once, int(rows * columns) + 8)
    for _ in sketched(tried, gradients, at_once, needed, point, squares, rng, (15, 14)):
        pass  # the loop runs the generator `sketched`, which extends the candidates; its gradients are not needed here
    symmetries = [symmetry for one in tried for symmetry in one.solve(squares, dead, 10 * ZERO)]
    return independent([s for s in symmetries if s.residual < ZERO], point(0), rng(16), before, dead)


def rotation_call(symmetry: Symmetry, trace: Trace, norms: Sequence[Call], params: Any) -> Call:
    """The gauge of a rotation of the stream, or of the latent vector of one layer.

    Args:
      symmetry: the rotation.
      trace: the walk over the function's jaxpr; it tells which leaves read the stream.
      norms: the proved gauges of norms' scales.
      params: the tree that they bind to.

    Raises:
      Unwritable: a leaf turns by another angle than the others, no leaf writes to the stream, or no gauge can bind the
        leaves.
    """
    readers = {kernel for kernel, axis in trace.readers if set(symmetry.space) <= set(trace.spaces.key(axis))}
    passed, moved, elsewhere = [], set[str](), False
    names = {symmetry.space: "basis"} | companion_names(symmetry.beside, trace.layer_spaces())
    axes = {t.piece.path: axes_text(t.piece.view, names)[0] for t in whole_leaves(symmetry.terms)}
    for norm in norms:
        inside = []
        for _, _, blocks in bound_copies(norm.gauge(), params):
            into = {block.path for block in blocks if block.argument == "down"}
            # The stream passes this norm if the scale multiplies the stream's axis of all kernels in `into`. It does
            # not if the scale multiplies another axis of a kernel, as a multiplier of the kernel's outputs does.
            if into <= symmetry.paths and all(_on_basis(b.axes, axes[b.path]) for b in blocks if b.argument == "down"):
                inside.append(True)
                scales = {block.path for block in blocks if block.argument == "up"}
                # The kernels of a norm's gauge are behind the norm, and read the stream. Those of a layer scale's gauge
                # are in front of the scale, and write to the stream.
                readers |= set() if {*itertools.product(into, scales)} & trace.scaled_behind else into
                moved |= scales
            else:
                inside.append(False)
        passed += [norm] * any(inside)
        elsewhere |= any(inside) and not all(inside)  # the norm's gauge has other layers, each with its own rotation
    sides: dict[str, dict[str, Axes]] = {"read": {}, "write": {}}
    sizes: dict[str, int] = {}
    terms = whole_leaves([term for term in symmetry.terms if term.piece.path not in moved])
    if any(abs(term.exponent - symmetry.terms[0].exponent) > ZERO for term in terms):
        raise Unwritable("a rotation that turns leaves by different angles")
    for term in sorted(terms, key=lambda term: (len(term.piece.view.shape) < 2, term.piece.path)):
        text, lengths = axes_text(term.piece.view, names)
        side = sides["read" if term.piece.path in readers else "write"]
        if text != side.get(term.piece.path):
            side[term.piece.path] = joined(side.get(term.piece.path), text)
        sizes |= lengths
    if not sides["write"]:
        raise Unwritable("a rotation of what nothing writes")
    options = {"centred": True} if symmetry.family == "centred" else {}
    if elsewhere or symmetry.beside:
        call = Call("residual_rotation", sides, options | {"per_layer": True}, sizes, tuple(passed))
        try:
            bound_copies(call.gauge(), params)
        except ValueError as error:
            raise Unwritable(str(error).splitlines()[0]) from error
        return call
    roles = {role: captured_blocks(blocks, leaves_by_path(params)) for role, blocks in sides.items()}
    return Call("residual_rotation", roles, options, sizes, tuple(passed))


def _on_basis(scaled: str, turned: str) -> bool:
    """Whether `scaled`, a gauge's axes of a leaf, names the axis that `turned`, another gauge's axes, calls `basis`.

    >>> _on_basis("channel _ _", "basis _ _"), _on_basis("_ head channel", "basis _ _")
    (True, False)
    >>> _on_basis("(q head)=0:2 channel", "(_ _)=0:2 basis")
    True
    """
    tokens = [re.findall(r"(?:\([^)]*\)|[^\s(])+", text) for text in (scaled, turned)]
    return all(name != "_" for name, axis in zip(*tokens, strict=True) if "basis" in axis)


def passed(norms: Iterable[Call], params: Any) -> list[Call]:
    """The norms whose gauges multiply each entry of the scale by its own number, so that they can make the scale one.

    >>> norms = [Call("norm_scale", {"scale": {"norm": "channel"}, "into": {"up": "channel _"}})]
    >>> [norm.kind for norm in passed(norms, {"norm": np.ones(2), "up": np.ones((2, 3))})]
    ['norm_scale']
    """

    def blocks(norm: Call) -> list[Any]:
        return [block for _, _, copy in bound_copies(norm.gauge(), params) for block in copy if block.argument == "up"]

    return [norm for norm in norms if not any("_" in block.labels for block in blocks(norm))]


def _scales(norms: Iterable[Call], params: Any) -> Mapping[str, float]:
    """Leaf path → what the leaf stores if the norm's scale is one: 0 if it stores the scale less one, else 1."""
    out = {}
    for norm in norms:
        for _, _, blocks in bound_copies(norm.gauge(), params):
            scale = next(block for block in blocks if block.argument == "up")
            out[scale.path] = 0.0 if scale.one_plus else 1.0
    return out


def _with_ones(point: Leaves, ones: Mapping[str, float]) -> Leaves:
    return point | {path: np.full_like(point[path], value) for path, value in ones.items()}
