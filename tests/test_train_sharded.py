"""A run that was stopped on one mesh and goes on in another layout ends where an unbroken one on one device does."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding

from tests.quick import environment
from tests.tolerances import tolerance

ROOT = Path(__file__).parent.parent
LIMIT = 300.0  # seconds
TINY = ["--batch", "8", "--length", "8", "--width", "16", "--layers", "1", "--steps", "4", "--save-every", "2"]
# One process for several runs: to import takes longer than to train.
HANDLERS = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
RUNS = "import json, sys; from examples import train_sharded as t; [t.main(run) for run in json.loads(sys.argv[1])]"


def _train(*runs: list[str]) -> None:
    """Runs the example with each of these options; the first says how many devices there are."""
    command = [sys.executable, "-c", RUNS, json.dumps(runs)]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr


def _weights(out: Path) -> list[jax.Array]:
    """The parameters that the last checkpoint holds, on one device."""
    here = SingleDeviceSharding(jax.devices()[0])
    with ocp.CheckpointManager((out / "checkpoints").resolve(), item_handlers=HANDLERS) as manager:
        step = manager.latest_step()
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)  # noqa: E731
        shapes = jax.tree.map(shape, manager.item_metadata(step)["state"].tree)
        params, _ = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes)))["state"]
    return jax.tree.leaves(params)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ddc_adamw", "ddc_muon", "adamw"])
def test_stopped_on_one_mesh_and_resumed_on_another(optimizer: str, tmp_path: Path) -> None:
    text, whole, broken = tmp_path / "text.txt", tmp_path / "whole", tmp_path / "broken"
    text.write_bytes(bytes(range(32, 127)) * 30)
    options = [*TINY, "--data", str(text), "--optimizer", optimizer]
    _train(
        [*options, "--out", str(broken), "--stop-after", "3", "--devices", "8", "--mesh", "4x2"],
        [*options, "--out", str(broken), "--mesh", "2x4", "--layout", "tp"],
        [*options, "--out", str(whole), "--mesh", "1x1", "--layout", "dp"],
    )
    found, expected = (json.loads((out / "result.json").read_text()) for out in (broken, whole))
    rtol = tolerance("sharded", jnp.float32)
    assert found["steps"] == expected["steps"] == 4
    for name in ("losses", "validation"):
        np.testing.assert_allclose(found[name], expected[name], rtol=rtol)
    for a, b in zip(_weights(broken), _weights(whole), strict=True):
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b)
    assert (broken / "loss.png").stat().st_size > 1000
