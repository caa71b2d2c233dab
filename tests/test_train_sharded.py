"""A run that was stopped on one mesh and goes on in another layout ends where an unbroken one on one device does."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import environment
from tests.tolerances import tolerance

ROOT = Path(__file__).parent.parent
LIMIT = 300.0  # seconds
TINY = ["--batch", "8", "--length", "8", "--width", "16", "--layers", "1", "--steps", "4", "--save-every", "2"]
# One process for several runs: to import takes longer than to train.
RUNS = "import json, sys; from examples import train_sharded as t; [t.main(run) for run in json.loads(sys.argv[1])]"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ddc_adamw", "ddc_muon", "adamw"])
def test_stopped_on_one_mesh_and_resumed_on_another(optimizer: str, tmp_path: Path) -> None:
    text, whole, broken = tmp_path / "text.txt", tmp_path / "whole", tmp_path / "broken"
    text.write_bytes(bytes(range(32, 127)) * 30)
    options = [*TINY, "--data", str(text), "--optimizer", optimizer]
    runs = [
        [*options, "--out", str(broken), "--stop-after", "3", "--devices", "8", "--mesh", "4x2"],
        [*options, "--out", str(broken), "--mesh", "2x4", "--layout", "tp"],
        [*options, "--out", str(whole), "--mesh", "1x1", "--layout", "dp"],
    ]
    command = [sys.executable, "-c", RUNS, json.dumps(runs)]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    found, expected = (json.loads((out / "result.json").read_text()) for out in (broken, whole))
    assert found["steps"] == expected["steps"] == 4
    for name in ("losses", "validation"):  # the last is read from the weights at the end
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance("sharded", jnp.float32))
    assert (broken / "loss.png").stat().st_size > 1000
