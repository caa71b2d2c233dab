"""DDC's Table 4, finding by finding: what the paper claims, and what is known of it here.

`examples.studies.tables` puts it on the page of results. A finding that nobody ran here says why; one that is run gets
a verdict from its numbers (`report.paper`).
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.studies import depth8, depth24, grokking, harness, overtraining_lm, report, starts, vit


class Finding(NamedTuple):
    """A row of the paper's Table 4.

    Attributes:
      name: F1 to F7.
      setting: network and base optimizer.
      claim: what DDC changes, in the paper's numbers.
      by: the statistic that decides it, and what reads it here.
      whole: what is known of it at the paper's size.
      smaller: an example that runs it smaller, by its name; "" if there is none.
      verdict: from that example's JSON to what it says.
    """

    name: str
    setting: str
    claim: str
    by: str
    whole: str
    smaller: str = ""
    verdict: Callable[[harness.Result], str] = lambda result: ""


RATE = 5e10
"""Operations a second of two CPU cores, roughly."""


def hours(parameters: float, tokens: float) -> str:
    """Of one run on two CPU cores: six operations per parameter and token.

    >>> hours(1e9, 3e7)
    '1,000'
    """
    return report.number(6.0 * parameters * tokens / RATE / 3600.0)


def _matched_decay(result: harness.Result) -> str:
    have = {"DDC-Muon", grokking.MATCHED} <= result["cells"].keys()
    return grokking.verdict(result) if have else "The arms with Muon are not run yet."


BLOCK = 4 * 128**2 + 2 * 128 * 512
"""Parameters of a block of the paper's one-block network. Its text lost the width of the deeper ones."""
FINDINGS = [
    Finding(
        "F1", "12-layer language model, trained into over-fitting; Adam (§5.1, C.5)", "32 of 65 cells, AdamW 7",
        "number of cells, a layer and an observable each, in which a rate can be fitted; `go.measure.rate_table`",
        "not run, because it takes 75 million parameters, 15,000 steps of 16,384 tokens, four arms and three seeds: "
        f"{hours(75e6, 15_000 * 16_384)} hours a run",
        "overtraining_lm", overtraining_lm.verdict,
    ),
    Finding(
        "F2", "one-block grokking; Muon (§5.4, C.9)", "0.889, Muon with matched decay 0.718",
        "axis alignment: the mean over dead directions of the feed-forward layer of the largest squared entry; "
        "`go.measure.axis_alignment`",
        "not run, because two arms with five seeds of 25,000 steps of 0.06 s, and their grids, take 5 hours of one "
        "core; below, three seeds of 20,000 steps on the paper's network",
        "grokking", _matched_decay,
    ),
    Finding(
        "F3", "grokking with 8 rotary blocks; Muon (§5.5, C.7)", "0.977, Muon 0.867",
        "final accuracy",
        "not run, because it takes 8 blocks, 5,000 steps of 16,384 tokens, four arms and three seeds: "
        f"{hours(8 * BLOCK, 5_000 * 16_384)} hours a run",
        "depth8", depth8.torus_above_muon,
    ),
    Finding(
        "F4", "arithmetic with 24 blocks; Muon (§5.6, C.6)", "10 of 11 seeds, Muon none",
        "number of seeds that reach full accuracy",
        "not run, because it takes 24 blocks, 6,000 steps of 4,096 tokens and 22 runs: "
        f"{hours(24 * BLOCK, 6_000 * 4_096)} hours a run",
        "depth24", depth24.seeds_that_grok,
    ),
    Finding(
        "F5", "grokking with 8 rotary blocks; Muon (§5.7, C.8)", "ten times further off the floor, at a lower loss",
        "smallest eigenvalue of the true Fisher at the end; `go.measure.Fisher`",
        "not run, because its networks are those of F3, with a third arm that masks dead directions",
        "depth8", depth8.off_the_floor,
    ),
    Finding(
        "F6", "–", "no row: the table goes from F5 to F7", "–",
        "not run, because the paper's text does not say what it is",
    ),
    Finding(
        "F7", "vision transformer on 100 classes of ImageNet; Adam (§5.9, C.10)", "1.712 nats, AdamW 2.116",
        "validation loss at one weight decay",
        "not run, because the images are not in this repository; 50,000 steps of 256 images need an accelerator",
        "vit", vit.verdict,
    ),
]


def section(results: Path) -> str:
    """The table, what smaller runs say, and the nearest runs of this page."""
    head = ["", "setting; base optimizer", "the paper: DDC, baseline", "by", "at the paper's size"]
    said = [
        f"What the paper's Table 4 claims of trained networks. Hours are for two CPU cores at {RATE:g} operations a "
        "second, six per parameter and token; the text of the paper lost the widths of the networks with 8 and 24 "
        "blocks, which are taken to be those of its one-block network.",
        report.plain([head, *([*finding[:5]] for finding in FINDINGS)]),
        "Smaller networks or shorter runs, each with a section of its own on this page:",
        "\n".join(smaller(results)),
        *_nearest_to_f7(results / "starts.json"),
    ]
    return "\n\n".join(said)


def smaller(results: Path) -> Iterator[str]:
    """A line per finding that an example runs smaller."""
    for finding in FINDINGS:
        path = results / f"{finding.smaller}.json"
        if finding.smaller and path.exists():
            yield f"* {finding.name} (`{finding.smaller}.py`). {finding.verdict(json.loads(path.read_text()))}"


def _nearest_to_f7(path: Path) -> list[str]:
    """The Adam bases that were trained here, each at the best rate of its own sweep."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    better = []
    for size, start, arm in starts.groups(result):
        if arm == "ddc_adamw":
            ours, theirs = (starts.swept((size, start, name)).losses(result) for name in (arm, "adamw"))
            gaps = np.subtract(ours[harness.best(ours)], theirs[harness.best(theirs)])
            better.append(bool(gaps.mean() < -gaps.std(ddof=1)))
    claim = "on an Adam base DDC ends at a lower loss than AdamW (F7, there on images)"
    by = "validation loss on text, each at its best rate, by more than a standard deviation over seeds"
    verdict = report.paper(claim, better, by, "pairs of a start and a width")
    return [f"The nearest runs of this page are those from three usual starts. {verdict}"]
