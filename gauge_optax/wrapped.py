"""What an optimizer holds behind Optax's wrappers, which keep what they wrap in closures and say nothing of it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from gauge_optax.transformation import GaugeTransformation, Preflight

_MOST_NESTED = 12  # closures within closures


def transformations_of(tx: Any) -> list[GaugeTransformation]:
    """The outermost transformations of this library that an optimizer consists of, in the order of appearance."""
    found: dict[int, GaugeTransformation] = {}

    def keep(thing: Any) -> bool:
        if isinstance(thing, GaugeTransformation):
            found.setdefault(id(thing), thing)
        return isinstance(thing, GaugeTransformation)

    walk(tx, keep)
    return list(found.values())


def preflight_of(inner: Any) -> Preflight:
    """What the transformations of this library inside an optimizer have to say before training."""

    def preflight(params: Any) -> list[str | ValueError]:
        return [said for held in transformations_of(inner) for said in held.preflight(params)]

    return preflight


def wrapped_by(tx: Any) -> list[Any]:
    """The optimizers inside the quotients of an optimizer, in the order of appearance."""
    found: dict[int, Any] = {}

    def keep(thing: Any) -> bool:
        inner = getattr(thing, "inner", None) if isinstance(thing, GaugeTransformation) else None
        if inner is not None:
            found.setdefault(id(inner), inner)
        return inner is not None

    walk(tx, keep)
    return list(found.values())


def walk(tx: Any, keep: Callable[[Any], bool]) -> None:
    """Calls a function with everything that an optimizer holds.

    Args:
      tx: the optimizer.
      keep: thing → whether to leave out what that thing holds itself.
    """
    visited: set[int] = set()

    def look(thing: Any, depth: int) -> None:
        if depth > _MOST_NESTED or id(thing) in visited:
            return
        visited.add(id(thing))
        if keep(thing):
            return
        if isinstance(thing, list | tuple):
            inside = list(thing)
        elif isinstance(thing, Mapping):
            inside = list(thing.values())
        elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            inside = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
        else:
            inside = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
            # Functions of this library, decorated ones, partials, bound methods, MultiSteps hold what they call here.
            names = ("made_by", "__wrapped__", "func", "args", "keywords", "__self__", "_opt")
            inside += [*(getattr(thing, name, None) for name in names), _injected(thing)]
        for item in inside:
            look(item, depth + 1)

    look(tx, 0)


def _injected(thing: Any) -> Any:
    """The optimizer that `optax.inject_hyperparams` makes at each step, with its first numbers; None for other things.

    Only a factory is held there, and the `init` beside it holds the numbers.
    """
    names = getattr(getattr(thing, "__code__", None), "co_freevars", ())
    if not {"inner_factory", "numeric_hps", "other_hps", "sched_hps"} <= set(names):
        return None
    held = dict(zip(names, (cell.cell_contents for cell in thing.__closure__), strict=True))
    scheduled = {name: schedule(schedule.init()) for name, schedule in held["sched_hps"].items()}
    return held["inner_factory"](**held["other_hps"], **held["numeric_hps"], **scheduled)
