"""What DDC does to functions: Adam where nothing is gauged, no motion along orbits, and the right speed across them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.measure.motion import balanced_drift, balanced_motion
from models import lm
from tests.cases import GAUGE_CASES, GaugeCase
from tests.quick import jit
from tests.tolerances import tolerance

Tree = Any
CASES = {c.name: c for c in GAUGE_CASES}

# A net whose leaves hold a norm's scale, ReLU channels (one leaf in both), a head, a logit shift, and nothing at all.
NET: dict[str, tuple[int, ...]] = {
    "norm": (6,), "up": (6, 5), "bias": (5,), "down": (5, 6), "value": (6, 2, 3), "out": (2, 3, 6), "head": (6, 7),
    "free": (6,),
}  # fmt: skip
NET_GAUGES = [
    go.norm_scale({"norm": "channel"}, {"up": "channel _"}),
    go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"}),
    go.head_rotation({"value": "_ head basis", "out": "head basis _"}),
    go.logit_shift({"head": "_ vocab"}),
]


def _normal(seed: int, shapes: dict[str, tuple[int, ...]] = NET) -> Tree:
    draw = np.random.default_rng(seed).normal
    return {name: jnp.asarray(draw(size=shape), float) for name, shape in shapes.items()}


def _net_loss(p: Tree) -> jax.Array:
    x = jnp.asarray(np.random.default_rng(9).normal(size=(8, 6)), p["free"].dtype) + p["free"]
    x = x + jnp.einsum("nd,dhe,hec->nc", x, p["value"], p["out"])
    normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True)) * p["norm"]
    x = x + jax.nn.relu(normed @ p["up"] + p["bias"]) @ p["down"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x @ p["head"], np.arange(8) % 7))


def _train(tx: optax.GradientTransformation, params: Tree, rule: Callable[[Tree, Tree], Tree], steps: int) -> Tree:
    """Parameters after some steps, and the last state; the rule makes gradients of parameters and noise."""

    @jit
    def step(noise: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(rule(params, noise), state, params)
        return optax.apply_updates(params, updates), state

    state, draw = jit(tx.init)(params), np.random.default_rng(1).normal
    for _ in range(steps):
        params, state = step(jax.tree.map(lambda x: draw(size=x.shape).astype(x.dtype), params), state, params)
    return params, state


def _noise(params: Tree, noise: Tree) -> Tree:
    return noise


def _zero(params: Tree, noise: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, params)


def _slope(loss: Callable[[Tree], jax.Array]) -> Callable[[Tree, Tree], Tree]:
    return lambda params, noise: jax.grad(loss)(params)


# Chain and alias ----------------------------------------------------------------------------------


# Arguments of the alias that its links share, none at its default.
OPTIONS: dict[str, Any] = {
    "b1": 0.8, "b2": 0.95, "eps": 1e-6, "eps_root": 1e-7, "mu_dtype": "float32", "nesterov": True,
    "v_mode": "body_frame", "radial": "log", "radial_scale": 2.0, "live_threshold": 0.3, "refresh_drift": 0.05,
    "refresh_every": 2, "reset_every": 4, "reproject": False,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "options": OPTIONS,
    "sgd": OPTIONS | {"vertical": "sgd", "v_mode": "per_head_scalar"},
    "adam": {"vertical": "adam", "v_mode": "none"},
    "matrix": {"v_mode": "per_head_matrix", "weight_decay": 0.3, "mask": {n: n not in ("value", "out") for n in NET}},
    "horizontal": {"match": "horizontal", "weight_decay": optax.linear_schedule(0.1, 0.4, 6)},
}


def _chain(gauges: list[go.Gauge], rate: Any, options: dict[str, Any]) -> optax.GradientTransformation:
    """DESIGN §4, word for word."""
    outer = {"weight_decay": 1e-4, "match": "adamw", "mask": None, "vertical": "frozen", "radial": "linear"}
    outer |= {name: value for name, value in options.items() if name in outer}
    inner = {name: value for name, value in options.items() if name not in ("weight_decay", "match", "mask")}
    return optax.chain(
        *([go.gauge_project(gauges)] if outer["vertical"] == "frozen" else []),
        go.scale_by_ddc(gauges, **inner),
        go.add_gauge_decay(outer["weight_decay"], gauges, outer["match"], outer["mask"]),
        optax.scale_by_learning_rate(rate),
        go.gauge_retract(gauges, outer["radial"], outer["vertical"]),
    )


QUICK = {("defaults", "any"), ("options", "invariant")}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param(name, rule, marks=() if (name, rule) in QUICK else pytest.mark.slow)
        for name in CHANGES
        for rule in ("invariant", "any")
    ],
)
def test_chain_and_alias_are_one(name: str, rule: str) -> None:
    gauges = NET_GAUGES[1:] if name == "horizontal" else NET_GAUGES
    if rule == "any" and name == "adam":
        pytest.skip("scalar Adam divides rounding by rounding where a vertical derivative is zero")
    with jax.enable_x64(True):
        rate = optax.linear_schedule(0.0, 1e-2, 3)
        both = _chain(gauges, rate, CHANGES[name]), go.ddc_adamw(rate, gauges, **CHANGES[name])
        chain, alias = (
            _train(tx, _normal(0), _slope(_net_loss) if rule == "invariant" else _noise, 6)[0] for tx in both
        )
    moved = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(a), chain, alias)
    print(name, rule, max(moved.values()))
    # Of a gradient with a vertical part the alias takes out all but a thousandth before the moments see it.
    assert max(moved.values()) < (1e-6 if "vertical" in CHANGES[name] else 1e-8 if rule == "invariant" else 1e-5)


def test_every_option_reaches_its_link() -> None:
    """The alias's arguments are the links', by name and by default."""
    alias = inspect.signature(go.ddc_adamw).parameters
    for link in (go.scale_by_ddc, go.add_gauge_decay, go.gauge_retract):
        shared = {name: p for name, p in inspect.signature(link).parameters.items() if name != "weight_decay"}
        assert {n: p.default for n, p in shared.items()} == {n: alias[n].default for n in shared}


# Adam ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_leaves_without_a_gauge_get_adamw(nesterov: bool) -> None:
    options: dict[str, Any] = {"eps": 1e-3, "eps_root": 1e-4, "weight_decay": 0.1, "nesterov": nesterov}
    ours, _ = _train(go.ddc_adamw(0.01, NET_GAUGES, **options), _normal(0), _noise, 5)
    theirs, _ = _train(optax.adamw(0.01, **options), _normal(0), _noise, 5)
    _close(ours["free"], theirs["free"])
    for name in set(NET) - {"free"}:
        assert jnp.max(jnp.abs(ours[name] - theirs[name])) > 1e-3


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_gauges_it_is_adamw(nesterov: bool) -> None:
    mask = {name: name != "up" for name in NET}
    options: dict[str, Any] = {"weight_decay": 0.1, "mask": mask, "nesterov": nesterov}
    ours, _ = _train(go.ddc_adamw(0.01, [], **options), _normal(0), _noise, 5)
    theirs, _ = _train(optax.adamw(0.01, **options), _normal(0), _noise, 5)
    _close(ours, theirs)


def _close(found: Tree, expected: Tree) -> None:
    chex.assert_trees_all_close(found, expected, rtol=tolerance("optax", jax.tree.leaves(expected)[0].dtype))


def test_arguments_are_those_of_adamw() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (go.ddc_adamw, optax.adamw))
    shared = [name for name in ours if name in theirs]
    assert shared == list(theirs)
    assert [name for name in ours if name != "gauges"][: len(theirs) - 1] == list(theirs)[:-1]
    for name in shared:
        assert (ours[name].default, ours[name].kind) == (theirs[name].default, theirs[name].kind), name


# Tangents -----------------------------------------------------------------------------------------

ONE_GAUGE_A_LEAF = [
    "logit_shift/kernel_bias", "rescale/degree_2", "rescale/gate", "norm_scale/one_plus", "scale_invariant/kernel_bias",
    "head_rotation/gqa", "head_rotation/value_out", "head_rotation/fused", "rope_torus/partial",
]  # fmt: skip


def _tangents(case: GaugeCase, **options: Any) -> list[tuple[Tree, Tree]]:
    """What `scale_by_ddc` emits, and where: at the first step of a run and at its last, in a frame gone stale."""
    gauges, params = case.gauges(), case.params(jax.random.key(0))
    first = optax.chain(go.gauge_project(gauges), go.scale_by_ddc(gauges, **options))
    second = optax.chain(optax.scale_by_learning_rate(0.02), go.gauge_retract(gauges))

    @jit
    def step(params: Tree, states: Tree) -> tuple[Tree, Tree, Tree]:
        tangent, one = first.update(jax.grad(case.loss)(params), states[0], params)
        chord, two = second.update(tangent, states[1], params)
        return tangent, optax.apply_updates(params, chord), (one, two)

    states, seen = jit(lambda p: (first.init(p), second.init(p)))(params), []
    for _ in range(4):
        tangent, moved, states = step(params, states)
        seen.append((tangent, params))
        params = moved
    return [seen[0], seen[-1]]


@pytest.mark.parametrize("name", ONE_GAUGE_A_LEAF)
def test_tangents_are_horizontal_in_float64(name: str, x64: None) -> None:
    for tangent, params in _tangents(CASES[name]):
        assert optax.tree.norm(tangent) > 0.1
        go.testing.assert_horizontal(tangent, params, CASES[name].gauges(), tolerance("horizontal", jnp.float64))


@pytest.mark.parametrize("name", ["logit_shift/kernel_bias", "rescale/degree_2", "head_rotation/value_out"])
def test_tangents_are_horizontal_in_float32(name: str) -> None:
    for tangent, params in _tangents(CASES[name]):
        go.testing.assert_horizontal(tangent, params, CASES[name].gauges(), tolerance("horizontal", jnp.float32))


def test_division_alone_leaks() -> None:
    """Lemma 10: without the second projection the checks above fail."""
    case = CASES["head_rotation/value_out"]
    with pytest.raises(AssertionError, match="head_rotation"):
        go.testing.assert_horizontal(*_tangents(case, reproject=False)[0], case.gauges())


@pytest.mark.parametrize("name", ["product/chain", "product/gpt", "product/llama"])
def test_two_rescales_on_a_narrow_leaf_leave_little(name: str, x64: None) -> None:
    """Radial parts cross by one over the width, here 4 to 6, before that crosstalk is taken out."""
    for tangent, params in _tangents(CASES[name]):
        go.testing.assert_horizontal(tangent, params, CASES[name].gauges(), tolerance("coupled"))


def test_two_rescales_on_a_leaf_leave_little(x64: None) -> None:
    """After a fixed few sweeps; the retraction ends it."""
    shapes = {"norm": (32,), "up": (32, 64), "bias": (64,), "down": (64, 32)}

    def loss(p: Tree) -> jax.Array:
        x = np.random.default_rng(0).normal(size=(16, 32))
        return jnp.mean(jnp.square(jax.nn.relu(x * p["norm"] @ p["up"] + p["bias"]) @ p["down"] / 32 - x))

    case = GaugeCase("norm_and_unit", lambda: NET_GAUGES[:2], lambda key: _normal(0, shapes), loss, dim=96)
    for tangent, params in _tangents(case):
        go.testing.assert_horizontal(tangent, params, case.gauges(), tolerance("coupled"))


# Radial steps and decay ---------------------------------------------------------------------------


def _joint_scale(params: Tree, degree: float) -> jax.Array:
    """s = ρ_up^p·ρ_down of the unit's channels."""
    up = jnp.sqrt(jnp.sum(jnp.square(params["up"]["kernel"]), 0) + jnp.square(params["up"]["bias"]))
    return up**degree * jnp.linalg.norm(params["down"], axis=1)


def _unit(degree: int) -> tuple[GaugeCase, Tree]:
    case = CASES[{1: "rescale/channel", 2: "rescale/degree_2"}[degree]]
    return case, case.params(jax.random.key(1))


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_the_first_linear_step_moves_s_by_the_learning_rate(degree: int, factor: float, x64: None) -> None:
    case, params = _unit(degree)
    tx = go.ddc_adamw(1e-3, case.gauges(), weight_decay=0.0, radial_scale=factor, eps=1e-20)
    moved, _ = _train(tx, params, _slope(case.loss), 1)
    step = _joint_scale(moved, degree) - _joint_scale(params, degree)
    np.testing.assert_allclose(jnp.abs(step), factor * 1e-3, rtol=tolerance("oracle"))


@pytest.mark.parametrize("degree", [1, 2])
def test_the_first_log_step_moves_log_s_by_the_learning_rate(degree: int, x64: None) -> None:
    case, params = _unit(degree)
    tx = go.ddc_adamw(1e-3, case.gauges(), weight_decay=0.0, radial="log", eps=1e-20)
    moved, _ = _train(tx, params, _slope(case.loss), 1)
    step = jnp.log(_joint_scale(moved, degree) / _joint_scale(params, degree))
    np.testing.assert_allclose(jnp.abs(step), 1e-3, rtol=tolerance("oracle"))


def _shrink(tx: optax.GradientTransformation, params: Tree, degree: float) -> jax.Array:
    """How far log s falls in one step without a gradient."""
    moved, _ = _train(tx, params, _zero, 1)
    return -jnp.log(_joint_scale(moved, degree) / _joint_scale(params, degree))


@pytest.mark.parametrize("degree", [1, 2])
def test_decay_shrinks_log_s_as_adamw_does(degree: int, x64: None) -> None:
    """With lr·wd = 1e-7 its square is nothing."""
    case, params = _unit(degree)
    ours = _shrink(go.ddc_adamw(1e-6, case.gauges(), weight_decay=0.1), params, degree)
    theirs = _shrink(optax.adamw(1e-6, weight_decay=0.1), params, degree)
    np.testing.assert_allclose(ours, (degree + 1) * 1e-7, rtol=tolerance("optax", jnp.float32))
    np.testing.assert_allclose(ours, theirs, rtol=tolerance("optax", jnp.float32))


@pytest.mark.parametrize("degree", [1, 2])
def test_horizontal_decay_has_the_rate_of_the_reference(degree: int, x64: None) -> None:
    case, params = _unit(degree)
    ours = _shrink(go.ddc_adamw(1e-6, case.gauges(), weight_decay=0.1, match="horizontal"), params, degree)
    np.testing.assert_allclose(ours, (degree**2 + 1) * 1e-7, rtol=tolerance("optax", jnp.float32))


def _decayed(params: Tree, gauges: Any, **options: Any) -> Tree:
    tx = go.add_gauge_decay(0.5, gauges, **options)
    return tx.update(_zero(params, params), tx.init(params), params)[0]


def test_horizontal_decay_refuses_a_shared_leaf() -> None:
    case = CASES["product/chain"]
    with pytest.raises(ValueError, match="two scale gauges on 'w2'") as error:
        _decayed(case.params(jax.random.key(0)), case.gauges(), match="horizontal")
    _four_parts(error, "rescale")


def _four_parts(error: pytest.ExceptionInfo[ValueError], *names: str) -> None:
    for part in ("found:", "expected:", "remedy:", *names):
        assert part in str(error.value)


def test_a_shared_leaf_decays_once() -> None:
    case = CASES["product/chain"]
    params = case.params(jax.random.key(0))
    _close(_decayed(params, case.gauges()), jax.tree.map(lambda x: 0.5 * x, params))


def test_decay_leaves_the_mean_over_the_vocabulary_alone() -> None:
    case = CASES["product/semidirect"]
    params = case.params(jax.random.key(0))
    centred = params | {name: params[name] - jnp.mean(params[name], -1, keepdims=True) for name in ("kernel", "bias")}
    _close(_decayed(params, case.gauges()), jax.tree.map(lambda x: 0.5 * x, centred))


MASKS = {
    "tree": {name: name in ("up", "bias", "down") for name in NET},
    "callable": lambda params: {name: name in ("up", "bias", "down") for name in params},
}


@pytest.mark.parametrize("mask", MASKS)
def test_masked_leaves_do_not_decay(mask: str) -> None:
    params = _normal(0)
    decayed = _decayed(params, NET_GAUGES[1:], mask=MASKS[mask])
    _close(decayed, {name: (0.5 if name in ("up", "bias", "down") else 0.0) * x for name, x in params.items()})


def test_a_mask_may_be_a_prefix() -> None:
    case, params = _unit(1)
    assert optax.tree.norm(_decayed(params, case.gauges(), mask=False)) == 0
    _close(_decayed(params, case.gauges(), mask={"up": True, "down": True}), jax.tree.map(lambda x: 0.5 * x, params))


@pytest.mark.parametrize(("leaf", "gauge"), [("bias", "rescale"), ("down", "rescale"), ("out", "head_rotation")])
def test_a_mask_that_splits_a_gauge_is_refused(leaf: str, gauge: str) -> None:
    tx = go.add_gauge_decay(0.1, NET_GAUGES, mask={name: name != leaf for name in NET})
    with pytest.raises(ValueError, match=f"the mask splits {gauge}") as error:
        tx.init(_normal(0))
    _four_parts(error, leaf)


@pytest.mark.parametrize("gradient", ["zero", "loss"])
def test_scale_invariant_leaves_keep_their_norm(gradient: str) -> None:
    case = CASES["scale_invariant/kernel_bias"]
    params = case.params(jax.random.key(0))
    rule = {"zero": _zero, "loss": _slope(case.loss)}[gradient]
    moved, _ = _train(go.ddc_adamw(0.1, case.gauges(), weight_decay=0.5), params, rule, 3)
    before, after = (
        jnp.sum(jnp.square(p["kernel"]), (0, 2)) + jnp.sum(jnp.square(p["bias"]), 1) for p in (params, moved)
    )
    np.testing.assert_allclose(after, before, rtol=tolerance("coordinates", jnp.float32))


# Retraction ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rescale/degree_2", "norm_scale/bias", "logit_shift/kernel_bias", "product/chain"])
def test_big_steps_keep_the_coordinates(name: str) -> None:
    case = CASES[name]
    params = case.params(jax.random.key(0))
    moved, _ = _train(go.ddc_adamw(0.3, case.gauges()), params, _noise, 1)
    assert optax.tree.norm(jax.tree.map(jnp.subtract, moved, params)) > 0.3
    assert _drift(case, params, moved) < tolerance("coordinates", jnp.float32)
    thrown, _ = _train(optax.adamw(0.3), params, _noise, 1)
    assert _drift(case, params, thrown) > 0.01


def _drift(case: GaugeCase, params: Tree, moved: Tree) -> float:
    """The largest change of a coordinate."""
    drift = balanced_drift(params, moved, case.gauges())
    return max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(drift))


@pytest.mark.parametrize("radial", ["linear", "log"])
@pytest.mark.parametrize(("inward", "sideways"), [(0.0, 10.0), (-0.999, 3.0), (-5.0, 0.0)])
def test_one_step_corrects_s_by_a_factor_of_two_at_most(radial: str, inward: float, sideways: float) -> None:
    """A linear step at most halves s; where the chord gives much more than was asked, the log-ratio stops at −ln 2."""
    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    params = {"up": jnp.array([[1.0], [0.0]]), "down": jnp.ones((1, 1))}
    tangent = {"up": jnp.array([[inward], [sideways]]), "down": jnp.zeros((1, 1))}
    moved, _ = _train(go.gauge_retract(gauge, radial=radial), params, lambda p, noise: tangent, 1)
    s = jnp.linalg.norm(moved["up"]) * jnp.abs(moved["down"][0, 0])
    asked = inward if radial == "log" else max(inward, -0.5)
    # A radial part that is cut short is shared by both sides.
    raw = np.hypot(1 + inward, sideways) if asked == inward else np.hypot(1 + asked / 2, sideways) * (1 + asked / 2)
    wanted = np.exp(asked) if radial == "log" else 1.0 + asked
    np.testing.assert_allclose(s, max(wanted, raw / 2), rtol=tolerance("coordinates", jnp.float32))


# Vertical motion ----------------------------------------------------------------------------------


def _imbalance(degree: int, p: Tree) -> jax.Array:
    """The unit's coordinates, in closed form: `coordinates` itself solves for them and has no reverse derivative."""
    up = jnp.sum(jnp.square(p["up"]["kernel"]), 0) + jnp.square(p["up"]["bias"])
    return jnp.log(up / (degree * jnp.sum(jnp.square(p["down"]), 1))) / (2 * (1 + degree))


COORDINATES = {
    "rescale/channel": functools.partial(_imbalance, 1),
    "rescale/degree_2": functools.partial(_imbalance, 2),
    "logit_shift/kernel": lambda p: jnp.mean(p["kernel"], 1),
}


@pytest.mark.parametrize("name", COORDINATES)
@pytest.mark.parametrize("vertical", ["frozen", "sgd", "adam"])
def test_a_penalty_moves_the_coordinates_unless_frozen(vertical: str, name: str) -> None:
    """Each is pulled towards 0, downhill; frozen, none moves."""
    case, coordinates = CASES[name], COORDINATES[name]

    def loss(p: Tree) -> jax.Array:
        return case.loss(p) + jnp.sum(jnp.square(coordinates(p)))

    params = case.params(jax.random.key(0))
    moved, _ = _train(go.ddc_adamw(0.02, case.gauges(), vertical=vertical), params, _slope(loss), 5)
    before, after = coordinates(params), coordinates(moved)
    if vertical == "frozen":
        np.testing.assert_allclose(after, before, atol=tolerance("coordinates", jnp.float32))
    else:
        far = jnp.abs(before) > 0.15
        assert jnp.any(far) and jnp.all(jnp.where(far, jnp.abs(after) < 0.98 * jnp.abs(before), True))


@pytest.mark.parametrize("vertical", ["frozen", "sgd", "adam"])
def test_a_penalty_turns_a_head_unless_frozen(vertical: str) -> None:
    """A rotation has no coordinate: what moves is the accumulated vertical part, and the penalty falls faster."""
    case = CASES["head_rotation/mha"]
    gauges, params = case.gauges(), case.params(jax.random.key(0))

    def penalty(p: Tree) -> jax.Array:
        return jnp.sum(jnp.square(p["query"][..., 0]))

    moved, _ = _train(go.ddc_adamw(0.02, gauges, vertical=vertical), params, _slope(penalty), 3)
    motion = balanced_motion(params, jax.tree.map(jnp.subtract, moved, params), gauges)
    turned = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(motion))
    assert penalty(moved) < penalty(params)
    assert (turned > 0.01) == (vertical != "frozen")


# State --------------------------------------------------------------------------------------------


def test_the_state_is_as_large_as_adamws() -> None:
    """GPT-2, 124M parameters, shapes only."""
    config = lm.LMConfig(
        vocab=50257, d_model=768, layers=12, heads=12, kv_heads=12, d_head=64, d_ff=3072, max_len=1024, tied=True
    )
    params = jax.eval_shape(lambda key: lm.params_and_loss(config, key)[0], jax.random.key(0))
    assert 124e6 < sum(x.size for x in jax.tree.leaves(params)) < 125e6
    ours, theirs = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(tx.init, params)))
        for tx in (go.ddc_adamw(1e-3, lm.gauges(config)), optax.adamw(1e-3))
    )
    assert ours <= 1.05 * theirs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"refresh_drift": 1e9}, 0),
        ({"refresh_drift": 1e9, "refresh_every": 2}, 2),
        ({"refresh_drift": 1e9, "refresh_every": 1}, 4),
        ({"refresh_drift": 0.0}, 4),
    ],
)
def test_refreshes_are_counted(options: dict[str, Any], expected: int) -> None:
    gauges = CASES["head_rotation/mha"].gauges()
    params = CASES["head_rotation/mha"].params(jax.random.key(0))
    _, state = _train(go.ddc_adamw(0.01, gauges, **options), params, _noise, 4)
    assert int(optax.tree_utils.tree_get(state, "refreshes")) == expected


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "argument", "choices"),
    [
        (go.scale_by_ddc, "v_mode", ("body_frame_topk", "body_frame", "per_head_scalar", "none")),
        (go.scale_by_ddc, "vertical", ("frozen", "sgd", "adam")),
        (go.scale_by_ddc, "radial", ("linear", "log")),
        (go.gauge_retract, "vertical", ("frozen", "sgd", "adam")),
        (go.gauge_retract, "radial", ("linear", "log")),
        (go.gauge_project, "kind", ("gradient", "update")),
        (functools.partial(go.add_gauge_decay, 0.1), "match", ("adamw", "horizontal")),
        (functools.partial(go.ddc_adamw, 0.1), "v_mode", ("body_frame_topk",)),
        (functools.partial(go.ddc_adamw, 0.1), "vertical", ("frozen",)),
        (functools.partial(go.ddc_adamw, 0.1), "match", ("adamw",)),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(
    make: Callable[..., Any], argument: str, choices: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=argument) as error:
        make(gauges=NET_GAUGES, **{argument: "newton"})
    _four_parts(error, "'newton'", *map(repr, choices))


@pytest.mark.parametrize("v_mode", ["body_frame_topk", "per_head_matrix"])
def test_reset_heads_forget(v_mode: str, x64: None) -> None:
    """A step right after a reset is a first step, for rotated leaves; the others keep their moments."""
    params, grads = _normal(0), [_normal(n) for n in (1, 2)]
    tx = go.scale_by_ddc(NET_GAUGES[2:3], v_mode=v_mode, reset_every=1)
    update = jit(tx.update)
    first, _ = update(grads[1], tx.init(params), params)
    _, state = update(grads[0], tx.init(params), params)
    second, _ = update(grads[1], state, params)
    for name in ("value", "out"):
        np.testing.assert_allclose(second[name], first[name], rtol=tolerance("optax"))
    assert not np.allclose(second["free"], first["free"])
