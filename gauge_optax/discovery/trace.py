"""A function's jaxpr walked over index spaces: what every operation unites, contracts or picks.

The walk is repeated until no id changes. A rule that guesses wrong costs a candidate that fails its proof, never a
false gauge: elementwise operations and all unknown ones whose shapes agree unite axis by axis, opaque ones unite axes
of equal length in equal places.

Here: control flow, elementwise and opaque operations, and which value first leaves double precision. Not here: what
primitives that move entries about do (`rules`), what the spaces are used for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gauge_optax.discovery.spaces import Axis, Spaces

Rule = Callable[["Trace", Any, list["Value"]], list[list[Axis]]]
_MOVES = {"transpose", "reshape", "convert_element_type", "squeeze", "expand_dims", "slice", "split", "dynamic_slice",
          "broadcast_in_dim", "copy", "gather", "rev", "unstack"}  # fmt: skip
PASSES = 6
MOST_KNOWN = 100_000  # entries of index arithmetic that is carried out

Axes = list[Axis]


class Value(NamedTuple):
    """What is known of an intermediate.

    Attributes:
      axes: ids per axis.
      known: its numbers, of small integers.
      depends: whether parameters reach it.
      leaf: whether it is a parameter, its entries moved about at most.
    """

    axes: Axes
    known: np.ndarray | None = None
    depends: bool = False
    leaf: bool = False


class Contracted(NamedTuple):
    """An axis that is summed over, gathered from, sorted or returned, with the axes that run beside it."""

    axis: np.ndarray
    beside: tuple[np.ndarray, ...]


class Trace:
    """One walk.

    Args:
      spaces: ids, shared by all walks.
      rules: what to do at a primitive; elementwise operations and unknown ones need none.

    Attributes:
      spaces: ids, shared by all walks.
      contracted: the axes on which symmetries are looked for.
      layers: leading axes of the scans around.
      stacked: all axes that were scanned over.
      read: axes along which a parameter reads something that parameters made, as a kernel does a stream.
      low: the first values that depend on parameters in less than double precision: what, and where in the source.
      opaque: names of primitives that were guessed.
    """

    def __init__(self, spaces: Spaces, rules: Mapping[str, Rule]) -> None:
        self.spaces, self._rules = spaces, rules
        self.contracted: list[Contracted] = []
        self.layers: list[np.ndarray] = []
        self.stacked: list[np.ndarray] = []
        self.read: list[np.ndarray] = []
        self.low: list[str] = []
        self.opaque: set[str] = set()

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """Walks a jaxpr; constants are arrays or Values."""
        values: dict[Any, Value] = {}

        def read(atom: Any) -> Value:
            return literal(atom.val) if isinstance(atom, core.Literal) else values[atom]

        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            values[variable] = const if isinstance(const, Value) else literal(const)
        values.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            values.update(zip(eqn.outvars, self._equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def note(self, axis: Axis, beside: Sequence[Axis] = ()) -> None:
        """Keeps an axis for the search."""
        if axis is not None and len(axis) > 1:
            others = [other for other in (*self.layers, *beside) if other is not None and len(other) > 1]
            self.contracted.append(Contracted(axis, tuple(others)))

    def pick(self, axis: Axis, index: np.ndarray, length: int) -> Axis:
        """Some entries of an axis; one entry alone marks the axis as one that is picked from."""
        if axis is None or (len(index) == length and (index == np.arange(length)).all()):
            return axis
        if len(index) == 1:
            self.spaces.picked.update(self.spaces.key(axis))
        return axis[index] if len(index) > 1 else None

    def _equation(self, eqn: Any, ins: list[Value]) -> list[Value]:
        outs = self._outputs(eqn, ins)
        depends = any(value.depends for value in ins)
        if depends:
            self._check_precision(eqn)
        leaf = eqn.primitive.name in _MOVES and any(value.leaf for value in ins)
        return [
            out if out.known is not None else out._replace(depends=depends, leaf=leaf or out.leaf) for out in outs
        ]

    def _outputs(self, eqn: Any, ins: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in _CONTROL:
            return _CONTROL[name](self, eqn, ins)
        known = _known(eqn, ins)
        if known is not None:
            return known
        body = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)
        if body is not None and name != "pallas_call":
            inner, consts = (body.jaxpr, body.consts) if hasattr(body, "jaxpr") else (body, ())
            return self.run(inner, consts, ins[len(ins) - len(inner.invars) :])
        rule = self._rules.get(name)
        if rule is None:
            rule = elementwise if _agree(eqn) else opaque
        return [Value(axes) for axes in rule(self, eqn, ins)]

    def _check_precision(self, eqn: Any) -> None:
        for out in eqn.outvars:
            dtype = getattr(out.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 64:
                self.low.append(f"{dtype} out of `{eqn.primitive.name}`{source(eqn)}")


def source(eqn: Any) -> str:
    """Where in the user's files an equation comes from, as far as the trace tells."""
    traceback = getattr(eqn.source_info, "traceback", None)
    outside = [f for f in (traceback.frames if traceback is not None else []) if "site-packages" not in f.file_name]
    frames = [f for f in outside if "gauge_optax" not in f.file_name] or outside
    return f" at {frames[0].file_name}:{frames[0].line_num}, in {frames[0].function_name}" if frames else ""


def literal(number: Any) -> Value:
    """A constant."""
    small = np.size(number) <= MOST_KNOWN and not jnp.issubdtype(jnp.result_type(number), jax.dtypes.extended)
    return Value([None] * np.ndim(number), np.asarray(number) if small else None)


def shapes(atoms: Sequence[Any]) -> list[tuple[int, ...]]:
    """Shapes of an equation's operands."""
    return [tuple(atom.aval.shape) for atom in atoms]


def _known(eqn: Any, ins: Sequence[Value]) -> list[Value] | None:
    """Integers out of known numbers, carried out; None for anything else."""
    avals = [out.aval for out in eqn.outvars]
    whole = all(jnp.issubdtype(a.dtype, jnp.integer) or jnp.issubdtype(a.dtype, jnp.bool_) for a in avals)
    if not whole or any(value.known is None for value in ins) or sum(math.prod(a.shape) for a in avals) > MOST_KNOWN:
        return None
    found = eqn.primitive.bind(*[jnp.asarray(value.known) for value in ins], **eqn.params)
    return [literal(np.asarray(x)) for x in (found if eqn.primitive.multiple_results else [found])]


def _agree(eqn: Any) -> bool:
    """Whether all operands have the shape of the results, up to axes of length one."""
    outs = shapes(eqn.outvars)
    return len(set(outs)) == 1 and all(
        own == () or (len(own) == len(outs[0]) and all(x in (1, y) for x, y in zip(own, outs[0], strict=True)))
        for own in shapes(eqn.invars)
    )


def elementwise(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    """Unites axis by axis, only where lengths are equal: an axis of length one is broadcast without a word."""
    shape = shapes(eqn.outvars)[0]
    out: Axes = [None] * len(shape)
    for value, own in zip(ins, shapes(eqn.invars), strict=True):
        if own:
            for k, axis in enumerate(value.axes):
                out[k] = trace.spaces.unify(out[k], axis) if own[k] == shape[k] else out[k]
    return [list(out) for _ in eqn.outvars]


def opaque(trace: Trace, eqn: Any, ins: list[Value]) -> list[Axes]:
    """An operation that is not looked into: axes of one length in one place are taken for one space."""
    trace.opaque.add(eqn.primitive.name)
    given, wanted = shapes(eqn.invars), shapes(eqn.outvars)
    rank = max(map(len, given), default=0)
    outs: list[Axes] = [[None] * len(shape) for shape in wanted]
    for k in range(rank):
        there = [
            (v.axes[k], shape[k])
            for v, shape in zip(ins, given, strict=True)
            if len(shape) == rank and v.axes[k] is not None
        ]
        of_length: dict[int, Axis] = {}
        for axis, length in there:
            of_length[length] = trace.spaces.unify(of_length.get(length), axis)
        for length, axis in of_length.items():
            trace.note(axis)
            for out, shape in zip(outs, wanted, strict=True):
                if len(shape) == rank and shape[k] == length:
                    out[k] = axis
        _groups(trace.spaces, of_length)
    for value in ins:
        for axis in value.axes:
            trace.note(axis, [other for other in value.axes if other is not axis])
    return outs


def _groups(spaces: Spaces, of_length: dict[int, Axis]) -> None:
    """Of two lengths in one place the longer is groups of the shorter: query and key-value heads."""
    lengths = sorted(of_length)
    if len(lengths) == 2 and lengths[0] > 1 and lengths[1] % lengths[0] == 0:
        few, many = of_length[lengths[0]], of_length[lengths[1]]
        if few is not None and many is not None and spaces.factors(many) is None:
            spaces.unite_entries(spaces.split(many, [lengths[0], lengths[1] // lengths[0]])[0], few)


# Control flow -------------------------------------------------------------------------------------


def _united(trace: Trace, one: Sequence[Value], other: Sequence[Value]) -> list[Value]:
    return [
        Value([trace.spaces.unify(x, y) for x, y in zip(a.axes, b.axes, strict=True)], None, a.depends or b.depends)
        for a, b in zip(one, other, strict=True)
    ]


def _unknown(values: Sequence[Value]) -> list[Value]:
    return [value._replace(known=None) for value in values]


def _loop(trace: Trace, body: Any, consts: list[Value], carry: list[Value], xs: list[Value]) -> list[Value]:
    """A body whose carry has one set of ids before and after; run twice, for what only the first turn brings in."""
    depth = len(trace.layers)
    for _ in range(2):
        outs = trace.run(body.jaxpr, body.consts, [*consts, *carry, *xs])
        carry = _united(trace, carry, outs[: len(carry)])
        del trace.layers[depth:]
    return carry + outs[len(carry) :]


def _scan(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    consts, carried = eqn.params["num_consts"], eqn.params["num_consts"] + eqn.params["num_carry"]
    lead: Axis = None
    for value in ins[carried:]:
        lead = trace.spaces.unify(lead, value.axes[0])
    if lead is not None:
        trace.stacked.append(lead)
        trace.layers.append(lead)
    slices = [Value(value.axes[1:], None, value.depends, value.leaf) for value in ins[carried:]]
    outs = _loop(trace, eqn.params["jaxpr"], ins[:consts], _unknown(ins[consts:carried]), slices)
    if lead is not None:
        trace.layers.pop()
    count = carried - consts
    return outs[:count] + [Value([lead, *value.axes], None, value.depends) for value in outs[count:]]


def _while(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    return _loop(trace, eqn.params["body_jaxpr"], ins[first:second], _unknown(ins[second:]), [])


def _cond(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    branches = [trace.run(branch.jaxpr, branch.consts, ins[1:]) for branch in eqn.params["branches"]]
    found = branches[0]
    for other in branches[1:]:
        found = _united(trace, found, other)
    return _unknown(found)


_CONTROL: dict[str, Callable[[Trace, Any, list[Value]], list[Value]]] = {
    "scan": _scan, "while": _while, "cond": _cond,
}  # fmt: skip


# The walk -----------------------------------------------------------------------------------------


class Walked(NamedTuple):
    """The last walk, and the axes of every leaf in the order of `jax.tree.leaves`."""

    trace: Trace
    axes: list[Axes]


def walk(closed: core.ClosedJaxpr, rules: Mapping[str, Rule]) -> Walked:
    """Index spaces of a function of leaves, as a fix-point over walks.

    Args:
      closed: the function's jaxpr; one input per leaf.
      rules: by primitive.

    Returns:
      The last walk, and the ids of every leaf.
    """
    spaces = Spaces()
    leaves = [[spaces.fresh(n) if n > 1 else None for n in v.aval.shape] for v in closed.jaxpr.invars]
    before = -1
    for _ in range(PASSES):
        if before == spaces.changes:
            break
        before, trace = spaces.changes, Trace(spaces, rules)
        outs = trace.run(closed.jaxpr, closed.consts, [Value(list(axes), None, True, True) for axes in leaves])
        for out in outs:
            for axis in out.axes:
                trace.note(axis)
        spaces.close()
    return Walked(trace, leaves)
