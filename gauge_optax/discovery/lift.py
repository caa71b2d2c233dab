"""Computes a function in float64, whatever dtypes it fixes: evaluates its jaxpr with every float as a float64.

Models fix dtypes (`nnx.Embed` and attention's softmax in float32, kernels in bfloat16), and float32 cannot tell an
exact symmetry from a near one. With float64 in place of these dtypes, the jaxpr computes the same function of real
numbers, but with less roundoff.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gauge_optax.discovery.interpret import applied, called, interpret, jaxprs_of, loop_parts, sharded, source
from gauge_optax.discovery.sketch import Function, Leaves
from gauge_optax.errors import binding_error

LEAVES, BATCH, _DRAWN = 1, 2, 4  # bits of a mark: what a value depends on. _DRAWN is noise from a captured key
_DRAWS = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform")
_FIXED = ("pallas_call", "ffi_call", "custom_call", "pure_callback", "io_callback", "triton_kernel_call")
_refusal = functools.partial(binding_error, "discover")


def in_double(fn: Function, leaves: Leaves, dtypes: Mapping[str, Any], batch: Any) -> Function:
    """Turns a function of leaves and a batch into one that computes in float64.

    Args:
      fn: (leaves, batch) to a list of outputs.
      leaves: float64 leaves by path.
      dtypes: the leaves' dtypes in the user's tree.
      batch: one of the batches.

    Returns:
      A function of float64 leaves and a batch. If `fn` computes everything that depends on the leaves in float64 when
      its inputs are float64, and compiles, it is `fn` on such inputs. Otherwise it evaluates the jaxpr of `fn` for the
      user's dtypes, with every float as a float64.

    Raises:
      ValueError: random numbers from a key that fn captures; a captured variable that fn changes; integer products of
        eight bits or less; and, if `fn` does not compute in float64 itself, an operation whose contents are unknown,
        such as a custom call, or a `while` loop, which has no derivative.

    >>> fn = lambda p, x: [(x @ p["a"].astype(jnp.bfloat16)).astype(jnp.float32)]
    >>> tree, x = {"a": np.full((3, 2), 1 / 3)}, np.ones((1, 3), np.float32)
    >>> with jax.enable_x64(True):
    ...     double = in_double(fn, tree, {"a": np.dtype(np.float32)}, x)
    ...     print(double(tree, x)[0].dtype)
    float64
    """

    def given(leaves: Mapping[str, Any], batch: Any) -> Any:
        with warnings.catch_warnings():  # statistics that fn captures may be float32; no output depends on their update
            warnings.simplefilter("ignore", FutureWarning)
            return fn(leaves, batch)

    def plain(leaves: Mapping[str, Any], batch: Any) -> Any:
        return given(leaves, jax.tree.map(_doubled, batch))

    # fn is traced as it runs in the user's program: without 64-bit leaves, constants that it makes, such as an arange,
    # have 32 bits too.
    wide = any(jnp.dtype(dtype).itemsize > 4 for dtype in dtypes.values())

    def as_given(leaves: Mapping[str, Any], batch: Any) -> tuple[Any, Any]:
        shapes = {path: jax.ShapeDtypeStruct(x.shape, dtypes[path]) for path, x in leaves.items()}
        return shapes, batch if wide else jax.tree.map(_narrow, batch)

    def lifted(leaves: Mapping[str, Any], batch: Any) -> Any:
        with jax.enable_x64(wide):
            closed, outputs = jax.make_jaxpr(given, return_shape=True)(*as_given(leaves, batch))
        kinds = [x.aval.dtype for x in closed.jaxpr.invars]
        given_numbers = jax.tree.leaves((leaves, batch))
        flat = [_doubled(_of_kind(x, kind)) for x, kind in zip(given_numbers, kinds, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(outputs), _evaluate(closed.jaxpr, closed.consts, flat))

    def low(eqn: Any) -> bool:
        return eqn.primitive.name == "reduce_precision" or any(_wide(x) != x for x in _float_dtypes(eqn))

    try:
        checked, constants = _checked(plain, leaves, batch)
        # XLA can refuse `plain` only because of a captured array in 32 bits. This is tried only if there is one,
        # because it takes as long as a trace.
        certain = not any(isinstance(x, np.ndarray) and x.dtype.itemsize == 4 for x in constants)
        if not any(low(eqn) for eqn, _ in checked) and (certain or _lowers(plain, leaves, batch)):
            return plain
    except (TypeError, ValueError):
        pass  # float64 inputs do not fit a dtype that fn fixes, such as that of a loop's carry
    with jax.enable_x64(wide):
        checked, _ = _checked(given, *as_given(leaves, batch))
    for eqn, where in checked:
        if eqn.primitive.name in _FIXED:
            raise _fixed_precision(eqn, where)
        if eqn.primitive.name == "while" and _float_dtypes(eqn):
            raise _refusal(
                "a loop that cannot be differentiated in float64", f"`while`{where}",
                "a loop with a fixed number of steps, which can be differentiated in float64",
                "write jax.lax.scan or a fori_loop with constant bounds")
    return lifted


def _lowers(fn: Function, leaves: Leaves, batch: Any) -> bool:
    """Whether XLA takes fn. It does not if fn captures a 64-bit array that JAX reads in 32 bits (`xla.unseen`)."""
    try:
        jax.jit(fn).lower(leaves, batch)
    except ValueError:
        return False
    return True


def _narrow(x: Any) -> Any:
    """The shape and type that an array has without x64; anything else as it is."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not isinstance(dtype, np.dtype) or dtype.itemsize < 8 or dtype.kind not in "iuf":
        return x
    weak = getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(np.shape(x), np.dtype(f"{dtype.kind}4"), weak_type=weak)


def _of_kind(x: Any, dtype: Any) -> Any:
    """Integers in the dtype that a jaxpr takes; anything else as it is."""
    return jnp.asarray(x, dtype) if isinstance(dtype, np.dtype) and dtype.kind in "iu" else x


def _checked(fn: Function, leaves: Any, batch: Any) -> tuple[list[tuple[Any, str]], Sequence[Any]]:
    """The equations whose inputs depend on the leaves, with their source lines; and the arrays that fn captures.

    Raises:
      ValueError: fn changes a captured variable, uses random numbers from a captured key, or multiplies integers of
        eight bits or less.
    """
    pure = "a pure function of (params, batch)"
    switch = "switch dropout off: write model.set_attributes(deterministic=True), or pass deterministic=True in Linen"
    try:
        closed = jax.make_jaxpr(fn)(leaves, batch)
    except jax.errors.ConcretizationTypeError as error:
        raise _refusal(
            "fn decides by a value of params or of the batch", str(error).splitlines()[0],
            "a function that JAX can trace, as jax.jit does",
            "leave the value out of the batches, and let fn capture it, as in lambda p, x: fn(p, (x, True))") from error
    except Exception as error:
        if type(error).__name__ != "TraceContextError":  # Flax's; this package does not import Flax
            raise
        raise _refusal(
            "fn changes a variable that it captures", str(error).split(" (http")[0], pure,
            "change a copy: write nnx.merge(graph, params, rest, copy=True), which BatchNorm's statistics need in "
            f"training; {switch}") from error
    marks = [LEAVES] * len(jax.tree.leaves(leaves)) + [BATCH] * len(jax.tree.leaves(batch))
    marked: list[tuple[Any, int, str]] = []
    drawn = any(mark & _DRAWN for mark in mark_equations(closed.jaxpr, marks, marked))
    for eqn, mark, where in marked:
        if drawn and eqn.primitive.name in _DRAWS and not mark & (LEAVES | BATCH):
            raise _refusal(
                "random numbers from a key that fn captures", f"`{eqn.primitive.name}`{where}: dropout, or noise", pure,
                f"{switch}; or pass the key with every batch")
        if mark & LEAVES and eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            dtype = eqn.invars[0].aval.dtype
            if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits <= 8:
                raise _refusal(
                    "a quantized product inside fn", f"{dtype} into `{eqn.primitive.name}`{where}",
                    "products of floating-point numbers: rounding to integers breaks every continuous symmetry",
                    "pass the model before quantization")
    return [(eqn, where) for eqn, mark, where in marked if mark & LEAVES], closed.consts


def mark_equations(
    jaxpr: core.Jaxpr, marks: Sequence[int], marked: list[tuple[Any, int, str]], within: str = ""
) -> list[int]:
    """Adds every equation to `marked`, with the mark of its inputs and its source line; returns the outputs' marks.

    Args:
      jaxpr: the jaxpr.
      marks: the marks of its inputs: which of `LEAVES`, `BATCH` and `_DRAWN` each depends on.
      marked: the list to which equations are added.
      within: the source line of the call of this jaxpr.

    >>> marked = []
    >>> mark_equations(jax.make_jaxpr(lambda p, x: p * jnp.sin(x))(1.0, 2.0).jaxpr, [LEAVES, BATCH], marked)
    [3]
    >>> [(eqn.primitive.name, mark) for eqn, mark, _ in marked]
    [('sin', 2), ('mul', 3)]
    """

    def equation(eqn: Any, ins: list[int]) -> list[int]:
        name, mark = eqn.primitive.name, functools.reduce(operator.or_, ins, 0)
        where = source(eqn) or within  # an equation inside a function of JAX gets the line of the user's call
        marked.append((eqn, mark, where))
        if call := called(eqn, ins):
            return mark_equations(call[0], call[2], marked, where)
        if name == "scan":
            body, consts, carry, rows = loop_parts(eqn, ins)
            for _ in range(2):  # the second pass sees the marks that the first adds to the carry
                outs = mark_equations(body.jaxpr, [*consts, *carry, *rows], marked, where)
                carry = [a | b for a, b in zip(carry, outs, strict=False)]
            return outs
        for inner in jaxprs_of(eqn.params.values()):
            mark_equations(inner, [mark] * len(inner.invars), marked, where)
        drawn = name in _DRAWS and not mark & (LEAVES | BATCH)
        return [mark | _DRAWN * drawn] * len(eqn.outvars)

    return interpret(jaxpr, jaxpr.constvars, marks, lambda _: 0, equation)


def _float_dtypes(eqn: Any) -> list[Any]:
    dtypes = [v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype")]
    return [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]


def _wide(dtype: Any) -> Any:
    """The dtype that replaces `dtype`: double precision for floats and complex numbers, else itself."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def _doubled(x: Any) -> Any:
    """An array in double precision; Python's numbers, integers and booleans as they are.

    Weak types, as of `jnp.where(c, 1.0, 0.0)`, are dropped: under x64, `jnp.result_type` of such an array has 64 bits
    while the array itself has 32.
    """
    if not hasattr(x, "dtype"):
        return x
    dtype = _wide(x.dtype)
    return jax.lax.convert_element_type(x, dtype) if dtype != x.dtype or getattr(x, "weak_type", False) else x


# Evaluation ---------------------------------------------------------------------------------------


def _evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """A jaxpr's outputs, every float a float64."""
    return interpret(jaxpr, consts, args, _doubled, lambda eqn, ins: list(map(_doubled, _applied(eqn, ins))))


def _function(closed: core.ClosedJaxpr) -> Callable[..., Any]:
    return lambda *args: _evaluate(closed.jaxpr, closed.consts, args)


def _applied(eqn: Any, ins: list[Any]) -> Sequence[Any]:
    """The results of one equation, computed in float64."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CONTROL:
        return _CONTROL[name](eqn, ins)
    if name == "shard_map":
        return sharded(eqn, ins, _function(core.ClosedJaxpr(params["jaxpr"], ())))
    if call := called(eqn, ins):
        return _evaluate(*call)
    if name == "reduce_precision":
        return ins
    if name == "bitcast_convert_type":  # random bits become floats by their layout in the traced dtype
        return applied(eqn, [ins[0].astype(eqn.invars[0].aval.dtype)])
    try:
        return applied(eqn, ins, **{key: _wide_param(x) for key, x in params.items()})
    except (TypeError, ValueError, NotImplementedError) as error:
        raise _fixed_precision(eqn, source(eqn)) from error


def _fixed_precision(eqn: Any, where: str) -> ValueError:
    return _refusal(
        "an operation that cannot be computed in float64", f"`{eqn.primitive.name}`{where}",
        "operations of JAX, which discover computes in float64 whatever dtype the model names",
        "build the model for discover without this kernel, such as implementation='xla' of attention")


def _wide_param(x: Any) -> Any:
    """A parameter of an equation; dtypes and inner functions are replaced by ones of double precision."""
    if isinstance(x, core.ClosedJaxpr):
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, _wide(v.aval.dtype)) for v in x.jaxpr.invars]
        return jax.make_jaxpr(_function(x))(*shapes)
    if isinstance(x, core.Jaxpr):
        return _wide_param(core.ClosedJaxpr(x, ())).jaxpr
    if isinstance(x, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return None
    if isinstance(x, tuple):  # the functions of a `custom_linear_solve`
        parts = map(_wide_param, x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return _wide(np.dtype(x)) if isinstance(x, np.dtype) or (isinstance(x, type) and issubclass(x, np.generic)) else x


def _scan(eqn: Any, ins: list[Any]) -> Sequence[Any]:
    body, consts, start, rows = loop_parts(eqn, ins)

    def step(carry: Any, xs: Any) -> Any:
        outs = _function(body)(*consts, *carry, *xs)
        return outs[: len(start)], outs[len(start) :]

    carry, ys = jax.lax.scan(step, start, rows, eqn.params["length"], eqn.params["reverse"])
    return [*carry, *ys]


def _while(eqn: Any, ins: list[Any]) -> Sequence[Any]:
    body, consts, start, _ = loop_parts(eqn, ins)
    test, of_test = _function(eqn.params["cond_jaxpr"]), ins[: eqn.params["cond_nconsts"]]
    return jax.lax.while_loop(
        lambda carry: test(*of_test, *carry)[0], lambda carry: _function(body)(*consts, *carry), start)


def _cond(eqn: Any, ins: list[Any]) -> Sequence[Any]:
    return jax.lax.switch(ins[0], list(map(_function, eqn.params["branches"])), *ins[1:])


_CONTROL: Mapping[str, Callable[..., Sequence[Any]]] = {"scan": _scan, "while": _while, "cond": _cond}
