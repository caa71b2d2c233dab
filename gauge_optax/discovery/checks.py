"""What `discover` refuses, and the form in which it computes: float64 leaves and batches, comparable outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import binding_error, leaves_by_path
from gauge_optax.discovery.sketch import Leaves
from gauge_optax.discovery.trace import source

_OUTPUTS = ("logits", "logprobs", "loss")


def listed(batches: Any) -> list[Any]:
    """Batches as a list; raises for one array, whose rows they would be."""
    if hasattr(batches, "ndim"):
        raise binding_error(
            "discover", "an array for batches", f"one of shape {jnp.shape(batches)}, whose rows would be batches",
            "a list of two batches or more, each what fn takes",
            "write [x[:4], x[4:8]], or [(x, y), …] for an fn of one argument that unpacks them")
    return list(batches)


def check_arguments(outputs: str, batches: Sequence[Any], near: float, seed: int = 0) -> None:
    """Raises for arguments that say nothing of the function."""
    if outputs not in _OUTPUTS:
        raise binding_error(
            "discover", f"unknown outputs {outputs!r}", repr(outputs), f"one of {', '.join(map(repr, _OUTPUTS))}",
            "say what fn returns: 'logits' matter up to a constant along the last axis, the others as they are")
    if len(batches) < 2:
        raise binding_error(
            "discover", "too few batches", f"{len(batches)} batch", "two or more, of what fn takes",
            "pass a list of batches: what one batch does not reach looks like a symmetry")
    if not 0 <= near < 1:
        raise binding_error(
            "discover", f"bad near {near!r}", repr(near), "a number from 0 to 1", "leave it at 1e-3")
    if not isinstance(seed, int | np.integer):
        raise binding_error(
            "discover", "no seed", f"a {type(seed).__name__}", "an int: points and elements are drawn by NumPy",
            "write seed=0")


def double_leaves(params: Any) -> Leaves:
    """Floating-point leaves by path, in float64."""
    found = leaves_by_path(params)
    leaves = {p: np.asarray(x, np.float64) for p, x in found.items() if _is_float(x)}
    if not leaves:
        kinds = ", ".join(f"{p} ({getattr(x, 'dtype', type(x).__name__)})" for p, x in list(found.items())[:4])
        raise binding_error(
            "discover", "no floating-point leaves in params", kinds or "an empty tree", "arrays of parameters",
            "pass the tree that fn differentiates in, as of nnx.state(model) or variables['params']")
    return leaves


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def double_batch(batch: Any) -> Any:
    """A batch with its floating-point arrays in float64."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if _is_float(x) else x, batch)


def compared(out: Any, outputs: str) -> Any:
    """What of the outputs is compared: floating-point leaves; logits less their log-sum."""
    leaves = [x for x in jax.tree.leaves(out) if _is_float(x)]
    if not leaves:
        raise binding_error(
            "discover", "no floating-point outputs", f"{len(jax.tree.leaves(out))} other leaves", "an array of numbers",
            "return the logits, log-probabilities or loss from fn")
    if outputs != "logits":
        return leaves
    if any(x.ndim == 0 or x.shape[-1] == 1 for x in leaves):
        raise binding_error(
            "discover", "outputs that are no logits", f"shapes {', '.join(str(x.shape) for x in leaves)}",
            "classes along the last axis", "say outputs='loss' where fn returns a number")
    return [jax.nn.log_softmax(x, axis=-1) for x in leaves]


def check_precision(low: Sequence[str]) -> None:
    """Raises where a value that depends on parameters is computed in less than double precision."""
    if low:
        raise binding_error(
            "discover", "low precision inside fn", low[0] + (f", and {len(low) - 1} more" if len(low) > 1 else ""),
            "float64 throughout: 1e-9 tells a symmetry from what is nearly one",
            "build the model for discover without dtype= and without casts, or with float64")


def check_repeatable(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    """Raises where two calls on one input differ."""
    for k, (a, b) in enumerate(zip(one, other, strict=True)):
        if not np.array_equal(a, b, equal_nan=True):
            raise binding_error(
                "discover", "two calls of fn differ", f"output {k} by {np.abs(a - b).max():.1e} on the same input",
                "a pure function of (params, batch)",
                "switch dropout off (deterministic=True, model.eval()), or pass the same key with every batch")


def check_finite(out: Sequence[np.ndarray], explain: Callable[[], str]) -> None:
    """Raises where outputs are not finite; `explain` finds the first operation to blame."""
    for k, x in enumerate(out):
        if not np.isfinite(x).all():
            bad = int((~np.isfinite(x)).sum())
            raise binding_error(
                "discover", "outputs that are not finite", f"{bad} of {x.size} entries of output {k}; {explain()}",
                "finite outputs at generic points near params",
                "mask with a large negative number in place of -inf where a whole row is masked; check the inputs")


def first_not_finite(fn: Callable[..., Any], *args: Any) -> str:
    """The first operation that makes a NaN, or else an infinity, out of finite numbers, and where it stands."""
    closed = jax.make_jaxpr(fn)(*args)
    found: dict[str, str] = {}
    _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), found)
    return found.get("NaN") or found.get("infinity") or "where could not be told"


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], found: dict[str, str]) -> list[Any]:
    """A jaxpr carried out one operation after another; what is not finite first goes to `found`."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        ins = [atom.val if hasattr(atom, "val") else values[atom] for atom in eqn.invars]
        body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if body is not None and eqn.primitive.name not in ("scan", "while", "cond", "pallas_call"):
            inner, own = (body.jaxpr, body.consts) if hasattr(body, "jaxpr") else (body, ())
            outs = _evaluate(inner, own, ins[len(ins) - len(inner.invars) :], found)
        else:
            result = eqn.primitive.bind(*map(jnp.asarray, ins), **eqn.params)
            outs = result if eqn.primitive.multiple_results else [result]
        values.update(zip(eqn.outvars, outs, strict=True))
        for kind, test in (("NaN", np.isnan), ("infinity", np.isposinf)):
            if kind not in found and any(test(np.asarray(x)).any() for x in outs if _is_float(x)):
                found[kind] = f"the first {kind} comes out of `{eqn.primitive.name}`{source(eqn)}"
    return [atom.val if hasattr(atom, "val") else values[atom] for atom in jaxpr.outvars]
