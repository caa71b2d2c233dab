"""Symmetries that add something to vectors: they hold in many nets, and no gauge has them.

A norm's or a value's bias flows into the biases behind the kernels that read it; one vector added to every row of one
table comes off another's; a kernel behind a LayerNorm does not notice u/γ on the axis that it reads; a constant along
an axis that only centred norms read is not seen. Each is linear in a random u, and a finite move is the tangent.

Here: their columns and proof. Not here: groups that act on a basis (`search`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from gauge_optax.discovery.motions import ZERO
from gauge_optax.discovery.nulls import sparse_basis
from gauge_optax.discovery.search import spaces_with_companions
from gauge_optax.discovery.sketch import Leaves
from gauge_optax.discovery.trace import Walked
from gauge_optax.discovery.views import Space, View, views_of

Motion = tuple[str, np.ndarray]  # a leaf's path and what is added to it
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MOST = 96  # columns of one flow: more are a stream that everything writes to


@dataclasses.dataclass
class Flow:
    """A kind of addition: columns that a random vector makes, of which some combination may be unseen.

    Attributes:
      kind: what it is, in words.
      make: (point, generator) to motions, in fixed order.
      columns: how many.
      whole: the column without which a combination is another flow's; None for any two.
      seen: rows of values, chunk after chunk.
      sizes: expected squares of the columns.
    """

    kind: str
    make: Callable[[Leaves, np.random.Generator], list[Motion]]
    columns: int
    whole: int | None
    seen: list[np.ndarray] = dataclasses.field(default_factory=list)
    sizes: np.ndarray | float = 0.0

    def observe(self, motions: Sequence[Motion], rows: Leaves) -> None:
        """Adds what some gradients see."""
        flat = [(rows[path].reshape(len(rows[path]), -1), motion.reshape(-1)) for path, motion in motions]
        self.seen.append(np.stack([gradient @ motion for gradient, motion in flat], 1))
        own = [np.square(gradient).mean() * np.square(motion).sum() * len(gradient) for gradient, motion in flat]
        self.sizes = self.sizes + np.array(own)

    def solve(self) -> Iterator[np.ndarray]:
        """Coefficients of the combinations that gradients do not see."""
        sizes = np.sqrt(np.asarray(self.sizes))
        alive = np.nonzero(sizes > 1e-11 * sizes.max(initial=0.0))[0]
        if len(alive) < 1 + (self.whole is None) or (self.whole is not None and self.whole not in alive):
            return
        seen = np.concatenate(self.seen)[:, alive] / sizes[alive]
        _, values, right = np.linalg.svd(seen, full_matrices=True)
        values = np.concatenate([values, np.zeros(len(alive) - len(values))])
        for row in sparse_basis(right[values < ZERO] / sizes[alive], 1e-6):
            whole = np.zeros(len(sizes))
            whole[alive] = row
            if np.count_nonzero(whole) > (self.whole is None) and (self.whole is None or whole[self.whole] != 0):
                yield whole


def flows(walked: Walked, leaves: Leaves) -> list[Flow]:
    """Everything that is tried."""
    views = list(_whole_views(walked, leaves))
    layers = {walked.trace.spaces.key(axis) for axis in walked.trace.stacked}
    own = {view.path: set(view.labels) - layers for view in views}
    vectors = [v for v in views if not any(own[o.path] < own[v.path] for o in views)]
    kernels = [view for view in views if view not in vectors]
    found = [_absorbed(vector, kernels, vectors) for vector in vectors]
    readers = [(kernel, norm) for norm in vectors for kernel in kernels if set(norm.labels) < set(kernel.labels)]
    found += [_read(kernel, norm, vectors, layers) for kernel, norm in readers]
    spaces = sorted({label for view in views for label in view.labels if label is not None})
    found += [_rows(space, [v for v in views if v.labels.count(space) == 1]) for space in spaces]
    return [flow for flow in found if flow is not None]


def _whole_views(walked: Walked, leaves: Leaves) -> Iterator[View]:
    """One view per leaf that reads all of it, every axis along a space of its own."""
    known = set(spaces_with_companions(walked))
    for (path, leaf), axes in zip(leaves.items(), walked.axes, strict=True):
        for view in views_of(walked.trace.spaces, path, leaf.shape, axes, known):
            if view.size == leaf.size > 1 and None not in view.labels and len(set(view.labels)) == len(view.labels):
                yield view
                break


def _tensor(view: View, point: Leaves) -> np.ndarray:
    return view.read(point[view.path][None])[0]


def _flat(view: View, tensor: np.ndarray) -> Motion:
    """A tensor over a view's atoms as a motion of its leaf; the view reads all of it, in order."""
    return view.path, np.ascontiguousarray(tensor).reshape(view.shape)


def _absorbed(vector: View, kernels: Sequence[View], vectors: Sequence[View]) -> Flow | None:
    """A shift of a vector, undone behind the kernels that read it."""
    readers = [k for k in kernels if set(vector.labels) < set(k.labels)]
    pairs = [(k, b) for k in readers for b in vectors if b.path != vector.path and _behind(k, vector, b)]
    if not pairs or len(pairs) > _MOST:
        return None

    def make(point: Leaves, rng: np.random.Generator) -> list[Motion]:
        shift = rng.standard_normal(_tensor(vector, point).shape)
        return [_flat(vector, shift)] + [
            _flat(b, _einsum(vector.labels, k.labels, b.labels, shift, _tensor(k, point))) for k, b in pairs
        ]

    return Flow("a bias that flows into the biases behind it", make, 1 + len(pairs), 0)


def _behind(kernel: View, vector: View, bias: View) -> bool:
    """Whether a bias stands on what is left of a kernel's axes; stacked layers stay on all three."""
    rest = [label for label in kernel.labels if label not in vector.labels]
    return set(rest) <= set(bias.labels) <= set(kernel.labels) and set(bias.labels) != set(vector.labels)


def _einsum(
    one: Sequence[Space | None], other: Sequence[Space | None], out: Sequence[Space | None], *factors: np.ndarray
) -> np.ndarray:
    names = {label: _LETTERS[k] for k, label in enumerate(dict.fromkeys([*one, *other, *out]))}
    terms = ["".join(names[label] for label in labels) for labels in (one, other, out)]
    return np.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", *factors)


def _read(kernel: View, norm: View, vectors: Sequence[View], layers: set[Space]) -> Flow:
    """W + u/γ on the axis that a kernel reads, which makes u·Σβ/γ of the norm's bias: off the kernel's own bias."""
    read = set(norm.labels) - layers
    rest = tuple(label for label in kernel.labels if label not in read)
    stacked = tuple(label for label in norm.labels if label in layers)
    biases = [b for b in vectors if b.path != norm.path and set(b.labels) == set(norm.labels)]
    behind = [b for b in vectors if set(b.labels) == set(rest)]
    pairs = [(beta, b) for beta in biases for b in behind][:_MOST]

    def make(point: Leaves, rng: np.random.Generator) -> list[Motion]:
        shape = zip(kernel.labels, _tensor(kernel, point).shape, strict=True)
        free = rng.standard_normal([n for label, n in shape if label not in read])
        scale = _tensor(norm, point)
        inverse = 1.0 / np.where(np.abs(scale) > 1e-3, scale, np.inf)

        def undone(beta: View, b: View) -> np.ndarray:
            made = _einsum(beta.labels, norm.labels, stacked, _tensor(beta, point), inverse)
            return _einsum(stacked, rest, b.labels, made, free)

        moved = _flat(kernel, _einsum(norm.labels, rest, kernel.labels, inverse, free))
        return [moved] + [_flat(b, undone(beta, b)) for beta, b in pairs]

    return Flow("a direction that a centred norm hides from the kernel behind it", make, 1 + len(pairs), 0)


def _rows(space: Space, tables: Sequence[View]) -> Flow | None:
    """One vector on every row of several tables."""
    if not 2 <= len(tables) <= _MOST:
        return None

    def make(point: Leaves, rng: np.random.Generator) -> list[Motion]:
        row = rng.standard_normal(len(space))

        def spread(view: View) -> np.ndarray:
            shape, at = _tensor(view, point).shape, view.labels.index(space)
            return np.broadcast_to(row.reshape([-1 if k == at else 1 for k in range(len(shape))]), shape)

        return [_flat(view, spread(view)) for view in tables]

    return Flow("one vector on every row of several leaves", make, len(tables), None)


def observe(tried: Sequence[Flow], point: Leaves, rows: Iterable[Leaves], seed: Sequence[int]) -> None:
    """Adds what the gradients at a point see of every flow."""
    for chunk in rows:
        for k, flow in enumerate(tried):
            flow.observe(flow.make(point, np.random.default_rng([*seed, k])), chunk)


def unseen(
    tried: Sequence[Flow], points: Sequence[Leaves], change: Callable[[Sequence[Leaves]], float]
) -> Mapping[str, tuple[str, ...]]:
    """Kind → leaves of the flows that a finite move leaves the outputs alone under."""
    found: dict[str, list[str]] = {}
    for k, flow in enumerate(tried):
        for row in flow.solve():
            motions = [flow.make(point, np.random.default_rng([11, k])) for point in points]
            paths = list(dict.fromkeys(path for (path, _), c in zip(motions[0], row, strict=True) if c))
            moved = [_moved(point, own, row) for point, own in zip(points, motions, strict=True)]
            if change(moved) < ZERO:
                found.setdefault(flow.kind, []).append(" + ".join(paths))
    return {kind: tuple(dict.fromkeys(where)) for kind, where in found.items()}


def _moved(point: Leaves, motions: Sequence[Motion], row: np.ndarray) -> Leaves:
    out = dict(point)
    for (path, motion), coefficient in zip(motions, row, strict=True):
        out[path] = out[path] + coefficient * motion
    return out
