"""Studies run, baselines do what they say, and the committed page says what the committed runs found.

Each verdict of the page names the coordinate or statistic it was read from, and turns with the numbers.
"""

import functools
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import merge
from examples.studies import (
    baselines,
    gaugefix_lrm,
    harness,
    kronecker,
    minimum,
    report,
    rotational_networks,
    self_tests,
    tables,
)
from examples.studies import grokking as grokking_study
from examples.studies import twins_benchmark as example
from models import grokking

SHORT = "--steps 3 --seeds 42"
TINY: dict[str, tuple[str, str]] = {  # what the section says, and options
    "row_shift": ("", f"{SHORT} --modulus 5 --width 8 --hidden 8 --heads 2"),
    "relu_rescale": ("", f"{SHORT} --samples 8 --inputs 3 --hidden 4 --outputs 2"),
    "layernorm_scale": ("", f"{SHORT} --samples 8 --channels 4 --outputs 2"),
    "diagonal_network": ("", f"{SHORT} --samples 16 --modes 8 --nonzero 2"),
    "sparse_parity": ("", f"{SHORT} --bits 4 --hidden 8"),
    "minimum": ("| ddc |", "--seeds 42 --steps 40 --modulus 5 --width 4 --hidden 8 --modes 16 --pretraining 2 "
                "--warmup 1 --twins 2"),
    "packed": ("packed", "--only 'plain | *' 'packed | *' --seeds 42 --steps 2"),
    "merge": ("all gauges", "--only 'digits: seeds 42, 142' 'digits: fine-tunings of 42' --steps 20"),
}


def _committed(name: str) -> dict[str, Any]:
    return json.loads((tables.RESULTS / f"{name}.json").read_text())


def _cells(name: str) -> Any:
    return _committed(name)["cells"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_study_leaves_json_figure_and_section(name: str, tmp_path: Path, capsys: Any) -> None:
    said, options = TINY[name]
    result = harness.main(harness.find(name), [*shlex.split(options), "--out", str(tmp_path)])
    assert json.loads((tmp_path / f"{name}.json").read_text()) == result
    assert (tmp_path / f"{name}.png").stat().st_size > 1000
    shown = capsys.readouterr().out
    assert said in shown.lower()
    if SHORT in options:
        assert all(np.isfinite(list(cells["42"]["final"].values())).all() for cells in result["cells"].values())
        assert all(f"| {arm} |" in shown for arm in result["arms"])


# What was found ---------------------------------------------------------------------------------------


def test_what_is_called_rounding_at_a_minimum_is_rounding() -> None:
    read = functools.partial(minimum.values, _committed("minimum"))
    assert max(read(minimum.ISOLATION, "AdamW", "along_over_largest")) < minimum.DEAD
    assert max(read(minimum.ONE_STEP, "DDC", "spread")) < 1e-10 < 0.01 < min(read(minimum.ONE_STEP, "AdamW", "spread"))


def test_every_gauge_of_the_self_tests_makes_one_run_of_twins() -> None:
    result = _committed("self_tests")
    assert {"SwiGLU rescale", "rotation, grouped queries", "torus of rotary heads"} < set(result["arms"])
    for row in result["arms"]:
        ours, adamw = (max(self_tests.last(result, row, "float64", which)) for which in ("ours", "adamw"))
        assert (ours < 1e-13) == (row != "B.8, |v·R|") and adamw > 1e-3


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_rotations_lower_barriers_that_permutations_leave(name: str) -> None:
    """Between seeds, all pairs."""
    found = merge.barriers(_committed("merge"), name, "seeds")
    assert len(found["plain"]) == 3
    assert np.all(found["all gauges"] < 0.7 * np.minimum(found["permutations"], found["plain"]))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_rotations_help_where_outliers_are(name: str) -> None:
    """The stored runs, four-bit activations: with planted outliers, folding helps too; not with a grown one."""
    cells = _cells("quantize")

    def rises(start: str, arm: str) -> np.ndarray:
        return np.array([x[start]["arms"][arm]["W4A4"] for key, x in cells.items() if key.startswith(f"{name}: ")])

    assert np.all(rises("planted", "R1") < rises("planted", "folded")) and len(rises("planted", "R1")) == 5
    assert np.all(rises("planted", "folded") < rises("planted", "plain"))
    assert np.all(rises("grown", "R1") < rises("grown", "plain"))
    assert np.mean(rises("grown", "folded")) > np.mean(rises("grown", "plain"))


def test_the_committed_table_of_gauge_fixing_says_what_is_written_below_it() -> None:
    cells, networks = _cells("gaugefix_lrm"), _cells("gaugefix_networks")
    for cell in (*cells.values(), *networks.values()):
        assert np.isfinite(cell["loss"]).all() and len(cell["loss"]) == 3, "three seeds"
    for every in (1, 10, 100):
        assert max(cells[f"B, every {every}, float32"]["end"]) <= 3.5e-7
        assert max(cells[f"B, every {every}, float32"]["drift"]) <= 3.6e-7, "of 2,000 steps, 8 heads and 3 seeds"
        assert max(cells[f"B, every {every}, bfloat16"]["end"]) <= 3.5e-7, "right after a fix"
    for arm in ("A", "C"):
        assert max(cells[f"{arm}, float32"]["drift"]) <= 3.5e-7 and min(cells[f"{arm}, bfloat16"]["drift"]) > 1e-4
    for dtype in gaugefix_lrm.PRECISIONS:
        assert max(cells[f"cap, {dtype}"]["product"]) < 1.05 < min(cells[f"C, {dtype}"]["product"])
        np.testing.assert_allclose(cells[f"fix, {dtype}"]["product"], 1.0, rtol=1e-5)
    assert max(max(cell["sums"]) for cell in networks.values()) < 1e-5, "sums of gradients agree, entries do not"
    for network, gap in {"plain": 3e-7, "biases": 0.05, "rotary": 0.65, "grouped": 0.55}.items():
        assert max(networks[f"{network}, C, rate 0.003, 300 steps"]["entries"]) == pytest.approx(gap, rel=0.1), network


def test_the_walks_and_trained_layers_rest_where_predicted() -> None:
    """The promise: 2 % for SGDM and AdamW, 6 % for Adam + l2, 3 % for Lion; three seeds."""
    cells = _cells("rotational_walk")
    most = {"SGDM": 0.02, "AdamW": 0.02, "Adam + l2": 0.06, "Lion": 0.03, "Lion, even inputs": 0.03, "Muon": 0.06}
    for name, bound in most.items():
        keys = ("norm", "rotation", *(("aligned_norm", "aligned_rotation") if name == "Lion" else ()))
        assert len(cells[name]["norm"]) == 3
        assert max(abs(x - 1) for key in keys for x in cells[name][key]) <= bound, name
    assert max(cells["AdamW, b2 = 0.95"]["transient"]) <= 0.05
    for name, cell in _cells("rotational_networks").items():
        if "no decay" not in name:
            ratios = [rotational_networks.ratios(layer, True) for layer in cell["layers"].values()]
            assert 0.75 < np.min(ratios) and np.max(ratios) < 1.25, name


def test_grokking_is_sustained_and_falls_after_it_are_collapses() -> None:
    accuracy = [0.1, 0.96, 0.2, *[0.97] * 12, 0.5, 0.4, 0.99, 0.3, 0.99]
    said = grokking_study.summary(accuracy, 100)
    assert (said["grokked"], said["collapses"], said["below"], said["lowest"]) == (300, 2, 3, 0.3)
    assert grokking_study.summary([0.96] * 5, 100)["grokked"] == float("inf")


# Baselines --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_shampoo_and_soap_do_what_their_papers_say() -> None:
    """The first step of a square matrix: U·Vᵀ for Shampoo, ±1 in the eigenbases for SOAP; Adam's for a vector."""
    gradient = {"w": jax.random.normal(jax.random.key(0), (4, 4)), "b": jnp.array([2.0, -3.0])}
    shampoo, soap = kronecker.kronecker(kronecker._root, 1, False), kronecker.kronecker(kronecker.basis, 1, True)
    step, of_soap = (tx.update(gradient, tx.init(gradient))[0] for tx in (shampoo, soap))
    np.testing.assert_allclose([step["b"], of_soap["b"]], [[1.0, -1.0]] * 2, rtol=1e-6)
    u, _, vt = np.linalg.svd(gradient["w"])
    # The floor of the roots is 1e-6 of the largest eigenvalue.
    np.testing.assert_allclose(step["w"] / np.linalg.norm(step["w"]), u @ vt / 2.0, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(of_soap["w"]), 4.0, rtol=1e-5)


def test_orthogonal_gradient_turns_and_keeps_its_length() -> None:
    weights, gradients = jax.random.normal(jax.random.key(0), (2, 5, 3))
    out, _ = baselines.orthogonal_gradient().update({"w": gradients}, optax.EmptyState(), {"w": weights})
    assert abs(float(jnp.vdot(out["w"], weights))) < 1e-5
    np.testing.assert_allclose(jnp.linalg.norm(out["w"]), jnp.linalg.norm(gradients), rtol=1e-6)
    assert float(jnp.vdot(out["w"], gradients)) > 0


# The twins benchmark ----------------------------------------------------------------------------------

SMALL = example.Config(steps=10, modulus=7, width=8, heads=2)


@pytest.mark.parametrize("name", ["twins benchmark", "grokking"])
def test_pairs_are_split_and_sums_are_modulo(name: str) -> None:
    if name == "grokking":
        (tokens, sums), (held_out, answers) = grokking.data(grokking.GrokConfig(p=7, share=0.4), 3)
    else:
        tokens, sums, held_out, answers = example.pairs(SMALL, 3)
        assert set(np.asarray(tokens)[:, 2].tolist()) == {7}
    everything = np.concatenate([tokens, held_out])[:, :2]
    assert len(tokens) == int(0.4 * 49 + 0.5 * (name == "grokking")) and len(tokens) + len(held_out) == 49
    assert len({tuple(pair) for pair in everything.tolist()}) == 49
    assert np.array_equal(np.concatenate([sums, answers]), everything.sum(1) % 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adam", "Muon"])
def test_twins_part_plain_and_stay_inside_quotient(name: str) -> None:
    plain, ours = (example.cell(SMALL, arm, 42) for arm in (name, f"quotient({name})"))
    assert plain["float32"]["same"]["logits"] == ours["float32"]["same"]["logits"] == [0.0] * 3
    plain, ours = (cell["float64"] for cell in (plain, ours))
    for kind in ("rotated", "every symmetry"):
        assert max(ours[kind]["logits"]) < 1e-11
    assert plain["every symmetry"]["logits"][-1] > 1e-3
    assert (plain["rotated"]["logits"][-1] > 1e-4) == (name == "Adam")  # whole-matrix Muon commutes with rotations
    assert 1e-9 < plain["noise"]["logits"][0] < 1e-5


# The page ---------------------------------------------------------------------------------------------

SECTIONS = tables.SECTIONS
VERDICT = re.compile(r"\b(shows?|does not show)\b", re.I)
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z*\"(])|\n+")


def verdicts(markdown: str) -> list[str]:
    """Sentences that say that something shows or does not."""
    return [sentence for sentence in SENTENCE.split(markdown) if VERDICT.search(sentence)]


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
        result = _committed(name)
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
    swapped = report.containment(_committed("layernorm_scale"), "DDC", "AdamW", "drift", "log γ")
    assert "1,000 times or more on NONE of 3 seeds" in swapped and "matched on NONE of 3 seeds" in swapped
