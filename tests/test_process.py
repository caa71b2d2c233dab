"""Calls work whatever else the process has chosen: settings of JAX, and compiled programs that it keeps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go

Tree = Any
HEADS = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
FACTORS = go.head_linear({"value": "_ head basis"}, {"out": "head basis _"})


def _net() -> tuple[Tree, list[np.ndarray], Callable[[Tree, Any], jax.Array]]:
    """Weights in float64, batches of tokens in int64, and a function that closes over a mask in float64."""
    draw = np.random.default_rng(0)
    shapes = {"embed": (5, 6), "up": (6, 6), "value": (6, 2, 3), "out": (2, 3, 4)}
    params, mask = {path: draw.normal(size=shape) for path, shape in shapes.items()}, draw.normal(size=(1, 1, 6))

    def fn(p: Tree, tokens: Any) -> jax.Array:
        x = jax.nn.relu(jnp.asarray(p["embed"])[tokens] @ p["up"]) * mask
        return jnp.einsum("bti,ihd,hdo->bto", x, p["value"], p["out"])

    return params, list(draw.integers(0, 5, (2, 12, 8))), fn


TX = go.quotient(optax.adamw(0.1), HEADS)


def _check(p: Tree, x: Any, fn: Any, loss: Any, **given: Any) -> Any:
    return go.check(TX, TX.init(p), p, jax.grad(lambda q: jnp.sum(fn(q, x)))(p), loss_fn=loss, **given)


CALLS: dict[str, Callable[[Tree, list[np.ndarray], Any], Any]] = {
    "discover": lambda p, x, fn: go.discover(fn, p, x, "predictions", progress=False),
    "census": lambda p, x, fn: go.measure.census(fn, p, x, HEADS, outputs="predictions", progress=False),
    "check": lambda p, x, fn: _check(p, x[0], fn, lambda q, b: jnp.sum(fn(q, b)), batch=x[0]),
    "check of a loss with its batch": lambda p, x, fn: _check(p, x[0], fn, lambda q: jnp.sum(fn(q, x[0]))),
    "plan": lambda p, x, fn: go.plan(TX, p),
    "rotate": lambda p, x, fn: go.orbit.rotate(p, HEADS, "random"),
    "pack": lambda p, x, fn: go.orbit.pack(p, FACTORS),
    "canonicalize": lambda p, x, fn: go.orbit.canonicalize(p, HEADS),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("width", [np.float64, np.float32])
def test_arrays_that_a_kept_program_closes_over(name: str, width: Any) -> None:
    """Where JAX reads such an array in the 32 bits of that program, the caller gets an error of the runtime."""
    params, batches, fn = _net()
    params = jax.tree.map(width, params)
    kept = jax.jit(lambda: [fn(params, x) for x in batches])
    kept()
    CALLS[name](params, batches, fn)


def _step(tx: optax.GradientTransformation, p: Tree, x: Any, fn: Any) -> Tree:
    return tx.update(jax.grad(lambda q: jnp.sum(jnp.square(fn(q, x))))(p), tx.init(p), p)[0]


STEPS: dict[str, optax.GradientTransformation] = {
    "quotient": TX,
    "quotient of muon": go.quotient(optax.contrib.muon(0.1), HEADS),
    "linear": go.quotient(optax.adamw(0.1), FACTORS),
    "max_norm_muon": go.max_norm_muon(0.1, HEADS, {"value": "_ head neuron", "out": "_ _ neuron"}),
    "ddc_adamw": go.ddc_adamw(0.1, HEADS),
    "scale_by_opposite_gram": go.links.scale_by_opposite_gram(FACTORS),
}
CALLS_AND_STEPS = CALLS | {
    name: lambda p, x, fn, tx=tx: _step(tx, p, x[0], fn) for name, tx in STEPS.items()
}


@pytest.mark.slow_rows("census", "check*", "plan", "rotate", "pack", "*muon", "linear", "scale_by*")
@pytest.mark.parametrize("name", CALLS_AND_STEPS)
def test_strict_settings_of_promotion(name: str) -> None:
    params, batches, fn = _net()
    params, expected = jax.tree.map(np.float32, params), None
    for rank, dtypes in (("allow", "standard"), ("raise", "strict")):
        with jax.numpy_rank_promotion(rank), jax.numpy_dtype_promotion(dtypes):
            made = CALLS_AND_STEPS[name](params, batches, fn)
        if name in STEPS:
            expected = made if expected is None else expected
            assert jax.tree.all(jax.tree.map(np.array_equal, made, expected))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # what is switched off
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("tx", [
    go.ddc_adamw(0.1, HEADS), go.links.scale_by_opposite_gram(FACTORS, every=2),
    go.measure.track(optax.adam(0.1), HEADS, every=2),
], ids=["ddc_adamw", "scale_by_opposite_gram", "track"])
def test_a_state_made_before_x64_was_switched_goes_on(tx: optax.GradientTransformation, first: bool) -> None:
    params = {"value": jnp.ones((6, 2, 3), jnp.float32), "out": jnp.ones((2, 3, 4), jnp.float32)}
    with jax.enable_x64(first):
        state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(tx.init, params))
    with jax.enable_x64(not first):
        updates, _ = jax.jit(tx.update).lower(params, state, params).out_info
    assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, params)
