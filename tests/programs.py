"""What a function is traced to: its equations, those of the programs inside it among them."""

from collections.abc import Iterator
from typing import Any


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
    """The primitive of every equation; a choice by platform, which the compiler makes, is no `cond` of the program."""
    return [
        "platform_dependent" if equation.params.get("branches_platforms") else equation.primitive.name
        for equation in equations(jaxpr)
    ]


def _programs(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for x in value if isinstance(value, tuple | list) else [value]:
            if hasattr(x, "eqns"):
                yield x
            elif hasattr(x, "jaxpr"):
                yield x.jaxpr
