"""Finds which axes of each parameter are inputs, which are outputs, and which count matrices, as Muon has to know.

Shapes do not show this, but the function's jaxpr does. `products.Walk` notes which axes are contracted with data, which
tables have rows that are taken by index, and which kernel makes the logits. `_Reader` turns these notes into axes
strings. An axis *counts* matrices, such as those of layers or experts, if there is one matrix per index of the axis.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from gauge_optax.binding import Axes, BlockSpec, bind_leaf, leaves_by_path, match, with_leaves
from gauge_optax.discovery.calls import CAPTURES, joined, template, with_captures
from gauge_optax.discovery.places import FREE, Places, varying
from gauge_optax.discovery.products import Product, Value, Walk
from gauge_optax.discovery.trace import Trace
from gauge_optax.errors import binding_error
from gauge_optax.parts.matrices import COUNTING, Reading, neurons_reading, optax_axes

_POINTS = 64  # number of random entries of an operand that `_require_grid` tests
_NAMES = ("head", "group", "unit", "other")  # for a kernel's output axes, except the last, which is neuron or token
_PART = re.compile(r"\bpart=[0-9]+\b")


class _Matrix(NamedTuple):
    """Entries of a parameter that make one matrix, or a stack of matrices of one shape.

    Attributes:
      axes: the axes string, such as "_ neuron=0:8".
      ids: flat indices of the entries.
    """

    axes: str
    ids: np.ndarray


@dataclasses.dataclass(frozen=True)
class LeafAxes:
    """The axes of all kernels and tables, as the function shows them.

    Attributes:
      neurons: path or pattern → axes of a kernel, as `max_norm_muon` takes them: `_` is an axis of inputs, `layer` and
        `expert` count matrices, `token` is the output axis of an unembedding, and every other name is an output axis.
        If two axes count layers, as in a scan of scans, one is called `layer` and the other `expert`.
      embeddings: path or pattern → axes of a table, such as `token _`. A table that is also the unembedding is here,
        and not in `neurons`.
      readings: path of a kernel → how Muon reads it as one or more matrices. It has no entry for an unembedding.
      undecided: path → a sentence that says why the function does not decide its axes.

    >>> print(LeafAxes({"{i}/up": "_ neuron"}, {"table": "token _"}))
    neurons = {
      '{i}/up': '_ neuron',
    }
    embeddings = {
      'table': 'token _',
    }
    """

    neurons: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    embeddings: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    readings: Mapping[str, Reading] = dataclasses.field(default_factory=dict)
    undecided: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        rows = []
        for name, mapping in (("neurons", self.neurons), ("embeddings", self.embeddings)):
            rows += [f"{name} = {{", *(f"  {path!r}: {axes!r}," for path, axes in mapping.items()), "}"]
        return "\n".join([*rows, *(f"# undecided, {path!r}: {why}" for path, why in self.undecided.items())])

    def json(self) -> str:
        """All mappings as JSON; each kernel's matrices are a text such as "4 × (8, 3)"."""
        matrices = {path: reading.text for path, reading in self.readings.items()}
        return json.dumps({"neurons": self.neurons, "embeddings": self.embeddings, "matrices": matrices,
                           "undecided": self.undecided}, indent=1)

    def of(self, path: str) -> tuple[str, Axes] | None:
        """The pattern and the axes of one leaf; None if it is in neither mapping."""
        both = {**self.neurons, **self.embeddings}
        return next((pair for pair in both.items() if match("discover", pair[0], path) is not None), None)


class _Undecided(Exception):
    """The function does not decide a parameter's axes. The message is a sentence that says why."""


def read_axes(
    fn: Callable[..., Any], shapes: Mapping[str, Any], batch: Any, trace: Trace, asked: bool = False
) -> LeafAxes:
    """Reads the axes of every parameter from a function's jaxpr.

    Args:
      fn: (leaves, batch) to a list of outputs.
      shapes: the leaves, or their shapes and dtypes, by path.
      batch: one of the batches.
      trace: the result of `trace.walked` on the function.
      asked: True if it is not known whether the outputs are logits. The kernel that makes the outputs, which may be an
        unembedding, is then left undecided.

    Returns:
      The mappings. Layers whose leaves have the same axes share one pattern, such as `{i}/up`.

    >>> from gauge_optax.discovery.trace import walked
    >>> tree = {"table": np.ones((7, 2)), "up": np.ones((2, 3))}
    >>> fn, batch = lambda p, x: [jnp.tanh(p["table"][x] @ p["up"])], np.array([2, 5])
    >>> print(read_axes(fn, tree, batch, walked(fn, tree, batch)))
    neurons = {
      'up': '_ neuron',
    }
    embeddings = {
      'table': 'token _',
    }
    """
    structs = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in shapes.items()}
    closed = jax.make_jaxpr(lambda leaves, batch: fn(dict(zip(structs, leaves, strict=True)), batch))(
        list(structs.values()), batch)
    walk = Walk({path: tuple(x.shape) for path, x in structs.items()})
    args = [Value(s, {path: Places.of(s)}, params=True) for path, s in walk.shapes.items()]
    args += [Value(tuple(v.aval.shape), data=True) for v in closed.jaxpr.invars[len(args) :]]
    for value in walk.run(closed.jaxpr, closed.consts, args):
        walk.sight(value)
        for own in value.tags:
            if isinstance(own, int):
                walk.products[own].last = True
    return _Reader(walk, trace, asked).read()


class _Reader:
    """Makes a `LeafAxes` from the notes of a `Walk`."""

    def __init__(self, walk: Walk, trace: Trace, asked: bool) -> None:
        self.walk, self.trace, self.asked, self.chosen = walk, trace, asked, trace.chosen_spaces()
        self.uses: dict[str, list[Product]] = {}
        for product in map(self._mixed, walk.products):
            if self._sides(product):
                self.uses.setdefault(product.path, []).append(product)
        # A kernel is a last one if no other kernel is applied to values that depend on it.
        self.last = self.uses.keys() - {path for product in walk.products for path in product.before - {product.path}}

    def _key(self, path: str, axis: int) -> Any:
        ids = self.trace.leaves[path][axis]
        return None if ids is None else self.trace.spaces.key(ids)

    def _mixed(self, product: Product) -> Product:
        """Reinterprets the first contraction in a mixture of kernels, x·(Σ g·W), where g is a softmax.

        The function contracts W with g, over the axis that counts kernels, before it contracts the result with x. The
        returned product instead has the inputs that x is contracted with, and the kernels as batch axis. All other
        products are returned as they are.
        """
        path, shape, inputs = product.path, self.walk.shapes[product.path], self._inputs(product)
        axes = sorted({a for k in range(len(product.ids.shape)) for a in varying(product.ids, k, shape)})
        whole = product.settled and math.prod(shape[a] for a in axes) == math.prod(map(len, product.ids.steps))
        if not (product.again and inputs and whole) or not inputs <= self._chosen(path) or self._mixes_last(product):
            return product
        ids, base = Places.of(shape), np.unravel_index(product.ids.base, shape)
        for a in sorted(set(range(len(shape))) - set(axes), reverse=True):
            ids = ids.take(a, int(base[a]))
        return dataclasses.replace(
            product, ids=ids, inputs=tuple(k for k, a in enumerate(axes) if a in product.again),
            batch=tuple(k for k, a in enumerate(axes) if a in inputs), again=set(), pieces=[])

    def _mixes_last(self, product: Product) -> bool:
        """Whether the outputs of several kernels are mixed, Σ g·(x·W): one axis of the outputs then counts kernels."""
        return bool(product.again & self._chosen(product.path))

    def _chosen(self, path: str) -> set[int]:
        """The axes of a parameter along which a softmax or a sort chooses."""
        return {a for a in range(len(self.walk.shapes[path])) if self._key(path, a) in self.chosen}

    def _inputs(self, product: Product) -> set[int]:
        """The axes of the parameter that a contraction sums over."""
        return {a for k in product.inputs for a in varying(product.ids, k, self.walk.shapes[product.path])}

    def _sides(self, product: Product) -> bool:
        """Whether a contraction has both input and output axes. That of a vector has no output axis."""
        outputs = (k for k in product.outputs if k not in product.batch)
        return bool(self._inputs(product)) and any(
            varying(product.ids, k, self.walk.shapes[product.path]) for k in outputs)

    def read(self) -> LeafAxes:
        """The axes of every parameter with at least two axes that are longer than 1 and do not count matrices."""
        self._resolve_pairs()
        neurons, tables, undecided = dict[str, Axes](), dict[str, Axes](), dict[str, str]()
        readings = dict[str, Reading]()
        for path, shape in self.walk.shapes.items():
            left = sum(n > 1 for a, n in enumerate(shape) if (path, a) not in self.walk.counted)
            if left == 1 and path in self.walk.turned:
                table = " ".join("token" if (path, a) in self.walk.counted else "_" for a in range(len(shape)))
                undecided[path] = ("a loop over data takes one vector of it per turn, as of a table of positions: "
                                   f"leave it to Adam, or list it in embeddings={{'{path}': '{table}'}}")
            if left < 2:
                continue
            try:
                if path in self.walk.unclear:
                    raise _Undecided(f"{self.walk.unclear[path]}: list it by hand")
                if table := self._table(path, shape):
                    tables[path] = table
                elif path in self.uses:
                    axes = self._kernel(path, shape)
                    reading = _reading(path, axes, shape)
                    neurons[path] = axes
                    readings |= {} if reading is None else {path: reading}
                else:
                    self._neither(path, shape)
            except _Undecided as sentence:
                undecided[path] = str(sentence)
            except (IndexError, KeyError, ValueError):  # a layout that this class does not handle
                undecided[path] = "its layout is not understood: list it by hand"
        return LeafAxes(self._merged(neurons), self._merged(tables), readings, undecided)

    def _resolve_pairs(self) -> None:
        """Decides which parameter is the kernel where two parameters are contracted with each other.

        If data is contracted with one of the two, as with A in x·(A·B), both are kernels. If this is done head by head,
        as with the projection of learned queries, the pair decides nothing. If one of the two is a table or is added to
        data, it counts as data, and the other one is a kernel. Other pairs are left undecided.
        """
        data = self.walk.added | {path for path, _ in self.walk.tables}
        contracted = {product.path for product in self.walk.products if self._inputs(product)}
        for one, other in (order for pair in self.walk.pairs for order in (pair, pair[::-1])):
            first, second = ({product.path for product in side} for side in (one, other))
            found = list[Product]()
            # In A·B, the axis of A that remains counts as its output. In x·(A·B), x is contracted with it: it is A's
            # input.
            if first & contracted and not second & contracted:
                if any(self._by_head(x) for x in one):
                    continue  # k(x)·(Wᵀ·P) per head: P may be queries that W projects, and no kernel behind W
                found = [*(dataclasses.replace(x, inputs=x.outputs, batch=()) for x in one), *other]
            elif first & data and not second & data:
                self.walk.added |= first
                found = other
            for product in found:
                if self._sides(product):
                    self.uses.setdefault(product.path, []).append(product)

    def _by_head(self, product: Product) -> bool:
        """Whether data is contracted with a parameter along a part of its outputs, while others count heads.

        Args:
          product: the contraction of the parameter with another one, which comes first.
        """
        shape = self.walk.shapes[product.path]
        own, *found = ({a for k in x.batch for a in varying(x.ids, k, shape)} for x in (
            product, *(x for x in self.walk.products if x.path == product.path)))
        return any(axes - own for axes in found)

    def _table(self, path: str, shape: tuple[int, ...]) -> str:
        """The axes string of a table, whose rows are taken by index or added to data; "" if this is no table."""
        tokens = {a for p, a in self.walk.tables if p == path}
        kernels = self.uses.get(path, [])
        hot = [product for product in kernels if product.one_hot]
        tokens |= {a for product in hot for k in product.inputs for a in varying(product.ids, k, shape)}
        free = [a for a, n in enumerate(shape) if n > 1 and (path, a) not in self.walk.counted]
        if not tokens and path in self.walk.added and not kernels:
            own = {self._key(p, a) for p in self.uses for a in range(len(self.walk.shapes[p]))}
            tokens = {a for a in free if self._key(path, a) not in own}
            tokens = tokens if self._vectors(path, free, tokens) else set()
        if not tokens or any(self._by_row(product, tokens) for product in kernels):
            return ""
        rest = [a for a in free if a not in tokens]
        if not rest:
            raise _Undecided("single entries of it are taken by index, so that it has no vectors: Adam may step it")
        if not kernels and not self._vectors(path, free, tokens):
            raise _Undecided(
                "rows of it are taken by index, and no kernel contracts them, as in a table of biases: leave it to "
                f"Adam, or list it in embeddings={{'{path}': '{self._text(path, shape, tokens)}'}}")
        return self._text(path, shape, tokens)

    def _vectors(self, path: str, free: list[int], tokens: set[int]) -> bool:
        """Whether the rows of a table have exactly the input axes of some kernel, which can therefore contract them.

        A row may also be one of several vectors that are concatenated along the kernel's only input axis.

        Args:
          path: the table.
          free: its axes that are longer than 1 and do not count matrices.
          tokens: those of `free` whose indices number the rows. The others are the axes of a row.
        """
        rows = {self._key(path, a) for a in free if a not in tokens}
        read = [{self._key(product.path, a) for k in product.inputs if k not in product.window
                 for a in varying(product.ids, k, self.walk.shapes[product.path])}
                for products in self.uses.values() for product in products]
        keys = [{self.trace.spaces.key(axis) for axis in joined} for joined in self.trace.concatenated]
        whole = [set(axis) for axes in read if len(axes) == 1 for axis in axes if axis]
        return rows in read or any(
            rows <= joined and set().union(*joined) <= axis for joined in keys for axis in whole if len(rows) == 1)

    def _text(self, path: str, shape: tuple[int, ...], tokens: set[int]) -> str:
        layers = _counting({a: COUNTING[0] for p, a in self.walk.counted if p == path})
        return " ".join("token" if a in tokens else layers.get(a, "_") for a in range(len(shape)))

    def _by_row(self, product: Product, tokens: set[int]) -> bool:
        """Whether a contraction uses a table at a single index of its axes `tokens`.

        The index then stands for a matrix, such as that of an expert, and not for a row.
        """
        shape = self.walk.shapes[product.path]
        moving = {a for k in range(len(product.ids.shape)) for a in varying(product.ids, k, shape)}
        return not tokens & moving and not product.one_hot

    def _neither(self, path: str, shape: tuple[int, ...]) -> None:
        """Raises `_Undecided` if a parameter that was recognized neither as kernel nor as table may still be a kernel.

        A filter is no kernel, and neither is a parameter that is only added to data, or multiplied with it entry by
        entry without a sum, or contracted with it along all axes, or not used at all.
        """
        sides = [[[product.path for product in side] for side in pair] for pair in self.walk.pairs]
        partners = [pair[1 - k][0] for pair in sides for k in (0, 1) if path in pair[k]]
        if path in self.walk.summed:
            raise _Undecided("it multiplies data entry by entry, and the product is summed: if it is a kernel, list it "
                             "by hand")
        if path in self.walk.filters or path in self.walk.added or path in self.walk.multiplied:
            return
        if partners:
            raise _Undecided(f"it is contracted with '{partners[0]}', and the function does not say which of the two "
                             "is data: list it by hand")
        if path in self.walk.unknown:
            raise _Undecided(f"{self.walk.unknown[path]}: list it by hand")
        if path in self.walk.read - self.walk.vectors - {product.path for product in self.walk.products}:
            raise _Undecided("no data is contracted with it in a way that shows its axes: if it is a kernel, list it "
                             "by hand")

    def _kernel(self, path: str, shape: tuple[int, ...]) -> Axes:
        """The axes of a kernel: one string, or a tuple of strings if it consists of several matrices."""
        found: dict[str, np.ndarray] = {}
        uses = [product for product in self.uses[path] if not product.one_hot]
        for product in uses:
            for single in self._singled(product, shape):
                for matrix in self._matrices(single, shape):
                    found.setdefault(matrix.axes, matrix.ids)
        seen = np.zeros(math.prod(shape), np.uint8)
        for ids in found.values():
            if seen[ids].any():
                raise _Undecided(f"it is read in several ways, {' and '.join(map(repr, found))}: list one by hand")
            seen[ids] = 1
        if not seen.all():
            read = ", ".join(map(repr, found))
            raise _Undecided(f"{int(seen.sum())} of its {len(seen)} entries are matrices, {read}, and nothing says "
                             "what the others are: list it by hand")
        texts = list(found)
        layers = list(dict.fromkeys(_PART.sub("layer", text) for text in texts))
        if len(texts) > 1 and len(layers) == 1 and any(path in product.before for product in uses):
            texts = layers  # some of the parts are applied to results of others, as layers are
        return texts[0] if len(texts) == 1 else tuple(texts)

    def _singled(self, product: Product, shape: tuple[int, ...]) -> list[Product]:
        """Splits a contraction into one per matrix, if a reshape divides an axis of the parameter into (matrix, entry).
        """
        for k in product.batch:
            others = {a for j in range(len(product.ids.shape)) if j != k for a in varying(product.ids, j, shape)}
            if others & set(varying(product.ids, k, shape)):
                at, sizes = product.outputs.index(k), [product.ids.shape[j] for j in product.outputs]
                masks = [piece.reshape(sizes) for piece in product.pieces]
                inputs, batch = (tuple(j - (j > k) for j in side if j != k) for side in (product.inputs, product.batch))
                singles = [dataclasses.replace(
                    product, ids=product.ids.take(k, i), inputs=inputs, batch=batch,
                    pieces=[part.ravel() for mask in masks if (part := np.take(mask, i, at)).any()])
                    for i in range(product.ids.shape[k])]
                return [one for single in singles for one in self._singled(single, shape)]
        return [product]

    def _matrices(self, product: Product, shape: tuple[int, ...]) -> list[_Matrix]:
        """The matrices in a kernel according to one contraction: one per range of outputs that is used separately."""
        path = product.path
        layers = {a for p, a in self.walk.counted | self.walk.tables if p == path}
        moves = [varying(product.ids, k, shape) for k in range(len(product.ids.shape))]
        _require_grid(product.ids, shape)
        if product.again and product.alone and not self._mixes_last(product):
            raise _Undecided(
                f"data is contracted with its axes {sorted(self._inputs(product))}, and then with axes "
                f"{sorted(product.again)} of the result. All are inputs, or some count kernels that are mixed: "
                "list it by hand")
        names: dict[int, str] = {}
        outputs = product.outputs[len(product.batch) :]
        for side, name in ((product.batch, "expert"), (outputs, "out"), (product.inputs, "_")):
            for a in {a for k in side for a in moves[k]}:
                if names.setdefault(a, name) != name:
                    raise _Undecided(f"axis {a} of {shape} is inputs and outputs at once, or counts matrices beside "
                                     "them: give it two axes, or list it by hand")
        token = product.maxed and product.last and path in self.last
        if self.asked and product.last and path in self.last and not token:
            raise _Undecided("it makes the outputs, and is an unembedding if a softmax of them follows: pass "
                             "outputs='logits' to discover, or else outputs='predictions'")
        chosen = set() if token else self.chosen  # softmax of logits chooses classes, not experts
        for a, axis in enumerate(self.trace.leaves[path]):
            atoms = [] if axis is None else self.trace.atom_keys(axis)
            if len(atoms) > 1 and chosen & set(atoms):
                raise _Undecided(f"axis {a} of {shape} counts experts beside other things: give it two axes, or list "
                                 "it by hand")
        for a, name in list(names.items()):
            others = [b for b, other in names.items() if other == name and b != a]
            if self._key(path, a) in chosen and others and name != "expert":
                names[a] = "expert"
        names |= {a: "layer" if (path, a) in self.walk.counted else "expert" for a in layers if a not in names}
        names |= _counting({a: name for a, name in names.items() if name in COUNTING})
        return [self._matrix(product, shape, names, moves, piece, token, layers) for piece in self._pieces(product)]

    def _pieces(self, product: Product) -> list[list[np.ndarray]]:
        """Divides the outputs of a contraction into *pieces*: sets of outputs that later operations read together.

        Returns:
          For each piece, one array of indices per output axis.
        """
        outputs = product.outputs
        sizes = [product.ids.shape[k] for k in outputs]
        batch = len(product.batch)
        masks = [piece.reshape(sizes) for piece in product.pieces]
        if batch:  # outputs that are read together in one matrix of a stack count as read together in all its matrices
            masks = [np.broadcast_to(mask.any(tuple(range(batch)), keepdims=True), sizes) for mask in masks]
            whole = Product(product.path, product.ids, product.inputs, product.batch, product.before)
            for mask in masks:
                whole.read_together(mask.ravel())
            masks = [piece.reshape(sizes) for piece in whole.pieces]
        found = []
        for mask in masks:
            lines = [np.flatnonzero(mask.any(tuple(j for j in range(mask.ndim) if j != k))) for k in range(mask.ndim)]
            if math.prod(map(len, lines)) != mask.sum():
                raise _Undecided("its outputs are used apart in a way that ranges do not express: list it by hand")
            found.append(lines)
        return sorted(found, key=lambda lines: [line[0] for line in lines]) or [[np.arange(n) for n in sizes]]

    def _matrix(
        self, product: Product, shape: tuple[int, ...], names: Mapping[int, str], moves: list[list[int]],
        lines: list[np.ndarray], token: bool, layers: set[int],
    ) -> _Matrix:
        at = dict(zip(product.outputs, lines, strict=True))
        ids, covered = product.ids, list[np.ndarray]()
        base = np.unravel_index(ids.base, shape)
        for a, n in enumerate(shape):
            index = np.array([base[a]])
            for k in [k for k, axes in enumerate(moves) if a in axes]:
                line = np.unravel_index(ids.part(k, at.get(k, slice(None))).line(k), shape)[a] - base[a]
                index = np.unique(index[:, None] + line)
            covered.append(np.arange(n) if a in layers else index)
        outs = [a for a in range(len(shape)) if names.get(a) == "out"]
        # Of an output axis of which one index is read, the index is written (`part=2`): it needs no name.
        outs = [a for a in outs if len(covered[a]) > 1] or outs[-1:]
        cut = any(len(covered[a]) < shape[a] for a in outs)
        spare = [name for name in _NAMES if not (cut and name == "head")]
        own = dict(zip(outs, [*spare[: len(outs) - 1], "token" if token else "neuron"], strict=True))
        words = []
        for a, n in enumerate(shape):
            name = own.get(a, names.get(a, "_"))
            if len(covered[a]) == 1 and n > 1 and a not in outs:
                name = f"part={int(covered[a][0])}"
            elif name == "out":
                name = "unit"
            elif len(covered[a]) < n:
                name += "=" + "+".join(f"{i}:{j}" for i, j in _ranges(covered[a]))
            words.append(name)
        return _Matrix(" ".join(words), np.ravel_multi_index(np.ix_(*covered), shape).ravel())

    def _merged(self, mapping: Mapping[str, Axes]) -> dict[str, Axes]:
        """Replaces paths of layers with the same axes by one pattern, unless the pattern matches other leaves too."""
        groups: dict[tuple[str, Axes], list[str]] = {}
        for path, axes in mapping.items():
            groups.setdefault((template(path), axes), []).append(path)
        merged: dict[str, Axes] = {}
        for (_, axes), paths in groups.items():
            names = iter(CAPTURES)
            pattern = with_captures(paths, lambda _, names=names: next(names, ""))  # type: ignore[misc]
            same = [path for path in self.walk.shapes if match("discover", pattern, path) is not None]
            merged |= {pattern: axes} if set(same) == set(paths) else dict.fromkeys(paths, axes)
        return merged


def _counting(names: Mapping[int, str]) -> Mapping[int, str]:
    """Gives each of the axes that count matrices a name of its own.

    Args:
      names: axis → `layer` or `expert`. Two axes with one name, as in a scan of scans, become `layer` and `expert`.
    """
    if len(set(names.values())) == len(names):
        return names
    if len(names) > len(COUNTING):
        raise _Undecided(f"{len(names)} of its axes count matrices, and there are names for {len(COUNTING)} such axes, "
                         f"{' and '.join(COUNTING)}: give it one axis in place of some of these")
    return dict(zip(sorted(names), COUNTING, strict=True))


def _require_grid(ids: Places, shape: tuple[int, ...]) -> None:
    """Raises unless ranges of indices along the parameter's axes describe which entries an operand contains.

    At every place of the operand an entry of the parameter must stand. The entry's index along each axis of the
    parameter must be a base plus one term per axis of the operand.

    Args:
      ids: which entry of the parameter stands at each place of the operand.
      shape: the parameter's shape.
    """
    if ids.base < 0 or any((step < FREE // 2).any() for step in ids.steps):
        raise _Undecided("it is used beside entries of others in one matrix: list it by hand")
    rng = np.random.default_rng(0)
    base = np.stack(np.unravel_index(ids.base, shape))
    picks = [step[rng.integers(0, len(step), _POINTS)] for step in ids.steps]
    told = sum((np.stack(np.unravel_index(ids.base + x, shape)) - base[:, None] for x in picks), base[:, None])
    if (np.stack(np.unravel_index(ids.base + sum(picks), shape)) != told).any():
        raise _Undecided("its entries are mixed in an order that axes do not express: list it by hand")


def _ranges(index: np.ndarray) -> Iterable[tuple[int, int]]:
    """The ranges (start, stop) of consecutive numbers in ascending indices."""
    runs = np.split(index, np.flatnonzero(np.diff(index) != 1) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


def _reading(path: str, axes: Axes, shape: tuple[int, ...]) -> Reading | None:
    """The matrices that Muon makes of a kernel; None for an unembedding, which it does not orthogonalize."""
    blocks = [bind_leaf("discover", BlockSpec("neurons", path, text), path, shape, {}, "sizes")
              for text in joined((), axes)]
    return None if any("token" in block.split_labels for block in blocks) else neurons_reading(blocks)


class Mappings:
    """The properties of a report that say which axes are inputs and which are outputs."""

    axes: LeafAxes

    @property
    def neurons(self) -> Mapping[str, Axes]:
        """Path or pattern → axes of every kernel: what `max_norm_muon` takes as `neurons`."""
        return self.axes.neurons

    @property
    def embeddings(self) -> Mapping[str, Axes]:
        """Path or pattern → axes of every table: what `max_norm_muon` takes as `embeddings`."""
        return self.axes.embeddings

    @property
    def matrices(self) -> Mapping[str, str]:
        """Path → the matrices that Muon should step, as "count × (inputs, outputs)"."""
        return {path: reading.text for path, reading in self.axes.readings.items()}

    @property
    def undecided(self) -> Mapping[str, str]:
        """Path → a sentence that says why the function does not decide its axes."""
        return self.axes.undecided

    def muon_dimension_numbers(self, params: Any) -> Any:
        """How `optax.contrib.muon` should read every leaf: give it this method as `muon_weight_dimension_numbers`.

        Args:
          params: a tree of parameters; shapes are enough.

        Returns:
          A tree like `params` with an `optax.contrib.MuonDimensionNumbers` for every kernel, and None for all other
          leaves: tables, the unembedding, norms, biases. Optax cannot split a fused kernel, and takes it as one matrix.
          It reads all layers of a stack in the same way as the first, even if one of them is transposed.

        Raises:
          ValueError: the tree has no kernel of this report.
        """
        leaves, readings = leaves_by_path(params), dict[str, Reading | None]()
        for path, leaf in leaves.items():
            found = self.axes.of(path)
            if found is not None and found[0] in self.neurons:
                known = self.axes.readings.get(path)
                readings[path] = known or _reading(path, found[1], tuple(np.shape(leaf)))
        if self.neurons and not readings:
            raise binding_error(
                "muon_dimension_numbers", "no kernel of the report in this tree",
                ", ".join([*leaves][:3]) or "no leaves", ", ".join([*self.neurons][:3]),
                "pass the tree that discover was given, or the same part of it")
        axes = optax_axes({path: reading for path, reading in readings.items() if reading is not None})
        numbers = {path: optax.contrib.MuonDimensionNumbers(*sides) for path, sides in axes.items()}
        return with_leaves(params, dict.fromkeys(leaves) | numbers)
