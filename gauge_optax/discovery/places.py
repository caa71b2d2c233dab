"""Tracks which entry of a parameter stands at each place of an array that slices, reshapes or broadcasts made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gauge_optax.discovery.spaces import equal_runs

# The step (`Places.steps`) to an index at which no entry of the parameter stands, such as padding. It is so negative
# that the number there is negative too.
FREE = -(2**58)


class Places(NamedTuple):
    """Which entry of a parameter stands at each place (each multi-index) of an array.

    An entry is known by its *number*, its flat index in the parameter. The number at a place is `base` plus one step
    per axis.

    Attributes:
      base: the number at the places where all steps are zero.
      steps: one array per axis: what each index along the axis adds to the number. Where no entry stands it is `FREE`.

    >>> moved = Places.of((2, 3)).reshape((3, 2)).take(0, 1)
    >>> moved.numbers()
    array([2, 3])
    """

    base: int
    steps: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Places:
        """The places in an array that is the parameter itself, of this shape."""
        strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
        return cls(0, tuple(np.arange(n) * stride for n, stride in zip(shape, strides, strict=True)))

    @classmethod
    def found(cls, numbers: np.ndarray) -> Places | None:
        """The `Places` with these numbers (-1 where no entry stands); None if no base and steps add up to them."""
        at = np.unravel_index(int((numbers >= 0).argmax()), numbers.shape) if numbers.ndim else ()
        base = int(numbers[at]) if numbers.size and numbers[at] >= 0 else FREE
        lines = [numbers[tuple(slice(None) if j == k else at[j] for j in range(numbers.ndim))]
                 for k in range(numbers.ndim)]
        made = cls(base, tuple(np.where(line < 0, FREE, line - base) for line in lines))
        return made if base < 0 or np.array_equal(made.numbers(), np.maximum(numbers, -1)) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(map(len, self.steps))

    def numbers(self, axes: Iterable[int] | None = None) -> np.ndarray:
        """The numbers as an array, -1 where no entry stands.

        Args:
          axes: the axes to vary (None: all). Along the others, the array has length 1 and the step is zero.
        """
        total = np.full((1,) * len(self.steps), self.base)
        for k in range(len(self.steps)) if axes is None else axes:
            total = total + self.steps[k].reshape([-1 if j == k else 1 for j in range(len(self.steps))])
        return np.maximum(total, -1)

    def entries(self) -> np.ndarray:
        """The numbers of all entries in the array, flat; entries that repeat along an axis are listed once."""
        numbers = self.numbers([k for k, step in enumerate(self.steps) if (step != 0).any()]).ravel()
        return numbers[numbers >= 0]

    def line(self, axis: int) -> np.ndarray:
        """The numbers along an axis, with a step of zero along all others; indices without an entry are left out."""
        return self.base + self.steps[axis][self.steps[axis] > FREE // 2]

    def held(self) -> Places:
        """The places in the array without those indices, along every axis, at which no entry stands."""
        return Places(self.base, tuple(step[step > FREE // 2] for step in self.steps))

    def within(self, others: Sequence[np.ndarray]) -> Places:
        """Undoes `held`, given the `steps` before it: where these have no entry, the result has none either."""
        steps = [np.full(len(other), FREE) for other in others]
        for step, other, own in zip(steps, others, self.steps, strict=True):
            step[other > FREE // 2] = own
        return Places(self.base, tuple(steps))

    def take(self, axis: int, index: int) -> Places:
        """The places at one index of an axis; the axis is dropped."""
        rest = tuple(x for k, x in enumerate(self.steps) if k != axis)
        return Places(self.base + int(self.steps[axis][index]), rest)

    def part(self, axis: int, index: Any) -> Places:
        """The places at some indices of an axis."""
        return Places(self.base, tuple(x[index] if k == axis else x for k, x in enumerate(self.steps)))

    def parts(self, ranges: Sequence[range]) -> Places:
        """The places at some indices of every axis."""
        return Places(self.base, tuple(x[np.array(taken, int)] for x, taken in zip(self.steps, ranges, strict=True)))

    def spread(self, shape: Sequence[int]) -> Places:
        """The places with axes of length one broadcast to `shape`."""
        pairs = zip(self.steps, shape, strict=True)
        return Places(self.base, tuple(np.broadcast_to(x, n) if len(x) == 1 else x for x, n in pairs))

    def at(self, axes: Sequence[int], shape: Sequence[int]) -> Places:
        """The places broadcast to `shape`: axis k becomes axis `axes[k]`, as in `jax.lax.broadcast_in_dim`."""
        steps = [np.zeros(n, int) for n in shape]
        for k, x in zip(axes, self.steps, strict=True):
            steps[k] = np.broadcast_to(x, shape[k])
        return Places(self.base, tuple(steps))

    def reshape(self, shape: Sequence[int]) -> Places | None:
        """The places in another shape; None where no base and steps describe them."""
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
    """The axes of a parameter along which the index changes if one moves along an axis of an array.

    Args:
      ids: where the parameter's entries stand in the array.
      axis: number of the array's axis.
      shape: the parameter's shape.

    >>> varying(Places.of((2, 3)).reshape((6,)), 0, (2, 3))
    [0, 1]
    """
    line = ids.line(axis)
    at = np.unravel_index(line[line >= 0], shape) if len(shape) else ()  # numpy refuses a parameter without axes
    return [a for a, index in enumerate(at) if len(index) and (index != index[0]).any()]
