"""Steps of a set length inside a max-norm ball, and `max_norm_muon`: beside the same by hand, and as twins."""

import dataclasses
import functools
import warnings
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from benchmarks.training.links import EMBEDDINGS, NEURONS, TOKENS
from models import lm
from tests.quick import jit
from tests.refusals import refused
from tests.tolerances import tolerance
from tests.twins import driven, stepper, train, walk

RATE, INF = 0.05, float("inf")
NO_GAUGE = go.logit_shift({"shift": "vocab"})
"""On a leaf that no kernel is: a list of gauges may not be empty."""
SHIFT = {"shift": jnp.zeros(3)}


def _noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def _max_norm(rate: Any = RATE, **options: Any) -> optax.GradientTransformation:
    return go.norms.max_norm(optax.sgd(rate), {"w": "_ neuron"}, learning_rate=rate, **options)


def _run(tx: optax.GradientTransformation, weights: Any, gradients: Any, dtype: str = "float64") -> jax.Array:
    """The weights at every step."""
    return walk(tx, {"w": jnp.asarray(weights, dtype)}, {"w": jnp.asarray(gradients, dtype)})[0]["w"]


def _by_hand(weights: np.ndarray, gradients: np.ndarray, rates: np.ndarray, bound: float, beta: float) -> np.ndarray:
    """SGD's updates through the formula, for one vector."""
    nu, tracked, points = 0.0, 0, [weights]
    for gradient, rate in zip(gradients, rates, strict=True):
        if rate != 0.0:
            tracked += 1
            nu = beta * nu + (1.0 - beta) * float(gradient @ gradient)
            length = np.sqrt(nu / (1.0 - beta**tracked))
            step = rate * bound * gradient / length if length > 0.0 else np.zeros_like(weights)
            most = max(bound, float(np.linalg.norm(weights)) - float(np.linalg.norm(step)))
            weights = weights - step
            weights = weights * min(1.0, most / max(float(np.linalg.norm(weights)), 1e-300))
        points.append(weights)
    return np.stack(points)


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("bound", [1.0, 2.5])
def test_every_vector_steps_by_the_formula(bound: float, beta: float, x64: None) -> None:
    """From norms below and above the bound, one zero, one far outside that is driven outwards, two without gradient."""
    steps, inputs, vectors = 12, 5, 7
    weights = _noise(0, inputs, vectors) * np.array([0.0, 0.1, 0.5, 3.0, 0.3, 9.0, 9.0])
    gradients = _noise(1, steps, inputs, vectors) * np.array([1e-6, 1.0, 1e6, 1.0, 0.0, 0.0, 0.0])
    gradients[:, :, 5] = -weights[:, 5]
    rates = np.where(np.arange(steps) == 3, 0.0, RATE * (1.0 + np.arange(steps)))
    found = _run(_max_norm(lambda n: jnp.asarray(rates)[n], bound=bound, beta=beta), weights, gradients)
    for n in range(vectors):
        expected = _by_hand(weights[:, n], gradients[:, :, n], rates, bound, beta)
        np.testing.assert_allclose(found[:, :, n], expected, rtol=1e-12, atol=1e-14)
    norms = np.linalg.norm(found, axis=1)
    above = norms[0] > bound
    assert above.any() and not above.all()
    assert norms[:, ~above].max() <= bound * (1.0 + 1e-14)
    assert (norms[1:, above] <= np.maximum(bound, norms[:-1, above]) + 1e-14).all()
    np.testing.assert_allclose(norms[1, 0], RATE * bound, rtol=1e-12)  # from zero, by the rate
    np.testing.assert_allclose(norms[0, 5] - norms[1, 5], RATE * bound, rtol=1e-12)  # and back at its pace
    np.testing.assert_array_equal(found[:, :, 6], weights[None, :, 6].repeat(steps + 1, 0))


NUMBERS: dict[str, tuple[Any, Mapping[str, tuple[float, ...]]]] = {
    "max_norm": (_max_norm, {"beta": (1.0, 1.5), "bound": (0.0, INF)}),
    "rotational_adamw": (lambda **x: go.norms.rotational_adamw(RATE, {"w": "_ n"}, **x), {"eta_r": (INF,)}),
    "scale_by_vector_norm": (lambda **x: go.links.scale_by_vector_norm({"w": "_ n"}, **x), {"beta": (1.0,)}),
    "max_norm_muon": (functools.partial(go.max_norm_muon, RATE, NO_GAUGE, {"w": "_ n"}), {"beta": (1.0,), "bound": ()}),
    "scale_by_ddc": (functools.partial(go.scale_by_ddc, NO_GAUGE), {
        "radial_scale": (INF,), "scale_floor": (), "live_threshold": (), "refresh_drift": (), "refresh_every": (0,)}),
    "ddc_muon": (functools.partial(go.ddc_muon, RATE, NO_GAUGE), {"scale": (0.0,), "ns_steps": (0,)}),
    "scale_by_relative_rms": (functools.partial(go.links.scale_by_relative_rms, NO_GAUGE), {"min_scale": (INF,)}),
    "scale_by_opposite_gram": (functools.partial(go.links.scale_by_opposite_gram, NO_GAUGE), {
        "damping": (), "every": (0,)}),
}


@pytest.mark.parametrize(("name", "argument"), [(name, x) for name, (_, taken) in NUMBERS.items() for x in taken])
def test_numbers_lie_in_their_intervals(name: str, argument: str) -> None:
    """With beta = 1 the correction of an average divided by zero, and a negative radial_scale climbed."""
    make, taken = NUMBERS[name]
    for number in (-0.1, float("nan"), "1", True, np.ones(2), *taken[argument]):
        with refused(f"{name}: bad {argument}", f"{argument}="):
            make(**{argument: number})


def test_a_traced_number_passes() -> None:
    jax.eval_shape(lambda beta: _max_norm(beta=beta).init(SHIFT | {"w": jnp.ones((3, 3))}), 1.0)


BOUNDED: dict[str, Any] = {
    "max_norm": lambda bound: go.norms.max_norm(optax.sgd(RATE), {"w": "_ n"}, learning_rate=RATE, bound=bound),
    "keep_norms_below": lambda bound: optax.chain(optax.sgd(RATE), go.links.keep_norms_below({"w": "_ n"}, bound)),
    "max_norm_muon": lambda bound: go.max_norm_muon(RATE, NO_GAUGE, {"w": "_ n"}, {"t": "token _"}, bound=bound),
}


@pytest.mark.parametrize(("name", "leaf"), [*((name, "w") for name in BOUNDED), ("max_norm_muon", "t")])
def test_check_names_vectors_above_their_bound_and_the_bound_that_they_need(name: str, leaf: str) -> None:
    """The bound of a token in a table of embeddings is in units of √d."""
    params = {"w": jnp.eye(4), "t": jnp.ones((3, 9)), "shift": jnp.zeros(3)}
    params[leaf] = 3.0 * params[leaf]

    def check(bound: float) -> None:
        tx = BOUNDED[name](bound)
        go.check(tx, tx.init(params), params, params)

    with refused(f"weights above the norm bound, '{leaf}'", name, "of 3 times", "write bound=3.3"):
        check(1.0)
    check(3.3)


# Link by link ------------------------------------------------------------------------------------------------

UP_AND_DOWN = {"up": "_ neuron", "down": "_ neuron"}


@pytest.mark.parametrize("bound", [1.0, 0.3])
def test_two_links_around_a_rate_are_max_norm(bound: float, x64: None) -> None:
    rate = lambda count: 0.01 * (2.0 + count)  # noqa: E731  # in float64, which schedules of Optax are not
    params = {"up": jnp.asarray(_noise(0, 4, 6)), "down": jnp.asarray(_noise(1, 6, 3)), "bias": jnp.zeros(3)}
    gradients = jax.tree.map(lambda x: jnp.asarray(_noise(x.size, 10, *x.shape)), params)
    momentum, by_rate = optax.trace(0.9, nesterov=True), optax.scale_by_learning_rate(rate)
    whole = go.norms.max_norm(optax.chain(momentum, by_rate), UP_AND_DOWN, learning_rate=rate, bound=bound)
    links = optax.chain(
        momentum, go.links.scale_by_vector_norm(UP_AND_DOWN),
        optax.masked(optax.scale(bound), {"up": True, "down": True, "bias": False}), by_rate,
        go.links.keep_norms_below(UP_AND_DOWN, bound),
    )
    a, b = (walk(tx, params, gradients)[0] for tx in (whole, links))
    for path in params:
        np.testing.assert_allclose(a[path], b[path], rtol=1e-12, atol=1e-13)


# Name → the axes, the shape, and the kernel as matrices, inputs by outputs.
LAYOUTS: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "inputs first": ("_ neuron", (4, 6), lambda x: x),
    "inputs last": ("neuron _", (6, 4), lambda x: x.T),
    "stacked layers": ("layer _ neuron", (3, 4, 6), lambda x: x),
    "heads": ("_ head neuron", (4, 2, 3), lambda x: x.reshape(4, 6)),
    "fused": (("_ qkv=0 neuron", "_ qkv=1 neuron", "_ qkv=2 neuron"), (4, 3, 6), lambda x: x.swapaxes(0, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_polar_factor_is_muons(layout: str, x64: None) -> None:
    """The axes say which matrices a kernel holds."""
    axes, shape, matrices = LAYOUTS[layout]
    updates = {"up": jnp.asarray(_noise(1, *shape)), "bias": jnp.ones(6)}
    tx = go.links.scale_by_polar({"up": axes}, "sharp", 12)
    found, _ = tx.update(updates, tx.init(updates), updates)
    u, _, v = np.linalg.svd(matrices(updates["up"]), full_matrices=False)
    np.testing.assert_allclose(matrices(found["up"]), (6 / 4) ** 0.5 * u @ v, atol=1e-2)
    assert bool(jnp.all(found["bias"] == updates["bias"]))


@pytest.mark.parametrize("axes", [
    ("part=0 _ neuron", "part=1 neuron _"), ("part=1 neuron _",),
    ("part=0 _ neuron=0:4", "part=0 _ neuron=4:6", "part=1 _ neuron=0:3", "part=1 _ neuron=3:6")], ids=str)
def test_blocks_at_two_indices_of_a_stack_may_differ(axes: tuple[str, ...], x64: None) -> None:
    """Each steps as in a leaf that holds its index alone, and what no block lists keeps its update."""

    def step(axes: Any, update: jax.Array) -> jax.Array:
        tx = go.links.scale_by_polar({"up": axes})
        return tx.update({"up": update}, tx.init({"up": update}), {"up": update})[0]["up"]

    expected = update = jnp.asarray(_noise(1, 2, 4, 6))
    for index, text in ((int(x[5]), x[7:]) for x in axes):
        expected = expected.at[index].set(step(text, expected[index]))
    np.testing.assert_allclose(step(axes, update), expected, rtol=1e-12)


def test_neurons_without_inputs_are_no_matrix() -> None:
    with pytest.raises(ValueError, match="the neurons of 'up' describe no matrix"):
        go.links.scale_by_polar({"up": "neuron other"}).init({"up": jnp.ones((2, 3))})


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("size", [1e-12, 1e-30, 1e12])
def test_the_size_of_gradients_does_not_matter(size: float, dtype: str) -> None:
    """Over steps, in which a vector has no gradient at all; squares of 1e-30 are no float32."""
    with jax.enable_x64(dtype == "float64"):
        weights, gradients = _noise(0, 6, 4) / 3, _noise(1, 5, 6, 4) * np.array([1.0, 1e-3, 0.0, 1.0])
        one, other = (np.asarray(_run(_max_norm(), weights, c * gradients, dtype), float) for c in (1.0, size))
        assert np.isfinite(other).all()
        np.testing.assert_array_equal(other[:, :, 2], other[0, :, 2][None].repeat(6, 0))
        moved = np.linalg.norm(one - one[0])
        close = {"bfloat16": 2e-2, "float32": tolerance("twins", "float32"), "float64": 1e-12}[dtype]
        assert moved > 0.05 and np.linalg.norm(one - other) <= close * moved


@pytest.mark.parametrize("size", [1e6, 1e30])
def test_a_huge_step_ends_on_the_bound_in_its_direction(size: float) -> None:
    point, step = jnp.asarray([[1.0, 2.0]]), jnp.asarray([[4.0, -3.0]])
    tx = go.links.keep_norms_below({"w": "neuron _"}, 2.0)
    moves, _ = tx.update({"w": size * step}, tx.init({"w": point}), {"w": point})
    np.testing.assert_allclose(point + moves["w"], [[1.6, -1.2]], rtol=1e-5)


# max_norm_muon ------------------------------------------------------------------------------------------

CONFIG = lm.llama_config(vocab=7, d_model=8, layers=2, heads=2, kv_heads=2, d_head=4, d_ff=12, max_len=5)


@pytest.mark.slow
def test_twins_train_as_one(x64: None) -> None:
    """Weights of one function, far apart by all gauges at once; AdamW and the link without `quotient` differ."""
    config = dataclasses.replace(CONFIG, layers=1)
    params, loss = lm.params_and_loss(config, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
    tokens = jax.random.randint(jax.random.key(1), (4, 6), 0, config.vocab)
    group = go.product(lm.gauges(config))
    twin = group.act(group.sample(jax.random.key(2), params, 1.0), params)

    def apart(tx: optax.GradientTransformation) -> float:
        step = stepper(tx, lambda p: loss(p, tokens))
        one, other = (train(jit(tx.init), step, start, 10)[1] for start in (params, twin))
        return float(np.abs(one - other).max())

    assert apart(optax.adamw(0.04)) > 1e-3
    assert apart(go.norms.max_norm(optax.adam(0.04), NEURONS, learning_rate=0.04)) > 1e-3
    muon = go.max_norm_muon(0.04, group, {**NEURONS, **TOKENS}, EMBEDDINGS, weight_decay=0.1)
    assert apart(muon) <= tolerance("twins", "float64")


@pytest.mark.parametrize("decay", [0.5, lambda n: 0.5])
def test_a_neuron_without_a_gradient_only_decays(decay: Any) -> None:
    """Its decay was divided by its own length, and became a step of the whole learning rate."""
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 5)) / 8**0.5, jnp.float32)} | SHIFT
    tx = go.max_norm_muon(0.02, NO_GAUGE, {"w": "_ neuron"}, weight_decay=decay)
    grads = {"w": jnp.ones((3, 8, 5)).at[..., 2].set(0.0), "shift": jnp.zeros((3, 3))}
    moved = walk(tx, params, grads)[0]["w"][-1]
    np.testing.assert_allclose(moved[:, 2], 0.99**3 * params["w"][:, 2], rtol=1e-5)


def test_tokens_step_in_their_own_units_and_come_to_rest(x64: None) -> None:
    """By hand: a table and an unembedding whose tokens have gradients of 1e-4, 1, 1 for one step, and 0."""
    steps, tokens, d, rate = 40, 4, 9, 0.1
    gradients = np.random.default_rng(0).normal(size=(steps, tokens, d)) * np.array([1e-4, 1.0, 1.0, 0.0])[:, None]
    gradients[1:, 2] = 0.0
    params = {"table": jnp.zeros((tokens, d)), "head": jnp.zeros((d, tokens)), "w": jnp.ones((2, 2))} | SHIFT
    tx = go.max_norm_muon(rate, NO_GAUGE, {"w": "_ neuron", "head": "_ token"}, {"table": "token _"}, nesterov=False)
    grads = {"table": jnp.asarray(gradients), "head": jnp.asarray(gradients.swapaxes(1, 2)),
             "w": jnp.ones((steps, 2, 2)), "shift": jnp.zeros((steps, 3))}
    moves = {name: np.diff(x, axis=0) for name, x in walk(tx, params, grads)[0].items()}
    for name, unit, ours in (("table", d**0.5, moves["table"]), ("head", 1.0, moves["head"].swapaxes(1, 2))):
        momentum, square, weights = np.zeros((tokens, d)), np.zeros((tokens, 1)), np.zeros((tokens, d))
        for n in range(steps):
            momentum = 0.95 * momentum + gradients[n]
            square = 0.95 * square + 0.05 * np.sum(momentum**2, 1, keepdims=True)
            size = np.sqrt(square / (1.0 - 0.95 ** (n + 1)))
            wanted = weights - rate * unit * np.divide(momentum, size, out=np.zeros((tokens, d)), where=size > 0)
            if name == "table":
                wanted *= np.minimum(1.0, unit / np.maximum(np.linalg.norm(wanted, axis=1, keepdims=True), 1e-300))
            np.testing.assert_allclose(ours[n], wanted - weights, rtol=1e-6, atol=1e-12)
            weights = wanted
        lengths, largest = np.linalg.norm(ours, axis=2) / unit, np.linalg.norm(weights, axis=1).max()
        np.testing.assert_allclose(lengths[0, :3], rate, rtol=1e-6)
        assert not lengths[:, 3].any() and lengths[30, 2] < 0.6 * lengths[5, 2], "absent since the first step"
        assert largest > 1.2 if name == "head" else largest <= unit * (1.0 + 1e-12), "an unembedding has no bound"


UNITS = ("_ unit=0:32", "_ unit=32:40")
# What is given besides the rate and the gauge, and what the error says.
MISTAKES: list[tuple[Any, str, str]] = [
    (({"w": "_ _"},), "max_norm_muon", "'w'"),
    (({"w": ("_ neuron=0", "neuron=1 _")},), "max_norm_muon", "'w'"),
    (({"w": "_ token"}, {"w": "token _"}), "'w' in two mappings", ""),
    (({"w": "a token"},), "the tokens of 'w' have no vectors", 'write "_ token"'),
    (({"v": "_ neuron"}, {"w": "a token"}), "the tokens of 'w' have no vectors", 'write "_ token"'),
    (({"v": "_ neuron"}, {"w": "_ _"}), "the tokens of 'w' have no vectors", 'write "_ token"'),
    ((["w"],), "max_norm_muon: no blocks in 'neurons'", "write neurons="),
    (({"w": "_ neuron"}, ["v"]), "max_norm_muon: no blocks in 'embeddings'", "write embeddings="),
    # Nothing says what the rest is; nor can a part of a kernel be a table of tokens.
    (({"fused": UNITS},), "'fused' is listed in part", "max_norm_muon"),
    (({"fused": ("_ (head unit)=0:32",)},), "'fused' is listed in part", "max_norm_muon"),
    (({"fused": ("_ unit=0:32", "_ token=32:48")},), "tokens and neurons in one leaf 'fused'", "max_norm_muon"),
]


@pytest.mark.parametrize(("mappings", "says", "word"), MISTAKES, ids=str)
def test_mappings_that_describe_nothing_are_refused(mappings: Any, says: str, word: str) -> None:
    params = {"w": jnp.ones((4, 4)), "v": jnp.ones((2, 2)), "fused": jnp.ones((16, 48))} | SHIFT
    sizes = {"head": 2} if "head" in str(mappings) else None
    with refused(says, word):
        go.max_norm_muon(0.1, NO_GAUGE, *mappings, sizes=sizes).init(params)


# Ranges of a fused kernel ------------------------------------------------------------------------------

LENGTHS = {"q": 32, "k": 8, "v": 8}
RANGES = ("0:32", "32:40", "40:48")
# Name → the fused kernel's axes, the parts' axes, the shape of a part of some length, and the axis that is fused.
FUSED: dict[str, tuple[Any, str, Any, int]] = {
    "lone ranges": ([f"_ unit={x}" for x in RANGES], "_ unit", lambda n: (16, n), 1),
    "first axis": ([f"(head unit)={x} _" for x in RANGES], "unit _", lambda n: (n, 16), 0),
    "scanned": ([f"layer _ (head unit)={x}" for x in RANGES], "layer _ unit", lambda n: (3, 16, n), 2),
    "inputs in two axes": ([f"_ _ unit={x}" for x in RANGES], "_ _ unit", lambda n: (4, 4, n), 2),
    "index": (["_ unit=0:32", "_ (kv=0 unit)=32:48", "_ (kv=1 unit)=32:48"], "_ unit", lambda n: (16, n), 1),
}


@pytest.mark.slow_rows("*-False", "inputs in two axes-True", "scanned-True", "lone*", "first axis-True")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("name", FUSED)
def test_ranges_step_as_kernels_of_their_own(name: str, nesterov: bool, x64: None) -> None:
    """Three steps, with momentum, from norms below and above the bound; one whole matrix takes other steps."""
    axes, part_axes, shape, axis = FUSED[name]
    sizes = {"head": 2} if "(head" in str(axes) else {"kv": 2} if name == "index" else {}
    trees = [{part: _noise(10 * seed + n, *shape(length)) for n, (part, length) in enumerate(LENGTHS.items())} | SHIFT
             for seed in range(4)]
    trees[0] |= {part: trees[0][part] / (8 if part == "q" else 2) for part in LENGTHS}

    def joined(tree: Any) -> Any:
        return SHIFT | {"fused": jnp.concatenate([tree[part] for part in LENGTHS], axis)}

    def end(neurons: Any, params: Any, *gradients: Any, **options: Any) -> Any:
        tx = go.max_norm_muon(0.02, NO_GAUGE, neurons, nesterov=nesterov, **options)
        return driven(tx, params, gradients)[0]

    start, *gradients = map(joined, trees)
    one = end({"fused": tuple(axes)}, start, *gradients, sizes=sizes)["fused"]
    whole, apart = end({"fused": part_axes}, start, *gradients), end(dict.fromkeys(LENGTHS, part_axes), *trees)
    moved = float(jnp.linalg.norm(one - start["fused"]))
    assert moved > 0.1
    assert float(jnp.linalg.norm(one - joined(apart)["fused"])) <= 1e-10 * moved
    assert float(jnp.linalg.norm(one - whole["fused"])) > 0.05 * moved


# What init tells, and what a state is for ----------------------------------------------------------------


@pytest.mark.parametrize("gauge", [NO_GAUGE, go.rescale({"w": "_ channel"}, {"other": "channel _"})], ids=repr)
def test_matrices_that_no_mapping_lists_are_named(gauge: go.Gauge) -> None:
    """Whether a gauge binds them or not; vectors, single rows and scanned biases of a gauge are none."""
    params = {"w": jnp.ones((4, 4)), "other": jnp.ones((4, 2)), "row": jnp.ones((1, 4)), "bias": jnp.ones(4), **SHIFT}
    tx = go.max_norm_muon(0.1, gauge, {"w": "_ neuron"})
    with pytest.warns(UserWarning, match="no mapping lists 1 matrix") as told:
        state = tx.init(params)
    assert len(told) == 1
    for part in ("max_norm_muon", "found:    'other' (4, 2)", "expected:", "remedy:", "half of the learning rate"):
        assert part in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go.max_norm_muon(0.1, gauge, {"w": "_ neuron", "other": "_ neuron"}).init(params)
        go.max_norm_muon(0.1, gauge, {"w": "_ neuron"}, {"other": "token _"}).init(params)
        tx.update(params, state, params)
        tx.init({})


def test_of_a_report_only_undecided_leaves_are_named() -> None:
    """The report knows that a leaf that is in none of its mappings is no kernel."""
    said = namedtuple("said", "turning neurons embeddings undecided")
    params = {"w": jnp.ones((4, 4)), "biases": jnp.ones((2, 4)), "free": jnp.ones((3, 4)), **SHIFT}
    report = said([NO_GAUGE], {"w": "_ neuron"}, {}, {"free": "no kernel is applied to it"})
    with pytest.warns(UserWarning, match="no mapping lists 1 matrix\n.*'free'"):
        go.max_norm_muon(0.1, report).init(params)
    with pytest.warns(UserWarning, match="no mapping lists 2 matrices"):
        go.max_norm_muon(0.1, report, report.neurons).init(params)


def test_scanned_biases_are_no_matrices() -> None:
    up = jnp.ones((2, 4, 4))
    params = {"up": up, "bias": up[:, 0], "down": up, "free": up[:, 0]}
    gauge = go.rescale({"up": "layer _ channel", "bias": "layer channel"}, {"down": "layer channel _"})
    with pytest.warns(UserWarning, match=r"no mapping lists 1 matrix\n.*'free'"):
        go.max_norm_muon(0.1, gauge, {"up": "layer _ n", "down": "layer _ n"}).init(params)
