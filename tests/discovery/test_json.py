"""Gauge lists written as JSON, which fit or fail on any mapping of names to shapes.

`tests/gauges/test_conformance.py` has that the gauges of the registers come back equal.
"""

import dataclasses
import functools
import json
from typing import Any

import numpy as np
import pytest

import gauge_optax as go
from tests.gauges.user_gauges import Translation
from tests.refusals import each_refused


def test_it_says_the_constructors_own_arguments() -> None:
    gauges = [
        go.norm_scale({"n": "1+ channel"}, {"q": ("channel (qkv=0 _)", "channel (qkv=1 _)")}, sizes={"qkv": 3}),
        go.rope_torus({"q": "_ head basis=0:2+4:6"}, pairing="interleaved")]
    assert json.loads(go.tools.to_json(gauges)) == {"format": 1, "gauges": [
        {"kind": "norm_scale", "scale": {"n": "1+ channel"}, "sizes": {"qkv": 3},
         "into": {"q": ["channel (qkv=0 _)", "channel (qkv=1 _)"]}},
        {"kind": "rope_torus", "blocks": {"q": "_ head basis=0:2+4:6"}, "pairing": "interleaved"}]}


def test_names_of_another_framework() -> None:
    gauges = [go.rescale({"h.{i}.up.weight": "channel _"}, {"h.{i}.down.weight": "_ channel"})]
    shapes = {f"h.{i}.{name}.weight": shape for i in range(2) for name, shape in (("up", (8, 4)), ("down", (4, 8)))}
    kinds: list[Any] = [tuple, list, np.array]
    for kind in kinds:
        assert go.tools.from_json(go.tools.to_json(gauges), {name: kind(x) for name, x in shapes.items()}) == gauges
    own = Rows("a", "b", {"first": (0, 1)})
    assert go.tools.from_json(go.tools.to_json(own), classes=[Rows]) == [own]
    with pytest.raises(ValueError, match="unequal sizes of 'channel'"):
        go.tools.from_json(go.tools.to_json(gauges), shapes | {"h.1.down.weight": (4, 9)})


@dataclasses.dataclass(frozen=True)
class Rows(Translation):
    """A class of the user."""

    rows: Any = (0, (1, 2))


class Bare(Translation):
    """One whose argument is no field."""

    def __init__(self, scale: object) -> None:
        self.__dict__.update(tokens=scale, positions="b")


def read(gauge: object) -> list[go.Gauge]:
    return go.tools.from_json(json.dumps({"format": 1, "gauges": [gauge]}))


NO_SHAPES: list[Any] = [[1], {"up": 4}, {"up": np.ones((4, 5))}, {"up": "45"}]
test_errors = each_refused([
    (lambda: go.tools.from_json("{"), "no list of gauges"),
    (lambda: go.tools.from_json("[]"), "no list of gauges"),
    (lambda: go.tools.from_json('{"format": 2, "gauges": []}'), "no list of gauges"),
    (lambda: read({"kind": "turn"}), "no constructor for 'turn'"),
    (lambda: read({"kind": "rescale", "upp": {}}), "'rescale' takes no 'upp'"),
    (lambda: read({"kind": "logit_shift", "blocks": {"w": "_"}}), "'vocab' out of place in \"_\" of 'w'"),
    (lambda: read({"kind": "rescale", "up": {"w": "_ channel"}}), "'rescale' without its 'down'"),
    (lambda: read({"kind": "logit_shift", "blocks": {"w": 3}}), "malformed axes of 'w'"),
    (lambda: read({"class": ["Rows"]}), r"no class \"\['Rows'"),
    (lambda: go.tools.from_json(None), "no list of gauges"),  # type: ignore[arg-type]
    (lambda: go.tools.from_json(json.dumps({"format": 1, "gauges": [{"class": "Rows"}]}), classes=[Rows]),
     "'Rows' cannot be made"),
    (lambda: go.tools.from_json(go.tools.to_json(Rows("a", "b")), classes="Rows"), "classes= holds what is no class"),  # type: ignore[arg-type]
    (lambda: go.tools.from_json(go.tools.to_json(Rows("a", "b"))), r"(?s)no class 'Rows'.*classes=\[Rows\]"),
    (lambda: go.tools.to_json(Rows("a", "b", [0])), "(?s)Rows has arguments .* not keep.*tuples in place of lists"),
    (lambda: go.tools.to_json(Rows("a", "b", np.ones(3))), "Rows has arguments that JSON does not keep"),
    *((functools.partial(go.tools.from_json, '{"format": 1, "gauges": []}', shapes), "shapes of another form")
      for shapes in NO_SHAPES),
    (lambda: go.tools.to_json(Bare(object())), "Bare has arguments that JSON does not keep"),
])


def test_a_class_of_the_user_is_stored_by_its_fields() -> None:
    rows = Rows("a", "b")
    (back,) = go.tools.from_json(go.tools.to_json(rows), classes=[Rows])
    assert back == rows and hash(back) == hash(rows)
