"""Components of one kind, one after the other: unrolled, or as one loop where that costs little memory.

A loop is compiled once, whatever the number of layers, but it needs its layers stacked: a second copy of their leaves.
So only many small layers are looped over. Unrolled, layers share what they are traced to and their kernels, and
compiling still takes a second or two for each.

Here: the choice, stacking and unstacking. Not here: what is done to a component.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Task = tuple[Hashable, Any]
"""What a component shares with others of its kind, and its own arrays."""

_MOST_UNROLLED = 16
_MOST_STACKED = 2**23  # entries of all inputs together


def one_by_one(
    tasks: Sequence[Task], step: Callable[[Any, jax.Array, Any], tuple[Any, jax.Array]]
) -> tuple[list[Any], jax.Array]:
    """step(kind, one, arrays) for every task, each waiting for the one before.

    Args:
      tasks: kinds and arrays; arrays of one kind have one structure.
      step: returns a result and the number 1, known once the result is.

    Returns:
      The results in the order of the tasks, and the last `one`.
    """
    one, results = jnp.ones(()), dict[int, Any]()
    for kind in dict.fromkeys(kind for kind, _ in tasks):
        own = [k for k, (other, _) in enumerate(tasks) if other == kind]
        arrays = [tasks[k][1] for k in own]
        if len(own) > _MOST_UNROLLED and sum(map(_entries, arrays)) <= _MOST_STACKED:
            found, one = _looped(kind, arrays, step, one)
        else:
            found = []
            for x in arrays:
                result, one = step(kind, one, x)
                found.append(result)
        results |= zip(own, found, strict=True)
    return [results[k] for k in range(len(tasks))], one


def _looped(
    kind: Any, arrays: Sequence[Any], step: Callable[[Any, jax.Array, Any], tuple[Any, jax.Array]], one: jax.Array
) -> tuple[list[Any], jax.Array]:
    def body(one: jax.Array, x: Any) -> tuple[jax.Array, Any]:
        result, one = step(kind, one, x)
        return one, result

    one, stacked = jax.lax.scan(body, one, jax.tree.map(lambda *xs: jnp.stack(xs), *arrays))
    return [jax.tree.map(_at(k), stacked) for k in range(len(arrays))], one


def _at(index: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x[index]


def _entries(tree: Any) -> int:
    return sum(jnp.size(x) for x in jax.tree.leaves(tree))
