"""DDC as an optimizer for slice coordinates: twins of its modes, lengths, heads, motion along orbits; the split.

`go.ddc_adamw` is not this yet (tests/test_ddc.py).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import with_leaves
from gauge_optax.gauges.chart import split
from gauge_optax.inner.ddc import Options, ScaleByDDCState, ddc
from gauge_optax.quotient import wrapped
from models import lm
from tests.cases import GAUGE_CASES, GaugeCase
from tests.quick import jit
from tests.test_slice import CONFIGS, ODD, Tree, _apart, _loss, _odd, _start, _step, _train
from tests.tolerances import tolerance

CASES = {case.name: case for case in GAUGE_CASES}
MODES: dict[str, dict[str, Any]] = {
    "body_frame_topk": {},
    "body_frame": {"v_mode": "body_frame"},
    "per_head_scalar": {"v_mode": "per_head_scalar"},
    "per_head_matrix": {"v_mode": "per_head_matrix"},
    "none": {"v_mode": "none"},
    "log": {"radial": "log", "nesterov": True},
    "refreshed": {"refresh_every": 3},
    "sgd": {"vertical": "sgd"},
    "adam": {"vertical": "adam"},
}
DEFAULTS = Options(0.9, 0.999, 1e-8, 0.0, None, False, "frozen", "body_frame_topk", "linear", 1.0, 0.0, 1e-3, 0.1, None)


def _tx(gauges: Any, rate: float = 1e-2, decay: float = 0.1, **options: Any) -> optax.GradientTransformation:
    group = go.product(gauges)
    own = DEFAULTS._replace(**options)
    inner = optax.chain(ddc(group, own), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate))
    return wrapped("ddc", inner, group, hold=False, still=own.vertical == "frozen")


def _check(name: str, group: Any, tx: optax.GradientTransformation, loss: Any, params: Tree, dtype: str) -> None:
    """Trains a point and its twin, and compares every leaf."""
    g, init, step = group.sample(jax.random.key(3), params), jit(tx.init), _step(tx, loss)
    ours, losses = _train(init, step, params)
    theirs, twin_losses = _train(init, step, group.act(g, params))
    errors = _apart(theirs, group.act(g, ours))
    print(f"{name} {dtype}: {max(errors.values()):.1e}, loss {np.max(np.abs(twin_losses - losses)):.1e}")
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]
    assert max(errors.values()) <= tolerance("quotient_twins", dtype), errors


# Twins --------------------------------------------------------------------------------------------

QUICK = ("body_frame_topk", "per_head_matrix", "log", "adam")
ROWS = [pytest.param("gpt", m, "float64", marks=() if m in QUICK else pytest.mark.slow) for m in MODES]
ROWS += [pytest.param("llama", m, d, marks=pytest.mark.slow) for m in MODES for d in ("float64", "float32")]


@pytest.mark.parametrize(("name", "mode", "dtype"), ROWS)
def test_twins_of_every_mode(name: str, mode: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        group = go.product(lm.gauges(CONFIGS[name]))
        _check(f"{name} {mode}", group, _tx(group, **MODES[mode]), _loss(name), _start(name, dtype), dtype)


@pytest.mark.parametrize("start", [
    pytest.param(s, marks=() if s in ("zero_outputs", "dead_unit") else pytest.mark.slow) for s in ODD
])  # fmt: skip
def test_odd_starts(start: str) -> None:
    group = go.product(lm.gauges(CONFIGS["gpt"]))
    _check(start, group, _tx(group), _loss("gpt"), _odd(start, _start("gpt", "float32")), "float32")


SPECTRA = {
    "orthogonal": (1.0, 1.0, 1.0, 1.0),
    "equal_pair": (1.0, 1.0, 2.0, 0.5),
    "rank_one": (1.0, 0.0, 0.0, 0.0),
    "faint": (2.0, 3e-2, 2e-2, 1e-2),  # eigenvalues below the 1e-3 that body_frame_topk divides
}


@pytest.mark.parametrize(("spectrum", "dtype"), [
    ("orthogonal", "float32"),
    ("rank_one", "float64"),
    *(pytest.param(s, d, marks=pytest.mark.slow) for s in ("equal_pair", "faint") for d in ("float64", "float32")),
])  # fmt: skip
def test_degenerate_heads(spectrum: str, dtype: str) -> None:
    """Heads whose Gram matrix has these eigenvalues, squared: an eigenbasis is what rounding makes of them."""
    with jax.enable_x64(dtype == "float64"):
        keys = jax.random.split(jax.random.key(5), 4)
        shapes = {"query": (8, 2, 4), "key": (8, 2, 4), "value": (8, 2, 4), "out": (2, 4, 8)}
        drawn = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}
        params = {n: _with_spectrum(x, SPECTRA[spectrum], n == "out") for n, x in drawn.items()}
        gauges = [
            go.head_rotation({"query": "_ head basis", "key": "_ head basis"}),
            go.head_rotation({"value": "_ head basis", "out": "head basis _"}),
        ]
        x = jax.random.normal(jax.random.key(6), (3, 5, 8))
        group, tx = go.product(gauges), _tx(gauges)

        def loss(p: Tree) -> jax.Array:
            q, k, v = (jnp.einsum("btd,dhe->bhte", x, p[n]) for n in ("query", "key", "value"))
            weights = jax.nn.softmax(jnp.einsum("bhte,bhse->bhts", q, k), -1)
            out = jnp.einsum("bhts,bhse,hed->btd", weights, v, p["out"])
            return jnp.mean(jnp.square(out - jnp.roll(x, 1, -1)))

        _check(spectrum, group, tx, loss, params, dtype)


def _with_spectrum(leaf: jax.Array, sizes: tuple[float, ...], wide: bool) -> jax.Array:
    rows = jnp.moveaxis(leaf, -1, -2) if wide else jnp.moveaxis(leaf, 1, 0)  # (heads, rows, 4)
    u, _, vt = jnp.linalg.svd(rows, full_matrices=False)
    made = (u * jnp.array(sizes)) @ vt
    return jnp.moveaxis(made, -1, -2) if wide else jnp.moveaxis(made, 0, 1)


# Lengths ------------------------------------------------------------------------------------------


def _unit(degree: int) -> tuple[Any, Tree]:
    """One channel on the slice: an anchor of norm 1, and what it feeds, of length 3 in 4 entries."""
    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"}, degree=degree)
    return gauge, {"up": jnp.array([[0.6], [0.8]]), "down": jnp.full((1, 4), 1.5)}


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("radial", ["linear", "log"])
def test_the_first_step_of_a_length(radial: str, degree: int, x64: None) -> None:
    """√n·lr in s, which is what Adam moves it by; √(p² + 1)·lr in log s (DDC B.4)."""
    gauge, params = _unit(degree)
    tx, rate = _tx(gauge, 1e-3, 0.0, radial=radial), 1e-3
    grads = {"up": jnp.zeros((2, 1)), "down": params["down"]}
    updates, _ = tx.update(grads, tx.init(params), params)
    moved = jnp.linalg.norm(params["down"] + updates["down"]) - 3.0
    expected = -2.0 * rate if radial == "linear" else -3.0 * np.hypot(1.0, degree) * rate
    np.testing.assert_allclose(moved, expected, rtol=1e-6)


@pytest.mark.parametrize("degree", [1, 2])
def test_decay_shrinks_log_s_as_adamw_does(degree: int, x64: None) -> None:
    """The anchor hands its share on: (p + 1)·lr·wd."""
    gauge, params = _unit(degree)
    tx = _tx(gauge, 1e-4, 0.1)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    moved = jnp.log(jnp.linalg.norm(params["down"] + updates["down"]) / 3.0)
    np.testing.assert_allclose(moved, -(degree + 1) * 1e-5, rtol=1e-4)


def test_a_floor_keeps_lengths_and_none_lets_them_die(x64: None) -> None:
    gauge, params = _unit(1)
    lengths = {}
    for floor in (0.0, 0.5):
        tx = _tx(gauge, 0.02, 1.0, scale_floor=floor)
        here, _ = _train(tx.init, _step(tx, lambda p: jnp.zeros(())), params, 150)
        lengths[floor] = float(jnp.linalg.norm(here["down"]))
    print(lengths)
    assert lengths[0.0] < 0.05 and 1.4 < lengths[0.5] < 1.7


def test_kernels_that_read_one_norm_have_lengths_of_their_own(x64: None) -> None:
    gauge = go.norm_scale({"scale": "channel"}, {"a": "channel _", "b": "channel _"})
    params = {"scale": jnp.ones(1), "a": jnp.ones((1, 4)), "b": jnp.ones((1, 9))}
    tx = _tx(gauge, 1e-3, 0.0)
    grads = {"scale": jnp.zeros(1), "a": params["a"], "b": -params["b"]}
    updates, state = tx.update(grads, tx.init(params), params)
    assert len(_inside(state).gauges.radial_mu) == 2
    np.testing.assert_allclose(updates["a"], -1e-3, rtol=1e-6)
    np.testing.assert_allclose(updates["b"], 1e-3, rtol=1e-6)


def _inside(state: Any) -> ScaleByDDCState:
    own: ScaleByDDCState = state.inner_state[0]
    return own


def test_inner_blocks_of_a_scalar_chain_have_no_length(x64: None) -> None:
    """The group of a chain leaves one joint scale (DDC B.6): that of its last block."""
    params = {f"w{k}": jax.random.normal(jax.random.key(k), (3, 3)) for k in range(4)}
    gauges = [go.rescale({f"w{k}": "_ _"}, {f"w{k + 1}": "_ _"}) for k in range(3)]
    assert len(_inside(_tx(gauges).init(params)).gauges.radial_mu) == 1


# Vertical motion ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rescale/channel", "rescale/degree_2", "logit_shift/kernel"])
@pytest.mark.parametrize("vertical", ["frozen", "sgd", "adam"])
def test_a_penalty_moves_the_coordinates_unless_frozen(vertical: str, name: str) -> None:
    """A penalty on coordinates: they go down it, and stand still where they are frozen."""
    case = CASES[name]
    group, params = go.product(case.gauges()), case.params(jax.random.key(0))

    def penalty(p: Tree) -> jax.Array:
        return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(group.coordinates(p)))

    tx = _tx(group, 0.02, 0.0, vertical=vertical)
    moved, _ = _train(tx.init, _step(tx, lambda p: case.loss(p) + penalty(p)), params, 5)
    change = float(penalty(moved) / penalty(params))
    print(f"{name} {vertical}: {change:.3f}")
    assert change < 0.98 if vertical != "frozen" else abs(change - 1.0) < 1e-4


@pytest.mark.parametrize("vertical", ["frozen", "sgd", "adam"])
def test_a_penalty_turns_a_head_unless_frozen(vertical: str) -> None:
    """A rotation has no coordinate: what moves is the accumulated vertical part."""
    case = CASES["head_rotation/mha"]
    gauges, params = case.gauges(), case.params(jax.random.key(0))
    tx = _tx(gauges, 0.02, 0.0, vertical=vertical)
    moved, _ = _train(tx.init, _step(tx, lambda p: jnp.sum(jnp.square(p["query"][..., 0]))), params, 3)
    motion = go.measure.vertical_motion(params, jax.tree.map(jnp.subtract, moved, params), gauges)
    turned = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(motion))
    assert (turned > 0.005) == (vertical != "frozen"), turned


# The split ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [
    pytest.param(c, marks=() if c.name.startswith("product") else pytest.mark.slow, id=c.name) for c in GAUGE_CASES
])  # fmt: skip
def test_horizontal_tangents_are_not_read(case: GaugeCase, x64: None) -> None:
    """Idempotent; no coordinate moves along them; a cotangent's part is the adjoint of a tangent's."""
    group, params = go.product(case.gauges()), case.params(jax.random.key(0))
    on = group.chart(params)

    def random(seed: int) -> Tree:
        return jax.tree.map(lambda p: jax.random.normal(jax.random.key(seed + p.size), p.shape, jnp.float64), params)

    def whole(found: Any, tree: Tree) -> Tree:
        return with_leaves(tree, found)

    @jit
    def figures(x: Tree, y: Tree) -> Any:
        flat = whole(split(on, params, x), x)
        again, dual = whole(split(on, params, flat), flat), whole(split(on, params, y, dual=True), y)
        _, read = jax.jvp(group.coordinates, (params,), (flat,))
        apart = optax.tree.norm(jax.tree.map(jnp.subtract, again, flat)) / optax.tree.norm(x)
        pairing = optax.tree.vdot(flat, y) - optax.tree.vdot(x, dual)
        return apart, optax.tree.norm(read) if jax.tree.leaves(read) else jnp.zeros(()), pairing

    found = [float(v) for v in figures(random(1), random(2))]
    print(case.name, [f"{v:.1e}" for v in found])
    assert max(map(abs, found)) <= 1e-9
