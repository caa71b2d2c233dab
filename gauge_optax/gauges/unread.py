"""Finds heads that have no frame, because their weights determine no element of a gauge, and says so in a message.

Only `head_linear` has such heads. It reads a head's matrix from one of two factors, and neither of them determines the
matrix if both have less than full rank. How a head is read otherwise is written in `parts.sizes`.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.errors import binding_error
from gauge_optax.linalg import full_rank, roundoff, triangular_factor
from gauge_optax.parts.part import Arrays, Part
from gauge_optax.parts.sizes import Stretch
from gauge_optax.slice import Elements, Slice


@functools.singledispatch
def unread(part: Part[Any], x: Arrays, seen: Arrays) -> jax.Array | None:
    """The number of channels or heads that are not read although they are not zero; None if there can be none.

    Args:
      part: the part.
      x: the leaves that gauges bind, by path.
      seen: the same leaves as the slice reads them, with zeros in channels that cannot be read (`Slice.seen`). Such a
        channel is a kernel's row behind a norm's scale of zero: the row may have any size in the weights.
    """
    return None


@unread.register
def _of_two_deficient_factors(part: Stretch, x: Arrays, seen: Arrays) -> jax.Array:
    filled = [jnp.any(side.stacked(x) != 0, (-2, -1)) for side in (part.left, part.right)]
    return jnp.sum(deficient(part, seen) & (filled[0] | filled[1]))


def deficient(part: Stretch, x: Arrays) -> jax.Array:
    """Whether both factors of a head have less than full rank, (*shape). Then neither determines the head's matrix."""
    left, right = (~full_rank(triangular_factor(side.stacked(x))) for side in (part.left, part.right))
    return left & right


def heads_without_frame(
    name: str, s: Slice, elements: Elements | None, leaves: Mapping[str, Any], but: str
) -> list[ValueError]:
    """Returns one sentence per part with heads that have no frame.

    Args:
      name: the name of the public function, for messages.
      s: the slice.
      elements: what was read at `leaves`, label → element. Heads that were not read have the identity. None to judge
        the stored factors, without a reading.
      leaves: the parameters by path. Tracers are not checked, because they have no values.
      but: what the public function does with such heads, for the messages.
    """
    found = []
    for part in (part for part, _, _ in s.sizes if unread.dispatch(type(part)) is not unread.dispatch(object)):
        e = part.identity() if elements is None else elements[part.label]
        if not _known(e, *(leaves[block.path] for block in part.blocks)):
            continue
        # A head that was not read has the identity. Only if some head has it, the factors are decomposed.
        near = np.abs(np.asarray(e - part.identity())) <= roundoff(e.dtype)
        if near.reshape(*part.shape, -1).all(-1).any():
            values, read = s.values(leaves), elements is not None and _known(*(leaves[path] for path in s.added))
            if count := unread(part, values, s.seen(values) if read else values):
                found.append(no_frame(name, part, int(count), but))
    return found


def _known(*arrays: Any) -> bool:
    """Whether this process has the values of arrays."""
    return not any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in arrays)


def no_frame(name: str, part: Part[Any], count: int, but: str) -> ValueError:
    """The sentence about `count` heads of a part that have no frame."""
    paths = " and ".join(f"'{path}'" for path in dict.fromkeys(block.path for block in part.blocks))
    return binding_error(
        name, f"heads without full rank in {paths}",
        f"both factors have less than full rank in {count} of {math.prod(part.shape)} heads "
        "(rows behind a scale of zero do not count)",
        f"a factor of full rank in every head: {but}",
        "bind go.head_rotation in place of go.head_linear (report.turning has it so), or cut the columns that pad the "
        "heads off both factors",
    )
