"""Learnable multipliers: what they do to the function, what is dead, and what fixing them does to a run."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.flatten_util import ravel_pytree

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from models import gpt2, latent, lm, multipliers
from tests.discovery.test_discover import near
from tests.oracles import orbit, outside
from tests.programs import innermost
from tests.quick import jit
from tests.refusals import refused
from tests.twins import normal, stepper, structure, trained

Tree = Any
TINY = dict[str, Any](vocab=11, d_model=6, layers=1, heads=2, kv_heads=2, d_head=3, d_ff=5, max_len=6)
GPT = lm.LMConfig(**TINY, mlp="relu")
LLAMA = lm.llama_config(**(TINY | {"d_head": 4}))
TIED = gpt2.config(**TINY, mlp="relu")
GROUPED = lm.LMConfig(**(TINY | {"heads": 4, "kv_heads": 2}), mlp="relu")
MAKERS = {GPT: multipliers, LLAMA: multipliers, TIED: gpt2, GROUPED: multipliers}
"""Whose `build` and `kernel_gauges` a configuration has."""
every_model = pytest.mark.parametrize("config", MAKERS, ids=["gpt", "llama", "gpt2", "grouped"])
TOKENS = jnp.array([[1, 5, 2, 9, 4, 3, 7], [0, 8, 8, 1, 2, 6, 10]])


def _model(config: lm.LMConfig) -> tuple[Any, Tree]:
    """The graph, and parameters in general position, float64 under x64."""
    graph, state = nnx.split(MAKERS[config].build(config, nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    return graph, jax.tree.map(lambda x: jnp.asarray(rng.normal(x.ndim == 1, 0.5, x.shape)), nnx.to_pure_dict(state))


def _loss(graph: Any, params: Tree) -> jax.Array:
    logits = nnx.merge(graph, params)(TOKENS[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()


@pytest.mark.slow_rows("llama", "gpt")
@every_model
def test_folding_keeps_the_function_and_drops_the_multipliers(config: lm.LMConfig, x64: None) -> None:
    model = nnx.merge(*_model(config))
    before = model(TOKENS[:, :-1])
    multipliers.fold(model)
    folded = nnx.to_pure_dict(nnx.state(model))
    assert structure(folded) == structure(lm.params_and_loss(config, jax.random.key(0))[0])
    np.testing.assert_array_equal(model(TOKENS[:, :-1]), before)


@pytest.mark.slow_rows("kernel_gauges-[gl]*")
@every_model
@pytest.mark.parametrize("which", ["head_gauge", "kernel_gauges", "traded_gauges"])
def test_gauges_of_multipliers_hold(config: lm.LMConfig, which: str, x64: None) -> None:
    graph, params = _model(config)
    gauges = getattr(MAKERS[config], which, getattr(multipliers, which))(config)
    go.testing.assert_invariant(functools.partial(_loss, graph), params, gauges, jax.random.key(0))


@pytest.mark.slow
@every_model
def test_discover_finds_the_gauges_of_multipliers(config: lm.LMConfig) -> None:
    """Another basis of them, kernels traded with each other's multipliers; and a quotient runs on it."""
    graph, params = _model(config)
    tokens = list(np.random.default_rng(0).integers(11, size=(3, 8, 6)))
    report = go.discover(lambda p, x: nnx.merge(graph, p)(x), params, tokens, progress=False)
    hand = [*MAKERS[config].kernel_gauges(config), *multipliers.traded_gauges(config), multipliers.head_gauge(config)]
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


@pytest.mark.slow
@every_model
def test_on_the_slice_no_dead_direction_has_a_multiplier_in_it(config: lm.LMConfig, x64: None) -> None:
    """Tangents that the gauges' anchors do not read, and that the outputs do not see, hold multipliers still."""
    graph, params = _model(config)
    (flat, unravel), inputs = ravel_pytree(params), jax.random.randint(jax.random.key(3), (24, 6), 0, 11)

    def log_probabilities(x: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(nnx.merge(graph, unravel(x))(inputs))

    jacobian = np.asarray(jit(jax.jacrev(log_probabilities))(flat)).reshape(-1, flat.size)
    _, sizes, right = np.linalg.svd(jacobian, full_matrices=True)
    null = right[int(np.sum(sizes > 1e-9 * sizes[0])) :]
    leaves = leaves_by_path(params)
    mine = np.repeat(["rows" in path or "columns" in path for path in leaves], [x.size for x in leaves.values()])
    assert np.linalg.norm(null[:, mine], axis=1).max() > 0.1, "without gauges multipliers are in dead directions"
    group = go.product(MAKERS[config].kernel_gauges(config))
    across = jit(lambda v: ravel_pytree(group.horizontal(params, unravel(v)))[0])
    assert np.max([np.abs(across(jnp.asarray(v))[mine]).max() for v in null]) <= 1e-9
    assert group.dim(params) == mine.sum()


# Fixing on a run -----------------------------------------------------------------------------------------


def _drift(heads: int = 2, dtype: Any = jnp.float64, fixed: bool = False, **switch: Any) -> float:
    """Drift after Adam has trained a net without biases for 50 steps from multipliers of one."""
    config = gpt2.config(**(TINY | {"kv_heads": heads} | switch))
    graph, state = nnx.split(multipliers.build(config, nnx.Rngs(0)))
    params = jax.tree.map(lambda x: x.astype(dtype), nnx.to_pure_dict(state))
    gauge, adam = multipliers.head_gauge(config), optax.adam(1e-2)
    tx = optax.chain(go.orbit.gauge_fix(adam, gauge) if fixed else adam, go.measure.track_balance(gauge))
    _, opt_state = trained(tx, functools.partial(_loss, graph), params, 50)
    return float(optax.tree.get(opt_state, "drift"))


@pytest.mark.slow
def test_without_biases_multipliers_that_start_alike_drift_by_rounding_alone(x64: None) -> None:
    """Logits see the products r_Q·r_K entry by entry: equal multipliers get equal gradients, and stay equal."""
    assert _drift() <= 1e-12
    assert 1e-9 < _drift(dtype=jnp.float32) <= 1e-6
    assert _drift(heads=1) > 1e-3, "with queries in groups several of one side face one of the other"
    assert _drift(heads=1, fixed=True) <= 1e-12


@pytest.mark.parametrize("switch", [{"rope": True, "d_head": 4}, {"qk_norm": True}])
def test_rotary_and_norms_of_queries_part_them(switch: dict[str, Any], x64: None) -> None:
    """There logits see more than the products."""
    assert _drift(**switch) > 1e-4


def test_fixing_touches_nothing_of_the_size_of_a_kernel() -> None:
    """Equations with an operand as large as the smallest kernel are those of the optimizer inside."""
    config = gpt2.config(vocab=11, d_model=24, layers=2, heads=2, kv_heads=2, d_head=12, d_ff=96, max_len=6)
    params = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(gpt2.build(config, nnx.Rngs(0)))))
    gauge = multipliers.head_gauge(config)

    def large(*arguments: Any) -> int:
        tx = multipliers.condition(*arguments)
        jaxpr = jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params)
        return sum(any(x.aval.size >= 24 * 24 for x in eqn.invars) for eqn in innermost(jaxpr.jaxpr))

    for held in (None, {"kind": "cap", "cap": 2.0}):
        assert large("B", 1e-3, gauge, held) == large("C", 1e-3, gauge) > 0


@pytest.mark.slow
def test_the_papers_conditions_decay_what_they_say() -> None:
    """By a step without a gradient."""
    _, params = _model(GPT)
    zero, gauge = jax.tree.map(jnp.zeros_like, params), multipliers.head_gauge(GPT)
    for which, qk in (("A", 2e-3), ("B", 0.0), ("C", 0.0)):
        tx = multipliers.condition(which, 0.5, gauge)
        updates, _ = tx.update(zero, tx.init(params), params)
        moved = leaves_by_path(optax.apply_updates(params, updates))
        for path, x in leaves_by_path(params).items():
            if which == "B" and path.endswith(("query/rows", "key/rows", "query/layer/bias", "key/layer/bias")):
                continue  # moved along the gauge
            is_qk = path.split("/")[-2] in ("query", "key")
            matrix = path.endswith(("kernel", "embedding"))
            decay = (qk if is_qk else 2e-3) if path.endswith(("rows", "columns")) else 0.1 * matrix
            np.testing.assert_allclose(moved[path], (1.0 - 0.5 * decay) * x, rtol=1e-6, err_msg=f"{which} {path}")
    for which, options, says in (
        ("D", {}, "no condition 'D'"), ("A", {"every": 10}, "nothing is fixed in condition A: leave every out"),
        ("C", {"held": {"kind": "init"}}, "nothing is fixed in condition C: leave held out"),
    ):
        with pytest.raises(ValueError, match=says):
            multipliers.condition(which, 0.5, gauge, **options)


# Products held ------------------------------------------------------------------------------------------


PAIR = go.multiplier_balance({"query": "(head _) _"}, {"key": "head _"})
UNITS = go.rescale({"up": "_ channel"}, {"down": "channel _"})


def _pair() -> Tree:
    """Of four query heads and two key heads."""
    return normal(0, {"query": (4, 3), "key": (2, 3)})


def _products(p: Tree) -> np.ndarray:
    """s_Q·s_K per key head."""
    query, key = np.asarray(p["query"], float).reshape(2, 2, 3), np.asarray(p["key"], float)
    return np.sqrt(np.mean(query**2, (1, 2)) * np.mean(key**2, 1))


def _growing(p: Tree) -> Any:
    """A loss that falls for ever as products grow."""
    return -sum(jnp.sum(jnp.log(jnp.square(x))) for x in jax.tree.leaves(p))


def _run_of_products(kind: str, **number: Any) -> np.ndarray:
    """Products after every step of a run whose loss makes them grow for ever; "free" holds none."""
    inner = optax.adam(1e-2)
    tx = go.orbit.gauge_fix(inner if kind == "free" else go.orbit.hold_products(inner, PAIR, kind, **number), PAIR)
    params, step, found = _pair(), stepper(tx, _growing), []
    state = tx.init(params)
    for _ in range(300):
        params, state, _ = step(params, state)
        found.append(_products(params))
    return np.array(found)


def test_free_products_grow_and_others_are_held(x64: None) -> None:
    start, free = _products(_pair()), _run_of_products("free")
    assert np.all(free[-1] > 3.0 * start)
    np.testing.assert_allclose(_run_of_products("init"), np.broadcast_to(start, (300, 2)), rtol=1e-12)
    capped = _run_of_products("cap", cap=3.0)
    assert capped.max() < 3.0 and np.all(np.diff(capped, axis=0) > 0) and capped[-1].min() > 2.0
    assert np.all(_run_of_products("decay", decay=0.05)[-1] < free[-1])
    np.testing.assert_allclose(_run_of_products("cap", cap=1e8)[-1], free[-1], rtol=1e-6)


def test_under_a_cap_rest_stays_at_rest(x64: None) -> None:
    tx = go.orbit.gauge_fix(go.orbit.hold_products(optax.sgd(0.0), PAIR, "cap", cap=3.0), PAIR)
    np.testing.assert_allclose(_products(trained(tx, _growing, _pair(), 1)[0]), _products(_pair()), rtol=1e-12)


def test_moments_go_along_with_a_factor_as_gradients_do(x64: None) -> None:
    """The first moment is a cotangent, the second its square: over the factor, and over its square."""
    params, kept = _pair(), []
    for transport in (True, False):
        tx = go.orbit.hold_products(optax.adam(0.0), PAIR, "decay", decay=0.19, transport=transport)
        _, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
        kept.append([optax.tree.get(state, name)["key"] for name in ("mu", "nu")])
    (mu, nu), (adam_mu, adam_nu) = kept
    np.testing.assert_allclose(mu, adam_mu / 0.9, rtol=1e-12)
    np.testing.assert_allclose(nu, adam_nu / 0.81, rtol=1e-12)


def test_every_gauge_of_a_list_keeps_its_products_under_jit(x64: None) -> None:
    """`jit` sorts the keys of the state's dict, so the order of the list is not the order in which it comes back."""
    late, early = (go.rescale({f"{name}/up": "channel"}, {f"{name}/down": "channel"}) for name in ("z", "a"))
    start = {name: {"up": jnp.array([x, 2.0]), "down": jnp.array([x, 5.0])} for name, x in (("z", 3.0), ("a", 0.5))}
    tx = go.orbit.hold_products(optax.sgd(0.1), [late, early], "init")
    moved, _ = trained(tx, lambda p: sum(map(jnp.sum, jax.tree.leaves(p))), start, 3)
    for name in ("z", "a"):
        here, there = (p[name]["up"] * p[name]["down"] for p in (moved, start))
        np.testing.assert_allclose(here, there, rtol=1e-12)
        assert float(jnp.max(jnp.abs(moved[name]["up"] - start[name]["up"]))) > 0.01


@pytest.mark.slow_rows("kind[12]")
@pytest.mark.parametrize("kind", [{"kind": "cap", "cap": 0.6}, {"kind": "init"}, {"kind": "decay", "decay": 0.1}])
def test_products_are_held_around_a_quotient_and_inside_one(kind: dict[str, Any], x64: None) -> None:
    """Twins stay twins and the products are held, with another gauge in the quotient's list and with two inside."""
    start = _pair() | normal(1, {"up": (3, 2), "down": (2, 3)})
    gauges, adam = [PAIR, UNITS], optax.adam(0.03)
    twin = go.product(gauges).act(({"": jnp.array([1.0, -0.5])}, {"": jnp.array([-1.0, 0.7])}), start)

    def loss(p: Tree) -> jax.Array:
        scores = jnp.einsum("kge,ke->kg", p["query"].reshape(2, 2, 3), p["key"])
        return jnp.sum(jnp.cos(scores)) + jnp.sum(jnp.cos(jax.nn.relu(jnp.eye(3) @ p["up"]) @ p["down"]))

    for name, tx in {
        "inside": go.quotient(go.orbit.hold_products(adam, PAIR, **kind), gauges),
        "around": go.orbit.hold_products(go.quotient(adam, gauges), gauges, **kind),
    }.items():
        products, others = (_products(trained(tx, loss, params, 10)[0]) for params in (start, twin))
        np.testing.assert_allclose(others, products, rtol=1e-11, err_msg=name)
        if kind["kind"] == "init":
            np.testing.assert_allclose(products, _products(start), rtol=1e-11, err_msg=name)
        else:
            assert np.all(products < (0.6 if kind["kind"] == "cap" else 0.9 * _products(start))), name


ROTATION = go.head_rotation({"query": "head basis", "key": "head basis"})
OTHER = go.rescale({"query": "(head _) _"}, {"kernel": "head"})
SQUARED = go.rescale({"query": "(head _) _"}, {"key": "head _"}, degree=2)
ROTARY = {"kind": "cap", "cap": 1.0, "gauges": PAIR}
LATE = go.rescale({"query": "(head _) _"}, {"key": "head _"})
"""Its length of `head` comes from the key."""


@pytest.mark.parametrize(("options", "said"), [
    ({"kind": "cap"}, "kind='cap' without a number"),
    ({"kind": "decay", "decay": 1.0}, "kind='decay' without a number"),
    ({"kind": "cap", "cap": float("inf")}, "kind='cap' without a number"),
    ({"kind": "cap", "cap": jnp.ones(2)}, "kind='cap' without a number"),
    ({"kind": "init", "cap": 2.0}, "a number that kind='init' does not take"),
    ({"kind": "cap", "cap": 2.0, "decay": 0.1}, "a number that kind='cap' does not take"),
    ({"kind": "fix"}, "bad kind"),
    ({"kind": "init", "on_unknown": "ignore"}, "bad on_unknown"),
    ({"gauges": [PAIR, ROTATION]}, "without two sides"),
    ({"gauges": SQUARED}, "no product to hold"),
    ({"gauges": [PAIR, OTHER]}, "two gauges on one leaf, 'query'"),
    (ROTARY | {"gauges": [PAIR, UNITS], "alone": {"query": "head _"}}, "nest two hold_products"),
    ({"alone": {"query": "head _"}}, "write kind='cap'"),
    (ROTARY | {"alone": {}}, "alone= that cannot be bound"),
    (ROTARY | {"alone": {"nothing": "head"}}, "no leaf matches 'nothing'"),
    (ROTARY | {"alone": {"rotary": "(head _) _"}, "gauges": LATE}, "write sizes={'head': 2} in the gauge of hold_"),
    (ROTARY | {"alone": {"rotary": "_ head"}}, "name the same axes"),
    (ROTARY | {"alone": {"rotary": "channel _"}}, "name the same axes"),
    (ROTARY | {"alone": {"query": "(head _) _", "rotary": "head _"}}, "a range of entries that the gauge leaves"),
    (ROTARY | {"alone": {"rotary": "head _"}}, "without max_logits"),
])
def test_mistakes_are_named(options: dict[str, Any], said: str) -> None:
    params = {**_pair(), "kernel": jnp.ones(2), "rotary": jnp.ones((2, 3))}
    with refused("", "hold_products", said):
        tx = go.orbit.hold_products(optax.adam(1e-2), **{"gauges": PAIR, **options})
        tx.update(params, tx.init(params), params)


def test_a_cap_holds_for_logits_in_bfloat16() -> None:
    """The bound is 100; the logit grows by the product of both sides."""
    params, gauge = {"q": jnp.full((2, 2), 10.0), "k": jnp.full((2, 2), 10.0)}, go.rescale({"q": "_ _"}, {"k": "_ _"})
    tx = go.orbit.hold_products(optax.sgd(0.0), gauge, "cap", cap=100.0)
    updates, _ = tx.update(params, tx.init(params), params, max_logits={"": jnp.asarray(150.0, jnp.bfloat16)})
    moved = optax.apply_updates(params, updates)
    assert 99.0 < 150.0 * float(moved["q"][0, 0] * moved["k"][0, 0]) / 100.0 <= 100.0


LOGITS = {"": jnp.array([30.0, 0.1])}
NESTED = "one entry for each of rescale of 'up', multiplier_balance of 'query'"


@pytest.mark.parametrize(("alone", "max_logits", "said"), [
    ({"rotary": "head _"}, (None, LOGITS), ""),
    (None, (None, LOGITS), ""),
    (None, [LOGITS, None], ""),
    (None, LOGITS, NESTED),
    (None, (LOGITS,), NESTED),
    (None, (None, {"": jnp.ones(3)}), "max_logits of other channels than multiplier_balance of 'query'"),
    (None, (jnp.ones(2), None), "max_logits of other channels than rescale of 'up'"),
    ({"rotary": "head _"}, (LOGITS, None), "alone= without logits"),
])
@pytest.mark.parametrize("nest", [lambda tx: tx, lambda tx: optax.chain(tx, optax.identity())])
def test_logits_of_nested_caps_reach_their_gauges(nest: Any, alone: Any, max_logits: Any, said: str) -> None:
    """Both gauges have two channels, so that the shapes of logits do not tell whose they are."""
    params = dict.fromkeys(("query", "key", "rotary", "down"), jnp.ones((2, 3))) | {"up": jnp.ones((3, 2))}
    heads = go.multiplier_balance({"query": "head _"}, {"key": "head _"})
    inside = go.orbit.hold_products(optax.sgd(1.0), heads, "cap", cap=20.0, alone=alone)
    tx = go.orbit.hold_products(nest(inside), UNITS, "cap", cap=20.0)
    with refused("", "hold_products", said) if said else contextlib.nullcontext():
        updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params, max_logits=max_logits)
        moved = [bool(jnp.abs(updates[path]).max() > 0.1) for path in ("up", "query")]
        assert moved == [entry is not None for entry in max_logits]


@pytest.mark.parametrize("max_logits", [jnp.ones(2), {"i=0": jnp.ones(2)}])
def test_logits_of_copies_have_the_names_of_copies(max_logits: Any) -> None:
    params = {"0": _pair(), "1": _pair()}
    gauge = go.multiplier_balance({"{i}/query": "(head _) _"}, {"{i}/key": "head _"})
    tx = go.orbit.hold_products(optax.sgd(1.0), gauge, "cap", cap=20.0)
    with refused("max_logits", "write max_logits={'i=0': largest, 'i=1': largest}"):
        tx.update(params, tx.init(params), params, max_logits=max_logits)


def test_a_held_product_moves_with_its_gauge_and_with_no_other(x64: None) -> None:
    """A move that changes what is held has no rule: the next step would undo it, and change the function."""
    params, tx = _pair(), go.orbit.gauge_fix(go.orbit.hold_products(optax.adam(1e-2), PAIR, "init"), PAIR)
    state, element = tx.init(params), {"": jnp.array([1.0, -0.5])}
    moved, twin = go.orbit.transport(state, params, PAIR, element), PAIR.act(element, params)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), moved, twin)
    np.testing.assert_allclose(_products(optax.apply_updates(twin, updates)), _products(params), rtol=1e-12)
    more = params | {"kernel": jnp.ones(2)}
    finer = go.rescale({"query": "(head _) channel"}, {"key": "head channel"})
    for tree, gauge, move in ((more, OTHER, element), (params, finer, {"": jnp.full((2, 3), 0.5)})):
        with pytest.raises(ValueError, match="products held, which the move changes"):
            go.orbit.transport(tx.init(tree), tree, gauge, move)
    kept = go.orbit.transport(tx.init(more), more, OTHER, element, on_unknown="keep")
    assert structure(kept) == structure(tx.init(more))


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_qk_clip_bounds_the_logits_of_latent_attention(fused: bool, x64: None) -> None:
    """Heads share a rotary key, which stays: their rotary queries take the whole factor."""
    c = latent.LatentConfig(fused=fused)
    draw = np.random.default_rng(0).normal
    params = unflatten_dict({path: jnp.asarray(draw(size=shape)) for path, shape in c.shapes.items()}, sep="/")
    y, (gauge, alone) = jnp.asarray(draw(size=(2, 5, c.d_model))), latent.qk_clip(c)

    def logits(p: Tree) -> jax.Array:
        return latent.logits_and_values(c, p, y)[0]

    def largest(p: Tree) -> jax.Array:
        return jnp.max(logits(p), (0, 2, 3))

    def step(tx: Any, gradient: Tree, state: Any, p: Tree) -> tuple[Tree, Any]:
        updates, state = tx.update(gradient, state or tx.init(p), p, max_logits={"": largest(p)})
        return optax.apply_updates(p, updates), state

    clip = functools.partial(go.orbit.hold_products, gauges=gauge, kind="cap")
    # One step that changes nothing but sizes: every head ends at the bound that its own logits ask for.
    moved, _ = step(clip(optax.sgd(0.0), cap=0.5, alone=alone), params, None, params)
    factor = logits(moved) / logits(params)
    np.testing.assert_allclose(factor, jnp.broadcast_to(factor[:1, :, :1, :1], factor.shape), rtol=1e-9)
    assert np.all(largest(params) > 1.5) and np.all((0.45 < largest(moved)) & (largest(moved) < 0.5))
    assert abs(factor[0, 0, 0, 0] / factor[0, 1, 0, 0] - 1) > 1e-3, "both heads have one factor"
    np.testing.assert_array_equal(moved["attn"]["kv_a"]["kernel"], params["attn"]["kv_a"]["kernel"])
    halves, _ = step(clip(optax.sgd(0.0), cap=0.5), params, None, params)
    skewed = logits(halves) / logits(params)
    assert np.ptp(skewed) > 0.1, "without alone= all logits of a head have one factor, too"

    def grown(cap: float) -> np.ndarray:
        gradient, tx = jax.grad(lambda p: -jnp.sum(jnp.log(largest(p)))), clip(optax.adam(1e-2), cap=cap, alone=alone)
        trained_on = jit(lambda p, state: step(tx, gradient(p), state, p))
        (point, state), seen = trained_on(params, None), []
        for _ in range(99):
            point, state = trained_on(point, state)
            seen.append(np.asarray(largest(point)))
        return np.array(seen)

    free = grown(1e9)[-1]
    bounded = grown(cap := 0.5 * float(free.min()))
    print(f"largest logits: free {free}, cap {cap:.1f}, bounded {bounded[-1]}, at most {bounded.max():.1f}")
    assert free.min() > 1.9 * cap and bounded.max() < 1.03 * cap and 0.8 * cap < bounded[-1].min()


def test_a_product_that_was_zero_is_left_alone(x64: None) -> None:
    params = _pair() | {"key": _pair()["key"].at[0].set(0.0)}
    tx = go.orbit.hold_products(optax.sgd(1.0), PAIR, "init")
    moved = trained(tx, lambda p: -0.5 * sum(map(jnp.sum, jax.tree.leaves(p))), params, 1)[0]
    np.testing.assert_allclose(moved["key"][0], 0.5, rtol=1e-12)
    np.testing.assert_allclose(_products(moved)[1], _products(params)[1], rtol=1e-12)
