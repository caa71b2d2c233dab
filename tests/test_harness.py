"""The harness of all studies: a killed study goes on, runs of other settings are refused, and stored results fit."""

import argparse
import dataclasses
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks
from benchmarks import rates, tuned
from examples.studies import diagonal_network, harness, tables
from tests.refusals import refused

BENCHMARKS = Path(tuned.__file__).parent / "results"


# A study that is made up --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes."""

    rate: float = 1.0
    doubled: bool = False


class MadeUp:
    """A study of two arms and two seeds in a folder, which notes what it makes."""

    def __init__(self, folder: Path, partial: bool = False) -> None:
        self.out, self.made = folder, list[str]()
        self.study = harness.Study(
            "help", "tiny", harness.by_seed(["a", "b"], self.cell), lambda result: "a section",
            lambda result, path: path.write_bytes(b"png"), config=Config(), seeds=(1, 2), digits=3, partial=partial)

    def cell(self, c: Config, arm: str, seed: int) -> Any:
        self.made.append(f"{arm}{seed}")
        return {"loss": c.rate * seed / 3.0, "curve": np.arange(3.0) * (1 + c.doubled)}

    def run(self, *options: str) -> Any:
        return harness.main(self.study, ["--out", str(self.out), *options])


def test_a_stopped_study_goes_on_and_is_drawn_when_it_is_done(tmp_path: Path) -> None:
    tiny = MadeUp(tmp_path)
    tiny.run("--stop-after", "3")
    assert tiny.made == ["a1", "a2", "b1"] and not (tmp_path / "tiny.png").exists()
    result = tiny.run()
    assert result["cells"]["b"]["2"] == {"loss": 0.667, "curve": [0.0, 1.0, 2.0]}
    assert json.loads((tmp_path / "tiny.json").read_text()) == result
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.json", "tiny.png"}
    tiny.run("--show", "--rate", "2")  # whatever made it
    assert tiny.made == ["a1", "a2", "b1", "b2"]


def test_runs_of_other_sizes_or_seeds_are_not_mixed(tmp_path: Path) -> None:
    tiny = MadeUp(tmp_path)
    tiny.run()
    with refused("other settings"):
        tiny.run("--rate", "2", "--doubled")
    with refused("other seeds"):
        tiny.run("--seeds", "1")


def test_some_cells_can_be_made_and_a_name_that_fits_none_is_refused(tmp_path: Path) -> None:
    tiny = MadeUp(tmp_path, partial=True)
    tiny.run("--only", "b | *", "--doubled")
    assert tiny.made == ["b1", "b2"] and (tmp_path / "tiny.png").exists()
    with pytest.raises(SystemExit, match=r"no cell is called \['c'\]; cells are \['a \| 1'"):
        tiny.run("--only", "c", "--doubled")


def test_a_cell_that_another_process_makes_is_left_to_it(tmp_path: Path) -> None:
    """A process that holds a cell's lock is met half-way; the other cells are made."""
    tiny = MadeUp(tmp_path)
    with harness._locked(tmp_path / f"tiny-{harness.zlib.crc32(b'a | 2'):08x}.lock") as held:
        assert held and list(tiny.run()["cells"]["a"]) == ["1"]
    tiny.run()
    assert tiny.made == ["a1", "b1", "b2", "a2"]


def test_a_run_that_is_killed_half_way_ends_with_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken, advance = tmp_path / "whole", tmp_path / "broken", harness.advance

    def train(folder: Path) -> str:
        sizes = ["--samples", "16", "--modes", "8", "--nonzero", "2", "--seeds", "42", "--steps", "6"]
        harness.main(diagonal_network.STUDY, [*sizes, "--only", "AdamW | *", "--out", str(folder)])
        return (folder / "diagonal_network.json").read_text()

    def killed_at_the_fourth(*args: Any) -> Any:
        go_on = advance(*args)

        def step(params: Any, state: Any, data: Any, first: int, last: int) -> Any:
            if first == 3:
                raise KeyboardInterrupt
            return go_on(params, state, data, first, last)

        return step

    expected = train(whole)
    monkeypatch.setattr(harness, "SAVE_EVERY", 0.0)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(harness, "advance", killed_at_the_fourth)
        train(broken)
    (saved,) = broken.glob("*.npz")
    assert len(harness.restore(saved, ())[1]) == 4
    assert train(broken) == expected and not list(broken.glob("*.npz"))


def test_a_sweep_ends_where_the_best_has_a_worse_neighbour_on_both_sides(tmp_path: Path) -> None:
    one, made = harness.Sweep(("a", 2), 1e-3), []

    def train(cell: harness.Group) -> dict[str, Any]:
        made.append(cell)
        return {"validation": abs(np.log(cell[2] / 0.04)), "finite": True}

    cells = lambda config, args: harness.swept([one], train)  # noqa: E731
    study = harness.Study(None, "x", cells, lambda result: "", seeds=(1, 2), partial=True)
    result = harness.main(study, ["--out", str(tmp_path)])
    assert harness.best(one.losses(result)) == 0.039 and max(one.losses(result)) == 0.098
    assert len(made) == len(set(made)) == 2 * 6 and not one.missing(result)


# Stored results -----------------------------------------------------------------------------------------

STUDIES = {
    section.name: harness.find(section.name) for section in tables.SECTIONS
    if not section.settled and section.name not in ("demo", "grokking_59", "grokking_59_128")
}
UNFINISHED = {"rates", "starts", "tuned"}
"""Results that lack cells which their studies name."""
SIZES = {"grokking_59": ["--p", "59"], "grokking_59_128": ["--p", "59", "--hidden", "128"]}
SIZES = {name: [*sizes, "--steps", "8000", "--grid-steps", "2500"] for name, sizes in SIZES.items()}
STORED = STUDIES | dict.fromkeys(SIZES, STUDIES["grokking"]) | {"tuned": tuned.STUDY, "rates": rates.STUDY}


def test_the_command_line_lists_all_studies_and_reads_their_arguments() -> None:
    run = [sys.executable, "-m", "examples.studies"]
    listed = subprocess.run(run, capture_output=True, text=True).stderr.split(": ")[1].strip().split(", ")
    assert set(STUDIES) <= set(listed)
    for study in map(harness.find, listed):
        config, args = harness.parse(study, ["--stop-after", "1"])
        assert isinstance(args, argparse.Namespace) and args.stop_after == 1 and config == study.config


@pytest.mark.parametrize("name", STORED)
def test_cells_and_settings_that_are_stored_are_those_of_the_study(name: str) -> None:
    """Nothing but versions and machine differs, no cell is stored that the study does not name, and none is missing."""
    study, folder = STORED[name], BENCHMARKS if name in ("tuned", "rates") else tables.RESULTS
    result = json.loads((folder / f"{name}.json").read_text())
    config, args = harness.parse(study, SIZES.get(name, []))
    assert study.named(config) == name
    cells = study.cells(config, args)
    head = harness.header(study, config, args, {} if callable(cells) else cells)
    assert all(head[key] == result[key] for key in ("settings", "arms", "seeds") if key in head and key in result)
    by_seed = "arms" in result or "grid" in result
    stored = {("cells", arm, *x) for arm, cell in result["cells"].items() for x in (zip(cell) if by_seed else [()])}
    wanted = set(cells(result)) if callable(cells) else set(cells)
    if "grid" in result:  # only some of the arms are run there
        wanted = {x for x in wanted if x[0] == "cells" and x[1] in result["cells"]}
    assert callable(cells) or stored <= wanted
    assert name in UNFINISHED or all(harness.done(result, address) for address in wanted)


PAGES = {name: f"{name}:page" for name in ("certificates", "counts")}
PAGES |= {f"accelerator_{device}": "accelerator:STUDY.page" for device in ("h200", "h100_80gb_hbm3")}
PAGES |= {name: f"{name}:STUDY.page" for name in ("tuned", "rates")}
PAGES |= {"discover": "discover_times:render", "unprepared": "unprepared:render", "compare_cpu": "render:page"}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_that_of_its_json(name: str) -> None:
    page = pkgutil.resolve_name(f"benchmarks.{PAGES[name]}")
    assert (BENCHMARKS / f"{name}.md").read_text() == page(json.loads((BENCHMARKS / f"{name}.json").read_text()))


def test_every_result_of_a_benchmark_has_a_page_or_a_reason() -> None:
    """What `fuzz` keeps is read by its next run, which prints it; others are settled."""
    settled = {"packing", "curvature", "metrics", "preflight", "track3", "transfer", "precision", "before_parts",
               "side_by_side", "lora", "orbit", "first_step", "exactness", "census_large"}
    assert {path.stem for path in BENCHMARKS.glob("*.json")} == {*PAGES, *settled, "fuzz"}
    assert all((BENCHMARKS / f"{name}.md").exists() and f"`{name}.md`" in str(benchmarks.__doc__) for name in settled)


def test_every_result_of_an_example_has_a_section_or_a_page() -> None:
    """Those with a page of their own are settled: it names the commit of their code."""
    pages = {"quantize", "lora_weights", "qwix_weights", "measure_weights", "released"}
    stored = {path.stem for path in tables.RESULTS.glob("*.json")}
    assert stored <= {section.name for section in tables.SECTIONS} | pages
    assert all(re.search("commit [0-9a-f]{7}", (tables.RESULTS / f"{name}.md").read_text()) for name in pages)
    assert (tables.RESULTS / "README.md").read_text() == tables.page(tables.RESULTS)
