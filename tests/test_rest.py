"""Where on its orbit a point rests: "balanced" holds the paper's coordinate, `gauge_fix` moves to the balance."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.linalg import symmetric_eigen
from models import lm
from tests.cases import GAUGE_CASES, GPT, LLAMA, GaugeCase
from tests.quick import jit
from tests.refusals import each_refused, refused
from tests.tolerances import tolerance
from tests.twins import driven, furthest, normal, stepper, train

Tree = Any
MAKE: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "quotient(adamw)": functools.partial(go.quotient, optax.adamw(1e-2, weight_decay=0.1)),
    "quotient(lion)": functools.partial(go.quotient, optax.lion(1e-3)),
    "quotient_muon": functools.partial(go.quotient_muon, 1e-2),
    "ddc_adamw": functools.partial(go.ddc_adamw, 1e-2), "ddc_muon": functools.partial(go.ddc_muon, 1e-2),
}
CASES: dict[str, GaugeCase] = {case.name: case for case in GAUGE_CASES}


def _trained(tx: Any, params: Tree, loss: Any, steps: int = 40) -> tuple[Tree, np.ndarray]:
    return train(tx.init, stepper(tx, loss), params, steps)


@pytest.mark.slow_rows("rescale/layers-ddc_muon", "*-quotient_*", "*-ddc_adamw")
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("case", ["rescale/layers", pytest.param("product/llama", marks=pytest.mark.slow)])
def test_losses_are_the_same(case: str, name: str, x64: None) -> None:
    gauges, params = CASES[case].gauges(), CASES[case].params(jax.random.key(1))
    group = go.product(gauges)
    twin = group.act(group.sample(jax.random.key(2), params, 0.5), params)
    end, anchor = _trained(MAKE[name](gauges, rest="anchor"), params, CASES[case].loss)
    tx = MAKE[name](gauges, rest="balanced")
    for start in (params, twin):
        other, balanced = _trained(tx, start, CASES[case].loss)
        np.testing.assert_allclose(balanced, anchor, rtol=1e-10)
        assert furthest(end, other) > 1e-3, "both rest at one point"
    assert abs(anchor[-1] / anchor[0] - 1) > 1e-2


@pytest.mark.slow_rows("quotient_muon-2", "q*-[!2]", "ddc_adamw-2")
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("name", ["quotient(adamw)", "quotient_muon", "ddc_adamw"])
def test_the_papers_coordinate_stays(name: str, degree: int) -> None:
    """log ‖up‖ − p·log ‖down‖ of every channel, in float32; the anchor's rest moves it."""
    gauge = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"}, degree=degree)
    up, down, x, y = map(jax.random.normal, jax.random.split(jax.random.key(0), 4), ((4, 8), (8, 3), (64, 4), (64, 3)))
    params, moved = {"up": up / 2, "bias": jnp.full(8, 0.1), "down": down / 3}, {}

    def loss(p: Tree) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ p["up"] + p["bias"]) ** degree @ p["down"] - y) ** 2)

    def coordinate(p: Tree) -> np.ndarray:
        up, bias, down = (np.asarray(p[n], np.float64) for n in ("up", "bias", "down"))
        return 0.5 * np.log((up**2).sum(0) + bias**2) - degree * 0.5 * np.log((down**2).sum(1))

    for rest in ("anchor", "balanced"):
        end, _ = _trained(MAKE[name](gauge, rest=rest), params, loss, 300)
        moved[rest] = float(np.max(np.abs(coordinate(end) - coordinate(params))))
    assert moved["balanced"] <= 1e-6 < 0.1 < moved["anchor"]


RELU = go.rescale({"up": "_ channel"}, {"down": "channel _"})


ONES = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
ANCHORED, BALANCED = (go.quotient(optax.adam(0.1), RELU, rest=rest) for rest in ("anchor", "balanced"))
test_other_rests_are_refused = each_refused([
    (lambda: go.quotient(optax.adam(0.1), RELU, rest="nowhere"), "bad rest"),
    (lambda: go.ddc_adamw(0.1, RELU, rest="nowhere"), "bad rest"),
    (lambda: go.ddc_adamw(0.1, RELU, rest="balanced", vertical="adam"), "bad rest"),
    (lambda: go.ddc_adamw(0.1, RELU, rest="balanced", preset="paper"), "rest='balanced'"),
    (lambda: BALANCED.update(ONES, ANCHORED.init(ONES), ONES), "a state made with rest='anchor'"),
])


def test_a_side_of_zeros_rests_where_its_first_step_ends() -> None:
    """The first step away from zeros moved the other side by its own size, to a ratio that was made up."""
    params, gradients = ONES | {"down": jnp.zeros((3, 2))}, ONES | {"up": jnp.zeros((2, 3))}
    tx = go.quotient(optax.sgd(0.01), RELU, rest="balanced")
    state, ratios = tx.init(params), []
    for number in range(3):
        updates, state = tx.update(gradients, state, params)
        assert number > 0 or max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(updates)) < 0.03
        params = optax.apply_updates(params, updates)
        ratios.append(jnp.log(jnp.linalg.norm(params["up"], axis=0) / jnp.linalg.norm(params["down"], axis=1)))
    np.testing.assert_allclose(ratios[1:], [ratios[0]] * 2, atol=1e-5)


def test_a_scale_keeps_its_signs(x64: None) -> None:
    """The twin with the other signs computes the same function; a step does not go there."""
    params = normal(0, {"scale": (5,), "into": (5, 4)})
    tx = go.quotient(optax.adam(0.05), go.norm_scale({"scale": "channel"}, {"into": "channel _"}), rest="balanced")
    gradient = {"scale": params["into"].sum(1), "into": params["scale"][:, None] + jnp.zeros((5, 4))}
    signs = [jnp.sign(x["scale"]).tolist() for x in (params, driven(tx, params, [gradient])[0])]
    assert signs[0] == signs[1] and len(set(signs[0])) == 2


# gauge_fix: the function stays, the imbalance goes, and an equivariant optimizer does not notice ---------

LORA, UNIT = CASES["head_linear/lora"], CASES["rescale/channel"]


def _moved(params: Tree, gauges: Any, **options: Any) -> Tree:
    """Where `gauge_fix` alone takes a point."""
    tx, zero = go.orbit.gauge_fix(None, gauges, **options), jax.tree.map(jnp.zeros_like, params)
    return optax.apply_updates(params, tx.update(zero, tx.init(params), params)[0])


def _logs(gauges: Any, params: Tree) -> list[jax.Array]:
    """log f of every scale, and the logarithms of the eigenvalues of H_A⁻¹ # H_B, whose inverse root is the frame."""
    found, group = list[jax.Array](), go.product(gauges)
    for part, own in zip(group.gauges, group.inverse(group.balance(params)), strict=True):
        if part.name == "head_linear":
            own = jax.tree.map(lambda x: -2.0 * jnp.log(symmetric_eigen(x)[0]), own)
        found += jax.tree.leaves(own) if part.name != "logit_shift" else []
    return found


@pytest.mark.slow_rows("gpt-float32", "gpt-float64")
@pytest.mark.parametrize(("name", "dtype"), [("gpt", "float64"), ("gpt", "float32"), ("llama", "float64")])
def test_the_function_stays_and_the_imbalance_goes(name: str, dtype: str) -> None:
    close = tolerance("invariant" if dtype == "float32" else "oracle", dtype)
    case: Any = CASES[f"product/{name}"]
    gauges = lm.gauges({"gpt": GPT, "llama": LLAMA}[name], linear=True)
    with jax.enable_x64(dtype == "float64"):
        params = case.params(jax.random.key(0))
        fix = jit(lambda params, strength: _moved(params, gauges, strength=strength))
        seen = jit(lambda params: (case.loss(params), _logs(gauges, params)))
        loss, logs = seen(params)
        assert max(float(jnp.max(jnp.abs(x))) for x in logs) > 0.5
        half = fix(params, 0.5)
        for share, point in ((0.0, fix(params, 1.0)), (0.5, half), (0.25, fix(half, 0.5))):
            assert {x.dtype for x in jax.tree.leaves(point)} == {jnp.dtype(dtype)}
            found, fewer = seen(point)
            np.testing.assert_allclose(found, loss, rtol=tolerance("invariant", dtype))
            for before, after in zip(logs, fewer, strict=True):
                np.testing.assert_allclose(after, share * before, atol=close)


SLOW = optax.sgd(1e-9)
MOVERS: dict[str, Any] = {
    "gauge_fix": lambda gauges: go.orbit.gauge_fix(SLOW, gauges),
    "every third step": lambda gauges: go.orbit.gauge_fix(SLOW, gauges, every=3),
    "around a quotient": lambda gauges: go.orbit.gauge_fix(go.quotient(SLOW, gauges), gauges),
    "compressed": lambda gauges: go.links.compress_second_moments(go.quotient_adamw(1e-9, gauges)),
    "balanced": lambda gauges: go.quotient(SLOW, gauges, rest="balanced"),
    "ddc_adamw": lambda gauges: go.ddc_adamw(1e-9, gauges),
    "hold_products": lambda gauges: go.orbit.hold_products(SLOW, gauges),
}


@pytest.mark.parametrize("name", MOVERS)
def test_a_move_is_not_rounded_to_the_gradients_dtype(name: str) -> None:
    """In bfloat16 it changed the function by 1e-2. At such a rate, a step is a move along the orbit, and roundoff."""
    gauges, params = UNIT.gauges(), UNIT.params(jax.random.key(0))
    tx, coarse = MOVERS[name](gauges), jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    updates, _ = tx.update(coarse, tx.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}
    moved = optax.apply_updates(params, updates)
    np.testing.assert_allclose(UNIT.loss(moved), UNIT.loss(params), rtol=tolerance("invariant", "float32"))


# What has no balance -------------------------------------------------------------------------------


def test_a_head_without_a_balance_stays(x64: None) -> None:
    params, ours = LORA.params(jax.random.key(0)), jit(lambda p: _moved(p, LORA.gauges()))
    for odd in ({"b": jnp.zeros_like(params["b"])}, {"a": params["a"].at[:, 2].set(params["a"][:, 1])}):
        jax.tree.map(np.testing.assert_array_equal, ours(params | odd), params | odd)


def test_a_channel_without_a_balance_stays_and_its_neighbours_are_balanced_with_it(x64: None) -> None:
    """A zero output kernel; the norm's scale shares the input kernel with it, and has a balance."""
    gauges = [
        go.norm_scale({"norm": "channel"}, {"up": "channel _"}), go.rescale({"up": "_ channel"}, {"down": "channel _"})
    ]
    params = normal(0, {"norm": (3,), "up": (3, 4), "down": (4, 3)})
    params["down"] = params["down"].at[1:].set(0.0)
    moved = _moved(params, gauges)
    np.testing.assert_array_equal(moved["down"][1:], 0.0)
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance("invariant"))
    up, down = jnp.square(moved["up"]), jnp.square(moved["down"])
    close(jnp.square(moved["norm"]), jnp.sum(up, 1))
    close(jnp.sum(down[0]), jnp.sum(up[:, 0]))
    ratios = moved["up"][:, 1:] / params["up"][:, 1:]  # by rows alone
    close(ratios, jnp.broadcast_to(ratios[:, :1], ratios.shape))


# The optimizer inside ------------------------------------------------------------------------------


def _walk(tx: optax.GradientTransformation, case: Any) -> tuple[list[float], list[Tree], list[Tree]]:
    """Losses and weights of every step, and the weights where they read as the identity: one point for equal ones."""
    group = go.product(case.gauges())
    canonical = jit(lambda p: group.act(group.inverse(group.read(p)), p))
    params, losses, raw = case.params(jax.random.key(0)), [], []
    step, state = stepper(tx, case.loss), jit(tx.init)(params)
    for _ in range(12):
        params, state, loss = step(params, state)
        losses.append(float(loss))
        raw.append(params)
    return losses, raw, list(map(canonical, raw))


@pytest.mark.slow_rows("product/*")
@pytest.mark.parametrize("name", ["rescale/channel", "product/semidirect"])
def test_ddc_does_not_notice_and_adam_does(name: str, x64: None) -> None:
    """With a fix every third step DDC is the same function at every step; frozen, its coordinate moves along."""
    case = CASES[name]
    tx = go.ddc_adamw(0.03, case.gauges())
    losses, raw, points = _walk(tx, case)
    fixed_losses, fixed, fixed_points = _walk(go.orbit.gauge_fix(tx, case.gauges(), every=3), case)
    assert losses[-1] < losses[0] and furthest(fixed[-1], raw[-1]) > 0.1, "nothing is shown"
    before, after = (max(float(jnp.max(jnp.abs(x))) for x in _logs(case.gauges(), fixed[n])) for n in (1, 2))
    assert after <= 1e-9 < 0.01 < before
    np.testing.assert_allclose(fixed_losses, losses, rtol=1e-9)
    assert max(map(furthest, fixed_points, points)) <= 1e-9
    adam = optax.adam(0.03)
    points, fixed_points = (_walk(x, case)[2] for x in (adam, go.orbit.gauge_fix(adam, case.gauges(), every=3)))
    assert furthest(fixed_points[2], points[2]) <= 1e-9  # the first fix comes after the third step
    assert furthest(fixed_points[-1], points[-1]) > 1e-2


@pytest.mark.parametrize("name", ["head_linear/lora", "rescale/channel", "product/semidirect_reversed"])
def test_a_fix_is_a_step_a_balance_and_a_transport(name: str, x64: None) -> None:
    """Around the optimizer, or as the last link of a chain with it."""
    case, inner = CASES[name], optax.sgd(0.1, momentum=0.9)
    gauges, params = case.gauges(), case.params(jax.random.key(0))
    group, grads = go.product(gauges), jax.tree.map(jnp.cos, params)
    tx, chain = go.orbit.gauge_fix(inner, gauges), optax.chain(inner, go.orbit.gauge_fix(None, gauges))
    updates, state = tx.update(grads, tx.init(params), params)
    assert furthest(chain.update(grads, chain.init(params), params)[0], updates) == 0.0
    step, expected = inner.update(grads, inner.init(params), params)
    after = optax.apply_updates(params, step)
    balance = group.balance(after)
    assert furthest(optax.apply_updates(params, updates), group.act(balance, after)) <= tolerance("invariant")
    assert furthest(state.inner_state, go.orbit.transport(expected, params, gauges, balance)) <= tolerance("invariant")
    assert furthest(state.inner_state, expected) > 0.1
    _, unmoved = go.orbit.gauge_fix(inner, gauges, transport=False).update(grads, tx.init(params), params)
    assert furthest(unmoved.inner_state, expected) == 0.0


def test_every_counts_steps_and_the_others_are_the_optimizers(x64: None) -> None:
    params, grads = map(UNIT.params, (jax.random.key(0), jax.random.key(1)))
    tx, plain = go.orbit.gauge_fix(optax.sgd(0.1), UNIT.gauges(), every=3), jax.tree.map(lambda g: -0.1 * g, grads)
    update, state, kept = jit(tx.update), tx.init(params), []
    for _ in range(7):
        updates, state = update(grads, state, params)
        kept.append(furthest(updates, plain) == 0.0)
    assert kept == [True, True, False, True, True, False, True] and int(state.count) == 7


def test_arguments_reach_the_optimizer_inside(x64: None) -> None:
    def update(updates: Tree, state: Tree, params: Tree = None, *, factor: float) -> tuple[Tree, Tree]:
        return jax.tree.map(lambda g: factor * g, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    params, tx = UNIT.params(jax.random.key(0)), go.orbit.gauge_fix(inner, UNIT.gauges(), every=2)
    updates, _ = tx.update(params, tx.init(params), params, factor=3.0)
    assert furthest(updates, jax.tree.map(lambda g: 3.0 * g, params)) == 0.0


def test_moments_that_cannot_move_are_refused_or_decided_on() -> None:
    params, grads = map(LORA.params, (jax.random.key(0), jax.random.key(1)))
    tx = go.orbit.gauge_fix(optax.adam(0.1), LORA.gauges(), every=100)
    with refused(r"ScaleByAdamState\.nu of 'a' under head_linear", "on_unknown='reset'", "go.quotient(tx, gauges)"):
        jax.eval_shape(tx.update, grads, tx.init(params), params)  # not at the hundredth step
    reset = go.orbit.gauge_fix(optax.adam(0.1), LORA.gauges(), on_unknown="reset")
    updates, state = jit(reset.update)(grads, reset.init(params), params)
    assert not any(bool(jnp.any(x)) for x in jax.tree.leaves(state.inner_state[0].mu))
    assert bool(jnp.isfinite(optax.tree.norm(updates)))


@pytest.mark.parametrize(("name", "value"), [
    ("every", 0), ("every", 1.5), ("every", True), ("every", jnp.ones(2, int)), ("strength", 0.0), ("strength", 1.5),
    ("strength", "half"), ("strength", True), ("strength", float("nan")), ("on_unknown", "ignore"),
], ids=str)
def test_arguments_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    go.orbit.gauge_fix(None, UNIT.gauges(), every=np.int32(2), strength=jnp.float32(0.5))  # numbers of arrays are taken
    with pytest.raises(ValueError, match=f"bad {name}"):
        go.orbit.gauge_fix(None, UNIT.gauges(), **{name: value})
