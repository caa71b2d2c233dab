"""A traced function with shorter axes: each of its operations, on the entries of every axis that are kept.

A function that checks its shapes, as Flax's modules do, cannot be called on a smaller tree. The walk over its jaxpr
(`trace`) knows of every value which entries of which axes are one index. So the operations can be evaluated without the
entries whose indices are dropped, whatever lengths the function has in its code. Which indices are dropped is decided
in `shrink`.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gauge_optax.discovery.rules import SCATTERS, Axes, Value, is_elementwise
from gauge_optax.discovery.sketch import Function, Leaves
from gauge_optax.discovery.spaces import Axis, Spaces
from gauge_optax.discovery.trace import PASSES, Trace, called_jaxpr, literal
from gauge_optax.traced import loop_counts, traced_once

_MEANS = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "convert_element_type", "copy", "neg"}


class Refused(Exception):
    """An operation has no shorter form, or it is not known."""


class Short(NamedTuple):
    """A value of the shorter program.

    Attributes:
      value: what the walk knows of it: the ids of its axes before entries were dropped; an axis without ids is whole.
      array: its entries that are kept.
      summed: over how many entries it is a sum, of all and of those that are kept: a mean divides by their number.
    """

    value: Value
    array: Any
    summed: tuple[int, int] = (1, 1)


def shorter(fn: Function, leaves: Leaves, batch: Any, dropped: Callable[[Trace], set[int]]) -> tuple[Function, Leaves]:
    """A function without some indices, and its leaves.

    Args:
      fn: (leaves, batch) to a list of outputs.
      leaves: float64 leaves by path.
      batch: one of the batches; the function is called with others, too.
      dropped: of a walk, the representatives of the indices to leave out.

    Returns:
      The function of the shorter leaves, whose outputs have all entries that are left; and the shorter leaves.

    Raises:
      Refused: an operation has no shorter form.
    """
    paths, spaces, number = sorted(leaves), Spaces(), len(leaves)  # in the order of a flat dict
    axes: list[Axes] = [[spaces.fresh(n) if n > 1 else None for n in leaves[path].shape] for path in paths]

    def values(of: Sequence[Any]) -> list[Value]:
        of_leaves = [Value(list(own), None, True, path) for own, path in zip(axes, paths, strict=True)]
        return [*of_leaves, *(Value([None] * len(x.shape)) for x in of[number:])]

    def traced(flat: Sequence[Any], structure: Any) -> core.ClosedJaxpr:
        return jax.make_jaxpr(lambda *x: list(inspect.unwrap(fn)(*jax.tree.unflatten(structure, x))))(*flat)

    flat, structure = jax.tree.flatten((dict(leaves), batch))
    whole, before = traced(flat, structure), -1
    for _ in range(PASSES):
        if before == spaces.changes:
            break
        before, trace = spaces.changes, Trace(spaces, dict(zip(paths, axes, strict=True)))
        trace.run(whole.jaxpr, whole.consts, values([*flat[:number], *map(jnp.asarray, flat[number:])]))
        spaces.close()
    kept = _Kept(spaces, dropped(trace))
    small = {path: _taken(leaves[path], own, kept) for path, own in zip(paths, axes, strict=True)}
    shapes = [jax.ShapeDtypeStruct(leaves[path].shape, leaves[path].dtype) for path in paths]
    order = list(leaves)
    del leaves, flat  # the function needs no large leaf

    def function(given: Any, batch: Any) -> Any:
        arrays, structure = jax.tree.flatten(({path: given[path] for path in paths}, batch))
        full = shapes + [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[number:]]
        closed = traced(full, structure)
        args = [Short(value, x) for value, x in zip(values(full), arrays, strict=True)]
        return [out.array for out in _Evaluation(spaces, kept).run(closed.jaxpr, closed.consts, args)]

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
        """A cell of a grid is kept where all its components are."""
        if index not in self._known:
            grid = self._spaces.grids.get(index)
            components = [] if grid is None else self._spaces.canon(np.array(grid.components)).tolist()
            self._known[index] = index not in self._dropped and all(map(self._index, components))
        return self._known[index]

    def cuts(self, axis: Axis) -> bool:
        """Whether some entries are dropped."""
        return axis is not None and len(self(axis)) < len(axis)


def _taken(leaf: Any, axes: Axes, kept: _Kept) -> np.ndarray:
    for k, axis in enumerate(axes):
        if axis is not None:
            leaf = np.take(leaf, kept(axis), k)
    return np.ascontiguousarray(leaf)


def _times(summed: tuple[int, int], shape: Sequence[int], left: Sequence[int], axes: Sequence[int]) -> tuple[int, int]:
    """A sum over these axes as well."""
    return summed[0] * math.prod(shape[k] for k in axes), summed[1] * math.prod(left[k] for k in axes)


# Operations ---------------------------------------------------------------------------------------------


class _Evaluation:
    """Evaluates a jaxpr on shorter arrays, beside a walk that says what they are."""

    def __init__(self, spaces: Spaces, kept: _Kept) -> None:
        self.trace, self.kept = Trace(spaces, {}), kept

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Short]) -> list[Short]:
        """The outputs."""
        values: dict[Any, Short] = {v: Short(literal(x), x) for v, x in zip(jaxpr.constvars, consts, strict=True)}
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Short:
            return Short(literal(atom.val), atom.val) if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            values.update(zip(eqn.outvars, self._equation(eqn, list(map(read, eqn.invars))), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Short]) -> list[Short]:
        name = eqn.primitive.name
        if name in ("scan", "cond"):
            return (self._scan if name == "scan" else self._cond)(eqn, ins)
        if inlined := called_jaxpr(eqn):
            return self.run(*inlined, ins[len(ins) - len(inlined[0].invars) :])
        found = self.trace.outputs(eqn, [x.value for x in ins])
        depends = any(x.value.depends for x in ins)
        outs = [value if value.constant is not None else value._replace(depends=depends) for value in found]
        arrays: Sequence[Any]
        if all(value.constant is not None for value in outs):
            arrays = [value.constant for value in outs]
        else:
            try:
                arrays = self._arrays(eqn, ins, [value.axes for value in outs])
            except (TypeError, ValueError, IndexError) as error:
                raise Refused(f"{name}: {error}") from error
            arrays = [self._mean(eqn, ins, x) for x in arrays]
        return [
            self._checked(name, Short(value, x, self._summed(eqn, ins)), variable.aval)
            for value, x, variable in zip(outs, arrays, eqn.outvars, strict=True)
        ]

    def _checked(self, name: str, out: Short, aval: Any) -> Short:
        """The value, if its array has the entries that its axes say."""
        if getattr(aval, "shape", None) is not None and jnp.shape(out.array) != self._shape(out.value.axes, aval.shape):
            raise Refused(f"{name}: {jnp.shape(out.array)} in place of {self._shape(out.value.axes, aval.shape)}")
        return out

    def _shape(self, axes: Axes, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that is left."""
        return tuple(n if axis is None else len(self.kept(axis)) for axis, n in zip(axes, shape, strict=True))

    def _aligned(self, x: Short, axes: Sequence[Axis]) -> Any:
        """An array without the entries that others drop along axes of which it has no ids."""
        array = x.array
        for k, (own, axis) in enumerate(zip(x.value.axes, axes, strict=True)):
            if own is None and axis is not None and jnp.shape(array)[k] == len(axis) and self.kept.cuts(axis):
                array = jnp.take(jnp.asarray(array), self.kept(axis), k)
        return array

    def _arrays(self, eqn: Any, ins: list[Short], outs: list[Axes]) -> Sequence[Any]:
        """What an equation computes, on what is kept of its inputs."""
        name, params = eqn.primitive.name, dict(eqn.params)
        full = [tuple(getattr(v.aval, "shape", ())) for v in eqn.invars]
        shape = self._shape(outs[0], eqn.outvars[0].aval.shape) if outs else ()
        arrays: list[Any] = [x.array for x in ins]
        if name in ("slice", "split"):
            return self._parts(eqn, ins[0])
        if name == "while" and any(self.kept.cuts(axis) for x in ins for axis in x.value.axes):
            raise Refused("a loop with a condition")
        if name == "broadcast_in_dim":
            params["shape"] = shape
        elif name == "reshape":
            params["new_sizes"] = shape
        elif name == "dot_general":
            (left, right), (left_batch, right_batch) = params["dimension_numbers"]
            pairs = [*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)]
            arrays = [self._aligned(x, self._paired(x, y, [pair[::way] for pair in pairs]))
                      for x, y, way in ((ins[0], ins[1], 1), (ins[1], ins[0], -1))]
        elif name == "conv_general_dilated":
            numbers, groups = params["dimension_numbers"], params["feature_group_count"]
            inner, columns = numbers.lhs_spec[1], numbers.rhs_spec[0]
            if groups == 1:
                arrays[0] = self._aligned(ins[0], self._paired(ins[0], ins[1], [(inner, numbers.rhs_spec[1])]))
                arrays[1] = self._aligned(ins[1], self._paired(ins[1], ins[0], [(numbers.rhs_spec[1], inner)]))
            elif full[1][columns] == groups:
                params["feature_group_count"] = jnp.shape(arrays[1])[columns]
        elif name == "gather":
            table, index, sizes = ins[0].value.axes, ins[1], list(params["slice_sizes"])
            numbers = params["dimension_numbers"]
            for k, size in enumerate(sizes):
                if size == full[0][k]:
                    sizes[k] = jnp.shape(arrays[0])[k]
                elif self.kept.cuts(table[k]) and (size > 1 or self._beyond(index, numbers, k, table[k])):
                    raise Refused("constant rows of a table that are dropped")
            params["slice_sizes"] = tuple(sizes)
            batching = zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
            arrays[1] = self._aligned(index, self._paired(index, ins[0], list(batching)))
        elif name == "dynamic_slice":
            for k, size in enumerate(params["slice_sizes"]):
                if size < full[0][k] and size > 1 and self.kept.cuts(ins[0].value.axes[k]):
                    raise Refused("a part of an axis")
            params["slice_sizes"] = tuple(
                n if size == length else size
                for size, length, n in zip(params["slice_sizes"], full[0], jnp.shape(arrays[0]), strict=True))
        elif name in ("dynamic_update_slice", *SCATTERS):
            at = 1 if name == "dynamic_update_slice" else 2
            if len(full[0]) == len(full[at]):
                arrays[0], arrays[at] = (self._aligned(ins[k], outs[0]) for k in (0, at))
        elif name == "concatenate":
            others = [None if k == params["dimension"] else axis for k, axis in enumerate(outs[0])]
            arrays = [self._aligned(x, others) for x in ins]
        elif name == "stack":
            arrays = [self._aligned(x, [a for k, a in enumerate(outs[0]) if k != params["axis"]]) for x in ins]
        elif outs and is_elementwise(name):
            arrays = [self._aligned(x, outs[0]) if s else x.array for x, s in zip(ins, full, strict=True)]
        out = eqn.primitive.bind(*map(jnp.asarray, arrays), **params)
        return out if eqn.primitive.multiple_results else [out]

    def _paired(self, x: Short, other: Short, pairs: Sequence[tuple[int, int]]) -> Axes:
        """For each axis of x, the axis of another value that it meets."""
        axes: Axes = [None] * len(x.value.axes)
        for mine, its in pairs:
            axes[mine] = other.value.axes[its]
        return axes

    def _beyond(self, index: Short, numbers: Any, axis: int, table: Any) -> bool:
        """Whether a constant index takes rows that are dropped."""
        if index.value.constant is None or axis not in numbers.start_index_map:
            return False
        rows = np.asarray(index.value.constant)[..., numbers.start_index_map.index(axis)]
        return not np.isin(rows % len(table), self.kept(table)).all() or self.kept(table)[-1] >= len(self.kept(table))

    def _parts(self, eqn: Any, x: Short) -> list[Any]:
        """What is kept of the parts that a slice or split takes."""
        params, full = eqn.params, eqn.invars[0].aval.shape
        if eqn.primitive.name == "split":
            ends, at = np.cumsum([0, *params["sizes"]]).tolist(), params["axis"]
            wanted = [[range(a, b) if k == at else range(n) for k, n in enumerate(full)]
                      for a, b in itertools.pairwise(ends)]
        else:
            strides = params["strides"] or [1] * len(full)
            wanted = [list(map(range, params["start_indices"], params["limit_indices"], strides))]
        parts = []
        for ranges in wanted:
            array = x.array
            for k, (axis, taken) in enumerate(zip(x.value.axes, ranges, strict=True)):
                if len(taken) == full[k]:
                    continue
                kept = np.arange(full[k]) if axis is None else self.kept(axis)
                at = np.flatnonzero(np.isin(kept, taken))  # where entries of the part stand among those that are kept
                step = int(at[1] - at[0]) if len(at) > 1 else 1
                if not len(at) or (np.diff(at) != step).any():
                    raise Refused("a part of an axis")
                array = jax.lax.slice_in_dim(array, int(at[0]), int(at[-1]) + 1, step, k)
            parts.append(array)
        return parts

    def _summed(self, eqn: Any, ins: list[Short]) -> tuple[int, int]:
        """Over how many entries the result is a sum, of all and of those that are kept."""
        name, shapes = eqn.primitive.name, [getattr(v.aval, "shape", ()) for v in eqn.invars]
        if name == "reduce_sum":
            return _times(ins[0].summed, shapes[0], jnp.shape(ins[0].array), eqn.params["axes"])
        if name == "dot_general":  # a product by ones is a sum as well
            for one, other, shape, axes in zip(ins, ins[::-1], shapes, eqn.params["dimension_numbers"][0], strict=True):
                if other.value.constant is not None and np.all(other.value.constant == 1):
                    return _times(one.summed, shape, jnp.shape(one.array), axes)
        return ins[0].summed if name in _MEANS else (1, 1)

    def _mean(self, eqn: Any, ins: list[Short], x: Any) -> Any:
        """A sum over the number of its entries, which the function has as a constant: over the number that is left."""
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

    def _scan(self, eqn: Any, ins: list[Short]) -> list[Short]:
        first, count = loop_counts(eqn.params)
        consts, carry, xs = ins[:first], ins[first : first + count], ins[first + count :]
        outs = self.trace.outputs(eqn, [x.value for x in ins])
        body = eqn.params["jaxpr"]
        start = [self._aligned(x, value.axes) for x, value in zip(carry, outs, strict=False)]
        lead = self.trace.spaces.unify(*(x.value.axes[0] for x in xs))
        slices = [self._aligned(x, [lead, *x.value.axes[1:]]) for x in xs]
        inner = [value._replace(axes=value.axes[1:]) for value in outs[count:]]

        def step(arrays: Any, slices: Any) -> Any:
            before = [Short(value, x) for value, x in zip(outs, arrays, strict=False)]
            taken = [Short(x.value._replace(axes=x.value.axes[1:], constant=None), y)
                     for x, y in zip(xs, slices, strict=True)]
            found = self.run(body.jaxpr, body.consts, [*consts, *before, *taken])
            ends = [self._aligned(x, value.axes) for x, value in zip(found, [*outs[:count], *inner], strict=True)]
            return ends[:count], ends[count:]

        length = eqn.params["length"] if lead is None else len(self.kept(lead))
        after, stacked = jax.lax.scan(
            step, list(map(jnp.asarray, start)), slices, length=length, reverse=eqn.params["reverse"])
        return [self._checked("scan", Short(value, x), variable.aval)
                for value, x, variable in zip(outs, [*after, *stacked], eqn.outvars, strict=True)]

    def _cond(self, eqn: Any, ins: list[Short]) -> list[Short]:
        outs = self.trace.outputs(eqn, [x.value for x in ins])

        def of(branch: Any) -> Callable[..., Any]:
            def run(*arrays: Any) -> Any:
                found = self.run(branch.jaxpr, branch.consts, [x._replace(array=y) for x, y in zip(
                    ins[1:], arrays, strict=True)])
                return [self._aligned(x, value.axes) for x, value in zip(found, outs, strict=True)]

            return run

        found = jax.lax.switch(ins[0].array, list(map(of, eqn.params["branches"])), *(x.array for x in ins[1:]))
        return [self._checked("cond", Short(value, x), variable.aval)
                for value, x, variable in zip(outs, found, eqn.outvars, strict=True)]
