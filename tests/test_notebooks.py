"""The notebooks run from top to bottom, print what is stored in them, and quote no number that they did not print.

Cells are executed in this process: no kernel, one compiler for all. What a notebook claims it asserts itself; here
it is held to the minute, to its own outputs, and to what makes it open on Colab.
"""

import contextlib
import io
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")
# Another machine rounds otherwise: a last digit of two may differ, and so may all of what is rounding and nothing else.
RELATIVE, ABSOLUTE = 0.06, 1e-9


def _cells(name: str, kind: str = "") -> list[Any]:
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    return [cell for cell in cells if kind in ("", cell.cell_type)]


def _text(cell: Any) -> str:
    """What a code cell has printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def _figures(cell: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def _difference(stored: str, fresh: str) -> str:
    """The first line in which two printouts differ, numbers compared as numbers; empty if none does."""
    before, now = stored.splitlines(), fresh.splitlines()
    for old, new in zip(before, now, strict=False):
        words = [" ".join(NUMBER.sub("#", line).split()) for line in (old, new)]
        pairs = zip(*([float(x) for x in NUMBER.findall(line)] for line in (old, new)), strict=False)
        most = 1e3 if "rounding" in old else 0.0  # what is rounding may be so many times as large here
        close = all(
            math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE) or abs(b) < max(most * abs(a), 1e-9 * most)
            for a, b in pairs)
        if words[0] != words[1] or not close:
            return f"{old!r} is now {new!r}"
    return "" if len(before) == len(now) else f"{len(before)} lines are now {len(now)}"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many figures every `plt.show()` drew; Matplotlib's settings are put back at the end."""
    counts: list[int] = []

    def show() -> None:
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
        counts.append(len(plt.get_fignums()))
        plt.close("all")

    monkeypatch.setattr(plt, "show", show)
    with matplotlib.rc_context():
        yield counts
    plt.close("all")


@pytest.mark.notebook
@pytest.mark.usefixtures("settings_kept")
@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_run_prints_what_is_stored(name: str, shown: list[int]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for n, cell in enumerate(_cells(name, "code")):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(cell.source, f"{name}, code cell {n}", "exec"), namespace)
        assert not plt.get_fignums(), f"code cell {n} draws a figure and does not show it"
        assert sum(shown) == _figures(cell), f"code cell {n} stores {_figures(cell)} figures and shows {sum(shown)}"
        shown.clear()
        assert not (difference := _difference(_text(cell), printed.getvalue())), f"code cell {n}: {difference}"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_stored_executed_reads_like_an_article_and_opens_on_colab(name: str) -> None:
    path, code = FOLDER / f"{name}.ipynb", _cells(name, "code")
    nbformat.validate(nbformat.read(path, as_version=4))
    assert path.stat().st_size <= 300_000 and sum(map(_figures, code)) in (1, 2, 3)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in (output for cell in code for output in cell.outputs):
        assert output.get("name") == "stdout" or "image/png" in output.get("data", {}), "neither text nor a figure"
    title, setup, style, *_, end = cells = _cells(name)
    assert len(cells) <= 25
    assert title.cell_type == "markdown" and title.source.startswith("# ") and "](https://" in title.source
    guard, first = (cell.source.split("\n\nimport jax\n")[0] for cell in (_cells(NAMES[0], "code")[0], setup))
    assert first == guard and first.startswith("try:\n    import gauge_optax as go\nexcept ImportError:")
    assert 'jax.config.update("jax_enable_x64", True)' in setup.source and "rcParams" not in setup.source
    assert "gauge_optax-*.whl" in first and '"gauge_optax"' not in first, "no name is fetched that we do not own"
    assert style.source.startswith("plt.rcParams.update") and "hide-input" in style.metadata["tags"]
    assert end.cell_type == "markdown" and end.source.startswith("## What was seen\n")


@pytest.mark.parametrize("name", NAMES)
def test_it_asserts_what_it_claims_and_quotes_what_it_printed(name: str) -> None:
    """Every number in backticks at the end stands in an output."""
    code = _cells(name, "code")
    assert sum(len(re.findall(r"^\s*assert |\.assert_\w+\(", cell.source, re.M)) for cell in code) >= 4
    quoted = [token for token in re.findall(r"`([^`]+)`", _cells(name)[-1].source) if re.search(r"\d", token)]
    printed = "\n".join(map(_text, code))
    assert len(quoted) >= 3
    assert [x for x in quoted if not re.search(rf"(?<![\w.]){re.escape(x)}(?![\w.])", printed)] == []


def test_the_readme_lists_all() -> None:
    listed = re.findall(r"\w+(?=\.ipynb)", (FOLDER / "README.md").read_text())
    assert NAMES == sorted(set(listed))

