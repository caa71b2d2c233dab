"""The tuned optimizers: the search, the sentences of the pages, computed from stored runs, and what newer ones do."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from benchmarks import rates, tuned
from benchmarks.training import links, recent
from examples.studies.starts import STARTS
from gauge_optax.binding import leaves_by_path
from models import lm
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
    level = "in 4,000 steps, at width 256 and with 8 layers the two are level"
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


# The optimizers that the comparison adds do what their descriptions say ----------------------------------

CONFIG = lm.llama_config(vocab=7, d_model=8, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=12, max_len=5)
GATE, OUT = "blocks/0/mlp/gate/kernel", "blocks/0/attn/out/kernel"
NO_DECAY = jnp.zeros(())


def weights(seed: int) -> Any:
    """Of a small decoder; a second seed stands for gradients."""
    return lm.params_and_loss(CONFIG, jax.random.key(seed))[0]


def rate(n: jax.Array) -> jax.Array:
    """A straight line from 0.1 to zero in 40 steps, of both kinds of leaves."""
    return jnp.full((2,), 0.1) * (1 - n / 40)


def leaf(tree: Any, path: str) -> np.ndarray:
    """One leaf."""
    return np.asarray(leaves_by_path(tree)[path])


def trained(tx: optax.GradientTransformation, steps: int) -> list[Any]:
    """Weights at the start and after every step, all of one quadratic."""
    aim, way, state = weights(1), [weights(0)], tx.init(weights(0))
    step = jax.jit(tx.update)
    for _ in range(steps):
        updates, state = step(jax.tree.map(jnp.subtract, way[-1], aim), state, way[-1])
        way.append(optax.apply_updates(way[-1], updates))
    return way


@pytest.mark.slow_rows("Muon, floor and brake")
@pytest.mark.parametrize("arm", [arm for arm in tuned.ARMS if arm not in (*tuned.BOTH, "AdamW")])
def test_every_optimizer_lowers_a_quadratic(arm: str) -> None:
    """Its distance from the minimum falls by a tenth."""
    tx = tuned.ARMS[arm].arm.build(rate, NO_DECAY, lm.gauges(CONFIG))
    way = trained(tx, 40)
    far, near = (float(optax.tree.norm(jax.tree.map(jnp.subtract, x, weights(1)))) for x in (way[0], way[-1]))
    assert near < 0.9 * far


def test_muown_keeps_gains_and_directions() -> None:
    """A neuron's norm is its gain, and moves by Adam's first step, which is the rate."""
    before, after = trained(recent.muown(rate, NO_DECAY), 1)
    norms = [np.linalg.norm(leaf(x, GATE), axis=0) for x in (before, after)]
    np.testing.assert_allclose(np.abs(norms[1] - norms[0]), 0.1, rtol=1e-4)
    cosine = np.sum(leaf(before, GATE) * leaf(after, GATE), 0) / norms[0] / norms[1]
    assert np.all(cosine < 1 - 1e-4), "directions turn"


def test_aurora_has_rows_of_one_length() -> None:
    """√(columns/rows), to the accuracy of three rounds, where those of the polar factor differ by more."""
    tall = jnp.asarray(np.random.default_rng(0).standard_normal((48, 12)) * np.geomspace(1, 30, 48)[:, None])
    even, plain = (np.linalg.norm(x, axis=1) for x in (recent._leverage_free(tall), recent.linalg.polar(tall)))
    assert np.ptp(even) < 0.4 * np.ptp(plain)
    np.testing.assert_allclose(even, 0.5, atol=0.2)


def test_lookahead_and_tail_average() -> None:
    """Neither changes a run before it begins; the last step blends the average of the end, and leaves out tables."""
    inner = links.adamw(lambda n: rate(n)[0], NO_DECAY)
    both = recent.tail_average(inner, rate), recent.ema_nesterov(inner, rate)
    way, tail, ahead = (trained(tx, 40) for tx in (inner, *both))
    jax.tree.map(np.testing.assert_array_equal, way[39], tail[39])
    # The rate is below 0.06 of its peak at steps 38 to 40; a sixteenth of 38 steps is the average's pace.
    average = leaf(way[38], OUT)
    for x in way[39:]:
        average = average + 16 / 38 * (leaf(x, OUT) - average)
    np.testing.assert_allclose(leaf(tail[40], OUT), 0.4 * leaf(way[40], OUT) + 0.6 * average, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(tail[40]["embed"]["embedding"], way[40]["embed"]["embedding"])
    jax.tree.map(np.testing.assert_array_equal, way[1], ahead[1])
    assert not np.array_equal(leaf(way[10], OUT), leaf(ahead[10], OUT))
    still = trained(recent.ema_nesterov(inner, rate, reach=0.0), 40)[-1]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), way[40], still)
