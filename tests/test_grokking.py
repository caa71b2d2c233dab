"""The grokking testbed: its network beside a plain one, its gauges, its queue when it is killed."""

import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from examples.studies import baselines, harness, tables
from examples.studies import grokking as example
from models import grokking
from models.grokking import GrokConfig
from models.lm import ACTIVATIONS, rotary

SMALL = [
    GrokConfig(p=7, d_model=8, heads=2, d_ff=12),
    GrokConfig(p=7, d_model=8, heads=2, d_ff=12, mlp="relu2", layers=2, rope=True),
]
by_depth = pytest.mark.parametrize("c", SMALL, ids=["one block", "two blocks, rotary"])


def _generic(c: GrokConfig) -> Any:
    start = grokking.init(c, jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 99))
    return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape, x.dtype), start)


def _plainly(c: GrokConfig, p: Any, tokens: jax.Array) -> jax.Array:
    """The same network with every projection made for every pair and position."""

    def norm(q: Any, x: jax.Array) -> jax.Array:
        x = x - jnp.mean(x, -1, keepdims=True)
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * q["scale"] + q["bias"]

    x = p["embed"]["embedding"][tokens]
    x = x if c.rope else x + p["pos"]["embedding"]
    for block in p["blocks"].values():
        y, attn, mlp = norm(block["norm1"], x), block["attn"], block["mlp"]
        q, k, v = (jnp.einsum("btd,dhe->bthe", y, attn[name]["kernel"]) for name in ("query", "key", "value"))
        q, k = (rotary(q), rotary(k)) if c.rope else (q, k)
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(jnp.tri(2, dtype=bool), scores, -jnp.inf))
        x = x + jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, attn["out"]["kernel"])
        hidden = ACTIVATIONS[c.mlp](norm(block["norm2"], x) @ mlp["up"]["kernel"] + mlp["up"]["bias"])
        x = x + hidden @ mlp["down"]["kernel"] + mlp["down"]["bias"]
    return x[:, -1] @ p["lm_head"]["kernel"]


@by_depth
def test_each_number_is_projected_once_and_the_logits_are_the_plain_ones(c: GrokConfig, x64: None) -> None:
    params, (train, _) = _generic(c), grokking.data(c, 0)
    expected = _plainly(c, params, train[0])
    np.testing.assert_allclose(grokking.logits(c, params, train[0]), expected, rtol=1e-11, atol=1e-12)
    assert float(jnp.std(expected)) > 0.1


@by_depth
def test_its_gauges_are_symmetries_and_a_full_rotation_is_none_under_rotary(c: GrokConfig, x64: None) -> None:
    params, (train, _) = _generic(c), grokking.data(c, 0)
    loss = functools.partial(grokking.loss, c, pairs=train)
    go.testing.assert_invariant(loss, params, grokking.gauges(c), jax.random.key(2), rtol=1e-12)
    if c.rope:
        with pytest.raises(AssertionError, match="head_rotation"):
            go.testing.assert_invariant(loss, params, grokking.gauges(c, full_rotation=True), jax.random.key(2))


def test_pairs_are_split_and_sums_are_modulo_p() -> None:
    c = GrokConfig(p=11)
    (tokens, sums), (others, _) = grokking.data(c, 3)
    assert len(tokens) == round(0.3 * 121) and len(tokens) + len(others) == 121
    assert len({tuple(x) for x in np.concatenate([tokens, others]).tolist()}) == 121
    assert np.array_equal(sums, tokens.sum(1) % 11)


# Controls ---------------------------------------------------------------------------------------------


def _one_step(tx: optax.GradientTransformation, params: Any) -> Any:
    updates, _ = tx.update(jax.tree.map(lambda x: jnp.ones_like(x).at[0].set(-0.5), params), tx.init(params), params)
    return updates


def test_decay_is_doubled_in_attention_alone() -> None:
    params = _generic(SMALL[0])
    once, twice = (_one_step(example.ARMS[arm](SMALL[0], 1e-2, 0.3), params) for arm in (
        "Muon", "Muon, attention decay doubled"))
    block, start = jax.tree.map(jnp.subtract, twice, once)["blocks"][0], params["blocks"][0]
    np.testing.assert_allclose(block["attn"]["out"]["kernel"], -3e-3 * start["attn"]["out"]["kernel"], atol=1e-6)
    assert not np.any(block["mlp"]["up"]["kernel"])


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=["tall", "wide"])
def test_a_step_leaves_dead_directions_alone(shape: tuple[int, int]) -> None:
    left, sizes, right = np.linalg.svd(np.random.default_rng(0).normal(size=shape))
    sizes[-1] = 1e-6
    weights = left[:, :4] @ np.diag(sizes) @ right[:4]
    tx = baselines.dead_directions_masked(optax.sgd(1.0), lambda path: True)
    step = _one_step(tx, {"kernel": jnp.asarray(weights)})["kernel"]
    plain = _one_step(optax.sgd(1.0), {"kernel": jnp.asarray(weights)})["kernel"]
    dead = left[:, 3] if shape[0] == 4 else right[3]
    seen = dead @ step if shape[0] == 4 else step @ dead
    assert np.max(np.abs(seen)) < 1e-5 < np.max(np.abs(dead @ plain if shape[0] == 4 else plain @ dead))
    assert np.linalg.norm(step) > 0.3 * np.linalg.norm(plain)


# The queue --------------------------------------------------------------------------------------------


def test_grokking_is_sustained_and_falls_after_it_are_collapses() -> None:
    accuracy = [0.1, 0.96, 0.2, *[0.97] * 12, 0.5, 0.4, 0.99, 0.3, 0.99]
    said = example.summary(accuracy, 100)
    assert (said["grokked"], said["collapses"], said["below"], said["lowest"]) == (300, 2, 3, 0.3)
    assert example.summary([0.96] * 5, 100)["grokked"] == float("inf")


def test_the_page_says_which_runs_diverge_and_leaves_out_what_nan_weights_show() -> None:
    result = json.loads((tables.RESULTS / "grokking.json").read_text())
    final = result["cells"]["Muon"]["142"]["final"]
    assert "not finite" not in example.section(result | {"cells": {"Muon": result["cells"]["Muon"]}})
    final["train_loss"] = None
    page = example.section(result | {"cells": {"Muon": result["cells"]["Muon"]}})
    assert "not finite in the end: Muon (1 of 3 seeds)" in page
    (row,) = (line for line in page.splitlines() if line.startswith("| Muon |"))
    assert "2300, 6400, 10000" in row and f"{final['test_accuracy']:.3f}" not in row


def test_the_best_cell_of_a_grid_is_known_when_the_grid_is_done() -> None:
    first, *others = example.grid_cells("AdamW")
    assert len({first, *others}) == 6
    means = {cell.name: {"final": {"mean": 0.5 - 0.1 * abs(number - 2)}} for number, cell in enumerate(others)}
    assert example.best({"grid": {"AdamW": means}}, "AdamW") is None
    means[first.name] = {"final": {"mean": 0.1}}
    assert example.best({"grid": {"AdamW": means}}, "AdamW") == others[2]


ARMS = ["AdamW", "DDC-AdamW"]
SIZES = {"--p": 7, "--steps": 160, "--grid-steps": 40, "--every": 20, "--seeds": 1}
OPTIONS = [*(str(x) for option in SIZES.items() for x in option), "--only", *(f"*{arm} | *" for arm in ARMS)]


@pytest.mark.slow
def test_a_queue_killed_at_any_moment_ends_with_the_same_numbers(tmp_path: Path) -> None:
    """Two processes fill the second file, and are killed three times."""
    command = [sys.executable, "-m", "examples.studies", "grokking", *OPTIONS]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run([*command, "--out", str(whole)], check=True, capture_output=True, timeout=600)
    for wait in (12.0, 20.0, 28.0):
        pair = [
            subprocess.Popen([*command, "--out", str(broken)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for _ in range(2)
        ]
        time.sleep(wait)
        for running in pair:
            running.kill()
            running.wait()
    subprocess.run([*command, "--out", str(broken)], check=True, capture_output=True, timeout=600)
    one, two = (json.loads((folder / "grokking_7.json").read_text()) for folder in (whole, broken))
    assert one == two and set(one["cells"]) == set(ARMS) and (broken / "grokking_7.png").exists()
    assert all(len(grid) == 6 for grid in one["grid"].values())
    assert not list(broken.rglob("*.npz"))


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cell = example.Config(p=7, steps=60, every=20), example.Cell("DDC-AdamW", 1e-3, 1.0, 5)
    monkeypatch.setattr(harness, "SAVE_EVERY", 0.0)
    whole = example.run_cell(harness.Run({}, tmp_path / "whole.npz"), config, cell)
    saves, keep = 0, harness.keep

    def killed_after_two(path: Path, carry: Any, curves: Any) -> None:
        nonlocal saves
        keep(path, carry, curves)
        saves += 1
        if saves == 2:
            raise KeyboardInterrupt

    run = harness.Run({}, tmp_path / "broken.npz")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(harness, "keep", killed_after_two)
        example.run_cell(run, config, cell)
    assert example.run_cell(run, config, cell) == whole and len(whole["curves"]["train_loss"]) == 4
    assert whole["curves"]["train_loss"][-1] < whole["curves"]["train_loss"][0]
