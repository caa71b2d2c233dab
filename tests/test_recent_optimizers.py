"""The optimizers that the tuned comparison adds do what their descriptions say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import tuned
from benchmarks.training import links, recent
from gauge_optax.binding import leaves_by_path
from models import lm

CONFIG = lm.llama_config(vocab=7, d_model=8, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=12, max_len=5)
GATE, OUT = "blocks/0/mlp/gate/kernel", "blocks/0/attn/out/kernel"
NO_DECAY = jnp.zeros(())


def weights(seed: int) -> Any:
    """Of a small decoder; a second seed stands for gradients."""
    return lm.params_and_loss(CONFIG, jax.random.key(seed))[0]


def rate(n: jax.Array) -> jax.Array:
    """A straight line from 0.1 to zero in 40 steps, of both kinds of leaves."""
    return jnp.full((2,), 0.1) * (1 - n / 40)


def leaf(tree: Any, path: str) -> np.ndarray:
    """One leaf."""
    return np.asarray(leaves_by_path(tree)[path])


def trained(tx: optax.GradientTransformation, steps: int) -> list[Any]:
    """Weights at the start and after every step, all of one quadratic."""
    aim, way, state = weights(1), [weights(0)], tx.init(weights(0))
    step = jax.jit(tx.update)
    for _ in range(steps):
        updates, state = step(jax.tree.map(jnp.subtract, way[-1], aim), state, way[-1])
        way.append(optax.apply_updates(way[-1], updates))
    return way


@pytest.mark.parametrize("arm", [arm for arm in tuned.ARMS if arm not in (*tuned.BOTH, "AdamW")])
def test_every_optimizer_lowers_a_quadratic(arm: str) -> None:
    """Its distance from the minimum falls by a tenth."""
    tx = tuned.ARMS[arm].arm.build(rate, NO_DECAY, lm.gauges(CONFIG))
    way = trained(tx, 40)
    far, near = (float(optax.tree.norm(jax.tree.map(jnp.subtract, x, weights(1)))) for x in (way[0], way[-1]))
    assert near < 0.9 * far


def test_muown_keeps_gains_and_directions() -> None:
    """A neuron's norm is its gain, and moves by Adam's first step, which is the rate."""
    before, after = trained(recent.muown(rate, NO_DECAY), 1)
    norms = [np.linalg.norm(leaf(x, GATE), axis=0) for x in (before, after)]
    np.testing.assert_allclose(np.abs(norms[1] - norms[0]), 0.1, rtol=1e-4)
    cosine = np.sum(leaf(before, GATE) * leaf(after, GATE), 0) / norms[0] / norms[1]
    assert np.all(cosine < 1 - 1e-4), "directions turn"


def test_aurora_has_rows_of_one_length() -> None:
    """√(columns/rows), to the accuracy of three rounds, where those of the polar factor differ by more."""
    tall = jnp.asarray(np.random.default_rng(0).standard_normal((48, 12)) * np.geomspace(1, 30, 48)[:, None])
    even, plain = (np.linalg.norm(x, axis=1) for x in (recent._leverage_free(tall), recent.linalg.polar(tall)))
    assert np.ptp(even) < 0.4 * np.ptp(plain)
    np.testing.assert_allclose(even, 0.5, atol=0.2)


def test_lookahead_and_tail_average() -> None:
    """Neither changes a run before it begins; the last step blends the average of the end, and leaves out tables."""
    inner = links.adamw(lambda n: rate(n)[0], NO_DECAY)
    both = recent.tail_average(inner, rate), recent.ema_nesterov(inner, rate)
    way, tail, ahead = (trained(tx, 40) for tx in (inner, *both))
    jax.tree.map(np.testing.assert_array_equal, way[39], tail[39])
    # The rate is below 0.06 of its peak at steps 38 to 40; a sixteenth of 38 steps is the average's pace.
    average = leaf(way[38], OUT)
    for x in way[39:]:
        average = average + 16 / 38 * (leaf(x, OUT) - average)
    np.testing.assert_allclose(leaf(tail[40], OUT), 0.4 * leaf(way[40], OUT) + 0.6 * average, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(tail[40]["embed"]["embedding"], way[40]["embed"]["embedding"])
    jax.tree.map(np.testing.assert_array_equal, way[1], ahead[1])
    assert not np.array_equal(leaf(way[10], OUT), leaf(ahead[10], OUT))
    still = trained(recent.ema_nesterov(inner, rate, reach=0.0), 40)[-1]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), way[40], still)
