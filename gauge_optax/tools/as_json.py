"""Converts gauge lists to JSON and back, to keep them beside a checkpoint or to pass them to another program."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gauge_optax.discovery.calls import CONSTRUCTORS, Axes, Call
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import BlockGauge, Gauge, Gauges, listed_gauges, product

FORMAT = 1
_REMEDY = "pass what go.tools.to_json returned, with this version of the library or an older one"


def to_json(gauges: Gauges) -> str:
    """Returns a gauge list as JSON: constructors with their arguments. Patterns and axes are as the user wrote them.

    Args:
      gauges: a gauge or a sequence of them. A gauge class of your own has to be a dataclass whose fields are strings,
        numbers, or tuples and dictionaries of them.

    Returns:
      The text. `from_json` makes equal gauges of it.

    Raises:
      ValueError: the class of a gauge is no dataclass, or has a field that JSON cannot hold.

    >>> print(go.tools.to_json(go.logit_shift({"head": "_ vocab"})))
    {
      "format": 1,
      "gauges": [
        {
          "kind": "logit_shift",
          "blocks": {
            "head": "_ vocab"
          }
        }
      ]
    }
    """
    return json.dumps({"format": FORMAT, "gauges": [_entry(gauge) for gauge in listed_gauges(gauges)]}, indent=2)


def from_json(
    text: str, shapes: Mapping[str, Sequence[int]] | None = None, classes: Sequence[type[Gauge]] = ()
) -> list[Gauge]:
    """Makes the gauges that a JSON text describes.

    Args:
      text: the result of `to_json`.
      shapes: leaf name → shape, from any framework. If given, the gauges are bound to these shapes, so that a list that
        does not fit raises an error here.
      classes: your own subclasses of `go.Gauge` that the text may name.

    Returns:
      The gauges, in their order.

    Raises:
      ValueError: the text does not have this format, names a constructor that does not exist, lacks an argument or has
        one of another type, or its gauges do not fit `shapes`; `shapes` that are not tuples of lengths.

    >>> gauges = [go.rescale({"{i}/up": "_ channel"}, {"{i}/down": "channel _"})]
    >>> shapes = {"0/up": (4, 8), "0/down": (8, 4)}
    >>> go.tools.from_json(go.tools.to_json(gauges), shapes) == gauges
    True
    """
    try:
        data = json.loads(text)
        entries = data["gauges"] if data["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError):
        entries = None
    if not isinstance(entries, list):
        raise binding_error(
            "from_json", "no list of gauges", repr(text)[:60], f'JSON with "format": {FORMAT} and "gauges"',
            "pass what go.tools.to_json returned, with a version of this library that knows its format")
    if not isinstance(classes, Iterable) or not all(isinstance(of, type) for of in classes):
        raise binding_error(
            "from_json", "classes= holds what is no class", f"classes={classes!r:.60}",
            "a list of subclasses of go.Gauge", "pass classes=[Mine]")
    own = {of.__name__: of for of in classes}
    gauges = [_gauge(entry, own) for entry in entries]
    if shapes is not None:
        if not isinstance(shapes, Mapping) or not all(_is_shape(shape) for shape in shapes.values()):
            raise binding_error(
                "from_json", "shapes of another form", repr(shapes)[:60], "leaf name → shape",
                "pass {name: x.shape for name, x in leaves.items()}")
        product(gauges).dim({name: jax.ShapeDtypeStruct(tuple(shape), np.float32) for name, shape in shapes.items()})
    return gauges


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, Sequence | np.ndarray) and all(isinstance(n, int | np.integer) and n >= 0 for n in shape)


@functools.singledispatch
def _entry(gauge: Any) -> dict[str, Any]:
    """The JSON entry of a gauge. This default is for a user's class: the name of the class, and its fields."""
    named = dataclasses.fields(gauge) if dataclasses.is_dataclass(gauge) else None
    fields = None if named is None else {field.name: getattr(gauge, field.name) for field in named}
    if fields is None or not _kept(_tuples(json.loads(json.dumps(fields, default=lambda _: None))), fields):
        raise binding_error(
            "to_json", f"the class {type(gauge).__name__} has arguments that JSON does not keep", repr(gauge),
            "a dataclass whose fields are strings, numbers, or tuples and dictionaries of them",
            "write @dataclasses.dataclass(frozen=True) above the class, with tuples in place of lists; or store its "
            "arguments yourself")
    return {"class": type(gauge).__name__, **fields}


def _kept(read: Any, fields: Any) -> bool:
    """Whether fields that were read back from JSON equal the original ones. A comparison that raises counts as no."""
    try:
        return bool(read == fields)
    except (ValueError, TypeError):
        return False


@_entry.register
def _entry_of_blocks(gauge: BlockGauge) -> dict[str, Any]:
    """The JSON entry of a built-in gauge: the constructor's name and arguments. Its `norms` become entries as well."""
    arguments = gauge._arguments()
    norms = {"norms": [_entry(norm) for norm in arguments["norms"]]} if "norms" in arguments else {}
    return {"kind": gauge.name, **arguments, **norms}


def _gauge(entry: Any, own: Mapping[str, type[Gauge]]) -> Gauge:
    """Makes the gauge of one JSON entry; `own` is name → class for the user's classes."""
    if not isinstance(entry, dict) or "class" not in entry:
        return _made(str(entry.get("kind")) if isinstance(entry, dict) else "", lambda: _call(entry).gauge())
    name = str(entry["class"])
    if name not in own:
        raise binding_error(
            "from_json", f"no class {name!r}", f"classes {sorted(own)}", f"{name} among classes=",
            f"write go.tools.from_json(text, classes=[{name}])")
    fields = {field: _tuples(value) for field, value in entry.items() if field != "class"}
    return _made(name, lambda: own[name](**fields))


def _made(name: str, make: Callable[[], Gauge]) -> Gauge:
    """Makes a gauge. If an argument is lacking or has another type, the error contains the gauge's name."""
    try:
        return make()
    except (TypeError, AttributeError) as error:
        raise binding_error(
            "from_json", f"'{name}' cannot be made", str(error).splitlines()[0], f"the arguments of '{name}'",
            _REMEDY) from error


def _tuples(value: Any) -> Any:
    """Converts lists back to tuples, which JSON stores as lists. A gauge must be hashable, and lists are not."""
    if isinstance(value, dict):
        return {name: _tuples(own) for name, own in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _call(entry: Any) -> Call:
    """Returns the constructor call that one JSON entry describes."""
    kind = str(entry.get("kind")) if isinstance(entry, dict) else ""
    parameters = inspect.signature(CONSTRUCTORS[kind]).parameters if kind in CONSTRUCTORS else {}
    unknown = sorted(set(entry) - {"kind", *parameters}) if parameters else []
    if not parameters:
        names = ", ".join(sorted(CONSTRUCTORS))
        raise binding_error("from_json", f"no constructor for {kind!r}", repr(kind), names, _REMEDY)
    if unknown:
        problem, argument = f"'{kind}' takes no '{unknown[0]}'", f"the argument '{unknown[0]}'"
        raise binding_error("from_json", problem, argument, ", ".join(parameters), _REMEDY)
    needed = (name for name, argument in parameters.items() if argument.default is argument.empty)
    if missing := [name for name in needed if name not in entry]:
        problem, found = f"'{kind}' without its '{missing[0]}'", f"only {', '.join(sorted(set(entry) - {'kind'}))}"
        raise binding_error("from_json", problem, found, ", ".join(parameters), _REMEDY)
    roles: dict[str, dict[str, Axes]] = {}
    for name in parameters:
        if isinstance(entry.get(name), dict) and name != "sizes":
            blocks = entry[name].items()
            roles[name] = {path: tuple(axes) if isinstance(axes, list) else axes for path, axes in blocks}
    options = {name: value for name, value in entry.items() if name not in ("kind", "sizes", "norms", *roles)}
    norms = tuple(_call(norm) for norm in entry.get("norms", ()))
    return Call(kind, roles, options, entry.get("sizes", {}), norms)
