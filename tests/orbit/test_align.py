"""Alignment: it finds a random element again, on every row of the registers, every decoder and every preset."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from gauge_optax.orbit.kinds import Stage, is_compact, is_constant, stage
from models import lm
from tests.cases import DISCRETE_CASES, FLAT_CASES, GAUGE_CASES, GaugeCase
from tests.quick import jit
from tests.refusals import refused

Tree = Any

QUICK = (
    "user_gauge/translation", "rope_torus/half", "head_linear/lora", "product/residual_layernorm",
    "permutation/rotated_heads", "permutation/chain",
)
rows = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.name in QUICK else pytest.mark.slow)
        for case in (*GAUGE_CASES, *FLAT_CASES, *DISCRETE_CASES)
    ],
    ids=lambda case: case.name,
)


def _apart(found: Tree, expected: Tree) -> float:
    """The norm of the difference of two trees, relative to that of the second."""
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True)]
    return float(np.sqrt(sum(np.sum((x - y) ** 2) for x, y in pairs) / sum(np.sum(y**2) for _, y in pairs)))


def _case(name: str) -> GaugeCase:
    return next(case for case in (*GAUGE_CASES, *FLAT_CASES, *DISCRETE_CASES) if case.name == name)


@pytest.mark.slow_rows("permutation/rotated_heads")
@rows
def test_a_random_element_is_found_again(case: GaugeCase, x64: None) -> None:
    """And the move back changes no output."""
    group, a = go.product(case.gauges()), case.params(jax.random.key(1))
    b = group.act(group.sample(jax.random.key(3), a), a)
    assert _apart(b, a) > 1e-2
    nearest = group.act(go.orbit.align(a, b, case.gauges()), b)
    assert _apart(nearest, a) <= 1e-12
    loss = jit(case.loss)  # type: ignore[arg-type]
    assert abs(float(loss(nearest)) - float(loss(b))) <= 1e-12 * abs(float(loss(b)))


@pytest.mark.parametrize("case", (*GAUGE_CASES, *FLAT_CASES, *DISCRETE_CASES), ids=lambda case: case.name)
def test_every_part_says_when_it_takes_its_turn(case: GaugeCase) -> None:
    """Its role does, so that a new class needs no rule; only turns and permutations are left on the slice."""
    s = go.bind(case.gauges(), case.params(jax.random.key(1))).slice
    turns = [turn for _, same in s.turns for turn in same]
    assert [part for part in s.acting if is_constant(part)] == [part for part, _, _ in reversed(s.constants)]
    assert {part for part in s.acting if is_compact(part)} == {*turns, *s.free}
    assert all(stage(part) is Stage.UNITS for part in s.free)
    assert all((stage(turn) is Stage.HEADS) == (turn in s.heads) for turn in turns)


@pytest.mark.slow
@rows
def test_functions_are_told_apart_and_twins_are_not(case: GaugeCase, x64: None) -> None:
    """The distance does not depend on which of a function's weights are given."""
    gauges, (a, b) = case.gauges(), (case.params(jax.random.key(seed)) for seed in (1, 5))
    group = go.product(gauges)
    twin = group.act(group.sample(jax.random.key(3), a), a)
    assert go.orbit.distance(a, twin, gauges) <= 1e-12
    apart = go.orbit.distance(a, b, gauges)
    assert apart > 0.1 or case.name == "key_bias/mha"
    if len(gauges) == 1 and gauges[0].name != "permutation":
        assert abs(go.orbit.distance(twin, b, gauges) - apart) <= 1e-6 * apart


@pytest.mark.parametrize("name", [
    "rescale/degree_2", "permutation/units", *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "head_rotation/bias", "head_linear/value_out", "rope_linear/half", "product/gpt", "norm_scale/one_plus",
        "bias_absorption/norm", "residual_rotation/plain"))
])
def test_no_small_move_comes_nearer(name: str, x64: None) -> None:
    """Of two different functions: the point found is a local minimum of the distance."""
    case = _case(name)
    group, (a, b) = go.product(case.gauges()), (case.params(jax.random.key(seed)) for seed in (1, 5))
    nearest = group.act(go.orbit.align(a, b, group), b)
    least = _apart(nearest, a)
    assert least < _apart(b, a)
    for seed in range(10):
        moved = group.act(group.sample(jax.random.key(seed), nearest, 1e-3), nearest)
        assert _apart(moved, a) >= least * (1.0 - 1e-5)


@pytest.mark.parametrize("degree", [1.0, 2.0])
def test_scales_have_the_least_value_of_a_dense_grid(degree: float, x64: None) -> None:
    """Of sides that point away from each other, too, where the problem has several minima."""
    generator = np.random.default_rng(0)
    shapes = {"up": (2, 200), "down": (200, 2)}
    a, b = ({name: jnp.asarray(generator.normal(size=s)) for name, s in shapes.items()} for _ in range(2))
    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"}, degree=degree)
    logs = np.asarray(go.orbit.align(a, b, gauge)[""])

    def loss(x: Any) -> Any:
        up = np.sum((np.asarray(a["up"]) - np.exp(x) * np.asarray(b["up"])) ** 2, 0)
        return up + np.sum((np.asarray(a["down"]) - np.exp(-degree * x)[..., None] * np.asarray(b["down"])) ** 2, -1)

    grid = np.linspace(-4, 4, 4001)
    best = np.min([loss(np.full(200, x)) for x in grid], 0)
    assert np.all(loss(logs) <= best * (1 + 1e-6))


def test_the_order_of_units_is_that_of_an_exhaustive_search(x64: None) -> None:
    case = _case("permutation/units")
    (gauge,), (a, b) = case.gauges(), (case.params(jax.random.key(seed)) for seed in (1, 5))
    found = _apart(gauge.act(go.orbit.align(a, b, gauge), b), a)
    orders = np.stack(np.meshgrid(*[np.arange(5)] * 5), -1).reshape(-1, 5)
    orders = [order for order in orders if len(set(order)) == 5]
    assert found == pytest.approx(min(_apart(gauge.act({"": jnp.asarray(order)}, b), a) for order in orders))


# By activations -----------------------------------------------------------------------------------


def test_units_are_matched_by_what_they_do(x64: None) -> None:
    """Whatever basis their inputs have: by weights, a rotation of the inputs hides which unit is which."""
    gauge = go.permutation({"up": "_ channel", "down": "channel _"})
    turn = np.linalg.qr(np.random.default_rng(3).normal(size=(6, 6)))[0]
    a = {"read": jnp.eye(6), "up": jax.random.normal(jax.random.key(0), (6, 9)), "down": jnp.ones((9, 1)) * 0.1}
    g = gauge.sample(jax.random.key(1), a)
    b = gauge.act(g, {"read": jnp.asarray(turn), "up": jnp.asarray(turn.T) @ a["up"], "down": a["down"]})
    x = jax.random.normal(jax.random.key(2), (32, 6))

    def fn(p: Tree, x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x @ p["read"] @ p["up"]) @ p["down"]

    assert _apart(fn(a, x), fn(b, x)) <= 1e-12
    by_use, by_weights = go.orbit.align(a, b, gauge, batches=[x], fn=fn), go.orbit.align(a, b, gauge)
    assert np.array_equal(by_use[""], gauge.inverse(g)[""]) and not np.array_equal(by_weights[""], by_use[""])


# Whole models -------------------------------------------------------------------------------------

SIZES: dict[str, Any] = dict(vocab=9, d_model=8, layers=2, heads=4, kv_heads=2, d_head=4, d_ff=7, max_len=5)
CONFIGS: Mapping[str, dict[str, Any]] = {
    "gpt": {}, "gelu": {"mlp": "gelu", "norm_eps": 0.0}, "tied": {"tied": True, "mlp": "relu2"},
    "no_bias": {"bias": False}, "one_plus": {"norm": "rmsnorm", "norm_one_plus": True, "bias": False},
    "llama": {"norm": "rmsnorm", "rope": True, "mlp": "swiglu", "bias": False},
    "qwen": {"norm": "rmsnorm", "rope": True, "mlp": "swiglu", "bias": False, "qk_norm": True, "norm_eps": 0.0},
    "qk_norm": {"qk_norm": True}, "mqa": {"kv_heads": 1}, "mha": {"kv_heads": 4, "rope": True},
}


def _general(params: Tree, seed: int) -> Tree:
    """No zero bias, no unit scale."""
    generator = np.random.default_rng(seed)

    def drawn(x: Any) -> jax.Array:
        noise = generator.normal(size=x.shape)
        return jnp.asarray(0.5 * noise if x.ndim > 1 else np.asarray(x) + 0.2 * noise, float)

    return jax.tree.map(drawn, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("linear", [False, True], ids=["rotations", "linear"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_decoders(name: str, linear: bool, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        config = lm.LMConfig(**(SIZES | CONFIGS[name]))
        shapes, loss = lm.params_and_loss(config, jax.random.key(0))
        gauges = [*lm.whole_gauges(config, linear), *lm.permutations(config)]
        _check(gauges, _general(shapes, 0), _general(shapes, 1), lambda p: loss(p, _tokens(config.vocab)), dtype)


def _tokens(vocab: int) -> np.ndarray:
    return np.random.default_rng(2).integers(vocab, size=(3, 6))


def _check(gauges: list[go.Gauge], a: Tree, other: Tree, loss: Callable[[Tree], Any], dtype: str) -> None:
    group = go.product(gauges)
    with jax.enable_x64(True):
        scale = 1.0 if dtype == "float64" else 0.3
        g = group.sample(jax.random.key(1), a, scale)
    b = group.act(jax.tree.map(lambda x: np.asarray(x, dtype if x.dtype == float else x.dtype), g), a)
    nearest = group.act(go.orbit.align(a, b, gauges), b)
    recovered, same = (1e-9, 1e-12) if dtype == "float64" else (2e-4, 1e-5)
    moved = _apart(loss(nearest), loss(b))
    print(f"recovered to {_apart(nearest, a):.1e} of {_apart(b, a):.1e}; outputs moved by {moved:.1e}")
    assert _apart(nearest, a) <= recovered and moved <= same
    assert go.orbit.distance(a, b, gauges) <= recovered < 0.1 < go.orbit.distance(a, other, gauges)


# What it is for -----------------------------------------------------------------------------------


def test_an_average_of_twins_is_the_first_of_them(x64: None) -> None:
    case = _case("permutation/chain")
    group, a = go.product(case.gauges()), case.params(jax.random.key(1))
    twins = [group.act(group.sample(jax.random.key(seed), a), a) for seed in (2, 3)]
    mean = go.orbit.average([a, *twins], group)
    assert _apart(mean, a) <= 1e-12 < 0.1 < _apart(jax.tree.map(lambda *x: sum(x) / 3, a, *twins), a)
    assert _apart(go.orbit.average([a, *reversed(twins)], group), mean) <= 1e-12


def test_lines_and_barriers() -> None:
    gauge = go.permutation({"up": "_ channel", "down": "channel _"})
    a = {"up": jnp.array([[1.0, -2.0]], jnp.bfloat16), "down": jnp.array([[1.0], [3.0]]), "step": jnp.int32(4)}
    b = gauge.act({"": jnp.array([1, 0])}, a)
    middle = go.orbit.interpolate(a, b, 0.5)
    assert middle["up"].tolist() == [[-0.5, -0.5]] and middle["step"] == 4
    assert [x.dtype for x in jax.tree.leaves(middle)] == [x.dtype for x in jax.tree.leaves(a)]
    assert go.orbit.average([a, b], gauge)["up"].tolist() == a["up"].tolist()

    def loss(p: Tree) -> jax.Array:
        return jnp.mean(jnp.square(jax.nn.relu(jnp.array([[1.0], [-1.0]]) @ p["up"]) @ p["down"] - jnp.ones((2, 1))))

    plain, aligned = (go.measure.barrier(loss, a, x) for x in (b, gauge.act(go.orbit.align(a, b, gauge), b)))
    losses = [float(loss(go.orbit.interpolate(a, b, k / 10))) for k in range(11)]
    assert go.measure.barrier(loss, a, a) == aligned == 0.0
    assert plain == pytest.approx(max(0.0, max(losses) - losses[0]))
    assert go.measure.barrier(lambda p: -loss(p), a, b) == pytest.approx(losses[0] - min(losses))


# Bad input ----------------------------------------------------------------------------------------

UNIT = go.permutation({"up": "_ channel", "down": "channel _"})
TREE = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}


class Bad(NamedTuple):
    call: Callable[[], Any]
    message: str


@pytest.mark.parametrize(
    "bad",
    [
        Bad(
            lambda: go.orbit.align(TREE, TREE | {"up": jnp.ones((2, 4))}, UNIT), r"align: two trees that differ at 'up'"
        ),
        Bad(
            lambda: go.orbit.align(TREE, TREE | {"bias": jnp.ones(3)}, UNIT),
            r"no leaf 'bias' among 2 leaves, as in the first",
        ),
        Bad(lambda: go.orbit.distance(TREE, {"up": TREE["up"]}, UNIT), r"distance: two trees that differ at 'down'"),
        Bad(
            lambda: go.orbit.interpolate(TREE, {"up": TREE["up"]}, 0.5), r"interpolate: two trees that differ at 'down'"
        ),
        Bad(lambda: go.measure.barrier(lambda p: 0.0, TREE, {}), r"interpolate: two trees that differ at"),
        Bad(lambda: go.orbit.align(TREE, TREE, go.permutation({"gate": "_ channel"})), r"no leaf matches 'gate'"),
        Bad(lambda: go.orbit.align(TREE, TREE, UNIT, batches=[1]), r"batches and a function come together"),
        Bad(lambda: go.orbit.align(TREE, TREE, UNIT, fn=lambda p, x: x), r"batches and a function come together"),
        Bad(lambda: go.orbit.align(TREE, TREE, UNIT, batches=[], fn=lambda p, x: x), r"with at least one batch"),
        Bad(lambda: go.orbit.align(TREE, TREE, UNIT, [1], lambda p, x, y: x), r"model\(params, \*batch\)"),
        Bad(lambda: go.orbit.average([], UNIT), r"average: no list of trees"),
        Bad(lambda: go.orbit.average(TREE, UNIT), r"average: no list of trees"),
        Bad(lambda: go.orbit.align(TREE, TREE, TREE), r"no gauges"),
    ],
    ids=lambda bad: bad.message[:30],
)
def test_errors_say_what_to_write(bad: Bad) -> None:
    with refused(bad.message):
        bad.call()
