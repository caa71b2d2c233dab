"""One loop over the equations of a jaxpr, for all code that evaluates it or tracks properties of its values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gauge_optax.traced import loop_counts

CONTROL = ("scan", "while", "cond")
_V = TypeVar("_V")


def interpret(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[_V], constant: Callable[[Any], _V],
    equation: Callable[[Any, list[_V]], Sequence[_V]],
) -> list[_V]:
    """Runs a jaxpr on values of any kind, such as arrays or sets of dependencies; returns the values of its outputs.

    Args:
      jaxpr: the jaxpr, whose equations are run in their order.
      consts: its constants.
      args: the values of its inputs.
      constant: function of a constant or literal; returns its value.
      equation: function of an equation and the values of its inputs; returns the values of its outputs.

    >>> def depth(eqn, ins):
    ...     return [1 + max(ins)] * len(eqn.outvars)
    >>> closed = jax.make_jaxpr(lambda x: jnp.sin(2.0 * x) + x)(1.0)
    >>> interpret(closed.jaxpr, closed.consts, [0], lambda number: 0, depth)
    [3]
    """
    values: dict[Any, _V] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*map(constant, consts), *args), strict=True))

    def read(atom: Any) -> _V:
        return constant(atom.val) if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, equation(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def equations(jaxpr: core.Jaxpr) -> Iterator[Any]:
    """All equations of a jaxpr, each followed by those of the functions that it calls.

    >>> [eqn.primitive.name for eqn in equations(jax.make_jaxpr(jax.jit(jnp.sin))(1.0).jaxpr)][1:]
    ['sin']
    """
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_of(eqn.params.values()):
            yield from equations(inner)


def jaxprs_of(params: Iterable[Any]) -> Iterator[core.Jaxpr]:
    """The jaxprs among some parameters of an equation: bodies of loops, branches, and functions that it calls.

    >>> (loop,) = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda k, y: jnp.sin(y), x))(1.0).eqns
    >>> [[eqn.primitive.name for eqn in inner.eqns] for inner in jaxprs_of(loop.params.values())]
    [['add', 'sin']]
    """
    for x in params:
        for inner in x if isinstance(x, tuple | list) else [x]:
            if isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
                yield inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner


def called(eqn: Any, ins: list[_V]) -> tuple[core.Jaxpr, Sequence[Any], list[_V]] | None:
    """The function that an equation calls once (pjit, remat, custom derivatives), its constants and arguments, or None.

    >>> (call,) = jax.make_jaxpr(jax.jit(jnp.sin))(1.0).eqns
    >>> [eqn.primitive.name for eqn in called(call, ["x"])[0].eqns]
    ['sin']
    """
    body = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)
    if body is None or eqn.primitive.name in (*CONTROL, "pallas_call", "reduce", "reduce_window"):
        return None  # the jaxpr of a reduction takes two numbers, and not the equation's inputs
    # The jaxpr of a `shard_map` takes one device's part of its inputs. If this part is the whole, the jaxpr may be
    # walked over like a call. Only `sharded` evaluates it.
    inner = body.jaxpr if hasattr(body, "jaxpr") else body
    shapes = [[getattr(v.aval, "shape", None) for v in variables] for variables in (
        (*inner.invars, *inner.outvars), (*eqn.invars[len(eqn.invars) - len(inner.invars) :], *eqn.outvars))]
    if shapes[0] != shapes[1]:
        return None
    return inner, getattr(body, "consts", ()), ins[len(ins) - len(inner.invars) :]


def loop_parts(eqn: Any, ins: list[_V]) -> tuple[core.ClosedJaxpr, list[_V], list[_V], list[_V]]:
    """The body of a scan or a while, and its inputs in three lists: constants, carries, and arrays with a row per step.

    A while has no arrays of the third kind.

    >>> scan = jax.make_jaxpr(lambda a, x: jax.lax.scan(lambda c, y: (a * c + y, c), 0.0, x))(2.0, jnp.ones(3)).eqns[0]
    >>> loop_parts(scan, ["a", "c", "x"])[1:]
    (['a'], ['c'], ['x'])
    """
    if eqn.primitive.name == "while":
        first, second = itertools.accumulate((eqn.params["cond_nconsts"], eqn.params["body_nconsts"]))
        return eqn.params["body_jaxpr"], ins[first:second], ins[second:], []
    first, second = itertools.accumulate(loop_counts(eqn.params))
    return eqn.params["jaxpr"], ins[:first], ins[first:second], ins[second:]


def applied(eqn: Any, arrays: Sequence[Any], **changed: Any) -> Sequence[Any]:
    """Runs an equation's operation on arrays, with `changed` in place of some of its parameters; returns the results.

    >>> (add,) = jax.make_jaxpr(lambda x: x + 1)(1).eqns
    >>> [int(x) for x in applied(add, [2, 3])]
    [5]
    """
    out = eqn.primitive.bind(*map(jnp.asarray, arrays), **{**eqn.params, **changed})
    return out if eqn.primitive.multiple_results else [out]


def known(eqn: Any, constants: Sequence[Any]) -> list[np.ndarray] | None:
    """The results of an equation whose inputs are constants; None if they depend on the device, as a mesh index does.

    >>> (add,) = jax.make_jaxpr(lambda x: x + 1)(1).eqns
    >>> [int(x) for x in known(add, [2, 3])]
    [5]
    """
    with jax.ensure_compile_time_eval():  # `shorten` calls this while JAX traces a function
        try:
            return [np.asarray(x) for x in applied(eqn, constants)]
        except (NameError, ValueError):  # JAX's errors for a mesh axis that is used outside of its `shard_map`
            return None


def sharded(eqn: Any, arrays: Sequence[Any], body: Callable[..., Sequence[Any]]) -> Sequence[Any]:
    """Runs a `shard_map` on arrays, with `body` in place of the function of one device's part.

    >>> mesh = jax.make_mesh((1,), ("rows",))
    >>> whole = jax.sharding.PartitionSpec()
    >>> fn = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=whole, out_specs=whole)
    >>> (eqn,) = jax.make_jaxpr(fn)(jnp.ones(2)).eqns
    >>> sharded(eqn, [jnp.ones(2)], lambda x: [3 * x])[0].tolist()
    [3.0, 3.0]
    """
    params = eqn.params
    axes = params.get("newly_manual_axes", params.get("manual_axes"))  # the second up to JAX 0.9
    mapped: Callable[..., Sequence[Any]] = jax.shard_map(
        lambda *parts: tuple(body(*parts)), mesh=params["mesh"], in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]), axis_names=set(axes), check_vma=params["check_vma"])
    return mapped(*arrays)


def ranges_taken(eqn: Any) -> list[list[range]]:
    """For each result of a `slice`, a `split` or a `rev`: the indices that it takes along every axis of the operand.

    >>> (halves,) = jax.make_jaxpr(lambda x: jnp.split(x, 2, 1))(jnp.ones((2, 6))).jaxpr.eqns
    >>> ranges_taken(halves)
    [[range(0, 2), range(0, 3)], [range(0, 2), range(3, 6)]]
    """
    params, shape = eqn.params, eqn.invars[0].aval.shape
    if eqn.primitive.name == "slice":
        steps = params["strides"] or [1] * len(shape)
        return [list(map(range, params["start_indices"], params["limit_indices"], steps))]
    if eqn.primitive.name == "rev":
        return [[range(n)[::-1] if k in params["dimensions"] else range(n) for k, n in enumerate(shape)]]
    ends = itertools.accumulate(params["sizes"], initial=0)
    return [[range(*part) if k == params["axis"] else range(n) for k, n in enumerate(shape)]
            for part in itertools.pairwise(ends)]


def source(eqn: Any) -> str:
    """The file and line of the user's code that an equation comes from, as text; "" if its traceback has none."""
    traceback = getattr(eqn.source_info, "traceback", None)
    outside = [f for f in (traceback.frames if traceback is not None else []) if "site-packages" not in f.file_name]
    frames = [f for f in outside if "gauge_optax" not in f.file_name] or outside
    return f" at {frames[0].file_name}:{frames[0].line_num}, in {frames[0].function_name}" if frames else ""
