"""Permutations: no directions, and optimizers that do not notice them. The laws of a group are in `test_conformance`.

Its laws about tangents and readings do not fit a finite group: nothing is vertical, and nothing
is read. What takes their place is checked here. Products with permutations have no `inverse` and no `compose`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from gauge_optax.binding import leaves_by_path, with_leaves
from tests.cases import DISCRETE_CASES, GaugeCase
from tests.quick import jit, rows
from tests.refusals import each_refused
from tests.twins import stepper, trained

Tree = Any

everywhere = rows(DISCRETE_CASES, [case.name for case in DISCRETE_CASES if "/whole" not in case.name])
UNITS = DISCRETE_CASES[0]


@functools.cache
def _params(case: GaugeCase) -> Tree:
    return jax.tree.map(np.asarray, case.params(jax.random.key(1)))


def _equal(a: Tree, b: Tree) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@everywhere
def test_half_a_move_is_no_symmetry(case: GaugeCase, x64: None) -> None:
    """Any leaf that is left where it was changes the loss, so that every leaf listed is needed."""
    params, loss = case.params(jax.random.key(1)), jit(case.loss)
    before = float(loss(params))
    gauge = next(gauge for gauge in case.gauges() if gauge.name == "permutation")
    key, order = next(iter(gauge.identity(params).items()))
    moved = leaves_by_path(gauge.act(gauge.identity(params) | {key: jnp.roll(order, 1, -1)}, params))
    tried = [path for path, x in leaves_by_path(params).items() if not np.array_equal(x, moved[path])]
    assert tried
    for path in (path for path in tried if not path.endswith("key/bias")):  # which softmax does not see at all
        half = with_leaves(params, moved | {path: leaves_by_path(params)[path]})
        assert abs(float(loss(half)) - before) > 1e-6 * abs(before), path


def test_samples_are_uniform_orders_per_copy() -> None:
    for case, shape in zip(DISCRETE_CASES[:3], ((5,), (2, 5), (3,)), strict=True):
        (order,) = case.gauges()[0].sample(jax.random.key(0), _params(case)).values()
        assert order.shape == shape and order.dtype == jnp.int32
    gauge, params = go.permutation({"up": "_ channel"}), {"up": jnp.ones((2, 3))}
    drawn = jax.vmap(lambda key: gauge.sample(key, params, 0.1)[""])(jax.random.split(jax.random.key(0), 6000))
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(counts) == 6 and np.all(np.abs(counts - 1000) < 150)


@everywhere
def test_nothing_is_vertical_and_nothing_is_read(case: GaugeCase) -> None:
    params = _params(case)
    tangent = jax.tree.map(np.cos, params)
    for gauge in (gauge for gauge in case.gauges() if gauge.name == "permutation"):
        assert _equal(gauge.horizontal(params, tangent), tangent)
        assert not any(np.any(x) for x in jax.tree.leaves(gauge.vertical(params, tangent)))
        assert _equal(gauge.read(params), gauge.identity(params)) and gauge.coordinates(params) == {}
        assert _equal(gauge.balance(params), gauge.identity(params))


@everywhere
def test_quotient_takes_it_in_a_list_and_changes_nothing(case: GaugeCase) -> None:
    """The same program and a state of the same arrays; only leaves that it alone binds pass through one sum more."""
    gauges, params = case.gauges(), jax.tree.map(jnp.asarray, _params(case))
    states, programs, bound, updates = [], [], [], []
    for listed in (gauges, [gauge for gauge in gauges if gauge.name != "permutation"]):
        tx = go.quotient(optax.adamw(1e-2), listed) if listed else optax.adamw(1e-2)
        states.append(jax.eval_shape(tx.init, params))
        programs.append(jax.make_jaxpr(lambda g, s, p, tx=tx: tx.update(g, s, p))(params, states[-1], params))
        bound.append(set(go.bind(listed, params).slice.added) if listed else set())
        updates.append(tx.update(params, tx.init(params), params)[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), *updates)
    assert [x.shape for x in jax.tree.leaves(states[0])] == [x.shape for x in jax.tree.leaves(states[1])]
    assert bound[0] >= bound[1] and (str(programs[0]) == str(programs[1])) == (bound[0] == bound[1])
    assert len(programs[0].eqns) <= len(programs[1].eqns) + 8 * len(bound[0] - bound[1])


def test_adam_does_not_notice_and_its_state_moves_along() -> None:
    (gauge,), params, tx = UNITS.gauges(), jax.tree.map(jnp.asarray, _params(UNITS)), optax.adamw(1e-2)
    g, step = gauge.sample(jax.random.key(0), params), stepper(tx, UNITS.loss)
    there, state = trained(tx, UNITS.loss, params, 3)
    twin, moved = gauge.act(g, there), go.orbit.transport(state, there, gauge, g)
    assert _equal(moved[0].nu, gauge.act(g, state[0].nu))
    for _ in range(3):
        (there, state, _), (twin, moved, _) = step(there, state), step(twin, moved)
    for x, y in zip(jax.tree.leaves(twin), jax.tree.leaves(gauge.act(g, there)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


UP, DOWN = {"up": "_ channel"}, {"down": "channel _"}
SCALE, ORDER = go.rescale(UP, DOWN), go.permutation(UP | DOWN)
BOTH, SQUARE = go.product([ORDER, SCALE]), {"up": np.eye(3), "down": np.eye(3)}
test_malformed_permutations_are_refused = each_refused({
    "two names": (lambda: go.permutation({"query": "layer _ head _"}), r"no axis to permute(.|\n)*write axis='head'"),
    "another name": (lambda: go.permutation(UP, axis="unit"), "no axis 'unit'"),
    "no name": (lambda: go.permutation({"up": "_ _"}), "name the axis of units"),
    "the basis of heads": (
        lambda: go.bind([go.head_rotation({"value": "_ head basis"}), go.permutation({"value": "_ _ channel"})],
                        {"value": jnp.ones((4, 2, 3))}),
        r"permutes the axis of 'value' that head_rotation acts on"),
    "an inverse": (lambda: BOTH.inverse(BOTH.identity(SQUARE)), "no inverse of elements of a product"),
    "a composition": (lambda: BOTH.compose(BOTH.identity(SQUARE), None), "no compose of elements of a product"),
})


def test_second_moments_move_under_a_scale_and_an_order() -> None:
    """Whichever of the two comes first in the list."""
    params = {"up": jnp.arange(1.0, 7.0).reshape(2, 3), "down": jnp.arange(1.0, 7.0).reshape(3, 2)}
    tx = optax.adam(1e-2)
    _, state = tx.update(params, tx.init(params), params)
    moves = {SCALE: {"": jnp.array([1.0, 0.0, -1.0])}, ORDER: {"": jnp.array([2, 0, 1])}}
    for gauges in ((SCALE, ORDER), (ORDER, SCALE)):
        moved = go.orbit.transport(state, params, gauges, tuple(moves[gauge] for gauge in gauges))[0]
        _, pull = jax.vjp(lambda p: go.product(gauges).act(tuple(moves[x] for x in gauges), p), params)  # noqa: B023
        (back,) = pull(moved.mu)
        for path in params:
            np.testing.assert_allclose(back[path], state[0].mu[path], rtol=1e-5)
            np.testing.assert_allclose(moved.nu[path], 0.1 * jnp.square(moved.mu[path]), rtol=1e-5)


def test_choose_leaves_the_order_as_it_is() -> None:
    (gauge,), params = UNITS.gauges(), jax.tree.map(jnp.asarray, _params(UNITS))
    element = go.orbit.choose(lambda p: jnp.sum(p["down"]), params, gauge, optax.sgd(0.1), steps=2, progress=False)
    assert _equal(element, gauge.identity(params))
