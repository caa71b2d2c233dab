"""The examples do what they print: a resumed run is an unbroken one, the demo's twins stay together."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from examples import (
    data,
    demo,
    lora,
    merge,
    train_linen,
    train_nnx,
)
from examples.studies import harness, packed, probe, self_tests, tables
from examples.studies.table3 import Config, build

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


def test_every_gauge_of_the_self_tests_makes_one_run_of_twins() -> None:
    """The committed runs."""
    result = json.loads((tables.RESULTS / "self_tests.json").read_text())
    assert result["arms"] == list(build(Config()))
    for row in result["arms"]:
        ours, adamw = (max(self_tests.last(result, row, "float64", which)) for which in ("ours", "adamw"))
        assert (ours < 1e-13) == (row != "B.8, |v·R|") and adamw > 1e-3
    assert {"SwiGLU rescale", "rotation, grouped queries", "torus of rotary heads"} < set(result["arms"])


def test_packed_heads_end_where_plain_ones_do() -> None:
    """The committed runs: within the standard deviation over three seeds."""
    result = json.loads((tables.RESULTS / "packed.json").read_text())
    found = packed.sweeps(result)
    plain, own = (np.array(found[arm][harness.best(found[arm])]) for arm in ("plain", "packed"))
    assert len(own) == 3 and abs(own.mean() - plain.mean()) <= np.hypot(own.std(), plain.std())


def test_rotations_lower_barriers_that_permutations_leave() -> None:
    """The committed runs: between seeds of both decoders, all pairs."""
    result = json.loads((tables.RESULTS / "merge.json").read_text())
    for name in ("gpt", "llama"):
        found = merge.barriers(result, name, "seeds")
        assert len(found["plain"]) == 3 and np.all(found["all gauges"] < 0.7 * found["permutations"])
        assert np.all(found["all gauges"] < 0.7 * found["plain"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_rotations_help_where_outliers_are(name: str) -> None:
    """The stored runs, four-bit activations: with planted outliers, folding helps too; not with a grown one."""
    cells = json.loads((tables.RESULTS / "quantize.json").read_text())["cells"]

    def rises(start: str, arm: str) -> np.ndarray:
        return np.array([x[start]["arms"][arm]["W4A4"] for key, x in cells.items() if key.startswith(f"{name}: ")])

    assert np.all(rises("planted", "R1") < rises("planted", "folded")) and len(rises("planted", "R1")) == 5
    assert np.all(rises("planted", "folded") < rises("planted", "plain"))
    assert np.all(rises("grown", "R1") < rises("grown", "plain"))
    assert np.mean(rises("grown", "folded")) > np.mean(rises("grown", "plain"))


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


TINY_STUDIES: dict[Any, tuple[list[str], str]] = {
    packed: (["--only", "plain | *", "packed | *", "--seeds", "42", "--steps", "2"], "packed"),
    merge: (["--only", "digits: seeds 42, 142", "digits: fine-tunings of 42", "--steps", "20"], "all gauges"),
    probe: (["--only", "twins of 42", "--steps", "10"], "twins:"),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", TINY_STUDIES, ids=lambda module: module.__name__.split(".")[-1])
def test_a_tiny_study_leaves_figure_and_section(module: Any, tmp_path: Path) -> None:
    options, said = TINY_STUDIES[module]
    result = harness.main(module.STUDY, [*options, "--out", str(tmp_path)])
    assert (tmp_path / f"{module.STUDY.name}.png").stat().st_size > 1000 and said in module.section(result).lower()
