"""quotient_adamw and quotient_muon: the represented step is that of the represented point.

The post's two examples with its own numbers, twins under GL at condition 100, whole lists of gauges on real models, and
factors that lack ranks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.cases import GAUGE_CASES
from tests.quick import jit
from tests.tolerances import tolerance

Tree = Any
Make = Callable[[Any], optax.GradientTransformationExtraArgs]

RATE, EPS = 1e-3, 1e-3
LORA = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
OURS: dict[str, Make] = {
    "quotient_adamw": lambda gauges: go.quotient_adamw(1e-2, gauges, weight_decay=0.1),
    "quotient_muon": lambda gauges: go.quotient_muon(1e-2, gauges, weight_decay=0.1),
}
CONDITION_100 = 2.303


def _one_step(tx: optax.GradientTransformation, loss: Callable[[Tree], jax.Array], params: Tree) -> Tree:
    updates, _ = tx.update(jax.grad(loss)(params), tx.init(params), params)
    return optax.apply_updates(params, updates)


def _relative(found: Any, expected: Any) -> float:
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


# The post's examples ------------------------------------------------------------------------------


def _diagonal(k: float, turns: tuple[int, ...] = ()) -> Tree:
    """§6: A = diag(K, 1/K) and B = (1 − ε)·A⁻¹; with seeds, turned by orthogonal matrices on both sides of each."""
    a, b = np.diag([k, 1 / k]), (1 - EPS) * np.diag([1 / k, k])
    if turns:
        rows, basis, columns = (np.linalg.qr(np.random.default_rng(s).normal(size=(2, 2)))[0] for s in turns)
        a, b = rows @ a @ basis, columns @ b @ basis
    return {"a": jnp.asarray(a), "b": jnp.asarray(b.T)}


def _distance_from_identity(p: Tree) -> jax.Array:
    return 0.5 * jnp.sum(jnp.square(p["a"] @ p["b"] - jnp.eye(2)))


POWERS = [10.0**n for n in range(9)]


@pytest.mark.parametrize("name", OURS)
def test_the_two_by_two_step_does_not_depend_on_k(name: str, x64: None) -> None:
    tx = OURS[name](LORA)
    step = jit(lambda p: _one_step(tx, _distance_from_identity, p))

    def product(p: Tree) -> jax.Array:
        after = step(p)
        return after["a"] @ after["b"]

    reference = product(_diagonal(1.0))
    assert max(_relative(product(_diagonal(k)), reference) for k in POWERS) <= 1e-8
    for seeds in ((1, 2, 3), (4, 5, 6)):
        turned = product(_diagonal(1.0, seeds))
        errors = {k: _relative(product(_diagonal(k, seeds)), turned) for k in POWERS}
        print(name, seeds, {f"{k:.0e}": f"{error:.0e}" for k, error in errors.items()})
        assert max(errors[k] for k in (1.0, 10.0, 100.0)) <= 1e-8


# Twins --------------------------------------------------------------------------------------------


def _normal(seed: int, **shapes: tuple[int, ...]) -> Tree:
    draw = np.random.default_rng(seed).normal
    tree: Tree = {}
    for name, shape in shapes.items():
        *parents, last = name.split("__")
        inner = functools.reduce(lambda t, parent: t.setdefault(parent, {}), parents, tree)
        inner[last] = jnp.asarray(draw(size=shape))
    return tree


X = np.random.default_rng(7).normal(size=(16, 12))
Y = np.random.default_rng(8).normal(size=(16, 10))


def _lora_product(p: Tree) -> jax.Array:
    return p["a"] @ p["b"]


def _lora_loss(p: Tree, rows: int = 16) -> jax.Array:
    x, y = (jnp.asarray(z[:rows], p["a"].dtype) for z in (X, Y))
    return jnp.mean(jnp.square(x @ _lora_product(p) - y))


def _query_key_product(p: Tree) -> jax.Array:
    query, key = (jnp.concatenate([p[n]["kernel"], p[n]["bias"][None]]) for n in ("query", "key"))
    return jnp.einsum("dhe,fhe->hdf", query, key)


def _value_out_product(p: Tree) -> jax.Array:
    value = jnp.concatenate([p["value"]["kernel"], p["value"]["bias"][None]])
    return jnp.einsum("dhe,hef->hdf", value, p["out"])


def _product_loss(product: Callable[[Tree], jax.Array], p: Tree) -> jax.Array:
    """Of inputs with a constant; sees every entry of the products."""
    m = product(p)
    x = jnp.asarray(np.random.default_rng(9).normal(size=(5, m.shape[1])), m.dtype)
    return jnp.mean(jnp.square(jnp.tanh(jnp.einsum("nd,hdf->nhf", x, m)) - 0.3))


def _bound(kernel: str, bias: str) -> dict[str, str]:
    return {kernel: "_ head basis", bias: "head basis"}


CASES: dict[str, tuple[go.Gauge, Tree, Callable[[Tree], jax.Array], Callable[[Tree], jax.Array]]] = {
    "lora": (LORA, functools.partial(_normal, 0, a=(12, 4), b=(4, 10)), _lora_product, _lora_loss),
    "query_key": (
        go.head_linear(_bound("query/kernel", "query/bias"), _bound("key/kernel", "key/bias")),
        functools.partial(
            _normal, 1, query__kernel=(6, 2, 3), query__bias=(2, 3), key__kernel=(6, 2, 3), key__bias=(2, 3)
        ),
        _query_key_product,
        functools.partial(_product_loss, _query_key_product),
    ),
    "value_out": (
        go.head_linear(_bound("value/kernel", "value/bias"), {"out": "head basis _"}),
        functools.partial(_normal, 2, value__kernel=(6, 2, 3), value__bias=(2, 3), out=(2, 3, 6)),
        _value_out_product,
        functools.partial(_product_loss, _value_out_product),
    ),
}


def _train(tx: optax.GradientTransformation, loss: Callable[[Tree], jax.Array], *starts: Tree) -> list[list[Tree]]:
    """Every point of 20 steps from each start; compiled once."""

    @jit
    def step(params: Tree, state: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    paths = []
    for params in starts:
        state, path = jit(tx.init)(params), [params]
        for _ in range(20):
            params, state = step(params, state)
            path.append(params)
        paths.append(path)
    return paths


def _twin_error(name: str, make: Make, params: Tree, seed: int, loss: Any = None) -> float:
    """Largest relative distance of represented products over 20 steps."""
    gauge, _, product, own = CASES[name]
    twin = gauge.act(gauge.sample(jax.random.key(seed), params, CONDITION_100), params)
    ours, theirs = _train(make(gauge), loss or own, params, twin)
    assert _relative(product(params), product(ours[-1])) > 1e-3, "nothing moved"
    return max(_relative(product(b), product(a)) for a, b in zip(ours[1:], theirs[1:], strict=True))


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "lora" else pytest.mark.slow) for c in CASES])
def test_products_stay_together_at_condition_100(case: str, x64: None) -> None:
    params = CASES[case][1]()
    assert _twin_error(case, lambda _: optax.adamw(1e-2), params, 0) > 1e-2, "AdamW does not see these twins apart"
    for name, make in OURS.items():
        error = max(_twin_error(case, make, params, seed) for seed in range(2))
        print(f"{case} {name}: {error:.1e}")
        assert error <= 1e-10


@pytest.mark.slow_rows("quotient_muon-*", "*-2")
@pytest.mark.parametrize("rows", [16, 2])
@pytest.mark.parametrize("name", OURS)
def test_lora_starts_from_zero(name: str, rows: int, x64: None) -> None:
    """B = 0, and with two examples a B that has rank 2 of 4 for ever."""
    params = CASES["lora"][1]()
    params = params | {"b": jnp.zeros_like(params["b"])}
    loss = functools.partial(_lora_loss, rows=rows)
    assert _twin_error("lora", OURS[name], params, 0, loss) <= 1e-10
    (path,) = _train(OURS[name](LORA), loss, params)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(path[-1]))
    assert float(loss(path[-1])) < 0.9 * float(loss(params))


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_a_target_of_fewer_ranks_in_float32(name: str) -> None:
    """Its gradient has rounding in the place of two directions, which must not become weights."""
    draw = np.random.default_rng(11).normal
    goal = jnp.asarray(draw(size=(12, 2)) @ draw(size=(2, 10)), jnp.float32)
    params = {"a": jnp.asarray(draw(size=(12, 4)), jnp.float32), "b": jnp.zeros((4, 10), jnp.float32)}

    def loss(p: Tree) -> jax.Array:
        return jnp.mean(jnp.square(jnp.asarray(X, jnp.float32) @ (_lora_product(p) - goal)))

    # A polar factor multiplies what is rounding by its slope at zero, 485: Optax's Muon too.
    slope = 10.0 if name == "quotient_muon" else 1.0
    assert _twin_error("lora", OURS[name], params, 0, loss) <= slope * tolerance("twins", "float32")
    (path,) = _train(OURS[name](LORA), loss, params)
    assert max(float(jnp.linalg.norm(p["a"])) for p in path) < 10.0 * float(jnp.linalg.norm(params["a"]))


def test_heads_wider_than_the_model_are_left_as_they_are(x64: None) -> None:
    """Rank 4 of 6 on both sides: neither fixes what the other lacks."""
    gauge = go.head_linear({"query": "_ head basis"}, {"key": "_ head basis"})
    params, grads = (_normal(seed, query=(4, 2, 6), key=(4, 2, 6)) for seed in (0, 1))
    adam, tx = optax.adam(1e-2), go.quotient(optax.adam(1e-2), gauge, hold=False)
    expected, _ = adam.update(grads, jit(adam.init)(params), params)
    found, _ = tx.update(grads, jit(tx.init)(params), params)
    for name, step in expected.items():
        np.testing.assert_allclose(found[name], step, rtol=0, atol=tolerance("optax"))


# Whole lists --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_complex_planes_stay_one_function(x64: None) -> None:
    """rope_linear is a torus and a rescale per plane: twins stay together, and the moduli where they were."""
    case = next(c for c in GAUGE_CASES if c.name == "rope_linear/half")
    (gauge,), params = case.gauges(), case.params(jax.random.key(0))
    tx = go.quotient_muon(1e-2, gauge, weight_decay=0.1)
    go.testing.assert_equivariant_step(tx, case.loss, params, gauge, jax.random.key(1), steps=5, rtol=1e-10)
    updates, _ = tx.update(jax.grad(case.loss)(params), jit(tx.init)(params), params)
    moved = gauge.read(optax.apply_updates(params, updates))[""] - gauge.read(params)[""]
    assert float(jnp.max(jnp.abs(moved[..., 0]))) <= 1e-9


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_init_is_one_state_inside_jit_and_outside(make: Make) -> None:
    """Inside, constants are no tracers, and yet nothing is computed at once."""
    params = {"a": jnp.ones((4, 2)).at[0, 1].set(3.0), "b": jnp.ones((2, 3)).at[1, 2].set(-2.0)}
    tx = make(LORA)
    outside = tx.init(params)
    for inside in (jax.jit(lambda: tx.init(params))(), jax.jit(tx.init)(params)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), inside, outside)
