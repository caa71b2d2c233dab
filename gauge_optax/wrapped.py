"""Finds transformations of this library inside Optax's wrappers, which hold what they wrap only in closures."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from gauge_optax.transformation import GaugeTransformation, Preflight, nothing_to_say


def transformations_of(tx: Any) -> list[GaugeTransformation]:
    """Returns the outermost transformations of this library inside an optimizer, in the order in which they are found.
    """
    found: dict[int, GaugeTransformation] = {}

    def keep(thing: Any) -> bool:
        if isinstance(thing, GaugeTransformation):
            found.setdefault(id(thing), thing)
        return isinstance(thing, GaugeTransformation)

    walk(tx, keep)
    return list(found.values())


def preflight_of(inner: Any) -> Preflight:
    """Returns the preflight of an optimizer: a function of params that says what `go.check` finds before training.

    It joins the findings of all transformations of this library inside the optimizer. If one of them has a preflight of
    its own, the transformations inside it are not asked.
    """

    def preflight(params: Any) -> list[str | ValueError]:
        found: dict[int, Preflight] = {}

        def keep(thing: Any) -> bool:
            own = isinstance(thing, GaugeTransformation) and thing.preflight is not nothing_to_say
            if own:
                found.setdefault(id(thing.preflight), thing.preflight)
            return own

        walk(inner, keep)
        return [said for held in found.values() for said in held(params)]

    return preflight


def wrapped_by(tx: Any, *fields: str) -> list[Any]:
    """Returns what transformations inside an optimizer wrap, in the order in which they are found.

    Args:
      tx: the optimizer.
      *fields: the attributes of `GaugeTransformation` that count: "inner" for quotients, "linked" for links of DDC.
    """
    found: dict[int, Any] = {}

    def keep(thing: Any) -> bool:
        held = [getattr(thing, field) for field in fields] if isinstance(thing, GaugeTransformation) else []
        inside = [inner for inner in held if inner is not None]
        found.update({id(inner): inner for inner in inside})
        return bool(inside)

    walk(tx, keep)
    return list(found.values())


def walk(tx: Any, keep: Callable[[Any], bool]) -> None:
    """Calls a function with every object that an optimizer holds: in containers, closures, partials and attributes.

    Args:
      tx: the optimizer.
      keep: a function of an object. If it returns True, the objects inside this one are not visited.
    """
    visited: dict[int, Any] = {}  # it holds the objects too: the id of one that is gone may become that of another
    left = [tx]
    while left:
        thing = left.pop()
        if id(thing) in visited:
            continue
        visited[id(thing)] = thing
        if keep(thing):
            continue
        if isinstance(thing, list | tuple):
            inside = list(thing)
        elif isinstance(thing, Mapping):
            inside = list(thing.values())
        elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            inside = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
        else:
            inside = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
            # Attributes in which functions of this library, decorated functions, partials, bound methods and
            # `optax.MultiSteps` hold what they call.
            names = ("made_by", "__wrapped__", "func", "args", "keywords", "__self__", "_opt")
            inside += [*(getattr(thing, name, None) for name in names), _injected(thing)]
        left.extend(reversed(inside))


def _injected(thing: Any) -> Any:
    """Returns the optimizer that `optax.inject_hyperparams` would make at the first step; None for other objects.

    `inject_hyperparams` holds no optimizer. Its `init` holds a factory and the hyperparameters to call it with.
    """
    names = getattr(getattr(thing, "__code__", None), "co_freevars", ())
    if not {"inner_factory", "numeric_hps", "other_hps", "sched_hps"} <= set(names):
        return None
    held = dict(zip(names, (cell.cell_contents for cell in thing.__closure__), strict=True))
    scheduled = {name: schedule(schedule.init()) for name, schedule in held["sched_hps"].items()}
    return held["inner_factory"](**held["other_hps"], **held["numeric_hps"], **scheduled)
