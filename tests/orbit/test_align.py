"""Alignment: it finds a random element again, on every row of the registers and on every decoder."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from tests.cases import DISCRETE_CASES, FLAT_CASES, GAUGE_CASES, GaugeCase
from tests.quick import jit, rows
from tests.refusals import each_refused
from tests.twins import normal

Tree = Any

QUICK = (
    "user_gauge/translation", "rope_torus/half", "head_linear/lora", "product/residual_layernorm",
    "permutation/rotated_heads", "permutation/chain", "embedding_shift/positions",
)
CASES = {case.name: case for case in (*GAUGE_CASES, *FLAT_CASES, *DISCRETE_CASES)}
everywhere = rows(CASES.values(), QUICK)


def _apart(found: Tree, expected: Tree) -> float:
    """The norm of the difference of two trees, relative to that of the second."""
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True)]
    return float(np.sqrt(sum(np.sum((x - y) ** 2) for x, y in pairs) / sum(np.sum(y**2) for _, y in pairs)))


def _two_functions(case: GaugeCase) -> tuple[Tree, Tree]:
    return case.params(jax.random.key(1)), case.params(jax.random.key(5))


@pytest.mark.slow_rows("*rotated_heads", "float32-*")
@everywhere
def test_a_random_element_is_found_again(case: GaugeCase, dtype: str) -> None:
    """And the move back changes no output, in both precisions."""
    group, a = go.product(case.gauges()), case.params(jax.random.key(1))
    size, recovered, same = (1.0, 1e-12, 1e-12) if dtype == "float64" else (0.3, 2e-4, 1e-5)
    b = group.act(group.sample(jax.random.key(3), a, size), a)
    nearest = group.act(go.orbit.align(a, b, case.gauges()), b)
    assert _apart(nearest, a) <= recovered < 1e-2 < _apart(b, a)
    loss = jit(case.loss)
    assert abs(float(loss(nearest)) - float(loss(b))) <= same * abs(float(loss(b)))


@pytest.mark.slow
@everywhere
def test_functions_are_told_apart_and_twins_are_not(case: GaugeCase, x64: None) -> None:
    """The distance does not depend on which of a function's weights are given."""
    gauges, (a, b), group = case.gauges(), _two_functions(case), go.product(case.gauges())
    twin, apart = group.act(group.sample(jax.random.key(3), a), a), go.orbit.distance(a, b, gauges)
    assert go.orbit.distance(a, twin, gauges) <= 1e-12 and (apart > 0.1 or case.name == "key_bias/mha")
    if len(gauges) == 1 and gauges[0].name != "permutation":
        assert abs(go.orbit.distance(twin, b, gauges) - apart) <= 1e-6 * apart


@pytest.mark.slow_rows("[!rph]*", "*rotation*", "product*")
@pytest.mark.parametrize("name", [
    "rescale/degree_2", "permutation/units", "head_rotation/bias", "head_linear/value_out", "rope_linear/half",
    "product/gpt", "norm_scale/one_plus", "bias_absorption/norm", "residual_rotation/plain",
])
def test_no_small_move_comes_nearer(name: str, x64: None) -> None:
    """Of two different functions: the point found is a local minimum of the distance."""
    group, (a, b) = go.product(CASES[name].gauges()), _two_functions(CASES[name])
    nearest = group.act(go.orbit.align(a, b, group), b)
    least = _apart(nearest, a)
    assert least < _apart(b, a)
    for seed in range(10):
        moved = group.act(group.sample(jax.random.key(seed), nearest, 1e-3), nearest)
        assert _apart(moved, a) >= least * (1.0 - 1e-5)


@pytest.mark.parametrize("degree", [1.0, 2.0])
def test_scales_have_the_least_value_of_a_dense_grid(degree: float, x64: None) -> None:
    """Of sides that point away from each other, too, where the problem has several minima."""
    draw = np.random.default_rng(0).normal
    a, b = ({"up": draw(size=(2, 200)), "down": draw(size=(200, 2))} for _ in range(2))
    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"}, degree=degree)

    def loss(x: Any) -> Any:
        up = np.sum((a["up"] - np.exp(x) * b["up"]) ** 2, 0)
        return up + np.sum((a["down"] - np.exp(-degree * x)[..., None] * b["down"]) ** 2, -1)

    best = np.min([loss(np.full(200, x)) for x in np.linspace(-4, 4, 4001)], 0)
    assert np.all(loss(np.asarray(go.orbit.align(a, b, gauge)[""])) <= best * (1 + 1e-6))


def test_the_order_of_units_is_that_of_an_exhaustive_search(x64: None) -> None:
    case = CASES["permutation/units"]
    (gauge,), (a, b) = case.gauges(), _two_functions(case)
    orders = [{"": jnp.array(order)} for order in itertools.permutations(range(5))]
    found, *others = (_apart(gauge.act(order, b), a) for order in (go.orbit.align(a, b, gauge), *orders))
    assert found == pytest.approx(min(others))


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
    beside_tokens = go.orbit.align(a, b, gauge, batches=iter([x]), fn=lambda p, x: (fn(p, x), jnp.argmax(fn(p, x), -1)))
    assert np.array_equal(beside_tokens[""], by_use[""])
    small = go.orbit.align(a, b, gauge, batches=[x], fn=lambda p, x: 1e-200 * fn(p, x))  # its squares are no float64
    assert np.array_equal(small[""], by_use[""])
    assert np.array_equal(by_use[""], gauge.inverse(g)[""]) and not np.array_equal(by_weights[""], by_use[""])


# What it is for -----------------------------------------------------------------------------------


def test_a_place_between_equal_networks_is_that_network() -> None:
    """In bfloat16, 1 − t and t do not add to 1."""
    ones = {"w": jnp.ones(3)}
    np.testing.assert_array_equal(go.orbit.interpolate(ones, ones, jnp.bfloat16(0.1))["w"], 1.0)


def test_an_average_of_twins_is_the_first_of_them(x64: None) -> None:
    case = CASES["permutation/chain"]
    group, a = go.product(case.gauges()), case.params(jax.random.key(1))
    twins = [group.act(group.sample(jax.random.key(seed), a), a) for seed in (2, 3)]
    mean = go.orbit.average([a, *twins], group)
    assert _apart(mean, a) <= 1e-12 < 0.1 < _apart(jax.tree.map(lambda *x: sum(x) / 3, a, *twins), a)
    assert _apart(go.orbit.average([a, *reversed(twins)], group), mean) <= 1e-12


def test_lines_and_barriers() -> None:
    a = {"up": jnp.array([[1.0, -2.0]], jnp.bfloat16), "down": jnp.array([[1.0], [3.0]]), "step": jnp.int32(4)}
    b = UNIT.act({"": jnp.array([1, 0])}, a)
    a["free"], b["free"] = jnp.array([2j]), jnp.array([4.0 + 0j])
    middle = go.orbit.interpolate(a, b, 0.5)
    assert middle["up"].tolist() == [[-0.5, -0.5]] and middle["step"] == 4 and middle["free"].tolist() == [2 + 1j]
    assert [x.dtype for x in jax.tree.leaves(middle)] == [x.dtype for x in jax.tree.leaves(a)]
    assert go.orbit.average([a, b], UNIT)["up"].tolist() == a["up"].tolist()
    aligned = UNIT.act(go.orbit.align(a, b, UNIT), b)
    assert aligned["up"].tolist() == a["up"].tolist()

    def loss(p: Tree) -> jax.Array:
        return jnp.mean(jnp.square(jax.nn.relu(jnp.array([[1.0], [-1.0]]) @ p["up"]) @ p["down"] - jnp.ones((2, 1))))

    losses = [float(loss(go.orbit.interpolate(a, b, k / 10))) for k in range(11)]
    assert go.measure.barrier(loss, a, a) == go.measure.barrier(loss, a, aligned) == 0.0
    assert np.isnan(go.measure.barrier(lambda p: jnp.log(p["up"].sum() * 0.0 - 1.0), a, b))
    assert go.measure.barrier(loss, a, b) == pytest.approx(max(0.0, max(losses) - losses[0]))
    assert go.measure.barrier(lambda p: -loss(p), a, b) == pytest.approx(losses[0] - min(losses))


SHORT = {"up": (4, 6), "down": (6, 3)}


@pytest.mark.parametrize(("gauges", "sizes"), [
    ([go.permutation({"up": "_ channel", "down": "channel _"})], (1e-20, 1e20)),
    ([go.head_rotation({"up": "_ basis", "down": "basis _"})], (1e-20, 1e20)),
    ([go.rope_torus({"up": "_ basis", "down": "basis _"})], (1e-20, 1e20)),
    ([go.rescale({"up": "_ channel"}, {"down": "channel _"}),
      go.permutation({"up": "_ channel", "down": "channel _"})], (1e-17, 1e17)),
], ids=["permutation", "head_rotation", "rope_torus", "scales and units"])
def test_twins_of_tiny_and_huge_weights_are_aligned(gauges: list[go.Gauge], sizes: tuple[float, float]) -> None:
    """In float32 their squares are 0 or infinite: twins were 1.1 apart, or were an error about numeric entries."""
    group = go.product(gauges)
    for size in sizes:
        a, other = (jax.tree.map(lambda x, n=size: np.float32(n) * x, normal(k, SHORT, "float32")) for k in (0, 2))
        b = group.act(group.sample(jax.random.key(1), a), a)
        assert go.orbit.distance(a, b, gauges) <= 1e-5 and go.orbit.distance(a, other, gauges) > 0.1


def test_different_functions_of_the_largest_weights_are_apart() -> None:
    """In float32 the inverse of 1e38 is 0, so that they were at the distance 0."""
    a = {"up": jnp.full((4, 3), 1e38), "down": jnp.full((3, 2), 1e38)}
    assert go.orbit.distance(a, a | {"up": jnp.zeros((4, 3))}, UNIT) == pytest.approx((2 / 3) ** 0.5)


# Bad input ----------------------------------------------------------------------------------------

UNIT = go.permutation({"up": "_ channel", "down": "channel _"})
TREE: Any = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
align = functools.partial(go.orbit.align, TREE)


def test_a_level_loss_has_no_barrier() -> None:
    assert go.measure.barrier(lambda p: 3.0, TREE, TREE) == 0.0


test_errors_say_what_to_write = each_refused([
    (lambda: align(TREE | {"up": jnp.ones((2, 4))}, UNIT), "align: two trees that differ at 'up'"),
    (lambda: align(TREE | {"bias": jnp.ones(3)}, UNIT), "no leaf 'bias' among 2 leaves, as in the first"),
    (lambda: go.orbit.distance(TREE, {"up": TREE["up"]}, UNIT), "distance: two trees that differ at 'down'"),
    (lambda: go.orbit.interpolate(TREE, {"up": TREE["up"]}, 0.5), "interpolate: two trees that differ at 'down'"),
    (lambda: go.orbit.interpolate(TREE, TREE | {"up": 1j * TREE["up"]}, 0.5), "complex numbers in the second"),
    (lambda: go.orbit.interpolate(TREE, TREE, jnp.ones(1)), "a `t` that is no single number"),
    (lambda: go.orbit.interpolate(TREE, TREE, jax.random.key(0)), "an array of key"),
    (lambda: go.orbit.interpolate(TREE, TREE, "0.5"), "t='0.5'"),  # type: ignore[arg-type]
    (lambda: go.measure.barrier(lambda p: 0.0, TREE, {}), "interpolate: two trees that differ at"),
    (lambda: go.measure.barrier(lambda p: p["up"], TREE, TREE), "barrier: a loss that is no scalar"),
    (lambda: go.measure.barrier(lambda: 0.0, TREE, TREE), "of other arguments"),  # type: ignore[arg-type, misc]
    (lambda: go.measure.drift(TREE, TREE | {"up": jnp.ones((5, 3))}, UNIT), "drift: two trees that differ at 'up'"),
    (lambda: go.measure.quotient_arc_length([TREE | {"b": jnp.ones(n)} for n in (3, 1)], UNIT), "differ at 'b'"),
    (lambda: align(TREE, go.permutation({"gate": "_ channel"})), "no leaf matches 'gate'"),
    (lambda: align(TREE, UNIT, batches=[1]), "batches and a function come together"),
    (lambda: align(TREE, UNIT, fn=lambda p, x: x), "batches and a function come together"),
    (lambda: align(TREE, UNIT, batches=[], fn=lambda p, x: x), "with at least one batch"),
    (lambda: align(TREE, UNIT, [1], lambda p, x, y: x), r"function\(params, \*batch\)"),  # type: ignore[arg-type, misc]
    (lambda: align(TREE, UNIT, [1], lambda p, x: jnp.argmax(p["up"], -1)), "nothing to compare"),
    (lambda: align(TREE, UNIT, jnp.ones((1, 2)), lambda p, x: p["up"]), "batches is one array"),
    (lambda: align(TREE, UNIT, {"x": jnp.ones((1, 2))}, lambda p, x: p["up"]), "batches is a dict"),
    (lambda: align(TREE, UNIT, [1], lambda p, x: TREE["up"]), "fn does not depend on the leaves of these gauges"),
    (lambda: align(TREE, UNIT, [1], lambda p, x: p["up"] * jnp.nan), "derivatives of fn that are not finite"),
    (lambda: go.orbit.align(TREE, {**TREE, "up": TREE["up"] * jnp.nan}, UNIT), "'up' of b is not finite"),
    (lambda: go.orbit.average([], UNIT), "average: no list of trees"),
    (lambda: go.orbit.average(TREE, UNIT), "average: no list of trees"),
    (lambda: align(TREE, TREE), "no gauges"),
])


def test_heads_that_determine_no_matrix_stay(x64: None) -> None:
    """Heads of six dimensions on a stream of four: the matrix had entries of any size, and the distance was NaN."""
    gauge = go.head_linear({"v": "_ basis", "b": "basis"}, {"o": "basis _"})
    a = {"v": np.ones((4, 6)) + np.eye(4, 6), "b": np.ones(6), "o": np.ones((6, 4)) - np.eye(6, 4)}
    b = gauge.act(gauge.sample(jax.random.key(0), a, 0.3), a)
    with pytest.warns(UserWarning, match=r"(?s)align: heads without full rank in 'v'.*align only rotates these heads"):
        back = gauge.act(go.orbit.align(a, b, gauge), b)
    for name in ("v", "b"):
        np.testing.assert_allclose(back[name] @ back["o"], a[name] @ a["o"], rtol=1e-9)
        np.testing.assert_allclose(back[name] @ back["v"].T, b[name] @ b["v"].T, rtol=1e-9)  # a rotation, no matrix
