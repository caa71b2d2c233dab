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
from tests.sharded import MESHES, MODELS, OPTIMIZERS

ROOT = Path(__file__).parent.parent
LIMIT = 240.0  # seconds; five to fifteen on cores that do nothing else

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


QUOTIENTS = [
    ("quotient_adamw", ""), ("quotient_adamw", "explicit"), ("quotient_adamw", "explicit linear"),
    ("quotient_muon", "explicit"),
]
ROWS = [
    pytest.param(model, optimizer, flags, [*MESHES], marks=pytest.mark.slow, id=f"{model}-{optimizer}-{flags}")
    for model in MODELS for optimizer, flags in (*((name, "") for name in OPTIMIZERS), *QUOTIENTS)
]


@pytest.mark.parametrize(
    ("model", "optimizer", "flags", "layouts"), [("llama", "quotient_adamw", "explicit", ["fsdp_tp"]), *ROWS]
)
def test_eight_devices_equal_one(model: str, optimizer: str, flags: str, layouts: list[str], tmp_path: Path) -> None:
    """Everything is asserted there: parameters, losses, shardings, donation, and what crosses devices.

    A quotient is also saved on one mesh and resumed on another.
    """
    (lines,) = _programs(tmp_path, [model, optimizer, *layouts, *(f"--{x}" for x in flags.split())])
    resumed = ["resumed"] if optimizer.startswith("quotient") else []
    assert [line["layout"] for line in lines] == [*layouts, *resumed]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ddc_adamw", "ddc_muon"])
def test_two_processes_equal_one_device(optimizer: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = ["gpt", optimizer, "fsdp_tp", "--port", port]
    first, second = _programs(tmp_path, [*own, "--rank", "0"], [*own, "--rank", "1"])
    assert len(first) == 1 and second == []


