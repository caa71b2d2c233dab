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
from tests.refusals import refused
from tests.tolerances import tolerance
from tests.twins import driven, normal

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


def apart(found: Tree, expected: Tree) -> dict[str, tuple[float, Any]]:
    """Per array, the largest difference, relative to its largest entry or to 1, and its dtype.

    Or to 1: the moment of a norm's scale, whose channel has no direction of its own, is rounding.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    return {
        jax.tree_util.keystr(path): (
            np.max(np.abs(1.0 * np.asarray(a) - np.asarray(b)), initial=0.0) / np.max(np.abs(a), initial=1.0),
            np.asarray(b).dtype,
        )
        for (path, a), b in pairs if not jnp.issubdtype(jnp.asarray(a).dtype, jax.dtypes.prng_key)
    }


def same(found: Tree, expected: Tree) -> None:
    for path, (error, dtype) in apart(found, expected).items():
        assert error <= tolerance("group", dtype if np.issubdtype(dtype, np.floating) else float), (path, error)


def differ(found: Tree, expected: Tree) -> bool:
    return max(error for error, _ in apart(found, expected).values()) > 1e-2


# Our own states ------------------------------------------------------------------------------------


def _chain(gauges: Sequence[go.Gauge]) -> optax.GradientTransformation:
    links = go.gauge_project(gauges), go.scale_by_ddc(gauges), go.add_gauge_decay(0.1, gauges)
    return optax.chain(*links, optax.scale_by_learning_rate(0.03), go.gauge_retract(gauges))


def _without_whole_turns(state: Tree) -> Tree:
    """Angles of planes come with any number of whole turns."""

    def settled(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        turns = ".frame.elements" in name and leaf.ndim
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
    "kept inverses": (
        [UNIT, LINEAR], lambda g: optax.chain(go.links.scale_by_opposite_gram(g, every=4), optax.sgd(0.003))
    ),
}


@pytest.mark.slow_rows("ddc_adamw/adam", "ddc_muon", "ddc*head*", "chain", "quotient*", "kept*")
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

    twin = group.act(element, start)
    params, state = run(start, range(1, 4), False)
    there, expected = run(twin, range(1, 4), True)
    moved = jit(lambda state, element: go.orbit.transport(state, start, gauges, element))(state, element)
    assert differ(_without_whole_turns(state), _without_whole_turns(moved)), "nothing had to move"
    at = group.act(element, params)
    after, found = run(params, range(4, 6), False, state)[0], run(at, range(4, 6), True, moved)[0]
    for own, carried_there in ((there, at), (found, group.act(element, after))):
        assert max(error for error, _ in apart(own, carried_there).values()) <= limit
    if name in OURS:
        same(_without_whole_turns(moved), _without_whole_turns(expected))


def test_an_order_that_does_not_move_keeps_no_frame_from_moving(x64: None) -> None:
    order = go.permutation({"up": "_ unit", "down": "unit _"})
    params, gauges, tx = noise(0), [UNIT, order], go.quotient(optax.adam(0.1), [UNIT, order])
    state, still = jit(tx.init)(params), order.identity(params)
    element = UNIT.sample(jax.random.key(1), params)
    alone = go.quotient(optax.adam(0.1), [UNIT])
    expected = go.orbit.transport(jit(alone.init)(params), params, [UNIT], (element,))
    same(go.orbit.transport(state, params, gauges, (element, still)), expected)
    with pytest.raises(ValueError, match=r"no rule for a QuotientState under permutation(.|\n)*call tx.init"):
        go.orbit.transport(state, params, gauges, (element, order.sample(jax.random.key(0), params)))


def test_a_shift_that_a_rotation_turns_moves_with_it(x64: None) -> None:
    shapes = {"up": (5, 3), "head": (3, 2, 4)}
    gauges = [go.logit_shift({"head": "_ _ vocab"}), go.head_rotation({"up": "_ basis", "head": "basis _ _"})]
    params = normal(0, shapes)
    for order in (gauges, gauges[::-1]):  # the shift is measured before the rotation, or after it
        group, init = go.product(order), jit(go.gauge_retract(order).init)
        element = group.sample(jax.random.key(1), params)
        same(go.orbit.transport(init(params), params, order, element), init(group.act(element, params)))


OTHER_LISTS = {
    "fewer": ([UNIT, TURN], go.ddc_adamw, [UNIT]),
    "more": ([UNIT, TURN], go.ddc_adamw, [UNIT, TURN, SHIFT]),
    "another": ([UNIT, TURN], go.ddc_adamw, [NORM, UNIT, TURN]),
    "in quotient": ([UNIT], go.quotient_adamw, [NORM]),
    "linear": ([UNIT], go.ddc_adamw, [UNIT, LINEAR]),  # of leaves that none of its gauges bind, moments are Adam's
}


@pytest.mark.parametrize("name", OTHER_LISTS)
def test_a_state_of_another_list_is_refused(name: str) -> None:
    own, make, gauges = OTHER_LISTS[name]
    params = noise(0)
    element = tuple(g.sample(jax.random.key(1), params) if g is LINEAR else g.identity(params) for g in gauges)
    state = jax.eval_shape(make(0.03, own).init, params)
    with refused("another list of gauges", "remedy:   give transport the optimizer's own list of gauges"):
        jax.eval_shape(lambda state: go.orbit.transport(state, params, gauges, element), state)


def test_products_around_a_longer_list_belong_inside() -> None:
    params, tx = noise(0), go.orbit.hold_products(go.quotient_adamw(0.03, [UNIT, TURN]), UNIT, "cap", cap=0.5)
    with refused("another list of gauges", "put hold_products inside: go.quotient(go.orbit.hold_products("):
        tx.update(params, tx.init(params), params)


def test_what_does_not_move_is_given_its_identity(x64: None) -> None:
    params, tx = noise(0), go.ddc_adamw(0.03, [UNIT, TURN])
    element = ({"": jnp.ones(4)}, TURN.identity(params))
    state = jit(tx.init)(params)
    found = go.orbit.transport(state, params, [UNIT, TURN], element)
    (label,) = (label for label in state.frame.elements if label.startswith("rescale"))
    ratios = found.frame.elements[label] / state.frame.elements[label]
    np.testing.assert_allclose(jnp.log(ratios), 1.0, atol=tolerance("group"))
    same(found._replace(frame=state.frame), state)
    adam = optax.adam(0.1).init(params)
    go.orbit.transport(adam, params, [UNIT, TURN], element)
    with pytest.raises(ValueError, match="head_rotation"):  # while tracing, an element may be any
        jax.eval_shape(lambda e: go.orbit.transport(adam, params, TURN, e), element[1])


def test_radii_are_refused_where_norms_move() -> None:
    params = noise(0)
    tx = go.norms.hyperball({"up": "_ _", "value": "_ head _"})
    state = jit(tx.init)(params)
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
    "nadamw": optax.nadamw(0.1),
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
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "conditionally": optax.conditionally_mask(optax.adam(0.1), lambda *_, **__: True),
    "masked": optax.masked(optax.adam(0.1), {"up": True, "down": True, "free": False}),
    "partition": optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, {"up": "a", "down": "b", "free": "a"}
    ),
    "chain": optax.chain(
        optax.add_noise(0.0, 0.5, 0), optax.clip(9.0), optax.zero_nans(), optax.ema(0.9), optax.adam(0.1)
    ),
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
    assert differ(state, expected)
    same(go.orbit.transport(state, params, gauge, element), expected)


def test_a_first_moment_is_no_weight(x64: None) -> None:
    """docs/design.md §1: moved like a weight it is off by about its own size."""
    params, group = normal(0, PAIR), go.product(UNIT)
    element = group.sample(jax.random.key(1), params)
    moment, expected = normal(1, PAIR), move_cotangent(group, element, params, normal(1, PAIR))
    like_a_weight = move_tangent(group, element, params, moment)
    off = optax.tree.norm(jax.tree.map(jnp.subtract, like_a_weight, expected)) / optax.tree.norm(expected)
    print(f"a first moment moved like a weight is off by {off:.2f}")
    assert off > 0.5


FACTORS = np.array([2.0, 1.0, 0.5, 3.0])


def _ratios(tx: optax.GradientTransformation, read: Any) -> Any:
    """By what a move of the units by these factors multiplies an average, entry by entry."""
    params, element = normal(0, PAIR), {"": jnp.log(FACTORS)}
    _, state = tx.update(normal(1, PAIR), jit(tx.init)(params), params)
    moved = go.orbit.transport(state, params, UNIT, element)
    return jax.tree.map(lambda a, b: a / b, read(moved), read(state))


def test_adadelta_squares_its_steps_as_tangents(x64: None) -> None:
    gradients, steps = _ratios(optax.scale_by_adadelta(), lambda state: (state.e_g, state.e_x))
    np.testing.assert_allclose(steps["up"][0], FACTORS**2)
    np.testing.assert_allclose(gradients["up"][0], FACTORS**-2.0)


@pytest.mark.parametrize("first", [optax.scale_by_adam(), optax.scale_by_lion(), optax.scale_by_rms()])
def test_after_a_preconditioner_updates_are_averaged(first: optax.GradientTransformation, x64: None) -> None:
    """Leaf by leaf: what a mask kept from the preconditioner is still a gradient."""
    masked = optax.masked(first, {"up": True, "down": False, "free": False})
    tx = optax.chain(optax.trace(0.9), masked, optax.trace(0.9))
    before, after = _ratios(tx, lambda state: (state[0].trace, state[2].trace))
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
    expected = move_cotangent(go.product(gauge), (element,), params, state[0].mu)
    kept = go.orbit.transport(state, params, gauge, element, "keep")
    same(kept[0], state[0]._replace(mu=expected))
    reset = go.orbit.transport(state, params, gauge, element, "reset")
    none = jax.tree.map(jnp.zeros_like, params)
    same(reset[0], state[0]._replace(**{k: none | {"free": getattr(state[0], k)["free"]} for k in ("mu", "nu")}))


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


def test_arguments_that_make_no_sense_are_refused() -> None:
    params = noise(0)
    state, still = optax.adam(0.1).init(params), UNIT.identity(params)
    with pytest.raises(ValueError, match="bad on_unknown"):
        go.orbit.transport(state, params, UNIT, still, "ignore")
    wrong: Any = [(UNIT, {"": jnp.zeros(3)}), (UNIT, (still,)), ([UNIT], still), ([UNIT, TURN], (still,))]
    for gauge, element in wrong:
        with pytest.raises(ValueError, match="not an element of this gauge"):
            go.orbit.transport(state, params, gauge, element)
    assert go.orbit.transport(state, {}, UNIT, {}) is state


def test_signatures_are_kept() -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), noise(0))
    state = jax.eval_shape(go.ddc_adamw(0.03, EVERY_KIND, mu_dtype=jnp.bfloat16).init, params)
    element = go.product(EVERY_KIND).identity(params)
    moved = jax.eval_shape(lambda state: go.orbit.transport(state, params, EVERY_KIND, element), state)
    chex.assert_trees_all_equal_shapes_and_dtypes(moved, state)
