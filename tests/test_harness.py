"""The harness of all studies: a killed study goes on, runs of other settings are refused, and stored results fit."""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
from benchmarks import (
    accelerator,
    certificates,
    counts,
    rates,
    render,
    tuned,
)
from examples.studies import diagonal_network, harness, tables

BENCHMARKS = Path(certificates.__file__).parent / "results"
TINY = ["--samples", "16", "--modes", "8", "--nonzero", "2", "--seeds", "42"]


# A study that is made up --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes."""

    rate: float = 1.0
    doubled: bool = False


def made_up(made: list[Any], partial: bool = False) -> harness.Study:
    """Two arms; notes what is made."""

    def cell(c: Config, arm: str, seed: int) -> Any:
        made.append((arm, seed))
        return {"loss": c.rate * seed / 3.0, "curve": np.arange(3.0) * (1 + c.doubled)}

    return harness.Study(
        "help", "tiny", harness.by_seed(["a", "b"], cell), lambda result: "a section",
        lambda result, path: path.write_bytes(b"png"), config=Config(), seeds=(1, 2), digits=3, partial=partial,
    )


def test_a_stopped_study_goes_on_and_is_drawn_when_it_is_done(tmp_path: Path) -> None:
    made: list[Any] = []
    study, out = made_up(made), ["--out", str(tmp_path)]
    harness.main(study, [*out, "--stop-after", "3"])
    assert made == [("a", 1), ("a", 2), ("b", 1)] and not (tmp_path / "tiny.png").exists()
    result = harness.main(study, out)
    assert made[3:] == [("b", 2)] and (tmp_path / "tiny.png").exists()
    assert result["cells"]["b"]["2"] == {"loss": 0.667, "curve": [0.0, 1.0, 2.0]}
    assert json.loads((tmp_path / "tiny.json").read_text()) == result
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.json", "tiny.png"}
    harness.main(study, [*out, "--show", "--rate", "2"])  # whatever made it
    assert len(made) == 4


def test_runs_of_other_sizes_or_seeds_are_not_mixed(tmp_path: Path) -> None:
    study, out = made_up([]), ["--out", str(tmp_path)]
    harness.main(study, out)
    with pytest.raises(ValueError, match=r"other settings(.|\n)*found(.|\n)*expected(.|\n)*remedy"):
        harness.main(study, [*out, "--rate", "2", "--doubled"])
    with pytest.raises(ValueError, match="other seeds"):
        harness.main(study, [*out, "--seeds", "1"])


def test_some_cells_can_be_made_and_a_name_that_fits_none_is_refused(tmp_path: Path) -> None:
    made: list[Any] = []
    out = ["--out", str(tmp_path)]
    harness.main(made_up(made, partial=True), [*out, "--only", "b | *", "--doubled"])
    assert made == [("b", 1), ("b", 2)] and (tmp_path / "tiny.png").exists()
    with pytest.raises(SystemExit, match=r"no cell is called \['c'\]; cells are \['a \| 1'"):
        harness.main(made_up([]), [*out, "--only", "c", "--doubled"])


def test_a_cell_that_another_process_makes_is_left_to_it(tmp_path: Path) -> None:
    """A process that holds a cell's lock is met half-way; the other cells are made."""
    made: list[Any] = []
    name = f"tiny-{harness.zlib.crc32(b'a | 2'):08x}.lock"
    with harness._locked(tmp_path / name) as held:
        assert held
        result = harness.main(made_up(made), ["--out", str(tmp_path)])
        assert made == [("a", 1), ("b", 1), ("b", 2)] and list(result["cells"]["a"]) == ["1"]
    harness.main(made_up(made), ["--out", str(tmp_path)])
    assert made[3:] == [("a", 2)]


def test_a_training_run_that_is_killed_half_way_ends_with_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*TINY, "--steps", "6", "--only", "AdamW | *"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    harness.main(diagonal_network.STUDY, [*options, "--out", str(whole)])
    monkeypatch.setattr(harness, "SAVE_EVERY", 0.0)
    advance = harness.advance

    def killed_at_the_fourth(*args: Any) -> Any:
        go_on = advance(*args)

        def step(params: Any, state: Any, data: Any, first: int, last: int) -> Any:
            if first == 3:
                raise KeyboardInterrupt
            return go_on(params, state, data, first, last)

        return step

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(harness, "advance", killed_at_the_fourth)
        harness.main(diagonal_network.STUDY, [*options, "--out", str(broken)])
    (saved,) = broken.glob("*.npz")
    assert len(harness.restore(saved, (jnp.zeros(()),) * 0)[1]) == 4
    harness.main(diagonal_network.STUDY, [*options, "--out", str(broken)])
    name = "diagonal_network.json"
    assert (broken / name).read_text() == (whole / name).read_text() and not list(broken.glob("*.npz"))


def test_a_sweep_ends_where_the_best_has_a_worse_neighbour_on_both_sides(tmp_path: Path) -> None:
    one, made = harness.Sweep(("a", 2), 1e-3), []

    def train(cell: harness.Group) -> dict[str, Any]:
        made.append(cell)
        return {"validation": abs(np.log(cell[2] / 0.04)), "finite": True}

    study = harness.Study(
        None, "x", lambda c, args: harness.swept([one], train), lambda result: "", seeds=(1, 2), partial=True
    )
    result = harness.main(study, ["--out", str(tmp_path)])
    assert harness.best(one.losses(result)) == 0.039 and max(one.losses(result)) == 0.098
    assert len(made) == len(set(made)) == 2 * 6 and not one.missing(result)


def test_the_command_line_lists_all_studies() -> None:
    run = [sys.executable, "-m", "examples.studies"]
    listed = subprocess.run(run, capture_output=True, text=True).stderr.split(": ")[1].strip().split(", ")
    assert {section.name for section in tables.SECTIONS} - NO_STUDY <= set(listed)
    assert all(isinstance(harness.find(name), harness.Study) for name in listed)


# Stored results -----------------------------------------------------------------------------------------

NO_STUDY = {"demo", "grokking_59", "grokking_59_128"}
STUDIES = {section.name: harness.find(section.name) for section in tables.SECTIONS if section.name not in NO_STUDY}
UNFINISHED = {"rates", "starts", "tuned", "twins_benchmark"}
"""Results that lack cells which their studies name."""
SIZES = {"grokking_59": ["--p", "59"], "grokking_59_128": ["--p", "59", "--hidden", "128"]}
SIZES = {name: [*sizes, "--steps", "8000", "--grid-steps", "2500"] for name, sizes in SIZES.items()}
STORED = {
    **{name: (tables.RESULTS, study) for name, study in STUDIES.items()},
    **dict.fromkeys(SIZES, (tables.RESULTS, STUDIES["grokking"])),
    **{study.name: (BENCHMARKS, study) for study in (tuned.STUDY, rates.STUDY)},
}


@pytest.mark.parametrize("name", STORED)
def test_cells_and_settings_that_are_stored_are_those_of_the_study(name: str) -> None:
    """Nothing but versions and machine differs, no cell is stored that the study does not name, and none is missing."""
    folder, study = STORED[name]
    result = json.loads((folder / f"{name}.json").read_text())
    config, args = harness.parse(study, SIZES.get(name, []))
    assert study.named(config) == name
    cells = study.cells(config, args)
    head = harness.header(study, config, args, {} if callable(cells) else cells)
    assert all(head[key] == result[key] for key in ("settings", "arms", "seeds") if key in head and key in result)
    nested = "arms" in result or "grid" in result
    stored = {
        ("cells", name, *seed) for name, cell in result["cells"].items()
        for seed in ([(x,) for x in cell] if nested else [()])
    }
    wanted = set(cells(result)) if callable(cells) else set(cells)
    if "grid" in result:  # only some of the arms are run there
        wanted = {x for x in wanted if x[0] == "cells" and x[1] in result["cells"]}
    assert callable(cells) or stored <= wanted
    assert name in UNFINISHED or all(harness.done(result, address) for address in wanted)


PAGES = {
    "certificates": certificates.page, "counts": counts.page,
    **{f"accelerator_{device}": accelerator.STUDY.page for device in ("h200", "h100_80gb_hbm3", "cpu")},
    "compare_cpu": render.page,
    "tuned": tuned.STUDY.page, "rates": rates.STUDY.page,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_that_of_its_json(name: str) -> None:
    page: Any = PAGES[name]
    assert (BENCHMARKS / f"{name}.md").read_text() == page(json.loads((BENCHMARKS / f"{name}.json").read_text()))


def test_every_result_of_a_benchmark_has_a_page_or_a_reason() -> None:
    """What `fuzz` keeps is read by its next run, which prints it; others are settled."""
    settled = {"packing", "curvature", "metrics", "preflight", "track3", "transfer", "precision", "before_parts",
               "side_by_side", "lora", "orbit", "first_step", "discover", "census_large",
               "unprepared", "exactness"}
    assert {path.stem for path in BENCHMARKS.glob("*.json")} == {*PAGES, *settled, "fuzz"}
    assert all((BENCHMARKS / f"{name}.md").exists() and f"`{name}.md`" in str(benchmarks.__doc__) for name in settled)


def test_the_page_of_results_is_that_of_its_results() -> None:
    assert (tables.RESULTS / "README.md").read_text() == tables.page(tables.RESULTS)


def test_arguments_of_all_studies_can_be_read() -> None:
    for study in STUDIES.values():
        config, args = harness.parse(study, ["--stop-after", "1"])
        assert isinstance(args, argparse.Namespace) and args.stop_after == 1 and config == study.config
