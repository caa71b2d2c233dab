"""What must not run at once: XLA starts independent work together, and has two reasons to be held back.

Temporaries of one piece of work are free before the next begins; and two batched LAPACK calls at once can each occupy
one of two CPU threads and wait for ever for the other's.

Here: waiting for arrays. Not here: what is done in turn.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from gauge_optax.linalg import serial as singly  # noqa: F401  the former place of `serial`

T = TypeVar("T")
Tree = TypeVar("Tree")


def after(finished: Any) -> jax.Array:
    """The number 1, not known before the arrays of `finished` are.

    Args:
      finished: a pytree of arrays.

    Returns:
      A scalar to multiply something with that everything of the next component follows from.
    """
    one = jnp.ones(())
    firsts = [x[(0,) * jnp.ndim(x)].astype(one.dtype) for x in jax.tree.leaves(finished) if jnp.size(x)]
    # Nothing exceeds infinity, NaN neither; the compiler does not know that.
    return jnp.where(sum(firsts, start=0.0 * one) > jnp.inf, 2.0, one)


def anew(arrays: Tree, finished: Any) -> Tree:
    """Arrays as they are, not known before others are.

    Those that are cheap to make the compiler makes again then, in what reads them, and need not keep until then.

    Args:
      arrays: a pytree of them.
      finished: another.
    """
    one = after(finished)
    return jax.tree.map(lambda x: one.astype(x.dtype) * x, arrays)


def in_turn(make: Callable[..., T], arrays: Sequence[Any], *others: Sequence[Any]) -> tuple[T, ...]:
    """make(arrays[k], …) for every k, one after the other; arrays are pytrees of them."""
    made: list[T] = []
    for own, *rest in zip(arrays, *others, strict=True):
        made.append(make(anew(own, made[-1]) if made else own, *rest))
    return tuple(made)
