"""`quotient`: twins are one function under any optimizer, coordinates stand still, and the program is small.

Weights of one function, moved by an element of the whole product group, are trained side by side. One compiled step per
(model, dtype, optimizer) serves every start.
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
from gauge_optax.linalg import lyapunov_by_products
from models import lm
from tests.quick import jit
from tests.tolerances import tolerance
from tests.twins import CONFIGS, ODD, Tree, apart, check_twins, loss_of, odd, start_of, stepper, train

Make = Callable[[], optax.GradientTransformation]

INNERS: dict[str, Make] = {
    "adamw": lambda: optax.adamw(3e-3, weight_decay=0.1),
    "lion": lambda: optax.lion(1e-3, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(3e-3, min_dim_size_to_factor=2),
    "sm3": lambda: optax.sm3(3e-3),
    "contrib.muon": lambda: optax.contrib.muon(3e-3),
    "prodigy": lambda: optax.contrib.prodigy(),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(3e-3),
    "clip_sgd": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1, momentum=0.9)),
}


@functools.cache
def program(name: str, dtype: str, inner: str, linear: bool) -> tuple[Any, Any, Any]:
    """The group, and compiled `init` and step of `quotient` around an inner, or of "muon", our per-head alias."""
    del dtype
    group, loss = go.product(lm.gauges(CONFIGS[name], linear)), loss_of(name)
    tx = go.quotient_muon(3e-3, group) if inner == "muon" else go.quotient(INNERS[inner](), group)
    return group, jit(tx.init), stepper(tx, loss)


def check_quotient(name: str, dtype: str, inner: str, params: Tree, linear: bool = False, **slack: float) -> None:
    group, init, step = program(name, dtype, inner, linear)
    check_twins(f"{name} {inner}", group, init, step, params, dtype, **slack)


# Twins --------------------------------------------------------------------------------------------

MODELS = [pytest.param(n, marks=() if n in ("gpt", "llama") else pytest.mark.slow) for n in CONFIGS]


@pytest.mark.slow_rows("gpt-float32", "llama-float64")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_twins_under_adamw(name: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        check_quotient(name, dtype, "adamw", start_of(name, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("inner", [*INNERS, "muon"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_twins_under_any_optimizer(name: str, inner: str, dtype: str) -> None:
    # Prodigy's estimate of a distance adds up rounding of all leaves: 1.9e-5 or 2.5e-5 in the loss, by the machine.
    loss_slack = 4.0 if (name, inner, dtype) == ("gpt", "prodigy", "float32") else 1.0
    with jax.enable_x64(dtype == "float64"):
        check_quotient(name, dtype, inner, start_of(name, dtype), loss_slack=loss_slack)


@pytest.mark.slow_rows("clip_sgd")
@pytest.mark.parametrize("inner", ["lion", "muon", "clip_sgd"])
def test_twins_under_signs_polar_factors_and_clipping(inner: str, x64: None) -> None:
    check_quotient("gpt", "float64", inner, start_of("gpt", "float64"))


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["gpt", "llama", "mqa"])
def test_twins_under_general_linear_groups(name: str, dtype: str, inner: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        check_quotient(name, dtype, inner, start_of(name, dtype), linear=True)


@pytest.mark.slow_rows("[!al]*", "adafactor")
@pytest.mark.parametrize("inner", [*INNERS])
def test_the_same_optimizers_alone_tell_twins_apart(inner: str, x64: None) -> None:
    group, params, tx = go.product(lm.gauges(CONFIGS["gpt"])), start_of("gpt", "float64"), INNERS[inner]()
    g = group.sample(jax.random.key(3), params)
    step, loss = stepper(tx, loss_of("gpt")), jit(loss_of("gpt"))
    ours, _ = train(jit(tx.init), step, params, 3)
    theirs, _ = train(jit(tx.init), step, group.act(g, params), 3)
    assert abs(float(loss(theirs)) / float(loss(ours)) - 1.0) > 1e-6


@pytest.mark.parametrize("start", ODD)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_odd_starts(start: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        check_quotient("gpt", dtype, "adamw", odd(start, start_of("gpt", dtype)))


@pytest.mark.slow
@pytest.mark.parametrize("start", ODD)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("inner", ["lion", "muon"])
def test_odd_starts_under_other_optimizers(inner: str, start: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        check_quotient("gpt", dtype, inner, odd(start, start_of("gpt", dtype)))


# Not pinned ---------------------------------------------------------------------------------------


def _start_of_the_slice(group: Any, params: Tree) -> Tree:
    return group.act(group.inverse(group.read(params)), params)


@pytest.mark.slow_rows("contrib.muon-True", "adamw-True")
@pytest.mark.parametrize("linear", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("inner", ["adamw", pytest.param("contrib.muon", marks=pytest.mark.slow)])
def test_unpinned_optimizers_take_the_steps_that_they_take_alone(inner: str, linear: bool, x64: None) -> None:
    """From the slice point of θ; whatever the weights are moved by to stay there."""
    group, params, loss = go.product(lm.gauges(CONFIGS["gpt"], linear)), start_of("gpt", "float64"), loss_of("gpt")
    start = _start_of_the_slice(group, params)
    free, pinned = (go.quotient(INNERS[inner](), group, hold=False, pin=pin) for pin in (False, True))
    _, expected = train(INNERS[inner]().init, stepper(INNERS[inner](), loss), start)
    _, found = train(jit(free.init), stepper(free, loss), params)
    _, other = train(jit(pinned.init), stepper(pinned, loss), params)
    assert np.max(np.abs(found - expected)) <= 1e-8 < 1e-4 < np.max(np.abs(other - expected))


@pytest.mark.slow
def test_unpinned_weights_stay_on_the_slice() -> None:
    group, params, loss = go.product(lm.gauges(CONFIGS["llama"])), start_of("llama", "float32"), loss_of("llama")
    tx = go.quotient(INNERS["adamw"](), group, pin=False)
    step = stepper(tx, loss)
    twin = group.act(g := group.sample(jax.random.key(3), params), params)
    ends = [train(jit(tx.init), step, start, 100)[0] for start in (params, twin)]
    assert _largest(go.measure.drift(params, ends[0], group)) <= tolerance("quotient_drift", "float32")
    assert max(apart(ends[1], group.act(g, ends[0])).values()) <= tolerance("quotient_twins", "float32")


# The step -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_order_of_the_list_changes_nothing(x64: None) -> None:
    gauges, params, loss = lm.gauges(CONFIGS["gpt"]), start_of("gpt", "float64"), loss_of("gpt")
    ends = []
    for order in (gauges, gauges[::-1]):
        tx = go.quotient(INNERS["adamw"](), order)
        ends.append(train(jit(tx.init), stepper(tx, loss), params)[0])
    assert max(apart(*ends).values()) <= 1e-8


def test_the_size_of_the_loss_changes_nothing_that_adamw_does_not_show() -> None:
    params, loss = start_of("gpt", "float32"), loss_of("gpt")
    gauges = lm.gauges(CONFIGS["gpt"])

    def end(tx: optax.GradientTransformation, size: float) -> Tree:
        return train(jit(tx.init), stepper(tx, lambda p: size * loss(p)), params, 5)[0]

    ours = max(apart(*(end(go.quotient(INNERS["adamw"](), gauges), s) for s in (1.0, 1e8))).values())
    plain = max(apart(*(end(INNERS["adamw"](), s) for s in (1.0, 1e8))).values())
    print(f"loss times 1e8: {ours:.1e}, plain {plain:.1e}")
    assert ours <= max(3.0 * plain, 1e-5)


@pytest.mark.slow_rows("1e+25", "inf", "1e+20")
@pytest.mark.filterwarnings("ignore:an empty list of gauges")
@pytest.mark.parametrize("size", [1e20, 1e25, np.inf, np.nan])
def test_gradients_of_any_size_leave_what_adamw_leaves(size: float) -> None:
    params = start_of("gpt", "float32")
    grads = jax.tree.map(lambda x: size * jnp.sign(x), params)
    for gauges in (lm.gauges(CONFIGS["gpt"]), []):
        tx = go.quotient(INNERS["adamw"](), gauges)
        updates, _ = jit(tx.update)(grads, jit(tx.init)(params), params)
        finite = all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(updates))
        assert finite == np.isfinite(size)


def test_zero_gradients_move_nothing() -> None:
    params = start_of("gpt", "float32")
    tx = go.quotient(optax.adam(1e-2), lm.gauges(CONFIGS["gpt"]))
    updates, _ = jit(tx.update)(jax.tree.map(jnp.zeros_like, params), jit(tx.init)(params), params)
    assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(updates)) <= 1e-6


@pytest.mark.parametrize("head", ["constant", "any"])
def test_before_a_constant_head_what_is_rounding_is_no_step(head: str) -> None:
    kernel = jnp.full((3, 4), 0.3) if head == "constant" else jnp.ones((3, 4)).at[0, 0].set(2.0)
    params = {"before": jnp.ones(3), "beside": jnp.ones(3), "head": kernel}
    grads = {"before": jnp.full(3, 1e-8), "beside": jnp.full(3, 1e-3), "head": jnp.ones((3, 4)).at[:, 0].set(-3.0)}
    tx = go.quotient(optax.adam(0.1, eps=1e-20), go.logit_shift({"head": "_ vocab"}))
    step, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(step["before"], 0.0 if head == "constant" else -0.1, rtol=1e-5)
    np.testing.assert_allclose(step["beside"], -0.1, rtol=1e-5)  # another loss reaches it, past the head


@pytest.mark.filterwarnings("ignore:an empty list of gauges")
def test_a_list_without_gauges_is_the_optimizer_itself() -> None:
    params = start_of("llama", "float32")
    for tx in (optax.adamw(1e-2), optax.lion(1e-3)):
        own = go.quotient(tx, [])
        found, _ = own.update(params, jit(own.init)(params), params)
        expected, _ = tx.update(params, jit(tx.init)(params), params)
        assert max(apart(found, expected).values()) == 0.0


@pytest.mark.slow
def test_a_rate_ahead_of_the_wrapper_is_one_inside(x64: None) -> None:
    """Of gradient descent; a rate *after* it scales a step that has come back from another size."""
    params, gauges = start_of("gpt", "float64"), lm.gauges(CONFIGS["gpt"])
    grads, errors = jax.grad(loss_of("gpt"))(params), {}
    for rate in (1e-3, 1e-4):
        whole = go.quotient(optax.sgd(rate), gauges)
        link = optax.chain(optax.scale(rate), go.quotient(optax.scale(-1.0), gauges))
        one, two = (jit(tx.update)(grads, jit(tx.init)(params), params)[0] for tx in (whole, link))
        errors[rate] = max(apart(two, one).values())
    print(errors)
    assert max(errors.values()) <= 1e-10


@pytest.mark.slow
def test_line_searches_see_slice_coordinates(x64: None) -> None:
    """`value_fn` and `grad` are given for θ; what runs inside asks for them at θ̂."""
    params, loss = start_of("gpt", "float64"), loss_of("gpt")
    group = go.product(lm.gauges(CONFIGS["gpt"]))
    twin = group.act(g := group.sample(jax.random.key(3), params), params)
    inner = optax.chain(optax.sgd(0.5), optax.scale_by_backtracking_linesearch(max_backtracking_steps=8))
    tx = go.quotient(inner, group)

    @jit
    def step(params: Tree, state: Tree) -> tuple[Tree, Tree]:
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), state

    ends = []
    for start in (params, twin):
        here, state = start, jit(tx.init)(start)
        for _ in range(3):
            here, state = step(here, state)
        ends.append(here)
    assert float(loss(ends[0])) < float(loss(params))
    assert max(apart(ends[1], group.act(g, ends[0])).values()) <= tolerance("quotient_twins")


# Standing still -----------------------------------------------------------------------------------


def _largest(tree: Tree) -> float:
    return max((float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(tree)), default=0.0)


@pytest.mark.slow_rows("gpt")
@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_coordinates_stand_still_for_a_thousand_float32_steps(name: str) -> None:
    group, init, step = program(name, "float32", "adamw", False)
    params = start_of(name, "float32")
    motion = jit(lambda p, q: go.measure.vertical_motion(p, jax.tree.map(jnp.subtract, q, p), group))
    turning = [k for k, part in enumerate(group.gauges) if part.name in ("head_rotation", "rope_torus")]
    for start in (params, group.act(group.sample(jax.random.key(3), params), params)):
        here, state, turned = start, init(start), None
        for _ in range(1000):
            after, state, _ = step(here, state)
            found = [motion(here, after)[k] for k in turning]
            turned = found if turned is None else jax.tree.map(jnp.add, turned, found)
            here = after
        drift = _largest(go.measure.drift(start, here, group))
        print(f"{name}: drift {drift:.1e}, turned {_largest(turned):.1e}")
        assert drift <= tolerance("quotient_drift", "float32")
        assert _largest(turned) <= tolerance("turned", "float32")


def test_what_holds_heads_takes_any_matrix() -> None:
    """Its antisymmetric part counts. Of another, which fused code leaves by rounding, conjugate gradients run away."""
    draw = np.random.default_rng(0).normal
    rows, k = draw(size=(500, 32, 4)), draw(size=(500, 4, 4))
    m, odd = np.swapaxes(rows, 1, 2) @ rows, k - np.swapaxes(k, 1, 2)
    for part in (k, odd / 2 + 1e-7 * (k - odd / 2)):
        a = np.asarray(jit(lyapunov_by_products)(jnp.asarray(m, "float32"), jnp.asarray(part, "float32")), float)
        left = np.linalg.norm(m @ a + a @ m - odd, axis=(1, 2)) / np.linalg.norm(odd, axis=(1, 2))
        assert np.max(left) <= tolerance("kernel", "float32")


def test_chains_stand_still() -> None:
    """Widths 2-1-1-1-1-2: each unit shares both its leaves."""
    widths = (2, 1, 1, 1, 1, 2)
    keys = jax.random.split(jax.random.key(0), len(widths) - 1)
    shapes = zip(widths[:-1], widths[1:], keys, strict=True)
    params = {f"w{k}": 0.5 + jax.random.uniform(key, (a, b)) for k, (a, b, key) in enumerate(shapes)}
    gauges = [go.rescale({f"w{k}": "_ channel"}, {f"w{k + 1}": "channel _"}) for k in range(4)]
    x, y = jnp.array([[1.0, 0.5], [0.3, 1.0]]), jnp.array([[1.0, 2.0], [2.0, 0.5]])

    def loss(p: Tree) -> jax.Array:
        out = functools.reduce(lambda h, k: jax.nn.relu(h @ p[f"w{k}"]), range(4), x) @ p["w4"]
        return jnp.mean(jnp.square(out - y))

    group = go.product(gauges)
    for start in (params, group.act(group.sample(jax.random.key(3), params), params)):
        tx = go.quotient(optax.adamw(1e-3, weight_decay=0.1), gauges)
        end, losses = train(jit(tx.init), stepper(tx, loss), start, 1000)
        drift = _largest(go.measure.drift(start, end, group))
        print(f"chain: drift {drift:.1e}")
        assert losses[-1] < losses[0] and drift <= tolerance("quotient_drift", "float32")


@pytest.mark.slow
def test_without_hold_heads_turn(x64: None) -> None:
    params, gauges, loss = start_of("gpt", "float64"), lm.gauges(CONFIGS["gpt"]), loss_of("gpt")
    turned = {}
    for hold in (True, False):
        tx = go.quotient(INNERS["adamw"](), gauges, hold=hold)
        updates, _ = jit(tx.update)(jit(jax.grad(loss))(params), jit(tx.init)(params), params)
        motion = jit(lambda u: go.measure.vertical_motion(params, u, gauges))(updates)
        turned[hold] = _largest([m for g, m in zip(gauges, motion, strict=True) if g.name == "head_rotation"])
    assert turned[True] < 1e-12 < 1e-5 < turned[False]


# Transformations of the transformation ------------------------------------------------------------


@pytest.mark.slow
def test_seeds_may_be_mapped_over() -> None:
    params, gauges, loss = start_of("gpt", "float32"), lm.gauges(CONFIGS["gpt"]), loss_of("gpt")
    many = jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), params)
    tx = go.quotient(INNERS["adamw"](), gauges)

    def one(p: Tree) -> Tree:
        updates, _ = tx.update(jax.grad(loss)(p), tx.init(p), p)
        return optax.apply_updates(p, updates)

    mapped = jit(jax.vmap(one))(many)
    alone = jit(one)(params)
    assert max(apart(jax.tree.map(lambda x: x[0], mapped), alone).values()) <= tolerance("optax", "float32") * 10


@pytest.mark.slow
def test_updates_can_be_differentiated_in_reverse(x64: None) -> None:
    """Of a learning rate and of the gradient, against finite differences."""
    params, gauges, loss = start_of("gpt", "float64"), lm.gauges(CONFIGS["gpt"]), loss_of("gpt")

    def after(rate: jax.Array, size: jax.Array) -> jax.Array:
        adam = optax.scale_by_adam(eps=1e-3, eps_root=1e-8)  # a token that no batch has: no slope at 0
        tx = go.quotient(optax.chain(adam, optax.scale(-1.0)), gauges)
        grads = jax.tree.map(lambda g: size * g, jax.grad(loss)(params))
        updates, _ = tx.update(grads, tx.init(params), params)
        return loss(jax.tree.map(lambda p, u: p + rate * u, params, updates))

    found = jit(jax.grad(after, (0, 1)))(1e-2, 1.0)
    value, step = jit(after), 1e-5
    expected = (
        (value(1e-2 + step, 1.0) - value(1e-2 - step, 1.0)) / (2 * step),
        (value(1e-2, 1.0 + step) - value(1e-2, 1.0 - step)) / (2 * step),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_bfloat16_for_two_hundred_steps() -> None:
    group, loss = go.product(lm.gauges(CONFIGS["gpt"])), loss_of("gpt")
    params = start_of("gpt", "bfloat16")
    tx = go.quotient(INNERS["adamw"](), group)
    end, losses = train(jit(tx.init), stepper(tx, loss), params, 200)
    assert all(x.dtype == jnp.bfloat16 and bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(end))
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_hyperparameters_inside_and_outside() -> None:
    params, gauges = start_of("gpt", "float32"), lm.gauges(CONFIGS["gpt"])
    inside = go.quotient(optax.inject_hyperparams(optax.adamw)(0.1), gauges)
    outside = optax.inject_hyperparams(go.quotient_adamw)(0.1, gauges)
    plain = go.quotient_adamw(0.1, gauges)
    results = [tx.update(params, jit(tx.init)(params), params)[0] for tx in (plain, inside, outside)]
    for other in results[1:]:
        for found, expected in zip(jax.tree.leaves(other), jax.tree.leaves(results[0]), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)  # 1 − b2 in float32 is off by 1e-5


def test_a_state_from_shapes_fits_one_from_arrays() -> None:
    """What a checkpoint is restored into."""
    params = start_of("gpt", "float32")
    tx = go.quotient(optax.adamw(1e-3), lm.gauges(CONFIGS["gpt"]))
    abstract, concrete = jax.eval_shape(tx.init, params), jit(tx.init)(params)
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(concrete), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
