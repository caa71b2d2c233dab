"""What must not run at once: XLA starts independent work together, and has two reasons to be held back.

Temporaries of one piece of work are free before the next begins; and two batched LAPACK calls at once can each occupy
one of two CPU threads and wait for ever for the other's.

Here: waiting for arrays. Not here: what is done in turn.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from gauge_optax.linalg import real_dtype

T = TypeVar("T")

_SMALL = 2**18  # numbers: below, a copy costs less than the calls it saves


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


def in_turn(make: Callable[..., T], arrays: Sequence[Any], *others: Sequence[Any]) -> tuple[T, ...]:
    """make(arrays[k], …) for every k, one after the other; arrays are pytrees of them."""
    made: list[T] = []
    one = jnp.ones((), real_dtype())
    for own, *rest in zip(arrays, *others, strict=True):
        made.append(make(jax.tree.map(lambda x, gate=one: gate.astype(x.dtype) * x, own), *rest))
        one = after(made[-1])
    return tuple(made)


def alike(make: Callable[[Any, Hashable], T], arrays: Sequence[Any], kinds: Sequence[Hashable]) -> list[T]:
    """make(arrays[k], kinds[k]) for every k, small ones of one kind and shape stacked to one call, calls in turn.

    Args:
      make: takes arrays with any number of leading axes, and gives such.
      arrays: pytrees of arrays.
      kinds: what else makes two of them the same task.

    Returns:
      The results in order.
    """
    groups: dict[Hashable, list[int]] = {}
    for k, (own, kind) in enumerate(zip(arrays, kinds, strict=True)):
        leaves, structure = jax.tree.flatten(own)
        small = sum(x.size for x in leaves) <= _SMALL
        groups.setdefault((kind, structure, tuple(x.shape for x in leaves), -1 if small else k), []).append(k)
    members = list(groups.values())
    stacked = [
        arrays[own[0]] if len(own) == 1 else jax.tree.map(lambda *xs: jnp.stack(xs), *(arrays[k] for k in own))
        for own in members
    ]
    made = in_turn(make, stacked, [kinds[own[0]] for own in members])
    found: dict[int, T] = {}
    for own, result in zip(members, made, strict=True):
        for n, k in enumerate(own):
            found[k] = result if len(own) == 1 else jax.tree.map(lambda x, at=n: x[at], result)
    return [found[k] for k in range(len(arrays))]
