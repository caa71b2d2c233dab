"""Trees of several precisions: float32 scales beside bfloat16 kernels train at rates that bfloat16 rounds away."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import gauge_optax as go
from tests.twins import normal, trained

X, KERNEL, DOWN = normal(0, {"x": (64, 8), "kernel": (8, 16), "down": (16, 4)}).values()
KERNEL, DOWN = (KERNEL / 3).astype(jnp.bfloat16), (DOWN / 4).astype(jnp.bfloat16)


class Row(NamedTuple):
    """A net with float32 factors beside bfloat16 kernels."""

    params: Any
    fn: Callable[[Any], jax.Array]
    gauges: Any


def _up(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _gated(p: Any) -> jax.Array:
    x = X * p["scale"]
    return (x @ _up(p["k"])) * jax.nn.sigmoid(x @ _up(p["l"]))


def _units(p: Any) -> jax.Array:
    return jax.nn.relu((X * p.get("scale", 1.0)) @ _up(p["k"])) @ _up(p["down"])


def _multiplied(p: Any) -> jax.Array:
    return X @ (_up(p["k"]) * p["factor"])


NORM = go.norm_scale({"scale": "channel"}, {"k": "channel _"})
TWO = go.norm_scale({"scale": "channel"}, {"k": "channel _", "l": "channel _"})
UNITS = go.rescale({"k": "_ channel"}, {"down": "channel _"})
ROWS = {
    "norm": Row({"scale": jnp.ones(8), "k": KERNEL}, lambda p: (X * p["scale"]) @ _up(p["k"]), NORM),
    "1 + scale": Row({"scale": jnp.zeros(8), "k": KERNEL}, lambda p: (X * (1 + p["scale"])) @ _up(p["k"]),
                     go.norm_scale({"scale": "1+ channel"}, {"k": "channel _"})),
    "a scale of two kernels": Row({"scale": jnp.ones(8), "k": KERNEL, "l": KERNEL[:, ::-1]}, _gated, TWO),
    "multiplier": Row({"factor": jnp.ones(16), "k": KERNEL}, _multiplied,
                      go.rescale({"factor": "channel"}, {"k": "_ channel"})),
    "one multiplier": Row({"factor": jnp.ones(1), "k": KERNEL}, _multiplied,
                          go.rescale({"factor": "_"}, {"k": "_ _"})),
    "a coarse anchor": Row({"k": KERNEL, "down": DOWN.astype(jnp.float32)}, _units, UNITS),
    "norm and units": Row({"scale": jnp.ones(8), "k": KERNEL, "down": DOWN}, _units, [NORM, UNITS]),
}


def moved(row: Row, tx: Any, steps: int = 200) -> float:
    """How far the function moves, relative to its size."""
    target = 1.3 * row.fn(row.params)
    params, _ = trained(tx, lambda p: jnp.mean((row.fn(p) - target) ** 2), row.params, steps)
    assert jax.tree.map(lambda x: x.dtype, params) == jax.tree.map(lambda x: x.dtype, row.params)
    return float(jnp.linalg.norm(row.fn(params) - row.fn(row.params)) / jnp.linalg.norm(row.fn(row.params)))


@functools.cache
def moved_alone(name: str) -> float:
    return moved(ROWS[name], optax.adamw(1e-4))


@pytest.mark.slow_rows("[!n]*-[!a]*")
@pytest.mark.parametrize("options", [{}, {"pin": False}, {"rest": "balanced"}], ids=["anchor", "pin=False", "balanced"])
@pytest.mark.parametrize("name", ROWS)
def test_a_quotient_moves_the_function_as_its_optimizer_does(name: str, options: dict[str, Any]) -> None:
    """A rate of 1e-4 is below half of bfloat16's spacing for most entries."""
    row = ROWS[name]
    assert moved(row, go.quotient(optax.adamw(1e-4), row.gauges, **options)) >= 0.9 * moved_alone(name)


def test_an_anchor_that_decays_stays_near_a_kernel_that_rounds() -> None:
    """The scale in float32 takes all decay. In 2,000 steps it would shrink to e⁻²⁰, and the kernel grow by e²⁰."""
    params = {"scale": jnp.ones(4), **normal(0, {"up": (4, 6)}, jnp.bfloat16)}
    tx = go.quotient_adamw(0.1, go.norm_scale({"scale": "channel"}, {"up": "channel _"}), weight_decay=0.1)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, carry[0]), carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    (after, _), _ = jax.lax.scan(step, (params, tx.init(params)), None, 2000)
    assert 2.0**-9 <= float(jnp.min(after["scale"])) <= float(jnp.max(after["scale"])) <= 1.0
    assert float(jnp.max(jnp.abs(after["up"]))) <= 2.0**9 * float(jnp.max(jnp.abs(params["up"])))


def test_a_free_leaf_of_eight_bits_trains_beside_a_shift() -> None:
    """No other dtype compares with float8."""
    params = {"head": jnp.ones((3, 4)), "free": jnp.ones(4, jnp.float8_e4m3fn)}
    tx = go.quotient(optax.sgd(0.5), go.logit_shift({"head": "_ vocab"}))
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    assert updates["free"].dtype == jnp.float8_e4m3fn and float(updates["free"].astype(jnp.float32).sum()) == -2.0
