"""Gauge lists as JSON, to keep beside a checkpoint or to hand to another program, and back.

Here: the format. Not here: what a constructor takes (`gauges`), Python source (`calls`).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gauge_optax.binding import binding_error
from gauge_optax.discovery.calls import CONSTRUCTORS, Axes, Call
from gauge_optax.gauges.base import Gauge, Gauges
from gauge_optax.gauges.product import product

FORMAT = 1


def to_json(gauges: Gauges) -> str:
    """A gauge list as JSON: constructors with their arguments, patterns and axes as they were given.

    Args:
      gauges: a gauge or a sequence of them; of this library's constructors.

    Returns:
      The text; `from_json` gives equal gauges back.

    Raises:
      ValueError: a gauge of a class of your own, whose arguments nobody here knows.

    >>> print(go.to_json(go.logit_shift({"head": "_ vocab"})))
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
    return json.dumps({"format": FORMAT, "gauges": [_entry(part) for part in product(gauges).parts]}, indent=2)


def from_json(text: str, shapes: Mapping[str, Sequence[int]] | None = None) -> list[Gauge]:
    """The gauges of a JSON text.

    Args:
      text: what `to_json` wrote.
      shapes: leaf name → shape, of any framework: the gauges are bound to it, so that a list that does not fit fails
        here.

    Returns:
      The gauges, in their order.

    Raises:
      ValueError: text that is none of this format, a constructor that does not exist, gauges that do not fit `shapes`.

    >>> gauges = [go.rescale({"{i}/up": "_ channel"}, {"{i}/down": "channel _"})]
    >>> go.from_json(go.to_json(gauges), {"0/up": (4, 8), "0/down": (8, 4)}) == gauges
    True
    """
    try:
        data = json.loads(text)
        entries = data["gauges"] if data["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError):
        entries = None
    if not isinstance(entries, list):
        raise binding_error(
            "from_json", "no list of gauges", repr(text[:60]), f'JSON with "format": {FORMAT} and "gauges"',
            "give it what go.to_json wrote, with a version of this library that knows its format")
    gauges = [_call(entry).gauge() for entry in entries]
    if shapes is not None:
        tree = {name: jax.ShapeDtypeStruct(tuple(shape), np.float32) for name, shape in shapes.items()}
        product(gauges).dim(tree)
    return [*gauges]


def _entry(gauge: Gauge) -> dict[str, Any]:
    if gauge.name not in CONSTRUCTORS or not hasattr(gauge, "specs"):
        raise binding_error(
            "to_json", f"a gauge of another class, {type(gauge).__name__}", repr(gauge),
            f"one of {', '.join(sorted(CONSTRUCTORS))}", "write your own class down by hand")
    parameters = inspect.signature(CONSTRUCTORS[gauge.name]).parameters
    roles: dict[str, dict[str, Axes]] = {}
    for spec in gauge.specs:
        own = roles.setdefault(spec.role, {})
        old = own.get(spec.pattern, ())
        own[spec.pattern] = (*((old,) if isinstance(old, str) else old), spec.axes) if old else spec.axes
    options = {
        field.name: getattr(gauge, field.name) for field in dataclasses.fields(gauge)  # type: ignore[arg-type]
        if field.name in parameters and field.name != "sizes"
    }  # fmt: skip
    sizes = dict(getattr(gauge, "sizes", ()))
    named = dict(zip(parameters, roles.values(), strict=False))
    return {"kind": gauge.name, **named, **options, **({"sizes": sizes} if sizes else {})}


def _call(entry: Any) -> Call:
    kind = str(entry.get("kind")) if isinstance(entry, dict) else ""
    parameters = inspect.signature(CONSTRUCTORS[kind]).parameters if kind in CONSTRUCTORS else {}
    strange = sorted(set(entry) - {"kind", *parameters}) if parameters else []
    if not parameters or strange:
        found = f"the argument '{strange[0]}'" if strange else repr(kind)
        expected = ", ".join(parameters) if strange else ", ".join(sorted(CONSTRUCTORS))
        raise binding_error(
            "from_json", f"no constructor for {kind!r}" if not strange else f"'{kind}' takes no '{strange[0]}'",
            found, expected, "give it what go.to_json wrote, with this version of the library or an older one")
    roles = {
        name: {path: tuple(axes) if isinstance(axes, list) else axes for path, axes in entry[name].items()}
        for name in parameters if name in entry and isinstance(entry[name], dict) and name != "sizes"
    }  # fmt: skip
    options = {name: value for name, value in entry.items() if name not in ("kind", "sizes", *roles)}
    return Call(kind, roles, options, entry.get("sizes", {}))
