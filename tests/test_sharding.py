"""On many devices the optimizers do what they do on one, and leave weights where they are."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.quick import environment
from tests.sharded import MESHES, MODELS, OPTIMIZERS, collectives

ROOT = Path(__file__).parent.parent
LIMIT = 240.0  # seconds; five to fifteen on cores that do nothing else
# What every run of the suite takes; the slow tests take all.
RUNS: dict[tuple[str, str], tuple[str, ...]] = {
    ("gpt", "ddc_adamw"): ("dp", "fsdp", "tp"),
    ("gpt", "ddc_muon_heads"): ("fsdp_tp",),
}


def _programs(out: Path, *arguments: Sequence[str]) -> list[list[dict[str, Any]]]:
    """What `tests.sharded` prints, run with each of these arguments at once; all end when one fails or time is up."""
    command, settings = [sys.executable, "-m", "tests.sharded"], environment()
    files = [(out / f"{k}.out", out / f"{k}.err") for k in range(len(arguments))]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for own, (spoken, complaint) in zip(arguments, files, strict=True):
            with spoken.open("wb") as stdout, complaint.open("wb") as stderr:
                started.append(subprocess.Popen([*command, *own], cwd=ROOT, env=settings, stdout=stdout, stderr=stderr))
        end = time.monotonic() + LIMIT
        while any(p.poll() is None for p in started) and not any(p.poll() for p in started):
            assert time.monotonic() < end, f"no end after {LIMIT:g} s: {[f[1].read_text()[-2000:] for f in files]}"
            time.sleep(0.1)
        failed = [complaint.read_text() for p, (_, complaint) in zip(started, files, strict=True) if p.poll()]
        assert not failed, "\n".join(failed)
    finally:
        for p in started:
            p.kill()
            p.wait()
    # Gloo speaks on the same channel.
    return [[json.loads(s) for s in spoken.read_text().splitlines() if s.startswith("{")] for spoken, _ in files]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "optimizer"), [pytest.param(*run, marks=pytest.mark.slow if "muon" in run[1] else ()) for run in RUNS]
)
def test_eight_devices_equal_one(model: str, optimizer: str, tmp_path: Path) -> None:
    """Everything is asserted there: parameters, losses, shardings, donation, and what crosses devices."""
    layouts = RUNS[model, optimizer]
    (lines,) = _programs(tmp_path, [model, optimizer, *layouts])
    assert tuple(line["layout"] for line in lines) == layouts


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_eight_devices_equal_one_in_every_layout(model: str, optimizer: str, tmp_path: Path) -> None:
    (lines,) = _programs(tmp_path, [model, optimizer, *MESHES])
    assert len(lines) == len(MESHES)


def test_a_quotient_on_an_explicit_mesh_and_resumed_on_another(tmp_path: Path) -> None:
    (lines,) = _programs(tmp_path, ["llama", "quotient_adamw", "fsdp_tp", "--explicit"])
    assert [line["layout"] for line in lines] == ["fsdp_tp", "resumed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "flags"),
    [("quotient_adamw", ""), ("quotient_adamw", "explicit"), ("quotient_adamw", "explicit linear"),
     ("quotient_muon", "explicit")],
)
@pytest.mark.parametrize("model", MODELS)
def test_a_quotient_in_every_layout(model: str, optimizer: str, flags: str, tmp_path: Path) -> None:
    (lines,) = _programs(tmp_path, [model, optimizer, *MESHES, *(f"--{x}" for x in flags.split())])
    assert len(lines) == len(MESHES) + 1


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ddc_adamw", "ddc_muon"])
def test_two_processes_equal_one_device(optimizer: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = ["gpt", optimizer, "fsdp_tp", "--port", port]
    first, second = _programs(tmp_path, [*own, "--rank", "0"], [*own, "--rank", "1"])
    assert len(first) == 1 and second == []


def test_collectives_are_read_off_a_program() -> None:
    program = """
      %p = f32[4,8]{1,0} parameter(0), sharding={devices=[8,1]<=[8]}
      %all-gather.1 = f32[32,8]{1,0} all-gather(%p), channel_id=1, dimensions={0}
      %all-reduce.3 = (f32[], s32[3,5]{1,0}) all-reduce(%a, %b), channel_id=2, to_apply=%add
      %ag = (f32[2]{0}, f32[16]{0}) all-gather-start(%c), channel_id=3
      %done = f32[16]{0} all-gather-done(%ag)
      ROOT %s = bf16[7]{0} slice(%all-gather.1), metadata={op_name="all-gather(x)"}
    """
    assert collectives(program) == [("all-gather", 256), ("all-reduce", 15), ("all-gather", 16)]
