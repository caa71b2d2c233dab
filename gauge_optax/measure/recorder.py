"""Measurements of a training run every so many steps, as lines of JSON that a killed run continues.

This module reads parameters between steps, outside `jit`, and writes files. Metrics that are part of an optimizer's
update are in `motion` and `live` (`go.measure.track`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from gauge_optax.errors import binding_error

Row = dict[str, Any]


class Recorder:
    """Records named readings every so many steps; one line of JSON per record.

    Args:
      path: the file, made if it is not there. Its folder must exist.
      readings: name → a function of what is passed to `record`, to a number, an array or a tree of them. Any function
        of `go.measure` may be used.
      every: the number of steps between records; step 0 and the last step are recorded too.
      steps: the number of steps of the run.
      progress: whether to show a progress bar, with the latest readings that are single numbers.

    Raises:
      ValueError: a cadence that is no positive integer; a file with other readings, or with another cadence.

    A run that starts again keeps the lines of the file and records only what is missing. A run that was killed and
    started again therefore leaves the same file as an unbroken one. A last line that was cut off is dropped.

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

    Reference: none; the cadence of DDC App. C, which reads every 50 steps.
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
        self.path, self.readings, self.every, self.steps = Path(path), dict(readings), every, steps
        self.progress = progress
        self.rows: list[Row] = self._kept()
        self._bar: Any = None

    def _kept(self) -> list[Row]:
        """The rows of the file, which is shortened to its whole lines."""
        if not self.path.exists():
            return []
        rows: list[Row] = []
        text, whole = self.path.read_text(), 0
        for line in text.splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            rows.append(json.loads(line))
            whole += len(line)
        names, due = ["step", *self.readings], [row["step"] for row in rows]
        expected = [step for step in self._due() if step <= max(due, default=-1)]
        if any(list(row) != names for row in rows) or due != expected:
            raise binding_error(
                "Recorder", f"'{self.path}' is of another run", f"{list(rows[0])} at steps {due[:4]}",
                f"{names} every {self.every} steps", "delete the file, or give another path",
            )
        if whole < len(text):
            self.path.write_text(text[:whole])
        return rows

    def _due(self) -> Iterator[int]:
        yield from (step for step in range(self.steps + 1) if step % self.every == 0 or step == self.steps)

    @property
    def last(self) -> int:
        """The last step that is recorded; −1 before the first record. Save a checkpoint beside it to go on there."""
        return self.rows[-1]["step"] if self.rows else -1

    def run(self, start: int = 0) -> Iterator[int]:
        """Yields how many updates the run has made, from `start` to `steps`, and shows a progress bar.

        Call `record` with each of these numbers, and then make the next update. After the last number none is left.

        Args:
          start: the step of the checkpoint from which the run resumes.
        """
        with tqdm(total=self.steps, initial=start, desc=self.path.stem, disable=not self.progress) as self._bar:
            for step in range(start, self.steps + 1):
                yield step
                self._bar.update(step < self.steps)
        self._bar = None

    def record(self, step: int, *args: Any) -> Row | None:
        """Takes the readings, if they are due at this step and not in the file yet.

        Args:
          step: the number of updates so far.
          *args: what the readings are functions of.

        Returns:
          The row, with arrays as lists; None where nothing was due.
        """
        if step <= self.last or not (step % self.every == 0 or step == self.steps):
            return None
        row: Row = {"step": step} | {name: _plain(read(*args)) for name, read in self.readings.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        if self._bar is not None:
            self._bar.set_postfix({k: f"{x:.3g}" for k, x in row.items() if isinstance(x, float)}, refresh=False)
        return row


def _plain(value: Any) -> Any:
    """Numbers and lists in place of arrays; a dict in place of any other tree with names."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    return jax.tree.map(lambda x: np.asarray(x).tolist() if hasattr(x, "dtype") or isinstance(x, float) else x, value)
