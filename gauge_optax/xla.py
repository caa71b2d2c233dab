"""What must not run at once: XLA starts independent work together, and has two reasons to be held back.

Temporaries of one piece of work are free before the next begins; and two batched LAPACK calls at once can each occupy
one of two CPU threads and wait for ever for the other's.

Here: waiting for arrays. Not here: what is done in turn.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

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


def singly(make: Callable[[jax.Array], T], matrices: jax.Array) -> T:
    """make(matrices), on CPUs matrix by matrix.

    A LAPACK call for many of them is one of XLA's threads that hands them to the others and waits: when each device has
    one under way, as virtual devices do, there are no others.

    Args:
      make: takes matrices with any number of leading axes, and gives arrays with these.
      matrices: (…, m, n).
    """
    lead, flat = matrices.shape[:-2], matrices.reshape(-1, *matrices.shape[-2:])
    made = jax.lax.platform_dependent(flat, cpu=lambda x: jax.lax.map(make, x), default=make)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), made)


def recomputed_after(finished: Any, arrays: Tree) -> Tree:
    """`anew`, with nothing to wait for where nothing is finished."""
    return anew(arrays, finished) if finished else arrays


_KEY = 20260


def fixed_noise(number: int, rows: int, columns: int) -> jax.Array:
    """Fixed pseudo-random numbers in (−1, 1), (rows, columns), others for every `number`.

    A hash of the position rather than `jax.random`, whose loop can block for ever beside another one on a CPU.
    """
    x = jnp.arange(rows * columns, dtype=jnp.uint32) + jnp.uint32((_KEY + number * 0x9E3779B9) % 2**32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    x = x ^ (x >> 16)
    return (x.astype(jnp.float32) / 2.0**31 - 1.0).reshape(rows, columns)


def apart_from_its_spread(rates: jax.Array, inverse: jax.Array) -> jax.Array:
    """`rates`, which are products with `inverse`, where that is positive.

    Where it is not, the rates are zero already. The select keeps XLA's CPU backend from handing the sum and what it is
    spread over to one library call, which takes several times as long as the two apart.
    """
    return jax.lax.select(inverse > 0, rates, inverse)
