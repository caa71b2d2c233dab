"""The small cousins of the paper's large runs: their data, their networks' symmetries, what they read, their pages."""

import dataclasses
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
import pytest
from PIL import Image

import gauge_optax as go
from examples.studies import depth8, depth24, digit_addition, harness, overtraining_lm, vit
from models import vit as vit_model
from models.vit import ViTConfig

# The vision transformer -------------------------------------------------------------------------------


def _folder(path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, count in (("cat", 6), ("dog", 4)):
        (path / name).mkdir(parents=True)
        for n in range(count):
            pixels = rng.integers(0, 255, (9, 7, 3), np.uint8)
            Image.fromarray(pixels).save(path / name / f"{n}.png")
    return path


def test_a_folder_of_images_is_read_and_split(tmp_path: Path) -> None:
    train, test, classes = vit.load(str(_folder(tmp_path / "images")), 8, 0.2)
    assert train[0].shape == (8, 8, 8, 3) and test[0].shape == (2, 8, 8, 3) and classes == 2
    labels = np.concatenate([train[1], test[1]])
    assert sorted(labels.tolist()) == [0] * 6 + [1] * 4
    pixels = np.concatenate([train[0], test[0]])
    assert abs(pixels.mean()) < 1e-5 and abs(pixels.std() - 1.0) < 1e-5


def test_what_cannot_be_read_says_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="one folder per class is expected"):
        vit.load(str(tmp_path), 8, 0.2)
    with pytest.raises(ValueError, match="digits have a side of 8, not 16: pass --images DIR, or --side 8"):
        vit.load("", 16, 0.1)


SMALL = ViTConfig(side=4, patch=2, channels=2, classes=3, d_model=8, depth=2, heads=2, d_ff=12)


def test_the_multiplicative_gauges_are_symmetries(x64: None) -> None:
    start = vit_model.init(SMALL, jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 99))
    params = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape, x.dtype), start)
    images = jax.random.normal(jax.random.key(2), (5, 4, 4, 2))
    read = functools.partial(vit_model.logits, SMALL, images=images)
    gauges = vit_model.multiplicative_gauges()
    go.testing.assert_invariant(lambda p: jnp.sum(jnp.sin(read(p))), params, gauges, jax.random.key(3), rtol=1e-11)
    assert float(jnp.std(read(params))) > 0.05


def test_patches_are_squares_of_the_image() -> None:
    """With a patch embedding that reads one pixel, the streams' first block input is that pixel of each patch."""
    params = vit_model.init(SMALL, jax.random.key(0))
    zeroed = jax.tree.map(jnp.zeros_like, params)
    pick = jnp.zeros((8, 8)).at[5, 0].set(1.0)  # second row, first column, second channel
    tree = zeroed | {"embed": {"kernel": pick, "bias": jnp.zeros(8)}}
    image = jnp.arange(32.0).reshape(1, 4, 4, 2)
    stream = vit_model.features(SMALL, tree, image)["stream"][0, :, 0]
    np.testing.assert_array_equal(stream, [image[0, r + 1, c, 1] for r in (0, 2) for c in (0, 2)])


# Addition of digits -----------------------------------------------------------------------------------

TINY = digit_addition.Config(steps=3, p=5, width=8, hidden=12, heads=2, places=2, sums=6)


def test_rows_of_digits_are_sums() -> None:
    train, test = (np.asarray(x) for x in digit_addition.sums(TINY, 3))
    assert train.shape == test.shape == (6, 9)
    for row in np.concatenate([train, test]):
        a, b, total = (int("".join(map(str, row[cut]))) for cut in (slice(0, 2), slice(3, 5), slice(6, 9)))
        assert a + b == total and row[2] == digit_addition.PLUS and row[5] == digit_addition.EQUALS


@pytest.mark.parametrize("task", [digit_addition.MODULAR, digit_addition.DIGITS])
def test_pruning_is_the_network_without_its_block(task: str) -> None:
    of_task = digit_addition.build(TINY).arms[f"{task}, {digit_addition.ADAMW}"]
    params, data = of_task.make(0)
    keys = iter(jax.random.split(jax.random.key(1), 99))
    params = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape, x.dtype), params)
    read = of_task.observe(params, params, data)
    block = params["blocks"][0]
    without = block | {"mlp": block["mlp"] | {"down": jax.tree.map(jnp.zeros_like, block["mlp"]["down"])}}
    pruned = of_task.observe(params, params | {"blocks": {0: without}}, data)
    for key in ("loss", "accuracy"):
        np.testing.assert_allclose(pruned[key], read[f"pruned_{key}"], rtol=1e-5)
    assert abs(float(read["loss"] - read["pruned_loss"])) > 1e-3 and float(pruned["scale"]) == 0.0


def test_no_gauge_changes_the_scale_of_the_block(x64: None) -> None:
    of_task = digit_addition.build(TINY).arms[f"{digit_addition.MODULAR}, {digit_addition.ADAMW}"]
    params, data = of_task.make(0)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    group = go.product(digit_addition.grokking.gauges(digit_addition.GrokConfig(p=5, d_model=8, heads=2, d_ff=12,
                                                                                  mlp="relu2")))
    moved = group.act(group.sample(jax.random.key(2), params), params)
    before, after = (of_task.observe(params, p, data) for p in (params, moved))
    for key in ("scale", "loss", "rank_before", "rank_after"):
        np.testing.assert_allclose(after[key], before[key], rtol=1e-9)


# The language model -----------------------------------------------------------------------------------

LM = overtraining_lm.Config(steps=3, batch=2, length=8, text=64, held_out=64, width=12, layers=1, heads=2, kv_heads=1,
                            hidden=16)


def test_the_text_held_out_lies_behind_the_text_learnt() -> None:
    known, new = overtraining_lm._text(LM)
    assert known.shape == new.shape == (8, 9)
    assert (known[1:, 0] == known[:-1, -1]).all()  # windows overlap by the token that is predicted last


def test_cells_are_readable_where_they_fall_as_a_power() -> None:
    lengths = np.logspace(0, -2, 40)
    curves = {"train_loss": (lengths**2).tolist()}
    for n in range(2):
        curves |= {f"smallest {n}": (lengths**1.5).tolist(), f"rank {n}": (1.0 / lengths).tolist()}
    settings = dataclasses.asdict(overtraining_lm.Config(layers=2))
    result = {"settings": settings, "cells": {"AdamW": {"42": {"curves": curves}}}}
    assert overtraining_lm.readable(result, "AdamW") == [2]


# Whole runs -------------------------------------------------------------------------------------------

WHOLE: dict[Any, list[str]] = {
    vit: ["--width", "8", "--hidden", "8", "--depth", "1", "--heads", "2", "--batch", "4", "--patch", "4"],
    overtraining_lm: ["--batch", "2", "--length", "8", "--text", "64", "--held-out", "64", "--width", "12", "--layers",
                      "1", "--heads", "2", "--kv-heads", "1", "--hidden", "16"],
    digit_addition: ["--p", "5", "--width", "8", "--hidden", "12", "--heads", "2", "--places", "2", "--sums", "6"],
}


@pytest.mark.slow
@pytest.mark.parametrize("module", WHOLE, ids=lambda module: module.__name__.split(".")[-1])
def test_a_tiny_run_leaves_json_figure_and_table(
    module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = module.__name__.split(".")[-1]
    result = harness.main(module.STUDY, [*WHOLE[module], "--steps", "3", "--seeds", "42", "--out", str(tmp_path)])
    assert json.loads((tmp_path / f"{name}.json").read_text()) == result
    assert (tmp_path / f"{name}.png").stat().st_size > 1000 and not list(tmp_path.glob("*.npz"))
    shown = capsys.readouterr().out
    assert all(f"| {arm} |" in shown for arm in result["arms"])


SMALL_GROK = ["--p", "5", "--width", "8", "--heads", "2", "--layers", "1", "--sweep-steps", "3"]
KILLED: dict[Any, list[str]] = WHOLE | {depth8: SMALL_GROK, depth24: SMALL_GROK}


@pytest.mark.slow
@pytest.mark.parametrize("module", KILLED, ids=lambda module: module.__name__.split(".")[-1])
def test_a_script_killed_three_times_ends_with_the_same_numbers(module: Any, tmp_path: Path) -> None:
    """`kill -9`, once there is a checkpoint, and each time a little later."""
    name = module.__name__.split(".")[-1]
    source = f"from examples.studies import harness, {name}; harness.SAVE_EVERY = 0.05; harness.main({name}.STUDY)"
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def command(out: Path) -> list[str]:
        options = [*KILLED[module], "--steps", "150", "--seeds", "42", "142", "--out", str(out)]
        return [sys.executable, "-c", source, *options]

    kills = []
    for later in (0.0, 1.0, 2.0):
        with subprocess.Popen(command(broken), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
            until = time.monotonic() + 120
            while not list(broken.glob("*.npz")) and running.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(later)
            kills.append(running.poll() is None)
            running.kill()
    assert any(kills)
    for out in (broken, whole):
        subprocess.run(command(out), check=True, capture_output=True, timeout=600)
    one, two = (json.loads((out / f"{name}.json").read_text()) for out in (whole, broken))
    assert one == two and not list(broken.glob("*.npz"))
    assert (broken / f"{name}.png").stat().st_size > 1000
