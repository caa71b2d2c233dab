"""The examples do what they print: a resumed run is an unbroken one, the demo's twins stay together."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from examples import (
    data,
    demo,
    live_metrics,
    lora,
    merge,
    quantize,
    released,
    train_linen,
    train_nnx,
)
from examples.studies import harness, packed, probe, self_tests, tables
from examples.studies.table3 import Config, build
from models import lm

TINY = ["--batch", "2", "--length", "8", "--width", "8", "--layers", "1"]


@pytest.fixture(autouse=True, scope="module")
def _compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The three runs of one example compile the same programs: keep these on disk for the length of this file."""
    compilation_cache.reset_cache()
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.3,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(32, 127)) * 30)
    return path


def _result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


@pytest.mark.parametrize(
    "main", [train_nnx.main, pytest.param(train_linen.main, marks=pytest.mark.slow)], ids=["nnx", "linen"]
)
def test_killed_and_resumed_is_bit_equal(main: Callable[..., Any], tmp_path: Path, text: Path) -> None:
    options = [*TINY, "--steps", "6", "--save-every", "2", "--data", str(text)]
    main([*options, "--out", str(tmp_path / "whole")])
    assert main([*options, "--out", str(tmp_path / "broken"), "--stop-after", "3"]) is None
    assert not (tmp_path / "broken" / "result.json").exists()
    main([*options, "--out", str(tmp_path / "broken")])
    whole = _result(tmp_path / "whole")
    assert whole == _result(tmp_path / "broken")
    assert len(whole["losses"]) == 6 and len(set(whole["losses"])) == 6
    assert (tmp_path / "whole" / "loss.png").stat().st_size > 1000


@pytest.mark.slow
def test_records_of_a_killed_run_are_those_of_a_whole_one(tmp_path: Path, text: Path) -> None:
    options = [*TINY, "--steps", "6", "--save-every", "2", "--every", "2", "--data", str(text)]
    whole = live_metrics.main([*options, "--out", str(tmp_path / "whole")])
    assert live_metrics.main([*options, "--out", str(tmp_path / "broken"), "--stop-after", "3"]) is None
    assert live_metrics.main([*options, "--out", str(tmp_path / "broken")]) == whole
    files = [tmp_path / name / "adamw.jsonl" for name in ("whole", "broken")]
    assert files[0].read_text() == files[1].read_text()
    assert [row["step"] for row in whole or []] == [0, 2, 4]
    assert (tmp_path / "whole" / "metrics.png").stat().st_size > 1000


@pytest.mark.slow
def test_lora_fills_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [f"2 | {start} | quotient_adamw | *" for start in ("balanced", "badly scaled")]
    options = ["--only", "before", *cells, "--seeds", "1", "--steps", "3", "--pretraining", "2"]
    result = harness.main(lora.STUDY, [*options, "--out", str(tmp_path)])
    losses = [lora.swept((2, start, "quotient_adamw")).losses(result) for start in ("balanced", "badly scaled")]
    common = set.intersection(*map(set, losses))
    assert len(common) >= 4, "two weight sets of one function"
    assert max(abs(losses[0][rate][0] - losses[1][rate][0]) for rate in common) < 1e-3
    assert (tmp_path / "lora.png").stat().st_size > 1000
    assert "badly scaled" in capsys.readouterr().out


def test_batches_are_found_by_number_and_held_out_text_is_unseen(text: Path) -> None:
    train, held_out = data.batches(8, 2, text)
    again, _ = data.batches(8, 2, text)
    np.testing.assert_array_equal(train[1000], again[1000])
    assert train[0].shape == held_out[0].shape == (2, 9)
    assert train[0].dtype == np.int32
    with pytest.raises(ValueError, match="too few"):
        data.batches(64, 16, text)


def test_default_text_is_the_standard_library() -> None:
    assert b"def " in data.read_bytes()[:100_000].tobytes()
    assert b"statement" in data.read_prose().tobytes()


def test_demo_writes_what_it_says(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = demo.main([*TINY, "--steps", "11", "--out", str(tmp_path), "--data", str(text)])
    assert set(runs) == {"adamw", "quotient(adamw)", "ddc_adamw"}
    assert (tmp_path / "twins.png").stat().st_size > 1000
    written = json.loads((tmp_path / "twins.json").read_text())
    for ours in ("quotient(adamw)", "ddc_adamw"):
        assert written[ours]["gap"] == runs[ours]["gap"]
        assert written[ours]["gap"][10] < written["adamw"]["gap"][10]
    assert demo.table(runs) in capsys.readouterr().out
    assert [line.split() for line in demo.table(runs).splitlines()][1][1:5] == ["step", "1", "step", "10"]


def test_self_tests_tell_readings_of_the_reference_apart() -> None:
    shift, printed = (self_tests.cell(Config(), row, 42)["float64"] for row in ("CE shift, bias", "B.8, |v·R|"))
    assert len(shift["ours"]) == 21 and shift["ours"][-1] < 1e-8 < 1e-3 < shift["adamw"][-1]
    assert printed["ours"][1] < 1e-8 < 1e-3 < printed["ours"][-1]


def test_every_gauge_of_the_self_tests_makes_one_run_of_twins() -> None:
    """The committed runs."""
    result = json.loads((tables.RESULTS / "self_tests.json").read_text())
    assert result["arms"] == list(build(Config()))
    for row in result["arms"]:
        ours, adamw = (max(self_tests.last(result, row, "float64", which)) for which in ("ours", "adamw"))
        assert (ours < 1e-13) == (row != "B.8, |v·R|") and adamw > 1e-3
    assert {"SwiGLU rescale", "rotation, grouped queries", "torus of rotary heads"} < set(result["arms"])


@pytest.mark.slow
def test_packed_heads_train(tmp_path: Path) -> None:
    options = ["--only", "plain | *", "packed | *", "--seeds", "42", "--steps", "2", "--out", str(tmp_path)]
    result = harness.main(packed.STUDY, options)
    counts = {key.split(" | ")[0]: cell["parameters"] for key, cell in result["cells"].items()}
    assert counts["plain"] - counts["packed"] == 2 * 2 * 4 * 16**2
    assert (tmp_path / "packed.png").stat().st_size > 1000


def test_packed_heads_end_where_plain_ones_do() -> None:
    """The committed runs: within the standard deviation over three seeds."""
    result = json.loads((tables.RESULTS / "packed.json").read_text())
    found = packed.sweeps(result)
    plain, own = (np.array(found[arm][harness.best(found[arm])]) for arm in ("plain", "packed"))
    assert len(own) == 3 and abs(own.mean() - plain.mean()) <= np.hypot(own.std(), plain.std())


@pytest.mark.slow
def test_networks_are_merged(tmp_path: Path) -> None:
    options = ["--only", "digits: seeds 42, 142", "digits: fine-tunings of 42", "--steps", "20"]
    result = harness.main(merge.STUDY, [*options, "--out", str(tmp_path)])
    assert len(result["cells"]) == 2
    assert all(cell["all gauges"]["apart"] < cell["plain"]["apart"] for cell in result["cells"].values())
    assert (tmp_path / "merge.png").stat().st_size > 1000 and "*all gauges*" in merge.section(result).lower()


def test_rotations_lower_barriers_that_permutations_leave() -> None:
    """The committed runs: between seeds of both decoders, all pairs."""
    result = json.loads((tables.RESULTS / "merge.json").read_text())
    for name in ("gpt", "llama"):
        found = merge.barriers(result, name, "seeds")
        assert len(found["plain"]) == 3 and np.all(found["all gauges"] < 0.7 * found["permutations"])
        assert np.all(found["all gauges"] < 0.7 * found["plain"])


@pytest.mark.slow
def test_networks_are_rounded(tmp_path: Path) -> None:
    options = ["--only", "muon: 42", "--steps", "10", "--searched", "2"]
    result = harness.main(quantize.STUDY, [*options, "--out", str(tmp_path)])
    assert len(result["cells"]) == 1
    assert (tmp_path / "quantize.png").stat().st_size > 1000 and "QuaRot" in quantize.section(result)


def test_the_network_that_rounds_is_the_model() -> None:
    """Without rounding it computes what `models.lm` does; a grid of 2ᵇ − 1 levels has no others."""
    params, loss = lm.params_and_loss(quantize.CONFIG, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 256)
    np.testing.assert_allclose(quantize.loss(params, tokens[None], (16, 16)), loss(params, tokens), rtol=1e-6)
    rounded = quantize.rounded(jax.random.normal(jax.random.key(2), (50, 3)), 0, jnp.asarray(3))
    assert all(len(np.unique(np.asarray(column).round(5))) <= 7 for column in rounded.T)
    assert float(quantize.loss(params, tokens[None], (2, 2))) != float(loss(params, tokens))


def test_rotations_help_where_folding_leaves_principal_axes() -> None:
    """The committed runs: with planted outliers and four-bit activations, all seeds of both optimizers."""
    result = json.loads((tables.RESULTS / "quantize.json").read_text())
    for name in quantize.RATES:
        found = quantize.rises(result, name, "planted", "W4A4")
        assert len(found["plain"]) == 5 and np.all(found["R1"] < found["folded"])
        assert np.all(found["folded"] < found["plain"])


def test_rotations_spread_an_outlier_of_the_stream() -> None:
    """The committed runs: four-bit activations of networks that grew with one, where folding does not help."""
    result = json.loads((tables.RESULTS / "quantize.json").read_text())
    for name in quantize.RATES:
        found = quantize.rises(result, name, "grown", "W4A4")
        assert np.all(found["R1"] < found["plain"]) and np.mean(found["folded"]) > np.mean(found["plain"])


@pytest.mark.slow
def test_twins_are_probed(tmp_path: Path) -> None:
    options = ["--only", "twins of 42", "--steps", "10"]
    result = harness.main(probe.STUDY, [*options, "--out", str(tmp_path)])
    assert (tmp_path / "probe.png").stat().st_size > 1000 and "Twins:" in probe.section(result)


def test_a_probe_is_carried_to_a_twin() -> None:
    """The committed runs: exactly to a twin, by alignment and by canonical weights; not by permutations."""
    result = json.loads((tables.RESULTS / "probe.json").read_text())
    found = probe.accuracies(result, "twins")
    for arm in ("all gauges", "canonical"):
        assert np.all(np.abs(found[arm] - found["trained there"]) <= 2e-3)
    assert np.all(found["permutations"] < 0.8 * found["trained there"])
    assert len(probe.accuracies(result, "seeds")["as it is"]) == 3


@pytest.mark.slow
def test_the_demo_keeps_its_promise(tmp_path: Path) -> None:
    runs = demo.main(["--out", str(tmp_path)])
    theirs = runs["adamw"]
    for ours in (runs["quotient(adamw)"], runs["ddc_adamw"]):
        assert ours["gap"][100] <= 1e-3 * theirs["gap"][100]
        assert max(ours["drift"].values()) <= 1e-5 < max(theirs["drift"].values())
        # Not bought with a worse model.
        assert max(ours["validation"]) <= 1.02 * min(theirs["validation"])


def test_the_table_of_released_architectures_is_its_json() -> None:
    results = json.loads((released.RESULT).read_text())
    assert released.RESULT.with_suffix(".md").read_text() == released.markdown(results)
    assert len([own for own in results.values() if own.get("change", 1.0) < 1e-9]) >= 8
