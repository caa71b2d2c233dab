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
from flax.traverse_util import unflatten_dict

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from models import gpt2, latent, lm, multipliers
from tests.discovery.test_discover import near
from tests.oracles import orbit, outside
from tests.programs import innermost
from tests.quick import jit
from tests.refusals import refused
from tests.twins import trained

Tree = Any
TINY = {"vocab": 11, "d_model": 6, "layers": 1, "heads": 2, "kv_heads": 2, "d_head": 3, "d_ff": 5, "max_len": 6}
GPT = lm.LMConfig(**TINY, mlp="relu")
LLAMA = lm.llama_config(**(TINY | {"d_head": 4}))
TIED = gpt2.config(**TINY, mlp="relu")
GROUPED = lm.LMConfig(**(TINY | {"heads": 4, "kv_heads": 2}), mlp="relu")
MAKERS = {GPT: multipliers, LLAMA: multipliers, TIED: gpt2, GROUPED: multipliers}
"""Whose `build` and `kernel_gauges` a configuration has."""
every_model = pytest.mark.parametrize("config", MAKERS, ids=["gpt", "llama", "gpt2", "grouped"])
TOKENS = jnp.array([[1, 5, 2, 9, 4, 3, 7], [0, 8, 8, 1, 2, 6, 10]])


def _parts(config: lm.LMConfig) -> tuple[Tree, Callable[[Tree], jax.Array]]:
    """Parameters in general position, float64 under x64, and the logits."""
    graph, state = nnx.split(MAKERS[config].build(config, nnx.Rngs(0)))
    shapes, treedef = jax.tree.flatten(nnx.to_pure_dict(state))
    rng = np.random.default_rng(0)
    drawn = [jnp.asarray(0.5 * rng.normal(size=x.shape) + (1.0 if x.ndim == 1 else 0.0)) for x in shapes]
    return treedef.unflatten(drawn), lambda p: nnx.merge(graph, p)(TOKENS[:, :-1])


def _loss(logits: Callable[[Tree], jax.Array], p: Tree) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(p), TOKENS[:, 1:]).mean()


@pytest.mark.slow_rows("llama", "gpt")
@every_model
def test_folding_keeps_the_function_and_drops_the_multipliers(config: lm.LMConfig, x64: None) -> None:
    params, logits = _parts(config)
    graph, _ = nnx.split(MAKERS[config].build(config, nnx.Rngs(0)))
    model = nnx.merge(graph, params)
    multipliers.fold(model)
    folded = nnx.to_pure_dict(nnx.state(model))
    assert not [path for path in leaves_by_path(folded) if "rows" in path or "columns" in path]
    assert jax.tree.structure(folded) == jax.tree.structure(lm.params_and_loss(config, jax.random.key(0))[0])
    np.testing.assert_array_equal(model(TOKENS[:, :-1]), logits(params))


@pytest.mark.slow_rows("kernel_gauges-[gl]*")
@every_model
@pytest.mark.parametrize("which", ["head_gauge", "kernel_gauges", "traded_gauges"])
def test_gauges_of_multipliers_hold(config: lm.LMConfig, which: str, x64: None) -> None:
    params, logits = _parts(config)
    gauges = getattr(MAKERS[config], which, getattr(multipliers, which))(config)
    go.testing.assert_invariant(functools.partial(_loss, logits), params, gauges, jax.random.key(0))


@pytest.mark.slow
@every_model
def test_discover_finds_the_gauges_of_multipliers(config: lm.LMConfig) -> None:
    """Another basis of them, kernels traded with each other's multipliers; and a quotient runs on it."""
    maker = MAKERS[config]
    graph, state = nnx.split(maker.build(config, nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype("f4"), nnx.to_pure_dict(state))
    tokens = list(rng.integers(11, size=(3, 8, 6)))
    report = go.discover(lambda p, x: nnx.merge(graph, p)(x), params, tokens, progress=False)
    hand = [*maker.kernel_gauges(config), *multipliers.traded_gauges(config), multipliers.head_gauge(config)]
    if config == GROUPED:  # found per group of query heads, not per head: docs/design.md §8
        of_heads = {"blocks/{i}/attn/query/rows", "blocks/{i}/attn/query/layer/kernel"}
        hand = [gauge for gauge in hand if {spec.pattern for spec in gauge.specs} != of_heads]
    with jax.enable_x64(True):
        point = near(params, 5)
        alive = np.concatenate([np.full(x.size, path not in report.dead) for path, x in leaves_by_path(point).items()])
        mine, theirs = (orbit(gauges, point)[alive] for gauges in (report.gauges, hand))
        assert outside(theirs, mine) < 1e-6, report
    tx = go.quotient(optax.adam(1e-2), report.gauges)
    updates, _ = jit(tx.update)(params, tx.init(params), params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


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
    outputs = logits(params, inputs)
    return outputs - outputs.mean(-1, keepdims=True)


@pytest.mark.slow
@every_model
def test_on_the_slice_no_dead_direction_has_a_multiplier_in_it(config: lm.LMConfig, x64: None) -> None:
    """Tangents that the gauges' anchors do not read, and that the outputs do not see, hold multipliers still."""
    params, _ = _parts(config)
    graph, _ = nnx.split(MAKERS[config].build(config, nnx.Rngs(0)))
    null, paths = _dead(lambda p, x: nnx.merge(graph, p)(x), params)
    mine = np.array(["rows" in path or "columns" in path for path in paths])
    assert np.linalg.norm(null[mine], axis=0).max() > 0.1, "without gauges multipliers are in dead directions"
    group = go.product(MAKERS[config].kernel_gauges(config))
    _, unravel = jax.flatten_util.ravel_pytree(params)
    across = jit(lambda v: jax.flatten_util.ravel_pytree(group.horizontal(params, unravel(v)))[0])
    kept = np.stack([np.asarray(across(jnp.asarray(v))) for v in null.T], 1)
    assert np.abs(kept[mine]).max() <= 1e-9
    assert group.dim(params) == mine.sum()


# Fixing on a run -----------------------------------------------------------------------------------------


def _after(steps: int, heads: int = 2, dtype: Any = jnp.float64, fixed: bool = False, **switch: Any) -> float:
    """Drift after Adam has trained a net without biases from multipliers of one."""
    config = gpt2.config(**(TINY | {"kv_heads": heads} | switch))
    graph, state = nnx.split(multipliers.build(config, nnx.Rngs(0)))
    params = jax.tree.map(lambda x: x.astype(dtype), nnx.to_pure_dict(state))
    gauge = multipliers.head_gauge(config)
    tx = go.orbit.gauge_fix(optax.adam(1e-2), gauge) if fixed else optax.adam(1e-2)
    tx = optax.chain(tx, go.measure.track_balance(gauge))
    loss = functools.partial(_loss, lambda p: nnx.merge(graph, p)(TOKENS[:, :-1]))
    _, opt_state = trained(tx, loss, params, steps)
    return float(optax.tree.get(opt_state, "drift"))


@pytest.mark.slow
def test_without_biases_multipliers_that_start_alike_drift_by_rounding_alone(x64: None) -> None:
    """Logits see the products r_Q·r_K entry by entry: equal multipliers get equal gradients, and stay equal."""
    assert _after(50) <= 1e-12
    assert 1e-9 < _after(50, dtype=jnp.float32) <= 1e-6
    assert _after(50, heads=1) > 1e-3, "with queries in groups several of one side face one of the other"
    assert _after(50, heads=1, fixed=True) <= 1e-12


@pytest.mark.parametrize("switch", [{"rope": True, "d_head": 4}, {"qk_norm": True}])
def test_rotary_and_norms_of_queries_part_them(switch: dict[str, Any], x64: None) -> None:
    """There logits see more than the products."""
    assert _after(50, **switch) > 1e-4


@pytest.mark.slow_rows("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fixing_leaves_logits_alone(dtype: Any) -> None:
    """Multipliers far apart are brought together; in bfloat16 what is left is its noise."""
    params, logits = _parts(GPT)
    gauge = multipliers.head_gauge(GPT)
    apart = gauge.act({"i=0": jnp.array([1.0, -1.0])}, jax.tree.map(lambda x: x.astype(jnp.float32), params))
    apart = jax.tree.map(lambda x: x.astype(dtype), apart)
    tx = optax.chain(go.orbit.gauge_fix(optax.sgd(0.0), gauge), go.measure.track_balance(gauge))
    updates, state = tx.update(jax.tree.map(jnp.zeros_like, apart), tx.init(apart), apart)
    fixed = optax.apply_updates(apart, updates)
    before, after = (np.asarray(logits(tree), np.float32) for tree in (apart, fixed))
    least = {jnp.float32: (1e-6, 3.5e-7), jnp.bfloat16: (1e-2, 1e-2)}[dtype]
    assert np.linalg.norm(after - before) <= least[0] * np.linalg.norm(before)
    assert float(optax.tree.get(state, "drift")) <= least[1]
    assert float(np.abs(gauge.coordinates(apart)["i=0"] - gauge.coordinates(fixed)["i=0"]).min()) > 0.5


def test_fixing_touches_nothing_of_the_size_of_a_kernel() -> None:
    """Equations with an operand as large as the smallest kernel are those of the optimizer inside."""
    config = gpt2.config(vocab=11, d_model=24, layers=2, heads=2, kv_heads=2, d_head=12, d_ff=96, max_len=6)
    params = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(gpt2.build(config, nnx.Rngs(0)))))
    gauge = multipliers.head_gauge(config)

    def large(tx: optax.GradientTransformation) -> int:
        state = jax.eval_shape(tx.init, params)
        jaxpr = jax.make_jaxpr(tx.update)(params, state, params)
        return sum(any(x.aval.size >= 24 * 24 for x in eqn.invars) for eqn in innermost(jaxpr.jaxpr))

    plain = multipliers.condition("C", 1e-3, gauge)
    for held in (None, {"kind": "cap", "cap": 2.0}):
        fixed = multipliers.condition("B", 1e-3, gauge, held)
        assert large(fixed) == large(plain) > 0


@pytest.mark.slow
def test_the_papers_conditions_decay_what_they_say() -> None:
    """By a step without a gradient."""
    params, _ = _parts(GPT)
    zero, gauge = jax.tree.map(jnp.zeros_like, params), multipliers.head_gauge(GPT)
    for which, qk in (("A", 2e-3), ("B", 0.0), ("C", 0.0)):
        tx = multipliers.condition(which, 0.5, gauge)
        updates, _ = tx.update(zero, tx.init(params), params)
        moved = leaves_by_path(optax.apply_updates(params, updates))
        for path, x in leaves_by_path(params).items():
            is_qk = path.split("/")[-2] in ("query", "key") and path.split("/")[-1] in ("rows", "columns")
            if which == "B" and (path.endswith(("query/rows", "key/rows", "query/layer/bias", "key/layer/bias"))):
                continue  # moved along the gauge
            matrix = path.endswith(("kernel", "embedding"))
            decay = qk if is_qk else 2e-3 if path.endswith(("rows", "columns")) else 0.1 * matrix
            np.testing.assert_allclose(moved[path], (1.0 - 0.5 * decay) * x, rtol=1e-6, err_msg=f"{which} {path}")
    with pytest.raises(ValueError, match="no condition 'D'"):
        multipliers.condition("D", 0.5, gauge)
    with pytest.raises(ValueError, match="nothing is fixed in condition A: leave every out"):
        multipliers.condition("A", 0.5, gauge, every=10)
    with pytest.raises(ValueError, match="nothing is fixed in condition C: leave held out"):
        multipliers.condition("C", 0.5, gauge, {"kind": "init"})


# Products held ------------------------------------------------------------------------------------------


PAIR = go.multiplier_balance({"query": "(head _) _"}, {"key": "head _"})


def _pair(dtype: Any = jnp.float64) -> Tree:
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(4, 3)), rng.normal(size=(2, 3))
    return {"query": jnp.asarray(query, dtype), "key": jnp.asarray(key, dtype)}


def _products(p: Tree) -> np.ndarray:
    """s_Q·s_K per key head."""
    query, key = np.asarray(p["query"], float).reshape(2, 2, 3), np.asarray(p["key"], float)
    return np.sqrt(np.mean(query**2, (1, 2)) * np.mean(key**2, 1))


def _run_of_products(kind: str, steps: int = 300, **number: float) -> np.ndarray:
    """Products after every step of a run whose loss makes them grow for ever; "free" holds none."""
    inner = optax.adam(1e-2)
    tx = go.orbit.gauge_fix(inner if kind == "free" else go.orbit.hold_products(inner, PAIR, kind, **number), PAIR)
    params = _pair()
    state, products = tx.init(params), []

    def growing(p: Tree) -> jax.Array:
        return -sum(jnp.sum(jnp.log(jnp.square(x))) for x in jax.tree.leaves(p))

    @jit
    def step(params: Tree, state: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(jax.grad(growing)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
        products.append(_products(params))
    return np.array(products)


def test_free_products_grow_and_others_are_held(x64: None) -> None:
    start = _products(_pair())
    assert np.all(_run_of_products("free")[-1] > 3.0 * start)
    np.testing.assert_allclose(_run_of_products("init"), np.broadcast_to(start, (300, 2)), rtol=1e-12)
    capped = _run_of_products("cap", cap=3.0)
    assert capped.max() < 3.0 and np.all(np.diff(capped, axis=0) > 0) and capped[-1].min() > 2.0
    assert np.all(_run_of_products("decay", decay=0.05)[-1] < _run_of_products("free")[-1])


def test_a_cap_far_away_changes_nothing_and_rest_stays_at_rest(x64: None) -> None:
    capped, free = _run_of_products("cap", cap=1e8), _run_of_products("free")
    np.testing.assert_allclose(capped[-1], free[-1], rtol=1e-6)
    params = _pair()
    tx = go.orbit.gauge_fix(go.orbit.hold_products(optax.sgd(0.0), PAIR, "cap", cap=3.0), PAIR)
    balanced = PAIR.act(PAIR.balance(params), params)
    updates, _ = tx.update(balanced, tx.init(balanced), balanced)
    np.testing.assert_allclose(_products(optax.apply_updates(balanced, updates)), _products(balanced), rtol=1e-12)


def test_moments_go_along_with_a_factor_as_gradients_do(x64: None) -> None:
    """The first moment is a cotangent, the second its square: over the factor, and over its square."""
    params = _pair()
    grads = jax.tree.map(jnp.ones_like, params)
    kept = []
    for transport in (True, False):
        tx = go.orbit.hold_products(optax.adam(0.0), PAIR, "decay", decay=0.19, transport=transport)
        _, state = tx.update(grads, tx.init(params), params)
        kept.append([optax.tree.get(state, name)["key"] for name in ("mu", "nu")])
    (mu, nu), (adam_mu, adam_nu) = kept
    np.testing.assert_allclose(mu, adam_mu / 0.9, rtol=1e-12)
    np.testing.assert_allclose(nu, adam_nu / 0.81, rtol=1e-12)


@pytest.mark.parametrize("kind", [{"kind": "cap", "cap": 0.3}, {"kind": "init"}, {"kind": "decay", "decay": 0.1}])
def test_products_are_held_at_every_step_and_balanced_at_every_fifth(kind: dict[str, Any], x64: None) -> None:
    """Between two fixes a step of both is a step of `hold_products`; at a fix the balance leaves the product alone."""
    held = go.orbit.hold_products(optax.adam(0.05), PAIR, **kind)
    runs = []
    for tx in (held, go.orbit.gauge_fix(held, PAIR, every=5)):
        params = _pair()
        state, points = tx.init(params), []
        for _ in range(5):
            updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
            params = optax.apply_updates(params, updates)
            points.append(params)
        runs.append(points)
    for alone, fixed in zip(runs[0][:4], runs[1][:4], strict=True):
        jax.tree.map(np.testing.assert_array_equal, fixed, alone)
    np.testing.assert_allclose(_products(runs[1][4]), _products(runs[0][4]), rtol=1e-12)
    drifts = [float(jnp.max(jnp.abs(PAIR.balance(points[4])[""]))) for points in runs]
    assert drifts[1] <= 1e-12 < 1e-3 < drifts[0]


def test_every_gauge_of_a_list_keeps_its_products_under_jit(x64: None) -> None:
    """`jit` sorts the keys of the state's dict, so the order of the list is not the order in which it comes back."""
    late, early = (go.rescale({f"{name}/up": "channel"}, {f"{name}/down": "channel"}) for name in ("z", "a"))
    params = {name: {"up": jnp.array([x, 2.0]), "down": jnp.array([x, 5.0])} for name, x in (("z", 3.0), ("a", 0.5))}
    tx = go.orbit.hold_products(optax.sgd(0.1), [late, early], "init")
    state = jit(tx.init)(params)
    start = jax.tree.map(jnp.copy, params)
    for _ in range(3):
        updates, state = jit(tx.update)(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    for name in ("z", "a"):
        products = [tree[name]["up"] * tree[name]["down"] for tree in (params, start)]
        np.testing.assert_allclose(*products, rtol=1e-12)
        assert float(jnp.max(jnp.abs(params[name]["up"] - start[name]["up"]))) > 0.01


@pytest.mark.slow_rows("kind[12]")
@pytest.mark.parametrize("kind", [{"kind": "cap", "cap": 0.6}, {"kind": "init"}, {"kind": "decay", "decay": 0.1}])
def test_products_are_held_around_a_quotient_and_inside_one(kind: dict[str, Any], x64: None) -> None:
    """Twins stay twins and the products are held, with another gauge in the quotient's list and with two inside."""
    units = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    rng = np.random.default_rng(1)
    weights = {"up": jnp.asarray(rng.normal(size=(3, 2))), "down": jnp.asarray(rng.normal(size=(2, 3)))}
    start, gauges, adam = _pair() | weights, [PAIR, units], optax.adam(0.03)
    element = ({"": jnp.array([1.0, -0.5])}, {"": jnp.array([-1.0, 0.7])})
    optimizers = {
        "inside": go.quotient(go.orbit.hold_products(adam, PAIR, **kind), gauges),
        "around": go.orbit.hold_products(go.quotient(adam, gauges), gauges, **kind),
    }

    def loss(p: Tree) -> jax.Array:
        scores = jnp.einsum("kge,ke->kg", p["query"].reshape(2, 2, 3), p["key"])
        return jnp.sum(jnp.cos(scores)) + jnp.sum(jnp.cos(jax.nn.relu(jnp.eye(3) @ p["up"]) @ p["down"]))

    for name, tx in optimizers.items():
        products = []
        for params in (start, go.product(gauges).act(element, start)):
            products.append(_products(trained(tx, loss, params, 10)[0]))
        np.testing.assert_allclose(products[1], products[0], rtol=1e-11, err_msg=name)
        if kind["kind"] == "init":
            np.testing.assert_allclose(products[0], _products(start), rtol=1e-11, err_msg=name)
        elif kind["kind"] == "cap":
            assert np.all(products[0] < 0.6), name
        else:
            assert np.all(products[0] < 0.9 * _products(start)), name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "cap"}, "kind='cap' without a number"),
        ({"kind": "decay", "decay": 1.5}, "kind='decay' without a number"),
        ({"kind": "decay", "decay": 1.0}, "kind='decay' without a number"),
        ({"kind": "cap", "cap": float("inf")}, "kind='cap' without a number"),
        ({"kind": "cap", "cap": jnp.ones(2)}, "kind='cap' without a number"),
        ({"kind": "init", "cap": 2.0}, "a number that kind='init' does not take"),
        ({"kind": "cap", "cap": 2.0, "decay": 0.1}, "a number that kind='cap' does not take"),
        ({"kind": "fix"}, "bad kind"),
        ({"kind": "init", "on_unknown": "ignore"}, "bad on_unknown"),
    ],
)
def test_numbers_that_are_missing_are_named(options: dict[str, Any], said: str) -> None:
    with refused("", "hold_products", said):
        go.orbit.hold_products(optax.adam(1e-2), PAIR, **options)


def test_a_gauge_without_two_sides_has_no_product() -> None:
    rotation = go.head_rotation({"query": "head basis", "key": "head basis"})
    with pytest.raises(ValueError, match="without two sides"):
        go.orbit.hold_products(optax.adam(1e-2), [PAIR, rotation])


def test_two_gauges_on_one_leaf_have_no_product_each(x64: None) -> None:
    other = go.rescale({"query": "(head _) _"}, {"kernel": "head"})
    tx = go.orbit.hold_products(optax.adam(1e-2), [PAIR, other])
    with pytest.raises(ValueError, match="sizes of two gauges with 'query'"):
        tx.init(_pair() | {"kernel": jnp.ones(2)})
    squared = go.rescale({"query": "(head _) _"}, {"key": "head _"}, degree=2)
    with pytest.raises(ValueError, match="two sides of one degree"):
        go.orbit.hold_products(optax.adam(1e-2), squared)


def test_a_held_product_moves_with_its_gauge_and_with_no_other(x64: None) -> None:
    """A move that changes what is held has no rule: the next step would undo it, and change the function."""
    params, tx = _pair(), go.orbit.gauge_fix(go.orbit.hold_products(optax.adam(1e-2), PAIR, "init"), PAIR)
    state, element = tx.init(params), {"": jnp.array([1.0, -0.5])}
    assert jax.tree.structure(optax.tree.map_params(tx, lambda x: x, state)) == jax.tree.structure(state)
    moved = go.orbit.transport(state, params, PAIR, element)
    twin = PAIR.act(element, params)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), moved, twin)
    np.testing.assert_allclose(_products(optax.apply_updates(twin, updates)), _products(params), rtol=1e-12)
    other = go.rescale({"query": "(head _) _"}, {"kernel": "head"})
    more = params | {"kernel": jnp.ones(2)}
    with pytest.raises(ValueError, match="products held, which the move changes"):
        go.orbit.transport(tx.init(more), more, other, element)
    finer = go.rescale({"query": "(head _) channel"}, {"key": "head channel"})
    with pytest.raises(ValueError, match="products held, which the move changes"):
        go.orbit.transport(state, params, finer, {"": jnp.full((2, 3), 0.5)})
    kept = go.orbit.transport(tx.init(more), more, other, element, on_unknown="keep")
    assert jax.tree.structure(kept) == jax.tree.structure(tx.init(more))


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_qk_clip_bounds_the_logits_of_latent_attention(fused: bool, x64: None) -> None:
    """Heads share a rotary key, which stays: their rotary queries take the whole factor."""
    c = latent.LatentConfig(fused=fused)
    draw = np.random.default_rng(0).normal
    params = unflatten_dict({path: jnp.asarray(draw(size=shape)) for path, shape in c.shapes.items()}, sep="/")
    y, (gauge, alone) = jnp.asarray(draw(size=(2, 5, c.d_model))), latent.qk_clip(c)

    def largest(p: Tree) -> jax.Array:
        return jnp.max(latent.logits_and_values(c, p, y)[0], (0, 2, 3))

    def clipped(inner: Any, cap: float, **options: Any) -> Any:
        return go.orbit.hold_products(inner, gauge, "cap", cap=cap, **options)

    # One step that changes nothing but sizes: every head ends at the bound that its own logits ask for.
    tx = clipped(optax.sgd(0.0), 0.5, alone=alone)
    updates, _ = tx.update(params, tx.init(params), params, max_logits={"": largest(params)})
    moved = optax.apply_updates(params, updates)
    before, after = (latent.logits_and_values(c, p, y)[0] for p in (params, moved))
    factor = after / before
    np.testing.assert_allclose(factor, jnp.broadcast_to(factor[:1, :, :1, :1], factor.shape), rtol=1e-9)
    assert np.all(largest(params) > 1.5) and np.all((0.45 < largest(moved)) & (largest(moved) < 0.5))
    assert abs(factor[0, 0, 0, 0] / factor[0, 1, 0, 0] - 1) > 1e-3, "both heads have one factor"
    np.testing.assert_array_equal(moved["attn"]["kv_a"]["kernel"], params["attn"]["kv_a"]["kernel"])
    halves = clipped(optax.sgd(0.0), 0.5)
    updates, _ = halves.update(params, halves.init(params), params, max_logits={"": largest(params)})
    skewed = latent.logits_and_values(c, optax.apply_updates(params, updates), y)[0] / before
    assert np.ptp(skewed) > 0.1, "without alone= all logits of a head have one factor, too"

    def grown(cap: float) -> np.ndarray:
        tx = clipped(optax.adam(1e-2), cap, alone=alone)

        @jit
        def step(p: Tree, state: Tree) -> tuple[Tree, Tree]:
            gradient = jax.grad(lambda p: -jnp.sum(jnp.log(largest(p))))(p)
            updates, state = tx.update(gradient, state, p, max_logits={"": largest(p)})
            return optax.apply_updates(p, updates), state

        point, state, seen = params, tx.init(params), []
        for _ in range(100):
            point, state = step(point, state)
            seen.append(np.asarray(largest(point)))
        return np.array(seen)

    free = grown(1e9)
    cap = 0.5 * float(free[-1].min())
    bounded = grown(cap)
    print(f"largest logits: free {free[-1]}, cap {cap:.1f}, bounded {bounded[-1]}, at most {bounded[1:].max():.1f}")
    assert free[-1].min() > 1.9 * cap and bounded[1:].max() < 1.03 * cap and 0.8 * cap < bounded[-1].min()


def test_blocks_alone_have_the_channels_of_one_gauge(x64: None) -> None:
    adam, other = optax.adam(1e-2), go.rescale({"up": "_ channel"}, {"down": "channel _"})
    with pytest.raises(ValueError, match="nest two hold_products"):
        go.orbit.hold_products(adam, [PAIR, other], "cap", cap=1.0, alone={"query": "head _"})
    with pytest.raises(ValueError, match="write kind='cap'"):
        go.orbit.hold_products(adam, PAIR, alone={"query": "head _"})
    with pytest.raises(ValueError, match="alone= that cannot be bound"):
        go.orbit.hold_products(adam, PAIR, "cap", cap=1.0, alone={})
    more = _pair() | {"rotary": jnp.ones((2, 3))}

    def capped(**alone: str) -> Any:
        return go.orbit.hold_products(adam, PAIR, "cap", cap=1.0, alone=alone)

    for axes in ("_ _", "_ head", "channel _"):
        with pytest.raises(ValueError, match="name the same axes"):
            capped(rotary=axes).init(more)
    with pytest.raises(ValueError, match="a range of entries that the gauge leaves out"):
        capped(query="(head _) _", rotary="head _").init(more)
    with pytest.raises(ValueError, match="without max_logits"):
        capped(rotary="head _").update(more, capped(rotary="head _").init(more), more)


def test_a_product_that_was_zero_is_left_alone(x64: None) -> None:
    params = _pair()
    params["key"] = params["key"].at[0].set(0.0)
    tx = go.orbit.hold_products(optax.sgd(1.0), PAIR, "init")
    updates, _ = tx.update(jax.tree.map(lambda x: -0.5 * jnp.ones_like(x), params), tx.init(params), params)
    moved = optax.apply_updates(params, updates)
    np.testing.assert_allclose(moved["key"][0], 0.5, rtol=1e-12)
    np.testing.assert_allclose(_products(moved)[1], _products(params)[1], rtol=1e-12)
