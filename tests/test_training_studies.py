"""Studies that train: killed ones go on."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

TINY: dict[str, list[str]] = {
    "row_shift": ["--modulus", "5", "--width", "8", "--hidden", "8", "--heads", "2"],
    "relu_rescale": ["--samples", "8", "--inputs", "3", "--hidden", "4", "--outputs", "2"],
    "layernorm_scale": ["--samples", "8", "--channels", "4", "--outputs", "2"],
    "diagonal_network": ["--samples", "16", "--modes", "8", "--nonzero", "2"],
    "sparse_parity": ["--bits", "4", "--hidden", "8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_script_killed_three_times_ends_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    """`kill -9`, once there is a checkpoint, and each time a little later."""
    source = f"from examples.studies import harness, {name}; harness.SAVE_EVERY = 0.05; harness.main({name}.STUDY)"
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def command(out: Path) -> list[str]:
        options = [*TINY[name], "--steps", "150", "--seeds", "42", "142", "--out", str(out)]
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
