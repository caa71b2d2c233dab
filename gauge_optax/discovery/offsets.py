"""Symmetries that add something to leaves: the logit shift, and others that hold in many networks and have no gauge.

A norm's or a value's bias flows into the biases behind the kernels that read it. One vector added to every row of one
table is subtracted from another's. A kernel behind a LayerNorm does not notice u/γ on the axis that it reads. A
constant along an axis that only centred norms read has no effect. Each is linear in a random u, so that a finite move
is its tangent.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from gauge_optax.discovery.groups import ZERO
from gauge_optax.discovery.search import singular_vectors, spaces_with_companions, sparse_basis
from gauge_optax.discovery.sketch import Leaves
from gauge_optax.discovery.spaces import Space
from gauge_optax.discovery.trace import Trace
from gauge_optax.discovery.views import View, views_of

Motion = tuple[str, np.ndarray]  # a leaf's path and what is added to it
Labels = Sequence[Space | None]
_MOST = 96  # columns of one flow: more of them mean a residual stream that everything writes to


class Shifts:
    """Leaves whose gradients sum to zero along one space: a constant along it leaves the outputs unchanged."""

    def __init__(self, trace: Trace, leaves: Leaves) -> None:
        self._read = {space for axis in trace.read for space in trace.atom_keys(axis)}
        searched = set(spaces_with_companions(trace))
        self._places: list[tuple[View, int]] = []
        for path, leaf in leaves.items():
            for view in views_of(trace, path, leaf.shape, set(searched)):
                labels = view.labels
                once = [k for k, label in enumerate(labels) if label in searched and labels.count(label) == 1]
                self._places += [(view, k) for k in once]
        self._sums = np.zeros((len(self._places), 2))

    def observe(self, gradients: Leaves) -> None:
        """Adds some gradients."""
        for k, (view, at) in enumerate(self._places):
            rows = view.read(gradients[view.path])
            self._sums[k] += np.square(rows.sum(1 + at)).sum(), np.square(rows).sum()

    def solve(self, read: bool = False) -> list[tuple[list[tuple[View, int]], float]]:
        """Views and atoms by space, with the largest residual of each space.

        Args:
          read: whether to return the spaces that a kernel reads, or the others. A constant along an axis that a kernel
            reads is hidden by a centred norm: it is no logit shift.
        """
        out: dict[Space, tuple[list[tuple[View, int]], float]] = {}
        for (view, at), (along, whole) in zip(self._places, self._sums, strict=True):
            residual = math.sqrt(along / whole) if whole > 0 else 1.0
            space = view.labels[at]
            if residual < ZERO and space is not None and (space in self._read) == read:
                places, worst = out.get(space, ([], 0.0))
                out[space] = [*places, (view, at)], max(worst, residual)
        return list(out.values())


@dataclasses.dataclass
class Flow:
    """A kind of addition: columns that a random vector makes, of which a combination may leave the outputs unchanged.

    Attributes:
      kind: what it is, in words.
      make: (point, generator) to motions, in a fixed order.
      columns: how many motions.
      required: the column without which a combination belongs to another flow; None where any two columns will do.
      products: products of gradients with the motions, chunk after chunk.
      squares: expected squares of the columns.
    """

    kind: str
    make: Callable[[Leaves, np.random.Generator], list[Motion]]
    columns: int
    required: int | None = 0
    products: list[np.ndarray] = dataclasses.field(default_factory=list)
    squares: np.ndarray | float = 0.0

    def observe(self, point: Leaves, gradients: Leaves, rng: np.random.Generator) -> None:
        """Adds some gradients at a point."""
        pairs = [(gradients[path].reshape(-1, motion.size), motion.ravel()) for path, motion in self.make(point, rng)]
        self.products.append(np.stack([rows @ motion for rows, motion in pairs], 1))
        squares = [np.square(rows).mean() * np.square(motion).sum() * len(rows) for rows, motion in pairs]
        self.squares = self.squares + np.array(squares)

    def solve(self) -> Iterator[np.ndarray]:
        """Coefficients of the combinations that the gradients do not see."""
        sizes = np.sqrt(np.asarray(self.squares))
        alive = np.nonzero(sizes > 1e-11 * sizes.max(initial=0.0))[0]
        if len(alive) < 1 + (self.required is None) or (self.required is not None and self.required not in alive):
            return
        values, right = singular_vectors(np.concatenate(self.products)[:, alive] / sizes[alive])
        for row in sparse_basis(right[values < ZERO] / sizes[alive], 1e-6):
            whole = np.zeros(len(sizes))
            whole[alive] = row
            enough = np.count_nonzero(whole) > 1 if self.required is None else whole[self.required] != 0
            if enough:
                yield whole

    def held(
        self, points: Sequence[Leaves], change: Callable[[Sequence[Leaves]], float], seed: Sequence[int]
    ) -> Iterator[str]:
        """The leaves of every combination that a finite move at the points proves."""
        for row in self.solve():
            moved, paths = [dict(point) for point in points], dict[str, None]()
            for point, out in zip(points, moved, strict=True):
                for (path, motion), factor in zip(self.make(point, np.random.default_rng(seed)), row, strict=True):
                    out[path] = out[path] + factor * motion
                    paths |= {path: None} if factor else {}
            if change(moved) < ZERO:
                yield " + ".join(paths)


def flows(trace: Trace, leaves: Leaves) -> list[Flow]:
    """Everything that is tried."""
    searched, views = set(spaces_with_companions(trace)), list[View]()
    for path, leaf in leaves.items():  # one view per leaf that reads all of it, each axis along a space of its own
        for view in views_of(trace, path, leaf.shape, searched):
            if view.size == leaf.size > 1 and None not in view.labels and len(set(view.labels)) == len(view.labels):
                views.append(view)
                break
    layers = trace.layer_spaces()
    labels = {view.path: set(view.labels) - layers for view in views}
    vectors = [view for view in views if not any(labels[other.path] < labels[view.path] for other in views)]
    kernels = [view for view in views if view not in vectors]
    by_path = {view.path: view for view in views}
    behind: dict[str, list[View]] = {}
    for writer, added in sorted(trace.added_behind):
        if added in by_path and by_path[added] in vectors:
            behind.setdefault(writer, []).append(by_path[added])
    tried = []
    for view in vectors:
        readers = [kernel for kernel in kernels if (view.path, kernel.path) in trace.vector_reads]
        tried.append(_absorbed(view, readers, behind))
    for norm, kernel in itertools.product(vectors, kernels):
        if (norm.path, kernel.path) in trace.vector_reads and set(norm.labels) < set(kernel.labels):
            beside = [b for b in vectors if (b.path, kernel.path) in trace.vector_reads]
            tried.append(_hidden_by_norm(kernel, norm, beside, behind.get(kernel.path, []), layers))
    for space in sorted({label for view in views for label in view.labels if label is not None}):
        tried.append(_common_row(space, [view for view in views if view.labels.count(space) == 1]))
    return [flow for flow in tried if 0 < flow.columns <= _MOST]


def _absorbed(vector: View, kernels: Sequence[View], behind: Mapping[str, Sequence[View]]) -> Flow:
    """A shift of a vector, undone behind the kernels that read it."""
    shape, pairs = set(vector.labels), list[tuple[View, View]]()
    for kernel in kernels:
        whole = set(kernel.labels)
        # The bias has the kernel's output axes; stacked layers are an axis of all three.
        biases = [b for b in behind.get(kernel.path, []) if whole - shape <= set(b.labels) <= whole]
        pairs += [(kernel, b) for b in biases if shape < whole and set(b.labels) != shape]

    def make(point: Leaves, rng: np.random.Generator) -> list[Motion]:
        shift = rng.standard_normal(_tensor(vector, point).shape)
        return [_motion(vector, shift)] + [
            _motion(b, _einsum(vector.labels, k.labels, b.labels, shift, _tensor(k, point))) for k, b in pairs
        ]

    return Flow("a bias that flows into the biases behind it", make, 1 + len(pairs) if pairs else 0)


def _hidden_by_norm(
    kernel: View, norm: View, beside: Sequence[View], behind: Sequence[View], layers: set[Space]
) -> Flow:
    """W + u/γ on the axis that a kernel reads; it adds u·Σβ/γ of the norm's bias, which the kernel's bias takes up."""
    read = set(norm.labels) - layers
    rest = tuple(label for label in kernel.labels if label not in read)
    stacked = tuple(label for label in norm.labels if label in layers)
    biases = [b for b in beside if b.path != norm.path and set(b.labels) == set(norm.labels)]
    pairs = [(beta, b) for beta in biases for b in behind if set(b.labels) == set(rest)]

    def make(point: Leaves, rng: np.random.Generator) -> list[Motion]:
        shape = zip(kernel.labels, _tensor(kernel, point).shape, strict=True)
        free = rng.standard_normal([n for label, n in shape if label not in read])
        scale = _tensor(norm, point)
        inverse = 1.0 / np.where(np.abs(scale) > 1e-3, scale, np.inf)
        motions = [_motion(kernel, _einsum(norm.labels, rest, kernel.labels, inverse, free))]
        for beta, b in pairs:
            total = _einsum(beta.labels, norm.labels, stacked, _tensor(beta, point), inverse)
            motions.append(_motion(b, _einsum(stacked, rest, b.labels, total, free)))
        return motions

    return Flow("a direction that a centred norm hides from the kernel behind it", make, 1 + len(pairs))


def _common_row(space: Space, tables: Sequence[View]) -> Flow:
    """One vector on every row of several tables."""

    def make(point: Leaves, rng: np.random.Generator) -> list[Motion]:
        row, motions = rng.standard_normal(len(space)), []
        for view in tables:
            shape, at = _tensor(view, point).shape, view.labels.index(space)
            wide = row.reshape([-1 if k == at else 1 for k in range(len(shape))])
            motions.append(_motion(view, np.broadcast_to(wide, shape)))
        return motions

    return Flow("one vector on every row of several leaves", make, len(tables) if len(tables) > 1 else 0, None)


def _tensor(view: View, point: Leaves) -> np.ndarray:
    return view.read(point[view.path][None])[0]


def _motion(view: View, tensor: np.ndarray) -> Motion:
    """A tensor over a view's atoms as a motion of its leaf; the view reads all of it, in order."""
    return view.path, np.ascontiguousarray(tensor).reshape(view.shape)


def _einsum(one: Labels, other: Labels, out: Labels, *factors: np.ndarray) -> np.ndarray:
    names = {label: chr(ord("a") + k) for k, label in enumerate(dict.fromkeys([*one, *other, *out]))}
    terms = ["".join(names[label] for label in labels) for labels in (one, other, out)]
    return np.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", *factors)
