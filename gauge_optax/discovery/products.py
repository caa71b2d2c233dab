"""Finds each parameter's axes of inputs and outputs, by a walk over a jaxpr that follows every entry.

For every value, the walk knows which entries of which parameters stand at which place (multi-index) of the array. If
such a value is contracted with data, this is a *product*: the contracted axes are the parameter's inputs, and its other
axes are outputs. The walk then follows the outputs. An operation that combines several of them in one result *reads*
them together. Outputs that are never read together, such as the queries and keys of a fused kernel, belong to different
matrices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gauge_optax.discovery.interpret import CONTROL, applied, called, interpret, known, loop_parts, ranges_taken
from gauge_optax.discovery.places import FREE, Places, varying
from gauge_optax.discovery.rules import SCATTERS, ragged_places

_CONSTANT = 100_000  # index arithmetic with more entries is not evaluated

Owner = str | int
"""A parameter's path, or the number of a product."""
Tags = Mapping[Owner, Places | None]
"""For each owner, which of its entries stands at each place of a value; None if that is no longer known."""


class Value(NamedTuple):
    """What the walk knows of an intermediate array.

    Attributes:
      shape: its shape.
      tags: which parameters' entries and which products' outputs stand in it, and at which places.
      params: whether it depends on parameters.
      data: whether it depends on the batch.
      constant: its numbers, if they are few integers or booleans that the program alone determines; else None.
      before: paths of the kernels that it depends on.
      one_hot: whether it is a one-hot code, which compares data with a range of numbers.
      row: whether its parameters are rows that were taken by index.
      terms: which sets of outputs were contracted with data to make it, as pairs: a product, and the number of a mask
        in its `Product.terms`. If two values are added, the outputs of their terms are read together.

    >>> Value((2, 3), {"up": Places.of((2, 3))}, params=True).leaves()["up"].shape
    (2, 3)
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
        """The parameters whose entries stand in it, path → places."""
        return {name: x for name, x in self.tags.items() if isinstance(name, str) and x is not None}

    def moved(self, move: Callable[[Places], Places | None]) -> Tags:
        """The tags after the value's entries are rearranged. `move` maps old places to new ones; None means unknown."""
        return {own: None if x is None else move(x) for own, x in self.tags.items()}


@dataclasses.dataclass
class Product:
    """One contraction of a parameter.

    Attributes:
      path: the parameter's path.
      ids: which of its entries stands at each place of the operand.
      inputs: contracted axes of the operand.
      batch: batch axes of the operand, which the other operand has too.
      window: those of the contracted axes that are a convolution's window.
      before: paths of the kernels that the other operand depends on.
      one_hot: whether the other operand is one-hot.
      pieces: masks over the flattened outputs, without overlaps. All outputs of one mask are read together.
      maxed: whether a maximum is taken over its outputs, as in a softmax.
      last: whether the function returns its outputs, perhaps after a softmax and sums.
      terms: masks over the flattened outputs, one for each contraction of outputs with data (`Value.terms`).
      again: axes of the parameter along which its outputs are contracted with data, while other axes of outputs remain.
        In a mixture of kernels, x·(Σ g·W), W is contracted with g first, and `again` has the axis that x meets. The
        entries of heads are another example: queries are contracted with keys along them.
      alone: whether the result of such a contraction has no axis that only the data has. Attention scores have such an
        axis, that of the keys.

    >>> product = Product("up", Places.of((2, 3)), (0,), (), frozenset())
    >>> product.read_together(np.array([True, True, False]))
    >>> product.outputs, product.settled
    ((1,), False)
    """

    path: str
    ids: Places
    inputs: tuple[int, ...]
    batch: tuple[int, ...]
    before: frozenset[str]
    one_hot: bool = False
    window: tuple[int, ...] = ()
    pieces: list[np.ndarray] = dataclasses.field(default_factory=list)
    maxed: bool = False
    last: bool = False
    terms: list[np.ndarray] = dataclasses.field(default_factory=list)
    again: set[int] = dataclasses.field(default_factory=set)
    alone: bool = False

    @property
    def outputs(self) -> tuple[int, ...]:
        """The axes of the operand that are not contracted, batch axes first."""
        return (*self.batch, *(k for k in range(len(self.ids.shape)) if k not in (*self.inputs, *self.batch)))

    def meet(self, places: Sequence[Places]) -> None:
        """Notes that the outputs at these places are read together: they become one piece."""
        if places and not self.settled:
            self.read_together(self.mask(places))

    def mask(self, places: Sequence[Places]) -> np.ndarray:
        """A mask over the flattened outputs, true for those that stand at these places."""
        mask = np.zeros(math.prod(self.ids.shape[k] for k in self.outputs), bool)
        for x in places:
            mask[x.entries()] = True
        return mask

    def leaf_axes(self, outputs: np.ndarray, shape: Sequence[int]) -> list[int]:
        """The axes of the parameter, whose shape is given, along which some of the flattened outputs differ."""
        at = np.unravel_index(outputs[outputs >= 0], [self.ids.shape[k] for k in self.outputs])
        steps = (self.ids.steps[k][index] for k, index in zip(self.outputs, at, strict=True))
        return varying(Places(self.ids.base, (np.asarray(sum(steps)),)), 0, shape)

    def read_together(self, mask: np.ndarray) -> None:
        """Joins the outputs of the mask, and all pieces that share an output with it, into one piece."""
        if not mask.any():
            return
        touched = [piece for piece in self.pieces if (piece & mask).any()]
        self.pieces = [piece for piece in self.pieces if not (piece & mask).any()]
        self.pieces.append(np.logical_or.reduce([mask, *touched]))

    @property
    def settled(self) -> bool:
        """Whether all of its outputs are read together."""
        return len(self.pieces) == 1 and bool(self.pieces[0].all())


class Walk:
    """One walk over a jaxpr, and what it notes.

    Attributes:
      products: contractions of parameters with data.
      counted: (path, axis): axes that count matrices, because a scan or an index takes one of them at a time.
      tables: (path, axis): axes of which rows are taken by index.
      turned: parameters of which a loop over data, such as one over time, takes one index per iteration.
      turns: for each of the loops around the current equation, whether it runs over data.
      added: parameters that are added to data.
      multiplied: parameters that multiply data entry by entry.
      summed: parameters that multiply data entry by entry, if the result is summed along one of their axes.
      filters: kernels of depthwise convolutions.
      unknown: parameter → a sentence that says why the walk does not understand its use.
      unclear: the same for uses after which the parameter's axes stay undecided, whatever its other uses show.
      vectors: parameters that are contracted with data and have no outputs.
      read: parameters of which some operation reads entries.
      pairs: one for each contraction of two values made of parameters: the products of the left operand's parameters,
        and those of the right operand's.

    >>> walk = Walk({"up": (2, 3)})
    >>> closed = jax.make_jaxpr(lambda a, x: x @ a)(np.ones((2, 3)), np.ones(2))
    >>> args = [Value((2, 3), {"up": Places.of((2, 3))}, params=True), Value((2,), data=True)]
    >>> out = walk.run(closed.jaxpr, closed.consts, args)
    >>> [(product.path, product.inputs) for product in walk.products]
    [('up', (0,))]
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.products: list[Product] = []
        self.counted: set[tuple[str, int]] = set()
        self.tables: set[tuple[str, int]] = set()
        self.turned: set[str] = set()
        self.turns: list[bool] = []
        self.added: set[str] = set()
        self.multiplied: set[str] = set()
        self.summed: set[str] = set()
        self.filters: set[str] = set()
        self.unknown: dict[str, str] = {}
        self.unclear: dict[str, str] = {}
        self.vectors: set[str] = set()
        self.read: set[str] = set()
        self.pairs: list[tuple[list[Product], list[Product]]] = []

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """Walks a jaxpr, and returns the values of its outputs."""
        return interpret(jaxpr, consts, args, _constant, self._equation)

    def _equation(self, eqn: Any, ins: list[Value]) -> list[Value]:
        name, avals = eqn.primitive.name, [out.aval for out in eqn.outvars]
        if name in CONTROL:
            return (_branches if name == "cond" else _loop)(self, eqn, ins)
        whole = all(x.constant is not None for x in ins)
        integer = all(getattr(getattr(a, "dtype", None), "kind", "") in ("i", "u", "b") for a in avals)
        if whole and integer and sum(math.prod(a.shape) for a in avals) <= _CONSTANT:
            if (numbers := known(eqn, [x.constant for x in ins])) is not None:
                return list(map(_constant, numbers))
        if call := called(eqn, ins):
            return self.run(*call)
        self.read |= {path for x in ins for path in x.leaves()}
        try:
            found = _RULES.get(name, _elementwise)(self, eqn, ins)
        except (IndexError, KeyError, TypeError, ValueError):  # a form of the operation that its rule does not know
            found = _unknown(self, eqn, ins)
        found = [out if isinstance(out, Value) else Value((), out, terms=self._terms(name, ins)) for out in found]
        self._lost(ins, found)
        before = frozenset[str]().union(*(x.before for x in ins))
        one_hot = any(x.one_hot for x in ins) and name in (*_MOVES, "slice", "rev", "convert_element_type", "copy")
        return [
            out._replace(
                shape=tuple(getattr(aval, "shape", ())), params=any(x.params for x in ins),
                data=any(x.data for x in ins), before=before | out.before, one_hot=one_hot or out.one_hot,
                row=out.row or any(x.row for x in ins))
            for aval, out in zip(avals, found, strict=True)
        ]

    def _terms(self, name: str, ins: Sequence[Value]) -> frozenset[tuple[int, int]]:
        """The `Value.terms` of a result.

        A sum has the terms of all its operands. If the two operands have different terms of one product, the outputs of
        both terms are noted as read together. The result of any other operation has the terms of the operand that
        depends on both data and parameters, or none if there are several such operands.
        """
        for (own, one), (other, two) in itertools.product(ins[0].terms, ins[-1].terms) if name in _SUMS else ():
            if own == other and one != two:
                product = self.products[own]
                product.read_together(product.terms[one] | product.terms[two])
        moving = [x for x in ins if x.data and x.params]
        return frozenset().union(*(x.terms for x in moving)) if name in _SUMS or len(moving) == 1 else frozenset()

    def _lost(self, ins: Sequence[Value], outs: Sequence[Value]) -> None:
        """Notes parameters and products whose places were known in an operand and are unknown in a result.

        The outputs of such a product count as read together. Such a parameter is added to `unknown`.
        """
        for own, places in ((own, x) for value in ins for own, x in value.tags.items() if x is not None):
            if any(own in out.tags and out.tags[own] is None for out in outs):
                if isinstance(own, int):
                    self.products[own].meet([places])
                else:
                    self.unknown.setdefault(own, _MIXED)

    def sight(self, *values: Value, linear: bool = False) -> None:
        """Notes which outputs of a product one operation reads together, so that they belong to one matrix.

        Args:
          *values: the operands. Within each operand, all outputs of a product are read together.
          linear: whether the operation adds its operands. Then outputs of a product are read together only if at least
            two operands contain some of them, and then those in all operands are.
        """
        groups = [values] if linear else [(value,) for value in values]
        for group in groups:
            for own in {own for value in group for own in value.tags if isinstance(own, int)}:
                product = self.products[own]
                places = [x for value in group if (x := value.tags.get(own)) is not None]
                if not linear or len(places) > 1:
                    product.meet(places)

    def contract_again(self, value: Value, sums: Sequence[int], free: Sequence[int], others: int = 0) -> None:
        """Notes the products whose outputs are contracted with data, in `Product.again` and `Product.alone`.

        Args:
          value: a value in which outputs of products stand.
          sums: its contracted axes.
          free: its axes that are neither contracted nor batch axes.
          others: the number of axes longer than 1 in the result that only the data has.
        """
        for own, x in value.tags.items():
            if isinstance(own, int) and x is not None:
                product = self.products[own]
                moved = {k: set(product.leaf_axes(x.line(k), self.shapes[product.path])) for k in (*sums, *free)}
                gone, kept = (set[int]().union(*(moved[k] for k in axes)) for axes in (sums, free))
                gone -= {a for k in product.batch for a in varying(product.ids, k, self.shapes[product.path])}
                if gone and kept and not gone & kept:
                    product.again |= gone
                    product.alone |= not others

    def joint(self, path: str, one: Places | None, other: Places | None) -> Places | None:
        """The places of a parameter in a result whose two operands both contain it, as in w / sum(w).

        They are the places in that operand along whose axes more of the parameter's axes vary. They are None if an axis
        of a matrix stands at another axis in the second operand, as in w + w.T.
        """
        if one is None or other is None:
            return None
        shape = self.shapes[path]
        first, second = ([{k for k in range(len(x.steps)) if a in varying(x, k, shape)} for a in range(len(shape))]
                         for x in (one, other))
        pairs = list(zip(first, second, strict=True))
        if any(a and b and a != b for a, b in pairs) and sum(bool(a or b) for a, b in pairs) > 1:
            self.unknown.setdefault(path, "it is combined with itself, with its axes in another order")
            return None
        return one if sum(map(bool, first)) >= sum(map(bool, second)) else other

    def meet_data(self, value: Value, inputs: Sequence[int]) -> None:
        """Adds to `unclear` the parameters in a value whose axes remain undecided when data is contracted with it.

        Args:
          value: a value without data: a parameter, or its product with constants or with other parameters.
          inputs: the contracted axes of the value.
        """
        for own, x in value.tags.items():
            if isinstance(own, str):
                self.unclear |= {own: self.unknown.get(own, _MIXED)} if x is None else {}
            elif x is None or any(_differs(x.steps[k]) for k in inputs):
                # In x·(W·C), data enters the axis of W that the product leaves free; in x·(C·W), the one that it sums.
                product = self.products[own]
                self.unclear |= dict.fromkeys((product.path, *product.before), (
                    "it is contracted with a constant or with other parameters, and the result with data, so that the "
                    "function does not say which of its axes are inputs"))

    def meet_noise(self, value: Value, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Notes what is `unclear` if data is contracted with a parameter that data was added to, or multiplied with.

        Args:
          value: an operand of a contraction; nothing is noted if it does not depend on data.
          inputs: its contracted axes.
          outputs: its axes that stay, without batch axes.
        """
        for path, x in value.leaves().items() if value.data else ():
            if all(any(_differs(x.steps[k]) for k in axes) for axes in (inputs, outputs)):
                self.unclear.setdefault(path, "data is added to it or multiplied with it, as noise to a kernel, and "
                                        "the result is contracted with data")

    def contract(self, kernel: Value, other: Value, inputs: Sequence[int], batch: Sequence[int]) -> dict[Owner, Any]:
        """Notes a product for each parameter in `kernel`, which is contracted with data along its axes `inputs`.

        Returns the tags of the result, whose axes are the batch axes and then the outputs.
        """
        self.sight(other)
        tags: dict[Owner, Any] = {}
        for path, ids in kernel.leaves().items():
            product = Product(path, ids.held(), tuple(inputs), tuple(batch), other.before, other.one_hot)
            slots = Places.of([product.ids.shape[k] for k in product.outputs])
            tags[len(self.products)] = slots.within([ids.steps[k] for k in product.outputs])
            self.products.append(product)
        return tags


_MIXED = "its entries are mixed in an order that axes do not express"


def _differs(step: np.ndarray) -> bool:
    """Whether different entries stand along an axis with these steps."""
    return bool((step != step[:1]).any())


def _fills(value: Value, shape: Sequence[int]) -> bool:
    """Whether different entries of one parameter stand along every axis of a matrix."""
    long = [k for k, n in enumerate(shape) if n > 1]
    return value.shape == tuple(shape) and len(long) > 1 and any(
        all(_differs(x.steps[k]) for k in long) for x in value.leaves().values())


def _constant(number: Any) -> Value:
    dtype = getattr(number, "dtype", None)
    key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended)
    small = not key and np.size(number) <= _CONSTANT
    kept = np.asarray(number) if small and np.asarray(number).dtype.kind in "iub" else None
    return Value(tuple(np.shape(number)), constant=kept)


# Entries moved --------------------------------------------------------------------------------------------


def _general(eqn: Any, x: Places, *operands: Any) -> Places | None:
    """The places after a primitive that moves entries: it is evaluated on the array of their numbers."""
    filled = {"fill_value": -1} if eqn.primitive.name == "gather" else {}
    return Places.found(np.asarray(applied(eqn, [x.numbers(), *operands], **filled)[0]))


def _squeezed(x: Places, p: Mapping[str, Any]) -> Places:
    for k in sorted(p["dimensions"], reverse=True):
        x = x.take(k, 0)
    return x


def _transposed(x: Places, permutation: Sequence[int]) -> Places:
    return Places(x.base, tuple(x.steps[k] for k in permutation))


_MOVES: Mapping[str, Callable[[Places, Mapping[str, Any]], Places | None]] = {
    "broadcast_in_dim": lambda x, p: x.at(p["broadcast_dimensions"], p["shape"]),
    # A convolution under vmap makes reshapes that transpose first.
    "reshape": lambda x, p: _transposed(x, p["dimensions"] or range(len(x.steps))).reshape(p["new_sizes"]),
    "transpose": lambda x, p: _transposed(x, p["permutation"]),
    "squeeze": _squeezed,
}


def _move(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags]:
    move = _MOVES[eqn.primitive.name]
    return [ins[0].moved(lambda x: move(x, eqn.params))]


def _padded(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags]:
    filled = [-1] if eqn.primitive.name == "pad" else []
    return [ins[0].moved(lambda x: _general(eqn, x, *filled))]


def _parts(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags]:
    return [ins[0].moved(lambda x, ranges=ranges: x.parts(ranges)) for ranges in ranges_taken(eqn)]  # type: ignore[misc]


def _unstack(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags]:
    axis = eqn.params["axis"]
    return [ins[0].moved(lambda x, k=k: x.take(axis, k)) for k in range(len(eqn.outvars))]  # type: ignore[misc]


def _joined(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags]:
    """A concatenation or a stack. No entries of a parameter or product stand where operands are that do not contain it.
    """
    stack = eqn.primitive.name == "stack"
    axis, tags = eqn.params["axis" if stack else "dimension"], dict[Owner, Places | None]()
    for own in {own: None for value in ins for own in value.tags}:
        parts = [value.tags.get(own, Places(FREE, tuple(np.zeros(n, int) for n in value.shape))) for value in ins]
        known = [part.numbers() for part in parts if part is not None]
        made = (np.stack if stack else np.concatenate)(known, axis) if len(known) == len(parts) else None
        tags[own] = None if made is None else Places.found(made)
    return [tags]


def _indexed(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags | Value]:
    """A gather or a dynamic slice.

    With constant indices the places are exact. Otherwise the result gets the places of the table's first row, which
    stands for any row.
    """
    name, source, index = eqn.primitive.name, ins[0], ins[1:]
    gather = name == "gather"
    single = not gather or math.prod(index[0].shape[:-1]) == 1
    sizes = eqn.params["slice_sizes"]
    taken = [k for k, (n, size) in enumerate(zip(source.shape, sizes, strict=True)) if size < n]
    axes = {(path, a) for path, ids in source.leaves().items() for k in taken
            for a in varying(ids, k, walk.shapes[path])}
    if all(x.constant is not None for x in index) and source.tags:
        walk.tables |= set() if single or source.data else axes
        return [source.moved(lambda x: _general(eqn, x, *(y.constant for y in index)))]
    if source.data or not source.leaves():
        walk.sight(source)
        return [dict.fromkeys(source.tags)]
    rows = any(x.data for x in index) or not single
    (walk.tables if rows else walk.counted).update(axes)
    walk.turned |= set() if rows or not walk.turns or not walk.turns[-1] else source.leaves().keys()
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
    return [Value((), tags, row=rows and (gather or all(sizes[k] == 1 for k in taken)))]


# Arithmetic -----------------------------------------------------------------------------------------------


def _unknown(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags]:
    """An operation of which nothing is known.

    It counts as reading all outputs in each operand together. Parameters in operands without data are added to
    `unknown`.
    """
    walk.sight(*ins)
    for path in {path for x in ins if not x.data for path in x.leaves()}:
        walk.unknown[path] = f"`{eqn.primitive.name}` is an operation whose axes are not known"
    return [{} for _ in eqn.outvars]


def _elementwise(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags]:
    """An operation entry by entry.

    The result keeps the operands' tags if the operation is a sum, or if only one operand depends on both data and
    parameters. Any other operation on several such operands reads the outputs within each of them together, and its
    result has no tags.
    """
    shape, name = tuple(getattr(eqn.outvars[0].aval, "shape", ())), eqn.primitive.name
    ranks = all(len(x.shape) in (0, len(shape)) for x in ins)
    fits = ranks and all(n in (1, m) for x in ins if x.shape for n, m in zip(x.shape, shape, strict=True))
    moving = [x for x in ins if x.data and x.params]
    still = [x for x in ins if x.leaves() and not x.data]
    if not fits or len(eqn.outvars) > 1:
        return _unknown(walk, eqn, ins)
    linear = name in _SUMS
    if any(x.data for x in ins):
        for x in still:
            (walk.added if linear else walk.multiplied).update(x.leaves())
        if not linear and len(moving) > 1:
            walk.sight(*moving)
            # A value that is divided by its own sum, as in a softmax, keeps its tags.
            sums = moving[1].tags if name == "div" else {}
            shares = bool(sums) and sums.keys() == moving[0].tags.keys() and not any(sums.values())
            return [moving[0].tags if shares else {}]
        if not linear and still:
            moving = [*moving, *(x for x in still if any(len(x.shape) > 1 for x in still))]
        if linear:
            walk.sight(*moving, linear=True)
        # A bias or a scale leaves no tags in the result. A matrix that is multiplied by data, such as a mask, leaves
        # its tags, but the result depends on data and is therefore not taken for a kernel. So does one to which such a
        # product is added: the mean of a kernel with noise.
        noisy = linear and any(_fills(x, shape) for x in moving)
        ins = [*moving, *(x for x in still if noisy and _fills(x, shape))]
    tags: dict[Owner, Places | None] = {}
    for x in ins:
        for own, places in x.tags.items():
            if places is None and not x.shape and not x.data:
                continue  # a scalar, such as the norm of a kernel, by which the kernel is divided: it has no places
            full = None if places is None else places.spread(shape) if places.steps else places.at((), shape)
            if own in tags and isinstance(own, int):
                walk.sight(x, Value(shape, tags), linear=True)
            tags[own] = walk.joint(own, tags[own], full) if own in tags and isinstance(own, str) else (
                tags.get(own, full))
    return [tags]


_SUMS = ("add", "sub", "add_any", "select_n", "concatenate", "complex")


def _reduced(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags]:
    """A sum or a maximum over axes. If different outputs of a product stand along these axes, it reads them together.

    A parameter without data keeps its places at index 0 of these axes, which represent all indices.
    """
    gone, tags = tuple(eqn.params.get("axes", ())), dict[Owner, Places | None]()
    value, maximum = ins[0], eqn.primitive.name != "reduce_sum"
    for own, x in value.tags.items():
        same = x is not None and not any(_differs(x.steps[k]) for k in gone)
        if isinstance(own, int):
            walk.products[own].maxed |= maximum and x is not None and not same
        elif x is not None and not same and value.data and not value.row:
            walk.summed.add(own)
        elif x is not None and not same and not value.data:
            walk.unknown.setdefault(own, "it is summed before data meets it")
        if x is not None and (same or (isinstance(own, str) and not value.data)):
            tags[own] = _squeezed(x, {"dimensions": gone})
        elif isinstance(own, int):
            walk.sight(Value(value.shape, {own: x}))
            tags |= {} if maximum else {own: None}
    return [dict(tags) for _ in eqn.outvars]


def _sorted(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags]:
    walk.sight(*ins)
    return [{} for _ in eqn.outvars]


def _compared(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags | Value]:
    walk.sight(*ins)
    return [Value((), {}, one_hot=any(x.data for x in ins) and any(x.constant is not None for x in ins))]


# Contractions ---------------------------------------------------------------------------------------------


def _dot(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags | Value]:
    sums, batches = eqn.params["dimension_numbers"]
    kernels = [k for k in (0, 1) if not ins[k].data and _is_matrix(ins[k], sums[k])]
    if not (ins[0].data or ins[1].data) and (pair := _pair(walk, eqn, ins, kernels)) is not None:
        return [pair]
    for k in (k for k in (0, 1) if not ins[k].data and ins[1 - k].data):
        walk.meet_data(ins[k], sums[k])
        walk.vectors |= set() if kernels else ins[k].leaves().keys()
    if not kernels:  # rows that were taken by index may be matrices, as those of experts are
        kernels = [k for k in (0, 1) if ins[k].row and _is_matrix(ins[k], sums[k])]
        if len(kernels) != 1:
            walk.sight(*ins)
            terms = set()
            free = [[a for a, n in enumerate(x.shape) if n > 1 and a not in (*sums[j], *batches[j])]
                    for j, x in enumerate(ins)]
            for own in ins[0].tags.keys() ^ ins[1].tags.keys():
                x = ins[0].tags.get(own, ins[1].tags.get(own))
                if isinstance(own, int) and x is not None:
                    walk.products[own].terms.append(walk.products[own].mask([x]))
                    terms.add((own, len(walk.products[own].terms) - 1))
            for j in (0, 1):
                walk.meet_noise(ins[j], sums[j], free[j])
                if ins[1 - j].data and not ins[0].tags.keys() & ins[1].tags.keys():
                    walk.contract_again(ins[j], sums[j], free[j], len(free[1 - j]))
            return [Value((), {}, terms=frozenset(terms))]
    k = kernels[0]
    tags = walk.contract(ins[k], ins[1 - k], sums[k], batches[k])
    out = _dot_places(eqn, ins, k)
    shape = tuple(eqn.outvars[0].aval.shape)
    placed: dict[Owner, Places | None] = {own: x.at(out, shape) for own, x in tags.items()}
    if not ins[1 - k].data:  # the other operand is made of parameters; data may still be contracted with its outputs
        placed |= {own: x for own, x in _outer(walk, eqn, ins).items() if isinstance(own, int) and x is not None}
    return [Value((), placed, before=frozenset(ins[k].leaves()))]


def _pair(walk: Walk, eqn: Any, ins: list[Value], kernels: Sequence[int]) -> Value | None:
    """The result of a contraction of two values without data; None if one is a kernel and the other may act as data.

    Args:
      walk: the walk, which notes two kernels in `Walk.pairs`.
      eqn: the `dot_general`.
      ins: its operands.
      kernels: which of them are matrices.
    """
    sums, batches = eqn.params["dimension_numbers"]
    # A parameter may also be contracted with a function of itself, as in a power series. Neither of the two is data.
    twice = {path for k in kernels for path in ins[k].leaves() if path in {*ins[1 - k].leaves(), *ins[1 - k].before}}
    if len(kernels) == 1 and not twice:
        return None
    if kernels:
        sides = [[Product(path, ids, tuple(sums[k]), tuple(batches[k]), frozenset())
                  for path, ids in ins[k].leaves().items()] for k in kernels]
        walk.pairs.append((sides[0], sides[-1]))
    for path in twice:
        walk.unknown.setdefault(path, "it is multiplied with itself before data")
    tags = dict(_outer(walk, eqn, ins))
    tags.update(dict.fromkeys(twice))
    return Value((), tags, before=frozenset().union(*(x.leaves() for x in ins)))


def _dot_places(eqn: Any, ins: list[Value], k: int) -> list[int]:
    """The axes of a `dot_general`'s result that come from operand k: first its batch axes, then its free axes."""
    sums, batches = eqn.params["dimension_numbers"]
    count = [len(x.shape) - len(sums[j]) - len(batches[j]) for j, x in enumerate(ins)]
    lead = len(batches[0])
    return [*range(lead), *range(lead + k * count[0], lead + k * count[0] + count[k])]


def _is_matrix(value: Value, inputs: Sequence[int]) -> bool:
    """Whether a parameter has different entries along contracted axes and also along others, as no vector has."""
    for ids in value.leaves().values():
        differs = [_differs(step) for step in ids.steps]
        if any(differs[k] for k in inputs) and any(x for k, x in enumerate(differs) if k not in inputs):
            return True
    return False


def _outer(walk: Walk, eqn: Any, ins: list[Value]) -> Tags:
    """The tags of a contraction of two values that do not depend on data.

    Of each operand the result gets the places of the entries at index 0 of the contracted axes, as representatives of
    all indices. Outputs of a product that are contracted have no known places in the result.
    """
    sums, batches = eqn.params["dimension_numbers"]
    tags: dict[Owner, Places | None] = {}
    for k in (0, 1):
        spare = [a for a in range(len(ins[k].shape)) if a not in (*sums[k], *batches[k])]
        for own, x in ins[k].tags.items():
            kept = None
            if x is not None and (isinstance(own, str) or not any(_differs(x.steps[a]) for a in sums[k])):
                first = x.base + sum(int(x.steps[a][0]) for a in sums[k])
                kept = Places(first, tuple(x.steps[a] for a in (*batches[k], *spare)))
                kept = kept.at(_dot_places(eqn, ins, k), eqn.outvars[0].aval.shape)
            if own in tags:
                kept = walk.joint(own, tags[own], kept) if isinstance(own, str) else None
            tags[own] = kept
    return tags


def _convolution(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags | Value]:
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    data, kernel = ins
    if data.leaves() and not data.data:
        walk.unknown |= dict.fromkeys(data.leaves(), "a convolution reads it as its data")
    if data.data and not kernel.data:
        walk.meet_data(kernel, [k for k in range(len(kernel.shape)) if k != numbers.rhs_spec[0]])
    if kernel.data or not kernel.leaves():
        walk.sight(*ins)
        walk.meet_noise(kernel, numbers.rhs_spec[1:], numbers.rhs_spec[:1])
        walk.contract_again(kernel, numbers.rhs_spec[1:] if data.data else (), numbers.rhs_spec[:1])
        return [{}]
    (out_axis, in_axis), at = numbers.rhs_spec[:2], numbers.out_spec[1]
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
        own = Places(ids.base, (ids.steps[out_axis],))
        grouped = own if groups == 1 else own.reshape((groups, outputs // groups))
        if grouped is None:
            walk.unknown[path] = "the outputs of its groups are mixed in an order that axes do not express"
            continue
        lead, moved = len(grouped.steps) - 1, Places(grouped.base, (*grouped.steps, *rest))
        inputs = tuple(range(lead + 1, len(moved.steps)))
        window = tuple(k for k in inputs if k != lead + 1 + in_axis - (in_axis > out_axis))
        product = Product(path, moved, inputs, tuple(range(lead)), data.before, window=window)
        tags[len(walk.products)] = Places.of([outputs]).at([at], eqn.outvars[0].aval.shape)
        walk.products.append(product)
    return [Value((), tags, before=frozenset(kernel.leaves()))]


def _ragged(walk: Walk, eqn: Any, ins: list[Value]) -> Sequence[Tags | Value]:
    """Multiplies each row by the matrix of its group: (rows, k) and (groups, k, columns), in any order of axes."""
    rows, kernel = ins[:2]
    if kernel.data or (places := ragged_places(eqn)) is None:
        return _unknown(walk, eqn, ins)
    tags = walk.contract(kernel, rows, places[2:3], places[1:2])
    out = tuple(eqn.outvars[0].aval.shape)
    made = {n: x.take(0, 0).at([1], out) for n, x in tags.items()}
    return [Value((), made, before=frozenset(kernel.leaves()))]


_RULES: Mapping[str, Callable[[Walk, Any, list[Value]], Sequence[Any]]] = {
    **dict.fromkeys(_MOVES, _move),
    **dict.fromkeys(("pad", "tile"), _padded),
    **dict.fromkeys(("gather", "dynamic_slice"), _indexed),
    **dict.fromkeys(("concatenate", "stack"), _joined),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "reduce_prod"), _reduced),
    **dict.fromkeys(("sort", "top_k", "approx_top_k", "reduce_and", "reduce_or"), _sorted),
    **dict.fromkeys(("cholesky", "custom_linear_solve", "eig", "eigh", "fft", "lu", "qr", "schur", "svd",
                     "triangular_solve", "dynamic_update_slice", *SCATTERS), _unknown),
    "optimization_barrier": lambda walk, eqn, ins: [x.tags for x in ins],
    **dict.fromkeys(("slice", "split", "rev"), _parts),
    "unstack": _unstack, "eq": _compared, "dot_general": _dot, "ragged_dot": _ragged,
    "ragged_dot_general": _ragged, "conv_general_dilated": _convolution,
}


# Control flow ---------------------------------------------------------------------------------------------


def _either(*lists: Sequence[Value]) -> list[Value]:
    """Merges lists of values of which control flow takes one, such as the results of two branches."""
    return [
        first._replace(
            tags={own: x for value in (*others, first) for own, x in value.tags.items()}, constant=None,
            params=any(x.params for x in (first, *others)), data=any(x.data for x in (first, *others)),
            before=first.before.union(*(x.before for x in others)), row=any(x.row for x in (first, *others)))
        for first, *others in zip(*lists, strict=True)
    ]


def _loop(walk: Walk, eqn: Any, ins: list[Value]) -> list[Value]:
    """Walks a scan or a while. It walks the body again until `params`, `data` and `before` of the carry stay the same.

    Only the products and pairs of the last walk over the body are kept.
    """
    body, consts, carry, stacks = loop_parts(eqn, ins)
    rows = []
    # Does the loop run over data, such as time steps? Random keys, whose dtype is unsigned, do not count as data: they
    # may be one per layer. A loop that takes kernels runs over layers, whatever data it takes as well.
    kinds = [getattr(v.aval.dtype, "kind", "") for v in eqn.invars[len(eqn.invars) - len(stacks) :]]
    kernels = any(sum(n > 1 for n in value.shape[1:]) > 1 for value in stacks if value.leaves() and not value.data)
    walk.turns.append(not kernels and any(
        value.data and kind not in ("", "u") for value, kind in zip(stacks, kinds, strict=True)))
    for value in stacks:
        if not value.data:
            walk.turned |= value.leaves().keys() if walk.turns[-1] else set()
            walk.counted |= {(path, a) for path, ids in value.leaves().items()
                             for a in varying(ids, 0, walk.shapes[path])}
        tags = value.moved(lambda x: x.take(0, 0))
        rows.append(value._replace(shape=value.shape[1:], tags=tags, constant=None))
    carry, same = [value._replace(constant=None) for value in carry], False
    while not same:
        start = len(walk.products), len(walk.pairs)
        outs = walk.run(body.jaxpr, body.consts, [*consts, *carry, *rows])
        after = _either(carry, outs[: len(carry)])
        same = all((a.params, a.data, a.before) == (b.params, b.data, b.before)
                   for a, b in zip(carry, after, strict=True))
        if not same:
            carry = [value._replace(tags={own: x for own, x in value.tags.items() if own in before.tags})
                     for value, before in zip(after, carry, strict=True)]
            del walk.products[start[0] :], walk.pairs[start[1] :]
    walk.turns.pop()
    return after + [
        value._replace(shape=(eqn.params["length"], *value.shape), constant=None, tags=value.moved(
            lambda x: Places(x.base, (np.zeros(eqn.params["length"], int), *x.steps))))
        for value in outs[len(carry) :]
    ]


def _branches(walk: Walk, eqn: Any, ins: list[Value]) -> list[Value]:
    return _either(*(walk.run(branch.jaxpr, branch.consts, ins[1:]) for branch in eqn.params["branches"]))
