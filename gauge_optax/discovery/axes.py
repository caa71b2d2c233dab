"""Which axes of a parameter are a matrix's inputs, its outputs, or count matrices, read from the function's jaxpr.

A walk carries, beside every value, which entry of which parameter stands at each of its places, as an array of numbers
that moves as the value does. Where such a value is contracted with data, the contracted places are a matrix's inputs
and the others its outputs. Outputs that are used apart, such as queries, keys and values of one fused kernel, are
matrices of their own: the walk follows the places of each product until something that is not linear reads them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from gauge_optax.binding import Axes, BlockSpec, bind_leaf, leaves_by_path, match, with_leaves
from gauge_optax.discovery.calls import captured_blocks
from gauge_optax.discovery.trace import Trace, called_jaxpr
from gauge_optax.parts.matrices import Fused, Matrices, Reading, neuron_matrices, optax_axes

_CONSTANT = 100_000  # entries of index arithmetic that is evaluated
_POINTS = 64  # places at which the numbers along single axes are compared with those of the whole array
_NAMES = ("head", "group", "unit", "other")  # of output axes before the last one
_PART = re.compile(r"\bpart=[0-9]+\b")
_FREE = -(2**58)  # added where no entry stands

Owner = str | int
"""A parameter's path, or the number of a product."""
class Places(NamedTuple):
    """Which entry stands at each place of an array: a first one, and how the number changes along each axis.

    Attributes:
      base: the number at the places where nothing is added.
      steps: per axis, what each index adds; far below zero where no entry stands.
    """

    base: int
    steps: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Places:
        """All entries in order."""
        strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
        return cls(0, tuple(np.arange(n) * stride for n, stride in zip(shape, strides, strict=True)))

    @classmethod
    def found(cls, numbers: np.ndarray) -> Places | None:
        """The places of an array of numbers; None where its axes do not change them independently."""
        at = np.unravel_index(int((numbers >= 0).argmax()), numbers.shape) if numbers.ndim else ()
        base = int(numbers[at]) if numbers.size and numbers[at] >= 0 else _FREE
        lines = [numbers[tuple(slice(None) if j == k else at[j] for j in range(numbers.ndim))]
                 for k in range(numbers.ndim)]
        made = cls(base, tuple(np.where(line < 0, _FREE, line - base) for line in lines))
        return made if base < 0 or np.array_equal(made.numbers(), np.maximum(numbers, -1)) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return tuple(map(len, self.steps))

    def numbers(self, axes: Iterable[int] | None = None) -> np.ndarray:
        """The numbers as an array, -1 where no entry stands, along some axes or all."""
        total = np.full((1,) * len(self.steps), self.base)
        for k in range(len(self.steps)) if axes is None else axes:
            total = total + self.steps[k].reshape([-1 if j == k else 1 for j in range(len(self.steps))])
        return np.maximum(total, -1)

    def entries(self) -> np.ndarray:
        """The entries that stand somewhere."""
        numbers = self.numbers([k for k, step in enumerate(self.steps) if (step != 0).any()]).ravel()
        return numbers[numbers >= 0]

    def line(self, axis: int) -> np.ndarray:
        """The numbers along an axis."""
        return self.base + self.steps[axis][self.steps[axis] > _FREE // 2]

    def take(self, axis: int, index: int) -> Places:
        """One index of an axis, which is dropped."""
        rest = tuple(x for k, x in enumerate(self.steps) if k != axis)
        return Places(self.base + int(self.steps[axis][index]), rest)

    def part(self, axis: int, index: Any) -> Places:
        """Some indices of an axis."""
        return Places(self.base, tuple(x[index] if k == axis else x for k, x in enumerate(self.steps)))

    def spread(self, shape: Sequence[int]) -> Places:
        """Axes of length one repeated."""
        pairs = zip(self.steps, shape, strict=True)
        return Places(self.base, tuple(np.broadcast_to(x, n) if len(x) == 1 else x for x, n in pairs))

    def at(self, axes: Sequence[int], shape: Sequence[int]) -> Places:
        """In an array of this shape, with the own axes at these places and the others repeated."""
        steps = [np.zeros(n, int) for n in shape]
        for k, x in zip(axes, self.steps, strict=True):
            steps[k] = np.broadcast_to(x, shape[k])
        return Places(self.base, tuple(steps))

    def reshape(self, shape: Sequence[int]) -> Places | None:
        """In another shape, run by run of axes of equal size."""
        steps: list[np.ndarray] = []
        base, i, j = self.base, 0, 0
        while i < len(self.steps) or j < len(shape):
            a, b = min(i + 1, len(self.steps)), min(j + 1, len(shape))
            while (before := math.prod(map(len, self.steps[i:a]))) != (after := math.prod(shape[j:b])):
                a, b = (a + 1, b) if before < after else (a, b + 1)
            if b - j == a - i == 1:
                steps.append(self.steps[i])
            elif b > j:
                low = -sum(min(0, int(x[x > _FREE // 2].min(initial=0))) for x in self.steps[i:a])
                made = Places.found(Places(low, self.steps[i:a]).numbers().reshape(shape[j:b]))
                if made is None:
                    return None
                base, steps = base + made.base - low, [*steps, *made.steps]
            else:
                base += int(sum(x[0] for x in self.steps[i:a]))
            i, j = a, b
        return Places(base, tuple(steps))


Tags = Mapping[Owner, Places | None]
"""For each owner, which of its entries stand where; None where that is not known, or all are read together."""


class Value(NamedTuple):
    """What the walk knows of an intermediate array.

    Attributes:
      shape: its shape.
      tags: the parameters that it consists of, or the products that it contains in a linear way.
      params: whether parameters reach it.
      data: whether the batch reaches it.
      constant: its numbers, where they are small integers that do not depend on either.
      before: kernels that made it.
      one_hot: whether it compares data with a range of numbers.
      row: whether its parameters are rows that were taken by index.
      terms: (product, number of a mask): what was contracted with data to make it. Two terms of a sum are one
        contraction, of both at once.
    """

    shape: tuple[int, ...]
    tags: Tags = {}  # noqa: RUF012  a NamedTuple's default; nobody writes to it
    params: bool = False
    data: bool = False
    constant: np.ndarray | None = None
    before: frozenset[str] = frozenset()
    one_hot: bool = False
    row: bool = False
    terms: frozenset[tuple[int, int]] = frozenset()

    def leaves(self) -> dict[str, Places]:
        """The parameters that it consists of."""
        return {name: x for name, x in self.tags.items() if isinstance(name, str) and x is not None}

    def moved(self, move: Callable[[Places], Places | None]) -> Tags:
        """The tags of the value that a movement of entries makes."""
        return {own: None if x is None else move(x) for own, x in self.tags.items()}


@dataclasses.dataclass
class Product:
    """One contraction of a parameter.

    Attributes:
      path: the parameter's.
      ids: its entries as they stand in the operand.
      inputs: contracted axes of the operand.
      batch: axes of the operand that the other one has too.
      before: kernels that made the other operand.
      one_hot: whether the other operand is one-hot.
      pieces: places of the result that are read together, as masks that do not overlap.
      maxed: whether a maximum is taken over its outputs, as a softmax does.
      last: whether its outputs are the function's, up to a softmax and sums.
      terms: masks of outputs that were contracted with data.
    """

    path: str
    ids: Places
    inputs: tuple[int, ...]
    batch: tuple[int, ...]
    before: frozenset[str]
    one_hot: bool = False
    pieces: list[np.ndarray] = dataclasses.field(default_factory=list)
    maxed: bool = False
    last: bool = False
    terms: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The other axes, batch axes first."""
        return (*self.batch, *(k for k in range(len(self.ids.shape)) if k not in (*self.inputs, *self.batch)))

    def meet(self, places: Sequence[Places]) -> None:
        """Makes what stands at these places one piece."""
        if places and not self.settled:
            self.read_together(self.mask(places))

    def mask(self, places: Sequence[Places]) -> np.ndarray:
        """Which outputs stand at these places."""
        mask = np.zeros(math.prod(self.ids.shape[k] for k in self.outputs), bool)
        for x in places:
            mask[x.entries()] = True
        return mask

    def read_together(self, mask: np.ndarray) -> None:
        """Joins the pieces that share a place with the mask."""
        touched = [piece for piece in self.pieces if (piece & mask).any()]
        self.pieces = [piece for piece in self.pieces if not (piece & mask).any()]
        self.pieces.append(np.logical_or.reduce([mask, *touched]))

    @property
    def settled(self) -> bool:
        """Whether all of its outputs are read together."""
        return len(self.pieces) == 1 and bool(self.pieces[0].all())


class Walk:
    """One walk over a jaxpr.

    Attributes:
      products: contractions of parameters with data.
      counted: (path, axis): axes that count matrices, because a scan or an index takes one of them at a time.
      tables: (path, axis): axes of which rows are taken by index.
      added: parameters that are added to data, with those of their axes that vary.
      multiplied: parameters that multiply data entry by entry.
      filters: kernels of depthwise convolutions.
      unknown: parameters in operations that are not understood, with a sentence.
      pairs: two parameters that are contracted with each other.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.products: list[Product] = []
        self.counted: set[tuple[str, int]] = set()
        self.tables: set[tuple[str, int]] = set()
        self.added: set[str] = set()
        self.multiplied: set[str] = set()
        self.filters: set[str] = set()
        self.unknown: dict[str, str] = {}
        self.pairs: list[tuple[Product, Product]] = []

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """Walks a jaxpr."""
        values: dict[Any, Value] = dict(zip(jaxpr.constvars, map(_constant, consts), strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Value:
            return _constant(atom.val) if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            outs = self._outputs(eqn, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _outputs(self, eqn: Any, ins: list[Value]) -> list[Value]:
        name, avals = eqn.primitive.name, [out.aval for out in eqn.outvars]
        if name in _CONTROL:
            return _CONTROL[name](self, eqn, ins)
        whole = all(x.constant is not None for x in ins)
        integer = all(getattr(a, "dtype", None) == bool or jnp.issubdtype(getattr(a, "dtype", float), jnp.integer) for a in avals)
        if whole and integer and sum(math.prod(a.shape) for a in avals) <= _CONSTANT:
            outs = eqn.primitive.bind(*[jnp.asarray(x.constant) for x in ins], **eqn.params)
            return [_constant(np.asarray(x)) for x in (outs if eqn.primitive.multiple_results else [outs])]
        if inlined := called_jaxpr(eqn):
            return self.run(*inlined, ins[len(ins) - len(inlined[0].invars) :])
        found = _RULES.get(name, _elementwise)(self, eqn, ins)
        common = Value(
            (), {}, any(x.params for x in ins), any(x.data for x in ins), None,
            frozenset().union(*(x.before for x in ins)))
        self._lost(ins, found)
        one_hot = any(x.one_hot for x in ins) and name in (*_MOVES, "convert_element_type", "copy")
        row = any(x.row for x in ins)
        outs = []
        for aval, out in zip(avals, found, strict=True):
            tags, before = (out.tags, out.before) if isinstance(out, Value) else (out, frozenset())
            terms = out.terms if isinstance(out, Value) else self._terms(name, ins)
            outs.append(common._replace(
                terms=terms,
                shape=tuple(getattr(aval, "shape", ())), tags=self._unsettled(tags), before=common.before | before,
                one_hot=one_hot or (isinstance(out, Value) and out.one_hot),
                row=row or (isinstance(out, Value) and out.row)))
        return outs

    def _terms(self, name: str, ins: Sequence[Value]) -> frozenset[tuple[int, int]]:
        """What was contracted to make a sum, or one value that is moved or scaled."""
        for (own, one), (other, two) in itertools.product(ins[0].terms, ins[-1].terms) if name in _SUMS else ():
            if own == other and one != two:
                product = self.products[own]
                product.read_together(product.terms[one] | product.terms[two])
        moving = [x for x in ins if x.data and x.params]
        return frozenset().union(*(x.terms for x in moving)) if name in _SUMS or len(moving) == 1 else frozenset()

    def _lost(self, ins: Sequence[Value], outs: Sequence[Any]) -> None:
        """An operation behind which places are no longer known reads them; a parameter is named."""
        after = [out.tags if isinstance(out, Value) else out for out in outs]
        for own, places in ((own, x) for value in ins for own, x in value.tags.items() if x is not None):
            if any(own in tags and tags[own] is None for tags in after):
                if isinstance(own, int):
                    self.products[own].meet([places])
                else:
                    self.unknown[own] = "its entries are mixed in an order that axes do not express"

    def _unsettled(self, tags: Tags) -> Tags:
        """Tags without the places of products whose outputs are all read together."""
        return {own: None if isinstance(own, int) and self.products[own].settled else x for own, x in tags.items()}

    def sight(self, *values: Value, linear: bool = False) -> None:
        """Notes that what a product has at all places of these values is one piece.

        Args:
          *values: read by one operation; each is a piece, or all are one if the operation adds them.
          linear: whether the operation adds them.
        """
        groups = [values] if linear else [(value,) for value in values]
        for group in groups:
            for own in {own for value in group for own in value.tags if isinstance(own, int)}:
                product = self.products[own]
                places = [x for value in group if (x := value.tags.get(own)) is not None]
                if not linear or len(places) > 1:
                    product.meet(places)

    def contract(self, kernel: Value, other: Value, inputs: Sequence[int], batch: Sequence[int]) -> dict[Owner, Any]:
        """Notes a parameter that is contracted with data; returns the tags of the result, (batch, outputs)."""
        self.sight(other)
        tags: dict[Owner, Any] = {}
        for path, ids in kernel.leaves().items():
            product = Product(path, ids, tuple(inputs), tuple(batch), other.before, other.one_hot)
            shape = [ids.shape[k] for k in product.outputs]
            tags[len(self.products)] = Places.of(shape)
            self.products.append(product)
        return tags


def _constant(number: Any) -> Value:
    dtype = getattr(number, "dtype", None)
    key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended)
    small = not key and np.size(number) <= _CONSTANT
    kept = np.asarray(number) if small and np.asarray(number).dtype.kind in "iub" else None
    return Value(tuple(np.shape(number)), constant=kept)


# Entries moved --------------------------------------------------------------------------------------------


def _general(eqn: Any, x: Places, *operands: Any) -> Places | None:
    """What a primitive does to an array of numbers."""
    params = eqn.params | ({"fill_value": -1} if eqn.primitive.name == "gather" else {})
    return Places.found(np.asarray(eqn.primitive.bind(jnp.asarray(x.numbers()), *operands, **params)))


def _sliced(x: Places, p: Mapping[str, Any]) -> Places:
    for k, cut in enumerate(zip(p["start_indices"], p["limit_indices"], p["strides"] or x.shape, strict=True)):
        x = x.part(k, slice(*cut[:2], cut[2] if p["strides"] else 1))
    return x


def _squeezed(x: Places, p: Mapping[str, Any]) -> Places:
    for k in sorted(p["dimensions"], reverse=True):
        x = x.take(k, 0)
    return x


def _reversed(x: Places, p: Mapping[str, Any]) -> Places:
    for k in p["dimensions"]:
        x = x.part(k, slice(None, None, -1))
    return x


_MOVES: Mapping[str, Callable[[Places, Mapping[str, Any]], Places | None]] = {
    "broadcast_in_dim": lambda x, p: x.at(p["broadcast_dimensions"], p["shape"]),
    "reshape": lambda x, p: x.reshape(p["new_sizes"]),
    "transpose": lambda x, p: Places(x.base, tuple(x.steps[k] for k in p["permutation"])),
    "squeeze": _squeezed, "rev": _reversed, "slice": _sliced,
}


def _move(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags]:
    move = _MOVES[eqn.primitive.name]
    return [ins[0].moved(lambda x: move(x, eqn.params))]


def _padded(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags]:
    filled = jnp.asarray(-1)
    return [ins[0].moved(lambda x: _general(eqn, x, filled) if eqn.primitive.name == "pad" else _general(eqn, x))]


def _split(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags]:
    axis, ends = eqn.params["axis"], np.cumsum(eqn.params["sizes"])
    return [ins[0].moved(lambda x, cut=slice(end - n, end): x.part(axis, cut))  # type: ignore[misc]
            for n, end in zip(eqn.params["sizes"], ends, strict=True)]


def _unstack(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags]:
    axis = eqn.params["axis"]
    return [ins[0].moved(lambda x, k=k: x.take(axis, k)) for k in range(len(eqn.outvars))]  # type: ignore[misc]


def _joined(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags]:
    """A concatenation: places of other operands are free."""
    stack = eqn.primitive.name == "stack"
    axis, tags = eqn.params["axis" if stack else "dimension"], dict[Owner, Places | None]()
    for own in {own: None for value in ins for own in value.tags}:
        parts = [value.tags.get(own, Places(_FREE, tuple(np.zeros(n, int) for n in value.shape))) for value in ins]
        known = [part.numbers() for part in parts if part is not None]
        made = (np.stack if stack else np.concatenate)(known, axis) if len(known) == len(parts) else None
        tags[own] = None if made is None else Places.found(made)
    return [tags]


def _indexed(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags | Value]:
    """A gather or a dynamic slice: exact where the index is known; else one row stands for all."""
    name, source, index = eqn.primitive.name, ins[0], ins[1:]
    gather = name == "gather"
    single = not gather or math.prod(index[0].shape[:-1]) == 1
    sizes = eqn.params["slice_sizes"]
    taken = [k for k, (n, size) in enumerate(zip(source.shape, sizes, strict=True)) if size < n]
    axes = {(path, a) for path, ids in source.leaves().items() for k in taken
            for a in _varying(ids, k, walk.shapes[path])}
    if all(x.constant is not None for x in index) and source.tags:
        walk.tables |= set() if single or source.data else axes
        return [source.moved(lambda x: _general(eqn, x, *(jnp.asarray(y.constant) for y in index)))]
    if source.data or not source.leaves():
        walk.sight(source)
        return [dict.fromkeys(source.tags)]
    rows = gather and (any(x.data for x in index) or not single)
    (walk.tables if rows else walk.counted).update(axes)
    tags: dict[Owner, Places | None] = {}
    for path, ids in source.leaves().items():
        for k in taken:
            ids = ids.part(k, slice(sizes[k]))
        if gather:
            numbers = eqn.params["dimension_numbers"]
            for k in sorted((*numbers.collapsed_slice_dims, *numbers.operand_batching_dims), reverse=True):
                ids = ids.take(k, 0)
            ids = ids.at(numbers.offset_dims, eqn.outvars[0].aval.shape)
        tags[path] = ids
    return [Value((), tags, row=rows)]


def _varying(ids: Places, axis: int, shape: tuple[int, ...]) -> list[int]:
    """The axes of a parameter whose index changes along an axis of an operand."""
    line = ids.line(axis)
    at = np.unravel_index(line[line >= 0], shape)
    return [a for a, index in enumerate(at) if len(index) and (index != index[0]).any()]


# Arithmetic -----------------------------------------------------------------------------------------------


def _elementwise(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags]:
    """Entry by entry: tags stay where all of the result depends on one operand; else what meets is read."""
    shape, name = tuple(getattr(eqn.outvars[0].aval, "shape", ())), eqn.primitive.name
    fits = all(not x.shape or (len(x.shape) == len(shape) and all(n in (1, m) for n, m in zip(x.shape, shape)))
               for x in ins)
    moving = [x for x in ins if x.data and x.params]
    still = [x for x in ins if x.leaves() and not x.data]
    if not fits or len(eqn.outvars) > 1:
        walk.sight(*ins)
        for path in {path for x in ins for path in x.leaves()}:
            walk.unknown[path] = f"`{name}` is an operation whose axes are not known"
        return [{} for _ in eqn.outvars]
    linear = name in _SUMS
    if any(x.data for x in ins):
        for x in still:
            (walk.added if linear else walk.multiplied).update(x.leaves())
        if not linear and len(moving) > 1:
            walk.sight(*moving)
            return [{}]
        if linear:
            walk.sight(*moving, linear=True)
        # Data alone may multiply a parameter, as a mask does; the result is no kernel of anything.
        ins = moving
    tags: dict[Owner, Places | None] = {}
    for x in ins:
        for own, places in x.tags.items():
            full = None if places is None else places.spread(shape) if places.steps else places.at((), shape)
            if own in tags and isinstance(own, int):
                walk.sight(x, Value(shape, tags), linear=True)
            tags.setdefault(own, full)
    return [tags]


_SUMS = ("add", "sub", "add_any", "select_n", "concatenate")


def _reduced(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags]:
    """A sum or a maximum over axes: places that differ along them meet."""
    gone, tags = tuple(eqn.params.get("axes", ())), dict[Owner, Places | None]()
    value, maximum = ins[0], eqn.primitive.name not in ("reduce_sum", "cumsum")
    for own, x in value.tags.items():
        same = x is not None and not any((x.steps[k] != x.steps[k][:1]).any() for k in gone)
        if isinstance(own, int):
            walk.products[own].maxed |= maximum and not same
        if same and x is not None:
            tags[own] = _squeezed(x, {"dimensions": gone})
        elif isinstance(own, int):
            walk.sight(Value(value.shape, {own: x}))
            tags |= {} if maximum else {own: None}
    return [dict(tags) for _ in eqn.outvars]


def _sorted(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags]:
    walk.sight(*ins)
    return [{} for _ in eqn.outvars]


def _compared(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags | Value]:
    walk.sight(*ins)
    return [Value((), {}, one_hot=any(x.data for x in ins) and any(x.constant is not None for x in ins))]


# Contractions ---------------------------------------------------------------------------------------------


def _dot(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags | Value]:
    sums, batches = eqn.params["dimension_numbers"]
    kernels = [k for k in (0, 1) if ins[k].leaves() and not ins[k].data]
    if len(kernels) == 2:
        vectors = [k for k in kernels if all(sum(n > 1 for n in walk.shapes[path]) < 2 for path in ins[k].leaves())]
        if len(vectors) == 1:
            kernels.remove(vectors[0])
    if len(kernels) == 2:
        one, other = (
            [Product(path, ids, tuple(sums[k]), tuple(batches[k]), frozenset()) for path, ids in ins[k].leaves().items()]
            for k in (0, 1))
        walk.pairs += list(itertools.product(one, other))
        return [_outer(eqn, ins, sums, batches)]
    if not kernels:  # rows that were taken by index may be matrices, as those of experts are
        kernels = [k for k in (0, 1) if ins[k].row and any(_is_matrix(x, sums[k]) for x in ins[k].leaves().values())]
        if len(kernels) != 1:
            walk.sight(*ins)
            terms = set()
            for own in ins[0].tags.keys() ^ ins[1].tags.keys():
                x = ins[0].tags.get(own, ins[1].tags.get(own))
                if isinstance(own, int) and x is not None:
                    walk.products[own].terms.append(walk.products[own].mask([x]))
                    terms.add((own, len(walk.products[own].terms) - 1))
            return [Value((), {}, terms=frozenset(terms))]
    k = kernels[0]
    tags = walk.contract(ins[k], ins[1 - k], sums[k], batches[k])
    out = _dot_places(eqn, ins, k)
    shape = tuple(eqn.outvars[0].aval.shape)
    return [Value((), {own: x.at(out, shape) for own, x in tags.items()}, before=frozenset(ins[k].leaves()))]


def _dot_places(eqn: Any, ins: list[Value], k: int) -> list[int]:
    """The axes of a product that batch axes and free axes of one operand become."""
    sums, batches = eqn.params["dimension_numbers"]
    count = [len(x.shape) - len(sums[j]) - len(batches[j]) for j, x in enumerate(ins)]
    lead = len(batches[0])
    return [*range(lead), *range(lead + k * count[0], lead + k * count[0] + count[k])]


def _is_matrix(ids: Places, inputs: Sequence[int]) -> bool:
    """Whether entries differ along contracted axes and along others."""
    differs = [bool((step != step[:1]).any()) for step in ids.steps]
    return any(differs[k] for k in inputs) and any(x for k, x in enumerate(differs) if k not in inputs)


def _outer(eqn: Any, ins: list[Value], sums: Any, batches: Any) -> Tags:
    """The tags of a product of two parameters, each at the first place of what is contracted."""
    tags: dict[Owner, Places | None] = {}
    for k in (0, 1):
        for own, x in ins[k].leaves().items():
            spare = [a for a in range(len(x.steps)) if a not in (*sums[k], *batches[k])]
            first = x.base + sum(int(x.steps[a][0]) for a in sums[k])
            kept = Places(first, tuple(x.steps[a] for a in (*batches[k], *spare)))
            tags[own] = kept.at(_dot_places(eqn, ins, k), eqn.outvars[0].aval.shape)
    return tags


def _convolution(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags | Value]:
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    data, kernel = ins
    if data.leaves() and not data.data:
        walk.unknown |= dict.fromkeys(data.leaves(), "a convolution reads it as its data")
    if kernel.data or not kernel.leaves():
        walk.sight(*ins)
        return [{}]
    (out_axis, in_axis, *window), at = numbers.rhs_spec, numbers.out_spec[1]
    outputs = kernel.shape[out_axis]
    if groups > 1 and kernel.shape[in_axis] == 1:
        walk.filters |= set(kernel.leaves())
        walk.sight(data)
        return [{}]
    walk.sight(data)
    tags: dict[Owner, Places] = {}
    for path, ids in kernel.leaves().items():
        # The outputs of each group are matrices of their own: (groups, outputs) before the other axes.
        rest = [x for k, x in enumerate(ids.steps) if k != out_axis]
        grouped = Places(ids.base, (ids.steps[out_axis],)).reshape((groups, outputs // groups)[groups == 1 :])
        assert grouped is not None  # an axis of a parameter is a grid
        lead, moved = len(grouped.steps) - 1, Places(grouped.base, (*grouped.steps, *rest))
        product = Product(path, moved, tuple(range(lead + 1, len(moved.steps))), tuple(range(lead)), data.before)
        tags[len(walk.products)] = Places.of([outputs]).at([at], eqn.outvars[0].aval.shape)
        walk.products.append(product)
    return [Value((), tags, before=frozenset(kernel.leaves()))]


def _ragged(walk: Walk, eqn: Any, ins: list[Value]) -> list[Tags | Value]:
    """Rows times the matrix of their group: (rows, k) and (groups, k, columns)."""
    rows, kernel = ins[:2]
    if kernel.data or len(kernel.shape) != 3:
        return _elementwise(walk, eqn, ins)
    tags = walk.contract(kernel, rows, (1,), (0,))
    out = tuple(eqn.outvars[0].aval.shape)
    made = {n: x.take(0, 0).at([1], out) for n, x in tags.items()}
    return [Value((), made, before=frozenset(kernel.leaves()))]


_RULES: Mapping[str, Callable[[Walk, Any, list[Value]], Sequence[Any]]] = {
    **dict.fromkeys(_MOVES, _move),
    **dict.fromkeys(("pad", "tile"), _padded),
    **dict.fromkeys(("gather", "dynamic_slice"), _indexed),
    **dict.fromkeys(("concatenate", "stack"), _joined),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "reduce_prod"), _reduced),
    **dict.fromkeys(("sort", "top_k", "reduce_and", "reduce_or"), _sorted),
    "optimization_barrier": lambda walk, eqn, ins: [x.tags for x in ins],
    "split": _split, "unstack": _unstack, "eq": _compared, "dot_general": _dot, "ragged_dot": _ragged,
    "ragged_dot_general": _ragged, "conv_general_dilated": _convolution,
}


# Control flow ---------------------------------------------------------------------------------------------


def _either(*lists: Sequence[Value]) -> list[Value]:
    """Values of which control flow takes one."""
    return [
        first._replace(
            tags={own: x for value in (*others, first) for own, x in value.tags.items()}, constant=None,
            params=any(x.params for x in (first, *others)), data=any(x.data for x in (first, *others)),
            before=first.before.union(*(x.before for x in others)), row=any(x.row for x in (first, *others)))
        for first, *others in zip(*lists, strict=True)
    ]


def _loop(walk: Walk, body: Any, consts: list[Value], carry: list[Value], xs: list[Value]) -> list[Value]:
    """A loop's body; what it notes counts once the carry's marks no longer change."""
    carry = [value._replace(constant=None) for value in carry]
    while True:
        start = len(walk.products), len(walk.pairs)
        outs = walk.run(body.jaxpr, body.consts, [*consts, *carry, *xs])
        after = _either(carry, outs[: len(carry)])
        same = all((a.params, a.data, a.before) == (b.params, b.data, b.before)
                   for a, b in zip(carry, after, strict=True))
        if same:
            return after + outs[len(carry) :]
        carry = [value._replace(tags={own: x for own, x in value.tags.items() if own in before.tags})
                 for value, before in zip(after, carry, strict=True)]
        del walk.products[start[0] :], walk.pairs[start[1] :]


def _scan(walk: Walk, eqn: Any, ins: list[Value]) -> list[Value]:
    count, first = eqn.params["num_carry"], eqn.params["num_consts"]
    slices = []
    for value in ins[first + count :]:
        if not value.data:
            walk.counted |= {(path, a) for path, ids in value.leaves().items()
                             for a in _varying(ids, 0, walk.shapes[path])}
        tags = value.moved(lambda x: x.take(0, 0))
        slices.append(value._replace(shape=value.shape[1:], tags=tags, constant=None))
    outs = _loop(walk, eqn.params["jaxpr"], ins[:first], ins[first : first + count], slices)
    length = eqn.params["length"]
    return outs[:count] + [
        value._replace(shape=(length, *value.shape), constant=None, tags=value.moved(
            lambda x: Places(x.base, (np.zeros(length, int), *x.steps))))
        for value in outs[count:]
    ]


def _while(walk: Walk, eqn: Any, ins: list[Value]) -> list[Value]:
    first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    return _loop(walk, eqn.params["body_jaxpr"], ins[first:second], ins[second:], [])


def _cond(walk: Walk, eqn: Any, ins: list[Value]) -> list[Value]:
    return _either(*(walk.run(branch.jaxpr, branch.consts, ins[1:]) for branch in eqn.params["branches"]))


_CONTROL: Mapping[str, Callable[[Walk, Any, list[Value]], list[Value]]] = {
    "scan": _scan, "while": _while, "cond": _cond,
}


# What a parameter is --------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """Entries of a parameter that are one matrix, or several that are alike.

    Attributes:
      axes: its axes string.
      ids: its entries.
    """

    axes: str
    ids: np.ndarray


@dataclasses.dataclass(frozen=True)
class LeafAxes:
    """What the function says about the axes of every parameter.

    Attributes:
      neurons: path or pattern → axes of kernels, as `max_norm_muon` takes them: `_` are inputs, `layer` and `expert`
        count matrices, other names are outputs, and `token` are those of an unembedding.
      embeddings: path or pattern → axes of tables, `token _`, a tied one included.
      readings: path → how Muon reads it as matrices.
      undecided: path → a sentence that says why the function does not decide its axes.
    """

    neurons: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    embeddings: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    readings: Mapping[str, Reading] = dataclasses.field(default_factory=dict)
    undecided: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Undecided(Exception):
    """A sentence about a parameter whose axes the function does not decide."""


def read_axes(fn: Callable[..., Any], shapes: Mapping[str, Any], batch: Any, trace: Trace) -> LeafAxes:
    """Reads the axes of every parameter from a function's jaxpr.

    Args:
      fn: (leaves, batch) to a list of outputs.
      shapes: the leaves, or their shapes and dtypes, by path.
      batch: one of the batches.
      trace: the walk over the function's index spaces.

    Returns:
      Mappings with concrete layers merged into captures.
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
    return _Reader(walk, trace).read()


class _Reader:
    """Turns the notes of a walk into mappings."""

    def __init__(self, walk: Walk, trace: Trace) -> None:
        self.walk, self.trace = walk, trace
        self.uses: dict[str, list[Product]] = {}
        for product in walk.products:
            if self._sides(product):
                self.uses.setdefault(product.path, []).append(product)
        later = {path: set[str]() for path in self.uses}
        for product in walk.products:
            for path in product.before & later.keys():
                later[path].add(product.path)
        self.later = later
        spaces, key = trace.spaces, trace.spaces.key
        self.read_spaces = {key(axis) for axis in trace.read}
        del spaces

    def _key(self, path: str, axis: int) -> Any:
        ids = self.trace.leaves[path][axis]
        return None if ids is None else self.trace.spaces.key(ids)

    def _sides(self, product: Product) -> bool:
        """Whether a contraction has inputs and outputs: that of a vector has not."""
        shape = self.walk.shapes[product.path]
        inputs = [a for k in product.inputs for a in _varying(product.ids, k, shape)]
        return bool(inputs) and any(_varying(product.ids, k, shape) for k in product.outputs if k not in product.batch)

    def read(self) -> LeafAxes:
        """The mappings."""
        self._resolve_pairs()
        neurons, tables, undecided = dict[str, Axes](), dict[str, Axes](), dict[str, str]()
        for path, shape in self.walk.shapes.items():
            if sum(n > 1 for a, n in enumerate(shape) if (path, a) not in self.walk.counted) < 2:
                continue
            try:
                if table := self._table(path, shape):
                    tables[path] = table
                elif path in self.uses:
                    neurons[path] = self._kernel(path, shape)
                else:
                    self._neither(path, shape)
            except Undecided as sentence:
                undecided[path] = str(sentence)
        readings = {path: _reading(path, axes, self.walk.shapes[path]) for path, axes in neurons.items()}
        return LeafAxes(
            self._merged(neurons), self._merged(tables),
            {path: reading for path, reading in readings.items() if reading is not None}, undecided)

    def _resolve_pairs(self) -> None:
        """Of two parameters that are contracted with each other, the one that is added to data is data."""
        for one, other in self.walk.pairs:
            for kernel, data in ((one, other), (other, one)):
                if data.path in self.walk.added and kernel.path not in self.walk.added:
                    self.uses.setdefault(kernel.path, []).append(kernel)

    def _table(self, path: str, shape: tuple[int, ...]) -> str:
        """The axes of a table, of which rows are looked up or added to data; "" if it is none."""
        tokens = {a for p, a in self.walk.tables if p == path}
        kernels = self.uses.get(path, [])
        hot = [product for product in kernels if product.one_hot]
        tokens |= {a for product in hot for k in product.inputs for a in _varying(product.ids, k, shape)}
        free = [a for a, n in enumerate(shape) if n > 1 and (path, a) not in self.walk.counted]
        vectors = [a for a in free if self._key(path, a) in self.read_spaces]
        if not tokens and path in self.walk.added and not kernels:
            own = {self._key(p, a) for p in self.uses for a in range(len(self.walk.shapes[p]))}
            tokens = {a for a in free if a not in vectors and self._key(path, a) not in own} if vectors else set()
        if not tokens or any(self._by_row(product, tokens) for product in kernels):
            return ""
        rest = [a for a in free if a not in tokens]
        if not rest:
            raise Undecided("single entries of it are taken by index, so that it has no vectors: Adam may step it")
        if not kernels and not any(a in vectors for a in rest):
            raise Undecided(
                "rows of it are taken by index, but no kernel reads them, as of a table of biases: leave it to Adam, "
                f"or list it in embeddings={{'{path}': '{self._text(path, shape, tokens)}'}}")
        return self._text(path, shape, tokens)

    def _text(self, path: str, shape: tuple[int, ...], tokens: set[int]) -> str:
        layers = {a for p, a in self.walk.counted if p == path}
        return " ".join("token" if a in tokens else "layer" if a in layers else "_" for a in range(len(shape)))

    def _by_row(self, product: Product, tokens: set[int]) -> bool:
        """Whether rows that were taken by index are matrices, as those of experts are."""
        shape = self.walk.shapes[product.path]
        moving = {a for k in range(len(product.ids.shape)) for a in _varying(product.ids, k, shape)}
        return not tokens & moving and not product.one_hot

    def _neither(self, path: str, shape: tuple[int, ...]) -> None:
        """Raises for a parameter that is no kernel and no table, unless the function says what it is."""
        partners = sorted({b.path if a.path == path else a.path for a, b in self.walk.pairs if path in (a.path, b.path)})
        if path in self.walk.filters or path in self.walk.added or path in self.walk.multiplied:
            return
        if partners:
            raise Undecided(f"it is contracted with '{partners[0]}', and the function does not say which of the two is "
                            "data: list it by hand")
        if path in self.walk.unknown:
            raise Undecided(f"{self.walk.unknown[path]}: list it by hand")

    def _kernel(self, path: str, shape: tuple[int, ...]) -> Axes:
        """The axes strings of a kernel's matrices."""
        found: dict[str, np.ndarray] = {}
        uses = [product for product in self.uses[path] if not product.one_hot]
        for product in uses:
            for single in self._singled(product, shape):
                for matrix in self._matrices(single, shape):
                    found.setdefault(matrix.axes, matrix.ids)
        seen = np.zeros(math.prod(shape), np.uint8)
        for ids in found.values():
            if seen[ids].any():
                raise Undecided(f"it is read in several ways, {' and '.join(map(repr, found))}: list one by hand")
            seen[ids] = 1
        if not seen.all():
            raise Undecided(f"{int(seen.sum())} of its {len(seen)} entries are matrices, {', '.join(map(repr, found))}, "
                            "and nothing says what the others are: list it by hand")
        texts = list(found)
        layers = list(dict.fromkeys(_PART.sub("layer", text) for text in texts))
        if len(texts) > 1 and len(layers) == 1 and any(path in product.before for product in uses):
            texts = layers  # each of them reads what the one before it made
        return texts[0] if len(texts) == 1 else tuple(texts)

    def _singled(self, product: Product, shape: tuple[int, ...]) -> list[Product]:
        """One contraction as several, where an axis of the parameter counts matrices and is part of them too."""
        for k in product.batch:
            others = {a for j in range(len(product.ids.shape)) if j != k for a in _varying(product.ids, j, shape)}
            if others & set(_varying(product.ids, k, shape)):
                at, sizes = product.outputs.index(k), [product.ids.shape[j] for j in product.outputs]
                masks = [piece.reshape(sizes) for piece in product.pieces]
                inputs, batch = (tuple(j - (j > k) for j in side if j != k) for side in (product.inputs, product.batch))
                singles = [dataclasses.replace(
                    product, ids=product.ids.take(k, i), inputs=inputs, batch=batch,
                    pieces=[part.ravel() for mask in masks if (part := np.take(mask, i, at)).any()])
                    for i in range(product.ids.shape[k])]
                return [one for single in singles for one in self._singled(single, shape)]
        return [product]

    def _matrices(self, product: Product, shape: tuple[int, ...]) -> list[Matrix]:
        """The matrices of one contraction."""
        path = product.path
        layers = {a for p, a in self.walk.counted | self.walk.tables if p == path}
        varying = [_varying(product.ids, k, shape) for k in range(len(product.ids.shape))]
        _require_grid(product.ids, shape)
        names: dict[int, str] = {}
        for side in (product.batch, product.outputs[len(product.batch) :], product.inputs):
            for a in {a for k in side for a in varying[k]}:
                mixed = names.get(a)
                name = "expert" if side is product.batch else "_" if side is product.inputs else "out"
                if mixed not in (None, name):
                    raise Undecided(f"axis {a} of {shape} is inputs and outputs at once, or counts matrices beside "
                                    "them: give it two axes, or list it by hand")
                names[a] = name
        chosen = self.trace.chosen_spaces()
        for a, name in list(names.items()):
            others = [b for b, other in names.items() if other == name and b != a]
            if self._key(path, a) in chosen and others and name != "expert":
                names[a] = "expert"
        names |= {a: "layer" if (path, a) in self.walk.counted else "expert" for a in layers if a not in names}
        whole = self._pieces(product)
        token = product.maxed and product.last and not self.later.get(path, set()) - {path}
        return [self._matrix(product, shape, names, varying, piece, token, layers) for piece in whole]

    def _pieces(self, product: Product) -> list[list[np.ndarray]]:
        """Per piece of the outputs, the places along each axis of the operand."""
        outputs = product.outputs
        sizes = [product.ids.shape[k] for k in outputs]
        batch = len(product.batch)
        masks = [piece.reshape(sizes) for piece in product.pieces]
        if batch:  # what one matrix of a stack does, all do
            masks = [np.broadcast_to(mask.any(tuple(range(batch)), keepdims=True), sizes) for mask in masks]
            whole = Product(product.path, product.ids, product.inputs, product.batch, product.before)
            for mask in masks:
                whole.read_together(mask.ravel())
            masks = [piece.reshape(sizes) for piece in whole.pieces]
        found = []
        for mask in masks:
            lines = [np.flatnonzero(mask.any(tuple(j for j in range(mask.ndim) if j != k))) for k in range(mask.ndim)]
            if math.prod(map(len, lines)) != mask.sum():
                raise Undecided("its outputs are used apart in a way that ranges do not express: list it by hand")
            found.append(lines)
        return sorted(found, key=lambda lines: [line[0] for line in lines]) or [[np.arange(n) for n in sizes]]

    def _matrix(
        self, product: Product, shape: tuple[int, ...], names: Mapping[int, str], varying: list[list[int]],
        lines: list[np.ndarray], token: bool, layers: set[int],
    ) -> Matrix:
        at = dict(zip(product.outputs, lines, strict=True))
        ids, covered = product.ids, list[np.ndarray]()
        base = np.unravel_index(ids.base, shape)
        for a, n in enumerate(shape):
            index = base[a][None]
            for k in [k for k, axes in enumerate(varying) if a in axes]:
                line = np.unravel_index(ids.part(k, at.get(k, slice(None))).line(k), shape)[a] - base[a]
                index = np.unique(index[:, None] + line)
            covered.append(np.arange(n) if a in layers else index)
        outs = [a for a in range(len(shape)) if names.get(a) == "out" and len(covered[a]) > 1]
        cut = any(len(covered[a]) < shape[a] for a in outs)
        spare = [name for name in _NAMES if not (cut and name == "head")]
        own = dict(zip(outs, [*spare[: len(outs) - 1], "token" if token else "neuron"], strict=True))
        words = []
        for a, n in enumerate(shape):
            name = own.get(a, names.get(a, "_"))
            if len(covered[a]) == 1 and n > 1:
                name = f"part={int(covered[a][0])}"
            elif name == "out":
                name = "unit"
            elif len(covered[a]) < n:
                name += "=" + "+".join(f"{i}:{j}" for i, j in _ranges(covered[a]))
            words.append(name)
        ids = np.ravel_multi_index(np.ix_(*covered), shape).ravel()
        return Matrix(" ".join(words), ids)

    def _merged(self, mapping: Mapping[str, Axes]) -> dict[str, Axes]:
        """Layers as captures, where a pattern matches the leaves that have its axes and no others."""
        merged: dict[str, Axes] = {}
        for pattern, axes in captured_blocks(mapping).items():
            paths = [path for path in self.walk.shapes if match("discover", pattern, path) is not None]
            same = all(mapping.get(path) == axes for path in paths)
            merged |= {pattern: axes} if same else {path: axes for path in paths if mapping.get(path) == axes}
        return merged


def _require_grid(ids: Places, shape: tuple[int, ...]) -> None:
    """Raises where the entries at an operand's places are not all of some indices of each axis."""
    if ids.base < 0 or any((step < _FREE // 2).any() for step in ids.steps):
        raise Undecided("it is used beside entries of others in one matrix: list it by hand")
    rng = np.random.default_rng(0)
    base = np.stack(np.unravel_index(ids.base, shape))
    picks = [step[rng.integers(0, len(step), _POINTS)] for step in ids.steps]
    told = sum((np.stack(np.unravel_index(ids.base + x, shape)) - base[:, None] for x in picks), base[:, None])
    if (np.stack(np.unravel_index(ids.base + sum(picks), shape)) != told).any():
        raise Undecided("its entries are mixed in an order that axes do not express: list it by hand")


def _ranges(index: np.ndarray) -> Iterable[tuple[int, int]]:
    """Indices in order as ranges (start, stop)."""
    runs = np.split(index, np.flatnonzero(np.diff(index) != 1) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


def _reading(path: str, axes: Axes, shape: tuple[int, ...]) -> Reading | None:
    """How Muon reads a kernel; None for the tokens of an unembedding, which are no matrix to it."""
    stacks: dict[Matrices, None] = {}
    for text in (axes,) if isinstance(axes, str) else axes:
        block = bind_leaf("discover", BlockSpec("neurons", path, text), path, shape, {}, "sizes")
        if block is None or "token" in block.split_labels:
            return None
        if (made := neuron_matrices(block)) is not None:
            stacks[made] = None
    return next(iter(stacks)) if len(stacks) == 1 else Fused(tuple(stacks))


class Mappings:
    """The part of a report that says which axes are which."""

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
        """Path → why the function does not decide which axes are which."""
        return self.axes.undecided

    def muon_dimension_numbers(self, params: Any) -> Any:
        """How `optax.contrib.muon` should read every leaf: give it this method as `muon_weight_dimension_numbers`.

        Args:
          params: a tree of parameters; shapes are enough.

        Returns:
          A tree like `params` with an `optax.contrib.MuonDimensionNumbers` for every kernel, and None for all other
          leaves: tables, the unembedding, norms, biases. A fused kernel is one matrix to Optax.
        """
        axes, leaves = optax_axes(self.axes.readings), leaves_by_path(params)
        numbers = {path: optax.contrib.MuonDimensionNumbers(*sides) for path, sides in axes.items() if path in leaves}
        return with_leaves(params, dict.fromkeys(leaves) | numbers)
