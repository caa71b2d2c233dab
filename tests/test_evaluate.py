"""`evaluate` and `restart`: what an inner state means in stored weights, and a new start at the slice point."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from tests.cases import FLAT_CASES, GAUGE_CASES
from tests.refusals import refused
from tests.twins import trained

CASES = {case.name: case for case in (*GAUGE_CASES, *FLAT_CASES)}
NAMES = ["rescale/channel", "norm_scale/one_plus", "head_linear/value_out", "product/llama", "logit_shift/kernel_bias"]


class Slow(NamedTuple):
    """State of `slow_weights`: an average of the weights that the optimizer saw."""

    slow: Any


def slow_weights(rate: float) -> optax.GradientTransformation:
    """A link that keeps an average of weights, as Lookahead and tail averages do."""

    def update(updates: Any, state: Slow, params: Any) -> tuple[Any, Slow]:
        return updates, Slow(optax.incremental_update(optax.apply_updates(params, updates), state.slow, rate))

    return optax.GradientTransformation(Slow, update)


def of_chain(state: Any, params: Any) -> Any:
    """The slow weights of `optax.chain(optimizer, slow_weights(...))`."""
    return state[-1].slow


AVERAGES: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "schedule_free": (
        lambda: optax.contrib.schedule_free_adamw(1e-2),
        optax.contrib.schedule_free_eval_params,
    ),
    "slow weights": (lambda: optax.chain(optax.adamw(1e-2), slow_weights(0.1)), of_chain),
}


@pytest.mark.slow_rows("product/llama-*")
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(
    ("name", "pin"), [*((name, True) for name in NAMES), ("rescale/channel", False), ("product/llama", False)]
)
def test_averages_of_twins_are_twins(name: str, average: str, pin: bool, x64: None) -> None:
    case, (inner, fn) = CASES[name], AVERAGES[average]
    params = case.params(jax.random.key(1))
    twin = go.bind(case.gauges(), params).random_twin(jax.random.key(5), params)
    tx = go.quotient(inner(), case.gauges(), pin=pin)
    losses, points = [], []
    for start in (params, twin):
        end, state = trained(tx, case.loss, start, 8)
        averaged = go.orbit.evaluate(fn, state, end)
        losses.append(float(case.loss(averaged)))
        points.append((averaged, end))
        assert jax.tree.structure(averaged) == jax.tree.structure(params)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    pairs = zip(*map(jax.tree.leaves, points[0]), strict=True)
    assert max(float(jnp.max(jnp.abs(x - y))) for x, y in pairs) > 1e-6  # another function than that of the weights


def test_without_the_maps_twins_part(x64: None) -> None:
    """The control: schedule-free's own function mixes stored weights with a state on the slice."""
    case = CASES["rescale/channel"]
    params = case.params(jax.random.key(1))
    twin = go.bind(case.gauges(), params).random_twin(jax.random.key(5), params)
    tx = go.quotient(optax.contrib.schedule_free_adamw(1e-2), case.gauges())
    ends = [trained(tx, case.loss, start, 8) for start in (params, twin)]
    losses = [float(case.loss(optax.contrib.schedule_free_eval_params(s.inner_state, p))) for p, s in ends]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_the_state_may_stand_in_wrappers_and_at_rest(x64: None) -> None:
    case = CASES["rescale/channel"]
    params = case.params(jax.random.key(1))
    made = optax.contrib.schedule_free_adamw(1e-2)
    fn = optax.contrib.schedule_free_eval_params
    for wrap in (
        lambda tx: optax.chain(optax.clip_by_global_norm(1e6), tx),
        lambda tx: go.orbit.gauge_fix(tx, case.gauges(), every=100),
        lambda tx: optax.MultiSteps(tx, 1),
    ):
        expected = go.orbit.evaluate(fn, *reversed(trained(go.quotient(made, case.gauges()), case.loss, params, 8)))
        tx = wrap(go.quotient(made, case.gauges()))
        tx = tx.gradient_transformation() if hasattr(tx, "gradient_transformation") else tx
        end, state = trained(tx, case.loss, params, 8)
        for a, b in zip(*map(jax.tree.leaves, (go.orbit.evaluate(fn, state, end), expected)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    twin = go.bind(case.gauges(), params).random_twin(jax.random.key(5), params)
    tx = go.quotient(made, case.gauges(), rest="balanced")
    losses = [
        float(case.loss(go.orbit.evaluate(fn, s, p))) for p, s in (trained(tx, case.loss, x, 8) for x in (params, twin))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_what_cannot_be_evaluated_is_said() -> None:
    params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    plain = optax.adam(1e-3)
    with pytest.raises(ValueError, match="a state with 0 quotients"):
        go.orbit.evaluate(lambda s, p: p, plain.init(params), params)
    state = go.quotient(plain, gauge).init(params)
    with pytest.raises(ValueError, match="fn returns no weights"):
        go.orbit.evaluate(lambda s, p: s, state, params)
    unknown = state._replace(frame=state.frame._replace(elements={"rescale[].0.v4": jnp.ones(3)}))
    with refused("not known yet", "jax.eval_shape(tx.init, params)"):
        go.orbit.evaluate(lambda s, p: p, unknown, params)
    with pytest.raises(ValueError, match="an optimizer with 0 quotients"):
        go.orbit.restart(plain, state, params)


@pytest.mark.parametrize("restored", [dict, list])
def test_a_state_that_was_restored_without_a_target_is_named(restored: type) -> None:
    params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    tx = go.quotient_adamw(1e-3, go.rescale({"up": "_ channel"}, {"down": "channel _"}))
    state = tx.init(params)
    lost = state._asdict() if restored is dict else list(state)
    with refused("lost its classes", "jax.eval_shape(tx.init, params)"):
        tx.update(params, lost, params)


# A new start ------------------------------------------------------------------------------------------------


@pytest.mark.slow_rows("product/llama-False", "product/llama-True", "logit_shift/*", "norm_scale/*")
@pytest.mark.parametrize(("name", "pin"), [*((n, True) for n in NAMES), ("product/llama", False)])
def test_a_restarted_twin_stays_a_twin(name: str, pin: bool, x64: None) -> None:
    case = CASES[name]
    params = case.params(jax.random.key(1))
    twin = go.bind(case.gauges(), params).random_twin(jax.random.key(5), params)
    tx = optax.chain(optax.clip_by_global_norm(1e3), go.quotient(optax.adamw(1e-2), case.gauges(), pin=pin))
    second = lambda old, new: (old[0]._replace(nu=new[0].nu), *old[1:])  # noqa: E731
    for choose in (None, second):
        losses = []
        for start in (params, twin):
            end, state = trained(tx, case.loss, start, 8)
            state = go.orbit.restart(tx, state, end, choose)
            inside = state[1].inner_state[0]
            assert int(inside.count) == (0 if choose is None else 8)
            assert not any(np.any(x) for x in jax.tree.leaves(inside.nu))
            assert any(np.any(x) for x in jax.tree.leaves(inside.mu)) == (choose is not None)
            for _ in range(4):
                updates, state = tx.update(jax.grad(case.loss)(end), state, end)
                end = optax.apply_updates(end, updates)
            losses.append(float(case.loss(end)))
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_a_restart_keeps_the_frame(x64: None) -> None:
    case = CASES["product/llama"]
    params = case.params(jax.random.key(1))
    tx = go.quotient(optax.contrib.schedule_free_adamw(1e-2), case.gauges())
    end, state = trained(tx, case.loss, params, 8)
    new = go.orbit.restart(tx, state, end)
    for a, b in zip(*(jax.tree.leaves(x.frame) for x in (state, new)), strict=True):
        np.testing.assert_array_equal(a, b)
    # Its z is the slice point, which the stored weights are by F.
    again = go.orbit.evaluate(lambda s, p: s.z, new, end)
    for path, leaf in leaves_by_path(again).items():
        np.testing.assert_allclose(leaf, leaves_by_path(end)[path], rtol=1e-10, atol=1e-12)
