"""Controlled rotation, what `track_rotation` records and where both settle, beside the same in plain NumPy."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.norms.equilibrium import polar_alignment
from tests.refusals import refused
from tests.tolerances import tolerance
from tests.twins import driven, structure, walk

RATE, DECAY = 0.01, 0.1


def _noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def _angles(weights: np.ndarray) -> np.ndarray:
    """Between neighbouring steps (steps + 1, entries, vectors)."""
    unit = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    return 2.0 * np.arcsin(np.linalg.norm(np.diff(unit, axis=0), axis=1) / 2.0)


def _algorithm(weights: np.ndarray, directions: np.ndarray, beta: float, eps: float, center: bool) -> np.ndarray:
    """Algorithm 1 for one vector, line by line, by an angle of 0.05; `directions` are the inner updates over η."""
    n, nu, centred = np.linalg.norm(weights), 0.0, weights - weights.mean() if center else weights
    p = n * centred / np.linalg.norm(centred)
    for t, direction in enumerate(directions, 1):
        d = direction - direction @ p / (p @ p) * p
        d = d - d.mean() if center else d
        nu = beta * nu + (1.0 - beta) * (d @ d)
        p = p + 0.05 * n * d / np.sqrt(nu / (1.0 - beta**t) + eps)
        p = n * p / np.linalg.norm(p)
    return p


SHAPE = (2, 3, 2, 4)
VECTORS = {"_ _ _ channel": (3,), "_ _ head _": (2,), "layer _ head _": (0, 2), "_ _ _ _": ()}
"""Which axes are named."""
SGD = optax.sgd(RATE)


def _rotational(axes: str, eta_r: Any, inner: Any = SGD, rate: Any = RATE, **options: Any) -> Any:
    return go.norms.rotational(
        inner, {"w": axes}, learning_rate=rate, weight_decay=DECAY, eta_r=eta_r, **{"eps": 0.0, **options}
    )


@pytest.mark.parametrize("axes", VECTORS)
@pytest.mark.parametrize(("beta", "eps", "center"), [(0.9, 0.0, True), (0.5, 0.3, False)])
def test_every_vector_follows_the_algorithm(axes: str, beta: float, eps: float, center: bool, x64: None) -> None:
    weights, gradients, named = _noise(0, *SHAPE), _noise(1, 5, *SHAPE), VECTORS[axes]
    found, _ = walk(_rotational(axes, 0.05, beta=beta, eps=eps, center=center), {"w": weights}, {"w": gradients})
    for index in np.ndindex(*(SHAPE[k] for k in named)):
        at = tuple(index[named.index(k)] if k in named else slice(None) for k in range(4))
        directions = -gradients[(slice(None), *at)].reshape(5, -1)
        expected = _algorithm(weights[at].ravel(), directions, beta, eps, center)
        error = np.linalg.norm(np.asarray(found["w"][-1])[at].ravel() - expected) / np.linalg.norm(expected)
        assert error <= tolerance("optax", jnp.float64)


def _turning(params: Any, gradients: Any, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """`w` at every step under `rotational_adamw`, and under AdamW alone."""
    trees = [{"w": jnp.asarray(x, dtype)} for x in (params, gradients)]
    tx = go.norms.rotational_adamw(RATE, {"w": "_ channel"}, weight_decay=DECAY)
    found, plain = (walk(tx, *trees)[0]["w"] for tx in (tx, optax.adamw(RATE, weight_decay=DECAY)))
    return np.asarray(found), np.asarray(plain)


def test_norms_stay_and_the_mean_angle_is_table_1s() -> None:
    """float32: 1e-5 over 1,000 steps, 2 % over 200."""
    scales = np.exp(_noise(2, 32))  # neurons of different gradients
    found, plain = _turning(_noise(0, 64, 32), _noise(1, 1000, 64, 32) * scales)
    norms, others = (np.linalg.norm(x.astype(float), axis=1) for x in (found, plain))
    assert np.max(np.abs(norms / norms[0] - 1.0)) <= 1e-5
    assert np.max(np.abs(others / norms[0] - 1.0)) > 1e-2
    angles = _angles(found.astype(float))[-200:].mean(0)
    expected = float(go.measure.predict_equilibrium("adamw", learning_rate=RATE, weight_decay=DECAY, dim=64).rotation)
    assert np.max(np.abs(angles / expected - 1.0)) <= 0.02


PARAMS = {"w": _noise(0, 6, 4), "bias": _noise(1, 4), "gain": _noise(2, 4), "fused": _noise(3, 2, 6, 4)}
BLOCKS = {"w": "_ channel", "fused": "part=1 _ channel"}
INNER: dict[str, tuple[Any, Any]] = {
    "adamw": (go.norms.rotational_adamw, functools.partial(optax.adamw, weight_decay=DECAY)),
    "lion": (go.norms.rotational_lion, functools.partial(optax.lion, weight_decay=DECAY)),
    "sgdm": (go.norms.rotational_sgdm,
             lambda rate: optax.chain(optax.add_decayed_weights(DECAY, {path: path != "w" for path in PARAMS}),
                                      optax.sgd(rate, 0.9))),
}


@pytest.mark.parametrize("kind", INNER)
def test_other_leaves_get_the_inner_update_bit_for_bit(kind: str) -> None:
    alias, inner = INNER[kind]
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    gradients = jax.tree.map(lambda x: jnp.stack([x, -0.5 * x, 0.1 * x]), params)
    found, expected = (
        walk(tx, params, gradients)[0] for tx in (alias(RATE, BLOCKS, weight_decay=DECAY), inner(RATE))
    )
    for name in ("bias", "gain"):
        np.testing.assert_array_equal(found[name], expected[name])
    np.testing.assert_array_equal(found["fused"][:, 0], expected["fused"][:, 0])
    assert not np.allclose(found["fused"][-1, 1], expected["fused"][-1, 1])


@pytest.mark.parametrize(("kind", "given", "own"), [
    ("adamw", {"b1": 0.8}, {"b1": 0.8, "dim": 6}), ("sgdm", {"momentum": 0.7}, {"b1": 0.7}),
    ("lion", {"b1": 0.85, "b2": 0.95}, {"b1": 0.85, "b2": 0.95, "dim": 6}),
])
def test_the_angle_is_the_predicted_one(kind: str, given: Any, own: Any, x64: None) -> None:
    """With β = 0 every step turns by η_r itself: the tangent of the angle is."""
    schedule = optax.linear_schedule(0.02, 0.01, 4)
    tx = INNER[kind][0](schedule, {"w": "_ channel"}, weight_decay=DECAY, beta=0.0, **given)
    found, _ = walk(tx, {"w": _noise(0, 6, 4) - _noise(0, 6, 4).mean(0)}, {"w": _noise(1, 4, 6, 4)})
    predict = functools.partial(go.measure.predict_equilibrium, kind, weight_decay=DECAY, gradient_norm=1.0, **own)
    for t, angles in enumerate(_angles(np.asarray(found["w"]))):
        rotation = predict(learning_rate=float(schedule(t))).rotation
        np.testing.assert_allclose(np.tan(angles), float(rotation), rtol=1e-6)


def test_a_rate_of_zero_turns_nothing_and_is_not_counted(x64: None) -> None:
    gradients, start = _noise(1, 4, 6, 4), {"w": _noise(0, 6, 4)}
    late = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(RATE)], [2])
    waited, state = walk(_rotational("_ channel", 0.1, optax.sgd(late), late), start, {"w": gradients})
    fresh, _ = walk(_rotational("_ channel", 0.1), start, {"w": gradients[2:]})
    np.testing.assert_allclose(waited["w"][-1], fresh["w"][-1], rtol=1e-12)
    assert np.all(np.isfinite(waited["w"])) and int(state.tracked) == 2


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_scale_of_the_loss_changes_nothing(size: float) -> None:
    """Of SGD, whose updates grow with it; their squares are no float32."""
    start, gradients = {"w": _noise(0, 6, 4)}, _noise(1, 4, 6, 4)
    tx = go.norms.rotational_sgdm(RATE, {"w": "_ channel"})
    ends = [walk(tx, start, {"w": scale * gradients})[0]["w"] for scale in (1.0, size)]
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-5)
    assert np.min(_angles(np.asarray(ends[1]))) > 1e-4


@pytest.mark.parametrize("mask", [True, {"a": True, "b": False}, lambda p: {"a": True, "b": False}],
                         ids=["every leaf", "prefix", "function"])
def test_a_mask_of_decay_may_be_a_prefix(mask: Any) -> None:
    params = {"a": {"w": jnp.ones((6, 4)), "bias": jnp.ones(4)}, "b": jnp.ones(4)}
    tx = go.norms.rotational_sgdm(0.1, {"a/w": "_ channel"}, weight_decay=0.5, mask=mask)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    steps = [float(x[0]) for x in (updates["a"]["bias"], updates["b"])]
    assert steps == pytest.approx([-0.05, -0.05 if mask is True else 0.0]) and not np.any(updates["a"]["w"])


@pytest.mark.parametrize("name", ["adamw", "sgdm", "lion"])
def test_entries_that_do_not_turn_decay(name: str) -> None:
    """Of a leaf that is listed in part. Under SGD they did not."""
    params = {"w": jnp.asarray(_noise(0, 6, 12), jnp.float32)}
    tx = getattr(go.norms, f"rotational_{name}")(1.0, {"w": "_ channel=0:8"}, weight_decay=0.1)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["w"][:, 8:], -0.1 * params["w"][:, 8:], rtol=1e-6)


def test_a_gain_is_trained_as_a_parameter_of_its_own(x64: None) -> None:
    """W = gain · n · unit under the loss ½‖W − goal‖²: the same as with the gain in the tree."""
    goal, start = _noise(1, 6, 4), _noise(0, 6, 4)
    start -= start.mean(0)
    tx, apart = _rotational("_ channel", 0.05, gain=optax.sgd(1e-3)), _rotational("_ channel", 0.05, beta=0.9)
    params = parts = {"w": jnp.asarray(start)}
    state, other, gain = tx.init(params), apart.init(parts), jnp.ones(4)
    for _ in range(5):
        updates, state = tx.update({"w": params["w"] - goal}, state, params)
        params = optax.apply_updates(params, updates)
        gradient = gain * parts["w"] - goal
        slope = jnp.sum(gradient * parts["w"], 0)
        # The direction's own gradient is the kernel's: a factor per vector would be divided out but for ν's memory.
        moves, other = apart.update({"w": gradient}, other, parts)
        parts, gain = optax.apply_updates(parts, moves), gain - 1e-3 * slope
    np.testing.assert_allclose(params["w"], gain * parts["w"], rtol=1e-10)
    np.testing.assert_allclose([*state.gain["w"].values()], [gain], rtol=1e-10)


def test_a_gain_waits_while_the_rate_is_zero() -> None:
    """It trained on, and the first step of another rate changed the norm by all that had gathered."""
    params = {"w": jnp.asarray(PARAMS["w"], jnp.float32)}
    tx = _rotational("_ channel", 0.05, rate=lambda t: jnp.where(t < 2, 0.0, RATE), gain=optax.sgd(1e-2))
    state = start = tx.init(params)
    for _ in range(2):
        _, state = tx.update(params, state, params)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, state.gain, start.gain))
    assert jnp.all(tx.update(params, state, params)[1].gain["w"]["_ channel"] < 1.0)


def test_two_numbers_a_neuron_are_kept_beside_the_inner_state() -> None:
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    state = go.norms.rotational_adamw(RATE, BLOCKS).init(params)
    inner = optax.adamw(RATE).init(params)
    assert structure(state.inner_state) == structure(inner)
    beside = sum(x.size for x in jax.tree.leaves(state)) - sum(x.size for x in jax.tree.leaves(inner))
    assert beside == 2 * (4 + 4) + 2  # neurons of `w` and of one part of `fused`; two counters


def test_zeros_and_constant_neurons_wait_for_a_direction() -> None:
    """Centred, only rounding is left of a constant one."""
    weights = _noise(0, 48, 4)
    weights[:, 1:3] = [0.0, 0.1]
    found, plain = _turning(weights, _noise(1, 3, 48, 4))
    assert np.all(np.isfinite(found)) and np.linalg.norm(found[-1, :, 1]) > 0.01
    np.testing.assert_array_equal(found[:, :, 1], plain[:, :, 1])
    np.testing.assert_array_equal(found[1, :, 2], plain[1, :, 2])


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 5e-3), ("float32", 1e-5), ("float64", 1e-5)])
def test_a_neuron_without_a_gradient_does_not_turn(dtype: str, rounding: float, x64: None) -> None:
    """Its update is decay, along p; what is left of it across p is rounding, and would be made as long as any step."""
    weights = _noise(0, 48, 4)
    found, _ = _turning(weights - weights.mean(0), _noise(1, 20, 48, 4) * [1.0, 0.0, 1.0, 1.0], dtype)
    angles = _angles(found.astype(float)).sum(0)
    assert angles[1] <= rounding and angles[[0, 2, 3]].min() > 0.1


# The inner optimizer, the axes, and what the error says.
MISTAKES: dict[str, tuple[Any, str, str, str]] = {
    "vectors of one entry": (optax.adam(RATE), "a b", "nothing to turn at 'w'", "`_` is the axis that is"),
    "two entries, centred": (optax.adam(RATE), "a _", "vectors of 2 entries", "at least 3 with center=True"),
    "no kind": (SGD, "_ channel", "no default angle for this optimizer", "give eta_r"),
    "two kinds": (optax.chain(optax.adam(RATE), optax.trace(0.9)), "_ channel", "angle for several", "give eta_r"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_complaints_say_what_to_do(mistake: str) -> None:
    inner, axes, says, word = MISTAKES[mistake]
    with refused(says, "rotational", word):
        _rotational(axes, None, inner).init({"w": jnp.ones((6, 2))})
    if "kind" in mistake:
        _rotational(axes, 0.1, inner).init({"w": jnp.ones((6, 2))})


@pytest.mark.parametrize("name", ["rotational_adamw", "rotational_sgdm", "rotational_lion"])
def test_without_decay_an_angle_has_to_be_given(name: str) -> None:
    """Vectors stood still at a decay of zero, and were NaN below it."""
    make = functools.partial(getattr(go.norms, name), RATE, {"w": "_ channel"})
    for decay in (0.0, 0, -0.1):
        with refused(f"{name}: no angle to turn by", "write eta_r="):
            make(weight_decay=decay)
        make(weight_decay=decay, eta_r=0.1)
    make(weight_decay=optax.constant_schedule(0.0))


# What is recorded ---------------------------------------------------------------------------------

TRACKED = {"up": "_ channel", "out": "head _ _"}


def _drawn(seed: int) -> dict[str, np.ndarray]:
    return {"up": _noise(seed, 6, 4), "out": _noise(seed + 1, 2, 3, 5), "bias": _noise(seed + 2, 4)}


def _vectors(tree: Any, path: str) -> np.ndarray:
    """(entries, vectors)."""
    return np.asarray(tree[path]).reshape(2, -1).T if path == "out" else np.asarray(tree[path])


def test_every_figure_is_what_it_says(x64: None) -> None:
    params, grads = _drawn(0), [_drawn(5), _drawn(6)]
    tracked = go.measure.track_rotation(TRACKED, optax.adamw(0.01, weight_decay=0.5), every=1)
    tx = optax.chain(optax.clip_by_global_norm(1e3), tracked)
    _, state = tx.update(grads[0], tx.init(params), params)
    momentum = optax.tree.get(state, "mu")
    updates, state = tx.update(grads[1], state, params)
    trees = (params, updates, grads[1], momentum, optax.apply_updates(params, updates))
    for path in TRACKED:
        w, u, g, m, moved = (_vectors(tree, path) for tree in trees)
        rotation, with_gradient, of_momentum = (_angles(np.stack(x))[0] for x in ((w, moved), (w, g), (g, m)))
        expected = {
            "norm": np.linalg.norm(w, axis=0), "rotation": rotation, "rms_update": np.linalg.norm(u, axis=0),
            "weight_gradient_angle": with_gradient, "gradient_momentum_angle": of_momentum,
            "radial_decay": np.sum(w * g, 0) / np.sum(w**2, 0),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(optax.tree.get(state, name)[path], values, rtol=1e-8, err_msg=name)
    assert int(optax.tree.get(state, "recorded_at")) == 1


def test_last_in_a_chain_it_needs_the_gradient_for_angles_with_it() -> None:
    params, grads = _drawn(0), _drawn(0)
    tx = optax.chain(optax.sgd(0.1), go.measure.track_rotation(TRACKED, every=1))
    _, bare = tx.update(grads, tx.init(params), params)
    _, told = tx.update(grads, tx.init(params), params, gradient=grads, momentum=grads)
    for name in ("norm", "rotation", "rms_update"):
        np.testing.assert_array_equal(optax.tree.get(bare, name)["up"], optax.tree.get(told, name)["up"])
    assert np.all(np.isnan(optax.tree.get(bare, "radial_decay")["up"]))
    np.testing.assert_allclose(optax.tree.get(told, "radial_decay")["up"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(optax.tree.get(told, "gradient_momentum_angle")["up"], 0.0, atol=1e-3)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_what_is_recorded_does_not_depend_on_the_scale_of_the_loss(size: float) -> None:
    tx, records = go.measure.track_rotation(TRACKED, every=1), []
    for c in (1.0, size):
        u, g, m = (jax.tree.map(lambda x, c=c: jnp.float32(c * x), _drawn(n)) for n in (5, 6, 7))
        records.append(tx.update(u, tx.init(_drawn(0)), _drawn(0), gradient=g, momentum=m)[1].metrics)
    for name in ("weight_gradient_angle", "gradient_momentum_angle"):
        one, other = (getattr(x, name)["up"] for x in records)
        np.testing.assert_allclose(other, one, rtol=1e-4)
    np.testing.assert_allclose(records[1].rms_update["up"], size * records[0].rms_update["up"], rtol=1e-5)


def test_it_changes_nothing_and_keeps_what_it_recorded() -> None:
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), _drawn(0))
    inner = optax.adamw(0.01)
    tx = go.measure.track_rotation(TRACKED, inner, every=3)
    state, plain = tx.init(params), inner.init(params)
    for step in range(5):
        updates, state = jax.jit(tx.update)(params, state, params)
        expected, plain = jax.jit(inner.update)(params, plain, params)
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
        assert int(optax.tree.get(state, "recorded_at")) == 3 * (step // 3)


def test_moments_of_a_partition_are_found_by_leaf_and_two_of_a_leaf_are_refused() -> None:
    params = {"a": jnp.ones((6, 4)), "b": jnp.arange(-12.0, 12.0).reshape(6, 4)}
    inner = optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, {"a": "a", "b": "b"})
    _, state = driven(go.measure.track_rotation({"{leaf}": "_ channel"}, inner, every=1), params, [params] * 2)
    for path in ("a", "b"):
        np.testing.assert_allclose(optax.tree.get(state, "gradient_momentum_angle")[path], 0.0, atol=1e-3)
    tx = go.measure.track_rotation({"a": "_ channel"}, optax.chain(optax.adam(0.1), optax.trace(0.9)), every=1)
    with pytest.raises(ValueError, match="several first moments of 'a'"):
        tx.update(params, tx.init(params), params)


def test_a_gradient_that_is_none_of_the_leaf_is_refused() -> None:
    params = {"a": jnp.ones((6, 4))}
    tx = go.measure.track_rotation({"a": "_ channel"}, every=1)
    for odd, said in ((jnp.ones((6, 1)), "an update of another shape for 'a'"), (1j * params["a"], "a complex update")):
        for name in ("gradient", "momentum"):
            with refused(f"track_rotation: {said}"):
                tx.update(params, tx.init(params), params, **{name: {"a": odd}})


# Equilibrium --------------------------------------------------------------------------------------


ETA, LAMBDA, C, BETA = 3e-3, 0.2, 48, 0.8
predict = functools.partial(go.measure.predict_equilibrium, learning_rate=ETA, weight_decay=LAMBDA)

GAMMA = (1 - BETA) ** 2 + BETA**2 * (1 - 0.95) / (1 + 0.95)
SGDM = (ETA * 1.7**2 / (2 * LAMBDA * (1 - BETA))) ** 0.25
L2 = (ETA / (2 * LAMBDA) * 5.0) ** (1 / 3)
LION = math.sqrt(ETA * C / (math.pi * LAMBDA)) / math.sqrt(GAMMA)
SLOW = (1 - BETA) / (1 + BETA)
# The kind and what is given, and the figures as they are printed; SGDM's rotation is not that of Table 6.
PRINTED: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "adamw": ("adamw", {"dim": C}, {
        "norm": math.sqrt(ETA * C / (2 * LAMBDA)), "rms_update": ETA * math.sqrt(C * SLOW),
        "rotation": math.sqrt(2 * ETA * LAMBDA * SLOW), "rms_diffusion": ETA * math.sqrt(C),
        "rotational_diffusion": math.sqrt(2 * ETA * LAMBDA)}),
    "adamw, second order": ("adamw", {"dim": C, "second_order": True}, {
        "norm": math.sqrt(ETA * C / (2 * LAMBDA - ETA * LAMBDA**2))}),
    "sgdm": ("sgdm", {"gradient_norm": 1.7}, {
        "norm": SGDM, "rms_update": ETA * math.sqrt((1.7 / SGDM) ** 2 / (1 - BETA**2)),
        "rotation": math.sqrt(2 * ETA * LAMBDA / (1 + BETA)), "rms_diffusion": ETA / (1 - BETA) * 1.7 / SGDM,
        "rotational_diffusion": math.sqrt(2 * ETA * LAMBDA / (1 - BETA))}),
    "adam_l2": ("adam_l2", {"dim": C, "gradient_roots": 5.0}, {
        "norm": L2, "rotation": (2 * ETA**2 * LAMBDA / 5.0) ** (1 / 3) * math.sqrt(SLOW * C)}),
    "adam_l2, even": ("adam_l2", {"dim": C, "gradient_norm": 5.0 / math.sqrt(C)}, {"norm": L2}),
    "lion": ("lion", {"b2": 0.95, "dim": C}, {
        "norm": LION, "rms_update": ETA * math.sqrt(C), "rotation": math.sqrt(math.pi * ETA * LAMBDA * GAMMA)}),
    "lion, aligned": ("lion", {"b2": 0.95, "dim": C, "sign_alignment": 0.5 * math.sqrt(2 / math.pi)}, {
        "norm": 0.5 * LION}),
    "muon is lion with a polar factor": (
        "muon", {"shape": (6, 4), "update_norm": 3.0, "sign_alignment": 0.7, "nesterov": False},
        {"rotation": math.sqrt(2 * ETA * LAMBDA * SLOW) / 0.7, "rms_update": ETA * 3.0}),
    "muon": ("muon", {"shape": (6, 4)}, {"rms_update": ETA * 2.0}),
}


@pytest.mark.parametrize("row", PRINTED)
def test_figures_are_as_printed(row: str) -> None:
    kind, given, expected = PRINTED[row]
    found = predict(kind, b1=BETA, **given)
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", [(96, 96), (192, 48)])
def test_a_gaussian_matrix_has_the_alignment_of_its_shape(shape: tuple[int, int]) -> None:
    singular = np.linalg.svd(np.random.default_rng(0).normal(size=shape), compute_uv=False)
    found = singular.sum() / math.sqrt(len(singular) * np.sum(singular**2))
    assert polar_alignment(*shape) == pytest.approx(found, rel=1e-2)


def test_everything_broadcasts() -> None:
    assert predict("sgdm", weight_decay=np.array([0.1, 0.2]), gradient_norm=np.ones((3, 1))).norm.shape == (3, 2)
    jitted = jax.jit(lambda decay: predict("adamw", weight_decay=decay, dim=C).rotation)
    assert float(jitted(LAMBDA)) == pytest.approx(predict("adamw", dim=C).rotation, rel=1e-6)


@pytest.mark.parametrize(("kind", "given", "said"), [
    ("sgdm", {}, "'sgdm' without gradient_norm"), ("adamw", {}, "'adamw' without dim"), ("adagrad", {}, "adagrad"),
    ("lion", {}, "'lion' without dim"), ("muon", {}, "'muon' without shape"), ("adam_l2", {}, "'adam_l2' without dim"),
    ("sgdm", {"weight_decay": 0.0, "gradient_norm": 1.0}, "no decay"),  # without which no norm settles
    ("adamw", {"dim": C, "learning_rate": -ETA}, "bad learning_rate"),  # the norm was a complex number
    ("adamw", {"dim": C, "learning_rate": 2 / LAMBDA, "second_order": True}, "less than 2"),
    ("sgdm", {"gradient_norm": 1.0, "learning_rate": np.ones(2), "second_order": True}, "less than 0.1"),
    ("adam_l2", {"dim": C, "gradient_roots": 5.0, "second_order": True}, "second_order with 'adam_l2'"),
    ("sgdm", {"gradient_norm": 0.0}, "bad gradient_norm"),  # ZeroDivisionError
    ("adamw", {"dim": "C"}, "no numbers in dim"), ("adamw", {"dim": C, "weight_decay": None}, "without weight_decay"),
    ("sgdm", {}, r"pass gradient_norm=jnp"), ("lion", {"dim": [C]}, "bad dim"), ("muon", {"shape": 3}, "of no matrix"),
    ("adamw", {"dim": C, "b1": 1.0}, "bad b1"), ("lion", {"dim": np.array([C, -1])}, "bad dim"),
    ("muon", {"shape": (3,)}, "a shape of no matrix"), ("muon", {"shape": (0, 3)}, "a shape of no matrix"),
])
def test_what_is_missing_or_unknown_is_named(kind: str, given: dict[str, Any], said: str) -> None:
    with refused(said):
        predict(kind, **given)


def test_corrections_are_those_of_appendix_g() -> None:
    plain = predict("adamw", dim=C)
    found = go.measure.corrected(plain, decay_ratio=1.44, gradient_square=0.25)
    assert found.norm == pytest.approx(plain.norm * 0.5 / 1.2, rel=1e-12)
    assert found.rotation == pytest.approx(plain.rotation * 1.2, rel=1e-12)
    assert found.rms_update / found.norm == pytest.approx(found.rotation, rel=1e-12)
    with refused("corrected: bad decay_ratio"):
        go.measure.corrected(plain, decay_ratio=-0.1)
    with refused("corrected: no prediction"):
        go.measure.corrected(None)  # type: ignore[arg-type]
    with refused("corrected: no numbers in decay_ratio"):
        go.measure.corrected(plain, decay_ratio=None)
    wanted = predict("adamw", dim=C * 0.25)._replace(rotation=plain.rotation)
    assert go.measure.corrected(plain, gradient_square=0.25).norm == pytest.approx(wanted.norm)
