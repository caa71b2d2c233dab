"""Records measurements of a training run at every n-th step, as lines of JSON. A killed run can continue its file.

This module reads parameters between steps, outside `jit`, and writes files. For metrics that are computed inside an
optimizer's update, see `live` (`go.measure.track`).
"""

import json
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from gauge_optax.errors import binding_error
from gauge_optax.transformation import require_count

Row = dict[str, Any]
_START = '{"step": '  # every line of the file starts with it


class Recorder:
    """Records named readings at every n-th step, one line of JSON per record.

    Args:
      path: the file, which is made if it does not exist. Its folder must exist.
      readings: name → function. Each function is called with the arguments that `record` gets after `step`, and returns
        a number, an array or a tree of them. It may return a `NamedTuple`, as functions of `go.measure` do.
      every: the number of steps between records; step 0 and the last step are recorded too.
      steps: the number of steps of the run.
      progress: whether to show a progress bar, with the latest readings that are single numbers.

    Raises:
      ValueError: `every` that is no positive integer; `steps` that is no number of steps; readings that are no
        functions by name; a file with other readings or another `every`; a file with a record after step `steps`; a
        file whose last record was made only because a shorter run ended there.

    A run that starts again keeps the lines of the file and adds only missing ones. If a run is killed and started
    again, the file is therefore the same in the end as without the interruption. An incomplete last line is dropped.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
    >>> recorder = go.measure.Recorder(
    ...     path, {"norm": jnp.linalg.norm}, every=2, steps=4, progress=False
    ... )
    >>> weights = jnp.array([3.0, 4.0])
    >>> for step in recorder.run():
    ...     row = recorder.record(step, weights / (1 + step))
    >>> [round(row["norm"], 3) for row in recorder.rows]
    [5.0, 1.667, 1.0]
    >>> path.read_text().splitlines()[0]
    '{"step": 0, "norm": 5.0}'

    Reference: none; DDC App. C records every 50 steps.
    """

    def __init__(
        self,
        path: str | Path,
        readings: Mapping[str, Callable[..., Any]],
        every: int,
        steps: int,
        *,
        progress: bool = True,
    ) -> None:
        if not isinstance(path, str | Path):
            raise binding_error(
                "Recorder", "bad path", f"path={path!r:.60}", "the path of a file", 'pass path="run.jsonl"')
        require_count("Recorder", "every", every, 1)
        require_count("Recorder", "steps", steps, 0)
        if not isinstance(readings, Mapping) or not all(
                isinstance(name, str) and callable(read) for name, read in readings.items()):
            raise binding_error("Recorder", "readings that are no functions by name", repr(readings)[:60],
                                "a dictionary from names to functions", "write {'norm': optax.tree.norm}")
        if "step" in readings:
            raise binding_error("Recorder", "a reading named 'step'", ", ".join(readings), "other names than 'step'",
                                "give it another name: every row has its step under this one")
        self.path, self.readings, self.every, self.steps = Path(path), dict(readings), int(every), int(steps)
        self.progress = progress
        self.rows: list[Row] = self._kept()
        self._bar: Any = None

    def _kept(self) -> list[Row]:
        """Reads the rows of the file, and removes an incomplete last line from it."""
        if not self.path.exists():
            return []
        rows: list[Row] = []
        text, whole = self.path.read_text(), 0
        names = ["step", *self.readings]
        for line in text.splitlines(keepends=True):
            if not line.endswith("\n") and line.startswith(_START[: len(line)]):
                break
            try:
                row = json.loads(line)
            except ValueError:  # no JSON
                row = None
            if not isinstance(row, dict) or list(row) != names:
                raise self._of_another_run(f"the line {line.strip()[:60]!r}")
            rows.append(row)
            whole += len(line)
        due, all_due = [row["step"] for row in rows], list(self._due())
        begun = all_due.index(due[0]) if due and due[0] in all_due else 0  # the file may begin at a checkpoint's step
        expected = all_due[begun : begun + len(due)]
        if due != expected:
            raise self._of_other_steps(due, expected)
        if whole < len(text):
            self.path.write_text(text[:whole])
        return rows

    def _of_another_run(self, found: str) -> ValueError:
        return binding_error(
            "Recorder", f"'{self.path}' is of another run", found,
            f"{['step', *self.readings]} every {self.every} steps", "delete the file, or give another path",
        )

    def _of_other_steps(self, due: list[Any], expected: list[int]) -> ValueError:
        """The error for a file whose records have the steps `due`, and not `expected`."""
        last, ends = due[-1], all(isinstance(step, int) for step in due)
        if ends and last > self.steps:
            return binding_error(
                "Recorder", f"'{self.path}' is of a longer run", f"a record of step {last}",
                f"none after step {self.steps}", f"pass steps={last}, or give another path",
            )
        if ends and due[:-1] == expected[:-1] and last % self.every:
            return binding_error(
                "Recorder", f"'{self.path}' is of a run that ended at step {last}", f"a last record of step {last}",
                f"one every {self.every} steps, and at step {self.steps}",
                f"to go on, delete the last line of the file; or pass steps={last}, or give another path",
            )
        at = next(k for k, step in enumerate(due) if [step] != expected[k : k + 1])
        return self._of_another_run(f"a record of step {due[at]} in line {at + 1}")

    def _due(self) -> Iterator[int]:
        yield from (step for step in range(self.steps + 1) if step % self.every == 0 or step == self.steps)

    @property
    def last(self) -> int:
        """The last recorded step; −1 before the first record. To resume from it, save a checkpoint at this step."""
        return self.rows[-1]["step"] if self.rows else -1

    def run(self, start: int | np.integer[Any] | jax.Array = 0) -> Iterator[int]:
        """Yields the number of updates made so far, from `start` to `steps`, and shows a progress bar.

        Call `record` with each of these numbers, and then make the next update. After the last number, make no update.

        Args:
          start: the step of the checkpoint from which the run resumes.

        Raises:
          ValueError: a `start` that is no number of steps.
        """
        if isinstance(start, jax.Array) and jnp.issubdtype(start.dtype, jnp.integer):
            start = operator.index(start)  # a checkpoint may store its step as an array
        require_count("Recorder.run", "start", start, 0)
        with tqdm(total=self.steps, initial=int(start), desc=self.path.stem, disable=not self.progress) as self._bar:
            for step in range(int(start), self.steps + 1):
                yield step
                self._bar.update(step < self.steps)
        self._bar = None

    def record(self, step: int | np.integer[Any] | jax.Array, *args: Any) -> Row | None:
        """Calls the functions in `readings` and writes a line, if one is due at this step and not in the file yet.

        Args:
          step: the number of updates so far, an integer or an array of one.
          *args: the arguments of all readings, such as the parameters.

        Returns:
          The row as JSON stores it, with arrays and tuples as lists and keys as strings; None if no record was due.

        Raises:
          ValueError: a step that is no integer, or is after the last step of the run; a record that is due at an
            earlier step but is missing; a reading that contains something other than real numbers, such as a complex
            number. Strings and None are accepted only as fields of a `NamedTuple`, as some functions of `go.measure`
            return it.
        """
        try:
            step = operator.index(step)  # JSON has no integers of NumPy or JAX
        except TypeError as error:
            raise binding_error("Recorder", "a step that is no integer", repr(step), "the number of updates so far",
                                "write recorder.record(int(step), params)") from error
        if step > self.steps:
            raise binding_error(
                "Recorder", "a step after the last of the run", f"step {step}", f"none after step {self.steps}",
                "give Recorder the number of all steps: with such a record, it would refuse its own file")
        if step <= self.last or not (step % self.every == 0 or step == self.steps):
            return None
        due = min((self.last // self.every + 1) * self.every, self.steps)
        if self.rows and due < step:
            raise binding_error(
                "Recorder", f"no record of step {due}", f"a record of step {step} after that of step {self.last}",
                "a record of every step that is due, because the file could not be read again",
                f"resume from a checkpoint of step {due} or before; or delete '{self.path}'")
        taken = {name: _plain(name, read(*args)) for name, read in self.readings.items()}
        line = json.dumps({"step": step} | taken)
        with self.path.open("a") as file:
            file.write(line + "\n")
        row: Row = json.loads(line)
        self.rows.append(row)
        if self._bar is not None:
            self._bar.set_postfix({k: f"{x:.3g}" for k, x in row.items() if isinstance(x, float)}, refresh=False)
        return row


def _plain(name: str, value: Any, field: bool = False) -> Any:
    """Converts a reading for JSON: arrays to numbers or lists, and a NamedTuple, `Figures` or a mapping to a dict.

    Args:
      name: the reading's name, for the message.
      value: the reading, or a part of it.
      field: whether the value is a part of a NamedTuple, which may have texts and None among its numbers.
    """
    if hasattr(value, "_asdict") and not hasattr(value, "keys"):
        return {key: _plain(name, x, True) for key, x in value._asdict().items()}
    if hasattr(value, "keys"):
        keys = ["/".join(map(str, key)) if isinstance(key, tuple) else str(key) for key in value.keys()]
        if len(set(keys)) < len(keys):
            raise _no_number(name, f"two keys that print alike among {', '.join(sorted(keys))}")
        return {key: _plain(name, value[of], field) for key, of in zip(keys, value.keys(), strict=True)}
    if isinstance(value, list | tuple):
        return [_plain(name, x, field) for x in value]
    if field and (value is None or isinstance(value, str)):
        return value
    if value is None or isinstance(value, str):
        raise _no_number(name, repr(value))
    try:
        plain = jax.tree.map(
            lambda x: np.asarray(x).tolist() if hasattr(x, "dtype") or isinstance(x, float) else x, value
        )
        json.dumps(plain)
    except TypeError as error:  # raised, for example, by complex numbers and by typed PRNG keys
        raise _no_number(name, str(error).splitlines()[0]) from error
    return plain


def _no_number(name: str, found: str) -> ValueError:
    return binding_error(
        "Recorder", f"a reading that is no number, '{name}'", found, "real numbers, arrays or trees of them",
        "let its function return numbers; of complex ones, the absolute value or both parts",
    )
