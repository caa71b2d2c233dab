"""The opposite-Gram correction: the formulas of the post, cotangents in and tangents out, stale inverses."""

import functools
import warnings
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
from tests.refusals import refused
from tests.twins import furthest

Tree = Any
Numbers = np.ndarray


def _noise(seed: int, *shape: int) -> Numbers:
    return np.random.default_rng(seed).normal(size=shape)


def _update(tx: optax.GradientTransformation, params: Tree, updates: Tree) -> Tree:
    return jit(lambda p, u: tx.update(u, tx.init(p), p)[0])(params, updates)


# Formulas -----------------------------------------------------------------------------------------

LORA = go.head_linear({"a": "_ basis"}, {"b": "basis _"})
FUSED = [
    go.head_linear({"qkv": "_ qkv=0 head basis"}, {"qkv": "_ qkv=1 head basis"}),
    go.head_linear({"qkv": "_ qkv=2 head basis"}, {"out": "head basis _"}),
]
RULES: dict[str, dict[str, Any]] = {
    "undamped": {}, "relative": {"damping": 0.1}, "absolute": {"damping": 0.5, "damping_mode": "absolute"},
    "diagonal": {"diagonal": True}, "diagonal, relative": {"diagonal": True, "damping": 0.1},
}


def _inverse(factor: Numbers, damping: float = 0.0, damping_mode: str = "relative", diagonal: bool = False) -> Numbers:
    gram = factor.T @ factor
    gram = np.diag(np.diag(gram)) if diagonal else gram
    added = damping * np.trace(gram) / len(gram) if damping_mode == "relative" else damping
    return np.linalg.inv(gram + added * np.eye(len(gram)))


@pytest.mark.slow_rows("relative", "absolute")
@pytest.mark.parametrize("rule", RULES)
def test_heads_have_the_formulas_of_the_post(rule: str, x64: None) -> None:
    """Two gauges may share a leaf of which each has its own entries, and what no gauge binds passes."""
    params, updates = (
        {"qkv": _noise(k, 6, 3, 2, 4), "out": _noise(k + 1, 2, 4, 6), "free": _noise(k, 3)} for k in (0, 10)
    )
    found = _update(go.links.scale_by_opposite_gram(FUSED, **RULES[rule]), params, updates)
    for head in range(2):
        at, increment, corrected = (
            [*(tree["qkv"][:, k, head] for k in range(3)), tree["out"][head].T] for tree in (params, updates, found)
        )
        for own, opposite in ((0, 1), (1, 0), (2, 3), (3, 2)):
            expected = increment[own] @ _inverse(at[opposite], **RULES[rule])
            np.testing.assert_allclose(corrected[own], expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(found["free"], updates["free"])


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("rule", ["undamped", "relative", "absolute"])
def test_channels_have_the_same_with_one_column(degree: int, rule: str, x64: None) -> None:
    """Powers that make up for a degree: up moves as α, down as α^(−p), and gradients by the inverses of these."""
    gauge = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"}, degree=degree)
    shapes = {"up": (6, 5), "bias": (5,), "down": (5, 3)}
    params, updates = ({n: _noise(10 * k + len(n), *s) for n, s in shapes.items()} for k in (0, 1))
    found = _update(go.links.scale_by_opposite_gram(gauge, **RULES[rule]), params, updates)
    damping = RULES[rule].get("damping", 0.0)
    up, down = (
        x + damping * (1.0 if rule == "absolute" else x)
        for x in (np.sum(params["up"] ** 2, 0) + params["bias"] ** 2, np.sum(params["down"] ** 2, 1))
    )
    expected = {n: updates[n] * down ** (-1 / degree) for n in ("up", "bias")}
    assert furthest(found, expected | {"down": updates["down"] * up[:, None] ** -float(degree)}) <= 1e-12


# Cotangents in, tangents out ----------------------------------------------------------------------

TWO_SIDED = (
    "rescale/block", "rescale/degree_2", "norm_scale/one_plus", "head_linear/value_out", "rope_linear/half",
    "rope_linear/partial", "product/semidirect",
)


@pytest.mark.parametrize("name", TWO_SIDED)
def test_cotangents_become_tangents(name: str, x64: None) -> None:
    """At g·θ the moved increment is the moved result, for matrices of condition up to 100 and scales up to 10."""
    case = next(c for c in GAUGE_CASES if c.name == name)
    group, params = go.product(case.gauges()), case.params(jax.random.key(0))
    gradient = jax.tree.map(lambda x: jnp.asarray(_noise(x.size, *x.shape)), params)
    tx = go.links.scale_by_opposite_gram(group)

    element = jit(lambda p: group.sample(jax.random.key(1), p, 2.303))(params)
    twin, moved = jit(lambda p, g: (group.act(element, p), move_cotangent(group, element, p, g)))(params, gradient)
    expected = jit(lambda p, u: move_tangent(group, element, p, u))(params, _update(tx, params, gradient))
    assert furthest(_update(tx, twin, moved), expected) <= 1e-10


def test_what_has_no_opposite_side_passes(x64: None) -> None:
    params = {n: _noise(k, 6, 4) for k, n in enumerate(("turned", "other", "normed", "head", "up"))}
    gauges = [
        go.head_rotation({"turned": "_ basis", "other": "_ basis"}), go.scale_invariant({"normed": "_ channel"}),
        go.logit_shift({"head": "_ vocab"}), go.scale_invariant({"up": "_ _"}),
    ]
    found = _update(go.links.scale_by_opposite_gram(gauges), params, params)
    jax.tree.map(np.testing.assert_array_equal, found, params)


# Stale inverses -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_inverses_are_kept_between_every_third_update(x64: None) -> None:
    """At points that have nothing to do with each other."""
    points, increments = (
        [{"a": _noise(k, 6, 4), "b": _noise(k + 20, 4, 5)} for k in range(seed, seed + 5)] for seed in (0, 40)
    )
    tx = go.links.scale_by_opposite_gram(LORA, every=3)
    state, step = tx.init(points[0]), jit(tx.update)
    for k, (params, updates) in enumerate(zip(points, increments, strict=True)):
        corrected, state = step(updates, state, params)
        old = points[k - k % 3]
        expected = {"a": updates["a"] @ _inverse(old["b"].T), "b": _inverse(old["a"]) @ updates["b"]}
        assert furthest(corrected, expected) <= 1e-12, k


SCALE = go.rescale({"a": "_ channel"}, {"b": "channel _"})


@pytest.mark.parametrize(("gauge", "diagonal", "anew"), [
    (LORA, False, False), (LORA, True, True), (SCALE, False, False), (SCALE, True, False),
], ids=["whole", "diagonal", "scale", "scale, diagonal"])
def test_stale_inverses_move_with_the_weights(gauge: go.Gauge, diagonal: bool, anew: bool, x64: None) -> None:
    """A whole inverse changes its basis. That of a diagonal has none in another basis, and is computed anew."""
    old, now, updates = ({"a": _noise(k, 6, 4), "b": _noise(k + 20, 4, 5)} for k in (0, 1, 2))
    tx = go.links.scale_by_opposite_gram(gauge, every=3, diagonal=diagonal)
    _, state = tx.update(updates, tx.init(old), old)
    element = gauge.sample(jax.random.key(0), now)
    moved, kept = gauge.act(element, now), gauge.act(element, now if anew else old)
    corrected, _ = tx.update(updates, go.orbit.transport(state, now, gauge, element), moved)
    inverse = functools.partial(_inverse, diagonal=diagonal or gauge is SCALE)
    expected = {"a": updates["a"] @ inverse(kept["b"].T), "b": inverse(kept["a"]) @ updates["b"]}
    assert furthest(corrected, expected) <= 1e-12


# Zeros, ranks, sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize("gauge", [LORA, SCALE], ids=lambda gauge: gauge.name)
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


def test_a_factor_of_less_than_full_rank_makes_one_step_for_all_bases(x64: None) -> None:
    """The pseudo-inverse in the stored basis does not move with the basis, as an inverse does."""
    narrow = {"a": _noise(0, 6, 4), "b": _noise(1, 4, 2) @ _noise(2, 2, 5)}
    tx, ends = go.links.scale_by_opposite_gram(LORA), []
    with warnings.catch_warnings(action="error"):
        state = tx.init(narrow)
    for p in (narrow, go.bind(LORA, narrow).random_twin(jax.random.key(1), narrow)):
        error = p["a"] @ p["b"] - 1.0
        updates, _ = jit(tx.update)({"a": error @ p["b"].T, "b": p["a"].T @ error}, state, p)
        ends.append((p["a"] - 0.1 * updates["a"]) @ (p["b"] - 0.1 * updates["b"]))
    assert furthest(*ends) <= 1e-12 and furthest(ends[0], narrow["a"] @ narrow["b"]) > 1e-2
    with pytest.warns(UserWarning, match=r"scale_by_opposite_gram: heads without full rank in 'a' and(.|\n)*is split"):
        tx.init(narrow | {"a": _noise(0, 6, 1) @ _noise(3, 1, 4)})


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_columns_of_all_sizes_keep_their_digits(size: float, x64: None) -> None:
    inverse = jit(inverse_gram)(jnp.diag(jnp.array([size, 1 / size])))
    np.testing.assert_allclose(inverse, np.diag([size**-2, size**2]), rtol=1e-15)
    rows, scale = _noise(0, 7, 4), np.array([size, 1.0, 1 / size, 0.0])
    inverse = np.asarray(jit(inverse_gram)(rows * scale))  # the last column is 0: all others count
    np.testing.assert_allclose(inverse[:3, :3] * np.outer(scale[:3], scale[:3]), _inverse(rows[:, :3]), rtol=1e-12)
    assert not inverse[3].any() and not inverse[:, 3].any()


def test_parallel_columns_of_different_sizes_have_the_pseudo_inverse(x64: None) -> None:
    direction, sizes = _noise(0, 7, 1), np.array([1e3, 1e-3])
    expected = np.outer(sizes, sizes) / np.sum(sizes**2) ** 2 / np.sum(direction**2)
    assert furthest(jit(inverse_gram)(direction * sizes), expected) <= 1e-8


def test_a_small_singular_value_that_no_diagonal_entry_shows_is_dropped() -> None:
    """Kahan's matrix: diagonal entries from 1 down to 1e-3, the last two singular values 3e-3 and 1e-7."""
    sine, cosine, size = np.sin(0.8), np.cos(0.8), 20
    kahan = sine ** np.arange(size)[:, None] * (np.eye(size) - cosine * np.triu(np.ones((size, size)), 1))
    values = np.linalg.svd(kahan, compute_uv=False)
    assert values[-1] < 1e-6 * values[0] < 1e-2 * values[-2] and np.diag(kahan).min() > 1e-3
    pseudo = np.linalg.pinv(kahan, rcond=1e-6)
    assert furthest(jit(inverse_gram)(kahan.astype("f")), pseudo @ pseudo.T) <= 1e-2


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-11), ("float32", 1e-4)])
def test_factors_of_less_than_full_rank_have_the_pseudo_inverse(dtype: str, limit: float) -> None:
    """Beside heads of full rank, whose inverses do not notice."""
    narrow = _noise(0, 3, 40, 5) @ _noise(1, 3, 5, 12)
    narrow[1] = _noise(2, 40, 12)
    narrow[2, :, 4] = 0.0
    with jax.enable_x64(dtype == "float64"):
        rows, quick = narrow.astype(dtype), jit(inverse_gram)
        found = quick(rows)
        for own, inverse in zip(rows.astype(float), found, strict=True):
            pseudo = np.linalg.pinv(own, rcond=1e-5)
            assert furthest(inverse, pseudo @ pseudo.T) <= limit
        assert furthest(found[1], quick(rows[[1, 1, 1]])[0]) <= limit
        few = _noise(3, 3, 5).astype(dtype)
        assert furthest(quick(few), np.linalg.pinv(few.astype(float).T @ few)) <= limit


def test_columns_too_small_to_invert_count_as_zero() -> None:
    np.testing.assert_array_equal(jit(inverse_gram)(np.diag([1.0, 1e-16, 1e-25]).astype("f")), np.diag([1.0, 0.0, 0.0]))
    params = {"a": np.ones((1, 3), "f"), "b": np.diag([1.0, 1e-25, 0.0]).astype("f")}
    for gauge in (LORA, go.rescale({"a": "_ channel"}, {"b": "channel _"}, degree=3)):
        found = _update(go.links.scale_by_opposite_gram(gauge, diagonal=True), params, params)
        np.testing.assert_allclose(found["a"], [[1.0, 0.0, 0.0]])


# Complaints ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [
    {"damping": -1e-3}, {"damping": "1e-3"}, {"damping": np.nan}, {"damping": np.ones(2)}, {"damping_mode": "trace"},
    {"every": 0}, {"every": -1}, {"every": 2.0}, {"every": True},
], ids=repr)
def test_bad_options_are_refused_at_once(options: dict[str, Any]) -> None:
    with refused("scale_by_opposite_gram: bad "):
        go.links.scale_by_opposite_gram(LORA, **options)


NORM = go.norm_scale({"norm": "channel"}, {"a": "channel _"})


@pytest.mark.parametrize("other", [LORA, go.rescale({"norm": "channel"}, {"free": "channel"})], ids=["heads", "scales"])
def test_a_leaf_with_two_opposite_factors_is_refused(other: go.Gauge) -> None:
    params = {"norm": np.ones(6), "free": np.ones(6), "a": np.ones((6, 4)), "b": np.ones((4, 5))}
    with refused(r"two opposite factors for '(a|norm)'", "go.quotient(tx, gauges)"):
        go.links.scale_by_opposite_gram([NORM, other]).init(params)
