"""The queue of tuned optimizers: its search, its order, its table, and a dry run of a tiny network."""

import json
import math
import re
from pathlib import Path

import pytest

import gauge_optax as go
from benchmarks import rates, tuned
from examples.studies.starts import STARTS

ROOT = Path(__file__).parent.parent
TRAINING = "benchmarks/results/training.md"


def curve(run: tuned.Cell) -> float:
    """A loss that is least at 0.028, where the other rate begins, and without decay; a tenth lower for Muon."""
    _, _, arm, other, decay, rate, seed = run
    apart = math.log(rate / 0.028) ** 2 + 0.3 * math.log(other / tuned.ARMS[arm].rates[1]) ** 2 + decay
    return 1.5 - 0.1 * (arm == "Muon") + 0.1 * apart + 1e-3 * ((seed * 7919) % 11 - 5)


def test_a_search_ends_at_the_least_loss_within_its_budget() -> None:
    """Also where the least loss lies beyond the last decay, and a run that diverged is passed by."""
    def loss(point: tuned.Point, aim: tuple[int, int, int]) -> float:
        return math.inf if point[0] > 3 else float(sum((x - y) ** 2 for x, y in zip(point, aim, strict=True)))

    for aim in ((1, 2, 3), (-2, 1, 0), (0, 0, 2), (3, -1, 5)):
        losses: dict[tuned.Point, float] = {}
        while (point := tuned.search(losses, (0, 0, 2), 24)) is not None:
            assert point not in losses
            losses[point] = loss(point, aim)
        assert min(losses, key=lambda x: losses[x]) == aim
        few: dict[tuned.Point, float] = {}
        while (point := tuned.search(few, (0, 0, 2), 5)) is not None:
            few[point] = loss(point, aim)
        assert len(few) == 5


def said() -> dict[str, str]:
    """What the pages and the docstring say, each as one line."""
    texts = {page: (ROOT / page).read_text() for page in ("README.md", "docs/guides/choose.md", TRAINING)}
    texts["max_norm_muon"] = go.max_norm_muon.__doc__ or ""
    return {page: " ".join(text.split()) for page, text in texts.items()}


def percent(share: float) -> str:
    """As the pages write it."""
    return f"{100 * share:.1f} %"


def test_pages_say_what_the_finished_stages_show() -> None:
    """Losses, shares and standard errors, computed from the stored runs."""
    result = json.loads((ROOT / "benchmarks" / "results" / "tuned.json").read_text())
    page, shares, errors = said()[TRAINING], [], []
    other = "another net and text"
    for problem, start in (*((tuned.FIRST, start) for start in STARTS), (other, "lecun")):
        final = {arm: tuned.found(result, tuned.Stage(problem, start, (arm,), budget=tuned.BUDGET * (problem != other)),
                                  arm).final for arm in (*tuned.BOTH, "AdamW")}
        ends = {arm: tuned.mean_and_error(list(losses.values())) for arm, losses in final.items()}
        gap, error = tuned.mean_and_error([final["max_norm_muon"][x] - final["Muon"][x] for x in tuned.SEEDS])
        assert gap < -3 * error, "by three standard errors"
        shares.append(percent(1.0 - ends["max_norm_muon"][0] / ends["Muon"][0]))
        errors.append(-gap / error)
        words = {arm: "{:.4f} ± {:.4f}".format(*end) for arm, end in ends.items()}
        assert (
            f"`max_norm_muon` ends at {words['max_norm_muon']} nats per byte, `optax.contrib.muon` at {words['Muon']} "
            f"and AdamW at {words['AdamW']}" in page
        ), start
    first, second, third, last = shares
    assert all(f"{first}, {second} and {third} below Muon" in text for text in said().values())
    assert all(f"{last} below Muon" in text for text in said().values())
    assert f"by at least {math.floor(min(errors))} standard errors" in page


def ends(problem: str, start: str, arm: str) -> list[float]:
    """The losses of an optimizer's best point, seed by seed."""
    result = json.loads((ROOT / "benchmarks" / "results" / "tuned.json").read_text())
    final = tuned.found(result, tuned.Stage(problem, start, (arm,)), arm).final
    return [final[seed] for seed in tuned.SEEDS]


def words(losses: list[float], sign: str = "") -> str:
    """A mean and its standard error, as the pages write them."""
    mean, error = tuned.mean_and_error(losses)
    return f"{mean:{sign}.4f} ± {error:.4f}"


@pytest.mark.parametrize("problem", ["4,000 steps", "width 256"])
def test_pages_say_that_longer_and_wider_runs_show_no_lead(problem: str) -> None:
    """The two optimizers, seed by seed."""
    ours, theirs = (ends(problem, "lecun", arm) for arm in ("max_norm_muon", "Muon"))
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, error = tuned.mean_and_error(gaps)
    assert abs(mean) < 2 * error, "there is a difference after all: the pages should say so"
    texts = said()
    page = texts.pop(TRAINING)
    assert all("in 4,000 steps and at width 256 the two are level" in text for text in texts.values())
    assert f"ends at {words(ours)} nats per byte and `optax.contrib.muon` at {words(theirs)}, a difference of" in page
    assert f"a difference of {words(gaps, '+')}" in page
    if problem == "4,000 steps":
        above, (least, most) = max(gaps), sorted(-gap for gap in gaps if gap < 0)
        assert f"is {above:.3f} above Muon, on the others {least:.3f} and {most:.3f} below" in page
        assert f"as far as {max(max(x) - min(x) for x in (ours, theirs)):.3f} apart" in page
        spreads = [ends(tuned.FIRST, start, arm) for start in STARTS for arm in ("Muon", "max_norm_muon")]
        assert f"within {max(max(x) - min(x) for x in spreads):.3f}" in page


def test_pages_say_what_newer_optimizers_show() -> None:
    """Each that is finished, from the first start, and its difference from Muon."""
    result = json.loads((ROOT / "benchmarks" / "results" / "tuned.json").read_text())
    muon, page = ends(tuned.FIRST, "lecun", "Muon"), said()[TRAINING]
    gaps = [a - b for a, b in zip(ends(tuned.FIRST, "lecun", "max_norm_muon"), muon, strict=True)]
    assert f"`max_norm_muon` is {words(gaps, '+')} from Muon" in page
    ours, above, level = ends(tuned.FIRST, "lecun", "max_norm_muon"), [], []
    for arm in tuned.RECENT:
        if tuned.found(result, tuned.Stage(tuned.FIRST, "lecun", (arm,)), arm).waiting is None:
            losses = ends(tuned.FIRST, "lecun", arm)
            gaps = [a - b for a, b in zip(losses, muon, strict=True)]
            shown = rf"{arm} \([^)]*\) ends at {words(losses)} there, \{words(gaps, '+')} from Muon"
            assert re.search(shown, page), arm
            beside = [a - b for a, b in zip(losses, ours, strict=True)]
            mean, error = tuned.mean_and_error(beside)
            assert mean > -2 * error, f"{arm} is below max_norm_muon: the pages should say so"
            (above.append(arm) if mean > 2 * error else level.append(f"{arm} ({words(beside, '+')})"))
    tails = []
    for arm, base in (("Muon", muon), ("max_norm_muon", ours)):
        stage = tuned.Stage(tuned.FIRST, "lecun", (f"{arm}, tail average",), budget=0)
        final = tuned.found(result, stage, stage.arms[0]).final
        tails.append(words([final[seed] - plain for seed, plain in zip(tuned.SEEDS, base, strict=True)], "+"))
    assert f"of Muon by {tails[0]} and that of `max_norm_muon` by {tails[1]}." in page
    assert f"{', '.join(above)} are above by two standard errors; {', '.join(level)} are level with it" in page


def test_pages_say_what_the_rule_of_rates_costs() -> None:
    """The most that the advised rate adds to the best of a sweep."""
    result = json.loads((ROOT / "benchmarks" / "results" / "rates.json").read_text())
    table = list(rates.rows(result))
    assert len(table) == len(rates.PROBLEMS), "a sweep is not finished"
    cost = max((row[-1] for row in table), key=lambda text: float(text.split()[0]))
    assert all(f"costs at most {cost}" in text for page, text in said().items() if page != "README.md")
    assert all("0.02·√(1,000/steps)" in text for text in said().values())
    assert [rates.rule(tuned.task_of(tuned.llama(), steps)) for steps in (250, 1000, 4000)] == [0.04, 0.02, 0.01]


def test_the_loss_between_two_rates_is_that_of_a_parabola() -> None:
    """A curve that is one, at a rate between those of the sweep and at one of them."""
    curve = {rate: 1.0 + 0.3 * math.log(rate / 0.025) ** 2 for rate in rates.RATES}
    for rate in (0.02, 0.028, 0.06):
        assert rates.at(curve, rate) == pytest.approx(1.0 + 0.3 * math.log(rate / 0.025) ** 2, rel=1e-9)
