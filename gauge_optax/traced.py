"""Reads the parameters of equations of a jaxpr, whose names differ between versions of JAX."""

from collections.abc import Mapping
from typing import Any


def loop_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a `scan` are constants of its body, and how many it carries from iteration to iteration.

    Args:
      params: the parameters of the equation.

    >>> traced = jax.make_jaxpr(lambda a, x: jax.lax.scan(lambda c, y: (a * c + y, c), 0.0, x))
    >>> (scan,) = traced(2.0, jnp.ones(3)).eqns
    >>> loop_counts(scan.params)
    (1, 1)
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()  # from JAX 0.11 on
    return len(constants), len(carried)
