"""A function's jaxpr walked over index spaces, until no id changes: where a symmetry could act.

The walk records the axes that are contracted, gathered from or returned. What each primitive does is in `rules`;
control flow is below.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gauge_optax.discovery.rules import RULES, Axes, Value, default
from gauge_optax.discovery.spaces import Axis, Space, Spaces
from gauge_optax.traced import loop_counts

# Primitives that move the entries of a parameter but compute nothing.
_MOVES = {"transpose", "reshape", "convert_element_type", "squeeze", "slice", "split", "dynamic_slice",
          "broadcast_in_dim", "copy", "gather", "rev", "unstack"}
_SUMS = {"add", "sub", "add_any"}
_LINEAR = {*_MOVES, *_SUMS, "neg", "concatenate", "reduce_sum", "cumsum", "select_n", "pad"}
_CONTRACTIONS = {"dot_general", "conv_general_dilated"}
# Primitives of which tables of cosines and sines are made.
_TABLES = {*_MOVES, "mul", "div", "neg", "exp", "log", "pow", "integer_pow", "cos", "sin", "concatenate", "iota",
           "dot_general", "add", "sub"}
PASSES = 6  # walks, at most; two or three reach the fixed point
_MOST_CONSTANT = 100_000  # entries of index arithmetic that is evaluated


class Trace:
    """One walk.

    Args:
      spaces: ids, shared by all walks.
      leaves: the ids of every leaf's axes, by path.

    Attributes:
      spaces: ids, shared by all walks.
      leaves: the ids of every leaf's axes, by path.
      contracted: the axes on which symmetries are looked for, each with the axes that run beside it (heads).
      layers: leading axes of the enclosing scans.
      stacked: all axes that are scanned over.
      tables: axes of which rows are taken by index.
      returned: axes of the outputs.
      read: axes along which a parameter contracts a value that parameters made, as a kernel does the residual stream.
      readers: (kernel, axis): the leaves that contract such a value, and along which of their axes.
      vector_reads: (vector, kernel): the kernel contracts what the vector was added to or multiplied with.
      added_behind: (kernel, vector): the vector is added to the kernel's product.
      added: parameters that are added to a value which depends on others, as a bias is and a norm's scale is not.
      opaque: names of primitives whose effect was guessed.
      ranked: axes that are sorted, or of which the largest entry is taken.
      summed: axes that are summed over.
    """

    def __init__(self, spaces: Spaces, leaves: dict[str, Axes]) -> None:
        self.spaces, self.leaves = spaces, leaves
        self.contracted: list[tuple[np.ndarray, list[np.ndarray]]] = []
        self.layers: list[np.ndarray] = []
        self.stacked: list[np.ndarray] = []
        self.tables: list[np.ndarray] = []
        self.returned: list[np.ndarray] = []
        self.read: list[np.ndarray] = []
        self.readers: list[tuple[str, np.ndarray]] = []
        self.vector_reads: set[tuple[str, str]] = set()
        self.added_behind: set[tuple[str, str]] = set()
        self.added: set[str] = set()
        self.opaque: set[str] = set()
        self.ranked: list[np.ndarray] = []
        self.summed: list[np.ndarray] = []

    def note(self, axis: Axis, beside: Sequence[Axis] = ()) -> None:
        """Records an axis for the search."""
        if axis is not None and len(axis) > 1:
            others = [other for other in (*self.layers, *beside) if other is not None and len(other) > 1]
            self.contracted.append((axis, others))

    def pick(self, axis: Axis, index: np.ndarray, length: int) -> Axis:
        """Some entries of an axis; one entry alone marks the axis as one that single indices are taken from."""
        if axis is None or (len(index) == length and (index == np.arange(length)).all()):
            return axis
        if len(index) == 1:
            self.spaces.picked.update(self.spaces.key(axis))
        return axis[index] if len(index) > 1 else None

    def layer_spaces(self) -> set[Space]:
        """The axes that are scanned over, as spaces."""
        return {self.spaces.key(axis) for axis in self.stacked}

    def chosen_spaces(self) -> set[Space]:
        """Axes along which a softmax or a sort chooses, such as experts and classes."""
        return {self.spaces.key(axis) for axis in self.ranked} & {self.spaces.key(axis) for axis in self.summed}

    def atom_keys(self, axis: np.ndarray) -> list[Space]:
        """The components of an axis, as spaces."""
        return [self.spaces.key(atom) for atom in self.spaces.atoms(axis)]

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """Walks a jaxpr."""
        values: dict[Any, Value] = dict(zip(jaxpr.constvars, map(literal, consts), strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Value:
            return literal(atom.val) if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            ins = [read(atom) for atom in eqn.invars]
            outs = self.outputs(eqn, ins)
            depends = any(value.depends for value in ins)
            leaf = next((value.leaf for value in ins if value.leaf), "") if eqn.primitive.name in _MOVES else ""
            writers, vectors = self._parameters_in(eqn.primitive.name, ins)
            inlined = eqn.primitive.name in _CONTROL or called_jaxpr(eqn) is not None
            for variable, out in zip(eqn.outvars, outs, strict=True):
                if out.constant is None and not inlined:
                    out = out._replace(depends=depends, leaf=leaf, writers=writers, vectors=vectors)
                values[variable] = out
        return [read(atom) for atom in jaxpr.outvars]

    def _parameters_in(self, name: str, ins: Sequence[Value]) -> tuple[frozenset[str], frozenset[str]]:
        """The kernels and vectors in a result; records which vector a kernel reads, and which is added behind it."""
        writers = frozenset[str]().union(*(value.writers for value in ins))
        vectors = frozenset[str]().union(*(value.vectors for value in ins))
        leaves = frozenset(value.leaf for value in ins if value.leaf)
        if name in _CONTRACTIONS:
            self.vector_reads |= {(vector, kernel) for kernel in leaves for vector in vectors}
            return (leaves, frozenset()) if leaves else (writers, vectors)
        if leaves and name in _SUMS and len(leaves) == sum(value.depends for value in ins):
            return writers, vectors | leaves  # one plus a norm's scale
        if leaves and len(leaves) < sum(value.depends for value in ins):
            self.added_behind |= {(kernel, leaf) for kernel in writers for leaf in leaves if name in _SUMS}
            self.added |= leaves if name in _SUMS else frozenset()
            return writers, vectors | leaves
        # A product of two values that depend on parameters is a norm's or a gate's, behind which no kernel is linear. A
        # norm's scale may be in one of the factors, as in flax: (x − mean)·(scale/σ).
        product = name in ("mul", "div") and sum(value.depends for value in ins) > 1
        linear = name in _LINEAR or (name in ("mul", "div") and not product)
        return (writers if linear else frozenset(), vectors if linear or product else frozenset())

    def outputs(self, eqn: Any, ins: list[Value]) -> list[Value]:
        """The results of an equation."""
        name = eqn.primitive.name
        if name in _CONTROL:
            return _CONTROL[name](self, eqn, ins)
        avals = [out.aval for out in eqn.outvars]
        # Index arithmetic is evaluated: a gather by known rows can be a repeat or a slice. So are rotary tables.
        integer = all(jnp.issubdtype(a.dtype, jnp.integer) or jnp.issubdtype(a.dtype, jnp.bool_) for a in avals)
        constant = all(value.constant is not None for value in ins)
        if (integer or name in _TABLES) and constant and sum(math.prod(a.shape) for a in avals) <= _MOST_CONSTANT:
            with jax.ensure_compile_time_eval():  # `shorten` walks while it traces
                outs = eqn.primitive.bind(*[jnp.asarray(value.constant) for value in ins], **eqn.params)
            return [literal(np.asarray(x)) for x in (outs if eqn.primitive.multiple_results else [outs])]
        if inlined := called_jaxpr(eqn):
            return self.run(*inlined, ins[len(ins) - len(inlined[0].invars) :])
        return [Value(axes) for axes in RULES.get(name, default)(self, eqn, ins)]


def walk(closed: core.ClosedJaxpr, paths: Sequence[str]) -> Trace:
    """Index spaces of a function of leaves, as a fixed point over walks.

    Args:
      closed: the function's jaxpr; one input per leaf.
      paths: the leaves' paths, in the order of the inputs.

    Returns:
      The last walk.
    """
    spaces = Spaces()
    axes = [[spaces.fresh(n) if n > 1 else None for n in v.aval.shape] for v in closed.jaxpr.invars]
    before = -1
    for _ in range(PASSES):
        if before == spaces.changes:
            break
        before, trace = spaces.changes, Trace(spaces, dict(zip(paths, axes, strict=True)))
        args = [Value(list(leaf), None, True, path) for leaf, path in zip(axes, paths, strict=True)]
        for out in trace.run(closed.jaxpr, closed.consts, args):
            for axis in out.axes:
                trace.note(axis)
                trace.returned += [axis] if axis is not None else []
        spaces.close()
    return trace


def traced_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of trees of arrays, traced once for all arguments of the same shapes.

    Tracing a module takes up to seconds, and every `jit`, `grad` and `vmap` of a function traces it again.

    Args:
      fn: a pure function.

    Returns:
      The function, as its equations say it. `inspect.unwrap` gives fn itself.

    >>> from gauge_optax.discovery.trace import traced_once
    >>> calls = []
    >>> twice = traced_once(lambda x: calls.append("traced") or 2.0 * x)
    >>> float(jax.jit(twice)(jnp.ones(()))), float(jax.grad(twice)(jnp.ones(()))), calls
    (2.0, 2.0, ['traced'])
    """
    programs = dict[Any, tuple[core.ClosedJaxpr, Any]]()

    @functools.wraps(fn)
    def function(*args: Any) -> Any:
        flat, structure = jax.tree.flatten(args)
        shapes = tuple((jnp.shape(x), jnp.result_type(x)) for x in flat)
        called_on = (structure, shapes, jax.config.read("jax_enable_x64"))
        if called_on not in programs:
            given = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
            closed, out = jax.make_jaxpr(fn, return_shape=True)(*given)
            programs[called_on] = closed, jax.tree.structure(out)
        closed, outputs = programs[called_on]
        return jax.tree.unflatten(outputs, core.jaxpr_as_fun(closed)(*flat))

    return function


def called_jaxpr(eqn: Any) -> tuple[core.Jaxpr, Sequence[Any]] | None:
    """The function that an equation calls once (pjit, remat, custom derivatives), with its constants."""
    body = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)
    if body is None or eqn.primitive.name in (*_CONTROL, "pallas_call"):
        return None
    # The jaxpr of a reduction takes two numbers, that of a sharded map one device's part: these are no calls.
    inner = body.jaxpr if hasattr(body, "jaxpr") else body
    shapes = [[getattr(v.aval, "shape", None) for v in variables] for variables in (inner.outvars, eqn.outvars)]
    return (inner, getattr(body, "consts", ())) if shapes[0] == shapes[1] else None


def source(eqn: Any) -> str:
    """Where in the user's files an equation comes from, as far as the traceback tells."""
    traceback = getattr(eqn.source_info, "traceback", None)
    outside = [f for f in (traceback.frames if traceback is not None else []) if "site-packages" not in f.file_name]
    frames = [f for f in outside if "gauge_optax" not in f.file_name] or outside
    return f" at {frames[0].file_name}:{frames[0].line_num}, in {frames[0].function_name}" if frames else ""


def literal(number: Any) -> Value:
    """A constant: its numbers, where they are few."""
    small = np.size(number) <= _MOST_CONSTANT and not jnp.issubdtype(jnp.result_type(number), jax.dtypes.extended)
    return Value([None] * np.ndim(number), np.asarray(number) if small else None)


# Control flow -------------------------------------------------------------------------------------


def _united(trace: Trace, *lists: Sequence[Value]) -> list[Value]:
    """Values that control flow identifies: the branches of a condition, a carry before and after."""
    out = []
    for values in zip(*lists, strict=True):
        axes = [trace.spaces.unify(*same) for same in zip(*(value.axes for value in values), strict=True)]
        writers = frozenset[str]().union(*(value.writers for value in values))
        vectors = frozenset[str]().union(*(value.vectors for value in values))
        out.append(Value(axes, None, any(value.depends for value in values), "", writers, vectors))
    return out


def _loop(trace: Trace, body: Any, consts: list[Value], carry: list[Value], xs: list[Value]) -> list[Value]:
    """A loop's body: the carry has the same ids before and after it."""
    depth = len(trace.layers)
    carry = [value._replace(constant=None) for value in carry]
    for _ in range(2):  # the second turn sees the ids that the first brings into the carry
        outs = trace.run(body.jaxpr, body.consts, [*consts, *carry, *xs])
        carry = _united(trace, carry, outs[: len(carry)])
        del trace.layers[depth:]
    return carry + outs[len(carry) :]


def _scan(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    first, count = loop_counts(eqn.params)
    second = first + count
    lead = trace.spaces.unify(*(value.axes[0] for value in ins[second:]))
    if lead is not None:
        trace.stacked.append(lead)
        trace.layers.append(lead)
    slices = [value._replace(axes=value.axes[1:], constant=None) for value in ins[second:]]
    outs = _loop(trace, eqn.params["jaxpr"], ins[:first], ins[first:second], slices)
    if lead is not None:
        trace.layers.pop()
    return outs[:count] + [value._replace(axes=[lead, *value.axes], constant=None, leaf="") for value in outs[count:]]


def _while(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    return _loop(trace, eqn.params["body_jaxpr"], ins[first:second], ins[second:], [])


def _cond(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    return _united(trace, *(trace.run(branch.jaxpr, branch.consts, ins[1:]) for branch in eqn.params["branches"]))


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond}
