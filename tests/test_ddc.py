"""DDC on the slice: twins of every mode, lengths, heads, decay, vertical motion, the chain and its alias."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from gauge_optax.ddc import fused as ddc_fused
from models import lm
from tests.cases import GAUGE_CASES, GaugeCase
from tests.quick import jit
from tests.refusals import refused
from tests.tolerances import tolerance
from tests.twins import CONFIGS, ODD, Tree, check_twins, furthest, loss_of, odd, start_of, stepper, train, trained, walk

CASES = {case.name: case for case in GAUGE_CASES}
MODES: dict[str, dict[str, Any]] = {
    "body_frame_topk": {},
    **{mode: {"v_mode": mode} for mode in ("body_frame", "per_head_scalar", "per_head_matrix", "none")},
    "log": {"radial": "log", "nesterov": True}, "refreshed": {"refresh_every": 3},
    "sgd": {"vertical": "sgd"}, "adam": {"vertical": "adam"},
    "muon": {"beta": 0.9}, "paper": {"preset": "paper"},
}


def _tx(mode: str, gauges: Any) -> optax.GradientTransformation:
    make = go.ddc_muon if mode in ("muon", "paper") else go.ddc_adamw
    return make(1e-2, gauges, weight_decay=0.1, **MODES[mode])


# Twins --------------------------------------------------------------------------------------------

SLACK = {
    ("llama_bias", "float32", "log"): 2.0, ("llama_bias", "float32", "per_head_scalar"): 2.5,
    ("llama_bias", "float32", "refreshed"): 8.0, ("qk_norm", "float32", "muon"): 2.0,
    ("qk_norm", "float32", "log"): 20.0,
}
"""Of the tolerances of float32, where Adam divides the gradient of a query's bias that starts at zero by its own size.

`log`: 8e-4 at that bias and 1.2e-4 of the loss, four to five times what an ulp of the start does. `per_head_scalar`:
six elements end 3e-6 to 1.1e-4 apart and 5e-7 to 3.1e-5 of the loss, by luck of rounding. `refreshed`: six elements end
1.2e-4 to 2.1e-3 apart, six starts that are an ulp off 2.0e-4 to 2.8e-3; on another processor the loss is 6.7e-4 apart,
and 5.2e-4 at a start that is an ulp off. `muon`: on one processor the loss is 1.7e-4 apart, and 7.8e-5 at a start that
is an ulp off. `log` with norms of queries and keys: on one processor weights are 1.2e-3 apart and the loss 1.9e-3, and
9.7e-4 and 1.4e-3 at a start that is an ulp off. In float64 all hold 1e-10.
"""


# Model, mode, precision, and the odd start.
ROWS = [
    *((name, mode, dtype, "") for name in CONFIGS for mode in MODES for dtype in ("float64", "float32")),
    *(("gpt", mode, dtype, start) for mode, dtype in (
        ("body_frame_topk", "float32"), ("body_frame_topk", "float64"), ("muon", "float64")) for start in ODD),
]
QUICK = ("gpt", "body_frame_topk", "float64", ""), ("gpt", "paper", "float64", "")


@functools.cache
def _program(name: str, mode: str, dtype: str) -> tuple[Any, Any, Any]:
    del dtype
    group = go.product(lm.gauges(CONFIGS[name]))
    tx = _tx(mode, group)
    return group, jit(tx.init), stepper(tx, loss_of(name))


@pytest.mark.parametrize(("name", "mode", "dtype", "start"), [
    pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in ROWS
])
def test_twins_of_every_mode(name: str, mode: str, dtype: str, start: str) -> None:
    slack = 1.0 if start else SLACK.get((name, dtype, mode), 1.0)
    with jax.enable_x64(dtype == "float64"):
        params = odd(start, start_of(name, dtype)) if start else start_of(name, dtype)
        check_twins(f"{name} {mode}", *_program(name, mode, dtype), params, dtype, slack)


SPECTRA = {
    "orthogonal": (1.0, 1.0, 1.0, 1.0), "equal_pair": (1.0, 1.0, 2.0, 0.5), "rank_one": (1.0, 0.0, 0.0, 0.0),
    "faint": (2.0, 3e-2, 2e-2, 1e-2),  # eigenvalues below the 1e-3 that body_frame_topk divides
}


@pytest.mark.slow_rows("*-float32-*", "body_frame-*", "per*")
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("mode", ["body_frame_topk", "body_frame", "per_head_matrix"])
def test_degenerate_heads(mode: str, dtype: str, spectrum: str) -> None:
    """Heads whose Gram matrix has these eigenvalues, squared: an eigenbasis is what rounding makes of them."""
    with jax.enable_x64(dtype == "float64"):
        _check_attention(f"{spectrum} {mode}", functools.partial(_tx, mode), SPECTRA[spectrum], dtype)


@pytest.mark.slow_rows("ddc_adamw")
@pytest.mark.parametrize("name", ["ddc_adamw", "ddc_muon", "quotient_muon", "quotient_adamw"])
def test_wide_heads(name: str, x64: None) -> None:
    """Wide enough that what holds them stops before it has solved its equation."""
    _check_attention(name, functools.partial(getattr(go, name), 1e-2), np.geomspace(1.0, 0.05, 16), "float64")


def _check_attention(name: str, optimizer: Callable[[Any], Any], sizes: Any, dtype: str) -> None:
    """Twins of one attention layer whose heads have these singular values."""
    width, rows = len(sizes), 2 * len(sizes)
    keys = jax.random.split(jax.random.key(5), 4)
    shapes = dict.fromkeys(("query", "key", "value"), (rows, 2, width)) | {"out": (2, width, rows)}
    drawn = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    params = {n: _with_spectrum(x, sizes, n == "out") for n, x in drawn.items()}
    scores, values = {"query": "_ head basis", "key": "_ head basis"}, {"value": "_ head basis", "out": "head basis _"}
    group = go.product([go.head_rotation(scores), go.head_rotation(values)])
    x, tx = jax.random.normal(jax.random.key(6), (3, 5, rows)), optimizer(group)

    def loss(p: Tree) -> jax.Array:
        q, k, v = (jnp.einsum("btd,dhe->bhte", x, p[n]) for n in ("query", "key", "value"))
        weights = jax.nn.softmax(jnp.einsum("bhte,bhse->bhts", q, k), -1)
        out = jnp.einsum("bhts,bhse,hed->btd", weights, v, p["out"])
        return jnp.mean(jnp.square(out - jnp.roll(x, 1, -1)))

    check_twins(name, group, jit(tx.init), stepper(tx, loss), params, dtype)


def _with_spectrum(leaf: jax.Array, sizes: Any, wide: bool) -> jax.Array:
    rows = jnp.moveaxis(leaf, -1, -2) if wide else jnp.moveaxis(leaf, 1, 0)  # (heads, rows, width)
    u, _, vt = jnp.linalg.svd(rows, full_matrices=False)
    made = (u * jnp.asarray(sizes, leaf.dtype)) @ vt
    return jnp.moveaxis(made, -1, -2) if wide else jnp.moveaxis(made, 0, 1)


def test_a_gradient_that_is_no_number_stays_none() -> None:
    """Beside a head, whose constancy decides what is rounding."""
    gauges = [go.logit_shift({"head": "_ vocab"}), go.rescale({"up": "_ channel"}, {"down": "channel _"})]
    params = {"head": jnp.ones((2, 3)), "up": jnp.ones((2, 4)), "down": jnp.ones((4, 2)), "free": jnp.ones(3)}
    grads = jax.tree.map(lambda x: x.at[0].set(jnp.nan), params)
    tx = go.ddc_adamw(1e-2, gauges)
    updates, _ = jit(tx.update)(grads, jit(tx.init)(params), params)
    assert not np.any([np.all(np.isfinite(x)) for x in jax.tree.leaves(updates)])


# The chain and its alias --------------------------------------------------------------------------


def test_the_chain_of_five_links_is_the_alias(x64: None) -> None:
    gauges, params, loss = lm.gauges(CONFIGS["gpt"]), start_of("gpt", "float64"), loss_of("gpt")
    chain = optax.chain(
        go.gauge_project(gauges), go.scale_by_ddc(gauges), go.add_gauge_decay(0.1, gauges),
        optax.scale_by_learning_rate(1e-2), go.gauge_retract(gauges),
    )
    ends = [trained(tx, loss, params, 5)[0] for tx in (chain, _tx("body_frame_topk", gauges))]
    assert furthest(*ends) <= 1e-10


def test_leaves_without_a_gauge_get_adamw() -> None:
    params = UNIT_PARAMS | {"free": jnp.arange(6.0).reshape(2, 3) - 2.0}
    options: dict[str, Any] = {"weight_decay": 0.1, "nesterov": True}
    both = go.ddc_adamw(0.01, UNIT, **options), optax.adamw(0.01, **options)
    ends = [walk(tx, params, _noise(params, 4))[0]["free"] for tx in both]
    chex.assert_trees_all_close(*ends, rtol=tolerance("optax", jnp.float32), atol=1e-6)


def test_arguments_are_those_of_adamw() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (go.ddc_adamw, optax.adamw))
    assert [name for name in ours if name in theirs] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name


UNIT = go.rescale({"up": "_ channel"}, {"down": "channel _"})
UNIT_PARAMS = {"up": jnp.array([[0.6], [0.8]]), "down": jnp.full((1, 4), 1.5)}
"""One channel on the slice: an anchor of norm 1, and what it feeds, of length 3 in 4 entries."""
LINEAR = go.head_linear({"up": "_ basis"}, {"down": "basis _"})
CONSTANTS = go.bias_absorption({"b": "channel"}, {"down": "channel _"}, {"c": "_"})
TRANSLATION = CASES["user_gauge/translation"].gauges()
STREAM = go.residual_rotation({"down": "_ basis"}, {"c": "basis"})


@pytest.mark.parametrize(("make", "gauge", "options", "says", "word"), [
    (go.scale_by_ddc, UNIT, {"v_mode": "diagonal"}, "bad v_mode", "diagonal"),
    (go.scale_by_ddc, UNIT, {"radial": "cubic"}, "bad radial", "cubic"),
    (go.scale_by_ddc, UNIT, {"vertical": "free"}, "bad vertical", "free"),
    (go.scale_by_ddc, LINEAR, {}, r"head_linear on 'up'", "go.quotient"),
    (functools.partial(go.ddc_muon, 0.1), LINEAR, {}, r"head_linear on 'up'", "go.quotient"),
    (functools.partial(go.ddc_adamw, 0.1), CONSTANTS, {"vertical": "adam"}, "", 'write vertical="frozen"'),
    (functools.partial(go.ddc_adamw, 0.1), TRANSLATION, {"vertical": "sgd"}, "", 'write vertical="frozen"'),
    (functools.partial(go.ddc_adamw, 0.1), STREAM, {"vertical": "adam"}, "residual_rotation", 'vertical="frozen"'),
])
def test_refusals(make: Callable[..., Any], gauge: Any, options: dict[str, str], says: str, word: str) -> None:
    more = CASES["user_gauge/translation"].params(jax.random.key(0)) | {"b": jnp.ones(1), "c": jnp.zeros(4)}
    with refused(says, word):
        make(gauges=gauge, **options).init(UNIT_PARAMS | more)


@pytest.mark.slow_rows("muon", "floor")
@pytest.mark.parametrize("make", [
    lambda g: go.ddc_adamw(0.05, g, scale_floor=0.9), lambda g: go.ddc_muon(0.05, g, scale="rms"),
    lambda g: optax.chain(go.links.scale_by_relative_rms(g), optax.scale(-0.1))], ids=["floor", "muon", "relative"])
def test_layers_of_a_stack_step_as_layers_of_their_own(make: Callable[[Any], Any], x64: None) -> None:
    """Sizes of 0.1, 1 and 3: all layers of a stack had one floor, and one factor."""
    rng, sizes = np.random.default_rng(0), np.array([0.1, 1, 3])[:, None, None]
    draw = lambda: {"up": sizes * rng.normal(size=(3, 6, 4)), "down": sizes * rng.normal(size=(3, 4, 3))}  # noqa: E731
    own, start, grads = [], draw(), [draw() for _ in range(4)]
    gauges = (go.rescale({"up": "layer _ channel"}, {"down": "layer channel _"}),
              go.rescale({"{i}/up": "_ channel"}, {"{i}/down": "channel _"}))
    layers = lambda t: {f"{k}": {name: x[k] for name, x in t.items()} for k in range(3)}  # noqa: E731
    for gauge, form in zip(gauges, (dict, layers), strict=True):
        tx, params = make(gauge), jax.tree.map(jnp.asarray, form(start))
        state = tx.init(params)
        for gradient in grads:
            updates, state = tx.update(jax.tree.map(jnp.asarray, form(gradient)), state, params)
            params = optax.apply_updates(params, updates)
        own.append(params)
    chex.assert_trees_all_close(layers(own[0]), own[1], rtol=1e-12)


def test_entries_beside_the_heads_of_a_fused_leaf_get_adam(x64: None) -> None:
    params = {"qkv": jax.random.normal(jax.random.key(0), (6, 3, 2, 3))}
    gauge = go.head_rotation({"qkv": ("_ part=0 head basis", "_ part=1 head basis")})
    for mode in ("per_head_matrix", "per_head_scalar"):
        tx = go.ddc_adamw(1.0, gauge, v_mode=mode, weight_decay=0.0)
        updates, _ = tx.update(jax.tree.map(lambda x: 1e-3 * x, params), tx.init(params), params)
        np.testing.assert_allclose(jnp.abs(updates["qkv"][:, 2]), 1.0, rtol=1e-2)


def test_matrices_keep_no_second_moment() -> None:
    case = CASES["product/gpt"]
    params = case.params(jax.random.key(0))
    states = [jax.eval_shape(f(0.1, case.gauges()).init, params) for f in (go.ddc_muon, go.ddc_adamw)]
    sizes = [sum(x.size for x in jax.tree.leaves(state.inner_state[0].nu)) for state in states]
    kernels = [x for path, x in leaves_by_path(params).items() if path.endswith("kernel") and "blocks" in path]
    assert sizes[1] - sizes[0] == sum(x.size for x in kernels)


# Tangents -----------------------------------------------------------------------------------------


@pytest.mark.slow_rows("head_rotation*")
@pytest.mark.parametrize("name", ["logit_shift/kernel_bias", "rescale/degree_2", "norm_scale/one_plus",
                                  "head_rotation/gqa", "head_rotation/value_out", "rope_torus/partial"])
def test_tangents_are_horizontal(name: str, x64: None) -> None:
    case = CASES[name]
    gauges, params = case.gauges(), case.params(jax.random.key(0))
    tx = go.scale_by_ddc(gauges)
    updates, _ = jit(tx.update)(jit(jax.grad(case.loss))(params), jit(tx.init)(params), params)
    assert optax.tree.norm(updates) > 0.1
    go.testing.assert_horizontal(updates, params, gauges, tolerance("horizontal", jnp.float64))


# Lengths ------------------------------------------------------------------------------------------


def test_a_floor_keeps_lengths_and_none_lets_them_die(x64: None) -> None:
    still = {name: jnp.zeros((150, *x.shape)) for name, x in UNIT_PARAMS.items()}
    lengths = []
    for floor in (0.0, 0.5):
        moved, _ = walk(go.ddc_adamw(0.02, UNIT, scale_floor=floor, weight_decay=1.0), UNIT_PARAMS, still)
        lengths.append(float(jnp.linalg.norm(moved["down"][-1])))
    assert lengths[0] < 0.05 and 1.4 < lengths[1] < 1.7


def test_kernels_that_read_one_norm_have_lengths_of_their_own(x64: None) -> None:
    gauge = go.norm_scale({"scale": "channel"}, {"a": "channel _", "b": "channel _"})
    params = {"scale": jnp.ones(1), "a": jnp.ones((1, 4)), "b": jnp.ones((1, 9))}
    tx, grads = go.scale_by_ddc(gauge), {"scale": jnp.zeros(1), "a": params["a"], "b": -params["b"]}
    updates, state = tx.update(grads, jit(tx.init)(params), params)
    assert len(state.inner_state.gauges.radial_mu) == 2
    np.testing.assert_allclose(updates["a"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(updates["b"], -1.0, rtol=1e-6)


def test_inner_blocks_of_a_scalar_chain_have_no_length(x64: None) -> None:
    """The group of a chain leaves one joint scale (DDC B.6): that of its last block."""
    gauges = [go.rescale({f"w{k}": "_ _"}, {f"w{k + 1}": "_ _"}) for k in range(3)]
    state = go.scale_by_ddc(gauges).init({f"w{k}": jnp.eye(3) for k in range(4)})
    assert len(state.inner_state.gauges.radial_mu) == 1


@pytest.mark.parametrize("gradient", ["zero", "loss"])
def test_scale_invariant_leaves_keep_their_norm(gradient: str) -> None:
    case = CASES["scale_invariant/kernel_bias"]
    params = case.params(jax.random.key(0))
    tx = go.ddc_adamw(0.1, case.gauges(), weight_decay=0.5)
    loss = case.loss if gradient == "loss" else lambda p: jnp.zeros(())
    moved, _ = train(tx.init, stepper(tx, loss), params, 3)
    before, after = (go.product(case.gauges()).coordinates(p) for p in (params, moved))
    chex.assert_trees_all_close(before, after, atol=tolerance("coordinates", jnp.float32))


# Vertical motion ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rescale/channel", "rescale/degree_2", "logit_shift/kernel"])
@pytest.mark.parametrize("vertical", ["frozen", "sgd", "adam"])
def test_a_penalty_moves_the_coordinates_unless_frozen(vertical: str, name: str) -> None:
    """A penalty on coordinates: they go down it, and stand still where they are frozen."""
    case = CASES[name]
    group, params = go.product(case.gauges()), case.params(jax.random.key(0))

    def penalty(p: Tree) -> Any:
        return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(group.coordinates(p)))

    tx = go.ddc_adamw(0.02, group, vertical=vertical, weight_decay=0.0)
    moved, _ = train(tx.init, stepper(tx, lambda p: case.loss(p) + penalty(p)), params, 5)
    change = float(penalty(moved) / penalty(params))
    print(f"{name} {vertical}: {change:.3f}")
    assert change < 0.98 if vertical != "frozen" else abs(change - 1.0) < 1e-4


def test_a_scale_with_one_side_moves_by_its_derivative() -> None:
    params, tx = {"up": UNIT_PARAMS["up"]}, go.scale_by_ddc(go.scale_invariant({"up": "_ channel"}), vertical="sgd")
    step, _ = tx.update(params, tx.init(params), params)  # a gradient along the channel, of derivative 1
    np.testing.assert_allclose(step["up"], params["up"], rtol=1e-6)


@pytest.mark.slow_rows("*-rope_linear/half")
@pytest.mark.parametrize("name", ["head_rotation/mha", "rope_linear/half"])
@pytest.mark.parametrize("vertical", ["frozen", "sgd", "adam"])
def test_a_penalty_turns_a_head_unless_frozen(vertical: str, name: str) -> None:
    """A rotation has no coordinate: what moves is the accumulated vertical part."""
    case = CASES[name]
    gauges, params = case.gauges(), case.params(jax.random.key(0))
    tx = go.ddc_adamw(0.02, gauges, vertical=vertical)
    moved, _ = train(tx.init, stepper(tx, lambda p: jnp.sum(jnp.square(p["query"][..., 0]))), params, 3)
    motion = go.measure.vertical_motion(params, jax.tree.map(jnp.subtract, moved, params), gauges)
    turned = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(motion))
    assert (turned > 0.005) == (vertical != "frozen"), turned


# The fused step -----------------------------------------------------------------------------------


FUSED_CASES = [case for case in GAUGE_CASES if "linear" not in case.name]

# Layers scanned; gate and up in one kernel, of which a norm scales all rows and a rescaling the columns of up.
NORM_AND_UNITS = [
    go.norm_scale({"scale": "layer channel"}, {"gate_up": "layer _ channel _", "skip": "layer channel _"}),
    go.rescale({"gate_up": "layer half=1 _ channel"}, {"down": "layer channel _"}, degree=1),
    go.rescale({"gate_up": "layer half=0 _ channel"}, {"after": "layer channel _"}, degree=2),
]
SHAPES = {"scale": (2, 3), "gate_up": (2, 2, 3, 5), "down": (2, 5, 3), "skip": (2, 3, 4), "after": (2, 5, 2)}


def _noise(like: Tree, *steps: int) -> Tree:
    """Unit normals for every leaf, or shape, stacked by step."""
    draw = np.random.default_rng(len(steps)).normal
    shapes = jax.tree.map(lambda x: getattr(x, "shape", x), like, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.map(lambda x: jnp.asarray(draw(size=(*steps, *x))), shapes, is_leaf=lambda x: isinstance(x, tuple))


def _check_fused(gauges: Any, params: Tree, monkeypatch: Any, fused: bool = True, **options: Any) -> None:
    """Three steps are those of the plain code; `fused` says whether ours were fused."""
    calls: Any = []
    applies, ends = ddc_fused._applies, []
    for own in (lambda s: calls.append(applies(s)) or calls[-1], lambda s: False):
        monkeypatch.setattr(ddc_fused, "_applies", own)
        ends.append(walk(go.ddc_adamw(1e-2, gauges, **options), params, _noise(params, 3)))
    assert all(calls) == fused and calls
    for x, y in zip(*map(jax.tree.leaves, ends), strict=True):
        size = float(np.linalg.norm(np.asarray(y, float)))
        assert float(np.linalg.norm(np.asarray(x, float) - np.asarray(y, float))) <= 1e-13 * max(size, 1.0)


@pytest.mark.slow_rows("product/latent_fused", "product/llama")
@pytest.mark.parametrize("case", FUSED_CASES, ids=lambda case: case.name)
def test_equal_on_every_row(case: GaugeCase, x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_fused(case.gauges(), case.params(jax.random.key(0)), monkeypatch, weight_decay=0.1)


@pytest.mark.parametrize("shifts", [[], [go.logit_shift({"skip": "layer _ vocab"})]], ids=["scales alone", "a shift"])
def test_equal_where_two_scales_share_a_kernel(shifts: Any, x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over stored leaves, with what other scales multiply them by; a leaf with a shift has none."""
    _check_fused([*NORM_AND_UNITS, *shifts], _noise(SHAPES), monkeypatch)


def test_a_shift_on_a_turned_leaf_takes_the_plain_step(x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gauges = [go.head_rotation({"w": "_ _ basis", "v": "_ basis"}), go.logit_shift({"w": "vocab _ _"})]
    _check_fused(gauges, _noise({"w": (3, 2, 4), "v": (5, 4)}), monkeypatch, fused=False)
