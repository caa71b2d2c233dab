"""Learnable multipliers: what they do to the function, what is dead, and what fixing them does to a run."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from models import lm, multipliers
from tests.quick import jit

Tree = Any
TINY = {"vocab": 11, "d_model": 6, "layers": 1, "heads": 2, "kv_heads": 2, "d_head": 3, "d_ff": 5, "max_len": 6}
GPT = lm.LMConfig(**TINY, mlp="relu")
LLAMA = lm.llama_config(**(TINY | {"d_head": 4}))
TOKENS = jnp.array([[1, 5, 2, 9, 4, 3, 7], [0, 8, 8, 1, 2, 6, 10]])


def _parts(config: lm.LMConfig) -> tuple[Tree, Callable[[Tree], jax.Array]]:
    """Parameters in general position, float64 under x64, and the logits."""
    graph, state = nnx.split(multipliers.build(config, nnx.Rngs(0)))
    shapes, treedef = jax.tree.flatten(nnx.to_pure_dict(state))
    rng = np.random.default_rng(0)
    drawn = [jnp.asarray(0.5 * rng.normal(size=x.shape) + (1.0 if x.ndim == 1 else 0.0)) for x in shapes]
    return treedef.unflatten(drawn), lambda p: nnx.merge(graph, p)(TOKENS[:, :-1])


def _loss(logits: Callable[[Tree], jax.Array], p: Tree) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(p), TOKENS[:, 1:]).mean()


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_folding_keeps_the_function_and_drops_the_multipliers(config: lm.LMConfig, x64: None) -> None:
    params, logits = _parts(config)
    graph, _ = nnx.split(multipliers.build(config, nnx.Rngs(0)))
    model = nnx.merge(graph, params)
    multipliers.fold(model)
    folded = nnx.to_pure_dict(nnx.state(model))
    assert not [path for path in leaves_by_path(folded) if "rows" in path or "columns" in path]
    assert jax.tree.structure(folded) == jax.tree.structure(lm.params_and_loss(config, jax.random.key(0))[0])
    np.testing.assert_array_equal(model(TOKENS[:, :-1]), logits(params))


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("which", ["head_gauge", "own_gauges", "traded_gauges"])
def test_gauges_of_multipliers_hold(config: lm.LMConfig, which: str, x64: None) -> None:
    params, logits = _parts(config)
    found = getattr(multipliers, which)(config)
    go.testing.assert_invariant(functools.partial(_loss, logits), params, found, jax.random.key(0))


def _dead(logits: Callable[[Tree], jax.Array], params: Tree) -> tuple[np.ndarray, list[str]]:
    """Columns that span the null space of the outputs' Jacobian at a point, and the path of every row."""
    leaves = leaves_by_path(params)
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    inputs = jax.random.randint(jax.random.key(3), (24, 6), 0, 11)
    graph_logits = lambda x: _centred(logits, unravel(x), inputs)  # noqa: E731
    jacobian = np.asarray(jit(jax.jacrev(graph_logits))(flat)).reshape(-1, flat.size)
    _, sizes, right = np.linalg.svd(jacobian, full_matrices=True)
    rank = int(np.sum(sizes > 1e-9 * sizes[0]))
    return right[rank:].T, [path for path, x in leaves.items() for _ in range(x.size)]


def _centred(logits: Any, params: Tree, inputs: jax.Array) -> jax.Array:
    found = logits(params, inputs)
    return found - found.mean(-1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_on_the_slice_no_dead_direction_has_a_multiplier_in_it(config: lm.LMConfig, x64: None) -> None:
    """Tangents that the gauges' anchors do not read, and that the outputs do not see, hold multipliers still."""
    params, _ = _parts(config)
    graph, _ = nnx.split(multipliers.build(config, nnx.Rngs(0)))
    null, paths = _dead(lambda p, x: nnx.merge(graph, p)(x), params)
    mine = np.array(["rows" in path or "columns" in path for path in paths])
    assert np.linalg.norm(null[mine], axis=0).max() > 0.1, "without gauges multipliers are in dead directions"
    group = go.product(multipliers.own_gauges(config))
    _, unravel = jax.flatten_util.ravel_pytree(params)
    across = jit(lambda v: jax.flatten_util.ravel_pytree(group.horizontal(params, unravel(v)))[0])
    kept = np.stack([np.asarray(across(jnp.asarray(v))) for v in null.T], 1)
    assert np.abs(kept[mine]).max() <= 1e-9
    assert group.dim(params) == mine.sum()


# Fixing on a run -----------------------------------------------------------------------------------------


def _trained(tx: optax.GradientTransformation, steps: int = 100) -> tuple[jax.Array, Tree]:
    params, logits = _parts(GPT)
    params = jax.tree.map(lambda x: x, params)
    state = tx.init(params)

    @jit
    def step(params: Tree, state: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(jax.grad(functools.partial(_loss, logits))(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return logits(params), params


@functools.cache
def _run(every: int, kind: str, transport: bool = True) -> np.ndarray:
    gauge = multipliers.head_gauge(GPT)
    inner = go.quotient(optax.adam(1e-2), gauge) if kind == "quotient" else optax.adam(1e-2)
    tx = inner if every == 0 else go.gauge_fix(inner, gauge, every=every, transport=transport)
    return np.asarray(_trained(tx)[0])


def test_with_transport_how_often_is_fixed_does_not_matter_on_the_slice(x64: None) -> None:
    once = _run(1, "quotient")
    for every in (10, 100, 0):
        np.testing.assert_allclose(_run(every, "quotient"), once, rtol=1e-8, atol=1e-8)


def test_under_adam_it_does_and_stale_moments_are_further_off(x64: None) -> None:
    """What the paper ran, and blames: `transport=False`."""
    never, carried, stale = _run(0, "adam"), _run(10, "adam"), _run(10, "adam", transport=False)
    gaps = [float(np.linalg.norm(x - never) / np.linalg.norm(never)) for x in (carried, stale)]
    print(f"logits after 100 steps, from Adam's without fixing: with transport {gaps[0]:.2e}, without {gaps[1]:.2e}")
    assert min(gaps) > 1e-6 and float(np.linalg.norm(carried - stale)) > 1e-6


def test_the_papers_conditions_decay_what_they_say() -> None:
    """By a step without a gradient."""
    params, _ = _parts(GPT)
    zero, gauge = jax.tree.map(jnp.zeros_like, params), multipliers.head_gauge(GPT)
    for which, qk in (("A", 2e-3), ("B", 0.0), ("C", 0.0)):
        tx = multipliers.condition(which, 0.5, gauge)
        updates, _ = tx.update(zero, tx.init(params), params)
        moved = leaves_by_path(optax.apply_updates(params, updates))
        for path, x in leaves_by_path(params).items():
            own = path.split("/")[-2] in ("query", "key") and path.split("/")[-1] in ("rows", "columns")
            if which == "B" and (path.endswith(("query/rows", "key/rows", "query/layer/bias", "key/layer/bias"))):
                continue  # moved along the gauge
            matrix = path.endswith(("kernel", "embedding"))
            decay = qk if own else 2e-3 if path.endswith(("rows", "columns")) else 0.1 * matrix
            np.testing.assert_allclose(moved[path], (1.0 - 0.5 * decay) * x, rtol=1e-6, err_msg=f"{which} {path}")
    with pytest.raises(ValueError, match="no condition 'D'"):
        multipliers.condition("D", 0.5, gauge)


# Magnitude -----------------------------------------------------------------------------------------------


PAIR = go.multiplier_balance({"query": "(head _) _"}, {"key": "head _"})


def _pair(dtype: Any = jnp.float64) -> Tree:
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(4, 3)), rng.normal(size=(2, 3))
    return {"query": jnp.asarray(query, dtype), "key": jnp.asarray(key, dtype)}


def _products(p: Tree) -> np.ndarray:
    """s_Q·s_K per key head."""
    query, key = np.asarray(p["query"], float).reshape(2, 2, 3), np.asarray(p["key"], float)
    return np.sqrt(np.mean(query**2, (1, 2)) * np.mean(key**2, 1))


def _grown(magnitude: str, steps: int = 300, transport: bool = True, **more: Any) -> list[np.ndarray]:
    """Products along a run whose loss wants them to grow for ever."""
    tx = go.gauge_fix(optax.adam(1e-2), PAIR, magnitude=magnitude, transport=transport, **more)
    params = _pair()
    state, found = tx.init(params), []

    def growing(p: Tree) -> jax.Array:
        return -sum(jnp.sum(jnp.log(jnp.square(x))) for x in jax.tree.leaves(p))

    @jit
    def step(params: Tree, state: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(jax.grad(growing)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
        found.append(_products(params))
    return found


def test_free_products_grow_and_others_are_held(x64: None) -> None:
    start = _products(_pair())
    assert np.all(_grown("free")[-1] > 3.0 * start)
    np.testing.assert_allclose(_grown("fix"), np.broadcast_to(start, (300, 2)), rtol=1e-12)
    capped = np.array(_grown("cap", cap=3.0))
    assert capped.max() < 3.0 and np.all(np.diff(capped, axis=0) > 0) and capped[-1].min() > 2.0
    assert np.all(_grown("decay", decay=0.05)[-1] < _grown("free")[-1])


def test_a_cap_far_away_changes_nothing_and_rest_stays_at_rest(x64: None) -> None:
    np.testing.assert_allclose(_grown("cap", cap=1e8)[-1], _grown("free")[-1], rtol=1e-6)
    params = _pair()
    tx = go.gauge_fix(optax.sgd(0.0), PAIR, magnitude="cap", cap=3.0)
    balanced = PAIR.act(PAIR.balance(params), params)
    updates, _ = tx.update(balanced, tx.init(balanced), balanced)
    np.testing.assert_allclose(_products(optax.apply_updates(balanced, updates)), _products(balanced), rtol=1e-12)


def test_moments_go_along_with_a_factor_as_gradients_do(x64: None) -> None:
    """The first moment is a cotangent, the second its square: over the factor, and over its square."""
    params = _pair()
    grads = jax.tree.map(jnp.ones_like, params)
    kept = []
    for transport in (True, False):
        tx = go.gauge_fix(optax.adam(0.0), PAIR, 10**6, magnitude="decay", decay=0.19, transport=transport)
        _, state = tx.update(grads, tx.init(params), params)
        kept.append([optax.tree.get(state, name)["key"] for name in ("mu", "nu")])
    (mu, nu), (own_mu, own_nu) = kept
    np.testing.assert_allclose(mu, own_mu / 0.9, rtol=1e-12)
    np.testing.assert_allclose(nu, own_nu / 0.81, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"magnitude": "cap"}, "magnitude='cap' without a number"),
        ({"magnitude": "decay", "decay": 1.5}, "magnitude='decay' without a number"),
        ({"magnitude": "fix", "cap": 2.0}, "a number that magnitude='fix' does not take"),
        ({"magnitude": "clip"}, "clip"),
    ],
)
def test_numbers_that_are_missing_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        go.gauge_fix(optax.adam(1e-2), PAIR, **options)
    assert said in str(error.value) and "remedy" in str(error.value)


def test_a_gauge_without_two_sides_has_no_product() -> None:
    rotation = go.head_rotation({"query": "head basis", "key": "head basis"})
    with pytest.raises(ValueError, match="without two sides"):
        go.gauge_fix(optax.adam(1e-2), [PAIR, rotation], magnitude="fix")


def test_a_product_that_was_zero_is_left_alone(x64: None) -> None:
    params = _pair()
    params["key"] = params["key"].at[0].set(0.0)
    tx = go.gauge_fix(optax.sgd(1.0), PAIR, every=100, magnitude="fix")
    updates, _ = tx.update(jax.tree.map(lambda x: -0.5 * jnp.ones_like(x), params), tx.init(params), params)
    moved = optax.apply_updates(params, updates)
    np.testing.assert_allclose(moved["key"][0], 0.5, rtol=1e-12)
    np.testing.assert_allclose(_products(moved)[1], _products(params)[1], rtol=1e-12)
