"""A gauge that a user wrote works everywhere: optimizers, transport, measures and assertions know it by its action."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.gauges.user_gauges import Trade, Translation
from tests.refusals import each_refused, refused
from tests.tolerances import tolerance
from tests.twins import furthest, normal, stepper, train, trained

Tree = Any
# Integers of 32 bits in both precisions: JAX keeps indices of 64 bits from a trace in float64 for the next in float32.
TOKENS, TARGETS = np.array([[0, 3, 1, 4], [2, 2, 4, 0]], "i4"), np.array([[1, 0, 1, 1], [0, 1, 0, 0]], "i4")
SHAPES = {"token": (5, 4), "position": (4, 4), "up": (4, 6), "down": (6, 2)}
USERS = Translation("token", "position")
OURS = [go.rescale({"up": "_ channel"}, {"down": "channel _"}), go.logit_shift({"down": "_ vocab"})]


def _params(dtype: str = "float64") -> Tree:
    return normal(0, SHAPES, dtype)


def _loss(p: Tree) -> jax.Array:
    hidden = jnp.tanh(p["token"][TOKENS] + p["position"][None])
    logits = jax.nn.relu(hidden @ p["up"]) @ p["down"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS))


def _trained(tx: optax.GradientTransformation, params: Tree) -> Tree:
    return train(jax.jit(tx.init), stepper(tx, _loss), params)[0]


def _moved(group: Any, element: Any, tx: optax.GradientTransformation, params: Tree) -> float:
    """How far apart a run and the run of its twin end."""
    return furthest(group.act(element, _trained(tx, params)), _trained(tx, group.act(element, params)))


WRAPPED = {
    "adamw": lambda g: go.quotient(optax.adamw(0.02, weight_decay=0.1), g),
    "adamw_free": lambda g: go.quotient(optax.adamw(0.02, weight_decay=0.1), g, pin=False),
    "lion": lambda g: go.quotient(optax.lion(0.01), g),
    "quotient_muon": lambda g: go.quotient_muon(0.02, g),
    "ddc_adamw": lambda g: go.ddc_adamw(0.02, g, weight_decay=0.1),
    "ddc_muon": lambda g: go.ddc_muon(0.02, g),
    "chain": lambda g: optax.chain(
        go.gauge_project(g), go.scale_by_ddc(g), optax.scale_by_learning_rate(0.02), go.gauge_retract(g)),
}


@pytest.mark.slow_rows("float32-*", "*-[!a]*", "*-adamw_free")
@pytest.mark.parametrize("name", WRAPPED)
def test_twins_under_a_list_with_a_users_gauge(name: str, dtype: str) -> None:
    group, params = go.product([*OURS, USERS]), _params(dtype)
    element = group.sample(jax.random.key(1), params)
    assert _moved(group, element, optax.adamw(0.02), params) > 1e-2
    assert _moved(group, element, WRAPPED[name](group), params) <= tolerance("quotient_twins", dtype)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("inner", [optax.adamw(0.02, weight_decay=0.1), optax.lion(0.01), optax.contrib.muon(0.02)])
def test_a_gauge_by_its_action_trains_as_the_same_one_of_ours(inner: optax.GradientTransformation) -> None:
    mine, ours = (_trained(go.quotient(inner, gauge), _params()) for gauge in (Trade("up", "down"), OURS[0]))
    assert furthest(mine, ours) <= tolerance("quotient_twins")


@pytest.mark.usefixtures("x64")
def test_state_moves_with_the_weights() -> None:
    gauges, params = [*OURS, USERS], _params()
    group, tx = go.product(gauges), go.quotient(optax.adamw(0.02), gauges)
    element, step = group.sample(jax.random.key(1), params), stepper(tx, _loss)
    here, state, _ = step(params, tx.init(params))
    there, moved = group.act(element, here), go.orbit.transport(state, here, gauges, element)
    for _ in range(3):
        (here, state, _), (there, moved, _) = step(here, state), step(there, moved)
    assert furthest(group.act(element, here), there) <= tolerance("quotient_twins")
    bare, plain = stepper(optax.adam(0.02), _loss), optax.adam(0.02).init(params)  # a shift moves no moment
    _, plain, _ = bare(params, plain)
    same = go.orbit.transport(plain, params, gauges[2], element[2])
    assert all(map(jnp.array_equal, jax.tree.leaves(plain), jax.tree.leaves(same)))


@dataclasses.dataclass(frozen=True)
class Counting(Trade):
    calls: int = 0

    def act(self, element: Any, params: Any) -> Any:
        object.__setattr__(self, "calls", self.calls + 1)
        return super().act(element, params)


PARAMS = _params("float32")
CLASHING = go.product([go.rescale({"position": "_ channel"}, {"up": "channel _"}), USERS])
HALF_FIXED = go.orbit.gauge_fix(optax.sgd(0.1), USERS, strength=0.5)
test_errors_name_the_gauge_and_the_remedy = each_refused([
    (lambda: CLASHING.read(PARAMS), r"translation.*does not commute with rescale.*'position'"),
    (lambda: go.quotient(optax.sgd(0.1), USERS).init(PARAMS | {"token": jnp.ones((5, 4), jnp.int32)}),
     "not on real numbers: 'token'"),
    (lambda: HALF_FIXED.update(PARAMS, HALF_FIXED.init(PARAMS), PARAMS), "translation: no method power"),
    (lambda: Translation("tokens", "position").read(PARAMS), "translation: no leaf"),
    (lambda: go.quotient(optax.sgd(0.1), Counting("up", "down")).init(PARAMS), "changes an attribute of the gauge"),
])


# A class of two methods --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_two_methods_open_every_door() -> None:
    """The same symmetry by two methods and by the library, on the leaves that it moves."""
    params, mine, ours = {"up": _params()["up"][:, :3], "down": _params()["down"][:3]}, Trade("up", "down"), OURS[0]
    other = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)

    def objective(p: Tree) -> jax.Array:
        return jnp.sum(p["up"] ** 4) + jnp.sum(p["down"] ** 4)

    def found(gauge: go.Gauge) -> dict[str, Any]:
        tx, element = go.quotient(optax.adamw(0.02), gauge, pin=False), {"": jnp.linspace(-0.4, 0.4, 3)}
        return {
            "align": go.orbit.align(params, other, gauge)[""],
            "average": go.orbit.average([params, other], gauge),
            "canonicalize": go.orbit.canonicalize(params, gauge),
            "choose": go.orbit.choose(objective, params, gauge, optax.adam(0.05), steps=30, progress=False)[""],
            "distance": go.orbit.distance(params, other, gauge),
            "drift": go.measure.drift(params, other, gauge)[0][""],
            "pin": trained(tx, lambda p: objective(p) + jnp.sum(p["up"] @ p["down"]), params, 20)[0],
            "transport": go.orbit.transport(optax.adam(0.1).init(params), params, gauge, element),
        }

    ours_found = found(ours)
    for door, here in found(mine).items():
        assert furthest(here, ours_found[door]) <= 1e-6, door
    assert mine.dim(params) == ours.dim(params) == 3
    assert jax.tree.map(jnp.shape, mine.sample(jax.random.key(0), params)) == {"": (3,)}
    assert go.tools.from_json(go.tools.to_json([mine, ours]), classes=[Trade]) == [mine, ours]


@dataclasses.dataclass(frozen=True)
class Forgotten(Translation):
    """A group whose inverse was forgotten."""

    def inverse(self, element: Any) -> Any:
        return element


@pytest.mark.usefixtures("x64")
def test_a_law_that_a_gauge_breaks_is_named() -> None:
    params, sound, broken = _params() | {"factor": 0.5, "phase": jnp.array([1j])}, USERS, Forgotten("token", "position")
    grads = jax.grad(_loss)(params)
    tx = go.quotient_adamw(1e-2, sound)
    assert len(go.check(tx, tx.init(params), params, grads).asymmetries) == 1
    tx = go.quotient_adamw(1e-2, broken)
    with refused(r"break a law .*\n.*act\(inverse\(g\), act\(g, θ\)\) = θ"):
        go.check(tx, jax.eval_shape(tx.init, params), params, grads)


def test_a_gauge_without_a_name_or_a_hash_is_refused() -> None:
    def changed(kind: str, **attributes: Any) -> Any:
        return type(kind, (go.Gauge,), {"act": Translation.act, "read": Translation.read, **attributes})()

    with refused("^product: Nameless has no name", "write name"):
        go.quotient(optax.sgd(0.1), changed("Nameless"))
    with refused("^mine: a gauge that has no hash", "frozen=True"):
        go.quotient(optax.sgd(0.1), [changed("Mutable", name="mine", __hash__=None), *OURS])
