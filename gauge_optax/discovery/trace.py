"""Walks over a function's jaxpr, and follows the ids of every axis, to find the axes on which a symmetry could act.

An *id* (`spaces`) belongs to one entry of an axis. Entries with equal ids are one index of the model, such as one
hidden unit. Each equation unites the ids of entries that it combines. The walk is repeated until it unites no more. It
records the axes that are contracted, gathered from or returned. What each primitive does is in `rules`; control flow is
below.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gauge_optax.discovery.interpret import CONTROL, called, interpret, known, loop_parts
from gauge_optax.discovery.rules import Axes, Value, rule_of
from gauge_optax.discovery.spaces import Axis, Space, Spaces

# Primitives that move the entries of a parameter but compute nothing.
_MOVES = {"transpose", "reshape", "convert_element_type", "squeeze", "slice", "split", "dynamic_slice",
          "broadcast_in_dim", "copy", "gather", "rev", "unstack"}
_SUMS = {"add", "sub", "add_any"}
_PRODUCTS = {"mul", "div"}
_LINEAR = {*_MOVES, *_SUMS, "neg", "concatenate", "reduce_sum", "cumsum", "select_n", "pad"}
_CONTRACTIONS = {"dot_general", "conv_general_dilated"}
# Primitives that compute the tables of cosines and sines of rotary embeddings.
_TABLES = {*_MOVES, "mul", "div", "neg", "exp", "log", "pow", "integer_pow", "cos", "sin", "concatenate", "iota",
           "dot_general", "add", "sub"}
_PASSES = 6  # walks, at most; after two or three, ids no longer change
_MOST_CONSTANT = 100_000  # constants with more entries are not evaluated
# A reshape may split a leaf's axis into several, its components. A place names one: the leaf's path, the axis, and the
# component's number within the axis.
Place = tuple[str, int, int]


class Trace:
    """One walk over a jaxpr, and what it records.

    Args:
      spaces: ids, shared by all walks.
      leaves: the ids of every leaf's axes, by path.

    Attributes:
      spaces: ids, shared by all walks.
      leaves: the ids of every leaf's axes, by path.
      contracted: axes on which symmetries are searched. With each come axes along which a group that acts on it may
        have one element per index, such as an axis of heads.
      paired: the axes of each entrywise product of two leaves. A group may act on one of them, and have one element per
        index of the others.
      concatenated: per concatenation, the axes that it joined end to end.
      layers: during the walk, leading axes of the arrays that the enclosing scans loop over.
      stacked: all axes that are scanned over.
      tables: axes of which rows are taken by index.
      returned: axes of the outputs.
      readers: (kernel, axis): the kernel contracts this axis with a value that depends on parameters, such as the
        residual stream.
      vector_reads: (vector, kernel): the kernel contracts what the vector was added to or multiplied with.
      added_behind: (kernel, vector): the vector is added to the kernel's product.
      scaled_behind: (kernel, vector): the vector multiplies the kernel's product, as a layer scale does.
      gains: (vector, leaf): what the vector was added to or multiplied with is multiplied with a value that is made
        from the leaf.
      shifts: (vector, leaf): to what the vector was added to or multiplied with, a value made from the leaf is added.
      added: parameters that are added to a value which depends on others, as a bias is and a norm's scale is not.
      opaque: names of primitives whose effect on ids was guessed.
      ranked: axes that are sorted, or of which the largest entry is taken.
      summed: axes that are summed over.
      taken: an array of indices (its `Value.number` or its bytes), with the length of the axis that it indexes → for
        each leaf from which it takes entries, the leaf's axes, the indexed one first.
      numbers: a primitive with the inputs from which it computes integers → `Value.number` of the result.
      grouped: for `ragged_dot`, the sizes of the groups of rows, as a variable or as their bytes → the axis of the
        kernels that counts these groups.

    >>> tree = {"up": np.ones((2, 3)), "down": np.ones((3, 4))}
    >>> trace = walked(lambda p, x: [jax.nn.relu(x @ p["up"]) @ p["down"]], tree, np.ones((5, 2)))
    >>> trace.families(tree)
    [[('up', 0, 0)], [('up', 1, 0), ('down', 0, 0)], [('down', 1, 0)]]
    """

    def __init__(self, spaces: Spaces, leaves: dict[str, Axes]) -> None:
        self.spaces, self.leaves = spaces, leaves
        self.contracted: list[tuple[np.ndarray, list[np.ndarray]]] = []
        self.paired: list[list[np.ndarray]] = []
        self.concatenated: list[list[np.ndarray]] = []
        self.layers: list[np.ndarray] = []
        self.stacked: list[np.ndarray] = []
        self.tables: list[np.ndarray] = []
        self.returned: list[np.ndarray] = []
        self.readers: list[tuple[str, np.ndarray]] = []
        self.vector_reads: set[tuple[str, str]] = set()
        self.added_behind: set[tuple[str, str]] = set()
        self.scaled_behind: set[tuple[str, str]] = set()
        self.gains: set[tuple[str, str]] = set()
        self.shifts: set[tuple[str, str]] = set()
        self.added: set[str] = set()
        self.opaque: set[str] = set()
        self.ranked: list[np.ndarray] = []
        self.summed: list[np.ndarray] = []
        self.grouped: dict[Any, Axis] = {}
        self.taken: dict[Any, list[Sequence[Axis]]] = {}
        self.numbers: dict[Any, int] = {}

    def note(self, axis: Axis, beside: Sequence[Axis] = ()) -> None:
        """Records an axis for the search, with `beside` and the axes of enclosing scans, as in `contracted`."""
        if axis is not None and len(axis) > 1:
            others = [other for other in (*self.layers, *beside) if other is not None and len(other) > 1]
            self.contracted.append((axis, others))

    def take(self, index: Value, table: Sequence[Axis], k: int) -> None:
        """Notes that `index` takes entries of a parameter along axis k. If these are kernels, the axis counts experts.

        All kernels and biases from which one array of indices takes entries have the same experts: their axes are
        united.
        """
        number, axis = index.number if index.constant is None else index.constant.tobytes(), table[k]
        if number is None or axis is None or (index.constant is not None and index.constant.size == 1):
            return
        together = self.taken.setdefault((number, len(axis)), [])
        together.append([axis, *table[:k], *table[k + 1 :]])
        if any(len(axes) > 2 for axes in together):
            experts = self.spaces.unify(*(axes[0] for axes in together))
            self.note(experts)
            for inner in together[-1][1:]:
                self.note(inner, [experts])

    def pick(self, axis: Axis, index: np.ndarray, length: int) -> Axis:
        """The ids at some entries of an axis. For a single entry it returns None, and marks the axis (`Spaces.picked`).

        Args:
          axis: the ids.
          index: the entries.
          length: the axis's length.
        """
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

    def components(self, path: str, axis: int) -> list[np.ndarray]:
        """The atoms of a leaf's axis (`Spaces.atoms`), as arrays of representatives of ids; [] for a length of one."""
        ids = self.leaves[path][axis]
        return [] if ids is None else [self.spaces.canon(atom) for atom in self.spaces.atoms(ids)]

    def families(self, paths: Iterable[str]) -> list[list[Place]]:
        """The atoms (`Spaces.atoms`) of some leaves' axes, in groups.

        Two atoms are in one group if they share ids, or if a chain of atoms that share ids connects them.
        """
        family_of: dict[int, int] = {}
        families: dict[int, list[Place]] = {}
        for path, axis in ((leaf, axis) for leaf in paths for axis in range(len(self.leaves[leaf]))):
            for number, component in enumerate(self.components(path, axis)):
                ids = component.tolist()
                met = {family_of[x] for x in ids if x in family_of}
                name = min(met, default=min(ids))
                places = families.setdefault(name, [])
                for other in met - {name}:
                    places += families.pop(other)
                    family_of.update({x: name for x, family in family_of.items() if family == other})
                places.append((path, axis, number))
                family_of.update(dict.fromkeys(ids, name))
        return list(families.values())

    def atom_keys(self, axis: np.ndarray) -> list[Space]:
        """The atoms of an axis (`Spaces.atoms`), as hashable spaces."""
        return [self.spaces.key(atom) for atom in self.spaces.atoms(axis)]

    def inputs(self, shaped: Sequence[Any]) -> list[Value]:
        """The `Value`s of a jaxpr's inputs: first the leaves, with their ids; all others are data, without ids."""
        leaves = [Value(list(axes), None, True, path) for path, axes in self.leaves.items()]
        return [*leaves, *(Value([None] * len(x.aval.shape)) for x in shaped[len(leaves) :])]

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """Walks a jaxpr, and returns the values of its outputs."""
        return interpret(jaxpr, consts, args, literal, self.equation)

    def equation(self, eqn: Any, ins: list[Value]) -> list[Value]:
        """The `Value`s of an equation's results, given those of its inputs. Records what the equation shows."""
        name = eqn.primitive.name
        if name in CONTROL:
            return (_branches if name == "cond" else _loop)(self, eqn, ins)
        avals = [out.aval for out in eqn.outvars]
        # Index arithmetic on constants is evaluated, because a gather by known rows can be a repeat or a slice. Rotary
        # tables are evaluated too: a sine that is zero throughout shows a plane that does not turn.
        integer = all(jnp.issubdtype(a.dtype, jnp.integer) or jnp.issubdtype(a.dtype, jnp.bool_) for a in avals)
        constant = all(value.constant is not None for value in ins)
        if (integer or name in _TABLES) and constant and sum(math.prod(a.shape) for a in avals) <= _MOST_CONSTANT:
            if (numbers := known(eqn, [value.constant for value in ins])) is not None:
                return list(map(literal, numbers))
        if call := called(eqn, ins):
            return self.run(*call)
        depends = any(value.depends for value in ins)
        leaf = next((value.leaf for value in ins if value.leaf), "") if name in _MOVES else ""
        outs = rule_of(name)(self, eqn, ins)
        writers, vectors = self._parameters_in(name, ins)
        if name in _PRODUCTS and all(value.leaf for value in ins):
            self.paired += [[axis for axis in axes if axis is not None and len(axis) > 1] for axes in outs]
        counted: list[int | None] = [None] * len(outs)
        if any(jnp.issubdtype(a.dtype, jnp.integer) or a.dtype == bool for a in avals):
            given = [x.number if x.constant is None else x.constant.tobytes() for x in ins]
            key = object() if None in given else (name, str(eqn.params), *given)
            counted = [self.numbers.setdefault((key, k), len(self.numbers)) for k in range(len(outs))]
        return [Value(axes, None, depends, leaf, writers, vectors, number)
                for axes, number in zip(outs, counted, strict=True)]

    def _parameters_in(self, name: str, ins: Sequence[Value]) -> tuple[frozenset[str], frozenset[str]]:
        """The `writers` and `vectors` of a result (`rules.Value`). Extends `vector_reads`, `added_behind` and more."""
        writers = frozenset[str]().union(*(value.writers for value in ins))
        vectors = frozenset[str]().union(*(value.vectors for value in ins))
        leaves = frozenset(value.leaf for value in ins if value.leaf)
        if name in _CONTRACTIONS:
            self.vector_reads |= {(vector, kernel) for kernel in leaves for vector in vectors}
            return (leaves, frozenset()) if leaves else (writers, vectors)
        if name in _SUMS | _PRODUCTS:
            met = self.shifts if name in _SUMS else self.gains
            met |= {(vector, path) for one, other in itertools.permutations(ins, 2) for vector in one.vectors
                    for path in (other.leaf, *other.writers, *other.vectors)}
            if name in _PRODUCTS:
                self.scaled_behind |= {(kernel, vector) for one, other in itertools.permutations(ins, 2)
                                       for kernel in one.writers for vector in (other.leaf, *other.vectors)}
        if leaves and name in _SUMS | _PRODUCTS and len(leaves) == sum(value.depends for value in ins):
            # All operands that depend on parameters are leaves. Examples are one plus a norm's scale, and a norm's
            # scale times normalized data.
            return writers, vectors | leaves
        if leaves and len(leaves) < sum(value.depends for value in ins):
            self.added_behind |= {(kernel, leaf) for kernel in writers for leaf in leaves if name in _SUMS}
            self.added |= leaves if name in _SUMS else frozenset()
            return writers, vectors | leaves
        # Norms and gates multiply two values that depend on parameters. The product is not linear in the kernels before
        # it, and has no writers. It keeps its vectors, because one of the factors may contain a norm's scale, as in
        # flax: (x − mean)·(scale/σ).
        product = name in _PRODUCTS and sum(value.depends for value in ins) > 1
        linear = name in _LINEAR or (name in _PRODUCTS and not product)
        return (writers if linear else frozenset(), vectors if linear or product else frozenset())


def walk(closed: core.ClosedJaxpr, paths: Sequence[str]) -> Trace:
    """Walks the jaxpr of a function of leaves again and again, until a walk unites no more ids.

    Args:
      closed: the function's jaxpr; one input per leaf, and perhaps others that are data.
      paths: the leaves' paths, in the order of the inputs.

    Returns:
      The last walk.

    >>> trace = walk(jax.make_jaxpr(lambda a, x: x @ a)(np.ones((2, 3)), np.ones(2)), ["a"])
    >>> len(trace.contracted), len(trace.returned)
    (2, 1)
    """
    spaces, inputs = Spaces(), closed.jaxpr.invars
    leaves = {path: [spaces.fresh(n) if n > 1 else None for n in v.aval.shape]
              for path, v in zip(paths, inputs, strict=False)}
    before = -1
    for _ in range(_PASSES):
        if before == spaces.changes:
            break
        before, trace = spaces.changes, Trace(spaces, leaves)
        for out in trace.run(closed.jaxpr, closed.consts, trace.inputs(inputs)):
            for axis in out.axes:
                trace.note(axis)
                trace.returned += [axis] if axis is not None else []
        spaces.close()
    return trace


def walked(fn: Callable[..., Any], leaves: Mapping[str, Any], batch: Any) -> Trace:
    """Walks over the jaxpr of a function of (leaves, batch), with the batch as a constant.

    >>> trace = walked(lambda p, x: [p["table"][x]], {"table": np.ones((7, 3))}, np.array([2, 5]))
    >>> [len(axis) for axis in trace.tables]
    [7]
    """
    closed = jax.make_jaxpr(lambda *x: fn(dict(zip(leaves, x, strict=True)), batch))(*leaves.values())
    return walk(closed, list(leaves))


def traced_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of trees of arrays, traced once for all arguments of the same shapes.

    Tracing a model can take seconds, and every `jit`, `grad` and `vmap` of a function traces it again.

    Args:
      fn: a pure function.

    Returns:
      A function that evaluates the traced equations. `inspect.unwrap` returns fn itself from it.

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
        # Under x64, `jnp.result_type` of a weakly typed array of 32 bits has 64 bits. `jax.typeof` says 32.
        types: list[Any] = list(map(jax.typeof, flat))
        shapes = tuple((x.shape, x.dtype, x.weak_type) for x in types)
        called_on = (structure, shapes, jax.config.read("jax_enable_x64"))
        if called_on not in programs:
            given = jax.tree.unflatten(structure, [
                jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in shapes])
            closed, out = jax.make_jaxpr(fn, return_shape=True)(*given)
            programs[called_on] = closed, jax.tree.structure(out)
        closed, outputs = programs[called_on]
        return jax.tree.unflatten(outputs, core.jaxpr_as_fun(closed)(*flat))

    return function


def literal(number: Any) -> Value:
    """The walk's `Value` of a constant; it contains the constant's numbers if they are few.

    >>> literal(np.ones(3)).constant
    array([1., 1., 1.])
    """
    small = np.size(number) <= _MOST_CONSTANT and not jnp.issubdtype(jnp.result_type(number), jax.dtypes.extended)
    return Value([None] * np.ndim(number), np.asarray(number) if small else None)


# Control flow -------------------------------------------------------------------------------------


def _united(trace: Trace, *lists: Sequence[Value]) -> list[Value]:
    """Merges values that control flow treats as one: the results of two branches, or a carry before and after the body.

    The ids of their axes become equal, and a merged value has the `writers` and `vectors` of all that it merges.
    """
    out = []
    for values in zip(*lists, strict=True):
        axes = [trace.spaces.unify(*same) for same in zip(*(value.axes for value in values), strict=True)]
        writers = frozenset[str]().union(*(value.writers for value in values))
        vectors = frozenset[str]().union(*(value.vectors for value in values))
        out.append(Value(axes, None, any(value.depends for value in values), "", writers, vectors))
    return out


def _loop(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    """Walks a scan or a while. The carry gets equal ids before and after the body.

    The body is walked on one row of each array that a scan loops over.
    """
    body, consts, carry, stacks = loop_parts(eqn, ins)
    lead, depth = trace.spaces.unify(*(value.axes[0] for value in stacks)), len(trace.layers)
    layers = [] if lead is None else [lead]
    trace.stacked += layers
    rows = [value._replace(axes=value.axes[1:], constant=None) for value in stacks]
    carry = [value._replace(constant=None) for value in carry]
    for _ in range(2):  # the second pass starts with the ids that the first brings into the carry
        trace.layers += layers
        outs = trace.run(body.jaxpr, body.consts, [*consts, *carry, *rows])
        carry = _united(trace, carry, outs[: len(carry)])
        del trace.layers[depth:]
    stacked = outs[len(carry) :]
    return carry + [value._replace(axes=[lead, *value.axes], constant=None, leaf="") for value in stacked]


def _branches(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    return _united(trace, *(trace.run(branch.jaxpr, branch.consts, ins[1:]) for branch in eqn.params["branches"]))
