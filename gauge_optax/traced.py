"""What an equation of a traced program says in every version of JAX, and functions that are traced once.

What is made of equations stands with the readers.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core


def loop_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a `scan` are constants of its body, and how many it carries from turn to turn.

    >>> traced = jax.make_jaxpr(lambda a, x: jax.lax.scan(lambda c, y: (a * c + y, c), 0.0, x))
    >>> (scan,) = traced(2.0, jnp.ones(3)).eqns
    >>> loop_counts(scan.params)
    (1, 1)
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()  # from JAX 0.11 on
    return len(constants), len(carried)


def traced_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of trees of arrays, traced once for all arguments of the same shapes.

    Tracing a module takes up to seconds, and every `jit`, `grad` and `vmap` of a function traces it again.

    Args:
      fn: a pure function.

    Returns:
      The function, as its equations say it. `inspect.unwrap` gives fn itself.

    >>> calls = []
    >>> twice = traced_once(lambda x: calls.append("traced") or 2.0 * x)
    >>> float(jax.jit(twice)(jnp.ones(()))), float(jax.grad(twice)(jnp.ones(()))), calls
    (2.0, 2.0, ['traced'])
    """
    programs = dict[Any, tuple[core.ClosedJaxpr, Any]]()

    @functools.wraps(fn)
    def function(*args: Any) -> Any:
        flat, structure = jax.tree.flatten(args)
        shapes = tuple((jnp.shape(x), jnp.result_type(x)) for x in flat)
        called_on = (structure, shapes, jax.config.read("jax_enable_x64"))
        if called_on not in programs:
            given = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
            closed, out = jax.make_jaxpr(fn, return_shape=True)(*given)
            programs[called_on] = closed, jax.tree.structure(out)
        closed, outputs = programs[called_on]
        return jax.tree.unflatten(outputs, core.jaxpr_as_fun(closed)(*flat))

    return function
