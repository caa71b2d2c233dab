"""What cannot be a gauge is refused, with what was found, what was expected, where, and what to write instead."""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import gauge_optax as go
from gauge_optax.gauges.gauge import Gauge

FOUR_PARTS = re.compile(r"\w+: [^\n]+\n  found:    \S[^\n]*\n  expected: \S[^\n]*\n  remedy:   \S[^\n]*")


def _refused(make: Callable[[], Any], *said: str) -> None:
    """`make` raises a ValueError of four parts that says all of these."""
    with pytest.raises(ValueError) as error:
        make()
    text = str(error.value)
    assert FOUR_PARTS.fullmatch(text), text
    for words in said:
        assert words in text, (words, text)


HEAD = go.head_rotation({"q": "_ head basis", "k": "_ head basis"})
TORUS = go.rope_torus({"q": "_ head basis", "k": "_ head basis"})
HEADS = {"q": jnp.ones((6, 2, 4)), "k": jnp.ones((6, 2, 4)), "other": jnp.ones((6, 4))}
LOGITS = {"kernel": jnp.ones((6, 7)), "norm": jnp.ones(6), "per_class": jnp.ones(7)}
SHIFT = go.logit_shift({"kernel": "_ vocab"})

CLASHES: dict[str, tuple[list[Gauge], Any, str]] = {
    "channel along a rotation's basis": (
        [HEAD, go.rescale({"q": "_ head channel"}, {"k": "_ head channel"})],
        HEADS,
        "q",
    ),
    "the scale listed first": ([go.rescale({"q": "_ head channel"}, {"k": "_ head channel"}), HEAD], HEADS, "q"),
    "channel along a torus's basis": ([TORUS, go.rescale({"k": "_ _ channel"}, {"other": "_ channel"})], HEADS, "k"),
    "channel along vocab": (
        [SHIFT, go.norm_scale({"per_class": "channel"}, {"kernel": "_ channel"})],
        LOGITS,
        "kernel",
    ),
    "two rotations on the same entries": ([HEAD, go.head_rotation({"k": "_ head basis"})], HEADS, "k"),
    "a torus inside a rotation": ([HEAD, TORUS], HEADS, "q"),
}


@pytest.mark.parametrize("name", CLASHES)
def test_gauges_that_do_not_commute_are_refused(name: str) -> None:
    gauges, params, path = CLASHES[name]
    for gauge in gauges:
        assert gauge.dim(params) > 0  # each alone is fine
    group = go.product(gauges)
    _refused(lambda: go.bind(gauges, params), f"'{path}'", "does not commute", *(g.name for g in gauges))
    for method in (group.coordinates, group.balance, lambda p: group.vertical(p, p)):
        _refused(lambda method=method: method(params), "does not commute")


@pytest.mark.parametrize(
    "gauges",
    [
        [HEAD, go.rescale({"q": "channel _ _"}, {"k": "channel _ _"})],
        [HEAD, go.rescale({"q": "_ head _"}, {"k": "_ head _"})],
        [HEAD, go.scale_invariant({"k": "_ head _"})],
        [SHIFT, go.norm_scale({"norm": "channel"}, {"kernel": "channel _"})],
        [SHIFT, go.scale_invariant({"kernel": "_ _"})],
    ],
    ids=["rows", "heads", "alone", "features", "whole"],
)
def test_gauges_that_commute_are_taken(gauges: list[Gauge]) -> None:
    group = go.product(gauges)
    assert group.dim(HEADS | LOGITS) == sum(gauge.dim(HEADS | LOGITS) for gauge in gauges)
    assert go.bind(gauges, HEADS | LOGITS)


def test_disjoint_halves_of_a_leaf_take_a_rotation_each() -> None:
    halves = [go.head_rotation({"q": f"_ head basis={span}"}) for span in ("0:2", "2:4")]
    assert go.bind(halves, HEADS)


@pytest.mark.parametrize("axes", ["_ head basis=0:3", "_ basis _"])
def test_an_odd_rotary_axis_is_refused(axes: str) -> None:
    gauge = go.rope_torus({"q": axes})
    _refused(lambda: gauge.dim({"q": jnp.ones((6, 3, 4))}), "rope_torus", "odd", "'q'", "3")


@pytest.mark.parametrize("pairing", ["Half", "neighbours", "", None])
def test_an_unknown_pairing_is_refused(pairing: Any) -> None:
    _refused(lambda: go.rope_torus({"q": "_ head basis"}, pairing), "rope_torus", repr(pairing), "'interleaved'")


@pytest.mark.parametrize("degree", [0, -1, -0.5, float("nan"), float("inf"), "2", None, True])
def test_a_degree_that_is_no_positive_number_is_refused(degree: Any) -> None:
    _refused(lambda: go.rescale({"up": "_"}, {"down": "_"}, degree=degree), "rescale", "degree", repr(degree))


def test_cyclic_scales_are_refused() -> None:
    """Three matrices, every one shared by two gauges: no channel can be read off a framed block."""
    ring = [go.rescale({f"w{k}": "_ channel"}, {f"w{(k + 1) % 3}": "channel _"}) for k in range(3)]
    params = {f"w{k}": jnp.ones((4, 4)) for k in range(3)}
    for gauge in ring:
        assert gauge.dim(params) == 4
    group = go.product(ring)
    _refused(lambda: group.coordinates(params), "cyclic", "'w0'")
    assert go.product(ring[:2]).coordinates(params)


@pytest.mark.parametrize("stranger", [3, "rescale", None, {"up": "_"}, go.rescale])
def test_a_product_of_something_else_is_refused(stranger: Any) -> None:
    _refused(lambda: go.product([HEAD, stranger]), "product", "not a gauge")


@pytest.mark.parametrize("stranger", [{"q": "_ head"}, {"q": "_ head _"}, {"q": "_ basis=1 head"}])
def test_a_block_without_its_own_axis_is_refused(stranger: dict[str, str]) -> None:
    _refused(lambda: go.head_rotation(stranger).dim(HEADS), "head_rotation", "basis")


def test_a_shift_without_vocab_is_refused() -> None:
    _refused(lambda: go.logit_shift({"kernel": "_ _"}).dim(LOGITS), "logit_shift", "vocab", "'kernel'")


def test_rope_linear_answers_for_its_own_planes() -> None:
    params = {"query": jnp.ones((4, 3)), "key": jnp.ones((4, 3))}
    with pytest.raises(ValueError, match="rope_linear: odd basis at 'query'"):
        go.rope_linear({"query": "_ basis"}, {"key": "_ basis"}).dim(params)


def test_two_ranges_of_a_leaf_cannot_share_a_shift() -> None:
    gauge = go.logit_shift({"kernel": ("_ vocab=0:3", "_ vocab=3:6")})
    _refused(lambda: gauge.dim(LOGITS), "two ranges of vocab", "one logit_shift per range")
    two = [go.logit_shift({"kernel": f"_ vocab={a}:{b}"}) for a, b in ((0, 3), (3, 7))]
    assert go.product(two).dim(LOGITS) == 12
