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
from tests.cases import GAUGE_CASES
from tests.quick import jit
from tests.tolerances import tolerance
from tests.twins import (
    CONFIGS,
    ODD,
    Tree,
    apart,
    check_twins,
    furthest,
    loss_of,
    normal,
    odd,
    start_of,
    stepper,
    train,
)

INNERS: dict[str, Callable[[], optax.GradientTransformation]] = {
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
    group = go.product(lm.gauges(CONFIGS[name], linear))
    tx = go.quotient_muon(3e-3, group) if inner == "muon" else go.quotient(INNERS[inner](), group)
    return group, jit(tx.init), stepper(tx, loss_of(name))


# Twins --------------------------------------------------------------------------------------------

# Model, inner, odd start, and whether heads have general linear groups.
ROWS = [
    *((name, "adamw", "", False) for name in CONFIGS),
    *((name, inner, "", False) for name in ("gpt", "llama") for inner in (*INNERS, "muon") if inner != "adamw"),
    *((name, inner, "", True) for name in ("gpt", "llama", "mqa") for inner in ("adamw", "muon")),
    *(("gpt", inner, start, False) for inner in ("adamw", "lion", "muon") for start in ODD),
]
# The quick ones are one model and one inner per kind of either, and all odd starts of one optimizer.
QUICK = [
    ("gpt", "adamw", "", False, "float64"), ("llama", "adamw", "", False, "float32"),
    *(("gpt", "adamw", start, False, "float32") for start in ODD), ("gpt", "adamw", "dead_unit", False, "float64"),
]


@pytest.mark.parametrize(
    ("name", "inner", "start", "linear", "dtype"),
    [pytest.param(*row, dtype, marks=() if (*row, dtype) in QUICK else pytest.mark.slow)
     for row in ROWS for dtype in ("float64", "float32")],
)
def test_twins_under_any_optimizer(name: str, inner: str, start: str, linear: bool, dtype: str) -> None:
    # Prodigy's estimate of a distance adds up rounding of all leaves: 1.9e-5 or 2.5e-5 in the loss, by the machine.
    loss_slack = 4.0 if (inner, dtype) == ("prodigy", "float32") else 1.0
    with jax.enable_x64(dtype == "float64"):
        params = odd(start, start_of(name, dtype)) if start else start_of(name, dtype)
        group, init, step = program(name, dtype, inner, linear)
        check_twins(f"{name} {inner}", group, init, step, params, dtype, loss_slack=loss_slack)


@pytest.mark.slow_rows("[!al]*", "adafactor")
@pytest.mark.parametrize("inner", [*INNERS])
def test_the_same_optimizers_alone_tell_twins_apart(inner: str, x64: None) -> None:
    group, params, tx = go.product(lm.gauges(CONFIGS["gpt"])), start_of("gpt", "float64"), INNERS[inner]()
    twin = group.act(group.sample(jax.random.key(3), params), params)
    ours, theirs = (float(jit(loss_of("gpt"))(run(tx, "gpt", start, 3)[0])) for start in (params, twin))
    assert abs(theirs / ours - 1.0) > 1e-6


def test_a_frozen_head_of_zeros_hides_no_gradient_of_a_trained_one() -> None:
    """The small gradients of the trunk, which a second head makes, were set to zero as roundoff of the first."""
    params = normal(0, {"w": (6, 32), "main": (32, 5), "new": (32, 5)}, "float32")
    params |= {"new": jnp.zeros((32, 5))}
    x = normal(1, {"x": (8, 6)}, "float32")["x"]
    gauges = [go.logit_shift({name: "_ vocab"}) for name in ("main", "new")]

    def loss(p: Tree) -> jax.Array:
        first, second = (jax.nn.logsumexp(jnp.tanh(x @ p["w"]) @ p[name], -1).mean() for name in ("main", "new"))
        return 1e-4 * first + second

    of_leaves = {"t": optax.adam(1.0, eps=1e-20), "f": optax.set_to_zero()}
    tx = go.quotient(optax.partition(of_leaves, {"w": "t", "main": "t", "new": "f"}), gauges)
    updates, _ = tx.update(jax.grad(loss)(params), tx.init(params), params)
    assert np.all(np.abs(updates["w"]) > 0.9)


# Not pinned ---------------------------------------------------------------------------------------


def run(tx: optax.GradientTransformation, name: str, params: Tree, steps: int = 20) -> tuple[Tree, np.ndarray]:
    return train(jit(tx.init), stepper(tx, loss_of(name)), params, steps)


@pytest.mark.slow_rows("contrib.muon-*", "adamw-*")
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("inner", ["adamw", "contrib.muon"])
def test_unpinned_optimizers_take_the_steps_that_they_take_alone(inner: str, linear: bool, x64: None) -> None:
    """From the slice point of θ; whatever the weights are moved by to stay there."""
    group, params = go.product(lm.gauges(CONFIGS["gpt"], linear)), start_of("gpt", "float64")
    _, expected = run(INNERS[inner](), "gpt", group.act(group.inverse(group.read(params)), params))
    free, pinned = (go.quotient(INNERS[inner](), group, hold=False, pin=pin) for pin in (False, True))
    (_, found), (_, other) = (run(tx, "gpt", params) for tx in (free, pinned))
    assert np.max(np.abs(found - expected)) <= 1e-8 < 1e-4 < np.max(np.abs(other - expected))


# The step -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_size_of_the_loss_changes_nothing_that_adamw_does_not_show() -> None:
    params, loss = start_of("gpt", "float32"), loss_of("gpt")

    def between(tx: optax.GradientTransformation) -> float:
        ends = (train(jit(tx.init), stepper(tx, lambda p, s=s: s * loss(p)), params, 5)[0] for s in (1.0, 1e8))
        return max(x for path, x in apart(*ends).items() if not path.endswith("key/bias"))  # whose gradient is roundoff

    ours, plain = map(between, (go.quotient(INNERS["adamw"](), lm.gauges(CONFIGS["gpt"])), INNERS["adamw"]()))
    assert ours <= max(3.0 * plain, 1e-5)


@pytest.mark.slow_rows("1e+25", "inf", "1e+20")
@pytest.mark.parametrize("size", [0.0, 1e20, 1e25, np.inf, np.nan])
def test_gradients_of_any_size_leave_what_adamw_leaves(size: float) -> None:
    """Zero gradients move nothing, finite ones leave no infinity, and what is not finite is not hidden."""
    params, tx = start_of("gpt", "float32"), go.quotient(optax.adam(1e-2), lm.gauges(CONFIGS["gpt"]))
    grads = jax.tree.map(lambda x: size * jnp.sign(x), params)
    updates, _ = jit(tx.update)(grads, jit(tx.init)(params), params)
    finite = all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(updates))
    assert finite == np.isfinite(size) and (size != 0.0 or _largest(updates) <= 1e-6)


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
    params, tx = start_of("llama", "float32"), INNERS["adamw"]()
    found, expected = (jit(t.update)(params, t.init(params), params)[0] for t in (go.quotient(tx, []), tx))
    assert furthest(found, expected) == 0.0


@pytest.mark.slow
def test_line_searches_see_slice_coordinates(x64: None) -> None:
    """`value_fn` and `grad` are given for θ; what runs inside asks for them at θ̂."""
    params, loss, group = start_of("gpt", "float64"), loss_of("gpt"), go.product(lm.gauges(CONFIGS["gpt"]))
    tx = go.quotient(optax.chain(optax.sgd(0.5), optax.scale_by_backtracking_linesearch(8)), group)
    g, ends = group.sample(jax.random.key(3), params), []

    @jit
    def step(params: Tree, state: Tree) -> tuple[Tree, Tree]:
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), state

    for here in (params, group.act(g, params)):
        state = jit(tx.init)(here)
        for _ in range(3):
            here, state = step(here, state)
        ends.append(here)
    assert float(loss(ends[0])) < float(loss(params))
    assert furthest(ends[1], group.act(g, ends[0])) <= tolerance("quotient_twins")


SAM = functools.partial(optax.contrib.sam, optax.sgd(0.1), optax.sgd(0.2), opaque_mode=True)


@pytest.mark.parametrize(("inner", "argument"), [
    (optax.contrib.sophia(0.1, update_interval=1, gamma=10.0), lambda fn: {"obj_fn": fn}),
    (SAM(), lambda fn: {"grad_fn": jax.grad(lambda p, _: fn(p))}),
], ids=["sophia", "sam"])
def test_a_function_of_the_weights_gets_what_is_stored(inner: Any, argument: Any, x64: None) -> None:
    """`obj_fn` and `grad_fn` got the slice's sum for a scale that is stored less one, which is another point."""
    weights = {"scale": jnp.array([0.7, 1.6]), "kernel": jnp.array([[0.4, -1.3], [0.9, 0.2]])}
    loss: Any = lambda p: jnp.sum(jnp.cos(p["scale"][:, None] * p["kernel"]) ** 2)  # noqa: E731
    ends = []
    for axes, less in (("channel", 0.0), ("1+ channel", 1.0)):
        tx = go.quotient(inner, go.norm_scale({"scale": axes}, {"kernel": "channel _"}))
        whole: Any = lambda p, less=less: p | {"scale": p["scale"] + less}  # noqa: E731
        fn: Any = lambda p, whole=whole: loss(whole(p))  # noqa: E731
        params = weights | {"scale": weights["scale"] - less}
        state = tx.init(params)
        for _ in range(2):  # the first step only averages the Hessian
            updates, state = tx.update(jax.grad(fn)(params), state, params, **argument(fn))
            params = optax.apply_updates(params, updates)
        ends.append(whole(params))
    assert furthest(*ends) <= 1e-12 and furthest(ends[0], weights) > 1e-2


def test_sam_is_one_algorithm_in_both_of_its_modes(x64: None) -> None:
    """Its `grad_fn` maps weights to gradients, of which the weights alone were moved."""
    params = {"scale": jnp.array([-0.3, 0.6]), "kernel": jnp.array([[0.4, -1.3], [0.9, 0.2]])}
    loss: Any = lambda p: jnp.sum(jnp.cos((1.0 + p["scale"][:, None]) * p["kernel"]) ** 2)  # noqa: E731
    gauge, ends = go.norm_scale({"scale": "1+ channel"}, {"kernel": "channel _"}), []
    for opaque in (True, False):
        tx, p = go.quotient(SAM(opaque_mode=opaque), gauge, pin=False), params  # with pin=True, steps end on the slice
        state = tx.init(p)
        for _ in range(2 if opaque else 4):
            extra = {"grad_fn": jax.grad(lambda p, _: loss(p))} if opaque else {}
            updates, state = tx.update(jax.grad(loss)(p), state, p, **extra)
            p = optax.apply_updates(p, updates)
        ends.append(p)
    assert furthest(*ends) <= 1e-12 and furthest(ends[0], params) > 1e-2


ON_SCALE = go.rescale({"up": "_ channel"}, {"down": "channel _"})


@pytest.mark.slow_rows("hold_products", "max_norm", "rotational")
@pytest.mark.parametrize("around", [
    lambda tx: go.quotient(tx, ON_SCALE),
    lambda tx: go.orbit.gauge_fix(tx, ON_SCALE, transport=False),
    lambda tx: go.orbit.hold_products(tx, ON_SCALE, kind="decay", decay=0.1, transport=False),
    lambda tx: go.norms.max_norm(tx, {"up": "_ neuron"}, learning_rate=1.0, bound=0.5),
    lambda tx: go.norms.rotational(tx, {"up": "_ c"}, learning_rate=1.0, weight_decay=0.1, eta_r=0.1, center=False),
], ids=["quotient", "gauge_fix", "hold_products", "max_norm", "rotational"])
def test_the_gradient_of_a_line_search_is_not_taken_for_that_of_the_weights(around: Any, x64: None) -> None:
    """The search stores it at the point where it ends, which is not where the user's weights are."""
    params = {"up": jnp.array([[0.4, -1.3], [2.0, 0.7]]), "down": jnp.array([[0.6], [0.9]])}
    loss: Any = lambda p: jnp.sum(jnp.square(jax.nn.relu(jnp.eye(2) @ p["up"]) @ p["down"] - 1.0))  # noqa: E731
    search = optax.scale_by_backtracking_linesearch(5, store_grad=True)
    tx, (value, grads) = around(optax.chain(optax.sgd(0.1), search)), jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, tx.init(params), params, value=value, grad=grads, value_fn=loss)
    params = optax.apply_updates(params, updates)
    found = jax.jit(lambda p, s: optax.value_and_grad_from_state(loss)(p, state=s))(params, state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), found, jax.value_and_grad(loss)(params))


# Standing still -----------------------------------------------------------------------------------


def _largest(tree: Tree) -> float:
    return float(np.max([float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(tree)], initial=0.0))


@pytest.mark.slow_rows("gpt", "llama")
@pytest.mark.parametrize("name", ["gpt", "llama", "product/chain"])
def test_coordinates_stand_still_for_a_thousand_float32_steps(name: str) -> None:
    """In a chain two units share a leaf."""
    if name in CONFIGS:
        (group, init, step), params = program(name, "float32", "adamw", False), start_of(name, "float32")
    else:
        case: Any = next(case for case in GAUGE_CASES if case.name == name)
        group, params = go.product(case.gauges()), case.params(jax.random.key(0))
        tx = go.quotient(INNERS["adamw"](), group)
        init, step = jit(tx.init), stepper(tx, case.loss)
    motion = jit(lambda p, q: go.measure.vertical_motion(p, jax.tree.map(jnp.subtract, q, p), group))
    turning = [k for k, part in enumerate(group.gauges) if part.name in ("head_rotation", "rope_torus")]
    for start in (params, group.act(group.sample(jax.random.key(3), params), params)):
        here, state, turned = start, init(start), list[Any]()
        for _ in range(1000):
            after, state, _ = step(here, state)
            found = [motion(here, after)[k] for k in turning]
            turned = jax.tree.map(jnp.add, turned, found) if turned else found
            here = after
        assert furthest(here, start) > 1e-2, "nothing moved"
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


# Transformations of the transformation ------------------------------------------------------------


@pytest.mark.slow
def test_seeds_may_be_mapped_over() -> None:
    params, loss = start_of("gpt", "float32"), loss_of("gpt")
    tx = go.quotient(INNERS["adamw"](), lm.gauges(CONFIGS["gpt"]))

    def one(p: Tree) -> Tree:
        return optax.apply_updates(p, tx.update(jax.grad(loss)(p), tx.init(p), p)[0])

    mapped, alone = jit(jax.vmap(one))(jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), params)), jit(one)(params)
    assert furthest(jax.tree.map(lambda x: x[0], mapped), alone) <= tolerance("optax", "float32") * 10


@pytest.mark.slow
def test_updates_can_be_differentiated_in_reverse(x64: None) -> None:
    """Of a learning rate and of the gradient, against finite differences."""
    params, loss = start_of("gpt", "float64"), loss_of("gpt")
    adam = optax.adam(1.0, eps=1e-3, eps_root=1e-8)  # a token that no batch has: no slope at 0
    tx = go.quotient(adam, lm.gauges(CONFIGS["gpt"]))

    def after(rate: jax.Array, size: jax.Array) -> jax.Array:
        grads = jax.tree.map(lambda g: size * g, jax.grad(loss)(params))
        updates, _ = tx.update(grads, tx.init(params), params)
        return loss(jax.tree.map(lambda p, u: p + rate * u, params, updates))

    found, value, h = jit(jax.grad(after, (0, 1)))(1e-2, 1.0), jit(after), 1e-6
    by_rate, by_size = value(1e-2 + h, 1.0) - value(1e-2 - h, 1.0), value(1e-2, 1.0 + h) - value(1e-2, 1.0 - h)
    np.testing.assert_allclose(found, (by_rate / (2 * h), by_size / (2 * h)), rtol=1e-5)
