"""`examples/gaugefix_lrm.py`: killed, either size goes on to the same numbers; what its committed table says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import gaugefix_lrm
from models import gpt2

RESULT = Path(__file__).parent.parent / "examples" / "results" / "gaugefix_lrm.json"
TINY = {"vocab": 64, "d_model": 8, "layers": 1, "heads": 2, "kv_heads": 2, "d_head": 4, "d_ff": 8, "max_len": 8}
FULL = gpt2.config


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sizes of the example on a net of some hundred parameters."""
    tiny_config = lambda vocab=64, **_: FULL(**(TINY | {"vocab": vocab}))  # noqa: E731
    monkeypatch.setattr(gaugefix_lrm.gpt2, "config", tiny_config)
    monkeypatch.setattr(gaugefix_lrm, "LENGTH", 8)


def _run(folder: Path, *more: str) -> dict[str, Any]:
    arms = ["--arms", "A", "cap", "--precisions", "float32", "--seeds", "1", "--out", str(folder)]
    return gaugefix_lrm.main([*arms, *more])


@pytest.mark.slow
def test_it_runs_and_goes_on_after_an_arm(tmp_path: Path, tiny: None) -> None:
    steps = ["--steps", "40"]
    half = _run(tmp_path / "one", *steps, "--stop-after", "1")
    assert list(half["cells"]) == ["A, float32"]
    whole, other = _run(tmp_path / "one", *steps), _run(tmp_path / "two", *steps)
    assert whole["cells"] == other["cells"] and (tmp_path / "one" / "gaugefix_lrm.png").exists()
    assert np.shape(whole["cells"]["cap, float32"]["curves"]["loss"]) == (20,)


@pytest.mark.slow
def test_a_full_run_goes_on_after_a_checkpoint(tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens in files, gradients of 40 micro-batches, a kill between two evaluations."""
    rng = np.random.default_rng(0)
    files = [tmp_path / "train.bin", tmp_path / "val.bin"]
    for path in files:
        rng.integers(64, size=4_000).astype(np.uint16).tofile(path)
    options = ["--steps", "4", "--full", *map(str, files)]
    monkeypatch.setattr(gaugefix_lrm, "_window", lambda steps, most: 2)
    unbroken = _run(tmp_path / "one", *options)
    evaluate = gaugefix_lrm.trained

    class Killed(Exception):
        pass

    def killed(run: Any, compiled: Any, seed: int, name: str) -> Any:
        def batches(step: int, seed: int) -> np.ndarray:
            if step == 3:
                raise Killed
            return np.asarray(run.batches(step, seed))

        return evaluate(run._replace(batches=batches), compiled, seed, name)

    monkeypatch.setattr(gaugefix_lrm, "trained", killed)
    with pytest.raises(Killed):
        _run(tmp_path / "two", *options)
    monkeypatch.setattr(gaugefix_lrm, "trained", evaluate)
    (tmp_path / "two" / "gaugefix_lrm_full.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="holds another run"):
        _run(tmp_path / "two", "--steps", "6", *options[2:])
    assert _run(tmp_path / "two", *options)["cells"] == unbroken["cells"]
    assert not list((tmp_path / "two" / "checkpoints").iterdir()), "gone with the last arm"


def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.zeros(4_000, np.uint16).tofile(path)
    with pytest.raises(ValueError, match="does not divide a batch of 480"):
        gaugefix_lrm.full([path, path], 2, 7, tmp_path)


def test_the_committed_table_says_what_is_written_below_it() -> None:
    cells = json.loads(RESULT.read_text())["cells"]
    assert all(np.isfinite(cell["loss"]).all() and len(cell["loss"]) == 3 for cell in cells.values())
    for every in (1, 10, 100):
        assert max(cells[f"B, every {every}, float32"]["end"]) <= 3.5e-7
        assert max(cells[f"B, every {every}, float32"]["drift"]) <= 3.6e-7, "of 2,000 steps, 8 heads and 3 seeds"
        assert max(cells[f"B, every {every}, bfloat16"]["end"]) <= 3.5e-7, "right after a fix"
    for arm in ("A", "C"):
        assert max(cells[f"{arm}, float32"]["drift"]) <= 3.5e-7 and min(cells[f"{arm}, bfloat16"]["drift"]) > 1e-4
    for dtype in gaugefix_lrm.PRECISIONS:
        assert max(cells[f"cap, {dtype}"]["product"]) < 1.05 < min(cells[f"C, {dtype}"]["product"])
        np.testing.assert_allclose(cells[f"fix, {dtype}"]["product"], 1.0, rtol=1e-5)
