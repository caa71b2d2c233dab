"""quotient_adamw and quotient_muon: the represented step is that of the represented point.

The post's two examples with its own numbers, twins under GL at condition 100, whole lists of gauges on real models, and
factors that lack ranks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.gauges.bound import bound
from gauge_optax.optimizers._quotient import frame_and_slice_point, no_offset
from gauge_optax.parts.part import changed
from tests.cases import FLAT_CASES, GAUGE_CASES
from tests.quick import jit
from tests.refusals import refused
from tests.tolerances import tolerance
from tests.twins import normal, normal_like, stepper, trained

Tree = Any
EPS = 1e-3
LORA = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
OURS: dict[str, Callable[[Any], optax.GradientTransformationExtraArgs]] = {
    "quotient_adamw": lambda gauges: go.quotient_adamw(1e-2, gauges, weight_decay=0.1),
    "quotient_muon": lambda gauges: go.quotient_muon(1e-2, gauges, weight_decay=0.1),
}
CONDITION_100 = 2.303


def _relative(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(np.subtract(found, expected)) / np.linalg.norm(expected))


# The post's examples ------------------------------------------------------------------------------


def _diagonal(k: float, seeds: tuple[int, ...]) -> Tree:
    """§6: A = diag(K, 1/K) and B = (1 − ε)·A⁻¹; with seeds, turned by orthogonal matrices on both sides of each."""
    draws = (np.random.default_rng(seed).normal(size=(2, 2)) for seed in seeds)
    rows, basis, columns = (np.linalg.qr(draw)[0] for draw in draws) if seeds else 3 * [np.eye(2)]
    a, b = np.diag([k, 1 / k]), (1 - EPS) * np.diag([1 / k, k])
    return {"a": jnp.asarray(rows @ a @ basis), "b": jnp.asarray((columns @ b @ basis).T)}


@pytest.mark.parametrize("name", OURS)
def test_the_two_by_two_step_does_not_depend_on_k(name: str, x64: None) -> None:
    tx = OURS[name](LORA)
    loss = lambda p: 0.5 * jnp.sum(jnp.square(p["a"] @ p["b"] - jnp.eye(2)))  # noqa: E731

    @jit
    def product(p: Tree) -> jax.Array:
        updates, _ = tx.update(jax.grad(loss)(p), tx.init(p), p)
        after = optax.apply_updates(p, updates)
        return after["a"] @ after["b"]

    for seeds, most in (((), 9), ((1, 2, 3), 3), ((4, 5, 6), 3)):
        errors = [_relative(product(_diagonal(10.0**n, seeds)), product(_diagonal(1.0, seeds))) for n in range(1, most)]
        assert np.max(errors) <= 1e-8


# The end of a step --------------------------------------------------------------------------------


def _end(case: Any, steps: Callable[[Tree], Tree], pin: bool) -> tuple[float, float, float]:
    """The losses at the ends of both steps, inner's and ours, and a tolerance. `steps` maps slice point to step."""
    params, group = case.params(jax.random.key(0)), go.product(case.gauges())
    _, point = frame_and_slice_point("_end", group, params)
    step = steps(point)
    tx = go.quotient(optax.stateless(lambda updates, _: step), group, pin=pin)
    updates, _ = jit(tx.update)(params, tx.init(params), params)
    added = bound(group.gauges, params).slice.added  # `inner` sees 1 + what a leaf of axes "1+ ..." stores
    stored = with_leaves(point, {path: x - added.get(path, 0.0) for path, x in leaves_by_path(point).items()})
    inner, ours = (float(case.loss(optax.apply_updates(*both))) for both in ((stored, step), (params, updates)))
    return inner, ours, tolerance("quotient_loss") * max(1.0, abs(inner))


QUICK = (
    "head_linear/lora", "rope_linear/half", "head_rotation/gqa", "product/latent_fused", "residual_rotation/stacked",
)
ROWS = [
    pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)
    for case in GAUGE_CASES + FLAT_CASES
]


@pytest.mark.slow_rows("False-*", "*-0.3-*", "*-product/latent_fused")
@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("size", [0.3, 300.0])
@pytest.mark.parametrize("pin", [True, False])
def test_a_step_of_any_size_ends_at_the_function_of_inner(case: Any, size: float, pin: bool, x64: None) -> None:
    """`fix` and `hold` move the end along its orbit alone. Once they did so only to first order in the step."""
    inner, ours, most = _end(case, lambda x: jax.tree.map(lambda u: size * u, normal_like(5, x)), pin)
    assert abs(ours - inner) <= most


@pytest.mark.parametrize("case", ROWS)
def test_inner_sees_its_own_weights_turned(case: Any, x64: None) -> None:
    """With `pin=False`, every leaf keeps its length between two steps, if no constant moves it and no size is pinned.

    While `inner` saw something else, what it saw jumped at every step, until the weights were NaN.
    """
    params = case.params(jax.random.key(0))
    s = bound(go.product(case.gauges()).gauges, params).slice
    pinned = [part for part, _, _ in s.sizes if part.label not in no_offset(s)]
    moved = {path for part in (*pinned, *(part for part, _, _ in s.constants)) for path in changed(part)}
    step = jax.tree.map(lambda u: 0.3 * u, normal_like(5, params))
    inner = optax.GradientTransformation(lambda p: (p, p), lambda g, s, p: (step, (p, optax.tree.add(p, step))))
    tx = go.quotient(inner, case.gauges(), pin=False)
    state = jit(tx.init)(params)
    for _ in range(2):
        ends = leaves_by_path(state.inner_state[1])
        updates, state = jit(tx.update)(params, state, params)
        params = optax.apply_updates(params, updates)
    for path, seen in leaves_by_path(state.inner_state[0]).items():
        if path not in moved:
            np.testing.assert_allclose(jnp.linalg.norm(seen), jnp.linalg.norm(ends[path]), rtol=1e-9, err_msg=path)
    for part in pinned:
        scale = part.anchors[0][0].path
        np.testing.assert_allclose(leaves_by_path(state.inner_state[0])[scale], 1.0, rtol=1e-12, err_msg=scale)


@pytest.mark.parametrize("before", [True, False])
def test_a_state_of_another_hold_of_the_stream_is_refused(before: bool) -> None:
    """With `pin=False`: a held stream has fewer sizes in the offset."""
    params = normal(3, {"token": (8, 6), "scale": (6,), "up": (6, 5), "down": (5, 2)})
    norm = go.norm_scale({"scale": "channel"}, {"up": "channel _"})

    def made(hold: bool) -> Any:
        stream = go.residual_rotation({"up": "basis _"}, {"token": "_ basis"}, [norm], hold=hold)
        units = go.rescale({"up": "_ channel"}, {"down": "channel _"})
        return go.quotient_adamw(0.1, [stream, norm, units], pin=False)

    with refused("a state made with another `hold` of residual_rotation"):
        made(not before).update(params, made(before).init(params), params)


@pytest.mark.parametrize("kept", [0.0, 1e-3, 0.3])
@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
def test_a_step_to_a_head_of_low_rank_keeps_the_function(size: float, kept: float, x64: None) -> None:
    """Sign descent on a head that learned little makes one singular value a hundred times the others."""
    params = normal(3, {"a": (12, 6), "b": (6, 9)})
    group = go.product([LORA])
    point = group.act(group.inverse(group.read(params)), params)
    left, right = (jnp.sign(x) for x in normal(4, {"u": (12, 1), "v": (1, 6)}).values())
    step = {"a": (kept - 1.0) * point["a"] + size * left * right, "b": 0.1 * point["b"]}
    tx = go.quotient(optax.stateless(lambda updates, _: step), group)
    updates, _ = jit(tx.update)(params, tx.init(params), params)
    inner, ours = (optax.apply_updates(*both) for both in ((point, step), (params, updates)))
    assert _relative(ours["a"] @ ours["b"], inner["a"] @ inner["b"]) <= tolerance("quotient_loss")


def test_gradient_descent_takes_no_notice_of_hold(x64: None) -> None:
    """It has no state and commutes with rotations, if all that `inner` sees with `pin=False` turns as a whole."""
    params, target = normal(3, {"a": (12, 6), "b": (6, 9)}), normal(5, {"y": (12, 9)})["y"]
    loss = lambda p: jnp.mean(jnp.square(p["a"] @ p["b"] - target))  # noqa: E731
    held, free = (
        trained(go.quotient(optax.sgd(0.3), LORA, hold=hold, pin=False), loss, params, 100)[0] for hold in (True, False)
    )
    assert _relative(held["a"] @ held["b"], free["a"] @ free["b"]) <= tolerance("quotient_twins")


# Twins --------------------------------------------------------------------------------------------


X = np.random.default_rng(7).normal(size=(16, 12))
Y = np.random.default_rng(8).normal(size=(16, 10))


def _lora_loss(p: Tree, rows: int = 16) -> jax.Array:
    x, y = (jnp.asarray(z[:rows], p["a"].dtype) for z in (X, Y))
    return jnp.mean(jnp.square(x @ p["a"] @ p["b"] - y))


def _points(tx: optax.GradientTransformation, loss: Callable[[Tree], jax.Array], params: Tree) -> list[Tree]:
    """The start, and every point of 20 steps from there."""
    step, state, points = stepper(tx, loss), jit(tx.init)(params), [params]
    for _ in range(20):
        params, state, _ = step(points[-1], state)
        points.append(params)
    return points


def _twin_error(tx: optax.GradientTransformation, params: Tree, seed: int, loss: Any) -> float:
    """Largest relative distance of A·B over 20 steps from twins at condition 100."""
    twin = LORA.act(LORA.sample(jax.random.key(seed), params, CONDITION_100), params)
    ours, theirs = ([p["a"] @ p["b"] for p in _points(tx, loss, start)] for start in (params, twin))
    assert _relative(ours[0], ours[-1]) > 1e-3, "nothing moved"
    return float(np.max([_relative(b, a) for a, b in zip(ours[1:], theirs[1:], strict=True)]))


@pytest.mark.slow
def test_products_stay_together_at_condition_100(x64: None) -> None:
    params = normal(0, {"a": (12, 4), "b": (4, 10)})
    assert _twin_error(optax.adamw(1e-2), params, 0, _lora_loss) > 1e-2, "AdamW does not see these twins apart"
    for make in OURS.values():
        tx = make(LORA)
        assert all(_twin_error(tx, params, seed, _lora_loss) <= 1e-10 for seed in range(2))


@pytest.mark.slow_rows("quotient_muon-*", "*-2")
@pytest.mark.parametrize("rows", [16, 2])
@pytest.mark.parametrize("name", OURS)
def test_lora_starts_from_zero(name: str, rows: int, x64: None) -> None:
    """B = 0, and with two examples a B that has rank 2 of 4 for ever."""
    params, tx = normal(0, {"a": (12, 4)}) | {"b": jnp.zeros((4, 10))}, OURS[name](LORA)
    loss = functools.partial(_lora_loss, rows=rows)
    assert _twin_error(tx, params, 0, loss) <= 1e-10
    assert float(loss(_points(tx, loss, params)[-1])) < 0.9 * float(loss(params))


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_a_target_of_fewer_ranks_in_float32(name: str) -> None:
    """Its gradient has rounding in the place of two directions, which must not become weights."""
    draw = np.random.default_rng(11).normal
    goal = jnp.asarray(draw(size=(12, 2)) @ draw(size=(2, 10)), jnp.float32)
    params, tx = {"a": jnp.asarray(draw(size=(12, 4)), jnp.float32), "b": jnp.zeros((4, 10))}, OURS[name](LORA)

    loss = lambda p: jnp.mean(jnp.square(jnp.asarray(X, jnp.float32) @ (p["a"] @ p["b"] - goal)))  # noqa: E731
    # A polar factor multiplies what is rounding by its slope at zero, 485: Optax's Muon too.
    slope = 10.0 if name == "quotient_muon" else 1.0
    assert _twin_error(tx, params, 0, loss) <= slope * tolerance("twins", "float32")
    first, *others = (float(jnp.linalg.norm(p["a"])) for p in _points(tx, loss, params))
    assert np.max(others) < 10.0 * first


def test_heads_wider_than_the_model_are_left_as_they_are(x64: None) -> None:
    """Rank 4 of 6 on both sides: neither fixes what the other lacks."""
    gauge = go.head_linear({"query": "_ head basis"}, {"key": "_ head basis"})
    params, grads = (normal(seed, {"query": (4, 2, 6), "key": (4, 2, 6)}) for seed in (0, 1))
    adam, tx = optax.adam(1e-2), go.quotient(optax.adam(1e-2), gauge, hold=False)
    expected, _ = adam.update(grads, jit(adam.init)(params), params)
    found, _ = tx.update(grads, jit(tx.init)(params), params)
    for name, step in expected.items():
        np.testing.assert_allclose(found[name], step, rtol=0, atol=tolerance("optax"))


@pytest.mark.slow
def test_moduli_of_complex_planes_stay_where_they_are(x64: None) -> None:
    """rope_linear is a torus and a rescale per plane."""
    case: Any = next(c for c in GAUGE_CASES if c.name == "rope_linear/half")
    (gauge,), params = case.gauges(), case.params(jax.random.key(0))
    end, _ = trained(OURS["quotient_muon"](gauge), case.loss, params, 1)
    moved = gauge.read(end)[""] - gauge.read(params)[""]
    assert float(jnp.max(jnp.abs(moved[..., 0]))) <= 1e-9


@pytest.mark.parametrize("name", OURS)
def test_init_is_one_state_inside_jit_and_outside(name: str) -> None:
    """Inside, constants are no tracers, and yet nothing is computed at once."""
    params = {"a": jnp.ones((4, 2)).at[0, 1].set(3.0), "b": jnp.ones((2, 3)).at[1, 2].set(-2.0)}
    init = OURS[name](LORA).init
    for inside in (jax.jit(lambda: init(params))(), jax.jit(init)(params)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), inside, init(params))


# One inside another -------------------------------------------------------------------------------


SHIFT = go.logit_shift({"out": "_ _ vocab"})
NORM = go.norm_scale({"norm": "channel"}, {"value": "channel _ _"})
SCALE = go.rescale({"value": "_ head _"}, {"out": "head _ _"})
TURN = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
NET = {"norm": (12,), "value": (12, 2, 3), "out": (2, 3, 5)}


def _net_loss(p: Tree) -> jax.Array:
    logits = jnp.einsum("bi,i,ihd,hdo->bo", jnp.asarray(X), p["norm"], p["value"], p["out"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, np.arange(16) % 5).mean()


@pytest.mark.slow_rows("again", "what rotates")
@pytest.mark.parametrize(("inside", "outside"), [
    ([NORM, SCALE, TURN], [SHIFT]), ([TURN], [NORM, SCALE, SHIFT]), ([TURN, NORM], [SHIFT, NORM, SCALE]),
], ids=["what multiplies", "what rotates", "again"])
def test_twins_stay_twins_with_gauges_inside_that_are_undone_later(inside: Any, outside: Any, x64: None) -> None:
    """At a norm's scale of zero too, which is read from a leaf that the gauges inside move."""
    params, gauges, key = normal(0, NET), [SHIFT, NORM, SCALE, TURN], jax.random.key(1)
    params["norm"] = params["norm"].at[1].set(0.0)
    tx = go.quotient(go.quotient(optax.adamw(1e-2, weight_decay=0.1), inside), outside)
    go.testing.assert_equivariant_step(tx, _net_loss, params, gauges, key, steps=5, rtol=1e-10)


@pytest.mark.parametrize(("inside", "outside"), [
    (go.quotient(optax.adam(1e-2), NORM), [SCALE, SHIFT]), (go.quotient_muon(1e-2, SCALE), NORM),
    (go.ddc_adamw(1e-2, SHIFT), SCALE), (optax.inject_hyperparams(go.quotient_adamw)(1e-2, NORM), TURN),
    (optax.chain(optax.adam(1e-2), go.gauge_retract(SCALE)), NORM), (go.links.scale_by_opposite_gram(SCALE), NORM),
    (go.orbit.gauge_fix(optax.adam(1e-2), SCALE), [SCALE]),
])
def test_other_gauges_inside_are_refused(inside: Any, outside: Any) -> None:
    with refused("inside a quotient that moves '(value|out)' too", "go.quotient(optimizer, gauges)"):
        go.quotient(inside, outside).init(normal(0, NET))


@pytest.mark.parametrize("make", [go.ddc_adamw, go.quotient_adamw, go.quotient_muon])
def test_lookahead_belongs_around_a_transformation(make: Any) -> None:
    params = optax.LookaheadParams.init_synced(normal(0, NET))
    with refused("two sets of parameters", f"optax.lookahead(go.{make.__name__}("):
        make(1e-2, SCALE).init(params)
    assert optax.lookahead(make(1e-2, SCALE), sync_period=6, slow_step_size=0.5).init(params)


@pytest.mark.slow
def test_a_run_is_differentiated_through_what_holds_its_heads(x64: None) -> None:
    """The conjugate gradients inside have NaN for derivatives once they have converged."""
    params = normal(0, {"v": (6, 2, 3), "o": (2, 3, 6)})
    heads = go.head_rotation({"v": "_ head basis", "o": "head basis _"})

    def loss(p: Any) -> jax.Array:
        return jnp.mean((jnp.einsum("dhe,hem->dm", p["v"], p["o"]) - 1.0) ** 2)

    def end(rate: Any) -> jax.Array:
        tx, p = go.quotient(optax.sgd(rate), heads), params
        state = tx.init(p)
        for _ in range(2):
            updates, state = tx.update(jax.grad(loss)(p), state, p)
            p = optax.apply_updates(p, updates)
        return loss(p)

    slope, step = float(jax.grad(end)(0.1)), 1e-5
    assert slope == pytest.approx(float(end(0.1 + step) - end(0.1 - step)) / (2 * step), rel=1e-6)
