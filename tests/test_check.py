"""The preflight: what it tells, and that it is silent for every right set-up."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.wrapped import preflight_of
from tests.cases import FLAT_CASES, GAUGE_CASES, GaugeCase
from tests.refusals import each_refused, refused
from tests.tolerances import roundoff_of_asymmetry
from tests.twins import trained

Loss = Callable[[Any], jax.Array]
REGISTER = {case.name: case for case in (*GAUGE_CASES, *FLAT_CASES)}


def _normal(number: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(number).normal(size=shape) / shape[0] ** 0.5, jnp.float32)


X = 8.0 * _normal(0, 64, 8)
LABELS = np.arange(64) % 5


def _cross_entropy(logits: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def _cast(dtype: str, params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), params)


def _preflight(tx: Any, params: Any, loss: Any, state: Any = None, **options: Any) -> Any:
    return go.check(tx, tx.init(params) if state is None else state, params, jax.grad(loss)(params), **options)


MLP = {"up": _normal(2, 8, 16), "bias": 0.1 * _normal(3, 16), "down": _normal(4, 16, 5)}
UNITS = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"})
LOGITS = go.logit_shift({"down": "_ vocab"})


def _mlp(p: Any, act: Callable[[jax.Array], jax.Array] = jax.nn.relu, x: jax.Array = X) -> jax.Array:
    return act(x @ p["up"] + p["bias"]) @ p["down"]


def mlp_loss(p: Any, act: Callable[[jax.Array], jax.Array] = jax.nn.relu, x: jax.Array = X) -> jax.Array:
    return _cross_entropy(_mlp(p, act, x))


gelu_loss = functools.partial(mlp_loss, act=jax.nn.gelu)  # of no symmetry


def penalized(p: Any, size: Any = 1e-4) -> jax.Array:
    return mlp_loss(p) + size * jnp.sum(p["up"] ** 2)


# Right set-ups ----------------------------------------------------------------------------------------------

# The nets of the quick suite, each in the precision in which the most can go wrong for it.
QUICK = {
    "rescale/channel": ("float64", "float32", "bfloat16"), "logit_shift/kernel_bias": ("float32",),
    "norm_scale/one_plus": ("bfloat16",), "head_rotation/mha": ("float32",),
}
ROWS = [
    pytest.param(case, dtype, marks=() if dtype in QUICK.get(name, ()) else pytest.mark.slow, id=f"{name}-{dtype}")
    for name, case in REGISTER.items()
    for dtype in ("float64", "float32", "bfloat16")
]


@pytest.mark.parametrize(("case", "dtype"), ROWS)
def test_nothing_is_raised_for_a_net_of_the_register(case: GaugeCase, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        params = _cast(dtype, case.params(jax.random.key(1)))
        report = _preflight(go.quotient_adamw(1e-2, case.gauges()), params, case.loss)
        assert "this optimizer leads two weight sets" not in repr(report)
        assert len(report.asymmetries) == len(go.product(case.gauges()).gauges)
        assert "left alone" not in repr(report)
        worst = np.max([number for *_, number in report.asymmetries])
        # A key bias's gradient is a sum of large terms that is zero: there is nothing to compare it with.
        cancelled = 50.0 if case.name.startswith("key_bias") else 1.0
        assert worst <= cancelled * roundoff_of_asymmetry(dtype) and roundoff_of_asymmetry(dtype) <= report.limit / 5


def _in_bfloat16(p: Any) -> jax.Array:
    return _cross_entropy(_mlp(_cast("bfloat16", p), x=X.astype(jnp.bfloat16)).astype(float))


def _with_dropout(p: Any) -> jax.Array:
    return mlp_loss(p, lambda x: jax.nn.relu(x) * jax.random.bernoulli(jax.random.key(9), 0.8, x.shape))


def _mean_in_bfloat16() -> Any:
    several = (jax.grad(_in_bfloat16)(jax.tree.map(lambda x, c=c: c * x, MLP)) for c in (1.0, 1.01, 1.02, 1.03))
    return jax.tree.map(lambda *x: sum(x) / 4, *several)


DEAD = MLP | {"up": MLP["up"].at[:, 3].set(0.0), "bias": MLP["bias"].at[3].set(0.0)}
RIGHT: dict[str, tuple[Any, Callable[[Any], Any]]] = {  # weights, and the gradient there
    "bfloat16 inside": (MLP, jax.grad(_in_bfloat16)),
    "a mean of gradients in bfloat16": (MLP, lambda _: _mean_in_bfloat16()),
    "dropout": (MLP, jax.grad(_with_dropout)),
    "dead": (DEAD, jax.grad(mlp_loss)),
    "zero outputs": (MLP | {"down": jnp.zeros_like(MLP["down"])}, jax.grad(mlp_loss)),
    "twin": (UNITS.act(UNITS.sample(jax.random.key(5), MLP, 4.0), MLP), jax.grad(mlp_loss)),
}


@pytest.mark.slow_rows("bfloat16 inside", "a mean of gradients*", "dropout")
@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_raised_for_a_right_loss(name: str) -> None:
    tx, (params, gradient) = go.quotient_adamw(1e-3, [UNITS, LOGITS]), RIGHT[name]
    report = go.check(tx, tx.init(params), params, gradient(params))
    assert "rescale" in repr(report) and "limit:" in repr(report)


def _links(gauges: Any, *decay: Any) -> Any:
    links = go.gauge_project(gauges), go.scale_by_ddc(gauges), *decay, optax.scale_by_learning_rate(1e-3)
    return optax.chain(*links, go.gauge_retract(gauges))


WARM_UP = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
ADAMW = go.quotient_adamw(1e-3, [UNITS])
WRAPPERS: dict[str, Any] = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), ADAMW),
    "links": _links([UNITS]),
    "inject": optax.inject_hyperparams(lambda learning_rate: go.quotient_adamw(learning_rate, [UNITS]))(1e-3),
    "gauge_fix": go.orbit.gauge_fix(ADAMW, [UNITS]),
    "ddc_adamw": go.ddc_adamw(1e-3, [UNITS, LOGITS]),
    "quotient_muon": go.quotient_muon(1e-2, [UNITS]),
    "balanced": go.quotient_adamw(1e-3, [UNITS], rest="balanced"),
    "pin=False": go.quotient_adamw(1e-3, [UNITS], pin=False),
    "schedule_free": go.quotient(optax.contrib.schedule_free_adamw(1e-3), [UNITS]),
    "warm-up": go.quotient_adamw(WARM_UP, [UNITS]),
    "MultiSteps": optax.MultiSteps(ADAMW, 4),
    "mechanize": go.quotient(optax.contrib.mechanize(optax.adamw(1e-3)), [UNITS]),
    "momentum": go.quotient(optax.sgd(1e-2, 0.9), [UNITS], pin=False),
}


@pytest.mark.slow_rows("[!q]*-False", "[lqbimgs]*-True")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", WRAPPERS)
def test_nothing_is_raised_at_the_first_step_or_later(name: str, jitted: bool) -> None:
    tx = WRAPPERS[name]
    report = _preflight(tx, MLP, mlp_loss, (jax.jit(tx.init) if jitted else tx.init)(MLP))
    assert "not looked" not in repr(report)
    if not jitted:
        params, state = trained(tx, mlp_loss, MLP, 20)
        _preflight(tx, params, mlp_loss, state)


def _tracked(make: Any, gauges: Any) -> Any:
    return go.measure.track(make(1e-2, gauges), gauges)


@pytest.mark.slow_rows("norm", "latent", "sgd", "adagrad")
@pytest.mark.parametrize(("name", "make", "steps"), [
    ("norm_scale/one_plus", functools.partial(_tracked, go.quotient_adamw), 0),
    ("product/latent_split", functools.partial(_tracked, go.ddc_adamw), 0),
    ("head_linear/value_out", functools.partial(go.quotient, optax.sgd(3e-3)), 50),
    ("head_linear/value_out", functools.partial(go.quotient, optax.sgd(0.01, 0.9)), 50),
    ("head_linear/value_out", functools.partial(go.quotient, optax.adagrad(0.1)), 50),
], ids=["norm", "latent", "sgd", "momentum", "adagrad"])
def test_nothing_is_raised_where_another_watches_or_nobody_counts(name: str, make: Any, steps: int, x64: None) -> None:
    """`track` keeps a norm's scale where it is, and no mask does. Without a counter, bases leave those of the frame."""
    case: Any = REGISTER[name]
    tx = make(case.gauges())
    params, state = trained(tx, case.loss, case.params(jax.random.key(1)), steps)
    _preflight(tx, params, case.loss, state)


# What is no symmetry ------------------------------------------------------------------------------------------


def _heads(p: Any) -> jax.Array:
    q, k = (jnp.einsum("bi,ihd->bhd", X, p[name]) for name in ("query", "key"))
    return _cross_entropy(jax.nn.softmax(jnp.einsum("bhd,chd->hbc", q, k))[0] @ X[:, :5])


QK = {"query": _normal(2, 8, 2, 4), "key": _normal(3, 8, 2, 4)}
SQUARED = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"}, 2)
WITHOUT_BIAS = go.rescale({"up": "_ channel"}, {"down": "channel _"})
WRONG: dict[str, tuple[Any, Loss, go.Gauge]] = {  # a gauge that the loss does not keep
    "z-loss": (MLP, lambda p: mlp_loss(p) + 1e-2 * jnp.mean(jax.nn.logsumexp(_mlp(p), -1) ** 2), LOGITS),
    "L2 on weights": (MLP, penalized, UNITS),
    "GELU in place of ReLU": (MLP, gelu_loss, UNITS),
    "a degree of two": (MLP, mlp_loss, SQUARED),
    "a bias left out": (MLP | {"bias": _normal(3, 16)}, mlp_loss, WITHOUT_BIAS),
    "a wrong rotation": (QK, _heads, go.head_rotation({"query": "basis head _", "key": "basis head _"})),
    "a rotation of one side": (QK, _heads, go.head_rotation({"query": "_ head basis"})),
    "outputs that are no logits": (MLP, lambda p: jnp.mean((_mlp(p) - X[:, :5]) ** 2), LOGITS),
}
HIDDEN = {("z-loss", "bfloat16"), ("L2 on weights", "bfloat16")}  # by roundoff, as the report says
SHOWN = [(name, dtype) for name in WRONG for dtype in ("float64", "float32", "bfloat16")]


@pytest.mark.slow_rows("*-float64", "*-bfloat16", "a degree of two-*", "*of one side-*", "*no logits-*")
@pytest.mark.parametrize(("name", "dtype"), [row for row in SHOWN if row not in HIDDEN])
def test_what_is_no_symmetry_is_named(name: str, dtype: str) -> None:
    params, loss, gauge = WRONG[name]
    words = rf"^check: {gauge.name} on '.* is no symmetry of the loss that made these gradients"
    with jax.enable_x64(dtype == "float64"), refused(words):
        _preflight(go.quotient_adamw(1e-2, [gauge]), _cast(dtype, params), loss)


@pytest.mark.slow_rows("[bgpsw]*", "momentum")
@pytest.mark.parametrize("name", WRAPPERS)
def test_what_is_no_symmetry_and_a_state_of_other_weights_are_named_in_every_wrapper(name: str) -> None:
    tx = WRAPPERS[name]
    with refused("check: rescale on 'up'"):
        _preflight(tx, MLP, gelu_loss)
    if name != "warm-up":
        with refused("made for other weights", "state = tx.init(params)"):
            _preflight(tx, MLP, mlp_loss, tx.init(jax.tree.map(lambda x: 1.7 * jnp.roll(x, 1), MLP)))


class _Own:
    """A wrapper of the user's, which holds its optimizer in an attribute."""

    def __init__(self, tx: Any) -> None:
        self.tx = tx

    def init(self, params: Any) -> Any:
        return self.tx.init(params)

    def update(self, *args: Any) -> Any:
        return self.tx.update(*args)


def test_gauges_are_seen_below_many_wrappers_and_missed_in_a_class_of_the_users() -> None:
    nested, own = ADAMW, _Own(ADAMW)
    for _ in range(5):
        nested = optax.apply_if_finite(optax.named_chain(("tx", nested)), 3)
    with refused("check: rescale on 'up'"):
        _preflight(nested, MLP, gelu_loss)
    with refused("check: an optimizer inside a wrapper that hides its gauges", "go.check(inner"):
        _preflight(optax.GradientTransformation(own.init, own.update), MLP, gelu_loss)


@pytest.mark.parametrize("around", [
    go.links.compress_second_moments,
    lambda tx: go.measure.track(optax.chain(tx), [UNITS]),
    lambda tx: go.measure.track_rotation({"up": "_ neuron"}, inner=tx),
], ids=["compress", "track", "track_rotation"])
def test_what_a_wrapped_optimizer_has_to_say_is_heard(around: Any) -> None:
    bounded = go.norms.max_norm(optax.adam(1e-3), {"up": "_ neuron"}, learning_rate=1e-3, bound=1e-3)
    (said,) = preflight_of(around(bounded))(MLP)
    assert "max_norm: weights above the norm bound, 'up'" in str(said)


@pytest.mark.slow_rows("1e-20", "1e+20")
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_the_size_of_gradients_does_not_count(size: float) -> None:
    right, wrong = (jax.tree.map(lambda x: size * x, jax.grad(loss)(MLP)) for loss in (mlp_loss, gelu_loss))
    assert 0 < go.check(ADAMW, ADAMW.init(MLP), MLP, right).asymmetries[0][2] < 1e-5
    with pytest.raises(ValueError, match="is no symmetry"):
        go.check(ADAMW, ADAMW.init(MLP), MLP, wrong)


ADAPTERS = {"a": _normal(2, 8, 3), "e": 1 + _normal(3, 3), "b": jnp.zeros((3, 5))}
LORA = go.quotient_adamw(1e-3, [go.head_linear({"a": "_ basis"}, {"b": "basis _"})])
LOW, LOW_KEYS = (
    _cast("bfloat16", tree) for tree in (MLP, {name: x[:, 0] for name, x in QK.items()} | {"bias": _normal(4, 4)})
)
ZERO_BIAS = MLP | {"bias": jnp.zeros(16)}


def _adapted(p: Any, between: Any = None) -> jax.Array:
    return _cross_entropy((X @ p["a"]) * (p["e"] if between is None else between) @ p["b"])


def _attended(p: Any) -> jax.Array:
    scores = (X @ p["query"]) @ (X @ p["key"] + p["bias"]).T
    return _cross_entropy(jax.nn.softmax(3 * jnp.tanh(scores / 3)) @ X[:, :5])


# An optimizer, weights and a loss; what the report says of one gradient, and what the error says with the loss.
OPEN: dict[str, tuple[Any, Any, Any, str, str]] = {
    # At B = 0, where adapters start, no gradient of A·E·B shows that E stands between them.
    "adapters": (LORA, ADAPTERS, _adapted, "head_linear on 'a' could not be tested", "head_linear on 'a', 'b' is no"),
    # The gradient at a bias of zero is the same whether the gauge multiplies the bias or forgets it.
    "a zero bias": (go.quotient_adamw(1e-3, WITHOUT_BIAS), ZERO_BIAS, mlp_loss,
                    "multiplied by no gauge: 'bias'. Whether", "rescale on 'up', 'down' is no symmetry"),
    # In bfloat16, nothing tells the gradient of a bias that does not count, or of a small penalty, from roundoff.
    "a key bias": (go.quotient_adamw(1e-2, [go.key_bias({"bias": "_"})]), LOW_KEYS, _attended,
                   "key_bias on 'bias' has no gradient but roundoff, or is no", "key_bias on 'bias' is no symmetry"),
    "a small penalty": (ADAMW, LOW, penalized, "hides penalties", "rescale on 'up', 'bias', 'down' is no symmetry"),
}


@pytest.mark.slow_rows("adapters", "a small penalty", "a key bias")
@pytest.mark.parametrize("name", OPEN)
def test_what_one_gradient_leaves_open_is_said_and_the_loss_decides(name: str) -> None:
    tx, params, loss, said, refusal = OPEN[name]
    assert said in repr(_preflight(tx, params, loss))
    with refused(refusal):
        _preflight(tx, params, loss, loss_fn=loss)


@pytest.mark.slow
def test_a_right_loss_leaves_nothing_open() -> None:
    """Which `check` lifts to float64."""
    for tx, params, loss in ((LORA, ADAPTERS, functools.partial(_adapted, between=1.0)), (ADAMW, LOW, mlp_loss)):
        report = _preflight(tx, params, loss, loss_fn=loss)
        assert report.precision == "float64" and report.asymmetries[0][2] < 1e-12
        assert "could not be tested" not in repr(report)
    for weights, gauges in ((ZERO_BIAS, [UNITS]), (MLP, [UNITS, LOGITS])):
        assert "multiplied by no gauge" not in repr(_preflight(go.quotient_adamw(1e-3, gauges), weights, mlp_loss))
    with refused("is no symmetry"):
        _preflight(ADAMW, LOW, penalized, loss_fn=penalized, batch=jnp.float32(1e-4))


def _on(*decaying: str) -> Callable[[Any], Any]:
    return lambda p: {path: path in decaying for path in p}


@pytest.mark.slow_rows("*-False[012]", "<lambda>-True")
@pytest.mark.parametrize(("mask", "grows"), [
    (_on("scale", "up"), True), (_on("up", "down"), False), (_on("scale", "shift", "up"), False), (_on(), False),
])
def test_a_norms_bias_that_decay_of_its_scale_inflates_is_said(mask: Any, grows: bool) -> None:
    """Twins stay equal, so that no test of equivariance sees it."""
    params = MLP | {"scale": jnp.ones(8), "shift": jnp.zeros(8)}
    loss = lambda p: mlp_loss(p, x=jax.nn.standardize(X) * p["scale"] + p["shift"])  # noqa: E731
    norm = go.norm_scale({"scale": "channel", "shift": "channel"}, {"up": "channel _"})
    for make in (go.quotient_adamw, go.ddc_adamw):
        said = repr(_preflight(make(1e-2, [norm, UNITS], weight_decay=0.1, mask=mask), params, loss))
        assert ("'shift' grows by 1e-03 of its size in a step: what decay takes from 'scale'" in said) == grows
        assert said.count("grows by") == grows
    balanced = go.orbit.gauge_fix(optax.adamw(1e-2, weight_decay=0.1, mask=mask), norm)
    assert "grows by" not in repr(_preflight(balanced, params, loss))


# States -------------------------------------------------------------------------------------------------------


@pytest.mark.slow_rows("head_linear*")
@pytest.mark.parametrize("name", ["head_rotation/mha", "head_linear/value_out", "rope_torus/half"])
def test_a_basis_of_other_weights_is_named(name: str) -> None:
    case = REGISTER[name]
    tx, params, other = (go.quotient_adamw(1e-3, case.gauges()), *map(case.params, jax.random.split(jax.random.key(1))))
    with pytest.raises(ValueError, match="made for other weights"):
        _preflight(tx, params, case.loss, tx.init(other))


def test_a_resumed_state_of_other_weights_is_named() -> None:
    _, state = ADAMW.update(jax.grad(mlp_loss)(MLP), ADAMW.init(MLP), MLP)
    _preflight(ADAMW, MLP, mlp_loss, state)
    with pytest.raises(ValueError, match="made for other weights"):
        _preflight(ADAMW, UNITS.act(UNITS.sample(jax.random.key(5), MLP, 2.0), MLP), mlp_loss, state)


SGD = go.quotient(optax.sgd(1e-3), [UNITS])
test_what_is_given_by_mistake_is_named = each_refused({
    "another state": (lambda: _preflight(ADAMW, MLP, mlp_loss, SGD.init(MLP)), "a state of another optimizer"),
    "as a checkpoint restores it": (
        lambda: _preflight(ADAMW, MLP, mlp_loss, ADAMW.init(MLP)._asdict()), r"jax\.eval_shape\(tx\.init, params\)"),
    "inside jit": (lambda: jax.jit(lambda p: go.check(ADAMW, ADAMW.init(p), p, p))(MLP), "called inside jit"),
    "too few gradients": (lambda: go.check(ADAMW, ADAMW.init(MLP), MLP, {"up": MLP["up"]}),
                          "no update for|update of another shape"),
    "NaN": (lambda: go.check(ADAMW, ADAMW.init(MLP), MLP, MLP | {"bias": jnp.nan * MLP["bias"]}),
            "a gradient that is not finite, 'bias'"),
    "gauges for a report": (lambda: go.check(ADAMW, ADAMW.init(MLP), MLP, MLP, report=[UNITS]), "no report"),
    "a loss of other arguments": (
        lambda: go.check(ADAMW, ADAMW.init(MLP), MLP, MLP, loss_fn=lambda: 1.0), "a function of other arguments"),
    "a batch without a loss": (lambda: go.check(ADAMW, ADAMW.init(MLP), MLP, MLP, batch=1), "a batch without a loss"),
    "a loss and more": (lambda: go.check(ADAMW, ADAMW.init(MLP), MLP, MLP, loss_fn=lambda p: (p["up"][0, 0], {})),
                        r"lambda \*args: loss\(\*args\)\[0\]"),
})


# Frozen leaves ------------------------------------------------------------------------------------------------

ON_DOWN = {"up": False, "bias": False, "down": True}


def _partition(of_down: Any) -> Any:
    return optax.partition({"t": optax.adamw(1e-3), "f": of_down}, {"up": "t", "bias": "t", "down": "f"})


def test_the_report_says_what_is_left_alone() -> None:
    report = _preflight(go.quotient(_partition(optax.set_to_zero()), [UNITS]), MLP, mlp_loss)
    assert report.frozen == ("down",) and "left alone, because they never change: down" in repr(report)
    assert report.asymmetries == (("rescale", "left alone", 0.0),)
    stopped = lambda p: mlp_loss(p | {"down": jax.lax.stop_gradient(p["down"])})  # noqa: E731
    with refused("is no symmetry", "stop_gradient", "frozen=go.tools.by_path({'down': True}"):
        _preflight(ADAMW, MLP, stopped)
    said = go.quotient(optax.adamw(1e-3), [UNITS], frozen=go.tools.by_path({"down": True}, default=False))
    assert _preflight(said, MLP, stopped).frozen == ("down",)


OUTSIDE, IN_FRONT = "but outside the optimizer with the gauge rescale", "in front of"
FREEZE = optax.freeze(ON_DOWN)
UNSEEN: dict[str, tuple[str, Any]] = {
    "set_to_zero": (OUTSIDE, optax.chain(ADAMW, optax.masked(optax.set_to_zero(), ON_DOWN))),
    "gauge_fix": (OUTSIDE, optax.chain(go.orbit.gauge_fix(optax.adamw(1e-3), [UNITS]), FREEZE)),
    "rate zero": (OUTSIDE, optax.chain(ADAMW, optax.masked(optax.scale(0.0), ON_DOWN))),
    "in front": (IN_FRONT, optax.chain(FREEZE, ADAMW)),
    "in front, in MultiSteps": (IN_FRONT, optax.MultiSteps(optax.chain(FREEZE, ADAMW), 4)),
    "between links": (IN_FRONT, optax.chain(go.scale_by_ddc([UNITS]), FREEZE, go.gauge_retract([UNITS]))),
    "an average around it": ("but for roundoff", go.quotient(
        optax.contrib.schedule_free(_partition(optax.set_to_zero()), 1e-3), [UNITS])),
    "some rows": ("in part", go.quotient(optax.chain(
        optax.adam(1e-3), optax.stateless(lambda u, p: u | {"down": u["down"] * (jnp.arange(16.0)[:, None] > 4)})
    ), [UNITS])),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_leaf_that_is_frozen_where_no_state_knows_is_named(name: str) -> None:
    """Growth of `up` would move it."""
    words, tx = UNSEEN[name]
    with refused(f"'down' is frozen,? {words}", "frozen=go.tools.by_path({'down': True}"):
        _preflight(tx, MLP, mlp_loss)


def test_where_every_leaf_is_frozen_or_one_rests_at_the_first_step() -> None:
    """No partner loses its growth; the report says so of the leaf that rests."""
    _preflight(optax.chain(ADAMW, optax.set_to_zero()), MLP, mlp_loss)
    later = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(1e-3)], [100])
    report = _preflight(go.quotient(_partition(optax.adam(later)), [UNITS]), MLP, mlp_loss)
    assert "the first step of 'down' is zero" in repr(report) and report.frozen == ()


@pytest.mark.parametrize(("inner", "said"), [
    (optax.scale_by_adam(), True), (ADAMW, False), (optax.chain(optax.scale_by_adam(), optax.scale(-1e-3)), False),
], ids=["link", "whole", "chain"])
def test_a_learning_rate_that_is_not_inside_is_noted(inner: Any, said: bool) -> None:
    """The way back to the slice took a step of 1 in every entry, and the rate outside made it another step.

    The rate of links of DDC stands behind them, in front of the way back.
    """
    params = MLP | {"down": jnp.zeros((16, 5))}  # any step is longer than a leaf of zeros
    links = optax.chain(go.scale_by_ddc([UNITS]), optax.scale_by_learning_rate(1e-3), go.gauge_retract([UNITS]))
    for tx, of_tx in (go.quotient(inner, [UNITS]), said), (links, False):
        assert ("put the learning rate inside" in repr(_preflight(tx, params, mlp_loss))) == of_tx


def _parts(tx: Any, params: Any = MLP, loss: Loss = mlp_loss) -> bool:
    return any("this optimizer leads two weight sets" in note for note in _preflight(tx, params, loss).notes)


def _sam(inner: Any) -> Any:
    return optax.contrib.sam(inner, optax.chain(optax.contrib.normalize(), optax.sgd(0.05)))


CLIPPED = optax.chain(optax.clip_by_global_norm(1e3), ADAMW)
PARTING: dict[str, tuple[Any, bool]] = {  # whether weights of one function part
    "in front": (CLIPPED, True),
    "behind": (optax.chain(ADAMW, optax.clip(1e-4)), True),
    "around": (_sam(ADAMW), True),
    "inside": (go.quotient(_sam(optax.adamw(1e-3)), [UNITS]), False),
    "in a condition": (optax.apply_if_finite(CLIPPED, 3), True),
    "right in a condition": (optax.apply_if_finite(ADAMW, 3), False),
    "penalty": (optax.chain(optax.add_decayed_weights(0.1), ADAMW), True),
    "noise": (optax.chain(optax.add_noise(0.1, 0.55, jax.random.key(0)), ADAMW), True),
    "adaptive": (optax.chain(optax.adaptive_grad_clip(0.1), ADAMW), True),
    "momentum": (optax.chain(optax.trace(0.9), ADAMW), False),
    "decay behind": (optax.chain(ADAMW, optax.add_decayed_weights(-1e-3)), False),
    "along the orbit": (go.orbit.gauge_fix(ADAMW, [UNITS], every=2), False),
}


@pytest.mark.slow_rows(
    "right in a condition", "penalty", "noise", "adaptive", "momentum", "decay behind", "along the orbit")
@pytest.mark.parametrize("name", PARTING)
def test_a_link_that_sees_more_than_the_function_is_noted(name: str) -> None:
    tx, said = PARTING[name]
    assert _parts(tx) == said


@pytest.mark.slow_rows("bfloat16-[!e]*")
@pytest.mark.parametrize(("link", "said"), [
    (optax.clip(1e-3), True), (optax.clip_by_global_norm(1e-3), False), (optax.clip_by_block_rms(1e-3), False),
    (optax.add_decayed_weights(0.1), False),
], ids=["entries", "norm", "leaves", "decay"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beside_rotations_a_clip_of_a_norm_is_right(dtype: str, link: Any, said: bool) -> None:
    turns = go.head_rotation({"query": "_ head basis", "key": "_ head basis"})
    tx = optax.chain(link, go.quotient_adamw(1e-3, [turns]))
    assert _parts(tx, jax.tree.map(lambda x: x.astype(dtype), QK), _heads) == said


def test_an_infinity_in_a_state_is_no_difference() -> None:
    """`reduce_on_plateau` starts with a best loss of infinity."""
    tx = go.quotient(optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau()), [UNITS])
    with warnings.catch_warnings(action="error"):
        _preflight(tx, MLP, mlp_loss)


SCALED = {"g": jnp.linspace(0.5, 1.5, 8), **MLP}
LISTED = [go.norm_scale({"g": "channel"}, {"up": "channel _"}), UNITS, LOGITS]


def _normed_loss(p: Any) -> jax.Array:
    return mlp_loss(p, x=X / jnp.sqrt(jnp.mean(X**2, -1, keepdims=True)) * p["g"])


@pytest.mark.slow_rows("ddc_muon", "the chain of ddc")
@pytest.mark.parametrize("tx", [
    go.ddc_adamw(1e-3, LISTED, weight_decay=0.1), go.ddc_muon(1e-3, LISTED),
    _links(LISTED, go.add_gauge_decay(0.1, LISTED)),
    optax.chain(optax.clip_by_global_norm(1.0), go.quotient_adamw(1e-3, LISTED)),
], ids=["ddc_adamw", "ddc_muon", "the chain of ddc", "clipped"])
def test_a_norms_scale_without_a_gradient_on_the_slice_is_not_frozen(tx: Any) -> None:
    """Inside, or behind a projection, its gradient is zero: the kernel behind it has all of it."""
    report = _preflight(tx, SCALED, _normed_loss)
    assert report.asymmetries and report.frozen == () and "left alone" not in repr(report)


# Updates and arguments ----------------------------------------------------------------------------------------


@pytest.mark.slow_rows("float16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_update_that_is_rounded_away_is_named(dtype: str) -> None:
    params = jax.tree.map(lambda x: (1.0 + 0.1 * x).astype(dtype), MLP)
    slow = go.quotient_adamw(1e-5, [UNITS])
    for tx in (slow, optax.MultiSteps(slow, 4)):
        with refused(f"is rounded away by {dtype}", "%", "float32"):
            _preflight(tx, params, mlp_loss)
    report = _preflight(go.quotient_adamw(optax.linear_schedule(0.0, 1e-5, 10), [UNITS]), params, mlp_loss)
    assert "the first update is zero" in repr(report)


def test_the_roundoff_of_an_anchor_that_stores_one_less_is_no_update() -> None:
    params = _cast("bfloat16", MLP | {"scale": 1e-3 * jnp.arange(1.0, 9.0)})
    loss = lambda p: _cross_entropy(_mlp(p, x=X * (1 + p["scale"])).astype(jnp.float32))  # noqa: E731
    _preflight(go.quotient_adamw(1e-2, go.norm_scale({"scale": "1+ channel"}, {"up": "channel _"})), params, loss)


def test_an_optimizer_that_cannot_be_tried_is_said() -> None:
    """One that asks its update for the loss: frozen leaves cannot be listened for, and the report says so."""

    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **extra: Any) -> Any:
        return jax.tree.map(lambda g: -1e-3 * value * g, updates), state

    asks = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    report = _preflight(go.quotient(asks, [UNITS]), MLP, mlp_loss)
    assert any("the update raised TypeError" in note for note in report.notes)
    report = _preflight(optax.conditionally_mask(ADAMW, lambda step, **_: step < 3), MLP, mlp_loss)
    assert any("inside jax.lax.cond or a loop; check that optimizer too" in note for note in report.notes)
    assert _preflight(optax.adam(1e-3), MLP, mlp_loss).asymmetries == ()  # and one without gauges is silent
