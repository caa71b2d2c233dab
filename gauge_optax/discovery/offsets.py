"""Finds symmetries that add something to leaves: the logit shift, and additions that norms and biases hide.

Examples of such additions:

* A vector u is added to a bias (of a norm, or of attention's values), and Wᵀu is subtracted from the bias behind each
  kernel W that reads the result.
* A vector is added to every row of one table, and subtracted from every row of another.
* Row k of a kernel behind a LayerNorm with the scale γ gains u/γ_k. The norm's outputs, each divided by its γ_k, have
  the same sum for all inputs, so that the kernel's output changes by a constant at most.
* A constant is added along an axis that only *centred* norms read, which subtract the mean.

A *flow* is one kind of addition. It consists of *columns*: motions of single leaves that are made from the same random
u. Each is linear in u, so that a finite move adds its tangent to the leaf, however large u is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gauge_optax.discovery.calls import Axes, Call
from gauge_optax.discovery.groups import ZERO
from gauge_optax.discovery.search import BLUR, echelon, spaces_with_companions, sparse
from gauge_optax.discovery.sketch import Leaves
from gauge_optax.discovery.spaces import Space
from gauge_optax.discovery.trace import Trace
from gauge_optax.discovery.views import Atom, View, undivided, views_of
from gauge_optax.discovery.write import Unwritable, axes_text
from gauge_optax.linalg import singular_vectors

Motion = tuple[str, np.ndarray]  # a leaf's path and what is added to it
Labels = Sequence[Space | None]
Coefficients = Mapping[int, float]  # number of a column → its coefficient in a combination of columns
PAST_NORMS = "the mean of a stream, which centred norms or a softmax hide, and which a kernel reads past them"
ABSORBED = "a bias that flows into the biases behind it"
COMMON_ROW = "one vector on every row of several leaves"
ON_STREAM = "a vector on a stream, which later leaves and the biases between them take away"
ONE_NUMBER = "one number on all entries of a bias, which the biases behind kernels along another axis take away"
_MOST = 96  # a flow with more columns is not tried: it comes from a residual stream that every layer writes to


class Shifts:
    """Leaves whose gradients sum to zero along one space: a constant along it leaves the outputs unchanged.

    >>> from gauge_optax.discovery.trace import walked
    >>> tree = {"head": np.ones((2, 3))}
    >>> shifts = Shifts(walked(lambda p, x: [jax.nn.log_softmax(x @ p["head"])], tree, np.ones(2)), tree)
    >>> shifts.observe({"head": np.array([[[1.0, 1.0, -2.0], [0.0, 3.0, -3.0]]])})
    >>> [[view.path for view, _ in places] for places, residual in shifts.solve(softmax=True)]
    [['head']]
    """

    def __init__(self, trace: Trace, leaves: Leaves) -> None:
        returned = {space for axis in trace.returned for space in trace.atom_keys(axis)}
        self._softmax = returned | trace.chosen_spaces()
        searched = set(spaces_with_companions(trace))
        self._places: list[tuple[View, int]] = []
        for path, leaf in leaves.items():
            for view in views_of(trace, path, leaf.shape, set(searched)):
                labels = view.labels
                once = [k for k, label in enumerate(labels) if label in searched and labels.count(label) == 1]
                self._places += [(view, k) for k in once]
        self._sums = np.zeros((len(self._places), 3))

    def along(self, space: Space | None) -> list[tuple[View, int]]:
        """All views with this space, each with the number of its atom along the space."""
        return [(view, at) for view, at in self._places if view.labels[at] == space]

    def observe(self, gradients: Leaves) -> None:
        """Adds some gradients, (rows, *shape) by path, to the sums that `solve` compares."""
        for k, (view, at) in enumerate(self._places):
            rows = view.read(gradients[view.path])
            total = rows.reshape(len(rows), -1).sum(1)
            self._sums[k] += np.square(rows.sum(1 + at)).sum(), np.square(rows).sum(), np.square(total).sum()

    def solve(self, softmax: bool) -> list[tuple[list[tuple[View, int]], float]]:
        """Lists the spaces along which gradients sum to zero, each as its views, the atom of each view, and a residual.

        The residual of a view is the norm of the sums of its gradients along the space, divided by the norm of the
        gradients. The largest residual of a space's views is returned.

        Args:
          softmax: True to list the axes of the outputs and those along which the function has a softmax: a constant
            along these is a logit shift. False to list all other axes: a constant along these is hidden by a centred
            norm.
        """
        out: dict[Space, tuple[list[tuple[View, int]], float]] = {}
        for (view, at), (along, whole, _) in zip(self._places, self._sums, strict=True):
            residual = math.sqrt(along / whole) if whole > 0 else 1.0
            space = view.labels[at]
            if residual < ZERO and space is not None and (space in self._softmax) == softmax:
                places, worst = out.get(space, ([], 0.0))
                out[space] = [*places, (view, at)], max(worst, residual)
        return list(out.values())

    def constants(self) -> list[tuple[str, str]]:
        """Leaves to which one number may be added at all entries, but not a separate number per row or column.

        Each comes with its axes string, which is empty if `norm_write_shift` cannot express the move. An example is a
        table that is tied to the unembedding. One number on all its entries adds a constant to the stream, which
        centred norms hide, and a constant to all logits, which the softmax hides.
        """
        single, found = set[str](), dict[str, str]()
        for (view, _), (along, whole, total) in zip(self._places, self._sums, strict=True):
            if along <= ZERO**2 * whole:
                single.add(view.path)
            elif view.size == math.prod(view.shape) and total <= ZERO**2 * view.size * whole:
                names = ["vocab" if label in self._softmax else "channel" for label in view.labels]
                fits = len(view.shape) == 2 and sorted(names) == ["channel", "vocab"]
                found[view.path] = " ".join(names) if fits else ""
        return [(path, axes) for path, axes in found.items() if path not in single]


@dataclasses.dataclass
class Flow:
    """A kind of addition: columns made from one random vector. `solve` finds the combinations that change no output.

    Attributes:
      kind: what it is, in words.
      make: function of a point, and of the generator that draws the random vector; returns one motion per column.
      columns: how many columns.
      belongs: function of the numbers of the columns in a combination; returns whether this flow reports the
        combination. If several flows contain it, only one of them does.
      write: function of the coefficients of the columns in a combination, and of the columns that no output depends on;
        returns the gauge. Columns without effect may have to move too: a norm's bias that moves into the query bias
        also moves into the key bias. None if the library has no such gauge.
      products: per chunk of gradients an array (gradients, columns), the inner products of gradients with motions.
      squares: per column, the sum of squares that `products` would have on average for a motion of random direction.
        `solve` divides by its root, so that columns of different size can be compared.

    >>> from gauge_optax.discovery.trace import walked
    >>> tree = {"a": np.ones(2), "up": np.ones((2, 3)), "b": np.ones(3)}
    >>> trace = walked(lambda p, x: [(x + p["a"]) @ p["up"] + p["b"]], tree, np.ones((5, 2)))
    >>> absorbed = flows(trace, tree)[0]
    >>> [path for path, motion in absorbed.make(tree, np.random.default_rng(0))]
    ['a', 'b']
    """

    kind: str
    make: Callable[[Leaves, np.random.Generator], list[Motion]]
    columns: int
    belongs: Callable[[list[int]], bool]
    write: Callable[[Coefficients, list[int]], Call] | None = None
    products: list[np.ndarray] = dataclasses.field(default_factory=list)
    squares: np.ndarray | float = 0.0

    def observe(self, point: Leaves, gradients: Leaves, rng: np.random.Generator) -> None:
        """Draws motions at a point, and extends `products` and `squares` by gradients (rows, *shape) taken there."""
        # A motion that divides by zero is NaN (`moved`). It is replaced by zeros, so that it adds nothing to the sums.
        motions = [(path, np.nan_to_num(motion.ravel())) for path, motion in self.make(point, rng)]
        pairs = [(gradients[path].reshape(-1, motion.size), motion) for path, motion in motions]
        self.products.append(np.stack([rows @ motion for rows, motion in pairs], 1))
        squares = [np.square(rows).mean() * np.square(motion).sum() * len(rows) for rows, motion in pairs]
        self.squares = self.squares + np.array(squares)

    def solve(self) -> Iterator[np.ndarray]:
        """The coefficients (columns,) of each combination of columns to which all gradients are orthogonal."""
        sizes, alive = np.sqrt(np.asarray(self.squares)), self._alive
        if not self.belongs(alive.tolist()):
            return
        values, right = singular_vectors(np.concatenate(self.products)[:, alive] / sizes[alive])
        for row in sparse(echelon(right[values < ZERO], sizes[alive], BLUR)[0]):
            whole = np.zeros(len(sizes))
            whole[alive] = row
            if self.belongs(np.nonzero(whole)[0].tolist()):
                yield whole

    @property
    def _alive(self) -> np.ndarray:
        """The numbers of the columns that the outputs depend on."""
        sizes = np.sqrt(np.asarray(self.squares))
        return np.nonzero(sizes > 1e-11 * sizes.max(initial=0.0))[0]

    def call(self, row: np.ndarray) -> Call:
        """The gauge of a combination. Raises `Unwritable` if there is none."""
        if self.write is None:
            raise Unwritable(self.kind)
        taken = {int(k): float(row[k]) for k in np.nonzero(row)[0]}
        return self.write(taken, [k for k in range(len(row)) if k not in self._alive])

    def moved(self, row: np.ndarray, point: Leaves, seed: int) -> Leaves:
        """A point moved along a combination, whose random vector the seed determines; NaN where motions divide by zero.
        """
        out = dict(point)
        for (path, motion), factor in zip(self.make(point, np.random.default_rng([11, seed])), row, strict=True):
            out[path] = out[path] + factor * motion if factor else out[path]
        return out

    def paths(self, row: np.ndarray, point: Leaves) -> list[str]:
        """The leaves that a combination moves."""
        motions = self.make(point, np.random.default_rng(0))
        return list(dict.fromkeys(path for (path, _), factor in zip(motions, row, strict=True) if factor))


class _Norm(NamedTuple):
    """A centred norm, given by one of its vectors: its scale is this vector plus `plus`.

    If `plus` is None, the norm's scale is one and the vector is its bias.
    """

    vector: View
    plus: float | None

    @property
    def labels(self) -> Labels:
        """The labels of the vector."""
        return self.vector.labels

    def inverse(self, point: Leaves) -> np.ndarray:
        """1/γ for the norm's scale γ, and zero where γ is zero.

        A small γ makes 1/γ large. But the gradient of the kernel behind it has the factor γ, so that their product is
        not large.
        """
        values = _tensor(self.vector, point)
        scale = np.ones_like(values) if self.plus is None else values + self.plus
        return 1.0 / np.where(np.abs(scale) > 1e-9, scale, np.inf)


class _Column(NamedTuple):
    """One column of a flow. Given an array, a leaf moves by the product of the array and all `factors`.

    Attributes:
      view: the entries of the leaf that move. If the array or a factor has an axis that the view lacks, the product is
        summed over it. If only the view has an axis, the motion is the same at all its indices.
      factors: what the array is multiplied by. A `View` stands for its leaf's values, a `_Norm` for 1/γ of its scale γ.
    """

    view: View
    factors: tuple[View | _Norm, ...] = ()

    def motion(self, labels: Labels, array: np.ndarray, point: Leaves) -> Motion:
        """The motion that an array with these labels makes at a point."""
        tensors = [x.inverse(point) if isinstance(x, _Norm) else _tensor(x, point) for x in self.factors]
        terms = [(labels, array), *((x.labels, tensor) for x, tensor in zip(self.factors, tensors, strict=True))]
        known = {label for names, _ in terms for label in names}
        made = _einsum(terms, [label for label in self.view.labels if label in known])
        lengths = zip(self.view.labels, self.view.lengths, strict=True)
        made = made.reshape([n if label in known else 1 for label, n in lengths])
        return _motion(self.view, np.broadcast_to(made, self.view.lengths))


def _linear(
    kind: str, labels: Labels, columns: Sequence[_Column], belongs: Callable[[list[int]], bool],
    write: Callable[[Coefficients, list[int]], Call] | None = None, constant: bool = False,
) -> Flow:
    """The flow whose columns are made of one array with these labels: random, or of ones if `constant` is True."""
    lengths = {label: n for one in columns for label, n in zip(one.view.labels, one.view.lengths, strict=True)}

    def make(point: Leaves, rng: np.random.Generator) -> list[Motion]:
        shape = [lengths[label] for label in labels]
        array = np.ones(shape) if constant else rng.standard_normal(shape)
        return [column.motion(labels, array, point) for column in columns]

    return Flow(kind, make, len(columns), belongs, write)


def flows(trace: Trace, leaves: Leaves) -> list[Flow]:
    """All kinds of addition to try on a function.

    >>> from gauge_optax.discovery.trace import walked
    >>> tree = {"a": np.ones(2), "up": np.ones((2, 3)), "b": np.ones(3)}
    >>> trace = walked(lambda p, x: [(x + p["a"]) @ p["up"] + p["b"]], tree, np.ones((5, 2)))
    >>> flows(trace, tree)[0].kind
    'a bias that flows into the biases behind it'
    """
    searched, views, parts, squares = set(spaces_with_companions(trace)), list[View](), list[View](), list[View]()
    for path, leaf in leaves.items():  # one view per leaf that reads all of it, each axis along a space of its own
        ways = [*views_of(trace, path, leaf.shape, searched), undivided(trace, path, leaf.shape)]
        numbered = [_with_numbered_parts(view, trace) for view in ways]
        usable = [view for view in numbered if None not in view.labels and len(set(view.labels)) == len(view.labels)]
        views += [view for view in usable if view.size == leaf.size][:1]
        parts += [view for view in usable if 1 < view.size < leaf.size]
        squares += [view for view in numbered if None not in view.labels and len(set(view.labels)) < len(view.labels)
                    and view.size == leaf.size][:1]
    layers = trace.layer_spaces()
    kernel_paths = {kernel for _, kernel in trace.vector_reads} | {kernel for kernel, _ in trace.added_behind}
    vector_paths = {vector for vector, _ in trace.vector_reads} | {vector for _, vector in trace.added_behind}
    vectors = [view for view in views if view.path in vector_paths - kernel_paths]
    vector_parts = [view for view in parts if view.path in vector_paths - kernel_paths]
    kernels, kernel_parts = ([view for view in some if view.path in kernel_paths] for some in (views, parts))
    by_path = {view.path: view for view in views}
    behind: dict[str, list[View]] = {}
    for writer, added in sorted(trace.added_behind):
        if added in by_path and by_path[added] in vectors:
            behind.setdefault(writer, []).append(by_path[added])
    for view in squares:
        if view.path in kernel_paths - by_path.keys():
            # Which axis of a square kernel is its input axis is not known here. A flow gets a column for each of them.
            ways = [_relabelled(view, [axis]) for axis in range(len(view.windows))]
            kernels += [way for way in ways if len(set(way.labels)) == len(way.labels)]
            biases = [_relabelled(b, [k for k, window in enumerate(b.windows) if window.atoms[0].space not in layers])
                      for b in behind.get(view.path, [])]
            behind[view.path] = [*behind.get(view.path, []), *biases]
    tried = []

    def read(vector: View) -> set[str]:
        return {kernel for path, kernel in trace.vector_reads if path == vector.path}

    for view in vectors + vector_parts:
        readers = _readers(view, kernels, kernel_parts, trace)
        tried += [_absorbed(view, readers, behind, layers), _carried_on(view, readers, behind, vectors, layers)]
        tried.append(_one_number(view, [k for k in kernels if k.path in read(view)], behind, layers))
        if len(readers) == 1:
            tried += _mapped_to_zero(view, readers[0], layers)
        # The scale and the bias of one norm are in one module, or at least have the same readers.
        alike = [v for v in vectors if v.labels == view.labels and (v.module == view.module or read(v) == read(view))]
        for vector in alike:
            for norm in [_Norm(vector, None)] if vector is view else [_Norm(vector, 0.0), _Norm(vector, 1.0)]:
                tried.append(_hidden_and_absorbed(view, norm, readers, behind, layers))
    for vector, plus in itertools.product(vectors, (0.0, 1.0, None)):
        for kernel in _readers(vector, kernels, kernel_parts, trace):
            beside = [b for b in vectors if (b.path, kernel.path) in trace.vector_reads]
            tried.append(_hidden_by_norm(kernel, _Norm(vector, plus), beside, behind.get(kernel.path, []), layers))
    for view, scale in itertools.product(views + parts, vectors):
        if (view.path, scale.path) in trace.scaled_behind | trace.gains:
            tried += [_hidden_behind_scale(view, _Norm(scale, plus), layers) for plus in (0.0, 1.0)]
    for space in sorted({space for _, axis in trace.readers for space in trace.atom_keys(axis)} - layers):
        tried += _written_to_zero(space, views + parts, trace)
    for view in views + parts:
        others = [other for other in views + parts if other.path != view.path]
        met = [[other for other in others if (view.path, other.path) in pairs] for pairs in (trace.gains, trace.shifts)]
        tried.append(_modulated(view, *met))
    labels = {view.path: {label for label in view.labels if label is not None} for view in views}
    shared = {frozenset(one & other) for one, other in itertools.combinations(labels.values(), 2)}
    for spaces in sorted(sorted(common) for common in shared if common):
        tried.append(_common_row(spaces, [view for view in views if labels[view.path] >= set(spaces)], layers))
    tried.append(_common_row((), [view for view in views if len(view.labels) < 2], layers))
    for space in sorted({space for own in labels.values() for space in own} - layers):
        along = [view for view in views if view.labels.count(space) == 1]
        tried.append(_read_past_norms(space, along))
        along += _apart([view for view in parts if view.labels.count(space) == 1], {view.path for view in along})
        tried += [_passed_on(space, along, behind, same) for same in (False, True)]
    return [flow for flow in tried if 0 < flow.columns <= _MOST]


def _readers(vector: View, kernels: Sequence[View], parts: Sequence[View], trace: Trace) -> list[View]:
    """The kernels that read a vector. Of a kernel that reads a concatenation, it is the part that reads the vector."""
    read = [view for view in (*kernels, *parts)
            if (vector.path, view.path) in trace.vector_reads and set(vector.labels) <= set(view.labels)]
    whole = {view.path for view in read if view.size == math.prod(view.shape)}
    return [view for view in read if view.path not in whole or view.size == math.prod(view.shape)]


def _relabelled(view: View, axes: Collection[int]) -> View:
    """The view with new spaces on some axes.

    If what a kernel computes is added to what it reads, as in x + f(x·W), both its axes are along one space. To tell
    them apart, its output axis gets a new space, and so does the axis of the bias behind it.
    """

    def changed(atom: Atom) -> Atom:
        return atom._replace(space=None if atom.space is None else tuple(-1 - entry for entry in atom.space))

    windows = tuple(window._replace(atoms=tuple(map(changed, window.atoms))) if axis in axes else window
                    for axis, window in enumerate(view.windows))
    return dataclasses.replace(view, windows=windows)


def _apart(parts: Sequence[View], whole: Collection[str]) -> list[View]:
    """The parts of leaves that are not in `whole`; of parts that share an entry, only the first.

    Examples are the parts of a kernel that reads a concatenation, one per concatenated array.
    """
    out, taken = list[View](), dict[str, set[int]]()
    for view in parts:
        entries = set(view.read(np.arange(math.prod(view.shape)).reshape(1, *view.shape)).ravel().tolist())
        if view.path not in whole and entries.isdisjoint(taken.setdefault(view.path, set())):
            taken[view.path] |= entries
            out.append(view)
    return out


def _mapped_to_zero(vector: View, kernel: View, layers: set[Space]) -> list[Flow]:
    """Shifts of a bias that the kernel behind it maps to zero, or to equal entries, which centred norms hide.

    If a kernel has more inputs than outputs, it maps some vector to zero. If it has as many inputs as outputs, it still
    maps some vector to one of equal entries. Query heads that share a value head read one bias: the sum of their
    kernels is then the kernel behind it.
    """
    stacked = [label for label in vector.labels if label in layers]
    inputs = [label for label in vector.labels if label not in layers]
    others: list[Space | None] = [label for label in kernel.labels if label not in vector.labels]
    if not set(vector.labels) <= set(kernel.labels):
        return []
    others = others or [None]  # a kernel with a single output may have no output axis
    to_vector = [vector.labels.index(label) for label in (*stacked, *inputs)]
    kind = "a part of a bias that the kernel behind it maps to nothing that is read"

    def weights(point: Leaves, output: Space | None, centred: bool) -> np.ndarray:
        summed = [label for label in others if label != output]
        order = [kernel.labels.index(label) for label in (*summed, *stacked, *inputs, output) if label is not None]
        rows = _tensor(kernel, point).transpose(order).sum(tuple(range(len(summed))))
        flat = rows.reshape(math.prod(rows.shape[: len(stacked)]), length, sizes[output])
        # The m centred columns sum to zero, so that m - 1 of them have the same span.
        return (flat - flat.mean(-1, keepdims=True))[..., :-1] if centred else flat

    def make(output: Space | None, centred: bool, point: Leaves, rng: np.random.Generator) -> list[Motion]:
        kept = np.linalg.qr(weights(point, output, centred))[0]
        free = rng.standard_normal((*kept.shape[:2], 1))
        free -= kept @ (kept.swapaxes(1, 2) @ free)
        lengths = [vector.lengths[k] for k in to_vector]
        return [_motion(vector, free.reshape(lengths).transpose(np.argsort(to_vector)))]

    sizes: dict[Space | None, int] = {None: 1, **dict(zip(kernel.labels, kernel.lengths, strict=True))}
    length = math.prod(sizes[label] for label in inputs)
    ways = [(out, centred) for out in others for centred in (False, True) if length + centred > sizes[out]]
    return [Flow(kind, functools.partial(make, *way), 1, _with_the_first(1)) for way in ways]


def _written_to_zero(space: Space, views: Sequence[View], trace: Trace) -> Iterator[Flow]:
    """Additions to what a kernel or table writes along a space, which the kernels that read the space map to zero.

    They can do so if together they have fewer outputs than the space has entries, as a head of few classes has. One
    kernel with at most as many outputs as entries may also map an addition to equal entries, which a softmax or a
    centred norm behind it hides. If a bias is added to what the kernel writes, only the kernels that read this bias
    count.
    """
    along = [view for view in views if view.labels.count(space) == 1]
    paths = {path for path, axis in trace.readers if set(space) & set(trace.spaces.key(axis))}

    def front(view: View, point: Leaves) -> np.ndarray:
        return np.moveaxis(_tensor(view, point), view.labels.index(space), 0).reshape(len(space), -1)

    def make(
        writer: View, readers: Sequence[View], centred: bool, point: Leaves, rng: np.random.Generator
    ) -> list[Motion]:
        kernel = np.concatenate([front(view, point) for view in readers], 1)
        kept = np.linalg.qr((kernel - kernel.mean(-1, keepdims=True))[:, :-1] if centred else kernel)[0]
        free, at = rng.standard_normal(writer.lengths), writer.labels.index(space)
        along_last = np.moveaxis(free, at, -1)
        return [_motion(writer, np.moveaxis(along_last - along_last @ kept @ kept.T, -1, at))]

    kind = "a part of what a kernel writes that the kernels behind it map to nothing that is read"
    for writer in [view for view in along if len(view.labels) > 1 and view.path not in paths]:
        biases = {vector for kernel, vector in trace.added_behind if kernel == writer.path}
        behind = {kernel for vector, kernel in trace.vector_reads if vector in biases}
        readers = [view for view in along if view.path in (paths & behind or paths)]
        outputs = sum(view.size for view in readers) // len(space)
        for centred in (False, True) if len(readers) == 1 else (False,):
            if 0 < outputs < len(space) + centred:
                yield Flow(kind, functools.partial(make, writer, readers, centred), 1, _with_the_first(1))


def _absorbed(vector: View, kernels: Sequence[View], behind: Mapping[str, Sequence[View]], layers: set[Space]) -> Flow:
    """A shift u of a vector, where Wᵀu is subtracted from the bias behind each kernel W that reads the vector."""
    pairs = _pairs(vector, kernels, behind, layers)
    columns = [_Column(vector), *(_Column(b, (kernel,)) for kernel, b in pairs)]

    def write(taken: Coefficients, unread: list[int]) -> Call:
        used = [pairs[k - 1] for k in sorted([*taken, *unread]) if k > 0]
        blocks = {"bias": [vector], "through": [k for k, _ in used], "into": [b for _, b in used]}
        return _call("bias_absorption", blocks, _names(vector.labels, layers))

    return _linear(ABSORBED, vector.labels, columns if pairs else [], _with_the_first(2), write)


def _carried_on(
    vector: View, kernels: Sequence[View], behind: Mapping[str, Sequence[View]], vectors: Sequence[View],
    layers: set[Space],
) -> Flow:
    """A shift of a vector on a residual stream, which a later vector on the stream subtracts.

    Kernels between the two read the shift as well, and the biases behind them undo this as in `_absorbed`.
    """
    pairs = _pairs(vector, kernels, behind, layers)
    later = [view for view in vectors if view.path != vector.path and set(view.labels) == set(vector.labels)]
    first = 1 + len(pairs)
    columns = [_Column(vector), *(_Column(b, (kernel,)) for kernel, b in pairs), *map(_Column, later)]

    def write(taken: Coefficients, unread: list[int]) -> Call:
        # A key bias, on which no output depends, need not change: `unread` is left out.
        used, gained = [pairs[k - 1] for k in taken if 0 < k < first], [later[k - first] for k in taken if k >= first]
        if len(gained) != 1 or any(abs(taken[k] + taken[0]) > 1e-6 * abs(taken[0]) for k in taken if k):
            raise Unwritable(ON_STREAM)
        blocks = {"bias": [vector], "through": [k for k, _ in used], "into": [b for _, b in used], "residual": gained}
        return _call("bias_absorption", blocks, _names(vector.labels, layers))

    def belongs(taken: list[int]) -> bool:
        return len(taken) > 2 and taken[0] == 0 and taken[1] < first <= taken[-1]

    return _linear(ON_STREAM, vector.labels, columns if pairs and later else [], belongs, write)


def _one_number(
    vector: View, kernels: Sequence[View], behind: Mapping[str, Sequence[View]], layers: set[Space]
) -> Flow:
    """Adds one number to all entries of a vector. The bias behind a kernel along another axis subtracts its effect.

    A kernel W along another axis reads the number at all of its inputs, so that the bias behind it loses the number
    times the sum of W over its inputs. Examples are the kernels of MLP-Mixer and gMLP that mix positions.
    """
    stacked = tuple(label for label in vector.labels if label in layers)
    pairs = [(k, b) for k in kernels for b in behind.get(k.path, []) if set(stacked) <= set(b.labels) < set(k.labels)]
    apart = {k + 1 for k, (kernel, _) in enumerate(pairs) if set(vector.labels) & set(kernel.labels) <= layers}
    columns = [_Column(vector), *(_Column(b, (kernel,)) for kernel, b in pairs)] if apart else []
    return _linear(ONE_NUMBER, stacked, columns, lambda taken: len(taken) > 1 and taken[0] == 0 and taken[1] in apart)


def _pairs(
    vector: View, kernels: Sequence[View], behind: Mapping[str, Sequence[View]], layers: set[Space]
) -> list[tuple[View, View]]:
    """Pairs of a kernel that reads a vector, and a bias that is added to the kernel's product."""
    shape, pairs = set(vector.labels), list[tuple[View, View]]()
    for kernel in kernels:
        # The bias has the kernel's output axes; an axis of stacked layers is in all three leaves. The bias may lack
        # output axes, which are summed over: several query heads read one value head.
        rest, stacked = set(kernel.labels) - shape, shape & layers
        biases = [b for b in behind.get(kernel.path, []) if stacked <= set(b.labels) <= rest | stacked]
        # A kernel of a single output may have no output axis, and its bias none at all.
        pairs += [(kernel, b) for b in biases if shape <= set(kernel.labels) and (not rest or set(b.labels) - stacked)]
    return pairs


def _hidden_by_norm(
    kernel: View, norm: _Norm, beside: Sequence[View], behind: Sequence[View], layers: set[Space]
) -> Flow:
    """Moves a kernel W behind a centred norm, with scale γ and bias β, to W + (1/γ)⊗u, where 1/γ is on the input axis.

    The entries of the norm's output, each divided by its γ, have the sum Σβ/γ for every input. The kernel's output
    therefore changes by the constant u·Σβ/γ, which is subtracted from the kernel's bias.
    """
    vector, scaled = norm.vector, norm.plus is not None
    read = set(vector.labels) - layers
    rest = tuple(label for label in kernel.labels if label not in read)
    biases = [b for b in beside if (b.path == vector.path) != scaled and set(b.labels) == set(vector.labels)]
    pairs = [(beta, b) for beta in biases for b in behind if set(b.labels) == set(rest)]
    columns = [_Column(kernel, (norm,)), *(_Column(b, (beta, norm)) for beta, b in pairs)]

    def write(taken: Coefficients, unread: list[int]) -> Call:
        used = [pairs[k - 1] for k in taken if k > 0]
        used += [pair for k in unread if k > 0 and (pair := pairs[k - 1])[0].module == vector.module]
        blocks = {"read": [kernel]} | ({"scale": [vector]} if scaled else {})
        if used:
            blocks |= {"bias": [beta for beta, _ in used], "into": [b for _, b in used]}
        return _call("norm_read_shift", blocks, _names(vector.labels, layers), [vector.path] if norm.plus else [])

    kind, least = "a direction that a centred norm hides from the kernel behind it", 1 if scaled else 2
    return _linear(kind, rest, columns if scaled or pairs else [], _with_the_first(least), write)


def _hidden_behind_scale(view: View, scale: _Norm, layers: set[Space]) -> Flow:
    """Adds u/γ along the channels of what a kernel or bias writes, where a scale γ multiplies what they write.

    Behind the scale, all channels gain the same u, which centred norms hide. An example of γ is LayerScale.
    """
    vector = scale.vector
    channels = set(vector.labels) - layers
    rest = tuple(label for label in view.labels if label not in channels)

    def write(taken: Coefficients, unread: list[int]) -> Call:
        blocks = {"read": [view], "scale": [vector]}
        return _call("norm_read_shift", blocks, _names(vector.labels, layers), [vector.path] if scale.plus else [])

    columns = [_Column(view, (scale,))] if set(vector.labels) <= set(view.labels) and view != vector else []
    kind = "the mean of what a scale multiplies, which centred norms hide"
    return _linear(kind, rest, columns, _with_the_first(1), write)


def _hidden_and_absorbed(
    bias: View, norm: _Norm, kernels: Sequence[View], behind: Mapping[str, Sequence[View]], layers: set[Space]
) -> Flow:
    """Shifts the bias β of a centred norm with scale γ by a vector δ with Σδ/γ = 0, and undoes this behind the norm.

    The output of a kernel W behind the norm changes by Wᵀδ, which the bias behind W subtracts. Without a bias, W gains
    −(1/γ)⊗Wᵀδ/Σ(β/γ), whose output is −Wᵀδ (`_hidden_by_norm`).
    """
    stacked = tuple(label for label in bias.labels if label in layers)
    axis = next((k for k, label in enumerate(bias.labels) if label not in layers), 0)
    readers = [k for k in kernels if set(bias.labels) <= set(k.labels)]
    biases = {k.path: [b for b in behind.get(k.path, []) if set(b.labels) <= set(k.labels)] for k in readers}

    def make(point: Leaves, rng: np.random.Generator) -> list[Motion]:
        inverse = norm.inverse(point)
        shift = rng.standard_normal(inverse.shape)
        along = (shift * inverse).sum(axis, keepdims=True) / np.square(inverse).sum(axis, keepdims=True)
        shift = shift - along * inverse
        total = _einsum([(bias.labels, _tensor(bias, point)), (norm.labels, inverse)], stacked)
        motions = [_motion(bias, shift)]
        for kernel in readers:
            motions += [_Column(b, (kernel,)).motion(bias.labels, shift, point) for b in biases[kernel.path]]
            if not biases[kernel.path]:
                out = tuple(label for label in kernel.labels if label not in set(bias.labels) - set(stacked))
                share = stacked, 1.0 / np.where(total == 0, np.nan, total)
                taken = _einsum([(bias.labels, shift), (kernel.labels, _tensor(kernel, point)), share], out)
                motions.append(_Column(kernel, (norm,)).motion(out, taken, point))
        return motions

    kind = "a norm's bias that the kernels without a bias behind it take up in the direction that the norm hides"
    count = 1 + sum(max(1, len(biases[k.path])) for k in readers)
    return Flow(kind, make, count if not all(biases.values()) else 0, _with_the_first(2))


def _modulated(vector: View, gains: Sequence[View], shifts: Sequence[View]) -> Flow:
    """A vector gains u, in front of a gain that multiplies it and a shift that is added, as in FiLM or adaptive norms.

    Each leaf that computes the shift loses u times the leaf that computes the gain. If the gain is one plus what the
    leaf computes, the bias of the shift, or every row of a table of shifts, loses u as well.

    Args:
      vector: the vector that gains u.
      gains: the leaves that compute the gain, and their parts: gain and shift can be two halves of one kernel's output.
      shifts: the leaves that compute the shift, and their parts.
    """

    def axes(view: View) -> list[Space | int | None]:
        """The labels of the vector, and the lengths of other axes: two kernels that read data share no label there."""
        return [x if x in vector.labels else n for x, n in zip(view.labels, view.lengths, strict=True)]

    pairs = [(gain, view) for gain in gains for view in shifts
             if set(vector.labels) <= set(gain.labels) and gain != view and axes(gain) == axes(view)]
    ones = [view for view in shifts if set(vector.labels) <= set(view.labels)] if pairs else []

    def make(point: Leaves, rng: np.random.Generator) -> list[Motion]:
        u = rng.standard_normal(vector.lengths)
        terms = [(view, _einsum([(vector.labels, u), (gain.labels, _tensor(gain, point))], gain.labels))
                 for gain, view in pairs]
        also = [_Column(view).motion(vector.labels, u, point) for view in ones]
        return [_motion(vector, u), *(_motion(*term) for term in terms), *also]

    def belongs(taken: list[int]) -> bool:
        """Whether the vector and a gain take part."""
        return len(taken) > 1 and taken[0] == 0 and taken[1] <= len(pairs)

    kind = "a bias in front of a gain, which the leaves that compute the shift behind the gain take away"
    return Flow(kind, make, 1 + len(pairs) + len(ones) if pairs else 0, belongs)


def _common_row(spaces: Sequence[Space], tables: Sequence[View], layers: set[Space]) -> Flow:
    """One array that is added to some tables and subtracted from others, such as one vector on every row.

    The array has the axes `spaces`, which the tables share. It is the same at all indices of their other axes. If
    `spaces` is empty it is one number, for tables with one number per row and for biases of a single output.
    """
    lone = len(set(spaces) - layers) == 1
    kind = COMMON_ROW if spaces else "one number on all entries of several leaves"

    def write(taken: Coefficients, unread: list[int]) -> Call:
        if len(taken) != 2:
            raise Unwritable(kind.replace("several", "more than two"))
        token, position = (tables[k] for k in taken)
        return _call("embedding_shift", {"token": [token], "position": [position]}, _names(spaces, layers))

    def belongs(taken: list[int]) -> bool:
        """Whether this flow reports a combination of tables.

        Another flow reports tables that all share more axes than `spaces`. If the only axis of all the leaves, apart
        from stacked layers, is that of `spaces`, then `search` reports the combination. One table alone is none.
        """
        if len(taken) < 2 or (lone and all(len(tables[k].labels) == len(spaces) for k in taken)):
            return False
        return frozenset.intersection(*(frozenset(tables[k].labels) for k in taken)) == set(spaces)

    return _linear(kind, spaces, [*map(_Column, tables)] if len(tables) > 1 else [], belongs, write)


def _read_past_norms(space: Space, views: Sequence[View]) -> Flow:
    """Adds the number c·x to every entry of a stream x, for a random vector c with Σc = 0.

    The kernels W that write the stream get (Wc)1ᵀ added. The mean of the stream changes, which centred norms hide. The
    kernels that read the stream without a norm before them, such as a head behind no final norm, subtract the number
    again: they get −c(1ᵀW) added.
    """

    def make(point: Leaves, rng: np.random.Generator) -> list[Motion]:
        free, motions = rng.standard_normal((views[0].lengths[views[0].labels.index(space)],)), list[Motion]()
        free -= free.mean()
        for view, (seen, put) in itertools.product(views, [(free, np.ones_like(free)), (np.ones_like(free), -free)]):
            tensor, axis = _tensor(view, point), view.labels.index(space)
            total = np.expand_dims(np.tensordot(tensor, seen, (axis, 0)), axis)
            motions.append(_motion(view, total * put.reshape([-1 if k == axis else 1 for k in range(tensor.ndim)])))
        return motions

    def belongs(taken: list[int]) -> bool:
        """Whether one leaf that writes to the stream and another that reads it take part."""
        return len({k % 2 for k in taken}) == 2 and len({k // 2 for k in taken}) > 1

    return Flow(PAST_NORMS, make, 2 * len(views) if len(views) > 1 else 0, belongs)


def _passed_on(space: Space, views: Sequence[View], behind: Mapping[str, Sequence[View]], constant: bool) -> Flow:
    """A vector that one leaf adds to a stream, and that another leaf, or the biases behind kernels, subtract again.

    Args:
      space: the stream's axis.
      views: the leaves along it.
      behind: path of a kernel → the biases behind it.
      constant: True for a vector with equal entries, which centred norms hide; False for any vector.
    """
    pairs = [(kernel, b) for kernel in views for b in behind.get(kernel.path, []) if set(b.labels) < set(kernel.labels)]
    columns = [*map(_Column, views), *(_Column(b, (kernel,)) for kernel, b in pairs)] if len(views) > 1 else []

    def belongs(taken: list[int]) -> bool:
        """Whether a bias behind a kernel takes part, or the vector has equal entries: all else is a `_common_row`."""
        return len(taken) > 1 and (constant or taken[-1] >= len(views))

    return _linear(PAST_NORMS if constant else ON_STREAM, (space,), columns, belongs, constant=constant)


def _with_the_first(least: int) -> Callable[[list[int]], bool]:
    """A `Flow.belongs` that is true for combinations of at least `least` columns, if the first is among them."""
    return lambda taken: len(taken) >= least and taken[0] == 0


def unread_bias_call(trace: Trace, path: str, mask: np.ndarray) -> Call | None:
    """The gauge of a bias, or of one part of a fused bias, whose values have no effect, such as a key bias.

    Args:
      trace: the walk over the function's jaxpr.
      path: the leaf.
      mask: the entries without effect.

    Returns:
      The call; None if the leaf is not added to a kernel's product, or if the entries without effect are neither the
      whole leaf nor a part of it that a view reads.

    >>> from gauge_optax.discovery.trace import walked
    >>> tree = {"key": np.ones((2, 3)), "bias": np.ones(3)}
    >>> trace = walked(lambda p, x: [x @ p["key"] + p["bias"]], tree, np.ones(2))
    >>> unread_bias_call(trace, "bias", np.ones(3, bool)).roles
    {'blocks': {'bias': '_'}}
    """
    if all(added != path for _, added in trace.added_behind):
        return None
    numbers = np.arange(mask.size).reshape(mask.shape)
    for view in views_of(trace, path, mask.shape, set(spaces_with_companions(trace))):
        if np.array_equal(np.sort(view.read(numbers[None]), axis=None), numbers[mask]):
            return _call("key_bias", {"blocks": [view]}, {})
    return None


def merged_reads(calls: Sequence[Call]) -> list[Call]:
    """Merges the calls of `norm_read_shift` for kernels that read one norm into one; other calls stay as they are.

    >>> norm = {"scale": {"norm": "channel"}}
    >>> calls = [Call("norm_read_shift", {"read": {path: "channel _"}} | norm) for path in ("q", "k")]
    >>> [call.roles["read"] for call in merged_reads(calls)]
    [{'q': 'channel _', 'k': 'channel _'}]
    """
    out: dict[Any, Call] = {}
    for number, call in enumerate(calls):
        norm = [tuple(call.roles.get(role, {}).items()) for role in ("scale", "bias")]
        key: Any = tuple(norm) if call.kind == "norm_read_shift" else number
        before = out.get(key)
        if before and not before.roles["read"].keys().isdisjoint(call.roles["read"]):
            key = number  # this call moves another part of the same kernel: one role has one block per path
        elif before:
            roles = {role: {**blocks, **call.roles[role]} for role, blocks in before.roles.items()}
            call = dataclasses.replace(before, roles=roles, sizes={**before.sizes, **call.sizes})
        out[key] = call
    return list(out.values())


def _with_numbered_parts(view: View, trace: Trace) -> View:
    """Changes a view so that its axes match those of other views.

    An axis of length 1 without a space is read at its index 0. An axis that counts the parts of a fused leaf, such as
    query, key and value, gets the same space as all such axes of its length. A function takes such parts one by one, so
    that no operation shows that a fused kernel and its fused bias have the same parts.
    """

    def changed(atom: Atom) -> Atom:
        if atom.space is None:
            return atom._replace(pick=0) if atom.size == 1 else atom
        counts = atom.pick is None and not trace.spaces.picked.isdisjoint(atom.space)
        return atom._replace(space=(-atom.size,)) if counts else atom

    windows = tuple(window._replace(atoms=tuple(map(changed, window.atoms))) for window in view.windows)
    return dataclasses.replace(view, windows=windows)


def _names(spaces: Labels, layers: set[Space]) -> dict[Space, str]:
    """Names of axes: `layer`, `layer1` for stacked layers; `channel` for one other axis, `head`, `entry` … for several.
    """
    stacks = [space for space in dict.fromkeys(spaces) if space is not None and space in layers]
    names = {space: f"layer{k}" if k else "layer" for k, space in enumerate(stacks)}
    others = [space for space in spaces if space is not None and space not in layers]
    words = ["channel"] if len(others) == 1 else ["head", "entry", "part", "slot"]
    return names | dict(zip(others, words, strict=False))


def _call(
    kind: str, blocks: Mapping[str, Sequence[View]], names: Mapping[Space, str], plus: Sequence[str] = ()
) -> Call:
    """The call of a gauge with one block per view, which has all entries that the view reads.

    Args:
      kind: the constructor.
      blocks: views by role.
      names: space → its name in axes strings. Axes along all other spaces are free, `_`.
      plus: paths of leaves that store a norm's scale minus one.

    Raises:
      Unwritable: two views are parts of one leaf.
    """
    roles, sizes = dict[str, dict[str, Axes]](), dict[str, int]()
    for role, views in blocks.items():
        roles[role] = {}
        for view in views:
            text, lengths = axes_text(view, names, role in ("bias", "scale") or kind == "bias_absorption")
            text = f"1+ {text}" if view.path in plus else text
            if roles[role].setdefault(view.path, text) != text:
                raise Unwritable("two parts of one kernel that read one vector")
            sizes |= lengths
    return Call(kind, roles, {}, sizes)


def _tensor(view: View, point: Leaves) -> np.ndarray:
    return view.read(point[view.path][None])[0]


def _motion(view: View, tensor: np.ndarray) -> Motion:
    """The path of a view's leaf, and a change of this leaf: `tensor` at the view's entries, zero elsewhere."""
    if view.size == math.prod(view.shape):
        return view.path, np.ascontiguousarray(tensor).reshape(view.shape)
    motion, numbers = np.zeros(math.prod(view.shape)), np.arange(math.prod(view.shape))
    motion[view.read(numbers.reshape(1, *view.shape))[0].ravel()] = tensor.ravel()
    return view.path, motion.reshape(view.shape)


def _einsum(terms: Sequence[tuple[Labels, np.ndarray]], out: Labels) -> np.ndarray:
    """The product of arrays with labelled axes, summed over the labels that the result lacks."""
    labels = dict.fromkeys(label for names, _ in terms for label in names)
    letters = {label: chr(ord("a") + k) for k, label in enumerate(labels)}
    texts = ["".join(letters[label] for label in names) for names in (*(names for names, _ in terms), out)]
    return np.asarray(np.einsum(f"{','.join(texts[:-1])}->{texts[-1]}", *(array for _, array in terms)))
