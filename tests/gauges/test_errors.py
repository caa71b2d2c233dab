"""What cannot be a gauge is refused, with what was found, what was expected, where, and what to write instead."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from gauge_optax.discovery.report import Report
from gauge_optax.gauges.gauge import Gauge
from tests.refusals import complaint, each_refused
from tests.twins import furthest, normal_like

HEAD = go.head_rotation({"q": "_ head basis", "k": "_ head basis"})
ACROSS = go.rescale({"q": "_ head channel"}, {"k": "_ head channel"})
TORUS = go.rope_torus({"q": "_ head basis", "k": "_ head basis"})
HEADS = {"q": jnp.ones((6, 2, 4)), "k": jnp.ones((6, 2, 4)), "other": jnp.ones((6, 4))}
LOGITS = {"kernel": jnp.ones((6, 7)), "norm": jnp.ones(6), "per_class": jnp.ones(7)}
SHIFT = go.logit_shift({"kernel": "_ vocab"})
# Three matrices, every one shared by two gauges: no channel can be read off a framed block.
RING: list[Gauge] = [go.rescale({f"w{k}": "_ channel"}, {f"w{(k + 1) % 3}": "channel _"}) for k in range(3)]
SQUARES = {f"w{k}": jnp.ones((4, 4)) for k in range(3)}

# Gauges that do not commute, their leaves, and the leaf at which they do not.
CLASHES: dict[str, tuple[list[Gauge], Any, str]] = {
    "channel along a rotation's basis": ([HEAD, ACROSS], HEADS, "q"),
    "the scale listed first": ([ACROSS, HEAD], HEADS, "q"),
    "channel along a torus's basis": ([TORUS, go.rescale({"k": "_ _ channel"}, {"other": "_ channel"})], HEADS, "k"),
    "channel along vocab": (
        [SHIFT, go.norm_scale({"per_class": "channel"}, {"kernel": "_ channel"})], LOGITS, "kernel"),
    "two rotations on the same entries": ([HEAD, go.head_rotation({"k": "_ head basis"})], HEADS, "k"),
    "a torus inside a rotation": ([HEAD, TORUS], HEADS, "q"),
}
TAKEN: dict[str, tuple[list[Gauge], Any]] = {
    "rows": ([HEAD, go.rescale({"q": "channel _ _"}, {"k": "channel _ _"})], HEADS),
    "heads": ([HEAD, go.rescale({"q": "_ head _"}, {"k": "_ head _"})], HEADS),
    "alone": ([HEAD, go.scale_invariant({"k": "_ head _"})], HEADS),
    "features": ([SHIFT, go.norm_scale({"norm": "channel"}, {"kernel": "channel _"})], LOGITS),
    "whole": ([SHIFT, go.scale_invariant({"kernel": "_ _"})], LOGITS),
    "halves": ([go.head_rotation({"q": f"_ head basis={span}"}) for span in ("0:2", "2:4")], HEADS),
    "ranges": ([go.logit_shift({"kernel": f"_ vocab={span}"}) for span in ("0:3", "3:7")], LOGITS),
    "two of a ring": (RING[:2], SQUARES),
}


@pytest.mark.parametrize("name", CLASHES)
def test_gauges_that_do_not_commute_are_refused(name: str) -> None:
    gauges, params, path = CLASHES[name]
    assert all(gauge.dim(params) > 0 for gauge in gauges)  # each alone is fine
    text = complaint(lambda: go.bind(gauges, params))
    assert all(words in text for words in (f"'{path}'", "does not commute", *(gauge.name for gauge in gauges)))
    group = go.product(gauges)
    for method in (group.coordinates, group.balance, lambda p: group.vertical(p, p)):
        assert "does not commute" in complaint(partial(method, params))


@pytest.mark.parametrize("name", TAKEN)
def test_gauges_that_commute_are_taken(name: str) -> None:
    gauges, params = TAKEN[name]
    group = go.product(gauges)
    assert group.dim(params) == sum(gauge.dim(params) for gauge in gauges)
    bound, params = go.bind(gauges, params), normal_like(0, params)
    twin = bound.random_twin(jax.random.key(0), params)
    assert furthest(twin, params) > 0.1 >= 1e3 * furthest(bound.slice_point(twin), bound.slice_point(params))


def _angles(axes: str) -> int:
    return go.rope_torus({"q": axes}).dim({"q": jnp.ones((6, 3, 4))})


def _moved(element: Any) -> Any:
    return go.bind([SHIFT, ACROSS], HEADS | LOGITS).act(element, HEADS | LOGITS)


untyped: Any = go  # for arguments that a type checker refuses
# What is typed, and a pattern of the error.
test_what_cannot_be_a_gauge_is_refused = each_refused({
    "shift without vocab": (
        lambda: go.logit_shift({"kernel": "_ _"}).dim(LOGITS), r"logit_shift: 'vocab' .*'kernel'"),
    "two ranges of one shift": (
        lambda: go.logit_shift({"kernel": ("_ vocab=0:3", "_ vocab=3:6")}).dim(LOGITS),
        r"(?s)two ranges of vocab.*one logit_shift per range"),
    "cycle of scales": (lambda: go.product(RING).coordinates(SQUARES), "(?s)cyclic.*'w0'"),
    "a name of its own axis": (
        lambda: go.rope_torus({"q": "plane basis"}).dim({"q": jnp.ones((6, 4))}), "reserved name 'plane' at 'q'"),
    **{f"an element that is {name}": (
        partial(_moved, element), said)
        for name, element, said in (
            ("too short", ({},), r"(?s)found: +a tuple of 1.*a tuple of 2.*remedy: +take an element"),
            ("a dict", {"": 0.0}, "found: +a dict"),
            ("of another key", ({"": {"kernel": jnp.ones(6)}}, {"i=0": jnp.ones((2, 4))}), r"(?s)no \[''\].*\[''\]"),
            ("of another shape", ({"": {"kernel": jnp.ones(6)}}, {"": 1.0}), r"(?s)\[''\] \(\).*\[''\] \(2, 4\)"),
    )},
    "odd basis of rope_linear": (
        lambda: go.rope_linear({"q": "_ basis"}, {"k": "_ basis"}).dim(dict.fromkeys("qk", jnp.ones((4, 3)))),
        "rope_linear: odd basis at 'q'"),
    **{f"odd {axes}": (partial(_angles, axes), "(?s)rope_torus: odd .*'q'.*3")
       for axes in ("_ head basis=0:3", "_ basis _")},
    **{f"pairing {pairing!r}": (
        partial(untyped.rope_torus, {"q": "_ head basis"}, pairing), f"(?s)rope_torus: .*{pairing!r}.*'interleaved'")
        for pairing in ("Half", "neighbours", "", None)},
    **{f"degree {degree!r}": (
        partial(untyped.rescale, {"up": "_"}, {"down": "_"}, degree=degree), f"(?s)rescale: .*degree.*{degree!r}")
        for degree in (0, -1, -0.5, float("nan"), float("inf"), "2", None, True)},
    "product of a report": (lambda: untyped.product(object.__new__(Report)), "(?s)no gauges.*write report.gauges"),
    **{f"product of {stranger!r:.9}": (partial(untyped.product, [HEAD, stranger]), "element 1 of the list is no gauge")
       for stranger in (3, "rescale", None, {"up": "_"}, go.rescale)},
    **{f"no basis in {axes}": (partial(go.head_rotation, {"q": axes}), "head_rotation: .*basis")
       for axes in ("_ head", "_ head _", "_ basis=1 head")},
})


def test_a_degree_may_be_a_number_of_numpy() -> None:
    up, down = {"up": "_ channel"}, {"down": "channel _"}
    assert repr(untyped.rescale(up, down, np.int64(2))) == repr(go.rescale(up, down, 2))
