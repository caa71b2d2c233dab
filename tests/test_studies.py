"""Studies run and resume, baselines do what they say, and the committed table says what the committed runs found."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import (
    baselines,
    diagonal_network,
    layernorm_scale,
    radial_equilibrium,
    relu_rescale,
    report,
    row_shift,
    sparse_parity,
    study,
    tables,
)

TINY: dict[Any, list[str]] = {
    row_shift: ["--modulus", "5", "--width", "8", "--hidden", "8", "--heads", "2"],
    relu_rescale: ["--samples", "8", "--inputs", "3", "--hidden", "4", "--outputs", "2"],
    layernorm_scale: ["--samples", "8", "--channels", "4", "--outputs", "2"],
    diagonal_network: ["--samples", "16", "--modes", "8", "--nonzero", "2"],
    sparse_parity: ["--bits", "4", "--hidden", "8"],
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


@pytest.mark.parametrize("module", TINY, ids=_name)
def test_a_tiny_study_leaves_json_figure_and_table(
    module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = module.main([*TINY[module], "--steps", "3", "--seeds", "42", "--out", str(tmp_path)])
    assert json.loads((tmp_path / f"{_name(module)}.json").read_text()) == result
    assert (tmp_path / f"{_name(module)}.png").stat().st_size > 1000
    assert all(np.isfinite(list(cells["42"]["final"].values())).all() for cells in result["cells"].values())
    shown = capsys.readouterr().out
    assert all(f"| {arm} |" in shown for arm in result["arms"])


def test_a_killed_study_resumes_to_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [*TINY[diagonal_network], "--steps", "3", "--seeds", "42", "142"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    diagonal_network.main([*options, "--out", str(whole)])
    assert diagonal_network.main([*options, "--out", str(broken), "--stop-after", "3"]) is None
    halfway = json.loads((broken / "diagonal_network.json").read_text())
    assert sum(len(cells) for cells in halfway["cells"].values()) == 3
    made = _count_calls(monkeypatch, study, "run_cell")
    diagonal_network.main([*options, "--out", str(broken)])
    assert len(made) == 2 * len(halfway["arms"]) - 3
    name = "diagonal_network.json"
    assert (broken / name).read_text() == (whole / name).read_text()
    assert not list(broken.glob("*.tmp"))


def _count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[None]:
    calls: list[None] = []
    function = getattr(module, name)

    def counted(*args: Any) -> Any:
        calls.append(None)
        return function(*args)

    monkeypatch.setattr(module, name, counted)
    return calls


def test_runs_of_other_sizes_are_not_mixed(tmp_path: Path) -> None:
    options = [*TINY[diagonal_network], "--seeds", "42", "--out", str(tmp_path), "--stop-after", "1"]
    diagonal_network.main([*options, "--steps", "1"])
    with pytest.raises(ValueError, match=r"other settings(.|\n)*found(.|\n)*expected(.|\n)*remedy"):
        diagonal_network.main([*options, "--steps", "2"])


@pytest.mark.parametrize("module", [*TINY, radial_equilibrium], ids=_name)
def test_committed_runs_are_those_of_the_defaults(module: Any) -> None:
    result = _committed(module)
    assert result["settings"] == dataclasses.asdict(module.Config())
    assert result["seeds"] == list(study.SEEDS)
    assert all(list(cells) == [str(seed) for seed in study.SEEDS] for cells in result["cells"].values())


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


def test_linear_settles_where_predicted_and_log_collapses(tmp_path: Path) -> None:
    options = ["--steps", "800", "--learning-rate", "0.01", "--b2", "0.95", "--seeds", "42"]
    result = radial_equilibrium.main([*options, "--out", str(tmp_path)])
    assert result is not None
    assert max(abs(x) for errors in radial_equilibrium.errors(result).values() for x in errors) < 0.02
    for degree in radial_equilibrium.DEGREES:
        for match in radial_equilibrium.MATCHES:
            arm = radial_equilibrium.arm_name("log", degree, match)
            assert max(report.final(result, arm, f"log_s{degree}")) < -5
    for slopes in radial_equilibrium.falls(result).values():
        np.testing.assert_allclose(slopes, 1.0, rtol=0.03)  # of first order in the rate


@pytest.mark.usefixtures("x64")
def test_without_rounding_the_shift_gauge_changes_no_loss() -> None:
    config = row_shift.Config(steps=30, modulus=5, width=8, hidden=8, heads=2)
    case = row_shift.build(config)
    start, data = case.make(42)
    observe, ends = jax.jit(case.observe), {}
    for name in ("AdamW", "DDC"):
        arm = case.arms[name]
        params, _ = study.advance(case, arm)(start, jax.jit(arm.tx.init)(start), data, 0, config.steps)
        ends[name] = observe(start, params, data)
    assert ends["DDC"]["drift"] < 1e-12 < 1e-3 < ends["AdamW"]["drift"]
    np.testing.assert_allclose(ends["DDC"]["train_loss"], ends["AdamW"]["train_loss"], rtol=1e-10)


# Baselines --------------------------------------------------------------------------------------------


def test_z_loss_pulls_on_the_level_that_cross_entropy_does_not_see() -> None:
    logits = jax.random.normal(jax.random.key(0), (4, 7)) + 3.0

    def slope(loss: Callable[[jax.Array], jax.Array]) -> float:
        return float(jax.grad(lambda shift: loss(logits + shift))(0.0))

    labels = jnp.arange(4)
    assert slope(lambda x: baselines.z_loss(x, 1e-4)) > 1e-5
    assert abs(slope(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, labels).mean())) < 1e-6
    np.testing.assert_allclose(baselines.z_loss(jnp.zeros((2, 3)), 0.5), 0.5 * np.log(3.0) ** 2, rtol=1e-6)


def test_one_plus_adamw_is_adamw_on_the_scale_less_one() -> None:
    def loss(scale: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum((scale * kernel - 2.0) ** 2)

    whole = {"norm": {"scale": jnp.array([0.5, 1.5])}, "kernel": jnp.array([1.0, -1.0])}
    less_one = {"norm": {"scale": whole["norm"]["scale"] - 1.0}, "kernel": whole["kernel"]}
    ours = _train(
        baselines.one_plus_adamw(1e-2, lambda path: path == "norm/scale", 0.5),
        lambda p: loss(p["norm"]["scale"], p["kernel"]),
        whole,
    )
    theirs = _train(
        optax.adamw(1e-2, weight_decay=0.5), lambda p: loss(1.0 + p["norm"]["scale"], p["kernel"]), less_one
    )
    np.testing.assert_allclose(ours["norm"]["scale"], 1.0 + theirs["norm"]["scale"], rtol=1e-5)
    np.testing.assert_allclose(ours["kernel"], theirs["kernel"], rtol=1e-5)


def _train(tx: optax.GradientTransformation, loss: Callable[[Any], jax.Array], params: Any) -> Any:
    state = tx.init(params)
    for _ in range(20):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_orthogonal_gradient_turns_and_keeps_its_length() -> None:
    weights, gradients = jax.random.normal(jax.random.key(0), (2, 5, 3))
    out, _ = baselines.orthogonal_gradient().update({"w": gradients}, optax.EmptyState(), {"w": weights})
    assert abs(float(jnp.vdot(out["w"], weights))) < 1e-5
    np.testing.assert_allclose(jnp.linalg.norm(out["w"]), jnp.linalg.norm(gradients), rtol=1e-6)
    assert float(jnp.vdot(out["w"], gradients)) > 0


# The table --------------------------------------------------------------------------------------------


def test_the_committed_table_is_that_of_the_committed_runs() -> None:
    assert (tables.RESULTS / "README.md").read_text() == tables.page(tables.RESULTS)


def test_every_committed_json_has_a_section() -> None:
    assert {path.stem for path in tables.RESULTS.glob("*.json")} <= {section.name for section in tables.SECTIONS}


def test_the_table_says_when_a_finding_does_not_show() -> None:
    result = _committed(layernorm_scale)
    swapped = report.containment(result, "DDC", "AdamW", "drift", "log γ")
    assert "1,000 times or more on NONE of 3 seeds" in swapped and "matched on NONE of 3 seeds" in swapped
    assert "1,000 times or more on all 3 seeds" in report.containment(result, "AdamW", "DDC", "drift", "log γ")


def test_tables_writes_the_page(tmp_path: Path) -> None:
    name = "layernorm_scale.json"
    (tmp_path / name).write_text((tables.RESULTS / name).read_text())
    tables.main(["--results", str(tmp_path)])
    page = (tmp_path / "README.md").read_text()
    assert "C.3" in page and "C.2" not in page
