"""Studies run, baselines do what they say, and the committed table says what the committed runs found."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from examples.studies import (
    baselines,
    depth8,
    depth24,
    diagonal_network,
    harness,
    kronecker,
    layernorm_scale,
    lemmas,
    minimum,
    relu_rescale,
    report,
    row_shift,
    self_tests,
    sparse_parity,
    table3,
    tables,
)
from examples.studies import twins_benchmark as example
from models import modular
from tests.test_training_studies import WHOLE
from tests.twins import trained

TINY: dict[Any, list[str]] = {
    row_shift: ["--modulus", "5", "--width", "8", "--hidden", "8", "--heads", "2"],
    relu_rescale: ["--samples", "8", "--inputs", "3", "--hidden", "4", "--outputs", "2"],
    layernorm_scale: ["--samples", "8", "--channels", "4", "--outputs", "2"],
    diagonal_network: ["--samples", "16", "--modes", "8", "--nonzero", "2"],
    sparse_parity: ["--bits", "4", "--hidden", "8"],
    depth8: ["--p", "5", "--width", "8", "--heads", "2", "--layers", "2", "--sweep-steps", "2"],
    depth24: ["--p", "5", "--width", "8", "--heads", "2", "--layers", "2", "--sweep-steps", "2"],
    **WHOLE,
}
CONTAINED = [
    (row_shift, "DDC", "drift"),
    (relu_rescale, "DDC block", "block_drift"),
    (relu_rescale, "DDC channel", "channel_drift"),
    (layernorm_scale, "DDC", "drift"),
    (diagonal_network, "DDC", "drift"),
]


def _name(value: Any) -> str:
    return str(value.__name__).split(".")[-1] if hasattr(value, "__name__") else str(value)


def _committed(module: Any) -> dict[str, Any]:
    return json.loads((tables.RESULTS / f"{_name(module)}.json").read_text())


# Running ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("module", TINY, ids=_name)
def test_a_tiny_study_leaves_json_figure_and_table(
    module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = harness.main(module.STUDY, [*TINY[module], "--steps", "3", "--seeds", "42", "--out", str(tmp_path)])
    assert json.loads((tmp_path / f"{_name(module)}.json").read_text()) == result
    assert (tmp_path / f"{_name(module)}.png").stat().st_size > 1000
    assert all(np.isfinite(list(cells["42"]["final"].values())).all() for cells in result["cells"].values())
    shown = capsys.readouterr().out
    assert all(f"| {arm} |" in shown for arm in result["arms"])


# What was found ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "ours", "mode"), CONTAINED, ids=_name)
def test_ddc_drifts_a_thousand_times_less_than_adamw(module: Any, ours: str, mode: str) -> None:
    result = _committed(module)
    drifts = (report.largest(result, arm, mode) for arm in ("AdamW", ours))
    assert min(report.ratios(*drifts)) >= 1000


def test_the_radial_coordinate_decides_whether_the_block_survives() -> None:
    result = _committed(sparse_parity)
    assert min(report.final(result, "DDC, linear", "accuracy")) > 0.99
    kept, shed = (np.array(report.final(result, f"DDC, {radial}", "gain")) for radial in ("linear", "log"))
    assert np.all(50.0 * shed < kept) and max(report.final(result, "DDC, log", "accuracy")) < 0.9
    # Decay outweighs the loss on the log scale from √2/2 on.
    assert min(report.final(result, "DDC, log, decay 0.5", "accuracy")) > 0.99
    assert min(report.final(result, "DDC, log, decay 2", "loss")) > 0.6


# What is read at a minimum ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("module", [lemmas, minimum], ids=_name)
def test_reads_of_a_minimum_leave_json_and_figure(module: Any, tmp_path: Path) -> None:
    options = {
        lemmas: ["--toggled", "30"],
        minimum: [
            "--steps", "40", "--modulus", "5", "--width", "4", "--hidden", "8", "--modes", "16", "--pretraining", "2",
            "--warmup", "1", "--twins", "2",
        ],
    }[module]
    result = harness.main(module.STUDY, [*options, "--seeds", "42", "--out", str(tmp_path)])
    assert json.loads((tmp_path / f"{_name(module)}.json").read_text()) == result
    assert (tmp_path / f"{_name(module)}.png").stat().st_size > 1000


def test_the_gauge_holds_what_the_fisher_does_not_see() -> None:
    result = _committed(minimum)
    shares = {arm: minimum.values(result, minimum.ISOLATION, arm, "share") for arm in ("AdamW", "DDC")}
    assert max(shares["DDC"]) < minimum.FLOOR < 1e-3 < min(shares["AdamW"])
    assert max(minimum.values(result, minimum.ISOLATION, "AdamW", "along_over_largest")) < minimum.DEAD
    for arm in minimum.STUDIES[minimum.ORDER][1]:
        assert minimum.values(result, minimum.ORDER, arm, "lowest") == pytest.approx([2.0] * 3, rel=0.01)
    assert max(minimum.values(result, minimum.ONE_STEP, "DDC", "spread")) < 1e-10
    assert min(minimum.values(result, minimum.ONE_STEP, "AdamW", "spread")) > 0.01


def test_a_statement_that_does_not_show_is_listed() -> None:
    result = _committed(lemmas)
    text = lemmas.section(result)
    assert "SGD's run reads k = 2 of all pairs together (NONE of 3 seeds)" in text
    assert "Lemma 17: (i)" in text and "(NONE of 3 seeds); Lemma 17" not in text
    found = result["cells"]["Lemma 17"]["42"] | {"largest_ratio": 1.5}
    assert not lemmas.ROWS[0][2](found)[2]


@pytest.mark.slow_rows("entry")
@pytest.mark.parametrize("share", ["entry", "tensor", "head"])
@pytest.mark.usefixtures("x64")
def test_only_one_second_moment_per_head_needs_no_projection(share: str) -> None:
    """Lemma 10 (ii): the step of a gradient that is horizontal stays so only if both tensors are divided alike."""
    problem = table3.attention(table3.Config())
    params, _, _ = self_tests.start(problem, 42)
    tx = table3.b8("v·(R∘R)", share, project=False)
    step, _ = tx.update(jax.grad(problem.loss)(params), tx.init(params), params)
    apart = max(
        float(jnp.linalg.norm(step[name] - part)) / float(jnp.linalg.norm(step[name]))
        for pair in table3.PAIRS
        for name, part in table3.horizontal(params, step, pair).items()
    )
    assert apart < 1e-12 if share == "head" else apart > 1e-3


# Shampoo and SOAP -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_shampoo_and_soap_do_what_their_papers_say() -> None:
    """The first step of a square matrix: U·Vᵀ for Shampoo, ±1 in the eigenbases for SOAP; Adam's for a vector."""
    gradient = {"w": jax.random.normal(jax.random.key(0), (4, 4)), "b": jnp.array([2.0, -3.0])}
    u, _, vt = np.linalg.svd(gradient["w"])
    steps = {}
    for make, adam in ((kronecker._root, False), (kronecker.basis, True)):
        tx = kronecker.kronecker(make, 1, adam)
        steps[adam], _ = tx.update(gradient, tx.init(gradient))
        np.testing.assert_allclose(steps[adam]["b"], [1.0, -1.0], rtol=1e-6)
    shampoo = np.asarray(steps[False]["w"])
    # The floor of the roots is 1e-6 of the largest eigenvalue.
    np.testing.assert_allclose(shampoo / np.linalg.norm(shampoo), u @ vt / 2.0, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(steps[True]["w"]), 4.0, rtol=1e-5)
    rotation = jnp.asarray(np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0])
    tx = kronecker.kronecker(kronecker._root, 1, False)
    turned, _ = tx.update(gradient | {"w": gradient["w"] @ rotation}, tx.init(gradient))
    np.testing.assert_allclose(turned["w"], steps[False]["w"] @ rotation, atol=1e-9)


def test_shampoo_and_soap_have_twins_inside_quotient() -> None:
    """The committed runs."""
    result = _committed(kronecker)
    for name in kronecker.INNER:
        assert max(kronecker.values(result, f"quotient({name})", "gap")) <= 1e-10
        assert min(kronecker.values(result, name, "gap")) > 1e-3


# Baselines --------------------------------------------------------------------------------------------


def test_one_plus_adamw_is_adamw_on_the_scale_less_one() -> None:
    def loss(scale: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum((scale * kernel - 2.0) ** 2)

    whole = {"norm": {"scale": jnp.array([0.5, 1.5])}, "kernel": jnp.array([1.0, -1.0])}
    less_one = {"norm": {"scale": whole["norm"]["scale"] - 1.0}, "kernel": whole["kernel"]}
    ours = trained(
        baselines.one_plus_adamw(1e-2, lambda path: path == "norm/scale", 0.5),
        lambda p: loss(p["norm"]["scale"], p["kernel"]),
        whole,
        20,
    )[0]
    theirs = trained(
        optax.adamw(1e-2, weight_decay=0.5), lambda p: loss(1.0 + p["norm"]["scale"], p["kernel"]), less_one, 20
    )[0]
    np.testing.assert_allclose(ours["norm"]["scale"], 1.0 + theirs["norm"]["scale"], rtol=1e-5)
    np.testing.assert_allclose(ours["kernel"], theirs["kernel"], rtol=1e-5)


def test_orthogonal_gradient_turns_and_keeps_its_length() -> None:
    weights, gradients = jax.random.normal(jax.random.key(0), (2, 5, 3))
    out, _ = baselines.orthogonal_gradient().update({"w": gradients}, optax.EmptyState(), {"w": weights})
    assert abs(float(jnp.vdot(out["w"], weights))) < 1e-5
    np.testing.assert_allclose(jnp.linalg.norm(out["w"]), jnp.linalg.norm(gradients), rtol=1e-6)
    assert float(jnp.vdot(out["w"], gradients)) > 0


# The table --------------------------------------------------------------------------------------------


def test_every_committed_json_has_a_section() -> None:
    assert {path.stem for path in tables.RESULTS.glob("*.json")} <= {section.name for section in tables.SECTIONS}


def test_the_table_says_when_a_finding_does_not_show() -> None:
    result = _committed(layernorm_scale)
    swapped = report.containment(result, "DDC", "AdamW", "drift", "log γ")
    assert "1,000 times or more on NONE of 3 seeds" in swapped and "matched on NONE of 3 seeds" in swapped
    assert "1,000 times or more on all 3 seeds" in report.containment(result, "AdamW", "DDC", "drift", "log γ")


# The twins benchmark ------------------------------------------------------------------------------


SMALL = example.Config(steps=10, modulus=7, width=8, heads=2)


def test_all_its_gauges_are_symmetries(x64: None) -> None:
    params, data = modular.init(SMALL, jax.random.key(0)), example.pairs(SMALL, 0)
    read = functools.partial(modular.logits, SMALL)
    group = go.product(modular.gauges()[:-1])
    moved = group.act(group.sample(jax.random.key(1), params), params)
    np.testing.assert_allclose(read(moved, data[2]), read(params, data[2]), rtol=1e-11, atol=1e-12)
    assert max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (moved, params)), strict=True)) > 0.3


def test_the_mask_is_none_and_the_last_position_is_read() -> None:
    """A change of the second number reaches the logits through the first block's first position too."""
    params, tokens = modular.init(SMALL, jax.random.key(0)), jnp.array([[1, 2, 7]])
    whole = modular.logits(SMALL, params, tokens)
    kept = {i: jax.tree.map(jnp.zeros_like, block) for i, block in params["blocks"].items()}
    blind = modular.logits(SMALL, params | {"blocks": kept}, tokens)
    alone = modular.rms_norm(params["norm"], params["embed"]["embedding"][7] + params["pos"]["embedding"][2])
    np.testing.assert_allclose(blind[0], alone @ params["lm_head"]["kernel"], rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(whole - blind).max()) > 0.01


def test_pairs_are_split_and_sums_are_modulo() -> None:
    tokens, sums, held_out, answers = (np.asarray(x) for x in example.pairs(SMALL, 3))
    assert len(tokens) == int(0.4 * 49) and len(tokens) + len(held_out) == 49
    assert len({tuple(x) for x in np.concatenate([tokens, held_out]).tolist()}) == 49
    assert np.array_equal(np.concatenate([sums, answers]), np.concatenate([tokens, held_out])[:, :2].sum(1) % 7)
    assert set(tokens[:, 2].tolist()) == {7}


@pytest.mark.slow_rows("Adam")
@pytest.mark.parametrize("name", ["Adam", pytest.param("Muon", marks=pytest.mark.slow)])
def test_twins_part_plain_and_stay_inside_quotient(name: str) -> None:
    plain, ours = (example.cell(SMALL, arm, 42) for arm in (name, f"quotient({name})"))
    assert plain["float32"]["same"]["logits"] == ours["float32"]["same"]["logits"] == [0.0] * 3
    plain, ours = (cell["float64"] for cell in (plain, ours))
    for kind in ("rotated", "every symmetry"):
        assert max(ours[kind]["logits"]) < 1e-11
    assert plain["every symmetry"]["logits"][-1] > 1e-3
    assert (plain["rotated"]["logits"][-1] > 1e-4) == (name == "Adam")  # whole-matrix Muon commutes with rotations
    assert 1e-9 < plain["noise"]["logits"][0] < 1e-5


def test_one_scalar_for_all_is_adam_on_one_number() -> None:
    """With a single entry, the shared second moment is that entry's."""
    value = {"x": jnp.float32(3.0)}
    ours, adam = baselines.shared_scalar_adam(0.1), example.PLAIN["Adam"]()
    state, theirs = ours.init(value), adam.init(value)
    for gradient in (1.0, -0.3, 2.0):
        step, state = ours.update({"x": jnp.float32(gradient)}, state, value)
        other, theirs = adam.update({"x": jnp.float32(gradient)}, theirs, value)
        np.testing.assert_allclose(step["x"], 100.0 * other["x"], rtol=1e-5)
