"""The page of results: each verdict names the coordinate or statistic it was read from, and turns with the numbers."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from examples.studies import (
    depth8,
    report,
    rotational_variants,
    tables,
)

SECTIONS = tables.SECTIONS
VERDICT = re.compile(r"\b(shows?|does not show)\b", re.I)
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z*\"(])|\n+")


def verdicts(markdown: str) -> Iterator[str]:
    """Sentences that say that something shows or does not."""
    for sentence in SENTENCE.split(markdown):
        if VERDICT.search(sentence):
            yield sentence


def unnamed(markdown: str, by: tuple[str, ...]) -> list[str]:
    """Verdicts that name nothing they were read from."""
    return [sentence for sentence in verdicts(markdown) if not any(word in sentence for word in by)]


def committed(name: str) -> Any:
    return json.loads((tables.RESULTS / f"{name}.json").read_text())


def parts() -> dict[str, str]:
    """Heading → text of the committed page."""
    found = re.split(r"^## (.*)$", (tables.RESULTS / "README.md").read_text(), flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


def test_every_verdict_names_its_coordinate_or_statistic() -> None:
    page = parts()
    assert set(page) == {section.heading for section in SECTIONS}
    count = 0
    for section in SECTIONS:
        assert unnamed(page[section.heading], section.by) == [], section.heading
        stale = [word for word in section.by if not any(word in x for x in verdicts(page[section.heading]))]
        assert stale == [], f"{section.heading} declares what no verdict of it names"
        count += len(list(verdicts(page[section.heading])))
    assert count > 50


def test_a_verdict_without_one_is_found() -> None:
    assert unnamed("Losses differ. The paper: it helps; this shows here on all 3 seeds.", ("test loss",))
    assert unnamed("The test loss is 1. This does NOT show here on NONE of 3 seeds.", ("test loss",))
    assert not unnamed(report.paper("it helps", [True], "test loss"), ("test loss",))
    assert unnamed(report.paper("it helps", [True], "test loss"), ())


# Verdicts turn with the numbers ----------------------------------------------------------------------------


def said(text: str, claim: str) -> str:
    """The verdict on one claim."""
    (sentence,) = (x for x in verdicts(text) if claim in x)
    return sentence


def changed(name: str, change: Any) -> Any:
    result = copy.deepcopy(committed(name))
    change(result["cells"])
    return result


@pytest.mark.parametrize(
    ("claim", "change"),
    [
        ("zero-shot in most cases", lambda cells, name: cells[name].update({"zero-shot": [9.0, 9.1, 9.2]})),
        ("when tuned a little", lambda cells, name: cells[name].update({"few-shot": [9.0, 9.1, 9.2]})),
        ("without decay networks are worse", lambda cells, name: cells[name].update({"no decay": [0.0, 0.0, 0.0]})),
    ],
)
def test_variants(claim: str, change: Any) -> None:
    def all_tasks(cells: Any) -> None:
        for name in rotational_variants.PAIRS:
            change(cells, name)

    assert "shows here" in said(rotational_variants.section(committed("rotational_variants")), claim)
    assert "does NOT show" in said(rotational_variants.section(changed("rotational_variants", all_tasks)), claim)


def _with_curve(cells: Any, arm: str, key: str, change: Any) -> None:
    for cell in cells[arm].values():
        cell["curves"][key] = [change(x) for x in cell["curves"][key]]


@pytest.mark.parametrize(
    ("claim", "key", "yes", "no"),
    [
        ("ends above the full rotation", "test_accuracy", 2.0, 0.0),
        ("gauge ends above Muon", "test_accuracy", 2.0, 0.0),
        ("RoPE-torus gauge all seeds grok", "test_accuracy", 1.0, 0.0),
        ("further off the singular floor", "fisher", 1.0, 0.0),
        ("at a lower loss", "test_loss", 0.0, 1e9),
        ("compresses the activations", "activations", 0.0, 1e9),
    ],
)
def test_eight_blocks(claim: str, key: str, yes: float, no: float) -> None:
    def to(value: float) -> str:
        def change(cells: Any) -> None:
            _with_curve(cells, depth8.TORUS, key, lambda _: value)

        return said(depth8.section(changed("depth8", change)), claim)

    assert "shows here on all" in to(yes) and "does NOT show" in to(no)


def test_few_are_called_few() -> None:
    assert report.paper("x", [True, False, True], "y") == "The paper: x; by y, this shows here on 2 of 3 seeds."
    assert report.paper("x", [True, False, False], "y").endswith("this shows here only on 1 of 3 seeds.")
    assert report.paper("x", [False], "y") == "The paper: x; by y, this does NOT show here, on none of 1 seeds."
    assert report.paper("x", [True], "y", "tasks").endswith("on the one task.")
