"""Cuts layers out of a traced function: removes the equations of all layers but the first two and the last.

A function that fixes the number of its layers cannot be called on a tree with fewer. But its equations can be assigned
to layers: each belongs to the last layer whose leaves its inputs depend on. `layers` decides which leaves make layers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from gauge_optax.discovery.interpret import called, interpret

_ALL = -1  # the number of a layer for values that depend on no layer, such as masks, which all layers share


class Unlike(Exception):
    """The function may treat its layers differently, so that what holds for three of them may not hold for all."""


class Value(NamedTuple):
    """A value in a traced function. Two values of different layers with the same name correspond to each other.

    Attributes:
      layer: the number of the last layer that it depends on; −1 if it depends on none.
      name: a leaf's path with a capture in place of the layer's number. For a result of an equation it is a pair: the
        equation's number within the layer, and the result's number within the equation.

    >>> Value(0, "layers/{i}/w") == Value(1, "layers/{i}/w")
    False
    """

    layer: int
    name: Hashable


class _Seen(NamedTuple):
    """A value that an equation of a layer reads, as seen from this layer.

    Attributes:
      of: the layer that the value belongs to: "itself", the layer "before" it, or the "first" layer; "none" if the
        value depends on no layer.
      name: the value's name in that layer.
    """

    of: str
    name: Hashable


class _Step(NamedTuple):
    """An equation of a layer: its operation, parameters and shapes, and the values that it reads."""

    does: Hashable
    reads: tuple[_Seen, ...]


def without_layers(closed: core.ClosedJaxpr, leaves: Sequence[Value | None], count: int) -> core.ClosedJaxpr:
    """The function with three layers, the first two and the last. It still takes the inputs of all layers.

    Args:
      closed: a function of leaves and other inputs.
      leaves: one item per input: a `Value` if the input is a layer's leaf, else None.
      count: the number of layers, four or more.

    Returns:
      The shorter function. Its last layer reads the results of the second layer in place of those of the last but one.
      The inputs of the removed layers have no effect.

    Raises:
      Unlike: the layers between the first and the last compute different things, or a layer reads values of a layer
        other than itself, the one before it and the first.

    >>> closed = jax.make_jaxpr(lambda a, b, c, d, x: d * (c * (b * (a * x))))(1.0, 2.0, 3.0, 4.0, 5.0)
    >>> leaves = [Value(k, "w") for k in range(4)]
    >>> short = without_layers(closed, [*leaves, None], 4)
    >>> float(core.jaxpr_as_fun(short)(1.0, 2.0, 3.0, 4.0, 5.0)[0])
    40.0
    """
    closed = _opened(closed, leaves)
    jaxpr, last = closed.jaxpr, count - 1
    values, variables, steps = dict[Any, Value](), dict[Value, Any](), [list[_Step]() for _ in range(count)]
    said, numbers, kept = Said(), dict[Hashable, int](), list[tuple[Any, int]]()

    def note(variable: Any, value: Value) -> bool:
        values[variable] = value
        return variables.setdefault(value, variable) is variable

    def read(atom: Any) -> Value:
        return Value(_ALL, (str(atom.aval), said(atom.val))) if isinstance(atom, core.Literal) else values[atom]

    for variable, constant in zip(jaxpr.constvars, closed.consts, strict=True):
        note(variable, Value(_ALL, said(constant)))
    for k, (variable, leaf) in enumerate(zip(jaxpr.invars, leaves, strict=True)):
        note(variable, leaf or Value(_ALL, f"input {k}"))
    for eqn in jaxpr.eqns:
        of = tuple(map(read, eqn.invars))
        layer = max((value.layer for value in of), default=_ALL)
        does = (eqn.primitive.name, said(eqn.params), tuple(str(v.aval) for v in eqn.outvars))
        if layer == _ALL:  # equal computations get one name, such as a mask that every layer makes
            place: Hashable = numbers.setdefault((does, of), len(numbers))
        else:
            place = len(steps[layer])
            steps[layer].append(_Step(does, tuple(_seen(layer, value) for value in of)))
        new = [note(variable, Value(layer, (place, k))) for k, variable in enumerate(eqn.outvars)]
        if all(new) and layer in (_ALL, 0, 1, last):
            kept.append((eqn, layer))

    _check_alike(steps)

    def renamed(atom: Any, layer: int) -> Any:
        if isinstance(atom, core.Literal):
            return atom
        value = values[atom]
        if layer == last and value.layer == last - 1:
            value = value._replace(layer=1)
        if value.layer not in (_ALL, 0, 1, last):
            raise Unlike
        return variables[value]

    outputs = [renamed(atom, last) for atom in jaxpr.outvars]
    needed, eqns = {atom for atom in outputs if not isinstance(atom, core.Literal)}, list[Any]()
    for eqn, layer in reversed(kept):
        if needed.isdisjoint(eqn.outvars):
            continue
        invars = [renamed(atom, layer) for atom in eqn.invars]
        needed |= {atom for atom in invars if not isinstance(atom, core.Literal)}
        eqns.append(eqn.replace(invars=invars))
    return core.ClosedJaxpr(jaxpr.replace(eqns=eqns[::-1], outvars=outputs), closed.consts)


def _seen(layer: int, value: Value) -> _Seen:
    if value.layer == _ALL:
        return _Seen("none", value.name)
    if value.layer >= layer - 1:
        return _Seen("itself" if value.layer == layer else "before", value.name)
    if value.layer == 0:
        return _Seen("first", value.name)
    raise Unlike


def _check_alike(steps: Sequence[Sequence[_Step]]) -> None:
    """Raises `Unlike` unless all layers between the first and the last take the same steps.

    The first layer may compute other things than its successors, so that its values have other names. The names that
    the second layer reads from the first may therefore differ from those that the third reads from the second. But if
    the third layer reads one value at several places, the second layer must read one value at these places too.

    Args:
      steps: the equations of every layer.
    """
    second, third, *others = steps[1:-1]
    if any(other != third for other in others) or len(second) != len(third):
        raise Unlike
    before = dict[Hashable, Hashable]()
    for one, other in zip(second, third, strict=True):
        if one.does != other.does:
            raise Unlike
        for seen, same in zip(one.reads, other.reads, strict=True):
            if same.of == "first":
                same = same._replace(of="before")
            elif seen.of == same.of == "before":
                same = same._replace(name=before.setdefault(same.name, seen.name))
            if seen != same:
                raise Unlike


# Calls --------------------------------------------------------------------------------------------------


class _Traced(NamedTuple):
    """A value while a function is traced again.

    Attributes:
      array: the traced array.
      layer: the number of a layer if the value is made of this layer's leaves alone; else None.
    """

    array: Any
    layer: int | None = None


def _opened(closed: core.ClosedJaxpr, leaves: Sequence[Value | None]) -> core.ClosedJaxpr:
    """Inlines calls, such as those of `jax.jit`, that get leaves of different layers, or values made of them.
    """
    opened = False

    def equation(eqn: Any, ins: list[_Traced]) -> list[_Traced]:
        nonlocal opened
        variables = [x for x in eqn.invars if not isinstance(x, core.Literal)]
        given = [x for x, atom in zip(ins, eqn.invars, strict=True) if not isinstance(atom, core.Literal)]
        layers = {x.layer for x in given}
        if len(layers - {None}) > 1 and (call := called(eqn, ins)):
            opened = True
            return run(*call)
        alone = closed.jaxpr.replace(constvars=(), invars=variables, outvars=eqn.outvars, eqns=[eqn])
        outs = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*(x.array for x in given))
        layer = layers.pop() if len(layers) == 1 else None
        return [_Traced(out, layer) for out in outs]

    def function(*args: Any) -> list[Any]:
        given = [_Traced(x, None if leaf is None else leaf.layer) for x, leaf in zip(args, leaves, strict=True)]
        return [out.array for out in run(closed.jaxpr, closed.consts, given)]

    run = functools.partial(interpret, constant=_Traced, equation=equation)
    whole = jax.make_jaxpr(function)(*closed.in_avals)
    return whole if opened else closed


# Equality -----------------------------------------------------------------------------------------------


class Said:
    """Maps a parameter of an equation, or a constant, to a hashable key. Those with equal contents have equal keys."""

    def __init__(self) -> None:
        # id → object, key. While the dict holds an object, no other object can get its id.
        self._known: dict[int, tuple[Any, Hashable]] = {}

    def __call__(self, x: Any) -> Hashable:
        if id(x) not in self._known:
            self._known[id(x)] = x, self._text(x)
        return self._known[id(x)][1]

    def _text(self, x: Any) -> Hashable:
        if isinstance(x, core.ClosedJaxpr):
            return self(x.jaxpr), tuple(map(self, x.consts))
        if isinstance(x, core.Jaxpr):
            return _no_address(str(x)), tuple(self(eqn.params) for eqn in x.eqns if _has_constants(eqn))
        if isinstance(x, Mapping):
            return tuple((key, self(value)) for key, value in sorted(x.items()))
        if isinstance(x, tuple | list):
            return tuple(map(self, x))
        if isinstance(x, np.ndarray | jax.Array):
            keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
            array = np.asarray(jax.random.key_data(x) if keys else x)
            return str(x.dtype), array.shape, array.tobytes()
        return _no_address(str(x))


def _has_constants(eqn: Any) -> bool:
    return any(isinstance(x, core.ClosedJaxpr) for x in jax.tree.leaves(list(eqn.params.values())))


_no_address = functools.partial(re.compile(" at 0x[0-9a-f]+").sub, "")
