"""Studies run, baselines do what they say, and the committed table says what the committed runs found."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.studies import (
    baselines,
    depth8,
    depth24,
    diagonal_network,
    harness,
    layernorm_scale,
    minimum,
    relu_rescale,
    report,
    row_shift,
    sparse_parity,
    tables,
)
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
def test_reads_of_a_minimum_leave_json_and_figure(tmp_path: Path) -> None:
    options = [
        "--steps", "40", "--modulus", "5", "--width", "4", "--hidden", "8", "--modes", "16", "--pretraining", "2",
        "--warmup", "1", "--twins", "2",
    ]
    result = harness.main(minimum.STUDY, [*options, "--seeds", "42", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "minimum.json").read_text()) == result
    assert (tmp_path / "minimum.png").stat().st_size > 1000


def test_the_gauge_holds_what_the_fisher_does_not_see() -> None:
    result = _committed(minimum)
    shares = {arm: minimum.values(result, minimum.ISOLATION, arm, "share") for arm in ("AdamW", "DDC")}
    assert max(shares["DDC"]) < minimum.FLOOR < 1e-3 < min(shares["AdamW"])
    assert max(minimum.values(result, minimum.ISOLATION, "AdamW", "along_over_largest")) < minimum.DEAD
    for arm in minimum.STUDIES[minimum.ORDER][1]:
        assert minimum.values(result, minimum.ORDER, arm, "lowest") == pytest.approx([2.0] * 3, rel=0.01)
    assert max(minimum.values(result, minimum.ONE_STEP, "DDC", "spread")) < 1e-10
    assert min(minimum.values(result, minimum.ONE_STEP, "AdamW", "spread")) > 0.01


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
