"""Permutations: the laws of a group, exactly; no directions; and optimizers that do not notice them.

The laws of `test_conformance` about tangents and readings do not fit a finite group: nothing is vertical, and nothing
is read. What takes their place is checked here. Products with permutations have no `inverse` and no `compose`.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from tests.cases import DISCRETE_CASES, GaugeCase
from tests.quick import jit

Tree = Any
WHOLE = ("permutation/whole_gpt", "permutation/whole_llama")
rows = pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] if c.name in WHOLE else []) for c in DISCRETE_CASES],
    ids=lambda case: case.name,
)
ALONE = [case for case in DISCRETE_CASES if len(case.gauges()) == 1]
alone = pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
ELEMENTS = {
    "permutation/units": (5,), "permutation/stacked": (2, 5), "permutation/grouped_heads": (3,),
}


@functools.cache
def _params(case: GaugeCase) -> Tree:
    return jax.tree.map(np.asarray, case.params(jax.random.key(1)))


def _equal(a: Tree, b: Tree) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@rows
def test_a_move_keeps_the_loss(case: GaugeCase, x64: None) -> None:
    group, params = go.product(case.gauges()), case.params(jax.random.key(1))
    loss = jit(case.loss)  # type: ignore[arg-type]
    before = float(loss(params))
    twin = group.act(group.sample(jax.random.key(3), params), params)
    assert abs(float(loss(twin)) - before) <= 1e-12 * abs(before)
    assert abs(float(loss(jax.tree.map(lambda x: 1.001 * x, params))) - before) > 1e-7 * abs(before)
    assert group.dim(params) == case.dim == group.dim(jax.eval_shape(lambda: params))


@rows
def test_half_a_move_is_no_symmetry(case: GaugeCase, x64: None) -> None:
    """Any leaf that is left where it was changes the loss, so that every leaf listed is needed."""
    params = case.params(jax.random.key(1))
    loss, before = jit(case.loss), float(case.loss(params))  # type: ignore[arg-type, misc]
    gauge = next(gauge for gauge in case.gauges() if gauge.name == "permutation")
    (key, n), *_ = [(k, e.shape) for k, e in gauge.identity(params).items()]
    cycle = gauge.identity(params) | {key: jnp.broadcast_to(jnp.roll(jnp.arange(n[-1]), 1), n)}
    moved, stored = leaves_by_path(gauge.act(cycle, params)), leaves_by_path(params)
    changed = [path for path, x in moved.items() if not np.array_equal(x, stored[path])]
    for path in (path for path in changed if not path.endswith("key/bias")):  # which softmax does not see at all
        half = jax.tree.unflatten(jax.tree.structure(params), [stored[p] if p == path else x for p, x in moved.items()])
        assert abs(float(loss(half)) - before) > 1e-6 * abs(before), path


@alone
def test_elements_form_a_group_exactly(case: GaugeCase) -> None:
    (gauge,) = case.gauges()
    params = _params(case)
    a, b, c = (gauge.sample(jax.random.key(seed), params) for seed in (0, 1, 2))
    assert _equal(gauge.act(gauge.compose(a, b), params), gauge.act(a, gauge.act(b, params)))
    assert _equal(gauge.compose(gauge.compose(a, b), c), gauge.compose(a, gauge.compose(b, c)))
    identity = gauge.identity(params)
    assert _equal(gauge.act(identity, params), params) and not _equal(a, identity)
    for nothing in (gauge.compose(a, gauge.inverse(a)), gauge.compose(gauge.inverse(a), a)):
        assert _equal(nothing, identity)
    assert {(x.shape, str(x.dtype)) for x in a.values()} == {(ELEMENTS[case.name], "int32")}
    assert eval(repr(gauge), {"go": go}) == gauge and go.tools.from_json(go.tools.to_json(gauge)) == [gauge]


def test_samples_are_uniform() -> None:
    gauge = go.permutation({"up": "_ channel"})
    params = {"up": jnp.ones((2, 3))}
    drawn = jax.vmap(lambda key: gauge.sample(key, params, 0.1)[""])(jax.random.split(jax.random.key(0), 6000))
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(counts) == 6 and np.all(np.abs(counts - 1000) < 150)


@rows
def test_nothing_is_vertical_and_nothing_is_read(case: GaugeCase) -> None:
    params = _params(case)
    for gauge in (gauge for gauge in case.gauges() if gauge.name == "permutation"):
        tangent = jax.tree.map(np.cos, params)
        assert _equal(gauge.horizontal(params, tangent), tangent)
        assert not any(np.any(x) for x in jax.tree.leaves(gauge.vertical(params, tangent)))
        assert _equal(gauge.read(params), gauge.identity(params)) and gauge.coordinates(params) == {}
        assert _equal(gauge.balance(params), gauge.identity(params))


@rows
def test_quotient_takes_it_in_a_list_and_changes_nothing(case: GaugeCase) -> None:
    """The same program and a state of the same arrays; only leaves that it alone binds pass through one sum more."""
    gauges, params = case.gauges(), jax.tree.map(jnp.asarray, _params(case))
    others = [gauge for gauge in gauges if gauge.name != "permutation"]
    states, programs, bound = [], [], []
    for listed in (gauges, others):
        tx = go.quotient(optax.adamw(1e-2), listed) if listed else optax.adamw(1e-2)
        states.append(jax.eval_shape(tx.init, params))
        traced = jax.make_jaxpr(lambda g, s, p, tx=tx: tx.update(g, s, p))(params, states[-1], params)
        programs.append(traced)
        bound.append(set(go.bind(listed, params).slice.added) if listed else set())
    assert [x.shape for x in jax.tree.leaves(states[0])] == [x.shape for x in jax.tree.leaves(states[1])]
    assert bound[0] >= bound[1] and (str(programs[0]) == str(programs[1])) == (bound[0] == bound[1])
    counts = [len(program.eqns) for program in programs]
    assert counts[0] <= counts[1] + 8 * len(bound[0] - bound[1])


def test_adam_does_not_notice_and_its_state_moves_along() -> None:
    case = next(case for case in DISCRETE_CASES if case.name == "permutation/units")
    (gauge,), params, tx = case.gauges(), jax.tree.map(jnp.asarray, _params(case)), optax.adamw(1e-2)
    g = gauge.sample(jax.random.key(0), params)

    def steps(params: Tree, state: Any, count: int) -> tuple[Tree, Any]:
        for _ in range(count):
            updates, state = tx.update(jax.grad(case.loss)(params), state, params)  # type: ignore[arg-type]
            params = optax.apply_updates(params, updates)
        return params, state

    there, state = steps(params, tx.init(params), 3)
    twin, moved = gauge.act(g, there), go.orbit.transport(state, there, gauge, g)
    assert _equal(moved[0].nu, gauge.act(g, state[0].nu))
    for x, y in zip(jax.tree.leaves(steps(twin, moved, 3)[0]),
                    jax.tree.leaves(gauge.act(g, steps(there, state, 3)[0])), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_second_moments_move_under_a_scale_and_an_order() -> None:
    """Whichever of the two comes first in the list."""
    blocks = {"up": "_ channel"}, {"down": "channel _"}
    params = {"up": jnp.arange(1.0, 7.0).reshape(2, 3), "down": jnp.arange(1.0, 7.0).reshape(3, 2)}
    tx = optax.adam(1e-2)
    _, state = tx.update(params, tx.init(params), params)
    scale, order = go.rescale(*blocks), go.permutation(blocks[0] | blocks[1])
    moves = {scale: {"": jnp.array([1.0, 0.0, -1.0])}, order: {"": jnp.array([2, 0, 1])}}
    for gauges in itertools.permutations((scale, order)):
        moved = go.orbit.transport(state, params, gauges, tuple(moves[gauge] for gauge in gauges))[0]
        for path in params:
            np.testing.assert_allclose(moved.nu[path], 0.1 * jnp.square(moved.mu[path]), rtol=1e-5)


def test_malformed_permutations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no axis to permute(.|\n)*write axis='head'"):
        go.permutation({"query": "layer _ head _"})
    with pytest.raises(ValueError, match="no axis 'unit'"):
        go.permutation({"up": "_ channel"}, axis="unit")
    with pytest.raises(ValueError, match="name the axis of units"):
        go.permutation({"up": "_ _"})
    heads = go.head_rotation({"value": "_ head basis"})
    inside = go.permutation({"value": "_ _ channel"})
    with pytest.raises(ValueError, match=r"permutes the axis of 'value' that head_rotation acts on"):
        go.product([heads, inside]).read({"value": jnp.ones((4, 2, 3))})
    units = go.permutation({"up": "_ channel", "down": "channel _"})
    both = go.product([units, go.rescale({"up": "_ channel"}, {"down": "channel _"})])
    params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    for method in (lambda e: both.inverse(e), lambda e: both.compose(e, e)):
        with pytest.raises(ValueError, match=r"no (inverse|compose) of elements of a product"):
            method(both.identity(params))


@rows
def test_canonical_weights_do_not_depend_on_the_order(case: GaugeCase, x64: None) -> None:
    gauges, params = case.gauges(), case.params(jax.random.key(1))
    group = go.product(gauges)
    canonical = go.orbit.canonicalize(params, gauges)
    twin = go.orbit.canonicalize(group.act(group.sample(jax.random.key(3), params), params), gauges)
    for x, y in zip(jax.tree.leaves(twin), jax.tree.leaves(canonical), strict=True):
        assert float(jnp.max(jnp.abs(x - y))) <= 1e-10 * float(jnp.max(jnp.abs(y)))
    loss = jit(case.loss)  # type: ignore[arg-type]
    assert abs(float(loss(canonical)) - float(loss(params))) <= 1e-12 * float(loss(params))


def test_choose_leaves_the_order_as_it_is() -> None:
    (gauge,) = ALONE[0].gauges()
    params = jax.tree.map(jnp.asarray, _params(ALONE[0]))
    element = go.orbit.choose(lambda p: jnp.sum(p["down"]), params, gauge, optax.sgd(0.1), steps=2, progress=False)
    assert _equal(element, gauge.identity(params))
