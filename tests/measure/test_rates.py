"""Power laws, on synthetic ones and on the diagonal network; lengths, against closed forms and for twins."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from examples.studies import diagonal_network
from gauge_optax.measure.rates import KLOrder
from tests.quick import jit
from tests.refusals import each_refused
from tests.twins import normal, normal_like

Tree = Any
CONFIG = diagonal_network.FULL
RESCALE = diagonal_network.GAUGE
LENGTHS = np.logspace(0, -1.5, 60)


# Power laws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("along", [0.0, 0.6, 0.9], ids=["white", "correlated", "strongly correlated"])
@pytest.mark.parametrize("exponent", [1.0, 2.0, 4.0])
def test_the_interval_covers_the_truth(exponent: float, along: float) -> None:
    """A fit that is not readable has no interval, and does not count as covered."""
    rng, missed, readable = np.random.default_rng(0), 0, 0
    for _ in range(200):
        noise = rng.normal(size=60)
        for k in range(1, 60):
            noise[k] = along * noise[k - 1] + np.sqrt(1 - along**2) * noise[k]
        fit = go.measure.power_law(LENGTHS, 3.0 * LENGTHS**exponent * np.exp(0.1 * noise))
        readable += fit.readable
        missed += fit.readable and not fit.interval[0] <= exponent <= fit.interval[1]
        assert not fit.readable or along > 0.6 or fit.interval[1] - fit.interval[0] < 0.4
    assert missed <= (0.18 if along > 0.6 else 0.1) * readable and readable >= (120 if along > 0.6 else 195)


BENT = LENGTHS**2 * (1.0 + 9.0 * (LENGTHS > 0.3))
NOISE = np.exp(4.0 * np.random.default_rng(0).normal(size=60))


@pytest.mark.parametrize(("lengths", "values", "reasons"), [
    (LENGTHS, LENGTHS**2 + 0.02, ["drifts"]),
    (LENGTHS, LENGTHS ** (2 - 0.3 * np.log(LENGTHS)), ["drifts"]),
    (LENGTHS, 1.0 / LENGTHS, ["do not fall"]),
    (LENGTHS, LENGTHS - 0.5, ["not positive"]),
    (LENGTHS, NOISE * LENGTHS, ["noise", "do not fall"]),
    (LENGTHS[:5], BENT[:5], ["5 points"]),
    (LENGTHS[:30], BENT[:30], ["lengths span"]),
    (LENGTHS * np.inf, BENT, ["lengths that are not finite"]),
    (np.repeat([1.0, 0.1], 30), BENT, ["too few different lengths"]),
])
def test_what_is_no_power_law_is_unreadable(lengths: np.ndarray, values: np.ndarray, reasons: list[str]) -> None:
    fit = go.measure.power_law(lengths, values, span=6.0)
    assert not fit.readable and fit.interval == (-np.inf, np.inf)
    assert str(fit).startswith("unreadable: ") and any(reason in fit.reason for reason in reasons), fit.reason


def test_a_window_leaves_out_what_is_far_from_the_minimum() -> None:
    assert not go.measure.power_law(LENGTHS, BENT).readable
    near = go.measure.power_law(LENGTHS, BENT, window=(0.0, 0.3))
    assert near.readable and near.exponent == pytest.approx(2.0) and near.points < 60


def test_a_table_has_a_cell_per_layer_and_observable() -> None:
    table = go.measure.rate_table(LENGTHS, {"a": {"x": LENGTHS, "y": 1.0 / LENGTHS}, "b": {"x": LENGTHS**2}})
    assert table.readable == 2 and table["b", "x"].exponent == pytest.approx(2.0)
    numbered: Any = {0: {"x": LENGTHS}}
    assert str(go.measure.rate_table(LENGTHS, numbered)).splitlines()[1] == "0      1.00"


law: Any = go.measure.power_law
test_what_can_be_no_fit_is_refused = each_refused([
    *((functools.partial(law, LENGTHS, LENGTHS, window=window), "power_law: bad window")
      for window in (None, (0.1,), (1.0, 0.1), (float("nan"), 1.0))),
    (lambda: law(LENGTHS, LENGTHS, drift=float("nan")), "bad drift"),
    (lambda: law(LENGTHS, LENGTHS, span=float("nan")), "bad span"),
    (lambda: jax.jit(law)(LENGTHS, LENGTHS), "called inside jit"),
    (lambda: go.measure.rate_table(LENGTHS, {"a": LENGTHS}), "pass {layer: {observable: values}}"),  # type: ignore[dict-item]
])


# Lengths ------------------------------------------------------------------------------------------


GAUGES = [
    go.head_rotation({"value": "_ head basis", "out": "head basis _"}),
    go.rescale({"up": "_ channel"}, {"down": "channel _"}),
]


@pytest.mark.slow_rows("balanced")
@pytest.mark.parametrize("at", ["balanced", "slice"])
def test_twins_travel_equally_far_and_orbits_do_not_count(x64: None, at: str) -> None:
    points = [normal(0, {"value": (6, 2, 3), "out": (2, 3, 5), "up": (5, 4), "down": (4, 5)})]
    for seed in range(1, 7):
        points.append(optax.tree.add_scale(points[-1], 0.03, normal_like(seed, points[0])))
    group = go.product(GAUGES)
    element = group.sample(jax.random.key(0), points[0])
    lengths = go.measure.quotient_arc_length(points, GAUGES, at=at)
    twins = go.measure.quotient_arc_length([group.act(element, point) for point in points], GAUGES, at=at)
    np.testing.assert_allclose(twins, lengths, rtol=1e-9)
    assert lengths[-1] == 0.0 and np.all(np.diff(lengths) < 0)
    scales = GAUGES[1].sample(jax.random.key(1), points[0])
    still = [points[0], GAUGES[1].act(scales, points[0]), points[0]]
    np.testing.assert_allclose(go.measure.quotient_arc_length(still, GAUGES, at=at), 0.0, atol=1e-9)


def _uneven_channels(draw: Any) -> tuple[Tree, Tree]:
    """Channels whose products have norms from 0.1 to 10, and a step."""
    sizes = np.logspace(-1, 1, 48)[:, None]
    make = lambda: {"up": draw(size=(3, 48)), "down": draw(size=(48, 3)) * sizes}  # noqa: E731
    return make(), make()


def _weak_head(draw: Any) -> tuple[Tree, Tree]:
    """A head with singular values from 1 to 0.01, and a step."""
    base = [np.linalg.qr(draw(size=(rows, 4)))[0] for rows in (9, 8, 4)]
    return (
        {"value": base[0] * np.logspace(0, -2, 4) @ base[2], "out": (base[1] @ base[2]).T},
        {"value": draw(size=(9, 4)), "out": draw(size=(4, 8))},
    )


UNEVEN = [
    (_uneven_channels, GAUGES[1], "slice"),
    (_weak_head, go.head_linear({"value": "_ basis"}, {"out": "basis _"}), "balanced"),
]


@pytest.mark.parametrize(("make", "gauge", "at"), UNEVEN, ids=["channels", "head"])
def test_lengths_of_uneven_weights_are_right_in_float32(make: Any, gauge: go.Gauge, at: str) -> None:
    point, step = jax.tree.map(np.float32, make(np.random.default_rng(0).normal))
    points = [point, jax.tree.map(lambda x, u: x + np.float32(1e-3) * u, point, step)]
    found = go.measure.quotient_arc_length(points, gauge, at=at)
    with jax.enable_x64(True):
        exact = go.measure.quotient_arc_length(jax.tree.map(np.float64, points), gauge, at=at)
    np.testing.assert_allclose(found, exact, rtol=1e-4)
    x, y = map(go.bind(gauge, point).slice_point, points)
    if at == "slice":  # each channel has one vertical vector (up, −down)
        change, pairs = jax.tree.map(np.subtract, y, x), (("up", 0, 1), ("down", 1, -1))
        along = sum(sign * (change[k] * x[k]).sum(axis) for k, axis, sign in pairs)
        whole = sum((change[k] ** 2).sum() for k, _, _ in pairs)
        norms = sum((x[k] ** 2).sum(axis) for k, axis, _ in pairs)
        assert found[0] == pytest.approx(np.sqrt(whole - (along**2 / norms).sum()), rel=1e-4)


@pytest.mark.filterwarnings("ignore:an empty list of gauges")
@pytest.mark.parametrize("gauges", [[], GAUGES[1]], ids=["none", "rescale"])
def test_tiny_steps_have_lengths_with_and_without_gauges(gauges: Any) -> None:
    points = [{"up": jnp.ones((1, 1)), "down": jnp.ones((1, 1)), "free": jnp.full(4, 1e-25 * k)} for k in (0, 1)]
    assert go.measure.quotient_arc_length(points, gauges) == pytest.approx([2e-25, 0.0], rel=1e-6)


def test_every_head_of_two_entries_is_held() -> None:
    draw = np.random.default_rng(0).normal
    points = [{name: np.float32(draw(size=(9, 32, 2))) for name in ("query", "key")} for _ in range(2)]
    found = go.measure.quotient_arc_length(points, go.head_rotation(dict.fromkeys(points[0], "_ head basis")))
    start, change = points[0], jax.tree.map(np.subtract, *points[::-1])
    x, dx = (np.concatenate(jax.tree.leaves(point)) for point in (start, change))
    along, norms = (dx[..., 1] * x[..., 0] - dx[..., 0] * x[..., 1]).sum(0), (x**2).sum((0, 2))
    assert found[0] == pytest.approx(np.sqrt((dx**2).sum() - (along**2 / norms).sum()), rel=1e-5)


def test_a_part_along_the_orbit_that_is_not_found_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gauge_optax.measure._metric._ROUNDS", 0)
    points = [{"u": jnp.ones((3, 2)), "d": jnp.ones((2, 3))}, {"u": 2.0 * jnp.eye(3)[:, :2], "d": jnp.ones((2, 3))}]
    with pytest.raises(ValueError, match="the part along the orbit was not found"):
        go.measure.quotient_arc_length(points, go.rescale({"u": "_ c"}, {"d": "c _"}), at="slice")


POINT = {"u": jnp.ones(2), "v": jnp.ones(2)}
test_messages = each_refused([
    (lambda: go.measure.power_law(LENGTHS, LENGTHS * (1 + 1j)), "power_law: complex numbers in values"),
    (lambda: go.measure.power_law(["a"], LENGTHS), "power_law: no numbers in lengths"),
    (lambda: go.measure.kl_order(LENGTHS, LENGTHS, of="loss"), "of='loss'"),
    (lambda: go.measure.kl_order(LENGTHS, LENGTHS[:3]), "60 lengths and 3 values"),
    (lambda: go.measure.quotient_arc_length([POINT], RESCALE), "at least two"),
    (lambda: go.measure.quotient_arc_length(POINT, RESCALE), "points that are no sequence"),  # type: ignore[arg-type]
    (lambda: go.measure.quotient_arc_length([POINT] * 2, RESCALE, at="middle"), 'at="balanced"'),
    (lambda: go.measure.quotient_arc_length([{**POINT, "free": 1j}] * 2, RESCALE), "a complex leaf 'free'"),
])


def test_lengths_of_infinite_weights_are_no_numbers() -> None:
    """An error said that channels were of too different sizes."""
    found = go.measure.quotient_arc_length([POINT, {**POINT, "u": jnp.full_like(POINT["u"], jnp.inf)}], RESCALE)
    assert np.isnan(found[0])


# The diagonal network -----------------------------------------------------------------------------


def _trained(tx: optax.GradientTransformation, steps: int) -> dict[str, np.ndarray]:
    """u and v of the 56 coordinates whose target is 0, (steps, 56)."""
    params, data = diagonal_network.make(CONFIG, 0)

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        updates, state = tx.update(jax.grad(diagonal_network.loss)(params, data), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    _, way = jit(lambda carry: jax.lax.scan(step, carry, None, length=steps))((params, tx.init(params)))
    return {name: np.asarray(x)[:, CONFIG.nonzero :] for name, x in way.items()}


def _on_quotient(way: dict[str, np.ndarray], channels: Any, last: int) -> KLOrder:
    """The order from the quotient Fisher along the approach, against the quotient arc length."""
    def function(p: Tree, x: jax.Array) -> jax.Array:
        return (x @ (p["u"] * p["v"]))[:, None]

    at = np.unique(np.linspace(0, last, 30).astype(int))
    points = [{name: jnp.asarray(x[k, channels]) for name, x in way.items()} for k in at]
    inputs = jnp.eye(points[0]["u"].size)
    lengths = go.measure.quotient_arc_length(points, RESCALE, end=jax.tree.map(jnp.zeros_like, points[0]))
    operators = [go.measure.quotient_fisher(go.measure.GGN(function, p, [inputs], "gaussian"), RESCALE) for p in points]
    return go.measure.kl_order(lengths, [*map(go.measure.directional_fisher, operators, points)])


def _as_stored(way: dict[str, np.ndarray], channel: int, last: int, end: tuple[float, float]) -> KLOrder:
    """The same without gauges: the way of u and v, and the Fisher along the direction of both at the start."""
    at = np.unique(np.linspace(0, last, 30).astype(int))
    u, v = (way[name][at, channel] for name in "uv")
    steps = np.append(np.hypot(np.diff(u), np.diff(v)), np.hypot(u[-1] - end[0], v[-1] - end[1]))
    return go.measure.kl_order(np.cumsum(steps[::-1])[::-1], (v * u[0] + u * v[0]) ** 2)


CHANNELS = range(0, 56, 8)


def test_ddc_recovers_the_order_of_every_channel_and_of_all_together(x64: None) -> None:
    way = _trained(go.ddc_adamw(1e-4, RESCALE, weight_decay=0.0), 1000)
    last = int(np.argmin(np.sum(np.abs(way["u"] * way["v"]), 1)))  # then it oscillates
    for channels in (*([channel] for channel in CHANNELS), slice(None)):
        found = _on_quotient(way, channels, last)
        assert found.readable and found.order == pytest.approx(2.0, rel=0.05), str(found)


def test_adamws_drifting_read_is_rejected(x64: None) -> None:
    """In the coordinates that are stored, u/v drifts on the way; DDC that keeps it reads the order there as well."""
    way = _trained(optax.adamw(CONFIG.learning_rate, weight_decay=0.0), 4000)
    for channel in CHANNELS:
        end = way["u"][-1, channel], way["v"][-1, channel]
        assert min(np.abs(end)) < 1e-12  # it has arrived
        for last in (100, 300, 999):
            assert not _as_stored(way, channel, last, end).readable
    assert not _on_quotient(way, slice(None), 999).readable
    held = _trained(go.ddc_adamw(1e-4, RESCALE, weight_decay=0.0, rest="balanced"), 900)
    for channel in CHANNELS:
        found = _as_stored(held, channel, 899, (0.0, 0.0))
        assert found.readable and found.order == pytest.approx(2.0, rel=0.05), str(found)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_balanced_length_has_the_scale_of_the_weights(scale: float) -> None:
    """On the slice a channel is read as 1 and written as 1e-24: its square underflowed, and the length was 479.8."""
    points = [normal(seed, {"up": (4, 3), "down": (3, 2)}, jnp.float32) for seed in (0, 1)]
    large, small = (go.measure.quotient_arc_length([jax.tree.map(lambda x, s=s: np.float32(s) * x, p) for p in points],
                                                   go.rescale({"up": "_ c"}, {"down": "c _"})) for s in (1.0, scale))
    np.testing.assert_allclose(small, scale * large, rtol=1e-5)
