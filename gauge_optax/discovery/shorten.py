"""Evaluates a traced function on shorter axes: every operation gets only those entries of each axis that are kept.

A function that checks its shapes, as Flax's modules do, cannot be called on a smaller tree. But the walk over its
jaxpr (`trace`) knows which entries of different axes belong together: they have one *index* (one id of `spaces`). A
hidden unit, for example, is a column of one kernel and a row of the next. If an index is dropped, every operation can
leave out the entries that have it, whatever lengths are written in the function's code. `shrink` decides which indices
are dropped.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gauge_optax.discovery.interpret import applied, called, interpret, loop_parts, ranges_taken
from gauge_optax.discovery.rules import SCATTERS, Axes, Value, is_elementwise, registering
from gauge_optax.discovery.sketch import Function, Leaves
from gauge_optax.discovery.spaces import Axis, Spaces
from gauge_optax.discovery.trace import Trace, literal, traced_once, walk

_MEANS = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "convert_element_type", "copy", "neg"}


class Refused(Exception):
    """An operation has no shorter form, or none that is known."""


class _Short(NamedTuple):
    """A value of the shorter program.

    Attributes:
      value: what the walk knows of it: the ids of its axes before entries were dropped. Axes without ids lose no entry.
      array: its entries that are kept.
      summed: if it is a sum, the number of its terms at full length, and their number after entries were dropped; else
        (1, 1). The function's means divide by the first number, and must divide by the second (`_mean`).
    """

    value: Value
    array: Any
    summed: tuple[int, int] = (1, 1)


def shorter(fn: Function, leaves: Leaves, batch: Any, dropped: Callable[[Trace], set[int]]) -> tuple[Function, Leaves]:
    """Makes a function that evaluates the operations of fn without some indices of their axes, on shorter leaves.

    Args:
      fn: (leaves, batch) to a list of outputs.
      leaves: float64 leaves by path.
      batch: one of the batches; the function is called with others, too.
      dropped: function of the walk over fn; returns representatives of the ids to leave out.

    Returns:
      The function of the shorter leaves, whose outputs have all entries that are not dropped; and the shorter leaves.

    Raises:
      Refused: an operation has no shorter form.

    >>> tree = {"up": np.ones((2, 3)), "down": np.ones((3, 2))}
    >>> fn = lambda p, x: [jax.nn.relu(x @ p["up"]).reshape(5, 3) @ p["down"]]
    >>> short, leaves = shorter(fn, tree, np.ones((5, 2)), lambda trace: {trace.spaces.key(trace.leaves["up"][1])[2]})
    >>> leaves["up"].shape, short(leaves, np.ones((5, 2)))[0][0].tolist()
    ((2, 2), [4.0, 4.0])
    """
    paths, number = sorted(leaves), len(leaves)  # in the order of a flat dict

    def traced(flat: Sequence[Any], structure: Any) -> core.ClosedJaxpr:
        return jax.make_jaxpr(lambda *x: list(inspect.unwrap(fn)(*jax.tree.unflatten(structure, x))))(*flat)

    flat, structure = jax.tree.flatten((dict(leaves), batch))
    trace = walk(traced(flat, structure), paths)
    kept = _Kept(trace.spaces, dropped(trace))
    small = {path: _taken(leaves[path], axes, kept) for path, axes in trace.leaves.items()}
    shapes = [jax.ShapeDtypeStruct(leaves[path].shape, leaves[path].dtype) for path in paths]
    order = list(leaves)
    del leaves, flat  # so that `function` keeps no large leaf in memory

    def function(given: Any, batch: Any) -> Any:
        arrays, structure = jax.tree.flatten(({path: given[path] for path in paths}, batch))
        closed = traced(shapes + [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[number:]], structure)
        args = map(_Short, trace.inputs(closed.jaxpr.invars), arrays)
        return [out.array for out in _Evaluation(trace.spaces, kept).run(closed.jaxpr, closed.consts, list(args))]

    return traced_once(function), {path: small[path] for path in order}


class _Kept:
    """Which entries of an axis are kept."""

    def __init__(self, spaces: Spaces, dropped: set[int]) -> None:
        self._spaces, self._dropped, self._known = spaces, dropped, dict[int, bool]()
        self._axes = dict[bytes, np.ndarray]()

    def __call__(self, axis: np.ndarray) -> np.ndarray:
        """Positions of the entries that are kept."""
        ids = self._spaces.canon(axis)
        if (key := ids.tobytes()) not in self._axes:
            self._axes[key] = np.flatnonzero([self._index(x) for x in ids.tolist()])
        return self._axes[key]

    def _index(self, index: int) -> bool:
        """Whether an id is kept: it is not dropped, and if it is a cell of a grid, its components are kept too."""
        if index not in self._known:
            grid = self._spaces.grids.get(index)
            components = [] if grid is None else self._spaces.canon(np.array(grid.components)).tolist()
            self._known[index] = index not in self._dropped and all(map(self._index, components))
        return self._known[index]

    def cuts(self, axis: Axis) -> bool:
        """Whether some entries of an axis are dropped."""
        return axis is not None and len(self(axis)) < len(axis)


def _taken(leaf: Any, axes: Axes, kept: _Kept) -> np.ndarray:
    for k, axis in enumerate(axes):
        if axis is not None:
            leaf = np.take(leaf, kept(axis), k)
    return np.ascontiguousarray(leaf)


def _times(summed: tuple[int, int], shape: Sequence[int], left: Sequence[int], axes: Sequence[int]) -> tuple[int, int]:
    """The numbers `summed` after a further sum over `axes`: `shape` is the full shape, `left` the shape after cuts."""
    return summed[0] * math.prod(shape[k] for k in axes), summed[1] * math.prod(left[k] for k in axes)


# A walk that evaluates ------------------------------------------------------------------------------------


class _Evaluation:
    """Evaluates a jaxpr on shorter arrays, and walks over it at the same time to know the ids of their axes."""

    def __init__(self, spaces: Spaces, kept: _Kept) -> None:
        self.trace, self.kept = Trace(spaces, {}), kept

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[_Short]) -> list[_Short]:
        """The outputs of a jaxpr."""
        return interpret(jaxpr, consts, args, lambda x: _Short(literal(x), x), self._equation)

    def _equation(self, eqn: Any, ins: list[_Short]) -> list[_Short]:
        name = eqn.primitive.name
        try:
            if name == "shard_map":
                raise Refused("a function of parts on devices")
            if name in ("scan", "cond"):
                return (self._scan if name == "scan" else self._cond)(eqn, ins)
            if call := called(eqn, ins):
                return self.run(*call)
            outs = self.trace.equation(eqn, [x.value for x in ins])
            arrays: Sequence[Any] = [value.constant for value in outs]
            if any(x is None for x in arrays):
                arrays = self._arrays(eqn, ins, [value.axes for value in outs])
                arrays = [self._mean(eqn, ins, x) for x in arrays]
        except (TypeError, ValueError, IndexError) as error:
            raise Refused(f"{name}: {error}") from error
        return self._results(eqn, outs, arrays, self._summed(eqn, ins))

    def _results(
        self, eqn: Any, values: Sequence[Value], arrays: Sequence[Any], summed: tuple[int, int] = (1, 1)
    ) -> list[_Short]:
        """The results of an equation; raises `Refused` if an array does not have the shape of its kept entries."""
        for value, x, variable in zip(values, arrays, eqn.outvars, strict=True):
            shape = getattr(variable.aval, "shape", None)
            if shape is not None and jnp.shape(x) != self.left(value.axes, shape):
                raise Refused(f"{eqn.primitive.name}: {jnp.shape(x)} in place of {self.left(value.axes, shape)}")
        return [_Short(value, x, summed) for value, x in zip(values, arrays, strict=True)]

    def left(self, axes: Axes, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that an array of this shape, with these axes, has after entries are dropped."""
        return tuple(n if axis is None else len(self.kept(axis)) for axis, n in zip(axes, shape, strict=True))

    def aligned(self, x: _Short, axes: Sequence[Axis]) -> Any:
        """The array of x, cut to the kept entries of `axes` along those of its own axes that have no ids.

        Another operand of the operation has these `axes`, and has lost entries along them.
        """
        array = x.array
        for k, (own, axis) in enumerate(zip(x.value.axes, axes, strict=True)):
            if own is None and axis is not None and jnp.shape(array)[k] == len(axis) and self.kept.cuts(axis):
                array = jnp.take(jnp.asarray(array), self.kept(axis), k)
        return array

    def meeting(self, x: _Short, other: _Short, pairs: Sequence[tuple[int, int]]) -> Any:
        """The array of x, `aligned` with `other`: `pairs` has (axis of x, axis of `other`) for axes that must match."""
        axes: Axes = [None] * len(x.value.axes)
        for mine, its in pairs:
            axes[mine] = other.value.axes[its]
        return self.aligned(x, axes)

    def _arrays(self, eqn: Any, ins: list[_Short], outs: list[Axes]) -> Sequence[Any]:
        """The arrays that an equation computes from the kept entries of its inputs."""
        name = eqn.primitive.name
        if name in ("slice", "split"):
            return [_part(self.kept, ins[0], eqn.invars[0].aval.shape, ranges) for ranges in ranges_taken(eqn)]
        default = _elementwise if is_elementwise(name) else _unchanged
        arrays, params = _SHORTER.get(name, default)(self, eqn, ins, outs)
        return applied(eqn, arrays, **params)

    def _summed(self, eqn: Any, ins: list[_Short]) -> tuple[int, int]:
        """`_Short.summed` of an equation's result: the numbers of a sum's terms in the full and the short function."""
        name, shapes = eqn.primitive.name, [getattr(v.aval, "shape", ()) for v in eqn.invars]
        if name == "reduce_sum":
            return _times(ins[0].summed, shapes[0], jnp.shape(ins[0].array), eqn.params["axes"])
        if name == "dot_general":  # a contraction with ones is a sum too
            for one, other, shape, axes in zip(ins, ins[::-1], shapes, eqn.params["dimension_numbers"][0], strict=True):
                if other.value.constant is not None and np.all(other.value.constant == 1):
                    return _times(one.summed, shape, jnp.shape(one.array), axes)
        return ins[0].summed if name in _MEANS else (1, 1)

    def _mean(self, eqn: Any, ins: list[_Short], x: Any) -> Any:
        """The result x of an equation, corrected if it is a mean, which is a sum divided by the number of its terms.

        The function has the number at full length as a constant. The corrected mean divides by the number of terms that
        are left.
        """
        name = eqn.primitive.name
        if name == "dot_general":
            for one, other, v, axes in zip(ins, ins[::-1], eqn.invars, eqn.params["dimension_numbers"][0], strict=True):
                whole, left = _times((1, 1), v.aval.shape, jnp.shape(one.array), axes)
                by = other.value.constant
                if whole != left and by is not None and np.allclose(by, 1 / whole, rtol=1e-6, atol=0):
                    return x * (whole / left)
        for one, other in (ins, ins[::-1]) if name == "mul" else (ins,) if name == "div" else ():
            (whole, left), by = one.summed, other.value.constant
            if whole != left and by is not None and np.size(by) == 1:
                number = float(np.reshape(by, ())) ** (1 if name == "div" else -1)
                if math.isclose(number, whole, rel_tol=1e-6):
                    return x * (whole / left)
        return x

    # Control flow -------------------------------------------------------------------------------------

    def _scan(self, eqn: Any, ins: list[_Short]) -> list[_Short]:
        body, consts, carry, xs = loop_parts(eqn, ins)
        count, outs = len(carry), self.trace.equation(eqn, [x.value for x in ins])
        start = [self.aligned(x, value.axes) for x, value in zip(carry, outs, strict=False)]
        lead = self.trace.spaces.unify(*(x.value.axes[0] for x in xs))
        slices = [self.aligned(x, [lead, *x.value.axes[1:]]) for x in xs]
        inner = [value._replace(axes=value.axes[1:]) for value in outs[count:]]

        def step(arrays: Any, slices: Any) -> Any:
            before = [_Short(value, x) for value, x in zip(outs, arrays, strict=False)]
            taken = [_Short(x.value._replace(axes=x.value.axes[1:], constant=None), y)
                     for x, y in zip(xs, slices, strict=True)]
            found = self.run(body.jaxpr, body.consts, [*consts, *before, *taken])
            ends = [self.aligned(x, value.axes) for x, value in zip(found, [*outs[:count], *inner], strict=True)]
            return ends[:count], ends[count:]

        length = eqn.params["length"] if lead is None else len(self.kept(lead))
        after, stacked = jax.lax.scan(
            step, list(map(jnp.asarray, start)), slices, length=length, reverse=eqn.params["reverse"])
        return self._results(eqn, outs, [*after, *stacked])

    def _cond(self, eqn: Any, ins: list[_Short]) -> list[_Short]:
        outs = self.trace.equation(eqn, [x.value for x in ins])

        def of(branch: Any) -> Callable[..., Any]:
            def run(*arrays: Any) -> Any:
                found = self.run(branch.jaxpr, branch.consts, [x._replace(array=y) for x, y in zip(
                    ins[1:], arrays, strict=True)])
                return [self.aligned(x, value.axes) for x, value in zip(found, outs, strict=True)]

            return run

        found = jax.lax.switch(ins[0].array, list(map(of, eqn.params["branches"])), *(x.array for x in ins[1:]))
        return self._results(eqn, outs, found)


# Operations that need a rule: their `params` contain lengths of axes, or they contract axes ------------------

Operands = tuple[Sequence[Any], dict[str, Any]]
"""An operation's operands without what is dropped, and those of its parameters that change."""
Rule = Callable[["_Evaluation", Any, list[_Short], list[Axes]], Operands]
_SHORTER: dict[str, Rule] = {}
_operation = registering(_SHORTER)


def _unchanged(run: _Evaluation, eqn: Any, ins: list[_Short], outs: list[Axes]) -> Operands:
    """The operands as they are. `_results` checks that they give results of the right shapes."""
    return [x.array for x in ins], {}


def _elementwise(run: _Evaluation, eqn: Any, ins: list[_Short], outs: list[Axes]) -> Operands:
    return [run.aligned(x, outs[0]) if x.value.axes else x.array for x in ins], {}


@_operation("while")
def _while(run: _Evaluation, eqn: Any, ins: list[_Short], outs: list[Axes]) -> Operands:
    if any(run.kept.cuts(axis) for x in ins for axis in x.value.axes):
        raise Refused("a loop with a condition")
    return _unchanged(run, eqn, ins, outs)


@_operation("broadcast_in_dim", "reshape")
def _shaped(run: _Evaluation, eqn: Any, ins: list[_Short], outs: list[Axes]) -> Operands:
    name = "shape" if "shape" in eqn.params else "new_sizes"
    return [x.array for x in ins], {name: run.left(outs[0], eqn.outvars[0].aval.shape)}


@_operation("dot_general")
def _dot(run: _Evaluation, eqn: Any, ins: list[_Short], outs: list[Axes]) -> Operands:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    pairs = [*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)]
    return [run.meeting(ins[0], ins[1], pairs), run.meeting(ins[1], ins[0], [pair[::-1] for pair in pairs])], {}


@_operation("conv_general_dilated")
def _convolution(run: _Evaluation, eqn: Any, ins: list[_Short], outs: list[Axes]) -> Operands:
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    if groups == 1:
        pair = numbers.lhs_spec[1], numbers.rhs_spec[1]
        return [run.meeting(ins[0], ins[1], [pair]), run.meeting(ins[1], ins[0], [pair[::-1]])], {}
    columns, arrays = numbers.rhs_spec[0], [x.array for x in ins]
    depthwise = eqn.invars[1].aval.shape[columns] == groups
    return arrays, {"feature_group_count": jnp.shape(arrays[1])[columns]} if depthwise else {}


@_operation("gather")
def _gather(run: _Evaluation, eqn: Any, ins: list[_Short], outs: list[Axes]) -> Operands:
    numbers, (table, index) = eqn.params["dimension_numbers"], ins
    sizes = []
    for k, (size, length) in enumerate(zip(eqn.params["slice_sizes"], eqn.invars[0].aval.shape, strict=True)):
        sizes.append(jnp.shape(table.array)[k] if size == length else size)
        if size < length and (axis := table.value.axes[k]) is not None and run.kept.cuts(axis):
            # Indices that are no constants, such as tokens, are within the shorter table. Constant indices stay as they
            # are. They are right only if the kept rows are the first rows of the table, and include the indexed ones.
            rows, left = index.value.constant, len(run.kept(axis))
            there = rows is None or (run.kept(axis)[-1] < left and np.all((rows >= 0) & (rows < left)))
            if size > 1 or not there:
                raise Refused("rows of a table that are dropped")
    batching = list(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    return [table.array, run.meeting(index, table, batching)], {"slice_sizes": tuple(sizes)}


@_operation("dynamic_slice")
def _dynamic_slice(run: _Evaluation, eqn: Any, ins: list[_Short], outs: list[Axes]) -> Operands:
    found, lengths = list(eqn.params["slice_sizes"]), eqn.invars[0].aval.shape
    for k, (size, axis) in enumerate(zip(found, ins[0].value.axes, strict=True)):
        if size == lengths[k]:
            found[k] = jnp.shape(ins[0].array)[k]
        elif size > 1 and run.kept.cuts(axis):
            raise Refused("a part of an axis")
    return [x.array for x in ins], {"slice_sizes": tuple(found)}


@_operation("dynamic_update_slice", *SCATTERS)
def _update(run: _Evaluation, eqn: Any, ins: list[_Short], outs: list[Axes]) -> Operands:
    arrays, at = [x.array for x in ins], 1 if eqn.primitive.name == "dynamic_update_slice" else 2
    if len(ins[0].value.axes) == len(ins[at].value.axes):
        arrays[0], arrays[at] = (run.aligned(ins[k], outs[0]) for k in (0, at))
    return arrays, {}


@_operation("concatenate")
def _concatenate(run: _Evaluation, eqn: Any, ins: list[_Short], outs: list[Axes]) -> Operands:
    others = [None if k == eqn.params["dimension"] else axis for k, axis in enumerate(outs[0])]
    return [run.aligned(x, others) for x in ins], {}


@_operation("stack")
def _stack(run: _Evaluation, eqn: Any, ins: list[_Short], outs: list[Axes]) -> Operands:
    return [run.aligned(x, [axis for k, axis in enumerate(outs[0]) if k != eqn.params["axis"]]) for x in ins], {}


# Parts of axes --------------------------------------------------------------------------------------------


def _part(kept: _Kept, x: _Short, full: Sequence[int], ranges: Sequence[range]) -> Any:
    """The kept entries of a slice that takes `ranges` from an array, one range per axis.

    Args:
      kept: which entries of an axis are kept.
      x: the array without dropped entries.
      full: its shape before entries were dropped.
      ranges: the slice's positions along each axis, counted before entries were dropped.
    """
    array = x.array
    for k, (axis, taken) in enumerate(zip(x.value.axes, ranges, strict=True)):
        if len(taken) == full[k]:
            continue
        entries = np.arange(full[k]) if axis is None else kept(axis)
        at = np.flatnonzero(np.isin(entries, taken))  # where the part stands among the entries that are kept
        step = int(at[1] - at[0]) if len(at) > 1 else 1
        if not len(at) or (np.diff(at) != step).any():
            raise Refused("a part of an axis")
        array = jax.lax.slice_in_dim(array, int(at[0]), int(at[-1]) + 1, step, k)
    return array
