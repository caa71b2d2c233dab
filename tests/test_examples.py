"""The examples do what they print: a resumed run is an unbroken one, also on another mesh; the demo's twins agree."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from examples import data, demo, lora, train_linen, train_nnx
from examples.studies import harness
from tests.quick import environment
from tests.tolerances import tolerance


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 30)
    return tmp_path / "text.txt"


@pytest.mark.slow_rows("train_linen")
@pytest.mark.parametrize("main", [train_nnx.main, train_linen.main], ids=["train_nnx", "train_linen"])
def test_killed_and_resumed_is_bit_equal(main: Callable[..., Any], tmp_path: Path, text: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = ["--batch", "2", "--length", "8", "--width", "8", "--layers", "1", "--steps", "6", "--save-every", "2"]
    options += ["--data", str(text), "--out"]
    main([*options, str(whole)])
    assert main([*options, str(broken), "--stop-after", "3"]) is None
    assert not (broken / "result.json").exists()
    main([*options, str(broken)])
    assert (whole / "result.json").read_text() == (broken / "result.json").read_text()
    assert len(set(json.loads((whole / "result.json").read_text())["losses"])) == 6
    assert (whole / "loss.png").stat().st_size > 1000


@pytest.mark.slow
def test_lora_fills_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts = ("balanced", "badly scaled")
    cells = [f"2 | {start} | quotient_adamw | *" for start in starts]
    options = ["--only", "before", *cells, "--seeds", "1", "--steps", "3", "--pretraining", "2"]
    result = harness.main(lora.STUDY, [*options, "--out", str(tmp_path)])
    one, other = (lora.swept((2, start, "quotient_adamw")).losses(result) for start in starts)
    assert len(one.keys() & other.keys()) >= 4, "two weight sets of one function"
    assert max(abs(one[rate][0] - other[rate][0]) for rate in one.keys() & other.keys()) < 1e-3
    assert (tmp_path / "lora.png").stat().st_size > 1000 and "badly scaled" in capsys.readouterr().out


def test_batches_are_found_by_number_and_held_out_text_is_unseen(text: Path) -> None:
    (train, held_out), (again, _) = data.batches(8, 2, text), data.batches(8, 2, text)
    np.testing.assert_array_equal(train[1000], again[1000])
    assert train[0].shape == held_out[0].shape == (2, 9) and train[0].dtype == np.int32
    with pytest.raises(ValueError, match="too few"):
        data.batches(64, 16, text)


@pytest.mark.slow
def test_the_demo_keeps_its_promise(tmp_path: Path) -> None:
    runs = demo.main(["--out", str(tmp_path)])
    theirs = runs["adamw"]
    for ours in (runs["quotient(adamw)"], runs["ddc_adamw"]):
        assert ours["gap"][100] <= 1e-3 * theirs["gap"][100]
        assert max(ours["drift"].values()) <= 1e-5 < max(theirs["drift"].values())
        assert max(ours["validation"]) <= 1.02 * min(theirs["validation"]), "bought with a worse model"


# One process for several runs: to import takes longer than to train.
RUNS = "import json, sys; from examples import train_sharded as t; [t.main(run) for run in json.loads(sys.argv[1])]"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ddc_adamw", "ddc_muon", "adamw"])
def test_stopped_on_one_mesh_and_resumed_on_another(optimizer: str, tmp_path: Path, text: Path) -> None:
    """A run ends where an unbroken one on one device does."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = ["--batch", "8", "--length", "8", "--width", "16", "--layers", "1", "--steps", "4", "--save-every", "2"]
    options += ["--data", str(text), "--optimizer", optimizer]
    runs = [
        [*options, "--out", str(broken), "--stop-after", "3", "--devices", "8", "--mesh", "4x2"],
        [*options, "--out", str(broken), "--mesh", "2x4", "--layout", "tp"],
        [*options, "--out", str(whole), "--mesh", "1x1", "--layout", "dp"],
    ]
    command = [sys.executable, "-c", RUNS, json.dumps(runs)]
    root = Path(__file__).parent.parent
    ended = subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True, timeout=300.0)
    assert ended.returncode == 0, ended.stderr
    found, expected = (json.loads((out / "result.json").read_text()) for out in (broken, whole))
    assert found["steps"] == expected["steps"] == 4
    for name in ("losses", "validation"):  # the last is read from the weights at the end
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance("sharded", jnp.float32))
    assert (broken / "loss.png").stat().st_size > 1000
