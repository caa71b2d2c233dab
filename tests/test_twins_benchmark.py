"""The twins benchmark: its network has the symmetries it names, and its twins are other weights of one function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from examples.studies import baselines
from examples.studies import twins_benchmark as example

SMALL = example.Config(steps=10, modulus=7, width=8, heads=2)


def test_all_its_gauges_are_symmetries(x64: None) -> None:
    params, data = example.init(SMALL, jax.random.key(0)), example.pairs(SMALL, 0)
    read = functools.partial(example.logits, SMALL)
    group = go.product(example.gauges(SMALL)[:-1])
    moved = group.act(group.sample(jax.random.key(1), params), params)
    np.testing.assert_allclose(read(moved, data[2]), read(params, data[2]), rtol=1e-11, atol=1e-12)
    assert max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (moved, params)), strict=True)) > 0.3


def test_the_mask_is_none_and_the_last_position_is_read() -> None:
    """A change of the second number reaches the logits through the first block's first position too."""
    params, tokens = example.init(SMALL, jax.random.key(0)), jnp.array([[1, 2, 7]])
    whole = example.logits(SMALL, params, tokens)
    kept = {i: jax.tree.map(jnp.zeros_like, block) for i, block in params["blocks"].items()}
    blind = example.logits(SMALL, params | {"blocks": kept}, tokens)
    alone = example._normalised(params["norm"], params["embed"]["embedding"][7] + params["pos"]["embedding"][2])
    np.testing.assert_allclose(blind[0], alone @ params["lm_head"]["kernel"], rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(whole - blind).max()) > 0.01


def test_pairs_are_split_and_sums_are_modulo() -> None:
    tokens, sums, held_out, answers = (np.asarray(x) for x in example.pairs(SMALL, 3))
    assert len(tokens) == int(0.4 * 49) and len(tokens) + len(held_out) == 49
    assert len({tuple(x) for x in np.concatenate([tokens, held_out]).tolist()}) == 49
    assert np.array_equal(np.concatenate([sums, answers]), np.concatenate([tokens, held_out])[:, :2].sum(1) % 7)
    assert set(tokens[:, 2].tolist()) == {7}


@pytest.mark.parametrize("name", ["Adam", pytest.param("Muon", marks=pytest.mark.slow)])
def test_twins_part_plain_and_stay_inside_quotient(name: str) -> None:
    plain, ours = (example.cell(SMALL, arm, 42) for arm in (name, f"quotient({name})"))
    assert plain["float32"]["same"]["logits"] == ours["float32"]["same"]["logits"] == [0.0] * 3
    plain, ours = (cell["float64"] for cell in (plain, ours))
    for kind in ("rotated", "every symmetry"):
        assert max(ours[kind]["logits"]) < 1e-11
    assert plain["every symmetry"]["logits"][-1] > 1e-3
    assert (plain["rotated"]["logits"][-1] > 1e-4) == (name == "Adam")  # whole-matrix Muon commutes with rotations
    assert 1e-9 < plain["noise"]["logits"][0] < 1e-5


def test_one_scalar_for_all_is_adam_on_one_number() -> None:
    """With a single entry, the shared second moment is that entry's."""
    value = {"x": jnp.float32(3.0)}
    ours, adam = baselines.shared_scalar_adam(0.1), example.PLAIN["Adam"]()
    state, theirs = ours.init(value), adam.init(value)
    for gradient in (1.0, -0.3, 2.0):
        step, state = ours.update({"x": jnp.float32(gradient)}, state, value)
        other, theirs = adam.update({"x": jnp.float32(gradient)}, theirs, value)
        np.testing.assert_allclose(step["x"], 100.0 * other["x"], rtol=1e-5)
