"""Checks the arguments of `discover`, and makes what it compares: leaves in float64, and outputs.

For logits, log-probabilities are compared, because softmax ignores a number that is added to all of them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gauge_optax.binding import leaves_by_path, real_leaves
from gauge_optax.discovery.interpret import applied, called, interpret, sharded, source
from gauge_optax.discovery.lift import BATCH, LEAVES, mark_equations
from gauge_optax.discovery.sketch import Leaves
from gauge_optax.errors import binding_error, counted
from gauge_optax.transformation import in_interval, listed, own_settings
from gauge_optax.xla import quick_options

Outputs = Literal["logits", "logprobs", "predictions", "loss"]
_OUTPUTS = get_args(Outputs)
_refusal = functools.partial(binding_error, "discover")
_NO_DERIVATIVE = ("do not support JVP", "cannot be differentiated", "Differentiation rule", "Linearization failed",
                  "JVP not implemented", "JVP rule")  # texts in JAX's errors about operations without a derivative


def check_function(fn: Any, params: Any, batches: Sequence[Any]) -> None:
    """Raises unless fn takes parameters and a batch. A module takes the batch alone: the error says how to wrap it.

    >>> try:
    ...     check_function(lambda x: x, {}, [1.0])
    ... except ValueError as error:
    ...     print(str(error).splitlines()[0])
    discover: fn does not take parameters and a batch, <lambda>
    """
    apart = hasattr(fn, "apply") and hasattr(fn, "init")  # a Linen module, whose parameters are a separate tree
    try:
        inspect.signature(fn).bind(params, batches[0])
        if not apart:
            return
    except (TypeError, IndexError):
        pass
    except ValueError:
        return  # `inspect` does not know the arguments of a function written in C: it is not checked
    kind = type(fn).__name__
    if apart:
        problem, remedy = f"fn is a module, {kind}", "write go.discover(model.apply, model.init(key, x), batches)"
    elif callable(fn) and not jax.tree_util.all_leaves([fn]):
        problem, remedy = f"fn is a module, {kind}", "write go.discover(lambda model, x: model(x), model, batches)"
    else:
        name = getattr(fn, "__name__", kind)
        problem = f"fn does not take parameters and a batch, {name}"
        remedy = "write go.discover(lambda params, batch: ..., params, batches), with the outputs in place of ..."
    takes = f"{kind}({', '.join(inspect.signature(fn).parameters)})" if callable(fn) else f"a {kind}, not a function"
    raise _refusal(problem, takes, "a pure function of (params, batch)", remedy)


def check_modules(params: Any) -> None:
    """Raises for an NNX module with one variable under two paths: the two leaves would move independently.

    >>> check_modules({"a": jnp.ones(2)})
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(params, nnx.Module):
        return
    kind, seen = nnx.Variable, dict[int, str]()
    for keys, variable in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, kind)):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if isinstance(variable, kind) and seen.setdefault(id(variable), path) != path:
            raise _refusal(
                "one variable under two paths", f"'{seen[id(variable)]}' and '{path}'",
                "parameters of which each stands once, as nnx.split and nnx.Optimizer see them",
                "write graph, params, rest = nnx.split(model, nnx.Param, ...), and then "
                "go.discover(lambda p, x: nnx.merge(graph, p, rest)(x), params, batches)")


def check_paths(paths: Iterable[str]) -> None:
    """Raises for a path that no pattern of a gauge can name, because of `{`, `}` or `*` in a key.

    >>> check_paths(["blocks/0/up"])
    """
    for path in paths:
        if found := set(path) & set("{}*"):
            raise _refusal(
                f"no pattern can name '{path}'", " and ".join(f"'{x}'" for x in sorted(found)) + " in a key",
                "keys without '{', '}' and '*', by which patterns stand for several leaves",
                "give the leaf another key in the tree that discover and the optimizer get")


def checked_batches(batches: Any, outputs: str | None, near: float, seed: int) -> list[Any]:
    """The batches as a list; raises for unusable arguments of `discover`.

    >>> checked_batches((1.0, 2.0), "loss", 1e-3, 0)
    [1.0, 2.0]
    """
    if hasattr(batches, "ndim"):
        raise _refusal(
            "batches is one array", f"an array of shape {jnp.shape(batches)}, whose rows would be batches",
            "a list of at least two batches, each a value that fn accepts",
            "write [x[:4], x[4:8]], or [(x, y), ...] if fn unpacks a pair")
    if outputs is not None and outputs not in _OUTPUTS:
        raise _refusal(
            f"unknown outputs {outputs!r}", repr(outputs), f"one of {', '.join(map(repr, _OUTPUTS))}",
            "pass 'logits' if a softmax of fn's outputs follows, else 'predictions', 'logprobs' or 'loss'")
    if len(batches := listed("discover", batches)) < 2:
        raise _refusal(
            "too few batches", counted(len(batches), "batch", "batches"), "two or more values that fn accepts",
            "pass a list of batches: whatever a single batch does not reach looks like a symmetry")
    if not in_interval(near, "[0, 1)"):
        raise _refusal(f"bad near {near!r}", repr(near), "a number from 0 to below 1", "leave it at 1e-3")
    check_seed("discover", seed)
    check_batches("discover", batches)
    return batches


def check_batches(function: str, batches: Sequence[Any]) -> None:
    """Raises for a batch that holds something that JAX cannot trace, such as a text.

    >>> check_batches("census", [{"x": jnp.ones(2), "rate": 0.5}])
    """
    for number, batch in enumerate(batches):
        for keys, x in jax.tree_util.tree_leaves_with_path(batch):
            try:
                jax.typeof(x)
            except TypeError:
                at = f" at {jax.tree_util.keystr(keys)}" if keys else ""
                raise binding_error(
                    function, f"no array in batch {number}{at}", f"{x!r}, of type {type(x).__name__}",
                    "arrays and numbers", "leave it out of the batches, and let fn capture it") from None


def check_seed(function: str, seed: Any) -> None:
    """Raises for a seed that NumPy does not take; `function` is the name of the function that the user called.

    >>> try:
    ...     check_seed("census", -1)
    ... except ValueError as error:
    ...     print(str(error).splitlines()[0])
    census: bad seed -1
    """
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise binding_error(
            function, f"bad seed {seed!r}", f"{seed!r}, of type {type(seed).__name__}",
            "an int from 0 on, because NumPy draws the points", "write seed=0")


def is_float(x: Any) -> bool:
    """Whether something is an array of floating-point numbers.

    >>> is_float(jnp.ones(2)), is_float(jnp.arange(2)), is_float("text")
    (True, False, False)
    """
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def double_leaves(params: Any, seed: int) -> Leaves:
    """Floating-point leaves by path, in float64. A leaf that is given as a shape gets random values.

    Raises:
      ValueError: no floating-point leaves; a complex leaf; an integer leaf that is given as a shape.

    >>> double_leaves({"a": jnp.ones(2), "count": jnp.zeros((), int)}, 0)
    {'a': array([1., 1.])}
    """
    all_leaves, rng = leaves_by_path(params), np.random.default_rng([seed, 13])

    def double(path: str, x: Any) -> np.ndarray:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return np.asarray(x, np.float64)
        noise = rng.standard_normal(x.shape)
        # A vector may be a norm's scale or a variance, so it gets positive values, unless its name begins with b.
        positive = x.ndim < 2 and not path.rpartition("/")[2].lower().startswith("b")
        return np.exp(0.5 * noise) if positive else noise / math.sqrt(max(x.size, 1) ** (1 / max(x.ndim, 1)))

    # A Python number, such as the rate of a dropout, is no parameter: the function may branch on it.
    leaves = {path: double(path, x) for path, x in real_leaves("discover", params).items() if is_float(x)}
    shapes = [path for path, x in all_leaves.items() if path not in leaves and isinstance(x, jax.ShapeDtypeStruct)]
    if shapes:
        raise _refusal(
            f"no values of '{shapes[0]}'", f"the shape of an array of {all_leaves[shapes[0]].dtype}",
            "values of every leaf that is no floating-point array",
            "put an array there, such as zeros, or pass the parameters alone, such as nnx.state(model, nnx.Param)")
    if not leaves:
        kinds = ", ".join(f"{p} ({getattr(x, 'dtype', type(x).__name__)})" for p, x in list(all_leaves.items())[:4])
        raise _refusal(
            "no floating-point leaves in params", kinds or "an empty tree", "a tree of parameter arrays",
            "pass the tree that fn is differentiated in, such as nnx.state(model) or variables['params']")
    return leaves


def shown_outputs(fn: Callable[..., Any], leaves: Leaves, batch: Any) -> Outputs | None:
    """Infers from a function which kind of outputs it returns; None if it cannot tell whether a softmax follows.

    A scalar is a loss, and a single column is a prediction. If the tokens of a batch look up rows in a table of V rows,
    and every token has V outputs, these are the next token's logits. Tables whose rows have V entries do not count,
    because an encoder may return such rows. Indices that do not come from the batch, such as the numbers of all nodes
    of a graph, are no tokens. Outputs that sum to one come out of a softmax, and outputs whose exponentials sum to one
    out of a log-softmax: both are "logprobs".

    Args:
      fn: (leaves, batch) to a tree of outputs.
      leaves: arrays by path.
      batch: one of the batches.

    >>> shown_outputs(lambda p, x: jax.nn.softmax(p["a"] * x), {"a": np.ones(3)}, np.arange(3.0))
    'logprobs'
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(leaves, batch)
    found = {x.shape for x in _output_arrays(shapes)}
    if all(not shape or shape[-1] == 1 for shape in found):
        return "loss" if found == {()} else "predictions"
    marks = [LEAVES] * len(jax.tree.leaves(leaves)) + [BATCH] * len(jax.tree.leaves(batch))
    if found <= set(_looked_up(closed.jaxpr, marks)):
        return "logits"
    out = jax.jit(fn, compiler_options=quick_options())(leaves, batch)
    sums = [jnp.sum(make(x), -1) for make in (jnp.exp, jnp.asarray) for x in _output_arrays(out)]
    ones = [bool(jnp.allclose(x, 1.0, rtol=0.0, atol=1e-9)) for x in sums]
    half = len(ones) // 2
    return "logprobs" if all(ones[:half]) or all(ones[half:]) else None


def _looked_up(jaxpr: Any, marks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """For every parameter whose rows are taken by index: the shape of the indices, followed by the number of rows.

    Args:
      jaxpr: the jaxpr.
      marks: which of its inputs are leaves, and which the batch. Indices that do not depend on the batch do not count.
    """
    marked: list[tuple[Any, int, str]] = []
    mark_equations(jaxpr, marks, marked)
    for eqn, mark, _ in marked:
        if mark == LEAVES | BATCH and eqn.primitive.name == "gather":
            rows, *entries = eqn.invars[0].aval.shape
            # An encoder has as many outputs per token as a row has entries, so that they would be taken for logits if
            # the table also had as many rows.
            if eqn.params["dimension_numbers"].collapsed_slice_dims == (0,) and rows not in entries:
                yield (*eqn.invars[1].aval.shape[:-1], rows)


def _output_arrays(out: Any) -> list[Any]:
    """The floating-point arrays in the outputs, without updated `batch_stats` that Flax's `apply` may return too."""
    paths = jax.tree_util.tree_flatten_with_path(out)[0]
    shown = [x for path, x in paths if jax.tree_util.DictKey("batch_stats") not in path]
    for x in shown:
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise _refusal(
                "complex outputs", f"an output of {x.dtype}, shape {x.shape}", "real numbers",
                "return the real and the imaginary part: (z.real, z.imag)")
    return [x for x in shown if is_float(x)]


def compared(out: Any, outputs: Outputs | None) -> list[jax.Array]:
    """The arrays that `discover` compares: the floating-point outputs, with log-probabilities in place of logits.

    >>> [x.shape for x in compared({"logits": jnp.ones(3), "count": jnp.zeros((), int)}, "logits")]
    [(3,)]
    """
    leaves = _output_arrays(out)
    if not leaves:
        raise _refusal(
            "no floating-point outputs", f"{counted(len(jax.tree.leaves(out)), 'leaf', 'leaves')} of other types",
            "an array of floating-point numbers", "return the logits, log-probabilities or loss from fn")
    shapes = [x.shape for x in leaves]
    if not sum(x.size for x in leaves):
        raise _refusal(
            "outputs without entries", f"shapes {', '.join(map(str, shapes))}", "at least one number per batch",
            "leave out batches without examples, and return the logits, log-probabilities or loss from fn")
    if outputs == "logits" and any(not shape or shape[-1] == 1 for shape in shapes):
        raise _refusal(
            "outputs that are no logits", f"shapes {', '.join(map(str, shapes))}",
            "more than one class along the last axis",
            "pass outputs='predictions' for a regression, outputs='loss' if fn returns a loss")
    # Beside logits of (batch, tokens, classes), (batch, tokens) is one number per token, as of a value head.
    shorter = next((x for x in shapes if any(x == other[:len(x)] and x != other for other in shapes)), None)
    if outputs == "logits" and shorter is not None:
        raise _refusal(
            "outputs of which not all are logits", f"shapes {', '.join(map(str, shapes))}",
            f"more than one class along the last axis of each; {shorter} looks like one number per row",
            "leave it out of what fn returns, or return (jax.nn.log_softmax(logits), value) with outputs='logprobs'")
    return [_log_probabilities(x) for x in leaves] if outputs == "logits" else leaves


def _log_probabilities(logits: jax.Array) -> jax.Array:
    """The log-probabilities of logits; 0 for a class that a mask rules out, whose probability is 0 in every dtype.

    A mask writes one very negative number in place of a logit. If all logits are shifted before they are masked, this
    number stays: its log-probability would change, although no probability does. A class counts as ruled out if its
    log-probability is below -1e8, or if it is below -4e3 and the logit is the least of its row. Large logits without a
    mask may meet this rule too. But a shift of all logits changes neither which one is the least nor its
    log-probability, so that they meet it before and after the shift.
    """
    found = jax.nn.log_softmax(logits, axis=-1)
    repeated = (logits == jnp.min(logits, -1, keepdims=True)) & (found < -4e3)
    return jnp.where((found < -1e8) | repeated, 0.0, found)


def check_classes(shapes: Sequence[tuple[int, ...]], axes: Sequence[Any]) -> None:
    """Raises if what the user calls logits is one number per example: outputs of one axis, which counts examples.

    Args:
      shapes: shapes of the outputs.
      axes: those axes of the outputs along which parameters vary, such as a kernel's output axis.

    >>> check_classes([(3,)], ["a kernel's axis"])
    """
    if not axes and all(len(shape) == 1 for shape in shapes):
        raise _refusal(
            "outputs that are no logits", f"shapes {', '.join(map(str, shapes))}, one number per example",
            "an axis of classes, along which a softmax follows",
            "pass outputs='predictions', also for the logit of a sigmoid; if a softmax over examples is meant, return "
            "jax.nn.log_softmax(...) with outputs='logprobs'")


def check_repeatable(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> None:
    """Raises if the outputs of two calls of fn on one input differ by more than roundoff.

    Roundoff is no error, because two compilations may add in different orders.

    >>> check_repeatable([np.ones(2)], [np.ones(2) + 1e-12])
    """
    for k, (a, b) in enumerate(zip(first, second, strict=True)):
        if not np.allclose(a, b, rtol=0.0, atol=1e-9 * np.abs(a).max(initial=0.0), equal_nan=True):
            raise _refusal(
                "two calls of fn differ", f"output {k} changes by {np.abs(a - b).max():.1e} on one input",
                "a pure function of (params, batch)",
                "switch dropout off (deterministic=True), or pass the same key with every batch")


def check_finite(out: Sequence[np.ndarray], fn: Callable[..., Any], *args: Any) -> None:
    """Raises if outputs of fn are not finite; names the first operation that makes a NaN, or else an infinity.

    >>> try:
    ...     check_finite([np.array([np.nan])], lambda x: jnp.log(x), np.array([-1.0]))
    ... except ValueError as error:
    ...     print("`log`" in str(error))
    True
    """
    for k, x in enumerate(out):
        if not np.isfinite(x).all():
            closed = jax.make_jaxpr(fn)(*args)
            origins = _origins(closed, jax.tree.leaves(args))
            origin = origins.get("NaN") or origins.get("infinity") or "no operation could be identified"
            raise _refusal(
                "outputs that are not finite",
                f"{int((~np.isfinite(x)).sum())} of {x.size} elements of output {k}; {origin}",
                "finite outputs at random points near params",
                "mask with a large negative number instead of -inf where a whole row is masked; check the inputs")


@contextlib.contextmanager
def own_points() -> Iterator[None]:
    """A context that computes in 64 bits and lets NaN pass, whatever JAX settings the user's process has chosen.

    Some random points give a NaN, and the search then draws another point. Under `jax_debug_nans` or `jax_debug_infs`
    the first such point would end the search with an error.

    >>> with own_points():
    ...     print(jnp.log(-jnp.ones(1)))
    [nan]
    """
    with own_settings(wide=True), jax.debug_nans(False), jax.debug_infs(False):
        yield


@contextlib.contextmanager
def gradients_named(function: str) -> Iterator[None]:
    """A context that turns JAX's errors about operations without a derivative into an error that says what to write.

    Args:
      function: the name of the function that the user called.
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        said = str(error).split(". ")[0].splitlines()[0] if str(error) else ""
        if said.startswith("Reverse-mode differentiation does not work"):
            said = "a loop whose number of steps is not known: lax.while_loop, or lax.fori_loop with computed limits"
            remedy = "write the loop as jax.lax.fori_loop(0, 10, ...) with numbers of Python, or as jax.lax.scan"
        elif any(text in said for text in _NO_DERIVATIVE):
            remedy = "compute this with jax.numpy, or give it a derivative by jax.custom_jvp"
        else:
            raise
        raise binding_error(
            function, "fn has no gradients", said, "a function that jax.grad differentiates", remedy) from error


def check_gradients(count: int, needed: int) -> None:
    """Raises if `count`, the number of finite gradients, is below `needed`.

    >>> check_gradients(24, 24)
    """
    if count < needed:
        raise _refusal(
            "gradients that are not finite", f"{count} of the {needed} finite gradients that are needed",
            "finite gradients at random points near params",
            "write jnp.sqrt(jnp.where(x > 0, x, 1.0)), or y / jnp.where(x != 0, x, 1.0), and choose the result by a "
            "second jnp.where: one jnp.where behind the operation still has a gradient of NaN")


def _origins(closed: core.ClosedJaxpr, args: Sequence[Any]) -> dict[str, str]:
    """Evaluates a jaxpr one operation at a time: "NaN" or "infinity" → a text that names the operation that made it."""
    origins = dict[str, str]()

    def equation(eqn: Any, ins: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "shard_map":
            outs = sharded(eqn, ins, core.jaxpr_as_fun(core.ClosedJaxpr(eqn.params["jaxpr"], ())))
        elif call := called(eqn, ins):
            return run(*call)
        else:
            outs = applied(eqn, ins)
        # Masks put -inf into finite networks, so only NaN and +inf count.
        for kind, test in (("NaN", np.isnan), ("infinity", np.isposinf)):
            if kind not in origins and any(test(np.asarray(x)).any() for x in outs if is_float(x)):
                origins[kind] = f"the first {kind} comes out of `{eqn.primitive.name}`{source(eqn)}"
        return outs

    run = functools.partial(interpret, constant=lambda x: x, equation=equation)
    run(closed.jaxpr, closed.consts, args)
    return origins
