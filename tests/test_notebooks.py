"""The notebooks run from top to bottom, print what is stored in them, and quote no number that they did not print.

Cells are executed in this process: no kernel, one compiler for all. What a notebook claims it asserts itself; here
it is held to the minute, to its own outputs, and to what makes it open on Colab.
"""

import ast
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
MOST_BYTES = 300_000
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")
# Another machine rounds otherwise: a last digit of two may differ, and so may all of what is rounding and nothing else.
RELATIVE, ABSOLUTE = 0.06, 1e-9
ROUNDING = "rounding"

Cell = Any


def _cells(name: str, kind: str = "") -> list[Cell]:
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    return [cell for cell in cells if kind in ("", cell.cell_type)]


def _text(cell: Cell) -> str:
    """What a code cell has printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def _figures(cell: Cell) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def _difference(stored: str, fresh: str) -> str:
    """The first line in which two printouts differ, numbers compared as numbers; empty if none does."""
    before, now = stored.splitlines(), fresh.splitlines()
    for old, new in zip(before, now, strict=False):
        words = [" ".join(NUMBER.sub("#", line).split()) for line in (old, new)]
        pairs = zip(*([float(x) for x in NUMBER.findall(line)] for line in (old, new)), strict=False)
        close = ROUNDING in old or all(math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE) for a, b in pairs)
        if words[0] != words[1] or not close:
            return f"{old!r} is now {new!r}"
    return "" if len(before) == len(now) else f"{len(before)} lines are now {len(now)}"


def _unprinted(prose: str, printed: str) -> list[str]:
    """Numbers in backticks that stand in no output."""
    quoted = [token for token in re.findall(r"`([^`]+)`", prose) if re.search(r"\d", token)]
    return [token for token in quoted if not re.search(rf"(?<![\w.]){re.escape(token)}(?![\w.])", printed)]


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
def test_it_is_stored_executed_and_small(name: str) -> None:
    path, code = FOLDER / f"{name}.ipynb", _cells(name, "code")
    nbformat.validate(nbformat.read(path, as_version=4))
    assert path.stat().st_size <= MOST_BYTES and sum(map(_figures, code)) in (1, 2, 3)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in (output for cell in code for output in cell.outputs):
        printed = output.output_type == "stream" and output.name == "stdout"
        assert printed or "image/png" in output.get("data", {}), f"neither text nor a figure: {output}"


@pytest.mark.parametrize("name", NAMES)
def test_it_reads_like_an_article_and_opens_on_colab(name: str) -> None:
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
    code, prose = _cells(name, "code"), _cells(name)[-1].source
    nodes = [node for cell in code for node in ast.walk(ast.parse(cell.source))]
    calls = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("assert_")]
    assert len(calls) + sum(isinstance(node, ast.Assert) for node in nodes) >= 4
    assert len(re.findall(r"`[^`]*\d[^`]*`", prose)) >= 3
    assert _unprinted(prose, "\n".join(map(_text, code))) == []


def test_the_readme_lists_all() -> None:
    listed = re.findall(r"\w+(?=\.ipynb)", (FOLDER / "README.md").read_text())
    assert NAMES == sorted(set(listed))


# That these checks can fail ---------------------------------------------------------------------------


@pytest.mark.parametrize(("stored", "fresh", "is_change"), [
    ("loss 1.00", "loss 1.20", True), ("loss 1.00", "gain 1.00", True), ("1\n2", "1", True),
    ("1e-07", "1e-06", True), ("K^4.00", "K^3.00", True), ("loss  0.48", "loss 0.47", False),
    ("4e-14", "9e-16", False), ("by rounding, 1e-08", "by rounding, 4e-09", False), ("", "", False),
])
def test_a_changed_printout_is_seen_and_another_machine_is_none(stored: str, fresh: str, is_change: bool) -> None:
    assert bool(_difference(stored, fresh)) == is_change


def test_a_number_that_was_not_printed_is_seen() -> None:
    printed = "loss 4.98e+11, like K^4.00"
    assert _unprinted("`4.98e+11` and `K^4.00`, with `sgd`", printed) == []
    assert _unprinted("`4.9` and `98e+11`", printed) == ["4.9", "98e+11"]
