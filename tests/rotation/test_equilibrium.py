"""Table 1 and Table 6 as printed, where they are right; random walks where they are not."""

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
from models import random_walk

ETA, LAMBDA, C, BETA = 3e-3, 0.2, 48, 0.8
predict = functools.partial(go.measure.predict_equilibrium, learning_rate=ETA, weight_decay=LAMBDA)


def _close(found: float, expected: float) -> None:
    assert found == pytest.approx(expected, rel=1e-12)


def test_adamw_as_printed() -> None:
    found = predict("adamw", b1=BETA, dim=C)
    _close(found.norm, math.sqrt(ETA * C / (2 * LAMBDA)))
    _close(found.rms_update, ETA * math.sqrt(C * (1 - BETA) / (1 + BETA)))
    _close(found.rotation, math.sqrt(2 * ETA * LAMBDA * (1 - BETA) / (1 + BETA)))
    _close(found.rms_diffusion, ETA * math.sqrt(C))
    _close(found.rotational_diffusion, math.sqrt(2 * ETA * LAMBDA))
    exact = predict("adamw", b1=BETA, dim=C, second_order=True)
    _close(exact.norm, math.sqrt(ETA * C / (2 * LAMBDA - ETA * LAMBDA**2)))


def test_sgdm_as_printed_but_for_table_6s_rotation() -> None:
    found = predict("sgdm", b1=BETA, gradient_norm=1.7)
    _close(found.norm, (ETA * 1.7**2 / (2 * LAMBDA * (1 - BETA))) ** 0.25)
    _close(found.rms_update, ETA * math.sqrt((1.7 / found.norm) ** 2 / (1 - BETA**2)))
    _close(found.rotation, math.sqrt(2 * ETA * LAMBDA / (1 + BETA)))
    _close(found.rms_diffusion, ETA / (1 - BETA) * 1.7 / found.norm)
    _close(found.rotational_diffusion, math.sqrt(2 * ETA * LAMBDA / (1 - BETA)))


def test_adam_l2_as_printed() -> None:
    found = predict("adam_l2", b1=BETA, dim=C, gradient_roots=5.0)
    _close(found.norm, (ETA / (2 * LAMBDA) * 5.0) ** (1 / 3))
    _close(found.rotation, (2 * ETA**2 * LAMBDA / 5.0) ** (1 / 3) * math.sqrt((1 - BETA) / (1 + BETA) * C))
    even = predict("adam_l2", b1=BETA, dim=C, gradient_norm=5.0 / math.sqrt(C))
    _close(even.norm, found.norm)


def test_lion_as_printed() -> None:
    found = predict("lion", b1=BETA, b2=0.95, dim=C)
    gamma = (1 - BETA) ** 2 + BETA**2 * (1 - 0.95) / (1 + 0.95)
    _close(found.norm, math.sqrt(ETA * C / (math.pi * LAMBDA)) / math.sqrt(gamma))
    _close(found.rms_update, ETA * math.sqrt(C))
    _close(found.rotation, math.sqrt(math.pi * ETA * LAMBDA * gamma))
    half = predict("lion", b1=BETA, b2=0.95, dim=C, sign_alignment=0.5 * math.sqrt(2 / math.pi))
    _close(half.norm, 0.5 * found.norm)


def test_muon_is_lion_with_a_polar_factor() -> None:
    found = predict("muon", b1=BETA, shape=(6, 4), update_norm=3.0, sign_alignment=0.7, nesterov=False)
    gamma = (1 - BETA) ** 2 + BETA**2 * (1 - BETA) / (1 + BETA)
    _close(gamma, (1 - BETA) / (1 + BETA))  # of an average without more to it
    _close(found.rotation, math.sqrt(2 * ETA * LAMBDA * gamma) / 0.7)
    _close(found.rms_update, ETA * 3.0)
    assert predict("muon", shape=(6, 4)).rms_update == pytest.approx(ETA * 2.0)


@pytest.mark.parametrize("shape", [(96, 96), (192, 48)])
def test_a_gaussian_matrix_has_the_alignment_of_its_shape(shape: tuple[int, int]) -> None:
    singular = np.linalg.svd(np.random.default_rng(0).normal(size=shape), compute_uv=False)
    found = singular.sum() / math.sqrt(len(singular) * np.sum(singular**2))
    assert polar_alignment(*shape) == pytest.approx(found, rel=1e-2)


def test_everything_broadcasts() -> None:
    by_rate = functools.partial(go.measure.predict_equilibrium, learning_rate=ETA)
    found = by_rate("sgdm", weight_decay=np.array([0.1, 0.2]), gradient_norm=np.ones((3, 1)))
    assert found.norm.shape == (3, 2)
    jitted = jax.jit(lambda decay: by_rate("adamw", weight_decay=decay, dim=C).rotation)
    assert float(jitted(LAMBDA)) == pytest.approx(predict("adamw", dim=C).rotation, rel=1e-6)


MISSING = {"sgdm": "gradient_norm", "adamw": "dim", "lion": "dim", "muon": "shape", "adam_l2": "dim"}


@pytest.mark.parametrize(("kind", "missing"), MISSING.items())
def test_what_is_missing_is_named(kind: str, missing: str) -> None:
    with pytest.raises(ValueError, match=f"'{kind}' without {missing}"):
        predict(kind)


def test_unknown_kinds_are_named() -> None:
    with pytest.raises(ValueError, match="adagrad"):
        predict("adagrad")


def test_corrections_are_those_of_appendix_g() -> None:
    plain = predict("adamw", dim=C)
    found = go.measure.corrected(plain, decay_ratio=1.44, gradient_square=0.25)
    _close(found.norm, plain.norm * 0.5 / 1.2)
    _close(found.rotation, plain.rotation * 1.2)
    _close(found.rms_update / found.norm, found.rotation)
    wanted = predict("adamw", dim=C * 0.25)._replace(rotation=plain.rotation)
    assert go.measure.corrected(plain, gradient_square=0.25).norm == pytest.approx(wanted.norm)


# Random walks ------------------------------------------------------------------------------------------


def _walk(tx: optax.GradientTransformation, steps: int, width: int, even: bool = False) -> dict[str, np.ndarray]:
    """Means over the second half: norm, rotation, and the squares of gradients at norm 1, by neuron."""
    tracked = go.measure.track_rotation({"w": "channel _"}, tx, every=1)
    walk, weights = random_walk.start(jax.random.key(0), width, width, even)

    @jax.jit
    def run(params: Any, keys: jax.Array) -> Any:
        def step(carry: Any, key: jax.Array) -> Any:
            params, state = carry
            grads = {"w": random_walk.noise(walk, params["w"], key, 16)}
            updates, state = tracked.update(grads, state, params)
            norm, rotation = (optax.tree.get(state, name)["w"] for name in ("norm", "rotation"))
            kept = jnp.square(norm), rotation, jnp.square(grads["w"] * norm[:, None])
            return (optax.apply_updates(params, updates), state), kept

        carry, _ = jax.lax.scan(step, (params, tracked.init(params)), keys[: steps // 2])
        _, kept = jax.lax.scan(step, carry, keys[steps // 2 :])
        return jax.tree.map(lambda x: x.mean(0), kept)

    square, rotation, unit = jax.device_get(run({"w": weights}, jax.random.split(jax.random.key(1), steps)))
    return {"norm": np.sqrt(square), "rotation": rotation, "unit": unit}


WALKS = {
    # 1/(2ηλ) is many times what momentum remembers: 10 steps, of Lion 100.
    "adamw": (optax.adamw(2e-2, b2=0.98, weight_decay=0.2), {"learning_rate": 2e-2, "weight_decay": 0.2, "dim": 32}),
    "lion": (optax.lion(5e-4, weight_decay=1.0), {"learning_rate": 5e-4, "weight_decay": 1.0, "dim": 32}),
    "sgdm": (
        optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.5, momentum=0.9)),
        {"learning_rate": 0.5, "weight_decay": 1e-3},
    ),
}


@pytest.mark.parametrize("kind", WALKS)
def test_a_random_walk_rests_where_predicted(kind: str) -> None:
    """Small ones; benchmark sizes are in examples/studies/rotational_walk.py."""
    tx, more = WALKS[kind]
    found = _walk(tx, 6000 if kind == "lion" else 3000, 32)
    own = {"gradient_norm": np.sqrt(found["unit"].sum(1))} if kind == "sgdm" else {}
    rest = go.measure.predict_equilibrium(kind, **more, **own)
    assert found["norm"].mean() / np.mean(rest.norm) == pytest.approx(1.0, abs=0.04)
    assert found["rotation"].mean() / np.mean(rest.rotation) == pytest.approx(1.0, abs=0.04)
    # Table 6's rotation of SGDM would be √19 times too large.
    assert found["rotation"].mean() < 0.5 * np.mean(rest.rotational_diffusion)
