"""Gauge fixing: the function stays, the imbalance goes, and an equivariant optimizer does not notice."""

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
from gauge_optax.linalg import symmetric_eigen
from gauge_optax.parts.sizes import Stretch
from models import lm
from tests.cases import GAUGE_CASES, GPT, LLAMA
from tests.quick import jit
from tests.refusals import refused
from tests.tolerances import tolerance

Tree = Any
CASES = {case.name: case for case in GAUGE_CASES}
TOKENS = np.random.default_rng(0).integers(GPT.vocab, size=(3, GPT.max_len), dtype=np.int32)
LORA, UNIT = CASES["head_linear/lora"], CASES["rescale/channel"]


def _apart(found: Tree, expected: Tree) -> float:
    """Largest difference, relative to each leaf's norm."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30)) for a, b in pairs)


def _moved(params: Tree, gauges: Any, **options: Any) -> Tree:
    """Where `gauge_fix` alone takes a point."""
    tx = go.orbit.gauge_fix(None, gauges, **options)
    zero = jax.tree.map(jnp.zeros_like, params)
    return optax.apply_updates(params, tx.update(zero, tx.init(params), params)[0])


def _balanced(params: Tree, gauges: Any) -> Tree:
    return jit(lambda params: _moved(params, gauges))(params)


# The point -----------------------------------------------------------------------------------------


@functools.cache
def _language_model(config: lm.LMConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """fix(params, strength), and what one sees of a point: log-probabilities, pairs of Grams, logs of the imbalance."""
    gauges = lm.gauges(config, linear=True)
    group = go.product(gauges)
    graph, _ = nnx.split(nnx.eval_shape(lambda: lm.build(config, nnx.Rngs(0))))

    def seen(params: Tree) -> Any:
        s = group._bound(params).slice
        values, linear = s.values(params), [part for part in s.parts if isinstance(part, Stretch)]
        grams = [(i.left.gram(values, values), i.right.gram(values, values)) for i in linear]
        # A softmax does not see the constant that a logit shift takes away.
        return jax.nn.log_softmax(nnx.merge(graph, params)(TOKENS)), grams, _logs(group, params)

    return jit(lambda params, strength: _moved(params, gauges, strength=strength)), jit(seen)


def _logs(group: Any, params: Tree) -> list[jax.Array]:
    """log f of every scale, and the logarithms of the eigenvalues of H_A⁻¹ # H_B, whose inverse root is the frame."""
    found: list[jax.Array] = []
    for part, own in zip(group.gauges, group.inverse(group.balance(params)), strict=True):
        if part.name == "head_linear":
            own = jax.tree.map(lambda x: -2.0 * jnp.log(symmetric_eigen(x)[0]), own)
        found += jax.tree.leaves(own) if part.name != "logit_shift" else []
    return found


@pytest.mark.slow_rows("gpt-float32", "gpt-float64")
@pytest.mark.parametrize(("name", "dtype"), [("gpt", "float64"), ("gpt", "float32"), ("llama", "float64")])
def test_the_function_stays_and_the_imbalance_goes(name: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        fix, seen = _language_model({"gpt": GPT, "llama": LLAMA}[name])
        params = CASES[f"product/{name}"].params(jax.random.key(0))
        outputs, grams, logs = seen(params)
        assert min(map(_imbalance, grams)) > 0.1 and max(float(jnp.max(jnp.abs(x))) for x in logs) > 0.5
        balanced = fix(params, 1.0)
        assert {x.dtype for x in jax.tree.leaves(balanced)} == {jnp.dtype(dtype)}
        found, left, _ = seen(balanced)
        off, beside = float(jnp.max(jnp.abs(found - outputs))), max(map(_imbalance, left))
        print(f"{name}, {dtype}: logits {off:.1e}, H_A = H_B to {beside:.1e}")
        assert off <= tolerance("invariant", dtype)
        assert beside <= _tolerance(dtype)
        half = params
        for times in (1, 2):
            half = fix(half, 0.5)
            found, _, fewer = seen(half)
            assert float(jnp.max(jnp.abs(found - outputs))) <= tolerance("invariant", dtype)
            for before, after in zip(logs, fewer, strict=True):
                np.testing.assert_allclose(after, before / 2.0**times, atol=_tolerance(dtype))


def _imbalance(grams: tuple[jax.Array, jax.Array]) -> float:
    left, right = grams
    return float(jnp.max(jnp.linalg.norm(left - right, axis=(-2, -1)) / jnp.linalg.norm(left, axis=(-2, -1))))


def _tolerance(dtype: str) -> float:
    """Gram matrices and logarithms of imbalances: 1e-10, in float32 1e-5."""
    return tolerance("invariant", dtype) if dtype == "float32" else tolerance("oracle", dtype)


def test_blocks_that_a_norm_follows_get_rms_one(x64: None) -> None:
    case = CASES["scale_invariant/kernel_bias"]
    moved = _balanced(case.params(jax.random.key(0)), case.gauges())
    squares = [jnp.sum(jnp.square(x), axes) for x, axes in ((moved["kernel"], (0, 2)), (moved["bias"], 1))]
    np.testing.assert_allclose(sum(squares) / 28, 1.0, rtol=tolerance("invariant"))


# What has no balance -------------------------------------------------------------------------------


def test_a_head_without_a_balance_stays(x64: None) -> None:
    params = LORA.params(jax.random.key(0))
    zero = params | {"b": jnp.zeros_like(params["b"])}
    deficient = params | {"a": params["a"].at[:, 2].set(params["a"][:, 1])}
    (gauge,) = LORA.gauges()
    ours = jit(lambda p: _moved(p, gauge))
    for start in (zero, deficient):
        jax.tree.map(np.testing.assert_array_equal, ours(start), start)


def test_a_channel_without_a_balance_stays_and_its_neighbours_are_balanced_with_it(x64: None) -> None:
    """A zero output kernel; the norm's scale shares the input kernel with it, and has a balance."""
    norm = go.norm_scale({"norm": "channel"}, {"up": "channel _"})
    gauges = [norm, go.rescale({"up": "_ channel"}, {"down": "channel _"})]
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "norm": jax.random.normal(keys[0], (3,)), "up": jax.random.normal(keys[1], (3, 4)),
        "down": jax.random.normal(keys[2], (4, 3)).at[1:].set(0.0),
    }
    moved = _balanced(params, gauges)
    np.testing.assert_array_equal(moved["down"][1:], 0.0)
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance("invariant"))
    up, down = jnp.square(moved["up"]), jnp.square(moved["down"])
    close(jnp.square(moved["norm"]), jnp.sum(up, 1))
    close(jnp.sum(down[0]), jnp.sum(up[:, 0]))
    ratios = moved["up"][:, 1:] / params["up"][:, 1:]  # by rows alone
    close(ratios, jnp.broadcast_to(ratios[:, :1], ratios.shape))


# The optimizer inside ------------------------------------------------------------------------------


def _train(tx: optax.GradientTransformation, case: Any, steps: int = 12) -> tuple[list[float], list[Tree], list[Tree]]:
    """Losses and weights of every step, and the weights where they read as the identity: one point for equal ones."""
    group = go.product(case.gauges())

    @functools.partial(jit, donate_argnums=1)
    def step(params: Tree, state: Tree) -> Any:
        loss, grads = jax.value_and_grad(case.loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    canonical = jit(lambda p: group.act(group.inverse(group.read(p)), p))
    params, losses, raw, found = case.params(jax.random.key(0)), [], [], []
    state = jit(tx.init)(params)
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
        raw.append(params)
        found.append(canonical(params))
    return losses, raw, found


def _imbalances(case: Any, params: Tree) -> float:
    logs = jit(lambda params: _logs(go.product(case.gauges()), params))(params)
    return max(float(jnp.max(jnp.abs(x))) for x in logs)


def _does_not_notice(make: Callable[..., optax.GradientTransformation], case: Any) -> None:
    """Training with a fix every third step is the same function at every step as training without."""
    tx = make(case.gauges())
    losses, raw, points = _train(tx, case)
    fixed_losses, fixed, fixed_points = _train(go.orbit.gauge_fix(tx, case.gauges(), every=3), case)
    assert losses[-1] < losses[0] and _apart(fixed[-1], raw[-1]) > 0.1, "nothing is shown"
    assert _imbalances(case, fixed[2]) <= 1e-9 < 0.01 < _imbalances(case, fixed[1])
    off = max(abs(a - b) / abs(b) for a, b in zip(fixed_losses, losses, strict=True))
    beside = max(map(_apart, fixed_points, points))
    print(f"loss {off:.1e}, weights in their frame {beside:.1e}")
    assert max(off, beside) <= 1e-9


@pytest.mark.parametrize("name", ["rescale/channel", "product/semidirect"])
def test_ddc_does_not_notice(name: str, x64: None) -> None:
    """Frozen, it holds on to a coordinate: which has to move along."""
    _does_not_notice(lambda gauges: go.ddc_adamw(0.03, gauges), CASES[name])


def test_adam_does_notice(x64: None) -> None:
    _, _, points = _train(optax.adam(0.03), UNIT)
    _, _, fixed = _train(go.orbit.gauge_fix(optax.adam(0.03), UNIT.gauges(), every=3), UNIT)
    assert _apart(fixed[2], points[2]) <= 1e-9  # the first fix comes after the third step
    assert _apart(fixed[-1], points[-1]) > 1e-2


@pytest.mark.parametrize("name", ["head_linear/lora", "rescale/channel", "product/semidirect_reversed"])
def test_a_fix_is_a_step_a_balance_and_a_transport(name: str, x64: None) -> None:
    case, inner = CASES[name], optax.sgd(0.1, momentum=0.9)
    gauges, params = case.gauges(), case.params(jax.random.key(0))
    group, grads = go.product(gauges), jax.tree.map(jnp.cos, params)
    tx = go.orbit.gauge_fix(inner, gauges)
    updates, state = tx.update(grads, tx.init(params), params)
    step, expected = inner.update(grads, inner.init(params), params)
    after = optax.apply_updates(params, step)
    balance = group.balance(after)
    assert _apart(optax.apply_updates(params, updates), group.act(balance, after)) <= tolerance("invariant")
    assert _apart(state.inner_state, go.orbit.transport(expected, params, gauges, balance)) <= tolerance("invariant")
    assert _apart(state.inner_state, expected) > 0.1
    _, unmoved = go.orbit.gauge_fix(inner, gauges, transport=False).update(grads, tx.init(params), params)
    assert _apart(unmoved.inner_state, expected) == 0.0


def test_every_counts_steps_and_the_others_are_the_optimizers(x64: None) -> None:
    params, gauges, grads = UNIT.params(jax.random.key(0)), UNIT.gauges(), UNIT.params(jax.random.key(1))
    tx, plain = go.orbit.gauge_fix(optax.sgd(0.1), gauges, every=3), jax.tree.map(lambda g: -0.1 * g, grads)
    update, state = jit(tx.update), tx.init(params)
    kept = []
    for _ in range(7):
        updates, state = update(grads, state, params)
        kept.append(_apart(updates, plain) == 0.0)
    assert kept == [True, True, False, True, True, False, True]
    assert int(state.count) == 7


def test_none_is_the_last_link_of_a_chain(x64: None) -> None:
    params, gauges, grads = LORA.params(jax.random.key(0)), LORA.gauges(), LORA.params(jax.random.key(1))
    chain = optax.chain(optax.sgd(0.1), go.orbit.gauge_fix(None, gauges))
    wrapped = go.orbit.gauge_fix(optax.sgd(0.1), gauges)
    found, expected = (tx.update(grads, tx.init(params), params)[0] for tx in (chain, wrapped))
    assert _apart(found, expected) == 0.0


def test_arguments_reach_the_optimizer_inside(x64: None) -> None:
    def update(updates: Tree, state: Tree, params: Tree = None, *, factor: float) -> tuple[Tree, Tree]:
        return jax.tree.map(lambda g: factor * g, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    params, tx = UNIT.params(jax.random.key(0)), go.orbit.gauge_fix(inner, UNIT.gauges(), every=2)
    updates, _ = tx.update(params, tx.init(params), params, factor=3.0)
    assert _apart(updates, jax.tree.map(lambda g: 3.0 * g, params)) == 0.0


def test_moments_that_cannot_move_are_refused_or_decided_on() -> None:
    params, gauges, grads = LORA.params(jax.random.key(0)), LORA.gauges(), LORA.params(jax.random.key(1))
    tx = go.orbit.gauge_fix(optax.adam(0.1), gauges, every=100)
    with refused(r"ScaleByAdamState\.nu of 'a' under head_linear", "on_unknown='reset'", "go.quotient(tx, gauges)"):
        jax.eval_shape(tx.update, grads, tx.init(params), params)  # not at the hundredth step
    reset = go.orbit.gauge_fix(optax.adam(0.1), gauges, on_unknown="reset")
    updates, state = jit(reset.update)(grads, reset.init(params), params)
    assert all(bool(jnp.all(x == 0)) for x in leaves_by_path(state.inner_state[0].mu).values())
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(updates))


def test_rotations_do_not_move_and_may_stand_in_the_list() -> None:
    """Adam has no rule for them, and needs none: their balance is the identity, traced or not."""
    case = CASES["head_rotation/value_out"]
    params, tx = case.params(jax.random.key(0)), go.orbit.gauge_fix(optax.adam(0.1), case.gauges())
    found = jit(lambda p: tx.update(p, tx.init(p), p))(params)
    expected = optax.adam(0.1).update(params, optax.adam(0.1).init(params), params)
    assert _apart(found[0], expected[0]) <= tolerance("optax", "float32")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"every": 0}, "bad every"), ({"every": 1.5}, "bad every"), ({"every": True}, "bad every"),
        ({"every": jnp.ones(2, int)}, "bad every"), ({"strength": 0.0}, "bad strength"),
        ({"strength": 1.5}, "bad strength"), ({"strength": "half"}, "bad strength"),
        ({"strength": True}, "bad strength"), ({"strength": float("nan")}, "bad strength"),
        ({"on_unknown": "ignore"}, "bad on_unknown"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        go.orbit.gauge_fix(None, UNIT.gauges(), **options)
    go.orbit.gauge_fix(None, UNIT.gauges(), every=np.int32(2), strength=jnp.float32(0.5))
