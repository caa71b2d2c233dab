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

import gauge_optax as go
from examples.studies import depth8, depth24, digit_addition, overtraining_lm, vit
from models import vit as vit_model
from models.vit import ViTConfig

# The vision transformer -------------------------------------------------------------------------------


SMALL = ViTConfig(side=4, patch=2, channels=2, classes=3, d_model=8, depth=2, heads=2, d_ff=12)


@pytest.mark.slow
def test_the_multiplicative_gauges_are_symmetries(x64: None) -> None:
    start = vit_model.init(SMALL, jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 99))
    params = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape, x.dtype), start)
    images = jax.random.normal(jax.random.key(2), (5, 4, 4, 2))
    read = functools.partial(vit_model.logits, SMALL, images=images)
    gauges = vit_model.multiplicative_gauges()
    go.testing.assert_invariant(lambda p: jnp.sum(jnp.sin(read(p))), params, gauges, jax.random.key(3), rtol=1e-11)
    assert float(jnp.std(read(params))) > 0.05


# Addition of digits -----------------------------------------------------------------------------------

TINY = digit_addition.Config(steps=3, p=5, width=8, hidden=12, heads=2, places=2, sums=6)


def test_rows_of_digits_are_sums() -> None:
    train, test = (np.asarray(x) for x in digit_addition.sums(TINY, 3))
    assert train.shape == test.shape == (6, 9)
    for row in np.concatenate([train, test]):
        a, b, total = (int("".join(map(str, row[cut]))) for cut in (slice(0, 2), slice(3, 5), slice(6, 9)))
        assert a + b == total and row[2] == digit_addition.PLUS and row[5] == digit_addition.EQUALS


# The language model -----------------------------------------------------------------------------------


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
