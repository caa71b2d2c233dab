"""Heads whose weights determine no element of a gauge, so that they have no frame, and the sentence about them.

Every other channel or head is read from one of its sides. What a side reads as is the part's own business, in `parts`.
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
def unread(part: Part[Any], x: Arrays) -> jax.Array | None:
    """The number of channels or heads that are not read although they are not zero; None if there can be none."""
    return None


@unread.register
def _of_two_deficient_factors(part: Stretch, x: Arrays) -> jax.Array:
    filled = [jnp.any(side.stacked(x) != 0, (-2, -1)) for side in (part.left, part.right)]
    return jnp.sum(deficient(part, x) & (filled[0] | filled[1]))


def deficient(part: Stretch, x: Arrays) -> jax.Array:
    """Whether both factors of a head have less than full rank, (*shape): they determine no matrix."""
    left, right = (~full_rank(triangular_factor(side.stacked(x))) for side in (part.left, part.right))
    return left & right


def heads_without_frame(
    name: str, s: Slice, elements: Elements, leaves: Mapping[str, Any], but: str
) -> list[ValueError]:
    """Returns one sentence per part with heads that have no frame.

    Args:
      name: the name of the public function, for messages.
      s: the slice.
      elements: what was read at `leaves`, label → element. Heads that were not read have the identity.
      leaves: the parameters by path. Tracers are not checked, because they have no values.
      but: what `name` does with such heads.
    """
    found = []
    for part in (part for part, _, _ in s.sizes if unread.dispatch(type(part)) is not unread.dispatch(object)):
        e = elements[part.label]
        known = [e, *(leaves[block.path] for block in part.blocks)]
        if any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in known):
            continue
        near = np.abs(np.asarray(e - part.identity())) <= roundoff(e.dtype)  # a head that is not read costs no more
        if near.reshape(*part.shape, -1).all(-1).any() and (count := unread(part, s.values(leaves))):
            found.append(no_frame(name, part, int(count), but))
    return found


def no_frame(name: str, part: Part[Any], count: int, but: str) -> ValueError:
    """The sentence about `count` heads of a part that have no frame."""
    paths = " and ".join(f"'{path}'" for path in dict.fromkeys(block.path for block in part.blocks))
    return binding_error(
        name, f"no frame for heads of {paths}",
        f"both factors have less than full rank in {count} of {math.prod(part.shape)} heads",
        f"a factor of full rank in every head: {but}",
        "bind go.head_rotation in place of go.head_linear, or cut the columns that pad the heads off both factors",
    )
