"""No argument is ignored: with another value an optimizer traces another program or has another state, and a measure
returns other numbers.

What the value does is tested where its function is. An argument of an optimizer without a row fails here.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding.axes import parse_axes
from gauge_optax.gauges.gauge import BlockGauge
from gauge_optax.tools.as_json import CONSTRUCTORS
from tests.cases import DISCRETE_CASES, FLAT_CASES, GAUGE_CASES
from tests.refusals import refused
from tests.twins import normal

m = go.measure
SHAPES: dict[str, Any] = {
    "up": (4, 6), "down": (6, 4), "b": (6,), **dict.fromkeys("qkr", (4, 2, 2)), "table": (7, 4),
}
PARAMS = normal(0, SHAPES, jnp.float32)
UNIT = go.rescale({"up": "_ channel", "b": "channel"}, {"down": "channel _"})
LINEAR = [UNIT, go.head_linear({"q": "_ head basis"}, {"k": "_ head basis"})]
TURNS = [UNIT, go.head_rotation({"q": "_ head basis", "k": "_ head basis"})]
NEURONS = {"up": "_ neuron", "down": "_ neuron"}
ONE_SIDE = {name: name != "up" for name in SHAPES}
INNER = optax.adamw(0.1)

# What each constructor gets without the argument that is tried.
BASE: dict[Any, dict[str, Any]] = {
    **{make: dict(inner=INNER, gauges=TURNS) for make in (go.quotient, go.orbit.gauge_fix)},
    **{make: dict(learning_rate=0.1, gauges=TURNS) for make in (
        go.quotient_adamw, go.quotient_muon, go.ddc_adamw, go.ddc_muon)},
    **{make: dict(gauges=TURNS) for make in (
        go.gauge_project, go.scale_by_ddc, go.gauge_retract, go.links.scale_by_scaled_polar,
        go.links.scale_by_relative_rms)},
    go.links.scale_by_opposite_gram: dict(gauges=LINEAR), go.add_gauge_decay: dict(gauges=TURNS, weight_decay=0.1),
    go.max_norm_muon: dict(learning_rate=0.1, gauges=TURNS, neurons=NEURONS),
    **{make: dict(neurons=NEURONS) for make in (
        go.links.scale_by_polar, go.links.scale_by_vector_norm, go.links.keep_norms_below)},
    go.links.compress_second_moments: dict(inner=optax.scale_by_adam()), go.norms.hyperball: dict(axes=NEURONS),
    go.norms.max_norm: dict(inner=INNER, blocks=NEURONS, learning_rate=0.1),
    go.norms.rotational: dict(inner=INNER, blocks=NEURONS, learning_rate=0.1, weight_decay=0.1),
    **{make: dict(learning_rate=0.1, blocks=NEURONS) for make in (
        go.norms.rotational_adamw, go.norms.rotational_sgdm, go.norms.rotational_lion)},
    go.orbit.hold_products: dict(inner=INNER, gauges=[UNIT]),
}
# argument → another value than the default one, with whatever else must be set for it to matter.
OTHER: dict[str, dict[str, Any]] = {
    **{name: {name: 0.5} for name in (
        "b1", "b2", "beta", "momentum", "eps", "eps_root", "adam_b1", "adam_b2", "adam_eps_root", "weight_decay",
        "adam_weight_decay", "adam_learning_rate", "consistent_rms", "scale", "live_threshold", "refresh_drift",
        "bound", "learning_rate", "eta_r", "damping", "min_scale", "strength", "radius")},
    **{name: {name: jnp.bfloat16} for name in ("mu_dtype", "accumulator_dtype")},
    **{name: {name: False} for name in ("hold", "center", "transport")},
    "nesterov": {"nesterov": None}, "pin": {"pin": None},  # the default's opposite
    "diagonal": {"diagonal": True}, "dtype": {"dtype": "uint8"}, "kind": {"kind": "update"},
    "every": {"every": 2}, "refresh_every": {"refresh_every": 2}, "rest": {"rest": "balanced"},
    "ns_coeffs": {"ns_coeffs": "dion"}, "ns_steps": {"ns_steps": 2}, "preset": {"preset": "paper"},
    "v_mode": {"v_mode": "none"}, "vertical": {"vertical": "adam"}, "radial": {"radial": "log"},
    "radial_scale": {"radial_scale": 0.5, "radial": "log"}, "scale_floor": {"scale_floor": 0.5, "radial": "log"},
    "max_log_step": {"max_log_step": 0.1, "preset": "paper"}, "gain": {"gain": optax.sgd(0.1)},
    "mask": {"mask": ONE_SIDE, "weight_decay": 0.1}, "frozen": {"frozen": {name: name == "up" for name in SHAPES}},
    "weight_decay_mask": {"weight_decay_mask": ONE_SIDE, "weight_decay": 0.1}, "labels": {"labels": {"table": "muon"}},
    "heads_per_matrix": {"heads_per_matrix": 2}, "embeddings": {"embeddings": {"table": "token _"}},
    "neurons": {"neurons": {**NEURONS, "table": "_ neuron"}},
    "damping_mode": {"damping_mode": "absolute", "damping": 0.5},
}
SQUARED = dict(gauges=go.rescale({"up": "_ channel"}, {"down": "channel _"}, degree=2), weight_decay=0.1)
CLIP = dict(gauges=go.multiplier_balance({"q": "_ head _"}, {"k": "_ head _"}), kind="cap", cap=1.0)
# Both values, where the default one does not matter or is refused beside the other.
BOTH: dict[tuple[Any, str], tuple[dict[str, Any], dict[str, Any]]] = {
    (go.norms.rotational, "b2"): (dict(inner=optax.lion(0.1)), dict(inner=optax.lion(0.1), b2=0.5)),
    **{(make, "match"): (SQUARED, SQUARED | dict(match="horizontal")) for make in (
        go.add_gauge_decay, go.ddc_adamw, go.ddc_muon)},
    (go.orbit.hold_products, "kind"): ({}, dict(kind="cap", cap=1.0)),
    (go.orbit.hold_products, "cap"): (dict(kind="cap", cap=1.0), dict(kind="cap", cap=2.0)),
    (go.orbit.hold_products, "decay"): (dict(kind="decay", decay=0.1), dict(kind="decay", decay=0.2)),
    (go.orbit.hold_products, "alone"): (CLIP, CLIP | dict(alone={"r": "_ head _"})),
}


def pair(make: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two sets of arguments that differ in this one."""
    if (make, name) in BOTH:
        return BOTH[make, name]
    assert name in OTHER, f"write another value of {name} into OTHER"
    usual, other = inspect.signature(make).parameters[name].default, dict(OTHER[name])
    if other[name] is None:
        other[name] = not usual
    return {key: value for key, value in other.items() if key != name}, other


# Without the right `sizes`, a leaf is refused; `on_unknown` says only what raises an error.
ROWS = [(make, name) for make in BASE for name, x in inspect.signature(make).parameters.items()
        if x.default is not inspect.Parameter.empty and name not in ("sizes", "on_unknown")]


def traced(make: Any, options: dict[str, Any]) -> str:
    """The programs of `init` and `update`, with the constants in them."""
    tx, extra = make(**BASE[make] | options), {}
    if make is go.orbit.hold_products and options.get("gauges") is CLIP["gauges"]:
        extra["max_logits"] = {"": jnp.ones(2)}
    init, state = jax.make_jaxpr(tx.init)(PARAMS), jax.eval_shape(tx.init, PARAMS)
    update = jax.make_jaxpr(functools.partial(tx.update, **extra))(PARAMS, state, PARAMS)
    return re.sub(r"0x[0-9a-f]+", "", f"{init}{init.consts}{update}{update.consts}")


@functools.cache
def as_usual(make: Any) -> str:
    """By default."""
    return traced(make, {})


@pytest.mark.parametrize(("make", "name"), ROWS, ids=[f"{make.__name__}-{name}" for make, name in ROWS])
def test_an_argument_is_not_ignored(make: Any, name: str) -> None:
    one, other = pair(make, name)
    assert traced(make, other) != (traced(make, one) if one else as_usual(make))


def test_every_constructor_has_rows() -> None:
    public = {getattr(module, name) for module in (go, go.links, go.norms, go.orbit) for name in module.__all__}
    returned = {make: inspect.get_annotations(make, eval_str=True).get("return") for make in public if callable(make)}
    made = {make for make, kind in returned.items()
            if isinstance(kind, type) and issubclass(kind, optax.GradientTransformation)}
    assert made == set(BASE)


# Gauges -----------------------------------------------------------------------------------------------------


def names(gauge: BlockGauge) -> list[str]:
    parts = [part for spec in gauge.specs for part in parse_axes(gauge.name, "", spec.axes).items]
    return [part.name for part in parts if part.name != "_"]


# One of each constructor, with an axis that has a name.
ONE: dict[str, tuple[BlockGauge, Any]] = {
    gauge.name: (gauge, case.params(jax.random.key(0))) for case in (*GAUGE_CASES, *FLAT_CASES, *DISCRETE_CASES)
    for gauge in case.gauges() if isinstance(gauge, BlockGauge) and names(gauge)
} | {"residual_scale": (go.residual_scale({"up": "head _"}), PARAMS)}


@pytest.mark.parametrize("name", ONE)
def test_every_gauge_heeds_sizes(name: str) -> None:
    """A length that an axis does not have is refused, also where `sizes` need not say it."""
    gauge, params = ONE[name]
    written, axis = json.loads(go.tools.to_json([gauge])), names(gauge)[0]
    written["gauges"][0]["sizes"] = dict(gauge.sizes) | {axis: 97}
    (wrong,) = go.tools.from_json(json.dumps(written))
    with refused(f"{name}: ", f"{axis}=97 from sizes="):
        wrong.dim(params)


def test_every_gauge_has_a_row() -> None:
    assert set(ONE) == set(CONSTRUCTORS)


# Measures ---------------------------------------------------------------------------------------------------

LENGTHS = np.logspace(0, -2, 40)
VALUES = LENGTHS**2 * (1.0 + 0.05 * np.cos(7.0 * np.arange(40))) * (1.0 + LENGTHS)
GIVEN = normal(1, SHAPES, jnp.float32)
ADAM = optax.scale_by_adam()
STATE = ADAM.update(GIVEN, ADAM.init(PARAMS), PARAMS)[1]
PRODUCT = {"up": PARAMS["up"], "down": PARAMS["down"]}
GGN = m.GGN(lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"], PRODUCT, [PARAMS["down"]])
LAYERED = go.rescale({"q": "layer channel _"}, {"k": "layer channel _"})
UP_DOWN = go.rescale({"up": "_ channel"}, {"down": "channel _"})
RATES: dict[str, Any] = dict(learning_rate=0.1, weight_decay=0.1)
SMALL: dict[str, Any] = dict(layers=2, d_model=6, heads=2, d_head=4, d_ff=5, vocab=7)
LION, MUON = (functools.partial(m.predict_equilibrium, kind, **RATES) for kind in ("lion", "muon"))
# A call without some of its arguments, and one of these with its value.
MEASURES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "kl_order": (functools.partial(m.kl_order, LENGTHS, VALUES), dict(window=(0.03, 0.5), drift=10.0, span=1e4)),
    "rate_table": (
        functools.partial(m.rate_table, LENGTHS, {"a": {"b": VALUES}}), dict(window=(0.03, 0.5), drift=10.0, span=1e4)),
    "power_law": (functools.partial(m.power_law, LENGTHS, VALUES), dict(window=(0.03, 0.5), drift=10.0, span=1e4)),
    "gram_evolution": (
        functools.partial(m.gram_evolution, *(PARAMS[x].reshape(4, -1) for x in "qkrq")),
        dict(left_shrink=0.9, right_shrink=0.9)),
    **{f"{kind}_leakage": (functools.partial(measure, gauge, PARAMS, GIVEN, STATE.nu), dict(means="gradient"))
       for kind, measure, gauge in (("rotation", m.rotation_leakage, TURNS[1]), ("rescale", m.rescale_leakage, UNIT))},
    "adam_factors": (functools.partial(m.adam_factors, STATE), dict(b1=0.5, b2=0.5, eps=0.5, eps_root=0.5)),
    "adam_precondition": (
        lambda **given: m.adam_precondition(STATE, lambda p: GIVEN, **given)(PARAMS, GIVEN),
        dict(b2=0.5, eps=0.5, eps_root=0.5)),
    "quotient_fisher": (lambda **given: m.quotient_fisher(GGN, UP_DOWN, **given).eigenvalues(), dict(at="slice")),
    "slice_norms": (functools.partial(m.slice_norms, PARAMS, GIVEN, GIVEN, LAYERED), dict(layers=())),
    "transformer_redundancy": (
        functools.partial(m.transformer_redundancy, **SMALL),
        dict(kv_heads=1, positions=4, norm="rmsnorm", bias=False, head_bias=False, rope=True, mlp="swiglu", tied=True,
             eps=False)),
    "of rotary heads": (functools.partial(m.transformer_redundancy, **SMALL, rope=True), dict(qk_norm=True)),
    "adam": (
        functools.partial(m.predict_equilibrium, "adamw", **RATES, dim=4.0), dict(b1=0.5, second_order=True)),
    "adam_l2": (
        functools.partial(m.predict_equilibrium, "adam_l2", **RATES, dim=4.0, gradient_norm=2.0),
        dict(b1=0.5, gradient_roots=3.0)),
    "sgdm": (
        functools.partial(m.predict_equilibrium, "sgdm", **RATES, gradient_norm=2.0), dict(b1=0.5, second_order=True)),
    "lion": (functools.partial(LION, dim=4.0), dict(b1=0.5, b2=0.5, sign_alignment=0.5, second_order=True)),
    "muon": (
        functools.partial(MUON, shape=(4, 3)),
        dict(b1=0.5, sign_alignment=0.5, update_norm=3.0, nesterov=False, second_order=True)),
}


@pytest.mark.parametrize(("call", "name"), [(call, name) for call in MEASURES for name in MEASURES[call][1]])
def test_a_measure_heeds_it(call: str, name: str) -> None:
    measure, given = MEASURES[call]
    assert str(measure()) != str(measure(**{name: given[name]}))
