"""The site: every public symbol has a page, every Python block of a guide runs, links lead somewhere."""

import functools
import inspect
import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

import gauge_optax as go
from docs import conf, symbols
from tests import quick

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BACKGROUND = [ROOT / "docs" / "architecture.md", ROOT / "docs" / "design.md"]
NEEDED = {"trainers": ("torch", "transformers", "peft", "accelerate", "tunix", "qwix")}
"""Packages of a guide that are no part of the environment for development; these warn of much as they are imported."""
WARNS = pytest.mark.filterwarnings("ignore")
RUN = [pytest.param(x, marks=WARNS if x.stem in NEEDED else (), id=x.stem) for x in GUIDES]


def test_every_public_symbol_has_a_page(tmp_path: Path) -> None:
    """Which symbols these are is tested by `test_structure`."""
    symbols.write(tmp_path / "api")
    pages = {path.stem for path in (tmp_path / "api").glob("*.md")} - {"index"}
    assert pages == {path for listed in symbols.paths().values() for path in listed}
    index = (tmp_path / "api" / "index.md").read_text()
    assert all(f"({page}.md)" in index for page in pages)


FIGURE = re.compile(r"\d(?:\.\d+)?e([+-]\d+)")


def shows(block: str, printed: str) -> bool:
    """Whether a text contains a block. In figures such as 2.1e-16, only the exponent counts, within 2: what is roundoff
    depends on the machine."""
    masked, sought = FIGURE.sub("…", printed), FIGURE.sub("…", block)
    if not block or sought not in masked:
        return False
    first = masked[: masked.index(sought)].count("…")
    pairs = zip(FIGURE.findall(block), FIGURE.findall(printed)[first:], strict=False)
    return all(abs(int(a) - int(b)) <= 2 for a, b in pairs)


def test_a_block_with_another_order_of_magnitude_is_not_shown() -> None:
    assert shows("by 2.2e-16", "moves 1e-3\nby 9e-15 in all") and not shows("by 2.2e-16", "by 2.2e-01")


@pytest.mark.slow_rows("pretrain")
@pytest.mark.notebook
@pytest.mark.usefixtures("settings_kept")
@pytest.mark.parametrize("guide", RUN)
def test_blocks_of_a_guide_run_and_print_what_is_shown(
    guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other; a block of text shows what the block of Python before it prints."""
    for package in NEEDED.get(guide.stem, ()):
        pytest.importorskip(package)
    names, printed = {"__name__": "guide"}, ""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(tmp_path)  # a guide may name a folder that it writes to
    blocks = re.findall(r"```(python|text)\n(.*?)```", guide.read_text(), re.S)
    assert "python" in dict(blocks)
    for language, block in blocks:
        if language == "python":
            exec(compile(block, str(guide), "exec"), names)
            printed = capsys.readouterr().out
        else:
            assert shows(block, printed), printed


@pytest.mark.notebook
def test_the_test_file_of_the_guide_on_testing_passes_on_two_devices(tmp_path: Path) -> None:
    """Its tests are only defined where the guide's blocks run; here pytest runs them, all variants of chex included."""
    text = (ROOT / "docs" / "guides" / "testing.md").read_text()
    (tmp_path / "test_trainer.py").write_text(re.findall(r"```python\n(.*?)```", text, re.S)[0])
    environment = quick.environment() | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}  # those are for this run
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_trainer.py"]
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "12 passed" in made.stdout and "skipped" not in made.stdout, made.stdout + made.stderr


def test_the_messages_of_the_guide_on_errors_are_those_of_the_library() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "guides" / "errors.md").read_text(), re.M)
    messages = [message for row in rows for message in re.findall(r"`(.*?)`", row)]
    source = "".join(path.read_text() for path in (ROOT / "gauge_optax").rglob("*.py"))
    source = re.sub(r"\{[^{}]*\}", "…", source)
    assert len(messages) > 15 and [m for m in messages if m.removesuffix(" …") not in source] == []


def test_the_times_in_the_guide_on_discover_are_measured() -> None:
    text = (ROOT / "docs" / "guides" / "discover.md").read_text()
    cases = json.loads((ROOT / "benchmarks" / "results" / "discover.json").read_text())["cases"]
    row = r"million parameters \| (\d+)(?: to (\d+))? \|\n.*\| (\d+) \|\n.*\| (\d+) \|"
    low, high, *large = map(int, re.findall(row, text)[0])
    small = [cases[name]["seconds"] for name in ("d64", "flax", "linen_bfloat16", "equinox")]
    assert low - 1 < min(small) and max(small) < high + 1
    assert all(abs(cases[name]["seconds"] / n - 1.0) < 0.05 for name, n in zip(("d256", "d768"), large, strict=True))


def code(page: Path) -> Iterator[str]:
    """Lines that a page shows as code or as printed output."""
    if page.suffix == ".ipynb":
        for cell in (x for x in nbformat.read(page, as_version=4).cells if x.cell_type == "code"):
            yield from cell.source.splitlines()
            yield from "".join(output.get("text", "") for output in cell.outputs).splitlines()
    else:
        for block in re.findall(r"```\w*\n(.*?)```|\n\n((?:    [^\n]*\n)+)", page.read_text(), re.S):
            yield from "".join(block).splitlines()


@pytest.mark.parametrize("page", [ROOT / "README.md", *BACKGROUND, *GUIDES, *NOTEBOOKS], ids=lambda path: path.stem)
def test_lines_fit_an_editor_and_code_fits_beside_the_sidebar(page: Path) -> None:
    """88 columns are what `site.css` leaves room for in a window of 1280 pixels."""
    assert [line for line in code(page) if sum(not unicodedata.combining(letter) for letter in line) > 88] == []
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S).splitlines() if page.suffix == ".md" else []
    assert [line for line in prose if len(line) > 120 and not line.startswith(("|", "!"))] == []


@pytest.mark.parametrize("path", [path for listed in symbols.paths().values() for path in listed])
def test_examples_of_public_names_fit(path: str) -> None:
    symbol = functools.reduce(getattr, path.split(".")[1:], go)
    documented = [symbol, *(x for x in vars(symbol).values() if callable(x))] if inspect.isclass(symbol) else [symbol]
    lines = [line for x in documented for line in (inspect.getdoc(x) or "").splitlines()]
    assert [line for line in lines if line.startswith((">>>", "...")) and len(line) > 88] == []


def test_sections_of_the_design_page_that_docstrings_name_are_there() -> None:
    """By number, and by title where a docstring has one too."""
    page = (ROOT / "docs" / "design.md").read_text()
    sections = dict(re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", page, re.M | re.S))
    text = " ".join(word for path in (ROOT / "gauge_optax").rglob("*.py") for word in path.read_text().split())
    named = re.findall(r'docs/design\.md §(\d+)(?:, "([^"]+)")?', text)
    assert [(number, title) for number, title in named if title not in sections[number]] == []
    assert sum(bool(title) for _, title in named) >= 4


def test_formulas_need_no_network() -> None:
    """MathJax is a file of the site; it fetches parts only for its menu, which is off."""
    script = ROOT / "docs" / "_static" / conf.mathjax_path
    assert script.stat().st_size > 1_000_000 and (script.parent / "LICENSE").exists()
    assert conf.mathjax3_config["options"] == {"enableMenu": False}
    assert "sphinx.ext.mathjax" in conf.extensions and conf.html_static_path == ["_static"]
