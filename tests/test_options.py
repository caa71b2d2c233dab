"""No optimizer and no link ignores an argument: with another value it traces another program, or has another state.

What the value does is tested where its transformation is. A new argument without a row fails here.
"""

import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gauge_optax as go
from tests.twins import normal

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
