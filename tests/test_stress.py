"""LAPACK calls of many heads at once end, whatever the number of threads; one module makes them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMIT = 600.0  # seconds; a tenth of it on cores that do nothing else
CASES = [(2, 1, 3), *((threads, devices, 50) for threads in (1, 2, 8) for devices in (1, 8))]


@pytest.mark.slow_rows("*-50")
@pytest.mark.parametrize(("threads", "devices", "times"), CASES)
def test_many_calls_at_once_end(threads: int, devices: int, times: int) -> None:
    options = [f"--threads={threads}", f"--devices={devices}", f"--times={times}"]
    command = [sys.executable, "-m", "tests.stress", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [line["times"] for line in lines] == [times] * 4


def test_one_module_calls_lapack() -> None:
    calls = re.compile(r"(jnp\.linalg\.(?!norm\b|det\b)|scipy\.linalg|lax\.linalg|linalg\.(eigh?|cholesky|lstsq)\b)")
    callers = {
        path.name for path in (ROOT / "gauge_optax").rglob("*.py")
        if "discovery" not in path.parts and any(calls.search(line) for line in path.read_text().splitlines())
    }
    assert callers == {"linalg.py"}
    # `discovery` computes null spaces and exponentials on the host, with NumPy and SciPy.
    searchers = [path.read_text() for path in (ROOT / "gauge_optax" / "discovery").glob("*.py")]
    assert not any(re.search(r"jnp\.linalg|jax\.scipy|jsp\.|lax\.linalg", text) for text in searchers)
