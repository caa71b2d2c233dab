"""Hyperball: weights stay on their spheres, decay has no part in a step, a number for a radius moves them there."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.quick import jit
from tests.refusals import refused
from tests.tolerances import tolerance
from tests.twins import driven, walk

Tree = Any


def _noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def _step(tx: optax.GradientTransformation, params: Tree, updates: Tree, steps: int = 1) -> tuple[Tree, Tree]:
    """The parameters after these updates, given again at every step, and the last state."""
    return driven(tx, params, [updates] * steps)


def _norms(x: np.ndarray, along: Any = None) -> np.ndarray:
    return np.sqrt(np.sum(x**2, along, keepdims=True))


def _retracted(
    weights: np.ndarray, update: np.ndarray, along: Any = None, radius: Any = None, rate: Any = None
) -> np.ndarray:
    """The post's formulas for spheres along these axes, radius None for the weights' own."""
    radius = _norms(weights, along) if radius is None else radius
    flat = update - np.sum(update * weights, along, keepdims=True) / _norms(weights, along) ** 2 * weights
    if along == ():  # on a sphere of one entry nothing is tangent
        flat, rate = 0.0 * flat, None
    moved = weights + (flat if rate is None else rate * radius * flat / _norms(flat, along))
    return radius * moved / _norms(moved, along)


def _close(found: Any, expected: Any) -> None:
    dtype = jnp.asarray(found).dtype
    error = np.linalg.norm(np.asarray(found, float) - expected) / np.linalg.norm(expected)
    assert error <= tolerance("optax", dtype), error


# Formulas -----------------------------------------------------------------------------------------

SHAPE = (2, 3, 2, 4)
SPHERES = {"_ _ _ _": (), "_ _ head _": (2,), "layer _ head _": (0, 2), "_ _ _ channel": (3,), "a b c d": (0, 1, 2, 3)}
"""Which axes are named."""


def _falling(count: Any) -> Any:
    return 0.5 / (1.0 + count)


@pytest.mark.parametrize("axes", SPHERES)
@pytest.mark.parametrize(("radius", "rate"), [("initial", None), ("initial", _falling), (2.5, None), (2.5, 0.1)])
def test_every_sphere_has_the_formulas_of_the_post(axes: str, radius: Any, rate: Any, x64: None) -> None:
    """Three steps with updates of other sizes; a length along the tangent is the rate's, whatever comes in."""
    weights, updates = _noise(0, *SHAPE), np.stack([0.1 * 10.0**n * _noise(n + 1, *SHAPE) for n in range(3)])
    tx = go.norms.hyperball({"w": axes}, radius, learning_rate=rate)
    points, state = walk(tx, {"w": weights}, {"w": updates})
    for n in range(3):
        length, along = rate(n) if callable(rate) else rate, tuple({0, 1, 2, 3} - set(SPHERES[axes]))
        kept = radius if radius != "initial" else _norms(weights, along)
        _close(points["w"][n + 1], _retracted(np.asarray(points["w"][n]), updates[n], along, kept, length))
    shape = tuple(SHAPE[k] for k in SPHERES[axes])
    assert state.radius == () if radius != "initial" else state.radius["w"][axes].shape == shape
    assert state.count == (3 if callable(rate) else ())


def test_selected_entries_alone_are_on_spheres_and_values_stored_less_one(x64: None) -> None:
    """Heads of queries and keys, fused with values that are free."""
    axes: dict[str, Any] = {"qkv": ("(qkv=0 head _) _", "(qkv=1 head _) _"), "less_one": "1+ _"}
    tx = go.norms.hyperball(axes, sizes={"head": 2, "qkv": 3})
    weights, update = _noise(0, 3, 2, 4, 5), 0.1 * _noise(1, 3, 2, 4, 5)
    stored, other = 0.1 * _noise(2, 6), 0.1 * _noise(3, 6)
    params, updates = ({"qkv": x.reshape(24, 5), "less_one": y} for x, y in ((weights, stored), (update, other)))
    found, state = _step(tx, params, updates)
    _close(found["less_one"] + 1, _retracted(stored + 1, other))
    moved = found["qkv"].reshape(weights.shape)
    _close(moved[:2], _retracted(weights[:2], update[:2], (2, 3)))
    np.testing.assert_array_equal(moved[2], weights[2] + update[2])
    assert [r.shape for r in state.radius["qkv"].values()] == [(2,), (2,)]


# Decay --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [None, _falling])
def test_decay_vanishes(dtype: str, rate: Any) -> None:
    """With it or without it, one trajectory; and of decay alone nothing is left, which a length would blow up."""
    params = {"w": _noise(0, 8, 5).astype(dtype), "still": _noise(1, 8, 5).astype(dtype)}
    grads = {"w": _noise(2, 8, 5).astype(dtype), "still": np.zeros((8, 5), dtype)}
    last = optax.scale(-0.01), go.norms.hyperball({"w": "_ _", "still": "_ channel"}, learning_rate=rate)
    plain, _ = _step(optax.chain(*last), params, grads, 3)
    decayed, _ = _step(optax.chain(optax.add_decayed_weights(0.5), *last), params, grads, 3)
    assert np.linalg.norm(plain["w"] - params["w"]) > 1e-3
    for name, still in (("w", plain["w"]), ("still", params["still"])):
        _close(decayed[name], np.asarray(still, float))


# Radii --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_radii_are_kept_over_fifty_steps(dtype: Any) -> None:
    """To the rounding of the weights, which does not add up: the last steps are no further off than the first."""
    spheres = {"_ _": (-2, -1), "_ head _": (-3, -1), "_ c": (-2,)}
    shapes = {"_ _": (6, 5), "_ head _": (6, 2, 4), "_ c": (6, 5)}
    tx = optax.chain(optax.scale(-0.1), go.norms.hyperball({f"w {axes}": axes for axes in spheres}))
    params = {f"w {axes}": jnp.asarray(_noise(0, *shape), dtype) for axes, shape in shapes.items()}
    points, _ = walk(tx, params, jax.tree.map(lambda x: jnp.asarray(_noise(5, 50, *x.shape), dtype), params))
    for axes, along in spheres.items():
        way = np.asarray(points[f"w {axes}"], float)
        norms = _norms(way, along)
        assert np.max(np.abs(norms / norms[:1] - 1)) <= {jnp.float32: 4e-7, jnp.bfloat16: 4e-3}[dtype], axes
        assert np.linalg.norm(way[-1] - way[0]) > 0.5 * np.linalg.norm(way[0]), "nothing moved, nothing is checked"


@pytest.mark.parametrize("rate", [None, 0.1])
def test_patterns_have_numbers_and_a_zero_takes_the_direction_of_its_update(rate: float | None, x64: None) -> None:
    params, update = {"a": _noise(1, 3, 4), "b": np.zeros((5, 2))}, np.stack([_noise(0, 5), np.zeros(5)], 1)
    tx = go.norms.hyperball({"a": "_ _", "b": "_ c"}, {"a": 0.5, "b": jnp.asarray(2.0)}, learning_rate=rate)
    found, state = _step(tx, params, {"a": np.zeros((3, 4)), "b": update})
    _close(found["a"], 0.5 * params["a"] / np.linalg.norm(params["a"]))
    _close(found["b"], 2.0 * update / np.linalg.norm(update[:, 0]))  # the second has none, and stays
    assert jax.tree.leaves(state) == []


def test_a_huge_step_ends_on_the_sphere_in_its_direction() -> None:
    tx, params = go.norms.hyperball({"w": "_ n"}), {"w": jnp.array([[3.0], [4.0]])}
    updates, _ = tx.update({"w": jnp.array([[4e30], [-3e30]])}, tx.init(params), params)
    np.testing.assert_allclose(optax.apply_updates(params, updates)["w"], [[4.0], [-3.0]], rtol=1e-6)


def test_zeros_that_init_cannot_see_are_free(x64: None) -> None:
    weights = np.stack([np.zeros(5), _noise(0, 5)], 1)
    update, tx = _noise(1, 5, 2), go.norms.hyperball({"b": "_ c"})
    state = jit(tx.init)({"b": weights})
    moves, _ = jit(tx.update)({"b": update}, state, {"b": weights})
    assert state.radius["b"]["_ c"][0] == 0
    np.testing.assert_array_equal(moves["b"][:, 0], update[:, 0])
    _close(weights[:, 1] + moves["b"][:, 1], _retracted(weights[:, 1], update[:, 1]))


@pytest.mark.parametrize(("size", "axes", "radius"), [(0.0, "_ _", {"w": 0.5}), (3.0, "c _", 1.0)])
def test_a_number_that_moves_weights_at_once_is_told(size: float, axes: str, radius: Any) -> None:
    """The first step goes to the sphere at any rate; weights that are on it already, and "initial", are silent."""
    with pytest.warns(UserWarning, match="the first step moves weights onto their spheres") as told:
        go.norms.hyperball({"w": axes}, radius, learning_rate=1e-8).init({"w": size * np.eye(4)})
    for part in ("hyperball", "found:    norms of 'w'", "expected:", "remedy:", "radius='initial'"):
        assert part in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go.norms.hyperball({"w": "_ c"}, 2.0).init({"w": jnp.asarray(2.0 * np.eye(4), jnp.bfloat16)})
        go.norms.hyperball({"w": "_ c"}).init({"w": _noise(0, 8, 3)})


def test_updates_of_another_precision_keep_it() -> None:
    """bf16 weights may get float32 updates, which stay float32."""
    params = {"w": jnp.asarray(_noise(0, 6, 4), jnp.bfloat16)}
    tx = go.norms.hyperball({"w": "_ _"})
    moves, state = tx.update({"w": jnp.asarray(_noise(1, 6, 4), jnp.float32)}, tx.init(params), params)
    assert moves["w"].dtype == jnp.float32 and state.radius["w"]["_ _"].dtype == jnp.float32
    exact = np.asarray(params["w"], float) + np.asarray(moves["w"], float)
    np.testing.assert_allclose(np.linalg.norm(exact), state.radius["w"]["_ _"], rtol=4e-7)


def test_injected_numbers_compute_the_same(x64: None) -> None:
    options: dict[str, Any] = {"axes": {"w": "_ c"}, "radius": 2.0, "learning_rate": 0.1}
    params, updates = {"w": _noise(0, 6, 4)}, {"w": _noise(1, 6, 4)}
    found, state = _step(optax.inject_hyperparams(go.norms.hyperball)(**options), params, updates, 2)
    _close(found["w"], np.asarray(_step(go.norms.hyperball(**options), params, updates, 2)[0]["w"]))
    assert {"radius", "learning_rate"} <= set(state.hyperparams)


def test_a_hidden_subtree_that_may_be_another_does_not_count_beside_a_match() -> None:
    tx = go.norms.hyperball({"{name}/up": "_ _"})
    assert set(tx.init({"a": {"up": ONES}, "free": optax.MaskedNode()}).radius) == {"a/up"}
    with pytest.raises(ValueError, match="MaskedNode hides a leaf"):
        tx.init({"free": optax.MaskedNode()})


def test_a_tree_without_leaves() -> None:
    for radius, leaves in (("initial", 1), (1.0, 0)):
        assert len(jax.tree.leaves(go.norms.hyperball({"w": "_ _"}, radius).init({}))) == leaves


ONES, NO_GAUGE = np.ones((4, 3), np.float32), go.logit_shift({"shift": "vocab"})
# What is given besides {"w": "_ _"}, the parameters, and what the error says.
COMPLAINTS: dict[str, tuple[dict[str, Any], Tree, str]] = {
    "no axes": ({"axes": {}}, {}, "no blocks in 'axes'"),
    "another word": ({"radius": "unit"}, {}, "bad radius"),
    "negative radius": ({"radius": {"w": -1.0}}, {}, "bad radius of 'w'"),
    "array of radii": ({"radius": np.ones(2)}, {}, "bad radius"),
    "truth": ({"radius": True}, {}, "bad radius"),
    "no radius": ({"axes": {"w": "_ _", "v": "_"}, "radius": {"w": 1.0}}, {}, "bad radius of 'v'"),
    "no axes for a radius": ({"radius": {"w": 1.0, "v": 1.0}}, {}, "for no other pattern"),
    "sizes": ({"sizes": {"head": 2}}, {}, "unknown axis in sizes 'head'"),
    "no match": ({}, {"v": ONES}, "write 'v'"),
    "two entries": ({"axes": {"w": "_ _", "{name}": "_ channel"}}, {"w": ONES}, "an entry in two vectors of 'w'"),
    "two strings": ({"axes": {"w": ("a=0:3 _", "a=2:4 _")}}, {"w": ONES}, "an entry in two vectors of 'w'"),
    "zero sphere": ({"axes": {"w": "_ c"}}, {"w": ONES * [1, 0, 1]}, "norm 0 in 1 of 3 spheres"),
    "no update": ({}, {"w": ONES}, "no update for 'w'"),
}


@pytest.mark.parametrize("complaint", COMPLAINTS)
def test_complaints_say_what_to_do(complaint: str) -> None:
    arguments, params, text = COMPLAINTS[complaint]
    with refused("", "hyperball", text):
        tx = go.norms.hyperball(**{"axes": {"w": "_ _"}, **arguments})
        tx.update({"w": optax.MaskedNode()}, tx.init(params), params)


ON_VECTORS: dict[str, Any] = {
    "hyperball": go.norms.hyperball,
    "rotational_adamw": lambda axes: go.norms.rotational_adamw(0.01, axes, weight_decay=0.1),
    "max_norm": lambda axes: go.norms.max_norm(optax.sgd(0.1), axes, learning_rate=0.1),
    "max_norm_muon": lambda axes: go.max_norm_muon(0.1, NO_GAUGE, axes),
    "scale_by_vector_norm": go.links.scale_by_vector_norm,
}


@pytest.mark.parametrize("name", ON_VECTORS)
def test_a_state_of_other_vectors_is_refused(name: str) -> None:
    """Whatever their number: rows and columns of a square kernel have states of one shape."""
    params, make = {"w": jnp.ones((4, 4)), "v": jnp.ones((4, 4)), "shift": jnp.zeros(3)}, ON_VECTORS[name]
    tx = make({"w": "_ c", "v": "_ c"})
    for other in ({"w": "c _", "v": "_ c"}, {"w": "_ c"}, {"w": ("_ c=0:2", "_ c=2:4"), "v": "_ c"}):
        with refused("a state (that was made for other vectors, at '|of another optimizer)", "tx.init(params)"):
            tx.update(params, make(other).init(params), params)
    tx.update(params, tx.init(params), params)
