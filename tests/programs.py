"""What a function is traced and compiled to: its equations, those of the programs inside it among them; its memory."""

from collections.abc import Iterator
from typing import Any

import jax
import optax

from models import lm
from tests.quick import jit


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation; one with programs of its own comes before theirs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in _programs(equation):
            yield from equations(inner)


def innermost(jaxpr: Any) -> Iterator[Any]:
    """Those that have no program of their own."""
    return (equation for equation in equations(jaxpr) if not any(_programs(equation)))


def primitives(jaxpr: Any) -> list[str]:
    """The primitive of every equation."""
    return [equation.primitive.name for equation in equations(jaxpr)]


def _programs(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for x in value if isinstance(value, tuple | list) else [value]:
            if hasattr(x, "eqns"):
                yield x
            elif hasattr(x, "jaxpr"):
                yield x.jaxpr


def shapes(config: lm.LMConfig) -> Any:
    """Parameters, without arrays."""
    return jax.eval_shape(lambda: lm.params_and_loss(config, jax.random.key(0))[0])


def peak(tx: optax.GradientTransformation, params: Any) -> int:
    """Bytes that a compiled update holds at once, parameters and state donated."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    plan = jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile().memory_analysis()
    return int(sum((
        plan.argument_size_in_bytes, plan.output_size_in_bytes, -plan.alias_size_in_bytes, plan.temp_size_in_bytes,
    )))  # fmt: skip
