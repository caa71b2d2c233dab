"""Small things that cost trust: what gauges, drifts and plans print, and what a slip of the user's is told."""

import re
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path, with_leaves
from tests.cases import FLAT_CASES, with_masks
from tests.gauges.user_gauges import Translation
from tests.quick import jit
from tests.refusals import complaint
from tests.twins import furthest, stepper, structure, train, trained

RELU = go.rescale({"up/kernel": "_ channel", "up/bias": "channel"}, {"down/kernel": "channel _"})
NET = {
    "up": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)},
    "down": {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)},
}


def _says(call: Callable[[], Any], heading: str, remedy: str) -> None:
    """A heading and three lines: what was found, what is expected, and a remedy that can be typed."""
    lines = complaint(call).splitlines()
    assert lines[0] == heading and max(map(len, lines)) <= 120 and remedy in lines[3], lines


# What gauges print -------------------------------------------------------------------------------------------


def test_sizes_tuples_and_options_are_written_and_defaults_are_not() -> None:
    norm = go.norm_scale({"n": "1+ channel"}, {"q": ("channel (qkv=0 _)", "channel (qkv=1 _)")}, sizes={"qkv": 3})
    assert repr(norm).split("\n  ") == [
        "go.norm_scale(", "scale={'n': '1+ channel'},", "into={'q': ('channel (qkv=0 _)', 'channel (qkv=1 _)')},",
        "sizes={'qkv': 3},\n)",
    ]
    assert "degree=2," in repr(go.rescale({"u": "_ c"}, {"d": "c _"}, degree=2)) and "degree" not in repr(RELU)
    assert repr(go.product([RELU])).startswith("go.product([\n  go.rescale(\n    up={'up/kernel'")


def _hidden(p: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ p["up"]["kernel"] + p["up"]["bias"]) @ p["down"]["kernel"]


def test_discover_writes_the_same_source() -> None:
    batches = list(np.random.default_rng(0).normal(size=(2, 4, 3)))
    report = go.discover(_hidden, NET, batches, outputs="loss", progress=False)
    (gauge,) = report.gauges
    assert report.code() == "[\n" + "".join(f"  {line}\n" for line in repr(gauge).splitlines())[:-1] + ",\n]"


class Bare(Translation):
    __repr__ = go.Gauge.__repr__


def test_a_users_gauge_prints_its_attributes() -> None:
    assert repr(Bare("token", "place")) == "Bare(tokens='token', positions='place')"


# What drift prints -------------------------------------------------------------------------------------------


def test_drift_names_gauge_layer_and_channel() -> None:
    gauges = [
        go.rescale({"layers/{i}/up": "_ channel"}, {"layers/{i}/down": "channel _"}),
        go.head_rotation({"value": "_ head basis", "out": "head basis _"}),
        go.logit_shift({"head": "_ vocab"}),
    ]
    layer, heads = {"up": (2, 3), "down": (3, 2)}, {"value": (3, 2, 2), "out": (2, 2, 3), "head": (3, 5)}
    params = jax.tree.map(jnp.ones, {"layers": [layer, layer], **heads}, is_leaf=lambda x: isinstance(x, tuple))
    logs, shift = {"i=0": jnp.zeros(3), "i=1": jnp.array([0.1, 0.0, -0.25])}, {"head": jnp.array([0.0, 0.5, 0.0])}
    moved = go.product(gauges).act((logs, {"": jnp.stack([jnp.eye(2)] * 2)}, {"": shift}), params)
    drift = go.measure.drift(params, moved, gauges)
    heading, first, second, turned, shifted = (re.split(r"  +", line.strip()) for line in str(drift).splitlines())
    assert heading == ["gauge", "layer", "largest drift", "where"]
    assert first[:2] == ["rescale('layers/{i}/up', …)", "i=0"]
    assert second == ["rescale('layers/{i}/up', …)", "i=1", "-2.50e-01", "channel 2"]
    assert turned[0] == "head_rotation('value', …)" and "vertical_motion" in turned[1]
    assert shifted == ["logit_shift('head')", "5.00e-01", "head, entry 1"]
    # It is the tuple of elements that it was, inside `jit` too.
    compiled = jit(lambda p, q: go.measure.drift(p, q, gauges))(params, moved)
    assert isinstance(compiled, tuple) and structure(compiled) == structure(drift)
    assert len(compiled) == 3 and compiled[1] == {} and str(compiled).splitlines()[2] == str(drift).splitlines()[2]
    np.testing.assert_allclose(compiled[0]["i=1"], logs["i=1"], atol=1e-6)
    lost = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), drift)
    assert str(lost).splitlines()[2].split()[-3:] == ["nan", "channel", "0"]
    printed = list[str]()
    jax.eval_shape(lambda p, q: printed.append(str(go.measure.drift(p, q, gauges))), params, moved)
    assert "Tracer" in printed[0]  # there are no numbers yet, and printing them is no error


# What plan prints --------------------------------------------------------------------------------------------


def test_the_decay_column_says_what_it_is_and_is_blank_for_a_leaf_that_is_zero() -> None:
    tx = go.quotient(optax.adamw(3e-4, weight_decay=0.1), RELU)
    plan = go.plan(tx, NET)
    own = {row.leaf: row for row in plan.leaves}
    assert own["down/bias"].decay is None  # zero today; it decays by 3e-5 once it is not
    moved = NET | {"down": NET["down"] | {"bias": jnp.ones(2)}}
    assert go.plan(tx, moved).leaves[[*own].index("down/bias")].decay == pytest.approx(3e-5, rel=1e-6)
    heading, *rows = plan.table()
    cells = {row[0]: row[heading.index("decay per step")] for row in rows}
    assert cells["down/bias"] == "" and cells["up/kernel"] == "0" and float(cells["down/kernel"]) > 0
    assert "decay per step: the share of a leaf's norm that the first step removes" in str(plan)
    assert "decay per step" in plan.markdown() and "share of a leaf's norm" not in str(go.plan(RELU, NET))


# A decay mask that splits a gauge ----------------------------------------------------------------------------

MATRICES = {
    "callable": lambda p: jax.tree.map(lambda x: jnp.ndim(x) > 1, p),
    "tree": {"up": {"kernel": True, "bias": False}, "down": {"kernel": True, "bias": False}},
    "one side": go.tools.by_path({"up/**": True}, default=False),
}
DECAYING = with_masks(RELU, {"up/kernel": "_ neuron", "down/kernel": "_ neuron"}) | {
    "pin=False": lambda mask: go.quotient(optax.adamw(1e-2, weight_decay=0.5, mask=mask), RELU, pin=False),
    "in a chain": lambda mask: go.quotient(
        optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3, weight_decay=0.5, mask=mask)), RELU),
}


@pytest.mark.slow_rows("[!q]*-callable", "[!q]*-tree", "quotient_*-*e", "m*-one side")
@pytest.mark.parametrize("mask", MATRICES)
@pytest.mark.parametrize("name", DECAYING)
def test_a_mask_that_splits_a_gauge_treats_twins_alike(name: str, mask: str, x64: None) -> None:
    """The usual mask decays matrices and no biases, which a rescaled unit has both of."""
    params = jax.tree.map(lambda x: jnp.asarray(x, float) + 0.1, NET)
    twin = RELU.act(RELU.sample(jax.random.key(3), params, 2.0), params)
    x = jnp.array([[1.0, -0.5, 0.3], [0.4, 0.9, -1.0]])
    loss = lambda p: jnp.mean((_hidden(p, x) + p["down"]["bias"] - 1.0) ** 2)  # noqa: E731
    masked, plain = (
        [float(loss(trained(tx, loss, start, 5)[0])) for start in (params, twin)]
        for tx in (DECAYING[name](MATRICES[mask]), DECAYING[name](None))
    )
    assert masked[0] == pytest.approx(masked[1], rel=1e-10) and plain[0] == pytest.approx(plain[1], rel=1e-10)
    assert masked[0] != plain[0] or ("muon" in name and mask != "one side")  # only matrices have Muon's decay


# Slips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda: go.quotient(optax.adam(1e-3), []), lambda: go.ddc_adamw(1e-3, ()), lambda: go.product([])]
)
def test_an_empty_list_of_gauges_warns_where_the_user_wrote_it(make: Callable[[], Any]) -> None:
    with pytest.warns(UserWarning, match="an empty list of gauges does nothing") as caught:
        make()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("name", ["quotient_adamw", "quotient_muon", "ddc_adamw", "ddc_muon", "max_norm_muon"])
def test_swapped_arguments(name: str) -> None:
    make, heading = getattr(go, name), f"{name}: learning_rate and gauges are swapped"
    report = go.discover(_hidden, NET, [np.ones((4, 3)), np.eye(4, 3)], outputs="loss", progress=False)
    _says(lambda: make([RELU], 1e-3), heading, f"write go.{name}(0.001, gauges)")
    of_report = "report" if name == "max_norm_muon" else "report.gauges"
    _says(lambda: make(report, 1e-3), heading, f"write go.{name}(0.001, {of_report})")
    _says(lambda: make(RELU, optax.constant_schedule(1e-3)), heading, f"write go.{name}(learning_rate, gauges)")
    _says(lambda: go.quotient(RELU, optax.adam(1e-3)), "quotient: inner is no transformation",
          "name the arguments: quotient(inner=optax.adamw(1e-3), ...)")


def test_remedies_can_be_typed() -> None:
    """Each was one that raises again, or that is for another mistake."""
    norm, params = lambda p: jnp.sum(p["up"] ** 2), {"up": jnp.ones((2, 3))}
    unit, other = go.scale_invariant({"up": "_ unit"}), "is a function of other arguments"
    barrier, product, fisher = (cast(Any, f) for f in (go.measure.barrier, go.product, go.measure.EmpiricalFisher))
    tx = go.quotient(optax.adam(1e-3), unit)
    _says(lambda: go.orbit.choose(norm, params, unit, optimizer=[unit]), "choose: optimizer is no transformation",
          "name the arguments: choose(optimizer=optax.adamw(1e-3), ...)")
    _says(lambda: go.tools.by_path({"**/bias": False}, default=True)(params), "by_path: no leaf matches '**/bias'",
          "take '**/bias' out if the tree has no such leaf")
    _says(lambda: go.check(tx, tx.init(params), params, params, loss_fn=lambda p, batch: norm(p)),
          f"check: loss_fn {other}", "pass batch= as well, or write loss_fn=lambda params: loss(params, batch)")
    _says(lambda: barrier(lambda p, batch: norm(p), params, params), f"barrier: loss {other}",
          "write loss=lambda params: function(params, ...), with its other arguments in place of ...")
    _says(lambda: product([[unit]]), "product: element 0 of the list is no gauge", "join the lists")
    _says(lambda: fisher(lambda p, x: x @ p["up"], params, [jnp.ones((1, 2))], {"x": 1}),
          "EmpiricalFisher: labels is a dict", "pass list(labels.values())")


def test_an_absent_leaf() -> None:
    linear = eqx.nn.MLP(3, 2, 4, 1, use_bias=False, key=jax.random.key(0))
    gauge = go.rescale({"layers/0/weight": "channel _", "layers/0/bias": "channel"}, {"layers/1/weight": "_ channel"})
    _says(lambda: go.quotient(optax.adam(1e-3), gauge).init(eqx.filter(linear, eqx.is_array)),
          "rescale: the leaf 'layers/0/bias' is None", "leave 'layers/0/bias' out of the gauge")
    layers = [NET, NET | {"up": NET["up"] | {"bias": None}}]
    each = go.rescale({"{i}/up/kernel": "_ c", "{i}/up/bias": "c"}, {"{i}/down/kernel": "c _"})
    _says(lambda: each.dim(layers), "rescale: the leaf '1/up/bias' is None", "leave '{i}/up/bias' out of the gauge")
    # A None that no pattern stands for is not blamed.
    with pytest.raises(ValueError, match="no leaf matches 'up/kernle'"):
        go.rescale({"up/kernle": "_ c"}, {"down/kernel": "c _"}).dim(layers[1])


# A norm's scale of zero --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "leaf", "stored"), [
    ("residual_rotation/stacked", "layers/scale", 0.0), ("norm_read_shift/one_plus_bias", "scale", -1.0),
])
def test_what_would_divide_by_a_norms_scale_of_zero_says_so(name: str, leaf: str, stored: float, x64: None) -> None:
    """No function returns NaN in its place; the message names the leaf."""
    (case,) = (case for case in FLAT_CASES if case.name == name)
    gauges, params = case.gauges(), case.params(jax.random.key(0))
    bound, group = go.bind(gauges, params), go.product(gauges)
    hidden = with_leaves(params, {leaf: leaves_by_path(params)[leaf].at[..., 0].set(stored)})
    element, step = group.sample(jax.random.key(1), params), jax.tree.map(jnp.ones_like, params)
    for call in (
        lambda: group.act(element, hidden), lambda: bound.read(hidden), lambda: bound.slice_point(hidden),
        lambda: bound.random_twin(jax.random.key(2), hidden), lambda: group.vertical(hidden, step),
        lambda: group.horizontal(hidden, step), lambda: go.orbit.align(params, hidden, gauges),
        lambda: go.orbit.align(hidden, params, gauges), lambda: go.orbit.distance(params, hidden, gauges),
        lambda: go.orbit.average([params, hidden], gauges), lambda: go.orbit.canonicalize(hidden, gauges),
        lambda: go.gauge_project(gauges).update(step, optax.EmptyState(), hidden),
        lambda: go.measure.drift(params, hidden, gauges), lambda: go.measure.vertical_motion(hidden, step, gauges),
        lambda: go.quotient(optax.sgd(0.1), gauges).init(hidden), lambda: bound.asymmetry(hidden, step),
        lambda: go.check(go.quotient(optax.sgd(0.1), gauges), jax.jit(optax.sgd(0.1).init)(hidden), hidden, step),
        lambda: go.orbit.from_state(optax.sgd(0.1).init(hidden), optax.sgd(0.1), gauges, hidden),
    ):
        with pytest.raises(ValueError, match=f"(?s)hides a channel, '{leaf}'.*found:    a scale of zero"):
            call()


@pytest.mark.slow
def test_a_read_shift_does_nothing_at_a_norms_scale_of_zero_that_jit_hides(x64: None) -> None:
    """Twins had other outputs, and W grew by u/γ, where γ had made its first step from zero."""
    (case,) = (case for case in FLAT_CASES if case.name == "norm_read_shift/one_plus_bias")
    start, (shift, norm) = case.params(jax.random.key(0)), case.gauges()
    hidden = with_leaves(start, {"scale": leaves_by_path(start)["scale"].at[0].set(-1.0)})
    twin = jax.jit(lambda p: go.bind(shift, p).random_twin(jax.random.key(2), p))(hidden)
    assert case.loss(twin) == pytest.approx(float(case.loss(hidden)), rel=1e-12)

    def after(gauges: Any) -> Any:
        tx = go.quotient(optax.adam(0.01), gauges)
        return train(jax.jit(tx.init), stepper(tx, case.loss), hidden, 4)[0]

    assert furthest(after([shift, norm]), after([norm])) < 1e-9
