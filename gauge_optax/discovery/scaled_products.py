"""Finds a symmetry of queries and keys that LayerNorms normalize: both turn, and the norms' scales change with them.

A centred norm, which subtracts the mean, makes vectors q̂ and k̂ whose d entries sum to zero. Attention computes
q̂ᵀ·D·k̂, where the diagonal matrix D is the product of the two norms' scales. On vectors that sum to zero, D acts as a
symmetric matrix with d − 1 eigenvalues. D has d numbers, one more. It can therefore move along a curve on which these
eigenvalues stay the same, and only the eigenvectors turn. If queries and keys turn with them, no output changes. There
is no gauge for this move, because the rotation depends on D.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gauge_optax.discovery.offsets import Shifts
from gauge_optax.discovery.sketch import Leaves
from gauge_optax.discovery.views import Piece, View
from gauge_optax.linalg import singular_vectors

KIND = "queries and keys turned behind norms that centre them, with another product of the norms' scales"
_STEP = 0.1  # length of a step along the curve, relative to the length of D's diagonal
_NEWTON = 20  # Newton steps that lead back onto the curve


def turned_products(
    shifts: Shifts, kernels: Sequence[tuple[View, int]]
) -> Iterator[tuple[str, Callable[[Leaves], Leaves]]]:
    """Yields sets of leaves that may turn together: their paths as one text, and a finite move (point to point).

    The caller must test whether the move leaves the outputs unchanged.

    Args:
      shifts: gives the views along a space (`Shifts.along`).
      kernels: views, along one space, of leaves that write what a centred norm reads, such as kernels of queries and
        keys. With each view comes the number of its atom along the space.
    """
    space, hidden = kernels[0][0].labels[kernels[0][1]], {view.path for view, _ in kernels}
    vectors = [(view, at) for view, at in shifts.along(space) if view.path not in hidden]
    layers = {frozenset(set(view.labels) - {space, None}) for view, _ in vectors}
    if len(layers) != 1 or len(next(iter(layers))) > 1 or not 1 <= len(vectors) <= 2 or len(hidden) < 2:
        return
    (beside,) = layers
    pieces = [Piece(view, at, tuple(view.labels.index(x) for x in beside)) for view, at in (*vectors, *kernels)
              if beside <= set(view.labels)]
    scales, others = pieces[: len(vectors)], pieces[len(vectors) :]
    if len(pieces) == len(vectors) + len(kernels) and all(scale.vector for scale in scales):
        for stored_less in (0.0, 1.0):
            yield " + ".join(sorted({piece.path for piece in pieces})), functools.partial(
                _turned, scales, others, stored_less)


def _turned(scales: Sequence[Piece], kernels: Sequence[Piece], stored_less: float, point: Leaves) -> Leaves:
    """The point after a finite step along the curve; the norms store their scales less `stored_less`."""
    moved = {piece.path: point[piece.path].copy().ravel() for piece in (*scales, *kernels)}
    factors = [moved[piece.path][piece.entries][..., 0] + stored_less for piece in scales]  # (layers, d)
    product = factors[0] * factors[-1]
    steps = [along_the_curve(row) for row in product]
    turns, after = np.stack([turn for _, turn in steps]), np.stack([row for row, _ in steps])
    # If queries and keys share a norm, its scale is the square root of the product D. If there are two norms, only the
    # scale of the first changes. It is NaN where the second norm's scale is zero.
    new = np.sign(factors[0]) * np.sqrt(np.abs(after)) if len(factors) == 1 else np.divide(
        after, factors[1], out=np.full_like(after, np.nan), where=factors[1] != 0)
    moved[scales[0].path][scales[0].entries] = new[..., None] - stored_less
    for piece in kernels:
        moved[piece.path][piece.entries] = turns @ moved[piece.path][piece.entries]
    return {**point, **{path: x.reshape(point[path].shape) for path, x in moved.items()}}


def along_the_curve(product: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds another diagonal D′ with D's eigenvalues on vectors that sum to zero, and the rotation from D to D′.

    Args:
      product: the diagonal of D, (d,).

    Returns:
      The diagonal of D′, (d,), and an orthogonal matrix A (d, d) that keeps the vector of ones: Aᵀ·D′·A is D on vectors
      that sum to zero.

    >>> scales = np.array([1.0, 2.0, 3.0, 4.0])
    >>> other, turn = along_the_curve(scales)
    >>> centred = np.eye(4) - 0.25
    >>> np.allclose(centred @ turn.T * other @ turn @ centred, centred * scales @ centred)
    True
    """
    size = len(product)
    centred = np.linalg.qr(np.eye(size) - 1 / size)[0][:, : size - 1]

    def spectrum(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = np.linalg.eigh(centred.T * scales @ centred)
        return values, centred @ vectors

    values, vectors = spectrum(product)
    along = singular_vectors(np.square(vectors.T))[1][-1]  # ∂λ_a/∂D_i = v_a(i)²: `along` changes no λ
    after = product + _STEP * np.linalg.norm(product) * along
    for _ in range(_NEWTON):
        now, turned = spectrum(after)
        after = after + np.linalg.lstsq(np.square(turned.T), values - now)[0]
    turned = spectrum(after)[1]
    # Eigenvectors have no sign of their own. `np.sign` would not do here: a zero would remove an eigenvector.
    turned *= np.where((turned * vectors).sum(0) < 0, -1.0, 1.0)
    return after, turned @ vectors.T + 1 / size
