"""The site: every public symbol has a page, every Python block of a guide runs, links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gauge_optax as go
from docs import symbols
from tests import quick

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))


def test_every_public_symbol_has_a_page(tmp_path: Path) -> None:
    symbols.write(tmp_path / "api")
    pages = {path.stem for path in (tmp_path / "api").glob("*.md")} - {"index"}
    public = {f"gauge_optax.{name}" for name in go.__all__ if name not in ("measure", "testing")}
    public |= {f"gauge_optax.measure.{name}" for name in go.measure.__all__}
    assert pages >= public and {"gauge_optax.testing.assert_invariant"} <= pages
    index = (tmp_path / "api" / "index.md").read_text()
    assert all(f"({page}.md)" in index for page in pages)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_blocks_of_a_guide_run_one_after_the_other(guide: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), re.S)
    assert blocks
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, str(guide), "exec"), names)


def test_the_test_file_of_the_guide_on_testing_passes_on_two_devices(tmp_path: Path) -> None:
    """Its tests are only defined where the guide's blocks run; here pytest runs them, all variants of chex included."""
    text = (ROOT / "docs" / "guides" / "testing.md").read_text()
    (tmp_path / "test_trainer.py").write_text(re.findall(r"```python\n(.*?)```", text, re.S)[0])
    environment = quick.environment() | {"PYTHONPATH": str(ROOT)}
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_trainer.py"]
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "12 passed" in made.stdout and "skipped" not in made.stdout, made.stdout + made.stderr


def test_the_guide_on_testing_shows_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "guides" / "testing.md").read_text()
    names: dict[str, Any] = {"__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(block, names)
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.S)
    figure = re.compile(r"\d\.\d\de[+-]\d+")  # the last digits depend on the machine
    assert figure.sub("…", capsys.readouterr().out) == figure.sub("…", shown)


def test_the_index_lists_every_guide() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert set(re.findall(r"^guides/(\w+)$", index, re.M)) == {path.stem for path in GUIDES}


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "docs" / "design.md"], ids=lambda path: path.stem)
def test_lines_are_no_longer_than_120(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith(("|", "!"))] == []
