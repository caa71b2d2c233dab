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
import numpy as np
from tqdm import tqdm

from gauge_optax.errors import binding_error

Row = dict[str, Any]
_START = '{"step": '  # of every line


class Recorder:
    """Records named readings at every n-th step, one line of JSON per record.

    Args:
      path: the file, which is made if it does not exist. Its folder must exist.
      readings: name → function. It is called with the arguments that `record` gets behind `step`, and returns a number,
        an array or a tree of them. Any function of `go.measure` may be used.
      every: the number of steps between records; step 0 and the last step are recorded too.
      steps: the number of steps of the run.
      progress: whether to show a progress bar, with the latest readings that are single numbers.

    Raises:
      ValueError: `every` that is no positive integer; a file with other readings, or with another `every`.

    A run that starts again keeps the lines of the file and adds only missing ones. If a run is killed and started
    again, the file is therefore the same as without the interruption. An incomplete last line is dropped.

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
        if not isinstance(every, int) or every < 1:
            raise binding_error("Recorder", "a cadence that is no number of steps", repr(every), "an integer from 1",
                                "write every=50")
        if "step" in readings:
            raise binding_error("Recorder", "a reading named 'step'", ", ".join(readings), "other names than 'step'",
                                "give it another name: every row has its step under this one")
        self.path, self.readings, self.every, self.steps = Path(path), dict(readings), every, steps
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
        begun = all_due.index(due[0]) if due and due[0] in all_due else 0  # a run that began at a checkpoint
        if due != all_due[begun : begun + len(due)]:
            raise self._of_another_run(f"steps {due[:4]}")
        if whole < len(text):
            self.path.write_text(text[:whole])
        return rows

    def _of_another_run(self, found: str) -> ValueError:
        return binding_error(
            "Recorder", f"'{self.path}' is of another run", found,
            f"{['step', *self.readings]} every {self.every} steps", "delete the file, or give another path",
        )

    def _due(self) -> Iterator[int]:
        yield from (step for step in range(self.steps + 1) if step % self.every == 0 or step == self.steps)

    @property
    def last(self) -> int:
        """The last recorded step; −1 before the first record. To resume from it, save a checkpoint at this step."""
        return self.rows[-1]["step"] if self.rows else -1

    def run(self, start: int = 0) -> Iterator[int]:
        """Yields the number of updates made so far, from `start` to `steps`, and shows a progress bar.

        Call `record` with each of these numbers, and then make the next update. After the last number, make no update.

        Args:
          start: the step of the checkpoint from which the run resumes.
        """
        with tqdm(total=self.steps, initial=start, desc=self.path.stem, disable=not self.progress) as self._bar:
            for step in range(start, self.steps + 1):
                yield step
                self._bar.update(step < self.steps)
        self._bar = None

    def record(self, step: int | np.integer[Any] | jax.Array, *args: Any) -> Row | None:
        """Takes the readings, if they are due at this step and not in the file yet.

        Args:
          step: the number of updates so far, an integer or an array of one.
          *args: the arguments of all readings, such as the parameters.

        Returns:
          The row, with arrays as lists; None if no record was due.

        Raises:
          ValueError: a step that is no integer; a reading that is no number.
        """
        try:
            step = operator.index(step)  # JSON has no integers of NumPy or JAX
        except TypeError as error:
            raise binding_error("Recorder", "a step that is no integer", repr(step), "the number of updates so far",
                                "write recorder.record(int(step), params)") from error
        if step <= self.last or not (step % self.every == 0 or step == self.steps):
            return None
        row: Row = {"step": step} | {name: _plain(name, read(*args)) for name, read in self.readings.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        if self._bar is not None:
            self._bar.set_postfix({k: f"{x:.3g}" for k, x in row.items() if isinstance(x, float)}, refresh=False)
        return row


def _plain(name: str, value: Any) -> Any:
    """Converts a reading for JSON: arrays to numbers or lists, and a NamedTuple or `Figures` to a dict."""
    if hasattr(value, "_asdict"):
        named = value if hasattr(value, "keys") else value._asdict()
        return {key: _plain(name, x) for key, x in named.items()}
    try:
        plain = jax.tree.map(
            lambda x: np.asarray(x).tolist() if hasattr(x, "dtype") or isinstance(x, float) else x, value
        )
        json.dumps(plain)
    except TypeError as error:  # such as of complex numbers and of typed PRNG keys
        raise binding_error(
            "Recorder", f"a reading that is no number, '{name}'", str(error).splitlines()[0],
            "real numbers, arrays or trees of them", "record the absolute value, or both parts",
        ) from error
    return plain
