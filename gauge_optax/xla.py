"""What is written for a compiler's sake: tricks that change no number, each with the figure that it is there for.

XLA's CPU backend starts whatever is ready. It makes cheap arrays early and keeps them, and it writes down what two
readers share. Peaks are those of one compiled update on one wide layer (d = 2048, f = 8192), in AdamW's.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def one_after(finished: Any) -> jax.Array:
    """Returns 1.0 with a data dependency on `finished`, so that XLA schedules its users afterwards.

    Args:
      finished: a pytree of arrays.
    """
    one = jnp.ones(())
    firsts = [x[(0,) * jnp.ndim(x)].astype(one.dtype) for x in jax.tree.leaves(finished) if jnp.size(x)]
    # No number exceeds infinity, and comparisons with NaN are false; the compiler does not know that.
    return jnp.where(sum(firsts, start=0.0 * one) > jnp.inf, 2.0, one)


def recomputed_after(finished: Any, arrays: Tree) -> Tree:
    """`arrays`, which XLA makes again once `finished` is known, in what reads them, instead of keeping them until then.

    `quotient(optax.adamw)` with rotary planes and full rotations: 1.29 → 1.23.

    Args:
      finished: a pytree of arrays.
      arrays: a pytree of arrays that are cheap to make.
    """
    one = one_after(finished)
    return jax.tree.map(lambda x: one.astype(x.dtype) * x, arrays)


def not_fused_with_spread(rates: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns `rates`, products with `inverse` that are zero wherever it is.

    The select, which changes no number, keeps XLA:CPU from making one library call of the sum behind `rates` and of the
    product that spreads `rates` over a leaf. That call takes several times as long as the two apart.
    """
    return jax.lax.select(inverse > 0, rates, inverse)


def computed_twice(positive: jax.Array) -> jax.Array:
    """Returns the same positive numbers, as an expression that XLA does not take for one it has computed already.

    XLA:CPU writes an array to memory if two others are computed from it. A leaf times a channel's factor, from which
    `ddc_fused` computes both the slice point and the sums along channels, is cheaper to compute twice: the peak falls
    from 1.37 to 1.27 of AdamW's.
    """
    return jax.lax.select(positive > 0, positive, -positive)


_KEY = 20260


def fixed_noise(number: int, rows: int, columns: int, other: int | jax.Array = 0) -> jax.Array:
    """Fixed pseudo-random numbers in (−1, 1), (rows, columns), others for every `number` and every `other`.

    A hash of the position rather than `jax.random`, whose loop can block for ever beside another one on a CPU.
    """
    x = jnp.arange(rows * columns, dtype=jnp.uint32) + jnp.uint32((_KEY + number * 0x9E3779B9) % 2**32)
    x = x ^ (jnp.uint32(0xC2B2AE35) * jnp.asarray(other, jnp.uint32))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    x = x ^ (x >> 16)
    return (x.astype(jnp.float32) / 2.0**31 - 1.0).reshape(rows, columns)
