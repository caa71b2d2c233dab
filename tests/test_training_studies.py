"""The small cousins of the paper's large runs: their data, what they read, and that killed ones go on."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from examples.studies import digit_addition, overtraining_lm


def test_rows_of_digits_are_sums() -> None:
    train, test = (np.asarray(x) for x in digit_addition.sums(digit_addition.Config(places=2, sums=6), 3))
    assert train.shape == test.shape == (6, 9)
    for row in np.concatenate([train, test]):
        a, b, total = (int("".join(map(str, row[cut]))) for cut in (slice(0, 2), slice(3, 5), slice(6, 9)))
        assert a + b == total and row[2] == digit_addition.PLUS and row[5] == digit_addition.EQUALS


def test_cells_are_readable_where_they_fall_as_a_power() -> None:
    lengths = np.logspace(0, -2, 40)
    curves = {"train_loss": (lengths**2).tolist()}
    for n in range(2):
        curves |= {f"smallest {n}": (lengths**1.5).tolist(), f"rank {n}": (1.0 / lengths).tolist()}
    settings = dataclasses.asdict(overtraining_lm.Config(layers=2))
    result = {"settings": settings, "cells": {"AdamW": {"42": {"curves": curves}}}}
    assert overtraining_lm.readable(result, "AdamW") == [2]


SMALL_GROK = ["--p", "5", "--width", "8", "--heads", "2", "--layers", "1", "--sweep-steps", "3"]
KILLED: dict[str, list[str]] = {
    "vit": ["--width", "8", "--hidden", "8", "--depth", "1", "--heads", "2", "--batch", "4", "--patch", "4"],
    "overtraining_lm": ["--batch", "2", "--length", "8", "--text", "64", "--held-out", "64", "--width", "12",
                        "--layers", "1", "--heads", "2", "--kv-heads", "1", "--hidden", "16"],
    "digit_addition": ["--p", "5", "--width", "8", "--hidden", "12", "--heads", "2", "--places", "2", "--sums", "6"],
    "depth8": SMALL_GROK, "depth24": SMALL_GROK,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED)
def test_a_script_killed_three_times_ends_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    """`kill -9`, once there is a checkpoint, and each time a little later."""
    source = f"from examples.studies import harness, {name}; harness.SAVE_EVERY = 0.05; harness.main({name}.STUDY)"
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def command(out: Path) -> list[str]:
        options = [*KILLED[name], "--steps", "150", "--seeds", "42", "142", "--out", str(out)]
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
