"""That the benchmark runs and says what it measured; its figures are not tested."""

import json
from pathlib import Path

import pytest

from benchmarks import update

TINY = ["--layers", "1", "--width", "64", "--vocab", "32", "--repeats", "2", "--step-batch", "2", "--step-length", "8"]


def test_a_row_is_timed_beside_adamw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    update.main([*TINY, "--only", "shift alone", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "update.json").read_text())
    assert list(result["rows"]) == ["optax.adamw", "ddc_adamw, shift alone"]
    assert result["rows"]["optax.adamw"]["ratio"] == 1.0
    for row in result["rows"].values():
        assert row["seconds"] > 0 and row["gbyte"] > 0 and row["refreshes"] == 0
    page = (tmp_path / "update.md").read_text()
    assert page in capsys.readouterr().out and "1 layers of d = 64" in page
