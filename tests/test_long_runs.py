"""Weights stay bounded in long runs, as they do under plain AdamW: tests of equivariance cannot see that twins diverge.

Here stand runs of many times 1/(rate × decay) steps. Whether twins take the same steps is tested elsewhere.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from tests.cases import GAUGE_CASES, GaugeCase

Tree = Any


def _of_kernels(params: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, params)


def largest(tree: Tree) -> dict[str, jax.Array]:
    """Path → the largest absolute value of a leaf."""
    return {path: jnp.abs(x).max() for path, x in leaves_by_path(tree).items()}


Gradient = Callable[[Tree, jax.Array], Tree]


def run(tx: optax.GradientTransformation, params: Tree, steps: int, gradient: Gradient) -> tuple[Tree, Tree]:
    """The weights and the state after some steps; `gradient` takes the weights and the number of a step."""

    def step(carry: tuple[Tree, Tree], n: jax.Array) -> tuple[tuple[Tree, Tree], None]:
        updates, state = tx.update(gradient(carry[0], n), carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    end: tuple[Tree, Tree] = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), jnp.arange(steps))[0])(params)
    return end


def still(params: Tree, n: jax.Array) -> Tree:
    """No gradient."""
    return jax.tree.map(jnp.zeros_like, params)


def growth_by_decay(gauges: Any, params: Tree, mask: Any) -> dict[str, float]:
    """Path → by what factor a leaf's largest value grows in 300 steps that take 5 % each, without a gradient."""
    decayed = optax.chain(optax.add_decayed_weights(0.05, mask), optax.scale(-1.0))
    end, _ = run(go.quotient(decayed, gauges), params, 300, still)
    return {path: float(x / y) for (path, x), y in zip(largest(end).items(), largest(params).values(), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("mask", [_of_kernels, None], ids=["kernels", "all"])
@pytest.mark.parametrize("case", GAUGE_CASES, ids=lambda case: case.name)
def test_decay_alone_inflates_no_leaf(case: GaugeCase, mask: Any, x64: None) -> None:
    """While an anchor was one block, the bias beside it grew to 5e6 times its size."""
    growth = growth_by_decay(case.gauges(), case.params(jax.random.key(0)), mask)
    assert all(x < 10 for x in growth.values()), growth


WIDTH = 32
LAYERS = ("first", "second", "third")


def _network(key: jax.Array) -> Tree:
    shapes = ((8, WIDTH), (WIDTH, WIDTH), (WIDTH, 1))
    return {
        name: {"kernel": jax.random.normal(k, shape) / shape[0] ** 0.5, "bias": jnp.zeros(shape[1])}
        for name, k, shape in zip(LAYERS, jax.random.split(key, 3), shapes, strict=True)
    }


def _loss(params: Tree, n: jax.Array) -> jax.Array:
    """On a batch of 16 noisy values of a sine."""
    inputs, noise = jax.random.split(jax.random.key(n))
    x = jax.random.normal(inputs, (16, 8))
    y = jnp.sin(x.sum(1)) + 0.3 * jax.random.normal(noise, (16,))
    first, second, third = (params[name] for name in LAYERS)
    hidden = jax.nn.relu(jax.nn.relu(x @ first["kernel"] + first["bias"]) @ second["kernel"] + second["bias"])
    return jnp.mean(jnp.square((hidden @ third["kernel"] + third["bias"])[:, 0] - y))


UNITS = [
    go.rescale({f"{name}/kernel": "_ channel", f"{name}/bias": "channel"}, {f"{reader}/kernel": "channel _"})
    for name, reader in itertools.pairwise(LAYERS)
]


def test_decay_of_kernels_inflates_no_bias() -> None:
    params = jax.tree.map(lambda x: x + 0.1, _network(jax.random.key(0)))
    assert all(x < 20 for x in growth_by_decay(UNITS, params, _of_kernels).values())


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.1, 0.5])
@pytest.mark.parametrize("make", [go.quotient_adamw, go.ddc_adamw], ids=["quotient_adamw", "ddc_adamw"])
def test_biases_stay_as_small_as_under_adamw(make: Any, decay: float) -> None:
    """In 20,000 steps at rate 0.01 with decay of kernels, they grew to 1e9 and to NaN while anchors left them out."""
    params, settings = _network(jax.random.key(0)), {"weight_decay": decay, "mask": _of_kernels}
    plain, ours = (
        largest(run(tx, params, 20_000, jax.grad(_loss))[0])
        for tx in (optax.adamw(0.01, **settings), make(0.01, UNITS, **settings))
    )
    for path in (f"{name}/bias" for name in LAYERS):
        assert float(ours[path]) < 5 * float(plain[path]) + 1, (ours, plain)


def test_what_dead_channels_leave_in_the_offset_stays_finite() -> None:
    """With `pin=False` and decay it grew for ever; between two dead channels, products of two overflowed."""
    params, decayed = _network(jax.random.key(0)), optax.chain(optax.add_decayed_weights(0.05), optax.scale(-1.0))
    end, _ = run(go.quotient(decayed, UNITS, pin=False), params, 3_000, still)
    assert all(bool(jnp.isfinite(x)) and float(x) < 2.0 for x in largest(end).values())


MATRICES = [go.head_linear({"a": "_ basis"}, {"b": "_ basis"})]


def towards(mean: jax.Array, size: float) -> Gradient:
    """Of the distance of a product from noise of this size around its mean."""

    def loss(p: Tree, n: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(p["a"] @ p["b"].T - mean - size * jax.random.normal(jax.random.key(n), mean.shape)))

    return jax.grad(loss)


@pytest.mark.slow
def test_a_matrix_in_the_offset_and_its_inverse_stay_inverse() -> None:
    """They are composed apart at every step; roundoff parted them by 3e-3 in 20,000 steps."""
    params = {name: jax.random.normal(jax.random.key(k), (6, 4)) for k, name in enumerate(("a", "b"))}
    gradient = towards(jax.random.normal(jax.random.key(2), (6, 6)), 0.3)
    _, state = run(go.quotient_adamw(0.003, MATRICES, pin=False), params, 10_000, gradient)
    (pair,) = state.offset.values()
    assert float(jnp.abs(pair[0] @ pair[1] - jnp.eye(4)).max()) < 1e-5


@pytest.mark.parametrize(
    "inner", [optax.adamw(0.01), optax.contrib.muon(0.02, weight_decay=0.1)], ids=["adamw", "contrib.muon"]
)
def test_factors_that_have_only_noise_to_learn_stay_as_small_as_without_a_gauge(inner: Any) -> None:
    """With `pin=False` they were NaN after 102 to 185 steps: the offset was not turned when `hold` turned a head."""
    params = {name: jax.random.normal(jax.random.key(k), (12, 8)) for k, name in enumerate(("a", "b"))}
    gradient = towards(jnp.zeros((12, 12)), 0.5)
    ends = (run(tx, params, 2_000, gradient)[0] for tx in (inner, go.quotient(inner, MATRICES, pin=False)))
    alone, ours = (float(jnp.linalg.norm(p["a"] @ p["b"].T)) for p in ends)
    assert ours < 2 * alone


@pytest.mark.parametrize("with_scale", [True, False])
@pytest.mark.parametrize("make", [
    go.quotient, functools.partial(go.quotient, pin=False),
    lambda inner, gauges: optax.chain(inner, go.gauge_retract(gauges)),
], ids=["pinned", "free", "gauge_retract"])
def test_a_norms_scale_that_noise_leads_through_zero_leaves_the_outputs_small(make: Any, with_scale: bool) -> None:
    """`norm_read_shift` divides by it: outputs grew to 1e7 and more with `pin=False`, and without `norm_scale`."""
    kernel, reader = jax.random.normal(jax.random.key(0), (8, 4)) / 3, {"kernel": "channel _"}
    params = {"scale": jnp.ones(8), "bias": jnp.zeros(8), "kernel": kernel, "behind": jnp.zeros(4)}
    gauges = [go.norm_read_shift(reader, {"scale": "channel"}, {"bias": "channel"}, {"behind": "_"})]
    gauges += [go.norm_scale({"scale": "channel", "bias": "channel"}, reader)] if with_scale else []

    def outputs(p: Tree, x: jax.Array) -> jax.Array:
        out: jax.Array = (jax.nn.standardize(x) * p["scale"] + p["bias"]) @ p["kernel"] + p["behind"]
        return out

    def loss(p: Tree, n: jax.Array) -> jax.Array:
        inputs, noise = jax.random.split(jax.random.key(n))
        return jnp.mean(jnp.square(outputs(p, jax.random.normal(inputs, (4, 8))) - jax.random.normal(noise, (4, 4))))

    end, _ = run(make(optax.adamw(0.03, weight_decay=0.1), gauges), params, 3_000, jax.grad(loss))
    assert jnp.abs(outputs(end, jax.random.normal(jax.random.key(1), (99, 8)))).max() < 5
