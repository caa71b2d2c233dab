"""Hyperball: weights stay on their spheres, decay has no part in a step, a number for a radius moves them there."""

import functools
import warnings
from collections.abc import Callable
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

Tree = Any
RATE = 0.01


def _noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def _step(tx: optax.GradientTransformation, params: Tree, updates: Tree, steps: int = 1) -> tuple[Tree, Tree]:
    """The parameters after these updates, given again at every step, and the last state."""

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        moves, state = tx.update(updates, state, params)
        return (optax.apply_updates(params, moves), state), None

    start = params, tx.init(params)
    return jit(lambda start: jax.lax.scan(step, start, length=steps)[0])(start)


def _retracted(weights: np.ndarray, update: np.ndarray, radius: float | None, rate: float | None) -> np.ndarray:
    """The post's formulas for one sphere, radius None for the weights' own."""
    radius = np.linalg.norm(weights) if radius is None else radius
    flat = update - np.sum(update * weights) / np.sum(weights**2) * weights
    if rate is not None:
        flat = rate * radius * flat / np.linalg.norm(flat)
    moved = weights + flat
    return radius * moved / np.linalg.norm(moved)


def _close(found: Any, expected: Any) -> None:
    dtype = jnp.asarray(found).dtype
    error = np.linalg.norm(np.asarray(found, float) - expected) / np.linalg.norm(expected)
    assert error <= tolerance("optax", dtype), error


# Formulas -----------------------------------------------------------------------------------------

SHAPE = (2, 3, 2, 4)
SPHERES = {"_ _ _ _": (), "_ _ head _": (2,), "layer _ head _": (0, 2), "_ _ _ channel": (3,), "a b c d": (0, 1, 2, 3)}


@pytest.mark.parametrize("axes", SPHERES)
@pytest.mark.parametrize(("radius", "rate"), [("initial", None), ("initial", 0.1), (2.5, None), (2.5, 0.1)])
def test_every_sphere_has_the_formulas_of_the_post(axes: str, radius: Any, rate: float | None, x64: None) -> None:
    weights, update = _noise(0, *SHAPE), 0.1 * _noise(1, *SHAPE)
    named = SPHERES[axes]
    expected = weights.copy()
    for index in np.ndindex(*(SHAPE[k] for k in named)):
        at = [slice(None)] * 4
        for k, i in zip(named, index, strict=True):
            at[k] = slice(i, i + 1)
        own = tuple(at)
        if len(named) == 4:  # on a sphere of one entry nothing is tangent
            expected[own] = np.sign(weights[own]) * (np.abs(weights[own]) if radius == "initial" else radius)
        else:
            expected[own] = _retracted(weights[own], update[own], None if radius == "initial" else radius, rate)
    found, state = _step(go.norms.hyperball({"w": axes}, radius, learning_rate=rate), {"w": weights}, {"w": update})
    _close(found["w"], expected)
    shape = tuple(SHAPE[k] for k in named)
    assert state.radius == () if radius != "initial" else state.radius["w"][axes].shape == shape
    assert state.count == ()


def test_selected_entries_alone_are_on_spheres(x64: None) -> None:
    """Heads of queries and keys, fused with values that are free."""
    axes = ("(qkv=0 head _) _", "(qkv=1 head _) _")
    weights, update = _noise(0, 3, 2, 4, 5), 0.1 * _noise(1, 3, 2, 4, 5)
    tx = go.norms.hyperball({"qkv": axes}, sizes={"head": 2, "qkv": 3})
    flat = {"qkv": weights.reshape(24, 5)}, {"qkv": update.reshape(24, 5)}
    (moves, state), _ = jit(lambda p, u: (tx.update(u, tx.init(p), p), None))(*flat)
    moved = weights + moves["qkv"].reshape(weights.shape)
    for part, head in np.ndindex(2, 2):
        _close(moved[part, head], _retracted(weights[part, head], update[part, head], None, None))
    np.testing.assert_array_equal(moves["qkv"].reshape(weights.shape)[2], update[2])
    assert [r.shape for r in state.radius["qkv"].values()] == [(2,), (2,)]


def test_a_value_stored_less_one_is_on_the_sphere(x64: None) -> None:
    stored, update = 0.1 * _noise(0, 6), 0.1 * _noise(1, 6)
    found, _ = _step(go.norms.hyperball({"scale": "1+ _"}), {"scale": stored}, {"scale": update})
    _close(found["scale"] + 1, _retracted(stored + 1, update, None, None))


# Decay --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [None, RATE, lambda count: RATE / (1.0 + count)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_decay_vanishes(dtype: str, rate: Any) -> None:
    """With it or without it, one trajectory; and of decay alone nothing is left, which a length would blow up."""
    with jax.enable_x64(dtype == "float64"):
        params = {"w": _noise(0, 8, 5).astype(dtype), "still": _noise(1, 8, 5).astype(dtype)}
        grads = {"w": _noise(2, 8, 5).astype(dtype), "still": np.zeros((8, 5), dtype)}
        last = optax.scale(-RATE), go.norms.hyperball({"w": "_ _", "still": "_ channel"}, learning_rate=rate)
        plain, _ = _step(optax.chain(*last), params, grads, 3)
        decayed, _ = _step(optax.chain(optax.add_decayed_weights(0.5), *last), params, grads, 3)
        assert np.linalg.norm(plain["w"] - params["w"]) > 1e-3
        for name, still in (("w", plain["w"]), ("still", params["still"])):
            _close(decayed[name], np.asarray(still, float))


# Radii --------------------------------------------------------------------------------------------

STEPS = 50


@functools.cache
def _walk(dtype: Any, radius: Any) -> tuple[Tree, Tree]:
    """Start, and every point of a random walk of 50 steps."""
    tx = optax.chain(
        optax.scale(-0.1), go.norms.hyperball({"matrix": "_ _", "heads": "_ head _", "columns": "_ c"}, radius)
    )
    shapes = {"matrix": (6, 5), "heads": (6, 2, 4), "columns": (6, 5)}
    params = {name: jnp.asarray(_noise(k, *shape), dtype) for k, (name, shape) in enumerate(shapes.items())}
    grads = {name: jnp.asarray(_noise(k + 5, STEPS, *shape), dtype) for k, (name, shape) in enumerate(shapes.items())}

    def step(carry: Any, grads: Tree) -> Any:
        params, state = carry
        moves, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, moves)
        return (params, state), params

    return params, jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g)[1])(params, grads)


def _norms(tree: Tree) -> dict[str, np.ndarray]:
    """Norms of all spheres, leading axes kept."""
    axes = {"matrix": (-2, -1), "heads": (-3, -1), "columns": (-2,)}
    return {name: np.sqrt(np.sum(np.asarray(x, float) ** 2, axes[name])) for name, x in tree.items()}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_radii_are_kept_over_fifty_steps(dtype: Any) -> None:
    """To the rounding of the weights, which does not add up: the last steps are no further off than the first."""
    start, points = _walk(dtype, "initial")
    radii = _norms(start)
    for name, norms in _norms(points).items():
        error = np.abs(norms / radii[name] - 1)
        assert np.max(error) <= {jnp.float32: 4e-7, jnp.bfloat16: 4e-3}[dtype], f"{name} {np.max(error):.1e}"
        assert points[name].dtype == dtype
    turned = np.linalg.norm(np.asarray(points["matrix"][-1] - start["matrix"], float)) / radii["matrix"]
    assert turned > 0.5, "nothing moved, nothing is checked"


def test_a_number_for_a_radius_moves_weights_onto_their_spheres() -> None:
    _, points = _walk(jnp.float32, 3.0)
    for name, norms in _norms(points).items():
        np.testing.assert_allclose(norms, 3.0, rtol=4e-7, err_msg=name)


def test_every_pattern_may_have_a_number(x64: None) -> None:
    params = {"a": _noise(0, 3, 4), "b": _noise(1, 4, 3)}
    tx = go.norms.hyperball({"a": "_ _", "b": "_ c"}, {"a": 2.0, "b": jnp.asarray(0.5)})
    found, state = _step(tx, params, jax.tree.map(np.zeros_like, params))
    _close(found["a"], 2.0 * params["a"] / np.linalg.norm(params["a"]))
    _close(found["b"], 0.5 * params["b"] / np.linalg.norm(params["b"], axis=0))
    assert jax.tree.leaves(state) == []


@pytest.mark.parametrize("rate", [None, 0.1])
def test_a_zero_takes_the_direction_of_its_first_update(rate: float | None, x64: None) -> None:
    update = np.stack([_noise(0, 5), np.zeros(5)], 1)
    found, _ = _step(go.norms.hyperball({"b": "_ c"}, 2.0, learning_rate=rate), {"b": np.zeros((5, 2))}, {"b": update})
    _close(found["b"], 2.0 * update / np.linalg.norm(update[:, 0]))  # the second has none, and stays


def test_zeros_that_init_cannot_see_are_free(x64: None) -> None:
    weights = np.stack([np.zeros(5), _noise(0, 5)], 1)
    update, tx = _noise(1, 5, 2), go.norms.hyperball({"b": "_ c"})
    state = jit(tx.init)({"b": weights})
    moves, _ = jit(tx.update)({"b": update}, state, {"b": weights})
    assert state.radius["b"]["_ c"][0] == 0
    np.testing.assert_array_equal(moves["b"][:, 0], update[:, 0])
    _close(weights[:, 1] + moves["b"][:, 1], _retracted(weights[:, 1], update[:, 1], None, None))


@pytest.mark.parametrize(
    ("weights", "axes", "radius"),
    [(_noise(0, 8, 3), "_ c", 1.0), (np.zeros((4, 3)), "_ _", {"w": 0.5}), (3.0 * np.eye(4), "c _", 1.0)],
    ids=["normal", "zero", "too large"],
)
def test_a_number_that_moves_weights_at_once_is_told(weights: Any, axes: str, radius: Any) -> None:
    """The first step goes to the sphere at any rate; weights that are on it already, and "initial", are silent."""
    tx = go.norms.hyperball({"w": axes}, radius, learning_rate=1e-8)
    with pytest.warns(UserWarning, match="the first step moves weights onto their spheres") as told:
        tx.init({"w": weights})
    for part in ("hyperball", "found:    norms of 'w'", "expected:", "remedy:", "radius='initial'"):
        assert part in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go.norms.hyperball({"w": "_ c"}, 2.0).init({"w": jnp.asarray(2.0 * np.eye(4), jnp.bfloat16)})
        go.norms.hyperball({"w": "_ c"}).init({"w": _noise(0, 8, 3)})


# Lengths ------------------------------------------------------------------------------------------


def test_a_schedule_is_read_at_every_step(x64: None) -> None:
    """Each step's length along the tangent is the schedule's, whatever comes in."""
    schedule: Callable[[Any], Any] = lambda count: 0.5 / (1.0 + count)  # noqa: E731
    tx, params = go.norms.hyperball({"w": "_ _"}, learning_rate=schedule), {"w": _noise(0, 6, 4)}
    state, step = tx.init(params), jit(tx.update)
    assert state.count.dtype == jnp.int32 and state.count == 0
    for n in range(3):
        moves, state = step({"w": 10.0**n * _noise(n + 1, 6, 4)}, state, params)
        moved = optax.apply_updates(params, moves)
        cosine = np.sum(moved["w"] * params["w"]) / np.sum(params["w"] ** 2)
        np.testing.assert_allclose(np.tan(np.arccos(cosine)), schedule(n), rtol=tolerance("oracle"))
        params = moved
    assert state.count == 3


# Trees --------------------------------------------------------------------------------------------


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


def _built(**arguments: Any) -> Callable[[], Any]:
    return lambda: go.norms.hyperball(**{"axes": {"w": "_ _"}, **arguments})


def _begun(params: Tree, **arguments: Any) -> Callable[[], Any]:
    return lambda: _built(**arguments)().init(params)


W, ONES = {"w": "_ _"}, np.ones((4, 3), np.float32)
COMPLAINTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no axes": (_built(axes={}), "no blocks in 'axes'"),
    "axes of a gauge": (_built(axes=[W]), "no blocks in 'axes'"),
    "reserved": (_built(axes={"w": "_ basis"}), "rename the axis, or write '_'"),
    "no strings": (_built(axes={"w": ()}), "malformed axes of 'w'"),
    "another word": (_built(radius="unit"), "bad radius"),
    "zero radius": (_built(radius=0.0), "bad radius"),
    "negative radius": (_built(radius={"w": -1.0}), "bad radius of 'w'"),
    "array of radii": (_built(radius=np.ones(2)), "bad radius"),
    "truth": (_built(radius=True), "bad radius"),
    "no radius": (_built(axes={"w": "_ _", "v": "_"}, radius={"w": 1.0}), "'v' in axes alone"),
    "no axes for a radius": (_built(radius={"w": 1.0, "v": 1.0}), "'v' in radius alone"),
    "sizes": (_built(sizes={"head": 2}), "unknown axis in sizes 'head'"),
    "no match": (_begun({"v": ONES}), "write 'v'"),
    "rank": (_begun({"w": ONES[0]}), "wrong rank at 'w'"),
    "hidden": (_begun({"w": optax.MaskedNode()}), "own axes, of the leaves it holds"),
    "two entries": (_begun({"w": ONES}, axes={"w": "_ _", "{name}": "_ channel"}), "an entry in two vectors of 'w'"),
    "two strings": (_begun({"w": ONES}, axes={"w": ("a=0:3 _", "a=2:4 _")}), "an entry in two vectors of 'w'"),
    "zero sphere": (_begun({"w": ONES * [1, 0, 1]}, axes={"w": "_ c"}), "norm 0 of 1 of 3 spheres"),
}


@pytest.mark.parametrize("complaint", COMPLAINTS)
def test_complaints_say_what_to_do(complaint: str) -> None:
    call, text = COMPLAINTS[complaint]
    with refused("", "hyperball", text):
        call()


def test_updates_without_a_leaf_are_refused() -> None:
    tx, params = go.norms.hyperball(W), {"w": ONES}
    with refused("no update for 'w'"):
        tx.update({"w": optax.MaskedNode()}, tx.init(params), params)


@pytest.mark.parametrize("make", [
    lambda axes: go.norms.hyperball({"w": axes}),
    lambda axes: go.norms.rotational_adamw(0.01, {"w": axes}, weight_decay=0.1),
    lambda axes: go.links.scale_by_vector_norm({"w": axes}),
], ids=["hyperball", "rotational_adamw", "scale_by_vector_norm"])
def test_a_state_of_other_vectors_is_refused(make: Any) -> None:
    """On a square kernel, whose shapes do not tell rows from columns."""
    params = {"w": jnp.asarray(_noise(0, 4, 4), jnp.float32)}
    with pytest.raises(ValueError, match=r"a state that was made for other vectors, at 'w'[\s\S]*tx\.init"):
        make("_ c").update(params, make("c _").init(params), params)
