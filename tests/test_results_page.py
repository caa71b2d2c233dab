"""The page of results: each verdict names the coordinate or statistic it was read from, and turns with the numbers."""

import json
import math
import re
from typing import Any

import pytest

from examples.studies import harness, report, tables

SECTIONS = tables.SECTIONS
VERDICT = re.compile(r"\b(shows?|does not show)\b", re.I)
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z*\"(])|\n+")


def verdicts(markdown: str) -> list[str]:
    """Sentences that say that something shows or does not."""
    return [sentence for sentence in SENTENCE.split(markdown) if VERDICT.search(sentence)]


def committed(name: str) -> Any:
    return json.loads((tables.RESULTS / f"{name}.json").read_text())


def parts() -> dict[str, str]:
    """Heading → text of the committed page."""
    found = re.split(r"^## (.*)$", (tables.RESULTS / "README.md").read_text(), flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


def test_every_verdict_names_its_coordinate_or_statistic() -> None:
    page = parts()
    assert set(page) == {section.heading for section in SECTIONS}
    for section in SECTIONS:
        said = verdicts(page[section.heading])
        assert all(any(word in x for word in section.by) for x in said), section.heading
        assert all(any(word in x for x in said) for word in section.by), "it declares what no verdict of it names"
    assert sum(len(verdicts(text)) for text in page.values()) > 50


DRIFTS = r" drifts \S+ to \S+ times less than AdamW \(1,000 times or more on all 3 seeds\)"


@pytest.mark.parametrize(("name", "words"), [
    ("row_shift", "In the mean column of the unembedding, DDC" + DRIFTS),
    ("relu_rescale", "In log‖W1‖ per unit, DDC channel" + DRIFTS),
    ("kronecker", r"Inside `quotient` twins agree to 1e-10 on all 3 seeds; plain ones .* 1e-3 apart .* on all 3 seeds"),
    ("minimum", r"AdamW leaks .* share along the orbit \(above 1e-3\), this shows here on all 3 seeds"),
    ("minimum", r"by the order k, this shows here in all 36 reads \(within 1 %\)"),
    ("sparse_parity", r"linear scale keeps the block at full accuracy; by .*?, this shows here on all 3 seeds"),
    ("sparse_parity", r"units dead the log arm ends at accuracy 0\.\d+ to 0\.8\d+ and gain \S+e-05 to 0\.00\d+;"),
    ("packed", r"by at most the standard deviation over seeds \(of both runs together\): \*packed\*,"),
    ("probe", r"Twins: after alignment the probe is at most 0\.\d points from one that was trained there"),
    ("rotational_variants", r"LM, AdamW -[\d.]+% zero-shot"),
    ("gaugefix_networks", r"a fix at every step leaves 3.5e-7; .* shows here on all \d+ runs, half of them with stale"),
    ("gaugefix_networks", r"holds log‖Q side‖ − log‖K side‖ to \S+e-07\."),
])
def test_what_is_found_stays_found(name: str, words: str) -> None:
    """A run that is made again may change numbers, not these sentences, all of which are computed."""
    (heading,) = (section.heading for section in SECTIONS if section.name == name)
    assert re.search(words, parts()[heading])


def test_table_4_repeats_what_its_studies_say() -> None:
    """Its text stands as it was; each of its verdicts is a sentence of another section."""
    page = parts()
    said, others = page.pop("DDC's Table 4, finding by finding"), " ".join(page.values())
    assert len(verdicts(said)) >= 6
    for sentence in verdicts(said):
        assert re.sub(r".*(The paper: .*?)\.?$", r"\1", sentence.strip()) in others, sentence


# Verdicts turn with the numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "claim", "arm", "key", "yes", "no"), [
    ("sparse_parity", "the linear scale keeps the block at full", "DDC, linear", "accuracy", 1.0, 0.0),
    ("sparse_parity", "the log scale collapses the block", "DDC, log", "loss", math.log(2.0), 0.0),
    ("sparse_parity", "there accuracy drops to chance", "DDC, log", "accuracy", 0.5, 1.0),
    ("sparse_parity", "four orders of magnitude", "AdamW, 1 + γ", "live_drift", 1e9, 0.0),
    ("row_shift", "grows the mode more than no remedy", "AdamW, PaLM Z-loss", "mode", 1e9, 0.0),
    ("diagonal_network", "SGD moves scale less", "SGD", "ratio", 0.0, 1e9),
    ("minimum", "AdamW leaks the readout", "isolation: AdamW", "share", 1.0, 0.0),
    ("minimum", "the orbit is held on both bases", "one step: DDC", "turned", 0.0, 1.0),
    ("minimum", "the Adam base composes with rescales", "one step: DDC", "rescale", 0.0, 1.0),
])
def test_a_verdict_turns_with_the_numbers(name: str, claim: str, arm: str, key: str, yes: float, no: float) -> None:
    for value, verdict in ((yes, "shows here on all"), (no, "does NOT show")):
        result = committed(name)
        for run in result["cells"][arm].values():
            places = [place for place in (run, run.get("final", {}), run.get("curves", {})) if key in place]
            assert places
            for place in places:
                place[key] = [value] * len(place[key]) if isinstance(place[key], list) else value
        (sentence,) = (x for x in verdicts(harness.find(name).section(result)) if claim in x)
        assert verdict in sentence


def test_few_are_called_few_and_a_drift_that_is_not_contained_is_called_so() -> None:
    assert report.paper("x", [True, False, True], "y") == "The paper: x; by y, this shows here on 2 of 3 seeds."
    assert report.paper("x", [True, False, False], "y").endswith("this shows here only on 1 of 3 seeds.")
    assert report.paper("x", [False], "y") == "The paper: x; by y, this does NOT show here, on none of 1 seeds."
    assert report.paper("x", [True], "y", "tasks").endswith("on the one task.")
    swapped = report.containment(committed("layernorm_scale"), "DDC", "AdamW", "drift", "log γ")
    assert "1,000 times or more on NONE of 3 seeds" in swapped and "matched on NONE of 3 seeds" in swapped
