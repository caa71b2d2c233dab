"""What each JAX primitive does to the ids of axes (`spaces`): which it unites, contracts, moves or picks.

A rule maps the axes of an equation's operands to those of its results, and records in the `Trace` what `search` needs.
If a rule guesses wrong, the search may try a group that fails its proof; the guess never makes a false gauge. Control
flow is in `trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from gauge_optax.discovery.interpret import ranges_taken
from gauge_optax.discovery.spaces import Axis

if TYPE_CHECKING:
    from gauge_optax.discovery.trace import Trace

Axes = list[Axis]


class Value(NamedTuple):
    """What the walk knows of an intermediate array.

    Attributes:
      axes: the ids of each axis; None for an axis without ids.
      constant: its numbers, if they are few, do not depend on parameters, and the walk has computed them.
      depends: whether it depends on parameters.
      leaf: path of the parameter that it is, perhaps reshaped, transposed or sliced; "" if it is none.
      writers: paths of the kernels on whose products it depends linearly.
      vectors: paths of parameters that were added to it or multiplied with it since the last kernel or nonlinearity.
      number: for integers, a number that is equal for values which the same operations compute from the same inputs;
        None for all other values.

    >>> Value([None, np.arange(3)], leaf="kernel").depends
    False
    """

    axes: Axes
    constant: np.ndarray | None = None
    depends: bool = False
    leaf: str = ""
    writers: frozenset[str] = frozenset()
    vectors: frozenset[str] = frozenset()
    number: int | None = None


Rule = Callable[["Trace", Any, list[Value]], list[Axes]]
_RULES: dict[str, Rule] = {}


_Function = TypeVar("_Function")


def registering(registry: dict[str, _Function]) -> Callable[..., Callable[[_Function], _Function]]:
    """A decorator that gets the names of some primitives, and registers a function for them in `registry`.

    >>> known = {}
    >>> @registering(known)("add", "sub")
    ... def sums():
    ...     pass
    >>> sorted(known)
    ['add', 'sub']
    """

    def named(*names: str) -> Callable[[_Function], _Function]:
        def register(function: _Function) -> _Function:
            registry.update(dict.fromkeys(names, function))
            return function

        return register

    return named


_rule = registering(_RULES)


def _shapes(atoms: Sequence[Any]) -> list[tuple[int, ...]]:
    """Shapes of an equation's operands or results."""
    return [tuple(atom.aval.shape) for atom in atoms]


# Primitives without a rule ------------------------------------------------------------------------


def _default(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    """Unites the operands' axes that stand in one position, as in an entrywise operation.

    Scalars and axes of length one are broadcast. If other shapes differ, it guesses (`_opaque`).
    """
    results, operands = _shapes(eqn.outvars), _shapes(eqn.invars)
    fits = (not s or (len(s) == len(results[0]) and all(n in (1, m) for n, m in zip(s, results[0], strict=True)))
            for s in operands)
    if len(set(results)) != 1 or not all(fits):
        return _opaque(trace, eqn, ins)
    out = []
    for k, length in enumerate(results[0]):  # an operand's axis of length one is broadcast, and united with no other
        same = [value.axes[k] for value, shape in zip(ins, operands, strict=True) if shape and shape[k] == length]
        out.append(trace.spaces.unify(*same))
    return [list(out) for _ in eqn.outvars]


@_rule("mul")
def _product(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    """A product. Entries that a constant factor sets to zero get new ids, as where a rotary plane's sine is zero."""
    (axes,) = _default(trace, eqn, ins)
    constant = next((np.asarray(value.constant) for value in ins if value.constant is not None), None)
    if constant is None or constant.ndim != len(axes):
        return [axes]
    for k, axis in enumerate(axes):
        others = tuple(j for j in range(constant.ndim) if j != k)
        if axis is not None and constant.shape[k] == len(axis):
            zero = ~np.any(constant != 0, axis=others)
            axes[k] = np.where(zero, trace.spaces.nothing(id(eqn), k, len(axis)), axis) if zero.any() else axis
    return [axes]


def _opaque(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    """An operation whose body is not visible: axes of equal length in equal positions count as one space."""
    trace.opaque.add(eqn.primitive.name)
    operands, results, spaces = _shapes(eqn.invars), _shapes(eqn.outvars), trace.spaces
    rank = max(map(len, operands), default=0)
    outs: list[Axes] = [[None] * len(shape) for shape in results]
    for k in range(rank):
        of_length: dict[int, Any] = {}
        for value, shape in zip(ins, operands, strict=True):
            if len(shape) == rank and (axis := value.axes[k]) is not None:
                of_length[shape[k]] = spaces.unify(of_length.get(shape[k]), axis)
        for length, axis in of_length.items():
            trace.note(axis)
            for out, shape in zip(outs, results, strict=True):
                if len(shape) == rank and shape[k] == length:
                    out[k] = axis
        # Two lengths in one position are taken for query heads and key-value heads: the longer axis is a grid of the
        # shorter one and the rest.
        if len(of_length) == 2 and 1 < (few := min(of_length)) and (many := max(of_length)) % few == 0:
            if spaces.factors(of_length[many]) is None:
                spaces.unite_entries(spaces.split(of_length[many], [few, many // few])[0], of_length[few])
    for value in ins:
        for axis in value.axes:
            trace.note(axis, [other for other in value.axes if other is not axis])
    return outs


@_rule("optimization_barrier", "tie", "stage")
def _same(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    return [list(value.axes) for value in ins]


@_rule("iota", "random_bits", "random_wrap", "random_unwrap", "random_seed", "random_fold_in", "random_split",
      "threefry2x32", "rng_bit_generator", "create_token")
def _nothing(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    return [[None] * len(getattr(out.aval, "shape", ())) for out in eqn.outvars]


# Entries moved ------------------------------------------------------------------------------------


@_rule("broadcast_in_dim")
def _broadcast(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    out: Axes = [None] * len(eqn.params["shape"])
    for k, at in enumerate(eqn.params["broadcast_dimensions"]):
        if _shapes(eqn.invars)[0][k] == eqn.params["shape"][at]:
            out[at] = ins[0].axes[k]
    return [out]


@_rule("reshape")
def _reshape(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    axes, shape = ins[0].axes, _shapes(eqn.invars)[0]
    order = eqn.params["dimensions"] or range(len(axes))  # a convolution under vmap makes reshapes that transpose first
    return [trace.spaces.reshape([axes[k] for k in order], [shape[k] for k in order], eqn.params["new_sizes"])]


@_rule("transpose")
def _transpose(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    return [[ins[0].axes[k] for k in eqn.params["permutation"]]]


@_rule("squeeze")
def _squeeze(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    return [[axis for k, axis in enumerate(ins[0].axes) if k not in eqn.params["dimensions"]]]


@_rule("slice", "split", "rev")
def _parts(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    return [[trace.pick(axis, np.array(part), length)
             for axis, part, length in zip(ins[0].axes, ranges, _shapes(eqn.invars)[0], strict=True)]
            for ranges in ranges_taken(eqn)]


@_rule("dynamic_slice")
def _dynamic_slice(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    out: Axes = []
    slices = zip(ins[0].axes, _shapes(eqn.invars)[0], eqn.params["slice_sizes"], ins[1:], strict=True)
    for axis, length, size, at in slices:
        if size == length:
            out.append(axis)
        elif at.constant is not None:
            start = int(np.clip(at.constant, 0, length - size))
            out.append(trace.pick(axis, np.arange(start, start + size), length))
        else:
            out.append(None)
            if axis is not None and size == 1:  # a computed index of an axis: probably a loop over stacked layers
                trace.layers.append(axis)
                trace.stacked.append(axis)
    return [out]


SCATTERS = ("scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min")


@_rule("dynamic_update_slice", *SCATTERS)
def _update(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    at = 1 if eqn.primitive.name == "dynamic_update_slice" else 2
    target, update = _shapes(eqn.invars)[0], _shapes(eqn.invars)[at]
    if at == 2 and (ins[1].depends or len(target) != len(update)):
        numbers, out = eqn.params["dimension_numbers"], list(ins[0].axes)
        single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        whole = (k for k in range(len(target)) if k not in single)
        for k, j in zip(whole, numbers.update_window_dims, strict=True):
            out[k] = trace.spaces.unify(out[k], ins[2].axes[j]) if target[k] == update[j] else out[k]
        # Parameters may choose the index that is written to, as a router chooses an expert.
        for k in numbers.scatter_dims_to_operand_dims if ins[1].depends else ():
            out[k] = chosen = trace.spaces.nothing(id(eqn), k, target[k]) if out[k] is None else out[k]
            trace.ranked.append(chosen)
            trace.summed.append(chosen)
        return [out]
    pairs = zip(ins[0].axes, ins[at].axes, target, update, strict=True)
    return [[trace.spaces.unify(a, b) if n == m else a for a, b, n, m in pairs]]


@_rule("concatenate")
def _concatenate(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    at = eqn.params["dimension"]
    aligned = enumerate(zip(*(value.axes for value in ins), strict=True))
    out = [None if k == at else trace.spaces.unify(*axes) for k, axes in aligned]
    parts = [(value.axes[at], shape[at]) for value, shape in zip(ins, _shapes(eqn.invars), strict=True)]
    if any(axis is not None for axis, _ in parts):
        out[at] = np.concatenate([trace.spaces.fresh(n) if axis is None else axis for axis, n in parts])
        trace.concatenated.append([axis for axis, _ in parts if axis is not None])
    return [out]


@_rule("stack")
def _stack(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    out = [trace.spaces.unify(*axes) for axes in zip(*(value.axes for value in ins), strict=True)]
    out.insert(eqn.params["axis"], None)
    return [out]


@_rule("unstack")
def _unstack(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    out = list(ins[0].axes)
    trace.pick(out.pop(eqn.params["axis"]), np.zeros(1, int), len(eqn.outvars))
    return [list(out) for _ in eqn.outvars]


@_rule("tile")
def _tile(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    tiles = zip(ins[0].axes, _shapes(eqn.invars)[0], eqn.params["reps"], strict=True)
    return [[axis if times == 1 else trace.spaces.join([(None, times), (axis, n)]) for axis, n, times in tiles]]


@_rule("pad")
def _pad(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    out, fresh = list(ins[0].axes), trace.spaces.fresh
    for k, (low, high, inner) in enumerate(eqn.params["padding_config"]):
        axis, length = out[k], _shapes(eqn.invars)[0][k]
        if axis is not None:
            kept = axis[max(0, -low) : length + min(0, high)]
            out[k] = None if inner else np.concatenate([fresh(max(low, 0)), kept, fresh(max(high, 0))])
    return [out]


@_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "select_and_gather_add",
      "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _window(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    lengths = zip(ins[0].axes, _shapes(eqn.invars)[0], _shapes(eqn.outvars)[0], strict=True)
    kept = [axis if n == m else None for axis, n, m in lengths]
    return [list(kept) for _ in eqn.outvars]


@_rule("eq")
def _compare(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    """A comparison. If a value that depends on parameters is compared with a range of numbers, the range gets ids.

    This happens in one-hot codes. The range's axis then counts as one along which the function chooses, as a router
    chooses among experts.
    """
    (axes,) = _default(trace, eqn, ins)
    constant = next((value.constant for value in ins if value.constant is not None), None)
    if any(value.depends for value in ins) and constant is not None and np.ndim(constant) == len(axes):
        for k, axis in enumerate(axes):
            if axis is None and np.any(np.diff(constant, axis=k)):
                axes[k] = chosen = trace.spaces.nothing(id(eqn), k, np.shape(constant)[k])
                trace.ranked.append(chosen)
                trace.summed.append(chosen)
    return [axes]


@_rule("gather")
def _gather(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, index, shape = ins[0].axes, ins[1], _shapes(eqn.invars)[0]
    indexed, out = numbers.start_index_map, list[Axis]([None] * len(_shapes(eqn.outvars)[0]))
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    for at, k in zip(numbers.offset_dims, [k for k in range(len(sizes)) if k not in gone], strict=True):
        if sizes[k] == shape[k]:
            out[at] = table[k]
        elif index.constant is not None and k in indexed and np.size(index.constant) == len(indexed):
            start = int(index.constant.reshape(-1)[indexed.index(k)])
            out[at] = trace.pick(table[k], np.arange(start, start + sizes[k]), shape[k])
    spread = [k for k in range(len(out)) if k not in numbers.offset_dims]
    for at, axis in zip(spread, index.axes[:-1], strict=False):
        out[at] = axis
    for a, b in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        out[spread[b]] = trace.spaces.unify(out[spread[b]], table[a])
    for k in numbers.collapsed_slice_dims:
        trace.note(table[k])
        if table[k] is not None:
            trace.tables.append(table[k])
            if index.depends and not ins[0].leaf:  # parameters choose, as a router chooses an expert's result
                trace.ranked.append(table[k])
                trace.summed.append(table[k])
        if ins[0].leaf and len(indexed) == 1:
            trace.take(index, table, k)
        if len(indexed) == 1 and index.constant is not None and table[k] is not None:
            _constant_rows(trace, out, spread, table[k], shape[k], index.constant[..., 0])
    return [out]


def _constant_rows(trace: Trace, out: Axes, spread: list[int], axis: Any, length: int, rows: np.ndarray) -> None:
    """Sets the ids in `out` for the axis of a gather's result along which a table's rows are taken.

    If the indices repeat all rows equally often, this axis is a grid of rows and repeats.

    Args:
      trace: the walk over the function's jaxpr.
      out: ids of the result's axes.
      spread: the numbers of the result's axes that correspond to the axes of `rows`.
      axis: ids of the table's rows.
      length: number of rows.
      rows: the constant indices.
    """
    long = [k for k, n in enumerate(rows.shape) if n > 1]
    flat = np.where(rows < 0, rows + length, rows).reshape(-1)
    times = len(flat) // length
    if not long:
        trace.pick(axis, flat[:1], length)
    elif len(long) == 1 and times <= 1:
        out[spread[long[0]]] = axis[np.clip(flat, 0, length - 1)]
    elif len(long) == 1 and np.array_equal(flat, np.repeat(np.arange(length), times)):
        out[spread[long[0]]] = trace.spaces.join([(axis, length), (None, times)])
    elif len(long) == 1 and np.array_equal(flat, np.tile(np.arange(length), times)):
        out[spread[long[0]]] = trace.spaces.join([(None, times), (axis, length)])


# Axes contracted ----------------------------------------------------------------------------------


@_rule("dot_general")
def _dot(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = ins[0].axes, ins[1].axes
    if ins[0].leaf or ins[1].leaf:
        pairs = [(left[a], right[b]) for a, b in zip(left_sum, right_sum, strict=True)]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        trace.readers += [(value.leaf, pair[k]) for k, value in enumerate(ins) if value.leaf for pair in both]
    batch = [trace.spaces.unify(left[a], right[b]) for a, b in zip(left_batch, right_batch, strict=True)]
    summed = [trace.spaces.unify(left[a], right[b]) for a, b in zip(left_sum, right_sum, strict=True)]
    for axis in summed:
        trace.note(axis, [*batch, *(other for other in summed if other is not axis)])
    for axis in batch:
        trace.note(axis, [other for other in batch if other is not axis])
    spare_left = [axis for k, axis in enumerate(left) if k not in (*left_sum, *left_batch)]
    spare_right = [axis for k, axis in enumerate(right) if k not in (*right_sum, *right_batch)]
    return [[*batch, *spare_left, *spare_right]]


@_rule("ragged_dot", "ragged_dot_general")
def _ragged_dot(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    """Multiplies each row by the matrix of its group: (rows, k) and (groups, k, columns), in any order of axes."""
    if (places := ragged_places(eqn)) is None:
        return _opaque(trace, eqn, ins)
    at, *rest = places
    left, (groups, inner, columns) = ins[0].axes, (ins[1].axes[k] for k in rest)
    # Kernels whose groups have the same rows have the same experts.
    rows = eqn.invars[2] if ins[2].constant is None else ins[2].constant.tobytes()
    trace.grouped[rows] = groups = trace.spaces.unify(trace.grouped.get(rows), groups)
    trace.note(trace.spaces.unify(left[at], inner), [groups])
    trace.note(groups)
    trace.note(columns, [groups])
    return [[left[1 - at], columns]]


def ragged_places(eqn: Any) -> tuple[int, int, int, int] | None:
    """The axes of a `ragged_dot`: the contracted one of the rows, and the kernel's groups, inputs and outputs.

    The result is None for a `ragged_dot` that does not multiply the rows of every group by one matrix of that group.

    >>> fn = lambda x, kernel: jax.lax.ragged_dot(x, kernel, jnp.array([1, 3]))
    >>> ragged_places(jax.make_jaxpr(fn)(jnp.ones((4, 6)), jnp.ones((2, 6, 5))).eqns[-1])
    (1, 0, 1, 2)
    """
    numbers, ranks = eqn.params["ragged_dot_dimension_numbers"], [len(shape) for shape in _shapes(eqn.invars[:2])]
    (left, right), (batch, _) = numbers.dot_dimension_numbers
    if ranks != [2, 3] or batch or len(left) != 1 or len(numbers.rhs_group_dimensions) != 1:
        return None
    group, inner = numbers.rhs_group_dimensions[0], right[0]
    return left[0], group, inner, 3 - group - inner


@_rule("conv_general_dilated")
def _convolution(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    data, kernel = ins[0].axes, ins[1].axes
    inner, columns = data[numbers.lhs_spec[1]], kernel[numbers.rhs_spec[0]]
    if groups == 1:
        trace.note(trace.spaces.unify(inner, kernel[numbers.rhs_spec[1]]))
    elif eqn.invars[1].aval.shape[numbers.rhs_spec[1]] == 1 and inner is not None and columns is not None:
        # Depthwise: channels do not mix. Each has one filter, or several.
        each = trace.spaces.reshape([columns], [len(columns)], [groups, len(columns) // groups])[0]
        trace.spaces.unify(inner, each)
    out: Axes = [None] * len(data)
    out[numbers.out_spec[0]], out[numbers.out_spec[1]] = data[numbers.lhs_spec[0]], columns
    return [out]


@_rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin",
      "reduce_precision", "reduce")
def _reduce(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    gone = eqn.params.get("axes", eqn.params.get("dimensions", ()))
    for k in gone:
        # A product of two parameters that is summed along an axis contracts them, as `dot_general` does.
        sums = eqn.primitive.name == "reduce_sum"
        trace.note(ins[0].axes[k], [axis for j, axis in enumerate(ins[0].axes) if sums and j != k])
        if (axis := ins[0].axes[k]) is not None:
            (trace.summed if eqn.primitive.name == "reduce_sum" else trace.ranked).append(axis)
    return [[axis for k, axis in enumerate(ins[0].axes) if k not in gone] for _ in eqn.outvars]


@_rule("top_k", "approx_top_k", "sort")
def _sort(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    outs = [list(value.axes) for value in ins]
    for axes in outs:
        at = next((eqn.params[key] for key in ("dimension", "axis", "reduction_dimension") if key in eqn.params), -1)
        if (axis := axes[at]) is not None:
            trace.note(axis)
            trace.ranked.append(axis)
            trace.summed.append(axis)
        axes[at] = None
    return (outs * len(eqn.outvars))[: len(eqn.outvars)]


def rule_of(name: str) -> Rule:
    """The rule of a primitive; `_default`, which may guess, for a primitive without one.

    >>> rule_of("tanh") is rule_of("an operation of tomorrow")
    True
    """
    return _RULES.get(name, _default)


def is_elementwise(name: str) -> bool:
    """Whether each entry of a primitive's result depends only on the operands' entries in the same place.

    >>> is_elementwise("tanh"), is_elementwise("dot_general")
    (True, False)
    """
    return rule_of(name) in (_default, _product, _compare, _same)
