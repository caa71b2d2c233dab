"""The axes that the function uses: mappings against those by hand, and equal steps of Muon under both."""

import functools
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from benchmarks import unprepared
from benchmarks.sizes import muon_axes
from benchmarks.training.links import EMBEDDINGS, NEURONS, TOKENS
from gauge_optax.binding import with_leaves
from gauge_optax.discovery import checks
from gauge_optax.discovery.axes import LeafAxes, read_axes
from gauge_optax.discovery.report import Report
from gauge_optax.discovery.trace import walked
from models import digits
from tests.discovery.axes_nets import CASES, MOE, D, E, F, H, N, attention, convolve, experts, features, heads, tokens
from tests.discovery.nets import CONFIGS, FORMS, every_net
from tests.discovery.test_layouts import drawn
from tests.refusals import refused

NO_GAUGE = go.logit_shift({"shift": "vocab"})
RNG = np.random.default_rng


def axes_of(fn: Callable[..., Any], params: Any, batch: Any, outputs: Any = "logits") -> LeafAxes:
    """Without the search for symmetries."""
    with jax.enable_x64(True):
        leaves = checks.double_leaves(params, 0)

        def compared(leaves: Any, batch: Any) -> Any:
            return checks.compared(fn(with_leaves(params, leaves), batch), outputs)

        return read_axes(compared, leaves, batch, walked(compared, leaves, batch))


@pytest.mark.parametrize("name", CASES)
def test_the_mappings_by_hand(name: str) -> None:
    case = CASES[name]
    params = drawn(case.shapes)
    found = axes_of(case.fn, params, case.batch(RNG(1)), case.outputs)
    assert dict(found.neurons) == dict(case.neurons)
    assert dict(found.embeddings) == dict(case.embeddings)
    assert not found.undecided
    # The optimizer takes them, and no matrix but the scales of depthwise convolutions and tables is left over.
    params |= {"shift": np.zeros(3, np.float32)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        go.max_norm_muon(0.1, NO_GAUGE, found.neurons, found.embeddings).init(params)
    left = {"depthwise", "taps"} & params.keys()
    assert all(f"'{path}'" in str(told[0].message) for path in left) and bool(told) == bool(left)


@every_net(("llama", "unrolled"), ("gpt", "scanned"), ("gemma3", "unrolled"), ("gpt_mqa", "unrolled"))
def test_every_switch_of_the_language_model(name: str, form: str) -> None:
    net, config = FORMS[form](CONFIGS[name]), CONFIGS[name]
    found = axes_of(net.fn, net.params, net.batches[0])
    stacked = form == "scanned"
    neurons = {p.replace("{i}/", "") if stacked else p: f"layer {axes}" if stacked and "{i}" in p else axes
               for p, axes in {**NEURONS, **({} if config.tied else TOKENS)}.items()
               if "mlp/gate" not in p or config.mlp == "swiglu"}
    if config.kv_heads == 1:  # an axis of length one counts nothing
        neurons = {p: axes.replace("head", "_") if "key" in p or "value" in p else axes for p, axes in neurons.items()}
    assert dict(found.neurons) == neurons
    assert dict(found.embeddings) == {**EMBEDDINGS, **({} if config.rope else {"pos/embedding": "token _"})}
    assert not found.undecided


@pytest.mark.parametrize("config", [
    digits.DigitsConfig(kind="cnn", norm="batch"), digits.DigitsConfig(standardized=True)], ids=str)
def test_classifiers_of_digits(config: digits.DigitsConfig) -> None:
    init, logits = digits.make(config)
    found = axes_of(logits, init(jax.random.key(0)), RNG(1).normal(size=(3, 64)))
    read: dict[str, Any] = {path: found.of(path) for path in digits.neurons(config)}
    assert {axes for _, axes in read.values()} == {"_ neuron"} and not found.undecided
    assert dict(found.neurons) == {**dict(read.values()), "head/kernel": "_ token"}


# Muon -----------------------------------------------------------------------------------------------------


def report_of(axes: LeafAxes) -> Report:
    return Report((), (), (), (), (), {}, axes=axes)


def report_of_case(name: str) -> tuple[Any, Any, Report]:
    """Small parameters with a leaf for `NO_GAUGE`, gradients, and the axes alone as a report."""
    case, params = CASES[name], drawn(CASES[name].shapes)
    small = {path: jnp.asarray(x) * 0.1 for path, x in params.items()} | {"shift": jnp.zeros(3)}
    axes = axes_of(case.fn, params, case.batch(RNG(1)), case.outputs)
    return small, jax.tree.map(lambda x: x - jnp.mean(x), small), report_of(axes)


@pytest.mark.parametrize("name", ["llama", "gpt_gqa", "rms_gelu_tied"])
def test_optax_muon_steps_as_under_dimension_numbers_by_hand(name: str) -> None:
    """One step, from the axes of the function and from a tree by name; whole leaves that a name decides."""
    net = FORMS["unrolled"](CONFIGS[name])
    params, grads = (jax.tree.map(lambda x, s=seed: jnp.asarray(RNG(s).normal(size=x.shape), jnp.float32), net.params)
                     for seed in (0, 1))
    report = report_of(axes_of(net.fn, net.params, net.batches[0]))
    by_hand, *ours = (optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers) for numbers in (
        muon_axes, report.muon_dimension_numbers, report.muon_dimension_numbers(params)))
    expected = by_hand.update(grads, by_hand.init(params), params)[0]
    for tx in ours:
        jax.tree.map(np.testing.assert_array_equal, tx.update(grads, tx.init(params), params)[0], expected)


of = optax.contrib.MuonDimensionNumbers
NUMBERS: dict[str, dict[str, Any]] = {
    "scanned along axis 1": dict(embed=None, head=None, up=of((0,), (2,)), down=of((0,), (2,))),
    "convolutions": {
        "first": of((0, 1, 2), (3,)), "pointwise": of((1, 2, 3), (0,)), "grouped": of((0, 1, 2), (3,)),
        **dict.fromkeys(("depthwise", "scale", "head", "bias"))},
    "experts": {"up": of((1,), (2,)), "down": of((1,), (2,))},
    "fused, repeated keys": {"qkv": of((1,), (0,))},  # Optax knows no ranges
}


@pytest.mark.parametrize("name", NUMBERS)
def test_dimension_numbers_of_stacks_convolutions_and_experts(name: str) -> None:
    numbers = report_of_case(name)[-1].muon_dimension_numbers(drawn(CASES[name].shapes))
    assert numbers | NUMBERS[name] == numbers


# What the function does not decide ------------------------------------------------------------------------


def flat_experts(p: Any, x: Any) -> jax.Array:
    return experts({**p, "up": p["up"].reshape(N, D, F), "down": p["down"].reshape(N, F, D)}, x)


def positions(p: Any, x: Any, counted: bool) -> jax.Array:
    """An RNN over time that adds a row of a table per turn, by a counter or as one of the arrays of its scan."""
    def step(h: jax.Array, row: Any) -> Any:
        h = jnp.tanh((row[0] + (p["table"][row[1]] if counted else row[1])) @ p["w"] + h)
        return h, h

    return jax.lax.scan(step, jnp.zeros(5), (x[0], jnp.arange(6) if counted else p["table"]))[1]


UNDECIDED: Mapping[str, tuple[Callable[..., Any], Mapping[str, tuple[int, ...]], Mapping[str, str]]] = {
    "tied": (lambda p, x: jax.nn.relu(x @ p["w"]) @ p["w"].T, {"w": (D, 5)},
             {"w": "it is read in several ways, '_ neuron' and 'neuron _': list one by hand"}),
    "factors": (lambda p, x: jax.nn.relu(x @ (p["a"] @ p["b"])), {"a": (D, 3), "b": (3, F)},
                {"a": "does not say which of the two is data", "b": ""}),
    "a sum": (lambda p, x: jnp.sum(x[..., None] * p["w"], -2), {"w": (D, F)}, {"w": "the product is summed"}),
    "a part": (lambda p, x: x @ p["w"][:, :3], {"w": (D, F)},
               {"w": "24 of its 96 entries are matrices, '_ neuron=0:3', and nothing says"}),
    "a bias for each token": (
        lambda p, x: jnp.tanh(p["embed"][x]) @ p["head"] + p["bias"][x],
        {"embed": (11, D), "head": (D, 3), "bias": (11, 3)}, {"bias": "embeddings={'bias': 'token _'}"}),
    "flat experts": (
        flat_experts, MOE | {"gate": MOE["up"], "up": (N * D, F), "down": (N * F, D)}, {"up": "", "down": ""}),
    "contracted with each other first": (
        lambda p, x: jnp.einsum("bti,ijk->btjk", x, jnp.einsum("ir,jr,kr->ijk", p["a"], p["b"], p["c"])),
        {"a": (D, 2), "b": (4, 2), "c": (3, 2)}, dict.fromkeys("abc", "does not say which of the two is data")),
    "a generator": (lambda p, x: x @ jax.scipy.linalg.expm(p["w"] - p["w"].T), {"w": (D, D)}, {"w": "with itself"}),
    "symmetric": (lambda p, x: x @ (p["w"] + p["w"].T) + x @ p["w"], {"w": (D, D)}, {"w": "its axes in another order"}),
    "a power": (lambda p, x: x @ (p["w"] @ p["w"]), {"w": (D, D)}, {"w": "multiplied with itself before data"}),
    "in front of a constant": (
        lambda p, x: x @ (p["w"] @ np.eye(F)), {"w": (D, F)}, {"w": "does not say which of its axes are inputs"}),
    "a sum of kernels": (lambda p, x: x @ jnp.einsum("n,nio->io", p["v"], p["w"]), {"v": (N,), "w": (N, D, F)},
                         {"w": "does not say which of its axes are inputs"}),
    "a convolution of known kernels": (
        lambda p, x: convolve(x[None], jnp.einsum("hwn,nio->hwio", RNG(0).normal(size=(3, 3, N)), p["w"])),
        {"w": (N, D, F)}, {"w": "does not say which of its axes are inputs"}),
    "three axes that count": (lambda p, x: jnp.einsum("bthei,theio->btheo", x.reshape(2, 6, 2, 2, 2), p["w"]),
                              {"w": (6, 2, 2, 2, 3)}, {"w": "3 of its axes count matrices"}),
    "two contractions in turn": (
        lambda p, x: jnp.einsum("bti,btio->bto", x, jnp.einsum("bte,eio->btio", x[:, :, :5], p["w"])),
        {"w": (5, D, F)}, {"w": "data is contracted with its axes [0], and then with axes [1] of the result"}),
    "results of kernels, mixed for a whole sequence": (
        lambda p, x: jnp.einsum("be,bteo->bto", x[:, 0, :5], jnp.einsum("bti,eio->bteo", x, p["w"])),
        {"w": (5, D, F)}, {"w": "data is contracted with its axes [1], and then with axes [0] of the result"}),
    **{f"positions, {counted}": (functools.partial(positions, counted=counted), {"table": (6, D), "w": (D, 5)},
                                 {"table": "list it in embeddings={'table': 'token _'}"}) for counted in (True, False)},
    "as many rows as a triangle has": (
        lambda p, x: jax.scipy.linalg.solve_triangular(jnp.tril(p["w"]) + 9 * jnp.eye(6), x[0], lower=True),
        {"w": (6, 6)}, {"w": "`triangular_solve` is an operation whose axes are not known"}),
    "sorted": (lambda p, x: x @ jnp.sort(p["w"]), {"w": (D, F)}, {"w": "if it is a kernel, list it by hand"}),
    "a projection of learned queries": (
        lambda p, x: attention(
            *(heads(y @ p[name]) for y, name in ((jnp.tile(p["probe"], (2, 1, 1)), "q"), (x, "k"), (x, "v")))),
        {"probe": (3, D), "q": (D, D), "k": (D, D), "v": (D, D)}, {"probe": "with 'q'", "q": "with 'probe'"}),
    "a kernel with noise": (
        lambda p, x: x[1] @ (p["mean"] + jax.nn.softplus(p["spread"]) * jnp.outer(x[0, 0], x[0, :2].ravel()[:F])),
        {"mean": (D, F), "spread": (D, F)}, dict.fromkeys(("mean", "spread"), "as noise to a kernel")),
    "a convolution whose kernel has noise": (
        lambda p, x: convolve(x[None], p["w"] * (x[0, 0, 0] > jnp.cos(np.arange(9 * D * F)).reshape(3, 3, D, F))),
        {"w": (3, 3, D, F)}, {"w": "as noise to a kernel"}),
    "the Q of a kernel, which is not the kernel with its entries moved": (
        lambda p, x: x @ jnp.linalg.qr(p["w"])[0], {"w": (D, D)}, {"w": "is an operation whose axes are not known"}),
}


def test_planes_that_complex_numbers_turn_are_of_one_matrix() -> None:
    """As in EasyLM's Llama: the even and the odd outputs of queries counted as two matrices."""

    def fn(p: Any, x: Any) -> jax.Array:
        def turned(y: jax.Array) -> jax.Array:
            pairs = heads(y).reshape(*y.shape[:2], H, -1, 2)
            pairs = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * jnp.exp(1j * jnp.arange(y.shape[1]))[:, None, None]
            return jnp.stack([pairs.real, pairs.imag], -1).reshape(*y.shape[:2], H, -1)

        return attention(turned(x @ p["q"]), turned(x @ p["k"]), heads(x @ p["v"]))

    axes = axes_of(fn, drawn(dict.fromkeys("qkv", (D, D))), features(RNG(1)), "loss")
    assert dict(axes.neurons) == dict.fromkeys("qkv", "_ neuron") and not axes.undecided


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_the_function_does_not_decide_is_named(name: str) -> None:
    fn, shapes, words = UNDECIDED[name]
    undecided = axes_of(fn, drawn(shapes), (tokens if "embed" in shapes else features)(RNG(1)), "loss").undecided
    assert undecided.keys() == words.keys() and all(words[path] in undecided[path] for path in words)


@pytest.mark.parametrize("fn", [
    lambda p, x: jnp.einsum("bthe,he->bth", heads(x), p["w"]),
    lambda p, x: jnp.einsum("bthe,he->bthe", heads(x), p["w"]),
    lambda p, x: heads(x) * jnp.exp(jnp.sum(p["w"] * p["w"], -1))[:, None], lambda p, x: heads(x),
], ids=["a vector per head", "scales", "numbers per head", "unused"])
def test_what_is_no_kernel_is_not_undecided(fn: Any) -> None:
    found = axes_of(fn, drawn({"w": (H, E)}), features(RNG(1)), "loss")
    assert not (found.undecided or found.neurons or found.embeddings)


def test_vectors_of_layers_beside_data_per_layer_are_not_undecided() -> None:
    def layers(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, q: (h + q[1] * jnp.tanh(h @ q[0]["w"] + q[0]["b"]), None), x, (p, x[0, :3, 0]))[0]

    found = axes_of(layers, drawn({"w": (3, D, D), "b": (3, D)}), features(RNG(1)), "loss")
    assert found.neurons == {"w": "layer _ neuron"} and not found.undecided


# The report, the check, the plan --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> tuple[Any, Any, Report]:
    net = FORMS["unrolled"](CONFIGS["llama"])
    params = jax.tree.map(lambda x: jnp.asarray(RNG(0).normal(size=x.shape) * 0.1, jnp.float32), net.params)

    def loss(p: Any) -> jax.Array:
        logits = net.fn(p, net.batches[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, net.batches[1]).mean()

    report = go.discover(net.fn, net.params, net.batches, progress=False)
    return params, jax.grad(loss)(params), report


def test_a_report_has_the_mappings_as_code_and_as_json(found: Any) -> None:
    params, _, report = found
    assert report.neurons == {**NEURONS, **TOKENS} and report.embeddings == EMBEDDINGS and not report.undecided
    assert report.matrices["blocks/1/attn/out/kernel"] == "1 × (16, 8)" and "lm_head/kernel" not in report.matrices
    names: dict[str, Any] = {}
    exec(str(report.axes), names)
    assert (names["neurons"], names["embeddings"]) == (report.neurons, report.embeddings)
    assert json.loads(report.axes.json())["neurons"] == report.neurons
    rows = {row.leaf: row.axes for row in go.plan(report.gauges, params, report=report).leaves}
    assert rows["blocks/0/attn/query/kernel"] == "_ head neuron" and rows["blocks/0/norm1/scale"] == ""
    assert "axes" in go.plan(report.gauges, params, report=report).table()[0]
    assert "axes" not in go.plan(report.gauges, params).table()[0]


OTHER = {
    "head _ neuron": ({"blocks/{i}/attn/key/kernel": "head _ neuron"}, EMBEDDINGS, "blocks/0/attn/key/kernel"),
    "neuron _": ({"blocks/{i}/mlp/up/kernel": "neuron _"}, EMBEDDINGS, "blocks/0/mlp/up/kernel"),
    "_ neuron": ({"lm_head/kernel": "_ neuron"}, EMBEDDINGS, "lm_head/kernel"),
    "_ token": ({}, {"embed/embedding": "_ token"}, "embed/embedding"),
}


def checked(case: Any, changed: Mapping[str, Any], embeddings: Any = None, known: bool = True, **options: Any) -> Any:
    """Notes of the check of an optimizer whose mappings are the report's but for some (None: left out)."""
    params, grads, report = case
    neurons = {path: axes for path, axes in {**report.neurons, **changed}.items() if axes is not None}
    tx = go.max_norm_muon(0.02, report.turning or NO_GAUGE, neurons, embeddings or report.embeddings, **options)
    return go.check(tx, tx.init(params), params, grads, report=report if known else None).notes


def test_other_names_of_the_same_axes_pass(found: Any) -> None:
    changed = {"blocks/{i}/attn/key/kernel": "_ group unit", "blocks/{i}/mlp/up/kernel": "_ (a b)"}
    assert not checked(found, changed, sizes={"a": 2})


@pytest.mark.slow_rows("neuron _")
@pytest.mark.parametrize("name", OTHER)
def test_a_mapping_that_contradicts_the_function_is_named(name: str, found: Any) -> None:
    changed, embeddings, path = OTHER[name]
    checked(found, changed, embeddings, known=False)
    pattern, axes = found[-1].axes.of(path)
    with refused(f"check: the axes of '{path}'", f'"{name}" on shape', f'expected: "{axes}"', "write", repr(pattern)):
        checked(found, changed, embeddings)


def test_a_filter_that_is_listed_as_a_matrix_is_named() -> None:
    case = report_of_case("depthwise by shifts")
    with refused("'taps' is no matrix and no table", "take 'taps' out of neurons"):
        checked(case, {"taps": "_ neuron"})
    notes = checked(case, {"out": None}, adam_learning_rate=1e-3)
    assert "Adam steps 'out', of which the function says '_ neuron'" in notes


def test_ranges_and_indices_compare_by_what_they_select() -> None:
    """Parts by index, by a group, and a counted axis are the same matrices."""
    case = report_of_case("fused, taken apart")
    checked(case, {"qkv": "_ expert head neuron"}, bound=9.0)
    checked(case, {"qkv": tuple(f"_ qkv={n} head unit" for n in range(3))}, bound=9.0)
    with pytest.raises(ValueError, match="the axes of 'qkv'"):
        checked(case, {"qkv": "_ qkv head neuron"}, bound=9.0)


def test_the_report_is_all_that_max_norm_muon_needs(found: Any) -> None:
    """Its steps are those with the gauges and mappings written out, and a list without mappings is refused."""
    params, grads, report = found
    by_hand = go.max_norm_muon(0.02, report.turning, report.neurons, report.embeddings)
    steps = [tx.update(grads, tx.init(params), params)[0] for tx in (go.max_norm_muon(0.02, report), by_hand)]
    jax.tree.map(np.testing.assert_array_equal, *steps)
    with refused("no neurons", "go.discover"):
        go.max_norm_muon(0.02, report.gauges)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The 'split' argument of 'fork':DeprecationWarning")
@pytest.mark.parametrize("name", unprepared.MODELS)
def test_one_line_trains_a_model_that_nobody_prepared(name: str) -> None:
    """`max_norm_muon(rate, report)`, on models of several frameworks: no warning, and the loss falls in ten steps.

    The rate is a tenth of the one for 1,000 steps, as a warm-up would have it in the first ten.
    """
    model = unprepared.MODELS[name]()
    report = go.discover(model.fn, model.params, model.batches, model.outputs, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tx = go.max_norm_muon(0.002, report)
        params, state = model.params, tx.init(model.params)

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.square(model.fn(p, model.batches[0]))))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(10):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert np.isfinite(losses).all() and losses[-1] < losses[0], losses
