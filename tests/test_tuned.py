"""The queue of tuned optimizers: its search, and the sentences of the pages, computed from the stored runs."""

import math
import re

import pytest

import gauge_optax as go
from benchmarks import rates, tuned
from examples.studies.starts import STARTS
from tests.test_readme import result, text

OURS, MUON = "max_norm_muon", "Muon"
TRAINING, CHOOSE, README = map(text, ("benchmarks/results/training.md", "docs/guides/choose.md", "README.md"))
DOCSTRING = " ".join((go.max_norm_muon.__doc__ or "").split())
EVERYWHERE = (TRAINING, CHOOSE, README, DOCSTRING)
RUNS = result("benchmarks/results/tuned.json")


def ends(problem: str, start: str, arm: str, budget: int = tuned.BUDGET) -> list[float]:
    """The losses of an optimizer's best point, seed by seed."""
    final = tuned.found(RUNS, tuned.Stage(problem, start, (arm,), budget=budget), arm).final
    return [final[seed] for seed in tuned.SEEDS]


def less(one: list[float], other: list[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]


def words(losses: list[float], sign: str = "") -> str:
    """A mean and its standard error, as the pages write them."""
    mean, error = tuned.mean_and_error(losses)
    return f"{mean:{sign}.4f} ± {error:.4f}"


@pytest.mark.parametrize("aim", [(1, 2, 3), (-2, 1, 0), (0, 0, 2), (3, -1, 5)])
def test_a_search_ends_at_the_least_loss_within_its_budget(aim: tuned.Point) -> None:
    """Also where the least loss lies beyond the last decay, and a run that diverged is passed by."""
    for budget in (24, 5):
        losses: dict[tuned.Point, float] = {}
        while (point := tuned.search(losses, (0, 0, 2), budget)) is not None:
            assert point not in losses
            losses[point] = math.inf if point[0] > 3 else float(math.dist(point, aim) ** 2)
        assert len(losses) == 5 if budget == 5 else min(losses, key=losses.__getitem__) == aim


def test_pages_say_what_the_finished_stages_show() -> None:
    """Losses, shares and standard errors."""
    other, shares, errors = "another net and text", [], []
    for problem, start in (*((tuned.FIRST, start) for start in STARTS), (other, "lecun")):
        final = {arm: ends(problem, start, arm, tuned.BUDGET * (problem != other)) for arm in (OURS, MUON, "AdamW")}
        gap, error = tuned.mean_and_error(less(final[OURS], final[MUON]))
        assert gap < -3 * error, "by three standard errors"
        shares.append(f"{100 * (1.0 - sum(final[OURS]) / sum(final[MUON])):.1f} %")
        errors.append(-gap / error)
        shown = "`max_norm_muon` ends at {} nats per byte, `optax.contrib.muon` at {} and AdamW at {}"
        assert shown.format(*map(words, final.values())) in TRAINING, start
    first, second, third, last = shares
    for page in EVERYWHERE:
        assert f"{first}, {second} and {third} below Muon" in page and f"{last} below Muon" in page
    assert f"by at least {math.floor(min(errors))} standard errors" in TRAINING


@pytest.mark.parametrize("problem", ["4,000 steps", "width 256", "depth 8"])
def test_pages_say_what_longer_wider_and_deeper_runs_show(problem: str) -> None:
    """The two optimizers, seed by seed."""
    ours, theirs = (ends(problem, "lecun", arm) for arm in (OURS, MUON))
    gaps = less(ours, theirs)
    mean, error = tuned.mean_and_error(gaps)
    level = "in 4,000 steps and at width 256 the two are level"
    if problem == "depth 8":
        share = f"with 8 layers it is {100 * (1.0 - sum(ours) / sum(theirs)):.1f} % below"
        assert mean < -2 * error and f"W{share[1:]}, by {-mean / error:.1f} standard errors" in TRAINING
        assert all(f"{level}, and {share}" in page for page in (CHOOSE, README, DOCSTRING))
    else:
        assert abs(mean) < 2 * error, "there is a difference after all: the pages should say so"
        assert all(level in page for page in (CHOOSE, README, DOCSTRING))
    shown = f"ends at {words(ours)} nats per byte and `optax.contrib.muon` at {words(theirs)}, a difference of"
    assert shown in TRAINING and f"a difference of {words(gaps, '+')}" in TRAINING
    if problem == "4,000 steps":
        above, (least, most) = max(gaps), sorted(-gap for gap in gaps if gap < 0)
        assert f"is {above:.3f} above Muon, on the others {least:.3f} and {most:.3f} below" in TRAINING
        assert f"as far as {max(max(x) - min(x) for x in (ours, theirs)):.3f} apart" in TRAINING
        spreads = [ends(tuned.FIRST, start, arm) for start in STARTS for arm in (MUON, OURS)]
        assert f"within {max(max(x) - min(x) for x in spreads):.3f}" in TRAINING


def test_pages_say_what_newer_optimizers_show() -> None:
    """Each that is finished, from the first start, and its difference from Muon."""
    muon, ours = (ends(tuned.FIRST, "lecun", arm) for arm in (MUON, OURS))
    assert f"`max_norm_muon` is {words(less(ours, muon), '+')} from Muon" in TRAINING
    above, level = [], []
    for arm in tuned.RECENT:
        if tuned.found(RUNS, tuned.Stage(tuned.FIRST, "lecun", (arm,)), arm).waiting is None:
            losses = ends(tuned.FIRST, "lecun", arm)
            from_muon, beside = words(less(losses, muon), "+"), less(losses, ours)
            assert re.search(rf"{arm} \([^)]*\) ends at {words(losses)} there, \{from_muon} from Muon", TRAINING), arm
            mean, error = tuned.mean_and_error(beside)
            assert mean > -2 * error, f"{arm} is below max_norm_muon: the pages should say so"
            (above.append(arm) if mean > 2 * error else level.append(f"{arm} ({words(beside, '+')})"))
    tails = [words(less(ends(tuned.FIRST, "lecun", f"{arm}, tail average", 0), base), "+")
             for arm, base in ((MUON, muon), (OURS, ours))]
    assert f"of Muon by {tails[0]} and that of `max_norm_muon` by {tails[1]}." in TRAINING
    changes = [less(ends(tuned.FIRST, "lecun", f"{arm}, {change}", 0), base) for change, arm, base in
               (("b2 0.99", OURS, ours), ("brake", OURS, ours), ("floor and brake", MUON, muon))]
    assert all(abs(mean) < 2 * error for mean, error in map(tuned.mean_and_error, changes))
    shown = "by {}; a brake on its neurons by {}; a floor and a brake that of Muon by {}."
    assert shown.format(*(words(gaps, "+") for gaps in changes)) in TRAINING
    assert f"{', '.join(above)} are above by two standard errors; {', '.join(level)} are level with it" in TRAINING


def test_pages_say_what_the_rule_of_rates_costs() -> None:
    """The most that the advised rate adds to the best of a sweep."""
    table = list(rates.rows(result("benchmarks/results/rates.json")))
    assert len(table) == len(rates.PROBLEMS), "a sweep is not finished"
    cost = max((row[-1] for row in table), key=lambda text: float(text.split()[0]))
    assert all(f"costs at most {cost}" in page for page in (TRAINING, CHOOSE, DOCSTRING))
    assert all("0.02·√(1,000/steps)" in page for page in EVERYWHERE)
    assert [rates.rule(tuned.task_of(tuned.llama(), steps)) for steps in (250, 1000, 4000)] == [0.04, 0.02, 0.01]


@pytest.mark.parametrize("rate", [0.02, 0.028, 0.06])
def test_the_loss_between_two_rates_is_that_of_a_parabola(rate: float) -> None:
    """A curve that is one, at a rate between those of the sweep and at one of them."""
    curve = {x: 1.0 + 0.3 * math.log(x / 0.025) ** 2 for x in rates.RATES}
    assert rates.at(curve, rate) == pytest.approx(1.0 + 0.3 * math.log(rate / 0.025) ** 2, rel=1e-9)
