"""Studies run, baselines do what they say, and the committed table says what the committed runs found."""

import functools
import json
from collections.abc import Callable
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
    grok_readings,
    harness,
    kronecker,
    layernorm_scale,
    lemmas,
    minimum,
    radial_equilibrium,
    relu_rescale,
    report,
    row_shift,
    self_tests,
    sparse_parity,
    table3,
    tables,
)
from models import grokking
from models.grokking import rotations

TINY: dict[Any, list[str]] = {
    row_shift: ["--modulus", "5", "--width", "8", "--hidden", "8", "--heads", "2"],
    relu_rescale: ["--samples", "8", "--inputs", "3", "--hidden", "4", "--outputs", "2"],
    layernorm_scale: ["--samples", "8", "--channels", "4", "--outputs", "2"],
    diagonal_network: ["--samples", "16", "--modes", "8", "--nonzero", "2"],
    sparse_parity: ["--bits", "4", "--hidden", "8"],
    depth8: ["--p", "5", "--width", "8", "--heads", "2", "--layers", "2", "--sweep-steps", "2"],
    depth24: ["--p", "5", "--width", "8", "--heads", "2", "--layers", "2", "--sweep-steps", "2"],
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


def test_a_gauge_takes_from_the_scaled_polar_step_what_is_along_its_orbit_and_nothing_else() -> None:
    config = depth8.Config(p=7, width=8, heads=2, layers=2)
    case = depth8.build(config, dict.fromkeys(depth8.BASES, 1e-3))
    start, data = case.make(1)
    gradient = jax.jit(jax.grad(case.loss))(start, data)

    def step_of(tx: optax.GradientTransformation, gradient: Any) -> Any:
        return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(gradient, start)

    steps = [step_of(case.arms[arm].tx, gradient) for arm in (depth8.POLAR, depth8.TORUS, depth8.FULL_ROTATION)]
    for step, full in zip(steps[1:], (False, True), strict=True):
        expected = step_of(go.gauge_project(rotations(config.network, full), "update"), steps[0])
        assert _apart(step, expected) < 1e-4 < 1e-2 < _apart(step, steps[0])
    attention = [x["blocks"][0]["attn"]["query"]["kernel"] for x in steps[1:]]
    assert _apart(*attention) > 1e-2
    assert _apart(*(x["blocks"][0]["attn"]["value"]["kernel"] for x in steps[1:])) < 1e-6


def _apart(one: Any, other: Any) -> float:
    return max(
        float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def test_the_fisher_in_the_logits_is_the_mean_over_labels_without_the_shift() -> None:
    c = depth8.Config(p=11, width=8, heads=2, layers=2).network
    start, data = grok_readings.make(c, 1)
    start["lm_head"]["kernel"] *= 4.0
    read = jax.jit(functools.partial(depth8.observe, c=c))(start, start, data)
    tokens = np.stack(np.divmod(np.arange(121), 11), 1)
    inside = np.asarray(grokking.features(c, start, tokens)["streams"][1], np.float64)
    exponents = np.exp(inside @ np.asarray(start["lm_head"]["kernel"], np.float64))
    q = exponents / exponents.sum(1, keepdims=True)
    scores = np.eye(11) - q[:, None]  # per pair and label, the gradient of the label's log-probability
    fisher = np.einsum("nl,nli,nlj->ij", q, scores, scores) / 121
    shift = np.ones((11, 11)) / 11
    np.testing.assert_allclose(read["fisher"], np.linalg.eigvalsh(fisher + shift)[0], rtol=1e-3)
    sizes = np.linalg.svd(inside, compute_uv=False)
    np.testing.assert_allclose(read["activations"], sizes[-1] / 11.0, rtol=1e-3)


def test_a_swept_rate_is_the_rate_of_the_run(tmp_path: Path) -> None:
    """A sweep has the rate in the optimizer's state, a run has it in the program: both train alike."""
    options = [*TINY[depth8], "--p", "11", "--steps", "40", "--sweep-steps", "40", "--seeds", "42"]
    result = harness.main(depth8.STUDY, [*options, "--only", "rates*", f"{depth8.POLAR} | *", "--out", str(tmp_path)])
    scores = result["rates"]["scaled polar"]
    accuracy = result["cells"][depth8.POLAR]["42"]["curves"]["test_accuracy"]
    assert max(scores.values()) == pytest.approx(np.mean(accuracy), abs=2e-3) and len(set(accuracy)) > 1
    assert list(scores) == [f"{rate:g}" for rate in grok_readings.RATES] and len(set(scores.values())) > 1
    assert not list(tmp_path.glob("*.npz"))


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
    result = harness.main(radial_equilibrium.STUDY, [*options, "--out", str(tmp_path)])
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
        params, _ = harness.advance(case, arm)(start, jax.jit(arm.tx.init)(start), data, 0, config.steps)
        ends[name] = observe(start, params, data)
    assert ends["DDC"]["drift"] < 1e-12 < 1e-3 < ends["AdamW"]["drift"]
    np.testing.assert_allclose(ends["DDC"]["train_loss"], ends["AdamW"]["train_loss"], rtol=1e-10)


# What is read at a minimum ----------------------------------------------------------------------------


def test_what_leaks_lies_where_the_fisher_is_zero() -> None:
    config = minimum.Config(steps=12, modulus=5, width=4, hidden=8)
    adamw, ddc = (minimum.isolation(config, arm, 42) for arm in ("AdamW", "DDC"))
    assert ddc["share"] < minimum.FLOOR < 1e-6 < adamw["share"]
    assert adamw["along_over_largest"] < minimum.DEAD and adamw["kernel"] >= 4  # one per channel
    assert adamw["share_of_kernel"] >= (1 - 1e-6) * adamw["share"]


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
