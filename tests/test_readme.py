"""The README's Python blocks run, top to bottom, and its table is the committed demo's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples import demo, starts

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_python_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    start: dict[str, Any] = {}
    exec(compile(blocks[0].replace("range(10)", "range(1)"), "README.md", "exec"), start)
    assert float(names["loss"]) < float(start["loss"]), "ten steps of the example do not train"


def test_table_is_the_committed_demo() -> None:
    runs = json.loads((ROOT / "examples/results/demo.json").read_text())
    shown = re.search(r"<!-- demo:begin -->\n```\n(.*?)\n```\n<!-- demo:end -->", README, re.S)
    assert shown is not None
    assert shown[1] == demo.table(runs)


def test_starts_are_the_committed_sweep() -> None:
    result = json.loads((ROOT / "examples/results/starts.json").read_text())
    shown = re.search(r"<!-- starts:begin -->\n(.*?)\n<!-- starts:end -->", README, re.S)
    assert shown is not None
    assert shown[1] == starts.summary(result)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_exist(link: str) -> None:
    assert (ROOT / link).exists()
