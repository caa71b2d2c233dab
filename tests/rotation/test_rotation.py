"""What `track_rotation` records, beside the same in NumPy."""

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
from tests.twins import driven

BLOCKS = {"mlp/up": "_ channel", "attn/out": "head _ _"}


def _noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def _params() -> Any:
    return {"mlp": {"up": _noise(0, 6, 4)}, "attn": {"out": _noise(1, 2, 3, 5)}, "bias": _noise(2, 4)}


def _angles(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Between the rows."""
    return np.arccos(np.sum(a * b, 1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


def _vectors(tree: Any) -> dict[str, np.ndarray]:
    """Path → (vectors, entries)."""
    return {"mlp/up": np.asarray(tree["mlp"]["up"]).T, "attn/out": np.asarray(tree["attn"]["out"]).reshape(2, -1)}


def test_every_figure_is_what_it_says(x64: None) -> None:
    params, grads = _params(), [jax.tree.map(lambda x, s=s: _noise(s, *x.shape), _params()) for s in (5, 6)]
    tracked = go.measure.track_rotation(BLOCKS, optax.adamw(0.01, weight_decay=0.5), every=1)
    tx = optax.chain(optax.clip_by_global_norm(1e3), tracked)
    _, state = tx.update(grads[0], tx.init(params), params)
    momentum = optax.tree.get(state, "mu")
    updates, state = tx.update(grads[1], state, params)
    trees = (params, updates, grads[1], momentum, optax.apply_updates(params, updates))
    for path in BLOCKS:
        w, u, g, m, moved = (_vectors(tree)[path] for tree in trees)
        expected = {
            "norm": np.linalg.norm(w, axis=1), "rotation": _angles(w, moved), "rms_update": np.linalg.norm(u, axis=1),
            "weight_gradient_angle": _angles(w, g), "gradient_momentum_angle": _angles(g, m),
            "radial_decay": np.sum(w * g, 1) / np.sum(w**2, 1),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(optax.tree.get(state, name)[path], values, rtol=1e-8, err_msg=name)
    assert int(optax.tree.get(state, "recorded_at")) == 1


def test_last_in_a_chain_it_needs_the_gradient_for_angles_with_it() -> None:
    params, grads = _params(), _params()
    tx = optax.chain(optax.sgd(0.1), go.measure.track_rotation(BLOCKS, every=1))
    _, bare = tx.update(grads, tx.init(params), params)
    _, told = tx.update(grads, tx.init(params), params, gradient=grads, momentum=grads)
    for name in ("norm", "rotation", "rms_update"):
        np.testing.assert_array_equal(optax.tree.get(bare, name)["mlp/up"], optax.tree.get(told, name)["mlp/up"])
    assert np.all(np.isnan(optax.tree.get(bare, "radial_decay")["mlp/up"]))
    np.testing.assert_allclose(optax.tree.get(told, "radial_decay")["mlp/up"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(optax.tree.get(told, "gradient_momentum_angle")["mlp/up"], 0.0, atol=1e-3)


def test_it_changes_nothing_and_keeps_what_it_recorded() -> None:
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), _params())
    inner = optax.adamw(0.01)
    tx = go.measure.track_rotation(BLOCKS, inner, every=3)
    state, plain = tx.init(params), inner.init(params)
    for step in range(5):
        updates, state = jax.jit(tx.update)(params, state, params)
        expected, plain = jax.jit(inner.update)(params, plain, params)
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
        assert int(optax.tree.get(state, "recorded_at")) == 3 * (step // 3)


def test_moments_of_a_partition_are_found_by_leaf_and_two_of_a_leaf_are_refused() -> None:
    params = {"a": jnp.ones((6, 4)), "b": jnp.ones((6, 4))}
    inner = optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, {"a": "a", "b": "b"})
    _, state = driven(go.measure.track_rotation({"{leaf}": "_ channel"}, inner, every=1), params, [params] * 2)
    for path in ("a", "b"):
        np.testing.assert_allclose(optax.tree.get(state, "gradient_momentum_angle")[path], 0.0, atol=1e-3)
    tx = go.measure.track_rotation({"a": "_ channel"}, optax.chain(optax.adam(0.1), optax.trace(0.9)), every=1)
    with pytest.raises(ValueError, match="several first moments of 'a'"):
        tx.update(params, tx.init(params), params)


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
])
def test_what_is_missing_or_unknown_is_named(kind: str, given: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        predict(kind, **given)


def test_corrections_are_those_of_appendix_g() -> None:
    plain = predict("adamw", dim=C)
    found = go.measure.corrected(plain, decay_ratio=1.44, gradient_square=0.25)
    assert found.norm == pytest.approx(plain.norm * 0.5 / 1.2, rel=1e-12)
    assert found.rotation == pytest.approx(plain.rotation * 1.2, rel=1e-12)
    assert found.rms_update / found.norm == pytest.approx(found.rotation, rel=1e-12)
    wanted = predict("adamw", dim=C * 0.25)._replace(rotation=plain.rotation)
    assert go.measure.corrected(plain, gradient_square=0.25).norm == pytest.approx(wanted.norm)
