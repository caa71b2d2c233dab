"""An optimizer's state at θ, carried to g·θ, is the state that the same training has at g·θ.

No model is needed: twins are handed one gradient, as a cotangent at θ and at g·θ.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import gauge_optax as go
from gauge_optax.states.moves import move_cotangent, move_tangent
from tests.quick import jit
from tests.refusals import each_refused, refused
from tests.tolerances import tolerance
from tests.twins import driven, normal, structure, trained

Tree = Any

SHAPES: dict[str, tuple[int, ...]] = {
    "norm": (3,), "up": (3, 4), "down": (4, 3), "value": (3, 2, 3), "out": (2, 3, 4), "query": (3, 4), "key": (3, 4),
    "head": (3, 5), "free": (2,),
}
NORM = go.norm_scale({"norm": "channel"}, {"up": "channel _", "value": "channel _ _", "head": "channel _"})
UNIT = go.rescale({"up": "_ channel"}, {"down": "channel _"})
TURN = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
LINEAR = go.head_linear({"value": "_ head basis"}, {"out": "head basis _"})
ROPE = go.rope_linear({"query": "_ basis"}, {"key": "_ basis"})
SHIFT = go.logit_shift({"head": "_ vocab"})
EVERY_KIND = [NORM, UNIT, TURN, ROPE, SHIFT]


def noise(seed: int) -> Tree:
    return normal(seed, SHAPES)


def _errors(found: Tree, expected: Tree) -> list[tuple[float, Any]]:
    """Per array, the largest difference, relative to its largest entry or to 1, and its dtype.

    Or to 1: the moment of a norm's scale, whose channel has no direction of its own, is rounding.
    """
    assert structure(found) == structure(expected)
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    return [
        (np.max(np.abs(1.0 * np.asarray(a) - np.asarray(b)), initial=0.0) / np.max(np.abs(a), initial=1.0),
         np.asarray(b).dtype)
        for a, b in pairs if not jnp.issubdtype(jnp.asarray(a).dtype, jax.dtypes.prng_key)
    ]


def apart(found: Tree, expected: Tree) -> float:
    return float(np.max([error for error, _ in _errors(found, expected)], initial=0.0))  # NaN, if one is


def same(found: Tree, expected: Tree) -> None:
    for error, dtype in _errors(found, expected):
        assert error <= tolerance("group", dtype if np.issubdtype(dtype, np.floating) else float)


# Our own states ------------------------------------------------------------------------------------


def _chain(gauges: Sequence[go.Gauge]) -> optax.GradientTransformation:
    links = go.gauge_project(gauges), go.scale_by_ddc(gauges), go.add_gauge_decay(0.1, gauges)
    return optax.chain(*links, optax.scale_by_learning_rate(0.03), go.gauge_retract(gauges))


def _without_whole_turns(state: Tree) -> Tree:
    """Angles of planes come with any number of whole turns."""

    def settled(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        turns = ".frame.elements" in name and leaf.ndim
        if turns and "angles" in name:
            return jnp.exp(1j * leaf)
        return jnp.concatenate([leaf[..., :1], jnp.exp(1j * leaf[..., 1:])], -1) if turns else leaf

    return jax.tree.map_with_path(settled, state)


# Unfrozen, and with a scale on the shift's leaf, motion along the scale's orbit would move the shift between the twins.
APART = [UNIT, TURN, ROPE, SHIFT]
OURS = {
    "chain": (EVERY_KIND, _chain),
    "ddc_muon": ([NORM, UNIT, TURN], lambda g: go.ddc_muon(0.03, g)),
    "ddc_adamw/adam": (APART, lambda g: go.ddc_adamw(0.03, g, vertical="adam")),
    "ddc_adamw/body_frame": ([TURN], lambda g: go.ddc_adamw(0.03, g, v_mode="body_frame", refresh_every=2)),
    "ddc_adamw/per_head_scalar": ([TURN], lambda g: go.ddc_adamw(0.03, g, v_mode="per_head_scalar")),
    "ddc_adamw/per_head_matrix": ([TURN], lambda g: go.ddc_adamw(0.03, g, v_mode="per_head_matrix")),
    "ddc_adamw/none": ([TURN], lambda g: go.ddc_adamw(0.03, g, v_mode="none")),
}


SHARED = go.norm_scale({"norm": "channel"}, {"value": "channel _ _", "query": "channel _", "key": "channel _"})
FLAT_TURN = go.head_rotation({"query": "_ basis", "key": "_ basis"})
LISTS = {  # GL on values and outputs, a torus and a norm on the same leaves, a unit of its own; then a shift
    "rope": [SHARED, LINEAR, ROPE, UNIT], "turn": [SHARED, LINEAR, FLAT_TURN, UNIT],
    "shift": [NORM, UNIT, LINEAR, ROPE, SHIFT],
}
FRAMED = {
    f"{make.__name__}/{name}": (gauges, functools.partial(make, 0.03))
    for make in (go.quotient_adamw, go.quotient_muon) for name, gauges in LISTS.items()
} | {
    "balanced": ([NORM, UNIT, LINEAR, FLAT_TURN, SHIFT], lambda g: go.quotient(optax.adamw(0.03), g, rest="balanced")),
    "inverses": ([UNIT, LINEAR], lambda g: optax.chain(go.links.scale_by_opposite_gram(g, every=4), optax.sgd(0.003))),
}


@pytest.mark.slow_rows("balanced", "ddc_adamw/adam", "ddc_muon", "ddc*head*", "chain", "inverses", "quotient*")
@pytest.mark.parametrize("name", [*OURS, *FRAMED])
def test_a_moved_state_goes_on_where_its_twin_does(name: str, x64: None) -> None:
    """Two more steps, from the twin's state after three and from the one moved there; of `OURS` both are the same."""
    gauges, make = (OURS | FRAMED)[name]
    tx, limit = make(gauges), tolerance("group" if name in OURS else "oracle")
    group, start = go.product(gauges), noise(0)
    element = jit(group.sample)(jax.random.key(1), start)
    carried = jit(lambda p, g: move_cotangent(group, element, p, g))

    def run(params: Tree, seeds: range, moved: bool, state: Tree = None) -> tuple[Tree, Tree]:
        for seed in seeds:
            params, state = driven(tx, params, [carried(params, noise(seed)) if moved else noise(seed)], state)
        return params, state

    params, state = run(start, range(1, 4), False)
    there, expected = run(group.act(element, start), range(1, 4), True)
    moved = jit(lambda state, element: go.orbit.transport(state, start, gauges, element))(state, element)
    assert apart(_without_whole_turns(state), _without_whole_turns(moved)) > 1e-2, "nothing had to move"
    at = group.act(element, params)
    after, found = run(params, range(4, 6), False, state)[0], run(at, range(4, 6), True, moved)[0]
    assert apart(there, at) <= limit and apart(found, group.act(element, after)) <= limit
    if name in OURS:
        same(_without_whole_turns(moved), _without_whole_turns(expected))


def test_an_order_that_does_not_move_keeps_no_frame_from_moving(x64: None) -> None:
    order = go.permutation({"up": "_ unit", "down": "unit _"})
    params, gauges = noise(0), [UNIT, order]
    state, alone = (jit(go.quotient(optax.adam(0.1), own).init)(params) for own in (gauges, [UNIT]))
    element = UNIT.sample(jax.random.key(1), params)
    expected = go.orbit.transport(alone, params, [UNIT], (element,))
    same(go.orbit.transport(state, params, gauges, (element, order.identity(params))), expected)
    with pytest.raises(ValueError, match=r"no rule for a QuotientState under permutation(.|\n)*call tx.init"):
        go.orbit.transport(state, params, gauges, (element, order.sample(jax.random.key(0), params)))


def test_a_shift_that_a_rotation_turns_moves_with_it(x64: None) -> None:
    gauges = [go.logit_shift({"head": "_ _ vocab"}), go.head_rotation({"up": "_ basis", "head": "basis _ _"})]
    params = normal(0, {"up": (5, 3), "head": (3, 2, 4)})
    for order in (gauges, gauges[::-1]):  # the shift is measured before the rotation, or after it
        group, init = go.product(order), jit(go.gauge_retract(order).init)
        element = group.sample(jax.random.key(1), params)
        same(go.orbit.transport(init(params), params, order, element), init(group.act(element, params)))


def _moved_by_another(own: Any, gauges: Any, make: Any = go.ddc_adamw) -> Tree:
    """The state of one list, by an element of another that moves only what `LINEAR` does."""
    params = noise(0)
    element = tuple(g.sample(jax.random.key(1), params) if g is LINEAR else g.identity(params) for g in gauges)
    state = jax.eval_shape(make(0.03, own).init, params)
    return jax.eval_shape(lambda state: go.orbit.transport(state, params, gauges, element), state)


def _moved_plain(gauges: Any, element: Any, choice: str = "error") -> Tree:
    """The state of Adam."""
    return go.orbit.transport(optax.adam(0.1).init(noise(0)), noise(0), gauges, element, choice)


def _capped_around() -> Tree:
    params, tx = noise(0), go.orbit.hold_products(go.quotient_adamw(0.03, [UNIT, TURN]), UNIT, "cap", cap=0.5)
    return tx.update(params, tx.init(params), params)


ANOTHER = r"another list of gauges(.|\n)*remedy:   give transport the optimizer's own list of gauges"
STILL = {"": jnp.zeros(4)}
test_what_does_not_belong_together_is_refused = each_refused({
    "fewer": (lambda: _moved_by_another([UNIT, TURN], [UNIT]), ANOTHER),
    "more": (lambda: _moved_by_another([UNIT, TURN], [UNIT, TURN, SHIFT]), ANOTHER),
    "in quotient": (lambda: _moved_by_another([UNIT], [NORM], go.quotient_adamw), ANOTHER),
    "linear": (lambda: _moved_by_another([UNIT], [UNIT, LINEAR]), ANOTHER),  # moments of unbound leaves are Adam's
    "products around a longer list": (_capped_around, r"another list(.|\n)*put hold_products inside: go.quotient\("),
    "on_unknown": (lambda: _moved_plain(UNIT, STILL, "ignore"), "bad on_unknown"),
    "another size": (lambda: _moved_plain(UNIT, {"": jnp.zeros(3)}), "not an element of this gauge"),
    "a tuple": (lambda: _moved_plain(UNIT, (STILL,)), "not an element of this gauge"),
    "no tuple": (lambda: _moved_plain([UNIT], STILL), "not an element of this gauge"),
    "a short tuple": (lambda: _moved_plain([UNIT, TURN], (STILL,)), "not an element of this gauge"),
})


def test_what_does_not_move_is_given_its_identity(x64: None) -> None:
    still = TURN.identity(noise(0))
    _moved_plain([UNIT, TURN], ({"": jnp.ones(4)}, still))
    with pytest.raises(ValueError, match="head_rotation"):  # while tracing, an element may be any
        jax.eval_shape(lambda element: _moved_plain(TURN, element), still)
    adam = optax.adam(0.1).init(noise(0))
    assert go.orbit.transport(adam, {}, UNIT, {}) is adam


def test_radii_are_refused_where_norms_move() -> None:
    params = noise(0)
    state = jit(go.norms.hyperball({"up": "_ _", "value": "_ head _"}).init)(params)
    same(go.orbit.transport(state, params, TURN, TURN.sample(jax.random.key(0), params)), state)
    element = UNIT.sample(jax.random.key(0), params)
    for choice in ("error", "reset"):
        with pytest.raises(ValueError, match=r"HyperballState.radius of 'up' under rescale"):
            go.orbit.transport(state, params, UNIT, element, choice)
    same(go.orbit.transport(state, params, UNIT, element, "keep"), state)
    given = go.norms.hyperball({"up": "_ _"}, 2.0).init(params)
    same(go.orbit.transport(given, params, UNIT, element), given)


# Optax's states ------------------------------------------------------------------------------------

PAIR: dict[str, tuple[int, ...]] = {"up": (3, 4), "down": (4, 3), "free": (2,)}
OPTAX = {
    "adam": optax.adam(0.1),
    "amsgrad": optax.amsgrad(0.1),
    "adabelief": optax.adabelief(0.1, eps_root=0.0),
    "adan": optax.adan(0.1),
    "ademamix": optax.contrib.ademamix(0.1),
    "simplified_ademamix": optax.contrib.simplified_ademamix(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "rmsprop/bias": optax.rmsprop(0.1, bias_correction=True),
    "rmsprop/centered": optax.rmsprop(0.1, centered=True),
    "adagrad": optax.adagrad(0.1, initial_accumulator_value=0.0),
    "lion": optax.lion(0.1),
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "ema": optax.ema(0.9),
    "apply_every": optax.apply_every(4),
    "muon": optax.contrib.muon(0.1),
    "multi_steps": optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation(),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(0.1),
    "gauge_fix": go.orbit.gauge_fix(optax.adam(0.1), UNIT, every=9),
    "conditionally": optax.conditionally_mask(optax.adam(0.1), lambda *_, **__: True),
    "masked": optax.masked(optax.adam(0.1), {"up": True, "down": True, "free": False}),
    "partition": optax.partition({1: optax.adam(0.1), 2: optax.sgd(0.1, 0.9)}, {"up": 1, "down": 2, "free": 1}),
    "chain": optax.chain(optax.add_noise(0.0, 0.5, 0), optax.zero_nans(), optax.ema(0.9), optax.adam(0.1)),
}


OF_FIRST_ORDER = ("lion", "sgd", "muon", "ema")  # which move under every gauge
FULL_PAIR = go.head_linear({"up": "_ basis"}, {"down": "basis _"})


@pytest.mark.parametrize("name", OPTAX)
def test_moments_of_optax_are_those_of_the_gradients_there(name: str, x64: None) -> None:
    """Three gradients at θ, carried, against the same three at g·θ: no optimizer need be equivariant for that."""
    tx, params, gauge = OPTAX[name], normal(0, PAIR), FULL_PAIR if name in OF_FIRST_ORDER else UNIT
    element = gauge.sample(jax.random.key(1), params)
    twin = gauge.act(element, params)
    step, state, expected = jit(tx.update), jit(tx.init)(params), tx.init(twin)
    for seed in range(1, 4):
        grads = normal(seed, PAIR)
        _, state = step(grads, state, params)
        _, expected = step(move_cotangent(go.product(gauge), (element,), params, grads), expected, twin)
    assert apart(state, expected) > 1e-2
    same(go.orbit.transport(state, params, gauge, element), expected)


def test_a_first_moment_is_no_weight(x64: None) -> None:
    """docs/design.md §1: moved like a weight it is off by about its own size."""
    params, moment, group = normal(0, PAIR), normal(1, PAIR), go.product(UNIT)
    element = group.sample(jax.random.key(1), params)
    wrong, right = (move(group, element, params, moment) for move in (move_tangent, move_cotangent))
    assert optax.tree.norm(jax.tree.map(jnp.subtract, wrong, right)) > 0.5 * optax.tree.norm(right)


FACTORS = np.array([2.0, 1.0, 0.5, 3.0])


def _ratios(tx: optax.GradientTransformation, read: Any) -> Any:
    """By what a move of the units by these factors multiplies an average, entry by entry."""
    params, element = normal(0, PAIR), {"": jnp.log(FACTORS)}
    _, state = tx.update(normal(1, PAIR), jit(tx.init)(params), params)
    moved = go.orbit.transport(state, params, UNIT, element)
    return jax.tree.map(lambda a, b: a / b, read(moved), read(state))


def test_averages_of_steps_move_as_tangents(x64: None) -> None:
    """AdaDelta's squares of steps, and what a preconditioner sees; what a mask kept from it is still a gradient."""
    gradients, steps = _ratios(optax.scale_by_adadelta(), lambda state: (state.e_g, state.e_x))
    np.testing.assert_allclose(steps["up"][0], FACTORS**2)
    np.testing.assert_allclose(gradients["up"][0], FACTORS**-2.0)
    for first in (optax.scale_by_adam(), optax.scale_by_lion()):
        masked = optax.masked(first, {"up": True, "down": False, "free": False})
        links = ("a", optax.trace(0.9)), ("m", masked), ("z", optax.trace(0.9))
        tx = optax.chain(*(link for _, link in links))
        before, after = _ratios(tx, lambda state: (state[0].trace, state[2].trace))
        by_name = _ratios(optax.named_chain(*links), lambda state: (state["a"].trace, state["z"].trace))
        jax.tree.map(np.testing.assert_array_equal, by_name, (before, after))
        np.testing.assert_allclose(before["up"][0], 1 / FACTORS)
        np.testing.assert_allclose(after["up"][0], FACTORS)
        np.testing.assert_allclose(after["down"][:, 0], before["down"][:, 0])


FULL: dict[str, tuple[int, ...]] = {"value": (3, 2, 3), "out": (2, 3, 4), "free": (2,)}


@pytest.mark.parametrize("gauge", [TURN, LINEAR], ids=lambda g: g.name)
def test_a_full_gauge_and_second_moments_of_entries(gauge: go.Gauge, x64: None) -> None:
    tx, params = optax.adamw(0.1), normal(0, FULL)
    element = gauge.sample(jax.random.key(1), params)
    _, state = tx.update(normal(1, FULL), jit(tx.init)(params), params)
    with refused(f"ScaleByAdamState.nu of 'value' under {gauge.name}", "on_unknown='reset'", "go.quotient(tx, gauges)"):
        go.orbit.transport(state, params, gauge, element)
    kept, reset = (go.orbit.transport(state, params, gauge, element, choice)[0] for choice in ("keep", "reset"))
    same(kept, state[0]._replace(mu=move_cotangent(go.product(gauge), (element,), params, state[0].mu)))
    none = jax.tree.map(jnp.zeros_like, params)
    same(reset, state[0]._replace(**{k: none | {"free": getattr(state[0], k)["free"]} for k in ("mu", "nu")}))


def test_moduli_scale_entries_where_no_angle_turns(x64: None) -> None:
    params = {"query": noise(0)["query"], "key": noise(0)["key"]}
    tx, element = optax.adam(0.1), {"": jnp.array([[0.7, 0.0], [-0.2, 0.0]])}
    _, state = tx.update(params, jit(tx.init)(params), params)
    found = go.orbit.transport(state, params, ROPE, element)
    np.testing.assert_allclose((found[0].nu["query"] / state[0].nu["query"])[0], np.exp([-1.4, 0.4, -1.4, 0.4]))
    with pytest.raises(ValueError, match="rope_linear"):
        go.orbit.transport(state, params, ROPE, {"": element[""] + 0.1})


# States without a rule -----------------------------------------------------------------------------


class Curvature(NamedTuple):
    """A state that nobody knows."""

    rounds: jax.Array
    diagonal: Any


def test_a_state_without_a_rule_is_for_the_user_to_decide() -> None:
    params = noise(0)
    element = UNIT.sample(jax.random.key(0), params)
    state = ({"anything": Curvature(jnp.ones(()), noise(1))}, optax.EmptyState())
    with pytest.raises(ValueError, match="Curvature at up, which may be of 'up', under rescale"):
        go.orbit.transport(state, params, UNIT, element)
    same(go.orbit.transport(state, params, UNIT, element, "keep"), state)
    (found, _), zero = go.orbit.transport(state, params, UNIT, element, "reset"), jax.tree.map(jnp.zeros_like, noise(1))
    same(found["anything"].diagonal, noise(1) | {"up": zero["up"], "down": zero["down"]})
    elsewhere = (Curvature(jnp.ones(()), {"free": jnp.ones(2), "other": jnp.ones((7, 3))}), 3, jnp.ones((3, 4), int))
    same(go.orbit.transport(elsewhere, params, UNIT, element), elsewhere)


@pytest.mark.parametrize(("tx", "name"), [
    (optax.scale_by_factored_rms(), "FactoredState"), (optax.scale_by_sm3(), "ScaleBySM3State"),
])
def test_factored_moments_are_found_by_their_path(tx: optax.GradientTransformation, name: str) -> None:
    """Rows and columns have no leaf's shape."""
    params = {"up": jnp.ones((130, 140)), "down": jnp.ones((140, 130)), "free": jnp.ones(130)}
    element, state = {"": jnp.ones(140)}, jax.tree.map(jnp.ones_like, jit(tx.init)(params))
    with pytest.raises(ValueError, match=f"{name} at down"):
        go.orbit.transport(state, params, UNIT, element)
    found = go.orbit.transport(state, params, UNIT, element, "reset")
    left = {jax.tree_util.keystr(path) for path, x in jax.tree.leaves_with_path(found) if jnp.any(x)}
    assert all("free" in path or "count" in path for path in left) and len(left) >= 2


def test_signatures_are_kept() -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), noise(0))
    state = jax.eval_shape(go.ddc_adamw(0.03, EVERY_KIND, mu_dtype=jnp.bfloat16).init, params)
    element = go.product(EVERY_KIND).identity(params)
    moved = jax.eval_shape(lambda state: go.orbit.transport(state, params, EVERY_KIND, element), state)
    chex.assert_trees_all_equal_shapes_and_dtypes(moved, state)


# A plain run goes on as a quotient run -------------------------------------------------------------

SCALES = [NORM, UNIT, SHIFT]


def _loss(p: Tree) -> Any:
    x = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3) * p["norm"]
    hidden, heads = jax.nn.relu(x @ p["up"]) @ p["down"], jnp.einsum("nd,dhe,hef->nf", x, p["value"], p["out"])
    return sum(jnp.sum(jnp.square(y)) for y in (hidden, heads, jax.nn.log_softmax(x @ p["head"])))


def _plain_run(inner: optax.GradientTransformation, start: Tree) -> tuple[Tree, Tree, Tree]:
    """Weights and state after three steps, and the gradient there."""
    params, state = trained(inner, _loss, start, 3)
    return params, state, jit(jax.grad(_loss))(params)


def test_a_moment_is_moved_by_constants_before_sizes(x64: None) -> None:
    """A norm's bias flows through a kernel that the norm's scale multiplies."""
    params = normal(0, {"norm": (4,), "shift": (4,), "up": (4, 5), "bias": (5,), "down": (5, 3)})
    gauges = [
        go.norm_scale({"norm": "channel", "shift": "channel"}, {"up": "channel _"}),
        go.bias_absorption({"shift": "channel"}, {"up": "channel _"}, {"bias": "_"}),
        go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"}),
    ]

    def loss(p: Tree) -> jax.Array:
        x = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4) * p["norm"] + p["shift"]
        return jnp.sum(jnp.square(jax.nn.relu(x @ p["up"] + p["bias"]) @ p["down"]))

    def moments(p: Tree) -> Tree:
        _, state = inner.update(jax.grad(loss)(p), inner.init(p), p)
        return go.orbit.from_state(state, inner, gauges, p).inner_state

    inner, group = optax.trace(0.9), go.product(gauges)
    twin = group.act(group.sample(jax.random.key(1), params), params)
    assert float(loss(twin)) == pytest.approx(float(loss(params)))
    assert apart(moments(twin), moments(params)) <= tolerance("quotient_twins")


@pytest.mark.slow
def test_a_state_on_the_slice_goes_on_as_it_is(x64: None) -> None:
    """Where the frame is the identity, the next step is the plain optimizer's, but for coming back to the slice."""
    inner, group = optax.adamw(1e-5, weight_decay=0.0), go.product(SCALES)
    start = group.act(group.inverse(group.read(noise(0))), noise(0))
    state, gradient = _plain_run(inner, start)[1], jit(jax.grad(_loss))(start)
    plain, _ = inner.update(gradient, state, start)
    ours, _ = go.quotient(inner, SCALES).update(gradient, go.orbit.from_state(state, inner, SCALES, start), start)
    moved = [float(_loss(optax.apply_updates(start, u)) - _loss(start)) for u in (ours, plain)]
    assert moved[0] == pytest.approx(moved[1], rel=1e-3)


@pytest.mark.parametrize("still", ["up/kernel", "bias"])
def test_a_state_with_frozen_leaves_goes_on(still: str) -> None:
    """`quotient` refused it as a state that trains them."""
    params = {"up": {"kernel": jnp.ones((2, 3))}, "down": 2.0 * jnp.ones((3, 2)), "bias": jnp.ones(2)}
    kinds = jax.tree.map(lambda path: "still" if path == still else "moves", {
        "up": {"kernel": "up/kernel"}, "down": "down", "bias": "bias"})
    inner = optax.partition({"still": optax.set_to_zero(), "moves": optax.sgd(0.1, 0.9)}, kinds)
    gauge = go.rescale({"up/kernel": "_ channel"}, {"down": "channel _"})
    state = go.orbit.from_state(inner.init(params), inner, gauge, params)
    tx = go.quotient(inner, gauge)
    chex.assert_trees_all_close(state, tx.init(params))
    updates, _ = tx.update(params, state, params)
    assert not jnp.any(updates["up"]["kernel"] if still == "up/kernel" else updates[still]) and jnp.any(updates["down"])


def test_heads_keep_their_basis_and_what_mixes_entries_is_refused_or_reset(x64: None) -> None:
    inner = optax.adamw(1e-2)
    params, state, _ = _plain_run(inner, noise(0))
    own = go.orbit.from_state(state, inner, [TURN], params)
    frame, still = map(jax.tree.leaves, (own.frame.elements, TURN.identity(params)))
    assert apart(own.inner_state, state) == apart(frame, still) == 0.0
    with pytest.raises(ValueError, match="second moments"):
        go.orbit.from_state(state, inner, [LINEAR], params)
    reset = go.orbit.from_state(state, inner, [LINEAR], params, on_unknown="reset")
    assert not np.any(reset.inner_state[0].nu["value"])
    with refused("not a state of this optimizer", "from_state"):
        go.orbit.from_state(optax.sgd(0.1).init(params), inner, SCALES, params)


def test_an_unpinned_run_goes_on_from_a_plain_state(x64: None) -> None:
    """At its first step the optimizer is on the slice either way."""
    inner = optax.adamw(1e-2)
    params, state, gradient = _plain_run(inner, noise(0))
    free, pinned = (go.orbit.from_state(state, inner, SCALES, params, pin=pin) for pin in (False, True))
    tx = go.quotient(inner, SCALES, pin=False)
    assert structure(free) == structure(tx.init(params))
    steps = tx.update(gradient, free, params)[0], go.quotient(inner, SCALES).update(gradient, pinned, params)[0]
    assert apart(*steps) <= 1e-12
    with pytest.raises(ValueError, match="pin=True"):
        tx.update(gradient, pinned, params)
