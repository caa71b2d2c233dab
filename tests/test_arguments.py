"""What a user passes by mistake: a seed, integers' gradients, an unfiltered module, somebody else's state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gauge_optax as go
from models import lm_sharding
from tests.cases import GAUGE_CASES

GAUGE = go.rescale({"up": "_ channel"}, {"down": "channel _"})
PARAMS = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 4))}
WRAPPERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "quotient": lambda: go.quotient(optax.adam(0.1), GAUGE),
    "ddc_adamw": lambda: go.ddc_adamw(0.1, GAUGE),
    "quotient_muon": lambda: go.quotient_muon(0.1, GAUGE),
    "track": lambda: go.measure.track(optax.sgd(0.1), GAUGE),
}


def _fails(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    text = str(error.value)
    assert all(word in text for word in (*words, "found:", "expected:", "remedy:")), text


@pytest.mark.parametrize("name", WRAPPERS)
def test_gradients_of_integers(name: str) -> None:
    params = PARAMS | {"n": jnp.arange(3)}
    grads = jax.grad(lambda p: jnp.sum(p["up"] @ p["down"]), allow_int=True)(params)
    tx = WRAPPERS[name]()
    _fails(lambda: tx.update(grads, tx.init(params), params), f"{name}: no gradient for 'n'", "float0", "optax.masked")


def test_a_module_that_is_not_filtered() -> None:
    params = PARAMS | {"act": jax.nn.relu}
    for name in ("quotient", "ddc_adamw"):
        _fails(lambda n=name: WRAPPERS[n]().init(params), f"{name}: a leaf that is no array, 'act'", "eqx.filter")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("quotient", optax.adam(0.1).init(PARAMS)),
        ("quotient", None),
        ("quotient", go.quotient(optax.sgd(0.1, momentum=0.9), GAUGE).init(PARAMS)),
        ("ddc_adamw", go.quotient(optax.adam(0.1), GAUGE).init(PARAMS)),
        ("track", optax.adam(0.1).init(PARAMS)),
    ],
)
def test_a_state_of_another_optimizer(name: str, state: Any) -> None:
    update = WRAPPERS[name]().update
    _fails(lambda: update(PARAMS, state, PARAMS), f"{name}: a state of another optimizer", "tx.init(params)")


def test_an_error_of_the_optimizer_inside_is_its_own() -> None:
    def broken(updates: Any, state: Any, params: Any = None) -> Any:
        raise KeyError("mine")

    tx = go.quotient(optax.GradientTransformation(lambda params: (), broken), GAUGE)
    with pytest.raises(KeyError, match="mine"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_a_seed_is_no_key() -> None:
    def loss(p: Any) -> Any:
        return jnp.sum(p["up"])

    for check in (
        lambda: go.testing.assert_invariant(loss, PARAMS, GAUGE, 3),  # type: ignore[arg-type]
        lambda: go.testing.assert_equivariant_step(optax.sgd(0.1), loss, PARAMS, GAUGE, 3),  # type: ignore[arg-type]
    ):
        _fails(check, "no PRNG key", "jax.random.key(3)")
    batches = [jnp.ones((2, 2))] * 2
    key: Any = jax.random.key(0)
    fn = lambda p, x: x @ p["up"]  # noqa: E731
    _fails(lambda: go.discover(fn, PARAMS, batches, seed=key), "discover: seed is no integer", "seed=0")


OURS = [case for case in GAUGE_CASES if not case.name.startswith(("product", "user"))]


@pytest.mark.parametrize("case", OURS, ids=lambda case: case.name)
def test_every_gauge_says_what_breaks_it(case: Any) -> None:
    (gauge, *_) = case.gauges()
    assert gauge.breaks != go.Gauge.breaks


def test_logits_under_a_shift() -> None:
    shift = go.logit_shift({"down": "_ vocab"})
    with pytest.raises(AssertionError, match="logits themselves move: return the loss, or log-probabilities"):
        go.testing.assert_invariant(lambda p: p["up"] @ p["down"], PARAMS, shift, jax.random.key(0))
    norm = go.norm_scale({"up": "channel _"}, {"down": "channel _"})
    params = PARAMS | {"down": jnp.ones((2, 4))}
    with pytest.raises(AssertionError, match=r"stores its scale less one \(1\+"):
        go.testing.assert_invariant(lambda p: jnp.sum(p["up"]), params, norm, jax.random.key(0))


def test_a_mesh_of_more_devices_than_there_are() -> None:
    _fails(lambda: lm_sharding.make_mesh(64, 2), "a mesh of 64x2 devices", "jax_num_cpu_devices")


@pytest.mark.parametrize(
    "wrap", [go.quotient, go.measure.track, lambda f, _: go.measure.track_rotation({"up": "_ channel"}, f)]
)
def test_an_optimizer_that_was_not_called_is_named(wrap: Any) -> None:
    with pytest.raises(ValueError, match="inner is no transformation") as error:
        wrap(optax.adam, GAUGE)
    assert "call it: adam(learning_rate)" in str(error.value)
