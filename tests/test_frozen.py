"""Leaves that an optimizer never changes: which they are, and that they stay what they are beside gauges."""

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
from gauge_optax.frozen import frozen_leaves
from tests import twins
from tests.cases import FLAT_CASES, GAUGE_CASES, GaugeCase
from tests.refusals import each_refused, refused

TREE = {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 2)), "c": jnp.ones(3)}
ON_B = {"a": False, "b": True, "c": False}
LABELS = {"a": "trained", "b": "frozen", "c": "trained"}


def _partition(of_b: optax.GradientTransformation, of_others: Any = None) -> optax.GradientTransformation:
    return optax.partition({"trained": of_others or optax.adamw(1e-3), "frozen": of_b}, LABELS)


ZERO = optax.set_to_zero()
TRAINED = {"a": True, "b": False, "c": True}


def _masked(gradient: Callable[..., Any], *masks: Any) -> Any:
    """A link that maps every leaf's gradient with the leaf's entries of masks."""
    return optax.stateless(lambda updates, _: jax.tree.map(gradient, updates, *masks))


FREEZING: dict[str, Callable[[], Any]] = {
    "partition": lambda: _partition(ZERO),
    "rate zero": lambda: _partition(optax.adamw(0.0)),
    "schedule of zero": lambda: _partition(optax.adamw(optax.constant_schedule(0.0))),
    "momentum at rate zero": lambda: _partition(optax.sgd(0.0, momentum=0.9)),
    "masked last": lambda: optax.chain(optax.adamw(1e-3), optax.masked(ZERO, ON_B)),
    "freeze": lambda: optax.chain(optax.freeze(ON_B), optax.adam(1e-3)),
    "freeze before Muon": lambda: optax.chain(optax.freeze(ON_B), optax.contrib.muon(1e-3)),
    "freeze before Adafactor": lambda: optax.chain(optax.freeze(ON_B), optax.adafactor(1e-3)),
    "selective_transform": lambda: optax.selective_transform(optax.adamw(1e-3), freeze_mask=ON_B),
    "behind noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), _partition(ZERO)),
    "in MultiSteps": lambda: optax.MultiSteps(_partition(ZERO), 4),
    "in apply_if_finite": lambda: optax.apply_if_finite(_partition(ZERO), 3),
    "freeze, clip, adam": lambda: optax.chain(optax.freeze(ON_B), optax.clip(1.0), optax.adam(1e-3)),
    "freeze, clamp": lambda: optax.chain(optax.freeze(ON_B), optax.stateless(
        lambda u, _: jax.tree.map(lambda g: jax.lax.clamp(-1.0, g, 1.0), u))),
    "where": lambda: _masked(lambda g, m: jnp.where(m, g, 0.0), TRAINED),
    "where, the other way round": lambda: _masked(lambda g, m: jnp.where(m, 0.0, g), ON_B),
    "where not": lambda: _masked(lambda g, m: jnp.where(~m, g, 0.0), jax.tree.map(np.bool_, ON_B)),
    "where, of arrays": lambda: _masked(
        lambda g, m: jnp.where(m > 0, g, 0.0), {path: m * np.ones_like(TREE[path]) for path, m in TRAINED.items()}),
    "cond": lambda: _masked(lambda g, m: jax.lax.cond(m, jnp.zeros_like, lambda x: x, g), ON_B),
    "times booleans of JAX": lambda: _masked(lambda g, m: g * m, jax.tree.map(jnp.bool_, TRAINED)),
    "line search": lambda: optax.chain(
        optax.freeze(ON_B), optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
}
MOVING: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "a warm-up from zero": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
    "a rate that users change": lambda: optax.inject_hyperparams(optax.adamw)(0.0),
    "a rate that a wrapper outside injects": lambda: _partition(optax.adamw(jnp.zeros(()))),
    "freeze, and then decay": lambda: optax.chain(optax.freeze(ON_B), optax.adamw(1e-3)),
    "muon": lambda: optax.contrib.muon(1e-3),
    "clipped from below": lambda: optax.chain(optax.freeze(ON_B), _masked(lambda g: jnp.clip(g, 0.1, 1.0))),
    "a mask of entries": lambda: _masked(
        lambda g, m: jnp.where(m, g, 0.0), TREE | {"b": jnp.arange(8).reshape(4, 2) > 3}),
    "a loop without an iteration": lambda: optax.stateless(lambda u, _: u | {"b": jax.lax.while_loop(
        lambda x: jnp.sum(x) < -1e9, jnp.zeros_like, u["b"])}),
    "lbfgs": lambda: optax.lbfgs(),
    "times a product over no axes": lambda: _masked(lambda g: g * jnp.prod(jnp.array(g.shape[2:], jnp.float32))),
    "to the power of zero": lambda: optax.chain(optax.freeze(ON_B), _masked(lambda g: g**0)),
    "filled behind the end": lambda: optax.chain(optax.freeze(ON_B), _masked(
        lambda g: g + g.at[jnp.array([9])].get(mode="fill", fill_value=1.0).sum())),
    "a mask that passes gradients on": lambda: optax.masked(optax.adamw(1e-3), {"a": True, "b": False, "c": True}),
}


AMBIGUOUS = "ignore:quotient. 'b' trains, although its updates are zero now:UserWarning"


@pytest.mark.filterwarnings(AMBIGUOUS)
@pytest.mark.parametrize("name", [*FREEZING, *MOVING])
def test_what_never_changes_is_found(name: str) -> None:
    expected = {"b"} if name in FREEZING else set()
    assert frozen_leaves("quotient", (FREEZING | MOVING)[name](), TREE) == expected


def test_a_mask_of_jax_numbers_asks_for_python_numbers() -> None:
    """A rate that later steps change looks the same."""
    inner = _masked(lambda g, m: g * m, jax.tree.map(jnp.float32, TRAINED))
    unit = go.rescale({"a": "_ k"}, {"b": "k _"})
    with pytest.warns(UserWarning, match=r"'b' trains, although.*\n.*\n.*\n.*without jnp; or say it: quotient"):
        go.quotient(inner, unit).init(TREE)
    assert go.quotient(inner, unit, frozen=ON_B).init(TREE).frame.frozen == {"b": ()}


@pytest.mark.parametrize("make", [go.quotient_muon, go.ddc_muon])
def test_a_warm_up_of_one_of_two_rates_is_no_mask(make: Any) -> None:
    """It begins at zero in a JAX array, as a mask's entry might be. Warnings are errors here."""
    rate, gauges = optax.linear_schedule(0.0, 0.1, 2), [go.rescale({"a": "_ unit"}, {"b": "unit _"})]
    tx = optax.inject_hyperparams(make)(rate, gauges=gauges, adam_learning_rate=1e-3)
    state = tx.init(TREE)
    for _ in range(2):
        updates, state = tx.update(twins.normal_like(0, TREE), state, TREE)
    assert all(float(jnp.abs(x).max()) > 1e-4 for x in jax.tree.leaves(updates))


@pytest.mark.filterwarnings(AMBIGUOUS)
@pytest.mark.parametrize("make", [
    go.quotient_adamw, functools.partial(go.ddc_adamw, rest="balanced"),
    lambda rate, gauges: go.quotient(_partition(optax.sgd(rate)), gauges),
], ids=["all", "balanced", "one leaf"])
def test_a_rate_that_is_injected_outside_may_start_at_zero(make: Any) -> None:
    """At `init` it is a JAX array with the value 0.0. Every leaf was frozen for ever, without a word."""
    gauges = [go.rescale({"a": "_ unit"}, {"b": "unit _"})]
    tx = optax.inject_hyperparams(lambda learning_rate: make(learning_rate, gauges))(learning_rate=0.0)
    state = tx.init(TREE)
    state.hyperparams["learning_rate"] = jnp.asarray(0.1)
    updates, _ = tx.update(twins.normal_like(0, TREE), state, TREE)
    assert all(float(jnp.abs(x).max()) > 1e-4 for x in jax.tree.leaves(updates))


def test_a_transformation_that_cannot_be_traced_asks_for_a_mask() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, batch: Any) -> Any:
        return updates, state

    strange = optax.GradientTransformationExtraArgs(lambda p: optax.MaskedState(optax.EmptyState()), update)
    with refused("cannot see which leaves", "frozen=mask"):
        frozen_leaves("quotient", strange, TREE)
    assert frozen_leaves("quotient", strange, TREE, said=True) == frozenset()


# Beside gauges --------------------------------------------------------------------------------------------

QUICK = ("rescale/layers", "head_linear/lora", "logit_shift/kernel_bias")
ROWS = [
    pytest.param(case, marks=() if case.name in QUICK else pytest.mark.slow, id=case.name)
    for case in (*GAUGE_CASES, *FLAT_CASES)
]


def frozen_adamw(params: Any, path: str) -> optax.GradientTransformation:
    """AdamW on all leaves but one."""
    labels = go.tools.by_path({path: "frozen"}, default="trained")(params)
    return optax.partition({"trained": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, labels)


def trained(tx: Any, loss: Any, params: Any) -> Any:
    """The weights after eight steps."""
    return twins.trained(tx, loss, params, 8)[0]


@pytest.mark.parametrize("case", ROWS)
def test_a_frozen_leaf_stays_and_twins_agree(case: GaugeCase, x64: None) -> None:
    """Twins by the parts that are left: a shift into a frozen leaf is no longer one."""
    gauges, params = case.gauges(), case.params(jax.random.key(1))
    bound = go.bind(gauges, params)
    keys = jax.random.split(jax.random.key(7), len(bound.gauges))
    element = tuple(gauge.sample(key, params) for gauge, key in zip(bound.gauges, keys, strict=True))
    elements = bound.elements(element[0] if bound.single else element)
    paths = sorted({b.path for part in bound.slice.parts for b in part.blocks})
    assert paths, "a row whose gauges move nothing tests nothing"
    for path in dict.fromkeys((paths[0], paths[-1])):
        tx = go.quotient(frozen_adamw(params, path), gauges)
        left = jax.eval_shape(tx.init, params).frame.elements
        moved = bound.whole.act({k: e for k, e in elements.items() if k in left}, bound.whole.values(params))
        twin = bound.stored(moved, params)
        assert not left or twins.furthest(twin, params) > 1e-3, "the twin is the point"
        ends = [trained(tx, case.loss, start) for start in (params, twin)]
        assert stayed(params, ends[0], path) and stayed(twin, ends[1], path)
        ours, theirs = (float(case.loss(end)) for end in ends)
        assert ours == pytest.approx(theirs, rel=1e-10, abs=1e-10) and ours <= float(case.loss(params)) + 1e-12


@pytest.fixture
def net(x64: None) -> Any:
    return {"up": jnp.arange(8.0).reshape(2, 4) / 4 - 0.8, "down": jnp.arange(12.0).reshape(4, 3) / 9 - 0.5}


def stayed(before: Any, after: Any, path: str) -> bool:
    return bool(jnp.all(leaves_by_path(before)[path] == leaves_by_path(after)[path]))


RELU = go.rescale({"up": "_ channel"}, {"down": "channel _"})


def net_loss(p: Any) -> jax.Array:
    x, y = jnp.array([[1.0, -0.5], [0.4, 0.9]]), jnp.array([[0.3, -0.2, 0.5], [0.1, 0.4, -0.3]])
    return jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"] - y) ** 2)


NEURONS = {"up": "_ neuron", "down": "_ neuron"}


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "quotient": lambda inner: go.quotient(inner, RELU),
    "pin=False": lambda inner: go.quotient(inner, RELU, pin=False),
    "balanced": lambda inner: go.quotient(inner, RELU, rest="balanced"),
    "gauge_fix": lambda inner: go.orbit.gauge_fix(inner, RELU),
    "gauge_fix every other step": lambda inner: go.orbit.gauge_fix(inner, RELU, every=2, strength=0.5),
    "quotient in gauge_fix": lambda inner: go.orbit.gauge_fix(go.quotient(inner, RELU), RELU),
    "hold_products": lambda inner: go.orbit.hold_products(inner, RELU),
    "hold_products, decay": lambda inner: go.orbit.hold_products(inner, RELU, "decay", decay=0.1),
    "max_norm": lambda inner: go.norms.max_norm(inner, NEURONS, learning_rate=1e-2, bound=0.1),
    "rotational": lambda inner: go.norms.rotational(
        inner, NEURONS, learning_rate=1e-2, weight_decay=0.1, center=False),
}


@pytest.mark.parametrize(("path", "other"), [("up", "down"), ("down", "up")])
@pytest.mark.parametrize("name", WRAPPERS)
def test_no_wrapper_moves_a_frozen_leaf(name: str, path: str, other: str, net: Any) -> None:
    inner = frozen_adamw(net, path)
    end = trained(WRAPPERS[name](inner), net_loss, net)
    assert stayed(net, end, path) and not stayed(net, end, other)
    if name not in ("max_norm", "hold_products, decay"):  # which shrink the other leaf
        assert float(net_loss(end)) < float(net_loss(net))
    if name in ("gauge_fix", "hold_products"):  # no frame: the other leaf trains as it would without gauges
        np.testing.assert_allclose(end[other], trained(inner, net_loss, net)[other], rtol=1e-13)


def test_frozen_can_be_said(net: Any) -> None:
    """Of a leaf that the loss reads behind `stop_gradient`, whose gradients alone do not say it."""
    loss = lambda p: net_loss(p | {"down": jax.lax.stop_gradient(p["down"])})  # noqa: E731
    assert not stayed(net, trained(go.quotient(optax.adam(1e-2), RELU), loss, net), "down")
    twin = go.bind(RELU, net).random_twin(jax.random.key(0), net)
    for mask in (go.tools.by_path({"down": True}, default=False), {"up": False, "down": True}):
        tx = go.quotient(optax.adamw(1e-2, weight_decay=0.1), RELU, frozen=mask)
        ours, theirs = (trained(tx, loss, start) for start in (net, twin))
        assert stayed(net, ours, "down") and stayed(twin, theirs, "down")
        assert float(net_loss(ours)) == pytest.approx(float(net_loss(theirs)), rel=1e-12)


def _opened_by(default: float) -> Any:
    """SGD that trains the leaf "up" by as much as the argument `open` of its update says."""

    def update(updates: Any, state: Any, params: Any = None, *, open: Any = default, **extra: Any) -> Any:
        return updates | {"up": open * updates["up"]}, state

    return optax.chain(optax.sgd(0.1), optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update))


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name not in ("rotational", "max_norm")])
def test_an_argument_that_trains_a_frozen_leaf_is_refused(name: str, net: Any) -> None:
    """The state is made for leaves that never change. By default, it would hold this leaf still without a word."""

    def step(amount: Any, default: float) -> Any:
        tx = WRAPPERS[name](_opened_by(default))
        return tx.update(jax.grad(net_loss)(net), tx.init(net), net, open=amount)[0]["up"]

    for run in (step, jax.jit(step, static_argnums=1)):
        with refused("this update trains 'up', which is frozen without it", "give open= the default"):
            run(1.0, 0.0)
        assert np.any(run(1.0, 1.0))
    assert not np.any(step(0.0, 0.0))  # the value is known, and leaves the leaf alone
    with refused("freezes 'up', which is trained without it"):
        step(0.0, 1.0)
    said = go.quotient(_opened_by(0.0), RELU, frozen={"up": True, "down": False})
    assert not np.any(said.update(jax.grad(net_loss)(net), said.init(net), net, open=1.0)[0]["up"])


@pytest.mark.parametrize("make", [go.quotient_muon, go.ddc_muon], ids=["quotient", "fused ddc"])
def test_muon_without_adam_leaves_vectors(make: Any, net: Any) -> None:
    """The bias is of the channels that the polar factors scale, so that the growth of an anchor could move into it."""
    params = net | {"bias": jnp.ones(4)}
    gauge = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"})
    tx, training = make(0.02, gauge, adam_learning_rate=0.0), make(0.02, gauge)
    end = trained(tx, net_loss, params)
    assert stayed(params, end, "bias") and not stayed(params, end, "up")
    with refused("frozen leaves, at 'bias'", "run trains 'bias'", "which freezes it"):
        tx.update(params, training.init(params), params)


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name not in ("rotational", "max_norm")])
def test_a_state_of_other_frozen_leaves_is_refused(name: str, net: Any) -> None:
    """The stored set held a leaf still that this optimizer trains, without a word. A rate of zero is no other set."""
    wrap, grads = WRAPPERS[name], jax.grad(net_loss)(net)
    freezing = lambda path: wrap(optax.chain(optax.adam(0.1), optax.freeze({p: p == path for p in net})))  # noqa: E731
    all_trained, without_up = freezing(""), freezing("up")
    with refused("frozen leaves, at 'up'", "run freezes 'up'", "this optimizer, which trains it", "tx.init(params)"):
        jax.jit(all_trained.update)(grads, without_up.init(net), net)
    with refused("frozen leaves, at 'up'", "run trains 'up'", "which freezes it"):
        without_up.update(grads, all_trained.init(net), net)
    with refused("check: a state of other frozen leaves, at 'up'"):
        go.check(all_trained, without_up.init(net), net, grads)
    still = wrap(optax.sgd(0.0)).update(grads, wrap(optax.sgd(0.1)).init(net), net)[0]
    assert twins.structure(still) == twins.structure(net)


def test_leaves_that_are_said_to_be_frozen_belong_to_the_state(net: Any) -> None:
    plain, saying = (go.quotient(optax.sgd(0.1), RELU, frozen=mask) for mask in (None, {"up": True, "down": False}))
    at_zero, grads = go.quotient(optax.sgd(0.0), RELU), jax.grad(net_loss)(net)
    for tx, other in ((plain, saying), (saying, plain), (plain, at_zero)):
        with refused("a state of other frozen leaves"):
            tx.update(grads, other.init(net), net)


def test_a_layer_may_be_frozen_on_one_side_and_another_not_at_all(net: Any) -> None:
    """Only the copy with the frozen leaf is left alone: the other layer's anchor keeps its size."""
    params = {f"l{i}": jax.tree.map(lambda x, i=i: x + 0.1 * i, net) for i in range(2)}
    gauge = go.rescale({"l{i}/up": "_ channel"}, {"l{i}/down": "channel _"})
    tx = go.quotient(frozen_adamw(params, "l1/down"), gauge)
    end = trained(tx, lambda p: net_loss(p["l0"]) + net_loss(p["l1"]), params)
    assert stayed(params, end, "l1/down")
    changes = [np.linalg.norm(end[x]["up"], axis=0) / np.linalg.norm(params[x]["up"], axis=0) - 1 for x in params]
    assert np.max(np.abs(changes[0])) <= 1e-12 and np.max(np.abs(changes[1])) > 1e-3


def test_states_with_frozen_leaves_move_and_restore(net: Any) -> None:
    tx, element = go.quotient(frozen_adamw(net, "down"), RELU), RELU.sample(jax.random.key(3), net)
    _, state = tx.update(jax.grad(net_loss)(net), tx.init(net), net)
    assert twins.structure(jax.eval_shape(tx.init, net)) == twins.structure(state)
    moved, twin = go.orbit.transport(state, net, RELU, element), RELU.act(element, net)
    steps = [tx.update(jax.grad(net_loss)(params), own, params)[0] for params, own in ((net, state), (twin, moved))]
    ours, theirs = (float(net_loss(optax.apply_updates(*both))) for both in zip((net, twin), steps, strict=True))
    assert ours == pytest.approx(theirs, rel=1e-12)


# Masks by path ------------------------------------------------------------------------------------


PARAMS = {"blocks": [{"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}] * 2, "head": {"kernel": jnp.ones((2, 3))}}


def test_the_first_pattern_counts() -> None:
    values = {"blocks/1/**": "last", "**/bias": "bias", "blocks/{i}/kernel": "kernel"}
    assert go.tools.by_path(values, default="rest")(PARAMS) == {
        "blocks": [{"kernel": "kernel", "bias": "bias"}, {"kernel": "last", "bias": "last"}], "head": {"kernel": "rest"}
    }


def test_optax_and_nnx_take_it() -> None:
    """Labels of `optax.partition` and a decay's mask are in other tests; here the tree is a state of NNX."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    kernel = model.kernel[...]
    masked = optax.masked(optax.set_to_zero(), go.tools.by_path({"kernel": True}, default=False))
    nnx.Optimizer(model, masked, wrt=nnx.Param).update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    np.testing.assert_array_equal(model.kernel[...], kernel)
    assert model.bias is not None and np.all(model.bias[...] == 1.0)


def _said(mask: Any) -> Any:
    return go.quotient(optax.adam(1e-2), RELU, frozen=mask).init({"up": jnp.ones((2, 4)), "down": jnp.ones((4, 3))})


FALLING, LINEAR = (lambda count: 0.1 if count < 5 else 0.01), optax.linear_schedule(0.9, 0.5, 10)
test_schedules_that_cannot_be_followed_are_refused = each_refused([
    (lambda: go.quotient_muon(FALLING, RELU).init({"up": jnp.ones((2, 4)), "down": jnp.ones((4, 3))}), "jnp.where"),
    *((functools.partial(make, 0.1, RELU, **{name: LINEAR}), f"{make.__name__}: a schedule for {name}")
      for make, name in ((go.quotient_adamw, "b1"), (go.ddc_adamw, "eps"), (go.ddc_muon, "beta"),
                         (go.quotient_muon, "adam_b2"))),
])


test_masks_that_do_not_fit_are_refused = each_refused([
    (lambda: go.tools.by_path({"**/bais": 1, "**": 2})(PARAMS), r"no leaf matches '\*\*/bais'"),
    (lambda: go.tools.by_path({"**/bias": 1})(PARAMS), "no pattern for 'blocks/0/kernel'"),
    (lambda: _said({"up": True, "bias": False}), "a mask `frozen` that does not fit"),
    (lambda: _said(go.tools.by_path({"dwn": True}, default=False)), "no leaf matches 'dwn'"),
])
