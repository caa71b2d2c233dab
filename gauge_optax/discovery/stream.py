"""The rotation of the residual stream, searched for where norms' scales are one.

A norm's scale γ does not commute with a rotation R of the stream: the readers' motion is γ⁻¹·Rᵀ·γ·W. Where γ = 1 it is
RᵀW, a plain rotation of leaves. So gradients are taken at points with γ = 1, with the norms whose scales other gauges
have shown to be movable into their readers, and the finite move that proves the result is made where γ is anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gauge_optax.discovery.calls import Axes, Call, bound_copies, captured_blocks, joined
from gauge_optax.discovery.groups import ZERO, Copy, independent
from gauge_optax.discovery.search import candidates, sketched
from gauge_optax.discovery.sketch import Gradients, Leaves, generic_point
from gauge_optax.discovery.trace import Trace
from gauge_optax.discovery.write import Unwritable, axes_text, whole_leaves

_POINTS = 3


def stream_rotations(
    trace: Trace, leaves: Leaves, gradients: Gradients, at_once: int, rows: float, norms: Sequence[Call], params: Any,
    before: Sequence[Copy], dead: Mapping[str, np.ndarray], rng: Callable[..., np.random.Generator],
) -> list[Copy]:
    """Rotations of axes that kernels read and all heads share.

    Args:
      trace: the walk.
      leaves: the parameters by path.
      gradients: of the function.
      at_once: gradients at a point.
      rows: gradients per column, at least.
      norms: the norms' gauges that hold.
      params: the tree that they bind to.
      before: symmetries that may contain what is found.
      dead: masks of the entries without effect.
      rng: a generator per purpose.

    Returns:
      The symmetries that `before` do not contain.
    """
    ones = _scales(norms, params)
    tried = candidates(trace, leaves, stream=True)
    if not tried:
        return []
    columns = max(len(one.columns) for one in tried)
    squares = {path: np.zeros(leaf.shape) for path, leaf in leaves.items()}

    def point(number: int) -> Leaves:
        return _with_ones(generic_point(leaves, rng(13, number)), ones)

    needed = max(_POINTS * at_once, int(rows * columns) + 8)
    for _ in sketched(tried, gradients, at_once, needed, point, squares, rng, (15, 14)):
        pass  # nothing else observes these gradients
    symmetries = [symmetry for one in tried for symmetry in one.solve(squares, dead, 10 * ZERO)]
    return independent([s for s in symmetries if s.residual < ZERO], point(0), rng(16), before, dead)


def rotation_call(symmetry: Copy, trace: Trace, norms: Sequence[Call], params: Any) -> Call:
    """The gauge of a rotation of the stream.

    Args:
      symmetry: the rotation.
      trace: the walk; it tells which leaves read the stream.
      norms: the norms' gauges that hold.
      params: the tree that they bind to.

    Raises:
      Unwritable: a leaf moves against the others.
    """
    readers = {kernel for kernel, axis in trace.readers if set(symmetry.space) <= set(trace.spaces.key(axis))}
    passed, moved = [], set[str]()
    for norm in norms:
        blocks = [block for _, _, blocks in bound_copies(norm.gauge(), params) for block in blocks]
        into = {block.path for block in blocks if block.argument == "down"}
        if into <= symmetry.paths:
            passed.append(norm)
            readers |= into
            moved |= {block.path for block in blocks if block.argument == "up"}
    sides: dict[str, dict[str, Axes]] = {"read": {}, "write": {}}
    sizes: dict[str, int] = {}
    terms = whole_leaves([term for term in symmetry.terms if term.piece.path not in moved])
    if any(abs(term.exponent - symmetry.terms[0].exponent) > ZERO for term in terms):
        raise Unwritable("a rotation that turns leaves by different angles")
    for term in sorted(terms, key=lambda term: (len(term.piece.view.shape) < 2, term.piece.path)):
        text, lengths = axes_text(term.piece.view, {symmetry.space: "basis"})
        side = sides["read" if term.piece.path in readers else "write"]
        if text != side.get(term.piece.path):
            side[term.piece.path] = joined(side.get(term.piece.path), text)
        sizes |= lengths
    if not sides["write"]:
        raise Unwritable("a rotation of what nothing writes")
    options = {"centred": True} if symmetry.family == "centred" else {}
    roles = {role: captured_blocks(blocks) for role, blocks in sides.items()}
    return Call("residual_rotation", roles, options, sizes, tuple(passed))


def passed(norms: Iterable[Call], params: Any) -> list[Call]:
    """The norms whose gauges move every channel of the scale alone, so that it can be divided out.

    >>> norms = [Call("norm_scale", {"scale": {"norm": "channel"}, "into": {"up": "channel _"}})]
    >>> [norm.kind for norm in passed(norms, {"norm": np.ones(2), "up": np.ones((2, 3))})]
    ['norm_scale']
    """

    def blocks(norm: Call) -> list[Any]:
        return [block for _, _, copy in bound_copies(norm.gauge(), params) for block in copy if block.argument == "up"]

    return [norm for norm in norms if not any("_" in block.labels for block in blocks(norm))]


def _scales(norms: Iterable[Call], params: Any) -> Mapping[str, float]:
    """The stored value of every norm's scale where the scale is one."""
    out = {}
    for norm in norms:
        for _, _, blocks in bound_copies(norm.gauge(), params):
            scale = next(block for block in blocks if block.argument == "up")
            out[scale.path] = 0.0 if scale.one_plus else 1.0
    return out


def _with_ones(point: Leaves, ones: Mapping[str, float]) -> Leaves:
    return point | {path: np.full_like(point[path], value) for path, value in ones.items()}
