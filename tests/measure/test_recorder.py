"""`Recorder`: a run that is killed at any moment and started again leaves the file of an unbroken one."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.refusals import refused
from tests.twins import stepper

GAUGE = go.rescale({"up": "_ channel"}, {"down": "channel _"})
START = {"up": jnp.ones((2, 3)), "down": jnp.full((3, 2), 0.5)}
TX = go.quotient(optax.adamw(0.05), GAUGE)


def loss(p: Any) -> jax.Array:
    return jnp.sum((jax.nn.relu(jnp.array([1.0, 2.0]) @ p["up"]) @ p["down"] - 1.0) ** 2)


def recorder(path: Path, every: Any = 3) -> go.measure.Recorder:
    readings = {
        "loss": loss, "drift": lambda p: go.measure.drift(START, p, GAUGE)[0][""],
        "norms": lambda p: go.measure.slice_norms(p, p, p, GAUGE),
    }
    return go.measure.Recorder(path, readings, every, 10, progress=False)


def train(record: go.measure.Recorder, stop: int = 99) -> None:
    params, state, step = START, TX.init(START), stepper(TX, loss)
    for number in record.run():
        record.record(number, params)
        if number == stop:
            return
        params, state, _ = step(params, state)


def test_a_run_from_a_checkpoint_goes_on_and_its_steps_may_be_arrays(tmp_path: Path) -> None:
    steps: list[list[Any]] = [[np.int64(3), jnp.int32(6)], [jnp.asarray(9), 10]]
    for part in steps:  # the second recorder finds a file that begins at step 3
        record = go.measure.Recorder(tmp_path / "run", {"a": float}, 3, 10, progress=False)
        assert all(record.record(step, 1.0) for step in part)
    assert [row["step"] for row in record.rows] == [3, 6, 9, 10]
    behind = go.measure.Recorder(tmp_path / "gap", {"a": float}, 3, 10, progress=False)
    assert behind.record(3, 1.0)
    with refused("no record of step 6", "a record of step 9 after that of step 3"):
        behind.record(9, 1.0)  # the file could not be read again
    with refused("a step that is no integer", "2.5"):
        record.record(2.5, 1.0)  # type: ignore[arg-type]
    with refused("a step after the last of the run", "step 11", "the number of all steps"):
        record.record(11, 1.0)
    assert next(record.run(jnp.int32(4))) == 4  # the step of a restored state
    for start in (2.5, True):
        with refused("bad start", f"start={start}"):
            next(record.run(start))  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [0, 4, 9])
@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_killed_run_ends_with_the_same_file(tmp_path: Path, stop: int, cut: int) -> None:
    """With records at the cadence and at both ends; a file of another run is refused."""
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    record = recorder(whole)
    train(record)
    assert [row["step"] for row in record.rows] == [0, 3, 6, 9, 10]
    assert record.rows[-1]["loss"] < record.rows[0]["loss"] and len(record.rows[0]["drift"]) == 3
    assert set(record.rows[0]["norms"]["update_norm"]) == {"up", "down"}
    train(recorder(killed), stop)
    killed.write_text(killed.read_text()[: len(killed.read_text()) - cut])  # killed while it wrote
    train(recorder(killed))
    assert killed.read_text() == whole.read_text()
    assert recorder(killed).rows == record.rows
    with refused("of another run", "delete the file"):
        recorder(whole, every=4)
    with refused("of another run"):
        go.measure.Recorder(whole, {"norm": jnp.sum}, 3, 10)
    with refused("a reading named 'step'"):
        go.measure.Recorder(whole, {"step": jnp.sum}, 3, 10)
    for every in (0, True):
        with refused("bad every"):
            recorder(tmp_path / "other.jsonl", every=every)
    assert recorder(whole, every=np.int64(3)).rows == record.rows
    for readings in ([jnp.sum], {1: jnp.sum}, {"sum": 3.0}):
        with refused("readings that are no functions by name"):
            go.measure.Recorder(whole, readings, 3, 10)  # type: ignore[arg-type]


def _taken(path: Path, reading: Any, every: int, steps: int) -> Any:
    record = go.measure.Recorder(path, {"a": reading}, every, steps, progress=False)
    first, *_ = [record.record(step, 1.0) for step in record.run()]
    return first


@pytest.mark.parametrize(("every", "steps", "said"), [
    (3, 20, "found:    a last record of step 10.*delete the last line"), (3, 7, "longer run.*pass steps=10"),
    (2, 10, "a record of step 3 in line 2.*every 2 steps"), (3, -1, "bad steps"),
])
def test_a_file_of_other_steps_is_refused_for_its_reason(tmp_path: Path, every: int, steps: int, said: str) -> None:
    _taken(tmp_path / "run", float, 3, 10)
    with refused(f"(?s){said}"):
        _taken(tmp_path / "run", float, every, steps)
    text = (tmp_path / "run").read_text().splitlines(keepends=True)
    (tmp_path / "run").write_text("".join(text[:-1]))
    _taken(tmp_path / "run", float, 3, 20)  # as the first message says


@pytest.mark.parametrize("reading", ["text", None, {"a": None}, 1j, {("a", "b"): 1.0, "a/b": 2.0}], ids=repr)
def test_what_is_no_number_is_refused(tmp_path: Path, reading: Any) -> None:
    with refused("a reading that is no number, 'a'"):
        _taken(tmp_path / "run", lambda x: reading, 1, 1)


def test_a_table_of_rates_is_a_reading_and_is_read_as_it_was_returned(tmp_path: Path) -> None:
    table = go.measure.rate_table(jnp.logspace(0, -2, 30), {"mlp": {"rank": jnp.ones(30)}})
    row = _taken(tmp_path / "run", lambda x: (table, {1: x}), 1, 0)
    assert row["a"][0]["mlp/rank"]["reason"] == "values do not fall" and row["a"][1] == {"1": 1.0}
