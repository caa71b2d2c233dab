"""What primitives that move, contract or gather entries do to index spaces.

Here: shapes and indices. Not here: control flow and elementwise operations (`trace`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gauge_optax.discovery.spaces import Axis
from gauge_optax.discovery.trace import Axes, Rule, Trace, Value, shapes

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@rule("broadcast_in_dim")
def _broadcast(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    out: Axes = [None] * len(eqn.params["shape"])
    for k, at in enumerate(eqn.params["broadcast_dimensions"]):
        if shapes(eqn.invars)[0][k] == eqn.params["shape"][at]:
            out[at] = ins[0].axes[k]
    return [out]


@rule("reshape")
def _reshape(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    return [trace.spaces.reshape(ins[0].axes, shapes(eqn.invars)[0], eqn.params["new_sizes"])]


@rule("transpose")
def _transpose(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    return [[ins[0].axes[k] for k in eqn.params["permutation"]]]


@rule("squeeze")
def _squeeze(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    return [[axis for k, axis in enumerate(ins[0].axes) if k not in eqn.params["dimensions"]]]


@rule("expand_dims")
def _expand(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    out = list(ins[0].axes)
    for k in sorted(eqn.params["dimensions"]):
        out.insert(k, None)
    return [out]


@rule("rev")
def _reverse(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    back = eqn.params["dimensions"]
    return [[a[::-1] if a is not None and k in back else a for k, a in enumerate(ins[0].axes)]]


@rule("slice")
def _slice(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    p, shape = eqn.params, shapes(eqn.invars)[0]
    steps = p["strides"] or [1] * len(shape)
    picks = [np.arange(a, b, s) for a, b, s in zip(p["start_indices"], p["limit_indices"], steps, strict=True)]
    return [[trace.pick(a, at, n) for a, at, n in zip(ins[0].axes, picks, shape, strict=True)]]


@rule("split")
def _split(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    at, outs, start = eqn.params["axis"], [], 0
    for size in eqn.params["sizes"]:
        own = list(ins[0].axes)
        own[at] = trace.pick(own[at], np.arange(start, start + size), shapes(eqn.invars)[0][at])
        outs.append(own)
        start += size
    return outs


@rule("dynamic_slice")
def _dynamic_slice(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    out: Axes = []
    for axis, length, size, at in zip(
        ins[0].axes, shapes(eqn.invars)[0], eqn.params["slice_sizes"], ins[1:], strict=True
    ):
        if size == length:
            out.append(axis)
        elif at.known is not None:
            start = int(np.clip(at.known, 0, length - size))
            out.append(trace.pick(axis, np.arange(start, start + size), length))
        else:
            out.append(None)
            if axis is not None and size == 1:  # a loop over stacked layers
                trace.layers.append(axis)
                trace.stacked.append(axis)
    return [out]


@rule("dynamic_update_slice", "scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min")
def _update(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    at = 1 if eqn.primitive.name == "dynamic_update_slice" else 2
    into, what = shapes(eqn.invars)[0], shapes(eqn.invars)[at]
    if len(into) != len(what):
        return [list(ins[0].axes)]
    pairs = zip(ins[0].axes, ins[at].axes, into, what, strict=True)
    return [[trace.spaces.unify(a, b) if n == m else a for a, b, n, m in pairs]]


@rule("concatenate")
def _concatenate(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    at = eqn.params["dimension"]
    out: Axes = [None] * len(shapes(eqn.outvars)[0])
    for k in range(len(out)):
        if k != at:
            for value in ins:
                out[k] = trace.spaces.unify(out[k], value.axes[k])
    parts = [(value.axes[at], shape[at]) for value, shape in zip(ins, shapes(eqn.invars), strict=True)]
    if any(axis is not None for axis, _ in parts):
        out[at] = np.concatenate([trace.spaces.fresh(n) if axis is None else axis for axis, n in parts])
    return [out]


@rule("stack")
def _stack(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    out: Axes = [None] * len(ins[0].axes)
    for value in ins:
        out = [trace.spaces.unify(a, b) for a, b in zip(out, value.axes, strict=True)]
    out.insert(eqn.params["axis"], None)
    return [out]


@rule("unstack")
def _unstack(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    out = list(ins[0].axes)
    gone = out.pop(eqn.params["axis"])
    trace.pick(gone, np.zeros(1, int), len(eqn.outvars))
    return [list(out) for _ in eqn.outvars]


@rule("tile")
def _tile(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    given = zip(ins[0].axes, shapes(eqn.invars)[0], eqn.params["reps"], strict=True)
    return [[axis if times == 1 else trace.spaces.join([(None, times), (axis, n)]) for axis, n, times in given]]


@rule("optimization_barrier", "tie", "stage")
def _same(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    return [list(value.axes) for value in ins]


@rule("pad")
def _pad(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    def padded(axis: Axis, length: int, low: int, high: int, inner: int) -> Axis:
        if axis is None or inner:
            return None
        kept = axis[max(0, -low) : length + min(0, high)]
        return np.concatenate([trace.spaces.fresh(max(low, 0)), kept, trace.spaces.fresh(max(high, 0))])

    config = zip(ins[0].axes, shapes(eqn.invars)[0], eqn.params["padding_config"], strict=True)
    return [[padded(axis, length, *how) for axis, length, how in config]]


@rule("dot_general")
def _dot(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = ins[0].axes, ins[1].axes
    if ins[0].leaf or ins[1].leaf:
        pairs = [(left[a], right[b]) for a, b in zip(left_sum, right_sum, strict=True)]
        trace.read += [axis for a, b in pairs if a is not None and b is not None for axis in (a, b)]
    batch = [trace.spaces.unify(left[a], right[b]) for a, b in zip(left_batch, right_batch, strict=True)]
    summed = [trace.spaces.unify(left[a], right[b]) for a, b in zip(left_sum, right_sum, strict=True)]
    for axis in summed:
        trace.note(axis, [*batch, *(other for other in summed if other is not axis)])
    for axis in batch:
        trace.note(axis, [other for other in batch if other is not axis])
    spare_left = [axis for k, axis in enumerate(left) if k not in (*left_sum, *left_batch)]
    spare_right = [axis for k, axis in enumerate(right) if k not in (*right_sum, *right_batch)]
    return [[*batch, *spare_left, *spare_right]]


@rule("ragged_dot", "ragged_dot_general")
def _ragged_dot(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    """Rows times the matrix of their group: (rows, k) and (groups, k, columns)."""
    left, (groups, inner, columns) = ins[0].axes, ins[1].axes
    trace.note(trace.spaces.unify(left[1], inner), [groups])
    trace.note(groups)
    trace.note(columns, [groups])
    return [[left[0], columns]]


@rule("conv_general_dilated")
def _convolution(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    data, kernel = ins[0].axes, ins[1].axes
    inner, columns = data[numbers.lhs_spec[1]], kernel[numbers.rhs_spec[0]]
    out: Axes = [None] * len(data)
    out[numbers.out_spec[0]], out[numbers.out_spec[1]] = data[numbers.lhs_spec[0]], columns
    if groups == 1:
        trace.note(trace.spaces.unify(inner, kernel[numbers.rhs_spec[1]]))
    elif columns is not None and len(columns) == groups:  # depthwise
        out[numbers.out_spec[1]] = trace.spaces.unify(inner, columns)
    return [out]


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin",
      "reduce_precision", "reduce")  # fmt: skip
def _reduce(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    gone = eqn.params.get("axes", eqn.params.get("dimensions", ()))
    for k in gone:
        trace.note(ins[0].axes[k])
    return [[axis for k, axis in enumerate(ins[0].axes) if k not in gone] for _ in eqn.outvars]


@rule("top_k", "sort")
def _sort(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    at = eqn.params.get("dimension", -1)
    outs = []
    for value in ins:
        own = list(value.axes)
        trace.note(own[at])
        own[at] = None
        outs.append(own)
    return (outs * len(eqn.outvars))[: len(eqn.outvars)]


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "select_and_gather_add",
      "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")  # fmt: skip
def _window(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    given = zip(ins[0].axes, shapes(eqn.invars)[0], strict=True)
    lengths = shapes(eqn.outvars)[0]
    kept = [axis if n == m else None for (axis, n), m in zip(given, lengths, strict=True)]
    return [list(kept) for _ in eqn.outvars]


@rule("iota", "random_bits", "random_wrap", "random_unwrap", "random_seed", "random_fold_in", "random_split",
      "threefry2x32", "rng_bit_generator", "create_token")  # fmt: skip
def _nothing(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    return [[None] * len(getattr(out.aval, "shape", ())) for out in eqn.outvars]


@rule("gather")
def _gather(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, index, shape = ins[0].axes, ins[1], shapes(eqn.invars)[0]
    out: Axes = [None] * len(shapes(eqn.outvars)[0])
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    for at, k in zip(numbers.offset_dims, [k for k in range(len(sizes)) if k not in gone], strict=True):
        if sizes[k] == shape[k]:
            out[at] = table[k]
        elif index.known is not None and k in numbers.start_index_map and np.size(index.known) == len(
            numbers.start_index_map
        ):
            start = int(index.known.reshape(-1)[numbers.start_index_map.index(k)])
            out[at] = trace.pick(table[k], np.arange(start, start + sizes[k]), shape[k])
    spread = [k for k in range(len(out)) if k not in numbers.offset_dims]
    for at, axis in zip(spread, index.axes[:-1], strict=False):
        out[at] = axis
    for a, b in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        out[spread[b]] = trace.spaces.unify(out[spread[b]], table[a])
    for k in numbers.collapsed_slice_dims:
        trace.note(table[k])
        if len(numbers.start_index_map) == 1 and index.known is not None and table[k] is not None:
            _known_rows(trace, out, spread, table[k], shape[k], index.known[..., 0])
    return [out]


def _known_rows(trace: Trace, out: Axes, spread: list[int], axis: np.ndarray, length: int, rows: np.ndarray) -> None:
    """Rows of a table at known places; a constant repeat is a grid with the repeats."""
    long = [k for k, n in enumerate(rows.shape) if n > 1]
    flat = np.where(rows < 0, rows + length, rows).reshape(-1)
    if not long:
        trace.pick(axis, flat[:1], length)
    elif len(long) == 1:
        times = len(flat) // length
        if times > 1 and np.array_equal(flat, np.repeat(np.arange(length), times)):
            out[spread[long[0]]] = trace.spaces.join([(axis, length), (None, times)])
        elif times > 1 and np.array_equal(flat, np.tile(np.arange(length), times)):
            out[spread[long[0]]] = trace.spaces.join([(None, times), (axis, length)])
        elif times <= 1:
            out[spread[long[0]]] = axis[np.clip(flat, 0, length - 1)]
