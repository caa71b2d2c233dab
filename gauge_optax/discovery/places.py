"""Maps each place of a rearranged array to the entry of the parameter that stands there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gauge_optax.discovery.spaces import equal_runs

FREE = -(2**58)  # added where no entry stands


class Places(NamedTuple):
    """Which entry stands at each place of an array: a first one, and how the number changes along each axis.

    Attributes:
      base: the number at the places where nothing is added.
      steps: per axis, what each index adds; far below zero where no entry stands.

    >>> moved = Places.of((2, 3)).reshape((3, 2)).take(0, 1)
    >>> moved.numbers()
    array([2, 3])
    """

    base: int
    steps: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Places:
        """All entries in order."""
        strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
        return cls(0, tuple(np.arange(n) * stride for n, stride in zip(shape, strides, strict=True)))

    @classmethod
    def found(cls, numbers: np.ndarray) -> Places | None:
        """The places of an array of numbers; None where its axes do not change them independently."""
        at = np.unravel_index(int((numbers >= 0).argmax()), numbers.shape) if numbers.ndim else ()
        base = int(numbers[at]) if numbers.size and numbers[at] >= 0 else FREE
        lines = [numbers[tuple(slice(None) if j == k else at[j] for j in range(numbers.ndim))]
                 for k in range(numbers.ndim)]
        made = cls(base, tuple(np.where(line < 0, FREE, line - base) for line in lines))
        return made if base < 0 or np.array_equal(made.numbers(), np.maximum(numbers, -1)) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return tuple(map(len, self.steps))

    def numbers(self, axes: Iterable[int] | None = None) -> np.ndarray:
        """The numbers as an array, -1 where no entry stands, along some axes or all."""
        total = np.full((1,) * len(self.steps), self.base)
        for k in range(len(self.steps)) if axes is None else axes:
            total = total + self.steps[k].reshape([-1 if j == k else 1 for j in range(len(self.steps))])
        return np.maximum(total, -1)

    def entries(self) -> np.ndarray:
        """The entries that stand somewhere."""
        numbers = self.numbers([k for k, step in enumerate(self.steps) if (step != 0).any()]).ravel()
        return numbers[numbers >= 0]

    def line(self, axis: int) -> np.ndarray:
        """The numbers along an axis."""
        return self.base + self.steps[axis][self.steps[axis] > FREE // 2]

    def held(self) -> Places:
        """Without the indices at which no entry stands."""
        return Places(self.base, tuple(step[step > FREE // 2] for step in self.steps))

    def within(self, others: Sequence[np.ndarray]) -> Places:
        """Spread over longer axes, of which no entry stands where none of another array does."""
        steps = [np.full(len(other), FREE) for other in others]
        for step, other, own in zip(steps, others, self.steps, strict=True):
            step[other > FREE // 2] = own
        return Places(self.base, tuple(steps))

    def take(self, axis: int, index: int) -> Places:
        """One index of an axis, which is dropped."""
        rest = tuple(x for k, x in enumerate(self.steps) if k != axis)
        return Places(self.base + int(self.steps[axis][index]), rest)

    def part(self, axis: int, index: Any) -> Places:
        """Some indices of an axis."""
        return Places(self.base, tuple(x[index] if k == axis else x for k, x in enumerate(self.steps)))

    def parts(self, ranges: Sequence[range]) -> Places:
        """Some indices of every axis."""
        return Places(self.base, tuple(x[np.array(taken, int)] for x, taken in zip(self.steps, ranges, strict=True)))

    def spread(self, shape: Sequence[int]) -> Places:
        """Axes of length one repeated."""
        pairs = zip(self.steps, shape, strict=True)
        return Places(self.base, tuple(np.broadcast_to(x, n) if len(x) == 1 else x for x, n in pairs))

    def at(self, axes: Sequence[int], shape: Sequence[int]) -> Places:
        """Broadcast to `shape`: axis k becomes axis `axes[k]`, as in `jax.lax.broadcast_in_dim`."""
        steps = [np.zeros(n, int) for n in shape]
        for k, x in zip(axes, self.steps, strict=True):
            steps[k] = np.broadcast_to(x, shape[k])
        return Places(self.base, tuple(steps))

    def reshape(self, shape: Sequence[int]) -> Places | None:
        """In another shape, run by run of axes of equal size."""
        base, steps = self.base, list[np.ndarray]()
        for before, after in equal_runs(self.shape, shape):
            run = self.steps[before.start : before.stop]
            if len(before) == len(after) == 1:
                steps += run
            elif after:
                low = -sum(min(0, int(x[x > FREE // 2].min(initial=0))) for x in run)
                made = Places.found(Places(low, run).numbers().reshape([shape[k] for k in after]))
                if made is None:
                    return None
                base, steps = base + made.base - low, [*steps, *made.steps]
            else:
                base += int(sum(x[0] for x in run))
        return Places(base, tuple(steps))


def varying(ids: Places, axis: int, shape: Sequence[int]) -> list[int]:
    """The axes of a parameter whose index changes along an axis of an array.

    Args:
      ids: the parameter's entries in the array.
      axis: of the array.
      shape: the parameter's.

    >>> varying(Places.of((2, 3)).reshape((6,)), 0, (2, 3))
    [0, 1]
    """
    line = ids.line(axis)
    at = np.unravel_index(line[line >= 0], shape)
    return [a for a, index in enumerate(at) if len(index) and (index != index[0]).any()]
