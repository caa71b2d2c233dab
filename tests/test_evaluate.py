"""`evaluate` and `restart`: what an inner state means in stored weights, and a new start at the slice point."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.cases import FLAT_CASES, GAUGE_CASES
from tests.refusals import each_refused, refused
from tests.twins import furthest, normal, stepper, structure, trained

CASES = {case.name: case for case in (*GAUGE_CASES, *FLAT_CASES)}
NAMES = ["rescale/channel", "norm_scale/one_plus", "head_linear/value_out", "product/llama", "logit_shift/kernel_bias"]


def _slow(updates: Any, slow: Any, params: Any) -> tuple[Any, Any]:
    """A link that keeps an average of weights, as Lookahead and tail averages do."""
    return updates, optax.incremental_update(optax.apply_updates(params, updates), slow, 0.1)


SCHEDULE_FREE = optax.contrib.schedule_free_adamw(1e-2), optax.contrib.schedule_free_eval_params
AVERAGES: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "schedule_free": SCHEDULE_FREE,
    "slow weights": (
        optax.chain(optax.adamw(1e-2), optax.GradientTransformation(lambda p: p, _slow)), lambda state, _: state[-1]),
}


def start_and_twin(case: Any) -> tuple[Any, Any]:
    params = case.params(jax.random.key(1))
    return params, go.bind(case.gauges(), params).random_twin(jax.random.key(5), params)


def averages(case: Any, tx: Any, fn: Callable[[Any, Any], Any]) -> list[tuple[float, Any, Any]]:
    """Of two twins after eight steps: the loss of the averages, the averages, and the weights."""
    found = []
    for start in start_and_twin(case):
        end, state = trained(tx, case.loss, start, 8)
        averaged = go.orbit.evaluate(fn, state, end)
        found.append((float(case.loss(averaged)), averaged, end))
    return found


@pytest.mark.slow_rows("product/llama-*", "[!r]*-slow weights", "head_linear*-schedule_free")
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(("name", "options"), [
    *((name, {}) for name in NAMES), ("rescale/channel", {"pin": False}), ("product/llama", {"pin": False}),
    ("rescale/channel", {"rest": "balanced"}),
])
def test_averages_of_twins_are_twins(name: str, average: str, options: dict[str, Any], x64: None) -> None:
    inner, fn = AVERAGES[average]
    ours, theirs = averages(CASES[name], go.quotient(inner, CASES[name].gauges(), **options), fn)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-9)
    assert furthest(ours[1], ours[2]) > 1e-6  # another function than that of the weights


def test_without_the_maps_twins_part(x64: None) -> None:
    """The control: schedule-free's own function mixes stored weights with a state on the slice."""
    case, (inner, fn) = CASES["rescale/channel"], SCHEDULE_FREE
    ends = [trained(go.quotient(inner, case.gauges()), case.loss, start, 8) for start in start_and_twin(case)]
    ours, theirs = (float(case.loss(fn(state.inner_state, params))) for params, state in ends)
    assert abs(ours - theirs) > 1e-3


@pytest.mark.parametrize("wrap", [
    lambda tx: optax.chain(optax.clip_by_global_norm(1e6), tx),
    lambda tx: go.orbit.gauge_fix(tx, CASES["rescale/channel"].gauges(), every=100),
    lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
], ids=["chain", "gauge_fix", "MultiSteps"])
def test_the_state_may_stand_in_a_wrapper(wrap: Callable[[Any], Any], x64: None) -> None:
    case, (inner, fn) = CASES["rescale/channel"], SCHEDULE_FREE
    tx = go.quotient(inner, case.gauges())
    ours, plain = (averages(case, each, fn)[0][1] for each in (wrap(tx), tx))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), ours, plain)


RELU = go.rescale({"up": "_ channel"}, {"down": "channel _"})
PARAMS = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
LOGITS = go.logit_shift({"rest/b": "_ vocab"})
REST = {"up": "body", "down": "body", "rest": "rest"}
PARTS: dict[str, Callable[[Any], Any]] = {
    "partition": lambda tx: optax.partition({"body": tx, "rest": optax.adam(1e-2)}, REST),
    "a mask that is a prefix": lambda tx: optax.masked(tx, {"up": True, "down": True, "rest": False}),
    "two quotients": lambda tx: optax.partition({"body": tx, "rest": go.quotient_adamw(1e-2, LOGITS)}, REST),
}


@pytest.mark.parametrize("inner", [SCHEDULE_FREE[0], optax.contrib.muon(1e-2)], ids=["schedule_free", "muon"])
@pytest.mark.parametrize("wrap", PARTS)
def test_a_quotient_may_see_a_part_of_the_tree(wrap: str, inner: Any) -> None:
    body, fn = normal(0, {path: x.shape for path, x in PARAMS.items()}), lambda s, p: getattr(s, "z", p)
    params, alone = body | {"rest": {"a": jnp.ones(3), "b": jnp.ones((2, 2))}}, go.quotient(inner, RELU)
    tx = PARTS[wrap](alone)
    (_, state), (_, ours) = (t.update(p, t.init(p), p) for t, p in ((tx, params), (alone, body)))
    if wrap == "two quotients":
        for call in (lambda: go.orbit.restart(tx, state, params), lambda: go.orbit.evaluate(fn, state, params)):
            with refused("with 2 quotients", "state.inner_states['body'] (restart: with the optimizer of this part)"):
                call()
        tx, state = alone, state.inner_states["body"]
    averages = go.orbit.evaluate(fn, state, params)
    jax.tree.map(np.testing.assert_allclose, averages, go.orbit.evaluate(fn, ours, body) | {"rest": params["rest"]})
    new = go.orbit.restart(tx, state, params)
    assert structure(new) == structure(state)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(go.orbit.evaluate(fn, new, params)["rest"]),
                 jax.tree.leaves(params["rest"]))


ADAM, OURS = optax.adam(0.1), go.quotient_adamw(1e-3, RELU)
STATE = OURS.init(PARAMS)
UNKNOWN = STATE._replace(frame=STATE.frame._replace(elements={"rescale[].0.v5": jnp.ones(3)}))
TARGET = r"jax\.eval_shape\(tx\.init, params\)"
test_what_cannot_be_evaluated_is_said = each_refused({
    "plain": (lambda: go.orbit.evaluate(lambda s, p: p, ADAM.init(PARAMS), PARAMS), "a state with 0 quotients"),
    "no weights": (lambda: go.orbit.evaluate(lambda s, p: s, STATE, PARAMS), "fn returns no weights"),
    "other gauges": (lambda: go.orbit.evaluate(lambda s, p: p, UNKNOWN, PARAMS), rf"not known yet(.|\n)*{TARGET}"),
    "plain to restart": (lambda: go.orbit.restart(ADAM, STATE, PARAMS), "an optimizer with 0 quotients"),
    # Restored without a target, a state is a dict or a list.
    "dict": (lambda: OURS.update(PARAMS, STATE._asdict(), PARAMS), rf"lost its classes(.|\n)*{TARGET}"),
    "list": (lambda: OURS.update(PARAMS, list(STATE), PARAMS), rf"lost its classes(.|\n)*{TARGET}"),
})


# A new start ------------------------------------------------------------------------------------------------


@pytest.mark.slow_rows("[!r]*")
@pytest.mark.parametrize(("name", "pin"), [*((n, True) for n in NAMES), ("product/llama", False)])
def test_a_restarted_twin_stays_a_twin(name: str, pin: bool, x64: None) -> None:
    case: Any = CASES[name]
    tx = optax.chain(optax.clip_by_global_norm(1e3), go.quotient(optax.adamw(1e-2), case.gauges(), pin=pin))
    step = stepper(tx, case.loss)
    for choose in (None, lambda old, new: (old[0]._replace(nu=new[0].nu), *old[1:])):
        losses = []
        for start in start_and_twin(case):
            end, state = trained(tx, case.loss, start, 8)
            state = go.orbit.restart(tx, state, end, choose)
            inside = state[1].inner_state[0]
            assert int(inside.count) == (0 if choose is None else 8)
            assert not any(np.any(x) for x in jax.tree.leaves(inside.nu))
            assert any(np.any(x) for x in jax.tree.leaves(inside.mu)) == (choose is not None)
            for _ in range(4):
                end, state, _ = step(end, state)
            losses.append(float(case.loss(end)))
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.slow_rows("True-uint8")
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
@pytest.mark.parametrize("outside", [True, False])
def test_compressed_moments_are_numbers_where_users_see_them_and_compressed_again(outside: bool, dtype: str) -> None:
    """Codes of one leaf were read by the scale of another, and fresh moments were float32."""
    small, adam = functools.partial(go.links.compress_second_moments, dtype=dtype), optax.scale_by_adam()
    tx = small(go.quotient(adam, RELU)) if outside else go.quotient(small(adam), RELU)
    params = PARAMS | {"bias": jnp.ones(2)}
    _, state = tx.update(params | {"bias": jnp.full(2, 1e3)}, tx.init(params), params)
    nu = lambda state, key: go.orbit.evaluate(lambda s, p: p | {key: s.nu[key]}, state, params)[key]  # noqa: E731
    for choose in (None, lambda old, new: old._replace(nu=old.nu | {"up": new.nu["up"]})):
        new = go.orbit.restart(tx, state, params, choose)
        assert jax.tree.map(jnp.result_type, new) == jax.tree.map(jnp.result_type, state)
        assert not np.any(nu(new, "up")) and nu(state, "bias")[0] == pytest.approx(1e3, rel=0.1)
        assert nu(new, "bias")[0] == (0.0 if choose is None else nu(state, "bias")[0])


@pytest.mark.slow_rows("chain of links")
@pytest.mark.parametrize("tx", [
    go.ddc_adamw(0.1, RELU, vertical="adam"), go.ddc_adamw(0.1, RELU, preset="paper"),
    optax.chain(go.scale_by_ddc(RELU), optax.scale(-0.1), go.gauge_retract(RELU)),
], ids=["vertical", "paper", "chain of links"])
def test_links_of_ddc_restart(tx: Any) -> None:
    """Their states hold one quotient, so that `evaluate` took them and `restart` found no optimizer for it."""
    _, state = tx.update(PARAMS | {"down": jnp.arange(6.0).reshape(3, 2)}, tx.init(PARAMS), PARAMS)
    fresh = optax.tree.get(go.orbit.restart(tx, state, PARAMS), "inner_state")
    assert jax.tree.leaves(fresh) and not any(np.any(x) for x in jax.tree.leaves(fresh))
    assert np.any(optax.tree.get(state, "mu")["down"])


@pytest.mark.slow
def test_a_restart_keeps_the_frame(x64: None) -> None:
    case: Any = CASES["product/llama"]
    tx = go.quotient(SCHEDULE_FREE[0], case.gauges())
    end, state = trained(tx, case.loss, case.params(jax.random.key(1)), 8)
    new = go.orbit.restart(tx, state, end)
    jax.tree.map(np.testing.assert_array_equal, state.frame, new.frame)
    # Its z is the slice point, which the stored weights are by F.
    again = go.orbit.evaluate(lambda s, p: s.z, new, end)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), again, end)
