"""The opposite-Gram correction: the post's example, its formulas, cotangents in and tangents out, stale inverses."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.linalg import inverse_gram
from gauge_optax.states.moves import move_cotangent, move_tangent
from tests.cases import GAUGE_CASES
from tests.quick import jit

Tree = Any
Numbers = np.ndarray


WIDTH, HEADS, HEAD, LENGTH, BATCH, CONDITION = 16, 2, 4, 8, 4, 100.0
GAUGES = (
    go.head_linear({"{i}/query": "_ head basis"}, {"{i}/key": "_ head basis"}),
    go.head_linear({"{i}/value": "_ head basis"}, {"{i}/out": "head basis _"}),
)


def kernels(layers: int, width: int, heads: int, head: int, dtype: Any) -> Tree:
    """Attention kernels whose Gram matrices have eigenvalues near 1."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / width**0.5, dtype)

    return {
        str(i): {n: drawn(width, heads, head) for n in ("query", "key", "value")} | {"out": drawn(heads, head, width)}
        for i in range(layers)
    }


def attention(kernel: Tree, x: jax.Array) -> jax.Array:
    """One layer of softmax attention."""
    query, key, value = (jnp.einsum("ntd,dhe->nthe", x, kernel[n]) for n in ("query", "key", "value"))
    weights = jax.nn.softmax(jnp.einsum("nthe,nshe->nhts", query, key))
    return jnp.einsum("nhts,nshe,hed->ntd", weights, value, kernel["out"])


def problem() -> tuple[Tree, Tree, Callable[[Tree], jax.Array]]:
    """Weights, their twin, and a loss: the outputs of another layer."""
    params = kernels(1, WIDTH, HEADS, HEAD, jnp.float64)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, WIDTH)))
    teacher = {n: jnp.asarray(rng.normal(size=k.shape) / WIDTH**0.5) for n, k in params["0"].items()}
    target = attention(teacher, x)
    sizes = np.geomspace(CONDITION**-0.5, CONDITION**0.5, HEAD)

    def matrix() -> np.ndarray:
        left, right = (np.linalg.qr(rng.normal(size=(HEADS, HEAD, HEAD)))[0] for _ in range(2))
        return np.asarray(left * sizes @ right)

    twin = params
    for gauge in GAUGES:
        twin = gauge.act({"i=0": jnp.asarray(matrix())}, twin)
    return params, twin, lambda p: 0.5 * jnp.mean(jnp.sum(jnp.square(attention(p["0"], x) - target), -1))


def represented(params: Tree) -> jax.Array:
    """W_Q·W_Kᵀ and W_V·W_O of every head."""
    layer = params["0"]
    scores = jnp.einsum("dhe,fhe->hdf", layer["query"], layer["key"])
    return jnp.stack((scores, jnp.einsum("dhe,hef->hdf", layer["value"], layer["out"])))


def _noise(seed: int, *shape: int) -> Numbers:
    return np.random.default_rng(seed).normal(size=shape)


def _update(tx: optax.GradientTransformation, params: Tree, updates: Tree) -> Tree:
    return jit(lambda p, u: tx.update(u, tx.init(p), p)[0])(params, updates)


def _apart(found: Tree, expected: Tree) -> float:
    """Largest relative error of a leaf."""
    errors = jax.tree.map(lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), found, expected)
    return float(max(jax.tree.leaves(errors)))


# The post's example -------------------------------------------------------------------------------

ETA, EPSILON, K = 1e-3, 1e-3, 1e6
SCALARS: dict[str, tuple[go.Gauge, tuple[int, ...]]] = {
    "head_linear": (go.head_linear({"a": "_ basis"}, {"b": "basis _"}), (1, 1)),
    "rescale": (go.rescale({"a": ""}, {"b": ""}), ()),
}


def _loss(p: Tree) -> jax.Array:
    return 0.5 * jnp.sum(jnp.square(p["a"] * p["b"] - 1.0))


def _scalars(a: float, b: float, shape: tuple[int, ...] = ()) -> Tree:
    return {"a": jnp.full(shape, a), "b": jnp.full(shape, b)}


def _stepper(tx: optax.GradientTransformation) -> Callable[[Tree], Tree]:
    def step(p: Tree) -> Tree:
        updates, _ = tx.update(jax.grad(_loss)(p), tx.init(p), p)
        return optax.apply_updates(p, updates)

    return jit(step)


@pytest.mark.parametrize("kind", SCALARS)
def test_the_smallest_failure_and_its_remedy(kind: str, x64: None) -> None:
    """The post's §2: one product, two representatives; a step improves one and throws the other out by 1e18."""
    gauge, shape = SCALARS[kind]
    balanced, imbalanced = _scalars(1.0, 1.0 - EPSILON, shape), _scalars(1.0 / K, (1.0 - EPSILON) * K, shape)
    for p in (balanced, imbalanced):
        np.testing.assert_allclose(_loss(p), 5e-7, rtol=1e-9)
    plain = _stepper(optax.sgd(ETA))
    assert _loss(plain(balanced)) < _loss(balanced)
    for p in (balanced, imbalanced):
        squares = float(jnp.sum(p["a"] ** 2 + p["b"] ** 2))
        bracket = -1.0 + ETA * squares + ETA**2 * EPSILON * (1.0 - EPSILON)
        np.testing.assert_allclose(_loss(plain(p)), 0.5 * EPSILON**2 * bracket**2, rtol=1e-9)
    assert 4e11 < _loss(plain(imbalanced)) < 6e11
    corrected, products = _stepper(optax.chain(go.links.scale_by_opposite_gram(gauge), optax.sgd(ETA))), []
    for p in (balanced, imbalanced):
        after = corrected(p)
        assert _loss(after) < _loss(p)
        products.append(float(jnp.sum(after["a"] * after["b"])))
    # (a + ηε/b)(b + ηε/a): the motion is 2ηε, and (ηε)²/(ab).
    expected = 2 * ETA * EPSILON + (ETA * EPSILON) ** 2 / (1.0 - EPSILON)
    np.testing.assert_allclose(np.array(products) - (1.0 - EPSILON), expected, rtol=1e-9)


def test_increments_that_do_not_grow_with_gradients_are_overcorrected(x64: None) -> None:
    """Adam's first: what it does at (a, b) raw, it does at (b, a) corrected, over the product."""
    adam, corrected = (
        optax.adam(ETA),
        optax.chain(optax.adam(ETA), go.links.scale_by_opposite_gram(SCALARS["rescale"][0])),
    )

    @functools.partial(jit, static_argnums=0)
    def motion(tx: optax.GradientTransformation, a: float, b: float) -> jax.Array:
        p = _scalars(a, b)
        u, _ = tx.update(jax.grad(_loss)(p), tx.init(p), p)
        return u["a"] * p["b"] + p["a"] * u["b"]

    for s in (1.0, 10.0, 1e3):
        np.testing.assert_allclose(motion(corrected, s, 0.5 / s), motion(adam, 0.5 / s, s) / 0.5, rtol=1e-4)


# Formulas -----------------------------------------------------------------------------------------

QUERY_KEY = go.head_linear(
    {"query/kernel": "_ head basis", "query/bias": "head basis"},
    {"key/kernel": "_ head basis", "key/bias": "head basis"},
)
LORA = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
VALUE_OUT = go.head_linear({"value/kernel": "_ head basis", "value/bias": "head basis"}, {"out": "head basis _"})
RULES: dict[str, dict[str, Any]] = {
    "undamped": {},
    "relative": {"damping": 0.1},
    "absolute": {"damping": 0.5, "damping_mode": "absolute"},
    "diagonal": {"diagonal": True},
    "diagonal, relative": {"diagonal": True, "damping": 0.1},
}


def _heads(seed: int) -> Tree:
    """Attention with biases, and a leaf that no gauge binds."""
    module = {n: {"kernel": (6, 2, 4), "bias": (2, 4)} for n in ("query", "key", "value")} | {"out": (2, 4, 6)}
    leaves, treedef = jax.tree.flatten(module | {"free": (3,)}, is_leaf=lambda x: isinstance(x, tuple))
    return treedef.unflatten([_noise(100 * seed + k, *shape) for k, shape in enumerate(leaves)])


def _rows(tree: Tree, head: int) -> dict[str, Numbers]:
    """Every factor of one head, as rows."""
    own = {n: np.vstack([tree[n]["kernel"][:, head], tree[n]["bias"][head]]) for n in ("query", "key", "value")}
    return own | {"out": np.asarray(tree["out"][head]).T}


def _inverse(factor: Numbers, damping: float = 0.0, damping_mode: str = "relative", diagonal: bool = False) -> Numbers:
    gram = factor.T @ factor
    gram = np.diag(np.diag(gram)) if diagonal else gram
    added = damping * np.trace(gram) / len(gram) if damping_mode == "relative" else damping
    return np.linalg.inv(gram + added * np.eye(len(gram)))


@pytest.mark.parametrize("rule", RULES)
def test_heads_have_the_formulas_of_the_post(rule: str, x64: None) -> None:
    params, updates = _heads(0), _heads(1)
    found = _update(go.links.scale_by_opposite_gram([QUERY_KEY, VALUE_OUT], **RULES[rule]), params, updates)
    for head in range(2):
        at, increment, corrected = (_rows(tree, head) for tree in (params, updates, found))
        for name, opposite in (("query", "key"), ("key", "query"), ("value", "out"), ("out", "value")):
            expected = increment[name] @ _inverse(at[opposite], **RULES[rule])
            np.testing.assert_allclose(corrected[name], expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(found["free"], updates["free"])


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("rule", ["undamped", "relative", "absolute"])
def test_channels_have_the_same_with_one_column(degree: int, rule: str, x64: None) -> None:
    """Powers that make up for a degree: up moves as α, down as α^(−p), and gradients by the inverses of these."""
    gauge = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"}, degree=degree)
    shapes = {"up": (6, 5), "bias": (5,), "down": (5, 3)}
    params, updates = ({n: _noise(10 * k + len(n), *s) for n, s in shapes.items()} for k in (0, 1))
    found = _update(go.links.scale_by_opposite_gram(gauge, **RULES[rule]), params, updates)
    options = {"damping": 0.0, "damping_mode": "relative"} | RULES[rule]
    up = np.sum(params["up"] ** 2, 0) + params["bias"] ** 2
    down = np.sum(params["down"] ** 2, 1)
    up, down = (
        x * (1 + options["damping"]) if options["damping_mode"] == "relative" else x + options["damping"]
        for x in (up, down)
    )
    expected = {n: updates[n] * down ** (-1 / degree) for n in ("up", "bias")}
    expected["down"] = updates["down"] * up[:, None] ** -float(degree)
    assert _apart(found, expected) <= 1e-12


# Cotangents in, tangents out ----------------------------------------------------------------------

TWO_SIDED = (
    "rescale/degree_2", "norm_scale/one_plus", "head_linear/value_out", "head_linear/fused", "rope_linear/half",
    "rope_linear/partial", "product/semidirect",
)


@pytest.mark.parametrize("name", TWO_SIDED)
def test_cotangents_become_tangents(name: str, x64: None) -> None:
    """At g·θ the moved increment is the moved result, for matrices of condition up to 100 and scales up to 10."""
    case = next(c for c in GAUGE_CASES if c.name == name)
    group, params = go.product(case.gauges()), case.params(jax.random.key(0))
    gradient = jax.tree.map(lambda x: jnp.asarray(_noise(x.size, *x.shape)), params)
    tx = go.links.scale_by_opposite_gram(group)

    def both(params: Tree, gradient: Tree) -> tuple[Tree, Tree]:
        element = group.sample(jax.random.key(1), params, 2.303)
        here, _ = tx.update(gradient, tx.init(params), params)
        twin = group.act(element, params)
        there, _ = tx.update(move_cotangent(group, element, params, gradient), tx.init(twin), twin)
        return there, move_tangent(group, element, params, here)

    there, expected = jit(both)(params, gradient)
    assert _apart(there, expected) <= 1e-10


def test_what_has_no_opposite_side_passes(x64: None) -> None:
    params = {n: _noise(k, 6, 4) for k, n in enumerate(("turned", "other", "normed", "head", "up"))}
    gauges = [
        go.head_rotation({"turned": "_ basis", "other": "_ basis"}), go.scale_invariant({"normed": "_ channel"}),
        go.logit_shift({"head": "_ vocab"}), go.scale_invariant({"up": "_ _"}),
    ]
    found = _update(go.links.scale_by_opposite_gram(gauges), params, params)
    jax.tree.map(np.testing.assert_array_equal, found, params)


# Twins, exact and not -----------------------------------------------------------------------------


@functools.cache
def _attention() -> tuple[Tree, Tree, Callable[[Tree], Tree]]:
    """Attention, its twin by matrices of condition 100, and the gradient; float64."""
    params, twin, loss = problem()
    return params, twin, jit(jax.grad(loss))


def _motion(tx: optax.GradientTransformation, params: Tree, updates: Tree) -> jax.Array:
    """The represented first-order motion."""
    step, _ = tx.update(updates, tx.init(params), params)
    return jax.jvp(represented, (params,), (step,))[1]


def _motions_apart(**options: Any) -> float:
    params, twin, gradient = _attention()
    motion = jit(functools.partial(_motion, go.links.scale_by_opposite_gram(GAUGES, **options)))
    return _apart(motion(twin, gradient(twin)), motion(params, gradient(params)))


def test_twins_take_one_step_of_gradients_and_damping_breaks_it(x64: None) -> None:
    """Measured at condition 100: 3e-13; damped 0.30 (1e-3 relative), 0.04 (absolute); diagonal 1.0."""
    assert _motions_apart() <= 1e-10
    assert 0.1 < _motions_apart(damping=1e-3) < 0.9
    assert 0.01 < _motions_apart(damping=1e-3, damping_mode="absolute") < 0.1
    assert 0.3 < _motions_apart(diagonal=True) < 3.0


@pytest.mark.parametrize(
    ("rule", "matrix"),
    [("relative", 3.0 * np.linalg.qr(_noise(0, 4, 4))[0]), ("absolute", np.linalg.qr(_noise(0, 4, 4))[0]),
     ("diagonal", np.diag([10.0, 1.0, 0.3, 0.1])), ("diagonal, relative", 3.0 * np.eye(4))],
)
def test_what_damping_and_diagonals_leave_exact(rule: str, matrix: Numbers, x64: None) -> None:
    params, gradient = ({"a": _noise(k, 6, 4), "b": _noise(k + 1, 4, 5)} for k in (0, 2))
    dual = np.linalg.inv(matrix)
    update = functools.partial(_update, go.links.scale_by_opposite_gram(LORA, **RULES[rule]))
    there = update(
        {"a": params["a"] @ matrix, "b": dual @ params["b"]},
        {"a": gradient["a"] @ dual.T, "b": matrix.T @ gradient["b"]},
    )
    here = update(params, gradient)
    assert _apart(there, {"a": here["a"] @ matrix, "b": dual @ here["b"]}) <= 1e-12


@pytest.mark.parametrize("every", [1, 3])
def test_twins_stay_twins_under_averages_of_gradients(every: int, x64: None) -> None:
    """Momentum is a cotangent, and an old inverse still makes tangents."""
    params, twin, gradient = _attention()
    tx = optax.chain(optax.trace(0.9), go.links.scale_by_opposite_gram(GAUGES, every=every), optax.scale(-0.01))
    step, ends = jit(tx.update), []
    for start in (params, twin):
        point, state = start, tx.init(start)
        for _ in range(5):
            updates, state = step(gradient(point), state, point)
            point = optax.apply_updates(point, updates)
        ends.append(represented(point) - represented(start))
    assert _apart(ends[1], ends[0]) <= 1e-9


# Stale inverses -----------------------------------------------------------------------------------


def _walk(tx: optax.GradientTransformation, number: int = 5) -> list[tuple[Tree, Tree, Tree]]:
    """Parameters, increments and what became of them, at points that have nothing to do with each other."""
    given = [({"a": _noise(k, 6, 4), "b": _noise(k + 20, 4, 5)}, {"a": _noise(k + 40, 6, 4), "b": _noise(k, 4, 5)})
             for k in range(number)]
    state, step, found = tx.init(given[0][0]), jit(tx.update), []
    for params, updates in given:
        corrected, state = step(updates, state, params)
        found.append((params, updates, corrected))
    return found


def test_inverses_are_kept_between_every_third_update(x64: None) -> None:
    walk = _walk(go.links.scale_by_opposite_gram(LORA, every=3))
    for k, (_, updates, corrected) in enumerate(walk):
        old = walk[k - k % 3][0]
        expected = {"a": updates["a"] @ _inverse(old["b"].T), "b": _inverse(old["a"]) @ updates["b"]}
        assert _apart(corrected, expected) <= 1e-12, k


def test_an_injected_period_computes_the_same(x64: None) -> None:
    """It is traced there, as damping is."""
    options: dict[str, Any] = {"gauges": LORA, "damping": 1e-2, "every": 2}
    plain = _walk(go.links.scale_by_opposite_gram(**options), 3)
    injected = _walk(optax.inject_hyperparams(go.links.scale_by_opposite_gram)(**options), 3)
    assert _apart([x[2] for x in injected], [x[2] for x in plain]) <= 1e-12


def test_the_state_holds_what_the_next_update_needs() -> None:
    params = {"a": jnp.ones((6, 4)), "b": jnp.ones((4, 5))}
    assert jax.tree.leaves(go.links.scale_by_opposite_gram(LORA).init(params)) == []
    for diagonal, shape in ((False, (4, 4)), (True, (4,))):
        state = go.links.scale_by_opposite_gram(LORA, every=4, diagonal=diagonal).init(params)
        assert [x.shape for x in state.gauges.linear[0]] == [shape, shape] and state.age.dtype == jnp.int32
    scale = go.links.scale_by_opposite_gram(go.rescale({"a": "_ channel"}, {"b": "channel _"}), every=4).init(params)
    assert [x.shape for x in scale.gauges.scales[0]] == [(4,), (4,)]


# Zeros, ranks, sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize("gauge", [LORA, go.rescale({"a": "_ channel"}, {"b": "channel _"})], ids=lambda g: g.name)
@pytest.mark.parametrize("diagonal", [False, True])
def test_an_opposite_factor_of_zero_gives_zero(gauge: go.Gauge, diagonal: bool) -> None:
    """LoRA's start: A stays for a step, B gets one; with an absolute damping the formula holds."""
    params = {"a": _noise(0, 6, 4).astype("f"), "b": np.zeros((4, 5), "f")}
    updates = jax.tree.map(lambda x: _noise(x.size, *x.shape).astype("f"), params)

    @functools.partial(jit, static_argnums=1)
    def corrected(damping: jax.Array, mode: str) -> Tree:
        tx = go.links.scale_by_opposite_gram(gauge, damping, mode, diagonal)
        return tx.update(updates, tx.init(params), params)[0]

    for damping in (0.0, 0.1):
        found = corrected(damping, "relative")
        assert not np.any(found["a"]) and np.all(np.isfinite(found["b"])) and np.any(found["b"])
    np.testing.assert_allclose(corrected(0.5, "absolute")["a"], 2.0 * updates["a"], rtol=1e-6)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_columns_of_all_sizes_keep_their_digits(size: float, x64: None) -> None:
    inverse = jit(inverse_gram)(jnp.diag(jnp.array([size, 1 / size])))
    np.testing.assert_allclose(inverse, np.diag([size**-2, size**2]), rtol=1e-15)
    rows, scale = _noise(0, 7, 4), np.array([size, 1.0, 1 / size, 0.0])
    inverse = np.asarray(jit(inverse_gram)(rows * scale))  # the last column is 0: all others count
    expected = np.linalg.inv(rows[:, :3].T @ rows[:, :3])
    np.testing.assert_allclose(inverse[:3, :3] * np.outer(scale[:3], scale[:3]), expected, rtol=1e-12)
    assert not inverse[3].any() and not inverse[:, 3].any()


def test_parallel_columns_of_different_sizes_have_the_pseudo_inverse(x64: None) -> None:
    direction, sizes = _noise(0, 7, 1), np.array([1e3, 1e-3])
    expected = np.outer(sizes, sizes) / np.sum(sizes**2) ** 2 / np.sum(direction**2)
    assert _apart(np.asarray(jit(inverse_gram)(direction * sizes)), expected) <= 1e-8


def test_a_small_singular_value_that_no_diagonal_entry_shows_is_dropped() -> None:
    """Kahan's matrix: diagonal entries from 1 down to 1e-3, the last two singular values 3e-3 and 1e-7."""
    sine, cosine, size = np.sin(0.8), np.cos(0.8), 20
    kahan = sine ** np.arange(size)[:, None] * (np.eye(size) - cosine * np.triu(np.ones((size, size)), 1))
    values = np.linalg.svd(kahan, compute_uv=False)
    assert values[-1] < 1e-6 * values[0] < 1e-2 * values[-2] and np.diag(kahan).min() > 1e-3
    pseudo = np.linalg.pinv(kahan, rcond=1e-6)
    found = jit(inverse_gram)(kahan.astype("f"))
    assert _apart(np.asarray(found), pseudo @ pseudo.T) <= 1e-2


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-11), ("float32", 1e-4)])
def test_factors_of_less_than_full_rank_have_the_pseudo_inverse(dtype: str, limit: float) -> None:
    """Beside heads of full rank, whose inverses do not notice."""
    with jax.enable_x64(dtype == "float64"):
        narrow = _noise(0, 3, 40, 5) @ _noise(1, 3, 5, 12)
        narrow[1] = _noise(2, 40, 12)
        narrow[2, :, 4] = 0.0
        rows = narrow.astype(dtype)
        quick = jit(inverse_gram)
        found = np.asarray(quick(rows), float)
        for own, inverse in zip(rows.astype(float), found, strict=True):
            pseudo = np.linalg.pinv(own, rcond=1e-5)
            assert _apart(inverse, pseudo @ pseudo.T) <= limit
        assert _apart(found[1], np.asarray(quick(rows[[1, 1, 1]]), float)[0]) <= limit
        few = _noise(3, 3, 5).astype(dtype)
        assert _apart(np.asarray(quick(few), float), np.linalg.pinv(few.astype(float).T @ few)) <= limit


def test_columns_too_small_to_invert_count_as_zero() -> None:
    rows = np.diag([1.0, 1e-16, 1e-25]).astype("f")
    np.testing.assert_array_equal(jit(inverse_gram)(rows), np.diag([1.0, 0.0, 0.0]))
    params = {"a": np.ones((1, 3), "f"), "b": np.diag([1.0, 1e-25, 0.0]).astype("f")}
    for gauge in (LORA, go.rescale({"a": "_ channel"}, {"b": "channel _"}, degree=3)):
        found = _update(go.links.scale_by_opposite_gram(gauge, diagonal=True), params, params)
        np.testing.assert_allclose(found["a"], [[1.0, 0.0, 0.0]])


# Complaints ---------------------------------------------------------------------------------------

NORM = go.norm_scale({"norm": "channel"}, {"value/kernel": "channel _ _"})
RELU = go.rescale({"norm": "channel"}, {"other": "channel"})


@pytest.mark.parametrize(
    "options",
    [{"damping": -1e-3}, {"damping": "1e-3"}, {"damping": np.nan}, {"damping": np.ones(2)}, {"damping_mode": "trace"},
     {"every": 0}, {"every": -1}, {"every": 2.0}, {"every": True}],
    ids=repr,
)
def test_bad_options_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="scale_by_opposite_gram: bad ") as error:
        go.links.scale_by_opposite_gram(LORA, **options)
    assert all(part in str(error.value) for part in ("found:", "expected:", "remedy:"))


@pytest.mark.parametrize("others", [[NORM], [NORM, RELU]], ids=len)
def test_a_leaf_with_two_opposite_factors_is_refused(others: list[go.Gauge]) -> None:
    params = _heads(0) | {"norm": np.ones(6), "other": np.ones(6)}
    gauges = others if len(others) == 2 else [*others, VALUE_OUT]
    with pytest.raises(ValueError, match=r"two opposite factors for '(value/kernel|norm)'") as error:
        go.links.scale_by_opposite_gram(gauges).init(params)
    assert all(part in str(error.value) for part in ("found:", "expected:", "go.quotient(tx, gauges)"))


def test_two_gauges_may_share_a_leaf_of_which_each_has_its_own_entries() -> None:
    parts = {"qkv": _noise(0, 6, 3, 2, 4), "out": _noise(1, 2, 4, 6)}
    gauges = [
        go.head_linear({"qkv": "_ qkv=0 head basis"}, {"qkv": "_ qkv=1 head basis"}),
        go.head_linear({"qkv": "_ qkv=2 head basis"}, {"out": "head basis _"}),
    ]
    found = _update(go.links.scale_by_opposite_gram(gauges), parts, parts)
    for head in range(2):
        query, key, value = (parts["qkv"][:, k, head] for k in range(3))
        for k, (own, opposite) in enumerate(((query, key), (key, query), (value, parts["out"][head].T))):
            assert _apart(np.asarray(found["qkv"][:, k, head]), own @ _inverse(opposite)) <= 1e-4
