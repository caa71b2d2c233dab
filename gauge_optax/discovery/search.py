"""Tries groups on the leaves, and finds those of their motions that are orthogonal to all gradients of the outputs.

A *candidate* is a family of groups (`groups`), a space on which it could act (`spaces`), and a set of *companions*:
spaces that index copies of the group, such as heads. At each set of weights where gradients are taken, it draws one
random element A of the group's algebra. A moves a piece X of a leaf (`views`) in one of four *modes*: as a vector, X·A,
as a covector, −X·Aᵀ, as a scale, or as an offset. The inner products of all gradients with this motion of one piece are
a *column*. A null vector of the matrix of columns contains one exponent per column: if each motion is multiplied by its
exponent, the sum of the motions is orthogonal to all gradients, so that it changes no output to first order.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from gauge_optax.discovery.checks import check_gradients
from gauge_optax.discovery.groups import FAMILIES, WHOLE, ZERO, Symmetry, Term, direction, draw
from gauge_optax.discovery.sketch import DRAWS, Gradients, Leaves
from gauge_optax.discovery.spaces import Space
from gauge_optax.discovery.trace import Trace
from gauge_optax.discovery.views import Piece, View, part, parts_of, runs, views_of
from gauge_optax.linalg import singular_vectors

_MOST_NEAR = 16  # a candidate keeps at most so many nearly null vectors
_PASSES = 8  # repetitions that make a basis sparse, at most; one or two nearly always suffice
# An entry below this in a null vector of length one counts as zero. Roundoff mixes null vectors with those of small
# singular values, so that entries that should be zero can be far above float64's epsilon.
BLUR = 1e-5
_DENOMINATOR = 6  # the largest denominator of an exponent
_MATRIX = 128  # the longest axis on which groups of matrices are tried
_MOTIONS = 2**26  # bytes of motions of a leaf that are in memory at a time
Column = tuple[Piece, str]  # a piece and its mode


@dataclasses.dataclass
class _Candidate:
    """A group that is tried on pieces of leaves, with its inner products of gradients and motions.

    Attributes:
      family: the kind of group, a key of `groups.FAMILIES`.
      space: the space that the group acts on.
      beside: the spaces of its companions. The group has one element per combination of their indices.
      columns: piece and mode of every column.
      products: one array (gradients, columns) of inner products per chunk of gradients.
      lengths: squared length of every column's motion, summed over points.
    """

    family: str
    space: Space
    beside: tuple[Space, ...]
    columns: list[Column]
    products: list[np.ndarray] = dataclasses.field(default_factory=list)
    lengths: np.ndarray | float = 0.0

    def solve(self, squares: Leaves, dead: Mapping[str, np.ndarray], near: float) -> list[Symmetry]:
        """The symmetries whose residual is below `near`, on pieces that affect the outputs.

        Args:
          squares: by path, squared gradients per entry, summed over all gradients.
          dead: by path, masks of the entries without any gradient.
          near: largest residual of interest.

        Returns:
          Symmetries; those that hold have a residual below `ZERO`.
        """
        lengths = np.broadcast_to(self.lengths, len(self.columns))
        live = [not piece.read(dead[piece.path][None]).all() for piece, _ in self.columns]
        # A motion that is only roundoff counts as none: where a norm's scale is one, a rotation that keeps the vector
        # of ones does not move it.
        kept = [k for k in range(len(live)) if live[k] and lengths[k] > ZERO**2 * lengths.max()]
        if not kept:
            return []
        columns, products = [self.columns[k] for k in kept], np.concatenate(self.products)[:, kept]
        energy = np.array([piece.read(squares[piece.path][None]).mean() for piece, _ in columns])
        sizes = np.sqrt(energy * lengths[kept] * len(products))
        values, right = singular_vectors(products / sizes)
        # A leaf without any gradient, such as the statistics of a BatchNorm in training, is not used at all, and does
        # not move. Pieces without a gradient in other leaves may have to move along with the symmetry.
        read = {piece.path for piece, _ in self.columns if squares[piece.path].any()}
        asleep = [c for c, alive in zip(self.columns, live, strict=True) if not alive and c[0].path in read]
        # Singular values descend. Of the vectors that are only nearly null, the best few are enough.
        last = len(values) - int((values < ZERO).sum())
        first = max(last - _MOST_NEAR, int((values >= near).sum()))
        basis, pivots = echelon(right[last:], sizes, BLUR)
        hints = right[first:last] - right[first:last][:, pivots] / sizes[pivots] @ (basis * sizes)
        exact = sparse(basis)
        if self.family in ("diagonal", "per_plane"):
            exact = _of_two_exponents(exact)
        close = sparse(echelon(np.linalg.qr(hints.T)[0].T, sizes, 10 * near)[0], exact)
        symmetries = []
        for row in (*exact, *close):
            residual = float(np.linalg.norm(products @ row) / np.linalg.norm(row * sizes))
            terms = tuple(Term(*columns[k], float(row[k])) for k in np.nonzero(row)[0].tolist())
            if self.space == WHOLE and all(term.mode == "offset" for term in terms):
                continue  # constants on whole leaves are no scale; `offsets` looks for them
            moved = [term.piece for term in terms if term.mode in ("vector", "covector")]
            # If a piece moves both as vector and as covector, only a smaller family is a symmetry, such as rotations,
            # for which both modes are the same. That family is a candidate of its own.
            if len(set(moved)) == len(moved):
                along = _moved_along(terms, asleep)
                symmetries.append(Symmetry(self.family, self.space, self.beside, terms, residual, along))
        return symmetries


def sketched(
    tried: Sequence[_Candidate], gradients: Gradients, at_once: int, needed: int, points: Callable[[int], Leaves],
    squares: Leaves, rng: Callable[..., np.random.Generator], purposes: tuple[int, int],
) -> Iterator[tuple[int, Leaves, Leaves]]:
    """Takes gradients, point after point, until there are enough; computes their products with the candidates' motions.

    Args:
      tried: candidates, whose `products` and `lengths` are extended.
      gradients: computes gradients of the function.
      at_once: number of gradients per point.
      needed: number of gradients in all.
      points: function of a number; returns a random point.
      squares: arrays of the leaves' shapes by path, to which squared gradients are added.
      rng: makes a random generator from numbers, of which the first, the purpose, says what it is for.
      purposes: the purpose of the gradients' random projections, and that of the candidates' elements.

    Yields:
      The number of a point, the point, and some of the gradients there.
    """
    seen = 0
    for k in range(DRAWS * -(-needed // at_once)):
        if seen >= needed:
            break
        point = points(k)
        elements = [draw(rng(purposes[1], k, n), one.family, one.space, one.beside) for n, one in enumerate(tried)]
        for chunk, gradient in enumerate(gradients.at(point, at_once, rng(purposes[0], k))):
            seen += len(next(iter(gradient.values())))
            for path, x in gradient.items():
                squares[path] += np.square(x).sum(0)
            _observe(tried, point, elements, gradient, first=chunk == 0)
            yield k, point, gradient
    check_gradients(seen, needed)


def _observe(
    candidates: Sequence[_Candidate], point: Leaves, elements: Sequence[np.ndarray], gradients: Leaves, first: bool
) -> None:
    """Adds the inner products of some gradients at a point with every candidate's motions.

    It goes leaf by leaf, so that one matrix product of a leaf's gradients serves all candidates: a model of 30 unrolled
    layers has thousands of them.

    Args:
      candidates: their `products` and `lengths` are extended.
      point: where the gradients were taken.
      elements: for each candidate, one element of its algebra.
      gradients: (rows, *shape) by path.
      first: whether these are the first gradients at that point; only then the motions' lengths are added.
    """
    of_leaf = dict[str, list[tuple[int, int]]]()
    for n, one in enumerate(candidates):
        for k, (piece, _) in enumerate(one.columns):
            of_leaf.setdefault(piece.path, []).append((n, k))
    rows = len(next(iter(gradients.values())))
    products = [np.zeros((rows, len(one.columns))) for one in candidates]
    lengths = [np.zeros(len(one.columns)) for one in candidates]
    for path, columns in of_leaf.items():
        leaf, flat = point[path], gradients[path].reshape(rows, -1)
        at_once = max(1, _MOTIONS // max(1, leaf.nbytes))
        for start in range(0, len(columns), at_once):
            some = columns[start : start + at_once]
            motions = np.zeros((len(some), leaf.size))
            for motion, (n, k) in zip(motions, some, strict=True):
                piece, mode = candidates[n].columns[k]
                motion[piece.entries] = direction(mode, piece.read(leaf[None])[0], elements[n])
                lengths[n][k] = motion @ motion
            for column, (n, k) in zip((flat @ motions.T).T, some, strict=True):
                products[n][:, k] = column
    for one, product, length in zip(candidates, products, lengths, strict=True):
        one.products.append(product)
        one.lengths = one.lengths + length * first


def spaces_with_companions(trace: Trace) -> dict[Space, set[Space]]:
    """The spaces that are contracted, gathered from or returned, and the companions (such as heads) that each may have.

    >>> from gauge_optax.discovery.trace import walked
    >>> trace = walked(lambda p, x: [x @ p["a"]], {"a": np.ones((2, 3))}, np.ones(2))
    >>> [len(space) for space in spaces_with_companions(trace)]
    [2, 3]
    """
    spaces: dict[Space, set[Space]] = {}
    paired = [(axis, axes) for axes in trace.paired for axis in axes if len(axes) > 1]
    for axis, beside in (*trace.contracted, *paired):
        atoms = [atom for atom in trace.atom_keys(axis) if len(atom) > 1]
        others = [atom for other in beside for atom in trace.atom_keys(other) if len(atom) > 1]
        for atom in atoms:
            spaces.setdefault(atom, set()).update(x for x in (*atoms, *others) if x != atom)
        for atom in others:
            spaces.setdefault(atom, set())
    for space, companions in list(spaces.items()):
        for ranges in runs(space):
            spaces.setdefault(part(space, ranges), set()).update(companions)
    # Features that are concatenated before a kernel reads them are spaces of their own, also if all are the same
    # features, at other positions or with the other sign. They are not if two of them share only some of their ids.
    for joined in trace.concatenated:
        keys = {trace.spaces.key(axis) for axis in joined}
        within = [
            space for space in spaces if all(len(key) < len(space) and set(key) <= set(space) for key in keys)
        ]
        if len(set().union(*keys)) < sum(map(len, keys)) or not within:
            continue
        for axis in joined:
            atoms = [atom for atom in trace.atom_keys(axis) if len(atom) > 1]
            for atom in atoms:
                companions = {x for x in atoms if x != atom}.union(*(spaces[space] for space in within))
                spaces.setdefault(atom, set()).update(companions)
    return spaces


def candidates(trace: Trace, leaves: Leaves, stream: bool = False) -> list[_Candidate]:
    """All candidates that are tried: families of groups, each on a space and with a set of companions, such as heads.

    Args:
      trace: the walk over the function's jaxpr.
      leaves: the parameters by path.
      stream: True for rotations of streams (axes that kernels read) and nothing else. Gradients show these rotations
        only at points where norms' scales are one. False for all other candidates.

    >>> from gauge_optax.discovery.trace import walked
    >>> tree = {"up": np.ones((2, 3)), "down": np.ones((3, 4))}
    >>> trace = walked(lambda p, x: [jax.nn.relu(x @ p["up"]) @ p["down"]], tree, np.ones((5, 2)))
    >>> sorted({len(one.space) for one in candidates(trace, tree) if one.family == "linear"})
    [2, 3, 4]
    """
    spaces = spaces_with_companions(trace)
    read = {space for _, axis in trace.readers for space in trace.atom_keys(axis)}
    searched = set(spaces)
    views = [view for path, leaf in leaves.items() for view in views_of(trace, path, leaf.shape, searched)]
    labels = {label for view in views for label in view.labels if label is not None}
    for space in labels - set(spaces):  # rotary planes, where only the halves of the space are contracted
        if space in searched or _is_planes(space):
            spaces[space] = set()
    for space in spaces:
        halves = tuple(dict.fromkeys(space))
        spaces[space] |= spaces.get(halves, set()) if halves != space else set()
    parts = (view for path, leaf in leaves.items() for view in parts_of(trace, path, leaf.shape, searched))
    pieces = [Piece(view, None, ()) for view in (() if stream else parts)]
    # A leaf may store a vector less one, v − 1. A factor c on v then makes c·(v − 1) + (c − 1): a scale and an offset.
    scales = [(piece, mode) for piece in pieces for mode in ("scale", "offset")[: 1 + piece.lone]]
    tried = [] if stream else [_Candidate("diagonal", WHOLE, (), scales)]
    for space, companions in sorted(spaces.items(), key=lambda item: (-len(item[0]), item[0])):
        near = companions | _beside_companions(space, companions, views)
        present = sorted(c for c in near if any({space, c} <= set(v.labels) for v in views))
        # Large sets of companions come first. More than three companions have too many subsets: then the sets are all
        # companions, each alone, and none.
        sizes: Iterable[int] = range(len(present), -1, -1) if len(present) <= 3 else (len(present), 1, 0)
        every = itertools.chain.from_iterable(itertools.combinations(present, size) for size in sizes)
        for beside in every if space in read or not stream else ():
            pieces = list(_pieces(space, beside, views))
            for family, modes in FAMILIES.items() if pieces else ():
                matrices = family in ("linear", "orthogonal", "centred")
                fits = 2 + (family == "centred") <= len(space) <= _MATRIX if matrices else _is_planes(space)
                of_stream = family in ("orthogonal", "centred") and (stream or not beside) and space in read
                if of_stream == stream and (fits or family == "diagonal"):
                    columns = [(piece, m) for piece in pieces for m in modes if m != "offset" or piece.lone]
                    tried.append(_Candidate(family, space, beside, columns))
    return tried


def _beside_companions(space: Space, companions: set[Space], views: Sequence[View]) -> set[Space]:
    """Further spaces that may be companions of `space`: those that form one axis of a leaf together with a companion.

    An example is the axis of the query heads within a group, beside the axis of the groups (the key heads).
    """
    windows = [window for view in views if space in view.labels for window in view.windows]
    grids = [{a.space for a in window.atoms if a.space is not None and a.pick is None} for window in windows]
    return {other for grid in grids if grid & companions for other in grid - companions - {space}}


def _pieces(space: Space, beside: tuple[Space, ...], views: Sequence[View]) -> Iterator[Piece]:
    """The pieces of all views that have a space, on which the group acts, and the companions `beside`.

    A view that reads an axis in another way than the leaf's main views (`View.other`) is used only if the main views
    have no piece along the space on that axis, and if it reads entries that no earlier view reads.
    """
    taken: set[tuple[str, int]] = set()
    read: dict[tuple[Any, ...], set[int]] = collections.defaultdict(set)
    for view in views:
        labels = view.labels
        if not all(c in labels for c in beside):
            continue
        companions = tuple(labels.index(c) for c in beside)
        for k, label in enumerate(labels):
            axis = view.places[k][0]
            if label == space and k not in companions and view.other in (None, axis):
                before = read[view.path, axis, view.windows[:axis], view.windows[axis + 1 :]]
                entries = set(view.windows[axis].entries.tolist())
                if view.other is None or ((view.path, axis) not in taken and not entries <= before):
                    before |= entries
                    yield Piece(view, k, companions)
        if view.other is None:
            taken.update((view.path, view.places[k][0]) for k, label in enumerate(labels) if label == space)


def _is_planes(space: Space) -> bool:
    """Whether every id occurs twice, as in a rotary basis."""
    return {space.count(x) for x in space} == {2}


# Null spaces --------------------------------------------------------------------------------------


def echelon(null: np.ndarray, sizes: np.ndarray, zero: float) -> tuple[np.ndarray, list[int]]:
    """Brings rows of exponents to reduced echelon form, which depends only on the space that they span.

    If a group acts, the entries of this form are fractions with small denominators. Roundoff and nearly null vectors
    change them slightly, so that each entry close to such a fraction is replaced by it.

    Args:
      null: orthonormal rows that span the space: exponents times `sizes`.
      sizes: per column, what its inner products were divided by before the null space was computed.
      zero: smaller entries of a row of length one are set to zero.

    Returns:
      Rows of exponents, each with a pivot of one, and the numbers of the pivots' columns.

    >>> row = np.array([[1.0, -1.0]]) / np.sqrt(2)
    >>> echelon(row, np.ones(2), 1e-5)
    (array([[ 1., -1.]]), [0])
    """
    rows, pivots = list[np.ndarray](), list[int]()
    for j in range(null.shape[1]):
        if len(null) and np.linalg.norm(null[:, j]) > zero:
            turned = singular_vectors(null[None, :, j])[1] @ null  # only the first row is not zero in column j
            rows, pivots, null = [*rows, turned[0]], [*pivots, j], turned[1:]
    basis = np.array(rows).reshape(len(rows), len(sizes))
    for i in reversed(range(len(basis))):
        basis[i] /= basis[i, pivots[i]]
        basis[:i] -= np.outer(basis[:i, pivots[i]], basis[i])
    basis[np.abs(basis) < zero * np.linalg.norm(basis, axis=1, keepdims=True)] = 0.0
    return _with_fractions(basis / sizes * sizes[pivots, None], 5 * zero), pivots


def sparse(rows: np.ndarray, beside: np.ndarray | None = None) -> np.ndarray:
    """Rows with fewer nonzero entries that span the same space; multiples of the rows `beside` may be subtracted too.

    Returns:
      Rows whose smallest nonzero entry is ±1 and whose first nonzero entry is positive.

    >>> sparse(np.array([[1.0, 1.0, 2.0], [0.0, 1.0, 2.0]]))
    array([[1., 0., 0.],
           [0., 1., 2.]])
    """
    together = rows.copy() if beside is None else np.concatenate([rows, beside])
    for _ in range(_PASSES):
        pairs = itertools.product(range(len(rows)), range(len(together)))
        if not sum(_thinned(together, i, j) for i, j in pairs if i != j and np.any(together[i] * together[j])):
            break
    out = together[: len(rows)]
    out = out[out.any(1)]  # without rows that were sums of the rows `beside`, but for entries that became zero
    for row in out:
        row /= np.abs(row[row != 0]).min()
        row *= np.sign(row[np.nonzero(row)[0][0]])
    return out


def _with_fractions(rows: np.ndarray, close: float) -> np.ndarray:
    """The rows, in which a fraction with a small denominator replaces every entry that is close to it."""
    fractions = [float(Fraction(x).limit_denominator(_DENOMINATOR)) for x in rows.ravel().tolist()]
    near = np.array(fractions).reshape(rows.shape)
    return np.where(np.abs(near - rows) < close * np.abs(rows), near, rows)


def _of_two_exponents(rows: np.ndarray) -> np.ndarray:
    """A basis of the same space in which more rows have one exponent, or one positive and one negative exponent.

    The gauges of the library have such exponents.
    """

    def odd(row: np.ndarray) -> int:
        """How many entries have neither the most frequent positive exponent nor the most frequent negative one."""
        sides = (np.unique(x.round(5), return_counts=True)[1] for x in (row[row > 0], row[row < 0]))
        return sum(int(counts.sum() - counts.max(initial=0)) for counts in sides)

    rows, most = rows.copy(), [np.count_nonzero(row) for row in rows]
    for i, row in enumerate(rows):
        others = [factor * rows[j] for j in range(len(rows)) for factor in (1.0, -1.0, 2.0, -2.0) if j != i]
        near = (row + other for other in others) if odd(row) else ()
        best = next((x for x in near if not odd(x) and np.count_nonzero(x) <= most[i]), row)
        if odd(best):  # a sum with several rows may do: that of the stream, say, with those of each layer's MLP
            for other in others:
                step = best + other
                best = step if odd(step) < odd(best) and np.count_nonzero(step) <= most[i] else best
        rows[i] = row if odd(best) else best
    return rows


def _thinned(rows: np.ndarray, i: int, j: int) -> bool:
    """Subtracts a multiple of row j from row i if that leaves fewer entries; returns whether it did."""
    for k in np.nonzero(rows[i] * rows[j])[0]:
        thinner = rows[i] - rows[i, k] / rows[j, k] * rows[j]
        thinner[np.abs(thinner) < 1e-6 * np.abs(rows[i]).max()] = 0.0
        if np.count_nonzero(thinner) < np.count_nonzero(rows[i]):
            rows[i] = thinner
            return True
    return False


def _moved_along(terms: Sequence[Term], asleep: Sequence[Column]) -> tuple[Term, ...]:
    """Terms for pieces without effect that should move along with a live kernel, as a key bias does.

    The piece and the kernel are in one module, and the group acts on the same part of their axes. If the kernel also
    has the space on an axis on which the group does not act, as a kernel from stream to stream has, the bias may belong
    to either axis, and does not move.
    """

    def parent(piece: Piece) -> tuple[Any, ...]:
        """The node that holds a leaf, and which part of its axes the group acts on."""
        windows = [piece.view.windows[axis] for axis, _ in piece.places]
        parts = [(w.start, w.stop, *((atom.size, atom.pick, atom.span) for atom in w.atoms)) for w in windows]
        return piece.view.module, *parts

    def on_one_axis(piece: Piece) -> bool:
        moved = {axis for axis, _ in piece.places}
        of_moved, of_others = set[Any](), set[Any]()
        for axis, window in enumerate(piece.view.windows):
            (of_moved if axis in moved else of_others).update(atom.space for atom in window.atoms)
        return not (of_moved & of_others) - {None}

    exponents = {(parent(t.piece), t.mode): t.exponent for t in terms if not t.piece.vector and on_one_axis(t.piece)}
    taken = {(t.piece.path, parent(t.piece)) for t in terms}
    out: dict[Piece, Term] = {}
    for piece, mode in asleep:
        place = parent(piece)
        if not piece.places:
            continue  # one factor on a whole kernel mostly undoes a factor before it, so that its bias need not move
        if mode != "offset" and (place, mode) in exponents and (piece.path, place) not in taken:
            out.setdefault(piece, Term(piece, mode, exponents[place, mode]))
    return tuple(out.values())
