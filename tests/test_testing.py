"""The public assertions: each passes where it should, fails where it must, and says what, where and by how much."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gauge_optax as go
from gauge_optax.gauges.gauge import Gauge
from tests.cases import GAUGE_CASES, GaugeCase
from tests.quick import jit
from tests.refusals import refused
from tests.tolerances import tolerance
from tests.twins import normal, normal_like

CASES = {case.name: case for case in GAUGE_CASES}
KEY = jax.random.key(3)
RELATIVE = r"\d\.\d\de[+-]\d+"


def _params(case: GaugeCase, dtype: str = "float64") -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), case.params(jax.random.key(0)))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_public_tolerances_are_the_suites(dtype: str, x64: None) -> None:
    pairs = ("invariant", "invariant"), ("horizontal", "horizontal"), ("equivariant", "twins"), ("loss", "twin_loss")
    for check, ours in pairs:
        assert go.testing.tolerance(check, {"w": jnp.zeros(2, dtype)}) == tolerance(ours, dtype)


def test_the_coarsest_float_decides(x64: None) -> None:
    tree = {"exact": jnp.zeros(1), "single": jnp.zeros(1, "float32"), "step": jnp.zeros(1, "int8")}
    assert go.testing.tolerance("invariant", tree) == tolerance("invariant", "float32")
    tree["half"] = jnp.zeros(1, "float16")
    assert go.testing.tolerance("invariant", tree) == tolerance("invariant", "bfloat16")
    assert go.testing.tolerance("invariant", {}) == tolerance("invariant", "float64")


# assert_invariant ---------------------------------------------------------------------------------


UP, DOWN = {"up/kernel": "_ channel"}, {"down": "channel _"}
HEADS = {"query": "_ head basis", "key": "_ head basis"}


@pytest.mark.parametrize(("name", "gauge", "leaves"), [
    pytest.param("rope_torus/half", go.head_rotation(HEADS), "query, key", id="a full rotation under rotary"),
    pytest.param("rope_torus/half", go.rope_torus(HEADS, "interleaved"), "query, key", id="the other pairing"),
    pytest.param("rescale/channel", go.rescale(UP, DOWN), "up/kernel, down", id="a bias left behind"),
    pytest.param("rescale/degree_2", go.rescale(UP | {"up/bias": "channel"}, DOWN), "up/kernel, up/bias, down",
                 id="another degree"),
    pytest.param("rescale/channel", go.norm_scale(UP | {"up/bias": "channel"}, DOWN), "up/kernel, up/bias, down",
                 id="negative factors before a ReLU"),
    pytest.param("scale_invariant/kernel", go.logit_shift({"kernel": "_ _ vocab"}), "kernel", id="no softmax"),
])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_symmetries_are_invariant_and_what_is_none_is_not(name: str, gauge: Gauge, leaves: str, dtype: str) -> None:
    case = CASES[name]
    with jax.enable_x64(dtype == "float64"):
        loss, params = jit(case.loss), _params(case, dtype)
        assert go.testing.assert_invariant(loss, params, case.gauges(), KEY) is None  # type: ignore[func-returns-value]
        with pytest.raises(AssertionError, match="is no symmetry of this loss") as error:
            go.testing.assert_invariant(loss, params, gauge, KEY)
    text = str(error.value)
    assert text.startswith(go.testing.describe(gauge)) and f"leaves:   {leaves}\n" in text and _found(text) > 1e-3


def _found(text: str) -> float:
    """The relative error that a message reports."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith("found:"))
    return next(float(word) for word in line.split() if "e" in word and word[0].isdigit())


def test_only_the_culprit_is_blamed_and_no_number_is_not_invariant(x64: None) -> None:
    case = CASES["rescale/channel"]
    gauges = [*case.gauges(), go.scale_invariant({"up/kernel": "_ _"})]
    with pytest.raises(AssertionError, match=r"scale_invariant\('up/kernel'\) is no symmetry"):
        go.testing.assert_invariant(jit(case.loss), _params(case), gauges, KEY)
    with pytest.raises(AssertionError, match="nan"):
        go.testing.assert_invariant(lambda p: jnp.nan * p["down"][0, 0], _params(case), case.gauges(), KEY)


def test_masked_logits_may_be_infinite_and_a_loss_that_is_none_blames_no_gauge() -> None:
    params, gauge = normal(0, {"up": (3, 4), "down": (4, 2)}), go.rescale({"up": "_ c"}, {"down": "c _"})

    def logits(p: Any) -> jax.Array:
        return jax.nn.relu(jnp.ones(3) @ p["up"]) @ p["down"] + jnp.array([0.0, -jnp.inf])

    go.testing.assert_invariant(logits, params, gauge, KEY)
    with pytest.raises(AssertionError, match="is no symmetry"):
        go.testing.assert_invariant(lambda p: jnp.where(p["up"][0, 0] == params["up"][0, 0], logits(p), 0.0), params,
                                    gauge, KEY)
    for call in (go.testing.assert_invariant, functools.partial(go.testing.assert_equivariant_step, optax.sgd(0.1))):
        with pytest.raises(AssertionError, match="not finite at the weights themselves"):
            call(lambda p: jnp.sum(logits(p)), params, gauge, KEY)


def test_a_permutation_that_is_none_fails_under_every_key() -> None:
    """Of two heads, half of all elements are the identity; of one head all are, which passes."""
    params = normal(0, {"up": (3, 2), "down": (2, 3), "alone": (3, 1)})

    def outputs(p: Any) -> jax.Array:
        return jnp.tanh(p["up"]) @ p["down"] + p["alone"]

    for seed in range(6):
        with pytest.raises(AssertionError, match="is no symmetry"):
            go.testing.assert_invariant(outputs, params, go.permutation({"up": "_ head"}), jax.random.key(seed))
    go.testing.assert_invariant(outputs, params, go.permutation({"alone": "_ head"}), KEY)


# assert_horizontal --------------------------------------------------------------------------------


@pytest.mark.slow_rows("rope_*", "product/linear-*", "product/chain-*")
@pytest.mark.parametrize(("name", "dtype"), [
    ("logit_shift/padded", "float64"), ("rescale/degree_3", "float32"), ("head_rotation/gqa", "float64"),
    ("product/chain", "float64"), ("product/linear", "float64"), ("rope_linear/half", "float32"),
])
def test_a_projected_update_is_horizontal_and_an_arbitrary_one_is_not(name: str, dtype: str) -> None:
    case, assertion = CASES[name], go.testing.assert_horizontal
    with jax.enable_x64(dtype == "float64"):
        params, group = _params(case, dtype), go.product(case.gauges())
        update = normal_like(9, params)
        assert assertion(jit(group.horizontal)(params, update), params, case.gauges()) is None
        with pytest.raises(AssertionError, match=rf"{RELATIVE} of the update's norm changes no output") as error:
            assertion(update, params, case.gauges())
        assert _found(str(error.value)) > 1e-2


def test_horizontal_names_the_gauge_and_the_worst_leaf(x64: None) -> None:
    case = CASES["product/semidirect"]
    params, norm, shift = _params(case), *case.gauges()
    still = jax.tree.map(jnp.zeros_like, params)
    for gauge, leaf, update in ((shift, "bias", jnp.ones(7)), (norm, "norm", params["norm"])):
        with pytest.raises(AssertionError, match=f"leaf:     {leaf}\n") as error:
            go.testing.assert_horizontal(still | {leaf: update}, params, [norm, shift])
        assert go.testing.describe(gauge) in str(error.value)


def test_horizontal_takes_nothing_for_horizontal_and_heeds_rtol(x64: None) -> None:
    case = CASES["logit_shift/kernel"]
    params = _params(case)
    go.testing.assert_horizontal(jax.tree.map(jnp.zeros_like, params), params, case.gauges())
    go.testing.assert_horizontal(params, params, case.gauges(), rtol=1.0)
    with pytest.raises(AssertionError, match=r"at most 1\.0e-03"):
        go.testing.assert_horizontal(params, params, case.gauges(), rtol=1e-3)
    with pytest.raises(AssertionError):
        go.testing.assert_horizontal({"kernel": jnp.zeros(3)}, params, case.gauges())


# assert_equivariant_step --------------------------------------------------------------------------


def _twins(tx: optax.GradientTransformation, case: GaugeCase, steps: int = 5, **options: Any) -> None:
    go.testing.assert_equivariant_step(tx, case.loss, _params(case), case.gauges(), KEY, steps=steps, **options)


def _nudge(path: str, size: float) -> optax.GradientTransformation:
    """Adds a constant to one leaf, nothing to the others."""
    return optax.stateless(lambda updates, _: {k: jnp.full_like(x, size * (k == path)) for k, x in updates.items()})


@pytest.mark.parametrize("pattern", ["dead", "**", "{any}"])
def test_ignore_leaves_out_a_leaf_but_not_its_effect(pattern: str, x64: None) -> None:
    params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 1)), "dead": jnp.ones(3)}
    gauge = go.rescale({"up": "_ channel", "dead": "channel"}, {"down": "channel _"})

    def loss(p: Any) -> jax.Array:
        return jnp.sum((p["up"] @ p["down"]) ** 2)

    def twins(path: str, ignore: tuple[str, ...]) -> None:
        go.testing.assert_equivariant_step(_nudge(path, 0.1), loss, params, gauge, KEY, steps=2, ignore=ignore)

    twins("dead", (pattern,))
    with pytest.raises(AssertionError, match="at step 1: leaf dead"):
        twins("dead", ("up", "down"))
    with pytest.raises(AssertionError, match="at step 2: the loss"):
        twins("up", ("**",))


def test_an_update_that_is_not_a_number_comes_apart(x64: None) -> None:
    with pytest.raises(AssertionError, match=r"(?s)at step 1: leaf bias.*a lower learning rate"):
        _twins(_nudge("bias", float("nan")), CASES["logit_shift/bias"])


def test_an_optimizer_that_was_not_called_is_named(x64: None) -> None:
    case = CASES["rescale/channel"]
    with refused("tx is no transformation", "call it: adam"):
        _twins(optax.adam, case)


@pytest.mark.slow
def test_steps_scale_and_rtol_are_heeded(x64: None) -> None:
    case = CASES["rescale/channel"]
    wrong, params = go.scale_invariant({"down": "_ _"}), _params(case)
    go.testing.assert_invariant(lambda p: p["down"], params, wrong, KEY, scale=1e-14)
    go.testing.assert_invariant(lambda p: p["down"], params, wrong, KEY, rtol=10.0)
    with pytest.raises(AssertionError):
        go.testing.assert_invariant(lambda p: p["down"], params, wrong, KEY)
    with pytest.raises(AssertionError, match=r"apart at step \d: (leaf up/|leaf down|the loss)") as error:
        _twins(optax.adamw(1e-2), case)
    assert go.testing.describe(case.gauges()[0]) in str(error.value) and _found(str(error.value)) > 1e-4
    _twins(optax.adamw(1e-2), case, scale=0.0)
    _twins(optax.adamw(1e-2), case, rtol=10.0)
    for rate, steps in ((1e-12, 20), (1e-10, 2)):
        with pytest.raises(AssertionError, match="the steps are too short to tell"):
            _twins(optax.adamw(rate), case, steps=steps)
    with pytest.raises(ValueError, match="no steps"):
        _twins(optax.adamw(1e-2), case, steps=0)
    with pytest.raises(ValueError, match="nothing to compare"):
        go.testing.assert_invariant(lambda p: None, params, wrong, KEY)  # type: ignore[arg-type, return-value]
